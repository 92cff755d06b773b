/* The compute without a model: what steps give is what compute_sim_expect says, whatever the
 * chunks, and every parameter that could get lost on its way changes it. */
#include "kernels/compute_sim.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"

enum { PAGES = 16, PAGE_TOKENS = 4, VOCAB = 50, PROMPT = 11, ROWS = 6, SUPPORT = 8, TOP = 3 };

typedef struct full_row {
    sampler_row row;
    int32_t ids[SUPPORT];
    float logprobs[SUPPORT];
    sampler_top top[TOP];
    float id_logprobs[2];
} full_row;

typedef struct bench {
    compute_sim_options options;
    compute *c;
    uint64_t now_us;
    uint32_t done_count;
    bt_status status;
    int32_t prompt[PROMPT];
    full_row expected[ROWS];
} bench;

static const int32_t some_ids[] = {3, 49};
static const float some_biases[] = {1.5F, -2.0F};

static void on_done(void *context, bt_status status) {
    bench *b = context;
    b->status = status;
    b->done_count++;
}

static int setup(void **state) {
    static bench b;
    b = (bench){0};
    b.options = (compute_sim_options){.kv_page_count = PAGES,
                                      .page_bytes = PAGE_TOKENS * 32,
                                      .page_tokens = PAGE_TOKENS,
                                      .vocab_size = VOCAB,
                                      .support_max = SUPPORT};
    b.options.kv_memory = bt_calloc(PAGES, b.options.page_bytes);
    assert_non_null(b.options.kv_memory);
    assert_int_equal(compute_sim_create(&b.options, &b.c), BT_OK);
    b.c->on_done = on_done;
    b.c->context = &b;
    for (int i = 0; i < PROMPT; i++)
        b.prompt[i] = (i * 7 + 3) % VOCAB;
    *state = &b;
    return 0;
}

static int teardown(void **state) {
    bench *b = *state;
    b->c->ops->destroy(b->c);
    bt_free(b->options.kv_memory);
    return 0;
}

static bt_status run(bench *b, const model_batch *batch) {
    const uint32_t before = b->done_count;
    b->c->ops->start(b->c, batch);
    assert_true(compute_sim_poll(b->c, b->now_us++));
    assert_int_equal(b->done_count, before + 1);
    return b->status;
}

static sampler_params full_params(void) {
    return (sampler_params){.temperature = 1.0F,
                            .top_p = 1.0F,
                            .mask_mode = SAMPLER_MASK_SUPPORT,
                            .mask_max_tokens = SUPPORT,
                            .wants_logprob = 1,
                            .seed = 5,
                            .top_logprobs = TOP,
                            .logprob_ids = some_ids,
                            .logprob_id_count = 2};
}

static void point_row(full_row *r) {
    *r = (full_row){.row = {.support_ids = r->ids,
                            .support_logprobs = r->logprobs,
                            .top = r->top,
                            .id_logprobs = r->id_logprobs}};
}

static void assert_same_row(const full_row *a, const full_row *b) {
    assert_int_equal(a->row.status, b->row.status);
    assert_int_equal(a->row.token, b->row.token);
    assert_memory_equal(&a->row.token_logprob, &b->row.token_logprob, sizeof(float));
    assert_memory_equal(&a->row.selected_logprob, &b->row.selected_logprob, sizeof(float));
    assert_int_equal(a->row.support_count, b->row.support_count);
    assert_int_equal(a->row.top_count, b->row.top_count);
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
    assert_memory_equal(a->top, b->top, sizeof a->top);
    assert_memory_equal(a->id_logprobs, b->id_logprobs, sizeof a->id_logprobs);
}

/* Fills b->expected; returns the rows. */
static uint32_t expect(bench *b, const sampler_params *params, uint32_t banned_rows,
                       uint32_t count) {
    sampler_row rows[ROWS];
    for (uint32_t i = 0; i < ROWS; i++) {
        point_row(&b->expected[i]);
        rows[i] = b->expected[i].row;
    }
    const uint32_t drawn =
        compute_sim_expect_banned(&b->options, params, banned_rows, b->prompt, PROMPT, count, rows);
    for (uint32_t i = 0; i < ROWS; i++)
        b->expected[i].row = rows[i];
    return drawn;
}

