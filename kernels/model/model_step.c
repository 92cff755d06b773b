/* The forward pass: one function per part of a layer, all of them lists of ops. */
#include <math.h>
#include <string.h>

#include "kernels/model/model_runner_internal.h"

static void norm(model_runner *r, const float *weight, uint32_t rows) {
    const model_geometry *g = &r->m->card.geometry;
    op_rms_norm(r->dev, &(op_rms_norm_params){.out = r->normed,
                                              .x = r->x,
                                              .weight = weight,
                                              .x_stride = g->hidden_size,
                                              .rows = rows,
                                              .width = g->hidden_size,
                                              .epsilon = g->norm_epsilon});
}

static op_kv batch_kv(const model_runner *r, const model_batch *b) {
    return (op_kv){.layout = r->kv,
                   .memory = r->kv_memory,
                   .page_ids = b->page_ids,
                   .page_offsets = b->page_offsets};
}

static op_attention_params attention_params(model_runner *r, const model_batch *b, uint32_t layer) {
    const model_geometry *g = &r->m->card.geometry;
    return (op_attention_params){
        .out = r->attended,
        .q = r->qkv,
        .kv = batch_kv(r, b),
        .plan = r->plan,
        .token_offsets = b->token_offsets,
        .first_positions = b->first_positions,
        .q_stride = (size_t)(g->heads + 2 * g->kv_heads) * g->head_dim,
        .sequences = b->sequences,
        .heads = g->heads,
        .layer = layer,
        .window = g->sliding_window,
        .scale = 1.0F / sqrtf((float)g->head_dim),
    };
}

/* K and V of all tokens into the pages, and what each token attends to into r->attended. */
static void attend(model_runner *r, const model_batch *b, uint32_t index) {
    const model_geometry *g = &r->m->card.geometry;
    const model_layer *layer = &r->m->layers[index];
    norm(r, layer->attention_norm, b->tokens);
    op_matmul(r->dev, &(op_matmul_params){.out = r->qkv,
                                          .x = r->normed,
                                          .weights = layer->qkv,
                                          .bias = layer->qkv_bias,
                                          .out_stride = layer->qkv.columns,
                                          .x_stride = g->hidden_size,
                                          .rows = b->tokens});
    op_rope_store(r->dev, &(op_rope_store_params){.qkv = r->qkv,
                                                  .kv = batch_kv(r, b),
                                                  .rope = r->rope,
                                                  .positions = r->position,
                                                  .sequence_of = r->sequence,
                                                  .q_norm = layer->q_norm,
                                                  .k_norm = layer->k_norm,
                                                  .tokens = b->tokens,
                                                  .heads = g->heads,
                                                  .layer = index,
                                                  .epsilon = g->norm_epsilon});
    if (index + 1 == g->layers && r->sample_count == 0) return;
    const op_attention_params params = attention_params(r, b, index);
    op_attention(r->dev, &params);
}

static void project(model_runner *r, uint32_t rows, uint32_t index) {
    const model_geometry *g = &r->m->card.geometry;
    const model_layer *layer = &r->m->layers[index];
    op_matmul(r->dev, &(op_matmul_params){.out = r->x,
                                          .x = r->attended,
                                          .weights = layer->attention_out,
                                          .bias = layer->o_bias,
                                          .out_stride = g->hidden_size,
                                          .x_stride = (size_t)g->heads * g->head_dim,
                                          .rows = rows,
                                          .adds = true});
}

static void feed_forward(model_runner *r, uint32_t rows, uint32_t index) {
    const model_geometry *g = &r->m->card.geometry;
    const model_layer *layer = &r->m->layers[index];
    norm(r, layer->ffn_norm, rows);
    op_gate_up(r->dev, &(op_gate_up_params){.out = r->activated,
                                            .x = r->normed,
                                            .weights = layer->gate_up,
                                            .rows = rows,
                                            .width = g->intermediate_size});
    op_matmul(r->dev, &(op_matmul_params){.out = r->x,
                                          .x = r->activated,
                                          .weights = layer->down,
                                          .out_stride = g->hidden_size,
                                          .x_stride = g->intermediate_size,
                                          .rows = rows,
                                          .adds = true});
}

