/* The inner kernels for portable; CMake compiles this file with the flags of that instruction set.
 */
#define SIMD_PORTABLE 1
#include "kernels/host/isa.h"

#include "kernels/host/attention_impl.h"
#include "kernels/host/elementwise_impl.h"
#include "kernels/host/matmul_impl.h"
#include "kernels/host/quantised_portable.h"

static bool is_supported(void) {
    return true;
}

const host_isa host_isa_portable = {
    .name = "portable",
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
