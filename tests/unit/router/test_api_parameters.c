/* What the workers are told of a request that is accepted: lengths, filters, seeds, stop ids, the
 * words behind the prompt, salts. */
#include <float.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/router/api_fixture.h"

/* Of a repeated key the last value counts, also when it is null. */
static void test_repeated_keys(void **state) {
    static const struct {
        const char *fields;
        uint32_t max_new_tokens, top_k;
        bool streams;
    } CASES[] = {
        {"\"stream\":true,\"stream\":null", 128, 0, false},
        {"\"stream\":null,\"stream\":true", 128, 0, true},
        {"\"stream\":5,\"stream\":false", 128, 0, false},
        {"\"sampling_params\":{\"top_k\":3},\"sampling_params\":null", 128, 0, false},
        {"\"sampling_params\":{\"top_k\":3,\"top_k\":null}", 128, 0, false},
        {"\"sampling_params\":{\"max_new_tokens\":5,\"max_new_tokens\":null}", 199, 0, false},
        {"\"sampling_params\":{\"max_new_tokens\":null,\"max_new_tokens\":5,\"top_k\":2}", 5, 2,
         false},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        char body[200];
        snprintf(body, sizeof(body), "{\"input_ids\":[1],%s}", CASES[i].fields);
        if (!api_fixture_ask(f, API_GENERATE, body)) fail_msg("%s", api_fixture_body(f));
        assert_int_equal(f->call.request->streams, CASES[i].streams);
        assert_int_equal(api_fixture_asked(f)->max_new_tokens, CASES[i].max_new_tokens);
        assert_int_equal(api_fixture_asked(f)->top_k, CASES[i].top_k);
        api_fixture_abort(f);
    }
}

/* Who asks for no length gets what the context and the largest decode worker have room for. */
static void test_open_ended_length(void **state) {
    static const struct {
        const char *body;
        uint32_t room, expected;
    } CASES[] = {
        {"{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":null}}", 200, 198},
        {"{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":null}}", 64, 62},
        {"{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":null}}", 3, 1},
        {"{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":null}}", 2, 198},
        {"{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":100}}", 64, 100},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        f->model.room_tokens = CASES[i].room;
        assert_true(api_fixture_ask(f, API_GENERATE, CASES[i].body));
        assert_int_equal(f->call.request->generation.max_new_tokens, CASES[i].expected);
        api_fixture_length(f);
    }
}

/* What a double holds and a float does not is the nearest that the workers take; near zero only
 * what is below 1e-6 is greedy. */
static void test_ends_of_ranges(void **state) {
    static const struct {
        const char *params;
        float temperature, top_p;
        uint32_t top_k;
    } CASES[] = {
        {"\"temperature\":1e-6,\"top_k\":7", 1e-6f, 1.0f, 7},
        {"\"temperature\":9.99e-7,\"top_k\":7", 1.0f, 1.0f, 1},
        {"\"temperature\":-0.0", 1.0f, 1.0f, 1},
        {"\"temperature\":1e300,\"top_p\":1e-310", FLT_MAX, FLT_MIN, 0},
        {"\"temperature\":4e38,\"top_p\":1e-46", FLT_MAX, FLT_MIN, 0},
        {"\"top_k\":9223372036854775807,\"top_p\":1.0", 1.0f, 1.0f, 0},
        {"\"top_k\":1073741823", 1.0f, 1.0f, 1073741823},
        {"\"top_k\":1e3", 1.0f, 1.0f, 1000},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        char body[200];
        bt_error error;
        snprintf(body, sizeof(body), "{\"input_ids\":[1],\"sampling_params\":{%s}}",
                 CASES[i].params);
        if (!api_fixture_ask(f, API_GENERATE, body)) fail_msg("%s", api_fixture_body(f));
        assert_int_equal(proto_generation_check(api_fixture_asked(f), &error), BT_OK);
        assert_true(api_fixture_asked(f)->temperature == CASES[i].temperature);
        assert_true(api_fixture_asked(f)->top_p == CASES[i].top_p);
        assert_int_equal(api_fixture_asked(f)->top_k, CASES[i].top_k);
        api_fixture_abort(f);
    }
}

