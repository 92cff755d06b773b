/* Rule 4, one factor at a time. A base run computes every sequence alone, in one thread, one prompt
 * in one step; every variation must give the same logits, draws and KV pages, to the bit. With
 * --few the first model alone goes through every variation, each of the others through every third
 * one. */
#include "kernels/model.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/mem.h"
#include "kernels/model/model_generate.h"
#include "kernels/ops.h"
#include "tests/kernels/random_data.h"
#include "tests/kernels/tiny_models.h"

enum {
    SEQUENCES = 4,
    GENERATED = 6, /* tokens after the prompt */
    PAGES = 256,
    PAGES_PER_SEQUENCE = 48,
    TOKENS_MAX = 700,
    PROMPT_MAX = 600,
};

static const uint32_t prompt_tokens[SEQUENCES] = {1, 33, 70, 600};

/* How a run is done; the base run is all zeros but for one thread. */
typedef struct variation {
    const char *isa;
    uint32_t threads;
    uint32_t page_tokens;
    kv_dtype dtype;
    uint32_t chunk;        /* prompt tokens per step; 0 = all */
    bool is_batched;       /* all sequences in one batch, not one after the other */
    bool is_reversed;      /* order of the sequences in the batch */
    uint64_t page_seed;    /* shuffles the pages; 0 = in order */
    bool gives_last_alone; /* the last prompt token goes through a step of its own */
} variation;

/* What must not vary. KV is copied out of the pages in logical order. */
typedef struct outcome {
    float *logits; /* [SEQUENCES, GENERATED, vocab] */
    int32_t tokens[SEQUENCES][GENERATED];
    uint8_t *kv; /* [SEQUENCES][page][bytes of used tokens], in token order */
    size_t kv_bytes;
} outcome;

typedef struct bench {
    const model *m;
    variation v;
    model_runner *runner;
    kv_page_layout layout;
    uint8_t *memory;
    uint32_t pages[SEQUENCES][PAGES_PER_SEQUENCE];
    int32_t ids[SEQUENCES][PROMPT_MAX + GENERATED];
    uint32_t done[SEQUENCES];  /* tokens with KV */
    uint32_t drawn[SEQUENCES]; /* tokens generated */
    outcome *out;
} bench;

static void *make(size_t bytes) {
    void *block = bt_calloc(1, bytes);
    assert_non_null(block);
    return block;
}

static void deal_pages(bench *b) {
    uint32_t order[PAGES];
    uint64_t seed = b->v.page_seed;
    for (uint32_t i = 0; i < PAGES; i++)
        order[i] = i;
    if (seed != 0) random_order(&seed, order, 0, PAGES);
    for (uint32_t s = 0, next = 0; s < SEQUENCES; s++)
        for (uint32_t i = 0; i < PAGES_PER_SEQUENCE; i++)
            b->pages[s][i] = order[next++];
}

static void open_bench(bench *b, const model *m, variation v, outcome *out) {
    *b = (bench){.m = m, .v = v, .out = out};
    const uint32_t vocab_size = model_get_card(m)->geometry.vocab_size;
    b->layout = model_kv_layout(m, v.page_tokens == 0 ? 32 : v.page_tokens, v.dtype);
    const size_t memory_bytes = PAGES * kv_page_bytes(&b->layout);
    b->memory = make(memory_bytes);
    memset(b->memory, 0xff, memory_bytes); /* NaN: nothing unwritten may be used */
    const model_runner_options options = {.threads = v.threads,
                                          .tokens_max = TOKENS_MAX + SEQUENCES,
                                          .rows_max = SEQUENCES,
                                          .isa = v.isa,
                                          .kv = b->layout,
                                          .kv_memory = b->memory,
                                          .kv_page_count = PAGES};
    bt_error error;
    if (model_runner_create(m, &options, &b->runner, &error) != BT_OK)
        fail_msg("no runner: %s", error.text);
    deal_pages(b);
    uint64_t seed = 42;
    for (uint32_t s = 0; s < SEQUENCES; s++)
        for (uint32_t i = 0; i < PROMPT_MAX; i++)
            b->ids[s][i] = (int32_t)random_below(&seed, vocab_size);
    out->logits = make((size_t)SEQUENCES * GENERATED * vocab_size * sizeof(float));
}

