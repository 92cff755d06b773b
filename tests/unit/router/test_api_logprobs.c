/* Log-probabilities of other tokens than the drawn ones: the largest, those of asked ids, and the
 * prompt's; byte for byte, whole and streamed, early, late and wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>

#include "tests/unit/router/api_fixture.h"

#define PROMPT "\"rid\":\"r\",\"input_ids\":[72,105,33],\"return_logprob\":true"
#define LISTS  "\"top_logprobs_num\":2,\"token_ids_logprob\":[66,65,66]"
#define META_HEAD(reason)                                                                          \
    "\"meta_info\":{\"id\":\"r\",\"finish_reason\":" reason                                        \
    ",\"prompt_tokens\":3,\"weight_version\":\"default\",\"num_retractions\":0,"
#define META_TAIL(count)                                                                           \
    "\"reasoning_tokens\":0,\"completion_tokens\":" count                                          \
    ",\"cached_tokens\":0,\"cached_tokens_details\":null,\"dp_rank\":null,"                        \
    "\"e2e_latency\":0.041,\"response_sent_to_client_ts\":1790000000.25}"
#define LENGTH(count) "{\"type\":\"length\",\"length\":" count "}"

/* A row with two largest and two asked ones, told apart by `token`. */
static void feed(api_fixture *f, int32_t token) {
    const float base = (float)-token;
    const row_top top[] = {{token, base}, {token + 1, base - 0.5f}};
    const float asked[] = {base - 1.0f, -INFINITY};
    const proto_generation *g = &f->call.request->generation;
    const token_row row = {.token = token,
                           .has_logprob = 1,
                           .token_logprob = base,
                           .top_count = g->top_logprobs < 2 ? g->top_logprobs : 2,
                           .top = top,
                           .id_logprob_count = g->logprob_id_count,
                           .id_logprobs = asked};
    api_fixture_feed(f, 0, &row);
}

/* As feed's, of a prompt position: {logprob, id, logprob, id, logprob, asked...}. */
static void prompt_entry_of(float *out, uint32_t position, const proto_generation *g) {
    const float base = -0.25f - (float)position;
    *out++ = base;
    for (uint32_t i = 0; i < g->top_logprobs; i++) {
        const int32_t id = (int32_t)(40 + position + i);
        memcpy(out++, &id, sizeof(id));
        *out++ = base - (float)i;
    }
    for (uint32_t i = 0; i < g->logprob_id_count; i++) {
        *out++ = base * 2.0f - (float)i;
    }
}

static void give_prompt(api_fixture *f, uint32_t first, uint32_t count) {
    const proto_generation *g = &f->call.request->generation;
    const size_t floats = proto_prompt_logprob_bytes(g) / sizeof(float);
    float *entries = malloc(count * floats * sizeof(float) + 1);
    assert_non_null(entries);
    for (uint32_t i = 0; i < count; i++) {
        prompt_entry_of(entries + i * floats, first + i, g);
    }
    api_fixture_prompt(f, first, entries, count);
    free(entries);
}

/* ---- of the output --------------------------------------------------------------------------- */

#define OUTPUT_LISTS(tokens, top, ids, count)                                                      \
    "\"input_token_logprobs\":[],\"output_token_logprobs\":[" tokens                               \
    "],\"output_token_logprobs_length\":" count                                                    \
    ",\"input_top_logprobs\":[],\"output_top_logprobs\":[" top                                     \
    "],\"input_token_ids_logprobs\":[],\"output_token_ids_logprobs\":[" ids "],"
#define TOKEN_A "[-65.0,65,null]"
#define TOP_A   "[[-65.0,65,null],[-65.5,66,null]]"
#define IDS_A   "[[-66.0,66,null],[-9999.0,65,null],[-66.0,66,null]]"
#define TOKEN_B "[-66.0,66,null]"
#define TOP_B   "[[-66.0,66,null],[-66.5,67,null]]"
#define IDS_B   "[[-67.0,66,null],[-9999.0,65,null],[-67.0,66,null]]"
#define REPLY(text, ids, reason, lists, count)                                                     \
    "{\"text\":\"" text "\",\"output_ids\":[" ids "]," META_HEAD(reason) lists META_TAIL(count) "}"
#define EVENT(text, ids, reason, lists, count)                                                     \
    "data: " REPLY(text, ids, reason, lists, count) "\n\n"
