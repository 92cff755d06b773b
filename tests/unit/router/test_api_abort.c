/* Aborts at the API: the body of /abort_request, what it names, and what the client of an aborted
 * request gets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "router/api_abort.h"
#include "tests/unit/router/api_fixture.h"

/* ---- the body -------------------------------------------------------------------------------- */

static void test_bodies(void **state) {
    (void)state;
    static const struct {
        const char *body, *rid;
        bool is_prefix, is_all;
    } cases[] = {
        {"{}", "", false, false},
        {"{\"rid\":\"x\"}", "x", false, false},
        {"{\"rid\":\"x\",\"prefix\":true}", "x", true, false},
        {"{\"rid\":\"\\u0041b\",\"prefix\":false,\"abort_all\":false}", "Ab", false, false},
        {"{\"abort_all\":true}", "", false, true},
        {"{\"rid\":null,\"abort_all\":true,\"prefix\":null}", "", false, true},
        {"{\"rid\":\"\",\"abort_all\":true,\"finished_reason\":null,\"abort_message\":\"\"}", "",
         false, true},
        {"{\"rid\":\"x\",\"rid\":\"y\"}", "y", false, false},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        api_abort abort;
        api_failure failure;
        assert_true(api_abort_read(cases[i].body, strlen(cases[i].body), &abort, &failure));
        assert_string_equal(abort.rid, cases[i].rid);
        assert_int_equal(abort.is_prefix, cases[i].is_prefix);
        assert_int_equal(abort.is_all, cases[i].is_all);
        assert_int_equal(failure.http_status, 0);
    }
}

static void test_bad_bodies(void **state) {
    (void)state;
    static const struct {
        const char *body, *text;
    } cases[] = {
        {"", ""},
        {"{", ""},
        {"[]", "the body must be a JSON object, got a list."},
        {"\"x\"", "the body must be a JSON object, got a string."},
        {"{\"rid\":7}", "rid must be a string, got a number."},
        {"{\"rid\":[\"x\"]}", "rid must be a string, got a list."},
        {"{\"rid\":\"a\\u0000b\"}", "rid holds a NUL character."},
        {"{\"rid\":\"x\",\"prefix\":\"yes\"}", "prefix must be a boolean, got a string."},
        {"{\"abort_all\":1}", "abort_all must be a boolean, got a number."},
        {"{\"rid\":\"x\",\"Rid\":\"x\"}", "Unexpected field 'Rid' of /abort_request."},
        {"{\"abort_message\":\"m\"}", "abort_message is not supported."},
        {"{\"finished_reason\":{\"a\":1}}", "finished_reason is not supported."},
    };
    api_abort abort;
    api_failure failure;
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        assert_false(api_abort_read(cases[i].body, strlen(cases[i].body), &abort, &failure));
        assert_int_equal(failure.http_status, 400);
        if (cases[i].text[0] != 0) assert_string_equal(failure.text, cases[i].text);
        assert_int_not_equal(failure.text[0], 0);
    }
    /* No id is longer. */
    char body[API_ABORT_RID_MAX + 32];
    for (int more = 0; more < 2; more++) {
        const int bytes =
            snprintf(body, sizeof(body), "{\"rid\":\"%0*d\"}", API_ABORT_RID_MAX + more, 0);
        assert_int_equal(api_abort_read(body, (size_t)bytes, &abort, &failure), more == 0);
    }
    assert_string_equal(failure.text, "rid is longer than 278 bytes.");
}

static api_abort of(const char *rid, bool is_prefix) {
    api_abort abort = {.is_prefix = is_prefix};
    snprintf(abort.rid, sizeof(abort.rid), "%s", rid);
    return abort;
}

