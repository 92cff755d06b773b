/* Incremental framing: prefix, header, payload, one after the other, each into its own memory. */
#include "proto/frame.h"

#include "base/assert.h"
#include "base/little_endian.h"
#include "base/mem.h"

typedef enum reader_part {
    READER_PREFIX,
    READER_HEADER,
    READER_PAYLOAD,
} reader_part;

struct frame_reader {
    reader_part part;
    size_t have; /* bytes of this part */
    uint32_t header_bytes;
    uint32_t payload_bytes;
    bt_block_pool *blocks;
    bt_block *payload; /* of this frame, or the last one; NULL before the first */
    uint8_t prefix[PROTO_FRAME_PREFIX_BYTES];
    uint8_t header[PROTO_FRAME_HEADER_MAX];
};

void proto_frame_put_prefix(uint8_t out[PROTO_FRAME_PREFIX_BYTES], uint32_t header_bytes,
                            uint32_t payload_bytes) {
    bt_store_le32(out, header_bytes);
    bt_store_le32(out + 4, payload_bytes);
}

bt_status frame_reader_create(bt_block_pool *blocks, frame_reader **out) {
    frame_reader *reader = bt_calloc(1, sizeof *reader);
    if (reader == NULL) return BT_ERR_WORKER_MEMORY;
    reader->blocks = blocks;
    *out = reader;
    return BT_OK;
}

void frame_reader_destroy(frame_reader *reader) {
    if (reader == NULL) return;
    bt_block_release(reader->payload);
    bt_free(reader);
}

static size_t part_bytes(const frame_reader *reader) {
    switch (reader->part) {
    case READER_PREFIX: return PROTO_FRAME_PREFIX_BYTES;
    case READER_HEADER: return reader->header_bytes;
    case READER_PAYLOAD: return reader->payload_bytes;
    }
    return 0;
}

static uint8_t *part_memory(frame_reader *reader) {
    switch (reader->part) {
    case READER_PREFIX: return reader->prefix;
    case READER_HEADER: return reader->header;
    case READER_PAYLOAD: return reader->payload->bytes;
    }
    return NULL;
}

void frame_reader_want(frame_reader *reader, uint8_t **to_out, size_t *bytes_out) {
    *to_out = part_memory(reader) + reader->have;
    *bytes_out = part_bytes(reader) - reader->have;
}

/* The last frame's block when nobody else has it and it fits: a block that is much larger than what
 * is in it would be a waste to hold. */
static bool is_fit(const bt_block *block, size_t bytes) {
    return block != NULL && !bt_block_is_shared(block) && block->capacity >= bytes &&
           block->capacity <= bytes + bytes / 8 + BT_BLOCK_BYTES_MIN;
}

static bt_status make_room(frame_reader *reader) {
    const size_t bytes = reader->payload_bytes;
    if (bytes == 0 || is_fit(reader->payload, bytes)) return BT_OK;
    bt_block_release(reader->payload);
    reader->payload = bt_block_acquire(reader->blocks, bytes);
    return reader->payload != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
}

static bt_status take_prefix(frame_reader *reader) {
    reader->header_bytes = bt_load_le32(reader->prefix);
    reader->payload_bytes = bt_load_le32(reader->prefix + 4);
    if (reader->header_bytes == 0 || reader->header_bytes > PROTO_FRAME_HEADER_MAX) {
        return BT_ERR_PEER_PROTOCOL;
    }
    if (reader->payload_bytes > PROTO_FRAME_PAYLOAD_MAX) return BT_ERR_PEER_PROTOCOL;
    return make_room(reader);
}

bt_status frame_reader_got(frame_reader *reader, size_t bytes, bool *is_whole_out,
                           frame_view *view_out) {
    BT_ASSERT(bytes <= part_bytes(reader) - reader->have);
    *is_whole_out = false;
    reader->have += bytes;
    if (reader->have < part_bytes(reader)) return BT_OK;
    reader->have = 0;
    if (reader->part == READER_PREFIX) {
        reader->part = READER_HEADER;
        return take_prefix(reader);
    }
    if (reader->part == READER_HEADER && reader->payload_bytes > 0) {
        reader->part = READER_PAYLOAD;
        return BT_OK;
    }
    reader->part = READER_PREFIX;
    *is_whole_out = true;
    *view_out = (frame_view){
        .header = reader->header,
        .header_bytes = reader->header_bytes,
        .payload = reader->payload_bytes > 0 ? reader->payload->bytes : NULL,
        .payload_bytes = reader->payload_bytes,
        .block = reader->payload_bytes > 0 ? reader->payload : NULL,
    };
    return BT_OK;
}

bool frame_reader_is_in_payload(const frame_reader *reader) {
    return reader->part == READER_PAYLOAD;
}

bool frame_reader_is_idle(const frame_reader *reader) {
    return reader->part == READER_PREFIX && reader->have == 0;
}
