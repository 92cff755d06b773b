/* The mover without a network: any number of movers in one process, joined by a *network* that
 * keeps everything that may happen next as a list of *events* and does one of them when told. A
 * test or the simulator chooses which (by a seed, or every order in turn), and so decides on
 * reordering, delay, loss and death.
 *
 * A message with payload goes through DELIVER (the receiver's on_message), then, when accepted, one
 * COPY per part of part_bytes (read from the sender's memory and written to the receiver's at that
 * moment), then RECEIVED at the receiver and SENT at the sender, in any order. A crash between two
 * COPYs leaves half of the bytes. Without payload, or when dropped, only DELIVER and SENT.
 *
 * Faithful to UCX where it matters: messages may overtake each other; a receiver that was not
 * connected to the sender drops the message (the sender still completes); the death of a peer is
 * noticed only by a mover that had sent to it (PEER_FAILED); what is outstanding with a broken peer
 * ends only after disconnect, with PEER_GONE, and then comes PEER_CLOSED; a message of the dead
 * that was on its way may still be delivered, but its payload never comes.
 *
 * A mover is created with a number, its address; destroy is the death of its process, after which
 * the number may be used again by another one (a restart at the same address). One thread. */
#ifndef BT_PD_BUFFERS_XFER_LOOP_H
#define BT_PD_BUFFERS_XFER_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "pd_buffers/xfer.h"

typedef struct xfer_loop_network xfer_loop_network;

typedef struct xfer_loop_options {
    size_t part_bytes;  /* of one COPY; 0 = 64 KiB */
    uint32_t sends_max; /* messages of one mover on their way; 0 = 256 */
    bool is_stepped;    /* true: events happen only by xfer_loop_step, and progress does nothing.
                         * false: progress does the events of its mover, oldest first */
} xfer_loop_options;

typedef enum xfer_loop_event_kind {
    XFER_LOOP_DELIVER,
    XFER_LOOP_COPY,
    XFER_LOOP_RECEIVED,
    XFER_LOOP_SENT,
    XFER_LOOP_PEER_FAILED,
    XFER_LOOP_PEER_CLOSED,
} xfer_loop_event_kind;

/* One thing that may happen next. */
typedef struct xfer_loop_event {
    xfer_loop_event_kind kind;
    xfer *at;              /* the mover whose callback runs (COPY: the receiver, no callback) */
    xfer_peer peer;        /* the other side */
    const uint8_t *header; /* of the message; NULL for PEER_* */
    size_t header_bytes;
    size_t payload_bytes;
    uint64_t message; /* its number, in order of sending; 0 for PEER_* */
} xfer_loop_event;

BT_MUST_CHECK bt_status xfer_loop_network_create(const xfer_loop_options *options,
                                                 xfer_loop_network **out);
/* After all its movers. */
void xfer_loop_network_destroy(xfer_loop_network *network);
/* REQUEST_DUPLICATE when a living mover has the number. Destroy with ops->destroy. */
BT_MUST_CHECK bt_status xfer_loop_create(xfer_loop_network *network, uint32_t number, xfer **out);
/* Blocks of memory that are registered now. */
uint32_t xfer_loop_registered_count(const xfer *x);

/* What may happen next; indices are valid until the next call of step, drop, corrupt or any mover
 * function. */
uint32_t xfer_loop_event_count(const xfer_loop_network *network);
xfer_loop_event xfer_loop_event_at(const xfer_loop_network *network, uint32_t index);
/* Lets it happen; callbacks run inside. */
void xfer_loop_step(xfer_loop_network *network, uint32_t index);
/* Only for a DELIVER or COPY: the message is lost, and with it the connection: PEER_FAILED becomes
 * possible on both sides. */
void xfer_loop_drop(xfer_loop_network *network, uint32_t index);
/* Only for a COPY or RECEIVED of a message with payload: flips bits of the receiver's copy of what
 * has arrived so far (offset below that), after it was written. false: not there yet. */
bool xfer_loop_corrupt_payload(xfer_loop_network *network, uint32_t index, size_t offset,
                               uint8_t bits);
/* Oldest first until nothing more can happen, at most `limit` steps; returns the steps made. */
uint32_t xfer_loop_run(xfer_loop_network *network, uint32_t limit);

#endif
