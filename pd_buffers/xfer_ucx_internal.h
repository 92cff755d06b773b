/* Between the files of the UCX mover: the mover itself and its peers (xfer_ucx.c), messages on
 * their way (xfer_ucx_io.c), pairs with a UCX worker of their own (xfer_ucx_pair.c), settings
 * (xfer_ucx_config.c). */
#ifndef BT_PD_BUFFERS_XFER_UCX_INTERNAL_H
#define BT_PD_BUFFERS_XFER_UCX_INTERNAL_H

#include <ucp/api/ucp.h>

#include "pd_buffers/xfer_ucx.h"

enum {
    UCX_MESSAGE_ID = 1, /* a message of the user */
    UCX_PAIR_ID = 2,    /* the address of a pair's worker */
    UCX_PREFIX_BYTES = 32,
};

typedef enum ucx_peer_state {
    UCX_PEER_OPEN,
    UCX_PEER_BROKEN,  /* UCX's error callback came; on_peer_failed is to be called */
    UCX_PEER_FAILED,  /* it was called */
    UCX_PEER_CLOSING, /* disconnect was called */
} ucx_peer_state;

typedef struct ucx_mover ucx_mover;
typedef struct ucx_operation ucx_operation;

/* The UCX worker that only this process and one peer use (xfer_ucx_pair.c). */
typedef struct ucx_pair {
    ucp_worker_h worker; /* NULL: the mover has no pairs, or it is destroyed */
    ucp_ep_h endpoint;   /* NULL until the peer told its address */
    ucp_address_t *address;
    size_t address_bytes;
    void *remote_address; /* as told, until the endpoint is made */
    bool has_answered;
    ucx_operation *waiting, **waiting_end; /* sends until there is an endpoint; oldest first */
} ucx_pair;

typedef struct ucx_peer {
    ucx_mover *mover;
    xfer_peer id;
    ucx_peer_state state;
    bt_status failure;
    ucp_ep_h endpoint; /* of the mover's worker; NULL: never opened, or closed */
    ucx_pair pair;
    void *close_request;       /* NULL when the close is over */
    uint64_t quiet_us;         /* closing: the pair's worker is destroyed then */
    ucx_operation *operations; /* sends and receives that have not been told */
    struct ucx_peer *next;
} ucx_peer;

/* One send or receive. Unused ones lie in a list of the mover. */
struct ucx_operation {
    ucx_peer *peer;
    bool is_send;
    bool is_own; /* of the mover itself: the user is not told */
    bool is_over;
    bt_status status;
    uint64_t token;
    size_t bytes;
    ucp_dt_iov_t *iov; /* [iov_capacity], kept */
    uint32_t iov_count, iov_capacity;
    size_t header_bytes; /* with the prefix */
    uint8_t header[UCX_PREFIX_BYTES + XFER_HEADER_BYTES_MAX];
    ucx_operation *next;           /* in the list of done, waiting or free ones */
    ucx_operation *before, *after; /* in the peer's list */
};

typedef struct ucx_mapping {
    void *base;
    ucp_mem_h handle;
    struct ucx_mapping *next;
} ucx_mapping;

struct ucx_mover {
    xfer base;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_context_h pair_context; /* of the pairs' workers; NULL: all peers share `worker` */
    ucp_address_t *worker_address;
    uint8_t *address; /* prefix and worker_address */
    size_t address_bytes;
    ucx_peer *peers;
    ucx_mapping *mappings;
    ucx_operation *free_operations;
    ucx_operation *done, **done_end; /* over, not told yet; oldest first */
    uint32_t sends, sends_max;
    uint32_t busy_polls;
    int event_fd; /* of epoll, over UCX's and the timer */
    int timer_fd;
    bool is_timer_set;
    bool is_memory_only; /* the pairs' transports */
    bool is_destroying;
    bool has_broken;  /* some peer is UCX_PEER_BROKEN */
    bool has_closing; /* some peer is UCX_PEER_CLOSING */
};

/* ---- xfer_ucx.c ---- */

