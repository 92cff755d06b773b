/* What the parts of the sampler share: the fixed-point mass, the order of the hash, the hot loops
 * of one instruction set, and selection among candidates.
 *
 * A *candidate* is (bits of its weight) << 32 | id. Weights are positive, so their bits order like
 * the weights themselves. */
#ifndef BT_KERNELS_SAMPLER_INTERNAL_H
#define BT_KERNELS_SAMPLER_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/math.h"
#include "kernels/sampler.h"

/* Weights are stored in whole chunks, the rest of the last one zero. */
enum { SAMPLER_CHUNK = 256, SAMPLER_GROUPS_PER_CHUNK_MAX = 16, SAMPLER_THRESHOLDS = 4 };

/* The smallest weight that counts: 2^-126. */
#define SAMPLER_WEIGHT_MIN_BITS 0x00800000U

/* q of the header. Adding 2^52 rounds to an integer and leaves it in the mantissa. */
#define SAMPLER_FIXED_OFFSET 0x4330000000000000U
static inline uint64_t sampler_fixed_offset(float weight) {
    return math_bits_f64((double)weight * 0x1p40 + 0x1p52);
}
static inline uint64_t sampler_fixed(float weight) {
    return sampler_fixed_offset(weight) - SAMPLER_FIXED_OFFSET;
}

/* The weight of one logit; sampler_scaled_weight takes its z. */
static inline float sampler_scaled_weight(float scaled, float scaled_max) {
    const float weight = math_exp_f32(scaled - scaled_max);
    return weight < 0x1p-126F ? 0.0F : weight;
}
static inline float sampler_weight(float logit, float temperature, float scaled_max) {
    return sampler_scaled_weight(logit / temperature, scaled_max);
}

static inline float sampler_mass(uint64_t fixed_sum) {
    return (float)fixed_sum * 0x1p-40F;
}

/* What an entry of a support says. Never rises with the mass: a quotient does not, and math_log_f32
 * is monotone over all of (0, 1]. */
static inline float sampler_entry_logprob(float weight, float mass) {
    return math_log_f32(weight / mass);
}

/* The double is the better number, but its rounding could be above the entry of a support that has
 * nearly all of the mass. */
static inline float sampler_token_logprob(float scaled, float scaled_max, uint64_t fixed_total) {
    const double log_total = math_log_f64((double)fixed_total * 0x1p-40);
    const float logprob = (float)(((double)scaled - (double)scaled_max) - log_total);
    const float weight = sampler_scaled_weight(scaled, scaled_max);
    if (weight == 0.0F) return logprob; /* in no support */
    const float entry = sampler_entry_logprob(weight, sampler_mass(fixed_total));
    return entry < logprob ? entry : logprob;
}

static inline double sampler_score(float weight, uint32_t hash) {
    return math_log_f64((double)weight) + sampler_noise(hash);
}

/* murmur3: one word into the state, and the end. */
static inline uint32_t sampler_hash_mix(uint32_t state, uint32_t word) {
    word *= 0xcc9e2d51U;
    word = word << 15 | word >> 17;
    word *= 0x1b873593U;
    state ^= word;
    state = state << 13 | state >> 19;
    return state * 5U + 0xe6546b64U;
}
static inline uint32_t sampler_hash_end(uint32_t state) {
    state ^= 16U;
    state ^= state >> 16;
    state *= 0x85ebca6bU;
    state ^= state >> 13;
    state *= 0xc2b2ae35U;
    return state ^ state >> 16;
}
/* The state before the column. */
static inline uint32_t sampler_hash_begin(uint64_t seed, uint32_t position) {
    const uint32_t state =
        sampler_hash_mix(sampler_hash_mix(0, (uint32_t)seed), (uint32_t)(seed >> 32));
    return sampler_hash_mix(state, position);
}

/* The loops that touch the whole vocabulary, compiled once per instruction set
 * (sampler_loops.c). They give the same bits everywhere. */
