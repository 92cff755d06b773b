/* Masks at the dispatch: overflows from wherever they are found, beside cancels, and records of
 * masks that do not answer the request. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "dispatch_fixture.h"
#include "proto/row.h"

enum { SAMPLES = 3, NEW_TOKENS = 8, WIDTH = 4 };

static fake_network *n;
static fake_worker prefill, decode;
static uint8_t rows[1 << 16];

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

static void again(void) {
    (void)tear_down(NULL);
    (void)set_up(NULL);
}

/* A request for masks whose RUN is with prefill. */
static proto_attempt start(uint64_t id, uint32_t samples, uint32_t mask_bounded) {
    dispatch_request request;
    bt_error error;
    fake_request(id, 40, NEW_TOKENS, &request);
    request.generation.samples = samples;
    request.generation.mask_mode = ROW_MASK_SUPPORT;
    request.generation.mask_bounded = mask_bounded;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    assert_int_equal(reserve.reserve.generation.mask_bounded, mask_bounded);
    fake_reserve_samples(n, &decode, reserve.reserve.attempt, samples);
    const proto_message run = fake_expect(n, prefill.streams, PROTO_RUN);
    assert_int_equal(run.run.generation.mask_bounded, mask_bounded);
    return reserve.reserve.attempt;
}

/* A right record of WIDTH entries, or of the cap. */
static token_row make_row(uint32_t count, int32_t *ids, float *logprobs) {
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = (int32_t)(10 + 3 * i);
        logprobs[i] = -1.0f - (float)i;
    }
    return (token_row){.token = 13,
                       .mask_mode = ROW_MASK_SUPPORT,
                       .selected_logprob = -2.0f,
                       .support_count = count,
                       .support_ids = ids,
                       .support_logprobs = logprobs};
}

static size_t put_row(void) {
    int32_t ids[WIDTH];
    float logprobs[WIDTH];
    const token_row row = make_row(WIDTH, ids, logprobs);
    row_record_encode(&row, rows);
    return row_record_bytes(token_row_widths(&row));
}

static void stream_row(proto_attempt attempt, uint32_t sample, proto_finish finish) {
    const size_t bytes = put_row();
    n->sample = sample;
    fake_chunk(n, &decode, attempt, 0, rows, bytes, finish, finish == PROTO_FINISH_NONE ? 0 : 1);
    n->sample = 0;
}

static void break_sample(proto_attempt attempt, uint32_t sample, bt_status status,
                         uint32_t rows_total, uint32_t cap_needed) {
    const proto_message message = {.kind = PROTO_CHUNK,
                                   .chunk = {.attempt = attempt,
                                             .sample = sample,
                                             .offset = rows_total * put_row(),
                                             .finish = PROTO_FINISH_ERROR,
                                             .status = status,
                                             .rows_total = rows_total,
                                             .cap_needed = cap_needed}};
    fake_say(n, decode.streams, &message);
}

static void fail_prefill(proto_attempt attempt, bt_status status, uint32_t cap_needed) {
    const proto_message done = {
        .kind = PROTO_PREFILL_DONE,
        .prefill_done = {.attempt = attempt, .status = status, .cap_needed = cap_needed}};
    fake_say(n, prefill.control, &done);
}

/* ---- what overflows need --------------------------------------------------------------------- */

static void expect_end(const dispatch_end *end, bt_status status, uint32_t cap_needed,
                       uint32_t rows_total) {
    assert_int_equal(end->status, status);
    assert_int_equal(end->http_status, status == BT_ERR_REQUEST_OVERFLOW ? 400 : 500);
    assert_int_equal(end->cap_needed, cap_needed);
    assert_int_equal(end->rows_total, rows_total);
    assert_int_equal(end->finish, PROTO_FINISH_ERROR);
    assert_int_equal(end->attempts, 1); /* nobody tries it again */
    if (cap_needed > 0) assert_non_null(strstr(end->text, "server limit. Required: 100."));
    if (status == BT_ERR_REQUEST_CAPTURE) assert_non_null(strstr(end->text, "captured sampling"));
}

