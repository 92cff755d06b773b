/* The session with the router and the peers it names. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "prefill/prefill_internal.h"

void prefill_hang_up(prefill_core *core, const char *format, ...) {
    if (core->hang_up_why != NULL) return;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(core->hang_up_text, sizeof core->hang_up_text, format, args);
    va_end(args);
    core->hang_up_why = core->hang_up_text;
}

void prefill_session_end(prefill_core *core) {
    worker_session_on_closed(&core->session);
    core->is_sized = false;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        prefill_end(core, &core->attempts[i], "router gone");
    }
    peer_table_remove_all(&core->peers);
}

/* ---- welcome --------------------------------------------------------------------------------- */

void prefill_on_welcome(prefill_core *core, const proto_welcome *welcome) {
    bt_error error = {0};
    const bt_status status =
        worker_session_on_welcome(&core->session, welcome, prefill_now(core), &error);
    if (status != BT_OK) {
        prefill_hang_up(core, "%s", error.text);
        return;
    }
    bt_log_info(
        "prefill", "welcomed by router %s as worker %" PRIu32 "; sampling_mask_max_tokens %" PRIu32,
        welcome->router_host, welcome->worker_id, core->session.record.sampling_mask_max_tokens);
}

/* Nothing of an earlier session is left: no attempt, no endpoint, no ack. */
static bool is_at_rest(const prefill_core *core) {
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        if (core->attempts[i].state != PREFILL_FREE) return false;
    }
    if (core->sender != NULL && handoff_sender_active_count(core->sender) != 0) return false;
    return peer_table_is_quiet(&core->peers);
}

static bt_status size_rows(prefill_core *core) {
    const uint32_t cap = core->session.record.sampling_mask_max_tokens;
    if (core->rows != NULL && row_pool_cap(core->rows) == cap) return BT_OK;
    row_pool *rows = NULL;
    bt_status status = row_pool_create(core->options.attempts_max, cap, &rows);
    if (status != BT_OK) return status;
    xfer *mover = core->options.mover;
    status = mover->ops->register_memory(mover, row_pool_memory(rows), row_pool_memory_bytes(rows));
    if (status != BT_OK) {
        row_pool_destroy(rows);
        return status;
    }
    row_pool_destroy(core->rows);
    core->rows = rows;
    return BT_OK;
}

/* Pools and sender for this session's record. */
static bt_status size_pools(prefill_core *core) {
    const prefill_core_options *o = &core->options;
    handoff_sender_destroy(core->sender);
    core->sender = NULL;
    bt_status status = size_rows(core);
    if (status != BT_OK) return status;
    o->mover->self = (xfer_peer){.worker_id = core->session.welcome.worker_id,
                                 .incarnation = o->hello.incarnation};
    const handoff_sender_options options = {
        .mover = o->mover,
        .pages = o->pages,
        .rows = core->rows,
        .checksum = (record_checksum)(core->session.record.kv_checksum - 1),
        .page_tokens = o->page_tokens,
        .attempts_max = o->attempts_max,
        .incarnation = o->hello.incarnation,
        .chunk_bytes_max = o->chunk_bytes_max,
        .chunk_grace_us = o->chunk_grace_us,
        .clock = o->clock,
        .events = prefill_sender_events(core),
    };
    return handoff_sender_create(&options, &core->sender);
}

static void send_ready(prefill_core *core) {
    const prefill_core_options *o = &core->options;
    proto_message message = {.kind = PROTO_READY};
    proto_ready *ready = &message.ready;
    const uint8_t *address = NULL;
    size_t bytes = 0;
    const bt_status status = o->mover->ops->get_address(o->mover, &address, &bytes);
    if (status != BT_OK || bytes == 0 || bytes > PROTO_ADDRESS_MAX) {
        prefill_hang_up(core, "the mover has no usable address: %s", bt_status_string(status));
        return;
    }
    memcpy(ready->address, address, bytes);
    ready->address_bytes = (uint32_t)bytes;
    ready->pages_total = kv_pool_count(o->pages).total;
    ready->page_tokens = o->page_tokens;
    ready->rows_total = row_pool_total_count(core->rows);
    ready->sequences_max = o->attempts_max;
    ready->step_tokens = o->chunk_tokens;
    worker_session_on_ready(&core->session, prefill_now(core));
    o->ops.send(o->ops.context, PROTO_LANE_CONTROL, &message);
    bt_log_info("prefill",
                "serving: %" PRIu32 " KV pages of %" PRIu32 " tokens, %" PRIu32 " prompts",
                ready->pages_total, o->page_tokens, o->attempts_max);
}

