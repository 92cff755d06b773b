/* Masks at the decode core: rows that are cut, the epochs that rows were drawn under, overflows
 * among neighbours and beside cancels, and first rows that are not what the request asked for. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "prefill/prefill_internal.h"
#include "rig.h"
#include "world.h"

static world_stream stream; /* large; the tests run one after the other */

/* ---- bounded masks --------------------------------------------------------------------------- */

/* The first row too, which comes from prefill; narrow supports stay whole. */
static void bounded_rows_equal_one_process(void **state) {
    (void)state;
    for (uint32_t mode = SAMPLER_MASK_SELECTED; mode <= SAMPLER_MASK_SUPPORT; mode++) {
        for (uint32_t cap = 1; cap <= 16; cap += 5) {
            world *w = world_create(&(world_options){.cap = cap, .support_max = 16});
            world_register(w);
            proto_generation g = world_generation(30, mode);
            g.mask_bounded = 1;
            const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
            world_settle(w);
            world_read(w, a, &stream);
            assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
            assert_int_equal(stream.last.cap_needed, 0);
            world_expect_rows(w, &stream, 40, &g, 30);
            uint32_t cut = 0;
            for (uint32_t i = 0; i < 30; i++) {
                const world_row *row = &stream.rows[i];
                cut += row->support_size > row->support_count;
                assert_true(row->support_count <= cap);
            }
            assert_int_equal(cut > 0, cap < 16);
            assert_int_equal(cut<30, cap> 1);
            world_expect_empty(w);
            world_destroy(w);
        }
    }
}

/* ---- epochs ---------------------------------------------------------------------------------- */

static void rows_say_the_epoch_of_whoever_drew_them(void **state) {
    (void)state;
    for (uint32_t mode = SAMPLER_MASK_OFF; mode <= SAMPLER_MASK_SUPPORT; mode++) {
        world *w = world_create(&(world_options){.weights_version = 8});
        world_welcome(w, &w->decode);
        w->options.weights_version = 7;
        world_welcome(w, &w->prefill);
        world_introduce(w);
        world_settle(w);
        const proto_generation g = world_generation(6, mode);
        const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
        world_settle(w);
        world_read(w, a, &stream);
        world_expect_rows(w, &stream, 40, &g, 6);
        for (uint32_t i = 0; i < 6; i++)
            assert_int_equal(stream.rows[i].weights_version, i == 0 ? 7 : 8);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* A row is of the epoch in which its step began, whatever holds when the step ends. */
static void a_step_draws_under_the_epoch_of_its_start(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.weights_version = 3});
    world_register(w);
    w->decode.is_compute_held = true;
    const proto_generation g = world_generation(4, SAMPLER_MASK_SELECTED);
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    assert_true(world_decode_view(w).is_step_running);
    w->decode.decode->member.session.record.weights_version = 4;
    w->decode.is_compute_held = false;
    world_settle(w);
    world_read(w, a, &stream);
    static const uint64_t versions[4] = {3, 3, 4, 4};
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(stream.rows[i].weights_version, versions[i]);
    /* The same of a prompt. */
    w->prefill.is_compute_held = true;
    const proto_attempt b = world_start(w, 20, &g, UINT64_MAX); /* in one chunk */
    world_settle(w);
    assert_true(world_prefill_view(w).is_step_running);
    w->prefill.prefill->member.session.record.weights_version = 9;
    w->prefill.is_compute_held = false;
    world_settle(w);
    world_read(w, b, &stream);
    assert_int_equal(stream.rows[0].weights_version, 3);
    assert_int_equal(stream.rows[1].weights_version, 4);
    world_expect_empty(w);
    world_destroy(w);
}

/* ---- overflow -------------------------------------------------------------------------------- */

enum { MANY = 12, ROWS = 20, CAP = 15 };

/* What one process draws of attempt i: rows, and the size of the support that ended them; 0: none
 * did. */
static uint32_t expect_rows(world *w, uint32_t prompt_tokens, const proto_generation *g,
                            uint32_t *cap_needed) {
    static int32_t ids[ROWS][WORLD_SUPPORT_MAX];
    static float logprobs[ROWS][WORLD_SUPPORT_MAX];
    sampler_row rows[ROWS];
    const sampler_params params = world_sampling(w, g);
    for (uint32_t r = 0; r < ROWS; r++)
        rows[r] = (sampler_row){.support_ids = ids[r], .support_logprobs = logprobs[r]};
    const uint32_t count =
        compute_sim_expect(&w->decode.sim, &params, w->prompt, prompt_tokens, ROWS, rows);
    const bool is_over = rows[count - 1].status == SAMPLER_OVERFLOW;
    *cap_needed = is_over ? rows[count - 1].cap_needed : 0;
    return is_over ? count - 1 : count;
}