typedef struct sampler_loops {
    const char *isa;
    /* The largest logit; false when one of them is NaN. */
    bool (*largest)(const float *logits, size_t count, float *largest_out);
    /* weights[i] = sampler_weight(logits[i], ...) */
    void (*weigh)(const float *logits, size_t count, float temperature, float scaled_max,
                  float *weights);
    /* The sum of sampler_fixed. */
    uint64_t (*sum)(const float *weights, size_t count);
    /* The same over the weights at or above each threshold (bits). */
    void (*sum_from)(const float *weights, size_t count,
                     const uint32_t thresholds[SAMPLER_THRESHOLDS],
                     uint64_t sums[SAMPLER_THRESHOLDS]);
    /* How many weights are at or above a threshold (bits). */
    size_t (*count_from)(const float *weights, size_t count, uint32_t threshold);
    /* Cuts every chunk into `groups` (1, 4 or 16) sets and writes the largest weight of each, as
     * bits: maxima [chunks * groups]. */
    void (*group_maxima)(const float *weights, size_t chunks, uint32_t groups, uint32_t *maxima);
    /* The candidates at or above a threshold > 0, by ascending id; returns how many. */
    size_t (*collect)(const float *weights, size_t chunks, uint32_t threshold,
                      uint64_t *candidates);
    /* ratios[i] = a lower bound of exponential noise over weights[i], infinite where the weight is
     * 0 (see pick_column in sampler.c). columns may be NULL: column i is i. Returns the smallest.
     */
    float (*race)(uint32_t hash_state, const float *weights, const uint32_t *columns, size_t count,
                  float *ratios);
    /* The indices, ascending, of the values that are at most `limit`; returns how many. Values are
     * not negative. */
    size_t (*at_most)(const float *values, size_t count, float limit, uint32_t *indices);
    /* The index of the first logit that equals `value`, which must be among them. */
    size_t (*first_equal)(const float *logits, size_t count, float value);
    /* The first index from `begin` on of a value > limit; count when there is none. */
    size_t (*next_above)(const float *values, size_t begin, size_t count, float limit);
    /* logprobs[i] = log(weights[i] / mass) */
    void (*log_shares)(const float *weights, size_t count, float mass, float *logprobs);
} sampler_loops;

/* The loops of an instruction set by name (NULL: the best of this CPU), or NULL. */
const sampler_loops *sampler_loops_find(const char *isa);

/* Where the tie groups of the candidates stop passing the filter. */
typedef struct sampler_cut {
    uint32_t threshold; /* weights (bits) at or above it survive */
    uint32_t count;     /* of survivors */
    uint64_t fixed_sum; /* of the survivors' sampler_fixed */
} sampler_cut;

/* Histograms of 10 bits; owned by the workspace. */
enum { SAMPLER_BUCKETS = 1024 };
typedef struct sampler_histogram {
    uint32_t counts[SAMPLER_BUCKETS];
    uint64_t sums[SAMPLER_BUCKETS];
} sampler_histogram;

struct sampler_workspace {
    const sampler_loops *loops;
    uint32_t vocab_size;
    float *weights;       /* [chunks * SAMPLER_CHUNK] */
    float *ratios;        /* the same; of the draw */
    float *picked;        /* the same; weights of the survivors */
    float *processed;     /* the same; the logits when the parameters change them */
    uint32_t *ids;        /* the same; of the survivors */
    uint32_t *indices;    /* the same; of the draw */
    uint32_t *counts;     /* the same; of output ids, zero between calls */
    uint64_t *candidates; /* the same */
    uint64_t *spare;      /* the same; scratch of the sort */
    uint32_t *maxima;     /* [chunks * SAMPLER_GROUPS_PER_CHUNK_MAX] */
    sampler_histogram histogram;
    bool is_timed;
    uint64_t capture_ns;
};

/* The logits as the parameters change them (step 1 of the header), of ids below `count`: the
 * caller's own when nothing is to change, else workspace->processed. */
const float *sampler_process(sampler_workspace *workspace, const sampler_params *params,
                             const float *logits, size_t count);

/* What a log-probability of a row is made of. */
typedef struct sampler_scale {
    float temperature;
    float scaled_max;     /* max z */
    uint64_t fixed_total; /* Q */
} sampler_scale;

static inline float sampler_logprob(const sampler_scale *scale, float x) {
    return sampler_token_logprob(x / scale->temperature, scale->scaled_max, scale->fixed_total);
}
/* The `wanted` largest of x [count], or all; returns how many. */
uint32_t sampler_find_top(const sampler_loops *loops, const sampler_scale *scale, const float *x,
                          size_t count, uint32_t wanted, sampler_top *top);
/* Of ids; -inf of those at or beyond count. */
void sampler_find_ids(const sampler_scale *scale, const float *x, size_t count, const int32_t *ids,
                      uint32_t id_count, float *logprobs);

/* Walks the tie groups from the largest weight down; a group survives when fewer than count_max
 * candidates, and a fixed sum below mass_limit, precede it. */
sampler_cut sampler_find_cut(const uint64_t *candidates, size_t count, uint64_t count_max,
                             double mass_limit, sampler_histogram *scratch);
/* A value that at least `wanted` of the values (bits of weights) reach, close to the largest such.
 */
uint32_t sampler_reached_by(const uint32_t *values, size_t count, size_t wanted,
                            sampler_histogram *scratch);
/* Sorts by descending weight, then ascending id, candidates that are in ascending order of id.
 * spare [count] is scratch. */
void sampler_sort(uint64_t *candidates, size_t count, uint64_t *spare, sampler_histogram *scratch);

#endif
