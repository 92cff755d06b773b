/* What the handoff's receiver reports: rows and pages that are proven, failures, quiet. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "decode/decode_internal.h"

static decode_attempt *find_in(decode_core *core, proto_attempt id, decode_attempt_state state) {
    decode_attempt *a = decode_find(core, id);
    return a != NULL && a->state == state ? a : NULL;
}

/* ---- READY ----------------------------------------------------------------------------------- */

/* The row proved that it is what prefill wrote; this checks that it answers what was asked. NULL,
 * or what does not. */
static const char *find_fault(const decode_core *core, const decode_attempt *a,
                              const token_row *row) {
    const proto_generation *g = &a->generation;
    const row_expectation expect = {
        .cap = membership_row_entries(&core->member),
        .mask_mode = g->mask_mode,
        .mask_bounded = g->mask_bounded,
        .has_logprob = g->wants_logprob,
        .vocab_size = core->options.vocab_size,
        .vocab_limit = g->vocab_limit,
        .top_count = decode_top_count(core, g),
        .id_logprob_count = g->logprob_id_count,
    };
    const char *fault = row_check(&expect, row);
    if (fault != NULL || row->support_count == 0) return fault;
    return row_ids_repeat(row->support_ids, row->support_count, core->step.seen_ids)
               ? "a support id that is there twice"
               : NULL;
}

/* Row 0 of a sample into its queue; what it points to is in the slot. */
static void take_first_row(decode_core *core, decode_sample *s, const metadata_row *row) {
    if (row->cap_needed > core->options.vocab_size) {
        decode_finish_error(core, s, BT_ERR_REQUEST_CORRUPT,
                            "the metadata row does not fit the request: a support of %" PRIu32
                            " ids, more than the vocabulary has",
                            row->cap_needed);
        return;
    }
    if (row->status != SAMPLER_OK) {
        decode_finish_unsampled(core, s, row->status, row->cap_needed);
        return;
    }
    const token_row first = token_row_of(row);
    const char *fault = find_fault(core, s->attempt, &first);
    if (fault != NULL) {
        decode_finish_error(core, s, BT_ERR_REQUEST_CORRUPT,
                            "the metadata row does not fit the request: %s", fault);
        return;
    }
    const bt_status status = row_queue_push(s->queue, &first);
    if (status != BT_OK) {
        decode_finish_error(core, s, status, "the first row cannot be queued: %s",
                            bt_status_string(status));
        return;
    }
    decode_commit(core, s, row->first_token);
}

static void on_ready(void *context, proto_attempt id, const metadata_row *rows) {
    decode_core *core = context;
    decode_attempt *a = find_in(core, id, DECODE_ATTEMPT_RESERVED);
    BT_ASSERT(a != NULL);
    /* The pages are nobody's until it is known which samples draw on. */
    decode_sample *holder = a->samples[0];
    const uint32_t page_count = holder->page_count;
    memcpy(core->page_scratch, holder->pages, page_count * sizeof *holder->pages);
    holder->page_count = 0;
    a->cached_tokens = rows[0].cached_tokens;
    decode_set_attempt_state(core, a, DECODE_ATTEMPT_LIVE, "ready");
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        decode_sample *s = a->samples[i];
        if (!s->is_cancelled) take_first_row(core, s, &rows[i]);
    }
    decode_release_slots(core, a); /* the rows' arrays end here */
    decode_spread_pages(core, a, core->page_scratch, page_count);
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        decode_sample *s = a->samples[i];
        if (s->is_cancelled) decode_release(core, s, "cancelled");
    }
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void on_failed(void *context, proto_attempt id, bt_status status, const char *text) {
    decode_core *core = context;
    decode_attempt *a = find_in(core, id, DECODE_ATTEMPT_RESERVED);
    if (a == NULL) return;
    bt_log(bt_log_level_of(status), "decode",
           "attempt " DECODE_ID_FORMAT ": the handoff failed: %s: %s", DECODE_ID_ARGS(id),
           bt_status_string(status), text);
    decode_abandon_attempt(core, a, status, text);
    kv_pool_quarantine(core->options.pages, decode_owner(a), a->samples[0]->pages,
                       a->samples[0]->page_count);
    decode_set_attempt_state(core, a, DECODE_ATTEMPT_QUARANTINE, "handoff failed");
}

static void on_quiet(void *context, proto_attempt id) {
    decode_core *core = context;
    decode_attempt *a = find_in(core, id, DECODE_ATTEMPT_QUARANTINE);
    BT_ASSERT(a != NULL);
    decode_release_attempt(core, a, "quiet");
}

handoff_receiver_events decode_receiver_events(decode_core *core) {
    return (handoff_receiver_events){
        .on_ready = on_ready,
        .on_failed = on_failed,
        .on_quiet = on_quiet,
        .context = core,
    };
}
