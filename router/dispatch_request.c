/* Requests from submit to their one end, their deadlines, and what an end looks like to a client.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/dispatch_internal.h"
#include "router/http_status.h"

static const char *const state_names[REQUEST_STATES] = {"queued", "reserving", "running",
                                                        "streaming", "ended"};

static const bool is_edge[REQUEST_STATES][REQUEST_STATES] = {
    [REQUEST_QUEUED] =
        {[REQUEST_RESERVING] = true, [REQUEST_RUNNING] = true, [REQUEST_ENDED] = true},
    [REQUEST_RESERVING] =
        {[REQUEST_QUEUED] = true, [REQUEST_RUNNING] = true, [REQUEST_ENDED] = true},
    [REQUEST_RUNNING] =
        {[REQUEST_QUEUED] = true, [REQUEST_STREAMING] = true, [REQUEST_ENDED] = true},
    [REQUEST_STREAMING] = {[REQUEST_QUEUED] = true, [REQUEST_ENDED] = true},
};

void dispatch_request_set_state(dispatch *d, request *r, request_state next) {
    (void)d;
    BT_ASSERT(is_edge[r->state][next]);
    bt_log_trace("dispatch", "request %llu: %s -> %s", (unsigned long long)r->id,
                 state_names[r->state], state_names[next]);
    r->state = next;
}

/* ---- submit ---------------------------------------------------------------------------------- */

bool dispatch_request_is_hopeless(const dispatch *d) {
    if (d->ready_pairs > 0) return false;
    return !d->was_ready || d->now_us >= d->ready_lost_us + d->options.no_worker_grace_ms * 1000ull;
}

static bt_status check_ids(const int32_t *ids, uint32_t count, uint32_t vocab_size,
                           bt_error *error) {
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] >= 0 && (uint32_t)ids[i] < vocab_size) continue;
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "token id %d is outside the vocabulary",
                       ids[i]);
    }
    return BT_OK;
}

/* What the workers would refuse; before anything was computed it costs nothing. */
static bt_status check_words(const dispatch *d, const dispatch_request *from, bt_error *error) {
    const proto_generation *g = &from->generation;
    const worker *founder = dispatch_hello_founder(d);
    const uint32_t vocab_size = founder == NULL ? PROTO_VOCAB_MAX : founder->hello.vocab_size;
    const int32_t *at = from->words;
    bt_status status = check_ids(at, from->prompt_tokens, vocab_size, error);
    at += from->prompt_tokens;
    if (status == BT_OK) status = check_ids(at, g->bias_count, vocab_size, error);
    at += g->bias_count;
    for (uint32_t i = 0; status == BT_OK && i < g->bias_count; i++) {
        float bias;
        memcpy(&bias, at + i, sizeof bias);
        if (!isfinite(bias) && bias != -INFINITY)
            status = bt_fail(error, BT_ERR_REQUEST_INVALID, "a bias is not a finite number");
    }
    at += g->bias_count;
    if (status == BT_OK) status = check_ids(at, g->logprob_id_count, vocab_size, error);
    return status;
}

static bt_status check_submit(const dispatch *d, const dispatch_request *from, bt_error *error) {
    if (from->id == 0 || from->prompt_tokens == 0 || from->prompt_tokens > PROTO_TOKENS_MAX) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "the prompt has no tokens, or too many");
    }
    const bt_status status = proto_generation_check(&from->generation, error);
    if (status != BT_OK) return status;
    if (from->generation.wants_prompt_logprobs &&
        from->generation.prompt_logprobs_from >= from->prompt_tokens) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID,
                       "log-probabilities from position %u of a prompt of %u tokens",
                       from->generation.prompt_logprobs_from, from->prompt_tokens);
    }
    if (bt_id_map_get(&d->requests, bt_id_of(from->id)) != NULL) {
        return bt_fail(error, BT_ERR_REQUEST_DUPLICATE, "a request of this id is running");
    }
    if (dispatch_request_is_hopeless(d)) {
        return bt_fail(error, BT_ERR_REQUEST_NO_WORKER,
                       "no prefill and decode worker are ready to serve");
    }
    if (d->request_count >= d->options.requests_max) {
        return bt_fail(error, BT_ERR_REQUEST_FULL, "%u requests are queued or running already",
                       d->request_count);
    }
    return check_words(d, from, error);
}

