/* A byte budget shared by threads: bodies being read, replies held, spill files. */
#ifndef BT_ROUTER_BUDGET_H
#define BT_ROUTER_BUDGET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/assert.h"

typedef struct budget {
    _Atomic uint64_t used;
    uint64_t bytes_max;
} budget;

static inline void budget_init(budget *b, uint64_t bytes_max) {
    atomic_init(&b->used, 0);
    b->bytes_max = bytes_max;
}

static inline uint64_t budget_used(const budget *b) {
    return atomic_load_explicit(&b->used, memory_order_relaxed);
}

/* Charges bytes whatever the limit says; false = the limit is passed now. */
static inline bool budget_charge(budget *b, uint64_t bytes) {
    return atomic_fetch_add_explicit(&b->used, bytes, memory_order_relaxed) + bytes <= b->bytes_max;
}

static inline void budget_give(budget *b, uint64_t bytes) {
    uint64_t before = atomic_fetch_sub_explicit(&b->used, bytes, memory_order_relaxed);
    BT_ASSERT(before >= bytes);
}

/* Charges bytes if they fit. */
static inline bool budget_take(budget *b, uint64_t bytes) {
    if (budget_charge(b, bytes)) return true;
    budget_give(b, bytes);
    return false;
}

#endif
