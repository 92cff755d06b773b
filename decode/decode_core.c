/* The core's surface: messages in, turns, deadlines, looking. */
#include "decode/decode_core.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

enum { CHECK_US = 1000 * 1000 };

bt_status decode_core_create(const decode_core_options *options, decode_core **out) {
    BT_ASSERT(options->sequences_max >= 1 && options->sequences_max <= DECODE_SEQUENCES_MAX);
    BT_ASSERT(options->page_tokens > 0 && options->context_tokens > 0);
    decode_core *core = bt_calloc(1, sizeof *core);
    if (core == NULL) return BT_ERR_WORKER_MEMORY;
    core->options = *options;
    if (core->options.park_us == 0) core->options.park_us = DECODE_PARK_US;
    if (core->options.step_us == 0) core->options.step_us = DECODE_STEP_US;
    worker_session_init(&core->session, &options->hello);
    core->pages_per_attempt = kv_pages_for(options->context_tokens, options->page_tokens);
    const size_t n = options->sequences_max;
    bt_status status = BT_ERR_WORKER_MEMORY;
    core->attempts = bt_calloc(n, sizeof *core->attempts);
    core->page_lists = bt_calloc(n * core->pages_per_attempt, sizeof *core->page_lists);
    if (core->attempts == NULL || core->page_lists == NULL) goto destroy;
    status = decode_peers_init(core);
    if (status == BT_OK) status = decode_step_init(core);
    if (status != BT_OK) goto destroy;
    options->compute->on_done = decode_on_step_done;
    options->compute->context = core;
    *out = core;
    return BT_OK;

destroy:
    decode_core_destroy(core);
    return status;
}

void decode_core_destroy(decode_core *core) {
    if (core == NULL) return;
    /* Nothing is computed and nothing moves any more, so every record can be given back. */
    for (uint32_t i = 0; core->attempts != NULL && i < core->options.sequences_max; i++) {
        core->attempts[i].is_in_step = false;
    }
    handoff_receiver_destroy(core->receiver);
    core->receiver = NULL;
    for (uint32_t i = 0; core->attempts != NULL && i < core->options.sequences_max; i++) {
        decode_attempt *a = &core->attempts[i];
        if (a->state == DECODE_RESERVED) {
            decode_set_state(core, a, DECODE_QUARANTINE, 0, "end of the process");
        }
        decode_release(core, a, "end of the process");
    }
    row_pool_destroy(core->rows);
    peer_table_fini(&core->peers);
    decode_step_fini(core);
    bt_free(core->page_lists);
    bt_free(core->attempts);
    bt_free(core);
}

/* ---- messages -------------------------------------------------------------------------------- */

void decode_core_on_open(decode_core *core, proto_lane lane) {
    /* A streams connection that opens behind the session's end is the owner's to close. */
    if (lane == PROTO_LANE_STREAMS && !worker_session_is_welcome(&core->session)) return;
    proto_message hello;
    worker_session_on_open(&core->session, lane, decode_now(core), &hello);
    core->options.ops.send(core->options.ops.context, lane, &hello);
    decode_core_turn(core);
}

void decode_core_on_closed(decode_core *core) {
    decode_session_end(core);
    decode_core_turn(core);
}

static void on_work(decode_core *core, const proto_message *message) {
    if (core->session.state != WORKER_SESSION_SERVING) {
        decode_hang_up(core, "%s came before ready", proto_kind_name(message->kind));
        return;
    }
    if (message->kind == PROTO_RESERVE) decode_on_reserve(core, &message->reserve);
    if (message->kind == PROTO_CANCEL) decode_on_cancel(core, message->cancel.attempt);
    if (message->kind == PROTO_CREDIT) decode_on_credit(core, &message->credit);
}

static void dispatch_message(decode_core *core, const proto_message *message) {
    switch (message->kind) {
    case PROTO_WELCOME: decode_on_welcome(core, &message->welcome); return;
    case PROTO_REFUSE:
        worker_session_on_refuse(&core->session);
        core->options.ops.on_refused(core->options.ops.context, message->refuse.text);
        return;
    case PROTO_PEER:
    case PROTO_PEER_GONE:
    case PROTO_PING:
        if (!worker_session_is_welcome(&core->session)) break;
        if (message->kind == PROTO_PEER) decode_on_peer(core, &message->peer);
        if (message->kind == PROTO_PEER_GONE) decode_on_peer_gone(core, &message->pair);
        if (message->kind == PROTO_PING) decode_on_ping(core, &message->ping);
        return;
    case PROTO_RESERVE:
    case PROTO_CANCEL:
    case PROTO_CREDIT: on_work(core, message); return;
    case PROTO_HELLO:
    case PROTO_READY:
    case PROTO_PAIR_READY:
    case PROTO_PONG:
    case PROTO_RESERVATION:
    case PROTO_RUN:
    case PROTO_PREFILL_DONE:
    case PROTO_CHUNK:
    case PROTO_CAPACITY: break;
    }
    decode_hang_up(core, "%s is not for a decode worker that is %s", proto_kind_name(message->kind),
                   worker_session_state_name(core->session.state));
}

