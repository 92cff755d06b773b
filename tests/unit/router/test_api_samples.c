/* Several samples of one prompt: lists and streams, byte for byte; ends, failures, stops and credit
 * of each alone. */
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

#define META(id, reason, lists, count)                                                             \
    "\"meta_info\":{\"id\":\"" id "\",\"finish_reason\":" reason                                   \
    ",\"prompt_tokens\":2,\"weight_version\":\"default\",\"num_retractions\":0," lists             \
    "\"reasoning_tokens\":0,\"completion_tokens\":" count                                          \
    ",\"cached_tokens\":0,\"cached_tokens_details\":null,\"dp_rank\":null,"                        \
    "\"e2e_latency\":0.041,\"response_sent_to_client_ts\":1790000000.25}"
#define LENGTH(count) "{\"type\":\"length\",\"length\":" count "}"
#define STOP          "{\"type\":\"stop\",\"matched\":319}"
#define TWO           "\"rid\":\"r\",\"input_ids\":[7,8],\"sampling_params\":{\"n\":2}"
#define SAMPLE(text, ids, id, reason, count)                                                       \
    "{\"text\":\"" text "\",\"output_ids\":[" ids "]," META("r_" id, reason, "", count)
#define INDEXED(text, ids, id, reason, count)                                                      \
    "data: " SAMPLE(text, ids, id, reason, count) ",\"index\":" id "}\n\n"
#define NEXT  "},"
#define DONE  "data: [DONE]\n\n"
#define BEGIN "["
#define CLOSE "}]"
#define OVERFLOW_TEXT                                                                              \
    "Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of cutoff ties. "    \
    "Lower top_k to leave more headroom or increase the server limit."
#define OVERFLOW                                                                                   \
    "{\"type\":\"abort\",\"message\":\"" OVERFLOW_TEXT                                             \
    "\",\"status_code\":400,\"err_type\":\"BadRequestError\"}"

/* ---- /generate ------------------------------------------------------------------------------- */

static void test_list(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
    assert_int_equal(f->call.request->generation.samples, 2);
    api_fixture_sample_text(f, 1, "y");
    api_fixture_sample_text(f, 0, "xz");
    api_fixture_sample_row(f, 1, API_FIXTURE_EOS, 0);
    api_fixture_sample_stop(f, 1, API_FIXTURE_EOS);
    assert_int_equal(f->begin_count, 0);
    api_fixture_length(f);
    assert_int_equal(f->status, 200);
    assert_string_equal(f->content_type, "application/json");
    assert_string_equal(api_fixture_body(f), BEGIN SAMPLE("xz", "120,122", "0", LENGTH("2"), "2")
                                                 NEXT SAMPLE("y", "121,319", "1", STOP, "2") CLOSE);
    assert_int_equal(f->granted_bytes, 0);
    assert_int_equal(f->cancel_count, 0);
}

#define LOGPROBS(list, count)                                                                      \
    "\"input_token_logprobs\":[],\"output_token_logprobs\":[" list                                 \
    "],\"output_token_logprobs_length\":" count ","

static void feed_stream(api_fixture *f) {
    api_fixture_sample_row(f, 0, 120, -0.5f);
    api_fixture_sample_row(f, 1, 121, -0.25f);
    api_fixture_sample_row(f, 1, 97, -2.0f);
    api_fixture_sample_length(f, 1);
    api_fixture_sample_row(f, 0, 98, -1.0f);
    api_fixture_length(f);
}

#define STREAM                                                                                     \
    "{\"rid\":\"r\",\"input_ids\":[7,8],\"return_logprob\":true,\"stream\":true,"                  \
    "\"sampling_params\":{\"n\":2,\"max_new_tokens\":2}}"
#define EVENT(text, ids, id, reason, list, count, index)                                           \
    "data: {\"text\":\"" text "\",\"output_ids\":[" ids                                            \
    "]," META("r_" id, reason, LOGPROBS(list, count), count) ",\"index\":" index "}\n\n"

