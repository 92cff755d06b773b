/* A worker's membership in its cluster: the session with the router, the row slots that the cluster
 * record and the vocabulary size, and the peers that the router names. What prefill and decode have
 * in common about joining; each core embeds one and fills in what is its own through the table.
 *
 *   WELCOME: the record is adopted. Once the last session is at rest (no attempt, no endpoint), the
 *   row slots fit that size and the core has made its end of the handoff, streams is dialled; when
 * it is open, READY is sent. Whatever ends the session ends the core's attempts and closes peers.
 *
 * Event thread; pure over the mover's table. */
#ifndef BT_PD_BUFFERS_MEMBERSHIP_H
#define BT_PD_BUFFERS_MEMBERSHIP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/peer_table.h"
#include "pd_buffers/row_pool.h"
#include "pd_buffers/xfer.h"
#include "proto/message.h"
#include "proto/row.h"
#include "proto/worker_session.h"

/* Towards the program; a core passes on what its own table says. */
typedef struct membership_program {
    void (*send)(void *context, proto_lane lane, proto_message *message);
    void (*open_streams)(void *context);
    void (*hang_up)(void *context, const char *why);
    void (*on_refused)(void *context, const char *text);
    void (*on_broken)(void *context, bt_status status, const char *text);
    void *context;
} membership_program;

/* Towards the core. */
typedef struct membership_ops {
    void (*end_attempts)(void *context); /* without a word to the router */
    bool (*is_at_rest)(void *context);   /* no attempt is in hand, no ack unsent */
    /* Pools and mover->self are there: makes the core's end of the handoff anew. */
    bt_status (*create_end)(void *context);
    bt_status (*say_hello)(void *context, xfer_peer peer);
    void (*fill_ready)(void *context, proto_ready *ready); /* all but the address and the rows */
    void (*fill_pong)(void *context, proto_ping *pong);    /* all but the sequence and the rows */
    void *context;
} membership_ops;

typedef struct membership_options {
    proto_hello hello;
    bt_clock clock;
    xfer *mover;        /* borrowed */
    uint32_t row_slots; /* of the row pool */
    membership_program program;
    membership_ops ops;
} membership_options;

/* Plain data; read freely, changed only by the functions here. */
typedef struct membership {
    membership_options options;
    const char *component; /* of log lines: "decode" */
    worker_session session;
    peer_table peers;
    row_pool *rows; /* NULL before the first welcome */
    bool is_sized;  /* rows and the core's end fit this session's record */
    bool is_broken; /* on_broken was called: pools cannot be had */
    bool wants_hang_up;
    char hang_up_why[PROTO_TEXT_MAX];
} membership;

BT_MUST_CHECK bt_status membership_init(membership *m, const membership_options *options);
/* Frees the row pool: the mover uses it no more. */
void membership_fini(membership *m);

void membership_on_open(membership *m, proto_lane lane);
/* Takes what is about joining. true: the message is for the core, which is serving; false: it was
 * taken, or it was out of place and the next turn hangs up. is_stream_kind says on which connection
 * this kind belongs. */
BT_MUST_CHECK bool membership_on_message(membership *m, proto_lane lane,
                                         const proto_message *message, bool is_stream_kind);
/* A connection is gone. */
void membership_end(membership *m);
/* Notes that the connections are to be closed at the next turn; the first reason stays. */
void membership_hang_up(membership *m, const char *format, ...) BT_PRINTF(2, 3);
/* A message of a kind that has no business here. */
void membership_reject(membership *m, const proto_message *message);
/* For the core's end of the handoff: what it says of peers goes to the peer table. */
handoff_peer_events membership_peer_events(membership *m);
/* Hangs up, sizes, dials, says READY, connects and closes peers: what has come due. */
void membership_turn(membership *m);
/* Deadlines; before a turn. */
void membership_tick(membership *m);

static inline bool membership_is_serving(const membership *m) {
    return m->session.state == WORKER_SESSION_SERVING;
}
/* The cluster's cap, as users know it; for sentences. */
static inline uint32_t membership_cap(const membership *m) {
    return m->session.record.sampling_mask_max_tokens;
}
/* Support entries of one row at most, in this session: what slots, queues and arrays of rows are
 * sized by, here and at every peer. */
static inline uint32_t membership_row_entries(const membership *m) {
    return row_entries_max(membership_cap(m), m->options.hello.vocab_size);
}
/* The epoch of the weights that the worker draws with. A step reads it once, when it starts. */
static inline uint64_t membership_weights_version(const membership *m) {
    return m->session.record.weights_version;
}
static inline uint32_t membership_rows_total(const membership *m) {
    return m->rows != NULL ? row_pool_total_count(m->rows) : 0;
}
static inline uint32_t membership_rows_free(const membership *m) {
    return m->rows != NULL ? row_pool_free_count(m->rows) : 0;
}

#endif
