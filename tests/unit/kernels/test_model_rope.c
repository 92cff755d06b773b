/* Rotation frequencies against numbers worked out from the papers' formulas in double precision:
 * head_dim 16, base 10000, an original context of 64 tokens, a factor of 4. */
#include "kernels/model/model_rope.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { PAIRS = 8 };

static model_geometry scaled(model_rope_scaling scaling) {
    return (model_geometry){.head_dim = 2 * PAIRS, .rope_theta = 10000, .rope_scaling = scaling};
}

static void check(model_rope_scaling scaling, const float wanted[PAIRS]) {
    const model_geometry g = scaled(scaling);
    float got[PAIRS];
    bt_error error = {0};
    if (model_rope_check(&g, &error) != BT_OK) fail_msg("%s", error.text);
    model_rope_frequencies(&g, got);
    for (int i = 0; i < PAIRS; i++)
        if (!(fabsf(got[i] - wanted[i]) <= 1e-7F * wanted[i]))
            fail_msg("frequency %d is %.9g, not %.9g", i, (double)got[i], (double)wanted[i]);
}

static void frequencies_are_scaled(void **state) {
    (void)state;
    model_rope_scaling s = {.kind = MODEL_ROPE_KIND_PLAIN};
    check(s, (const float[]){1.0F, 0.316227766F, 0.1F, 0.0316227766F, 0.01F, 0.00316227766F, 0.001F,
                             0.000316227766F});
    s = (model_rope_scaling){.kind = MODEL_ROPE_KIND_LINEAR, .factor = 4};
    check(s, (const float[]){0.25F, 0.0790569415F, 0.025F, 0.00790569415F, 0.0025F, 0.000790569415F,
                             0.00025F, 7.90569415e-05F});
    s = (model_rope_scaling){.kind = MODEL_ROPE_KIND_LLAMA3,
                             .factor = 4,
                             .original_context_tokens = 64,
                             .low_frequency_factor = 1,
                             .high_frequency_factor = 4};
    check(s, (const float[]){1.0F, 0.254647909F, 0.0254647909F, 0.00790569415F, 0.0025F,
                             0.000790569415F, 0.00025F, 7.90569415e-05F});
    s = (model_rope_scaling){.kind = MODEL_ROPE_KIND_YARN,
                             .factor = 4,
                             .original_context_tokens = 64,
                             .beta_fast = 32,
                             .beta_slow = 1,
                             .attention_factor = 1,
                             .has_whole_ramp = true};
    check(s, (const float[]){1.0F, 0.237170825F, 0.05F, 0.00790569415F, 0.0025F, 0.000790569415F,
                             0.00025F, 7.90569415e-05F});
    s.has_whole_ramp = false;
    check(s, (const float[]){1.0F, 0.19858352F, 0.0255952459F, 0.00790569415F, 0.0025F,
                             0.000790569415F, 0.00025F, 7.90569415e-05F});
    s = (model_rope_scaling){.kind = MODEL_ROPE_KIND_DIVISORS,
                             .divisors = {1, 1, 2, 2, 4, 4, 4, 4}};
    check(s, (const float[]){1.0F, 0.316227766F, 0.05F, 0.0158113883F, 0.0025F, 0.000790569415F,
                             0.00025F, 7.90569415e-05F});
}

/* Both ends of the ramp fall together: nothing is divided by zero. */
static void a_ramp_may_be_a_step(void **state) {
    (void)state;
    const model_geometry g = scaled((model_rope_scaling){.kind = MODEL_ROPE_KIND_YARN,
                                                         .factor = 4,
                                                         .original_context_tokens = 64,
                                                         .beta_fast = 4,
                                                         .beta_slow = 4,
                                                         .attention_factor = 1});
    float got[PAIRS];
    model_rope_frequencies(&g, got);
    for (int i = 0; i < PAIRS; i++)
        assert_true(got[i] > 0 && got[i] <= 1);
    assert_true(got[0] == 1.0F && fabsf(got[7] - 7.90569415e-05F) < 1e-11F);
}

static void the_magnitude_is_yarns(void **state) {
    (void)state;
    model_geometry g = scaled((model_rope_scaling){.kind = MODEL_ROPE_KIND_LINEAR, .factor = 4});
    assert_true(model_rope_magnitude(&g) == 1.0F);
    g = scaled((model_rope_scaling){.kind = MODEL_ROPE_KIND_YARN, .attention_factor = 1.25});
    assert_true(model_rope_magnitude(&g) == 1.25F);
    assert_true(model_rope_yarn_attention(1, 1) == 1 && model_rope_yarn_attention(0.5, 1) == 1);
    assert_true(fabs(model_rope_yarn_attention(4, 1) - 1.13862943611198906) < 1e-15);
    assert_true(fabs(model_rope_yarn_attention(40, 0.707) - 1.2608037774058554) < 1e-14);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frequencies_are_scaled),
        cmocka_unit_test(a_ramp_may_be_a_step),
        cmocka_unit_test(the_magnitude_is_yarns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