static void test_cumulative_stream(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, STREAM));
    feed_stream(f);
    assert_int_equal(f->status, 200);
    assert_string_equal(
        api_fixture_body(f),
        EVENT("x", "120", "0", "null", "[-0.5,120,null]", "1", "0")
            EVENT("y", "121", "1", "null", "[-0.25,121,null]", "1", "1")
                EVENT("ya", "121,97", "1", LENGTH("2"), "[-0.25,121,null],[-2.0,97,null]", "2", "1")
                    EVENT("xb", "120,98", "0", LENGTH("2"), "[-0.5,120,null],[-1.0,98,null]", "2",
                          "0") "data: [DONE]\n\n");
    assert_int_equal(f->end_count, 1);
}

static void test_incremental_stream(void **state) {
    api_fixture *f = *state;
    f->settings.is_incremental = true;
    assert_true(api_fixture_ask(f, API_GENERATE, STREAM));
    feed_stream(f);
    assert_string_equal(api_fixture_body(f),
                        EVENT("x", "120", "0", "null", "[-0.5,120,null]", "1", "0")
                            EVENT("y", "121", "1", "null", "[-0.25,121,null]", "1", "1")
                                EVENT("a", "97", "1", LENGTH("2"), "[-2.0,97,null]", "2", "1")
                                    EVENT("b", "98", "0", LENGTH("2"), "[-1.0,98,null]", "2",
                                          "0") "data: [DONE]\n\n");
}

/* Without rows, and with as many samples as there may be. */
static void test_no_tokens(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"rid\":\"r\",\"input_ids\":[7,8],"
                                "\"sampling_params\":{\"n\":2,\"max_new_tokens\":0}}"));
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f), BEGIN SAMPLE("", "", "0", LENGTH("0"), "0")
                                                 NEXT SAMPLE("", "", "1", LENGTH("0"), "0") CLOSE);
}

static void test_retractions(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
    api_fixture_sample_text(f, 0, "x");
    api_fixture_sample_text(f, 1, "y");
    f->retractions = 3;
    api_fixture_sample_length(f, 1);
    f->retractions = 0;
    api_fixture_length(f);
    const char *second = strstr(api_fixture_body(f), "\"r_1\"");
    assert_non_null(second);
    assert_non_null(strstr(second, "\"num_retractions\":3,"));
    assert_null(strstr(second, "\"num_retractions\":0,"));
    assert_non_null(strstr(api_fixture_body(f), "\"num_retractions\":0,"));
}

/* ---- failures -------------------------------------------------------------------------------- */

