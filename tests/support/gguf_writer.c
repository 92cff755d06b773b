#include "tests/support/gguf_writer.h"

#include <string.h>

void gguf_writer_init(gguf_writer *w) {
    *w = (gguf_writer){.version = 3, .alignment = 32};
}

void gguf_writer_fini(gguf_writer *w) {
    test_bytes_fini(&w->keys);
    test_bytes_fini(&w->infos);
    test_bytes_fini(&w->data);
}

static void add_string(test_bytes *out, const char *text, size_t bytes) {
    test_bytes_add_u64(out, bytes);
    test_bytes_add(out, text, bytes);
}

void gguf_writer_key(gguf_writer *w, const char *key, bt_gguf_type type) {
    add_string(&w->keys, key, strlen(key));
    test_bytes_add_u32(&w->keys, (uint32_t)type);
    w->key_count++;
}

void gguf_writer_array(gguf_writer *w, const char *key, bt_gguf_type type, uint64_t count) {
    gguf_writer_key(w, key, BT_GGUF_TYPE_ARRAY);
    test_bytes_add_u32(&w->keys, (uint32_t)type);
    test_bytes_add_u64(&w->keys, count);
}

void gguf_writer_text(gguf_writer *w, const char *text, size_t bytes) {
    add_string(&w->keys, text, bytes);
}

void gguf_writer_string(gguf_writer *w, const char *key, const char *text) {
    gguf_writer_key(w, key, BT_GGUF_TYPE_STRING);
    add_string(&w->keys, text, strlen(text));
}

void gguf_writer_u32(gguf_writer *w, const char *key, uint32_t value) {
    gguf_writer_key(w, key, BT_GGUF_TYPE_U32);
    test_bytes_add_u32(&w->keys, value);
}

void gguf_writer_f32(gguf_writer *w, const char *key, float value) {
    gguf_writer_key(w, key, BT_GGUF_TYPE_F32);
    test_bytes_add_f32(&w->keys, value);
}

void gguf_writer_bool(gguf_writer *w, const char *key, uint8_t value) {
    gguf_writer_key(w, key, BT_GGUF_TYPE_BOOL);
    test_bytes_add(&w->keys, &value, 1);
}

void gguf_writer_info(gguf_writer *w, const gguf_writer_tensor_info *info) {
    add_string(&w->infos, info->name, strlen(info->name));
    test_bytes_add_u32(&w->infos, info->dimension_count);
    for (uint32_t d = 0; d < info->dimension_count && d < BT_GGUF_DIMENSIONS_MAX; d++)
        test_bytes_add_u64(&w->infos, info->dimensions[d]);
    test_bytes_add_u32(&w->infos, info->type);
    test_bytes_add_u64(&w->infos, info->offset);
    w->tensor_count++;
}

void gguf_writer_tensor(gguf_writer *w, const char *name, uint32_t type, uint64_t columns,
                        uint64_t rows, const test_bytes *data) {
    test_bytes_align(&w->data, w->alignment);
    const gguf_writer_tensor_info info = {
        .name = name,
        .type = type,
        .dimension_count = rows == 0 ? 1 : 2,
        .dimensions = {columns, rows},
        .offset = w->data.count,
    };
    gguf_writer_info(w, &info);
    test_bytes_add(&w->data, data->data, data->count);
}

test_bytes gguf_writer_finish(const gguf_writer *w) {
    test_bytes file = {0};
    test_bytes_add_text(&file, "GGUF");
    test_bytes_add_u32(&file, w->version);
    test_bytes_add_u64(&file, w->tensor_count);
    test_bytes_add_u64(&file, w->key_count);
    test_bytes_add(&file, w->keys.data, w->keys.count);
    test_bytes_add(&file, w->infos.data, w->infos.count);
    if (w->tensor_count > 0) test_bytes_align(&file, w->alignment);
    test_bytes_add(&file, w->data.data, w->data.count);
    return file;
}