/* Query tokens of a sequence in its next step. */
static uint32_t next_tokens(const bench *b, uint32_t s) {
    if (b->done[s] >= prompt_tokens[s]) return 1;
    const uint32_t rest = prompt_tokens[s] - b->done[s];
    if (b->v.gives_last_alone && rest > 1) return rest - 1;
    return b->v.chunk == 0 || rest < b->v.chunk ? rest : b->v.chunk;
}

typedef struct step_arrays {
    uint32_t token_offsets[SEQUENCES + 1], first_positions[SEQUENCES], page_offsets[SEQUENCES + 1],
        page_ids[SEQUENCES * PAGES_PER_SEQUENCE];
    int32_t token_ids[TOKENS_MAX + SEQUENCES];
    uint8_t samples[SEQUENCES];
    sampler_params sampling[SEQUENCES];
    sampler_row rows[SEQUENCES];
} step_arrays;

static void add_sequence(const bench *b, step_arrays *a, uint32_t row, uint32_t s) {
    const uint32_t tokens = next_tokens(b, s);
    a->first_positions[row] = b->done[s];
    a->token_offsets[row + 1] = a->token_offsets[row] + tokens;
    memcpy(a->token_ids + a->token_offsets[row], b->ids[s] + b->done[s], tokens * sizeof(int32_t));
    const uint32_t pages = kv_pages_for(b->done[s] + tokens, b->layout.page_tokens);
    memcpy(a->page_ids + a->page_offsets[row], b->pages[s], pages * sizeof(uint32_t));
    a->page_offsets[row + 1] = a->page_offsets[row] + pages;
    a->samples[row] = b->done[s] + tokens >= prompt_tokens[s];
    a->sampling[row] =
        (sampler_params){.temperature = 0.8F, .top_p = 0.9F, .top_k = 20, .seed = 1000 + s};
}

/* One step of the sequences list[0 .. count). */
static void step(bench *b, const uint32_t *list, uint32_t count) {
    static step_arrays a;
    memset(&a, 0, sizeof a);
    const uint32_t vocab_size = model_get_card(b->m)->geometry.vocab_size;
    float *logits = make((size_t)count * vocab_size * sizeof *logits);
    for (uint32_t row = 0; row < count; row++)
        add_sequence(b, &a, row, list[row]);
    const model_batch batch = {.sequences = count,
                               .tokens = a.token_offsets[count],
                               .token_offsets = a.token_offsets,
                               .token_ids = a.token_ids,
                               .first_positions = a.first_positions,
                               .page_offsets = a.page_offsets,
                               .page_ids = a.page_ids,
                               .samples = a.samples,
                               .sampling = a.sampling,
                               .rows = a.rows,
                               .logits = logits};
    assert_int_equal(model_step(b->runner, &batch), BT_OK);
    for (uint32_t row = 0; row < count; row++) {
        const uint32_t s = list[row];
        b->done[s] += a.token_offsets[row + 1] - a.token_offsets[row];
        if (a.samples[row] == 0) continue;
        assert_int_equal(a.rows[row].status, SAMPLER_OK);
        memcpy(b->out->logits + ((size_t)s * GENERATED + b->drawn[s]) * vocab_size,
               logits + (size_t)row * vocab_size, vocab_size * sizeof *logits);
        b->out->tokens[s][b->drawn[s]++] = a.rows[row].token;
        b->ids[s][b->done[s]] = a.rows[row].token;
    }
    bt_free(logits);
}

static void run_sequences(bench *b) {
    for (uint32_t s = 0; s < SEQUENCES && !b->v.is_batched; s++)
        while (b->drawn[s] < GENERATED)
            step(b, &s, 1);
    for (;;) {
        uint32_t list[SEQUENCES];
        uint32_t count = 0, tokens = 0;
        for (uint32_t i = 0; i < SEQUENCES; i++) {
            const uint32_t s = b->v.is_reversed ? SEQUENCES - 1 - i : i;
            if (b->drawn[s] >= GENERATED) continue;
            if (tokens + next_tokens(b, s) > TOKENS_MAX) continue;
            tokens += next_tokens(b, s);
            list[count++] = s;
        }
        if (count == 0) return;
        step(b, list, count);
    }
}

