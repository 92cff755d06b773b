/* Row streams, one per sample: queued rows become frames of at most PROTO_FRAME_PAYLOAD_MAX bytes,
 * one frame per sample and round, within the credit the router gave. A finish needs no credit and
 * goes out with the last bytes. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

/* At the cap, that fit in any case: one that is queued, and, before that is sent, one of the step
 * that runs and one of the next. */
enum { QUEUE_ROWS_MIN = 3 };

/* ---- room ------------------------------------------------------------------------------------ */

static size_t row_bytes_max(const decode_core *core, const proto_generation *g) {
    const uint32_t cap = membership_row_entries(&core->member);
    return row_record_bytes(
        (row_widths){.mask_mode = g->mask_mode,
                     .support_count = g->mask_mode != SAMPLER_MASK_OFF ? cap : 0,
                     .top_count = decode_top_count(core, g),
                     .id_logprob_count = g->logprob_id_count});
}

static size_t queue_bytes_max(const decode_core *core, const proto_generation *g) {
    const size_t rows = QUEUE_ROWS_MIN * row_bytes_max(core, g);
    return rows > core->options.queue_bytes ? rows : core->options.queue_bytes;
}

bt_status decode_make_queue(decode_core *core, decode_sample *s) {
    const proto_generation *g = &s->attempt->generation;
    const row_queue_options options = {.blocks = core->blocks,
                                       .mask_mode = g->mask_mode,
                                       .cap = membership_row_entries(&core->member),
                                       .top_logprobs = decode_top_count(core, g),
                                       .logprob_ids = g->logprob_id_count,
                                       .bytes_max = queue_bytes_max(core, g)};
    return row_queue_create(&options, &s->queue);
}

bool decode_has_room(const decode_core *core, const decode_sample *s) {
    const proto_generation *g = &s->attempt->generation;
    return row_queue_bytes(s->queue) + row_bytes_max(core, g) <= queue_bytes_max(core, g);
}

/* ---- frames ---------------------------------------------------------------------------------- */

/* The slice's hold goes with it. */
static void send_chunk(decode_core *core, decode_sample *s, const row_slice *rows, bool is_last) {
    const size_t bytes = rows->count;
    proto_message message = {
        .kind = PROTO_CHUNK, .payload = rows->bytes, .payload_bytes = bytes, .block = rows->block};
    proto_chunk *chunk = &message.chunk;
    chunk->attempt = s->attempt->id;
    chunk->sample = s->number;
    chunk->offset = s->sent_bytes;
    chunk->cached_tokens = s->attempt->cached_tokens;
    chunk->retractions = s->recomputes;
    if (is_last) {
        chunk->finish = s->finish;
        chunk->matched_id = s->matched_id;
        chunk->status = s->status;
        chunk->rows_total = s->rows_made;
        chunk->cap_needed = s->cap_needed;
        proto_text_copy(chunk->text, sizeof chunk->text, s->text);
    }
    s->sent_bytes += bytes;
    BT_ASSERT(bytes <= s->credit_bytes);
    s->credit_bytes -= bytes; /* UINT64_MAX is never used up */
    core->options.ops.send(core->options.ops.context, PROTO_LANE_STREAMS, &message);
}

static bool has_stream(const decode_sample *s) {
    switch (s->state) {
    case DECODE_WAITING:
    case DECODE_RUNNING:
    case DECODE_PARKED:
    case DECODE_RETRACTED:
    case DECODE_RECOMPUTING:
    case DECODE_DRAINING: return true;
    case DECODE_FREE:
    case DECODE_RESERVED:
    case DECODE_LEAVING:
    case DECODE_STATE_COUNT: break;
    }
    return false;
}

/* Queued rows may wait up to here: half the queue, and no more than leaves room for the row of the
 * step that runs and of the next one, so that nobody is parked for rows that only wait. */
static size_t waiting_bytes_max(const decode_core *core, const proto_generation *g) {
    const size_t most = queue_bytes_max(core, g);
    const size_t two_rows = 2 * row_bytes_max(core, g);
    return most - two_rows < most / 2 ? most - two_rows : most / 2;
}

/* Rows wait for each other only while more are on their way and there is room enough. */
static bool is_due(const decode_core *core, decode_sample *s) {
    const uint32_t pushed = row_queue_pushed(s->queue);
    const uint32_t taken = row_queue_taken(s->queue);
    if (s->state != DECODE_RUNNING) return true;
    if (taken > s->due_rows) s->due_rows = taken;
    if (s->due_rows == 0 || pushed - s->due_rows >= s->attempt->emission_rows ||
        row_queue_bytes(s->queue) >= waiting_bytes_max(core, &s->attempt->generation))
        s->due_rows = pushed;
    return taken < s->due_rows;
}

