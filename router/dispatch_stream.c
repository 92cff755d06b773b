/* The row stream of an attempt: chunks in, whole rows out, credit back. What a chunk does wrong
 * ends its attempt, not the worker: the harm is done to one request. */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/dispatch_internal.h"

void dispatch_stream_begin(dispatch *d, request *r) {
    const worker *founder = dispatch_hello_founder(d);
    const row_expectation expect = {
        .cap = d->record.sampling_mask_max_tokens,
        .mask_mode = r->generation.mask_mode,
        .has_logprob = r->generation.wants_logprob,
        .vocab_size = founder == NULL ? 0 : founder->hello.vocab_size,
    };
    row_assembler_init(&r->rows, &expect);
    r->received_bytes = r->handed_bytes = r->consumed_bytes = r->unsent_credit = 0;
    r->granted_bytes = r->is_credited ? d->stream_window_bytes : UINT64_MAX;
    r->cached_tokens = 0;
}

void dispatch_stream_end(request *r) {
    row_assembler_fini(&r->rows);
}

static const char no_memory[] = "the router has no memory for the row stream";

/* Ends the attempt over what is wrong with its stream. */
static void violate(dispatch *d, request *r, const worker *from, const char *what) {
    char text[2 * PROTO_TEXT_MAX];
    if (what == no_memory) { /* nobody broke anything */
        dispatch_attempt_fail(d, r, BT_ERR_WORKER_MEMORY, no_memory, NULL);
        return;
    }
    d->protocol_errors_total++;
    (void)snprintf(text, sizeof text, "%s broke the protocol: %s", from->name, what);
    bt_log_error("dispatch", "request %llu: %s", (unsigned long long)r->id, text);
    dispatch_attempt_fail(d, r, BT_ERR_PEER_PROTOCOL, text, NULL);
}

/* NULL, or what is wrong with the frame as such. */
static const char *check_chunk(const request *r, const proto_chunk *chunk, size_t bytes) {
    /* An error may overtake the reservation that it ends: they travel on two connections. */
    const bool is_early = r->state == REQUEST_RESERVING;
    if (is_early && (bytes > 0 || chunk->finish != PROTO_FINISH_ERROR)) return "a chunk before RUN";
    if (chunk->offset != r->received_bytes) return "a gap in the row stream";
    if (bytes > r->granted_bytes - r->received_bytes) return "more bytes than it had credit for";
    return NULL;
}

/* NULL, or what is wrong with the end of a stream. */
static const char *check_finish(const request *r, const proto_chunk *chunk) {
    if (row_assembler_pending(&r->rows) != 0) return "the row stream ended inside a row";
    if (chunk->rows_total != r->rows_handed) return "the row stream has not the rows it should";
    if (chunk->finish == PROTO_FINISH_ERROR) return NULL;
    if (r->rows_handed == 0) return "a finished stream without rows";
    if (chunk->finish == PROTO_FINISH_LENGTH) return NULL;
    for (uint32_t i = 0; i < r->generation.stop_id_count; i++) {
        if (r->generation.stop_ids[i] == chunk->matched_id) return NULL;
    }
    return "a stop at an id that does not stop";
}

/* The first bytes prove that the handoff is over: prefill has nothing more to do with it. */
static void note_proven(dispatch *d, request *r) {
    if (r->state == REQUEST_STREAMING) return;
    dispatch_request_set_state(d, r, REQUEST_STREAMING);
    dispatch_attempt_release_prefill(d, r);
}

/* Hands the whole rows on; NULL, or what is wrong with them. */
static const char *take_rows(dispatch *d, request *r, const uint8_t *bytes, size_t count) {
    row_batch batch;
    r->received_bytes += count;
    const bt_status status = row_assembler_push(&r->rows, bytes, count, &batch);
    if (status == BT_ERR_WORKER_MEMORY) return no_memory;
    if (status != BT_OK) return "a row it must not send";
    if (batch.count == 0) return NULL;
    if (batch.count > r->generation.max_new_tokens - r->rows_handed) return "too many rows";
    r->rows_handed += batch.count;
    r->handed_bytes += batch.bytes;
    bt_free(r->words); /* no retry from here on */
    r->words = NULL;
    d->is_calling = true;
    const dispatch_rows rows = {.records = batch.records,
                                .bytes = batch.bytes,
                                .count = batch.count,
                                .cached_tokens = r->cached_tokens};
    d->ops.on_rows(d->ops.context, r->id, &rows);
    d->is_calling = false;
    return NULL;
}

static void finish(dispatch *d, request *r, const worker *from, const proto_chunk *chunk) {
    const char *wrong = check_finish(r, chunk);
    if (wrong != NULL) {
        violate(d, r, from, wrong);
        return;
    }
    r->cached_tokens = chunk->cached_tokens;
    if (chunk->finish == PROTO_FINISH_ERROR) {
        const char *text =
            chunk->text[0] != '\0' ? chunk->text : bt_status_string((bt_status)chunk->status);
        dispatch_attempt_fail(d, r, (bt_status)chunk->status, text, from);
        return;
    }
    const dispatch_end end = {
        .status = BT_OK, .finish = chunk->finish, .matched_id = chunk->matched_id};
    dispatch_attempt_drop(d, r, from);
    dispatch_request_end(d, r, &end);
}

void dispatch_stream_on_chunk(dispatch *d, worker *from, const proto_message *message) {
    const proto_chunk *chunk = &message->chunk;
    request *r = dispatch_attempt_find(d, chunk->attempt);
    if (r == NULL) return;
    if (r->legs[LEG_DECODE].worker != from) {
        dispatch_registry_protocol_error(d, from->streams,
                                         "a chunk of an attempt that it does not have");
        return;
    }
    const char *wrong = check_chunk(r, chunk, message->payload_bytes);
    if (wrong == NULL && message->payload_bytes > 0) {
        note_proven(d, r);
        r->cached_tokens = chunk->cached_tokens;
        wrong = take_rows(d, r, message->payload, message->payload_bytes);
    }
    if (wrong != NULL) {
        violate(d, r, from, wrong);
        return;
    }
    if (chunk->finish != PROTO_FINISH_NONE) finish(d, r, from, chunk);
}

/* The reader took rows: credit goes back to decode in steps, not per token. */
void dispatch_stream_grant(dispatch *d, request *r, uint64_t bytes) {
    if (!r->is_credited || r->state != REQUEST_STREAMING) return;
    const uint64_t owed = r->handed_bytes - r->consumed_bytes;
    const uint64_t taken = bytes < owed ? bytes : owed;
    r->consumed_bytes += taken;
    r->unsent_credit += taken;
    if (r->unsent_credit < d->credit_step_bytes) return;
    proto_message message = {.kind = PROTO_CREDIT};
    message.credit.attempt = dispatch_attempt_name(d, r);
    message.credit.bytes = r->unsent_credit;
    r->granted_bytes += r->unsent_credit;
    r->unsent_credit = 0;
    dispatch_send(d, r->legs[LEG_DECODE].worker->streams, &message);
}
