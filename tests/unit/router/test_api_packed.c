/* Masks in replies as packed arrays, of bounded masks, and with the weights they were drawn under:
 * whole and streamed, as JSON and packed, byte for byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/base64.h"
#include "tests/unit/router/api_fixture.h"

#define PROMPT  "\"rid\":\"r1\",\"input_ids\":[785,6722,315,9625,374]"
#define MASKED  PROMPT ",\"return_sampling_mask\":true,\"sampling_params\":{\"top_k\":3}"
#define PACKED  MASKED ",\"sampling_mask_format\":\"packed\""
#define SUPPORT ",\"sampling_logprobs_mode\":\"support\""
#define BOUNDED ",\"sampling_mask_mode\":\"bounded\""

static const int32_t IDS[][3] = {{80, 279, 264}, {44, 0, 0}, {90, 91, 0}};
static const float LOGPROBS[][3] = {
    {-0.5108256f, -1.2039728f, -2.3025851f}, {0.0f, 0, 0}, {-0.25f, -1.5f, 0}};
static const uint32_t LENGTHS[] = {3, 1, 2};
static const uint32_t SIZES[] = {9, 1, 2}; /* the first one was cut */

/* Row i of three, drawn under weights of `version`. */
static void feed(api_fixture *f, uint32_t sample, uint32_t i, uint64_t version) {
    const bool is_support = f->call.request->generation.mask_mode == ROW_MASK_SUPPORT;
    const bool is_bounded = f->call.request->generation.mask_bounded != 0;
    const token_row row = {.token = IDS[i][0],
                           .mask_mode = is_support ? ROW_MASK_SUPPORT : ROW_MASK_SELECTED,
                           .selected_logprob = LOGPROBS[i][0],
                           .support_count = LENGTHS[i],
                           .support_ids = IDS[i],
                           .support_logprobs = is_support ? LOGPROBS[i] : NULL,
                           .support_size = is_bounded ? SIZES[i] : LENGTHS[i],
                           .weights_version = version};
    api_fixture_feed(f, sample, &row);
}

/* ---- what is expected ------------------------------------------------------------------------ */

typedef struct packed {
    bool is_support, is_bounded;
    uint32_t from, to; /* rows */
} packed;

static void add_array(bt_text *out, const char *name, const char *dtype, size_t elements,
                      const void *data, size_t bytes) {
    char text[256];
    assert_true(bt_base64_length(bytes) < sizeof(text));
    text[bt_base64(text, data, bytes)] = 0;
    bt_text_add_format(out, "\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data\":\"%s\"}", name,
                       dtype, elements, text);
}

/* "output_token_sampling_packed":{...}, */
static void add_packed(bt_text *out, const packed *p) {
    int32_t lengths[3], ids[6], sizes[3];
    float logprobs[6];
    uint8_t truncated[3];
    size_t rows = 0;
    size_t entries = 0;
    size_t values = 0;
    for (uint32_t i = p->from; i < p->to; i++) {
        lengths[rows] = (int32_t)LENGTHS[i];
        sizes[rows] = (int32_t)SIZES[i];
        truncated[rows++] = SIZES[i] > LENGTHS[i];
        for (uint32_t k = 0; k < LENGTHS[i]; k++) {
            ids[entries++] = IDS[i][k];
            if (p->is_support || k == 0) logprobs[values++] = LOGPROBS[i][k];
        }
    }
    bt_text_add_string(out, "\"output_token_sampling_packed\":{");
    add_array(out, "lengths", "int32", rows, lengths, 4 * rows);
    bt_text_add_string(out, ",");
    add_array(out, "token_ids", "int32", entries, ids, 4 * entries);
    bt_text_add_string(out, ",");
    add_array(out, "logprobs", "float32", values, logprobs, 4 * values);
    if (p->is_bounded) {
        bt_text_add_string(out, ",");
        add_array(out, "truncated", "uint8", rows, truncated, rows);
        bt_text_add_string(out, ",");
        add_array(out, "support_sizes", "int32", rows, sizes, 4 * rows);
    }
    bt_text_add_string(out, "},");
}

