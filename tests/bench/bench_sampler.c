/* Time of one sampler_draw per row: vocabulary, filter and mask mode; the median of many rows.
 *
 *   bench_sampler [ISA]      portable, avx2 or avx512; the best of this CPU by default */
#include <stdio.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"
#include "kernels/sampler.h"

enum { VOCAB_MAX = 151936, ROWS = 16, REPEATS = 9 };

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

/* Microseconds per row. */
static double measure(bench *b, const sampler_params *params, uint32_t vocab) {
    const bt_clock clock = bt_clock_system();
    double times[REPEATS];
    for (uint32_t repeat = 0; repeat < REPEATS; repeat++) {
        const uint64_t start = bt_clock_now_us(&clock);
        for (uint32_t i = 0; i < ROWS; i++) {
            sampler_draw(b->workspace, params, b->logits + (size_t)i * VOCAB_MAX, vocab, repeat,
                         &b->row);
        }
        times[repeat] = (double)(bt_clock_now_us(&clock) - start) / ROWS;
    }
    qsort(times, REPEATS, sizeof times[0], compare_doubles);
    return times[REPEATS / 2];
}

static void print_line(bench *b, uint32_t vocab, uint32_t top_k, float top_p) {
    double times[3];
    sampler_params params = {
        .temperature = 0.8F,
        .top_p = top_p,
        .top_k = top_k,
        .mask_max_tokens = VOCAB_MAX,
        .seed = 5,
    };
    for (uint32_t mode = 0; mode < 3; mode++) {
        params.mask_mode = mode;
        times[mode] = measure(b, &params, vocab);
    }
    const uint32_t support = b->row.support_count;
    params.mask_mode = SAMPLER_MASK_OFF;
    params.wants_logprob = 1;
    const double with_logprob = measure(b, &params, vocab);
    printf("%6u %6u %5.2f %8u %9.1f %9.1f %9.1f %9.1f\n", vocab, top_k, (double)top_p, support,
           times[0], times[1], times[2], with_logprob);
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
    BT_ASSERT(b.logits != NULL && b.row.support_ids != NULL && b.row.support_logprobs != NULL);
    fill(b.logits, (size_t)ROWS * VOCAB_MAX);
    printf("us per row; +lp: masks off with the token's log-probability\n");
    printf(" vocab  top_k top_p  support       off  selected   support       +lp\n");
    const uint32_t vocabs[] = {49152, 151936};
    const uint32_t top_ks[] = {1, 50, 1000, 8192, 0};
    for (size_t v = 0; v < BT_ARRAY_COUNT(vocabs); v++) {
        for (size_t k = 0; k < BT_ARRAY_COUNT(top_ks); k++) {
            print_line(&b, vocabs[v], top_ks[k], 1.0F);
            print_line(&b, vocabs[v], top_ks[k], 0.95F);
        }
    }
    sampler_workspace_destroy(b.workspace);
    bt_free(b.logits);
    bt_free(b.row.support_ids);
    bt_free(b.row.support_logprobs);
    return 0;
}
