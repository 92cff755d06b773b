/* Look-up in an opened GGUF file. Everything here relies on the validation in gguf.c. */
#include <endian.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/gguf.h"
#include "base/gguf_internal.h"
#include "base/mem.h"

typedef struct tensor_type {
    const char *name;
    uint16_t block_elements;
    uint16_t block_bytes;
} tensor_type;

/* Every type of the format, so that a file can be validated and a type refused by its name. */
static const tensor_type tensor_types[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},
    [3] = {"Q4_1", 32, 20},      [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},
    [8] = {"Q8_0", 32, 34},      [9] = {"Q8_1", 32, 36},      [10] = {"Q2_K", 256, 84},
    [11] = {"Q3_K", 256, 110},   [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},
    [14] = {"Q6_K", 256, 210},   [15] = {"Q8_K", 256, 292},   [16] = {"IQ2_XXS", 256, 66},
    [17] = {"IQ2_XS", 256, 74},  [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50},
    [20] = {"IQ4_NL", 32, 18},   [21] = {"IQ3_S", 256, 110},  [22] = {"IQ2_S", 256, 82},
    [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},         [25] = {"I16", 1, 2},
    [26] = {"I32", 1, 4},        [27] = {"I64", 1, 8},        [28] = {"F64", 1, 8},
    [29] = {"IQ1_M", 256, 56},   [30] = {"BF16", 1, 2},       [34] = {"TQ1_0", 256, 54},
    [35] = {"TQ2_0", 256, 66},   [39] = {"MXFP4", 32, 17},
};

const char *bt_gguf_tensor_type_name(uint32_t type) {
    return type < BT_ARRAY_COUNT(tensor_types) ? tensor_types[type].name : NULL;
}

bool bt_gguf_tensor_type_bytes(uint32_t type, uint64_t elements, size_t *bytes_out) {
    if (bt_gguf_tensor_type_name(type) == NULL) return false;
    const tensor_type *t = &tensor_types[type];
    if (elements % t->block_elements != 0 || elements > SIZE_MAX) return false;
    return bt_mul_size((size_t)elements / t->block_elements, t->block_bytes, bytes_out);
}

const char *bt_gguf_path(const bt_gguf *file) {
    return file->path;
}

static int compare_key(const void *key, const void *value) {
    return gguf_compare_strings(*(const bt_gguf_string *)key, ((const gguf_value *)value)->key);
}

static const gguf_value *find_value(const bt_gguf *file, const char *key) {
    const bt_gguf_string wanted = {.text = key, .bytes = strlen(key)};
    return bsearch(&wanted, file->values, file->value_count, sizeof file->values[0], compare_key);
}

bool bt_gguf_has_key(const bt_gguf *file, const char *key) {
    return find_value(file, key) != NULL;
}

size_t bt_gguf_key_count(const bt_gguf *file) {
    return file->value_count;
}

bt_gguf_string bt_gguf_key_at(const bt_gguf *file, size_t index) {
    BT_ASSERT(index < file->value_count);
    return file->values[index].key;
}

static bt_status require_value(const bt_gguf *file, const char *key, const gguf_value **out,
                               bt_error *error) {
    *out = find_value(file, key);
    if (*out != NULL) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_FILE, "%s: key '%s' is missing", file->path, key);
}

static const char *type_name(bt_gguf_type type) {
    switch (type) {
    case BT_GGUF_TYPE_U8: return "u8";
    case BT_GGUF_TYPE_I8: return "i8";
    case BT_GGUF_TYPE_U16: return "u16";
    case BT_GGUF_TYPE_I16: return "i16";
    case BT_GGUF_TYPE_U32: return "u32";
    case BT_GGUF_TYPE_I32: return "i32";
    case BT_GGUF_TYPE_F32: return "f32";
    case BT_GGUF_TYPE_BOOL: return "bool";
    case BT_GGUF_TYPE_STRING: return "string";
    case BT_GGUF_TYPE_ARRAY: return "array";
    case BT_GGUF_TYPE_U64: return "u64";
    case BT_GGUF_TYPE_I64: return "i64";
    case BT_GGUF_TYPE_F64: return "f64";
    }
    return "unknown";
}

static bt_status fail_type(const bt_gguf *file, const char *key, bt_gguf_type type,
                           const char *wanted, bt_error *error) {
    return bt_fail(error, BT_ERR_CALLER_FILE, "%s: key '%s' is of type %s, %s is needed",
                   file->path, key, type_name(type), wanted);
}

/* The little-endian bits of a scalar, zero-extended. */
static uint64_t load_bits(const uint8_t *data, size_t bytes) {
    uint64_t bits = 0;
    for (size_t i = 0; i < bytes; i++)
        bits |= (uint64_t)data[i] << (8 * i);
    return bits;
}

static bool is_unsigned(bt_gguf_type type) {
    return type == BT_GGUF_TYPE_U8 || type == BT_GGUF_TYPE_U16 || type == BT_GGUF_TYPE_U32 ||
           type == BT_GGUF_TYPE_U64;
}

static bool is_signed(bt_gguf_type type) {
    return type == BT_GGUF_TYPE_I8 || type == BT_GGUF_TYPE_I16 || type == BT_GGUF_TYPE_I32 ||
           type == BT_GGUF_TYPE_I64;
}

