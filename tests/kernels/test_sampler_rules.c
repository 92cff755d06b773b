/* The parameters of a draw one by one: what each filter keeps at its boundaries, what is done to
 * logits first, which log-probabilities come back, and what is refused. */
#include "kernels/sampler.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"
#include "tests/kernels/sampler_fixture.h"

enum { CAPACITY = 64, VOCAB_MAX = 20000 };

typedef struct bench {
    sampler_workspace *workspace;
    sampler_result result;
    sampler_result other;
} bench;

static int setup(void **state) {
    static bench b;
    assert_int_equal(sampler_workspace_create(VOCAB_MAX, &b.workspace), BT_OK);
    b.result = sampler_result_create(CAPACITY);
    b.other = sampler_result_create(CAPACITY);
    *state = &b;
    return 0;
}

static int teardown(void **state) {
    bench *b = *state;
    sampler_workspace_destroy(b->workspace);
    sampler_result_destroy(&b->result);
    sampler_result_destroy(&b->other);
    return 0;
}

static const sampler_row *draw(bench *b, const sampler_params *params, const float *logits,
                               uint32_t count, uint32_t position) {
    sampler_result_reset(&b->result);
    sampler_draw(b->workspace, params, logits, count, position, &b->result.row);
    return &b->result.row;
}

static sampler_params plain(void) {
    return (sampler_params){.temperature = 1.0F,
                            .top_p = 1.0F,
                            .mask_mode = SAMPLER_MASK_SUPPORT,
                            .mask_max_tokens = CAPACITY,
                            .seed = 1234};
}

/* Logits of these probabilities: weights of powers of two are exact. */
static const struct {
    uint32_t count;
    float p[5];
    uint32_t top_k;
    float top_p, min_p;
    uint32_t joint, rank; /* sizes of the supports */
} boundaries[] = {
    {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 2, 1.0F, 0.0F, 3, 2},
    {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 2, 0.45F, 0.0F, 3, 2},
    {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 4, 1.0F, 0.0F, 5, 4},
    {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 100, 1.0F, 0.0F, 5, 5},
    {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 100, 0.81F, 0.0F, 5, 4},
    {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 0, 0.79F, 0.0F, 3, 3},
    {5, {0.4F, 0.2F, 0.2F, 0.1F, 0.1F}, 0, 0.59F, 0.0F, 3, 2},
    /* top_p exactly met: `rank` keeps the next one, `joint` does not. */
    {3, {0.5F, 0.25F, 0.25F}, 3, 0.5F, 0.0F, 1, 2},
    {3, {0.5F, 0.25F, 0.25F}, 0, 0.5F, 0.0F, 1, 2},
    {3, {0.5F, 0.25F, 0.25F}, 0, 0.4999999F, 0.0F, 1, 1},
    {3, {0.5F, 0.25F, 0.25F}, 0, 0.75F, 0.0F, 3, 3},
    {3, {0.5F, 0.25F, 0.25F}, 0, 0.5000001F, 0.0F, 3, 2},
    {4, {0.25F, 0.25F, 0.25F, 0.25F}, 0, 0.5F, 0.0F, 4, 3},
    {4, {0.25F, 0.25F, 0.25F, 0.25F}, 3, 0.1F, 0.0F, 4, 1},
    {4, {0.25F, 0.25F, 0.25F, 0.25F}, 1, 1.0F, 0.0F, 1, 1}, /* greedy */
    {4, {0.25F, 0.25F, 0.25F, 0.25F}, 1, 0.1F, 1.0F, 1, 1},
    {4, {0.4F, 0.3F, 0.2F, 0.1F}, 3, 1.0F, 0.6F, 2, 2},
    /* top_p of what top_k left: .30 of .79 passes .35, of 1 it does not. */
    {5, {0.30F, 0.25F, 0.24F, 0.11F, 0.10F}, 3, 0.35F, 0.0F, 2, 2},
    {5, {0.30F, 0.25F, 0.24F, 0.11F, 0.10F}, 3, 0.35F, 1e-6F, 1, 2},
    /* The mass of top_p's share counts what min_p takes away behind it. */
    {5, {0.30F, 0.25F, 0.24F, 0.11F, 0.10F}, 3, 0.69F, 0.9F, 1, 1},
    {5, {0.30F, 0.25F, 0.24F, 0.11F, 0.10F}, 3, 0.69F, 0.82F, 2, 2},
    {5, {0.30F, 0.25F, 0.24F, 0.11F, 0.10F}, 0, 0.54F, 0.1F, 2, 2},
    {5, {0.30F, 0.25F, 0.24F, 0.11F, 0.10F}, 0, 0.56F, 0.1F, 3, 3},
    /* min_p exactly met, and missed. */
    {3, {0.5F, 0.25F, 0.25F}, 0, 1.0F, 0.5F, 3, 3},
    {3, {0.5F, 0.25F, 0.25F}, 0, 1.0F, 0.50000006F, 1, 1},
    {3, {0.5F, 0.25F, 0.25F}, 2, 1.0F, 0.5F, 3, 2},
    {4, {0.3F, 0.3F, 0.2F, 0.2F}, 0, 1.0F, 1.0F, 2, 2},
    {4, {0.3F, 0.3F, 0.2F, 0.2F}, 0, 0.2F, 1.0F, 2, 1},
    {4, {0.3F, 0.3F, 0.2F, 0.2F}, 3, 0.7F, 1.0F, 2, 2},
};

