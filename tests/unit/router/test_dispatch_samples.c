/* Several samples of one request: streams that interleave, ends of their own, what becomes of the
 * others, and how the request ends with them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "dispatch_fixture.h"

enum { SAMPLES = 3, NEW_TOKENS = 8 };

static fake_network *n;
static fake_worker prefill, decode;
static uint8_t rows[1 << 19];
static uint64_t offsets[SAMPLES]; /* of each sample's stream in the attempt that runs */
static uint32_t counts[SAMPLES];

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

static void submit(uint64_t id, bool is_credited) {
    dispatch_request request;
    bt_error error;
    fake_request(id, 40, NEW_TOKENS, &request);
    request.generation.samples = SAMPLES;
    request.is_credited = is_credited;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
}

/* Reserved and running at that decode; the streams begin. */
static proto_attempt run_at(const fake_worker *there) {
    const proto_message reserve = fake_expect(n, there->control, PROTO_RESERVE);
    assert_int_equal(reserve.reserve.generation.samples, SAMPLES);
    fake_reserve_samples(n, there, reserve.reserve.attempt, SAMPLES);
    const proto_message run = fake_expect(n, prefill.streams, PROTO_RUN);
    assert_int_equal(run.run.slot_count, SAMPLES);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        assert_int_equal(run.run.slots[i].index, 3 + i);
        assert_int_equal(run.run.slots[i].generation, 7);
    }
    const proto_message prompt = fake_expect(n, there->streams, PROTO_PROMPT);
    assert_true(proto_attempt_equal(prompt.prompt.attempt, run.run.attempt));
    memset(offsets, 0, sizeof offsets);
    memset(counts, 0, sizeof counts);
    return run.run.attempt;
}

static proto_attempt start(uint64_t id) {
    submit(id, false);
    return run_at(&decode);
}

/* `count` more rows of a sample: tokens 100 * sample + 0, 1, ... */
static void stream(proto_attempt attempt, uint32_t sample, uint32_t count, proto_finish finish) {
    const size_t bytes = fake_rows(rows, 100 * sample + counts[sample], count);
    counts[sample] += count;
    n->sample = sample;
    fake_chunk(n, &decode, attempt, offsets[sample], rows, bytes, finish, counts[sample]);
    offsets[sample] += bytes;
    n->sample = 0;
}

static void break_sample(proto_attempt attempt, uint32_t sample, bt_status status) {
    n->sample = sample;
    fake_chunk_error(n, &decode, attempt, status, counts[sample], "it broke");
    n->sample = 0;
}

static const dispatch_end *end_of(uint64_t id, uint32_t sample) {
    return fake_sample_end_of(n, id, sample, true);
}

/* ---- the good way ---------------------------------------------------------------------------- */

static void streams_interleave_and_end_one_by_one(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    fake_done(n, &prefill, attempt, BT_OK);
    stream(attempt, 2, 1, PROTO_FINISH_NONE);
    stream(attempt, 0, 2, PROTO_FINISH_NONE);
    stream(attempt, 2, 1, PROTO_FINISH_NONE);
    stream(attempt, 1, 1, PROTO_FINISH_STOP);
    assert_int_equal(end_of(1, 1)->finish, PROTO_FINISH_STOP);
    assert_int_equal(end_of(1, 1)->matched_id, 2);
    assert_int_equal(end_of(1, 1)->rows_total, 1);
    assert_null(fake_sample_end_of(n, 1, 0, false));
    stream(attempt, 0, 6, PROTO_FINISH_LENGTH);
    assert_int_equal(end_of(1, 0)->rows_total, 8);
    assert_null(fake_end_of(n, 1, false));
    stream(attempt, 2, 1, PROTO_FINISH_STOP);
    assert_int_equal(end_of(1, 2)->rows_total, 3);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_OK);
    assert_int_equal(end->finish, PROTO_FINISH_LENGTH); /* of sample 0 */
    assert_int_equal(end->rows_total, 12);
    for (uint32_t i = 0; i < SAMPLES; i++)
        assert_int_equal(n->sample_rows[i], counts[i]);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 0);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
    fake_expect_rest(n);
}

