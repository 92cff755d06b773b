/* The core's surface: messages in, turns, deadlines, looking. */
#include "prefill/prefill_core.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

enum { CHECK_US = 1000 * 1000 };

bt_status prefill_core_create(const prefill_core_options *options, prefill_core **out) {
    BT_ASSERT(options->attempts_max >= 1 && options->attempts_max <= PREFILL_ATTEMPTS_MAX);
    BT_ASSERT(options->page_tokens > 0 && options->context_tokens > 0);
    BT_ASSERT(options->chunk_tokens > 0);
    prefill_core *core = bt_calloc(1, sizeof *core);
    if (core == NULL) return BT_ERR_WORKER_MEMORY;
    core->options = *options;
    if (core->options.step_us == 0) core->options.step_us = PREFILL_STEP_US;
    worker_session_init(&core->session, &options->hello);
    core->pages_per_attempt = kv_pages_for(options->context_tokens, options->page_tokens);
    const size_t n = options->attempts_max;
    bt_status status = BT_ERR_WORKER_MEMORY;
    core->attempts = bt_calloc(n, sizeof *core->attempts);
    core->page_lists = bt_calloc(n * core->pages_per_attempt, sizeof *core->page_lists);
    if (core->attempts == NULL || core->page_lists == NULL) goto destroy;
    status = prefill_peers_init(core);
    if (status == BT_OK) status = prefill_step_init(core);
    if (status != BT_OK) goto destroy;
    options->compute->on_done = prefill_on_step_done;
    options->compute->context = core;
    *out = core;
    return BT_OK;

destroy:
    prefill_core_destroy(core);
    return status;
}

void prefill_core_destroy(prefill_core *core) {
    if (core == NULL) return;
    /* Nothing is computed and nothing moves any more, so every record can be given back. */
    for (uint32_t i = 0; core->attempts != NULL && i < core->options.attempts_max; i++) {
        core->attempts[i].is_in_step = false;
    }
    handoff_sender_destroy(core->sender);
    core->sender = NULL;
    for (uint32_t i = 0; core->attempts != NULL && i < core->options.attempts_max; i++) {
        prefill_attempt *a = &core->attempts[i];
        a->has_handoff = false;
        prefill_release(core, a, "end of the process");
    }
    row_pool_destroy(core->rows);
    peer_table_fini(&core->peers);
    prefill_step_fini(core);
    bt_free(core->page_lists);
    bt_free(core->attempts);
    bt_free(core);
}

/* ---- messages -------------------------------------------------------------------------------- */

void prefill_core_on_open(prefill_core *core, proto_lane lane) {
    /* A streams connection that opens behind the session's end is the owner's to close. */
    if (lane == PROTO_LANE_STREAMS && !worker_session_is_welcome(&core->session)) return;
    proto_message hello;
    worker_session_on_open(&core->session, lane, prefill_now(core), &hello);
    core->options.ops.send(core->options.ops.context, lane, &hello);
    prefill_core_turn(core);
}

void prefill_core_on_closed(prefill_core *core) {
    prefill_session_end(core);
    prefill_core_turn(core);
}

static void on_work(prefill_core *core, const proto_message *message) {
    if (core->session.state != WORKER_SESSION_SERVING) {
        prefill_hang_up(core, "%s came before ready", proto_kind_name(message->kind));
        return;
    }
    if (message->kind == PROTO_CANCEL) {
        prefill_on_cancel(core, message->cancel.attempt);
    } else {
        prefill_on_run(core, &message->run, message->payload, message->payload_bytes);
    }
}

static void dispatch_message(prefill_core *core, const proto_message *message) {
    switch (message->kind) {
    case PROTO_WELCOME: prefill_on_welcome(core, &message->welcome); return;
    case PROTO_REFUSE:
        worker_session_on_refuse(&core->session);
        core->options.ops.on_refused(core->options.ops.context, message->refuse.text);
        return;
    case PROTO_PEER:
    case PROTO_PEER_GONE:
    case PROTO_PING:
        if (!worker_session_is_welcome(&core->session)) break;
        if (message->kind == PROTO_PEER) prefill_on_peer(core, &message->peer);
        if (message->kind == PROTO_PEER_GONE) prefill_on_peer_gone(core, &message->pair);
        if (message->kind == PROTO_PING) prefill_on_ping(core, &message->ping);
        return;
    case PROTO_RUN:
    case PROTO_CANCEL: on_work(core, message); return;
    case PROTO_HELLO:
    case PROTO_READY:
    case PROTO_PAIR_READY:
    case PROTO_PONG:
    case PROTO_RESERVATION:
    case PROTO_PREFILL_DONE:
    case PROTO_RESERVE:
    case PROTO_CREDIT:
    case PROTO_CHUNK:
    case PROTO_CAPACITY: break;
    }
    prefill_hang_up(core, "%s is not for a prefill worker that is %s",
                    proto_kind_name(message->kind), worker_session_state_name(core->session.state));
}

