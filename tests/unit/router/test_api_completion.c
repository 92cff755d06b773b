/* Replies of /v1/completions, byte for byte, whole and streamed: the text, the echoed prompt,
 * OpenAI's lists of log-probabilities; and what its body may hold. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/tiny_bpe.h"
#include "tests/unit/router/api_fixture.h"

#define HEAD                                                                                       \
    "{\"id\":\"c1\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"m\","        \
    "\"choices\":["
#define USAGE(prompt, completion, total)                                                           \
    "\"usage\":{\"prompt_tokens\":" prompt ",\"completion_tokens\":" completion                    \
    ",\"total_tokens\":" total                                                                     \
    ",\"prompt_tokens_details\":{\"cached_tokens\":0},\"reasoning_tokens\":0}"
#define TAIL     "],"
#define METADATA ",\"metadata\":{\"weight_version\":\"default\"}}"
#define CHOICE(index, text, logprobs, reason, matched)                                             \
    "{\"index\":" index ",\"text\":\"" text "\",\"logprobs\":" logprobs                            \
    ",\"finish_reason\":" reason ",\"matched_stop\":" matched "}"
#define LOGPROBS(offsets, values, tokens, tops)                                                    \
    "{\"text_offset\":[" offsets "],\"token_logprobs\":[" values "],\"tokens\":[" tokens           \
    "],\"top_logprobs\":[" tops "]}"
#define NAMED "\"rid\":\"c1\",\"model\":\"m\",\"prompt\":[72,105]"

static void expect(const api_fixture *f, const char *expected) {
    assert_string_equal(api_fixture_body(f), expected);
}

static void ask(api_fixture *f, const char *body) {
    if (!api_fixture_ask(f, API_COMPLETION, body)) fail_msg("%s\n%s", body, api_fixture_body(f));
}

static void test_a_plain_reply(void **state) {
    api_fixture *f = *state;
    ask(f, "{" NAMED "}");
    assert_int_equal(f->call.request->generation.max_new_tokens, 16);
    api_fixture_text(f, "Yo");
    api_fixture_stop(f, API_FIXTURE_EOS);
    expect(f, HEAD CHOICE("0", "Yo", "null", "\"stop\"", "319") TAIL USAGE("2", "2", "4") METADATA);
    /* Null is the default, which is not open-ended. */
    ask(f, "{" NAMED ",\"max_tokens\":null,\"stop\":[\"q\"]}");
    assert_int_equal(f->call.request->generation.max_new_tokens, 16);
    api_fixture_text(f, "Yq");
    expect(f,
           HEAD CHOICE("0", "Y", "null", "\"stop\"", "\"q\"") TAIL USAGE("2", "2", "4") METADATA);
    /* No token at all, and nothing to score. */
    ask(f, "{" NAMED ",\"max_tokens\":0}");
    api_fixture_length(f);
    expect(f,
           HEAD CHOICE("0", "", "null", "\"length\"", "null") TAIL USAGE("2", "0", "2") METADATA);
}

static void test_samples(void **state) {
    api_fixture *f = *state;
    ask(f, "{" NAMED ",\"n\":2,\"best_of\":2,\"max_tokens\":2}");
    api_fixture_sample_text(f, 0, "ab");
    api_fixture_sample_text(f, 1, "c");
    api_fixture_sample_length(f, 0);
    api_fixture_sample_stop(f, 1, API_FIXTURE_EOS);
    api_fixture_length(f);
    expect(f, HEAD CHOICE("0", "ab", "null", "\"length\"", "null") "," CHOICE(
                  "1", "c", "null", "\"stop\"", "319") TAIL USAGE("2", "3", "5") METADATA);
}

/* ---- log-probabilities ----------------------------------------------------------------------- */

static void feed(api_fixture *f, int32_t token, float logprob, int32_t first, int32_t second) {
    const row_top top[] = {{first, -0.25f}, {second, -0.75f}};
    const token_row row = {.token = token,
                           .has_logprob = 1,
                           .token_logprob = logprob,
                           .top_count = f->call.request->generation.top_logprobs,
                           .top = top};
    assert_true(row.top_count <= 2);
    api_fixture_feed(f, 0, &row);
}

/* Tokens that are no characters are named by their bytes; the drawn one is always in its list, and
 * what has the same name is there once. */
