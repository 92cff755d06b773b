/* The life of one request through the dispatch, from submit to its end: the good way, every failure
 * in every phase, cancels, deadlines and late messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "dispatch_fixture.h"

static fake_network *n;
static fake_worker prefill, decode;
static uint8_t rows[4096];

static int set_up(void **state) {
    (void)state;
    n = fake_network_create(NULL);
    fake_cluster(n, &prefill, &decode);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    fake_network_destroy(n);
    return 0;
}

static void look(dispatch_view *view) {
    dispatch_look(n->d, view);
}

/* No attempt, no load and no request is left anywhere. */
static void assert_at_rest(void) {
    dispatch_view view;
    dispatch_worker_view workers[4];
    look(&view);
    assert_int_equal(view.requests_queued + view.requests_running, 0);
    const uint32_t count = dispatch_look_workers(n->d, workers, 4);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(workers[i].attempts, 0);
        assert_int_equal(workers[i].queued_tokens, 0);
        assert_int_equal(workers[i].pages_free, workers[i].pages_total);
    }
}

static void a_request_goes_its_way(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    assert_int_equal(reserve.reserve.prompt_tokens, 40);
    assert_int_equal(reserve.reserve.generation.max_new_tokens, 8);
    assert_true(reserve.reserve.credit_bytes == UINT64_MAX);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_RUN), 0); /* not before it is reserved */
    fake_reserve_reply(n, &decode, reserve.reserve.attempt, BT_OK);
    proto_message run;
    assert_true(fake_take(n, prefill.streams, PROTO_RUN, &run));
    assert_int_equal(run.payload_bytes, 40 * sizeof(int32_t));
    for (int32_t i = 0; i < 40; i++)
        assert_int_equal(((int32_t *)run.payload)[i], i);
    bt_free(run.payload);
    const proto_attempt attempt = run.run.attempt;
    fake_done(n, &prefill, attempt, BT_OK);
    size_t bytes = fake_rows(rows, 100, 2);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    assert_int_equal(n->rows_count, 2);
    assert_int_equal(n->rows_request, 1);
    const size_t more = fake_rows(rows, 102, 1);
    fake_chunk(n, &decode, attempt, bytes, rows, more, PROTO_FINISH_STOP, 3);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_OK);
    assert_int_equal(end->http_status, 200);
    assert_int_equal(end->finish, PROTO_FINISH_STOP);
    assert_int_equal(end->matched_id, 2);
    assert_int_equal(end->rows_total, 3);
    assert_int_equal(end->attempts, 1);
    assert_int_equal(n->rows_count, 3);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 0);
    assert_at_rest();
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_request_goes_its_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
