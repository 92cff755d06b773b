/* bf16: the upper half of a float. Widening is exact; narrowing rounds to nearest, ties to even,
 * and makes every NaN the positive quiet one, so that all instruction sets agree. */
#ifndef BT_KERNELS_BF16_H
#define BT_KERNELS_BF16_H

#include <stdint.h>
#include <string.h>

static inline float bf16_to_f32(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static inline uint16_t bf16_from_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0U : rounded);
}

#endif
