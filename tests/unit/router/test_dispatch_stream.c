/* The row stream through the dispatch: order, credit, ends, and what happens to those who break it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/little_endian.h"
#include "dispatch_fixture.h"
#include "proto/row.h"

static fake_network *n;
static fake_worker prefill, decode;
static uint8_t rows[1 << 19];
static size_t row_bytes;

static int set_up(void **state) {
    (void)state;
    n = fake_network_create(NULL);
    fake_cluster(n, &prefill, &decode);
    row_bytes = row_record_bytes((row_widths){.mask_mode = ROW_MASK_OFF, .support_count = 0});
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    fake_network_destroy(n);
    return 0;
}

static proto_attempt begin(uint64_t id, bool is_credited, uint32_t max_new_tokens,
                           uint64_t *window_out) {
    dispatch_request request;
    bt_error error;
    fake_request(id, 40, max_new_tokens, &request);
    request.is_credited = is_credited;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    *window_out = reserve.reserve.credit_bytes;
    fake_reserve_reply(n, &decode, reserve.reserve.attempt, BT_OK);
    fake_expect(n, prefill.streams, PROTO_RUN);
    return reserve.reserve.attempt;
}

static void rows_may_span_frames(void **state) {
    (void)state;
    uint64_t window;
    for (size_t cut = 0; cut <= 3 * row_bytes; cut++) {
        const uint64_t id = cut + 1;
        const proto_attempt attempt = begin(id, false, 3, &window);
        const size_t total = fake_rows(rows, 5, 3);
        n->rows_bytes = 0;
        if (cut > 0) fake_chunk(n, &decode, attempt, 0, rows, cut, PROTO_FINISH_NONE, 0);
        assert_int_equal(n->rows_bytes, cut / row_bytes * row_bytes);
        fake_chunk(n, &decode, attempt, cut, rows + cut, total - cut, PROTO_FINISH_LENGTH, 3);
        assert_int_equal(n->rows_bytes, total);
        assert_memory_equal(n->rows, rows, total);
        assert_int_equal(fake_end_of(n, id, true)->status, BT_OK);
        assert_int_equal(fake_end_of(n, id, true)->rows_total, 3);
    }
}

/* The fault is of one attempt: it is cancelled on both legs and tried again; the worker stays. */
static void expect_violation(uint64_t id, const char *what) {
    const dispatch_end *end = fake_end_of(n, id, false);
    dispatch_view view;
    dispatch_look(n->d, &view);
    if (end != NULL) {
        assert_int_equal(end->status, BT_ERR_PEER_PROTOCOL);
        assert_int_equal(end->http_status, 500);
        assert_non_null(strstr(end->text, what));
    } else {
        assert_int_equal(view.retries_total, 1);
    }
    assert_int_equal(view.protocol_errors_total, 1);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 1);
    assert_false(fake_is_closed(n, decode.streams));
}

static void a_gap_is_refused(void **state) {
    (void)state;
    uint64_t window;
    const proto_attempt attempt = begin(1, false, 8, &window);
    const size_t bytes = fake_rows(rows, 1, 1);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    fake_chunk(n, &decode, attempt, bytes + 4, rows, bytes, PROTO_FINISH_NONE, 0);
    expect_violation(1, "a gap in the row stream");
}

/* One token of a prompt is always computed. */
static void more_cached_tokens_than_the_prompt_has_are_refused(void **state) {
    (void)state;
    uint64_t window;
    dispatch_view view;
    proto_message message = {.kind = PROTO_PREFILL_DONE};
    proto_attempt attempt = begin(1, false, 8, &window);
    const size_t bytes = fake_rows(rows, 1, 1);
    n->cached_tokens = 39;
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    assert_int_equal(n->rows_cached_tokens, 39);
    n->cached_tokens = 40;
    fake_chunk(n, &decode, attempt, bytes, rows, bytes, PROTO_FINISH_NONE, 0);
    expect_violation(1, "more cached tokens than its prompt has");
    n->cached_tokens = 0;
    fake_submit(n, 2, 40, 8);
    attempt = fake_run(n, &prefill, &decode);
    message.prefill_done = (proto_prefill_done){.attempt = attempt, .cached_tokens = 40};
    dispatch_on_message(n->d, prefill.control, &message, n->now_us);
    dispatch_look(n->d, &view);
    assert_int_equal(view.protocol_errors_total, 2);
}

