/* Decode's end of the handoff.
 *
 *   FREE -> RECEIVING -> (proven) ACKING -> FREE      ACKING: only the ack is left to send
 *             |  failed or cancelled
 *             v
 *           DRAINING -> (no receive is posted) FREE
 *
 * A record is reused only when no receive of it is posted, so that the token of a completion
 * (record and chunk index) always means what it did when it was posted. The user's events are
 * called last, when the record is consistent, because they may call back. */
#include "pd_buffers/handoff_receiver_internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/fault.h"
#include "base/mem.h"

/* In the low half of a token, where a chunk has its index: the row of sample i is at first + i. */
static const uint32_t row_token_first = UINT32_MAX - PROTO_SAMPLES_MAX;

static xfer *mover_of(handoff_receiver *receiver) {
    return receiver->options.mover;
}

static incoming *find(handoff_receiver *receiver, proto_attempt attempt) {
    return bt_id_map_get(&receiver->by_attempt, proto_attempt_id(attempt));
}

static void release_record(handoff_receiver *receiver, incoming *in) {
    BT_ASSERT(in->posted == 0);
    in->state = INCOMING_FREE;
    receiver->active--;
    bt_id_map_remove(&receiver->by_attempt, proto_attempt_id(in->offer.attempt));
}

static bt_status send_ack(handoff_receiver *receiver, xfer_peer to, proto_attempt attempt,
                          row_slot slot, bt_status status) {
    const handoff_header ack = {
        .kind = HANDOFF_ACK, .attempt = attempt, .slot = slot, .status = status};
    uint8_t bytes[HANDOFF_HEADER_BYTES];
    handoff_header_encode(&ack, bytes);
    xfer *mover = mover_of(receiver);
    return mover->ops->send(mover, to, bytes, sizeof bytes, NULL, 0, HANDOFF_TOKEN_NONE);
}

/* A refusal only saves the sender its deadline, so it may be lost. */
static void refuse(handoff_receiver *receiver, xfer_peer to, proto_attempt attempt, row_slot slot,
                   bt_status status) {
    if (send_ack(receiver, to, attempt, slot, status) != BT_OK) return;
}

/* ---- ends of an attempt ---------------------------------------------------------------------- */

static void release_if_quiet(handoff_receiver *receiver, incoming *in) {
    if (in->state != INCOMING_DRAINING || in->posted > 0) return;
    const proto_attempt attempt = in->offer.attempt;
    release_record(receiver, in);
    receiver->options.events.on_quiet(receiver->options.events.context, attempt);
}

void handoff_incoming_fail(handoff_receiver *receiver, incoming *in, bt_status status,
                           const char *format, ...) {
    char text[PROTO_TEXT_MAX];
    va_list args;
    BT_ASSERT(in->state == INCOMING_RECEIVING);
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    in->state = INCOMING_DRAINING;
    receiver->counts.failed++;
    const proto_attempt attempt = in->offer.attempt;
    if (bt_status_scope(status) != BT_SCOPE_PEER)
        refuse(receiver, in->offer.peer, attempt, in->rows[0].slot, status);
    receiver->options.events.on_failed(receiver->options.events.context, attempt, status, text);
    release_if_quiet(receiver, in);
}

void handoff_incoming_ack(handoff_receiver *receiver, incoming *in) {
    if (in->is_telling) return;
    const bt_status status =
        send_ack(receiver, in->offer.peer, in->offer.attempt, in->rows[0].slot, BT_OK);
    if (status == BT_ERR_REQUEST_FULL) return;
    release_record(receiver, in); /* when the peer is gone nobody waits for the ack any more */
}