#define BOTH(a, b) a "," b
#define DONE       "data: [DONE]\n\n"

static void test_lists_of_the_output(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT "," LISTS "}"));
    feed(f, 65);
    feed(f, 66);
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        REPLY("AB", "65,66", LENGTH("2"),
              OUTPUT_LISTS(BOTH(TOKEN_A, TOKEN_B), BOTH(TOP_A, TOP_B), BOTH(IDS_A, IDS_B), "2"),
              "2"));
}

static void test_cumulative_lists(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," PROMPT "," LISTS "}"));
    feed(f, 65);
    feed(f, 66);
    api_fixture_length(f);
#define ALL OUTPUT_LISTS(BOTH(TOKEN_A, TOKEN_B), BOTH(TOP_A, TOP_B), BOTH(IDS_A, IDS_B), "2")
    assert_string_equal(api_fixture_body(f),
                        EVENT("A", "65", "null", OUTPUT_LISTS(TOKEN_A, TOP_A, IDS_A, "1"), "1")
                            EVENT("AB", "65,66", "null", ALL, "2")
                                EVENT("AB", "65,66", LENGTH("2"), ALL, "2") DONE);
}

static void test_incremental_lists(void **state) {
    api_fixture *f = *state;
    f->settings.is_incremental = true;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," PROMPT "," LISTS "}"));
    feed(f, 65);
    feed(f, 66);
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f),
                        EVENT("A", "65", "null", OUTPUT_LISTS(TOKEN_A, TOP_A, IDS_A, "1"), "1")
                            EVENT("B", "66", "null", OUTPUT_LISTS(TOKEN_B, TOP_B, IDS_B, "2"), "2")
                                EVENT("", "", LENGTH("2"), OUTPUT_LISTS("", "", "", "2"), "2")
                                    DONE);
}

/* One of both; without return_logprob neither. */
static void test_lists_that_were_not_asked_for(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT ",\"top_logprobs_num\":2}"));
    feed(f, 65);
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"output_top_logprobs\":[" TOP_A "],\"reasoning"));
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT ",\"token_ids_logprob\":[66]}"));
    feed(f, 65);
    api_fixture_length(f);
    assert_null(strstr(api_fixture_body(f), "top_logprobs"));
    assert_non_null(
        strstr(api_fixture_body(f), "\"output_token_ids_logprobs\":[[[-66.0,66,null]]],"));
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"logprob_start_len\":0,\"top_logprobs_num\":2,"
                                "\"token_ids_logprob\":[1]}"));
    assert_int_equal(f->call.request->generation.top_logprobs, 0);
    assert_int_equal(f->call.request->generation.logprob_id_count, 0);
    assert_int_equal(f->call.request->generation.wants_prompt_logprobs, 0);
    api_fixture_text(f, "A");
    api_fixture_length(f);
    assert_null(strstr(api_fixture_body(f), "logprobs"));
}

static void test_top_logprobs_of_a_chat(void **state) {
    static const char EXPECTED[] =
        "\"logprobs\":{\"content\":[{\"token\":\"A\",\"bytes\":[65],\"logprob\":-65.0,"
        "\"top_logprobs\":[{\"token\":\"A\",\"bytes\":[65],\"logprob\":-65.0},"
        "{\"token\":\"B\",\"bytes\":[66],\"logprob\":-65.5}]},"
        "{\"token\":\"B\",\"bytes\":[66],\"logprob\":-66.0,"
        "\"top_logprobs\":[{\"token\":\"B\",\"bytes\":[66],\"logprob\":-66.0},"
        "{\"token\":\"C\",\"bytes\":[67],\"logprob\":-66.5}]}]},\"finish_reason\":\"length\"";
    api_fixture *f = *state;
    assert_true(
        api_fixture_ask(f, API_CHAT, "{\"input_ids\":[1],\"logprobs\":true,\"top_logprobs\":2}"));
    feed(f, 65);
    feed(f, 66);
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), EXPECTED));
    assert_true(api_fixture_ask(
        f, API_CHAT, "{\"input_ids\":[1],\"logprobs\":true,\"top_logprobs\":1,\"stream\":true}"));
    feed(f, 65);
    assert_non_null(strstr(api_fixture_last_event(f, 0),
                           "\"delta\":{\"content\":\"A\"},\"logprobs\":{\"content\":[{\"token\":"
                           "\"A\",\"bytes\":[65],\"logprob\":-65.0,\"top_logprobs\":[{\"token\":"
                           "\"A\",\"bytes\":[65],\"logprob\":-65.0}]}]},"));
    api_fixture_length(f);
}

