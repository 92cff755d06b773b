/* Which compiled form of the sampler's loops this CPU runs. */
#include <string.h>

#include "kernels/sampler_internal.h"

extern const sampler_loops sampler_loops_portable;
#if defined(__aarch64__)
extern const sampler_loops sampler_loops_neon;
#elif defined(__x86_64__)
extern const sampler_loops sampler_loops_avx2;
extern const sampler_loops sampler_loops_avx512;

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#endif

const sampler_loops *sampler_loops_find(const char *isa) {
#if defined(__aarch64__)
    if (isa == NULL || strcmp(isa, "neon") == 0) return &sampler_loops_neon;
#elif defined(__x86_64__)
    if (has_avx512() && (isa == NULL || strcmp(isa, "avx512") == 0)) return &sampler_loops_avx512;
    if (has_avx2() && (isa == NULL || strcmp(isa, "avx2") == 0)) return &sampler_loops_avx2;
#endif
    if (isa == NULL || strcmp(isa, "portable") == 0) return &sampler_loops_portable;
    return NULL;
}
