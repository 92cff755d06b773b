/* Worker processes: the real cores with what their programs put around them: sockets, a clock, the
 * mover, computing, ticks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "tests/sim/sim.h"

enum { TICK_US = 50 * 1000, REDIAL_US = 100 * 1000 };

static uint64_t sim_now(void *context) {
    return ((sim *)context)->now_us;
}

/* The cores know their owner as one pointer: the worker's place in s->workers, from which the
 * simulation is found. */
static sim *sim_of(sim_worker *w) {
    return (sim *)(void *)((char *)(w - w->index) - offsetof(sim, workers));
}

bool sim_worker_is_frozen(const sim *s, const sim_worker *w) {
    return s->now_us < w->frozen_until_us;
}

/* ---- computing ------------------------------------------------------------------------------- */

static void compute_step(sim *s, uint64_t index, uint64_t life);

/* After anything that may have started a step. */
static void watch_compute(sim *s, sim_worker *w) {
    const bool was_known = compute_sim_due_us(w->compute) != UINT64_MAX;
    (void)compute_sim_poll(w->compute, s->now_us);
    const uint64_t due_us = compute_sim_due_us(w->compute);
    if (!was_known && due_us != UINT64_MAX) sim_at(s, due_us, compute_step, w->index, w->life);
}

static void compute_step(sim *s, uint64_t index, uint64_t life) {
    sim_worker *w = &s->workers[index];
    if (!w->is_up || w->life != life) return;
    if (sim_worker_is_frozen(s, w)) {
        sim_at(s, w->frozen_until_us, compute_step, index, life);
        return;
    }
    (void)compute_sim_poll(w->compute, s->now_us);
    watch_compute(s, w);
    sim_mover_kick(s);
}

static void settle(sim *s, sim_worker *w) {
    if (!w->is_up) return;
    watch_compute(s, w);
    sim_mover_kick(s);
}

/* ---- what the cores ask for ------------------------------------------------------------------ */

static void on_send(void *context, proto_lane lane, proto_message *message) {
    sim_worker *w = context;
    if (w->links[lane] == 0) {
        proto_message_drop_payload(message);
        return;
    }
    sim_link_send(sim_of(w), w->links[lane], SIM_AT_WORKER, message);
}

static bool can_stream(void *context) {
    sim_worker *w = context;
    const sim *s = sim_of(w);
    const uint64_t number = w->links[PROTO_LANE_STREAMS];
    return number != 0 &&
           s->links[number - 1].to[SIM_AT_ROUTER].bytes < s->scenario.stream_bytes_max;
}

static void open_streams(void *context) {
    sim_worker *w = context;
    sim_link_dial(sim_of(w), w->index, PROTO_LANE_STREAMS, 0);
}

static void close_links(sim *s, sim_worker *w, bool is_crash) {
    for (int lane = PROTO_LANE_CONTROL; lane <= PROTO_LANE_STREAMS; lane++) {
        const uint64_t number = w->links[lane];
        w->links[lane] = 0;
        if (number == 0) continue;
        if (is_crash) {
            sim_link_abort(s, number, SIM_AT_WORKER);
        } else {
            sim_link_close(s, number, SIM_AT_WORKER);
        }
    }
    w->session++;
}

static void on_hang_up(void *context, const char *why) {
    sim_worker *w = context;
    (void)why;
    close_links(sim_of(w), w, false);
    sim_link_dial(sim_of(w), w->index, PROTO_LANE_CONTROL, REDIAL_US);
}

static void on_refused(void *context, const char *text) {
    const sim_worker *w = context;
    fail_msg("worker %u was refused: %s", w->index, text);
}

static void crash_now(sim *s, uint64_t index, uint64_t life) {
    if (s->workers[index].is_up && s->workers[index].life == life) {
        sim_worker_crash(s, (uint32_t)index);
    }
}

static void on_broken(void *context, bt_status status, const char *text) {
    sim_worker *w = context;
    (void)status;
    (void)text;
    sim_after(sim_of(w), 0, crash_now, w->index, w->life);
}

/* ---- starting -------------------------------------------------------------------------------- */

static proto_hello make_hello(const sim *s, const sim_worker *w) {
    const sim_scenario *o = &s->scenario;
    proto_hello hello = {
        .role = w->role,
        .incarnation = (uint64_t)(w->index + 1) << 32 | w->life,
        .pid = w->index + 1,
        .vocab_size = SIM_VOCAB,
        .context_tokens = o->context_tokens,
        .tp_count = 1,
        .pp_count = 1,
        .dp_count = 1,
        .record = {.page_tokens = o->page_tokens,
                   .kv_dtype = "sim",
                   .kv_layout = "sim",
                   .numerics = "sim",
                   .model_fingerprint = "sim"},
    };
    (void)snprintf(hello.host, sizeof hello.host, "host%u", w->index);
    return hello;
}

