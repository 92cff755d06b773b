/* From tensors in a file's form to packed panels in the arena of a model. The rows are cut into
 * pieces, which any thread takes; each piece has its own columns, so threads write side by side. */
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/bf16.h"
#include "kernels/host/pool.h"
#include "kernels/model/model_internal.h"

/* A piece is at most this large as bf16, unless one row is larger: small enough that it is packed
 * and hashed from the second cache. */
static const size_t piece_bytes = (size_t)1 << 20;

typedef struct pack_thread {
    uint8_t *rows;      /* of one piece, as they are packed */
    uint16_t *unpacked; /* the same in bf16, when they are made into INT8 */
    bt_status status;
    uint32_t piece; /* that failed */
    bt_error error;
} pack_thread;

typedef struct pack_run {
    model *m;
    const model_source *source;
    const model_piece *pieces;
    pack_thread *threads;
} pack_run;

/* Where a tensor goes: into the columns of a matrix from `first`, or into alternating panels from
 * panel `first`; or, without a matrix, into a vector. */
typedef struct placement {
    const pack_matrix *matrix;
    const float *vector;
    uint32_t first;
    bool alternates;
} placement;

static placement place_layered(const model_geometry *g, const model_layer *layer,
                               model_tensor tensor) {
    const uint32_t k = g->heads * g->head_dim;
    const uint32_t v = k + g->kv_heads * g->head_dim;
    switch (tensor) {
    case MODEL_TENSOR_ATTENTION_NORM: return (placement){.vector = layer->attention_norm};
    case MODEL_TENSOR_Q: return (placement){.matrix = &layer->qkv};
    case MODEL_TENSOR_K: return (placement){.matrix = &layer->qkv, .first = k};
    case MODEL_TENSOR_V: return (placement){.matrix = &layer->qkv, .first = v};
    case MODEL_TENSOR_O: return (placement){.matrix = &layer->attention_out};
    case MODEL_TENSOR_Q_BIAS: return (placement){.vector = layer->qkv_bias};
    case MODEL_TENSOR_K_BIAS: return (placement){.vector = layer->qkv_bias + k};
    case MODEL_TENSOR_V_BIAS: return (placement){.vector = layer->qkv_bias + v};
    case MODEL_TENSOR_O_BIAS: return (placement){.vector = layer->o_bias};
    case MODEL_TENSOR_Q_NORM: return (placement){.vector = layer->q_norm};
    case MODEL_TENSOR_K_NORM: return (placement){.vector = layer->k_norm};
    case MODEL_TENSOR_FFN_NORM: return (placement){.vector = layer->ffn_norm};
    case MODEL_TENSOR_GATE: return (placement){.matrix = &layer->gate_up, .alternates = true};
    case MODEL_TENSOR_UP:
        return (placement){.matrix = &layer->gate_up, .first = 1, .alternates = true};
    case MODEL_TENSOR_DOWN: return (placement){.matrix = &layer->down};
    case MODEL_TENSOR_TOKEN_EMBEDDING:
    case MODEL_TENSOR_OUTPUT:
    case MODEL_TENSOR_OUTPUT_NORM:
    case MODEL_TENSOR_COUNT: break;
    }
    BT_ASSERT(false);
    return (placement){0};
}

static placement place(const model *m, model_tensor tensor, uint32_t layer) {
    if (tensor == MODEL_TENSOR_TOKEN_EMBEDDING) return (placement){.matrix = &m->embedding};
    if (tensor == MODEL_TENSOR_OUTPUT) return (placement){.matrix = &m->output};
    if (tensor == MODEL_TENSOR_OUTPUT_NORM) return (placement){.vector = m->output_norm};
    return place_layered(&m->card.geometry, &m->layers[layer], tensor);
}

static uint32_t column_of(placement where, uint32_t row) {
    if (!where.alternates) return where.first + row;
    return (2 * (row / PACK_PANEL_COLUMNS) + where.first) * PACK_PANEL_COLUMNS +
           row % PACK_PANEL_COLUMNS;
}

