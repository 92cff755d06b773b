/* Base64 of blocks the size of a mask row: libcrypto's encoder, each path of base/base64 and, as
 * the floor, memcpy of as many bytes as the text has. GB/s of input, the best of many passes. */
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/base64.h"
#include "base/clock.h"
#include "base/mem.h"

enum { BYTES_MAX = 16 << 20, PASSES = 40, PASS_BYTES = 16 << 20 };

typedef struct bench {
    uint8_t *data;
    char *text;
    size_t bytes; /* of one block */
} bench;

typedef bool (*encoder)(const bench *b);

static bool by_copy(const bench *b) {
    const size_t length = bt_base64_length(b->bytes);
    memcpy(b->text, b->data, length);
    return true;
}

static bool by_libcrypto(const bench *b) {
    return EVP_EncodeBlock((unsigned char *)b->text, b->data, (int)b->bytes) > 0;
}

static bool by_plain(const bench *b) {
    return bt_base64_by(BT_BASE64_PLAIN, b->text, b->data, b->bytes);
}

static bool by_avx2(const bench *b) {
    return bt_base64_by(BT_BASE64_AVX2, b->text, b->data, b->bytes);
}

static bool by_avx512(const bench *b) {
    return bt_base64_by(BT_BASE64_AVX512, b->text, b->data, b->bytes);
}

static bool by_neon(const bench *b) {
    return bt_base64_by(BT_BASE64_NEON, b->text, b->data, b->bytes);
}

static void measure(const char *name, const bench *b, encoder encode) {
    const bt_clock clock = bt_clock_system();
    const size_t repeats = PASS_BYTES / b->bytes;
    uint64_t best = UINT64_MAX;
    for (int pass = 0; pass < PASSES; pass++) {
        const uint64_t start = bt_clock_now_us(&clock);
        for (size_t i = 0; i < repeats; i++) {
            if (!encode(b)) return;
        }
        const uint64_t took = bt_clock_now_us(&clock) - start;
        best = took < best ? took : best;
    }
    printf("%9zu bytes  %-10s %7.2f GB/s\n", b->bytes, name,
           (double)(repeats * b->bytes) / (double)best / 1e3);
}

int main(void) {
    static const size_t SIZES[] = {33, 4 * 1000, 4 * 8192, BYTES_MAX};
    bench b = {.data = bt_malloc(BYTES_MAX * 2), .text = bt_malloc(BYTES_MAX * 2)};
    BT_ASSERT(b.data != NULL && b.text != NULL);
    for (size_t i = 0; i < BYTES_MAX * 2; i++) {
        b.data[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    memset(b.text, 0, BYTES_MAX * 2);
    for (size_t i = 0; i < BT_ARRAY_COUNT(SIZES); i++) {
        b.bytes = SIZES[i];
        measure("memcpy", &b, by_copy);
        measure("libcrypto", &b, by_libcrypto);
        measure("plain", &b, by_plain);
        measure("avx2", &b, by_avx2);
        measure("avx512", &b, by_avx512);
        measure("neon", &b, by_neon);
    }
    bt_free(b.data);
    bt_free(b.text);
    return 0;
}
