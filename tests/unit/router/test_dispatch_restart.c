/* Requests whose owner can take back what it was handed: a failure of the cluster after rows is
 * tried again from the first row, with the same words and the same seed, a bounded number of times;
 * samples that have ended stand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "dispatch_fixture.h"

enum { PROMPT = 40, NEW_TOKENS = 8, SAMPLES_MAX = 4, SEED = 4711 };

static fake_network *n;
static fake_worker prefill, decodes[2];
static uint8_t rows[1 << 12];
static uint64_t offsets[SAMPLES_MAX];
static uint32_t counts[SAMPLES_MAX];

static int set_up(void **state) {
    (void)state;
    n = fake_network_create(NULL);
    fake_cluster(n, &prefill, &decodes[0]);
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

/* The second decode, so that the first of two is chosen by being alone. */
static void join_other(void) {
    fake_join(n, &decodes[1], PROTO_ROLE_DECODE, 33);
    fake_pair(n, &decodes[1], &prefill, BT_OK);
}

static void submit(uint64_t id, uint32_t samples) {
    dispatch_request request;
    bt_error error;
    fake_request(id, PROMPT, NEW_TOKENS, &request);
    request.generation.samples = samples;
    request.generation.seed = SEED;
    request.may_restart = true;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
}

/* Reserved and running at that decode, with every word and the seed; the streams begin. */
static proto_attempt run_at(const fake_worker *decode) {
    proto_message run, prompt;
    const proto_message reserve = fake_expect(n, decode->control, PROTO_RESERVE);
    const uint32_t samples = reserve.reserve.generation.samples;
    assert_int_equal(reserve.reserve.generation.seed, SEED);
    fake_reserve_samples(n, decode, reserve.reserve.attempt, samples);
    assert_true(fake_take(n, prefill.streams, PROTO_RUN, &run));
    assert_true(fake_take(n, decode->streams, PROTO_PROMPT, &prompt));
    assert_int_equal(run.run.generation.seed, SEED);
    assert_int_equal(run.run.slot_count, samples);
    assert_int_equal(run.payload_bytes, PROMPT * sizeof(int32_t));
    assert_int_equal(prompt.payload_bytes, run.payload_bytes);
    assert_memory_equal(prompt.payload, run.payload, run.payload_bytes);
    for (int32_t i = 0; i < PROMPT; i++)
        assert_int_equal(((const int32_t *)run.payload)[i], i);
    proto_message_drop_payload(&run);
    proto_message_drop_payload(&prompt);
    memset(offsets, 0, sizeof offsets);
    memset(counts, 0, sizeof counts);
    return run.run.attempt;
}

static void stream(const fake_worker *decode, proto_attempt attempt, uint32_t sample,
                   uint32_t count, proto_finish finish) {
    const size_t bytes = fake_rows(rows, 100 * sample + counts[sample], count);
    counts[sample] += count;
    n->sample = sample;
    fake_chunk(n, decode, attempt, offsets[sample], rows, bytes, finish, counts[sample]);
    offsets[sample] += bytes;
    n->sample = 0;
}

static void break_sample(const fake_worker *decode, proto_attempt attempt, uint32_t sample,
                         bt_status status) {
    n->sample = sample;
    fake_chunk_error(n, decode, attempt, status, counts[sample], "it broke");
    n->sample = 0;
}

/* ---- one sample ------------------------------------------------------------------------------ */