static void on_received(void *context, uint64_t token, bt_status status) {
    handoff_receiver *receiver = context;
    const uint32_t index = (uint32_t)token;
    const uint64_t record = token >> 32;
    BT_ASSERT(record < receiver->options.attempts_max);
    incoming *in = &receiver->records[record];
    BT_ASSERT(in->posted > 0);
    in->posted--;
    const bool is_row = index >= row_token_first;
    const uint32_t sample = index - row_token_first;
    if (is_row)
        in->rows[sample].state = RECEIVE_DONE;
    else
        in->chunks[index].state = RECEIVE_DONE;
    if (in->state == INCOMING_DRAINING) {
        release_if_quiet(receiver, in);
        return;
    }
    BT_ASSERT(in->state == INCOMING_RECEIVING);
    if (status != BT_OK) {
        handoff_incoming_fail(receiver, in, status,
                              "a receive from prefill worker %" PRIu32 " failed: %s",
                              in->offer.peer.worker_id, bt_status_string(status));
    } else if (is_row) {
        handoff_incoming_row(receiver, in, sample);
    } else {
        handoff_incoming_chunk(receiver, in, index);
    }
}

/* ---- arrival --------------------------------------------------------------------------------- */

static uint64_t make_token(const handoff_receiver *receiver, const incoming *in, uint32_t index) {
    return (uint64_t)(in - receiver->records) << 32 | index;
}

static bool is_overlapping(const incoming *in, uint32_t first_unit, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (in->is_covered[first_unit + i]) return true;
    return false;
}

/* What is wrong with the header of a chunk, or NULL. */
static const char *chunk_contradiction(const handoff_receiver *receiver, const incoming *in,
                                       const handoff_header *header, size_t payload_bytes) {
    const handoff_geometry *geometry = &receiver->geometry;
    uint32_t first = 0;
    if (header->chunk_index >= in->unit_count) return "its index is out of range";
    if (in->announced != 0 && header->chunk_index >= in->announced)
        return "the row announces fewer chunks";
    if (!handoff_span_is_valid(geometry, &header->span, in->offer.page_count))
        return "its pages or layers are out of range";
    if (handoff_span_bytes(geometry, &header->span) != header->payload_bytes)
        return "its size does not fit its pages";
    if (payload_bytes != header->payload_bytes) return "it brings another size than it says";
    const uint32_t count = handoff_span_units(geometry, &header->span, &first);
    if (is_overlapping(in, first, count)) return "its pages overlap those of another chunk";
    return NULL;
}

static xfer_decision take_chunk(handoff_receiver *receiver, incoming *in,
                                const handoff_header *header, size_t payload_bytes,
                                xfer_receive *receive) {
    const uint32_t index = header->chunk_index;
    if (index < in->unit_count && in->chunks[index].state != RECEIVE_NONE) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_DUPLICATE,
                              "chunk %" PRIu32 " came twice", index);
        return XFER_DROP;
    }
    const char *wrong = chunk_contradiction(receiver, in, header, payload_bytes);
    if (wrong != NULL) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                              "chunk %" PRIu32 " (pages %" PRIu32 "+%" PRIu32 ", layers %" PRIu32
                              "+%" PRIu32 "): %s",
                              index, header->span.first_page, header->span.page_count,
                              header->span.first_layer, header->span.layer_count, wrong);
        return XFER_DROP;
    }
    uint32_t first = 0;
    const uint32_t count = handoff_span_units(&receiver->geometry, &header->span, &first);
    for (uint32_t i = 0; i < count; i++)
        in->is_covered[first + i] = true;
    in->units_covered += count;
    in->chunks[index] =
        (incoming_chunk){.state = RECEIVE_POSTED, .crc = header->payload_crc, .span = header->span};
    in->chunks_posted++;
    if (index >= in->chunk_index_end) in->chunk_index_end = index + 1;
    in->posted++;
    *receive = (xfer_receive){
        .iov = receiver->iov,
        .iov_count = handoff_span_iov(&receiver->geometry, &header->span, in->pages, receiver->iov),
        .token = make_token(receiver, in, index),
    };
    return XFER_ACCEPT;
}

