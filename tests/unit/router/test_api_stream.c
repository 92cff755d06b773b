/* What happens to a reply on its way: stop strings at every cut, failures early and late, slow and
 * leaving clients, rows that do not fit into memory. */
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

static json_t *parse(const char *text) {
    json_error_t error;
    json_t *value = json_loads(text, 0, &error);
    if (value == NULL) fail_msg("%s: %s", error.text, text);
    return value;
}

static const char *text_of(json_t *reply) {
    return json_string_value(json_object_get(reply, "text"));
}

static json_t *meta_of(json_t *reply) {
    return json_object_get(reply, "meta_info");
}

/* ---- stop strings ---------------------------------------------------------------------------- */

typedef struct stop_case {
    const char *stop;     /* JSON */
    const char *given;    /* what the model would say, byte by byte */
    const char *text;     /* what the client sees */
    const char *kept;     /* with no_stop_trim */
    const char *matched;  /* NULL: ends by length */
    unsigned token_count; /* tokens of the reply */
} stop_case;

static const stop_case STOPS[] = {
    {"\"END\"", "a ENDb", "a ", "a END", "END", 5},
    {"[\"xyz\",\"END\"]", "a EN END b", "a EN ", "a EN END", "END", 8},
    {"[\"END\",\"N\"]", "aENDb", "aE", "aEN", "N", 3},
    {"[\"\"]", "ab", "ab", "ab", NULL, 2},
    {"\"END\"", "a EN", "a EN", "a EN", NULL, 4},
    {"\"\xe2\x82\xac\"",
     "a\xe2\x82\xac"
     "b",
     "a", "a\xe2\x82\xac", "\xe2\x82\xac", 4},
    {"\"\\n\\n\"", "a\nb\n\nc", "a\nb", "a\nb\n\n", "\n\n", 5},
    {"\"aab\"", "aaab", "a", "aaab", "aab", 4},
};

static json_t *run_stop(api_fixture *f, const stop_case *c, bool is_stream, bool keeps) {
    char body[512];
    snprintf(body, sizeof(body),
             "{\"input_ids\":[1],\"stream\":%s,\"sampling_params\":{\"stop\":%s,"
             "\"no_stop_trim\":%s}}",
             is_stream ? "true" : "false", c->stop, keeps ? "true" : "false");
    assert_true(api_fixture_ask(f, API_GENERATE, body));
    api_fixture_text(f, c->given);
    assert_int_equal(f->cancel_count, c->matched != NULL);
    if (c->matched != NULL) {
        api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    } else {
        api_fixture_length(f);
    }
    assert_int_equal(f->status, 200);
    assert_int_equal(f->end_count, 1);
    return parse(is_stream ? api_fixture_last_event(f, 0) : api_fixture_body(f));
}

static void test_stop_strings(void **state) {
    api_fixture *f = *state;
    for (size_t i = 0; i < sizeof(STOPS) / sizeof(STOPS[0]) * 4; i++) {
        const stop_case *c = &STOPS[i / 4];
        bool is_stream = i % 2 == 0;
        bool keeps = i / 2 % 2 == 0;
        json_t *reply = run_stop(f, c, is_stream, keeps);
        json_t *reason = json_object_get(meta_of(reply), "finish_reason");
        assert_string_equal(text_of(reply), keeps ? c->kept : c->text);
        assert_int_equal(json_array_size(json_object_get(reply, "output_ids")), c->token_count);
        if (c->matched != NULL) {
            assert_string_equal(json_string_value(json_object_get(reason, "type")), "stop");
            assert_string_equal(json_string_value(json_object_get(reason, "matched")), c->matched);
        } else {
            assert_string_equal(json_string_value(json_object_get(reason, "type")), "length");
        }
        json_decref(reply);
    }
}

/* No event of a stream ever says text that a later one takes back, and tokens wait with their text
 * while it could become a stop string. */
