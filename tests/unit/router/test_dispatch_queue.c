/* Which request goes where and when: load, fullness, fairness. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "dispatch_fixture.h"

enum { PREFILLS = 3, DECODES = 3 };

static fake_network *n;
static fake_worker prefills[PREFILLS], decodes[DECODES];

/* `p` prefills and `m` decodes, all paired, decodes with that many pages. */
static void build(uint32_t p, uint32_t m, uint32_t pages) {
    for (uint32_t i = 0; i < p; i++)
        fake_join(n, &prefills[i], PROTO_ROLE_PREFILL, 100 + i);
    for (uint32_t k = 0; k < m; k++) {
        fake_enter(n, &decodes[k], PROTO_ROLE_DECODE, 200 + k);
        fake_ready(n, &decodes[k], pages);
        for (uint32_t i = 0; i < p; i++)
            fake_pair(n, &decodes[k], &prefills[i], BT_OK);
    }
}

static int set_up(void **state) {
    (void)state;
    n = fake_network_create(NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    fake_network_destroy(n);
    return 0;
}

/* The next RESERVE at any decode; which decode, or -1. */
static int next_reserve(proto_reserve *out) {
    for (int k = 0; k < DECODES; k++) {
        proto_message message;
        if (!fake_take(n, decodes[k].control, PROTO_RESERVE, &message)) continue;
        *out = message.reserve;
        return k;
    }
    return -1;
}

static void say_capacity(const fake_worker *decode) {
    proto_message message;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_CAPACITY;
    fake_say(n, decode->control, &message);
}

static uint32_t queued(void) {
    dispatch_view view;
    dispatch_look(n->d, &view);
    return view.requests_queued;
}

static void prefill_is_given_less_than_two_steps(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 1, FAKE_PAGES);
    proto_attempt attempts[3];
    for (uint64_t id = 1; id <= 4; id++)
        fake_submit(n, id, FAKE_STEP_TOKENS - 1, 4); /* 127: two are 254, less than 256 */
    for (int i = 0; i < 3; i++) {
        assert_int_equal(next_reserve(&reserve), 0);
        attempts[i] = reserve.attempt;
    }
    assert_int_equal(next_reserve(&reserve), -1);
    assert_int_equal(queued(), 1);
    /* Not when it is reserved, but when it is computed. */
    for (int i = 0; i < 3; i++)
        fake_reserve_reply(n, &decodes[0], attempts[i], BT_OK);
    assert_int_equal(next_reserve(&reserve), -1);
    fake_done(n, &prefills[0], attempts[0], BT_OK);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(queued(), 0);
}

/* Two steps of each kind: short prompts go to a prefill that has long ones, and the other way. */
static void long_and_short_prompts_wait_for_their_own_kind(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefills[0], &decodes[0]};
    proto_reserve reserve;
    build(1, 1, 1000);
    fake_submit(n, 1, 8 * FAKE_STEP_TOKENS, 4);
    assert_int_equal(next_reserve(&reserve), 0);
    const proto_attempt first = reserve.attempt;
    fake_reserve_reply(n, &decodes[0], first, BT_OK);
    fake_submit(n, 2, FAKE_STEP_TOKENS + 1, 4);
    assert_int_equal(next_reserve(&reserve), -1);
    for (uint64_t id = 3; id <= 5; id++) {
        fake_submit(n, id, FAKE_STEP_TOKENS, 4);
        assert_int_equal(next_reserve(&reserve), id < 5 ? 0 : -1);
    }
    assert_int_equal(queued(), 2);
    /* The short ones are not with prefill yet. */
    prefills[0].queued_tokens = 2 * FAKE_STEP_TOKENS;
    fake_live(n, 200, workers, 2);
    assert_int_equal(next_reserve(&reserve), -1);
    prefills[0].queued_tokens = 2 * FAKE_STEP_TOKENS - 1;
    fake_live(n, 200, workers, 2);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.prompt_tokens, FAKE_STEP_TOKENS + 1);
    assert_int_equal(next_reserve(&reserve), -1);
    fake_done(n, &prefills[0], first, BT_OK);
    assert_int_equal(next_reserve(&reserve), -1);
    dispatch_cancel(n->d, 3, n->now_us);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.prompt_tokens, FAKE_STEP_TOKENS);
    assert_int_equal(queued(), 0);
}

