/* The ops of model_step: one parameter struct each, one implementation per device, one plain C
 * reference (kernels/ref). Everything is f32 unless said otherwise; a "stride" counts elements from
 * one row to the next.
 *
 * Rule 4: what a row of the output is does not depend on the other rows. The order of operations of
 * one row is written at its op, and is the same in the reference, to the bit.
 *
 * A dev_host is the host device: thread pool, instruction set and scratch. One thread calls; the
 * ops block, allocate nothing and cannot fail. Shapes are the caller's promise. */
#ifndef BT_KERNELS_OPS_H
#define BT_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/kv_page.h"
#include "kernels/pack.h"

typedef struct dev_host dev_host;

typedef struct dev_host_options {
    uint32_t threads;      /* >= 1, the caller's included */
    const char *isa;       /* NULL: the best of this CPU */
    uint32_t head_dim_max; /* sizes the scratch of op_attention */
    uint32_t group_max;    /* query heads per KV head */
} dev_host_options;

/* CALLER_UNSUPPORTED: the instruction set is unknown, not compiled in or not in this CPU. */
BT_MUST_CHECK bt_status dev_host_create(const dev_host_options *options, dev_host **out,
                                        bt_error *error);
void dev_host_destroy(dev_host *dev);
uint32_t dev_host_threads(const dev_host *dev);
const char *dev_host_isa_name(const dev_host *dev);
/* Runs fn(context, item, thread) for each item; thread < dev_host_threads. */
void dev_host_run(dev_host *dev, uint32_t items,
                  void (*fn)(void *context, uint32_t item, uint32_t thread), void *context);
/* The names of the instruction sets compiled in and usable here, best first; NULL past the end. */
const char *dev_host_isa_at(uint32_t index);

/* ---- embedding: out [rows, weights.depth] = the weights of column token_ids[row]. */
typedef struct op_embed_params {
    float *out;
    const int32_t *token_ids; /* [rows], in range */
    uint32_t rows;
    pack_matrix weights;
} op_embed_params;
void op_embed(dev_host *dev, const op_embed_params *p);
void op_embed_ref(const op_embed_params *p);

/* ---- RMS norm: out = (x * scale) * weight, scale = 1 / sqrt(sum(x^2) / width + epsilon). Lane l
 * takes the squares of l, l + 16, ... by FMA; then the tree. */
typedef struct op_rms_norm_params {
    float *out;     /* [rows, width]; may be x */
    const float *x; /* [rows, width] at x_stride */
    const float *weight;
    size_t x_stride;
    uint32_t rows;
    uint32_t width;
    float epsilon;
} op_rms_norm_params;
void op_rms_norm(dev_host *dev, const op_rms_norm_params *p);
void op_rms_norm_ref(const op_rms_norm_params *p);

/* ---- matrix product: acc[r, c] = one FMA chain over k = 0, 1, ... from +0, of the weights as
 * kernels/pack.h defines them (for INT8, then times the column's scale);
 * out = acc (+ bias[c]) (+ what was in out before). */
typedef struct op_matmul_params {
    float *out;     /* [rows, weights.columns] at out_stride */
    const float *x; /* [rows, weights.depth] at x_stride */
    pack_matrix weights;
    const float *bias; /* NULL or [columns] */
    size_t out_stride;
    size_t x_stride;
    uint32_t rows;
    bool adds; /* add to out */
} op_matmul_params;
void op_matmul(dev_host *dev, const op_matmul_params *p);
void op_matmul_ref(const op_matmul_params *p);

/* ---- the first half of the feed-forward: out = silu(x gate) * (x up), silu(g) = g / (1 + e^-g).
 * The panels of gate and up alternate: panel 2i is gate's, 2i + 1 up's; `weights.columns` is
 * 2 * 64 * panels of one of them. */
typedef struct op_gate_up_params {
    float *out;     /* [rows, width] */
    const float *x; /* [rows, weights.depth] */
    pack_matrix weights;
    uint32_t rows;
    uint32_t width;
} op_gate_up_params;
void op_gate_up(dev_host *dev, const op_gate_up_params *p);
void op_gate_up_ref(const op_gate_up_params *p);

/* ---- rotary table: for each row cos then sin of position * frequency, times the magnitude, [rows,
 * 2, head_dim / 2]. Angle, cos, sin and product are each rounded to f32, as transformers does. */
typedef struct op_rope_table_params {
    float *out;
    const uint32_t *positions; /* [rows] */
    uint32_t rows;
    uint32_t head_dim;
    const float *frequencies; /* [head_dim / 2] */
    float magnitude;
} op_rope_table_params;
void op_rope_table(dev_host *dev, const op_rope_table_params *p);
void op_rope_table_ref(const op_rope_table_params *p);

