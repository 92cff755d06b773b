/* Row slots: a generation per use, and no way to reach a slot with an old one. */
#include "pd_buffers/row_pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "proto/row.h"

enum { SLOTS = 4, CAP = 100 };

static void wrong_sizes_are_refused(void **state) {
    (void)state;
    row_pool *pool = NULL;
    assert_int_equal(row_pool_create(0, CAP, &pool), BT_ERR_CALLER_ARGUMENT);
    assert_null(pool);
    row_pool_destroy(NULL);
}

static void slots_have_the_width_of_the_cap(void **state) {
    (void)state;
    row_pool *pool = NULL;
    assert_int_equal(row_pool_create(SLOTS, CAP, &pool), BT_OK);
    assert_int_equal(row_pool_cap(pool), CAP);
    assert_int_equal(row_pool_slot_bytes(pool), row_slot_bytes(CAP));
    assert_int_equal(row_pool_memory_bytes(pool), SLOTS * row_slot_bytes(CAP));
    assert_int_equal((uintptr_t)row_pool_memory(pool) % ROW_SLOT_ALIGNMENT, 0);
    row_pool_destroy(pool);
}

static void every_use_has_its_generation(void **state) {
    (void)state;
    row_pool *pool = NULL;
    row_slot first;
    row_slot second;
    assert_int_equal(row_pool_create(1, CAP, &pool), BT_OK);
    assert_int_equal(row_pool_acquire(pool, &first), BT_OK);
    assert_int_not_equal(first.generation, 0);
    assert_ptr_equal(row_pool_get(pool, first), row_pool_memory(pool));
    row_pool_release(pool, first);
    assert_null(row_pool_get(pool, first));
    assert_int_equal(row_pool_acquire(pool, &second), BT_OK);
    assert_int_equal(second.index, first.index);
    assert_int_not_equal(second.generation, first.generation);
    assert_null(row_pool_get(pool, first));
    assert_non_null(row_pool_get(pool, second));
    row_pool_release(pool, second);
    row_pool_destroy(pool);
}

static void slots_run_out_and_come_back(void **state) {
    (void)state;
    row_pool *pool = NULL;
    row_slot slots[SLOTS];
    row_slot more;
    assert_int_equal(row_pool_create(SLOTS, CAP, &pool), BT_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        assert_int_equal(row_pool_free_count(pool), SLOTS - i);
        assert_int_equal(row_pool_acquire(pool, &slots[i]), BT_OK);
        for (uint32_t j = 0; j < i; j++)
            assert_int_not_equal(slots[i].index, slots[j].index);
    }
    assert_int_equal(row_pool_acquire(pool, &more), BT_ERR_REQUEST_FULL);
    row_pool_release(pool, slots[2]);
    assert_int_equal(row_pool_acquire(pool, &more), BT_OK);
    assert_int_equal(more.index, slots[2].index);
    assert_int_equal(row_pool_total_count(pool), SLOTS);
    row_pool_destroy(pool);
}

static void made_up_slots_are_not_found(void **state) {
    (void)state;
    row_pool *pool = NULL;
    row_slot slot;
    assert_int_equal(row_pool_create(SLOTS, CAP, &pool), BT_OK);
    assert_int_equal(row_pool_acquire(pool, &slot), BT_OK);
    static const uint32_t indices[] = {SLOTS, SLOTS + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof indices / sizeof indices[0]; i++)
        assert_null(row_pool_get(pool, (row_slot){indices[i], slot.generation}));
    assert_null(row_pool_get(pool, (row_slot){slot.index, 0}));
    assert_null(row_pool_get(pool, (row_slot){slot.index, slot.generation + 1}));
    assert_null(row_pool_get(pool, (row_slot){(slot.index + 1) % SLOTS, 0})); /* never held */
    row_pool_destroy(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_sizes_are_refused),
        cmocka_unit_test(slots_have_the_width_of_the_cap),
        cmocka_unit_test(every_use_has_its_generation),
        cmocka_unit_test(slots_run_out_and_come_back),
        cmocka_unit_test(made_up_slots_are_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
