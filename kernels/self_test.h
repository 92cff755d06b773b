/* What this build computes on this CPU, as a number: a few steps of tiny generated models in every
 * format of weights, hashed. Two workers whose numbers differ do not give the same bits, whatever
 * their versions say (a compiler, a flag, a CPU), so the number is part of the numerics identity
 * that must be equal in a cluster. Pure but for memory; takes a few milliseconds. */
#ifndef BT_KERNELS_SELF_TEST_H
#define BT_KERNELS_SELF_TEST_H

#include <stdint.h>

#include "base/status.h"

/* `isa` as in model_runner_options. WORKER_MEMORY, CALLER_UNSUPPORTED for an unknown isa. */
BT_MUST_CHECK bt_status self_test_run(const char *isa, uint32_t *hash_out, bt_error *error);

#endif
