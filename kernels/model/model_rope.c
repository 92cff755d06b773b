/* The scalings are those of Hugging Face's ROPE_INIT_FUNCTIONS and of llama.cpp, which agree. */
#include "kernels/model/model_rope.h"

#include <math.h>

#include "kernels/math.h"

#define TWO_PI 0x1.921fb54442d18p+2

static bool is_within(double value, double low, double high) {
    return value >= low && value <= high; /* false for NaN */
}

static bt_status check_divisors(const model_geometry *g, bt_error *error) {
    if (g->head_dim / 2 > MODEL_ROPE_DIVISORS_MAX)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                       "a head size of %u with a divisor per rope frequency: up to %d is possible",
                       g->head_dim, 2 * MODEL_ROPE_DIVISORS_MAX);
    for (uint32_t i = 0; i < g->head_dim / 2; i++)
        if (!is_within((double)g->rope_scaling.divisors[i], 1e-6, 1e6))
            return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                           "the divisor %g of rope frequency %u is not between 1e-6 and 1e6",
                           (double)g->rope_scaling.divisors[i], i);
    return BT_OK;
}

static bt_status check_scaling(const model_geometry *g, bt_error *error) {
    const model_rope_scaling *s = &g->rope_scaling;
    if (!is_within(s->factor, 1, 1e6))
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                       "the rope scaling factor is %g, 1 to 1e6 are possible", s->factor);
    if (s->kind == MODEL_ROPE_KIND_LINEAR) return BT_OK;
    if (s->original_context_tokens == 0)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                       "the original context of the rope scaling is 0 tokens");
    if (s->kind == MODEL_ROPE_KIND_LLAMA3) {
        if (is_within(s->low_frequency_factor, 1e-6, 1e6) &&
            is_within(s->high_frequency_factor, 1e-6, 1e6) &&
            s->low_frequency_factor < s->high_frequency_factor)
            return BT_OK;
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                       "the rope scaling's low frequency factor %g must be positive and below the "
                       "high one, %g",
                       s->low_frequency_factor, s->high_frequency_factor);
    }
    if (!is_within(s->beta_slow, 1e-6, 1e6) || !is_within(s->beta_fast, 1e-6, 1e6))
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                       "the rope scaling's beta_fast %g and beta_slow %g must be positive",
                       s->beta_fast, s->beta_slow);
    if (!is_within(s->attention_factor, 1e-3, 1e3))
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                       "the rope scaling's attention factor is %g, 0.001 to 1000 are possible",
                       s->attention_factor);
    if (!(g->rope_theta > 1))
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "yarn needs a rope base above 1");
    return BT_OK;
}

bt_status model_rope_check(const model_geometry *g, bt_error *error) {
    if (!is_within(g->rope_theta, 1, 1e15))
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "the rope base is %g, 1 to 1e15 are possible",
                       g->rope_theta);
    switch (g->rope_scaling.kind) {
    case MODEL_ROPE_KIND_PLAIN: return BT_OK;
    case MODEL_ROPE_KIND_DIVISORS: return check_divisors(g, error);
    case MODEL_ROPE_KIND_LINEAR:
    case MODEL_ROPE_KIND_LLAMA3:
    case MODEL_ROPE_KIND_YARN: return check_scaling(g, error);
    }
    return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "unknown kind of rope scaling %d",
                   (int)g->rope_scaling.kind);
}

/* Slow rotations are divided, fast ones kept, those between are mixed by where they stand. */
static double llama3(const model_rope_scaling *s, double frequency) {
    const double rotations = s->original_context_tokens * (frequency / TWO_PI);
    if (rotations < s->low_frequency_factor) return frequency / s->factor;
    if (rotations > s->high_frequency_factor) return frequency;
    const double kept = (rotations - s->low_frequency_factor) /
                        (s->high_frequency_factor - s->low_frequency_factor);
    return (1 - kept) * (frequency / s->factor) + kept * frequency;
}

typedef struct ramp {
    double begin;
    double end;
} ramp;

/* The pair (as a real number) that turns `rotations` times within the original context. */
static double pair_of(const model_geometry *g, double rotations) {
    const double turns = g->rope_scaling.original_context_tokens / (rotations * TWO_PI);
    return g->head_dim * math_log_f64(turns) / (2 * math_log_f64(g->rope_theta));
}

static ramp yarn_ramp(const model_geometry *g) {
    const model_rope_scaling *s = &g->rope_scaling;
    double begin = pair_of(g, s->beta_fast);
    double end = pair_of(g, s->beta_slow);
    if (s->has_whole_ramp) {
        begin = floor(begin);
        end = ceil(end);
    }
    if (begin < 0) begin = 0;
    if (end > g->head_dim - 1) end = g->head_dim - 1;
    if (begin == end) end += 0.001;
    return (ramp){.begin = begin, .end = end};
}

static double yarn(const model_rope_scaling *s, ramp r, uint32_t pair, double frequency) {
    double divided = (pair - r.begin) / (r.end - r.begin);
    divided = divided < 0 ? 0 : divided > 1 ? 1 : divided;
    return (frequency / s->factor) * divided + frequency * (1 - divided);
}

void model_rope_frequencies(const model_geometry *g, float *out) {
    const model_rope_scaling *s = &g->rope_scaling;
    const double log_theta = math_log_f64(g->rope_theta);
    const ramp r = s->kind == MODEL_ROPE_KIND_YARN ? yarn_ramp(g) : (ramp){0};
    for (uint32_t i = 0; i < g->head_dim / 2; i++) {
        const double exponent = (double)(2 * i) / (double)g->head_dim;
        double frequency = math_exp_f64(-exponent * log_theta);
        switch (s->kind) {
        case MODEL_ROPE_KIND_PLAIN: break;
        case MODEL_ROPE_KIND_LINEAR: frequency /= s->factor; break;
        case MODEL_ROPE_KIND_LLAMA3: frequency = llama3(s, frequency); break;
        case MODEL_ROPE_KIND_YARN: frequency = yarn(s, r, i, frequency); break;
        case MODEL_ROPE_KIND_DIVISORS: frequency /= (double)s->divisors[i]; break;
        }
        out[i] = (float)frequency;
    }
}

float model_rope_magnitude(const model_geometry *g) {
    const model_rope_scaling *s = &g->rope_scaling;
    return s->kind == MODEL_ROPE_KIND_YARN ? (float)s->attention_factor : 1.0F;
}

double model_rope_yarn_attention(double factor, double weight) {
    return factor <= 1 ? 1 : 0.1 * weight * math_log_f64(factor) + 1;
}
