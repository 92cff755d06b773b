/* The prefill core against a real decode core, the loopback mover and a scripted router: what it
 * answers, in which order it computes, and that pages are given back from every state. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "decode/decode_internal.h"
#include "prefill/prefill_internal.h"
#include "world.h"

static world_stream stream; /* large; the tests run one after the other */

static void expect_done(world *w, proto_attempt a, bt_status status, const char *text) {
    proto_message done;
    assert_true(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
    assert_true(proto_attempt_equal(done.prefill_done.attempt, a));
    assert_int_equal(done.prefill_done.status, status);
    if (strstr(done.prefill_done.text, text) == NULL) fail_msg("'%s'", done.prefill_done.text);
}

static void expect_no_done(world *w) {
    proto_message done;
    assert_false(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
}

/* ---- computing ------------------------------------------------------------------------------- */

static void prompts_of_any_length_in_frames_and_chunks(void **state) {
    (void)state;
    static const uint32_t lengths[] = {1, 15, 16, 17, 31, 32, 33, 64, 100, 1000};
    for (size_t i = 0; i < BT_ARRAY_COUNT(lengths); i++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation g = world_generation(3, SAMPLER_MASK_SUPPORT);
        const proto_attempt a = world_new_attempt(w);
        const proto_reservation slot = world_reserve(w, a, lengths[i], &g, UINT64_MAX);
        world_run(w, a, &slot, lengths[i], &g, 7);
        world_settle(w);
        expect_done(w, a, BT_OK, "");
        expect_no_done(w);
        world_read(w, a, &stream);
        world_expect_rows(w, &stream, lengths[i], &g, 3);
        assert_int_equal(world_prefill_view(w).steps_total, (lengths[i] + 31) / 32);
        assert_int_equal(world_prefill_view(w).tokens_total, lengths[i]);
        world_expect_empty(w);
        world_destroy(w);
    }
}

static void the_tail_of_the_last_page_is_zero(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.prefill_pages = 2, .decode_pages = 3});
    world_register(w);
    for (uint32_t p = 0; p < 2; p++) {
        memset(kv_pool_page(w->prefill.pages, p), 0xaa, w->options.page_bytes);
    }
    const proto_generation g = world_generation(1, SAMPLER_MASK_OFF);
    (void)world_start(w, 20, &g, UINT64_MAX);
    world_settle(w);
    /* 4 of 16 tokens are used; the rest of some page is zero, at decode as well. */
    const uint32_t token_bytes = w->options.page_bytes / w->options.page_tokens;
    static const uint8_t zeros[1024];
    for (int s = 0; s < 2; s++) {
        uint32_t found = 0;
        kv_pool *pool = s == 0 ? w->prefill.pages : w->decode.pages;
        for (uint32_t p = 0; p < 2; p++) {
            const uint8_t *page = kv_pool_page(pool, p);
            found += memcmp(page + 4 * token_bytes, zeros, 12 * token_bytes) == 0 &&
                     memcmp(page, zeros, token_bytes) != 0;
        }
        assert_int_equal(found, 1);
    }
    world_expect_empty(w);
    world_destroy(w);
}

static void without_new_tokens_nothing_is_handed_over(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(0, SAMPLER_MASK_SUPPORT);
    const proto_attempt a = world_new_attempt(w);
    world_run(w, a, &(proto_reservation){0}, 100, &g, 100);
    world_settle(w);
    expect_done(w, a, BT_OK, "");
    assert_int_equal(world_prefill_view(w).steps_total, 4);
    world_expect_empty(w);
    world_destroy(w);
}

