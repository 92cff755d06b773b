/* The seeded noise: a hash of (seed, position, column), and Gumbel noise from it. */
#include <float.h>

#include "kernels/sampler_internal.h"

uint32_t sampler_hash(uint64_t seed, uint32_t position, uint32_t column) {
    return sampler_hash_end(sampler_hash_mix(sampler_hash_begin(seed, position), column));
}

double sampler_noise(uint32_t hash) {
    double log_uniform = math_log_f64((double)hash / 4294967295.0);
    if (log_uniform < -DBL_MAX) log_uniform = -DBL_MAX;
    if (log_uniform > -0x1p-32) log_uniform = -0x1p-32;
    return -math_log_f64(-log_uniform);
}

bool sampler_params_are_valid(const sampler_params *params) {
    const bool is_temperature = params->temperature > 0.0F && params->temperature < math_inf_f32();
    const bool is_top_p = params->top_p > 0.0F && params->top_p <= 1.0F;
    const bool is_mode = params->mask_mode <= SAMPLER_MASK_SUPPORT;
    const bool is_cap = params->mask_mode == SAMPLER_MASK_OFF || params->mask_max_tokens > 0;
    return is_temperature && is_top_p && is_mode && is_cap;
}