/* What a worker holds without the router's doing shows: a leak of either side can be seen. */
static void a_pong_tells_what_is_held(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefills[0], &decodes[0]};
    dispatch_worker_view views[2];
    build(1, 1, FAKE_PAGES);
    assert_int_equal(dispatch_look_workers(n->d, views, 2), 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(views[i].pages_free, FAKE_PAGES);
        assert_int_equal(views[i].rows_free, FAKE_ROWS);
        assert_int_equal(views[i].rows_total, FAKE_ROWS);
    }
    const uint64_t before = views[0].heartbeats;
    prefills[0].pages_used = decodes[0].pages_used = 7;
    prefills[0].rows_used = decodes[0].rows_used = 2;
    fake_live(n, 200, workers, 2);
    (void)dispatch_look_workers(n->d, views, 2);
    assert_true(views[0].heartbeats > before);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(views[i].pages_free, FAKE_PAGES - 7);
        assert_int_equal(views[i].rows_free, FAKE_ROWS - 2);
    }
}

static void a_pong_tells_what_is_computed(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefills[0], &decodes[0]};
    proto_reserve reserve;
    build(1, 1, 1000);
    fake_submit(n, 1, 1000, 4); /* many steps */
    assert_int_equal(next_reserve(&reserve), 0);
    fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_OK);
    fake_submit(n, 2, 150, 4);
    prefills[0].queued_tokens = 300;
    fake_live(n, 200, workers, 2);
    assert_int_equal(next_reserve(&reserve), -1);
    prefills[0].queued_tokens = 200;
    fake_live(n, 200, workers, 2);
    assert_int_equal(next_reserve(&reserve), 0);
    /* What was just given is not in the PONG yet and counts all the same: 200 + 150. */
    fake_submit(n, 3, 150, 4);
    fake_live(n, 200, workers, 2);
    assert_int_equal(next_reserve(&reserve), -1);
}

static void load_of_others_counts_too(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefills[0], &decodes[0]};
    proto_reserve reserve;
    build(1, 1, FAKE_PAGES);
    prefills[0].queued_tokens = 256; /* of another router */
    fake_live(n, 200, workers, 2);
    fake_submit(n, 1, 10, 4);
    assert_int_equal(next_reserve(&reserve), -1);
    prefills[0].queued_tokens = 255;
    fake_live(n, 200, workers, 2);
    assert_int_equal(next_reserve(&reserve), 0);
}

static void work_goes_to_the_least_loaded(void **state) {
    (void)state;
    proto_reserve reserve;
    uint32_t tokens[PREFILLS] = {0};
    build(PREFILLS, 1, 1000);
    static const uint32_t prompts[] = {100, 20, 30, 40, 50, 20, 10};
    for (uint64_t i = 0; i < 7; i++) {
        fake_submit(n, i + 1, prompts[i], 1);
        assert_int_equal(next_reserve(&reserve), 0);
        for (int p = 0; p < PREFILLS; p++) {
            if (prefills[p].id != reserve.prefill_worker_id) continue;
            for (int other = 0; other < PREFILLS; other++)
                assert_true(tokens[p] <= tokens[other]);
            tokens[p] += prompts[i];
            break;
        }
    }
}

static void ties_are_broken_by_chance(void **state) {
    (void)state;
    proto_reserve reserve;
    int prefill_seen[PREFILLS] = {0}, decode_seen[DECODES] = {0};
    build(PREFILLS, DECODES, FAKE_PAGES);
    for (uint64_t id = 1; id <= 300; id++) {
        fake_submit(n, id, 10, 1);
        const int k = next_reserve(&reserve);
        assert_in_range(k, 0, DECODES - 1);
        decode_seen[k]++;
        for (int p = 0; p < PREFILLS; p++)
            prefill_seen[p] += prefills[p].id == reserve.prefill_worker_id ? 1 : 0;
        dispatch_cancel(n->d, id, n->now_us); /* all are equal again */
    }
    for (int i = 0; i < PREFILLS; i++)
        assert_in_range(prefill_seen[i], 60, 140);
    for (int i = 0; i < DECODES; i++)
        assert_in_range(decode_seen[i], 60, 140);
}

static void decode_with_most_free_pages_is_chosen(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 2, FAKE_PAGES);
    fake_submit(n, 1, 150, 8); /* 10 pages */
    const int first = next_reserve(&reserve);
    for (uint64_t id = 2; id <= 10; id++) {
        fake_submit(n, id, 8, 8); /* 1 page each */
        assert_int_equal(next_reserve(&reserve), 1 - first);
    }
}

