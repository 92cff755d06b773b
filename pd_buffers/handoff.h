/* The handoff of one attempt from prefill to decode: KV pages in bounded chunks and a metadata row
 * per sample, proven, acknowledged. Two state machines, both pure on top of a mover and a clock:
 * the *sender* (in prefill) and the *receiver* (in decode). They speak four messages over the
 * mover, told apart by a kind in the header (handoff_wire.h): CHUNK and ROW (prefill -> decode),
 * ACK (decode -> prefill, with a status: a refusal travels the same way), and HELLO, by which a
 * pair proves that both directions work.
 *
 * Rules kept here: nothing is inferred from order; a chunk index that completes twice is an error;
 * an attempt is READY when exactly the announced chunks completed with matching checksums and every
 * sample's row proves itself; the sender's pages stay pinned until decode's ack; memory with a
 * posted receive is never given back before that receive ended (quiescence).
 *
 * Transfer chunks: consecutive logical pages of at most chunk_bytes_max together; a page larger
 * than that is cut at layer boundaries, and then a chunk holds layers of one page. A chunk header
 * holds attempt, slot, generation, chunk index, first logical page, count, layer range, bytes and
 * CRC32C, never a page list. kv_checksum: full = the CRC32C of all bytes of the chunk in logical
 * order; sampled = of one 64-byte line of each layer of each page, at a place that depends on
 * attempt, page and layer; off = 0.
 *
 * What is wrong with one attempt fails that attempt by name (REQUEST_CORRUPT, REQUEST_DUPLICATE); a
 * message for an unknown attempt, of another incarnation or of an older slot generation is dropped,
 * counted and refused to its sender; a header that does not read fails the peer.
 *
 * Event thread only. Events come out of the mover's progress and out of tick; cancel and abort may
 * call on_quiet inside the call; expect, begin, pages, row and hello never call back. From inside
 * an event every function of the same object but destroy may be called. */
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

enum {
    HANDOFF_CHUNK_BYTES_MAX = 8 * 1024 * 1024,
    HANDOFF_CHUNK_GRACE_US = 2 * 1000 * 1000,
    HANDOFF_SENDS_IN_FLIGHT = 4,
};

/* ---- peers ----------------------------------------------------------------------------------- */

/* What either end says of its peers. */
typedef struct handoff_peer_events {
    /* Hellos went both ways between this process and the peer; once per connection. */
    void (*on_hello)(void *context, xfer_peer peer);
    /* A chunk is past its attempt's deadline and the grace: the peer's endpoint must be closed to
     * get the memory back. Once per attempt. */
    void (*on_stuck)(void *context, xfer_peer peer);
    /* The endpoint broke, or the peer does not speak this protocol; its attempts have failed. The
     * user calls the mover's disconnect from its own loop. May be NULL. */
    void (*on_peer_failed)(void *context, xfer_peer peer, bt_status status);
    /* disconnect finished: every attempt of this peer is quiet; it may be connected anew. May be
     * NULL. */
    void (*on_peer_closed)(void *context, xfer_peer peer);
    void *context;
} handoff_peer_events;

/* ---- decode ---------------------------------------------------------------------------------- */

typedef struct handoff_receiver handoff_receiver;

/* What decode expects; pages and slots stay owned by the caller, borrowed until on_quiet. Chunks
 * carry the slot of sample 0, each row its own. */
typedef struct handoff_offer {
    proto_attempt attempt;
    xfer_peer peer; /* the prefill worker */
    uint32_t sample_count;
    const row_slot *slots; /* [sample_count]; copied */
    uint32_t prompt_tokens;
    uint32_t page_count;   /* pages of the prompt = ceil(prompt_tokens / page_tokens) */
    const uint32_t *pages; /* [page_count], logical order; the list is copied */
    uint32_t mask_mode;
    uint32_t mask_bounded; /* a support may be cut to the cap */
    uint64_t deadline_us;  /* absolute, on the clock given at creation */
} handoff_offer;

typedef struct handoff_receiver_events {
    /* KV and rows [sample_count] are proven and the ack is sent (or queued behind others). The
     * rows' arrays point into the slots. With several samples some rows may have a status that is
     * not OK, never all. The handoff of this attempt is over and quiet: pages and slots are the
     * caller's alone; on_quiet does not follow. */
    void (*on_ready)(void *context, proto_attempt attempt, const metadata_row *rows);
    /* The handoff failed (proof, protocol, deadline, peer). on_quiet follows when memory is at
     * rest. */
    void (*on_failed)(void *context, proto_attempt attempt, bt_status status, const char *text);
    /* After a failure or a cancel: no receive is posted any more; pages and slot may be released.
     */
    void (*on_quiet)(void *context, proto_attempt attempt);
    void *context;
} handoff_receiver_events;

typedef struct handoff_receiver_counts {
    uint64_t ready, failed, cancelled;
    uint64_t chunks, bytes;   /* received and checked */
    uint64_t dropped_unknown; /* of no attempt expected here */
    uint64_t dropped_stale;   /* of another incarnation or an older slot generation */
    uint64_t dropped_late;    /* of an attempt that failed or was cancelled */
    uint64_t protocol_errors; /* headers that do not read */
    uint64_t stuck;
} handoff_receiver_counts;

typedef struct handoff_receiver_options {
    xfer *mover; /* borrowed; its handler is set by the receiver */
    kv_pool *pages;
    row_pool *rows;
    record_checksum checksum;
    uint32_t page_tokens;
    uint32_t attempts_max;
    size_t chunk_bytes_max;  /* the same on both sides; 0 = HANDOFF_CHUNK_BYTES_MAX */
    uint64_t chunk_grace_us; /* 0 = HANDOFF_CHUNK_GRACE_US */
    bt_clock clock;
    handoff_receiver_events events;
    handoff_peer_events peer_events;
} handoff_receiver_options;

