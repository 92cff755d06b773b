/* Every status has a name and a scope, and bt_fail keeps both. */
#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void scopes_follow_numbers(void **state) {
    (void)state;
    assert_int_equal(bt_status_scope(BT_OK), BT_SCOPE_NONE);
    assert_int_equal(bt_status_scope(BT_ERR_REQUEST_STALE), BT_SCOPE_REQUEST);
    assert_int_equal(bt_status_scope(BT_ERR_PEER_GONE), BT_SCOPE_PEER);
    assert_int_equal(bt_status_scope(BT_ERR_WORKER_IO), BT_SCOPE_WORKER);
    assert_int_equal(bt_status_scope(BT_ERR_CALLER_FILE), BT_SCOPE_CALLER);
}

static void fail_keeps_the_sentence(void **state) {
    (void)state;
    bt_error error;
    assert_int_equal(bt_fail(&error, BT_ERR_CALLER_FILE, "no %s", "file"), BT_ERR_CALLER_FILE);
    assert_int_equal(error.status, BT_ERR_CALLER_FILE);
    assert_string_equal(error.text, "no file");
    assert_int_equal(bt_fail(NULL, BT_ERR_PEER_GONE, "x"), BT_ERR_PEER_GONE);
}

static void unknown_numbers_have_a_name(void **state) {
    (void)state;
    assert_string_equal(bt_status_string((bt_status)-9999), "unknown status");
    assert_string_equal(bt_status_string(BT_ERR_REQUEST_FULL), "full");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scopes_follow_numbers),
        cmocka_unit_test(fail_keeps_the_sentence),
        cmocka_unit_test(unknown_numbers_have_a_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
