/* Geometries of tiny models of the three families. */
#ifndef BT_TESTS_KERNELS_TINY_MODELS_H
#define BT_TESTS_KERNELS_TINY_MODELS_H

#include "kernels/model.h"

static const model_geometry tiny_models[] = {
    {.family = MODEL_FAMILY_LLAMA,
     .vocab_size = 300,
     .context_tokens = 2048,
     .hidden_size = 72,
     .intermediate_size = 100,
     .layers = 3,
     .heads = 6,
     .kv_heads = 2,
     .head_dim = 12,
     .norm_epsilon = 1e-5F,
     .rope_theta = 10000.0,
     .has_tied_embeddings = true},
    {.family = MODEL_FAMILY_QWEN2,
     .vocab_size = 257,
     .context_tokens = 2048,
     .hidden_size = 64,
     .intermediate_size = 192,
     .layers = 2,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 16,
     .norm_epsilon = 1e-6F,
     .rope_theta = 1000000.0,
     .has_tied_embeddings = false,
     .has_qkv_bias = true},
    {.family = MODEL_FAMILY_QWEN3,
     .vocab_size = 320,
     .context_tokens = 2048,
     .hidden_size = 48,
     .intermediate_size = 65,
     .layers = 2,
     .heads = 4,
     .kv_heads = 1,
     .head_dim = 64,
     .norm_epsilon = 1e-6F,
     .rope_theta = 1000000.0,
     .has_tied_embeddings = true,
     .has_qk_norm = true},
};

#endif
