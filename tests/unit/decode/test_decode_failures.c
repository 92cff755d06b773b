/* The decode core when something fails: deadlines, corruption, peers and routers that go, steps
 * that fail, messages out of place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

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

static void expect_refused(const proto_reservation *r, bt_status status, const char *text) {
    assert_int_equal(r->status, status);
    assert_int_equal(r->slot_count, 0);
    if (strstr(r->text, text) == NULL) fail_msg("'%s'", r->text);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void a_handoff_that_never_comes_ends_by_its_deadline(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(5, SAMPLER_MASK_OFF);
    const proto_attempt a = world_new_attempt(w);
    assert_int_equal(world_reserve(w, a, 10, &g, 1).status, BT_OK);
    world_advance(w, 4900 * 1000);
    assert_int_equal(world_decode_view(w).reserved, 1);
    world_advance(w, 200 * 1000);
    expect_error(w, a, BT_ERR_REQUEST_DEADLINE, "");
    world_expect_empty(w);
    world_destroy(w);
}

static void a_corrupt_page_never_becomes_a_token(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(5, SAMPLER_MASK_OFF);
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    bool is_corrupted = false;
    w->is_network_held = true;
    world_settle(w);
    while (xfer_loop_event_count(w->network) > 0) {
        const xfer_loop_event event = xfer_loop_event_at(w->network, 0);
        if (!is_corrupted && event.kind == XFER_LOOP_RECEIVED && event.at == w->decode.mover) {
            is_corrupted = xfer_loop_corrupt_payload(w->network, 0, 3, 0x10);
        }
        xfer_loop_step(w->network, 0);
        world_settle(w);
    }
    assert_true(is_corrupted);
    w->is_network_held = false;
    world_settle(w);
    expect_error(w, a, BT_ERR_REQUEST_CORRUPT, "");
    assert_int_equal(stream.row_count, 0);
    world_cancel(w, &w->prefill, a);
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

/* A row that proves itself and yet does not answer what was asked, because prefill was told
 * something else or has another vocabulary: nothing of it is streamed. */
static void a_row_that_does_not_fit_the_request_is_no_token(void **state) {
    (void)state;
    for (uint32_t wants = 0; wants < 2; wants++) {
        world *w = world_create(NULL);
        world_register(w);
        proto_generation g = world_generation(5, SAMPLER_MASK_SUPPORT);
        g.wants_logprob = wants;
        const proto_attempt a = world_new_attempt(w);
        const proto_reservation slot = world_reserve(w, a, 30, &g, UINT64_MAX);
        g.wants_logprob = 1 - wants;
        world_run(w, a, &slot, 30, &g, 30);
        world_settle(w);
        expect_error(w, a, BT_ERR_REQUEST_CORRUPT, "does not fit the request");
        assert_int_equal(stream.row_count, 0);
        world_expect_empty(w);
        world_destroy(w);
    }
}

typedef enum row_kind {
    ROW_FITS,
    ROW_TOKEN_OUTSIDE,
    ROW_SUPPORT_OUTSIDE,
    ROW_TOP_OUTSIDE,
    ROW_KINDS,
} row_kind;

/* What the first row of a prompt would be for decode, whose vocabulary is half of prefill's. */
static row_kind kind_of_first_row(const world *w, const proto_generation *g, uint32_t prompt) {
    int32_t ids[WORLD_SUPPORT_MAX];
    float logprobs[WORLD_SUPPORT_MAX];
    sampler_top top[WORLD_SUPPORT_MAX];
    sampler_row row = {.support_ids = ids, .support_logprobs = logprobs, .top = top};
    sampler_params params = world_sampling(w, g);
    params.wants_logprob = g->wants_logprob;
    params.top_logprobs = g->top_logprobs;
    assert_true(g->top_logprobs <= WORLD_SUPPORT_MAX);
    assert_int_equal(compute_sim_expect(&w->prefill.sim, &params, w->prompt, prompt, 1, &row), 1);
    if (row.token >= WORLD_VOCAB) return ROW_TOKEN_OUTSIDE;
    for (uint32_t i = 0; i < row.support_count; i++)
        if (ids[i] >= WORLD_VOCAB) return ROW_SUPPORT_OUTSIDE;
    for (uint32_t i = 0; i < row.top_count; i++)
        if (top[i].id >= WORLD_VOCAB) return ROW_TOP_OUTSIDE;
    return ROW_FITS;
}

