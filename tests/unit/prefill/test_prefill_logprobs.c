/* Prompt log-probabilities: every position once and in order, the same whatever the chunks, in
 * frames that fit, before the end is told; a reader that does not read holds up this prompt and no
 * other. */
#include "base/mem.h"
#include "prefill/prefill_internal.h"
#include "prompts.h"

enum { TOPS = 4, IDS = 3 };

static world *make_world(uint32_t chunk_tokens) {
    world *w = world_create(
        &(world_options){.chunk_tokens = chunk_tokens, .prompts_max = 3, .has_prefix_cache = true});
    world_register(w);
    return w;
}

static proto_generation make_generation(world *w, uint32_t tokens, uint32_t from, uint32_t tops,
                                        uint32_t ids) {
    proto_generation g = world_generation(0, SAMPLER_MASK_OFF);
    g.wants_prompt_logprobs = 1;
    g.prompt_logprobs_from = from;
    g.top_logprobs = tops;
    g.logprob_id_count = ids;
    for (uint32_t i = 0; i < ids; i++)
        w->prompt[tokens + i] = (int32_t)(3 * i);
    return g;
}

/* What one process would say of positions from + 1 .. tokens - 1. */
static uint8_t *expected_of(const world *w, uint32_t tokens, const proto_generation *g,
                            size_t *bytes_out) {
    const uint32_t count = tokens - 1 - g->prompt_logprobs_from;
    model_scores scores = {
        .first = g->prompt_logprobs_from,
        .count = count,
        .targets = w->prompt + g->prompt_logprobs_from + 1,
        .vocab_limit = g->vocab_limit,
        .top_count = g->top_logprobs,
        .id_count = g->logprob_id_count,
        .ids = w->prompt + tokens,
        .logprobs = bt_calloc(count + 1, sizeof(float)),
        .top = bt_calloc((size_t)count * g->top_logprobs + 1, sizeof(sampler_top)),
        .id_logprobs = bt_calloc((size_t)count * g->logprob_id_count + 1, sizeof(float)),
    };
    const size_t entry = proto_prompt_logprob_bytes(g);
    uint8_t *all = bt_calloc(count + 1, entry);
    assert_true(scores.logprobs != NULL && scores.top != NULL && scores.id_logprobs != NULL &&
                all != NULL);
    if (count > 0) compute_sim_expect_scores(&w->prefill.sim, w->prompt, &scores);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *to = all + i * entry;
        memcpy(to, &scores.logprobs[i], sizeof(float));
        to += sizeof(float);
        memcpy(to, scores.top + (size_t)i * g->top_logprobs, g->top_logprobs * sizeof(sampler_top));
        to += g->top_logprobs * sizeof(sampler_top);
        memcpy(to, scores.id_logprobs + (size_t)i * g->logprob_id_count,
               g->logprob_id_count * sizeof(float));
    }
    bt_free(scores.logprobs);
    bt_free(scores.top);
    bt_free(scores.id_logprobs);
    *bytes_out = count * entry;
    return all;
}

/* Reads the frames of this attempt; what was sent so far must be the beginning of what is expected.
 * Returns the entries; *frames_out counts frames, is_over whether DONE came, behind all of them. */
static uint32_t read_frames(world *w, proto_attempt a, uint32_t tokens, const proto_generation *g,
                            uint32_t *frames_out) {
    size_t bytes = 0;
    uint8_t *expected = expected_of(w, tokens, g, &bytes);
    const size_t entry = proto_prompt_logprob_bytes(g);
    uint32_t entries = 0;
    bool is_over = false;
    *frames_out = 0;
    for (uint32_t i = 0; i < w->prefill.sent_count; i++) {
        const proto_message *m = &w->prefill.sent[i].message;
        if (m->kind == PROTO_PREFILL_DONE && proto_attempt_equal(m->prefill_done.attempt, a))
            is_over = true;
        if (m->kind != PROTO_PROMPT_LOGPROBS) continue;
        if (!proto_attempt_equal(m->prompt_logprobs.attempt, a)) continue;
        assert_false(is_over);
        assert_int_equal(w->prefill.sent[i].lane, PROTO_LANE_STREAMS);
        assert_int_equal(m->prompt_logprobs.first_position, g->prompt_logprobs_from + 1 + entries);
        assert_int_equal(m->payload_bytes, m->prompt_logprobs.count * entry);
        assert_true(m->payload_bytes <= PROTO_FRAME_PAYLOAD_MAX);
        assert_true((entries + m->prompt_logprobs.count) * entry <= bytes);
        assert_memory_equal(m->payload, expected + entries * entry, m->payload_bytes);
        entries += m->prompt_logprobs.count;
        ++*frames_out;
    }
    bt_free(expected);
    return entries;
}

