/* The pages of an attempt. The first shared_count are entries of the prefix cache that it holds;
 * the others are its own. A full page becomes shared when it is computed, before it is sent: a send
 * then reads a page that nobody writes any more and that its attempt's hold keeps.
 *
 * What is cached: every full page that was computed, of aborted prompts too; not of a prompt whose
 * first row overflowed or did not prove itself. The last token of a prompt is always computed, for
 * its logits, and always into a page of its own: a hit ends before it. Prompts whose own
 * log-probabilities are asked for compute everything; their pages may be cached.
 *
 * A prompt whose next page is being computed by another does not begin: it waits for that page (and
 * then for the one behind it) and computes what is its own. Pages computed twice nevertheless are
 * cached once. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "prefill/prefill_internal.h"

static prefix_chain chain_of(const prefill_attempt *a) {
    return (prefix_chain){.tokens = attempt_words_prompt(&a->words),
                          .hashes = a->hashes,
                          .salt = {a->generation.cache_salt[0], a->generation.cache_salt[1]}};
}

uint32_t prefill_pages_free(const prefill_core *core) {
    const uint32_t idle = core->cache != NULL ? prefix_cache_count(core->cache).idle : 0;
    return kv_pool_count(core->options.pages).free + idle;
}

/* ---- beginning ------------------------------------------------------------------------------- */

/* Pages that may come from the cache: full ones that end before the last token. */
static uint32_t hits_max(const prefill_core *core, const prefill_attempt *a) {
    if (!a->may_cache || a->generation.wants_prompt_logprobs) return 0;
    return (a->prompt_tokens - 1) / core->options.page_tokens;
}

/* Somebody computes page `index` of this prompt now, and nothing but computing keeps it. */
static bool has_leader(const prefill_core *core, const prefill_attempt *a, uint32_t index) {
    const uint32_t page_tokens = core->options.page_tokens;
    for (const prefill_attempt *b = core->line_first; b != NULL; b = b->behind) {
        if (b->state != PREFILL_COMPUTING || !b->may_cache) continue;
        if (b->generation.wants_prompt_logprobs) continue; /* waits for its reader at times */
        if (b->shared_count > index || b->prompt_tokens / page_tokens <= index) continue;
        if (block_hash_equal(b->hashes[index], a->hashes[index])) return true;
    }
    return false;
}

static bt_status begin_handoff(prefill_core *core, prefill_attempt *a) {
    if (a->generation.max_new_tokens == 0) return BT_OK;
    const handoff_target target = {.attempt = a->id,
                                   .peer = a->decode,
                                   .sample_count = a->generation.samples,
                                   .slots = a->slots,
                                   .prompt_tokens = a->prompt_tokens,
                                   .deadline_us = a->deadline_us};
    const bt_status status = handoff_sender_begin(core->sender, &target);
    a->has_handoff = status == BT_OK;
    return status;
}

/* The rest of its pages, which are there. */
static void acquire_rest(prefill_core *core, prefill_attempt *a, uint32_t count) {
    kv_pool *pool = core->options.pages;
    const uint32_t free = kv_pool_count(pool).free;
    if (free < count) prefix_cache_evict(core->cache, count - free);
    const bt_status status =
        kv_pool_acquire(pool, prefill_owner(a), count, a->pages + a->shared_count);
    BT_ASSERT(status == BT_OK);
    a->page_count += count;
}

bt_status prefill_begin(prefill_core *core, prefill_attempt *a) {
    const uint32_t count = kv_pages_for(a->prompt_tokens, core->options.page_tokens);
    const uint32_t limit = hits_max(core, a);
    const prefix_chain chain = chain_of(a);
    const uint32_t hits = limit > 0 ? prefix_cache_find(core->cache, &chain, limit, a->pages) : 0;
    a->is_following = hits < limit && has_leader(core, a, hits);
    if (a->is_following) return BT_ERR_REQUEST_FULL;
    if (hits > 0) prefix_cache_hold(core->cache, a->pages, hits);
    a->shared_count = hits;
    a->page_count = hits;
    const bool has_pages = count - hits <= prefill_pages_free(core);
    const bt_status status = has_pages ? begin_handoff(core, a) : BT_ERR_REQUEST_FULL;
    if (status == BT_ERR_REQUEST_FULL) prefill_release_pages(core, a);
    if (status == BT_ERR_REQUEST_FULL) return status;
    if (status != BT_OK) {
        prefill_fail(core, a, status, "the handoff to decode worker %" PRIu32 " cannot begin: %s",
                     a->decode.worker_id, bt_status_string(status));
        return status;
    }
    acquire_rest(core, a, count - hits);
    a->computed_tokens = hits * core->options.page_tokens;
    a->cached_tokens = a->computed_tokens;
    core->cached_tokens_total += a->cached_tokens;
    if (hits > 0) {
        bt_log_debug("prefill", "attempt " PREFILL_ID_FORMAT ": %" PRIu32 " cached tokens",
                     PREFILL_ID_ARGS(a->id), a->cached_tokens);
    }
    prefill_set_state(core, a, PREFILL_COMPUTING, "pages acquired");
    prefill_send_pages(core, a);
    return BT_OK;
}

/* ---- the cache ------------------------------------------------------------------------------- */

void prefill_cache_pages(prefill_core *core, prefill_attempt *a) {
    if (!a->may_cache) return;
    const uint32_t complete = a->computed_tokens / core->options.page_tokens;
    const prefix_chain chain = chain_of(a);
    while (a->may_cache && a->shared_count < complete) {
        BT_ASSERT(a->shared_count >= a->pages_sent); /* the page may be exchanged */
        a->may_cache =
            prefix_cache_put(core->cache, &chain, a->shared_count, prefill_owner(a), a->pages);
        if (a->may_cache) a->shared_count++;
    }
}

void prefill_uncache_pages(prefill_core *core, prefill_attempt *a, bool all_of_it) {
    if (core->cache == NULL) return;
    a->may_cache = false;
    const uint32_t from = all_of_it ? 0 : a->cached_tokens / core->options.page_tokens;
    prefix_cache_forget(core->cache, a->pages, from, a->shared_count);
}

/* ---- giving back ----------------------------------------------------------------------------- */

void prefill_quarantine_pages(prefill_core *core, prefill_attempt *a) {
    kv_pool_quarantine(core->options.pages, prefill_owner(a), a->pages + a->shared_count,
                       a->page_count - a->shared_count);
}

void prefill_release_pages(prefill_core *core, prefill_attempt *a) {
    const uint32_t own = a->page_count - a->shared_count;
    if (own > 0)
        kv_pool_release(core->options.pages, prefill_owner(a), a->pages + a->shared_count, own);
    if (a->shared_count > 0) prefix_cache_drop(core->cache, a->pages, a->shared_count);
    a->page_count = 0;
    a->shared_count = 0;
}
