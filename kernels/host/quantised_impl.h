/* Matrix kernels over panels of quantised weights (kernels/pack.h). One row multiplies with the
 * weights as they are widened in registers; for more rows a block of the panel is widened once into
 * scratch, and the tiles of f32 pass over it. Both are the same chain.
 * Included once by each isa_*.c, after kernels/host/matmul_impl.h. */
#ifndef BT_KERNELS_HOST_QUANTISED_IMPL_H
#define BT_KERNELS_HOST_QUANTISED_IMPL_H

#include "kernels/host/isa.h"
#include "kernels/host/matmul_impl.h"
#include "kernels/host/simd.h"
#include "kernels/pack.h"

/* What 32 inputs of some columns are turned into: products with x onto acc, or floats in memory. */
typedef struct widen_target {
    v16 *acc;       /* NULL: into `out` */
    const float *x; /* [32] */
    float *out;     /* [32][64], at the first of these columns */
} widen_target;

static BT_ALWAYS_INLINE void widen_to(const widen_target *t, size_t k, int v, v16 weight, v16 x) {
    if (t->acc != NULL)
        t->acc[v] = v16_fma(x, weight, t->acc[v]);
    else
        v16_store(t->out + k * PACK_PANEL_COLUMNS + 16 * v, weight);
}

static BT_ALWAYS_INLINE v16 widen_x(const widen_target *t, size_t k) {
    return v16_set1(t->acc != NULL ? t->x[k] : 0.0F);
}

/* `inputs` inputs of int8 without scales. In these functions k counts from the target's start. */
static BT_ALWAYS_INLINE void widen_int8(const widen_target *t, const uint8_t *weights,
                                        uint32_t inputs, int vectors) {
    for (size_t k = 0; k < inputs; k++) {
        const v16 x = widen_x(t, k);
        BT_UNROLL
        for (int v = 0; v < vectors; v++)
            widen_to(t, k, v, v16_load_int8(weights + k * PACK_PANEL_COLUMNS + 16 * v), x);
    }
}

static BT_ALWAYS_INLINE void widen_q8_0(const widen_target *t, const uint8_t *block, size_t first,
                                        size_t column, int vectors) {
    v16 d[TILE_VECTORS_MAX];
    BT_UNROLL
    for (int v = 0; v < vectors; v++)
        d[v] = v16_load_f16(block + 2 * (column + 16 * (size_t)v));
    const uint8_t *weights = block + 2 * PACK_PANEL_COLUMNS + column;
    for (size_t k = 0; k < PACK_BLOCK; k++) {
        const v16 x = widen_x(t, first + k);
        BT_UNROLL
        for (int v = 0; v < vectors; v++) {
            const v16 q = v16_load_int8(weights + k * PACK_PANEL_COLUMNS + 16 * v);
            widen_to(t, first + k, v, v16_mul(q, d[v]), x);
        }
    }
}

static BT_ALWAYS_INLINE void widen_q4(const widen_target *t, const uint8_t *block, size_t first,
                                      size_t column, int vectors, bool has_m) {
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
            const size_t k = first + 8 * group + (size_t)i;
            const v16 x = widen_x(t, k);
            BT_UNROLL
            for (int v = 0; v < vectors; v++)
                widen_to(t, k, v, v16_fma(v16_nibble(bits[v], 4 * i), d[v], m[v]), x);
        }
    }
}

/* Inputs [first, first + inputs), whole blocks where the format has them, of the columns from
 * `column`. */
static BT_ALWAYS_INLINE void widen(const widen_target *t, const uint8_t *panel, pack_format format,
                                   uint32_t first, uint32_t inputs, size_t column, int vectors) {
    if (format == PACK_INT8) {
        widen_int8(t, panel + (sizeof(float) + first) * PACK_PANEL_COLUMNS + column, inputs,
                   vectors);
        return;
    }
    const uint8_t *block = panel + first / PACK_BLOCK * pack_block_bytes(format);
    for (uint32_t k = 0; k < inputs; k += PACK_BLOCK) {
        if (format == PACK_Q8_0)
            widen_q8_0(t, block, k, column, vectors);
        else
            widen_q4(t, block, k, column, vectors, format == PACK_Q4_1);
        block += pack_block_bytes(format);
    }
}

