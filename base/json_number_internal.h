/* What the sources of json_number.h share: tables, and eight digits at a time. */
#ifndef BT_BASE_JSON_NUMBER_INTERNAL_H
#define BT_BASE_JSON_NUMBER_INTERNAL_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "eight digits are stored as one word");

/* BT_JSON_PORTABLE: for tests, without vector instructions. */
#if defined(__SSE2__) && !defined(BT_JSON_PORTABLE)
#define BT_JSON_SSE2 1
#endif
#if defined(__x86_64__) && !defined(BT_JSON_PORTABLE)
#define BT_JSON_AVX2 1
/* bt_json_floats for processors with AVX2. */
size_t bt_json_floats_avx2(char *out, const float *values, size_t count);
#endif

enum { BT_JSON_POWER_MIN = -292, BT_JSON_POWER_MAX = 324 };

/* 10^e = (high 2^64 + low) 2^r, rounded up, where the top bit of high is set. */
typedef struct bt_json_power {
    uint64_t high;
    uint64_t low;
} bt_json_power;

extern const bt_json_power bt_json_powers[BT_JSON_POWER_MAX - BT_JSON_POWER_MIN + 1];

/* The floats m 2^(e - 23) of one exponent e, 2^23 <= m < 2^24, counted in units of 10^k: what
 * json_number_float.c says at its head. */
typedef struct bt_json_binade {
    uint64_t whole; /* 2^(e - 23) / 10^k = whole + part / 2^64, exactly */
    uint64_t part;
    uint64_t reach; /* half the distance of two doubles, in 2^-60, rounded down */
    uint32_t scale; /* 1, 10, 100: from this unit to that of the text's last digit */
    uint32_t start; /* in bt_json_starts */
} bt_json_binade;

enum { BT_JSON_BINADE_MIN = -17, BT_JSON_BINADE_MAX = 6, BT_JSON_STARTS = 150 };

extern const bt_json_binade bt_json_binades[BT_JSON_BINADE_MAX - BT_JSON_BINADE_MIN + 1];

/* The text in front of the last sixteen digits: at most seven characters, then their number. */
extern const char bt_json_starts[BT_JSON_STARTS][8];

/* Eight digits of x < 10^8 as bytes 0..9, the first one lowest: halves of four digits, then of two,
 * then of one, side by side in one word. */
static inline uint64_t bt_json_eight_digits(uint32_t x) {
    const uint64_t fours = x / 10000U | (uint64_t)(x % 10000U) << 32;
    const uint64_t hundreds = (fours * 10486U >> 20) & 0x0000007f0000007fU;
    const uint64_t twos = hundreds | (fours - 100U * hundreds) << 16;
    const uint64_t tens = (twos * 103U >> 10) & 0x000f000f000f000fU;
    return tens | (twos - 10U * tens) << 8;
}

static const uint64_t BT_JSON_ZEROS = 0x3030303030303030U; /* eight characters */

#endif
