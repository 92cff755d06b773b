/* Requests from submit to their one end, their deadlines, and what an end looks like to a client.
 */
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

static bt_status check_submit(const dispatch *d, const dispatch_request *from, bt_error *error) {
    if (from->id == 0 || from->prompt_tokens == 0 || from->prompt_tokens > PROTO_TOKENS_MAX) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "the prompt has no tokens, or too many");
    }
    const bt_status status = proto_generation_check(&from->generation, error);
    if (status != BT_OK) return status;
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
    const worker *founder = dispatch_hello_founder(d);
    const uint32_t vocab_size = founder == NULL ? PROTO_VOCAB_MAX : founder->hello.vocab_size;
    for (uint32_t i = 0; i < from->prompt_tokens; i++) {
        if (from->words[i] < 0 || (uint32_t)from->words[i] >= vocab_size) {
            return bt_fail(error, BT_ERR_REQUEST_INVALID, "token id %d is outside the vocabulary",
                           from->words[i]);
        }
    }
    return BT_OK;
}

bt_status dispatch_request_submit(dispatch *d, const dispatch_request *from, bt_error *error) {
    const bt_status status = check_submit(d, from, error);
    if (status != BT_OK) return status;
    const size_t bytes = sizeof(int32_t) * proto_words(&from->generation, from->prompt_tokens);
    request *r = bt_calloc(1, sizeof *r);
    int32_t *words = bt_malloc(bytes);
    if (r == NULL || words == NULL) {
        bt_free(r);
        bt_free(words);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "the router is out of memory");
    }
    memcpy(words, from->words, bytes);
    r->id = from->id;
    r->order = d->next_order++;
    r->state = REQUEST_QUEUED;
    r->words = words;
    r->prompt_tokens = from->prompt_tokens;
    r->generation = from->generation;
    r->is_credited = from->is_credited;
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

/* Clients tell these errors apart by their words, which therefore never change. */
static const char capture_text[] =
    "The sampling backend selected a token outside its captured sampling support.";
static const char no_capture_text[] =
    "The sampling backend did not return captured sampling support.";

static void set_fixed_text(const dispatch *d, dispatch_end *end) {
    if (end->status == BT_ERR_REQUEST_OVERFLOW) {
        (void)snprintf(end->text, sizeof end->text,
                       "Sampling support exceeds --sampling-mask-max-tokens=%u, commonly because "
                       "of cutoff ties. Lower top_k to leave more headroom or increase the server "
                       "limit.",
                       d->record.sampling_mask_max_tokens);
    } else if (end->status == BT_ERR_REQUEST_CAPTURE && strcmp(end->text, no_capture_text) != 0) {
        memcpy(end->text, capture_text, sizeof capture_text);
    }
}

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

void dispatch_request_end(dispatch *d, request *r, const dispatch_end *end) {
    dispatch_end told = *end;
    told.http_status = http_status_of(told.status);
    told.rows_total = r->rows_handed;
    told.cached_tokens = r->cached_tokens;
    told.attempts = r->tries;
    set_fixed_text(d, &told);
    dispatch_attempt_drop(d, r, NULL);
    if (r->state == REQUEST_QUEUED) dispatch_queue_remove(d, r);
    dispatch_queue_drop_claim(d, r);
    dispatch_request_set_state(d, r, REQUEST_ENDED);
    unlist(d, r);
    d->is_calling = true;
    d->ops.on_end(d->ops.context, r->id, &told);
    d->is_calling = false;
    row_assembler_fini(&r->rows);
    bt_free(r->words);
    bt_free(r);
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

/* The request's own time is over, wherever it is. */
static void end_late(dispatch *d, request *r) {
    const unsigned long long ms = elapsed_ms(d, r->submitted_us);
    const worker *prefill = r->legs[LEG_PREFILL].worker, *decode = r->legs[LEG_DECODE].worker;
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
        dispatch_request_end_with(
            d, r, status, "the request's %llu ms passed while waiting for %s", ms,
            r->is_prefill_done && decode != NULL ? decode->name : prefill->name);
        return;
    case REQUEST_STREAMING:
        dispatch_request_end_with(
            d, r, status, "the request's %llu ms passed while streaming from %s", ms, decode->name);
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
    } else if (!r->is_prefill_done) {
        (void)snprintf(text, sizeof text, "%s did not compute the prompt within %u ms",
                       prefill->name, d->options.handoff_timeout_ms);
    } else {
        (void)snprintf(text, sizeof text, "%s did not prove the handoff from %s within %u ms",
                       decode->name, prefill->name, d->options.handoff_timeout_ms);
    }
    dispatch_attempt_fail(d, r, BT_ERR_REQUEST_DEADLINE, text, NULL);
}

static void tick_one(dispatch *d, request *r, bool is_hopeless) {
    const bool has_phase = r->state == REQUEST_RESERVING || r->state == REQUEST_RUNNING;
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
