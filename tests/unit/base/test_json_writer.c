/* JSON text that is appended: escapes, numbers, limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "base/json_writer.h"

static void test_strings(void **state) {
    (void)state;
    static const char INPUT[] = "a \"b\\c\b\f\n\r\t\x01\x1f/\x7f\xc3\xa9\xf0\x9f\x98\x80\0z";
    bt_text text;
    bt_text_init(&text, 1000);
    bt_json_add_string(&text, INPUT, sizeof(INPUT) - 1);
    assert_string_equal(text.bytes, "\"a \\\"b\\\\c\\b\\f\\n\\r\\t\\u0001\\u001f/\x7f\xc3\xa9"
                                    "\xf0\x9f\x98\x80\\u0000z\"");
    bt_text_clear(&text);
    bt_json_add_string(&text, "", 0);
    assert_string_equal(text.bytes, "\"\"");
    bt_text_fini(&text);
}

static void test_bytes_that_are_not_utf8(void **state) {
    (void)state;
    static const struct {
        const char *bytes, *json;
    } CASES[] = {
        {"a\xc3", "\"a\xef\xbf\xbd\""}, /* cut */
        {"\xc3'", "\"\xef\xbf\xbd'\""}, /* cut, and a sentence goes on */
        {"\xe6\x97", "\"\xef\xbf\xbd\xef\xbf\xbd\""},
        {"\x80\"\xff", "\"\xef\xbf\xbd\\\"\xef\xbf\xbd\""},
        {"\xed\xa0\x80", "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\""}, /* a surrogate */
        {"\xe6\x97\xa5", "\"\xe6\x97\xa5\""},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        bt_text text;
        bt_text_init(&text, 1000);
        bt_json_add_string(&text, CASES[i].bytes, strlen(CASES[i].bytes));
        assert_string_equal(text.bytes, CASES[i].json);
        bt_text_fini(&text);
    }
}

static void test_numbers(void **state) {
    (void)state;
    bt_text text;
    bt_text_init(&text, 1000);
    bt_json_add_int(&text, INT64_MIN);
    bt_text_add(&text, " ", 1);
    bt_json_add_float(&text, -0.6931472f);
    bt_text_add(&text, " ", 1);
    bt_json_add_double(&text, 0.0);
    bt_text_add(&text, " ", 1);
    bt_json_add_double(&text, (double)NAN);
    bt_text_add(&text, " ", 1);
    bt_json_add_double(&text, 1e-7);
    bt_text_add(&text, " ", 1);
    bt_json_add_bool(&text, true);
    bt_text_add(&text, " ", 1);
    bt_json_add_bool(&text, false);
    assert_string_equal(text.bytes,
                        "-9223372036854775808 -0.6931471824645996 0.0 null 1e-7 true false");
    bt_text_fini(&text);
}

/* More than a portion: the same as one by one. */
static void test_lists(void **state) {
    (void)state;
    enum { COUNT = 1000 };
    float floats[COUNT];
    int32_t ints[COUNT];
    for (int i = 0; i < COUNT; i++) {
        floats[i] = -(float)i / 7.0F;
        ints[i] = i * 151 - 500;
    }
    static const size_t counts[] = {0, 1, 255, 256, 257, 512, COUNT};
    for (size_t c = 0; c < BT_ARRAY_COUNT(counts); c++) {
        bt_text list, single;
        bt_text_init(&list, 100000);
        bt_text_init(&single, 100000);
        bt_json_add_floats(&list, floats, counts[c]);
        bt_text_add(&list, ";", 1);
        bt_json_add_ints(&list, ints, counts[c]);
        for (size_t i = 0; i < counts[c]; i++) {
            if (i > 0) bt_text_add(&single, ",", 1);
            bt_json_add_float(&single, floats[i]);
        }
        bt_text_add(&single, ";", 1);
        for (size_t i = 0; i < counts[c]; i++) {
            if (i > 0) bt_text_add(&single, ",", 1);
            bt_json_add_int(&single, ints[i]);
        }
        assert_false(list.has_failed);
        assert_string_equal(list.bytes, single.bytes);
        bt_text_fini(&list);
        bt_text_fini(&single);
    }
    bt_text text;
    bt_text_init(&text, 1000);
    bt_json_add_floats(&text, floats, COUNT);
    assert_true(text.has_failed);
    bt_text_fini(&text);
}

static void test_limits(void **state) {
    (void)state;
    bt_text text;
    bt_text_init(&text, 10);
    bt_text_add_string(&text, "0123456789");
    assert_false(text.has_failed);
    bt_text_add(&text, "x", 1);
    assert_true(text.has_failed);
    assert_string_equal(text.bytes, "0123456789");
    bt_text_add_format(&text, "%d", 5);
    assert_int_equal(text.used, 10);
    bt_text_clear(&text);
    assert_false(text.has_failed);
    bt_text_add_format(&text, "%s-%d", "ab", 7);
    assert_string_equal(text.bytes, "ab-7");
    /* What does not fit is an end: nothing behind it is added. */
    bt_text_add_string(&text, "1234567");
    bt_text_add_string(&text, "1");
    assert_true(text.has_failed);
    assert_string_equal(text.bytes, "ab-7");
    bt_text_fini(&text);
    assert_false(text.has_failed);
    bt_text_add_string(&text, "again");
    assert_string_equal(text.bytes, "again");
    bt_text_fini(&text);
}

/* The terminator has its place behind every length. */
static void test_terminator(void **state) {
    (void)state;
    bt_text text;
    bt_text_init(&text, 5000);
    for (size_t i = 0; i < 5000; i++) {
        bt_text_add(&text, "x", 1);
        assert_true(text.capacity > text.used);
        assert_int_equal(text.bytes[text.used], 0);
    }
    bt_text_fini(&text);
}

/* In blocks of a pool: the same text, and the block can be given away. */
static void test_pooled(void **state) {
    const bt_block_pool_options options = {.bytes_max = 1 << 20, .idle_bytes_max = 1 << 20};
    bt_block_pool *pool;
    bt_text text;
    (void)state;
    assert_int_equal(bt_block_pool_create(&options, &pool), BT_OK);
    bt_text_init_pooled(&text, 1 << 24, pool, 4096);
    assert_null(bt_text_take_block(&text));
    for (int i = 0; i < 3000; i++) {
        bt_text_add_string(&text, "ab");
        if (i == 0) assert_int_equal(text.capacity, 4096);
    }
    assert_int_equal(text.used, 6000);
    assert_int_equal(text.bytes[6000], 0);
    assert_int_equal(bt_block_pool_used_bytes(pool), text.capacity); /* the smaller one is back */
    bt_block *block = bt_text_take_block(&text);
    assert_non_null(block);
    for (int i = 0; i < 6000; i++) {
        assert_int_equal(block->bytes[i], i % 2 == 0 ? 'a' : 'b');
    }
    assert_int_equal(text.used, 0);
    bt_text_add_string(&text, "next");
    assert_string_equal(text.bytes, "next");
    assert_ptr_not_equal(text.block, block);
    bt_block_release(block);
    /* The pool's limit is a failure of the text, which keeps what it has. */
    assert_null(bt_text_reserve(&text, 2 << 20));
    assert_true(text.has_failed);
    assert_int_equal(text.used, 4);
    bt_text_fini(&text);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    bt_block_pool_destroy(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strings), cmocka_unit_test(test_bytes_that_are_not_utf8),
        cmocka_unit_test(test_numbers), cmocka_unit_test(test_lists),
        cmocka_unit_test(test_limits),  cmocka_unit_test(test_terminator),
        cmocka_unit_test(test_pooled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