static void filters_at_their_boundaries(void **state) {
    bench *b = *state;
    for (size_t i = 0; i < 2 * BT_ARRAY_COUNT(boundaries); i++) {
        const size_t at = i / 2;
        const bool is_rank = i % 2 == 1;
        float logits[5];
        for (uint32_t j = 0; j < boundaries[at].count; j++)
            logits[j] = logf(boundaries[at].p[j]);
        sampler_params params = plain();
        params.top_k = boundaries[at].top_k;
        params.top_p = boundaries[at].top_p;
        params.min_p = boundaries[at].min_p;
        params.filter = is_rank ? SAMPLER_FILTER_RANK : SAMPLER_FILTER_JOINT;
        const sampler_row *row = draw(b, &params, logits, boundaries[at].count, 0);
        const uint32_t wanted = is_rank ? boundaries[at].rank : boundaries[at].joint;
        if (row->support_count != wanted)
            print_message("boundary %zu, %s\n", at, is_rank ? "rank" : "joint");
        assert_int_equal(row->status, SAMPLER_OK);
        assert_int_equal(row->support_count, wanted);
        double total = 0.0;
        for (uint32_t j = 0; j < wanted; j++) {
            assert_int_equal(row->support_ids[j], j); /* of ties the lowest ids */
            total += (double)boundaries[at].p[j];
        }
        for (uint32_t j = 0; j < wanted; j++) {
            const double expected = log((double)boundaries[at].p[j] / total);
            assert_true(fabs((double)row->support_logprobs[j] - expected) < 1e-6);
        }
    }
}

/* Masks change no token, whatever filters. */
static void masks_and_filters_agree_on_the_token(void **state) {
    bench *b = *state;
    float logits[500];
    for (uint32_t turn = 0; turn < 600; turn++) {
        sampler_fill_logits(turn % 2 ? SAMPLER_LOGITS_BF16 : SAMPLER_LOGITS_NORMAL, turn, logits,
                            500);
        sampler_params params = plain();
        params.mask_max_tokens = 500;
        params.mask_mode = SAMPLER_MASK_OFF;
        params.filter = turn % 3 == 0 ? SAMPLER_FILTER_JOINT : SAMPLER_FILTER_RANK;
        params.top_k = turn % 4 == 0 ? 12 : 0;
        params.top_p = turn % 5 == 0 ? 0.8F : 1.0F;
        params.min_p = turn % 7 == 0 ? 0.05F : 0.0F;
        const int32_t token = draw(b, &params, logits, 500, turn)->token;
        assert_true(token >= 0);
        params.mask_mode = SAMPLER_MASK_SELECTED;
        int32_t ids[500];
        sampler_row row = {.support_ids = ids};
        sampler_draw(b->workspace, &params, logits, 500, turn, &row);
        assert_int_equal(row.token, token);
        if (params.top_k != 0) assert_true(params.filter == 0 || row.support_count <= 12);
    }
}

