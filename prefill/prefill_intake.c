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
    bt_status status = proto_generation_check(&run->generation, error);
    if (status == BT_OK) status = attempt_words_check_bans(&run->generation, o->vocab_size, error);
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
    const bool has_slots =
        run->slot_count == (run->generation.max_new_tokens > 0 ? run->generation.samples : 0);
    if (!has_slots) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID,
                       "%" PRIu32 " row slots for %" PRIu32 " samples", run->slot_count,
                       run->generation.samples);
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

/* What is kept for the prompt until it is computed; released with the attempt. */
static bt_status allocate(prefill_core *core, prefill_attempt *a, const proto_run *run) {
    const uint32_t full_pages = run->prompt_tokens / core->options.page_tokens;
    bt_status status = attempt_words_init(&run->generation, run->prompt_tokens, &a->words);
    if (status != BT_OK) return status;
    if (run->slot_count > 0) {
        a->slots = bt_calloc(run->slot_count, sizeof *a->slots);
        if (a->slots == NULL) status = BT_ERR_WORKER_MEMORY;
    }
    if (core->cache != NULL && full_pages > 0) {
        a->hashes = bt_calloc(full_pages, sizeof *a->hashes);
        if (a->hashes == NULL) status = BT_ERR_WORKER_MEMORY;
    }
    if (status != BT_OK) prefill_free_words(a);
    return status;
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
    prefill_attempt *a = prefill_take_free(core);
    if (a == NULL) {
        return bt_fail(error, BT_ERR_REQUEST_FULL, "%" PRIu32 " prompts are in hand already",
                       core->options.attempts_max);
    }
    if (allocate(core, a, run) != BT_OK)
        return bt_fail(error, BT_ERR_REQUEST_FULL, "no memory for the prompt");
    a->id = run->attempt;
    a->generation = run->generation;
    a->decode = decode;
    for (uint32_t i = 0; i < run->slot_count; i++) {
        a->slots[i] =
            (row_slot){.index = run->slots[i].index, .generation = run->slots[i].generation};
    }
    a->prompt_tokens = run->prompt_tokens;
    a->deadline_us = prefill_now(core) + (uint64_t)run->deadline_ms * 1000u;
    prefill_set_state(core, a, PREFILL_ASSEMBLING, "run");
    *out = a;
    return BT_OK;
}

/* Appends a frame's words; false when the attempt failed over them. */
static bool append_words(prefill_core *core, prefill_attempt *a, const proto_run *run,
                         const void *payload, size_t payload_bytes) {
    bt_error error = {0};
    bt_status status = BT_OK;
    if (a->state != PREFILL_ASSEMBLING || run->prompt_tokens != a->prompt_tokens) {
        status = bt_fail(&error, BT_ERR_REQUEST_DUPLICATE,
                         "a part of a prompt of %" PRIu32 " tokens from word %" PRIu32
                         " is not the next of one of %" PRIu32,
                         run->prompt_tokens, run->first_word, a->prompt_tokens);
    } else {
        status = attempt_words_add(&a->words, run->first_word, payload, payload_bytes,
                                   core->options.vocab_size, &error);
    }
    if (status == BT_OK) return true;
    prefill_fail(core, a, status, "%s", error.text);
    return false;
}

/* The names of its full pages, by which the cache finds them. */
static void name_pages(const prefill_core *core, prefill_attempt *a) {
    if (a->hashes == NULL) return;
    const uint32_t page_tokens = core->options.page_tokens;
    const int32_t *prompt = attempt_words_prompt(&a->words);
    block_hash hash = block_hash_root(core->weights_version, a->generation.cache_salt);
    for (uint32_t i = 0; i < a->prompt_tokens / page_tokens; i++) {
        hash = block_hash_extend(hash, prompt + (size_t)i * page_tokens, page_tokens);
        a->hashes[i] = hash;
    }
    a->may_cache = true;
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
    if (!append_words(core, a, run, payload, payload_bytes)) return;
    if (!attempt_words_are_complete(&a->words)) return;
    name_pages(core, a);
    prefill_set_state(core, a, PREFILL_QUEUED, "prompt complete");
}

void prefill_on_cancel(prefill_core *core, proto_attempt id) {
    prefill_attempt *a = prefill_find(core, id);
    if (a != NULL) prefill_end(core, a, "cancelled");
}
