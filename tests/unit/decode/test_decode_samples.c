/* Several samples of one prompt: shared pages, copies, streams, credits, ends and errors of their
 * own; the prompt's words; and what the parameters of draws become. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "proto/row_stream.h"
#include "rig.h"

static void expect_refused(const rig_attempt *a, bt_status status, const char *text) {
    assert_int_equal(a->answer.status, status);
    if (strstr(a->answer.text, text) == NULL) fail_msg("'%s'", a->answer.text);
}

/* ---- samples --------------------------------------------------------------------------------- */

/* Prompts that end inside a page, at its end, and below the first page; each row is hashed from the
 * sample's own pages, so a page that is mixed up or copied too late is no token. */
static void samples_share_the_prompt_and_differ(void **state) {
    (void)state;
    static const uint32_t prompts[] = {1, 5, 15, 16, 17, 32, 33, 40, 48};
    for (size_t i = 0; i < BT_ARRAY_COUNT(prompts); i++) {
        rig *r = rig_create(NULL);
        const proto_generation g = rig_generation(40, 4);
        const rig_attempt *a = rig_start(r, prompts[i], &g, UINT64_MAX);
        rig_settle(r);
        for (uint32_t n = 0; n < 4; n++)
            rig_expect_answer(r, a, n);
        /* Sample 0 is what n = 1 draws, the others are something else. */
        assert_memory_not_equal(a->streams[0].bytes, a->streams[1].bytes, a->streams[0].byte_count);
        assert_int_equal(rig_view(r).retractions_total, 0);
        rig_destroy(r);
    }
}

static void full_pages_are_held_and_the_tail_is_copied(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    r->is_compute_held = true;
    const proto_generation g = rig_generation(40, 3);
    const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    kv_pool_counts counts = kv_pool_count(r->pages);
    assert_int_equal(counts.shared, 2); /* 32 tokens, once */
    assert_int_equal(counts.holds, 6);
    assert_int_equal(counts.owned, 3); /* tails */
    assert_int_equal(counts.free, 64 - 5);
    const decode_sample *first = rig_sample(r, a, 0);
    for (uint32_t n = 1; n < 3; n++) {
        const decode_sample *s = rig_sample(r, a, n);
        assert_memory_equal(s->pages, first->pages, 2 * sizeof *s->pages);
        assert_int_not_equal(s->pages[2], first->pages[2]);
        assert_memory_equal(kv_pool_page(r->pages, s->pages[2]),
                            kv_pool_page(r->pages, first->pages[2]), 16 * 32);
    }
    rig_cancel(r, a, 0); /* in the step */
    rig_cancel(r, a, 1);
    r->is_compute_held = false;
    rig_run_steps(r, 1);
    counts = kv_pool_count(r->pages);
    assert_int_equal(counts.holds, 2);
    rig_settle(r);
    rig_expect_answer(r, a, 2);
    rig_expect_silence(a, 0);
    rig_expect_silence(a, 1);
    rig_destroy(r);
}

/* Each sample ends where its own rows end; the last one takes the record along. */
static void samples_end_one_by_one(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    proto_generation g = rig_generation(60, 3);
    rig_attempt *probe = rig_add(r, 40, &g);
    proto_finish finish;
    /* A stop id that sample 1 draws as its first row, and one that sample 2 draws some time. */
    g.stop_id_count = 2;
    for (uint32_t n = 1; n < 3; n++) {
        proto_generation one = g;
        one.stop_id_count = 0;
        probe->generation = one;
        assert_int_equal(rig_answer(r, probe, n, &finish), 60);
        g.stop_ids[n - 1] = rig_token(r, probe, n, n == 1 ? 0 : 21);
    }
    probe->generation = g;
    assert_int_equal(rig_reserve(r, probe, UINT64_MAX), BT_OK);
    rig_say_words(r, probe, UINT32_MAX);
    rig_deliver(r, probe, NULL);
    rig_settle(r);
    for (uint32_t n = 0; n < 3; n++)
        rig_expect_answer(r, probe, n);
    assert_int_equal(rig_answer(r, probe, 1, &finish), 1);
    assert_int_equal(finish, PROTO_FINISH_STOP);
    assert_true(rig_answer(r, probe, 2, &finish) <= 22);
    rig_destroy(r);
}

