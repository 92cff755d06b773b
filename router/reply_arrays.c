/* Arrays over rows, as bytes or as base64. What a row gives to an array lies in its record as it
 * is sent: wide rows go from there straight into the text; narrow ones are gathered first, so that
 * the encoder sees blocks. Base64 runs on over rows, whose bytes are seldom a multiple of three. */
#include <string.h>

#include "base/assert.h"
#include "router/reply_writer_internal.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "arrays are sent as they lie in memory");

enum {
    GATHERED_BYTES = 3 * 1024, /* a multiple of three */
    WIDE_BYTES = 512,          /* rows from here on are not gathered */
    PART_BYTES = 12 * 1024,    /* of a wide row at once; REPLY_PORTION characters */
};

typedef struct array_sink {
    bt_text *out;
    bt_base64_stream *base64; /* NULL: bytes */
    size_t gathered;
    uint8_t bytes[GATHERED_BYTES];
} array_sink;

static void sink_put(array_sink *sink, const void *data, size_t bytes) {
    const size_t length = sink->base64 != NULL ? bt_base64_length(bytes) : bytes;
    char *room = bt_text_reserve(sink->out, length);
    if (room == NULL) return;
    if (sink->base64 != NULL) {
        sink->out->used += bt_base64_push(sink->base64, room, data, bytes);
    } else {
        memcpy(room, data, bytes);
        sink->out->used += bytes;
    }
    sink->out->bytes[sink->out->used] = 0;
}

static void sink_flush(array_sink *sink) {
    if (sink->gathered > 0) sink_put(sink, sink->bytes, sink->gathered);
    sink->gathered = 0;
}

static void sink_add(array_sink *sink, const void *data, size_t bytes) {
    if (bytes >= WIDE_BYTES || sink->gathered + bytes > GATHERED_BYTES) sink_flush(sink);
    if (bytes >= WIDE_BYTES) {
        sink_put(sink, data, bytes);
    } else {
        memcpy(sink->bytes + sink->gathered, data, bytes);
        sink->gathered += bytes;
    }
}

/* What a row gives to an array. */
typedef struct array_slice {
    const void *data;
    size_t bytes;
    uint32_t word; /* data may point here */
} array_slice;

static void slice_row(reply_array array, const token_row *row, array_slice *out) {
    const bool is_truncated = row->support_size > row->support_count;
    out->data = &out->word;
    out->bytes = sizeof(out->word);
    switch (array) {
    case REPLY_ARRAY_OUTPUT_IDS: BT_ASSERT(false); break;
    case REPLY_ARRAY_LENGTHS: out->word = row->support_count; break;
    case REPLY_ARRAY_TOKEN_IDS:
        out->data = row->support_ids;
        out->bytes = sizeof(int32_t) * row->support_count;
        break;
    case REPLY_ARRAY_LOGPROBS:
        if (row->support_logprobs == NULL) {
            memcpy(&out->word, &row->selected_logprob, sizeof(out->word));
        } else {
            out->data = row->support_logprobs;
            out->bytes = sizeof(float) * row->support_count;
        }
        break;
    case REPLY_ARRAY_TRUNCATED:
        out->word = is_truncated;
        out->bytes = 1;
        break;
    case REPLY_ARRAY_TRUNCATED_WIDE: out->word = is_truncated; break;
    case REPLY_ARRAY_SUPPORT_SIZES: out->word = row->support_size; break;
    }
}

static bt_status add_rows(reply_writer *writer, array_sink *sink, size_t bytes_wanted) {
    const reply_array array = writer->pieces[writer->piece].array;
    const size_t count = reply_rows_of(writer);
    while (writer->position < count && sink->out->used < bytes_wanted && !sink->out->has_failed) {
        token_row row;
        reply_place next;
        array_slice slice;
        const bt_status status = reply_writer_row(writer, &row, &next);
        if (status != BT_OK) return status;
        slice_row(array, &row, &slice);
        const size_t left = slice.bytes - writer->entry;
        const size_t part = left < PART_BYTES ? left : PART_BYTES;
        sink_add(sink, (const uint8_t *)slice.data + writer->entry, part);
        writer->entry += part;
        if (part == left) reply_writer_next_row(writer, &next);
    }
    return BT_OK;
}

/* The generation has them side by side. */
static void add_output_ids(reply_writer *writer, array_sink *sink) {
    const int32_t *ids = writer->generation->ids;
    const size_t left = reply_rows_of(writer) - writer->position;
    const size_t part = left < PART_BYTES / 4 ? left : PART_BYTES / 4;
    if (part > 0)
        sink_put(sink, ids + writer->range.row_from + writer->position, part * sizeof(*ids));
    writer->position += part;
}

bt_status reply_array_write(reply_writer *writer, bt_text *out, size_t bytes_wanted,
                            bool *is_complete_out) {
    const reply_piece *piece = &writer->pieces[writer->piece];
    const bool is_base64 = piece->kind == REPLY_ARRAY_BASE64;
    bt_status status = BT_OK;
    array_sink sink; /* its bytes are not zeroed: most arrays of a stream are a few bytes */
    sink.out = out;
    sink.base64 = is_base64 ? &writer->base64 : NULL;
    sink.gathered = 0;
    if (!writer->is_begun) {
        writer->is_begun = true;
        writer->place = writer->range.place;
        BT_ASSERT(writer->base64.held_bytes == 0); /* of the array before */
        if (is_base64) bt_text_add(out, "\"", 1);
    }
    if (piece->array == REPLY_ARRAY_OUTPUT_IDS) {
        add_output_ids(writer, &sink);
    } else {
        status = add_rows(writer, &sink, bytes_wanted);
    }
    sink_flush(&sink);
    if (status != BT_OK) return status;
    *is_complete_out = writer->position == reply_rows_of(writer);
    if (!*is_complete_out || !is_base64) return BT_OK;
    char *room = bt_text_reserve(out, 4 + 1);
    if (room == NULL) return BT_OK;
    const size_t length = bt_base64_finish(&writer->base64, room);
    room[length] = '"';
    out->used += length + 1;
    out->bytes[out->used] = 0;
    return BT_OK;
}
