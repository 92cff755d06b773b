/* Rows held for a reply: in memory, in the file, given up; always read back as they came. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "router/reply_store.h"

enum { RECORDS = 600, WORDS_MAX = 40000 };

static bt_block_pool *pool;

static reply_limits limits_of(uint64_t memory, uint64_t spill) {
    reply_limits limits = {.spill_path = "/tmp"};
    budget_init(&limits.memory, memory);
    budget_init(&limits.spill, spill);
    return limits;
}

static uint32_t next_random(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*random >> 33);
}

/* Record i: its length in bytes, then words that tell i; mostly short, some very long. */
static uint32_t words_of(uint32_t i) {
    uint64_t random = i * 2654435761u + 1;
    uint32_t kind = next_random(&random) % 100;
    uint32_t size = next_random(&random);
    return 1 + (kind == 0 ? size % WORDS_MAX : kind < 10 ? size % 4000 : size % 30);
}

static size_t make_record(uint32_t i, uint32_t *out) {
    uint32_t words = words_of(i);
    out[0] = words * 4;
    for (uint32_t k = 1; k < words; k++) {
        out[k] = i * 1000003u + k;
    }
    return words * 4;
}

static void expect_record(reply_store *store, reply_place *place, uint32_t i) {
    static uint32_t expected[WORDS_MAX + 1];
    const uint8_t *record;
    size_t bytes;
    size_t wanted = make_record(i, expected);
    assert_int_equal(reply_store_next(store, place, &record, &bytes), BT_OK);
    assert_int_equal(bytes, wanted);
    assert_int_equal((uintptr_t)record % 4, 0);
    assert_memory_equal(record, expected, bytes);
}

/* Every fifth record in the middle of a block with its neighbour, every seventh in one of its own,
 * which nobody but the store has afterwards. */
static void append(reply_store *store, uint32_t i) {
    static uint32_t record[WORDS_MAX + 1];
    static bt_block *shared;
    size_t bytes = make_record(i, record);
    bt_block *block = NULL;
    size_t at = 0;
    if (i % 5 == 1 && shared != NULL && shared->capacity - shared->used >= bytes) {
        block = shared; /* right behind the one before */
        at = shared->used;
        bt_block_hold(block);
    } else if (i % 5 == 0 || i % 7 == 0) {
        block = bt_block_acquire(pool, 2 * bytes + 8);
        assert_non_null(block);
        at = 4;
    }
    const uint8_t *from = (const uint8_t *)record;
    if (block != NULL) from = memcpy(block->bytes + at, record, bytes);
    assert_int_equal(reply_store_append(store, from, bytes, block), BT_OK);
    bt_block_release(shared);
    shared = i % 5 == 0 && i < RECORDS ? block : NULL;
    if (shared != NULL) {
        shared->used = at + bytes;
    } else {
        bt_block_release(block);
    }
}

/* Readers at places of their own, while records are added and, behind the slowest, given up. */
static void run(uint64_t memory, uint64_t seed, bool drops) {
    reply_limits limits = limits_of(memory, 1 << 30);
    reply_spill spill;
    reply_store store;
    uint64_t random = seed;
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    reply_place slow = reply_store_begin(&store);
    uint32_t slow_at = 0;
    for (uint32_t i = 0; i < RECORDS; i++) {
        append(&store, i);
        if (next_random(&random) % 4 != 0) continue;
        uint32_t steps = next_random(&random) % (i + 2 - slow_at);
        for (uint32_t k = 0; k < steps; k++) {
            expect_record(&store, &slow, slow_at++);
        }
        if (drops) reply_store_drop_before(&store, &slow);
        /* A second reader starts where the first one is and reads to the end, twice. */
        for (int twice = 0; twice < 2; twice++) {
            reply_place place = slow;
            for (uint32_t k = slow_at; k <= i; k++) {
                expect_record(&store, &place, k);
            }
        }
        assert_true(budget_used(&limits.memory) <= memory);
    }
    /* From the end only what comes later is read. */
    reply_place end = reply_store_end(&store);
    append(&store, RECORDS);
    expect_record(&store, &end, RECORDS);
    if (!drops) {
        reply_place place = reply_store_begin(&store);
        for (uint32_t k = 0; k <= RECORDS; k++) {
            expect_record(&store, &place, k);
        }
    }
    reply_store_fini(&store);
    reply_spill_fini(&spill);
    assert_int_equal(budget_used(&limits.memory), 0);
    assert_int_equal(budget_used(&limits.spill), 0);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
}

