/* Several samples of one prompt, and everything about the first token that a request may ask for:
 * one page set, a draw and a row per sample, the same as one process would draw. */
#include "base/mem.h"
#include "prefill/prefill_internal.h"
#include "prompts.h"
#include "proto/row_stream.h"

enum { TOPS = 5, IDS = 3, BIASES = 2, ROWS = 3, CAP = 8, PROMPT = 40 };

static world *make_world(uint32_t attempts_max) {
    world *w = world_create(&(world_options){.attempts_max = attempts_max,
                                             .sequences_max = 300,
                                             .decode_pages = 2000,
                                             .has_prefix_cache = true});
    world_register(w);
    return w;
}

/* A generation that uses every parameter, its words behind the prompt. */
static proto_generation make_generation(world *w, uint32_t samples, uint32_t mask_mode) {
    proto_generation g = world_generation(ROWS, mask_mode);
    static const float biases[BIASES] = {-3.5f, 12.0f};
    g.samples = samples;
    g.min_p = 0.125f;
    g.filter = 1;
    g.frequency_penalty = 0.5f;
    g.presence_penalty = -0.5f;
    g.repetition_penalty = 1.25f;
    g.min_new_tokens = 2;
    g.banned_id_count = 2;
    g.stop_ids[0] = 17;
    g.stop_ids[1] = 4000;
    g.top_logprobs = TOPS;
    g.logprob_id_count = IDS;
    g.bias_count = BIASES;
    for (int32_t i = 0; i < BIASES; i++) {
        w->prompt[PROMPT + i] = 100 + i;
        memcpy(&w->prompt[PROMPT + BIASES + i], &biases[i], sizeof(float));
    }
    for (int32_t i = 0; i < IDS; i++)
        w->prompt[PROMPT + 2 * BIASES + i] = 70 * i;
    return g;
}

static sampler_params params_of(const world *w, const proto_generation *g, uint32_t sample) {
    sampler_params p = world_sampling(w, g);
    p.seed = proto_sample_seed(g->seed, sample);
    p.filter = g->filter;
    p.min_p = g->min_p;
    p.frequency_penalty = g->frequency_penalty;
    p.presence_penalty = g->presence_penalty;
    p.repetition_penalty = g->repetition_penalty;
    p.banned_count = g->banned_id_count;
    p.banned_ids = g->stop_ids;
    p.bias_count = g->bias_count;
    p.bias_ids = w->prompt + PROMPT;
    p.biases = (const float *)(const void *)(w->prompt + PROMPT + g->bias_count);
    p.top_logprobs = g->top_logprobs;
    p.logprob_id_count = g->logprob_id_count;
    p.logprob_ids = w->prompt + PROMPT + 2 * g->bias_count;
    return p;
}

/* ---- what decode streamed of one sample ------------------------------------------------------ */

typedef struct sample_stream {
    uint8_t *bytes;
    size_t count;
    proto_chunk last;
} sample_stream;

static sample_stream collect(world *w, proto_attempt a, uint32_t sample) {
    sample_stream out = {.bytes = bt_malloc(1)};
    for (uint32_t i = 0; i < w->decode.sent_count; i++) {
        const proto_message *m = &w->decode.sent[i].message;
        if (m->kind != PROTO_CHUNK || !proto_attempt_equal(m->chunk.attempt, a)) continue;
        if (m->chunk.sample != sample) continue;
        assert_true(m->chunk.offset == out.count);
        out.bytes = bt_realloc(out.bytes, out.count + m->payload_bytes + 1);
        assert_non_null(out.bytes);
        if (m->payload_bytes > 0) memcpy(out.bytes + out.count, m->payload, m->payload_bytes);
        out.count += m->payload_bytes;
        out.last = m->chunk;
    }
    return out;
}