/* One sequence on pages [first_page, ...): query tokens at `position`. */
static bt_status run_tokens(bench *b, uint32_t first_page, uint32_t position, const int32_t *ids,
                            uint32_t count, const sampler_params *params, full_row *rows,
                            uint32_t draws, const model_scores *scores) {
    uint32_t pages[PAGES];
    sampler_row plain[4];
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = (first_page + i) % PAGES;
    for (uint32_t i = 0; i < draws; i++) {
        point_row(&rows[i]);
        plain[i] = rows[i].row;
    }
    const uint32_t token_offsets[] = {0, count};
    const uint32_t page_offsets[] = {0, (position + count - 1) / PAGE_TOKENS + 1};
    const uint32_t draw_offsets[] = {0, draws};
    const uint8_t samples = draws > 0;
    const model_batch batch = {.sequences = 1,
                               .tokens = count,
                               .token_offsets = token_offsets,
                               .token_ids = ids,
                               .first_positions = &position,
                               .page_offsets = page_offsets,
                               .page_ids = pages,
                               .samples = &samples,
                               .sampling = params,
                               .rows = plain,
                               .scores = scores,
                               .draw_offsets = draw_offsets};
    const bt_status status = run(b, &batch);
    for (uint32_t i = 0; i < draws; i++)
        rows[i].row = plain[i];
    return status;
}

static void several_rows_with_history(void **state) {
    bench *b = *state;
    sampler_params params = full_params();
    params.presence_penalty = 0.5F;
    params.banned_ids = some_ids;
    params.banned_count = 2;
    assert_int_equal(expect(b, &params, 3, ROWS), ROWS);
    int32_t outputs[ROWS];
    for (uint32_t i = 0; i < ROWS; i++) {
        full_row got;
        sampler_params now = params;
        now.banned_count = i < 3 ? 2 : 0;
        now.output_ids = outputs;
        now.output_count = i;
        const int32_t *ids = i == 0 ? b->prompt : &outputs[i - 1];
        const uint32_t count = i == 0 ? PROMPT : 1;
        const uint32_t position = i == 0 ? 0 : PROMPT + i - 1;
        assert_int_equal(run_tokens(b, 0, position, ids, count, &now, &got, 1, NULL), BT_OK);
        assert_int_equal(got.row.status, SAMPLER_OK);
        assert_same_row(&got, &b->expected[i]);
        outputs[i] = got.row.token;
    }
    /* What was drawn may come in any order, and starts wherever the caller says. */
    sampler_row row = {.support_ids = b->expected[0].ids,
                       .support_logprobs = b->expected[0].logprobs,
                       .top = b->expected[0].top,
                       .id_logprobs = b->expected[0].id_logprobs};
    int32_t longer[PROMPT + 2];
    memcpy(longer, b->prompt, sizeof b->prompt);
    longer[PROMPT] = outputs[0];
    longer[PROMPT + 1] = outputs[1];
    const int32_t swapped[] = {outputs[1], outputs[0]};
    params.output_ids = swapped;
    params.output_count = 2;
    assert_int_equal(compute_sim_expect(&b->options, &params, longer, PROMPT + 2, 1, &row), 1);
    assert_int_equal(row.token, outputs[2]);
}

static void draws_of_one_prompt_differ_by_their_parameters(void **state) {
    bench *b = *state;
    sampler_params params[3];
    full_row got[3];
    for (uint32_t i = 0; i < 3; i++) {
        params[i] = full_params();
        params[i].seed = 100 + i;
    }
    assert_int_equal(run_tokens(b, 3, 0, b->prompt, PROMPT, params, got, 3, NULL), BT_OK);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(expect(b, &params[i], 0, 1), 1);
        assert_same_row(&got[i], &b->expected[0]);
    }
    assert_memory_not_equal(&got[0].row.token_logprob, &got[1].row.token_logprob, sizeof(float));
}

