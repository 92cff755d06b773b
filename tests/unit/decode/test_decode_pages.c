/* Pages that grow, retraction, recomputing: the same rows as with all the pages in the world. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "rig.h"

/* Two run, the older of which takes the pages of the younger; a reservation keeps free pages out of
 * the way until it is cancelled. No step ends by itself. */
typedef struct pinch {
    const rig_attempt *old, *young;
    rig_attempt *hog;
} pinch;

static pinch make_pinch(rig *r, uint32_t hog_pages) {
    pinch p = {0};
    r->is_compute_held = true;
    const proto_generation long_one = rig_generation(80, 1);
    const proto_generation short_one = rig_generation(40, 1);
    const proto_generation none = rig_generation(1, 1);
    p.old = rig_start(r, 100, &long_one, UINT64_MAX);
    p.young = rig_start(r, 80, &short_one, UINT64_MAX);
    p.hog = rig_add(r, 16 * hog_pages, &none);
    assert_int_equal(rig_reserve(r, p.hog, 1), BT_OK);
    rig_settle(r);
    for (uint32_t steps = 0; rig_view(r).retracted == 0; steps++) {
        assert_true(steps < 80);
        rig_run_steps(r, 1);
    }
    assert_int_equal(rig_sample(r, p.young, 0)->state, DECODE_RETRACTED);
    assert_int_equal(rig_sample(r, p.young, 0)->page_count, 0);
    return p;
}

/* ---- growth ---------------------------------------------------------------------------------- */

/* A page is taken when the token that needs it is, not before. */
static void pages_come_with_the_tokens(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    r->is_compute_held = true;
    const proto_generation g = rig_generation(60, 1);
    const rig_attempt *a = rig_start(r, 32, &g, UINT64_MAX);
    assert_int_equal(kv_pool_count(r->pages).owned, 2);
    rig_settle(r);
    /* Row 0 is there; the step that runs consumes its token, the 33rd. */
    for (uint32_t consumed = 33; consumed < 32 + 60; consumed++) {
        assert_int_equal(rig_view(r).pages_total - rig_view(r).pages_free,
                         kv_pages_for(consumed, 16));
        rig_run_steps(r, 1);
    }
    rig_expect_answer(r, a, 0);
    assert_int_equal(rig_view(r).steps_total, 59); /* the last token is never consumed */
    rig_destroy(r);
}

static void a_pool_of_exactly_one_sequence_is_enough(void **state) {
    (void)state;
    for (uint32_t prompt = 1; prompt <= 64; prompt += 7) {
        rig *r = rig_create(&(rig_options){.pages = 4});
        const proto_generation g = rig_generation(65 - prompt, 1);
        const rig_attempt *a = rig_start(r, prompt, &g, UINT64_MAX);
        rig_settle(r);
        rig_expect_answer(r, a, 0);
        assert_int_equal(rig_view(r).retractions_total, 0);
        rig_destroy(r);
    }
}

/* ---- admission ------------------------------------------------------------------------------- */

/* One page stays free for each that can still grow; who cannot grow needs none. */
static void room_for_growth_is_kept(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 8});
    const proto_generation many = rig_generation(40, 1);
    const proto_generation few = rig_generation(8, 1); /* stays within the prompt's page */
    rig_attempt *a = rig_add(r, 40, &many);
    rig_attempt *b = rig_add(r, 40, &many);
    rig_attempt *c = rig_add(r, 8, &few);
    assert_int_equal(rig_reserve(r, a, 1), BT_OK);               /* 3, and 1 to grow */
    assert_int_equal(rig_reserve(r, b, 1), BT_OK);               /* 6, and 2 */
    assert_int_equal(rig_reserve(r, c, 1), BT_ERR_REQUEST_FULL); /* 7, and 2 */
    assert_non_null(strstr(c->answer.text, "1 KV pages are needed and 2 for growth, 2 are free"));
    rig_cancel(r, a, PROTO_ALL_SAMPLES);
    assert_int_equal(rig_reserve(r, c, 1), BT_OK);
    rig_cancel(r, b, PROTO_ALL_SAMPLES);
    rig_cancel(r, c, PROTO_ALL_SAMPLES);
    rig_destroy(r);
}

