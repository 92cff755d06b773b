/* Aborts: in every state of a sample, with the rows there are by then, and everything given back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "proto/row_stream.h"
#include "rig.h"

enum { ROWS = 60, PROMPT = 40 };

/* ---- drawing --------------------------------------------------------------------------------- */

/* Rows that wait for others go out, and the token of the step that runs counts. */
static void rows_that_wait_go_out(void **state) {
    (void)state;
    for (uint32_t drawn = 0; drawn < 12; drawn++) {
        rig *r = rig_create(NULL);
        r->is_compute_held = true;
        const proto_generation g = rig_generation(ROWS, 1);
        rig_attempt *a = rig_add(r, PROMPT, &g);
        while (a->id.counter % 5 != 4) /* rows that may wait for each other */
            a = rig_add(r, PROMPT, &g);
        assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
        rig_say_words(r, a, UINT32_MAX);
        rig_deliver(r, a, NULL);
        rig_settle(r);
        rig_run_steps(r, drawn);
        assert_true(rig_view(r).is_step_running);
        rig_abort(r, a, drawn % 2 == 0 ? 0 : PROTO_ALL_SAMPLES);
        rig_abort(r, a, 0); /* again: nothing more */
        rig_settle(r);
        rig_expect_silence(a, 0); /* not before the step is done */
        rig_run_steps(r, 1);
        rig_expect_abort(r, a, 0, 1 + drawn + 1);
        rig_expect_empty(r);
        rig_abort(r, a, 0);
        assert_int_equal(a->streams[0].finishes, 1);
        rig_destroy(r);
    }
}

static void a_neighbour_goes_on(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    r->is_compute_held = true;
    const proto_generation g = rig_generation(ROWS, 3);
    const rig_attempt *a = rig_start(r, PROMPT, &g, UINT64_MAX);
    const rig_attempt *b = rig_start(r, PROMPT, &g, UINT64_MAX);
    rig_settle(r);
    rig_run_steps(r, 5);
    rig_abort(r, a, 1);
    rig_abort(r, a, 3); /* there is none */
    rig_run_steps(r, 3);
    rig_abort(r, b, PROTO_ALL_SAMPLES);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, a, 0);
    rig_expect_answer(r, a, 2);
    const uint32_t rows = a->streams[1].last.rows_total;
    assert_in_range(rows, 6, 8);
    rig_expect_abort(r, a, 1, rows);
    for (uint32_t n = 0; n < 3; n++)
        rig_expect_abort(r, b, n, b->streams[n].last.rows_total);
    rig_destroy(r);
}

/* What the last step has to say of the end counts less than the abort; what was said before it
 * stands. */
static void an_abort_wins_within_the_step(void **state) {
    (void)state;
    for (uint32_t is_before = 0; is_before < 2; is_before++) {
        rig *r = rig_create(NULL);
        r->is_compute_held = true;
        const proto_generation g = rig_generation(4, 1);
        const rig_attempt *a = rig_start(r, PROMPT, &g, is_before ? 1 : UINT64_MAX);
        rig_settle(r);
        rig_run_steps(r, is_before ? 3 : 2);
        rig_abort(r, a, 0);
        if (!is_before) rig_run_steps(r, 1);
        rig_credit(r, a, 0, UINT64_MAX / 2);
        rig_settle(r);
        if (is_before) {
            rig_expect_answer(r, a, 0);
        } else {
            rig_expect_abort(r, a, 0, 4);
        }
        rig_destroy(r);
    }
}

/* ---- the handoff ----------------------------------------------------------------------------- */

