/* Supports and the cap: what fits into it however it came about, what an overflow says, and rows
 * that are cut. */
#include "kernels/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"
#include "tests/kernels/sampler_fixture.h"

enum { CAP = 8, VOCAB = 30000 };

typedef struct table {
    sampler_workspace *workspace;
    sampler_result result;
    float *logits; /* [VOCAB] */
} table;

static int setup(void **state) {
    static table t;
    assert_int_equal(sampler_workspace_create(VOCAB, &t.workspace), BT_OK);
    t.result = sampler_result_create(CAP + 1);
    t.logits = bt_calloc(VOCAB, sizeof(float));
    assert_non_null(t.logits);
    *state = &t;
    return 0;
}

static int teardown(void **state) {
    table *t = *state;
    sampler_workspace_destroy(t->workspace);
    sampler_result_destroy(&t->result);
    bt_free(t->logits);
    return 0;
}

static const sampler_row *draw(table *t, const sampler_params *params, const float *logits,
                               uint32_t count, uint32_t position) {
    sampler_result_reset(&t->result);
    sampler_draw(t->workspace, params, logits, count, position, &t->result.row);
    return &t->result.row;
}

static sampler_params plain(void) {
    return (sampler_params){.temperature = 1.0F,
                            .top_p = 1.0F,
                            .mask_mode = SAMPLER_MASK_SUPPORT,
                            .mask_max_tokens = CAP,
                            .seed = 7};
}

/* Six ids far above all others. */
static void fill_six(table *t) {
    for (uint32_t i = 0; i < VOCAB; i++) {
        t->logits[i] = i % 5000 == 123 ? 10.0F + (float)(i / 5000) * 0.125F : -20.0F;
    }
}

static void what_fits_is_no_overflow(void **state) {
    table *t = *state;
    static const struct {
        uint32_t top_k;
        float top_p, min_p;
    } filters[] = {
        {0, 0.95F, 0.0F},    {0, 1.0F, 0.1F},       {0, 0.95F, 0.01F},        {VOCAB, 0.95F, 0.0F},
        {2 * CAP, 0.95F, 0}, {2 * CAP, 1.0F, 0.1F}, {1U << 30, 0.999F, 0.0F},
    };
    fill_six(t);
    for (size_t i = 0; i < 4 * BT_ARRAY_COUNT(filters); i++) {
        sampler_params params = plain();
        params.top_k = filters[i / 4].top_k;
        params.top_p = filters[i / 4].top_p;
        params.min_p = filters[i / 4].min_p;
        params.filter = i % 2;
        params.mask_bounded = i / 2 % 2;
        const sampler_row *row = draw(t, &params, t->logits, VOCAB, (uint32_t)i);
        assert_int_equal(row->status, SAMPLER_OK);
        assert_int_equal(row->support_count, 6);
        assert_int_equal(row->cap_needed, 6);
        double total = 0.0;
        for (uint32_t k = 0; k < 6; k++) {
            assert_int_equal(row->support_ids[k], (5 - k) * 5000 + 123);
            total += exp((double)row->support_logprobs[k]);
        }
        assert_true(fabs(total - 1.0) < 1e-5);
    }
}

