/* The decode core against a real prefill core, the loopback mover and a scripted router: what it
 * answers, what it streams, and that pages and slots are given back from every state. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "decode/decode_internal.h"
#include "prefill/prefill_internal.h"
#include "proto/row_stream.h"
#include "world.h"

static world_stream stream; /* large; the tests run one after the other */

static void expect_error(world *w, proto_attempt a, bt_status status, const char *text) {
    world_read(w, a, &stream);
    assert_true(stream.has_finish);
    assert_int_equal(stream.last.finish, PROTO_FINISH_ERROR);
    assert_int_equal(stream.last.status, status);
    if (strstr(stream.last.text, text) == NULL) fail_msg("'%s'", stream.last.text);
    assert_int_equal(stream.last.rows_total, stream.row_count);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void rows_equal_one_process(void **state) {
    (void)state;
    for (uint32_t mode = SAMPLER_MASK_OFF; mode <= SAMPLER_MASK_SUPPORT; mode++) {
        world *w = world_create(NULL);
        world_register(w);
        proto_generation g = world_generation(20, mode);
        g.wants_logprob = mode != SAMPLER_MASK_SELECTED;
        const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
        world_settle(w);
        world_read(w, a, &stream);
        assert_true(stream.has_finish);
        assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
        assert_int_equal(stream.last.status, BT_OK);
        world_expect_rows(w, &stream, 100, &g, 20);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* The ids that exist are the request's, at both workers: the first row and the later ones. */
static void ids_past_the_limit_are_not_drawn(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    proto_generation g = world_generation(10, SAMPLER_MASK_SUPPORT);
    g.vocab_limit = 40;
    const proto_attempt a = world_start(w, 50, &g, UINT64_MAX);
    world_settle(w);
    world_read(w, a, &stream);
    world_expect_rows(w, &stream, 50, &g, 10);
    for (uint32_t i = 0; i < stream.row_count; i++)
        assert_in_range(stream.rows[i].token, 0, 39);
    world_expect_empty(w);
    world_destroy(w);
}

/* What only prefill knows travels in the row and is in every chunk. There is no prefix cache yet,
 * so the test says what it would have found. */
static void cached_tokens_travel_in_the_row(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(3, SAMPLER_MASK_SELECTED);
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    prefill_attempt *there = prefill_find(w->prefill.prefill, a);
    assert_non_null(there);
    there->cached_tokens = 48;
    world_settle(w);
    proto_message done;
    assert_true(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
    assert_int_equal(done.prefill_done.cached_tokens, 48);
    uint32_t chunks = 0;
    for (uint32_t i = 0; i < w->decode.sent_count; i++) {
        const proto_message *m = &w->decode.sent[i].message;
        if (m->kind != PROTO_CHUNK) continue;
        assert_int_equal(m->chunk.cached_tokens, 48);
        chunks++;
    }
    assert_true(chunks > 0);
    world_expect_empty(w);
    world_destroy(w);
}

/* Records of both workers are found by the whole id, from the first message to the release. */
static void attempts_are_found_by_number_and_router(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(3, SAMPLER_MASK_OFF);
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    const proto_attempt b = world_start(w, 41, &g, UINT64_MAX);
    const proto_attempt other = {.router_incarnation = a.router_incarnation + 1,
                                 .counter = a.counter};
    assert_int_equal(decode_find(w->decode.decode, a)->prompt_tokens, 40);
    assert_int_equal(decode_find(w->decode.decode, b)->prompt_tokens, 41);
    assert_null(decode_find(w->decode.decode, other));
    assert_int_equal(prefill_find(w->prefill.prefill, a)->prompt_tokens, 40);
    assert_int_equal(prefill_find(w->prefill.prefill, b)->prompt_tokens, 41);
    assert_null(prefill_find(w->prefill.prefill, other));
    world_settle(w);
    assert_null(decode_find(w->decode.decode, a));
    assert_null(decode_find(w->decode.decode, b));
    assert_null(prefill_find(w->prefill.prefill, a));
    assert_null(prefill_find(w->prefill.prefill, b));
    assert_true(decode_core_check(w->decode.decode));
    assert_true(prefill_core_check(w->prefill.prefill));
    world_expect_empty(w);
    world_destroy(w);
}

/* No opt-in, no cost: a worker that never saw a mask has no memory for one. */
static void memory_for_masks_is_made_when_one_is_asked_for(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    for (uint32_t mode = SAMPLER_MASK_OFF; mode <= SAMPLER_MASK_SELECTED; mode++) {
        const proto_generation g = world_generation(5, mode);
        (void)world_start(w, 40, &g, UINT64_MAX);
        world_settle(w);
        const uint32_t cap = mode == SAMPLER_MASK_OFF ? 0 : w->options.cap;
        assert_int_equal(w->decode.decode->step.seen_ids != NULL, cap != 0);
        const prefill_array *arrays = w->prefill.prefill->step.arrays;
        assert_int_equal(arrays[PREFILL_SUPPORT_IDS].capacity, cap * sizeof(int32_t));
        assert_int_equal(arrays[PREFILL_SUPPORT_LOGPROBS].capacity, 0);
    }
    world_expect_empty(w);
    world_destroy(w);
}

static void many_at_once_do_not_change_each_other(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.attempts_max = 8, .sequences_max = 8});
    world_register(w);
    proto_attempt attempts[8];
    proto_generation generations[8];
    for (uint32_t i = 0; i < 8; i++) {
        generations[i] = world_generation(5 + 3 * i, i % 3);
        generations[i].seed = i;
        attempts[i] = world_start(w, 17 + i, &generations[i], UINT64_MAX);
    }
    world_settle(w);
    for (uint32_t i = 0; i < 8; i++) {
        world_read(w, attempts[i], &stream);
        assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
        world_expect_rows(w, &stream, 17 + i, &generations[i], 5 + 3 * i);
    }
    /* Steps are shared: the longest has 26 rows, 25 of them decode's own. */
    assert_true(world_decode_view(w).steps_total < 5 + 8 + 11 + 14 + 17 + 20 + 23 + 26 - 8);
    world_expect_empty(w);
    world_destroy(w);
}

/* Token i of what one process draws. */
static int32_t expected_token(world *w, uint32_t prompt_tokens, const proto_generation *g,
                              uint32_t i) {
    static int32_t ids[WORLD_ROWS_MAX][WORLD_SUPPORT_MAX];
    static float logprobs[WORLD_ROWS_MAX][WORLD_SUPPORT_MAX];
    static sampler_row rows[WORLD_ROWS_MAX];
    const sampler_params params = world_sampling(w, g);
    for (uint32_t r = 0; r <= i; r++) {
        rows[r] = (sampler_row){.support_ids = ids[r], .support_logprobs = logprobs[r]};
    }
    assert_int_equal(
        compute_sim_expect(&w->decode.sim, &params, w->prompt, prompt_tokens, i + 1, rows), i + 1);
    return rows[i].token;
}

static void finishes_are_length_first_then_stop_ids(void **state) {
    (void)state;
    static const struct {
        uint32_t max_new_tokens, stop_row, rows;
        proto_finish finish;
    } cases[] = {
        {10, 0, 1, PROTO_FINISH_STOP},  {10, 4, 5, PROTO_FINISH_STOP},
        {5, 4, 5, PROTO_FINISH_LENGTH}, {1, 0, 1, PROTO_FINISH_LENGTH},
        {1, 9, 1, PROTO_FINISH_LENGTH},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        world *w = world_create(NULL);
        world_register(w);
        proto_generation g = world_generation(cases[i].max_new_tokens, SAMPLER_MASK_SELECTED);
        const int32_t stop = expected_token(w, 40, &g, cases[i].stop_row);
        g.stop_ids[0] = WORLD_VOCAB - 1;
        g.stop_ids[1] = stop;
        g.stop_id_count = 2;
        const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
        world_settle(w);
        world_read(w, a, &stream);
        assert_int_equal(stream.last.finish, cases[i].finish);
        if (cases[i].finish == PROTO_FINISH_STOP) assert_int_equal(stream.last.matched_id, stop);
        world_expect_rows(w, &stream, 40, &g, cases[i].rows);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* A seed with which row `row` is the first that does not fit into the cap. */
static proto_generation overflowing(world *w, uint32_t prompt_tokens, uint32_t row,
                                    uint32_t *cap_needed) {
    static int32_t ids[WORLD_ROWS_MAX][WORLD_SUPPORT_MAX];
    static float logprobs[WORLD_ROWS_MAX][WORLD_SUPPORT_MAX];
    static sampler_row rows[WORLD_ROWS_MAX];
    proto_generation g = world_generation(30, SAMPLER_MASK_SUPPORT);
    for (g.seed = 1; g.seed < 100000; g.seed++) {
        const sampler_params params = world_sampling(w, &g);
        for (uint32_t r = 0; r <= row; r++) {
            rows[r] = (sampler_row){.support_ids = ids[r], .support_logprobs = logprobs[r]};
        }
        const uint32_t count =
            compute_sim_expect(&w->decode.sim, &params, w->prompt, prompt_tokens, row + 1, rows);
        if (count != row + 1 || rows[row].status != SAMPLER_OVERFLOW) continue;
        *cap_needed = rows[row].cap_needed;
        return g;
    }
    fail_msg("no seed overflows at row %u", row);
    return g;
}

static void overflow_at_a_later_row_ends_with_the_rows_before_it(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = 7, .support_max = 8});
    world_register(w);
    uint32_t cap_needed = 0;
    const proto_generation g = overflowing(w, 33, 3, &cap_needed);
    const proto_attempt a = world_start(w, 33, &g, UINT64_MAX);
    world_settle(w);
    expect_error(w, a, BT_ERR_REQUEST_OVERFLOW, "sampling_mask_max_tokens 7");
    assert_int_equal(stream.last.cap_needed, cap_needed);
    world_expect_rows(w, &stream, 33, &g, 3);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_broken_capture_is_the_requests_own_error(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(10, SAMPLER_MASK_SUPPORT);
    w->decode.is_compute_held = true;
    const proto_attempt a = world_start(w, 33, &g, UINT64_MAX);
    world_settle(w);
    /* Row 0 is out; the step behind it finds pages that are not what was computed. */
    for (uint32_t page = 0; page < w->options.decode_pages; page++) {
        memset(kv_pool_page(w->decode.pages, page), 0x5a, w->options.page_bytes);
    }
    w->decode.is_compute_held = false;
    world_settle(w);
    expect_error(w, a, BT_ERR_REQUEST_CAPTURE, "token 1");
    world_expect_rows(w, &stream, 33, &g, 1);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- admission ------------------------------------------------------------------------------- */

static void expect_refused(const proto_reservation *r, bt_status status, const char *text) {
    assert_int_equal(r->status, status);
    assert_int_equal(r->slot_count, 0);
    if (strstr(r->text, text) == NULL) fail_msg("'%s'", r->text);
}

static void full_pages_are_followed_by_capacity(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.decode_pages = 10});
    world_register(w);
    proto_message message;
    const proto_generation g = world_generation(60, SAMPLER_MASK_OFF);
    const proto_attempt first = world_new_attempt(w);
    const proto_attempt second = world_new_attempt(w);
    assert_int_equal(world_reserve(w, first, 101, &g, 1).status, BT_OK);
    /* A page each for its first tokens and its next ones, and one for the growth of the other. */
    const proto_reservation full = world_reserve(w, second, 17, &g, 1);
    expect_refused(&full, BT_ERR_REQUEST_FULL,
                   "2 KV pages are needed and 2 for growth, 3 are free");
    world_settle(w);
    assert_false(world_take(&w->decode, PROTO_CAPACITY, &message));
    world_cancel(w, &w->decode, first);
    assert_true(world_take(&w->decode, PROTO_CAPACITY, &message));
    assert_int_equal(message.capacity.pages_free, 10);
    assert_int_equal(message.capacity.rows_free, 8);
    assert_int_equal(message.capacity.sequences_free, 8);
    assert_int_equal(world_reserve(w, second, 16, &g, 1).status, BT_OK);
    world_cancel(w, &w->decode, second);
    assert_false(world_take(&w->decode, PROTO_CAPACITY, &message)); /* nobody waits */
    world_expect_empty(w);
    world_destroy(w);
}

static void full_places_are_followed_by_capacity(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.sequences_max = 2});
    world_register(w);
    proto_message message;
    const proto_generation g = world_generation(4, SAMPLER_MASK_SELECTED);
    const proto_attempt a = world_start(w, 20, &g, UINT64_MAX);
    const proto_attempt b = world_new_attempt(w);
    assert_int_equal(world_reserve(w, b, 20, &g, 1).status, BT_OK);
    const proto_reservation full = world_reserve(w, world_new_attempt(w), 20, &g, 1);
    expect_refused(&full, BT_ERR_REQUEST_FULL, "every place");
    world_settle(w); /* a runs to its end */
    world_read(w, a, &stream);
    assert_true(stream.has_finish);
    assert_true(world_take(&w->decode, PROTO_CAPACITY, &message));
    assert_int_equal(message.capacity.sequences_free, 1);
    assert_false(world_take(&w->decode, PROTO_CAPACITY, &message));
    world_cancel(w, &w->decode, b);
    world_expect_empty(w);
    world_destroy(w);
}

