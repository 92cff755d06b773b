/* The narrow interface of everything that computes: load a model, run model_step(batch). One step
 * serves both roles; prefill rows have many query tokens, decode rows one.
 *
 * Nouns. A *model* is immutable weights (shared by threads). A *model_runner* owns the workspace
 * and the thread pool that run steps of one model on one pool of KV pages; it belongs to one thread
 * (the compute owner). KV memory is borrowed from the caller.
 *
 * Promise (rule 4): logits of a position depend, bit for bit, only on the weights and the tokens
 * before it; not on the batch, the chunking, page placement, thread count or instruction set. */
#ifndef BT_KERNELS_MODEL_H
#define BT_KERNELS_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/kv_page.h"
#include "kernels/sampler.h"

enum {
    MODEL_EOS_MAX = 8,
    MODEL_FINGERPRINT_BYTES = 32,
    MODEL_BATCH_MAX = 1 << 20,
    MODEL_ROPE_DIVISORS_MAX = 128,
};

typedef enum model_family {
    MODEL_FAMILY_LLAMA, /* also SmolLM2 and Mistral */
    MODEL_FAMILY_QWEN2, /* bias on q, k, v */
    MODEL_FAMILY_QWEN3, /* RMS norm per head on q and k */
} model_family;

/* How the rotation frequencies theta^(-2i / head_dim) are changed for contexts longer than those
 * trained on. */
typedef enum model_rope_kind {
    MODEL_ROPE_KIND_PLAIN,
    MODEL_ROPE_KIND_LINEAR,   /* all divided by `factor` */
    MODEL_ROPE_KIND_LLAMA3,   /* slow ones divided by `factor`, fast ones kept, a ramp between */
    MODEL_ROPE_KIND_YARN,     /* likewise, by the rotations within the original context */
    MODEL_ROPE_KIND_DIVISORS, /* each divided by a number of its own (rope_freqs in GGUF) */
} model_rope_kind;

/* Fields of other kinds are zero. */
typedef struct model_rope_scaling {
    model_rope_kind kind;
    uint32_t original_context_tokens; /* llama3, yarn */
    double factor;                    /* linear, llama3, yarn; >= 1 */
    double low_frequency_factor;      /* llama3: slower than original context / this is divided */
    double high_frequency_factor;     /* llama3: faster than original context / this is kept */
    double beta_fast;                 /* yarn: with more rotations than this is kept */
    double beta_slow;                 /* yarn: with fewer rotations than this is divided */
    double attention_factor;          /* yarn: cos and sin are multiplied by this; > 0 */
    bool has_whole_ramp;              /* yarn: the ends of the ramp are rounded to whole pairs */
    float divisors[MODEL_ROPE_DIVISORS_MAX]; /* divisors: [head_dim / 2], > 0 */
} model_rope_scaling;

typedef struct model_geometry {
    model_family family;
    uint32_t vocab_size;
    uint32_t context_tokens;
    uint32_t hidden_size;
    uint32_t intermediate_size;
    uint32_t layers;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    float norm_epsilon;
    double rope_theta;
    model_rope_scaling rope_scaling;
    uint32_t sliding_window; /* a query sees itself and the keys before it, so many; 0 = all */
    bool has_tied_embeddings;
    bool has_qkv_bias;
    bool has_o_bias;
    bool has_qk_norm;
} model_geometry;

/* What a worker tells the router about its model. */
typedef struct model_card {
    model_geometry geometry;
    uint8_t fingerprint[MODEL_FINGERPRINT_BYTES]; /* SHA-256 over geometry and weights as loaded */
    uint32_t eos_count;
    int32_t eos_ids[MODEL_EOS_MAX];
    char name[128]; /* general.name, or the last part of the path */
} model_card;

typedef struct model model;
typedef struct model_runner model_runner;

/* In which form weights are kept. A matrix whose parts are stored in different formats (q, k and v
 * are one matrix, gate and up another) is kept as bf16, and so is one whose rows are not whole
 * blocks. */
typedef enum model_weights {
    MODEL_WEIGHTS_AUTO,   /* Q8_0 as stored, everything else as bf16 */
    MODEL_WEIGHTS_BF16,   /* all as bf16 */
    MODEL_WEIGHTS_INT8,   /* all matrices as int8 with a scale per output, made from bf16 */
    MODEL_WEIGHTS_NATIVE, /* Q8_0, Q4_0 and Q4_1 as stored, everything else as bf16 */
} model_weights;

typedef struct model_load_options {
    model_weights weights;
    uint32_t threads; /* that read, pack and verify; 0 = 1 */
    /* A folder of packed weights (kernels/model/model_cache.h) that is looked into first and filled
     * afterwards, so that the workers of a machine map the same memory; NULL: none. Trouble with it
     * is logged and otherwise changes nothing. */
    const char *cache_folder;
    uint64_t cache_bytes_max; /* of the folder; those not used for longest are removed */
} model_load_options;

/* Loads a GGUF file or an HF folder (docs/models.md), packed once. What is not
 * known (architecture, tensor type, rope type, activation) is refused by name in *error. NULL
 * options: bf16, one thread. Blocking; returns owned. */
