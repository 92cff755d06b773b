/* One pass checks the whole text; walking then trusts it. Depth is counted, not recursed. */
#include "base/json_reader.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/hex.h"
#include "base/utf8.h"

/* What the grammar allows next. */
typedef enum expectation {
    EXPECT_VALUE,
    EXPECT_VALUE_OR_END, /* after '[' */
    EXPECT_KEY,
    EXPECT_KEY_OR_END, /* after '{' */
    EXPECT_COMMA_OR_END,
    EXPECT_NOTHING,
} expectation;

typedef struct checker {
    const char *start, *at, *end;
    bt_error *error;
    uint64_t is_object; /* one bit per open container, innermost lowest */
    uint32_t depth;
    expectation expects;
} checker;

static bt_status refuse(const checker *c, const char *what) {
    return bt_fail(c->error, BT_ERR_REQUEST_INVALID, "invalid JSON at byte %zu: %s",
                   (size_t)(c->at - c->start), what);
}

static bool is_space(char c) {
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

/* ---- strings --------------------------------------------------------------------------------- */

/* The value of four hexadecimal digits, or -1. */
static int32_t hex4(const char *text, const char *end) {
    int32_t value = 0;
    if (end - text < 4) return -1;
    for (int i = 0; i < 4; i++) {
        const int digit = bt_hex_digit(text[i]);
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* at points behind a backslash. */
static bt_status check_escape(checker *c) {
    if (c->at == c->end) return refuse(c, "the text ends inside a string");
    if (*c->at != 'u') {
        if (*c->at == 0 || strchr("\"\\/bfnrt", *c->at) == NULL)
            return refuse(c, "an unknown escape");
        c->at++;
        return BT_OK;
    }
    int32_t unit = hex4(c->at + 1, c->end);
    if (unit < 0) return refuse(c, "\\u without four hexadecimal digits");
    if (unit >= 0xdc00 && unit <= 0xdfff) return refuse(c, "a lone surrogate");
    if (unit >= 0xd800 && unit <= 0xdbff) {
        bool has_second = c->end - c->at >= 11 && c->at[5] == '\\' && c->at[6] == 'u';
        int32_t second = has_second ? hex4(c->at + 7, c->end) : -1;
        if (second < 0xdc00 || second > 0xdfff) return refuse(c, "a lone surrogate");
        c->at += 6;
    }
    c->at += 5;
    return BT_OK;
}

static bt_status check_string(checker *c) {
    c->at++;
    while (c->at < c->end) {
        unsigned char byte = (unsigned char)*c->at;
        if (byte == '"') {
            c->at++;
            return BT_OK;
        }
        if (byte == '\\') {
            c->at++;
            bt_status status = check_escape(c);
            if (status != BT_OK) return status;
            continue;
        }
        if (byte < 0x20) return refuse(c, "a control character in a string");
        size_t bytes = byte < 0x80 ? 1 : bt_utf8_next(c->at, (size_t)(c->end - c->at));
        if (bytes == 0) return refuse(c, "bytes that are not UTF-8");
        c->at += bytes;
    }
    return refuse(c, "the text ends inside a string");
}

/* ---- numbers and words ----------------------------------------------------------------------- */

static bool skip_digits(checker *c) {
    const char *first = c->at;
    while (c->at < c->end && is_digit(*c->at)) {
        c->at++;
    }
    return c->at > first;
}

static bt_status check_number(checker *c) {
    const char *first = c->at;
    if (*c->at == '-') c->at++;
    if (c->at < c->end && *c->at == '0') {
        c->at++;
    } else if (!skip_digits(c)) {
        return refuse(c, "a number without digits");
    }
    if (c->at < c->end && *c->at == '.') {
        c->at++;
        if (!skip_digits(c)) return refuse(c, "a number without digits after the point");
    }
    if (c->at < c->end && (*c->at == 'e' || *c->at == 'E')) {
        c->at++;
        if (c->at < c->end && (*c->at == '+' || *c->at == '-')) c->at++;
        if (!skip_digits(c)) return refuse(c, "a number without digits in the exponent");
    }
    if (c->at - first > BT_JSON_NUMBER_BYTES_MAX) return refuse(c, "a number is too long");
    return BT_OK;
}

static bt_status check_word(checker *c) {
    static const char *const WORDS[] = {"null", "true", "false"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(WORDS); i++) {
        size_t bytes = strlen(WORDS[i]);
        if ((size_t)(c->end - c->at) >= bytes && memcmp(c->at, WORDS[i], bytes) == 0) {
            c->at += bytes;
            return BT_OK;
        }
    }
    return refuse(c, "not a JSON value");
}

/* ---- the grammar ----------------------------------------------------------------------------- */

static void close_value(checker *c) {
    c->expects = c->depth == 0 ? EXPECT_NOTHING : EXPECT_COMMA_OR_END;
}

static bt_status check_value(checker *c) {
    char first = *c->at;
    bt_status status = BT_OK;
    if (first == '{' || first == '[') {
        if (c->depth == BT_JSON_DEPTH_MAX) return refuse(c, "nested too deeply");
        c->depth++;
        c->is_object = c->is_object << 1 | (first == '{');
        c->at++;
        c->expects = first == '{' ? EXPECT_KEY_OR_END : EXPECT_VALUE_OR_END;
        return BT_OK;
    }
    if (first == '"') {
        status = check_string(c);
    } else if (first == '-' || is_digit(first)) {
        status = check_number(c);
    } else {
        status = check_word(c);
    }
    close_value(c);
    return status;
}

static void skip_space(checker *c) {
    while (c->at < c->end && is_space(*c->at)) {
        c->at++;
    }
}

static bt_status check_key(checker *c) {
    if (*c->at != '"') return refuse(c, "a key that is not a string");
    bt_status status = check_string(c);
    if (status != BT_OK) return status;
    skip_space(c);
    if (c->at == c->end || *c->at != ':') return refuse(c, "no ':' after a key");
    c->at++;
    c->expects = EXPECT_VALUE;
    return BT_OK;
}

static bt_status check_close(checker *c) {
    bool is_object = (c->is_object & 1) != 0;
    if (*c->at != (is_object ? '}' : ']'))
        return refuse(c,
                      is_object ? "no ',' or '}' after a member" : "no ',' or ']' after an item");
    c->at++;
    c->depth--;
    c->is_object >>= 1;
    close_value(c);
    return BT_OK;
}

static bt_status check_comma_or_end(checker *c) {
    if (*c->at != ',') return check_close(c);
    c->at++;
    c->expects = (c->is_object & 1) != 0 ? EXPECT_KEY : EXPECT_VALUE;
    return BT_OK;
}

static bt_status check_next(checker *c) {
    bool is_end = *c->at == ']' || *c->at == '}';
    switch (c->expects) {
    case EXPECT_VALUE: return check_value(c);
    case EXPECT_VALUE_OR_END: return is_end ? check_close(c) : check_value(c);
    case EXPECT_KEY: return check_key(c);
    case EXPECT_KEY_OR_END: return is_end ? check_close(c) : check_key(c);
    case EXPECT_COMMA_OR_END: return check_comma_or_end(c);
    case EXPECT_NOTHING: return refuse(c, "more text after the value");
    }
    BT_ASSERT(false);
    return BT_ERR_WORKER_INTERNAL;
}

static bt_json_kind kind_of(char first) {
    switch (first) {
    case '{': return BT_JSON_OBJECT;
    case '[': return BT_JSON_ARRAY;
    case '"': return BT_JSON_STRING;
    case 'n': return BT_JSON_NULL;
    case 't': return BT_JSON_TRUE;
    case 'f': return BT_JSON_FALSE;
    }
    return BT_JSON_NUMBER;
}

bt_status bt_json_parse(const char *text, size_t bytes, bt_json *root_out, bt_error *error) {
    checker c = {.start = text, .at = text, .end = text + bytes, .error = error};
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) c.at += 3;
    skip_space(&c);
    const char *first = c.at;
    const char *last = c.at;
    while (c.at < c.end) {
        bt_status status = check_next(&c);
        if (status != BT_OK) return status;
        last = c.at;
        skip_space(&c);
    }
    if (c.expects != EXPECT_NOTHING)
        return refuse(&c, first == c.end ? "the body is empty" : "the text ends too early");
    root_out->kind = kind_of(*first);
    root_out->text = first;
    root_out->bytes = (size_t)(last - first);
    return BT_OK;
}

/* ---- walking a checked text ------------------------------------------------------------------ */

static const char *string_end(const char *at) {
    for (at++; *at != '"'; at++) {
        if (*at == '\\') at++;
    }
    return at + 1;
}

static const char *container_end(const char *at) {
    uint32_t depth = 0;
    for (;;) {
        if (*at == '"') {
            at = string_end(at);
            continue;
        }
        if (*at == '{' || *at == '[') depth++;
        if ((*at == '}' || *at == ']') && --depth == 0) return at + 1;
        at++;
    }
}

static const char *value_end(const char *at, const char *end) {
    if (*at == '"') return string_end(at);
    if (*at == '{' || *at == '[') return container_end(at);
    while (at < end && *at != ',' && *at != ']' && *at != '}' && *at != ':' && !is_space(*at)) {
        at++;
    }
    return at;
}

void bt_json_iter_init(bt_json_iter *iter, const bt_json *container) {
    BT_ASSERT(container->kind == BT_JSON_ARRAY || container->kind == BT_JSON_OBJECT);
    iter->at = container->text + 1;
    iter->end = container->text + container->bytes - 1;
}

bool bt_json_next_item(bt_json_iter *iter, bt_json *item_out) {
    while (iter->at < iter->end && (is_space(*iter->at) || *iter->at == ',' || *iter->at == ':')) {
        iter->at++;
    }
    if (iter->at == iter->end) return false;
    const char *first = iter->at;
    iter->at = value_end(first, iter->end);
    *item_out = (bt_json){kind_of(*first), first, (size_t)(iter->at - first)};
    return true;
}

bool bt_json_next_field(bt_json_iter *iter, bt_json *key_out, bt_json *value_out) {
    return bt_json_next_item(iter, key_out) && bt_json_next_item(iter, value_out);
}

/* The code point of the "\uXXXX" escape(s) at *at; moves it behind them. */
static uint32_t take_unicode(const char **at, const char *end) {
    uint32_t code = (uint32_t)hex4(*at + 2, end);
    *at += 6;
    if (code < 0xd800 || code > 0xdbff) return code;
    uint32_t low = (uint32_t)hex4(*at + 2, end);
    *at += 6;
    return 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
}

static char unescape(char c) {
    switch (c) {
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    }
    return c;
}

size_t bt_json_string_decode(const bt_json *value, char *out) {
    BT_ASSERT(value->kind == BT_JSON_STRING);
    const char *at = value->text + 1;
    const char *end = value->text + value->bytes - 1;
    size_t used = 0;
    while (at < end) {
        const char *slash = memchr(at, '\\', (size_t)(end - at));
        size_t plain = (size_t)((slash != NULL ? slash : end) - at);
        memcpy(out + used, at, plain);
        used += plain;
        at += plain;
        if (at == end) break;
        if (at[1] == 'u') {
            used += bt_utf8_encode(take_unicode(&at, end), out + used);
        } else {
            out[used++] = unescape(at[1]);
            at += 2;
        }
    }
    return used;
}

bool bt_json_string_equals(const bt_json *value, const char *literal) {
    if (value->kind != BT_JSON_STRING) return false;
    size_t bytes = strlen(literal);
    if (memchr(value->text, '\\', value->bytes) == NULL)
        return value->bytes == bytes + 2 && memcmp(value->text + 1, literal, bytes) == 0;
    /* An escape is at most six times as long as what it stands for. */
    char decoded[768];
    if (value->bytes > sizeof(decoded)) return false;
    return bt_json_string_decode(value, decoded) == bytes && memcmp(decoded, literal, bytes) == 0;
}

/* ---- numbers --------------------------------------------------------------------------------- */

bool bt_json_get_double(const bt_json *value, double *out) {
    char text[BT_JSON_NUMBER_BYTES_MAX + 1];
    if (value->kind != BT_JSON_NUMBER) return false;
    BT_ASSERT(value->bytes < sizeof(text));
    memcpy(text, value->text, value->bytes);
    text[value->bytes] = 0;
    *out = strtod(text, NULL);
    return true;
}

/* A real that is whole: exact up to 2^53, beyond it refused. */
static bool integer_of_real(const bt_json *value, bt_json_integer *out) {
    double real;
    if (!bt_json_get_double(value, &real)) return false;
    double size = fabs(real);
    /* From 2^53 on it may be the neighbour of what was written. */
    if (!(size < 9007199254740992.0) || size != floor(size)) return false;
    out->is_negative = real < 0;
    out->magnitude = (uint64_t)size;
    return true;
}

bool bt_json_get_integer(const bt_json *value, bool takes_real, bt_json_integer *out) {
    if (value->kind != BT_JSON_NUMBER) return false;
    uint64_t magnitude = 0;
    size_t first = value->text[0] == '-';
    for (size_t i = first; i < value->bytes; i++) {
        char c = value->text[i];
        if (!is_digit(c)) return takes_real && integer_of_real(value, out);
        if (__builtin_mul_overflow(magnitude, 10u, &magnitude) ||
            __builtin_add_overflow(magnitude, (uint64_t)(c - '0'), &magnitude))
            return false;
    }
    out->is_negative = first == 1 && magnitude > 0;
    out->magnitude = magnitude;
    return true;
}

bool bt_json_get_int64(const bt_json *value, bool takes_real, int64_t *out) {
    bt_json_integer integer;
    if (!bt_json_get_integer(value, takes_real, &integer)) return false;
    uint64_t limit = (uint64_t)INT64_MAX + integer.is_negative;
    if (integer.magnitude > limit) return false;
    *out = integer.is_negative ? (int64_t)(0 - integer.magnitude) : (int64_t)integer.magnitude;
    return true;
}

const char *bt_json_kind_name(bt_json_kind kind) {
    switch (kind) {
    case BT_JSON_NULL: return "null";
    case BT_JSON_FALSE:
    case BT_JSON_TRUE: return "a boolean";
    case BT_JSON_NUMBER: return "a number";
    case BT_JSON_STRING: return "a string";
    case BT_JSON_ARRAY: return "a list";
    case BT_JSON_OBJECT: return "an object";
    }
    return "unknown";
}
