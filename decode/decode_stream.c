/* Row streams: queued rows become frames of at most PROTO_FRAME_PAYLOAD_MAX bytes, one frame per
 * attempt and round, within the credit the router gave. A finish needs no credit and goes out with
 * the last bytes. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

enum {
    QUEUE_BYTES_MIN = 64 * 1024, /* what a parked attempt may hold, if rows are small */
    QUEUE_ROWS_MIN = 2,          /* else so many rows at the cap */
};

/* ---- room ------------------------------------------------------------------------------------ */

static size_t row_bytes_max(const decode_core *core, uint32_t mask_mode) {
    const uint32_t cap = membership_cap(&core->member);
    return row_record_bytes((row_widths){.mask_mode = mask_mode,
                                         .support_count = mask_mode != SAMPLER_MASK_OFF ? cap : 0});
}

size_t decode_queue_bytes_max(const decode_core *core, uint32_t mask_mode) {
    const size_t rows = QUEUE_ROWS_MIN * row_bytes_max(core, mask_mode);
    return rows > QUEUE_BYTES_MIN ? rows : QUEUE_BYTES_MIN;
}

bool decode_has_room(const decode_core *core, const decode_attempt *a) {
    const uint32_t mode = a->generation.mask_mode;
    return row_queue_bytes(a->queue) + row_bytes_max(core, mode) <=
           decode_queue_bytes_max(core, mode);
}

void decode_stream_drop(decode_attempt *a) {
    bt_free(a->staged);
    a->staged = NULL;
    a->staged_bytes = 0;
    a->staged_offset = 0;
    a->staged_rows = 0;
}

/* ---- frames ---------------------------------------------------------------------------------- */

/* Rows whose last byte was sent. */
static uint32_t count_sent(const decode_attempt *a) {
    uint32_t rows = a->rows_sent;
    for (size_t at = 0; at < a->staged_offset; rows++) {
        uint32_t bytes = 0;
        memcpy(&bytes, a->staged + at, sizeof bytes);
        BT_ASSERT(bytes >= ROW_RECORD_HEADER_BYTES);
        at += bytes;
        if (at > a->staged_offset) break;
    }
    return rows;
}

static void send_chunk(decode_core *core, decode_attempt *a, uint8_t *payload, size_t bytes,
                       bool is_last) {
    proto_message message = {.kind = PROTO_CHUNK, .payload = payload, .payload_bytes = bytes};
    proto_chunk *chunk = &message.chunk;
    chunk->attempt = a->id;
    chunk->offset = a->sent_bytes;
    chunk->cached_tokens = a->cached_tokens;
    if (is_last) {
        chunk->finish = a->finish;
        chunk->matched_id = a->matched_id;
        chunk->status = a->status;
        chunk->rows_total = a->rows_made;
        chunk->cap_needed = a->cap_needed;
        proto_text_copy(chunk->text, sizeof chunk->text, a->text);
    }
    a->sent_bytes += bytes;
    if (a->credit_bytes != UINT64_MAX) {
        BT_ASSERT(bytes <= a->credit_bytes);
        a->credit_bytes -= bytes;
    }
    core->options.ops.send(core->options.ops.context, PROTO_LANE_STREAMS, &message);
}

/* Rows that are queued become bytes, when those before them are gone. */
static bt_status stage(decode_attempt *a) {
    if (a->staged != NULL) return BT_OK;
    const size_t bytes = row_queue_bytes(a->queue);
    if (bytes == 0) return BT_OK;
    uint8_t *block = bt_malloc(bytes);
    if (block == NULL) return BT_ERR_WORKER_MEMORY;
    a->staged_rows = row_queue_count(a->queue);
    const size_t taken = row_queue_take(a->queue, block, bytes);
    BT_ASSERT(taken == bytes);
    a->staged = block;
    a->staged_bytes = bytes;
    a->staged_offset = 0;
    return BT_OK;
}