/* Every parameter that is lost or mixed up shows in the row. */
static void every_parameter_counts(void **state) {
    bench *b = *state;
    sampler_params plain = full_params();
    assert_int_equal(expect(b, &plain, 0, 1), 1);
    const full_row base = b->expected[0];
    sampler_params p[12];
    for (size_t i = 0; i < BT_ARRAY_COUNT(p); i++)
        p[i] = plain;
    const float other_biases[] = {1.5F, -2.5F};
    p[0].temperature = 0.5F;
    p[1].top_p = 0.5F;
    p[2].min_p = 0.5F;
    p[3].filter = SAMPLER_FILTER_RANK;
    p[4].frequency_penalty = 0.5F;
    p[5].presence_penalty = 0.5F;
    p[6].repetition_penalty = 1.5F;
    for (int i = 4; i < 7; i++) {
        p[i].output_ids = some_ids;
        p[i].output_count = 2;
    }
    p[7] = p[6];
    p[7].output_count = 1;
    p[8].banned_ids = some_ids;
    p[8].banned_count = 1;
    p[9].bias_ids = some_ids;
    p[9].biases = some_biases;
    p[9].bias_count = 2;
    p[10] = p[9];
    p[10].biases = other_biases;
    p[11].seed = 6;
    float logprobs[BT_ARRAY_COUNT(p)];
    for (size_t i = 0; i < BT_ARRAY_COUNT(p); i++) {
        assert_int_equal(expect(b, &p[i], UINT32_MAX, 1), 1);
        logprobs[i] = b->expected[0].row.token_logprob;
        assert_true(logprobs[i] != base.row.token_logprob);
        for (size_t j = 0; j < i; j++)
            assert_true(logprobs[i] != logprobs[j]);
    }
    /* Neutral is neutral: what was drawn does not matter without a penalty. */
    plain.repetition_penalty = 1.0F;
    plain.output_ids = some_ids;
    plain.output_count = 2;
    assert_int_equal(expect(b, &plain, 0, 1), 1);
    assert_same_row(&b->expected[0], &base);
}

static void banned_ids_are_never_drawn(void **state) {
    bench *b = *state;
    int32_t all[VOCAB];
    for (int i = 0; i < VOCAB; i++)
        all[i] = (i + 20) % VOCAB;
    sampler_params params = full_params();
    params.banned_ids = all;
    for (uint32_t banned = 0; banned < VOCAB; banned++) {
        params.banned_count = banned;
        params.seed = banned;
        assert_int_equal(expect(b, &params, UINT32_MAX, ROWS), ROWS);
        for (uint32_t i = 0; i < ROWS; i++) {
            const full_row *row = &b->expected[i];
            const uint32_t left = VOCAB - banned;
            assert_int_equal(row->row.top_count, left < TOP ? left : TOP);
            assert_true(row->row.support_count >= 1 && row->row.support_count <= left);
            for (uint32_t j = 0; j < row->row.support_count; j++)
                assert_true((uint32_t)(row->ids[j] + VOCAB - 20) % VOCAB >= banned);
        }
    }
    /* A bias of -inf bans as well; an id that is banned twice counts once. */
    const int32_t bias_ids[] = {all[3], all[9], all[9], all[10]};
    const float biases[] = {-INFINITY, 1.0F, -INFINITY, 1.0F};
    params.banned_count = 9;
    params.bias_ids = bias_ids;
    params.biases = biases;
    params.bias_count = 4;
    params.top_logprobs = TOP;
    for (params.seed = 0; params.seed < 50; params.seed++) {
        assert_int_equal(expect(b, &params, UINT32_MAX, ROWS), ROWS);
        for (uint32_t i = 0; i < ROWS; i++)
            for (uint32_t j = 0; j < b->expected[i].row.support_count; j++)
                assert_true((uint32_t)(b->expected[i].ids[j] + VOCAB - 20) % VOCAB >= 10);
    }
    params.bias_count = 0;
    params.banned_count = VOCAB;
    assert_int_equal(expect(b, &params, UINT32_MAX, ROWS), 1);
    assert_int_equal(b->expected[0].row.status, SAMPLER_INVALID);
}