/* One that runs keeps room, too, up to its last page. */
static void who_runs_keeps_room_for_its_last_page(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 8});
    r->is_compute_held = true;
    const proto_generation g = rig_generation(24, 1); /* 63 tokens are consumed: 4 pages */
    const proto_generation one = rig_generation(1, 1);
    const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    rig_attempt *five = rig_add(r, 16 * 5, &one);
    assert_int_equal(rig_reserve(r, five, 1), BT_ERR_REQUEST_FULL);
    assert_non_null(strstr(five->answer.text, "5 KV pages are needed and 1 for growth, 5 are"));
    while (rig_sample(r, a, 0)->page_count < 4)
        rig_run_steps(r, 1);
    rig_attempt *four = rig_add(r, 16 * 4, &one);
    assert_int_equal(rig_reserve(r, four, 1), BT_OK); /* all that are left */
    rig_cancel(r, four, PROTO_ALL_SAMPLES);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, a, 0);
    rig_destroy(r);
}

/* Samples count with their growth, and the further ones with the copy of the tail. */
static void room_for_tails_is_kept(void **state) {
    (void)state;
    static const struct {
        uint32_t prompt, free_after;
    } cases[] = {{40, 64 - 3 - 3 - 2}, {48, 64 - 3 - 3}};
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        rig *r = rig_create(NULL);
        const proto_generation g = rig_generation(40, 3);
        rig_attempt *a = rig_add(r, cases[i].prompt, &g);
        assert_int_equal(rig_reserve(r, a, 1), BT_OK);
        /* Needs its prompt's pages and one more. */
        const proto_generation one = rig_generation(17, 1);
        rig_attempt *b = rig_add(r, 16 * (cases[i].free_after - 1), &one);
        rig_attempt *c = rig_add(r, 16 * cases[i].free_after, &one);
        assert_int_equal(rig_reserve(r, c, 1), BT_ERR_REQUEST_FULL);
        assert_int_equal(rig_reserve(r, b, 1), BT_OK);
        rig_cancel(r, a, PROTO_ALL_SAMPLES);
        rig_cancel(r, b, PROTO_ALL_SAMPLES);
        rig_destroy(r);
    }
}

/* ---- retraction ------------------------------------------------------------------------------ */

static void the_youngest_gives_way_and_comes_back(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 7});
    r->is_compute_held = true;
    const proto_generation g = rig_generation(49, 1);
    const rig_attempt *old = rig_start(r, 32, &g, UINT64_MAX);
    const rig_attempt *young = rig_start(r, 31, &g, UINT64_MAX);
    rig_settle(r);
    uint32_t rows = 0;
    while (rig_view(r).retracted == 0) {
        rig_run_steps(r, 1);
        assert_int_equal(rig_sample(r, old, 0)->state, DECODE_RUNNING);
        rows++;
        assert_true(rows < 49);
    }
    const decode_sample *s = rig_sample(r, young, 0);
    assert_int_equal(s->state, DECODE_RETRACTED);
    assert_int_equal(s->page_count, 0);
    const uint32_t made = s->rows_made;
    assert_int_equal(rig_rows(r, young, 0), made); /* what it drew has gone out */
    rig_attempt *late = rig_add(r, 1, &g);
    assert_int_equal(rig_reserve(r, late, 1), BT_ERR_REQUEST_FULL);
    assert_non_null(strstr(late->answer.text, "retracted"));
    assert_int_equal(r->capacities, 0);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, old, 0);
    rig_expect_answer(r, young, 0);
    assert_int_equal(old->streams[0].retractions, 0);
    assert_int_equal(young->streams[0].retractions, 1);
    assert_int_equal(r->capacities, 1);
    assert_int_equal(rig_view(r).recomputed_tokens_total, 31 + made);
    rig_destroy(r);
}

/* Recomputing takes steps of its own share, and those who run get their token in each. */
static void recomputing_does_not_stall_the_others(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 18, .chunk_tokens = 5});
    const pinch p = make_pinch(r, 4);
    const decode_sample *s = rig_sample(r, p.young, 0);
    const uint32_t tokens = decode_tokens(s);
    rig_cancel(r, p.hog, 0);
    rig_settle(r);
    /* The step that runs began before there were pages. */
    uint32_t rows = rig_rows(r, p.old, 0);
    rig_run_steps(r, 1);
    assert_int_equal(rig_rows(r, p.old, 0), ++rows);
    uint32_t steps = 0;
    while (s->state == DECODE_RECOMPUTING) {
        assert_int_equal(s->computed_tokens, 5 * steps);
        rig_run_steps(r, 1);
        steps++;
        assert_int_equal(rig_rows(r, p.old, 0), ++rows);
    }
    assert_int_equal(steps, (tokens + 4) / 5);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, p.old, 0);
    rig_expect_answer(r, p.young, 0);
    rig_destroy(r);
}

