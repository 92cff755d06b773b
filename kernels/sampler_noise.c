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
