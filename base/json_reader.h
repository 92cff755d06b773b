/* A strict JSON reader for request bodies. The whole text is checked once; afterwards values are
 * slices of it that are walked without a tree, so that a body costs no memory but itself.
 *
 * Checked: UTF-8, escapes, surrogates in pairs (a lone one is refused), grammar of numbers, depth,
 * nothing behind the value. A byte order mark in front is skipped. "\u0000" is allowed; strings
 * have lengths. Repeated keys are allowed; who wins is the walker's rule (ours: the last).
 *
 * Pure; slices borrow the text. */
#ifndef BT_BASE_JSON_READER_H
#define BT_BASE_JSON_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { BT_JSON_DEPTH_MAX = 64, BT_JSON_NUMBER_BYTES_MAX = 512 };

typedef enum bt_json_kind {
    BT_JSON_NULL,
    BT_JSON_FALSE,
    BT_JSON_TRUE,
    BT_JSON_NUMBER,
    BT_JSON_STRING,
    BT_JSON_ARRAY,
    BT_JSON_OBJECT,
} bt_json_kind;

/* One value: its text, quotes and brackets included. */
typedef struct bt_json {
    bt_json_kind kind;
    const char *text;
    size_t bytes;
} bt_json;

/* Checks text [bytes]. REQUEST_INVALID with "invalid JSON at byte N: ..." */
BT_MUST_CHECK bt_status bt_json_parse(const char *text, size_t bytes, bt_json *root_out,
                                      bt_error *error);

/* Walks the members of one array or object of a checked text. */
typedef struct bt_json_iter {
    const char *at;
    const char *end;
} bt_json_iter;

void bt_json_iter_init(bt_json_iter *iter, const bt_json *container);
/* false at the end. */
bool bt_json_next_item(bt_json_iter *iter, bt_json *item_out);
bool bt_json_next_field(bt_json_iter *iter, bt_json *key_out, bt_json *value_out);

/* Decodes a string into out [value->bytes], which always suffices; returns the bytes written, not
 * terminated. */
size_t bt_json_string_decode(const bt_json *value, char *out);
/* value is a string and equals the terminated literal. */
bool bt_json_string_equals(const bt_json *value, const char *literal);

/* A whole number of at most 64 bits. */
typedef struct bt_json_integer {
    bool is_negative;
    uint64_t magnitude;
} bt_json_integer;

/* false when the value is no number, not whole or too large. takes_real: 1.0 and 1e3 are whole. */
bool bt_json_get_integer(const bt_json *value, bool takes_real, bt_json_integer *out);
bool bt_json_get_int64(const bt_json *value, bool takes_real, int64_t *out);
/* Any number; what is too large becomes an infinity. */
bool bt_json_get_double(const bt_json *value, double *out);

/* "null", "a boolean", "a number", ...: for sentences. */
const char *bt_json_kind_name(bt_json_kind kind);

#endif