/* Siblings compute the prompt once also when all of them had lost it. */
static void siblings_share_what_one_of_them_computed_again(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 20});
    const proto_generation g = rig_generation(20, 3);
    const proto_generation many = rig_generation(241, 1); /* 16 pages in the end */
    const rig_attempt *old = rig_start(r, 16, &many, UINT64_MAX);
    rig_attempt *a = rig_add(r, 70, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_deliver(r, a, NULL);
    rig_settle(r);
    rig_expect_answer(r, old, 0);
    assert_int_equal(rig_view(r).retracted, 3); /* without words they were the first to give way */
    assert_int_equal(rig_view(r).pages_free, 20);
    rig_say_words(r, a, UINT32_MAX);
    rig_settle(r);
    for (uint32_t n = 0; n < 3; n++) {
        rig_expect_answer(r, a, n);
        assert_int_equal(a->streams[n].retractions, 1);
    }
    /* 64 tokens of full pages once; behind them 6 of the prompt and a drawn one each. */
    assert_int_equal(rig_view(r).recomputed_tokens_total, 64 + 3 * (6 + 1));
    rig_destroy(r);
}

/* It would give its pages up at once to those who run. */
static void who_comes_back_leaves_room_for_growth(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 16, .chunk_tokens = 5});
    const pinch p = make_pinch(r, 2);
    const decode_sample *s = rig_sample(r, p.young, 0);
    rig_cancel(r, p.hog, 0);
    assert_int_equal(kv_pages_for(decode_tokens(s), 16), rig_view(r).pages_free);
    while (rig_view(r).running > 0) {
        assert_int_equal(s->state, DECODE_RETRACTED);
        rig_run_steps(r, 1);
    }
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, p.old, 0);
    rig_expect_answer(r, p.young, 0);
    assert_int_equal(p.young->streams[0].retractions, 1);
    rig_destroy(r);
}

static void nobody_overtakes_who_waits_for_many_pages(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 18});
    r->is_compute_held = true;
    const proto_generation many = rig_generation(241, 1);
    const proto_generation some = rig_generation(20, 1);
    const proto_generation few = rig_generation(8, 1);
    const rig_attempt *old = rig_start(r, 16, &many, UINT64_MAX);
    rig_attempt *large = rig_add(r, 48, &some);
    rig_attempt *small = rig_add(r, 5, &few);
    assert_int_equal(rig_reserve(r, large, UINT64_MAX), BT_OK);
    assert_int_equal(rig_reserve(r, small, UINT64_MAX), BT_OK);
    rig_deliver(r, large, NULL);
    rig_deliver(r, small, NULL);
    rig_settle(r);
    while (rig_view(r).retracted < 2)
        rig_run_steps(r, 1);
    rig_say_words(r, large, UINT32_MAX);
    rig_say_words(r, small, UINT32_MAX);
    rig_run_steps(r, 2);
    assert_int_equal(rig_view(r).pages_free, 2); /* enough for the small one */
    assert_int_equal(rig_sample(r, small, 0)->state, DECODE_RETRACTED);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, old, 0);
    rig_expect_answer(r, large, 0);
    rig_expect_answer(r, small, 0);
    rig_destroy(r);
}

/* Who was refused hears of the pages when the retracted one has its own. */
static void capacity_is_told_when_the_last_retracted_came_back(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 22, .chunk_tokens = 5});
    const pinch p = make_pinch(r, 8);
    const proto_generation few = rig_generation(3, 1);
    rig_attempt *late = rig_add(r, 5, &few);
    assert_int_equal(rig_reserve(r, late, 1), BT_ERR_REQUEST_FULL);
    rig_cancel(r, p.hog, 0);
    rig_settle(r);
    assert_int_equal(r->capacities, 0);
    assert_int_equal(rig_reserve(r, late, 1), BT_ERR_REQUEST_FULL);
    rig_run_steps(r, 1);
    assert_int_equal(rig_view(r).recomputing, 1);
    assert_int_equal(r->capacities, 1);
    assert_int_equal(rig_reserve(r, late, 1), BT_OK);
    rig_cancel(r, late, 0);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, p.old, 0);
    rig_expect_answer(r, p.young, 0);
    rig_destroy(r);
}

