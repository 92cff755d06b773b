/* The fields about masks: which values and combinations are refused, what the workers are told, and
 * what a reply is whose support was too large. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "router/api_processor.h"
#include "tests/unit/router/api_fixture.h"

/* ---- fields ---------------------------------------------------------------------------------- */

typedef struct refusal {
    const char *fields;
    const char *text;
} refusal;

static const refusal FIELDS[] = {
    {"\"sampling_mask_format\":\"binary\"",
     "sampling_mask_format must be 'json' or 'packed', got 'binary'."},
    {"\"sampling_mask_format\":\"\"", "sampling_mask_format must be 'json' or 'packed', got ''."},
    {"\"sampling_mask_format\":true", "sampling_mask_format must be a string, got a boolean."},
    {"\"sampling_mask_format\":[\"packed\"]", "sampling_mask_format must be a string, got a list."},
    {"\"sampling_mask_mode\":\"Bounded\"",
     "sampling_mask_mode must be 'exact' or 'bounded', got 'Bounded'."},
    {"\"sampling_mask_mode\":1", "sampling_mask_mode must be a string, got a number."},
    {"\"on_mask_overflow\":\"partial\"",
     "on_mask_overflow must be 'abort' or 'return_partial', got 'partial'."},
    {"\"on_mask_overflow\":{}", "on_mask_overflow must be a string, got an object."},
    {"\"sampling_logprobs_mode\":\"a word that is much longer than any that could be meant by "
     "anybody at all\"",
     "sampling_logprobs_mode must be 'selected' or 'support', got 'a word that is much longer than "
     "any that could be meant by anybo'."},
};

static const char *const HEADS[] = {"{\"input_ids\":[1],", "{\"input_ids\":[1],",
                                    "{\"prompt\":[1],"};

/* On every endpoint, with a mask and without one. */
static void test_bad_fields(void **state) {
    api_fixture *f = *state;
    for (size_t i = 0; i < 6 * BT_ARRAY_COUNT(FIELDS); i++) {
        const refusal *r = &FIELDS[i / 6];
        const api_kind kind = (api_kind)(i / 2 % 3);
        char body[400];
        snprintf(body, sizeof(body), "%s%s%s}", HEADS[kind],
                 i % 2 == 0 ? "" : "\"return_sampling_mask\":true,", r->fields);
        if (api_fixture_ask(f, kind, body)) fail_msg("accepted: %s", body);
        assert_int_equal(f->status, 400);
        if (strstr(api_fixture_body(f), r->text) == NULL)
            fail_msg("%s\n-> %s\nnot %s", body, api_fixture_body(f), r->text);
    }
}

static void test_values(void **state) {
    static const char ALL[] =
        "\"sampling_mask_format\":\"packed\",\"sampling_mask_mode\":\"bounded\","
        "\"on_mask_overflow\":\"return_partial\"";
    api_fixture *f = *state;
    for (int i = 0; i < 9; i++) {
        const api_kind kind = (api_kind)(i % 3);
        char body[400];
        const bool is_on = i < 3;
        snprintf(body, sizeof(body), "%s\"return_sampling_mask\":%s,\"return_meta_info\":true,%s}",
                 HEADS[kind], is_on ? "true" : "false",
                 i < 6 ? ALL
                       : "\"sampling_mask_format\":null,\"sampling_mask_mode\":\"exact\","
                         "\"on_mask_overflow\":\"abort\"");
        assert_true(api_fixture_ask(f, kind, body));
        /* Without a mask none of them has an effect. */
        assert_int_equal(api_fixture_asked(f)->mask_bounded, is_on);
        assert_int_equal(api_fixture_asked(f)->mask_mode, is_on ? ROW_MASK_SELECTED : ROW_MASK_OFF);
        assert_int_equal(f->call.request->packs_mask, is_on);
        assert_int_equal(f->call.request->keeps_partial, is_on);
        bt_error error;
        assert_int_equal(proto_generation_check(api_fixture_asked(f), &error), BT_OK);
        api_fixture_abort(f);
    }
    /* A chat that has nowhere to put masks. */
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{\"input_ids\":[1],\"return_sampling_mask\":true,"
                                "\"sampling_mask_mode\":\"bounded\",\"sampling_mask_format\":"
                                "\"packed\",\"on_mask_overflow\":\"return_partial\"}"));
    assert_int_equal(api_fixture_asked(f)->mask_mode, ROW_MASK_OFF);
    assert_int_equal(api_fixture_asked(f)->mask_bounded, 0);
    assert_false(f->call.request->packs_mask || f->call.request->keeps_partial);
    api_fixture_abort(f);
    /* Each item its own. */
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[[1],[2],[3]],\"return_sampling_mask\":true,"
                                "\"sampling_params\":{\"top_k\":2},"
                                "\"sampling_mask_format\":[\"packed\",null,\"json\"],"
                                "\"sampling_mask_mode\":[\"exact\",\"bounded\",null],"
                                "\"on_mask_overflow\":[null,\"abort\",\"return_partial\"]}"));
    for (uint32_t i = 0; i < 3; i++) {
        const api_request *item = f->call.items[i].request;
        assert_int_equal(item->packs_mask, i == 0);
        assert_int_equal(item->generation.mask_bounded, i == 1);
        assert_int_equal(item->keeps_partial, i == 2);
    }
    api_fixture_abort(f);
    assert_false(api_fixture_ask(
        f, API_GENERATE, "{\"input_ids\":[[1],[2]],\"on_mask_overflow\":[\"abort\",\"x\"]}"));
    assert_non_null(strstr(api_fixture_body(f), "[1]: on_mask_overflow must be 'abort' or"));
    assert_false(api_fixture_ask(f, API_GENERATE,
                                 "{\"input_ids\":[[1],[2]],\"sampling_mask_mode\":[\"exact\"]}"));
    assert_non_null(
        strstr(api_fixture_body(f), "sampling_mask_mode is a list of 1, but there are 2 prompts."));
}