static void a_repeated_chunk_is_refused(void **state) {
    (void)state;
    uint64_t window;
    const proto_attempt attempt = begin(1, false, 8, &window);
    const size_t bytes = fake_rows(rows, 1, 1);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    expect_violation(1, "a gap in the row stream");
    assert_int_equal(n->rows_count, 1);
}

static void a_chunk_before_run_is_refused(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    const size_t bytes = fake_rows(rows, 1, 1);
    fake_chunk(n, &decode, reserve.reserve.attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    expect_violation(1, "a row it must not send: another mask mode");
    assert_int_equal(n->rows_count, 0);
}

static void an_error_before_run_brings_no_rows(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    proto_message message = {
        .kind = PROTO_CHUNK, .payload = rows, .payload_bytes = fake_rows(rows, 1, 1)};
    message.chunk = (proto_chunk){.attempt = reserve.reserve.attempt,
                                  .finish = PROTO_FINISH_ERROR,
                                  .status = BT_ERR_PEER_GONE,
                                  .rows_total = 1};
    fake_say(n, decode.streams, &message);
    expect_violation(1, "a row it must not send: another mask mode");
    assert_int_equal(n->rows_count, 0);
}

/* The pair broke right behind the reservation, and streams was faster than control. */
static void an_error_may_overtake_its_reservation(void **state) {
    (void)state;
    dispatch_view view;
    fake_submit(n, 1, 40, 8);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    fake_chunk_error(n, &decode, reserve.reserve.attempt, BT_ERR_PEER_GONE, 0, "prefill is gone");
    fake_reserve_reply(n, &decode, reserve.reserve.attempt, BT_OK);
    dispatch_look(n->d, &view);
    assert_int_equal(view.protocol_errors_total, 0);
    assert_int_equal(view.late_total, 1);
    assert_int_equal(view.retries_total, 1);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_RUN), 0);
    (void)fake_run(n, &prefill, &decode);
}

static void a_row_of_another_mode_is_refused(void **state) {
    (void)state;
    uint64_t window;
    const proto_attempt attempt = begin(1, false, 8, &window);
    static const int32_t ids[1] = {1};
    const token_row row = {
        .token = 1, .mask_mode = ROW_MASK_SELECTED, .support_count = 1, .support_ids = ids};
    row_record_encode(&row, rows);
    fake_chunk(n, &decode, attempt, 0, rows,
               row_record_bytes((row_widths){.mask_mode = ROW_MASK_SELECTED, .support_count = 1}),
               PROTO_FINISH_NONE, 0);
    expect_violation(1, "a row it must not send: another mask mode");
    assert_int_equal(n->rows_calls, 0);
}

static void more_rows_than_asked_for_are_refused(void **state) {
    (void)state;
    uint64_t window;
    const proto_attempt attempt = begin(1, false, 2, &window);
    size_t bytes = fake_rows(rows, 1, 2);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    fake_chunk(n, &decode, attempt, bytes, rows, row_bytes, PROTO_FINISH_LENGTH, 3);
    expect_violation(1, "too many rows");
    assert_int_equal(n->rows_count, 2);
}

static void wrong_ends_are_refused(void **state) {
    (void)state;
    static const struct {
        size_t bytes; /* sent with the end */
        proto_finish finish;
        uint32_t rows_total;
        const char *what;
    } cases[] = {
        {ROW_RECORD_HEADER_BYTES, PROTO_FINISH_LENGTH, 3, "has not the rows"},
        {ROW_RECORD_HEADER_BYTES, PROTO_FINISH_LENGTH, 1, "has not the rows"},
        {ROW_RECORD_HEADER_BYTES - 1, PROTO_FINISH_LENGTH, 2, "ended inside a row"},
        {0, PROTO_FINISH_STOP, 0, "has not the rows"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint64_t window;
        (void)tear_down(NULL);
        (void)set_up(NULL);
        const proto_attempt attempt = begin(1, false, 8, &window);
        const size_t bytes = fake_rows(rows, 1, 1);
        fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
        fake_chunk(n, &decode, attempt, bytes, rows, cases[i].bytes, cases[i].finish,
                   cases[i].rows_total);
        expect_violation(1, cases[i].what);
    }
}

/* Credit ends anywhere in a row. What decode then says of its reader is what the client hears. */
static void a_stream_may_be_given_up_inside_a_row(void **state) {
    (void)state;
    uint64_t window;
    dispatch_view view;
    const proto_attempt attempt = begin(1, false, 8, &window);
    const size_t bytes = fake_rows(rows, 1, 2);
    proto_message message = {.kind = PROTO_CHUNK};
    fake_chunk(n, &decode, attempt, 0, rows, bytes - 1, PROTO_FINISH_NONE, 0);
    message.chunk.attempt = attempt;
    message.chunk.offset = bytes - 1;
    message.chunk.finish = PROTO_FINISH_ERROR;
    message.chunk.status = BT_ERR_REQUEST_DEADLINE;
    message.chunk.rows_total = 1;
    (void)snprintf(message.chunk.text, sizeof message.chunk.text, "the reader took nothing");
    fake_say(n, decode.streams, &message);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_DEADLINE);
    assert_string_equal(end->text, "the reader took nothing");
    assert_int_equal(end->rows_total, 1);
    dispatch_look(n->d, &view);
    assert_int_equal(view.protocol_errors_total, 0);
}

