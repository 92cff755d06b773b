/* Between the three files of the UCX mover: the mover itself and its peers (xfer_ucx.c), messages
 * on their way (xfer_ucx_io.c), and settings (xfer_ucx_config.c). */
#ifndef BT_PD_BUFFERS_XFER_UCX_INTERNAL_H
#define BT_PD_BUFFERS_XFER_UCX_INTERNAL_H

#include <ucp/api/ucp.h>

#include "pd_buffers/xfer_ucx.h"

enum {
    UCX_MESSAGE_ID = 1,
    UCX_PREFIX_BYTES = 32, /* of our own header, before the user's */
};

typedef enum ucx_peer_state {
    UCX_PEER_OPEN,
    UCX_PEER_BROKEN,  /* UCX's error callback came; on_peer_failed is to be called */
    UCX_PEER_FAILED,  /* it was called */
    UCX_PEER_CLOSING, /* disconnect was called */
} ucx_peer_state;

typedef struct ucx_mover ucx_mover;
typedef struct ucx_operation ucx_operation;

typedef struct ucx_peer {
    ucx_mover *mover;
    xfer_peer id;
    ucx_peer_state state;
    bt_status failure;
    ucp_ep_h endpoint;         /* NULL: never opened, or closed */
    void *close_request;       /* NULL when the close is over */
    uint64_t close_us;         /* when it was begun */
    ucx_operation *operations; /* sends and receives that have not been told */
    struct ucx_peer *next;
} ucx_peer;

/* One send or receive. Unused ones lie in a list of the mover. */
struct ucx_operation {
    ucx_mover *mover;
    ucx_peer *peer; /* NULL for one that was given up */
    bool is_send;
    bool is_over;
    bt_status status;
    uint64_t token;
    size_t bytes;
    ucp_dt_iov_t *iov; /* [iov_capacity], kept */
    uint32_t iov_capacity;
    uint8_t header[UCX_PREFIX_BYTES + XFER_HEADER_BYTES_MAX];
    ucx_operation *next;           /* in the list of done or free ones */
    ucx_operation *before, *after; /* in the peer's list */
};

typedef struct ucx_mapping {
    ucp_mem_h handle;
    struct ucx_mapping *next;
} ucx_mapping;

struct ucx_mover {
    xfer base;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_address_t *worker_address;
    uint8_t *address; /* prefix and worker_address */
    size_t address_bytes;
    ucx_peer *peers;
    ucx_mapping *mappings;
    ucx_operation *free_operations;
    ucx_operation *done, **done_end; /* over, not told yet; oldest first */
    uint32_t sends, sends_max;
    uint32_t closing_polls, busy_polls;
    int event_fd; /* of epoll, over UCX's and the timer */
    int timer_fd;
    bool is_timer_set;
    bool is_memory_only;
    bool is_destroying;
    bool has_broken; /* some peer is UCX_PEER_BROKEN */
};

/* ---- xfer_ucx.c ---- */

ucx_peer *xfer_ucx_find_peer(const ucx_mover *mover, xfer_peer id);

/* ---- xfer_ucx_io.c ---- */

/* UCX's callback for messages; arg is the mover. */
ucs_status_t xfer_ucx_on_message(void *arg, const void *header, size_t header_bytes, void *data,
                                 size_t bytes, const ucp_am_recv_param_t *param);
/* The mover's send. */
bt_status xfer_ucx_send(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                        const xfer_iov *iov, uint32_t iov_count, uint64_t token);
/* Calls the user for every operation that is over. */
void xfer_ucx_tell_done(ucx_mover *mover);
/* Tells the peer's outstanding sends failed, though UCX has not ended them. */
void xfer_ucx_give_up_sends(ucx_peer *peer);
/* Forgets every operation of the peer, without a word; before UCX is destroyed. */
void xfer_ucx_abandon(ucx_peer *peer);
void xfer_ucx_free_operations(ucx_mover *mover);

/* ---- xfer_ucx_config.c ---- */

/* Reads UCX's configuration with our settings in it. What UCX takes only from the environment (the
 * settings of single transports) is put there for as long as the mover is being created; end both
 * with xfer_ucx_configured. *is_memory_only_out: the transports in effect are those within one
 * machine's memory. */
BT_MUST_CHECK bt_status xfer_ucx_configure(const xfer_ucx_options *options, ucp_config_t **out,
                                           bool *is_memory_only_out, bt_error *error);
void xfer_ucx_configured(ucp_config_t *config);
/* UCX's status as one of ours: what ends an endpoint is PEER_GONE. */
bt_status xfer_ucx_status(ucs_status_t status);

#endif