/* The sample whose slot it is; sample_count: none's. */
static uint32_t find_sample(const incoming *in, row_slot slot) {
    uint32_t sample = 0;
    for (; sample < in->offer.sample_count; sample++) {
        const row_slot own = in->rows[sample].slot;
        if (own.index != slot.index) continue;
        if (own.generation == slot.generation || bt_mutant(BT_MUTANT_IGNORE_GENERATION)) break;
    }
    return sample;
}

static xfer_decision take_row(handoff_receiver *receiver, incoming *in,
                              const handoff_header *header, size_t payload_bytes,
                              xfer_receive *receive) {
    const uint32_t sample = find_sample(in, header->slot);
    incoming_row *row = &in->rows[sample];
    if (row->state != RECEIVE_NONE) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_DUPLICATE,
                              "the metadata row of sample %" PRIu32 " came twice", sample);
        return XFER_DROP;
    }
    const size_t slot_bytes = row_pool_slot_bytes(receiver->options.rows);
    if (payload_bytes != header->payload_bytes || payload_bytes < ROW_HEADER_BYTES ||
        payload_bytes > slot_bytes) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                              "a metadata row of %zu bytes (said %" PRIu64 ") for a slot of %zu",
                              payload_bytes, header->payload_bytes, slot_bytes);
        return XFER_DROP;
    }
    void *slot = row_pool_get(receiver->options.rows, row->slot);
    BT_ASSERT(slot != NULL);
    row->state = RECEIVE_POSTED;
    row->bytes = payload_bytes;
    in->posted++;
    receiver->iov[0] = (xfer_iov){.base = slot, .bytes = payload_bytes};
    *receive = (xfer_receive){
        .iov = receiver->iov,
        .iov_count = 1,
        .token = make_token(receiver, in, row_token_first + sample),
    };
    return XFER_ACCEPT;
}

static bool is_stale(const incoming *in, xfer_peer from, const handoff_header *header) {
    if (!handoff_peer_equal(in->offer.peer, from)) return true;
    const uint32_t sample = find_sample(in, header->slot);
    return header->kind == HANDOFF_ROW ? sample == in->offer.sample_count : sample != 0;
}

static xfer_decision take_part(handoff_receiver *receiver, xfer_peer from,
                               const handoff_header *header, size_t payload_bytes,
                               xfer_receive *receive) {
    incoming *in = find(receiver, header->attempt);
    if (in == NULL) {
        receiver->counts.dropped_unknown++;
        refuse(receiver, from, header->attempt, header->slot, BT_ERR_REQUEST_UNKNOWN);
        return XFER_DROP;
    }
    if (is_stale(in, from, header)) {
        receiver->counts.dropped_stale++;
        refuse(receiver, from, header->attempt, header->slot, BT_ERR_REQUEST_STALE);
        return XFER_DROP;
    }
    if (in->state != INCOMING_RECEIVING) {
        receiver->counts.dropped_late++;
        return XFER_DROP;
    }
    if (header->kind == HANDOFF_CHUNK)
        return take_chunk(receiver, in, header, payload_bytes, receive);
    return take_row(receiver, in, header, payload_bytes, receive);
}

/* ---- peers ----------------------------------------------------------------------------------- */

static void fail_peer(handoff_receiver *receiver, xfer_peer id, bt_status status, const char *why) {
    handoff_peer *peer = handoff_peers_find(&receiver->peers, id);
    if (peer == NULL || peer->is_failed) return;
    peer->is_failed = true;
    for (uint32_t i = 0; i < receiver->options.attempts_max; i++) {
        incoming *in = &receiver->records[i];
        if (in->state == INCOMING_RECEIVING && handoff_peer_equal(in->offer.peer, id))
            handoff_incoming_fail(receiver, in, status, "prefill worker %" PRIu32 ": %s",
                                  id.worker_id, why);
    }
    const handoff_peer_events *events = &receiver->options.peer_events;
    if (events->on_peer_failed != NULL) events->on_peer_failed(events->context, id, status);
}

