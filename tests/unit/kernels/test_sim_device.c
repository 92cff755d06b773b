/* The sim device: what its steps write is what compute_sim_expect says, in a prompt and after it;
 * what it kept is counted; a page that is not what it was shows. How exactly the time was kept is
 * for benchmarks, not for tests. */
#include "kernels/sim_device.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/mem.h"

enum {
    SEED = 77,
    PAGES = 8,
    PAGE_TOKENS = 16,
    VOCAB = 400,
    PROMPT = 21,
    ROWS = 12,
    CAP = 32,
    WIDTH = 9
};

typedef struct lab {
    sim_device_options options;
    compute *c;
    uint32_t done;
    bt_status status;
    int32_t tokens[PROMPT + ROWS];
} lab;

typedef struct full_row {
    sampler_row row;
    int32_t ids[CAP];
    float logprobs[CAP];
} full_row;

static lab l;
static full_row expected[ROWS];

static void on_done(void *context, bt_status status) {
    lab *its = context;
    its->status = status;
    its->done++;
}

static void make_device(uint64_t step_us, bool checks_pages) {
    bt_error error = {0};
    l.options = (sim_device_options){.sim = {.kv_memory = l.options.sim.kv_memory,
                                             .kv_page_count = PAGES,
                                             .page_bytes = PAGE_TOKENS * 64,
                                             .page_tokens = PAGE_TOKENS,
                                             .vocab_size = VOCAB,
                                             .step_us = step_us,
                                             .token_us = 1},
                                     .width = WIDTH,
                                     .seed = SEED,
                                     .checks_pages = checks_pages,
                                     .component = "test"};
    assert_int_equal(sim_device_create(&l.options, &l.c, &error), BT_OK);
    l.c->on_done = on_done;
    l.c->context = &l;
}

static int set_up(void **state) {
    (void)state;
    l = (lab){0};
    l.options.sim.kv_memory = bt_calloc(PAGES, PAGE_TOKENS * 64);
    assert_non_null(l.options.sim.kv_memory);
    for (int32_t i = 0; i < PROMPT; i++)
        l.tokens[i] = i * 13 % VOCAB;
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    if (l.c != NULL) l.c->ops->destroy(l.c);
    bt_free(l.options.sim.kv_memory);
    return 0;
}

static sampler_params params_of(uint32_t mask_mode) {
    return (sampler_params){.temperature = 1.0F,
                            .top_p = 1.0F,
                            .mask_mode = mask_mode,
                            .mask_max_tokens = CAP,
                            .wants_logprob = 1,
                            .seed = 41};
}

static sampler_row empty_row(full_row *r) {
    *r = (full_row){0};
    return (sampler_row){.support_ids = r->ids, .support_logprobs = r->logprobs};
}

/* One step of one sequence: tokens [first, end), on pages in an order of their own. */
static void step(uint32_t first, uint32_t end, const sampler_params *params, full_row *out) {
    const uint32_t pages[] = {5, 2, 7};
    const uint32_t token_offsets[] = {0, end - first};
    const uint32_t page_offsets[] = {0, (end - 1) / PAGE_TOKENS + 1};
    const uint8_t samples = 1;
    out->row = empty_row(out);
    const model_batch batch = {.sequences = 1,
                               .tokens = end - first,
                               .token_offsets = token_offsets,
                               .token_ids = l.tokens + first,
                               .first_positions = &first,
                               .page_offsets = page_offsets,
                               .page_ids = pages,
                               .samples = &samples,
                               .sampling = params,
                               .rows = &out->row};
    const uint32_t before = l.done;
    l.c->ops->start(l.c, &batch);
    assert_int_equal(l.done, before); /* never inside the call */
    while (l.done == before) {
        struct pollfd p = {.fd = compute_threaded_get_fd(l.c), .events = POLLIN};
        assert_int_equal(poll(&p, 1, -1), 1);
        compute_threaded_poll(l.c);
    }
    assert_int_equal(l.status, BT_OK);
}

