/* Rows of the sim device: widths as promised, numbers that fit together, ids that can be drawn, and
 * the same row whatever was asked before. */
#include "kernels/sim_rows.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"

enum { VOCAB = 5000, WIDTH_MAX = 5000, TOP = 40, IDS = 4 };

typedef struct full_row {
    sampler_row row;
    int32_t ids[WIDTH_MAX];
    float logprobs[WIDTH_MAX];
    sampler_top top[TOP];
    float id_logprobs[IDS];
} full_row;

static full_row got, other;

static sim_rows *make(uint32_t vocab_size, uint32_t width, uint64_t seed) {
    const sim_rows_options options = {.vocab_size = vocab_size, .width = width, .seed = seed};
    sim_rows *rows = NULL;
    assert_int_equal(sim_rows_create(&options, &rows), BT_OK);
    return rows;
}

static sampler_params support_params(void) {
    return (sampler_params){.temperature = 1.0F,
                            .top_p = 1.0F,
                            .mask_mode = SAMPLER_MASK_SUPPORT,
                            .mask_max_tokens = WIDTH_MAX};
}

/* As compute_sim does: a row that nothing was drawn into. */
static void draw(sim_rows *rows, const sampler_params *params, uint64_t hash, uint64_t seeded,
                 full_row *out) {
    memset(out, 0, sizeof *out);
    out->row = (sampler_row){.token = -1,
                             .status = SAMPLER_INVALID,
                             .support_ids = out->ids,
                             .support_logprobs = out->logprobs,
                             .top = out->top,
                             .id_logprobs = out->id_logprobs};
    sim_rows_draw(rows, params, hash, seeded, &out->row);
}

static void assert_same(const full_row *a, const full_row *b) {
    assert_int_equal(a->row.token, b->row.token);
    assert_int_equal(a->row.status, b->row.status);
    assert_int_equal(a->row.support_count, b->row.support_count);
    assert_memory_equal(&a->row.selected_logprob, &b->row.selected_logprob, sizeof(float));
    assert_memory_equal(&a->row.token_logprob, &b->row.token_logprob, sizeof(float));
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
    assert_memory_equal(a->top, b->top, sizeof a->top);
    assert_memory_equal(a->id_logprobs, b->id_logprobs, sizeof a->id_logprobs);
}

static uint32_t rank_of(const full_row *r, int32_t id) {
    for (uint32_t i = 0; i < r->row.support_count; i++)
        if (r->ids[i] == id) return i;
    fail_msg("id %d is not in the support", id);
    return 0;
}

/* The widths themselves are integers from integers: the counts are the same on every machine. */
static void realistic_widths_have_the_quantiles_promised(void **state) {
    (void)state;
    enum { DRAWS = 1 << 20 };
    static uint32_t counts[SIM_ROWS_REALISTIC_MAX + 1];
    sim_rows *rows = make(VOCAB, 0, 7);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        const uint32_t width = sim_rows_width(rows, sim_mix(7, i));
        assert_in_range(width, 1, SIM_ROWS_REALISTIC_MAX);
        counts[width]++;
        sum += width;
    }
    assert_int_equal(counts[1], 471056);
    assert_int_equal(counts[2], 157718);
    assert_int_equal(sum, 8374801); /* a mean of 7.99, where 7.96 is expected */
    uint64_t below = 0;
    uint32_t at_half = 0, at_99 = 0;
    for (uint32_t width = 1; width <= SIM_ROWS_REALISTIC_MAX; width++) {
        assert_true(counts[width] > 0);
        below += counts[width];
        if (at_half == 0 && below * 2 >= DRAWS) at_half = width;
        if (at_99 == 0 && below * 100 >= UINT64_C(99) * DRAWS) at_99 = width;
    }
    assert_int_equal(at_half, 2);
    assert_int_equal(at_99, 82);
    sim_rows_destroy(rows);
}

/* Sums to 1, falls strictly, the drawn entry is the selected one, none above its value over the
 * whole vocabulary, no id twice. */