/* Until decode has proven it, what prefill says of the transfer counts. */
static void a_transfer_that_fails_is_tried_again_at_once(void **state) {
    (void)state;
    uint64_t window;
    dispatch_view view;
    const proto_attempt first = begin(1, false, 8, &window);
    fake_done(n, &prefill, first, BT_OK);
    fake_done(n, &prefill, first, BT_ERR_PEER_TIMEOUT);
    assert_false(proto_attempt_equal(first, fake_run(n, &prefill, &decode)));
    assert_null(fake_end_of(n, 1, false));
    dispatch_look(n->d, &view);
    assert_int_equal(view.retries_total, 1);
    assert_int_equal(view.protocol_errors_total, 0);
}

static void a_stream_needs_a_row_and_a_true_stop(void **state) {
    (void)state;
    uint64_t window;
    proto_attempt attempt = begin(1, false, 8, &window);
    fake_chunk(n, &decode, attempt, 0, NULL, 0, PROTO_FINISH_LENGTH, 0);
    expect_violation(1, "without rows");
    (void)tear_down(NULL);
    (void)set_up(NULL);
    dispatch_request request;
    bt_error error;
    fake_request(1, 40, 8, &request);
    request.generation.stop_ids[0] = 3; /* fake_chunk stops at 2 */
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    attempt = fake_run(n, &prefill, &decode);
    const size_t bytes = fake_rows(rows, 1, 1);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_STOP, 1);
    expect_violation(1, "a stop at an id that does not stop");
}

static void a_chunk_of_a_stranger_closes_the_stranger(void **state) {
    (void)state;
    uint64_t window;
    fake_worker other;
    const proto_attempt attempt = begin(1, false, 8, &window);
    fake_join(n, &other, PROTO_ROLE_DECODE, 44);
    const size_t bytes = fake_rows(rows, 1, 1);
    fake_chunk(n, &other, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    assert_true(fake_is_closed(n, other.control));
    assert_true(fake_is_closed(n, other.streams));
    assert_int_equal(n->rows_count, 0);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_LENGTH, 1);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
}

/* ---- credit ---------------------------------------------------------------------------------- */

/* A row must have the log-probabilities that were asked for, and a token of the part of the
 * vocabulary that may be drawn. */
static void a_row_that_does_not_answer_is_refused(void **state) {
    (void)state;
    static const float asked[2] = {-1.0f, -2.0f};
    static const row_top top[2] = {{.id = 1, .logprob = -1.0f}, {.id = 2, .logprob = -2.0f}};
    static const struct {
        uint32_t top, ids;
        int32_t token;
        bool is_good;
    } cases[] = {{1, 1, 499, true}, {2, 1, 5, false}, {1, 2, 5, false},
                 {0, 1, 5, false},  {1, 0, 5, false}, {1, 1, 500, false}};
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        int32_t words[41] = {0};
        dispatch_request request;
        bt_error error;
        (void)tear_down(NULL);
        (void)set_up(NULL);
        fake_request(1, 40, 8, &request);
        request.words = words;
        request.generation.wants_logprob = 1;
        request.generation.top_logprobs = request.generation.logprob_id_count = 1;
        request.generation.vocab_limit = 500;
        assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
        const proto_attempt attempt = fake_run(n, &prefill, &decode);
        const token_row row = {.token = cases[i].token,
                               .has_logprob = 1,
                               .token_logprob = -1.0f,
                               .top_count = cases[i].top,
                               .top = top,
                               .id_logprob_count = cases[i].ids,
                               .id_logprobs = asked};
        row_record_encode(&row, rows);
        fake_chunk(n, &decode, attempt, 0, rows, row_record_bytes(token_row_widths(&row)),
                   PROTO_FINISH_NONE, 0);
        assert_int_equal(n->rows_count, cases[i].is_good ? 1 : 0);
        if (!cases[i].is_good) expect_violation(1, "a row it must not send");
    }
}

