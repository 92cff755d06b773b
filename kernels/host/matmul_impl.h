/* Matrix kernels over v16: register tiles of rows x columns, every element one FMA chain over the
 * depth. Blocks of the depth carry the accumulator through memory, which changes no bit.
 * Included once by each isa_*.c, after kernels/host/simd.h. */
#ifndef BT_KERNELS_HOST_MATMUL_IMPL_H
#define BT_KERNELS_HOST_MATMUL_IMPL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/compiler.h"
#include "kernels/host/isa.h"
#include "kernels/host/simd.h"
#include "kernels/pack.h"

enum { TILE_VECTORS_MAX = 4, CACHE_LINE = 64 };

/* What b is: a panel, f32 rows, or bf16 rows in plain order. */
typedef enum tile_kind {
    TILE_PACKED,
    TILE_F32,
    TILE_BF16,
} tile_kind;

/* Operands of one register tile. */
typedef struct tile_operands {
    const float *a;
    size_t a_stride;
    union {
        const uint16_t *bf16; /* TILE_PACKED, TILE_BF16 */
        const float *f32;
    } b;
    size_t b_stride;
    uint32_t depth;
    float *c;
    size_t c_stride;
    bool accumulates; /* start from c, not from zero */
    /* What to ask for meanwhile, so many bytes further for each k; step 0: nothing. An address, for
     * it may lie behind the last panel. TILE_PACKED (SIMD_ASKS_AHEAD): a line for each k.
     * TILE_BF16: as much as b has there. */
    uintptr_t ahead;
    size_t ahead_step;
    bool asks_far; /* into the second cache, not the first */
} tile_operands;

static BT_ALWAYS_INLINE void tile_load_b(v16 *b, const tile_operands *o, size_t k, tile_kind kind,
                                         int vectors) {
    const size_t row = k * o->b_stride;
    if (kind == TILE_PACKED) {
        BT_UNROLL
        for (int v = 0; v < vectors; v += SIMD_PACKED_VECTORS)
            v16_load_packed(o->b.bf16 + row + 16 * v, b + v);
        return;
    }
    BT_UNROLL
    for (int v = 0; v < vectors; v++)
        b[v] = kind == TILE_BF16 ? v16_load_bf16(o->b.bf16 + row + 16 * v)
                                 : v16_load(o->b.f32 + row + 16 * v);
}

static BT_ALWAYS_INLINE void tile_swap(v16 *row, tile_kind kind, int vectors) {
    if (kind != TILE_PACKED) return;
    BT_UNROLL
    for (int v = 0; v < vectors; v += SIMD_PACKED_VECTORS)
        v16_swap_packed(row + v);
}

static BT_ALWAYS_INLINE void tile(const tile_operands *o, int rows, int vectors, tile_kind kind) {
    v16 acc[SIMD_TILE_ROWS][TILE_VECTORS_MAX];
    BT_UNROLL
    for (int r = 0; r < rows; r++) {
        BT_UNROLL
        for (int v = 0; v < vectors; v++)
            acc[r][v] =
                o->accumulates ? v16_load(o->c + (size_t)r * o->c_stride + 16 * v) : v16_set1(0.0F);
        if (o->accumulates) tile_swap(acc[r], kind, vectors);
    }
    const float *a = o->a;
    const size_t a_stride = o->a_stride;
    const bool asks_ahead = SIMD_ASKS_AHEAD && kind == TILE_PACKED && rows > 1 && o->ahead_step > 0;
    const bool asks_alike = kind == TILE_BF16 && o->ahead_step > 0;
    const size_t ahead_step = o->ahead_step;
    uintptr_t ahead = o->ahead;
    for (size_t k = 0; k < o->depth; k++) {
        v16 b[TILE_VECTORS_MAX];
        if (asks_ahead && o->asks_far) __builtin_prefetch((const void *)ahead, 0, 2);
        if (asks_ahead && !o->asks_far) __builtin_prefetch((const void *)ahead);
        if (asks_alike) {
            BT_UNROLL
            for (int v = 0; v < vectors; v += 2)
                __builtin_prefetch((const void *)(ahead + 32 * (size_t)v), 0, 2);
        }
        ahead += ahead_step;
        tile_load_b(b, o, k, kind, vectors);
        BT_UNROLL
        for (int r = 0; r < rows; r++) {
            const v16 x = v16_set1(a[(size_t)r * a_stride + k]);
            BT_UNROLL
            for (int v = 0; v < vectors; v++)
                acc[r][v] = v16_fma(x, b[v], acc[r][v]);
        }
    }
    BT_UNROLL
    for (int r = 0; r < rows; r++) {
        tile_swap(acc[r], kind, vectors);
        BT_UNROLL
        for (int v = 0; v < vectors; v++)
            v16_store(o->c + (size_t)r * o->c_stride + 16 * v, acc[r][v]);
    }
}