/* Of items R_0 .. of a list named R and of requests; of samples R_0 .. of a request R. */
static void test_names(void **state) {
    (void)state;
    static const struct {
        const char *named;
        bool is_prefix;
        const char *rid;
        size_t list_bytes;
        bool item, sample_1, sample_12;
    } cases[] = {
        {"", false, "", 0, false, false, false},
        {"", true, "a", 0, false, false, false},
        {"ab", false, "ab", 0, true, false, false},
        {"ab", false, "abc", 0, false, false, false},
        {"ab", false, "a", 0, false, false, false},
        {"ab", true, "abc", 0, true, false, false},
        {"ab", true, "ab", 0, true, false, false},
        {"ab", true, "a", 0, false, false, false},
        {"R", false, "R_3", 1, true, false, false},
        {"R", false, "R_3", 0, false, false, false},
        {"R_3", false, "R_3", 1, true, false, false},
        {"R_", false, "R_3", 1, false, false, false},
        {"R_", true, "R_3", 1, true, false, false},
        {"R_1", false, "R", 0, false, true, false},
        {"R_1", true, "R", 0, false, true, true},
        {"R_12", true, "R", 0, false, false, true},
        {"R_12", false, "R", 0, false, false, true},
        {"R_", true, "R", 0, false, true, true},
        {"R_", false, "R", 0, false, false, false},
        {"R_3_1", false, "R_3", 1, false, true, false},
        {"R_01", false, "R", 0, false, false, false},
        {"R_1x", true, "R", 0, false, false, false},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        const api_abort abort = of(cases[i].named, cases[i].is_prefix);
        if (api_abort_names(&abort, cases[i].rid, cases[i].list_bytes) != cases[i].item)
            fail_msg("case %zu", i);
        if (cases[i].item) continue; /* whatever its samples */
        if (api_abort_names_sample(&abort, cases[i].rid, 1) != cases[i].sample_1 ||
            api_abort_names_sample(&abort, cases[i].rid, 12) != cases[i].sample_12)
            fail_msg("samples of case %zu", i);
    }
    const api_abort all = {.is_all = true};
    assert_true(api_abort_names(&all, "whatever", 0));
}

/* ---- /generate ------------------------------------------------------------------------------- */

#define FINISH(text)                                                                               \
    "\"finish_reason\":{\"type\":\"abort\",\"message\":\"" text                                    \
    "\",\"status_code\":null,\"err_type\":null}"

static void has(const api_fixture *f, const char *needle) {
    if (strstr(api_fixture_body(f), needle) == NULL)
        fail_msg("no %s in %s", needle, api_fixture_body(f));
}

static void has_not(const api_fixture *f, const char *needle) {
    if (strstr(api_fixture_body(f), needle) != NULL)
        fail_msg("%s in %s", needle, api_fixture_body(f));
}

static void test_whole_replies(void **state) {
    static const int32_t IDS[] = {72, 73, 74};
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"rid\":\"r\",\"input_ids\":[7],\"return_sampling_mask\":true,"
                                "\"sampling_params\":{\"top_k\":3}}"));
    api_fixture_mask_row(f, 72, -1.0f, -0.5f, IDS, NULL, 3);
    api_fixture_mask_row(f, 73, -1.0f, -0.5f, IDS, NULL, 2);
    api_fixture_end_aborted(f, "Aborted");
    assert_int_equal(f->status, 200);
    has(f,
        "{\"text\":\"HI\",\"output_ids\":[72,73],\"meta_info\":{\"id\":\"r\"," FINISH("Aborted"));
    has(f, "\"output_token_sampling_mask\":[[72,73,74],[72,73]],");
    has(f, "\"output_token_sampling_logprobs\":[-0.5,-0.5],"
           "\"output_token_sampling_mask_length\":2,");
    has(f, "\"completion_tokens\":2,");
    assert_int_equal(f->cancel_count, 0);
}