static void a_row_outside_the_vocabulary_is_no_token(void **state) {
    (void)state;
    enum { PROMPT = 30, TRIES_MAX = 200000 };
    proto_generation g = world_generation(2, SAMPLER_MASK_SUPPORT);
    g.wants_logprob = 1;
    g.top_logprobs = 2;
    for (int kind = ROW_FITS; kind < ROW_KINDS; kind++) {
        world *w = world_create(&(world_options){.prefill_vocab = 2 * WORLD_VOCAB});
        world_register(w);
        int tries = 0;
        while (kind_of_first_row(w, &g, PROMPT) != (row_kind)kind) {
            w->prompt[tries % 2] = (w->prompt[tries % 2] + 1) % WORLD_VOCAB;
            tries++;
            assert_true(tries < TRIES_MAX);
        }
        const proto_attempt a = world_start(w, PROMPT, &g, UINT64_MAX);
        world_settle(w);
        if (kind == ROW_FITS) {
            world_read(w, a, &stream);
            assert_int_equal(stream.row_count, 2);
        } else {
            expect_error(w, a, BT_ERR_REQUEST_CORRUPT, "does not fit the request");
            assert_int_equal(stream.row_count, 0);
        }
        world_expect_empty(w);
        world_destroy(w);
    }
}

static void say_peer_gone(world *w, world_side *side, const world_side *gone) {
    const proto_message message = {
        .kind = PROTO_PEER_GONE,
        .pair = {.worker_id = gone->worker_id, .incarnation = gone->incarnation}};
    world_say(w, side, PROTO_LANE_CONTROL, &message);
}