static void a_row_that_failed_ends_its_sample_alone(void **state) {
    (void)state;
    for (uint32_t failing = 0; failing < 3; failing++) {
        rig *r = rig_create(NULL);
        const proto_generation g = rig_generation(30, 3);
        uint32_t statuses[3] = {0};
        statuses[failing] = SAMPLER_OVERFLOW;
        rig_attempt *a = rig_add(r, 40, &g);
        assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
        rig_say_words(r, a, UINT32_MAX);
        rig_deliver(r, a, statuses);
        rig_settle(r);
        for (uint32_t n = 0; n < 3; n++) {
            if (n == failing) {
                rig_expect_error(r, a, n, BT_ERR_REQUEST_OVERFLOW, "token 0 has 99");
                assert_int_equal(a->streams[n].last.cap_needed, 99);
            } else {
                rig_expect_answer(r, a, n);
            }
        }
        rig_destroy(r);
    }
}

static void two_failed_rows_leave_one_sample_without_sharing(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    r->is_compute_held = true;
    const proto_generation g = rig_generation(30, 3);
    const uint32_t statuses[3] = {SAMPLER_INVALID, SAMPLER_OK, SAMPLER_OVERFLOW};
    rig_attempt *a = rig_add(r, 40, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_say_words(r, a, UINT32_MAX);
    rig_deliver(r, a, statuses);
    rig_settle(r);
    assert_int_equal(kv_pool_count(r->pages).shared, 0);
    assert_int_equal(kv_pool_count(r->pages).owned, 3);
    r->is_compute_held = false;
    rig_settle(r);
    rig_expect_error(r, a, 0, BT_ERR_REQUEST_CAPTURE, "token 0");
    rig_expect_answer(r, a, 1);
    rig_expect_error(r, a, 2, BT_ERR_REQUEST_OVERFLOW, "token 0");
    rig_destroy(r);
}

/* Where nothing more is drawn there is nothing to share or to copy. */
static void one_new_token_needs_no_pages(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 3});
    const proto_generation g = rig_generation(1, 8);
    rig_attempt *a = rig_add(r, 48, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_deliver(r, a, NULL); /* and no words either */
    rig_settle(r);
    for (uint32_t n = 0; n < 8; n++)
        rig_expect_answer(r, a, n);
    assert_int_equal(rig_view(r).steps_total, 0);
    rig_destroy(r);
}

static void credit_is_a_samples_own(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 256, .context_tokens = 2048});
    const proto_generation g = rig_generation(RIG_ROWS_MAX, 3);
    const rig_attempt *a = rig_start(r, 20, &g, 1000);
    rig_settle(r);
    for (uint32_t n = 0; n < 3; n++)
        assert_int_equal(a->streams[n].byte_count, 1000);
    rig_credit(r, a, 1, 500);
    rig_settle(r);
    assert_int_equal(a->streams[0].byte_count, 1000);
    assert_int_equal(a->streams[1].byte_count, 1500);
    rig_credit(r, a, 3, 500); /* there is no such sample */
    rig_credit(r, a, 2, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, a, 2);
    rig_credit(r, a, 2, 5); /* late */
    rig_credit(r, a, 0, 1 << 30);
    rig_credit(r, a, 1, 1 << 30);
    rig_settle(r);
    rig_expect_answer(r, a, 0);
    rig_expect_answer(r, a, 1);
    rig_destroy(r);
}

/* Credit may end anywhere in a block of rows: at the end of one, too. */
static void whole_rows_are_counted_when_a_reader_is_given_up(void **state) {
    (void)state;
    static const uint64_t extra[] = {0, 1, ROW_RECORD_HEADER_BYTES - 1};
    for (size_t i = 0; i < BT_ARRAY_COUNT(extra); i++) {
        rig *r = rig_create(NULL);
        proto_generation g = rig_generation(10, 1);
        g.mask_mode = SAMPLER_MASK_OFF;
        const rig_attempt *a = rig_start(r, 20, &g, ROW_RECORD_HEADER_BYTES);
        rig_settle(r);
        rig_credit(r, a, 0, 2 * ROW_RECORD_HEADER_BYTES + extra[i]);
        rig_settle(r);
        assert_int_equal(rig_sample(r, a, 0)->state, DECODE_DRAINING);
        rig_advance(r, DECODE_PARK_US + RIG_TICK_US);
        rig_expect_error(r, a, 0, BT_ERR_REQUEST_DEADLINE, "took nothing in time");
        assert_int_equal(a->streams[0].last.rows_total, 3);
        rig_destroy(r);
    }
}

/* ---- cancels --------------------------------------------------------------------------------- */