/* The lists of log-probabilities are there, and empty; those of masks are not. */
static void test_without_a_token(void **state) {
    static const char *const BODIES[] = {
        "{\"input_ids\":[7,8],\"return_sampling_mask\":true,\"return_logprob\":true,"
        "\"logprob_start_len\":0,\"top_logprobs_num\":2,\"sampling_params\":{\"top_k\":3}}",
        "{\"stream\":true,\"input_ids\":[7,8],\"return_sampling_mask\":true,\"return_logprob\":"
        "true,"
        "\"logprob_start_len\":0,\"top_logprobs_num\":2,\"sampling_params\":{\"top_k\":3}}"};
    api_fixture *f = *state;
    for (size_t i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        api_fixture_end_aborted(f, "Abort in waiting queue");
        assert_int_equal(f->status, 200);
        has(f, "{\"text\":\"\",\"output_ids\":[],");
        has(f, FINISH("Abort in waiting queue"));
        has(f, "\"input_token_logprobs\":[],\"output_token_logprobs\":[],"
               "\"output_token_logprobs_length\":0,\"input_top_logprobs\":[],"
               "\"output_top_logprobs\":[],\"reasoning_tokens\"");
        has_not(f, "sampling_mask");
        if (i == 1) assert_non_null(strstr(api_fixture_body(f), "}\n\ndata: [DONE]\n\n"));
    }
}

/* What was held back for a stop string comes out; one that is complete is the end all the same. */
static void test_text_that_was_held_back(void **state) {
    api_fixture *f = *state;
    for (int i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    "{\"input_ids\":[7],\"sampling_params\":{\"stop\":[\"##\"]}}"));
        api_fixture_text(f, i == 0 ? "a#" : "a##");
        api_fixture_end_aborted(f, "Aborted");
        assert_int_equal(f->status, 200);
        has(f, i == 0 ? "\"text\":\"a#\"" : "\"text\":\"a\"");
        has(f, i == 0 ? FINISH("Aborted") : "{\"type\":\"stop\",\"matched\":\"##\"}");
    }
}

static void test_streams(void **state) {
    api_fixture *f = *state;
    assert_true(
        api_fixture_ask(f, API_GENERATE,
                        "{\"rid\":\"r\",\"stream\":true,\"input_ids\":[7],\"sampling_params\":{"
                        "\"stream_interval\":10}}"));
    api_fixture_text(f, "abc"); /* b and c wait for their event */
    api_fixture_end_aborted(f, "Aborted");
    const char *first = api_fixture_last_event(f, 1);
    assert_non_null(strstr(first, "{\"text\":\"a\",\"output_ids\":[97],"));
    assert_non_null(strstr(first, "\"finish_reason\":null,"));
    const char *last = api_fixture_last_event(f, 0); /* in the place of the first */
    assert_non_null(strstr(last, "{\"text\":\"abc\",\"output_ids\":[97,98,99],"));
    assert_non_null(strstr(last, FINISH("Aborted")));
    assert_int_equal(f->end_count, 1);
}

/* One of several; all of them. */
static void test_samples(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"rid\":\"r\",\"input_ids\":[7],\"sampling_params\":{\"n\":2}}"));
    api_fixture_sample_text(f, 0, "a");
    api_fixture_sample_abort(f, 0, "Aborted");
    api_fixture_sample_text(f, 1, "bc");
    api_fixture_length(f);
    assert_int_equal(f->status, 200);
    has(f, "[{\"text\":\"a\",\"output_ids\":[97],\"meta_info\":{\"id\":\"r_0\"," FINISH("Aborted"));
    has(f, "{\"text\":\"bc\",\"output_ids\":[98,99],\"meta_info\":{\"id\":\"r_1\","
           "\"finish_reason\":{\"type\":\"length\",\"length\":2}");
    assert_true(
        api_fixture_ask(f, API_GENERATE,
                        "{\"stream\":true,\"input_ids\":[[7],[8]],\"sampling_params\":{\"n\":2}}"));
    api_fixture_sample_text(f, 3, "a");
    api_fixture_end_aborted(f, "Aborted");
    for (unsigned i = 0; i < 4; i++) {
        assert_non_null(strstr(api_fixture_last_event(f, i), FINISH("Aborted")));
    }
}

/* A failure beside it does not make the reply one. */
static void test_beside_a_failure(void **state) {
    api_fixture *f = *state;
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[7],\"sampling_params\":{\"n\":2}}"));
    api_fixture_sample_abort(f, 0, "Abort before prefill");
    api_fixture_fail(f, BT_ERR_PEER_GONE, 503, "decode is gone");
    assert_int_equal(f->status, 200);
    has(f, FINISH("Abort before prefill"));
    has(f, "\"message\":\"decode is gone\",\"status_code\":503,");
}

