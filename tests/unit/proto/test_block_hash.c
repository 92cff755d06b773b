/* Names of cached prefixes: the same on every machine (known answers), different for whatever makes
 * KV different or keeps requests apart, and chained. */
#include "proto/block_hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static const uint64_t no_salt[2] = {0, 0};

static void known_answers(void **state) {
    (void)state;
    const int32_t page[4] = {1, 2, 3, 4};
    const uint64_t salt[2] = {5, 6};
    const block_hash root = block_hash_root(0, no_salt);
    const block_hash salted = block_hash_root(9, salt);
    const block_hash one = block_hash_extend(root, page, 4);
    const block_hash two = block_hash_extend(one, page, 3);
    const block_hash expected[4] = {
        {0x7d7b4250dc15587b, 0xd8dee2a8915e975c},
        {0xc444d79ad40ad0d9, 0x860aed5fec58ab72},
        {0xbd1a5dd69b6398d5, 0x96131e27a879c300},
        {0x3704dfebd3173ba6, 0x08d0a6878022308c},
    };
    const block_hash got[4] = {root, salted, one, two};
    for (int i = 0; i < 4; i++) {
        assert_true(block_hash_equal(got[i], expected[i]));
    }
}

/* Every single change of what is hashed changes both halves. */
static void every_part_counts(void **state) {
    (void)state;
    enum { TOKENS = 17, CASES = 2 * TOKENS + 5 };
    block_hash seen[CASES];
    int count = 0;
    int32_t page[TOKENS] = {0};
    const uint64_t low[2] = {1, 0};
    const uint64_t high[2] = {0, 1};
    seen[count++] = block_hash_extend(block_hash_root(0, no_salt), page, TOKENS);
    seen[count++] = block_hash_extend(block_hash_root(1, no_salt), page, TOKENS);
    seen[count++] = block_hash_extend(block_hash_root(0, low), page, TOKENS);
    seen[count++] = block_hash_extend(block_hash_root(0, high), page, TOKENS);
    seen[count++] = block_hash_extend(block_hash_root(0, no_salt), page, TOKENS - 1);
    for (int i = 0; i < TOKENS; i++) {
        for (int32_t to = 1; to <= 2; to++) {
            page[i] = to;
            seen[count++] = block_hash_extend(block_hash_root(0, no_salt), page, TOKENS);
        }
        page[i] = 0;
    }
    assert_int_equal(count, CASES);
    for (int a = 0; a < CASES; a++) {
        for (int b = 0; b < a; b++) {
            assert_true(seen[a].low != seen[b].low);
            assert_true(seen[a].high != seen[b].high);
        }
    }
}

static int by_low(const void *a, const void *b) {
    const block_hash *x = a;
    const block_hash *y = b;
    return (x->low > y->low) - (x->low < y->low);
}

/* A million pages that differ in little: no two of the low halves alone collide (the chance is one
 * in 10^7). */
static void pages_that_differ_in_little_do_not_collide(void **state) {
    (void)state;
    enum { COUNT = 1 << 20 };
    block_hash *all = calloc(COUNT, sizeof *all);
    assert_non_null(all);
    const block_hash root = block_hash_root(0, no_salt);
    for (int32_t i = 0; i < COUNT; i++) {
        const int32_t page[4] = {i & 31, i >> 5 & 31, i >> 10 & 31, i >> 15};
        all[i] = block_hash_extend(root, page, 4);
    }
    qsort(all, COUNT, sizeof *all, by_low);
    for (int i = 1; i < COUNT; i++)
        assert_true(all[i].low != all[i - 1].low);
    free(all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(every_part_counts),
        cmocka_unit_test(pages_that_differ_in_little_do_not_collide),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
