/* From tensors in a file's form to packed panels in one arena. The arena is laid out twice: once
 * without memory to learn its size, once for the pointers. Nothing is held twice; the only scratch
 * is one panel of rows. */
#include "kernels/model/model_internal.h"

#include <string.h>

#include "base/mem.h"
#include "kernels/bf16.h"
#include "kernels/host/memory.h"
#include "kernels/model/model_rope.h"

enum { DIMENSION_MAX = 1 << 24, LAYERS_MAX = 4096 };

typedef struct builder {
    const model_source *source;
    model *m;
    uint16_t *rows; /* [64][longest row] */
    void (*progress)(void *, double);
    void *progress_context;
    double elements_total;
    double elements_done;
    bt_error *error;
} builder;

model_shape model_tensor_shape(const model_geometry *g, model_tensor tensor) {
    const uint32_t q_rows = g->heads * g->head_dim;
    const uint32_t kv_rows = g->kv_heads * g->head_dim;
    const model_shape none = {0, 0};
    switch (tensor) {
    case MODEL_TENSOR_TOKEN_EMBEDDING: return (model_shape){g->vocab_size, g->hidden_size};
    case MODEL_TENSOR_OUTPUT:
        return g->has_tied_embeddings ? none : (model_shape){g->vocab_size, g->hidden_size};
    case MODEL_TENSOR_OUTPUT_NORM:
    case MODEL_TENSOR_ATTENTION_NORM:
    case MODEL_TENSOR_FFN_NORM: return (model_shape){1, g->hidden_size};
    case MODEL_TENSOR_Q: return (model_shape){q_rows, g->hidden_size};
    case MODEL_TENSOR_K:
    case MODEL_TENSOR_V: return (model_shape){kv_rows, g->hidden_size};
    case MODEL_TENSOR_O: return (model_shape){g->hidden_size, q_rows};
    case MODEL_TENSOR_Q_BIAS: return g->has_qkv_bias ? (model_shape){1, q_rows} : none;
    case MODEL_TENSOR_K_BIAS:
    case MODEL_TENSOR_V_BIAS: return g->has_qkv_bias ? (model_shape){1, kv_rows} : none;
    case MODEL_TENSOR_O_BIAS: return g->has_o_bias ? (model_shape){1, g->hidden_size} : none;
    case MODEL_TENSOR_Q_NORM:
    case MODEL_TENSOR_K_NORM: return g->has_qk_norm ? (model_shape){1, g->head_dim} : none;
    case MODEL_TENSOR_GATE:
    case MODEL_TENSOR_UP: return (model_shape){g->intermediate_size, g->hidden_size};
    case MODEL_TENSOR_DOWN: return (model_shape){g->hidden_size, g->intermediate_size};
    case MODEL_TENSOR_COUNT: break;
    }
    return none;
}

static bool is_dimension(uint32_t value) {
    return value >= 1 && value <= DIMENSION_MAX;
}

static bt_status check_geometry(const model_geometry *g, bt_error *error) {
    const bool has_sizes = is_dimension(g->vocab_size) && is_dimension(g->context_tokens) &&
                           is_dimension(g->hidden_size) && is_dimension(g->intermediate_size) &&
                           is_dimension(g->heads) && is_dimension(g->kv_heads) &&
                           is_dimension(g->head_dim);
    if (!has_sizes || g->layers == 0 || g->layers > LAYERS_MAX)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "a dimension of the model is out of range");
    if ((uint64_t)g->heads * g->head_dim > DIMENSION_MAX)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "%u heads of %u are too many", g->heads,
                       g->head_dim);
    if (g->heads % g->kv_heads != 0)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "%u heads do not divide among %u KV heads",
                       g->heads, g->kv_heads);
    if (g->head_dim % 2 != 0)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "head_dim %u is odd", g->head_dim);
    if (!(g->norm_epsilon >= 0.0F))
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "norm epsilon out of range");
    return model_rope_check(g, error);
}

static void *take(model *m, size_t bytes) {
    void *at = m->arena == NULL ? NULL : (uint8_t *)m->arena + m->arena_bytes;
    m->arena_bytes += (bytes + PACK_ALIGN_BYTES - 1) / PACK_ALIGN_BYTES * PACK_ALIGN_BYTES;
    return at;
}

static const float *take_vector(model *m, bool exists, uint32_t count) {
    return exists ? take(m, count * sizeof(float)) : NULL;
}

static pack_matrix take_matrix(model *m, uint32_t columns, uint32_t depth) {
    return (pack_matrix){.panels = take(m, pack_elements(columns, depth) * sizeof(uint16_t)),
                         .columns = columns,
                         .depth = depth};
}

