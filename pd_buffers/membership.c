/* Joining and leaving; see the header. */
#include "pd_buffers/membership.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"

static uint64_t now_of(const membership *m) {
    return bt_clock_now_us(&m->options.clock);
}

static void send_control(membership *m, proto_message *message) {
    m->options.program.send(m->options.program.context, PROTO_LANE_CONTROL, message);
}

/* ---- peers ----------------------------------------------------------------------------------- */

static proto_role role_of_peers(const membership *m) {
    return m->options.hello.role == PROTO_ROLE_DECODE ? PROTO_ROLE_PREFILL : PROTO_ROLE_DECODE;
}

static bt_status say_hello(void *context, xfer_peer peer) {
    membership *m = context;
    return m->options.ops.say_hello(m->options.ops.context, peer);
}

static void on_pair(void *context, xfer_peer peer, bt_status status) {
    membership *m = context;
    /* That a pair works is decode's to say; that it broke, either side's. */
    const bool is_told = status != BT_OK || m->options.hello.role == PROTO_ROLE_DECODE;
    if (!membership_is_serving(m) || !is_told) return;
    proto_message message = {.kind = PROTO_PAIR_READY};
    message.pair = (proto_pair){
        .worker_id = peer.worker_id, .incarnation = peer.incarnation, .status = status};
    send_control(m, &message);
}

static void on_peer(membership *m, const proto_peer *peer) {
    if (peer->role != role_of_peers(m)) {
        membership_hang_up(m, "a peer of %s is named as %s", proto_role_name(m->options.hello.role),
                           proto_role_name(peer->role));
        return;
    }
    const bt_status status = peer_table_add(&m->peers, peer, now_of(m));
    if (status == BT_OK) return;
    bt_log_error(m->component, "worker %" PRIu32 " at %s cannot be added: %s", peer->worker_id,
                 peer->host, bt_status_string(status));
    on_pair(m, (xfer_peer){.worker_id = peer->worker_id, .incarnation = peer->incarnation}, status);
}

static void on_peer_gone(membership *m, const proto_pair *pair) {
    peer_table_remove(&m->peers,
                      (xfer_peer){.worker_id = pair->worker_id, .incarnation = pair->incarnation});
}

/* ---- what the handoff says of peers ---------------------------------------------------------- */

static void on_hello(void *context, xfer_peer peer) {
    peer_table_on_hello(&((membership *)context)->peers, peer);
}

static void on_stuck(void *context, xfer_peer peer) {
    peer_table_on_failed(&((membership *)context)->peers, peer, BT_ERR_PEER_TIMEOUT);
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    peer_table_on_failed(&((membership *)context)->peers, peer, status);
}

static void on_peer_closed(void *context, xfer_peer peer) {
    membership *m = context;
    peer_table_on_closed(&m->peers, peer, now_of(m));
}

handoff_peer_events membership_peer_events(membership *m) {
    return (handoff_peer_events){.on_hello = on_hello,
                                 .on_stuck = on_stuck,
                                 .on_peer_failed = on_peer_failed,
                                 .on_peer_closed = on_peer_closed,
                                 .context = m};
}

/* ---- session --------------------------------------------------------------------------------- */

bt_status membership_init(membership *m, const membership_options *options) {
    memset(m, 0, sizeof *m);
    m->options = *options;
    m->component = proto_role_name(options->hello.role);
    worker_session_init(&m->session, &options->hello);
    const peer_table_ops peers = {.say_hello = say_hello, .on_pair = on_pair, .context = m};
    return peer_table_init(&m->peers, options->mover, &peers);
}

void membership_fini(membership *m) {
    row_pool_destroy(m->rows);
    m->rows = NULL;
    peer_table_fini(&m->peers);
}

void membership_on_open(membership *m, proto_lane lane) {
    /* A streams connection that opens behind the session's end is the owner's to close. */
    if (lane == PROTO_LANE_STREAMS && !worker_session_is_welcome(&m->session)) return;
    proto_message hello;
    worker_session_on_open(&m->session, lane, now_of(m), &hello);
    m->options.program.send(m->options.program.context, lane, &hello);
}

void membership_end(membership *m) {
    worker_session_on_closed(&m->session);
    m->is_sized = false;
    m->options.ops.end_attempts(m->options.ops.context);
    peer_table_remove_all(&m->peers);
}

void membership_hang_up(membership *m, const char *format, ...) {
    if (m->wants_hang_up) return;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(m->hang_up_why, sizeof m->hang_up_why, format, args);
    va_end(args);
    m->wants_hang_up = true;
}

void membership_reject(membership *m, const proto_message *message) {
    membership_hang_up(m, "%s is not for a %s worker that is %s", proto_kind_name(message->kind),
                       m->component, worker_session_state_name(m->session.state));
}

static void on_welcome(membership *m, const proto_welcome *welcome) {
    bt_error error = {0};
    if (worker_session_on_welcome(&m->session, welcome, now_of(m), &error) != BT_OK) {
        membership_hang_up(m, "%s", error.text);
        return;
    }
    bt_log_info(m->component,
                "welcomed by router %s as worker %" PRIu32 "; sampling_mask_max_tokens %" PRIu32,
                welcome->router_host, welcome->worker_id, membership_cap(m));
}

static void on_ping(membership *m, const proto_ping *ping) {
    proto_message message = {.kind = PROTO_PONG};
    m->options.ops.fill_pong(m->options.ops.context, &message.ping);
    message.ping.sequence = ping->sequence;
    message.ping.rows_free = membership_rows_free(m);
    send_control(m, &message);
}

