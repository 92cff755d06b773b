/* The life of one request through the dispatch, from submit to its end: the good way, failures and
 * cancels in every phase, deadlines, late messages, and the words that clients see. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
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

static uint64_t late_total(void) {
    dispatch_view view;
    dispatch_look(n->d, &view);
    return view.late_total;
}

static uint64_t protocol_errors(void) {
    dispatch_view view;
    dispatch_look(n->d, &view);
    return view.protocol_errors_total;
}

/* One row proves the handoff. */
static size_t stream_one(proto_attempt attempt) {
    const size_t bytes = fake_rows(rows, 100, 1);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    return bytes;
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
    fake_expect_rest(n);
}

/* What only prefill knows comes with the metadata row: the first rows have it, and the end. */
static void cached_tokens_come_with_the_rows(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    const proto_attempt attempt = fake_run(n, &prefill, &decode);
    fake_done(n, &prefill, attempt, BT_OK);
    n->cached_tokens = 32;
    const size_t bytes = fake_rows(rows, 100, 1);
    fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    assert_int_equal(n->rows_count, 1);
    assert_int_equal(n->rows_cached_tokens, 32);
    const size_t more = fake_rows(rows, 101, 1);
    fake_chunk(n, &decode, attempt, bytes, rows, more, PROTO_FINISH_STOP, 2);
    assert_int_equal(n->rows_cached_tokens, 32);
    assert_int_equal(fake_end_of(n, 1, true)->cached_tokens, 32);
    fake_expect_rest(n);
}

static void a_long_prompt_travels_in_frames(void **state) {
    (void)state;
    const uint32_t tokens = 150000, part = PROTO_FRAME_PAYLOAD_MAX / 4;
    fake_worker big_prefill, big_decode;
    fake_enter(n, &big_prefill, PROTO_ROLE_PREFILL, 33);
    fake_ready(n, &big_prefill, 20000);
    fake_enter(n, &big_decode, PROTO_ROLE_DECODE, 44);
    fake_ready(n, &big_decode, 20000);
    fake_pair(n, &big_decode, &big_prefill, BT_OK);
    fake_submit(n, 1, tokens, 1);
    const proto_message reserve = fake_expect(n, big_decode.control, PROTO_RESERVE);
    fake_reserve_reply(n, &big_decode, reserve.reserve.attempt, BT_OK);
    uint32_t first = 0;
    proto_message run;
    while (fake_take(n, big_prefill.streams, PROTO_RUN, &run)) {
        assert_int_equal(run.run.first_word, first);
        assert_int_equal(run.run.prompt_tokens, tokens);
        assert_true(run.payload_bytes <= PROTO_FRAME_PAYLOAD_MAX);
        const int32_t *ids = run.payload;
        for (uint32_t i = 0; i < run.payload_bytes / 4; i += 1001)
            assert_int_equal(ids[i], (int32_t)((first + i) % FAKE_VOCAB));
        first += (uint32_t)(run.payload_bytes / 4);
        bt_free(run.payload);
    }
    assert_int_equal(first, tokens);
    assert_true(tokens > 2 * part);
}

static void prefill_only_needs_no_decode(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 0);
    assert_int_equal(fake_count(n, decode.control, PROTO_RESERVE), 0);
    const proto_message run = fake_expect(n, prefill.streams, PROTO_RUN);
    assert_int_equal(run.run.decode_worker_id, 0);
    assert_int_equal(run.run.generation.max_new_tokens, 0);
    fake_done(n, &prefill, run.run.attempt, BT_OK);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_OK);
    assert_int_equal(end->finish, PROTO_FINISH_LENGTH);
    assert_int_equal(end->rows_total, 0);
    assert_int_equal(n->rows_calls, 0);
    fake_expect_rest(n);
}

