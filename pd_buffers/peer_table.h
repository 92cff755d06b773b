/* The peers of one worker over a mover: who is connected, who proved to work both ways, who is
 * being closed and connected again.
 *
 *        add            hello came back
 *   ──▶ CONNECTED ──────────────────▶ PAIRED
 *          │ ▲  failed, stuck, removed   │
 *          │ └──────── retry ────────┐   │
 *          ▼                         │   ▼
 *        CLOSING ──on_closed──▶ BROKEN (waits) or, when removed, gone
 *
 * The mover forbids disconnect and connect inside its callbacks; so failures are only noted here
 * and peer_table_turn acts. Decode is the one that proves: it says hello until one comes back;
 * prefill answers. Event thread. Pure over the mover's table. */
#ifndef BT_PD_BUFFERS_PEER_TABLE_H
#define BT_PD_BUFFERS_PEER_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "pd_buffers/xfer.h"
#include "proto/message.h"

enum {
    PEER_TABLE_PEERS_MAX = 128,
    PEER_TABLE_HELLO_US = 200 * 1000, /* between hellos that are not answered */
    PEER_TABLE_RETRY_US = 500 * 1000, /* from a closed endpoint to the next connect */
};

typedef enum peer_state {
    PEER_NONE,      /* not in use */
    PEER_CONNECTED, /* endpoint open, not proven */
    PEER_PAIRED,    /* a hello went both ways */
    PEER_CLOSING,   /* disconnect was called */
    PEER_BROKEN,    /* closed; connects again at its time */
} peer_state;

typedef struct peer_entry {
    peer_state state;
    xfer_peer peer;
    bool wants_close; /* noted by a callback; the next turn disconnects */
    bool wants_hello; /* the next turn says hello */
    bool is_removed;  /* forget it once it is closed */
    uint64_t next_us; /* of the next hello or connect */
    char host[256];
    uint32_t address_bytes;
    uint8_t address[PROTO_ADDRESS_MAX];
} peer_entry;

typedef struct peer_table_ops {
    /* Sends a hello; REQUEST_FULL = later. */
    bt_status (*say_hello)(void *context, xfer_peer peer);
    /* The pair works (OK), or no longer does. */
    void (*on_pair)(void *context, xfer_peer peer, bt_status status);
    void *context;
} peer_table_ops;

typedef struct peer_table {
    xfer *mover; /* borrowed */
    peer_table_ops ops;
    bool is_prover;      /* decode */
    peer_entry *entries; /* [PEER_TABLE_PEERS_MAX], owned */
} peer_table;

BT_MUST_CHECK bt_status peer_table_init(peer_table *table, xfer *mover, bool is_prover,
                                        const peer_table_ops *ops);
void peer_table_fini(peer_table *table);

/* The router named a peer: connects at the next turn. CALLER_LIMIT when the table is full; a peer
 * that is there already is left alone. */
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
