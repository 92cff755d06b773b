/* Attention of a block of query rows over the tiles of one partition; the order of operations is at
 * op_attention in kernels/ops.h. Keys of a tile are transposed into [dim][64] so that, as in the
 * matrix kernels, lanes run over outputs and every score is one chain. Included once by each
 * isa_*.c, after matmul_impl.h. */
#ifndef BT_KERNELS_HOST_ATTENTION_IMPL_H
#define BT_KERNELS_HOST_ATTENTION_IMPL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/compiler.h"
#include "kernels/bf16.h"
#include "kernels/host/isa.h"
#include "kernels/host/matmul_impl.h"
#include "kernels/host/simd.h"
#include "kernels/math.h"
#include "kernels/ops.h"

enum { TILE = OP_ATTENTION_TILE, LANES = 16, FEW_ROWS = 8, SOFTMAX_ROWS = 4 };

/* K (which = 0) or V (which = 1) of the token at `position`; the rest of its page follows. */
static const uint8_t *token_at(const host_attention_block *b, const uint32_t *page_ids,
                               uint32_t kv_head, uint32_t which, uint32_t position) {
    const kv_page_layout *layout = b->layout;
    const uint32_t page = page_ids[position >> b->page_shift];
    const size_t token = position & (layout->page_tokens - 1);
    return b->kv_memory + page * kv_page_bytes(layout) +
           kv_page_offset(layout, b->layer, which, kv_head) +
           token * layout->head_dim * kv_element_bytes(layout->dtype);
}

static const uint8_t *page_token(const host_attention_block *b, uint32_t which, uint32_t position) {
    return token_at(b, b->page_ids, b->kv_head, which, position);
}

/* The pages of one head lie far apart and are short, so that the processor's own guesses come too
 * late at each of them, and asking for a whole tile at once stops everything else. So who reads a
 * token asks for the one that is read a tile later, which may be another sequence's. This is where
 * it stands for the token at `position`, the first of `unit` tokens of one page that are walked
 * together. Without one it is what is read anyway. */
static const uint8_t *ahead_of(const host_attention_block *b, uint32_t which, uint32_t position,
                               uint32_t unit) {
    const uint32_t later = position + TILE;
    if (later < b->end) return page_token(b, which, later);
    const host_attention_next *next = &b->next;
    const uint32_t walked = (b->end + unit - 1) / unit * unit; /* `later` is a multiple, too */
    const uint32_t in_next = next->position + (later - walked);
    if (next->page_ids == NULL || in_next >= next->end) return page_token(b, which, position);
    return token_at(b, next->page_ids, next->kv_head, which, in_next);
}

enum { DIMS_OF_LINE = CACHE_LINE / sizeof(uint16_t) };

/* Few query rows (decoding): widening a tile into scratch costs more than using it, so the products
 * read the pages themselves. The chains are the same. */
static bool reads_pages(const host_attention_block *b, uint32_t rows) {
    return rows <= FEW_ROWS && b->layout->dtype == KV_DTYPE_BF16 && b->width == b->layout->head_dim;
}

/* Some dims of sixteen keys; `ahead` NULL: nothing is asked for. */
static void load_some_dims(const host_attention_block *b, const uint16_t *from,
                           const uint16_t *ahead, uint32_t dim, float *to) {
    const uint32_t head_dim = b->layout->head_dim;
    if (ahead != NULL && dim % DIMS_OF_LINE == 0)
        for (size_t i = 0; i < LANES; i++)
            __builtin_prefetch(ahead + dim + i * head_dim, 0, 2);
    v16_transpose_bf16(from + dim, head_dim, to + (size_t)dim * TILE, TILE);
}

/* Keys beyond `count` in the last sixteen come out as whatever the page holds; they are masked. */
static void load_keys(const host_attention_block *b, uint32_t position, uint32_t count,
                      bool asks_ahead) {
    const uint32_t head_dim = b->layout->head_dim;
    for (uint32_t first = 0; first < count; first += LANES) {
        const uint8_t *from = page_token(b, 0, position + first);
        const void *ahead = asks_ahead ? ahead_of(b, 0, position + first, LANES) : NULL;
        float *to = b->keys + first;
        uint32_t dim = 0;
        if (b->layout->dtype == KV_DTYPE_BF16)
            for (; dim + SIMD_TRANSPOSE_DIMS <= head_dim; dim += SIMD_TRANSPOSE_DIMS)
                load_some_dims(b, (const uint16_t *)(const void *)from, ahead, dim, to);
        for (; dim < head_dim; dim++)
            for (uint32_t i = 0; i < LANES; i++) {
                const size_t index = (size_t)i * head_dim + dim;
                to[(size_t)dim * TILE + i] =
                    b->layout->dtype == KV_DTYPE_BF16
                        ? bf16_to_f32(((const uint16_t *)(const void *)from)[index])
                        : ((const float *)(const void *)from)[index];
            }
    }
}