static void submits_are_checked(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    const int32_t outside = FAKE_VOCAB, negative = -1;
    fake_request(0, 10, 1, &request);
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_INVALID);
    fake_request(1, 0, 1, &request);
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_INVALID);
    fake_request(1, 1, 1, &request);
    request.words = &outside;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_INVALID);
    assert_string_equal(error.text, "token id 1000 is outside the vocabulary");
    request.words = &negative;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_INVALID);
    fake_request(1, 1, 1, &request);
    request.generation.top_p = 0.0f;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_INVALID);
    assert_string_equal(error.text, "top_p is out of range");
    fake_submit(n, 1, 10, 1);
    fake_request(1, 10, 1, &request);
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_DUPLICATE);
    assert_null(fake_end_of(n, 1, false));
    for (uint64_t id = 2; id <= 1000; id++)
        fake_submit(n, id, 10, 1);
    fake_request(1001, 10, 1, &request);
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_FULL);
    assert_int_equal(n->end_count, 0);
}

static void what_can_never_fit_is_refused(void **state) {
    (void)state;
    const uint32_t room = FAKE_PAGES * FAKE_PAGE_TOKENS;
    fake_submit(n, 1, room - 100, 102); /* one token too many: the last one's KV is not written */
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_TOO_LARGE);
    assert_int_equal(end->http_status, 400);
    assert_non_null(strstr(end->text, "1500 tokens plus max_new_tokens 102"));
    assert_non_null(strstr(end->text, "1600"));
    fake_submit(n, 2, room - 100, 101);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    proto_message reply;
    memset(&reply, 0, sizeof reply);
    reply.kind = PROTO_RESERVATION;
    reply.reservation.attempt = reserve.reserve.attempt;
    reply.reservation.status = BT_ERR_REQUEST_TOO_LARGE;
    memcpy(reply.reservation.text, "needs 101 pages", 16);
    fake_say(n, decode.control, &reply); /* decode counts differently, and its word counts */
    end = fake_end_of(n, 2, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_TOO_LARGE);
    assert_string_equal(end->text, "needs 101 pages");
    fake_expect_rest(n);
}

/* ---- the client's true status ---------------------------------------------------------------- */

static const char overflow_text[] =
    "Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of cutoff ties. "
    "Lower top_k to leave more headroom or increase the server limit.";
static const char capture_text[] =
    "The sampling backend selected a token outside its captured sampling support.";

static void an_overflow_at_prefill_is_a_400(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    const proto_attempt attempt = fake_run(n, &prefill, &decode);
    fake_done(n, &prefill, attempt, BT_ERR_REQUEST_OVERFLOW);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->http_status, 400);
    assert_string_equal(end->text, overflow_text);
    assert_int_equal(end->attempts, 1);
    /* Decode is told at once; it would wait for its deadline otherwise. */
    const proto_message cancel = fake_expect(n, decode.control, PROTO_CANCEL);
    assert_true(proto_attempt_equal(cancel.cancel.attempt, attempt));
    assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
    fake_expect_rest(n);
}

static void a_broken_capture_is_a_500(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    fake_done(n, &prefill, fake_run(n, &prefill, &decode), BT_ERR_REQUEST_CAPTURE);
    assert_int_equal(fake_end_of(n, 1, true)->http_status, 500);
    assert_string_equal(fake_end_of(n, 1, true)->text, capture_text);
    fake_submit(n, 2, 40, 8);
    const proto_attempt attempt = fake_run(n, &prefill, &decode);
    (void)stream_one(attempt);
    fake_chunk_error(n, &decode, attempt, BT_ERR_REQUEST_CAPTURE, 1,
                     "The sampling backend did not return captured sampling support.");
    assert_string_equal(fake_end_of(n, 2, true)->text,
                        "The sampling backend did not return captured sampling support.");
}

static void an_overflow_in_mid_stream_keeps_the_rows(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    const proto_attempt attempt = fake_run(n, &prefill, &decode);
    (void)stream_one(attempt);
    fake_chunk_error(n, &decode, attempt, BT_ERR_REQUEST_OVERFLOW, 1, "");
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_OVERFLOW);
    assert_int_equal(end->finish, PROTO_FINISH_ERROR);
    assert_int_equal(end->rows_total, 1);
    assert_string_equal(end->text, overflow_text);
    fake_expect_rest(n);
}

