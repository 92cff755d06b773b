/* v16 on AVX-512: one register. See kernels/host/simd.h. */
#ifndef BT_KERNELS_HOST_SIMD_AVX512_H
#define BT_KERNELS_HOST_SIMD_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "base/compiler.h"

/* Register tiles: 6 x 64 takes 24 accumulators of 32 registers. */
#define SIMD_TILE_ROWS      6
#define SIMD_VECTORS_1      4
#define SIMD_VECTORS_2      4
#define SIMD_VECTORS_6      4
#define SIMD_BLOCK_DEPTH    256
#define SIMD_ASKS_AHEAD     1
#define SIMD_FAR_ROWS       9
#define SIMD_PACKED_VECTORS 2

typedef __m512 v16;

static BT_ALWAYS_INLINE v16 v16_set1(float x) {
    return _mm512_set1_ps(x);
}
static BT_ALWAYS_INLINE v16 v16_load(const float *p) {
    return _mm512_loadu_ps(p);
}
static BT_ALWAYS_INLINE void v16_store(float *p, v16 a) {
    _mm512_storeu_ps(p, a);
}
static BT_ALWAYS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    return _mm512_fmadd_ps(a, b, c);
}
static BT_ALWAYS_INLINE v16 v16_add(v16 a, v16 b) {
    return _mm512_add_ps(a, b);
}
static BT_ALWAYS_INLINE v16 v16_mul(v16 a, v16 b) {
    return _mm512_mul_ps(a, b);
}
static BT_ALWAYS_INLINE v16 v16_max(v16 a, v16 b) {
    return _mm512_max_ps(a, b);
}
static BT_ALWAYS_INLINE float v16_sum(v16 a) {
    const __m256 a8 = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
    const __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
    return _mm_cvtss_f32(_mm_add_ss(a2, _mm_shuffle_ps(a2, a2, 1)));
}
static BT_ALWAYS_INLINE float v16_top(v16 a) {
    const __m256 a8 = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 a4 = _mm_max_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
    const __m128 a2 = _mm_max_ps(a4, _mm_movehl_ps(a4, a4));
    return _mm_cvtss_f32(_mm_max_ss(a2, _mm_shuffle_ps(a2, a2, 1)));
}
static BT_ALWAYS_INLINE v16 v16_load_bf16(const uint16_t *p) {
    const __m256i raw = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

static BT_ALWAYS_INLINE v16 v16_load_f16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
static BT_ALWAYS_INLINE v16 v16_load_int8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
typedef __m512i v16_bits;
static BT_ALWAYS_INLINE v16_bits v16_load_bits(const uint8_t *p) {
    return _mm512_loadu_si512(p);
}
/* Four bits of each lane choose among sixteen floats; the bits above do not count. */
static BT_ALWAYS_INLINE v16 v16_nibble(v16_bits bits, int shift) {
    const v16 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(bits, (unsigned int)shift), numbers);
}

/* Two groups of 16: the even halves give columns 0-7 and 16-23, the odd ones 8-15 and 24-31. */
static BT_ALWAYS_INLINE void v16_load_packed(const uint16_t *p, v16 *out) {
    const __m512i raw = _mm512_loadu_si512(p);
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000U);
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(raw, odd));
}
/* Swaps the middle quarters of two registers: from the order of v16_load_packed to columns, and
 * back. */
static BT_ALWAYS_INLINE void v16_swap_packed(v16 *a) {
    const v16 low = _mm512_shuffle_f32x4(a[0], a[1], 0x44);
    a[1] = _mm512_shuffle_f32x4(a[0], a[1], 0xee);
    a[0] = low;
}

/* Transposes a 16 x 16 block of words in place. */
static BT_ALWAYS_INLINE void transpose_words(__m512i *r) {
    __m512i t[16];
    BT_UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    BT_UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    BT_UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    BT_UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#define SIMD_TRANSPOSE_DIMS 32
#define SIMD_WORDS          1
typedef __m512i v16_words;
static BT_ALWAYS_INLINE void v16_load_words(const uint16_t *p, size_t stride, v16_words *out) {
    BT_UNROLL
    for (size_t i = 0; i < 16; i++)
        out[i] = _mm512_loadu_si512(p + i * stride);
    transpose_words(out);
}
static BT_ALWAYS_INLINE v16 v16_even_halves(v16_words words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
static BT_ALWAYS_INLINE v16 v16_odd_halves(v16_words words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000U)));
}
static BT_ALWAYS_INLINE void v16_transpose_bf16(const uint16_t *p, size_t stride, float *out,
                                                size_t out_stride) {
    v16_words words[16];
    v16_load_words(p, stride, words);
    BT_UNROLL
    for (size_t i = 0; i < 16; i++) {
        v16_store(out + 2 * i * out_stride, v16_even_halves(words[i]));
        v16_store(out + (2 * i + 1) * out_stride, v16_odd_halves(words[i]));
    }
}

#endif