/* The partial records of two samples are kept apart. */
static void records_of_two_samples_may_be_cut_at_once(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    uint8_t first[ROW_RECORD_HEADER_BYTES], second[ROW_RECORD_HEADER_BYTES];
    (void)fake_rows(first, 11, 1);
    (void)fake_rows(second, 22, 1);
    n->sample = 0;
    fake_chunk(n, &decode, attempt, 0, first, 10, PROTO_FINISH_NONE, 0);
    n->sample = 1;
    fake_chunk(n, &decode, attempt, 0, second, 14, PROTO_FINISH_NONE, 0);
    n->sample = 0;
    fake_chunk(n, &decode, attempt, 10, first + 10, sizeof first - 10, PROTO_FINISH_LENGTH, 1);
    assert_memory_equal(n->rows, first, sizeof first);
    n->sample = 1;
    fake_chunk(n, &decode, attempt, 14, second + 14, sizeof second - 14, PROTO_FINISH_LENGTH, 1);
    assert_memory_equal(n->rows + sizeof first, second, sizeof second);
}

static void words_go_to_both_workers(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    int32_t words[40 + 2 * 2 + 3];
    const float biases[2] = {1.5f, -2.5f};
    fake_request(1, 40, NEW_TOKENS, &request);
    for (int32_t i = 0; i < 47; i++)
        words[i] = 500 + i;
    memcpy(words + 42, biases, sizeof biases);
    request.words = words;
    request.generation.bias_count = 2;
    request.generation.wants_logprob = 1;
    request.generation.logprob_id_count = 3;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
    assert_int_equal(fake_count(n, decode.streams, PROTO_PROMPT), 0); /* not before it is granted */
    fake_reserve_reply(n, &decode, reserve.reserve.attempt, BT_OK);
    proto_message prompt, run;
    assert_true(fake_take(n, decode.streams, PROTO_PROMPT, &prompt));
    assert_true(fake_take(n, prefill.streams, PROTO_RUN, &run));
    assert_int_equal(prompt.prompt.first_word, 0);
    assert_int_equal(prompt.payload_bytes, sizeof words);
    assert_int_equal(run.payload_bytes, sizeof words);
    assert_memory_equal(prompt.payload, run.payload, sizeof words);
    assert_int_equal(((int32_t *)prompt.payload)[46], 546);
    assert_memory_equal((int32_t *)prompt.payload + 42, biases, sizeof biases);
    bt_free(prompt.payload);
    bt_free(run.payload);
}

static void a_long_prompt_goes_to_decode_in_frames(void **state) {
    (void)state;
    const uint32_t tokens = 150000;
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
    proto_message prompt;
    while (fake_take(n, big_decode.streams, PROTO_PROMPT, &prompt)) {
        assert_int_equal(prompt.prompt.first_word, first);
        assert_true(prompt.payload_bytes <= PROTO_FRAME_PAYLOAD_MAX);
        const int32_t *ids = prompt.payload;
        for (uint32_t i = 0; i < prompt.payload_bytes / 4; i += 1001)
            assert_int_equal(ids[i], (int32_t)((first + i) % FAKE_VOCAB));
        first += (uint32_t)(prompt.payload_bytes / 4);
        bt_free(prompt.payload);
    }
    assert_int_equal(first, tokens);
}

static void words_are_checked(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    int32_t words[2 + 2 + 1] = {1, 2, 3, 0, 4};
    const float bad = __builtin_inff();
    static const struct {
        int word;
        int32_t id;
        const char *text;
    } cases[] = {
        {2, FAKE_VOCAB, "token id 1000 is outside the vocabulary"},
        {2, -1, "token id -1 is outside the vocabulary"},
        {4, FAKE_VOCAB, "token id 1000 is outside the vocabulary"},
        {3, 0, "a bias is not a finite number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t broken[5];
        memcpy(broken, words, sizeof broken);
        broken[cases[i].word] = cases[i].id;
        if (cases[i].word == 3) memcpy(&broken[3], &bad, sizeof bad);
        fake_request(1, 2, 1, &request);
        request.words = broken;
        request.generation.bias_count = 1;
        request.generation.wants_logprob = 1;
        request.generation.logprob_id_count = 1;
        assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error),
                         BT_ERR_REQUEST_INVALID);
        assert_string_equal(error.text, cases[i].text);
    }
    request.words = words;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
}

