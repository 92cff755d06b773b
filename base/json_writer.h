/* Growable text with a limit, and JSON appended to it. Appending never fails by itself: when the
 * limit is passed or memory is out, `has_failed` stays set, nothing more is added and the owner
 * looks at it once at the end. */
#ifndef BT_BASE_JSON_WRITER_H
#define BT_BASE_JSON_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/compiler.h"

typedef struct bt_text {
    char *bytes; /* always terminated once something was added; NULL before */
    size_t used;
    size_t capacity;
    size_t bytes_max;
    bool has_failed;
    bt_block_pool *pool; /* NULL: the memory is of malloc */
    bt_block *block;     /* of the pool, holds the bytes */
    size_t first_bytes;
} bt_text;

void bt_text_init(bt_text *text, size_t bytes_max);
/* The memory is blocks of the pool, the first one of first_bytes or more. */
void bt_text_init_pooled(bt_text *text, size_t bytes_max, bt_block_pool *pool, size_t first_bytes);
void bt_text_fini(bt_text *text);
/* Forgets the content and keeps the memory. */
void bt_text_clear(bt_text *text);
/* Gives up the content with its block, and the hold of it: block->bytes begins with the content.
 * The text is empty, and its pool the same. NULL when it has no block. */
bt_block *bt_text_take_block(bt_text *text);
void bt_text_add(bt_text *text, const char *bytes, size_t count);
void bt_text_add_string(bt_text *text, const char *string);
void bt_text_add_format(bt_text *text, const char *format, ...) BT_PRINTF(2, 3);
/* Room for count more bytes, to be written by the caller, who then adds to `used`. NULL when there
 * is none. */
char *bt_text_reserve(bt_text *text, size_t count);

/* A JSON string, quotes included, as compact as the clients' own encoders write it: only the quote,
 * the backslash and control characters are escaped. Bytes that are not UTF-8 (names from the
 * command line, sentences that were cut) become U+FFFD, so that the JSON stays JSON. */
void bt_json_add_string(bt_text *text, const char *bytes, size_t count);
/* The same without the quotes, so that a long string can be written in portions; bytes [count] must
 * be a part of UTF-8. */
void bt_json_add_escaped(bt_text *text, const char *bytes, size_t count);
void bt_json_add_int(bt_text *text, int64_t value);
/* Shortest text that reads back as the same double; a NaN or an infinity is null. */
void bt_json_add_double(bt_text *text, double value);
/* A float widened to double. */
void bt_json_add_float(bt_text *text, float value);
/* Lists with a comma between each two and without brackets. They ask for room in portions, of 256
 * numbers as long as they can be, so the limit may be met that much early. */
void bt_json_add_floats(bt_text *text, const float *values, size_t count);
void bt_json_add_ints(bt_text *text, const int32_t *values, size_t count);
void bt_json_add_bool(bt_text *text, bool value);

#endif