/* `rank` draws by the rank as soon as anything filters, `joint` only with a finite top_k. */
static void columns_follow_the_filter(void **state) {
    bench *b = *state;
    float logits[9];
    for (int i = 0; i < 9; i++)
        logits[i] = (float)i * 0.01F; /* rank 8 - id */
    uint32_t differ = 0;
    for (uint32_t position = 0; position < 100; position++) {
        sampler_params params = plain();
        params.top_k = 9;
        const int32_t by_rank = draw(b, &params, logits, 9, position)->token;
        params.top_k = 0;
        const int32_t by_id = draw(b, &params, logits, 9, position)->token;
        differ += by_rank != by_id;
        params.min_p = 1e-9F; /* keeps all */
        assert_int_equal(draw(b, &params, logits, 9, position)->token, by_id);
        params.filter = SAMPLER_FILTER_RANK;
        assert_int_equal(draw(b, &params, logits, 9, position)->token, by_rank);
        params.min_p = 0.0F;
        assert_int_equal(draw(b, &params, logits, 9, position)->token, by_id);
        params.top_p = 0.9999999F;
        assert_int_equal(draw(b, &params, logits, 9, position)->token, by_rank);
    }
    assert_true(differ > 10);
}

/* ---- what is done to logits ------------------------------------------------------------------ */

static const int32_t outputs[] = {0, 5, 0, 1, 0, 7};

/* The row of `params` over logits is the row without any of it over `processed`, to the bit. */
static void assert_processed(bench *b, const sampler_params *params, const float *logits,
                             const float *processed, uint32_t count) {
    float before[16];
    memcpy(before, logits, count * sizeof *logits);
    for (uint32_t position = 0; position < 20; position++) {
        sampler_params neutral = plain();
        neutral.wants_logprob = 1;
        neutral.top_logprobs = 8;
        neutral.vocab_limit = params->vocab_limit;
        sampler_params changed = *params;
        changed.wants_logprob = 1;
        changed.top_logprobs = 8;
        sampler_result_reset(&b->other);
        sampler_draw(b->workspace, &neutral, processed, count, position, &b->other.row);
        (void)draw(b, &changed, logits, count, position);
        sampler_result_assert_equal(&b->result, &b->other);
    }
    assert_memory_equal(before, logits, count * sizeof *logits);
}

static void penalties_in_their_order(void **state) {
    bench *b = *state;
    const float logits[8] = {2.0F, -2.0F, 1.0F, 0.5F, 3.0F, 0.75F, -0.0F, 0.0F};
    sampler_params params = plain();
    params.output_ids = outputs;
    params.output_count = BT_ARRAY_COUNT(outputs);
    params.frequency_penalty = 0.5F;
    const float frequent[8] = {0.5F, -2.5F, 1.0F, 0.5F, 3.0F, 0.25F, -0.0F, -0.5F};
    assert_processed(b, &params, logits, frequent, 8);
    params.presence_penalty = 0.25F;
    const float present[8] = {0.25F, -2.75F, 1.0F, 0.5F, 3.0F, 0.0F, -0.0F, -0.75F};
    assert_processed(b, &params, logits, present, 8);
    params.repetition_penalty = 2.0F;
    const float repeated[8] = {0.125F, -5.5F, 1.0F, 0.5F, 3.0F, 0.0F, -0.0F, -1.5F};
    assert_processed(b, &params, logits, repeated, 8);
    params.frequency_penalty = 0.0F;
    params.presence_penalty = 0.0F;
    const float alone[8] = {1.0F, -4.0F, 1.0F, 0.5F, 3.0F, 0.375F, -0.0F, 0.0F};
    assert_processed(b, &params, logits, alone, 8);
    params.presence_penalty = -2.0F;
    params.repetition_penalty = 1.0F;
    const float wanted[8] = {4.0F, 0.0F, 1.0F, 0.5F, 3.0F, 2.75F, -0.0F, 2.0F};
    assert_processed(b, &params, logits, wanted, 8);
    /* Outputs past the limit of the vocabulary count for nobody. */
    params.vocab_limit = 6;
    assert_processed(b, &params, logits, wanted, 8);
    params.output_count = 0;
    assert_processed(b, &params, logits, logits, 8);
}