/* Once the last layer has stored K and V, only the tokens that sample go on: they move to the
 * front. Their order in the batch is ascending, so none is overwritten before it has moved. */
static uint32_t keep_samples(model_runner *r) {
    const model_geometry *g = &r->m->card.geometry;
    const size_t q_width = (size_t)g->heads * g->head_dim;
    for (uint32_t i = 0; i < r->sample_count; i++) {
        const size_t from = r->sample_token[i];
        if (from == i) continue;
        memcpy(r->x + (size_t)i * g->hidden_size, r->x + from * g->hidden_size,
               g->hidden_size * sizeof *r->x);
        memcpy(r->attended + i * q_width, r->attended + from * q_width,
               q_width * sizeof *r->attended);
    }
    return r->sample_count;
}

static void begin(model_runner *r, const model_batch *b) {
    const model_geometry *g = &r->m->card.geometry;
    op_embed(r->dev, &(op_embed_params){.out = r->x,
                                        .token_ids = b->token_ids,
                                        .rows = b->tokens,
                                        .weights = r->m->embedding});
    op_rope_table(r->dev, &(op_rope_table_params){.out = r->rope,
                                                  .positions = r->position,
                                                  .rows = b->tokens,
                                                  .head_dim = g->head_dim,
                                                  .frequencies = r->rope_frequency,
                                                  .magnitude = model_rope_magnitude(g)});
    const op_attention_params params = attention_params(r, b, 0);
    op_attention_prepare(r->dev, &params);
}

typedef struct draw_run {
    model_runner *runner;
    const model_batch *batch;
    uint32_t first; /* of the sampling sequences */
} draw_run;

static void draw_item(void *context, uint32_t item, uint32_t thread) {
    const draw_run *run = context;
    const model_runner *r = run->runner;
    const uint32_t vocab_size = r->m->card.geometry.vocab_size;
    const uint32_t sample = run->first + item;
    const uint32_t row = r->sample_row[sample];
    const float *logits = r->logits + (size_t)item * vocab_size;
    if (run->batch->logits != NULL)
        memcpy(run->batch->logits + (size_t)row * vocab_size, logits, vocab_size * sizeof *logits);
    sampler_draw(r->samplers[thread], &run->batch->sampling[row], logits, vocab_size,
                 r->position[r->sample_token[sample]], &run->batch->rows[row]);
}

/* Last norm, logits and draw for some of the sampling sequences. */
static void finish(model_runner *r, const model_batch *b, uint32_t first, uint32_t count) {
    const model_geometry *g = &r->m->card.geometry;
    op_rms_norm(r->dev, &(op_rms_norm_params){.out = r->normed,
                                              .x = r->x + (size_t)first * g->hidden_size,
                                              .weight = r->m->output_norm,
                                              .x_stride = g->hidden_size,
                                              .rows = count,
                                              .width = g->hidden_size,
                                              .epsilon = g->norm_epsilon});
    op_matmul(r->dev, &(op_matmul_params){.out = r->logits,
                                          .x = r->normed,
                                          .weights = r->m->output,
                                          .out_stride = g->vocab_size,
                                          .x_stride = g->hidden_size,
                                          .rows = count});
    draw_run run = {.runner = r, .batch = b, .first = first};
    dev_host_run(r->dev, count, draw_item, &run);
}

bt_status model_step(model_runner *runner, const model_batch *batch) {
    if (batch->sequences == 0 && batch->tokens == 0) return BT_OK;
    const bt_status status = model_batch_prepare(runner, batch);
    if (status != BT_OK) return status;
    begin(runner, batch);
    const uint32_t layers = runner->m->card.geometry.layers;
    for (uint32_t layer = 0; layer < layers; layer++) {
        attend(runner, batch, layer);
        const uint32_t rows = layer + 1 == layers ? keep_samples(runner) : batch->tokens;
        if (rows == 0) return BT_OK;
        project(runner, rows, layer);
        feed_forward(runner, rows, layer);
    }
    for (uint32_t first = 0; first < runner->sample_count; first += MODEL_LOGIT_ROWS) {
        const uint32_t rest = runner->sample_count - first;
        finish(runner, batch, first, rest < MODEL_LOGIT_ROWS ? rest : MODEL_LOGIT_ROWS);
    }
    return BT_OK;
}
