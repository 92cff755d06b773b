/* What the sim device draws: rows of a chosen width whose values fit together as a real sampler's
 * do, made at about the cost of copying them.
 *
 * Nouns. The *order* is one fixed permutation of the vocabulary, made from the seed; the *weights*
 * are one fixed falling list. A *place* is the distribution behind one prefix: its hash chooses
 * where in the order and in the weights it begins, and the i-th id of the order from there that is
 * not banned (by name, or by a bias of -inf) has the i-th weight. So the ids of a row are a piece
 * of the order, its log-probabilities a piece of the logarithms of the weights less one number, and
 * everything is exact: a support sums to 1, the drawn token's value is its entry, the values over
 * the whole vocabulary are those of the same distribution and never above, the largest ones are the
 * first of the support, and a support of one has 0.
 *
 * The width of a support is a function of the hash alone, cut by top_k and by the ids that there
 * are: always `width`, or *realistic* (as measured of language models under top-p: median 2, mean
 * 7.96, 82 at 99 %, at most 256), by integers only, so that it is the same everywhere. Other
 * parameters do not filter; where the caller's hash counts them they choose another place.
 *
 * Threads: one at a time; the order is made anew when a request has another vocab_limit. Results
 * are a pure function of the arguments and the options. */
#ifndef BT_KERNELS_SIM_ROWS_H
#define BT_KERNELS_SIM_ROWS_H

#include <stdint.h>

#include "base/status.h"
#include "kernels/sampler.h"

enum {
    SIM_ROWS_WIDTH_MAX = 1 << 17, /* weights fall strictly up to here */
    SIM_ROWS_REALISTIC_MAX = 256,
};

typedef struct sim_rows_options {
    uint32_t vocab_size; /* 1 .. SAMPLER_VOCAB_MAX */
    uint32_t width;      /* of every support, 1 .. SIM_ROWS_WIDTH_MAX; 0: realistic */
    uint64_t seed;
} sim_rows_options;

typedef struct sim_rows sim_rows;

/* Returns owned; about 20 bytes per id. WORKER_MEMORY. */
BT_MUST_CHECK bt_status sim_rows_create(const sim_rows_options *options, sim_rows **out);
void sim_rows_destroy(sim_rows *rows);

/* What the support of this hash would have with unlimited parameters. */
uint32_t sim_rows_width(const sim_rows *rows, uint64_t hash);

/* The row behind a prefix: `hash` of it and of what shapes the row; `seeded` also of the seed and
 * the position, for the draw. As sampler_draw otherwise, the bounded mode and its arrays included.
 */
void sim_rows_draw(sim_rows *rows, const sampler_params *params, uint64_t hash, uint64_t seeded,
                   sampler_row *row);
/* The same place without drawing: as sampler_score_row. */
void sim_rows_score(sim_rows *rows, const sampler_scoring *scoring, uint64_t hash,
                    float *target_out, sampler_top *top_out, float *ids_out);

/* splitmix64's finaliser of a and b: every bit of the input reaches every bit of the output. */
static inline uint64_t sim_mix(uint64_t a, uint64_t b) {
    uint64_t x = a + 0x9E3779B97F4A7C15u * (b + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

#endif