static void what_never_fits_is_refused_by_name(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.decode_pages = 10, .context_tokens = 500});
    world_register(w);
    proto_generation g = world_generation(60, SAMPLER_MASK_OFF);
    proto_reservation r = world_reserve(w, world_new_attempt(w), 102, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_TOO_LARGE, "161 tokens need 11 KV pages");
    /* The last token's KV is never written: 101 + 60 tokens fill 160 places. */
    const proto_attempt whole = world_new_attempt(w);
    assert_int_equal(world_reserve(w, whole, 101, &g, 1).status, BT_OK);
    world_cancel(w, &w->decode, whole);
    r = world_reserve(w, world_new_attempt(w), 441, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_TOO_LARGE, "context of 500");
    g.max_new_tokens = 0;
    r = world_reserve(w, world_new_attempt(w), 10, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_INVALID, "0 new tokens");
    g = world_generation(5, 3);
    r = world_reserve(w, world_new_attempt(w), 10, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_INVALID, "mask_mode");
    g = world_generation(5, SAMPLER_MASK_OFF);
    r = world_reserve(w, world_new_attempt(w), 0, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_INVALID, "0 prompt tokens");
    g.banned_id_count = 2;
    g.stop_ids[1] = WORLD_VOCAB;
    r = world_reserve(w, world_new_attempt(w), 10, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_INVALID, "stop id 5000 is outside the vocabulary of 5000");
    g.banned_id_count = 1; /* what only stops is never looked up */
    g.stop_id_count = 2;
    const proto_attempt good = world_new_attempt(w);
    assert_int_equal(world_reserve(w, good, 10, &g, 1).status, BT_OK);
    world_cancel(w, &w->decode, good);
    world_expect_empty(w);
    world_destroy(w);
}

