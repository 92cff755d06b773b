/* Tokens per second of model_step on one machine, beside its ceilings: memory read bandwidth and
 * FMA peak, measured between the runs with the same threads. Medians of REPEATS.
 *
 *   bench_model MODEL [THREADS [ISA]] [--long]
 *
 * --long adds a prompt of 4096 tokens and a batch of 64.
 * MODEL is a GGUF file or an HF folder, or "qwen3-0.6b": random weights of that shape. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/model.h"
#include "kernels/model/model_generate.h"
#include "kernels/model/model_internal.h"
#include "tests/bench/ceilings.h"

enum {
    REPEATS = 5,
    PROMPT = 512,
    LONG_PROMPT = 4096,
    BATCH_MAX = 64,
    CONTEXT = 256, /* tokens before each generated one */
    STEPS = 8,     /* generated per measurement */
    PAGE_TOKENS = 32,
};

typedef struct bench {
    model *m;
    model_runner *runner;
    dev_host *dev;
    ceilings *top;
    uint8_t *kv;
    kv_page_layout layout;
    uint32_t pages_max;
    uint32_t token_offsets[BATCH_MAX + 1], first_positions[BATCH_MAX], page_offsets[BATCH_MAX + 1];
    uint32_t *page_ids;
    int32_t *token_ids;
    uint8_t samples[BATCH_MAX];
    sampler_params sampling[BATCH_MAX];
    sampler_row rows[BATCH_MAX];
} bench;

static const model_geometry qwen3_06b = {.family = MODEL_FAMILY_QWEN3,
                                         .vocab_size = 151936,
                                         .context_tokens = 40960,
                                         .hidden_size = 1024,
                                         .intermediate_size = 3072,
                                         .layers = 28,
                                         .heads = 16,
                                         .kv_heads = 8,
                                         .head_dim = 128,
                                         .norm_epsilon = 1e-6F,
                                         .rope_theta = 1e6,
                                         .has_tied_embeddings = true,
                                         .has_qk_norm = true};

static void check(bt_status status, const bt_error *error) {
    if (status == BT_OK) return;
    fprintf(stderr, "bench_model: %s\n", error->text);
    exit(1);
}

/* Weights that one token multiplies with, the output included. */
static double linear_weights(const model_geometry *g, bool with_output) {
    double sum = 0.0;
    for (int t = MODEL_TENSOR_ATTENTION_NORM; t < MODEL_TENSOR_COUNT; t++) {
        const model_shape shape = model_tensor_shape(g, (model_tensor)t);
        if (shape.rows > 1) sum += (double)shape.rows * shape.columns * g->layers;
    }
    return with_output ? sum + (double)g->vocab_size * g->hidden_size : sum;
}

/* `sequences` sequences of `tokens` tokens after `first` others, pages in order. */
static void fill(bench *b, uint32_t sequences, uint32_t tokens, uint32_t first) {
    const uint32_t pages = kv_pages_for(first + tokens, PAGE_TOKENS);
    BT_ASSERT(pages * sequences <= b->pages_max);
    for (uint32_t s = 0; s < sequences; s++) {
        b->token_offsets[s + 1] = (s + 1) * tokens;
        b->first_positions[s] = first;
        b->page_offsets[s + 1] = (s + 1) * pages;
        b->samples[s] = 1;
        b->sampling[s] = (sampler_params){.temperature = 1.0F, .top_p = 1.0F, .top_k = 1};
        for (uint32_t i = 0; i < pages; i++)
            b->page_ids[s * pages + i] = s * pages + i;
        for (uint32_t i = 0; i < tokens; i++)
            b->token_ids[s * tokens + i] = (int32_t)(1 + (i * 7919 + s * 104729) % 30000);
    }
}

static double step_seconds(bench *b, uint32_t sequences) {
    const bt_clock clock = bt_clock_system();
    const model_batch batch = {.sequences = sequences,
                               .tokens = b->token_offsets[sequences],
                               .token_offsets = b->token_offsets,
                               .token_ids = b->token_ids,
                               .first_positions = b->first_positions,
                               .page_offsets = b->page_offsets,
                               .page_ids = b->page_ids,
                               .samples = b->samples,
                               .sampling = b->sampling,
                               .rows = b->rows};
    const uint64_t start_us = bt_clock_now_us(&clock);
    BT_ASSERT(model_step(b->runner, &batch) == BT_OK);
    return (double)(bt_clock_now_us(&clock) - start_us) * 1e-6;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return values[count / 2];
}

static void open_model(bench *b, const char *path) {
    bt_error error;
    if (strcmp(path, "qwen3-0.6b") == 0)
        check(model_generate(&qwen3_06b, 1, &b->m, &error), &error);
    else
        check(model_load(path, NULL, NULL, &b->m, &error), &error);
}

