/* The weights of a model in run-time form, and where they come from. Internal to kernels/. */
#ifndef BT_KERNELS_MODEL_MODEL_INTERNAL_H
#define BT_KERNELS_MODEL_MODEL_INTERNAL_H

#include "kernels/model.h"
#include "kernels/model/model_file.h"
#include "kernels/pack.h"

typedef struct model_layer {
    const float *attention_norm; /* [hidden] */
    const float *ffn_norm;
    const float *qkv_bias; /* NULL or [(heads + 2 kv_heads) * head_dim] */
    const float *o_bias;   /* NULL or [hidden] */
    const float *q_norm;   /* NULL or [head_dim] */
    const float *k_norm;
    pack_matrix qkv; /* q, k, v below each other */
    pack_matrix attention_out;
    pack_matrix gate_up; /* panels alternate */
    pack_matrix down;
} model_layer;

struct model {
    model_card card;
    char numerics[64];
    void *block; /* what is unmapped at the end; the arena lies in it */
    size_t block_bytes;
    uint8_t *arena; /* everything below points into it; NULL while the model is only planned */
    size_t arena_bytes;
    pack_matrix output;
    pack_matrix embedding; /* the same as `output` when tied */
    const float *output_norm;
    model_layer *layers;
};

/* Something that yields tensors as a model_file does. The functions may be called by several
 * threads at once. */
typedef struct model_source {
    const model_card *card;
    /* The format that keeps the rows of a matrix as they are stored, PACK_BF16 for all others; NULL
     * when there is nothing but bf16. */
    pack_format (*stored_format)(void *context, model_tensor tensor, uint32_t layer);
    /* Rows as bf16 into out [rows, columns]. */
    bt_status (*read)(void *context, model_tensor tensor, uint32_t layer, uint32_t first_row,
                      uint32_t rows, uint16_t *out, bt_error *error);
    /* Rows as stored into out [rows][pack_row_bytes], where the format is not PACK_BF16. */
    bt_status (*read_stored)(void *context, model_tensor tensor, uint32_t layer, uint32_t first_row,
                             uint32_t rows, uint8_t *out, bt_error *error);
    /* May be NULL: sees the rows of every piece once, as they are packed. `piece` counts in the
     * order of the model's pieces. */
    bt_status (*on_piece)(void *context, uint32_t piece, pack_format format, const uint8_t *rows,
                          size_t bytes, bt_error *error);
    void *context;
} model_source;

/* Rows and columns of a tensor of this geometry; {0, 0} for one that it does not have. */
typedef struct model_shape {
    uint32_t rows;
    uint32_t columns;
} model_shape;
model_shape model_tensor_shape(const model_geometry *geometry, model_tensor tensor);

/* Building a model: plan it (geometry, formats, where everything lies), then either pack the source
 * into private memory or place it on a block that somebody packed. */

/* A model without memory: arena_bytes, formats and numerics are those it will have, no weight can
 * be touched. Returns owned. */
BT_MUST_CHECK bt_status model_plan(const model_source *source, model_weights weights, model **out,
                                   bt_error *error);
/* Lets the planned model's pointers point into `arena`, which lies in `block`. Takes the block, to
 * be given back by host_memory_unmap; a block that it had before is unmapped. */
void model_place(model *m, void *block, size_t block_bytes, uint8_t *arena);

/* Rows of one tensor that are read and packed in one go. The pieces of a model follow from geometry
 * and formats: the tensors in the order of model_tensor without a layer, then layer by layer, rows
 * ascending. */
typedef struct model_piece {
    model_tensor tensor;
    uint32_t layer;
    uint32_t first_row;
    uint32_t rows;
    pack_format format;
} model_piece;
/* The number of pieces; writes them when `out` is not NULL. */
uint32_t model_pieces(const model *m, model_piece *out);
/* Reads and packs all pieces into the arena of a placed model, by `threads` threads. Each row is
 * read once and nothing is held twice but one piece per thread. On failure *error is that of the
 * first piece that failed. */
BT_MUST_CHECK bt_status model_pack(model *m, const model_source *source, uint32_t threads,
                                   bt_error *error);
/* Plan, private memory, pack. Returns owned. */
BT_MUST_CHECK bt_status model_build(const model_source *source, model_weights weights,
                                    uint32_t threads, model **out, bt_error *error);

#endif
