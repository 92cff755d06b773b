/* The field is a JSON text, {"callable": HEX}, and HEX a pickle of the class itself, not of an
 * object. Python pickles an importable class as its module and its name, in one of two forms:
 *
 *   protocols 0-3  [0x80 N]  c MODULE \n NAME \n  memo  .
 *   protocols 4-5  0x80 N  [0x95 bytes]  MODULE memo NAME memo  0x93  memo  .
 *                  with each string as 0x8c LENGTH TEXT (or X, 4 bytes of length)
 *
 * where memo is one of `p TEXT \n`, `q BYTE`, `r 4 BYTES`, 0x94, or nothing. Exactly that is taken,
 * from the first byte to the last; anything else, a class sent by its code included, is refused. */
#include "router/api_processor.h"

#include <string.h>

#include "base/little_endian.h"

enum { TEXT_BYTES_MAX = 2048 /* of the field; the real ones have some 220 */ };

static const char CLASS[] = "DisallowedTokensLogitsProcessor";
static const char PACKAGE[] = "sglang.";

/* ---- the pickle ------------------------------------------------------------------------------ */

typedef struct reader {
    const uint8_t *at, *end;
} reader;

typedef struct span {
    const uint8_t *bytes;
    size_t count;
} span;

static size_t left_of(const reader *r) {
    return (size_t)(r->end - r->at);
}

static bool take_byte(reader *r, uint8_t wanted) {
    if (left_of(r) == 0 || *r->at != wanted) return false;
    r->at++;
    return true;
}

static bool take_span(reader *r, size_t count, span *out) {
    if (left_of(r) < count) return false;
    *out = (span){r->at, count};
    r->at += count;
    return true;
}

static bool take_line(reader *r, span *out) {
    const uint8_t *end = memchr(r->at, '\n', left_of(r));
    if (end == NULL) return false;
    const bool is_taken = take_span(r, (size_t)(end - r->at), out);
    return is_taken && take_byte(r, '\n');
}

static bool take_string(reader *r, span *out) {
    span length;
    if (take_byte(r, 0x8c)) return take_span(r, 1, &length) && take_span(r, *length.bytes, out);
    if (!take_byte(r, 'X') || !take_span(r, 4, &length)) return false;
    return take_span(r, bt_load_le32(length.bytes), out);
}

/* Where the unpickler remembers what it has just read; there may be none. */
static bool take_memo(reader *r) {
    span ignored;
    if (take_byte(r, 'p')) return take_line(r, &ignored);
    if (take_byte(r, 'q')) return take_span(r, 1, &ignored);
    if (take_byte(r, 'r')) return take_span(r, 4, &ignored);
    (void)take_byte(r, 0x94);
    return true;
}

static bool take_head(reader *r) {
    span head;
    if (!take_byte(r, 0x80)) return true;
    if (!take_span(r, 1, &head) || *head.bytes > 5) return false;
    if (!take_byte(r, 0x95)) return true;
    /* The frame is the rest. */
    return take_span(r, 8, &head) && bt_load_le64(head.bytes) == left_of(r);
}

/* The name of a class: its module and itself. */
static bool take_name(reader *r, span *module, span *name) {
    if (take_byte(r, 'c')) return take_line(r, module) && take_line(r, name);
    return take_string(r, module) && take_memo(r) && take_string(r, name) && take_memo(r) &&
           take_byte(r, 0x93);
}

static bool is_module(const span *module) {
    const size_t prefix = sizeof(PACKAGE) - 1;
    if (module->count <= prefix || memcmp(module->bytes, PACKAGE, prefix) != 0) return false;
    for (size_t i = prefix; i < module->count; i++) {
        const uint8_t c = module->bytes[i];
        const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!is_letter && !(c >= '0' && c <= '9') && c != '_' && c != '.') return false;
    }
    return true;
}

bool api_processor_is_known(const uint8_t *pickle, size_t bytes) {
    reader r = {pickle, pickle + bytes};
    span module, name;
    if (!take_head(&r) || !take_name(&r, &module, &name) || !take_memo(&r)) return false;
    if (!take_byte(&r, '.') || left_of(&r) != 0) return false;
    return is_module(&module) && name.count == sizeof(CLASS) - 1 &&
           memcmp(name.bytes, CLASS, name.count) == 0;
}

/* ---- the field ------------------------------------------------------------------------------- */

static int digit_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* 0: not hexadecimal. */
static size_t decode_hex(const char *text, size_t digits, uint8_t *out) {
    if (digits % 2 != 0) return 0;
    for (size_t i = 0; i < digits; i += 2) {
        const int high = digit_of(text[i]), low = digit_of(text[i + 1]);
        if (high < 0 || low < 0) return 0;
        out[i / 2] = (uint8_t)(high * 16 + low);
    }
    return digits / 2;
}

static bool is_known_text(const char *text, size_t bytes) {
    bt_json root, key, value, more;
    bt_json_iter iter;
    bt_error error;
    char hex[TEXT_BYTES_MAX];
    uint8_t pickle[TEXT_BYTES_MAX / 2];
    if (bt_json_parse(text, bytes, &root, &error) != BT_OK || root.kind != BT_JSON_OBJECT)
        return false;
    bt_json_iter_init(&iter, &root);
    if (!bt_json_next_field(&iter, &key, &value) || !bt_json_string_equals(&key, "callable") ||
        value.kind != BT_JSON_STRING || bt_json_next_field(&iter, &key, &more))
        return false;
    const size_t digits = bt_json_string_decode(&value, hex);
    return api_processor_is_known(pickle, decode_hex(hex, digits, pickle));
}

static bool fail(api_fields *fields, const char *what) {
    return api_fail(fields->failure, 400, API_ERROR_GENERATE,
                    "custom_logit_processor is not supported: Baton only supports %s%s.", CLASS,
                    what);
}

void api_processor_read(api_fields *fields, size_t field, api_sampling *sampling) {
    const bt_json *value = &fields->values[field];
    char text[TEXT_BYTES_MAX];
    if (fields->failure->http_status != 0 || !fields->is_given[field] ||
        api_fields_is_neutral(fields, field))
        return;
    sampling->disallows = value->kind == BT_JSON_STRING && value->bytes <= sizeof(text) &&
                          is_known_text(text, bt_json_string_decode(value, text));
    if (!sampling->disallows) (void)fail(fields, "");
}

bool api_processor_ids(api_fields *fields, size_t custom_params, bt_json *ids_out) {
    static const char WHAT[] = " with custom_params {\"token_ids\": [id, ...]}";
    const bt_json *value = &fields->values[custom_params];
    bt_json key, more;
    bt_json_iter iter;
    if (!fields->is_given[custom_params] || value->kind != BT_JSON_OBJECT)
        return fail(fields, WHAT);
    bt_json_iter_init(&iter, value);
    if (!bt_json_next_field(&iter, &key, ids_out) || !bt_json_string_equals(&key, "token_ids") ||
        ids_out->kind != BT_JSON_ARRAY || bt_json_next_field(&iter, &key, &more))
        return fail(fields, WHAT);
    return true;
}
