/* The handoff of one attempt from prefill to decode: KV pages in bounded chunks and the metadata
 * row, proven, acknowledged. Two state machines, both pure on top of a mover and a clock: the
 * *sender* (in prefill) and the *receiver* (in decode). They speak three messages over the mover,
 * told apart by a kind in the header: CHUNK and ROW (prefill -> decode) and ACK (decode ->
 * prefill); and HELLO, by which a pair proves that both directions work.
 *
 * Rules kept here: nothing is inferred from order; a chunk index that completes twice is an error;
 * an attempt is READY when exactly the announced chunks completed with matching checksums and the
 * row proves itself; the sender's pages stay pinned until decode's ack; memory with a posted
 * receive is never given back before that receive ended (quiescence).
 *
 * Transfer chunks: consecutive logical pages of at most HANDOFF_CHUNK_BYTES_MAX; a larger page is
 * cut at layer boundaries. A chunk header holds attempt, slot, generation, chunk index, first
 * logical page, count, layer range, bytes and CRC32C, never a page list.
 *
 * Event thread only. Callbacks may call back into the same handoff object only where stated. */
#ifndef BT_PD_BUFFERS_HANDOFF_H
#define BT_PD_BUFFERS_HANDOFF_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/row_pool.h"
#include "pd_buffers/xfer.h"
#include "proto/message.h"
#include "proto/row.h"

enum { HANDOFF_CHUNK_BYTES_MAX = 8 * 1024 * 1024 };

/* ---- decode ---------------------------------------------------------------------------------- */

typedef struct handoff_receiver handoff_receiver;

/* What decode expects; pages and slot stay owned by the caller, borrowed until on_quiet. */
typedef struct handoff_offer {
    proto_attempt attempt;
    xfer_peer peer; /* the prefill worker */
    row_slot slot;
    uint32_t prompt_tokens;
    uint32_t page_count;   /* pages of the prompt = ceil(prompt_tokens / page_tokens) */
    const uint32_t *pages; /* [page_count], logical order */
    uint32_t mask_mode;
    uint64_t deadline_us; /* absolute, on the clock given at creation */
} handoff_offer;

typedef struct handoff_receiver_events {
    /* KV and row are proven and the ack is sent. The row's arrays point into the slot. The handoff
     * of this attempt is over and quiet: pages and slot are the caller's alone. */
    void (*on_ready)(void *context, proto_attempt attempt, const metadata_row *row);
    /* The handoff failed (proof, protocol, deadline, peer). on_quiet follows when memory is at
     * rest. */
    void (*on_failed)(void *context, proto_attempt attempt, bt_status status, const char *text);
    /* After a failure or a cancel: no receive is posted any more; pages and slot may be released.
     */
    void (*on_quiet)(void *context, proto_attempt attempt);
    /* A HELLO of this peer arrived (the pair works in its direction). */
    void (*on_hello)(void *context, xfer_peer peer);
    /* A chunk is past its deadline: the peer's endpoint must be closed to get the memory back. */
    void (*on_stuck)(void *context, xfer_peer peer);
    void *context;
} handoff_receiver_events;

typedef struct handoff_receiver_options {
    xfer *mover; /* borrowed; its handler is set by the receiver */
    kv_pool *pages;
    row_pool *rows;
    record_checksum checksum;
    uint32_t page_tokens;
    uint32_t attempts_max;
    bt_clock clock;
    handoff_receiver_events events;
} handoff_receiver_options;

BT_MUST_CHECK bt_status handoff_receiver_create(const handoff_receiver_options *options,
                                                handoff_receiver **out);
void handoff_receiver_destroy(handoff_receiver *receiver);
BT_MUST_CHECK bt_status handoff_receiver_expect(handoff_receiver *receiver,
                                                const handoff_offer *offer);
/* The caller gave the attempt up: later chunks are dropped at their header; on_quiet follows (maybe
 * inside the call). Unknown attempts are ignored. */
void handoff_receiver_cancel(handoff_receiver *receiver, proto_attempt attempt);
BT_MUST_CHECK bt_status handoff_receiver_hello(handoff_receiver *receiver, xfer_peer peer);
/* Deadlines. Call every <= 100 ms. */
void handoff_receiver_tick(handoff_receiver *receiver);
/* The endpoint of this peer was closed (mover's on_peer_closed reaches the receiver by itself). */
uint32_t handoff_receiver_active_count(const handoff_receiver *receiver);

/* ---- prefill --------------------------------------------------------------------------------- */

typedef struct handoff_sender handoff_sender;

typedef struct handoff_target {
    proto_attempt attempt;
    xfer_peer peer; /* the decode worker */
    row_slot slot;  /* in decode's pool */
    uint32_t prompt_tokens;
    uint64_t deadline_us;
} handoff_target;

typedef struct handoff_sender_events {
    /* decode proved and took it: pages may be released. */
    void (*on_acked)(void *context, proto_attempt attempt);
    /* The transfer failed; on_quiet follows. */
    void (*on_failed)(void *context, proto_attempt attempt, bt_status status, const char *text);
    /* After a failure or an abort: no send reads the pages any more. */
    void (*on_quiet)(void *context, proto_attempt attempt);
    void (*on_hello)(void *context, xfer_peer peer);
    void (*on_stuck)(void *context, xfer_peer peer);
    void *context;
} handoff_sender_events;

typedef struct handoff_sender_options {
    xfer *mover;
    kv_pool *pages;
    row_pool *rows; /* the sender's own staging slots, one per attempt in flight */
    record_checksum checksum;
    uint32_t page_tokens;
    uint32_t attempts_max;
    uint64_t incarnation; /* written into rows */
    bt_clock clock;
    handoff_sender_events events;
} handoff_sender_options;

BT_MUST_CHECK bt_status handoff_sender_create(const handoff_sender_options *options,
                                              handoff_sender **out);
void handoff_sender_destroy(handoff_sender *sender);
/* REQUEST_FULL when no staging slot or attempt record is free. */
BT_MUST_CHECK bt_status handoff_sender_begin(handoff_sender *sender, const handoff_target *target);
/* Logical pages [first, first + count) are computed and final; pages [count] are their ids, copied.
 * In order. Only the last call, given with `is_last`, may hold a partial page (the caller has
 * zeroed its tail).
 */
BT_MUST_CHECK bt_status handoff_sender_pages(handoff_sender *sender, proto_attempt attempt,
                                             uint32_t first, uint32_t count, const uint32_t *pages,
                                             bool is_last);
/* The first token and its mask row; header fields of the handoff itself are filled in here. */
BT_MUST_CHECK bt_status handoff_sender_row(handoff_sender *sender, proto_attempt attempt,
                                           const metadata_row *row);
void handoff_sender_abort(handoff_sender *sender, proto_attempt attempt);
BT_MUST_CHECK bt_status handoff_sender_hello(handoff_sender *sender, xfer_peer peer);
void handoff_sender_tick(handoff_sender *sender);
uint32_t handoff_sender_active_count(const handoff_sender *sender);

#endif
