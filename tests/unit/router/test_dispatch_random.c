/* Random histories: workers come, die, answer, lie and repeat themselves, clients submit, cancel
 * and read, time passes. Whatever happens, every request ends exactly once and nothing is left
 * over. A seed as the only argument replays one history. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "dispatch_fixture.h"

enum {
    SEEDS = 300,
    STEPS = 1000,
    WORKERS = 6,
    LIVE_MAX = 16,
    SAMPLES_MAX = 3,
    ROW_BYTES = ROW_RECORD_HEADER_BYTES,
};

typedef struct stream_state {
    proto_attempt attempt;
    uint32_t decode_id, prefill_id;
    uint32_t samples, has_logprob;
    uint32_t prompt_tokens, next_position; /* of log-probabilities; 0: none are asked for */
    uint64_t offset[SAMPLES_MAX];
    uint32_t rows[SAMPLES_MAX];
} stream_state;

typedef struct history {
    fake_network *n;
    uint64_t random;
    fake_worker workers[WORKERS];
    bool is_up[WORKERS];
    stream_state streams[LIVE_MAX]; /* attempts that RUN was seen of, at random slots */
    uint64_t next_request, next_incarnation;
    uint64_t submitted;
    uint32_t samples[FAKE_ENDS_MAX]; /* of request i; 0: it was refused */
} history;

/* What happened over all histories: a test in which nothing happens proves nothing. */
typedef struct tally {
    uint64_t submitted, ok, cancelled, late_deadline, no_worker, peer;
    uint64_t retries, late, protocol_errors, rows, logprobs;
    uint64_t restarts;
    uint64_t mixed; /* requests whose samples did not all end alike */
} tally;

static tally total;
static uint64_t only_seed;

static uint32_t chance(history *h, uint32_t bound) {
    h->random = h->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(h->random >> 33) % bound;
}

static fake_worker *worker_of(history *h, dispatch_link link, bool *is_control) {
    for (int i = 0; i < WORKERS; i++) {
        fake_worker *w = &h->workers[i];
        if (!h->is_up[i] || fake_is_closed(h->n, w->control)) continue;
        *is_control = w->control == link;
        if (w->control == link || w->streams == link) return w;
    }
    return NULL;
}

static void bring_up(history *h, int i) {
    const proto_role role = i < WORKERS / 2 ? PROTO_ROLE_PREFILL : PROTO_ROLE_DECODE;
    fake_enter(h->n, &h->workers[i], role, h->next_incarnation++);
    h->is_up[i] = true;
    proto_message ready;
    memset(&ready, 0, sizeof ready);
    ready.kind = PROTO_READY;
    ready.ready = (proto_ready){.address_bytes = 1,
                                .pages_total = 5 + chance(h, 60),
                                .page_tokens = FAKE_PAGE_TOKENS,
                                .rows_total = 4,
                                .sequences_max = 1 + chance(h, 6),
                                .step_tokens = 16 + chance(h, 64)};
    fake_say(h->n, h->workers[i].control, &ready);
}

static void take_down(history *h, int i) {
    fake_worker *w = &h->workers[i];
    h->is_up[i] = false;
    if (fake_is_closed(h->n, w->control)) return; /* thrown out already */
    fake_drop(h->n, chance(h, 2) == 0 ? w->control : w->streams);
}

static bt_status some_status(history *h) {
    static const bt_status all[] = {BT_ERR_REQUEST_FULL,      BT_ERR_REQUEST_TOO_LARGE,
                                    BT_ERR_REQUEST_OVERFLOW,  BT_ERR_REQUEST_CAPTURE,
                                    BT_ERR_REQUEST_INVALID,   BT_ERR_REQUEST_CORRUPT,
                                    BT_ERR_REQUEST_CANCELLED, BT_ERR_PEER_GONE,
                                    BT_ERR_WORKER_MEMORY,     BT_ERR_REQUEST_STALE};
    return all[chance(h, sizeof all / sizeof all[0])];
}