static void the_product_of_the_frequency_is_fused(void **state) {
    bench *b = *state;
    int32_t many[3];
    const float logits[2] = {0.1F, 0.0F};
    for (int i = 0; i < 3; i++)
        many[i] = 0;
    sampler_params params = plain();
    params.output_ids = many;
    params.output_count = 3;
    params.frequency_penalty = 0.1F;
    const float fused[2] = {(float)((double)0.1F - 3.0 * (double)0.1F), 0.0F};
    const volatile float product = 3.0F * 0.1F;
    assert_true(fused[0] != 0.1F - product);
    assert_processed(b, &params, logits, fused, 2);
}

static void bans_and_biases(void **state) {
    bench *b = *state;
    const float logits[6] = {1.0F, 2.0F, 3.0F, 2.5F, math_nan_f32(), 0.0F};
    const int32_t banned[] = {2, 4, 2};
    const int32_t biased[] = {0, 2, 5, 0};
    const float biases[] = {2.0F, 100.0F, -1.0F, 0.25F};
    const float gone = -math_inf_f32();
    sampler_params params = plain();
    params.banned_ids = banned;
    params.banned_count = 3;
    const float processed[6] = {1.0F, 2.0F, gone, 2.5F, gone, 0.0F};
    assert_processed(b, &params, logits, processed, 6);
    params.bias_ids = biased;
    params.biases = biases;
    params.bias_count = 4;
    const float both[6] = {3.25F, 2.0F, gone, 2.5F, gone, -1.0F};
    assert_processed(b, &params, logits, both, 6);
    /* Penalties come before biases. */
    params.output_ids = outputs;
    params.output_count = 2;
    params.repetition_penalty = 0.5F;
    const float last[6] = {4.25F, 2.0F, gone, 2.5F, gone, -1.0F};
    assert_processed(b, &params, logits, last, 6);
    /* A bias of -inf bans, also beside another bias, at every temperature. */
    const int32_t ids[] = {1, 3, 3, 4};
    const float bans[] = {gone, 5.0F, gone, gone};
    params = plain();
    params.bias_ids = ids;
    params.biases = bans;
    params.bias_count = 4;
    const float left[6] = {1.0F, gone, 3.0F, gone, gone, 0.0F};
    assert_processed(b, &params, logits, left, 6);
    params.temperature = 1e37F;
    params.wants_logprob = 1;
    params.logprob_ids = ids;
    params.logprob_id_count = 2;
    assert_int_equal(draw(b, &params, logits, 6, 0)->status, SAMPLER_OK);
    assert_int_equal(b->result.row.support_count, 3);
    assert_true(b->result.row.id_logprobs[0] == gone && b->result.row.id_logprobs[1] == gone);
}

static void what_cannot_be_drawn_from_is_invalid(void **state) {
    bench *b = *state;
    const float logits[3] = {1.0F, 3e38F, -1.0F};
    const int32_t ids[] = {0, 1, 2};
    const float biases[] = {FLT_MAX, FLT_MAX, -FLT_MAX};
    for (uint32_t top_k = 0; top_k < 3; top_k++) {
        sampler_params params = plain();
        params.top_k = top_k;
        params.banned_ids = ids;
        params.banned_count = 3;
        assert_int_equal(draw(b, &params, logits, 3, 0)->status, SAMPLER_INVALID);
        assert_int_equal(b->result.row.token, -1);
        params.vocab_limit = 1;
        params.banned_count = 1;
        assert_int_equal(draw(b, &params, logits, 3, 0)->status, SAMPLER_INVALID);
        params.banned_count = 0;
        params.vocab_limit = 0;
        params.bias_ids = ids;
        params.biases = biases;
        params.bias_count = 1;
        assert_int_equal(draw(b, &params, logits, 3, 0)->status, SAMPLER_OK);
        assert_int_equal(b->result.row.token, 0);
        assert_int_equal(b->result.row.support_count, 1);
        params.bias_count = 2; /* 3e38 + FLT_MAX stays in range: two equal ones */
        assert_int_equal(draw(b, &params, logits, 3, 0)->status, SAMPLER_OK);
        assert_int_equal(b->result.row.support_count, top_k == 1 ? 1 : 2);
        params.bias_ids = ids + 2;
        params.biases = biases + 2;
        params.bias_count = 1;
        assert_int_equal(draw(b, &params, logits, 3, 0)->status, SAMPLER_OK);
        assert_int_equal(b->result.row.token, 1);
    }
}