/* ---- slots ----------------------------------------------------------------------------------- */

static void wrong_slots_end_the_attempt(void **state) {
    (void)state;
    for (int how = 0; how < 3; how++) {
        again();
        submit(1, false);
        const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
        const proto_attempt attempt = reserve.reserve.attempt;
        proto_message reply = {.kind = PROTO_RESERVATION};
        reply.reservation = (proto_reservation){.attempt = attempt, .slot_count = SAMPLES};
        for (uint32_t i = 0; i < SAMPLES; i++)
            reply.reservation.slots[i] = (proto_slot){.index = i % 2, .generation = i + 1};
        if (how < 2)
            fake_reserve_samples(n, &decode, attempt, how == 0 ? SAMPLES - 1 : SAMPLES + 1);
        if (how == 2) fake_say(n, decode.control, &reply); /* one slot twice */
        assert_int_equal(fake_look(n).protocol_errors_total, 1);
        assert_int_equal(fake_look(n).retries_total, 1);
        assert_int_equal(fake_count(n, prefill.streams, PROTO_RUN), 0);
        const proto_message cancel = fake_expect(n, decode.control, PROTO_CANCEL);
        assert_true(proto_attempt_equal(cancel.cancel.attempt, attempt));
        assert_int_equal(cancel.cancel.sample, PROTO_ALL_SAMPLES);
        assert_false(fake_is_closed(n, decode.control));
        (void)run_at(&decode); /* and the next one is right */
    }
}

static void expect_violation(const char *what) {
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(end->text, what));
    assert_int_equal(fake_look(n).protocol_errors_total, 1);
    assert_false(fake_is_closed(n, decode.streams));
    fake_expect_rest(n);
}

static void a_sample_that_there_is_not_is_refused(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    stream(attempt, 0, 1, PROTO_FINISH_NONE);
    n->sample = SAMPLES;
    fake_chunk(n, &decode, attempt, 0, rows, fake_rows(rows, 1, 1), PROTO_FINISH_NONE, 0);
    expect_violation("a sample that there is not");
    for (uint32_t i = 0; i < SAMPLES; i++)
        assert_int_equal(end_of(1, i)->status, BT_ERR_PEER_PROTOCOL);
}

static void an_ended_sample_sends_no_more(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    stream(attempt, 1, 1, PROTO_FINISH_LENGTH);
    stream(attempt, 1, 1, PROTO_FINISH_NONE);
    expect_violation("a sample that has ended");
    assert_int_equal(end_of(1, 1)->status, BT_OK); /* what was told stands */
    assert_int_equal(end_of(1, 0)->status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(n->sample_rows[1], 1);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void a_sample_that_fails_by_itself_fails_alone(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    fake_done(n, &prefill, attempt, BT_OK);
    break_sample(attempt, 1, BT_ERR_REQUEST_OVERFLOW); /* its row had the status: no token at all */
    assert_int_equal(end_of(1, 1)->http_status, 400);
    assert_int_equal(end_of(1, 1)->rows_total, 0);
    assert_non_null(strstr(end_of(1, 1)->text, "--sampling-mask-max-tokens=64"));
    stream(attempt, 0, 2, PROTO_FINISH_LENGTH);
    stream(attempt, 2, 1, PROTO_FINISH_NONE);
    break_sample(attempt, 2, BT_ERR_WORKER_MEMORY); /* the cluster's, but rows were handed on */
    assert_int_equal(end_of(1, 2)->http_status, 503);
    assert_int_equal(end_of(1, 2)->rows_total, 1);
    assert_string_equal(end_of(1, 2)->text, "it broke");
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_OK); /* one is well */
    assert_int_equal(end->rows_total, 3);
    assert_int_equal(end->attempts, 1);
    fake_expect_rest(n);
}

static void when_all_fail_the_worst_is_told(void **state) {
    (void)state;
    static const struct {
        bt_status samples[SAMPLES];
        bt_status request;
    } cases[] = {
        {{BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_OVERFLOW},
         BT_ERR_REQUEST_OVERFLOW},
        {{BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_CAPTURE, BT_ERR_WORKER_MEMORY},
         BT_ERR_REQUEST_CAPTURE},
        {{BT_ERR_WORKER_MEMORY, BT_ERR_PEER_GONE, BT_ERR_REQUEST_OVERFLOW}, BT_ERR_WORKER_MEMORY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        again();
        const proto_attempt attempt = start(1);
        for (uint32_t k = 0; k < SAMPLES; k++)
            stream(attempt, k, 1, PROTO_FINISH_NONE);
        for (uint32_t k = 0; k < SAMPLES; k++)
            break_sample(attempt, k, cases[i].samples[k]);
        for (uint32_t k = 0; k < SAMPLES; k++)
            assert_int_equal(end_of(1, k)->status, cases[i].samples[k]);
        assert_int_equal(fake_end_of(n, 1, true)->status, cases[i].request);
        assert_int_equal(fake_end_of(n, 1, true)->rows_total, SAMPLES);
        fake_expect_rest(n);
    }
}

static void an_overflow_at_prefill_ends_every_sample(void **state) {
    (void)state;
    proto_message done = {.kind = PROTO_PREFILL_DONE};
    done.prefill_done = (proto_prefill_done){
        .attempt = start(1), .status = BT_ERR_REQUEST_OVERFLOW, .cap_needed = 77};
    fake_say(n, prefill.control, &done);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        assert_int_equal(end_of(1, i)->http_status, 400);
        assert_int_equal(end_of(1, i)->cap_needed, 77);
    }
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_OVERFLOW);
    assert_int_equal(fake_end_of(n, 1, true)->cap_needed, 77);
    fake_expect_rest(n);
}