/* One sample's failure is its own: the list says it, and the status is 200. */
static void test_one_of_two_fails(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
    api_fixture_sample_fail(f, 0, BT_ERR_REQUEST_OVERFLOW, 400, "");
    assert_int_equal(f->begin_count, 0);
    api_fixture_sample_text(f, 1, "y");
    api_fixture_length(f);
    assert_int_equal(f->status, 200);
    assert_string_equal(api_fixture_body(f), BEGIN SAMPLE("", "", "0", OVERFLOW, "0") NEXT SAMPLE(
                                                 "y", "121", "1", LENGTH("1"), "1") CLOSE);
    /* Streamed: the status line waits for the other sample's token. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," TWO "}"));
    api_fixture_sample_fail(f, 0, BT_ERR_REQUEST_OVERFLOW, 400, "");
    assert_int_equal(f->begin_count, 0);
    api_fixture_sample_text(f, 1, "y");
    assert_int_equal(f->status, 200);
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f),
                        INDEXED("", "", "0", OVERFLOW, "0") INDEXED("y", "121", "1", "null", "1")
                            INDEXED("y", "121", "1", LENGTH("1"), "1") DONE);
}

typedef struct failure_case {
    bt_status first, second;
    int first_given, second_given;
    bool has_tokens;
    int expected;
} failure_case;

/* All fail: the true status, of different ones the worst; but what some had tokens of is told
 * sample by sample. */
static void test_all_fail(void **state) {
    static const failure_case CASES[] = {
        {BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_OVERFLOW, 400, 400, false, 400},
        {BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_OVERFLOW, 400, 400, true, 400},
        {BT_ERR_REQUEST_OVERFLOW, BT_ERR_PEER_GONE, 400, 503, false, 503},
        {BT_ERR_REQUEST_CAPTURE, BT_ERR_PEER_GONE, 500, 503, false, 500},
        {BT_ERR_PEER_GONE, BT_ERR_REQUEST_OVERFLOW, 503, 400, true, 200},
        {BT_ERR_REQUEST_CANCELLED, BT_ERR_REQUEST_OVERFLOW, 503, 400, false, 200},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < 2 * BT_ARRAY_COUNT(CASES); i++) {
        const failure_case *c = &CASES[i / 2];
        if (i % 2 == 1 && c->has_tokens) continue; /* that stream has begun */
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    i % 2 == 0 ? "{" TWO "}" : "{\"stream\":true," TWO "}"));
        if (c->has_tokens) api_fixture_sample_text(f, 0, "x");
        api_fixture_sample_fail(f, 0, c->first, c->first_given, "first");
        api_fixture_sample_fail(f, 1, c->second, c->second_given, "second");
        api_fixture_fail(f, c->second, c->second_given, "second");
        assert_int_equal(f->status, c->expected);
        assert_int_equal(f->end_count, 1);
        assert_int_equal(f->cancel_count, 0);
        if (f->status == 200) assert_non_null(strstr(api_fixture_body(f), "\"abort\""));
    }
    /* Of equal ones the first. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
    api_fixture_sample_fail(f, 1, BT_ERR_PEER_TIMEOUT, 504, "second");
    api_fixture_sample_fail(f, 0, BT_ERR_PEER_GONE, 503, "first");
    api_fixture_length(f);
    assert_int_equal(f->status, 503);
    assert_non_null(strstr(api_fixture_body(f), "\"first\""));
}

/* The cluster fails, the router stops: every sample hears of it with the request. */
static void test_the_request_ends_alone(void **state) {
    const dispatch_end end = {.status = BT_ERR_REQUEST_NO_WORKER,
                              .http_status = 503,
                              .finish = PROTO_FINISH_ERROR,
                              .text = "the router is stopping"};
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
    api_call_on_end(&f->call, 0, &end);
    assert_int_equal(f->status, 503);
    assert_non_null(strstr(api_fixture_body(f), "the router is stopping"));
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," TWO "}"));
    api_fixture_sample_text(f, 0, "x");
    api_fixture_sample_length(f, 0);
    api_call_on_end(&f->call, 0, &end);
    assert_int_equal(f->status, 200);
    const char *last = api_fixture_last_event(f, 0);
    assert_non_null(strstr(last, "\"message\":\"the router is stopping\",\"status_code\":503,"));
    assert_non_null(strstr(last, "\"index\":1"));
    /* A request that went well says nothing of a sample whose end never came. */
    const dispatch_end good = {.http_status = 200, .finish = PROTO_FINISH_LENGTH, .rows_total = 2};
    assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
    api_fixture_sample_text(f, 0, "x");
    api_fixture_sample_text(f, 1, "y");
    api_fixture_sample_length(f, 0);
    api_call_on_end(&f->call, 0, &good);
    assert_int_equal(f->status, 200);
    assert_non_null(strstr(api_fixture_body(f), "the end of a sample was lost"));
}

/* A broken row ends its sample; the others are not disturbed. */
static void test_broken_row(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"return_logprob\":true," TWO "}"));
    api_fixture_sample_row(f, 0, 120, -0.5f);
    api_fixture_sample_row(f, 1, 121, NAN);
    assert_int_equal(f->cancelled_samples[1], 1);
    assert_int_equal(f->cancelled_samples[0], 0);
    assert_int_equal(f->cancel_count, 0);
    api_fixture_sample_row(f, 1, 121, -0.5f); /* was on its way */
    api_fixture_sample_fail(f, 1, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    api_fixture_length(f);
    assert_int_equal(f->status, 200);
    const char *second = strstr(api_fixture_body(f), "\"r_1\"");
    assert_non_null(strstr(second, "\"status_code\":500"));
    assert_non_null(strstr(second, "\"completion_tokens\":0"));
}

/* ---- stops ----------------------------------------------------------------------------------- */

#define STOPS "\"rid\":\"r\",\"input_ids\":[7,8],\"sampling_params\":{\"n\":3,\"stop\":[\"##\"]}"

