/* The prefix cache by itself: what is found, who is evicted, what names that collide cost. Long
 * random sequences go through the fuzz target's model. */
#include "prefill/prefix_cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "tests/fuzz/fuzz.h"

enum { PAGES = 8, PAGE_TOKENS = 4, DEPTH = 4, OWNER = 77 };

typedef struct fixture {
    kv_pool *pool;
    prefix_cache *cache;
} fixture;

static fixture f;

static int set_up(void **state) {
    (void)state;
    const kv_pool_options options = {.page_count = PAGES, .page_bytes = 64, .layers = 1};
    if (kv_pool_create(&options, &f.pool) != BT_OK) return -1;
    return prefix_cache_create(f.pool, PAGE_TOKENS, &f.cache) == BT_OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    prefix_cache_destroy(f.cache);
    const bool is_whole = kv_pool_count(f.pool).free == PAGES && kv_pool_check(f.pool);
    kv_pool_destroy(f.pool);
    return is_whole ? 0 : -1;
}

/* A prompt of DEPTH pages; page i is all `letters[i]`. */
typedef struct prompt {
    int32_t tokens[DEPTH * PAGE_TOKENS];
    block_hash hashes[DEPTH];
    prefix_chain chain;
    uint32_t pages[DEPTH];
    uint32_t count;
} prompt;

static void make(prompt *p, const char *letters, uint64_t salt) {
    const uint64_t salts[2] = {salt, 0};
    block_hash hash = block_hash_root(0, salts);
    memset(p, 0, sizeof *p);
    p->count = (uint32_t)strlen(letters);
    for (uint32_t i = 0; i < p->count; i++) {
        for (uint32_t t = 0; t < PAGE_TOKENS; t++)
            p->tokens[i * PAGE_TOKENS + t] = letters[i];
        hash = block_hash_extend(hash, p->tokens + (size_t)i * PAGE_TOKENS, PAGE_TOKENS);
        p->hashes[i] = hash;
    }
    p->chain = (prefix_chain){.tokens = p->tokens, .hashes = p->hashes, .salt = {salt, 0}};
}

/* Finds, computes the rest and holds all of it; returns the hits. */
static uint32_t use(prompt *p) {
    const uint32_t hits = prefix_cache_find(f.cache, &p->chain, p->count, p->pages);
    prefix_cache_hold(f.cache, p->pages, hits);
    const uint32_t need = p->count - hits;
    const uint32_t free = kv_pool_count(f.pool).free;
    if (free < need) prefix_cache_evict(f.cache, need - free);
    assert_int_equal(kv_pool_acquire(f.pool, OWNER, need, p->pages + hits), BT_OK);
    for (uint32_t i = hits; i < p->count; i++)
        assert_true(prefix_cache_put(f.cache, &p->chain, i, OWNER, p->pages));
    assert_true(prefix_cache_check(f.cache));
    return hits;
}

static void leave(prompt *p) {
    prefix_cache_drop(f.cache, p->pages, p->count);
    assert_true(prefix_cache_check(f.cache));
}

static uint32_t find(const char *letters, uint64_t salt) {
    prompt p;
    make(&p, letters, salt);
    return prefix_cache_find(f.cache, &p.chain, p.count, p.pages);
}

static void what_was_computed_is_found_as_far_as_it_is_the_same(void **state) {
    (void)state;
    prompt abc;
    make(&abc, "abc", 0);
    assert_int_equal(use(&abc), 0);
    assert_int_equal(find("abc", 0), 3);
    assert_int_equal(find("abcd", 0), 3);
    assert_int_equal(find("ab", 0), 2);
    assert_int_equal(find("abx", 0), 2);
    assert_int_equal(find("axc", 0), 1);
    assert_int_equal(find("bc", 0), 0); /* the same tokens elsewhere are another prefix */
    assert_int_equal(find("abc", 1), 0);
    prompt other;
    make(&other, "abd", 0);
    assert_int_equal(use(&other), 2);
    assert_int_equal(other.pages[1], abc.pages[1]);
    assert_int_equal(kv_pool_holders(f.pool, abc.pages[1]), 3);
    assert_int_equal(kv_pool_holders(f.pool, abc.pages[2]), 2);
    leave(&abc);
    leave(&other);
    assert_int_equal(prefix_cache_count(f.cache).idle, 4);
    assert_int_equal(prefix_cache_count(f.cache).entries, 4);
}

