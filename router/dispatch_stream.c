/* The row streams of an attempt, one per sample: chunks in, whole rows out, credit back. What a
 * chunk does wrong ends its attempt, not the worker: the harm is done to one request. */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/dispatch_internal.h"
#include "router/http_status.h"

/* 0: not known. */
static uint32_t vocab_size_of(const dispatch *d) {
    const worker *founder = dispatch_hello_founder(d);
    return founder == NULL ? 0 : founder->hello.vocab_size;
}

/* As the workers size their rows. */
static uint32_t row_entries(const dispatch *d) {
    return row_entries_max(d->record.sampling_mask_max_tokens, vocab_size_of(d));
}

static row_expectation expectation(const dispatch *d, const proto_generation *g) {
    return (row_expectation){
        .cap = row_entries(d),
        .mask_mode = g->mask_mode,
        .mask_bounded = g->mask_bounded,
        .has_logprob = g->wants_logprob,
        .vocab_size = vocab_size_of(d),
        .vocab_limit = g->vocab_limit,
        .top_count = g->top_logprobs,
        .id_logprob_count = g->logprob_id_count,
    };
}

/* A decode may wait for credit for a whole row or for a whole frame, and CREDIT is only sent in
 * steps: with one step on top of row and frame it never waits for a step that cannot come. Without
 * masks the cap says nothing about rows. */
uint64_t dispatch_stream_window(const dispatch *d, const request *r) {
    const bool has_mask = r->generation.mask_mode != ROW_MASK_OFF;
    const uint32_t entries = has_mask ? row_entries(d) : 0;
    const uint64_t least = row_record_bytes_max(entries) + PROTO_FRAME_PAYLOAD_MAX;
    const uint64_t window = d->options.stream_window_bytes;
    if (!r->is_credited) return UINT64_MAX;
    return (window > least ? window : least) + d->credit_step_bytes;
}

void dispatch_stream_begin(dispatch *d, request *r) {
    const row_expectation expect = expectation(d, &r->generation);
    r->cached_tokens = 0;
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        request_sample *s = &r->samples[i];
        s->is_over_there = false;
        if (s->has_ended) continue;
        row_assembler_init(&s->rows, &expect, d->blocks);
        s->received_bytes = s->handed_bytes = s->consumed_bytes = s->unsent_credit = 0;
        s->granted_bytes = dispatch_stream_window(d, r);
        s->retractions = 0;
    }
}

void dispatch_stream_end(request *r) {
    for (uint32_t i = 0; i < r->generation.samples; i++)
        row_assembler_fini(&r->samples[i].rows);
}

void dispatch_stream_take_back(dispatch *d, request *r) {
    const uint32_t before = r->rows_handed;
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        request_sample *s = &r->samples[i];
        if (s->has_ended) continue;
        r->rows_handed -= s->rows_handed;
        s->rows_handed = 0;
    }
    if (r->rows_handed == before) return;
    BT_ASSERT(r->may_restart);
    d->is_calling = true;
    d->ops.on_restart(d->ops.context, r->id);
    d->is_calling = false;
}

static const char no_memory[] = "the router has no memory for the row stream";
static const char bad_row[] = "a row it must not send";

static void violate(dispatch *d, request *r, const worker *from, const request_sample *s,
                    const char *what) {
    char text[PROTO_TEXT_MAX];
    if (what == no_memory) { /* nobody broke anything */
        dispatch_attempt_fail(d, r, BT_ERR_WORKER_MEMORY, no_memory, NULL);
        return;
    }
    if (what == bad_row) {
        (void)snprintf(text, sizeof text, "%s: %s", bad_row, s->rows.fault);
        what = text;
    }
    dispatch_attempt_violate(d, r, from, what);
}

/* NULL, or what is wrong with the frame as such. */
static const char *check_chunk(const request *r, const request_sample *s, const proto_chunk *chunk,
                               size_t bytes) {
    /* An error may overtake the reservation that it ends: they travel on two connections. */
    if (r->state == REQUEST_RESERVING && bytes > 0) return "a chunk before RUN";
    if (chunk->offset != s->received_bytes) return "a gap in the row stream";
    if (chunk->cached_tokens >= r->prompt_tokens) return "more cached tokens than its prompt has";
    if (bytes > s->granted_bytes - s->received_bytes) return "more bytes than it had credit for";
    return NULL;
}

/* NULL, or what is wrong with the end of a stream. */
static const char *check_finish(const request *r, const request_sample *s,
                                const proto_chunk *chunk) {
    const bool is_error = chunk->finish == PROTO_FINISH_ERROR;
    /* Credit ends anywhere in a row, and so does a stream that decode gives up. */
    if (!is_error && row_assembler_pending(&s->rows) != 0)
        return "the row stream ended inside a row";
    if (chunk->rows_total != s->rows_handed) return "the row stream has not the rows it should";
    if (is_error) return NULL;
    if (chunk->finish == PROTO_FINISH_ABORT)
        return s->is_aborting ? NULL : "an abort that nobody asked for";
    if (s->rows_handed == 0) return "a finished stream without rows";
    if (chunk->finish == PROTO_FINISH_LENGTH) return NULL;
    for (uint32_t i = 0; i < r->generation.stop_id_count; i++) {
        if (r->generation.stop_ids[i] == chunk->matched_id) return NULL;
    }
    return "a stop at an id that does not stop";
}