static void test_logprobs(void **state) {
    api_fixture *f = *state;
    ask(f, "{" NAMED ",\"logprobs\":2,\"max_tokens\":5}");
    feed(f, 'a', -0.25f, 'a', '"');
    feed(f, 0xe2, -3.5f, 0xe2, 'b');
    feed(f, 0x82, -4.0f, 'c', 'd');
    feed(f, 0xac, -0.75f, '\\', 0xac);
    feed(f, 'z', -9.0f, 'x', 'x');
    api_fixture_length(f);
    expect(f, HEAD CHOICE(
                  "0", "a\xe2\x82\xacz",
                  LOGPROBS("0,1,1,1,2", "-0.25,-3.5,-4.0,-0.75,-9.0",
                           "\"a\",\"bytes:\\\\xe2\",\"bytes:\\\\x82\",\"bytes:\\\\xac\",\"z\"",
                           "{\"a\":-0.25,\"\\\"\":-0.75},{\"bytes:\\\\xe2\":-0.25,\"b\":-0.75},"
                           "{\"c\":-0.25,\"d\":-0.75,\"bytes:\\\\x82\":-4.0},"
                           "{\"\\\\\":-0.25,\"bytes:\\\\xac\":-0.75},{\"x\":-0.25,\"z\":-9.0}"),
                  "\"length\"", "null") TAIL USAGE("2", "5", "7") METADATA);
    /* None of the largest: the drawn one alone. */
    ask(f, "{" NAMED ",\"logprobs\":0,\"max_tokens\":5}");
    feed(f, 'a', -0.5f, 0, 0);
    feed(f, API_FIXTURE_EOS, -1.5f, 0, 0);
    api_fixture_stop(f, API_FIXTURE_EOS);
    expect(f, HEAD CHOICE("0", "a",
                          LOGPROBS("0,1", "-0.5,-1.5", "\"a\",\"<|im_end|>\"",
                                   "{\"a\":-0.5},{\"<|im_end|>\":-1.5}"),
                          "\"stop\"", "319") TAIL USAGE("2", "2", "4") METADATA);
    ask(f, "{" NAMED ",\"logprobs\":1,\"max_tokens\":0}");
    api_fixture_length(f);
    expect(f, HEAD CHOICE("0", "", LOGPROBS("", "", "", ""), "\"length\"", "null")
                  TAIL USAGE("2", "0", "2") METADATA);
}

/* Text that a stop string took away has no place in which its tokens begin. */
static void test_offsets_of_a_stop_string(void **state) {
    api_fixture *f = *state;
    for (int keeps = 0; keeps <= 1; keeps++) {
        ask(f, keeps ? "{" NAMED ",\"logprobs\":0,\"stop\":\"bcd\",\"no_stop_trim\":true}"
                     : "{" NAMED ",\"logprobs\":0,\"stop\":\"bcd\"}");
        for (const char *at = "abcd"; *at != 0; at++) {
            feed(f, *at, -1.0f, 0, 0);
        }
        assert_non_null(
            strstr(api_fixture_body(f), keeps ? "\"text\":\"abcd\"" : "\"text\":\"a\""));
        assert_non_null(strstr(api_fixture_body(f),
                               keeps ? "\"text_offset\":[0,1,2,3]" : "\"text_offset\":[0,1,1,1]"));
    }
}

/* A character that another token breaks is before that one. */
static void test_offsets_of_broken_characters(void **state) {
    static const int32_t TOKENS[] = {0xe2, 0x82, 'a', 0xac, 'b'};
    api_fixture *f = *state;
    ask(f, "{" NAMED ",\"logprobs\":0,\"max_tokens\":5}");
    for (size_t i = 0; i < BT_ARRAY_COUNT(TOKENS); i++) {
        feed(f, TOKENS[i], -1.0f, 0, 0);
    }
    api_fixture_length(f);
#define BROKEN "\xef\xbf\xbd"
    assert_non_null(strstr(api_fixture_body(f), "\"text\":\"" BROKEN "a" BROKEN "b\","));
    assert_non_null(strstr(api_fixture_body(f), "\"text_offset\":[0,0,1,2,3]"));
}

/* ---- echo ------------------------------------------------------------------------------------ */

static void give_prompt(api_fixture *f, uint32_t count) {
    const uint32_t top = f->call.request->generation.top_logprobs;
    float entries[64];
    size_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        entries[used++] = -1.0f - (float)i;
        for (uint32_t k = 0; k < top; k++) {
            const int32_t id = (int32_t)('p' + k);
            memcpy(&entries[used++], &id, sizeof(id));
            entries[used++] = -0.5f - (float)k;
        }
    }
    api_fixture_prompt(f, 1, entries, count);
}

/* Tokens that are no characters are named by their bytes, what JSON and the name itself escape too.
 */
static void test_names_of_broken_tokens(void **state) {
    static const tiny_merge MERGES[] = {
        {"\xe2", "\""}, {"\xe2", "\\"}, {"\xe2", "~"}, {"\xe2", "\x7f"}};
    static const tiny_bpe BPE = {.merges = MERGES, .merge_count = BT_ARRAY_COUNT(MERGES)};
    api_fixture *f = *state;
    tokenizer *t;
    bt_error error;
    if (tiny_bpe_load(&BPE, &t, &error) != BT_OK) fail_msg("%s", error.text);
    f->settings.tokenizer = t;
    ask(f, "{" NAMED ",\"logprobs\":0}");
    for (int i = 0; i < 4; i++) {
        api_fixture_row(f, 256 + i, -1);
    }
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f),
                           "\"tokens\":[\"bytes:\\\\xe2\\\\x22\",\"bytes:\\\\xe2\\\\x5c\","
                           "\"bytes:\\\\xe2~\",\"bytes:\\\\xe2\\\\x7f\"]"));
    f->settings.tokenizer = f->tokenizer;
    ask(f, "{" NAMED "}"); /* the other one is not referred to any more */
    tokenizer_destroy(t);
    api_fixture_abort(f);
}

