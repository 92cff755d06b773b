/* CLOCK_MONOTONIC as a bt_clock. */
#include "base/clock.h"

#include <time.h>

static uint64_t system_now_us(void *context) {
    (void)context;
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

bt_clock bt_clock_system(void) {
    return (bt_clock){.now_us = system_now_us, .context = 0};
}
