/* Blocks come in sizes that fit, are used again, and stay valid for whoever holds them: on other
 * threads, and after their pool is gone. Bounds hold. */
#include "base/block_pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <poll.h>
#include <pthread.h>

#include "base/ring.h"

static bt_block_pool *make(size_t bytes_max, size_t idle_bytes_max) {
    const bt_block_pool_options options = {.bytes_max = bytes_max,
                                           .idle_bytes_max = idle_bytes_max};
    bt_block_pool *pool = NULL;
    assert_int_equal(bt_block_pool_create(&options, &pool), BT_OK);
    return pool;
}

static void blocks_are_as_large_as_asked_for_and_little_larger(void **state) {
    (void)state;
    bt_block_pool *pool = make(0, 0);
    for (size_t bytes = 1; bytes < ((size_t)64 << 20); bytes += 1 + bytes / 7) {
        bt_block *block = bt_block_acquire(pool, bytes);
        assert_non_null(block);
        assert_true(block->capacity >= bytes);
        assert_true(block->capacity <= bytes + bytes / 8 || block->capacity <= BT_BLOCK_BYTES_MIN);
        assert_int_equal((uintptr_t)block->bytes % 16, 0);
        assert_null(block->next);
        assert_int_equal(block->used, 0);
        block->bytes[0] = block->bytes[block->capacity - 1] = 1;
        assert_int_equal(bt_block_pool_used_bytes(pool), block->capacity);
        bt_block_release(block);
        assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    }
    /* The exact sizes of classes and their neighbours. */
    for (size_t base = BT_BLOCK_BYTES_MIN; base <= ((size_t)1 << 20); base *= 2) {
        for (size_t step = 8; step < 16; step++) {
            for (size_t bytes = base / 8 * step - 1; bytes <= base / 8 * step + 1; bytes++) {
                bt_block *block = bt_block_acquire(pool, bytes);
                assert_non_null(block);
                assert_true(block->capacity >= bytes);
                assert_true(block->capacity <= bytes + bytes / 8 + 1);
                bt_block_release(block);
            }
        }
    }
    bt_block_release(NULL);
    bt_block_pool_destroy(pool);
    bt_block_pool_destroy(NULL);
}

static void a_block_is_used_again(void **state) {
    (void)state;
    bt_block_pool *pool = make(0, 1 << 20);
    bt_block *first = bt_block_acquire(pool, 5000);
    bt_block *second = bt_block_acquire(pool, 5000);
    assert_ptr_not_equal(first, second);
    bt_block_release(second);
    bt_block_release(first);
    assert_true(bt_block_pool_idle_bytes(pool) > 0);
    /* The last to come back is the warmest. */
    assert_ptr_equal(bt_block_acquire(pool, 5100), first);
    assert_ptr_equal(bt_block_acquire(pool, 4900), second);
    assert_int_equal(bt_block_pool_idle_bytes(pool), 0);
    bt_block_release(first);
    bt_block_release(second);
    bt_block_pool_destroy(pool);
}

static void the_last_hold_counts(void **state) {
    (void)state;
    bt_block_pool *pool = make(0, 0);
    bt_block *block = bt_block_acquire(pool, 100);
    assert_false(bt_block_is_shared(block));
    bt_block_hold(block);
    assert_true(bt_block_is_shared(block));
    bt_block_release(block);
    assert_false(bt_block_is_shared(block));
    assert_true(bt_block_pool_used_bytes(pool) > 0);
    bt_block_release(block);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    bt_block_pool_destroy(pool);
}

static void bounds_hold(void **state) {
    (void)state;
    bt_block_pool *pool = make(16 * 1024, 4 * 1024);
    bt_block *blocks[16] = {NULL};
    uint32_t count = 0;
    while (count < 16 && (blocks[count] = bt_block_acquire(pool, 2048)) != NULL)
        count++;
    assert_int_equal(count, 8);
    assert_null(bt_block_acquire(pool, 1));
    while (count > 0)
        bt_block_release(blocks[--count]);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    assert_int_equal(bt_block_pool_idle_bytes(pool), 4 * 1024); /* no more is kept */
    /* What is kept of one size makes room for another. */
    bt_block *large = bt_block_acquire(pool, 14 * 1024);
    assert_non_null(large);
    assert_true(bt_block_pool_used_bytes(pool) + bt_block_pool_idle_bytes(pool) <= 16 * 1024);
    assert_null(bt_block_acquire(pool, SIZE_MAX));
    assert_null(bt_block_acquire(pool, 17 * 1024));
    bt_block_release(large);
    bt_block_pool_destroy(pool);
}

