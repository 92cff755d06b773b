/* Replies of /generate, byte for byte: whole and streamed, masks in both modes, ends of every kind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "base/fault.h"
#include "tests/unit/router/api_fixture.h"

#define META_HEAD(reason)                                                                          \
    "\"meta_info\":{\"id\":\"r1\",\"finish_reason\":" reason                                       \
    ",\"prompt_tokens\":5,\"weight_version\":\"default\",\"num_retractions\":0,"
#define META_TAIL(count)                                                                           \
    "\"reasoning_tokens\":0,\"completion_tokens\":" count                                          \
    ",\"cached_tokens\":0,\"cached_tokens_details\":null,\"dp_rank\":null,"                        \
    "\"e2e_latency\":0.041,\"response_sent_to_client_ts\":1790000000.25}"
#define WEIGHTS(count) "\"output_token_weight_versions\":[[0," count "]],"
#define PROMPT         "\"rid\":\"r1\",\"input_ids\":[785,6722,315,9625,374]"
#define MASKED         PROMPT ",\"return_sampling_mask\":true"

static const int32_t FIRST_IDS[] = {80, 279, 264};
static const float FIRST_LOGPROBS[] = {-0.5108256f, -1.2039728f, -2.3025851f};
static const int32_t SECOND_IDS[] = {44};
static const float SECOND_LOGPROBS[] = {0.0f};

static void two_masked_rows(api_fixture *f, bool is_support) {
    api_fixture_mask_row(f, 80, -0.91629076f, FIRST_LOGPROBS[0], FIRST_IDS,
                         is_support ? FIRST_LOGPROBS : NULL, 3);
    api_fixture_mask_row(f, 44, -0.25f, 0.0f, SECOND_IDS, is_support ? SECOND_LOGPROBS : NULL, 1);
}

static void test_plain_reply(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT "}"));
    api_fixture_text(f, "Hi");
    assert_int_equal(f->begin_count, 0);
    api_fixture_length(f);
    assert_int_equal(f->status, 200);
    assert_string_equal(f->content_type, "application/json");
    assert_int_equal(f->end_count, 1);
    assert_int_equal(f->content_bytes, f->body.used); /* what is small is sent with its length */
    assert_string_equal(api_fixture_body(f),
                        "{\"text\":\"Hi\",\"output_ids\":[72,105]," META_HEAD(
                            "{\"type\":\"length\",\"length\":2}") META_TAIL("2") "}");
    assert_int_equal(f->granted_bytes, 0);
    assert_int_equal(f->cancel_count, 0);
}

/* A request without masks under a cap: its body, and what was allocated for it. */
static bt_alloc_tally ask_under(api_fixture *f, uint32_t cap, const char *body, char *out,
                                size_t out_bytes) {
    bt_alloc_tally tally = {0};
    f->settings.mask_max_tokens = cap;
#ifdef BT_FAULT
    bt_fault_alloc_reset();
#endif
    assert_true(api_fixture_ask(f, API_GENERATE, body));
    api_fixture_text(f, "Hi there");
    api_fixture_length(f);
#ifdef BT_FAULT
    tally = bt_fault_alloc_tally();
    assert_true(tally.count > 0);
#endif
    const char *answer = api_fixture_body(f);
    assert_true(strlen(answer) < out_bytes);
    memcpy(out, answer, strlen(answer) + 1);
    return tally;
}

/* No opt-in, no cost: the cap changes no byte and no allocation, and there is nothing of masks. */
static void test_without_masks_the_cap_is_nothing(void **state) {
    api_fixture *f = *state;
    static const char *const bodies[] = {"{" PROMPT "}", "{" PROMPT ",\"return_logprob\":true}",
                                         "{" PROMPT ",\"stream\":true}"};
    static char small[65536], large[65536];
    for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
        (void)ask_under(f, 1, bodies[i], small, sizeof(small)); /* buffers of the thread grow */
        const bt_alloc_tally one = ask_under(f, 1, bodies[i], small, sizeof(small));
        const bt_alloc_tally many = ask_under(f, 65536, bodies[i], large, sizeof(large));
        assert_memory_equal(&one, &many, sizeof(one));
        assert_string_equal(small, large);
        assert_null(strstr(large, "mask"));
        assert_null(strstr(large, "weight_versions"));
    }
}