static void every_position_comes_once_whatever_the_chunks(void **state) {
    (void)state;
    static const uint32_t lengths[] = {1, 2, 16, 33, 100};
    static const uint32_t chunks[] = {1, 7, 16, 32, 512};
    for (size_t l = 0; l < BT_ARRAY_COUNT(lengths); l++) {
        const uint32_t tokens = lengths[l];
        for (size_t c = 0; c < BT_ARRAY_COUNT(chunks); c++) {
            for (uint32_t from = 0; from < tokens; from += 1 + tokens / 4) {
                world *w = make_world(chunks[c]);
                proto_generation g = make_generation(w, tokens, from, TOPS, IDS);
                g.max_new_tokens = c % 2 == 0 ? 0 : 2;
                uint32_t frames = 0;
                const proto_attempt a = prompts_start(w, tokens, &g, 1000);
                world_settle(w);
                assert_int_equal(read_frames(w, a, tokens, &g, &frames), tokens - 1 - from);
                (void)prompts_expect_done(w, a, BT_OK);
                world_expect_empty(w);
                world_destroy(w);
            }
        }
    }
}

static void long_entries_are_cut_into_frames(void **state) {
    (void)state;
    world *w = make_world(512);
    const proto_generation g =
        make_generation(w, 300, 0, PROTO_TOP_LOGPROBS_MAX, PROTO_LOGPROB_IDS_MAX);
    uint32_t frames = 0;
    const proto_attempt a = prompts_start(w, 300, &g, 60000);
    world_settle(w);
    assert_int_equal(read_frames(w, a, 300, &g, &frames), 299);
    const uint32_t each = (uint32_t)(PROTO_FRAME_PAYLOAD_MAX / proto_prompt_logprob_bytes(&g));
    assert_int_equal(frames, (299 + each - 1) / each);
    (void)prompts_expect_done(w, a, BT_OK);
    world_expect_empty(w);
    world_destroy(w);
}

/* No step has more of them than its bound, in all its prompts together. */
static void scores_of_one_step_are_bounded(void **state) {
    (void)state;
    enum { TOKENS = 2000 };
    world *w = world_create(&(world_options){
        .chunk_tokens = 8192, .prompts_max = 3, .context_tokens = 4096, .prefill_pages = 512});
    world_register(w);
    proto_generation g =
        make_generation(w, TOKENS, 0, PROTO_TOP_LOGPROBS_MAX, PROTO_LOGPROB_IDS_MAX);
    w->prefill.is_compute_held = true;
    const proto_attempt a = prompts_start(w, TOKENS, &g, 60000);
    const proto_attempt b = prompts_start(w, TOKENS, &g, 60000);
    const prefill_array *arrays = w->prefill.prefill->step.arrays;
    uint32_t steps = 0;
    while (world_prefill_view(w).attempts > 0) {
        assert_true(++steps < 10);
        const size_t bytes = arrays[PREFILL_SCORES].used + arrays[PREFILL_SCORE_TOPS].used +
                             arrays[PREFILL_SCORE_IDS].used;
        assert_true(bytes <= PREFILL_SCORE_BYTES_MAX);
        assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
    }
    assert_true(steps >= 3);
    uint32_t frames = 0;
    assert_int_equal(read_frames(w, a, TOKENS, &g, &frames), TOKENS - 1);
    assert_int_equal(read_frames(w, b, TOKENS, &g, &frames), TOKENS - 1);
    world_expect_empty(w);
    world_destroy(w);
}