static void create_parts(sim *s, sim_worker *w, uint32_t page_count) {
    const sim_scenario *o = &s->scenario;
    const kv_pool_options pool = {
        .page_count = page_count, .page_bytes = o->page_bytes, .layers = 2};
    assert_int_equal(kv_pool_create(&pool, &w->pages), BT_OK);
    w->compute_options = (compute_sim_options){
        .kv_memory = kv_pool_memory(w->pages),
        .kv_page_count = page_count,
        .page_bytes = o->page_bytes,
        .page_tokens = o->page_tokens,
        .vocab_size = SIM_VOCAB,
        .support_max = o->support_max,
        .step_us = o->step_us,
        .token_us = o->token_us,
    };
    assert_int_equal(compute_sim_create(&w->compute_options, &w->compute), BT_OK);
    assert_int_equal(xfer_loop_create(s->network, w->index + 1, &w->mover), BT_OK);
}

static void create_decode(sim *s, sim_worker *w) {
    const sim_scenario *o = &s->scenario;
    create_parts(s, w, o->decode_pages);
    const decode_core_options options = {
        .hello = make_hello(s, w),
        .clock = {.now_us = sim_now, .context = s},
        .mover = w->mover,
        .pages = w->pages,
        .compute = w->compute,
        .page_tokens = o->page_tokens,
        .vocab_size = SIM_VOCAB,
        .context_tokens = o->context_tokens,
        .sequences_max = o->sequences_max,
        .park_us = 5 * SIM_SECOND,
        .chunk_bytes_max = o->chunk_bytes_max,
        .ops = {.send = on_send,
                .can_stream = can_stream,
                .open_streams = open_streams,
                .hang_up = on_hang_up,
                .on_refused = on_refused,
                .on_broken = on_broken,
                .context = w},
    };
    assert_int_equal(decode_core_create(&options, &w->decode), BT_OK);
}

static void create_prefill(sim *s, sim_worker *w) {
    const sim_scenario *o = &s->scenario;
    create_parts(s, w, o->prefill_pages);
    const prefill_core_options options = {
        .hello = make_hello(s, w),
        .clock = {.now_us = sim_now, .context = s},
        .mover = w->mover,
        .pages = w->pages,
        .compute = w->compute,
        .page_tokens = o->page_tokens,
        .vocab_size = SIM_VOCAB,
        .context_tokens = o->context_tokens,
        .chunk_tokens = o->chunk_tokens,
        .attempts_max = o->attempts_max,
        .prompts_max = o->prompts_max,
        .has_prefix_cache = o->has_prefix_cache,
        .chunk_bytes_max = o->chunk_bytes_max,
        .ops = {.send = on_send,
                .can_stream = can_stream,
                .open_streams = open_streams,
                .hang_up = on_hang_up,
                .on_refused = on_refused,
                .on_broken = on_broken,
                .context = w},
    };
    assert_int_equal(prefill_core_create(&options, &w->prefill), BT_OK);
}

static void tick(sim *s, uint64_t index, uint64_t life) {
    sim_worker *w = &s->workers[index];
    if (!w->is_up || w->life != life) return;
    if (sim_worker_is_frozen(s, w)) {
        sim_at(s, w->frozen_until_us, tick, index, life);
        return;
    }
    if (w->decode != NULL) decode_core_tick(w->decode);
    if (w->prefill != NULL) prefill_core_tick(w->prefill);
    settle(s, w);
    sim_worker_check(s, (uint32_t)index, false);
    sim_after(s, TICK_US, tick, index, life);
}

void sim_worker_start(sim *s, uint32_t index) {
    sim_worker *w = &s->workers[index];
    assert_false(w->is_up);
    w->index = index;
    w->role = index < s->scenario.prefills ? PROTO_ROLE_PREFILL : PROTO_ROLE_DECODE;
    w->life++;
    w->session++;
    w->is_up = true;
    w->frozen_until_us = 0;
    if (w->role == PROTO_ROLE_DECODE) {
        create_decode(s, w);
    } else {
        create_prefill(s, w);
    }
    sim_link_dial(s, index, PROTO_LANE_CONTROL, 0);
    sim_after(s, sim_random(s, TICK_US), tick, index, w->life);
}

