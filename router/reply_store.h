/* The row records of one reply (proto/row_stream.h), packed as they came, until they are formatted.
 * They are kept in memory and charged to the memory budget; what comes while the budget is used up
 * goes to an unlinked temporary file, charged to the spill budget. A *place* is a position between
 * two records, from which they are read in order, any number of times.
 *
 * One owner at a time; the budgets are shared by all. */
#ifndef BT_ROUTER_REPLY_STORE_H
#define BT_ROUTER_REPLY_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "router/budget.h"

typedef struct reply_limits {
    budget memory;          /* --reply-memory */
    budget spill;           /* --reply-spill-bytes */
    const char *spill_path; /* folder of the temporary files */
} reply_limits;

typedef struct reply_block {
    struct reply_block *next;
    size_t capacity, used;
    uint8_t bytes[]; /* aligned to 8 */
} reply_block;

typedef struct reply_store {
    reply_limits *limits;
    reply_block *first, *last;
    size_t block_bytes; /* capacity of all blocks */
    int spill_fd;       /* -1: nothing was spilled */
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
/* Appends one whole record. REQUEST_FULL when the spill budget is used up, WORKER_MEMORY,
 * WORKER_IO. */
BT_MUST_CHECK bt_status reply_store_append(reply_store *store, const uint8_t *record, size_t bytes);
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
