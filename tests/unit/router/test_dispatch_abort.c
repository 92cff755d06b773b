/* Aborts at the dispatch: in every state of a request, of all samples and of one, and what becomes
 * of them when something else happens before decode has answered. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "dispatch_fixture.h"

enum { SAMPLES = 2, NEW_TOKENS = 8, PROMPT = 40 };

static fake_network *n;
static fake_worker prefill, decode;
static uint8_t rows[1 << 16];
static uint64_t offsets[SAMPLES];
static uint32_t counts[SAMPLES];
static bool may_restart; /* as of replies that are sent when complete */

static int set_up(void **state) {
    (void)state;
    n = fake_network_create(NULL);
    fake_cluster(n, &prefill, &decode);
    may_restart = false;
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

static void submit(uint32_t samples, uint32_t max_new_tokens, bool is_scored) {
    dispatch_request request;
    bt_error error;
    fake_request(1, PROMPT, max_new_tokens, &request);
    request.generation.samples = samples;
    request.may_restart = may_restart;
    request.generation.wants_prompt_logprobs = is_scored;
    request.generation.wants_logprob = is_scored;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    memset(offsets, 0, sizeof offsets);
    memset(counts, 0, sizeof counts);
}

static proto_attempt run(uint32_t samples) {
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    fake_reserve_samples(n, &decode, reserve.reserve.attempt, samples);
    (void)fake_expect(n, prefill.streams, PROTO_RUN);
    (void)fake_expect(n, decode.streams, PROTO_PROMPT);
    return reserve.reserve.attempt;
}

static proto_attempt start(uint32_t samples) {
    submit(samples, NEW_TOKENS, false);
    return run(samples);
}

static void stream(proto_attempt attempt, uint32_t sample, uint32_t count, proto_finish finish) {
    const size_t bytes = fake_rows(rows, 100 * sample + counts[sample], count);
    counts[sample] += count;
    n->sample = sample;
    fake_chunk(n, &decode, attempt, offsets[sample], rows, bytes, finish, counts[sample]);
    offsets[sample] += bytes;
    n->sample = 0;
}

static void abort_all(void) {
    dispatch_abort(n->d, 1, PROTO_ALL_SAMPLES, n->now_us);
}

static void expect_abort(const dispatch_end *end, const char *text, uint32_t rows_total) {
    assert_int_equal(end->status, BT_OK);
    assert_int_equal(end->http_status, 200);
    assert_int_equal(end->finish, PROTO_FINISH_ABORT);
    assert_string_equal(end->text, text);
    assert_int_equal(end->rows_total, rows_total);
}

static void expect_all(uint32_t samples, const char *text) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < samples; i++) {
        expect_abort(fake_sample_end_of(n, 1, i, true), text, counts[i]);
        total += counts[i];
    }
    expect_abort(fake_end_of(n, 1, true), text, total);
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    fake_expect_rest(n);
}

/* ---- before there is anything ---------------------------------------------------------------- */

static void in_the_queue(void **state) {
    (void)state;
    fake_drop(n, decode.control); /* nobody to run it for now */
    submit(SAMPLES, NEW_TOKENS, true);
    dispatch_abort(n->d, 1, 1, n->now_us);
    expect_abort(fake_sample_end_of(n, 1, 1, true), "Abort in waiting queue", 0);
    assert_null(fake_end_of(n, 1, false));
    abort_all();
    expect_all(SAMPLES, "Abort in waiting queue");
    abort_all(); /* unknown by now */
    dispatch_abort(n->d, 2, 0, n->now_us);
    assert_int_equal(n->end_count, 1);
}

static void while_reserving(void **state) {
    (void)state;
    submit(SAMPLES, NEW_TOKENS, false);
    const proto_attempt attempt = fake_expect(n, decode.control, PROTO_RESERVE).reserve.attempt;
    abort_all();
    expect_all(SAMPLES, "Abort in waiting queue");
    assert_int_equal(fake_expect(n, decode.control, PROTO_CANCEL).cancel.sample, PROTO_ALL_SAMPLES);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
    assert_int_equal(fake_count(n, decode.control, PROTO_ABORT), 0);
    fake_reserve_samples(n, &decode, attempt, SAMPLES); /* was on its way */
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_RUN), 0);
}

