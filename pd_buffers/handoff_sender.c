/* Prefill's end of the handoff.
 *
 *   FREE -> SENDING -> (acked, and no send in flight) FREE
 *             |  failed or aborted
 *             v
 *           DRAINING -> (no send in flight) FREE
 *
 * Pages that were computed wait in the attempt's record until the mover has room: few chunks per
 * peer are in flight, the rest is queued, oldest attempt first. The row is sealed and sent when the
 * last chunk was cut, because it proves the checksums of all of them. Failures found inside the
 * user's calls are kept and told from tick or the mover's progress. */
#include "pd_buffers/handoff.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/id_map.h"
#include "base/mem.h"
#include "pd_buffers/handoff_peers.h"
#include "pd_buffers/handoff_wire.h"

/* In the low half of a token, where a chunk has its index. */
static const uint32_t row_token = UINT32_MAX;

typedef enum outgoing_state {
    OUTGOING_FREE,
    OUTGOING_SENDING,
    OUTGOING_DRAINING,
} outgoing_state;

/* The row of one sample in its staging slot. */
typedef struct outgoing_row {
    row_slot slot; /* decode's */
    row_slot staging;
    size_t bytes; /* 0: not there yet */
} outgoing_row;

typedef struct outgoing {
    outgoing_state state;
    bool is_failure_untold;
    bool is_stuck_reported;
    bool is_acked;
    bt_status failure;
    char failure_text[PROTO_TEXT_MAX];
    handoff_target target; /* .slots are in rows */
    outgoing_row *rows;    /* [target.sample_count] */
    uint32_t sample_capacity;
    uint32_t rows_known, rows_sent;
    uint32_t *pages;     /* ids [pages_known of page_count] */
    uint32_t *checksums; /* [chunk_count of page_count * units] */
    uint32_t page_count, page_capacity;
    uint32_t pages_known;
    uint32_t next_page, next_layer; /* what the next chunk starts with */
    uint32_t chunk_count;           /* cut so far */
    uint32_t in_flight;             /* chunks and row */
} outgoing;

struct handoff_sender {
    handoff_sender_options options;
    handoff_geometry geometry;
    handoff_peers peers;
    outgoing *records;    /* [attempts_max] */
    bt_id_map by_attempt; /* the records that are not FREE */
    uint32_t *order;      /* [active] indices of records, oldest first */
    uint32_t active;
    handoff_sender_counts counts;
    xfer_iov iov[XFER_IOV_MAX]; /* of the chunk being sent */
};

static outgoing *find(handoff_sender *sender, proto_attempt attempt) {
    return bt_id_map_get(&sender->by_attempt, proto_attempt_id(attempt));
}

/* ---- ends of an attempt ---------------------------------------------------------------------- */

static void release_record(handoff_sender *sender, outgoing *out) {
    const uint32_t index = (uint32_t)(out - sender->records);
    uint32_t at = 0;
    BT_ASSERT(out->in_flight == 0);
    while (sender->order[at] != index)
        at++;
    memmove(&sender->order[at], &sender->order[at + 1],
            sizeof *sender->order * (sender->active - at - 1));
    sender->active--;
    bt_id_map_remove(&sender->by_attempt, proto_attempt_id(out->target.attempt));
    for (uint32_t i = 0; i < out->target.sample_count; i++)
        row_pool_release(sender->options.rows, out->rows[i].staging);
    out->state = OUTGOING_FREE;
}

/* Ends a record that has nothing in flight any more, with the event that it is owed. */
static void finish_if_quiet(handoff_sender *sender, outgoing *out) {
    const handoff_sender_events *events = &sender->options.events;
    const proto_attempt attempt = out->target.attempt;
    if (out->in_flight > 0 || out->is_failure_untold) return;
    if (out->state == OUTGOING_DRAINING) {
        release_record(sender, out);
        events->on_quiet(events->context, attempt);
    } else if (out->state == OUTGOING_SENDING && out->is_acked) {
        sender->counts.acked++;
        release_record(sender, out);
        events->on_acked(events->context, attempt);
    }
}

/* Notes the failure; tell_failures calls the user. */
static void fail(outgoing *out, bt_status status, const char *text) {
    if (out->state != OUTGOING_SENDING || out->is_acked) return;
    out->state = OUTGOING_DRAINING;
    out->is_failure_untold = true;
    out->failure = status;
    (void)snprintf(out->failure_text, sizeof out->failure_text, "%s (decode worker %" PRIu32 ")",
                   text, out->target.peer.worker_id);
}