static void test_text_is_held_back(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"stream\":true,\"return_logprob\":true,"
                                "\"sampling_params\":{\"stop\":\"END\"}}"));
    api_fixture_text(f, "a");
    size_t before = f->body.used;
    api_fixture_text(f, "EN");
    assert_int_equal(f->body.used, before);
    /* Credit is not held back with it: more rows must come to decide. */
    assert_int_equal(f->granted_bytes, 3 * ROW_RECORD_HEADER_BYTES);
    api_fixture_text(f, "X");
    json_t *reply = parse(api_fixture_last_event(f, 0));
    assert_string_equal(text_of(reply), "aENX");
    assert_int_equal(json_array_size(json_object_get(meta_of(reply), "output_token_logprobs")), 4);
    json_decref(reply);
    api_fixture_length(f);
}

/* A special token that is skipped can still be a stop string. */
static void test_special_token_as_stop_string(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"sampling_params\":{\"ignore_eos\":true,"
                                "\"stop\":[\"<|im_end|>\"]}}"));
    api_fixture_text(f, "a");
    api_fixture_row(f, API_FIXTURE_EOS, 0);
    assert_int_equal(f->cancel_count, 1);
    json_t *reply = parse(api_fixture_body(f));
    assert_string_equal(text_of(reply), "a");
    assert_int_equal(json_array_size(json_object_get(reply, "output_ids")), 2);
    json_decref(reply);
    api_fixture_abort(f);
    /* As the last one allowed it ends by length, like any stop. */
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"sampling_params\":{\"ignore_eos\":true,"
                                "\"max_new_tokens\":2,\"stop\":[\"<|im_end|>\"]}}"));
    api_fixture_text(f, "a");
    api_fixture_row(f, API_FIXTURE_EOS, 0);
    assert_int_equal(f->cancel_count, 0);
    api_fixture_length(f);
    assert_non_null(
        strstr(api_fixture_body(f), "\"finish_reason\":{\"type\":\"length\",\"length\":2}"));
}

/* What another stop string held back then is text all the same. */
static void test_special_token_behind_held_text(void **state) {
    api_fixture *f = *state;
    for (int is_stream = 0; is_stream <= 1; is_stream++) {
        assert_true(api_fixture_ask(
            f, API_GENERATE,
            is_stream
                ? "{\"input_ids\":[1],\"stream\":true,\"sampling_params\":{\"ignore_eos\":true,"
                  "\"stop\":[\"<|im_end|>\",\"END\"]}}"
                : "{\"input_ids\":[1],\"sampling_params\":{\"ignore_eos\":true,"
                  "\"stop\":[\"<|im_end|>\",\"END\"]}}"));
        api_fixture_text(f, "aEN");
        api_fixture_row(f, API_FIXTURE_EOS, 0);
        assert_int_equal(f->end_count, 1);
        json_t *reply = parse(is_stream ? api_fixture_last_event(f, 0) : api_fixture_body(f));
        assert_string_equal(text_of(reply), "aEN");
        assert_int_equal(json_array_size(json_object_get(reply, "output_ids")), 4);
        json_decref(reply);
        api_fixture_abort(f);
    }
}

/* Rows behind a stop string, in the same batch or later, are dropped with their masks. */
static void test_rows_behind_a_stop_are_dropped(void **state) {
    static const int32_t IDS[] = {66, 67};
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"return_sampling_mask\":true,\"stream\":true,"
                                "\"sampling_params\":{\"stop\":\"B\",\"top_k\":2}}"));
    uint64_t records[64];
    uint8_t *at = (uint8_t *)records;
    for (int i = 0; i < 3; i++) {
        const token_row row = {.token = 65 + i,
                               .mask_mode = ROW_MASK_SELECTED,
                               .selected_logprob = -1,
                               .support_count = 2,
                               .support_ids = IDS};
        row_record_encode(&row, at);
        at += row_record_bytes((row_widths){.mask_mode = ROW_MASK_SELECTED, .support_count = 2});
    }
    const dispatch_rows rows = {.records = (uint8_t *)records,
                                .bytes = (size_t)(at - (uint8_t *)records)};
    api_call_on_rows(&f->call, 0, &rows);
    assert_int_equal(f->cancel_count, 1);
    assert_int_equal(f->end_count, 1);
    json_t *reply = parse(api_fixture_last_event(f, 0));
    assert_int_equal(json_array_size(json_object_get(reply, "output_ids")), 2);
    assert_int_equal(json_array_size(json_object_get(meta_of(reply), "output_token_sampling_mask")),
                     2);
    json_decref(reply);
    api_fixture_row(f, 70, 0);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_int_equal(f->cancel_count, 1);
}

