/* Where steps run, as a table: the worker's control core starts a step and is told when it is done.
 * One step at a time; between start and on_done the batch and everything it points to, pages
 * included, belong to the step.
 *
 * Implementations: compute_host (a model_runner in its own thread) and compute_sim (no model:
 * tokens are a hash of the prefix, read back from the pages). All functions and on_done run on the
 * event thread. */
#ifndef BT_KERNELS_COMPUTE_H
#define BT_KERNELS_COMPUTE_H

#include "base/status.h"
#include "kernels/model.h"

typedef struct compute compute;

typedef struct compute_ops {
    const char *name;
    /* Runs model_step(batch). on_done follows exactly once, never inside the call. */
    void (*start)(compute *c, const model_batch *batch);
    /* Zeroes tokens [used, page_tokens) of a page that no step uses now. */
    void (*zero_tail)(compute *c, uint32_t page, uint32_t used);
    /* Copies page `from` to `to`; no step uses `to` now, and none writes `from`. */
    void (*copy_page)(compute *c, uint32_t from, uint32_t to);
    /* Waits for the running step, if any; on_done does not follow. */
    void (*destroy)(compute *c);
} compute_ops;

/* Implementations start with this. */
struct compute {
    const compute_ops *ops;
    /* Set by the user before the first start. The status is model_step's. */
    void (*on_done)(void *context, bt_status status);
    void *context;
};

#endif
