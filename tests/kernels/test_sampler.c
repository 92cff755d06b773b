/* What the sampler promises its clients: the known answers of hash and noise, the boundary table of
 * the joint rule, the shape of rows in both modes, and draws that follow the weights. */
#include "kernels/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"
#include "tests/kernels/sampler_fixture.h"

enum { CAPACITY = 64 };

typedef struct table {
    sampler_workspace *workspace;
    sampler_result result;
} table;

static int setup(void **state) {
    static table t;
    assert_int_equal(sampler_workspace_create(32768, &t.workspace), BT_OK);
    t.result = sampler_result_create(CAPACITY);
    *state = &t;
    return 0;
}

static int teardown(void **state) {
    table *t = *state;
    sampler_workspace_destroy(t->workspace);
    sampler_result_destroy(&t->result);
    return 0;
}

static const sampler_row *draw(table *t, const sampler_params *params, const float *logits,
                               uint32_t count, uint32_t position) {
    sampler_result_reset(&t->result);
    sampler_draw(t->workspace, params, logits, count, position, &t->result.row);
    return &t->result.row;
}

static sampler_params support_params(uint32_t top_k, float top_p) {
    return (sampler_params){
        .temperature = 1.0F,
        .top_p = top_p,
        .top_k = top_k,
        .mask_mode = SAMPLER_MASK_SUPPORT,
        .mask_max_tokens = CAPACITY,
        .seed = 1234,
    };
}

static const struct {
    uint64_t seed;
    uint32_t position, column, hash;
    double noise;
} known_answers[] = {
    {0, 0, 0, 0x8134cdf8U, 0.3801375633297289},
    {1234, 5, 0, 0xb99eb894U, 1.134832855200657},
    {1234, 5, 1, 0x5e2507cfU, -0.00034495122685268765},
    {1234, 5, 2, 0xe202db2bU, 2.082702211117792},
    {1234, 6, 0, 0xcf7ab6aeU, 1.5599545231665661},
    {(1ULL << 33) + 7, 100, 31999, 0x4365a91dU, -0.2886130990292883},
};

static void hash_and_noise_have_known_answers(void **state) {
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(known_answers); i++) {
        const uint32_t hash =
            sampler_hash(known_answers[i].seed, known_answers[i].position, known_answers[i].column);
        const double noise = sampler_noise(hash);
        assert_int_equal(hash, known_answers[i].hash);
        assert_true(fabs(noise - known_answers[i].noise) <= 1e-15 * fmax(1.0, fabs(noise)));
    }
}

static void noise_is_clamped_at_both_ends(void **state) {
    (void)state;
    /* log 0 is held at -DBL_MAX, and log 1 at -2^-32. */
    assert_true(fabs(sampler_noise(0) + 709.782712893384) < 1e-12);
    assert_true(fabs(sampler_noise(0xffffffffU) - 32.0 * 0.6931471805599453) < 1e-14);
    assert_true(sampler_noise(1) < sampler_noise(2));
    assert_true(sampler_noise(0xfffffffeU) <= sampler_noise(0xffffffffU));
}

/* Scores .6240, -1.2043, -.2199: column 0 wins. */
static void worked_example(void **state) {
    table *t = *state;
    const float logits[] = {logf(0.6F), logf(0.3F), logf(0.1F)};
    const sampler_params params = support_params(3, 1.0F);
    const sampler_row *row = draw(t, &params, logits, 3, 5);
    assert_int_equal(row->status, SAMPLER_OK);
    assert_int_equal(row->token, 0);
    const double scores[] = {0.6240, -1.2043, -0.2199};
    const double weights[] = {0.6F, 0.3F, 0.1F};
    for (uint32_t column = 0; column < 3; column++) {
        const double score =
            math_log_f64(weights[column]) + sampler_noise(sampler_hash(1234, 5, column));
        assert_true(fabs(score - scores[column]) < 5e-5);
    }
}

