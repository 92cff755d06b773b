/* kernels/math.h over whole arrays, compiled once per instruction set (MATH_SWEEP_SUFFIX), so that
 * the test can compare their bits. */
#ifndef BT_TESTS_KERNELS_MATH_SWEEP_H
#define BT_TESTS_KERNELS_MATH_SWEEP_H

#include <stddef.h>

typedef struct math_sweep {
    const float *x;  /* [count] */
    const double *y; /* [count] */
    size_t count;
    float *exp_f32; /* all outputs [count] */
    float *log_f32;
    double *exp_f64;
    double *log_f64;
    double *sin_f64;
    double *cos_f64;
} math_sweep;

void math_sweep_portable(const math_sweep *sweep);
void math_sweep_plain(const math_sweep *sweep); /* -O0 */
void math_sweep_avx2(const math_sweep *sweep);
void math_sweep_avx512(const math_sweep *sweep);

#endif
