/* Elementary functions with the same bits everywhere: rule 4 forbids libm in the token path.
 *
 * Each function is a fixed sequence of + - * /, bit casts and selects, all correctly rounded by
 * IEEE 754. There is no fma in them: a baseline build would turn it into a library call per
 * element, and the error bounds below hold without it. So any compiler with -ffp-contract=off
 * (cmake/BatonBuild.cmake) and any instruction set gives the same bits, and there are no branches,
 * so that a loop over them vectorises at -O3. Round-to-nearest is assumed, and that denormals are
 * not flushed. A NaN result is always the positive quiet NaN without payload.
 *
 *   function         largest error             special cases
 *   math_exp_f32     1 ulp                     -inf -> 0, above 88.72 -> inf, gradual underflow
 *   math_log_f32     0.51 ulp                  0 -> -inf, below 0 -> NaN, inf -> inf
 *   math_exp_f64     1 ulp                     -inf -> 0, above 709.78 -> inf, gradual underflow
 *   math_log_f64     1 ulp                     0 -> -inf, below 0 -> NaN, inf -> inf
 *   math_sincos_f64  1 ulp for |x| <= 1.6e6    inf and NaN -> NaN; less exact for larger |x|
 *
 * math_exp_f32(0) is exactly 1 and math_log_*(1) exactly 0. Polynomials are minimax fits of our
 * own; tests/vectors/math_coefficients.py prints every constant. Threads: pure. */
#ifndef BT_KERNELS_MATH_H
#define BT_KERNELS_MATH_H

#include <stdint.h>
#include <string.h>