static void samples_cancelled_during_the_handoff_never_start(void **state) {
    (void)state;
    for (uint32_t first = 0; first < 3; first++) {
        rig *r = rig_create(NULL);
        const proto_generation g = rig_generation(30, 3);
        rig_attempt *a = rig_add(r, 40, &g);
        assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
        rig_say_words(r, a, UINT32_MAX);
        rig_cancel(r, a, first);
        rig_cancel(r, a, first); /* idempotent */
        rig_cancel(r, a, 99);
        rig_deliver(r, a, NULL);
        rig_settle(r);
        for (uint32_t n = 0; n < 3; n++) {
            if (n == first) {
                rig_expect_silence(a, n);
                assert_int_equal(a->streams[n].byte_count, 0);
            } else {
                rig_expect_answer(r, a, n);
            }
        }
        rig_destroy(r);
    }
}

static void the_last_cancelled_sample_ends_the_reservation(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(30, 3);
    rig_attempt *a = rig_add(r, 40, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    for (uint32_t n = 0; n < 3; n++) {
        assert_int_equal(rig_view(r).reserved, 1);
        rig_cancel(r, a, n);
    }
    rig_expect_empty(r);
    rig_deliver(r, a, NULL); /* too late: refused to prefill */
    rig_settle(r);
    rig_destroy(r);
}

static void an_attempt_is_cancelled_with_samples_in_a_step(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    r->is_compute_held = true;
    const proto_generation g = rig_generation(30, 3);
    const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    const rig_attempt *b = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    rig_run_steps(r, 1);
    rig_cancel(r, a, PROTO_ALL_SAMPLES);
    assert_int_equal(rig_view(r).samples, 6); /* the step computes on their pages */
    rig_cancel(r, a, PROTO_ALL_SAMPLES);
    rig_run_steps(r, 1);
    assert_int_equal(rig_view(r).samples, 3);
    r->is_compute_held = false;
    rig_settle(r);
    for (uint32_t n = 0; n < 3; n++) {
        rig_expect_silence(a, n);
        rig_expect_answer(r, b, n);
    }
    rig_destroy(r);
}

/* ---- admission ------------------------------------------------------------------------------- */

static void places_are_all_or_nothing(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.sequences_max = 5});
    proto_generation g = rig_generation(30, 3);
    rig_attempt *a = rig_start(r, 20, &g, 1);
    rig_attempt *b = rig_add(r, 20, &g);
    assert_int_equal(rig_reserve(r, b, 1), BT_ERR_REQUEST_FULL);
    expect_refused(b, BT_ERR_REQUEST_FULL, "3 samples need a place each; 2 of the batch are free");
    g.samples = 6;
    rig_attempt *c = rig_add(r, 20, &g);
    assert_int_equal(rig_reserve(r, c, 1), BT_ERR_REQUEST_TOO_LARGE);
    expect_refused(c, BT_ERR_REQUEST_TOO_LARGE, "6 samples");
    g.samples = 2;
    rig_attempt *d = rig_add(r, 20, &g);
    assert_int_equal(rig_reserve(r, d, 1), BT_OK);
    assert_int_equal(rig_view(r).rows_free, 0);
    rig_settle(r);
    assert_int_equal(r->capacities, 0);
    assert_int_equal(rig_view(r).rows_free, 3); /* the slots of the first are free at READY */
    assert_int_equal(rig_view(r).samples, 5);   /* its places are not */
    rig_cancel(r, a, 1);
    assert_int_equal(r->capacities, 1);
    assert_int_equal(rig_reserve(r, b, 1), BT_ERR_REQUEST_FULL);
    rig_cancel(r, d, PROTO_ALL_SAMPLES);
    assert_int_equal(r->capacities, 2);
    assert_int_equal(rig_reserve(r, b, 1), BT_OK);
    rig_cancel(r, a, PROTO_ALL_SAMPLES);
    rig_cancel(r, b, PROTO_ALL_SAMPLES);
    rig_destroy(r);
}

/* Who is alone needs its prompt's pages alone; a reader that is slow to take what is drawn, for as
 * long as it likes, is no company. */