/* K and V of every token, token by token, whatever the page size. */
static void collect_kv(bench *b) {
    const kv_page_layout *l = &b->layout;
    const size_t token_bytes = l->head_dim * kv_element_bytes(l->dtype);
    const size_t heads = (size_t)l->layers * 2 * l->kv_heads;
    size_t tokens = 0;
    for (uint32_t s = 0; s < SEQUENCES; s++)
        tokens += b->done[s];
    b->out->kv_bytes = tokens * heads * token_bytes;
    uint8_t *to = b->out->kv = make(b->out->kv_bytes);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        for (uint32_t t = 0; t < b->done[s]; t++)
            for (size_t h = 0; h < heads; h++, to += token_bytes)
                memcpy(to,
                       b->memory + b->pages[s][t / l->page_tokens] * kv_page_bytes(l) +
                           h * kv_head_bytes(l) + t % l->page_tokens * token_bytes,
                       token_bytes);
}

static outcome run(const model *m, variation v) {
    outcome out = {0};
    bench b;
    open_bench(&b, m, v, &out);
    run_sequences(&b);
    collect_kv(&b);
    model_runner_destroy(b.runner);
    bt_free(b.memory);
    return out;
}

static void free_outcome(outcome *o) {
    bt_free(o->logits);
    bt_free(o->kv);
}

static void assert_equal_outcome(const model *m, const outcome *base, variation v,
                                 const char *what) {
    const size_t bytes =
        (size_t)SEQUENCES * GENERATED * model_get_card(m)->geometry.vocab_size * sizeof(float);
    outcome got = run(m, v);
    assert_int_equal(got.kv_bytes, base->kv_bytes);
    if (memcmp(got.tokens, base->tokens, sizeof got.tokens) != 0)
        fail_msg("tokens vary with %s", what);
    if (memcmp(got.logits, base->logits, bytes) != 0) fail_msg("logits vary with %s", what);
    if (memcmp(got.kv, base->kv, got.kv_bytes) != 0) fail_msg("KV varies with %s", what);
    free_outcome(&got);
}

static model *tiny(size_t index) {
    model *m = NULL;
    bt_error error;
    if (model_generate(&tiny_models[index], 7 + index, &m, &error) != BT_OK)
        fail_msg("no model: %s", error.text);
    return m;
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t count) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3U;
    return hash;
}

/* FNV-1a over tokens, logits and KV of a base run. Another machine, compiler or architecture gives
 * the same one; a change of arithmetic changes it, and must change model_numerics(). */
static uint64_t outcome_hash(const model *m, const outcome *o) {
    const size_t floats = (size_t)SEQUENCES * GENERATED * model_get_card(m)->geometry.vocab_size;
    uint64_t hash = 0xcbf29ce484222325U;
    hash = hash_bytes(hash, o->tokens, sizeof o->tokens);
    hash = hash_bytes(hash, o->logits, floats * sizeof(float));
    return hash_bytes(hash, o->kv, o->kv_bytes);
}

/* Models so far, and whether each but the first goes through every third variation only: the next
 * model through the ones behind these. */
static struct {
    bool is_few;
    size_t models;
} course;

static bool takes(size_t nth) {
    return !course.is_few || course.models == 1 || (nth + course.models) % 3 == 0;
}

