/* The strict reader: what is refused and where, what walking gives, and agreement with jansson
 * about what is JSON on many mutated texts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>

#include "base/json_reader.h"

static bool parses(const char *text, size_t bytes, bt_json *root) {
    /* In a block of its own size, so that a read past the end is seen by the sanitizers. */
    char *copy = malloc(bytes > 0 ? bytes : 1);
    bt_error error;
    bt_json local;
    memcpy(copy, text, bytes);
    bt_status status = bt_json_parse(copy, bytes, &local, &error);
    assert_true(status == BT_OK || status == BT_ERR_REQUEST_INVALID);
    if (status == BT_OK && root != NULL) {
        *root = local;
        root->text = text + (local.text - copy);
    }
    free(copy);
    return status == BT_OK;
}

static const char *const GOOD[] = {
    "null",
    " true ",
    "false",
    "0",
    "-0",
    "1",
    "-1.5e+10",
    "1E400",
    "\"\"",
    "\"a\\u00e9\\n\"",
    "\"\\ud83d\\ude00\"",
    "\"\\u0000\"",
    "[]",
    "[1,[2,[]],{}]",
    "{}",
    "{\"a\":1,\"a\":2}",
    "{\"a\":{\"b\":[null,true]}}\r\n\t",
    "\xef\xbb\xbf{}",
    "\"\xf0\x9f\x98\x80\"",
    "\"\x7f\"",
};

static const struct {
    const char *text;
    const char *error; /* a part of the sentence */
} BAD[] = {
    {"", "byte 0: the body is empty"},
    {"  ", "byte 2: the body is empty"},
    {"{", "byte 1: the text ends too early"},
    {"[1", "byte 2: the text ends too early"},
    {"[1,]", "byte 3: not a JSON value"},
    {"{\"a\":1,}", "byte 7: a key that is not a string"},
    {"{a:1}", "byte 1: a key that is not a string"},
    {"{\"a\" 1}", "byte 5: no ':' after a key"},
    {"{\"a\":}", "byte 5: not a JSON value"},
    {"[1 2]", "byte 3: no ',' or ']' after an item"},
    {"[1}", "byte 2: no ',' or ']' after an item"},
    {"{\"a\":1]", "byte 6: no ',' or '}' after a member"},
    {"{} x", "byte 3: more text after the value"},
    {"1 2", "byte 2: more text after the value"},
    {"nul", "byte 0: not a JSON value"},
    {"NaN", "byte 0: not a JSON value"},
    {"Infinity", "byte 0: not a JSON value"},
    {"01", "byte 1: more text after the value"},
    {"+1", "byte 0: not a JSON value"},
    {"-", "byte 1: a number without digits"},
    {"1.", "byte 2: a number without digits after the point"},
    {".5", "byte 0: not a JSON value"},
    {"1e", "byte 2: a number without digits in the exponent"},
    {"\"abc", "byte 4: the text ends inside a string"},
    {"\"\\", "byte 2: the text ends inside a string"},
    {"\"\\x\"", "byte 2: an unknown escape"},
    {"\"\\u12g4\"", "byte 2: \\u without four hexadecimal digits"},
    {"\"\\u12", "byte 2: \\u without four hexadecimal digits"},
    {"\"\\ud83d\"", "byte 2: a lone surrogate"},
    {"\"\\ud83d\\n\"", "byte 2: a lone surrogate"},
    {"\"\\ud83d\\ud83d\"", "byte 2: a lone surrogate"},
    {"\"\\ude00\"", "byte 2: a lone surrogate"},
    {"\"a\nb\"", "byte 2: a control character in a string"},
    {"\"\xff\"", "byte 1: bytes that are not UTF-8"},
    {"\"\xc0\x80\"", "byte 1: bytes that are not UTF-8"},
    {"\"\xe0\x80\x80\"", "byte 1: bytes that are not UTF-8"},
    {"\"\xed\xa0\x80\"", "byte 1: bytes that are not UTF-8"},
    {"\"\xf4\x90\x80\x80\"", "byte 1: bytes that are not UTF-8"},
    {"\"\xe2\x82\"", "byte 1: bytes that are not UTF-8"},
    {"{\"a\":\xff}", "byte 5: not a JSON value"},
};

static void test_good_and_bad(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof(GOOD) / sizeof(GOOD[0]); i++) {
        if (!parses(GOOD[i], strlen(GOOD[i]), NULL)) fail_msg("refused: %s", GOOD[i]);
    }
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        bt_error error = {0};
        bt_json root;
        assert_int_equal(bt_json_parse(BAD[i].text, strlen(BAD[i].text), &root, &error),
                         BT_ERR_REQUEST_INVALID);
        if (strstr(error.text, BAD[i].error) == NULL) fail_msg("%s: %s", BAD[i].text, error.text);
    }
    assert_false(parses("\"a\0b\"", 5, NULL));
    assert_false(parses("\0", 1, NULL));
}

static void test_depth(void **state) {
    (void)state;
    char text[2 * BT_JSON_DEPTH_MAX + 8];
    for (size_t depth = BT_JSON_DEPTH_MAX - 1; depth <= BT_JSON_DEPTH_MAX + 1; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        assert_int_equal(parses(text, 2 * depth, NULL), depth <= BT_JSON_DEPTH_MAX);
    }
}