static void widen_row(float *to, const uint16_t *from, uint32_t count) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        v16_store(to + i, v16_load_bf16(from + i));
    for (; i < count; i++)
        to[i] = bf16_to_f32(from[i]);
}

/* Consecutive tokens of one page, widened into rows of `width` with zeros behind. */
static void widen_tokens(const host_attention_block *b, const uint8_t *from, uint32_t tokens,
                         float *to) {
    const uint32_t head_dim = b->layout->head_dim;
    for (uint32_t i = 0; i < tokens; i++, to += b->width) {
        if (b->layout->dtype == KV_DTYPE_BF16)
            widen_row(to, (const uint16_t *)(const void *)from + (size_t)i * head_dim, head_dim);
        else
            memcpy(to, (const float *)(const void *)from + (size_t)i * head_dim,
                   head_dim * sizeof *to);
        for (uint32_t d = head_dim; d < b->width; d++)
            to[d] = 0.0F;
    }
}

static void load_values(const host_attention_block *b, uint32_t position, uint32_t count) {
    const uint32_t page_tokens = b->layout->page_tokens; /* a tile begins at a page's begin */
    for (uint32_t first = 0; first < count; first += page_tokens) {
        const uint32_t rest = count - first;
        widen_tokens(b, page_token(b, 1, position + first), rest < page_tokens ? rest : page_tokens,
                     b->values + (size_t)first * b->width);
    }
}

/* Keys [begin, end) of a tile. */
typedef struct key_range {
    uint32_t begin;
    uint32_t end;
} key_range;

/* The keys of the tile at `tile` that the query at `query` sees; at least one. */
static key_range seen_keys(const host_attention_block *b, uint32_t tile, uint32_t query) {
    const uint32_t begin = host_first_key(query, b->window);
    return (key_range){.begin = begin > tile ? begin - tile : 0,
                       .end = query - tile + 1 < TILE ? query - tile + 1 : TILE};
}

/* Scales 64 raw scores, those of unseen keys to -inf; gives the largest. */
static float scale_scores(float *scores, key_range seen, float scale) {
    if (seen.end - seen.begin == TILE) {
        const v16 factor = v16_set1(scale);
        for (uint32_t j = 0; j < TILE; j += LANES)
            v16_store(scores + j, v16_mul(v16_load(scores + j), factor));
    } else {
        for (uint32_t j = 0; j < TILE; j++) {
            const float score = scores[j] * scale;
            scores[j] = j >= seen.begin && j < seen.end ? score : -math_inf_f32();
        }
    }
    const v16 low = v16_max(v16_load(scores), v16_load(scores + 16));
    const v16 high = v16_max(v16_load(scores + 32), v16_load(scores + 48));
    return v16_top(v16_max(low, high));
}

static float sum_weights(const float *weights) {
    v16 total = v16_add(v16_load(weights), v16_load(weights + 16));
    total = v16_add(v16_add(total, v16_load(weights + 32)), v16_load(weights + 48));
    return v16_sum(total);
}

static void scale_row(float *x, float factor, uint32_t width) {
    const v16 f = v16_set1(factor);
    for (uint32_t i = 0; i < width; i += LANES)
        v16_store(x + i, v16_mul(v16_load(x + i), f));
}

/* Turns the raw scores of some rows into weights, and scales what the rows had before. One step of
 * all rows at a time, for a row's steps wait for each other. */