/* Prefill's word, a first row that carries it to decode, and decode's own: the same at the client.
 */
static void failures_of_a_draw_are_told_wherever_they_happen(void **state) {
    (void)state;
    static const bt_status statuses[] = {BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_CAPTURE};
    for (size_t i = 0; i < BT_ARRAY_COUNT(statuses); i++) {
        const uint32_t cap = i == 0 ? 100 : 0;
        again();
        fail_prefill(start(1, 1, 0), statuses[i], cap);
        expect_end(fake_end_of(n, 1, true), statuses[i], cap, 0);
        expect_end(fake_sample_end_of(n, 1, 0, true), statuses[i], cap, 0);
        const proto_attempt mixed = start(2, SAMPLES, 0);
        fake_done(n, &prefill, mixed, BT_OK);
        break_sample(mixed, 1, statuses[i], 0, cap);
        expect_end(fake_sample_end_of(n, 2, 1, true), statuses[i], cap, 0);
        stream_row(mixed, 0, PROTO_FINISH_LENGTH);
        stream_row(mixed, 2, PROTO_FINISH_LENGTH);
        assert_int_equal(fake_end_of(n, 2, true)->status, BT_OK);
        assert_int_equal(fake_end_of(n, 2, true)->cap_needed, 0);
        const proto_attempt later = start(3, 1, 0);
        fake_done(n, &prefill, later, BT_OK);
        stream_row(later, 0, PROTO_FINISH_NONE);
        break_sample(later, 0, statuses[i], 1, cap);
        expect_end(fake_end_of(n, 3, true), statuses[i], cap, 1);
        assert_int_equal(fake_look(n).retries_total, 0);
        assert_int_equal(fake_look(n).protocol_errors_total, 0);
        fake_expect_rest(n);
    }
}

/* ---- cancels --------------------------------------------------------------------------------- */

/* Whatever was found in the step that the cancel met: the request ended by its client. */
static void a_cancel_wins_over_an_overflow(void **state) {
    (void)state;
    for (uint32_t has_rows = 0; has_rows < 2; has_rows++) {
        again();
        const proto_attempt attempt = start(1, 1, 0);
        if (has_rows) stream_row(attempt, 0, PROTO_FINISH_NONE);
        dispatch_cancel(n->d, 1, n->now_us);
        assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
        break_sample(attempt, 0, BT_ERR_REQUEST_OVERFLOW, has_rows, 100);
        fail_prefill(attempt, BT_ERR_REQUEST_OVERFLOW, 100);
        const dispatch_end *end = fake_end_of(n, 1, true); /* one end, and this one */
        assert_int_equal(end->status, BT_ERR_REQUEST_CANCELLED);
        assert_int_equal(end->cap_needed, 0);
        assert_int_equal(fake_look(n).protocol_errors_total, 0);
        assert_int_equal(fake_look(n).late_total, 2);
        fake_expect_rest(n);
    }
}

