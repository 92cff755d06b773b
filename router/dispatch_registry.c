/* Connections, workers and pairs. A worker lives from its WELCOME until one of its connections
 * ends, its heartbeat stops or it breaks the protocol; then it is removed whole, everyone who knew
 * it is told, and its attempts fail over. A worker that comes back is a new worker. */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/dispatch_internal.h"

/* ---- connections ----------------------------------------------------------------------------- */

connection *dispatch_registry_open(dispatch *d, dispatch_link link) {
    connection *entry = NULL;
    for (uint32_t i = 0; i < DISPATCH_LINKS_MAX && entry == NULL; i++) {
        if (d->connections[i].id == 0) entry = &d->connections[i];
    }
    if (entry == NULL) {
        bt_log_warn("dispatch", "a connection is closed: there are %d already", DISPATCH_LINKS_MAX);
        d->is_calling = true;
        d->ops.close(d->ops.context, link);
        d->is_calling = false;
        return NULL;
    }
    *entry = (connection){.id = link, .opened_us = d->now_us};
    bt_id_map_put(&d->links, bt_id_of(link), entry);
    return entry;
}

void dispatch_registry_protocol_error(dispatch *d, connection *from, const char *text) {
    d->protocol_errors_total++;
    if (from->worker == NULL) {
        bt_log_warn("dispatch", "a connection is closed: %s", text);
        dispatch_close(d, from);
        return;
    }
    dispatch_registry_remove_worker(d, from->worker, BT_ERR_PEER_PROTOCOL, text);
}

void dispatch_registry_on_link_closed(dispatch *d, connection *which) {
    worker *w = which->worker;
    const bool is_control = which->lane == PROTO_LANE_CONTROL;
    bt_id_map_remove(&d->links, bt_id_of(which->id));
    if (w != NULL) {
        if (is_control) {
            w->control = NULL;
        } else {
            w->streams = NULL;
        }
    }
    *which = (connection){.id = 0};
    if (w == NULL) return;
    dispatch_registry_remove_worker(d, w, BT_ERR_PEER_GONE,
                                    is_control ? "its control connection ended"
                                               : "its streams connection ended");
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static pair *pair_of(const dispatch *d, const worker *a, const worker *b) {
    const bool is_first = a->hello.role == PROTO_ROLE_PREFILL;
    const worker *prefill = is_first ? a : b, *decode = is_first ? b : a;
    return &d->pairs[prefill->slot][decode->slot];
}

bool dispatch_registry_is_pair_ready(const dispatch *d, const worker *prefill,
                                     const worker *decode) {
    return d->pairs[prefill->slot][decode->slot].state == PAIR_READY;
}

static void set_pair(dispatch *d, pair *p, pair_state next) {
    if (p->state == PAIR_READY) d->ready_pairs--;
    if (next == PAIR_READY) d->ready_pairs++;
    p->state = next;
    p->since_us = d->now_us;
    d->is_queue_dirty = true;
}

/* After any change of pairs: tells the owner when the cluster begins or ceases to be able to serve.
 */
static void announce_readiness(dispatch *d, bool was_ready) {
    const bool is_ready = d->ready_pairs > 0;
    if (is_ready == was_ready) return;
    if (is_ready) d->was_ready = true;
    if (!is_ready) d->ready_lost_us = d->now_us;
    bt_log_info("dispatch", "the cluster is %s", is_ready ? "ready" : "not ready any more");
    d->is_calling = true;
    d->ops.on_ready_changed(d->ops.context, is_ready);
    d->is_calling = false;
}

static void send_peer(dispatch *d, const worker *to, const worker *about) {
    proto_message message = {.kind = PROTO_PEER};
    message.peer.worker_id = about->id;
    message.peer.incarnation = about->hello.incarnation;
    message.peer.role = about->hello.role;
    memcpy(message.peer.host, about->hello.host, sizeof message.peer.host);
    message.peer.address_bytes = about->ready.address_bytes;
    memcpy(message.peer.address, about->ready.address, about->ready.address_bytes);
    dispatch_send(d, to->control, &message);
}

static void offer_pair(dispatch *d, worker *a, worker *b) {
    set_pair(d, pair_of(d, a, b), PAIR_OFFERED);
    send_peer(d, a, b);
    send_peer(d, b, a);
}

void dispatch_registry_join(dispatch *d, worker *w) {
    if (w->is_joined || !w->has_ready || w->streams == NULL) return;
    w->is_joined = true;
    d->joined[side_of(w)][d->joined_count[side_of(w)]++] = w;
    bt_log_info("dispatch", "%s is ready: %u pages of %u tokens", w->name, w->ready.pages_total,
                w->ready.page_tokens);
    const int there = side_of(w) == LEG_PREFILL ? LEG_DECODE : LEG_PREFILL;
    for (uint32_t i = 0; i < d->joined_count[there]; i++) {
        worker *other = d->joined[there][i];
        if (record_is_pairable(&w->record, &other->record)) offer_pair(d, w, other);
    }
}

static void break_pair(dispatch *d, worker *prefill, worker *decode, bt_status status,
                       const char *why) {
    const bool was_ready = d->ready_pairs > 0;
    pair *p = &d->pairs[prefill->slot][decode->slot];
    bt_log_warn("dispatch", "the pair of %s and %s broke: %s", prefill->name, decode->name, why);
    set_pair(d, p, PAIR_BROKEN);
    announce_readiness(d, was_ready);
    dispatch_attempt_on_pair_broken(d, prefill, decode, status);
}

void dispatch_registry_on_pair(dispatch *d, worker *from, const proto_pair *report) {
    worker *peer = dispatch_registry_find(d, report->worker_id);
    if (peer == NULL || peer->hello.incarnation != report->incarnation) {
        d->late_total++;
        return;
    }
    const bool is_decode = from->hello.role == PROTO_ROLE_DECODE;
    pair *p = peer->hello.role == from->hello.role ? NULL : pair_of(d, from, peer);
    if (p == NULL || p->state == PAIR_NONE || (report->status == BT_OK && !is_decode)) {
        dispatch_registry_protocol_error(d, from->control, "a report about a pair that is none");
        return;
    }
    if (p->state == PAIR_BROKEN) {
        d->late_total++; /* it will be offered again */
        return;
    }
    if (report->status != BT_OK) {
        break_pair(d, is_decode ? peer : from, is_decode ? from : peer, (bt_status)report->status,
                   bt_status_string((bt_status)report->status));
        return;
    }
    const bool was_ready = d->ready_pairs > 0;
    bt_log_info("dispatch", "%s and %s are a pair", peer->name, from->name);
    set_pair(d, p, PAIR_READY);
    announce_readiness(d, was_ready);
}

static void tick_pair(dispatch *d, worker *prefill, worker *decode) {
    const pair *p = &d->pairs[prefill->slot][decode->slot];
    if (p->state == PAIR_OFFERED && d->now_us >= p->since_us + PAIR_OFFER_TIMEOUT_MS * 1000u) {
        break_pair(d, prefill, decode, BT_ERR_PEER_TIMEOUT, "no hello came through in time");
    } else if (p->state == PAIR_BROKEN && d->now_us >= p->since_us + PAIR_RETRY_MS * 1000u) {
        offer_pair(d, prefill, decode);
    }
}

/* ---- workers --------------------------------------------------------------------------------- */

worker *dispatch_registry_find(const dispatch *d, uint32_t worker_id) {
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++) {
        if (d->workers[i] != NULL && d->workers[i]->id == worker_id) return d->workers[i];
    }
    return NULL;
}