/* By record, not by order: the events may begin and end attempts. */
static void tell_failures(handoff_sender *sender) {
    const handoff_sender_events *events = &sender->options.events;
    for (uint32_t i = 0; i < sender->options.attempts_max; i++) {
        outgoing *out = &sender->records[i];
        if (out->state != OUTGOING_DRAINING || !out->is_failure_untold) continue;
        out->is_failure_untold = false;
        sender->counts.failed++;
        events->on_failed(events->context, out->target.attempt, out->failure, out->failure_text);
        finish_if_quiet(sender, out);
    }
}

/* ---- sending --------------------------------------------------------------------------------- */

static uint32_t in_flight_to(const handoff_sender *sender, xfer_peer peer) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < sender->active; i++) {
        const outgoing *out = &sender->records[sender->order[i]];
        if (handoff_peer_equal(out->target.peer, peer)) sum += out->in_flight;
    }
    return sum;
}

static bt_status post(handoff_sender *sender, outgoing *out, const handoff_header *header,
                      uint32_t iov_count, uint32_t index) {
    xfer *mover = sender->options.mover;
    uint8_t bytes[HANDOFF_HEADER_BYTES];
    const uint64_t token = (uint64_t)(out - sender->records) << 32 | index;
    handoff_header_encode(header, bytes);
    const bt_status status = mover->ops->send(mover, out->target.peer, bytes, sizeof bytes,
                                              sender->iov, iov_count, token);
    if (status == BT_OK) out->in_flight++;
    return status;
}

static bool has_chunk(const outgoing *out) {
    return out->next_page < out->pages_known;
}

static bt_status send_chunk(handoff_sender *sender, outgoing *out) {
    const handoff_geometry *geometry = &sender->geometry;
    const handoff_span span =
        handoff_next_span(geometry, out->next_page, out->next_layer, out->pages_known);
    const uint32_t crc = handoff_span_checksum(geometry, &span, out->pages,
                                               sender->options.checksum, out->target.attempt);
    const handoff_header header = {
        .kind = HANDOFF_CHUNK,
        .attempt = out->target.attempt,
        .slot = out->rows[0].slot,
        .payload_bytes = handoff_span_bytes(geometry, &span),
        .chunk_index = out->chunk_count,
        .span = span,
        .payload_crc = crc,
    };
    const uint32_t parts = handoff_span_iov(geometry, &span, out->pages, sender->iov);
    const bt_status status = post(sender, out, &header, parts, out->chunk_count);
    if (status != BT_OK) return status;
    sender->counts.chunks++;
    sender->counts.bytes += header.payload_bytes;
    out->checksums[out->chunk_count++] = crc;
    out->next_layer += span.layer_count;
    if (out->next_layer < geometry->layers) return BT_OK;
    out->next_layer = 0;
    out->next_page += span.page_count;
    return BT_OK;
}

/* All of them leave together: each proves all chunks, and decode waits for all anyway. */
static bool has_sealable_row(const outgoing *out) {
    return out->rows_known == out->target.sample_count &&
           out->rows_sent < out->target.sample_count && out->next_page == out->page_count;
}

static bt_status send_row(handoff_sender *sender, outgoing *out) {
    const outgoing_row *row = &out->rows[out->rows_sent];
    void *slot = row_pool_get(sender->options.rows, row->staging);
    BT_ASSERT(slot != NULL);
    row_seal(slot, out->checksums, out->chunk_count);
    const handoff_header header = {
        .kind = HANDOFF_ROW,
        .attempt = out->target.attempt,
        .slot = row->slot,
        .payload_bytes = row->bytes,
    };
    sender->iov[0] = (xfer_iov){.base = slot, .bytes = row->bytes};
    const bt_status status = post(sender, out, &header, 1, row_token);
    if (status == BT_OK) out->rows_sent++;
    return status;
}