static void test_an_echo(void **state) {
    api_fixture *f = *state;
    ask(f, "{" NAMED ",\"echo\":true,\"max_tokens\":1}");
    assert_int_equal(f->call.request->generation.wants_prompt_logprobs, 0);
    api_fixture_text(f, "!");
    api_fixture_length(f);
    expect(f, HEAD CHOICE("0", "Hi!", "null", "\"length\"", "null") TAIL USAGE("2", "1", "3")
                  METADATA);
    /* A text is repeated as it was written, ids as they decode. */
    ask(f, "{\"prompt\":\"a<|im_end|>\\u20ac\\n\\\"\",\"echo\":true,\"max_tokens\":1}");
    api_fixture_text(f, "!");
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"text\":\"a<|im_end|>\xe2\x82\xac\\n\\\"!\","));
    ask(f, "{\"prompt\":[97,319,226,130],\"echo\":true,\"max_tokens\":1}");
    api_fixture_text(f, "!");
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"text\":\"a\xef\xbf\xbd!\","));
    ask(f, "{\"prompt\":[97,319],\"echo\":true,\"max_tokens\":0,\"skip_special_tokens\":false}");
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"text\":\"a<|im_end|>\","));
}

/* As evaluation harnesses score: echo, logprobs and no or one token. */
static void test_an_echo_with_logprobs(void **state) {
    api_fixture *f = *state;
    ask(f, "{\"rid\":\"c1\",\"model\":\"m\",\"prompt\":[72,226,130,172,319,105],\"echo\":true,"
           "\"logprobs\":1,\"max_tokens\":1,\"temperature\":0}");
    assert_int_equal(f->call.request->generation.wants_prompt_logprobs, 1);
    assert_int_equal(f->call.request->generation.prompt_logprobs_from, 0);
    feed(f, '!', -0.25f, '!', 0);
    assert_int_equal(f->begin_count, 0);
    give_prompt(f, 5);
    api_fixture_length(f);
#define PROMPT_TOPS                                                                                \
    "null,{\"p\":-0.5,\"bytes:\\\\xe2\":-1.0},{\"p\":-0.5,\"bytes:\\\\x82\":-2.0},"                \
    "{\"p\":-0.5,\"bytes:\\\\xac\":-3.0},{\"p\":-0.5,\"<|im_end|>\":-4.0},{\"p\":-0.5,\"i\":-5.0}"
#define PROMPT_TOKENS                                                                              \
    "\"H\",\"bytes:\\\\xe2\",\"bytes:\\\\x82\",\"bytes:\\\\xac\",\"<|im_end|>\",\"i\""
    expect(f, HEAD CHOICE("0", "H\xe2\x82\xaci!",
                          LOGPROBS("0,1,1,1,2,2,3", "null,-1.0,-2.0,-3.0,-4.0,-5.0,-0.25",
                                   PROMPT_TOKENS ",\"!\"", PROMPT_TOPS ",{\"!\":-0.25}"),
                          "\"length\"", "null") TAIL USAGE("6", "1", "7") METADATA);
    ask(f, "{\"rid\":\"c1\",\"model\":\"m\",\"prompt\":[72,226,130,172,319,105],\"echo\":true,"
           "\"logprobs\":1,\"max_tokens\":0}");
    give_prompt(f, 5);
    api_fixture_length(f);
    expect(f, HEAD CHOICE("0", "H\xe2\x82\xaci",
                          LOGPROBS("0,1,1,1,2,2", "null,-1.0,-2.0,-3.0,-4.0,-5.0", PROMPT_TOKENS,
                                   PROMPT_TOPS),
                          "\"length\"", "null") TAIL USAGE("6", "0", "6") METADATA);
    /* A prompt of one token has no other entry. */
    ask(f, "{\"prompt\":[72],\"echo\":true,\"logprobs\":1,\"max_tokens\":1}");
    feed(f, '!', -0.25f, '!', 0);
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"token_logprobs\":[null,-0.25]"));
    assert_non_null(strstr(api_fixture_body(f), "\"top_logprobs\":[null,{\"!\":-0.25}]"));
}

/* Of a prompt of text the tokens are found in it, special ones too. */
static void test_offsets_of_a_prompt_of_text(void **state) {
    api_fixture *f = *state;
    ask(f, "{\"prompt\":\"<|im_start|>\\u20ac<|im_end|>\",\"echo\":true,\"logprobs\":0,"
           "\"max_tokens\":0}");
    const uint32_t count = f->call.request->prompt.count;
    assert_true(count >= 3);
    give_prompt(f, count - 1);
    api_fixture_length(f);
    assert_non_null(strstr(api_fixture_body(f), "\"text\":\"<|im_start|>\xe2\x82\xac<|im_end|>\""));
    assert_non_null(strstr(api_fixture_body(f), "{\"text_offset\":[0,12,"));
    assert_non_null(strstr(api_fixture_body(f), ",13],\"token_logprobs\":[null,-1.0"));
}

