/* The ops that treat every row by itself: embedding, norm, rotary table, and what happens between
 * the projection of q, k, v and attention. */
#include <string.h>

#include "kernels/host/dev_host_internal.h"
#include "kernels/math.h"

enum { RUN_ROWS = 8 };

typedef struct row_run {
    dev_host *dev;
    const void *params;
    uint32_t rows;
    void (*row)(const dev_host *dev, const void *params, uint32_t row);
} row_run;

static void some_rows(void *context, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const row_run *run = context;
    for (uint32_t row = begin; row < end; row++)
        run->row(run->dev, run->params, row);
}

static void run_rows(row_run run) {
    host_run_stretches(
        run.dev,
        &(host_work){
            .units = run.rows, .align = 1, .run_min = RUN_ROWS, .run = some_rows, .context = &run});
}

static void embed_row(const dev_host *dev, const void *params, uint32_t row) {
    (void)dev;
    const op_embed_params *p = params;
    pack_gather(&p->weights, (uint32_t)p->token_ids[row], p->out + (size_t)row * p->weights.depth);
}

void op_embed(dev_host *dev, const op_embed_params *p) {
    run_rows((row_run){.dev = dev, .params = p, .rows = p->rows, .row = embed_row});
}

static void norm_row(const dev_host *dev, const void *params, uint32_t row) {
    const op_rms_norm_params *p = params;
    dev->isa->rms_norm(p->out + (size_t)row * p->width, p->x + row * p->x_stride, p->weight,
                       p->width, p->epsilon);
}

void op_rms_norm(dev_host *dev, const op_rms_norm_params *p) {
    run_rows((row_run){.dev = dev, .params = p, .rows = p->rows, .row = norm_row});
}

static void rope_table_row(const dev_host *dev, const void *params, uint32_t row) {
    (void)dev;
    const op_rope_table_params *p = params;
    const uint32_t half = p->head_dim / 2;
    float *cosines = p->out + (size_t)row * p->head_dim;
    float *sines = cosines + half;
    for (uint32_t i = 0; i < half; i++) {
        const float angle = (float)p->positions[row] * p->frequencies[i];
        double sine, cosine;
        math_sincos_f64((double)angle, &sine, &cosine);
        cosines[i] = (float)cosine * p->magnitude;
        sines[i] = (float)sine * p->magnitude;
    }
}

void op_rope_table(dev_host *dev, const op_rope_table_params *p) {
    run_rows((row_run){.dev = dev, .params = p, .rows = p->rows, .row = rope_table_row});
}

/* Norm and rotation of `heads` heads of one token. */
static void turn_heads(const host_isa *isa, float *x, uint32_t heads, const float *norm,
                       const float *table, uint32_t head_dim, float epsilon) {
    for (uint32_t h = 0; h < heads; h++, x += head_dim) {
        if (norm != NULL) isa->rms_norm(x, x, norm, head_dim, epsilon);
        isa->rope(x, table, head_dim);
    }
}

static void store_heads(const host_isa *isa, uint8_t *page, size_t token, const float *x,
                        const kv_page_layout *layout, uint32_t layer, uint32_t which) {
    const uint32_t head_dim = layout->head_dim;
    for (uint32_t h = 0; h < layout->kv_heads; h++, x += head_dim) {
        void *to = page + kv_page_offset(layout, layer, which, h) +
                   token * head_dim * kv_element_bytes(layout->dtype);
        if (layout->dtype == KV_DTYPE_BF16)
            isa->store_bf16(to, x, head_dim);
        else
            memcpy(to, x, head_dim * sizeof *x);
    }
}

static void rope_store_row(const dev_host *dev, const void *params, uint32_t row) {
    const op_rope_store_params *p = params;
    const kv_page_layout *layout = &p->kv.layout;
    const uint32_t head_dim = layout->head_dim;
    const float *table = p->rope + (size_t)row * head_dim;
    float *q = p->qkv + (size_t)row * (p->heads + 2 * layout->kv_heads) * head_dim;
    float *k = q + (size_t)p->heads * head_dim;
    float *v = k + (size_t)layout->kv_heads * head_dim;
    turn_heads(dev->isa, q, p->heads, p->q_norm, table, head_dim, p->epsilon);
    turn_heads(dev->isa, k, layout->kv_heads, p->k_norm, table, head_dim, p->epsilon);
    const uint32_t position = p->positions[row];
    const uint32_t *page_ids = p->kv.page_ids + p->kv.page_offsets[p->sequence_of[row]];
    uint8_t *page = p->kv.memory + page_ids[position / layout->page_tokens] * kv_page_bytes(layout);
    const size_t token = position % layout->page_tokens;
    store_heads(dev->isa, page, token, k, layout, p->layer, 0);
    store_heads(dev->isa, page, token, v, layout, p->layer, 1);
}

void op_rope_store(dev_host *dev, const op_rope_store_params *p) {
    run_rows((row_run){.dev = dev, .params = p, .rows = p->tokens, .row = rope_store_row});
}