/* Gives every tensor its place, from arena_bytes = 0; pointers mean nothing while arena is NULL. */
static void lay_out(model *m) {
    const model_geometry *g = &m->card.geometry;
    const uint32_t qkv_rows = (g->heads + 2 * g->kv_heads) * g->head_dim;
    const uint32_t gate_up_columns = 2 * PACK_PANEL_COLUMNS * pack_panels(g->intermediate_size);
    m->arena_bytes = 0;
    for (uint32_t i = 0; i < g->layers; i++) {
        model_layer *layer = &m->layers[i];
        layer->attention_norm = take_vector(m, true, g->hidden_size);
        layer->ffn_norm = take_vector(m, true, g->hidden_size);
        layer->qkv_bias = take_vector(m, g->has_qkv_bias, qkv_rows);
        layer->o_bias = take_vector(m, g->has_o_bias, g->hidden_size);
        layer->q_norm = take_vector(m, g->has_qk_norm, g->head_dim);
        layer->k_norm = take_vector(m, g->has_qk_norm, g->head_dim);
        layer->qkv = take_matrix(m, qkv_rows, g->hidden_size);
        layer->attention_out = take_matrix(m, g->hidden_size, g->heads * g->head_dim);
        layer->gate_up = take_matrix(m, gate_up_columns, g->hidden_size);
        layer->down = take_matrix(m, g->hidden_size, g->intermediate_size);
    }
    m->output_norm = take_vector(m, true, g->hidden_size);
    m->output = take_matrix(m, g->vocab_size, g->hidden_size);
    m->embedding = NULL;
    if (!g->has_tied_embeddings)
        m->embedding = take(m, (size_t)g->vocab_size * g->hidden_size * sizeof(uint16_t));
}

static void report(builder *b, double elements) {
    b->elements_done += elements;
    if (b->progress != NULL) b->progress(b->progress_context, b->elements_done / b->elements_total);
}

/* The arena is ours and writable; the model shows it as constant. */
static void *writable(const builder *b, const void *at) {
    return (uint8_t *)b->m->arena + ((const uint8_t *)at - (const uint8_t *)b->m->arena);
}

static bt_status read_vector(builder *b, model_tensor tensor, uint32_t layer, const float *at) {
    const uint32_t count = model_tensor_shape(&b->m->card.geometry, tensor).columns;
    float *out = writable(b, at);
    const bt_status status =
        b->source->read(b->source->context, tensor, layer, 0, 1, b->rows, b->error);
    if (status != BT_OK) return status;
    for (uint32_t i = 0; i < count; i++)
        out[i] = bf16_to_f32(b->rows[i]);
    report(b, count);
    return BT_OK;
}

/* Where row r of a tensor stands among the columns of its packed matrix: `first` + r, or in
 * alternating panels from panel `first`. */
typedef struct placement {
    uint32_t first;
    bool alternates;
} placement;

static uint32_t place_row(placement where, uint32_t row) {
    if (!where.alternates) return where.first + row;
    return (2 * (row / PACK_PANEL_COLUMNS) + where.first) * PACK_PANEL_COLUMNS +
           row % PACK_PANEL_COLUMNS;
}

static bt_status read_matrix(builder *b, model_tensor tensor, uint32_t layer,
                             const pack_matrix *matrix, placement where) {
    const model_shape shape = model_tensor_shape(&b->m->card.geometry, tensor);
    uint16_t *panels = writable(b, matrix->panels);
    for (uint32_t row = 0; row < shape.rows; row += PACK_PANEL_COLUMNS) {
        const uint32_t rest = shape.rows - row;
        const uint32_t rows = rest < PACK_PANEL_COLUMNS ? rest : PACK_PANEL_COLUMNS;
        const bt_status status =
            b->source->read(b->source->context, tensor, layer, row, rows, b->rows, b->error);
        if (status != BT_OK) return status;
        const uint32_t column = place_row(where, row);
        if (rows == PACK_PANEL_COLUMNS && column % PACK_PANEL_COLUMNS == 0) {
            pack_panel(panels, column, shape.columns, b->rows);
        } else {
            for (uint32_t i = 0; i < rows; i++)
                pack_column(panels, column + i, shape.columns, b->rows + (size_t)i * shape.columns);
        }
    }
    report(b, (double)shape.rows * shape.columns);
    return BT_OK;
}

static bt_status read_plain(builder *b, model_tensor tensor, const uint16_t *at) {
    const model_shape shape = model_tensor_shape(&b->m->card.geometry, tensor);
    const bt_status status =
        b->source->read(b->source->context, tensor, 0, 0, shape.rows, writable(b, at), b->error);
    if (status == BT_OK) report(b, (double)shape.rows * shape.columns);
    return status;
}

static bt_status read_outer(builder *b) {
    const model *m = b->m;
    bt_status status;
    if (m->embedding == NULL) {
        status = read_matrix(b, MODEL_TENSOR_TOKEN_EMBEDDING, 0, &m->output, (placement){0});
    } else {
        status = read_plain(b, MODEL_TENSOR_TOKEN_EMBEDDING, m->embedding);
        if (status == BT_OK)
            status = read_matrix(b, MODEL_TENSOR_OUTPUT, 0, &m->output, (placement){0});
    }
    if (status != BT_OK) return status;
    return read_vector(b, MODEL_TENSOR_OUTPUT_NORM, 0, m->output_norm);
}

