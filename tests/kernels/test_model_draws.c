/* What a step does with logits: several draws of one row, scored tokens, pages that are shared. A
 * base run takes each prompt alone and whole; no batch, chunk or thread count may change a bit. */
#include "kernels/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"
#include "kernels/model/model_generate.h"
#include "kernels/ops.h"
#include "tests/kernels/random_data.h"
#include "tests/kernels/tiny_models.h"

enum {
    PROMPTS = 3,
    TOKENS_MAX = 130,
    PROMPT_MAX = 70,
    FROM = 2, /* the first scored token */
    DRAWS = 4,
    DRAWS_MAX = 3,
    SUPPORT = 24,
    TOP = 2,
    PAGE_TOKENS = 16,
    PAGES_EACH = 5,
    PAGES = PROMPTS * PAGES_EACH,
};

static const uint32_t prompt_tokens[PROMPTS] = {40, 70, 5};
/* Of the last token; a prompt without a draw is scored alone. */
static const uint32_t draws_of[PROMPTS] = {3, 1, 0};
static const uint32_t first_draw[PROMPTS + 1] = {0, 3, 4, 4};
static const int32_t chosen[2] = {17, 3};

typedef struct outcome {
    float logprobs[PROMPTS][PROMPT_MAX];
    sampler_top top[PROMPTS][PROMPT_MAX][TOP];
    float id_logprobs[PROMPTS][PROMPT_MAX][2];
    int32_t tokens[DRAWS];
    float token_logprobs[DRAWS];
    float selected[DRAWS];
    uint32_t counts[DRAWS];
    int32_t support_ids[DRAWS][SUPPORT];
    float support_logprobs[DRAWS][SUPPORT];
    sampler_top draw_top[DRAWS][TOP];
    float draw_ids[DRAWS][2];
} outcome;

typedef struct bench {
    model *m;
    model_runner *runner;
    kv_page_layout layout;
    uint8_t *memory;
    int32_t ids[PROMPTS][PROMPT_MAX];
    int32_t targets[PROMPTS][PROMPT_MAX];
    sampler_params params[DRAWS];
    outcome out;
} bench;

static void open_runner(bench *b, uint32_t threads, const char *isa) {
    const model_runner_options options = {.threads = threads,
                                          .tokens_max = TOKENS_MAX,
                                          .rows_max = PROMPTS,
                                          .isa = isa,
                                          .kv = b->layout,
                                          .kv_memory = b->memory,
                                          .kv_page_count = PAGES};
    bt_error error;
    model_runner_destroy(b->runner);
    b->runner = NULL;
    if (model_runner_create(b->m, &options, &b->runner, &error) != BT_OK)
        fail_msg("no runner: %s", error.text);
    memset(&b->out, 0, sizeof b->out);
}

static int setup(void **state) {
    static bench b;
    b = (bench){0};
    bt_error error;
    if (model_generate(&tiny_models[0], 5, &b.m, &error) != BT_OK) fail_msg("%s", error.text);
    b.layout = model_kv_layout(b.m, PAGE_TOKENS, KV_DTYPE_BF16);
    b.memory = bt_calloc(PAGES, kv_page_bytes(&b.layout));
    assert_non_null(b.memory);
    uint64_t seed = 9;
    for (uint32_t p = 0; p < PROMPTS; p++) {
        for (uint32_t i = 0; i < PROMPT_MAX; i++)
            b.ids[p][i] = (int32_t)random_below(&seed, 300);
        memcpy(b.targets[p], b.ids[p] + 1, (PROMPT_MAX - 1) * sizeof(int32_t));
        b.targets[p][prompt_tokens[p] - 1] = 7; /* of the token that is drawn from as well */
    }
    for (uint32_t d = 0; d < DRAWS; d++)
        b.params[d] = (sampler_params){.temperature = 0.9F,
                                       .top_p = 0.95F,
                                       .top_k = 20,
                                       .mask_mode = SAMPLER_MASK_SUPPORT,
                                       .mask_max_tokens = SUPPORT,
                                       .wants_logprob = 1,
                                       .seed = 50 + d,
                                       .min_p = d == 1 ? 0.2F : 0.0F,
                                       .filter = d == 2 ? SAMPLER_FILTER_RANK : 0,
                                       .output_ids = b.ids[0],
                                       .output_count = 10,
                                       .frequency_penalty = d == 0 ? 1.0F : 0.0F,
                                       .top_logprobs = TOP,
                                       .logprob_ids = chosen,
                                       .logprob_id_count = 2};
    *state = &b;
    return 0;
}

