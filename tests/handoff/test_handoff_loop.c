/* The handoff over the in-process mover: every order of events, and at every step a loss, a cancel,
 * the death of either side. Each ends with all pages and slots released once and nothing written
 * late (ends.c asserts it). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "duo.h"

static sample make_sample(uint64_t number, uint32_t prompt_tokens, uint32_t mode, uint32_t count) {
    return (sample){.number = number,
                    .prompt_tokens = prompt_tokens,
                    .mask_mode = mode,
                    .support_count = mode == ROW_MASK_OFF ? 0 : count};
}

static void assert_done(duo *d, uint64_t number) {
    const end_attempt *sent = end_find(d->prefill, number);
    const end_attempt *got = end_find(d->decode, number);
    assert_int_equal(sent->acked, 1);
    assert_int_equal(got->ready, 1);
    assert_true(got->is_intact);
}

/* One page, less than a page, a chunk exactly, several chunks; all modes and support sizes. */
static void every_shape_arrives(void **state) {
    (void)state;
    static const uint32_t prompts[] = {1, 3, 4, 5, 16, 17, 32, 61};
    static const uint32_t counts[] = {1, 2, DUO_CAP - 1, DUO_CAP};
    const duo_options options = {0};
    duo *d = duo_create(&options);
    uint64_t number = 1;
    for (size_t p = 0; p < sizeof prompts / sizeof prompts[0]; p++) {
        for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                const sample s = make_sample(number, prompts[p], mode, counts[c]);
                duo_begin(d, &s);
                duo_run(d);
                assert_done(d, number);
                number++;
            }
        }
    }
    duo_destroy(d);
}

static void all_checksum_modes_work(void **state) {
    (void)state;
    for (int mode = RECORD_CHECKSUM_OFF; mode <= RECORD_CHECKSUM_FULL; mode++) {
        const duo_options options = {.checksum = (record_checksum)mode, .is_checksum_given = true};
        duo *d = duo_create(&options);
        const sample s = make_sample(5, 61, ROW_MASK_SUPPORT, 7);
        duo_begin(d, &s);
        duo_run(d);
        assert_done(d, 5);
        duo_destroy(d);
    }
}

/* Several samples of one prompt: KV once, a row each, whatever was asked for beside the mask. */
static void rows_of_all_samples_arrive(void **state) {
    (void)state;
    static const uint32_t tops[] = {0, 1, PROTO_TOP_LOGPROBS_MAX};
    static const uint32_t ids[] = {0, PROTO_LOGPROB_IDS_MAX, 3};
    const duo_options options = {0};
    duo *d = duo_create(&options);
    uint64_t number = 1;
    for (uint32_t samples = 1; samples <= ENDS_SAMPLES_MAX; samples++) {
        for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
            sample s = make_sample(number, 7 * samples, mode, samples);
            s.samples = samples;
            s.top_count = tops[mode];
            s.id_logprob_count = ids[mode];
            const uint64_t before = handoff_receiver_get_counts(d->decode->receiver).chunks;
            duo_begin(d, &s);
            duo_run(d);
            assert_done(d, number);
            number++;
            const uint64_t chunks = handoff_receiver_get_counts(d->decode->receiver).chunks;
            assert_true(chunks - before <= (7 * samples + 3) / 4);
        }
    }
    duo_destroy(d);
}

/* A page larger than a chunk travels layer by layer: one, two or three of its four at a time. */
static void large_pages_are_cut_at_layers(void **state) {
    (void)state;
    for (uint32_t layers = 1; layers < DUO_LAYERS; layers++) {
        const duo_options options = {.chunk_bytes_max = layers * (DUO_PAGE_BYTES / DUO_LAYERS) + 8};
        duo *d = duo_create(&options);
        const sample s = make_sample(9, 10, ROW_MASK_SELECTED, 3);
        duo_begin(d, &s);
        duo_run(d);
        assert_done(d, 9);
        const uint32_t per_page = (DUO_LAYERS + layers - 1) / layers;
        assert_int_equal(handoff_receiver_get_counts(d->decode->receiver).chunks, 3 * per_page);
        duo_destroy(d);
    }
}