static void retractions_are_told(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        proto_message chunk = {.kind = PROTO_CHUNK, .payload = rows};
        chunk.payload_bytes = fake_rows(rows, 1, 1);
        chunk.chunk = (proto_chunk){.attempt = attempt,
                                    .sample = i,
                                    .finish = PROTO_FINISH_LENGTH,
                                    .rows_total = 1,
                                    .retractions = i + 1};
        fake_say(n, decode.streams, &chunk);
        assert_int_equal(end_of(1, i)->retractions, i + 1);
        assert_int_equal(end_of(1, i)->cap_needed, 0);
    }
    assert_int_equal(fake_end_of(n, 1, true)->retractions, 6);
    assert_int_equal(fake_end_of(n, 1, true)->cap_needed, 0);
}

/* What an overflow needs is told with its end, in its sentence too; not what cannot be. */
static void caps_are_told(void **state) {
    (void)state;
    static const uint32_t said[SAMPLES] = {FAKE_CAP, FAKE_VOCAB, FAKE_VOCAB + 1};
    static const uint32_t told[SAMPLES] = {0, FAKE_VOCAB, 0};
    const proto_attempt attempt = start(1);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const proto_message chunk = {.kind = PROTO_CHUNK,
                                     .chunk = {.attempt = attempt,
                                               .sample = i,
                                               .finish = PROTO_FINISH_ERROR,
                                               .status = BT_ERR_REQUEST_OVERFLOW,
                                               .cap_needed = said[i]}};
        fake_say(n, decode.streams, &chunk);
        const dispatch_end *end = end_of(1, i);
        assert_int_equal(end->cap_needed, told[i]);
        assert_int_equal(end->http_status, 400);
        assert_int_equal(strstr(end->text, " Required: 1000.") != NULL, told[i] != 0);
        assert_int_equal(strstr(end->text, " Required: ") != NULL, told[i] != 0);
    }
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_OVERFLOW);
    assert_int_equal(end->cap_needed, FAKE_VOCAB);
    assert_non_null(strstr(end->text, " Required: 1000."));
    fake_expect_rest(n);
}

/* ---- retries --------------------------------------------------------------------------------- */