static void a_dead_decode_is_followed_by_another(void **state) {
    (void)state;
    for (int of_streams = 0; of_streams <= 1; of_streams++) {
        again();
        submit(1, 1);
        const proto_attempt first = run_at(&decodes[0]);
        fake_done(n, &prefill, first, BT_OK);
        stream(&decodes[0], first, 0, 5, PROTO_FINISH_NONE);
        join_other();
        fake_drop(n, of_streams ? decodes[0].streams : decodes[0].control);
        assert_int_equal(n->restarts, 1);
        assert_null(fake_end_of(n, 1, false));
        n->rows_bytes = 0;
        const proto_attempt second = run_at(&decodes[1]);
        assert_false(proto_attempt_equal(first, second));
        fake_done(n, &prefill, second, BT_OK);
        stream(&decodes[1], second, 0, NEW_TOKENS, PROTO_FINISH_LENGTH);
        const dispatch_end *end = fake_end_of(n, 1, true);
        assert_int_equal(end->status, BT_OK);
        assert_int_equal(end->attempts, 2);
        assert_int_equal(end->rows_total, NEW_TOKENS);
        assert_int_equal(n->rows_bytes, offsets[0]);
        assert_memory_equal(n->rows, rows, n->rows_bytes);
        assert_int_equal(n->restarts, 1);
        assert_int_equal(fake_look(n).retries_total, 1);
        fake_expect_rest(n);
    }
}

/* A record that was cut goes with the attempt, and so does what decode said of itself. */
static void nothing_of_the_first_try_is_left(void **state) {
    (void)state;
    dispatch_options options;
    const bt_block_pool_options none = {.idle_bytes_max = 0};
    fake_options(&options);
    assert_int_equal(bt_block_pool_create(&none, &options.blocks), BT_OK);
    fake_network_destroy(n);
    n = fake_network_create(&options);
    fake_cluster(n, &prefill, &decodes[0]);
    submit(1, 1);
    const proto_attempt first = run_at(&decodes[0]);
    n->cached_tokens = 32;
    stream(&decodes[0], first, 0, 2, PROTO_FINISH_NONE);
    const size_t bytes = fake_rows(rows, 2, 1);
    fake_chunk(n, &decodes[0], first, offsets[0], rows, bytes - 5, PROTO_FINISH_NONE, 0);
    assert_true(bt_block_pool_used_bytes(options.blocks) > 0);
    join_other();
    fake_drop(n, decodes[0].control);
    assert_int_equal(bt_block_pool_used_bytes(options.blocks), 0);
    const proto_attempt second = run_at(&decodes[1]);
    n->cached_tokens = 16;
    stream(&decodes[1], second, 0, NEW_TOKENS - 1, PROTO_FINISH_NONE);
    assert_int_equal(n->rows_cached_tokens, 16);
    stream(&decodes[1], second, 0, 1, PROTO_FINISH_LENGTH);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_OK);
    assert_int_equal(end->cached_tokens, 16);
    fake_network_destroy(n);
    bt_block_pool_destroy(options.blocks);
    n = fake_network_create(NULL);
}

/* What comes late of the first try changes nothing, and is counted. */
static void the_first_try_is_not_heard_any_more(void **state) {
    (void)state;
    submit(1, 1);
    const proto_attempt first = run_at(&decodes[0]);
    stream(&decodes[0], first, 0, 3, PROTO_FINISH_NONE);
    break_sample(&decodes[0], first, 0, BT_ERR_WORKER_MEMORY);
    assert_int_equal(n->restarts, 1);
    const uint64_t late = fake_look(n).late_total;
    const uint32_t handed = n->rows_count;
    stream(&decodes[0], first, 0, 1, PROTO_FINISH_NONE);
    assert_int_equal(fake_look(n).late_total, late + 1);
    assert_int_equal(n->rows_count, handed);
    const proto_attempt second = run_at(&decodes[0]);
    stream(&decodes[0], second, 0, NEW_TOKENS, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->rows_total, NEW_TOKENS);
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    fake_expect_rest(n);
}

static void tries_are_bounded(void **state) {
    (void)state;
    submit(1, 1);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(n->restarts, i);
        const proto_attempt attempt = run_at(&decodes[0]);
        stream(&decodes[0], attempt, 0, 2 + i, PROTO_FINISH_NONE);
        assert_null(fake_end_of(n, 1, false));
        break_sample(&decodes[0], attempt, 0, BT_ERR_PEER_GONE);
    }
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_PEER_GONE);
    assert_int_equal(end->http_status, 503);
    assert_string_equal(end->text, "it broke");
    assert_int_equal(end->attempts, 3);
    assert_int_equal(end->rows_total, 4); /* of the last try: nobody took them back */
    assert_int_equal(n->restarts, 2);
    fake_expect_rest(n);
}

