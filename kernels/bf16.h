/* bf16: the upper half of a float. Widening is exact; narrowing rounds to nearest, ties to even,
 * and makes every NaN the positive quiet one, so that all instruction sets agree. */
#ifndef BT_KERNELS_BF16_H
#define BT_KERNELS_BF16_H

#include <stdint.h>

#include "kernels/math.h"

static inline float bf16_to_f32(uint16_t bits) {
    return math_from_bits_f32((uint32_t)bits << 16);
}

static inline uint16_t bf16_from_f32(float x) {
    const uint32_t bits = math_bits_f32(x);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0U : rounded);
}

#endif
