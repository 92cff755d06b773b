/* The map against a plain array, under random puts and removes at full load. */
#include "base/id_map.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { COUNT = 100, IDS = 300, STEPS = 200000 };

typedef bt_id id_maker(size_t which);

/* Neighbours, and numbers that differ in high bits only. */
static bt_id mixed_number(size_t which) {
    return bt_id_of(which % 2 == 0 ? which : (uint64_t)which << 40);
}

/* The same few numbers in many spaces: the attempts of routers that were restarted. */
static bt_id mixed_space(size_t which) {
    return (bt_id){.space = UINT64_C(0x9E3779B97F4A7C15) * (which / 3), .number = which % 3};
}

/* Spaces and numbers that are each other's mirror image, and spaces that are neighbours. */
static bt_id mirrored(size_t which) {
    const uint64_t low = which / 2 % 12;
    const uint64_t high = 12 + which / 24;
    return which % 2 == 0 ? (bt_id){.space = low, .number = high}
                          : (bt_id){.space = high, .number = low};
}

static void check_against_array(id_maker *make) {
    static int values[IDS];
    bool is_in[IDS] = {false};
    bt_id_map map;
    uint64_t random = 12345;
    assert_int_equal(bt_id_map_init(&map, COUNT), BT_OK);
    const bt_id_map_entry *entries = map.entries;
    size_t full = 0;
    for (int step = 0; step < STEPS; step++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t which = (size_t)(random >> 33) % IDS;
        const bt_id id = make(which);
        assert_ptr_equal(bt_id_map_get(&map, id), is_in[which] ? &values[which] : NULL);
        if (is_in[which]) {
            bt_id_map_remove(&map, id);
            is_in[which] = false;
        } else if (map.count < COUNT) {
            bt_id_map_put(&map, id, &values[which]);
            is_in[which] = true;
        } else {
            full++;
        }
    }
    assert_true(full > 0);
    assert_ptr_equal(map.entries, entries); /* never made anew */
    size_t count = 0;
    for (size_t which = 0; which < IDS; which++) {
        count += is_in[which] ? 1 : 0;
        assert_ptr_equal(bt_id_map_get(&map, make(which)), is_in[which] ? &values[which] : NULL);
    }
    assert_int_equal(map.count, count);
    bt_id_map_remove(&map, (bt_id){UINT64_MAX, UINT64_MAX});
    assert_int_equal(map.count, count);
    for (size_t which = 0; which < IDS; which++)
        bt_id_map_remove(&map, make(which));
    assert_int_equal(map.count, 0);
    for (size_t at = 0; at <= map.mask; at++)
        assert_null(map.entries[at].value);
    bt_id_map_fini(&map);
}

static void it_equals_an_array(void **state) {
    (void)state;
    check_against_array(mixed_number);
}

static void spaces_are_kept_apart(void **state) {
    (void)state;
    check_against_array(mixed_space);
    check_against_array(mirrored);
}

/* Zero is an id like others: the wire may name it. */
static void zero_is_an_id(void **state) {
    (void)state;
    int value = 0;
    bt_id_map map;
    assert_int_equal(bt_id_map_init(&map, 1), BT_OK);
    assert_null(bt_id_map_get(&map, bt_id_of(0)));
    bt_id_map_remove(&map, bt_id_of(0));
    bt_id_map_put(&map, bt_id_of(0), &value);
    assert_ptr_equal(bt_id_map_get(&map, bt_id_of(0)), &value);
    assert_null(bt_id_map_get(&map, bt_id_of(1)));
    assert_null(bt_id_map_get(&map, (bt_id){.space = 1, .number = 0}));
    bt_id_map_remove(&map, bt_id_of(0));
    assert_null(bt_id_map_get(&map, bt_id_of(0)));
    bt_id_map_fini(&map);
    bt_id_map_fini(&map); /* zeroed by the first */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_equals_an_array),
        cmocka_unit_test(spaces_are_kept_apart),
        cmocka_unit_test(zero_is_an_id),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