static void remember(history *h, const proto_run *run, uint32_t prefill_id) {
    stream_state *s = &h->streams[chance(h, LIVE_MAX)];
    *s = (stream_state){.attempt = run->attempt,
                        .decode_id = run->decode_worker_id,
                        .prefill_id = prefill_id,
                        .samples = run->generation.samples,
                        .has_logprob = run->generation.wants_logprob,
                        .prompt_tokens = run->prompt_tokens};
    if (run->generation.wants_prompt_logprobs)
        s->next_position = run->generation.prompt_logprobs_from + 1;
}

/* The decode that has it, but for a few liars. */
static int streaming_decode(history *h, const stream_state *s) {
    for (int i = WORKERS / 2; i < WORKERS; i++) {
        if (h->workers[i].id == s->decode_id && chance(h, 50) != 0) return i;
    }
    return WORKERS / 2 + (int)chance(h, WORKERS / 2);
}

/* What a worker does with one message; sometimes nothing, sometimes something wrong. */
static void react(history *h, const fake_sent *sent) {
    bool is_control = false;
    const fake_worker *w = worker_of(h, sent->link, &is_control);
    const proto_message *m = &sent->message;
    proto_message reply;
    if (w == NULL || chance(h, 10) == 0) return;
    memset(&reply, 0, sizeof reply);
    if (m->kind == PROTO_PING) {
        reply.kind = PROTO_PONG;
        reply.ping.sequence = m->ping.sequence;
        reply.ping.pages_free = chance(h, 64);
        reply.ping.queued_tokens = chance(h, 100);
        fake_say(h->n, w->control, &reply);
    } else if (m->kind == PROTO_PEER && w->role == PROTO_ROLE_DECODE) {
        reply.kind = PROTO_PAIR_READY;
        reply.pair = (proto_pair){.worker_id = m->peer.worker_id,
                                  .incarnation = m->peer.incarnation,
                                  .status = chance(h, 8) == 0 ? BT_ERR_PEER_TIMEOUT : BT_OK};
        fake_say(h->n, w->control, &reply);
    } else if (m->kind == PROTO_RESERVE) {
        const bt_status status = chance(h, 3) == 0 ? some_status(h) : BT_OK;
        const uint32_t right = m->reserve.generation.samples;
        const uint32_t samples = chance(h, 40) == 0 ? 1 + chance(h, 4) : right;
        if (status == BT_OK) {
            fake_reserve_samples(h->n, w, m->reserve.attempt, samples);
        } else {
            fake_reserve_reply(h->n, w, m->reserve.attempt, status);
        }
    } else if (m->kind == PROTO_RUN) {
        remember(h, &m->run, w->id);
        if (chance(h, 4) != 0) {
            fake_done(h->n, w, m->run.attempt, chance(h, 5) == 0 ? some_status(h) : BT_OK);
        }
    }
}

/* Handles what was sent so far, in order or not. */
static void react_to_some(history *h) {
    uint32_t budget = 1 + chance(h, 20);
    while (budget-- > 0 && h->n->sent_count > 0) {
        const uint32_t at = chance(h, 3) == 0 ? chance(h, h->n->sent_count) : 0;
        const fake_sent sent = h->n->sent[at];
        h->n->sent_count--;
        memmove(&h->n->sent[at], &h->n->sent[at + 1],
                (h->n->sent_count - at) * sizeof h->n->sent[0]);
        react(h, &sent);
        bt_free(sent.message.payload);
    }
}

/* The prefill that has it says what comes next, or sometimes what does not. */
static void score_some(history *h, stream_state *s) {
    if (s->next_position == 0 || s->next_position >= s->prompt_tokens) return;
    for (int i = 0; i < WORKERS / 2; i++) {
        const fake_worker *w = &h->workers[i];
        if (!h->is_up[i] || w->id != s->prefill_id || fake_is_closed(h->n, w->streams)) continue;
        const uint32_t left = s->prompt_tokens - s->next_position;
        const uint32_t count = chance(h, 2) == 0 ? left : 1 + chance(h, left);
        const uint32_t first = s->next_position + (chance(h, 40) == 0 ? 1 : 0);
        s->next_position += count;
        fake_logprobs(h->n, w, s->attempt, first, count);
        return;
    }
}

