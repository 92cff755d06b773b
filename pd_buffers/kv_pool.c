/* One block, a stack of free page numbers, and a state and an owner per page. Only this file
 * changes them. Pages that are released are the next to be given out, in the same order, which
 * keeps them in the caches, keeps neighbours together (longer runs in a transfer), and makes a use
 * after release show early. */
#include "pd_buffers/kv_pool.h"

#include "base/assert.h"
#include "base/mem.h"

enum { MEMORY_ALIGNMENT = 4096 };

typedef struct page_record {
    uint64_t owner;   /* of an owned or quarantined page */
    uint32_t holders; /* of a shared one */
    kv_page_state state;
} page_record;

struct kv_pool {
    kv_pool_options options;
    void *block;     /* calloc's, so that pages that nobody used yet cost no memory */
    uint8_t *memory; /* the aligned start in it */
    page_record *records;
    uint32_t *free_pages; /* [counts.free], the top is the last */
    kv_pool_counts counts;
};

bt_status kv_pool_create(const kv_pool_options *options, kv_pool **out) {
    size_t bytes = 0;
    if (options->page_count == 0 || options->page_bytes == 0 || options->layers == 0)
        return BT_ERR_CALLER_ARGUMENT;
    if (options->page_bytes % options->layers != 0) return BT_ERR_CALLER_ARGUMENT;
    if (!bt_mul_size(options->page_count, options->page_bytes, &bytes) ||
        !bt_add_size(bytes, MEMORY_ALIGNMENT, &bytes))
        return BT_ERR_CALLER_ARGUMENT;
    kv_pool *pool = bt_calloc(1, sizeof *pool);
    if (pool == NULL) return BT_ERR_WORKER_MEMORY;
    pool->options = *options;
    pool->block = bt_calloc(1, bytes);
    pool->records = bt_calloc(options->page_count, sizeof *pool->records);
    pool->free_pages = bt_calloc(options->page_count, sizeof *pool->free_pages);
    if (pool->block == NULL || pool->records == NULL || pool->free_pages == NULL) {
        kv_pool_destroy(pool);
        return BT_ERR_WORKER_MEMORY;
    }
    pool->memory = (uint8_t *)(((uintptr_t)pool->block + MEMORY_ALIGNMENT - 1) &
                               ~(uintptr_t)(MEMORY_ALIGNMENT - 1));
    for (uint32_t i = 0; i < options->page_count; i++)
        pool->free_pages[i] = options->page_count - 1 - i;
    pool->counts.total = options->page_count;
    pool->counts.free = options->page_count;
    *out = pool;
    return BT_OK;
}

void kv_pool_destroy(kv_pool *pool) {
    if (pool == NULL) return;
    bt_free(pool->free_pages);
    bt_free(pool->records);
    bt_free(pool->block);
    bt_free(pool);
}

void *kv_pool_memory(kv_pool *pool) {
    return pool->memory;
}

size_t kv_pool_memory_bytes(const kv_pool *pool) {
    return (size_t)pool->options.page_count * pool->options.page_bytes;
}

void *kv_pool_page(kv_pool *pool, uint32_t page) {
    BT_ASSERT(page < pool->options.page_count);
    return pool->memory + (size_t)page * pool->options.page_bytes;
}

const kv_pool_options *kv_pool_get_options(const kv_pool *pool) {
    return &pool->options;
}

bt_status kv_pool_acquire(kv_pool *pool, uint64_t owner, uint32_t count, uint32_t *pages_out) {
    BT_ASSERT(owner != 0);
    if (count > pool->counts.total) return BT_ERR_REQUEST_TOO_LARGE;
    if (count > pool->counts.free) return BT_ERR_REQUEST_FULL;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t page = pool->free_pages[pool->counts.free - 1 - i];
        BT_ASSERT(pool->records[page].state == KV_PAGE_FREE);
        pool->records[page] = (page_record){.owner = owner, .state = KV_PAGE_OWNED};
        pages_out[i] = page;
    }
    pool->counts.free -= count;
    pool->counts.owned += count;
    return BT_OK;
}

static page_record *owned_record(kv_pool *pool, uint64_t owner, uint32_t page) {
    BT_ASSERT(page < pool->options.page_count);
    page_record *record = &pool->records[page];
    BT_ASSERT(owner != 0);
    BT_ASSERT(record->owner == owner);
    BT_ASSERT(record->state == KV_PAGE_OWNED || record->state == KV_PAGE_QUARANTINED);
    return record;
}