static void pages_of_others_count_too(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefills[0], &decodes[0], &decodes[1]};
    proto_reserve reserve;
    build(1, 2, FAKE_PAGES);
    decodes[0].pages_used = 30; /* another router's, or quarantined */
    fake_live(n, 200, workers, 3);
    for (uint64_t id = 1; id <= 10; id++) {
        fake_submit(n, id, 8, 8);
        assert_int_equal(next_reserve(&reserve), 1);
        dispatch_cancel(n->d, id, n->now_us);
    }
}

static void sequences_are_limited(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 1, 1000);
    proto_attempt first = {0};
    for (uint64_t id = 1; id <= 33; id++) {
        fake_submit(n, id, 1, 1);
        const int k = next_reserve(&reserve);
        assert_int_equal(k, id <= 32 ? 0 : -1);
        if (id == 1) first = reserve.attempt;
    }
    fake_reserve_reply(n, &decodes[0], first, BT_ERR_REQUEST_INVALID);
    assert_int_equal(next_reserve(&reserve), 0);
}

/* ---- full decodes ---------------------------------------------------------------------------- */

static void a_full_decode_is_left_alone_until_it_has_capacity(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 1, FAKE_PAGES);
    fake_submit(n, 1, 16, 16);
    assert_int_equal(next_reserve(&reserve), 0);
    fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_ERR_REQUEST_FULL);
    assert_int_equal(queued(), 1);
    fake_submit(n, 2, 16, 16);
    assert_int_equal(next_reserve(&reserve), -1);
    say_capacity(&decodes[0]);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.attempt.counter, 2); /* a new attempt of the first request */
    fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_OK);
    assert_int_equal(next_reserve(&reserve), 0);
    /* Being put back is no failure. */
    fake_done(n, &prefills[0], (proto_attempt){0xabcdef0123u, 2}, BT_ERR_REQUEST_INVALID);
    assert_int_equal(fake_end_of(n, 1, true)->attempts, 1);
}

static void a_lost_capacity_does_not_stall(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefills[0], &decodes[0]};
    proto_reserve reserve;
    build(1, 1, FAKE_PAGES);
    fake_submit(n, 1, 16, 16);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(next_reserve(&reserve), 0);
        fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_ERR_REQUEST_FULL);
        fake_live(n, 900, workers, 2);
        assert_int_equal(next_reserve(&reserve), -1);
        fake_live(n, 150, workers, 2);
    }
    assert_int_equal(next_reserve(&reserve), 0);
}

static void the_other_decode_is_tried_first(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 2, FAKE_PAGES);
    fake_submit(n, 1, 16, 16);
    const int first = next_reserve(&reserve);
    fake_reserve_reply(n, &decodes[first], reserve.attempt, BT_ERR_REQUEST_FULL);
    assert_int_equal(next_reserve(&reserve), 1 - first);
}

static void small_requests_pass_a_big_one_elsewhere(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 2, FAKE_PAGES);
    fake_submit(n, 1, 80, 80 * 16); /* 5 pages at first */
    for (int i = 0; i < 2; i++) {
        const int k = next_reserve(&reserve);
        assert_in_range(k, 0, 1);
        fake_reserve_reply(n, &decodes[k], reserve.attempt, BT_ERR_REQUEST_FULL);
    }
    /* It fits nowhere now and keeps one decode; the other serves small requests. */
    int small_at = -1;
    for (uint64_t id = 2; id <= 6; id++) {
        fake_submit(n, id, 8, 8);
        const int k = next_reserve(&reserve);
        assert_in_range(k, 0, 1);
        if (small_at < 0) small_at = k;
        assert_int_equal(k, small_at);
    }
    const int kept = 1 - small_at;
    assert_int_equal(queued(), 1);
    /* Room at the kept decode is the big one's, not enough as it may be. */
    for (int i = 0; i < 3; i++) {
        say_capacity(&decodes[kept]);
        assert_int_equal(next_reserve(&reserve), kept);
        assert_int_equal(reserve.generation.max_new_tokens, 80 * 16);
        fake_submit(n, 10 + (uint64_t)i, 8, 8);
        proto_reserve small;
        assert_int_equal(next_reserve(&small), small_at);
        fake_reserve_reply(n, &decodes[kept], reserve.attempt, BT_ERR_REQUEST_FULL);
    }
    say_capacity(&decodes[kept]);
    assert_int_equal(next_reserve(&reserve), kept);
    fake_reserve_reply(n, &decodes[kept], reserve.attempt, BT_OK);
    /* Now it is open to all again. */
    dispatch_cancel(n->d, 1, n->now_us);
    fake_submit(n, 20, 8, 8);
    assert_int_equal(next_reserve(&reserve), kept); /* more free pages than the other */
}

