/* The prefix cache in the core: what a prompt computes and what it takes from pages that are there,
 * at every boundary; who is pinned, who is evicted, what stays out. Computing hashes the prefix and
 * reads all of it back from the pages, so that a wrong page gives no plausible row. */
#include <stdio.h>

#include "prefill/prefill_internal.h"
#include "prompts.h"

enum { PAGE = 16 };

static world_stream stream;

static world *make_world(uint32_t prefill_pages) {
    world *w = world_create(&(world_options){.prefill_pages = prefill_pages,
                                             .decode_pages = 256,
                                             .attempts_max = 32,
                                             .sequences_max = 32,
                                             .has_prefix_cache = true});
    world_register(w);
    return w;
}

/* Runs one prompt to its end; what it took from the cache is in its DONE and on its stream. */
static uint32_t serve(world *w, uint32_t tokens, const proto_generation *g) {
    const uint64_t before = world_prefill_view(w).tokens_total;
    const proto_attempt a = world_start(w, tokens, g, UINT64_MAX);
    world_settle(w);
    const proto_prefill_done done = prompts_expect_done(w, a, BT_OK);
    world_read(w, a, &stream);
    world_expect_rows(w, &stream, tokens, g, g->max_new_tokens);
    assert_int_equal(stream.last.cached_tokens, done.cached_tokens);
    assert_int_equal(world_prefill_view(w).tokens_total - before, tokens - done.cached_tokens);
    world_expect_empty(w);
    return done.cached_tokens;
}

static uint32_t cached_pages(const world *w) {
    return world_prefill_view(w).pages_cached;
}

/* ---- boundaries ------------------------------------------------------------------------------ */

static void the_same_prompt_again_computes_its_last_token_at_least(void **state) {
    (void)state;
    static const uint32_t lengths[] = {1, 2, 15, 16, 17, 31, 32, 33, 48, 100, 512};
    for (size_t i = 0; i < BT_ARRAY_COUNT(lengths); i++) {
        const uint32_t tokens = lengths[i];
        world *w = make_world(64);
        const proto_generation g = world_generation(3, SAMPLER_MASK_SUPPORT);
        assert_int_equal(serve(w, tokens, &g), 0);
        assert_int_equal(cached_pages(w), tokens / PAGE);
        for (int again = 0; again < 3; again++)
            assert_int_equal(serve(w, tokens, &g), (tokens - 1) / PAGE * PAGE);
        assert_int_equal(cached_pages(w), tokens / PAGE);
        world_destroy(w);
    }
}

static void a_prefix_that_ends_in_a_page_is_shared_up_to_that_page(void **state) {
    (void)state;
    for (uint32_t shared = 0; shared <= 64; shared++) {
        world *w = make_world(64);
        const proto_generation g = world_generation(2, SAMPLER_MASK_SELECTED);
        prompts_fill(w, 0, 70, 1);
        assert_int_equal(serve(w, 70, &g), 0);
        prompts_fill(w, shared, 100, 2);
        assert_int_equal(serve(w, 100, &g), shared / PAGE * PAGE);
        world_destroy(w);
    }
}

static void a_longer_prompt_goes_on_where_a_shorter_one_ended(void **state) {
    (void)state;
    world *w = make_world(64);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    uint32_t expected = 0;
    for (uint32_t tokens = 20; tokens < 500; tokens += 31) {
        assert_int_equal(serve(w, tokens, &g), expected);
        expected = tokens / PAGE * PAGE;
    }
    world_destroy(w);
}

static void without_the_cache_nothing_is_kept(void **state) {
    (void)state;
    world *w = world_create(NULL);
    world_register(w);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    for (int i = 0; i < 2; i++)
        assert_int_equal(serve(w, 100, &g), 0);
    assert_int_equal(cached_pages(w), 0);
    assert_null(w->prefill.prefill->cache);
    world_destroy(w);
}

