/* model_load and model_step against recorded answers of an independent implementation in float32 on
 * the same bf16-rounded weights, KV in f32 (tests/vectors/make_model_fixtures.py). The tiny models
 * are written here from their seed, as an HF folder and as GGUF; the demo model is
 * $BATON_DEMO_MODEL. */
#include "kernels/model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file_map.h"
#include "base/mem.h"
#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"

enum {
    SEED = 20240607, /* of make_model_fixtures.py */
    PAGE_TOKENS = 32,
    PAGES = 8,
    TOKENS_MAX = PAGES * PAGE_TOKENS,
    GREEDY_MAX = 64,
    LINE_BYTES_MAX = 4096,
};

/* One sequence on one model. */
typedef struct session {
    model *m;
    model_runner *runner;
    uint8_t *memory;
    float *logits; /* [vocab_size], of the last step */
    uint32_t done; /* tokens with KV */
} session;

static void open_session(session *s, const char *path, uint32_t threads) {
    bt_error error = {0};
    *s = (session){0};
    if (model_load(path, NULL, &s->m, &error) != BT_OK) fail_msg("%s", error.text);
    const kv_page_layout layout = model_kv_layout(s->m, PAGE_TOKENS, KV_DTYPE_F32);
    s->memory = bt_calloc(PAGES, kv_page_bytes(&layout));
    s->logits = bt_calloc(model_get_card(s->m)->geometry.vocab_size, sizeof(float));
    assert_non_null(s->memory);
    assert_non_null(s->logits);
    const model_runner_options options = {
        .threads = threads,
        .tokens_max = TOKENS_MAX,
        .rows_max = 1,
        .kv = layout,
        .kv_memory = s->memory,
        .kv_page_count = PAGES,
    };
    if (model_runner_create(s->m, &options, &s->runner, &error) != BT_OK) {
        fail_msg("%s", error.text);
    }
}

static void close_session(session *s) {
    model_runner_destroy(s->runner);
    model_destroy(s->m);
    bt_free(s->memory);
    bt_free(s->logits);
}

/* Feeds the next tokens; gives the greedy token after them and leaves its logits in s->logits. */
static int32_t feed(session *s, const int32_t *ids, uint32_t count) {
    static const uint32_t page_ids[PAGES] = {5, 2, 7, 0, 3, 6, 1, 4};
    const uint32_t token_offsets[2] = {0, count};
    const uint32_t page_offsets[2] = {0, kv_pages_for(s->done + count, PAGE_TOKENS)};
    const sampler_params greedy = {.temperature = 1.0f, .top_p = 1.0f, .top_k = 1};
    const uint8_t samples = 1;
    sampler_row row = {0};
    const model_batch batch = {
        .sequences = 1,
        .tokens = count,
        .token_offsets = token_offsets,
        .token_ids = ids,
        .first_positions = &s->done,
        .page_offsets = page_offsets,
        .page_ids = page_ids,
        .samples = &samples,
        .sampling = &greedy,
        .rows = &row,
        .logits = s->logits,
    };
    assert_int_equal(model_step(s->runner, &batch), BT_OK);
    assert_int_equal(row.status, SAMPLER_OK);
    s->done += count;
    return row.token;
}

/* A .logits file, mapped; its numbers are aligned. */
typedef struct logits_file {
    bt_file_map map;
    uint32_t tokens, position_count, vocab_size;
    const uint8_t *ids;       /* i32 [tokens] */
    const uint8_t *positions; /* u32 [position_count], ascending */
    const uint8_t *logits;    /* f32 [position_count, vocab_size] */
} logits_file;

static uint32_t load_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static logits_file open_logits(const char *name) {
    logits_file f = {0};
    char path[256];
    bt_error error;
    (void)snprintf(path, sizeof path, "tests/vectors/tiny_%s.logits", name);
    if (bt_file_map_open(path, &f.map, &error) != BT_OK) fail_msg("%s", error.text);
    assert_true(f.map.bytes >= 12);
    f.tokens = load_u32(f.map.data);
    f.position_count = load_u32(f.map.data + 4);
    f.vocab_size = load_u32(f.map.data + 8);
    f.ids = f.map.data + 12;
    f.positions = f.ids + 4 * (size_t)f.tokens;
    f.logits = f.positions + 4 * (size_t)f.position_count;
    const size_t numbers = (size_t)f.position_count * f.vocab_size;
    assert_int_equal(f.map.bytes, 12 + 4 * (f.tokens + f.position_count + numbers));
    assert_true(f.tokens <= TOKENS_MAX);
    return f;
}

/* |got - wanted| / |wanted|, both [count]. */
static double relative_error(const float *got, const uint8_t *wanted, uint32_t count) {
    double error = 0;
    double norm = 0;
    for (uint32_t i = 0; i < count; i++) {
        float reference;
        memcpy(&reference, wanted + 4 * (size_t)i, sizeof reference);
        const double difference = (double)got[i] - (double)reference;
        error += difference * difference;
        norm += (double)reference * (double)reference;
    }
    return sqrt(error / norm);
}

/* One step up to each recorded position: long chunks, short ones and single tokens. Returns the
 * largest error. */
static double compare_logits(session *s, const logits_file *f) {
    int32_t ids[TOKENS_MAX];
    double largest = 0;
    memcpy(ids, f->ids, sizeof ids[0] * f->tokens);
    for (uint32_t p = 0; p < f->position_count; p++) {
        const uint32_t position = load_u32(f->positions + 4 * (size_t)p);
        assert_true(position >= s->done && position < f->tokens);
        (void)feed(s, ids + s->done, position + 1 - s->done);
        const uint8_t *wanted = f->logits + 4 * (size_t)p * f->vocab_size;
        const double error = relative_error(s->logits, wanted, f->vocab_size);
        if (!(error <= 1e-4)) fail_msg("position %u: relative error %g", position, error);
        if (error > largest) largest = error;
    }
    return largest;
}