static int teardown(void **state) {
    bench *b = *state;
    model_runner_destroy(b->runner);
    model_destroy(b->m);
    bt_free(b->memory);
    return 0;
}

static sampler_row row_at(outcome *o, uint32_t d) {
    return (sampler_row){.support_ids = o->support_ids[d],
                         .support_logprobs = o->support_logprobs[d],
                         .top = o->draw_top[d],
                         .id_logprobs = o->draw_ids[d]};
}

static void take_row(outcome *o, uint32_t d, const sampler_row *row) {
    assert_int_equal(row->status, SAMPLER_OK);
    assert_int_equal(row->top_count, TOP);
    o->tokens[d] = row->token;
    o->token_logprobs[d] = row->token_logprob;
    o->selected[d] = row->selected_logprob;
    o->counts[d] = row->support_count;
}

/* The scored tokens FROM .. of a prompt that a chunk [at, at + count) holds. */
static model_scores scores_of(bench *b, uint32_t p, uint32_t at, uint32_t count) {
    const uint32_t first = at > FROM ? at : FROM;
    if (first >= at + count) return (model_scores){0};
    return (model_scores){.first = first - at,
                          .count = at + count - first,
                          .targets = b->targets[p] + first,
                          .vocab_limit = 290,
                          .top_count = TOP,
                          .id_count = 2,
                          .ids = chosen,
                          .logprobs = b->out.logprobs[p] + first,
                          .top = b->out.top[p][first],
                          .id_logprobs = b->out.id_logprobs[p][first]};
}

typedef struct step_arrays {
    uint32_t token_offsets[PROMPTS + 1], positions[PROMPTS], page_offsets[PROMPTS + 1],
        page_ids[PAGES], draw_offsets[PROMPTS + 1], draws[DRAWS];
    int32_t token_ids[TOKENS_MAX];
    uint8_t samples[PROMPTS];
    sampler_params sampling[DRAWS];
    sampler_row rows[DRAWS];
    model_scores scores[PROMPTS];
} step_arrays;

static void add_prompt(bench *b, step_arrays *a, uint32_t n, uint32_t p, uint32_t at,
                       uint32_t count) {
    const uint32_t pages = kv_pages_for(at + count, PAGE_TOKENS);
    a->positions[n] = at;
    a->token_offsets[n + 1] = a->token_offsets[n] + count;
    memcpy(a->token_ids + a->token_offsets[n], b->ids[p] + at, count * sizeof(int32_t));
    for (uint32_t i = 0; i < pages; i++)
        a->page_ids[a->page_offsets[n] + i] = p * PAGES_EACH + i;
    a->page_offsets[n + 1] = a->page_offsets[n] + pages;
    a->scores[n] = scores_of(b, p, at, count);
    const uint32_t draws = at + count == prompt_tokens[p] ? draws_of[p] : 0;
    a->samples[n] = draws > 0;
    a->draw_offsets[n + 1] = a->draw_offsets[n] + draws;
    for (uint32_t i = 0; i < draws; i++) {
        const uint32_t to = a->draw_offsets[n] + i;
        a->draws[to] = first_draw[p] + i;
        a->sampling[to] = b->params[a->draws[to]];
        a->rows[to] = row_at(&b->out, a->draws[to]);
    }
}

static model_batch batch_of(step_arrays *a, uint32_t n) {
    return (model_batch){.sequences = n,
                         .tokens = a->token_offsets[n],
                         .token_offsets = a->token_offsets,
                         .token_ids = a->token_ids,
                         .first_positions = a->positions,
                         .page_offsets = a->page_offsets,
                         .page_ids = a->page_ids,
                         .samples = a->samples,
                         .sampling = a->sampling,
                         .rows = a->rows,
                         .scores = a->scores,
                         .draw_offsets = a->draw_offsets};
}