static void a_prefill_that_is_gone_fails_only_what_waits_for_it(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(30, SAMPLER_MASK_SELECTED);
    w->decode.is_compute_held = true;
    const proto_attempt running = world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    const proto_attempt idle = world_new_attempt(w);
    assert_int_equal(world_reserve(w, idle, 20, &g, 1).status, BT_OK);
    const proto_attempt filling = world_start(w, 100, &g, UINT64_MAX);
    world_run_until_filling(w);
    say_peer_gone(w, &w->decode, &w->prefill);
    w->is_network_held = false;
    world_settle(w);
    expect_error(w, idle, BT_ERR_PEER_GONE, "");
    expect_error(w, filling, BT_ERR_PEER_GONE, "");
    w->decode.is_compute_held = false;
    world_settle(w);
    world_read(w, running, &stream); /* its KV is here */
    assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
    world_expect_rows(w, &stream, 40, &g, 30);
    const proto_reservation r = world_reserve(w, world_new_attempt(w), 20, &g, 1);
    expect_refused(&r, BT_ERR_PEER_GONE, "not connected");
    say_peer_gone(w, &w->prefill, &w->decode);
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_pair_that_breaks_is_reported_and_made_again(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(3, SAMPLER_MASK_SELECTED);
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    world_run_until_filling(w);
    for (uint32_t e = 0; e < xfer_loop_event_count(w->network); e++) {
        if (xfer_loop_event_at(w->network, e).kind != XFER_LOOP_COPY) continue;
        xfer_loop_drop(w->network, e);
        break;
    }
    w->is_network_held = false;
    world_settle(w);
    expect_error(w, a, BT_ERR_PEER_GONE, "");
    proto_message pair;
    assert_true(world_take(&w->decode, PROTO_PAIR_READY, &pair));
    assert_int_equal(pair.pair.status, BT_ERR_PEER_GONE);
    world_expect_empty(w);
    world_introduce(w); /* the router names both again */
    world_advance(w, 1000 * 1000);
    assert_true(world_take(&w->decode, PROTO_PAIR_READY, &pair));
    assert_int_equal(pair.pair.status, BT_OK);
    const proto_attempt again = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    world_read(w, again, &stream);
    world_expect_rows(w, &stream, 100, &g, 3);
    world_expect_empty(w);
    world_destroy(w);
}

/* Attempts in every state: reserved, filling, running in a step, parked, draining. */
static void fill_every_state(world *w) {
    const proto_generation few = world_generation(5, SAMPLER_MASK_SUPPORT);
    const proto_generation many = world_generation(3000, SAMPLER_MASK_SUPPORT);
    (void)world_start(w, 20, &few, 1);
    (void)world_start(w, 20, &many, 1);
    world_settle(w);
    w->decode.is_compute_held = true;
    (void)world_start(w, 20, &many, UINT64_MAX);
    world_settle(w);
    assert_int_equal(world_reserve(w, world_new_attempt(w), 20, &few, 1).status, BT_OK);
    (void)world_start(w, 100, &few, UINT64_MAX);
    world_run_until_filling(w);
    const decode_view view = world_decode_view(w);
    assert_int_equal(view.reserved, 2);
    assert_int_equal(view.parked, 1);
    assert_int_equal(view.draining, 1);
    assert_int_equal(view.running, 1);
}

static void a_router_that_is_gone_ends_everything_and_may_come_back(void **state) {
    (void)state;
    world *w = world_create(&(world_options){
        .support_max = 64, .cap = 64, .context_tokens = 4096, .decode_pages = 512});
    world_register(w);
    fill_every_state(w);
    decode_core_on_closed(w->decode.decode);
    prefill_core_on_closed(w->prefill.prefill);
    assert_int_equal(world_decode_view(w).session, WORKER_SESSION_AWAY);
    w->decode.wants_streams = false;
    w->prefill.wants_streams = false;
    w->is_network_held = false;
    w->decode.is_compute_held = false;
    world_settle(w);
    world_advance(w, 100 * 1000);
    const decode_view view = world_decode_view(w);
    assert_int_equal(view.attempts, 0);
    assert_int_equal(view.pages_free, view.pages_total);
    assert_int_equal(view.rows_free, view.rows_total);
    /* Another router, with another cap: row slots are sized again. */
    w->router_incarnation = 0xbeef;
    w->options.cap = 8;
    w->options.support_max = 8;
    w->decode.sim.support_max = 8;
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    const proto_attempt a = world_start(w, 30, &g, UINT64_MAX);
    world_settle(w);
    world_read(w, a, &stream);
    assert_int_equal(stream.row_count, 2);
    world_expect_empty(w);
    world_destroy(w);
}

/* Idle workers take the cap of whatever router welcomes them: rows as wide as it says are carried,
 * wider ones are not. */
static void row_slots_follow_the_routers_cap(void **state) {
    (void)state;
    static const uint32_t caps[] = {4, 32, 4};
    world *w = world_create(&(world_options){.cap = 4, .support_max = 32});
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        w->options.cap = caps[i];
        world_register(w);
        proto_generation g = world_generation(6, SAMPLER_MASK_SUPPORT);
        g.top_k = caps[i];
        const proto_attempt fits = world_start(w, 40, &g, UINT64_MAX);
        world_settle(w);
        world_read(w, fits, &stream);
        world_expect_rows(w, &stream, 40, &g, 6);
        assert_int_equal(xfer_loop_registered_count(w->decode.mover), 1); /* the old ones are not */
        assert_int_equal(xfer_loop_registered_count(w->prefill.mover), 1);
        g.top_k = 0;
        w->prompt[0] = 3; /* a first support of more than 4 and at most 32 */
        const proto_attempt wide = world_start(w, 41, &g, UINT64_MAX);
        world_settle(w);
        proto_message done;
        assert_true(world_take(&w->prefill, PROTO_PREFILL_DONE, &done)); /* of the one that fits */
        assert_true(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
        assert_int_equal(done.prefill_done.status, caps[i] == 4 ? BT_ERR_REQUEST_OVERFLOW : BT_OK);
        world_cancel(w, &w->decode, wide);
        world_settle(w);
        world_expect_empty(w);
        decode_core_on_closed(w->decode.decode);
        prefill_core_on_closed(w->prefill.prefill);
        w->decode.wants_streams = false;
        w->prefill.wants_streams = false;
        world_settle(w);
    }
    world_destroy(w);
}

static void say_welcome(world *w, uint32_t worker_id) {
    const proto_message welcome = {.kind = PROTO_WELCOME,
                                   .welcome = {.router_incarnation = 3,
                                               .router_host = "router-host",
                                               .worker_id = worker_id,
                                               .record = {.sampling_mask_max_tokens = 99,
                                                          .kv_checksum = RECORD_CHECKSUM_FULL + 1},
                                               .heartbeat_ms = 100,
                                               .dead_after_ms = 500}};
    decode_core_on_open(w->decode.decode, PROTO_LANE_CONTROL);
    world_say(w, &w->decode, PROTO_LANE_CONTROL, &welcome);
    world_settle(w);
}

/* The name of the last session is on the wire until its endpoints are closed. */
static void a_welcome_waits_until_the_last_peers_are_closed(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    w->is_network_held = true;
    decode_core_on_closed(w->decode.decode);
    w->decode.wants_streams = false;
    say_welcome(w, 77);
    assert_int_equal(world_decode_view(w).attempts, 0);
    assert_false(w->decode.wants_streams);
    w->is_network_held = false;
    world_settle(w);
    assert_true(w->decode.wants_streams);
    prefill_core_on_closed(w->prefill.prefill);
    world_settle(w);
    world_destroy(w);
}

static void a_welcome_waits_until_the_last_session_is_at_rest(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(50, SAMPLER_MASK_SUPPORT);
    w->decode.is_compute_held = true;
    (void)world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    assert_true(world_decode_view(w).is_step_running);
    decode_core_on_closed(w->decode.decode);
    w->decode.wants_streams = false;
    say_welcome(w, 77);
    assert_false(w->decode.wants_streams); /* the step still computes on a page */
    w->decode.is_compute_held = false;
    world_settle(w);
    assert_true(w->decode.wants_streams);
    assert_int_equal(world_decode_view(w).attempts, 0);
    prefill_core_on_closed(w->prefill.prefill);
    world_settle(w);
    world_destroy(w);
}

static void a_failed_step_breaks_the_worker_honestly(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(50, SAMPLER_MASK_SUPPORT);
    w->decode.is_compute_held = true;
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    const proto_attempt b = world_start(w, 60, &g, UINT64_MAX);
    world_settle(w);
    const proto_attempt waiting = world_new_attempt(w);
    assert_int_equal(world_reserve(w, waiting, 20, &g, 1).status, BT_OK);
    compute_sim_fail_next(w->decode.compute, BT_ERR_WORKER_INTERNAL);
    w->decode.is_compute_held = false;
    world_settle(w);
    assert_int_equal(w->decode.broken, BT_ERR_WORKER_INTERNAL);
    expect_error(w, a, BT_ERR_WORKER_INTERNAL, "step failed");
    world_expect_rows(w, &stream, 40, &g, 1);
    expect_error(w, b, BT_ERR_WORKER_INTERNAL, "step failed");
    expect_error(w, waiting, BT_ERR_WORKER_INTERNAL, "step failed");
    world_expect_empty(w);
    world_destroy(w);
}

static void a_step_that_hangs_breaks_the_worker(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(50, SAMPLER_MASK_OFF);
    w->decode.is_compute_held = true;
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    w->now_us += (uint64_t)DECODE_STEP_US;
    decode_core_tick(w->decode.decode);
    assert_int_equal(w->decode.broken, BT_ERR_WORKER_INTERNAL);
    expect_error(w, a, BT_ERR_WORKER_INTERNAL, "does not end");
    world_destroy(w); /* the step still has the pages; the end of the process gives them back */
}

/* ---- session --------------------------------------------------------------------------------- */

static void messages_out_of_place_hang_up(void **state) {
    (void)state;
    static const struct {
        proto_kind kind;
        proto_lane lane;
        const char *text;
    } cases[] = {
        {PROTO_HELLO, PROTO_LANE_CONTROL, "hello is not for"},
        {PROTO_WELCOME, PROTO_LANE_CONTROL, "a welcome came while serving"},
        {PROTO_READY, PROTO_LANE_CONTROL, "ready is not for"},
        {PROTO_PONG, PROTO_LANE_CONTROL, "pong is not for"},
        {PROTO_RUN, PROTO_LANE_CONTROL, "run is not for"},
        {PROTO_RUN, PROTO_LANE_STREAMS, "wrong connection"},
        {PROTO_CHUNK, PROTO_LANE_CONTROL, "chunk is not for"},
        {PROTO_PREFILL_DONE, PROTO_LANE_CONTROL, "prefill_done is not for"},
        {PROTO_CAPACITY, PROTO_LANE_CONTROL, "capacity is not for"},
        {PROTO_CREDIT, PROTO_LANE_CONTROL, "wrong connection"},
        {PROTO_RESERVE, PROTO_LANE_STREAMS, "wrong connection"},
        {PROTO_CANCEL, PROTO_LANE_STREAMS, "wrong connection"},
        {PROTO_ABORT, PROTO_LANE_STREAMS, "wrong connection"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation g = world_generation(50, SAMPLER_MASK_OFF);
        assert_int_equal(world_reserve(w, world_new_attempt(w), 20, &g, 1).status, BT_OK);
        world_say(w, &w->decode, cases[i].lane, &(proto_message){.kind = cases[i].kind});
        assert_int_equal(w->decode.hang_ups, 1);
        if (strstr(w->decode.hang_up_text, cases[i].text) == NULL) {
            fail_msg("'%s'", w->decode.hang_up_text);
        }
        assert_int_equal(world_decode_view(w).session, WORKER_SESSION_AWAY);
        world_settle(w);
        assert_int_equal(world_decode_view(w).attempts, 0);
        world_destroy(w);
    }
}

static void work_before_ready_hangs_up(void **state) {
    (void)state;
    world *w = world_create(NULL);
    decode_core_on_open(w->decode.decode, PROTO_LANE_CONTROL);
    world_say(w, &w->decode, PROTO_LANE_CONTROL, &(proto_message){.kind = PROTO_RESERVE});
    assert_int_equal(w->decode.hang_ups, 1);
    decode_core_on_open(w->decode.decode, PROTO_LANE_CONTROL);
    world_say(w, &w->decode, PROTO_LANE_CONTROL, &(proto_message){.kind = PROTO_PEER});
    assert_int_equal(w->decode.hang_ups, 2);
    world_destroy(w);
}

static void bad_welcomes_hang_up(void **state) {
    (void)state;
    const proto_welcome good = {.router_incarnation = 3,
                                .router_host = "router-host",
                                .worker_id = 77,
                                .record = {.sampling_mask_max_tokens = 99, .kv_checksum = 1},
                                .heartbeat_ms = 100,
                                .dead_after_ms = 500};
    proto_welcome bad[4] = {good, good, good, good};
    bad[0].record.sampling_mask_max_tokens = 0;
    bad[1].record.kv_checksum = 9;
    bad[2].dead_after_ms = 1;
    bad[3].record.page_tokens = 64; /* this worker has 16 */
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad); i++) {
        world *w = world_create(NULL);
        decode_core_on_open(w->decode.decode, PROTO_LANE_CONTROL);
        const proto_message message = {.kind = PROTO_WELCOME, .welcome = bad[i]};
        world_say(w, &w->decode, PROTO_LANE_CONTROL, &message);
        assert_int_equal(w->decode.hang_ups, 1);
        assert_int_equal(world_decode_view(w).session, WORKER_SESSION_AWAY);
        world_destroy(w);
    }
}

