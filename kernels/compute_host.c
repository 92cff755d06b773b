/* A model_runner behind the table of a compute. */
#include "kernels/compute_host.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"

typedef struct compute_host {
    compute_threaded threaded;
    model_runner *runner; /* used by the thread only, once it runs */
    kv_page_layout kv;
    uint8_t *kv_memory;
} compute_host;

static bt_status run(compute_threaded *c, const model_batch *batch) {
    return model_step(((compute_host *)c)->runner, batch);
}

static void host_zero_tail(compute *c, uint32_t page, uint32_t used) {
    const compute_host *host = (compute_host *)c;
    const kv_page_layout *kv = &host->kv;
    BT_ASSERT(used <= kv->page_tokens);
    uint8_t *memory = host->kv_memory + (size_t)page * kv_page_bytes(kv);
    const size_t token_bytes = kv->head_dim * kv_element_bytes(kv->dtype);
    const size_t blocks = (size_t)kv->layers * 2 * kv->kv_heads;
    for (size_t block = 0; block < blocks; block++) {
        memset(memory + block * kv_head_bytes(kv) + used * token_bytes, 0,
               (kv->page_tokens - used) * token_bytes);
    }
}

static void host_copy_page(compute *c, uint32_t from, uint32_t to) {
    const compute_host *host = (compute_host *)c;
    const size_t bytes = kv_page_bytes(&host->kv);
    BT_ASSERT(from != to);
    memcpy(host->kv_memory + to * bytes, host->kv_memory + from * bytes, bytes);
}

static void host_destroy(compute *c) {
    if (c == NULL) return;
    compute_host *host = (compute_host *)c;
    compute_threaded_stop(&host->threaded);
    model_runner_destroy(host->runner);
    bt_free(host);
}

static const compute_ops host_ops = {
    .name = "host",
    .start = compute_threaded_submit,
    .zero_tail = host_zero_tail,
    .copy_page = host_copy_page,
    .destroy = host_destroy,
};

bt_status compute_host_create(const model *m, const model_runner_options *options, compute **out,
                              bt_error *error) {
    compute_host *host = bt_calloc(1, sizeof *host);
    if (host == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    host->threaded.base.ops = &host_ops;
    host->threaded.run = run;
    host->kv = options->kv;
    host->kv_memory = options->kv_memory;
    bt_status status = model_runner_create(m, options, &host->runner, error);
    if (status != BT_OK) goto free_host;
    status = compute_threaded_start(&host->threaded, "compute", error);
    if (status != BT_OK) goto destroy_runner;
    *out = &host->threaded.base;
    return BT_OK;

destroy_runner:
    model_runner_destroy(host->runner);
free_host:
    bt_free(host);
    return status;
}
