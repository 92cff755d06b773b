/* Entries are numbered by their pages. Three structures over one array: chains of a hash table, the
 * parent of each entry with the count of its children, and the list of idle entries, least recently
 * used first.
 *
 * Why the head of the idle list is always a leaf: an attempt holds whole chains, so whoever holds
 * an entry holds those before it; and drop goes from the last page to the first, so an entry
 * becomes idle, each time, before the one before it does. So children stand nearer to the head. */
#include "prefill/prefix_cache.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"

static const uint32_t none = UINT32_MAX;

typedef struct cache_entry {
    block_hash hash;
    uint64_t salt[2];
    uint32_t parent; /* none: the first page of a chain */
    uint32_t children;
    uint32_t next_in_bucket;
    uint32_t idle_before, idle_behind;
    bool is_cached;
    bool is_idle;
} cache_entry;

struct prefix_cache {
    kv_pool *pages;
    uint32_t page_count, page_tokens;
    cache_entry *entries; /* [page_count] */
    int32_t *tokens;      /* [page_count][page_tokens] */
    uint32_t *buckets;    /* [bucket_mask + 1] */
    uint32_t bucket_mask;
    uint32_t idle_first, idle_last;
    prefix_cache_counts counts;
};

bt_status prefix_cache_create(kv_pool *pages, uint32_t page_tokens, prefix_cache **out) {
    const uint32_t count = kv_pool_count(pages).total;
    uint32_t buckets = 1;
    while (buckets < count && buckets < UINT32_MAX / 2 + 1)
        buckets *= 2;
    prefix_cache *cache = bt_calloc(1, sizeof *cache);
    if (cache == NULL) return BT_ERR_WORKER_MEMORY;
    *cache = (prefix_cache){.pages = pages,
                            .page_count = count,
                            .page_tokens = page_tokens,
                            .entries = bt_calloc(count, sizeof *cache->entries),
                            .tokens = bt_calloc(count, sizeof *cache->tokens * page_tokens),
                            .buckets = bt_calloc(buckets, sizeof *cache->buckets),
                            .bucket_mask = buckets - 1,
                            .idle_first = none,
                            .idle_last = none};
    if (cache->entries == NULL || cache->tokens == NULL || cache->buckets == NULL) {
        bt_free(cache->buckets);
        bt_free(cache->tokens);
        bt_free(cache->entries);
        bt_free(cache);
        return BT_ERR_WORKER_MEMORY;
    }
    memset(cache->buckets, 0xff, sizeof *cache->buckets * buckets);
    *out = cache;
    return BT_OK;
}

void prefix_cache_destroy(prefix_cache *cache) {
    if (cache == NULL) return;
    prefix_cache_clear(cache);
    bt_free(cache->buckets);
    bt_free(cache->tokens);
    bt_free(cache->entries);
    bt_free(cache);
}

void prefix_cache_clear(prefix_cache *cache) {
    for (uint32_t page = 0; page < cache->page_count; page++) {
        if (!cache->entries[page].is_cached) continue;
        cache->entries[page] = (cache_entry){0};
        kv_pool_drop(cache->pages, &page, 1);
    }
    memset(cache->buckets, 0xff, sizeof *cache->buckets * (cache->bucket_mask + 1u));
    cache->idle_first = none;
    cache->idle_last = none;
    cache->counts.entries = 0;
    cache->counts.idle = 0;
}

/* ---- the idle list --------------------------------------------------------------------------- */

static void make_idle(prefix_cache *cache, uint32_t page) {
    cache_entry *entry = &cache->entries[page];
    BT_ASSERT(entry->is_cached && !entry->is_idle);
    entry->is_idle = true;
    entry->idle_before = cache->idle_last;
    entry->idle_behind = none;
    if (cache->idle_last != none)
        cache->entries[cache->idle_last].idle_behind = page;
    else
        cache->idle_first = page;
    cache->idle_last = page;
    cache->counts.idle++;
}

