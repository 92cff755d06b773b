/* Models of random weights, for tests and benchmarks that have no file: same geometry and seed,
 * same weights, on any machine. */
#ifndef BT_KERNELS_MODEL_MODEL_GENERATE_H
#define BT_KERNELS_MODEL_MODEL_GENERATE_H

#include "kernels/model.h"
#include "kernels/pack.h"

/* Matrices are uniform with a standard deviation of 1 / sqrt(inputs), norms lie near 1, biases near
 * 0. The card's name is "generated"; the fingerprint is zero but for the seed; no EOS. Returns
 * owned; CALLER_ARGUMENT for a geometry that cannot be run. */
BT_MUST_CHECK bt_status model_generate(const model_geometry *geometry, uint64_t seed, model **out,
                                       bt_error *error);
/* The same as if matrices with whole blocks were stored in this format, with random blocks, and
 * loaded in the form `weights`. */
BT_MUST_CHECK bt_status model_generate_stored(const model_geometry *geometry, uint64_t seed,
                                              pack_format stored, model_weights weights,
                                              model **out, bt_error *error);

#endif