static void a_refusal_is_final(void **state) {
    (void)state;
    world *w = world_create(NULL);
    decode_core_on_open(w->decode.decode, PROTO_LANE_CONTROL);
    const proto_message refuse = {.kind = PROTO_REFUSE,
                                  .refuse = {.text = "page_tokens differs: 16 here, 32 there"}};
    world_say(w, &w->decode, PROTO_LANE_CONTROL, &refuse);
    assert_string_equal(w->decode.refused, "page_tokens differs: 16 here, 32 there");
    assert_int_equal(world_decode_view(w).session, WORKER_SESSION_REFUSED);
    decode_core_on_closed(w->decode.decode);
    assert_int_equal(world_decode_view(w).session, WORKER_SESSION_REFUSED);
    world_destroy(w);
}

static void a_silent_router_is_hung_up(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    world_advance(w, 2000 * 1000); /* with pings */
    assert_int_equal(w->decode.hang_ups, 0);
    w->now_us += 600 * 1000; /* without */
    decode_core_tick(w->decode.decode);
    assert_int_equal(w->decode.hang_ups, 1);
    assert_non_null(strstr(w->decode.hang_up_text, "silent while serving"));
    decode_core_on_open(w->decode.decode, PROTO_LANE_CONTROL);
    w->now_us += 11 * 1000 * 1000;
    decode_core_tick(w->decode.decode);
    assert_int_equal(w->decode.hang_ups, 2);
    assert_non_null(strstr(w->decode.hang_up_text, "silent while greeting"));
    world_settle(w);
    world_destroy(w);
}