/* The real limit, with pages above 8 MiB. */
static void pages_above_the_maximum_are_cut(void **state) {
    (void)state;
    const duo_options options = {.chunk_bytes_max = HANDOFF_CHUNK_BYTES_MAX,
                                 .page_bytes = 4 * (size_t)(3 << 20),
                                 .part_bytes = 1 << 20};
    duo *d = duo_create(&options);
    const sample s = make_sample(9, 8, ROW_MASK_SELECTED, 3);
    duo_begin(d, &s);
    duo_run(d);
    assert_done(d, 9);
    assert_int_equal(handoff_receiver_get_counts(d->decode->receiver).chunks, 4);
    duo_destroy(d);
}

/* Several attempts at once under thousands of random orders, with a mover that is often full. */
static void random_orders_all_arrive(void **state) {
    (void)state;
    for (uint32_t seed = 1; seed <= 400; seed++) {
        const duo_options options = {
            .sends_max = 1 + seed % 5, .sends_in_flight = 1 + seed % 4, .part_bytes = 700};
        duo *d = duo_create(&options);
        d->random = seed * UINT64_C(0x9E3779B97F4A7C15);
        for (uint64_t number = 1; number <= 5; number++) {
            sample s = make_sample(number, 1 + duo_random(d, 40), duo_random(d, 3),
                                   1 + duo_random(d, DUO_CAP));
            s.samples = 1 + duo_random(d, 3);
            s.top_count = duo_random(d, 3);
            duo_begin(d, &s);
        }
        for (;;) {
            while (duo_step_random(d))
                continue;
            if (handoff_sender_active_count(d->prefill->sender) == 0) break;
            duo_wait(d, 1000); /* an ack that found the mover full goes out with a tick */
        }
        for (uint64_t number = 1; number <= 5; number++)
            assert_done(d, number);
        duo_destroy(d);
    }
}

/* All orders of two messages (chunk and row) and what follows from them, one after the other: each
 * run replays a prefix of choices and then takes the first event, until every choice was made. */
static void every_order_of_chunk_and_row(void **state) {
    (void)state;
    enum { DEPTH = 64 };
    uint32_t choice[DEPTH] = {0};
    uint32_t width[DEPTH];
    uint32_t runs = 0;
    for (bool is_more = true; is_more; runs++) {
        const duo_options options = {.part_bytes = 4096};
        duo *d = duo_create(&options);
        const sample s = make_sample(3, 6, ROW_MASK_SUPPORT, 2);
        duo_begin(d, &s);
        uint32_t depth = 0;
        for (uint32_t count; (count = xfer_loop_event_count(d->network)) > 0; depth++) {
            assert_true(depth < DEPTH);
            width[depth] = count;
            xfer_loop_step(d->network, choice[depth]);
        }
        assert_done(d, 3);
        duo_destroy(d);
        is_more = false;
        while (depth > 0 && !is_more) {
            depth--;
            is_more = choice[depth] + 1 < width[depth];
            choice[depth] = is_more ? choice[depth] + 1 : 0;
        }
    }
    print_message("%u orders\n", runs);
    assert_true(runs > 50);
}

/* What happens to a transfer of four chunks and a row after `steps` steps. */
typedef void (*disturbance)(duo *d, uint32_t steps);

static uint32_t disturb_at_every_step(disturbance disturb, bool is_random) {
    uint32_t steps = 0;
    for (bool is_over = false; !is_over; steps++) {
        for (uint32_t seed = 1; seed <= (is_random ? 12u : 1u); seed++) {
            const duo_options options = {.part_bytes = 1500, .sends_in_flight = 3};
            duo *d = duo_create(&options);
            const sample s = make_sample(11, 61, ROW_MASK_SUPPORT, 5);
            d->random = seed * UINT64_C(0x9E3779B97F4A7C15);
            duo_begin(d, &s);
            uint32_t done = 0;
            while (done < steps && duo_step_random(d))
                done++;
            is_over = done < steps;
            disturb(d, steps);
            duo_run(d);
            duo_destroy(d);
        }
    }
    return steps;
}

static void assert_works(duo *d, uint64_t number) {
    const sample s = make_sample(number, 21, ROW_MASK_SELECTED, 4);
    duo_begin(d, &s);
    duo_run(d);
    assert_done(d, number);
}

static void cancel_decode(duo *d, uint32_t steps) {
    (void)steps;
    end_cancel(d->decode, 11);
    duo_run(d);
    assert_works(d, 12);
}