static void computed_twice_is_kept_once(void **state) {
    (void)state;
    prompt first, second;
    make(&first, "ab", 0);
    make(&second, "abc", 0);
    /* Both begin before either is done. */
    assert_int_equal(kv_pool_acquire(f.pool, OWNER, 2, first.pages), BT_OK);
    assert_int_equal(kv_pool_acquire(f.pool, OWNER, 3, second.pages), BT_OK);
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(prefix_cache_put(f.cache, &first.chain, i, OWNER, first.pages));
        const uint32_t own = second.pages[i];
        assert_true(prefix_cache_put(f.cache, &second.chain, i, OWNER, second.pages));
        assert_int_equal(second.pages[i], first.pages[i]);
        assert_int_equal(kv_pool_state(f.pool, own), KV_PAGE_FREE);
    }
    assert_true(prefix_cache_put(f.cache, &second.chain, 2, OWNER, second.pages));
    assert_int_equal(prefix_cache_count(f.cache).entries, 3);
    assert_int_equal(prefix_cache_count(f.cache).inserted, 3);
    leave(&first);
    leave(&second);
}

static void the_least_recently_used_leaf_goes_first(void **state) {
    (void)state;
    prompt ab, ac, d;
    make(&ab, "ab", 0);
    make(&ac, "acc", 0);
    make(&d, "d", 0);
    (void)use(&ab);
    (void)use(&ac);
    (void)use(&d);
    leave(&ac);
    leave(&d);
    leave(&ab); /* and with it "a", the root of "acc" */
    prefix_cache_evict(f.cache, 1);
    assert_int_equal(find("acc", 0), 2);
    prefix_cache_evict(f.cache, 1);
    assert_int_equal(find("acc", 0), 1);
    prefix_cache_evict(f.cache, 1);
    assert_int_equal(find("d", 0), 0);
    assert_int_equal(find("ab", 0), 2);
    prefix_cache_evict(f.cache, 1);
    assert_int_equal(find("ab", 0), 1);
    prefix_cache_evict(f.cache, 1);
    assert_int_equal(prefix_cache_count(f.cache).entries, 0);
    assert_int_equal(kv_pool_count(f.pool).free, PAGES);
    assert_int_equal(prefix_cache_count(f.cache).evicted, 5);
}

static void what_is_held_is_not_evicted(void **state) {
    (void)state;
    prompt old, young, large;
    make(&old, "abc", 0);
    make(&young, "xyz", 0);
    (void)use(&old);
    (void)use(&young);
    leave(&young);
    assert_int_equal(prefix_cache_count(f.cache).idle, 3);
    make(&large, "pqrs", 0); /* 4 of 2 free and 3 idle ones */
    assert_int_equal(use(&large), 0);
    assert_int_equal(find("abc", 0), 3);
    assert_int_equal(find("xyz", 0), 1);
    leave(&old);
    leave(&large);
}

static void a_use_makes_it_young_again(void **state) {
    (void)state;
    prompt a, b;
    make(&a, "aa", 0);
    make(&b, "bb", 0);
    (void)use(&a);
    (void)use(&b);
    leave(&a);
    leave(&b);
    assert_int_equal(use(&a), 2);
    leave(&a);
    prefix_cache_evict(f.cache, 2);
    assert_int_equal(find("aa", 0), 2);
    assert_int_equal(find("bb", 0), 0);
    assert_int_equal(prefix_cache_count(f.cache).hit_pages, 2);
}

