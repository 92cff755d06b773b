/* Pure reader of the GGUF container (versions 2 and 3, little-endian): key/values and tensor infos.
 * It knows the layout, not what the keys mean.
 *
 * A bt_gguf owns its mapping; every string, array and tensor it hands out is *borrowed* and points
 * into the file (not aligned: read by memcpy or through the functions here). Immutable after
 * opening, so any thread may read it. Everything is validated when it is opened: each length,
 * count, offset and product against the file size, duplicate keys and names, overlapping tensors;
 * nothing outside the file is ever touched later. Errors are BT_ERR_CALLER_FILE (CALLER_UNSUPPORTED
 * for versions and types that are not known) and say what is wrong at which byte. libc only. */
#ifndef BT_BASE_GGUF_H
#define BT_BASE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    BT_GGUF_KEYS_MAX = 1 << 16,
    BT_GGUF_TENSORS_MAX = 1 << 16,
    BT_GGUF_KEY_BYTES_MAX = 1024,
    BT_GGUF_NAME_BYTES_MAX = 127,
    BT_GGUF_DIMENSIONS_MAX = 4,
};

typedef enum bt_gguf_type {
    BT_GGUF_TYPE_U8 = 0,
    BT_GGUF_TYPE_I8 = 1,
    BT_GGUF_TYPE_U16 = 2,
    BT_GGUF_TYPE_I16 = 3,
    BT_GGUF_TYPE_U32 = 4,
    BT_GGUF_TYPE_I32 = 5,
    BT_GGUF_TYPE_F32 = 6,
    BT_GGUF_TYPE_BOOL = 7,
    BT_GGUF_TYPE_STRING = 8,
    BT_GGUF_TYPE_ARRAY = 9,
    BT_GGUF_TYPE_U64 = 10,
    BT_GGUF_TYPE_I64 = 11,
    BT_GGUF_TYPE_F64 = 12,
} bt_gguf_type;

/* Tensor types that the rest of Baton names; bt_gguf_tensor_type_name knows all. */
enum {
    BT_GGUF_TENSOR_F32 = 0,
    BT_GGUF_TENSOR_F16 = 1,
    BT_GGUF_TENSOR_Q4_0 = 2,
    BT_GGUF_TENSOR_Q4_1 = 3,
    BT_GGUF_TENSOR_Q5_0 = 6,
    BT_GGUF_TENSOR_Q5_1 = 7,
    BT_GGUF_TENSOR_Q8_0 = 8,
    BT_GGUF_TENSOR_Q4_K = 12,
    BT_GGUF_TENSOR_Q5_K = 13,
    BT_GGUF_TENSOR_Q6_K = 14,
    BT_GGUF_TENSOR_BF16 = 30,
};

/* A borrowed run of bytes; not terminated, may hold anything. */
typedef struct bt_gguf_string {
    const char *text;
    size_t bytes;
} bt_gguf_string;

/* A borrowed array value. `data` is its first element as stored. */
typedef struct bt_gguf_array {
    bt_gguf_type type; /* of the elements; never ARRAY */
    size_t count;
    const uint8_t *data;
} bt_gguf_array;

typedef struct bt_gguf_tensor {
    char name[BT_GGUF_NAME_BYTES_MAX + 1];       /* printable ASCII */
    uint32_t type;                               /* BT_GGUF_TENSOR_* and others with a name */
    uint32_t dimension_count;                    /* 1 .. 4 */
    uint64_t dimensions[BT_GGUF_DIMENSIONS_MAX]; /* fastest first (= columns); 1 beyond the count */
    uint64_t elements;                           /* product of the dimensions, > 0 */
    uint64_t offset;                             /* from the start of the file */
    size_t bytes;
    const uint8_t *data; /* borrowed */
} bt_gguf_tensor;

typedef struct bt_gguf bt_gguf;

/* true when the bytes start with the GGUF magic. */
bool bt_gguf_is_magic(const uint8_t *data, size_t bytes);
/* Maps and validates the file. Returns owned. Blocking (reads the header from disk). */
BT_MUST_CHECK bt_status bt_gguf_open(const char *path, bt_gguf **out, bt_error *error);
/* The same over bytes that the caller keeps until bt_gguf_close. `name` is used in errors (copied).
 */
BT_MUST_CHECK bt_status bt_gguf_open_memory(const uint8_t *data, size_t bytes, const char *name,
                                            bt_gguf **out, bt_error *error);
void bt_gguf_close(bt_gguf *file);
/* bt_file_map_release of a part of a tensor's data; nothing when the bytes are the caller's. */
void bt_gguf_release(const bt_gguf *file, const uint8_t *data, size_t bytes);
/* The path or name it was opened with, for error sentences. */
const char *bt_gguf_path(const bt_gguf *file);

/* Key/values. A missing key or another type is BT_ERR_CALLER_FILE with a sentence; ask
 * bt_gguf_has_key first where a key is optional. Outputs are set only on success. */
bool bt_gguf_has_key(const bt_gguf *file, const char *key);
/* All keys, sorted; index < count (asserted). */
size_t bt_gguf_key_count(const bt_gguf *file);
bt_gguf_string bt_gguf_key_at(const bt_gguf *file, size_t index);
/* Any integer type, if the value is not negative. */
BT_MUST_CHECK bt_status bt_gguf_get_u64(const bt_gguf *file, const char *key, uint64_t *out,
                                        bt_error *error);
/* As get_u64, and at most UINT32_MAX. */
BT_MUST_CHECK bt_status bt_gguf_get_u32(const bt_gguf *file, const char *key, uint32_t *out,
                                        bt_error *error);
/* f32 or f64, finite. */
BT_MUST_CHECK bt_status bt_gguf_get_f64(const bt_gguf *file, const char *key, double *out,
                                        bt_error *error);
BT_MUST_CHECK bt_status bt_gguf_get_bool(const bt_gguf *file, const char *key, bool *out,
                                         bt_error *error);
BT_MUST_CHECK bt_status bt_gguf_get_string(const bt_gguf *file, const char *key,
                                           bt_gguf_string *out, bt_error *error);
/* An array whose elements have exactly `type`. */
BT_MUST_CHECK bt_status bt_gguf_get_array(const bt_gguf *file, const char *key, bt_gguf_type type,
                                          bt_gguf_array *out, bt_error *error);

/* Elements of an array of that type; index < count (asserted). */
int32_t bt_gguf_array_i32(const bt_gguf_array *array, size_t index);
float bt_gguf_array_f32(const bt_gguf_array *array, size_t index);
/* Walks an array of strings without copying: start with a zeroed cursor; false at the end. */
typedef struct bt_gguf_string_cursor {
    size_t index; /* of the string that comes next */
    size_t offset;
} bt_gguf_string_cursor;
bool bt_gguf_array_next_string(const bt_gguf_array *array, bt_gguf_string_cursor *cursor,
                               bt_gguf_string *out);

/* Tensors, sorted by name. */
size_t bt_gguf_tensor_count(const bt_gguf *file);
const bt_gguf_tensor *bt_gguf_tensor_at(const bt_gguf *file, size_t index);
/* NULL when there is no such tensor. */
const bt_gguf_tensor *bt_gguf_find_tensor(const bt_gguf *file, const char *name);
/* "Q6_K" and the like; NULL for a number that is not known. */
const char *bt_gguf_tensor_type_name(uint32_t type);
/* Bytes of `elements` values of a type, a whole number of blocks; false when it is not, when the
 * type is not known, or on overflow. */
BT_MUST_CHECK bool bt_gguf_tensor_type_bytes(uint32_t type, uint64_t elements, size_t *bytes_out);

#endif
