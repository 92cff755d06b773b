/* GGUF bytes of any kind: either a sentence, or a file in which every look-up stays inside. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/gguf.h"

static void check_inside(const uint8_t *data, size_t bytes, const void *at, size_t count) {
    const uint8_t *start = at;
    BT_ASSERT(start >= data);
    BT_ASSERT(count <= bytes);
    BT_ASSERT((size_t)(start - data) <= bytes - count);
}

static void check_tensors(const bt_gguf *file, const uint8_t *data, size_t bytes) {
    for (size_t i = 0; i < bt_gguf_tensor_count(file); i++) {
        const bt_gguf_tensor *tensor = bt_gguf_tensor_at(file, i);
        size_t expected = 0;
        check_inside(data, bytes, tensor->data, tensor->bytes);
        BT_ASSERT(tensor->data == data + tensor->offset);
        BT_ASSERT(bt_gguf_tensor_type_bytes(tensor->type, tensor->elements, &expected));
        BT_ASSERT(expected == tensor->bytes);
        BT_ASSERT(tensor->bytes > 0);
        BT_ASSERT(bt_gguf_find_tensor(file, tensor->name) == tensor);
        if (i == 0) continue;
        BT_ASSERT(strcmp(bt_gguf_tensor_at(file, i - 1)->name, tensor->name) < 0);
    }
}

/* Keeps the compiler from leaving out the reads. */
static volatile uint32_t sink;

static uint32_t read_numbers(const bt_gguf *file, const char *key, const uint8_t *data,
                             size_t bytes) {
    bt_gguf_array array;
    uint32_t sum = 0;
    if (bt_gguf_get_array(file, key, BT_GGUF_TYPE_I32, &array, NULL) != BT_OK) return 0;
    check_inside(data, bytes, array.data, array.count * 4);
    for (size_t i = 0; i < array.count; i++)
        sum += (uint32_t)bt_gguf_array_i32(&array, i);
    return sum;
}

static uint32_t read_strings(const bt_gguf *file, const char *key, const uint8_t *data,
                             size_t bytes) {
    bt_gguf_array array;
    bt_gguf_string string;
    bt_gguf_string_cursor cursor = {0};
    uint32_t sum = 0;
    size_t count = 0;
    if (bt_gguf_get_array(file, key, BT_GGUF_TYPE_STRING, &array, NULL) != BT_OK) return 0;
    while (bt_gguf_array_next_string(&array, &cursor, &string)) {
        check_inside(data, bytes, string.text, string.bytes);
        for (size_t i = 0; i < string.bytes; i++)
            sum += (uint8_t)string.text[i];
        count++;
    }
    BT_ASSERT(count == array.count);
    return sum;
}

static void read_scalars(const bt_gguf *file, const char *key) {
    uint64_t u64 = 0;
    uint32_t u32 = 0;
    double f64 = 0;
    bool flag = false;
    bt_gguf_string string;
    unsigned kinds = 0;
    if (bt_gguf_get_u64(file, key, &u64, NULL) == BT_OK) kinds++;
    if (bt_gguf_get_u32(file, key, &u32, NULL) == BT_OK) BT_ASSERT(u32 == u64);
    if (bt_gguf_get_f64(file, key, &f64, NULL) == BT_OK) kinds++;
    if (bt_gguf_get_bool(file, key, &flag, NULL) == BT_OK) kinds++;
    if (bt_gguf_get_string(file, key, &string, NULL) == BT_OK) kinds++;
    BT_ASSERT(kinds <= 1);
    BT_ASSERT(kinds == 0 || bt_gguf_has_key(file, key));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const char *const keys[] = {"general.architecture", "general.alignment", "a", "b"};
    bt_gguf *file = NULL;
    bt_error error = {0};
    uint32_t sum = 0;
    if (bt_gguf_open_memory(data, bytes, "fuzz", &file, &error) != BT_OK) {
        BT_ASSERT(error.text[0] != '\0');
        return 0;
    }
    check_tensors(file, data, bytes);
    for (size_t i = 0; i < BT_ARRAY_COUNT(keys); i++) {
        read_scalars(file, keys[i]);
        sum += read_numbers(file, keys[i], data, bytes);
        sum += read_strings(file, keys[i], data, bytes);
    }
    sink = sum;
    bt_gguf_close(file);
    return 0;
}