static void test_selected_mode(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" MASKED ",\"sampling_params\":{\"top_k\":3}}"));
    two_masked_rows(f, false);
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        "{\"text\":\"P,\",\"output_ids\":[80,44]," META_HEAD(
            "{\"type\":\"length\",\"length\":2}") "\"output_token_sampling_mask\":[[80,279,264],["
                                                  "44]],"
                                                  "\"output_token_sampling_logprobs\":[-0."
                                                  "5108255743980408,0.0],"
                                                  "\"output_token_sampling_mask_length\":"
                                                  "2," WEIGHTS("2") META_TAIL("2") "}");
}

static void test_support_mode_with_logprobs(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" MASKED
                                ",\"sampling_logprobs_mode\":\"support\",\"return_logprob\":true,"
                                "\"sampling_params\":{\"top_k\":3}}"));
    two_masked_rows(f, true);
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        "{\"text\":\"P,\",\"output_ids\":[80,44]," META_HEAD(
            "{\"type\":\"length\",\"length\":2}") "\"input_token_logprobs\":[],"
                                                  "\"output_token_logprobs\":[[-0.9162907600402832,"
                                                  "80,null],[-0.25,44,null]],"
                                                  "\"output_token_logprobs_length\":2,"
                                                  "\"output_token_sampling_mask\":[[80,279,264],["
                                                  "44]],"
                                                  "\"output_token_sampling_logprobs\":[[-0."
                                                  "5108255743980408,-1.2039728164672852,"
                                                  "-2.3025851249694824],[0.0]],"
                                                  "\"output_token_sampling_mask_length\":"
                                                  "2," WEIGHTS("2") META_TAIL("2") "}");
}

static void test_text_in_logprobs_and_prompt_ids(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" PROMPT ",\"return_logprob\":true,"
                                "\"return_text_in_logprobs\":true,"
                                "\"return_prompt_token_ids\":true}"));
    api_fixture_row(f, 34, -0.5f);
    api_fixture_row(f, 0xc3, -INFINITY);
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        "{\"text\":\"\\\"\xef\xbf\xbd\",\"output_ids\":[34,195]," META_HEAD(
            "{\"type\":\"length\",\"length\":2}") "\"input_token_logprobs\":[],"
                                                  "\"output_token_logprobs\":[[-0.5,34,\"\\\"\"],[-"
                                                  "9999.0,195,\"\xef\xbf\xbd\"]],"
                                                  "\"output_token_logprobs_length\":2," META_TAIL(
                                                      "2") ",\"prompt_token_ids\":[785,6722,315,"
                                                           "9625,374]}");
}

/* The end-of-sequence token is in the ids and not in the text, unless no_stop_trim keeps it. */
static void test_stop_tokens(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT "}"));
    api_fixture_text(f, "A");
    api_fixture_row(f, API_FIXTURE_EOS, 0);
    api_fixture_stop(f, API_FIXTURE_EOS);
    assert_string_equal(api_fixture_body(f),
                        "{\"text\":\"A\",\"output_ids\":[65,319]," META_HEAD(
                            "{\"type\":\"stop\",\"matched\":319}") META_TAIL("2") "}");
    static const struct {
        const char *parameters, *text;
    } CASES[] = {
        {"\"stop_token_ids\":[66]", "A"},
        {"\"stop_token_ids\":[null,66],\"no_stop_trim\":true", "AB"},
        {"\"stop_token_ids\":[66],\"skip_special_tokens\":false", "A"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        char body[512], expected[64];
        snprintf(body, sizeof(body), "{" PROMPT ",\"sampling_params\":{%s}}", CASES[i].parameters);
        snprintf(expected, sizeof(expected), "{\"text\":\"%s\",\"output_ids\":[65,66],",
                 CASES[i].text);
        assert_true(api_fixture_ask(f, API_GENERATE, body));
        api_fixture_text(f, "AB");
        api_fixture_stop(f, 66);
        assert_memory_equal(api_fixture_body(f), expected, strlen(expected));
        assert_non_null(strstr(api_fixture_body(f), "{\"type\":\"stop\",\"matched\":66}"));
    }
}

