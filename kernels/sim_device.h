/* The sim device: a compute that keeps the time of a real one instead of computing. A step takes
 * step_us, and token_us for each of its tokens, from the call of start on; rows and pages are
 * written at its beginning by the compute thread (a compute_sim that trusts its pages), so that the
 * event thread goes on as beside a real device. Nothing spins; the thread sleeps until the time.
 *
 * What it kept is counted and logged: steps, rows, how late they ended, the pause between the end
 * of a step and the start of the next (what the worker itself needs before it can go on), and the
 * time that filling took. */
#ifndef BT_KERNELS_SIM_DEVICE_H
#define BT_KERNELS_SIM_DEVICE_H

#include "kernels/compute_sim.h"
#include "kernels/compute_threaded.h"

typedef struct sim_device_options {
    /* support_max, trusts_pages and rows are not looked at. */
    compute_sim_options sim;
    uint32_t width; /* of supports; 0: realistic (sim_rows.h) */
    uint64_t seed;
    bool checks_pages;     /* all of the prefix at every step */
    uint32_t report_ms;    /* a line in the log after so long of work; 0: one at the end */
    const char *component; /* of log lines; borrowed */
} sim_device_options;

/* The KV memory is borrowed and outlives the compute, which is a compute_threaded. Returns owned;
 * destroy through ops. WORKER_*. */
BT_MUST_CHECK bt_status sim_device_create(const sim_device_options *options, compute **out,
                                          bt_error *error);

/* What a device did since it was made. Times in microseconds. */
typedef struct sim_device_counts {
    uint64_t steps, rows;
    uint64_t late_us, late_most_us; /* the thread woke so long after its time; sum and largest */
    uint64_t late_steps[4];         /* by at most 100, 200 and 1000 us, and by more */
    uint64_t overruns;              /* filling alone took longer than the step */
    uint64_t fill_us;
    uint64_t pauses, pause_us; /* of those shorter than a step: the worker had more to do */
} sim_device_counts;

/* Not while a step runs. */
sim_device_counts sim_device_look(const compute *c);

#endif