/* CALLER_ARGUMENT for a chunk_bytes_max below one layer of a page or above the maximum. */
BT_MUST_CHECK bt_status handoff_receiver_create(const handoff_receiver_options *options,
                                                handoff_receiver **out);
/* The mover must make no progress afterwards. */
void handoff_receiver_destroy(handoff_receiver *receiver);
/* REQUEST_FULL when attempts_max are in hand, REQUEST_DUPLICATE for an attempt in hand, PEER_GONE
 * when hello was not called for the peer or it failed, REQUEST_STALE for a slot not held in this
 * generation, CALLER_ARGUMENT when prompt_tokens and page_count do not fit or a page is free. */
BT_MUST_CHECK bt_status handoff_receiver_expect(handoff_receiver *receiver,
                                                const handoff_offer *offer);
/* The caller gave the attempt up: later chunks are dropped at their header; on_quiet follows (maybe
 * inside the call). Unknown and failed attempts are ignored. */
void handoff_receiver_cancel(handoff_receiver *receiver, proto_attempt attempt);
/* Call once per connect, right after it: sends the hello, without which the peer's death is not
 * noticed. on_hello follows when both directions work. */
BT_MUST_CHECK bt_status handoff_receiver_hello(handoff_receiver *receiver, xfer_peer peer);
/* Deadlines, and what the mover had no room for. Call every <= 100 ms. */
void handoff_receiver_tick(handoff_receiver *receiver);
/* Attempts expected, failing or with an unsent ack. */
uint32_t handoff_receiver_active_count(const handoff_receiver *receiver);
handoff_receiver_counts handoff_receiver_get_counts(const handoff_receiver *receiver);

/* ---- prefill --------------------------------------------------------------------------------- */

typedef struct handoff_sender handoff_sender;

typedef struct handoff_target {
    proto_attempt attempt;
    xfer_peer peer; /* the decode worker */
    uint32_t sample_count;
    const row_slot *slots; /* [sample_count], in decode's pool; copied */
    uint32_t prompt_tokens;
    uint64_t deadline_us;
} handoff_target;

typedef struct handoff_sender_events {
    /* decode proved and took it, and no send reads the pages: they may be released. on_quiet does
     * not follow. */
    void (*on_acked)(void *context, proto_attempt attempt);
    /* The transfer failed; on_quiet follows. */
    void (*on_failed)(void *context, proto_attempt attempt, bt_status status, const char *text);
    /* After a failure or an abort: no send reads the pages any more. */
    void (*on_quiet)(void *context, proto_attempt attempt);
    void *context;
} handoff_sender_events;

typedef struct handoff_sender_counts {
    uint64_t acked, failed, aborted;
    uint64_t chunks, bytes; /* given to the mover */
    uint64_t dropped_late;  /* acks of attempts that are over */
    uint64_t protocol_errors;
    uint64_t stuck;
} handoff_sender_counts;

typedef struct handoff_sender_options {
    xfer *mover;
    kv_pool *pages;
    row_pool *rows; /* the sender's own staging slots, one per sample in flight */
    record_checksum checksum;
    uint32_t page_tokens;
    uint32_t attempts_max;
    uint64_t incarnation;     /* written into rows: the mover's own */
    uint32_t sends_in_flight; /* chunks per peer given to the mover at once; 0 = the default */
    size_t chunk_bytes_max;   /* as in the receiver's options */
    uint64_t chunk_grace_us;
    bt_clock clock;
    handoff_sender_events events;
    handoff_peer_events peer_events;
} handoff_sender_options;

BT_MUST_CHECK bt_status handoff_sender_create(const handoff_sender_options *options,
                                              handoff_sender **out);
void handoff_sender_destroy(handoff_sender *sender);
/* REQUEST_FULL when no staging slot or attempt record is free, REQUEST_DUPLICATE, PEER_GONE as in
 * expect. */
BT_MUST_CHECK bt_status handoff_sender_begin(handoff_sender *sender, const handoff_target *target);
/* Logical pages [first, first + count) are computed and final; pages [count] are their ids, copied.
 * In order, without gaps; is_last exactly with the prompt's last page, which may be partial (the
 * caller has zeroed its tail). REQUEST_UNKNOWN for an attempt not in hand (it may have failed
 * meanwhile: on_failed told so), CALLER_ARGUMENT for a wrong range. */
BT_MUST_CHECK bt_status handoff_sender_pages(handoff_sender *sender, proto_attempt attempt,
                                             uint32_t first, uint32_t count, const uint32_t *pages,
                                             bool is_last);
/* The first token of sample row->sample_index and its mask row (copied), once per sample; fields of
 * the handoff itself (attempt, slot, generation, writer, chunks, pages, bytes, prompt tokens) are
 * filled in here. Rows leave when all are there and the last chunk is cut. CALLER_LIMIT when it
 * does not fit a slot, CALLER_ARGUMENT for a second row of a sample, or a status that is not OK in
 * an attempt of one sample. */
BT_MUST_CHECK bt_status handoff_sender_row(handoff_sender *sender, proto_attempt attempt,
                                           const metadata_row *row);
/* Gives the attempt up: nothing more is sent; on_quiet follows (maybe inside the call). Decode
 * hears of it from the router. Unknown and failed attempts are ignored. */
void handoff_sender_abort(handoff_sender *sender, proto_attempt attempt);
BT_MUST_CHECK bt_status handoff_sender_hello(handoff_sender *sender, xfer_peer peer);
void handoff_sender_tick(handoff_sender *sender);
uint32_t handoff_sender_active_count(const handoff_sender *sender);
handoff_sender_counts handoff_sender_get_counts(const handoff_sender *sender);

#endif
