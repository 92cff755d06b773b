/* Lists of prompts: how their bodies are read and refused, replies and streams byte for byte, what
 * one item's end means for the others. */
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

enum { BATCH_MAX = 6 /* the fixture's */ };

/* ---- bodies ---------------------------------------------------------------------------------- */

#define AB "\"text\":[\"a\",\"b\"]"

static const api_refusal REFUSALS[] = {
    {"{\"text\":[]}", API_PLAIN("text cannot be an empty list.")},
    {"{\"input_ids\":[[]]}", API_PLAIN("[0]: input_ids cannot be empty.")},
    {"{\"text\":[\"a\"],\"input_ids\":[[1]]}",
     API_SCHEMA("Exactly one of text and input_ids must be given.")},
    {"{\"text\":[\"a\",5]}", API_SCHEMA("[1]: text must be a string, got a number.")},
    {"{\"text\":[\"a\",null]}", API_SCHEMA("[1]: text must be a string, got null.")},
    {"{\"text\":[\"a\",[\"b\"]]}", API_SCHEMA("[1]: text must be a string, got a list.")},
    {"{\"text\":[\"a\",\"\"]}", API_PLAIN("[1]: The prompt is empty.")},
    {"{\"input_ids\":[[1],2]}",
     API_SCHEMA("[1]: input_ids must be a list of token ids, got a number.")},
    {"{\"input_ids\":[[1],[2,-1]]}",
     API_SCHEMA("[1]: input_ids[1] must be a token id in [0, 151935], got -1.")},
    {"{\"input_ids\":[[1],null]}",
     API_SCHEMA("[1]: input_ids must be a list of token ids, got null.")},
    {"{\"input_ids\":[1,[2]]}",
     API_SCHEMA("input_ids[1] must be a token id in [0, 151935], got [2].")},
    {"{\"input_ids\":[[1],[2],[3],[4],[5],[6],[7]]}",
     API_PLAIN("a list of 7 prompts is longer than --batch-max=6.")},
    {"{\"text\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\"],\"sampling_params\":{\"n\":22}}",
     API_PLAIN("n asks for 132 samples of the list's prompts together, at most 128 are allowed (8 "
               "times --batch-max=6).")},
    /* Lists of another length. */
    {"{" AB ",\"sampling_params\":[{}]}",
     API_SCHEMA("sampling_params is a list of 1, but there are 2 prompts.")},
    {"{" AB ",\"sampling_params\":[]}",
     API_SCHEMA("sampling_params is a list of 0, but there are 2 prompts.")},
    {"{" AB ",\"rid\":[\"a\",\"b\",\"c\"]}",
     API_SCHEMA("rid is a list of 3, but there are 2 prompts.")},
    {"{" AB ",\"return_logprob\":[true]}",
     API_SCHEMA("return_logprob is a list of 1, but there are 2 prompts.")},
    {"{" AB ",\"return_logprob\":true,\"logprob_start_len\":[0,0,0]}",
     API_SCHEMA("logprob_start_len is a list of 3, but there are 2 prompts.")},
    {"{" AB ",\"return_logprob\":true,\"top_logprobs_num\":[]}",
     API_SCHEMA("top_logprobs_num is a list of 0, but there are 2 prompts.")},
    {"{" AB ",\"return_logprob\":true,\"token_ids_logprob\":[[1]]}",
     API_SCHEMA("token_ids_logprob is a list of 1, but there are 2 prompts.")},
    {"{" AB ",\"return_sampling_mask\":[true,false,true]}",
     API_SCHEMA("return_sampling_mask is a list of 3, but there are 2 prompts.")},
    {"{" AB ",\"sampling_logprobs_mode\":[\"support\"]}",
     API_SCHEMA("sampling_logprobs_mode is a list of 1, but there are 2 prompts.")},
    {"{" AB ",\"sampling_filter\":[\"rank\"]}",
     API_SCHEMA("sampling_filter is a list of 1, but there are 2 prompts.")},
    {"{" AB ",\"cache_salt\":[\"s\"]}",
     API_SCHEMA("cache_salt is a list of 1, but there are 2 prompts.")},
    {"{" AB ",\"extra_key\":[]}", API_SCHEMA("extra_key is a list of 0, but there are 2 prompts.")},
    /* What is one for all. */
    {"{" AB ",\"stream\":[true,true]}", API_SCHEMA("stream must be a boolean, got a list.")},
    {"{" AB ",\"return_prompt_token_ids\":[true,true]}",
     API_SCHEMA("return_prompt_token_ids must be a boolean, got a list.")},
    {"{" AB ",\"return_text_in_logprobs\":[true,true]}",
     API_SCHEMA("return_text_in_logprobs must be a boolean, got a list.")},
    /* A value that all items share is named without one; an item's own with it. */
    {"{" AB ",\"sampling_params\":{\"top_p\":2}}", API_PLAIN("top_p must be in (0, 1], got 2.")},
    {"{" AB ",\"sampling_params\":[{},{\"top_p\":2}]}",
     API_PLAIN("[1]: top_p must be in (0, 1], got 2.")},
    {"{" AB ",\"sampling_params\":[{},[]]}",
     API_SCHEMA("[1]: sampling_params must be an object, got a list.")},
    {"{" AB ",\"sampling_params\":[{\"x\":1},{}]}",
     API_PLAIN("[0]: Unexpected sampling parameter 'x'.")},
    {"{" AB ",\"return_logprob\":[true,3]}",
     API_SCHEMA("[1]: return_logprob must be a boolean, got a number.")},
    {"{" AB ",\"return_logprob\":true,\"logprob_start_len\":[0,1]}",
     API_PLAIN("[1]: logprob_start_len=1 is beyond the prompt of 1 tokens.")},
    {"{" AB ",\"return_logprob\":true,\"top_logprobs_num\":[1,129]}",
     API_PLAIN("[1]: top_logprobs_num must be in [0, 128], got 129.")},
    {"{" AB ",\"return_logprob\":true,\"token_ids_logprob\":[[1],[-1]]}",
     API_SCHEMA("[1]: token_ids_logprob must be a list of token ids in [0, 151935], got -1.")},
    {"{" AB ",\"return_logprob\":true,\"token_ids_logprob\":[1,[2]]}",
     API_SCHEMA("token_ids_logprob must be a list of token ids in [0, 151935], got [2].")},
    {"{" AB ",\"sampling_logprobs_mode\":[\"support\",\"all\"]}",
     API_PLAIN("[1]: sampling_logprobs_mode must be 'selected' or 'support', got 'all'.")},
    {"{\"input_ids\":[[1],[2,3]],\"sampling_params\":{\"max_new_tokens\":199}}",
     "[1]: Requested token count exceeds the model's maximum context length of 200 tokens."},
    {"{" AB ",\"rid\":[\"a\",7]}", API_SCHEMA("[1]: rid must be a string, got a number.")},
    {"{" AB ",\"rid\":[\"a\",\"a\"]}", API_PLAIN("Duplicate request ID detected: a")},
    {"{" AB ",\"lora_path\":[null,\"x\"]}", API_PLAIN("[1]: lora_path is not supported.")},
    {"{" AB ",\"lora_path\":[null]}", API_PLAIN("lora_path is not supported.")},
    {"{" AB ",\"image_data\":[\"x\",\"y\"]}", API_PLAIN("[0]: image_data is not supported.")},
};

