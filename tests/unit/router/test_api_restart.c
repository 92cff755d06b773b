/* A reply that is sent when complete, begun again: what came of the samples that have not ended is
 * forgotten with all its memory, and the answer is that of a single try, byte for byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/router/api_fixture.h"

static void mask_row(api_fixture *f, uint32_t sample, int32_t token, uint64_t version) {
    const int32_t ids[] = {token, token + 1, token + 2};
    const float logprobs[] = {-0.5f, -1.5f, -2.5f};
    const token_row row = {.token = token,
                           .mask_mode = ROW_MASK_SUPPORT,
                           .has_logprob = 1,
                           .token_logprob = -1.0f,
                           .selected_logprob = -0.5f,
                           .support_count = 3,
                           .support_size = 3,
                           .support_ids = ids,
                           .support_logprobs = logprobs,
                           .weights_version = version};
    api_fixture_feed(f, sample, &row);
}

static void mask_text(api_fixture *f, uint32_t sample, const char *text, uint64_t version) {
    for (; *text != 0; text++)
        mask_row(f, sample, *text, version);
}

static char *answer_of(const api_fixture *f) {
    assert_int_equal(f->status, 200);
    assert_int_equal(f->end_count, 1);
    return strdup(api_fixture_body(f));
}

static void expect_answer(const api_fixture *f, char *expected) {
    assert_int_equal(f->status, 200);
    assert_string_equal(api_fixture_body(f), expected);
    free(expected);
}

#define MASKS                                                                                      \
    "\"return_sampling_mask\":true,\"sampling_logprobs_mode\":\"support\",\"return_logprob\":"     \
    "true,"
#define ONE "{\"rid\":\"r\"," MASKS "\"input_ids\":[7,8],\"sampling_params\":{\"top_k\":3}}"

/* Rows, their blocks, the text and the runs of weights. */
static void test_one_sample(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, ONE));
    mask_text(f, 0, "xyz", 2);
    api_fixture_length(f);
    char *expected = answer_of(f);
    assert_non_null(strstr(expected, "\"output_token_weight_versions\":[[2,3]]"));
    assert_true(api_fixture_ask(f, API_GENERATE, ONE));
    mask_text(f, 0, "xyzxyz", 1);
    assert_true(budget_used(&f->limits.memory) > 0);
    api_fixture_restart(f, 0);
    assert_int_equal(budget_used(&f->limits.memory), 0);
    assert_int_equal(api_call_tokens(&f->call), 0);
    mask_text(f, 0, "x", 1);
    api_fixture_restart(f, 0);
    mask_text(f, 0, "xyz", 2);
    api_fixture_length(f);
    expect_answer(f, expected);
    assert_int_equal(f->cancel_count, 0);
    assert_int_equal(f->granted_bytes, 0);
}

/* What went to the file goes with it. */
static void test_spilled_rows(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, ONE));
    mask_text(f, 0, "ab", 0);
    api_fixture_length(f);
    char *expected = answer_of(f);
    budget_init(&f->limits.memory, 0);
    assert_true(api_fixture_ask(f, API_GENERATE, ONE));
    mask_text(f, 0, "abcdef", 0);
    assert_true(budget_used(&f->limits.spill) > 0);
    api_fixture_restart(f, 0);
    assert_int_equal(budget_used(&f->limits.spill), 0);
    mask_text(f, 0, "ab", 0);
    api_fixture_length(f);
    expect_answer(f, expected);
}

#define THREE                                                                                      \
    "{\"rid\":\"r\"," MASKS "\"input_ids\":[7,8],\"sampling_params\":{\"top_k\":3,\"n\":3}}"

