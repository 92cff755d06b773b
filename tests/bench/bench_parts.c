#include "tests/bench/bench_parts.h"

#include <math.h>
#include <stdio.h>
#include <time.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/model/model_runner_internal.h"

typedef enum part {
    PART_NORM,
    PART_QKV,
    PART_ROPE_STORE,
    PART_ATTENTION,
    PART_ATTENTION_OUT,
    PART_GATE_UP,
    PART_DOWN,
    PART_OUTPUT,
    PART_COUNT,
} part;

static const char *const part_names[] = {"norm",          "qkv",     "rope_store", "attention",
                                         "attention_out", "gate_up", "down",       "output"};

typedef struct workspace {
    float *x, *normed, *qkv, *attended, *activated, *logits, *rope, *frequencies;
    uint32_t *sequence_of, *token_offsets;
    op_attention_plan *plan;
} workspace;

typedef struct run {
    const bench_parts *p;
    const model_geometry *g;
    workspace w;
    double seconds[PART_COUNT], cpu[PART_COUNT];
    double start, cpu_start;
} run;

static double seconds_of(clockid_t clock) {
    struct timespec t;
    BT_ASSERT(clock_gettime(clock, &t) == 0);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void begin(run *r) {
    r->cpu_start = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    r->start = seconds_of(CLOCK_MONOTONIC);
}

/* What ran since `begin` or the last end belongs to `at`. */
static void end(run *r, part at) {
    r->seconds[at] += seconds_of(CLOCK_MONOTONIC) - r->start;
    r->cpu[at] += seconds_of(CLOCK_PROCESS_CPUTIME_ID) - r->cpu_start;
    begin(r);
}

static float *floats(size_t count) {
    float *block = bt_calloc_aligned(64, count * sizeof *block);
    BT_ASSERT(block != NULL);
    return block;
}

static uint32_t *numbers(size_t count) {
    uint32_t *block = bt_calloc(count, sizeof *block);
    BT_ASSERT(block != NULL);
    return block;
}

static size_t qkv_width(const model_geometry *g) {
    return (size_t)(g->heads + 2 * g->kv_heads) * g->head_dim;
}

static void norm(run *r, const float *weight) {
    op_rms_norm(r->p->dev, &(op_rms_norm_params){.out = r->w.normed,
                                                 .x = r->w.x,
                                                 .weight = weight,
                                                 .x_stride = r->g->hidden_size,
                                                 .rows = r->p->sequences,
                                                 .width = r->g->hidden_size,
                                                 .epsilon = r->g->norm_epsilon});
    end(r, PART_NORM);
}

static void matmul(run *r, float *out, const float *x, const pack_matrix *weights,
                   const float *bias, bool adds, part at) {
    op_matmul(r->p->dev, &(op_matmul_params){.out = out,
                                             .x = x,
                                             .weights = *weights,
                                             .bias = bias,
                                             .out_stride = weights->columns,
                                             .x_stride = weights->depth,
                                             .rows = r->p->sequences,
                                             .adds = adds});
    end(r, at);
}

static void rope_store(run *r, const model_layer *layer, uint32_t index) {
    op_rope_store(r->p->dev, &(op_rope_store_params){.qkv = r->w.qkv,
                                                     .kv = r->p->kv,
                                                     .rope = r->w.rope,
                                                     .positions = r->p->first_positions,
                                                     .sequence_of = r->w.sequence_of,
                                                     .q_norm = layer->q_norm,
                                                     .k_norm = layer->k_norm,
                                                     .tokens = r->p->sequences,
                                                     .heads = r->g->heads,
                                                     .layer = index,
                                                     .epsilon = r->g->norm_epsilon});
    end(r, PART_ROPE_STORE);
}

static op_attention_params attention_params(const run *r, uint32_t layer) {
    return (op_attention_params){.out = r->w.attended,
                                 .q = r->w.qkv,
                                 .kv = r->p->kv,
                                 .plan = r->w.plan,
                                 .token_offsets = r->w.token_offsets,
                                 .first_positions = r->p->first_positions,
                                 .q_stride = qkv_width(r->g),
                                 .sequences = r->p->sequences,
                                 .heads = r->g->heads,
                                 .layer = layer,
                                 .window = r->g->sliding_window,
                                 .scale = 1.0F / sqrtf((float)r->g->head_dim)};
}

static void run_layer(run *r, uint32_t index) {
    const model_layer *layer = &r->p->m->layers[index];
    workspace *w = &r->w;
    norm(r, layer->attention_norm);
    matmul(r, w->qkv, w->normed, &layer->qkv, layer->qkv_bias, false, PART_QKV);
    rope_store(r, layer, index);
    const op_attention_params params = attention_params(r, index);
    op_attention(r->p->dev, &params);
    end(r, PART_ATTENTION);
    matmul(r, w->x, w->attended, &layer->attention_out, layer->o_bias, true, PART_ATTENTION_OUT);
    norm(r, layer->ffn_norm);
    op_gate_up(r->p->dev, &(op_gate_up_params){.out = w->activated,
                                               .x = w->normed,
                                               .weights = layer->gate_up,
                                               .rows = r->p->sequences,
                                               .width = r->g->intermediate_size});
    end(r, PART_GATE_UP);
    matmul(r, w->x, w->activated, &layer->down, NULL, true, PART_DOWN);
}

static void run_output(run *r) {
    const pack_matrix *output = &r->p->m->output;
    norm(r, r->p->m->output_norm);
    for (uint32_t row = 0; row < r->p->sequences; row += MODEL_LOGIT_ROWS) {
        const uint32_t rest = r->p->sequences - row;
        op_matmul(r->p->dev,
                  &(op_matmul_params){.out = r->w.logits,
                                      .x = r->w.normed + (size_t)row * r->g->hidden_size,
                                      .weights = *output,
                                      .out_stride = output->columns,
                                      .x_stride = output->depth,
                                      .rows = rest < MODEL_LOGIT_ROWS ? rest : MODEL_LOGIT_ROWS});
    }
    end(r, PART_OUTPUT);
}

static void open_workspace(run *r) {
    const model_geometry *g = r->g;
    const size_t rows = r->p->sequences;
    workspace *w = &r->w;
    w->x = floats(rows * g->hidden_size);
    w->normed = floats(rows * g->hidden_size);
    w->qkv = floats(rows * qkv_width(g));
    w->attended = floats(rows * g->heads * g->head_dim);
    w->activated = floats(rows * g->intermediate_size);
    w->logits = floats((size_t)MODEL_LOGIT_ROWS * g->vocab_size);
    w->rope = floats(rows * g->head_dim);
    w->frequencies = floats(g->head_dim / 2);
    w->sequence_of = numbers(rows);
    w->token_offsets = numbers(rows + 1);
    for (uint32_t s = 0; s < rows; s++) {
        w->sequence_of[s] = s;
        w->token_offsets[s + 1] = s + 1;
    }
    for (size_t i = 0; i < rows * g->hidden_size; i++)
        w->x[i] = (float)(i * 7919 % 2003) * 0.001F - 1.0F;
    model_rope_frequencies(g, w->frequencies);
    op_rope_table(r->p->dev, &(op_rope_table_params){.out = w->rope,
                                                     .positions = r->p->first_positions,
                                                     .rows = r->p->sequences,
                                                     .head_dim = g->head_dim,
                                                     .frequencies = w->frequencies,
                                                     .magnitude = model_rope_magnitude(g)});
    BT_ASSERT(op_attention_plan_create(r->p->dev, r->p->sequences, r->p->sequences,
                                       r->p->first_positions[0] + 1, g->heads, &r->p->kv.layout,
                                       &w->plan) == BT_OK);
    const op_attention_params params = attention_params(r, 0);
    op_attention_prepare(r->p->dev, &params);
}

static void close_workspace(workspace *w) {
    op_attention_plan_destroy(w->plan);
    float *all[] = {w->x,         w->normed, w->qkv,  w->attended,
                    w->activated, w->logits, w->rope, w->frequencies};
    for (size_t i = 0; i < BT_ARRAY_COUNT(all); i++)
        bt_free(all[i]);
    bt_free(w->sequence_of);
    bt_free(w->token_offsets);
}

void bench_parts_run(const bench_parts *p) {
    run r = {.p = p, .g = &p->m->card.geometry};
    open_workspace(&r);
    begin(&r);
    for (uint32_t step = 0; step < p->steps; step++) {
        for (uint32_t layer = 0; layer < r.g->layers; layer++)
            run_layer(&r, layer);
        run_output(&r);
    }
    const double each = 1.0 / p->steps;
    printf("{");
    for (int i = 0; i < PART_COUNT; i++)
        printf("%s\"%s\": [%.6f, %.6f]", i == 0 ? "" : ", ", part_names[i], r.seconds[i] * each,
               r.cpu[i] * each / dev_host_threads(p->dev));
    printf("}\n");
    close_workspace(&r.w);
}
