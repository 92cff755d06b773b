/* json_number_float.c on AVX2: four floats between 0.5 and 100 in size at a time, as nearly all
 * log-probabilities are. There a float is a whole number and f / 2^24, f < 2^24, and its digits
 * come off in two exact steps: times 10^8, eight digits above the point; what is left times 10^8
 * (10^7 from 8 on, 10^6 from 64 on: where the unit of the shortest digits is), the other eight.
 * Then the choice between the nearest unit and the nearest ten, and the text, are as there. Four
 * floats of which one is not so go there one by one. */
#include "base/json_number.h"

#include "base/json_number_internal.h"

#ifdef BT_JSON_AVX2
#include <immintrin.h>
#include <string.h>

#include "base/compiler.h"

#define TARGET __attribute__((target("avx2")))

/* Bits of the largest float below 0.5, of 100, of 1 in front of a fraction; and the exponent's of
 * 0.5. */
enum { BELOW_MIN = 0x3effffff, END = 0x42c80000, HIDDEN = 0x00800000, EXPONENT_MIN = 126 };
enum { EIGHT_DIGITS = 100000000, POINT = 24 };

/* By exponent from that of 0.5 on: */
#define SCALES 100000000, 100000000, 100000000, 100000000, 10000000, 10000000, 10000000, 1000000
#define PADS   1, 1, 1, 1, 10, 10, 10, 100
/* Half the distance of two doubles in units / 2^24, rounded down: 2^(exponent - 29) 10^8 scale. */
#define REACHES 9313225, 18626451, 37252902, 74505805, 14901161, 29802322, 59604644, 11920928

/* Each number below 10^8 becomes eight bytes 0..9, the last digit lowest. */
TARGET static inline __m256i digits_of(__m256i eights) {
    const __m256i q4 =
        _mm256_srli_epi64(_mm256_mul_epu32(eights, _mm256_set1_epi64x(0xd1b71759)), 45);
    const __m256i fours =
        _mm256_add_epi64(eights, _mm256_mul_epu32(q4, _mm256_set1_epi64x((1LL << 32) - 10000)));
    const __m256i q2 = _mm256_srli_epi16(_mm256_mulhi_epu16(fours, _mm256_set1_epi16(5243)), 3);
    const __m256i twos =
        _mm256_or_si256(_mm256_slli_epi32(q2, 16),
                        _mm256_sub_epi16(fours, _mm256_mullo_epi16(q2, _mm256_set1_epi16(100))));
    const __m256i q1 = _mm256_srli_epi16(_mm256_mullo_epi16(twos, _mm256_set1_epi16(103)), 10);
    return _mm256_add_epi16(twos, _mm256_mullo_epi16(q1, _mm256_set1_epi16(256 - 10)));
}

/* Four floats in parts; 64 bits each. */
typedef struct parts {
    __m128i starts; /* 32 bits: the whole number, and the sign above */
    __m256i upper;  /* the first eight digits behind the point, and the second */
    __m256i lower;
} parts;

/* The second eight digits, of which `rest` / 2^24 is what they are to be, in units of 10^-8. */
TARGET static inline __m256i choose(__m256i rest, __m256i exponents) {
    const __m256i one = _mm256_set1_epi64x(1);
    const __m256i ten = _mm256_set1_epi64x(10LL << POINT);
    const __m256i scale = _mm256_permutevar8x32_epi32(_mm256_setr_epi32(SCALES), exponents);
    const __m256i pad = _mm256_permutevar8x32_epi32(_mm256_setr_epi32(PADS), exponents);
    const __m256i reach = _mm256_permutevar8x32_epi32(_mm256_setr_epi32(REACHES), exponents);
    const __m256i x = _mm256_mul_epu32(rest, scale);
    const __m256i below = _mm256_srli_epi64(x, POINT);
    const __m256i fraction = _mm256_and_si256(x, _mm256_set1_epi64x((1 << POINT) - 1));
    const __m256i tens =
        _mm256_srli_epi64(_mm256_mul_epu32(below, _mm256_set1_epi64x(0xcccccccd)), 35);
    /* Comparisons are of 32 bits: all that is compared is below 2^28. */
    const __m256i down = _mm256_sub_epi64(x, _mm256_mul_epu32(tens, ten));
    const __m256i is_lower_out = _mm256_cmpgt_epi32(down, reach);
    const __m256i is_upper_out = _mm256_cmpgt_epi32(_mm256_sub_epi64(ten, down), reach);
    const __m256i next_tens = _mm256_add_epi64(tens, _mm256_andnot_si256(is_upper_out, one));
    const __m256i is_nearer_up =
        _mm256_cmpgt_epi32(_mm256_add_epi64(fraction, _mm256_and_si256(below, one)),
                           _mm256_set1_epi64x(1 << (POINT - 1)));
    const __m256i units = _mm256_sub_epi32(below, is_nearer_up);
    const __m256i units_of_ten = _mm256_mul_epu32(next_tens, _mm256_set1_epi64x(10));
    const __m256i has_no_ten = _mm256_and_si256(is_lower_out, is_upper_out);
    return _mm256_mul_epu32(_mm256_blendv_epi8(units_of_ten, units, has_no_ten), pad);
}