/* What the router lets through can always be drawn from, and as the reference does it. */
static void penalties_and_biases_never_leave_the_range(void **state) {
    bench *b = *state;
    const float logits[4] = {1.0F, 30.0F, -1.0F, 0.0F};
    const int32_t ids[] = {0, 1, 2, 3};
    const float up[] = {FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX};
    const float down[] = {-FLT_MAX, -FLT_MAX, -FLT_MAX, -FLT_MAX};
    const float temperatures[] = {1e-6F, 0.7F, 1.0F, FLT_MAX};
    for (uint32_t turn = 0; turn < 4 * 3 * 3 * 2; turn++) {
        sampler_params params = plain();
        params.temperature = temperatures[turn % 4];
        params.repetition_penalty = turn / 4 % 3 == 0 ? 1.0F : turn / 4 % 3 == 1 ? 1e-45F : 2.0F;
        params.presence_penalty = params.repetition_penalty == 2.0F ? -2.0F : 0.0F;
        params.output_ids = ids;
        params.output_count = 1;
        params.bias_ids = ids;
        params.biases = turn / 12 % 3 == 1 ? up : down;
        params.bias_count = turn / 12 % 3 == 0 ? 0 : 4;
        params.wants_logprob = 1;
        params.top_k = turn / 36 == 0 ? 0 : 1;
        const sampler_row *row = draw(b, &params, logits, 4, 7);
        assert_int_equal(row->status, SAMPLER_OK);
        assert_true(row->token_logprob > -2.0F && row->token_logprob <= 0.0F);
        sampler_result_reset(&b->other);
        assert_int_equal(sampler_draw_ref(&params, logits, 4, 7, &b->other.row), BT_OK);
        assert_int_equal(b->other.row.token, row->token);
        assert_int_equal(math_bits_f32(b->other.row.token_logprob),
                         math_bits_f32(row->token_logprob));
    }
}

/* ---- log-probabilities ----------------------------------------------------------------------- */

static void top_and_chosen_logprobs(void **state) {
    bench *b = *state;
    const float logits[6] = {0.5F, 2.0F, -math_inf_f32(), 2.0F, 0.25F, 40.0F};
    const int32_t wanted[] = {5, 2, 4, 4};
    sampler_params params = plain();
    params.temperature = 0.5F;
    params.vocab_limit = 5;
    params.top_k = 1;
    params.wants_logprob = 1;
    params.top_logprobs = 100;
    params.logprob_ids = wanted;
    params.logprob_id_count = 4;
    const sampler_row *row = draw(b, &params, logits, 6, 0);
    const int32_t order[] = {1, 3, 0, 4, 2};
    const double total = 2.0 * exp(4.0) + exp(1.0) + exp(0.5);
    assert_int_equal(row->top_count, 5);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(row->top[i].id, order[i]);
        const double expected = 2.0 * (double)logits[order[i]] - log(total);
        if (i < 4) assert_true(fabs((double)row->top[i].logprob - expected) < 1e-6);
    }
    assert_true(row->top[4].logprob == -math_inf_f32());
    assert_true(row->id_logprobs[0] == -math_inf_f32());
    assert_true(row->id_logprobs[1] == -math_inf_f32());
    assert_int_equal(math_bits_f32(row->id_logprobs[2]), math_bits_f32(row->top[3].logprob));
    assert_int_equal(math_bits_f32(row->id_logprobs[3]), math_bits_f32(row->id_logprobs[2]));
    assert_int_equal(math_bits_f32(row->token_logprob), math_bits_f32(row->top[0].logprob));
    params.top_logprobs = 0;
    params.logprob_id_count = 0;
    row = draw(b, &params, logits, 6, 0);
    assert_int_equal(row->top_count, 0);
    assert_int_equal(row->top[0].id, (int32_t)0xa5a5a5a5U);
}