static void assert_consistent(const full_row *r, uint32_t limit) {
    static uint8_t seen[VOCAB];
    memset(seen, 0, sizeof seen);
    double sum = 0.0;
    assert_int_equal(r->row.status, SAMPLER_OK);
    for (uint32_t i = 0; i < r->row.support_count; i++) {
        assert_in_range(r->ids[i], 0, limit - 1);
        assert_int_equal(seen[r->ids[i]]++, 0);
        sum += exp((double)r->logprobs[i]);
        if (i > 0) assert_true(r->logprobs[i] < r->logprobs[i - 1]);
        assert_true(r->logprobs[i] <= 0.0F);
    }
    assert_true(fabs(sum - 1.0) < 2e-6);
    const uint32_t rank = rank_of(r, r->row.token);
    assert_memory_equal(&r->row.selected_logprob, &r->logprobs[rank], sizeof(float));
    assert_true(r->row.token_logprob <= r->row.selected_logprob);
    for (uint32_t i = 0; i < r->row.top_count && i < r->row.support_count; i++) {
        assert_int_equal(r->top[i].id, r->ids[i]);
        assert_true(r->top[i].logprob <= r->logprobs[i]);
    }
}

static void numbers_of_a_row_fit_together(void **state) {
    (void)state;
    const uint32_t widths[] = {0, 1, 2, 20, 1000, VOCAB};
    const int32_t asked[IDS] = {0, 17, VOCAB - 1, VOCAB / 2};
    for (size_t w = 0; w < BT_ARRAY_COUNT(widths); w++) {
        sim_rows *rows = make(VOCAB, widths[w], 3);
        sampler_params params = support_params();
        params.wants_logprob = 1;
        params.top_logprobs = TOP;
        params.logprob_ids = asked;
        params.logprob_id_count = IDS;
        for (uint64_t i = 0; i < 200; i++) {
            const uint64_t hash = sim_mix(11, i);
            params.vocab_limit = i % 3 == 0 ? 0 : i % 3 == 1 ? VOCAB - 100 : 3 * VOCAB;
            const uint32_t limit = i % 3 == 1 ? VOCAB - 100 : VOCAB;
            params.top_k = i % 5 == 0 ? 7 : 0;
            draw(rows, &params, hash, sim_mix(hash, 5), &got);
            assert_consistent(&got, limit);
            uint32_t width = widths[w] != 0 ? widths[w] : sim_rows_width(rows, hash);
            if (width > limit) width = limit;
            if (i % 5 == 0 && width > 7) width = 7;
            assert_int_equal(got.row.support_count, width);
            assert_int_equal(got.row.cap_needed, width);
            assert_int_equal(got.row.top_count, TOP);
            if (width == 1) assert_memory_equal(&got.logprobs[0], &(float){0.0F}, sizeof(float));
            for (uint32_t j = 0; j < IDS; j++)
                assert_int_equal(isinf(got.id_logprobs[j]) != 0, (uint32_t)asked[j] >= limit);
        }
        sim_rows_destroy(rows);
    }
}

/* What top says of an id is what is said of it when it is asked for, banned ones or not; all of
 * the vocabulary together is 1. */
