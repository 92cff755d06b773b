/* The worker's registration: its states and deadlines, and what of a welcome is taken or not. */
#include "proto/worker_session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "proto/row.h"

static proto_hello make_hello(void) {
    return (proto_hello){.role = PROTO_ROLE_DECODE,
                         .incarnation = 5,
                         .host = "here",
                         .record = {.page_tokens = 32, .kv_dtype = "bf16", .numerics = "host"}};
}

static proto_welcome make_welcome(void) {
    return (proto_welcome){.router_incarnation = 9,
                           .router_host = "there",
                           .worker_id = 3,
                           .record = {.sampling_mask_max_tokens = 4096, .kv_checksum = 3},
                           .heartbeat_ms = 500,
                           .dead_after_ms = 3000};
}

static void greet(worker_session *s, const proto_hello *hello) {
    proto_message message;
    worker_session_init(s, hello);
    worker_session_on_open(s, PROTO_LANE_CONTROL, 1000, &message);
    assert_int_equal(message.kind, PROTO_HELLO);
    assert_int_equal(message.hello.lane, PROTO_LANE_CONTROL);
    assert_int_equal(message.hello.version_major, PROTO_VERSION_MAJOR);
    assert_int_equal(message.hello.record.row_format, ROW_FORMAT_VERSION);
    assert_int_equal(s->state, WORKER_SESSION_GREETING);
}

static void the_way_to_serving_and_back(void **state) {
    (void)state;
    worker_session s;
    proto_message message;
    bt_error error;
    const proto_hello hello = make_hello();
    const proto_welcome welcome = make_welcome();
    greet(&s, &hello);
    assert_false(worker_session_is_welcome(&s));
    assert_int_equal(worker_session_on_welcome(&s, &welcome, 2000, &error), BT_OK);
    assert_int_equal(s.state, WORKER_SESSION_WELCOMED);
    assert_true(worker_session_is_welcome(&s));
    assert_int_equal(s.record.sampling_mask_max_tokens, 4096); /* adopted */
    assert_int_equal(s.record.kv_checksum, 3);
    assert_int_equal(s.record.page_tokens, 32); /* its own */
    worker_session_on_open(&s, PROTO_LANE_STREAMS, 3000, &message);
    assert_int_equal(message.hello.lane, PROTO_LANE_STREAMS);
    assert_true(s.has_streams);
    worker_session_on_ready(&s, 4000);
    assert_int_equal(s.state, WORKER_SESSION_SERVING);
    assert_int_equal(worker_session_on_welcome(&s, &welcome, 5000, &error), BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(error.text, "while serving"));
    worker_session_on_closed(&s);
    assert_int_equal(s.state, WORKER_SESSION_AWAY);
    assert_false(s.has_streams);
    worker_session_on_closed(&s);
    assert_int_equal(s.state, WORKER_SESSION_AWAY);
}

static void another_routers_cap_is_adopted_anew(void **state) {
    (void)state;
    worker_session s;
    proto_message message;
    const proto_hello hello = make_hello();
    proto_welcome welcome = make_welcome();
    greet(&s, &hello);
    assert_int_equal(worker_session_on_welcome(&s, &welcome, 2000, NULL), BT_OK);
    worker_session_on_closed(&s);
    worker_session_on_open(&s, PROTO_LANE_CONTROL, 3000, &message);
    /* The hello says what the worker is, never what it adopted from the last router. */
    assert_int_equal(message.hello.record.sampling_mask_max_tokens, 0);
    welcome.record.sampling_mask_max_tokens = 128;
    assert_int_equal(worker_session_on_welcome(&s, &welcome, 4000, NULL), BT_OK);
    assert_int_equal(s.record.sampling_mask_max_tokens, 128);
}

static void a_pinned_cap_is_compared(void **state) {
    (void)state;
    worker_session s;
    bt_error error;
    proto_hello hello = make_hello();
    hello.record.sampling_mask_max_tokens = 128;
    proto_welcome welcome = make_welcome();
    greet(&s, &hello);
    assert_int_equal(worker_session_on_welcome(&s, &welcome, 2000, &error), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(error.status, BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(error.text, "sampling_mask_max_tokens differs"));
    assert_int_equal(s.state, WORKER_SESSION_GREETING);
    welcome.record.sampling_mask_max_tokens = 128;
    assert_int_equal(worker_session_on_welcome(&s, &welcome, 2000, &error), BT_OK);
}

static void welcomes_that_cannot_be_used(void **state) {
    (void)state;
    proto_welcome bad[6];
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad); i++)
        bad[i] = make_welcome();
    bad[0].record.sampling_mask_max_tokens = 0;
    bad[1].record.sampling_mask_max_tokens = WORKER_SESSION_MASK_TOKENS_MAX + 1;
    bad[2].record.kv_checksum = 0;
    bad[3].record.kv_checksum = 4;
    bad[4].dead_after_ms = WORKER_SESSION_DEAD_AFTER_MS_MIN - 1;
    bad[5].worker_id = 0;
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad); i++) {
        worker_session s;
        bt_error error = {0};
        const proto_hello hello = make_hello();
        greet(&s, &hello);
        assert_int_equal(worker_session_on_welcome(&s, &bad[i], 2000, &error),
                         BT_ERR_PEER_PROTOCOL);
        assert_true(error.text[0] != '\0');
        assert_int_equal(s.state, WORKER_SESSION_GREETING);
    }
}

static void every_wait_has_a_deadline(void **state) {
    (void)state;
    worker_session s;
    const proto_hello hello = make_hello();
    const proto_welcome welcome = make_welcome();
    const uint64_t greeting_us = WORKER_SESSION_GREETING_MS * 1000u;
    greet(&s, &hello);
    worker_session_on_heard(&s, 5000); /* means nothing before the welcome */
    assert_false(worker_session_is_late(&s, 1000 + greeting_us - 1));
    assert_true(worker_session_is_late(&s, 1000 + greeting_us));
    assert_int_equal(worker_session_on_welcome(&s, &welcome, 2000, NULL), BT_OK);
    assert_false(worker_session_is_late(&s, 2000 + 2999999));
    assert_true(worker_session_is_late(&s, 2000 + 3000000));
    worker_session_on_heard(&s, 1000000);
    assert_false(worker_session_is_late(&s, 3999999));
    assert_true(worker_session_is_late(&s, 4000000));
    worker_session_on_closed(&s);
    assert_false(worker_session_is_late(&s, UINT64_MAX));
}

static void a_refusal_is_final(void **state) {
    (void)state;
    worker_session s;
    const proto_hello hello = make_hello();
    greet(&s, &hello);
    worker_session_on_refuse(&s);
    assert_int_equal(s.state, WORKER_SESSION_REFUSED);
    worker_session_on_closed(&s);
    assert_int_equal(s.state, WORKER_SESSION_REFUSED);
    assert_false(worker_session_is_late(&s, UINT64_MAX));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_way_to_serving_and_back),
        cmocka_unit_test(another_routers_cap_is_adopted_anew),
        cmocka_unit_test(a_pinned_cap_is_compared),
        cmocka_unit_test(welcomes_that_cannot_be_used),
        cmocka_unit_test(every_wait_has_a_deadline),
        cmocka_unit_test(a_refusal_is_final),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
