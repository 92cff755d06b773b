/* Sequences of what attempts do with pages that they share, on the page pool and the prefix cache,
 * against a plain model that keeps whole prefixes: a hit is the longest prefix there is, its pages
 * hold what was computed for exactly these tokens, who is held is not evicted, the least recently
 * used goes first, and nothing is lost. The first byte may ask for hashes of two bits, with which
 * almost everything collides: then hits may be missed, never wrong. */
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <string.h>

#include "base/assert.h"
#include "prefill/prefix_cache.h"

enum { PAGES = 10, ATTEMPTS = 4, DEPTH = 5, PAGE_TOKENS = 2, PAGE_BYTES = 64 };

/* The first `count` pages of tokens, of a salt. */
typedef struct prefix {
    uint32_t count;
    uint32_t salt;
    int32_t tokens[DEPTH * PAGE_TOKENS];
} prefix;

static_assert(sizeof(prefix) <= PAGE_BYTES, "a page holds its prefix");

typedef struct attempt {
    bool is_used;
    prefix prompt;
    block_hash hashes[DEPTH];
    uint32_t pages[DEPTH];
    uint32_t shared, computed;
    bool may_cache;
} attempt;

typedef struct model {
    kv_pool *pool;
    prefix_cache *cache;
    bool is_weak;
    attempt attempts[ATTEMPTS];
    prefix entries[PAGES]; /* by page; count 0: none */
    uint64_t used_at[PAGES];
    uint64_t now;
} model;

static bool is_same(const prefix *a, const prefix *b, uint32_t count) {
    return a->salt == b->salt &&
           memcmp(a->tokens, b->tokens, sizeof a->tokens[0] * PAGE_TOKENS * count) == 0;
}

/* The page of the entry for the first `count` pages of a prompt; PAGES: none. */
static uint32_t entry_of(const model *m, const prefix *prompt, uint32_t count) {
    uint32_t page = 0;
    while (page < PAGES &&
           (m->entries[page].count != count || !is_same(&m->entries[page], prompt, count)))
        page++;
    return page;
}

static uint32_t holders_of(const model *m, uint32_t page) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < ATTEMPTS; i++)
        for (uint32_t p = 0; m->attempts[i].is_used && p < m->attempts[i].shared; p++)
            count += m->attempts[i].pages[p] == page;
    return count;
}

static bool has_children(const model *m, uint32_t page) {
    const prefix *of = &m->entries[page];
    for (uint32_t other = 0; other < PAGES; other++) {
        const prefix *e = &m->entries[other];
        if (e->count == of->count + 1 && is_same(e, of, of->count)) return true;
    }
    return false;
}

static prefix_chain chain_of(const attempt *a) {
    return (prefix_chain){
        .tokens = a->prompt.tokens, .hashes = a->hashes, .salt = {a->prompt.salt, 0}};
}

/* What a page holds once it is computed: its whole prefix. */
static void write_page(model *m, const attempt *a, uint32_t index) {
    prefix content = a->prompt;
    content.count = index + 1;
    memset(content.tokens + content.count * PAGE_TOKENS, 0,
           sizeof content.tokens[0] * PAGE_TOKENS * (DEPTH - content.count));
    memcpy(kv_pool_page(m->pool, a->pages[index]), &content, sizeof content);
}

static void check_content(model *m, const attempt *a, uint32_t index) {
    prefix content;
    memcpy(&content, kv_pool_page(m->pool, a->pages[index]), sizeof content);
    BT_ASSERT(content.count == index + 1);
    BT_ASSERT(is_same(&content, &a->prompt, index + 1));
}

/* The idle entry that was used the longest ago leaves. */
static void expect_eviction(model *m) {
    uint32_t oldest = PAGES;
    for (uint32_t page = 0; page < PAGES; page++) {
        if (m->entries[page].count == 0 || holders_of(m, page) > 0) continue;
        if (oldest == PAGES || m->used_at[page] < m->used_at[oldest]) oldest = page;
    }
    BT_ASSERT(oldest < PAGES);
    BT_ASSERT(!has_children(m, oldest));
    prefix_cache_evict(m->cache, 1);
    BT_ASSERT(!prefix_cache_has(m->cache, oldest));
    BT_ASSERT(kv_pool_state(m->pool, oldest) == KV_PAGE_FREE);
    m->entries[oldest].count = 0;
}

static void end(model *m, attempt *a) {
    const uint64_t owner = (uint64_t)(a - m->attempts) + 1;
    kv_pool_release(m->pool, owner, a->pages + a->shared, a->prompt.count - a->shared);
    prefix_cache_drop(m->cache, a->pages, a->shared);
    a->is_used = false;
    for (uint32_t i = a->shared; i > 0; i--)
        if (holders_of(m, a->pages[i - 1]) == 0) m->used_at[a->pages[i - 1]] = ++m->now;
}