/* What the workers are told. */
static void test_generation_parameters(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]}"));
    assert_true(api_fixture_asked(f)->temperature == 1.0f && api_fixture_asked(f)->top_p == 1.0f &&
                api_fixture_asked(f)->top_k == 0);
    assert_int_equal(api_fixture_asked(f)->max_new_tokens, 128);
    assert_int_equal(api_fixture_asked(f)->vocab_limit, tokenizer_vocab_count(f->tokenizer));
    assert_int_equal(api_fixture_asked(f)->stop_id_count, 1);
    assert_int_equal(api_fixture_asked(f)->stop_ids[0], API_FIXTURE_EOS);
    uint64_t seed = api_fixture_asked(f)->seed;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]}"));
    assert_true(api_fixture_asked(f)->seed != seed);
    assert_true(
        api_fixture_ask(f, API_GENERATE,
                        "{\"input_ids\":[1],\"sampling_params\":{\"temperature\":1e-7,\"top_k\":50,"
                        "\"sampling_seed\":"
                        "18446744073709551615,\"stop_token_ids\":[5,319,5],\"top_p\":0.5}}"));
    assert_true(api_fixture_asked(f)->temperature == 1.0f && api_fixture_asked(f)->top_k == 1);
    assert_true(api_fixture_asked(f)->seed == UINT64_MAX);
    assert_int_equal(api_fixture_asked(f)->stop_id_count, 2);
    assert_true(
        api_fixture_ask(f, API_GENERATE,
                        "{\"input_ids\":[1],\"sampling_params\":{\"ignore_eos\":true,"
                        "\"stop_token_ids\":[5],\"sampling_seed\":-1,\"top_k\":1073741824}}"));
    assert_int_equal(api_fixture_asked(f)->stop_id_count, 0);
    assert_true(api_fixture_asked(f)->seed == UINT64_MAX);
    assert_int_equal(api_fixture_asked(f)->top_k, 0);
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                                "\"seed\":9,\"max_tokens\":4,\"temperature\":0.25}"));
    assert_int_equal(api_fixture_asked(f)->seed, 9);
    assert_int_equal(api_fixture_asked(f)->max_new_tokens, 4);
    assert_true(api_fixture_asked(f)->temperature == 0.25f);
}

/* Ids that can be drawn, each once; what is behind the vocabulary never ends anything. */
static void test_stop_ids(void **state) {
    static const int32_t EXPECTED[] = {API_FIXTURE_EOS, 5, 0, API_FIXTURE_VOCAB - 1};
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"sampling_params\":{\"stop_token_ids\":["
                                "5,319,0,5,null,151935,151936,-1,9223372036854775807]}}"));
    assert_int_equal(api_fixture_asked(f)->stop_id_count, BT_ARRAY_COUNT(EXPECTED));
    assert_memory_equal(api_fixture_asked(f)->stop_ids, EXPECTED, sizeof(EXPECTED));
    api_fixture_abort(f);
}

static const int32_t *words_behind_prompt(const api_fixture *f) {
    const api_request *request = f->call.request;
    return request->prompt.ids + request->prompt.count;
}

/* What is wider than a number: the words of the attempt. */
static void test_words(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(
        f, API_GENERATE,
        "{\"input_ids\":[7,8],\"return_logprob\":true,\"token_ids_logprob\":[9,3,9],"
        "\"sampling_params\":{\"logit_bias\":{\"300\":-1e38,\"5\":1,\"0\":0.5,\"005\":2.5}}}"));
    assert_int_equal(f->call.request->prompt.count, 2);
    assert_int_equal(api_fixture_asked(f)->bias_count, 3);
    assert_int_equal(api_fixture_asked(f)->logprob_id_count, 2); /* each travels once */
    assert_int_equal(proto_words(api_fixture_asked(f), 2), 10);
    const int32_t *words = words_behind_prompt(f);
    const float biases[] = {0.5f, 2.5f, -1e38f};
    const int32_t ids[] = {0, 5, 300}, wanted[] = {9, 3};
    assert_memory_equal(words, ids, sizeof(ids));
    assert_memory_equal(words + 3, biases, sizeof(biases));
    assert_memory_equal(words + 6, wanted, sizeof(wanted));
    api_fixture_abort(f);
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{\"input_ids\":[7,8,9],\"logit_bias\":{\"1\":100,\"2\":-100}}"));
    assert_int_equal(api_fixture_asked(f)->bias_count, 2);
    assert_int_equal(words_behind_prompt(f)[1], 2);
    api_fixture_abort(f);
}

