/* Reading model files: the one place that knows GGUF and HF folders. A model_file yields tensors by
 * role, not by name, always in Hugging Face's row order (architecture `llama` in GGUF has the rows
 * of Q and K permuted; they are put back here) and always rounded to bf16: matrices row-major [rows
 * = outputs, columns = inputs], vectors widened again to f32 by the reader's user.
 *
 * Internal to kernels/. Only this needs jansson and libcrypto (through bt_base_io); ops, sampler
 * and model_step do not. Blocking; reading changes nothing
 * in a model_file, so any thread may read. */
#ifndef BT_KERNELS_MODEL_MODEL_FILE_H
#define BT_KERNELS_MODEL_MODEL_FILE_H

#include "kernels/model.h"
#include "kernels/pack.h"

typedef enum model_tensor {
    MODEL_TENSOR_TOKEN_EMBEDDING, /* [vocab_size, hidden] */
    MODEL_TENSOR_OUTPUT,          /* [vocab_size, hidden]; absent when tied */
    MODEL_TENSOR_OUTPUT_NORM,     /* [hidden] */
    MODEL_TENSOR_ATTENTION_NORM,  /* per layer from here on: [hidden] */
    MODEL_TENSOR_Q,               /* [heads * head_dim, hidden] */
    MODEL_TENSOR_K,               /* [kv_heads * head_dim, hidden] */
    MODEL_TENSOR_V,               /* [kv_heads * head_dim, hidden] */
    MODEL_TENSOR_O,               /* [hidden, heads * head_dim] */
    MODEL_TENSOR_Q_BIAS,          /* [heads * head_dim], Qwen2, Llama with attention_bias */
    MODEL_TENSOR_K_BIAS,
    MODEL_TENSOR_V_BIAS,
    MODEL_TENSOR_Q_NORM, /* [head_dim], Qwen3 */
    MODEL_TENSOR_K_NORM,
    MODEL_TENSOR_FFN_NORM, /* [hidden] */
    MODEL_TENSOR_GATE,     /* [intermediate, hidden] */
    MODEL_TENSOR_UP,       /* [intermediate, hidden] */
    MODEL_TENSOR_DOWN,     /* [hidden, intermediate] */
    MODEL_TENSOR_O_BIAS,   /* [hidden], Llama with attention_bias */
    MODEL_TENSOR_COUNT,
} model_tensor;

typedef struct model_file model_file;

/* Opens and validates everything: geometry, the presence, shape and type of every tensor. */
BT_MUST_CHECK bt_status model_file_open(const char *path, model_file **out, bt_error *error);
/* The same of the bytes of a GGUF file, which the caller keeps until model_file_close. `name` is
 * used in errors. */
BT_MUST_CHECK bt_status model_file_open_memory(const uint8_t *data, size_t bytes, const char *name,
                                               model_file **out, bt_error *error);
/* Geometry and EOS ids from the text of a config.json alone. */
BT_MUST_CHECK bt_status model_file_parse_config(const char *text, size_t bytes, const char *name,
                                                model_card *out, bt_error *error);
void model_file_close(model_file *file);
/* Geometry, EOS ids and name; the fingerprint is still zero. */
const model_card *model_file_card(const model_file *file);
/* Rows [first_row, first_row + rows) of a matrix (a vector is one row) as bf16 bits, dequantised,
 * into out [rows, columns]. NaN or infinity in the weights is CALLER_FILE, naming the tensor. */
BT_MUST_CHECK bt_status model_file_read(const model_file *file, model_tensor tensor, uint32_t layer,
                                        uint32_t first_row, uint32_t rows, uint16_t *out,
                                        bt_error *error);
/* The format of kernels/pack.h that keeps the rows as they are stored; PACK_BF16 for every encoding
 * that has none. */
pack_format model_file_stored_format(const model_file *file, model_tensor tensor, uint32_t layer);
/* Rows as stored into out [rows][pack_row_bytes], where the format is not PACK_BF16. A scale that
 * is not a finite number is CALLER_FILE. */
BT_MUST_CHECK bt_status model_file_read_stored(const model_file *file, model_tensor tensor,
                                               uint32_t layer, uint32_t first_row, uint32_t rows,
                                               uint8_t *out, bt_error *error);
/* Says that these rows are not read again soon: their pages need not stay in memory. */
void model_file_release(const model_file *file, model_tensor tensor, uint32_t layer,
                        uint32_t first_row, uint32_t rows);

#endif
