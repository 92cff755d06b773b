/* Parses and validates a GGUF file once, at opening. After bt_gguf_open_memory succeeds every
 * pointer kept here lies inside the file and every count fits, so that look-ups need no checks.
 *
 *   "GGUF" | u32 version | u64 tensors | u64 keys | key/values | tensor infos | padding | data
 *
 * It does not read tensor data and does not know what keys mean. */
#include "base/gguf.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "base/gguf_internal.h"
#include "base/mem.h"

enum {
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MAX = 1 << 20,
    KEY_BYTES_MIN = 8 + 1 + 4 + 1,         /* length, one letter, type, one byte */
    TENSOR_BYTES_MIN = 8 + 1 + 4 + 8 + 12, /* length, one letter, dimensions, type, offset */
};

/* A position in the file, and where to put the sentence when something is wrong there. */
typedef struct reader {
    const uint8_t *data;
    size_t bytes;
    size_t at;
    const char *path;
    bt_error *error;
} reader;

static bt_status read_bytes(reader *r, size_t count, const char *what, const uint8_t **out) {
    if (count > r->bytes - r->at) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE,
                       "%s: truncated: %s at byte %zu needs %zu bytes, the file ends at byte %zu",
                       r->path, what, r->at, count, r->bytes);
    }
    *out = r->data + r->at;
    r->at += count;
    return BT_OK;
}

static bt_status read_u32(reader *r, const char *what, uint32_t *out) {
    const uint8_t *data = NULL;
    const bt_status status = read_bytes(r, sizeof *out, what, &data);
    if (status != BT_OK) return status;
    memcpy(out, data, sizeof *out);
    *out = le32toh(*out);
    return BT_OK;
}

static bt_status read_u64(reader *r, const char *what, uint64_t *out) {
    const uint8_t *data = NULL;
    const bt_status status = read_bytes(r, sizeof *out, what, &data);
    if (status != BT_OK) return status;
    memcpy(out, data, sizeof *out);
    *out = le64toh(*out);
    return BT_OK;
}

static bt_status read_string(reader *r, const char *what, bt_gguf_string *out) {
    uint64_t length = 0;
    const uint8_t *data = NULL;
    bt_status status = read_u64(r, what, &length);
    if (status != BT_OK) return status;
    status = read_bytes(r, length > SIZE_MAX ? SIZE_MAX : (size_t)length, what, &data);
    if (status != BT_OK) return status;
    *out = (bt_gguf_string){.text = (const char *)data, .bytes = (size_t)length};
    return BT_OK;
}

/* A key or a tensor name: 1 .. bytes_max printable ASCII characters, so that it can be printed. */
static bt_status read_name(reader *r, const char *what, size_t bytes_max, bt_gguf_string *out) {
    const size_t at = r->at;
    const bt_status status = read_string(r, what, out);
    if (status != BT_OK) return status;
    if (out->bytes == 0 || out->bytes > bytes_max) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE,
                       "%s: %s at byte %zu has %zu bytes, 1 to %zu are allowed", r->path, what, at,
                       out->bytes, bytes_max);
    }
    for (size_t i = 0; i < out->bytes; i++) {
        if (out->text[i] < 0x20 || out->text[i] > 0x7e) {
            return bt_fail(r->error, BT_ERR_CALLER_FILE,
                           "%s: %s at byte %zu is not printable ASCII", r->path, what, at);
        }
    }
    return BT_OK;
}

size_t gguf_scalar_bytes(uint32_t type) {
    static const uint8_t bytes[] = {
        [BT_GGUF_TYPE_U8] = 1,  [BT_GGUF_TYPE_I8] = 1,   [BT_GGUF_TYPE_U16] = 2,
        [BT_GGUF_TYPE_I16] = 2, [BT_GGUF_TYPE_U32] = 4,  [BT_GGUF_TYPE_I32] = 4,
        [BT_GGUF_TYPE_F32] = 4, [BT_GGUF_TYPE_BOOL] = 1, [BT_GGUF_TYPE_U64] = 8,
        [BT_GGUF_TYPE_I64] = 8, [BT_GGUF_TYPE_F64] = 8,
    };
    return type < BT_ARRAY_COUNT(bytes) ? bytes[type] : 0;
}