/* Columns one tile of `rows` rows takes. */
static inline uint32_t tile_columns(uint32_t rows) {
    return 16U * (rows == 1 ? SIMD_VECTORS_1 : rows == 2 ? SIMD_VECTORS_2 : SIMD_VECTORS_6);
}

/* At most `most` vectors of columns. */
static BT_ALWAYS_INLINE void tile_of_rows(const tile_operands *o, uint32_t rows, tile_kind kind,
                                          int most) {
    const int for_1 = SIMD_VECTORS_1 < most ? SIMD_VECTORS_1 : most;
    const int for_2 = SIMD_VECTORS_2 < most ? SIMD_VECTORS_2 : most;
    const int for_6 = SIMD_VECTORS_6 < most ? SIMD_VECTORS_6 : most;
    switch (rows) {
    case 1: tile(o, 1, for_1, kind); return;
    case 2: tile(o, 2, for_2, kind); return;
    case 3: tile(o, 3, for_6, kind); return;
    case 4: tile(o, 4, for_6, kind); return;
    case 5: tile(o, 5, for_6, kind); return;
    case 6: tile(o, 6, for_6, kind); return;
    }
}

static void tile_packed(const tile_operands *o, uint32_t rows) {
    tile_of_rows(o, rows, TILE_PACKED, TILE_VECTORS_MAX);
}

/* Of half a panel. */
static void tile_packed_half(const tile_operands *o, uint32_t rows) {
    tile_of_rows(o, rows, TILE_PACKED, TILE_VECTORS_MAX / 2);
}

static void tile_f32(const tile_operands *o, uint32_t rows) {
    tile_of_rows(o, rows, TILE_F32, TILE_VECTORS_MAX);
}

static void tile_bf16(const tile_operands *o, uint32_t rows) {
    tile_of_rows(o, rows, TILE_BF16, TILE_VECTORS_MAX);
}

/* Rows of the next tile when `rows` are left: as few tiles as possible, of nearly equal height. */
static inline uint32_t tile_rows(uint32_t rows) {
    const uint32_t tiles = (rows + SIMD_TILE_ROWS - 1) / SIMD_TILE_ROWS;
    return (rows + tiles - 1) / tiles;
}

/* Some inputs of a panel's columns, for all rows. Each pass of a tile also asks for a part of the
 * block that comes next in memory, so that the first pass over that one need not wait. */