/* Another decode takes over, with slots of its own, for what has not ended. */
static void before_any_row_all_is_tried_again(void **state) {
    (void)state;
    fake_worker other;
    const proto_attempt first = start(1);
    break_sample(first, 2, BT_ERR_REQUEST_OVERFLOW); /* this one is over, and stays so */
    assert_int_equal(n->sample_end_count, 1);
    fake_join(n, &other, PROTO_ROLE_DECODE, 44);
    fake_pair(n, &other, &prefill, BT_OK);
    fake_drop(n, decode.control);
    assert_int_equal(fake_look(n).retries_total, 1);
    decode = other;
    const proto_attempt second = run_at(&decode);
    assert_false(proto_attempt_equal(first, second));
    const proto_message cancel = fake_expect(n, decode.control, PROTO_CANCEL);
    assert_true(proto_attempt_equal(cancel.cancel.attempt, second));
    assert_int_equal(cancel.cancel.sample, 2);
    stream(second, 2, 1, PROTO_FINISH_NONE); /* it did not know yet */
    assert_int_equal(n->sample_rows[2], 0);
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    stream(second, 1, 1, PROTO_FINISH_LENGTH);
    stream(second, 0, 1, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_int_equal(fake_end_of(n, 1, true)->attempts, 2);
    assert_int_equal(n->sample_end_count, SAMPLES);
    fake_expect_rest(n);
}

/* One sample says that the pair broke: the others would say so too, so nobody waits for them. */
static void one_samples_word_for_a_broken_pair_is_enough(void **state) {
    (void)state;
    const proto_attempt first = start(1);
    break_sample(first, 1, BT_ERR_PEER_GONE);
    assert_int_equal(n->sample_end_count, 0);
    const proto_message cancel = fake_expect(n, decode.control, PROTO_CANCEL);
    assert_int_equal(cancel.cancel.sample, PROTO_ALL_SAMPLES);
    break_sample(first, 0, BT_ERR_PEER_GONE);
    assert_int_equal(fake_look(n).late_total, 1);
    const proto_attempt second = run_at(&decode);
    for (uint32_t i = 0; i < SAMPLES; i++)
        stream(second, i, 1, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->attempts, 2);
    fake_expect_rest(n);
}

static void after_a_row_of_one_all_end_honestly(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    stream(attempt, 0, 1, PROTO_FINISH_LENGTH);
    stream(attempt, 1, 2, PROTO_FINISH_NONE);
    fake_drop(n, decode.streams);
    assert_int_equal(end_of(1, 0)->status, BT_OK);
    for (uint32_t i = 1; i < SAMPLES; i++) {
        assert_int_equal(end_of(1, i)->status, BT_ERR_PEER_GONE);
        assert_int_equal(end_of(1, i)->http_status, 503);
        assert_int_equal(end_of(1, i)->rows_total, i == 1 ? 2 : 0);
    }
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_PEER_GONE); /* the cluster failed it */
    assert_int_equal(end->rows_total, 3);
    assert_int_equal(fake_look(n).retries_total, 0);
}

/* ---- cancels --------------------------------------------------------------------------------- */

static void one_sample_can_be_cancelled(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    stream(attempt, 0, 1, PROTO_FINISH_NONE);
    stream(attempt, 1, 1, PROTO_FINISH_NONE);
    dispatch_cancel_sample(n->d, 1, 1, n->now_us);
    assert_int_equal(end_of(1, 1)->status, BT_ERR_REQUEST_CANCELLED);
    assert_int_equal(end_of(1, 1)->rows_total, 1);
    const proto_message cancel = fake_expect(n, decode.control, PROTO_CANCEL);
    assert_int_equal(cancel.cancel.sample, 1);
    assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 0);
    stream(attempt, 1, 1, PROTO_FINISH_LENGTH); /* was on its way */
    assert_int_equal(n->sample_rows[1], 1);
    assert_int_equal(fake_look(n).protocol_errors_total, 0);
    dispatch_cancel_sample(n->d, 1, 1, n->now_us); /* again, unknown ones: nothing */
    dispatch_cancel_sample(n->d, 1, SAMPLES, n->now_us);
    dispatch_cancel_sample(n->d, 2, 0, n->now_us);
    assert_int_equal(n->sample_end_count, 1);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 0);
    stream(attempt, 0, 1, PROTO_FINISH_LENGTH);
    stream(attempt, 2, 1, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    assert_int_equal(fake_count(n, decode.control, PROTO_CANCEL), 0);
    fake_expect_rest(n);
}