static void check_model(model *m, kv_dtype dtype, uint64_t recorded_hash) {
    course.models++;
    const variation alone = {.threads = 1, .dtype = dtype};
    outcome base = run(m, alone);
    const uint32_t vocab_size = model_get_card(m)->geometry.vocab_size;
    for (size_t i = 0; i < (size_t)SEQUENCES * GENERATED * vocab_size; i++)
        assert_true(base.logits[i] > -1e6F && base.logits[i] < 1e6F);
    if (outcome_hash(m, &base) != recorded_hash)
        fail_msg("%s changed: the hash is now 0x%016" PRIx64, model_get_numerics(m),
                 outcome_hash(m, &base));
    const struct {
        const char *what;
        variation v;
    } factors[] = {
        {"the batch", {.is_batched = true}},
        {"the order in the batch", {.is_batched = true, .is_reversed = true}},
        {"chunks of 1", {.chunk = 1}},
        {"chunks of 7", {.chunk = 7}},
        {"chunks of 32", {.chunk = 32}},
        {"chunks of 512", {.chunk = 512}},
        {"a last token alone", {.gives_last_alone = true}},
        {"batches of chunks", {.chunk = 32, .is_batched = true}},
        {"the page order", {.page_seed = 5}},
        {"pages of 16", {.page_tokens = 16}},
        {"pages of 64", {.page_tokens = 64, .page_seed = 9}},
        {"2 threads", {.threads = 2}},
        {"3 threads", {.threads = 3, .is_batched = true}},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(factors); i++) {
        if (!takes(i)) continue;
        variation v = factors[i].v;
        v.threads = v.threads == 0 ? 1 : v.threads;
        v.dtype = dtype;
        assert_equal_outcome(m, &base, v, factors[i].what);
    }
    for (uint32_t i = 0; dev_host_isa_at(i) != NULL; i++) {
        variation v = {.isa = dev_host_isa_at(i), .threads = 1, .dtype = dtype};
        if (takes(i)) assert_equal_outcome(m, &base, v, v.isa);
        v = (variation){.isa = v.isa,
                        .threads = 3,
                        .dtype = dtype,
                        .chunk = 32,
                        .is_batched = true,
                        .page_seed = 3,
                        .page_tokens = 16};
        assert_equal_outcome(m, &base, v, v.isa);
    }
    free_outcome(&base);
    model_destroy(m);
}

static void check_family(size_t index, kv_dtype dtype, uint64_t recorded_hash) {
    check_model(tiny(index), dtype, recorded_hash);
}

static void llama_is_prefix_deterministic(void **state) {
    (void)state;
    check_family(0, KV_DTYPE_BF16, 0x7de47ac84438af62U);
}

static void qwen2_is_prefix_deterministic(void **state) {
    (void)state;
    check_family(1, KV_DTYPE_BF16, 0x0a8646fa7781bd71U);
}

static void qwen3_is_prefix_deterministic(void **state) {
    (void)state;
    check_family(2, KV_DTYPE_BF16, 0xcc229842aeee09adU);
}

static void mistral_is_prefix_deterministic(void **state) {
    (void)state;
    check_family(3, KV_DTYPE_BF16, 0x715e0505e94d1efeU);
}

static void f32_pages_are_prefix_deterministic(void **state) {
    (void)state;
    check_family(0, KV_DTYPE_F32, 0x0251d670cf2717dfU);
}

/* ---- weights in other formats */

static model *tiny_stored(size_t index, pack_format stored, model_weights weights) {
    model *m = NULL;
    bt_error error;
    if (model_generate_stored(&tiny_models[index], 7 + index, stored, weights, &m, &error) != BT_OK)
        fail_msg("no model: %s", error.text);
    return m;
}

static void int8_is_prefix_deterministic(void **state) {
    (void)state;
    check_model(tiny_stored(0, PACK_BF16, MODEL_WEIGHTS_INT8), KV_DTYPE_BF16, 0x1f3059b1ae71471bU);
    check_model(tiny_stored(1, PACK_BF16, MODEL_WEIGHTS_INT8), KV_DTYPE_BF16, 0x2bba84f8a7e7d635U);
}

static void q8_0_is_prefix_deterministic(void **state) {
    (void)state;
    check_model(tiny_stored(1, PACK_Q8_0, MODEL_WEIGHTS_AUTO), KV_DTYPE_BF16, 0xd3a18d59c1672562U);
}

static void four_bits_are_prefix_deterministic(void **state) {
    (void)state;
    check_model(tiny_stored(1, PACK_Q4_0, MODEL_WEIGHTS_NATIVE), KV_DTYPE_BF16,
                0x061b5c6d02f811e0U);
    check_model(tiny_stored(1, PACK_Q4_1, MODEL_WEIGHTS_NATIVE), KV_DTYPE_BF16,
                0xa579177935f127d4U);
}

