/* The thread that owns the steps fills them and then sleeps on the monotonic clock. */
#include "kernels/sim_device.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

typedef struct sim_device {
    compute_threaded threaded;
    sim_device_options options;
    sim_rows *rows;
    compute *filler;     /* the thread's, once it runs */
    uint64_t started_us; /* of the running step */
    uint64_t ended_us;   /* of the one before; 0: none */
    sim_device_counts counts;
    sim_device_counts reported; /* of the last line in the log */
    uint64_t reported_us;
    bool has_precise_timer;
} sim_device;

static uint64_t now_us(void) {
    const bt_clock clock = bt_clock_system();
    return bt_clock_now_us(&clock);
}

static void sleep_until(uint64_t due_us) {
    const struct timespec due = {.tv_sec = (time_t)(due_us / 1000000),
                                 .tv_nsec = (long)(due_us % 1000000 * 1000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
    }
}

static uint64_t count_rows(const model_batch *batch) {
    if (batch->draw_offsets != NULL) return batch->draw_offsets[batch->sequences];
    uint64_t rows = 0;
    for (uint32_t s = 0; s < batch->sequences; s++)
        rows += batch->samples[s];
    return rows;
}

/* ---- counting -------------------------------------------------------------------------------- */

static void count_lateness(sim_device_counts *counts, uint64_t late_us) {
    static const uint64_t limits[] = {100, 200, 1000};
    size_t at = 0;
    while (at < BT_ARRAY_COUNT(limits) && late_us > limits[at])
        at++;
    counts->late_steps[at]++;
    counts->late_us += late_us;
    if (late_us > counts->late_most_us) counts->late_most_us = late_us;
}

/* What happened between two looks. */
static void report(sim_device *d, uint64_t now) {
    const sim_device_counts *to = &d->counts;
    const sim_device_counts *from = &d->reported;
    const uint64_t steps = to->steps - from->steps;
    const uint64_t pauses = to->pauses - from->pauses;
    if (steps == 0) return;
    bt_log_info(d->options.component,
                "sim: %" PRIu64 " steps, %" PRIu64 " rows in %" PRIu64 " ms; a step ended %" PRIu64
                " us late (%" PRIu64 " of them by more than 200 us), was filled in %" PRIu64
                " us (%" PRIu64 " overran) and followed after %" PRIu64 " us",
                steps, to->rows - from->rows, (now - d->reported_us) / 1000,
                (to->late_us - from->late_us) / steps,
                to->late_steps[2] + to->late_steps[3] - from->late_steps[2] - from->late_steps[3],
                (to->fill_us - from->fill_us) / steps, to->overruns - from->overruns,
                pauses == 0 ? 0 : (to->pause_us - from->pause_us) / pauses);
    d->reported = d->counts;
    d->reported_us = now;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static uint64_t duration_us(const sim_device *d, const model_batch *batch) {
    return d->options.sim.step_us + d->options.sim.token_us * batch->tokens;
}

static bt_status run(compute_threaded *c, const model_batch *batch) {
    sim_device *d = (sim_device *)c;
    sim_device_counts *counts = &d->counts;
    if (!d->has_precise_timer) {
        (void)prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); /* of this thread alone; 50 us else */
        d->has_precise_timer = true;
    }
    const uint64_t due_us = d->started_us + duration_us(d, batch);
    const uint64_t begun_us = now_us();
    const bt_status status = compute_sim_run(d->filler, batch);
    uint64_t now = now_us();
    counts->fill_us += now - begun_us;
    counts->steps++;
    counts->rows += count_rows(batch);
    if (now > due_us) {
        counts->overruns++;
    } else {
        sleep_until(due_us);
        now = now_us();
        count_lateness(counts, now - due_us);
    }
    d->ended_us = now;
    if (d->options.report_ms != 0 && now - d->reported_us >= d->options.report_ms * UINT64_C(1000))
        report(d, now);
    return status;
}

/* The thread is at rest: what it wrote last came over the ring. */
static void sim_start(compute *c, const model_batch *batch) {
    sim_device *d = (sim_device *)c;
    d->started_us = now_us();
    const uint64_t pause_us = d->started_us - d->ended_us;
    if (d->ended_us != 0 && pause_us < duration_us(d, batch)) {
        d->counts.pauses++;
        d->counts.pause_us += pause_us;
    }
    compute_threaded_submit(c, batch);
}

static void sim_zero_tail(compute *c, uint32_t page, uint32_t used) {
    compute *filler = ((sim_device *)c)->filler;
    filler->ops->zero_tail(filler, page, used);
}

static void sim_copy_page(compute *c, uint32_t from, uint32_t to) {
    compute *filler = ((sim_device *)c)->filler;
    filler->ops->copy_page(filler, from, to);
}

static void sim_destroy(compute *c) {
    if (c == NULL) return;
    sim_device *d = (sim_device *)c;
    compute_threaded_stop(&d->threaded);
    report(d, now_us());
    d->filler->ops->destroy(d->filler);
    sim_rows_destroy(d->rows);
    bt_free(d);
}

static const compute_ops sim_ops = {
    .name = "sim",
    .start = sim_start,
    .zero_tail = sim_zero_tail,
    .copy_page = sim_copy_page,
    .destroy = sim_destroy,
};

bt_status sim_device_create(const sim_device_options *options, compute **out, bt_error *error) {
    sim_device *d = bt_calloc(1, sizeof *d);
    if (d == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    d->threaded.base.ops = &sim_ops;
    d->threaded.run = run;
    d->options = *options;
    d->reported_us = now_us();
    const sim_rows_options rows = {
        .vocab_size = options->sim.vocab_size, .width = options->width, .seed = options->seed};
    bt_status status = sim_rows_create(&rows, &d->rows);
    if (status != BT_OK) goto free_device;
    compute_sim_options sim = options->sim;
    sim.trusts_pages = !options->checks_pages;
    sim.rows = d->rows;
    status = compute_sim_create(&sim, &d->filler);
    if (status != BT_OK) goto destroy_rows;
    status = compute_threaded_start(&d->threaded, "sim-device", error);
    if (status != BT_OK) goto destroy_filler;
    *out = &d->threaded.base;
    return BT_OK;

destroy_filler:
    d->filler->ops->destroy(d->filler);
destroy_rows:
    sim_rows_destroy(d->rows);
free_device:
    bt_free(d);
    return bt_fail(error, status, "the sim device cannot be made: %s", bt_status_string(status));
}

sim_device_counts sim_device_look(const compute *c) {
    return ((const sim_device *)c)->counts;
}
