/* What a test (the controller) and its node processes tell each other, one struct per packet of a
 * local socket: the part that the router plays in a cluster. */
#ifndef BT_TESTS_HANDOFF_NOTE_H
#define BT_TESTS_HANDOFF_NOTE_H

#include <stdint.h>

#include "pd_buffers/row_pool.h"
#include "pd_buffers/xfer.h"
#include "sample.h"

enum { NOTE_ADDRESS_MAX = 4096, NOTE_SAMPLES_MAX = 8 };

typedef enum note_kind {
    /* controller -> node */
    NOTE_CONNECT = 1, /* peer, address */
    NOTE_EXPECT,      /* decode: data, peer */
    NOTE_SEND,        /* prefill: data, peer, slots */
    NOTE_CANCEL,      /* data.number */
    NOTE_FINISH,      /* check that nothing is held, and end */
    /* node -> controller */
    NOTE_STARTED = 100, /* peer = itself, address */
    NOTE_PAIRED,        /* peer: hellos went both ways */
    NOTE_EXPECTED,      /* data.number, slots, or status */
    NOTE_CHUNKS,        /* decode: chunks received in all; after each one */
    NOTE_DONE,          /* data.number, status: OK = ready or acked; else it failed and is quiet */
    NOTE_PEER_FAILED,   /* peer */
    NOTE_PEER_CLOSED,   /* peer */
} note_kind;

typedef struct note {
    note_kind kind;
    int32_t status;
    xfer_peer peer;
    sample data;
    row_slot slots[NOTE_SAMPLES_MAX];
    uint64_t chunks;
    uint32_t deadline_ms;
    uint32_t run_pages;
    uint32_t address_bytes;
    uint8_t address[NOTE_ADDRESS_MAX];
} note;

#endif