/* ---- streams --------------------------------------------------------------------------------- */

#define EVENT(choice) "data: " HEAD choice "]}\n\n"
#define DONE          "data: [DONE]\n\n"

static void test_a_stream(void **state) {
    api_fixture *f = *state;
    ask(f, "{" NAMED ",\"stream\":true}");
    assert_int_equal(f->begin_count, 0);
    api_fixture_text(f, "Y");
    assert_string_equal(f->content_type, "text/event-stream");
    api_fixture_text(f, "\xe2\x82");
    api_fixture_text(f, "\xac");
    api_fixture_row(f, API_FIXTURE_EOS, 0);
    api_fixture_stop(f, API_FIXTURE_EOS);
    expect(f, EVENT(CHOICE("0", "Y", "null", "null", "null"))
                  EVENT(CHOICE("0", "\xe2\x82\xac", "null", "null", "null"))
                      EVENT(CHOICE("0", "", "null", "\"stop\"", "319")) DONE);
    assert_int_equal(f->granted_bytes, 5 * ROW_RECORD_HEADER_BYTES);
}

/* The last allowed token comes with the reason; usage behind it when asked for. */
static void test_usage_in_streams(void **state) {
    api_fixture *f = *state;
    ask(f, "{" NAMED ",\"stream\":true,\"max_tokens\":2,\"stream_options\":{\"include_usage\":true}"
           "}");
    api_fixture_text(f, "Yo");
    api_fixture_length(f);
    expect(f, EVENT(CHOICE("0", "Y", "null", "null", "null"))
                  EVENT(CHOICE("0", "o", "null", "\"length\"", "null")) "data: " HEAD "]," USAGE(
                      "2", "2", "4") "}\n\n" DONE);
    ask(f, "{" NAMED ",\"stream\":true,\"max_tokens\":2,\"stream_options\":{"
           "\"continuous_usage_stats\":true}}");
    api_fixture_text(f, "Yo");
    api_fixture_length(f);
    expect(f, "data: " HEAD CHOICE("0", "Y", "null", "null", "null") "]," USAGE(
                  "2", "1", "3") "}\n\ndata: " HEAD CHOICE("0", "o", "null", "\"length\"",
                                                           "null") "]," USAGE("2", "2",
                                                                              "4") "}\n\n" DONE);
    /* Nothing to say but the end. */
    ask(f, "{" NAMED ",\"stream\":true,\"max_tokens\":0}");
    api_fixture_length(f);
    expect(f, EVENT(CHOICE("0", "", "null", "\"length\"", "null")) DONE);
}

/* The prompt comes with the first event of each sample. */
static void test_an_echo_in_a_stream(void **state) {
    api_fixture *f = *state;
    ask(f, "{" NAMED ",\"stream\":true,\"echo\":true,\"logprobs\":0,\"max_tokens\":3,\"n\":2,"
           "\"return_prompt_token_ids\":true}");
    give_prompt(f, 1);
    for (uint32_t i = 0; i < 4; i++) {
        api_fixture_sample_row(f, i % 2, 'a' + (int32_t)i, -2.0f);
    }
    api_fixture_length(f);
#define ECHOED(index, text, offsets, values, tokens, tops)                                         \
    "data: " HEAD "{\"index\":" index ",\"text\":\"" text "\",\"logprobs\":" LOGPROBS(             \
        offsets, values, tokens, tops) ",\"finish_reason\":null,\"matched_stop\":null,"            \
                                       "\"prompt_token_ids\":[72,105]}]}\n\n"
    expect(f, ECHOED("0", "Hia", "0,1,2", "null,-1.0,-2.0", "\"H\",\"i\",\"a\"",
                     "null,{\"i\":-1.0},{\"a\":-2.0}") ECHOED("1", "Hib", "0,1,2", "null,-1.0,-2.0",
                                                              "\"H\",\"i\",\"b\"",
                                                              "null,{\"i\":-1.0},{\"b\":-2.0}")
                  EVENT(CHOICE("0", "c", LOGPROBS("3", "-2.0", "\"c\"", "{\"c\":-2.0}"), "null",
                               "null"))
                      EVENT(CHOICE("1", "d", LOGPROBS("3", "-2.0", "\"d\"", "{\"d\":-2.0}"), "null",
                                   "null"))
                          EVENT(CHOICE("0", "", LOGPROBS("", "", "", ""), "\"length\"", "null"))
                              EVENT(CHOICE("1", "", LOGPROBS("", "", "", ""), "\"length\"", "null"))
                                  DONE);
}

