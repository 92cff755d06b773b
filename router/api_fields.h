/* Reading typed fields of a JSON object by name. An *api_fields* collects the values of known names
 * first (the last of a repeated one wins, null is absent), so that they are checked in our order
 * and not in the client's. The first failure is kept; later reads do nothing. */
#ifndef BT_ROUTER_API_FIELDS_H
#define BT_ROUTER_API_FIELDS_H

#include "base/json_reader.h"
#include "router/api_request.h"

enum {
    API_FIELDS_MAX = 80,
    API_STRING_MAX = 1024, /* bytes of a string that is read as a whole */
};

typedef struct api_fields {
    const char *const *names; /* [count] */
    size_t count;
    bt_json values[API_FIELDS_MAX];
    bool is_given[API_FIELDS_MAX]; /* and not null */
    bool is_null[API_FIELDS_MAX];
    api_failure *failure; /* http_status 0 = none yet */
} api_fields;

/* Records a failure unless there is one. Always false, so that callers can return it. */
bool api_fail(api_failure *failure, int http_status, api_error_shape shape, const char *format, ...)
    BT_PRINTF(4, 5);
/* Reads object; unknown_name (may be NULL) is called for names that are not in the list. */
void api_fields_collect(api_fields *fields, const bt_json *object, const char *const *names,
                        size_t count, api_failure *failure,
                        void (*unknown_name)(void *context, const bt_json *key), void *context);

/* Typed values; `out` keeps its default when the field is absent. Another type is a SCHEMA failure.
 */
void api_get_bool(api_fields *fields, size_t field, bool *out);
void api_get_int(api_fields *fields, size_t field, int64_t *out);
void api_get_number(api_fields *fields, size_t field, double *out);
/* A string without NUL of at most capacity - 1 bytes (API_STRING_MAX) once its escapes are read,
 * terminated. */
void api_get_string(api_fields *fields, size_t field, char *out, size_t capacity);
/* Which of `count` words a string is; 0, the default, when the field is absent. */
uint32_t api_get_word(api_fields *fields, size_t field, const char *const *words, uint32_t count);
/* Null, false, "", 0, [] or {}; or absent. */
bool api_fields_is_neutral(const api_fields *fields, size_t field);
/* Fails by name when the field's value is not neutral. */
void api_refuse_unless_neutral(api_fields *fields, size_t field, const char *why);

#endif
