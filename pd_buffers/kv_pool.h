/* The pool of KV pages of one worker: one registered block of memory, pages of equal size, each
 * with one explicit state that only this file changes. Owners are numbers chosen by the caller (one
 * owner record per attempt). A page may be *shared*: it is final, is never written again, and is
 * free when its last holder let it go. Not thread-safe: the event thread owns it. */
#ifndef BT_PD_BUFFERS_KV_POOL_H
#define BT_PD_BUFFERS_KV_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum kv_page_state {
    KV_PAGE_FREE,
    KV_PAGE_OWNED,       /* belongs to an owner: being filled, computed on or sent */
    KV_PAGE_SHARED,      /* has holders, counted and not named: attempts, the prefix cache */
    KV_PAGE_QUARANTINED, /* its owner ended, but a transfer may still write or read it */
} kv_page_state;

typedef struct kv_pool kv_pool;

typedef struct kv_pool_options {
    uint32_t page_count;
    size_t page_bytes;
    uint32_t layers; /* page_bytes is a multiple of it; transfers cut pages there */
} kv_pool_options;

typedef struct kv_pool_counts {
    uint32_t total, free, owned, quarantined, shared;
    uint64_t holds; /* of the shared pages together */
} kv_pool_counts;

/* CALLER_ARGUMENT for a count or size of zero or a page_bytes that is no multiple of layers;
 * WORKER_MEMORY when the block cannot be had. Memory is zero; what nobody has used yet takes no
 * memory of the machine, so a pool larger than that is not noticed here. */
BT_MUST_CHECK bt_status kv_pool_create(const kv_pool_options *options, kv_pool **out);
void kv_pool_destroy(kv_pool *pool);
void *kv_pool_memory(kv_pool *pool);
size_t kv_pool_memory_bytes(const kv_pool *pool);
void *kv_pool_page(kv_pool *pool, uint32_t page);
const kv_pool_options *kv_pool_get_options(const kv_pool *pool);

/* All `count` pages or none: REQUEST_FULL, or REQUEST_TOO_LARGE when the pool never has so many.
 * owner is not 0. What the pages held before is still in them. */
BT_MUST_CHECK bt_status kv_pool_acquire(kv_pool *pool, uint64_t owner, uint32_t count,
                                        uint32_t *pages_out);
/* Pages go back to FREE; asserted to belong to owner (OWNED or QUARANTINED), each named once. */
void kv_pool_release(kv_pool *pool, uint64_t owner, const uint32_t *pages, uint32_t count);
/* OWNED pages of owner become QUARANTINED; those that are already stay so. */
void kv_pool_quarantine(kv_pool *pool, uint64_t owner, const uint32_t *pages, uint32_t count);
/* OWNED pages of owner become SHARED with one holder, the caller. */
void kv_pool_share(kv_pool *pool, uint64_t owner, const uint32_t *pages, uint32_t count);
/* One more holder, and one less, of SHARED pages; without holders they are FREE. */
void kv_pool_hold(kv_pool *pool, const uint32_t *pages, uint32_t count);
void kv_pool_drop(kv_pool *pool, const uint32_t *pages, uint32_t count);
uint32_t kv_pool_holders(const kv_pool *pool, uint32_t page); /* 0 unless SHARED */
uint64_t kv_pool_owner(const kv_pool *pool, uint32_t page);   /* 0 for a free or shared page */
kv_page_state kv_pool_state(const kv_pool *pool, uint32_t page);
kv_pool_counts kv_pool_count(const kv_pool *pool);
/* Recounts every page; false when the states and the counts disagree. */
bool kv_pool_check(const kv_pool *pool);

#endif
