/* What the machine says about itself is plausible. */
#include "base/system.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void answers_are_plausible(void **state) {
    (void)state;
    assert_true(bt_system_cpu_count() >= 1);
    assert_true(bt_system_memory_available_bytes() > UINT64_C(1) << 20);
    uint64_t a = 0;
    uint64_t b = 0;
    assert_int_equal(bt_system_random_u64(&a), BT_OK);
    assert_int_equal(bt_system_random_u64(&b), BT_OK);
    assert_true(a != 0 && b != 0 && a != b);
    char name[64];
    bt_system_host_name(name, sizeof name);
    assert_true(strlen(name) > 0);
    char tiny[2];
    bt_system_host_name(tiny, sizeof tiny);
    assert_true(strlen(tiny) == 1); /* cut, and terminated */
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(answers_are_plausible)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
