/* How a step is shared: a long prompt in front delays no short one by its length, short ones do not
 * starve a long one, and who finds no pages is passed a bounded number of times. Steps are counted,
 * never timed. */
#include "prefill/prefill_internal.h"
#include "prompts.h"

enum { BUDGET = 4096, PLACES = 4, SHORT = 64, SHORTS = 10 };

/* ---- shares ---------------------------------------------------------------------------------- */

static void shares_are_equal_and_nothing_is_left_over(void **state) {
    (void)state;
    uint64_t random = 3;
    for (int run = 0; run < 20000; run++) {
        uint32_t left[8], shares[8];
        uint64_t wanted = 0;
        uint32_t given = 0;
        random = random * 6364136223846793005u + 1442695040888963407u;
        const uint32_t count = 1 + (uint32_t)(random >> 40) % 8;
        const uint32_t budget = count + (uint32_t)(random >> 45) % 600;
        for (uint32_t i = 0; i < count; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            left[i] = 1 + (uint32_t)(random >> 33) % (random % 3 == 0 ? 2000 : 60);
            wanted += left[i];
        }
        prefill_share(left, count, budget, shares);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t equal = budget / count;
            assert_true(shares[i] >= (left[i] < equal ? left[i] : equal));
            assert_true(shares[i] >= 1 && shares[i] <= left[i]);
            /* More than its share has only who is older than everybody that wants more. */
            if (shares[i] > equal && i > 0) assert_int_equal(shares[i - 1], left[i - 1]);
            given += shares[i];
        }
        assert_int_equal(given, wanted < budget ? wanted : budget);
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

static world *make_world(const world_options *options) {
    world *w = world_create(options);
    world_register(w);
    w->prefill.is_compute_held = true;
    return w;
}

static void end_step(world *w) {
    assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
    world_settle(w);
}

/* Tokens of this attempt in the step that runs; 0 when it is not in it. */
static uint32_t tokens_in_step(const world *w, proto_attempt a) {
    const prefill_batch *s = &w->prefill.prefill->step;
    if (!s->is_running) return 0;
    for (uint32_t i = 0; i < s->batch.sequences; i++)
        if (proto_attempt_equal(s->attempts[i]->id, a))
            return s->token_offsets[i + 1] - s->token_offsets[i];
    return 0;
}

typedef struct course {
    uint32_t first_token[SHORTS]; /* the step behind which each short one was done */
    uint32_t steps;               /* of the long one */
    uint32_t least;               /* tokens of the long one in any of its steps but the last */
} course;

/* One long prompt, then ten short ones while its first step runs. */
static course run_long_in_front(uint32_t long_tokens) {
    world *w = make_world(&(world_options){.prefill_pages = 8192,
                                           .context_tokens = 1 << 17,
                                           .chunk_tokens = BUDGET,
                                           .prompts_max = PLACES,
                                           .attempts_max = 16,
                                           .sequences_max = 16});
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    const proto_generation one = world_generation(1, SAMPLER_MASK_OFF);
    proto_attempt shorts[SHORTS];
    const proto_attempt large = prompts_start(w, long_tokens, &none, 50000);
    for (int i = 0; i < SHORTS; i++)
        shorts[i] = prompts_start(w, SHORT, &one, SHORT);
    course c = {.least = UINT32_MAX};
    bool is_over = false;
    for (uint32_t step = 1; !is_over; step++) {
        const uint32_t share = tokens_in_step(w, large);
        assert_true(share > 0);
        end_step(w);
        proto_prefill_done done;
        while (prompts_take_done(w, &done)) {
            assert_int_equal(done.status, BT_OK);
            is_over = is_over || proto_attempt_equal(done.attempt, large);
            for (int i = 0; i < SHORTS; i++)
                if (proto_attempt_equal(done.attempt, shorts[i])) c.first_token[i] = step;
        }
        if (!is_over && share < c.least) c.least = share;
        c.steps = step;
    }
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
    return c;
}

static void a_long_prompt_in_front_delays_nobody_by_its_length(void **state) {
    (void)state;
    const course large = run_long_in_front(100000);
    const course larger = run_long_in_front(130000);
    for (int i = 0; i < SHORTS; i++) {
        /* The first step is the long one's alone; then there are three places for ten. */
        assert_int_equal(large.first_token[i], 2 + i / (PLACES - 1));
        assert_int_equal(large.first_token[i], larger.first_token[i]);
    }
    assert_true(large.least >= BUDGET / PLACES);
    /* What the short ones do not need goes to it. */
    assert_int_equal(large.least, BUDGET - (PLACES - 1) * SHORT);
    assert_true(large.steps <= (100000 + SHORTS * SHORT) / BUDGET + 1);
}

/* Short ones that never cease to come do not starve it. */
static void short_ones_without_end_do_not_starve_a_long_one(void **state) {
    (void)state;
    world *w = make_world(&(world_options){.prefill_pages = 256,
                                           .chunk_tokens = 64,
                                           .prompts_max = 2,
                                           .attempts_max = 16,
                                           .sequences_max = 16});
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    const proto_attempt large = prompts_start(w, 960, &none, 960);
    uint32_t steps = 0;
    proto_prefill_done done = {0};
    while (!proto_attempt_equal(done.attempt, large)) {
        if (world_prefill_view(w).attempts < 16) (void)prompts_start(w, 200, &none, 200);
        assert_true(++steps <= 1 + (960 - 64) / 32);
        assert_true(tokens_in_step(w, large) >= 32);
        end_step(w);
        while (!proto_attempt_equal(done.attempt, large) && prompts_take_done(w, &done))
            assert_int_equal(done.status, BT_OK);
    }
    assert_int_equal(world_prefill_view(w).tokens_total, 64 * steps); /* no step is half empty */
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

/* More long ones than places: the last place goes round. */
static void behind_any_number_of_long_ones_a_short_one_has_its_turn(void **state) {
    (void)state;
    enum { LONGS = 7 };
    world *w = make_world(&(world_options){.prefill_pages = 1024,
                                           .chunk_tokens = 64,
                                           .prompts_max = 2,
                                           .attempts_max = 16,
                                           .sequences_max = 16});
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    proto_attempt longs[LONGS];
    for (int i = 0; i < LONGS; i++)
        longs[i] = prompts_start(w, 1000, &none, 1000);
    const proto_attempt last = prompts_start(w, 20, &none, 20);
    uint32_t steps = 0;
    uint32_t turns[LONGS] = {0};
    proto_prefill_done done;
    do {
        assert_true(++steps <= LONGS + 1);
        for (int i = 0; i < LONGS; i++)
            turns[i] += tokens_in_step(w, longs[i]) > 0;
        end_step(w);
    } while (!prompts_take_done(w, &done));
    assert_true(proto_attempt_equal(done.attempt, last));
    assert_int_equal(turns[0], steps); /* the oldest is in every step */
    for (int i = 1; i < LONGS; i++)
        assert_true(turns[i] >= 1);
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void with_one_place_they_come_one_after_the_other(void **state) {
    (void)state;
    world *w = make_world(&(world_options){.chunk_tokens = 64, .prompts_max = 1});
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    const proto_attempt large = prompts_start(w, 300, &none, 300);
    const proto_attempt small = prompts_start(w, 10, &none, 10);
    for (int i = 0; i < 5; i++) {
        prompts_expect_none(w);
        assert_int_equal(w->prefill.prefill->step.batch.sequences, 1);
        end_step(w);
    }
    (void)prompts_expect_done(w, large, BT_OK);
    prompts_expect_none(w);
    end_step(w);
    (void)prompts_expect_done(w, small, BT_OK);
    w->prefill.is_compute_held = false;
    world_expect_empty(w);
    world_destroy(w);
}

/* A budget with fewer tokens than there are places. */
static void a_budget_of_one_token_is_enough(void **state) {
    (void)state;
    for (uint32_t budget = 1; budget <= 3; budget++) {
        world *w = world_create(&(world_options){.chunk_tokens = budget, .prompts_max = 8});
        world_register(w);
        const proto_generation g = world_generation(2, SAMPLER_MASK_SUPPORT);
        static world_stream stream;
        proto_attempt attempts[5];
        for (uint32_t i = 0; i < 5; i++)
            attempts[i] = world_start(w, 10 + 7 * i, &g, UINT64_MAX);
        world_settle(w);
        for (uint32_t i = 0; i < 5; i++) {
            world_read(w, attempts[i], &stream);
            world_expect_rows(w, &stream, 10 + 7 * i, &g, 2);
        }
        assert_int_equal(world_prefill_view(w).tokens_total, 10 + 17 + 24 + 31 + 38);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* ---- pages ----------------------------------------------------------------------------------- */

static void who_waits_for_pages_is_passed_a_bounded_number_of_times(void **state) {
    (void)state;
    world *w = world_create(
        &(world_options){.prefill_pages = 24, .attempts_max = 64, .sequences_max = 64});
    world_register(w);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    const proto_generation one = world_generation(1, SAMPLER_MASK_OFF);
    w->is_network_held = true;
    const proto_attempt pinned = prompts_start(w, 160, &one, 160); /* 10 pages until its ack */
    world_settle(w);
    (void)prompts_expect_done(w, pinned, BT_OK);
    const proto_attempt large = prompts_start(w, 320, &none, 320); /* 20 pages */
    for (int i = 0; i < PREFILL_PASSES_MAX; i++) {
        const proto_attempt small = prompts_start(w, 20, &none, 20);
        world_settle(w);
        (void)prompts_expect_done(w, small, BT_OK);
    }
    const proto_attempt behind = prompts_start(w, 20, &none, 20);
    world_settle(w);
    prompts_expect_none(w); /* 14 pages are free, and kept */
    assert_int_equal(world_prefill_view(w).queued, 2);
    assert_int_equal(world_prefill_view(w).pages_free, 14);
    w->is_network_held = false;
    world_settle(w);
    proto_prefill_done done[2] = {{.status = 0}};
    assert_true(prompts_take_done(w, &done[0]) && prompts_take_done(w, &done[1]));
    assert_true(proto_attempt_equal(done[0].attempt, behind)); /* beside the large one, at last */
    assert_true(proto_attempt_equal(done[1].attempt, large));
    world_expect_empty(w);
    world_destroy(w);
}

/* It ends while it waits: those behind it go on at once. */
static void who_ends_while_waiting_holds_nobody_up(void **state) {
    (void)state;
    world *w = world_create(
        &(world_options){.prefill_pages = 24, .attempts_max = 64, .sequences_max = 64});
    world_register(w);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    const proto_generation one = world_generation(1, SAMPLER_MASK_OFF);
    w->is_network_held = true;
    (void)prompts_start(w, 160, &one, 160);
    const proto_attempt large = prompts_start(w, 320, &none, 320);
    for (int i = 0; i < PREFILL_PASSES_MAX + 3; i++)
        (void)prompts_start(w, 20, &none, 20);
    world_settle(w);
    assert_int_equal(world_prefill_view(w).queued, 1 + 3);
    world_cancel(w, &w->prefill, large);
    world_settle(w);
    assert_int_equal(world_prefill_view(w).queued, 0);
    w->is_network_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_are_equal_and_nothing_is_left_over),
        cmocka_unit_test(a_long_prompt_in_front_delays_nobody_by_its_length),
        cmocka_unit_test(short_ones_without_end_do_not_starve_a_long_one),
        cmocka_unit_test(behind_any_number_of_long_ones_a_short_one_has_its_turn),
        cmocka_unit_test(with_one_place_they_come_one_after_the_other),
        cmocka_unit_test(a_budget_of_one_token_is_enough),
        cmocka_unit_test(who_waits_for_pages_is_passed_a_bounded_number_of_times),
        cmocka_unit_test(who_ends_while_waiting_holds_nobody_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