/* Where the KV of a batch lives: sequence s owns the pages page_ids[page_offsets[s] ..). */
typedef struct op_kv {
    kv_page_layout layout;
    uint8_t *memory; /* page i at memory + i * kv_page_bytes */
    const uint32_t *page_ids;
    const uint32_t *page_offsets; /* [sequences + 1] */
} op_kv;

/* ---- what happens to q, k, v between the projection and attention, in place: RMS norm of each
 * head of q and k (where the weights are given), rotation of the halves of each head of q and k,
 * and K and V into the pages, rounded to their dtype. */
typedef struct op_rope_store_params {
    float *qkv; /* [tokens, (heads + 2 kv_heads) * head_dim]: q, k, v */
    op_kv kv;
    const float *rope;           /* op_rope_table's output for these tokens */
    const uint32_t *positions;   /* [tokens] */
    const uint32_t *sequence_of; /* [tokens] */
    const float *q_norm;         /* NULL or [head_dim] */
    const float *k_norm;
    uint32_t tokens;
    uint32_t heads;
    uint32_t layer;
    float epsilon;
} op_rope_store_params;
void op_rope_store(dev_host *dev, const op_rope_store_params *p);
void op_rope_store_ref(const op_rope_store_params *p);

/* ---- causal attention over the pages, heads grouped on their KV head.
 * Order, for one query and head: score[j] = (one FMA chain over dim of q * k[j]) * scale. Keys
 * stand in tiles of OP_ATTENTION_TILE at absolute positions, tiles in partitions of
 * OP_ATTENTION_PARTITION. Per partition, from m = -inf, sum = 0, acc = 0, tile by tile:
 *     m' = max(m, max score);  c = e^(m - m');  w[j] = e^(score[j] - m'), 0 for keys not seen
 *     sum = fma(sum, c, tree of w);  acc = acc * c, then acc = fma(w[j], v[j], acc) in order of j
 * Partitions are folded in order:  m' = max(M, m);  SUM = fma(sum, e^(m - m'), SUM * e^(M - m')),
 * ACC likewise. out = ACC * (1 / SUM) + 0 (the last makes every zero positive, so that skipping
 * masked keys changes nothing).
 *
 * A query at p sees the keys 0 .. p, with a window the last `window` of them. Tiles and partitions
 * of which it sees no key are left out: they are no step of that query, whoever shares its block.
 * (Folding a partition into the empty state is exact: e^0 = 1, e^-inf = 0.) */
enum { OP_ATTENTION_TILE = 64, OP_ATTENTION_PARTITION = 512 };

/* One piece of work; made by op_attention_plan, the same for every layer of a step. */
typedef struct op_attention_item {
    uint32_t sequence;
    uint32_t kv_head;
    uint32_t first_token; /* in the batch */
    uint32_t tokens;
    uint32_t first_position;
    uint32_t first_partition;
    uint32_t partitions; /* from first_partition on */
    uint32_t part;       /* slot for a partial result, OP_ATTENTION_WHOLE when it is complete */
    uint32_t folds;      /* parts from `part` on to fold into one result; 0 but for the first */
} op_attention_item;
#define OP_ATTENTION_WHOLE UINT32_MAX

typedef struct op_attention_plan {
    op_attention_item *items; /* [items_max] */
    float *parts;             /* [parts_max] partial results */
    uint32_t items_max;
    uint32_t parts_max;
    uint32_t item_count;
    uint32_t part_count;
    uint32_t part_floats;
} op_attention_plan;

typedef struct op_attention_params {
    float *out;     /* [tokens, heads * head_dim] */
    const float *q; /* [tokens, heads * head_dim] at q_stride */
    op_kv kv;
    op_attention_plan *plan;
    const uint32_t *token_offsets;   /* [sequences + 1] */
    const uint32_t *first_positions; /* [sequences] */
    size_t q_stride;
    uint32_t sequences;
    uint32_t heads;
    uint32_t layer;
    uint32_t window; /* 0: all keys */
    float scale;
} op_attention_params;
/* A plan large enough for every batch of at most these sizes. Returns owned. */
BT_MUST_CHECK bt_status op_attention_plan_create(const dev_host *dev, uint32_t tokens_max,
                                                 uint32_t sequences_max, uint32_t context_tokens,
                                                 uint32_t heads, const kv_page_layout *layout,
                                                 op_attention_plan **out);
void op_attention_plan_destroy(op_attention_plan *plan);
/* Splits the work of p (all but `layer`, `q` and `out` are read) into p->plan. */
void op_attention_prepare(const dev_host *dev, const op_attention_params *p);
void op_attention(dev_host *dev, const op_attention_params *p);
void op_attention_ref(const op_attention_params *p);

#endif
