/* The pool runs every item once, on distinct threads, and shows the caller what they wrote; also
 * when runs follow each other at once, and when the workers have gone to sleep in between. */
#include "kernels/host/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include <cmocka.h>

#include "base/compiler.h"

enum { ITEMS_MAX = 1000, THREADS_MAX = 8 };

typedef struct counts {
    uint32_t runs_of[ITEMS_MAX]; /* plain: the pool orders the accesses */
    atomic_int inside[THREADS_MAX];
    atomic_int overlaps;
    uint32_t threads;
    uint32_t number;
} counts;

static void count_item(void *context, uint32_t item, uint32_t thread) {
    counts *c = context;
    if (thread >= c->threads || atomic_fetch_add(&c->inside[thread], 1) != 0)
        atomic_fetch_add(&c->overlaps, 1);
    c->runs_of[item] += c->number;
    atomic_fetch_sub(&c->inside[thread], 1);
}

static void check_run(pool *p, counts *c, uint32_t items) {
    for (uint32_t i = 0; i < ITEMS_MAX; i++)
        c->runs_of[i] = 0;
    c->number++;
    pool_run(p, items, count_item, c);
    for (uint32_t i = 0; i < ITEMS_MAX; i++)
        assert_int_equal(c->runs_of[i], i < items ? c->number : 0);
    assert_int_equal(c->overlaps, 0);
}

static void every_item_runs_once(void **state) {
    (void)state;
    static const uint32_t sizes[] = {0, 1, 2, 3, 7, 64, 999, ITEMS_MAX};
    for (uint32_t threads = 1; threads <= THREADS_MAX; threads += threads < 3 ? 1 : 5) {
        pool *p;
        assert_int_equal(pool_create(threads, &p), BT_OK);
        assert_int_equal(pool_threads(p), threads);
        counts c = {.threads = threads};
        for (size_t i = 0; i < BT_ARRAY_COUNT(sizes); i++)
            check_run(p, &c, sizes[i]);
        pool_destroy(p);
    }
}

static void runs_follow_each_other_at_once(void **state) {
    (void)state;
    pool *p;
    assert_int_equal(pool_create(3, &p), BT_OK);
    counts c = {.threads = 3};
    for (uint32_t run = 0; run < 3000; run++)
        check_run(p, &c, 2 + run % 5);
    pool_destroy(p);
}

/* The caller stays busy for longer than the workers spin, so that they sleep; and an item of the
 * next run is slow, so that the caller sleeps. */
static void busy_us(int64_t microseconds) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - start.tv_sec) * 1000000 + (now.tv_nsec - start.tv_nsec) / 1000 <
             microseconds);
}

static void slow_item(void *context, uint32_t item, uint32_t thread) {
    if (thread != 0) busy_us(4 * POOL_SPIN_US);
    count_item(context, item, thread);
}

static void sleepers_wake(void **state) {
    (void)state;
    pool *p;
    assert_int_equal(pool_create(3, &p), BT_OK);
    counts c = {.threads = 3};
    for (uint32_t run = 0; run < 50; run++) {
        for (uint32_t i = 0; i < ITEMS_MAX; i++)
            c.runs_of[i] = 0;
        c.number++;
        busy_us(4 * POOL_SPIN_US);
        pool_run(p, 5, slow_item, &c);
        for (uint32_t i = 0; i < 5; i++)
            assert_int_equal(c.runs_of[i], c.number);
    }
    pool_destroy(p);
}

static void bad_sizes_are_refused(void **state) {
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_create(0, &p), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(pool_create(POOL_THREADS_MAX + 1, &p), BT_ERR_CALLER_ARGUMENT);
    assert_null(p);
    pool_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_runs_once),
        cmocka_unit_test(runs_follow_each_other_at_once),
        cmocka_unit_test(sleepers_wake),
        cmocka_unit_test(bad_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