static void expect_rows(const sampler_params *params) {
    sampler_row rows[ROWS];
    for (uint32_t i = 0; i < ROWS; i++)
        rows[i] = empty_row(&expected[i]);
    const sim_rows_options options = {.vocab_size = VOCAB, .width = WIDTH, .seed = SEED};
    compute_sim_options sim = l.options.sim;
    assert_int_equal(sim_rows_create(&options, &sim.rows), BT_OK);
    assert_int_equal(compute_sim_expect(&sim, params, l.tokens, PROMPT, ROWS, rows), ROWS);
    sim_rows_destroy(sim.rows);
    for (uint32_t i = 0; i < ROWS; i++)
        expected[i].row = rows[i];
}

static void assert_same(const full_row *a, const full_row *b) {
    assert_int_equal(a->row.status, SAMPLER_OK);
    assert_int_equal(a->row.token, b->row.token);
    assert_int_equal(a->row.support_count, b->row.support_count);
    assert_memory_equal(&a->row.token_logprob, &b->row.token_logprob, sizeof(float));
    assert_memory_equal(&a->row.selected_logprob, &b->row.selected_logprob, sizeof(float));
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
}

static void rows_are_those_of_the_prefix(void **state) {
    (void)state;
    for (uint32_t mode = SAMPLER_MASK_OFF; mode <= SAMPLER_MASK_SUPPORT; mode++) {
        const sampler_params params = params_of(mode);
        make_device(50, mode == SAMPLER_MASK_OFF);
        expect_rows(&params);
        full_row got;
        step(0, 8, &params, &got); /* a chunk; its draw is for nobody */
        step(8, PROMPT, &params, &got);
        assert_same(&got, &expected[0]);
        for (uint32_t i = 1; i < ROWS; i++) {
            l.tokens[PROMPT + i - 1] = got.row.token;
            step(PROMPT + i - 1, PROMPT + i, &params, &got);
            assert_same(&got, &expected[i]);
        }
        assert_int_equal(got.row.support_count, mode == SAMPLER_MASK_OFF ? 0 : WIDTH);
        l.c->ops->destroy(l.c);
        l.c = NULL;
    }
}

static void what_was_kept_is_counted(void **state) {
    (void)state;
    make_device(300, false);
    const sampler_params params = params_of(SAMPLER_MASK_SELECTED);
    full_row got;
    const bt_clock clock = bt_clock_system();
    const uint64_t before = bt_clock_now_us(&clock);
    step(0, PROMPT, &params, &got);
    step(PROMPT, PROMPT + 1, &params, &got);
    /* No step is shorter than its time. */
    assert_true(bt_clock_now_us(&clock) - before >= 2 * 300 + PROMPT + 1);
    const sim_device_counts counts = sim_device_look(l.c);
    assert_int_equal(counts.steps, 2);
    assert_int_equal(counts.rows, 2);
    uint64_t late = counts.overruns;
    for (size_t i = 0; i < BT_ARRAY_COUNT(counts.late_steps); i++)
        late += counts.late_steps[i];
    assert_int_equal(late, 2);
    assert_true(counts.late_us >= counts.late_most_us);
    assert_true(counts.pauses <= 1);
}

/* Only the last token is looked at, unless all are asked for; zeros are nobody's. */
static void pages_that_are_not_whole_show(void **state) {
    (void)state;
    const sampler_params params = params_of(SAMPLER_MASK_OFF);
    full_row got;
    uint8_t *memory = l.options.sim.kv_memory;
    for (int checks = 0; checks < 2; checks++) {
        make_device(0, checks != 0);
        step(0, PROMPT, &params, &got);
        memory[5 * PAGE_TOKENS * 64] ^= 1; /* the first token */
        step(PROMPT, PROMPT + 1, &params, &got);
        assert_int_equal(got.row.status, checks != 0 ? SAMPLER_INVALID : SAMPLER_OK);
        memory[5 * PAGE_TOKENS * 64] ^= 1;
        memory[2 * PAGE_TOKENS * 64 + (PROMPT - PAGE_TOKENS) * 64 - 1] ^= 1; /* the last one */
        step(PROMPT, PROMPT + 1, &params, &got);
        assert_int_equal(got.row.status, SAMPLER_INVALID);
        memset(memory, 0, PAGES * PAGE_TOKENS * 64);
        step(PROMPT, PROMPT + 1, &params, &got);
        assert_int_equal(got.row.status, SAMPLER_INVALID);
        l.c->ops->destroy(l.c);
        l.c = NULL;
    }
}