/* ---- admission ------------------------------------------------------------------------------- */

/* What may fit is run; only what nothing filters is refused. The fixture's cap is 64, its
 * vocabulary 320 tokens of a model of 151936. */
static void test_admission(void **state) {
    static const struct {
        const char *params;
        bool is_refused;
    } CASES[] = {
        {"", true},
        {"\"top_k\":-1", true},
        {"\"top_k\":1073741824", true},
        {"\"top_k\":320", true},
        {"\"top_k\":100000", true},
        {"\"top_p\":1", true},
        {"\"top_p\":0.9999999999", true}, /* 1 as a float */
        {"\"min_p\":0", true},
        {"\"min_p\":1e-60", true}, /* 0 as a float */
        {"\"temperature\":0.5", true},
        {"\"logit_bias\":{\"5\":100}", true},
        {"\"top_k\":319", false},
        {"\"top_k\":65", false},
        {"\"top_k\":64", false},
        {"\"top_k\":1", false},
        {"\"temperature\":0", false},
        {"\"top_p\":0.95", false},
        {"\"top_p\":0.999", false},
        {"\"min_p\":0.01", false},
        {"\"top_k\":-1,\"top_p\":0.5,\"min_p\":0.1", false},
    };
    static const char TEXT[] =
        "{\"error\":{\"message\":\"return_sampling_mask requires top_k=1 for greedy sampling or a "
        "top_k, top_p or min_p that filters: without one all 320 ids are in the support, more than "
        "--sampling-mask-max-tokens=64. sampling_mask_mode 'bounded' takes any.\"}}";
    api_fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        char body[400];
        for (int turn = 0; turn < 3; turn++) {
            snprintf(body, sizeof(body), "{\"input_ids\":[1]%s,\"sampling_params\":{%s}}",
                     turn == 0 ? ",\"return_sampling_mask\":true"
                     : turn == 1
                         ? ",\"return_sampling_mask\":true,\"sampling_mask_mode\":\"bounded\""
                         : "",
                     CASES[i].params);
            const bool is_accepted = api_fixture_ask(f, API_GENERATE, body);
            if (is_accepted == (turn == 0 && CASES[i].is_refused)) fail_msg("%s", body);
            if (is_accepted) {
                api_fixture_abort(f);
            } else {
                assert_string_equal(api_fixture_body(f), TEXT);
            }
        }
    }
    /* A cap as wide as the vocabulary holds every support. */
    f->settings.mask_max_tokens = 320;
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1],\"return_sampling_mask\":true}"));
    api_fixture_abort(f);
    f->settings.mask_max_tokens = 64;
    f->model.vocab_size = 64; /* and so does a small model's */
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1],\"return_sampling_mask\":true}"));
    api_fixture_abort(f);
}

/* ---- custom_logit_processor ------------------------------------------------------------------ */

