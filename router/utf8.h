/* UTF-8 as the Unicode standard and the WHATWG define it: no surrogates, no overlong forms, nothing
 * above U+10FFFF. Pure functions over borrowed bytes. */
#ifndef BT_ROUTER_UTF8_H
#define BT_ROUTER_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the sequence that `lead` starts, 1 to 4; 0 for a byte that cannot start one. */
uint32_t utf8_sequence_bytes(uint8_t lead);
/* true when `byte` may stand at `index` (1 to 3) of the sequence that `lead` starts. */
bool utf8_can_follow(uint8_t lead, uint32_t index, uint8_t byte);
/* Bytes of the longest prefix that is complete, valid UTF-8. */
size_t utf8_valid_prefix(const char *text, size_t bytes);
bool utf8_is_valid(const char *text, size_t bytes);
/* Bytes of the longest prefix that is ASCII. */
size_t utf8_ascii_prefix(const char *text, size_t bytes);
/* Reads one code point of valid UTF-8; `text` must hold the whole sequence. Returns its bytes. */
uint32_t utf8_decode(const char *text, uint32_t *code_point_out);
/* Writes the code point (not a surrogate, at most U+10FFFF) and returns its bytes, 1 to 4. */
uint32_t utf8_encode(uint32_t code_point, char text_out[4]);

#endif
