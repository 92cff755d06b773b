/* Where the time of a generation step goes: the ops of kernels/model/model_step.c on the same
 * shapes, weights and pages in the same order, each timed by itself. The sampler is not among them.
 */
#ifndef BT_TESTS_BENCH_BENCH_PARTS_H
#define BT_TESTS_BENCH_BENCH_PARTS_H

#include "kernels/model/model_internal.h"
#include "kernels/ops.h"

typedef struct bench_parts {
    const model *m;
    dev_host *dev;
    op_kv kv;                        /* pages of `sequences` sequences */
    const uint32_t *first_positions; /* [sequences] */
    uint32_t sequences;
    uint32_t steps;
} bench_parts;

/* Prints one JSON object: for each part seconds and CPU seconds (of all threads, by their number)
 * of one step, means of `steps`. */
void bench_parts_run(const bench_parts *p);

#endif