/* Some overflow sooner or later, at prefill or at decode; the token of the overflow is not there,
 * and all others are what they are alone. */
static void an_overflow_leaves_its_neighbours_alone(void **state) {
    (void)state;
    world *w = world_create(&(world_options){
        .attempts_max = MANY, .sequences_max = MANY, .cap = CAP, .support_max = CAP + 1});
    world_register(w);
    proto_attempt attempts[MANY];
    proto_generation generations[MANY];
    for (uint32_t i = 0; i < MANY; i++) {
        generations[i] = world_generation(ROWS, 1 + i % 2);
        generations[i].seed = i;
        attempts[i] = world_start(w, 20 + i, &generations[i], UINT64_MAX);
    }
    world_settle(w);
    uint32_t overflown = 0;
    for (uint32_t i = 0; i < MANY; i++) {
        uint32_t cap_needed;
        const uint32_t rows = expect_rows(w, 20 + i, &generations[i], &cap_needed);
        world_read(w, attempts[i], &stream);
        if (rows == 0) { /* prefill told the router */
            assert_int_equal(stream.frames, 0);
            world_cancel(w, &w->decode, attempts[i]);
            continue;
        }
        world_expect_rows(w, &stream, 20 + i, &generations[i], rows);
        assert_true(stream.has_finish);
        assert_int_equal(stream.last.rows_total, rows);
        assert_int_equal(stream.last.cap_needed, cap_needed);
        assert_int_equal(stream.last.status,
                         cap_needed > 0 ? (int)BT_ERR_REQUEST_OVERFLOW : (int)BT_OK);
        overflown += cap_needed > 0;
    }
    assert_in_range(overflown, 3, MANY - 3);
    world_expect_empty(w);
    world_destroy(w);
}

/* Cancelled while the step computes whose row overflows: nothing is said of it any more. */
static void a_cancel_wins_over_an_overflow_of_the_same_step(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = CAP, .support_max = CAP + 1});
    world_register(w);
    proto_generation g = world_generation(ROWS, SAMPLER_MASK_SUPPORT);
    uint32_t cap_needed = 0, tokens = 20;
    while (expect_rows(w, tokens, &g, &cap_needed) != 1)
        assert_true(++tokens < WORLD_PROMPT_MAX);
    assert_true(cap_needed > 0);
    w->decode.is_compute_held = true;
    const proto_attempt a = world_start(w, tokens, &g, UINT64_MAX);
    proto_generation other = world_generation(ROWS, SAMPLER_MASK_OFF);
    const proto_attempt b = world_start(w, 41, &other, UINT64_MAX);
    world_settle(w);
    assert_int_equal(w->decode.decode->step.batch.sequences, 1); /* the one that will overflow */
    world_cancel(w, &w->decode, a);
    w->decode.is_compute_held = false;
    world_settle(w);
    assert_int_equal(w->decode.decode->step.rows[0].status, SAMPLER_OK); /* of b, later */
    world_read(w, a, &stream);
    assert_int_equal(stream.row_count, 1);
    assert_false(stream.has_finish);
    world_read(w, b, &stream);
    world_expect_rows(w, &stream, 41, &other, ROWS);
    world_expect_empty(w);
    world_destroy(w);
}

/* So does an abort, which leaves the rows before it. */
static void an_abort_wins_over_an_overflow_of_the_same_step(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = CAP, .support_max = CAP + 1});
    world_register(w);
    const proto_generation g = world_generation(ROWS, SAMPLER_MASK_SUPPORT);
    uint32_t cap_needed = 0, tokens = 20;
    while (expect_rows(w, tokens, &g, &cap_needed) != 1)
        assert_true(++tokens < WORLD_PROMPT_MAX);
    w->decode.is_compute_held = true;
    const proto_attempt a = world_start(w, tokens, &g, UINT64_MAX);
    world_settle(w);
    assert_int_equal(w->decode.decode->step.batch.sequences, 1);
    const proto_message abort = {.kind = PROTO_ABORT, .abort = {.attempt = a, .sample = 0}};
    world_say(w, &w->decode, PROTO_LANE_CONTROL, &abort);
    w->decode.is_compute_held = false;
    world_settle(w);
    assert_int_equal(w->decode.decode->step.rows[0].status, SAMPLER_OVERFLOW);
    world_read(w, a, &stream);
    assert_int_equal(stream.row_count, 1);
    assert_int_equal(stream.last.finish, PROTO_FINISH_ABORT);
    assert_int_equal(stream.last.status, BT_OK);
    assert_int_equal(stream.last.cap_needed, 0);
    assert_int_equal(stream.last.rows_total, 1);
    world_expect_empty(w);
    world_destroy(w);
}