static void test_special_tokens(void **state) {
    static const struct {
        const char *parameters, *text;
    } CASES[] = {
        {"\"ignore_eos\":true", "AB"},
        {"\"ignore_eos\":true,\"skip_special_tokens\":false", "A<|im_end|>B"},
        {"\"skip_special_tokens\":false,\"no_stop_trim\":true", "A<|im_end|>B"},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        char body[512], expected[64];
        snprintf(body, sizeof(body), "{" PROMPT ",\"sampling_params\":{%s}}", CASES[i].parameters);
        snprintf(expected, sizeof(expected), "{\"text\":\"%s\",", CASES[i].text);
        assert_true(api_fixture_ask(f, API_GENERATE, body));
        api_fixture_text(f, "A");
        api_fixture_row(f, API_FIXTURE_EOS, 0);
        api_fixture_text(f, "B");
        api_fixture_length(f);
        assert_memory_equal(api_fixture_body(f), expected, strlen(expected));
    }
}

/* An end-of-sequence token that is also the last allowed one ends by length, and its text counts.
 */
static void test_length_wins_over_stop(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" PROMPT ",\"sampling_params\":{\"max_new_tokens\":2,"
                                "\"skip_special_tokens\":false}}"));
    api_fixture_text(f, "A");
    api_fixture_row(f, API_FIXTURE_EOS, 0);
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f),
                        "{\"text\":\"A<|im_end|>\",\"output_ids\":[65,319]," META_HEAD(
                            "{\"type\":\"length\",\"length\":2}") META_TAIL("2") "}");
}

/* So does a stop string that the last allowed token completes, also one that was half held back. */
static void test_length_wins_over_stop_strings(void **state) {
    api_fixture *f = *state;
    static const char *const STREAMS[] = {"false", "true"};
    for (size_t i = 0; i < 2; i++) {
        char body[256];
        snprintf(body, sizeof(body),
                 "{" PROMPT ",\"stream\":%s,\"sampling_params\":{\"max_new_tokens\":3,"
                 "\"stop\":[\"BC\",\"Z\"]}}",
                 STREAMS[i]);
        assert_true(api_fixture_ask(f, API_GENERATE, body));
        api_fixture_text(f, "A");
        api_fixture_text(f, "B");
        api_fixture_text(f, "C");
        api_fixture_length(f);
        const char *reply = i == 0 ? api_fixture_body(f) : api_fixture_last_event(f, 0);
        assert_string_equal(reply, "{\"text\":\"ABC\",\"output_ids\":[65,66,67]," META_HEAD(
                                       "{\"type\":\"length\",\"length\":3}") META_TAIL("3") "}");
    }
}

static void test_no_tokens(void **state) {
    api_fixture *f = *state;
    static const char *const BODIES[] = {
        "{" MASKED ",\"sampling_params\":{\"max_new_tokens\":0,\"top_k\":2}}",
        "{" MASKED ",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":0,\"top_k\":2}}",
    };
    for (size_t i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
        const char *reply = i == 0 ? api_fixture_body(f) : api_fixture_last_event(f, 0);
        /* No mask was ever made: the keys are absent. */
        assert_string_equal(reply, "{\"text\":\"\",\"output_ids\":[]," META_HEAD(
                                       "{\"type\":\"length\",\"length\":0}") META_TAIL("0") "}");
    }
    /* No row told it: the end does. */
    f->cached_tokens = 4;
    assert_true(api_fixture_ask(f, API_GENERATE, BODIES[0]));
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"cached_tokens\":4,"));
}

/* ---- streams --------------------------------------------------------------------------------- */

static void test_cumulative_stream(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" MASKED ",\"stream\":true,\"sampling_params\":{\"top_k\":3}}"));
    assert_int_equal(f->begin_count, 0);
    two_masked_rows(f, false);
    assert_int_equal(f->status, 200);
    assert_string_equal(f->content_type, "text/event-stream");
    assert_non_null(strstr(f->fields, "X-Accel-Buffering: no\r\n"));
    assert_int_equal(f->content_bytes, -1);
    api_fixture_length(f);
#define FIRST                                                                                      \
    "data: {\"text\":\"P\",\"output_ids\":[80]," META_HEAD(                                        \
        "null") "\"output_token_sampling_mask\":[[80,279,264]],"                                   \
                "\"output_token_sampling_logprobs\":[-0.5108255743980408],"                        \
                "\"output_token_sampling_mask_length\":1," WEIGHTS("1") META_TAIL("1") "}\n\n"
