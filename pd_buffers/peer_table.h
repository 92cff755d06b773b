/* The peers of one worker over a mover: who is connected, who proved to work both ways, who is
 * being closed.
 *
 *   PEER from the router          hello came back
 *   ──▶ CLOSED ──▶ CONNECTED ───────────────────▶ PAIRED
 *         ▲            │ failed, stuck, late, PEER   │
 *         │            │ again, PEER_GONE            │
 *         └─ closed ── CLOSING ◀─────────────────────┘
 *
 * The mover forbids disconnect and connect inside its callbacks; so failures are only noted here
 * and peer_table_turn acts. A pair that breaks is told to the router, which names the peer to both
 * sides again. A peer that is named again while it is open is closed to the end first. Event
 * thread. Pure over the mover's table. */
#ifndef BT_PD_BUFFERS_PEER_TABLE_H
#define BT_PD_BUFFERS_PEER_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "pd_buffers/xfer.h"
#include "proto/message.h"

enum {
    PEER_TABLE_PEERS_MAX = 128,
    PEER_TABLE_HELLO_US = 10 * 1000 * 1000, /* from connect until a hello went both ways */
    PEER_TABLE_PAUSE_US = 200 * 1000,       /* from a closed endpoint to the next connect */
};

typedef enum peer_state {
    PEER_NONE,      /* not in use */
    PEER_CLOSED,    /* no endpoint; the next turn behind next_us connects if that is wanted */
    PEER_CONNECTED, /* endpoint open, not proven; deadline next_us */
    PEER_PAIRED,    /* a hello went both ways */
    PEER_CLOSING,   /* disconnect was called */
} peer_state;

typedef struct peer_entry {
    peer_state state;
    xfer_peer peer;
    bool wants_connect; /* the router named it since the last connect */
    bool wants_hello;   /* connected, and the hello is not said yet */
    bool wants_close;   /* noted by a callback; the next turn disconnects */
    bool is_removed;    /* forget it once it is closed */
    uint64_t next_us;
    char host[PROTO_HOST_MAX];
    uint32_t address_bytes;
    uint8_t address[PROTO_ADDRESS_MAX];
} peer_entry;

typedef struct peer_table_ops {
    /* Says hello on a new endpoint; REQUEST_FULL = later. */
    bt_status (*say_hello)(void *context, xfer_peer peer);
    /* The pair works (OK), or broke, or could not be made. Never for what the router removed. */
    void (*on_pair)(void *context, xfer_peer peer, bt_status status);
    void *context;
} peer_table_ops;

typedef struct peer_table {
    xfer *mover; /* borrowed */
    peer_table_ops ops;
    peer_entry *entries; /* [PEER_TABLE_PEERS_MAX], owned */
} peer_table;

BT_MUST_CHECK bt_status peer_table_init(peer_table *table, xfer *mover, const peer_table_ops *ops);
void peer_table_fini(peer_table *table);

/* The router named a peer: connects at a coming turn, after closing what there is to this peer.
 * CALLER_LIMIT when the table is full. */
BT_MUST_CHECK bt_status peer_table_add(peer_table *table, const proto_peer *peer, uint64_t now_us);
/* The router says it is gone: closes and forgets. Unknown peers are ignored. */
void peer_table_remove(peer_table *table, xfer_peer peer);
void peer_table_remove_all(peer_table *table);

/* From the mover's callbacks. */
void peer_table_on_hello(peer_table *table, xfer_peer peer);
/* The endpoint broke, or memory must be got back from it. */
void peer_table_on_failed(peer_table *table, xfer_peer peer, bt_status status);
void peer_table_on_closed(peer_table *table, xfer_peer peer, uint64_t now_us);

/* Connects, disconnects and says hello; outside the mover's callbacks. */
void peer_table_turn(peer_table *table, uint64_t now_us);

/* NULL when it is not known. Borrowed until the next call that changes the table. */
const peer_entry *peer_table_find(const peer_table *table, xfer_peer peer);
/* An endpoint is open and may be used. */
bool peer_table_is_usable(const peer_table *table, xfer_peer peer);
/* No endpoint is open or closing. */
bool peer_table_is_quiet(const peer_table *table);

#endif