static void open_runner(bench *b, uint32_t threads, const char *isa) {
    bt_error error;
    b->layout = model_kv_layout(b->m, PAGE_TOKENS, KV_DTYPE_BF16);
    b->pages_max = BATCH_MAX * kv_pages_for(CONTEXT + 1, PAGE_TOKENS);
    b->kv = host_memory_map(b->pages_max * kv_page_bytes(&b->layout));
    b->page_ids = bt_calloc(b->pages_max, sizeof *b->page_ids);
    b->token_ids = bt_calloc(LONG_PROMPT, sizeof *b->token_ids);
    BT_ASSERT(b->kv != NULL && b->page_ids != NULL && b->token_ids != NULL);
    const model_runner_options options = {.threads = threads,
                                          .tokens_max = PROMPT,
                                          .rows_max = BATCH_MAX,
                                          .isa = isa,
                                          .kv = b->layout,
                                          .kv_memory = b->kv,
                                          .kv_page_count = b->pages_max};
    check(model_runner_create(b->m, &options, &b->runner, &error), &error);
    const dev_host_options device = {.threads = threads, .isa = isa};
    check(dev_host_create(&device, &b->dev, &error), &error);
    b->top = ceilings_create(b->dev);
    BT_ASSERT(b->top != NULL);
}

/* A prompt in chunks of PROMPT, as prefill does it. */
static double prompt_seconds(bench *b, uint32_t tokens) {
    double seconds = 0.0;
    for (uint32_t done = 0; done < tokens; done += PROMPT) {
        fill(b, 1, PROMPT, done);
        b->samples[0] = done + PROMPT == tokens;
        seconds += step_seconds(b, 1);
    }
    return seconds;
}

static double generate_seconds(bench *b, uint32_t batch) {
    double seconds[STEPS];
    fill(b, batch, 1, CONTEXT);
    for (size_t i = 0; i < STEPS; i++)
        seconds[i] = step_seconds(b, batch);
    return median(seconds, STEPS);
}

static void print_row(const char *what, double seconds, double tokens, double flops, double bytes,
                      double peak, double bandwidth) {
    printf(
        "%-22s %10.1f tok/s %8.2f ms %7.1f GFLOP/s %5.1f %% of FMA %7.2f GB/s %5.1f %% of read\n",
        what, tokens / seconds, seconds * 1e3, flops / seconds * 1e-9,
        100.0 * flops / seconds / peak, bytes / seconds * 1e-9,
        100.0 * bytes / seconds / bandwidth);
}

static void run(bench *b, bool is_long) {
    static const struct {
        uint32_t tokens;
        bool is_prompt, is_long;
    } rows[] = {{PROMPT, true, false}, {LONG_PROMPT, true, true}, {1, false, false},
                {4, false, false},     {16, false, false},        {BATCH_MAX, false, true}};
    enum { ROWS = BT_ARRAY_COUNT(rows) };
    double seconds[ROWS][REPEATS], peak[REPEATS], bandwidth[REPEATS];
    (void)prompt_seconds(b, PROMPT);
    for (size_t repeat = 0; repeat < REPEATS; repeat++) {
        bandwidth[repeat] = ceilings_read(b->top);
        peak[repeat] = ceilings_fma(b->top);
        for (size_t i = 0; i < ROWS; i++) {
            if (rows[i].is_long && !is_long) continue;
            seconds[i][repeat] = rows[i].is_prompt ? prompt_seconds(b, rows[i].tokens)
                                                   : generate_seconds(b, rows[i].tokens);
        }
    }
    const model_geometry *g = &model_get_card(b->m)->geometry;
    const double top_flops = median(peak, REPEATS);
    const double top_bytes = median(bandwidth, REPEATS);
    printf("ceilings: FMA %.1f GFLOP/s, read %.2f GB/s\n", top_flops * 1e-9, top_bytes * 1e-9);
    printf("(linear layers only in GFLOP/s; weights only in GB/s)\n");
    char what[64];
    for (size_t i = 0; i < ROWS; i++) {
        if (rows[i].is_long && !is_long) continue;
        const bool is_prompt = rows[i].is_prompt;
        const uint32_t tokens = rows[i].tokens;
        const double work = 2.0 * tokens * linear_weights(g, !is_prompt);
        const double steps = is_prompt ? (double)tokens / PROMPT : 1.0;
        snprintf(what, sizeof what, is_prompt ? "prompt of %u" : "generation, batch %u", tokens);
        print_row(what, median(seconds[i], REPEATS), tokens, work,
                  2.0 * steps * linear_weights(g, !is_prompt), top_flops, top_bytes);
    }
}

int main(int argc, char **argv) {
    static bench b;
    const bool is_long = argc > 1 && strcmp(argv[argc - 1], "--long") == 0;
    argc -= is_long;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_model MODEL|qwen3-0.6b [THREADS [ISA]] [--long]\n");
        return 2;
    }
    const char *isa = argc > 3 ? argv[3] : NULL;
    const uint32_t threads = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2;
    open_model(&b, argv[1]);
    open_runner(&b, threads, isa);
    printf("%s, %u threads, %s, bf16 weights and KV; medians of %d\n", model_get_card(b.m)->name,
           threads, dev_host_isa_name(b.dev), REPEATS);
    run(&b, is_long);
    ceilings_destroy(b.top);
    dev_host_destroy(b.dev);
    model_runner_destroy(b.runner);
    host_memory_unmap(b.kv, b.pages_max * kv_page_bytes(&b.layout));
    bt_free(b.page_ids);
    bt_free(b.token_ids);
    model_destroy(b.m);
    return 0;
}
