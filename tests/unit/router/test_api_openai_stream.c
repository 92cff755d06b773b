/* Streams of chats and completions that carry more than text: rows, ids, numbers. Whatever the
 * interval, the room in the output, the number of samples and the text of a token, each row is told
 * once, and all events together say what the whole reply says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "tests/unit/router/api_fixture.h"

enum { TOKENS_MAX = 32 };

#define EURO "\xe2\x82\xac"
/* A character over three tokens, special tokens, the beginnings of a stop string, the whole one. */
static const int32_t SCRIPT[] = {'a', 0xe2, 0x82, 0xac, 317, 's', 't',
                                 'b', 's',  318,  't',  'o', 'p'};

typedef struct stream_case {
    api_kind kind;
    const char *fields;    /* behind the prompt's */
    uint32_t samples;      /* of each prompt */
    bool is_list;          /* of two prompts */
    const int32_t *tokens; /* of every sample, [count], shifted by one token from one to the next */
    uint32_t count;
    bool is_stop; /* ends by EOS, else by length */
} stream_case;

static const char *prompt_of(api_kind kind, bool is_list) {
    if (is_list) return "\"prompt\":[[72,105],[33]]";
    return kind == API_CHAT ? "\"input_ids\":[72,105]" : "\"prompt\":[72,105]";
}

/* One row, told apart by its token and place. */
static void feed(api_fixture *f, uint32_t sample, int32_t token, uint32_t place) {
    const proto_generation *g = &f->call.request->generation;
    const int32_t ids[] = {token, (int32_t)place + 1000, (int32_t)sample + 2000};
    const float logprobs[] = {-0.5f - (float)place, -1.5f, -2.5f - (float)sample};
    const row_top top[] = {{token, -0.25f}, {(int32_t)('A' + place), -0.75f}};
    const bool is_support = g->mask_mode == ROW_MASK_SUPPORT;
    const token_row row = {.token = token,
                           .mask_mode = g->mask_mode,
                           .has_logprob = g->wants_logprob,
                           .token_logprob = g->wants_logprob ? -0.25f : 0,
                           .selected_logprob = g->mask_mode != ROW_MASK_OFF ? logprobs[0] : 0,
                           .support_count = g->mask_mode != ROW_MASK_OFF ? 1 + place % 3 : 0,
                           .support_ids = ids,
                           .support_logprobs = is_support ? logprobs : NULL,
                           .top_count = g->top_logprobs < 2 ? g->top_logprobs : 2,
                           .top = top};
    api_fixture_feed(f, sample, &row);
}

/* Of the prompt [72,105], scored for its echo. */
static void give_prompt(api_fixture *f) {
    const proto_generation *g = &f->call.request->generation;
    const int32_t ids[] = {'i', 'j'};
    float entry[1 + 2 * 2] = {-1.5f};
    if (!g->wants_prompt_logprobs) return;
    for (uint32_t i = 0; i < g->top_logprobs; i++) {
        memcpy(&entry[1 + 2 * i], &ids[i], sizeof(ids[i]));
        entry[2 + 2 * i] = -0.5f;
    }
    api_fixture_item_prompt(f, 0, 1, entry, 1);
}

/* Small numbers from a seed. */
static uint32_t next_random(uint32_t *state, uint32_t below) {
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % below;
}

enum { ROOM_RANDOM = 1000 /* another one each time, below this */ };

static void give_room(api_fixture *f, size_t room, uint32_t *random) {
    f->room = room == ROOM_RANDOM ? next_random(random, ROOM_RANDOM) : room;
    if (room != SIZE_MAX) api_call_on_room(&f->call);
}