static void with_the_last_sample_the_request_is_cancelled(void **state) {
    (void)state;
    for (uint32_t samples_that_end = 0; samples_that_end < 2; samples_that_end++) {
        again();
        const proto_attempt attempt = start(1);
        if (samples_that_end > 0) stream(attempt, 0, 1, PROTO_FINISH_LENGTH);
        for (uint32_t i = samples_that_end; i < SAMPLES; i++) {
            assert_null(fake_end_of(n, 1, false));
            dispatch_cancel_sample(n->d, 1, i, n->now_us);
        }
        const dispatch_end *end = fake_end_of(n, 1, true);
        assert_int_equal(end->status, samples_that_end > 0 ? BT_OK : BT_ERR_REQUEST_CANCELLED);
        proto_message cancel;
        for (uint32_t i = samples_that_end; i + 1 < SAMPLES; i++) {
            cancel = fake_expect(n, decode.control, PROTO_CANCEL);
            assert_int_equal(cancel.cancel.sample, i);
        }
        cancel = fake_expect(n, decode.control, PROTO_CANCEL);
        assert_int_equal(cancel.cancel.sample, PROTO_ALL_SAMPLES);
        /* Nobody wants its rows any more, unless they came already. */
        assert_int_equal(fake_count(n, prefill.streams, PROTO_CANCEL), 1 - samples_that_end);
        fake_expect_rest(n);
    }
}

static void samples_can_be_cancelled_while_queued(void **state) {
    (void)state;
    fake_network_destroy(n);
    n = fake_network_create(NULL);
    fake_cluster(n, &prefill, &decode);
    fake_drop(n, decode.control); /* nobody to run it for now */
    submit(1, false);
    dispatch_cancel_sample(n->d, 1, 0, n->now_us);
    assert_int_equal(end_of(1, 0)->status, BT_ERR_REQUEST_CANCELLED);
    fake_join(n, &decode, PROTO_ROLE_DECODE, 44);
    fake_pair(n, &decode, &prefill, BT_OK);
    const proto_attempt attempt = run_at(&decode);
    assert_int_equal(fake_expect(n, decode.control, PROTO_CANCEL).cancel.sample, 0);
    stream(attempt, 1, 1, PROTO_FINISH_LENGTH);
    stream(attempt, 2, 1, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    submit(2, false);
    for (uint32_t i = 0; i < SAMPLES; i++)
        dispatch_cancel_sample(n->d, 2, i, n->now_us);
    assert_int_equal(fake_end_of(n, 2, true)->status, BT_ERR_REQUEST_CANCELLED);
    fake_expect_rest(n);
}

static void a_whole_cancel_ends_every_sample_once(void **state) {
    (void)state;
    const proto_attempt attempt = start(1);
    stream(attempt, 0, 1, PROTO_FINISH_LENGTH);
    dispatch_cancel(n->d, 1, n->now_us);
    assert_int_equal(end_of(1, 0)->status, BT_OK);
    assert_int_equal(end_of(1, 1)->status, BT_ERR_REQUEST_CANCELLED);
    assert_int_equal(end_of(1, 2)->status, BT_ERR_REQUEST_CANCELLED);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_ERR_REQUEST_CANCELLED);
    assert_int_equal(n->sample_end_count, SAMPLES);
    fake_expect_rest(n);
}

/* ---- credit ---------------------------------------------------------------------------------- */

