/* One try of a request: reservation at decode, RUN to prefill, its end. Decode holds pages for the
 * prompt and takes more as samples grow, which is seen in its heartbeats. Whatever ends an attempt
 * goes through dispatch_attempt_drop, which cancels the legs that are still there and gives the
 * loads back; messages of a dropped attempt find nothing and are counted as late. */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/dispatch_internal.h"
#include "router/http_status.h"

request *dispatch_attempt_find(dispatch *d, proto_attempt attempt) {
    request *r = attempt.router_incarnation == d->options.incarnation
                     ? bt_id_map_get(&d->attempts, bt_id_of(attempt.counter))
                     : NULL;
    if (r == NULL) d->late_total++;
    return r;
}

proto_attempt dispatch_attempt_name(const dispatch *d, const request *r) {
    return (proto_attempt){.router_incarnation = d->options.incarnation, .counter = r->attempt};
}

/* ---- legs and loads -------------------------------------------------------------------------- */

static void add_leg(request *r, int side, worker *w) {
    leg *l = &r->legs[side];
    r->worker_ids[side] = w == NULL ? 0 : w->id;
    *l = (leg){.worker = w};
    if (w == NULL) return;
    l->next = w->attempts;
    if (l->next != NULL) l->next->legs[side].prev = r;
    w->attempts = r;
    w->attempt_count++;
    w->sample_count += r->generation.samples;
}

static void remove_leg(request *r, int side) {
    leg *l = &r->legs[side];
    worker *w = l->worker;
    if (w == NULL) return;
    if (l->next != NULL) l->next->legs[side].prev = l->prev;
    if (l->prev != NULL) {
        l->prev->legs[side].next = l->next;
    } else {
        w->attempts = l->next;
    }
    w->attempt_count--;
    w->sample_count -= r->generation.samples;
    *l = (leg){.worker = NULL};
}

/* The prompt is computed, or will not be. */
static void uncount_load(dispatch *d, request *r) {
    worker *w = r->legs[LEG_PREFILL].worker;
    if (!r->is_load_counted || w == NULL) return;
    BT_ASSERT(w->queued_tokens >= r->prompt_tokens);
    r->is_load_counted = false;
    w->queued_tokens -= r->prompt_tokens;
    if (dispatch_queue_is_short(w, r)) w->queued_tokens_short -= r->prompt_tokens;
    if (w->queued_tokens_left > w->queued_tokens) w->queued_tokens_left = w->queued_tokens;
    d->is_queue_dirty = true;
}

void dispatch_attempt_release_prefill(dispatch *d, request *r) {
    uncount_load(d, r);
    remove_leg(r, LEG_PREFILL);
}

static void send_cancel(dispatch *d, const request *r, connection *to, uint32_t index) {
    proto_message message = {.kind = PROTO_CANCEL};
    message.cancel.attempt = dispatch_attempt_name(d, r);
    message.cancel.sample = index;
    dispatch_send(d, to, &message);
}

void dispatch_attempt_cancel_sample(dispatch *d, const request *r, uint32_t index) {
    const worker *decode = r->legs[LEG_DECODE].worker;
    if (decode != NULL) send_cancel(d, r, decode->control, index);
}

void dispatch_attempt_release_decode(dispatch *d, request *r, const worker *over_there) {
    worker *w = r->legs[LEG_DECODE].worker;
    if (w == NULL) return;
    if (w != over_there) send_cancel(d, r, w->control, PROTO_ALL_SAMPLES);
    BT_ASSERT(w->pages_used >= r->need_pages);
    w->pages_used -= r->need_pages;
    remove_leg(r, LEG_DECODE);
    d->is_queue_dirty = true;
}

void dispatch_attempt_drop(dispatch *d, request *r, const worker *over_there) {
    if (r->attempt == 0) return;
    const worker *prefill = r->legs[LEG_PREFILL].worker;
    if (prefill != NULL && prefill != over_there && r->is_run_sent) {
        send_cancel(d, r, prefill->streams, PROTO_ALL_SAMPLES);
    }
    dispatch_attempt_release_decode(d, r, over_there);
    dispatch_attempt_release_prefill(d, r);
    dispatch_stream_end(r);
    bt_id_map_remove(&d->attempts, bt_id_of(r->attempt));
    r->attempt = 0;
}

/* ---- begin ----------------------------------------------------------------------------------- */