static void the_whole_vocabulary_is_one_distribution(void **state) {
    (void)state;
    enum { SMALL = 30 };
    const int32_t banned[] = {3, 29, 3, 7, 500};
    for (uint32_t banned_count = 0; banned_count <= BT_ARRAY_COUNT(banned); banned_count++) {
        sim_rows *rows = make(SMALL, 4, banned_count);
        int32_t all[SMALL];
        float logprobs[SMALL];
        for (int32_t i = 0; i < SMALL; i++)
            all[i] = i;
        sampler_params params = support_params();
        params.wants_logprob = 1;
        params.top_logprobs = SMALL;
        params.logprob_ids = all;
        params.logprob_id_count = SMALL;
        params.banned_ids = banned;
        params.banned_count = banned_count;
        got.row = (sampler_row){.support_ids = got.ids,
                                .support_logprobs = got.logprobs,
                                .top = got.top,
                                .id_logprobs = logprobs};
        sim_rows_draw(rows, &params, 99, 1, &got.row);
        double sum = 0.0;
        for (uint32_t i = 0; i < got.row.top_count; i++) {
            const int32_t id = got.top[i].id;
            assert_memory_equal(&got.top[i].logprob, &logprobs[id], sizeof(float));
            sum += exp((double)got.top[i].logprob);
        }
        assert_true(fabs(sum - 1.0) < 2e-6);
        const uint32_t left = banned_count == 0   ? SMALL
                              : banned_count == 1 ? SMALL - 1
                              : banned_count < 4  ? SMALL - 2
                                                  : SMALL - 3;
        assert_int_equal(got.row.top_count, left);
        for (uint32_t i = 0; i < banned_count && i < 4; i++)
            assert_true(isinf(logprobs[banned[i]]) && logprobs[banned[i]] < 0.0F);
        sim_rows_destroy(rows);
    }
}

static void banned_ids_are_never_drawn(void **state) {
    (void)state;
    enum { SMALL = 60 };
    sim_rows *rows = make(SMALL, 8, 5);
    int32_t banned[SMALL];
    for (int32_t i = 0; i < SMALL; i++)
        banned[i] = (i * 7 + 2) % SMALL;
    sampler_params params = support_params();
    params.banned_ids = banned;
    params.wants_logprob = 1;
    for (uint32_t count = 0; count < SMALL; count++) {
        params.banned_count = count;
        for (uint64_t i = 0; i < 20; i++) {
            draw(rows, &params, sim_mix(count, i), i, &got);
            assert_consistent(&got, SMALL);
            assert_int_equal(got.row.support_count, SMALL - count < 8 ? SMALL - count : 8);
            for (uint32_t j = 0; j < got.row.support_count; j++)
                for (uint32_t b = 0; b < count; b++)
                    assert_int_not_equal(got.ids[j], banned[b]);
        }
    }
    params.banned_count = SMALL;
    draw(rows, &params, 1, 1, &got);
    assert_int_equal(got.row.status, SAMPLER_INVALID);
    assert_int_equal(got.row.token, -1);
    /* A bias of -inf bans as well, any other does not; bans are of one row alone. */
    float biases[SMALL];
    for (int32_t i = 0; i < SMALL; i++)
        biases[i] = i % 2 == 0 ? -INFINITY : 3.0F;
    params.banned_count = 5;
    params.bias_ids = banned;
    params.biases = biases;
    params.bias_count = SMALL;
    draw(rows, &params, 1, 1, &got);
    assert_consistent(&got, SMALL);
    for (uint32_t j = 0; j < got.row.support_count; j++)
        for (uint32_t b = 0; b < SMALL; b++)
            assert_false(got.ids[j] == banned[b] && (b < 5 || b % 2 == 0));
    params.banned_count = 0;
    for (int32_t i = 0; i < SMALL; i++)
        biases[i] = i % 2 == 0 ? -100.0F : 3.0F;
    draw(rows, &params, 1, 1, &other);
    params.bias_count = 0;
    draw(rows, &params, 1, 1, &got);
    assert_same(&got, &other);
    sim_rows *fresh = make(SMALL, 8, 5);
    draw(fresh, &params, 1, 1, &other);
    assert_same(&got, &other);
    sim_rows_destroy(fresh);
    sim_rows_destroy(rows);
}

