/* Puts the row stream of one attempt together again: payloads of frames in, whole records out.
 * Frames cut the stream anywhere. Records are handed on where they arrived when they can be, so
 * that only what spans frames is copied; memory is bounded by one record at the cap plus one frame.
 */
#ifndef BT_ROUTER_ROW_ASSEMBLER_H
#define BT_ROUTER_ROW_ASSEMBLER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/row_check.h"

typedef struct row_assembler {
    row_expectation expect; /* of every record */
    const char *fault;      /* behind PEER_PROTOCOL: what was not as expected */
    uint8_t *partial;       /* [capacity], the bytes from the last call that are not handed on */
    size_t used, capacity;
    size_t handed; /* leading bytes of partial that were handed on by the last call */
} row_assembler;

typedef struct row_batch {
    const uint8_t *records; /* 4-byte aligned, whole records; valid until the next call */
    size_t bytes;
    uint32_t count;
} row_batch;

void row_assembler_init(row_assembler *a, const row_expectation *expect);
void row_assembler_fini(row_assembler *a);
/* Takes the next `count` bytes of the stream (at most one frame's payload). PEER_PROTOCOL when a
 * record is not what is expected, and a->fault says why; WORKER_MEMORY; the stream is over then. */
BT_MUST_CHECK bt_status row_assembler_push(row_assembler *a, const uint8_t *bytes, size_t count,
                                           row_batch *batch_out);
/* Bytes of a record that has begun and not ended. */
size_t row_assembler_pending(const row_assembler *a);

#endif