/* ---- failures -------------------------------------------------------------------------------- */

#define OVERFLOW_TEXT                                                                              \
    "Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of cutoff ties. "    \
    "Lower top_k to leave more headroom or increase the server limit."

/* The status line waits for the first token, however often the output says that it has room. */
static void test_room_before_the_first_row(void **state) {
    static const api_kind kinds[] = {API_GENERATE, API_CHAT};
    static const char *const bodies[] = {
        "{\"input_ids\":[1],\"stream\":true}",
        "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"stream\":true}"};
    api_fixture *f = *state;
    for (int i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, kinds[i], bodies[i]));
        api_call_on_room(&f->call);
        assert_int_equal(f->begin_count, 0);
        api_fixture_fail(f, BT_ERR_REQUEST_OVERFLOW, 400, "");
        assert_int_equal(f->status, 400);
        assert_string_equal(f->content_type, "application/json");
    }
}

/* What only prefill knows is in every event from the first on, and in a reply that a stop string
 * ends before the workers do. */
static void test_cached_tokens(void **state) {
    api_fixture *f = *state;
    f->cached_tokens = 32;
    for (int is_stream = 0; is_stream < 2; is_stream++) {
        char body[128];
        snprintf(body, sizeof(body),
                 "{\"input_ids\":[1],\"stream\":%s,\"sampling_params\":{\"stop\":\"c\"}}",
                 is_stream ? "true" : "false");
        for (int stops = 0; stops < 2; stops++) {
            assert_true(api_fixture_ask(f, API_GENERATE, body));
            api_fixture_text(f, stops ? "abc" : "ab");
            if (!stops) api_fixture_length(f);
            for (unsigned back = 0; back < (is_stream ? 3u : 1u); back++) {
                json_t *reply =
                    parse(is_stream ? api_fixture_last_event(f, back) : api_fixture_body(f));
                json_t *cached = json_object_get(meta_of(reply), "cached_tokens");
                assert_int_equal(json_integer_value(cached), 32);
                json_decref(reply);
            }
            if (stops) api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
        }
    }
}

/* Before any row, a stream's failure is an HTTP status too. */
static void test_failures_before_the_first_row(void **state) {
    static const struct {
        bt_status status;
        int given, http_status;
        const char *text, *body;
    } CASES[] = {
        {BT_ERR_REQUEST_OVERFLOW, 400, 400, "x", "{\"error\":{\"message\":\"" OVERFLOW_TEXT "\"}}"},
        {BT_ERR_REQUEST_CAPTURE, 500, 500, "",
         "\"object\":\"error\",\"message\":\"The sampling backend selected a token outside its "
         "captured sampling support.\",\"type\":\"InternalServerError\",\"param\":null,\"code\":"
         "500}"},
        {BT_ERR_REQUEST_CAPTURE, 500, 500,
         "The sampling backend did not return captured sampling support.",
         "The sampling backend did not return captured sampling support."},
        {BT_ERR_REQUEST_FULL, 503, 503, "the queue is full", "the queue is full"},
        {BT_ERR_REQUEST_TOO_LARGE, 400, 400, "it never fits",
         "{\"error\":{\"message\":\"it never fits\"}}"},
        {BT_ERR_REQUEST_CORRUPT, 500, 500, "", "\"message\":\"corrupt\""},
        {BT_ERR_REQUEST_CORRUPT, 200, 500, "no status", "\"message\":\"no status\""},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]) * 2; i++) {
        bool is_stream = i % 2 == 0;
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    is_stream ? "{\"input_ids\":[1],\"stream\":true}"
                                              : "{\"input_ids\":[1]}"));
        api_fixture_fail(f, CASES[i / 2].status, CASES[i / 2].given, CASES[i / 2].text);
        assert_int_equal(f->status, CASES[i / 2].http_status);
        assert_string_equal(f->content_type, "application/json");
        assert_int_equal(f->end_count, 1);
        if (strstr(api_fixture_body(f), CASES[i / 2].body) == NULL)
            fail_msg("'%s' is not in '%s'", CASES[i / 2].body, api_fixture_body(f));
        if (f->status == 503) assert_string_equal(f->fields, "Retry-After: 1\r\n");
        if (f->status == 500) assert_string_equal(f->fields, "x-should-retry: false\r\n");
    }
}