/* The timer's check notices a hold that nobody in hand has, and an entry without its page. */
static void a_hold_of_nobody_is_noticed(void **state) {
    (void)state;
    world *w = make_world(64);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    assert_int_equal(serve(w, 40, &g), 0);
    uint32_t page = 0;
    while (kv_pool_state(w->prefill.pages, page) != KV_PAGE_SHARED)
        page++;
    assert_true(prefill_core_check(w->prefill.prefill));
    kv_pool_hold(w->prefill.pages, &page, 1);
    assert_false(prefill_core_check(w->prefill.prefill));
    kv_pool_drop(w->prefill.pages, &page, 1);
    assert_true(prefill_core_check(w->prefill.prefill));
    world_destroy(w);
}

/* ---- whose it is ----------------------------------------------------------------------------- */

static void requests_of_different_salts_share_nothing(void **state) {
    (void)state;
    world *w = make_world(64);
    proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    static const uint64_t salts[4][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}};
    for (int i = 0; i < 8; i++) {
        memcpy(g.cache_salt, salts[i % 4], sizeof g.cache_salt);
        assert_int_equal(serve(w, 40, &g), i < 4 ? 0 : 32);
    }
    assert_int_equal(cached_pages(w), 8);
    world_destroy(w);
}

static void other_weights_empty_the_cache(void **state) {
    (void)state;
    world *w = make_world(64);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    assert_int_equal(serve(w, 40, &g), 0);
    for (uint64_t version = 0; version < 3; version++) {
        prefill_core_on_closed(w->prefill.prefill);
        decode_core_on_closed(w->decode.decode);
        world_settle(w);
        w->options.weights_version = version;
        world_register(w);
        assert_int_equal(cached_pages(w), version == 0 ? 2 : 0); /* the same: it stays */
        assert_int_equal(serve(w, 40, &g), version == 0 ? 32 : 0);
    }
    world_destroy(w);
}

/* ---- at the same time ------------------------------------------------------------------------ */

