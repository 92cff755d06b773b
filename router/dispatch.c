/* The object, its entry points and its views. Each entry point notes the time, lets the file that
 * owns the noun act, and then gives waiting requests what became free. */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/row.h"
#include "proto/row_stream.h"
#include "router/dispatch_internal.h"

enum { OWN_IDLE_BYTES = 1024 * 1024 }; /* kept by a pool of the dispatch's own */

/* ---- helpers of all files -------------------------------------------------------------------- */

void dispatch_send(dispatch *d, connection *to, proto_message *message) {
    if (to == NULL) {
        proto_message_drop_payload(message);
        return;
    }
    d->is_calling = true;
    d->ops.send(d->ops.context, to->id, message);
    d->is_calling = false;
}

void dispatch_close(dispatch *d, connection *which) {
    const dispatch_link id = which->id;
    bt_id_map_remove(&d->links, bt_id_of(id));
    *which = (connection){.id = 0};
    d->is_calling = true;
    d->ops.close(d->ops.context, id);
    d->is_calling = false;
}

uint64_t dispatch_random(dispatch *d, uint64_t bound) {
    d->random += 0x9E3779B97F4A7C15u;
    uint64_t z = d->random;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % bound;
}

static void enter(dispatch *d, uint64_t now_us) {
    BT_ASSERT(!d->is_calling);
    if (now_us > d->now_us) d->now_us = now_us;
}

static void leave(dispatch *d) {
    if (d->is_queue_dirty) dispatch_queue_pump(d);
}

/* ---- life ------------------------------------------------------------------------------------ */

static uint32_t or_default(uint32_t value, uint32_t standard) {
    return value == 0 ? standard : value;
}

static void set_options(dispatch *d, const dispatch_options *options) {
    dispatch_options *o = &d->options;
    *o = *options;
    o->heartbeat_ms = or_default(o->heartbeat_ms, 500);
    o->dead_after_ms = or_default(o->dead_after_ms, 3000);
    if (o->dead_after_ms <= o->heartbeat_ms) o->dead_after_ms = 2 * o->heartbeat_ms;
    o->requests_max = or_default(o->requests_max, 4096);
    if (o->requests_max > DISPATCH_REQUESTS_MAX) o->requests_max = DISPATCH_REQUESTS_MAX;
    o->request_timeout_ms = or_default(o->request_timeout_ms, 600000);
    o->reserve_timeout_ms = or_default(o->reserve_timeout_ms, 10000);
    o->handoff_timeout_ms = or_default(o->handoff_timeout_ms, 120000);
    o->no_worker_grace_ms = or_default(o->no_worker_grace_ms, 30000);
    o->attempts_max = or_default(o->attempts_max, 3);
    if (o->stream_window_bytes == 0) o->stream_window_bytes = 1024 * 1024;
    d->credit_step_bytes = PROTO_FRAME_PAYLOAD_MAX / 4;
    d->random = o->seed;
}

static bt_status allocate(dispatch *d) {
    d->pairs = bt_calloc(DISPATCH_WORKERS_MAX, sizeof *d->pairs);
    if (d->pairs == NULL) return BT_ERR_WORKER_MEMORY;
    const bt_block_pool_options own = {.idle_bytes_max = OWN_IDLE_BYTES};
    bt_status status = BT_OK;
    d->blocks = d->options.blocks;
    if (d->blocks == NULL) {
        status = bt_block_pool_create(&own, &d->own_blocks);
        d->blocks = d->own_blocks;
    }
    if (status == BT_OK) status = bt_id_map_init(&d->links, DISPATCH_LINKS_MAX);
    if (status == BT_OK) status = bt_id_map_init(&d->requests, d->options.requests_max);
    if (status == BT_OK) status = bt_id_map_init(&d->attempts, d->options.requests_max);
    return status;
}

bt_status dispatch_create(const dispatch_options *options, const dispatch_ops *ops,
                          dispatch **out) {
    if (options->incarnation == 0 || options->host[0] == '\0') return BT_ERR_CALLER_CONFIG;
    if (!record_field_is_known(&options->record, RECORD_SAMPLING_MASK_MAX_TOKENS) ||
        !record_field_is_known(&options->record, RECORD_KV_CHECKSUM)) {
        return BT_ERR_CALLER_CONFIG;
    }
    dispatch *d = bt_calloc(1, sizeof *d);
    if (d == NULL) return BT_ERR_WORKER_MEMORY;
    d->ops = *ops;
    set_options(d, options);
    d->record = options->record;
    d->next_worker_id = 1;
    d->next_attempt = 1;
    d->next_order = 1;
    if (allocate(d) != BT_OK) {
        dispatch_destroy(d);
        return BT_ERR_WORKER_MEMORY;
    }
    *out = d;
    return BT_OK;
}