static void numerics_name_the_formats(void **state) {
    (void)state;
    static const struct {
        size_t index;
        pack_format stored;
        model_weights weights;
        const char *behind;
    } cases[] = {
        {1, PACK_BF16, MODEL_WEIGHTS_AUTO, ""},      {1, PACK_BF16, MODEL_WEIGHTS_INT8, "/int8"},
        {1, PACK_Q8_0, MODEL_WEIGHTS_AUTO, "/q8_0"}, {1, PACK_Q8_0, MODEL_WEIGHTS_NATIVE, "/q8_0"},
        {1, PACK_Q8_0, MODEL_WEIGHTS_BF16, ""},      {1, PACK_Q8_0, MODEL_WEIGHTS_INT8, "/int8"},
        {1, PACK_Q4_1, MODEL_WEIGHTS_AUTO, ""},      {1, PACK_Q4_1, MODEL_WEIGHTS_NATIVE, "/q4_1"},
        {0, PACK_Q4_1, MODEL_WEIGHTS_NATIVE, ""}, /* rows of 72 and 100: no whole blocks */
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        model *m = tiny_stored(cases[i].index, cases[i].stored, cases[i].weights);
        char want[64];
        (void)snprintf(want, sizeof want, "%s%s", model_numerics(), cases[i].behind);
        assert_string_equal(model_get_numerics(m), want);
        model_destroy(m);
    }
}

/* INT8 stays near bf16: the distance of the logits, over their size, of every first token. */
static void int8_is_near_bf16(void **state) {
    (void)state;
    for (size_t index = 0; index < 3; index++) {
        model *exact = tiny(index), *rounded = tiny_stored(index, PACK_BF16, MODEL_WEIGHTS_INT8);
        const variation alone = {.threads = 1};
        outcome a = run(exact, alone), b = run(rounded, alone);
        const uint32_t vocab_size = tiny_models[index].vocab_size;
        double distance = 0.0, size = 0.0;
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            for (uint32_t i = 0; i < vocab_size; i++) {
                const size_t at = (size_t)s * GENERATED * vocab_size + i;
                const double d = (double)a.logits[at] - (double)b.logits[at];
                distance += d * d;
                size += (double)a.logits[at] * (double)a.logits[at];
            }
        }
        const double error = sqrt(distance / size);
        print_message("%s: int8 is %.4f from bf16\n", index == 0 ? "llama" : "qwen", error);
        assert_true(error > 0.0 && error < 0.05);
        free_outcome(&a);
        free_outcome(&b);
        model_destroy(exact);
        model_destroy(rounded);
    }
}

/* ---- what a step refuses */

typedef struct small_batch {
    uint32_t token_offsets[3], first_positions[2], page_offsets[3], page_ids[4];
    int32_t token_ids[4];
    uint8_t samples[2];
    sampler_params sampling[2];
    sampler_row rows[2];
    model_batch batch;
} small_batch;

/* Two sequences of two tokens, pages of 16; legal. */
static void legal(small_batch *b) {
    *b = (small_batch){.token_offsets = {0, 2, 4},
                       .first_positions = {0, 16},
                       .page_offsets = {0, 1, 3},
                       .page_ids = {0, 1, 2},
                       .token_ids = {1, 2, 3, 4},
                       .samples = {1, 0}};
    b->sampling[0] = (sampler_params){.temperature = 1.0F, .top_p = 1.0F, .top_k = 1};
    b->batch = (model_batch){.sequences = 2,
                             .tokens = 4,
                             .token_offsets = b->token_offsets,
                             .token_ids = b->token_ids,
                             .first_positions = b->first_positions,
                             .page_offsets = b->page_offsets,
                             .page_ids = b->page_ids,
                             .samples = b->samples,
                             .sampling = b->sampling,
                             .rows = b->rows};
}

