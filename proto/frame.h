/* The framing under the codec, for any source of bytes:
 *   u32 header bytes | u32 payload bytes | header | payload      (little endian)
 * A frame_reader takes bytes in any portions and gives whole frames. Its memory is bounded by the
 * limits of proto/message.h. A payload lies in a block of its own, of its size: who wants it for
 * longer than the reader does holds the block, and the reader goes on with another. Pure; one
 * owner. */
#ifndef BT_PROTO_FRAME_H
#define BT_PROTO_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/status.h"
#include "proto/message.h"

enum { PROTO_FRAME_PREFIX_BYTES = 8 };

void proto_frame_put_prefix(uint8_t out[PROTO_FRAME_PREFIX_BYTES], uint32_t header_bytes,
                            uint32_t payload_bytes);

typedef struct frame_reader frame_reader;

typedef struct frame_view {
    const uint8_t *header;
    size_t header_bytes;
    void *payload; /* aligned to 16 bytes; NULL when payload_bytes is 0 */
    size_t payload_bytes;
    bt_block *block; /* that the payload lies in; NULL without one */
} frame_view;

/* Borrows the pool. */
BT_MUST_CHECK bt_status frame_reader_create(bt_block_pool *blocks, frame_reader **out);
void frame_reader_destroy(frame_reader *reader);

/* Where the next bytes of the source belong and how many may be written there; never 0. */
void frame_reader_want(frame_reader *reader, uint8_t **to_out, size_t *bytes_out);
/* `bytes` (at most what was wanted) were written there. *is_whole_out: *view_out is a frame, valid
 * until the next call. PEER_PROTOCOL when the prefix breaks a limit, WORKER_MEMORY; the reader is
 * of no use then. */
BT_MUST_CHECK bt_status frame_reader_got(frame_reader *reader, size_t bytes, bool *is_whole_out,
                                         frame_view *view_out);
/* Within a payload. */
bool frame_reader_is_in_payload(const frame_reader *reader);
/* Between two frames: a source that ends elsewhere was cut off. */
bool frame_reader_is_idle(const frame_reader *reader);

#endif