/* A pool in which hardly two fit, for many. */
static void retraction_all_the_time_loses_nothing(void **state) {
    (void)state;
    static const uint32_t chunks[] = {1, 3, 16, 500};
    for (size_t i = 0; i < BT_ARRAY_COUNT(chunks); i++) {
        rig *r = rig_create(&(rig_options){.pages = 9, .chunk_tokens = chunks[i]});
        const proto_generation g = rig_generation(100, 4);
        const rig_attempt *a = rig_start(r, 21, &g, UINT64_MAX);
        rig_settle(r);
        for (uint32_t n = 0; n < 4; n++)
            rig_expect_answer(r, a, n);
        assert_true(rig_view(r).retractions_total >= 3);
        assert_int_equal(a->streams[0].retractions, 0); /* the oldest never */
        rig_destroy(r);
    }
}

static void parked_samples_give_way_first(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 70, .context_tokens = 2048});
    const proto_generation g = rig_generation(RIG_ROWS_MAX, 1);
    const rig_attempt *slow = rig_start(r, 20, &g, 1);
    rig_settle(r);
    assert_int_equal(rig_view(r).parked, 1);
    const rig_attempt *fast = rig_start(r, 20, &g, UINT64_MAX);
    const rig_attempt *other = rig_start(r, 20, &g, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, fast, 0);
    rig_expect_answer(r, other, 0);
    const decode_sample *s = rig_sample(r, slow, 0);
    assert_int_equal(s->state, DECODE_RETRACTED); /* older, but it could not go on */
    assert_true(s->lacks_room);
    assert_int_equal(rig_view(r).pages_free, 70);
    /* It is not computed again before its rows have room, and keeps nobody out. */
    const uint64_t steps = rig_view(r).steps_total;
    rig_advance(r, 1000 * 1000);
    assert_int_equal(rig_view(r).steps_total, steps);
    const proto_generation few = rig_generation(3, 1);
    const rig_attempt *late = rig_start(r, 20, &few, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, late, 0);
    assert_int_equal(s->state, DECODE_RETRACTED);
    rig_credit(r, slow, 0, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, slow, 0);
    assert_int_equal(slow->streams[0].retractions, 1);
    rig_destroy(r);
}

/* The reader's deadline goes on, with the words that name it. */
static void a_parked_sample_that_was_retracted_keeps_its_deadline(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 70, .context_tokens = 2048});
    const proto_generation g = rig_generation(RIG_ROWS_MAX, 1);
    const rig_attempt *slow = rig_start(r, 20, &g, 1);
    rig_settle(r);
    rig_advance(r, 30 * 1000 * 1000);
    const rig_attempt *fast = rig_start(r, 20, &g, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, fast, 0);
    rig_advance(r, 29 * 1000 * 1000);
    assert_int_equal(rig_sample(r, slow, 0)->state, DECODE_RETRACTED);
    rig_advance(r, 2 * 1000 * 1000);
    rig_expect_error(r, slow, 0, BT_ERR_REQUEST_DEADLINE, "took nothing in time");
    rig_destroy(r);
}

/* Nobody runs: a parked sample gives its pages to one that can go on. */
static void a_parked_sample_does_not_keep_a_retracted_one_waiting(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 70, .context_tokens = 2048});
    const proto_generation g = rig_generation(RIG_ROWS_MAX, 1);
    const rig_attempt *first = rig_start(r, 20, &g, 1);
    rig_settle(r);
    assert_int_equal(rig_sample(r, first, 0)->state, DECODE_PARKED);
    const rig_attempt *second = rig_start(r, 20, &g, 1);
    rig_settle(r);
    assert_int_equal(rig_sample(r, first, 0)->state, DECODE_RETRACTED);
    assert_int_equal(rig_sample(r, second, 0)->state, DECODE_PARKED);
    rig_credit(r, first, 0, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, first, 0);
    assert_int_equal(rig_sample(r, second, 0)->state, DECODE_RETRACTED);
    rig_credit(r, second, 0, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, second, 0);
    rig_destroy(r);
}

static void samples_without_a_page_for_their_tail_begin_as_retracted(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 4});
    r->is_compute_held = true;
    const proto_generation g = rig_generation(10, 4);
    const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    assert_int_equal(rig_view(r).running, 2);
    assert_int_equal(rig_view(r).retracted, 2);
    r->is_compute_held = false;
    rig_settle(r);
    for (uint32_t n = 0; n < 4; n++)
        rig_expect_answer(r, a, n);
    rig_destroy(r);
}