/* A reader that takes nothing of the rows before an overflow hears of its own lateness alone: that
 * the support was too large is not how the request ended. */
static void an_overflow_that_nobody_reads_is_a_deadline(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = CAP, .support_max = CAP + 1});
    world_register(w);
    proto_generation g = world_generation(ROWS, SAMPLER_MASK_SUPPORT);
    uint32_t cap_needed = 0, tokens = 20;
    while (expect_rows(w, tokens, &g, &cap_needed) != 1)
        assert_true(++tokens < WORLD_PROMPT_MAX);
    const proto_attempt a = world_start(w, tokens, &g, 1);
    world_settle(w);
    assert_int_equal(world_decode_view(w).draining, 1);
    world_advance(w, 61 * 1000 * 1000);
    world_read(w, a, &stream);
    assert_int_equal(stream.last.status, BT_ERR_REQUEST_DEADLINE);
    assert_int_equal(stream.last.cap_needed, 0);
    assert_int_equal(stream.last.rows_total, 0);
    world_expect_empty(w);
    world_destroy(w);
}

/* The same at prefill, whose word it would have been. */
static void a_cancel_wins_over_an_overflow_at_prefill(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = 1, .support_max = 16});
    world_register(w);
    const proto_generation g = world_generation(ROWS, SAMPLER_MASK_SUPPORT);
    uint32_t cap_needed;
    assert_int_equal(expect_rows(w, 40, &g, &cap_needed), 0);
    w->prefill.is_compute_held = true;
    const proto_attempt a = world_start(w, 40, &g, UINT64_MAX);
    world_settle(w);
    assert_true(world_prefill_view(w).is_step_running);
    world_cancel(w, &w->prefill, a);
    world_cancel(w, &w->decode, a);
    w->prefill.is_compute_held = false;
    world_settle(w);
    proto_message done;
    assert_false(world_take(&w->prefill, PROTO_PREFILL_DONE, &done));
    world_read(w, a, &stream);
    assert_int_equal(stream.frames, 0);
    world_expect_empty(w);
    world_destroy(w);
}

/* And of a first row that says it, of a sample that is cancelled during the handoff. */
static void a_cancel_wins_over_an_overflow_in_a_first_row(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(10, 3);
    const uint32_t statuses[3] = {SAMPLER_OVERFLOW, SAMPLER_OVERFLOW, SAMPLER_OK};
    rig_attempt *a = rig_add(r, 40, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_say_words(r, a, UINT32_MAX);
    rig_cancel(r, a, 0);
    rig_deliver(r, a, statuses);
    rig_settle(r);
    rig_expect_silence(a, 0);
    rig_expect_error(r, a, 1, BT_ERR_REQUEST_OVERFLOW, "token 0 has 99");
    assert_int_equal(a->streams[1].last.cap_needed, 99);
    rig_expect_answer(r, a, 2);
    rig_destroy(r);
}

/* A sample that is cancelled during the handoff has no row, whatever prefill drew. */
static void a_cancelled_sample_takes_no_first_row(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(1, 3);
    rig_attempt *a = rig_add(r, 40, &g);
    assert_int_equal(rig_reserve(r, a, UINT64_MAX), BT_OK);
    rig_say_words(r, a, UINT32_MAX);
    rig_cancel(r, a, 1);
    rig_deliver(r, a, NULL);
    rig_settle(r);
    rig_expect_answer(r, a, 0);
    rig_expect_silence(a, 1);
    rig_expect_answer(r, a, 2);
    assert_int_equal(rig_view(r).tokens_total, 2);
    rig_destroy(r);
}

/* What is drawn fits the room that was made for it: both go by the vocabulary under a large cap. */
static void draws_have_the_room_of_a_row(void **state) {
    (void)state;
    world *w = world_create(&(world_options){.cap = WORLD_VOCAB + 1, .support_max = 16});
    world_register(w);
    const proto_generation g = world_generation(ROWS, SAMPLER_MASK_SUPPORT);
    const proto_attempt a = world_start(w, 20, &g, UINT64_MAX);
    world_settle(w);
    assert_int_equal(w->decode.decode->step.sampling[0].mask_max_tokens, WORLD_VOCAB);
    assert_int_equal(w->prefill.prefill->step.sampling[0].mask_max_tokens, WORLD_VOCAB);
    assert_int_equal(row_pool_cap(w->decode.decode->member.rows), WORLD_VOCAB);
    assert_int_equal(row_pool_cap(w->prefill.prefill->member.rows), WORLD_VOCAB);
    world_read(w, a, &stream);
    world_expect_rows(w, &stream, 20, &g, ROWS);
    world_expect_empty(w);
    world_destroy(w);
}

/* Memory of rows that lies idle goes back to the system. */
static void idle_blocks_are_given_back(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    const proto_generation g = rig_generation(20, 1);
    const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, a, 0);
    assert_true(bt_block_pool_idle_bytes(r->core->blocks) > 0);
    rig_advance(r, 3 * 1000 * 1000);
    assert_int_equal(bt_block_pool_idle_bytes(r->core->blocks), 0);
    rig_destroy(r);
}

