/* The name of a cached prefix: a chain over the pages of a prompt. The root stands for what the KV
 * of a token depends on besides the tokens before it (the weights' epoch) and for whom it may be
 * shared with (the cache salt); each page extends the name of the pages before it by its own
 * tokens. Two processes that compute it get the same 128 bits on any machine.
 *
 * It is a name, not a proof: whoever shares KV by it compares the tokens as well. It resists
 * chance, not an adversary who wants collisions, which therefore cost a hit and nothing else. */
#ifndef BT_PROTO_BLOCK_HASH_H
#define BT_PROTO_BLOCK_HASH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct block_hash {
    uint64_t low, high;
} block_hash;

/* weights_version of the cluster record, cache_salt of the generation. */
block_hash block_hash_root(uint64_t weights_version, const uint64_t cache_salt[2]);
/* The name of parent's prefix followed by tokens [count], one whole page. */
block_hash block_hash_extend(block_hash parent, const int32_t *tokens, uint32_t count);

static inline bool block_hash_equal(block_hash a, block_hash b) {
    return a.low == b.low && a.high == b.high;
}

#endif
