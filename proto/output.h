/* Bytes on their way to a socket. Short pieces (heads of frames, small payloads) are gathered in
 * blocks, where they lie one behind the other; long payloads are kept by reference and never
 * copied. One system call writes many of both. One owner, the event thread. */
#ifndef BT_PROTO_OUTPUT_H
#define BT_PROTO_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "proto/message.h"

/* A payload of less is copied: a reference costs more than so short a copy. */
enum { PROTO_OUTPUT_COPY_BYTES = 1024 };

/* What keeps a run of bytes valid until it is written. */
typedef struct proto_output_piece {
    const uint8_t *bytes;
    size_t count;
    bt_block *block; /* a hold, or NULL */
    void *owned;     /* a bt_malloc block, or NULL */
} proto_output_piece;

typedef struct proto_output {
    bt_block_pool *blocks;
    proto_output_piece *pieces; /* a ring [capacity], a power of two */
    size_t first, count, capacity;
    bt_block *gathering; /* where the next short piece goes; a hold, or NULL */
    size_t bytes;        /* of all pieces */
} proto_output;

/* Borrows the pool. */
void proto_output_init(proto_output *output, bt_block_pool *blocks);
void proto_output_fini(proto_output *output);
/* Both false when memory is out; the stream is broken then. Copied. */
BT_MUST_CHECK bool proto_output_add(proto_output *output, const void *bytes, size_t count);
/* Takes the payload, in any case. */
BT_MUST_CHECK bool proto_output_add_payload(proto_output *output, proto_message *message);
/* Writes until all is written, bytes_max were, or the socket takes no more: 0, or its errno, EAGAIN
 * included. */
BT_MUST_CHECK int proto_output_write(proto_output *output, int fd, size_t bytes_max);

#endif