static void test_refusals(void **state) {
    api_fixture_expect_refusals(*state, API_GENERATE, REFUSALS, BT_ARRAY_COUNT(REFUSALS));
}

/* What is accepted although it looks odd. */
static void test_accepted(void **state) {
    static const char *const BODIES[] = {
        "{" AB ",\"sampling_params\":null,\"rid\":null,\"token_ids_logprob\":[]}",
        "{" AB ",\"sampling_params\":[null,{}],\"rid\":[null,null]}",
        "{" AB ",\"lora_path\":[null,\"\"],\"image_data\":[],\"video_data\":[[],false]}",
        "{" AB ",\"return_logprob\":[null,true],\"token_ids_logprob\":[null,null]}",
        "{" AB ",\"return_logprob\":true,\"token_ids_logprob\":[1,2,3]}",
        "{\"input_ids\":[[1],[1],[1],[1],[1],[1]],\"sampling_params\":{\"n\":21}}",
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(BODIES); i++) {
        if (!api_fixture_ask(f, API_GENERATE, BODIES[i]))
            fail_msg("%s -> %s", BODIES[i], api_fixture_body(f));
        api_fixture_abort(f);
    }
}

/* What each item asks for when every field is a list. */
static void test_values_of_items(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(
        f, API_GENERATE,
        "{\"input_ids\":[[7,8],[9],[10,11,12]],\"rid\":[\"x\",null,\"z\"],"
        "\"sampling_params\":[{\"max_new_tokens\":3,\"n\":2,\"stop\":\"!\",\"sampling_seed\":5},"
        "null,{\"top_k\":4,\"stop\":[\"?\",\";\"],\"logit_bias\":{\"3\":1}}],"
        "\"return_logprob\":[false,true,true],\"logprob_start_len\":[0,0,1],"
        "\"top_logprobs_num\":[9,0,2],\"token_ids_logprob\":[null,[],[4,5]],"
        "\"return_sampling_mask\":[false,false,true],"
        "\"sampling_logprobs_mode\":[\"support\",null,\"support\"],"
        "\"sampling_filter\":[\"rank\",null,\"joint\"],\"cache_salt\":[\"s\",null,\"s\"]}"));
    assert_int_equal(f->call.batch.count, 3);
    assert_int_equal(f->call.sample_count, 4);
    const api_request *x = api_fixture_item(f, 0), *y = api_fixture_item(f, 1),
                      *z = api_fixture_item(f, 2);
    assert_string_equal(x->rid, "x");
    assert_int_equal(strlen(y->rid), 32);
    assert_false(y->has_own_rid);
    assert_string_equal(z->rid, "z");
    assert_int_equal(x->prompt.count, 2);
    assert_int_equal(z->prompt.ids[2], 12);
    assert_int_equal(x->generation.max_new_tokens, 3);
    assert_int_equal(y->generation.max_new_tokens, 128);
    assert_int_equal(x->generation.samples, 2);
    assert_int_equal(x->generation.seed, 5);
    assert_int_equal(z->generation.top_k, 4);
    assert_int_equal(x->stop_count, 1);
    assert_int_equal(y->stop_count, 0);
    assert_int_equal(z->stop_count, 2);
    assert_int_equal(z->generation.bias_count, 1);
    assert_int_equal(x->generation.bias_count, 0);
    assert_false(x->wants_logprob);
    assert_int_equal(x->generation.top_logprobs, 0);
    assert_int_equal(y->generation.wants_prompt_logprobs, 1);
    assert_int_equal(y->generation.logprob_id_count, 0);
    assert_int_equal(z->generation.prompt_logprobs_from, 1);
    assert_int_equal(z->generation.top_logprobs, 2);
    assert_int_equal(z->generation.logprob_id_count, 2);
    assert_int_equal(x->generation.mask_mode, ROW_MASK_OFF);
    assert_int_equal(z->generation.mask_mode, ROW_MASK_SUPPORT);
    assert_int_equal(x->generation.filter, 1);
    assert_int_equal(y->generation.filter, 0);
    assert_true(y->generation.cache_salt[0] == 0 && x->generation.cache_salt[0] != 0);
    assert_true(x->generation.cache_salt[0] == z->generation.cache_salt[0]);
    api_fixture_abort(f);
}

