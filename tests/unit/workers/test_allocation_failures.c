/* One allocation after the other fails in a reservation, in a prompt's arrival, and in steps and
 * streams: the request ends one way or the other, nothing is lost, and the next one is served. The
 * mover is left alone (its own tests fail it). Needs the fault build. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "world.h"

enum { FAULTS_MAX = 400, PROMPT = 60, ROWS = 300 };

static world_stream stream;

static void arm(uint64_t nth) {
    bt_fault_set(BT_FAULT_ALLOC, nth);
}

/* true when the fault came to pass; switches it off. */
static bool disarm(uint64_t nth) {
    const bool is_hit = bt_fault_visits(BT_FAULT_ALLOC) >= nth;
    bt_fault_set(BT_FAULT_ALLOC, 0);
    return is_hit;
}

static void expect_next_is_served(world *w, const proto_generation *g) {
    world_settle(w);
    world_expect_empty(w);
    const proto_attempt next = world_start(w, 40, g, UINT64_MAX);
    world_settle(w);
    world_read(w, next, &stream);
    assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
    world_expect_rows(w, &stream, 40, g, g->max_new_tokens);
    world_expect_empty(w);
}

static void in_a_reservation(void **state) {
    (void)state;
    bool is_hit = true;
    uint32_t refused = 0;
    for (uint32_t nth = 1; is_hit && nth < FAULTS_MAX; nth++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation g = world_generation(6, SAMPLER_MASK_SUPPORT);
        const proto_attempt a = world_new_attempt(w);
        arm(nth);
        const proto_reservation slot = world_reserve(w, a, PROMPT, &g, UINT64_MAX);
        is_hit = disarm(nth);
        refused += slot.status != BT_OK;
        if (slot.status != BT_OK) assert_int_equal(slot.status, BT_ERR_WORKER_MEMORY);
        world_cancel(w, &w->decode, a);
        expect_next_is_served(w, &g);
        world_destroy(w);
    }
    assert_false(is_hit); /* every one had its turn */
    assert_true(refused > 0);
}

static void in_a_prompts_arrival(void **state) {
    (void)state;
    bool is_hit = true;
    uint32_t refused = 0;
    for (uint32_t nth = 1; is_hit && nth < FAULTS_MAX; nth++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation g = world_generation(6, SAMPLER_MASK_SUPPORT);
        const proto_attempt a = world_new_attempt(w);
        const proto_reservation slot = world_reserve(w, a, PROMPT, &g, UINT64_MAX);
        assert_int_equal(slot.status, BT_OK);
        arm(nth);
        world_run(w, a, &slot, PROMPT, &g, 25);
        is_hit = disarm(nth);
        world_settle(w);
        proto_message done;
        assert_true(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
        refused += done.prefill_done.status != BT_OK;
        world_cancel(w, &w->decode, a);
        expect_next_is_served(w, &g);
        world_destroy(w);
    }
    assert_false(is_hit);
    assert_true(refused > 0);
}

/* Arrays of a step that could not grow for a request are there for a smaller one behind it. */
static void where_arrays_of_rows_grow(void **state) {
    (void)state;
    bool is_hit = true;
    uint32_t refused = 0;
    for (uint32_t nth = 1; is_hit && nth < FAULTS_MAX; nth++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation one = world_generation(1, SAMPLER_MASK_SUPPORT);
        proto_generation many = one;
        many.samples = 4;
        expect_next_is_served(w, &one);
        const proto_attempt a = world_new_attempt(w);
        const proto_reservation slot = world_reserve(w, a, PROMPT, &many, UINT64_MAX);
        assert_int_equal(slot.status, BT_OK);
        arm(nth);
        world_run(w, a, &slot, PROMPT, &many, PROMPT);
        is_hit = disarm(nth);
        world_settle(w);
        proto_message done;
        while (world_take(&w->prefill, PROTO_PREFILL_DONE, &done))
            refused += done.prefill_done.status != BT_OK;
        world_cancel(w, &w->prefill, a);
        world_cancel(w, &w->decode, a);
        expect_next_is_served(w, &one);
        world_destroy(w);
    }
    assert_false(is_hit); /* every one had its turn */
    assert_true(refused > 1);
}

static void in_steps_and_streams(void **state) {
    (void)state;
    bool is_hit = true;
    for (uint32_t nth = 1; is_hit && nth < FAULTS_MAX; nth++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation g = world_generation(ROWS, SAMPLER_MASK_SUPPORT);
        w->decode.is_compute_held = true;
        const proto_attempt a = world_start(w, PROMPT, &g, 2000);
        world_settle(w); /* row 0 is out */
        w->is_network_held = true;
        w->decode.is_compute_held = false;
        arm(nth);
        world_settle(w);
        world_credit(w, a, 1 << 20);
        world_settle(w);
        is_hit = disarm(nth);
        w->is_network_held = false;
        world_advance(w, 100 * 1000); /* what could not be had is tried again */
        world_read(w, a, &stream);
        assert_true(stream.has_finish);
        if (stream.last.finish == PROTO_FINISH_ERROR) {
            assert_int_equal(stream.last.status, BT_ERR_WORKER_MEMORY);
            assert_int_equal(stream.last.rows_total, stream.row_count);
            world_expect_rows(w, &stream, PROMPT, &g, stream.row_count);
        } else {
            world_expect_rows(w, &stream, PROMPT, &g, ROWS);
        }
        const proto_generation few = world_generation(6, SAMPLER_MASK_SUPPORT);
        expect_next_is_served(w, &few);
        world_destroy(w);
    }
    assert_false(is_hit);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_a_reservation),
        cmocka_unit_test(in_a_prompts_arrival),
        cmocka_unit_test(where_arrays_of_rows_grow),
        cmocka_unit_test(in_steps_and_streams),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