void decode_core_on_message(decode_core *core, proto_lane lane, const proto_message *message) {
    /* What is still in the sockets of a session that is over. */
    if (core->session.state == WORKER_SESSION_AWAY || core->session.state == WORKER_SESSION_REFUSED)
        return;
    if (core->hang_up_why != NULL) return;
    if (lane == PROTO_LANE_CONTROL) worker_session_on_heard(&core->session, decode_now(core));
    if ((message->kind == PROTO_CREDIT) == (lane == PROTO_LANE_STREAMS)) {
        dispatch_message(core, message);
    } else {
        decode_hang_up(core, "%s came on the wrong connection", proto_kind_name(message->kind));
    }
    decode_core_turn(core);
}

/* ---- turning --------------------------------------------------------------------------------- */

void decode_core_turn(decode_core *core) {
    decode_session_turn(core);
    decode_step_turn(core); /* first, so that sending overlaps with the step */
    decode_stream_turn(core);
    decode_step_turn(core); /* what is no longer parked */
    decode_capacity_turn(core);
}

static void expire(decode_core *core, decode_attempt *a, uint64_t now_us) {
    switch (a->state) {
    case DECODE_PARKED:
    case DECODE_DRAINING:
        if (now_us < a->deadline_us) return;
        decode_abandon(core, a, BT_ERR_REQUEST_DEADLINE,
                       "decode: the reader of the row stream took nothing in time");
        decode_end(core, a, "deadline");
        return;
    case DECODE_RESERVED:   /* the receiver keeps this deadline and reports it */
    case DECODE_RUNNING:    /* the step has one */
    case DECODE_LEAVING:    /* likewise */
    case DECODE_QUARANTINE: /* the receiver reports a peer that must be closed (on_stuck) */
    case DECODE_FREE:
    case DECODE_STATE_COUNT: return;
    }
}

void decode_core_tick(decode_core *core) {
    const uint64_t now_us = decode_now(core);
    if (worker_session_is_late(&core->session, now_us)) {
        decode_hang_up(core, "the router is silent while %s",
                       worker_session_state_name(core->session.state));
    }
    if (core->receiver != NULL) handoff_receiver_tick(core->receiver);
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        expire(core, &core->attempts[i], now_us);
    }
    decode_step_tick(core, now_us);
    if (now_us >= core->next_check_us) {
        core->next_check_us = now_us + CHECK_US;
        BT_ASSERT(decode_core_check(core));
    }
    decode_core_turn(core);
}

/* ---- looking --------------------------------------------------------------------------------- */

void decode_core_look(const decode_core *core, decode_view *view_out) {
    const kv_pool_counts pages = kv_pool_count(core->options.pages);
    decode_view view = {
        .session = core->session.state,
        .pages_total = pages.total,
        .pages_free = pages.free,
        .pages_quarantined = pages.quarantined,
        .rows_total = core->rows != NULL ? row_pool_total_count(core->rows) : 0,
        .rows_free = core->rows != NULL ? row_pool_free_count(core->rows) : 0,
        .steps_total = core->steps_total,
        .tokens_total = core->tokens_total,
        .accepted_total = core->accepted_total,
        .refused_total = core->refused_total,
        .released_total = core->released_total,
        .is_step_running = core->step.is_running,
    };
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        const decode_state state = core->attempts[i].state;
        view.attempts += state != DECODE_FREE;
        view.reserved += state == DECODE_RESERVED;
        view.running += state == DECODE_RUNNING || state == DECODE_LEAVING;
        view.parked += state == DECODE_PARKED;
        view.draining += state == DECODE_DRAINING;
        view.quarantined += state == DECODE_QUARANTINE;
    }
    *view_out = view;
}

bool decode_core_check(const decode_core *core) {
    uint32_t pages = 0;
    uint32_t slots = 0;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        const decode_attempt *a = &core->attempts[i];
        if (a->state == DECODE_FREE && (a->page_count != 0 || a->has_slot)) return false;
        pages += a->page_count;
        slots += a->has_slot;
        for (uint32_t p = 0; p < a->page_count; p++) {
            if (kv_pool_owner(core->options.pages, a->pages[p]) != decode_owner(a)) return false;
        }
    }
    const kv_pool_counts counts = kv_pool_count(core->options.pages);
    if (counts.owned + counts.quarantined != pages) return false;
    const uint32_t held =
        core->rows != NULL ? row_pool_total_count(core->rows) - row_pool_free_count(core->rows) : 0;
    return held == slots && kv_pool_check(core->options.pages);
}