static bt_status check_bools(reader *r, const uint8_t *data, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (data[i] > 1) {
            return bt_fail(r->error, BT_ERR_CALLER_FILE,
                           "%s: the bool at byte %zu is %u, only 0 and 1 are allowed", r->path,
                           (size_t)(data - r->data) + i, data[i]);
        }
    }
    return BT_OK;
}

/* The elements of an array: `type` and `count` come from the file and are not checked yet. */
static bt_status read_elements(reader *r, uint32_t type, uint64_t count, bt_gguf_array *out) {
    const size_t start = r->at;
    const uint64_t element_bytes_min =
        type == BT_GGUF_TYPE_STRING ? sizeof(uint64_t) : gguf_scalar_bytes(type);
    if (element_bytes_min == 0) {
        return bt_fail(r->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: the array at byte %zu has elements of type %u, which is not supported",
                       r->path, start, type);
    }
    if (count > (r->bytes - start) / element_bytes_min) {
        return bt_fail(
            r->error, BT_ERR_CALLER_FILE,
            "%s: truncated: the array at byte %zu claims %llu elements, more than the file holds",
            r->path, start, (unsigned long long)count);
    }
    bt_status status = BT_OK;
    const uint8_t *data = NULL;
    if (type == BT_GGUF_TYPE_STRING) {
        for (uint64_t i = 0; i < count && status == BT_OK; i++) {
            bt_gguf_string ignored;
            status = read_string(r, "a string of an array", &ignored);
        }
        data = r->data + start;
    } else {
        status = read_bytes(r, (size_t)(count * element_bytes_min), "an array", &data);
    }
    if (status == BT_OK && type == BT_GGUF_TYPE_BOOL) status = check_bools(r, data, (size_t)count);
    if (status != BT_OK) return status;
    *out = (bt_gguf_array){.type = (bt_gguf_type)type, .count = (size_t)count, .data = data};
    return BT_OK;
}

static bt_status read_value(reader *r, gguf_value *out) {
    uint32_t type = 0;
    bt_status status = read_name(r, "a key", BT_GGUF_KEY_BYTES_MAX, &out->key);
    if (status == BT_OK) status = read_u32(r, "a value's type", &type);
    if (status != BT_OK) return status;
    const size_t scalar_bytes = gguf_scalar_bytes(type);
    out->type = (bt_gguf_type)type;
    if (scalar_bytes != 0) {
        status = read_bytes(r, scalar_bytes, "a value", &out->data);
        if (status == BT_OK && type == BT_GGUF_TYPE_BOOL) status = check_bools(r, out->data, 1);
        return status;
    }
    if (type == BT_GGUF_TYPE_STRING) {
        bt_gguf_string ignored;
        out->data = r->data + r->at;
        return read_string(r, "a string value", &ignored);
    }
    if (type == BT_GGUF_TYPE_ARRAY) {
        uint32_t element_type = 0;
        uint64_t count = 0;
        status = read_u32(r, "an array's element type", &element_type);
        if (status == BT_OK) status = read_u64(r, "an array's length", &count);
        if (status == BT_OK) status = read_elements(r, element_type, count, &out->elements);
        return status;
    }
    return bt_fail(r->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: key '%.*s' has a value of type %u, which is not known", r->path,
                   (int)out->key.bytes, out->key.text, type);
}

int gguf_compare_strings(bt_gguf_string a, bt_gguf_string b) {
    const size_t common = a.bytes < b.bytes ? a.bytes : b.bytes;
    const int order = memcmp(a.text, b.text, common);
    if (order != 0) return order;
    return (a.bytes > b.bytes) - (a.bytes < b.bytes);
}