/* Sends at most one frame; true when one was sent. May release the sample. */
static bool pump(decode_core *core, decode_sample *s) {
    const bool is_draining = s->state == DECODE_DRAINING;
    row_slice rows = {.count = 0};
    if (!has_stream(s) || !is_due(core, s)) return false;
    const uint64_t credit = s->credit_bytes;
    const size_t most = credit < PROTO_FRAME_PAYLOAD_MAX ? (size_t)credit : PROTO_FRAME_PAYLOAD_MAX;
    const bool has_rows = most > 0 && row_queue_take(s->queue, most, &rows);
    const bool is_last = is_draining && row_queue_bytes(s->queue) == 0;
    if (!has_rows && !is_last) return false;
    send_chunk(core, s, &rows, is_last);
    if (is_last) {
        decode_release(core, s, "stream ended");
        return true;
    }
    /* It took something: who waits for it begins anew. */
    if (is_draining || s->lacks_room) s->deadline_us = decode_now(core) + core->options.park_us;
    return true;
}

/* Rows of a sample that waited for room have some now. */
static void unpark(decode_core *core, decode_sample *s) {
    s->lacks_room = false;
    if (s->state == DECODE_PARKED) {
        decode_set_state(core, s, DECODE_RUNNING, 0, "room for rows");
    } else {
        s->deadline_us = decode_now(core) + core->options.pages_us; /* it waits for those now */
    }
}

void decode_stream_turn(decode_core *core) {
    const decode_core_ops *ops = &core->options.ops;
    const uint32_t count = core->options.sequences_max;
    if (!membership_is_serving(&core->member)) return;
    /* A round sends at most one frame of each sample; rounds go on while there is something to
     * send and the connection takes it. */
    uint32_t idle = 0;
    while (idle < count && ops->can_stream(ops->context)) {
        decode_sample *s = &core->samples[core->stream_next];
        core->stream_next = (core->stream_next + 1) % count;
        idle = pump(core, s) ? 0 : idle + 1;
        if (s->state != DECODE_FREE && s->lacks_room && decode_has_room(core, s)) unpark(core, s);
    }
}

/* ---- ends ------------------------------------------------------------------------------------ */

static const char *finish_reason(proto_finish finish) {
    switch (finish) {
    case PROTO_FINISH_STOP: return "stop id";
    case PROTO_FINISH_LENGTH: return "length";
    case PROTO_FINISH_ERROR: return "error";
    case PROTO_FINISH_ABORT: return "aborted";
    case PROTO_FINISH_NONE: break;
    }
    return "";
}

void decode_finish(decode_core *core, decode_sample *s, proto_finish finish, int32_t matched_id) {
    s->finish = finish;
    s->matched_id = matched_id;
    s->lacks_room = false;
    decode_release_pages(core, s);
    decode_set_state(core, s, DECODE_DRAINING, decode_now(core) + core->options.park_us,
                     finish_reason(finish));
}

void decode_finish_error(decode_core *core, decode_sample *s, bt_status status, const char *format,
                         ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(s->text, sizeof s->text, format, args);
    va_end(args);
    bt_log(bt_log_level_of(status), "decode",
           "attempt " DECODE_ID_FORMAT ", sample %" PRIu32 ": %s", DECODE_ID_ARGS(s->attempt->id),
           s->number, s->text);
    s->status = status;
    decode_finish(core, s, PROTO_FINISH_ERROR, 0);
}

void decode_abandon(decode_core *core, decode_sample *s, bt_status status, const char *text) {
    s->finish = PROTO_FINISH_ERROR;
    s->status = status;
    s->cap_needed = 0; /* of an overflow whose rows nobody took */
    s->rows_made = row_queue_taken(s->queue);
    (void)snprintf(s->text, sizeof s->text, "%s", text);
    if (!membership_is_serving(&core->member)) return;
    send_chunk(core, s, &(row_slice){.count = 0}, true);
}

void decode_abort_empty(decode_core *core, decode_sample *s) {
    BT_ASSERT(s->rows_made == 0);
    s->finish = PROTO_FINISH_ABORT;
    send_chunk(core, s, &(row_slice){.count = 0}, true);
}

void decode_abandon_attempt(decode_core *core, decode_attempt *a, bt_status status,
                            const char *text) {
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        decode_sample *s = a->samples[i];
        if (s == NULL || s->is_cancelled || s->state == DECODE_LEAVING) continue;
        decode_abandon(core, s, status, text);
    }
}

void decode_on_credit(decode_core *core, const proto_credit *credit) {
    decode_sample *s = decode_find_sample(core, credit->attempt, credit->sample);
    if (s == NULL) return;
    if (__builtin_add_overflow(s->credit_bytes, credit->bytes, &s->credit_bytes)) {
        s->credit_bytes = UINT64_MAX;
    }
}