/* Sample 1 has ended, sample 2 failed by itself: both stand. */
static void test_ended_samples_stand(void **state) {
    api_fixture *f = *state;
    char *expected = NULL;
    for (int restarts = 0; restarts <= 1; restarts++) {
        assert_true(api_fixture_ask(f, API_GENERATE, THREE));
        mask_text(f, 1, "uvw", 1);
        api_fixture_sample_stop(f, 1, API_FIXTURE_EOS);
        mask_text(f, 2, "g", 1);
        api_fixture_sample_fail(f, 2, BT_ERR_REQUEST_OVERFLOW, 400, "");
        if (restarts) {
            const uint64_t kept = budget_used(&f->limits.memory);
            mask_text(f, 0, "xyzxyz", 1);
            api_fixture_restart(f, 0);
            assert_int_equal(budget_used(&f->limits.memory), kept);
        }
        mask_text(f, 0, "xy", 2);
        api_fixture_length(f);
        if (restarts) {
            expect_answer(f, expected);
        } else {
            expected = answer_of(f);
            assert_non_null(strstr(expected, "[[1,3]]"));
            assert_non_null(strstr(expected, "[[2,2]]"));
            assert_non_null(strstr(expected, "\"type\":\"abort\""));
        }
    }
}

#define LIST                                                                                       \
    "{\"rid\":\"r\",\"input_ids\":[[7,8],[9]],\"return_logprob\":true,"                            \
    "\"sampling_params\":{\"n\":2}}"

/* Another item is another request. */
static void test_the_other_item_goes_on(void **state) {
    api_fixture *f = *state;
    char *expected = NULL;
    for (int restarts = 0; restarts <= 1; restarts++) {
        assert_true(api_fixture_ask(f, API_GENERATE, LIST));
        api_fixture_sample_text(f, 0, "ab");
        api_fixture_sample_text(f, 3, "d");
        if (restarts) {
            api_fixture_sample_text(f, 2, "zz");
            api_fixture_restart(f, 1);
            assert_int_equal(api_call_tokens(&f->call), 2);
            api_fixture_sample_text(f, 3, "d");
        }
        api_fixture_sample_text(f, 1, "ef");
        api_fixture_sample_text(f, 2, "c");
        api_fixture_length(f);
        if (restarts) {
            expect_answer(f, expected);
        } else {
            expected = answer_of(f);
        }
    }
}

/* Offsets into the text, and characters that a token begins and the next one ends. */
static void test_chat_and_completions(void **state) {
    api_fixture *f = *state;
    static const api_kind kinds[] = {API_CHAT, API_COMPLETION};
    static const char *const bodies[] = {
        "{\"rid\":\"r\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"logprobs\":true}",
        "{\"rid\":\"r\",\"prompt\":[7,8],\"logprobs\":0,\"max_tokens\":20}"};
    for (int i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, kinds[i], bodies[i]));
        api_fixture_text(f, "h\xc3\xa9!");
        api_fixture_length(f);
        char *expected = answer_of(f);
        assert_true(api_fixture_ask(f, kinds[i], bodies[i]));
        api_fixture_text(f, "longer than it\xc3");
        api_fixture_restart(f, 0);
        api_fixture_text(f, "h\xc3\xa9!");
        api_fixture_length(f);
        expect_answer(f, expected);
    }
}

/* The backend is being told of a stop string; what it sends again of that sample is nothing. */
static void test_a_stop_string_stands(void **state) {
    api_fixture *f = *state;
    static const char body[] = "{\"rid\":\"r\",\"input_ids\":[7,8],\"sampling_params\":{\"n\":2,"
                               "\"stop\":\"cd\"}}";
    char *expected = NULL;
    for (int restarts = 0; restarts <= 1; restarts++) {
        assert_true(api_fixture_ask(f, API_GENERATE, body));
        api_fixture_sample_text(f, 0, "abcd");
        assert_int_equal(f->cancelled_samples[0], 1);
        api_fixture_sample_text(f, 1, "ac");
        if (restarts) {
            api_fixture_restart(f, 0);
            api_fixture_sample_text(f, 0, "ab");
            api_fixture_sample_text(f, 1, "ac");
        }
        api_fixture_sample_fail(f, 0, BT_ERR_REQUEST_CANCELLED, 503, "the sample was cancelled");
        api_fixture_sample_text(f, 1, "x"); /* "ac" alone would hold "c" back */
        api_fixture_length(f);
        assert_int_equal(f->cancelled_samples[0], 1);
        if (restarts) {
            expect_answer(f, expected);
        } else {
            expected = answer_of(f);
            assert_non_null(strstr(expected, "\"text\":\"acx\""));
        }
    }
}