bt_status bt_gguf_get_u64(const bt_gguf *file, const char *key, uint64_t *out, bt_error *error) {
    const gguf_value *value = NULL;
    const bt_status status = require_value(file, key, &value, error);
    if (status != BT_OK) return status;
    if (!is_unsigned(value->type) && !is_signed(value->type)) {
        return fail_type(file, key, value->type, "an integer", error);
    }
    const size_t bytes = gguf_scalar_bytes((uint32_t)value->type);
    const uint64_t bits = load_bits(value->data, bytes);
    if (is_signed(value->type) && (bits >> (8 * bytes - 1)) != 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: key '%s' is negative", file->path, key);
    }
    *out = bits;
    return BT_OK;
}

bt_status bt_gguf_get_u32(const bt_gguf *file, const char *key, uint32_t *out, bt_error *error) {
    uint64_t value = 0;
    const bt_status status = bt_gguf_get_u64(file, key, &value, error);
    if (status != BT_OK) return status;
    if (value > UINT32_MAX) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: key '%s' is %llu, more than 32 bits hold",
                       file->path, key, (unsigned long long)value);
    }
    *out = (uint32_t)value;
    return BT_OK;
}

static float load_f32(const uint8_t *data) {
    const uint32_t bits = (uint32_t)load_bits(data, sizeof bits);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

bt_status bt_gguf_get_f64(const bt_gguf *file, const char *key, double *out, bt_error *error) {
    const gguf_value *v = NULL;
    const bt_status status = require_value(file, key, &v, error);
    if (status != BT_OK) return status;
    if (v->type != BT_GGUF_TYPE_F32 && v->type != BT_GGUF_TYPE_F64) {
        return fail_type(file, key, v->type, "a floating-point number", error);
    }
    double value = 0;
    if (v->type == BT_GGUF_TYPE_F32) {
        value = (double)load_f32(v->data);
    } else {
        const uint64_t bits = load_bits(v->data, sizeof bits);
        memcpy(&value, &bits, sizeof value);
    }
    if (!isfinite(value)) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: key '%s' is not finite", file->path, key);
    }
    *out = value;
    return BT_OK;
}

bt_status bt_gguf_get_bool(const bt_gguf *file, const char *key, bool *out, bt_error *error) {
    const gguf_value *value = NULL;
    const bt_status status = require_value(file, key, &value, error);
    if (status != BT_OK) return status;
    if (value->type != BT_GGUF_TYPE_BOOL) return fail_type(file, key, value->type, "bool", error);
    *out = value->data[0] != 0;
    return BT_OK;
}

/* A string as stored: u64 length, then the bytes. */
static bt_gguf_string load_string(const uint8_t *data) {
    return (bt_gguf_string){.text = (const char *)data + sizeof(uint64_t),
                            .bytes = (size_t)load_bits(data, sizeof(uint64_t))};
}

bt_status bt_gguf_get_string(const bt_gguf *file, const char *key, bt_gguf_string *out,
                             bt_error *error) {
    const gguf_value *value = NULL;
    const bt_status status = require_value(file, key, &value, error);
    if (status != BT_OK) return status;
    if (value->type != BT_GGUF_TYPE_STRING) {
        return fail_type(file, key, value->type, "a string", error);
    }
    *out = load_string(value->data);
    return BT_OK;
}

bt_status bt_gguf_get_array(const bt_gguf *file, const char *key, bt_gguf_type type,
                            bt_gguf_array *out, bt_error *error) {
    const gguf_value *value = NULL;
    const bt_status status = require_value(file, key, &value, error);
    if (status != BT_OK) return status;
    if (value->type != BT_GGUF_TYPE_ARRAY) {
        return fail_type(file, key, value->type, "an array", error);
    }
    if (value->elements.type != type) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: key '%s' is an array of %s, an array of %s is needed", file->path, key,
                       type_name(value->elements.type), type_name(type));
    }
    *out = value->elements;
    return BT_OK;
}

int32_t bt_gguf_array_i32(const bt_gguf_array *array, size_t index) {
    BT_ASSERT(array->type == BT_GGUF_TYPE_I32);
    BT_ASSERT(index < array->count);
    const uint32_t bits = (uint32_t)load_bits(array->data + index * sizeof bits, sizeof bits);
    int32_t value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float bt_gguf_array_f32(const bt_gguf_array *array, size_t index) {
    BT_ASSERT(array->type == BT_GGUF_TYPE_F32);
    BT_ASSERT(index < array->count);
    return load_f32(array->data + index * sizeof(float));
}

bool bt_gguf_array_next_string(const bt_gguf_array *array, bt_gguf_string_cursor *cursor,
                               bt_gguf_string *out) {
    BT_ASSERT(array->type == BT_GGUF_TYPE_STRING);
    if (cursor->index >= array->count) return false;
    *out = load_string(array->data + cursor->offset);
    cursor->offset += sizeof(uint64_t) + out->bytes;
    cursor->index++;
    return true;
}

size_t bt_gguf_tensor_count(const bt_gguf *file) {
    return file->tensor_count;
}

const bt_gguf_tensor *bt_gguf_tensor_at(const bt_gguf *file, size_t index) {
    BT_ASSERT(index < file->tensor_count);
    return &file->tensors[index];
}

static int compare_name(const void *name, const void *tensor) {
    return strcmp(name, ((const bt_gguf_tensor *)tensor)->name);
}

const bt_gguf_tensor *bt_gguf_find_tensor(const bt_gguf *file, const char *name) {
    return bsearch(name, file->tensors, file->tensor_count, sizeof file->tensors[0], compare_name);
}