/* A chunk of a random attempt from a random decode: right, late or a lie. */
static void stream_some(history *h) {
    stream_state *s = &h->streams[chance(h, LIVE_MAX)];
    if (s->attempt.counter == 0) return;
    if (chance(h, 3) == 0) score_some(h, s);
    const int i = streaming_decode(h, s);
    const fake_worker *w = &h->workers[i];
    uint8_t bytes[4 * ROW_BYTES];
    if (s->decode_id == 0 || !h->is_up[i] || fake_is_closed(h->n, w->streams)) return;
    const uint32_t index = chance(h, s->samples);
    const uint32_t count = chance(h, 4);
    size_t used = 0;
    for (uint32_t k = 0; k < count; k++, used += ROW_BYTES) {
        const token_row row = {.token = (int32_t)chance(h, FAKE_VOCAB),
                               .has_logprob = s->has_logprob};
        row_record_encode(&row, bytes + used);
    }
    if (chance(h, 30) == 0 && used > 0) used -= 1 + chance(h, 20);
    const uint64_t offset = chance(h, 40) == 0 ? s->offset[index] + 4 : s->offset[index];
    const bool ends = chance(h, 4) == 0 || used == 0;
    h->n->sample = chance(h, 60) == 0 ? SAMPLES_MAX : index;
    if (ends && chance(h, 4) == 0) {
        fake_chunk_error(h->n, w, s->attempt, some_status(h), s->rows[index], "random");
    } else {
        fake_chunk(h->n, w, s->attempt, offset, bytes, used,
                   ends ? PROTO_FINISH_LENGTH : PROTO_FINISH_NONE, s->rows[index] + count);
        s->offset[index] += used;
        s->rows[index] += count;
    }
    h->n->sample = 0;
}

static void submit_some(history *h) {
    dispatch_request request;
    bt_error error;
    const uint64_t id = h->next_request++;
    fake_request(id, 1 + chance(h, 200), chance(h, 60), &request);
    request.is_credited = chance(h, 2) == 0;
    request.may_restart = chance(h, 2) == 0;
    if (chance(h, 2) == 0) request.generation.samples = 1 + chance(h, SAMPLES_MAX);
    request.generation.wants_logprob = chance(h, 2);
    if (request.generation.wants_logprob && chance(h, 2) == 0) {
        request.generation.wants_prompt_logprobs = 1;
        request.generation.prompt_logprobs_from = chance(h, request.prompt_tokens);
    }
    request.timeout_ms = chance(h, 4) == 0 ? 1 + chance(h, 3000) : 0;
    if (dispatch_submit(h->n->d, &request, h->n->now_us, &error) != BT_OK) return;
    h->submitted++;
    h->samples[id % FAKE_ENDS_MAX] = request.generation.samples;
}

static void say_capacity(history *h) {
    const int i = WORKERS / 2 + (int)chance(h, WORKERS / 2);
    proto_message message;
    if (!h->is_up[i] || fake_is_closed(h->n, h->workers[i].control)) return;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_CAPACITY;
    fake_say(h->n, h->workers[i].control, &message);
}

static void step(history *h) {
    const int i = (int)chance(h, WORKERS);
    switch (chance(h, 18)) {
    case 0:
        if (h->is_up[i]) {
            if (chance(h, 8) == 0) take_down(h, i);
        } else {
            bring_up(h, i);
        }
        return;
    case 1:
    case 2: submit_some(h); return;
    case 3:
        dispatch_cancel(h->n->d, 1 + chance(h, (uint32_t)h->next_request), h->n->now_us);
        return;
    case 4:
        dispatch_grant(h->n->d, 1 + chance(h, (uint32_t)h->next_request), chance(h, SAMPLES_MAX),
                       chance(h, 1 << 18), h->n->now_us);
        return;
    case 11:
        dispatch_cancel_sample(h->n->d, 1 + chance(h, (uint32_t)h->next_request),
                               chance(h, SAMPLES_MAX), h->n->now_us);
        return;
    case 5: fake_tick(h->n, chance(h, 200)); return;
    case 6: say_capacity(h); return;
    case 7:
    case 8:
    case 9:
    case 10: stream_some(h); return;
    default: react_to_some(h); return;
    }
}

static void check_counts(const history *h) {
    dispatch_view view;
    dispatch_look(h->n->d, &view);
    assert_int_equal(view.requests_queued + view.requests_running, h->submitted - h->n->end_count);
    assert_int_equal(view.requests_total, h->submitted);
    assert_int_equal(view.is_ready, h->n->is_ready);
}