static void begin(model *m, attempt *a, uint8_t what) {
    const uint64_t owner = (uint64_t)(a - m->attempts) + 1;
    memset(a, 0, sizeof *a);
    a->prompt.count = 1 + what % DEPTH;
    a->prompt.salt = what >> 7;
    for (uint32_t i = 0; i < DEPTH; i++)
        a->prompt.tokens[i * PAGE_TOKENS] = what / DEPTH >> i & 1;
    const uint64_t salt[2] = {a->prompt.salt, 0};
    block_hash hash = block_hash_root(7, salt);
    for (uint32_t i = 0; i < a->prompt.count; i++) {
        hash = block_hash_extend(hash, a->prompt.tokens + (size_t)i * PAGE_TOKENS, PAGE_TOKENS);
        a->hashes[i] = m->is_weak ? (block_hash){.low = hash.low & 3} : hash;
    }
    const prefix_chain chain = chain_of(a);
    uint32_t expected = 0;
    while (expected < a->prompt.count && entry_of(m, &a->prompt, expected + 1) < PAGES)
        expected++;
    const uint32_t hits = prefix_cache_find(m->cache, &chain, a->prompt.count, a->pages);
    BT_ASSERT(m->is_weak ? hits <= expected : hits == expected);
    for (uint32_t i = 0; i < hits; i++)
        BT_ASSERT(a->pages[i] == entry_of(m, &a->prompt, i + 1));
    prefix_cache_hold(m->cache, a->pages, hits);
    a->shared = hits;
    a->computed = hits;
    a->may_cache = true;
    a->is_used = true;
    const uint32_t need = a->prompt.count - hits;
    if (need > kv_pool_count(m->pool).free + prefix_cache_count(m->cache).idle) {
        a->prompt.count = hits; /* nothing of its own */
        end(m, a);
        return;
    }
    while (kv_pool_count(m->pool).free < need)
        expect_eviction(m);
    const bt_status status = kv_pool_acquire(m->pool, owner, need, a->pages + hits);
    BT_ASSERT(status == BT_OK);
}

static void compute(model *m, attempt *a) {
    const uint64_t owner = (uint64_t)(a - m->attempts) + 1;
    if (a->computed == a->prompt.count) return;
    write_page(m, a, a->computed++);
    const prefix_chain chain = chain_of(a);
    while (a->may_cache && a->shared < a->computed) {
        const uint32_t own = a->pages[a->shared];
        const uint32_t known = entry_of(m, &a->prompt, a->shared + 1);
        a->may_cache = prefix_cache_put(m->cache, &chain, a->shared, owner, a->pages);
        BT_ASSERT(a->may_cache || m->is_weak);
        if (!a->may_cache) return;
        BT_ASSERT(a->pages[a->shared] == (known < PAGES ? known : own));
        prefix *entry = &m->entries[a->pages[a->shared++]];
        *entry = a->prompt;
        entry->count = a->shared;
    }
}

static void forget(model *m, attempt *a, uint32_t from) {
    if (from > a->shared) from = a->shared;
    prefix_cache_forget(m->cache, a->pages, from, a->shared);
    a->may_cache = false;
    for (uint32_t i = a->shared; i > from; i--) {
        const uint32_t page = a->pages[i - 1];
        if (m->entries[page].count == 0) continue; /* forgotten before */
        if (has_children(m, page) || holders_of(m, page) > 1) break;
        m->entries[page].count = 0;
    }
}

static void clear(model *m) {
    for (uint32_t i = 0; i < ATTEMPTS; i++)
        if (m->attempts[i].is_used) return;
    prefix_cache_clear(m->cache);
    for (uint32_t page = 0; page < PAGES; page++)
        m->entries[page].count = 0;
}

static void check(model *m) {
    uint32_t entries = 0;
    uint32_t idle = 0;
    uint32_t own = 0;
    BT_ASSERT(kv_pool_check(m->pool));
    BT_ASSERT(prefix_cache_check(m->cache));
    for (uint32_t page = 0; page < PAGES; page++) {
        const bool is_entry = m->entries[page].count > 0;
        BT_ASSERT(prefix_cache_has(m->cache, page) == is_entry);
        entries += is_entry;
        idle += is_entry && holders_of(m, page) == 0;
    }
    for (uint32_t i = 0; i < ATTEMPTS; i++) {
        const attempt *a = &m->attempts[i];
        if (!a->is_used) continue;
        own += a->prompt.count - a->shared;
        for (uint32_t p = 0; p < a->computed; p++)
            check_content(m, a, p);
    }
    BT_ASSERT(prefix_cache_count(m->cache).entries == entries);
    BT_ASSERT(prefix_cache_count(m->cache).idle == idle);
    BT_ASSERT(kv_pool_count(m->pool).owned == own);
}

static void step(model *m, uint8_t op, uint8_t what) {
    attempt *a = &m->attempts[op % ATTEMPTS];
    const uint8_t kind = op / ATTEMPTS % 8;
    if (!a->is_used) {
        if (kind == 7)
            clear(m);
        else
            begin(m, a, what);
    } else if (kind < 5) {
        compute(m, a);
    } else if (kind == 5) {
        forget(m, a, what % (DEPTH + 1));
    } else {
        end(m, a);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const kv_pool_options options = {.page_count = PAGES, .page_bytes = PAGE_BYTES, .layers = 1};
    model m;
    memset(&m, 0, sizeof m);
    bt_status status = kv_pool_create(&options, &m.pool);
    BT_ASSERT(status == BT_OK);
    status = prefix_cache_create(m.pool, PAGE_TOKENS, &m.cache);
    BT_ASSERT(status == BT_OK);
    m.is_weak = bytes > 0 && data[0] % 2 == 1;
    for (size_t i = 1; i + 1 < bytes; i += 2) {
        step(&m, data[i], data[i + 1]);
        check(&m);
    }
    for (uint32_t i = 0; i < ATTEMPTS; i++)
        if (m.attempts[i].is_used) end(&m, &m.attempts[i]);
    prefix_cache_destroy(m.cache);
    BT_ASSERT(kv_pool_count(m.pool).free == PAGES);
    kv_pool_destroy(m.pool);
    return 0;
}