void prefill_core_on_message(prefill_core *core, proto_lane lane, const proto_message *message) {
    /* What is still in the sockets of a session that is over. */
    if (core->session.state == WORKER_SESSION_AWAY || core->session.state == WORKER_SESSION_REFUSED)
        return;
    if (core->hang_up_why != NULL) return;
    if (lane == PROTO_LANE_CONTROL) worker_session_on_heard(&core->session, prefill_now(core));
    const bool is_work = message->kind == PROTO_RUN || message->kind == PROTO_CANCEL;
    if (is_work == (lane == PROTO_LANE_STREAMS)) {
        dispatch_message(core, message);
    } else {
        prefill_hang_up(core, "%s came on the wrong connection", proto_kind_name(message->kind));
    }
    prefill_core_turn(core);
}

/* ---- turning --------------------------------------------------------------------------------- */

void prefill_core_turn(prefill_core *core) {
    prefill_session_turn(core);
    prefill_step_turn(core);
}

static void expire(prefill_core *core, prefill_attempt *a, uint64_t now_us) {
    switch (a->state) {
    case PREFILL_ASSEMBLING:
    case PREFILL_QUEUED:
    case PREFILL_COMPUTING:
        if (now_us < a->deadline_us) return;
        prefill_fail(core, a, BT_ERR_REQUEST_DEADLINE,
                     "prefill: the deadline passed while %s, with %" PRIu32 " of %" PRIu32
                     " prompt tokens computed",
                     prefill_state_name(a->state), a->computed_tokens, a->prompt_tokens);
        return;
    case PREFILL_SENDING:    /* the sender keeps this deadline and reports it */
    case PREFILL_LEAVING:    /* the step has one */
    case PREFILL_QUARANTINE: /* the sender reports a peer that must be closed (on_stuck) */
    case PREFILL_FREE:
    case PREFILL_STATE_COUNT: return;
    }
}

void prefill_core_tick(prefill_core *core) {
    const uint64_t now_us = prefill_now(core);
    if (worker_session_is_late(&core->session, now_us)) {
        prefill_hang_up(core, "the router is silent while %s",
                        worker_session_state_name(core->session.state));
    }
    /* The sender knows the same deadlines, but not what was waited for. */
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        expire(core, &core->attempts[i], now_us);
    }
    if (core->sender != NULL) handoff_sender_tick(core->sender);
    prefill_step_tick(core, now_us);
    if (now_us >= core->next_check_us) {
        core->next_check_us = now_us + CHECK_US;
        BT_ASSERT(prefill_core_check(core));
    }
    prefill_core_turn(core);
}

/* ---- looking --------------------------------------------------------------------------------- */

void prefill_core_look(const prefill_core *core, prefill_view *view_out) {
    const kv_pool_counts pages = kv_pool_count(core->options.pages);
    prefill_view view = {
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
        .queued_tokens = prefill_queued_tokens(core),
        .is_step_running = core->step.is_running,
    };
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        const prefill_state state = core->attempts[i].state;
        view.attempts += state != PREFILL_FREE;
        view.queued += state == PREFILL_ASSEMBLING || state == PREFILL_QUEUED;
        view.computing += state == PREFILL_COMPUTING || state == PREFILL_LEAVING;
        view.sending += state == PREFILL_SENDING;
        view.quarantined += state == PREFILL_QUARANTINE;
    }
    *view_out = view;
}

bool prefill_core_check(const prefill_core *core) {
    uint32_t pages = 0;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        const prefill_attempt *a = &core->attempts[i];
        const bool is_free = a->state == PREFILL_FREE;
        if (is_free && (a->page_count != 0 || a->has_handoff || a->prompt != NULL)) return false;
        pages += a->page_count;
        for (uint32_t p = 0; p < a->page_count; p++) {
            if (kv_pool_owner(core->options.pages, a->pages[p]) != prefill_owner(a)) return false;
        }
    }
    const kv_pool_counts counts = kv_pool_count(core->options.pages);
    return counts.owned + counts.quarantined == pages && kv_pool_check(core->options.pages);
}
