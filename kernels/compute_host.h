/* Steps of a host model, run by one thread of their own (its model_runner brings the helpers). A
 * compute_threaded: its descriptor and its poll are compute_threaded's. */
#ifndef BT_KERNELS_COMPUTE_HOST_H
#define BT_KERNELS_COMPUTE_HOST_H

#include "kernels/compute_threaded.h"

/* The model and the KV memory are borrowed and outlive the compute. Returns owned; destroy through
 * ops. Errors of model_runner_create, or WORKER_* when a thread cannot be made. */
BT_MUST_CHECK bt_status compute_host_create(const model *m, const model_runner_options *options,
                                            compute **out, bt_error *error);

#endif