static void run(api_fixture *f, const stream_case *c, bool streams, size_t room) {
    uint32_t random = c->count;
    char body[1024];
    snprintf(body, sizeof(body), "{%s,\"rid\":\"r\",\"stream\":%s,\"n\":%u,\"max_tokens\":%u%s}",
             prompt_of(c->kind, c->is_list), streams ? "true" : "false", c->samples, c->count,
             c->fields);
    if (!api_fixture_ask(f, c->kind, body)) fail_msg("%s\n%s", body, api_fixture_body(f));
    give_room(f, room, &random);
    for (uint32_t i = 0; i < c->count; i++) {
        for (uint32_t sample = 0; sample < c->samples * (c->is_list ? 2 : 1); sample++) {
            if (f->call.samples[sample].generation.is_stopped) continue;
            feed(f, sample, c->tokens[(i + sample) % c->count], i);
            give_room(f, room, &random); /* a little more every time */
        }
        if (i == c->count / 2) give_prompt(f);
    }
    if (c->is_stop) {
        api_fixture_stop(f, API_FIXTURE_EOS);
    } else {
        api_fixture_length(f);
    }
    f->room = SIZE_MAX;
    api_call_on_room(&f->call);
    assert_int_equal(f->end_count, 1);
    assert_int_equal(f->status, 200);
}

/* ---- putting events together ----------------------------------------------------------------- */

static const char *const META_LISTS[] = {
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    "input_token_logprobs",
    "input_top_logprobs",
    "output_token_sampling_mask_truncated",
    "output_token_sampling_support_sizes",
};

/* Appends list `name` of `from` to that of `to`, if there is one. */
static void append(json_t *to, const json_t *from, const char *name) {
    json_t *more = json_object_get(from, name);
    if (more == NULL || json_is_null(more)) return;
    json_t *list = json_object_get(to, name);
    if (list == NULL) {
        list = json_array();
        assert_int_equal(json_object_set_new(to, name, list), 0);
    }
    assert_true(json_is_array(more));
    assert_int_equal(json_array_extend(list, more), 0);
}

static json_t *object_in(json_t *of, const char *name) {
    json_t *object = json_object_get(of, name);
    if (object != NULL) return object;
    object = json_object();
    assert_int_equal(json_object_set_new(of, name, object), 0);
    return object;
}

static void append_text(json_t *choice, const char *text) {
    char whole[512];
    const char *before = json_string_value(json_object_get(choice, "text"));
    snprintf(whole, sizeof(whole), "%s%s", before != NULL ? before : "", text);
    assert_int_equal(json_object_set_new(choice, "text", json_string(whole)), 0);
}

/* What a choice adds: text, lists, the latest of everything else. */
static void take_choice(json_t *out, json_t *choice, const char *holder) {
    static const char *const LOGPROBS[] = {"content", "tokens", "token_logprobs", "top_logprobs",
                                           "text_offset"};
    json_t *meta = json_object_get(choice, "meta_info");
    const json_t *logprobs = json_object_get(choice, "logprobs");
    const json_t *text = holder != NULL
                             ? json_object_get(json_object_get(choice, holder), "content")
                             : json_object_get(choice, "text");
    const char *key;
    json_t *value;
    if (text != NULL) append_text(out, json_string_value(text));
    append(out, choice, "response_token_ids");
    append(out, choice, "prompt_token_ids");
    for (size_t i = 0; i < BT_ARRAY_COUNT(META_LISTS) && meta != NULL; i++) {
        append(object_in(out, "meta_info"), meta, META_LISTS[i]);
    }
    for (size_t i = 0; i < BT_ARRAY_COUNT(LOGPROBS) && json_is_object(logprobs); i++) {
        append(object_in(out, "logprobs"), logprobs, LOGPROBS[i]);
    }
    json_object_foreach(meta, key, value) {
        if (!json_is_array(value)) json_object_set(object_in(out, "meta_info"), key, value);
    }
    json_object_set(out, "finish_reason", json_object_get(choice, "finish_reason"));
    json_object_set(out, "matched_stop", json_object_get(choice, "matched_stop"));
}

static json_t *parse(const char *text, size_t bytes) {
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) fail_msg("%s in %.*s", error.text, (int)bytes, text);
    return root;
}

