/* Rotation frequencies of a geometry, scaled as it says. Pure functions of kernels/math.h and exact
 * operations only, so that every machine has the same bits (rule 4). */
#ifndef BT_KERNELS_MODEL_MODEL_ROPE_H
#define BT_KERNELS_MODEL_MODEL_ROPE_H

#include "kernels/model.h"

enum { MODEL_ROPE_PAIRS_MAX = 512 }; /* head_dim is up to 1024 */

/* CALLER_ARGUMENT for a theta or a scaling that gives no frequencies. Sizes are checked before. */
BT_MUST_CHECK bt_status model_rope_check(const model_geometry *g, bt_error *error);
/* out [head_dim / 2], in angle per token. Each is computed in f64 and rounded once. */
void model_rope_frequencies(const model_geometry *g, float *out);
/* What cos and sin are multiplied by. */
float model_rope_magnitude(const model_geometry *g);
/* yarn's attention factor where the file gives none: 0.1 weight ln(factor) + 1. */
double model_rope_yarn_attention(double factor, double weight);

#endif