/* ---- the prompt's log-probabilities ---------------------------------------------------------- */

static void test_scores(void **state) {
    static const float SCORES[] = {-1.0f, -2.0f};
    api_fixture *f = *state;
    for (uint32_t there = 0; there <= 2; there++) {
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    "{\"input_ids\":[7,8,9],\"return_logprob\":true,"
                                    "\"logprob_start_len\":0}"));
        if (there > 0) api_fixture_prompt(f, 1, SCORES, there);
        if (there > 1) api_fixture_row(f, 97, -0.5f);
        api_fixture_end_aborted(f, "Aborted");
        assert_int_equal(f->status, 200);
        has(f, FINISH("Aborted"));
        has(f, there > 1 ? "\"input_token_logprobs\":[[null,7,null],[-1.0,8,null],[-2.0,9,null]],"
                         : "\"input_token_logprobs\":[],");
    }
}

/* Beside an abort a reply that lacks them is none all the same. */
static void test_scores_that_were_lost(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[7,8,9],\"return_logprob\":true,"
                                "\"logprob_start_len\":0,\"sampling_params\":{\"n\":2}}"));
    api_fixture_sample_abort(f, 0, "Aborted");
    api_fixture_sample_row(f, 1, 97, -0.5f);
    api_fixture_sample_length(f, 1);
    api_fixture_end_aborted(f, "Aborted");
    assert_int_equal(f->status, 200);
    has(f, FINISH("Aborted"));
    has(f, "\"message\":\"log-probabilities of the prompt were lost\",\"status_code\":500,");
}

static void test_echo(void **state) {
    api_fixture *f = *state;
    assert_true(
        api_fixture_ask(f, API_COMPLETION, "{\"prompt\":\"ab\",\"echo\":true,\"logprobs\":1}"));
    api_fixture_end_aborted(f, "Abort in waiting queue");
    assert_int_equal(f->status, 200);
    has(f, "\"text\":\"\",\"logprobs\":{\"text_offset\":[],\"token_logprobs\":[],\"tokens\":[],"
           "\"top_logprobs\":[]},\"finish_reason\":\"abort\"");
}

/* ---- chat and completions -------------------------------------------------------------------- */

static void test_openai(void **state) {
    static const struct {
        api_kind kind;
        const char *body;
    } cases[] = {
        {API_CHAT,
         "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"return_meta_info\":true"},
        {API_COMPLETION, "{\"prompt\":\"a\",\"return_meta_info\":true"}};
    api_fixture *f = *state;
    for (size_t i = 0; i < 2 * BT_ARRAY_COUNT(cases); i++) {
        for (int tokens = 0; tokens < 2; tokens++) {
            const bool is_stream = i % 2 == 1;
            char body[256];
            snprintf(body, sizeof(body), "%s%s}", cases[i / 2].body,
                     is_stream ? ",\"stream\":true" : "");
            assert_true(api_fixture_ask(f, cases[i / 2].kind, body));
            if (tokens > 0) api_fixture_text(f, "xy");
            api_fixture_end_aborted(f, tokens > 0 ? "Aborted" : "Abort before prefill");
            assert_int_equal(f->status, 200);
            has(f, "\"finish_reason\":\"abort\",\"matched_stop\":null");
            has(f, tokens > 0 ? FINISH("Aborted") : FINISH("Abort before prefill"));
            has_not(f, "\"error\"");
            if (!is_stream) has(f, tokens > 0 ? "\"completion_tokens\":2," : "_tokens\":0,");
            if (is_stream) has(f, "data: [DONE]\n\n");
        }
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bodies),
        cmocka_unit_test(test_bad_bodies),
        cmocka_unit_test(test_names),
        CASE(test_whole_replies),
        CASE(test_without_a_token),
        CASE(test_text_that_was_held_back),
        CASE(test_streams),
        CASE(test_samples),
        CASE(test_beside_a_failure),
        CASE(test_scores),
        CASE(test_scores_that_were_lost),
        CASE(test_echo),
        CASE(test_openai),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
