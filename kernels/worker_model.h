/* What a worker of either role computes with: a model from a file on the host, or the sim device;
 * the layout of its KV pages, and the compute on the worker's pages. Plain data to read; changed
 * only by the functions here, on the event thread. */
#ifndef BT_KERNELS_WORKER_MODEL_H
#define BT_KERNELS_WORKER_MODEL_H

#include <stdint.h>

#include "base/compute_settings.h"
#include "base/status.h"
#include "kernels/compute.h"
#include "kernels/kv_page.h"
#include "kernels/model.h"
#include "kernels/worker_sim.h"

typedef struct worker_model {
    const char *component; /* of log lines: "decode" */
    bt_compute_settings settings;
    model *model; /* NULL on the sim device */
    model_card card;
    char numerics[64]; /* "host/exact/1/q8_0/5c1d90ab": model_get_numerics and the self-test */
    kv_page_layout kv;
    compute *compute; /* a compute_threaded */
} worker_model;

typedef struct worker_model_limits {
    uint32_t threads;    /* 0 = one per CPU */
    uint32_t tokens_max; /* of one step */
    uint32_t rows_max;   /* likewise */
} worker_model_limits;

/* *w is zero; component and the settings' strings are borrowed for as long as it lives. Blocking,
 * for as long as the file is large. Errors of model_load, self_test_run and worker_sim_describe. */
BT_MUST_CHECK bt_status worker_model_load(worker_model *w, const char *component,
                                          const bt_compute_settings *settings, bt_error *error);
/* The pages are borrowed until worker_model_stop. *fd_out is readable when worker_model_poll has
 * something to do. Errors of compute_host_create and sim_device_create. */
BT_MUST_CHECK bt_status worker_model_start(worker_model *w, const worker_model_limits *limits,
                                           void *pages, uint32_t page_count, int *fd_out,
                                           bt_error *error);
/* Calls the compute's on_done for the step that ended, if one did. */
void worker_model_poll(worker_model *w);
/* Waits for the running step; the pages are no longer used. Fine without a start. */
void worker_model_stop(worker_model *w);
/* Fine without a load. */
void worker_model_fini(worker_model *w);

#endif
