/* Loading a model, or describing the sim device, and starting the compute on it, for both worker
 * programs. */
#include "kernels/worker_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/system.h"
#include "kernels/compute_host.h"
#include "kernels/self_test.h"
#include "kernels/sim_device.h"

/* ---- host ------------------------------------------------------------------------------------ */

static bt_status load_host(worker_model *w, bt_error *error) {
    const worker_model_source *source = &w->source;
    bt_log_info(source->component, "loading %s", source->path);
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
    w->card = *model_get_card(w->model);
    w->kv = model_kv_layout(w->model, source->page_tokens, source->dtype);
    return BT_OK;
}

static bt_status start_host(worker_model *w, const worker_model_limits *limits, void *pages,
                            uint32_t page_count, bt_error *error) {
    const model_runner_options options = {
        .threads = limits->threads != 0 ? limits->threads : bt_system_cpu_count(),
        .tokens_max = limits->tokens_max,
        .rows_max = limits->rows_max,
        .kv = w->kv,
        .kv_memory = pages,
        .kv_page_count = page_count,
    };
    bt_log_info(w->source.component, "%s, %" PRIu32 " threads", model_isa_name(), options.threads);
    return compute_host_create(w->model, &options, &w->compute, error);
}

/* ---- sim ------------------------------------------------------------------------------------- */

static bt_status load_sim(worker_model *w, bt_error *error) {
    const worker_model_source *source = &w->source;
    (void)snprintf(w->numerics, sizeof w->numerics, "sim/exact/1");
    return worker_sim_describe(&source->sim, source->page_tokens, source->dtype, &w->card, &w->kv,
                               error);
}

static bt_status start_sim(worker_model *w, void *pages, uint32_t page_count, bt_error *error) {
    const worker_sim_settings *settings = &w->source.sim;
    sim_device_options options = {
        .sim = {.kv_memory = pages,
                .kv_page_count = page_count,
                .page_bytes = kv_page_bytes(&w->kv),
                .page_tokens = w->kv.page_tokens,
                .vocab_size = settings->vocab_size,
                .step_us = settings->step_us,
                .token_us = settings->token_us},
        .seed = settings->seed,
        .checks_pages = settings->checks_pages,
        .report_ms = settings->report_ms,
        .component = w->source.component,
    };
    bt_status status = worker_sim_read_support(settings, &options.width, error);
    if (status != BT_OK) return status;
    bt_log_info(w->source.component,
                "sim device: %" PRIu64 " us a step, %" PRIu64 " us a token, %" PRIu32
                " ids, support %s",
                settings->step_us, settings->token_us, settings->vocab_size, settings->support);
    return sim_device_create(&options, &w->compute, error);
}

/* ---- either ---------------------------------------------------------------------------------- */

bt_status worker_model_load(worker_model *w, const worker_model_source *source, bt_error *error) {
    w->source = *source;
    switch (source->device) {
    case WORKER_DEVICE_HOST: return load_host(w, error);
    case WORKER_DEVICE_SIM: return load_sim(w, error);
    }
    return bt_fail(error, BT_ERR_CALLER_CONFIG, "this device is not built");
}

bt_status worker_model_start(worker_model *w, const worker_model_limits *limits, void *pages,
                             uint32_t page_count, int *fd_out, bt_error *error) {
    const bt_status status = w->source.device == WORKER_DEVICE_SIM
                                 ? start_sim(w, pages, page_count, error)
                                 : start_host(w, limits, pages, page_count, error);
    if (status != BT_OK) return status;
    *fd_out = compute_threaded_get_fd(w->compute);
    return BT_OK;
}

void worker_model_poll(worker_model *w) {
    compute_threaded_poll(w->compute);
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