static void test_failures(void **state) {
    static const char NESTED[] =
        "{\"error\":{\"message\":\"too wide\",\"type\":\"BadRequestError\",\"param\":null,\"code\":"
        "400},\"object\":\"error\",\"message\":\"too wide\",\"type\":\"BadRequestError\",\"param\":"
        "null,\"code\":400}";
    api_fixture *f = *state;
    for (int is_stream = 0; is_stream <= 1; is_stream++) {
        ask(f, is_stream ? "{" NAMED ",\"stream\":true,\"n\":2}" : "{" NAMED ",\"n\":2}");
        api_fixture_fail(f, BT_ERR_REQUEST_INVALID, 400, "too wide");
        assert_int_equal(f->status, 400);
        expect(f, NESTED);
    }
    ask(f, "{" NAMED ",\"stream\":true}");
    api_fixture_text(f, "Y");
    api_fixture_fail(f, BT_ERR_PEER_GONE, 503, "decode \"3\" is gone");
    assert_int_equal(f->status, 200);
    expect(f, EVENT(CHOICE(
                  "0", "Y", "null", "null",
                  "null")) "data: {\"error\":{\"message\":\"decode \\\"3\\\" is gone\",\"type\":"
                           "\"ServiceUnavailableError\",\"param\":null,\"code\":503}}\n\n" DONE);
    /* Aborted by its owner. */
    ask(f, "{" NAMED ",\"stream\":true}");
    api_fixture_text(f, "Y");
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "");
    expect(f, EVENT(CHOICE("0", "Y", "null", "null", "null"))
                  EVENT(CHOICE("0", "", "null", "\"abort\"", "null")) DONE);
}

/* ---- lists of prompts ------------------------------------------------------------------------ */

#define TWO "\"rid\":\"c1\",\"model\":\"m\",\"prompt\":[[72],[105,33,34]]"

/* The choices of the first prompt come first; ids, usage and the object's name. */
static void test_a_list(void **state) {
    api_fixture *f = *state;
    ask(f, "{" TWO ",\"n\":2,\"max_tokens\":1}");
    assert_int_equal(f->call.batch.count, 2);
    assert_string_equal(f->call.items[1].request->rid, "c1_1");
    for (uint32_t i = 0; i < 4; i++) {
        api_fixture_sample_row(f, i, 'a' + (int32_t)i, 0);
    }
    api_fixture_length(f);
#define LENGTH(index, text) CHOICE(index, text, "null", "\"length\"", "null")
    expect(f, HEAD LENGTH("0", "a") "," LENGTH("1", "b") "," LENGTH("2", "c") "," LENGTH("3", "d")
                  TAIL USAGE("4", "4", "8") METADATA);
    /* One prompt in a list is one choice; the ids say that it was one. */
    ask(f, "{\"rid\":\"c1\",\"model\":\"m\",\"prompt\":[[72,105]],\"max_tokens\":1,"
           "\"return_meta_info\":true}");
    api_fixture_text(f, "a");
    api_fixture_length(f);
    assert_memory_equal(api_fixture_body(f), "{\"id\":\"c1\",\"object\"", 19);
    assert_non_null(strstr(api_fixture_body(f), "\"meta_info\":{\"id\":\"c1_0\","));
    /* Without a name all items share the one that is made. */
    ask(f, "{\"prompt\":[\"a\",\"b\",[1]],\"max_tokens\":1}");
    assert_int_equal(f->call.batch.count, 3);
    const char *first = f->call.items[0].request->rid, *third = f->call.items[2].request->rid;
    assert_int_equal(strlen(first), 34);
    assert_memory_equal(first, third, 33);
    assert_int_equal(third[33], '2');
    assert_true(f->call.items[0].request->generation.seed !=
                f->call.items[1].request->generation.seed);
    api_fixture_length(f);
    assert_memory_equal(api_fixture_body(f) + 7, first, 32);
    assert_int_equal(api_fixture_body(f)[39], '"');
}

/* Each prompt is echoed and scored by itself, whole and streamed; stop strings are shared. */
static void test_a_list_with_echoes(void **state) {
    static const float SCORES[] = {-1.5f, -2.5f};
    api_fixture *f = *state;
    for (int streams = 0; streams <= 1; streams++) {
        ask(f, streams ? "{" TWO ",\"echo\":true,\"logprobs\":0,\"stop\":\"x\",\"stream\":true}"
                       : "{" TWO ",\"echo\":true,\"logprobs\":0,\"stop\":\"x\"}");
        api_fixture_sample_row(f, 0, 'a', -0.5f);
        assert_int_equal(f->begin_count, streams);
        api_fixture_sample_row(f, 1, 'b', -0.25f);
        api_fixture_sample_row(f, 0, 'x', -0.75f);
        api_fixture_item_prompt(f, 1, 1, SCORES, 2);
        api_fixture_sample_row(f, 1, 'x', -0.75f);
        api_fixture_length(f);
        const char *body = api_fixture_body(f);
        assert_non_null(strstr(body, "{\"index\":0,\"text\":\"Ha\","));
        assert_non_null(strstr(body, "{\"index\":1,\"text\":\"i!\\\"b\","));
        assert_non_null(strstr(body, "\"token_logprobs\":[null,-1.5,-2.5,-0.25"));
        assert_non_null(strstr(body, "\"token_logprobs\":[null,-0.5"));
        assert_non_null(strstr(body, "\"finish_reason\":\"stop\",\"matched_stop\":\"x\""));
        assert_non_null(strstr(body, "\"text_offset\":[0,1,2,3"));
    }
}