/* ---- of the prompt --------------------------------------------------------------------------- */

#define INPUT                                                                                      \
    "\"input_token_logprobs\":[[null,72,\"H\"],[-1.25,105,\"i\"],[-2.25,33,\"!\"]],"               \
    "\"output_token_logprobs\":[[-65.0,65,\"A\"]],\"output_token_logprobs_length\":1,"             \
    "\"input_top_logprobs\":[null,[[-1.25,41,\")\"],[-2.25,42,\"*\"]],"                            \
    "[[-2.25,42,\"*\"],[-3.25,43,\"+\"]]],"                                                        \
    "\"output_top_logprobs\":[[[-65.0,65,\"A\"],[-65.5,66,\"B\"]]],"                               \
    "\"input_token_ids_logprobs\":[null,[[-2.5,66,\"B\"],[-3.5,65,\"A\"],[-2.5,66,\"B\"]],"        \
    "[[-4.5,66,\"B\"],[-5.5,65,\"A\"],[-4.5,66,\"B\"]]],"                                          \
    "\"output_token_ids_logprobs\":[[[-66.0,66,\"B\"],[-9999.0,65,\"A\"],[-66.0,66,\"B\"]]],"
#define SCORED                                                                                     \
    PROMPT ",\"return_text_in_logprobs\":true,\"logprob_start_len\":0," LISTS                      \
           ",\"sampling_params\":{\"max_new_tokens\":1}"

static void test_prompt_with_text(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED "}"));
    give_prompt(f, 1, 1);
    feed(f, 65);
    give_prompt(f, 2, 1);
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f), REPLY("A", "65", LENGTH("1"), INPUT, "1"));
}

/* From a later position; from the last one there is nothing to score. */
static void test_start_positions(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT ",\"logprob_start_len\":1}"));
    give_prompt(f, 2, 1);
    feed(f, 65);
    api_fixture_length(f);
    assert_non_null(
        strstr(api_fixture_body(f), "\"input_token_logprobs\":[[null,105,null],[-2.25,33,null]],"));
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT ",\"logprob_start_len\":2}"));
    feed(f, 65);
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"input_token_logprobs\":[[null,33,null]],"));
    /* Prompt only. */
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" PROMPT ",\"logprob_start_len\":0,"
                                "\"sampling_params\":{\"max_new_tokens\":0}}"));
    give_prompt(f, 1, 2);
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        REPLY("", "", LENGTH("0"),
              "\"input_token_logprobs\":[[null,72,null],[-1.25,105,null],[-2.25,33,null]],"
              "\"output_token_logprobs\":[],\"output_token_logprobs_length\":0,",
              "0"));
}

/* No event goes out before the prompt is whole; a stream of deltas tells it once. */
static void test_prompt_in_streams(void **state) {
    static const char HEAD[] = "\"input_token_logprobs\":[[null,72,null],[-1.25,105,null],"
                               "[-2.25,33,null]],\"output_token_logprobs\":[";
    api_fixture *f = *state;
    for (int is_incremental = 0; is_incremental < 2; is_incremental++) {
        f->settings.is_incremental = is_incremental == 1;
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    "{\"stream\":true," PROMPT ",\"logprob_start_len\":0}"));
        feed(f, 65);
        give_prompt(f, 1, 1);
        assert_int_equal(f->begin_count, 0);
        assert_int_equal(f->granted_bytes, 0);
        give_prompt(f, 2, 1);
        assert_int_equal(f->status, 200);
        assert_true(f->granted_bytes > 0);
        assert_non_null(strstr(api_fixture_last_event(f, 0), HEAD));
        give_prompt(f, 1, 1); /* once more, and too late to matter */
        feed(f, 66);
        const char *second = api_fixture_last_event(f, 0);
        assert_int_equal(strstr(second, HEAD) != NULL, is_incremental == 0);
        if (is_incremental == 1)
            assert_non_null(strstr(second, "\"input_token_logprobs\":[],\"output_token_logprobs\":"
                                           "[[-66.0,66,null]],"));
        api_fixture_length(f);
    }
}