/* One sample alone does not run once the reservation is granted. */
static void one_sample_while_reserving(void **state) {
    (void)state;
    submit(SAMPLES, NEW_TOKENS, false);
    dispatch_abort(n->d, 1, 0, n->now_us);
    expect_abort(fake_sample_end_of(n, 1, 0, true), "Abort in waiting queue", 0);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 0);
    const proto_attempt attempt = run(SAMPLES);
    assert_int_equal(fake_expect(n, decode.control, PROTO_CANCEL).cancel.sample, 0);
    stream(attempt, 1, NEW_TOKENS, PROTO_FINISH_LENGTH);
    expect_abort(fake_end_of(n, 1, true), "Abort in waiting queue", NEW_TOKENS);
    assert_int_equal(fake_sample_end_of(n, 1, 1, true)->finish, PROTO_FINISH_LENGTH);
    fake_expect_rest(n);
}

static void prefill_alone(void **state) {
    (void)state;
    for (uint32_t is_done = 0; is_done < 2; is_done++) {
        again();
        submit(1, 0, true);
        const proto_attempt attempt = fake_expect(n, prefill.streams, PROTO_RUN).run.attempt;
        if (is_done) fake_done(n, &prefill, attempt, BT_OK); /* its log-probabilities are missing */
        abort_all();
        expect_all(1, is_done ? "Aborted" : "Abort before prefill");
        assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 1);
        fake_logprobs(n, &prefill, attempt, 1, PROMPT - 1); /* were on their way */
        assert_int_equal(fake_look(n).protocol_errors_total, 0);
    }
}

/* ---- decode is asked ------------------------------------------------------------------------- */

static void during_prefill_decode_has_nothing(void **state) {
    (void)state;
    const proto_attempt attempt = start(SAMPLES);
    abort_all();
    abort_all();
    assert_null(fake_end_of(n, 1, false));
    const proto_message abort = fake_expect(n, decode.control, PROTO_ABORT);
    assert_true(proto_attempt_equal(abort.abort.attempt, attempt));
    assert_int_equal(abort.abort.sample, PROTO_ALL_SAMPLES);
    assert_int_equal(fake_count(n, decode.control, PROTO_ABORT), 0);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
    for (uint32_t i = 0; i < SAMPLES; i++)
        stream(attempt, i, 0, PROTO_FINISH_ABORT);
    expect_all(SAMPLES, "Abort before prefill");
    assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 1);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 0); /* it knows */
}

static void during_the_handoff(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    fake_done(n, &prefill, attempt, BT_OK);
    abort_all();
    stream(attempt, 0, 0, PROTO_FINISH_ABORT);
    expect_all(1, "Aborted");
}

/* Rows that decode held come with the end, or before it. */
static void held_rows_are_delivered(void **state) {
    (void)state;
    for (uint32_t before = 0; before < 3; before++) {
        again();
        const proto_attempt attempt = start(SAMPLES);
        fake_done(n, &prefill, attempt, BT_OK);
        if (before > 0) stream(attempt, 0, before, PROTO_FINISH_NONE);
        abort_all();
        stream(attempt, 1, 1, PROTO_FINISH_NONE);
        stream(attempt, 0, 3, PROTO_FINISH_ABORT);
        assert_null(fake_end_of(n, 1, false));
        stream(attempt, 1, 0, PROTO_FINISH_ABORT);
        expect_all(SAMPLES, "Aborted");
    }
}

static void one_sample_of_several(void **state) {
    (void)state;
    const proto_attempt attempt = start(SAMPLES);
    stream(attempt, 0, 1, PROTO_FINISH_NONE);
    stream(attempt, 1, 1, PROTO_FINISH_NONE);
    dispatch_abort(n->d, 1, 1, n->now_us);
    dispatch_abort(n->d, 1, SAMPLES, n->now_us); /* there is none */
    assert_int_equal(fake_expect(n, decode.control, PROTO_ABORT).abort.sample, 1);
    assert_int_equal(fake_count(n, decode.control, PROTO_ABORT), 0);
    stream(attempt, 1, 2, PROTO_FINISH_ABORT);
    expect_abort(fake_sample_end_of(n, 1, 1, true), "Aborted", 3);
    stream(attempt, 0, 7, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->finish, PROTO_FINISH_LENGTH);
    fake_expect_rest(n);
}

