/* Who gets pages, a slot and a place: reservations, and what the handoff says about them. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "decode/decode_internal.h"

/* ---- RESERVE --------------------------------------------------------------------------------- */

static void answer(decode_core *core, proto_attempt id, bt_status status, row_slot slot,
                   const char *text) {
    proto_message message = {.kind = PROTO_RESERVATION};
    message.reservation = (proto_reservation){
        .attempt = id,
        .status = status,
        .slot_count = status == BT_OK ? 1 : 0,
        .slots = {{.index = slot.index, .generation = slot.generation}},
    };
    proto_text_copy(message.reservation.text, sizeof message.reservation.text, text);
    if (status == BT_OK) {
        core->accepted_total++;
    } else {
        core->refused_total++;
        bt_log_debug("decode", "attempt " DECODE_ID_FORMAT " refused: %s: %s", DECODE_ID_ARGS(id),
                     bt_status_string(status), text);
    }
    if (status == BT_ERR_REQUEST_FULL) {
        core->owes_capacity = true;
        core->has_released = false;
    }
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}

/* What can never be served here, whatever becomes free. */
static bt_status check_reserve(decode_core *core, const proto_reserve *r, uint32_t *pages_out,
                               bt_error *error) {
    const decode_core_options *o = &core->options;
    const uint64_t tokens = (uint64_t)r->prompt_tokens + r->generation.max_new_tokens;
    if (r->attempt.router_incarnation != core->member.session.welcome.router_incarnation) {
        return bt_fail(error, BT_ERR_REQUEST_STALE, "the attempt is of another router incarnation");
    }
    const bt_status status = proto_generation_check(&r->generation, error);
    if (status != BT_OK) return status;
    if (r->prompt_tokens == 0 || r->generation.max_new_tokens == 0 || r->deadline_ms == 0) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID,
                       "a reservation of %" PRIu32 " prompt tokens, %" PRIu32
                       " new tokens and %" PRIu32 " ms",
                       r->prompt_tokens, r->generation.max_new_tokens, r->deadline_ms);
    }
    if (tokens > o->context_tokens) {
        return bt_fail(error, BT_ERR_REQUEST_TOO_LARGE,
                       "%" PRIu32 " prompt tokens and %" PRIu32
                       " new tokens are more than the context of %" PRIu32,
                       r->prompt_tokens, r->generation.max_new_tokens, o->context_tokens);
    }
    /* The last token is drawn and never fed back: its KV is not written. */
    const uint64_t kv_tokens = tokens - 1;
    const uint32_t pages = kv_pages_for((uint32_t)kv_tokens, o->page_tokens);
    const uint32_t total = kv_pool_count(o->pages).total;
    if (pages > total) {
        return bt_fail(error, BT_ERR_REQUEST_TOO_LARGE,
                       "%" PRIu64 " tokens need %" PRIu32
                       " KV pages; this decode worker has %" PRIu32,
                       kv_tokens, pages, total);
    }
    *pages_out = pages;
    return BT_OK;
}

static bt_status acquire(decode_core *core, decode_attempt *a, uint32_t page_count,
                         bt_error *error) {
    const decode_core_options *o = &core->options;
    const uint32_t mode = a->generation.mask_mode;
    bt_status status = row_pool_acquire(core->member.rows, &a->slot);
    if (status != BT_OK) return bt_fail(error, status, "no row slot is free");
    a->has_slot = true;
    status = kv_pool_acquire(o->pages, decode_owner(a), page_count, a->pages);
    if (status != BT_OK) {
        return bt_fail(error, status, "%" PRIu32 " KV pages are needed, %" PRIu32 " are free",
                       page_count, kv_pool_count(o->pages).free);
    }
    a->page_count = page_count;
    const row_queue_options queue = {.mask_mode = mode,
                                     .cap = membership_cap(&core->member),
                                     .bytes_max = decode_queue_bytes_max(core, mode)};
    status = row_queue_create(&queue, &a->queue);
    if (status == BT_OK && mode != SAMPLER_MASK_OFF) status = decode_step_need_masks(core);
    if (status != BT_OK) return bt_fail(error, status, "no memory for rows");
    return BT_OK;
}

