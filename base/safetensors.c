/* Parses and validates a safetensors file once, at opening. The JSON tree lives only while the file
 * is being opened; what is kept is a table of tensors that all lie inside the file. */
#include "base/safetensors.h"

#include <endian.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/file_map.h"
#include "base/json_file.h"
#include "base/mem.h"

struct bt_safetensors {
    bt_file_map map; /* zeroed when the bytes are the caller's */
    size_t count;
    bt_safetensors_tensor *tensors; /* sorted by name */
};

/* What the functions below need to know about the file being opened. */
typedef struct parser {
    const char *path;
    const uint8_t *data; /* what follows the header */
    size_t data_bytes;
    uint64_t data_offset; /* of `data` in the file */
    bt_error *error;
} parser;

static const struct {
    const char *name;
    size_t bytes;
} dtypes[BT_SAFETENSORS_DTYPE_COUNT] = {
    [BT_SAFETENSORS_F64] = {"F64", 8},         [BT_SAFETENSORS_F32] = {"F32", 4},
    [BT_SAFETENSORS_F16] = {"F16", 2},         [BT_SAFETENSORS_BF16] = {"BF16", 2},
    [BT_SAFETENSORS_I64] = {"I64", 8},         [BT_SAFETENSORS_I32] = {"I32", 4},
    [BT_SAFETENSORS_I16] = {"I16", 2},         [BT_SAFETENSORS_I8] = {"I8", 1},
    [BT_SAFETENSORS_U64] = {"U64", 8},         [BT_SAFETENSORS_U32] = {"U32", 4},
    [BT_SAFETENSORS_U16] = {"U16", 2},         [BT_SAFETENSORS_U8] = {"U8", 1},
    [BT_SAFETENSORS_BOOL] = {"BOOL", 1},       [BT_SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1},
    [BT_SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1},
};

const char *bt_safetensors_dtype_name(bt_safetensors_dtype dtype) {
    return dtypes[dtype].name;
}

size_t bt_safetensors_dtype_bytes(bt_safetensors_dtype dtype) {
    return dtypes[dtype].bytes;
}

static bool is_printable(const char *text) {
    for (; *text != '\0'; text++) {
        if (*text < 0x20 || *text > 0x7e) return false;
    }
    return true;
}

static bt_status parse_name(const parser *p, const char *name, bt_safetensors_tensor *tensor) {
    const size_t bytes = strlen(name);
    if (bytes == 0 || bytes > BT_SAFETENSORS_NAME_BYTES_MAX || !is_printable(name)) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE,
                       "%s: a tensor's name is empty, longer than %d bytes or not printable ASCII",
                       p->path, BT_SAFETENSORS_NAME_BYTES_MAX);
    }
    tensor->name = bt_strdup(name);
    if (tensor->name == NULL) {
        return bt_fail(p->error, BT_ERR_WORKER_MEMORY, "%s: out of memory", p->path);
    }
    return BT_OK;
}

static bt_status parse_dtype(const parser *p, const json_t *entry, bt_safetensors_tensor *tensor) {
    const char *name = json_string_value(json_object_get(entry, "dtype"));
    if (name == NULL) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE, "%s: tensor %s has no dtype", p->path,
                       tensor->name);
    }
    for (int i = 0; i < BT_SAFETENSORS_DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name) != 0) continue;
        tensor->dtype = (bt_safetensors_dtype)i;
        return BT_OK;
    }
    return bt_fail(p->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: tensor %s has dtype %.20s, which is not known", p->path, tensor->name,
                   is_printable(name) ? name : "(unprintable)");
}