/* Before any row there is nothing to take back. */
static void without_rows_nothing_is_taken_back(void **state) {
    (void)state;
    submit(1, 1);
    fake_done(n, &prefill, run_at(&decodes[0]), BT_ERR_PEER_GONE);
    assert_int_equal(n->restarts, 0);
    stream(&decodes[0], run_at(&decodes[0]), 0, 1, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->attempts, 2);
}

/* Rows that no honest decode sends, in the middle: another try may go better. */
static void a_liar_is_followed_by_another_try(void **state) {
    (void)state;
    submit(1, 1);
    const proto_attempt first = run_at(&decodes[0]);
    stream(&decodes[0], first, 0, 2, PROTO_FINISH_NONE);
    offsets[0] += 4;
    stream(&decodes[0], first, 0, 1, PROTO_FINISH_NONE);
    assert_int_equal(fake_look(n).protocol_errors_total, 1);
    assert_int_equal(n->restarts, 1);
    assert_int_equal(fake_count(n, decodes[0].control, PROTO_CANCEL), 1);
    stream(&decodes[0], run_at(&decodes[0]), 0, NEW_TOKENS, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    fake_expect_rest(n);
}

static void what_another_try_cannot_mend_is_the_end(void **state) {
    (void)state;
    static const bt_status statuses[] = {BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_CAPTURE,
                                         BT_ERR_REQUEST_INVALID};
    for (uint64_t i = 0; i < 3; i++) {
        submit(i + 1, 1);
        const proto_attempt attempt = run_at(&decodes[0]);
        stream(&decodes[0], attempt, 0, 2, PROTO_FINISH_NONE);
        break_sample(&decodes[0], attempt, 0, statuses[i]);
        assert_int_equal(fake_end_of(n, i + 1, true)->status, statuses[i]);
        assert_int_equal(fake_end_of(n, i + 1, true)->rows_total, 2);
        fake_forget(n);
    }
    assert_int_equal(n->restarts, 0);
    fake_expect_rest(n);
}

static void the_requests_time_is_over_all_tries(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    fake_request(1, PROMPT, NEW_TOKENS, &request);
    request.generation.seed = SEED;
    request.may_restart = true;
    request.timeout_ms = 400;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    stream(&decodes[0], run_at(&decodes[0]), 0, 2, PROTO_FINISH_NONE);
    fake_drop(n, decodes[0].control);
    assert_int_equal(n->restarts, 1);
    fake_tick(n, 300);
    assert_null(fake_end_of(n, 1, false));
    fake_tick(n, 200);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_DEADLINE);
    assert_int_equal(end->rows_total, 0);
    assert_string_equal(end->text,
                        "queued for 500 ms and no pair of workers had room; the last try: decode "
                        "worker at hostA (pid 22) is gone: its control connection ended");
    fake_expect_rest(n);
}

static void a_restarted_request_can_be_cancelled(void **state) {
    (void)state;
    for (int is_running = 0; is_running <= 1; is_running++) {
        again();
        submit(1, 1);
        stream(&decodes[0], run_at(&decodes[0]), 0, 2, PROTO_FINISH_NONE);
        fake_drop(n, decodes[0].control);
        if (is_running) {
            join_other();
            stream(&decodes[1], run_at(&decodes[1]), 0, 1, PROTO_FINISH_NONE);
        }
        dispatch_cancel(n->d, 1, n->now_us);
        assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
        assert_int_equal(fake_end_of(n, 1, true)->rows_total, is_running);
        fake_expect_rest(n);
    }
}