static void a_slow_reader_needs_no_room(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 4});
    const proto_generation few = rig_generation(2, 1);
    const rig_attempt *slow = rig_start(r, 8, &few, 1);
    rig_settle(r);
    assert_int_equal(rig_sample(r, slow, 0)->state, DECODE_DRAINING);
    const proto_generation many = rig_generation(20, 3); /* 3 pages, 5 more to grow */
    const rig_attempt *a = rig_start(r, 40, &many, UINT64_MAX);
    rig_settle(r);
    for (uint32_t i = 0; i < 3; i++)
        rig_expect_answer(r, a, i);
    rig_credit(r, slow, 0, 1 << 20);
    rig_settle(r);
    rig_expect_answer(r, slow, 0);
    rig_destroy(r);
}

/* Of one sample alone it is asked whether it can ever fit: the others may run later. */
static void many_samples_may_need_more_pages_than_there_are(void **state) {
    (void)state;
    rig *r = rig_create(&(rig_options){.pages = 4});
    proto_generation g = rig_generation(25, 5);
    const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    for (uint32_t n = 0; n < 5; n++)
        rig_expect_answer(r, a, n);
    assert_true(rig_view(r).retractions_total > 0);
    g.max_new_tokens = 26;
    rig_attempt *b = rig_add(r, 40, &g);
    assert_int_equal(rig_reserve(r, b, 1), BT_ERR_REQUEST_TOO_LARGE);
    expect_refused(b, BT_ERR_REQUEST_TOO_LARGE, "65 tokens need 5 KV pages");
    rig_destroy(r);
}

/* ---- words ----------------------------------------------------------------------------------- */

static void words_may_come_at_any_time(void **state) {
    (void)state;
    for (int is_late = 0; is_late < 2; is_late++) {
        rig *r = rig_create(NULL);
        proto_generation g = rig_generation(20, 2);
        g.bias_count = 3;
        g.logprob_id_count = 4;
        rig_attempt *a = rig_add(r, 40, &g);
        assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
        rig_say_words(r, a, 13);
        if (is_late) {
            rig_deliver(r, a, NULL);
            rig_settle(r);
            assert_int_equal(rig_view(r).waiting, 2);
            assert_int_equal(rig_rows(r, a, 0), 1); /* what is proven goes out */
        }
        rig_say_words(r, a, 30);
        rig_settle(r);
        assert_int_equal(rig_view(r).steps_total, 0);
        rig_say_words(r, a, UINT32_MAX);
        if (!is_late) {
            rig_settle(r);
            assert_int_equal(rig_view(r).steps_total, 0);
            rig_deliver(r, a, NULL);
        }
        rig_settle(r);
        rig_expect_answer(r, a, 0);
        rig_expect_answer(r, a, 1);
        a->words_sent = 0;
        rig_say_words(r, a, 5); /* of an attempt that is over */
        rig_destroy(r);
    }
}

