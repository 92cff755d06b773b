/* Base64 as RFC 4648 writes it: A-Z a-z 0-9 + /, padded with =. Uses AVX-512 (VBMI), AVX2 or NEON
 * where the processor has them, chosen once at run time; the same text everywhere. Any thread; no
 * allocation. */
#ifndef BT_BASE_BASE64_H
#define BT_BASE_BASE64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Characters that `bytes` bytes take, padding included. */
static inline size_t bt_base64_length(size_t bytes) {
    return (bytes + 2) / 3 * 4;
}
/* Encodes data [bytes] at out [bt_base64_length(bytes)], which is not terminated; returns the
 * characters written. */
size_t bt_base64(char *out, const void *data, size_t bytes);

/* One text from data that comes in portions of any size: what does not make a group of three bytes
 * is held until the next portion. Zeroed at the start. */
typedef struct bt_base64_stream {
    uint8_t held[2];
    uint8_t held_bytes; /* 0 .. 2 */
} bt_base64_stream;

/* Encodes the groups that are complete at out [bt_base64_length(bytes)]; returns the characters
 * written. */
size_t bt_base64_push(bt_base64_stream *stream, char *out, const void *data, size_t bytes);
/* The last group, if one is open, at out [4]; the stream is as new. */
size_t bt_base64_finish(bt_base64_stream *stream, char *out);

/* The implementations behind it. */
typedef enum bt_base64_path {
    BT_BASE64_PLAIN,
    BT_BASE64_AVX2,
    BT_BASE64_AVX512,
    BT_BASE64_NEON,
} bt_base64_path;
/* As bt_base64 by one of them, for tests. false: not on this machine, and nothing was written. */
bool bt_base64_by(bt_base64_path path, char *out, const void *data, size_t bytes);

#endif
