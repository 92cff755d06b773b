/* The session with the router and the peers it names. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "decode/decode_internal.h"

void decode_hang_up(decode_core *core, const char *format, ...) {
    if (core->hang_up_why != NULL) return;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(core->hang_up_text, sizeof core->hang_up_text, format, args);
    va_end(args);
    core->hang_up_why = core->hang_up_text;
}

void decode_session_end(decode_core *core) {
    worker_session_on_closed(&core->session);
    core->is_sized = false;
    core->owes_capacity = false;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        decode_end(core, &core->attempts[i], "router gone");
    }
    peer_table_remove_all(&core->peers);
}

/* ---- welcome --------------------------------------------------------------------------------- */

void decode_on_welcome(decode_core *core, const proto_welcome *welcome) {
    bt_error error = {0};
    const bt_status status =
        worker_session_on_welcome(&core->session, welcome, decode_now(core), &error);
    if (status != BT_OK) {
        decode_hang_up(core, "%s", error.text);
        return;
    }
    bt_log_info(
        "decode", "welcomed by router %s as worker %" PRIu32 "; sampling_mask_max_tokens %" PRIu32,
        welcome->router_host, welcome->worker_id, core->session.record.sampling_mask_max_tokens);
}

/* Nothing of an earlier session is left: no attempt, no endpoint, no ack. */
static bool is_at_rest(const decode_core *core) {
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        if (core->attempts[i].state != DECODE_FREE) return false;
    }
    if (core->receiver != NULL && handoff_receiver_active_count(core->receiver) != 0) return false;
    return peer_table_is_quiet(&core->peers);
}

static bt_status size_rows(decode_core *core) {
    const uint32_t cap = core->session.record.sampling_mask_max_tokens;
    if (core->rows != NULL && row_pool_cap(core->rows) == cap) return BT_OK;
    row_pool *rows = NULL;
    bt_status status = row_pool_create(core->options.sequences_max, cap, &rows);
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

/* Pools and receiver for this session's record. */
static bt_status size_pools(decode_core *core) {
    const decode_core_options *o = &core->options;
    handoff_receiver_destroy(core->receiver);
    core->receiver = NULL;
    bt_status status = size_rows(core);
    if (status != BT_OK) return status;
    o->mover->self = (xfer_peer){.worker_id = core->session.welcome.worker_id,
                                 .incarnation = o->hello.incarnation};
    const handoff_receiver_options options = {
        .mover = o->mover,
        .pages = o->pages,
        .rows = core->rows,
        .checksum = (record_checksum)(core->session.record.kv_checksum - 1),
        .page_tokens = o->page_tokens,
        /* An attempt whose ack is not sent yet counts there, and no longer here. */
        .attempts_max = 2 * o->sequences_max + 16,
        .chunk_bytes_max = o->chunk_bytes_max,
        .chunk_grace_us = o->chunk_grace_us,
        .clock = o->clock,
        .events = decode_receiver_events(core),
    };
    return handoff_receiver_create(&options, &core->receiver);
}

static void send_ready(decode_core *core) {
    const decode_core_options *o = &core->options;
    proto_message message = {.kind = PROTO_READY};
    proto_ready *ready = &message.ready;
    const uint8_t *address = NULL;
    size_t bytes = 0;
    const bt_status status = o->mover->ops->get_address(o->mover, &address, &bytes);
    if (status != BT_OK || bytes == 0 || bytes > PROTO_ADDRESS_MAX) {
        decode_hang_up(core, "the mover has no usable address: %s", bt_status_string(status));
        return;
    }
    memcpy(ready->address, address, bytes);
    ready->address_bytes = (uint32_t)bytes;
    ready->pages_total = kv_pool_count(o->pages).total;
    ready->page_tokens = o->page_tokens;
    ready->rows_total = row_pool_total_count(core->rows);
    ready->sequences_max = o->sequences_max;
    worker_session_on_ready(&core->session, decode_now(core));
    o->ops.send(o->ops.context, PROTO_LANE_CONTROL, &message);
    bt_log_info("decode",
                "serving: %" PRIu32 " KV pages of %" PRIu32 " tokens, %" PRIu32 " sequences",
                ready->pages_total, o->page_tokens, o->sequences_max);
}

void decode_session_turn(decode_core *core) {
    const decode_core_ops *ops = &core->options.ops;
    if (core->hang_up_why != NULL) {
        bt_log_warn("decode", "hanging up: %s", core->hang_up_why);
        decode_session_end(core);
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
    peer_table_turn(&core->peers, decode_now(core));
}

/* ---- peers ----------------------------------------------------------------------------------- */

static bt_status say_hello(void *context, xfer_peer peer) {
    return handoff_receiver_hello(((decode_core *)context)->receiver, peer);
}

static void on_pair(void *context, xfer_peer peer, bt_status status) {
    decode_core *core = context;
    if (core->session.state != WORKER_SESSION_SERVING) return;
    proto_message message = {.kind = PROTO_PAIR_READY};
    message.pair = (proto_pair){
        .worker_id = peer.worker_id, .incarnation = peer.incarnation, .status = status};
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}

bt_status decode_peers_init(decode_core *core) {
    const peer_table_ops ops = {.say_hello = say_hello, .on_pair = on_pair, .context = core};
    return peer_table_init(&core->peers, core->options.mover, &ops);
}

void decode_on_peer(decode_core *core, const proto_peer *peer) {
    if (peer->role != PROTO_ROLE_PREFILL) {
        decode_hang_up(core, "a peer of decode is named as %s", proto_role_name(peer->role));
        return;
    }
    const bt_status status = peer_table_add(&core->peers, peer, decode_now(core));
    if (status == BT_OK) return;
    bt_log_error("decode", "prefill worker %" PRIu32 " at %s cannot be added: %s", peer->worker_id,
                 peer->host, bt_status_string(status));
    on_pair(core, (xfer_peer){.worker_id = peer->worker_id, .incarnation = peer->incarnation},
            status);
}

void decode_on_peer_gone(decode_core *core, const proto_pair *pair) {
    peer_table_remove(&core->peers,
                      (xfer_peer){.worker_id = pair->worker_id, .incarnation = pair->incarnation});
}

void decode_on_ping(decode_core *core, const proto_ping *ping) {
    proto_message message = {.kind = PROTO_PONG};
    uint32_t running = 0;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        running += core->attempts[i].state == DECODE_RUNNING;
    }
    message.ping = (proto_ping){
        .sequence = ping->sequence,
        .pages_free = kv_pool_count(core->options.pages).free,
        .rows_free = core->rows != NULL ? row_pool_free_count(core->rows) : 0,
        .sequences_running = running,
    };
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}
