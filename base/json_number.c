/* Shortest decimal digits by the Schubfach method (R. Giulietti, "The Schubfach way to render
 * doubles", 2021), then their text, eight digits at a time.
 *
 * A double c 2^q stands for all reals up to half way to its neighbours. At the power k where that
 * interval is at least one and less than ten units of 10^k wide, it holds at most one multiple of
 * 10^(k+1), and one or more of 10^k: the first, else the nearest of the others, is the answer. The
 * ends of the interval and the value are computed in units of 10^k / 4 with a rounding ("to odd")
 * that keeps every comparison right. */
#include "base/json_number.h"

#include <stdbool.h>
#include <string.h>

#include "base/compiler.h"
#include "base/json_number_internal.h"

/* digits * 10^exponent, digits in [1, 10^17). */
typedef struct decimal {
    uint64_t digits;
    int exponent;
} decimal;

enum { DIGITS_MAX = 17, POINT_MIN = -4, POINT_MAX = 16 };

static const uint64_t powers_of_ten[DIGITS_MAX + 1] = {
    1U,
    10U,
    100U,
    1000U,
    10000U,
    100000U,
    1000000U,
    10000000U,
    100000000U,
    1000000000U,
    10000000000U,
    100000000000U,
    1000000000000U,
    10000000000000U,
    100000000000000U,
    1000000000000000U,
    10000000000000000U,
    100000000000000000U,
};

/* These three hold over every exponent that occurs (proved by tests/vectors/json_number_table.py).
 * The shifts of negative numbers round down. */
static inline int floor_log10_of_power2(int e) {
    return (e * 1262611) >> 22;
}
static inline int floor_log10_of_three_quarters_power2(int e) {
    return (e * 1262611 - 524031) >> 22;
}
static inline int floor_log2_of_power10(int e) {
    return (e * 1741647) >> 19;
}

/* The product over 2^128, rounded down, with the last bit set when anything was cut off. */
static inline uint64_t multiply_to_odd(bt_json_power power, uint64_t x) {
    const bt_u128 low = (bt_u128)power.low * x;
    const bt_u128 high = (bt_u128)power.high * x + (uint64_t)(low >> 64);
    return (uint64_t)(high >> 64) | ((uint64_t)high > 1U ? 1U : 0U);
}

/* value = c 2^q, c > 0; is_uneven: the lower neighbour is half as far as the upper one. */
static inline decimal shortest(uint64_t c, int q, bool is_uneven) {
    const uint64_t odd = c & 1U; /* a tie reads back as the even neighbour */
    const int k = is_uneven ? floor_log10_of_three_quarters_power2(q) : floor_log10_of_power2(q);
    const int h = q + floor_log2_of_power10(-k) + 1;
    const bt_json_power power = bt_json_powers[-k - BT_JSON_POWER_MIN];
    const uint64_t middle = multiply_to_odd(power, 4U * c << h);
    const uint64_t low = multiply_to_odd(power, (4U * c - 2U + (is_uneven ? 1U : 0U)) << h) + odd;
    const uint64_t high = multiply_to_odd(power, (4U * c + 2U) << h) - odd;
    /* Which candidate wins is as good as random, and a wrong guess of the processor costs more than
     * computing them all; masks keep the compiler from guessing. */
    const uint64_t below = middle / 4U;
    const uint64_t tens = below / 10U;
    const uint64_t is_upper_ten_in = 40U * tens + 40U <= high;
    const uint64_t has_ten = ((low <= 40U * tens) ^ is_upper_ten_in) & (below >= 10U);
    const uint64_t is_upper_in = 4U * below + 4U <= high;
    const uint64_t has_one = (low <= 4U * below) ^ is_upper_in;
    /* (4 below + 2) is half way up; a tie goes to the even one. */
    const uint64_t is_nearer_up = (middle & 3U) + (below & 1U) > 2U;
    const uint64_t digits = below + ((has_one & is_upper_in) | (~has_one & is_nearer_up));
    const uint64_t digits_of_ten = tens + is_upper_ten_in;
    return (decimal){digits ^ ((digits ^ digits_of_ten) & (0U - has_ten)), k + (int)has_ten};
}

static inline unsigned leading_zero_bytes(uint64_t word) {
    return (unsigned)__builtin_clzll(word) / 8U;
}

/* The digits of a decimal, zeros up to seventeen. */
typedef struct digit_text {
    char first;
    uint64_t next; /* eight characters each */
    uint64_t last;
    unsigned significant; /* without zeros at the end; >= 1 */
    int point;            /* digits before the decimal point; <= 0: zeros after it */
} digit_text;