/* ---- retries --------------------------------------------------------------------------------- */

enum phase { PHASE_RESERVING, PHASE_RUNNING, PHASE_DONE, PHASE_STREAMING, PHASES };

/* Brings request `id` into a phase; its attempt. */
static proto_attempt bring(enum phase phase, uint64_t id) {
    fake_submit(n, id, 40, 8);
    if (phase == PHASE_RESERVING) {
        proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
        return reserve.reserve.attempt;
    }
    const proto_attempt attempt = fake_run(n, &prefill, &decode);
    if (phase >= PHASE_DONE) fake_done(n, &prefill, attempt, BT_OK);
    if (phase == PHASE_STREAMING) (void)stream_one(attempt);
    return attempt;
}

static void a_dead_worker_is_retried_elsewhere(void **state) {
    (void)state;
    for (int kill_decode = 0; kill_decode <= 1; kill_decode++) {
        for (int phase = PHASE_RESERVING; phase < PHASE_STREAMING; phase++) {
            fake_network_destroy(n);
            n = fake_network_create(NULL);
            fake_cluster(n, &prefill, &decode);
            const proto_attempt first = bring((enum phase)phase, 1);
            fake_worker other_prefill = prefill, other_decode = decode;
            if (kill_decode) {
                fake_join(n, &other_decode, PROTO_ROLE_DECODE, 44);
            } else {
                fake_join(n, &other_prefill, PROTO_ROLE_PREFILL, 33);
            }
            fake_pair(n, &other_decode, &other_prefill, BT_OK);
            fake_drop(n, kill_decode ? decode.control : prefill.streams);
            assert_true(fake_is_closed(n, kill_decode ? decode.streams : prefill.control));
            assert_int_equal(n->end_count, 0);
            /* The leg that lives is cancelled before the next try, with a new name. */
            if (kill_decode) {
                assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL),
                                 phase == PHASE_RESERVING ? 0 : 1);
            } else {
                assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 1);
            }
            const proto_attempt second = fake_run(n, &other_prefill, &other_decode);
            assert_false(proto_attempt_equal(first, second));
            fake_done(n, &other_prefill, second, BT_OK);
            const size_t bytes = fake_rows(rows, 1, 1);
            fake_chunk(n, &other_decode, second, 0, rows, bytes, PROTO_FINISH_LENGTH, 1);
            assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
            assert_int_equal(fake_end_of(n, 1, true)->attempts, 2);
            fake_expect_rest(n);
        }
    }
}

static void a_dead_decode_ends_a_stream_honestly(void **state) {
    (void)state;
    (void)bring(PHASE_STREAMING, 1);
    fake_drop(n, decode.streams);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_PEER_GONE);
    assert_int_equal(end->http_status, 503);
    assert_int_equal(end->rows_total, 1);
    assert_string_equal(end->text,
                        "decode worker at hostA (pid 22) is gone: its streams connection ended");
}

static void a_dead_prefill_does_not_touch_streams(void **state) {
    (void)state;
    const proto_attempt attempt = bring(PHASE_STREAMING, 1);
    fake_drop(n, prefill.control);
    assert_null(fake_end_of(n, 1, false));
    fake_chunk(n, &decode, attempt,
               row_record_bytes((row_widths){.mask_mode = 0, .support_count = 0}), NULL, 0,
               PROTO_FINISH_LENGTH, 1);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
}

static void failures_of_the_cluster_are_tried_three_times(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    for (int i = 0; i < 3; i++) {
        const proto_attempt attempt = fake_run(n, &prefill, &decode);
        assert_null(fake_end_of(n, 1, false));
        if (i == 0) fake_done(n, &prefill, attempt, BT_ERR_PEER_GONE);
        if (i == 1) {
            fake_chunk_error(n, &decode, attempt, BT_ERR_REQUEST_CORRUPT, 0, "chunk 3 is corrupt");
            /* decode knows that it is over, prefill is told */
            fake_expect(n, prefill.streams, PROTO_CANCEL);
        }
        if (i == 2) fake_chunk_error(n, &decode, attempt, BT_ERR_REQUEST_CORRUPT, 0, "and again");
    }
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_CORRUPT);
    assert_int_equal(end->http_status, 500);
    assert_string_equal(end->text, "and again");
    assert_int_equal(end->attempts, 3);
    fake_expect_rest(n);
}

