/* Pure reader of the safetensors container: names, types, shapes and offsets of one file.
 *
 *   u64 header bytes | JSON header | data
 *
 * A bt_safetensors owns its mapping; tensors and their data are *borrowed* from it. Data may start
 * at any byte: read it by memcpy, never by cast. Immutable after opening, so any thread may read
 * it. Everything is validated when it is opened: the header's length, each shape against its
 * offsets and type, and that the tensors cover the data exactly, without overlap or hole. Errors
 * are BT_ERR_CALLER_FILE (CALLER_UNSUPPORTED for a dtype that is not known, CALLER_LIMIT for a
 * limit below). Needs jansson (target bt_base_io). */
#ifndef BT_BASE_SAFETENSORS_H
#define BT_BASE_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    BT_SAFETENSORS_HEADER_BYTES_MAX = 100000000,
    BT_SAFETENSORS_TENSORS_MAX = 1 << 16,
    BT_SAFETENSORS_NAME_BYTES_MAX = 255,
    BT_SAFETENSORS_DIMENSIONS_MAX = 8,
};

typedef enum bt_safetensors_dtype {
    BT_SAFETENSORS_F64,
    BT_SAFETENSORS_F32,
    BT_SAFETENSORS_F16,
    BT_SAFETENSORS_BF16,
    BT_SAFETENSORS_I64,
    BT_SAFETENSORS_I32,
    BT_SAFETENSORS_I16,
    BT_SAFETENSORS_I8,
    BT_SAFETENSORS_U64,
    BT_SAFETENSORS_U32,
    BT_SAFETENSORS_U16,
    BT_SAFETENSORS_U8,
    BT_SAFETENSORS_BOOL,
    BT_SAFETENSORS_F8_E4M3,
    BT_SAFETENSORS_F8_E5M2,
    BT_SAFETENSORS_DTYPE_COUNT,
} bt_safetensors_dtype;

typedef struct bt_safetensors_tensor {
    char *name; /* printable ASCII; owned by the file */
    bt_safetensors_dtype dtype;
    uint32_t dimension_count;                           /* 0 (a scalar) .. 8 */
    uint64_t dimensions[BT_SAFETENSORS_DIMENSIONS_MAX]; /* slowest first: row-major */
    uint64_t elements;                                  /* may be 0 */
    uint64_t offset;                                    /* from the start of the file */
    size_t bytes;
    const uint8_t *data; /* borrowed */
} bt_safetensors_tensor;

typedef struct bt_safetensors bt_safetensors;

/* Maps and validates the file. Returns owned. Blocking (reads the header from disk). */
BT_MUST_CHECK bt_status bt_safetensors_open(const char *path, bt_safetensors **out,
                                            bt_error *error);
/* The same over bytes that the caller keeps until bt_safetensors_close. `name` is used in errors.
 */
BT_MUST_CHECK bt_status bt_safetensors_open_memory(const uint8_t *data, size_t bytes,
                                                   const char *name, bt_safetensors **out,
                                                   bt_error *error);
void bt_safetensors_close(bt_safetensors *file);
/* bt_file_map_release of a part of a tensor's data; nothing when the bytes are the caller's. */
void bt_safetensors_release(const bt_safetensors *file, const uint8_t *data, size_t bytes);

/* Tensors, sorted by name. */
size_t bt_safetensors_count(const bt_safetensors *file);
const bt_safetensors_tensor *bt_safetensors_at(const bt_safetensors *file, size_t index);
/* NULL when there is no such tensor. */
const bt_safetensors_tensor *bt_safetensors_find(const bt_safetensors *file, const char *name);
/* "BF16" and the like. */
const char *bt_safetensors_dtype_name(bt_safetensors_dtype dtype);
size_t bt_safetensors_dtype_bytes(bt_safetensors_dtype dtype);

#endif