TARGET static inline parts split(__m128i bits, __m128i fraction) {
    const __m128i size = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
    const __m128i exponents = _mm_sub_epi32(_mm_srli_epi32(size, 23), _mm_set1_epi32(EXPONENT_MIN));
    const __m128i x = _mm_sllv_epi32(_mm_or_si128(fraction, _mm_set1_epi32(HIDDEN)), exponents);
    const __m256i mask = _mm256_set1_epi64x((1 << POINT) - 1);
    const __m256i f = _mm256_and_si256(_mm256_cvtepu32_epi64(x), mask);
    const __m256i product = _mm256_mul_epu32(f, _mm256_set1_epi64x(EIGHT_DIGITS));
    return (parts){
        .starts =
            _mm_or_si128(_mm_srli_epi32(x, POINT), _mm_and_si128(bits, _mm_set1_epi32(INT32_MIN))),
        .upper = _mm256_srli_epi64(product, POINT),
        /* Of no float does rounding up reach 10^8: test_json_number --all. */
        .lower = choose(_mm256_and_si256(product, mask), _mm256_cvtepu32_epi64(exponents)),
    };
}

/* `nonzero`: bit i is that of the digit i before the last. */
TARGET static inline char *write_one(char *out, uint32_t start, __m128i tail, uint32_t nonzero) {
    const char *text = bt_json_starts[start & 0x7fU];
    *out = '-';
    out += start >> 31;
    memcpy(out, text, 8);
    out += text[7];
    _mm_storeu_si128((__m128i *)(void *)out, tail);
    out += 16 - __builtin_ctz(nonzero | 0x8000U); /* one digit of zero */
    *out++ = ',';
    return out;
}

TARGET static inline char *write_four(char *out, const parts *p) {
    const __m256i reverse = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m256i ascii = _mm256_set1_epi8('0');
    const __m256i even = digits_of(_mm256_unpacklo_epi64(p->lower, p->upper));
    const __m256i odd = digits_of(_mm256_unpackhi_epi64(p->lower, p->upper));
    const __m256i zero = _mm256_setzero_si256();
    const uint32_t evens = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(even, zero));
    const uint32_t odds = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(odd, zero));
    const __m256i even_text = _mm256_or_si256(_mm256_shuffle_epi8(even, reverse), ascii);
    const __m256i odd_text = _mm256_or_si256(_mm256_shuffle_epi8(odd, reverse), ascii);
    const uint64_t first = (uint64_t)_mm_cvtsi128_si64(p->starts);
    const uint64_t second = (uint64_t)_mm_extract_epi64(p->starts, 1);
    out = write_one(out, (uint32_t)first, _mm256_castsi256_si128(even_text), evens);
    out = write_one(out, (uint32_t)(first >> 32), _mm256_castsi256_si128(odd_text), odds);
    out = write_one(out, (uint32_t)second, _mm256_extracti128_si256(even_text, 1), evens >> 16);
    return write_one(out, (uint32_t)(second >> 32), _mm256_extracti128_si256(odd_text, 1),
                     odds >> 16);
}

TARGET size_t bt_json_floats_avx2(char *out, const float *values, size_t count) {
    char *end = out;
    size_t i = 0;
    while (i < count) {
        size_t single = count - i;
        if (single >= 4) {
            const __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)(values + i));
            const __m128i size = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
            const __m128i fraction = _mm_and_si128(size, _mm_set1_epi32(HIDDEN - 1));
            const __m128i is_in = _mm_and_si128(_mm_cmpgt_epi32(size, _mm_set1_epi32(BELOW_MIN)),
                                                _mm_cmpgt_epi32(_mm_set1_epi32(END), size));
            single = 4;
            if (BT_LIKELY(_mm_movemask_epi8(is_in) == 0xffff)) {
                const parts p = split(bits, fraction);
                end = write_four(end, &p);
                i += 4;
                continue;
            }
        }
        for (; single > 0; single--) {
            end += bt_json_float(end, values[i++]);
            *end++ = ',';
        }
    }
    return (size_t)(end - out) - 1U;
}

#endif