static page_record *shared_record(kv_pool *pool, uint32_t page) {
    BT_ASSERT(page < pool->options.page_count);
    page_record *record = &pool->records[page];
    BT_ASSERT(record->state == KV_PAGE_SHARED);
    BT_ASSERT(record->holders > 0);
    return record;
}

void kv_pool_release(kv_pool *pool, uint64_t owner, const uint32_t *pages, uint32_t count) {
    for (uint32_t i = count; i > 0; i--) {
        page_record *record = owned_record(pool, owner, pages[i - 1]);
        if (record->state == KV_PAGE_OWNED)
            pool->counts.owned--;
        else
            pool->counts.quarantined--;
        *record = (page_record){.owner = 0, .state = KV_PAGE_FREE};
        pool->free_pages[pool->counts.free++] = pages[i - 1];
    }
    BT_DEBUG_ASSERT(kv_pool_check(pool));
}

void kv_pool_quarantine(kv_pool *pool, uint64_t owner, const uint32_t *pages, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        page_record *record = owned_record(pool, owner, pages[i]);
        if (record->state == KV_PAGE_QUARANTINED) continue;
        record->state = KV_PAGE_QUARANTINED;
        pool->counts.owned--;
        pool->counts.quarantined++;
    }
}

void kv_pool_share(kv_pool *pool, uint64_t owner, const uint32_t *pages, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        page_record *record = owned_record(pool, owner, pages[i]);
        BT_ASSERT(record->state == KV_PAGE_OWNED);
        *record = (page_record){.holders = 1, .state = KV_PAGE_SHARED};
    }
    pool->counts.owned -= count;
    pool->counts.shared += count;
    pool->counts.holds += count;
}

void kv_pool_hold(kv_pool *pool, const uint32_t *pages, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        shared_record(pool, pages[i])->holders++;
    pool->counts.holds += count;
}

void kv_pool_drop(kv_pool *pool, const uint32_t *pages, uint32_t count) {
    for (uint32_t i = count; i > 0; i--) {
        page_record *record = shared_record(pool, pages[i - 1]);
        pool->counts.holds--;
        if (--record->holders > 0) continue;
        *record = (page_record){.state = KV_PAGE_FREE};
        pool->counts.shared--;
        pool->free_pages[pool->counts.free++] = pages[i - 1];
    }
    BT_DEBUG_ASSERT(kv_pool_check(pool));
}

uint32_t kv_pool_holders(const kv_pool *pool, uint32_t page) {
    BT_ASSERT(page < pool->options.page_count);
    return pool->records[page].holders;
}

uint64_t kv_pool_owner(const kv_pool *pool, uint32_t page) {
    BT_ASSERT(page < pool->options.page_count);
    return pool->records[page].owner;
}

kv_page_state kv_pool_state(const kv_pool *pool, uint32_t page) {
    BT_ASSERT(page < pool->options.page_count);
    return pool->records[page].state;
}

kv_pool_counts kv_pool_count(const kv_pool *pool) {
    return pool->counts;
}

bool kv_pool_check(const kv_pool *pool) {
    kv_pool_counts found = {.total = pool->options.page_count};
    for (uint32_t i = 0; i < pool->options.page_count; i++) {
        const page_record *record = &pool->records[i];
        const bool is_owned =
            record->state == KV_PAGE_OWNED || record->state == KV_PAGE_QUARANTINED;
        if ((record->owner != 0) != is_owned) return false;
        if ((record->holders > 0) != (record->state == KV_PAGE_SHARED)) return false;
        found.holds += record->holders;
        switch (record->state) {
        case KV_PAGE_FREE: found.free++; break;
        case KV_PAGE_OWNED: found.owned++; break;
        case KV_PAGE_SHARED: found.shared++; break;
        case KV_PAGE_QUARANTINED: found.quarantined++; break;
        }
    }
    for (uint32_t i = 0; i < pool->counts.free && i < found.total; i++)
        if (pool->records[pool->free_pages[i]].state != KV_PAGE_FREE) return false;
    return found.free == pool->counts.free && found.owned == pool->counts.owned &&
           found.quarantined == pool->counts.quarantined && found.shared == pool->counts.shared &&
           found.holds == pool->counts.holds && found.total == pool->counts.total;
}