/* A prompt that fails alone is its choice's end; when all fail before any token it is the answer.
 */
static void test_failures_of_a_list(void **state) {
    api_fixture *f = *state;
    for (int streams = 0; streams <= 1; streams++) {
        const char *body = streams ? "{" TWO ",\"stream\":true}" : "{" TWO "}";
        ask(f, body);
        api_fixture_sample_text(f, 0, "a");
        api_fixture_sample_fail(f, 1, BT_ERR_REQUEST_INVALID, 400, "too wide");
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
        assert_non_null(strstr(api_fixture_body(f), CHOICE("1", "", "null", "\"abort\"", "null")));
        assert_null(strstr(api_fixture_body(f), "\"error\""));
        ask(f, body);
        api_fixture_sample_fail(f, 1, BT_ERR_REQUEST_INVALID, 400, "too wide");
        assert_int_equal(f->begin_count, 0);
        api_fixture_sample_fail(f, 0, BT_ERR_PEER_GONE, 503, "gone");
        api_fixture_length(f);
        assert_int_equal(f->status, 503);
        assert_non_null(strstr(api_fixture_body(f), "{\"error\":{\"message\":\"gone\""));
    }
}

/* The second prompt's scores never come: its rows are told without, and its end is a failure. */
static void test_a_list_whose_scores_are_lost(void **state) {
    api_fixture *f = *state;
    for (int i = 0; i < 4; i++) {
        const int rows = i % 2;
        ask(f, i < 2 ? "{" TWO ",\"echo\":true,\"logprobs\":0,\"return_meta_info\":true}"
                     : "{" TWO ",\"echo\":true,\"logprobs\":0,\"return_meta_info\":true,"
                       "\"stream\":true}");
        api_fixture_sample_row(f, 0, 'a', -0.5f);
        if (rows == 1) api_fixture_sample_row(f, 1, 'b', -0.25f);
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
        assert_int_equal(f->end_count, 1);
        const char *body = api_fixture_body(f);
        assert_non_null(strstr(body, "{\"index\":0,\"text\":\"Ha\","));
        assert_non_null(strstr(body, "log-probabilities of the prompt were lost"));
        assert_null(strstr(body, "i!"));
        assert_int_equal(strstr(body, "{\"index\":1,\"text\":\"b\",") != NULL, rows);
        assert_non_null(strstr(body, "\"finish_reason\":\"abort\""));
    }
}

#ifdef BT_FAULT
static void feed_all(api_fixture *f) {
    static const float SCORES[] = {-1.5f, -2.5f};
    for (uint32_t i = 0; i < 80; i++) {
        api_fixture_sample_row(f, i % 2, 66, -1);
    }
    api_fixture_item_prompt(f, 1, 1, SCORES, 2);
}

static void test_out_of_memory(void **state) {
    api_fixture *f = *state;
    for (int i = 0; i < 4; i++) {
        char body[256];
        snprintf(body, sizeof(body),
                 "{\"prompt\":%s,\"echo\":true,\"logprobs\":0,\"stop\":\"x\"%s}",
                 i < 2 ? "[[72],[105,33,34]]" : "[\"a\",\"\\u20ac\"]",
                 i % 2 == 0 ? "" : ",\"stream\":true");
        api_fixture_run_out_of_memory(f, API_COMPLETION, body, feed_all);
    }
}
#endif

/* ---- bodies ---------------------------------------------------------------------------------- */

