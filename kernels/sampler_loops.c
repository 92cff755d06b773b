/* The hot loops of the sampler in plain C, shaped so that the compiler vectorises them: float
 * operations lane by lane only, reductions on integers only. The build compiles this file once per
 * instruction set (SAMPLER_LOOPS_ISA, kernels/CMakeLists.txt); any vector width gives the same
 * bits. */
#include "kernels/sampler_internal.h"

#define JOIN_(a, b)    a##b
#define JOIN(a, b)     JOIN_(a, b)
#define TEXT_(a)       #a
#define TEXT(a)        TEXT_(a)
#define SAMPLER_SYMBOL JOIN(sampler_loops_, SAMPLER_LOOPS_ISA)

extern const sampler_loops SAMPLER_SYMBOL;

/* Float bits as an integer of the same order; NaN lies outside [-inf, inf]. */
static inline int32_t ordered_key(float x) {
    const uint32_t bits = math_bits_f32(x);
    const uint32_t flip = (uint32_t) - (int32_t)(bits >> 31) & 0x7fffffffU;
    return (int32_t)(bits ^ flip);
}

static bool largest(const float *logits, size_t count, float *largest_out) {
    int32_t high = INT32_MIN;
    int32_t low = INT32_MAX;
    for (size_t i = 0; i < count; i++) {
        const int32_t key = ordered_key(logits[i]);
        high = key > high ? key : high;
        low = key < low ? key : low;
    }
    const uint32_t bits = (uint32_t)high ^ (high < 0 ? 0x7fffffffU : 0U);
    *largest_out = math_from_bits_f32(bits);
    return high <= ordered_key(math_inf_f32()) && low >= ordered_key(-math_inf_f32());
}

static void weigh(const float *logits, size_t count, float temperature, float scaled_max,
                  float *restrict weights) {
    for (size_t i = 0; i < count; i++) {
        weights[i] = sampler_weight(logits[i], temperature, scaled_max);
    }
}

static uint64_t sum(const float *weights, size_t count) {
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total += sampler_fixed_offset(weights[i]);
    }
    return total - (uint64_t)count * SAMPLER_FIXED_OFFSET;
}

static void sum_from(const float *weights, size_t count,
                     const uint32_t thresholds[SAMPLER_THRESHOLDS],
                     uint64_t sums[SAMPLER_THRESHOLDS]) {
    const int32_t a = (int32_t)thresholds[0];
    const int32_t b = (int32_t)thresholds[1];
    const int32_t c = (int32_t)thresholds[2];
    const int32_t d = (int32_t)thresholds[3];
    uint64_t sum_a = 0;
    uint64_t sum_b = 0;
    uint64_t sum_c = 0;
    uint64_t sum_d = 0;
    for (size_t i = 0; i < count; i++) {
        const int32_t bits = (int32_t)math_bits_f32(weights[i]);
        sum_a += sampler_fixed_offset(bits >= a ? weights[i] : 0.0F);
        sum_b += sampler_fixed_offset(bits >= b ? weights[i] : 0.0F);
        sum_c += sampler_fixed_offset(bits >= c ? weights[i] : 0.0F);
        sum_d += sampler_fixed_offset(bits >= d ? weights[i] : 0.0F);
    }
    const uint64_t offset = (uint64_t)count * SAMPLER_FIXED_OFFSET;
    sums[0] = sum_a - offset;
    sums[1] = sum_b - offset;
    sums[2] = sum_c - offset;
    sums[3] = sum_d - offset;
}

/* halves[i] = max(values[i], values[i + half]) for non-negative floats as integers. */
static inline void fold(const int32_t *values, size_t half, int32_t *halves) {
    for (size_t i = 0; i < half; i++) {
        halves[i] = values[i] > values[i + half] ? values[i] : values[i + half];
    }
}

static void group_maxima(const float *weights, size_t chunks, uint32_t groups, uint32_t *maxima) {
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        int32_t bits[SAMPLER_CHUNK];
        int32_t halves[SAMPLER_CHUNK / 2];
        memcpy(bits, weights + chunk * SAMPLER_CHUNK, sizeof bits);
        fold(bits, 128, halves);
        fold(halves, 64, bits);
        fold(bits, 32, halves);
        fold(halves, 16, bits);
        size_t width = 16;
        while (width > groups) {
            width /= 2;
            fold(bits, width, halves);
            memcpy(bits, halves, sizeof halves[0] * width);
        }
        memcpy(maxima + chunk * groups, bits, sizeof bits[0] * groups);
    }
}

enum { BLOCK = 64, PART = 16 };