static void a_claim_ends_with_its_request_or_its_decode(void **state) {
    (void)state;
    proto_reserve reserve;
    for (int how = 0; how < 2; how++) {
        (void)tear_down(NULL);
        (void)set_up(NULL);
        build(1, 1, FAKE_PAGES);
        fake_submit(n, 1, 80, 80 * 16); /* 5 pages at first */
        assert_int_equal(next_reserve(&reserve), 0);
        fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_ERR_REQUEST_FULL);
        fake_submit(n, 2, 8, 8);
        assert_int_equal(next_reserve(&reserve), -1);
        if (how == 0) {
            dispatch_cancel(n->d, 1, n->now_us);
            assert_int_equal(next_reserve(&reserve), 0);
            assert_int_equal(reserve.prompt_tokens, 8);
            continue;
        }
        fake_drop(n, decodes[0].control);
        fake_enter(n, &decodes[1], PROTO_ROLE_DECODE, 300);
        fake_ready(n, &decodes[1], FAKE_PAGES);
        fake_pair(n, &decodes[1], &prefills[0], BT_OK);
        assert_int_equal(next_reserve(&reserve), 1);
        assert_int_equal(reserve.prompt_tokens, 80);
    }
}

static void the_queue_is_first_in_first_out_over_retries(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 1, FAKE_PAGES);
    for (uint64_t id = 1; id <= 5; id++)
        fake_submit(n, id, FAKE_STEP_TOKENS + (uint32_t)id, 4);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.prompt_tokens, FAKE_STEP_TOKENS + 1);
    const proto_attempt first = reserve.attempt;
    assert_int_equal(next_reserve(&reserve), 0);
    fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_OK);
    assert_int_equal(next_reserve(&reserve), -1);
    /* The first fails and is the first again, before those that waited. */
    fake_reserve_reply(n, &decodes[0], first, BT_ERR_WORKER_INTERNAL);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.prompt_tokens, FAKE_STEP_TOKENS + 1);
    fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_OK);
    fake_done(n, &prefills[0], reserve.attempt, BT_OK);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.prompt_tokens, FAKE_STEP_TOKENS + 3);
}

/* The prompt's pages once, and a tail for each further sample; nothing for what may be drawn. */
static void decode_is_charged_for_the_prompt_and_the_tails(void **state) {
    (void)state;
    proto_reserve reserve;
    dispatch_worker_view views[2];
    dispatch_request request;
    bt_error error;
    build(1, 1, FAKE_PAGES);
    fake_request(1, 40, 1000, &request);
    request.generation.samples = 5;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(dispatch_look_workers(n->d, views, 2), 2);
    assert_int_equal(views[1].role, PROTO_ROLE_DECODE);
    assert_int_equal(views[1].pages_free, FAKE_PAGES - 3 - 4);
    dispatch_cancel(n->d, 1, n->now_us);
    (void)dispatch_look_workers(n->d, views, 2);
    assert_int_equal(views[1].pages_free, FAKE_PAGES);
}

/* Each sample is a sequence: 32 of them are all that this decode runs at once. What does not fit
 * keeps the decode for itself, or single samples would pass it for ever. */
static void samples_are_sequences(void **state) {
    (void)state;
    proto_reserve reserve;
    dispatch_request request;
    bt_error error;
    build(1, 1, 1000);
    for (uint64_t id = 1; id <= 3; id++) {
        fake_request(id, 1, 1, &request);
        request.generation.samples = 15;
        assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
        assert_int_equal(next_reserve(&reserve), id <= 2 ? 0 : -1);
    }
    for (uint64_t id = 4; id <= 7; id++)
        fake_submit(n, id, 1, 1);
    assert_int_equal(next_reserve(&reserve), -1);
    assert_int_equal(queued(), 5);
    dispatch_cancel(n->d, 1, n->now_us);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.generation.samples, 15);
    assert_int_equal(next_reserve(&reserve), -1); /* granted, it gives the decode back */
    fake_reserve_samples(n, &decodes[0], reserve.attempt, 15);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.generation.samples, 1);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(next_reserve(&reserve), -1); /* 15 + 15 + 2 */
}

static void submit_samples(uint64_t id, uint32_t samples) {
    dispatch_request request;
    bt_error error;
    fake_request(id, 1, 1, &request);
    request.generation.samples = samples;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
}