static void cancel_prefill(duo *d, uint32_t steps) {
    (void)steps;
    end_cancel(d->prefill, 11);
    duo_run(d);
    /* Decode hears of it from the router, or passes its deadline. */
    if (steps % 2 == 0)
        end_cancel(d->decode, 11);
    else
        duo_wait(d, 20u * 1000 * 1000);
    duo_run(d);
    assert_works(d, 12);
}

static void cancel_both(duo *d, uint32_t steps) {
    if (steps % 2 == 0) end_cancel(d->decode, 11);
    end_cancel(d->prefill, 11);
    end_cancel(d->decode, 11);
    duo_run(d);
    assert_works(d, 12);
}

static void cancels_at_every_step(void **state) {
    (void)state;
    assert_true(disturb_at_every_step(cancel_decode, true) > 20);
    assert_true(disturb_at_every_step(cancel_prefill, true) > 20);
    assert_true(disturb_at_every_step(cancel_both, true) > 20);
}

static void restart_prefill(duo *d, uint32_t steps) {
    (void)steps;
    duo_kill_prefill(d);
    duo_run(d);
    assert_int_equal(end_find_peer(d->decode, d->prefill_peer)->closed, 1);
    end_assert_clean(d->decode);
    duo_start_prefill(d);
    duo_connect(d);
    assert_works(d, 12);
}

static void restart_decode(duo *d, uint32_t steps) {
    (void)steps;
    duo_kill_decode(d);
    duo_run(d);
    assert_int_equal(end_find_peer(d->prefill, d->decode_peer)->closed, 1);
    end_assert_clean(d->prefill);
    duo_start_decode(d);
    duo_connect(d);
    assert_works(d, 12);
}

static void deaths_at_every_step(void **state) {
    (void)state;
    assert_true(disturb_at_every_step(restart_prefill, true) > 20);
    assert_true(disturb_at_every_step(restart_decode, true) > 20);
}

/* The message that comes next is lost, and with it the connection: both sides find out, clean up,
 * and the same processes connect anew. */
static void lose_next(duo *d, uint32_t steps) {
    uint32_t index = 0;
    const xfer_loop_event_kind kind = steps % 2 == 0 ? XFER_LOOP_DELIVER : XFER_LOOP_COPY;
    if (!duo_find_event(d, kind, &index)) return;
    xfer_loop_drop(d->network, index);
    duo_run(d);
    assert_int_equal(end_find_peer(d->prefill, d->decode_peer)->closed, 1);
    assert_int_equal(end_find_peer(d->decode, d->prefill_peer)->closed, 1);
    duo_connect(d);
    assert_works(d, 12);
}

static void losses_at_every_step(void **state) {
    (void)state;
    assert_true(disturb_at_every_step(lose_next, true) > 20);
}

/* Cancelled while a chunk lands: the pages are not given back before it has landed. */
static void a_posted_receive_keeps_its_pages(void **state) {
    (void)state;
    const duo_options options = {.part_bytes = 512};
    uint32_t index = 0;
    duo *d = duo_create(&options);
    const sample s = make_sample(11, 16, ROW_MASK_OFF, 0);
    duo_begin(d, &s);
    assert_true(duo_find_event(d, XFER_LOOP_DELIVER, &index));
    xfer_loop_step(d->network, index);
    assert_true(duo_find_event(d, XFER_LOOP_COPY, &index));
    xfer_loop_step(d->network, index);
    end_cancel(d->decode, 11);
    assert_int_equal(end_find(d->decode, 11)->quiet, 0);
    assert_true(end_find(d->decode, 11)->is_holding);
    duo_run(d);
    assert_int_equal(end_find(d->decode, 11)->quiet, 1);
    assert_int_equal(end_find(d->decode, 11)->failed, 0);
    assert_int_equal(end_find(d->prefill, 11)->status, BT_ERR_REQUEST_CANCELLED);
    duo_destroy(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape_arrives),
        cmocka_unit_test(rows_of_all_samples_arrive),
        cmocka_unit_test(all_checksum_modes_work),
        cmocka_unit_test(large_pages_are_cut_at_layers),
        cmocka_unit_test(pages_above_the_maximum_are_cut),
        cmocka_unit_test(random_orders_all_arrive),
        cmocka_unit_test(every_order_of_chunk_and_row),
        cmocka_unit_test(cancels_at_every_step),
        cmocka_unit_test(deaths_at_every_step),
        cmocka_unit_test(losses_at_every_step),
        cmocka_unit_test(a_posted_receive_keeps_its_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