static xfer_decision on_message(void *context, xfer_peer from, const void *header_bytes,
                                size_t header_count, size_t payload_bytes, xfer_receive *receive) {
    handoff_receiver *receiver = context;
    const handoff_peer_events *events = &receiver->options.peer_events;
    handoff_header header;
    if (handoff_header_decode(header_bytes, header_count, &header) == BT_OK) {
        switch (header.kind) {
        case HANDOFF_CHUNK:
        case HANDOFF_ROW: return take_part(receiver, from, &header, payload_bytes, receive);
        case HANDOFF_HELLO:
            if (payload_bytes != 0) break;
            if (handoff_peers_on_hello(&receiver->peers, from, header.has_heard))
                events->on_hello(events->context, from);
            handoff_peers_send(&receiver->peers, mover_of(receiver));
            return XFER_DROP;
        case HANDOFF_ACK: break;
        }
    }
    receiver->counts.protocol_errors++;
    fail_peer(receiver, from, BT_ERR_PEER_PROTOCOL, "a message that prefill does not send");
    return XFER_DROP;
}

static void on_sent(void *context, uint64_t token, bt_status status) {
    handoff_receiver *receiver = context;
    (void)token;
    (void)status; /* a broken endpoint shows as on_peer_failed */
    handoff_peers_send(&receiver->peers, mover_of(receiver));
    for (uint32_t i = 0; i < receiver->options.attempts_max; i++)
        if (receiver->records[i].state == INCOMING_ACKING)
            handoff_incoming_ack(receiver, &receiver->records[i]);
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    fail_peer(context, peer, status, "its endpoint broke");
}

static void on_peer_closed(void *context, xfer_peer id) {
    handoff_receiver *receiver = context;
    const handoff_peer_events *events = &receiver->options.peer_events;
    handoff_peer *peer = handoff_peers_find(&receiver->peers, id);
    if (peer != NULL) peer->is_failed = true; /* an event below must not expect anything of it */
    for (uint32_t i = 0; i < receiver->options.attempts_max; i++) {
        incoming *in = &receiver->records[i];
        if (in->state == INCOMING_FREE || !handoff_peer_equal(in->offer.peer, id)) continue;
        BT_ASSERT(in->posted == 0);
        if (in->state == INCOMING_RECEIVING)
            handoff_incoming_fail(receiver, in, BT_ERR_PEER_GONE,
                                  "the endpoint to prefill worker %" PRIu32 " was closed",
                                  id.worker_id);
        else if (in->state == INCOMING_ACKING)
            release_record(receiver, in);
    }
    handoff_peers_remove(&receiver->peers, id);
    if (events->on_peer_closed != NULL) events->on_peer_closed(events->context, id);
}

/* ---- the user's calls ------------------------------------------------------------------------ */

bt_status handoff_receiver_create(const handoff_receiver_options *options, handoff_receiver **out) {
    if (options->attempts_max == 0) return BT_ERR_CALLER_ARGUMENT;
    handoff_receiver *receiver = bt_calloc(1, sizeof *receiver);
    if (receiver == NULL) return BT_ERR_WORKER_MEMORY;
    receiver->options = *options;
    if (receiver->options.chunk_grace_us == 0)
        receiver->options.chunk_grace_us = HANDOFF_CHUNK_GRACE_US;
    bt_status status = handoff_geometry_init(options->pages, options->page_tokens,
                                             options->chunk_bytes_max, &receiver->geometry);
    receiver->records = bt_calloc(options->attempts_max, sizeof *receiver->records);
    if (status == BT_OK && receiver->records == NULL) status = BT_ERR_WORKER_MEMORY;
    if (status == BT_OK) status = bt_id_map_init(&receiver->by_attempt, options->attempts_max);
    if (status != BT_OK) {
        handoff_receiver_destroy(receiver);
        return status;
    }
    options->mover->handler = (xfer_handler){
        .on_message = on_message,
        .on_received = on_received,
        .on_sent = on_sent,
        .on_peer_failed = on_peer_failed,
        .on_peer_closed = on_peer_closed,
        .context = receiver,
    };
    *out = receiver;
    return BT_OK;
}