static void test_stop_strings(void **state) {
    static const char *const BODIES[] = {"{" STOPS "}", "{\"stream\":true," STOPS "}"};
    api_fixture *f = *state;
    for (size_t i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        api_fixture_sample_text(f, 0, "a");
        api_fixture_sample_text(f, 1, "b##");
        assert_int_equal(f->cancelled_samples[1], 1);
        api_fixture_sample_text(f, 1, "LATE");
        api_fixture_sample_text(f, 2, "c");
        api_fixture_sample_length(f, 2);
        assert_int_equal(f->cancel_count, 0);
        assert_int_equal(f->end_count, 0);
        /* The last one that runs takes the request with it. */
        api_fixture_sample_text(f, 0, "##");
        assert_int_equal(f->cancel_count, 1);
        assert_int_equal(f->cancelled_samples[0], 0);
        assert_int_equal(f->end_count, 1);
        size_t bytes = f->body.used;
        api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
        assert_int_equal(f->body.used, bytes);
        assert_int_equal(f->cancelled_samples[1], 1);
        assert_non_null(strstr(api_fixture_body(f), "{\"text\":\"b\",\"output_ids\":[98,35,35],"
                                                    "\"meta_info\":{\"id\":\"r_1\","
                                                    "\"finish_reason\":{\"type\":\"stop\","
                                                    "\"matched\":\"##\"}"));
        assert_null(strstr(api_fixture_body(f), "LATE"));
    }
}

/* ---- credit and memory ----------------------------------------------------------------------- */

static void test_credit_of_each(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," TWO "}"));
    f->room = 100;
    api_fixture_sample_text(f, 0, "ab");
    api_fixture_sample_text(f, 1, "c");
    assert_int_equal(f->granted_bytes, 0);
    f->room = SIZE_MAX;
    api_call_on_room(&f->call);
    assert_int_equal(f->granted[0], 2 * ROW_RECORD_HEADER_BYTES);
    assert_int_equal(f->granted[1], 1 * ROW_RECORD_HEADER_BYTES);
    api_fixture_sample_length(f, 1);
    api_fixture_sample_text(f, 0, "d");
    assert_int_equal(f->granted[0], 3 * ROW_RECORD_HEADER_BYTES);
    assert_int_equal(f->granted[1], 1 * ROW_RECORD_HEADER_BYTES);
    api_fixture_length(f);
    /* Nothing is granted to a sample that has ended. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," TWO "}"));
    f->room = 0;
    api_fixture_sample_text(f, 0, "a");
    api_fixture_sample_text(f, 1, "b");
    api_fixture_sample_length(f, 1);
    f->room = SIZE_MAX;
    api_call_on_room(&f->call);
    assert_int_equal(f->granted[0], ROW_RECORD_HEADER_BYTES);
    assert_int_equal(f->granted[1], 0);
    api_fixture_length(f);
}

/* The samples take turns, whoever has most to say. */
static void test_slow_client_hears_of_all(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"stream\":true,\"input_ids\":[7],"
                                "\"sampling_params\":{\"n\":3,\"max_new_tokens\":100}}"));
    api_fixture_sample_text(f, 0, "a");
    api_fixture_sample_text(f, 1, "b");
    api_fixture_sample_text(f, 2, "c");
    unsigned seen[3] = {0};
    for (int i = 0; i < 60; i++) {
        f->room = 0;
        for (uint32_t k = 0; k < 3; k++) {
            if (k != 1 || i % 5 == 0) api_fixture_sample_text(f, k, "d");
        }
        do { /* one event, byte by byte */
            f->room = 1;
            api_call_on_room(&f->call);
        } while (!reply_writer_is_done(&f->call.writer));
    }
    f->room = SIZE_MAX;
    api_fixture_length(f);
    char *body = strdup(api_fixture_body(f));
    for (char *event = strtok(body, "\n"); event != NULL; event = strtok(NULL, "\n")) {
        const char *index = strstr(event, "\"index\":");
        if (index != NULL) seen[index[8] - '0']++;
    }
    free(body);
    for (int k = 0; k < 3; k++) {
        assert_true(seen[k] > 10);
    }
}

static void feed_wide(api_fixture *f, uint32_t samples, uint32_t rows) {
    int32_t ids[64];
    float logprobs[64];
    for (uint32_t i = 0; i < rows * samples; i++) {
        for (int32_t k = 0; k < 64; k++) {
            ids[k] = (int32_t)(1000 * i) + k;
            logprobs[k] = (float)-(int32_t)(i + (uint32_t)k) / 7.0f;
        }
        const token_row row = {.token = 97,
                               .mask_mode = ROW_MASK_SUPPORT,
                               .selected_logprob = -1,
                               .support_count = 64,
                               .support_ids = ids,
                               .support_logprobs = logprobs};
        api_fixture_feed(f, i % samples, &row);
    }
}