/* The choices of the answer, {"0": {...}, ...}; of a stream those of all events. */
static json_t *collect(const api_fixture *f, api_kind kind, bool streams) {
    static const char DONE[] = "data: [DONE]\n\n";
    json_t *all = json_object();
    const char *text = api_fixture_body(f), *end;
    const char *holder = kind == API_CHAT ? (streams ? "delta" : "message") : NULL;
    while (*text != 0 && strcmp(text, DONE) != 0) {
        size_t i;
        json_t *choice;
        end = streams ? strstr(text, "\n\n") : text + strlen(text);
        assert_non_null(end);
        if (streams) assert_memory_equal(text, "data: ", 6);
        const char *json = text + (streams ? 6 : 0);
        json_t *root = parse(json, (size_t)(end - json));
        json_array_foreach(json_object_get(root, "choices"), i, choice) {
            char index[16];
            snprintf(index, sizeof(index), "%d",
                     (int)json_integer_value(json_object_get(choice, "index")));
            take_choice(object_in(all, index), choice, holder);
        }
        json_decref(root);
        text = end + (streams ? 2 : 0);
    }
    if (streams) assert_string_equal(text, DONE);
    return all;
}

static char *dump(json_t *root) {
    char *text = json_dumps(root, JSON_SORT_KEYS | JSON_INDENT(1));
    json_decref(root);
    assert_non_null(text);
    return text;
}

/* Compares the stream with the whole reply at several intervals and rooms. */
static void compare(api_fixture *f, const stream_case *c) {
    static const size_t ROOMS[] = {SIZE_MAX, 1, ROOM_RANDOM};
    static const uint32_t INTERVALS[] = {1, 2, 5};
    f->settings.stream_interval = 1;
    run(f, c, false, SIZE_MAX);
    char *expected = dump(collect(f, c->kind, false));
    for (size_t i = 0; i < BT_ARRAY_COUNT(ROOMS) * BT_ARRAY_COUNT(INTERVALS); i++) {
        f->settings.stream_interval = INTERVALS[i % BT_ARRAY_COUNT(INTERVALS)];
        run(f, c, true, ROOMS[i / BT_ARRAY_COUNT(INTERVALS)]);
        char *told = dump(collect(f, c->kind, true));
        if (strcmp(told, expected) != 0)
            print_error("%s of %u tokens, %u samples, interval %u, room %zu: {%s}\n",
                        c->kind == API_CHAT ? "a chat" : "a completion", c->count, c->samples,
                        f->settings.stream_interval, ROOMS[i / BT_ARRAY_COUNT(INTERVALS)],
                        c->fields);
        assert_string_equal(told, expected);
        free(told);
    }
    free(expected);
}

#define SELECTED ",\"top_k\":5,\"return_sampling_mask\":true,\"return_meta_info\":true"
#define SUPPORT  SELECTED ",\"sampling_logprobs_mode\":\"support\""
#define IDS      ",\"return_token_ids\":true,\"return_prompt_token_ids\":true"
#define STOP     ",\"stop\":[\"stop\",\"never\"]"

static void test_all_events_say_what_the_reply_says(void **state) {
    static const char *const FIELDS[] = {
        "",
        SELECTED,
        SUPPORT IDS,
        IDS,
        ",\"return_meta_info\":true",
        STOP SUPPORT,
        STOP ",\"user\":5",
        STOP SELECTED IDS ",\"no_stop_trim\":true",
        SUPPORT IDS STOP ",\"skip_special_tokens\":false",
    };
    static const char *const LOGPROBS[][2] = {
        {",\"logprobs\":true,\"top_logprobs\":2", ",\"logprobs\":2"},
        {",\"logprobs\":true", ",\"logprobs\":0"},
        {"", ""},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(FIELDS) * 12; i++) {
        char fields[512];
        const bool is_completion = i % 2 == 1;
        snprintf(fields, sizeof(fields), "%s%s", FIELDS[i / 12],
                 LOGPROBS[i / 4 % 3][is_completion ? 1 : 0]);
        const stream_case c = {.kind = is_completion ? API_COMPLETION : API_CHAT,
                               .fields = fields,
                               .samples = i / 2 % 2 == 1 ? 3 : 1,
                               .is_list = is_completion && i % 3 == 0,
                               .tokens = SCRIPT,
                               .count = BT_ARRAY_COUNT(SCRIPT)};
        compare(f, &c);
    }
}

