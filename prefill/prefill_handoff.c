/* From computed chunks to the handoff's sender, and what the sender says. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "prefill/prefill_internal.h"

bt_status prefill_begin(prefill_core *core, prefill_attempt *a) {
    const prefill_core_options *o = &core->options;
    const uint32_t count = kv_pages_for(a->prompt_tokens, o->page_tokens);
    bt_status status = kv_pool_acquire(o->pages, prefill_owner(a), count, a->pages);
    if (status == BT_ERR_REQUEST_FULL) return status;
    if (status == BT_OK) a->page_count = count;
    if (status == BT_OK && a->generation.max_new_tokens > 0) {
        const handoff_target target = {.attempt = a->id,
                                       .peer = a->decode,
                                       .sample_count = 1,
                                       .slots = &a->slot,
                                       .prompt_tokens = a->prompt_tokens,
                                       .deadline_us = a->deadline_us};
        status = handoff_sender_begin(core->sender, &target);
        a->has_handoff = status == BT_OK;
    }
    if (status == BT_ERR_REQUEST_FULL) {
        kv_pool_release(o->pages, prefill_owner(a), a->pages, a->page_count);
        a->page_count = 0;
        return status;
    }
    if (status != BT_OK) {
        prefill_fail(core, a, status, "the handoff to decode worker %" PRIu32 " cannot begin: %s",
                     a->decode.worker_id, bt_status_string(status));
        return status;
    }
    prefill_set_state(core, a, PREFILL_COMPUTING, "pages acquired");
    return BT_OK;
}

void prefill_send_pages(prefill_core *core, prefill_attempt *a) {
    if (!a->has_handoff) return;
    const uint32_t complete = a->computed_tokens / core->options.page_tokens;
    if (complete == a->pages_sent) return;
    const bt_status status =
        handoff_sender_pages(core->sender, a->id, a->pages_sent, complete - a->pages_sent,
                             a->pages + a->pages_sent, false);
    if (status != BT_OK) {
        prefill_fail(core, a, status, "pages cannot be sent: %s", bt_status_string(status));
        return;
    }
    a->pages_sent = complete;
}

static bt_status send_rest(prefill_core *core, prefill_attempt *a, const sampler_row *row) {
    const uint32_t page_tokens = core->options.page_tokens;
    const uint32_t tail = a->prompt_tokens % page_tokens;
    compute *c = core->options.compute;
    if (tail != 0) c->ops->zero_tail(c, a->pages[a->page_count - 1], tail);
    const bt_status status =
        handoff_sender_pages(core->sender, a->id, a->pages_sent, a->page_count - a->pages_sent,
                             a->pages + a->pages_sent, true);
    if (status != BT_OK) return status;
    a->pages_sent = a->page_count;
    const uint32_t mode = a->generation.mask_mode;
    const metadata_row sent = {
        .first_token = row->token,
        .status = row->status,
        .support_count = row->support_count,
        .cap_needed = row->cap_needed,
        .cached_tokens = a->cached_tokens,
        .mask_mode = mode,
        .has_first_logprob = a->generation.wants_logprob,
        .first_logprob = row->token_logprob,
        .selected_logprob = row->selected_logprob,
        .support_ids = row->support_ids,
        .support_logprobs = mode == SAMPLER_MASK_SUPPORT ? row->support_logprobs : NULL,
    };
    return handoff_sender_row(core->sender, a->id, &sent);
}

void prefill_send_row(prefill_core *core, prefill_attempt *a, const sampler_row *row) {
    const uint32_t cap = membership_cap(&core->member);
    char text[PROTO_TEXT_MAX] = "";
    bt_status status = BT_OK;
    if (row->status == SAMPLER_OVERFLOW) {
        status = BT_ERR_REQUEST_OVERFLOW;
        (void)snprintf(text, sizeof text,
                       "the sampling support of token 0 has %" PRIu32
                       " entries, more than sampling_mask_max_tokens %" PRIu32,
                       row->cap_needed, cap);
    } else if (row->status != SAMPLER_OK) {
        status = BT_ERR_REQUEST_CAPTURE;
        (void)snprintf(text, sizeof text, "the sampling capture of token 0 is inconsistent");
    } else {
        status = send_rest(core, a, row);
        if (status != BT_OK) {
            (void)snprintf(text, sizeof text, "the row cannot be sent: %s",
                           bt_status_string(status));
        }
    }
    prefill_send_done(core, a->id, status, a->cached_tokens, row->cap_needed, text);
    if (status == BT_OK) {
        prefill_set_state(core, a, PREFILL_SENDING, "computed");
        return;
    }
    bt_log(bt_log_level_of(status), "prefill", "attempt " PREFILL_ID_FORMAT ": %s",
           PREFILL_ID_ARGS(a->id), text);
    prefill_end(core, a, "failed");
}

/* ---- the sender's events --------------------------------------------------------------------- */

static void on_acked(void *context, proto_attempt id) {
    prefill_core *core = context;
    prefill_attempt *a = prefill_find(core, id);
    BT_ASSERT(a != NULL && a->state == PREFILL_SENDING);
    a->has_handoff = false;
    prefill_release(core, a, "acked");
}

static void on_failed(void *context, proto_attempt id, bt_status status, const char *text) {
    prefill_core *core = context;
    prefill_attempt *a = prefill_find(core, id);
    if (a == NULL || (a->state != PREFILL_COMPUTING && a->state != PREFILL_SENDING)) return;
    prefill_fail(core, a, status, "%s", text);
}

static void on_quiet(void *context, proto_attempt id) {
    prefill_core *core = context;
    prefill_attempt *a = prefill_find(core, id);
    BT_ASSERT(a != NULL && a->has_handoff);
    a->has_handoff = false;
    if (a->state == PREFILL_QUARANTINE) prefill_release(core, a, "quiet");
}

static void on_hello(void *context, xfer_peer peer) {
    peer_table_on_hello(&((prefill_core *)context)->member.peers, peer);
}

static void on_stuck(void *context, xfer_peer peer) {
    peer_table_on_failed(&((prefill_core *)context)->member.peers, peer, BT_ERR_PEER_TIMEOUT);
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    peer_table_on_failed(&((prefill_core *)context)->member.peers, peer, status);
}

static void on_peer_closed(void *context, xfer_peer peer) {
    prefill_core *core = context;
    peer_table_on_closed(&core->member.peers, peer, prefill_now(core));
}

handoff_sender_events prefill_sender_events(prefill_core *core) {
    return (handoff_sender_events){
        .on_acked = on_acked,
        .on_failed = on_failed,
        .on_quiet = on_quiet,
        .on_hello = on_hello,
        .on_stuck = on_stuck,
        .on_peer_failed = on_peer_failed,
        .on_peer_closed = on_peer_closed,
        .context = core,
    };
}