/* The text has `packed`, then what is told beside it; and no lists. */
static void expect_packed(const char *text, const packed *p, const char *behind) {
    bt_text expected;
    bt_text_init(&expected, 1 << 16);
    add_packed(&expected, p);
    bt_text_add_string(&expected, behind);
    if (strstr(text, expected.bytes) == NULL) fail_msg("%s\nis not in\n%s", expected.bytes, text);
    assert_null(strstr(text, "output_token_sampling_mask\""));
    assert_null(strstr(text, "output_token_sampling_logprobs\""));
    bt_text_fini(&expected);
}

/* ---- whole replies --------------------------------------------------------------------------- */

static void test_known_bytes(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PACKED "}"));
    feed(f, 0, 0, 0);
    feed(f, 0, 1, 0);
    api_fixture_length(f);
    assert_non_null(
        strstr(api_fixture_body(f),
               "\"num_retractions\":0,\"output_token_sampling_packed\":{"
               "\"lengths\":{\"dtype\":\"int32\",\"shape\":[2],\"data\":\"AwAAAAEAAAA=\"},"
               "\"token_ids\":{\"dtype\":\"int32\",\"shape\":[4],\"data\":"
               "\"UAAAABcBAAAIAQAALAAAAA==\"},"
               "\"logprobs\":{\"dtype\":\"float32\",\"shape\":[2],\"data\":\"d8UCvwAAAAA=\"}},"
               "\"output_token_sampling_mask_length\":2,"
               "\"output_token_weight_versions\":[[0,2]],\"reasoning_tokens\":0,"));
}

static void test_whole_replies(void **state) {
    static const char *const bodies[] = {"{" PACKED "}", "{" PACKED SUPPORT "}",
                                         "{" PACKED BOUNDED "}", "{" PACKED SUPPORT BOUNDED "}"};
    api_fixture *f = *state;
    for (uint32_t i = 0; i < 4; i++) {
        const packed all = {.is_support = i % 2 == 1, .is_bounded = i >= 2, .to = 3};
        assert_true(api_fixture_ask(f, API_GENERATE, bodies[i]));
        for (uint32_t k = 0; k < 3; k++) {
            feed(f, 0, k, k < 2 ? 7 : 8);
        }
        api_fixture_length(f);
        expect_packed(api_fixture_body(f), &all,
                      "\"output_token_sampling_mask_length\":3,"
                      "\"output_token_weight_versions\":[[7,2],[8,1]],");
    }
    /* The format alone asks for nothing. */
    assert_true(
        api_fixture_ask(f, API_GENERATE, "{" PROMPT ",\"sampling_mask_format\":\"packed\"}"));
    api_fixture_row(f, 65, 0);
    api_fixture_length(f);
    assert_null(strstr(api_fixture_body(f), "sampling"));
    /* Without a row there is no key. */
    assert_true(api_fixture_ask(f, API_GENERATE, "{" PACKED "}"));
    api_fixture_length(f);
    assert_null(strstr(api_fixture_body(f), "sampling"));
    assert_null(strstr(api_fixture_body(f), "weight_versions"));
}

static void test_bounded_lists(void **state) {
    static const char KEYS[] = "\"output_token_sampling_mask_truncated\":[true,false,false],"
                               "\"output_token_sampling_support_sizes\":[9,1,2],"
                               "\"output_token_sampling_mask_length\":3,"
                               "\"output_token_weight_versions\":[[0,3]],";
    api_fixture *f = *state;
    for (int is_bounded = 0; is_bounded < 2; is_bounded++) {
        assert_true(
            api_fixture_ask(f, API_GENERATE, is_bounded ? "{" MASKED BOUNDED "}" : "{" MASKED "}"));
        for (uint32_t k = 0; k < 3; k++) {
            feed(f, 0, k, 0);
        }
        api_fixture_length(f);
        assert_non_null(strstr(api_fixture_body(f),
                               "\"output_token_sampling_mask\":[[80,279,264],[44],[90,91]],"));
        assert_int_equal(strstr(api_fixture_body(f), KEYS) != NULL, is_bounded);
        assert_int_equal(strstr(api_fixture_body(f), "truncated") != NULL, is_bounded);
    }
}