/* The timer's check notices a page and a slot that nobody in hand owns. */
static void what_nobody_owns_is_noticed(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    uint32_t page = 0;
    row_slot slot;
    assert_true(prefill_core_check(w->prefill.prefill) && decode_core_check(w->decode.decode));
    assert_int_equal(kv_pool_acquire(w->prefill.pages, 999, 1, &page), BT_OK);
    assert_false(prefill_core_check(w->prefill.prefill));
    kv_pool_release(w->prefill.pages, 999, &page, 1);
    assert_int_equal(kv_pool_acquire(w->decode.pages, 999, 1, &page), BT_OK);
    assert_false(decode_core_check(w->decode.decode));
    kv_pool_release(w->decode.pages, 999, &page, 1);
    row_pool *rows = w->prefill.prefill->member.rows;
    assert_int_equal(row_pool_acquire(rows, &slot), BT_OK);
    assert_false(prefill_core_check(w->prefill.prefill));
    row_pool_release(rows, slot);
    rows = w->decode.decode->member.rows;
    assert_int_equal(row_pool_acquire(rows, &slot), BT_OK);
    assert_false(decode_core_check(w->decode.decode));
    row_pool_release(rows, slot);
    assert_true(prefill_core_check(w->prefill.prefill) && decode_core_check(w->decode.decode));
    world_destroy(w);
}

static void who_finds_no_pages_waits_and_is_passed_by_what_fits(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.prefill_pages = 8});
    world_register(w);
    const proto_generation g = world_generation(1, SAMPLER_MASK_OFF);
    w->is_network_held = true; /* no ack: pages stay pinned */
    const proto_attempt first = world_start(w, 80, &g, UINT64_MAX);
    const proto_attempt large = world_start(w, 100, &g, UINT64_MAX);
    const proto_attempt small = world_start(w, 16, &g, UINT64_MAX);
    world_settle(w);
    expect_done(w, small, BT_OK, "");
    expect_done(w, first, BT_OK, "");
    expect_no_done(w);
    prefill_view view = world_prefill_view(w);
    assert_int_equal(view.sending, 2);
    assert_int_equal(view.queued, 1);
    assert_int_equal(view.pages_free, 2);
    assert_int_equal(view.queued_tokens, 100);
    assert_false(view.is_step_running);
    w->is_network_held = false;
    world_settle(w);
    expect_done(w, large, BT_OK, "");
    world_expect_empty(w);
    world_destroy(w);
}