/* Logits that give weights of exactly these ratios where they are powers of two. */
static void boundary_table(void **state) {
    table *t = *state;
    const struct {
        uint32_t count;
        float p[5];
        uint32_t top_k;
        float top_p;
        uint32_t support;
    } cases[] = {
        {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 2, 1.0F, 3},
        {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 2, 0.45F, 3},
        {3, {0.5F, 0.25F, 0.25F}, 3, 0.5F, 1},
        {3, {0.5F, 0.25F, 0.25F}, 3, 0.50001F, 3},
        {4, {0.25F, 0.25F, 0.25F, 0.25F}, 1, 1.0F, 1}, /* greedy: the lowest id */
        {4, {0.25F, 0.25F, 0.25F, 0.25F}, 2, 0.1F, 4},
        {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 0, 1.0F, 5},
        {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 0, 0.79F, 3},
        {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 0, 0.81F, 5},
        {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 4, 0.81F, 5},
        {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 100, 1.0F, 5},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        float logits[5];
        for (uint32_t j = 0; j < cases[i].count; j++) {
            logits[j] = logf(cases[i].p[j]);
        }
        const sampler_params params = support_params(cases[i].top_k, cases[i].top_p);
        const sampler_row *row = draw(t, &params, logits, cases[i].count, 0);
        assert_int_equal(row->status, SAMPLER_OK);
        assert_int_equal(row->support_count, cases[i].support);
        assert_int_equal(row->cap_needed, cases[i].support);
        for (uint32_t j = 0; j < row->support_count; j++) {
            assert_int_equal(row->support_ids[j], j);
        }
    }
}

static void rows_are_sorted_by_weight_then_id(void **state) {
    table *t = *state;
    const float by_weight[] = {logf(0.1F), logf(0.6F), logf(0.01F), logf(0.29F)};
    const sampler_params three = support_params(3, 1.0F);
    const sampler_row *row = draw(t, &three, by_weight, 4, 0);
    const int32_t expected[] = {1, 3, 0};
    assert_int_equal(row->support_count, 3);
    assert_memory_equal(row->support_ids, expected, sizeof expected);

    float ties[30];
    for (int i = 0; i < 30; i++) {
        ties[i] = i % 3 == 1 ? 2.0F : 1.0F;
    }
    const sampler_params all = support_params(0, 1.0F);
    row = draw(t, &all, ties, 30, 0);
    assert_int_equal(row->support_count, 30);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(row->support_ids[i], 3 * i + 1);
    }
    for (int i = 10; i < 30; i++) {
        assert_int_equal(row->support_ids[i], (i - 10) / 2 * 3 + (i % 2 == 0 ? 0 : 2));
    }
}

static void greedy_is_a_singleton_of_probability_one(void **state) {
    table *t = *state;
    const float logits[] = {0.5F, 3.0F, 2.9999998F, 3.0F, -1.0F};
    for (uint32_t mode = 0; mode < 3; mode++) {
        sampler_params params = support_params(1, 1.0F);
        params.mask_mode = mode;
        params.wants_logprob = 1;
        const sampler_row *row = draw(t, &params, logits, 5, 9);
        const bool has_mask = mode != SAMPLER_MASK_OFF;
        assert_int_equal(row->status, SAMPLER_OK);
        assert_int_equal(row->token, 1);
        assert_int_equal(row->support_count, has_mask);
        assert_int_equal(row->cap_needed, has_mask);
        assert_int_equal(math_bits_f32(row->selected_logprob), 0);
        const double mass = exp(-2.5) + 3.0 + exp(-4.0); /* 2.9999998 is a hair below 3 */
        assert_true(fabs((double)row->token_logprob + log(mass)) < 1e-6);
        if (has_mask) assert_int_equal(row->support_ids[0], 1);
        if (mode == SAMPLER_MASK_SUPPORT) {
            assert_int_equal(math_bits_f32(row->support_logprobs[0]), 0);
        }
    }
}