/* What is left for the handoff, as a duration for the wire. */
static uint32_t handoff_ms(const dispatch *d, const request *r) {
    if (d->now_us >= r->handoff_deadline_us) return 1;
    return (uint32_t)((r->handoff_deadline_us - d->now_us) / 1000u) + 1;
}

static void send_reserve(dispatch *d, request *r) {
    const worker *prefill = r->legs[LEG_PREFILL].worker;
    proto_message message = {.kind = PROTO_RESERVE};
    proto_reserve *out = &message.reserve;
    out->attempt = dispatch_attempt_name(d, r);
    out->prefill_worker_id = prefill->id;
    out->prefill_incarnation = prefill->hello.incarnation;
    out->prompt_tokens = r->prompt_tokens;
    out->deadline_ms = handoff_ms(d, r);
    out->credit_bytes = dispatch_stream_window(d, r);
    out->emission_rows = r->emission_rows;
    out->generation = r->generation;
    dispatch_send(d, r->legs[LEG_DECODE].worker->control, &message);
}

static void run(dispatch *d, request *r) {
    dispatch_request_set_state(d, r, REQUEST_RUNNING);
    r->phase_deadline_us = r->handoff_deadline_us;
    /* Part of RUN may be with prefill when memory ends, so that it is cancelled there as well. */
    r->is_run_sent = true;
    r->run_sent_us = d->now_us;
    bool is_sent = r->legs[LEG_DECODE].worker == NULL || dispatch_prompt_send_to_decode(d, r);
    if (is_sent) is_sent = dispatch_prompt_send_run(d, r, handoff_ms(d, r));
    if (is_sent) return;
    dispatch_attempt_fail(d, r, BT_ERR_WORKER_MEMORY, "the router has no memory for the prompt",
                          NULL);
}

void dispatch_attempt_begin(dispatch *d, request *r, worker *prefill, worker *decode) {
    BT_ASSERT(r->attempt == 0);
    BT_ASSERT(r->state == REQUEST_QUEUED);
    r->attempt = d->next_attempt++;
    bt_id_map_put(&d->attempts, bt_id_of(r->attempt), r);
    r->is_run_sent = r->is_prefill_done = false;
    r->slot_count = 0;
    r->cap_needed = 0;
    r->tries++;
    add_leg(r, LEG_PREFILL, prefill);
    add_leg(r, LEG_DECODE, decode);
    r->is_load_counted = true;
    prefill->queued_tokens += r->prompt_tokens;
    if (dispatch_queue_is_short(prefill, r)) prefill->queued_tokens_short += r->prompt_tokens;
    prefill->queued_tokens_left += r->prompt_tokens;
    r->handoff_deadline_us = dispatch_after_ms(d, d->options.handoff_timeout_ms);
    if (r->handoff_deadline_us > r->deadline_us) r->handoff_deadline_us = r->deadline_us;
    dispatch_prompt_begin(r);
    dispatch_stream_begin(d, r);
    dispatch_queue_remove(d, r);
    if (decode == NULL) {
        run(d, r);
        return;
    }
    decode->pages_used += r->need_pages;
    dispatch_request_set_state(d, r, REQUEST_RESERVING);
    r->phase_deadline_us = dispatch_after_ms(d, d->options.reserve_timeout_ms);
    send_reserve(d, r);
}

/* ---- failing over ---------------------------------------------------------------------------- */

bool dispatch_attempt_is_worth_a_retry(bt_status status) {
    switch (bt_status_scope(status)) {
    case BT_SCOPE_PEER:
    case BT_SCOPE_WORKER: return true;
    case BT_SCOPE_REQUEST:
        return status == BT_ERR_REQUEST_CANCELLED || status == BT_ERR_REQUEST_DEADLINE ||
               status == BT_ERR_REQUEST_FULL || status == BT_ERR_REQUEST_UNKNOWN ||
               status == BT_ERR_REQUEST_DUPLICATE || status == BT_ERR_REQUEST_CORRUPT ||
               status == BT_ERR_REQUEST_STALE || status == BT_ERR_REQUEST_NO_WORKER;
    case BT_SCOPE_NONE:
    case BT_SCOPE_CALLER: return false;
    }
    return false;
}

bool dispatch_attempt_has_another_try(const dispatch *d, const request *r) {
    return (r->rows_handed == 0 || r->may_restart) && r->samples_left > 0 &&
           r->tries < d->options.attempts_max && d->now_us < r->deadline_us;
}