static int compare_values(const void *a, const void *b) {
    return gguf_compare_strings(((const gguf_value *)a)->key, ((const gguf_value *)b)->key);
}

static bt_status read_values(reader *r, bt_gguf *file) {
    for (size_t i = 0; i < file->value_count; i++) {
        const bt_status status = read_value(r, &file->values[i]);
        if (status != BT_OK) return status;
    }
    qsort(file->values, file->value_count, sizeof file->values[0], compare_values);
    for (size_t i = 1; i < file->value_count; i++) {
        const bt_gguf_string key = file->values[i].key;
        if (gguf_compare_strings(file->values[i - 1].key, key) == 0) {
            return bt_fail(r->error, BT_ERR_CALLER_FILE, "%s: key '%.*s' is given twice", r->path,
                           (int)key.bytes, key.text);
        }
    }
    return BT_OK;
}

static bt_status read_shape(reader *r, bt_gguf_tensor *tensor) {
    bt_status status = read_u32(r, "a tensor's dimension count", &tensor->dimension_count);
    if (status != BT_OK) return status;
    if (tensor->dimension_count < 1 || tensor->dimension_count > BT_GGUF_DIMENSIONS_MAX) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE,
                       "%s: tensor %s has %u dimensions, 1 to %d are allowed", r->path,
                       tensor->name, tensor->dimension_count, BT_GGUF_DIMENSIONS_MAX);
    }
    tensor->elements = 1;
    for (uint32_t d = 0; d < BT_GGUF_DIMENSIONS_MAX; d++) {
        tensor->dimensions[d] = 1;
        if (d >= tensor->dimension_count) continue;
        status = read_u64(r, "a tensor's dimension", &tensor->dimensions[d]);
        if (status != BT_OK) return status;
        if (tensor->dimensions[d] == 0 ||
            __builtin_mul_overflow(tensor->elements, tensor->dimensions[d], &tensor->elements)) {
            return bt_fail(r->error, BT_ERR_CALLER_FILE,
                           "%s: tensor %s has an impossible dimension %u of %llu", r->path,
                           tensor->name, d, (unsigned long long)tensor->dimensions[d]);
        }
    }
    return BT_OK;
}

static bt_status read_tensor(reader *r, bt_gguf_tensor *tensor) {
    bt_gguf_string name;
    bt_status status = read_name(r, "a tensor's name", BT_GGUF_NAME_BYTES_MAX, &name);
    if (status != BT_OK) return status;
    memcpy(tensor->name, name.text, name.bytes);
    tensor->name[name.bytes] = '\0';
    status = read_shape(r, tensor);
    if (status == BT_OK) status = read_u32(r, "a tensor's type", &tensor->type);
    if (status == BT_OK) status = read_u64(r, "a tensor's offset", &tensor->offset);
    if (status != BT_OK) return status;
    if (bt_gguf_tensor_type_name(tensor->type) == NULL) {
        return bt_fail(r->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: tensor %s has type number %u, which is not known", r->path,
                       tensor->name, tensor->type);
    }
    size_t row_bytes = 0;
    if (!bt_gguf_tensor_type_bytes(tensor->type, tensor->dimensions[0], &row_bytes) ||
        !bt_gguf_tensor_type_bytes(tensor->type, tensor->elements, &tensor->bytes)) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE,
                       "%s: tensor %s has rows of %llu values, which is not a whole number of %s "
                       "blocks or too large",
                       r->path, tensor->name, (unsigned long long)tensor->dimensions[0],
                       bt_gguf_tensor_type_name(tensor->type));
    }
    return BT_OK;
}

