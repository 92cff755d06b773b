/* Makes GGUF files for tests: keys and tensors are appended, finish puts the parts together. The
 * sections are public, so that a test can spoil them. One thread. */
#ifndef BT_TESTS_SUPPORT_GGUF_WRITER_H
#define BT_TESTS_SUPPORT_GGUF_WRITER_H

#include "base/gguf.h"
#include "tests/support/test_bytes.h"

typedef struct gguf_writer {
    uint32_t version;
    uint32_t alignment;
    uint64_t key_count;
    uint64_t tensor_count;
    test_bytes keys;
    test_bytes infos;
    test_bytes data;
} gguf_writer;

/* Version 3, alignment 32. */
void gguf_writer_init(gguf_writer *w);
void gguf_writer_fini(gguf_writer *w);
/* The key and the type of a value whose bytes the caller appends to w->keys. */
void gguf_writer_key(gguf_writer *w, const char *key, bt_gguf_type type);
/* The same for an array. */
void gguf_writer_array(gguf_writer *w, const char *key, bt_gguf_type type, uint64_t count);
/* A string without its key, as an element of an array. */
void gguf_writer_text(gguf_writer *w, const char *text, size_t bytes);
void gguf_writer_string(gguf_writer *w, const char *key, const char *text);
void gguf_writer_u32(gguf_writer *w, const char *key, uint32_t value);
void gguf_writer_f32(gguf_writer *w, const char *key, float value);
void gguf_writer_bool(gguf_writer *w, const char *key, uint8_t value);

typedef struct gguf_writer_tensor_info {
    const char *name;
    uint32_t type;
    uint32_t dimension_count;
    uint64_t dimensions[BT_GGUF_DIMENSIONS_MAX]; /* fastest first */
    uint64_t offset;
} gguf_writer_tensor_info;

/* An info alone, with whatever offset it says. */
void gguf_writer_info(gguf_writer *w, const gguf_writer_tensor_info *info);
/* A tensor of one (rows 0) or two dimensions with its data, placed after the ones before it. */
void gguf_writer_tensor(gguf_writer *w, const char *name, uint32_t type, uint64_t columns,
                        uint64_t rows, const test_bytes *data);
/* The file; the caller frees it. The writer stays as it is. */
test_bytes gguf_writer_finish(const gguf_writer *w);

#endif
