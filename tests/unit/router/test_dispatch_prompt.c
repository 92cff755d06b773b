/* Log-probabilities of the prompt: they come on one connection and what they belong to on two
 * others, so that every order is seen here; and what they must not be. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "dispatch_fixture.h"

enum { PROMPT = 40, FROM = 10, FIRST = FROM + 1, COUNT = PROMPT - FIRST };

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

static void again(void) {
    (void)tear_down(NULL);
    (void)set_up(NULL);
}

static bt_status try_submit(uint32_t from, uint32_t max_new_tokens, uint32_t samples) {
    dispatch_request request;
    bt_error error;
    fake_request(1, PROMPT, max_new_tokens, &request);
    request.generation.wants_logprob = 1;
    request.generation.wants_prompt_logprobs = 1;
    request.generation.prompt_logprobs_from = from;
    request.generation.samples = samples;
    return dispatch_submit(n->d, &request, n->now_us, &error);
}

static proto_attempt start(uint32_t max_new_tokens) {
    assert_int_equal(try_submit(FROM, max_new_tokens, 1), BT_OK);
    if (max_new_tokens > 0) return fake_run(n, &prefill, &decode);
    return fake_expect(n, prefill.streams, PROTO_RUN).run.attempt;
}

static void stream(proto_attempt attempt, uint64_t offset, proto_finish finish, uint32_t total) {
    const token_row row = {.token = 5, .has_logprob = 1, .token_logprob = -1.0f};
    row_record_encode(&row, rows);
    fake_chunk(n, &decode, attempt, offset, rows, ROW_RECORD_HEADER_BYTES, finish, total);
}

static void assert_all_there(void) {
    assert_int_equal(n->next_position, PROMPT);
    for (uint32_t i = 0; i < PROMPT; i++)
        assert_true(n->logprobs[i] == (i < FIRST ? 0.0f : -(float)i));
}

/* ---- alone ----------------------------------------------------------------------------------- */

static void without_tokens_both_are_waited_for(void **state) {
    (void)state;
    for (int done_first = 0; done_first < 2; done_first++) {
        again();
        const proto_attempt attempt = start(0);
        if (done_first) fake_done(n, &prefill, attempt, BT_OK); /* its connection was faster */
        fake_logprobs(n, &prefill, attempt, FIRST, 4);
        fake_logprobs(n, &prefill, attempt, FIRST + 4, COUNT - 5);
        assert_null(fake_end_of(n, 1, false));
        fake_logprobs(n, &prefill, attempt, PROMPT - 1, 1);
        if (!done_first) {
            assert_null(fake_end_of(n, 1, false));
            fake_done(n, &prefill, attempt, BT_OK);
        }
        assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
        assert_int_equal(fake_end_of(n, 1, true)->finish, PROTO_FINISH_LENGTH);
        assert_int_equal(n->positions_calls, 3);
        assert_all_there();
        assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
        assert_int_equal(fake_look(n).protocol_errors_total, 0);
        fake_expect_rest(n);
    }
}

/* Before rows nobody needs them for a reply: the attempt is cancelled, handoff and all. */
static void cancelled_before_rows_nothing_is_waited_for(void **state) {
    (void)state;
    for (uint32_t max_new_tokens = 0; max_new_tokens <= 8; max_new_tokens += 8) {
        again();
        (void)start(max_new_tokens);
        dispatch_cancel_sample(n->d, 1, 0, n->now_us);
        assert_int_equal(fake_sample_end_of(n, 1, 0, true)->status, BT_ERR_REQUEST_CANCELLED);
        assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
        assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 1);
        fake_expect_rest(n);
    }
}

/* Only who has not begun can be full. */
static void full_after_rows_is_a_failure(void **state) {
    (void)state;
    const proto_attempt attempt = start(8);
    stream(attempt, 0, PROTO_FINISH_NONE, 0);
    fake_done(n, &prefill, attempt, BT_ERR_REQUEST_FULL);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_FULL);
    assert_int_equal(fake_end_of(n, 1, true)->rows_total, 1);
    fake_expect_rest(n);
}

/* From the last token on there is nothing to say. */
static void there_may_be_none(void **state) {
    (void)state;
    assert_int_equal(try_submit(PROMPT, 0, 1), BT_ERR_REQUEST_INVALID);
    assert_int_equal(try_submit(PROMPT - 1, 0, 1), BT_OK);
    const proto_attempt attempt = fake_expect(n, prefill.streams, PROTO_RUN).run.attempt;
    fake_done(n, &prefill, attempt, BT_OK);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_int_equal(n->positions_calls, 0);
}

/* ---- with rows ------------------------------------------------------------------------------- */

enum happening { LOGPROBS, DONE, ROWS, HAPPENINGS };

static void tell(enum happening what, proto_attempt attempt) {
    if (what == LOGPROBS) fake_logprobs(n, &prefill, attempt, FIRST, COUNT);
    if (what == DONE) fake_done(n, &prefill, attempt, BT_OK);
    if (what != ROWS) return;
    stream(attempt, 0, PROTO_FINISH_NONE, 0);
    stream(attempt, ROW_RECORD_HEADER_BYTES, PROTO_FINISH_LENGTH, 2);
}