/* Gives the mover what it has room for. REQUEST_FULL: it has none. */
static bt_status send_some(handoff_sender *sender, outgoing *out) {
    while (has_chunk(out)) {
        if (in_flight_to(sender, out->target.peer) >= sender->options.sends_in_flight) return BT_OK;
        const bt_status status = send_chunk(sender, out);
        if (status != BT_OK) return status;
    }
    while (has_sealable_row(out)) {
        const bt_status status = send_row(sender, out);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

static void pump(handoff_sender *sender) {
    for (uint32_t i = 0; i < sender->active; i++) {
        outgoing *out = &sender->records[sender->order[i]];
        if (out->state != OUTGOING_SENDING || out->is_acked) continue;
        const bt_status status = send_some(sender, out);
        if (status == BT_ERR_REQUEST_FULL) return;
        if (status != BT_OK) fail(out, status, "the mover refused a send");
    }
}

/* After anything that made room or failed. */
static void go_on(handoff_sender *sender) {
    handoff_peers_send(&sender->peers, sender->options.mover);
    pump(sender);
    tell_failures(sender);
}

/* ---- the mover's events ---------------------------------------------------------------------- */

static void on_sent(void *context, uint64_t token, bt_status status) {
    handoff_sender *sender = context;
    if (token != HANDOFF_TOKEN_NONE) {
        const uint64_t record = token >> 32;
        BT_ASSERT(record < sender->options.attempts_max);
        outgoing *out = &sender->records[record];
        BT_ASSERT(out->in_flight > 0);
        out->in_flight--;
        if (status != BT_OK) fail(out, status, "a send failed");
        finish_if_quiet(sender, out);
    }
    go_on(sender);
}

static void on_ack(handoff_sender *sender, xfer_peer from, const handoff_header *header) {
    outgoing *out = find(sender, header->attempt);
    if (out == NULL || out->state != OUTGOING_SENDING || out->is_acked ||
        !handoff_peer_equal(out->target.peer, from) ||
        header->slot.index != out->rows[0].slot.index ||
        header->slot.generation != out->rows[0].slot.generation) {
        sender->counts.dropped_late++;
        return;
    }
    if (header->status != BT_OK) {
        char text[128];
        (void)snprintf(text, sizeof text, "decode refused the handoff: %s",
                       bt_status_string(header->status));
        const bool is_known = bt_status_scope(header->status) != BT_SCOPE_NONE;
        fail(out, is_known ? header->status : BT_ERR_PEER_PROTOCOL, text);
    } else if (out->rows_sent < out->target.sample_count) {
        fail(out, BT_ERR_PEER_PROTOCOL, "decode acked before the row was sent");
    } else {
        out->is_acked = true;
    }
    finish_if_quiet(sender, out);
}

static void fail_peer(handoff_sender *sender, xfer_peer id, bt_status status, const char *why) {
    handoff_peer *peer = handoff_peers_find(&sender->peers, id);
    if (peer == NULL || peer->is_failed) return;
    peer->is_failed = true;
    for (uint32_t i = 0; i < sender->active; i++) {
        outgoing *out = &sender->records[sender->order[i]];
        if (handoff_peer_equal(out->target.peer, id)) fail(out, status, why);
    }
    tell_failures(sender);
    const handoff_peer_events *events = &sender->options.peer_events;
    if (events->on_peer_failed != NULL) events->on_peer_failed(events->context, id, status);
}

static xfer_decision on_message(void *context, xfer_peer from, const void *header_bytes,
                                size_t header_count, size_t payload_bytes, xfer_receive *receive) {
    handoff_sender *sender = context;
    const handoff_peer_events *events = &sender->options.peer_events;
    handoff_header header;
    (void)receive;
    const bool is_read =
        payload_bytes == 0 && handoff_header_decode(header_bytes, header_count, &header) == BT_OK;
    if (is_read && header.kind == HANDOFF_HELLO) {
        if (handoff_peers_on_hello(&sender->peers, from, header.has_heard))
            events->on_hello(events->context, from);
    } else if (is_read && header.kind == HANDOFF_ACK) {
        on_ack(sender, from, &header);
    } else {
        sender->counts.protocol_errors++;
        fail_peer(sender, from, BT_ERR_PEER_PROTOCOL, "a message that decode does not send");
    }
    go_on(sender);
    return XFER_DROP;
}

static void on_received(void *context, uint64_t token, bt_status status) {
    (void)context;
    (void)token;
    (void)status;
    BT_ASSERT(false && "prefill receives no payload");
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    fail_peer(context, peer, status, "the endpoint broke");
}

static void on_peer_closed(void *context, xfer_peer id) {
    handoff_sender *sender = context;
    const handoff_peer_events *events = &sender->options.peer_events;
    handoff_peer *peer = handoff_peers_find(&sender->peers, id);
    if (peer != NULL) peer->is_failed = true; /* an event below must not begin anything with it */
    for (uint32_t i = 0; i < sender->options.attempts_max; i++) {
        outgoing *out = &sender->records[i];
        if (out->state == OUTGOING_FREE || !handoff_peer_equal(out->target.peer, id)) continue;
        BT_ASSERT(out->in_flight == 0);
        fail(out, BT_ERR_PEER_GONE, "the endpoint was closed");
    }
    tell_failures(sender);
    handoff_peers_remove(&sender->peers, id);
    if (events->on_peer_closed != NULL) events->on_peer_closed(events->context, id);
}

/* ---- the user's calls ------------------------------------------------------------------------ */

bt_status handoff_sender_create(const handoff_sender_options *options, handoff_sender **out) {
    if (options->attempts_max == 0) return BT_ERR_CALLER_ARGUMENT;
    handoff_sender *sender = bt_calloc(1, sizeof *sender);
    if (sender == NULL) return BT_ERR_WORKER_MEMORY;
    sender->options = *options;
    if (options->chunk_grace_us == 0) sender->options.chunk_grace_us = HANDOFF_CHUNK_GRACE_US;
    if (options->sends_in_flight == 0) sender->options.sends_in_flight = HANDOFF_SENDS_IN_FLIGHT;
    bt_status status = handoff_geometry_init(options->pages, options->page_tokens,
                                             options->chunk_bytes_max, &sender->geometry);
    sender->records = bt_calloc(options->attempts_max, sizeof *sender->records);
    sender->order = bt_calloc(options->attempts_max, sizeof *sender->order);
    if (status == BT_OK && (sender->records == NULL || sender->order == NULL))
        status = BT_ERR_WORKER_MEMORY;
    if (status == BT_OK) status = bt_id_map_init(&sender->by_attempt, options->attempts_max);
    if (status != BT_OK) {
        handoff_sender_destroy(sender);
        return status;
    }
    options->mover->handler = (xfer_handler){
        .on_message = on_message,
        .on_received = on_received,
        .on_sent = on_sent,
        .on_peer_failed = on_peer_failed,
        .on_peer_closed = on_peer_closed,
        .context = sender,
    };
    *out = sender;
    return BT_OK;
}

void handoff_sender_destroy(handoff_sender *sender) {
    if (sender == NULL) return;
    for (uint32_t i = 0; sender->records != NULL && i < sender->options.attempts_max; i++) {
        bt_free(sender->records[i].pages);
        bt_free(sender->records[i].checksums);
        bt_free(sender->records[i].rows);
    }
    handoff_peers_fini(&sender->peers);
    bt_id_map_fini(&sender->by_attempt);
    bt_free(sender->order);
    bt_free(sender->records);
    bt_free(sender);
}

/* The arrays of a record grow to the largest prompt it has seen and are kept. */
static bool reserve(outgoing *out, uint32_t page_count, uint32_t units_per_page) {
    if (page_count <= out->page_capacity) return true;
    uint32_t *pages = bt_realloc(out->pages, sizeof *pages * page_count);
    if (pages == NULL) return false;
    out->pages = pages;
    uint32_t *checksums =
        bt_realloc(out->checksums, sizeof *checksums * page_count * units_per_page);
    if (checksums == NULL) return false;
    out->checksums = checksums;
    out->page_capacity = page_count;
    return true;
}

/* Slots of both sides for every sample, or none. */
static bt_status take_slots(handoff_sender *sender, outgoing *out, const handoff_target *target) {
    const uint32_t count = target->sample_count;
    if (count > out->sample_capacity) {
        outgoing_row *rows = bt_realloc(out->rows, sizeof *rows * count);
        if (rows == NULL) return BT_ERR_WORKER_MEMORY;
        out->rows = rows;
        out->sample_capacity = count;
    }
    for (uint32_t i = 0; i < count; i++) {
        out->rows[i] = (outgoing_row){.slot = target->slots[i]};
        const bt_status status = row_pool_acquire(sender->options.rows, &out->rows[i].staging);
        if (status == BT_OK) continue;
        while (i > 0)
            row_pool_release(sender->options.rows, out->rows[--i].staging);
        return status;
    }
    return BT_OK;
}

bt_status handoff_sender_begin(handoff_sender *sender, const handoff_target *target) {
    const handoff_peer *peer = handoff_peers_find(&sender->peers, target->peer);
    const uint32_t page_count = handoff_pages_for(&sender->geometry, target->prompt_tokens);
    if (page_count == 0 || page_count > kv_pool_count(sender->options.pages).total)
        return BT_ERR_CALLER_ARGUMENT;
    if (target->sample_count == 0 || target->sample_count > PROTO_SAMPLES_MAX)
        return BT_ERR_CALLER_ARGUMENT;
    if (peer == NULL || peer->is_failed) return BT_ERR_PEER_GONE;
    if (find(sender, target->attempt) != NULL) return BT_ERR_REQUEST_DUPLICATE;
    if (sender->active == sender->options.attempts_max) return BT_ERR_REQUEST_FULL;
    outgoing *out = sender->records;
    while (out->state != OUTGOING_FREE)
        out++;
    if (!reserve(out, page_count, sender->geometry.units_per_page)) return BT_ERR_WORKER_MEMORY;
    const bt_status status = take_slots(sender, out, target);
    if (status != BT_OK) return status;
    *out = (outgoing){
        .state = OUTGOING_SENDING,
        .target = *target,
        .rows = out->rows,
        .sample_capacity = out->sample_capacity,
        .pages = out->pages,
        .checksums = out->checksums,
        .page_count = page_count,
        .page_capacity = out->page_capacity,
    };
    out->target.slots = NULL;
    sender->order[sender->active++] = (uint32_t)(out - sender->records);
    bt_id_map_put(&sender->by_attempt, proto_attempt_id(target->attempt), out);
    return BT_OK;
}

bt_status handoff_sender_pages(handoff_sender *sender, proto_attempt attempt, uint32_t first,
                               uint32_t count, const uint32_t *pages, bool is_last) {
    outgoing *out = find(sender, attempt);
    if (out == NULL || out->state != OUTGOING_SENDING) return BT_ERR_REQUEST_UNKNOWN;
    if (first != out->pages_known || count == 0 || count > out->page_count - first)
        return BT_ERR_CALLER_ARGUMENT;
    if (is_last != (first + count == out->page_count)) return BT_ERR_CALLER_ARGUMENT;
    for (uint32_t i = 0; i < count; i++)
        BT_ASSERT(kv_pool_state(sender->options.pages, pages[i]) != KV_PAGE_FREE);
    memcpy(out->pages + first, pages, sizeof *pages * count);
    out->pages_known += count;
    pump(sender);
    return BT_OK;
}

bt_status handoff_sender_row(handoff_sender *sender, proto_attempt attempt,
                             const metadata_row *row) {
    outgoing *out = find(sender, attempt);
    if (out == NULL || out->state != OUTGOING_SENDING) return BT_ERR_REQUEST_UNKNOWN;
    if (row->sample_index >= out->target.sample_count) return BT_ERR_CALLER_ARGUMENT;
    outgoing_row *own = &out->rows[row->sample_index];
    if (own->bytes != 0) return BT_ERR_CALLER_ARGUMENT;
    if (row->status != 0 && out->target.sample_count == 1) return BT_ERR_CALLER_ARGUMENT;
    if (row->support_count > row_pool_cap(sender->options.rows)) return BT_ERR_CALLER_LIMIT;
    metadata_row whole = *row;
    whole.attempt = attempt;
    whole.slot = own->slot.index;
    whole.slot_generation = own->slot.generation;
    whole.writer_incarnation = sender->options.incarnation;
    whole.chunk_count = 0; /* sealed when the last chunk is cut */
    whole.page_count = out->page_count;
    whole.kv_bytes = (uint64_t)out->page_count * sender->geometry.page_bytes;
    whole.prompt_tokens = out->target.prompt_tokens;
    void *slot = row_pool_get(sender->options.rows, own->staging);
    BT_ASSERT(slot != NULL);
    const bt_status status =
        row_encode(&whole, NULL, slot, row_pool_slot_bytes(sender->options.rows), &own->bytes);
    if (status != BT_OK) return status;
    out->rows_known++;
    pump(sender);
    return BT_OK;
}

void handoff_sender_abort(handoff_sender *sender, proto_attempt attempt) {
    outgoing *out = find(sender, attempt);
    if (out == NULL || out->state != OUTGOING_SENDING) return;
    out->state = OUTGOING_DRAINING;
    sender->counts.aborted++;
    finish_if_quiet(sender, out);
}

bt_status handoff_sender_hello(handoff_sender *sender, xfer_peer peer) {
    return handoff_peers_open(&sender->peers, sender->options.mover, peer);
}

void handoff_sender_tick(handoff_sender *sender) {
    const handoff_peer_events *events = &sender->options.peer_events;
    const uint64_t now = bt_clock_now_us(&sender->options.clock);
    for (uint32_t i = 0; i < sender->options.attempts_max; i++) {
        outgoing *out = &sender->records[i];
        if (out->state == OUTGOING_FREE || now < out->target.deadline_us) continue;
        fail(out, BT_ERR_REQUEST_DEADLINE,
             out->rows_sent > 0 ? "waited past the deadline for the ack"
                                : "waited past the deadline for sends to end");
        if (out->in_flight == 0 || out->is_stuck_reported) continue;
        if (now - out->target.deadline_us < sender->options.chunk_grace_us) continue;
        out->is_stuck_reported = true;
        sender->counts.stuck++;
        events->on_stuck(events->context, out->target.peer);
    }
    go_on(sender);
}

uint32_t handoff_sender_active_count(const handoff_sender *sender) {
    return sender->active;
}

handoff_sender_counts handoff_sender_get_counts(const handoff_sender *sender) {
    return sender->counts;
}
