/* Blocks of memory that several holders share by count, and a pool that uses them again: memory
 * that was used a moment ago is warm, fresh pages cost many times a copy into warm ones.
 *
 * A block is acquired with one hold and goes back to its pool with the last release. One thread
 * acquires, trims and destroys; any thread may hold (having a hold) and release. Whoever has the
 * only hold may write; what is shared is written to by none, or by agreement in disjoint parts.
 * The pool may be destroyed while blocks are out: they stay valid until their last release.
 *
 * Bounded: bytes in use and kept together never pass bytes_max, and what is kept for later never
 * passes idle_bytes_max. Blocks come in sizes an eighth of a power of two apart, so a block is at
 * most an eighth larger than was asked for (and BT_BLOCK_BYTES_MIN at least). */
#ifndef BT_BASE_BLOCK_POOL_H
#define BT_BASE_BLOCK_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bt_block_pool bt_block_pool;
typedef struct bt_block bt_block;

enum { BT_BLOCK_BYTES_MIN = 1024 };

struct bt_block {
    /* Of whoever has the only hold, or of one holder as agreed; NULL and 0 when acquired. */
    bt_block *next;
    size_t used;
    /* Private but for reading. */
    size_t capacity;
    bt_block_pool *pool;
    _Atomic uint32_t holds;
    uint32_t size_class;
    _Alignas(16) uint8_t bytes[]; /* [capacity] */
};

typedef struct bt_block_pool_options {
    size_t bytes_max;      /* in use and kept; 0: no limit */
    size_t idle_bytes_max; /* kept for later */
} bt_block_pool_options;

BT_MUST_CHECK bt_status bt_block_pool_create(const bt_block_pool_options *options,
                                             bt_block_pool **out);
void bt_block_pool_destroy(bt_block_pool *pool);

/* A block of at least `bytes` bytes (> 0), not zeroed. NULL: no memory, or the limit. */
BT_MUST_CHECK bt_block *bt_block_acquire(bt_block_pool *pool, size_t bytes);
/* One hold more. */
static inline void bt_block_hold(bt_block *block) {
    (void)atomic_fetch_add_explicit(&block->holds, 1, memory_order_relaxed);
}
/* NULL is fine. */
void bt_block_release(bt_block *block);
/* Others have it too. */
static inline bool bt_block_is_shared(const bt_block *block) {
    return atomic_load_explicit(&block->holds, memory_order_acquire) > 1;
}

/* Gives back to the system what lay idle ever since the last trim. For a timer. */
void bt_block_pool_trim(bt_block_pool *pool);
/* A moment's values; exact when no other thread releases. */
size_t bt_block_pool_idle_bytes(const bt_block_pool *pool);
size_t bt_block_pool_used_bytes(const bt_block_pool *pool);

#endif