/* Hands the whole rows on; NULL, or what is wrong with them. */
static const char *take_rows(dispatch *d, request *r, uint32_t index, const row_bytes *payload) {
    request_sample *s = &r->samples[index];
    row_batches batches;
    s->received_bytes += payload->count;
    const bt_status status = row_assembler_push(&s->rows, payload, &batches);
    if (status == BT_ERR_WORKER_MEMORY) return no_memory;
    if (status != BT_OK) return bad_row;
    for (uint32_t i = 0; i < batches.count; i++) {
        const row_bytes *run = &batches.runs[i];
        const uint32_t count = batches.rows[i];
        if (count > r->generation.max_new_tokens - s->rows_handed) return "too many rows";
        s->rows_handed += count;
        s->handed_bytes += run->count;
        r->rows_handed += count;
        const dispatch_rows rows = {.sample = index,
                                    .records = run->bytes,
                                    .bytes = run->count,
                                    .block = run->block,
                                    .count = count,
                                    .cached_tokens = r->cached_tokens};
        d->is_calling = true;
        d->ops.on_rows(d->ops.context, r->id, &rows);
        d->is_calling = false;
    }
    return NULL;
}

/* The cluster's failure, when it may still be tried again, is one of the whole attempt; as it is
 * before any row. */
static void fail(dispatch *d, request *r, const worker *from, const proto_chunk *chunk) {
    const bt_status status = (bt_status)chunk->status;
    const char *text = chunk->text[0] != '\0' ? chunk->text : bt_status_string(status);
    const bool is_whole = r->rows_handed == 0 || dispatch_attempt_has_another_try(d, r);
    if (is_whole && dispatch_attempt_is_worth_a_retry(status)) {
        dispatch_attempt_fail(d, r, status, text, r->samples_left == 1 ? from : NULL);
        return;
    }
    dispatch_end end = {.status = http_status_blame(status),
                        .finish = PROTO_FINISH_ERROR,
                        .cap_needed = chunk->cap_needed};
    proto_text_copy(end.text, sizeof end.text, text);
    dispatch_sample_end(d, r, chunk->sample, &end, from);
}

static void finish(dispatch *d, request *r, const worker *from, const proto_chunk *chunk) {
    request_sample *s = &r->samples[chunk->sample];
    const char *wrong = check_finish(r, s, chunk);
    if (wrong != NULL) {
        violate(d, r, from, s, wrong);
        return;
    }
    r->cached_tokens = chunk->cached_tokens;
    s->is_over_there = true;
    if (chunk->finish == PROTO_FINISH_ERROR) {
        fail(d, r, from, chunk);
        return;
    }
    const dispatch_end end = {
        .status = BT_OK, .finish = chunk->finish, .matched_id = chunk->matched_id};
    dispatch_sample_end(d, r, chunk->sample, &end, from);
}

/* true: the router ended this sample itself, and decode could not know yet. */
static bool is_late(const request *r, const request_sample *s) {
    return r->legs[LEG_DECODE].worker == NULL || (s->has_ended && !s->is_over_there);
}

static void on_sample_chunk(dispatch *d, request *r, worker *from, const proto_message *message) {
    const proto_chunk *chunk = &message->chunk;
    request_sample *s = &r->samples[chunk->sample];
    if (is_late(r, s)) {
        d->late_total++;
        return;
    }
    const char *wrong = s->has_ended ? "a chunk of a sample that has ended"
                                     : check_chunk(r, s, chunk, message->payload_bytes);
    if (wrong == NULL) s->retractions = chunk->retractions;
    if (wrong == NULL && message->payload_bytes > 0) {
        dispatch_attempt_on_proven(d, r);
        r->cached_tokens = chunk->cached_tokens;
        const row_bytes payload = {message->payload, message->payload_bytes, message->block};
        wrong = take_rows(d, r, chunk->sample, &payload);
    }
    if (wrong != NULL) {
        violate(d, r, from, s, wrong);
        return;
    }
    if (chunk->finish != PROTO_FINISH_NONE) finish(d, r, from, chunk);
}

void dispatch_stream_on_chunk(dispatch *d, worker *from, const proto_message *message) {
    request *r = dispatch_attempt_find(d, message->chunk.attempt);
    if (r == NULL) return;
    if (r->worker_ids[LEG_DECODE] != from->id) {
        dispatch_registry_protocol_error(d, from->streams,
                                         "a chunk of an attempt that it does not have");
        return;
    }
    if (message->chunk.sample >= r->generation.samples) {
        dispatch_attempt_violate(d, r, from, "a chunk of a sample that there is not");
        return;
    }
    on_sample_chunk(d, r, from, message);
}

/* The reader took rows: credit goes back to decode in steps, not per token. */
void dispatch_stream_grant(dispatch *d, request *r, uint32_t index, uint64_t bytes) {
    if (!r->is_credited || r->state != REQUEST_STREAMING) return;
    if (index >= r->generation.samples || r->samples[index].has_ended) return;
    request_sample *s = &r->samples[index];
    const uint64_t owed = s->handed_bytes - s->consumed_bytes;
    const uint64_t taken = bytes < owed ? bytes : owed;
    s->consumed_bytes += taken;
    s->unsent_credit += taken;
    if (s->unsent_credit < d->credit_step_bytes) return;
    proto_message message = {.kind = PROTO_CREDIT};
    message.credit.attempt = dispatch_attempt_name(d, r);
    message.credit.sample = index;
    message.credit.bytes = s->unsent_credit;
    s->granted_bytes += s->unsent_credit;
    s->unsent_credit = 0;
    dispatch_send(d, r->legs[LEG_DECODE].worker->streams, &message);
}
