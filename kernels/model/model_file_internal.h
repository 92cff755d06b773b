/* Shared by the parts of the model file reader: what every container is turned into (a table of
 * weights by role), and what a container has to offer for that. */
#ifndef BT_KERNELS_MODEL_MODEL_FILE_INTERNAL_H
#define BT_KERNELS_MODEL_MODEL_FILE_INTERNAL_H

#include "base/gguf.h"
#include "base/safetensors_set.h"
#include "kernels/model/dequant.h"
#include "kernels/model/model_file.h"

/* A tensor of a container. Shapes are HF's: rows = outputs; a vector has one row. Rank 1 is a
 * vector, 2 a matrix; rows and columns of another rank mean nothing. */
typedef struct model_weight {
    const char *name; /* borrowed from the container */
    const uint8_t *data;
    uint64_t rows;
    uint64_t columns;
    uint32_t rank;
    bool is_encoding_known; /* else `encoding` means nothing and type_name is to be refused */
    dequant_encoding encoding;
    const char *type_name;
    uint32_t permuted_head_rows; /* head_dim when outputs are in llama GGUF order, else 0 */
} model_weight;

/* One kind of container. */
typedef struct model_file_format {
    const char *layer_prefix;                /* "blk.": then the layer, a dot and the name */
    const char *names[MODEL_TENSOR_COUNT];   /* "attn_q.weight" */
    bool (*is_ignored)(const char *name);    /* tensors that change nothing */
    size_t (*count)(const model_file *file); /* tensors in the container */
    const char *(*name_at)(const model_file *file, size_t index);
    /* false when there is no such tensor; otherwise everything but the last field of *out. */
    bool (*find)(const model_file *file, const char *name, model_weight *out);
} model_file_format;

struct model_file {
    char *path;
    model_card card;
    const model_file_format *format;
    bt_gguf *gguf;                   /* one of the two is open */
    bt_safetensors_set *safetensors; /* */
    bool has_permuted_qk;
    model_weight *weights; /* [model_file_weight_count] */
};

/* Each fills card (geometry, EOS ids, name) and format; file->gguf is open already, the HF folder
 * is opened. */
BT_MUST_CHECK bt_status model_file_open_gguf(model_file *file, bt_error *error);
BT_MUST_CHECK bt_status model_file_open_hf(model_file *file, bt_error *error);
/* Fills geometry and EOS ids from the text of a config.json; file->path names it in errors. */
BT_MUST_CHECK bt_status model_file_parse_hf_config(model_file *file, const char *text, size_t bytes,
                                                   bt_error *error);

/* Sets the card's name: printable ASCII is kept, other bytes become '_', a long name is cut. */
void model_file_set_name(model_file *file, const char *name, size_t bytes);
/* Sets the card's name to the last part of the path. */
void model_file_name_by_path(model_file *file);
/* Adds an EOS id once. `where` says in an error where it came from. Call when vocab_size is known.
 */
BT_MUST_CHECK bt_status model_file_add_eos(model_file *file, int64_t id, const char *where,
                                           bt_error *error);

#endif
