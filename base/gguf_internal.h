/* What the two halves of the GGUF reader share: parsing (gguf.c) and look-up (gguf_get.c). */
#ifndef BT_BASE_GGUF_INTERNAL_H
#define BT_BASE_GGUF_INTERNAL_H

#include "base/file_map.h"
#include "base/gguf.h"

typedef struct gguf_value {
    bt_gguf_string key;
    bt_gguf_type type;
    bt_gguf_array elements; /* of an array */
    const uint8_t *data;    /* of anything else, a string's length included */
} gguf_value;

struct bt_gguf {
    char *path;
    bt_file_map map; /* zeroed when the bytes are the caller's */
    size_t value_count;
    gguf_value *values; /* sorted by key */
    size_t tensor_count;
    bt_gguf_tensor *tensors; /* sorted by name */
};

/* Bytes of one scalar of a type; 0 for strings, arrays and numbers that are not a type. */
size_t gguf_scalar_bytes(uint32_t type);
/* Orders two keys bytewise, as qsort does: < 0, 0, > 0. */
int gguf_compare_strings(bt_gguf_string a, bt_gguf_string b);

#endif
