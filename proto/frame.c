/* Incremental framing: prefix, header, payload, one after the other into memory of our own. */
#include "proto/frame.h"

#include "base/assert.h"
#include "base/little_endian.h"
#include "base/mem.h"

enum { PAYLOAD_ALIGNMENT = 64, PAYLOAD_BYTES_MIN = 4096 };

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
    uint8_t *payload;
    size_t payload_capacity;
    uint8_t prefix[PROTO_FRAME_PREFIX_BYTES];
    uint8_t header[PROTO_FRAME_HEADER_MAX];
};

void proto_frame_put_prefix(uint8_t out[PROTO_FRAME_PREFIX_BYTES], uint32_t header_bytes,
                            uint32_t payload_bytes) {
    bt_store_le32(out, header_bytes);
    bt_store_le32(out + 4, payload_bytes);
}

bt_status frame_reader_create(frame_reader **out) {
    frame_reader *reader = bt_calloc(1, sizeof *reader);
    if (reader == NULL) return BT_ERR_WORKER_MEMORY;
    *out = reader;
    return BT_OK;
}

void frame_reader_destroy(frame_reader *reader) {
    if (reader == NULL) return;
    bt_free(reader->payload);
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
    case READER_PAYLOAD: return reader->payload;
    }
    return NULL;
}

void frame_reader_want(frame_reader *reader, uint8_t **to_out, size_t *bytes_out) {
    *to_out = part_memory(reader) + reader->have;
    *bytes_out = part_bytes(reader) - reader->have;
}

/* Room for this frame's payload; what a source once needed it keeps. */
static bt_status make_room(frame_reader *reader) {
    if (reader->payload_bytes <= reader->payload_capacity) return BT_OK;
    size_t capacity = PAYLOAD_BYTES_MIN;
    while (capacity < reader->payload_bytes)
        capacity *= 2;
    uint8_t *payload = bt_calloc_aligned(PAYLOAD_ALIGNMENT, capacity);
    if (payload == NULL) return BT_ERR_WORKER_MEMORY;
    bt_free(reader->payload);
    reader->payload = payload;
    reader->payload_capacity = capacity;
    return BT_OK;
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
        .payload = reader->payload_bytes > 0 ? reader->payload : NULL,
        .payload_bytes = reader->payload_bytes,
    };
    return BT_OK;
}

bool frame_reader_is_idle(const frame_reader *reader) {
    return reader->part == READER_PREFIX && reader->have == 0;
}
