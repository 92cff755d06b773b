/* What the handoff's receiver reports: rows and pages that are proven, failures, quiet, peers. */
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

static bool is_token(const decode_core *core, int32_t id) {
    return id >= 0 && (uint32_t)id < core->options.vocab_size;
}

static bool has_good_ids(const decode_core *core, const metadata_row *row) {
    for (uint32_t i = 0; i < row->support_count; i++) {
        int32_t id = 0;
        memcpy(&id, (const char *)row->support_ids + i * sizeof id, sizeof id);
        if (!is_token(core, id)) return false;
    }
    for (uint32_t i = 0; i < row->top_count; i++) {
        row_top top;
        memcpy(&top, (const char *)row->top + i * sizeof top, sizeof top);
        if (!is_token(core, top.id)) return false;
    }
    return is_token(core, row->first_token);
}

/* The row proved that it is what prefill wrote; this checks that it answers what was asked. */
static bt_status check_row(const decode_core *core, const decode_attempt *a,
                           const metadata_row *row) {
    const proto_generation *g = &a->generation;
    if (row->mask_mode != g->mask_mode || row->prompt_tokens != a->prompt_tokens) {
        return BT_ERR_REQUEST_CORRUPT;
    }
    if ((row->has_first_logprob != 0) != (g->wants_logprob != 0)) return BT_ERR_REQUEST_CORRUPT;
    if (g->mask_mode != SAMPLER_MASK_OFF && row->support_count == 0) return BT_ERR_REQUEST_CORRUPT;
    if (row->top_count != decode_top_count(core, g)) return BT_ERR_REQUEST_CORRUPT;
    if (row->id_logprob_count != g->logprob_id_count) return BT_ERR_REQUEST_CORRUPT;
    return has_good_ids(core, row) ? BT_OK : BT_ERR_REQUEST_CORRUPT;
}

/* Row 0 of a sample into its queue; what it points to is in the slot. */
static void take_first_row(decode_core *core, decode_sample *s, const metadata_row *row) {
    if (row->status != SAMPLER_OK) {
        decode_finish_unsampled(core, s, row->status, row->cap_needed);
        return;
    }
    bt_status status = check_row(core, s->attempt, row);
    if (status == BT_OK) status = row_queue_push_first(s->queue, row);
    if (status != BT_OK) {
        decode_finish_error(core, s, status, "the metadata row does not fit the request: %s",
                            bt_status_string(status));
        return;
    }
    s->cap_needed = row->cap_needed;
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

/* ---- peers ----------------------------------------------------------------------------------- */

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