#define P "\"prompt\":[1],"
static const api_refusal REFUSALS[] = {
    {"{", "invalid JSON at byte 1"},
    {"[]", "the body must be a JSON object, got a list."},
    {"{}", "prompt is required."},
    {"{\"prompt\":null}", "prompt is required."},
    {"{\"text\":\"a\"}", "prompt is required."},
    {"{\"prompt\":5}",
     "prompt must be a string, a list of token ids or a list of these, got a number."},
    {"{\"prompt\":{}}",
     "prompt must be a string, a list of token ids or a list of these, got an object."},
    {"{\"prompt\":true}",
     "prompt must be a string, a list of token ids or a list of these, got a boolean."},
    {"{\"prompt\":\"\"}", "The prompt is empty."},
    {"{\"prompt\":[]}", "prompt cannot be empty."},
    {"{\"prompt\":[1,151936]}", "prompt[1] must be a token id in [0, 151935], got 151936."},
    {"{\"prompt\":[-1]}", "prompt[0] must be a token id in [0, 151935], got -1."},
    {"{\"prompt\":[1,2.5]}", "prompt[1] must be a token id in [0, 151935], got 2.5."},
    {"{\"prompt\":[true]}", "prompt[0] must be a token id in [0, 151935], got true."},
    {"{\"prompt\":[null]}", "prompt[0] must be a token id in [0, 151935], got null."},
    {"{\"prompt\":[[1],[2,-1]]}", "[1]: prompt[1] must be a token id in [0, 151935], got -1."},
    {"{\"prompt\":[\"a\",5]}",
     "[1]: prompt must be a string, a list of token ids or a list of these, got a number."},
    {"{\"prompt\":[\"a\",\"\"]}", "[1]: The prompt is empty."},
    {"{\"prompt\":[[],[1]]}", "[0]: prompt cannot be empty."},
    {"{\"prompt\":[[\"a\"]]}", "[0]: prompt[0] must be a token id in [0, 151935], got"},
    {"{\"prompt\":[1,\"a\"]}", "prompt[1] must be a token id in [0, 151935], got"},
    {"{\"prompt\":[\"a\",null]}", "[1]: prompt must be a string, a list of token ids"},
    {"{\"prompt\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\"]}",
     "a list of 7 prompts is longer than --batch-max=6."},
    {"{\"prompt\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\"],\"n\":22}",
     "n asks for 132 samples of the list's prompts together"},
    {"{\"prompt\":[\"a\",\"b\"],\"temperature\":-1}",
     "\"temperature must be a non-negative finite number, got -1."},
    {"{\"prompt\":[\"a\",[3,3]],\"max_tokens\":199}",
     "[1]: Requested token count exceeds the model's maximum context length of 200 tokens."},
    {"{" P "\"model\":7}", "model must be a string, got a number."},
    {"{" P "\"max_tokens\":-1}", "max_tokens must be at least 0, got -1."},
    {"{" P "\"max_tokens\":1.5}", "max_tokens must be an integer of 64 bits, got a number."},
    {"{" P "\"max_tokens\":\"5\"}", "max_tokens must be an integer of 64 bits, got a string."},
    {"{" P "\"max_tokens\":200}", "exceeds the model's maximum context length of 200 tokens."},
    {"{" P "\"min_tokens\":17}", "min_tokens must be in [0, max_tokens=16], got 17."},
    {"{" P "\"temperature\":-1}", "temperature must be a non-negative finite number, got -1."},
    {"{" P "\"temperature\":\"x\"}", "temperature must be a number, got a string."},
    {"{" P "\"top_p\":0}", "top_p must be in (0, 1], got 0."},
    {"{" P "\"top_k\":0}", "top_k must be -1 (disable) or at least 1, got 0."},
    {"{" P "\"min_p\":2}", "min_p must be in [0, 1], got 2."},
    {"{" P "\"n\":0}", "n must be in [1, 128], got 0."},
    {"{" P "\"n\":\"2\"}", "n must be an integer of 64 bits, got a string."},
    {"{" P "\"best_of\":2}",
     "best_of must be 1 or n=1, got 2: choosing among samples is not supported."},
    {"{" P "\"n\":2,\"best_of\":3}", "best_of must be 1 or n=2, got 3"},
    {"{" P "\"best_of\":0}", "best_of must be 1 or n=1, got 0"},
    {"{" P "\"best_of\":true}", "best_of must be an integer of 64 bits, got a boolean."},
    {"{" P "\"echo\":1}", "echo must be a boolean, got a number."},
    {"{" P "\"echo\":\"true\"}", "echo must be a boolean, got a string."},
    {"{" P "\"logprobs\":21}", "logprobs must be in [0, 20], got 21."},
    {"{" P "\"logprobs\":-1}", "logprobs must be in [0, 20], got -1."},
    {"{" P "\"logprobs\":true}", "logprobs must be an integer of 64 bits, got a boolean."},
    {"{" P "\"logprobs\":[1]}", "logprobs must be an integer of 64 bits, got a list"},
    {"{" P "\"stop\":5}", "stop must be a string or a list of strings, got 5."},
    {"{" P "\"stop_token_ids\":5}", "stop_token_ids must be a list of token ids, got 5."},
    {"{" P "\"suffix\":\"x\"}", "suffix is not supported."},
    {"{" P "\"suffix\":5}", "suffix is not supported."},
    {"{" P "\"stream\":\"yes\"}", "stream must be a boolean, got a string."},
    {"{" P "\"stream_options\":5}", "stream_options must be an object, got a number."},
    {"{" P "\"stream_options\":{\"include_usage\":1}}",
     "include_usage must be a boolean, got a number."},
    {"{" P "\"logit_bias\":{\"5\":101}}", "logit_bias of token 5 must be in [-100, 100], got 101."},
    {"{" P "\"logit_bias\":[]}", "logit_bias must be an object, got a list."},
    {"{" P "\"frequency_penalty\":3}", "frequency_penalty must be in [-2, 2], got 3."},
    {"{" P "\"presence_penalty\":-3}", "presence_penalty must be in [-2, 2], got -3."},
    {"{" P "\"repetition_penalty\":0}", "repetition_penalty must be in (0, 2]"},
    {"{" P "\"seed\":\"x\"}", "seed must be an integer of 64 bits, got a string."},
    {"{" P "\"ignore_eos\":1}", "ignore_eos must be a boolean, got a number."},
    {"{" P "\"rid\":5}", "rid must be a string, got a number."},
    {"{" P "\"cache_salt\":5}", "cache_salt must be a string, got a number."},
    {"{" P "\"return_meta_info\":1}", "return_meta_info must be a boolean, got a number."},
    {"{" P "\"return_token_ids\":\"x\"}", "return_token_ids must be a boolean, got a string."},
    {"{" P "\"return_prompt_token_ids\":0}",
     "return_prompt_token_ids must be a boolean, got a number."},
    {"{" P "\"return_sampling_mask\":1}", "return_sampling_mask must be a boolean, got a number."},
    {"{" P "\"return_sampling_mask\":true}",
     "return_sampling_mask requires top_k=1 for greedy sampling"},
    {"{" P "\"return_sampling_mask\":true,\"sampling_logprobs_mode\":\"all\"}",
     "sampling_logprobs_mode must be 'selected' or 'support', got 'all'."},
    {"{" P "\"sampling_filter\":\"x\"}", "sampling_filter must be 'joint' or 'rank', got 'x'."},
    {"{" P "\"stream_interval\":0}", "stream_interval must be at least 1, got 0."},
    {"{" P "\"response_format\":{\"type\":\"json_object\"}}",
     "response_format is not supported yet, but for"},
    {"{" P "\"regex\":\"a\"}", "regex is not supported yet."},
    {"{" P "\"json_schema\":\"{}\"}", "json_schema is not supported yet."},
    {"{" P "\"ebnf\":\"a\"}", "ebnf is not supported yet."},
    {"{" P "\"lora_path\":\"x\"}", "lora_path is not supported yet."},
    {"{" P "\"session_params\":{\"id\":1}}", "session_params is not supported yet."},
    {"{" P "\"custom_logit_processor\":\"x\"}", "only supports DisallowedTokensLogitsProcessor."},
    {"{" P "\"return_hidden_states\":true}", "return_hidden_states is not supported yet."},
    {"{" P "\"bootstrap_room\":3}", "bootstrap_room is not supported yet."},
};