static void an_overflow_says_the_true_size(void **state) {
    table *t = *state;
    static const struct {
        uint32_t top_k, limit;
        float top_p, min_p;
        uint32_t size;
    } cases[] = {
        {0, 0, 1.0F, 0.0F, VOCAB},         {VOCAB, 0, 1.0F, 0.0F, VOCAB},
        {1U << 30, 0, 1.0F, 0.0F, VOCAB},  {0, VOCAB - 1, 1.0F, 0.0F, VOCAB - 1},
        {0, CAP + 1, 1.0F, 0.0F, CAP + 1}, {0, 0, 1.0F, 1.0F, VOCAB},
        {CAP + 1, 0, 1.0F, 0.0F, CAP + 1}, {0, 0, 0.5F, 0.0F, VOCAB / 2},
    };
    for (uint32_t i = 0; i < VOCAB; i++) {
        t->logits[i] = 0.25F; /* one value: only `rank` cuts it */
    }
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        const bool is_joint = cases[i].size >= VOCAB - 1 || cases[i].limit != 0;
        sampler_params params = plain();
        params.top_k = cases[i].top_k;
        params.top_p = cases[i].top_p;
        params.min_p = cases[i].min_p;
        params.vocab_limit = cases[i].limit;
        params.filter = is_joint ? SAMPLER_FILTER_JOINT : SAMPLER_FILTER_RANK;
        const sampler_row *row = draw(t, &params, t->logits, VOCAB, 1);
        assert_int_equal(row->status, SAMPLER_OVERFLOW);
        assert_int_equal(row->token, -1);
        assert_int_equal(row->support_count, 0);
        assert_in_range(row->cap_needed, cases[i].size, cases[i].size + (params.top_p < 1.0F));
        assert_int_equal(row->support_ids[0], (int32_t)0xa5a5a5a5U); /* nothing is written */
        params.mask_max_tokens = 1;
        params.mask_bounded = 1;
        const uint32_t needed = row->cap_needed;
        row = draw(t, &params, t->logits, VOCAB, 1);
        assert_int_equal(row->status, SAMPLER_OK);
        assert_int_equal(row->cap_needed, needed);
    }
}

/* Weights 8, 4, 4, 2, 2, 2: every token is drawn at some position, and the row follows from it. */
static void the_drawn_token_takes_the_last_place(void **state) {
    table *t = *state;
    static const int32_t order[6] = {4, 1, 5, 0, 2, 3}; /* by weight, then id */
    static const uint32_t weights[6] = {8, 4, 4, 2, 2, 2};
    float logits[6];
    for (int i = 0; i < 6; i++) {
        logits[order[i]] = logf((float)weights[i]);
    }
    for (uint32_t cap = 1; cap <= 6; cap++) {
        for (uint32_t top_k = 0; top_k <= 6; top_k += 6) { /* columns by id, and by rank */
            uint32_t seen = 0;
            for (uint32_t position = 0; position < 200; position++) {
                sampler_params params = plain();
                params.top_k = top_k;
                params.mask_max_tokens = cap;
                params.mask_bounded = 1;
                const sampler_row *row = draw(t, &params, logits, 6, position);
                assert_int_equal(row->status, SAMPLER_OK);
                assert_int_equal(row->support_count, cap);
                assert_int_equal(row->cap_needed, 6);
                uint32_t drawn = 0;
                while (order[drawn] != row->token) {
                    drawn++;
                }
                seen |= 1U << drawn;
                for (uint32_t i = 0; i < cap; i++) {
                    const uint32_t from = i == cap - 1 && drawn > i ? drawn : i;
                    const double logprob = log((double)weights[from] / 22.0);
                    assert_int_equal(row->support_ids[i], order[from]);
                    assert_true(fabs((double)row->support_logprobs[i] - logprob) < 1e-6);
                    if (from != drawn) continue;
                    assert_int_equal(math_bits_f32(row->support_logprobs[i]),
                                     math_bits_f32(row->selected_logprob));
                }
                /* Nothing is written past the cap. */
                assert_int_equal(row->support_ids[cap], (int32_t)0xa5a5a5a5U);
            }
            assert_int_equal(seen, 63);
        }
    }
}

/* The mode changes nothing where the support fits, and the same ids come in selected mode. */
static void selected_mode_has_the_same_ids(void **state) {
    table *t = *state;
    for (uint32_t turn = 0; turn < 100; turn++) {
        int32_t ids[CAP];
        sampler_fill_logits(SAMPLER_LOGITS_NORMAL, turn, t->logits, 2000);
        sampler_params params = plain();
        params.top_p = 0.95F;
        params.mask_bounded = 1;
        params.seed = turn;
        const sampler_row *row = draw(t, &params, t->logits, 2000, turn);
        const uint32_t count = row->support_count;
        const float selected = row->selected_logprob;
        for (uint32_t i = 0; i < count; i++) {
            ids[i] = row->support_ids[i];
        }
        params.mask_mode = SAMPLER_MASK_SELECTED;
        row = draw(t, &params, t->logits, 2000, turn);
        assert_int_equal(row->support_count, count);
        assert_memory_equal(row->support_ids, ids, count * sizeof *ids);
        assert_int_equal(math_bits_f32(row->selected_logprob), math_bits_f32(selected));
        assert_int_equal(math_bits_f32(row->support_logprobs[0]), 0xa5a5a5a5U);
    }
}