/* ---- cancels and deadlines ------------------------------------------------------------------- */

static void cancel_while_retracted_and_while_recomputing(void **state) {
    (void)state;
    for (int is_recomputing = 0; is_recomputing < 2; is_recomputing++) {
        rig *r = rig_create(&(rig_options){.pages = 18, .chunk_tokens = 5});
        const pinch p = make_pinch(r, 4);
        const decode_sample *s = rig_sample(r, p.young, 0);
        if (is_recomputing) {
            rig_cancel(r, p.hog, 0);
            rig_run_steps(r, 3);
            assert_int_equal(s->state, DECODE_RECOMPUTING);
        }
        rig_cancel(r, p.young, 0);
        if (is_recomputing) {
            assert_int_equal(s->state, DECODE_LEAVING); /* a step computes on its pages */
            rig_run_steps(r, 1);
        } else {
            rig_cancel(r, p.hog, 0);
        }
        assert_null(rig_sample(r, p.young, 0));
        r->is_compute_held = false;
        rig_settle(r);
        rig_expect_answer(r, p.old, 0);
        rig_expect_silence(p.young, 0);
        assert_int_equal(rig_view(r).recomputed_tokens_total, is_recomputing ? 10 : 0);
        rig_destroy(r);
    }
}

static void a_reservation_cannot_be_taken_from(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 6});
    const proto_generation g = rig_generation(60, 1);
    const rig_attempt *a = rig_start(r, 32, &g, UINT64_MAX);
    rig_attempt *waiting = rig_add(r, 17, &g);
    assert_int_equal(rig_reserve(r, waiting, UINT64_MAX), BT_OK);
    rig_settle(r);
    const decode_sample *s = rig_sample(r, a, 0);
    assert_int_equal(s->state, DECODE_RUNNING); /* it has 4 pages, needs a fifth, and waits */
    assert_int_equal(s->page_count, 4);
    assert_false(rig_view(r).is_step_running);
    rig_advance(r, RIG_DEADLINE_MS * 1000u + RIG_TICK_US);
    rig_expect_error(r, waiting, 0, BT_ERR_REQUEST_DEADLINE, "rows (0 of 1)");
    rig_expect_answer(r, a, 0);
    rig_destroy(r);
}

static void a_reservation_that_is_ready_can_be_retracted(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 6});
    const proto_generation g = rig_generation(60, 1);
    const rig_attempt *a = rig_start(r, 32, &g, UINT64_MAX);
    rig_attempt *waiting = rig_add(r, 17, &g);
    assert_int_equal(rig_reserve(r, waiting, UINT64_MAX), BT_OK);
    rig_settle(r);
    rig_deliver(r, waiting, NULL);
    rig_settle(r);
    rig_expect_answer(r, a, 0);
    assert_int_equal(rig_view(r).retracted, 1); /* it lost them while it waited for the words */
    rig_say_words(r, waiting, UINT32_MAX);
    rig_settle(r);
    rig_expect_answer(r, waiting, 0);
    rig_destroy(r);
}

static void waiting_for_pages_has_a_deadline(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 18, .pages_us = 2000 * 1000});
    const pinch p = make_pinch(r, 4);
    rig_advance(r, 2000 * 1000 - RIG_TICK_US);
    assert_int_equal(rig_view(r).retracted, 1);
    rig_advance(r, RIG_TICK_US);
    rig_expect_error(r, p.young, 0, BT_ERR_REQUEST_DEADLINE,
                     "waited past the deadline for KV pages");
    rig_cancel(r, p.hog, 0);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_answer(r, p.old, 0);
    rig_destroy(r);
}

static void waiting_for_the_next_page_has_a_deadline(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 6, .pages_us = 2000 * 1000});
    const proto_generation g = rig_generation(60, 1);
    const rig_attempt *a = rig_start(r, 32, &g, UINT64_MAX);
    rig_attempt *waiting = rig_add(r, 17, &g);
    assert_int_equal(rig_reserve(r, waiting, UINT64_MAX), BT_OK);
    rig_settle(r);
    rig_advance(r, 2000 * 1000 - RIG_TICK_US);
    assert_int_equal(rig_view(r).running, 1);
    rig_advance(r, RIG_TICK_US);
    rig_expect_error(r, a, 0, BT_ERR_REQUEST_DEADLINE, "waited past the deadline for KV pages");
    rig_cancel(r, waiting, 0);
    rig_destroy(r);
}