/* A decode that no prefill reaches is empty, and would stay so for the one that keeps it. */
static void a_decode_that_no_prefill_reaches_is_not_kept(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 2, 1000);
    fake_pair(n, &decodes[0], &prefills[0], BT_ERR_PEER_TIMEOUT);
    submit_samples(1, 30);
    assert_int_equal(next_reserve(&reserve), 1);
    submit_samples(2, 30);
    submit_samples(3, 1);
    assert_int_equal(next_reserve(&reserve), -1); /* 30 + 1 would fit, but it is kept */
    dispatch_cancel(n->d, 1, n->now_us);
    assert_int_equal(next_reserve(&reserve), 1);
    assert_int_equal(reserve.generation.samples, 30);
}

static void a_claim_moves_when_its_pair_breaks(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 2, 1000);
    for (uint64_t id = 1; id <= 2; id++) {
        submit_samples(id, 30);
        const int k = next_reserve(&reserve);
        fake_reserve_samples(n, &decodes[k], reserve.attempt, 30);
    }
    submit_samples(3, 30);
    submit_samples(4, 1);
    const int other = next_reserve(&reserve);
    assert_in_range(other, 0, 1);
    fake_pair(n, &decodes[1 - other], &prefills[0], BT_ERR_PEER_TIMEOUT);
    submit_samples(5, 1);
    assert_int_equal(next_reserve(&reserve), -1); /* 30 + 1 + 1 would fit */
}

/* The other decode is for everybody. */
static void many_samples_keep_one_decode_only(void **state) {
    (void)state;
    proto_reserve reserve;
    dispatch_request request;
    bt_error error;
    build(1, 2, 1000);
    for (uint64_t id = 1; id <= 3; id++) {
        fake_request(id, 1, 1, &request);
        request.generation.samples = 30;
        assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
        assert_true((next_reserve(&reserve) >= 0) == (id <= 2));
    }
    fake_submit(n, 4, 1, 1);
    const int other = next_reserve(&reserve);
    assert_in_range(other, 0, 1);
    fake_submit(n, 5, 1, 1);
    assert_int_equal(next_reserve(&reserve), other);
    fake_submit(n, 6, 1, 1);
    assert_int_equal(next_reserve(&reserve), -1); /* 30 + 2 there */
}

/* Prompts of the kind that must wait are no wall, however many. */
static void short_prompts_are_found_behind_many_long_ones(void **state) {
    (void)state;
    enum { LONG = FAKE_STEP_TOKENS + 1, WAITING = 600 };
    proto_reserve reserve;
    build(1, 1, 1000);
    for (uint64_t id = 1; id <= 2 + WAITING; id++) {
        fake_submit(n, id, LONG, 4);
        assert_true((next_reserve(&reserve) == 0) == (id <= 2));
    }
    fake_submit(n, 9000, 8, 4);
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.prompt_tokens, 8);
    assert_int_equal(queued(), WAITING);
}

/* Nor do they keep many samples from claiming a decode. */
static void many_samples_claim_behind_a_long_prompt(void **state) {
    (void)state;
    enum { LONG = FAKE_STEP_TOKENS + 1 };
    proto_reserve reserve;
    proto_attempt attempts[2];
    build(1, 1, 1000);
    for (uint64_t id = 1; id <= 2; id++) {
        fake_submit(n, id, LONG, 4);
        assert_int_equal(next_reserve(&reserve), 0);
        attempts[id - 1] = reserve.attempt;
        fake_reserve_reply(n, &decodes[0], reserve.attempt, BT_OK);
    }
    fake_submit(n, 3, LONG, 4); /* its prefill is closed */
    submit_samples(4, 32);      /* all that the decode runs */
    submit_samples(5, 1);
    assert_int_equal(next_reserve(&reserve), -1);
    for (int i = 0; i < 2; i++) {
        fake_done(n, &prefills[0], attempts[i], BT_OK);
        dispatch_cancel(n->d, (uint64_t)i + 1, n->now_us);
    }
    assert_int_equal(next_reserve(&reserve), 0);
    assert_int_equal(reserve.generation.samples, 32);
}

static void more_samples_than_slots_are_refused(void **state) {
    (void)state;
    proto_reserve reserve;
    dispatch_request request;
    bt_error error;
    build(1, 1, 1000);
    fake_request(1, 16, 16, &request);
    request.generation.samples = 33;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->http_status, 400);
    assert_string_equal(end->text, "33 samples of one request do not fit: the workers take 32");
    fake_request(2, 16, 16, &request);
    request.generation.samples = 32;
    assert_int_equal(dispatch_submit(n->d, &request, n->now_us, &error), BT_OK);
    assert_int_equal(next_reserve(&reserve), 0);
}