#define SECOND(reason)                                                                             \
    "data: {\"text\":\"P,\",\"output_ids\":[80,44]," META_HEAD(                                    \
        reason) "\"output_token_sampling_mask\":[[80,279,264],[44]],"                              \
                "\"output_token_sampling_logprobs\":[-0.5108255743980408,0.0],"                    \
                "\"output_token_sampling_mask_length\":2," WEIGHTS("2") META_TAIL("2") "}\n\n"
    assert_string_equal(api_fixture_body(f),
                        FIRST SECOND("null")
                            SECOND("{\"type\":\"length\",\"length\":2}") "data: [DONE]\n\n");
    assert_int_equal(f->end_count, 1);
}

static void test_incremental_stream(void **state) {
    api_fixture *f = *state;
    f->settings.is_incremental = true;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" MASKED ",\"stream\":true,\"return_logprob\":true,"
                                "\"sampling_params\":{\"top_k\":3}}"));
    two_masked_rows(f, false);
    api_fixture_length(f);
#define DELTA(text, ids, reason, count, logprobs, masks, selected, runs)                           \
    "data: {\"text\":\"" text "\",\"output_ids\":[" ids                                            \
    "]," META_HEAD(reason) "\"input_token_logprobs\":[],\"output_token_logprobs\":[" logprobs      \
                           "],\"output_token_logprobs_length\":" count                             \
                           ",\"output_token_sampling_mask\":[" masks                               \
                           "],\"output_token_sampling_logprobs\":[" selected                       \
                           "],\"output_token_sampling_mask_length\":" count                        \
                           ",\"output_token_weight_versions\":[" runs                              \
                           "]," META_TAIL(count) "}\n\n"
    assert_string_equal(api_fixture_body(f),
                        DELTA("P", "80", "null", "1", "[-0.9162907600402832,80,null]",
                              "[80,279,264]", "-0.5108255743980408", "[0,1]")
                            DELTA(",", "44", "null", "2", "[-0.25,44,null]", "[44]", "0.0", "[0,1]")
                                DELTA("", "", "{\"type\":\"length\",\"length\":2}", "2", "", "", "",
                                      "") "data: [DONE]\n\n");
}

/* The token that ends the reply goes out in one event with the reason. */
static void test_last_token_and_reason_together(void **state) {
    static const char EXPECTED[] = "data: {\"text\":\"P,\",\"output_ids\":[80,44]," META_HEAD(
        "{\"type\":\"length\",\"length\":2}") META_TAIL("2") "}\n\ndata: [DONE]\n\n";
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" PROMPT
                                ",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":2}}"));
    api_fixture_text(f, "P");
    size_t before = f->body.used;
    api_fixture_text(f, ",");
    assert_int_equal(f->body.used, before);
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f) + before, EXPECTED);
}

static unsigned count_of(const char *text, const char *needle) {
    unsigned count = 0;
    for (const char *at = strstr(text, needle); at != NULL; at = strstr(at + 1, needle)) {
        count++;
    }
    return count;
}

static void test_stream_interval(void **state) {
    api_fixture *f = *state;
    f->settings.stream_interval = 3;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT ",\"stream\":true}"));
    for (unsigned i = 1; i <= 8; i++) {
        api_fixture_text(f, "a");
        /* After tokens 1, 4, 7. */
        assert_int_equal(count_of(api_fixture_body(f), "data: "), (i + 2) / 3);
    }
    api_fixture_length(f);
    assert_int_equal(count_of(api_fixture_body(f), "data: "), 5);
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" PROMPT ",\"stream\":true,"
                                "\"sampling_params\":{\"stream_interval\":1}}"));
    api_fixture_text(f, "aaa");
    assert_int_equal(count_of(api_fixture_body(f), "data: "), 3);
    api_fixture_length(f);
}

/* Rows with one id each, in one batch. */
static void feed_together(api_fixture *f, const char *text) {
    static uint8_t records[1024];
    size_t bytes = 0;
    for (const char *at = text; *at != 0; at++) {
        const int32_t token = *at;
        const token_row row = {.token = token,
                               .mask_mode = ROW_MASK_SELECTED,
                               .selected_logprob = -0.5f,
                               .support_count = 1,
                               .support_size = 1,
                               .support_ids = &token};
        assert_true(bytes + row_record_bytes(token_row_widths(&row)) <= sizeof(records));
        row_record_encode(&row, records + bytes);
        bytes += row_record_bytes(token_row_widths(&row));
    }
    const dispatch_rows rows = {
        .records = records, .bytes = bytes, .count = (uint32_t)strlen(text)};
    api_call_on_rows(&f->call, 0, &rows);
}