/* One value for all; the stop strings are kept once. */
static void test_values_of_all(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[[7,8],[9]],\"rid\":\"r\",\"return_logprob\":true,"
                                "\"token_ids_logprob\":[4,5],\"top_logprobs_num\":3,"
                                "\"sampling_params\":{\"n\":2,\"stop\":[\"a\",\"b\"],"
                                "\"logit_bias\":{\"3\":1},\"max_new_tokens\":9}}"));
    for (uint32_t i = 0; i < 2; i++) {
        const api_request *r = api_fixture_item(f, i);
        assert_int_equal(r->generation.logprob_id_count, 2);
        assert_int_equal(r->generation.top_logprobs, 3);
        assert_int_equal(r->generation.samples, 2);
        assert_int_equal(r->generation.bias_count, 1);
        assert_int_equal(r->generation.max_new_tokens, 9);
        assert_int_equal(r->stop_count, 2);
        assert_ptr_equal(r->stops, api_fixture_item(f, 0)->stops);
        assert_true(r->has_own_rid);
    }
    assert_string_equal(api_fixture_item(f, 0)->rid, "r_0");
    assert_string_equal(api_fixture_item(f, 1)->rid, "r_1");
    api_fixture_abort(f);
    /* Seeds: the same where one is given, of their own where none is. */
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{" AB ",\"sampling_params\":{\"sampling_seed\":3}}"));
    assert_int_equal(api_fixture_item(f, 1)->generation.seed, 3);
    api_fixture_abort(f);
    assert_true(api_fixture_ask(f, API_GENERATE, "{" AB "}"));
    assert_true(api_fixture_item(f, 0)->generation.seed != api_fixture_item(f, 1)->generation.seed);
    assert_string_not_equal(api_fixture_item(f, 0)->rid, api_fixture_item(f, 1)->rid);
    api_fixture_abort(f);
    /* The longest name still has room for the numbers behind it. */
    char body[400], name[API_RID_MAX + 1];
    memset(name, 'n', API_RID_MAX);
    name[API_RID_MAX] = 0;
    snprintf(body, sizeof(body), "{" AB ",\"rid\":\"%s\",\"sampling_params\":{\"n\":2}}", name);
    assert_true(api_fixture_ask(f, API_GENERATE, body));
    assert_int_equal(strlen(api_fixture_item(f, 1)->rid), API_RID_MAX + 2);
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "nnn_1_1\""));
}