static void prompts_alike_at_the_same_time_are_computed_once(void **state) {
    (void)state;
    enum { COUNT = 6 };
    for (uint32_t tokens = 95; tokens <= 97; tokens++) {
        world *w = make_world(64);
        proto_generation g = world_generation(3, SAMPLER_MASK_SUPPORT);
        proto_attempt attempts[COUNT];
        for (uint64_t i = 0; i < COUNT; i++) {
            g.seed = i;
            attempts[i] = world_start(w, tokens, &g, UINT64_MAX);
        }
        world_settle(w);
        const uint32_t own = tokens - (tokens - 1) / PAGE * PAGE;
        assert_int_equal(world_prefill_view(w).tokens_total, tokens + (COUNT - 1) * own);
        for (uint64_t i = 0; i < COUNT; i++) {
            const proto_prefill_done done = prompts_expect_done(w, attempts[i], BT_OK);
            assert_int_equal(done.cached_tokens, i == 0 ? 0 : tokens - own);
            g.seed = i;
            world_read(w, attempts[i], &stream);
            world_expect_rows(w, &stream, tokens, &g, 3);
        }
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* Only what they have in common is waited for. */
static void who_shares_a_beginning_waits_for_that_alone(void **state) {
    (void)state;
    world *w = make_world(256);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    const proto_attempt large = world_new_attempt(w);
    world_run(w, large, &(proto_reservation){0}, 1000, &none, 1000);
    prompts_fill(w, PAGE, 40, 9); /* one page in common */
    const proto_attempt small = world_new_attempt(w);
    world_run(w, small, &(proto_reservation){0}, 40, &none, 40);
    assert_int_equal(world_prefill_view(w).queued, 1);
    proto_prefill_done done = {0};
    for (int step = 0; step < 3; step++) {
        assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
        world_settle(w);
    }
    assert_true(prompts_take_done(w, &done));
    assert_true(proto_attempt_equal(done.attempt, small));
    assert_int_equal(done.cached_tokens, PAGE);
    w->prefill.is_compute_held = false;
    world_settle(w);
    (void)prompts_expect_done(w, large, BT_OK);
    world_expect_empty(w);
    world_destroy(w);
}

/* It waits for no pages of the pool, so that nothing is kept for it. */
static void who_waits_for_what_another_computes_is_passed_freely(void **state) {
    (void)state;
    world *w = make_world(256);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    for (int i = 0; i < 2; i++)
        world_run(w, world_new_attempt(w), &(proto_reservation){0}, 1000, &none, 1000);
    for (uint32_t i = 0; i <= PREFILL_PASSES_MAX; i++) {
        prompts_fill(w, 0, 10, 100 + i);
        const proto_attempt small = world_new_attempt(w);
        world_run(w, small, &(proto_reservation){0}, 10, &none, 10);
        for (int step = 0; step < 2; step++) {
            assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
            world_settle(w);
        }
        (void)prompts_expect_done(w, small, BT_OK);
        assert_int_equal(world_prefill_view(w).queued, 1); /* the second of the long ones */
    }
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_expect_empty(w);
    world_destroy(w);
}

static void when_the_one_that_computes_ends_another_goes_on(void **state) {
    (void)state;
    world *w = make_world(64);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    const proto_attempt first = world_start(w, 200, &g, UINT64_MAX);
    const proto_attempt second = world_start(w, 200, &g, UINT64_MAX);
    const proto_attempt third = world_start(w, 200, &g, UINT64_MAX);
    world_settle(w);
    for (int step = 0; step < 2; step++) {
        assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
        world_settle(w);
    }
    assert_int_equal(world_prefill_view(w).queued, 2);
    world_cancel(w, &w->prefill, first);
    world_cancel(w, &w->decode, first);
    w->prefill.is_compute_held = false;
    world_settle(w);
    assert_int_equal(prompts_expect_done(w, second, BT_OK).cached_tokens, 64);
    assert_int_equal(prompts_expect_done(w, third, BT_OK).cached_tokens, 192);
    world_read(w, third, &stream);
    world_expect_rows(w, &stream, 200, &g, 2);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- room ------------------------------------------------------------------------------------ */

static void cached_pages_are_free_for_whoever_needs_them(void **state) {
    (void)state;
    world *w = make_world(10);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    prompts_fill(w, 0, 160, 1);
    assert_int_equal(serve(w, 80, &g), 0); /* 5 pages */
    prompts_fill(w, 0, 160, 2);
    assert_int_equal(serve(w, 80, &g), 0); /* all 10 */
    assert_int_equal(cached_pages(w), 10);
    assert_int_equal(world_prefill_view(w).pages_free, 10);
    const proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = 1}};
    proto_message pong;
    world_say(w, &w->prefill, PROTO_LANE_CONTROL, &ping);
    assert_true(world_take(&w->prefill, PROTO_PONG, &pong));
    assert_int_equal(pong.ping.pages_free, 10);
    prompts_fill(w, 0, 160, 3);
    assert_int_equal(serve(w, 48, &g), 0); /* 3 of the oldest prompt go, from its end */
    prompts_fill(w, 0, 160, 2);
    assert_int_equal(serve(w, 80, &g), 64); /* one more of the first, for its last page */
    prompts_fill(w, 0, 160, 1);
    assert_int_equal(serve(w, 80, &g), 16);
    prompts_fill(w, 0, 160, 4);
    assert_int_equal(serve(w, 160, &g), 0); /* everything else goes */
    assert_int_equal(cached_pages(w), 10);
    assert_int_equal(serve(w, 160, &g), 144);
    world_destroy(w);
}

/* Pages that a send reads, or a prompt in work uses, are nobody else's. */
static void what_is_in_use_is_not_evicted(void **state) {
    (void)state;
    world *w = make_world(10);
    const proto_generation g = world_generation(2, SAMPLER_MASK_OFF);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    w->is_network_held = true;
    prompts_fill(w, 0, 80, 1);
    const proto_attempt sending = world_start(w, 80, &g, UINT64_MAX);
    world_settle(w);
    (void)prompts_expect_done(w, sending, BT_OK);
    assert_int_equal(cached_pages(w), 5);
    assert_int_equal(world_prefill_view(w).pages_free, 5);
    prompts_fill(w, 80, 180, 5);
    const proto_attempt other = world_new_attempt(w); /* 6 pages, 5 are free */
    memmove(w->prompt, w->prompt + 80, 96 * sizeof w->prompt[0]);
    world_run(w, other, &(proto_reservation){0}, 96, &none, 96);
    world_settle(w);
    prompts_expect_none(w);
    prompts_fill(w, 0, 80, 1);
    const proto_attempt alike = world_new_attempt(w); /* 1 page of its own, 4 shared */
    world_run(w, alike, &(proto_reservation){0}, 80, &none, 80);
    world_settle(w);
    assert_int_equal(prompts_expect_done(w, alike, BT_OK).cached_tokens, 64);
    world_cancel(w, &w->prefill, sending); /* in quarantine now: still pinned */
    world_settle(w);
    prompts_expect_none(w);
    assert_int_equal(world_prefill_view(w).quarantined, 1);
    world_cancel(w, &w->decode, sending);
    w->is_network_held = false;
    world_settle(w);
    (void)prompts_expect_done(w, other, BT_OK);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- what stays out -------------------------------------------------------------------------- */

static void an_overflow_leaves_nothing_behind(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = 1, .support_max = 8, .has_prefix_cache = true});
    world_register(w);
    proto_generation g = world_generation(1, SAMPLER_MASK_SUPPORT);
    for (int i = 0; i < 2; i++) {
        const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
        world_settle(w);
        assert_int_equal(prompts_expect_done(w, a, BT_ERR_REQUEST_OVERFLOW).cached_tokens, 0);
        world_cancel(w, &w->decode, a);
        world_settle(w);
        assert_int_equal(cached_pages(w), 0);
    }
    g.top_k = 1;
    assert_int_equal(serve(w, 40, &g), 0);
    /* What was there before it came stays. */
    g.top_k = 0;
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    assert_int_equal(prompts_expect_done(w, a, BT_ERR_REQUEST_OVERFLOW).cached_tokens, 32);
    world_cancel(w, &w->decode, a);
    world_settle(w);
    assert_int_equal(cached_pages(w), 2);
    world_expect_empty(w);
    world_destroy(w);
}