/* The limit of another request between two, another mask mode, and a table made anew. */
static void rows_depend_on_their_arguments_alone(void **state) {
    (void)state;
    sim_rows *rows = make(VOCAB, 100, 9);
    sim_rows *again = make(VOCAB, 100, 9);
    sim_rows *reseeded = make(VOCAB, 100, 10);
    sampler_params params = support_params();
    sampler_params limited = params;
    params.wants_logprob = 1;
    limited.vocab_limit = 1234;
    draw(rows, &params, 21, 22, &got);
    draw(rows, &limited, 21, 22, &other);
    draw(rows, &params, 21, 22, &other);
    assert_same(&got, &other);
    draw(again, &limited, 23, 22, &other);
    draw(again, &params, 21, 22, &other);
    assert_same(&got, &other);
    draw(reseeded, &params, 21, 22, &other);
    assert_memory_not_equal(got.ids, other.ids, 100 * sizeof got.ids[0]);
    assert_memory_not_equal(got.logprobs, other.logprobs, 100 * sizeof got.logprobs[0]);

    params.mask_mode = SAMPLER_MASK_SELECTED;
    draw(rows, &params, 21, 22, &other);
    assert_int_equal(other.row.token, got.row.token);
    assert_memory_equal(&other.row.selected_logprob, &got.row.selected_logprob, sizeof(float));
    assert_memory_equal(other.ids, got.ids, sizeof got.ids);
    assert_int_equal(other.logprobs[0], 0);
    params.mask_mode = SAMPLER_MASK_OFF;
    draw(rows, &params, 21, 22, &other);
    assert_int_equal(other.row.token, got.row.token);
    assert_memory_equal(&other.row.token_logprob, &got.row.token_logprob, sizeof(float));
    assert_int_equal(other.row.support_count, 0);
    assert_int_equal(other.row.cap_needed, 0);
    sim_rows_destroy(rows);
    sim_rows_destroy(again);
    sim_rows_destroy(reseeded);
}

/* Drawn as often as the log-probabilities say. */
static void draws_follow_the_weights(void **state) {
    (void)state;
    enum { WIDTH = 6, DRAWS = 60000 };
    sim_rows *rows = make(VOCAB, WIDTH, 4);
    sampler_params params = support_params();
    uint32_t counts[WIDTH] = {0};
    for (uint64_t i = 0; i < DRAWS; i++) {
        draw(rows, &params, 5, sim_mix(5, i), &got);
        counts[rank_of(&got, got.row.token)]++;
    }
    for (uint32_t i = 0; i < WIDTH; i++) {
        const double expected = DRAWS * exp((double)got.logprobs[i]);
        assert_true(fabs(counts[i] - expected) < 5.0 * sqrt(expected));
    }
    sim_rows_destroy(rows);
}

static void a_support_above_the_cap_overflows(void **state) {
    (void)state;
    sim_rows *rows = make(VOCAB, 100, 9);
    sampler_params params = support_params();
    params.mask_max_tokens = 99;
    draw(rows, &params, 21, 22, &got);
    assert_int_equal(got.row.status, SAMPLER_OVERFLOW);
    assert_int_equal(got.row.token, -1);
    assert_int_equal(got.row.cap_needed, 100);
    params.top_k = 99;
    draw(rows, &params, 21, 22, &got);
    assert_int_equal(got.row.status, SAMPLER_OK);
    sim_rows_destroy(rows);
}

/* The same draw and the same values as with room for all; the last entry is the drawn one's if need
 * be. */
static void a_bounded_row_keeps_the_heaviest_and_the_drawn(void **state) {
    (void)state;
    enum { WIDTH = 30 };
    sim_rows *rows = make(VOCAB, WIDTH, 9);
    const uint32_t caps[] = {1, 2, 29, 30, 31};
    uint32_t replaced = 0;
    for (size_t c = 0; c < BT_ARRAY_COUNT(caps); c++) {
        const uint32_t kept = caps[c] < WIDTH ? caps[c] : WIDTH;
        for (uint64_t i = 0; i < 100; i++) {
            sampler_params params = support_params();
            draw(rows, &params, sim_mix(1, i), sim_mix(2, i), &got);
            params.mask_bounded = 1;
            params.mask_max_tokens = caps[c];
            draw(rows, &params, sim_mix(1, i), sim_mix(2, i), &other);
            assert_int_equal(other.row.status, SAMPLER_OK);
            assert_int_equal(other.row.token, got.row.token);
            assert_int_equal(other.row.support_count, kept);
            assert_int_equal(other.row.cap_needed, WIDTH);
            assert_memory_equal(&other.row.selected_logprob, &got.row.selected_logprob,
                                sizeof(float));
            const uint32_t rank = rank_of(&got, got.row.token);
            assert_int_equal(rank_of(&other, got.row.token), rank < kept ? rank : kept - 1);
            const bool is_replaced = rank >= kept;
            const size_t same = kept - is_replaced;
            assert_memory_equal(other.ids, got.ids, same * sizeof got.ids[0]);
            assert_memory_equal(other.logprobs, got.logprobs, same * sizeof got.logprobs[0]);
            if (is_replaced)
                assert_memory_equal(&other.logprobs[same], &got.logprobs[rank], sizeof(float));
            replaced += is_replaced;
        }
    }
    assert_in_range(replaced, 150, 250);
    sim_rows_destroy(rows);
}