static void test_samples_of_their_own(void **state) {
    api_fixture *f = *state;
    assert_true(api_fixture_ask(f, API_GENERATE,
                                "{" PROMPT ",\"return_sampling_mask\":true,"
                                "\"sampling_mask_format\":\"packed\","
                                "\"sampling_params\":{\"top_k\":3,\"n\":2}}"));
    feed(f, 0, 0, 5);
    feed(f, 1, 1, 6);
    feed(f, 1, 2, 6);
    api_fixture_sample_fail(f, 1, BT_ERR_REQUEST_OVERFLOW, 400, "");
    api_fixture_length(f);
    const packed first = {.from = 0, .to = 1};
    const packed second = {.from = 1, .to = 3};
    expect_packed(api_fixture_body(f), &first,
                  "\"output_token_sampling_mask_length\":1,"
                  "\"output_token_weight_versions\":[[5,1]],");
    expect_packed(api_fixture_body(f), &second,
                  "\"output_token_sampling_mask_length\":2,"
                  "\"output_token_weight_versions\":[[6,2]],");
}

/* ---- streams --------------------------------------------------------------------------------- */

static void run_stream(api_fixture *f, bool is_incremental) {
    f->settings.is_incremental = is_incremental;
    assert_true(api_fixture_ask(f, API_GENERATE, "{\"stream\":true," PACKED SUPPORT BOUNDED "}"));
    for (uint32_t k = 0; k < 3; k++) {
        char behind[128];
        packed now = {.is_support = true, .is_bounded = true, .to = k + 1};
        if (is_incremental) now.from = k;
        feed(f, 0, k, k);
        snprintf(behind, sizeof(behind), "\"output_token_sampling_mask_length\":%u,", k + 1);
        expect_packed(api_fixture_last_event(f, 0), &now, behind);
        const char *weights = is_incremental ? "[[2,1]]," : "[[0,1],[1,1],[2,1]],";
        if (k == 2) assert_non_null(strstr(api_fixture_last_event(f, 0), weights));
    }
    /* The last event of an end that brings no token has none of the new. */
    const packed none = {.is_support = true, .is_bounded = true, .from = 3, .to = 3};
    const packed all = {.is_support = true, .is_bounded = true, .to = 3};
    api_fixture_length(f);
    expect_packed(api_fixture_last_event(f, 0), is_incremental ? &none : &all,
                  is_incremental ? "\"output_token_sampling_mask_length\":3,"
                                   "\"output_token_weight_versions\":[],"
                                 : "\"output_token_sampling_mask_length\":3,");
}

static void test_streams(void **state) {
    run_stream(*state, false);
    run_stream(*state, true);
}

/* A client that reads a byte at a time gets the same bytes, from the file too. */
static void test_slow_client(void **state) {
    api_fixture *f = *state;
    static char expected[1 << 14];
    for (int slow = 0; slow < 3; slow++) {
        f->limits.memory.bytes_max = slow == 2 ? 0 : 1 << 20;
        assert_true(api_fixture_ask(f, API_GENERATE, "{" PACKED SUPPORT BOUNDED "}"));
        if (slow > 0) f->room = 1;
        for (uint32_t i = 0; i < 60; i++) {
            feed(f, 0, i % 3, i / 7);
        }
        api_fixture_length(f);
        while (f->end_count == 0) {
            f->room = 1;
            api_call_on_room(&f->call);
        }
        if (slow == 0) {
            assert_true(f->body.used < sizeof(expected));
            memcpy(expected, f->body.bytes, f->body.used + 1);
        }
        assert_string_equal(api_fixture_body(f), expected);
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_known_bytes),          CASE(test_whole_replies), CASE(test_bounded_lists),
        CASE(test_samples_of_their_own), CASE(test_streams),       CASE(test_slow_client),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
