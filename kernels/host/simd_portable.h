/* v16 in plain C: sixteen floats. See kernels/host/simd.h. */
#ifndef BT_KERNELS_HOST_SIMD_PORTABLE_H
#define BT_KERNELS_HOST_SIMD_PORTABLE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/compiler.h"
#include "kernels/bf16.h"

#define SIMD_TILE_ROWS      6
#define SIMD_VECTORS_1      1
#define SIMD_VECTORS_2      1
#define SIMD_VECTORS_6      1
#define SIMD_BLOCK_DEPTH    256
#define SIMD_ASKS_AHEAD     0
#define SIMD_FAR_ROWS       0
#define SIMD_PACKED_VECTORS 1

typedef struct v16 {
    float lane[16];
} v16;

#define V16_EACH(expression)                                                                       \
    v16 out;                                                                                       \
    for (int i = 0; i < 16; i++)                                                                   \
        out.lane[i] = (expression);                                                                \
    return out

static inline v16 v16_set1(float x) {
    V16_EACH(x);
}
static inline v16 v16_load(const float *p) {
    V16_EACH(p[i]);
}
static inline void v16_store(float *p, v16 a) {
    memcpy(p, a.lane, sizeof a.lane);
}
static inline v16 v16_fma(v16 a, v16 b, v16 c) {
    V16_EACH(fmaf(a.lane[i], b.lane[i], c.lane[i]));
}
static inline v16 v16_add(v16 a, v16 b) {
    V16_EACH(a.lane[i] + b.lane[i]);
}
static inline v16 v16_mul(v16 a, v16 b) {
    V16_EACH(a.lane[i] * b.lane[i]);
}
static inline v16 v16_max(v16 a, v16 b) {
    V16_EACH(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
static inline float v16_sum(v16 a) {
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++)
            a.lane[i] += a.lane[i + step];
    return a.lane[0];
}
static inline float v16_top(v16 a) {
    float top = a.lane[0];
    for (int i = 1; i < 16; i++)
        top = a.lane[i] > top ? a.lane[i] : top;
    return top;
}
static inline v16 v16_load_bf16(const uint16_t *p) {
    V16_EACH(bf16_to_f32(p[i]));
}
static inline void v16_load_packed(const uint16_t *p, v16 *out) {
    for (int i = 0; i < 8; i++) {
        out->lane[i] = bf16_to_f32(p[2 * i]);
        out->lane[i + 8] = bf16_to_f32(p[2 * i + 1]);
    }
}
static inline void v16_swap_packed(v16 *a) {
    (void)a;
}

#define SIMD_TRANSPOSE_DIMS 1
static inline void v16_transpose_bf16(const uint16_t *p, size_t stride, float *out,
                                      size_t out_stride) {
    (void)out_stride;
    for (size_t i = 0; i < 16; i++)
        out[i] = bf16_to_f32(p[i * stride]);
}

#endif