static void test_walking(void **state) {
    (void)state;
    const char *text =
        " {\"a\\\"]\" : [1, \"x,]}\" ,{\"y\":{}}],\"b\":\"q\",\"c\":-2.5e1 , \"d\":null}";
    bt_json root, key, value, item;
    bt_json_iter fields, items;
    assert_true(parses(text, strlen(text), &root));
    assert_int_equal(root.kind, BT_JSON_OBJECT);
    bt_json_iter_init(&fields, &root);
    assert_true(bt_json_next_field(&fields, &key, &value));
    assert_true(bt_json_string_equals(&key, "a\"]"));
    assert_false(bt_json_string_equals(&key, "a"));
    bt_json_iter_init(&items, &value);
    assert_true(bt_json_next_item(&items, &item));
    assert_int_equal(item.kind, BT_JSON_NUMBER);
    assert_true(bt_json_next_item(&items, &item));
    assert_true(bt_json_string_equals(&item, "x,]}"));
    assert_true(bt_json_next_item(&items, &item));
    assert_int_equal(item.kind, BT_JSON_OBJECT);
    assert_int_equal(item.bytes, strlen("{\"y\":{}}"));
    assert_false(bt_json_next_item(&items, &item));
    assert_true(bt_json_next_field(&fields, &key, &value));
    assert_true(bt_json_string_equals(&value, "q"));
    assert_true(bt_json_next_field(&fields, &key, &value));
    double real;
    assert_true(bt_json_get_double(&value, &real));
    assert_true(real == -25.0);
    assert_true(bt_json_next_field(&fields, &key, &value));
    assert_int_equal(value.kind, BT_JSON_NULL);
    assert_false(bt_json_next_field(&fields, &key, &value));
}

static void test_string_decoding(void **state) {
    (void)state;
    const char *text = "\"a\\u00e9\\u20ac\\ud83d\\ude00\\\\\\/\\b\\f\\n\\r\\t\\u0000z\"";
    static const char EXPECTED[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\\/\b\f\n\r\t\0z";
    char out[128];
    bt_json root;
    assert_true(parses(text, strlen(text), &root));
    assert_int_equal(bt_json_string_decode(&root, out), sizeof(EXPECTED) - 1);
    assert_memory_equal(out, EXPECTED, sizeof(EXPECTED) - 1);
}

static void test_integers(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool is_good, is_good_real;
        int64_t value;
    } CASES[] = {
        {"0", true, true, 0},
        {"-0", true, true, 0},
        {"9223372036854775807", true, true, INT64_MAX},
        {"-9223372036854775808", true, true, INT64_MIN},
        {"9223372036854775808", false, false, 0},
        {"-9223372036854775809", false, false, 0},
        {"99999999999999999999999999", false, false, 0},
        {"1.0", false, true, 1},
        {"-3.0e2", false, true, -300},
        {"1.5", false, false, 0},
        {"-0.0", false, true, 0},
        {"10e-1", false, true, 1},
        {"1e3", false, true, 1000},
        {"9007199254740991.0", false, true, 9007199254740991},
        {"9007199254740993.0", false, false, 0}, /* a double has no room for it */
        {"1e400", false, false, 0},
        {"1e300", false, false, 0},
        {"true", false, false, 0},
        {"\"1\"", false, false, 0},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        bt_json root;
        int64_t value = 0;
        assert_true(parses(CASES[i].text, strlen(CASES[i].text), &root));
        assert_int_equal(bt_json_get_int64(&root, false, &value), CASES[i].is_good);
        if (CASES[i].is_good) assert_int_equal(value, CASES[i].value);
        assert_int_equal(bt_json_get_int64(&root, true, &value), CASES[i].is_good_real);
        if (CASES[i].is_good_real) assert_int_equal(value, CASES[i].value);
    }
    bt_json root;
    bt_json_integer integer;
    assert_true(parses("18446744073709551615", 20, &root));
    assert_true(bt_json_get_integer(&root, false, &integer));
    assert_int_equal(integer.magnitude, UINT64_MAX);
}

/* jansson refuses NUL in keys and numbers that are too large, and nests deeper; else it must
 * agree. */
static bool jansson_parses(const char *text, size_t bytes, bool is_ours) {
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (root == NULL) {
        enum json_error_code code = json_error_code(&error);
        bool is_stricter =
            code == json_error_numeric_overflow || code == json_error_null_byte_in_key;
        return is_stricter && is_ours;
    }
    json_decref(root);
    return true;
}

static void test_agrees_with_jansson(void **state) {
    (void)state;
    static const char *const SEEDS[] = {
        "{\"text\":\"a\\u00e9\\ud83d\\ude00\",\"sampling_params\":{\"top_k\":50,\"top_p\":0.95}}",
        "[1,-2.5e3,true,false,null,\"x\\\"y\\\\\",{},[]]",
        "{\"input_ids\":[1,2,3],\"stop\":[\"\\n\",\"\xe2\x82\xac\"]}",
    };
    static const char ALPHABET[] = "{}[],:\"\\u0123456789abdef+-.eEtrufalsn \n\xc3\xa9\xed\xa0\xff";
    uint64_t random = 0x9e3779b97f4a7c15u;
    unsigned accepted = 0;
    for (unsigned i = 0; i < 60000; i++) {
        char text[128];
        const char *seed = SEEDS[i % 3];
        size_t bytes = strlen(seed);
        memcpy(text, seed, bytes);
        for (unsigned changes = 0; changes <= i % 3; changes++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            size_t at = (size_t)(random >> 33) % bytes;
            text[at] = ALPHABET[(random >> 20) % (sizeof(ALPHABET) - 1)];
        }
        bool is_ours = parses(text, bytes, NULL);
        if (is_ours != jansson_parses(text, bytes, is_ours))
            fail_msg("we %s, jansson does not: %.*s", is_ours ? "accept" : "refuse", (int)bytes,
                     text);
        accepted += is_ours;
    }
    assert_true(accepted > 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_and_bad), cmocka_unit_test(test_depth),
        cmocka_unit_test(test_walking),      cmocka_unit_test(test_string_decoding),
        cmocka_unit_test(test_integers),     cmocka_unit_test(test_agrees_with_jansson),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
