/* Tiny models with generated weights, for tests that need a real model in microseconds: an HF
 * folder (config.json, generation_config.json, model.safetensors, tokenizer.json,
 * tokenizer_config.json) or a GGUF file with the same weights and the same tokenizer. The tokenizer
 * is byte-level BPE with ChatML's special tokens. The weights follow from the seed:
 *
 *   stream = mix(seed + GOLDEN * (role + 32 * layer + 1))       mix: splitmix64's finalizer
 *   u      = (mix(stream + GOLDEN * (element + 1)) >> 40) / 2^23 - 1      in [-1, 1), exact in f32
 *   matrix weight = bf16(u * f32(gain / sqrt(columns)))         gain 3 for Q and K, 1.5 else
 *   norm weight   = bf16(1 + u * 0.25)        bias = bf16(u * 0.5)         products in f32
 *
 * where role is the model_tensor and element counts in HF's order: integers, and float operations
 * that IEEE 754 rounds correctly (sqrt is one of them), so that the files are the same bytes on any
 * machine. tests/support/tiny_models.sha256 records them, check_tiny_models compares. Pure
 * functions; files are written by the caller's thread. */
#ifndef BT_TESTS_SUPPORT_TINY_MODEL_H
#define BT_TESTS_SUPPORT_TINY_MODEL_H

#include <stdint.h>

#include "base/status.h"
#include "kernels/model/model_file.h"
#include "tests/support/gguf_writer.h"

enum {
    TINY_MODEL_MERGES = 61,
    TINY_MODEL_TOKENS = 256 + TINY_MODEL_MERGES + 3, /* ids with text */
    TINY_MODEL_WIDE_TOKENS = 2100,
    TINY_MODEL_CONTEXT = 2048,
    TINY_MODEL_SCALED_CONTEXT = 256,
    TINY_MODEL_WINDOW = 24,
};

typedef struct tiny_model {
    model_family family;
    uint64_t seed;
    uint32_t tokens;         /* ids with text; 0: TINY_MODEL_TOKENS, which is also the least */
    uint32_t context_tokens; /* 0: TINY_MODEL_CONTEXT, or TINY_MODEL_SCALED_CONTEXT with scaling */
    uint32_t sliding_window; /* > 0: written as Mistral */
    model_rope_kind rope;    /* scaled by 4 from a quarter of the context */
    bool has_attention_bias; /* Llama: biases on q, k, v and o */
    bool has_tied_output;    /* Llama: as SmolLM2 */
    uint32_t shards;         /* > 1: the HF folder has so many files of weights */
} tiny_model;

/* Llama: untied. Qwen2: tied, biases. Qwen3: untied, head_dim larger than hidden / heads, norms on
 * q and k, and more ids than the tokenizer has. */
model_geometry tiny_model_geometry(const tiny_model *m);
/* Sets what the name says, and leaves the other fields: llama, smollm2 (Llama, tied), mistral (a
 * window of TINY_MODEL_WINDOW), qwen2, qwen3 or wide (Qwen3 with TINY_MODEL_WIDE_TOKENS), each
 * followed by nothing, -linear, -llama3, -yarn or (Llama) -bias. false for other names. The three
 * families differ in the details of yarn. */
bool tiny_model_parse(const char *name, tiny_model *out);
/* Shape of a tensor ({0, n} for a vector of n; {0, 0} when the family has none). */
typedef struct tiny_shape {
    uint32_t rows;
    uint32_t columns;
} tiny_shape;
tiny_shape tiny_model_shape(const tiny_model *m, model_tensor tensor);
/* bf16 bits of one element, in HF's order. */
uint16_t tiny_model_weight(const tiny_model *m, model_tensor tensor, uint32_t layer,
                           uint64_t element);

/* Ids with text; the model's vocabulary may be larger. */
uint32_t tiny_model_tokens(const tiny_model *m);
/* Ids of the special tokens: first in the vocabulary for Llama (as SmolLM), last for Qwen. */
int32_t tiny_model_endoftext_id(const tiny_model *m);
int32_t tiny_model_im_start_id(const tiny_model *m);
int32_t tiny_model_im_end_id(const tiny_model *m);

/* Writes the HF folder's files into an existing folder. */
BT_MUST_CHECK bt_status tiny_model_write_hf(const tiny_model *m, const char *folder);
/* Fills a writer with the keys and tensors of the GGUF file; the caller finishes and frees it. */
void tiny_model_fill_gguf(const tiny_model *m, gguf_writer *w);
/* Writes folder/name, a GGUF file. */
BT_MUST_CHECK bt_status tiny_model_write_gguf(const tiny_model *m, const char *folder,
                                              const char *name);

#endif
