/* v16 on Arm NEON: four registers. See kernels/host/simd.h. */
#ifndef BT_KERNELS_HOST_SIMD_NEON_H
#define BT_KERNELS_HOST_SIMD_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#include "base/compiler.h"

/* Register tiles: 6 x 16 takes 24 accumulators of 32 registers. */
#define SIMD_TILE_ROWS      6
#define SIMD_VECTORS_1      4
#define SIMD_VECTORS_2      2
#define SIMD_VECTORS_6      1
#define SIMD_BLOCK_DEPTH    128
#define SIMD_ASKS_AHEAD     1
#define SIMD_FAR_ROWS       0
#define SIMD_PACKED_VECTORS 1

typedef struct v16 {
    float32x4_t q[4];
} v16;

#define V16_EACH(expression)                                                                       \
    v16 out;                                                                                       \
    BT_UNROLL for (int i = 0; i < 4; i++) out.q[i] = (expression);                                 \
    return out

static BT_ALWAYS_INLINE v16 v16_set1(float x) {
    V16_EACH(vdupq_n_f32(x));
}
static BT_ALWAYS_INLINE v16 v16_load(const float *p) {
    V16_EACH(vld1q_f32(p + 4 * i));
}
static BT_ALWAYS_INLINE void v16_store(float *p, v16 a) {
    BT_UNROLL for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.q[i]);
}
static BT_ALWAYS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    V16_EACH(vfmaq_f32(c.q[i], a.q[i], b.q[i]));
}
static BT_ALWAYS_INLINE v16 v16_add(v16 a, v16 b) {
    V16_EACH(vaddq_f32(a.q[i], b.q[i]));
}
static BT_ALWAYS_INLINE v16 v16_mul(v16 a, v16 b) {
    V16_EACH(vmulq_f32(a.q[i], b.q[i]));
}
static BT_ALWAYS_INLINE v16 v16_max(v16 a, v16 b) {
    V16_EACH(vmaxq_f32(a.q[i], b.q[i]));
}
static BT_ALWAYS_INLINE float v16_sum(v16 a) {
    const float32x4_t low = vaddq_f32(a.q[0], a.q[2]);
    const float32x4_t high = vaddq_f32(a.q[1], a.q[3]);
    const float32x4_t a4 = vaddq_f32(low, high);
    const float32x2_t a2 = vadd_f32(vget_low_f32(a4), vget_high_f32(a4));
    return vget_lane_f32(a2, 0) + vget_lane_f32(a2, 1);
}
static BT_ALWAYS_INLINE float v16_top(v16 a) {
    const float32x4_t low = vmaxq_f32(a.q[0], a.q[2]);
    const float32x4_t high = vmaxq_f32(a.q[1], a.q[3]);
    return vmaxvq_f32(vmaxq_f32(low, high));
}
static BT_ALWAYS_INLINE v16 v16_load_bf16(const uint16_t *p) {
    V16_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}

static BT_ALWAYS_INLINE v16 v16_load_f16(const uint8_t *p) {
    V16_EACH(vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))));
}
static BT_ALWAYS_INLINE v16 v16_load_int8(const uint8_t *p) {
    const int8x16_t raw = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(raw)), high = vmovl_s8(vget_high_s8(raw));
    return (v16){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                  vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                  vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                  vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
typedef struct v16_bits {
    uint32x4_t q[4];
} v16_bits;
static BT_ALWAYS_INLINE v16_bits v16_load_bits(const uint8_t *p) {
    v16_bits out;
    BT_UNROLL for (int i = 0; i < 4; i++) out.q[i] = vreinterpretq_u32_u8(vld1q_u8(p + 16 * i));
    return out;
}
static BT_ALWAYS_INLINE v16 v16_nibble(v16_bits bits, int shift) {
    const uint32x4_t mask = vdupq_n_u32(15);
    const int32x4_t right = vdupq_n_s32(-shift);
    V16_EACH(vcvtq_f32_u32(vandq_u32(vshlq_u32(bits.q[i], right), mask)));
}

/* One group of 16: even halves are columns 0-7, odd ones 8-15. */
static BT_ALWAYS_INLINE void v16_load_packed(const uint16_t *p, v16 *out) {
    const uint32x4_t odd = vdupq_n_u32(0xffff0000U);
    BT_UNROLL for (int i = 0; i < 2; i++) {
        const uint32x4_t raw = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
        out->q[i] = vreinterpretq_f32_u32(vshlq_n_u32(raw, 16));
        out->q[i + 2] = vreinterpretq_f32_u32(vandq_u32(raw, odd));
    }
}
static BT_ALWAYS_INLINE void v16_swap_packed(v16 *a) {
    (void)a;
}

#define SIMD_TRANSPOSE_DIMS 8
static BT_ALWAYS_INLINE void v16_transpose_bf16(const uint16_t *p, size_t stride, float *out,
                                                size_t out_stride) {
    const uint32x4_t odd = vdupq_n_u32(0xffff0000U);
    for (size_t key = 0; key < 16; key += 4) {
        uint32x4_t r[4];
        BT_UNROLL for (size_t i = 0; i < 4; i++) r[i] =
            vreinterpretq_u32_u16(vld1q_u16(p + (key + i) * stride));
        const uint32x4x2_t a = vtrnq_u32(r[0], r[1]);
        const uint32x4x2_t b = vtrnq_u32(r[2], r[3]);
        r[0] = vcombine_u32(vget_low_u32(a.val[0]), vget_low_u32(b.val[0]));
        r[1] = vcombine_u32(vget_low_u32(a.val[1]), vget_low_u32(b.val[1]));
        r[2] = vcombine_u32(vget_high_u32(a.val[0]), vget_high_u32(b.val[0]));
        r[3] = vcombine_u32(vget_high_u32(a.val[1]), vget_high_u32(b.val[1]));
        BT_UNROLL for (size_t i = 0; i < 4; i++) {
            float *row = out + key + 2 * i * out_stride;
            vst1q_f32(row, vreinterpretq_f32_u32(vshlq_n_u32(r[i], 16)));
            vst1q_f32(row + out_stride, vreinterpretq_f32_u32(vandq_u32(r[i], odd)));
        }
    }
}

#endif