static bt_status expect(decode_core *core, decode_attempt *a, bt_error *error) {
    const handoff_offer offer = {
        .attempt = a->id,
        .peer = a->prefill,
        .sample_count = 1,
        .slots = &a->slot,
        .prompt_tokens = a->prompt_tokens,
        .page_count = kv_pages_for(a->prompt_tokens, core->options.page_tokens),
        .pages = a->pages,
        .mask_mode = a->generation.mask_mode,
        .deadline_us = a->deadline_us,
    };
    const bt_status status = handoff_receiver_expect(core->receiver, &offer);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "the handoff cannot be prepared: %s", bt_status_string(status));
}

void decode_on_reserve(decode_core *core, const proto_reserve *r) {
    const xfer_peer prefill = {.worker_id = r->prefill_worker_id,
                               .incarnation = r->prefill_incarnation};
    const row_slot none = {0};
    bt_error error = {0};
    if (decode_find(core, r->attempt) != NULL) {
        answer(core, r->attempt, BT_ERR_REQUEST_DUPLICATE, none, "this attempt is here already");
        return;
    }
    uint32_t page_count = 0;
    bt_status status = check_reserve(core, r, &page_count, &error);
    if (status == BT_OK && !peer_table_is_usable(&core->member.peers, prefill)) {
        status = bt_fail(&error, BT_ERR_PEER_GONE, "prefill worker %" PRIu32 " is not connected",
                         prefill.worker_id);
    }
    if (status != BT_OK) {
        answer(core, r->attempt, status, none, error.text);
        return;
    }
    decode_attempt *a = decode_take_free(core);
    if (a == NULL) {
        answer(core, r->attempt, BT_ERR_REQUEST_FULL, none, "every place of the batch is taken");
        return;
    }
    a->id = r->attempt;
    a->generation = r->generation;
    a->prefill = prefill;
    a->prompt_tokens = r->prompt_tokens;
    a->credit_bytes = r->credit_bytes;
    decode_set_state(core, a, DECODE_RESERVED, decode_now(core) + (uint64_t)r->deadline_ms * 1000u,
                     "reserve");
    status = acquire(core, a, page_count, &error);
    if (status == BT_OK) status = expect(core, a, &error);
    if (status != BT_OK) {
        /* No transfer knows of it yet. */
        decode_set_state(core, a, DECODE_QUARANTINE, 0, "refused");
        decode_release(core, a, "refused");
        answer(core, r->attempt, status, none, error.text);
        return;
    }
    answer(core, r->attempt, BT_OK, a->slot, "");
}

void decode_on_cancel(decode_core *core, proto_attempt id) {
    decode_attempt *a = decode_find(core, id);
    if (a != NULL) decode_end(core, a, "cancelled");
}

/* A FULL is followed by one CAPACITY, once there is at least one of everything again. */
void decode_capacity_turn(decode_core *core) {
    if (!core->owes_capacity || !core->has_released) return;
    if (!membership_is_serving(&core->member)) return;
    core->has_released = false;
    proto_message message = {.kind = PROTO_CAPACITY};
    proto_capacity *capacity = &message.capacity;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        capacity->sequences_free += core->attempts[i].state == DECODE_FREE;
    }
    capacity->pages_free = kv_pool_count(core->options.pages).free;
    capacity->rows_free = row_pool_free_count(core->member.rows);
    if (capacity->sequences_free == 0 || capacity->pages_free == 0 || capacity->rows_free == 0) {
        return;
    }
    core->owes_capacity = false;
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}

/* ---- the handoff's events -------------------------------------------------------------------- */

static decode_attempt *find_in(decode_core *core, proto_attempt id, decode_state state) {
    decode_attempt *a = decode_find(core, id);
    return a != NULL && a->state == state ? a : NULL;
}