/* A JSON integer >= 0. */
static bool get_u64(const json_t *value, uint64_t *out) {
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static bt_status parse_shape(const parser *p, const json_t *entry, bt_safetensors_tensor *tensor) {
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > BT_SAFETENSORS_DIMENSIONS_MAX) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE,
                       "%s: tensor %s has no shape of up to %d dimensions", p->path, tensor->name,
                       BT_SAFETENSORS_DIMENSIONS_MAX);
    }
    tensor->dimension_count = (uint32_t)json_array_size(shape);
    tensor->elements = 1;
    for (uint32_t d = 0; d < tensor->dimension_count; d++) {
        if (!get_u64(json_array_get(shape, d), &tensor->dimensions[d]) ||
            __builtin_mul_overflow(tensor->elements, tensor->dimensions[d], &tensor->elements)) {
            return bt_fail(p->error, BT_ERR_CALLER_FILE,
                           "%s: tensor %s has an impossible dimension %u", p->path, tensor->name,
                           d);
        }
    }
    if (!bt_mul_size((size_t)tensor->elements, dtypes[tensor->dtype].bytes, &tensor->bytes)) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE, "%s: tensor %s is impossibly large", p->path,
                       tensor->name);
    }
    return BT_OK;
}

static bt_status parse_offsets(const parser *p, const json_t *entry,
                               bt_safetensors_tensor *tensor) {
    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t start = 0;
    uint64_t end = 0;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !get_u64(json_array_get(offsets, 0), &start) ||
        !get_u64(json_array_get(offsets, 1), &end) || start > end) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE, "%s: tensor %s has no valid data_offsets",
                       p->path, tensor->name);
    }
    if (end > p->data_bytes) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE,
                       "%s: truncated: tensor %s ends at byte %" PRIu64
                       " of the data, the file has %zu",
                       p->path, tensor->name, end, p->data_bytes);
    }
    if (end - start != tensor->bytes) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE,
                       "%s: tensor %s has %" PRIu64 " bytes, its shape and dtype need %zu", p->path,
                       tensor->name, end - start, tensor->bytes);
    }
    tensor->offset = p->data_offset + start;
    tensor->data = p->data + start;
    return BT_OK;
}

static bt_status parse_tensor(const parser *p, const char *name, const json_t *entry,
                              bt_safetensors_tensor *tensor) {
    bt_status status = parse_name(p, name, tensor);
    if (status == BT_OK) status = parse_dtype(p, entry, tensor);
    if (status == BT_OK) status = parse_shape(p, entry, tensor);
    if (status == BT_OK) status = parse_offsets(p, entry, tensor);
    return status;
}

/* By offset, then by length, so that an empty tensor comes before the one that starts with it. */
static int compare_offsets(const void *a, const void *b) {
    const bt_safetensors_tensor *x = a;
    const bt_safetensors_tensor *y = b;
    if (x->offset != y->offset) return x->offset > y->offset ? 1 : -1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int compare_names(const void *a, const void *b) {
    return strcmp(((const bt_safetensors_tensor *)a)->name,
                  ((const bt_safetensors_tensor *)b)->name);
}

/* The tensors must follow one another and end where the file ends. Leaves them sorted by name. */
static bt_status check_coverage(const parser *p, bt_safetensors *file) {
    qsort(file->tensors, file->count, sizeof file->tensors[0], compare_offsets);
    uint64_t end = p->data_offset;
    for (size_t i = 0; i < file->count; i++) {
        const bt_safetensors_tensor *tensor = &file->tensors[i];
        if (tensor->offset != end) {
            return bt_fail(p->error, BT_ERR_CALLER_FILE,
                           "%s: tensor %s starts at byte %" PRIu64 ", the data before it ends at "
                           "byte %" PRIu64 " (%s)",
                           p->path, tensor->name, tensor->offset, end,
                           tensor->offset < end ? "they overlap" : "a hole");
        }
        end += tensor->bytes;
    }
    if (end != p->data_offset + p->data_bytes) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE,
                       "%s: %" PRIu64 " bytes after the last tensor belong to none", p->path,
                       p->data_offset + p->data_bytes - end);
    }
    qsort(file->tensors, file->count, sizeof file->tensors[0], compare_names);
    return BT_OK;
}

