/* Where the tokens of an echoed prompt begin in its text, with tokenizers that add tokens and
 * compose characters. */
#include "router/api_echo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "tests/support/tiny_bpe.h"

enum { BOS = 300, EOS = 301, STARTS_MAX = 16 };

static const tiny_merge MERGES[] = {{"a", "b"}};

static tokenizer *load(void) {
    static const tiny_bpe BPE = {
        .merges = MERGES,
        .merge_count = 1,
        .normalizer = "{\"type\": \"NFC\"}",
        .added_tokens = "{\"id\": 300, \"content\": \"<bos>\", \"single_word\": false, \"lstrip\": "
                        "false, \"rstrip\": false, \"normalized\": false, \"special\": true}, "
                        "{\"id\": 301, \"content\": \"<eos>\", \"single_word\": false, \"lstrip\": "
                        "false, \"rstrip\": false, \"normalized\": false, \"special\": true}",
        .post_processor = "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": "
                          "{\"id\": \"<bos>\"}}, {\"Sequence\": {\"id\": \"A\"}}]}"};
    tokenizer *t;
    bt_error error;
    if (tiny_bpe_load(&BPE, &t, &error) != BT_OK) fail_msg("%s", error.text);
    return t;
}

typedef struct echo_case {
    const char *json; /* the prompt */
    const char *text;
    uint32_t count;
    uint32_t starts[STARTS_MAX];
} echo_case;

static void check(const api_request *request, const echo_case *c) {
    const api_echo *echo = &request->echo;
    assert_int_equal(request->prompt.count, c->count);
    assert_int_equal(echo->bytes, strlen(c->text));
    assert_memory_equal(echo->text, c->text, echo->bytes);
    assert_int_equal(echo->characters, bt_utf8_count(c->text, echo->bytes));
    for (uint32_t i = 0; i < c->count; i++) {
        if (echo->starts[i] != c->starts[i])
            fail_msg("%s: token %u begins at %u, not %u", c->json, i, echo->starts[i],
                     c->starts[i]);
    }
}

static void finish(api_request *request) {
    api_echo_fini(&request->echo);
    token_list_fini(&request->prompt);
}

/* Text with an accent of its own (e, U+0301) is three tokens less a byte when it was composed. */
static void test_prompts_of_text(void **state) {
    static const echo_case CASES[] = {
        {"\"abc\"", "abc", 3, {0, 0, 2}},
        {"\"\\u20acb\"",
         "\xe2\x82\xac"
         "b",
         5,
         {0, 0, 0, 0, 1}},
        {"\"<eos>ab<bos>\"", "<eos>ab<bos>", 4, {0, 0, 5, 7}},
        {"\"<bos>c\"", "<bos>c", 3, {0, 5, 5}},
        {"\"e\\u0301xab\"", "e\xcc\x81xab", 5, {0, 0, 0, 2, 3}},
        {"\"ab\\u0000\\u00e9c\"", "ab", 6, {0, 0, 2, 3, 3, 4}},
        {"\"xe\\u0301\"", "xe\xcc\x81", 4, {0, 0, 1, 1}},
    };
    tokenizer *t = load();
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        const tokenizer_encode_options options = {.adds_special = true, .parses_special = true};
        api_request request = {.wants_logprob = true, .echoes = true};
        bt_json string;
        bt_error error;
        char text[64];
        assert_int_equal(bt_json_parse(CASES[i].json, strlen(CASES[i].json), &string, &error),
                         BT_OK);
        size_t bytes = bt_json_string_decode(&string, text);
        assert_int_equal(tokenizer_encode(t, text, bytes, options, &request.prompt), BT_OK);
        assert_int_equal(api_echo_from_text(&request, t, &string), BT_OK);
        if (strlen(CASES[i].text) == bytes) {
            check(&request, &CASES[i]);
        } else { /* a NUL in it */
            assert_int_equal(request.prompt.count, CASES[i].count);
            assert_memory_equal(request.echo.starts, CASES[i].starts,
                                CASES[i].count * sizeof(uint32_t));
        }
        finish(&request);
    }
    tokenizer_destroy(t);
}

static void test_prompts_of_ids(void **state) {
    static const struct {
        int32_t ids[8];
        bool skips_special;
        echo_case expected;
    } CASES[] = {
        {{BOS, 'a', EOS, 'b'}, true, {"", "ab", 4, {0, 0, 1, 1}}},
        {{BOS, 'a', EOS, 'b'}, false, {"", "<bos>a<eos>b", 4, {0, 5, 6, 11}}},
        {{0xe2, 0x82, 'a', 0xac},
         true,
         {"",
          "\xef\xbf\xbd"
          "a\xef\xbf\xbd",
          4,
          {0, 0, 1, 2}}},
        {{'a', 0xe2, 0x82}, true, {"", "a\xef\xbf\xbd", 3, {0, 1, 1}}},
        {{0xc3, 0xa9, 256},
         true,
         {"",
          "\xc3\xa9"
          "ab",
          3,
          {0, 0, 1}}},
        {{BOS}, true, {"", "", 1, {0}}},
    };
    tokenizer *t = load();
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        api_request request = {
            .wants_logprob = true, .echoes = true, .skips_special = CASES[i].skips_special};
        for (uint32_t k = 0; k < CASES[i].expected.count; k++) {
            assert_int_equal(token_list_append(&request.prompt, CASES[i].ids[k]), BT_OK);
        }
        assert_int_equal(api_echo_from_ids(&request, t), BT_OK);
        check(&request, &CASES[i].expected);
        finish(&request);
    }
    tokenizer_destroy(t);
}

/* Without log-probabilities nobody asks where tokens begin. */
static void test_no_starts_without_logprobs(void **state) {
    tokenizer *t = load();
    api_request request = {.echoes = true};
    (void)state;
    assert_int_equal(token_list_append(&request.prompt, 'a'), BT_OK);
    assert_int_equal(api_echo_from_ids(&request, t), BT_OK);
    assert_null(request.echo.starts);
    assert_memory_equal(request.echo.text, "a", 1);
    finish(&request);
    tokenizer_destroy(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompts_of_text),
        cmocka_unit_test(test_prompts_of_ids),
        cmocka_unit_test(test_no_starts_without_logprobs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