#define PROMPT                                                                                     \
    "{\"rid\":\"r\",\"input_ids\":[7,8,9],\"return_logprob\":true,\"logprob_start_len\":0,"        \
    "\"sampling_params\":{\"n\":2}}"

/* Those of the prompt come again and are taken; but they are not waited for twice once a sample is
 * over with them. */
static void test_the_prompt_comes_again(void **state) {
    api_fixture *f = *state;
    static const float entries[] = {-1.0f, -2.0f};
    static const float others[] = {-3.0f, -4.0f};
    for (int is_over = 0; is_over <= 1; is_over++) {
        assert_true(api_fixture_ask(f, API_GENERATE, PROMPT));
        api_fixture_prompt(f, 1, entries, 2);
        api_fixture_sample_text(f, 0, "a");
        if (is_over) api_fixture_sample_stop(f, 0, API_FIXTURE_EOS);
        api_fixture_sample_text(f, 1, "b");
        api_fixture_restart(f, 0);
        api_fixture_prompt(f, 1, others, 1);
        if (!is_over) api_fixture_prompt(f, 2, others + 1, 1);
        if (!is_over) api_fixture_sample_text(f, 0, "a");
        api_fixture_sample_text(f, 1, "b");
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
        assert_non_null(strstr(api_fixture_body(f), is_over
                                                        ? "[[null,7,null],[-1.0,8,null],[-2.0,9"
                                                        : "[[null,7,null],[-3.0,8,null],[-4.0,9"));
    }
}

static void test_the_last_try_fails(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, ONE));
    mask_text(f, 0, "xy", 1);
    api_fixture_restart(f, 0);
    api_fixture_fail(f, BT_ERR_PEER_GONE, 503, "decode worker at a (pid 1) is gone");
    assert_int_equal(f->status, 503);
    assert_non_null(strstr(api_fixture_body(f), "decode worker at a (pid 1) is gone"));
}

static void test_nobody_waits_any_more(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, ONE));
    mask_text(f, 0, "xy", 1);
    assert_true(budget_used(&f->limits.memory) > 0);
    api_call_on_gone(&f->call);
    assert_int_equal(budget_used(&f->limits.memory), 0); /* not when the workers have answered */
    assert_int_equal(f->cancel_count, 1);
    api_fixture_restart(f, 0);
    mask_text(f, 0, "xy", 1);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "the request was cancelled");
    assert_int_equal(f->begin_count, 0);
    assert_int_equal(f->cancel_count, 1);
    /* All samples were over: the reply is being written when the backend hears of it. */
    assert_true(api_fixture_ask(
        f, API_GENERATE, "{\"rid\":\"r\",\"input_ids\":[7],\"sampling_params\":{\"stop\":\"b\"}}"));
    f->room = 0;
    api_fixture_text(f, "ab");
    assert_int_equal(f->cancel_count, 1);
    api_fixture_restart(f, 0);
    api_fixture_text(f, "a");
    f->room = SIZE_MAX;
    api_call_on_room(&f->call);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "the request was cancelled");
    assert_int_equal(f->status, 200);
    assert_non_null(strstr(api_fixture_body(f), "\"text\":\"a\",\"output_ids\":[97,98]"));
}

#define T(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_one_sample),
        T(test_spilled_rows),
        T(test_ended_samples_stand),
        T(test_the_other_item_goes_on),
        T(test_chat_and_completions),
        T(test_a_stop_string_stands),
        T(test_the_prompt_comes_again),
        T(test_the_last_try_fails),
        T(test_nobody_waits_any_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