/* true: the message was about joining. */
static bool take(membership *m, const proto_message *message) {
    const membership_program *program = &m->options.program;
    const bool is_welcome = worker_session_is_welcome(&m->session);
    if (message->kind == PROTO_WELCOME) {
        on_welcome(m, &message->welcome);
    } else if (message->kind == PROTO_REFUSE) {
        worker_session_on_refuse(&m->session);
        program->on_refused(program->context, message->refuse.text);
    } else if (message->kind == PROTO_PEER && is_welcome) {
        on_peer(m, &message->peer);
    } else if (message->kind == PROTO_PEER_GONE && is_welcome) {
        on_peer_gone(m, &message->pair);
    } else if (message->kind == PROTO_PING && is_welcome) {
        on_ping(m, &message->ping);
    } else {
        return false;
    }
    return true;
}

bool membership_on_message(membership *m, proto_lane lane, const proto_message *message,
                           bool is_stream_kind) {
    /* What is still in the sockets of a session that is over. */
    const worker_session_state state = m->session.state;
    if (state == WORKER_SESSION_AWAY || state == WORKER_SESSION_REFUSED) return false;
    if (m->wants_hang_up) return false;
    if (lane == PROTO_LANE_CONTROL) worker_session_on_heard(&m->session, now_of(m));
    if (is_stream_kind != (lane == PROTO_LANE_STREAMS)) {
        membership_hang_up(m, "%s came on the wrong connection", proto_kind_name(message->kind));
        return false;
    }
    if (take(m, message)) return false;
    if (membership_is_serving(m)) return true;
    membership_reject(m, message);
    return false;
}

/* ---- acting ---------------------------------------------------------------------------------- */

static bt_status size_rows(membership *m) {
    const uint32_t entries = membership_row_entries(m);
    if (m->rows != NULL && row_pool_cap(m->rows) == entries) return BT_OK;
    row_pool *rows = NULL;
    bt_status status = row_pool_create(m->options.row_slots, entries, &rows);
    if (status != BT_OK) return status;
    xfer *mover = m->options.mover;
    status = mover->ops->register_memory(mover, row_pool_memory(rows), row_pool_memory_bytes(rows));
    if (status != BT_OK) {
        row_pool_destroy(rows);
        return status;
    }
    if (m->rows != NULL) mover->ops->unregister_memory(mover, row_pool_memory(m->rows));
    row_pool_destroy(m->rows);
    m->rows = rows;
    return BT_OK;
}

static void size_all(membership *m) {
    const membership_ops *ops = &m->options.ops;
    const membership_program *program = &m->options.program;
    bt_status status = size_rows(m);
    m->options.mover->self = (xfer_peer){.worker_id = m->session.welcome.worker_id,
                                         .incarnation = m->options.hello.incarnation};
    if (status == BT_OK) status = ops->create_end(ops->context);
    if (status != BT_OK) {
        bt_log_error(m->component, "%" PRIu32 " row slots of %" PRIu32 " entries: %s",
                     m->options.row_slots, membership_row_entries(m), bt_status_string(status));
        m->is_broken = true;
        program->on_broken(program->context, status, "the row slots cannot be allocated");
        return;
    }
    m->is_sized = true;
    program->open_streams(program->context);
}

static void send_ready(membership *m) {
    const membership_ops *ops = &m->options.ops;
    xfer *mover = m->options.mover;
    proto_message message = {.kind = PROTO_READY};
    proto_ready *ready = &message.ready;
    const uint8_t *address = NULL;
    size_t bytes = 0;
    const bt_status status = mover->ops->get_address(mover, &address, &bytes);
    if (status != BT_OK || bytes == 0 || bytes > PROTO_ADDRESS_MAX) {
        membership_hang_up(m, "the mover has no usable address: %s", bt_status_string(status));
        return;
    }
    ops->fill_ready(ops->context, ready);
    memcpy(ready->address, address, bytes);
    ready->address_bytes = (uint32_t)bytes;
    ready->rows_total = membership_rows_total(m);
    worker_session_on_ready(&m->session, now_of(m));
    send_control(m, &message);
    bt_log_info(m->component,
                "serving: %" PRIu32 " KV pages of %" PRIu32 " tokens, %" PRIu32 " requests at once",
                ready->pages_total, ready->page_tokens, ready->sequences_max);
}

void membership_turn(membership *m) {
    const membership_ops *ops = &m->options.ops;
    const membership_program *program = &m->options.program;
    if (m->wants_hang_up) {
        bt_log_warn(m->component, "hanging up: %s", m->hang_up_why);
        membership_end(m);
        program->hang_up(program->context, m->hang_up_why);
        m->wants_hang_up = false;
    }
    if (m->session.state == WORKER_SESSION_WELCOMED) {
        const bool can_size = !m->is_sized && !m->is_broken && peer_table_is_quiet(&m->peers);
        if (can_size && ops->is_at_rest(ops->context)) size_all(m);
        if (m->is_sized && m->session.has_streams) send_ready(m);
    }
    peer_table_turn(&m->peers, now_of(m));
}

void membership_tick(membership *m) {
    if (!worker_session_is_late(&m->session, now_of(m))) return;
    membership_hang_up(m, "the router is silent while %s",
                       worker_session_state_name(m->session.state));
}