/* Credit begins again as well: what the reader took of void rows is no credit for others. */
static void credit_begins_again(void **state) {
    (void)state;
    enum { MANY = 2000, STEP = PROTO_FRAME_PAYLOAD_MAX / 4, MOST = STEP / ROW_RECORD_HEADER_BYTES };
    static uint8_t many[MANY * ROW_RECORD_HEADER_BYTES];
    dispatch_request request;
    bt_error error;
    (void)fake_rows(many, 0, MANY / 2);
    memcpy(many + sizeof many / 2, many, sizeof many / 2);
    fake_drop(n, decodes[0].control);
    fake_enter(n, &decodes[0], PROTO_ROLE_DECODE, 55);
    fake_ready(n, &decodes[0], 1000);
    fake_pair(n, &decodes[0], &prefill, BT_OK);
    fake_request(1, PROMPT, MANY, &request);
    request.generation.seed = SEED;
    request.may_restart = request.is_credited = true;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    for (int tries = 0; tries < 2; tries++) {
        const proto_attempt attempt = run_at(&decodes[0]);
        fake_chunk(n, &decodes[0], attempt, 0, many, sizeof many, PROTO_FINISH_NONE, 0);
        counts[0] = MANY;
        /* A little less than what is told at once; if the first try's counted, it would be. */
        dispatch_grant(n->d, 1, 0, (uint64_t)MOST * ROW_RECORD_HEADER_BYTES - 1, n->now_us);
        assert_int_equal(fake_count(n, decodes[0].streams, PROTO_CREDIT), 0);
        if (tries == 1) continue;
        break_sample(&decodes[0], attempt, 0, BT_ERR_PEER_GONE);
    }
    dispatch_grant(n->d, 1, 0, STEP, n->now_us);
    /* All that was handed on in this try, and no more. */
    assert_int_equal(fake_expect(n, decodes[0].streams, PROTO_CREDIT).credit.bytes, sizeof many);
}

/* What decode said of the first try is not said of a second one that says nothing. */
static void an_end_tells_of_the_last_try(void **state) {
    (void)state;
    proto_message chunk;
    submit(1, 1);
    const proto_attempt first = run_at(&decodes[0]);
    const size_t bytes = fake_rows(rows, 0, 1);
    memset(&chunk, 0, sizeof chunk);
    chunk.kind = PROTO_CHUNK;
    chunk.chunk.attempt = first;
    chunk.chunk.cached_tokens = 32;
    chunk.chunk.retractions = 3;
    chunk.payload = rows;
    chunk.payload_bytes = bytes;
    fake_say(n, decodes[0].streams, &chunk);
    assert_int_equal(n->rows_cached_tokens, 32);
    fake_drop(n, decodes[0].control);
    join_other();
    (void)run_at(&decodes[1]);
    dispatch_cancel(n->d, 1, n->now_us);
    assert_int_equal(fake_end_of(n, 1, true)->cached_tokens, 0);
    assert_int_equal(fake_end_of(n, 1, true)->retractions, 0);
}

/* The time is over, and nobody has looked at the clock yet. */
static void behind_its_deadline_nothing_is_tried_again(void **state) {
    (void)state;
    submit(1, 1);
    stream(&decodes[0], run_at(&decodes[0]), 0, 2, PROTO_FINISH_NONE);
    n->now_us += 60000 * 1000ull;
    fake_drop(n, decodes[0].control);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_PEER_GONE);
    assert_int_equal(n->restarts, 0);
}

/* ---- several samples ------------------------------------------------------------------------- */

