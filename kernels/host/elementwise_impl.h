/* Norm, activation, rotation and rounding of rows. Included once by each isa_*.c. */
#ifndef BT_KERNELS_HOST_ELEMENTWISE_IMPL_H
#define BT_KERNELS_HOST_ELEMENTWISE_IMPL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/bf16.h"
#include "kernels/host/simd.h"
#include "kernels/math.h"
#include "kernels/pack.h"

static void rms_norm(float *out, const float *x, const float *weight, uint32_t width,
                     float epsilon) {
    const uint32_t whole = width / 16 * 16;
    v16 squares = v16_set1(0.0F);
    for (uint32_t i = 0; i < whole; i += 16) {
        const v16 a = v16_load(x + i);
        squares = v16_fma(a, a, squares);
    }
    if (whole < width) {
        float tail[16] = {0};
        memcpy(tail, x + whole, (width - whole) * sizeof *x);
        const v16 a = v16_load(tail);
        squares = v16_fma(a, a, squares);
    }
    const float scale = 1.0F / sqrtf(v16_sum(squares) / (float)width + epsilon);
    for (uint32_t i = 0; i < width; i++)
        out[i] = (x[i] * scale) * weight[i];
}

static void silu_mul(float *out, size_t out_stride, const float *gate, const float *up,
                     uint32_t rows, uint32_t columns) {
    for (uint32_t r = 0; r < rows; r++) {
        float *to = out + r * out_stride;
        const float *g = gate + (size_t)r * PACK_PANEL_COLUMNS;
        const float *u = up + (size_t)r * PACK_PANEL_COLUMNS;
        for (uint32_t c = 0; c < columns; c++)
            to[c] = g[c] / (1.0F + math_exp_f32(-g[c])) * u[c];
    }
}

static void rope(float *x, const float *table, uint32_t head_dim) {
    const uint32_t half = head_dim / 2;
    const float *cosines = table;
    const float *sines = table + half;
    for (uint32_t i = 0; i < half; i++) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

static void store_bf16(uint16_t *out, const float *x, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        out[i] = bf16_from_f32(x[i]);
}

#endif