bt_status dispatch_request_submit(dispatch *d, const dispatch_request *from, bt_error *error) {
    const bt_status status = check_submit(d, from, error);
    if (status != BT_OK) return status;
    request *r = bt_calloc(1, sizeof *r);
    request_sample *samples = bt_calloc(from->generation.samples, sizeof *samples);
    if (r == NULL || samples == NULL) {
        bt_free(r);
        bt_free(samples);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "the router is out of memory");
    }
    r->id = from->id;
    r->order = d->next_order++;
    r->state = REQUEST_QUEUED;
    r->words = from->words;
    r->samples = samples;
    r->samples_left = from->generation.samples;
    r->prompt_tokens = from->prompt_tokens;
    r->generation = from->generation;
    r->is_credited = from->is_credited;
    r->may_restart = from->may_restart;
    r->emission_rows = from->emission_rows;
    r->submitted_us = d->now_us;
    const uint32_t timeout_ms =
        from->timeout_ms == 0 ? d->options.request_timeout_ms : from->timeout_ms;
    r->deadline_us = dispatch_after_ms(d, timeout_ms);
    r->all_next = d->all_first;
    if (r->all_next != NULL) r->all_next->all_prev = r;
    d->all_first = r;
    bt_id_map_put(&d->requests, bt_id_of(r->id), r);
    d->request_count++;
    d->requests_total++;
    dispatch_queue_insert(d, r);
    return BT_OK;
}

/* ---- the end --------------------------------------------------------------------------------- */

static void unlist(dispatch *d, request *r) {
    if (r->all_next != NULL) r->all_next->all_prev = r->all_prev;
    if (r->all_prev != NULL) {
        r->all_prev->all_next = r->all_next;
    } else {
        d->all_first = r->all_next;
    }
    bt_id_map_remove(&d->requests, bt_id_of(r->id));
    d->request_count--;
}

static void free_request(request *r) {
    bt_free(r->samples);
    bt_free(r);
}

void dispatch_request_end(dispatch *d, request *r, const dispatch_end *end) {
    dispatch_end told = *end;
    dispatch_attempt_drop(d, r, NULL);
    bool is_excused = r->samples_left > 0; /* all that was left of it is aborted instead */
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        if (r->samples[i].has_ended) continue;
        dispatch_sample_tell_end(d, r, i, end);
        is_excused = is_excused && r->samples[i].end.finish == PROTO_FINISH_ABORT;
    }
    if (is_excused) told = *dispatch_sample_choose_end(r);
    dispatch_sample_add_totals(r, &told);
    dispatch_sample_fill_end(d, r, &told);
    if (r->state == REQUEST_QUEUED) dispatch_queue_remove(d, r);
    dispatch_queue_drop_claim(d, r);
    dispatch_request_set_state(d, r, REQUEST_ENDED);
    unlist(d, r);
    d->is_calling = true;
    d->ops.on_end(d->ops.context, r->id, &told);
    d->is_calling = false;
    free_request(r);
}