/* ---- first rows that do not answer ----------------------------------------------------------- */

static int32_t ids[RIG_SUPPORT_MAX + 1];
static float logprobs[RIG_SUPPORT_MAX + 1];
static row_top top[RIG_TOP_MAX];

/* A copy of the arrays that a test may change; at least two entries. */
static void widen(metadata_row *row) {
    const uint32_t count = row->support_count;
    memcpy(ids, row->support_ids, count * sizeof *ids);
    memcpy(logprobs, row->support_logprobs, count * sizeof *logprobs);
    memcpy(top, row->top, row->top_count * sizeof *top);
    row->support_ids = ids;
    row->support_logprobs = logprobs;
    row->top = top;
    if (count > 1) return;
    ids[1] = ids[0] == 5 ? 6 : 5;
    logprobs[1] = -2.0f;
    row->support_count = row->cap_needed = 2;
}

static uint32_t find_drawn(const metadata_row *row) {
    uint32_t at = 0;
    while (ids[at] != row->first_token)
        at++;
    return at;
}

static void foreign_id(metadata_row *row) {
    widen(row);
    ids[1 - (find_drawn(row) == 1)] = RIG_VOCAB;
}
static void negative_id(metadata_row *row) {
    widen(row);
    ids[1 - (find_drawn(row) == 1)] = -1;
}
static void repeated_id(metadata_row *row) {
    widen(row);
    const uint32_t at = find_drawn(row);
    ids[1 - (at == 1)] = ids[at];
}
static void token_elsewhere(metadata_row *row) {
    widen(row);
    const uint32_t at = find_drawn(row);
    ids[at] = ids[at] == 0 ? 1 : 0;
}
static void token_outside(metadata_row *row) {
    row->first_token = RIG_VOCAB;
}
static void support_nan(metadata_row *row) {
    widen(row);
    logprobs[0] = NAN;
}
static void support_infinite(metadata_row *row) {
    widen(row);
    logprobs[1] = -INFINITY;
}
static void selected_elsewhere(metadata_row *row) {
    row->selected_logprob -= 1.0f;
}
static void selected_nan(metadata_row *row) {
    row->selected_logprob = NAN;
}
static void token_logprob_positive(metadata_row *row) {
    row->first_logprob = 1.0f;
}
static void no_token_logprob(metadata_row *row) {
    row->has_first_logprob = 0;
}
static void top_nan(metadata_row *row) {
    widen(row);
    top[1].logprob = NAN;
}
static void top_foreign(metadata_row *row) {
    widen(row);
    top[0].id = -4;
}
static void tops_too_few(metadata_row *row) {
    row->top_count--;
}
static void asked_too_few(metadata_row *row) {
    row->id_logprob_count = 0;
}
static void size_above_exact(metadata_row *row) {
    row->cap_needed++;
}
static void size_below(metadata_row *row) {
    row->cap_needed--;
}
static void no_support(metadata_row *row) {
    row->support_count = row->cap_needed = 0;
}
static void another_mode(metadata_row *row) {
    row->mask_mode = ROW_MASK_SELECTED;
    row->support_logprobs = NULL;
}
static void beyond_the_vocabulary(metadata_row *row) {
    widen(row);
    for (uint32_t i = row->support_count; i < RIG_SUPPORT_MAX; i++) {
        ids[i] = RIG_VOCAB - 1 - (int32_t)i;
        logprobs[i] = -5.0f;
    }
    row->support_count = RIG_SUPPORT_MAX;
    row->cap_needed = RIG_VOCAB + 1;
}
static void overflow_beyond_the_vocabulary(metadata_row *row) {
    if (row->sample_index == 0) return;
    *row = (metadata_row){.sample_index = row->sample_index,
                          .first_token = -1,
                          .status = SAMPLER_OVERFLOW,
                          .cap_needed = RIG_VOCAB + 1,
                          .mask_mode = row->mask_mode};
}

