/* A compute whose steps run in one thread of its own, the compute owner. The event thread and it
 * meet at two rings. Implementations (compute_host, sim_device) begin with this struct; it is used
 * through the functions here, on the event thread. */
#ifndef BT_KERNELS_COMPUTE_THREADED_H
#define BT_KERNELS_COMPUTE_THREADED_H

#include <pthread.h>

#include "base/ring.h"
#include "kernels/compute.h"

typedef struct compute_threaded compute_threaded;

struct compute_threaded {
    compute base; /* ops and the user's on_done: the implementation's */
    /* Runs one step, in the thread. */
    bt_status (*run)(compute_threaded *c, const model_batch *batch);
    bt_ring *batches;  /* event thread -> compute thread: const model_batch * */
    bt_ring *statuses; /* compute thread -> event thread: bt_status */
    bool is_busy;
    pthread_t thread;
};

/* Starts the thread; `name` is what the system shows of it (at most 15 characters). base and run
 * are filled in. WORKER_* when it cannot be made. */
BT_MUST_CHECK bt_status compute_threaded_start(compute_threaded *c, const char *name,
                                               bt_error *error);
/* Waits for the running step, if any, and ends the thread. */
void compute_threaded_stop(compute_threaded *c);

/* The `start` of compute_ops. */
void compute_threaded_submit(compute *c, const model_batch *batch);
/* Readable when a step is done; the event loop then calls compute_threaded_poll. */
int compute_threaded_get_fd(const compute *c);
/* Calls on_done for the step that ended, if one did. */
void compute_threaded_poll(compute *c);

#endif