static void test_random_readers(void **state) {
    (void)state;
    static const uint64_t MEMORY[] = {1 << 30, 0, 3000, 100000};
    for (uint64_t i = 0; i < 8; i++) {
        run(MEMORY[i / 2], i + 1, i % 2 == 0);
    }
}

static void test_a_stream_that_keeps_up_needs_little(void **state) {
    (void)state;
    reply_limits limits = limits_of(1 << 30, 0);
    reply_spill spill;
    reply_store store;
    uint32_t record[8] = {32};
    uint64_t most = 0;
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    reply_place place = reply_store_begin(&store);
    for (int i = 0; i < 100000; i++) {
        const uint8_t *out;
        size_t bytes;
        assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 32, NULL), BT_OK);
        assert_int_equal(reply_store_next(&store, &place, &out, &bytes), BT_OK);
        reply_store_drop_before(&store, &place);
        if (budget_used(&limits.memory) > most) most = budget_used(&limits.memory);
    }
    assert_true(most <= 4096);
    reply_store_fini(&store);
    reply_spill_fini(&spill);
}

/* A held block is charged whole, and once however many of its records are appended. */
static void test_held_blocks_are_charged_whole(void **state) {
    (void)state;
    bt_block *block = bt_block_acquire(pool, 10000);
    reply_limits limits = limits_of(block->capacity, 64);
    reply_spill spill;
    reply_store store;
    const uint32_t record[4] = {16};
    const uint8_t *out;
    size_t bytes;
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    for (size_t at = 0; at < 160; at += 16) {
        memcpy(block->bytes + at, record, 16);
        assert_int_equal(reply_store_append(&store, block->bytes + at, 16, block), BT_OK);
    }
    assert_int_equal(budget_used(&limits.memory), block->capacity);
    assert_int_equal(budget_used(&limits.spill), 0);
    bt_block *other = bt_block_acquire(pool, 16);
    memcpy(other->bytes, record, 16);
    for (int i = 0; i < 4; i++) /* no memory is left: to the file, like all that follow */
        assert_int_equal(reply_store_append(&store, other->bytes, 16, other), BT_OK);
    assert_int_equal(budget_used(&limits.spill), 64);
    assert_false(bt_block_is_shared(other));
    assert_true(bt_block_is_shared(block));
    reply_place place = reply_store_begin(&store);
    for (int i = 0; i < 14; i++) {
        assert_int_equal(reply_store_next(&store, &place, &out, &bytes), BT_OK);
        assert_memory_equal(out, record, 16);
    }
    reply_store_drop_before(&store, &place);
    assert_false(bt_block_is_shared(block));
    assert_int_equal(budget_used(&limits.memory), 0);
    reply_store_fini(&store);
    reply_spill_fini(&spill);
    bt_block_release(block);
    bt_block_release(other);
}

/* Records of one block need not be neighbours, and own blocks do not grow for ever. */
static void test_gaps_and_small_records(void **state) {
    (void)state;
    reply_limits limits = limits_of(1 << 30, 0);
    reply_spill spill;
    reply_store store;
    uint32_t record[4] = {16};
    const uint8_t *out;
    size_t bytes;
    bt_block *block = bt_block_acquire(pool, 1000);
    assert_non_null(block);
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    for (uint32_t i = 0; i < 8; i++) {
        record[1] = i;
        memcpy(block->bytes + 100 * i, record, 16);
        assert_int_equal(reply_store_append(&store, block->bytes + 100 * i, 16, block), BT_OK);
    }
    bt_block_release(block);
    reply_place place = reply_store_begin(&store);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(reply_store_next(&store, &place, &out, &bytes), BT_OK);
        assert_int_equal(((const uint32_t *)(const void *)out)[1], i);
    }
    reply_store_fini(&store);
    for (uint32_t i = 0; i < 1 << 16; i++)
        assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 16, NULL), BT_OK);
    assert_in_range(budget_used(&limits.memory), 1 << 20, (1 << 20) + 64 * 1024);
    reply_store_fini(&store);
    reply_spill_fini(&spill);
    assert_int_equal(budget_used(&limits.memory), 0);
}

static void test_limits(void **state) {
    (void)state;
    reply_limits limits = limits_of(1024, 64);
    reply_spill spill;
    reply_store store;
    uint32_t record[256] = {1024};
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 1024, NULL), BT_OK);
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 1024, NULL),
                     BT_ERR_REQUEST_FULL);
    record[0] = 64;
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 64, NULL), BT_OK);
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 64, NULL),
                     BT_ERR_REQUEST_FULL);
    assert_int_equal(budget_used(&limits.spill), 64);
    reply_store_fini(&store);
    reply_spill_fini(&spill);
    limits.memory.bytes_max = 0;
    limits.spill_path = "/no/such/folder";
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 64, NULL),
                     BT_ERR_WORKER_IO);
    assert_int_equal(budget_used(&limits.spill), 0);
    reply_store_fini(&store);
    reply_spill_fini(&spill);
}