static void the_largest_are_found_in_any_order(void **state) {
    bench *b = *state;
    static float logits[3000];
    for (uint32_t turn = 0; turn < 6; turn++) {
        for (uint32_t i = 0; i < 3000; i++) {
            const float by_turn[] = {(float)i, (float)(3000 - i),        (float)(i % 7),
                                     0.0F,     (float)(i * 7919 % 3000), i % 2 == 0 ? 0.0F : -0.0F};
            logits[i] = by_turn[turn] * 0.01F;
        }
        sampler_params params = plain();
        params.top_k = 1;
        params.wants_logprob = 1;
        params.top_logprobs = 1 + turn * 25;
        const sampler_row *row = draw(b, &params, logits, 3000, 0);
        assert_int_equal(row->top_count, params.top_logprobs);
        for (uint32_t i = 1; i < row->top_count; i++) {
            const float before = logits[row->top[i - 1].id];
            const float here = logits[row->top[i].id];
            assert_true(before > here || (before == here && row->top[i - 1].id < row->top[i].id));
        }
        uint32_t above = 0;
        const float last = logits[row->top[row->top_count - 1].id];
        for (uint32_t i = 0; i < 3000; i++)
            above += logits[i] > last;
        assert_true(above < row->top_count);
    }
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void bad_parameters_are_refused(void **state) {
    (void)state;
    const int32_t good_ids[] = {0, 99}, too_large[] = {100}, negative[] = {-1};
    const float good_biases[] = {1.0F, -math_inf_f32()};
    const float bad_biases[] = {math_inf_f32(), math_nan_f32()};
    sampler_params good = plain();
    good.min_p = 1.0F;
    good.filter = SAMPLER_FILTER_RANK;
    good.frequency_penalty = -2.0F;
    good.presence_penalty = 2.0F;
    good.repetition_penalty = 2.0F;
    good.output_ids = good_ids;
    good.output_count = 2;
    good.banned_ids = good_ids;
    good.banned_count = 2;
    good.bias_ids = good_ids;
    good.biases = good_biases;
    good.bias_count = 2;
    good.wants_logprob = 1;
    good.top_logprobs = SAMPLER_TOP_MAX;
    good.logprob_ids = good_ids;
    good.logprob_id_count = 2;
    assert_true(sampler_params_are_valid(&good, 100));
    assert_false(sampler_params_are_valid(&good, 99));
    sampler_params bad;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        bad = good;                                                                                \
        change;                                                                                    \
        assert_false(sampler_params_are_valid(&bad, 100));                                         \
    } while (0)
    const float outside[] = {-0.01F, 1.01F, math_nan_f32(), math_inf_f32()};
    for (int i = 0; i < 4; i++) {
        REFUSED(bad.min_p = outside[i]);
        REFUSED(bad.frequency_penalty = outside[i] * 2.0F + (i == 0 ? -2.0F : 0.0F));
        REFUSED(bad.presence_penalty = outside[i] * 2.0F + (i == 0 ? -2.0F : 0.0F));
        REFUSED(bad.repetition_penalty = outside[i] * 2.0F);
        if (i < 2) REFUSED(bad.biases = &bad_biases[i]; bad.bias_count = 1);
    }
    REFUSED(bad.filter = 2);
    REFUSED(bad.output_ids = NULL);
    REFUSED(bad.output_ids = too_large; bad.output_count = 1);
    REFUSED(bad.banned_ids = negative; bad.banned_count = 1);
    REFUSED(bad.banned_ids = NULL);
    REFUSED(bad.bias_ids = too_large; bad.bias_count = 1);
    REFUSED(bad.bias_ids = NULL);
    REFUSED(bad.biases = NULL);
    REFUSED(bad.top_logprobs = SAMPLER_TOP_MAX + 1);
    REFUSED(bad.logprob_id_count = SAMPLER_IDS_MAX + 1);
    REFUSED(bad.logprob_ids = negative; bad.logprob_id_count = 1);
    REFUSED(bad.logprob_ids = NULL);
    REFUSED(bad.wants_logprob = 0);
#undef REFUSED
    /* Outputs are read with a penalty only. */
    bad = good;
    bad.frequency_penalty = bad.presence_penalty = 0.0F;
    bad.repetition_penalty = 1.0F;
    bad.output_ids = NULL;
    assert_true(sampler_params_are_valid(&bad, 100));
    float logits[100] = {0};
    sampler_row row = {0};
    assert_false(sampler_row_is_valid(&good, &row));
    /* Each array that is asked for must be there, and only those. */
    sampler_top top;
    int32_t ids;
    float number;
    const sampler_row whole = {
        .support_ids = &ids, .support_logprobs = &number, .top = &top, .id_logprobs = &number};
    assert_true(sampler_row_is_valid(&good, &whole));
    for (int i = 0; i < 4; i++) {
        sampler_row less = whole;
        sampler_params fewer = good;
        if (i == 0) less.support_ids = NULL;
        if (i == 1) less.support_logprobs = NULL;
        if (i == 2) less.top = NULL;
        if (i == 3) less.id_logprobs = NULL;
        assert_false(sampler_row_is_valid(&good, &less));
        if (i == 0) fewer.mask_mode = SAMPLER_MASK_OFF;
        if (i == 1) fewer.mask_mode = SAMPLER_MASK_SELECTED;
        if (i == 2) fewer.top_logprobs = 0;
        if (i == 3) fewer.logprob_id_count = 0;
        assert_true(sampler_row_is_valid(&fewer, &less));
    }
    assert_int_equal(sampler_draw_ref(&good, logits, 100, 0, &row), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(sampler_draw_ref(&good, logits, 99, 0, &row), BT_ERR_CALLER_ARGUMENT);
}

/* Only the code of masks is counted, and only once it is asked for. */
static void capture_time_is_counted_when_asked(void **state) {
    bench *b = *state;
    static float logits[VOCAB_MAX];
    static int32_t ids[VOCAB_MAX];
    static float logprobs[VOCAB_MAX];
    sampler_fill_logits(SAMPLER_LOGITS_NORMAL, 3, logits, VOCAB_MAX);
    sampler_row row = {.support_ids = ids, .support_logprobs = logprobs};
    sampler_params params = plain();
    params.mask_max_tokens = VOCAB_MAX;
    for (uint32_t top_k = 0; top_k < 2000; top_k += 1000) {
        params.top_k = top_k;
        params.mask_mode = SAMPLER_MASK_SUPPORT;
        sampler_draw(b->workspace, &params, logits, VOCAB_MAX, 0, &row);
        assert_int_equal(sampler_take_capture_ns(b->workspace), 0);
        sampler_time_capture(b->workspace, true);
        sampler_draw(b->workspace, &params, logits, VOCAB_MAX, 0, &row);
        assert_true(sampler_take_capture_ns(b->workspace) > 0);
        assert_int_equal(sampler_take_capture_ns(b->workspace), 0);
        params.mask_mode = SAMPLER_MASK_OFF;
        sampler_draw(b->workspace, &params, logits, VOCAB_MAX, 0, &row);
        assert_int_equal(sampler_take_capture_ns(b->workspace), 0);
        sampler_time_capture(b->workspace, false);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(filters_at_their_boundaries),
        cmocka_unit_test(masks_and_filters_agree_on_the_token),
        cmocka_unit_test(columns_follow_the_filter),
        cmocka_unit_test(penalties_in_their_order),
        cmocka_unit_test(the_product_of_the_frequency_is_fused),
        cmocka_unit_test(bans_and_biases),
        cmocka_unit_test(what_cannot_be_drawn_from_is_invalid),
        cmocka_unit_test(penalties_and_biases_never_leave_the_range),
        cmocka_unit_test(top_and_chosen_logprobs),
        cmocka_unit_test(the_largest_are_found_in_any_order),
        cmocka_unit_test(bad_parameters_are_refused),
        cmocka_unit_test(capture_time_is_counted_when_asked),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