worker *dispatch_registry_add_worker(dispatch *d, connection *control, const proto_hello *hello) {
    uint32_t slot = 0;
    while (slot < DISPATCH_WORKERS_MAX && d->workers[slot] != NULL)
        slot++;
    if (slot == DISPATCH_WORKERS_MAX) return NULL;
    worker *w = bt_calloc(1, sizeof *w);
    if (w == NULL) return NULL;
    w->slot = slot;
    w->id = d->next_worker_id++;
    w->hello = *hello;
    w->control = control;
    w->full_need = UINT32_MAX;
    w->last_pong_us = d->now_us;
    w->next_ping_us = dispatch_after_ms(d, d->options.heartbeat_ms);
    control->lane = PROTO_LANE_CONTROL;
    control->worker = w;
    d->workers[slot] = w;
    d->worker_count++;
    return w;
}

void dispatch_registry_on_ready(dispatch *d, worker *w, const proto_ready *ready) {
    const bool is_prefill = w->hello.role == PROTO_ROLE_PREFILL;
    if (w->has_ready) {
        dispatch_registry_protocol_error(d, w->control, "it said ready twice");
        return;
    }
    if (ready->page_tokens != w->record.page_tokens) {
        dispatch_registry_protocol_error(d, w->control, "its pages are not those of its record");
        return;
    }
    if (is_prefill ? ready->step_tokens == 0 : ready->sequences_max == 0) {
        dispatch_registry_protocol_error(
            d, w->control, is_prefill ? "it has no step_tokens" : "it has no sequences_max");
        return;
    }
    w->has_ready = true;
    w->ready = *ready;
    w->rows_free = ready->rows_total;
    w->ready_us = d->now_us;
    dispatch_registry_join(d, w);
}

static void tell_peers_gone(dispatch *d, const worker *w) {
    const int there = side_of(w) == LEG_PREFILL ? LEG_DECODE : LEG_PREFILL;
    for (uint32_t i = 0; i < d->joined_count[there]; i++) {
        worker *other = d->joined[there][i];
        pair *p = pair_of(d, w, other);
        if (p->state == PAIR_NONE) continue;
        set_pair(d, p, PAIR_NONE);
        proto_message message = {.kind = PROTO_PEER_GONE};
        message.pair.worker_id = w->id;
        message.pair.incarnation = w->hello.incarnation;
        message.pair.status = BT_ERR_PEER_GONE;
        dispatch_send(d, other->control, &message);
    }
}

