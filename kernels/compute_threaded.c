/* The thread sleeps on its ring until a batch comes. It answers with the status; the batch's memory
 * is handed over by the rings' ordering. A NULL batch ends it. */
#include "kernels/compute_threaded.h"

#include <signal.h>

#include "base/assert.h"

static void *run_steps(void *context) {
    compute_threaded *c = context;
    for (;;) {
        const model_batch *batch = NULL;
        while (!bt_ring_pop(c->batches, &batch))
            (void)bt_ring_wait(c->batches, -1);
        if (batch == NULL) return NULL;
        const bt_status status = c->run(c, batch);
        const bool is_pushed = bt_ring_push(c->statuses, &status);
        BT_ASSERT(is_pushed);
    }
}

/* Signals belong to the event thread. */
static bt_status start_thread(compute_threaded *c, const char *name) {
    sigset_t all;
    sigset_t old;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    const int result = pthread_create(&c->thread, NULL, run_steps, c);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (result != 0) return BT_ERR_WORKER_MEMORY;
    (void)pthread_setname_np(c->thread, name); /* without it the name is the program's */
    return BT_OK;
}

bt_status compute_threaded_start(compute_threaded *c, const char *name, bt_error *error) {
    c->batches = NULL;
    c->statuses = NULL;
    c->is_busy = false;
    bt_status status = bt_ring_create(2, sizeof(const model_batch *), &c->batches);
    if (status == BT_OK) status = bt_ring_create(2, sizeof(bt_status), &c->statuses);
    if (status == BT_OK) status = start_thread(c, name);
    if (status == BT_OK) return BT_OK;
    bt_ring_destroy(c->batches);
    bt_ring_destroy(c->statuses);
    return bt_fail(error, status, "cannot start the compute thread: %s", bt_status_string(status));
}

void compute_threaded_stop(compute_threaded *c) {
    const model_batch *end = NULL;
    const bool is_pushed = bt_ring_push(c->batches, &end);
    BT_ASSERT(is_pushed);
    const int joined = pthread_join(c->thread, NULL);
    BT_ASSERT(joined == 0);
    bt_ring_destroy(c->batches);
    bt_ring_destroy(c->statuses);
}

void compute_threaded_submit(compute *base, const model_batch *batch) {
    compute_threaded *c = (compute_threaded *)base;
    BT_ASSERT(!c->is_busy);
    BT_ASSERT(batch != NULL);
    c->is_busy = true;
    const bool is_pushed = bt_ring_push(c->batches, &batch);
    BT_ASSERT(is_pushed);
}

int compute_threaded_get_fd(const compute *base) {
    return bt_ring_get_fd(((const compute_threaded *)base)->statuses);
}

void compute_threaded_poll(compute *base) {
    compute_threaded *c = (compute_threaded *)base;
    bt_ring_disarm(c->statuses);
    do {
        bt_status status = BT_OK;
        while (bt_ring_pop(c->statuses, &status)) {
            BT_ASSERT(c->is_busy);
            c->is_busy = false;
            base->on_done(base->context, status);
        }
    } while (!bt_ring_arm(c->statuses));
}