void dispatch_request_end_with(dispatch *d, request *r, bt_status status, const char *format, ...) {
    dispatch_end end = {.status = status, .finish = PROTO_FINISH_ERROR};
    char text[2 * PROTO_TEXT_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    proto_text_copy(end.text, sizeof end.text, text);
    dispatch_request_end(d, r, &end);
}

/* ---- deadlines ------------------------------------------------------------------------------- */

static uint64_t elapsed_ms(const dispatch *d, uint64_t since_us) {
    return (d->now_us - since_us) / 1000u;
}

/* Whom a request that is with workers waits for. */
static const worker *awaited(const request *r) {
    const worker *prefill = r->legs[LEG_PREFILL].worker, *decode = r->legs[LEG_DECODE].worker;
    if (decode == NULL || !r->is_prefill_done) return prefill == NULL ? decode : prefill;
    return dispatch_prompt_is_complete(r) || prefill == NULL ? decode : prefill;
}

/* The request's own time is over, wherever it is. */
static void end_late(dispatch *d, request *r) {
    const unsigned long long ms = elapsed_ms(d, r->submitted_us);
    const worker *decode = r->legs[LEG_DECODE].worker;
    const bt_status status = BT_ERR_REQUEST_DEADLINE;
    switch (r->state) {
    case REQUEST_QUEUED:
        dispatch_request_end_with(d, r, status,
                                  "queued for %llu ms and no pair of workers had room%s%s", ms,
                                  r->last_text[0] == '\0' ? "" : "; the last try: ", r->last_text);
        return;
    case REQUEST_RESERVING:
        dispatch_request_end_with(
            d, r, status, "the request's %llu ms passed while reserving at %s", ms, decode->name);
        return;
    case REQUEST_RUNNING:
        dispatch_request_end_with(d, r, status, "the request's %llu ms passed while waiting for %s",
                                  ms, awaited(r)->name);
        return;
    case REQUEST_STREAMING:
        dispatch_request_end_with(d, r, status,
                                  "the request's %llu ms passed while streaming from %s", ms,
                                  decode == NULL ? awaited(r)->name : decode->name);
        return;
    case REQUEST_ENDED:
    case REQUEST_STATES: break;
    }
    BT_ASSERT(false);
}

/* One phase took too long: the try failed, another may follow. */
static void fail_late(dispatch *d, request *r) {
    char text[2 * PROTO_TEXT_MAX];
    const worker *prefill = r->legs[LEG_PREFILL].worker, *decode = r->legs[LEG_DECODE].worker;
    if (r->state == REQUEST_RESERVING) {
        (void)snprintf(text, sizeof text, "%s did not answer a reservation within %u ms",
                       decode->name, d->options.reserve_timeout_ms);
    } else if (r->state == REQUEST_RUNNING && !r->is_prefill_done) {
        (void)snprintf(text, sizeof text, "%s did not compute the prompt within %u ms",
                       prefill->name, d->options.handoff_timeout_ms);
    } else if (!dispatch_prompt_is_complete(r)) {
        (void)snprintf(text, sizeof text,
                       "%s did not bring the prompt's log-probabilities within %u ms",
                       prefill->name, d->options.handoff_timeout_ms);
    } else {
        (void)snprintf(text, sizeof text, "%s did not prove the handoff from %s within %u ms",
                       decode->name, prefill->name, d->options.handoff_timeout_ms);
    }
    dispatch_attempt_fail(d, r, BT_ERR_REQUEST_DEADLINE, text, NULL);
}

static void tick_one(dispatch *d, request *r, bool is_hopeless) {
    const bool has_phase = r->state == REQUEST_RESERVING || r->state == REQUEST_RUNNING ||
                           (r->state == REQUEST_STREAMING && !dispatch_prompt_is_complete(r));
    if (d->now_us >= r->deadline_us) {
        end_late(d, r);
    } else if (has_phase && d->now_us >= r->phase_deadline_us) {
        fail_late(d, r);
    } else if (r->state == REQUEST_QUEUED && is_hopeless) {
        dispatch_request_end_with(d, r, BT_ERR_REQUEST_NO_WORKER,
                                  "no prefill and decode worker have been ready for %llu ms%s%s",
                                  (unsigned long long)elapsed_ms(d, d->ready_lost_us),
                                  r->last_text[0] == '\0' ? "" : "; the last try: ", r->last_text);
    }
}

void dispatch_request_tick(dispatch *d) {
    const bool is_hopeless = dispatch_request_is_hopeless(d);
    request *r = d->all_first;
    while (r != NULL) {
        request *next = r->all_next;
        tick_one(d, r, is_hopeless);
        r = next;
    }
}