static void scores_do_not_depend_on_chunks(void **state) {
    bench *b = *state;
    enum { FROM = 2, COUNT = PROMPT - 1 - FROM };
    float want[COUNT], got[COUNT], want_ids[COUNT][2], got_ids[COUNT][2];
    sampler_top want_top[COUNT][TOP], got_top[COUNT][TOP];
    memset(got, 0x5a, sizeof got);
    const model_scores all = {.first = FROM,
                              .count = COUNT,
                              .targets = b->prompt + FROM + 1,
                              .top_count = TOP,
                              .id_count = 2,
                              .ids = some_ids,
                              .logprobs = want,
                              .top = want_top[0],
                              .id_logprobs = want_ids[0]};
    compute_sim_expect_scores(&b->options, b->prompt, &all);
    for (uint32_t at = 0, count = 1; at < PROMPT; at += count, count++) {
        if (count > PROMPT - at) count = PROMPT - at;
        const uint32_t first = at > FROM ? at : FROM;
        const uint32_t end = at + count < PROMPT - 1 ? at + count : PROMPT - 1;
        model_scores part = all;
        part.first = first - at;
        part.count = end > first ? end - first : 0;
        part.targets = b->prompt + first + 1;
        part.logprobs = got + (first - FROM);
        part.top = got_top[0] + (first - FROM) * TOP;
        part.id_logprobs = got_ids[0] + (first - FROM) * 2;
        if (part.count == 0) part.first = 0;
        assert_int_equal(run_tokens(b, 0, at, b->prompt + at, count, NULL, NULL, 0, &part), BT_OK);
    }
    assert_memory_equal(got, want, sizeof want);
    assert_memory_equal(got_top, want_top, sizeof want_top);
    assert_memory_equal(got_ids, want_ids, sizeof want_ids);
    assert_true(want[0] != want[1]);
    /* A prefix that is not in its pages gives no number. */
    memset(b->options.kv_memory, 0, b->options.page_bytes);
    model_scores lost = all;
    lost.first = 0;
    lost.count = 1;
    full_row row;
    const sampler_params params = full_params();
    assert_int_equal(run_tokens(b, 0, 8, b->prompt + 8, 3, &params, &row, 1, &lost), BT_OK);
    assert_true(want[0] != want[0]);
    assert_int_equal(row.row.status, SAMPLER_INVALID);
    assert_int_equal(row.row.token, -1);
}

/* Two sequences of one token at position 4 of pages {a, b} each. */
static bt_status run_pair(bench *b, uint32_t first_read, uint32_t first_written,
                          uint32_t second_read, uint32_t second_written) {
    const uint32_t pages[] = {first_read, first_written, second_read, second_written};
    const uint32_t token_offsets[] = {0, 1, 2}, page_offsets[] = {0, 2, 4};
    const uint32_t positions[] = {4, 4};
    const int32_t ids[] = {1, 2};
    const uint8_t samples[] = {0, 0};
    const model_batch batch = {.sequences = 2,
                               .tokens = 2,
                               .token_offsets = token_offsets,
                               .token_ids = ids,
                               .first_positions = positions,
                               .page_offsets = page_offsets,
                               .page_ids = pages,
                               .samples = samples};
    return run(b, &batch);
}

