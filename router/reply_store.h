/* The row records of one reply (proto/row_stream.h), packed as they came, until they are formatted.
 * They are kept in memory and charged to the memory budget: in the blocks that they were received
 * in where these are held, else in blocks of the store's own. What comes while the budget is used
 * up goes to an unlinked temporary file, charged to the spill budget. A *place* is a position
 * between two records, from which they are read in order, any number of times.
 *
 * One owner at a time; the budgets are shared by all. */
#ifndef BT_ROUTER_REPLY_STORE_H
#define BT_ROUTER_REPLY_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/status.h"
#include "router/budget.h"

typedef struct reply_limits {
    budget memory;          /* --reply-memory */
    budget spill;           /* --reply-spill-bytes */
    const char *spill_path; /* folder of the temporary files */
} reply_limits;

typedef struct reply_block {
    struct reply_block *next;
    size_t charged; /* bytes of memory */
    size_t used;
    const uint8_t *bytes; /* [used], aligned to 4 */
    bt_block *held;       /* that they lie in; NULL: they lie behind this, [charged] */
} reply_block;

typedef struct reply_store {
    reply_limits *limits;
    reply_block *first, *last;
    size_t own_bytes; /* of the store's own blocks */
    int spill_fd;     /* -1: nothing was spilled */
    uint64_t spill_bytes;
    uint8_t *window; /* of the file, for reading */
    size_t window_capacity, window_used;
    uint64_t window_offset;
} reply_store;

typedef struct reply_place {
    const reply_block *block; /* NULL: in the file, or before the first record */
    size_t offset;
    bool is_in_file;
    uint64_t file_offset;
} reply_place;

void reply_store_init(reply_store *store, reply_limits *limits);
void reply_store_fini(reply_store *store);
/* Appends one whole record: it is held in `block`, which it lies in, or copied (NULL).
 * REQUEST_FULL when the spill budget is used up, WORKER_MEMORY, WORKER_IO. */
BT_MUST_CHECK bt_status reply_store_append(reply_store *store, const uint8_t *record, size_t bytes,
                                           bt_block *block);
/* Before the first record that is still kept. */
reply_place reply_store_begin(const reply_store *store);
/* Behind the last one. */
reply_place reply_store_end(const reply_store *store);
/* The record behind *place, which moves past it; borrowed until the next call. There must be one.
 * WORKER_IO, WORKER_MEMORY. */
BT_MUST_CHECK bt_status reply_store_next(reply_store *store, reply_place *place,
                                         const uint8_t **record_out, size_t *bytes_out);
/* Gives back the memory through which the file is read, until it is read again. */
void reply_store_rest(reply_store *store);
/* Records before place are not needed any more. */
void reply_store_drop_before(reply_store *store, const reply_place *place);

#endif
