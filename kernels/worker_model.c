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
    const bt_compute_settings *settings = &w->settings;
    bt_log_info(w->component, "loading %s", settings->model);
    char folder[4096];
    model_load_options options = {.weights = (model_weights)settings->weights,
                                  .threads = settings->threads != 0 ? settings->threads
                                                                    : bt_system_cpu_count(),
                                  .cache_folder = settings->weights_cache,
                                  .cache_bytes_max = settings->weights_cache_bytes};
    if (strcmp(settings->weights_cache, "off") == 0) options.cache_folder = NULL;
    if (strcmp(settings->weights_cache, "auto") == 0)
        options.cache_folder = model_load_default_cache(folder, sizeof folder) ? folder : NULL;
    bt_status status = model_load(settings->model, &options, &w->model, error);
    if (status != BT_OK) return status;
    uint32_t hash = 0;
    status = self_test_run(NULL, &hash, error);
    if (status != BT_OK) return status;
    (void)snprintf(w->numerics, sizeof w->numerics, "%s/%08" PRIx32, model_get_numerics(w->model),
                   hash);
    w->card = *model_get_card(w->model);
    w->kv = model_kv_layout(w->model, settings->page_tokens, (kv_dtype)settings->kv_dtype);
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
    bt_log_info(w->component, "%s, %" PRIu32 " threads", model_isa_name(), options.threads);
    return compute_host_create(w->model, &options, &w->compute, error);
}

/* ---- sim ------------------------------------------------------------------------------------- */

static bt_status load_sim(worker_model *w, bt_error *error) {
    const bt_compute_settings *settings = &w->settings;
    (void)snprintf(w->numerics, sizeof w->numerics, "sim/exact/1");
    return worker_sim_describe(&settings->sim, settings->page_tokens, (kv_dtype)settings->kv_dtype,
                               &w->card, &w->kv, error);
}

static bt_status start_sim(worker_model *w, void *pages, uint32_t page_count, bt_error *error) {
    const bt_sim_settings *settings = &w->settings.sim;
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
        .component = w->component,
    };
    bt_status status = worker_sim_read_support(settings, &options.width, error);
    if (status != BT_OK) return status;
    bt_log_info(w->component,
                "sim device: %" PRIu64 " us a step, %" PRIu64 " us a token, %" PRIu32
                " ids, support %s",
                settings->step_us, settings->token_us, settings->vocab_size, settings->support);
    return sim_device_create(&options, &w->compute, error);
}

/* ---- either ---------------------------------------------------------------------------------- */

bt_status worker_model_load(worker_model *w, const char *component,
                            const bt_compute_settings *settings, bt_error *error) {
    w->component = component;
    w->settings = *settings;
    switch ((bt_compute_device)settings->device) {
    case BT_COMPUTE_HOST: return load_host(w, error);
    case BT_COMPUTE_SIM: return load_sim(w, error);
    case BT_COMPUTE_CUDA: break;
    }
    return bt_fail(error, BT_ERR_CALLER_CONFIG, "this device is not built");
}

bt_status worker_model_start(worker_model *w, const worker_model_limits *limits, void *pages,
                             uint32_t page_count, int *fd_out, bt_error *error) {
    const bt_status status = w->settings.device == BT_COMPUTE_SIM
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