static void pongs_tell_the_load(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(60, SAMPLER_MASK_OFF);
    w->decode.is_compute_held = true;
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    const proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = 42}};
    world_say(w, &w->decode, PROTO_LANE_CONTROL, &ping);
    proto_message pong;
    assert_true(world_take(&w->decode, PROTO_PONG, &pong));
    assert_int_equal(pong.ping.sequence, 42);
    assert_int_equal(pong.ping.sequences_running, 1);
    assert_int_equal(pong.ping.pages_free, 64 - 7); /* of the prompt */
    assert_int_equal(pong.ping.rows_free, 8);
    world_cancel(w, &w->decode, a);
    w->decode.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_handoff_that_never_comes_ends_by_its_deadline),
        cmocka_unit_test(a_corrupt_page_never_becomes_a_token),
        cmocka_unit_test(a_row_that_does_not_fit_the_request_is_no_token),
        cmocka_unit_test(a_row_outside_the_vocabulary_is_no_token),
        cmocka_unit_test(a_prefill_that_is_gone_fails_only_what_waits_for_it),
        cmocka_unit_test(a_pair_that_breaks_is_reported_and_made_again),
        cmocka_unit_test(a_router_that_is_gone_ends_everything_and_may_come_back),
        cmocka_unit_test(row_slots_follow_the_routers_cap),
        cmocka_unit_test(a_welcome_waits_until_the_last_peers_are_closed),
        cmocka_unit_test(a_welcome_waits_until_the_last_session_is_at_rest),
        cmocka_unit_test(a_failed_step_breaks_the_worker_honestly),
        cmocka_unit_test(a_step_that_hangs_breaks_the_worker),
        cmocka_unit_test(messages_out_of_place_hang_up),
        cmocka_unit_test(work_before_ready_hangs_up),
        cmocka_unit_test(bad_welcomes_hang_up),
        cmocka_unit_test(a_refusal_is_final),
        cmocka_unit_test(a_silent_router_is_hung_up),
        cmocka_unit_test(pongs_tell_the_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