#define WIDE                                                                                       \
    "{\"input_ids\":[1],\"rid\":\"w\",\"return_sampling_mask\":true,\"sampling_logprobs_mode\":"   \
    "\"support\",\"sampling_params\":{\"n\":128,\"top_k\":64,\"max_new_tokens\":90}}"

/* As many samples as there may be, each with wide rows: packed until they are written, sample by
 * sample given back, the same from memory and from files. */
static void test_many_samples_are_written_in_portions(void **state) {
    api_fixture *f = *state;
    char *whole = NULL;
    f->limits.spill.bytes_max = 1 << 24;
    bt_text_fini(&f->body);
    bt_text_init(&f->body, 1 << 28);
    for (int round = 0; round < 2; round++) {
        f->limits.memory.bytes_max = round == 1 ? 100000 : 1 << 24;
        assert_true(api_fixture_ask(f, API_GENERATE, WIDE));
        f->room = 5000;
        feed_wide(f, 128, 9);
        const uint64_t packed = 128 * 9 * (ROW_RECORD_HEADER_BYTES + 64 * 8);
        assert_true(budget_used(&f->limits.memory) + budget_used(&f->limits.spill) >= packed);
        if (round == 1) assert_true(budget_used(&f->limits.memory) <= 100000);
        uint64_t before = budget_used(&f->limits.memory) + budget_used(&f->limits.spill);
        api_fixture_length(f);
        assert_int_equal(f->content_bytes, -1);
        unsigned portions = 0;
        uint64_t halfway = 0;
        for (; f->end_count == 0; portions++) {
            f->room = 5000;
            api_call_on_room(&f->call);
            assert_true(f->scratch.capacity <= 1 << 18);
            if (f->call.current == 64)
                halfway = budget_used(&f->limits.memory) + budget_used(&f->limits.spill);
        }
        assert_true(portions > 100);
        assert_true(halfway > 0 && halfway < before * 2 / 3);
        if (round == 0) {
            whole = strdup(api_fixture_body(f));
        } else {
            assert_string_equal(api_fixture_body(f), whole);
        }
    }
    json_error_t error;
    json_t *reply = json_loads(whole, 0, &error);
    assert_non_null(reply);
    assert_int_equal(json_array_size(reply), 128);
    json_t *meta = json_object_get(json_array_get(reply, 127), "meta_info");
    json_t *masks = json_object_get(meta, "output_token_sampling_mask");
    assert_int_equal(json_array_size(masks), 9);
    assert_int_equal(json_integer_value(json_array_get(json_array_get(masks, 8), 63)),
                     1000 * (128 * 9 - 1) + 63);
    json_decref(reply);
    free(whole);
}

/* Files of streams: each sample's window is given back between its events. */
static void test_spilled_stream(void **state) {
    api_fixture *f = *state;
    f->limits.memory.bytes_max = 0;
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{\"stream\":true,\"return_logprob\":true," TWO "}"));
    for (int i = 0; i < 20; i++) {
        api_fixture_sample_row(f, (uint32_t)i % 2, 97 + i, -(float)i);
        assert_null(f->call.samples[i % 2].store.window);
    }
    api_fixture_length(f);
    const char *last = api_fixture_last_event(f, 0);
    assert_non_null(strstr(last, "[-17.0,114,null],[-19.0,116,null]]"));
}

static void test_spill_limit_ends_all(void **state) {
    api_fixture *f = *state;
    f->limits.memory.bytes_max = 0;
    f->limits.spill.bytes_max = 100;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"return_logprob\":true," TWO "}"));
    for (uint32_t i = 0; i < 8 && f->end_count == 0; i++) {
        api_fixture_sample_row(f, i % 2, 97, -1);
    }
    assert_int_equal(f->status, 503);
    assert_int_equal(f->cancel_count, 1);
    assert_non_null(strstr(api_fixture_body(f), "--reply-spill-bytes=100"));
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_int_equal(f->end_count, 1);
}