/* Any tokens, and any of the fields together. */
static void test_random_replies(void **state) {
    static const int32_t TOKENS[] = {'s', 't', 'o', 'p', 'a', 0xe2, 0x82, 0xac, 0xf0, 317, 318, 97};
    static const char *const PARTS[] = {
        SELECTED,
        SUPPORT,
        IDS,
        STOP,
        ",\"return_meta_info\":true",
        ",\"no_stop_trim\":true",
        ",\"skip_special_tokens\":false",
        ",\"sampling_mask_mode\":\"bounded\"",
        ",\"stop\":[\"op\",\"\\ufffd\",\"tt\"]",
    };
    api_fixture *f = *state;
    for (uint32_t seed = 1; seed <= 60; seed++) {
        uint32_t random = seed;
        int32_t tokens[TOKENS_MAX];
        char fields[1024] = "";
        const bool is_completion = next_random(&random, 2) == 0;
        for (size_t i = 0; i < BT_ARRAY_COUNT(PARTS); i++) {
            if (next_random(&random, 2) == 0) strcat(fields, PARTS[i]);
        }
        if (next_random(&random, 2) == 0)
            strcat(fields, is_completion ? ",\"logprobs\":2" : ",\"logprobs\":true");
        if (is_completion && next_random(&random, 2) == 0) strcat(fields, ",\"echo\":true");
        stream_case c = {.kind = is_completion ? API_COMPLETION : API_CHAT,
                         .fields = fields,
                         .samples = 1 + next_random(&random, 3),
                         .is_list = is_completion && next_random(&random, 2) == 0,
                         .tokens = tokens,
                         .count = 1 + next_random(&random, TOKENS_MAX),
                         .is_stop = next_random(&random, 2) == 0};
        for (uint32_t i = 0; i < c.count; i++) {
            tokens[i] = TOKENS[next_random(&random, BT_ARRAY_COUNT(TOKENS))];
        }
        compare(f, &c);
    }
}

/* A reply that begins in the middle of a character, one that ends there, one token, none. */
static void test_short_replies(void **state) {
    static const int32_t TAIL[] = {0x82, 0xac, 'a', 0xe2};
    api_fixture *f = *state;
    for (uint32_t i = 0; i < 10; i++) {
        const stream_case c = {.kind = i % 2 == 0 ? API_CHAT : API_COMPLETION,
                               .fields = SUPPORT IDS,
                               .samples = 1,
                               .tokens = TAIL,
                               .count = 1 + i / 2 % 4,
                               .is_stop = i > 5};
        compare(f, &c);
    }
}

/* ---- byte for byte --------------------------------------------------------------------------- */

#define HEAD                                                                                       \
    "data: {\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":"  \
    "\"m\",\"choices\":[{\"index\":0,"
#define META(reason, count, lists, runs)                                                           \
    "\"meta_info\":{\"id\":\"c1\",\"finish_reason\":" reason                                       \
    ",\"prompt_tokens\":2,\"weight_version\":\"default\",\"num_retractions\":0," lists             \
    "\"output_token_sampling_mask_length\":" count ",\"output_token_weight_versions\":[" runs      \
    "],\"reasoning_tokens\":0,\"completion_tokens\":" count                                        \
    ",\"cached_tokens\":0,\"cached_tokens_details\":null,\"dp_rank\":null,\"e2e_latency\":0.041,"  \
    "\"response_sent_to_client_ts\":1790000000.25}}]}\n\n"
