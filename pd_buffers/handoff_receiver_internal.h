/* What the two files of decode's end share: its records, and what ends them.
 *   handoff_receiver.c  arrival, ends, peers, the user's calls
 *   handoff_proof.c     what has arrived, checked, up to ready */
#ifndef BT_PD_BUFFERS_HANDOFF_RECEIVER_INTERNAL_H
#define BT_PD_BUFFERS_HANDOFF_RECEIVER_INTERNAL_H

#include "base/compiler.h"
#include "base/id_map.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/handoff_peers.h"
#include "pd_buffers/handoff_wire.h"

typedef enum incoming_state {
    INCOMING_FREE,
    INCOMING_RECEIVING,
    INCOMING_DRAINING,
    INCOMING_ACKING,
} incoming_state;

typedef enum receive_state {
    RECEIVE_NONE,
    RECEIVE_POSTED,
    RECEIVE_DONE,
} receive_state;

typedef struct incoming_chunk {
    receive_state state;
    uint32_t crc; /* as announced */
    handoff_span span;
} incoming_chunk;

/* The row of one sample, from its header to its proof. */
typedef struct incoming_row {
    receive_state state;
    row_slot slot;
    size_t bytes;
} incoming_row;

typedef struct incoming {
    incoming_state state;
    bool is_stuck_reported;
    bool is_telling;       /* inside on_ready */
    handoff_offer offer;   /* .pages is the copy below, .slots are in rows */
    incoming_row *rows;    /* [offer.sample_count] */
    metadata_row *decoded; /* likewise */
    uint32_t sample_capacity;
    uint32_t rows_done;
    uint32_t *pages;
    uint32_t page_capacity;
    uint32_t unit_count, unit_capacity;
    incoming_chunk *chunks; /* [unit_count]: no more chunks than units */
    uint32_t *checksums;    /* [unit_count], by chunk index */
    bool *is_covered;       /* [unit_count], by unit */
    uint32_t chunks_posted, chunks_done, units_covered;
    uint32_t chunk_index_end; /* one past the largest index seen */
    uint32_t announced;       /* chunks, by the rows that are there; 0: none yet */
    uint32_t posted;          /* receives now */
} incoming;

struct handoff_receiver {
    handoff_receiver_options options;
    handoff_geometry geometry;
    handoff_peers peers;
    incoming *records;    /* [attempts_max] */
    bt_id_map by_attempt; /* the records that are not FREE */
    uint32_t active;
    handoff_receiver_counts counts;
    xfer_iov iov[XFER_IOV_MAX]; /* of the receive being posted */
};

/* handoff_receiver.c. What is wrong with one attempt; its memory is given back when it is quiet. */
void handoff_incoming_fail(handoff_receiver *receiver, incoming *in, bt_status status,
                           const char *format, ...) BT_PRINTF(4, 5);
/* The ack of a proven attempt, now or when the mover has room; then the record is free. */
void handoff_incoming_ack(handoff_receiver *receiver, incoming *in);

/* handoff_proof.c */
void handoff_incoming_chunk(handoff_receiver *receiver, incoming *in, uint32_t index);
void handoff_incoming_row(handoff_receiver *receiver, incoming *in, uint32_t sample);

#endif