static void every_order_ends_well(void **state) {
    (void)state;
    static const enum happening orders[][HAPPENINGS] = {
        {LOGPROBS, DONE, ROWS}, {LOGPROBS, ROWS, DONE}, {DONE, LOGPROBS, ROWS},
        {DONE, ROWS, LOGPROBS}, {ROWS, LOGPROBS, DONE}, {ROWS, DONE, LOGPROBS},
    };
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        again();
        const proto_attempt attempt = start(8);
        bool has_rows = false, has_logprobs = false;
        for (int k = 0; k < HAPPENINGS; k++) {
            tell(orders[i][k], attempt);
            has_rows |= orders[i][k] == ROWS;
            has_logprobs |= orders[i][k] == LOGPROBS;
            assert_true((fake_sample_end_of(n, 1, 0, false) != NULL) == has_rows);
            assert_true((fake_end_of(n, 1, false) != NULL) == (has_rows && has_logprobs));
        }
        assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
        assert_int_equal(fake_end_of(n, 1, true)->rows_total, 2);
        assert_all_there();
        assert_int_equal(fake_look(n).protocol_errors_total, 0);
        assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
        assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 0);
        fake_expect_rest(n);
    }
}

/* A stop string ends the last sample; its reply still needs them. */
static void a_cancelled_sample_waits_for_them(void **state) {
    (void)state;
    const proto_attempt attempt = start(8);
    stream(attempt, 0, PROTO_FINISH_NONE, 0);
    dispatch_cancel_sample(n->d, 1, 0, n->now_us);
    assert_int_equal(fake_sample_end_of(n, 1, 0, true)->status, BT_ERR_REQUEST_CANCELLED);
    assert_null(fake_end_of(n, 1, false));
    assert_int_equal(fake_expect(n, decode.control, PROTO_CANCEL).cancel.sample, PROTO_ALL_SAMPLES);
    stream(attempt, ROW_RECORD_HEADER_BYTES, PROTO_FINISH_LENGTH, 2); /* was on its way */
    fake_done(n, &prefill, attempt, BT_OK);
    fake_done(n, &prefill, attempt, BT_ERR_PEER_GONE); /* decode took nothing */
    fake_logprobs(n, &prefill, attempt, FIRST, COUNT);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
    assert_all_there();
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    fake_expect_rest(n);
}

static void a_failed_request_does_not_wait_for_them(void **state) {
    (void)state;
    const proto_attempt attempt = start(8);
    fake_done(n, &prefill, attempt, BT_OK);
    fake_chunk_error(n, &decode, attempt, BT_ERR_REQUEST_OVERFLOW, 0, "");
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_OVERFLOW);
    fake_logprobs(n, &prefill, attempt, FIRST, COUNT);
    assert_int_equal(n->positions_calls, 0);
    assert_int_equal(fake_look(n).late_total, 1);
    fake_expect_rest(n);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void after_a_retry_they_start_again(void **state) {
    (void)state;
    const proto_attempt first = start(8);
    fake_logprobs(n, &prefill, first, FIRST, 20);
    fake_done(n, &prefill, first, BT_ERR_WORKER_MEMORY);
    assert_int_equal(fake_look(n).retries_total, 1);
    const uint32_t restarts = n->positions_restarts;
    const proto_attempt second = fake_run(n, &prefill, &decode);
    fake_logprobs(n, &prefill, first, FIRST + 20, 1); /* late */
    assert_int_equal(n->positions_calls, 1);
    fake_logprobs(n, &prefill, second, FIRST, COUNT);
    assert_int_equal(n->positions_restarts, restarts + 1);
    tell(ROWS, second);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_all_there();
    fake_expect_rest(n);
}

static void a_prefill_that_dies_with_them_ends_the_request(void **state) {
    (void)state;
    const proto_attempt attempt = start(8);
    fake_logprobs(n, &prefill, attempt, FIRST, 3);
    tell(ROWS, attempt);
    fake_drop(n, prefill.control);
    assert_int_equal(fake_sample_end_of(n, 1, 0, true)->status, BT_OK);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_PEER_GONE);
    fake_expect_rest(n);
}

static void a_pair_that_breaks_after_the_rows_is_no_harm(void **state) {
    (void)state;
    const proto_attempt attempt = start(8);
    stream(attempt, 0, PROTO_FINISH_NONE, 0);
    fake_pair(n, &decode, &prefill, BT_ERR_PEER_GONE);
    assert_null(fake_end_of(n, 1, false));
    fake_done(n, &prefill, attempt, BT_OK);
    fake_logprobs(n, &prefill, attempt, FIRST, COUNT);
    stream(attempt, ROW_RECORD_HEADER_BYTES, PROTO_FINISH_LENGTH, 2);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
}

