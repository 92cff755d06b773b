/* Work that is cut by place: every unit once, in runs that may be, whatever the numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "kernels/host/dev_host_internal.h"

enum { UNITS_MAX = 1000, THREADS_MAX = 7 };

typedef struct record {
    _Atomic uint32_t times[UNITS_MAX]; /* each unit was run */
    _Atomic uint32_t faults;           /* runs that may not be */
    uint32_t units, align, run_min, threads;
} record;

/* Whether a thread's stretch begins or ends at this unit. */
static bool is_stretch_end(const record *r, uint32_t unit) {
    for (uint32_t t = 0; t <= r->threads; t++)
        if ((uint64_t)r->units * t / r->threads == unit) return true;
    return false;
}

static void run(void *context, uint32_t begin, uint32_t end, uint32_t thread) {
    record *r = context;
    const bool is_aligned = (begin % r->align == 0 || is_stretch_end(r, begin)) &&
                            (end % r->align == 0 || is_stretch_end(r, end));
    const bool is_long = end - begin >= r->run_min || is_stretch_end(r, end);
    if (begin >= end || end > r->units || thread >= r->threads || !is_aligned || !is_long) {
        atomic_fetch_add(&r->faults, 1);
        return;
    }
    for (uint32_t i = begin; i < end; i++)
        atomic_fetch_add(&r->times[i], 1);
}

static void check(dev_host *dev, uint32_t units, uint32_t align, uint32_t run_min) {
    static record r;
    memset(&r, 0, sizeof r);
    r.units = units;
    r.align = align;
    r.run_min = run_min;
    r.threads = dev_host_threads(dev);
    host_run_stretches(
        dev, &(host_work){
                 .units = units, .align = align, .run_min = run_min, .run = run, .context = &r});
    assert_int_equal(r.faults, 0);
    for (uint32_t i = 0; i < units; i++)
        assert_int_equal(r.times[i], 1);
}

static void every_unit_is_run_once(void **state) {
    (void)state;
    static const uint32_t counts[] = {0, 1, 2, 3, 5, 8, 9, 15, 18, 30, 64, 97, 768, UNITS_MAX};
    for (uint32_t threads = 1; threads <= THREADS_MAX; threads++) {
        dev_host *dev;
        bt_error error;
        const dev_host_options options = {.threads = threads, .head_dim_max = 64, .group_max = 1};
        assert_int_equal(dev_host_create(&options, &dev, &error), BT_OK);
        for (size_t i = 0; i < BT_ARRAY_COUNT(counts); i++)
            for (uint32_t align = 1; align <= 2; align++)
                for (uint32_t run_min = 1; run_min <= 8; run_min += 7)
                    check(dev, counts[i], align, run_min);
        dev_host_destroy(dev);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_unit_is_run_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