static void panel_block(float *out, const float *x, size_t x_stride, const host_panel *panel,
                        uint32_t first_input, uint32_t rows) {
    const size_t k_bytes = PACK_PANEL_COLUMNS * sizeof(uint16_t);
    const uint32_t rest = panel->depth - first_input;
    const uint32_t depth = rest < SIMD_BLOCK_DEPTH ? rest : SIMD_BLOCK_DEPTH;
    const uint8_t *data = panel->data + first_input * k_bytes;
    const uint16_t *weights = (const uint16_t *)(const void *)data;
    const uintptr_t next = (uintptr_t)data + depth * k_bytes;
    const uint32_t end = panel->first + panel->columns;
    uint32_t count, pass = 0;
    for (uint32_t row = 0; row < rows; row += count) {
        count = tile_rows(rows - row);
        const bool is_half = tile_columns(count) > panel->columns;
        const uint32_t columns = is_half ? panel->columns : tile_columns(count);
        const size_t strip = columns * sizeof *weights;
        tile_operands o = {.a = x + row * x_stride + first_input,
                           .a_stride = x_stride,
                           .b_stride = PACK_PANEL_COLUMNS,
                           .depth = depth,
                           .c_stride = PACK_PANEL_COLUMNS,
                           .accumulates = first_input > 0,
                           .asks_far = rows <= SIMD_FAR_ROWS,
                           .ahead_step = strip < CACHE_LINE ? strip : CACHE_LINE};
        for (uint32_t column = panel->first; column < end; column += columns, pass++) {
            o.b.bf16 = weights + column;
            o.c = out + (size_t)row * PACK_PANEL_COLUMNS + column;
            o.ahead = next + pass % (k_bytes / o.ahead_step) * depth * o.ahead_step;
            if (is_half)
                tile_packed_half(&o, count);
            else
                tile_packed(&o, count);
        }
    }
}

/* One pass that reads the panel as it lies in memory. */
static void panel_pass(float *out, const float *x, size_t x_stride, const host_panel *panel,
                       uint32_t rows) {
    const tile_operands o = {.a = x,
                             .a_stride = x_stride,
                             .b.bf16 = (const uint16_t *)(const void *)panel->data + panel->first,
                             .b_stride = PACK_PANEL_COLUMNS,
                             .depth = panel->depth,
                             .c = out + panel->first,
                             .c_stride = PACK_PANEL_COLUMNS};
    if (tile_columns(rows) > panel->columns)
        tile_packed_half(&o, rows);
    else
        tile_packed(&o, rows);
}

static void panel_matmul(float *out, const float *x, size_t x_stride, const host_panel *panel,
                         uint32_t rows) {
    if (rows == 0) return;
    if (rows <= SIMD_TILE_ROWS && tile_columns(rows) >= panel->columns) {
        panel_pass(out, x, x_stride, panel, rows);
        return;
    }
    for (uint32_t k = 0; k < panel->depth; k += SIMD_BLOCK_DEPTH)
        panel_block(out, x, x_stride, panel, k, rows);
}

/* c [rows][columns] (+)= a [rows][depth] b [depth][columns]; columns is a multiple of 64. */
static void plain_matmul(const tile_operands *operands, uint32_t rows, uint32_t columns,
                         tile_kind kind) {
    uint32_t count;
    for (uint32_t row = 0; row < rows; row += count) {
        count = tile_rows(rows - row);
        tile_operands o = *operands;
        o.a += row * o.a_stride;
        const uint32_t step = tile_columns(count);
        for (uint32_t column = 0; column < columns; column += step) {
            o.c = operands->c + row * o.c_stride + column;
            if (kind == TILE_BF16) {
                o.b.bf16 = operands->b.bf16 + column;
                o.ahead = operands->ahead + column * sizeof *o.b.bf16;
                tile_bf16(&o, count);
            } else {
                o.b.f32 = operands->b.f32 + column;
                tile_f32(&o, count);
            }
        }
    }
}

static void matmul_finish(float *out, size_t out_stride, const float *acc, const float *bias,
                          uint32_t rows, uint32_t columns, bool adds) {
    for (uint32_t r = 0; r < rows; r++) {
        float *to = out + r * out_stride;
        const float *from = acc + (size_t)r * PACK_PANEL_COLUMNS;
        for (uint32_t c = 0; c < columns; c++) {
            float value = from[c];
            if (bias != NULL) value += bias[c];
            if (adds) value += to[c];
            to[c] = value;
        }
    }
}

#endif