#define MODULE "sglang.srt.sampling.custom_logit_processor"
#define CLASS  "DisallowedTokensLogitsProcessor"
/* As dill 0.4 writes the class by default. */
#define DISALLOWED                                                                                 \
    "80049552000000000000008c2a73676c616e672e7372742e73616d706c696e672e637573746f6d5f6c6f6769745f" \
    "70726f636573736f72948c1f446973616c6c6f776564546f6b656e734c6f6769747350726f636573736f72949394" \
    "2"                                                                                            \
    "e"
#define PROCESSOR "\"custom_logit_processor\":\"{\\\"callable\\\": \\\"" DISALLOWED "\\\"}\""

typedef struct pickle {
    const char *bytes;
    size_t count;
    bool is_known;
} pickle;

#define P(is_known, text)                                                                          \
    { text, sizeof(text) - 1, is_known }
static const pickle PICKLES[] = {
    /* What Python writes, protocol by protocol. */
    P(true, "c" MODULE "\n" CLASS "\np0\n."),
    P(true, "c" MODULE "\n" CLASS "\nq\x00."),
    P(true, "\x80\x02"
            "c" MODULE "\n" CLASS "\nq\x00."),
    P(true, "\x80\x03"
            "c" MODULE "\n" CLASS "\nr\x01\x02\x03\x04."),
    P(true, "\x80\x04\x95\x52\0\0\0\0\0\0\0\x8c\x2a" MODULE "\x94\x8c\x1f" CLASS "\x94\x93\x94."),
    P(true, "\x80\x05\x95\x52\0\0\0\0\0\0\0\x8c\x2a" MODULE "\x94\x8c\x1f" CLASS "\x94\x93\x94."),
    P(true, "\x80\x05\x8c\x2a" MODULE "\x8c\x1f" CLASS "\x93."),
    P(true, "\x80\x04X\x2a\0\0\0" MODULE "q\x00X\x1f\0\0\0" CLASS "q\x01\x93."),
    P(true, "csglang.x\n" CLASS "\n."),
    /* Another class, another package, other names. */
    P(false, "c" MODULE "\nAnotherLogitsProcessor\np0\n."),
    P(false, "c" MODULE "\n" CLASS "X\np0\n."),
    P(false, "c" MODULE "\nX" CLASS "\np0\n."),
    P(false, "cos\nsystem\np0\n."),
    P(false, "c__main__\n" CLASS "\np0\n."),
    P(false, "csglang\n" CLASS "\np0\n."),
    P(false, "csglang.\n" CLASS "\np0\n."),
    P(false, "csglangx.y\n" CLASS "\np0\n."),
    P(false, "csglang.x y\n" CLASS "\np0\n."),
    P(false, "csglang.x\0y\n" CLASS "\np0\n."),
    /* More than a name: an object of the class, a call, a second value, code. */
    P(false, "c" MODULE "\n" CLASS "\np0\n)R."),
    P(false, "c" MODULE "\n" CLASS "\np0\n)\x81."),
    P(false, "c" MODULE "\n" CLASS "\np0\n0c" MODULE "\n" CLASS "\n."),
    P(false, "cos\nsystem\n(S'true'\ntR0c" MODULE "\n" CLASS "\n."),
    P(false, "c" MODULE "\n" CLASS "\np0\n..\n"),
    P(false, "c" MODULE "\n" CLASS "\np0\n.x"),
    P(false, "(c" MODULE "\n" CLASS "\n."),
    P(false, "i" MODULE "\n" CLASS "\n."),
    /* Broken. */
    P(false, ""),
    P(false, "."),
    P(false, "\x80"),
    P(false, "\x80\x06"
             "c" MODULE "\n" CLASS "\n."),
    P(false, "\x80\x04\x95\x51\0\0\0\0\0\0\0\x8c\x2a" MODULE "\x94\x8c\x1f" CLASS "\x94\x93\x94."),
    P(false,
      "\x80\x04\x95\x52\0\0\0\0\0\0\x01\x8c\x2a" MODULE "\x94\x8c\x1f" CLASS "\x94\x93\x94."),
    P(false, "\x80\x04\x95\x52\0\0"),
    P(false, "\x80\x04\x8c\x2a" MODULE "\x94\x8c\xff" CLASS "\x94\x93\x94."),
    P(false, "\x80\x04X\xff\xff\xff\xff" MODULE "X\x1f\0\0\0" CLASS "\x93."),
    P(false, "\x80\x04X\x2a\0"),
    P(false, "\x80\x05\x8c\x2a" MODULE "\x8c\x1f" CLASS "\x94."),
    P(false, "c" MODULE "\n" CLASS),
    P(false, "c" MODULE),
    P(false, "c" MODULE "\n" CLASS "\np0"),
    P(false, "c" MODULE "\n" CLASS "\nq"),
    P(false, "c" MODULE "\n" CLASS "\nr\x01\x02"),
    P(false, "c" MODULE "\n" CLASS "\n"),
};