static void logprobs_are_of_the_support_and_of_the_vocabulary(void **state) {
    table *t = *state;
    const float p[] = {0.4F, 0.3F, 0.2F, 0.1F};
    float logits[4];
    for (int i = 0; i < 4; i++) {
        logits[i] = logf(p[i]) * 0.5F; /* undone by the temperature */
    }
    for (uint32_t position = 0; position < 50; position++) {
        sampler_params params = support_params(2, 1.0F);
        params.temperature = 0.5F;
        params.wants_logprob = 1;
        const sampler_row *row = draw(t, &params, logits, 4, position);
        assert_true(row->token == 0 || row->token == 1);
        assert_true(fabs((double)row->support_logprobs[0] - log(0.4 / 0.7)) < 3e-7);
        assert_true(fabs((double)row->support_logprobs[1] - log(0.3 / 0.7)) < 3e-7);
        assert_int_equal(math_bits_f32(row->selected_logprob),
                         math_bits_f32(row->support_logprobs[row->token]));
        assert_true(fabs((double)row->token_logprob - log((double)p[row->token])) < 3e-7);
    }
}

static void half_and_half_is_the_float_log_of_one_half(void **state) {
    table *t = *state;
    const float logits[] = {7.0F, 7.0F};
    const sampler_params params = support_params(2, 1.0F);
    const sampler_row *row = draw(t, &params, logits, 2, 3);
    assert_int_equal(math_bits_f32(row->selected_logprob), 0xbf317218U);
}

static void supports_past_the_cap_overflow(void **state) {
    table *t = *state;
    float logits[40];
    for (int i = 0; i < 40; i++) {
        logits[i] = i < 20 ? 1.0F : 0.0F;
    }
    for (uint32_t cap = 19; cap <= 20; cap++) {
        sampler_params params = support_params(5, 1.0F); /* twenty ties for top_k 5 */
        params.mask_max_tokens = cap;
        const sampler_row *row = draw(t, &params, logits, 40, 0);
        const bool is_ok = cap == 20;
        assert_int_equal(row->status, is_ok ? SAMPLER_OK : SAMPLER_OVERFLOW);
        assert_int_equal(row->cap_needed, 20);
        assert_int_equal(row->support_count, is_ok ? 20 : 0);
        /* Nothing is written past the count. */
        assert_int_equal(row->support_ids[is_ok ? 20 : 0], (int32_t)0xa5a5a5a5U);
    }
    sampler_params params = support_params(5, 1.0F);
    params.mask_mode = SAMPLER_MASK_OFF;
    params.mask_max_tokens = 0;
    assert_int_equal(draw(t, &params, logits, 40, 0)->status, SAMPLER_OK);
}

static void masks_do_not_change_the_token(void **state) {
    table *t = *state;
    enum { VOCAB = 5000 };
    float *logits = bt_calloc(VOCAB, sizeof(float));
    assert_non_null(logits);
    for (uint32_t turn = 0; turn < 400; turn++) {
        const sampler_logits_kind kind =
            turn % 2 == 0 ? SAMPLER_LOGITS_NORMAL : SAMPLER_LOGITS_BF16;
        sampler_fill_logits(kind, turn, logits, VOCAB);
        sampler_params params = support_params(turn % 3 == 0 ? 0 : 2 + turn % 30, 0.3F);
        params.temperature = 0.4F;
        params.seed = turn;
        int32_t tokens[3];
        float selected[3];
        for (uint32_t mode = 0; mode < 3; mode++) {
            params.mask_mode = mode;
            const sampler_row *row = draw(t, &params, logits, VOCAB, turn);
            assert_int_equal(row->status, SAMPLER_OK);
            tokens[mode] = row->token;
            selected[mode] = row->selected_logprob;
        }
        assert_int_equal(tokens[0], tokens[1]);
        assert_int_equal(tokens[0], tokens[2]);
        assert_int_equal(math_bits_f32(selected[0]), 0);
        assert_int_equal(math_bits_f32(selected[1]), math_bits_f32(selected[2]));
    }
    bt_free(logits);
}

