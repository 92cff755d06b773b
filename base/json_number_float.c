/* Floats as log-probabilities are, between 1e-5 and 100 in size, many at a time; all others go to
 * json_number.c. The rule is the same (the fewest digits that read back as the same double), but a
 * widened float m 2^(e - 23) has 24 bits only, and that makes every step exact in a word or two:
 *
 *   - Let 10^k be the power where a double's interval 2^(e - 52) is one to ten units wide. k
 *     depends on e alone (the choice of the Schubfach method, see json_number.c), so all that
 *     depends on e stands in a table of 24 binades.
 *   - x in these units is m * 2^(e - 23) / 10^k; for k < 0 that is an integer times a power of two,
 *     so it is had without rounding: `below` and a fraction of 64 bits.
 *   - The numbers that read back as x reach from it as far up as down (but for powers of two, whose
 *     lower neighbour is nearer: of the few there are here none has a candidate in between). So
 * when any multiple of ten units reads back, the nearest one does. Else the nearest unit is the
 * answer, the even one of two alike. The ends of the interval never are units: they are odd
 * multiples of 2^(e - 53).
 *   - The answer has 16 or 17 digits with zeros at its end, and they stand at places that depend on
 *     e alone: sixteen of them end the text, what is in front of those comes from a table.
 *
 * tests/vectors/json_number_table.py prints the tables and proves the bounds; all floats were
 * compared: test_json_number --all. */
#include "base/json_number.h"

#include <string.h>

#include "base/compiler.h"
#include "base/json_number_internal.h"
#ifdef BT_JSON_SSE2
#include <emmintrin.h>
#endif

/* The bits of the first float from 1e-5 on, and of 100. */
#define SIZE_MIN 0x3727c5adU
#define SIZE_END 0x42c80000U

enum { FLOAT_BIAS = 127, FRACTION_BITS = 23 };
static const uint32_t FRACTION = (1U << FRACTION_BITS) - 1U;

/* The place of the highest bit. */
static inline unsigned last_set(unsigned word) {
    return 31U - (unsigned)__builtin_clz(word);
}

/* Sixteen digits at `out`; gives how many there are without zeros at the end, 1 of zero. */
#ifdef BT_JSON_SSE2
/* As bt_json_eight_digits, both words at once. */
static inline unsigned write_tail(char *out, uint32_t upper, uint32_t lower) {
    const __m128i eights = _mm_set_epi64x((long long)lower, (long long)upper);
    /* floor(x / 10^4) = floor(x * ceil(2^45 / 10^4) / 2^45) for x < 10^8 */
    const __m128i quotients =
        _mm_srli_epi64(_mm_mul_epu32(eights, _mm_set1_epi64x(0xd1b71759)), 45);
    const __m128i rest = _mm_sub_epi64(eights, _mm_mul_epu32(quotients, _mm_set1_epi64x(10000)));
    const __m128i fours = _mm_or_si128(quotients, _mm_slli_epi64(rest, 32));
    const __m128i hundreds = _mm_srli_epi16(_mm_mulhi_epu16(fours, _mm_set1_epi16(5243)), 3);
    const __m128i twos = _mm_or_si128(
        hundreds,
        _mm_slli_epi32(_mm_sub_epi16(fours, _mm_mullo_epi16(hundreds, _mm_set1_epi16(100))), 16));
    const __m128i tens = _mm_srli_epi16(_mm_mullo_epi16(twos, _mm_set1_epi16(103)), 10);
    const __m128i digits = _mm_or_si128(
        tens, _mm_slli_epi16(_mm_sub_epi16(twos, _mm_mullo_epi16(tens, _mm_set1_epi16(10))), 8));
    _mm_storeu_si128((__m128i *)(void *)out, _mm_or_si128(digits, _mm_set1_epi8('0')));
    const int zeros = _mm_movemask_epi8(_mm_cmpeq_epi8(digits, _mm_setzero_si128()));
    return last_set(((unsigned)zeros ^ 0xffffU) | 1U) + 1U;
}
#else
static inline unsigned write_tail(char *out, uint32_t upper, uint32_t lower) {
    const uint64_t first = bt_json_eight_digits(upper);
    const uint64_t second = bt_json_eight_digits(lower);
    const uint64_t first_text = first | BT_JSON_ZEROS;
    const uint64_t second_text = second | BT_JSON_ZEROS;
    memcpy(out, &first_text, sizeof first_text);
    memcpy(out + 8, &second_text, sizeof second_text);
    /* The | 1 counts one digit of zero, and no more of anything else. */
    const uint64_t last = second != 0 ? second : first | 1U;
    return (second != 0 ? 16U : 8U) - (unsigned)__builtin_clzll(last) / 8U;
}
#endif

static inline size_t write_float(char *out, uint32_t bits) {
    const uint32_t size = bits & 0x7fffffffU;
    if (BT_UNLIKELY(size - SIZE_MIN >= SIZE_END - SIZE_MIN)) {
        float value;
        memcpy(&value, &bits, sizeof value);
        return bt_json_double(out, (double)value);
    }
    const bt_json_binade *b =
        &bt_json_binades[(size >> FRACTION_BITS) - (FLOAT_BIAS + BT_JSON_BINADE_MIN)];
    const uint64_t m = (size & FRACTION) | (FRACTION + 1U);
    const bt_u128 product = (bt_u128)m * b->part;
    const uint64_t below = m * b->whole + (uint64_t)(product >> 64);
    const uint64_t fraction = (uint64_t)product;
    /* The distances to the multiples of ten on either side, in 2^-60. Which candidate wins is as
     * good as random, so that a wrong guess costs more than computing them all. */
    const uint64_t tens = below / 10U;
    const uint64_t down = (below - 10U * tens) << 60 | fraction >> 4;
    const uint64_t up = (10ULL << 60) - down;
    const uint64_t is_upper_ten_in = up <= b->reach;
    const uint64_t has_ten = (down <= b->reach) | is_upper_ten_in;
    const uint64_t is_nearer_up = fraction + (below & 1U) > 1ULL << 63;
    const uint64_t units = below + is_nearer_up;
    const uint64_t units_of_ten = 10U * (tens + is_upper_ten_in);
    const uint64_t digits = (units ^ ((units ^ units_of_ten) & (0U - has_ten))) * b->scale;

    const uint64_t upper = digits / 100000000U;
    const uint64_t start = upper / 100000000U;
    const char *text = bt_json_starts[b->start + start];
    const size_t sign = bits >> 31;
    out[0] = '-';
    memcpy(out + sign, text, 8);
    const size_t length = sign + (unsigned char)text[7];
    return length + write_tail(out + length, (uint32_t)(upper - start * 100000000U),
                               (uint32_t)(digits - upper * 100000000U));
}

size_t bt_json_float(char *out, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return write_float(out, bits);
}

size_t bt_json_floats(char *out, const float *values, size_t count) {
#ifdef BT_JSON_AVX2
    if (count >= 4 && __builtin_cpu_supports("avx2"))
        return bt_json_floats_avx2(out, values, count);
#endif
    char *end = out;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        end += write_float(end, bits);
        *end++ = ',';
    }
    return count > 0 ? (size_t)(end - out) - 1U : 0U;
}