static void samples_that_have_ended_stand(void **state) {
    (void)state;
    submit(1, 3);
    const proto_attempt first = run_at(&decodes[0]);
    stream(&decodes[0], first, 1, 4, PROTO_FINISH_STOP);
    stream(&decodes[0], first, 0, 3, PROTO_FINISH_NONE);
    stream(&decodes[0], first, 2, 1, PROTO_FINISH_NONE);
    join_other();
    fake_drop(n, decodes[0].control);
    assert_int_equal(n->restarts, 1);
    assert_int_equal(fake_sample_end_of(n, 1, 1, true)->rows_total, 4);
    const proto_attempt second = run_at(&decodes[1]);
    /* It is not drawn again. */
    const proto_message cancel = fake_expect(n, decodes[1].control, PROTO_CANCEL);
    assert_int_equal(cancel.cancel.sample, 1);
    assert_true(proto_attempt_equal(cancel.cancel.attempt, second));
    assert_int_equal(fake_count(n, decodes[1].control, PROTO_CANCEL), 0);
    stream(&decodes[1], second, 0, NEW_TOKENS, PROTO_FINISH_LENGTH);
    stream(&decodes[1], second, 2, 2, PROTO_FINISH_STOP);
    assert_int_equal(fake_sample_end_of(n, 1, 0, true)->rows_total, NEW_TOKENS);
    assert_int_equal(fake_sample_end_of(n, 1, 2, true)->rows_total, 2);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_OK);
    assert_int_equal(end->rows_total, NEW_TOKENS + 4 + 2);
    fake_expect_rest(n);
}

/* All that came is of samples that have ended: the others had nothing to take back. */
static void only_ended_samples_had_rows(void **state) {
    (void)state;
    submit(1, 2);
    const proto_attempt first = run_at(&decodes[0]);
    stream(&decodes[0], first, 0, 4, PROTO_FINISH_STOP);
    break_sample(&decodes[0], first, 1, BT_ERR_PEER_GONE);
    assert_int_equal(n->restarts, 0);
    const proto_attempt second = run_at(&decodes[0]);
    stream(&decodes[0], second, 1, NEW_TOKENS, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->rows_total, 4 + NEW_TOKENS);
    assert_int_equal(fake_end_of(n, 1, true)->attempts, 2);
    fake_expect_rest(n);
}

/* One sample's word that the cluster failed takes the others back too, while there are tries; then
 * it fails alone. */
static void with_the_last_try_a_sample_fails_alone(void **state) {
    (void)state;
    submit(1, 2);
    for (uint32_t i = 0; i < 3; i++) {
        const proto_attempt attempt = run_at(&decodes[0]);
        stream(&decodes[0], attempt, 0, 1, PROTO_FINISH_NONE);
        stream(&decodes[0], attempt, 1, 2, PROTO_FINISH_NONE);
        break_sample(&decodes[0], attempt, 1, BT_ERR_WORKER_MEMORY);
        if (i < 2) continue;
        assert_int_equal(fake_sample_end_of(n, 1, 1, true)->status, BT_ERR_WORKER_MEMORY);
        assert_int_equal(fake_sample_end_of(n, 1, 1, true)->rows_total, 2);
        stream(&decodes[0], attempt, 0, NEW_TOKENS - 1, PROTO_FINISH_LENGTH);
    }
    assert_int_equal(n->restarts, 2);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_OK);
    assert_int_equal(end->rows_total, NEW_TOKENS + 2);
    fake_expect_rest(n);
}

/* Before any row it was the last try of all of them. */
static void without_rows_the_last_try_fails_for_all(void **state) {
    (void)state;
    submit(1, 2);
    for (uint32_t i = 0; i < 3; i++) {
        assert_null(fake_end_of(n, 1, false));
        break_sample(&decodes[0], run_at(&decodes[0]), 1, BT_ERR_WORKER_MEMORY);
    }
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(fake_sample_end_of(n, 1, i, true)->status, BT_ERR_WORKER_MEMORY);
    assert_int_equal(fake_end_of(n, 1, true)->attempts, 3);
    fake_expect_rest(n);
}