static void selected_is_the_entry_of_the_drawn_token(void **state) {
    table *t = *state;
    float logits[300];
    for (uint32_t turn = 0; turn < 500; turn++) {
        sampler_fill_logits(SAMPLER_LOGITS_NORMAL, turn, logits, 300);
        sampler_params params = support_params(turn % 4 == 0 ? 0 : 40, 0.7F);
        params.seed = turn;
        const sampler_row *row = draw(t, &params, logits, 300, 1);
        assert_int_equal(row->status, SAMPLER_OK);
        uint32_t found = 0;
        double total = 0.0;
        for (uint32_t i = 0; i < row->support_count; i++) {
            total += exp((double)row->support_logprobs[i]);
            if (row->support_ids[i] != row->token) continue;
            assert_int_equal(math_bits_f32(row->support_logprobs[i]),
                             math_bits_f32(row->selected_logprob));
            found++;
        }
        assert_int_equal(found, 1);
        assert_true(fabs(total - 1.0) < 1e-5);
    }
}

/* The rule itself, in long double, for rows without close calls. */
static void supports_satisfy_the_joint_rule(void **state) {
    table *t = *state;
    enum { VOCAB = 60 };
    uint32_t checked = 0;
    for (uint32_t turn = 0; turn < 300; turn++) {
        float logits[VOCAB];
        sampler_fill_logits(turn % 2 ? SAMPLER_LOGITS_BF16 : SAMPLER_LOGITS_NORMAL, turn, logits,
                            VOCAB);
        const sampler_params params =
            support_params(2 + turn % 40, 0.2F + (float)(turn % 70) / 90.0F);
        const sampler_row *row = draw(t, &params, logits, VOCAB, turn);
        long double total = 0;
        for (int i = 0; i < VOCAB; i++) {
            total += expl((long double)logits[i]);
        }
        uint32_t expected = 0;
        bool is_close = false;
        for (int i = 0; i < VOCAB; i++) {
            uint32_t greater = 0;
            long double mass = 0;
            for (int j = 0; j < VOCAB; j++) {
                if (!(logits[j] > logits[i])) continue;
                greater++;
                mass += expl((long double)logits[j]) / total;
            }
            is_close |= fabsl(mass - (long double)params.top_p) < 1e-5L;
            expected += greater < params.top_k && mass < (long double)params.top_p;
        }
        if (is_close) continue;
        checked++;
        assert_int_equal(row->support_count, expected);
    }
    assert_true(checked > 250);
}

/* Ids at or beyond the limit have weight 0: they are never drawn, listed or counted in the mass. */
static void ids_past_the_limit_do_not_exist(void **state) {
    table *t = *state;
    const float logits[] = {1.0F, 1.0F, 50.0F, math_nan_f32()};
    for (uint32_t top_k = 0; top_k < 3; top_k++) {
        sampler_params params = support_params(top_k, 1.0F);
        params.vocab_limit = 2;
        params.wants_logprob = 1;
        const sampler_row *row = draw(t, &params, logits, 4, 0);
        assert_int_equal(row->status, SAMPLER_OK);
        assert_true(row->token < 2);
        assert_int_equal(row->support_count, top_k == 1 ? 1 : 2);
        assert_int_equal(math_bits_f32(row->token_logprob), 0xbf317218U);
    }
}

/* The column is the rank with a finite top_k, and the token id without one. */
static void columns_are_ranks_or_ids(void **state) {
    table *t = *state;
    float logits[9];
    for (int i = 0; i < 9; i++) {
        logits[i] = (float)i * 0.01F; /* rank 8 - id */
    }
    bool differs = false;
    for (uint32_t position = 0; position < 200; position++) {
        uint32_t best[2] = {0, 0};
        double best_score[2] = {-INFINITY, -INFINITY};
        for (uint32_t column = 0; column < 9; column++) {
            const double noise = sampler_noise(sampler_hash(1234, position, column));
            const double weight_by_rank = -0.01 * (double)column;
            const double scores[2] = {weight_by_rank + noise, 0.01 * (double)column + noise};
            for (int i = 0; i < 2; i++) {
                if (scores[i] <= best_score[i]) continue;
                best_score[i] = scores[i];
                best[i] = i == 0 ? 8 - column : column;
            }
        }
        const sampler_params ranked = support_params(20, 1.0F);
        const sampler_params plain = support_params(0, 1.0F);
        assert_int_equal(draw(t, &ranked, logits, 9, position)->token, best[0]);
        assert_int_equal(draw(t, &plain, logits, 9, position)->token, best[1]);
        differs |= best[0] != best[1];
    }
    assert_true(differs);
}