static void test_pickles(void **state) {
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(PICKLES); i++) {
        const pickle *p = &PICKLES[i];
        /* In a block of its own size, so that a read past the end is seen by the sanitizers. */
        uint8_t *copy = malloc(p->count > 0 ? p->count : 1);
        assert_non_null(copy);
        memcpy(copy, p->bytes, p->count);
        if (api_processor_is_known(copy, p->count) != p->is_known) fail_msg("pickle %zu", i);
        /* No beginning of it is one. */
        for (size_t cut = 0; cut < p->count; cut++) {
            uint8_t *piece = malloc(cut > 0 ? cut : 1);
            memcpy(piece, copy, cut);
            if (cut + 1 < p->count || p->is_known) {
                const bool is_dot = cut > 0 && piece[cut - 1] == '.';
                if (!is_dot) assert_false(api_processor_is_known(piece, cut));
            }
            free(piece);
        }
        free(copy);
    }
}

static float bias_at(const api_fixture *f, uint32_t at) {
    const api_request *request = f->call.request;
    float value;
    memcpy(&value,
           request->prompt.ids + request->prompt.count + api_fixture_asked(f)->bias_count + at,
           sizeof(value));
    return value;
}

static void test_disallowed_tokens(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1]," PROCESSOR
                                ",\"sampling_params\":{\"custom_params\":{\"token_ids\":"
                                "[9,5,9]},\"logit_bias\":{\"5\":3,\"7\":2}}}"));
    assert_int_equal(api_fixture_asked(f)->bias_count, 3);
    const int32_t ids[] = {5, 7, 9};
    assert_memory_equal(f->call.request->prompt.ids + 1, ids, sizeof(ids));
    assert_true(bias_at(f, 0) == -INFINITY); /* whatever else is said of it */
    assert_true(bias_at(f, 1) == 2.0f);
    assert_true(bias_at(f, 2) == -INFINITY);
    api_fixture_abort(f);
    /* With masks, in chat and completions, where all is at top level; no ids are none. */
    static const char *const BODIES[] = {
        "{\"input_ids\":[1],\"return_sampling_mask\":true," PROCESSOR
        ",\"sampling_params\":{\"top_k\":5,\"custom_params\":{\"token_ids\":[5]}}}",
        "{\"input_ids\":[1]," PROCESSOR ",\"custom_params\":{\"token_ids\":[5]}}",
        "{\"prompt\":[1]," PROCESSOR ",\"custom_params\":{\"token_ids\":[5]}}",
        "{\"input_ids\":[1]," PROCESSOR
        ",\"sampling_params\":{\"custom_params\":{\"token_ids\":[]}}}",
        "{\"input_ids\":[[1],[2]],\"custom_logit_processor\":[\"{\\\"callable\\\":\\\"" DISALLOWED
        "\\\"}\",null],\"sampling_params\":[{\"custom_params\":{\"token_ids\":[5]}},{}]}",
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(BODIES); i++) {
        const api_kind kind = i == 1 ? API_CHAT : i == 2 ? API_COMPLETION : API_GENERATE;
        if (!api_fixture_ask(f, kind, BODIES[i]))
            fail_msg("%s -> %s", BODIES[i], api_fixture_body(f));
        assert_int_equal(api_fixture_asked(f)->bias_count, i == 3 ? 0 : 1);
        if (i == 4) assert_int_equal(f->call.items[1].request->generation.bias_count, 0);
        api_fixture_abort(f);
    }
}

#define ONLY "only supports DisallowedTokensLogitsProcessor"
#define WITH ONLY " with custom_params {\\\"token_ids\\\": [id, ...]}."

