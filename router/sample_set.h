/* A set of small numbers, the samples of one call that have something to do: rows of one sample
 * must not cost a look at all the others, of which a batch has thousands. */
#ifndef BT_ROUTER_SAMPLE_SET_H
#define BT_ROUTER_SAMPLE_SET_H

#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

#define SAMPLE_SET_NONE UINT32_MAX

typedef struct sample_set {
    uint64_t *words; /* [word_count] */
    uint32_t word_count;
} sample_set;

/* For numbers below `count`. WORKER_MEMORY. */
BT_MUST_CHECK static inline bt_status sample_set_init(sample_set *set, uint32_t count) {
    set->word_count = count / 64 + 1;
    set->words = bt_calloc(set->word_count, sizeof(*set->words));
    return set->words != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
}

static inline void sample_set_fini(sample_set *set) {
    bt_free(set->words);
    *set = (sample_set){0};
}

static inline void sample_set_add(sample_set *set, uint32_t number) {
    set->words[number / 64] |= 1ull << number % 64;
}

static inline void sample_set_remove(sample_set *set, uint32_t number) {
    set->words[number / 64] &= ~(1ull << number % 64);
}

/* The lowest one at or behind `from`, or SAMPLE_SET_NONE. */
static inline uint32_t sample_set_from(const sample_set *set, uint32_t from) {
    uint64_t mask = ~0ull << from % 64;
    for (uint32_t word = from / 64; word < set->word_count; word++) {
        const uint64_t found = set->words[word] & mask;
        if (found != 0) return word * 64 + (uint32_t)__builtin_ctzll(found);
        mask = ~0ull;
    }
    return SAMPLE_SET_NONE;
}

/* The next one behind `after`, in a circle. */
static inline uint32_t sample_set_next(const sample_set *set, uint32_t after) {
    const uint32_t found = sample_set_from(set, after + 1);
    return found != SAMPLE_SET_NONE ? found : sample_set_from(set, 0);
}

#endif
