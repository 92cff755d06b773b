/* Replies of /v1/chat/completions, byte for byte, whole and streamed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/router/api_fixture.h"

#define HELLO "\"rid\":\"c1\",\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
#define HEAD(object)                                                                               \
    "{\"id\":\"c1\",\"object\":\"" object "\",\"created\":1790000000,\"model\":\"m\","
#define USAGE(prompt, completion, total)                                                           \
    "\"usage\":{\"prompt_tokens\":" prompt ",\"completion_tokens\":" completion                    \
    ",\"total_tokens\":" total                                                                     \
    ",\"prompt_tokens_details\":{\"cached_tokens\":0},\"reasoning_tokens\":0}"

/* <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n in the tiny vocabulary. */
static void prompt_ids(const api_fixture *f, char *out, size_t capacity) {
    size_t used = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < f->call.request->prompt.count; i++) {
        used += (size_t)snprintf(out + used, capacity - used, i > 0 ? ",%d" : "%d",
                                 f->call.request->prompt.ids[i]);
    }
}

static void expect(const api_fixture *f, const char *format, const char *prompt) {
    char expected[4096];
    char number[16], total[16], text[4096];
    unsigned count = f->call.request->prompt.count;
    /* %P prompt tokens, %T total with two tokens, %I prompt ids. */
    size_t used = 0;
    snprintf(number, sizeof(number), "%u", count);
    snprintf(total, sizeof(total), "%u", count + f->call.samples[0].generation.count);
    snprintf(text, sizeof(text), "%s", format);
    for (const char *at = text; *at != 0; at++) {
        const char *part = at[0] != '%'   ? NULL
                           : at[1] == 'P' ? number
                           : at[1] == 'T' ? total
                                          : prompt;
        if (part == NULL) {
            expected[used++] = *at;
        } else {
            used += (size_t)snprintf(expected + used, sizeof(expected) - used, "%s", part);
            at++;
        }
    }
    expected[used] = 0;
    assert_string_equal(api_fixture_body(f), expected);
}

static void test_plain_reply(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT, "{" HELLO "}"));
    /* Without a limit a chat runs to the end of the context. */
    assert_int_equal(f->call.request->generation.max_new_tokens,
                     API_FIXTURE_CONTEXT - f->call.request->prompt.count);
    api_fixture_text(f, "Yo");
    api_fixture_stop(f, API_FIXTURE_EOS);
    expect(f,
           HEAD("chat.completion") "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                                   "\"content\":\"Yo\",\"reasoning_content\":null,\"tool_calls\":"
                                   "null},\"logprobs\":null,\"finish_reason\":\"stop\","
                                   "\"matched_stop\":319}]," USAGE(
                                       "%P", "2", "%T") ",\"metadata\":{\"weight_version\":"
                                                        "\"default\"}}",
           NULL);
}

/* The example of the contract: masks, meta_info and token ids. */
static void test_masks_in_meta_info(void **state) {
    static const int32_t IDS[] = {89, 3838};
    static const float LOGPROBS[] = {-0.23638874f, -1.5581446f};
    api_fixture *f = *state;
    char ids[512];
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{" HELLO
                                ",\"max_tokens\":1,\"top_k\":10,\"return_sampling_mask\":true,"
                                "\"sampling_logprobs_mode\":\"support\",\"return_meta_info\":true,"
                                "\"return_token_ids\":true,\"return_prompt_token_ids\":true}"));
    prompt_ids(f, ids, sizeof(ids));
    api_fixture_mask_row(f, 89, 0, LOGPROBS[0], IDS, LOGPROBS, 2);
    api_fixture_length(f);
    expect(
        f,
        HEAD("chat.completion") "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                                "\"content\":\"Y\",\"reasoning_content\":null,\"tool_calls\":null},"
                                "\"logprobs\":null,\"finish_reason\":\"length\",\"matched_stop\":"
                                "null,\"response_token_ids\":[89],\"prompt_token_ids\":[%I],"
                                "\"meta_info\":{\"id\":\"c1\",\"finish_reason\":{\"type\":"
                                "\"length\",\"length\":1},\"prompt_tokens\":%P,\"weight_version\":"
                                "\"default\",\"num_retractions\":0,\"output_token_sampling_mask\":"
                                "[[89,3838]],\"output_token_sampling_logprobs\":"
                                "[[-0.23638874292373657,-1.5581445693969727]],"
                                "\"output_token_sampling_mask_length\":1,"
                                "\"output_token_weight_versions\":[[0,1]],\"reasoning_tokens\":0,"
                                "\"completion_tokens\":1,\"cached_tokens\":0,"
                                "\"cached_tokens_details\":null,\"dp_rank\":null,\"e2e_latency\":"
                                "0.041,\"response_sent_to_client_ts\":1790000000.25}}]," USAGE(
                                    "%P", "1", "%T") ",\"metadata\":{\"weight_version\":"
                                                     "\"default\"}}",
        ids);
}