#define LISTS(mask, logprobs)                                                                      \
    "\"output_token_sampling_mask\":[" mask "],\"output_token_sampling_logprobs\":[" logprobs "],"
#define OPEN "\"finish_reason\":null,\"matched_stop\":null"
#define DONE "data: [DONE]\n\n"

static void test_a_chat_stream_with_masks(void **state) {
    static const int32_t IDS_A[] = {89, 3838}, IDS_B[] = {0xe2};
    static const float LOGPROBS[] = {-0.23638874f, -1.5581446f, 0.0f};
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{\"rid\":\"c1\",\"model\":\"m\",\"input_ids\":[72,105],\"stream\":"
                                "true,\"top_k\":10,\"max_tokens\":9" SUPPORT IDS "}"));
    api_fixture_mask_row(f, 89, 0, LOGPROBS[0], IDS_A, LOGPROBS, 2);
    api_fixture_mask_row(f, 0xe2, 0, LOGPROBS[2], IDS_B, &LOGPROBS[2], 1);
    api_fixture_stop(f, 0xe2);
    assert_string_equal(
        api_fixture_body(f), HEAD
        "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null," OPEN
        ",\"prompt_token_ids\":[72,105]}]}\n\n" HEAD
        "\"delta\":{\"content\":\"Y\"},\"logprobs\":null," OPEN
        ",\"response_token_ids\":[89]," META(
            "null", "1", LISTS("[89,3838]", "[-0.23638874292373657,-1.5581445693969727]"), "[0,1]")
            HEAD
        "\"delta\":{\"content\":\"\"},\"logprobs\":null," OPEN
        ",\"response_token_ids\":[226]," META("null", "2", LISTS("[226]", "[0.0]"), "[0,1]") HEAD
        "\"delta\":{\"content\":\"\xef\xbf\xbd\"},\"logprobs\":null," OPEN
        ",\"response_token_ids\":[]," META("null", "2", LISTS("", ""), "") HEAD
        "\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\",\"matched_stop\":226,"
        "\"response_token_ids\":[]," META("{\"type\":\"stop\",\"matched\":226}", "2", LISTS("", ""),
                                          "") DONE);
}

/* ---- failures -------------------------------------------------------------------------------- */

#define OVERFLOW "Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of"

static void ask(api_fixture *f, api_kind kind, uint32_t samples) {
    char body[512];
    snprintf(body, sizeof(body), "{%s,\"rid\":\"r\",\"stream\":true,\"n\":%u,\"max_tokens\":9%s}",
             prompt_of(kind, false), samples, SELECTED IDS);
    assert_true(api_fixture_ask(f, kind, body));
}

static const api_kind KINDS[] = {API_CHAT, API_COMPLETION};

/* The first token overflows: the status line was not sent, and the client gets the 400. */
static void test_a_failure_before_any_token(void **state) {
    api_fixture *f = *state;
    for (size_t i = 0; i < 4; i++) {
        ask(f, KINDS[i % 2], i < 2 ? 1 : 2);
        api_fixture_fail(f, BT_ERR_REQUEST_OVERFLOW, 400, "");
        assert_int_equal(f->status, 400);
        assert_non_null(strstr(api_fixture_body(f), "{\"error\":{\"message\":\"" OVERFLOW));
        assert_non_null(strstr(api_fixture_body(f), "\"type\":\"BadRequestError\""));
        ask(f, KINDS[i % 2], i < 2 ? 1 : 2);
        api_fixture_fail(f, BT_ERR_REQUEST_CAPTURE, 500, "");
        assert_int_equal(f->status, 500);
        assert_non_null(strstr(api_fixture_body(f), "outside its captured sampling support."));
        assert_string_equal(f->fields, "x-should-retry: false\r\n");
    }
}