static void test_failures_after_some_rows(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1],\"stream\":true}"));
    api_fixture_text(f, "ab");
    api_fixture_fail(f, BT_ERR_REQUEST_OVERFLOW, 400, "");
    assert_int_equal(f->status, 200);
    json_t *reply = parse(api_fixture_last_event(f, 0));
    json_t *expected = parse("{\"type\":\"abort\",\"message\":\"" OVERFLOW_TEXT
                             "\",\"status_code\":400,\"err_type\":\"BadRequestError\"}");
    assert_true(json_equal(json_object_get(meta_of(reply), "finish_reason"), expected));
    assert_string_equal(text_of(reply), "ab");
    json_decref(expected);
    json_decref(reply);
    /* Not streamed: the status says it, and all tokens are lost. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]}"));
    api_fixture_text(f, "ab");
    api_fixture_fail(f, BT_ERR_PEER_GONE, 503, "decode worker 3 is gone");
    assert_int_equal(f->status, 503);
    assert_non_null(strstr(api_fixture_body(f), "decode worker 3 is gone"));
}

/* Aborted by its owner: 200 and what there is. */
static void test_aborts_keep_their_tokens(void **state) {
    api_fixture *f = *state;
    for (int is_stream = 0; is_stream <= 1; is_stream++) {
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    is_stream ? "{\"input_ids\":[1],\"stream\":true}"
                                              : "{\"input_ids\":[1]}"));
        api_fixture_text(f, "ab");
        api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
        assert_int_equal(f->status, 200);
        json_t *reply = parse(is_stream ? api_fixture_last_event(f, 0) : api_fixture_body(f));
        json_t *expected = parse("{\"type\":\"abort\",\"message\":\"Aborted\",\"status_code\":null,"
                                 "\"err_type\":null}");
        assert_true(json_equal(json_object_get(meta_of(reply), "finish_reason"), expected));
        assert_string_equal(text_of(reply), "ab");
        json_decref(expected);
        json_decref(reply);
    }
}

static void test_broken_rows(void **state) {
    static const char *const BODIES[] = {"{\"input_ids\":[1],\"return_logprob\":true}",
                                         "{\"input_ids\":[1],\"stream\":true}"};
    api_fixture *f = *state;
    /* A log-probability that is no number. */
    assert_true(api_fixture_ask(f, API_GENERATE, BODIES[0]));
    api_fixture_row(f, 65, NAN);
    assert_int_equal(f->status, 500);
    assert_int_equal(f->cancel_count, 1);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "");
    /* Half a record, and one wider than the cap. */
    assert_true(api_fixture_ask(f, API_GENERATE, BODIES[1]));
    uint64_t record[64] = {0};
    const token_row row = {.token = 65};
    row_record_encode(&row, (uint8_t *)record);
    const dispatch_rows half = {.records = (uint8_t *)record, .bytes = ROW_RECORD_HEADER_BYTES - 4};
    api_call_on_rows(&f->call, 0, &half);
    assert_int_equal(f->status, 500);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "");
    static int32_t ids[65];
    const token_row masked = {.token = 65,
                              .mask_mode = ROW_MASK_SELECTED,
                              .support_size = 2,
                              .support_count = 2,
                              .support_ids = ids};
    row_record_encode(&masked, (uint8_t *)record);
    const dispatch_rows cut = {.records = (uint8_t *)record, .bytes = ROW_RECORD_HEADER_BYTES + 4};
    assert_true(api_fixture_ask(f, API_GENERATE, BODIES[1]));
    api_call_on_rows(&f->call, 0, &cut);
    assert_int_equal(f->status, 500);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "");
    assert_true(api_fixture_ask(f, API_GENERATE, BODIES[1]));
    api_fixture_mask_row(f, 65, 0, 0, ids, NULL, 65);
    assert_int_equal(f->status, 500);
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "");
    /* Rows that were lost on the way. */
    assert_true(api_fixture_ask(f, API_GENERATE, BODIES[0]));
    api_fixture_row(f, 65, -1);
    const dispatch_end end = {.http_status = 200, .finish = PROTO_FINISH_LENGTH, .rows_total = 2};
    api_call_on_end(&f->call, 0, &end);
    assert_int_equal(f->status, 500);
    assert_non_null(strstr(api_fixture_body(f), "rows of the reply were lost"));
}