static void test_logprobs(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT, "{" HELLO ",\"logprobs\":true,\"top_logprobs\":0}"));
    api_fixture_row(f, 89, -0.5f);
    api_fixture_row(f, 0xc3, -0.25f);
    api_fixture_length(f);
    assert_non_null(
        strstr(api_fixture_body(f),
               "\"logprobs\":{\"content\":[{\"token\":\"Y\",\"bytes\":[89],\"logprob\":-0.5,"
               "\"top_logprobs\":[]},{\"token\":\"\xef\xbf\xbd\",\"bytes\":[195],\"logprob\":-0.25,"
               "\"top_logprobs\":[]}]},\"finish_reason\":\"length\""));
}

static void test_stop_string(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT, "{" HELLO ",\"stop\":[\"q\\\"\"]}"));
    api_fixture_text(f, "Yq\"");
    assert_int_equal(f->cancel_count, 1);
    assert_non_null(strstr(api_fixture_body(f), "\"content\":\"Y\","));
    assert_non_null(
        strstr(api_fixture_body(f), "\"finish_reason\":\"stop\",\"matched_stop\":\"q\\\"\"}]"));
}

/* ---- streams --------------------------------------------------------------------------------- */

#define CHUNK "data: " HEAD("chat.completion.chunk") "\"choices\":["
#define DELTA(text)                                                                                \
    CHUNK "{\"index\":0,\"delta\":{\"content\":\"" text                                            \
          "\"},\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]"
#define ROLE                                                                                       \
    CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"    \
          "\"finish_reason\":null,\"matched_stop\":null}]"
#define FINISH(reason, matched)                                                                    \
    CHUNK "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"" reason                \
          "\",\"matched_stop\":" matched "}]"
#define END  "}\n\n"
#define DONE "data: [DONE]\n\n"

static void test_stream(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT, "{" HELLO ",\"stream\":true,\"stream_options\":{}}"));
    /* The role waits for the first token. */
    assert_int_equal(f->begin_count, 0);
    api_fixture_text(f, "Y");
    assert_string_equal(f->content_type, "text/event-stream");
    api_fixture_text(f, "\xe2\x82");
    api_fixture_text(f, "\xac");
    api_fixture_row(f, API_FIXTURE_EOS, 0);
    api_fixture_stop(f, API_FIXTURE_EOS);
    expect(f, ROLE END DELTA("Y") END DELTA("\xe2\x82\xac") END FINISH("stop", "319") END DONE,
           NULL);
    assert_int_equal(f->granted_bytes, 5 * ROW_RECORD_HEADER_BYTES);
}

static void test_usage_in_streams(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{" HELLO ",\"stream\":true,\"max_completion_tokens\":2,"
                                "\"stream_options\":{\"include_usage\":true}}"));
    api_fixture_text(f, "Yo");
    api_fixture_length(f);
    expect(f,
           ROLE END DELTA("Y") END DELTA("o") END FINISH("length", "null") END CHUNK
           "]," USAGE("%P", "2", "%T") END DONE,
           NULL);
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{" HELLO ",\"stream\":true,\"max_tokens\":1,\"stream_options\":"
                                "{\"include_usage\":true,\"continuous_usage_stats\":true}}"));
    api_fixture_text(f, "Y");
    api_fixture_length(f);
    expect(f,
           ROLE "," USAGE("%P", "0", "%P") END DELTA("Y") "," USAGE("%P", "1", "%T")
               END FINISH("length", "null") "," USAGE("%P", "1", "%T") END CHUNK
           "]," USAGE("%P", "1", "%T") END DONE,
           NULL);
}

static void test_stream_with_logprobs(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT, "{" HELLO ",\"stream\":true,\"logprobs\":true}"));
    api_fixture_row(f, 89, -0.5f);
    assert_non_null(strstr(api_fixture_last_event(f, 0),
                           "\"delta\":{\"content\":\"Y\"},\"logprobs\":{\"content\":[{\"token\":"
                           "\"Y\",\"bytes\":[89],\"logprob\":-0.5,\"top_logprobs\":[]}]},"));
    /* A token without text has its log-probability in an event of its own. */
    api_fixture_row(f, 0xe2, -0.25f);
    assert_non_null(strstr(api_fixture_last_event(f, 0), "\"delta\":{\"content\":\"\"},"));
    assert_non_null(strstr(api_fixture_last_event(f, 0), "\"bytes\":[226],\"logprob\":-0.25,"));
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_last_event(f, 1), "\"content\":\"\xef\xbf\xbd\"},"));
}