static void weigh_rows(const host_attention_block *b, uint32_t tile, uint32_t first_row,
                       uint32_t rows, float *scores, const host_attention_state *state) {
    float top[SOFTMAX_ROWS];
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t row = first_row + r;
        const key_range seen = seen_keys(b, tile, b->first_position + row / b->group);
        const float tile_top = scale_scores(scores + (size_t)r * TILE, seen, b->scale);
        top[r] = tile_top > state->maximum[row] ? tile_top : state->maximum[row];
    }
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t j = 0; j < TILE; j++)
            scores[r * TILE + j] = math_exp_f32(scores[r * TILE + j] - top[r]);
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t row = first_row + r;
        float *maximum = &state->maximum[row], *sum = &state->sum[row];
        const float factor =
            top[r] == *maximum ? 1.0F : math_exp_f32(*maximum - top[r]); /* e^0 is 1 */
        *sum = fmaf(*sum, factor, sum_weights(scores + (size_t)r * TILE));
        *maximum = top[r];
        if (factor != 1.0F) scale_row(state->values + (size_t)row * b->width, factor, b->width);
    }
}

#ifdef SIMD_WORDS
/* Sixteen keys, and as many that are asked for. */
typedef struct key_pair {
    const uint16_t *keys;
    const uint16_t *ahead;
} key_pair;

static BT_ALWAYS_INLINE void score_keys(const host_attention_block *b, key_pair pair,
                                        const float *q, float *scores, int rows) {
    const size_t head_dim = b->layout->head_dim;
    v16 acc[SIMD_TILE_ROWS];
    BT_UNROLL
    for (int r = 0; r < rows; r++)
        acc[r] = v16_set1(0.0F);
    for (size_t dim = 0; dim < head_dim; dim += SIMD_TRANSPOSE_DIMS) {
        v16_words words[LANES];
        v16_load_words(pair.keys + dim, head_dim, words);
        BT_UNROLL
        for (size_t i = 0; i < LANES; i++)
            __builtin_prefetch(pair.ahead + dim + i * head_dim, 0, 2);
        BT_UNROLL
        for (size_t i = 0; i < LANES; i++) {
            const v16 even = v16_even_halves(words[i]);
            const v16 odd = v16_odd_halves(words[i]);
            BT_UNROLL
            for (int r = 0; r < rows; r++) {
                const float *x = q + (size_t)r * head_dim + dim + 2 * i;
                acc[r] = v16_fma(v16_set1(x[0]), even, acc[r]);
                acc[r] = v16_fma(v16_set1(x[1]), odd, acc[r]);
            }
        }
    }
    BT_UNROLL
    for (int r = 0; r < rows; r++)
        v16_store(scores + (size_t)r * TILE, acc[r]);
}

static void score_rows(const host_attention_block *b, key_pair keys, const float *q, float *scores,
                       uint32_t rows) {
    switch (rows) {
    case 1: score_keys(b, keys, q, scores, 1); return;
    case 2: score_keys(b, keys, q, scores, 2); return;
    case 3: score_keys(b, keys, q, scores, 3); return;
    case 4: score_keys(b, keys, q, scores, 4); return;
    case 5: score_keys(b, keys, q, scores, 5); return;
    case 6: score_keys(b, keys, q, scores, 6); return;
    }
}

static void score_pages(const host_attention_block *b, uint32_t position, uint32_t count,
                        const float *q, uint32_t rows) {
    uint32_t taken;
    for (uint32_t first = 0; first < count; first += LANES) {
        const void *keys = page_token(b, 0, position + first);
        const void *ahead = ahead_of(b, 0, position + first, LANES);
        for (uint32_t row = 0; row < rows; row += taken) {
            taken = tile_rows(rows - row);
            score_rows(b, (key_pair){.keys = keys, .ahead = ahead},
                       q + (size_t)row * b->layout->head_dim,
                       b->scores + (size_t)row * TILE + first, taken);
            ahead = keys;
        }
    }
}
#endif

/* scores [rows][64] of the tile at `position`. */
static void score_tile(const host_attention_block *b, uint32_t position, uint32_t count,
                       const float *q, uint32_t rows) {
    const uint32_t head_dim = b->layout->head_dim;
#ifdef SIMD_WORDS
    if (reads_pages(b, rows)) {
        score_pages(b, position, count, q, rows);
        return;
    }
#endif
    load_keys(b, position, count, reads_pages(b, rows));
    plain_matmul(&(tile_operands){.a = q,
                                  .a_stride = head_dim,
                                  .b.f32 = b->keys,
                                  .b_stride = TILE,
                                  .depth = head_dim,
                                  .c = b->scores,
                                  .c_stride = TILE},
                 rows, TILE, TILE_F32);
}