/* They are computed, not found; what was computed may be found by others. */
static void the_cache_is_passed_by_and_filled(void **state) {
    (void)state;
    world *w = make_world(32);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    for (int i = 0; i < 3; i++) {
        const proto_generation g = make_generation(w, 100, 60, 0, 0);
        uint32_t frames = 0;
        const proto_attempt a = prompts_start(w, 100, &g, 1000);
        world_settle(w);
        assert_int_equal(read_frames(w, a, 100, &g, &frames), 39);
        assert_int_equal(prompts_expect_done(w, a, BT_OK).cached_tokens, 0);
        assert_int_equal(world_prefill_view(w).pages_cached, 6);
        assert_int_equal(world_prefill_view(w).tokens_total, 100 * (i + 1) + 4 * i);
        const proto_attempt plain = prompts_start(w, 100, &none, 1000);
        world_settle(w);
        assert_int_equal(prompts_expect_done(w, plain, BT_OK).cached_tokens, 96);
    }
    world_expect_empty(w);
    world_destroy(w);
}

static void a_reader_that_does_not_read_holds_up_this_prompt_alone(void **state) {
    (void)state;
    world *w = make_world(32);
    const proto_generation none = world_generation(0, SAMPLER_MASK_OFF);
    const proto_generation g = make_generation(w, 100, 0, TOPS, IDS);
    w->prefill.is_compute_held = true;
    const proto_attempt a = prompts_start(w, 100, &g, 1000);
    w->prefill.is_stream_blocked = true; /* while its first chunk is computed */
    w->prefill.is_compute_held = false;
    world_settle(w);
    uint32_t frames = 0;
    assert_int_equal(read_frames(w, a, 100, &g, &frames), 32); /* one chunk's worth */
    prompts_expect_none(w);
    const proto_attempt late = prompts_start(w, 100, &g, 1000);  /* does not begin */
    const proto_attempt other = prompts_start(w, 50, &none, 50); /* begins like the first */
    world_settle(w);
    (void)prompts_expect_done(w, other, BT_OK);
    prompts_expect_none(w);
    assert_int_equal(world_prefill_view(w).queued, 1);
    assert_int_equal(world_prefill_view(w).computing, 1);
    assert_false(world_prefill_view(w).is_step_running);
    w->prefill.is_stream_blocked = false;
    prefill_core_turn(w->prefill.prefill); /* what the owner does when the link has room */
    world_settle(w);
    assert_int_equal(read_frames(w, a, 100, &g, &frames), 99);
    assert_int_equal(read_frames(w, late, 100, &g, &frames), 99);
    (void)prompts_expect_done(w, a, BT_OK);
    (void)prompts_expect_done(w, late, BT_OK);
    /* Nor past its deadline. */
    w->prefill.is_stream_blocked = true;
    const proto_attempt never = prompts_start(w, 100, &g, 1000);
    world_settle(w);
    world_advance(w, 5100 * 1000);
    (void)prompts_expect_done(w, never, BT_ERR_REQUEST_DEADLINE);
    world_expect_empty(w);
    world_destroy(w);
}

static void a_score_that_is_no_number_ends_the_prompt(void **state) {
    (void)state;
    world *w = make_world(32);
    const proto_generation g = make_generation(w, 100, 0, 0, 0);
    w->prefill.is_compute_held = true;
    const proto_attempt a = prompts_start(w, 100, &g, 1000);
    assert_true(compute_sim_poll(w->prefill.compute, w->now_us));
    for (uint32_t p = 0; p < w->options.prefill_pages; p++)
        memset(kv_pool_page(w->prefill.pages, p), 0x11, w->options.page_bytes);
    w->prefill.is_compute_held = false;
    world_settle(w);
    const proto_prefill_done done = prompts_expect_done(w, a, BT_ERR_REQUEST_CAPTURE);
    assert_non_null(strstr(done.text, "prompt token 33 is no number"));
    assert_int_equal(world_prefill_view(w).pages_cached, 0);
    world_expect_empty(w);
    world_destroy(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_position_comes_once_whatever_the_chunks),
        cmocka_unit_test(long_entries_are_cut_into_frames),
        cmocka_unit_test(scores_of_one_step_are_bounded),
        cmocka_unit_test(the_cache_is_passed_by_and_filled),
        cmocka_unit_test(a_reader_that_does_not_read_holds_up_this_prompt_alone),
        cmocka_unit_test(a_score_that_is_no_number_ends_the_prompt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
