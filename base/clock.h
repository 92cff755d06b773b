/* Time behind a table, so that the simulator can drive it. Times are microseconds of a monotonic
 * clock and are never compared between processes; across the wire only durations travel. */
#ifndef BT_BASE_CLOCK_H
#define BT_BASE_CLOCK_H

#include <stdint.h>

typedef struct bt_clock {
    uint64_t (*now_us)(void *context);
    void *context;
} bt_clock;

static inline uint64_t bt_clock_now_us(const bt_clock *clock) {
    return clock->now_us(clock->context);
}

/* The machine's monotonic clock. */
bt_clock bt_clock_system(void);

#endif
