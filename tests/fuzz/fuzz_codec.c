/* A byte stream of any kind through framing and codec: it is refused, or gives messages that pass
 * the checks, and these survive another way through the codec unchanged. The first byte says in
 * which portions the stream arrives. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "proto/codec.h"
#include "proto/frame.h"

static void check_again(const proto_message *message) {
    static uint8_t header[PROTO_FRAME_HEADER_MAX];
    static proto_message again;
    size_t bytes = 0;
    bt_error error;
    BT_ASSERT(proto_message_check(message, &error) == BT_OK);
    BT_ASSERT(proto_encode(message, header, sizeof header, &bytes, &error) == BT_OK);
    BT_ASSERT(proto_decode(header, bytes, message->payload, message->payload_bytes, &again,
                           &error) == BT_OK);
    /* Text after a zero byte is not carried over, everything else is. */
    BT_ASSERT(message->kind == again.kind);
    BT_ASSERT(message->payload == again.payload);
    BT_ASSERT(memcmp(message, &again, offsetof(proto_message, payload)) == 0);
}

static bool take_frame(const frame_view *frame) {
    static proto_message message;
    bt_error error = {.text = ""};
    const bt_status status = proto_decode(frame->header, frame->header_bytes, frame->payload,
                                          frame->payload_bytes, &message, &error);
    if (status != BT_OK) {
        BT_ASSERT(status == BT_ERR_PEER_PROTOCOL);
        BT_ASSERT(error.text[0] != '\0');
        return false;
    }
    check_again(&message);
    return true;
}

static void feed(frame_reader *reader, const uint8_t *data, size_t bytes, size_t portion) {
    while (bytes > 0) {
        uint8_t *to;
        size_t wanted;
        bool is_whole;
        frame_view frame;
        frame_reader_want(reader, &to, &wanted);
        BT_ASSERT(wanted > 0);
        size_t part = wanted < portion ? wanted : portion;
        if (part > bytes) part = bytes;
        memcpy(to, data, part);
        data += part;
        bytes -= part;
        if (frame_reader_got(reader, part, &is_whole, &frame) != BT_OK) return;
        if (is_whole && !take_frame(&frame)) return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const bt_block_pool_options options = {.idle_bytes_max = 0};
    bt_block_pool *pool;
    frame_reader *reader;
    if (bytes == 0) return 0;
    BT_ASSERT(bt_block_pool_create(&options, &pool) == BT_OK);
    BT_ASSERT(frame_reader_create(pool, &reader) == BT_OK);
    feed(reader, data + 1, bytes - 1, 1u + data[0]);
    frame_reader_destroy(reader);
    bt_block_pool_destroy(pool);
    return 0;
}
