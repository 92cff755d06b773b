/* The plan of a model: shapes, formats, and where each tensor lies in the arena. The arena is laid
 * out twice: once without memory to learn its size, once for the pointers. */
#include "kernels/model/model_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/model/model_rope.h"

enum { DIMENSION_MAX = 1 << 24, LAYERS_MAX = 4096 };

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
    void *at = m->arena == NULL ? NULL : m->arena + m->arena_bytes;
    m->arena_bytes += (bytes + PACK_ALIGN_BYTES - 1) / PACK_ALIGN_BYTES * PACK_ALIGN_BYTES;
    return at;
}

static const float *take_vector(model *m, bool exists, uint32_t count) {
    return exists ? take(m, count * sizeof(float)) : NULL;
}

/* The format is already there. */
static void take_matrix(model *m, pack_matrix *matrix, uint32_t columns, uint32_t depth) {
    matrix->columns = columns;
    matrix->depth = depth;
    matrix->panels = take(m, pack_bytes(matrix->format, columns, depth));
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
        take_matrix(m, &layer->qkv, qkv_rows, g->hidden_size);
        take_matrix(m, &layer->attention_out, g->hidden_size, g->heads * g->head_dim);
        take_matrix(m, &layer->gate_up, gate_up_columns, g->hidden_size);
        take_matrix(m, &layer->down, g->hidden_size, g->intermediate_size);
    }
    m->output_norm = take_vector(m, true, g->hidden_size);
    take_matrix(m, &m->output, g->vocab_size, g->hidden_size);
    if (g->has_tied_embeddings)
        m->embedding = m->output;
    else
        take_matrix(m, &m->embedding, g->vocab_size, g->hidden_size);
}

static bool is_kept(model_weights weights, pack_format stored) {
    switch (weights) {
    case MODEL_WEIGHTS_AUTO: return stored == PACK_Q8_0;
    case MODEL_WEIGHTS_NATIVE: return true;
    case MODEL_WEIGHTS_BF16:
    case MODEL_WEIGHTS_INT8: break;
    }
    return false;
}

/* The format of a matrix that consists of these tensors, which have rows of equal length. */
static pack_format choose_format(const model_source *source, model_weights weights, uint32_t layer,
                                 const model_tensor *parts, size_t count) {
    const uint32_t depth = model_tensor_shape(&source->card->geometry, parts[0]).columns;
    if (weights == MODEL_WEIGHTS_INT8) return PACK_INT8;
    if (source->stored_format == NULL) return PACK_BF16;
    const pack_format first = source->stored_format(source->context, parts[0], layer);
    for (size_t i = 1; i < count; i++)
        if (source->stored_format(source->context, parts[i], layer) != first) return PACK_BF16;
    return is_kept(weights, first) && pack_format_takes(first, depth) ? first : PACK_BF16;
}

static void choose_formats(model *m, const model_source *source, model_weights weights) {
    static const model_tensor embedding = MODEL_TENSOR_TOKEN_EMBEDDING,
                              output = MODEL_TENSOR_OUTPUT;
    static const model_tensor qkv[] = {MODEL_TENSOR_Q, MODEL_TENSOR_K, MODEL_TENSOR_V};
    static const model_tensor gate_up[] = {MODEL_TENSOR_GATE, MODEL_TENSOR_UP};
    static const model_tensor o = MODEL_TENSOR_O, down = MODEL_TENSOR_DOWN;
    m->embedding.format = choose_format(source, weights, 0, &embedding, 1);
    m->output.format = m->embedding.format;
    if (!m->card.geometry.has_tied_embeddings)
        m->output.format = choose_format(source, weights, 0, &output, 1);
    for (uint32_t i = 0; i < m->card.geometry.layers; i++) {
        model_layer *layer = &m->layers[i];
        layer->qkv.format = choose_format(source, weights, i, qkv, BT_ARRAY_COUNT(qkv));
        layer->attention_out.format = choose_format(source, weights, i, &o, 1);
        layer->gate_up.format = choose_format(source, weights, i, gate_up, BT_ARRAY_COUNT(gate_up));
        layer->down.format = choose_format(source, weights, i, &down, 1);
    }
}

static void name_numerics(model *m) {
    bool is_used[PACK_FORMAT_COUNT] = {false};
    is_used[m->embedding.format] = is_used[m->output.format] = true;
    for (uint32_t i = 0; i < m->card.geometry.layers; i++) {
        const model_layer *layer = &m->layers[i];
        is_used[layer->qkv.format] = is_used[layer->attention_out.format] = true;
        is_used[layer->gate_up.format] = is_used[layer->down.format] = true;
    }
    int used = snprintf(m->numerics, sizeof m->numerics, "%s", model_numerics());
    for (int format = PACK_BF16 + 1; format < PACK_FORMAT_COUNT; format++) {
        if (!is_used[format]) continue;
        used += snprintf(m->numerics + used, sizeof m->numerics - (size_t)used, "/%s",
                         pack_format_name((pack_format)format));
        BT_ASSERT(used > 0 && (size_t)used < sizeof m->numerics);
    }
}

bt_status model_plan(const model_source *source, model_weights weights, model **out,
                     bt_error *error) {
    const bt_status status = check_geometry(&source->card->geometry, error);
    if (status != BT_OK) return status;
    model *m = bt_calloc(1, sizeof *m);
    if (m == NULL) goto no_memory;
    m->card = *source->card;
    m->layers = bt_calloc(m->card.geometry.layers, sizeof *m->layers);
    if (m->layers == NULL) goto no_memory;
    choose_formats(m, source, weights);
    name_numerics(m);
    lay_out(m);
    *out = m;
    return BT_OK;

no_memory:
    model_destroy(m);
    return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory for the weights");
}

void model_place(model *m, void *block, size_t block_bytes, uint8_t *arena) {
    BT_ASSERT((uintptr_t)arena % PACK_ALIGN_BYTES == 0);
    host_memory_unmap(m->block, m->block_bytes);
    m->block = block;
    m->block_bytes = block_bytes;
    m->arena = arena;
    lay_out(m);
}

bt_status model_build(const model_source *source, model_weights weights, uint32_t threads,
                      model **out, bt_error *error) {
    model *m;
    bt_status status = model_plan(source, weights, &m, error);
    if (status != BT_OK) return status;
    uint8_t *arena = host_memory_map(m->arena_bytes);
    if (arena == NULL) {
        status = bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory for the weights");
    } else {
        model_place(m, arena, m->arena_bytes, arena);
        status = model_pack(m, source, threads, error);
    }
    if (status == BT_OK)
        *out = m;
    else
        model_destroy(m);
    return status;
}
