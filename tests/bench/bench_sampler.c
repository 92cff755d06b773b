/* CPU time of one sampler_draw per row: vocabulary, filter and mask mode; the median of many rows.
 * Of the support mode also what the capture's own clock says, of a mask bounded to BOUNDED_CAP
 * entries both, and the other costs: log-probabilities, changed logits, the rank rule, the score of
 * a row.
 *
 *   bench_sampler [ISA]      portable, avx2 or avx512; the best of this CPU by default */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/assert.h"
#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"
#include "kernels/sampler.h"

enum { VOCAB_MAX = 151936, ROWS = 16, REPEATS = 9, BOUNDED_CAP = 4096 };

typedef struct bench {
    sampler_workspace *workspace;
    float *logits; /* [ROWS, VOCAB_MAX] */
    sampler_row row;
} bench;

static double next_uniform(uint64_t *state) {
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    return (double)(*state >> 11) * 0x1p-53;
}

/* Normal with deviation 3: a few per cent of the mass in most tokens' tail, as a small model has.
 */
static void fill(float *logits, size_t count) {
    uint64_t state = 7;
    for (size_t i = 0; i < count; i++) {
        double sum = -6.0;
        for (int j = 0; j < 12; j++) {
            sum += next_uniform(&state);
        }
        logits[i] = (float)(sum * 3.0);
    }
}

static int compare_doubles(const void *a, const void *b) {
    const double left = *(const double *)a;
    const double right = *(const double *)b;
    return (left > right) - (left < right);
}

typedef void (*row_fn)(bench *b, const sampler_params *params, const float *logits, uint32_t vocab,
                       uint32_t position);

static void draw_row(bench *b, const sampler_params *params, const float *logits, uint32_t vocab,
                     uint32_t position) {
    sampler_draw(b->workspace, params, logits, vocab, position, &b->row);
}

static void score_row(bench *b, const sampler_params *params, const float *logits, uint32_t vocab,
                      uint32_t position) {
    const sampler_scoring scoring = {.target = (int32_t)position,
                                     .top_count = params->top_logprobs};
    float logprob = 0.0F;
    BT_ASSERT(sampler_score_row(b->workspace, &scoring, logits, vocab, &logprob, b->row.top, NULL));
}