/* The row proved that it is what prefill wrote; this checks that it answers what was asked. */
static bt_status check_row(const decode_core *core, const decode_attempt *a,
                           const metadata_row *row) {
    const uint32_t vocab_size = core->options.vocab_size;
    const proto_generation *g = &a->generation;
    if (row->first_token < 0 || (uint32_t)row->first_token >= vocab_size) {
        return BT_ERR_REQUEST_CORRUPT;
    }
    if (row->mask_mode != g->mask_mode || row->prompt_tokens != a->prompt_tokens) {
        return BT_ERR_REQUEST_CORRUPT;
    }
    if ((row->has_first_logprob != 0) != (g->wants_logprob != 0)) return BT_ERR_REQUEST_CORRUPT;
    if (g->mask_mode != SAMPLER_MASK_OFF && row->support_count == 0) return BT_ERR_REQUEST_CORRUPT;
    for (uint32_t i = 0; i < row->support_count; i++) {
        int32_t id = 0;
        memcpy(&id, (const char *)row->support_ids + i * sizeof id, sizeof id);
        if (id < 0 || (uint32_t)id >= vocab_size) return BT_ERR_REQUEST_CORRUPT;
    }
    return BT_OK;
}

static void on_ready(void *context, proto_attempt id, const metadata_row *row) {
    decode_core *core = context;
    decode_attempt *a = find_in(core, id, DECODE_RESERVED);
    BT_ASSERT(a != NULL);
    a->cached_tokens = row->cached_tokens;
    bt_status status = check_row(core, a, row);
    if (row->status == SAMPLER_OK && status == BT_OK) {
        status = row_queue_push_first(a->queue, row);
    }
    const int32_t token = row->first_token;
    const uint32_t sampler = row->status;
    a->cap_needed = row->cap_needed;
    decode_release_slot(core, a); /* the row's arrays end here */
    if (sampler == SAMPLER_OVERFLOW) {
        decode_finish_error(core, a, BT_ERR_REQUEST_OVERFLOW,
                            "the sampling support of token 0 has %" PRIu32
                            " entries, more than sampling_mask_max_tokens %" PRIu32,
                            a->cap_needed, membership_cap(&core->member));
    } else if (sampler != SAMPLER_OK) {
        decode_finish_error(core, a, BT_ERR_REQUEST_CAPTURE,
                            "the sampling capture of token 0 is inconsistent");
    } else if (status != BT_OK) {
        decode_finish_error(core, a, status, "the metadata row does not fit the request: %s",
                            bt_status_string(status));
    } else {
        decode_commit(core, a, token);
    }
}

static void on_failed(void *context, proto_attempt id, bt_status status, const char *text) {
    decode_core *core = context;
    decode_attempt *a = find_in(core, id, DECODE_RESERVED);
    if (a == NULL) return;
    bt_log(bt_log_level_of(status), "decode",
           "attempt " DECODE_ID_FORMAT ": the handoff failed: %s: %s", DECODE_ID_ARGS(id),
           bt_status_string(status), text);
    decode_abandon(core, a, status, text);
    kv_pool_quarantine(core->options.pages, decode_owner(a), a->pages, a->page_count);
    decode_set_state(core, a, DECODE_QUARANTINE, 0, "handoff failed");
}

static void on_quiet(void *context, proto_attempt id) {
    decode_core *core = context;
    decode_attempt *a = find_in(core, id, DECODE_QUARANTINE);
    BT_ASSERT(a != NULL);
    decode_release(core, a, "quiet");
}

static void on_hello(void *context, xfer_peer peer) {
    peer_table_on_hello(&((decode_core *)context)->member.peers, peer);
}

static void on_stuck(void *context, xfer_peer peer) {
    peer_table_on_failed(&((decode_core *)context)->member.peers, peer, BT_ERR_PEER_TIMEOUT);
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    peer_table_on_failed(&((decode_core *)context)->member.peers, peer, status);
}

static void on_peer_closed(void *context, xfer_peer peer) {
    decode_core *core = context;
    peer_table_on_closed(&core->member.peers, peer, decode_now(core));
}

handoff_receiver_events decode_receiver_events(decode_core *core) {
    return (handoff_receiver_events){
        .on_ready = on_ready,
        .on_failed = on_failed,
        .on_quiet = on_quiet,
        .on_hello = on_hello,
        .on_stuck = on_stuck,
        .on_peer_failed = on_peer_failed,
        .on_peer_closed = on_peer_closed,
        .context = core,
    };
}