/* ---- ending ---------------------------------------------------------------------------------- */

void sim_worker_stop(sim *s, uint32_t index) {
    sim_worker *w = &s->workers[index];
    if (!w->is_up) return;
    w->is_up = false;
    close_links(s, w, true);
    decode_core_destroy(w->decode);
    prefill_core_destroy(w->prefill);
    w->mover->ops->destroy(w->mover);
    w->compute->ops->destroy(w->compute);
    kv_pool_destroy(w->pages);
    w->decode = NULL;
    w->prefill = NULL;
    w->mover = NULL;
    w->compute = NULL;
    w->pages = NULL;
    sim_mover_kick(s); /* others notice */
}

static void start_again(sim *s, uint64_t index, uint64_t life) {
    sim_worker *w = &s->workers[index];
    if (!w->is_up && w->life == life) sim_worker_start(s, (uint32_t)index);
}

void sim_worker_crash(sim *s, uint32_t index) {
    sim_worker *w = &s->workers[index];
    if (!w->is_up) return;
    s->tally.crashes++;
    sim_worker_stop(s, index);
    sim_after(s, sim_random(s, 3 * SIM_SECOND), start_again, index, w->life);
}

void sim_worker_freeze(sim *s, uint32_t index, uint64_t for_us) {
    s->workers[index].frozen_until_us = s->now_us + for_us;
}

void sim_worker_fail_step(sim *s, uint32_t index, bt_status status) {
    sim_worker *w = &s->workers[index];
    if (w->is_up) compute_sim_fail_next(w->compute, status);
}

/* ---- what happens to it ---------------------------------------------------------------------- */

void sim_worker_on_open(sim *s, uint32_t index, proto_lane lane) {
    sim_worker *w = &s->workers[index];
    if (w->decode != NULL) decode_core_on_open(w->decode, lane);
    if (w->prefill != NULL) prefill_core_on_open(w->prefill, lane);
    settle(s, w);
}

void sim_worker_on_message(sim *s, uint32_t index, proto_lane lane, const proto_message *message) {
    sim_worker *w = &s->workers[index];
    if (w->decode != NULL) decode_core_on_message(w->decode, lane, message);
    if (w->prefill != NULL) prefill_core_on_message(w->prefill, lane, message);
    settle(s, w);
}

void sim_worker_on_closed(sim *s, uint32_t index, proto_lane lane) {
    sim_worker *w = &s->workers[index];
    w->links[lane] = 0;
    close_links(s, w, false);
    if (w->decode != NULL) decode_core_on_closed(w->decode);
    if (w->prefill != NULL) prefill_core_on_closed(w->prefill);
    sim_link_dial(s, index, PROTO_LANE_CONTROL, REDIAL_US);
    settle(s, w);
}

void sim_worker_turn(sim *s, uint32_t index) {
    sim_worker *w = &s->workers[index];
    if (!w->is_up || sim_worker_is_frozen(s, w)) return;
    if (w->decode != NULL) decode_core_turn(w->decode);
    if (w->prefill != NULL) prefill_core_turn(w->prefill);
    settle(s, w);
}

/* ---- checks ---------------------------------------------------------------------------------- */

static void check_decode(const sim_worker *w, bool is_idle) {
    decode_view view;
    assert_true(decode_core_check(w->decode));
    if (!is_idle) return;
    decode_core_look(w->decode, &view);
    assert_int_equal(view.session, WORKER_SESSION_SERVING);
    assert_int_equal(view.attempts, 0);
    assert_int_equal(view.pages_free, view.pages_total);
    assert_int_equal(view.rows_free, view.rows_total);
    assert_false(view.is_step_running);
}

static void check_prefill(const sim_worker *w, bool is_idle) {
    prefill_view view;
    assert_true(prefill_core_check(w->prefill));
    if (!is_idle) return;
    prefill_core_look(w->prefill, &view);
    assert_int_equal(view.session, WORKER_SESSION_SERVING);
    assert_int_equal(view.attempts, 0);
    assert_int_equal(view.queued_tokens, 0);
    assert_int_equal(view.pages_free, view.pages_total);
    assert_int_equal(view.rows_free, view.rows_total);
    assert_int_equal(view.accepted_total, view.released_total);
    assert_false(view.is_step_running);
}

void sim_worker_check(const sim *s, uint32_t index, bool is_idle) {
    const sim_worker *w = &s->workers[index];
    if (is_idle) assert_true(w->is_up);
    if (w->decode != NULL) check_decode(w, is_idle);
    if (w->prefill != NULL) check_prefill(w, is_idle);
}