static void bad_batches_are_refused(void **state) {
    (void)state;
    model *m = tiny(0);
    const kv_page_layout layout = model_kv_layout(m, 16, KV_DTYPE_BF16);
    uint8_t *memory = make(4 * kv_page_bytes(&layout));
    uint8_t *untouched = make(4 * kv_page_bytes(&layout));
    const model_runner_options options = {.threads = 1,
                                          .tokens_max = 4,
                                          .rows_max = 2,
                                          .kv = layout,
                                          .kv_memory = memory,
                                          .kv_page_count = 4};
    model_runner *runner;
    assert_int_equal(model_runner_create(m, &options, &runner, NULL), BT_OK);
    small_batch b;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        legal(&b);                                                                                 \
        change;                                                                                    \
        assert_int_equal(model_step(runner, &b.batch), BT_ERR_CALLER_ARGUMENT);                    \
        assert_memory_equal(memory, untouched, 4 * kv_page_bytes(&layout));                        \
    } while (0)
    REFUSED(b.batch.sequences = 3);
    REFUSED(b.batch.tokens = 5);
    REFUSED(b.batch.tokens = 3);
    REFUSED(b.batch.token_ids = NULL);
    REFUSED(b.batch.page_ids = NULL);
    REFUSED(b.batch.sampling = NULL);
    REFUSED(b.batch.rows = NULL);
    REFUSED(b.token_offsets[0] = 1);
    REFUSED(b.token_offsets[1] = 0);
    REFUSED(b.token_offsets[1] = 4);
    REFUSED(b.page_offsets[1] = 4);
    REFUSED(b.page_offsets[1] = 0);
    REFUSED(b.page_offsets[2] = 2);
    REFUSED(b.token_ids[3] = -1);
    REFUSED(b.token_ids[3] = 300);
    REFUSED(b.first_positions[1] = 2047);
    REFUSED(b.first_positions[1] = UINT32_MAX);
    REFUSED(b.page_ids[2] = 4);
    REFUSED(b.page_ids[2] = 0);
    REFUSED(b.samples[0] = 2);
#undef REFUSED
    legal(&b);
    assert_int_equal(model_step(runner, &b.batch), BT_OK);
    assert_int_equal(b.rows[0].status, SAMPLER_OK);
    legal(&b);
    b.batch.sequences = 0;
    b.batch.tokens = 0;
    assert_int_equal(model_step(runner, &b.batch), BT_OK);
    model_runner_destroy(runner);
    bt_free(memory);
    bt_free(untouched);
    model_destroy(m);
}

