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
    void *arena; /* everything below points into it */
    size_t arena_bytes;
    pack_matrix output;        /* the embedding too when tied */
    const uint16_t *embedding; /* [vocab, hidden] bf16; NULL when tied */
    const float *output_norm;
    model_layer *layers;
};

/* Something that yields tensors as model_file_read does. */
typedef struct model_source {
    const model_card *card;
    bt_status (*read)(void *context, model_tensor tensor, uint32_t layer, uint32_t first_row,
                      uint32_t rows, uint16_t *out, bt_error *error);
    void *context;
} model_source;

/* Rows and columns of a tensor of this geometry; {0, 0} for one that it does not have. */
typedef struct model_shape {
    uint32_t rows;
    uint32_t columns;
} model_shape;
model_shape model_tensor_shape(const model_geometry *geometry, model_tensor tensor);

/* Reads and packs every tensor, each row once, in a fixed order: the tensors in the order of
 * model_tensor without a layer, then layer by layer, rows ascending. Returns owned. */
BT_MUST_CHECK bt_status model_build(const model_source *source, void (*progress)(void *, double),
                                    void *progress_context, model **out, bt_error *error);

#endif
