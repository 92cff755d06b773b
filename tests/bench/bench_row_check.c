/* CPU time of the check that every record of a row stream passes in the router, by width of the
 * support, and of the search for repeated ids that decode makes once per attempt. The best of many
 * rounds, on rows that are in the cache, as they are behind the read from the socket. */
#include <stdio.h>
#include <time.h>

#include "base/assert.h"
#include "base/compiler.h"
#include "base/mem.h"
#include "proto/row_check.h"

enum { WIDTH_MAX = 8192, VOCAB = 151936, ROUNDS = 30, ROWS = 200 };

typedef struct bench {
    int32_t ids[WIDTH_MAX];
    float logprobs[WIDTH_MAX];
    uint8_t *seen;
    row_expectation expect;
    token_row row;
} bench;

static double cpu_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static bool check(bench *b) {
    return row_check(&b->expect, &b->row) == NULL;
}

static bool search(bench *b) {
    return !row_ids_repeat(b->row.support_ids, b->row.support_count, b->seen);
}

static double best_ns(bench *b, bool (*run)(bench *b)) {
    double best = 1e18;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const double start = cpu_ns();
        for (uint32_t i = 0; i < ROWS; i++)
            BT_ASSERT(run(b));
        const double ns = (cpu_ns() - start) / ROWS;
        if (ns < best) best = ns;
    }
    return best;
}

static void print_width(bench *b, uint32_t mask_mode, uint32_t width) {
    b->expect = (row_expectation){.cap = WIDTH_MAX, .mask_mode = mask_mode, .vocab_size = VOCAB};
    b->row = (token_row){
        .token = b->ids[width / 2],
        .mask_mode = mask_mode,
        .selected_logprob = b->logprobs[width / 2],
        .support_count = width,
        .support_size = width,
        .support_ids = b->ids,
        .support_logprobs = mask_mode == ROW_MASK_SUPPORT ? b->logprobs : NULL,
    };
    const double bytes = (double)row_record_bytes(token_row_widths(&b->row));
    const double ns = best_ns(b, check);
    printf("%-8s %8u %10.0f %10.1f %10.4f %12.1f\n",
           mask_mode == ROW_MASK_SUPPORT ? "support" : "selected", width, bytes, ns, ns / bytes,
           best_ns(b, search));
}

int main(void) {
    static const uint32_t widths[] = {1, 8, 82, 1000, 8192};
    static bench b;
    b.seen = bt_calloc(row_seen_bytes(VOCAB), 1);
    BT_ASSERT(b.seen != NULL);
    for (uint32_t i = 0; i < WIDTH_MAX; i++) {
        b.ids[i] = (int32_t)(i * 7919u % VOCAB);
        b.logprobs[i] = -0.001f * (float)i;
    }
    printf("mode        width      bytes     ns/row    ns/byte  repeated ids, ns\n");
    for (size_t i = 0; i < BT_ARRAY_COUNT(widths); i++)
        print_width(&b, ROW_MASK_SELECTED, widths[i]);
    for (size_t i = 0; i < BT_ARRAY_COUNT(widths); i++)
        print_width(&b, ROW_MASK_SUPPORT, widths[i]);
    bt_free(b.seen);
    return 0;
}
