/* Whole replies as safetensors files: what is in them, read back by the strict reader, against the
 * JSON reply of the same rows. The fixture checks that the length was told right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/safetensors.h"
#include "tests/unit/router/api_fixture.h"

#define PROMPT "\"rid\":\"r1\",\"input_ids\":[785,6722,315,9625,374]"
#define MASKED PROMPT ",\"return_sampling_mask\":true,\"sampling_params\":{\"top_k\":3"
#define META(reason)                                                                               \
    "\"meta_info\":{\"id\":\"r1\",\"finish_reason\":" reason                                       \
    ",\"prompt_tokens\":5,\"weight_version\":\"default\",\"num_retractions\":0,"
#define TAIL(count)                                                                                \
    "\"reasoning_tokens\":0,\"completion_tokens\":" count                                          \
    ",\"cached_tokens\":0,\"cached_tokens_details\":null,\"dp_rank\":null,"                        \
    "\"e2e_latency\":0.041,\"response_sent_to_client_ts\":1790000000.25}"

static const int32_t IDS[] = {80, 279, 264};
static const float LOGPROBS[] = {-0.5108256f, -1.2039728f, -2.3025851f};

/* A row of `width` entries for a token of sample s. */
static void feed(api_fixture *f, uint32_t sample, uint32_t width) {
    const api_request *request = f->call.items[f->call.samples[sample].item].request;
    const uint32_t mode = request->generation.mask_mode;
    const token_row row = {.token = IDS[0],
                           .mask_mode = mode,
                           .has_logprob = request->generation.wants_logprob,
                           .token_logprob = -1.5f,
                           .selected_logprob = mode != ROW_MASK_OFF ? LOGPROBS[0] : 0,
                           .support_count = mode != ROW_MASK_OFF ? width : 0,
                           .support_ids = IDS,
                           .support_logprobs = mode == ROW_MASK_SUPPORT ? LOGPROBS : NULL,
                           .support_size = mode != ROW_MASK_OFF ? width + width / 3 : 0};
    api_fixture_feed(f, sample, &row);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The body as a file, in a block of its own size; the caller closes and frees. */
static bt_safetensors *open_body(const api_fixture *f, uint8_t **copy_out) {
    bt_safetensors *file;
    bt_error error;
    assert_int_equal(f->status, 200);
    assert_string_equal(f->content_type, "application/x-safetensors");
    assert_int_equal(f->end_count, 1);
    assert_int_equal(f->content_bytes, f->body.used);
    uint8_t *copy = malloc(f->body.used);
    assert_non_null(copy);
    memcpy(copy, f->body.bytes, f->body.used);
    if (bt_safetensors_open_memory(copy, f->body.used, "reply", &file, &error) != BT_OK)
        fail_msg("%s", error.text);
    *copy_out = copy;
    return file;
}

static void expect_tensor(const bt_safetensors *file, const char *name, const void *data,
                          size_t elements) {
    const bt_safetensors_tensor *tensor = bt_safetensors_find(file, name);
    if (tensor == NULL) fail_msg("no tensor %s", name);
    if (tensor->elements != elements) fail_msg("%s has %d", name, (int)tensor->elements);
    assert_int_equal(tensor->dimension_count, 1);
    assert_int_equal(tensor->offset % 4, 0);
    if (elements > 0) assert_memory_equal(tensor->data, data, 4 * elements);
}

static void expect_json(const bt_safetensors *file, const char *expected) {
    const bt_safetensors_tensor *tensor = bt_safetensors_find(file, "reply_json");
    assert_non_null(tensor);
    char *text = calloc(1, tensor->bytes + 1);
    assert_non_null(text);
    memcpy(text, tensor->data, tensor->bytes);
    assert_string_equal(text, expected);
    free(text);
}

static bool ask(api_fixture *f, api_kind kind, const char *body) {
    f->wants_safetensors = true;
    return api_fixture_ask(f, kind, body);
}

/* ---- one sample ------------------------------------------------------------------------------ */

static void test_plain(void **state) {
    static const int32_t TOKENS[] = {72, 105};
    api_fixture *f = *state;
    uint8_t *copy;
    assert_true(ask(f, API_GENERATE, "{" PROMPT "}"));
    api_fixture_text(f, "Hi");
    api_fixture_length(f);
    bt_safetensors *file = open_body(f, &copy);
    assert_int_equal(bt_safetensors_count(file), 2);
    expect_tensor(file, "output_ids", TOKENS, 2);
    expect_json(file, "{\"text\":\"Hi\"," META("{\"type\":\"length\",\"length\":2}") TAIL("2") "}");
    bt_safetensors_close(file);
    free(copy);
}

static void test_masks(void **state) {
    static const int32_t TOKENS[] = {80, 80}, LENGTH[] = {3, 1}, TOKEN_IDS[] = {80, 279, 264, 80};
    static const int32_t TRUNCATED[] = {1, 0}, SIZES[] = {4, 1};
    static const float SELECTED[] = {-0.5108256f, -0.5108256f};
    static const float SUPPORT[] = {-0.5108256f, -1.2039728f, -2.3025851f, -0.5108256f};
    static const char *const bodies[] = {
        "{" MASKED "}}", "{" MASKED "},\"sampling_logprobs_mode\":\"support\"}",
        "{" MASKED "},\"sampling_mask_mode\":\"bounded\",\"sampling_mask_format\":\"packed\"}"};
    api_fixture *f = *state;
    for (int i = 0; i < 3; i++) {
        uint8_t *copy;
        assert_true(ask(f, API_GENERATE, bodies[i]));
        feed(f, 0, 3);
        feed(f, 0, 1);
        api_fixture_length(f);
        bt_safetensors *file = open_body(f, &copy);
        assert_int_equal(bt_safetensors_count(file), i == 2 ? 7 : 5);
        expect_tensor(file, "output_ids", TOKENS, 2);
        expect_tensor(file, "sampling_mask_lengths", LENGTH, 2);
        expect_tensor(file, "sampling_mask_token_ids", TOKEN_IDS, 4);
        expect_tensor(file, "sampling_logprobs", i == 1 ? SUPPORT : SELECTED, i == 1 ? 4 : 2);
        if (i == 2) expect_tensor(file, "sampling_mask_truncated", TRUNCATED, 2);
        if (i == 2) expect_tensor(file, "sampling_mask_support_sizes", SIZES, 2);
        expect_json(
            file,
            "{\"text\":\"PP\"," META(
                "{\"type\":\"length\",\"length\":2}") "\"output_token_sampling_mask_length\":2,"
                                                      "\"output_token_weight_versions\":[[0,"
                                                      "2]]," TAIL("2") "}");
        bt_safetensors_close(file);
        free(copy);
    }
}

static void test_no_rows(void **state) {
    api_fixture *f = *state;
    uint8_t *copy;
    assert_true(ask(f, API_GENERATE,
                    "{" MASKED ",\"max_new_tokens\":0},\"sampling_mask_mode\":\"bounded\"}"));
    api_fixture_length(f);
    bt_safetensors *file = open_body(f, &copy);
    assert_int_equal(bt_safetensors_count(file), 7);
    expect_tensor(file, "output_ids", NULL, 0);
    expect_tensor(file, "sampling_mask_lengths", NULL, 0);
    expect_tensor(file, "sampling_mask_token_ids", NULL, 0);
    expect_tensor(file, "sampling_logprobs", NULL, 0);
    expect_tensor(file, "sampling_mask_truncated", NULL, 0);
    expect_tensor(file, "sampling_mask_support_sizes", NULL, 0);
    expect_json(file, "{\"text\":\"\"," META("{\"type\":\"length\",\"length\":0}") TAIL("0") "}");
    bt_safetensors_close(file);
    free(copy);
}

static void test_errors_stay_json(void **state) {
    api_fixture *f = *state;
    assert_false(ask(f, API_GENERATE, "{" PROMPT ",\"stream\":true}"));
    assert_int_equal(f->status, 400);
    assert_string_equal(f->content_type, "application/json");
    assert_non_null(strstr(api_fixture_body(f), "application/x-safetensors"));
    assert_false(ask(f, API_CHAT, "{\"input_ids\":[7],\"stream\":true}"));
    assert_int_equal(f->status, 400);
    assert_non_null(strstr(api_fixture_body(f), "\"object\":\"error\""));
    assert_false(ask(f, API_GENERATE, "{\"text\":1}"));
    assert_int_equal(f->status, 400);
    assert_string_equal(f->content_type, "application/json");
    assert_true(ask(f, API_GENERATE, "{" MASKED "}}"));
    feed(f, 0, 3);
    api_fixture_fail(f, BT_ERR_REQUEST_OVERFLOW, 400, "");
    assert_int_equal(f->status, 400);
    assert_string_equal(f->content_type, "application/json");
}

/* ---- several --------------------------------------------------------------------------------- */

static void test_samples(void **state) {
    static const int32_t TOKENS[] = {80, 80}, LENGTH[] = {2, 1}, TOKEN_IDS[] = {80, 279, 80};
    api_fixture *f = *state;
    uint8_t *copy;
    assert_true(ask(f, API_GENERATE, "{" MASKED ",\"n\":3}}"));
    feed(f, 0, 2);
    feed(f, 1, 2);
    feed(f, 0, 1);
    /* One fails behind its first token, one has none. */
    api_fixture_sample_fail(f, 1, BT_ERR_REQUEST_OVERFLOW, 400, "");
    api_fixture_length(f);
    bt_safetensors *file = open_body(f, &copy);
    assert_int_equal(bt_safetensors_count(file), 3 * 4 + 1);
    expect_tensor(file, "0.output_ids", TOKENS, 2);
    expect_tensor(file, "0.sampling_mask_lengths", LENGTH, 2);
    expect_tensor(file, "0.sampling_mask_token_ids", TOKEN_IDS, 3);
    expect_tensor(file, "1.output_ids", TOKENS, 1);
    expect_tensor(file, "1.sampling_mask_lengths", LENGTH, 1);
    expect_tensor(file, "1.sampling_mask_token_ids", TOKEN_IDS, 2);
    expect_tensor(file, "1.sampling_logprobs", LOGPROBS, 1);
    expect_tensor(file, "2.output_ids", NULL, 0);
    expect_tensor(file, "2.sampling_mask_token_ids", NULL, 0);
    const bt_safetensors_tensor *json = bt_safetensors_find(file, "reply_json");
    assert_memory_equal(json->data, "[{\"text\":\"PP\",", 14);
    assert_int_equal(json->data[json->bytes - 1], ']');
    bt_safetensors_close(file);
    free(copy);
    assert_true(ask(f, API_GENERATE, "{" MASKED ",\"n\":3}}"));
    api_fixture_fail(f, BT_ERR_REQUEST_OVERFLOW, 400, "");
    assert_int_equal(f->status, 400);
    assert_string_equal(f->content_type, "application/json");
}

static void test_chat(void **state) {
    static const int32_t TOKENS[] = {80};
    api_fixture *f = *state;
    uint8_t *copy;
    /* Masks need no meta_info here. */
    assert_true(ask(f, API_CHAT,
                    "{\"rid\":\"c\",\"model\":\"m\",\"input_ids\":[7,8,9],\"top_k\":3,"
                    "\"return_sampling_mask\":true,\"return_token_ids\":true}"));
    feed(f, 0, 3);
    api_fixture_length(f);
    bt_safetensors *file = open_body(f, &copy);
    assert_int_equal(bt_safetensors_count(file), 5);
    expect_tensor(file, "output_ids", TOKENS, 1);
    expect_tensor(file, "sampling_mask_token_ids", IDS, 3);
    expect_json(file,
                "{\"id\":\"c\",\"object\":\"chat.completion\",\"created\":1790000000,\"model\":"
                "\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
                "\"P\",\"reasoning_content\":null,\"tool_calls\":null},\"logprobs\":null,"
                "\"finish_reason\":\"length\",\"matched_stop\":null}],\"usage\":{\"prompt_tokens\":"
                "3,\"completion_tokens\":1,\"total_tokens\":4,\"prompt_tokens_details\":{"
                "\"cached_tokens\":0},\"reasoning_tokens\":0},\"metadata\":{\"weight_version\":"
                "\"default\"}}");
    bt_safetensors_close(file);
    free(copy);
    /* A list of one prompt has one choice, which needs no prefix. */
    assert_true(ask(f, API_COMPLETION, "{\"prompt\":[[7,8,9]]}"));
    api_fixture_text(f, "P");
    api_fixture_length(f);
    file = open_body(f, &copy);
    expect_tensor(file, "output_ids", TOKENS, 1);
    bt_safetensors_close(file);
    free(copy);
}

/* ---- portions -------------------------------------------------------------------------------- */

/* Far more than one portion, of several samples; read byte by byte and at once, from memory and
 * from the file: the same bytes. What the backend says while the reply goes out changes nothing. */
static void test_portions(void **state) {
    api_fixture *f = *state;
    static uint8_t expected[1 << 21];
    size_t bytes = 0;
    f->model.context_tokens = 7000;
    f->model.room_tokens = 7000;
    for (int round = 0; round < 3; round++) {
        f->limits.memory.bytes_max = round == 1 ? 0 : 1 << 24;
        f->limits.spill.bytes_max = 1 << 24;
        assert_true(ask(f, API_GENERATE,
                        "{" MASKED ",\"n\":3,\"max_new_tokens\":5000,\"stop\":\"##\"},"
                        "\"return_logprob\":true,\"sampling_logprobs_mode\":\"support\"}"));
        f->room = round == 0 ? SIZE_MAX : 0;
        for (uint32_t i = 0; i < 4500; i++) {
            feed(f, i % 3, 1 + i % 3);
        }
        /* Each is ended here, and the backend has not heard of it yet. */
        for (uint32_t i = 0; i < 3; i++) {
            const token_row row = {.token = '#',
                                   .mask_mode = ROW_MASK_SUPPORT,
                                   .has_logprob = 1,
                                   .support_count = 1,
                                   .support_ids = IDS,
                                   .support_logprobs = LOGPROBS,
                                   .support_size = 1};
            api_fixture_feed(f, i, &row);
            api_fixture_feed(f, i, &row);
        }
        f->cached_tokens = 12345;
        f->retractions = 77;
        if (round == 2) {
            f->now_us += 123456789;
            f->room = 100;
            api_call_on_room(&f->call);
            feed(f, 0, 3);
            api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
        }
        while (f->end_count == 0) {
            f->room = round == 1 ? 1000 : 65536;
            api_call_on_room(&f->call);
        }
        if (round != 2) api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "cancelled");
        assert_int_equal(f->body.used, f->content_bytes);
        if (round == 0) {
            bytes = f->body.used;
            assert_true(bytes > 150000 && bytes < sizeof(expected));
            memcpy(expected, f->body.bytes, bytes);
        }
        assert_int_equal(f->body.used, bytes);
        assert_memory_equal(f->body.bytes, expected, bytes);
        f->cached_tokens = 0;
        f->retractions = 0;
        if (round == 2) f->now_us -= 123456789;
    }
    uint8_t *copy;
    bt_safetensors *file = open_body(f, &copy);
    const bt_safetensors_tensor *ids = bt_safetensors_find(file, "2.sampling_mask_token_ids");
    assert_int_equal(ids->elements, 1500 * 3 + 2);
    bt_safetensors_close(file);
    free(copy);
}