static void strangers_are_refused(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(5, SAMPLER_MASK_OFF);
    const proto_attempt a = world_new_attempt(w);
    assert_int_equal(world_reserve(w, a, 10, &g, 1).status, BT_OK);
    proto_reservation r = world_reserve(w, a, 10, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_DUPLICATE, "here already");
    assert_int_equal(world_decode_view(w).reserved, 1); /* and the first is not touched */
    r = world_reserve(w, (proto_attempt){.router_incarnation = 99, .counter = 1}, 10, &g, 1);
    expect_refused(&r, BT_ERR_REQUEST_STALE, "another router");
    const uint32_t known = w->prefill.worker_id;
    w->prefill.worker_id = 999;
    r = world_reserve(w, world_new_attempt(w), 10, &g, 1);
    expect_refused(&r, BT_ERR_PEER_GONE, "prefill worker 999");
    w->prefill.worker_id = known;
    world_cancel(w, &w->decode, a);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- cancel ---------------------------------------------------------------------------------- */

static void cancel_gives_back_a_reservation(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(5, SAMPLER_MASK_OFF);
    const proto_attempt a = world_new_attempt(w);
    assert_int_equal(world_reserve(w, a, 10, &g, 1).status, BT_OK);
    world_cancel(w, &w->decode, a);
    assert_int_equal(world_decode_view(w).attempts, 0);
    world_cancel(w, &w->decode, a); /* idempotent */
    world_cancel(w, &w->decode, world_new_attempt(w));
    world_read(w, a, &stream);
    assert_int_equal(stream.frames, 0);
    world_expect_empty(w);
    world_destroy(w);
}

static void cancel_during_the_transfer_quarantines(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(5, SAMPLER_MASK_SUPPORT);
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    world_run_until_filling(w);
    world_cancel(w, &w->decode, a);
    const decode_view view = world_decode_view(w);
    assert_int_equal(view.quarantined, 1);
    assert_true(view.pages_quarantined > 0);
    assert_true(view.pages_free < view.pages_total);
    world_cancel(w, &w->prefill, a);
    w->is_network_held = false;
    world_settle(w);
    world_read(w, a, &stream);
    assert_int_equal(stream.frames, 0);
    world_expect_empty(w);
    world_destroy(w);
}

static void cancel_takes_effect_between_steps(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(50, SAMPLER_MASK_SELECTED);
    w->decode.is_compute_held = true;
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    const proto_attempt b = world_start(w, 50, &g, UINT64_MAX);
    world_settle(w);
    decode_view view = world_decode_view(w);
    assert_true(view.is_step_running);
    world_cancel(w, &w->decode, a);
    view = world_decode_view(w);
    assert_int_equal(view.attempts, 2); /* the step computes on its pages */
    world_cancel(w, &w->decode, a);
    w->decode.is_compute_held = false;
    world_settle(w);
    world_read(w, a, &stream);
    assert_false(stream.has_finish);
    world_read(w, b, &stream);
    assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
    world_expect_rows(w, &stream, 50, &g, 50);
    world_expect_empty(w);
    world_destroy(w);
}

static void cancel_of_parked_and_draining(void **state) {
    (void)state;
    for (int is_draining = 0; is_draining < 2; is_draining++) {
        world *w = world_create(&(world_options){
            .support_max = 64, .cap = 64, .context_tokens = 4096, .decode_pages = 256});
        world_register(w);
        /* Parked rows fill 64 KiB; a draining attempt keeps only what it drew. */
        const proto_generation g = world_generation(is_draining ? 20 : 3000, SAMPLER_MASK_SUPPORT);
        const proto_attempt a = world_start(w, 20, &g, 1);
        world_settle(w);
        const decode_view view = world_decode_view(w);
        assert_int_equal(view.draining, is_draining ? 1 : 0);
        assert_int_equal(view.parked, is_draining ? 0 : 1);
        /* The pages of a sequence that draws no more are free at once. */
        if (is_draining) assert_int_equal(view.pages_free, view.pages_total);
        if (!is_draining) assert_true(view.pages_free < view.pages_total);
        world_cancel(w, &w->decode, a);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* ---- streams --------------------------------------------------------------------------------- */

static void credit_bounds_a_stream_and_no_other(void **state) {
    (void)state;
    world *w = world_create(&(world_options){
        .support_max = 64, .cap = 64, .context_tokens = 4096, .decode_pages = 512});
    world_register(w);
    const proto_generation g = world_generation(400, SAMPLER_MASK_SUPPORT);
    const proto_attempt slow = world_start(w, 20, &g, 1000);
    const proto_attempt fast = world_start(w, 30, &g, UINT64_MAX);
    world_settle(w);
    world_read(w, fast, &stream);
    world_expect_rows(w, &stream, 30, &g, 400);
    world_read(w, slow, &stream);
    assert_int_equal(stream.bytes, 1000); /* to the byte: rows are cut anywhere */
    assert_int_equal(world_decode_view(w).parked, 1);
    const uint64_t steps = world_decode_view(w).steps_total;
    world_advance(w, 1000 * 1000);
    assert_int_equal(world_decode_view(w).steps_total, steps); /* parked: no step, no spinning */
    while (!stream.has_finish) {
        world_credit(w, slow, 7777);
        world_settle(w);
        world_read(w, slow, &stream);
    }
    assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
    world_expect_rows(w, &stream, 20, &g, 400);
    world_credit(w, slow, 1); /* late credit is nothing */
    world_expect_empty(w);
    world_destroy(w);
}

static void a_reader_that_takes_nothing_loses_its_request(void **state) {
    (void)state;
    for (uint32_t max = 20; max <= 3000; max += 2980) { /* draining, then parked */
        world *w = world_create(&(world_options){
            .support_max = 64, .cap = 64, .context_tokens = 4096, .decode_pages = 256});
        world_register(w);
        const proto_generation g = world_generation(max, SAMPLER_MASK_SUPPORT);
        const proto_attempt a = world_start(w, 20, &g, 500);
        world_settle(w);
        world_advance(w, 59 * 1000 * 1000);
        assert_int_equal(world_decode_view(w).attempts, 1);
        world_advance(w, 2 * 1000 * 1000);
        expect_error(w, a, BT_ERR_REQUEST_DEADLINE, "took nothing in time");
        assert_true(stream.bytes == 500);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* Little by little is not nothing: as long as the reader takes something, the request stays; its
 * own deadline bounds it. */
static void a_slow_reader_keeps_its_request(void **state) {
    (void)state;
    for (uint32_t max = 20; max <= 3000; max += 2980) { /* draining, then parked */
        world *w = world_create(&(world_options){
            .support_max = 64, .cap = 64, .context_tokens = 4096, .decode_pages = 256});
        world_register(w);
        const proto_generation g = world_generation(max, SAMPLER_MASK_SUPPORT);
        const proto_attempt a = world_start(w, 20, &g, 500);
        world_settle(w);
        for (int i = 0; i < 3; i++) {
            world_advance(w, 50 * 1000 * 1000);
            world_credit(w, a, 4);
            assert_int_equal(world_decode_view(w).attempts, 1);
        }
        world_advance(w, 61 * 1000 * 1000);
        expect_error(w, a, BT_ERR_REQUEST_DEADLINE, "took nothing in time");
        assert_true(stream.bytes == 512);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* Credit that adds up to more than a number holds is never withheld. */
static void credit_beyond_all_numbers_is_unlimited(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.support_max = 64, .cap = 64});
    world_register(w);
    const proto_generation g = world_generation(20, SAMPLER_MASK_SUPPORT);
    w->decode.is_stream_blocked = true;
    const proto_attempt a = world_start(w, 20, &g, 500);
    world_settle(w);
    world_credit(w, a, UINT64_MAX - 2);
    world_credit(w, a, 20);
    w->decode.is_stream_blocked = false;
    world_settle(w);
    world_read(w, a, &stream);
    world_expect_rows(w, &stream, 20, &g, 20);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_blocked_connection_parks_and_goes_on_in_large_frames(void **state) {
    (void)state;
    /* The queue's bound is more than a frame; the rows are small. */
    world *w = world_create(&(world_options){.support_max = 64,
                                             .cap = 64,
                                             .context_tokens = 4096,
                                             .decode_pages = 512,
                                             .queue_bytes = 320 * 1024});
    world_register(w);
    const proto_generation g = world_generation(2000, SAMPLER_MASK_SUPPORT);
    w->decode.is_stream_blocked = true;
    const proto_attempt a = world_start(w, 20, &g, UINT64_MAX);
    world_settle(w);
    assert_int_equal(world_decode_view(w).parked, 1);
    world_read(w, a, &stream);
    assert_int_equal(stream.frames, 0);
    w->decode.is_stream_blocked = false;
    world_settle(w);
    uint32_t large_frames = 0;
    for (uint32_t i = 0; i < w->decode.sent_count; i++) {
        const size_t bytes = w->decode.sent[i].message.payload_bytes;
        assert_true(bytes <= PROTO_FRAME_PAYLOAD_MAX);
        large_frames += bytes > PROTO_FRAME_PAYLOAD_MAX / 4;
    }
    assert_true(large_frames > 0);
    world_read(w, a, &stream);
    assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
    world_expect_rows(w, &stream, 20, &g, 2000);
    world_expect_empty(w);
    world_destroy(w);
}

/* Memory of rows is bounded: when nobody takes any, each sample's blocks are at most five times
 * what its queue may hold, at caps below and far above its rows; and all of them come back. */
static void rows_that_nobody_takes_are_bounded(void **state) {
    (void)state;
    static const uint32_t caps[] = {64, 3000, 25000};
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        enum { SAMPLES = 4 };
        world *w = world_create(&(world_options){.support_max = 64,
                                                 .cap = caps[i],
                                                 .context_tokens = 4096,
                                                 .sequences_max = SAMPLES,
                                                 .attempts_max = SAMPLES,
                                                 .decode_pages = 4 * 512,
                                                 .emission_rows = 50});
        const size_t row =
            row_record_bytes((row_widths){.mask_mode = ROW_MASK_SUPPORT, .support_count = caps[i]});
        const size_t queue = 3 * row > DECODE_QUEUE_BYTES ? 3 * row : DECODE_QUEUE_BYTES;
        const proto_generation g = world_generation(2000, SAMPLER_MASK_SUPPORT);
        proto_attempt attempts[SAMPLES];
        world_register(w);
        w->decode.is_stream_blocked = true;
        for (uint32_t k = 0; k < SAMPLES; k++)
            attempts[k] = world_start(w, 20, &g, UINT64_MAX);
        world_settle(w);
        assert_int_equal(world_decode_view(w).parked, SAMPLES);
        const bt_block_pool *blocks = w->decode.decode->blocks;
        assert_true(bt_block_pool_used_bytes(blocks) > 0);
        assert_true(bt_block_pool_used_bytes(blocks) <= SAMPLES * 5 * queue);
        w->decode.is_stream_blocked = false;
        world_settle(w);
        for (uint32_t k = 0; k < SAMPLES; k++) {
            world_read(w, attempts[k], &stream);
            world_expect_rows(w, &stream, 20, &g, 2000);
        }
        world_expect_empty(w);
        world_destroy(w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_equal_one_process),
        cmocka_unit_test(ids_past_the_limit_are_not_drawn),
        cmocka_unit_test(cached_tokens_travel_in_the_row),
        cmocka_unit_test(attempts_are_found_by_number_and_router),
        cmocka_unit_test(memory_for_masks_is_made_when_one_is_asked_for),
        cmocka_unit_test(many_at_once_do_not_change_each_other),
        cmocka_unit_test(finishes_are_length_first_then_stop_ids),
        cmocka_unit_test(overflow_at_a_later_row_ends_with_the_rows_before_it),
        cmocka_unit_test(a_broken_capture_is_the_requests_own_error),
        cmocka_unit_test(full_pages_are_followed_by_capacity),
        cmocka_unit_test(full_places_are_followed_by_capacity),
        cmocka_unit_test(what_never_fits_is_refused_by_name),
        cmocka_unit_test(strangers_are_refused),
        cmocka_unit_test(cancel_gives_back_a_reservation),
        cmocka_unit_test(cancel_during_the_transfer_quarantines),
        cmocka_unit_test(cancel_takes_effect_between_steps),
        cmocka_unit_test(cancel_of_parked_and_draining),
        cmocka_unit_test(credit_bounds_a_stream_and_no_other),
        cmocka_unit_test(a_reader_that_takes_nothing_loses_its_request),
        cmocka_unit_test(a_slow_reader_keeps_its_request),
        cmocka_unit_test(credit_beyond_all_numbers_is_unlimited),
        cmocka_unit_test(a_blocked_connection_parks_and_goes_on_in_large_frames),
        cmocka_unit_test(rows_that_nobody_takes_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