static void what_lies_idle_is_given_back(void **state) {
    (void)state;
    bt_block_pool *pool = make(0, 1 << 20);
    bt_block *blocks[8];
    for (uint32_t i = 0; i < 8; i++)
        blocks[i] = bt_block_acquire(pool, 1024);
    for (uint32_t i = 0; i < 8; i++)
        bt_block_release(blocks[i]);
    bt_block_pool_trim(pool); /* they were in use since the pool was made */
    assert_int_equal(bt_block_pool_idle_bytes(pool), 8 * 1024);
    for (uint32_t i = 0; i < 3; i++)
        blocks[i] = bt_block_acquire(pool, 1024);
    for (uint32_t i = 0; i < 3; i++)
        bt_block_release(blocks[i]);
    bt_block_pool_trim(pool); /* five lay there all the time */
    assert_int_equal(bt_block_pool_idle_bytes(pool), 3 * 1024);
    bt_block_pool_trim(pool);
    assert_int_equal(bt_block_pool_idle_bytes(pool), 0);
    bt_block_pool_destroy(pool);
}

static void blocks_outlive_their_pool(void **state) {
    (void)state;
    bt_block_pool *pool = make(0, 1 << 20);
    bt_block *blocks[4];
    for (uint32_t i = 0; i < 4; i++) {
        blocks[i] = bt_block_acquire(pool, 3000);
        memset(blocks[i]->bytes, (int)i, 3000);
    }
    bt_block_pool_destroy(pool);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(blocks[i]->bytes[2999], i);
        bt_block_release(blocks[i]);
    }
}

/* ---- threads --------------------------------------------------------------------------------- */

enum { BLOCKS = 20000 };

/* Looks at what is in each block and gives it back. */
static void *consume(void *context) {
    bt_ring *ring = context;
    uintptr_t bad = 0;
    for (uint32_t taken = 0; taken < BLOCKS;) {
        bt_block *block;
        (void)bt_ring_wait(ring, -1);
        while (bt_ring_pop(ring, &block)) {
            for (size_t i = 0; i < block->used; i += 61)
                bad += block->bytes[i] != (uint8_t)taken;
            bt_block_release(block);
            taken++;
        }
    }
    return (void *)bad;
}

static void another_thread_gives_back(void **state) {
    (void)state;
    bt_block_pool *pool = make(0, 256 * 1024);
    bt_ring *ring = NULL;
    pthread_t thread;
    void *bad = NULL;
    assert_int_equal(bt_ring_create(64, sizeof(bt_block *), &ring), BT_OK);
    assert_int_equal(pthread_create(&thread, NULL, consume, ring), 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        bt_block *block = bt_block_acquire(pool, 1 + i * 7919u % 9000);
        assert_non_null(block);
        block->used = block->capacity;
        memset(block->bytes, (int)i, block->used);
        while (!bt_ring_push(ring, &block))
            (void)poll(NULL, 0, 0);
        if (i % 1000 == 0) bt_block_pool_trim(pool);
        if (i == BLOCKS / 2) { /* the other half is of another pool */
            bt_block_pool_destroy(pool);
            pool = make(0, 256 * 1024);
        }
    }
    assert_int_equal(pthread_join(thread, &bad), 0);
    assert_int_equal((uintptr_t)bad, 0);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    assert_true(bt_block_pool_idle_bytes(pool) <= 256 * 1024);
    bt_block_pool_destroy(pool);
    bt_ring_destroy(ring);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_as_large_as_asked_for_and_little_larger),
        cmocka_unit_test(a_block_is_used_again),
        cmocka_unit_test(the_last_hold_counts),
        cmocka_unit_test(bounds_hold),
        cmocka_unit_test(what_lies_idle_is_given_back),
        cmocka_unit_test(blocks_outlive_their_pool),
        cmocka_unit_test(another_thread_gives_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