/* Prompts [first, end) in steps of `chunk` tokens each (0: whole). */
static void run_prompts(bench *b, uint32_t first, uint32_t end, uint32_t chunk) {
    static step_arrays a;
    for (uint32_t at = 0;; at += chunk) {
        memset(&a, 0, sizeof a);
        uint32_t n = 0;
        for (uint32_t p = first; p < end; p++) {
            if (at >= prompt_tokens[p]) continue;
            const uint32_t left = prompt_tokens[p] - at;
            add_prompt(b, &a, n++, p, at, chunk == 0 || left < chunk ? left : chunk);
        }
        if (n == 0) return;
        const model_batch batch = batch_of(&a, n);
        assert_int_equal(model_step(b->runner, &batch), BT_OK);
        for (uint32_t d = 0; d < a.draw_offsets[n]; d++)
            take_row(&b->out, a.draws[d], &a.rows[d]);
        if (chunk == 0) return;
    }
}

static outcome run_base(bench *b) {
    open_runner(b, 1, NULL);
    for (uint32_t p = 0; p < PROMPTS; p++)
        run_prompts(b, p, p + 1, 0);
    return b->out;
}

static void nothing_depends_on_batch_chunk_or_threads(void **state) {
    bench *b = *state;
    const outcome base = run_base(b);
    assert_true(base.tokens[0] >= 0 && base.counts[0] > 1);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        static const uint32_t chunks[] = {0, 1, 7, 33};
        for (size_t i = 0; i < BT_ARRAY_COUNT(chunks); i++) {
            open_runner(b, threads, NULL);
            run_prompts(b, 0, PROMPTS, chunks[i]);
            assert_memory_equal(&b->out, &base, sizeof base);
        }
    }
    for (uint32_t i = 0; dev_host_isa_at(i) != NULL; i++) {
        open_runner(b, 2, dev_host_isa_at(i));
        run_prompts(b, 0, PROMPTS, 16);
        assert_memory_equal(&b->out, &base, sizeof base);
    }
}

/* A step over ids[0 .. count) of prompt p with one draw; the other prompts' pages are not used. */
static void draw_after(bench *b, uint32_t p, uint32_t count, const sampler_params *params,
                       sampler_row *row) {
    static step_arrays a;
    memset(&a, 0, sizeof a);
    add_prompt(b, &a, 0, p, 0, count);
    a.samples[0] = 1;
    model_batch batch = batch_of(&a, 1);
    batch.scores = NULL;
    batch.draw_offsets = NULL;
    batch.sampling = params;
    batch.rows = row;
    assert_int_equal(model_step(b->runner, &batch), BT_OK);
    assert_int_equal(row->status, SAMPLER_OK);
}

static void draws_are_those_of_separate_steps(void **state) {
    bench *b = *state;
    const outcome base = run_base(b);
    memset(&b->out, 0, sizeof b->out);
    for (uint32_t p = 0; p < PROMPTS; p++) {
        for (uint32_t d = first_draw[p]; d < first_draw[p + 1]; d++) {
            sampler_row row = row_at(&b->out, d);
            draw_after(b, p, prompt_tokens[p], &b->params[d], &row);
            take_row(&b->out, d, &row);
        }
    }
    assert_memory_equal(b->out.tokens, base.tokens, sizeof base - offsetof(outcome, tokens));
    assert_true(base.token_logprobs[0] != base.token_logprobs[1]);
}