static const refusal PROCESSORS[] = {
    {"\"custom_logit_processor\":\"x\"", ONLY "."},
    {"\"custom_logit_processor\":5", ONLY "."},
    {"\"custom_logit_processor\":{\"callable\":\"80\"}", ONLY "."},
    {"\"custom_logit_processor\":[\"x\"]", ONLY "."},
    {"\"custom_logit_processor\":\"{}\"", ONLY "."},
    {"\"custom_logit_processor\":\"{\\\"callable\\\":5}\"", ONLY "."},
    {"\"custom_logit_processor\":\"{\\\"callable\\\":\\\"8\\\"}\"", ONLY "."},
    {"\"custom_logit_processor\":\"{\\\"callable\\\":\\\"zz\\\"}\"", ONLY "."},
    {"\"custom_logit_processor\":\"{\\\"callable\\\":\\\"" DISALLOWED "\\\",\\\"a\\\":1}\"",
     ONLY "."},
    {"\"custom_logit_processor\":\"{\\\"callable\\\":\\\"" DISALLOWED "00\\\"}\"", ONLY "."},
    {PROCESSOR, WITH},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":null}", WITH},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":[]}", WITH},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":{}}", WITH},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":{\"token_ids\":5}}", WITH},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":{\"ids\":[5]}}", WITH},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":{\"token_ids\":[5],\"more\":1}}", WITH},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":{\"token_ids\":[-1]}}",
     "custom_params.token_ids must be a list of token ids in [0, 151935], got -1."},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":{\"token_ids\":[151936]}}",
     "custom_params.token_ids must be a list of token ids in [0, 151935], got 151936."},
    {PROCESSOR ",\"sampling_params\":{\"custom_params\":{\"token_ids\":[\"5\"]}}",
     "custom_params.token_ids must be a list of token ids in [0, 151935], got \\\"5\\\"."},
    /* Without the processor its parameters mean nothing. */
    {"\"sampling_params\":{\"custom_params\":{\"token_ids\":[5]}}",
     "custom_params is not supported."},
};

static void test_other_processors(void **state) {
    api_fixture *f = *state;
    for (size_t i = 0; i < 2 * BT_ARRAY_COUNT(PROCESSORS); i++) {
        const refusal *r = &PROCESSORS[i / 2];
        char body[1200];
        snprintf(body, sizeof(body), "{\"input_ids\":[1]%s,%s}",
                 i % 2 == 0 ? "" : ",\"return_sampling_mask\":true", r->fields);
        if (api_fixture_ask(f, API_GENERATE, body)) fail_msg("accepted: %s", body);
        assert_int_equal(f->status, 400);
        if (strstr(api_fixture_body(f), r->text) == NULL)
            fail_msg("%s\n-> %s\nnot %s", body, api_fixture_body(f), r->text);
    }
}

/* They are in no support: without them it may fit the cap, which is 318 of 320 ids here. */
static void test_admission_without_the_disallowed(void **state) {
    static const struct {
        const char *ids, *params;
        bool is_refused;
    } CASES[] = {
        {"", "", true},
        {"5", "", true}, /* 319 are left */
        {"5,5", "", true},
        {"5,400", "", true}, /* above the tokenizer's vocabulary nothing is drawn anyway */
        {"5,7", "", false},
        {"0,319", "", false},
        {"5", ",\"top_k\":319", true},
        {"5", ",\"top_k\":318", false},
        {"5", ",\"logit_bias\":{\"7\":-1e38}", true},
    };
    api_fixture *f = *state;
    f->settings.mask_max_tokens = 318;
    for (size_t i = 0; i < BT_ARRAY_COUNT(CASES); i++) {
        char body[700];
        snprintf(body, sizeof(body),
                 "{\"input_ids\":[1],\"return_sampling_mask\":true," PROCESSOR
                 ",\"sampling_params\":{\"custom_params\":{\"token_ids\":[%s]}%s}}",
                 CASES[i].ids, CASES[i].params);
        const bool is_accepted = api_fixture_ask(f, API_GENERATE, body);
        if (is_accepted == CASES[i].is_refused) fail_msg("%s", body);
        if (is_accepted) api_fixture_abort(f);
        if (is_accepted || i == 0) continue;
        assert_non_null(strstr(api_fixture_body(f), "without one all 319 ids are in the support"));
    }
}

