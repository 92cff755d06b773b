/* Prompts come in frames; a complete one is queued. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

/* What can never be served here, whatever becomes free. */
static bt_status check_run(prefill_core *core, const proto_run *run, bt_error *error) {
    const prefill_core_options *o = &core->options;
    if (run->attempt.router_incarnation != core->member.session.welcome.router_incarnation) {
        return bt_fail(error, BT_ERR_REQUEST_STALE, "the attempt is of another router incarnation");
    }
    const bt_status status = proto_generation_check(&run->generation, error);
    if (status != BT_OK) return status;
    if (run->prompt_tokens == 0 || run->deadline_ms == 0) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID,
                       "a prompt of %" PRIu32 " tokens with a deadline of %" PRIu32 " ms",
                       run->prompt_tokens, run->deadline_ms);
    }
    if (run->prompt_tokens > o->context_tokens) {
        return bt_fail(error, BT_ERR_REQUEST_TOO_LARGE,
                       "%" PRIu32 " prompt tokens are more than the context of %" PRIu32,
                       run->prompt_tokens, o->context_tokens);
    }
    const uint32_t pages = kv_pages_for(run->prompt_tokens, o->page_tokens);
    const uint32_t total = kv_pool_count(o->pages).total;
    if (pages > total) {
        return bt_fail(error, BT_ERR_REQUEST_TOO_LARGE,
                       "%" PRIu32 " prompt tokens need %" PRIu32
                       " KV pages; this prefill worker has %" PRIu32,
                       run->prompt_tokens, pages, total);
    }
    return BT_OK;
}

static bt_status create_attempt(prefill_core *core, const proto_run *run, prefill_attempt **out,
                                bt_error *error) {
    const xfer_peer decode = {.worker_id = run->decode_worker_id,
                              .incarnation = run->decode_incarnation};
    bt_status status = check_run(core, run, error);
    if (status != BT_OK) return status;
    if (run->generation.max_new_tokens > 0 && !peer_table_is_usable(&core->member.peers, decode)) {
        return bt_fail(error, BT_ERR_PEER_GONE, "decode worker %" PRIu32 " is not connected",
                       decode.worker_id);
    }
    if (run->generation.mask_mode != SAMPLER_MASK_OFF && run->generation.max_new_tokens > 0) {
        status = prefill_step_need_masks(core);
        if (status != BT_OK) return bt_fail(error, status, "no memory for mask rows");
    }
    prefill_attempt *a = prefill_take_free(core);
    if (a == NULL) {
        return bt_fail(error, BT_ERR_REQUEST_FULL, "%" PRIu32 " prompts are in hand already",
                       core->options.attempts_max);
    }
    a->prompt = bt_calloc(run->prompt_tokens, sizeof *a->prompt);
    if (a->prompt == NULL) return bt_fail(error, BT_ERR_REQUEST_FULL, "no memory for the prompt");
    a->id = run->attempt;
    a->generation = run->generation;
    a->decode = decode;
    if (run->slot_count > 0)
        a->slot = (row_slot){.index = run->slots[0].index, .generation = run->slots[0].generation};
    a->prompt_tokens = run->prompt_tokens;
    a->deadline_us = prefill_now(core) + (uint64_t)run->deadline_ms * 1000u;
    prefill_set_state(core, a, PREFILL_ASSEMBLING, "run");
    *out = a;
    return BT_OK;
}

/* Appends a frame's ids; false when the attempt failed over them. */
static bool append_tokens(prefill_core *core, prefill_attempt *a, const proto_run *run,
                          const void *payload, size_t payload_bytes) {
    const size_t count = payload_bytes / sizeof(int32_t);
    if (a->state != PREFILL_ASSEMBLING || run->prompt_tokens != a->prompt_tokens ||
        run->first_word != a->received_tokens) {
        prefill_fail(core, a, BT_ERR_REQUEST_DUPLICATE,
                     "a part of the prompt from token %" PRIu32 " does not follow %" PRIu32
                     " tokens of %" PRIu32,
                     run->first_word, a->received_tokens, a->prompt_tokens);
        return false;
    }
    if (count == 0 || payload_bytes % sizeof(int32_t) != 0 ||
        count > a->prompt_tokens - a->received_tokens) {
        prefill_fail(core, a, BT_ERR_REQUEST_INVALID,
                     "%zu bytes are no part of a prompt of %" PRIu32 " tokens", payload_bytes,
                     a->prompt_tokens);
        return false;
    }
    int32_t *to = a->prompt + a->received_tokens;
    memcpy(to, payload, payload_bytes);
    for (size_t i = 0; i < count; i++) {
        if (to[i] >= 0 && (uint32_t)to[i] < core->options.vocab_size) continue;
        prefill_fail(core, a, BT_ERR_REQUEST_INVALID,
                     "prompt token %zu is %" PRId32 ", outside the vocabulary of %" PRIu32,
                     a->received_tokens + i, to[i], core->options.vocab_size);
        return false;
    }
    a->received_tokens += (uint32_t)count;
    return true;
}

void prefill_on_run(prefill_core *core, const proto_run *run, const void *payload,
                    size_t payload_bytes) {
    prefill_attempt *a = prefill_find(core, run->attempt);
    if (a == NULL) {
        /* The rest of a prompt that was refused or cancelled is still on its way. */
        if (run->first_word != 0) return;
        bt_error error = {0};
        const bt_status status = create_attempt(core, run, &a, &error);
        if (status != BT_OK) {
            core->refused_total++;
            bt_log_debug("prefill", "attempt " PREFILL_ID_FORMAT " refused: %s",
                         PREFILL_ID_ARGS(run->attempt), error.text);
            prefill_send_done(core, run->attempt, status, 0, 0, error.text);
            return;
        }
        core->accepted_total++;
    }
    if (a->state == PREFILL_LEAVING || a->state == PREFILL_QUARANTINE) return; /* ended already */
    if (!append_tokens(core, a, run, payload, payload_bytes)) return;
    if (a->received_tokens < a->prompt_tokens) return;
    a->order = core->next_order++;
    prefill_set_state(core, a, PREFILL_QUEUED, "prompt complete");
}

void prefill_on_cancel(prefill_core *core, proto_attempt id) {
    prefill_attempt *a = prefill_find(core, id);
    if (a != NULL) prefill_end(core, a, "cancelled");
}