static void end_idle(prefix_cache *cache, uint32_t page) {
    cache_entry *entry = &cache->entries[page];
    BT_ASSERT(entry->is_idle);
    entry->is_idle = false;
    if (entry->idle_before != none)
        cache->entries[entry->idle_before].idle_behind = entry->idle_behind;
    else
        cache->idle_first = entry->idle_behind;
    if (entry->idle_behind != none)
        cache->entries[entry->idle_behind].idle_before = entry->idle_before;
    else
        cache->idle_last = entry->idle_before;
    cache->counts.idle--;
}

/* ---- looking up ------------------------------------------------------------------------------ */

static uint32_t *bucket_of(const prefix_cache *cache, block_hash hash) {
    return &cache->buckets[hash.low & cache->bucket_mask];
}

static int32_t *tokens_of(const prefix_cache *cache, uint32_t page) {
    return cache->tokens + (size_t)page * cache->page_tokens;
}

/* The entry of this name, or none. */
static uint32_t named(const prefix_cache *cache, block_hash hash) {
    uint32_t page = *bucket_of(cache, hash);
    while (page != none && !block_hash_equal(cache->entries[page].hash, hash))
        page = cache->entries[page].next_in_bucket;
    return page;
}

/* Whether an entry of the right name is the right one. */
static bool matches(const prefix_cache *cache, uint32_t page, const prefix_chain *chain,
                    uint32_t index, uint32_t parent) {
    const cache_entry *entry = &cache->entries[page];
    const size_t bytes = sizeof *cache->tokens * cache->page_tokens;
    return entry->parent == parent && entry->salt[0] == chain->salt[0] &&
           entry->salt[1] == chain->salt[1] &&
           memcmp(tokens_of(cache, page), chain->tokens + (size_t)index * cache->page_tokens,
                  bytes) == 0;
}

uint32_t prefix_cache_find(const prefix_cache *cache, const prefix_chain *chain, uint32_t pages_max,
                           uint32_t *pages_out) {
    uint32_t parent = none;
    uint32_t count = 0;
    while (count < pages_max) {
        const uint32_t page = named(cache, chain->hashes[count]);
        if (page == none || !matches(cache, page, chain, count, parent)) break;
        pages_out[count++] = page;
        parent = page;
    }
    return count;
}

void prefix_cache_hold(prefix_cache *cache, const uint32_t *pages, uint32_t count) {
    kv_pool_hold(cache->pages, pages, count);
    for (uint32_t i = 0; i < count; i++) {
        BT_ASSERT(cache->entries[pages[i]].is_cached);
        if (cache->entries[pages[i]].is_idle) end_idle(cache, pages[i]);
    }
    cache->counts.hit_pages += count;
}

void prefix_cache_drop(prefix_cache *cache, const uint32_t *pages, uint32_t count) {
    kv_pool_drop(cache->pages, pages, count);
    for (uint32_t i = count; i > 0; i--) {
        const uint32_t page = pages[i - 1];
        const bool is_last =
            cache->entries[page].is_cached && kv_pool_holders(cache->pages, page) == 1;
        if (is_last) make_idle(cache, page);
    }
}

/* ---- coming and going ------------------------------------------------------------------------ */

bool prefix_cache_put(prefix_cache *cache, const prefix_chain *chain, uint32_t index,
                      uint64_t owner, uint32_t *pages) {
    const uint32_t parent = index == 0 ? none : pages[index - 1];
    const block_hash hash = chain->hashes[index];
    const uint32_t known = named(cache, hash);
    const uint32_t page = pages[index];
    BT_ASSERT(parent == none || cache->entries[parent].is_cached);
    if (known != none) {
        if (!matches(cache, known, chain, index, parent)) {
            cache->counts.collisions++;
            return false;
        }
        kv_pool_release(cache->pages, owner, &page, 1);
        kv_pool_hold(cache->pages, &known, 1);
        if (cache->entries[known].is_idle) end_idle(cache, known);
        pages[index] = known;
        return true;
    }
    cache_entry *entry = &cache->entries[page];
    BT_ASSERT(!entry->is_cached);
    *entry = (cache_entry){.hash = hash,
                           .salt = {chain->salt[0], chain->salt[1]},
                           .parent = parent,
                           .next_in_bucket = *bucket_of(cache, hash),
                           .is_cached = true};
    *bucket_of(cache, hash) = page;
    memcpy(tokens_of(cache, page), chain->tokens + (size_t)index * cache->page_tokens,
           sizeof *cache->tokens * cache->page_tokens);
    if (parent != none) cache->entries[parent].children++;
    kv_pool_share(cache->pages, owner, &page, 1); /* the caller's hold */
    kv_pool_hold(cache->pages, &page, 1);         /* the cache's */
    cache->counts.entries++;
    cache->counts.inserted++;
    return true;
}

