/* Every request that is refused at the door: its status, its sentence and the shape of its body;
 * and what is accepted although it looks odd. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "router/api_words.h"
#include "tests/unit/router/api_fixture.h"

static const api_refusal GENERATE[] = {
    /* Bodies that cannot be read. */
    {"", API_SCHEMA("invalid JSON at byte 0: the body is empty")},
    {"[]", API_SCHEMA("the body must be a JSON object, got a list.")},
    {"{\"text\":\"a\"} x", API_SCHEMA("invalid JSON at byte 13: more text after the value")},
    {"{\"text\":\"\\ud83d\"}", API_SCHEMA("invalid JSON at byte 10: a lone surrogate")},
    {"{\"text\":\"\xff\"}", API_SCHEMA("invalid JSON at byte 9: bytes that are not UTF-8")},
    /* Prompts. */
    {"{}", API_SCHEMA("Exactly one of text and input_ids must be given.")},
    {"{\"text\":null}", API_SCHEMA("Exactly one of text and input_ids must be given.")},
    {"{\"text\":\"a\",\"input_ids\":[1]}",
     API_SCHEMA("Exactly one of text and input_ids must be given.")},
    {"{\"text\":5}", API_SCHEMA("text must be a string, got a number.")},
    {"{\"text\":\"\"}", API_PLAIN("The prompt is empty.")},
    {"{\"input_ids\":[]}", API_PLAIN("input_ids cannot be empty.")},
    {"{\"input_ids\":\"x\"}", API_SCHEMA("input_ids must be a list of token ids, got a string.")},
    {"{\"input_ids\":[1,[2]]}",
     API_SCHEMA("input_ids[1] must be a token id in [0, 151935], got [2].")},
    {"{\"input_ids\":[1,151936]}",
     API_SCHEMA("input_ids[1] must be a token id in [0, 151935], got 151936.")},
    {"{\"input_ids\":[-1]}", API_SCHEMA("input_ids[0] must be a token id in [0, 151935], got -1.")},
    {"{\"input_ids\":[1.0]}",
     API_SCHEMA("input_ids[0] must be a token id in [0, 151935], got 1.0.")},
    {"{\"input_ids\":[true]}",
     API_SCHEMA("input_ids[0] must be a token id in [0, 151935], got true.")},
    {"{\"input_ids\":[1e999]}", "must be a token id in [0, 151935], got 1e999."},
    {"{\"input_ids\":[99999999999999999999]}", "must be a token id"},
    /* Types. */
    {"{\"input_ids\":[1],\"stream\":\"yes\"}",
     API_SCHEMA("stream must be a boolean, got a string.")},
    {"{\"input_ids\":[1],\"return_logprob\":[true]}",
     API_SCHEMA("return_logprob must be a boolean, got a list.")},
    {"{\"input_ids\":[1],\"return_sampling_mask\":1}",
     API_SCHEMA("return_sampling_mask must be a boolean, got a number.")},
    {"{\"input_ids\":[1],\"rid\":5}", API_SCHEMA("rid must be a string, got a number.")},
    {"{\"input_ids\":[1],\"rid\":\"a\\u0000\"}", API_SCHEMA("rid holds a NUL character.")},
    {"{\"input_ids\":[1],\"sampling_params\":[{}]}",
     API_SCHEMA("sampling_params must be an object, got a list.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"temperature\":\"hot\"}}",
     API_SCHEMA("temperature must be a number, got a string.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"top_k\":1.5}}",
     API_SCHEMA("top_k must be an integer of 64 bits, got a number.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"max_new_tokens\":true}}",
     API_SCHEMA("max_new_tokens must be an integer of 64 bits, got a boolean.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"ignore_eos\":0}}",
     API_SCHEMA("ignore_eos must be a boolean, got a number.")},
    /* Values. */
    {"{\"input_ids\":[1],\"sampling_params\":{\"temperature\":-1}}",
     API_PLAIN("temperature must be a non-negative finite number, got -1.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"temperature\":1e400}}",
     API_PLAIN("temperature must be a non-negative finite number, got 1e400.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"top_p\":0}}",
     API_PLAIN("top_p must be in (0, 1], got 0.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"top_p\":1.01}}",
     API_PLAIN("top_p must be in (0, 1], got 1.01.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"top_k\":0}}",
     API_PLAIN("top_k must be -1 (disable) or at least 1, got 0.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"top_k\":-2}}",
     API_PLAIN("top_k must be -1 (disable) or at least 1, got -2.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_p\":1.5}}",
     API_PLAIN("min_p must be in [0, 1], got 1.5.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"frequency_penalty\":2.5}}",
     API_PLAIN("frequency_penalty must be in [-2, 2], got 2.5.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"presence_penalty\":-3}}",
     API_PLAIN("presence_penalty must be in [-2, 2], got -3.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"repetition_penalty\":0}}",
     API_PLAIN("repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"max_new_tokens\":-1}}",
     API_PLAIN("max_new_tokens must be at least 0, got -1.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"max_new_tokens\":2147483648}}",
     API_PLAIN("max_new_tokens must be at most 2147483647, got 2147483648.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_new_tokens\":1e10}}",
     API_PLAIN("min_new_tokens must be at most 2147483647, got 1e10.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"stop\":3}}",
     API_PLAIN("stop must be a string or a list of strings, got 3.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"stop\":[null]}}",
     API_PLAIN("stop must be a string or a list of strings, got [null].")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"stop_token_ids\":7}}",
     API_PLAIN("stop_token_ids must be a list of token ids, got 7.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"stream_interval\":0}}",
     API_PLAIN("stream_interval must be at least 1, got 0.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"stream_interval\":4294967296}}",
     API_PLAIN("stream_interval must be at most 2147483647, got 4294967296.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"temprature\":1}}",
     API_PLAIN("Unexpected sampling parameter 'temprature'.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_p\":-0.001}}",
     API_PLAIN("min_p must be in [0, 1], got -0.001.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_p\":\"x\"}}",
     API_SCHEMA("min_p must be a number, got a string.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_p\":1e400}}",
     API_PLAIN("min_p must be in [0, 1], got 1e400.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"frequency_penalty\":-2.001}}",
     API_PLAIN("frequency_penalty must be in [-2, 2], got -2.001.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"frequency_penalty\":[1]}}",
     API_SCHEMA("frequency_penalty must be a number, got a list.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"presence_penalty\":true}}",
     API_SCHEMA("presence_penalty must be a number, got a boolean.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"repetition_penalty\":2.001}}",
     API_PLAIN("repetition_penalty must be in (0, 2] (1.0 = no penalty), got 2.001.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"repetition_penalty\":-0.5}}",
     API_PLAIN("repetition_penalty must be in (0, 2] (1.0 = no penalty), got -0.5.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"n\":0}}",
     API_PLAIN("n must be in [1, 128], got 0.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"n\":129}}",
     API_PLAIN("n must be in [1, 128], got 129.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"n\":-3}}",
     API_PLAIN("n must be in [1, 128], got -3.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"n\":1.5}}",
     API_SCHEMA("n must be an integer of 64 bits, got a number.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"n\":\"2\"}}",
     API_SCHEMA("n must be an integer of 64 bits, got a string.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_new_tokens\":-1}}",
     API_PLAIN("min_new_tokens must be at least 0, got -1.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_new_tokens\":129}}",
     API_PLAIN("min_new_tokens must be in [0, max_new_tokens=128], got 129.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_new_tokens\":6,\"max_new_tokens\":5}}",
     API_PLAIN("min_new_tokens must be in [0, max_new_tokens=5], got 6.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_new_tokens\":200,\"max_new_tokens\":null}}",
     API_PLAIN("min_new_tokens must be in [0, max_new_tokens=199], got 200.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"min_new_tokens\":{}}}",
     API_SCHEMA("min_new_tokens must be an integer of 64 bits, got an object.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":[1]}}",
     API_SCHEMA("logit_bias must be an object, got a list.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"151936\":1}}}",
     API_PLAIN("logit_bias must has keys in [0, 151935], got 151936.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"-1\":1}}}",
     API_PLAIN("logit_bias must has keys in [0, 151935], got -1.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"the\":1}}}",
     API_PLAIN("logit_bias must has keys in [0, 151935], got the.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"\":1}}}",
     API_PLAIN("logit_bias must has keys in [0, 151935], got .")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"1.0\":1}}}",
     API_PLAIN("logit_bias must has keys in [0, 151935], got 1.0.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"99999999999999999999\":1}}}",
     API_PLAIN("logit_bias must has keys in [0, 151935], got 99999999999999999999.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"5\":\"x\"}}}",
     API_SCHEMA("logit_bias of token 5 must be a number, got a string.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"5\":null}}}",
     API_SCHEMA("logit_bias of token 5 must be a number, got null.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"5\":1e39}}}",
     API_PLAIN("logit_bias of token 5 must be a finite 32-bit number, got 1e39.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{\"5\":-1e400}}}",
     API_PLAIN("logit_bias of token 5 must be a finite 32-bit number, got -1e400.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"sampling_filter\":\"top\"}}",
     API_PLAIN("sampling_filter must be 'joint' or 'rank', got 'top'.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"sampling_filter\":1}}",
     API_SCHEMA("sampling_filter must be a string, got a number.")},
    {"{\"input_ids\":[1],\"sampling_filter\":\"Rank\"}",
     API_PLAIN("sampling_filter must be 'joint' or 'rank', got 'Rank'.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"top_logprobs_num\":-1}",
     API_PLAIN("top_logprobs_num must be in [0, 128], got -1.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"top_logprobs_num\":129}",
     API_PLAIN("top_logprobs_num must be in [0, 128], got 129.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"top_logprobs_num\":[1]}",
     API_SCHEMA("top_logprobs_num must be an integer of 64 bits, got a list.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"token_ids_logprob\":7}",
     API_SCHEMA("token_ids_logprob must be a list of token ids, got a number.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"token_ids_logprob\":[1,151936]}",
     API_SCHEMA("token_ids_logprob must be a list of token ids in [0, 151935], got 151936.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"token_ids_logprob\":[-1]}",
     API_SCHEMA("token_ids_logprob must be a list of token ids in [0, 151935], got -1.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"token_ids_logprob\":[[1]]}",
     API_SCHEMA("token_ids_logprob must be a list of token ids in [0, 151935], got [1].")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"token_ids_logprob\":[null]}",
     API_SCHEMA("token_ids_logprob must be a list of token ids in [0, 151935], got null.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"logprob_start_len\":-2}",
     API_PLAIN("logprob_start_len must be -1 (output only) or a position of the prompt, got -2.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"logprob_start_len\":1}",
     API_PLAIN("logprob_start_len=1 is beyond the prompt of 1 tokens.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"logprob_start_len\":9223372036854775807}",
     API_PLAIN("logprob_start_len=9223372036854775807 is beyond the prompt of 1 tokens.")},
    {"{\"input_ids\":[1],\"return_logprob\":true,\"logprob_start_len\":\"0\"}",
     API_SCHEMA("logprob_start_len must be an integer of 64 bits, got a string.")},
    {"{\"input_ids\":[1],\"cache_salt\":5}",
     API_SCHEMA("cache_salt must be a string, got a number.")},
    {"{\"input_ids\":[1],\"extra_key\":[\"a\"]}",
     API_SCHEMA("extra_key must be a string, got a list.")},
    {"{\"input_ids\":[1],\"extra_key\":\"a\\u0000b\"}",
     API_SCHEMA("extra_key holds a NUL character.")},
    /* Not built, refused by name. */
    {"{\"input_ids\":[1],\"sampling_params\":{\"regex\":\"a\"}}",
     API_PLAIN("regex is not supported yet.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"regex\":\"a\",\"ebnf\":\"b\"}}",
     API_PLAIN("Only one of regex, json_schema, or ebnf can be set.")},
    {"{\"input_ids\":[1],\"sampling_params\":{\"custom_params\":{\"return_top_p_token_ids\":true}}"
     "}",
     API_PLAIN("custom_params is not supported.")},
    {"{\"input_ids\":[1],\"lora_path\":\"x\"}", API_PLAIN("lora_path is not supported.")},
    {"{\"input_ids\":[1],\"bootstrap_room\":3}", API_PLAIN("bootstrap_room is not supported.")},
    {"{\"input_ids\":[1],\"bootstrap_room\":-3}", API_PLAIN("bootstrap_room is not supported.")},
    {"{\"input_ids\":[1],\"image_data\":\"x\"}", API_PLAIN("image_data is not supported.")},
    {"{\"input_ids\":[1],\"return_sampling_mask\":true,\"sampling_logprobs_mode\":\"all\"}",
     API_PLAIN("sampling_logprobs_mode must be 'selected' or 'support', got 'all'.")},
};

static void test_generate(void **state) {
    api_fixture_expect_refusals(*state, API_GENERATE, GENERATE, BT_ARRAY_COUNT(GENERATE));
}

#define USER "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"
static const api_refusal CHAT[] = {
    {"{", "invalid JSON at byte 1: the text ends too early"},
    {"{}", "messages is required."},
    {"{\"messages\":[]}", "messages cannot be empty."},
    {"{\"messages\":\"x\"}", "messages must be a list, got a string."},
    {"{\"messages\":[5]}", "messages must be objects, got a number."},
    {"{\"messages\":[{\"content\":\"a\"}]}",
     "role must be system, developer, user, assistant or tool."},
    {"{\"messages\":[{\"role\":\"wizard\",\"content\":\"a\"}]}", "messages: role must be"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":5}]}",
     "messages: content must be a string or a list of parts, got a number."},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
     "other parts are not supported."},
    {"{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":1}]}]}",
     "tool_calls is not supported in messages yet."},
    {"{" USER ",\"max_tokens\":0}", "max_tokens must be at least 1, got 0."},
    {"{" USER ",\"max_completion_tokens\":-1,\"max_tokens\":5}",
     "max_completion_tokens must be at least 1, got -1."},
    {"{" USER ",\"max_completion_tokens\":1e12}",
     "max_completion_tokens must be at most 2147483647, got 1e12."},
    {"{" USER ",\"temperature\":-1}", "temperature must be a non-negative finite number, got -1."},
    {"{" USER ",\"n\":129}", "n must be in [1, 128], got 129."},
    {"{" USER ",\"min_tokens\":6,\"max_tokens\":5}",
     "min_tokens must be in [0, max_tokens=5], got 6."},
    {"{" USER ",\"min_tokens\":6,\"max_completion_tokens\":5}",
     "min_tokens must be in [0, max_completion_tokens=5], got 6."},
    {"{" USER ",\"min_tokens\":6,\"max_completion_tokens\":5,\"max_tokens\":9}",
     "min_tokens must be in [0, max_completion_tokens=5], got 6."},
    {"{" USER ",\"min_tokens\":300}", "min_tokens must be in [0, max_tokens="},
    {"{" USER ",\"max_tokens\":3000000000}",
     "max_tokens must be at most 2147483647, got 3000000000."},
    {"{" USER ",\"logit_bias\":{\"5\":100.5}}",
     "logit_bias of token 5 must be in [-100, 100], got 100.5."},
    {"{" USER ",\"logit_bias\":{\"5\":-101}}",
     "logit_bias of token 5 must be in [-100, 100], got -101."},
    {"{" USER ",\"frequency_penalty\":3}", "frequency_penalty must be in [-2, 2], got 3."},
    {"{" USER ",\"sampling_filter\":\"x\"}", "sampling_filter must be 'joint' or 'rank', got 'x'."},
    {"{" USER ",\"logprobs\":true,\"top_logprobs\":21}",
     "top_logprobs must be in [0, 20], got 21."},
    {"{" USER ",\"logprobs\":true,\"top_logprobs\":-1}",
     "top_logprobs must be in [0, 20], got -1."},
    {"{" USER ",\"top_logprobs\":2}", "top_logprobs is only allowed when logprobs is true."},
    {"{" USER ",\"logprobs\":false,\"top_logprobs\":1}",
     "top_logprobs is only allowed when logprobs is true."},
    {"{" USER ",\"cache_salt\":true}", "cache_salt must be a string, got a boolean."},
    {"{" USER ",\"seed\":\"x\"}", "seed must be an integer of 64 bits, got a string."},
    {"{" USER ",\"tools\":[{\"type\":\"function\"}]}", "tools is not supported yet."},
    {"{" USER ",\"tools\":[{\"type\":\"function\"}],\"tool_choice\":\"auto\"}",
     "tools is not supported yet."},
    {"{" USER ",\"tool_choice\":\"required\"}", "tool_choice is not supported yet."},
    {"{" USER ",\"response_format\":{\"type\":\"json_object\"}}",
     "response_format is not supported yet, but for"},
    {"{" USER ",\"modalities\":[\"text\",\"audio\"]}",
     "modalities other than text are not supported."},
    {"{" USER ",\"chat_template_kwargs\":{\"x\":1}}",
     "chat_template_kwargs: 'x' is not supported, only enable_thinking."},
    {"{" USER ",\"reasoning_effort\":\"high\"}", "reasoning_effort is not supported yet."},
    {"{" USER ",\"prediction\":{\"type\":\"content\"}}", "prediction is not supported yet."},
    {"{" USER ",\"stream_options\":5}", "stream_options must be an object, got a number."},
    {"{" USER ",\"return_sampling_mask\":true,\"return_meta_info\":true}",
     "return_sampling_mask requires top_k=1 for greedy sampling"},
    {"{" USER ",\"model\":7}", "model must be a string, got a number."},
};

static void test_chat(void **state) {
    api_fixture_expect_refusals(*state, API_CHAT, CHAT, BT_ARRAY_COUNT(CHAT));
}

/* Asks with a body of `head`, count times `item` ("N": the index and a comma), and `tail`. */
static bool ask_long(api_fixture *f, const char *head, const char *item, int count,
                     const char *tail) {
    bt_text body;
    bt_text_init(&body, 1 << 20);
    bt_text_add_string(&body, head);
    for (int i = 0; i < count; i++) {
        if (strcmp(item, "N") == 0) {
            bt_text_add_format(&body, "%d,", i);
        } else {
            bt_text_add_string(&body, item);
        }
    }
    bt_text_add_string(&body, tail);
    assert_false(body.has_failed);
    bool is_accepted = api_fixture_ask(f, API_GENERATE, body.bytes);
    bt_text_fini(&body);
    return is_accepted;
}

/* Lists that grow beyond what is read: ids, stops, names. */
static void test_limits(void **state) {
    static const struct {
        const char *head, *item;
        int count;
        const char *tail, *text;
    } CASES[] = {
        {"{\"input_ids\":[1],\"sampling_params\":{\"stop_token_ids\":[", "N", PROTO_STOP_IDS_MAX,
         "64]}}", "together are more than 64."},
        {"{\"input_ids\":[1],\"sampling_params\":{\"stop\":[", "\"s\",", STOP_STRINGS_MAX,
         "\"last\"]}}", "stop has more than 256 strings."},
        {"{\"input_ids\":[1],\"sampling_params\":{\"stop\":\"", "x", STOP_BYTES_MAX + 1, "\"}}",
         "stop is longer than 65536 bytes in all."},
        {"{\"input_ids\":[1],\"rid\":\"", "r", API_RID_MAX + 1, "\"}",
         "rid is longer than 256 bytes."},
        {"{\"input_ids\":[1],\"cache_salt\":\"", "s", API_SALT_MAX + 1, "\"}",
         "cache_salt is longer than 1024 bytes."},
        {"{\"input_ids\":[1],\"extra_key\":\"", "\\u00e9", API_SALT_MAX / 2 + 1, "\"}",
         "extra_key is longer than 1024 bytes."},
        {"{\"input_ids\":[1],\"return_logprob\":true,\"token_ids_logprob\":[", "N",
         PROTO_LOGPROB_IDS_MAX, "7]}", "token_ids_logprob has more than 1024 ids."},
        {"{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{", "\"5\":1,", PROTO_BIASES_MAX,
         "\"6\":1}}}", "logit_bias has more than 4096 entries."},
        {"{\"text\":\"", "xxxxxxxxxx", 50000, "\"}",
         "is longer than the model's context length (200 tokens)."},
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        assert_false(ask_long(f, CASES[i].head, CASES[i].item, CASES[i].count, CASES[i].tail));
        if (strstr(api_fixture_body(f), CASES[i].text) == NULL)
            fail_msg("%s is not in %s", CASES[i].text, api_fixture_body(f));
    }
    assert_true(ask_long(f, "{\"input_ids\":[1],\"rid\":\"", "r", API_RID_MAX, "\"}"));
    api_fixture_length(f);
    assert_true(ask_long(f, "{\"input_ids\":[1],\"extra_key\":\"", "s", API_SALT_MAX, "\"}"));
    api_fixture_length(f);
    /* However they are written. */
    assert_true(ask_long(f, "{\"input_ids\":[1],\"extra_key\":\"", "\\u0073", API_SALT_MAX, "\"}"));
    api_fixture_length(f);
    assert_true(
        ask_long(f, "{\"input_ids\":[1],\"cache_salt\":\"", "\\u00e9", API_SALT_MAX / 2, "\"}"));
    api_fixture_length(f);
    assert_true(ask_long(f, "{\"input_ids\":[1],\"sampling_params\":{\"logit_bias\":{", "\"5\":1,",
                         PROTO_BIASES_MAX - 1, "\"5\":2}}}"));
    assert_int_equal(f->call.request->generation.bias_count, 1);
    api_fixture_length(f);
}

static void test_context(void **state) {
    static const int COUNTS[] = {API_FIXTURE_CONTEXT - 1, API_FIXTURE_CONTEXT,
                                 5 * API_FIXTURE_CONTEXT};
    api_fixture *f = *state;
    for (int i = 0; i < 3; i++) {
        char text[160];
        snprintf(
            text, sizeof(text),
            "{\"error\":{\"message\":\"The input (%d tokens) is longer than the model's context "
            "length (200 tokens).\"}}",
            COUNTS[i]);
        bool is_accepted =
            ask_long(f, "{\"sampling_params\":{\"max_new_tokens\":1},\"input_ids\":[3", ",3",
                     COUNTS[i] - 1, "]}");
        assert_int_equal(is_accepted, COUNTS[i] < API_FIXTURE_CONTEXT);
        if (!is_accepted) assert_string_equal(api_fixture_body(f), text);
        if (is_accepted) api_fixture_length(f);
    }
    assert_false(api_fixture_ask(
        f, API_GENERATE, "{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":199}}"));
    assert_memory_equal(
        api_fixture_body(f),
        "{\"error\":{\"message\":\"Requested token count exceeds the model's maximum context "
        "length "
        "of 200 tokens. You requested a total of 201 tokens: 2 tokens from the input messages and "
        "199 tokens for the completion.",
        200);
    assert_true(api_fixture_ask(
        f, API_GENERATE, "{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":198}}"));
    api_fixture_length(f);
    /* null runs to the end of the context. */
    assert_true(api_fixture_ask(
        f, API_GENERATE, "{\"input_ids\":[1,2],\"sampling_params\":{\"max_new_tokens\":null}}"));
    assert_int_equal(f->call.request->generation.max_new_tokens, 198);
    api_fixture_length(f);
}

#ifdef BT_FAULT
/* What is behind the context is counted and not kept. */
static void test_long_lists_of_ids_are_not_kept(void **state) {
    enum { IDS_MAX = 20000 };
    static char body[2 * IDS_MAX + 100];
    api_fixture *f = *state;
    bt_alloc_tally tallies[2];
    assert_non_null(bt_text_reserve(&f->body, 1000)); /* the fixture's own */
    for (int i = 0; i < 2; i++) {
        char *at = body + sprintf(body, "{\"input_ids\":[3");
        for (int k = 1; k < (i == 0 ? API_FIXTURE_CONTEXT + 1 : IDS_MAX); k++) {
            at += sprintf(at, ",3");
        }
        sprintf(at, "]}");
        bt_fault_alloc_reset();
        assert_false(api_fixture_ask(f, API_GENERATE, body));
        tallies[i] = bt_fault_alloc_tally();
    }
    assert_int_equal(tallies[0].bytes, tallies[1].bytes);
}
#endif

static void test_odd_but_accepted(void **state) {
    static const char *const BODIES[] = {
        "\xef\xbb\xbf{\"input_ids\":[1]}",
        "{\"input_ids\":[1],\"lora_path\":\"\",\"stream_options\":{\"a\":1},\"whatever\":[1,{}]}",
        "{\"input_ids\":[1],\"stream\":null,\"rid\":null,\"sampling_params\":null,\"image_data\":"
        "null}",
        "{\"input_ids\":[1],\"logprob_start_len\":7,\"top_logprobs_num\":500,"
        "\"token_ids_logprob\":{}}",
        "{\"input_ids\":[1],\"cache_salt\":null,\"extra_key\":\"\",\"sampling_filter\":null}",
        "{\"input_ids\":[1],\"return_logprob\":true,\"logprob_start_len\":-1,"
        "\"top_logprobs_num\":null,\"token_ids_logprob\":[]}",
        "{\"input_ids\":[0],\"input_ids\":[1]}",
        "{\"input_ids\":[1],\"sampling_params\":{\"top_k\":0,\"top_k\":5}}",
        "{\"input_ids\":[1],\"sampling_params\":{\"stop\":null,\"stop_token_ids\":null,\"top_k\":-"
        "1,"
        "\"n\":1,\"min_p\":0,\"frequency_penalty\":0.0,\"presence_penalty\":0,\"min_new_tokens\":0,"
        "\"repetition_penalty\":1.0,\"logit_bias\":{},\"regex\":null,\"json_schema\":\"\","
        "\"spaces_between_special_tokens\":false,\"custom_params\":null,\"temperature\":null}}",
        "{\"input_ids\":[1],\"sampling_params\":{\"max_new_tokens\":3.0,\"top_k\":5.0,\"top_p\":1,"
        "\"sampling_seed\":-7}}",
        "{\"input_ids\":[1],\"sampling_params\":{\"stop_token_ids\":[99999999,-1,null]}}",
        "{\"input_ids\":[1],\"return_sampling_mask\":true,\"sampling_params\":{\"temperature\":0}}",
        "{\"input_ids\":[1],\"return_sampling_mask\":true,\"sampling_params\":{\"top_k\":64}}",
        "{\"te\\u0078t\":\"a\\u0000b <|im_end|>\"}",
    };
    api_fixture *f = *state;
    for (size_t i = 0; i < sizeof(BODIES) / sizeof(BODIES[0]); i++) {
        if (!api_fixture_ask(f, API_GENERATE, BODIES[i]))
            fail_msg("%s -> %s", BODIES[i], api_fixture_body(f));
        assert_int_not_equal(f->call.request->prompt.ids[0], 0);
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
    }
}

static void test_no_workers_yet(void **state) {
    api_fixture *f = *state;
    f->model.is_known = false;
    assert_false(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]}"));
    assert_int_equal(f->status, 503);
    assert_string_equal(f->fields, "Retry-After: 1\r\n");
    assert_false(api_fixture_ask(f, API_GENERATE, "{"));
    assert_int_equal(f->status, 400);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_generate),
        CASE(test_chat),
        CASE(test_limits),
        CASE(test_context),

#ifdef BT_FAULT
        CASE(test_long_lists_of_ids_are_not_kept),
#endif
        CASE(test_odd_but_accepted),
        CASE(test_no_workers_yet),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