/* The last event has the text of all its tokens, also what was held back. */
static void test_a_broken_row_behind_held_text(void **state) {
    api_fixture *f = *state;
    for (int is_incremental = 0; is_incremental <= 1; is_incremental++) {
        f->settings.is_incremental = is_incremental == 1;
        assert_true(api_fixture_ask(f, API_GENERATE,
                                    "{\"input_ids\":[1],\"stream\":true,\"return_logprob\":true,"
                                    "\"sampling_params\":{\"stop\":\"END\"}}"));
        api_fixture_text(f, "aEN");
        api_fixture_row(f, 'X', NAN);
        assert_int_equal(f->end_count, 1);
        json_t *reply = parse(api_fixture_last_event(f, 0));
        assert_string_equal(text_of(reply), is_incremental ? "EN" : "aEN");
        assert_int_equal(json_array_size(json_object_get(reply, "output_ids")),
                         is_incremental ? 2 : 3);
        json_decref(reply);
        api_fixture_abort(f);
    }
}

/* ---- slow and leaving clients ---------------------------------------------------------------- */

/* The client reads nothing: no credit, no further events. Once it reads, one event has it all. */
static void test_slow_client_of_a_cumulative_stream(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1],\"stream\":true}"));
    f->room = 100;
    api_fixture_text(f, "a");
    assert_int_equal(f->granted_bytes, 0);
    size_t before = f->body.used;
    for (int i = 0; i < 50; i++) {
        api_fixture_text(f, "b");
    }
    assert_int_equal(f->granted_bytes, 0);
    assert_int_equal(f->body.used, before);
    f->room = SIZE_MAX;
    api_call_on_room(&f->call);
    assert_int_equal(f->granted_bytes, 51 * ROW_RECORD_HEADER_BYTES);
    json_t *reply = parse(api_fixture_last_event(f, 0));
    assert_int_equal(strlen(text_of(reply)), 51);
    json_decref(reply);
    json_t *first = parse(api_fixture_last_event(f, 1));
    assert_string_equal(text_of(first), "a");
    json_decref(first);
    api_fixture_length(f);
}