static void before_the_handoff_there_are_no_rows(void **state) {
    (void)state;
    for (uint32_t deliveries = 0; deliveries < 2; deliveries++) {
        rig *r = rig_create(NULL);
        r->is_network_held = true;
        const proto_generation g = rig_generation(ROWS, 3);
        rig_attempt *a = rig_add(r, PROMPT, &g);
        assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
        rig_say_words(r, a, 3);
        if (deliveries > 0) rig_deliver(r, a, NULL);
        rig_abort(r, a, 1);
        rig_abort(r, a, 1);
        rig_expect_abort(r, a, 1, 0);
        rig_expect_silence(a, 0);
        assert_int_equal(rig_view(r).reserved, 1);
        rig_abort(r, a, PROTO_ALL_SAMPLES);
        for (uint32_t n = 0; n < 3; n++)
            rig_expect_abort(r, a, n, 0);
        assert_int_equal(rig_view(r).reserved, 0);
        r->is_network_held = false;
        rig_settle(r);
        rig_abort(r, a, PROTO_ALL_SAMPLES);
        rig_say_words(r, a, UINT32_MAX);
        rig_expect_empty(r);
        rig_destroy(r);
    }
}

/* One of them is aborted, the row that comes for it is for nobody. */
static void one_of_several_before_the_handoff(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(ROWS, 3);
    rig_attempt *a = rig_add(r, PROMPT, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_say_words(r, a, UINT32_MAX);
    rig_abort(r, a, 0);
    rig_expect_abort(r, a, 0, 0);
    rig_deliver(r, a, NULL);
    rig_settle(r);
    rig_expect_abort(r, a, 0, 0);
    rig_expect_answer(r, a, 1);
    rig_expect_answer(r, a, 2);
    rig_destroy(r);
}

static void a_handoff_that_failed_is_not_aborted(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(ROWS, 1);
    rig_attempt *a = rig_add(r, PROMPT, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_advance(r, (RIG_DEADLINE_MS + 1000) * 1000ull);
    assert_int_equal(a->streams[0].finishes, 1);
    rig_abort(r, a, PROTO_ALL_SAMPLES);
    assert_int_equal(a->streams[0].finishes, 1);
    assert_int_equal(a->streams[0].last.finish, PROTO_FINISH_ERROR);
    rig_destroy(r);
}

/* It was told its end before its memory came to rest. */
static void an_attempt_in_quarantine_is_not_aborted(void **state) {
    (void)state;
    uint32_t quarantined = 0;
    for (uint32_t steps = 1; steps < 12; steps++) {
        rig *r = rig_create(NULL);
        r->is_network_held = true;
        const proto_generation g = rig_generation(ROWS, 1);
        rig_attempt *a = rig_add(r, PROMPT, &g);
        assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
        rig_deliver(r, a, NULL);
        (void)xfer_loop_run(r->network, steps); /* a page is half there */
        rig_advance(r, RIG_DEADLINE_MS * 1000ull + RIG_TICK_US);
        quarantined += rig_view(r).quarantined;
        assert_int_equal(a->streams[0].finishes, 1);
        rig_abort(r, a, PROTO_ALL_SAMPLES);
        assert_int_equal(a->streams[0].finishes, 1);
        assert_int_equal(a->streams[0].last.finish, PROTO_FINISH_ERROR);
        r->is_network_held = false;
        rig_settle(r);
        rig_destroy(r);
    }
    assert_true(quarantined > 0);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void without_words(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(ROWS, 2);
    rig_attempt *a = rig_add(r, PROMPT, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_deliver(r, a, NULL);
    rig_settle(r);
    assert_int_equal(rig_view(r).waiting, 2);
    rig_abort(r, a, PROTO_ALL_SAMPLES);
    rig_settle(r);
    rig_expect_abort(r, a, 0, 1);
    rig_expect_abort(r, a, 1, 1);
    rig_expect_empty(r);
    rig_destroy(r);
}

/* A slow reader gets the rows that were drawn as it takes them; their pages are free at once. */
static void while_parked(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.queue_bytes = 1});
    const proto_generation g = rig_generation(ROWS, 1);
    const rig_attempt *a = rig_start(r, PROMPT, &g, 1);
    rig_settle(r);
    assert_int_equal(rig_view(r).parked, 1);
    const uint32_t rows = rig_sample(r, a, 0)->rows_made;
    assert_true(rows > 0);
    rig_abort(r, a, 0);
    rig_settle(r);
    assert_int_equal(rig_view(r).draining, 1);
    assert_int_equal(rig_view(r).pages_free, rig_view(r).pages_total);
    rig_expect_silence(a, 0);
    rig_credit(r, a, 0, 100);
    rig_credit(r, a, 0, UINT64_MAX / 2);
    rig_settle(r);
    rig_expect_abort(r, a, 0, rows);
    rig_destroy(r);
}

/* The younger of two has lost its pages, and maybe got them again. */
static void while_retracted_and_while_recomputing(void **state) {
    (void)state;
    for (uint32_t is_recomputing = 0; is_recomputing < 2; is_recomputing++) {
        rig *r = rig_create(&(rig_options){.pages = 18, .chunk_tokens = 5});
        r->is_compute_held = true;
        const proto_generation long_one = rig_generation(80, 1);
        const proto_generation short_one = rig_generation(40, 1);
        const proto_generation none = rig_generation(1, 1);
        const rig_attempt *old = rig_start(r, 100, &long_one, UINT64_MAX);
        const rig_attempt *young = rig_start(r, 80, &short_one, UINT64_MAX);
        rig_attempt *hog = rig_add(r, 64, &none);
        assert_int_equal(rig_reserve(r, hog, 1), BT_OK);
        rig_settle(r);
        while (rig_view(r).retracted == 0)
            rig_run_steps(r, 1);
        const decode_sample *s = rig_sample(r, young, 0);
        const uint32_t rows = s->rows_made;
        assert_int_equal(s->state, DECODE_RETRACTED);
        if (is_recomputing) {
            rig_cancel(r, hog, 0);
            rig_run_steps(r, 3);
            assert_int_equal(s->state, DECODE_RECOMPUTING);
        }
        rig_abort(r, young, 0);
        if (is_recomputing) {
            assert_int_equal(s->state, DECODE_RECOMPUTING); /* a step computes on its pages */
            rig_run_steps(r, 1);
        } else {
            rig_cancel(r, hog, 0);
        }
        rig_settle(r);
        rig_expect_abort(r, young, 0, rows);
        assert_null(rig_sample(r, young, 0));
        r->is_compute_held = false;
        rig_settle(r);
        rig_expect_answer(r, old, 0);
        rig_destroy(r);
    }
}

/* A cancel takes away what an abort left to be sent. */
static void a_cancel_behind_an_abort(void **state) {
    (void)state;
    for (uint32_t is_in_step = 0; is_in_step < 2; is_in_step++) {
        rig *r = rig_create(NULL);
        r->is_compute_held = is_in_step;
        const proto_generation g = rig_generation(RIG_ROWS_MAX / 2, 1);
        const rig_attempt *a = rig_start(r, 1, &g, is_in_step ? UINT64_MAX : 1);
        rig_settle(r);
        rig_abort(r, a, 0);
        rig_cancel(r, a, PROTO_ALL_SAMPLES);
        if (is_in_step) rig_run_steps(r, 1);
        rig_settle(r);
        rig_expect_silence(a, 0);
        rig_expect_empty(r);
        rig_destroy(r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_that_wait_go_out),
        cmocka_unit_test(a_neighbour_goes_on),
        cmocka_unit_test(an_abort_wins_within_the_step),
        cmocka_unit_test(before_the_handoff_there_are_no_rows),
        cmocka_unit_test(one_of_several_before_the_handoff),
        cmocka_unit_test(a_handoff_that_failed_is_not_aborted),
        cmocka_unit_test(an_attempt_in_quarantine_is_not_aborted),
        cmocka_unit_test(without_words),
        cmocka_unit_test(while_parked),
        cmocka_unit_test(while_retracted_and_while_recomputing),
        cmocka_unit_test(a_cancel_behind_an_abort),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
