/* Decode's queue of token rows of one sequence, between the sampler and the row stream: a growing
 * flat table (one entry per row; all ids in one array, all log-probabilities in another, what was
 * asked for beside them in two more), so that a row costs no allocation of its own. take() writes
 * everything queued as row-stream records (proto/row_stream.h) and empties the queue; the memory is
 * kept for the next rows.
 *
 * Row 0 comes from the proven metadata row of the handoff, the others from decode's own steps. All
 * rows of a queue have the mask mode it was made for. Without masks nothing depends on the cap.
 * Bounded: a row that would pass options.bytes_max encoded bytes is REQUEST_FULL, and the caller
 * must take first. Event thread. */
#ifndef BT_PD_BUFFERS_ROW_QUEUE_H
#define BT_PD_BUFFERS_ROW_QUEUE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/row.h"
#include "proto/row_stream.h"

typedef struct row_queue row_queue;

typedef struct row_queue_options {
    uint32_t mask_mode; /* row_mask_mode, the same for every row */
    uint32_t cap;       /* support entries of one row at most; with masks off unused */
    uint32_t top_logprobs, logprob_ids; /* of every row, as asked for */
    size_t bytes_max; /* of all queued rows as records; at least one row at the cap */
} row_queue_options;

/* CALLER_ARGUMENT for an unknown mode or a bytes_max below one row. Returns owned. */
BT_MUST_CHECK bt_status row_queue_create(const row_queue_options *options, row_queue **out);
void row_queue_destroy(row_queue *queue);

/* Appends row 0. The row is proven and has the queue's mask mode, else CALLER_ARGUMENT; more than
 * cap entries: CALLER_LIMIT; no memory: WORKER_MEMORY. Copied. */
BT_MUST_CHECK bt_status row_queue_push_first(row_queue *queue, const metadata_row *row);
/* Appends one row of decode's own; errors as above. Copied. */
BT_MUST_CHECK bt_status row_queue_push(row_queue *queue, const token_row *row);

uint32_t row_queue_count(const row_queue *queue);
/* Bytes that take will write. */
size_t row_queue_bytes(const row_queue *queue);
/* Writes the queued rows at out [row_queue_bytes], in order, and empties the queue. Returns the
 * bytes written. */
size_t row_queue_take(row_queue *queue, uint8_t *out, size_t out_bytes);
/* Empties the queue; its memory is kept. For reuse by another sequence of the same mode. */
void row_queue_clear(row_queue *queue);

#endif