void prefill_session_turn(prefill_core *core) {
    const prefill_core_ops *ops = &core->options.ops;
    if (core->hang_up_why != NULL) {
        bt_log_warn("prefill", "hanging up: %s", core->hang_up_why);
        prefill_session_end(core);
        ops->hang_up(ops->context, core->hang_up_why);
        core->hang_up_why = NULL;
    }
    if (core->session.state == WORKER_SESSION_WELCOMED && !core->is_sized && is_at_rest(core)) {
        const bt_status status = size_pools(core);
        if (status != BT_OK) {
            core->is_broken = true;
            ops->on_broken(ops->context, status, "the row slots cannot be allocated");
            return;
        }
        core->is_sized = true;
        ops->open_streams(ops->context);
    }
    if (core->session.state == WORKER_SESSION_WELCOMED && core->is_sized &&
        core->session.has_streams) {
        send_ready(core);
    }
    peer_table_turn(&core->peers, prefill_now(core));
}

/* ---- peers ----------------------------------------------------------------------------------- */

static bt_status say_hello(void *context, xfer_peer peer) {
    return handoff_sender_hello(((prefill_core *)context)->sender, peer);
}

static void on_pair(void *context, xfer_peer peer, bt_status status) {
    prefill_core *core = context;
    /* That a pair works is decode's to say. */
    if (core->session.state != WORKER_SESSION_SERVING || status == BT_OK) return;
    proto_message message = {.kind = PROTO_PAIR_READY};
    message.pair = (proto_pair){
        .worker_id = peer.worker_id, .incarnation = peer.incarnation, .status = status};
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}

bt_status prefill_peers_init(prefill_core *core) {
    const peer_table_ops ops = {.say_hello = say_hello, .on_pair = on_pair, .context = core};
    return peer_table_init(&core->peers, core->options.mover, &ops);
}

void prefill_on_peer(prefill_core *core, const proto_peer *peer) {
    if (peer->role != PROTO_ROLE_DECODE) {
        prefill_hang_up(core, "a peer of prefill is named as %s", proto_role_name(peer->role));
        return;
    }
    const bt_status status = peer_table_add(&core->peers, peer, prefill_now(core));
    if (status == BT_OK) return;
    bt_log_error("prefill", "decode worker %" PRIu32 " at %s cannot be added: %s", peer->worker_id,
                 peer->host, bt_status_string(status));
    on_pair(core, (xfer_peer){.worker_id = peer->worker_id, .incarnation = peer->incarnation},
            status);
}

void prefill_on_peer_gone(prefill_core *core, const proto_pair *pair) {
    peer_table_remove(&core->peers,
                      (xfer_peer){.worker_id = pair->worker_id, .incarnation = pair->incarnation});
}

uint32_t prefill_queued_tokens(const prefill_core *core) {
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        const prefill_attempt *a = &core->attempts[i];
        const bool is_waiting = a->state == PREFILL_ASSEMBLING || a->state == PREFILL_QUEUED ||
                                a->state == PREFILL_COMPUTING;
        if (is_waiting) tokens += a->prompt_tokens - a->computed_tokens;
    }
    return tokens;
}

void prefill_on_ping(prefill_core *core, const proto_ping *ping) {
    proto_message message = {.kind = PROTO_PONG};
    message.ping = (proto_ping){
        .sequence = ping->sequence,
        .pages_free = kv_pool_count(core->options.pages).free,
        .rows_free = core->rows != NULL ? row_pool_free_count(core->rows) : 0,
        .sequences_running = core->step.is_running ? core->step.batch.sequences : 0,
        .queued_tokens = prefill_queued_tokens(core),
    };
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}