/* One row, pass by pass over a block of the depth that stays in the first cache, so that the panel
 * comes from memory once. */
static BT_ALWAYS_INLINE void quantised_row(float *out, const float *x, const host_panel *panel,
                                           pack_format format) {
    for (uint32_t k = 0; k < panel->depth; k += SIMD_QUANTISED_DEPTH) {
        const uint32_t rest = panel->depth - k;
        const uint32_t inputs = rest < SIMD_QUANTISED_DEPTH ? rest : SIMD_QUANTISED_DEPTH;
        for (uint32_t column = 0; column < PACK_PANEL_COLUMNS; column += 16 * SIMD_VECTORS_2) {
            v16 acc[TILE_VECTORS_MAX];
            BT_UNROLL
            for (int v = 0; v < SIMD_VECTORS_2; v++)
                acc[v] = k == 0 ? v16_set1(0.0F) : v16_load(out + column + 16 * v);
            const widen_target t = {.acc = acc, .x = x + k};
            widen(&t, panel->data, format, k, inputs, column, SIMD_VECTORS_2);
            BT_UNROLL
            for (int v = 0; v < SIMD_VECTORS_2; v++)
                v16_store(out + column + 16 * v, acc[v]);
        }
    }
}

static BT_ALWAYS_INLINE void quantised_rows(float *out, const float *x, size_t x_stride,
                                            const host_panel *panel, pack_format format,
                                            uint32_t rows, float *scratch) {
    for (uint32_t k = 0; k < panel->depth; k += SIMD_QUANTISED_DEPTH) {
        const uint32_t rest = panel->depth - k;
        const uint32_t inputs = rest < SIMD_QUANTISED_DEPTH ? rest : SIMD_QUANTISED_DEPTH;
        for (uint32_t column = 0; column < PACK_PANEL_COLUMNS; column += 16 * SIMD_VECTORS_2) {
            const widen_target t = {.out = scratch + column};
            widen(&t, panel->data, format, k, inputs, column, SIMD_VECTORS_2);
        }
        const tile_operands o = {.a = x + k,
                                 .a_stride = x_stride,
                                 .b.f32 = scratch,
                                 .b_stride = PACK_PANEL_COLUMNS,
                                 .depth = inputs,
                                 .c = out,
                                 .c_stride = PACK_PANEL_COLUMNS,
                                 .accumulates = k > 0};
        plain_matmul(&o, rows, PACK_PANEL_COLUMNS, TILE_F32);
    }
}

static BT_ALWAYS_INLINE void quantised_by(float *out, const float *x, size_t x_stride,
                                          const host_panel *panel, pack_format format,
                                          uint32_t rows, float *scratch) {
    if (rows == 1)
        quantised_row(out, x, panel, format);
    else
        quantised_rows(out, x, x_stride, panel, format, rows, scratch);
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
                             uint32_t rows, float *scratch) {
    if (rows == 0) return;
    switch (panel->format) {
    case PACK_INT8:
        quantised_by(out, x, x_stride, panel, PACK_INT8, rows, scratch);
        scale_columns(out, panel->data, rows);
        return;
    case PACK_Q8_0: quantised_by(out, x, x_stride, panel, PACK_Q8_0, rows, scratch); return;
    case PACK_Q4_0: quantised_by(out, x, x_stride, panel, PACK_Q4_0, rows, scratch); return;
    case PACK_Q4_1: quantised_by(out, x, x_stride, panel, PACK_Q4_1, rows, scratch); return;
    case PACK_BF16:
    case PACK_FORMAT_COUNT: return;
    }
}

#endif