/* Another try begins with the first entry again: what came before is void. */
static void test_prompt_once_more(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED "}"));
    const float garbage[7] = {-7.0f};
    api_fixture_prompt(f, 1, garbage, 1);
    give_prompt(f, 1, 2);
    api_fixture_prompt(f, 1, garbage, 1);
    give_prompt(f, 1, 1);
    give_prompt(f, 2, 1);
    feed(f, 65);
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f), REPLY("A", "65", LENGTH("1"), INPUT, "1"));
}

/* A stop string does not take the request from the backend before the prompt is there. */
static void test_stop_before_the_prompt(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" PROMPT ",\"logprob_start_len\":0,"
                                "\"sampling_params\":{\"stop\":\"B\"}}"));
    feed(f, 65);
    feed(f, 66);
    assert_int_equal(f->cancel_count, 0);
    assert_int_equal(f->begin_count, 0);
    feed(f, 67); /* on its way */
    give_prompt(f, 1, 2);
    assert_int_equal(f->cancel_count, 1);
    assert_int_equal(f->status, 200);
    assert_non_null(strstr(api_fixture_body(f), "{\"text\":\"A\",\"output_ids\":[65,66],"));
    assert_non_null(strstr(api_fixture_body(f), "[-2.25,33,null]]"));
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_int_equal(f->end_count, 1);
}

