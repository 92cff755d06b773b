/* UTF-8 as table 3-7 of the Unicode standard and the WHATWG define it: no surrogates, no overlong
 * forms, nothing above U+10FFFF. The only place that knows its byte ranges: JSON, the wire's texts
 * and the tokenizer all ask here.
 *
 * Pure functions over borrowed bytes, from any thread. Text need not end in a zero byte; a zero
 * byte is the character U+0000. What to do about bad bytes (refuse, replace, hold back until more
 * arrive) is the caller's. */
#ifndef BT_BASE_UTF8_H
#define BT_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the sequence that `lead` starts, 1 to 4; 0 for a byte that cannot start one. */
uint32_t bt_utf8_sequence_bytes(uint8_t lead);
/* true when `byte` may stand at `index` (1 to 3) of the sequence that `lead` starts. */
bool bt_utf8_can_follow(uint8_t lead, uint32_t index, uint8_t byte);
/* Bytes of the complete, valid sequence at the start of text [bytes], 1 to 4; 0 when there is none,
 * be it broken, cut off or because bytes is 0. */
size_t bt_utf8_next(const char *text, size_t bytes);
/* Bytes of the longest prefix that is complete, valid UTF-8. */
size_t bt_utf8_valid_prefix(const char *text, size_t bytes);
/* Empty text is valid. */
bool bt_utf8_is_valid(const char *text, size_t bytes);
/* Bytes of the longest prefix that is ASCII. */
size_t bt_utf8_ascii_prefix(const char *text, size_t bytes);
/* Characters that begin in text [bytes], which is a part of UTF-8. */
size_t bt_utf8_count(const char *text, size_t bytes);
/* Reads one code point of valid UTF-8; `text` must hold the whole sequence. Returns its bytes. */
uint32_t bt_utf8_decode(const char *text, uint32_t *code_point_out);
/* Writes the code point (not a surrogate, at most U+10FFFF) and returns its bytes, 1 to 4. */
uint32_t bt_utf8_encode(uint32_t code_point, char text_out[4]);

#endif