/* Pearson's statistic of the draws against the weights, over fixed seeds: 5 degrees of freedom, and
 * 20.5 is the 0.999 quantile. */
static void check_draws_follow_weights(table *t, uint32_t top_k, bool is_over_seeds) {
    const double p[6] = {0.35, 0.25, 0.15, 0.12, 0.08, 0.05};
    enum { DRAWS = 20000 };
    float logits[6];
    uint32_t counts[6] = {0};
    for (int i = 0; i < 6; i++) {
        logits[i] = logf((float)p[5 - i]);
    }
    for (uint32_t i = 0; i < DRAWS; i++) {
        sampler_params params = support_params(top_k, 1.0F);
        params.mask_mode = SAMPLER_MASK_OFF;
        params.seed = is_over_seeds ? i : 99;
        const uint32_t position = is_over_seeds ? 12 : i;
        counts[draw(t, &params, logits, 6, position)->token]++;
    }
    double statistic = 0.0;
    for (int i = 0; i < 6; i++) {
        const double expected = p[5 - i] * DRAWS;
        statistic += ((double)counts[i] - expected) * ((double)counts[i] - expected) / expected;
    }
    assert_true(statistic < 20.5);
    assert_true(statistic > 0.0);
}

static void draws_follow_the_weights(void **state) {
    table *t = *state;
    check_draws_follow_weights(t, 0, true);
    check_draws_follow_weights(t, 0, false);
    check_draws_follow_weights(t, 6, true);
    check_draws_follow_weights(t, 6, false);
}

static void parameters_are_checked(void **state) {
    (void)state;
    const sampler_params good = support_params(4, 0.5F);
    assert_true(sampler_params_are_valid(&good, 1000));
    const float bad_temperatures[] = {0.0F, -1.0F, math_nan_f32(), math_inf_f32()};
    const float bad_top_ps[] = {0.0F, -0.5F, 1.0000001F, math_nan_f32()};
    for (int i = 0; i < 4; i++) {
        sampler_params bad = good;
        bad.temperature = bad_temperatures[i];
        assert_false(sampler_params_are_valid(&bad, 1000));
        bad = good;
        bad.top_p = bad_top_ps[i];
        assert_false(sampler_params_are_valid(&bad, 1000));
    }
    sampler_params bad = good;
    bad.mask_mode = 3;
    assert_false(sampler_params_are_valid(&bad, 1000));
    bad = good;
    bad.mask_max_tokens = 0;
    assert_false(sampler_params_are_valid(&bad, 1000));
    bad.mask_mode = SAMPLER_MASK_OFF;
    assert_true(sampler_params_are_valid(&bad, 1000));
}

/* Neighbours cannot matter when nothing but the row goes in; a used workspace must not either. */
static void a_used_workspace_changes_nothing(void **state) {
    table *t = *state;
    float logits[1000];
    float other[300];
    sampler_fill_logits(SAMPLER_LOGITS_NORMAL, 5, logits, 1000);
    sampler_fill_logits(SAMPLER_LOGITS_FLAT, 6, other, 300);
    const sampler_params params = support_params(30, 0.9F);
    sampler_workspace *fresh = NULL;
    assert_int_equal(sampler_workspace_create(1000, &fresh), BT_OK);
    sampler_result expected = sampler_result_create(CAPACITY);
    sampler_result_reset(&expected);
    sampler_draw(fresh, &params, logits, 1000, 8, &expected.row);
    const sampler_params others = support_params(0, 0.99F);
    for (uint32_t i = 1; i < 300; i += 13) {
        (void)draw(t, &others, other, i, 0);
        (void)draw(t, &params, logits, 1000, 8);
        sampler_result_assert_equal(&t->result, &expected);
    }
    sampler_result_destroy(&expected);
    sampler_workspace_destroy(fresh);
}

