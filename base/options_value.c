/* From text to a value of one option: types, bounds, and the sentence that says what is wrong. */
#include "base/options_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Digits only: strtoull would take signs, spaces and other bases. */
static bool parse_u64(const char *text, size_t bytes, uint64_t *out) {
    if (bytes == 0) return false;
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        if (__builtin_mul_overflow(value, 10u, &value)) return false;
        if (__builtin_add_overflow(value, (uint64_t)(text[i] - '0'), &value)) return false;
    }
    *out = value;
    return true;
}

static bool parse_bytes(const char *text, uint64_t *out) {
    static const struct {
        const char *suffix;
        uint32_t shift;
    } units[] = {
        {"", 0},     {"B", 0},  {"K", 10},   {"KiB", 10}, {"M", 20},
        {"MiB", 20}, {"G", 30}, {"GiB", 30}, {"T", 40},   {"TiB", 40},
    };
    const size_t digits = strspn(text, "0123456789");
    uint64_t value = 0;
    if (!parse_u64(text, digits, &value)) return false;
    for (size_t i = 0; i < BT_ARRAY_COUNT(units); i++) {
        if (strcasecmp(text + digits, units[i].suffix) != 0) continue;
        return !__builtin_mul_overflow(value, UINT64_C(1) << units[i].shift, out);
    }
    return false;
}

bool options_parse_bool(const char *text, bool *out) {
    static const char *const yes[] = {"true", "yes", "on", "1"};
    static const char *const no[] = {"false", "no", "off", "0"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(yes); i++) {
        if (strcasecmp(text, yes[i]) == 0) {
            *out = true;
            return true;
        }
        if (strcasecmp(text, no[i]) == 0) {
            *out = false;
            return true;
        }
    }
    return false;
}

static bool parse_double(const char *text, double *out) {
    char *end = NULL;
    errno = 0;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || errno == ERANGE || !isfinite(value)) return false;
    *out = value;
    return true;
}

static bt_status bad_value(const bt_option *option, const char *text, const char *where,
                           const char *wanted, bt_error *error) {
    return bt_fail(error, BT_ERR_CALLER_CONFIG, "%s: '%.80s' is not %s (option --%s)", where, text,
                   wanted, option->name);
}

static bt_status write_integer(const bt_option *option, const char *text, const char *where,
                               uint8_t *field, bt_error *error) {
    uint64_t value = 0;
    const bool is_bytes = option->type == BT_OPTION_BYTES;
    const bool is_read =
        is_bytes ? parse_bytes(text, &value) : parse_u64(text, strlen(text), &value);
    if (!is_read) {
        return bad_value(option, text, where,
                         is_bytes ? "a size such as 4096, 64KiB or 1G" : "a whole number", error);
    }
    uint64_t max = option->max;
    if (option->min == 0 && max == 0) max = UINT64_MAX;
    if (option->type == BT_OPTION_U32 && max > UINT32_MAX) max = UINT32_MAX;
    if (value < option->min || value > max) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "%s: %.80s is out of bounds for --%s, which takes %" PRIu64 " to %" PRIu64,
                       where, text, option->name, option->min, max);
    }
    if (option->type == BT_OPTION_U32) {
        const uint32_t narrow = (uint32_t)value;
        memcpy(field, &narrow, sizeof narrow);
    } else {
        memcpy(field, &value, sizeof value);
    }
    return BT_OK;
}

static bt_status write_double(const bt_option *option, const char *text, const char *where,
                              uint8_t *field, bt_error *error) {
    double value = 0;
    if (!parse_double(text, &value)) {
        return bad_value(option, text, where, "a finite number", error);
    }
    const bool has_bounds = option->double_min != 0 || option->double_max != 0;
    if (has_bounds && (value < option->double_min || value > option->double_max)) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "%s: %.80s is out of bounds for --%s, which takes %g to %g", where, text,
                       option->name, option->double_min, option->double_max);
    }
    memcpy(field, &value, sizeof value);
    return BT_OK;
}

static bt_status write_choice(const bt_option *option, const char *text, const char *where,
                              uint8_t *field, bt_error *error) {
    char wanted[200] = "one of";
    for (uint32_t i = 0; option->choices[i] != NULL; i++) {
        if (strcmp(text, option->choices[i]) == 0) {
            memcpy(field, &i, sizeof i);
            return BT_OK;
        }
        const size_t used = strlen(wanted);
        (void)snprintf(wanted + used, sizeof wanted - used, "%s %s", i == 0 ? "" : ",",
                       option->choices[i]);
    }
    return bad_value(option, text, where, wanted, error);
}

bt_status options_write_value(const bt_option *option, const char *text, const char *where,
                              void *values, bt_error *error) {
    uint8_t *field = (uint8_t *)values + option->offset;
    switch (option->type) {
    case BT_OPTION_STRING: memcpy(field, &text, sizeof text); return BT_OK;
    case BT_OPTION_U32:
    case BT_OPTION_U64:
    case BT_OPTION_BYTES: return write_integer(option, text, where, field, error);
    case BT_OPTION_ENUM: return write_choice(option, text, where, field, error);
    case BT_OPTION_DOUBLE: return write_double(option, text, where, field, error);
    case BT_OPTION_BOOL: break;
    }
    bool value = false;
    if (!options_parse_bool(text, &value)) {
        return bad_value(option, text, where, "true or false", error);
    }
    memcpy(field, &value, sizeof value);
    return BT_OK;
}