/* A row has as many entries as the cap allows, or as there are ids. */
static void expect_window(uint32_t cap, uint32_t entries) {
    uint64_t window;
    dispatch_options options;
    fake_options(&options);
    options.record.sampling_mask_max_tokens = cap;
    options.stream_window_bytes = 1; /* raised */
    fake_network_destroy(n);
    n = fake_network_create(&options);
    fake_cluster(n, &prefill, &decode);
    dispatch_request request;
    bt_error error;
    fake_request(1, 40, 8, &request);
    request.is_credited = true;
    request.generation.mask_mode = ROW_MASK_SUPPORT;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    window = fake_expect(n, decode.control, PROTO_RESERVE).reserve.credit_bytes;
    const uint64_t least = row_record_bytes_max(entries) + PROTO_FRAME_PAYLOAD_MAX;
    assert_int_equal(window, least + PROTO_FRAME_PAYLOAD_MAX / 4); /* and a step of credit */
    /* Without a mask the cap is nothing. */
    (void)begin(2, true, 8, &window);
    assert_int_equal(window, row_record_bytes_max(0) + PROTO_FRAME_PAYLOAD_MAX / 4 * 5);
}

/* A record that says it is longer than one of the whole vocabulary is not waited for. */
static void no_record_is_longer_than_one_of_the_vocabulary(void **state) {
    (void)state;
    const uint32_t longest = (uint32_t)row_record_bytes_max(FAKE_VOCAB);
    for (uint32_t more = 0; more <= 4; more += 4) {
        dispatch_options options;
        dispatch_request request;
        bt_error error;
        fake_options(&options);
        options.record.sampling_mask_max_tokens = 1 << 20;
        fake_network_destroy(n);
        n = fake_network_create(&options);
        fake_cluster(n, &prefill, &decode);
        fake_request(1, 40, 8, &request);
        request.generation.mask_mode = ROW_MASK_SUPPORT;
        assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
        const proto_attempt attempt = fake_expect(n, decode.control, PROTO_RESERVE).reserve.attempt;
        fake_reserve_reply(n, &decode, attempt, BT_OK);
        fake_expect(n, prefill.streams, PROTO_RUN);
        bt_store_le32(rows, longest + more);
        fake_chunk(n, &decode, attempt, 0, rows, 4, PROTO_FINISH_NONE, 0);
        if (more > 0) expect_violation(1, "a record of an impossible length");
        if (more == 0) assert_null(fake_end_of(n, 1, false));
    }
}

static void the_window_holds_a_row_and_a_frame(void **state) {
    (void)state;
    expect_window(FAKE_VOCAB - 1, FAKE_VOCAB - 1);
    expect_window(FAKE_VOCAB + 1, FAKE_VOCAB);
    expect_window(1 << 20, FAKE_VOCAB);
}

/* Sends rows until the credit is used up; the bytes sent. */
static uint64_t fill(proto_attempt attempt, uint64_t offset, uint64_t granted) {
    const uint32_t many = PROTO_FRAME_PAYLOAD_MAX / ROW_RECORD_HEADER_BYTES;
    while (offset + row_bytes <= granted) {
        uint64_t count = (granted - offset) / row_bytes;
        if (count > many) count = many;
        const size_t bytes = fake_rows(rows, 0, 0) + (size_t)count * row_bytes;
        for (uint64_t i = 0; i < count; i++)
            (void)fake_rows(rows + i * row_bytes, (uint32_t)(i % FAKE_VOCAB), 1);
        n->rows_bytes = 0;
        fake_chunk(n, &decode, attempt, offset, rows, bytes, PROTO_FINISH_NONE, 0);
        offset += bytes;
    }
    return offset;
}

