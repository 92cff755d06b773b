/* Between proto_message and the protobuf header of a frame. Everything that arrives is validated
 * here (sizes, enums, texts, counts, finite numbers), so that the cores see only messages that
 * proto_message_check accepts. Pure; no state, any thread. Unpacking allocates from a bounded
 * stack arena, never from the heap. */
#ifndef BT_PROTO_CODEC_H
#define BT_PROTO_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/message.h"

/* Writes the header of *message to out [capacity]. PROTO_FRAME_HEADER_MAX bytes are always enough.
 * CALLER_ARGUMENT when the message does not pass proto_message_check, CALLER_LIMIT when it does not
 * fit. The payload is not touched. */
BT_MUST_CHECK bt_status proto_encode(const proto_message *message, uint8_t *out, size_t capacity,
                                     size_t *bytes_out, bt_error *error);

/* Reads a header of a peer. message_out->payload borrows `payload` (NULL when there is none).
 * PEER_PROTOCOL with a sentence when it is malformed or out of range; *message_out then means
 * nothing. */
BT_MUST_CHECK bt_status proto_decode(const uint8_t *header, size_t header_bytes, void *payload,
                                     size_t payload_bytes, proto_message *message_out,
                                     bt_error *error);

#endif
