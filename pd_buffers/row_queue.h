/* Decode's queue of token rows of one sequence, between the sampler and the row stream. Rows lie in
 * counted blocks of the worker's pool as the records that travel (proto/row_stream.h). The sampler
 * draws the support of a row straight into the next record (row_queue_reserve), push() writes what
 * else is in it, take() gives a part of a block, by reference, as the payload of a frame: between
 * the sampler and the socket the support is not copied at all.
 *
 * Row 0 comes from the proven metadata row of the handoff, the others from decode's own steps. All
 * rows of a queue have the mask mode it was made for. Without masks nothing depends on the cap.
 *
 * Bounded: a row that would pass options.bytes_max bytes not yet taken is REQUEST_FULL, and the
 * caller must take first. A block has room for two rows at the cap, or for as much again as is
 * queued, and is left for the next one when a row at the cap does not fit any more; so the blocks
 * of a queue are together at most five times bytes_max. Event thread. */
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
    uint32_t cap;          /* support entries of one row at most (row_entries_max); with masks off
                            * unused */
    uint32_t top_logprobs, logprob_ids; /* of every row, as asked for */
    size_t bytes_max; /* of all queued rows as records; at least one row at the cap */
} row_queue_options;

/* CALLER_ARGUMENT for an unknown mode or a bytes_max below one row. Returns owned. */
BT_MUST_CHECK bt_status row_queue_create(const row_queue_options *options, row_queue **out);
void row_queue_destroy(row_queue *queue);

/* Appends row 0. The row is proven and has the queue's mask mode, else CALLER_ARGUMENT; more than
 * cap entries: CALLER_LIMIT; no memory: WORKER_MEMORY. Copied. */
BT_MUST_CHECK bt_status row_queue_push_first(row_queue *queue, const metadata_row *row);
/* Makes room for the support of the next row, at the cap, and says where its ids go; in support
 * mode the log-probabilities follow, best right behind the ids. Another thread may write there
 * until the row is pushed; a row that is not is as if nothing had been reserved. Of a queue with
 * masks. WORKER_MEMORY. */
BT_MUST_CHECK bt_status row_queue_reserve(row_queue *queue, int32_t **ids_out);
/* Appends one row of decode's own; errors as above. What lies in the reserved room is not copied.
 */
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

#endif