/* ---- replies --------------------------------------------------------------------------------- */

#define META(id, reason, prompt, lists, count)                                                     \
    "\"meta_info\":{\"id\":\"" id "\",\"finish_reason\":" reason ",\"prompt_tokens\":" prompt      \
    ",\"weight_version\":\"default\",\"num_retractions\":0," lists                                 \
    "\"reasoning_tokens\":0,\"completion_tokens\":" count                                          \
    ",\"cached_tokens\":0,\"cached_tokens_details\":null,\"dp_rank\":null,"                        \
    "\"e2e_latency\":0.041,\"response_sent_to_client_ts\":1790000000.25}"
#define LENGTH(count) "{\"type\":\"length\",\"length\":" count "}"
#define ABORT(text, code, type)                                                                    \
    "{\"type\":\"abort\",\"message\":\"" text "\",\"status_code\":" code ",\"err_type\":\"" type   \
    "\"}"
#define ONE(text, ids, id, reason, prompt, count)                                                  \
    "{\"text\":\"" text "\",\"output_ids\":[" ids "]," META(id, reason, prompt, "", count)
#define EVENT(text, ids, id, reason, prompt, count, index)                                         \
    "data: " ONE(text, ids, id, reason, prompt, count) ",\"index\":" index "}\n\n"
#define DONE "data: [DONE]\n\n"
#define TWO  "\"rid\":\"r\",\"input_ids\":[[7,8],[9]]"

static void test_list(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
    api_fixture_sample_text(f, 1, "y");
    api_fixture_item_length(f, 1);
    api_fixture_sample_text(f, 0, "xz");
    assert_int_equal(f->begin_count, 0);
    api_fixture_item_length(f, 0);
    assert_int_equal(f->status, 200);
    assert_int_equal(f->end_count, 1);
    assert_string_equal(api_fixture_body(f),
                        "[" ONE("xz", "120,122", "r_0", LENGTH("2"), "2",
                                "2") "}," ONE("y", "121", "r_1", LENGTH("1"), "1", "1") "}]");
    assert_int_equal(f->cancel_count, 0);
}

/* A list of one is a list, whatever its form; the event of a stream has its index. */
static void test_list_of_one(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"text\":[\"a\"],\"rid\":[\"q\"]}"));
    api_fixture_text(f, "x");
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f), "[" ONE("x", "120", "q", LENGTH("1"), "1", "1") "}]");
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[[1]],\"rid\":\"q\",\"stream\":true}"));
    api_fixture_text(f, "x");
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f),
                        EVENT("x", "120", "q_0", "null", "1", "1", "0")
                            EVENT("x", "120", "q_0", LENGTH("1"), "1", "1", "0") DONE);
}

/* Item by item, each with its samples; the items differ in n. */
static void test_samples_of_items(void **state) {
    api_fixture *f = *state;
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{" TWO ",\"sampling_params\":[{\"n\":2},{\"n\":1}]}"));
    api_fixture_sample_text(f, 2, "z");
    api_fixture_sample_text(f, 1, "y");
    api_fixture_sample_text(f, 0, "x");
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f),
                        "[" ONE("x", "120", "r_0_0", LENGTH("1"), "2", "1") "}," ONE(
                            "y", "121", "r_0_1", LENGTH("1"), "2",
                            "1") "}," ONE("z", "122", "r_1", LENGTH("1"), "1", "1") "}]");
}

