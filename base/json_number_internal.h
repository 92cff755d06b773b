/* Powers of ten for json_number.c. */
#ifndef BT_BASE_JSON_NUMBER_INTERNAL_H
#define BT_BASE_JSON_NUMBER_INTERNAL_H

#include <stdint.h>

enum { BT_JSON_POWER_MIN = -292, BT_JSON_POWER_MAX = 324 };

/* 10^e = (high 2^64 + low) 2^r, rounded up, where the top bit of high is set. */
typedef struct bt_json_power {
    uint64_t high;
    uint64_t low;
} bt_json_power;

extern const bt_json_power bt_json_powers[BT_JSON_POWER_MAX - BT_JSON_POWER_MIN + 1];

#endif
