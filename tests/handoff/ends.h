/* A prefill end and a decode end of the handoff for tests, on any mover: pools, the state machine,
 * and what a worker does with its events (release, quarantine, disconnect), with a record of what
 * happened to each attempt. Memory of a released page is overwritten, so that a late reader or
 * writer shows. Every wrong turn fails the running test. */
#ifndef BT_TESTS_HANDOFF_ENDS_H
#define BT_TESTS_HANDOFF_ENDS_H

#include <stdbool.h>
#include <stdint.h>

#include "pd_buffers/handoff.h"
#include "pd_buffers/row_queue.h"
#include "sample.h"

enum {
    ENDS_ATTEMPTS_MAX = 64, /* in hand at once */
    ENDS_PAGES_MAX = 256,   /* of one prompt */
    ENDS_STEPS = 2,         /* rows that decode adds behind row 0 */
    ENDS_PEERS_MAX = 8,
    ENDS_SAMPLES_MAX = 8, /* rows of one attempt */
};

typedef struct end_options {
    xfer *mover;
    uint64_t incarnation;
    uint32_t page_count;
    size_t page_bytes;
    uint32_t layers;
    uint32_t page_tokens;
    uint32_t cap;
    uint32_t rows; /* slots */
    record_checksum checksum;
    size_t chunk_bytes_max;
    uint32_t sends_in_flight;
    bt_clock clock;
} end_options;

/* What happened to one attempt at one end, and what it holds. */
typedef struct end_attempt {
    proto_attempt id; /* counter = the sample's number; 0: unused */
    sample data;
    uint32_t ready, acked, failed, quiet;
    bt_status status;
    char text[PROTO_TEXT_MAX];
    uint32_t page_count;
    uint32_t pages[ENDS_PAGES_MAX];
    row_slot slots[ENDS_SAMPLES_MAX]; /* of a decode end */
    bool is_holding;
    bool is_intact; /* ready with the right bytes, rows and streams */
} end_attempt;

typedef struct end_peer {
    xfer_peer id;
    uint32_t hellos, failed, closed, stuck;
    bool wants_disconnect;
} end_peer;

typedef struct end {
    end_options options;
    kv_pool *pages;
    row_pool *rows;
    bt_block_pool *blocks;      /* of row queues */
    handoff_sender *sender;     /* of a prefill end */
    handoff_receiver *receiver; /* of a decode end */
    end_attempt attempts[ENDS_ATTEMPTS_MAX];
    end_peer peers[ENDS_PEERS_MAX];
} end;

/* Pages start filled with a marker. Both abort the test when they fail. */
end *end_create_prefill(const end_options *options);
end *end_create_decode(const end_options *options);
/* The state machine first, then the mover (destroyed too), then the memory. */
void end_destroy(end *e);

/* connect and hello. */
bt_status end_connect(end *e, xfer_peer peer, const uint8_t *address, size_t address_bytes);
/* What a worker's own loop does: disconnects what failed or is stuck. */
void end_loop(end *e);
end_peer *end_find_peer(end *e, xfer_peer peer);
end_attempt *end_find(end *e, uint64_t number);

/* Acquires pages and slots and expects the attempt of that sample. */
bt_status end_expect(end *e, const sample *s, xfer_peer prefill, uint64_t deadline_us);
/* Acquires and fills pages, begins, hands over all pages (in runs of run_pages) and the
 * rows, the last sample's first. slots [sample_count]. */
bt_status end_send(end *e, const sample *s, xfer_peer decode, const row_slot *slots,
                   uint64_t deadline_us, uint32_t run_pages);
void end_cancel(end *e, uint64_t number);

/* All pages and slots are back, the state machine has nothing in hand, each attempt ended once, and
 * nobody wrote into free pages. */
void end_assert_clean(end *e);

#endif
