/* Sixty-four sequences on one model, run the way a *variation* says, and a digest of everything
 * that must not depend on it: logits, drawn rows with masks and log-probabilities, prompt
 * log-probabilities, KV. Needs bt_kernels alone, so that it also runs where nothing else is built.
 */
#ifndef BT_TESTS_DETERMINISM_WORLD_H
#define BT_TESTS_DETERMINISM_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/model.h"

enum { WORLD_SEQUENCES = 64 };

typedef struct variation {
    const char *name;     /* "batch 17" */
    const char *isa;      /* NULL: the best of this CPU */
    uint32_t threads;     /* 0: 1 */
    uint32_t batch;       /* sequences in work at once; 0: 8 */
    uint32_t chunk;       /* prompt tokens of one sequence in one step; 0: 64 */
    uint32_t page_tokens; /* 0: 32 */
    uint64_t page_seed;   /* shuffles the pages; 0: in order */
    bool is_reversed;     /* the order of the sequences in a batch */
    bool shares_prefixes; /* full pages of a common prefix are those of the sequence computed first
                           */
    bool recomputes;      /* every sequence loses its pages once and is computed anew */
} variation;

typedef struct digests {
    uint64_t of[WORLD_SEQUENCES];
    uint64_t all;
    uint64_t bounded; /* of rows of bounded masks alone, which are drawn besides */
} digests;

/* Aborts when a step fails. */
digests world_run(const model *m, kv_dtype dtype, const variation *v);

#endif