static inline uint32_t math_bits_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float math_from_bits_f32(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t math_bits_f64(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double math_from_bits_f64(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float math_nan_f32(void) {
    return math_from_bits_f32(0x7fc00000U);
}

static inline double math_nan_f64(void) {
    return math_from_bits_f64(0x7ff8000000000000U);
}

static inline float math_inf_f32(void) {
    return math_from_bits_f32(0x7f800000U);
}

static inline double math_inf_f64(void) {
    return math_from_bits_f64(0x7ff0000000000000U);
}

/* e^x = 2^n e^r with r = x - n ln 2 in [-ln2/2, ln2/2]. Adding 1.5 * 2^23 rounds to an integer and
 * leaves it in the low bits. n ln2_hi and x - n ln2_hi are exact (ln2_hi has 15 bits), and only the
 * small terms see the rounded r. 2^n is applied as two factors, so that it may be denormal. */
static inline float math_exp_f32(float x) {
    const float top = 88.7228394F, bottom = -104.0F, shifter = 0x1.8p23F;
    float a = x > top ? top : x;
    a = a < bottom ? bottom : a;
    const float shifted = a * 0x1.715476p+0F + shifter;
    const float n = shifted - shifter;
    const float high = a - n * 0x1.62e4p-1F;
    const float low = n * 0x1.7f7d1cp-20F;
    const float r = high - low;
    float q = 0x1.6a1a6ep-10F;
    q = q * r + 0x1.123fc6p-7F;
    q = q * r + 0x1.555916p-5F;
    q = q * r + 0x1.55548ap-3F;
    q = q * r + 0x1.fffffcp-2F;
    const float y = (high + (r * r * q - low)) + 1.0F;
    /* The low bits of `shifted` are n in two's complement, plus 0x4b400000. */
    const uint32_t offset_n = math_bits_f32(shifted) - 0x4b400000U + 256U;
    const uint32_t half = offset_n >> 1; /* floor(n / 2) + 128 */
    const uint32_t rest = offset_n - half;
    const float scale_a = math_from_bits_f32((half - 128U + 127U) << 23);
    const float scale_b = math_from_bits_f32((rest - 128U + 127U) << 23);
    float result = y * scale_a * scale_b;
    result = x > top ? math_inf_f32() : result;
    result = x < bottom ? 0.0F : result;
    return x != x ? math_nan_f32() : result;
}

/* Computed in double, where every float is normal and the result is rounded once:
 * x = 2^k m, m in [sqrt(1/2), sqrt 2), f = m - 1, s = f / (2 + f), log m = 2 atanh s. */
static inline float math_log_f32(float x) {
    const uint64_t bits = math_bits_f64((double)x);
    const uint64_t shifted = bits - 0x3fe6a09e00000000U;
    const uint64_t m_bits = (shifted & 0x000fffffffffffffU) + 0x3fe6a09e00000000U;
    /* k + 2048 as a double: its 12 bits in the mantissa of 2^52. */
    const uint64_t k_bits = ((shifted >> 52) + 2048U) & 0xfffU;
    const double k = math_from_bits_f64(k_bits | 0x4330000000000000U) - (0x1p52 + 2048.0);
    const double f = math_from_bits_f64(m_bits) - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double q = 0x1.911c638f4354fp-3;
    q = q * z + 0x1.c62aa4022a8dfp-3;
    q = q * z + 0x1.24941329cfb96p-2;
    q = q * z + 0x1.999996a69e916p-2;
    q = q * z + 0x1.555555561f22cp-1;
    const double log_m = s * (q * z) + 2.0 * s;
    float result = (float)(k * 0x1.62e42fefa39efp-1 + log_m);
    result = x == 0.0F ? -math_inf_f32() : result;
    result = x == math_inf_f32() ? x : result;
    result = x < 0.0F ? math_nan_f32() : result;
    return x != x ? math_nan_f32() : result;
}

/* As math_exp_f32; ln2_hi has 42 bits, so that n ln2_hi is exact for |n| < 2^11. */
static inline double math_exp_f64(double x) {
    const double top = 0x1.62e42fefa39efp9, bottom = -746.0, shifter = 0x1.8p52;
    double a = x > top ? top : x;
    a = a < bottom ? bottom : a;
    const double shifted = a * 0x1.71547652b82fep+0 + shifter;
    const double n = shifted - shifter;
    const double high = a - n * 0x1.62e42fefa38p-1;
    const double low = n * 0x1.ef35793c7673p-45;
    const double r = high - low;
    double q = 0x1.1e3b8601fafd6p-29;
    q = q * r + 0x1.af6e7cfdaf8e2p-26;
    q = q * r + 0x1.27e5b7de3c53ep-22;
    q = q * r + 0x1.71ddeeab018fap-19;
    q = q * r + 0x1.a01a013372896p-16;
    q = q * r + 0x1.a01a01b4115d9p-13;
    q = q * r + 0x1.6c16c16c314bcp-10;
    q = q * r + 0x1.111111110eae8p-7;
    q = q * r + 0x1.55555555554ffp-5;
    q = q * r + 0x1.555555555555cp-3;
    q = q * r + 0x1.0p-1;
    const double y = (high + (r * r * q - low)) + 1.0;
    const uint64_t offset_n = math_bits_f64(shifted) - 0x4338000000000000U + 2048U;
    const uint64_t half = offset_n >> 1; /* floor(n / 2) + 1024 */
    const uint64_t rest = offset_n - half;
    const double scale_a = math_from_bits_f64((half - 1024U + 1023U) << 52);
    const double scale_b = math_from_bits_f64((rest - 1024U + 1023U) << 52);
    double result = y * scale_a * scale_b;
    result = x > top ? math_inf_f64() : result;
    result = x < bottom ? 0.0 : result;
    return x != x ? math_nan_f64() : result;
}

/* As math_log_f32, with f - f^2/2 taken out of the series, so that the large terms are added last.
 * k ln2_hi is exact. */
static inline double math_log_f64(double x) {
    const int is_denormal = x < 0x1p-1022;
    const double scaled = is_denormal ? x * 0x1p54 : x;
    const double k_extra = is_denormal ? 54.0 : 0.0;
    const uint64_t shifted = math_bits_f64(scaled) - 0x3fe6a09e00000000U;
    const uint64_t m_bits = (shifted & 0x000fffffffffffffU) + 0x3fe6a09e00000000U;
    const uint64_t k_bits = ((shifted >> 52) + 2048U) & 0xfffU;
    const double k = math_from_bits_f64(k_bits | 0x4330000000000000U) - (0x1p52 + 2048.0) - k_extra;
    const double f = math_from_bits_f64(m_bits) - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double q = 0x1.0f6a62ce1c4e4p-3;
    q = q * z + 0x1.0f5bfcc888c54p-3;
    q = q * z + 0x1.3b20b4887945cp-3;
    q = q * z + 0x1.745cde01a946ep-3;
    q = q * z + 0x1.c71c7259a1b97p-3;
    q = q * z + 0x1.249249242ab83p-2;
    q = q * z + 0x1.9999999999e06p-2;
    q = q * z + 0x1.5555555555555p-1;
    const double half_square = 0.5 * f * f;
    const double small = s * (half_square + q * z) + k * 0x1.ef35793c7673p-45;
    double result = k * 0x1.62e42fefa38p-1 - ((half_square - small) - f);
    result = x == 0.0 ? -math_inf_f64() : result;
    result = x == math_inf_f64() ? x : result;
    result = x < 0.0 ? math_nan_f64() : result;
    return x != x ? math_nan_f64() : result;
}

/* high + low = a + b exactly (Knuth). */
static inline double math_two_sum(double a, double b, double *low) {
    const double sum = a + b;
    const double b_part = sum - a;
    *low = (a - (sum - b_part)) + (b - b_part);
    return sum;
}

/* x - n pi/2 as high + low, for |n| <= 2^20: pi/2 is cut into three parts of 33 bits, whose
 * products with n are exact, and a rest. Gives the quadrant, n mod 4. */
static inline uint32_t math_reduce_half_pi(double x, double *high, double *low) {
    const double shifted = x * 0x1.45f306dc9c883p-1 + 0x1.8p52;
    const double n = shifted - 0x1.8p52;
    double low_a;
    double low_b;
    const double a = x - n * 0x1.921fb544p+0;
    const double b = math_two_sum(a, -(n * 0x1.0b4611a6p-34), &low_a);
    const double c = math_two_sum(b, -(n * 0x1.3198a2ep-69), &low_b);
    const double rest = low_b + (low_a - n * 0x1.b839a252049c1p-104);
    *high = math_two_sum(c, rest, low);
    return (uint32_t)math_bits_f64(shifted) & 3U;
}

static inline void math_sincos_f64(double x, double *sin_out, double *cos_out) {
    double r;
    double r_low;
    const uint32_t quadrant = math_reduce_half_pi(x, &r, &r_low);
    const double z = r * r;
    double p = 0x1.5d8a191dc23b2p-33;
    p = p * z - 0x1.ae5e4863b223cp-26;
    p = p * z + 0x1.71de3552d40ep-19;
    p = p * z - 0x1.a01a019be89edp-13;
    p = p * z + 0x1.111111110f74p-7;
    p = p * z - 0x1.5555555555548p-3;
    const double cube = z * r;
    const double sin_r = r + (cube * p + (r_low - 0.5 * z * r_low));
    double q = -0x1.8fa4da40a7d1p-37;
    q = q * z + 0x1.1ee9d9a242adap-29;
    q = q * z - 0x1.27e4f7eff3dafp-22;
    q = q * z + 0x1.a01a019c8f1ddp-16;
    q = q * z - 0x1.6c16c16c1502ap-10;
    q = q * z + 0x1.555555555554bp-5;
    const double half = 0.5 * z;
    const double rounded = 1.0 - half;
    const double cos_r = rounded + (((1.0 - rounded) - half) + (z * z * q - r * r_low));
    const double sin_x = (quadrant & 1U) != 0U ? cos_r : sin_r;
    const double cos_x = (quadrant & 1U) != 0U ? sin_r : cos_r;
    const double sin_signed = (quadrant & 2U) != 0U ? -sin_x : sin_x;
    const double cos_signed = ((quadrant + 1U) & 2U) != 0U ? -cos_x : cos_x;
    *sin_out = sin_signed != sin_signed ? math_nan_f64() : sin_signed;
    *cos_out = cos_signed != cos_signed ? math_nan_f64() : cos_signed;
}

#endif
