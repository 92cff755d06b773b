/* Matrix kernels over panels of quantised weights (kernels/pack.h): the weights go from bytes to
 * floats in registers, and into the same chains as bf16's.
 * Included once by each isa_*.c but the portable one, after kernels/host/matmul_impl.h. */
#ifndef BT_KERNELS_HOST_QUANTISED_IMPL_H
#define BT_KERNELS_HOST_QUANTISED_IMPL_H

#include <assert.h>

#include "kernels/host/isa.h"
#include "kernels/host/matmul_impl.h"
#include "kernels/host/simd.h"
#include "kernels/pack.h"

static_assert(SIMD_BLOCK_DEPTH % PACK_BLOCK == 0, "a block of the depth is made of whole blocks");

/* Products with rows of x, and where they go. */
typedef struct widen_target {
    v16 (*acc)[TILE_VECTORS_MAX]; /* [rows] */
    const float *x;               /* [rows][inputs] at x_stride */
    size_t x_stride;
} widen_target;

static BT_ALWAYS_INLINE void multiply(const widen_target *t, size_t k, const v16 *weights, int rows,
                                      int vectors) {
    BT_UNROLL
    for (int r = 0; r < rows; r++) {
        const v16 x = v16_set1(t->x[(size_t)r * t->x_stride + k]);
        BT_UNROLL
        for (int v = 0; v < vectors; v++)
            t->acc[r][v] = v16_fma(x, weights[v], t->acc[r][v]);
    }
}

/* `inputs` inputs of int8 without scales. In these functions k counts from the target's start. */
static BT_ALWAYS_INLINE void widen_int8(const widen_target *t, const uint8_t *weights,
                                        uint32_t inputs, int rows, int vectors) {
    for (size_t k = 0; k < inputs; k++) {
        v16 b[TILE_VECTORS_MAX];
        BT_UNROLL
        for (int v = 0; v < vectors; v++)
            b[v] = v16_load_int8(weights + k * PACK_PANEL_COLUMNS + 16 * v);
        multiply(t, k, b, rows, vectors);
    }
}

static BT_ALWAYS_INLINE void widen_q8_0(const widen_target *t, const uint8_t *block, size_t first,
                                        size_t column, int rows, int vectors) {
    v16 d[TILE_VECTORS_MAX];
    BT_UNROLL
    for (int v = 0; v < vectors; v++)
        d[v] = v16_load_f16(block + 2 * (column + 16 * (size_t)v));
    const uint8_t *weights = block + 2 * PACK_PANEL_COLUMNS + column;
    for (size_t k = 0; k < PACK_BLOCK; k++) {
        v16 b[TILE_VECTORS_MAX];
        BT_UNROLL
        for (int v = 0; v < vectors; v++)
            b[v] = v16_mul(v16_load_int8(weights + k * PACK_PANEL_COLUMNS + 16 * v), d[v]);
        multiply(t, first + k, b, rows, vectors);
    }
}

static BT_ALWAYS_INLINE void widen_q4(const widen_target *t, const uint8_t *block, size_t first,
                                      size_t column, int rows, int vectors, bool has_m) {
    v16 d[TILE_VECTORS_MAX], m[TILE_VECTORS_MAX];
    BT_UNROLL
    for (int v = 0; v < vectors; v++) {
        const uint8_t *scale = block + 2 * (column + 16 * (size_t)v);
        d[v] = v16_load_f16(scale);
        m[v] =
            has_m ? v16_load_f16(scale + 2 * PACK_PANEL_COLUMNS) : v16_mul(d[v], v16_set1(-8.0F));
    }
    const uint8_t *weights = block + (has_m ? 4 : 2) * PACK_PANEL_COLUMNS + 4 * column;
    for (size_t group = 0; group < PACK_BLOCK / 8; group++) {
        v16_bits bits[TILE_VECTORS_MAX];
        BT_UNROLL
        for (int v = 0; v < vectors; v++)
            bits[v] = v16_load_bits(weights + 4 * (group * PACK_PANEL_COLUMNS + 16 * (size_t)v));
        BT_UNROLL
        for (int i = 0; i < 8; i++) {
            v16 b[TILE_VECTORS_MAX];
            BT_UNROLL
            for (int v = 0; v < vectors; v++)
                b[v] = v16_fma(v16_nibble(bits[v], 4 * i), d[v], m[v]);
            multiply(t, first + 8 * group + (size_t)i, b, rows, vectors);
        }
    }
}

/* Inputs [first, first + inputs), whole blocks where the format has them, of the columns from
 * `column`. */
static BT_ALWAYS_INLINE void widen(const widen_target *t, const uint8_t *panel, pack_format format,
                                   uint32_t first, uint32_t inputs, size_t column, int rows,
                                   int vectors) {
    if (format == PACK_INT8) {
        widen_int8(t, panel + (sizeof(float) + first) * PACK_PANEL_COLUMNS + column, inputs, rows,
                   vectors);
        return;
    }
    const uint8_t *block = panel + first / PACK_BLOCK * pack_block_bytes(format);
    for (uint32_t k = 0; k < inputs; k += PACK_BLOCK) {
        if (format == PACK_Q8_0)
            widen_q8_0(t, block, k, column, rows, vectors);
        else
            widen_q4(t, block, k, column, rows, vectors, format == PACK_Q4_1);
        block += pack_block_bytes(format);
    }
}