/* Events mix, each with the number of its sample. */
static void test_stream(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(
        f, API_GENERATE,
        "{" TWO ",\"stream\":true,\"sampling_params\":[{\"n\":2},{\"stream_interval\":2}]}"));
    api_fixture_sample_text(f, 2, "z");
    api_fixture_sample_text(f, 0, "x");
    api_fixture_sample_text(f, 2, "Z"); /* not due: its interval is 2 */
    api_fixture_item_length(f, 1);
    api_fixture_sample_text(f, 1, "y");
    assert_int_equal(f->end_count, 0);
    api_fixture_length(f);
    assert_string_equal(api_fixture_body(f),
                        EVENT("z", "122", "r_1", "null", "1", "1", "2")
                            EVENT("x", "120", "r_0_0", "null", "2", "1", "0")
                                EVENT("zZ", "122,90", "r_1", LENGTH("2"), "1", "2", "2")
                                    EVENT("y", "121", "r_0_1", "null", "2", "1", "1")
                                        EVENT("x", "120", "r_0_0", LENGTH("1"), "2", "1", "0")
                                            EVENT("y", "121", "r_0_1", LENGTH("1"), "2", "1", "1")
                                                DONE);
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void fail_item(api_fixture *f, uint32_t item, bt_status status, int http_status,
                      const char *text) {
    dispatch_end end = {.status = status, .http_status = http_status, .finish = PROTO_FINISH_ERROR};
    snprintf(end.text, sizeof(end.text), "%s", text);
    for (uint32_t i = 0; i < f->call.items[item].sample_count; i++) {
        api_call_on_sample_end(&f->call, item, i, &end);
    }
    api_call_on_end(&f->call, item, &end);
}

/* An item that fails, in the queue or later, is an abort among the others. */
static void test_one_item_fails(void **state) {
    static const char *const STREAMS[] = {"", ",\"stream\":true"};
    api_fixture *f = *state;
    for (int i = 0; i < 2; i++) {
        char body[200];
        snprintf(body, sizeof(body), "{" TWO "%s}", STREAMS[i]);
        assert_true(api_fixture_ask(f, API_GENERATE, body));
        fail_item(f, 0, BT_ERR_REQUEST_FULL, 503, "busy");
        assert_int_equal(f->begin_count, 0); /* the other one may fail as well */
        api_fixture_sample_text(f, 1, "y");
        api_fixture_item_length(f, 1);
        assert_int_equal(f->status, 200);
        assert_int_equal(f->end_count, 1);
        assert_int_equal(f->cancel_count, 0);
    }
    assert_string_equal(api_fixture_body(f),
                        EVENT("", "", "r_0", ABORT("busy", "503", "ServiceUnavailableError"), "2",
                              "0", "0") EVENT("y", "121", "r_1", "null", "1", "1", "1")
                            EVENT("y", "121", "r_1", LENGTH("1"), "1", "1", "1") DONE);
}

typedef struct failure_case {
    bt_status first, second;
    int first_given, second_given;
    bool has_tokens;
    int expected;
} failure_case;

/* All fail: the true status, of different ones the worst; what had tokens is told item by item. */
static void test_all_items_fail(void **state) {
    static const failure_case CASES[] = {
        {BT_ERR_REQUEST_FULL, BT_ERR_REQUEST_FULL, 503, 503, false, 503},
        {BT_ERR_REQUEST_DUPLICATE, BT_ERR_REQUEST_FULL, 400, 503, false, 503},
        {BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_OVERFLOW, 400, 400, true, 400},
        {BT_ERR_REQUEST_CAPTURE, BT_ERR_REQUEST_FULL, 500, 503, false, 500},
        {BT_ERR_PEER_GONE, BT_ERR_REQUEST_OVERFLOW, 503, 400, true, 200},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        const failure_case *c = &CASES[i];
        assert_true(api_fixture_ask(f, API_GENERATE, "{" TWO "}"));
        if (c->has_tokens) api_fixture_sample_text(f, 0, "x");
        fail_item(f, 0, c->first, c->first_given, "first");
        assert_int_equal(f->begin_count, 0);
        fail_item(f, 1, c->second, c->second_given, "second");
        assert_int_equal(f->status, c->expected);
        assert_int_equal(f->end_count, 1);
        if (f->status == 200) assert_non_null(strstr(api_fixture_body(f), "\"abort\""));
    }
}