static void test_client_leaves(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," STOPS "}"));
    api_fixture_sample_text(f, 0, "a##");
    assert_int_equal(f->cancelled_samples[0], 1);
    api_call_on_gone(&f->call);
    assert_int_equal(f->cancel_count, 1);
    size_t before = f->body.used;
    api_fixture_sample_text(f, 1, "b##");
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_int_equal(f->body.used, before);
    assert_int_equal(f->cancel_count, 1);
    assert_int_equal(f->cancelled_samples[1], 0);
}

/* ---- chat ------------------------------------------------------------------------------------ */

#define CHAT "\"rid\":\"c\",\"model\":\"m\",\"input_ids\":[7,8,9],\"n\":2"
#define HEAD(object)                                                                               \
    "{\"id\":\"c\",\"object\":\"" object "\",\"created\":1790000000,\"model\":\"m\",\"choices\":["
#define USAGE(completion, total)                                                                   \
    "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":" completion ",\"total_tokens\":" total  \
    ",\"prompt_tokens_details\":{\"cached_tokens\":0},\"reasoning_tokens\":0}"
#define CHOICE(index, text, reason, matched)                                                       \
    "{\"index\":" index ",\"message\":{\"role\":\"assistant\",\"content\":\"" text                 \
    "\",\"reasoning_content\":null,\"tool_calls\":null},\"logprobs\":null,\"finish_reason\":"      \
    "\"" reason "\",\"matched_stop\":" matched "}"

static void test_chat_choices(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT, "{" CHAT "}"));
    api_fixture_sample_text(f, 1, "two");
    api_fixture_sample_text(f, 0, "1");
    api_fixture_sample_row(f, 0, API_FIXTURE_EOS, 0);
    api_fixture_sample_stop(f, 0, API_FIXTURE_EOS);
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        HEAD("chat.completion")
            CHOICE("0", "1", "stop", "319") "," CHOICE("1", "two", "length", "null") "]," USAGE(
                "5", "8") ",\"metadata\":{\"weight_version\":\"default\"}}");
    /* One that fails is an abort among the others; when all fail the reply does. */
    assert_true(api_fixture_ask(f, API_CHAT, "{" CHAT "}"));
    api_fixture_sample_text(f, 0, "1");
    api_fixture_sample_fail(f, 1, BT_ERR_REQUEST_OVERFLOW, 400, "");
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        HEAD("chat.completion")
            CHOICE("0", "1", "length", "null") "," CHOICE("1", "", "abort", "null") "]," USAGE(
                "1", "4") ",\"metadata\":{\"weight_version\":\"default\"}}");
    assert_true(api_fixture_ask(f, API_CHAT, "{" CHAT "}"));
    api_fixture_fail(f, BT_ERR_REQUEST_OVERFLOW, 400, "");
    assert_int_equal(f->status, 400);
    /* meta_info names the sample. */
    assert_true(api_fixture_ask(f, API_CHAT, "{" CHAT ",\"return_meta_info\":true}"));
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"meta_info\":{\"id\":\"c_0\","));
    assert_non_null(strstr(api_fixture_body(f), "\"meta_info\":{\"id\":\"c_1\","));
}

#define CHUNK(index, delta, finish, matched, tail)                                                 \
    "data: " HEAD("chat.completion.chunk") "{\"index\":" index ",\"delta\":{" delta                \
                                           "},\"logprobs\":null,\"finish_reason\":" finish         \
                                           ",\"matched_stop\":" matched "}]" tail "}\n\n"
#define ROLE(index, tail)                                                                          \
    CHUNK(index, "\"role\":\"assistant\",\"content\":\"\"", "null", "null", tail)
#define DELTA(index, text, tail) CHUNK(index, "\"content\":\"" text "\"", "null", "null", tail)

static void test_chat_stream(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{" CHAT ",\"stream\":true,"
                                "\"stream_options\":{\"include_usage\":true}}"));
    api_fixture_sample_text(f, 1, "b");
    api_fixture_sample_text(f, 0, "a");
    api_fixture_sample_text(f, 1, "c");
    api_fixture_sample_row(f, 1, API_FIXTURE_EOS, 0);
    api_fixture_sample_stop(f, 1, API_FIXTURE_EOS);
    api_fixture_sample_text(f, 0, "d");
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        ROLE("1", "") DELTA("1", "b", "") ROLE("0", "") DELTA("0", "a", "") DELTA("1", "c", "")
            DELTA("0", "d", "") CHUNK("0", "", "\"length\"", "null", "")
                CHUNK("1", "", "\"stop\"", "319", "") "data: " HEAD(
                    "chat.completion.chunk") "]," USAGE("5", "8") "}\n\ndata: [DONE]\n\n");
}