/* A block of the depth: what a register tile needs of a panel at a time. */
typedef struct quantised_block {
    const uint8_t *panel;
    uint32_t first, inputs;
    const float *x; /* at input `first` */
    size_t x_stride;
    float *out;
} quantised_block;

/* Some rows times a block of the panel, onto what the blocks before it gave. */
static BT_ALWAYS_INLINE void quantised_tile(const quantised_block *b, pack_format format, int rows,
                                            int vectors) {
    for (int column = 0; column < PACK_PANEL_COLUMNS; column += 16 * vectors) {
        v16 acc[SIMD_TILE_ROWS][TILE_VECTORS_MAX];
        float *c = b->out + column;
        BT_UNROLL
        for (int r = 0; r < rows; r++) {
            BT_UNROLL
            for (int v = 0; v < vectors; v++)
                acc[r][v] =
                    b->first == 0 ? v16_set1(0.0F) : v16_load(c + r * PACK_PANEL_COLUMNS + 16 * v);
        }
        const widen_target t = {.acc = acc, .x = b->x, .x_stride = b->x_stride};
        widen(&t, b->panel, format, b->first, b->inputs, (size_t)column, rows, vectors);
        BT_UNROLL
        for (int r = 0; r < rows; r++) {
            BT_UNROLL
            for (int v = 0; v < vectors; v++)
                v16_store(c + r * PACK_PANEL_COLUMNS + 16 * v, acc[r][v]);
        }
    }
}

static BT_ALWAYS_INLINE void quantised_tile_of(const quantised_block *b, pack_format format,
                                               uint32_t rows) {
    switch (rows) {
    case 1: quantised_tile(b, format, 1, SIMD_VECTORS_2); return;
    case 2: quantised_tile(b, format, 2, SIMD_VECTORS_2); return;
    case 3: quantised_tile(b, format, 3, SIMD_VECTORS_6); return;
    case 4: quantised_tile(b, format, 4, SIMD_VECTORS_6); return;
    case 5: quantised_tile(b, format, 5, SIMD_VECTORS_6); return;
    case 6: quantised_tile(b, format, 6, SIMD_VECTORS_6); return;
    }
}

/* All rows pass over a block of the depth, which stays in the first cache, so that the panel comes
 * from memory once. Its weights are widened again for every tile of rows: that is cheaper than to
 * keep them in f32. */
static BT_ALWAYS_INLINE void quantised_by(float *out, const float *x, size_t x_stride,
                                          const host_panel *panel, pack_format format,
                                          uint32_t rows) {
    for (uint32_t k = 0; k < panel->depth; k += SIMD_BLOCK_DEPTH) {
        const uint32_t rest = panel->depth - k;
        uint32_t count;
        for (uint32_t row = 0; row < rows; row += count) {
            count = tile_rows(rows - row);
            const quantised_block b = {.panel = panel->data,
                                       .first = k,
                                       .inputs = rest < SIMD_BLOCK_DEPTH ? rest : SIMD_BLOCK_DEPTH,
                                       .x = x + row * x_stride + k,
                                       .x_stride = x_stride,
                                       .out = out + (size_t)row * PACK_PANEL_COLUMNS};
            quantised_tile_of(&b, format, count);
        }
    }
}

static void scale_columns(float *out, const uint8_t *panel, uint32_t rows) {
    v16 scale[PACK_PANEL_COLUMNS / 16];
    for (size_t v = 0; v < BT_ARRAY_COUNT(scale); v++)
        scale[v] = v16_load((const float *)(const void *)panel + 16 * v);
    for (uint32_t r = 0; r < rows; r++, out += PACK_PANEL_COLUMNS)
        for (size_t v = 0; v < BT_ARRAY_COUNT(scale); v++)
            v16_store(out + 16 * v, v16_mul(v16_load(out + 16 * v), scale[v]));
}

static void quantised_matmul(float *out, const float *x, size_t x_stride, const host_panel *panel,
                             uint32_t rows) {
    if (rows == 0) return;
    switch (panel->format) {
    case PACK_INT8:
        quantised_by(out, x, x_stride, panel, PACK_INT8, rows);
        scale_columns(out, panel->data, rows);
        return;
    case PACK_Q8_0: quantised_by(out, x, x_stride, panel, PACK_Q8_0, rows); return;
    case PACK_Q4_0: quantised_by(out, x, x_stride, panel, PACK_Q4_0, rows); return;
    case PACK_Q4_1: quantised_by(out, x, x_stride, panel, PACK_Q4_1, rows); return;
    case PACK_BF16:
    case PACK_FORMAT_COUNT: return;
    }
}

#endif