static void remove_entry(prefix_cache *cache, uint32_t page) {
    cache_entry *entry = &cache->entries[page];
    BT_ASSERT(entry->is_cached && entry->children == 0);
    uint32_t *at = bucket_of(cache, entry->hash);
    while (*at != page)
        at = &cache->entries[*at].next_in_bucket;
    *at = entry->next_in_bucket;
    if (entry->parent != none) cache->entries[entry->parent].children--;
    if (entry->is_idle) end_idle(cache, page);
    entry->is_cached = false;
    cache->counts.entries--;
    kv_pool_drop(cache->pages, &page, 1);
}

void prefix_cache_forget(prefix_cache *cache, const uint32_t *pages, uint32_t from,
                         uint32_t count) {
    for (uint32_t i = count; i > from; i--) {
        const uint32_t page = pages[i - 1];
        if (!cache->entries[page].is_cached) continue;
        const bool is_free =
            cache->entries[page].children == 0 && kv_pool_holders(cache->pages, page) == 2;
        if (!is_free) return;
        remove_entry(cache, page);
    }
}

void prefix_cache_evict(prefix_cache *cache, uint32_t count) {
    BT_ASSERT(count <= cache->counts.idle);
    for (uint32_t i = 0; i < count; i++)
        remove_entry(cache, cache->idle_first);
    cache->counts.evicted += count;
}

/* ---- looking --------------------------------------------------------------------------------- */

prefix_cache_counts prefix_cache_count(const prefix_cache *cache) {
    return cache->counts;
}

bool prefix_cache_has(const prefix_cache *cache, uint32_t page) {
    BT_ASSERT(page < cache->page_count);
    return cache->entries[page].is_cached;
}

static bool check_entry(const prefix_cache *cache, uint32_t page) {
    const cache_entry *entry = &cache->entries[page];
    const uint32_t holders = kv_pool_holders(cache->pages, page);
    if (kv_pool_state(cache->pages, page) != KV_PAGE_SHARED || holders == 0) return false;
    if (entry->is_idle != (holders == 1)) return false;
    if (named(cache, entry->hash) != page) return false;
    if (entry->parent == none) return true;
    /* Whoever holds it holds what is before it. */
    return cache->entries[entry->parent].is_cached &&
           kv_pool_holders(cache->pages, entry->parent) >= holders;
}

bool prefix_cache_check(const prefix_cache *cache) {
    prefix_cache_counts found = cache->counts;
    uint32_t children = 0;
    found.entries = 0;
    found.idle = 0;
    for (uint32_t page = 0; page < cache->page_count; page++) {
        const cache_entry *entry = &cache->entries[page];
        if (!entry->is_cached) continue;
        if (!check_entry(cache, page)) return false;
        found.entries++;
        found.idle += entry->is_idle;
        children += entry->children;
        children -= entry->parent != none;
    }
    if (children != 0) return false;
    uint32_t listed = 0;
    for (uint32_t page = cache->idle_first; page != none; page = cache->entries[page].idle_behind) {
        if (!cache->entries[page].is_idle || ++listed > found.idle) return false;
    }
    return listed == found.idle && found.entries == cache->counts.entries &&
           found.idle == cache->counts.idle;
}