/* Deltas that wait are merged; together they are the whole, and their rows are given up. */
static void test_slow_client_of_an_incremental_stream(void **state) {
    static int32_t ids[60];
    api_fixture *f = *state;
    f->settings.is_incremental = true;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1],\"stream\":true,\"return_sampling_mask\":true,"
                                "\"sampling_params\":{\"top_k\":60,\"max_new_tokens\":150}}"));
    uint64_t most = 0;
    for (int i = 0; i < 120; i++) {
        for (int32_t k = 0; k < 60; k++) {
            ids[k] = i + k;
        }
        f->room = i % 10 == 9 ? SIZE_MAX : 0;
        api_fixture_mask_row(f, 97 + i % 26, 0, -1, ids, NULL, 60);
        if (budget_used(&f->limits.memory) > most) most = budget_used(&f->limits.memory);
    }
    f->room = SIZE_MAX;
    api_fixture_length(f);
    assert_true(most < 24 * 1024);
    assert_int_equal(
        f->granted_bytes,
        120 * row_record_bytes((row_widths){.mask_mode = ROW_MASK_SELECTED, .support_count = 60}));
    const char *at = api_fixture_body(f);
    char *body = strdup(at);
    unsigned rows = 0;
    for (char *event = strtok(body, "\n"); event != NULL; event = strtok(NULL, "\n")) {
        if (strcmp(event, "data: [DONE]") == 0) continue;
        json_t *reply = parse(event + 6);
        json_t *masks = json_object_get(meta_of(reply), "output_token_sampling_mask");
        json_t *tokens = json_object_get(reply, "output_ids");
        assert_int_equal(json_array_size(masks), json_array_size(tokens));
        for (size_t i = 0; i < json_array_size(masks); i++, rows++) {
            json_t *mask = json_array_get(masks, i);
            assert_int_equal(json_array_size(mask), 60);
            assert_int_equal(json_integer_value(json_array_get(mask, 0)), rows);
            assert_int_equal(json_integer_value(json_array_get(tokens, i)), 97 + rows % 26);
        }
        json_t *length = json_object_get(meta_of(reply), "output_token_sampling_mask_length");
        assert_int_equal(json_integer_value(length), rows);
        json_decref(reply);
    }
    assert_int_equal(rows, 120);
    free(body);
}

static void test_clients_that_leave(void **state) {
    static const char *const BODIES[] = {"{\"input_ids\":[1],\"stream\":true}",
                                         "{\"input_ids\":[1]}"};
    api_fixture *f = *state;
    for (int i = 0; i < 4; i++) {
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i % 2]));
        if (i / 2 == 1) api_fixture_text(f, "a");
        size_t before = f->body.used;
        api_call_on_gone(&f->call);
        assert_int_equal(f->cancel_count, 1);
        api_fixture_text(f, "b");
        api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
        assert_int_equal(f->body.used, before);
        assert_int_equal(f->cancel_count, 1);
        assert_int_equal(f->end_count, 0);
    }
    /* In the middle of writing a reply whose request has ended there is nothing to cancel. */
    assert_true(api_fixture_ask(f, API_GENERATE, BODIES[1]));
    f->room = 0;
    api_fixture_text(f, "a");
    api_fixture_length(f);
    api_call_on_gone(&f->call);
    assert_int_equal(f->cancel_count, 0);
}

/* ---- large replies --------------------------------------------------------------------------- */

static void feed_wide_rows(api_fixture *f, int count) {
    int32_t ids[64];
    float logprobs[64];
    for (int i = 0; i < count; i++) {
        for (int32_t k = 0; k < 64; k++) {
            ids[k] = 1000 * i + k;
            logprobs[k] = (float)-(i + k) / 7.0f;
        }
        api_fixture_mask_row(f, 97, 0, -1, ids, logprobs, 64);
    }
}

#define WIDE                                                                                       \
    "{\"input_ids\":[1],\"rid\":\"w\",\"return_sampling_mask\":true,\"sampling_logprobs_mode\":"   \
    "\"support\",\"sampling_params\":{\"top_k\":64,\"max_new_tokens\":190}}"

/* A reply above the limit of a Content-Length goes out in portions as the client reads; it says the
 * same, from memory or from the file. */