static unsigned open_files(void) {
    unsigned count = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

static void append_plain(reply_store *store, uint32_t i) {
    static uint32_t record[WORDS_MAX + 1];
    const size_t bytes = make_record(i, record);
    assert_int_equal(reply_store_append(store, (const uint8_t *)record, bytes, NULL), BT_OK);
}

/* Not every file system does. */
static bool makes_holes(void) {
    reply_limits limits = limits_of(0, 4096);
    reply_spill spill;
    reply_part part;
    static const uint8_t byte = 1;
    reply_spill_init(&spill, &limits);
    assert_int_equal(reply_spill_take(&spill, 1, &part), BT_OK);
    assert_int_equal(reply_spill_write(&spill, &part, &byte, 1), BT_OK);
    reply_spill_give(&spill, &part);
    const bool makes = spill.kept_bytes == 0;
    reply_spill_fini(&spill);
    return makes;
}

/* However many samples spill, and however their rows mix: one descriptor, and each reads its own.
 */
static void test_all_samples_share_one_file(void **state) {
    (void)state;
    enum { STORES = 300, EACH = 9 };
    static reply_store stores[STORES];
    reply_limits limits = limits_of(0, 1 << 30);
    reply_spill spill;
    uint64_t bytes = 0;
    const unsigned before = open_files();
    reply_spill_init(&spill, &limits);
    for (uint32_t i = 0; i < STORES; i++)
        reply_store_init(&stores[i], &spill);
    for (uint32_t k = 0; k < STORES * EACH; k++) {
        append_plain(&stores[k % STORES], k);
        bytes += words_of(k) * 4;
    }
    assert_int_equal(open_files(), before + 1);
    assert_int_equal(budget_used(&limits.spill), bytes);
    for (uint32_t i = 0; i < STORES; i++) {
        reply_place place = reply_store_begin(&stores[i]);
        for (uint32_t k = 0; k < EACH; k++)
            expect_record(&stores[i], &place, i + k * STORES);
        reply_store_rest(&stores[i]);
    }
    for (uint32_t i = 0; i < STORES; i++)
        reply_store_fini(&stores[i]);
    struct stat there;
    assert_int_equal(fstat(spill.fd, &there), 0);
    if (makes_holes()) { /* the disk has its bytes back before the file ends */
        assert_int_equal(budget_used(&limits.spill), 0);
        assert_int_equal(there.st_blocks, 0);
    }
    reply_spill_fini(&spill);
    assert_int_equal(open_files(), before);
}

/* A long stream that fell behind once: what was read leaves the file, and what comes when there is
 * memory again is kept in memory. */
static void test_a_stream_leaves_the_file_again(void **state) {
    (void)state;
    if (!makes_holes()) skip();
    reply_limits limits = limits_of(0, 1 << 20);
    reply_spill spill;
    reply_store store;
    uint32_t record[1024] = {sizeof(record)};
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    reply_place place = reply_store_begin(&store);
    for (uint32_t i = 0; i < 4000; i++) { /* sixteen times what the file may have at once */
        const uint8_t *out;
        size_t bytes;
        record[1] = i;
        assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 4096, NULL), BT_OK);
        assert_int_equal(reply_store_next(&store, &place, &out, &bytes), BT_OK);
        assert_memory_equal(out, record, bytes);
        reply_store_drop_before(&store, &place);
    }
    assert_true(budget_used(&limits.spill) > 0);
    limits.memory.bytes_max = 1 << 20;
    for (uint32_t i = 0; i < 100; i++) {
        const uint8_t *out;
        size_t bytes;
        record[1] = ~i;
        assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 4096, NULL), BT_OK);
        assert_int_equal(reply_store_next(&store, &place, &out, &bytes), BT_OK);
        assert_memory_equal(out, record, bytes);
        reply_store_drop_before(&store, &place);
    }
    assert_int_equal(budget_used(&limits.spill), 0);
    assert_true(budget_used(&limits.memory) > 0);
    reply_store_fini(&store);
    assert_int_equal(budget_used(&limits.memory), 0);
    reply_spill_fini(&spill);
}