/* Rows of a piece: whole panels where a panel is not larger than a piece. */
static uint32_t piece_rows(model_shape shape) {
    const size_t fitting = piece_bytes / ((size_t)shape.columns * sizeof(uint16_t));
    if (fitting >= shape.rows) return shape.rows;
    if (fitting >= PACK_PANEL_COLUMNS)
        return (uint32_t)(fitting / PACK_PANEL_COLUMNS) * PACK_PANEL_COLUMNS;
    return fitting == 0 ? 1 : (uint32_t)fitting;
}

static uint32_t cut(const model *m, model_tensor tensor, uint32_t layer, uint32_t count,
                    model_piece *out) {
    const model_shape shape = model_tensor_shape(&m->card.geometry, tensor);
    if (shape.rows == 0) return count;
    const placement where = place(m, tensor, layer);
    const pack_format format = where.matrix == NULL ? PACK_BF16 : where.matrix->format;
    const uint32_t step = piece_rows(shape);
    for (uint32_t row = 0; row < shape.rows; row += step, count++) {
        if (out == NULL) continue;
        const uint32_t rest = shape.rows - row;
        out[count] = (model_piece){.tensor = tensor,
                                   .layer = layer,
                                   .first_row = row,
                                   .rows = rest < step ? rest : step,
                                   .format = format};
    }
    return count;
}

uint32_t model_pieces(const model *m, model_piece *out) {
    uint32_t count = 0;
    for (int t = 0; t < MODEL_TENSOR_ATTENTION_NORM; t++)
        count = cut(m, (model_tensor)t, 0, count, out);
    for (uint32_t layer = 0; layer < m->card.geometry.layers; layer++)
        for (int t = MODEL_TENSOR_ATTENTION_NORM; t < MODEL_TENSOR_COUNT; t++)
            count = cut(m, (model_tensor)t, layer, count, out);
    return count;
}

/* The arena is ours and writable; the model shows it as constant. */
static uint8_t *writable(const model *m, const void *at) {
    return m->arena + ((const uint8_t *)at - m->arena);
}

/* The rows of a piece in the form in which they are packed, into t->rows. */
static bt_status read_rows(const pack_run *run, const model_piece *p, uint32_t columns,
                           pack_thread *t) {
    const model_source *s = run->source;
    bt_status status;
    if (p->format == PACK_BF16 || p->format == PACK_INT8) {
        uint16_t *out = t->unpacked;
        status = s->read(s->context, p->tensor, p->layer, p->first_row, p->rows, out, &t->error);
        if (status != BT_OK || p->format == PACK_BF16) return status;
        const size_t row_bytes = pack_row_bytes(PACK_INT8, columns);
        for (uint32_t i = 0; i < p->rows; i++)
            pack_quantise_row(t->rows + i * row_bytes, columns, out + (size_t)i * columns);
        return BT_OK;
    }
    return s->read_stored(s->context, p->tensor, p->layer, p->first_row, p->rows, t->rows,
                          &t->error);
}

static void store_rows(const pack_run *run, const model_piece *p, uint32_t columns,
                       const uint8_t *rows) {
    const placement where = place(run->m, p->tensor, p->layer);
    if (where.matrix == NULL) {
        uint8_t *out = writable(run->m, where.vector);
        for (uint32_t i = 0; i < columns; i++) {
            uint16_t bits;
            memcpy(&bits, rows + i * sizeof bits, sizeof bits);
            const float value = bf16_to_f32(bits);
            memcpy(out + i * sizeof value, &value, sizeof value);
        }
        return;
    }
    uint8_t *panels = writable(run->m, where.matrix->panels);
    const size_t row_bytes = pack_row_bytes(p->format, columns);
    for (uint32_t row = p->first_row, part; row < p->first_row + p->rows; row += part) {
        const uint32_t room = PACK_PANEL_COLUMNS - row % PACK_PANEL_COLUMNS;
        const uint32_t rest = p->first_row + p->rows - row;
        part = rest < room ? rest : room;
        pack_rows(p->format, panels, column_of(where, row), columns,
                  rows + (row - p->first_row) * row_bytes, part);
    }
}

