/* Selection and sorting among candidates: radix histograms of ten bits over the thirty bits a
 * weight in (0, 1] can have. Sums are integers, so the order in which candidates come does not
 * matter. */
#include "kernels/sampler_internal.h"

#include <assert.h>

enum { DIGIT_BITS = 10, DIGITS = 3, INSERTION_MAX = 24 };

static inline uint32_t candidate_bits(uint64_t candidate) {
    return (uint32_t)(candidate >> 32);
}

static inline float candidate_weight(uint64_t candidate) {
    return math_from_bits_f32(candidate_bits(candidate));
}

/* Counts and sums per value of the digit at `shift`, over the candidates whose bits above it are
 * `prefix`. */
static void fill_histogram(const uint64_t *candidates, size_t count, uint32_t shift,
                           uint32_t prefix, sampler_histogram *histogram) {
    memset(histogram, 0, sizeof *histogram);
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = candidate_bits(candidates[i]);
        if (bits >> shift >> DIGIT_BITS != prefix) continue;
        const uint32_t digit = bits >> shift & (SAMPLER_BUCKETS - 1U);
        histogram->counts[digit]++;
        histogram->sums[digit] += sampler_fixed(candidate_weight(candidates[i]));
    }
}

sampler_cut sampler_find_cut(const uint64_t *candidates, size_t count, uint64_t count_max,
                             double mass_limit, sampler_histogram *scratch) {
    sampler_cut cut = {.threshold = SAMPLER_WEIGHT_MIN_BITS};
    uint32_t prefix = 0;
    for (uint32_t level = 0; level < DIGITS; level++) {
        const uint32_t shift = (DIGITS - 1U - level) * DIGIT_BITS;
        fill_histogram(candidates, count, shift, prefix, scratch);
        uint32_t digit = SAMPLER_BUCKETS;
        bool is_last = false;
        while (digit > 0 && !is_last) {
            digit--;
            const uint32_t next_count = cut.count + scratch->counts[digit];
            const uint64_t next_sum = cut.fixed_sum + scratch->sums[digit];
            is_last = next_count >= count_max || (double)next_sum >= mass_limit;
            /* The bucket where a limit is reached is opened; a single value survives whole. */
            if (is_last && shift > 0) break;
            cut.count = next_count;
            cut.fixed_sum = next_sum;
        }
        if (!is_last) return cut;
        prefix = prefix << DIGIT_BITS | digit;
    }
    cut.threshold = prefix;
    return cut;
}

uint32_t sampler_reached_by(const uint32_t *values, size_t count, size_t wanted,
                            sampler_histogram *scratch) {
    const uint32_t shift = (DIGITS - 1U) * DIGIT_BITS;
    memset(scratch->counts, 0, sizeof scratch->counts);
    for (size_t i = 0; i < count; i++) {
        scratch->counts[values[i] >> shift]++;
    }
    size_t reached = 0;
    uint32_t digit = SAMPLER_BUCKETS;
    while (digit > 0 && reached < wanted) {
        digit--;
        reached += scratch->counts[digit];
    }
    return digit << shift;
}

/* Descending weight first: for stable sorting in ascending order. */
static inline uint32_t sort_digit(uint64_t candidate, uint32_t pass) {
    return ~(candidate_bits(candidate) >> pass * DIGIT_BITS) & (SAMPLER_BUCKETS - 1U);
}

static void insertion_sort(uint64_t *candidates, size_t count) {
    for (size_t i = 1; i < count; i++) {
        const uint64_t moving = candidates[i];
        size_t j = i;
        while (j > 0 && candidate_bits(candidates[j - 1]) < candidate_bits(moving)) {
            candidates[j] = candidates[j - 1];
            j--;
        }
        candidates[j] = moving;
    }
}

void sampler_sort(uint64_t *candidates, size_t count, uint64_t *spare, sampler_histogram *scratch) {
    if (count <= INSERTION_MAX) {
        insertion_sort(candidates, count);
        return;
    }
    uint64_t *from = candidates;
    uint64_t *to = spare;
    for (uint32_t pass = 0; pass < DIGITS; pass++) {
        uint32_t *counts = scratch->counts;
        memset(counts, 0, sizeof scratch->counts);
        for (size_t i = 0; i < count; i++) {
            counts[sort_digit(from[i], pass)]++;
        }
        uint32_t start = 0;
        for (uint32_t digit = 0; digit < SAMPLER_BUCKETS; digit++) {
            const uint32_t here = counts[digit];
            counts[digit] = start;
            start += here;
        }
        for (size_t i = 0; i < count; i++) {
            to[counts[sort_digit(from[i], pass)]++] = from[i];
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    static_assert(DIGITS % 2 == 1, "the sorted candidates end up in spare");
    memcpy(candidates, spare, count * sizeof candidates[0]);
}