static void unjoin(dispatch *d, const worker *w) {
    const int side = side_of(w);
    for (uint32_t i = 0; i < d->joined_count[side]; i++) {
        if (d->joined[side][i] != w) continue;
        d->joined[side][i] = d->joined[side][--d->joined_count[side]];
        return;
    }
}

void dispatch_registry_remove_worker(dispatch *d, worker *w, bt_status status, const char *why) {
    if (w->is_leaving) return;
    const bool was_ready = d->ready_pairs > 0;
    w->is_leaving = true;
    bt_log_warn("dispatch", "%s is gone: %s", w->name, why);
    connection *control = w->control, *streams = w->streams;
    w->control = w->streams = NULL;
    if (control != NULL) dispatch_close(d, control);
    if (streams != NULL) dispatch_close(d, streams);
    tell_peers_gone(d, w);
    unjoin(d, w);
    dispatch_queue_forget_worker(d, w);
    dispatch_attempt_on_worker_gone(d, w, status, why);
    d->workers[w->slot] = NULL;
    d->worker_count--;
    if (d->worker_count == 0) d->record = d->options.record;
    bt_free(w);
    announce_readiness(d, was_ready);
}

/* ---- heartbeats ------------------------------------------------------------------------------ */

/* Tokens of attempts that the worker cannot have counted when it answered the ping of `sent_us`. */
static uint64_t tokens_unseen_since(const worker *w, uint64_t sent_us) {
    uint64_t tokens = 0;
    for (const request *r = w->attempts; r != NULL; r = r->legs[LEG_PREFILL].next) {
        const bool is_unseen = !r->is_run_sent || r->run_sent_us >= sent_us;
        if (r->is_load_counted && is_unseen) tokens += r->prompt_tokens;
    }
    return tokens;
}

void dispatch_registry_on_pong(dispatch *d, worker *w, const proto_ping *pong) {
    if (!w->is_ping_out || pong->sequence != w->ping_sequence) {
        dispatch_registry_protocol_error(d, w->control, "a pong that answers no ping");
        return;
    }
    w->is_ping_out = false;
    w->last_pong_us = d->now_us;
    w->heartbeats++;
    w->sequences_running = pong->sequences_running;
    if (!w->is_joined) return;
    w->rows_free = pong->rows_free < w->ready.rows_total ? pong->rows_free : w->ready.rows_total;
    const uint64_t known = w->pages_used + pong->pages_free;
    w->pages_foreign = known < w->ready.pages_total ? w->ready.pages_total - known : 0;
    if (w->hello.role == PROTO_ROLE_PREFILL) {
        const uint64_t queued = pong->queued_tokens + tokens_unseen_since(w, w->ping_sent_us);
        const bool is_ours = queued <= w->queued_tokens;
        w->queued_tokens_left = is_ours ? queued : w->queued_tokens;
        w->queued_tokens_foreign = is_ours ? 0 : queued - w->queued_tokens;
    }
    d->is_queue_dirty = true;
}

static void send_ping(dispatch *d, worker *w) {
    proto_message message = {.kind = PROTO_PING};
    message.ping.sequence = ++w->ping_sequence;
    w->is_ping_out = true;
    w->ping_sent_us = d->now_us;
    w->next_ping_us = dispatch_after_ms(d, d->options.heartbeat_ms);
    dispatch_send(d, w->control, &message);
}

static void tick_worker(dispatch *d, worker *w) {
    char why[128];
    if (d->now_us >= w->last_pong_us + d->options.dead_after_ms * 1000ull) {
        (void)snprintf(why, sizeof why, "no heartbeat for %u ms", d->options.dead_after_ms);
        dispatch_registry_remove_worker(d, w, BT_ERR_PEER_TIMEOUT, why);
        return;
    }
    if (w->has_ready && w->streams == NULL &&
        d->now_us >= w->ready_us + HELLO_TIMEOUT_MS * 1000ull) {
        dispatch_registry_remove_worker(d, w, BT_ERR_PEER_TIMEOUT,
                                        "its streams connection did not come");
        return;
    }
    if (!w->is_ping_out && d->now_us >= w->next_ping_us) send_ping(d, w);
}

static void tick_pairs(dispatch *d) {
    for (uint32_t i = 0; i < d->joined_count[LEG_PREFILL]; i++) {
        for (uint32_t k = 0; k < d->joined_count[LEG_DECODE]; k++)
            tick_pair(d, d->joined[LEG_PREFILL][i], d->joined[LEG_DECODE][k]);
    }
}

void dispatch_registry_tick(dispatch *d) {
    for (uint32_t i = 0; i < DISPATCH_LINKS_MAX; i++) {
        connection *c = &d->connections[i];
        if (c->id == 0 || c->lane != 0) continue;
        if (d->now_us < c->opened_us + HELLO_TIMEOUT_MS * 1000ull) continue;
        dispatch_registry_protocol_error(d, c, "no hello came in time");
    }
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++) {
        if (d->workers[i] != NULL) tick_worker(d, d->workers[i]);
    }
    tick_pairs(d);
}
