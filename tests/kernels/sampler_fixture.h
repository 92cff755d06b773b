/* Rows of logits and rows of results for the sampler's tests. */
#ifndef BT_TESTS_KERNELS_SAMPLER_FIXTURE_H
#define BT_TESTS_KERNELS_SAMPLER_FIXTURE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/sampler.h"

/* A sampler_row with its arrays (top and id_logprobs at their largest); they hold a pattern where
 * nothing was written. */
typedef struct sampler_result {
    sampler_row row;
    uint32_t capacity; /* of the support */
} sampler_result;

sampler_result sampler_result_create(uint32_t capacity);
void sampler_result_destroy(sampler_result *result);
/* Fills the arrays with the pattern and the fields with values no draw gives. */
void sampler_result_reset(sampler_result *result);
/* Fails the test unless both are the same, to the bit, unwritten entries included. */
void sampler_result_assert_equal(const sampler_result *a, const sampler_result *b);

typedef enum sampler_logits_kind {
    SAMPLER_LOGITS_NORMAL, /* like a language model's */
    SAMPLER_LOGITS_BF16,   /* the same rounded to bf16: many ties */
    SAMPLER_LOGITS_LEVELS, /* five values only */
    SAMPLER_LOGITS_FLAT,   /* one value */
    SAMPLER_LOGITS_PEAKED, /* one far above the rest */
    SAMPLER_LOGITS_WIDE,   /* from -3e38 to 100, so that most weights vanish */
    SAMPLER_LOGITS_HOLES,  /* three quarters -inf */
    SAMPLER_LOGITS_SINGLE, /* one finite logit */
    SAMPLER_LOGITS_ZEROS,  /* 0 and -0 are the largest */
    SAMPLER_LOGITS_KINDS,
} sampler_logits_kind;

void sampler_fill_logits(sampler_logits_kind kind, uint64_t seed, float *logits, size_t count);
/* A number in [0, 1) and one with mean 0 and deviation 1. */
double sampler_uniform(uint64_t *state);
double sampler_normal(uint64_t *state);

#endif