/* Stop strings end samples and items, never those beside them. */
static void test_stops(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" TWO
                                ",\"stream\":true,\"sampling_params\":{\"n\":2,\"stop\":\"##\"}}"));
    api_fixture_sample_text(f, 3, "b##");
    assert_int_equal(f->cancelled_samples[3], 1);
    assert_int_equal(f->cancel_count, 0);
    api_fixture_sample_text(f, 2, "c##");
    assert_int_equal(f->cancel_count, 1); /* item 1 as a whole */
    assert_true(f->call.items[1].is_cancelled && !f->call.items[0].is_cancelled);
    fail_item(f, 1, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    api_fixture_sample_text(f, 0, "d");
    api_fixture_sample_text(f, 1, "e");
    assert_int_equal(f->end_count, 0);
    api_fixture_length(f);
    assert_int_equal(f->end_count, 1);
    assert_int_equal(f->cancel_count, 1);
    assert_int_equal(f->cancelled_samples[2], 0);
}

static void test_client_leaves(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"stream\":true,\"input_ids\":[[1],[2],[3]],"
                                "\"sampling_params\":{\"n\":2}}"));
    api_fixture_sample_text(f, 2, "a");
    api_fixture_item_length(f, 1);
    api_call_on_gone(&f->call);
    assert_int_equal(f->cancel_count, 2); /* of those that run */
    assert_false(f->call.has_ended);
    fail_item(f, 2, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_false(f->call.has_ended);
    fail_item(f, 0, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
    assert_true(f->call.has_ended);
    assert_int_equal(f->cancel_count, 2);
}

/* What this process lacks ends all items, each told once. */
static void test_spill_limit_ends_all(void **state) {
    api_fixture *f = *state;
    f->limits.memory.bytes_max = 0;
    f->limits.spill.bytes_max = 100;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"return_logprob\":[false,true]," TWO "}"));
    api_fixture_sample_text(f, 0, "x");
    for (uint32_t i = 0; i < 8 && f->end_count == 0; i++) {
        api_fixture_sample_row(f, 1, 97, -1);
    }
    assert_int_equal(f->cancel_count, 2);
    assert_int_equal(f->status, 503);
    assert_non_null(strstr(api_fixture_body(f), "--reply-spill-bytes=100"));
    /* Others have the room now, not when the workers answered the cancels. */
    assert_int_equal(budget_used(&f->limits.spill), 0);
    api_fixture_abort(f);
    assert_int_equal(f->end_count, 1);
}

/* ---- log-probabilities of prompts ------------------------------------------------------------ */

#define SCORED                                                                                     \
    "\"rid\":\"r\",\"input_ids\":[[7,8],[9,10]],\"return_logprob\":true,"                          \
    "\"logprob_start_len\":[-1,0]"

/* An item's events wait for its own prompt, not for another's. */
static void test_prompt_logprobs_of_one_item(void **state) {
    static const float ENTRY[] = {-0.5f};
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" SCORED ",\"stream\":true}"));
    api_fixture_sample_row(f, 1, 121, -1);
    assert_int_equal(f->begin_count, 0); /* no prompt yet */
    api_fixture_sample_row(f, 0, 120, -1);
    assert_int_equal(f->begin_count, 1);
    assert_int_equal(f->granted[0], ROW_RECORD_HEADER_BYTES);
    assert_int_equal(f->granted[1], 0);
    assert_null(strstr(api_fixture_body(f), "\"index\":1"));
    api_fixture_item_prompt(f, 1, 1, ENTRY, 1);
    assert_int_equal(f->granted[1], ROW_RECORD_HEADER_BYTES);
    const char *second = strstr(api_fixture_body(f), "\"r_1\"");
    assert_non_null(second);
    assert_non_null(strstr(second, "\"input_token_logprobs\":[[null,9,null],[-0.5,10,null]],"));
    const size_t used = f->body.used;
    api_fixture_item_prompt(f, 1, 1, ENTRY, 1); /* again, after a retry: told before */
    assert_int_equal(f->body.used, used);
    api_fixture_length(f);
    assert_int_equal(f->end_count, 1);
}