static bt_status read_alignment(reader *r, const bt_gguf *file, uint32_t *out) {
    *out = ALIGNMENT_DEFAULT;
    if (!bt_gguf_has_key(file, "general.alignment")) return BT_OK;
    const bt_status status = bt_gguf_get_u32(file, "general.alignment", out, r->error);
    if (status != BT_OK) return status;
    if (*out < 1 || *out > ALIGNMENT_MAX || (*out & (*out - 1)) != 0) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE,
                       "%s: general.alignment is %u, a power of two up to %d is needed", r->path,
                       *out, ALIGNMENT_MAX);
    }
    return BT_OK;
}

/* Turns offsets relative to the data into offsets in the file, checked against its end. */
static bt_status place_tensors(reader *r, bt_gguf *file, uint32_t alignment) {
    const size_t padding = (alignment - r->at % alignment) % alignment;
    for (size_t i = 0; i < file->tensor_count; i++) {
        bt_gguf_tensor *tensor = &file->tensors[i];
        if (tensor->offset % alignment != 0) {
            return bt_fail(r->error, BT_ERR_CALLER_FILE,
                           "%s: tensor %s is at offset %llu, not a multiple of the alignment %u",
                           r->path, tensor->name, (unsigned long long)tensor->offset, alignment);
        }
        const size_t rest = r->bytes - r->at;
        if (padding > rest || tensor->offset > rest - padding ||
            tensor->bytes > rest - padding - tensor->offset) {
            return bt_fail(r->error, BT_ERR_CALLER_FILE,
                           "%s: truncated: tensor %s needs %zu bytes at offset %llu of the data, "
                           "which starts at byte %zu; the file ends at byte %zu",
                           r->path, tensor->name, tensor->bytes, (unsigned long long)tensor->offset,
                           r->at + padding, r->bytes);
        }
        tensor->offset += r->at + padding;
        tensor->data = r->data + tensor->offset;
    }
    return BT_OK;
}

static int compare_offsets(const void *a, const void *b) {
    const uint64_t x = ((const bt_gguf_tensor *)a)->offset;
    const uint64_t y = ((const bt_gguf_tensor *)b)->offset;
    return (x > y) - (x < y);
}

static int compare_names(const void *a, const void *b) {
    return strcmp(((const bt_gguf_tensor *)a)->name, ((const bt_gguf_tensor *)b)->name);
}

/* Refuses overlaps and repeated names; leaves the tensors sorted by name. */
static bt_status sort_tensors(reader *r, bt_gguf *file) {
    bt_gguf_tensor *tensors = file->tensors;
    qsort(tensors, file->tensor_count, sizeof tensors[0], compare_offsets);
    for (size_t i = 1; i < file->tensor_count; i++) {
        if (tensors[i].offset < tensors[i - 1].offset + tensors[i - 1].bytes) {
            return bt_fail(
                r->error, BT_ERR_CALLER_FILE, "%s: tensors %s and %s overlap at byte %llu", r->path,
                tensors[i - 1].name, tensors[i].name, (unsigned long long)tensors[i].offset);
        }
    }
    qsort(tensors, file->tensor_count, sizeof tensors[0], compare_names);
    for (size_t i = 1; i < file->tensor_count; i++) {
        if (strcmp(tensors[i].name, tensors[i - 1].name) == 0) {
            return bt_fail(r->error, BT_ERR_CALLER_FILE, "%s: tensor %s is given twice", r->path,
                           tensors[i].name);
        }
    }
    return BT_OK;
}

static bt_status read_tensors(reader *r, bt_gguf *file) {
    for (size_t i = 0; i < file->tensor_count; i++) {
        const bt_status status = read_tensor(r, &file->tensors[i]);
        if (status != BT_OK) return status;
    }
    uint32_t alignment = 0;
    bt_status status = read_alignment(r, file, &alignment);
    if (status == BT_OK) status = place_tensors(r, file, alignment);
    if (status == BT_OK) status = sort_tensors(r, file);
    return status;
}