void dispatch_destroy(dispatch *d) {
    if (d == NULL) return;
    while (d->all_first != NULL) {
        request *r = d->all_first;
        d->all_first = r->all_next;
        dispatch_stream_end(r);
        bt_free(r->samples);
        bt_free(r);
    }
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++)
        bt_free(d->workers[i]);
    bt_block_pool_destroy(d->own_blocks);
    bt_free(d->pairs);
    bt_id_map_fini(&d->links);
    bt_id_map_fini(&d->requests);
    bt_id_map_fini(&d->attempts);
    bt_free(d);
}

/* ---- connections ----------------------------------------------------------------------------- */

void dispatch_on_opened(dispatch *d, dispatch_link link, uint64_t now_us) {
    enter(d, now_us);
    if (bt_id_map_get(&d->links, bt_id_of(link)) == NULL) (void)dispatch_registry_open(d, link);
    leave(d);
}

static void on_first_message(dispatch *d, connection *from, const proto_message *message) {
    if (message->kind != PROTO_HELLO) {
        dispatch_registry_protocol_error(d, from, "the first frame is not a hello");
    } else if (message->hello.lane == PROTO_LANE_CONTROL) {
        dispatch_hello_on_control(d, from, &message->hello);
    } else {
        dispatch_hello_on_streams(d, from, &message->hello);
    }
}

/* What this worker may say on this connection. */
static bool is_allowed(const connection *from, proto_kind kind) {
    const bool is_control = from->lane == PROTO_LANE_CONTROL;
    const bool is_prefill = from->worker->hello.role == PROTO_ROLE_PREFILL;
    switch (kind) {
    case PROTO_READY:
    case PROTO_PONG:
    case PROTO_PAIR_READY: return is_control;
    case PROTO_PREFILL_DONE: return is_control && is_prefill;
    case PROTO_RESERVATION:
    case PROTO_CAPACITY: return is_control && !is_prefill;
    case PROTO_CHUNK: return !is_control && !is_prefill;
    case PROTO_PROMPT_LOGPROBS: return !is_control && is_prefill;
    case PROTO_HELLO:
    case PROTO_WELCOME:
    case PROTO_REFUSE:
    case PROTO_PEER:
    case PROTO_PEER_GONE:
    case PROTO_PING:
    case PROTO_RESERVE:
    case PROTO_RUN:
    case PROTO_CANCEL:
    case PROTO_ABORT:
    case PROTO_PROMPT:
    case PROTO_CREDIT: return false;
    }
    return false;
}

static void on_worker_message(dispatch *d, connection *from, const proto_message *message) {
    worker *w = from->worker;
    if (!is_allowed(from, message->kind)) {
        char text[128];
        (void)snprintf(text, sizeof text, "a %s frame does not belong here",
                       proto_kind_name(message->kind));
        dispatch_registry_protocol_error(d, from, text);
        return;
    }
    if (message->kind == PROTO_READY) {
        dispatch_registry_on_ready(d, w, &message->ready);
    } else if (message->kind == PROTO_PONG) {
        dispatch_registry_on_pong(d, w, &message->ping);
    } else if (message->kind == PROTO_PAIR_READY) {
        dispatch_registry_on_pair(d, w, &message->pair);
    } else if (message->kind == PROTO_RESERVATION) {
        dispatch_attempt_on_reservation(d, w, &message->reservation);
    } else if (message->kind == PROTO_PREFILL_DONE) {
        dispatch_attempt_on_prefill_done(d, w, &message->prefill_done);
    } else if (message->kind == PROTO_CAPACITY) {
        dispatch_queue_on_capacity(d, w);
    } else if (message->kind == PROTO_PROMPT_LOGPROBS) {
        dispatch_prompt_on_logprobs(d, w, message);
    } else {
        dispatch_stream_on_chunk(d, w, message);
    }
}

void dispatch_on_message(dispatch *d, dispatch_link link, const proto_message *message,
                         uint64_t now_us) {
    enter(d, now_us);
    connection *from = bt_id_map_get(&d->links, bt_id_of(link));
    if (from == NULL) from = dispatch_registry_open(d, link);
    if (from == NULL) return;
    if (from->lane == 0) {
        on_first_message(d, from, message);
    } else {
        on_worker_message(d, from, message);
    }
    leave(d);
}

void dispatch_on_closed(dispatch *d, dispatch_link link, uint64_t now_us) {
    enter(d, now_us);
    connection *which = bt_id_map_get(&d->links, bt_id_of(link));
    if (which != NULL) dispatch_registry_on_link_closed(d, which);
    leave(d);
}