static void a_worker_that_gives_up_is_not_a_client_that_left(void **state) {
    (void)state;
    static const bt_status statuses[] = {BT_ERR_REQUEST_CANCELLED, BT_ERR_REQUEST_DUPLICATE};
    static const bt_status told[] = {BT_ERR_PEER_GONE, BT_ERR_REQUEST_CORRUPT};
    static const int http[] = {503, 500};
    for (uint64_t i = 0; i < 2; i++) {
        fake_submit(n, i + 1, 40, 8);
        for (int tries = 0; tries < 3; tries++)
            fake_done(n, &prefill, fake_run(n, &prefill, &decode), statuses[i]);
        assert_int_equal(fake_end_of(n, i + 1, true)->status, told[i]);
        assert_int_equal(fake_end_of(n, i + 1, true)->http_status, http[i]);
        fake_forget(n);
    }
    fake_expect_rest(n);
}

static void the_clients_mistakes_are_not_retried(void **state) {
    (void)state;
    static const bt_status statuses[] = {BT_ERR_REQUEST_INVALID, BT_ERR_REQUEST_UNSUPPORTED,
                                         BT_ERR_CALLER_ARGUMENT};
    /* A worker's own mistake is never the client's. */
    static const bt_status told[] = {BT_ERR_REQUEST_INVALID, BT_ERR_REQUEST_UNSUPPORTED,
                                     BT_ERR_WORKER_INTERNAL};
    static const int http[] = {400, 400, 500};
    for (uint64_t i = 0; i < 3; i++) {
        fake_submit(n, i + 1, 40, 8);
        fake_done(n, &prefill, fake_run(n, &prefill, &decode), statuses[i]);
        assert_int_equal(fake_end_of(n, i + 1, true)->status, told[i]);
        assert_int_equal(fake_end_of(n, i + 1, true)->http_status, http[i]);
        fake_forget(n);
        fake_submit(n, i + 11, 40, 8);
        const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
        fake_reserve_reply(n, &decode, reserve.reserve.attempt, statuses[i]);
        assert_int_equal(fake_end_of(n, i + 11, true)->status, told[i]);
    }
    fake_expect_rest(n);
}

static void a_failed_pair_is_avoided(void **state) {
    (void)state;
    fake_worker other;
    fake_join(n, &other, PROTO_ROLE_PREFILL, 33);
    fake_pair(n, &decode, &other, BT_OK);
    for (uint64_t id = 1; id <= 20; id++) {
        fake_submit(n, id, 40, 8);
        proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
        const uint32_t first = reserve.reserve.prefill_worker_id;
        fake_reserve_reply(n, &decode, reserve.reserve.attempt, BT_ERR_WORKER_INTERNAL);
        reserve = fake_expect(n, decode.control, PROTO_RESERVE);
        assert_int_not_equal(reserve.reserve.prefill_worker_id, first);
        dispatch_cancel(n->d, id, n->now_us);
    }
}

static void a_full_prefill_is_asked_again_a_little_later(void **state) {
    (void)state;
    fake_submit(n, 1, 40, 8);
    for (int i = 0; i < 10; i++) { /* more often than there are tries: it is no failure */
        fake_done(n, &prefill, fake_run(n, &prefill, &decode), BT_ERR_REQUEST_FULL);
        fake_expect(n, decode.control, PROTO_CANCEL);
        assert_int_equal(fake_count(n, decode.control, PROTO_RESERVE), 0);
        fake_tick(n, 25);
        fake_worker *const workers[] = {&prefill, &decode};
        fake_live(n, 50, workers, 2);
    }
    assert_null(fake_end_of(n, 1, false));
    (void)fake_run(n, &prefill, &decode);
}

