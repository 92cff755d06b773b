/* Who gets pages, slots and places: reservations; the prompt's words; cancels and aborts; CAPACITY.
 */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "decode/decode_internal.h"

/* ---- RESERVE --------------------------------------------------------------------------------- */

static void refuse(decode_core *core, proto_attempt id, bt_status status, const char *text) {
    proto_message message = {.kind = PROTO_RESERVATION};
    message.reservation = (proto_reservation){.attempt = id, .status = status};
    proto_text_copy(message.reservation.text, sizeof message.reservation.text, text);
    core->refused_total++;
    bt_log_debug("decode", "attempt " DECODE_ID_FORMAT " refused: %s: %s", DECODE_ID_ARGS(id),
                 bt_status_string(status), text);
    if (status == BT_ERR_REQUEST_FULL) {
        core->owes_capacity = true;
        core->has_released = false;
    }
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}

static void accept(decode_core *core, const decode_attempt *a) {
    proto_message message = {.kind = PROTO_RESERVATION};
    proto_reservation *r = &message.reservation;
    r->attempt = a->id;
    r->slot_count = a->generation.samples;
    for (uint32_t i = 0; i < r->slot_count; i++) {
        const row_slot slot = a->samples[i]->slot;
        r->slots[i] = (proto_slot){.index = slot.index, .generation = slot.generation};
    }
    core->accepted_total++;
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}

/* What can never be served here, whatever becomes free. */
static bt_status check_size(const decode_core *core, const proto_reserve *r, bt_error *error) {
    const decode_core_options *o = &core->options;
    const uint64_t tokens = (uint64_t)r->prompt_tokens + r->generation.max_new_tokens;
    if (tokens > o->context_tokens) {
        return bt_fail(error, BT_ERR_REQUEST_TOO_LARGE,
                       "%" PRIu32 " prompt tokens and %" PRIu32
                       " new tokens are more than the context of %" PRIu32,
                       r->prompt_tokens, r->generation.max_new_tokens, o->context_tokens);
    }
    /* The last token is drawn and never fed back: its KV is not written. Samples need not run at
     * the same time, so one must fit. */
    const uint64_t kv_tokens = tokens - 1;
    const uint32_t pages = kv_pages_for((uint32_t)kv_tokens, o->page_tokens);
    const uint32_t total = kv_pool_count(o->pages).total;
    if (pages > total) {
        return bt_fail(error, BT_ERR_REQUEST_TOO_LARGE,
                       "%" PRIu64 " tokens need %" PRIu32
                       " KV pages; this decode worker has %" PRIu32,
                       kv_tokens, pages, total);
    }
    if (r->generation.samples > o->sequences_max) {
        return bt_fail(error, BT_ERR_REQUEST_TOO_LARGE,
                       "%" PRIu32 " samples; the batch of this decode worker has %" PRIu32
                       " places",
                       r->generation.samples, o->sequences_max);
    }
    return BT_OK;
}

static bt_status check_reserve(const decode_core *core, const proto_reserve *r, bt_error *error) {
    const proto_generation *g = &r->generation;
    if (r->attempt.router_incarnation != core->member.session.welcome.router_incarnation) {
        return bt_fail(error, BT_ERR_REQUEST_STALE, "the attempt is of another router incarnation");
    }
    bt_status status = proto_generation_check(g, error);
    if (status != BT_OK) return status;
    if (r->prompt_tokens == 0 || g->max_new_tokens == 0 || r->deadline_ms == 0) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID,
                       "a reservation of %" PRIu32 " prompt tokens, %" PRIu32
                       " new tokens and %" PRIu32 " ms",
                       r->prompt_tokens, g->max_new_tokens, r->deadline_ms);
    }
    status = attempt_words_check_bans(g, core->options.vocab_size, error);
    if (status != BT_OK) return status;
    return check_size(core, r, error);
}

/* Nobody here has pages or will want any: rows that wait for a slow reader hold up nothing. */
static bool is_alone(const decode_core *core) {
    for (uint32_t i = 0; i < core->order_count; i++)
        if (core->order[i]->state != DECODE_DRAINING) return false;
    return true;
}

/* What is here may go on growing for a while before it has to retract anything: for each sample
 * that can still grow one page stays free, and nothing new comes in while a retracted one waits.
 * Who has the worker to itself needs no more than its prompt. */