static bt_status pack_one(const pack_run *run, uint32_t index, pack_thread *t) {
    const model_piece *p = &run->pieces[index];
    const uint32_t columns = model_tensor_shape(&run->m->card.geometry, p->tensor).columns;
    const model_source *s = run->source;
    bt_status status = read_rows(run, p, columns, t);
    if (status != BT_OK) return status;
    const uint8_t *rows = p->format == PACK_BF16 ? (const uint8_t *)t->unpacked : t->rows;
    if (s->on_piece != NULL)
        status = s->on_piece(s->context, index, p->format, rows,
                             p->rows * pack_row_bytes(p->format, columns), &t->error);
    if (status == BT_OK) store_rows(run, p, columns, rows);
    return status;
}

/* Pieces are claimed in ascending order, so the first one that fails is always tried: a thread
 * leaves out only those behind a failure of its own. */
static void pack_item(void *context, uint32_t item, uint32_t thread) {
    const pack_run *run = context;
    pack_thread *t = &run->threads[thread];
    if (t->status != BT_OK) return;
    t->status = pack_one(run, item, t);
    t->piece = item;
}

static bt_status create_threads(pack_thread *threads, uint32_t count, size_t elements) {
    for (uint32_t i = 0; i < count; i++) {
        /* No format takes more than an f32 and two bytes per weight. */
        threads[i].rows = bt_malloc(elements * sizeof(uint16_t));
        threads[i].unpacked = bt_malloc(elements * sizeof(uint16_t));
        if (threads[i].rows == NULL || threads[i].unpacked == NULL) return BT_ERR_WORKER_MEMORY;
    }
    return BT_OK;
}

static bt_status first_failure(const pack_thread *threads, uint32_t count, bt_error *error) {
    const pack_thread *first = NULL;
    for (uint32_t i = 0; i < count; i++)
        if (threads[i].status != BT_OK && (first == NULL || threads[i].piece < first->piece))
            first = &threads[i];
    if (first == NULL) return BT_OK;
    if (error != NULL) *error = first->error;
    return first->status;
}

static bt_status run_pack(pack_run *run, uint32_t pieces, uint32_t threads, bt_error *error) {
    pool *workers = NULL;
    bt_status status = pool_create(threads, &workers);
    if (status != BT_OK)
        return bt_fail(error, status, "cannot start a pool of %u threads: %s", threads,
                       bt_status_string(status));
    pool_run(workers, pieces, pack_item, run);
    pool_destroy(workers);
    return first_failure(run->threads, threads, error);
}

bt_status model_pack(model *m, const model_source *source, uint32_t threads, bt_error *error) {
    threads = threads == 0 ? 1 : threads;
    const uint32_t count = model_pieces(m, NULL);
    model_piece *pieces = bt_calloc(count, sizeof *pieces);
    pack_thread *states = bt_calloc(threads, sizeof *states);
    bt_status status = pieces == NULL || states == NULL ? BT_ERR_WORKER_MEMORY : BT_OK;
    size_t elements = 0;
    if (status == BT_OK) {
        (void)model_pieces(m, pieces);
        for (uint32_t i = 0; i < count; i++) {
            const model_shape shape = model_tensor_shape(&m->card.geometry, pieces[i].tensor);
            const size_t needed = (size_t)pieces[i].rows * (shape.columns + 2);
            elements = needed > elements ? needed : elements;
        }
        status = create_threads(states, threads, elements);
    }
    pack_run run = {.m = m, .source = source, .pieces = pieces, .threads = states};
    if (status == BT_OK)
        status = run_pack(&run, count, threads, error);
    else
        status = bt_fail(error, status, "out of memory for the weights");
    for (uint32_t i = 0; states != NULL && i < threads; i++) {
        bt_free(states[i].rows);
        bt_free(states[i].unpacked);
    }
    bt_free(states);
    bt_free(pieces);
    return status;
}
