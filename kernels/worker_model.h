/* What a worker of either role computes with: a model from a file, the layout of its KV pages, and
 * a compute_host on the worker's pages. Plain data to read; changed only by the functions here, on
 * the event thread. */
#ifndef BT_KERNELS_WORKER_MODEL_H
#define BT_KERNELS_WORKER_MODEL_H

#include <stdint.h>

#include "base/status.h"
#include "kernels/compute.h"
#include "kernels/kv_page.h"
#include "kernels/model.h"

typedef struct worker_model {
    const char *component; /* of log lines: "decode" */
    model *model;
    char numerics[64]; /* "host/exact/1/q8_0/5c1d90ab": model_get_numerics and the self-test */
    kv_page_layout kv;
    compute *compute;
} worker_model;

typedef struct worker_model_source {
    const char *component; /* borrowed */
    const char *path;
    uint32_t page_tokens; /* 16, 32 or 64 */
    kv_dtype dtype;
    model_weights weights;
    uint32_t threads;          /* that pack; 0 = one per CPU */
    const char *weights_cache; /* a folder, "auto" for the user's, "off" */
    uint64_t weights_cache_bytes;
} worker_model_source;

typedef struct worker_model_limits {
    uint32_t threads;    /* 0 = one per CPU */
    uint32_t tokens_max; /* of one step */
    uint32_t rows_max;   /* likewise */
} worker_model_limits;

/* *w is zero. Blocking, for as long as the file is large. Errors of model_load and
 * self_test_run. */
BT_MUST_CHECK bt_status worker_model_load(worker_model *w, const worker_model_source *source,
                                          bt_error *error);
/* The pages are borrowed until worker_model_stop. *fd_out is readable when compute_host_poll has
 * something to do. Errors of compute_host_create. */
BT_MUST_CHECK bt_status worker_model_start(worker_model *w, const worker_model_limits *limits,
                                           void *pages, uint32_t page_count, int *fd_out,
                                           bt_error *error);
/* Waits for the running step; the pages are no longer used. Fine without a start. */
void worker_model_stop(worker_model *w);
/* Fine without a load. */
void worker_model_fini(worker_model *w);

#endif
