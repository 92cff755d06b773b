/* What parameters and rows must be before a draw, and what parameters do to the logits. */
#include <float.h>
#include <math.h>

#include "kernels/sampler_internal.h"

/* NaN is outside. */
static bool is_in(float value, float low, float high) {
    return value >= low && value <= high;
}

static bool are_ids(const int32_t *ids, uint32_t count, uint32_t vocab_size) {
    if (count > 0 && ids == NULL) return false;
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab_size) return false;
    }
    return true;
}

static bool are_biases(const sampler_params *params) {
    if (params->bias_count > 0 && params->biases == NULL) return false;
    for (uint32_t i = 0; i < params->bias_count; i++) {
        if (!is_in(params->biases[i], -math_inf_f32(), FLT_MAX)) return false;
    }
    return true;
}

static bool has_repetition(const sampler_params *params) {
    return params->repetition_penalty != 0.0F && params->repetition_penalty != 1.0F;
}

static bool has_penalty(const sampler_params *params) {
    return params->frequency_penalty != 0.0F || params->presence_penalty != 0.0F ||
           has_repetition(params);
}

static bool are_logprobs(const sampler_params *params, uint32_t vocab_size) {
    if (params->top_logprobs > SAMPLER_TOP_MAX || params->logprob_id_count > SAMPLER_IDS_MAX)
        return false;
    const bool is_wanted = params->top_logprobs > 0 || params->logprob_id_count > 0;
    if (is_wanted && params->wants_logprob == 0) return false;
    return are_ids(params->logprob_ids, params->logprob_id_count, vocab_size);
}

bool sampler_params_are_valid(const sampler_params *params, uint32_t vocab_size) {
    if (!(params->temperature > 0.0F && params->temperature < math_inf_f32())) return false;
    if (!(params->top_p > 0.0F && params->top_p <= 1.0F)) return false;
    if (params->mask_mode > SAMPLER_MASK_SUPPORT) return false;
    if (params->mask_mode != SAMPLER_MASK_OFF && params->mask_max_tokens == 0) return false;
    if (params->mask_bounded > (params->mask_mode != SAMPLER_MASK_OFF ? 1U : 0U)) return false;
    if (params->filter > SAMPLER_FILTER_RANK || !is_in(params->min_p, 0.0F, 1.0F)) return false;
    if (!is_in(params->frequency_penalty, -2.0F, 2.0F)) return false;
    if (!is_in(params->presence_penalty, -2.0F, 2.0F)) return false;
    if (!is_in(params->repetition_penalty, 0.0F, 2.0F)) return false;
    if (has_penalty(params) && !are_ids(params->output_ids, params->output_count, vocab_size))
        return false;
    return are_ids(params->banned_ids, params->banned_count, vocab_size) &&
           are_ids(params->bias_ids, params->bias_count, vocab_size) && are_biases(params) &&
           are_logprobs(params, vocab_size);
}

bool sampler_row_is_valid(const sampler_params *params, const sampler_row *row) {
    if (params->mask_mode != SAMPLER_MASK_OFF && row->support_ids == NULL) return false;
    if (params->mask_mode == SAMPLER_MASK_SUPPORT && row->support_logprobs == NULL &&
        row->is_joined == 0)
        return false;
    if (params->top_logprobs > 0 && row->top == NULL) return false;
    return params->logprob_id_count == 0 || row->id_logprobs != NULL;
}

/* What a penalty or a bias made of x, kept so that x / temperature is a number. */
static float bound(const sampler_params *params, float x) {
    const float t = params->temperature;
    const float limit = t < 1.0F ? 0x1p127F * t : FLT_MAX;
    if (x > limit) return limit;
    return x < -limit ? -limit : x;
}

static bool is_finite(float x) {
    return is_in(x, -FLT_MAX, FLT_MAX);
}

static float penalise(const sampler_params *params, float x, uint32_t count) {
    if (params->frequency_penalty != 0.0F) x = fmaf(-params->frequency_penalty, (float)count, x);
    if (params->presence_penalty != 0.0F) x -= params->presence_penalty;
    if (has_repetition(params))
        x = x > 0.0F ? x / params->repetition_penalty : x * params->repetition_penalty;
    return bound(params, x);
}

/* Each id that was drawn once, whatever its count: the count goes back to 0 behind it. */
static void penalise_outputs(sampler_workspace *workspace, const sampler_params *params,
                             size_t count) {
    uint32_t *counts = workspace->counts;
    for (uint32_t i = 0; i < params->output_count; i++) {
        counts[params->output_ids[i]]++;
    }
    for (uint32_t i = 0; i < params->output_count; i++) {
        const size_t id = (size_t)params->output_ids[i];
        if (counts[id] > 0 && id < count && is_finite(workspace->processed[id]))
            workspace->processed[id] = penalise(params, workspace->processed[id], counts[id]);
        counts[id] = 0;
    }
}

const float *sampler_process(sampler_workspace *workspace, const sampler_params *params,
                             const float *logits, size_t count) {
    const bool is_penalised = params->output_count > 0 && has_penalty(params);
    if (!is_penalised && params->banned_count == 0 && params->bias_count == 0) return logits;
    float *x = workspace->processed;
    memcpy(x, logits, count * sizeof *x);
    if (is_penalised) penalise_outputs(workspace, params, count);
    for (uint32_t i = 0; i < params->banned_count; i++) {
        const size_t id = (size_t)params->banned_ids[i];
        if (id < count) x[id] = -math_inf_f32();
    }
    for (uint32_t i = 0; i < params->bias_count; i++) {
        const size_t id = (size_t)params->bias_ids[i];
        if (id >= count) continue;
        if (params->biases[i] == -math_inf_f32()) {
            x[id] = params->biases[i];
        } else if (is_finite(x[id])) {
            x[id] = bound(params, x[id] + params->biases[i]);
        }
    }
    return x;
}
