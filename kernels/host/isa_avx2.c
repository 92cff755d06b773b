/* The inner kernels for avx2; CMake compiles this file with the flags of that instruction set. */
#define SIMD_AVX2 1
#include "kernels/host/isa.h"

#include "kernels/host/attention_impl.h"
#include "kernels/host/elementwise_impl.h"
#include "kernels/host/matmul_impl.h"
#include "kernels/host/quantised_impl.h"

#include <cpuid.h>

/* clang's __builtin_cpu_supports does not know F16C. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

static bool is_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

const host_isa host_isa_avx2 = {
    .name = "avx2",
    .is_supported = is_supported,
    .panel_matmul = panel_matmul,
    .quantised_matmul = quantised_matmul,
    .matmul_finish = matmul_finish,
    .silu_mul = silu_mul,
    .rms_norm = rms_norm,
    .rope = rope,
    .store_bf16 = store_bf16,
    .attention_partition = attention_partition,
    .attention_fold = attention_fold,
    .attention_finish = attention_finish,
};