/* A score is the log-probability of a greedy draw at temperature 1 behind the same prefix. */
static void scores_are_those_of_the_prefix(void **state) {
    bench *b = *state;
    const outcome base = run_base(b);
    for (uint32_t count = FROM + 1; count <= prompt_tokens[1]; count += 11) {
        const uint32_t at = count - 1;
        const int32_t ids[] = {b->targets[1][at], chosen[0], chosen[1]};
        const sampler_params params = {.temperature = 1.0F,
                                       .top_p = 1.0F,
                                       .top_k = 1,
                                       .vocab_limit = 290,
                                       .wants_logprob = 1,
                                       .top_logprobs = TOP,
                                       .logprob_ids = ids,
                                       .logprob_id_count = 3};
        sampler_top top[TOP];
        float logprobs[3];
        sampler_row row = {.top = top, .id_logprobs = logprobs};
        draw_after(b, 1, count, &params, &row);
        assert_memory_equal(&logprobs[0], &base.logprobs[1][at], sizeof(float));
        assert_memory_equal(&logprobs[1], base.id_logprobs[1][at], 2 * sizeof(float));
        assert_memory_equal(top, base.top[1][at], sizeof top);
    }
}

static void given_logits_are_the_draws_logits(void **state) {
    bench *b = *state;
    static float logits[PROMPTS][300];
    static step_arrays a;
    open_runner(b, 2, NULL);
    memset(&a, 0, sizeof a);
    memset(logits, 0, sizeof logits);
    for (uint32_t p = 0; p < PROMPTS; p++)
        add_prompt(b, &a, p, p, 0, prompt_tokens[p]);
    model_batch batch = batch_of(&a, PROMPTS);
    batch.logits = logits[0];
    assert_int_equal(model_step(b->runner, &batch), BT_OK);
    for (uint32_t d = 0; d < DRAWS; d++) {
        outcome again;
        sampler_row row = row_at(&again, d);
        const uint32_t p = d < 3 ? 0 : 1;
        assert_int_equal(
            sampler_draw_ref(&b->params[d], logits[p], 300, prompt_tokens[p] - 1, &row), BT_OK);
        assert_int_equal(row.token, a.rows[d].token);
        assert_memory_equal(&row.token_logprob, &a.rows[d].token_logprob, sizeof(float));
    }
    assert_true(logits[2][0] == 0.0F); /* it samples nothing */
}

/* ---- pages ----------------------------------------------------------------------------------- */

/* Sequences of one token each: of 16 on page `read`, then the token on page `written`. */
static bt_status step_pages(bench *b, const uint32_t (*pages)[2], uint32_t count, int32_t *tokens) {
    static step_arrays a;
    memset(&a, 0, sizeof a);
    for (uint32_t i = 0; i < count; i++) {
        a.positions[i] = PAGE_TOKENS;
        a.token_offsets[i + 1] = i + 1;
        a.token_ids[i] = 5;
        a.page_ids[2 * i] = pages[i][0];
        a.page_ids[2 * i + 1] = pages[i][1];
        a.page_offsets[i + 1] = 2 * (i + 1);
        a.samples[i] = 1;
        a.sampling[i] = (sampler_params){.temperature = 1.0F, .top_p = 1.0F, .seed = 3};
    }
    model_batch batch = batch_of(&a, count);
    batch.scores = NULL;
    batch.draw_offsets = NULL;
    const bt_status status = model_step(b->runner, &batch);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = a.rows[i].token;
    return status;
}

static void read_pages_may_be_shared(void **state) {
    bench *b = *state;
    (void)run_base(b); /* fills page 0 with 16 tokens of prompt 0, page 5 with those of prompt 1 */
    int32_t alone[1], shared[3];
    assert_int_equal(step_pages(b, (const uint32_t[][2]){{0, 11}}, 1, alone), BT_OK);
    assert_int_equal(step_pages(b, (const uint32_t[][2]){{0, 12}, {0, 13}, {5, 14}}, 3, shared),
                     BT_OK);
    assert_int_equal(shared[0], alone[0]);
    assert_int_equal(shared[1], alone[0]);
    const uint32_t bad[][2][2] = {
        {{0, 12}, {0, 12}},  /* written by two */
        {{0, 12}, {12, 13}}, /* read by the second */
        {{12, 13}, {0, 12}}, /* read by the first */
        {{12, 12}, {0, 13}}, /* read and written by one */
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad); i++)
        assert_int_equal(step_pages(b, bad[i], 2, shared), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(step_pages(b, bad[3], 1, shared), BT_ERR_CALLER_ARGUMENT);
}