/* Rows with the largest log-probabilities of each position, which go into the JSON. */
static void feed_tops(api_fixture *f, uint32_t rows) {
    row_top top[64];
    for (uint32_t i = 0; i < 64; i++) {
        top[i] = (row_top){(int32_t)i, -0.1f - (float)i};
    }
    for (uint32_t i = 0; i < rows; i++) {
        const token_row row = {
            .token = 65, .has_logprob = 1, .token_logprob = -0.1f, .top_count = 64, .top = top};
        api_fixture_feed(f, 0, &row);
    }
}

/* A long JSON is measured in slices, between which other calls have their turns. */
static void test_slices(void **state) {
    static const char body[] = "{" PROMPT ",\"return_logprob\":true,\"top_logprobs_num\":64,"
                               "\"sampling_params\":{\"max_new_tokens\":2000}}";
    api_fixture *f = *state;
    f->model.context_tokens = 3000;
    f->model.room_tokens = 3000;
    f->limits.memory.bytes_max = 1 << 24;
    for (int leaves = 0; leaves < 2; leaves++) {
        unsigned slices = 1;
        assert_true(ask(f, API_GENERATE, body));
        feed_tops(f, 1000);
        api_fixture_length(f);
        assert_int_equal(f->begin_count, 0);
        for (; f->wake_count > 0 && !(leaves && slices == 2); slices++) {
            f->wake_count = 0;
            api_call_on_room(&f->call);
        }
        if (leaves) {
            api_call_on_gone(&f->call);
            assert_int_equal(f->begin_count, 0);
            continue;
        }
        assert_true(slices > 2);
        uint8_t *copy;
        bt_safetensors *file = open_body(f, &copy);
        assert_true(bt_safetensors_find(file, "reply_json")->elements > slices / 2 * 512 * 1024);
        bt_safetensors_close(file);
        free(copy);
    }
}

