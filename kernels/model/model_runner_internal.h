/* The workspace of a runner: sized once, for the largest batch. Internal to kernels/model. */
#ifndef BT_KERNELS_MODEL_MODEL_RUNNER_INTERNAL_H
#define BT_KERNELS_MODEL_MODEL_RUNNER_INTERNAL_H

#include "kernels/model/model_internal.h"
#include "kernels/model/model_rope.h"
#include "kernels/ops.h"

/* Logits are computed for so many sequences at a time, so that their memory does not grow with the
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

    /* Per sampling sequence. */
    float *logits;          /* [MODEL_LOGIT_ROWS, vocab] */
    uint32_t *sample_token; /* [rows]: its last token in the batch */
    uint32_t *sample_row;   /* [rows]: its sequence */
    uint32_t sample_count;

    /* page_stamp[i] = step in which page i was last claimed for writing. */
    uint64_t *page_stamp;
    uint64_t step;
};

/* Checks a batch against the rules of kernels/model.h and fills position, sequence and sample_*.
 * CALLER_ARGUMENT when it breaks one. */
BT_MUST_CHECK bt_status model_batch_prepare(model_runner *runner, const model_batch *batch);

#endif
