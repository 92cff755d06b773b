/* Puts the row stream of one attempt together again: payloads of frames in, whole records out.
 * Frames cut the stream anywhere. Records are handed on where they arrived when they can be, so
 * that only what spans frames is copied; memory is bounded by one record at the cap plus one frame.
 */
#ifndef BT_ROUTER_ROW_ASSEMBLER_H
#define BT_ROUTER_ROW_ASSEMBLER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* What every record of the stream must look like. */
typedef struct row_expectation {
    uint32_t cap;       /* support entries */
    uint32_t mask_mode; /* as asked for */
    uint32_t has_logprob;
    uint32_t vocab_size;  /* tokens are below it; 0 = not known */
    uint32_t vocab_limit; /* ids from here on are not drawn; 0 = all are */
    uint32_t top_count;   /* top log-probabilities: fewer only where the vocabulary is smaller */
    uint32_t id_logprob_count;
} row_expectation;

typedef struct row_assembler {
    row_expectation expect;
    uint8_t *partial; /* [capacity], the bytes from the last call that are not handed on */
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
 * record is not what is expected, WORKER_MEMORY; the stream is over then. */
BT_MUST_CHECK bt_status row_assembler_push(row_assembler *a, const uint8_t *bytes, size_t count,
                                           row_batch *batch_out);
/* Bytes of a record that has begun and not ended. */
size_t row_assembler_pending(const row_assembler *a);

#endif
