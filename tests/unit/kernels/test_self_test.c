/* The number that a cluster compares: the same on every instruction set, and the recorded one. */
#include "kernels/self_test.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "kernels/ops.h"

/* Of arithmetic version 1, with bounded masks; another arithmetic goes with another version in
 * model_numerics. */
static const uint32_t recorded = 0xae707d90;

static void every_instruction_set_gives_the_recorded_number(void **state) {
    (void)state;
    for (uint32_t i = 0; dev_host_isa_at(i) != NULL; i++) {
        uint32_t hash = 0;
        bt_error error;
        assert_int_equal(self_test_run(dev_host_isa_at(i), &hash, &error), BT_OK);
        assert_int_equal(hash, recorded);
    }
}

static void the_best_set_is_the_default(void **state) {
    (void)state;
    uint32_t hash = 0;
    bt_error error;
    assert_int_equal(self_test_run(NULL, &hash, &error), BT_OK);
    assert_int_equal(hash, recorded);
}

static void an_unknown_set_is_refused(void **state) {
    (void)state;
    uint32_t hash = 7;
    bt_error error;
    assert_int_not_equal(self_test_run("abacus", &hash, &error), BT_OK);
    assert_int_equal(hash, 7);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_instruction_set_gives_the_recorded_number),
        cmocka_unit_test(the_best_set_is_the_default),
        cmocka_unit_test(an_unknown_set_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