/* values [rows][width] += weights [rows][64] times the V of the tile at `position`. */
static void add_values(const host_attention_block *b, uint32_t position, uint32_t count,
                       float *values, uint32_t rows) {
    tile_operands o = {.a = b->scores,
                       .a_stride = TILE,
                       .b_stride = b->width,
                       .depth = count,
                       .c = values,
                       .c_stride = b->width,
                       .accumulates = true};
    if (!reads_pages(b, rows)) {
        load_values(b, position, count);
        o.b.f32 = b->values;
        plain_matmul(&o, rows, b->width, TILE_F32);
        return;
    }
    const uint32_t page_tokens = b->layout->page_tokens;
    for (uint32_t first = 0; first < count; first += page_tokens) {
        o.a = b->scores + first;
        o.b.bf16 = (const uint16_t *)(const void *)page_token(b, 1, position + first);
        o.ahead = (uintptr_t)ahead_of(b, 1, position + first, page_tokens);
        o.ahead_step = o.b_stride * sizeof *o.b.bf16;
        o.depth = count - first < page_tokens ? count - first : page_tokens;
        plain_matmul(&o, rows, b->width, TILE_BF16);
    }
}

/* Tokens of the block up to the last one that sees a key of the tile at `position`. */
static uint32_t tokens_before(const host_attention_block *b, uint32_t position) {
    if (b->window == 0) return b->tokens;
    const uint64_t end = (uint64_t)position + TILE - 1 + b->window - b->first_position;
    return end < b->tokens ? (uint32_t)end : b->tokens;
}

static void attention_tile(const host_attention_block *b, uint32_t position,
                           const host_attention_state *state) {
    const uint32_t end = b->first_position + b->tokens; /* past the last query */
    const uint32_t count = end - position < TILE ? end - position : TILE;
    const uint32_t first_token = position > b->first_position ? position - b->first_position : 0;
    const uint32_t first_row = first_token * b->group;
    const uint32_t rows = (tokens_before(b, position) - first_token) * b->group;
    float *values = state->values + (size_t)first_row * b->width;
    score_tile(b, position, count, b->q + (size_t)first_row * b->layout->head_dim, rows);
    for (uint32_t r = 0, some; r < rows; r += some) {
        some = rows - r < SOFTMAX_ROWS ? rows - r : SOFTMAX_ROWS;
        weigh_rows(b, position, first_row + r, some, b->scores + (size_t)r * TILE, state);
    }
    add_values(b, position, count, values, rows);
}

static void attention_partition(const host_attention_block *b, uint32_t partition,
                                const host_attention_state *state) {
    const uint32_t rows = b->tokens * b->group;
    memset(state->values, 0, (size_t)rows * b->width * sizeof *state->values);
    for (uint32_t r = 0; r < rows; r++) {
        state->maximum[r] = -math_inf_f32();
        state->sum[r] = 0.0F;
    }
    const uint32_t queries_end = b->first_position + b->tokens;
    const uint32_t first_tile = host_first_key(b->first_position, b->window) / TILE * TILE;
    const uint32_t begin = partition * OP_ATTENTION_PARTITION;
    const uint32_t end = begin + OP_ATTENTION_PARTITION;
    const uint32_t start = begin > first_tile ? begin : first_tile;
    for (uint32_t position = start; position < end && position < queries_end; position += TILE)
        attention_tile(b, position, state);
}

static void attention_fold(const host_attention_state *total, const host_attention_state *part,
                           uint32_t first_row, uint32_t rows, uint32_t width) {
    for (uint32_t r = first_row; r < rows; r++) {
        const float a = total->maximum[r];
        const float b = part->maximum[r];
        if (b == -math_inf_f32()) continue; /* the row sees no key of this partition */
        const float top = b > a ? b : a;
        const float factor_a = math_exp_f32(a - top);
        const float factor_b = math_exp_f32(b - top);
        float *x = total->values + (size_t)r * width;
        const float *y = part->values + (size_t)r * width;
        for (uint32_t i = 0; i < width; i++)
            x[i] = fmaf(y[i], factor_b, x[i] * factor_a);
        total->sum[r] = fmaf(part->sum[r], factor_b, total->sum[r] * factor_a);
        total->maximum[r] = top;
    }
}

static void attention_finish(float *out, const float *values, float sum, uint32_t head_dim) {
    const float inverse = 1.0F / sum;
    for (uint32_t i = 0; i < head_dim; i++)
        out[i] = values[i] * inverse + 0.0F;
}

#endif
