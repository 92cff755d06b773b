/* Steps of a host model, run by one thread of their own (the compute owner; its model_runner brings
 * the helpers). The event thread and it meet at two rings. */
#ifndef BT_KERNELS_COMPUTE_HOST_H
#define BT_KERNELS_COMPUTE_HOST_H

#include "kernels/compute.h"

/* The model and the KV memory are borrowed and outlive the compute. Returns owned; destroy through
 * ops. Errors of model_runner_create, or WORKER_* when a thread cannot be made. */
BT_MUST_CHECK bt_status compute_host_create(const model *m, const model_runner_options *options,
                                            compute **out, bt_error *error);
/* Readable when a step is done; the event loop then calls compute_host_poll. */
int compute_host_get_fd(const compute *c);
/* Calls on_done for the step that ended, if one did. */
void compute_host_poll(compute *c);

#endif
