/* The page pool: all or none, one owner per page, quarantine, and counts that always add up. */
#include "pd_buffers/kv_pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { PAGES = 16, PAGE_BYTES = 256, LAYERS = 2 };

static kv_pool *make_pool(void) {
    const kv_pool_options options = {
        .page_count = PAGES, .page_bytes = PAGE_BYTES, .layers = LAYERS};
    kv_pool *pool = NULL;
    assert_int_equal(kv_pool_create(&options, &pool), BT_OK);
    return pool;
}

static void assert_counts(const kv_pool *pool, uint32_t free_pages, uint32_t owned,
                          uint32_t quarantined) {
    const kv_pool_counts counts = kv_pool_count(pool);
    assert_int_equal(counts.total, PAGES);
    assert_int_equal(counts.free, free_pages);
    assert_int_equal(counts.owned, owned);
    assert_int_equal(counts.quarantined, quarantined);
    assert_true(kv_pool_check(pool));
}

static void wrong_options_are_refused(void **state) {
    (void)state;
    static const kv_pool_options wrong[] = {
        {.page_count = 0, .page_bytes = 64, .layers = 1},
        {.page_count = 4, .page_bytes = 0, .layers = 1},
        {.page_count = 4, .page_bytes = 64, .layers = 0},
        {.page_count = 4, .page_bytes = 64, .layers = 3},
        {.page_count = UINT32_MAX, .page_bytes = SIZE_MAX / 2 + 1, .layers = 1},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        kv_pool *pool = NULL;
        assert_int_equal(kv_pool_create(&wrong[i], &pool), BT_ERR_CALLER_ARGUMENT);
        assert_null(pool);
    }
    kv_pool_destroy(NULL);
}

static void memory_is_one_zeroed_block(void **state) {
    (void)state;
    kv_pool *pool = make_pool();
    const uint8_t *memory = kv_pool_memory(pool);
    assert_int_equal(kv_pool_memory_bytes(pool), PAGES * PAGE_BYTES);
    for (size_t i = 0; i < kv_pool_memory_bytes(pool); i++)
        assert_int_equal(memory[i], 0);
    for (uint32_t page = 0; page < PAGES; page++)
        assert_ptr_equal(kv_pool_page(pool, page), memory + page * PAGE_BYTES);
    assert_int_equal(kv_pool_get_options(pool)->layers, LAYERS);
    kv_pool_destroy(pool);
}

static void acquire_gives_all_or_none(void **state) {
    (void)state;
    uint32_t a[PAGES];
    uint32_t b[PAGES];
    kv_pool *pool = make_pool();
    assert_int_equal(kv_pool_acquire(pool, 7, 10, a), BT_OK);
    assert_counts(pool, 6, 10, 0);
    assert_int_equal(kv_pool_acquire(pool, 8, 7, b), BT_ERR_REQUEST_FULL);
    assert_int_equal(kv_pool_acquire(pool, 8, PAGES + 1, b), BT_ERR_REQUEST_TOO_LARGE);
    assert_counts(pool, 6, 10, 0);
    assert_int_equal(kv_pool_acquire(pool, 8, 6, b), BT_OK);
    assert_int_equal(kv_pool_acquire(pool, 9, 0, b + 6), BT_OK);
    assert_counts(pool, 0, 16, 0);
    bool is_seen[PAGES] = {false};
    for (uint32_t i = 0; i < PAGES; i++) {
        const uint32_t page = i < 10 ? a[i] : b[i - 10];
        assert_false(is_seen[page]);
        is_seen[page] = true;
        assert_true(kv_pool_owner(pool, page) == (i < 10 ? 7 : 8));
        assert_int_equal(kv_pool_state(pool, page), KV_PAGE_OWNED);
    }
    kv_pool_release(pool, 7, a, 10);
    kv_pool_release(pool, 8, b, 6);
    assert_counts(pool, PAGES, 0, 0);
    kv_pool_destroy(pool);
}

static void quarantined_pages_are_not_given_out(void **state) {
    (void)state;
    uint32_t a[PAGES];
    uint32_t b[PAGES];
    kv_pool *pool = make_pool();
    assert_int_equal(kv_pool_acquire(pool, 7, 10, a), BT_OK);
    kv_pool_quarantine(pool, 7, a, 4);
    kv_pool_quarantine(pool, 7, a + 2, 4); /* twice is once */
    assert_counts(pool, 6, 4, 6);
    assert_int_equal(kv_pool_state(pool, a[0]), KV_PAGE_QUARANTINED);
    assert_true(kv_pool_owner(pool, a[0]) == 7);
    assert_int_equal(kv_pool_acquire(pool, 8, 7, b), BT_ERR_REQUEST_FULL);
    kv_pool_release(pool, 7, a, 10);
    assert_counts(pool, PAGES, 0, 0);
    assert_int_equal(kv_pool_state(pool, a[0]), KV_PAGE_FREE);
    assert_true(kv_pool_owner(pool, a[0]) == 0);
    kv_pool_destroy(pool);
}