/* A joined row has the same numbers, its log-probabilities right behind its ids, and nothing behind
 * both; of the reference too. */
static void joined_rows_are_the_same_rows(void **state) {
    table *t = *state;
    static const struct {
        uint32_t top_k, mask_mode, mask_bounded;
    } cases[] = {{1, SAMPLER_MASK_SUPPORT, 0},    {2, SAMPLER_MASK_SUPPORT, 0},
                 {33, SAMPLER_MASK_SUPPORT, 0},   {CAPACITY, SAMPLER_MASK_SUPPORT, 0},
                 {500, SAMPLER_MASK_SUPPORT, 1},  {33, SAMPLER_MASK_SELECTED, 0},
                 {500, SAMPLER_MASK_SELECTED, 1}, {500, SAMPLER_MASK_SUPPORT, 0}};
    float logits[1000];
    sampler_fill_logits(SAMPLER_LOGITS_NORMAL, 5, logits, 1000);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sampler_params params = support_params(cases[i].top_k, 1.0F);
        params.mask_mode = cases[i].mask_mode;
        params.mask_bounded = cases[i].mask_bounded;
        const sampler_row *apart = draw(t, &params, logits, 1000, 8);
        for (int is_reference = 0; is_reference < 2; is_reference++) {
            int32_t joined[2 * CAPACITY + 1];
            for (size_t k = 0; k < 2 * CAPACITY + 1; k++)
                joined[k] = -7;
            sampler_row row = {.support_ids = joined, .is_joined = 1};
            if (is_reference != 0) {
                assert_int_equal(sampler_draw_ref(&params, logits, 1000, 8, &row), BT_OK);
            } else {
                sampler_draw(t->workspace, &params, logits, 1000, 8, &row);
            }
            const uint32_t count = apart->support_count;
            const bool has_both = count > 0 && params.mask_mode == SAMPLER_MASK_SUPPORT;
            assert_int_equal(row.status, apart->status);
            assert_int_equal(row.token, apart->token);
            assert_int_equal(row.support_count, count);
            assert_memory_equal(joined, apart->support_ids, count * sizeof(int32_t));
            if (has_both) {
                assert_ptr_equal(row.support_logprobs, joined + count);
                assert_memory_equal(joined + count, apart->support_logprobs, count * sizeof(float));
            }
            for (size_t k = has_both ? 2 * count : count; k < 2 * CAPACITY + 1; k++)
                assert_int_equal(joined[k], -7);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hash_and_noise_have_known_answers),
        cmocka_unit_test(noise_is_clamped_at_both_ends),
        cmocka_unit_test(worked_example),
        cmocka_unit_test(boundary_table),
        cmocka_unit_test(rows_are_sorted_by_weight_then_id),
        cmocka_unit_test(greedy_is_a_singleton_of_probability_one),
        cmocka_unit_test(logprobs_are_of_the_support_and_of_the_vocabulary),
        cmocka_unit_test(half_and_half_is_the_float_log_of_one_half),
        cmocka_unit_test(supports_past_the_cap_overflow),
        cmocka_unit_test(masks_do_not_change_the_token),
        cmocka_unit_test(selected_is_the_entry_of_the_drawn_token),
        cmocka_unit_test(supports_satisfy_the_joint_rule),
        cmocka_unit_test(ids_past_the_limit_do_not_exist),
        cmocka_unit_test(columns_are_ranks_or_ids),
        cmocka_unit_test(draws_follow_the_weights),
        cmocka_unit_test(parameters_are_checked),
        cmocka_unit_test(a_used_workspace_changes_nothing),
        cmocka_unit_test(joined_rows_are_the_same_rows),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