/* They were lost, or are broken: that item fails, and says so. */
static void test_prompt_logprobs_that_never_come(void **state) {
    static const float BROKEN[] = {__builtin_nanf("")};
    api_fixture *f = *state;
    for (int i = 0; i < 4; i++) {
        char body[300];
        snprintf(body, sizeof(body), "{" SCORED "%s}", i % 2 == 0 ? "" : ",\"stream\":true");
        assert_true(api_fixture_ask(f, API_GENERATE, body));
        api_fixture_sample_row(f, 0, 120, -1);
        api_fixture_sample_row(f, 1, 121, -1);
        if (i >= 2) api_fixture_item_prompt(f, 1, 1, BROKEN, 1);
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
        assert_int_equal(f->end_count, 1);
        const char *second = strstr(api_fixture_body(f), "\"id\":\"r_1\"");
        assert_non_null(second);
        assert_non_null(strstr(second, "\"status_code\":500"));
        if (i < 2) assert_non_null(strstr(second, "log-probabilities of the prompt were lost"));
        assert_int_equal(f->cancel_count, i < 2 ? 0 : 1);
    }
}

/* ---- many ------------------------------------------------------------------------------------ */

enum { MANY = 512 };

/* A batch as large as the default allows: whole in portions, and as a stream that a client reads
 * slowly, every sample heard. */
static void test_many_items(void **state) {
    api_fixture *f = *state;
    f->settings.batch_max = MANY;
    bt_text body;
    bt_text_init(&body, 1 << 20);
    for (int is_stream = 0; is_stream < 2; is_stream++) {
        bt_text_clear(&body);
        bt_text_add_string(&body, is_stream ? "{\"stream\":true," : "{");
        bt_text_add_string(&body, "\"rid\":\"m\",\"sampling_params\":{\"max_new_tokens\":3},"
                                  "\"input_ids\":[[1]");
        for (int i = 1; i < MANY; i++) {
            bt_text_add_format(&body, ",[%d]", i);
        }
        bt_text_add(&body, "]}\0", 3);
        assert_true(api_fixture_ask(f, API_GENERATE, body.bytes));
        assert_int_equal(f->call.sample_count, MANY);
        f->room = 0;
        for (uint32_t i = 0; i < MANY; i++) {
            api_fixture_sample_row(f, MANY - 1 - i, 97 + (int32_t)(i % 26), -1);
        }
        api_fixture_length(f);
        for (unsigned turns = 0; f->end_count == 0; turns++) {
            assert_true(turns < 10000);
            f->room = 3000;
            api_call_on_room(&f->call);
            assert_true(f->scratch.capacity <= 1 << 18);
        }
        for (unsigned i = 0; i < MANY; i += 37) {
            char id[64];
            snprintf(id, sizeof(id), "\"meta_info\":{\"id\":\"m_%u\",\"finish_reason\":{", i);
            assert_non_null(strstr(api_fixture_body(f), id));
        }
        if (is_stream) continue;
        json_t *reply = json_loads(api_fixture_body(f), 0, NULL);
        assert_int_equal(json_array_size(reply), MANY);
        json_decref(reply);
    }
    bt_text_fini(&body);
}

/* ---- any order ------------------------------------------------------------------------------- */

enum { ITEMS = 3, SAMPLES = 5 };

typedef struct history {
    uint64_t random;
    char texts[SAMPLES][64]; /* fed so far */
    bool has_ended[SAMPLES];
} history;

static uint32_t roll(history *h, uint32_t below) {
    h->random = h->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(h->random >> 33) % below;
}

/* A token or the end of some sample, with it perhaps of its item; or room for the client. */
static void step(api_fixture *f, history *h) {
    const uint32_t sample = roll(h, SAMPLES);
    const uint32_t item = f->call.samples[sample].item;
    const size_t used = strlen(h->texts[sample]);
    if (roll(h, 3) == 0) {
        f->room = roll(h, 2) * (1 + roll(h, 600));
        api_call_on_room(&f->call);
    }
    if (h->has_ended[sample]) return;
    if (used < 40 && roll(h, 12) != 0) {
        h->texts[sample][used] = (char)('a' + roll(h, 3)); /* "ab" may be a stop string's start */
        api_fixture_sample_text(f, sample, h->texts[sample] + used);
    } else {
        h->has_ended[sample] = true;
        api_fixture_sample_length(f, sample);
    }
    const uint32_t first = f->call.items[item].first_sample;
    bool is_over = !f->call.items[item].has_ended;
    for (uint32_t i = 0; i < f->call.items[item].sample_count; i++) {
        is_over = is_over && h->has_ended[first + i];
    }
    if (is_over) api_fixture_item_length(f, item);
}

