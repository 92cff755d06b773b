/* The ends of a request's samples, each told once, and how the request ends with the last of them
 * (the rule is in dispatch.h). */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "router/dispatch_internal.h"
#include "router/http_status.h"

/* Clients tell these errors apart by their words, which therefore never change. */
static const char capture_text[] =
    "The sampling backend selected a token outside its captured sampling support.";
static const char no_capture_text[] =
    "The sampling backend did not return captured sampling support.";

static void set_fixed_text(const dispatch *d, dispatch_end *end) {
    if (end->status == BT_ERR_REQUEST_OVERFLOW) {
        const int used =
            snprintf(end->text, sizeof end->text,
                     "Sampling support exceeds --sampling-mask-max-tokens=%u, commonly because "
                     "of cutoff ties. Lower top_k to leave more headroom or increase the server "
                     "limit.",
                     d->record.sampling_mask_max_tokens);
        if (end->cap_needed > 0)
            (void)snprintf(end->text + used, sizeof end->text - (size_t)used, " Required: %u.",
                           end->cap_needed);
    } else if (end->status == BT_ERR_REQUEST_CAPTURE && strcmp(end->text, no_capture_text) != 0) {
        memcpy(end->text, capture_text, sizeof capture_text);
    }
}

/* What a worker says is needed; 0 for what cannot be. */
static uint32_t plausible_cap(const dispatch *d, uint32_t cap_needed) {
    const worker *founder = dispatch_hello_founder(d);
    const bool is_too_large = founder != NULL && cap_needed > founder->hello.vocab_size;
    return is_too_large || cap_needed <= d->record.sampling_mask_max_tokens ? 0 : cap_needed;
}

void dispatch_sample_fill_end(const dispatch *d, const request *r, dispatch_end *end) {
    end->http_status = http_status_of(end->status);
    end->cached_tokens = r->cached_tokens;
    end->attempts = r->tries;
    if (end->status == BT_ERR_REQUEST_OVERFLOW && end->cap_needed == 0)
        end->cap_needed = r->cap_needed; /* found by prefill, before any sample had a token */
    const bool is_overflow = end->status == BT_ERR_REQUEST_OVERFLOW;
    end->cap_needed = is_overflow ? plausible_cap(d, end->cap_needed) : 0;
    set_fixed_text(d, end);
}

void dispatch_sample_tell_end(dispatch *d, request *r, uint32_t index, const dispatch_end *end) {
    request_sample *s = &r->samples[index];
    BT_ASSERT(!s->has_ended);
    s->end = *end;
    dispatch_abort_apply(r, index, &s->end);
    s->end.rows_total = s->rows_handed;
    s->end.retractions = s->retractions;
    dispatch_sample_fill_end(d, r, &s->end);
    s->has_ended = true;
    r->samples_left--;
    row_assembler_fini(&s->rows);
    d->is_calling = true;
    d->ops.on_sample_end(d->ops.context, r->id, index, &s->end);
    d->is_calling = false;
}

/* ---- the request's end ----------------------------------------------------------------------- */

void dispatch_sample_add_totals(const request *r, dispatch_end *end) {
    end->rows_total = end->retractions = 0;
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        const request_sample *s = &r->samples[i];
        end->rows_total += s->rows_handed;
        end->retractions += s->retractions;
        if (s->end.cap_needed > end->cap_needed) end->cap_needed = s->end.cap_needed;
    }
}

static int badness(const dispatch_end *end) {
    if (end->status == BT_OK) return 0;
    if (end->status == BT_ERR_REQUEST_CANCELLED) return 1;
    if (end->http_status < 500) return 2;
    return end->http_status == 503 ? 3 : 4;
}

const dispatch_end *dispatch_sample_choose_end(const request *r) {
    const dispatch_end *worst = &r->samples[0].end;
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        const dispatch_end *end = &r->samples[i].end;
        if (end->status == BT_OK) return end;
        if (badness(end) > badness(worst)) worst = end;
    }
    return worst;
}

/* Nobody waits for the prompt's log-probabilities when every sample failed by itself; nor before
 * rows came, when prefill would hand KV to a decode that has given it up. */
static bool is_prompt_worth_waiting(const request *r) {
    if (r->state != REQUEST_STREAMING || dispatch_prompt_is_complete(r)) return false;
    return badness(dispatch_sample_choose_end(r)) <= 1;
}

void dispatch_sample_settle(dispatch *d, request *r, const worker *over_there) {
    if (r->samples_left > 0) return;
    if (is_prompt_worth_waiting(r)) {
        dispatch_attempt_release_decode(d, r, over_there);
        return;
    }
    const dispatch_end end = *dispatch_sample_choose_end(r);
    dispatch_attempt_drop(d, r, over_there);
    dispatch_request_end(d, r, &end);
}

void dispatch_sample_end(dispatch *d, request *r, uint32_t index, const dispatch_end *end,
                         const worker *over_there) {
    dispatch_sample_tell_end(d, r, index, end);
    dispatch_sample_settle(d, r, over_there);
}

/* With the last sample the whole attempt is cancelled, so decode is told of all of it. */
void dispatch_sample_cancel(dispatch *d, request *r, uint32_t index) {
    if (index >= r->generation.samples || r->samples[index].has_ended) return;
    const dispatch_end end = {.status = BT_ERR_REQUEST_CANCELLED,
                              .finish = PROTO_FINISH_ERROR,
                              .text = "the sample was cancelled"};
    if (r->samples_left > 1) dispatch_attempt_cancel_sample(d, r, index);
    dispatch_sample_end(d, r, index, &end, NULL);
}