/* ---- cancels and late messages --------------------------------------------------------------- */

static void a_cancel_works_in_every_phase(void **state) {
    (void)state;
    for (int phase = PHASE_RESERVING; phase < PHASES; phase++) {
        const uint64_t id = 10 + (uint64_t)phase;
        const proto_attempt attempt = bring((enum phase)phase, id);
        dispatch_cancel(n->d, id, n->now_us);
        const dispatch_end *end = fake_end_of(n, id, true);
        assert_int_equal(end->status, BT_ERR_REQUEST_CANCELLED);
        assert_int_equal(end->rows_total, phase == PHASE_STREAMING ? 1 : 0);
        proto_message cancel = fake_expect(n, decode.control, PROTO_CANCEL);
        assert_true(proto_attempt_equal(cancel.cancel.attempt, attempt));
        const bool at_prefill = phase == PHASE_RUNNING || phase == PHASE_DONE;
        assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), at_prefill ? 1 : 0);
        fake_forget(n);
        fake_expect_rest(n);
        dispatch_cancel(n->d, id, n->now_us); /* unknown now */
    }
    assert_int_equal(n->end_count, PHASES);
}

static void a_queued_request_can_be_cancelled(void **state) {
    (void)state;
    for (uint64_t id = 1; id <= 9; id++)
        fake_submit(n, id, FAKE_STEP_TOKENS, 8); /* the third waits for prefill */
    dispatch_view view;
    dispatch_look(n->d, &view);
    assert_int_equal(view.requests_queued, 7);
    static const uint64_t order[] = {5, 9, 3, 4, 8, 6, 7, 1, 2};
    for (int i = 0; i < 9; i++) {
        dispatch_cancel(n->d, order[i], n->now_us);
        assert_int_equal(fake_end_of(n, order[i], true)->status, BT_ERR_REQUEST_CANCELLED);
        assert_int_equal(fake_end_of(n, order[i], true)->attempts, order[i] <= 2 ? 1 : 0);
    }
    fake_expect_rest(n);
}

static void late_messages_are_ignored_and_counted(void **state) {
    (void)state;
    const proto_attempt attempt = bring(PHASE_RUNNING, 1);
    dispatch_cancel(n->d, 1, n->now_us);
    const uint64_t before = late_total();
    fake_done(n, &prefill, attempt, BT_OK);
    fake_done(n, &prefill, attempt, BT_ERR_PEER_GONE);
    fake_reserve_reply(n, &decode, attempt, BT_OK);
    const size_t bytes = fake_rows(rows, 1, 1);
    fake_chunk(n, &decode, attempt, 77, rows, bytes, PROTO_FINISH_NONE, 0);
    fake_chunk_error(n, &decode, attempt, BT_ERR_REQUEST_CANCELLED, 5, "cancelled");
    /* of another life of this router */
    const proto_attempt foreign = {.router_incarnation = 1, .counter = attempt.counter};
    fake_reserve_reply(n, &decode, foreign, BT_OK);
    assert_int_equal(late_total(), before + 6);
    assert_int_equal(protocol_errors(), 0);
    assert_int_equal(n->end_count, 1);
    assert_int_equal(n->rows_calls, 0);
    assert_false(fake_is_closed(n, decode.streams));
}

static void prefill_may_be_heard_after_the_stream_began(void **state) {
    (void)state;
    const proto_attempt attempt = bring(PHASE_RUNNING, 1);
    const size_t bytes = stream_one(attempt);
    fake_done(n, &prefill, attempt, BT_OK);            /* its connection was slower than decode's */
    fake_done(n, &prefill, attempt, BT_ERR_PEER_GONE); /* the ack was lost; decode has proven it */
    assert_null(fake_end_of(n, 1, false));
    fake_chunk(n, &decode, attempt, bytes, NULL, 0, PROTO_FINISH_LENGTH, 1);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_int_equal(protocol_errors(), 0);
}