/* Rows that were spilled are read through a window for each sample: those of samples that are not
 * being written are given back. */
static void test_windows_of_spilled_samples(void **state) {
    enum { COUNT = 6 };
    api_fixture *f = *state;
    f->limits.memory.bytes_max = 0;
    assert_true(ask(f, API_GENERATE, "{" MASKED ",\"n\":6},\"return_logprob\":true}"));
    f->room = 0;
    for (uint32_t i = 0; i < 10 * COUNT; i++) {
        feed(f, i % COUNT, 3);
    }
    api_fixture_length(f);
    for (unsigned turns = 0; f->end_count == 0; turns++) {
        uint32_t windows = 0;
        for (uint32_t i = 0; i < COUNT; i++) {
            windows += f->call.samples[i].store.window != NULL;
        }
        assert_true(windows <= 2 && turns < 1000);
        f->room = 50;
        api_call_on_room(&f->call);
    }
}

#ifdef BT_FAULT
static void feed_all(api_fixture *f) {
    for (uint32_t i = 0; i < 80; i++) {
        feed(f, i % 2, 3);
    }
}

/* A failure is told, or the answer is cut; never a file that ends early. */
static void test_out_of_memory(void **state) {
    api_fixture *f = *state;
    f->wants_safetensors = true;
    api_fixture_run_out_of_memory(f, API_GENERATE, "{" MASKED ",\"n\":2}}", feed_all);
}