static void what_does_not_come_has_a_deadline(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefill, &decode};
    const char *const text = "prefill worker at hostA (pid 11) did not bring the prompt's "
                             "log-probabilities within 10000 ms";
    for (uint32_t max_new_tokens = 0; max_new_tokens <= 8; max_new_tokens += 8) {
        again();
        proto_attempt attempt = start(max_new_tokens);
        for (int try = 0; fake_end_of(n, 1, false) == NULL; try++) {
            assert_true(try < 3);
            fake_logprobs(n, &prefill, attempt, FIRST, COUNT - 1); /* one is missing */
            fake_done(n, &prefill, attempt, BT_OK);
            if (max_new_tokens > 0) tell(ROWS, attempt);
            fake_live(n, 9950, workers, 2);
            assert_null(fake_end_of(n, 1, false));
            fake_live(n, 50, workers, 2);
            if (fake_end_of(n, 1, false) != NULL) break;
            attempt = fake_expect(n, prefill.streams, PROTO_RUN).run.attempt;
        }
        assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_DEADLINE);
        assert_string_equal(fake_end_of(n, 1, true)->text, text);
        assert_int_equal(fake_end_of(n, 1, true)->attempts, max_new_tokens > 0 ? 1 : 3);
        fake_expect_rest(n);
    }
}

/* ---- what is wrong --------------------------------------------------------------------------- */

static void wrong_positions_end_the_attempt(void **state) {
    (void)state;
    static const struct {
        uint32_t first, count;
        const char *what;
    } cases[] = {
        {FIRST - 1, 1, "a gap"},
        {FIRST + 1, 1, "a gap"},
        {FIRST + 2, 1, "a gap"},
        {FIRST, COUNT + 1, "beyond the prompt"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        again();
        proto_attempt attempt = start(8);
        for (int try = 0; try < 3; try++) { /* so that the sentence is seen */
            if (try > 0) attempt = fake_run(n, &prefill, &decode);
            const uint32_t before = n->positions_calls;
            fake_logprobs(n, &prefill, attempt, cases[i].first, cases[i].count);
            assert_int_equal(n->positions_calls, before);
            assert_int_equal(fake_look(n).protocol_errors_total, try + 1);
            assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), try + 1);
        }
        const dispatch_end *end = fake_end_of(n, 1, true);
        assert_int_equal(end->status, BT_ERR_PEER_PROTOCOL);
        assert_non_null(strstr(end->text, cases[i].what));
        assert_non_null(strstr(end->text, "prefill worker at hostA (pid 11) broke the protocol"));
        assert_false(fake_is_closed(n, prefill.streams));
        fake_expect_rest(n);
    }
}

static void wrong_sizes_and_what_nobody_asked_for_end_the_attempt(void **state) {
    (void)state;
    float entries[4] = {0};
    proto_message message = {.kind = PROTO_PROMPT_LOGPROBS, .payload = entries};
    message.prompt_logprobs =
        (proto_prompt_logprobs){.attempt = start(8), .first_position = FIRST, .count = 2};
    message.payload_bytes = 4 * sizeof(float); /* two floats each, one was asked for */
    fake_say(n, prefill.streams, &message);
    assert_int_equal(fake_look(n).protocol_errors_total, 1);
    assert_int_equal(n->positions_calls, 0);
    again();
    fake_submit(n, 1, PROMPT, 8);
    fake_logprobs(n, &prefill, fake_run(n, &prefill, &decode), FIRST, 1);
    assert_int_equal(fake_look(n).protocol_errors_total, 1);
    assert_int_equal(n->positions_calls, 0);
}

static void more_than_all_is_refused(void **state) {
    (void)state;
    const proto_attempt attempt = start(8);
    fake_logprobs(n, &prefill, attempt, FIRST, COUNT);
    stream(attempt, 0, PROTO_FINISH_NONE, 0);
    fake_logprobs(n, &prefill, attempt, PROMPT, 1);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(n->positions_calls, 1);
}

static void a_stranger_is_closed(void **state) {
    (void)state;
    fake_worker other;
    const proto_attempt attempt = start(8);
    fake_join(n, &other, PROTO_ROLE_PREFILL, 33);
    fake_logprobs(n, &other, attempt, FIRST, 1);
    assert_true(fake_is_closed(n, other.control));
    assert_int_equal(n->positions_calls, 0);
    assert_null(fake_end_of(n, 1, false));
    /* Nor before RUN. */
    again();
    assert_int_equal(try_submit(FROM, 8, 1), BT_OK);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    fake_logprobs(n, &prefill, reserve.reserve.attempt, FIRST, 1);
    assert_true(fake_is_closed(n, prefill.streams));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(without_tokens_both_are_waited_for),
        TEST(cancelled_before_rows_nothing_is_waited_for),
        TEST(full_after_rows_is_a_failure),
        TEST(there_may_be_none),
        TEST(every_order_ends_well),
        TEST(a_cancelled_sample_waits_for_them),
        TEST(a_failed_request_does_not_wait_for_them),
        TEST(after_a_retry_they_start_again),
        TEST(a_prefill_that_dies_with_them_ends_the_request),
        TEST(a_pair_that_breaks_after_the_rows_is_no_harm),
        TEST(what_does_not_come_has_a_deadline),
        TEST(wrong_positions_end_the_attempt),
        TEST(wrong_sizes_and_what_nobody_asked_for_end_the_attempt),
        TEST(more_than_all_is_refused),
        TEST(a_stranger_is_closed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