/* ---- deadlines ------------------------------------------------------------------------------- */

static void every_wait_has_a_deadline_that_names_it(void **state) {
    (void)state;
    static const char *const texts[PHASES] = {
        "decode worker at hostA (pid 22) did not answer a reservation within 2000 ms",
        "prefill worker at hostA (pid 11) did not compute the prompt within 10000 ms",
        "decode worker at hostA (pid 22) did not prove the handoff from prefill worker at hostA "
        "(pid 11) within 10000 ms",
        "the request's 60000 ms passed while streaming from decode worker at hostA (pid 22)",
    };
    fake_worker *const workers[] = {&prefill, &decode};
    for (int phase = 0; phase < PHASES; phase++) {
        fake_network_destroy(n);
        n = fake_network_create(NULL);
        fake_cluster(n, &prefill, &decode);
        fake_submit(n, 1, 40, 8);
        for (int try = 0; try < 3 && fake_end_of(n, 1, false) == NULL; try++) {
            if (phase == PHASE_RESERVING) {
                fake_expect(n, decode.control, PROTO_RESERVE);
            } else {
                const proto_attempt attempt = fake_run(n, &prefill, &decode);
                if (phase >= PHASE_DONE) fake_done(n, &prefill, attempt, BT_OK);
                if (phase == PHASE_STREAMING) (void)stream_one(attempt);
            }
            const uint64_t wait = phase == PHASE_RESERVING  ? 2000
                                  : phase < PHASE_STREAMING ? 10000
                                                            : 60000;
            fake_live(n, wait - 50, workers, 2);
            assert_null(fake_end_of(n, 1, false));
            fake_live(n, 50, workers, 2);
        }
        const dispatch_end *end = fake_end_of(n, 1, true);
        assert_int_equal(end->status, BT_ERR_REQUEST_DEADLINE);
        assert_int_equal(end->http_status, 503);
        assert_string_equal(end->text, texts[phase]);
        assert_int_equal(end->attempts, phase == PHASE_STREAMING ? 1 : 3);
        fake_expect_rest(n);
    }
}

static void a_request_may_bring_its_own_time(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    fake_worker *const workers[] = {&prefill, &decode};
    fake_request(1, 40, 8, &request);
    request.timeout_ms = 500;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    assert_true(reserve.reserve.deadline_ms <= 501); /* nobody works longer than it lives */
    fake_live(n, 500, workers, 2);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_DEADLINE);
    assert_non_null(strstr(end->text, "while reserving at decode worker at hostA (pid 22)"));
}

static void a_queued_request_does_not_wait_forever(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefill, &decode};
    dispatch_request request;
    bt_error error;
    for (uint64_t id = 1; id <= 2; id++) {
        fake_submit(n, id, FAKE_STEP_TOKENS, 8);
        (void)fake_run(n, &prefill, &decode);
    }
    prefill.queued_tokens = 2 * FAKE_STEP_TOKENS; /* it computes nothing */
    fake_request(3, 40, 8, &request);
    request.timeout_ms = 500;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    fake_live(n, 500, workers, 2);
    assert_string_equal(fake_end_of(n, 3, true)->text,
                        "queued for 500 ms and no pair of workers had room");
}

static void without_a_cluster_nobody_waits(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    fake_network_destroy(n);
    n = fake_network_create(NULL);
    fake_request(1, 40, 8, &request);
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_NO_WORKER);
    fake_join(n, &prefill, PROTO_ROLE_PREFILL, 11);
    fake_join(n, &decode, PROTO_ROLE_DECODE, 22); /* not a pair yet */
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_NO_WORKER);
    fake_pair(n, &decode, &prefill, BT_OK);
    fake_drop(n, decode.control);
    assert_false(n->is_ready);
    /* The cluster was there: a short restart is waited for ... */
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    fake_worker *const workers[] = {&prefill};
    fake_live(n, 4950, workers, 1);
    assert_null(fake_end_of(n, 1, false));
    /* ... a long one is not. */
    fake_live(n, 50, workers, 1);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_NO_WORKER);
    assert_int_equal(end->http_status, 503);
    fake_request(2, 40, 8, &request);
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_ERR_REQUEST_NO_WORKER);
    /* A restart of the decode makes it serve again. */
    fake_join(n, &decode, PROTO_ROLE_DECODE, 44);
    fake_pair(n, &decode, &prefill, BT_OK);
    fake_submit(n, 2, 40, 8);
    (void)fake_run(n, &prefill, &decode);
}

