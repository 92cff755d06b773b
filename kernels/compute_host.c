/* The thread sleeps on its ring until a batch comes. It answers with the status; the batch's memory
 * is handed over by the rings' ordering. A NULL batch ends it. */
#include "kernels/compute_host.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "base/ring.h"

typedef struct compute_host {
    compute base;
    model_runner *runner; /* used by the thread only, once it runs */
    kv_page_layout kv;
    uint8_t *kv_memory;
    bt_ring *batches;  /* event thread -> compute thread: const model_batch * */
    bt_ring *statuses; /* compute thread -> event thread: bt_status */
    bool is_busy;
    pthread_t thread;
} compute_host;

static void *run_steps(void *context) {
    compute_host *host = context;
    for (;;) {
        const model_batch *batch = NULL;
        while (!bt_ring_pop(host->batches, &batch))
            (void)bt_ring_wait(host->batches, -1);
        if (batch == NULL) return NULL;
        const bt_status status = model_step(host->runner, batch);
        const bool is_pushed = bt_ring_push(host->statuses, &status);
        BT_ASSERT(is_pushed);
    }
}

static void host_start(compute *c, const model_batch *batch) {
    compute_host *host = (compute_host *)c;
    BT_ASSERT(!host->is_busy);
    BT_ASSERT(batch != NULL);
    host->is_busy = true;
    const bool is_pushed = bt_ring_push(host->batches, &batch);
    BT_ASSERT(is_pushed);
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
    const model_batch *end = NULL;
    const bool is_pushed = bt_ring_push(host->batches, &end);
    BT_ASSERT(is_pushed);
    const int joined = pthread_join(host->thread, NULL);
    BT_ASSERT(joined == 0);
    model_runner_destroy(host->runner);
    bt_ring_destroy(host->batches);
    bt_ring_destroy(host->statuses);
    bt_free(host);
}

static const compute_ops host_ops = {
    .name = "host",
    .start = host_start,
    .zero_tail = host_zero_tail,
    .copy_page = host_copy_page,
    .destroy = host_destroy,
};

/* Signals belong to the event thread. */
static bt_status start_thread(compute_host *host) {
    sigset_t all;
    sigset_t old;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    const int result = pthread_create(&host->thread, NULL, run_steps, host);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    return result == 0 ? BT_OK : BT_ERR_WORKER_MEMORY;
}

bt_status compute_host_create(const model *m, const model_runner_options *options, compute **out,
                              bt_error *error) {
    compute_host *host = bt_calloc(1, sizeof *host);
    if (host == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    host->base.ops = &host_ops;
    host->kv = options->kv;
    host->kv_memory = options->kv_memory;
    bt_status status = model_runner_create(m, options, &host->runner, error);
    if (status != BT_OK) goto free_host;
    status = bt_ring_create(2, sizeof(const model_batch *), &host->batches);
    if (status == BT_OK) status = bt_ring_create(2, sizeof(bt_status), &host->statuses);
    if (status == BT_OK) status = start_thread(host);
    if (status != BT_OK) {
        (void)bt_fail(error, status, "cannot start the compute thread: %s",
                      bt_status_string(status));
        goto free_rings;
    }
    *out = &host->base;
    return BT_OK;

free_rings:
    bt_ring_destroy(host->batches);
    bt_ring_destroy(host->statuses);
    model_runner_destroy(host->runner);
free_host:
    bt_free(host);
    return status;
}

int compute_host_get_fd(const compute *c) {
    return bt_ring_get_fd(((const compute_host *)c)->statuses);
}

void compute_host_poll(compute *c) {
    compute_host *host = (compute_host *)c;
    bt_ring_disarm(host->statuses);
    do {
        bt_status status = BT_OK;
        while (bt_ring_pop(host->statuses, &status)) {
            BT_ASSERT(host->is_busy);
            host->is_busy = false;
            c->on_done(c->context, status);
        }
    } while (!bt_ring_arm(host->statuses));
}