static void test_large_replies_are_written_in_portions(void **state) {
    api_fixture *f = *state;
    char *whole = NULL;
    for (int round = 0; round < 3; round++) {
        f->limits.memory.bytes_max = round == 2 ? 8000 : 1 << 20;
        assert_true(api_fixture_ask(f, API_GENERATE, WIDE));
        f->room = round == 0 ? SIZE_MAX : 5000;
        feed_wide_rows(f, 190);
        if (round == 2) {
            assert_true(budget_used(&f->limits.spill) > 90000);
            assert_true(budget_used(&f->limits.memory) <= 8000);
        }
        api_fixture_length(f);
        assert_int_equal(f->content_bytes, -1);
        unsigned portions = 0;
        for (; f->end_count == 0; portions++) {
            f->room = 5000;
            api_call_on_room(&f->call);
        }
        if (round > 0) assert_true(portions > 10);
        if (round == 0) {
            whole = strdup(api_fixture_body(f));
        } else {
            assert_string_equal(api_fixture_body(f), whole);
        }
    }
    json_t *reply = parse(whole);
    json_t *masks = json_object_get(meta_of(reply), "output_token_sampling_mask");
    json_t *last = json_array_get(masks, 189);
    assert_int_equal(json_array_size(masks), 190);
    assert_int_equal(json_integer_value(json_array_get(last, 63)), 189063);
    json_decref(reply);
    free(whole);
}

static void test_spill_limit_is_a_503_by_name(void **state) {
    api_fixture *f = *state;
    f->limits.memory.bytes_max = 2000;
    f->limits.spill.bytes_max = 20000;
    assert_true(api_fixture_ask(f, API_GENERATE, WIDE));
    feed_wide_rows(f, 100);
    assert_int_equal(f->status, 503);
    assert_int_equal(f->cancel_count, 1);
    assert_non_null(strstr(api_fixture_body(f), "--reply-spill-bytes=20000"));
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_int_equal(f->end_count, 1);
}

static void test_no_folder_for_the_file(void **state) {
    api_fixture *f = *state;
    f->limits.memory.bytes_max = 0;
    f->limits.spill_path = "/no/such/folder";
    assert_true(api_fixture_ask(f, API_GENERATE, WIDE));
    feed_wide_rows(f, 1);
    assert_int_equal(f->status, 500);
}

#ifdef BT_FAULT
/* Each allocation of a request fails once: the answer is whole, an honest error, or cut off, and
 * nothing is lost (tear_down looks at the budgets, the sanitizer at the rest). */
static void feed_all(api_fixture *f) {
    static const int32_t IDS[] = {66, 67};
    for (int i = 0; i < 40; i++) {
        api_fixture_mask_row(f, 66, -1, -1, IDS, NULL, 2);
    }
}

static void test_out_of_memory(void **state) {
    api_fixture *f = *state;
    api_fixture_run_out_of_memory(
        f, API_GENERATE,
        "{\"text\":\"a b c\",\"return_sampling_mask\":true,\"return_logprob\":true,"
        "\"sampling_params\":{\"top_k\":2,\"stop\":[\"x\",\"yz\"]}}",
        feed_all);
    api_fixture_run_out_of_memory(
        f, API_GENERATE,
        "{\"input_ids\":[1,2,3],\"return_sampling_mask\":true,\"stream\":true,"
        "\"sampling_params\":{\"top_k\":2}}",
        feed_all);
    api_fixture_run_out_of_memory(
        f, API_CHAT,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"logprobs\":true,"
        "\"return_sampling_mask\":true,\"top_k\":2,\"return_meta_info\":true}",
        feed_all);
}
#endif

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_stop_strings),
        CASE(test_text_is_held_back),
        CASE(test_special_token_as_stop_string),
        CASE(test_special_token_behind_held_text),
        CASE(test_rows_behind_a_stop_are_dropped),
        CASE(test_room_before_the_first_row),
        CASE(test_cached_tokens),
        CASE(test_failures_before_the_first_row),
        CASE(test_failures_after_some_rows),
        CASE(test_aborts_keep_their_tokens),
        CASE(test_broken_rows),
        CASE(test_a_broken_row_behind_held_text),
        CASE(test_slow_client_of_a_cumulative_stream),
        CASE(test_slow_client_of_an_incremental_stream),
        CASE(test_clients_that_leave),
        CASE(test_large_replies_are_written_in_portions),
        CASE(test_spill_limit_is_a_503_by_name),
        CASE(test_no_folder_for_the_file),
#ifdef BT_FAULT
        CASE(test_out_of_memory),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