static void test_other_parameters(void **state) {
    api_fixture *f = *state;
    bt_error error;
    assert_true(api_fixture_ask(
        f, API_GENERATE,
        "{\"input_ids\":[1,2],\"return_logprob\":true,\"logprob_start_len\":1,"
        "\"top_logprobs_num\":128,\"sampling_params\":{\"min_p\":1,\"frequency_penalty\":-2,"
        "\"presence_penalty\":2,\"repetition_penalty\":2,\"n\":128,\"min_new_tokens\":128,"
        "\"sampling_filter\":\"rank\"}}"));
    assert_true(api_fixture_asked(f)->min_p == 1.0f &&
                api_fixture_asked(f)->frequency_penalty == -2.0f);
    assert_true(api_fixture_asked(f)->presence_penalty == 2.0f &&
                api_fixture_asked(f)->repetition_penalty == 2.0f);
    assert_int_equal(api_fixture_asked(f)->samples, 128);
    assert_int_equal(api_fixture_asked(f)->min_new_tokens, 128);
    assert_int_equal(api_fixture_asked(f)->banned_id_count, 1);
    assert_int_equal(api_fixture_asked(f)->filter, 1);
    assert_int_equal(api_fixture_asked(f)->top_logprobs, 128);
    assert_int_equal(api_fixture_asked(f)->wants_prompt_logprobs, 1);
    assert_int_equal(api_fixture_asked(f)->prompt_logprobs_from, 1);
    assert_int_equal(proto_generation_check(api_fixture_asked(f), &error), BT_OK);
    api_fixture_abort(f);
    /* The smallest that is above nothing as a float; neutral values. */
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"return_logprob\":true,\"sampling_params\":{"
                                "\"repetition_penalty\":1e-310}}"));
    assert_true(api_fixture_asked(f)->repetition_penalty > 0 &&
                api_fixture_asked(f)->min_p == 0.0f);
    assert_int_equal(proto_generation_check(api_fixture_asked(f), &error), BT_OK);
    assert_int_equal(api_fixture_asked(f)->samples, 1);
    assert_int_equal(api_fixture_asked(f)->wants_prompt_logprobs, 0);
    assert_int_equal(api_fixture_asked(f)->banned_id_count, 0);
    assert_int_equal(api_fixture_asked(f)->filter, 0);
    assert_true(api_fixture_asked(f)->cache_salt[0] == 0 &&
                api_fixture_asked(f)->cache_salt[1] == 0);
    api_fixture_length(f);
    /* What ends a sample is banned before min_new_tokens, with ignore_eos too. */
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"sampling_params\":{\"ignore_eos\":true,"
                                "\"stop_token_ids\":[5],\"min_new_tokens\":3}}"));
    assert_int_equal(api_fixture_asked(f)->stop_id_count, 0);
    assert_int_equal(api_fixture_asked(f)->banned_id_count, 2);
    assert_int_equal(api_fixture_asked(f)->stop_ids[0], API_FIXTURE_EOS);
    assert_int_equal(api_fixture_asked(f)->stop_ids[1], 5);
    api_fixture_length(f);
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{\"input_ids\":[1],\"min_tokens\":3,\"n\":1,\"min_p\":0.5,"
                                "\"logprobs\":true,\"top_logprobs\":20}"));
    assert_int_equal(api_fixture_asked(f)->min_new_tokens, 3);
    assert_int_equal(api_fixture_asked(f)->banned_id_count, api_fixture_asked(f)->stop_id_count);
    assert_int_equal(api_fixture_asked(f)->top_logprobs, 20);
    assert_true(api_fixture_asked(f)->min_p == 0.5f);
    api_fixture_abort(f);
}

