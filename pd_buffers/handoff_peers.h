/* The peers of one end of the handoff, and the hello that proves a pair: each side sends a hello
 * when it has connected (the other may not have connected yet and drops it), and answers the first
 * hello it hears with one that says so. A side that hears "I have heard you" knows that both
 * directions work. Both ends keep one of these tables. */
#ifndef BT_PD_BUFFERS_HANDOFF_PEERS_H
#define BT_PD_BUFFERS_HANDOFF_PEERS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "pd_buffers/xfer.h"

typedef struct handoff_peer {
    xfer_peer id;
    bool is_failed;
    bool has_heard;   /* a hello of the peer arrived */
    bool wants_hello; /* one is to be sent as soon as the mover takes it */
    bool has_told;    /* a hello with has_heard went out */
    bool is_proven;   /* on_hello was called */
} handoff_peer;

typedef struct handoff_peers {
    handoff_peer *items;
    uint32_t count, capacity;
} handoff_peers;

static inline bool handoff_peer_equal(xfer_peer a, xfer_peer b) {
    return a.worker_id == b.worker_id && a.incarnation == b.incarnation;
}

void handoff_peers_fini(handoff_peers *peers);
/* NULL when there is none. Valid until the table changes. */
handoff_peer *handoff_peers_find(const handoff_peers *peers, xfer_peer id);
/* Adds the peer and sends the first hello (later, when the mover is full). REQUEST_DUPLICATE,
 * WORKER_MEMORY, or why the mover cannot send to it. */
BT_MUST_CHECK bt_status handoff_peers_open(handoff_peers *peers, xfer *mover, xfer_peer id);
void handoff_peers_remove(handoff_peers *peers, xfer_peer id);
/* A hello arrived. true: the pair is proven now (once). */
bool handoff_peers_on_hello(handoff_peers *peers, xfer_peer from, bool has_heard);
/* Sends what hellos are wanted and the mover takes. */
void handoff_peers_send(handoff_peers *peers, xfer *mover);

#endif