static void a_finish_that_came_first_stands(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    abort_all();
    stream(attempt, 0, NEW_TOKENS, PROTO_FINISH_LENGTH); /* had not heard of it */
    assert_int_equal(fake_end_of(n, 1, true)->finish, PROTO_FINISH_LENGTH);
    fake_expect_rest(n);
}

/* The prompt's log-probabilities are still to come when rows are there: prefill has sent them. */
static void scored_prompts_are_waited_for_with_rows(void **state) {
    (void)state;
    submit(1, NEW_TOKENS, true);
    const proto_attempt attempt = run(1);
    fake_done(n, &prefill, attempt, BT_OK);
    static uint8_t record[256];
    const token_row row = {.token = 1, .has_logprob = 1, .token_logprob = -1.0f};
    row_record_encode(&row, record);
    const size_t bytes = row_record_bytes(token_row_widths(&row));
    fake_chunk(n, &decode, attempt, 0, record, bytes, PROTO_FINISH_NONE, 0);
    abort_all();
    fake_chunk(n, &decode, attempt, bytes, NULL, 0, PROTO_FINISH_ABORT, 1);
    assert_null(fake_end_of(n, 1, false));
    fake_logprobs(n, &prefill, attempt, 1, PROMPT - 1);
    expect_abort(fake_end_of(n, 1, true), "Aborted", 1);
    fake_expect_rest(n);
}

/* ---- what else may happen -------------------------------------------------------------------- */

static void nobody_aborts_unasked(void **state) {
    (void)state;
    const proto_attempt attempt = start(SAMPLES);
    dispatch_abort(n->d, 1, 0, n->now_us);
    stream(attempt, 1, 1, PROTO_FINISH_ABORT);
    assert_int_equal(fake_look(n).protocol_errors_total, 1);
    expect_abort(fake_sample_end_of(n, 1, 0, true), "Aborted", 0);
    assert_int_equal(fake_sample_end_of(n, 1, 1, true)->status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_PEER_PROTOCOL);
    fake_expect_rest(n);
}

typedef enum mishap {
    MISHAP_OVERFLOW,
    MISHAP_CAPTURE,
    MISHAP_PEER,
    MISHAP_DECODE_GONE,
    MISHAP_PREFILL_GONE,
    MISHAP_PREFILL_FAILED,
    MISHAP_PREFILL_FULL,
    MISHAP_TIME,
    MISHAPS,
} mishap;

static void happen(mishap what, proto_attempt attempt) {
    static const bt_status statuses[] = {BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_CAPTURE,
                                         BT_ERR_PEER_GONE};
    switch (what) {
    case MISHAP_OVERFLOW:
    case MISHAP_CAPTURE:
    case MISHAP_PEER:
        for (uint32_t i = 0; i < SAMPLES && fake_end_of(n, 1, false) == NULL; i++) {
            n->sample = i;
            fake_chunk_error(n, &decode, attempt, statuses[what], counts[i], "it broke");
        }
        n->sample = 0;
        return;
    case MISHAP_DECODE_GONE: fake_drop(n, decode.streams); return;
    case MISHAP_PREFILL_GONE: fake_drop(n, prefill.control); return;
    case MISHAP_PREFILL_FAILED: fake_done(n, &prefill, attempt, BT_ERR_WORKER_INTERNAL); return;
    case MISHAP_PREFILL_FULL: fake_done(n, &prefill, attempt, BT_ERR_REQUEST_FULL); return;
    case MISHAP_TIME: {
        fake_worker *const workers[] = {&prefill, &decode};
        fake_live(n, 700 * 1000, workers, 2);
        return;
    }
    case MISHAPS: break;
    }
}

/* Nothing takes the rows away that are here, and nothing is tried again. */
static void failures_are_aborts(void **state) {
    (void)state;
    for (uint32_t kind = 0; kind < 3; kind++) {
        const bool has_rows = kind > 0;
        for (uint32_t what = 0; what < MISHAPS; what++) {
            const bool is_of_prefill = what >= MISHAP_PREFILL_GONE && what <= MISHAP_PREFILL_FULL;
            if (has_rows && is_of_prefill) continue; /* it is done then */
            again();
            may_restart = kind == 2;
            const proto_attempt attempt = start(SAMPLES);
            if (has_rows) stream(attempt, 0, 2, PROTO_FINISH_NONE);
            abort_all();
            happen((mishap)what, attempt);
            expect_abort(fake_sample_end_of(n, 1, 0, true),
                         has_rows ? "Aborted" : "Abort before prefill", counts[0]);
            assert_int_equal(fake_sample_end_of(n, 1, 1, true)->finish, PROTO_FINISH_ABORT);
            const dispatch_end *end = fake_end_of(n, 1, true);
            assert_int_equal(end->status, BT_OK);
            assert_int_equal(end->finish, PROTO_FINISH_ABORT);
            assert_int_equal(fake_look(n).retries_total, 0);
            fake_expect_rest(n);
        }
    }
}