static bt_status check_room(const decode_core *core, const proto_reserve *r, bt_error *error) {
    const uint32_t samples = r->generation.samples;
    const uint32_t places = decode_free_places(core);
    const uint32_t free_pages = kv_pool_count(core->options.pages).free;
    uint32_t pages = kv_pages_for(r->prompt_tokens, core->options.page_tokens);
    if (places == 0)
        return bt_fail(error, BT_ERR_REQUEST_FULL, "every place of the batch is taken");
    if (samples > places) {
        return bt_fail(error, BT_ERR_REQUEST_FULL,
                       "%" PRIu32 " samples need a place each; %" PRIu32 " of the batch are free",
                       samples, places);
    }
    if (decode_has_retracted(core)) {
        return bt_fail(error, BT_ERR_REQUEST_FULL, "a retracted sample waits for KV pages");
    }
    uint32_t growth = 0;
    if (!is_alone(core)) {
        growth =
            decode_growth_reserve(core) + decode_growth_of(core, r->prompt_tokens, &r->generation);
    }
    if (free_pages >= pages + growth) return BT_OK;
    return bt_fail(error, BT_ERR_REQUEST_FULL,
                   "%" PRIu32 " KV pages are needed and %" PRIu32 " for growth, %" PRIu32
                   " are free",
                   pages, growth, free_pages);
}

/* All of it, or a status; what was taken is the samples'. */
static bt_status acquire(decode_core *core, decode_attempt *a, bt_error *error) {
    const decode_core_options *o = &core->options;
    decode_sample *first = a->samples[0];
    const uint32_t pages = kv_pages_for(a->prompt_tokens, o->page_tokens);
    bt_status status = kv_pool_acquire(o->pages, decode_owner(a), pages, first->pages);
    if (status != BT_OK) return bt_fail(error, status, "no KV pages");
    first->page_count = pages;
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        decode_sample *s = a->samples[i];
        status = row_pool_acquire(core->member.rows, &s->slot);
        if (status != BT_OK) return bt_fail(error, status, "no row slot is free");
        s->has_slot = true;
        status = decode_make_queue(core, s);
        if (status != BT_OK) return bt_fail(error, status, "no memory for rows");
    }
    status = decode_sampling_need(core, &a->generation);
    if (status != BT_OK) return bt_fail(error, status, "no memory for rows");
    status = attempt_words_init(&a->generation, a->prompt_tokens, &a->words);
    if (status != BT_OK) return bt_fail(error, status, "no memory for the prompt");
    return BT_OK;
}

static bt_status expect(decode_core *core, const decode_attempt *a, bt_error *error) {
    row_slot slots[PROTO_SAMPLES_MAX];
    for (uint32_t i = 0; i < a->generation.samples; i++)
        slots[i] = a->samples[i]->slot;
    const handoff_offer offer = {
        .attempt = a->id,
        .peer = a->prefill,
        .sample_count = a->generation.samples,
        .slots = slots,
        .prompt_tokens = a->prompt_tokens,
        .page_count = a->samples[0]->page_count,
        .pages = a->samples[0]->pages,
        .mask_mode = a->generation.mask_mode,
        .mask_bounded = a->generation.mask_bounded,
        .deadline_us = a->deadline_us,
    };
    const bt_status status = handoff_receiver_expect(core->receiver, &offer);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "the handoff cannot be prepared: %s", bt_status_string(status));
}

void decode_on_reserve(decode_core *core, const proto_reserve *r) {
    const xfer_peer prefill = {.worker_id = r->prefill_worker_id,
                               .incarnation = r->prefill_incarnation};
    bt_error error = {0};
    if (decode_find(core, r->attempt) != NULL) {
        refuse(core, r->attempt, BT_ERR_REQUEST_DUPLICATE, "this attempt is here already");
        return;
    }
    bt_status status = check_reserve(core, r, &error);
    if (status == BT_OK && !peer_table_is_usable(&core->member.peers, prefill)) {
        status = bt_fail(&error, BT_ERR_PEER_GONE, "prefill worker %" PRIu32 " is not connected",
                         prefill.worker_id);
    }
    if (status == BT_OK) status = check_room(core, r, &error);
    if (status != BT_OK) {
        refuse(core, r->attempt, status, error.text);
        return;
    }
    decode_attempt *a = decode_admit(core, r, prefill);
    status = acquire(core, a, &error);
    if (status == BT_OK) status = expect(core, a, &error);
    if (status != BT_OK) {
        /* No transfer knows of it yet. */
        decode_set_attempt_state(core, a, DECODE_ATTEMPT_QUARANTINE, "refused");
        decode_release_attempt(core, a, "refused");
        refuse(core, r->attempt, status, error.text);
        return;
    }
    accept(core, a);
}