static bt_status parse_entries(const parser *p, json_t *header, bt_safetensors *file) {
    const size_t entries = json_object_size(header);
    if (entries > BT_SAFETENSORS_TENSORS_MAX) {
        return bt_fail(p->error, BT_ERR_CALLER_LIMIT, "%s: has %zu tensors, at most %d are allowed",
                       p->path, entries, BT_SAFETENSORS_TENSORS_MAX);
    }
    file->tensors = bt_calloc(entries, sizeof file->tensors[0]);
    if (file->tensors == NULL) {
        return bt_fail(p->error, BT_ERR_WORKER_MEMORY, "%s: out of memory", p->path);
    }
    const char *name = NULL;
    json_t *entry = NULL;
    json_object_foreach(header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        const bt_status status = parse_tensor(p, name, entry, &file->tensors[file->count++]);
        if (status != BT_OK) return status;
    }
    return check_coverage(p, file);
}

/* Finds the header and what follows it. */
static bt_status split_file(parser *p, const uint8_t *data, size_t bytes, size_t *header_bytes) {
    uint64_t length = 0;
    if (bytes < sizeof length) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE,
                       "%s: has %zu bytes, too short for a safetensors file", p->path, bytes);
    }
    memcpy(&length, data, sizeof length);
    length = le64toh(length);
    if (length > bytes - sizeof length) {
        return bt_fail(p->error, BT_ERR_CALLER_FILE,
                       "%s: truncated or not a safetensors file: the header claims %" PRIu64
                       " bytes, the file has %zu",
                       p->path, length, bytes);
    }
    if (length > BT_SAFETENSORS_HEADER_BYTES_MAX) {
        return bt_fail(p->error, BT_ERR_CALLER_LIMIT,
                       "%s: has a header of %" PRIu64 " bytes, at most %d are allowed", p->path,
                       length, BT_SAFETENSORS_HEADER_BYTES_MAX);
    }
    *header_bytes = (size_t)length;
    p->data_offset = sizeof length + length;
    p->data = data + p->data_offset;
    p->data_bytes = bytes - (size_t)p->data_offset;
    return BT_OK;
}

bt_status bt_safetensors_open_memory(const uint8_t *data, size_t bytes, const char *name,
                                     bt_safetensors **out, bt_error *error) {
    parser p = {.path = name, .error = error};
    size_t header_bytes = 0;
    bt_status status = split_file(&p, data, bytes, &header_bytes);
    if (status != BT_OK) return status;
    json_t *header = NULL;
    status = bt_json_load_object((const char *)data + sizeof(uint64_t), header_bytes, name, &header,
                                 error);
    if (status != BT_OK) return status;
    bt_safetensors *file = bt_calloc(1, sizeof *file);
    if (file == NULL) {
        status = bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", name);
    } else {
        status = parse_entries(&p, header, file);
    }
    json_decref(header);
    if (status != BT_OK) {
        bt_safetensors_close(file);
        return status;
    }
    *out = file;
    return BT_OK;
}

bt_status bt_safetensors_open(const char *path, bt_safetensors **out, bt_error *error) {
    bt_file_map map = {0};
    bt_status status = bt_file_map_open(path, &map, error);
    if (status != BT_OK) return status;
    status = bt_safetensors_open_memory(map.data, map.bytes, path, out, error);
    if (status != BT_OK) {
        bt_file_map_close(&map);
        return status;
    }
    (*out)->map = map;
    return BT_OK;
}

void bt_safetensors_release(const bt_safetensors *file, const uint8_t *data, size_t bytes) {
    bt_file_map_release(&file->map, data, bytes);
}

void bt_safetensors_close(bt_safetensors *file) {
    if (file == NULL) return;
    for (size_t i = 0; i < file->count; i++)
        bt_free(file->tensors[i].name);
    bt_free(file->tensors);
    bt_file_map_close(&file->map);
    bt_free(file);
}

size_t bt_safetensors_count(const bt_safetensors *file) {
    return file->count;
}

const bt_safetensors_tensor *bt_safetensors_at(const bt_safetensors *file, size_t index) {
    BT_ASSERT(index < file->count);
    return &file->tensors[index];
}

static int compare_name(const void *name, const void *tensor) {
    return strcmp(name, ((const bt_safetensors_tensor *)tensor)->name);
}

const bt_safetensors_tensor *bt_safetensors_find(const bt_safetensors *file, const char *name) {
    return bsearch(name, file->tensors, file->count, sizeof file->tensors[0], compare_name);
}
