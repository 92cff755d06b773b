/* The router's process: the real dispatch between links and clients. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "proto/row.h"
#include "tests/sim/sim.h"

enum { TICK_US = 50 * 1000 };

static void on_send(void *context, dispatch_link link, proto_message *message) {
    sim_link_send(context, link, SIM_AT_ROUTER, message);
}

static void on_close(void *context, dispatch_link link) {
    sim_link_close(context, link, SIM_AT_ROUTER);
}

static void on_rows(void *context, uint64_t request, const dispatch_rows *rows) {
    sim_client_on_rows(context, request, rows);
}

static void on_prompt_logprobs(void *context, uint64_t request,
                               const dispatch_prompt_logprobs *logprobs) {
    sim_client_on_prompt_logprobs(context, request, logprobs);
}

static void on_restart(void *context, uint64_t request) {
    sim_client_on_restart(context, request);
}

static void on_sample_end(void *context, uint64_t request, uint32_t sample,
                          const dispatch_end *end) {
    sim_client_on_sample_end(context, request, sample, end);
}

static void on_end(void *context, uint64_t request, const dispatch_end *end) {
    sim_client_on_end(context, request, end);
}

static void on_ready_changed(void *context, bool is_ready) {
    (void)context;
    (void)is_ready;
}

static void tick(sim *s, uint64_t life, uint64_t b) {
    (void)b;
    if (s->router.d == NULL || s->router.life != life) return;
    dispatch_tick(s->router.d, s->now_us);
    sim_after(s, TICK_US, tick, life, 0);
}

void sim_router_start(sim *s) {
    const sim_scenario *o = &s->scenario;
    dispatch_options options = {
        .incarnation = 0x7000 + ++s->router.life,
        .host = "router",
        .record = {.sampling_mask_max_tokens = o->cap,
                   .kv_checksum = (uint32_t)o->checksum + 1,
                   .row_format = ROW_FORMAT_VERSION,
                   .tokenizer_fingerprint = "sim"},
        .heartbeat_ms = 200,
        .dead_after_ms = 1500,
        .request_timeout_ms = o->request_timeout_ms,
        .handoff_timeout_ms = 8000,
        .reserve_timeout_ms = 3000,
        .no_worker_grace_ms = 10000,
        .attempts_max = 4,
        .stream_window_bytes = 1,
        .seed = o->seed + s->router.life,
    };
    const dispatch_ops ops = {.send = on_send,
                              .close = on_close,
                              .on_rows = on_rows,
                              .on_prompt_logprobs = on_prompt_logprobs,
                              .on_restart = on_restart,
                              .on_sample_end = on_sample_end,
                              .on_end = on_end,
                              .on_ready_changed = on_ready_changed,
                              .context = s};
    assert_int_equal(dispatch_create(&options, &ops, &s->router.d), BT_OK);
    sim_after(s, sim_random(s, TICK_US), tick, s->router.life, 0);
}

void sim_router_stop(sim *s) {
    dispatch_view view;
    if (s->router.d == NULL) return;
    dispatch_look(s->router.d, &view);
    s->tally.retries += view.retries_total;
    s->tally.late += view.late_total;
    /* Honest workers never break the protocol, whatever happens to them. */
    assert_int_equal(view.protocol_errors_total, 0);
    assert_int_equal(view.refused_total, 0);
    dispatch_destroy(s->router.d);
    s->router.d = NULL;
    for (uint64_t number = 1; number <= s->link_count; number++)
        sim_link_abort(s, number, SIM_AT_ROUTER);
}

static void start_again(sim *s, uint64_t life, uint64_t b) {
    (void)b;
    if (s->router.d == NULL && s->router.life == life) sim_router_start(s);
}

void sim_router_crash(sim *s) {
    if (s->router.d == NULL) return;
    s->tally.router_crashes++;
    sim_clients_on_router_lost(s);
    sim_router_stop(s);
    sim_after(s, sim_random(s, 2 * SIM_SECOND), start_again, s->router.life, 0);
}

void sim_router_check_idle(const sim *s) {
    dispatch_view view;
    dispatch_worker_view workers[SIM_WORKERS_MAX];
    assert_non_null(s->router.d);
    dispatch_look(s->router.d, &view);
    assert_int_equal(view.requests_queued, 0);
    assert_int_equal(view.requests_running, 0);
    assert_int_equal(view.worker_count, s->worker_count);
    assert_int_equal(dispatch_look_workers(s->router.d, workers, SIM_WORKERS_MAX), s->worker_count);
    for (uint32_t i = 0; i < s->worker_count; i++) {
        assert_true(workers[i].is_ready);
        assert_int_equal(workers[i].attempts, 0);
        assert_int_equal(workers[i].queued_tokens, 0);
        assert_int_equal(workers[i].pages_free, workers[i].pages_total);
    }
}
