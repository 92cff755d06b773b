/* Loading a model and starting the compute on it, for both worker programs. */
#include "kernels/worker_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/system.h"
#include "kernels/compute_host.h"
#include "kernels/self_test.h"

bt_status worker_model_load(worker_model *w, const worker_model_source *source, bt_error *error) {
    w->component = source->component;
    bt_log_info(w->component, "loading %s", source->path);
    char folder[4096];
    model_load_options options = {.weights = source->weights,
                                  .threads = source->threads != 0 ? source->threads
                                                                  : bt_system_cpu_count(),
                                  .cache_folder = source->weights_cache,
                                  .cache_bytes_max = source->weights_cache_bytes};
    if (strcmp(source->weights_cache, "off") == 0) options.cache_folder = NULL;
    if (strcmp(source->weights_cache, "auto") == 0)
        options.cache_folder = model_load_default_cache(folder, sizeof folder) ? folder : NULL;
    bt_status status = model_load(source->path, &options, &w->model, error);
    if (status != BT_OK) return status;
    uint32_t hash = 0;
    status = self_test_run(NULL, &hash, error);
    if (status != BT_OK) return status;
    (void)snprintf(w->numerics, sizeof w->numerics, "%s/%08" PRIx32, model_get_numerics(w->model),
                   hash);
    w->kv = model_kv_layout(w->model, source->page_tokens, source->dtype);
    return BT_OK;
}

bt_status worker_model_start(worker_model *w, const worker_model_limits *limits, void *pages,
                             uint32_t page_count, int *fd_out, bt_error *error) {
    const model_runner_options options = {
        .threads = limits->threads != 0 ? limits->threads : bt_system_cpu_count(),
        .tokens_max = limits->tokens_max,
        .rows_max = limits->rows_max,
        .kv = w->kv,
        .kv_memory = pages,
        .kv_page_count = page_count,
    };
    bt_log_info(w->component, "%s, %" PRIu32 " threads", model_isa_name(), options.threads);
    const bt_status status = compute_host_create(w->model, &options, &w->compute, error);
    if (status != BT_OK) return status;
    *fd_out = compute_host_get_fd(w->compute);
    return BT_OK;
}

void worker_model_stop(worker_model *w) {
    if (w->compute != NULL) w->compute->ops->destroy(w->compute);
    w->compute = NULL;
}

void worker_model_fini(worker_model *w) {
    worker_model_stop(w);
    model_destroy(w->model);
    w->model = NULL;
}