static void test_failures(void **state) {
    static const char NESTED[] =
        "{\"error\":{\"message\":\"too wide\",\"type\":\"BadRequestError\",\"param\":null,\"code\":"
        "400},\"object\":\"error\",\"message\":\"too wide\",\"type\":\"BadRequestError\",\"param\":"
        "null,\"code\":400}";
    api_fixture *f = *state;
    for (int is_stream = 0; is_stream <= 1; is_stream++) {
        assert_true(api_fixture_ask(f, API_CHAT,
                                    is_stream ? "{" HELLO ",\"stream\":true}" : "{" HELLO "}"));
        api_fixture_fail(f, BT_ERR_REQUEST_INVALID, 400, "too wide");
        assert_int_equal(f->status, 400);
        assert_string_equal(api_fixture_body(f), NESTED);
    }
    assert_true(api_fixture_ask(f, API_CHAT, "{" HELLO ",\"stream\":true}"));
    api_fixture_text(f, "Y");
    api_fixture_fail(f, BT_ERR_PEER_GONE, 503, "decode \"3\" is gone");
    assert_int_equal(f->status, 200);
    expect(f,
           ROLE END DELTA("Y") END "data: {\"error\":{\"message\":\"decode \\\"3\\\" is gone\","
                                   "\"type\":\"ServiceUnavailableError\",\"param\":null,\"code\":"
                                   "503}}\n\n" DONE,
           NULL);
    /* Aborted by its owner. */
    assert_true(api_fixture_ask(f, API_CHAT, "{" HELLO ",\"stream\":true}"));
    api_fixture_text(f, "Y");
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "");
    expect(f, ROLE END DELTA("Y") END FINISH("abort", "null") END DONE, NULL);
}

/* Masks of a chat without meta_info have nowhere to go: nothing pays for them. */
static void test_masks_without_meta_info_cost_nothing(void **state) {
    api_fixture *f = *state;
    assert_true(
        api_fixture_ask(f, API_CHAT, "{" HELLO ",\"top_k\":5,\"return_sampling_mask\":true}"));
    assert_int_equal(f->call.request->generation.mask_mode, ROW_MASK_OFF);
    api_fixture_text(f, "Y");
    assert_int_equal(budget_used(&f->limits.memory), 0);
    api_fixture_length(f);
}

static void test_prompts(void **state) {
    static const char *const SAME[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi there\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"name\":null,\"content\":[{\"type\":\"text\",\"text\":"
        "\"Hi \"},{\"type\":\"text\",\"text\":\"there\"}]}],\"tools\":[],\"response_format\":"
        "{\"type\":\"text\"},\"n\":1,\"user\":\"x\",\"metadata\":{\"a\":\"b\"}}",
    };
    api_fixture *f = *state;
    char first[512], second[512];
    assert_true(api_fixture_ask(f, API_CHAT, SAME[0]));
    prompt_ids(f, first, sizeof(first));
    assert_string_equal(f->call.request->model, "tiny");
    api_fixture_length(f);
    assert_true(api_fixture_ask(f, API_CHAT, SAME[1]));
    prompt_ids(f, second, sizeof(second));
    assert_string_equal(first, second);
    assert_memory_equal(first, "318,", 4);
    api_fixture_length(f);
    /* A message never becomes a special token; a conversation has all its parts. */
    assert_true(api_fixture_ask(
        f, API_CHAT,
        "{\"messages\":[{\"role\":\"system\",\"content\":\"\"},{\"role\":\"user\",\"content\":"
        "\"<|im_end|>\"},{\"role\":\"assistant\",\"content\":null}]}"));
    unsigned ends = 0;
    for (uint32_t i = 0; i < f->call.request->prompt.count; i++) {
        ends += f->call.request->prompt.ids[i] == API_FIXTURE_EOS;
    }
    assert_int_equal(ends, 3);
    api_fixture_length(f);
    assert_true(api_fixture_ask(f, API_CHAT, "{\"input_ids\":[1,2,3]}"));
    prompt_ids(f, first, sizeof(first));
    assert_string_equal(first, "1,2,3");
    api_fixture_length(f);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_plain_reply),
        CASE(test_masks_in_meta_info),
        CASE(test_logprobs),
        CASE(test_stop_string),
        CASE(test_stream),
        CASE(test_usage_in_streams),
        CASE(test_stream_with_logprobs),
        CASE(test_failures),
        CASE(test_masks_without_meta_info_cost_nothing),
        CASE(test_prompts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
