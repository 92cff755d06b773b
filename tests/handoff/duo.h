/* One prefill end and one decode end on a stepped xfer_loop with a clock that the test sets: the
 * fixture of the loop tests. */
#ifndef BT_TESTS_HANDOFF_DUO_H
#define BT_TESTS_HANDOFF_DUO_H

#include <stdbool.h>
#include <stdint.h>

#include "ends.h"
#include "pd_buffers/xfer_loop.h"

enum {
    DUO_PAGE_TOKENS = 4,
    DUO_LAYERS = 4,
    DUO_PAGE_BYTES = 1024,
    DUO_CAP = 16,
    DUO_PREFILL_NUMBER = 1, /* loop addresses; worker ids too */
    DUO_DECODE_NUMBER = 2,
};

typedef struct duo_options {
    size_t chunk_bytes_max; /* 0: four pages */
    size_t page_bytes;      /* 0: DUO_PAGE_BYTES */
    size_t part_bytes;      /* 0: a page */
    uint32_t sends_max;
    uint32_t sends_in_flight;
    record_checksum checksum;
    bool is_checksum_given;
} duo_options;

typedef struct duo {
    duo_options options;
    xfer_loop_network *network;
    end *prefill, *decode;
    xfer_peer prefill_peer, decode_peer; /* who they are to each other */
    uint64_t next_incarnation;
    uint64_t now_us;
    uint64_t random;
} duo;

/* With both connected and hellos exchanged. */
duo *duo_create(const duo_options *options);
/* Asserts that both are clean first. */
void duo_destroy(duo *d);

/* Kills one end (its mover, its memory) or starts it anew under another incarnation. */
void duo_kill_prefill(duo *d);
void duo_kill_decode(duo *d);
void duo_start_prefill(duo *d);
void duo_start_decode(duo *d);
/* Connects what is not connected, and runs until the hellos are through. */
void duo_connect(duo *d);

/* Starts the handoff of a sample. */
void duo_begin(duo *d, const sample *s);
/* One step of the network chosen at random, then both loops; false when nothing can happen. */
bool duo_step_random(duo *d);
/* In order until nothing happens any more, both loops included. */
void duo_run(duo *d);
/* Sets the clock forward and ticks both ends, then runs. */
void duo_wait(duo *d, uint64_t us);
uint32_t duo_random(duo *d, uint32_t below);
/* The first possible event of a kind; false when there is none. */
bool duo_find_event(const duo *d, xfer_loop_event_kind kind, uint32_t *index_out);

#endif