static inline unsigned count_digits(uint64_t x) {
    const unsigned bits = 64U - (unsigned)__builtin_clzll(x);
    const unsigned guess = bits * 1233U >> 12; /* floor(bits * log10 2) */
    return guess + (x >= powers_of_ten[guess] ? 1U : 0U);
}

static inline digit_text spell(decimal d) {
    const unsigned count = count_digits(d.digits);
    const uint64_t padded = d.digits * powers_of_ten[DIGITS_MAX - count];
    const uint32_t first_nine = (uint32_t)(padded / 100000000U);
    const uint64_t next = bt_json_eight_digits(first_nine % 100000000U);
    const uint64_t last = bt_json_eight_digits((uint32_t)(padded % 100000000U));
    unsigned significant = 1;
    if (last != 0) {
        significant = 17U - leading_zero_bytes(last);
    } else if (next != 0) {
        significant = 9U - leading_zero_bytes(next);
    }
    return (digit_text){
        .first = (char)('0' + first_nine / 100000000U),
        .next = next + BT_JSON_ZEROS,
        .last = last + BT_JSON_ZEROS,
        .significant = significant,
        .point = d.exponent + (int)count,
    };
}

static inline void store_digits(char *out, const digit_text *text) {
    out[0] = text->first;
    memcpy(out + 1, &text->next, sizeof text->next);
    memcpy(out + 9, &text->last, sizeof text->last);
}

static size_t write_exponent(char *out, int exponent) {
    size_t length = 0;
    out[length++] = 'e';
    if (exponent < 0) out[length++] = '-';
    const unsigned size = (unsigned)(exponent < 0 ? -exponent : exponent);
    if (size >= 100U) out[length++] = (char)('0' + size / 100U);
    if (size >= 10U) out[length++] = (char)('0' + size / 10U % 10U);
    out[length++] = (char)('0' + size % 10U);
    return length;
}

/* 12.34 and 1234.0, for a point after the first digit. */
static inline size_t write_large(char *out, const digit_text *text) {
    const size_t point = (size_t)text->point;
    char digits[2 * DIGITS_MAX];
    memset(digits + DIGITS_MAX, '0', DIGITS_MAX);
    store_digits(digits, text);
    memcpy(out, digits, POINT_MAX);
    out[point] = '.';
    memcpy(out + point + 1, digits + point, DIGITS_MAX - 1);
    return (text->significant > point ? text->significant : point + 1U) + 1U;
}

/* 0.00012, 0.12 and 1.2 in one: between -1 and -0.1 or beyond is not worth a guess. */
static inline size_t write_small(char *out, const digit_text *text) {
    const size_t start = (size_t)(2 - text->point);
    const size_t length = start + text->significant;
    memcpy(out, "0.000000", 8);
    store_digits(out + start, text);
    out[0] = text->point > 0 ? text->first : '0';
    out[1] = '.';
    return length > 3 ? length : 3; /* 1.0 */
}

/* 1.2e-7 */
static size_t write_scientific(char *out, const digit_text *text) {
    store_digits(out + 1, text);
    out[0] = text->first;
    out[1] = '.';
    const size_t length = text->significant == 1 ? 1U : text->significant + 1U;
    return length + write_exponent(out + length, text->point - 1);
}

size_t bt_json_double(char *out, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint64_t fraction = bits & 0x000fffffffffffffU;
    const unsigned biased = (unsigned)(bits >> 52) & 0x7ffU;
    if (BT_UNLIKELY(biased == 0x7ffU)) {
        memcpy(out, "null", 4);
        return 4;
    }
    out[0] = '-';
    const size_t sign = bits >> 63;
    out += sign;
    if ((bits << 1) == 0) {
        memcpy(out, "0.0", 3);
        return sign + 3;
    }
    const bool is_normal = biased != 0;
    const uint64_t c = is_normal ? fraction | 0x0010000000000000U : fraction;
    const int q = (is_normal ? (int)biased : 1) - 1075;
    const digit_text text = spell(shortest(c, q, fraction == 0 && biased > 1));
    if (BT_LIKELY(text.point >= POINT_MIN && text.point <= 1))
        return sign + write_small(out, &text);
    if (text.point > 1 && text.point <= POINT_MAX) return sign + write_large(out, &text);
    return sign + write_scientific(out, &text);
}
