/* The temporary file of one reply: what the stores of its samples and prompts cannot hold in
 * memory. One file and one descriptor however many samples spill, opened when the first one does,
 * without a name. Each store has *parts* of it to itself, so that what it reads lies together; a
 * part that was given back is a hole, its bytes are free again.
 *
 * Bytes are charged to the spill budget when they are written, and given back with their part; or,
 * on a file system that cannot make holes, with the file. One owner at a time; the budgets are
 * shared by all. */
#ifndef BT_ROUTER_REPLY_SPILL_H
#define BT_ROUTER_REPLY_SPILL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "router/budget.h"

typedef struct reply_limits {
    budget memory;          /* --reply-memory */
    budget spill;           /* --reply-spill-bytes */
    const char *spill_path; /* folder of the temporary files */
} reply_limits;

typedef struct reply_spill {
    reply_limits *limits;
    int fd;              /* -1: there is no file */
    uint64_t end;        /* of all parts so far */
    uint64_t kept_bytes; /* given back, but still in the file */
} reply_spill;

typedef struct reply_part {
    uint64_t at; /* in the file */
    size_t room; /* bytes that it may have */
    size_t used; /* bytes that were written, from its beginning */
} reply_part;

void reply_spill_init(reply_spill *spill, reply_limits *limits);
/* After every part was given back. */
void reply_spill_fini(reply_spill *spill);
/* A part with room for at least that many bytes. WORKER_IO. */
BT_MUST_CHECK bt_status reply_spill_take(reply_spill *spill, size_t bytes, reply_part *part_out);
void reply_spill_give(reply_spill *spill, const reply_part *part);
/* Behind what the part has. REQUEST_FULL when the budget is used up, WORKER_IO. */
BT_MUST_CHECK bt_status reply_spill_write(reply_spill *spill, reply_part *part,
                                          const uint8_t *bytes, size_t count);
BT_MUST_CHECK bt_status reply_spill_read(const reply_spill *spill, uint64_t at, uint8_t *out,
                                         size_t count);

#endif