/* ---- words ----------------------------------------------------------------------------------- */

bool decode_has_words(const decode_attempt *a) {
    return attempt_words_are_complete(&a->words);
}

static void run_waiting(decode_core *core, decode_attempt *a) {
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        decode_sample *s = a->samples[i];
        if (s != NULL && s->state == DECODE_WAITING)
            decode_set_state(core, s, DECODE_RUNNING, 0, "the words are there");
    }
}

void decode_on_prompt(decode_core *core, const proto_message *message) {
    const proto_prompt *prompt = &message->prompt;
    decode_attempt *a = decode_find(core, prompt->attempt);
    bt_error error = {0};
    if (a == NULL || a->state == DECODE_ATTEMPT_QUARANTINE) return; /* it may have ended */
    const bt_status status =
        attempt_words_add(&a->words, prompt->first_word, message->payload, message->payload_bytes,
                          core->options.vocab_size, &error);
    if (status != BT_OK) {
        bt_log(bt_log_level_of(status), "decode", "attempt " DECODE_ID_FORMAT ": %s",
               DECODE_ID_ARGS(a->id), error.text);
        decode_abandon_attempt(core, a, status, error.text);
        decode_end_attempt(core, a, "bad words");
        return;
    }
    if (decode_has_words(a)) run_waiting(core, a);
}

/* ---- the rest -------------------------------------------------------------------------------- */

void decode_on_cancel(decode_core *core, const proto_cancel *cancel) {
    decode_attempt *a = decode_find(core, cancel->attempt);
    if (a == NULL) return;
    if (cancel->sample == PROTO_ALL_SAMPLES) {
        decode_end_attempt(core, a, "cancelled");
        return;
    }
    decode_sample *s = decode_find_sample(core, cancel->attempt, cancel->sample);
    if (s != NULL) decode_end(core, s, "cancelled");
}

static void abort_sample(decode_core *core, decode_sample *s) {
    switch (s->state) {
    case DECODE_RESERVED:
        if (s->is_cancelled) return;
        decode_abort_empty(core, s);
        decode_end(core, s, "aborted");
        return;
    case DECODE_WAITING:
    case DECODE_RUNNING:
    case DECODE_PARKED:
    case DECODE_RETRACTED:
    case DECODE_RECOMPUTING:
        s->is_aborted = true;
        if (!s->is_in_step) decode_finish(core, s, PROTO_FINISH_ABORT, 0);
        return;
    case DECODE_DRAINING: /* it has finished by itself */
    case DECODE_LEAVING:
    case DECODE_FREE:
    case DECODE_STATE_COUNT: return;
    }
}

/* What was aborted or has ended is so already; of an attempt in quarantine the router was told. */
void decode_on_abort(decode_core *core, const proto_cancel *abort) {
    decode_attempt *a = decode_find(core, abort->attempt);
    if (a == NULL || a->state == DECODE_ATTEMPT_QUARANTINE) return;
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        const bool is_meant = abort->sample == PROTO_ALL_SAMPLES || abort->sample == i;
        if (is_meant && a->samples[i] != NULL) abort_sample(core, a->samples[i]);
    }
}

/* A FULL is followed by one CAPACITY, once there is at least one of everything again. */
void decode_capacity_turn(decode_core *core) {
    if (!core->owes_capacity || !core->has_released) return;
    if (!membership_is_serving(&core->member)) return;
    core->has_released = false;
    proto_message message = {.kind = PROTO_CAPACITY};
    proto_capacity *capacity = &message.capacity;
    capacity->sequences_free = decode_free_places(core);
    capacity->pages_free = kv_pool_count(core->options.pages).free;
    capacity->rows_free = row_pool_free_count(core->member.rows);
    /* There is a row slot for every place. */
    if (capacity->sequences_free == 0 || capacity->pages_free == 0) return;
    if (decode_has_retracted(core)) return; /* its return counts as a release */
    core->owes_capacity = false;
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}