/* Whatever is filtered, penalised or cut: what a trainer asserts holds without a tolerance. */
static void no_value_is_below_the_one_over_the_vocabulary(void **state) {
    table *t = *state;
    static const float temperatures[] = {1.0F, 0.7F, 1.9F, 0.05F};
    int32_t ids[1000];
    for (uint32_t i = 0; i < BT_ARRAY_COUNT(ids); i++) {
        ids[i] = (int32_t)i;
    }
    sampler_result wide = sampler_result_create(BT_ARRAY_COUNT(ids));
    for (uint32_t turn = 0; turn < 40U * SAMPLER_LOGITS_KINDS; turn++) {
        sampler_fill_logits((sampler_logits_kind)(turn % SAMPLER_LOGITS_KINDS), turn, t->logits,
                            BT_ARRAY_COUNT(ids));
        sampler_params params = plain();
        params.mask_max_tokens = turn % 3 == 0 ? CAP : BT_ARRAY_COUNT(ids);
        params.mask_bounded = 1;
        params.temperature = temperatures[turn % BT_ARRAY_COUNT(temperatures)];
        params.top_p = turn % 5 == 1 ? 0.99F : 1.0F;
        params.top_k = turn % 7 == 1 ? 1 : turn % 7 == 2 ? 990 : 0;
        params.wants_logprob = 1;
        params.logprob_id_count = BT_ARRAY_COUNT(ids);
        params.logprob_ids = ids;
        params.top_logprobs = 1;
        sampler_result_reset(&wide);
        const sampler_row *row = &wide.row;
        sampler_draw(t->workspace, &params, t->logits, BT_ARRAY_COUNT(ids), turn, &wide.row);
        assert_int_equal(row->status, SAMPLER_OK);
        assert_true(row->token_logprob <= row->selected_logprob);
        assert_true(row->token_logprob == row->id_logprobs[row->token]);
        assert_true(row->top[0].logprob == row->id_logprobs[row->top[0].id]);
        for (uint32_t i = 0; i < row->support_count; i++) {
            assert_true(row->id_logprobs[row->support_ids[i]] <= row->support_logprobs[i]);
        }
    }
    sampler_result_destroy(&wide);
}

static void greedy_rows_are_never_cut(void **state) {
    table *t = *state;
    const float logits[] = {1.0F, 3.0F, 3.0F, 2.0F};
    sampler_params params = plain();
    params.top_k = 1;
    params.mask_bounded = 1;
    params.mask_max_tokens = 1;
    const sampler_row *row = draw(t, &params, logits, 4, 0);
    assert_int_equal(row->token, 1);
    assert_int_equal(row->support_count, 1);
    assert_int_equal(row->cap_needed, 1);
    assert_int_equal(math_bits_f32(row->selected_logprob), 0);
}

static void the_mode_needs_a_mask(void **state) {
    (void)state;
    sampler_params params = plain();
    params.mask_bounded = 1;
    assert_true(sampler_params_are_valid(&params, 100));
    params.mask_bounded = 2;
    assert_false(sampler_params_are_valid(&params, 100));
    params.mask_bounded = 1;
    params.mask_mode = SAMPLER_MASK_OFF;
    assert_false(sampler_params_are_valid(&params, 100));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_fits_is_no_overflow),
        cmocka_unit_test(an_overflow_says_the_true_size),
        cmocka_unit_test(the_drawn_token_takes_the_last_place),
        cmocka_unit_test(selected_mode_has_the_same_ids),
        cmocka_unit_test(no_value_is_below_the_one_over_the_vocabulary),
        cmocka_unit_test(greedy_rows_are_never_cut),
        cmocka_unit_test(the_mode_needs_a_mask),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
