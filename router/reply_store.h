/* The row records of one sample (proto/row_stream.h), packed as they came, until they are
 * formatted. They are kept in memory and charged to the memory budget: in the blocks that they were
 * received in where these are held, else in blocks of the store's own. What comes while the budget
 * is used up goes to the file of the reply, charged to the spill budget. A *place* is a position
 * between two records, from which they are read in order, any number of times.
 *
 * One owner at a time, which is that of the file. */
#ifndef BT_ROUTER_REPLY_STORE_H
#define BT_ROUTER_REPLY_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/status.h"
#include "router/reply_spill.h"

typedef struct reply_block {
    struct reply_block *next;
    size_t charged;       /* bytes of memory; of a part of the file 0 */
    size_t used;          /* bytes of records */
    const uint8_t *bytes; /* [used], aligned to 4; NULL: they are in the file */
    bt_block *held;       /* that they lie in; NULL: they lie behind this, [charged] */
    reply_part part;      /* of the file */
} reply_block;

typedef struct reply_store {
    reply_spill *spill;
    reply_block *first, *last;
    size_t own_bytes; /* of the store's own blocks */
    uint8_t *window;  /* of the file, for reading */
    size_t window_capacity, window_used;
    uint64_t window_offset;
} reply_store;

typedef struct reply_place {
    const reply_block *block; /* NULL: before the first record */
    size_t offset;
} reply_place;

/* Borrows the file, which goes after the store. */
void reply_store_init(reply_store *store, reply_spill *spill);
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
