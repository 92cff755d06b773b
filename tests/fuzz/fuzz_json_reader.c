/* Any bytes as JSON: refused with a position, or walked to the end with nothing outside the text
 * touched; a string decodes to at most its own length and to valid UTF-8. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/mem.h"

enum { INPUT_MAX = 1 << 16 };

/* A decoded string, written again and read again, is the same. */
static void check_string(const bt_json *value) {
    char *decoded = bt_malloc(value->bytes);
    BT_ASSERT(decoded != NULL);
    size_t bytes = bt_json_string_decode(value, decoded);
    BT_ASSERT(bytes + 2 <= value->bytes);
    bt_text text;
    bt_text_init(&text, 8 * INPUT_MAX);
    bt_json_add_string(&text, decoded, bytes);
    bt_json again;
    bt_error error;
    BT_ASSERT(bt_json_parse(text.bytes, text.used, &again, &error) == BT_OK);
    char *twice = bt_malloc(again.bytes);
    BT_ASSERT(twice != NULL && again.kind == BT_JSON_STRING);
    BT_ASSERT(bt_json_string_decode(&again, twice) == bytes);
    BT_ASSERT(memcmp(decoded, twice, bytes) == 0);
    bt_free(twice);
    bt_text_fini(&text);
    bt_free(decoded);
}

static void check_scalar(const bt_json *value) {
    double real;
    int64_t integer;
    bool is_number = value->kind == BT_JSON_NUMBER;
    BT_ASSERT(bt_json_get_double(value, &real) == is_number);
    BT_ASSERT(!bt_json_get_int64(value, true, &integer) || is_number);
    if (value->kind == BT_JSON_STRING) check_string(value);
    BT_ASSERT(bt_json_string_equals(value, "a") <= (value->kind == BT_JSON_STRING));
}

/* Walks every value, with a stack instead of recursion. */
static void walk(const bt_json *root, const char *start, const char *end) {
    bt_json_iter stack[BT_JSON_DEPTH_MAX];
    size_t depth = 0;
    bt_json value = *root;
    for (;;) {
        BT_ASSERT(value.text >= start && value.bytes > 0 && value.text + value.bytes <= end);
        if (value.kind == BT_JSON_ARRAY || value.kind == BT_JSON_OBJECT) {
            BT_ASSERT(depth < BT_JSON_DEPTH_MAX);
            bt_json_iter_init(&stack[depth++], &value);
        } else {
            check_scalar(&value);
        }
        while (depth > 0 && !bt_json_next_item(&stack[depth - 1], &value)) {
            depth--;
        }
        if (depth == 0) return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    bt_json root;
    bt_error error = {0};
    if (bytes > INPUT_MAX) return 0;
    const char *text = (const char *)data;
    if (bt_json_parse(text, bytes, &root, &error) != BT_OK) {
        BT_ASSERT(strncmp(error.text, "invalid JSON at byte ", 21) == 0);
        return 0;
    }
    walk(&root, text, text + bytes);
    return 0;
}