/* A name that another prefix has is no hit, at any place, and its pages stay out. */
static void names_that_collide_give_no_wrong_page(void **state) {
    (void)state;
    prompt ab, xb, salted;
    make(&ab, "ab", 0);
    make(&xb, "xb", 0);
    memcpy(xb.hashes, ab.hashes, sizeof xb.hashes);
    (void)use(&ab);
    assert_int_equal(prefix_cache_find(f.cache, &xb.chain, 2, xb.pages), 0);
    assert_int_equal(kv_pool_acquire(f.pool, OWNER, 1, xb.pages), BT_OK);
    assert_false(prefix_cache_put(f.cache, &xb.chain, 0, OWNER, xb.pages));
    assert_int_equal(kv_pool_owner(f.pool, xb.pages[0]), OWNER);
    kv_pool_release(f.pool, OWNER, xb.pages, 1);
    /* The same tokens behind others. */
    make(&xb, "xb", 0);
    xb.hashes[1] = ab.hashes[1];
    assert_int_equal(kv_pool_acquire(f.pool, OWNER, 2, xb.pages), BT_OK);
    assert_true(prefix_cache_put(f.cache, &xb.chain, 0, OWNER, xb.pages));
    assert_int_equal(prefix_cache_find(f.cache, &xb.chain, 2, xb.pages), 1);
    prefix_cache_drop(f.cache, xb.pages, 1);
    /* The same tokens of somebody else. */
    make(&salted, "ab", 3);
    memcpy(salted.hashes, ab.hashes, sizeof salted.hashes);
    for (int half = 0; half < 2; half++) {
        salted.chain.salt[half] = 3;
        salted.chain.salt[1 - half] = 0;
        assert_int_equal(prefix_cache_find(f.cache, &salted.chain, 2, salted.pages), 0);
    }
    kv_pool_release(f.pool, OWNER, xb.pages + 1, 1);
    assert_int_equal(prefix_cache_count(f.cache).collisions, 1);
    leave(&ab);
}

static void what_is_forgotten_is_found_no_more(void **state) {
    (void)state;
    prompt abcd, abx;
    make(&abcd, "abcd", 0);
    make(&abx, "abx", 0);
    (void)use(&abcd);
    (void)use(&abx);
    prefix_cache_forget(f.cache, abcd.pages, 3, 4);
    assert_int_equal(find("abcd", 0), 3);
    prefix_cache_forget(f.cache, abcd.pages, 0, 4); /* "ab" is in use by another */
    assert_int_equal(find("abcd", 0), 2);
    assert_int_equal(find("abx", 0), 3);
    assert_int_equal(kv_pool_holders(f.pool, abcd.pages[3]), 1);
    leave(&abx);
    prefix_cache_forget(f.cache, abcd.pages, 0, 4); /* "x" is behind it */
    assert_int_equal(find("abx", 0), 3);
    leave(&abcd);
    assert_int_equal(kv_pool_count(f.pool).free, PAGES - 3);
    prefix_cache_clear(f.cache);
    assert_int_equal(find("abx", 0), 0);
    assert_int_equal(kv_pool_count(f.pool).free, PAGES);
}

/* What is held when the cache is cleared stays its holder's. */
static void clearing_takes_no_page_from_anybody(void **state) {
    (void)state;
    prompt ab;
    make(&ab, "ab", 0);
    (void)use(&ab);
    prefix_cache_clear(f.cache);
    assert_int_equal(find("ab", 0), 0);
    assert_int_equal(kv_pool_state(f.pool, ab.pages[0]), KV_PAGE_SHARED);
    leave(&ab);
    assert_int_equal(kv_pool_count(f.pool).free, PAGES);
}

static void random_sequences(void **state) {
    (void)state;
    enum { RUNS = 400, BYTES = 1000 };
    static uint8_t bytes[BYTES];
    uint64_t random = 1;
    for (int run = 0; run < RUNS; run++) {
        for (int i = 0; i < BYTES; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            bytes[i] = (uint8_t)(random >> 56);
        }
        bytes[0] = (uint8_t)run; /* every other one with hashes of two bits */
        assert_int_equal(LLVMFuzzerTestOneInput(bytes, BYTES), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_was_computed_is_found_as_far_as_it_is_the_same, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(computed_twice_is_kept_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_least_recently_used_leaf_goes_first, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_held_is_not_evicted, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_use_makes_it_young_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(names_that_collide_give_no_wrong_page, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_forgotten_is_found_no_more, set_up, tear_down),
        cmocka_unit_test_setup_teardown(clearing_takes_no_page_from_anybody, set_up, tear_down),
        cmocka_unit_test(random_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