#ifdef BT_FAULT
/* One whole request, split over frames; false: it could not even be submitted. */
static bool try_whole_request(void) {
    dispatch_request request;
    bt_error error;
    fake_request(1, 40, 8, &request);
    const bt_status status = dispatch_submit(n->d, &request, n->now_us, &error);
    if (status != BT_OK) {
        assert_int_equal(status, BT_ERR_WORKER_MEMORY);
        return false;
    }
    proto_message message;
    while (fake_end_of(n, 1, false) == NULL) {
        if (fake_take(n, decode.control, PROTO_RESERVE, &message)) {
            fake_reserve_reply(n, &decode, message.reserve.attempt, BT_OK);
        } else if (fake_take(n, prefill.streams, PROTO_RUN, &message)) {
            bt_free(message.payload);
            const size_t bytes = fake_rows(rows, 1, 2);
            fake_chunk(n, &decode, message.run.attempt, 0, rows, 30, PROTO_FINISH_NONE, 0);
            fake_chunk(n, &decode, message.run.attempt, 30, rows + 30, bytes - 30,
                       PROTO_FINISH_LENGTH, 2);
        } else {
            fake_tick(n, 100);
        }
    }
    return true;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    uint64_t visits = 1;
    for (uint64_t nth = 1; nth <= visits; nth++) { /* until one is not reached */
        (void)tear_down(NULL);
        (void)set_up(NULL);
        bt_fault_set(BT_FAULT_ALLOC, nth);
        const bool was_submitted = try_whole_request();
        visits = bt_fault_visits(BT_FAULT_ALLOC) >= nth ? nth + 1 : nth;
        bt_fault_set(BT_FAULT_ALLOC, 0);
        if (was_submitted) {
            const dispatch_end *end = fake_end_of(n, 1, true);
            assert_true(end->status == BT_OK || end->status == BT_ERR_WORKER_MEMORY);
            assert_int_equal(protocol_errors(), 0);
        }
        fake_expect_rest(n);
    }
    assert_true(visits > 4);
}
#endif

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_request_goes_its_way),
        TEST(cached_tokens_come_with_the_rows),
        TEST(a_long_prompt_travels_in_frames),
        TEST(prefill_only_needs_no_decode),
        TEST(submits_are_checked),
        TEST(what_can_never_fit_is_refused),
        TEST(an_overflow_at_prefill_is_a_400),
        TEST(a_broken_capture_is_a_500),
        TEST(an_overflow_in_mid_stream_keeps_the_rows),
        TEST(a_dead_worker_is_retried_elsewhere),
        TEST(a_dead_decode_ends_a_stream_honestly),
        TEST(a_dead_prefill_does_not_touch_streams),
        TEST(failures_of_the_cluster_are_tried_three_times),
        TEST(a_worker_that_gives_up_is_not_a_client_that_left),
        TEST(the_clients_mistakes_are_not_retried),
        TEST(a_failed_pair_is_avoided),
        TEST(a_full_prefill_is_asked_again_a_little_later),
        TEST(a_cancel_works_in_every_phase),
        TEST(a_queued_request_can_be_cancelled),
        TEST(late_messages_are_ignored_and_counted),
        TEST(prefill_may_be_heard_after_the_stream_began),
        TEST(every_wait_has_a_deadline_that_names_it),
        TEST(a_request_may_bring_its_own_time),
        TEST(a_queued_request_does_not_wait_forever),
        TEST(without_a_cluster_nobody_waits),
#ifdef BT_FAULT
        TEST(every_allocation_may_fail),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