/* A prompt whose pages come and go leaves neighbours together for the next. */
static void order_is_kept_over_a_release(void **state) {
    (void)state;
    uint32_t a[PAGES];
    uint32_t b[PAGES];
    kv_pool *pool = make_pool();
    assert_int_equal(kv_pool_acquire(pool, 7, 8, a), BT_OK);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(a[i], i);
    kv_pool_release(pool, 7, a, 8);
    assert_int_equal(kv_pool_acquire(pool, 8, 8, b), BT_OK);
    assert_memory_equal(a, b, 8 * sizeof *a);
    kv_pool_release(pool, 8, b, 8);
    kv_pool_destroy(pool);
}

static void shared_pages_are_free_when_the_last_holder_lets_go(void **state) {
    (void)state;
    uint32_t a[PAGES];
    uint32_t b[PAGES];
    kv_pool *pool = make_pool();
    assert_int_equal(kv_pool_acquire(pool, 7, 6, a), BT_OK);
    kv_pool_share(pool, 7, a, 4);
    assert_counts(pool, 10, 2, 0);
    assert_int_equal(kv_pool_count(pool).shared, 4);
    assert_int_equal(kv_pool_count(pool).holds, 4);
    assert_int_equal(kv_pool_state(pool, a[0]), KV_PAGE_SHARED);
    assert_true(kv_pool_owner(pool, a[0]) == 0);
    kv_pool_hold(pool, a, 2);
    assert_int_equal(kv_pool_holders(pool, a[0]), 2);
    assert_int_equal(kv_pool_holders(pool, a[3]), 1);
    assert_int_equal(kv_pool_holders(pool, a[5]), 0);
    assert_true(kv_pool_check(pool));
    kv_pool_drop(pool, a, 4);
    assert_counts(pool, 12, 2, 0);
    assert_int_equal(kv_pool_count(pool).shared, 2);
    assert_int_equal(kv_pool_acquire(pool, 8, 13, b), BT_ERR_REQUEST_FULL);
    kv_pool_drop(pool, a, 2);
    kv_pool_release(pool, 7, a + 4, 2);
    assert_counts(pool, PAGES, 0, 0);
    assert_int_equal(kv_pool_count(pool).holds, 0);
    kv_pool_destroy(pool);
}

/* Random operations against a plain model of who owns what. */
static void random_operations_keep_the_counts(void **state) {
    (void)state;
    enum { OWNERS = 5 };
    uint32_t pages[OWNERS][PAGES];
    uint32_t held[OWNERS] = {0};
    bool is_quarantined[OWNERS] = {false};
    uint64_t random = 42;
    kv_pool *pool = make_pool();
    for (int step = 0; step < 20000; step++) {
        random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
        const uint32_t owner = (uint32_t)(random >> 33) % OWNERS;
        const uint32_t count = (uint32_t)(random >> 40) % 6;
        if (held[owner] == 0) {
            const kv_pool_counts counts = kv_pool_count(pool);
            const bt_status status = kv_pool_acquire(pool, owner + 1, count, pages[owner]);
            assert_int_equal(status, count <= counts.free ? BT_OK : BT_ERR_REQUEST_FULL);
            if (status == BT_OK) held[owner] = count;
        } else if (!is_quarantined[owner] && count < 3) {
            kv_pool_quarantine(pool, owner + 1, pages[owner], held[owner]);
            is_quarantined[owner] = true;
        } else {
            kv_pool_release(pool, owner + 1, pages[owner], held[owner]);
            held[owner] = 0;
            is_quarantined[owner] = false;
        }
        uint32_t owned = 0;
        uint32_t quarantined = 0;
        for (uint32_t i = 0; i < OWNERS; i++) {
            owned += is_quarantined[i] ? 0 : held[i];
            quarantined += is_quarantined[i] ? held[i] : 0;
            for (uint32_t p = 0; p < held[i]; p++)
                assert_true(kv_pool_owner(pool, pages[i][p]) == i + 1);
        }
        assert_counts(pool, PAGES - owned - quarantined, owned, quarantined);
    }
    kv_pool_destroy(pool);
}

static size_t resident_bytes(void) {
    size_t total = 0, resident = 0;
    FILE *stream = fopen("/proc/self/statm", "r");
    assert_non_null(stream);
    assert_int_equal(fscanf(stream, "%zu %zu", &total, &resident), 2);
    (void)fclose(stream);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

static void unused_pages_cost_no_memory(void **state) {
    (void)state;
    const kv_pool_options options = {.page_count = 256, .page_bytes = 1u << 20, .layers = 4};
    kv_pool *pool = NULL;
    const size_t before = resident_bytes();
    assert_int_equal(kv_pool_create(&options, &pool), BT_OK);
    const size_t created = resident_bytes();
    assert_true(created < before + (16u << 20));
    memset(kv_pool_page(pool, 7), 1, 1u << 20);
    assert_true(resident_bytes() < created + (16u << 20));
    kv_pool_destroy(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(memory_is_one_zeroed_block),
        cmocka_unit_test(acquire_gives_all_or_none),
        cmocka_unit_test(quarantined_pages_are_not_given_out),
        cmocka_unit_test(order_is_kept_over_a_release),
        cmocka_unit_test(shared_pages_are_free_when_the_last_holder_lets_go),
        cmocka_unit_test(random_operations_keep_the_counts),
        cmocka_unit_test(unused_pages_cost_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