static void test_prompt_that_is_lost(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED "}"));
    give_prompt(f, 1, 1);
    feed(f, 65);
    api_fixture_length(f);
    assert_int_equal(f->status, 500);
    assert_non_null(strstr(api_fixture_body(f), "log-probabilities of the prompt were lost"));
    /* A failure needs no prompt; an abort says what there is. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED "}"));
    api_fixture_fail(f, BT_ERR_REQUEST_TOO_LARGE, 400, "too large");
    assert_int_equal(f->status, 400);
    assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED "}"));
    give_prompt(f, 1, 1);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_int_equal(f->status, 200);
    assert_non_null(strstr(api_fixture_body(f), "\"input_token_logprobs\":[],"));
}

static void test_bad_entries(void **state) {
    static float entries[3 * 7];
    static const struct {
        uint32_t first, count;
        float bad;
        size_t at;
    } CASES[] = {
        {2, 1, 0, 0},    /* a gap */
        {1, 3, 0, 0},    /* beyond the prompt */
        {0, 1, 0, 0},    /* before the first */
        {1, 2, NAN, 0},  /* the token's own */
        {1, 2, NAN, 4},  /* one of the largest */
        {1, 2, NAN, 13}, /* one of the asked */
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < 2 * BT_ARRAY_COUNT(CASES); i++) {
        memset(entries, 0, sizeof(entries));
        entries[CASES[i / 2].at] = CASES[i / 2].bad;
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    i % 2 == 0 ? "{" SCORED "}" : "{\"stream\":true," SCORED "}"));
        if (i % 4 < 2) feed(f, 65);
        api_fixture_prompt(f, CASES[i / 2].first, entries, CASES[i / 2].count);
        assert_int_equal(f->status, 500);
        assert_int_equal(f->cancel_count, 1);
        assert_int_equal(f->end_count, 1);
        api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    }
    /* Entries of another width. */
    for (size_t bytes = 0; bytes <= 8 * 7; bytes += 8) {
        const dispatch_prompt_logprobs given = {
            .first_position = 1, .count = 1, .entries = (const uint8_t *)entries, .bytes = bytes};
        memset(entries, 0, sizeof(entries));
        assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED "}"));
        api_call_on_prompt_logprobs(&f->call, 0, &given);
        assert_int_equal(f->status, 500);
        api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    }
    /* None were asked for. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT "}"));
    api_fixture_prompt(f, 1, entries, 1);
    assert_int_equal(f->status, 500);
}

/* Rows whose lists are not those that were asked for, or not numbers. */
static void test_bad_rows(void **state) {
    const row_top tops[] = {{65, -1.0f}, {66, NAN}};
    const float asked[] = {-1.0f, NAN};
    const token_row rows[] = {
        {.token = 65, .has_logprob = 1, .id_logprob_count = 1, .id_logprobs = asked},
        {.token = 65, .has_logprob = 1, .id_logprob_count = 2, .id_logprobs = asked},
        {.token = 65,
         .has_logprob = 1,
         .top_count = 2,
         .top = tops,
         .id_logprob_count = 2,
         .id_logprobs = (const float[]){-1.0f, -2.0f}},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(rows); i++) {
        assert_true(api_fixture_ask(f, API_GENERATE, "{" PROMPT "," LISTS "}"));
        api_fixture_feed(f, 0, &rows[i]);
        assert_int_equal(f->status, 500);
        api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* A long prompt with wide entries: packed, charged, spilled, and written in portions for each of
 * two samples. */
static void test_long_prompt_is_written_in_portions(void **state) {
    enum { TOKENS = 4000 };
    api_fixture *f = *state;
    bt_text body;
    char *whole = NULL;
    bt_text_init(&body, 1 << 20);
    bt_text_add_string(&body, "{\"rid\":\"r\",\"return_logprob\":true,\"logprob_start_len\":0,"
                              "\"top_logprobs_num\":20,\"sampling_params\":{\"n\":2},"
                              "\"input_ids\":[7");
    for (int i = 1; i < TOKENS; i++) {
        bt_text_add_format(&body, ",%d", i % 300);
    }
    bt_text_add_string(&body, "]}");
    f->model.context_tokens = 2 * TOKENS;
    f->model.room_tokens = 2 * TOKENS;
    f->limits.spill.bytes_max = 1 << 24;
    for (int round = 0; round < 2; round++) {
        f->limits.memory.bytes_max = round == 0 ? 1 << 24 : 50000;
        assert_true(api_fixture_ask(f, API_GENERATE, body.bytes));
        for (uint32_t at = 1; at < TOKENS; at += 100) {
            give_prompt(f, at, at + 100 < TOKENS ? 100 : TOKENS - at);
        }
        const uint64_t held = budget_used(&f->limits.memory) + budget_used(&f->limits.spill);
        assert_true(held >= (uint64_t)(TOKENS - 1) * 41 * 4 && held < (uint64_t)TOKENS * 200);
        f->room = 5000;
        api_fixture_length(f);
        assert_int_equal(f->content_bytes, -1);
        while (f->end_count == 0) {
            f->room = 5000;
            api_call_on_room(&f->call);
            assert_true(f->scratch.capacity <= 1 << 18);
        }
        assert_true(f->body.used > 2000000);
        if (round == 0) whole = strdup(api_fixture_body(f));
        assert_string_equal(api_fixture_body(f), whole);
    }
    bt_text_fini(&body);
    json_error_t error;
    json_t *reply = json_loads(whole, 0, &error);
    assert_non_null(reply);
    json_t *meta = json_object_get(json_array_get(reply, 1), "meta_info");
    json_t *tops = json_object_get(meta, "input_top_logprobs");
    assert_int_equal(json_array_size(tops), TOKENS);
    assert_true(json_is_null(json_array_get(tops, 0)));
    json_t *last = json_array_get(json_array_get(tops, TOKENS - 1), 19);
    assert_int_equal(json_integer_value(json_array_get(last, 1)), 40 + TOKENS - 1 + 19);
    json_decref(reply);
    free(whole);
}

static void test_spill_limit(void **state) {
    api_fixture *f = *state;
    f->limits.memory.bytes_max = 0;
    f->limits.spill.bytes_max = 40;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED "}"));
    give_prompt(f, 1, 2);
    assert_int_equal(f->status, 503);
    assert_int_equal(f->cancel_count, 1);
    assert_non_null(strstr(api_fixture_body(f), "--reply-spill-bytes=40"));
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
}

#ifdef BT_FAULT
static void feed_all(api_fixture *f) {
    give_prompt(f, 1, 2);
    feed(f, 65);
}

static void test_out_of_memory(void **state) {
    api_fixture_run_out_of_memory(*state, API_GENERATE, "{" SCORED "}", feed_all);
    api_fixture_run_out_of_memory(*state, API_GENERATE, "{\"stream\":true," SCORED "}", feed_all);
}
#endif

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_lists_of_the_output),
        CASE(test_cumulative_lists),
        CASE(test_incremental_lists),
        CASE(test_lists_that_were_not_asked_for),
        CASE(test_top_logprobs_of_a_chat),
        CASE(test_prompt_with_text),
        CASE(test_start_positions),
        CASE(test_prompt_in_streams),
        CASE(test_prompt_once_more),
        CASE(test_stop_before_the_prompt),
        CASE(test_prompt_that_is_lost),
        CASE(test_bad_entries),
        CASE(test_bad_rows),
        CASE(test_long_prompt_is_written_in_portions),
        CASE(test_spill_limit),
#ifdef BT_FAULT
        CASE(test_out_of_memory),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