ucx_peer *xfer_ucx_find_peer(const ucx_mover *mover, xfer_peer id);
void xfer_ucx_break_peer(ucx_peer *peer, ucs_status_t status);
ucs_status_t xfer_ucx_open_endpoint(ucx_peer *peer, ucp_worker_h worker, const void *address,
                                    ucp_ep_h *out);
/* NULL, or a request that ends with the close. */
void *xfer_ucx_close_endpoint(ucx_peer *peer, ucp_ep_h endpoint);

/* ---- xfer_ucx_io.c ---- */

/* The connected peer that a header names and that meant this process, or NULL. */
ucx_peer *xfer_ucx_find_sender(const ucx_mover *mover, const uint8_t *header, size_t bytes);
/* UCX's callback for messages to the shared worker; arg is the mover. */
ucs_status_t xfer_ucx_on_message(void *arg, const void *header, size_t header_bytes, void *data,
                                 size_t bytes, const ucp_am_recv_param_t *param);
/* The same for a pair's worker; arg is the peer. */
ucs_status_t xfer_ucx_on_pair_message(void *arg, const void *header, size_t header_bytes,
                                      void *data, size_t bytes, const ucp_am_recv_param_t *param);
/* The mover's send. */
bt_status xfer_ucx_send(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                        const xfer_iov *iov, uint32_t iov_count, uint64_t token);
/* A message of the mover itself over `endpoint`; the payload lives until the peer is closed. */
BT_MUST_CHECK bt_status xfer_ucx_send_own(ucx_peer *peer, ucp_ep_h endpoint, unsigned id,
                                          const void *header, size_t header_bytes,
                                          const xfer_iov *payload);
/* Gives UCX a send that waited for the pair. */
void xfer_ucx_post_waiting(ucx_operation *op);
/* Ends every operation of the peer that is not over. UCX must not know them any more. */
void xfer_ucx_end_all(ucx_peer *peer, bt_status status);
/* Calls the user for every operation that is over. */
void xfer_ucx_tell_done(ucx_mover *mover);
void xfer_ucx_free_operations(ucx_mover *mover);

/* ---- xfer_ucx_pair.c ---- */

/* UCX's callback for UCX_PAIR_ID on the shared worker; arg is the mover. */
ucs_status_t xfer_ucx_on_pair(void *arg, const void *header, size_t header_bytes, void *data,
                              size_t bytes, const ucp_am_recv_param_t *param);
/* Makes the worker for a peer whose endpoint is open, and tells the peer its address. */
BT_MUST_CHECK bt_status xfer_ucx_pair_open(ucx_peer *peer);
/* What could not be done in a callback: the endpoint to an address that was told. */
void xfer_ucx_pair_go_on(ucx_peer *peer);
/* Its events do not wake the process any more. */
void xfer_ucx_pair_mute(ucx_peer *peer);
/* Destroys the worker: nothing of this peer is written or read by UCX any more. */
void xfer_ucx_pair_close(ucx_peer *peer);

/* ---- xfer_ucx_config.c ---- */

/* Which transports a mover uses, after the user's environment. */
typedef struct ucx_transports {
    bool has_pairs;      /* some are within one machine's memory: pairs have their own workers */
    bool is_memory_only; /* all are */
} ucx_transports;

/* Puts into the environment what UCX takes only from there (the settings of single transports); it
 * stays, because UCX reads it whenever a worker is made. Before there are threads. */
BT_MUST_CHECK bt_status xfer_ucx_set_transports(const xfer_ucx_options *options,
                                                ucx_transports *out, bt_error *error);
/* Reads UCX's configuration with our settings in it: of the shared worker, or of the pairs' when
 * is_pair. Release with ucp_config_release. */
BT_MUST_CHECK bt_status xfer_ucx_configure(const xfer_ucx_options *options, ucx_transports kinds,
                                           bool is_pair, ucp_config_t **out, bt_error *error);
/* UCX's status as one of ours: what ends an endpoint is PEER_GONE. */
bt_status xfer_ucx_status(ucs_status_t status);

#endif