/* Of this thread, so that what else runs on the machine counts little. */
static double cpu_us(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Microseconds per row. */
static double measure(bench *b, row_fn run, const sampler_params *params, uint32_t vocab) {
    double times[REPEATS];
    for (uint32_t repeat = 0; repeat < REPEATS; repeat++) {
        const double start = cpu_us();
        for (uint32_t i = 0; i < ROWS; i++) {
            run(b, params, b->logits + (size_t)i * VOCAB_MAX, vocab, repeat);
        }
        times[repeat] = (cpu_us() - start) / ROWS;
    }
    qsort(times, REPEATS, sizeof times[0], compare_doubles);
    return times[REPEATS / 2];
}

/* The same of the code that only masks need. */
static double measure_capture(bench *b, const sampler_params *params, uint32_t vocab) {
    double times[REPEATS];
    sampler_time_capture(b->workspace, true);
    for (uint32_t repeat = 0; repeat < REPEATS; repeat++) {
        (void)sampler_take_capture_ns(b->workspace);
        for (uint32_t i = 0; i < ROWS; i++) {
            draw_row(b, params, b->logits + (size_t)i * VOCAB_MAX, vocab, repeat);
        }
        times[repeat] = (double)sampler_take_capture_ns(b->workspace) / 1000.0 / ROWS;
    }
    sampler_time_capture(b->workspace, false);
    qsort(times, REPEATS, sizeof times[0], compare_doubles);
    return times[REPEATS / 2];
}

typedef struct filter {
    uint32_t top_k;
    float top_p, min_p;
} filter;

static void print_line(bench *b, uint32_t vocab, filter f) {
    double times[3];
    sampler_params params = {
        .temperature = 0.8F,
        .top_p = f.top_p,
        .top_k = f.top_k,
        .min_p = f.min_p,
        .mask_max_tokens = VOCAB_MAX,
        .seed = 5,
    };
    for (uint32_t mode = 0; mode < 3; mode++) {
        params.mask_mode = mode;
        times[mode] = measure(b, draw_row, &params, vocab);
    }
    const uint32_t support = b->row.support_count;
    const double capture = measure_capture(b, &params, vocab);
    params.mask_max_tokens = BOUNDED_CAP;
    params.mask_bounded = 1;
    const double bounded = measure(b, draw_row, &params, vocab);
    const double bounded_capture = measure_capture(b, &params, vocab);
    params.mask_bounded = 0;
    params.mask_mode = SAMPLER_MASK_OFF;
    params.wants_logprob = 1;
    const double with_logprob = measure(b, draw_row, &params, vocab);
    printf("%6u %10u %5.2f %5.3f %8u %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f\n", vocab, f.top_k,
           (double)f.top_p, (double)f.min_p, support, times[0], times[1], times[2], capture,
           bounded, bounded_capture, with_logprob);
}

static void print_others(bench *b, uint32_t vocab) {
    static int32_t outputs[1000];
    for (int32_t i = 0; i < 1000; i++) {
        outputs[i] = i * 31 % 5000;
    }
    const sampler_params base = {.temperature = 0.8F, .top_p = 0.95F, .top_k = 1000, .seed = 5};
    sampler_params changed = base;
    changed.output_ids = outputs;
    changed.output_count = 1000;
    changed.frequency_penalty = 0.5F;
    changed.repetition_penalty = 1.1F;
    sampler_params top = base;
    top.wants_logprob = 1;
    top.top_logprobs = 20;
    sampler_params rank = base;
    rank.filter = SAMPLER_FILTER_RANK;
    sampler_params min_p = base;
    min_p.min_p = 0.01F;
    printf(
        "%6u  top_k 1000, top_p 0.95: %.1f; 1000 outputs penalised %.1f; top 20 %.1f; rank %.1f; "
        "min_p %.1f; score of a row with top 20 %.1f\n",
        vocab, measure(b, draw_row, &base, vocab), measure(b, draw_row, &changed, vocab),
        measure(b, draw_row, &top, vocab), measure(b, draw_row, &rank, vocab),
        measure(b, draw_row, &min_p, vocab), measure(b, score_row, &top, vocab));
}

int main(int argc, char **argv) {
    bench b = {0};
    const char *isa = argc > 1 ? argv[1] : NULL;
    if (sampler_workspace_create_isa(VOCAB_MAX, isa, &b.workspace) != BT_OK) {
        fprintf(stderr, "bench_sampler: no instruction set %s here\n", isa == NULL ? "" : isa);
        return 1;
    }
    b.logits = bt_calloc((size_t)ROWS * VOCAB_MAX, sizeof(float));
    b.row.support_ids = bt_calloc(VOCAB_MAX, sizeof(int32_t));
    b.row.support_logprobs = bt_calloc(VOCAB_MAX, sizeof(float));
    b.row.top = bt_calloc(SAMPLER_TOP_MAX, sizeof(sampler_top));
    BT_ASSERT(b.row.top != NULL);
    BT_ASSERT(b.logits != NULL && b.row.support_ids != NULL && b.row.support_logprobs != NULL);
    fill(b.logits, (size_t)ROWS * VOCAB_MAX);
    printf("us of CPU per row; capture: in code that only masks need, support mode; bounded: the "
           "same with a mask cut to %d entries; +lp: masks off with the token's log-probability\n",
           BOUNDED_CAP);
    printf(" vocab      top_k top_p min_p  support      off selected  support  capture  bounded  "
           "capture      +lp\n");
    static const uint32_t vocabs[] = {49152, 151936};
    static const filter filters[] = {
        {1, 1.0F, 0.0F},     {50, 1.0F, 0.0F},   {50, 0.95F, 0.0F},   {1000, 1.0F, 0.0F},
        {1000, 0.95F, 0.0F}, {8192, 1.0F, 0.0F}, {8192, 0.95F, 0.0F}, {1U << 30, 0.95F, 0.0F},
        {0, 0.95F, 0.0F},    {0, 0.9F, 0.0F},    {0, 0.7F, 0.0F},     {0, 1.0F, 0.01F},
        {0, 1.0F, 0.001F},   {0, 1.0F, 0.0F},
    };
    for (size_t v = 0; v < BT_ARRAY_COUNT(vocabs); v++) {
        for (size_t k = 0; k < BT_ARRAY_COUNT(filters); k++) {
            print_line(&b, vocabs[v], filters[k]);
        }
        print_others(&b, vocabs[v]);
    }
    sampler_workspace_destroy(b.workspace);
    bt_free(b.logits);
    bt_free(b.row.support_ids);
    bt_free(b.row.support_logprobs);
    bt_free(b.row.top);
    return 0;
}