void handoff_receiver_destroy(handoff_receiver *receiver) {
    if (receiver == NULL) return;
    for (uint32_t i = 0; receiver->records != NULL && i < receiver->options.attempts_max; i++) {
        incoming *in = &receiver->records[i];
        bt_free(in->pages);
        bt_free(in->chunks);
        bt_free(in->checksums);
        bt_free(in->is_covered);
        bt_free(in->rows);
        bt_free(in->decoded);
    }
    handoff_peers_fini(&receiver->peers);
    bt_id_map_fini(&receiver->by_attempt);
    bt_free(receiver->records);
    bt_free(receiver);
}

static bool grow(void **array, size_t count, size_t bytes_each) {
    void *grown = bt_realloc(*array, count * bytes_each);
    if (grown != NULL) *array = grown;
    return grown != NULL;
}

/* The arrays of a record grow to the largest prompt it has seen and are kept. */
static bool reserve(incoming *in, uint32_t page_count, uint32_t unit_count) {
    void *pages = in->pages;
    if (page_count > in->page_capacity) {
        if (!grow(&pages, page_count, sizeof *in->pages)) return false;
        in->pages = pages;
        in->page_capacity = page_count;
    }
    if (unit_count <= in->unit_capacity) return true;
    void *chunks = in->chunks;
    void *checksums = in->checksums;
    void *is_covered = in->is_covered;
    const bool is_grown = grow(&chunks, unit_count, sizeof *in->chunks) &&
                          grow(&checksums, unit_count, sizeof *in->checksums) &&
                          grow(&is_covered, unit_count, sizeof *in->is_covered);
    in->chunks = chunks;
    in->checksums = checksums;
    in->is_covered = is_covered;
    if (is_grown) in->unit_capacity = unit_count;
    return is_grown;
}

static bool reserve_samples(incoming *in, uint32_t sample_count) {
    if (sample_count <= in->sample_capacity) return true;
    void *rows = in->rows;
    void *decoded = in->decoded;
    const bool is_grown = grow(&rows, sample_count, sizeof *in->rows) &&
                          grow(&decoded, sample_count, sizeof *in->decoded);
    in->rows = rows;
    in->decoded = decoded;
    if (is_grown) in->sample_capacity = sample_count;
    return is_grown;
}

static bt_status check_offer(handoff_receiver *receiver, const handoff_offer *offer) {
    const uint32_t total = kv_pool_count(receiver->options.pages).total;
    if (offer->prompt_tokens == 0 ||
        offer->page_count != handoff_pages_for(&receiver->geometry, offer->prompt_tokens))
        return BT_ERR_CALLER_ARGUMENT;
    for (uint32_t i = 0; i < offer->page_count; i++)
        if (offer->pages[i] >= total ||
            kv_pool_state(receiver->options.pages, offer->pages[i]) == KV_PAGE_FREE)
            return BT_ERR_CALLER_ARGUMENT;
    if (offer->sample_count == 0 || offer->sample_count > PROTO_SAMPLES_MAX)
        return BT_ERR_CALLER_ARGUMENT;
    for (uint32_t i = 0; i < offer->sample_count; i++)
        if (row_pool_get(receiver->options.rows, offer->slots[i]) == NULL)
            return BT_ERR_REQUEST_STALE;
    const handoff_peer *peer = handoff_peers_find(&receiver->peers, offer->peer);
    if (peer == NULL || peer->is_failed) return BT_ERR_PEER_GONE;
    if (find(receiver, offer->attempt) != NULL) return BT_ERR_REQUEST_DUPLICATE;
    return receiver->active == receiver->options.attempts_max ? BT_ERR_REQUEST_FULL : BT_OK;
}

