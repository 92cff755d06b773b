/* Typed reading of one object's fields. All fields are collected before the first is read, and a
 * read after a failure does nothing: callers read straight on and look at the failure once, and
 * which failure a client gets does not depend on the order of its fields.
 *
 * The object was checked by bt_json_parse; values point into its text. What values are allowed
 * (ranges, combinations) is the callers'. */
#include "router/api_fields.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

enum { ESCAPE_BYTES = 6 /* "\u0041": as long as a byte can be written */ };

bool api_fail(api_failure *failure, int http_status, api_error_shape shape, const char *format,
              ...) {
    if (failure->http_status != 0) return false;
    failure->http_status = http_status;
    failure->shape = shape;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure->text, sizeof(failure->text), format, arguments);
    va_end(arguments);
    return false;
}

static size_t find_name(const char *const *names, size_t count, const bt_json *key) {
    for (size_t i = 0; i < count; i++) {
        if (bt_json_string_equals(key, names[i])) return i;
    }
    return count;
}

void api_fields_collect(api_fields *fields, const bt_json *object, const char *const *names,
                        size_t count, api_failure *failure,
                        void (*unknown_name)(void *context, const bt_json *key), void *context) {
    bt_json_iter iter;
    bt_json key, value;
    BT_ASSERT(count <= API_FIELDS_MAX);
    memset(fields, 0, sizeof(*fields));
    fields->names = names;
    fields->count = count;
    fields->failure = failure;
    bt_json_iter_init(&iter, object);
    while (bt_json_next_field(&iter, &key, &value)) {
        size_t field = find_name(names, count, &key);
        if (field == count) {
            if (unknown_name != NULL) unknown_name(context, &key);
            continue;
        }
        fields->values[field] = value;
        fields->is_null[field] = value.kind == BT_JSON_NULL;
        fields->is_given[field] = value.kind != BT_JSON_NULL;
    }
}

/* false: absent, or something failed before. */
static bool is_readable(const api_fields *fields, size_t field) {
    return fields->failure->http_status == 0 && fields->is_given[field];
}

static void fail_type(api_fields *fields, size_t field, const char *expected) {
    const bt_json *value = &fields->values[field];
    (void)api_fail(fields->failure, 400, API_ERROR_SCHEMA, "%s must be %s, got %s.",
                   fields->names[field], expected, bt_json_kind_name(value->kind));
}

void api_get_bool(api_fields *fields, size_t field, bool *out) {
    if (!is_readable(fields, field)) return;
    bt_json_kind kind = fields->values[field].kind;
    if (kind == BT_JSON_TRUE || kind == BT_JSON_FALSE) {
        *out = kind == BT_JSON_TRUE;
    } else {
        fail_type(fields, field, "a boolean");
    }
}

void api_get_int(api_fields *fields, size_t field, int64_t *out) {
    if (!is_readable(fields, field)) return;
    if (!bt_json_get_int64(&fields->values[field], true, out))
        fail_type(fields, field, "an integer of 64 bits");
}

void api_get_number(api_fields *fields, size_t field, double *out) {
    if (!is_readable(fields, field)) return;
    if (!bt_json_get_double(&fields->values[field], out)) fail_type(fields, field, "a number");
}

void api_get_string(api_fields *fields, size_t field, char *out, size_t capacity) {
    if (!is_readable(fields, field)) return;
    const bt_json *value = &fields->values[field];
    char decoded[ESCAPE_BYTES * API_STRING_MAX + 2];
    BT_ASSERT(capacity <= API_STRING_MAX + 1);
    if (value->kind != BT_JSON_STRING) {
        fail_type(fields, field, "a string");
        return;
    }
    const bool fits = value->bytes <= sizeof(decoded);
    const size_t bytes = fits ? bt_json_string_decode(value, decoded) : sizeof(decoded);
    if (bytes >= capacity) {
        (void)api_fail(fields->failure, 400, API_ERROR_SCHEMA, "%s is longer than %zu bytes.",
                       fields->names[field], capacity - 1);
    } else if (memchr(decoded, 0, bytes) != NULL) {
        (void)api_fail(fields->failure, 400, API_ERROR_SCHEMA, "%s holds a NUL character.",
                       fields->names[field]);
    } else {
        memcpy(out, decoded, bytes);
        out[bytes] = 0;
    }
}

/* 'a' or 'b'; 'a', 'b' or 'c'. */
static void fail_word(api_fields *fields, size_t field, const char *const *words, uint32_t count) {
    const bt_json *value = &fields->values[field];
    const int bytes = value->bytes < 66 ? (int)value->bytes - 2 : 64;
    char list[256];
    int used = 0;
    for (uint32_t i = 0; i < count && used < (int)sizeof(list); i++) {
        const char *before = i == 0 ? "" : i + 1 == count ? " or " : ", ";
        used += snprintf(list + used, sizeof(list) - (size_t)used, "%s'%s'", before, words[i]);
    }
    (void)api_fail(fields->failure, 400, API_ERROR_GENERATE, "%s must be %s, got '%.*s'.",
                   fields->names[field], list, bytes, value->text + 1);
}

uint32_t api_get_word(api_fields *fields, size_t field, const char *const *words, uint32_t count) {
    if (!is_readable(fields, field)) return 0;
    if (fields->values[field].kind != BT_JSON_STRING) {
        fail_type(fields, field, "a string");
        return 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (bt_json_string_equals(&fields->values[field], words[i])) return i;
    }
    fail_word(fields, field, words, count);
    return 0;
}

static bool is_neutral(const bt_json *value) {
    double number;
    bt_json_iter iter;
    bt_json item;
    switch (value->kind) {
    case BT_JSON_NULL:
    case BT_JSON_FALSE: return true;
    case BT_JSON_TRUE: return false;
    case BT_JSON_NUMBER: return bt_json_get_double(value, &number) && number == 0;
    case BT_JSON_STRING: return value->bytes == 2;
    case BT_JSON_ARRAY:
    case BT_JSON_OBJECT: bt_json_iter_init(&iter, value); return !bt_json_next_item(&iter, &item);
    }
    return false;
}

bool api_fields_is_neutral(const api_fields *fields, size_t field) {
    return !fields->is_given[field] || is_neutral(&fields->values[field]);
}

void api_refuse_unless_neutral(api_fields *fields, size_t field, const char *why) {
    if (!is_readable(fields, field) || is_neutral(&fields->values[field])) return;
    (void)api_fail(fields->failure, 400, API_ERROR_GENERATE, "%s is not supported%s.",
                   fields->names[field], why);
}
