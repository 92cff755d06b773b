/* Matrix products over panels of quantised weights (kernels/pack.h) in plain C: an input's 64
 * weights at a time, for all rows. The same chains as quantised_impl.h, which would take the
 * compiler minutes with sixteen lanes of plain C. Included by isa_portable.c. */
#ifndef BT_KERNELS_HOST_QUANTISED_PORTABLE_H
#define BT_KERNELS_HOST_QUANTISED_PORTABLE_H

#include <math.h>
#include <string.h>

#include "kernels/f16.h"
#include "kernels/host/isa.h"
#include "kernels/pack.h"

/* d, and m where the format has one or needs one, of a block's columns. */
typedef struct block_scales {
    float d[PACK_PANEL_COLUMNS], m[PACK_PANEL_COLUMNS];
} block_scales;

static float half_at(const uint8_t *block, size_t index) {
    uint16_t bits;
    memcpy(&bits, block + 2 * index, sizeof bits);
    return f16_to_f32(bits);
}

static void read_scales(block_scales *s, const uint8_t *block, bool has_m) {
    for (size_t c = 0; c < PACK_PANEL_COLUMNS; c++) {
        s->d[c] = half_at(block, c);
        s->m[c] = has_m ? half_at(block, PACK_PANEL_COLUMNS + c) : -8.0F * s->d[c];
    }
}

static void widen_int8(float *out, const uint8_t *weights) {
    for (size_t c = 0; c < PACK_PANEL_COLUMNS; c++)
        out[c] = (float)(int8_t)weights[c];
}

static void widen_q8_0(float *out, const uint8_t *weights, const block_scales *s) {
    for (size_t c = 0; c < PACK_PANEL_COLUMNS; c++)
        out[c] = (float)(int8_t)weights[c] * s->d[c];
}

static void widen_q4(float *out, const uint8_t *words, uint32_t shift, const block_scales *s) {
    for (size_t c = 0; c < PACK_PANEL_COLUMNS; c++) {
        uint32_t word;
        memcpy(&word, words + c * sizeof word, sizeof word);
        out[c] = fmaf((float)((word >> shift) & 15), s->d[c], s->m[c]);
    }
}

/* The 64 weights of input k. */
static void widen_input(float *out, const host_panel *panel, uint32_t k, block_scales *s) {
    if (panel->format == PACK_INT8) {
        widen_int8(out, panel->data + (sizeof(float) + (size_t)k) * PACK_PANEL_COLUMNS);
        return;
    }
    const uint8_t *block = panel->data + k / PACK_BLOCK * pack_block_bytes(panel->format);
    const bool has_m = panel->format == PACK_Q4_1;
    const size_t in_block = k % PACK_BLOCK;
    if (in_block == 0) read_scales(s, block, has_m);
    block += (has_m ? 4 : 2) * PACK_PANEL_COLUMNS;
    if (panel->format == PACK_Q8_0)
        widen_q8_0(out, block + in_block * PACK_PANEL_COLUMNS, s);
    else
        widen_q4(out, block + in_block / 8 * 4 * PACK_PANEL_COLUMNS, (uint32_t)(4 * (in_block % 8)),
                 s);
}

static void quantised_matmul(float *out, const float *x, size_t x_stride, const host_panel *panel,
                             uint32_t rows) {
    block_scales scales;
    float weights[PACK_PANEL_COLUMNS];
    memset(out, 0, (size_t)rows * PACK_PANEL_COLUMNS * sizeof *out);
    for (uint32_t k = 0; k < panel->depth; k++) {
        widen_input(weights, panel, k, &scales);
        for (uint32_t r = 0; r < rows; r++) {
            float *acc = out + (size_t)r * PACK_PANEL_COLUMNS;
            const float factor = x[r * x_stride + k];
            for (size_t c = 0; c < PACK_PANEL_COLUMNS; c++)
                acc[c] = fmaf(factor, weights[c], acc[c]);
        }
    }
    if (panel->format != PACK_INT8) return;
    float column_scales[PACK_PANEL_COLUMNS];
    memcpy(column_scales, panel->data, sizeof column_scales);
    for (size_t i = 0; i < (size_t)rows * PACK_PANEL_COLUMNS; i++)
        out[i] *= column_scales[i % PACK_PANEL_COLUMNS];
}

#endif