BT_MUST_CHECK bt_status model_load(const char *path, const model_load_options *options, model **out,
                                   bt_error *error);
/* Where packed weights are kept for this user: $XDG_CACHE_HOME/baton/weights or
 * ~/.cache/baton/weights. False when neither variable is an absolute path. */
BT_MUST_CHECK bool model_load_default_cache(char *out, size_t capacity);
void model_destroy(model *m);
const model_card *model_get_card(const model *m);
/* The KV page layout of this model at a page size and dtype. */
kv_page_layout model_kv_layout(const model *m, uint32_t page_tokens, kv_dtype dtype);

/* "host/exact/1" and the like: backend, numerics mode, arithmetic version (rule 1: must-equal). */
const char *model_numerics(void);
/* The same, and behind it the formats other than bf16 that the weights of this model are in:
 * "host/exact/1/q8_0". */
const char *model_get_numerics(const model *m);
/* The instruction set in use: "avx512", "avx2", "neon" or "portable". */
const char *model_isa_name(void);

typedef struct model_runner_options {
    uint32_t threads;    /* >= 1, the caller's included */
    uint32_t tokens_max; /* most tokens of one batch; up to MODEL_BATCH_MAX */
    uint32_t rows_max;   /* most sequences of one batch; likewise */
    const char *isa;     /* NULL = best of this CPU; else a model_isa_name, for tests */
    kv_page_layout kv;   /* must be model_kv_layout's answer */
    void *kv_memory;     /* borrowed, aligned (64 is best): page i at + i * kv_page_bytes(&kv) */
    uint32_t kv_page_count;
} model_runner_options;

BT_MUST_CHECK bt_status model_runner_create(const model *m, const model_runner_options *options,
                                            model_runner **out, bt_error *error);
void model_runner_destroy(model_runner *runner);

/* Nanoseconds that the runner's samplers spent in code that only masks need, summed over the
 * threads, since the runner was made or this was last called; counted only while it is on, off at
 * first. Not during a step. */
void model_runner_time_capture(model_runner *runner, bool is_on);
uint64_t model_runner_take_capture_ns(model_runner *runner);

/* Log-probabilities of prompt tokens: for query tokens [first, first + count) of a sequence
 * (counted from its first query token in the batch) the log-softmax of their own logits,
 * unprocessed (sampler_score_row), at targets[i] (the token that follows). Nothing is drawn for
 * them. NaN, with ids -1, where the logits have no log-softmax; everything else is finite or -inf.
 */
typedef struct model_scores {
    uint32_t first, count;  /* count 0: none */
    const int32_t *targets; /* [count] */
    uint32_t vocab_limit;
    uint32_t top_count, id_count; /* <= SAMPLER_TOP_MAX, <= SAMPLER_IDS_MAX */
    const int32_t *ids;           /* [id_count] */
    float *logprobs;              /* [count], out */
    sampler_top *top;             /* [count][top_count], out */
    float *id_logprobs;           /* [count][id_count], out */
} model_scores;

/* One step, in CSR form. All arrays are borrowed for the call.
 * Sequence s has query tokens token_ids[token_offsets[s] .. token_offsets[s+1]) at the absolute
 * positions first_positions[s] + 0, 1, ...; the KV of every position below first_positions[s] is
 * already in its pages. Its page table is page_ids[page_offsets[s] .. page_offsets[s+1]), logical
 * page order, long enough for its last query position. A page that the step writes (from the first
 * query position on) stands in no other place of a page table; pages that are only read may be
 * shared. */
typedef struct model_batch {
    uint32_t sequences;
    uint32_t tokens;                 /* = token_offsets[sequences] */
    const uint32_t *token_offsets;   /* [sequences + 1] */
    const int32_t *token_ids;        /* [tokens] */
    const uint32_t *first_positions; /* [sequences] */
    const uint32_t *page_offsets;    /* [sequences + 1] */
    const uint32_t *page_ids;        /* [page_offsets[sequences]] */
    const uint8_t *samples;          /* [sequences]: 1 = draw from the last query token's logits */
    const sampler_params *sampling;  /* [sequences]; read where samples[s] is 1 */
    sampler_row *rows;               /* [sequences], out, where samples[s] is 1 */
    float *logits;              /* NULL, or [sequences, vocab_size], out where samples[s] is 1 */
    const model_scores *scores; /* NULL, or [sequences] */
    /* NULL, or several draws from the same logits (n > 1 of one prompt): sequence s has sampling
     * and rows at draw_offsets[s] .. draw_offsets[s + 1], one draw each, instead of at s; at least
     * one where samples[s] is 1, none where it is 0. At most MODEL_BATCH_MAX. */
    const uint32_t *draw_offsets; /* [sequences + 1] */
} model_batch;

/* Writes K and V of every query token into the pages, then draws and scores. Blocking. Errors:
 * CALLER_ARGUMENT for a batch that breaks the rules above (nothing is written), WORKER_* otherwise.
 */
BT_MUST_CHECK bt_status model_step(model_runner *runner, const model_batch *batch);

#endif