/* What a request without a length may ask for is what is not refused. */
static void the_longest_sequence_is_one_token_more_than_its_pages(void **state) {
    (void)state;
    proto_reserve reserve;
    dispatch_view view;
    build(1, 1, FAKE_PAGES);
    dispatch_look(n->d, &view);
    assert_int_equal(view.sequence_tokens_max, FAKE_PAGES * FAKE_PAGE_TOKENS + 1);
    fake_submit(n, 1, 100, (uint32_t)view.sequence_tokens_max - 100);
    assert_int_equal(next_reserve(&reserve), 0);
    fake_submit(n, 2, 100, (uint32_t)view.sequence_tokens_max - 99);
    assert_int_equal(fake_end_of(n, 2, true)->status, BT_ERR_REQUEST_TOO_LARGE);
}

static void a_larger_decode_takes_what_a_smaller_cannot(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 1, 10);
    fake_enter(n, &decodes[1], PROTO_ROLE_DECODE, 300);
    fake_ready(n, &decodes[1], 50);
    fake_pair(n, &decodes[1], &prefills[0], BT_OK);
    fake_submit(n, 1, 16, 400); /* 26 pages */
    assert_int_equal(next_reserve(&reserve), 1);
    fake_submit(n, 2, 16, 1000); /* 64: nobody's */
    assert_int_equal(fake_end_of(n, 2, true)->status, BT_ERR_REQUEST_TOO_LARGE);
    /* The small one says that it is too large although the router thought it fits. */
    fake_submit(n, 3, 16, 130);
    const int k = next_reserve(&reserve);
    fake_reserve_reply(n, &decodes[k], reserve.attempt, BT_ERR_REQUEST_TOO_LARGE);
    if (k == 0) {
        assert_int_equal(next_reserve(&reserve), 1);
    } else {
        assert_int_equal(fake_end_of(n, 3, true)->status, BT_ERR_REQUEST_TOO_LARGE);
    }
}

static void only_ready_pairs_are_used(void **state) {
    (void)state;
    proto_reserve reserve;
    build(1, 1, FAKE_PAGES);
    /* Another prefill that is a pair with nobody, and a decode with nobody. */
    fake_join(n, &prefills[1], PROTO_ROLE_PREFILL, 101);
    fake_enter(n, &decodes[1], PROTO_ROLE_DECODE, 201);
    fake_ready(n, &decodes[1], 1000);
    for (uint64_t id = 1; id <= 20; id++) {
        fake_submit(n, id, 10, 1);
        assert_int_equal(next_reserve(&reserve), 0);
        assert_int_equal(reserve.prefill_worker_id, prefills[0].id);
        dispatch_cancel(n->d, id, n->now_us);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(prefill_is_given_less_than_two_steps),
        TEST(long_and_short_prompts_wait_for_their_own_kind),
        TEST(a_pong_tells_what_is_held),
        TEST(a_pong_tells_what_is_computed),
        TEST(load_of_others_counts_too),
        TEST(work_goes_to_the_least_loaded),
        TEST(ties_are_broken_by_chance),
        TEST(decode_with_most_free_pages_is_chosen),
        TEST(pages_of_others_count_too),
        TEST(sequences_are_limited),
        TEST(a_full_decode_is_left_alone_until_it_has_capacity),
        TEST(a_lost_capacity_does_not_stall),
        TEST(the_other_decode_is_tried_first),
        TEST(small_requests_pass_a_big_one_elsewhere),
        TEST(a_claim_ends_with_its_request_or_its_decode),
        TEST(the_queue_is_first_in_first_out_over_retries),
        TEST(decode_is_charged_for_the_prompt_and_the_tails),
        TEST(samples_are_sequences),
        TEST(short_prompts_are_found_behind_many_long_ones),
        TEST(many_samples_claim_behind_a_long_prompt),
        TEST(many_samples_keep_one_decode_only),
        TEST(a_decode_that_no_prefill_reaches_is_not_kept),
        TEST(a_claim_moves_when_its_pair_breaks),
        TEST(more_samples_than_slots_are_refused),
        TEST(the_longest_sequence_is_one_token_more_than_its_pages),
        TEST(a_larger_decode_takes_what_a_smaller_cannot),
        TEST(only_ready_pairs_are_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