/* No fewer frames than events; and where a stop string may end a sample here, one for each row. */
static void test_emission_rows(void **state) {
    static const struct {
        const char *fields;
        uint32_t expected;
    } CASES[] = {
        {"", 50},
        {",\"sampling_params\":{\"stream_interval\":7}", 50},
        {",\"stream\":true", 3},
        {",\"stream\":true,\"sampling_params\":{\"stream_interval\":7}", 7},
        {",\"sampling_params\":{\"stop\":\"x\"}", 1},
        {",\"stream\":true,\"sampling_params\":{\"stream_interval\":7,\"stop\":[\"x\"]}", 1},
        {",\"stream\":true,\"sampling_params\":{\"stream_interval\":7,\"stop\":[]}", 7},
    };
    api_fixture *f = *state;
    f->settings.stream_interval = 3;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        char body[200];
        snprintf(body, sizeof(body), "{\"input_ids\":[1]%s}", CASES[i].fields);
        assert_true(api_fixture_ask(f, API_GENERATE, body));
        assert_int_equal(api_request_emission_rows(f->call.request), CASES[i].expected);
        api_fixture_abort(f);
    }
}

/* The option, the field, and the parameter, which wins. */
static void test_filter_rule(void **state) {
    static const struct {
        const char *body;
        uint32_t option, expected;
    } CASES[] = {
        {"{\"input_ids\":[1]}", 0, 0},
        {"{\"input_ids\":[1]}", 1, 1},
        {"{\"input_ids\":[1],\"sampling_filter\":\"joint\"}", 1, 0},
        {"{\"input_ids\":[1],\"sampling_filter\":\"rank\"}", 0, 1},
        {"{\"input_ids\":[1],\"sampling_filter\":\"rank\",\"sampling_params\":{"
         "\"sampling_filter\":\"joint\"}}",
         1, 0},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        f->settings.sampling_filter = CASES[i].option;
        for (int kind = 0; kind < (i < 4 ? 2 : 1); kind++) {
            assert_true(api_fixture_ask(f, (api_kind)kind, CASES[i].body));
            assert_int_equal(f->call.request->generation.filter, CASES[i].expected);
            api_fixture_length(f);
        }
    }
}

/* Requests share cached prefixes when both strings are the same, and only then. */
static void test_salts(void **state) {
    static const char *const BODIES[] = {
        "{\"input_ids\":[1],\"cache_salt\":\"a\"}",
        "{\"input_ids\":[1],\"extra_key\":\"a\"}",
        "{\"input_ids\":[1],\"cache_salt\":\"a\",\"extra_key\":\"b\"}",
        "{\"input_ids\":[1],\"cache_salt\":\"ab\"}",
        "{\"input_ids\":[1],\"cache_salt\":\"b\",\"extra_key\":\"a\"}",
        "{\"input_ids\":[2],\"cache_salt\":\"a\",\"stream\":false}",
    };
    enum { COUNT = sizeof(BODIES) / sizeof(BODIES[0]) };
    api_fixture *f = *state;
    uint64_t salts[COUNT][2];
    for (size_t i = 0; i < COUNT; i++) {
        assert_true(api_fixture_ask(f, i == 5 ? API_CHAT : API_GENERATE, BODIES[i]));
        memcpy(salts[i], f->call.request->generation.cache_salt, sizeof(salts[i]));
        assert_true(salts[i][0] != 0 || salts[i][1] != 0);
        api_fixture_length(f);
        for (size_t k = 0; k < i; k++) {
            bool is_same = memcmp(salts[i], salts[k], sizeof(salts[i])) == 0;
            assert_int_equal(is_same, i == 5 && k == 0);
        }
    }
    /* SHA-256 of the length of "a" in 8 bytes, "a", and the length of "". */
    assert_true(salts[0][0] == 0xd4482d981bafa149u && salts[0][1] == 0x5b935add4f4b4344u);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_repeated_keys),    CASE(test_open_ended_length),
        CASE(test_ends_of_ranges),   CASE(test_generation_parameters),
        CASE(test_stop_ids),         CASE(test_words),
        CASE(test_other_parameters), CASE(test_emission_rows),
        CASE(test_filter_rule),      CASE(test_salts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