static void credit_comes_back_as_the_reader_takes_rows(void **state) {
    (void)state;
    uint64_t window;
    dispatch_options options;
    fake_options(&options);
    options.stream_window_bytes = 300000;
    fake_network_destroy(n);
    n = fake_network_create(&options);
    fake_cluster(n, &prefill, &decode);
    const proto_attempt attempt = begin(1, true, 1 << 10, &window);
    uint64_t granted = window;
    uint64_t sent = 0;
    /* max_new_tokens bounds the rows, so the window is used up in steps of what it allows. */
    sent = fill(attempt, sent, 1000 * row_bytes);
    dispatch_grant(n->d, 1, 0, 100, n->now_us);
    assert_int_equal(fake_count(n, decode.streams, PROTO_CREDIT), 0); /* not per token */
    dispatch_grant(n->d, 1, 0, UINT64_C(1) << 40, n->now_us);         /* at most what it got */
    dispatch_grant(n->d, 1, 0, 1000, n->now_us);
    proto_message credit;
    while (fake_take(n, decode.streams, PROTO_CREDIT, &credit))
        granted += credit.credit.bytes;
    assert_true(granted <= window + sent);
}

static void more_than_the_credit_is_refused(void **state) {
    (void)state;
    uint64_t window;
    dispatch_options options;
    fake_options(&options);
    options.stream_window_bytes = 1;
    fake_network_destroy(n);
    n = fake_network_create(&options);
    fake_enter(n, &prefill, PROTO_ROLE_PREFILL, 11);
    fake_ready(n, &prefill, 1 << 20);
    fake_enter(n, &decode, PROTO_ROLE_DECODE, 22);
    fake_ready(n, &decode, 1 << 20);
    fake_pair(n, &decode, &prefill, BT_OK);
    const proto_attempt attempt = begin(1, true, 1 << 20, &window);
    uint64_t sent = fill(attempt, 0, window);
    assert_true(window - sent < row_bytes);
    assert_int_equal(fake_count(n, decode.streams, PROTO_CREDIT), 0);
    /* The reader takes all: decode may send that much again, and no byte more. */
    dispatch_grant(n->d, 1, 0, sent, n->now_us);
    const proto_message credit = fake_expect(n, decode.streams, PROTO_CREDIT);
    assert_int_equal(credit.credit.bytes, sent);
    assert_true(proto_attempt_equal(credit.credit.attempt, attempt));
    uint64_t granted = window + credit.credit.bytes;
    sent = fill(attempt, sent, granted);
    /* What was told once is not told again. */
    dispatch_grant(n->d, 1, 0, PROTO_FRAME_PAYLOAD_MAX / 4, n->now_us);
    const proto_message more = fake_expect(n, decode.streams, PROTO_CREDIT);
    assert_int_equal(more.credit.bytes, PROTO_FRAME_PAYLOAD_MAX / 4);
    granted += more.credit.bytes;
    sent = fill(attempt, sent, granted);
    assert_null(fake_end_of(n, 1, false));
    (void)fake_rows(rows, 0, 1);
    fake_chunk(n, &decode, attempt, sent, rows, row_bytes, PROTO_FINISH_NONE, 0);
    expect_violation(1, "more bytes than it had credit for");
}

static void grants_of_others_are_ignored(void **state) {
    (void)state;
    uint64_t window;
    const proto_attempt attempt = begin(1, false, 8, &window);
    assert_true(window == UINT64_MAX); /* sent when complete: never withheld */
    dispatch_grant(n->d, 1, 0, 1 << 20, n->now_us);
    dispatch_grant(n->d, 99, 0, 1 << 20, n->now_us);
    const size_t bytes = fake_rows(rows, 1, 1);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    dispatch_grant(n->d, 1, 0, 1 << 20, n->now_us);
    assert_int_equal(fake_count(n, decode.streams, PROTO_CREDIT), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(rows_may_span_frames),
        TEST(a_gap_is_refused),
        TEST(more_cached_tokens_than_the_prompt_has_are_refused),
        TEST(a_repeated_chunk_is_refused),
        TEST(a_chunk_before_run_is_refused),
        TEST(an_error_before_run_brings_no_rows),
        TEST(an_error_may_overtake_its_reservation),
        TEST(a_row_of_another_mode_is_refused),
        TEST(a_row_that_does_not_answer_is_refused),
        TEST(more_rows_than_asked_for_are_refused),
        TEST(wrong_ends_are_refused),
        TEST(a_stream_may_be_given_up_inside_a_row),
        TEST(a_transfer_that_fails_is_tried_again_at_once),
        TEST(a_stream_needs_a_row_and_a_true_stop),
        TEST(a_chunk_of_a_stranger_closes_the_stranger),
        TEST(no_record_is_longer_than_one_of_the_vocabulary),
        TEST(the_window_holds_a_row_and_a_frame),
        TEST(credit_comes_back_as_the_reader_takes_rows),
        TEST(more_than_the_credit_is_refused),
        TEST(grants_of_others_are_ignored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
