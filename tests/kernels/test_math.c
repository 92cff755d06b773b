/* kernels/math.h: error bounds against libm in long double, special cases, known bit patterns, and
 * equal bits from every instruction set the compiler was asked for. */
#include "kernels/math.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "tests/kernels/math_sweep.h"

static uint64_t next_random(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15U;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
}

static double unit_random(uint64_t *state) {
    return (double)(next_random(state) >> 11) * 0x1p-53;
}

/* The distance in units of the last place of the exact value, of a format with `digits` bits. */
static double ulps(long double got, long double exact, int digits, int exponent_min) {
    int exponent;
    (void)frexpl(exact, &exponent);
    if (exponent < exponent_min) exponent = exponent_min;
    return (double)fabsl((got - exact) / ldexpl(1.0L, exponent - digits));
}

static double ulps_f32(float got, long double exact) {
    return ulps(got, exact, 24, -125);
}

static double ulps_f64(double got, long double exact) {
    return ulps(got, exact, 53, -1021);
}

static void exp_f32_within_one_ulp(void **state) {
    (void)state;
    double worst = 0;
    for (uint64_t bits = 0; bits < 0x100000000U; bits += 4099) {
        const float x = math_from_bits_f32((uint32_t)bits);
        if (!(x <= 88.72283F)) continue; /* also NaN */
        worst = fmax(worst, ulps_f32(math_exp_f32(x), expl((long double)x)));
    }
    for (int i = 0; i < 500000; i++) { /* dense where softmax lives */
        const float x = -104.0F * (float)i / 500000.0F;
        worst = fmax(worst, ulps_f32(math_exp_f32(x), expl((long double)x)));
    }
    assert_true(worst > 0.4 && worst <= 1.0);
}

static void log_f32_within_half_an_ulp(void **state) {
    (void)state;
    double worst = 0;
    for (uint32_t bits = 1; bits < 0x7f800000U; bits += 2053) {
        const float x = math_from_bits_f32(bits);
        worst = fmax(worst, ulps_f32(math_log_f32(x), logl((long double)x)));
    }
    for (uint32_t bits = 0x3f000000U; bits < 0x40000000U; bits += 31) { /* around 1 */
        if (bits == 0x3f800000U) continue;
        const float x = math_from_bits_f32(bits);
        worst = fmax(worst, ulps_f32(math_log_f32(x), logl((long double)x)));
    }
    assert_true(worst > 0.4 && worst <= 0.51);
}

static void exp_f64_within_one_ulp(void **state) {
    (void)state;
    uint64_t random = 1;
    double worst = 0;
    for (int i = 0; i < 600000; i++) {
        const double scale = i % 2 == 0 ? 1.0 : 0x1p-9;
        const double x = (-745.1 + unit_random(&random) * 1454.8) * scale;
        worst = fmax(worst, ulps_f64(math_exp_f64(x), expl((long double)x)));
    }
    assert_true(worst > 0.4 && worst <= 1.0);
}

static void log_f64_within_one_ulp(void **state) {
    (void)state;
    uint64_t random = 2;
    double worst = 0;
    for (int i = 0; i < 600000; i++) {
        double x = math_from_bits_f64(next_random(&random) >> 1);
        if (i % 3 == 1) x = unit_random(&random) * 4.0;
        if (i % 3 == 2) x = 1.0 + (unit_random(&random) - 0.5) * 0x1p-10;
        if (!(x < (double)INFINITY) || x == 0.0 || x == 1.0) continue;
        worst = fmax(worst, ulps_f64(math_log_f64(x), logl((long double)x)));
    }
    assert_true(worst > 0.4 && worst <= 1.0);
}