/* Later every row that was there is told, and then one error. */
static void test_a_failure_in_the_stream(void **state) {
    api_fixture *f = *state;
    for (size_t i = 0; i < 2; i++) {
        ask(f, KINDS[i], 1);
        feed(f, 0, 'a', 0);
        f->room = 0;
        feed(f, 0, 0xe2, 1); /* waits */
        api_fixture_fail(f, BT_ERR_REQUEST_OVERFLOW, 400, "");
        f->room = SIZE_MAX;
        api_call_on_room(&f->call);
        assert_int_equal(f->status, 200);
        assert_memory_equal(api_fixture_last_event(f, 0), "{\"error\":{\"message\":\"" OVERFLOW,
                            sizeof(OVERFLOW) + 20);
        assert_non_null(strstr(api_fixture_last_event(f, 0), "\"code\":400}}"));
        const char *rows = api_fixture_last_event(f, 1);
        assert_non_null(strstr(rows, "\"response_token_ids\":[226]"));
        assert_non_null(strstr(rows, "\"output_token_sampling_mask\":[[226,1001]]"));
        assert_non_null(strstr(rows, OPEN));
        assert_non_null(strstr(rows, "\"meta_info\":{\"id\":\"r\",\"finish_reason\":null"));
    }
}

/* One sample of two fails: its end says so beside the other's, with the status in meta_info. */
static void test_one_sample_fails(void **state) {
    api_fixture *f = *state;
    for (size_t i = 0; i < 2; i++) {
        const bool is_chat = KINDS[i] == API_CHAT;
        ask(f, KINDS[i], 2);
        feed(f, 0, 'a', 0);
        feed(f, 1, 'b', 0);
        api_fixture_sample_fail(f, 0, BT_ERR_REQUEST_OVERFLOW, 400, "");
        assert_int_equal(f->end_count, 0);
        feed(f, 1, 'c', 1);
        api_fixture_length(f);
        assert_null(strstr(api_fixture_body(f), "\"error\""));
        /* A chat tells all ends last; a completion's is with its text, and failures come last. */
        const char *failed = api_fixture_last_event(f, is_chat ? 1 : 0);
        assert_non_null(strstr(failed, "\"index\":0"));
        assert_non_null(strstr(failed, "\"finish_reason\":\"abort\",\"matched_stop\":null"));
        assert_non_null(strstr(failed, "\"meta_info\":{\"id\":\"r_0\",\"finish_reason\":{\"type\":"
                                       "\"abort\",\"message\":\"" OVERFLOW));
        assert_non_null(strstr(failed, "\"status_code\":400,\"err_type\":\"BadRequestError\"}"));
        const char *other = api_fixture_last_event(f, is_chat ? 0 : 1);
        assert_non_null(strstr(other, "\"index\":1"));
        assert_non_null(strstr(other, "\"finish_reason\":\"length\""));
    }
}

/* Masks of a stream without meta_info have nowhere to go either: nothing pays for them. */
static void test_masks_without_meta_info_cost_nothing(void **state) {
    api_fixture *f = *state;
    for (size_t i = 0; i < 2; i++) {
        char body[256];
        snprintf(body, sizeof(body),
                 "{%s,\"stream\":true,\"top_k\":5,\"return_sampling_mask\":true,"
                 "\"return_token_ids\":true}",
                 prompt_of(KINDS[i], false));
        assert_true(api_fixture_ask(f, KINDS[i], body));
        assert_int_equal(f->call.request->generation.mask_mode, ROW_MASK_OFF);
        feed(f, 0, 'a', 0);
        assert_int_equal(budget_used(&f->limits.memory), 0);
        api_fixture_length(f);
        assert_null(strstr(api_fixture_body(f), "sampling"));
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_all_events_say_what_the_reply_says),
        CASE(test_random_replies),
        CASE(test_short_replies),
        CASE(test_a_chat_stream_with_masks),
        CASE(test_a_failure_before_any_token),
        CASE(test_a_failure_in_the_stream),
        CASE(test_one_sample_fails),
        CASE(test_masks_without_meta_info_cost_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