/* An own failure of one sample stands like an end. */
static void a_sample_that_failed_by_itself_is_not_tried_again(void **state) {
    (void)state;
    submit(1, 2);
    const proto_attempt first = run_at(&decodes[0]);
    stream(&decodes[0], first, 0, 1, PROTO_FINISH_NONE);
    stream(&decodes[0], first, 1, 3, PROTO_FINISH_NONE);
    break_sample(&decodes[0], first, 0, BT_ERR_REQUEST_OVERFLOW);
    join_other();
    fake_drop(n, decodes[0].streams);
    const proto_attempt second = run_at(&decodes[1]);
    stream(&decodes[1], second, 1, NEW_TOKENS, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_sample_end_of(n, 1, 0, true)->status, BT_ERR_REQUEST_OVERFLOW);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_int_equal(fake_end_of(n, 1, true)->rows_total, 1 + NEW_TOKENS);
}

/* ---- the prompt's log-probabilities ---------------------------------------------------------- */

/* They come again too. When they are late the whole is tried again, rows or not. */
static void late_log_probabilities_of_the_prompt_begin_again(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    const token_row row = {.token = 5, .has_logprob = 1, .token_logprob = -1.0f};
    row_record_encode(&row, rows);
    fake_request(1, PROMPT, NEW_TOKENS, &request);
    request.generation.seed = SEED;
    request.generation.wants_logprob = request.generation.wants_prompt_logprobs = 1;
    request.may_restart = true;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_attempt first = run_at(&decodes[0]);
    fake_done(n, &prefill, first, BT_OK);
    fake_logprobs(n, &prefill, first, 1, 9);
    fake_chunk(n, &decodes[0], first, 0, rows, ROW_RECORD_HEADER_BYTES, PROTO_FINISH_NONE, 1);
    fake_worker *const workers[] = {&prefill, &decodes[0]};
    fake_live(n, 10100, workers, 2);
    assert_int_equal(n->restarts, 1);
    const proto_attempt second = run_at(&decodes[0]);
    fake_logprobs(n, &prefill, second, 1, PROMPT - 1);
    fake_chunk(n, &decodes[0], second, 0, rows, ROW_RECORD_HEADER_BYTES, PROTO_FINISH_LENGTH, 1);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_int_equal(n->next_position, PROMPT);
    fake_expect_rest(n);
}

/* All samples have ended: there is nothing that decode could be asked for again. */
static void log_probabilities_alone_are_not_tried_again(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    const token_row row = {.token = 5, .has_logprob = 1, .token_logprob = -1.0f};
    row_record_encode(&row, rows);
    fake_request(1, PROMPT, NEW_TOKENS, &request);
    request.generation.seed = SEED;
    request.generation.wants_logprob = request.generation.wants_prompt_logprobs = 1;
    request.may_restart = true;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_attempt attempt = run_at(&decodes[0]);
    fake_chunk(n, &decodes[0], attempt, 0, rows, ROW_RECORD_HEADER_BYTES, PROTO_FINISH_LENGTH, 1);
    assert_null(fake_end_of(n, 1, false));
    fake_drop(n, prefill.control);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_PEER_GONE);
    assert_int_equal(n->restarts, 0);
    fake_expect_rest(n);
}

#define T(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(a_dead_decode_is_followed_by_another),
        T(nothing_of_the_first_try_is_left),
        T(the_first_try_is_not_heard_any_more),
        T(tries_are_bounded),
        T(without_rows_nothing_is_taken_back),
        T(a_liar_is_followed_by_another_try),
        T(what_another_try_cannot_mend_is_the_end),
        T(the_requests_time_is_over_all_tries),
        T(a_restarted_request_can_be_cancelled),
        T(credit_begins_again),
        T(samples_that_have_ended_stand),
        T(only_ended_samples_had_rows),
        T(with_the_last_try_a_sample_fails_alone),
        T(a_sample_that_failed_by_itself_is_not_tried_again),
        T(log_probabilities_alone_are_not_tried_again),
        T(an_end_tells_of_the_last_try),
        T(behind_its_deadline_nothing_is_tried_again),
        T(without_rows_the_last_try_fails_for_all),
        T(late_log_probabilities_of_the_prompt_begin_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