/* A page that was broken in memory: nobody finds it afterwards. */
static void a_prefix_that_does_not_prove_itself_leaves_altogether(void **state) {
    (void)state;
    world *w = make_world(64);
    const proto_generation g = world_generation(1, SAMPLER_MASK_OFF);
    assert_int_equal(serve(w, 100, &g), 0);
    for (uint32_t p = 0; p < w->options.prefill_pages; p++)
        memset(kv_pool_page(w->prefill.pages, p), 0x11, w->options.page_bytes);
    const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
    world_settle(w);
    assert_int_equal(prompts_expect_done(w, a, BT_ERR_REQUEST_CAPTURE).cached_tokens, 96);
    world_cancel(w, &w->decode, a);
    world_settle(w);
    assert_int_equal(cached_pages(w), 0);
    assert_int_equal(serve(w, 100, &g), 0);
    world_destroy(w);
}

static void an_aborted_prompt_leaves_its_completed_pages(void **state) {
    (void)state;
    world *w = make_world(64);
    const proto_generation g = world_generation(1, SAMPLER_MASK_OFF);
    w->prefill.is_compute_held = true;
    const proto_attempt a = world_start(w, 200, &g, UINT64_MAX);
    for (int step = 0; step < 2; step++) {
        assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
        world_settle(w);
    }
    world_cancel(w, &w->prefill, a); /* 64 tokens are computed, 32 more in the step */
    world_cancel(w, &w->decode, a);
    w->prefill.is_compute_held = false;
    world_settle(w);
    prompts_expect_none(w);
    assert_int_equal(cached_pages(w), 4);
    assert_int_equal(serve(w, 200, &g), 64);
    world_destroy(w);
}

/* ---- all of it ------------------------------------------------------------------------------- */

typedef struct round_attempt {
    proto_attempt id;
    proto_generation generation;
    uint32_t tokens, seeds[3], cuts[2];
    bool is_cancelled;
} round_attempt;