/* The other sample is tried again, without the one that was aborted. */
static void a_retry_leaves_out_what_was_aborted(void **state) {
    (void)state;
    const proto_attempt first = start(SAMPLES);
    dispatch_abort(n->d, 1, 0, n->now_us);
    fake_done(n, &prefill, first, BT_ERR_WORKER_INTERNAL);
    expect_abort(fake_sample_end_of(n, 1, 0, true), "Abort before prefill", 0);
    (void)fake_expect(n, decode.control, PROTO_CANCEL);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    fake_reserve_samples(n, &decode, reserve.reserve.attempt, SAMPLES);
    assert_int_equal(fake_expect(n, decode.control, PROTO_CANCEL).cancel.sample, 0);
    (void)fake_expect(n, prefill.streams, PROTO_RUN);
    stream(reserve.reserve.attempt, 1, NEW_TOKENS, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_sample_end_of(n, 1, 1, true)->finish, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    fake_expect_rest(n);
}

/* A client that leaves is not interested any more. */
static void a_cancel_behind_an_abort(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    stream(attempt, 0, 1, PROTO_FINISH_NONE);
    abort_all();
    dispatch_cancel(n->d, 1, n->now_us);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 1);
    stream(attempt, 0, 1, PROTO_FINISH_ABORT); /* was on its way */
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    fake_expect_rest(n);
}

/* A decode of an earlier minor version cannot be asked: the rows that came are the reply. */
static void an_older_decode_is_cancelled(void **state) {
    (void)state;
    for (uint32_t samples = 1; samples <= SAMPLES; samples++) {
        fake_network_destroy(n);
        n = fake_network_create(NULL);
        fake_join(n, &prefill, PROTO_ROLE_PREFILL, 11);
        decode = (fake_worker){.role = PROTO_ROLE_DECODE, .incarnation = 22};
        proto_message hello;
        fake_hello(&decode, &hello);
        hello.hello.version_minor = PROTO_MINOR_OF_ABORT - 1;
        fake_dial(n, &decode, &hello);
        decode.welcome = fake_expect(n, decode.control, PROTO_WELCOME).welcome;
        decode.id = decode.welcome.worker_id;
        hello.hello.lane = PROTO_LANE_STREAMS;
        decode.streams = n->next_link++;
        fake_say(n, decode.streams, &hello);
        fake_ready(n, &decode, FAKE_PAGES);
        fake_pair(n, &decode, &prefill, BT_OK);
        const proto_attempt attempt = start(samples);
        stream(attempt, 0, 2, PROTO_FINISH_NONE);
        if (samples > 1) {
            dispatch_abort(n->d, 1, 1, n->now_us);
            assert_int_equal(fake_expect(n, decode.control, PROTO_CANCEL).cancel.sample, 1);
            expect_abort(fake_sample_end_of(n, 1, 1, true), "Aborted", 0);
        }
        abort_all();
        assert_int_equal(fake_expect(n, decode.control, PROTO_CANCEL).cancel.sample,
                         PROTO_ALL_SAMPLES);
        assert_int_equal(fake_count(n, decode.control, PROTO_ABORT), 0);
        expect_all(samples, "Aborted");
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(in_the_queue),
        CASE(while_reserving),
        CASE(one_sample_while_reserving),
        CASE(prefill_alone),
        CASE(during_prefill_decode_has_nothing),
        CASE(during_the_handoff),
        CASE(held_rows_are_delivered),
        CASE(one_sample_of_several),
        CASE(a_finish_that_came_first_stands),
        CASE(scored_prompts_are_waited_for_with_rows),
        CASE(nobody_aborts_unasked),
        CASE(failures_are_aborts),
        CASE(a_retry_leaves_out_what_was_aborted),
        CASE(a_cancel_behind_an_abort),
        CASE(an_older_decode_is_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