/* Each wait has its own. */
static void a_page_that_came_ends_the_wait_for_it(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 6, .pages_us = 2000 * 1000});
    const proto_generation g = rig_generation(60, 1); /* six pages in the end */
    const proto_generation one = rig_generation(1, 1);
    const rig_attempt *a = rig_start(r, 32, &g, UINT64_MAX);
    rig_attempt *hogs[2];
    for (uint32_t i = 0; i < 2; i++) {
        hogs[i] = rig_add(r, 16, &one);
        assert_int_equal(rig_reserve(r, hogs[i], 1), BT_OK);
    }
    rig_settle(r);
    assert_int_equal(rig_sample(r, a, 0)->page_count, 4);
    rig_advance(r, 1500 * 1000);
    rig_cancel(r, hogs[0], 0);
    rig_settle(r);
    assert_int_equal(rig_sample(r, a, 0)->page_count, 5);
    rig_advance(r, 2000 * 1000 - RIG_TICK_US);
    assert_int_equal(rig_view(r).running, 1);
    rig_cancel(r, hogs[1], 0);
    rig_settle(r);
    rig_expect_answer(r, a, 0);
    rig_destroy(r);
}

/* Behind the reader's deadline, when its rows have room again, stands that of the pages. */
static void who_has_room_again_waits_for_pages_anew(void **state) {
    (void)state;
    rig *r =
        rig_create(&(rig_options){.pages = 70, .context_tokens = 2048, .pages_us = 2000 * 1000});
    const proto_generation g = rig_generation(RIG_ROWS_MAX, 1);
    const proto_generation one = rig_generation(1, 1);
    const rig_attempt *slow = rig_start(r, 20, &g, 1);
    rig_settle(r);
    const rig_attempt *fast = rig_start(r, 20, &g, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, fast, 0);
    assert_int_equal(rig_sample(r, slow, 0)->state, DECODE_RETRACTED);
    rig_advance(r, 59 * 1000 * 1000);
    rig_attempt *hog = rig_add(r, 70 * 16, &one);
    assert_int_equal(rig_reserve(r, hog, 1), BT_OK);
    rig_credit(r, slow, 0, UINT64_MAX);
    rig_settle(r);
    assert_false(rig_sample(r, slow, 0)->lacks_room);
    rig_advance(r, 2000 * 1000 - RIG_TICK_US);
    rig_expect_silence(slow, 0);
    rig_advance(r, RIG_TICK_US);
    rig_expect_error(r, slow, 0, BT_ERR_REQUEST_DEADLINE, "for KV pages");
    rig_cancel(r, hog, 0);
    rig_destroy(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_come_with_the_tokens),
        cmocka_unit_test(a_pool_of_exactly_one_sequence_is_enough),
        cmocka_unit_test(room_for_growth_is_kept),
        cmocka_unit_test(who_runs_keeps_room_for_its_last_page),
        cmocka_unit_test(room_for_tails_is_kept),
        cmocka_unit_test(the_youngest_gives_way_and_comes_back),
        cmocka_unit_test(recomputing_does_not_stall_the_others),
        cmocka_unit_test(siblings_share_what_one_of_them_computed_again),
        cmocka_unit_test(who_comes_back_leaves_room_for_growth),
        cmocka_unit_test(nobody_overtakes_who_waits_for_many_pages),
        cmocka_unit_test(capacity_is_told_when_the_last_retracted_came_back),
        cmocka_unit_test(retraction_all_the_time_loses_nothing),
        cmocka_unit_test(parked_samples_give_way_first),
        cmocka_unit_test(a_parked_sample_that_was_retracted_keeps_its_deadline),
        cmocka_unit_test(a_parked_sample_does_not_keep_a_retracted_one_waiting),
        cmocka_unit_test(samples_without_a_page_for_their_tail_begin_as_retracted),
        cmocka_unit_test(cancel_while_retracted_and_while_recomputing),
        cmocka_unit_test(a_reservation_cannot_be_taken_from),
        cmocka_unit_test(a_reservation_that_is_ready_can_be_retracted),
        cmocka_unit_test(waiting_for_pages_has_a_deadline),
        cmocka_unit_test(waiting_for_the_next_page_has_a_deadline),
        cmocka_unit_test(a_page_that_came_ends_the_wait_for_it),
        cmocka_unit_test(who_has_room_again_waits_for_pages_anew),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
