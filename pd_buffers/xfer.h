/* The mover: a table of functions that carries messages (a small header and a gathered payload)
 * between a prefill and a decode worker, with two implementations: xfer_ucx and xfer_loop
 * (in-process, for tests and the simulator). It knows nothing of pages, rows or attempts.
 *
 * The receiver owns the operation that fills its memory: on_message sees only the header and says
 * where the payload goes (or drops it). A posted receive cannot be cancelled alone; it ends by
 * completing or by disconnect of its peer. Nothing is inferred from the order of messages.
 *
 * A peer is one process (worker id and incarnation); both sides connect to each other, and a
 * message is handed on only when its claimed sender is a connected peer that meant this very
 * process. What a peer sends before this side has connected to it is dropped. A broken endpoint is
 * noticed only by a side that has sent on it, so both sides send something at once (the hello of
 * handoff.h).
 *
 * One thread (the event thread) makes all calls; callbacks run inside progress and may call send,
 * but never disconnect, connect or destroy. */
#ifndef BT_PD_BUFFERS_XFER_H
#define BT_PD_BUFFERS_XFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    XFER_HEADER_BYTES_MAX = 256,
    XFER_IOV_MAX = 4096, /* parts of one message */
};

typedef struct xfer_iov {
    void *base;
    size_t bytes;
} xfer_iov;

/* A peer: the router's worker id and the process behind it. */
typedef struct xfer_peer {
    uint32_t worker_id;
    uint64_t incarnation;
} xfer_peer;

typedef enum xfer_decision {
    XFER_DROP,   /* the payload is not wanted; the sender still completes */
    XFER_ACCEPT, /* receive into decision->iov; on_received(token) follows exactly once */
} xfer_decision;

typedef struct xfer_receive {
    const xfer_iov *iov; /* the list only until on_message returned; its memory until on_received */
    uint32_t iov_count;  /* the parts hold exactly the payload */
    uint64_t token;
} xfer_receive;

/* The user of a mover. All callbacks get `context`. */
typedef struct xfer_handler {
    /* A message of `from`; `from` is the sender's own claim, checked to be a connected peer. header
     * is borrowed for the call. */
    xfer_decision (*on_message)(void *context, xfer_peer from, const void *header,
                                size_t header_bytes, size_t payload_bytes, xfer_receive *receive);
    void (*on_received)(void *context, uint64_t token, bt_status status);
    /* The payload memory of this send may be reused. OK does not mean that the peer has it. */
    void (*on_sent)(void *context, uint64_t token, bt_status status);
    /* The endpoint to peer broke; the user calls disconnect from its own loop. */
    void (*on_peer_failed)(void *context, xfer_peer peer, bt_status status);
    /* disconnect finished: no operation of this peer incarnation is left in any memory. */
    void (*on_peer_closed)(void *context, xfer_peer peer);
    void *context;
} xfer_handler;

typedef struct xfer xfer;

typedef struct xfer_ops {
    const char *name;
    /* This process's address for connect on the other side. Borrowed from the mover. */
    bt_status (*get_address)(xfer *x, const uint8_t **bytes_out, size_t *count_out);
    /* Opens an endpoint to the peer. PEER_* when its address cannot be used, REQUEST_DUPLICATE when
     * this peer is connected already (also one that broke and was not disconnected yet). */
    bt_status (*connect)(xfer *x, xfer_peer peer, const uint8_t *address, size_t address_bytes);
    /* Force-closes: outstanding sends and receives of this peer complete with PEER_GONE inside
     * later progress calls, then on_peer_closed. Unknown peers: on_peer_closed follows all the
     * same. */
    void (*disconnect)(xfer *x, xfer_peer peer);
    /* Sends header (copied, <= XFER_HEADER_BYTES_MAX) and payload (the list is copied, its memory
     * borrowed until on_sent; iov_count may be 0). REQUEST_FULL when no send is free now, PEER_GONE
     * when the peer is not connected or broke. On an error on_sent does not follow; else it follows
     * exactly once, never inside the call. */
    bt_status (*send)(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                      const xfer_iov *iov, uint32_t iov_count, uint64_t token);
    /* Makes progress with a bounded budget; true when there may be more to do at once. */
    bool (*progress)(xfer *x);
    /* A descriptor that becomes readable when progress has work, or -1 (xfer_loop). */
    int (*get_event_fd)(xfer *x);
    /* Before blocking on the descriptor: false = there is work, call progress again. */
    bool (*arm)(xfer *x);
    /* Memory that payloads will be sent from or received into; register once, up front. */
    bt_status (*register_memory)(xfer *x, void *base, size_t bytes);
    /* Before registered memory is freed while the mover lives on. No transfer uses it any more. */
    void (*unregister_memory)(xfer *x, void *base);
    void (*destroy)(xfer *x);
} xfer_ops;

/* Implementations start with this. */
struct xfer {
    const xfer_ops *ops;
    xfer_handler handler;
    xfer_peer self; /* set by the user before the first connect */
};

#endif
