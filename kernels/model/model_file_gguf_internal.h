/* The parts of the reader of GGUF models. */
#ifndef BT_KERNELS_MODEL_MODEL_FILE_GGUF_INTERNAL_H
#define BT_KERNELS_MODEL_MODEL_FILE_GGUF_INTERNAL_H

#include "kernels/model/model_file_internal.h"

#define MODEL_GGUF_ROPE_TENSOR "rope_freqs.weight"

/* The keys of an architecture start with its name. */
typedef struct gguf_keys {
    const bt_gguf *gguf;
    const char *path;
    const char *architecture;
    bt_error *error;
} gguf_keys;

bool gguf_keys_has(const gguf_keys *k, const char *key);
BT_MUST_CHECK bt_status gguf_keys_u32(const gguf_keys *k, const char *key, uint32_t *out);
BT_MUST_CHECK bt_status gguf_keys_f64(const gguf_keys *k, const char *key, double *out);
BT_MUST_CHECK bt_status gguf_keys_string(const gguf_keys *k, const char *key, bt_gguf_string *out);
/* An optional key that must have one value when it is there: another one asks for something that is
 * not built. */
BT_MUST_CHECK bt_status gguf_keys_require(const gguf_keys *k, const char *key, double neutral);
/* CALLER_UNSUPPORTED for a key of the architecture's attention or rope that is not known, and for
 * keys that ask for something that is not built. */
BT_MUST_CHECK bt_status gguf_keys_check(const gguf_keys *k, const model_geometry *g);

/* Scaling of the rotation frequencies; head_dim and context_tokens are known. */
BT_MUST_CHECK bt_status model_file_read_gguf_rope(const gguf_keys *k, model_geometry *g);

#endif
