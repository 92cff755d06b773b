/* From computed chunks to the handoff's sender, and what the sender says. */
#include <assert.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "prefill/prefill_internal.h"

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

static_assert(sizeof(row_top) == sizeof(sampler_top) &&
                  offsetof(row_top, id) == offsetof(sampler_top, id) &&
                  offsetof(row_top, logprob) == offsetof(sampler_top, logprob),
              "the sampler's pairs travel as they are");

/* A row without a token has its status and nothing else. */
static metadata_row metadata_of(const prefill_core *core, const prefill_attempt *a,
                                const sampler_row *row, uint32_t sample) {
    const proto_generation *g = &a->generation;
    metadata_row sent = {
        .sample_index = sample,
        .first_token = -1,
        .status = row->status,
        .cap_needed = row->cap_needed,
        .cached_tokens = a->cached_tokens,
        .mask_mode = g->mask_mode,
        .weights_version = core->step.weights_version,
        .has_first_logprob = g->wants_logprob,
    };
    if (row->status != SAMPLER_OK) return sent;
    sent.first_token = row->token;
    sent.first_logprob = row->token_logprob;
    sent.support_count = row->support_count;
    sent.selected_logprob = row->selected_logprob;
    sent.support_ids = row->support_ids;
    sent.support_logprobs = g->mask_mode == SAMPLER_MASK_SUPPORT ? row->support_logprobs : NULL;
    sent.top_count = row->top_count;
    sent.top = (const void *)row->top;
    sent.id_logprob_count = g->logprob_id_count;
    sent.id_logprobs = row->id_logprobs;
    return sent;
}

static bt_status send_rest(prefill_core *core, prefill_attempt *a, const sampler_row *rows) {
    const uint32_t page_tokens = core->options.page_tokens;
    const uint32_t tail = a->prompt_tokens % page_tokens;
    compute *c = core->options.compute;
    if (tail != 0) c->ops->zero_tail(c, a->pages[a->page_count - 1], tail);
    bt_status status =
        handoff_sender_pages(core->sender, a->id, a->pages_sent, a->page_count - a->pages_sent,
                             a->pages + a->pages_sent, true);
    if (status != BT_OK) return status;
    a->pages_sent = a->page_count;
    for (uint32_t i = 0; status == BT_OK && i < a->generation.samples; i++) {
        const metadata_row row = metadata_of(core, a, &rows[i], i);
        status = handoff_sender_row(core->sender, a->id, &row);
    }
    return status;
}

/* The status of the attempt: OK when one sample at least has its token. */
static bt_status judge(const prefill_core *core, const prefill_attempt *a, const sampler_row *rows,
                       uint32_t *cap_needed_out, char *text, size_t capacity) {
    uint32_t ok = 0;
    *cap_needed_out = 0;
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        const bool is_overflow = rows[i].status == SAMPLER_OVERFLOW;
        ok += rows[i].status == SAMPLER_OK;
        if (is_overflow && rows[i].cap_needed > *cap_needed_out)
            *cap_needed_out = rows[i].cap_needed;
    }
    if (ok > 0) {
        *cap_needed_out = 0; /* the rows say it to decode */
        return BT_OK;
    }
    if (rows[0].status == SAMPLER_OVERFLOW) {
        (void)snprintf(text, capacity,
                       "the sampling support of token 0 has %" PRIu32
                       " entries, more than sampling_mask_max_tokens %" PRIu32,
                       *cap_needed_out, membership_cap(&core->member));
        return BT_ERR_REQUEST_OVERFLOW;
    }
    *cap_needed_out = 0;
    (void)snprintf(text, capacity, "the sampling capture of token 0 is inconsistent");
    return BT_ERR_REQUEST_CAPTURE;
}

void prefill_send_rows(prefill_core *core, prefill_attempt *a, const sampler_row *rows) {
    char text[PROTO_TEXT_MAX] = "";
    uint32_t cap_needed = 0;
    bt_status status = judge(core, a, rows, &cap_needed, text, sizeof text);
    if (status == BT_OK) {
        prefill_cache_pages(core, a);
        status = send_rest(core, a, rows);
        if (status != BT_OK) {
            (void)snprintf(text, sizeof text, "the row cannot be sent: %s",
                           bt_status_string(status));
        }
    } else {
        prefill_uncache_pages(core, a, status == BT_ERR_REQUEST_CAPTURE);
    }
    prefill_send_done(core, a->id, status, a->cached_tokens, cap_needed, text);
    if (status == BT_OK) {
        prefill_set_state(core, a, PREFILL_SENDING, "computed");
        prefill_free_words(a);
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

handoff_sender_events prefill_sender_events(prefill_core *core) {
    return (handoff_sender_events){
        .on_acked = on_acked,
        .on_failed = on_failed,
        .on_quiet = on_quiet,
        .context = core,
    };
}
