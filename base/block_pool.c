/* A list of idle blocks for each size, which only the owner touches, and one list of blocks that
 * came back, to which any thread adds and from which the owner takes everything at once: so nothing
 * is ever taken out of the middle of a list that others change, and no lock is needed.
 *
 * The pool itself is counted: one for its owner, one for each block that is out. */
#include "base/block_pool.h"

#include "base/assert.h"
#include "base/mem.h"

enum {
    STEPS = 8, /* sizes between two powers of two */
    DOUBLINGS = 18,
    CLASSES = STEPS * DOUBLINGS, /* up to 1 KiB << 18 */
    CLASS_NONE = CLASSES,        /* larger blocks are not kept */
};

struct bt_block_pool {
    size_t bytes_max;
    _Atomic size_t idle_bytes_max; /* 0 once the pool is destroyed */
    _Atomic size_t used_bytes, idle_bytes;
    _Atomic(bt_block *) returned;
    _Atomic size_t refs;
    bt_block *idle[CLASSES];
    uint32_t idle_count[CLASSES];
    uint32_t idle_low[CLASSES]; /* the least since the last trim */
};

static size_t class_bytes(uint32_t size_class) {
    const size_t base = (size_t)BT_BLOCK_BYTES_MIN << (size_class / STEPS);
    return base + base / STEPS * (size_class % STEPS);
}

/* The smallest class that holds `bytes`. */
static uint32_t class_of(size_t bytes) {
    if (bytes <= BT_BLOCK_BYTES_MIN) return 0;
    /* The highest bit of bytes - 1 says the doubling, the three below it the step. */
    const uint32_t bit = 63u - (uint32_t)__builtin_clzll(bytes - 1);
    const uint32_t doubling = bit - 10;
    const uint32_t step = (uint32_t)((bytes - 1) >> (bit - 3)) & (STEPS - 1);
    const uint32_t size_class = doubling * STEPS + step + 1;
    return size_class < CLASSES ? size_class : CLASS_NONE;
}

_Static_assert(BT_BLOCK_BYTES_MIN == 1 << 10 && STEPS == 8, "class_of counts bits");

bt_status bt_block_pool_create(const bt_block_pool_options *options, bt_block_pool **out) {
    bt_block_pool *pool = bt_calloc(1, sizeof *pool);
    if (pool == NULL) return BT_ERR_WORKER_MEMORY;
    pool->bytes_max = options->bytes_max;
    atomic_init(&pool->idle_bytes_max, options->idle_bytes_max);
    atomic_init(&pool->refs, 1);
    *out = pool;
    return BT_OK;
}

/* ---- coming back ----------------------------------------------------------------------------- */

static bt_block *take_returned(bt_block_pool *pool) {
    return atomic_exchange_explicit(&pool->returned, NULL, memory_order_acquire);
}

static void free_list(bt_block *block) {
    while (block != NULL) {
        bt_block *next = block->next;
        bt_free(block);
        block = next;
    }
}

/* Whoever is last finds everything that came back: each block was added before its reference went.
 */
static void unref(bt_block_pool *pool) {
    if (atomic_fetch_sub_explicit(&pool->refs, 1, memory_order_acq_rel) > 1) return;
    free_list(take_returned(pool));
    bt_free(pool);
}

static void give_back(bt_block *block) {
    bt_block_pool *pool = block->pool;
    (void)atomic_fetch_sub_explicit(&pool->used_bytes, block->capacity, memory_order_relaxed);
    const size_t idle =
        atomic_fetch_add_explicit(&pool->idle_bytes, block->capacity, memory_order_relaxed);
    const size_t most = atomic_load_explicit(&pool->idle_bytes_max, memory_order_relaxed);
    if (block->size_class == CLASS_NONE || idle + block->capacity > most) {
        (void)atomic_fetch_sub_explicit(&pool->idle_bytes, block->capacity, memory_order_relaxed);
        bt_free(block);
    } else {
        block->next = atomic_load_explicit(&pool->returned, memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(&pool->returned, &block->next, block,
                                                      memory_order_release, memory_order_relaxed)) {
        }
    }
    unref(pool);
}

void bt_block_release(bt_block *block) {
    if (block == NULL) return;
    const uint32_t holds = atomic_fetch_sub_explicit(&block->holds, 1, memory_order_acq_rel);
    BT_ASSERT(holds > 0);
    if (holds == 1) give_back(block);
}