/* A count from the header, refused when the file cannot hold that many or a limit is passed. */
static bt_status read_count(reader *r, const char *what, size_t limit, size_t bytes_min,
                            size_t *out) {
    uint64_t count = 0;
    const bt_status status = read_u64(r, what, &count);
    if (status != BT_OK) return status;
    if (count > limit) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE, "%s: claims %llu %s, at most %zu are allowed",
                       r->path, (unsigned long long)count, what, limit);
    }
    if (count > r->bytes / bytes_min) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE,
                       "%s: truncated: claims %llu %s, more than %zu bytes can hold", r->path,
                       (unsigned long long)count, what, r->bytes);
    }
    *out = (size_t)count;
    return BT_OK;
}

static bt_status read_header(reader *r, bt_gguf *file) {
    if (!bt_gguf_is_magic(r->data, r->bytes)) {
        return bt_fail(r->error, BT_ERR_CALLER_FILE,
                       "%s: is not a GGUF file (it does not start with 'GGUF')", r->path);
    }
    uint32_t version = 0;
    r->at = 4;
    bt_status status = read_u32(r, "the version", &version);
    if (status != BT_OK) return status;
    if (version != 0 && (version & 0xffff) == 0) {
        return bt_fail(r->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: is a big-endian GGUF file, which is not supported", r->path);
    }
    if (version != 2 && version != 3) {
        return bt_fail(r->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: has GGUF version %u, only 2 and 3 are supported", r->path, version);
    }
    status = read_count(r, "tensors", BT_GGUF_TENSORS_MAX, TENSOR_BYTES_MIN, &file->tensor_count);
    if (status != BT_OK) return status;
    return read_count(r, "keys", BT_GGUF_KEYS_MAX, KEY_BYTES_MIN, &file->value_count);
}

static bt_status parse(reader *r, bt_gguf *file) {
    bt_status status = read_header(r, file);
    if (status != BT_OK) return status;
    file->values = bt_calloc(file->value_count, sizeof file->values[0]);
    file->tensors = bt_calloc(file->tensor_count, sizeof file->tensors[0]);
    if (file->values == NULL || file->tensors == NULL) {
        return bt_fail(r->error, BT_ERR_WORKER_MEMORY,
                       "%s: out of memory for %zu keys, %zu tensors", r->path, file->value_count,
                       file->tensor_count);
    }
    status = read_values(r, file);
    if (status != BT_OK) return status;
    return read_tensors(r, file);
}

bool bt_gguf_is_magic(const uint8_t *data, size_t bytes) {
    return bytes >= 4 && memcmp(data, "GGUF", 4) == 0;
}

bt_status bt_gguf_open_memory(const uint8_t *data, size_t bytes, const char *name, bt_gguf **out,
                              bt_error *error) {
    bt_gguf *file = bt_calloc(1, sizeof *file);
    if (file != NULL) file->path = bt_strdup(name);
    if (file == NULL || file->path == NULL) {
        bt_free(file);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", name);
    }
    reader r = {.data = data, .bytes = bytes, .path = file->path, .error = error};
    const bt_status status = parse(&r, file);
    if (status != BT_OK) {
        bt_gguf_close(file);
        return status;
    }
    *out = file;
    return BT_OK;
}

bt_status bt_gguf_open(const char *path, bt_gguf **out, bt_error *error) {
    bt_file_map map = {0};
    bt_status status = bt_file_map_open(path, &map, error);
    if (status != BT_OK) return status;
    status = bt_gguf_open_memory(map.data, map.bytes, path, out, error);
    if (status != BT_OK) {
        bt_file_map_close(&map);
        return status;
    }
    (*out)->map = map;
    return BT_OK;
}

void bt_gguf_release(const bt_gguf *file, const uint8_t *data, size_t bytes) {
    bt_file_map_release(&file->map, data, bytes);
}

void bt_gguf_close(bt_gguf *file) {
    if (file == NULL) return;
    bt_file_map_close(&file->map);
    bt_free(file->tensors);
    bt_free(file->values);
    bt_free(file->path);
    bt_free(file);
}