static void expect_row(const token_row *row, const sampler_row *want, const proto_generation *g) {
    assert_int_equal(want->status, SAMPLER_OK);
    assert_int_equal(row->token, want->token);
    assert_memory_equal(&row->token_logprob, &want->token_logprob, sizeof(float));
    assert_int_equal(row->support_count, want->support_count);
    assert_int_equal(row->top_count, want->top_count);
    assert_int_equal(row->id_logprob_count, g->logprob_id_count);
    if (row->top_count > 0)
        assert_memory_equal(row->top, want->top, row->top_count * sizeof(row_top));
    if (row->id_logprob_count > 0)
        assert_memory_equal(row->id_logprobs, want->id_logprobs,
                            row->id_logprob_count * sizeof(float));
    if (g->mask_mode == SAMPLER_MASK_OFF) return;
    assert_memory_equal(&row->selected_logprob, &want->selected_logprob, sizeof(float));
    assert_memory_equal(row->support_ids, want->support_ids, row->support_count * sizeof(int32_t));
    if (g->mask_mode != SAMPLER_MASK_SUPPORT) return;
    assert_memory_equal(row->support_logprobs, want->support_logprobs,
                        row->support_count * sizeof(float));
}

static void expect_sample(world *w, proto_attempt a, const proto_generation *g, uint32_t sample) {
    int32_t ids[ROWS][CAP];
    float logprobs[ROWS][CAP];
    sampler_top tops[ROWS][TOPS];
    float asked[ROWS][IDS];
    sampler_row want[ROWS];
    const sampler_params params = params_of(w, g, sample);
    for (int i = 0; i < ROWS; i++) {
        want[i] = (sampler_row){.support_ids = ids[i],
                                .support_logprobs = logprobs[i],
                                .top = g->top_logprobs > 0 ? tops[i] : NULL,
                                .id_logprobs = g->logprob_id_count > 0 ? asked[i] : NULL};
    }
    assert_int_equal(compute_sim_expect_banned(&w->prefill.sim, &params, g->min_new_tokens,
                                               w->prompt, PROMPT, ROWS, want),
                     ROWS);
    const sample_stream s = collect(w, a, sample);
    size_t at = 0;
    for (int i = 0; i < ROWS; i++) {
        token_row row;
        size_t used = 0;
        assert_int_equal(row_record_decode(s.bytes + at, s.count - at, w->options.cap, &row, &used),
                         BT_OK);
        assert_true(used > 0);
        expect_row(&row, &want[i], g);
        at += used;
    }
    assert_int_equal(at, s.count);
    assert_int_equal(s.last.finish, PROTO_FINISH_LENGTH);
    bt_free(s.bytes);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void each_sample_has_the_row_that_one_process_draws(void **state) {
    (void)state;
    static const uint32_t counts[] = {1, 2, 5, PROTO_SAMPLES_MAX};
    for (size_t i = 0; i < BT_ARRAY_COUNT(counts); i++) {
        for (uint32_t mode = SAMPLER_MASK_OFF; mode <= SAMPLER_MASK_SUPPORT; mode++) {
            world *w = make_world(8);
            const proto_generation g = make_generation(w, counts[i], mode);
            const proto_attempt a = prompts_start(w, PROMPT, &g, 7);
            world_settle(w);
            (void)prompts_expect_done(w, a, BT_OK);
            prompts_expect_none(w);
            for (uint32_t sample = 0; sample < counts[i]; sample++)
                expect_sample(w, a, &g, sample);
            /* One page set, computed once. */
            assert_int_equal(world_prefill_view(w).tokens_total, PROMPT);
            world_expect_empty(w);
            world_destroy(w);
        }
    }
}

/* Neighbours of one and of many samples, with and without what costs, in one step. */
static void requests_in_one_step_do_not_change_each_other(void **state) {
    (void)state;
    world *w = make_world(8);
    proto_generation all[4];
    proto_attempt attempts[4];
    for (uint32_t i = 0; i < 4; i++) {
        all[i] = make_generation(w, 1 + 2 * i, i % 3);
        all[i].seed = 50 + i;
        all[i].cache_salt[0] = i; /* or the later ones would wait for the pages of the first */
    }
    all[1] = world_generation(ROWS, SAMPLER_MASK_OFF);
    all[1].wants_logprob = 0;
    all[3].top_logprobs = 0;
    w->prefill.is_compute_held = true;
    for (uint32_t i = 0; i < 4; i++)
        attempts[i] = prompts_start(w, PROMPT, &all[i], 100);
    w->prefill.is_compute_held = false;
    world_settle(w);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t sample = 0; sample < all[i].samples; sample++)
            expect_sample(w, attempts[i], &all[i], sample);
    assert_true(world_prefill_view(w).steps_total <= 6);
    world_expect_empty(w);
    world_destroy(w);
}