/* Those that came back to the lists of their sizes; the last to come will be the first to go. */
static void sort_returned(bt_block_pool *pool) {
    bt_block *block = take_returned(pool);
    bt_block *oldest_first = NULL;
    while (block != NULL) {
        bt_block *next = block->next;
        block->next = oldest_first;
        oldest_first = block;
        block = next;
    }
    while (oldest_first != NULL) {
        block = oldest_first;
        oldest_first = block->next;
        block->next = pool->idle[block->size_class];
        pool->idle[block->size_class] = block;
        pool->idle_count[block->size_class]++;
    }
}

void bt_block_pool_destroy(bt_block_pool *pool) {
    if (pool == NULL) return;
    /* What comes back from here on is freed at once. */
    atomic_store_explicit(&pool->idle_bytes_max, 0, memory_order_relaxed);
    for (uint32_t i = 0; i < CLASSES; i++) {
        free_list(pool->idle[i]);
        pool->idle[i] = NULL;
    }
    unref(pool);
}

/* ---- going out ------------------------------------------------------------------------------- */

static bt_block *pop_idle(bt_block_pool *pool, uint32_t size_class) {
    if (pool->idle[size_class] == NULL) sort_returned(pool);
    bt_block *block = pool->idle[size_class];
    if (block == NULL) return NULL;
    pool->idle[size_class] = block->next;
    const uint32_t left = --pool->idle_count[size_class];
    if (left < pool->idle_low[size_class]) pool->idle_low[size_class] = left;
    (void)atomic_fetch_sub_explicit(&pool->idle_bytes, block->capacity, memory_order_relaxed);
    return block;
}

/* Frees `count` idle blocks of a size. */
static void drop_idle(bt_block_pool *pool, uint32_t size_class, uint32_t count) {
    for (; count > 0; count--) {
        bt_block *block = pop_idle(pool, size_class);
        BT_ASSERT(block != NULL);
        bt_free(block);
    }
}

static bool is_within(const bt_block_pool *pool, size_t bytes) {
    const size_t most = pool->bytes_max;
    return most == 0 ||
           (bytes <= most &&
            bt_block_pool_used_bytes(pool) + bt_block_pool_idle_bytes(pool) <= most - bytes);
}

/* A block of its own; when the limit stands in the way, idle ones of other sizes go for it. */
static bt_block *make(bt_block_pool *pool, uint32_t size_class, size_t capacity) {
    if (!is_within(pool, capacity)) {
        sort_returned(pool);
        for (uint32_t i = 0; i < CLASSES && !is_within(pool, capacity); i++)
            drop_idle(pool, i, pool->idle_count[i]);
    }
    size_t bytes = 0;
    if (!is_within(pool, capacity) || !bt_add_size(sizeof(bt_block), capacity, &bytes)) return NULL;
    bt_block *block = bt_malloc(bytes);
    if (block == NULL) return NULL;
    block->capacity = capacity;
    block->pool = pool;
    block->size_class = size_class;
    return block;
}

bt_block *bt_block_acquire(bt_block_pool *pool, size_t bytes) {
    BT_ASSERT(bytes > 0);
    const uint32_t size_class = class_of(bytes);
    bt_block *block = size_class == CLASS_NONE ? NULL : pop_idle(pool, size_class);
    if (block == NULL)
        block = make(pool, size_class, size_class == CLASS_NONE ? bytes : class_bytes(size_class));
    if (block == NULL) return NULL;
    block->next = NULL;
    block->used = 0;
    atomic_init(&block->holds, 1);
    (void)atomic_fetch_add_explicit(&pool->used_bytes, block->capacity, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&pool->refs, 1, memory_order_relaxed);
    return block;
}

/* ---- looking --------------------------------------------------------------------------------- */

void bt_block_pool_trim(bt_block_pool *pool) {
    sort_returned(pool);
    for (uint32_t i = 0; i < CLASSES; i++) {
        drop_idle(pool, i, pool->idle_low[i]);
        pool->idle_low[i] = pool->idle_count[i];
    }
}

size_t bt_block_pool_idle_bytes(const bt_block_pool *pool) {
    return atomic_load_explicit(&pool->idle_bytes, memory_order_relaxed);
}

size_t bt_block_pool_used_bytes(const bt_block_pool *pool) {
    return atomic_load_explicit(&pool->used_bytes, memory_order_relaxed);
}
