#include "tests/kernels/sampler_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kernels/math.h"

static uint64_t next_random(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15U;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
}

double sampler_uniform(uint64_t *state) {
    return (double)(next_random(state) >> 11) * 0x1p-53;
}

double sampler_normal(uint64_t *state) {
    double sum = -6.0;
    for (int i = 0; i < 12; i++) {
        sum += sampler_uniform(state);
    }
    return sum;
}

sampler_result sampler_result_create(uint32_t capacity) {
    sampler_result result = {.capacity = capacity};
    result.row.support_ids = bt_calloc(capacity, sizeof(int32_t));
    result.row.support_logprobs = bt_calloc(capacity, sizeof(float));
    assert_non_null(result.row.support_ids);
    result.row.top = bt_calloc(SAMPLER_TOP_MAX, sizeof(sampler_top));
    result.row.id_logprobs = bt_calloc(SAMPLER_IDS_MAX, sizeof(float));
    assert_non_null(result.row.support_logprobs);
    assert_non_null(result.row.top);
    assert_non_null(result.row.id_logprobs);
    return result;
}

void sampler_result_destroy(sampler_result *result) {
    bt_free(result->row.support_ids);
    bt_free(result->row.support_logprobs);
    bt_free(result->row.top);
    bt_free(result->row.id_logprobs);
}

void sampler_result_reset(sampler_result *result) {
    sampler_row *row = &result->row;
    memset(row->support_ids, 0xa5, result->capacity * sizeof(int32_t));
    memset(row->support_logprobs, 0xa5, result->capacity * sizeof(float));
    memset(row->top, 0xa5, SAMPLER_TOP_MAX * sizeof(sampler_top));
    memset(row->id_logprobs, 0xa5, SAMPLER_IDS_MAX * sizeof(float));
    row->token = -77;
    row->status = 77;
    row->token_logprob = 77.0F;
    row->selected_logprob = 77.0F;
    row->support_count = 77;
    row->cap_needed = 77;
    row->top_count = 77;
}

void sampler_result_assert_equal(const sampler_result *a, const sampler_result *b) {
    const sampler_row *left = &a->row;
    const sampler_row *right = &b->row;
    assert_int_equal(left->status, right->status);
    assert_int_equal(left->token, right->token);
    assert_int_equal(math_bits_f32(left->token_logprob), math_bits_f32(right->token_logprob));
    assert_int_equal(math_bits_f32(left->selected_logprob), math_bits_f32(right->selected_logprob));
    assert_int_equal(left->support_count, right->support_count);
    assert_int_equal(left->cap_needed, right->cap_needed);
    assert_int_equal(a->capacity, b->capacity);
    assert_memory_equal(left->support_ids, right->support_ids, a->capacity * sizeof(int32_t));
    assert_memory_equal(left->support_logprobs, right->support_logprobs,
                        a->capacity * sizeof(float));
    assert_int_equal(left->top_count, right->top_count);
    assert_memory_equal(left->top, right->top, SAMPLER_TOP_MAX * sizeof(sampler_top));
    assert_memory_equal(left->id_logprobs, right->id_logprobs, SAMPLER_IDS_MAX * sizeof(float));
}

static float round_to_bf16(float x) {
    uint32_t bits = math_bits_f32(x);
    bits += 0x7fffU + (bits >> 16 & 1U);
    return math_from_bits_f32(bits & 0xffff0000U);
}

static float one_logit(sampler_logits_kind kind, uint64_t *state, size_t index, size_t special) {
    const float normal = (float)(sampler_normal(state) * 3.0 - 4.0);
    const double uniform = sampler_uniform(state);
    switch (kind) {
    case SAMPLER_LOGITS_NORMAL: return normal;
    case SAMPLER_LOGITS_BF16: return round_to_bf16(normal);
    case SAMPLER_LOGITS_LEVELS: return (float)(int)(uniform * 5.0);
    case SAMPLER_LOGITS_FLAT: return -1.25F;
    case SAMPLER_LOGITS_PEAKED: return index == special ? normal + 60.0F : normal;
    case SAMPLER_LOGITS_WIDE: return uniform < 0.01 ? -3e38F : (float)(uniform * 300.0 - 200.0);
    case SAMPLER_LOGITS_HOLES: return uniform < 0.75 ? -math_inf_f32() : normal;
    case SAMPLER_LOGITS_SINGLE: return index == special ? normal : -math_inf_f32();
    case SAMPLER_LOGITS_ZEROS: return uniform < 0.1 ? (uniform < 0.05 ? 0.0F : -0.0F) : -2.0F;
    case SAMPLER_LOGITS_KINDS: break;
    }
    fail();
    return 0.0F;
}

void sampler_fill_logits(sampler_logits_kind kind, uint64_t seed, float *logits, size_t count) {
    uint64_t state = seed * 0x2545f4914f6cdd1dU + (uint64_t)kind;
    const size_t special = (size_t)(sampler_uniform(&state) * (double)count);
    for (size_t i = 0; i < count; i++) {
        logits[i] = one_logit(kind, &state, i, special);
    }
}
