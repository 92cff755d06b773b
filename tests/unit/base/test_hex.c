/* Every character. */
#include "base/hex.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void every_character_is_a_digit_or_not(void **state) {
    (void)state;
    static const char lower[] = "0123456789abcdef";
    static const char upper[] = "0123456789ABCDEF";
    assert_int_equal(bt_hex_digit(0), -1);
    for (int code = 1; code < 256; code++) {
        const char c = (char)code;
        const char *at = strchr(lower, c);
        int want = at != NULL ? (int)(at - lower) : -1;
        if (want < 0 && strchr(upper, c) != NULL) want = (int)(strchr(upper, c) - upper);
        assert_int_equal(bt_hex_digit(c), want);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_character_is_a_digit_or_not)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