static void sincos_within_one_ulp(void **state) {
    (void)state;
    uint64_t random = 3;
    double worst = 0;
    for (int i = 0; i < 400000; i++) {
        double x = (unit_random(&random) - 0.5) * 3.2e6;
        if (i % 4 == 1) x *= 1e-6;
        /* The angles of a rotary embedding: a position times a frequency. */
        if (i % 4 == 2) x = (double)(next_random(&random) % 1048576U);
        if (i % 4 == 3) {
            x = (double)(i % 1048576) * math_exp_f64(-13.8 * (double)(i % 64) / 64.0);
        }
        double s;
        double c;
        math_sincos_f64(x, &s, &c);
        if (x != 0.0) worst = fmax(worst, ulps_f64(s, sinl((long double)x)));
        worst = fmax(worst, ulps_f64(c, cosl((long double)x)));
    }
    /* The doubles nearest to multiples of pi/2 lose the most in the range reduction. */
    for (int n = 1; n < 1000000; n += 37) {
        const double x = (double)n * 1.5707963267948966;
        double s;
        double c;
        math_sincos_f64(x, &s, &c);
        worst = fmax(worst, fabs(s - (double)sinl((long double)x)) * 0x1p53);
        worst = fmax(worst, fabs(c - (double)cosl((long double)x)) * 0x1p53);
    }
    assert_true(worst > 0.4 && worst <= 1.0);
}

static void special_values_f32(void **state) {
    (void)state;
    const uint32_t inf = 0x7f800000U, nan = 0x7fc00000U, minus_inf = 0xff800000U;
    const struct {
        float x;
        uint32_t exp, log;
    } cases[] = {
        {0.0F, 0x3f800000U, minus_inf},
        {-0.0F, 0x3f800000U, minus_inf},
        {1.0F, 0x402df854U, 0},
        {INFINITY, inf, inf},
        {-INFINITY, 0, nan},
        {NAN, nan, nan},
        {-NAN, nan, nan},
        {88.72284F, inf, 0x408f895cU},
        {3.4028235e38F, inf, 0x42b17218U},
        {-104.1F, 0, nan},
        {-3.4028235e38F, 0, nan},
        {-103.9F, 1, nan},
        {0x1p-149F, 0x3f800000U, 0xc2ce8ed0U},
        {-0x1p-149F, 0x3f800000U, nan},
        {0x1p-126F, 0x3f800000U, 0xc2aeac50U},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        assert_int_equal(math_bits_f32(math_exp_f32(cases[i].x)), cases[i].exp);
        assert_int_equal(math_bits_f32(math_log_f32(cases[i].x)), cases[i].log);
    }
}

static void special_values_f64(void **state) {
    (void)state;
    const uint64_t inf = 0x7ff0000000000000U, nan = 0x7ff8000000000000U, one = 0x3ff0000000000000U;
    const uint64_t minus_inf = 0xfff0000000000000U;
    const struct {
        double x;
        uint64_t exp, log;
    } cases[] = {
        {0.0, one, minus_inf},
        {-0.0, one, minus_inf},
        {1.0, 0x4005bf0a8b14576aU, 0},
        {(double)INFINITY, inf, inf},
        {-(double)INFINITY, 0, nan},
        {(double)NAN, nan, nan},
        {709.79, inf, 0x401a428745f620ceU},
        {-745.1, 1, nan},
        {-747.0, 0, nan},
        {0x1p-1074, one, 0xc0874385446d71c3U},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        assert_true(math_bits_f64(math_exp_f64(cases[i].x)) == cases[i].exp);
        assert_true(math_bits_f64(math_log_f64(cases[i].x)) == cases[i].log);
    }
    double s;
    double c;
    math_sincos_f64((double)INFINITY, &s, &c);
    assert_true(math_bits_f64(s) == nan && math_bits_f64(c) == nan);
    math_sincos_f64((double)NAN, &s, &c);
    assert_true(math_bits_f64(s) == nan && math_bits_f64(c) == nan);
    math_sincos_f64(0.0, &s, &c);
    assert_true(math_bits_f64(s) == 0 && math_bits_f64(c) == one);
}

enum { SWEEP_COUNT = 65536 + 13, SWEEP_ARRAYS_F32 = 3, SWEEP_ARRAYS_F64 = 5 };

typedef struct sweep_storage {
    math_sweep sweep;
    float *singles;
    double *doubles;
} sweep_storage;