static void bad_runners_and_geometries_are_refused(void **state) {
    (void)state;
    model *m = tiny(0);
    model_runner *runner = NULL;
    bt_error error;
    float memory_start = 0.0F; /* never read */
    const model_runner_options good = {.threads = 1,
                                       .tokens_max = 4,
                                       .rows_max = 2,
                                       .kv = model_kv_layout(m, 16, KV_DTYPE_BF16),
                                       .kv_memory = &memory_start,
                                       .kv_page_count = 1};
    model_runner_options o = good;
    o.threads = 0;
    assert_int_equal(model_runner_create(m, &o, &runner, &error), BT_ERR_CALLER_ARGUMENT);
    o = good;
    o.tokens_max = UINT32_MAX;
    assert_int_equal(model_runner_create(m, &o, &runner, &error), BT_ERR_CALLER_LIMIT);
    o = good;
    o.rows_max = MODEL_BATCH_MAX + 1;
    assert_int_equal(model_runner_create(m, &o, &runner, &error), BT_ERR_CALLER_LIMIT);
    o = good;
    o.kv.page_tokens = 48;
    assert_int_equal(model_runner_create(m, &o, &runner, &error), BT_ERR_CALLER_ARGUMENT);
    o = good;
    o.kv.layers = 1;
    assert_int_equal(model_runner_create(m, &o, &runner, &error), BT_ERR_CALLER_ARGUMENT);
    o = good;
    o.kv_memory = NULL;
    assert_int_equal(model_runner_create(m, &o, &runner, &error), BT_ERR_CALLER_ARGUMENT);
    o = good;
    o.isa = "sse9";
    assert_int_equal(model_runner_create(m, &o, &runner, &error), BT_ERR_CALLER_UNSUPPORTED);
    assert_null(runner);
    model_destroy(m);

    model *none = NULL;
    model_geometry g = tiny_models[0];
    g.kv_heads = 4;
    assert_int_equal(model_generate(&g, 1, &none, &error), BT_ERR_CALLER_ARGUMENT);
    g = tiny_models[0];
    g.hidden_size = 0;
    assert_int_equal(model_generate(&g, 1, &none, &error), BT_ERR_CALLER_ARGUMENT);
    g = tiny_models[0];
    g.head_dim = 11;
    assert_int_equal(model_generate(&g, 1, &none, &error), BT_ERR_CALLER_ARGUMENT);
    static const struct {
        model_rope_scaling scaling;
        const char *says;
    } scalings[] = {
        {{.kind = MODEL_ROPE_KIND_LINEAR}, "factor is 0"},
        {{.kind = MODEL_ROPE_KIND_LINEAR, .factor = 0.5}, "factor is 0.5"},
        {{.kind = MODEL_ROPE_KIND_LLAMA3, .factor = 8}, "original context"},
        {{.kind = MODEL_ROPE_KIND_LLAMA3,
          .factor = 8,
          .original_context_tokens = 64,
          .low_frequency_factor = 4,
          .high_frequency_factor = 4},
         "below the high one"},
        {{.kind = MODEL_ROPE_KIND_YARN, .factor = 8, .original_context_tokens = 64, .beta_slow = 1},
         "beta_fast 0"},
        {{.kind = MODEL_ROPE_KIND_YARN,
          .factor = 8,
          .original_context_tokens = 64,
          .beta_slow = 1,
          .beta_fast = 32},
         "attention factor is 0"},
        {{.kind = MODEL_ROPE_KIND_DIVISORS, .divisors = {1, 1}}, "divisor 0 of rope frequency 2"},
        {{.kind = (model_rope_kind)99}, "kind of rope scaling 99"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(scalings); i++) {
        g = tiny_models[0];
        g.rope_scaling = scalings[i].scaling;
        assert_int_equal(model_generate(&g, 1, &none, &error), BT_ERR_CALLER_ARGUMENT);
        if (strstr(error.text, scalings[i].says) == NULL) fail_msg("says '%s'", error.text);
    }
    assert_null(none);
}

#ifdef BT_FAULT
/* Every allocation on the way fails once: an error, and nothing is left behind (AddressSanitizer
 * looks). */
static void failing_allocations_are_errors(void **state) {
    (void)state;
    for (uint64_t nth = 1;; nth++) {
        model *m = NULL;
        model_runner *runner = NULL;
        bt_error error;
        float memory_start = 0.0F; /* never read */
        bt_fault_set(BT_FAULT_ALLOC, nth);
        bt_status status = model_generate(&tiny_models[1], 1, &m, &error);
        if (status == BT_OK) {
            const model_runner_options options = {.threads = 2,
                                                  .tokens_max = 4,
                                                  .rows_max = 2,
                                                  .kv = model_kv_layout(m, 16, KV_DTYPE_BF16),
                                                  .kv_memory = &memory_start,
                                                  .kv_page_count = 1};
            status = model_runner_create(m, &options, &runner, &error);
        }
        const uint64_t visits = bt_fault_visits(BT_FAULT_ALLOC);
        bt_fault_set(BT_FAULT_ALLOC, 0);
        if (visits >= nth) assert_int_equal(status, BT_ERR_WORKER_MEMORY);
        model_runner_destroy(runner);
        model_destroy(m);
        if (visits < nth) {
            assert_int_equal(status, BT_OK);
            assert_true(nth > 10);
            return;
        }
    }
}
#endif

int main(int argc, char **argv) {
    course.is_few = argc > 1 && strcmp(argv[1], "--few") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_is_prefix_deterministic),
        cmocka_unit_test(qwen2_is_prefix_deterministic),
        cmocka_unit_test(qwen3_is_prefix_deterministic),
        cmocka_unit_test(mistral_is_prefix_deterministic),
        cmocka_unit_test(f32_pages_are_prefix_deterministic),
        cmocka_unit_test(int8_is_prefix_deterministic),
        cmocka_unit_test(q8_0_is_prefix_deterministic),
        cmocka_unit_test(four_bits_are_prefix_deterministic),
        cmocka_unit_test(numerics_name_the_formats),
        cmocka_unit_test(int8_is_near_bf16),
        cmocka_unit_test(bad_batches_are_refused),
        cmocka_unit_test(bad_runners_and_geometries_are_refused),
#ifdef BT_FAULT
        cmocka_unit_test(failing_allocations_are_errors),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