static void check_workers_idle(const history *h) {
    dispatch_worker_view workers[WORKERS];
    const uint32_t count = dispatch_look_workers(h->n->d, workers, WORKERS);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(workers[i].attempts, 0);
}

/* Ends of the samples of one request follow each other or not; each is told once (the fixture
 * asserts that), and none is missing. */
static void check_sample_ends(const history *h) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < h->n->end_count; i++) {
        const uint64_t id = h->n->ends[i].request;
        for (uint32_t k = 0; k < h->samples[id % FAKE_ENDS_MAX]; k++, count++)
            (void)fake_sample_end_of(h->n, id, k, true);
    }
    assert_int_equal(count, h->n->sample_end_count);
}

/* Nobody answers any more: time alone must end everything. */
static void run_dry(history *h) {
    for (int i = 0; i < 700; i++) {
        fake_tick(h->n, 100);
        fake_forget(h->n);
    }
    check_counts(h);
    check_workers_idle(h);
    assert_int_equal(h->n->end_count, h->submitted);
    check_sample_ends(h);
}

static void count_mixed(const history *h) {
    for (uint32_t i = 0; i < h->n->sample_end_count; i++) {
        const fake_sample_end *e = &h->n->sample_ends[i];
        const dispatch_end *whole = fake_end_of(h->n, e->request, true);
        total.mixed += e->end.status != whole->status ? 1 : 0;
    }
}

static void count_ends(const history *h) {
    dispatch_view view;
    dispatch_look(h->n->d, &view);
    total.submitted += h->submitted;
    total.retries += view.retries_total;
    total.late += view.late_total;
    total.protocol_errors += view.protocol_errors_total;
    total.rows += h->n->rows_count;
    total.logprobs += h->n->positions_calls;
    total.restarts += h->n->restarts;
    count_mixed(h);
    for (uint32_t i = 0; i < h->n->end_count; i++) {
        const bt_status status = h->n->ends[i].end.status;
        total.ok += status == BT_OK ? 1 : 0;
        total.cancelled += status == BT_ERR_REQUEST_CANCELLED ? 1 : 0;
        total.late_deadline += status == BT_ERR_REQUEST_DEADLINE ? 1 : 0;
        total.no_worker += status == BT_ERR_REQUEST_NO_WORKER ? 1 : 0;
        total.peer += bt_status_scope(status) == BT_SCOPE_PEER ? 1 : 0;
    }
}

static void run_seed(uint64_t seed) {
    history h = {
        .random = seed * 0x9E3779B97F4A7C15u + 1, .next_request = 1, .next_incarnation = 1};
    dispatch_options options;
    fake_options(&options);
    options.seed = seed;
    options.requests_max = 40;
    options.stream_window_bytes = 1;
    h.n = fake_network_create(&options);
    for (int i = 0; i < STEPS; i++) {
        step(&h);
        check_counts(&h);
        h.n->rows_bytes = 0;
    }
    run_dry(&h);
    count_ends(&h);
    fake_network_destroy(h.n);
}

static void every_history_ends_well(void **state) {
    (void)state;
    bt_log_set_level((bt_log_level)-1);
    const uint64_t first = only_seed == 0 ? 1 : only_seed;
    const uint64_t last = only_seed == 0 ? SEEDS : only_seed;
    for (uint64_t seed = first; seed <= last; seed++) {
        print_message("seed %llu\n", (unsigned long long)seed);
        run_seed(seed);
    }
    const uint64_t seen[] = {
        total.submitted, total.ok,      total.cancelled, total.late_deadline, total.no_worker,
        total.peer,      total.retries, total.late,      total.rows,          total.protocol_errors,
        total.logprobs,  total.mixed,   total.restarts};
    for (size_t i = 0; i < sizeof seen / sizeof seen[0]; i++) {
        print_message("%llu ", (unsigned long long)seen[i]);
        if (only_seed == 0) assert_true(seen[i] > 100);
    }
    print_message("\n");
}

int main(int argc, char **argv) {
    if (argc > 1) only_seed = strtoull(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_history_ends_well)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