/* One tensor of a layer, into the place that lay_out gave it. */
static bt_status read_layer_tensor(builder *b, model_tensor tensor, uint32_t index) {
    const model_geometry *g = &b->m->card.geometry;
    const model_layer *layer = &b->m->layers[index];
    const uint32_t k = g->heads * g->head_dim;
    const uint32_t v = k + g->kv_heads * g->head_dim;
    switch (tensor) {
    case MODEL_TENSOR_ATTENTION_NORM: return read_vector(b, tensor, index, layer->attention_norm);
    case MODEL_TENSOR_Q: return read_matrix(b, tensor, index, &layer->qkv, (placement){0});
    case MODEL_TENSOR_K: return read_matrix(b, tensor, index, &layer->qkv, (placement){.first = k});
    case MODEL_TENSOR_V: return read_matrix(b, tensor, index, &layer->qkv, (placement){.first = v});
    case MODEL_TENSOR_O:
        return read_matrix(b, tensor, index, &layer->attention_out, (placement){0});
    case MODEL_TENSOR_Q_BIAS: return read_vector(b, tensor, index, layer->qkv_bias);
    case MODEL_TENSOR_K_BIAS: return read_vector(b, tensor, index, layer->qkv_bias + k);
    case MODEL_TENSOR_V_BIAS: return read_vector(b, tensor, index, layer->qkv_bias + v);
    case MODEL_TENSOR_O_BIAS: return read_vector(b, tensor, index, layer->o_bias);
    case MODEL_TENSOR_Q_NORM: return read_vector(b, tensor, index, layer->q_norm);
    case MODEL_TENSOR_K_NORM: return read_vector(b, tensor, index, layer->k_norm);
    case MODEL_TENSOR_FFN_NORM: return read_vector(b, tensor, index, layer->ffn_norm);
    case MODEL_TENSOR_GATE:
        return read_matrix(b, tensor, index, &layer->gate_up, (placement){0, true});
    case MODEL_TENSOR_UP:
        return read_matrix(b, tensor, index, &layer->gate_up, (placement){1, true});
    case MODEL_TENSOR_DOWN: return read_matrix(b, tensor, index, &layer->down, (placement){0});
    case MODEL_TENSOR_TOKEN_EMBEDDING:
    case MODEL_TENSOR_OUTPUT:
    case MODEL_TENSOR_OUTPUT_NORM:
    case MODEL_TENSOR_COUNT: break;
    }
    return BT_ERR_WORKER_INTERNAL;
}

static bt_status read_all(builder *b) {
    const model_geometry *g = &b->m->card.geometry;
    bt_status status = read_outer(b);
    for (uint32_t layer = 0; layer < g->layers; layer++)
        for (int t = MODEL_TENSOR_ATTENTION_NORM; t < MODEL_TENSOR_COUNT; t++) {
            const model_tensor tensor = (model_tensor)t;
            if (status != BT_OK) return status;
            if (model_tensor_shape(g, tensor).rows == 0) continue;
            status = read_layer_tensor(b, tensor, layer);
        }
    return status;
}

/* Also finds the longest row. */
static uint32_t measure(builder *b) {
    const model_geometry *g = &b->m->card.geometry;
    uint32_t longest = 0;
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        const model_shape shape = model_tensor_shape(g, (model_tensor)t);
        const uint32_t copies = t < MODEL_TENSOR_ATTENTION_NORM ? 1 : g->layers;
        b->elements_total += (double)shape.rows * shape.columns * copies;
        if (shape.columns > longest) longest = shape.columns;
    }
    return longest;
}

bt_status model_build(const model_source *source, void (*progress)(void *, double),
                      void *progress_context, model **out, bt_error *error) {
    bt_status status = check_geometry(&source->card->geometry, error);
    if (status != BT_OK) return status;
    builder b = {.source = source,
                 .progress = progress,
                 .progress_context = progress_context,
                 .error = error};
    b.m = bt_calloc(1, sizeof *b.m);
    if (b.m == NULL) goto no_memory;
    b.m->card = *source->card;
    b.m->layers = bt_calloc(b.m->card.geometry.layers, sizeof *b.m->layers);
    if (b.m->layers == NULL) goto no_memory;
    const uint32_t longest = measure(&b);
    b.rows = bt_malloc((size_t)PACK_PANEL_COLUMNS * longest * sizeof *b.rows);
    if (b.rows == NULL) goto no_memory;
    lay_out(b.m);
    b.m->arena = host_memory_map(b.m->arena_bytes);
    if (b.m->arena == NULL) goto no_memory;
    lay_out(b.m);
    status = read_all(&b);
    bt_free(b.rows);
    if (status == BT_OK)
        *out = b.m;
    else
        model_destroy(b.m);
    return status;

no_memory:
    bt_free(b.rows);
    model_destroy(b.m);
    return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory for the weights");
}