static sweep_storage sweep_storage_create(void) {
    sweep_storage storage = {0};
    storage.singles = bt_calloc(SWEEP_ARRAYS_F32 * (size_t)SWEEP_COUNT, sizeof(float));
    storage.doubles = bt_calloc(SWEEP_ARRAYS_F64 * (size_t)SWEEP_COUNT, sizeof(double));
    assert_non_null(storage.singles);
    assert_non_null(storage.doubles);
    uint64_t random = 4;
    for (int i = 0; i < SWEEP_COUNT; i++) {
        const uint64_t bits = next_random(&random);
        /* Every third value is any bit pattern at all; the others are where the functions work. */
        const bool is_any = i % 3 == 0;
        const double wide = (unit_random(&random) - 0.5) * (i % 3 == 1 ? 200.0 : 1e6);
        storage.singles[i] = is_any ? math_from_bits_f32((uint32_t)bits) : (float)wide;
        storage.doubles[i] = is_any ? math_from_bits_f64(bits) : wide;
    }
    float *f = storage.singles;
    double *d = storage.doubles;
    storage.sweep = (math_sweep){
        .x = f,
        .y = d,
        .count = SWEEP_COUNT,
        .exp_f32 = f + SWEEP_COUNT,
        .log_f32 = f + 2 * SWEEP_COUNT,
        .exp_f64 = d + SWEEP_COUNT,
        .log_f64 = d + 2 * SWEEP_COUNT,
        .sin_f64 = d + 3 * SWEEP_COUNT,
        .cos_f64 = d + 4 * SWEEP_COUNT,
    };
    return storage;
}

static void sweep_storage_destroy(sweep_storage *storage) {
    bt_free(storage->singles);
    bt_free(storage->doubles);
}

/* FNV-1a over the outputs (the angles above 1e6 too: they are inexact but have fixed bits). */
static uint64_t sweep_hash(const sweep_storage *storage) {
    uint64_t hash = 0xcbf29ce484222325U;
    const unsigned char *bytes = (const unsigned char *)storage->sweep.exp_f32;
    for (size_t i = 0; i < 2 * sizeof(float) * (size_t)SWEEP_COUNT; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3U;
    }
    bytes = (const unsigned char *)storage->sweep.exp_f64;
    for (size_t i = 0; i < 4 * sizeof(double) * (size_t)SWEEP_COUNT; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3U;
    }
    return hash;
}

/* Recorded from the portable build after its error bounds held. */
static const uint64_t SWEEP_HASH = 0x224604a10c13d8daU;

static void check_sweep(void (*run)(const math_sweep *)) {
    sweep_storage storage = sweep_storage_create();
    run(&storage.sweep);
    const uint64_t hash = sweep_hash(&storage);
    if (hash != SWEEP_HASH) print_message("sweep hash %016llx\n", (unsigned long long)hash);
    assert_true(hash == SWEEP_HASH);
    sweep_storage_destroy(&storage);
}

static void sweep_has_known_bits_portable(void **state) {
    (void)state;
    check_sweep(math_sweep_portable);
}

static void sweep_has_known_bits_unoptimised(void **state) {
    (void)state;
    check_sweep(math_sweep_plain);
}

#if defined(__x86_64__)
static void sweep_has_known_bits_avx2(void **state) {
    (void)state;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) skip();
    check_sweep(math_sweep_avx2);
}

static void sweep_has_known_bits_avx512(void **state) {
    (void)state;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq")) skip();
    check_sweep(math_sweep_avx512);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_f32_within_one_ulp),
        cmocka_unit_test(log_f32_within_half_an_ulp),
        cmocka_unit_test(exp_f64_within_one_ulp),
        cmocka_unit_test(log_f64_within_one_ulp),
        cmocka_unit_test(sincos_within_one_ulp),
        cmocka_unit_test(special_values_f32),
        cmocka_unit_test(special_values_f64),
        cmocka_unit_test(sweep_has_known_bits_portable),
        cmocka_unit_test(sweep_has_known_bits_unoptimised),
#if defined(__x86_64__)
        cmocka_unit_test(sweep_has_known_bits_avx2),
        cmocka_unit_test(sweep_has_known_bits_avx512),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