/* ---- what a step refuses --------------------------------------------------------------------- */

static void bad_draws_and_scores_are_refused(void **state) {
    bench *b = *state;
    static step_arrays a;
    open_runner(b, 1, NULL);
    const size_t bytes = PAGES * kv_page_bytes(&b->layout);
    uint8_t *before = bt_calloc(1, bytes);
    assert_non_null(before);
    memcpy(before, b->memory, bytes);
    const int32_t bad_id[] = {300, -1};
    model_batch batch;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        memset(&a, 0, sizeof a);                                                                   \
        for (uint32_t p = 0; p < PROMPTS; p++)                                                     \
            add_prompt(b, &a, p, p, 0, prompt_tokens[p]);                                          \
        batch = batch_of(&a, PROMPTS);                                                             \
        change;                                                                                    \
        assert_int_equal(model_step(b->runner, &batch), BT_ERR_CALLER_ARGUMENT);                   \
        assert_memory_equal(before, b->memory, bytes);                                             \
    } while (0)
    REFUSED(a.draw_offsets[0] = 1);
    REFUSED(a.draw_offsets[1] = 0);
    REFUSED(a.draw_offsets[2] = 1);
    REFUSED(a.draw_offsets[3] = 5);
    REFUSED(a.draw_offsets[2] = a.draw_offsets[3] = MODEL_BATCH_MAX + 1);
    REFUSED(a.samples[0] = 0);
    REFUSED(a.samples[2] = 1);
    REFUSED(a.samples[1] = 2);
    REFUSED(batch.rows = NULL);
    REFUSED(batch.sampling = NULL);
    REFUSED(a.sampling[3].temperature = 0.0F);
    REFUSED(a.sampling[3].min_p = 2.0F);
    REFUSED(a.sampling[3].logprob_ids = bad_id);
    REFUSED(a.rows[2].support_ids = NULL);
    REFUSED(a.rows[2].support_logprobs = NULL);
    REFUSED(a.rows[2].top = NULL);
    REFUSED(a.rows[2].id_logprobs = NULL);
    REFUSED(a.scores[2].first = 5);
    REFUSED(a.scores[2].first = UINT32_MAX);
    REFUSED(a.scores[2].count = 4);
    REFUSED(a.scores[2].count = UINT32_MAX);
    REFUSED(a.scores[2].targets = NULL);
    REFUSED(a.scores[2].targets = bad_id; a.scores[2].count = 1);
    REFUSED(a.scores[2].targets = bad_id + 1; a.scores[2].count = 1);
    REFUSED(a.scores[2].ids = NULL);
    REFUSED(a.scores[2].ids = bad_id);
    REFUSED(a.scores[2].logprobs = NULL);
    REFUSED(a.scores[2].top = NULL);
    REFUSED(a.scores[2].id_logprobs = NULL);
    REFUSED(a.scores[2].top_count = SAMPLER_TOP_MAX + 1);
    REFUSED(a.scores[2].id_count = SAMPLER_IDS_MAX + 1);
#undef REFUSED
    bt_free(before);
}

static void capture_time_is_summed_over_the_samplers(void **state) {
    bench *b = *state;
    open_runner(b, 2, NULL);
    run_prompts(b, 0, PROMPTS, 0);
    assert_int_equal(model_runner_take_capture_ns(b->runner), 0);
    model_runner_time_capture(b->runner, true);
    run_prompts(b, 0, PROMPTS, 0);
    assert_true(model_runner_take_capture_ns(b->runner) > 0);
    assert_int_equal(model_runner_take_capture_ns(b->runner), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_depends_on_batch_chunk_or_threads),
        cmocka_unit_test(draws_are_those_of_separate_steps),
        cmocka_unit_test(scores_are_those_of_the_prefix),
        cmocka_unit_test(given_logits_are_the_draws_logits),
        cmocka_unit_test(read_pages_may_be_shared),
        cmocka_unit_test(bad_draws_and_scores_are_refused),
        cmocka_unit_test(capture_time_is_summed_over_the_samplers),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
