/* The forward pass: one function per part of a layer, all of them lists of ops. */
#include <math.h>
#include <string.h>

#include "kernels/math.h"
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
    if (index + 1 == g->layers && r->kept_count == 0) return;
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

/* Once the last layer has stored K and V, only the tokens with logits go on: they move to the
 * front. They are in ascending order, so none is overwritten before it has moved. */
static uint32_t keep_tokens(model_runner *r) {
    const model_geometry *g = &r->m->card.geometry;
    const size_t q_width = (size_t)g->heads * g->head_dim;
    for (uint32_t i = 0; i < r->kept_count; i++) {
        const size_t from = r->kept_token[i];
        if (from == i) continue;
        memcpy(r->x + (size_t)i * g->hidden_size, r->x + from * g->hidden_size,
               g->hidden_size * sizeof *r->x);
        memcpy(r->attended + i * q_width, r->attended + from * q_width,
               q_width * sizeof *r->attended);
    }
    return r->kept_count;
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

/* What is done with the logits of the kept tokens [first, first + rows). */
typedef struct item_run {
    model_runner *runner;
    const model_batch *batch;
    uint32_t first;
    uint32_t rows;
} item_run;

/* The kept token that an item belongs to. */
static uint32_t kept_of_item(const item_run *run, uint32_t item) {
    const uint32_t *offsets = run->runner->kept_item;
    uint32_t low = run->first;
    uint32_t high = run->first + run->rows;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (offsets[middle] <= item) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* NaN where a row has no log-softmax. */
static void score(const item_run *run, uint32_t kept, sampler_workspace *sampler,
                  const float *logits) {
    const model_runner *r = run->runner;
    const uint32_t token = r->kept_token[kept];
    const uint32_t s = r->sequence[token];
    const model_scores *to = &run->batch->scores[s];
    const size_t at = token - run->batch->token_offsets[s] - to->first;
    const sampler_scoring scoring = {.target = to->targets[at],
                                     .vocab_limit = to->vocab_limit,
                                     .top_count = to->top_count,
                                     .id_count = to->id_count,
                                     .ids = to->ids};
    sampler_top *top = to->top_count > 0 ? to->top + at * to->top_count : NULL;
    float *ids = to->id_count > 0 ? to->id_logprobs + at * to->id_count : NULL;
    if (sampler_score_row(sampler, &scoring, logits, r->m->card.geometry.vocab_size,
                          &to->logprobs[at], top, ids))
        return;
    to->logprobs[at] = math_nan_f32();
    for (uint32_t i = 0; i < to->top_count; i++)
        top[i] = (sampler_top){.id = -1, .logprob = math_nan_f32()};
    for (uint32_t i = 0; i < to->id_count; i++)
        ids[i] = math_nan_f32();
}

static void run_item(void *context, uint32_t index, uint32_t thread) {
    const item_run *run = context;
    const model_runner *r = run->runner;
    const model_batch *b = run->batch;
    const uint32_t vocab_size = r->m->card.geometry.vocab_size;
    const uint32_t item = r->kept_item[run->first] + index;
    const uint32_t kept = kept_of_item(run, item);
    const uint32_t token = r->kept_token[kept];
    const uint32_t s = r->sequence[token];
    const float *logits = r->logits + (size_t)(kept - run->first) * vocab_size;
    const bool is_scored = model_is_scored(b, s, token);
    const uint32_t at = item - r->kept_item[kept];
    if (is_scored && at == 0) {
        score(run, kept, r->samplers[thread], logits);
        return;
    }
    const uint32_t draw = at - (is_scored ? 1U : 0U);
    if (b->logits != NULL && draw == 0)
        memcpy(b->logits + (size_t)s * vocab_size, logits, vocab_size * sizeof *logits);
    const uint32_t d = model_draws_of(b, s).first + draw;
    sampler_draw(r->samplers[thread], &b->sampling[d], logits, vocab_size, r->position[token],
                 &b->rows[d]);
}

/* Last norm, logits, draws and scores of some of the kept tokens. */
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
    item_run run = {.runner = r, .batch = b, .first = first, .rows = count};
    dev_host_run(r->dev, r->kept_item[first + count] - r->kept_item[first], run_item, &run);
}

bt_status model_step(model_runner *runner, const model_batch *batch) {
    if (batch->sequences == 0 && batch->tokens == 0) return BT_OK;
    const bt_status status = model_batch_prepare(runner, batch);
    if (status != BT_OK) return status;
    begin(runner, batch);
    const uint32_t layers = runner->m->card.geometry.layers;
    for (uint32_t layer = 0; layer < layers; layer++) {
        attend(runner, batch, layer);
        const uint32_t rows = layer + 1 == layers ? keep_tokens(runner) : batch->tokens;
        if (rows == 0) return BT_OK;
        project(runner, rows, layer);
        feed_forward(runner, rows, layer);
    }
    for (uint32_t first = 0; first < runner->kept_count; first += MODEL_LOGIT_ROWS) {
        const uint32_t rest = runner->kept_count - first;
        finish(runner, batch, first, rest < MODEL_LOGIT_ROWS ? rest : MODEL_LOGIT_ROWS);
    }
    return BT_OK;
}