static void test_refusals(void **state) {
    api_fixture_expect_refusals(*state, API_COMPLETION, REFUSALS, BT_ARRAY_COUNT(REFUSALS));
}

static void test_odd_but_accepted(void **state) {
    static const char *const BODIES[] = {
        "{\"model\":\"x\",\"prompt\":\"a\",\"suffix\":\"\",\"echo\":false,\"best_of\":1,\"n\":1,"
        "\"user\":\"u\",\"logprobs\":null,\"stop\":null,\"logit_bias\":null,\"seed\":null,"
        "\"stream\":null,\"stream_options\":null,\"response_format\":null,\"regex\":null}",
        "{\"prompt\":\"a\",\"n\":3,\"best_of\":1}",
        "{\"prompt\":\"a\",\"max_tokens\":16.0,\"logprobs\":20,\"temperature\":0,\"top_k\":-1}",
        "{\"prompt\":[1],\"prompt\":[72]}",
        "{\"prompt\":\"a\",\"whatever\":{},\"repetition_penalty\":1.0,\"lora_path\":\"\"}",
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(BODIES); i++) {
        ask(f, BODIES[i]);
        assert_true(f->call.request->prompt.ids[0] >= 72);
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
    }
    ask(f, "{\"prompt\":[1],\"seed\":9,\"presence_penalty\":1.5,\"min_tokens\":2,\"ignore_eos\":"
           "true,\"min_p\":0.5,\"top_k\":7,\"top_p\":0.5,\"temperature\":0.25}");
    const proto_generation *g = &f->call.request->generation;
    assert_int_equal(g->seed, 9);
    assert_true(g->presence_penalty == 1.5f && g->min_p == 0.5f && g->top_p == 0.5f);
    assert_int_equal(g->min_new_tokens, 2);
    assert_int_equal(g->stop_id_count, 0);
    assert_int_equal(g->top_k, 7);
    assert_true(g->temperature == 0.25f);
    assert_string_equal(f->call.request->model, "tiny");
    api_fixture_abort(f);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_a_plain_reply),
        CASE(test_samples),
        CASE(test_logprobs),
        CASE(test_offsets_of_a_stop_string),
        CASE(test_offsets_of_broken_characters),
        CASE(test_names_of_broken_tokens),
        CASE(test_an_echo),
        CASE(test_an_echo_with_logprobs),
        CASE(test_offsets_of_a_prompt_of_text),
        CASE(test_a_stream),
        CASE(test_usage_in_streams),
        CASE(test_an_echo_in_a_stream),
        CASE(test_failures),
        CASE(test_a_list),
        CASE(test_a_list_with_echoes),
        CASE(test_failures_of_a_list),
        CASE(test_a_list_whose_scores_are_lost),
#ifdef BT_FAULT
        CASE(test_out_of_memory),
#endif
        CASE(test_refusals),
        CASE(test_odd_but_accepted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
