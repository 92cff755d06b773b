/* Seeded random arrays for the kernel tests. */
#ifndef BT_TESTS_KERNELS_RANDOM_DATA_H
#define BT_TESTS_KERNELS_RANDOM_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/bf16.h"

static inline uint64_t random_next(uint64_t *state) {
    uint64_t x = (*state += 0x9e3779b97f4a7c15U);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

/* In [0, limit). */
static inline uint32_t random_below(uint64_t *state, uint32_t limit) {
    return (uint32_t)((random_next(state) >> 32) % limit);
}

/* In [-1, 1). */
static inline float random_float(uint64_t *state) {
    return (float)(int32_t)(random_next(state) >> 40) * 0x1p-23F - 1.0F;
}

static inline void random_floats(uint64_t *state, float *out, size_t count, float scale) {
    for (size_t i = 0; i < count; i++)
        out[i] = random_float(state) * scale;
}

static inline void random_bf16(uint64_t *state, uint16_t *out, size_t count, float scale) {
    for (size_t i = 0; i < count; i++)
        out[i] = bf16_from_f32(random_float(state) * scale);
}

/* A random order of first .. first + count - 1. */
static inline void random_order(uint64_t *state, uint32_t *out, uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t j = random_below(state, i + 1);
        out[i] = out[j];
        out[j] = first + i;
    }
}

#endif