static void a_cancelled_sample_stays_cancelled(void **state) {
    (void)state;
    const proto_attempt attempt = start(1, SAMPLES, 0);
    stream_row(attempt, 0, PROTO_FINISH_NONE);
    dispatch_cancel_sample(n->d, 1, 0, n->now_us);
    break_sample(attempt, 0, BT_ERR_REQUEST_OVERFLOW, 1, 100);
    assert_int_equal(fake_sample_end_of(n, 1, 0, true)->status, BT_ERR_REQUEST_CANCELLED);
    assert_int_equal(fake_sample_end_of(n, 1, 0, true)->cap_needed, 0);
    stream_row(attempt, 1, PROTO_FINISH_LENGTH);
    stream_row(attempt, 2, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    fake_expect_rest(n);
}

/* And the other way round: what was told is told. */
static void a_cancel_after_an_overflow_changes_nothing(void **state) {
    (void)state;
    const proto_attempt attempt = start(1, 2, 0);
    break_sample(attempt, 0, BT_ERR_REQUEST_OVERFLOW, 0, 100);
    dispatch_cancel(n->d, 1, n->now_us);
    expect_end(fake_sample_end_of(n, 1, 0, true), BT_ERR_REQUEST_OVERFLOW, 100, 0);
    assert_int_equal(fake_sample_end_of(n, 1, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
    fake_expect_rest(n);
}

/* ---- records that do not answer -------------------------------------------------------------- */

typedef struct lie {
    uint32_t mask_bounded, count, size;
    int32_t id, token;
    float logprob;
    const char *why;
} lie;

static void records_that_do_not_answer_are_named(void **state) {
    (void)state;
    static const lie lies[] = {
        {0, WIDTH, WIDTH, 10, 13, -1.0f, NULL},
        {0, WIDTH, WIDTH, FAKE_VOCAB, 13, -1.0f, "a support id outside the vocabulary"},
        {0, WIDTH, WIDTH, -1, 13, -1.0f, "a support id outside the vocabulary"},
        {0, WIDTH, WIDTH, 10, 14, -1.0f, "a drawn token that is not in its support"},
        {0, WIDTH, WIDTH, 10, FAKE_VOCAB, -1.0f, "a token outside the vocabulary"},
        {0, WIDTH, WIDTH, 10, 13, 1.0f, "a support log-probability that is none"},
        {0, WIDTH, WIDTH + 1, 10, 13, -1.0f, "a truncated support in exact mode"},
        {0, FAKE_CAP, FAKE_CAP + 1, 10, 13, -1.0f, "a truncated support in exact mode"},
        {1, FAKE_CAP, FAKE_CAP + 1, 10, 13, -1.0f, NULL},
        {1, FAKE_CAP, FAKE_VOCAB, 10, 13, -1.0f, NULL},
        {1, FAKE_CAP, FAKE_VOCAB + 1, 10, 13, -1.0f, "a support larger than the vocabulary"},
        {1, WIDTH, WIDTH + 1, 10, 13, -1.0f, "a support truncated below the cap"},
        {1, WIDTH, WIDTH, 10, 13, -1.0f, NULL},
        {1, FAKE_CAP + 1, FAKE_CAP + 1, 10, 13, -1.0f, "a support wider than the cap"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(lies); i++) {
        int32_t ids[FAKE_CAP + 1];
        float logprobs[FAKE_CAP + 1];
        again();
        const proto_attempt attempt = start(1, 1, lies[i].mask_bounded);
        stream_row(attempt, 0, PROTO_FINISH_NONE); /* so that nobody tries it again */
        const size_t offset = put_row();
        token_row row = make_row(lies[i].count, ids, logprobs);
        row.support_size = lies[i].size;
        row.token = lies[i].token;
        ids[0] = lies[i].id;
        logprobs[0] = lies[i].logprob;
        row_record_encode(&row, rows);
        fake_chunk(n, &decode, attempt, offset, rows, row_record_bytes(token_row_widths(&row)),
                   PROTO_FINISH_LENGTH, 2);
        const dispatch_end *end = fake_end_of(n, 1, true);
        assert_int_equal(n->rows_count, lies[i].why == NULL ? 2 : 1);
        if (lies[i].why == NULL) {
            assert_int_equal(end->status, BT_OK);
            continue;
        }
        assert_int_equal(end->status, BT_ERR_PEER_PROTOCOL);
        assert_int_equal(end->http_status, 500);
        if (strstr(end->text, "a row it must not send") == NULL ||
            strstr(end->text, lies[i].why) == NULL)
            fail_msg("'%s' is not '%s'", end->text, lies[i].why);
        assert_int_equal(fake_look(n).protocol_errors_total, 1);
        assert_int_equal(fake_look(n).worker_count, 2); /* the harm is done to one request */
        fake_expect_rest(n);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(failures_of_a_draw_are_told_wherever_they_happen),
        TEST(a_cancel_wins_over_an_overflow),
        TEST(a_cancelled_sample_stays_cancelled),
        TEST(a_cancel_after_an_overflow_changes_nothing),
        TEST(records_that_do_not_answer_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