/* The value of a prompt's token is the one that drawing it would have had. */
static void scores_are_those_of_the_same_place(void **state) {
    (void)state;
    sim_rows *rows = make(VOCAB, 10, 2);
    const int32_t asked[] = {5, VOCAB - 1};
    sampler_params params = support_params();
    params.wants_logprob = 1;
    params.top_logprobs = TOP;
    params.logprob_ids = asked;
    params.logprob_id_count = 2;
    draw(rows, &params, 77, 78, &got);
    const sampler_scoring scoring = {
        .target = got.row.token, .top_count = TOP, .ids = asked, .id_count = 2};
    float target = 0.0F, ids[2] = {0};
    sampler_top top[TOP];
    sim_rows_score(rows, &scoring, 77, &target, top, ids);
    assert_memory_equal(&target, &got.row.token_logprob, sizeof target);
    assert_memory_equal(top, got.top, sizeof top);
    assert_memory_equal(ids, got.id_logprobs, sizeof ids);
    const sampler_scoring limited = {.target = VOCAB - 1, .vocab_limit = 3, .top_count = 5};
    sim_rows_score(rows, &limited, 77, &target, top, NULL);
    assert_true(isinf(target) && target < 0.0F);
    assert_in_range(top[2].id, 0, 2);
    assert_int_equal(top[3].id, -1);
    sim_rows_destroy(rows);
}

/* Log-probabilities right behind the ids, where the row asks for it. */
static void joined_rows_are_the_same_rows(void **state) {
    (void)state;
    static int32_t joined[2 * WIDTH_MAX];
    sim_rows *rows = make(VOCAB, 100, 1);
    sampler_params params = support_params();
    for (uint64_t i = 1; i < 50; i++) {
        params.mask_max_tokens = i % 2 == 0 ? WIDTH_MAX : 7;
        params.mask_bounded = 1;
        draw(rows, &params, i, i * 31, &got);
        sampler_row row = {.token = -1, .support_ids = joined, .is_joined = 1};
        sim_rows_draw(rows, &params, i, i * 31, &row);
        const uint32_t count = got.row.support_count;
        assert_true(count > 0);
        assert_int_equal(row.support_count, count);
        assert_ptr_equal(row.support_logprobs, joined + count);
        assert_memory_equal(joined, got.ids, count * sizeof(int32_t));
        assert_memory_equal(joined + count, got.logprobs, count * sizeof(float));
    }
    sim_rows_destroy(rows);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(realistic_widths_have_the_quantiles_promised),
        cmocka_unit_test(numbers_of_a_row_fit_together),
        cmocka_unit_test(the_whole_vocabulary_is_one_distribution),
        cmocka_unit_test(banned_ids_are_never_drawn),
        cmocka_unit_test(rows_depend_on_their_arguments_alone),
        cmocka_unit_test(draws_follow_the_weights),
        cmocka_unit_test(a_support_above_the_cap_overflows),
        cmocka_unit_test(a_bounded_row_keeps_the_heaviest_and_the_drawn),
        cmocka_unit_test(scores_are_those_of_the_same_place),
        cmocka_unit_test(joined_rows_are_the_same_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
