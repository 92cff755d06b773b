/* The ring: order, bounds, sleeping and waking; and two threads over it, which ThreadSanitizer
 * watches in its build. */
#include "base/ring.h"

#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static bool is_readable(const bt_ring *ring) {
    struct pollfd p = {.fd = bt_ring_get_fd(ring), .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void keeps_order_and_bounds(void **state) {
    (void)state;
    bt_ring *ring = NULL;
    assert_int_equal(bt_ring_create(4, sizeof(uint32_t), &ring), BT_OK);
    uint32_t out = 0;
    uint32_t in = 0;
    uint32_t expected = 0;
    assert_false(bt_ring_pop(ring, &out));
    for (int round = 0; round < 5; round++) {
        while (bt_ring_push(ring, &in))
            in++;
        assert_int_equal(bt_ring_count(ring), 4);
        for (int i = 0; i < 3; i++) {
            assert_true(bt_ring_pop(ring, &out));
            assert_int_equal(out, expected++);
        }
    }
    while (bt_ring_pop(ring, &out))
        assert_int_equal(out, expected++);
    assert_int_equal(expected, in);
    assert_int_equal(bt_ring_count(ring), 0);
    bt_ring_destroy(ring);
    bt_ring_destroy(NULL);
}

static void wakes_only_a_sleeper(void **state) {
    (void)state;
    bt_ring *ring = NULL;
    assert_int_equal(bt_ring_create(8, sizeof(int), &ring), BT_OK);
    int item = 7;
    assert_false(is_readable(ring));
    assert_true(bt_ring_push(ring, &item)); /* a new ring is armed */
    assert_true(is_readable(ring));
    bt_ring_disarm(ring);
    assert_false(is_readable(ring));
    assert_true(bt_ring_push(ring, &item)); /* the consumer is awake */
    assert_false(is_readable(ring));
    assert_false(bt_ring_arm(ring)); /* there are items */
    assert_true(bt_ring_pop(ring, &item));
    assert_true(bt_ring_pop(ring, &item));
    assert_true(bt_ring_arm(ring));
    assert_true(bt_ring_push(ring, &item));
    assert_true(is_readable(ring));
    assert_true(bt_ring_wait(ring, -1));
    assert_true(bt_ring_pop(ring, &item));
    assert_false(bt_ring_wait(ring, 0));
    bt_ring_destroy(ring);
}

enum { ITEMS = 50000 };

static void *produce(void *context) {
    bt_ring *ring = context;
    for (uint64_t i = 0; i < ITEMS; i++) {
        const uint64_t item[2] = {i, ~i};
        while (!bt_ring_push(ring, item))
            (void)poll(NULL, 0, 0);
    }
    return NULL;
}

static void two_threads_lose_nothing(void **state) {
    (void)state;
    bt_ring *ring = NULL;
    assert_int_equal(bt_ring_create(16, 2 * sizeof(uint64_t), &ring), BT_OK);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, produce, ring), 0);
    uint64_t expected = 0;
    while (expected < ITEMS) {
        assert_true(bt_ring_wait(ring, -1)); /* an old wake-up is no item */
        uint64_t item[2];
        while (bt_ring_pop(ring, item)) {
            assert_true(item[0] == expected && item[1] == ~expected);
            expected++;
        }
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    bt_ring_destroy(ring);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_order_and_bounds),
        cmocka_unit_test(wakes_only_a_sleeper),
        cmocka_unit_test(two_threads_lose_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