static void check_tiny(const char *name) {
    tiny_model m = {.seed = SEED};
    logits_file f = open_logits(name);
    const test_folder folder = test_folder_make();
    char gguf[300];
    assert_true(tiny_model_parse(name, &m));
    assert_int_equal(tiny_model_write_hf(&m, folder.path), BT_OK);
    assert_int_equal(tiny_model_write_gguf(&m, folder.path, "model.gguf"), BT_OK);
    (void)snprintf(gguf, sizeof gguf, "%s/model.gguf", folder.path);
    const char *const paths[] = {folder.path, gguf};
    uint8_t fingerprints[2][MODEL_FINGERPRINT_BYTES];
    for (size_t i = 0; i < BT_ARRAY_COUNT(paths); i++) {
        session s;
        open_session(&s, paths[i], 1);
        assert_int_equal(model_get_card(s.m)->geometry.vocab_size, f.vocab_size);
        memcpy(fingerprints[i], model_get_card(s.m)->fingerprint, sizeof fingerprints[i]);
        const double largest = compare_logits(&s, &f);
        print_message("%s: largest relative error %.2g\n", name, largest);
        close_session(&s);
    }
    assert_memory_equal(fingerprints[0], fingerprints[1], MODEL_FINGERPRINT_BYTES);
    bt_file_map_close(&f.map);
    test_folder_remove(&folder);
}

static void tiny_llama_agrees(void **state) {
    (void)state;
    check_tiny("llama");
}

static void tiny_qwen2_agrees(void **state) {
    (void)state;
    check_tiny("qwen2");
}

static void tiny_qwen3_agrees(void **state) {
    (void)state;
    check_tiny("qwen3");
}

/* The comparison can fail: weights of another seed, and ids in another order, are far off. */
static void another_model_does_not_agree(void **state) {
    (void)state;
    const tiny_model m = {.family = MODEL_FAMILY_LLAMA, .seed = SEED + 1};
    logits_file f = open_logits("llama");
    const test_folder folder = test_folder_make();
    session s;
    int32_t id;
    assert_int_equal(tiny_model_write_hf(&m, folder.path), BT_OK);
    open_session(&s, folder.path, 1);
    memcpy(&id, f.ids, sizeof id);
    (void)feed(&s, &id, 1);
    assert_true(relative_error(s.logits, f.logits, f.vocab_size) > 0.1);
    close_session(&s);
    bt_file_map_close(&f.map);
    test_folder_remove(&folder);
}

/* One prompt of demo_greedy.txt. */
typedef struct greedy_case {
    int32_t prompt[TOKENS_MAX];
    uint32_t prompt_count;
    int32_t ids[GREEDY_MAX];
    double gaps[GREEDY_MAX]; /* between the best two logits */
    uint32_t count;
} greedy_case;

static void parse_prompt(const char *text, greedy_case *c) {
    char *end = NULL;
    for (c->prompt_count = 0; c->prompt_count < TOKENS_MAX; c->prompt_count++) {
        const long id = strtol(text, &end, 10);
        if (end == text) return;
        c->prompt[c->prompt_count] = (int32_t)id;
        text = end;
    }
}

static void parse_greedy(const char *text, greedy_case *c) {
    char *end = NULL;
    for (c->count = 0; c->count < GREEDY_MAX; c->count++) {
        const long id = strtol(text, &end, 10);
        if (end == text || *end != ':') return;
        c->ids[c->count] = (int32_t)id;
        text = end + 1;
        c->gaps[c->count] = strtod(text, &end);
        text = end;
    }
}

/* Follows the recorded tokens, so that every position can be compared; those where the best two are
 * nearly equal are left out. Returns the number compared. */
static uint32_t compare_greedy(session *s, const greedy_case *c) {
    uint32_t compared = 0;
    s->done = 0;
    int32_t token = feed(s, c->prompt, c->prompt_count);
    for (uint32_t i = 0; i < c->count; i++) {
        if (c->gaps[i] >= 0.05) {
            if (token != c->ids[i]) fail_msg("token %u is %d, not %d", i, token, c->ids[i]);
            compared++;
        }
        token = feed(s, &c->ids[i], 1);
    }
    return compared;
}

static void demo_model_agrees(void **state) {
    (void)state;
    const char *path = getenv("BATON_DEMO_MODEL");
    if (path == NULL || path[0] == '\0') skip();
    FILE *file = fopen("tests/vectors/demo_greedy.txt", "re");
    assert_non_null(file);
    static greedy_case c;
    session s;
    char line[LINE_BYTES_MAX];
    uint32_t cases = 0;
    open_session(&s, path, 2);
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "prompt ", 7) == 0) parse_prompt(line + 7, &c);
        if (strncmp(line, "greedy ", 7) != 0) continue;
        parse_greedy(line + 7, &c);
        assert_true(c.prompt_count > 0 && c.count >= 20);
        const uint32_t compared = compare_greedy(&s, &c);
        print_message("prompt %u: %u of %u tokens compared\n", cases, compared, c.count);
        assert_true(compared >= 20);
        cases++;
    }
    close_session(&s);
    assert_int_equal(fclose(file), 0);
    assert_true(cases >= 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiny_llama_agrees), cmocka_unit_test(tiny_qwen2_agrees),
        cmocka_unit_test(tiny_qwen3_agrees), cmocka_unit_test(another_model_does_not_agree),
        cmocka_unit_test(demo_model_agrees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
