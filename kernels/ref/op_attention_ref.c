/* Attention as loops over one query and one head, in the order written at op_attention. */
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "kernels/bf16.h"
#include "kernels/math.h"
#include "kernels/ops.h"

enum { LANES = 16, TILE = OP_ATTENTION_TILE, HEAD_DIM_MAX = 1024 };

typedef struct query {
    const op_attention_params *p;
    const float *q; /* [head_dim] */
    uint32_t sequence;
    uint32_t kv_head;
    uint32_t first; /* key that is seen */
    uint32_t position;
} query;

typedef struct partial {
    float maximum;
    float sum;
    float values[HEAD_DIM_MAX];
} partial;

static float kv_at(const query *s, uint32_t which, uint32_t position, uint32_t dim) {
    const op_kv *kv = &s->p->kv;
    const kv_page_layout *layout = &kv->layout;
    const uint32_t page =
        kv->page_ids[kv->page_offsets[s->sequence] + position / layout->page_tokens];
    const uint8_t *head = kv->memory + page * kv_page_bytes(layout) +
                          kv_page_offset(layout, s->p->layer, which, s->kv_head);
    const size_t index = (size_t)(position % layout->page_tokens) * layout->head_dim + dim;
    float wide;
    uint16_t narrow;
    if (layout->dtype == KV_DTYPE_F32) {
        memcpy(&wide, head + index * sizeof wide, sizeof wide);
        return wide;
    }
    memcpy(&narrow, head + index * sizeof narrow, sizeof narrow);
    return bf16_to_f32(narrow);
}

static float tree(const float *weights) {
    float lanes[LANES];
    for (uint32_t l = 0; l < LANES; l++)
        lanes[l] = ((weights[l] + weights[l + 16]) + weights[l + 32]) + weights[l + 48];
    for (uint32_t step = LANES / 2; step > 0; step /= 2)
        for (uint32_t l = 0; l < step; l++)
            lanes[l] += lanes[l + step];
    return lanes[0];
}

static void add_tile(const query *s, uint32_t first, partial *state) {
    const uint32_t head_dim = s->p->kv.layout.head_dim;
    float weights[TILE];
    float top = state->maximum;
    for (uint32_t j = 0; j < TILE; j++) {
        float score = 0.0F;
        if (first + j < s->first || first + j > s->position) {
            weights[j] = -math_inf_f32();
            continue;
        }
        for (uint32_t d = 0; d < head_dim; d++)
            score = fmaf(s->q[d], kv_at(s, 0, first + j, d), score);
        weights[j] = score * s->p->scale;
        top = weights[j] > top ? weights[j] : top;
    }
    const float factor = math_exp_f32(state->maximum - top);
    for (uint32_t j = 0; j < TILE; j++)
        weights[j] = math_exp_f32(weights[j] - top);
    state->sum = fmaf(state->sum, factor, tree(weights));
    state->maximum = top;
    for (uint32_t d = 0; d < head_dim; d++) {
        float acc = state->values[d] * factor;
        for (uint32_t j = 0; j < TILE && first + j <= s->position; j++)
            if (first + j >= s->first) acc = fmaf(weights[j], kv_at(s, 1, first + j, d), acc);
        state->values[d] = acc;
    }
}

static void run_partition(const query *s, uint32_t partition, partial *state) {
    const uint32_t begin = partition * OP_ATTENTION_PARTITION;
    memset(state->values, 0, sizeof state->values);
    state->maximum = -math_inf_f32();
    state->sum = 0.0F;
    for (uint32_t first = begin; first < begin + OP_ATTENTION_PARTITION && first <= s->position;
         first += TILE)
        if (first + TILE > s->first) add_tile(s, first, state);
}

static void run_query(const query *s, float *out) {
    const uint32_t head_dim = s->p->kv.layout.head_dim;
    partial total, part;
    const uint32_t first_partition = s->first / OP_ATTENTION_PARTITION;
    run_partition(s, first_partition, &total);
    for (uint32_t i = first_partition + 1; i <= s->position / OP_ATTENTION_PARTITION; i++) {
        run_partition(s, i, &part);
        const float top = part.maximum > total.maximum ? part.maximum : total.maximum;
        const float old_factor = math_exp_f32(total.maximum - top);
        const float new_factor = math_exp_f32(part.maximum - top);
        for (uint32_t d = 0; d < head_dim; d++)
            total.values[d] = fmaf(part.values[d], new_factor, total.values[d] * old_factor);
        total.sum = fmaf(part.sum, new_factor, total.sum * old_factor);
        total.maximum = top;
    }
    const float inverse = 1.0F / total.sum;
    for (uint32_t d = 0; d < head_dim; d++)
        out[d] = total.values[d] * inverse + 0.0F;
}

void op_attention_ref(const op_attention_params *p) {
    const uint32_t head_dim = p->kv.layout.head_dim;
    const uint32_t group = p->heads / p->kv.layout.kv_heads;
    BT_ASSERT(head_dim <= HEAD_DIM_MAX);
    for (uint32_t s = 0; s < p->sequences; s++) {
        for (uint32_t t = p->token_offsets[s]; t < p->token_offsets[s + 1]; t++) {
            const uint32_t position = p->first_positions[s] + t - p->token_offsets[s];
            const bool is_cut = p->window != 0 && position >= p->window;
            for (uint32_t h = 0; h < p->heads; h++)
                run_query(&(query){.p = p,
                                   .q = p->q + t * p->q_stride + (size_t)h * head_dim,
                                   .sequence = s,
                                   .kv_head = h / group,
                                   .first = is_cut ? position - p->window + 1 : 0,
                                   .position = position},
                          p->out + ((size_t)t * p->heads + h) * head_dim);
        }
    }
}