typedef struct lie {
    void (*change)(metadata_row *row);
    const char *name;
} lie;

/* Those that prove themselves, found against the request: each ends its own sample by name. */
static void first_rows_that_do_not_answer_are_named(void **state) {
    (void)state;
    static const lie lies[] = {
        {foreign_id, "a support id outside the vocabulary"},
        {negative_id, "a support id outside the vocabulary"},
        {repeated_id, "a support id that is there twice"},
        {token_elsewhere, "a drawn token that is not in its support"},
        {token_outside, "a token outside the vocabulary"},
        {support_nan, "a support log-probability that is none"},
        {support_infinite, "a support log-probability that is none"},
        {selected_elsewhere, "a selected log-probability that is not its entry's"},
        {selected_nan, "a selected log-probability that is none"},
        {token_logprob_positive, "a token log-probability that is none"},
        {no_token_logprob, "missing or not asked for"},
        {top_nan, "a top log-probability that is none"},
        {top_foreign, "a top token outside the vocabulary"},
        {tops_too_few, "another number of top log-probabilities"},
        {asked_too_few, "another number of asked log-probabilities"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(lies); i++) {
        rig *r = rig_create(NULL);
        proto_generation g = rig_generation(10, 1);
        g.top_logprobs = 2;
        g.logprob_id_count = 1;
        const rig_attempt *before = rig_start(r, 30, &g, UINT64_MAX);
        rig_settle(r);
        r->change = lies[i].change;
        const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
        rig_settle(r);
        rig_expect_answer(r, before, 0);
        rig_expect_error(r, a, 0, BT_ERR_REQUEST_CORRUPT, lies[i].name);
        assert_int_equal(a->streams[0].byte_count, 0);
        rig_destroy(r);
    }
}

/* Those that contradict themselves fail the handoff. */
static void first_rows_that_contradict_themselves_are_named(void **state) {
    (void)state;
    static const lie lies[] = {
        {size_above_exact, "cap needed"},
        {size_below, "cap needed"},
        {no_support, "support size"},
        {another_mode, "mask mode"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(lies); i++) {
        rig *r = rig_create(NULL);
        const proto_generation g = rig_generation(10, 1);
        r->change = lies[i].change;
        const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
        rig_settle(r);
        rig_expect_error(r, a, 0, BT_ERR_REQUEST_CORRUPT, lies[i].name);
        rig_destroy(r);
    }
}

static void no_support_is_larger_than_the_vocabulary(void **state) {
    (void)state;
    rig *r = rig_create(NULL);
    proto_generation g = rig_generation(10, 1);
    g.mask_bounded = 1;
    r->change = beyond_the_vocabulary;
    const rig_attempt *a = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    rig_expect_error(r, a, 0, BT_ERR_REQUEST_CORRUPT, "more than the vocabulary has");
    g = rig_generation(10, 2);
    r->change = overflow_beyond_the_vocabulary;
    const rig_attempt *b = rig_start(r, 40, &g, UINT64_MAX);
    rig_settle(r);
    rig_expect_answer(r, b, 0);
    rig_expect_error(r, b, 1, BT_ERR_REQUEST_CORRUPT, "more than the vocabulary has");
    rig_destroy(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounded_rows_equal_one_process),
        cmocka_unit_test(rows_say_the_epoch_of_whoever_drew_them),
        cmocka_unit_test(a_step_draws_under_the_epoch_of_its_start),
        cmocka_unit_test(an_overflow_leaves_its_neighbours_alone),
        cmocka_unit_test(a_cancel_wins_over_an_overflow_of_the_same_step),
        cmocka_unit_test(an_abort_wins_over_an_overflow_of_the_same_step),
        cmocka_unit_test(an_overflow_that_nobody_reads_is_a_deadline),
        cmocka_unit_test(a_cancel_wins_over_an_overflow_at_prefill),
        cmocka_unit_test(a_cancel_wins_over_an_overflow_in_a_first_row),
        cmocka_unit_test(a_cancelled_sample_takes_no_first_row),
        cmocka_unit_test(idle_blocks_are_given_back),
        cmocka_unit_test(draws_have_the_room_of_a_row),
        cmocka_unit_test(first_rows_that_do_not_answer_are_named),
        cmocka_unit_test(first_rows_that_contradict_themselves_are_named),
        cmocka_unit_test(no_support_is_larger_than_the_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