/* As many as a request may have; and never all of them. */
static void test_how_many_are_disallowed(void **state) {
    enum { ID_BYTES = 8 };
    api_fixture *f = *state;
    char *body = malloc(ID_BYTES * (PROTO_BIASES_MAX + 2) + 1200);
    assert_non_null(body);
    for (int more = 0; more < 2; more++) {
        char *at = body + sprintf(body, "{\"input_ids\":[1]," PROCESSOR ",\"sampling_params\":{"
                                        "\"custom_params\":{\"token_ids\":[0");
        for (int i = 1; i < PROTO_BIASES_MAX + more; i++) {
            at += sprintf(at, ",%d", 1000 + i);
        }
        strcpy(at, "]}}}");
        assert_int_equal(api_fixture_ask(f, API_GENERATE, body), more == 0);
        if (more == 0) api_fixture_abort(f);
    }
    assert_non_null(
        strstr(api_fixture_body(f), "custom_params.token_ids has more than 4096 entries."));
    for (int left = 0; left < 4; left++) {
        /* All 320 but the last `left`, of which the end of a sequence, 319, is banned at first. */
        char *at = body + sprintf(body,
                                  "{\"input_ids\":[1]," PROCESSOR ",\"sampling_params\":{"
                                  "\"min_new_tokens\":%d,\"custom_params\":{\"token_ids\":[400,0",
                                  left % 2);
        for (int i = 1; i < 320 - left; i++) {
            at += sprintf(at, ",%d", i);
        }
        strcpy(at, "]}}}");
        const bool is_accepted = api_fixture_ask(f, API_GENERATE, body);
        assert_int_equal(is_accepted, left >= 2);
        if (is_accepted) {
            api_fixture_abort(f);
        } else {
            assert_non_null(strstr(api_fixture_body(f), "leaves no token that can be drawn."));
        }
    }
    /* The end of a sequence is gone once, disallowed and banned: id 0 is left. */
    char *at = body + sprintf(body, "{\"input_ids\":[1]," PROCESSOR ",\"sampling_params\":{"
                                    "\"min_new_tokens\":1,\"custom_params\":{\"token_ids\":[1");
    for (int i = 2; i < 320; i++) {
        at += sprintf(at, ",%d", i);
    }
    strcpy(at, "]}}}");
    assert_true(api_fixture_ask(f, API_GENERATE, body));
    api_fixture_abort(f);
    free(body);
}

/* ---- overflow -------------------------------------------------------------------------------- */

#define OVERFLOW                                                                                   \
    "Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of cutoff ties. "    \
    "Lower top_k to leave more headroom or increase the server limit."
#define REQUIRED                                                                                   \
    "\"finish_reason\":{\"type\":\"abort\",\"message\":\"" OVERFLOW                                \
    " Required: 77.\",\"status_code\":400,\"err_type\":\"BadRequestError\"}"

static void overflow(api_fixture *f, uint32_t sample, uint32_t needed) {
    const dispatch_end end = {.status = BT_ERR_REQUEST_OVERFLOW,
                              .http_status = 400,
                              .finish = PROTO_FINISH_ERROR,
                              .cap_needed = needed};
    const uint32_t item = f->call.samples[sample].item;
    api_call_on_sample_end(&f->call, item, sample - f->call.items[item].first_sample, &end);
    if (f->call.items[item].sample_count == 1) api_call_on_end(&f->call, item, &end);
}

static void row(api_fixture *f, uint32_t sample, int32_t token) {
    const int32_t ids[] = {token, token + 1};
    const token_row r = {.token = token,
                         .mask_mode = ROW_MASK_SELECTED,
                         .selected_logprob = -0.5f,
                         .support_size = 2,
                         .support_count = 2,
                         .support_ids = ids};
    api_fixture_feed(f, sample, &r);
}

#define MASKED "\"rid\":\"r\",\"return_sampling_mask\":true,\"sampling_params\":{\"top_k\":2}"
#define KEEPS  ",\"on_mask_overflow\":\"return_partial\""
#define TWO_ROWS                                                                                   \
    "\"output_token_sampling_mask\":[[120,121],[97,98]],\"output_token_sampling_logprobs\":[-0.5," \
    "-0.5],\"output_token_sampling_mask_length\":2,\"output_token_weight_versions\":[[0,2]],"

static void assert_has(const api_fixture *f, const char *needle) {
    if (strstr(api_fixture_body(f), needle) == NULL)
        fail_msg("%s\nis not in\n%s", needle, api_fixture_body(f));
}