static void check_history(const api_fixture *f, const history *h, bool is_incremental) {
    char told[SAMPLES][64] = {{0}};
    bool has_end[SAMPLES] = {false};
    char *body = strdup(api_fixture_body(f));
    char *rest = body;
    for (char *event; (event = strtok_r(rest, "\n", &rest)) != NULL;) {
        json_t *reply = json_loads(event + 6, 0, NULL);
        if (reply == NULL) continue; /* [DONE] */
        const json_int_t index = json_integer_value(json_object_get(reply, "index"));
        const json_t *meta = json_object_get(reply, "meta_info");
        assert_true(index < SAMPLES && !has_end[index]);
        if (!is_incremental) told[index][0] = 0;
        strcat(told[index], json_string_value(json_object_get(reply, "text")));
        has_end[index] = !json_is_null(json_object_get(meta, "finish_reason"));
        json_decref(reply);
    }
    free(body);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        assert_true(has_end[i]);
        assert_string_equal(told[i], h->texts[i]);
        assert_true(f->granted[i] <= strlen(told[i]) * ROW_RECORD_HEADER_BYTES);
    }
}

/* Whatever comes in which order, and however slowly the client reads: nothing is lost or repeated,
 * and the last event of each sample comes. */
static void test_any_order(void **state) {
    api_fixture *f = *state;
    for (uint32_t seed = 0; seed < 400; seed++) {
        history h = {.random = seed};
        f->settings.is_incremental = seed % 2 == 1;
        assert_true(api_fixture_ask(
            f, API_GENERATE,
            "{\"stream\":true,\"input_ids\":[[1],[2],[3]],\"sampling_params\":[{\"n\":2,\"stop\":"
            "\"abX\"},{\"stream_interval\":3},{\"n\":2}]}"));
        assert_int_equal(f->call.batch.count, ITEMS);
        while (!f->call.has_ended) {
            step(f, &h);
        }
        for (unsigned turns = 0; f->end_count == 0; turns++) {
            if (turns == 1000) fail_msg("seed %u: the answer does not end", seed);
            f->room = 1 + roll(&h, 600);
            api_call_on_room(&f->call);
        }
        assert_int_equal(f->cancel_count, 0);
        check_history(f, &h, f->settings.is_incremental);
    }
}

#ifdef BT_FAULT
static void feed_all(api_fixture *f) {
    for (uint32_t i = 0; i < 80; i++) {
        api_fixture_sample_row(f, i % f->call.sample_count, 66, -1);
    }
}

static void test_out_of_memory(void **state) {
    api_fixture *f = *state;
    api_fixture_run_out_of_memory(
        f, API_GENERATE,
        "{\"input_ids\":[[1,2],[3]],\"return_logprob\":[true,false],\"rid\":[\"a\","
        "\"b\"],\"sampling_params\":{\"n\":2,\"stop\":[\"x\"]}}",
        feed_all);
    api_fixture_run_out_of_memory(
        f, API_GENERATE,
        "{\"text\":[\"ab\",\"c\"],\"stream\":true,\"return_logprob\":true,"
        "\"sampling_params\":[{\"stop\":\"x\"},{\"stop\":\"y\"}]}",
        feed_all);
}
#endif

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_refusals),
        CASE(test_accepted),
        CASE(test_values_of_items),
        CASE(test_values_of_all),
        CASE(test_list),
        CASE(test_list_of_one),
        CASE(test_samples_of_items),
        CASE(test_stream),
        CASE(test_one_item_fails),
        CASE(test_all_items_fail),
        CASE(test_stops),
        CASE(test_client_leaves),
        CASE(test_spill_limit_ends_all),
        CASE(test_prompt_logprobs_of_one_item),
        CASE(test_prompt_logprobs_that_never_come),
        CASE(test_many_items),
        CASE(test_any_order),
#ifdef BT_FAULT
        CASE(test_out_of_memory),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