/* The text that everything is made in may be gone between two slices: others gave theirs away. What
 * it cannot grow for, the head's length included, is a failure and not a wrong length. */
static void test_no_memory_between_slices(void **state) {
    static const char body[] = "{" PROMPT ",\"return_logprob\":true,\"top_logprobs_num\":64,"
                               "\"sampling_params\":{\"max_new_tokens\":2000}}";
    api_fixture *f = *state;
    unsigned failures = 0;
    f->model.context_tokens = 3000;
    f->model.room_tokens = 3000;
    f->limits.memory.bytes_max = 1 << 24;
    /* Some of these end with their first slice, and only the head is left for the second. */
    for (uint32_t rows = 262; rows < 290; rows++) {
        assert_true(ask(f, API_GENERATE, body));
        feed_tops(f, rows);
        api_fixture_length(f);
        if (f->wake_count == 0) continue;
        bt_text_fini(&f->scratch);
        bt_fault_set(BT_FAULT_ALLOC, 1);
        api_call_on_room(&f->call);
        bt_fault_set(BT_FAULT_ALLOC, 0);
        assert_int_equal(f->end_count, 1);
        assert_int_equal(f->status, 503);
        failures++;
    }
    assert_true(failures > 5);
}
#endif

#define CASE(name) cmocka_unit_test_setup_teardown(name, api_fixture_set_up, api_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_plain),
        CASE(test_masks),
        CASE(test_no_rows),
        CASE(test_errors_stay_json),
        CASE(test_samples),
        CASE(test_chat),
        CASE(test_portions),
        CASE(test_slices),
        CASE(test_windows_of_spilled_samples),
#ifdef BT_FAULT
        CASE(test_out_of_memory),
        CASE(test_no_memory_between_slices),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