static void overflow_is_the_clients_and_costs_nobody_else(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = 1, .support_max = 8});
    world_register(w);
    proto_generation g = world_generation(5, SAMPLER_MASK_SUPPORT);
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    g.top_k = 1;
    const proto_attempt greedy = world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    proto_message done;
    assert_true(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
    assert_true(proto_attempt_equal(done.prefill_done.attempt, a));
    assert_int_equal(done.prefill_done.status, BT_ERR_REQUEST_OVERFLOW);
    assert_true(done.prefill_done.cap_needed > 1);
    assert_non_null(strstr(done.prefill_done.text, "sampling_mask_max_tokens 1"));
    expect_done(w, greedy, BT_OK, "");
    world_cancel(w, &w->decode, a); /* what the router does */
    world_settle(w);
    world_read(w, greedy, &stream);
    world_expect_rows(w, &stream, 40, &g, 5);
    world_read(w, a, &stream);
    assert_int_equal(stream.frames, 0);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_broken_capture_is_reported(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(5, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    assert_true(compute_sim_poll(w->prefill.compute, w->now_us)); /* the first of two chunks */
    for (uint32_t p = 0; p < w->options.prefill_pages; p++) {
        memset(kv_pool_page(w->prefill.pages, p), 0x11, w->options.page_bytes);
    }
    w->prefill.is_compute_held = false;
    w->is_network_held = true; /* the broken page would fail its checksum first */
    world_settle(w);
    expect_done(w, a, BT_ERR_REQUEST_CAPTURE, "token 0");
    world_cancel(w, &w->decode, a);
    w->is_network_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- intake ---------------------------------------------------------------------------------- */

static void say_run(world *w, const proto_run *run, void *payload, size_t bytes) {
    const proto_message message = {
        .kind = PROTO_RUN, .run = *run, .payload = payload, .payload_bytes = bytes};
    world_say(w, &w->prefill, PROTO_LANE_STREAMS, &message);
}

static proto_run make_run(world *w, uint32_t prompt_tokens) {
    return (proto_run){.attempt = world_new_attempt(w),
                       .decode_worker_id = w->decode.worker_id,
                       .decode_incarnation = w->decode.incarnation,
                       .slot_count = 1,
                       .slots = {{.generation = 1}},
                       .prompt_tokens = prompt_tokens,
                       .deadline_ms = 5000,
                       .generation = world_generation(5, SAMPLER_MASK_OFF)};
}

static void bad_runs_are_refused_by_name(void **state) {
    (void)state;
    enum { CASES = 12 };
    world *w = world_create(&(world_options){.prefill_pages = 10, .context_tokens = 500});
    world_register(w);
    proto_run runs[CASES];
    for (int i = 0; i < CASES; i++)
        runs[i] = make_run(w, 20);
    runs[0].attempt.router_incarnation = 5;
    runs[1].generation.temperature = 0;
    runs[2].prompt_tokens = 0;
    runs[3].deadline_ms = 0;
    runs[4].prompt_tokens = 501;
    runs[5].prompt_tokens = 161;
    runs[6].decode_worker_id = 999;
    runs[7].decode_incarnation = 999;
    runs[8].generation.mask_mode = 7;
    runs[9].generation.banned_id_count = 2;
    runs[9].generation.stop_ids[1] = WORLD_VOCAB;
    runs[10].slot_count = 2;
    runs[11].slot_count = 0;
    static const struct {
        bt_status status;
        const char *text;
    } expected[CASES] = {
        {BT_ERR_REQUEST_STALE, "another router"},   {BT_ERR_REQUEST_INVALID, "temperature"},
        {BT_ERR_REQUEST_INVALID, "0 tokens"},       {BT_ERR_REQUEST_INVALID, "0 ms"},
        {BT_ERR_REQUEST_TOO_LARGE, "context"},      {BT_ERR_REQUEST_TOO_LARGE, "11 KV pages"},
        {BT_ERR_PEER_GONE, "999 is not connected"}, {BT_ERR_PEER_GONE, "not connected"},
        {BT_ERR_REQUEST_INVALID, "mask_mode"},      {BT_ERR_REQUEST_INVALID, "stop id 5000"},
        {BT_ERR_REQUEST_INVALID, "2 row slots"},    {BT_ERR_REQUEST_INVALID, "0 row slots"},
    };
    for (int i = 0; i < CASES; i++) {
        say_run(w, &runs[i], w->prompt, 20 * sizeof(int32_t));
        expect_done(w, runs[i].attempt, expected[i].status, expected[i].text);
        /* The rest of its prompt says nothing any more. */
        runs[i].first_word = 10;
        say_run(w, &runs[i], w->prompt, 4);
        expect_no_done(w);
    }
    assert_int_equal(world_prefill_view(w).refused_total, CASES);
    world_expect_empty(w);
    world_destroy(w);
}

static void bad_prompts_are_refused_by_name(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    int32_t ids[20] = {0};
    ids[7] = WORLD_VOCAB;
    proto_run run = make_run(w, 20);
    say_run(w, &run, ids, sizeof ids);
    expect_done(w, run.attempt, BT_ERR_REQUEST_INVALID, "prompt token 5000 is outside");
    ids[7] = -1;
    run = make_run(w, 20);
    say_run(w, &run, ids, sizeof ids);
    expect_done(w, run.attempt, BT_ERR_REQUEST_INVALID, "prompt token -1 is outside");
    run = make_run(w, 20);
    say_run(w, &run, w->prompt, 21 * 4);
    expect_done(w, run.attempt, BT_ERR_REQUEST_INVALID, "84 bytes");
    run = make_run(w, 20);
    say_run(w, &run, w->prompt, 6);
    expect_done(w, run.attempt, BT_ERR_REQUEST_INVALID, "6 bytes");
    run = make_run(w, 20);
    say_run(w, &run, NULL, 0);
    expect_done(w, run.attempt, BT_ERR_REQUEST_INVALID, "0 bytes");
    world_expect_empty(w);
    world_destroy(w);
}

static void parts_that_do_not_follow_end_the_attempt(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    proto_run run = make_run(w, 20);
    say_run(w, &run, w->prompt, 40);
    run.first_word = 11;
    say_run(w, &run, w->prompt, 36);
    expect_done(w, run.attempt, BT_ERR_REQUEST_DUPLICATE, "from word 11");
    run = make_run(w, 20);
    say_run(w, &run, w->prompt, 40);
    run.first_word = 10;
    run.prompt_tokens = 21;
    say_run(w, &run, w->prompt, 40);
    expect_done(w, run.attempt, BT_ERR_REQUEST_DUPLICATE, "from word 10");
    /* The same prompt once more, while it is computed. */
    w->prefill.is_compute_held = true;
    const proto_generation g = world_generation(5, SAMPLER_MASK_OFF);
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    run = make_run(w, 40);
    run.attempt = a;
    say_run(w, &run, w->prompt, 160);
    expect_done(w, a, BT_ERR_REQUEST_DUPLICATE, "from word 0");
    say_run(w, &run, w->prompt, 160); /* it is leaving: no more is said */
    expect_no_done(w);
    w->prefill.is_compute_held = false;
    world_cancel(w, &w->decode, a);
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_full_queue_is_refused(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.attempts_max = 2});
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    (void)world_start(w, 40, &g, UINT64_MAX);
    (void)world_start(w, 40, &g, UINT64_MAX);
    const proto_run run = make_run(w, 20);
    say_run(w, &run, w->prompt, 80);
    expect_done(w, run.attempt, BT_ERR_REQUEST_FULL, "2 prompts");
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- cancel and deadlines -------------------------------------------------------------------- */

static void cancel_in_every_state(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_SUPPORT);
    const proto_run part = make_run(w, 20);
    say_run(w, &part, w->prompt, 40); /* assembling */
    w->prefill.is_compute_held = true;
    const proto_attempt computing = world_start(w, 300, &g, UINT64_MAX);
    const proto_attempt queued = world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    prefill_view view = world_prefill_view(w);
    assert_int_equal(view.queued, 2);
    assert_int_equal(view.computing, 1);
    world_cancel(w, &w->prefill, part.attempt);
    world_cancel(w, &w->prefill, queued);
    world_cancel(w, &w->prefill, computing);
    world_cancel(w, &w->prefill, computing);
    world_cancel(w, &w->prefill, world_new_attempt(w));
    view = world_prefill_view(w);
    assert_int_equal(view.attempts, 1); /* the step computes on its pages */
    assert_int_equal(view.queued_tokens, 0);
    w->prefill.is_compute_held = false;
    world_settle(w);
    assert_int_equal(world_prefill_view(w).steps_total, 1); /* the other chunks never ran */
    expect_no_done(w);
    world_cancel(w, &w->decode, computing);
    world_cancel(w, &w->decode, queued);
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void cancel_between_chunks_and_while_sending(void **state) {
    (void)state;
    for (int is_sending = 0; is_sending < 2; is_sending++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation g = world_generation(2, SAMPLER_MASK_SUPPORT);
        w->is_network_held = true;
        const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
        if (is_sending) {
            world_settle(w);
            expect_done(w, a, BT_OK, "");
        } else {
            w->prefill.is_compute_held = true;
            assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
        }
        world_cancel(w, &w->prefill, a);
        const prefill_view view = world_prefill_view(w);
        assert_int_equal(view.attempts, 1); /* sends still read the pages */
        assert_true(view.pages_quarantined > 0);
        w->prefill.is_compute_held = false;
        world_cancel(w, &w->decode, a);
        w->is_network_held = false;
        world_settle(w);
        expect_no_done(w);
        world_expect_empty(w);
        world_destroy(w);
    }
}

static void deadlines_in_every_state(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    const proto_run part = make_run(w, 20);
    say_run(w, &part, w->prompt, 40);
    w->prefill.is_compute_held = true;
    const proto_attempt computing = world_start(w, 100, &g, UINT64_MAX);
    const proto_attempt queued = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    world_advance(w, 5100 * 1000);
    expect_done(w, part.attempt, BT_ERR_REQUEST_DEADLINE, "while assembling");
    expect_done(w, computing, BT_ERR_REQUEST_DEADLINE, "while computing, with 0 of 100");
    expect_done(w, queued, BT_ERR_REQUEST_DEADLINE, "while queued");
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_send_that_is_not_acked_ends_by_its_deadline(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    w->is_network_held = true;
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    expect_done(w, a, BT_OK, "");
    world_advance(w, 5100 * 1000);
    expect_done(w, a, BT_ERR_REQUEST_DEADLINE, "");
    assert_int_equal(world_prefill_view(w).quarantined, 1);
    /* Past the grace the endpoint is closed, and what it held comes back. */
    world_advance(w, 3000 * 1000);
    proto_message pair;
    assert_true(world_take(&w->prefill, PROTO_PAIR_READY, &pair));
    assert_int_equal(pair.pair.status, BT_ERR_PEER_TIMEOUT);
    w->is_network_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

/* Only a handoff needs that memory stays as it is when an attempt ends. */
static void pages_without_a_handoff_are_not_quarantined(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    const proto_attempt a = world_new_attempt(w);
    world_run(w, a, &(proto_reservation){0}, 50, &none, 50);
    world_settle(w);
    world_cancel(w, &w->prefill, a);
    world_settle(w);
    assert_int_equal(world_prefill_view(w).attempts, 1); /* the step has its pages */
    assert_int_equal(world_prefill_view(w).pages_quarantined, 0);
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- peers and router ------------------------------------------------------------------------ */

static void a_decode_that_is_gone_fails_what_goes_to_it(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_SUPPORT);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    w->is_network_held = true;
    const proto_attempt sending = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    expect_done(w, sending, BT_OK, "");
    w->prefill.is_compute_held = true;
    const proto_attempt computing = world_start(w, 100, &g, UINT64_MAX);
    const proto_attempt queued = world_start(w, 40, &g, UINT64_MAX);
    const proto_attempt alone = world_new_attempt(w);
    world_run(w, alone, &(proto_reservation){0}, 50, &none, 50);
    world_settle(w);
    const proto_message gone = {
        .kind = PROTO_PEER_GONE,
        .pair = {.worker_id = w->decode.worker_id, .incarnation = w->decode.incarnation}};
    world_say(w, &w->prefill, PROTO_LANE_CONTROL, &gone);
    w->is_network_held = false;
    world_settle(w);
    expect_done(w, sending, BT_ERR_PEER_GONE, "");
    expect_done(w, computing, BT_ERR_PEER_GONE, "");
    w->prefill.is_compute_held = false;
    world_settle(w);
    expect_done(w, queued, BT_ERR_PEER_GONE, "cannot begin");
    expect_done(w, alone, BT_OK, ""); /* it needs no decode */
    const prefill_view view = world_prefill_view(w);
    assert_int_equal(view.attempts, 0);
    assert_int_equal(view.pages_free, view.pages_total);
    assert_int_equal(view.rows_free, view.rows_total);
    world_destroy(w);
}

static void a_router_that_is_gone_ends_everything_and_may_come_back(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_SUPPORT);
    const proto_run part = make_run(w, 20);
    say_run(w, &part, w->prompt, 40);
    w->is_network_held = true;
    const proto_attempt sending = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    expect_done(w, sending, BT_OK, "");
    w->prefill.is_compute_held = true;
    (void)world_start(w, 100, &g, UINT64_MAX);
    (void)world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    prefill_core_on_closed(w->prefill.prefill);
    decode_core_on_closed(w->decode.decode);
    w->decode.wants_streams = false;
    w->prefill.wants_streams = false;
    w->prefill.is_compute_held = false;
    w->is_network_held = false;
    world_settle(w);
    expect_no_done(w);
    world_expect_empty(w);
    w->router_incarnation = 0xbeef;
    w->options.cap = 3;
    world_register(w);
    const proto_attempt a = world_start(w, 50, &g, UINT64_MAX);
    world_settle(w);
    proto_message done;
    assert_true(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
    assert_true(proto_attempt_equal(done.prefill_done.attempt, a));
    world_cancel(w, &w->decode, a);
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_failed_step_breaks_the_worker_honestly(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    const proto_attempt b = world_start(w, 100, &g, UINT64_MAX);
    compute_sim_fail_next(w->prefill.compute, BT_ERR_WORKER_INTERNAL);
    w->prefill.is_compute_held = false;
    world_settle(w);
    assert_int_equal(w->prefill.broken, BT_ERR_WORKER_INTERNAL);
    expect_done(w, a, BT_ERR_WORKER_INTERNAL, "step failed");
    expect_done(w, b, BT_ERR_WORKER_INTERNAL, "step failed");
    world_cancel(w, &w->decode, a);
    world_cancel(w, &w->decode, b);
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void messages_out_of_place_hang_up(void **state) {
    (void)state;
    static const struct {
        proto_kind kind;
        proto_lane lane;
        const char *text;
    } cases[] = {
        {PROTO_RESERVE, PROTO_LANE_CONTROL, "reserve is not for a prefill worker"},
        {PROTO_CREDIT, PROTO_LANE_CONTROL, "credit is not for"},
        {PROTO_CREDIT, PROTO_LANE_STREAMS, "wrong connection"},
        {PROTO_RUN, PROTO_LANE_CONTROL, "wrong connection"},
        {PROTO_CANCEL, PROTO_LANE_CONTROL, "wrong connection"},
        {PROTO_ABORT, PROTO_LANE_CONTROL, "abort is not for a prefill worker"},
        {PROTO_PING, PROTO_LANE_STREAMS, "wrong connection"},
        {PROTO_READY, PROTO_LANE_CONTROL, "ready is not for"},
        {PROTO_WELCOME, PROTO_LANE_CONTROL, "a welcome came while serving"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        world *w = world_create(NULL);
        world_register(w);
        world_say(w, &w->prefill, cases[i].lane, &(proto_message){.kind = cases[i].kind});
        assert_int_equal(w->prefill.hang_ups, 1);
        if (strstr(w->prefill.hang_up_text, cases[i].text) == NULL) {
            fail_msg("'%s'", w->prefill.hang_up_text);
        }
        world_settle(w);
        world_destroy(w);
    }
}

static void pongs_tell_the_queue(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    (void)world_start(w, 100, &g, UINT64_MAX);
    (void)world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
    const proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = 9}};
    world_say(w, &w->prefill, PROTO_LANE_CONTROL, &ping);
    proto_message pong;
    assert_true(world_take(&w->prefill, PROTO_PONG, &pong));
    assert_int_equal(pong.ping.sequence, 9);
    /* The first had a step of its own; the second has begun with the next one. */
    assert_int_equal(pong.ping.queued_tokens, 100 - 32 + 40);
    assert_int_equal(pong.ping.pages_free, 64 - 7 - 3);
    assert_int_equal(pong.ping.sequences_running, 2);
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_of_any_length_in_frames_and_chunks),
        cmocka_unit_test(the_tail_of_the_last_page_is_zero),
        cmocka_unit_test(without_new_tokens_nothing_is_handed_over),
        cmocka_unit_test(what_nobody_owns_is_noticed),
        cmocka_unit_test(who_finds_no_pages_waits_and_is_passed_by_what_fits),
        cmocka_unit_test(overflow_is_the_clients_and_costs_nobody_else),
        cmocka_unit_test(a_broken_capture_is_reported),
        cmocka_unit_test(bad_runs_are_refused_by_name),
        cmocka_unit_test(bad_prompts_are_refused_by_name),
        cmocka_unit_test(parts_that_do_not_follow_end_the_attempt),
        cmocka_unit_test(a_full_queue_is_refused),
        cmocka_unit_test(cancel_in_every_state),
        cmocka_unit_test(cancel_between_chunks_and_while_sending),
        cmocka_unit_test(deadlines_in_every_state),
        cmocka_unit_test(a_send_that_is_not_acked_ends_by_its_deadline),
        cmocka_unit_test(pages_without_a_handoff_are_not_quarantined),
        cmocka_unit_test(a_decode_that_is_gone_fails_what_goes_to_it),
        cmocka_unit_test(a_router_that_is_gone_ends_everything_and_may_come_back),
        cmocka_unit_test(a_failed_step_breaks_the_worker_honestly),
        cmocka_unit_test(messages_out_of_place_hang_up),
        cmocka_unit_test(pongs_tell_the_queue),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
