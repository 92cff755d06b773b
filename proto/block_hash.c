/* Two lanes of 64 bits, each a chain of bijections over the words of the page (two tokens to a
 * word), with different multipliers, so that what collides in one does not in the other. */
#include "proto/block_hash.h"

#include <stddef.h>

/* splitmix64's finaliser: a bijection in which every bit of the input reaches every bit. */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Fewer bits of mixing, other constants: murmur3's finaliser. */
static uint64_t stir(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
    return x ^ (x >> 33);
}

static block_hash add_word(block_hash h, uint64_t word) {
    h.low = mix(h.low + 0x9E3779B97F4A7C15u + word);
    h.high = stir((h.high ^ word) + 0xD1B54A32D192ED03u);
    return h;
}

block_hash block_hash_root(uint64_t weights_version, const uint64_t cache_salt[2]) {
    block_hash h = {.low = 0x6261746F6E206B76u, .high = 0x70726566697820ABu};
    h = add_word(h, weights_version);
    h = add_word(h, cache_salt[0]);
    return add_word(h, cache_salt[1]);
}

block_hash block_hash_extend(block_hash parent, const int32_t *tokens, uint32_t count) {
    block_hash h = add_word(parent, count);
    for (uint32_t i = 0; i + 1 < count; i += 2)
        h = add_word(h, (uint64_t)(uint32_t)tokens[i + 1] << 32 | (uint32_t)tokens[i]);
    if (count % 2 != 0) h = add_word(h, (uint32_t)tokens[count - 1]);
    /* The lanes meet once per page. */
    return (block_hash){.low = h.low ^ stir(h.high), .high = h.high ^ mix(h.low)};
}