/* Rows of one frame's size and more, so that one grant makes a CREDIT. */
static void credit_is_of_a_sample(void **state) {
    (void)state;
    dispatch_options options;
    dispatch_request request;
    bt_error error;
    fake_options(&options);
    options.stream_window_bytes = 1;
    fake_network_destroy(n);
    n = fake_network_create(&options);
    fake_enter(n, &prefill, PROTO_ROLE_PREFILL, 11);
    fake_ready(n, &prefill, 1 << 20);
    fake_enter(n, &decode, PROTO_ROLE_DECODE, 22);
    fake_ready(n, &decode, 1 << 20);
    fake_pair(n, &decode, &prefill, BT_OK);
    fake_request(1, 40, 1 << 20, &request);
    request.generation.samples = SAMPLES;
    request.is_credited = true;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_attempt attempt = run_at(&decode);
    const uint32_t many = PROTO_FRAME_PAYLOAD_MAX / ROW_RECORD_HEADER_BYTES;
    const uint64_t bytes = (uint64_t)many * ROW_RECORD_HEADER_BYTES;
    for (uint32_t i = 0; i < many; i++)
        (void)fake_rows(rows + (size_t)i * ROW_RECORD_HEADER_BYTES, i % FAKE_VOCAB, 1);
    for (uint32_t i = 0; i < 2; i++) {
        n->sample = i;
        n->rows_bytes = 0;
        fake_chunk(n, &decode, attempt, 0, rows, bytes, PROTO_FINISH_NONE, 0);
    }
    dispatch_grant(n->d, 1, SAMPLES, bytes, n->now_us); /* there is none */
    dispatch_grant(n->d, 1, 2, bytes, n->now_us);       /* had no rows */
    assert_int_equal(fake_count(n, decode.streams, PROTO_CREDIT), 0);
    dispatch_grant(n->d, 1, 1, bytes, n->now_us);
    const proto_message credit = fake_expect(n, decode.streams, PROTO_CREDIT);
    assert_int_equal(credit.credit.sample, 1);
    assert_int_equal(credit.credit.bytes, bytes);
    /* Sample 0 has its first window and no more: what sample 1 got is not its. */
    n->sample = 0;
    n->rows_bytes = 0;
    fake_chunk(n, &decode, attempt, bytes, rows, bytes, PROTO_FINISH_NONE, 0);
    assert_non_null(strstr(fake_end_of(n, 1, true)->text, "more bytes than it had credit for"));
}

static void an_ended_sample_gets_no_credit(void **state) {
    (void)state;
    submit(1, true);
    const proto_attempt attempt = run_at(&decode);
    stream(attempt, 0, 4, PROTO_FINISH_LENGTH);
    dispatch_grant(n->d, 1, 0, 1 << 20, n->now_us);
    assert_int_equal(fake_count(n, decode.streams, PROTO_CREDIT), 0);
    stream(attempt, 1, 1, PROTO_FINISH_LENGTH);
    stream(attempt, 2, 1, PROTO_FINISH_LENGTH);
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
}

/* ---- nothing to sample ----------------------------------------------------------------------- */

static void samples_without_tokens_end_too(void **state) {
    (void)state;
    dispatch_request request;
    bt_error error;
    fake_request(1, 40, 0, &request);
    request.generation.samples = SAMPLES;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const proto_message run = fake_expect(n, prefill.streams, PROTO_RUN);
    fake_done(n, &prefill, run.run.attempt, BT_OK);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        assert_int_equal(end_of(1, i)->status, BT_OK);
        assert_int_equal(end_of(1, i)->finish, PROTO_FINISH_LENGTH);
    }
    assert_int_equal(fake_end_of(n, 1, true)->status, BT_OK);
    fake_expect_rest(n);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(streams_interleave_and_end_one_by_one),
        TEST(records_of_two_samples_may_be_cut_at_once),
        TEST(words_go_to_both_workers),
        TEST(a_long_prompt_goes_to_decode_in_frames),
        TEST(words_are_checked),
        TEST(wrong_slots_end_the_attempt),
        TEST(a_sample_that_there_is_not_is_refused),
        TEST(an_ended_sample_sends_no_more),
        TEST(a_sample_that_fails_by_itself_fails_alone),
        TEST(when_all_fail_the_worst_is_told),
        TEST(an_overflow_at_prefill_ends_every_sample),
        TEST(retractions_are_told),
        TEST(caps_are_told),
        TEST(before_any_row_all_is_tried_again),
        TEST(one_samples_word_for_a_broken_pair_is_enough),
        TEST(after_a_row_of_one_all_end_honestly),
        TEST(one_sample_can_be_cancelled),
        TEST(with_the_last_sample_the_request_is_cancelled),
        TEST(samples_can_be_cancelled_while_queued),
        TEST(a_whole_cancel_ends_every_sample_once),
        TEST(credit_is_of_a_sample),
        TEST(an_ended_sample_gets_no_credit),
        TEST(samples_without_tokens_end_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