static void test_chat_stream_counts_usage(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{" CHAT ",\"stream\":true,\"stream_options\":"
                                "{\"include_usage\":true,\"continuous_usage_stats\":true}}"));
    api_fixture_sample_text(f, 0, "a");
    api_fixture_sample_text(f, 1, "b");
    api_fixture_length(f);
    assert_string_equal(
        api_fixture_body(f),
        ROLE("0", "," USAGE("0", "3")) DELTA("0", "a", "," USAGE("1", "4"))
            ROLE("1", "," USAGE("1", "4")) DELTA("1", "b", "," USAGE("2", "5"))
                CHUNK("0", "", "\"length\"", "null", "," USAGE("2", "5"))
                    CHUNK("1", "", "\"length\"", "null", "," USAGE("2", "5")) "data: " HEAD(
                        "chat.completion.chunk") "]," USAGE("2", "5") "}\n\ndata: [DONE]\n\n");
}

static void test_chat_stream_failures(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT, "{" CHAT ",\"stream\":true}"));
    api_fixture_sample_fail(f, 0, BT_ERR_REQUEST_OVERFLOW, 400, "");
    api_fixture_sample_text(f, 1, "b");
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f),
                        ROLE("0", "") ROLE("1", "") DELTA("1", "b", "")
                            CHUNK("0", "", "\"abort\"", "null", "")
                                CHUNK("1", "", "\"length\"", "null", "") "data: [DONE]\n\n");
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{" CHAT ",\"stream\":true,"
                                "\"stream_options\":{\"include_usage\":true}}"));
    api_fixture_sample_text(f, 1, "b");
    api_fixture_sample_fail(f, 0, BT_ERR_REQUEST_OVERFLOW, 400, "");
    api_fixture_fail(f, BT_ERR_PEER_GONE, 503, "decode is gone");
    assert_string_equal(api_fixture_body(f),
                        ROLE("1", "") DELTA("1", "b", "") ROLE(
                            "0", "") "data: {\"error\":{\"message\":\"decode is gone\",\"type\":"
                                     "\"ServiceUnavailableError\",\"param\":null,\"code\":503}}\n\n"
                                     "data: [DONE]\n\n");
}

#ifdef BT_FAULT
static void feed_all(api_fixture *f) {
    for (uint32_t i = 0; i < 80; i++) {
        api_fixture_sample_row(f, i % 2, 66, -1);
    }
}

static void test_out_of_memory(void **state) {
    api_fixture *f = *state;
    api_fixture_run_out_of_memory(
        f, API_GENERATE,
        "{\"input_ids\":[1,2],\"return_logprob\":true,\"token_ids_logprob\":[],"
        "\"sampling_params\":{\"n\":2,\"stop\":[\"x\"],\"logit_bias\":{\"5\":1}}}",
        feed_all);
    api_fixture_run_out_of_memory(f, API_GENERATE,
                                  "{\"stream\":true,\"return_logprob\":true," TWO "}", feed_all);
    api_fixture_run_out_of_memory(f, API_CHAT, "{" CHAT ",\"stream\":true,\"logprobs\":true}",
                                  feed_all);
}
#endif

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_list),
        CASE(test_cumulative_stream),
        CASE(test_incremental_stream),
        CASE(test_no_tokens),
        CASE(test_retractions),
        CASE(test_one_of_two_fails),
        CASE(test_all_fail),
        CASE(test_the_request_ends_alone),
        CASE(test_broken_row),
        CASE(test_stop_strings),
        CASE(test_credit_of_each),
        CASE(test_slow_client_hears_of_all),
        CASE(test_many_samples_are_written_in_portions),
        CASE(test_spilled_stream),
        CASE(test_spill_limit_ends_all),
        CASE(test_client_leaves),
        CASE(test_chat_choices),
        CASE(test_chat_stream),
        CASE(test_chat_stream_counts_usage),
        CASE(test_chat_stream_failures),
#ifdef BT_FAULT
        CASE(test_out_of_memory),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
