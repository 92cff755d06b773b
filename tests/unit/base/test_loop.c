/* The loop: its step runs before every block, sources call back, signals stop it. */
#include "base/loop.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/ring.h"

typedef struct world {
    bt_loop *loop;
    bt_loop_source *source;
    bt_ring *ring;
    int steps, calls, steps_at_call;
    int popped;
} world;

static bool count_step(void *context) {
    world *w = context;
    w->steps++;
    return false;
}

static void stop_after_three(void *context) {
    world *w = context;
    w->calls++;
    w->steps_at_call = w->steps;
    if (w->calls == 3) bt_loop_stop(w->loop);
}

static void periodic_timers_and_steps(void **state) {
    (void)state;
    world w = {0};
    assert_int_equal(bt_loop_create(&w.loop), BT_OK);
    assert_int_equal(bt_loop_every(w.loop, 100, stop_after_three, &w, &w.source), BT_OK);
    assert_int_equal(bt_loop_run(w.loop, count_step, &w), BT_OK);
    assert_int_equal(w.calls, 3);
    assert_true(w.steps >= 3); /* one before each block */
    bt_loop_source_free(w.source);
    bt_loop_destroy(w.loop);
    bt_loop_destroy(NULL);
}

static bool stop_when_counted(void *context) {
    world *w = context;
    if (++w->steps == 10) bt_loop_stop(w->loop);
    return true; /* never sleeps: without this the loop would block for ever */
}

static void a_busy_step_does_not_block(void **state) {
    (void)state;
    world w = {0};
    assert_int_equal(bt_loop_create(&w.loop), BT_OK);
    assert_int_equal(bt_loop_run(w.loop, stop_when_counted, &w), BT_OK);
    assert_int_equal(w.steps, 10);
    bt_loop_destroy(w.loop);
}

static void free_self_and_stop(void *context) {
    world *w = context;
    w->calls++;
    bt_loop_source_free(w->source);
    bt_loop_stop(w->loop);
}

static void one_shot_timer_frees_itself(void **state) {
    (void)state;
    world w = {0};
    assert_int_equal(bt_loop_create(&w.loop), BT_OK);
    assert_int_equal(bt_loop_timer(w.loop, free_self_and_stop, &w, &w.source), BT_OK);
    bt_loop_timer_start(w.source, 5000000);
    bt_loop_timer_stop(w.source);
    bt_loop_timer_start(w.source, 10);
    assert_int_equal(bt_loop_run(w.loop, NULL, NULL), BT_OK);
    assert_int_equal(w.calls, 1);
    bt_loop_destroy(w.loop);
}

static void drain_ring(void *context) {
    world *w = context;
    int item = 0;
    bt_ring_disarm(w->ring);
    do {
        while (bt_ring_pop(w->ring, &item))
            w->popped += item;
    } while (!bt_ring_arm(w->ring));
    bt_loop_stop(w->loop);
}

static void a_ring_wakes_the_loop(void **state) {
    (void)state;
    world w = {0};
    assert_int_equal(bt_loop_create(&w.loop), BT_OK);
    assert_int_equal(bt_ring_create(4, sizeof(int), &w.ring), BT_OK);
    assert_int_equal(bt_loop_watch(w.loop, bt_ring_get_fd(w.ring), drain_ring, &w, &w.source),
                     BT_OK);
    for (int i = 1; i <= 3; i++)
        assert_true(bt_ring_push(w.ring, &i));
    assert_int_equal(bt_loop_run(w.loop, NULL, NULL), BT_OK);
    assert_int_equal(w.popped, 6);
    bt_loop_source_free(w.source);
    bt_ring_destroy(w.ring);
    bt_loop_destroy(w.loop);
}

static void raise_term(void *context) {
    (void)context;
    (void)kill(getpid(), SIGTERM);
}

static void note_stop(void *context) {
    world *w = context;
    w->calls++;
    bt_loop_stop(w->loop);
}

static void signals_stop_the_loop(void **state) {
    (void)state;
    world w = {0};
    assert_int_equal(bt_loop_create(&w.loop), BT_OK);
    assert_int_equal(bt_loop_handle_stop_signals(w.loop, note_stop, &w), BT_OK);
    assert_int_equal(bt_loop_timer(w.loop, raise_term, &w, &w.source), BT_OK);
    bt_loop_timer_start(w.source, 1);
    assert_int_equal(bt_loop_run(w.loop, NULL, NULL), BT_OK);
    assert_int_equal(w.calls, 1);
    bt_loop_source_free(w.source);
    bt_loop_destroy(w.loop);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(periodic_timers_and_steps),   cmocka_unit_test(a_busy_step_does_not_block),
        cmocka_unit_test(one_shot_timer_frees_itself), cmocka_unit_test(a_ring_wakes_the_loop),
        cmocka_unit_test(signals_stop_the_loop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