/* Prompts are three parts, each one of few; so prefixes of all lengths are shared. */
static void fill_parts(world *w, const round_attempt *r) {
    prompts_fill(w, 0, r->cuts[0], r->seeds[0]);
    prompts_fill(w, r->cuts[0], r->cuts[1], r->seeds[1]);
    prompts_fill(w, r->cuts[1], r->tokens, r->seeds[2]);
}

static uint32_t roll(uint64_t *random, uint32_t bound) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*random >> 33) % bound;
}

static void random_prompts_with_common_parts_get_the_rows_of_one_process(void **state) {
    (void)state;
    enum { ROUNDS = 60, AT_ONCE = 12 };
    uint64_t random = 11;
    uint64_t cached = 0;
    world *w = world_create(&(world_options){.prefill_pages = 40,
                                             .decode_pages = 400,
                                             .attempts_max = 16,
                                             .sequences_max = 16,
                                             .chunk_tokens = 50,
                                             .prompts_max = 3,
                                             .has_prefix_cache = true});
    world_register(w);
    for (int round = 0; round < ROUNDS; round++) {
        round_attempt all[AT_ONCE];
        const uint32_t count = 1 + roll(&random, AT_ONCE);
        for (uint32_t i = 0; i < count; i++) {
            round_attempt *r = &all[i];
            *r = (round_attempt){.generation = world_generation(2, roll(&random, 3)),
                                 .cuts = {16 * roll(&random, 4) + 8 * roll(&random, 3)},
                                 .seeds = {roll(&random, 2), roll(&random, 3), roll(&random, 4)}};
            r->cuts[1] = r->cuts[0] + 10 * roll(&random, 8);
            r->tokens = r->cuts[1] + 1 + roll(&random, 60);
            r->generation.seed = roll(&random, 1000);
            fill_parts(w, r);
            r->id = world_start(w, r->tokens, &r->generation, UINT64_MAX);
            if (roll(&random, 3) == 0) (void)compute_sim_poll(w->prefill.compute, w->now_us);
            r->is_cancelled = roll(&random, 5) == 0;
            if (!r->is_cancelled) continue;
            world_cancel(w, &w->prefill, r->id);
            world_cancel(w, &w->decode, r->id);
        }
        world_settle(w);
        proto_prefill_done done;
        while (prompts_take_done(w, &done))
            cached += done.cached_tokens;
        for (uint32_t i = 0; i < count; i++) {
            if (all[i].is_cancelled) continue;
            fill_parts(w, &all[i]);
            world_read(w, all[i].id, &stream);
            world_expect_rows(w, &stream, all[i].tokens, &all[i].generation, 2);
        }
        world_expect_empty(w);
    }
    assert_true(cached > 5000);
    assert_true(prefix_cache_count(w->prefill.prefill->cache).evicted > 100);
    world_destroy(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_prompt_again_computes_its_last_token_at_least),
        cmocka_unit_test(a_prefix_that_ends_in_a_page_is_shared_up_to_that_page),
        cmocka_unit_test(a_longer_prompt_goes_on_where_a_shorter_one_ended),
        cmocka_unit_test(without_the_cache_nothing_is_kept),
        cmocka_unit_test(a_hold_of_nobody_is_noticed),
        cmocka_unit_test(requests_of_different_salts_share_nothing),
        cmocka_unit_test(other_weights_empty_the_cache),
        cmocka_unit_test(prompts_alike_at_the_same_time_are_computed_once),
        cmocka_unit_test(who_shares_a_beginning_waits_for_that_alone),
        cmocka_unit_test(who_waits_for_what_another_computes_is_passed_freely),
        cmocka_unit_test(when_the_one_that_computes_ends_another_goes_on),
        cmocka_unit_test(cached_pages_are_free_for_whoever_needs_them),
        cmocka_unit_test(what_is_in_use_is_not_evicted),
        cmocka_unit_test(an_overflow_leaves_nothing_behind),
        cmocka_unit_test(a_prefix_that_does_not_prove_itself_leaves_altogether),
        cmocka_unit_test(an_aborted_prompt_leaves_its_completed_pages),
        cmocka_unit_test(random_prompts_with_common_parts_get_the_rows_of_one_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