/* A write that fails takes nothing, and the next one has its place. */
static void test_a_full_disk(void **state) {
    (void)state;
    reply_limits limits = limits_of(0, 1 << 30);
    reply_spill spill;
    reply_store store;
    uint32_t record[16] = {64, 1};
    const uint8_t *out;
    size_t bytes;
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 64, NULL), BT_OK);
    const int file = spill.fd;
    spill.fd = open("/dev/full", O_RDWR);
    assert_true(spill.fd >= 0);
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 64, NULL),
                     BT_ERR_WORKER_IO);
    close(spill.fd);
    spill.fd = file;
    assert_int_equal(budget_used(&limits.spill), 64);
    record[1] = 2;
    assert_int_equal(reply_store_append(&store, (const uint8_t *)record, 64, NULL), BT_OK);
    reply_place place = reply_store_begin(&store);
    for (uint32_t i = 1; i <= 2; i++) {
        assert_int_equal(reply_store_next(&store, &place, &out, &bytes), BT_OK);
        assert_int_equal(((const uint32_t *)(const void *)out)[1], i);
    }
    /* What cannot make holes keeps its charge until the file goes. */
    spill.fd = open("/dev/null", O_RDWR);
    assert_true(spill.fd >= 0);
    reply_store_fini(&store);
    assert_int_equal(budget_used(&limits.spill), 128);
    reply_spill_fini(&spill);
    assert_int_equal(budget_used(&limits.spill), 0);
    close(file);
}

#ifdef BT_FAULT
/* Each allocation fails once, in memory and in the file, while records are added and read: the call
 * says so and takes nothing, the same call goes through afterwards, and nothing is lost. */
static bool append_with_fault(reply_store *store, uint32_t i) {
    static uint32_t record[WORDS_MAX + 1];
    const size_t bytes = make_record(i, record);
    const bt_status status = reply_store_append(store, (const uint8_t *)record, bytes, NULL);
    if (status == BT_OK) return false;
    assert_int_equal(status, BT_ERR_WORKER_MEMORY);
    assert_int_equal(reply_store_append(store, (const uint8_t *)record, bytes, NULL), BT_OK);
    return true;
}

static bool read_with_fault(reply_store *store, reply_place *place, uint32_t i) {
    const uint8_t *record;
    size_t bytes;
    reply_place again = *place;
    const bt_status status = reply_store_next(store, &again, &record, &bytes);
    expect_record(store, place, i);
    if (status == BT_OK) return false;
    assert_int_equal(status, BT_ERR_WORKER_MEMORY);
    return true;
}

static bool run_with_fault(uint64_t memory, uint64_t nth) {
    enum { FEW = 120 };
    reply_limits limits = limits_of(memory, 1 << 30);
    reply_spill spill;
    reply_store store;
    uint32_t failed = 0;
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    bt_fault_set(BT_FAULT_ALLOC, nth);
    reply_place place = reply_store_begin(&store);
    for (uint32_t i = 0; i < FEW; i++) {
        failed += append_with_fault(&store, i);
        failed += read_with_fault(&store, &place, i);
        if (i % 10 == 9) reply_store_drop_before(&store, &place);
        if (i % 30 == 29) reply_store_rest(&store);
    }
    const bool was_reached = bt_fault_visits(BT_FAULT_ALLOC) >= nth;
    bt_fault_set(BT_FAULT_ALLOC, 0);
    assert_int_equal(failed, was_reached ? 1 : 0);
    reply_store_fini(&store);
    reply_spill_fini(&spill);
    assert_int_equal(budget_used(&limits.memory), 0);
    assert_int_equal(budget_used(&limits.spill), 0);
    return was_reached;
}

static void test_every_allocation_may_fail(void **state) {
    (void)state;
    static const uint64_t MEMORY[] = {1 << 30, 0, 20000};
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t nth = 1;
        while (run_with_fault(MEMORY[i], nth))
            nth++;
        assert_true(nth > 5);
    }
}
#endif

static int make_pool(void **state) {
    (void)state;
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    return bt_block_pool_create(&options, &pool) == BT_OK ? 0 : -1;
}

static int destroy_pool(void **state) {
    (void)state;
    bt_block_pool_destroy(pool);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_readers),
        cmocka_unit_test(test_a_stream_that_keeps_up_needs_little),
        cmocka_unit_test(test_held_blocks_are_charged_whole),
        cmocka_unit_test(test_gaps_and_small_records),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_all_samples_share_one_file),
        cmocka_unit_test(test_a_stream_leaves_the_file_again),
        cmocka_unit_test(test_a_full_disk),
#ifdef BT_FAULT
        cmocka_unit_test(test_every_allocation_may_fail),
#endif
    };
    return cmocka_run_group_tests(tests, make_pool, destroy_pool);
}