static void written_pages_are_not_shared(void **state) {
    bench *b = *state;
    assert_int_equal(run_pair(b, 0, 1, 0, 2), BT_OK);
    assert_int_equal(run_pair(b, 0, 1, 0, 1), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(run_pair(b, 0, 1, 1, 2), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(run_pair(b, 2, 1, 0, 2), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(run_pair(b, 1, 1, 0, 2), BT_ERR_CALLER_ARGUMENT);
}

/* Of every prefix: the support is no larger than top_k, the cap and the ids that there are; cut, it
 * has the first entries and the drawn one; what is said does not depend on the cap. */
static void rows_fit_their_limits(void **state) {
    bench *b = *state;
    uint32_t cut = 0, replaced = 0;
    for (uint64_t seed = 0; seed < 60; seed++) {
        sampler_params params = full_params();
        params.temperature = 1.0F + (float)seed; /* another support */
        params.seed = seed;
        assert_int_equal(expect(b, &params, 0, 1), 1);
        const full_row whole = b->expected[0];
        const uint32_t size = whole.row.support_count;
        assert_in_range(size, 1, SUPPORT);
        assert_int_equal(whole.row.cap_needed, size);
        uint32_t drawn = 0;
        while (whole.ids[drawn] != whole.row.token)
            drawn++;
        assert_memory_equal(&whole.logprobs[drawn], &whole.row.selected_logprob, sizeof(float));
        params.top_k = 3;
        assert_int_equal(expect(b, &params, 0, 1), 1);
        assert_int_equal(b->expected[0].row.support_count, size < 3 ? size : 3);
        params.top_k = 0;
        params.mask_max_tokens = 3;
        assert_int_equal(expect(b, &params, 0, 1), 1);
        assert_int_equal(b->expected[0].row.cap_needed, size);
        assert_int_equal(b->expected[0].row.status, size > 3 ? SAMPLER_OVERFLOW : SAMPLER_OK);
        params.mask_bounded = 1;
        assert_int_equal(expect(b, &params, 0, 1), 1);
        const full_row *kept = &b->expected[0];
        const uint32_t count = size < 3 ? size : 3;
        assert_int_equal(kept->row.status, SAMPLER_OK);
        assert_int_equal(kept->row.token, whole.row.token);
        assert_int_equal(kept->row.support_count, count);
        assert_int_equal(kept->row.cap_needed, size);
        assert_memory_equal(&kept->row.selected_logprob, &whole.row.selected_logprob, 4);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t from = i == count - 1 && drawn > i ? drawn : i;
            assert_int_equal(kept->ids[i], whole.ids[from]);
            assert_memory_equal(&kept->logprobs[i], &whole.logprobs[from], sizeof(float));
        }
        cut += size > 3;
        replaced += drawn >= 3;
    }
    assert_true(cut > 20 && replaced > 10);
}

/* Only a bias of -inf bans; an id that is banned twice is gone once; what is beyond the limit has
 * no value. */
static void what_can_be_drawn_is_counted(void **state) {
    bench *b = *state;
    int32_t all[VOCAB + 3];
    float biases[VOCAB];
    for (int i = 0; i < VOCAB; i++) {
        all[i] = i;
        biases[i] = -100.0F;
    }
    sampler_params params = full_params();
    params.bias_ids = all;
    params.biases = biases;
    params.bias_count = VOCAB;
    assert_int_equal(expect(b, &params, 0, 1), 1);
    assert_int_equal(b->expected[0].row.status, SAMPLER_OK);
    assert_int_equal(b->expected[0].row.top_count, TOP);
    params.bias_count = 0;
    for (int i = 0; i < 3; i++)
        all[VOCAB - 2 + i] = 7 * i; /* 48 of 50, and three of them again */
    params.banned_ids = all;
    params.banned_count = VOCAB + 1;
    assert_int_equal(expect(b, &params, UINT32_MAX, 1), 1);
    assert_int_equal(b->expected[0].row.status, SAMPLER_OK);
    assert_int_equal(b->expected[0].row.top_count, 2);
    params.banned_count = 0;
    params.vocab_limit = 49;
    assert_int_equal(expect(b, &params, 0, 1), 1);
    assert_true(isinf(b->expected[0].id_logprobs[1]) && !isinf(b->expected[0].id_logprobs[0]));
    float logprob = 0.0F, ids[2];
    sampler_top top[TOP];
    const model_scores scores = {.count = 1,
                                 .targets = &some_ids[1],
                                 .vocab_limit = 49,
                                 .top_count = TOP,
                                 .id_count = 2,
                                 .ids = some_ids,
                                 .logprobs = &logprob,
                                 .top = top,
                                 .id_logprobs = ids};
    compute_sim_expect_scores(&b->options, b->prompt, &scores);
    assert_true(isinf(logprob) && isinf(ids[1]) && !isinf(ids[0]));
}

static void a_step_takes_its_time_and_fails_once(void **state) {
    bench *b = *state;
    const uint32_t token_offsets[] = {0, 3}, page_offsets[] = {0, 1}, page = 2, position = 0;
    const uint8_t samples = 0;
    const model_batch batch = {.sequences = 1,
                               .tokens = 3,
                               .token_offsets = token_offsets,
                               .token_ids = b->prompt,
                               .first_positions = &position,
                               .page_offsets = page_offsets,
                               .page_ids = &page,
                               .samples = &samples};
    b->c->ops->destroy(b->c);
    b->options.step_us = 100;
    b->options.token_us = 7;
    assert_int_equal(compute_sim_create(&b->options, &b->c), BT_OK);
    b->c->on_done = on_done;
    b->c->context = b;
    compute_sim_fail_next(b->c, BT_ERR_WORKER_INTERNAL);
    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t start = 1000 * i;
        b->c->ops->start(b->c, &batch);
        assert_int_equal(compute_sim_due_us(b->c), UINT64_MAX);
        assert_false(compute_sim_poll(b->c, start));
        assert_int_equal(compute_sim_due_us(b->c), start + 100 + 3 * 7);
        assert_false(compute_sim_poll(b->c, start + 120));
        assert_true(compute_sim_poll(b->c, start + 121));
        assert_false(compute_sim_poll(b->c, start + 500));
        assert_int_equal(b->done_count, i + 1);
        assert_int_equal(b->status, i == 0 ? BT_ERR_WORKER_INTERNAL : BT_OK);
    }
}

static void pages_are_copied_and_cut_exactly(void **state) {
    bench *b = *state;
    uint8_t *memory = b->options.kv_memory;
    const size_t bytes = b->options.page_bytes;
    for (size_t i = 0; i < 4 * bytes; i++)
        memory[i] = (uint8_t)(1 + i % 251);
    b->c->ops->copy_page(b->c, 2, 1);
    for (size_t i = 0; i < 4 * bytes; i++)
        assert_int_equal(memory[i], 1 + (i / bytes == 1 ? i + bytes : i) % 251);
    b->c->ops->zero_tail(b->c, 1, 3);
    for (size_t i = 0; i < 4 * bytes; i++) {
        const bool is_zero = i / bytes == 1 && i % bytes >= 3 * bytes / PAGE_TOKENS;
        assert_int_equal(memory[i], is_zero ? 0 : 1 + (i / bytes == 1 ? i + bytes : i) % 251);
    }
}

/* Tokens of a size that is no multiple of a hash: each byte of the one before counts. */
static void every_byte_of_a_token_counts(void **state) {
    bench *b = *state;
    enum { BYTES = 29 };
    full_row row;
    const sampler_params params = full_params();
    b->c->ops->destroy(b->c);
    b->options.page_bytes = PAGE_TOKENS * BYTES;
    for (int trusts = 0; trusts < 2; trusts++) {
        b->options.trusts_pages = trusts != 0;
        assert_int_equal(compute_sim_create(&b->options, &b->c), BT_OK);
        b->c->on_done = on_done;
        b->c->context = b;
        assert_int_equal(run_tokens(b, 0, 0, b->prompt, 3, &params, &row, 1, NULL), BT_OK);
        for (uint32_t i = 0; i <= BYTES; i++) {
            uint8_t *at = (uint8_t *)b->options.kv_memory + 2 * BYTES + i; /* the last token */
            *at ^= 64;
            const bool is_told =
                i < BYTES && (trusts == 0 || i / 4 != 2); /* the id is not looked at */
            assert_int_equal(run_tokens(b, 0, 3, b->prompt + 3, 1, &params, &row, 1, NULL), BT_OK);
            assert_int_equal(row.row.status, is_told ? SAMPLER_INVALID : SAMPLER_OK);
            if (i < BYTES) *at ^= 64;
        }
        if (trusts == 0) b->c->ops->destroy(b->c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(several_rows_with_history, setup, teardown),
        cmocka_unit_test_setup_teardown(draws_of_one_prompt_differ_by_their_parameters, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(every_parameter_counts, setup, teardown),
        cmocka_unit_test_setup_teardown(banned_ids_are_never_drawn, setup, teardown),
        cmocka_unit_test_setup_teardown(scores_do_not_depend_on_chunks, setup, teardown),
        cmocka_unit_test_setup_teardown(written_pages_are_not_shared, setup, teardown),
        cmocka_unit_test_setup_teardown(rows_fit_their_limits, setup, teardown),
        cmocka_unit_test_setup_teardown(what_can_be_drawn_is_counted, setup, teardown),
        cmocka_unit_test_setup_teardown(a_step_takes_its_time_and_fails_once, setup, teardown),
        cmocka_unit_test_setup_teardown(pages_are_copied_and_cut_exactly, setup, teardown),
        cmocka_unit_test_setup_teardown(every_byte_of_a_token_counts, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