static void test_overflow_aborts(void **state) {
    api_fixture *f = *state;
    for (int rows = 0; rows < 3; rows += 2) {
        assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]," MASKED "}"));
        for (int i = 0; i < rows; i++) {
            row(f, 0, 120);
        }
        overflow(f, 0, 77);
        assert_int_equal(f->status, 400);
        assert_string_equal(api_fixture_body(f),
                            "{\"error\":{\"message\":\"" OVERFLOW " Required: 77.\"}}");
    }
    /* Somebody who does not know what would suffice says nothing of it. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]," MASKED "}"));
    overflow(f, 0, 0);
    assert_string_equal(api_fixture_body(f), "{\"error\":{\"message\":\"" OVERFLOW "\"}}");
}

static void test_overflow_keeps_what_there_is(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]," MASKED KEEPS "}"));
    row(f, 0, 120);
    row(f, 0, 97);
    overflow(f, 0, 77);
    assert_int_equal(f->status, 200);
    assert_has(f, "{\"text\":\"xa\",\"output_ids\":[120,97],\"meta_info\":{\"id\":\"r\"," REQUIRED);
    assert_has(f, TWO_ROWS "\"sampling_mask_required\":77,\"reasoning_tokens\":0,");
    /* Without any token there is nothing to keep. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]," MASKED KEEPS "}"));
    overflow(f, 0, 77);
    assert_int_equal(f->status, 400);
    assert_string_equal(api_fixture_body(f),
                        "{\"error\":{\"message\":\"" OVERFLOW " Required: 77.\"}}");
    /* Other failures are what they were. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"input_ids\":[1]," MASKED KEEPS "}"));
    row(f, 0, 120);
    api_fixture_fail(f, BT_ERR_PEER_GONE, 503, "decode is gone");
    assert_int_equal(f->status, 503);
}

/* A stream tells the same in both modes: the tokens went out before. */
static void test_overflow_in_a_stream(void **state) {
    static const char *const BODIES[] = {
        "{\"input_ids\":[1],\"stream\":true," MASKED "}",
        "{\"input_ids\":[1],\"stream\":true," MASKED KEEPS "}",
    };
    api_fixture *f = *state;
    for (int i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        row(f, 0, 120);
        row(f, 0, 97);
        overflow(f, 0, 77);
        assert_int_equal(f->status, 200);
        assert_null(strstr(api_fixture_last_event(f, 1), "sampling_mask_required"));
        const char *last = api_fixture_last_event(f, 0);
        assert_non_null(strstr(last, "{\"text\":\"xa\",\"output_ids\":[120,97],"));
        assert_non_null(strstr(last, REQUIRED));
        assert_non_null(strstr(last, TWO_ROWS "\"sampling_mask_required\":77,"));
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        overflow(f, 0, 77);
        assert_int_equal(f->status, 400);
    }
}

/* Of several samples, of one prompt or of many, each is kept or not by itself. */
static void test_overflow_of_some(void **state) {
    static const char *const BODIES[] = {
        "{\"input_ids\":[1],\"rid\":\"r\",\"return_sampling_mask\":true,"
        "\"sampling_params\":{\"n\":3,\"top_k\":2}" KEEPS "}",
        "{\"input_ids\":[[1],[2],[3]]," MASKED KEEPS "}",
    };
    api_fixture *f = *state;
    for (int i = 0; i < 2; i++) {
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        row(f, 0, 120);
        row(f, 0, 97);
        overflow(f, 0, 77);
        overflow(f, 1, 78); /* without a token */
        overflow(f, 2, 79);
        api_fixture_length(f);
        assert_int_equal(f->status, 200);
        assert_has(f, "[{\"text\":\"xa\",\"output_ids\":[120,97],\"meta_info\":{\"id\":\"r_0\",");
        assert_has(f, TWO_ROWS "\"sampling_mask_required\":77,");
        assert_has(f, "{\"text\":\"\",\"output_ids\":[],\"meta_info\":{\"id\":\"r_1\",");
        assert_has(f, "\"num_retractions\":0,\"sampling_mask_required\":78,");
        assert_has(f, " Required: 79.");
        /* All without a token. */
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        for (uint32_t k = 0; k < 3; k++) {
            overflow(f, k, 77);
        }
        api_fixture_length(f);
        assert_int_equal(f->status, 400);
        /* The sentence says which cap would have sufficed for all of them. */
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        overflow(f, 0, 77);
        overflow(f, 1, 79);
        overflow(f, 2, 78);
        api_fixture_length(f);
        assert_string_equal(api_fixture_body(f),
                            "{\"error\":{\"message\":\"" OVERFLOW " Required: 79.\"}}");
        /* What is not the client's fault comes before what is. */
        assert_true(api_fixture_ask(f, API_GENERATE, BODIES[i]));
        overflow(f, 0, 77);
        api_fixture_sample_fail(f, 1, BT_ERR_PEER_GONE, 503, "decode is gone");
        overflow(f, 2, 79);
        api_fixture_length(f);
        assert_int_equal(f->status, 503);
    }
    /* Only one of the items asked for what there is. */
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[[1],[2]]," MASKED
                                ",\"on_mask_overflow\":[\"abort\",\"return_partial\"]}"));
    row(f, 0, 120);
    overflow(f, 0, 77);
    row(f, 1, 120);
    overflow(f, 1, 77);
    assert_int_equal(f->status, 200);
}

