/* The map against a plain array, under random puts and removes at full load. */
#include "router/id_map.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { COUNT = 100, IDS = 300, STEPS = 200000 };

static void it_equals_an_array(void **state) {
    (void)state;
    static int values[IDS];
    static bool is_in[IDS];
    id_map map;
    uint64_t random = 12345;
    assert_int_equal(id_map_init(&map, COUNT), BT_OK);
    for (int step = 0; step < STEPS; step++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t which = (size_t)(random >> 33) % IDS;
        /* Ids that differ in high bits only, and neighbours. */
        const uint64_t id = which % 2 == 0 ? which + 1 : (uint64_t)(which + 1) << 40;
        assert_ptr_equal(id_map_get(&map, id), is_in[which] ? &values[which] : NULL);
        if (is_in[which]) {
            id_map_remove(&map, id);
            is_in[which] = false;
        } else if (map.count < COUNT) {
            id_map_put(&map, id, &values[which]);
            is_in[which] = true;
        }
    }
    size_t count = 0;
    for (size_t which = 0; which < IDS; which++)
        count += is_in[which] ? 1 : 0;
    assert_int_equal(map.count, count);
    id_map_remove(&map, UINT64_MAX);
    id_map_remove(&map, 0);
    assert_null(id_map_get(&map, 0));
    assert_int_equal(map.count, count);
    id_map_fini(&map);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(it_equals_an_array)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
