/* The workspace of a runner: sized once, for the largest batch. Internal to kernels/model. */
#ifndef BT_KERNELS_MODEL_MODEL_RUNNER_INTERNAL_H
#define BT_KERNELS_MODEL_MODEL_RUNNER_INTERNAL_H

#include "kernels/model/model_internal.h"
#include "kernels/model/model_rope.h"
#include "kernels/ops.h"

/* Logits are computed for so many tokens at a time, so that their memory does not grow with the
 * batch. Enough to make the last product bound by FMA. */
enum { MODEL_LOGIT_ROWS = 32 };

struct model_runner {
    const model *m;
    dev_host *dev;
    op_attention_plan *plan;
    sampler_workspace **samplers; /* [threads] */
    uint8_t *kv_memory;
    kv_page_layout kv;
    uint32_t kv_page_count;
    uint32_t tokens_max;
    uint32_t rows_max;

    float *rope_frequency; /* [head_dim / 2] */

    /* Per token of a batch. */
    float *x;           /* [tokens, hidden], the residual stream */
    float *normed;      /* [tokens, hidden] */
    float *qkv;         /* [tokens, (heads + 2 kv_heads) * head_dim] */
    float *attended;    /* [tokens, heads * head_dim] */
    float *activated;   /* [tokens, intermediate] */
    float *rope;        /* [tokens, head_dim] */
    uint32_t *position; /* [tokens] */
    uint32_t *sequence; /* [tokens] */

    /* Per token that logits are computed of (*kept*: it samples, is scored, or both), in the
     * order of the batch. What is done with its logits are its items: the score, if any, and then
     * the draws. */
    float *logits;        /* [MODEL_LOGIT_ROWS, vocab] */
    uint32_t *kept_token; /* [tokens]: its index in the batch */
    uint32_t *kept_item;  /* [tokens + 1]: its first item */
    uint32_t kept_count;

    /* page_stamp[i] = step in which page i was last claimed for writing. */
    uint64_t *page_stamp;
    uint64_t step;
};

/* Draws [first, end) of a batch belong to a sequence. */
typedef struct model_draws {
    uint32_t first, end;
} model_draws;

static inline model_draws model_draws_of(const model_batch *b, uint32_t s) {
    if (b->draw_offsets == NULL) return (model_draws){s, s + b->samples[s]};
    return (model_draws){b->draw_offsets[s], b->draw_offsets[s + 1]};
}

/* Whether a token (its index in the batch) of sequence s is scored. */
static inline bool model_is_scored(const model_batch *b, uint32_t s, uint32_t token) {
    if (b->scores == NULL) return false;
    const uint32_t index = token - b->token_offsets[s];
    return index >= b->scores[s].first && index - b->scores[s].first < b->scores[s].count;
}

/* Checks a batch against the rules of kernels/model.h and fills position, sequence and kept_*.
 * CALLER_ARGUMENT when it breaks one. */
BT_MUST_CHECK bt_status model_batch_prepare(model_runner *runner, const model_batch *batch);

#endif
