/* v16 on AVX2 with FMA: two registers. See kernels/host/simd.h. */
#ifndef BT_KERNELS_HOST_SIMD_AVX2_H
#define BT_KERNELS_HOST_SIMD_AVX2_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "base/compiler.h"

/* Register tiles: 6 x 16 takes 12 accumulators of 16 registers; one row alone needs more columns
 * in flight to hide the latency of its chains. */
#define SIMD_TILE_ROWS      6
#define SIMD_VECTORS_1      4
#define SIMD_VECTORS_2      2
#define SIMD_VECTORS_6      1
#define SIMD_BLOCK_DEPTH    128
#define SIMD_ASKS_AHEAD     1
#define SIMD_FAR_ROWS       96
#define SIMD_PACKED_VECTORS 1

typedef struct v16 {
    __m256 low, high;
} v16;

static BT_ALWAYS_INLINE v16 v16_set1(float x) {
    return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
static BT_ALWAYS_INLINE v16 v16_load(const float *p) {
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static BT_ALWAYS_INLINE void v16_store(float *p, v16 a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
static BT_ALWAYS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    return (v16){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static BT_ALWAYS_INLINE v16 v16_add(v16 a, v16 b) {
    return (v16){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
static BT_ALWAYS_INLINE v16 v16_mul(v16 a, v16 b) {
    return (v16){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
static BT_ALWAYS_INLINE v16 v16_max(v16 a, v16 b) {
    return (v16){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
static BT_ALWAYS_INLINE float v16_sum(v16 a) {
    const __m256 a8 = _mm256_add_ps(a.low, a.high);
    const __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
    const __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
    return _mm_cvtss_f32(_mm_add_ss(a2, _mm_shuffle_ps(a2, a2, 1)));
}
static BT_ALWAYS_INLINE float v16_top(v16 a) {
    const __m256 a8 = _mm256_max_ps(a.low, a.high);
    const __m128 a4 = _mm_max_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
    const __m128 a2 = _mm_max_ps(a4, _mm_movehl_ps(a4, a4));
    return _mm_cvtss_f32(_mm_max_ss(a2, _mm_shuffle_ps(a2, a2, 1)));
}
static BT_ALWAYS_INLINE v16 v16_load_bf16(const uint16_t *p) {
    const __m256i raw = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(raw));
    const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(raw, 1));
    return (v16){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}

static BT_ALWAYS_INLINE v16 v16_load_f16(const uint8_t *p) {
    const __m128i *half = (const __m128i *)(const void *)p;
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128(half)),
                 _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}
static BT_ALWAYS_INLINE v16 v16_load_int8(const uint8_t *p) {
    const __m128i raw = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)))};
}
typedef struct v16_bits {
    __m256i low, high;
} v16_bits;
static BT_ALWAYS_INLINE v16_bits v16_load_bits(const uint8_t *p) {
    const __m256i *half = (const __m256i *)(const void *)p;
    return (v16_bits){_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
}
static BT_ALWAYS_INLINE v16 v16_nibble(v16_bits bits, int shift) {
    const __m256i mask = _mm256_set1_epi32(15);
    return (v16){_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bits.low, shift), mask)),
                 _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bits.high, shift), mask))};
}

/* One group of 16: even halves are columns 0-7, odd ones 8-15. */
static BT_ALWAYS_INLINE void v16_load_packed(const uint16_t *p, v16 *out) {
    const __m256i raw = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000U);
    out->low = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    out->high = _mm256_castsi256_ps(_mm256_and_si256(raw, odd));
}
static BT_ALWAYS_INLINE void v16_swap_packed(v16 *a) {
    (void)a;
}

/* Transposes an 8 x 8 block of words in place. */
static BT_ALWAYS_INLINE void transpose_words(__m256i *r) {
    __m256i t[8];
    BT_UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    BT_UNROLL for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    BT_UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    BT_UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
}
#define SIMD_TRANSPOSE_DIMS 16
static BT_ALWAYS_INLINE void v16_transpose_bf16(const uint16_t *p, size_t stride, float *out,
                                                size_t out_stride) {
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000U);
    for (size_t half = 0; half < 16; half += 8) {
        __m256i r[8];
        BT_UNROLL for (size_t i = 0; i < 8; i++) r[i] =
            _mm256_loadu_si256((const __m256i *)(const void *)(p + (half + i) * stride));
        transpose_words(r);
        BT_UNROLL for (size_t i = 0; i < 8; i++) {
            float *row = out + half + 2 * i * out_stride;
            _mm256_storeu_ps(row, _mm256_castsi256_ps(_mm256_slli_epi32(r[i], 16)));
            _mm256_storeu_ps(row + out_stride, _mm256_castsi256_ps(_mm256_and_si256(r[i], odd)));
        }
    }
}

#endif