/* Draws of one step are bounded, and so are staging slots: who finds none waits. */
static void many_samples_of_several_prompts_take_turns(void **state) {
    (void)state;
    for (uint32_t attempts_max = 4; attempts_max <= 300; attempts_max += 296) {
        enum { COUNT = 3 };
        world *w = make_world(attempts_max);
        proto_generation all[COUNT];
        proto_attempt attempts[COUNT];
        for (uint32_t i = 0; i < COUNT; i++) {
            all[i] = make_generation(w, 90, SAMPLER_MASK_SELECTED);
            all[i].cache_salt[0] = i;
            attempts[i] = prompts_start(w, PROMPT, &all[i], 100);
        }
        w->prefill.is_compute_held = true;
        const prefill_batch *s = &w->prefill.prefill->step;
        for (int step = 0; s->is_running || world_prefill_view(w).attempts > 0; step++) {
            assert_true(step < 100);
            uint32_t draws = 0;
            for (uint32_t i = 0; s->is_running && i < s->batch.sequences; i++)
                draws += s->samples[i] ? s->attempts[i]->generation.samples : 0;
            assert_true(draws <= s->draws_max);
            (void)compute_sim_poll(w->prefill.compute, w->now_us);
            world_settle(w);
        }
        for (uint32_t i = 0; i < COUNT; i++)
            for (uint32_t sample = 0; sample < 90; sample++)
                expect_sample(w, attempts[i], &all[i], sample);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* No opt-in, no cost. */
static void memory_for_what_is_asked_for_is_made_when_it_is(void **state) {
    (void)state;
    world *w = make_world(8);
    const prefill_array *arrays = w->prefill.prefill->step.arrays;
    proto_generation g = world_generation(ROWS, SAMPLER_MASK_OFF);
    g.samples = 20;
    (void)prompts_start(w, PROMPT, &g, 100);
    world_settle(w);
    for (int i = 0; i < PREFILL_ARRAY_COUNT; i++)
        assert_int_equal(arrays[i].capacity, 0);
    g = make_generation(w, 2, SAMPLER_MASK_SELECTED);
    (void)prompts_start(w, PROMPT, &g, 100);
    world_settle(w);
    assert_int_equal(arrays[PREFILL_SUPPORT_IDS].capacity, 2 * CAP * sizeof(int32_t));
    assert_int_equal(arrays[PREFILL_SUPPORT_LOGPROBS].capacity, 0);
    assert_int_equal(arrays[PREFILL_TOPS].capacity, 2 * TOPS * sizeof(sampler_top));
    assert_int_equal(arrays[PREFILL_ID_LOGPROBS].capacity, 2 * IDS * sizeof(float));
    assert_int_equal(arrays[PREFILL_SCORES].capacity, 0);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- statuses -------------------------------------------------------------------------------- */

typedef struct tampering {
    void (*on_done)(void *context, bt_status status);
    prefill_core *core;
    const uint32_t *statuses; /* by draw */
    uint32_t count;
} tampering;

static tampering tamper;

/* The step ends as it did, but with these statuses. */
static void on_done_with_statuses(void *context, bt_status status) {
    (void)context;
    prefill_batch *s = &tamper.core->step;
    for (uint32_t i = 0; s->samples[0] && i < tamper.count; i++) {
        if (tamper.statuses[i] == SAMPLER_OK) continue;
        s->rows[i].status = tamper.statuses[i];
        s->rows[i].support_count = 0;
        s->rows[i].cap_needed = tamper.statuses[i] == SAMPLER_OVERFLOW ? 1000 + i % 2 : 0;
    }
    tamper.on_done(tamper.core, status);
}

static proto_attempt run_with_statuses(world *w, const proto_generation *g,
                                       const uint32_t *statuses) {
    compute *c = w->prefill.compute;
    tamper = (tampering){.on_done = c->on_done,
                         .core = w->prefill.prefill,
                         .statuses = statuses,
                         .count = g->samples};
    c->on_done = on_done_with_statuses;
    const proto_attempt a = prompts_start(w, PROMPT, g, 100);
    world_settle(w);
    c->on_done = tamper.on_done;
    return a;
}

static void some_samples_without_a_token_do_not_end_the_others(void **state) {
    (void)state;
    static const uint32_t statuses[] = {SAMPLER_OVERFLOW, SAMPLER_OK, SAMPLER_INVALID, SAMPLER_OK};
    world *w = make_world(8);
    const proto_generation g = make_generation(w, 4, SAMPLER_MASK_SUPPORT);
    const proto_attempt a = run_with_statuses(w, &g, statuses);
    const proto_prefill_done done = prompts_expect_done(w, a, BT_OK);
    assert_int_equal(done.cap_needed, 0); /* of no sample that the router could tell it of */
    expect_sample(w, a, &g, 1);
    expect_sample(w, a, &g, 3);
    static const bt_status ends[] = {BT_ERR_REQUEST_OVERFLOW, BT_OK, BT_ERR_REQUEST_CAPTURE};
    for (uint32_t sample = 0; sample <= 2; sample += 2) {
        const sample_stream s = collect(w, a, sample);
        assert_int_equal(s.count, 0);
        assert_int_equal(s.last.finish, PROTO_FINISH_ERROR);
        assert_int_equal(s.last.status, ends[sample]);
        assert_int_equal(s.last.cap_needed, sample == 0 ? 1000 : 0);
        bt_free(s.bytes);
    }
    assert_int_equal(world_prefill_view(w).pages_cached, PROMPT / 16);
    world_expect_empty(w);
    world_destroy(w);
}

static void when_no_sample_has_a_token_nothing_is_handed_over(void **state) {
    (void)state;
    static const uint32_t cases[][3] = {
        {SAMPLER_OVERFLOW, SAMPLER_OVERFLOW, SAMPLER_OVERFLOW},
        {SAMPLER_INVALID, SAMPLER_OVERFLOW, SAMPLER_INVALID},
    };
    static const bt_status expected[] = {BT_ERR_REQUEST_OVERFLOW, BT_ERR_REQUEST_CAPTURE};
    for (int i = 0; i < 2; i++) {
        world *w = make_world(8);
        const proto_generation g = make_generation(w, 3, SAMPLER_MASK_SUPPORT);
        const proto_attempt a = run_with_statuses(w, &g, cases[i]);
        const proto_prefill_done done = prompts_expect_done(w, a, expected[i]);
        assert_int_equal(done.cap_needed, i == 0 ? 1001 : 0); /* the most, of the second */
        assert_non_null(strstr(done.text, "token 0"));
        assert_int_equal(world_prefill_view(w).pages_cached, 0);
        world_cancel(w, &w->decode, a);
        world_settle(w);
        for (uint32_t sample = 0; sample < 3; sample++) {
            const sample_stream s = collect(w, a, sample);
            assert_int_equal(s.count, 0);
            bt_free(s.bytes);
        }
        world_expect_empty(w);
        world_destroy(w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_sample_has_the_row_that_one_process_draws),
        cmocka_unit_test(requests_in_one_step_do_not_change_each_other),
        cmocka_unit_test(many_samples_of_several_prompts_take_turns),
        cmocka_unit_test(memory_for_what_is_asked_for_is_made_when_it_is),
        cmocka_unit_test(some_samples_without_a_token_do_not_end_the_others),
        cmocka_unit_test(when_no_sample_has_a_token_nothing_is_handed_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