/* The next payload: the staged block itself when it goes whole, else a copy of its next part. */
static uint8_t *take_payload(decode_attempt *a, size_t bytes) {
    uint8_t *payload = NULL;
    if (a->staged_offset == 0 && bytes == a->staged_bytes) {
        payload = a->staged;
        a->staged = NULL;
    } else {
        payload = bt_malloc(bytes);
        if (payload == NULL) return NULL;
        memcpy(payload, a->staged + a->staged_offset, bytes);
    }
    a->staged_offset += bytes;
    if (a->staged_offset == a->staged_bytes) {
        a->rows_sent += a->staged_rows;
        decode_stream_drop(a);
    }
    return payload;
}

/* Sends at most one frame; true when one was sent. May release the attempt. */
static bool pump(decode_core *core, decode_attempt *a) {
    const bool is_draining = a->state == DECODE_DRAINING;
    if (!is_draining && a->state != DECODE_RUNNING && a->state != DECODE_PARKED) return false;
    if (stage(a) != BT_OK) return false; /* again at the next turn; parked, it has a deadline */
    size_t bytes = a->staged_bytes - a->staged_offset;
    if (bytes > a->credit_bytes) bytes = (size_t)a->credit_bytes;
    if (bytes > PROTO_FRAME_PAYLOAD_MAX) bytes = PROTO_FRAME_PAYLOAD_MAX;
    uint8_t *payload = NULL;
    if (bytes > 0) {
        payload = take_payload(a, bytes);
        if (payload == NULL) return false;
    }
    const bool is_last = is_draining && a->staged == NULL && row_queue_count(a->queue) == 0;
    if (bytes == 0 && !is_last) return false;
    send_chunk(core, a, payload, bytes, is_last);
    if (is_last) {
        decode_release(core, a, "stream ended");
        return true;
    }
    /* It took something: who waits for it begins anew. */
    if (a->state != DECODE_RUNNING) a->deadline_us = decode_now(core) + core->options.park_us;
    return true;
}

void decode_stream_turn(decode_core *core) {
    const decode_core_ops *ops = &core->options.ops;
    const uint32_t count = core->options.sequences_max;
    if (!membership_is_serving(&core->member)) return;
    /* A round sends at most one frame of each attempt; rounds go on while there is something to
     * send and the connection takes it. */
    uint32_t idle = 0;
    while (idle < count && ops->can_stream(ops->context)) {
        decode_attempt *a = &core->attempts[core->stream_next];
        core->stream_next = (core->stream_next + 1) % count;
        idle = pump(core, a) ? 0 : idle + 1;
        if (a->state == DECODE_PARKED && decode_has_room(core, a)) {
            decode_set_state(core, a, DECODE_RUNNING, 0, "room for rows");
        }
    }
}

/* ---- ends ------------------------------------------------------------------------------------ */

void decode_finish(decode_core *core, decode_attempt *a, proto_finish finish, int32_t matched_id) {
    a->finish = finish;
    a->matched_id = matched_id;
    decode_release_pages(core, a);
    decode_set_state(core, a, DECODE_DRAINING, decode_now(core) + core->options.park_us,
                     finish == PROTO_FINISH_STOP     ? "stop id"
                     : finish == PROTO_FINISH_LENGTH ? "length"
                                                     : "error");
}

void decode_finish_error(decode_core *core, decode_attempt *a, bt_status status, const char *format,
                         ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(a->text, sizeof a->text, format, args);
    va_end(args);
    bt_log(bt_log_level_of(status), "decode", "attempt " DECODE_ID_FORMAT ": %s",
           DECODE_ID_ARGS(a->id), a->text);
    a->status = status;
    decode_finish(core, a, PROTO_FINISH_ERROR, 0);
}

void decode_abandon(decode_core *core, decode_attempt *a, bt_status status, const char *text) {
    a->finish = PROTO_FINISH_ERROR;
    a->status = status;
    a->rows_made = count_sent(a);
    (void)snprintf(a->text, sizeof a->text, "%s", text);
    decode_stream_drop(a);
    row_queue_clear(a->queue);
    if (!membership_is_serving(&core->member)) return;
    send_chunk(core, a, NULL, 0, true);
}

void decode_on_credit(decode_core *core, const proto_credit *credit) {
    decode_attempt *a = decode_find(core, credit->attempt);
    if (a == NULL || a->credit_bytes == UINT64_MAX) return;
    if (__builtin_add_overflow(a->credit_bytes, credit->bytes, &a->credit_bytes)) {
        a->credit_bytes = UINT64_MAX;
    }
}
