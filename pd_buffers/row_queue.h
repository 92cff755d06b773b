/* Decode's queue of token rows of one sequence, between the sampler and the row stream. A row is
 * written once, as the record that travels (proto/row_stream.h), into a counted block of the
 * worker's pool; take() gives a part of a block, by reference, as the payload of a frame. So
 * between the sampler's arrays and the socket a row is copied once, and a queue that is emptied
 * uses the same warm memory again.
 *
 * Row 0 comes from the proven metadata row of the handoff, the others from decode's own steps. All
 * rows of a queue have the mask mode it was made for. Without masks nothing depends on the cap.
 *
 * Bounded: a row that would pass options.bytes_max bytes not yet taken is REQUEST_FULL, and the
 * caller must take first. A queue's blocks are together at most two and a half times its rows,
 * and one of ROW_BLOCK_BYTES more. Event thread. */
#ifndef BT_PD_BUFFERS_ROW_QUEUE_H
#define BT_PD_BUFFERS_ROW_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/status.h"
#include "proto/row.h"
#include "proto/row_stream.h"

typedef struct row_queue row_queue;

/* Of a block, when one row is less: the first one, and those of rows that pile up. */
enum { ROW_BLOCK_BYTES = 4096, ROW_BLOCK_BYTES_MAX = 256 * 1024 };

typedef struct row_queue_options {
    bt_block_pool *blocks; /* borrowed; the owner's thread is the queue's */
    uint32_t mask_mode;    /* row_mask_mode, the same for every row */
    uint32_t cap;          /* support entries of one row at most; with masks off unused */
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

/* Bytes that are queued and not taken. */
size_t row_queue_bytes(const row_queue *queue);
/* Rows pushed since the creation, and of them those whose last byte was taken. */
uint32_t row_queue_pushed(const row_queue *queue);
uint32_t row_queue_taken(const row_queue *queue);

/* A part of the stream, in a block of which the taker has a hold. */
typedef struct row_slice {
    bt_block *block;
    uint8_t *bytes; /* [count], aligned to 4 when no row was cut before it */
    size_t count;
} row_slice;

/* Takes the next bytes of the stream, at most bytes_max (> 0): as many whole rows as that allows
 * and one block holds, or the beginning of one that is longer. false: nothing is queued. Never
 * fails. */
BT_MUST_CHECK bool row_queue_take(row_queue *queue, size_t bytes_max, row_slice *out);
/* Forgets what is queued. */
void row_queue_clear(row_queue *queue);

#endif