static void requeue(dispatch *d, request *r) {
    dispatch_request_set_state(d, r, REQUEST_QUEUED);
    dispatch_queue_insert(d, r);
}

void dispatch_attempt_fail(dispatch *d, request *r, bt_status status, const char *text,
                           const worker *over_there) {
    char kept[PROTO_TEXT_MAX];
    proto_text_copy(kept, sizeof kept, text);
    r->avoid_ids[LEG_PREFILL] = r->worker_ids[LEG_PREFILL];
    r->avoid_ids[LEG_DECODE] = r->worker_ids[LEG_DECODE];
    dispatch_attempt_drop(d, r, over_there);
    if (dispatch_abort_settle(d, r)) return;
    if (!dispatch_attempt_has_another_try(d, r) || !dispatch_attempt_is_worth_a_retry(status)) {
        dispatch_request_end_with(d, r, http_status_blame(status), "%s", kept);
        return;
    }
    bt_log_debug("dispatch", "request %llu is tried again: %s", (unsigned long long)r->id, kept);
    d->retries_total++;
    r->last_status = status;
    memcpy(r->last_text, kept, sizeof kept);
    dispatch_stream_take_back(d, r);
    requeue(d, r);
}

void dispatch_attempt_violate(dispatch *d, request *r, const worker *from, const char *what) {
    char text[2 * PROTO_TEXT_MAX];
    d->protocol_errors_total++;
    (void)snprintf(text, sizeof text, "%s broke the protocol: %s", from->name, what);
    bt_log_error("dispatch", "request %llu: %s", (unsigned long long)r->id, text);
    dispatch_attempt_fail(d, r, BT_ERR_PEER_PROTOCOL, text, NULL);
}

/* Not a failure: nobody had room. The try does not count. */
static void put_back(dispatch *d, request *r, const worker *over_there) {
    dispatch_attempt_drop(d, r, over_there);
    if (dispatch_abort_settle(d, r)) return;
    r->tries--;
    requeue(d, r);
}

void dispatch_attempt_on_worker_gone(dispatch *d, worker *w, bt_status status, const char *why) {
    char text[2 * PROTO_TEXT_MAX];
    (void)snprintf(text, sizeof text, "%s is gone: %s", w->name, why);
    while (w->attempts != NULL)
        dispatch_attempt_fail(d, w->attempts, status, text, NULL);
}

void dispatch_attempt_on_pair_broken(dispatch *d, worker *prefill, worker *decode,
                                     bt_status status) {
    char text[2 * PROTO_TEXT_MAX];
    (void)snprintf(text, sizeof text, "the pair of %s and %s broke", prefill->name, decode->name);
    request *r = prefill->attempts;
    while (r != NULL) {
        request *next = r->legs[LEG_PREFILL].next;
        /* With rows the handoff is over, whatever else prefill may still have to bring. */
        const bool is_theirs =
            r->legs[LEG_DECODE].worker == decode && r->state != REQUEST_STREAMING;
        if (is_theirs) dispatch_attempt_fail(d, r, status, text, NULL);
        r = next;
    }
}

/* ---- reservation ----------------------------------------------------------------------------- */

/* The worker's own words, or the name of the status. */
static const char *words(const char *text, int32_t status) {
    return text[0] != '\0' ? text : bt_status_string((bt_status)status);
}

/* A slot per sample, and none twice. */
static bool are_slots_right(const request *r, const proto_reservation *reservation) {
    if (reservation->slot_count != r->generation.samples) return false;
    for (uint32_t i = 1; i < reservation->slot_count; i++) {
        for (uint32_t k = 0; k < i; k++) {
            if (reservation->slots[i].index == reservation->slots[k].index) return false;
        }
    }
    return true;
}

static void on_granted(dispatch *d, request *r, worker *from,
                       const proto_reservation *reservation) {
    if (!are_slots_right(r, reservation)) {
        dispatch_attempt_violate(d, r, from, "a reservation with the wrong row slots");
        return;
    }
    r->slot_count = reservation->slot_count;
    memcpy(r->slots, reservation->slots, sizeof *r->slots * r->slot_count);
    r->was_full = false;
    dispatch_queue_drop_claim(d, r);
    /* Samples that ended before this attempt are not drawn again. */
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        if (r->samples[i].has_ended) dispatch_attempt_cancel_sample(d, r, i);
    }
    run(d, r);
}