/* Rows that come together: an event says what it would say if they came one by one. */
static void test_rows_together_end_where_an_event_is_due(void **state) {
    static const struct {
        const char *rows, *text;
        unsigned events; /* with these rows */
    } STEPS[] = {{"ab", "\"text\":\"a\"", 1},
                 {"cde", "\"text\":\"abcd\"", 1},
                 {"fghijkl", "\"text\":\"abcdefghij\"", 1}, /* two at once */
                 {"m", "\"text\":\"abcdefghijklm\"", 1},
                 {"no", "\"text\":\"abcdefghijklm\"", 0}};
    api_fixture *f = *state;
    f->settings.stream_interval = 3;
    for (int is_incremental = 0; is_incremental < 2; is_incremental++) {
        unsigned events = 0;
        f->settings.is_incremental = is_incremental != 0;
        assert_true(api_fixture_ask(
            f, API_GENERATE,
            "{" PROMPT
            ",\"stream\":true,\"return_sampling_mask\":true,\"sampling_params\":{\"top_k\":4}}"));
        for (size_t i = 0; i < BT_ARRAY_COUNT(STEPS); i++) {
            feed_together(f, STEPS[i].rows);
            events += STEPS[i].events;
            assert_int_equal(count_of(api_fixture_body(f), "data: "), events);
            if (is_incremental == 0)
                assert_non_null(strstr(api_fixture_last_event(f, 0), STEPS[i].text));
        }
        const char *last = api_fixture_last_event(f, 0);
        assert_non_null(strstr(last, "\"completion_tokens\":13,"));
        assert_non_null(strstr(last, "\"output_token_sampling_mask_length\":13,"));
        if (is_incremental != 0) {
            assert_non_null(strstr(last, "{\"text\":\"klm\",\"output_ids\":[107,108,109]"));
            assert_non_null(strstr(last, "\"output_token_sampling_mask\":[[107],[108],[109]]"));
        }
        api_fixture_length(f);
        last = api_fixture_last_event(f, 0);
        if (is_incremental != 0) {
            assert_non_null(strstr(last, "{\"text\":\"no\",\"output_ids\":[110,111]"));
            assert_non_null(strstr(last, "\"output_token_sampling_mask\":[[110],[111]]"));
        }
        assert_non_null(strstr(last, "\"completion_tokens\":15,"));
    }
}

/* Characters that span tokens: an event comes for every token, text only when it is whole. */
static void test_characters_across_tokens(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT ",\"stream\":true}"));
    api_fixture_text(f, "\xe2\x82");
    assert_memory_equal(api_fixture_last_event(f, 0), "{\"text\":\"\",\"output_ids\":[226,130],",
                        strlen("{\"text\":\"\",\"output_ids\":[226,130],"));
    api_fixture_text(f, "\xac");
    assert_memory_equal(api_fixture_last_event(f, 0), "{\"text\":\"\xe2\x82\xac\",",
                        strlen("{\"text\":\"\xe2\x82\xac\","));
    api_fixture_text(f, "\xe2");
    api_fixture_length(f);
    assert_memory_equal(api_fixture_last_event(f, 0), "{\"text\":\"\xe2\x82\xac\xef\xbf\xbd\",",
                        strlen("{\"text\":\"\xe2\x82\xac\xef\xbf\xbd\","));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_plain_reply),
        CASE(test_without_masks_the_cap_is_nothing),
        CASE(test_selected_mode),
        CASE(test_support_mode_with_logprobs),
        CASE(test_text_in_logprobs_and_prompt_ids),
        CASE(test_stop_tokens),
        CASE(test_special_tokens),
        CASE(test_length_wins_over_stop),
        CASE(test_length_wins_over_stop_strings),
        CASE(test_no_tokens),
        CASE(test_cumulative_stream),
        CASE(test_incremental_stream),
        CASE(test_last_token_and_reason_together),
        CASE(test_stream_interval),
        CASE(test_rows_together_end_where_an_event_is_due),
        CASE(test_characters_across_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
