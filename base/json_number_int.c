/* Integers as JSON text. A list is made for token ids: up to six digits, three at a time from
 * tables. */
#include "base/json_number.h"

#include <string.h>

#include "base/compiler.h"
#include "base/json_number_internal.h"

/* x < 10^8 without zeros in front. */
static inline size_t write_short(char *out, uint32_t x) {
    const uint64_t digits = bt_json_eight_digits(x);
    const unsigned skip = x == 0 ? 7U : (unsigned)__builtin_ctzll(digits) / 8U;
    const uint64_t text = (digits + BT_JSON_ZEROS) >> 8U * skip;
    memcpy(out, &text, sizeof text);
    return 8U - skip;
}

static inline void write_eight(char *out, uint32_t x) {
    const uint64_t text = bt_json_eight_digits(x) + BT_JSON_ZEROS;
    memcpy(out, &text, sizeof text);
}

size_t bt_json_int(char *out, int64_t value) {
    const uint64_t sign = value < 0 ? 1U : 0U;
    const uint64_t size = value < 0 ? 0U - (uint64_t)value : (uint64_t)value;
    out[0] = '-';
    out += sign;
    if (BT_LIKELY(size < 100000000U)) return sign + write_short(out, (uint32_t)size);
    const uint64_t upper = size / 100000000U;
    const uint32_t last = (uint32_t)(size % 100000000U);
    size_t length;
    if (upper < 100000000U) {
        length = write_short(out, (uint32_t)upper);
    } else {
        length = write_short(out, (uint32_t)(upper / 100000000U));
        write_eight(out + length, (uint32_t)(upper % 100000000U));
        length += 8;
    }
    write_eight(out + length, last);
    return sign + length + 8;
}

/* 000, to 999, : three digits and the comma behind them. */
#define ONES(a, b)                                                                                 \
    {a, b, '0', ','}, {a, b, '1', ','}, {a, b, '2', ','}, {a, b, '3', ','}, {a, b, '4', ','},      \
        {a, b, '5', ','}, {a, b, '6', ','}, {a, b, '7', ','}, {a, b, '8', ','}, {                  \
        a, b, '9', ','                                                                             \
    }
#define TENS(a)                                                                                    \
    ONES(a, '0'), ONES(a, '1'), ONES(a, '2'), ONES(a, '3'), ONES(a, '4'), ONES(a, '5'),            \
        ONES(a, '6'), ONES(a, '7'), ONES(a, '8'), ONES(a, '9')
static const char last_three[1000][4] = {TENS('0'), TENS('1'), TENS('2'), TENS('3'), TENS('4'),
                                         TENS('5'), TENS('6'), TENS('7'), TENS('8'), TENS('9')};

/* Without zeros in front, and their number behind. The 0 never occurs. */
#define LEAD_ONES(a, b)                                                                            \
    {a, b, '0', 3}, {a, b, '1', 3}, {a, b, '2', 3}, {a, b, '3', 3}, {a, b, '4', 3},                \
        {a, b, '5', 3}, {a, b, '6', 3}, {a, b, '7', 3}, {a, b, '8', 3}, {                          \
        a, b, '9', 3                                                                               \
    }
#define LEAD_TENS(a)                                                                               \
    LEAD_ONES(a, '0'), LEAD_ONES(a, '1'), LEAD_ONES(a, '2'), LEAD_ONES(a, '3'), LEAD_ONES(a, '4'), \
        LEAD_ONES(a, '5'), LEAD_ONES(a, '6'), LEAD_ONES(a, '7'), LEAD_ONES(a, '8'),                \
        LEAD_ONES(a, '9')
#define LEAD_TWO(a)                                                                                \
    {a, '0', 0, 2}, {a, '1', 0, 2}, {a, '2', 0, 2}, {a, '3', 0, 2}, {a, '4', 0, 2},                \
        {a, '5', 0, 2}, {a, '6', 0, 2}, {a, '7', 0, 2}, {a, '8', 0, 2}, {                          \
        a, '9', 0, 2                                                                               \
    }
static const char first_three[1000][4] = {
    {'0', 0, 0, 1}, {'1', 0, 0, 1}, {'2', 0, 0, 1}, {'3', 0, 0, 1}, {'4', 0, 0, 1}, {'5', 0, 0, 1},
    {'6', 0, 0, 1}, {'7', 0, 0, 1}, {'8', 0, 0, 1}, {'9', 0, 0, 1}, LEAD_TWO('1'),  LEAD_TWO('2'),
    LEAD_TWO('3'),  LEAD_TWO('4'),  LEAD_TWO('5'),  LEAD_TWO('6'),  LEAD_TWO('7'),  LEAD_TWO('8'),
    LEAD_TWO('9'),  LEAD_TENS('1'), LEAD_TENS('2'), LEAD_TENS('3'), LEAD_TENS('4'), LEAD_TENS('5'),
    LEAD_TENS('6'), LEAD_TENS('7'), LEAD_TENS('8'), LEAD_TENS('9')};

size_t bt_json_ints(char *out, const int32_t *values, size_t count) {
    char *end = out;
    for (size_t i = 0; i < count; i++) {
        const uint32_t x = (uint32_t)values[i];
        if (BT_UNLIKELY(x - 1000U >= 999000U)) { /* not four to six digits */
            end += bt_json_int(end, values[i]);
            *end++ = ',';
            continue;
        }
        const uint32_t thousands = x / 1000U;
        const char *first = first_three[thousands];
        memcpy(end, first, 4);
        end += first[3];
        memcpy(end, last_three[x - 1000U * thousands], 4);
        end += 4;
    }
    return count > 0 ? (size_t)(end - out) - 1U : 0U;
}