void dispatch_attempt_on_reservation(dispatch *d, worker *from,
                                     const proto_reservation *reservation) {
    request *r = dispatch_attempt_find(d, reservation->attempt);
    if (r == NULL) return;
    if (r->legs[LEG_DECODE].worker != from || r->state != REQUEST_RESERVING) {
        dispatch_registry_protocol_error(d, from->control, "a reservation that was not asked for");
        return;
    }
    const bt_status status = (bt_status)reservation->status;
    const char *text = words(reservation->text, reservation->status);
    if (status == BT_OK) {
        on_granted(d, r, from, reservation);
    } else if (status == BT_ERR_REQUEST_FULL) {
        r->was_full = true;
        dispatch_queue_on_full(d, from, r);
        put_back(d, r, from);
    } else if (status == BT_ERR_REQUEST_TOO_LARGE) {
        /* A larger decode may hold it; without one the queue ends it. */
        if (from->ready.pages_total > r->too_large_pages) {
            r->too_large_pages = from->ready.pages_total;
        }
        r->last_status = status;
        proto_text_copy(r->last_text, sizeof r->last_text, text);
        put_back(d, r, from);
    } else {
        dispatch_attempt_fail(d, r, status, text, from);
    }
}

/* ---- prefill is done ------------------------------------------------------------------------- */

/* Nothing was to be sampled. */
static void end_prefill_alone(dispatch *d, request *r) {
    const dispatch_end end = {.status = BT_OK, .finish = PROTO_FINISH_LENGTH};
    for (uint32_t i = 0; i < r->generation.samples; i++) {
        if (!r->samples[i].has_ended) dispatch_sample_tell_end(d, r, i, &end);
    }
    dispatch_sample_settle(d, r, r->legs[LEG_PREFILL].worker);
}

void dispatch_attempt_on_proven(dispatch *d, request *r) {
    if (r->state == REQUEST_STREAMING) return;
    dispatch_request_set_state(d, r, REQUEST_STREAMING);
    if (dispatch_prompt_is_complete(r)) {
        dispatch_attempt_release_prefill(d, r);
    } else {
        uncount_load(d, r);
    }
}

void dispatch_attempt_on_prompt_complete(dispatch *d, request *r) {
    if (r->generation.max_new_tokens == 0) {
        if (r->is_prefill_done) end_prefill_alone(d, r);
        return;
    }
    if (r->state == REQUEST_STREAMING) dispatch_attempt_release_prefill(d, r);
    dispatch_sample_settle(d, r, NULL);
}

static void on_prefill_ok(dispatch *d, request *r) {
    r->is_prefill_done = true;
    uncount_load(d, r);
    const bool is_alone = r->generation.max_new_tokens == 0;
    if (is_alone && dispatch_prompt_is_complete(r)) end_prefill_alone(d, r);
}

/* true: decode has proven the handoff; what is still awaited of prefill are log-probabilities,
 * which it has sent. */
static bool is_failure_too_late(const request *r) {
    if (r->legs[LEG_PREFILL].worker == NULL) return true;
    return r->is_prefill_done && r->state == REQUEST_STREAMING;
}

void dispatch_attempt_on_prefill_done(dispatch *d, worker *from, const proto_prefill_done *done) {
    request *r = dispatch_attempt_find(d, done->attempt);
    if (r == NULL) return;
    const bool is_ok = done->status == BT_OK;
    if (r->worker_ids[LEG_PREFILL] != from->id || !r->is_run_sent ||
        (is_ok && r->is_prefill_done)) {
        dispatch_registry_protocol_error(d, from->control, "a prefill_done that was not asked for");
        return;
    }
    if (done->cached_tokens >= r->prompt_tokens) {
        dispatch_attempt_violate(d, r, from, "more cached tokens than its prompt has");
        return;
    }
    if (is_ok) {
        if (r->state != REQUEST_STREAMING) r->cached_tokens = done->cached_tokens;
        on_prefill_ok(d, r);
        return;
    }
    if (is_failure_too_late(r)) return;
    if (done->status == BT_ERR_REQUEST_FULL && r->state == REQUEST_RUNNING) {
        r->not_before_us = dispatch_after_ms(d, PREFILL_FULL_RETRY_MS);
        put_back(d, r, from);
        return;
    }
    r->cap_needed = done->cap_needed;
    dispatch_attempt_fail(d, r, (bt_status)done->status, words(done->text, done->status), from);
}
