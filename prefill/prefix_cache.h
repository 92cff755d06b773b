/* Prefixes whose KV is still in the pool: pages that later prompts need not compute.
 *
 * Nouns. An *entry* is one full page of tokens behind the entries before it (its *chain*); its page
 * is SHARED in the pool and the cache is one of its holders. An attempt that uses a chain holds
 * every page of it, from the first on. An entry that the cache alone holds is *idle*: it counts as
 * free, because it can be evicted at any time, the least recently used first and no entry before
 * those behind it.
 *
 * A hit is a match of the whole chain by hash, and of every token, the salt and the entry before:
 * names that collide cost a hit and never give wrong KV. All entries are of one weights epoch; the
 * user clears the cache when that changes.
 *
 * Memory: one record and one page of tokens for each page of the pool, made at creation; nothing is
 * allocated later. One thread. */
#ifndef BT_PREFILL_PREFIX_CACHE_H
#define BT_PREFILL_PREFIX_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "pd_buffers/kv_pool.h"
#include "proto/block_hash.h"

typedef struct prefix_cache prefix_cache;

/* A prompt as the cache sees it. Borrowed for a call. */
typedef struct prefix_chain {
    const int32_t *tokens;    /* whole pages of them */
    const block_hash *hashes; /* by page */
    uint64_t salt[2];
} prefix_chain;

typedef struct prefix_cache_counts {
    uint32_t entries, idle;
    uint64_t hit_pages, inserted, evicted, collisions;
} prefix_cache_counts;

/* The pool is borrowed and outlives the cache. WORKER_MEMORY. */
BT_MUST_CHECK bt_status prefix_cache_create(kv_pool *pages, uint32_t page_tokens,
                                            prefix_cache **out);
void prefix_cache_destroy(prefix_cache *cache);
/* Forgets every entry. Pages that attempts hold stay theirs until prefix_cache_drop. */
void prefix_cache_clear(prefix_cache *cache);

/* The entries that match the first pages of the chain, at most pages_max; their pages in order in
 * pages_out. Nothing is held yet. */
uint32_t prefix_cache_find(const prefix_cache *cache, const prefix_chain *chain, uint32_t pages_max,
                           uint32_t *pages_out);
/* An attempt holds what it found, until prefix_cache_drop of the same pages (which may have become
 * more by prefix_cache_put). */
void prefix_cache_hold(prefix_cache *cache, const uint32_t *pages, uint32_t count);
void prefix_cache_drop(prefix_cache *cache, const uint32_t *pages, uint32_t count);
/* pages[index], OWNED by `owner`, is final and holds page `index` of the chain; the caller holds
 * the entries pages[0 .. index). Afterwards it holds pages[index] too, which is SHARED: the same
 * page, or, when the entry was there already, the entry's (and the own one went back to the pool).
 * false, and nothing changed, when the name is taken by other tokens. */
BT_MUST_CHECK bool prefix_cache_put(prefix_cache *cache, const prefix_chain *chain, uint32_t index,
                                    uint64_t owner, uint32_t *pages);
/* The caller holds pages [count], a whole chain. Entries from `from` on are forgotten, the last
 * first, as far as nobody else holds them and nothing is behind them. The caller's holds stay. */
void prefix_cache_forget(prefix_cache *cache, const uint32_t *pages, uint32_t from, uint32_t count);
/* Evicts `count` idle entries; asserts that there are as many. Their pages are free. */
void prefix_cache_evict(prefix_cache *cache, uint32_t count);

prefix_cache_counts prefix_cache_count(const prefix_cache *cache);
bool prefix_cache_has(const prefix_cache *cache, uint32_t page); /* the page is an entry's */
/* Recounts everything. */
bool prefix_cache_check(const prefix_cache *cache);

#endif