static void destroy_waits_for_a_step(void **state) {
    (void)state;
    make_device(1000, false);
    const uint32_t offsets[] = {0, 1}, position = 0, page = 3;
    const int32_t token = 1;
    const uint8_t samples = 0;
    const model_batch batch = {.sequences = 1,
                               .tokens = 1,
                               .token_offsets = offsets,
                               .token_ids = &token,
                               .first_positions = &position,
                               .page_offsets = offsets,
                               .page_ids = &page,
                               .samples = &samples};
    l.c->ops->start(l.c, &batch);
    l.c->ops->destroy(l.c);
    l.c = NULL;
    assert_int_equal(l.done, 0);
    /* It was written all the same. */
    uint64_t hash = 0;
    memcpy(&hash, (uint8_t *)l.options.sim.kv_memory + 3 * PAGE_TOKENS * 64, sizeof hash);
    assert_true(hash != 0);
}

/* Another seed draws other rows. */
static void the_seed_is_the_options(void **state) {
    (void)state;
    const sampler_params params = params_of(SAMPLER_MASK_SUPPORT);
    full_row got;
    make_device(0, false);
    step(0, PROMPT, &params, &got);
    expect_rows(&params);
    assert_same(&got, &expected[0]);
    l.c->ops->destroy(l.c);
    bt_error error = {0};
    l.options.seed = SEED + 1;
    assert_int_equal(sim_device_create(&l.options, &l.c, &error), BT_OK);
    l.c->on_done = on_done;
    l.c->context = &l;
    full_row other;
    step(0, PROMPT, &params, &other);
    assert_memory_not_equal(other.ids, got.ids, sizeof got.ids);
}

/* Pages are copied and cut between steps; several draws of one sequence are as many rows. */
static void pages_and_draws_are_those_of_the_batch(void **state) {
    (void)state;
    enum { PAGE_BYTES = PAGE_TOKENS * 64 };
    uint8_t *memory = l.options.sim.kv_memory;
    make_device(0, false);
    for (size_t i = 0; i < 3 * PAGE_BYTES; i++)
        memory[i] = (uint8_t)(1 + i % 253);
    l.c->ops->copy_page(l.c, 2, 0);
    for (size_t i = 0; i < PAGE_BYTES; i++)
        assert_int_equal(memory[i], 1 + (i + 2 * PAGE_BYTES) % 253);
    l.c->ops->zero_tail(l.c, 0, 5);
    for (size_t i = 0; i < PAGE_BYTES; i++)
        assert_int_equal(memory[i], i < 5 * 64 ? 1 + (i + 2 * PAGE_BYTES) % 253 : 0);
    const sampler_params params[3] = {params_of(0), params_of(1), params_of(2)};
    full_row rows[3];
    sampler_row plain[3];
    for (size_t i = 0; i < 3; i++)
        plain[i] = empty_row(&rows[i]);
    const uint32_t offsets[] = {0, 1}, draws[] = {0, 3}, position = 0, page = 3;
    const uint8_t samples = 1;
    const model_batch batch = {.sequences = 1,
                               .tokens = 1,
                               .token_offsets = offsets,
                               .token_ids = l.tokens,
                               .first_positions = &position,
                               .page_offsets = offsets,
                               .page_ids = &page,
                               .samples = &samples,
                               .sampling = params,
                               .draw_offsets = draws,
                               .rows = plain};
    l.c->ops->start(l.c, &batch);
    while (l.done == 0) {
        struct pollfd p = {.fd = compute_threaded_get_fd(l.c), .events = POLLIN};
        assert_int_equal(poll(&p, 1, -1), 1);
        compute_threaded_poll(l.c);
    }
    assert_int_equal(sim_device_look(l.c).rows, 3);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(plain[i].support_count, i == 0 ? 0 : WIDTH);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(rows_are_those_of_the_prefix, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_was_kept_is_counted, set_up, tear_down),
        cmocka_unit_test_setup_teardown(pages_that_are_not_whole_show, set_up, tear_down),
        cmocka_unit_test_setup_teardown(destroy_waits_for_a_step, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_seed_is_the_options, set_up, tear_down),
        cmocka_unit_test_setup_teardown(pages_and_draws_are_those_of_the_batch, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
