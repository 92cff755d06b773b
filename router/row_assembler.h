/* Puts the row stream of one sample together again: payloads of frames in, whole records out.
 * Frames cut the stream anywhere. Records are handed on where they arrived; only one that a frame's
 * end cuts is copied, into a block of its size. Memory is bounded by that one record at the cap,
 * and the one handed on last. */
#ifndef BT_ROUTER_ROW_ASSEMBLER_H
#define BT_ROUTER_ROW_ASSEMBLER_H

#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/status.h"
#include "proto/row_check.h"

typedef struct row_assembler {
    row_expectation expect; /* of every record */
    const char *fault;      /* behind PEER_PROTOCOL: what was not as expected */
    bt_block_pool *blocks;  /* borrowed */
    bt_block *partial;      /* the beginning of a record, [used]; NULL: there is none */
    bt_block *handed[2];    /* what was copied and handed on by the last call */
} row_assembler;

/* Bytes of the stream, or whole records, and what they lie in: who wants them for longer than a
 * call holds the block; NULL: who does copies them. */
typedef struct row_bytes {
    const uint8_t *bytes;
    size_t count;
    bt_block *block;
} row_bytes;

/* Whole records in the order of the stream, 4-byte aligned; valid until the next call. The first
 * may be one that began in an earlier payload. */
typedef struct row_batches {
    row_bytes runs[2];
    uint32_t rows[2]; /* in each run */
    uint32_t count;   /* of runs */
} row_batches;

/* Borrows the pool. */
void row_assembler_init(row_assembler *a, const row_expectation *expect, bt_block_pool *blocks);
void row_assembler_fini(row_assembler *a);
/* Takes the next bytes of the stream (at most one frame's payload). PEER_PROTOCOL when a record is
 * not what is expected, and a->fault says why; WORKER_MEMORY; the stream is over then. */
BT_MUST_CHECK bt_status row_assembler_push(row_assembler *a, const row_bytes *payload,
                                           row_batches *out);
/* Bytes of a record that has begun and not ended. */
size_t row_assembler_pending(const row_assembler *a);

#endif
