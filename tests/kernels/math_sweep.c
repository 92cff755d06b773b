#include "tests/kernels/math_sweep.h"

#include "kernels/math.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)

void JOIN(math_sweep_, MATH_SWEEP_SUFFIX)(const math_sweep *sweep) {
    for (size_t i = 0; i < sweep->count; i++) {
        sweep->exp_f32[i] = math_exp_f32(sweep->x[i]);
    }
    for (size_t i = 0; i < sweep->count; i++) {
        sweep->log_f32[i] = math_log_f32(sweep->x[i]);
    }
    for (size_t i = 0; i < sweep->count; i++) {
        sweep->exp_f64[i] = math_exp_f64(sweep->y[i]);
    }
    for (size_t i = 0; i < sweep->count; i++) {
        sweep->log_f64[i] = math_log_f64(sweep->y[i]);
    }
    for (size_t i = 0; i < sweep->count; i++) {
        math_sincos_f64(sweep->y[i], &sweep->sin_f64[i], &sweep->cos_f64[i]);
    }
}
