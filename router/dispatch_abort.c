/* Aborts: a client wants no more than there is by now. Before a prompt is with prefill nothing is
 * lost by ending at once. Later decode may hold rows that were not sent (those of replies that are
 * sent when complete travel by fifties), so it is asked to end its streams with what it has; the
 * prefill is cancelled when it has answered, which is also when it is known whether rows came. An
 * abort is never retried, and a failure that comes before the answer does not take the rows away
 * that are here. */
#include "base/assert.h"
#include "router/dispatch_internal.h"

/* SGLang's words, which clients compare. */
static const char *words_of(const request *r, uint32_t index) {
    const bool is_with_workers = r->state == REQUEST_RUNNING || r->state == REQUEST_STREAMING;
    if (r->samples[index].rows_handed > 0) return "Aborted";
    if (!is_with_workers) return "Abort in waiting queue";
    return r->is_prefill_done || r->state == REQUEST_STREAMING ? "Aborted" : "Abort before prefill";
}

static dispatch_end end_of(const request *r, uint32_t index) {
    dispatch_end end = {.status = BT_OK, .finish = PROTO_FINISH_ABORT};
    proto_text_copy(end.text, sizeof end.text, words_of(r, index));
    return end;
}

void dispatch_abort_apply(const request *r, uint32_t index, dispatch_end *end) {
    const bool is_abort = end->status == BT_OK && end->finish == PROTO_FINISH_ABORT;
    const bool is_error = end->status != BT_OK && end->status != BT_ERR_REQUEST_CANCELLED;
    if (is_abort || (is_error && r->samples[index].is_aborting)) *end = end_of(r, index);
}

/* Decode may have rows of it, and can be asked for them. */
static bool is_asked(const request *r) {
    const worker *decode = r->legs[LEG_DECODE].worker;
    if (r->state != REQUEST_RUNNING && r->state != REQUEST_STREAMING) return false;
    return decode != NULL && decode->hello.version_minor >= PROTO_MINOR_OF_ABORT;
}

static void send_abort(dispatch *d, request *r, uint32_t index) {
    proto_message message = {.kind = PROTO_ABORT};
    message.abort.attempt = dispatch_attempt_name(d, r);
    message.abort.sample = index;
    dispatch_send(d, r->legs[LEG_DECODE].worker->control, &message);
}

/* true: it has not ended and was not told to. */
static bool begin(request *r, uint32_t index) {
    request_sample *s = &r->samples[index];
    if (s->has_ended || s->is_aborting) return false;
    s->is_aborting = true;
    return true;
}

/* Without an answer to wait for. Of an older decode the rows that it holds are lost. */
static void end_now(dispatch *d, request *r, uint32_t index) {
    const dispatch_end end = end_of(r, index);
    if (r->samples_left > 1 && r->state != REQUEST_QUEUED && r->state != REQUEST_RESERVING)
        dispatch_attempt_cancel_sample(d, r, index);
    dispatch_sample_tell_end(d, r, index, &end);
}

void dispatch_abort_samples(dispatch *d, request *r, uint32_t index) {
    const bool is_of_all = index == PROTO_ALL_SAMPLES;
    const uint32_t first = is_of_all ? 0 : index;
    const uint32_t end = is_of_all ? r->generation.samples : index + 1;
    const bool asks = is_asked(r);
    uint32_t begun = 0;
    if (end > r->generation.samples) return;
    for (uint32_t i = first; i < end; i++) {
        if (!begin(r, i)) continue;
        begun++;
        if (!asks) end_now(d, r, i);
    }
    if (begun == 0) return;
    if (asks) {
        send_abort(d, r, index);
    } else {
        dispatch_sample_settle(d, r, NULL);
    }
}

bool dispatch_abort_settle(dispatch *d, request *r) {
    uint32_t ended = 0;
    BT_ASSERT(r->attempt == 0);
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        if (r->samples[i].has_ended || !r->samples[i].is_aborting) continue;
        const dispatch_end end = end_of(r, i);
        dispatch_sample_tell_end(d, r, i, &end);
        ended++;
    }
    if (ended == 0 || r->samples_left > 0) return false;
    const dispatch_end end = *dispatch_sample_choose_end(r);
    dispatch_request_end(d, r, &end);
    return true;
}