static void words_that_never_come_end_by_the_deadline(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(20, 2);
    rig_attempt *a = rig_add(r, 40, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_say_words(r, a, 7);
    rig_deliver(r, a, NULL);
    rig_settle(r);
    rig_advance(r, RIG_DEADLINE_MS * 1000u - RIG_TICK_US);
    assert_int_equal(rig_view(r).waiting, 2);
    rig_advance(r, 2 * RIG_TICK_US);
    for (uint32_t n = 0; n < 2; n++) {
        rig_expect_error(r, a, n, BT_ERR_REQUEST_DEADLINE, "the prompt (7 of 40 words)");
        assert_int_equal(rig_rows(r, a, n), 1);
    }
    rig_destroy(r);
}

static void rows_that_never_come_end_by_the_deadline(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(20, 2);
    rig_attempt *a = rig_add(r, 40, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_say_words(r, a, UINT32_MAX);
    rig_cancel(r, a, 1);
    rig_advance(r, RIG_DEADLINE_MS * 1000u + RIG_TICK_US);
    rig_expect_error(r, a, 0, BT_ERR_REQUEST_DEADLINE, "rows (0 of 2)");
    rig_expect_silence(a, 1);
    rig_destroy(r);
}

static void bad_words_end_the_attempt(void **state) {
    (void)state;
    for (int is_live = 0; is_live < 2; is_live++) {
        rig *r = rig_create(NULL);
        const proto_generation g = rig_generation(20, 2);
        rig_attempt *a = rig_add(r, 40, &g);
        assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
        if (is_live) rig_deliver(r, a, NULL);
        rig_settle(r);
        const int32_t good = a->words[30];
        a->words[30] = RIG_VOCAB;
        rig_say_words(r, a, UINT32_MAX);
        a->words[30] = good;
        for (uint32_t n = 0; n < 2; n++)
            rig_expect_error(r, a, n, BT_ERR_REQUEST_INVALID, "outside the vocabulary");
        rig_expect_empty(r);
        rig_destroy(r);
    }
}

static void words_that_come_twice_end_the_attempt(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    r->is_compute_held = true;
    const proto_generation g = rig_generation(20, 2);
    rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    a->words_sent = 0;
    rig_say_words(r, a, UINT32_MAX);
    for (uint32_t n = 0; n < 2; n++)
        rig_expect_error(r, a, n, BT_ERR_REQUEST_DUPLICATE, "does not follow");
    r->is_compute_held = false;
    rig_settle(r);
    rig_destroy(r);
}

/* ---- parameters ------------------------------------------------------------------------------ */

/* Every parameter counts in what the computing draws, also behind a retraction. */
static void every_parameter_reaches_the_draws(void **state) {
    (void)state;
    proto_generation cases[10];
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++)
        cases[i] = rig_generation(30, 2);
    cases[0].frequency_penalty = 0.5f;
    cases[1].presence_penalty = -1.0f;
    cases[2].repetition_penalty = 1.5f;
    cases[3].min_p = 0.25f;
    cases[4].filter = SAMPLER_FILTER_RANK;
    cases[5].bias_count = 5;
    cases[6].top_logprobs = 5;
    cases[6].logprob_id_count = 6;
    cases[7].min_new_tokens = 13;
    cases[7].banned_id_count = 2;
    cases[7].stop_ids[0] = 11;
    cases[7].stop_ids[1] = 12;
    cases[8] = cases[7];
    cases[8].mask_mode = SAMPLER_MASK_OFF;
    cases[8].min_new_tokens = 1; /* the first row only, which is prefill's */
    cases[9].vocab_limit = 3;
    cases[9].top_logprobs = 5; /* of which there are three */
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        for (uint32_t pages = 5; pages <= 64; pages += 59) {
            rig *r = rig_create(&(rig_options){.pages = pages});
            const rig_attempt *a = rig_start(r, 40, &cases[i], UINT64_MAX);
            rig_settle(r);
            rig_expect_answer(r, a, 0);
            rig_expect_answer(r, a, 1);
            assert_int_equal(rig_view(r).retractions_total > 0, pages == 5);
            rig_destroy(r);
        }
    }
}

static void what_nobody_asked_for_takes_no_memory(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    proto_generation g = rig_generation(5, 1);
    g.mask_mode = SAMPLER_MASK_OFF;
    (void)rig_start(r, 20, &g, UINT64_MAX);
    rig_settle(r);
    assert_null(r->core->step.seen_ids);
    assert_null(r->core->step.top);
    assert_null(r->core->step.id_logprobs);
    g.top_logprobs = 1;
    (void)rig_start(r, 20, &g, UINT64_MAX);
    rig_settle(r);
    assert_null(r->core->step.seen_ids);
    assert_non_null(r->core->step.top);
    assert_null(r->core->step.id_logprobs);
    rig_destroy(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_share_the_prompt_and_differ),
        cmocka_unit_test(full_pages_are_held_and_the_tail_is_copied),
        cmocka_unit_test(samples_end_one_by_one),
        cmocka_unit_test(a_row_that_failed_ends_its_sample_alone),
        cmocka_unit_test(two_failed_rows_leave_one_sample_without_sharing),
        cmocka_unit_test(one_new_token_needs_no_pages),
        cmocka_unit_test(credit_is_a_samples_own),
        cmocka_unit_test(whole_rows_are_counted_when_a_reader_is_given_up),
        cmocka_unit_test(samples_cancelled_during_the_handoff_never_start),
        cmocka_unit_test(the_last_cancelled_sample_ends_the_reservation),
        cmocka_unit_test(an_attempt_is_cancelled_with_samples_in_a_step),
        cmocka_unit_test(places_are_all_or_nothing),
        cmocka_unit_test(a_slow_reader_needs_no_room),
        cmocka_unit_test(many_samples_may_need_more_pages_than_there_are),
        cmocka_unit_test(words_may_come_at_any_time),
        cmocka_unit_test(words_that_never_come_end_by_the_deadline),
        cmocka_unit_test(rows_that_never_come_end_by_the_deadline),
        cmocka_unit_test(bad_words_end_the_attempt),
        cmocka_unit_test(words_that_come_twice_end_the_attempt),
        cmocka_unit_test(every_parameter_reaches_the_draws),
        cmocka_unit_test(what_nobody_asked_for_takes_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