bt_status handoff_receiver_expect(handoff_receiver *receiver, const handoff_offer *offer) {
    const bt_status status = check_offer(receiver, offer);
    if (status != BT_OK) return status;
    incoming *in = receiver->records;
    while (in->state != INCOMING_FREE)
        in++;
    const uint32_t unit_count = offer->page_count * receiver->geometry.units_per_page;
    if (!reserve(in, offer->page_count, unit_count) || !reserve_samples(in, offer->sample_count))
        return BT_ERR_WORKER_MEMORY;
    memcpy(in->pages, offer->pages, sizeof *in->pages * offer->page_count);
    memset(in->chunks, 0, sizeof *in->chunks * unit_count);
    memset(in->checksums, 0, sizeof *in->checksums * unit_count);
    memset(in->is_covered, 0, sizeof *in->is_covered * unit_count);
    for (uint32_t i = 0; i < offer->sample_count; i++)
        in->rows[i] = (incoming_row){.slot = offer->slots[i]};
    *in = (incoming){
        .state = INCOMING_RECEIVING,
        .offer = *offer,
        .rows = in->rows,
        .decoded = in->decoded,
        .sample_capacity = in->sample_capacity,
        .pages = in->pages,
        .page_capacity = in->page_capacity,
        .unit_count = unit_count,
        .unit_capacity = in->unit_capacity,
        .chunks = in->chunks,
        .checksums = in->checksums,
        .is_covered = in->is_covered,
    };
    in->offer.pages = in->pages;
    in->offer.slots = NULL;
    receiver->active++;
    bt_id_map_put(&receiver->by_attempt, proto_attempt_id(offer->attempt), in);
    return BT_OK;
}

void handoff_receiver_cancel(handoff_receiver *receiver, proto_attempt attempt) {
    incoming *in = find(receiver, attempt);
    if (in == NULL || in->state != INCOMING_RECEIVING) return;
    in->state = INCOMING_DRAINING;
    receiver->counts.cancelled++;
    refuse(receiver, in->offer.peer, attempt, in->rows[0].slot, BT_ERR_REQUEST_CANCELLED);
    release_if_quiet(receiver, in);
}

bt_status handoff_receiver_hello(handoff_receiver *receiver, xfer_peer peer) {
    return handoff_peers_open(&receiver->peers, mover_of(receiver), peer);
}

static void tick_record(handoff_receiver *receiver, incoming *in, uint64_t now) {
    const uint64_t grace_us = receiver->options.chunk_grace_us;
    if (in->is_telling) return;
    if (in->state == INCOMING_ACKING) {
        /* The sender has a deadline of its own: after it nobody waits for the ack any more. */
        if (now >= in->offer.deadline_us && now - in->offer.deadline_us >= grace_us)
            release_record(receiver, in);
        else
            handoff_incoming_ack(receiver, in);
        return;
    }
    if (in->state == INCOMING_FREE || now < in->offer.deadline_us) return;
    if (in->state == INCOMING_RECEIVING) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_DEADLINE,
                              "waited past the deadline for KV (%" PRIu32 " of %" PRIu32
                              " pieces) and rows (%" PRIu32 " of %" PRIu32
                              ") of prefill worker %" PRIu32,
                              in->units_covered, in->unit_count, in->rows_done,
                              in->offer.sample_count, in->offer.peer.worker_id);
        return;
    }
    if (in->is_stuck_reported || now - in->offer.deadline_us < grace_us) return;
    in->is_stuck_reported = true;
    receiver->counts.stuck++;
    receiver->options.peer_events.on_stuck(receiver->options.peer_events.context, in->offer.peer);
}

void handoff_receiver_tick(handoff_receiver *receiver) {
    const uint64_t now = bt_clock_now_us(&receiver->options.clock);
    handoff_peers_send(&receiver->peers, mover_of(receiver));
    for (uint32_t i = 0; i < receiver->options.attempts_max; i++)
        tick_record(receiver, &receiver->records[i], now);
}

uint32_t handoff_receiver_active_count(const handoff_receiver *receiver) {
    return receiver->active;
}

handoff_receiver_counts handoff_receiver_get_counts(const handoff_receiver *receiver) {
    return receiver->counts;
}