/* Chat and completions have no status in a finish reason: an abort, and meta_info says why. */
static void test_overflow_of_openai(void **state) {
    static const char *const HEAD[] = {"\"input_ids\":[1]", "\"prompt\":[1]"};
    api_fixture *f = *state;
    for (int i = 0; i < 8; i++) {
        char body[400];
        const bool streams = i % 4 >= 2, keeps = i % 2 == 1;
        snprintf(body, sizeof(body),
                 "{%s,\"rid\":\"r\",\"top_k\":2,\"return_sampling_mask\":true,"
                 "\"return_meta_info\":true%s%s}",
                 HEAD[i / 4], streams ? ",\"stream\":true" : "", keeps ? KEEPS : "");
        assert_true(api_fixture_ask(f, i / 4 == 0 ? API_CHAT : API_COMPLETION, body));
        row(f, 0, 120);
        row(f, 0, 97);
        overflow(f, 0, 77);
        assert_int_equal(f->status, keeps || streams ? 200 : 400);
        assert_has(f, " Required: 77.");
        assert_int_equal(strstr(api_fixture_body(f), "\"error\"") == NULL, keeps);
        if (!keeps) continue;
        assert_has(f, "\"finish_reason\":\"abort\"");
        assert_has(f, REQUIRED);
        assert_has(f, "\"sampling_mask_required\":77,");
    }
}

/* A client that reads slowly hears of the end with the end, and not with the tokens before it. */
static void test_overflow_behind_a_slow_client(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_CHAT,
                                "{\"input_ids\":[1],\"rid\":\"r\",\"top_k\":2,\"stream\":true,"
                                "\"return_sampling_mask\":true,\"return_meta_info\":true" KEEPS
                                "}"));
    f->room = 0;
    row(f, 0, 120);
    row(f, 0, 97);
    overflow(f, 0, 77);
    f->room = SIZE_MAX;
    api_call_on_room(&f->call);
    assert_int_equal(f->end_count, 1);
    const char *delta = api_fixture_last_event(f, 1);
    assert_non_null(strstr(delta, "\"content\":\"xa\""));
    assert_non_null(strstr(delta, "\"meta_info\":{\"id\":\"r\",\"finish_reason\":null,"));
    assert_null(strstr(delta, "sampling_mask_required"));
    const char *end = api_fixture_last_event(f, 0);
    assert_non_null(strstr(end, REQUIRED));
    assert_non_null(strstr(end, "\"sampling_mask_required\":77,"));
}

/* A reply that should have the prompt's log-probabilities and has not is none. */
static void test_overflow_before_the_prompt(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{\"input_ids\":[1,2],\"return_logprob\":true,"
                                "\"logprob_start_len\":0," MASKED KEEPS "}"));
    const int32_t ids[] = {120};
    api_fixture_mask_row(f, 120, -1.0f, -0.5f, ids, NULL, 1);
    overflow(f, 0, 77);
    assert_int_equal(f->status, 400);
    assert_has(f, " Required: 77.");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_bad_fields),
        CASE(test_values),
        CASE(test_admission),
        CASE(test_pickles),
        CASE(test_disallowed_tokens),
        CASE(test_other_processors),
        CASE(test_admission_without_the_disallowed),
        CASE(test_how_many_are_disallowed),
        CASE(test_overflow_aborts),
        CASE(test_overflow_keeps_what_there_is),
        CASE(test_overflow_in_a_stream),
        CASE(test_overflow_of_some),
        CASE(test_overflow_of_openai),
        CASE(test_overflow_behind_a_slow_client),
        CASE(test_overflow_before_the_prompt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
