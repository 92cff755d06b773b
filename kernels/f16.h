/* IEEE half precision: widening to f32, which is exact. */
#ifndef BT_KERNELS_F16_H
#define BT_KERNELS_F16_H

#include <stdint.h>

#include "kernels/math.h"

/* Infinity and NaN stay what they are. */
static inline float f16_to_f32(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000U) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fU;
    const uint32_t fraction = bits & 0x3ffU;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 */
        const float magnitude = (float)fraction * 0x1p-24F;
        return sign != 0 ? -magnitude : magnitude;
    }
    if (exponent == 0x1f) return math_from_bits_f32(sign | 0x7f800000U | fraction << 13);
    return math_from_bits_f32(sign | (exponent + 112U) << 23 | fraction << 13);
}

#endif