void dispatch_tick(dispatch *d, uint64_t now_us) {
    enter(d, now_us);
    dispatch_registry_tick(d);
    dispatch_request_tick(d);
    d->is_queue_dirty = true; /* waits that end by time alone: back-offs, full decodes */
    leave(d);
}

/* ---- requests -------------------------------------------------------------------------------- */

bt_status dispatch_submit(dispatch *d, const dispatch_request *from, uint64_t now_us,
                          bt_error *error) {
    enter(d, now_us);
    const bt_status status = dispatch_request_submit(d, from, error);
    leave(d);
    return status;
}

void dispatch_cancel(dispatch *d, uint64_t id, uint64_t now_us) {
    enter(d, now_us);
    request *r = bt_id_map_get(&d->requests, bt_id_of(id));
    if (r != NULL) {
        dispatch_request_end_with(d, r, BT_ERR_REQUEST_CANCELLED, "the request was cancelled");
    }
    leave(d);
}

void dispatch_cancel_sample(dispatch *d, uint64_t id, uint32_t sample, uint64_t now_us) {
    enter(d, now_us);
    request *r = bt_id_map_get(&d->requests, bt_id_of(id));
    if (r != NULL) dispatch_sample_cancel(d, r, sample);
    leave(d);
}

void dispatch_abort(dispatch *d, uint64_t id, uint32_t sample, uint64_t now_us) {
    enter(d, now_us);
    request *r = bt_id_map_get(&d->requests, bt_id_of(id));
    if (r != NULL) dispatch_abort_samples(d, r, sample);
    leave(d);
}

void dispatch_grant(dispatch *d, uint64_t id, uint32_t sample, uint64_t bytes, uint64_t now_us) {
    enter(d, now_us);
    request *r = bt_id_map_get(&d->requests, bt_id_of(id));
    if (r != NULL) dispatch_stream_grant(d, r, sample, bytes);
    leave(d);
}

/* ---- views ----------------------------------------------------------------------------------- */

/* The last token's KV is never written. */
static uint64_t find_sequence_tokens_max(const dispatch *d) {
    uint64_t most = 0;
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++) {
        const worker *w = d->workers[i];
        if (w == NULL || !w->is_joined || w->hello.role != PROTO_ROLE_DECODE) continue;
        const uint64_t tokens = (uint64_t)w->ready.pages_total * w->ready.page_tokens + 1;
        if (tokens > most) most = tokens;
    }
    return most;
}

void dispatch_look(const dispatch *d, dispatch_view *out) {
    *out = (dispatch_view){
        .is_ready = d->ready_pairs > 0,
        .record = d->record,
        .requests_queued = d->queued_count,
        .requests_running = d->request_count - d->queued_count,
        .requests_total = d->requests_total,
        .retries_total = d->retries_total,
        .refused_total = d->refused_total,
        .late_total = d->late_total,
        .protocol_errors_total = d->protocol_errors_total,
        .worker_count = d->worker_count,
        .sequence_tokens_max = find_sequence_tokens_max(d),
    };
    const worker *founder = dispatch_hello_founder(d);
    if (founder == NULL) return;
    const proto_hello *hello = &founder->hello;
    memcpy(out->model_name, hello->model_name, sizeof out->model_name);
    out->vocab_size = hello->vocab_size;
    out->context_tokens = hello->context_tokens;
    out->eos_count = hello->eos_count;
    memcpy(out->eos_ids, hello->eos_ids, sizeof out->eos_ids);
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++) {
        const worker *w = d->workers[i];
        if (w == NULL || w->hello.context_tokens >= out->context_tokens) continue;
        out->context_tokens = w->hello.context_tokens;
    }
}

static uint32_t saturate(uint64_t value) {
    return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static void look_at(const worker *w, dispatch_worker_view *out) {
    const uint64_t used = w->pages_used + w->pages_foreign;
    *out = (dispatch_worker_view){
        .worker_id = w->id,
        .role = w->hello.role,
        .incarnation = w->hello.incarnation,
        .pid = w->hello.pid,
        .is_ready = w->is_joined,
        .attempts = w->attempt_count,
        .queued_tokens = saturate(w->queued_tokens_left + w->queued_tokens_foreign),
        .pages_total = w->ready.pages_total,
        .pages_free = used < w->ready.pages_total ? w->ready.pages_total - (uint32_t)used : 0,
        .rows_total = w->ready.rows_total,
        .rows_free = w->rows_free,
        .sequences_running = w->sequences_running,
        .heartbeats = w->heartbeats,
    };
    memcpy(out->host, w->hello.host, sizeof out->host);
}

uint32_t dispatch_look_workers(const dispatch *d, dispatch_worker_view *views, uint32_t max) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++) {
        if (d->workers[i] == NULL) continue;
        if (count < max) look_at(d->workers[i], &views[count]);
        count++;
    }
    return count;
}