static inline int32_t part_max(const float *weights, size_t count) {
    int32_t max = 0;
    for (size_t i = 0; i < count; i++) {
        const int32_t bits = (int32_t)math_bits_f32(weights[i]);
        max = bits > max ? bits : max;
    }
    return max;
}

static size_t count_from(const float *weights, size_t count, uint32_t threshold) {
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) {
        found += (int32_t)math_bits_f32(weights[i]) >= (int32_t)threshold ? 1U : 0U;
    }
    return found;
}

static size_t collect(const float *weights, size_t chunks, uint32_t threshold,
                      uint64_t *candidates) {
    size_t count = 0;
    for (size_t begin = 0; begin < chunks * SAMPLER_CHUNK; begin += BLOCK) {
        if (part_max(weights + begin, BLOCK) < (int32_t)threshold) continue;
        for (size_t part = begin; part < begin + BLOCK; part += PART) {
            if (part_max(weights + part, PART) < (int32_t)threshold) continue;
            for (size_t i = part; i < part + PART; i++) {
                const uint32_t bits = math_bits_f32(weights[i]);
                candidates[count] = (uint64_t)bits << 32 | i;
                count += bits >= threshold ? 1U : 0U;
            }
        }
    }
    return count;
}

static inline float race_ratio(uint32_t hash_state, uint32_t column, float weight) {
    const uint32_t hash = sampler_hash_end(sampler_hash_mix(hash_state, column));
    const float bound = (float)(int32_t)(~hash >> 1) * 0x1p-31F;
    const float ratio = bound / weight;
    return weight > 0.0F ? ratio : math_inf_f32();
}

static float race(uint32_t hash_state, const float *weights, const uint32_t *columns, size_t count,
                  float *restrict ratios) {
    int32_t smallest = (int32_t)math_bits_f32(math_inf_f32());
    if (columns == NULL) {
        for (size_t i = 0; i < count; i++) {
            ratios[i] = race_ratio(hash_state, (uint32_t)i, weights[i]);
        }
    } else {
        for (size_t i = 0; i < count; i++) {
            ratios[i] = race_ratio(hash_state, columns[i], weights[i]);
        }
    }
    for (size_t i = 0; i < count; i++) {
        const int32_t bits = (int32_t)math_bits_f32(ratios[i]);
        smallest = bits < smallest ? bits : smallest;
    }
    return math_from_bits_f32((uint32_t)smallest);
}

static size_t at_most(const float *values, size_t count, float limit, uint32_t *indices) {
    const int32_t limit_bits = (int32_t)math_bits_f32(limit);
    size_t found = 0;
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        const size_t end = begin + BLOCK < count ? begin + BLOCK : count;
        int32_t min = INT32_MAX;
        for (size_t i = begin; i < end; i++) {
            const int32_t bits = (int32_t)math_bits_f32(values[i]);
            min = bits < min ? bits : min;
        }
        if (min > limit_bits) continue;
        for (size_t i = begin; i < end; i++) {
            if (values[i] <= limit) indices[found++] = (uint32_t)i;
        }
    }
    return found;
}

static size_t first_equal(const float *logits, size_t count, float value) {
    size_t begin = 0;
    while (begin + BLOCK <= count) {
        uint32_t equal = 0;
        for (size_t i = begin; i < begin + BLOCK; i++) {
            equal |= logits[i] == value ? 1U : 0U;
        }
        if (equal != 0) break;
        begin += BLOCK;
    }
    while (begin + 1 < count && logits[begin] != value) {
        begin++;
    }
    return begin;
}

static size_t next_above(const float *values, size_t begin, size_t count, float limit) {
    while (begin + BLOCK <= count) {
        uint32_t above = 0;
        for (size_t i = begin; i < begin + BLOCK; i++) {
            above |= values[i] > limit ? 1U : 0U;
        }
        if (above != 0) break;
        begin += BLOCK;
    }
    while (begin < count && !(values[begin] > limit)) {
        begin++;
    }
    return begin;
}

static void log_shares(const float *weights, size_t count, float mass, float *restrict logprobs) {
    for (size_t i = 0; i < count; i++) {
        logprobs[i] = sampler_entry_logprob(weights[i], mass);
    }
}

const sampler_loops SAMPLER_SYMBOL = {
    .isa = TEXT(SAMPLER_LOOPS_ISA),
    .largest = largest,
    .weigh = weigh,
    .sum = sum,
    .sum_from = sum_from,
    .count_from = count_from,
    .group_maxima = group_maxima,
    .collect = collect,
    .race = race,
    .at_most = at_most,
    .first_equal = first_equal,
    .next_above = next_above,
    .log_shares = log_shares,
};
