/* Work cut by place: see host_run_stretches in dev_host_internal.h. */
#include "base/assert.h"
#include "kernels/host/dev_host_internal.h"

typedef struct stretch_run {
    dev_host *dev;
    const host_work *work;
} stretch_run;

typedef struct range {
    uint32_t begin, end;
} range;

static range stretch_of(const stretch_run *run, uint32_t thread) {
    const uint64_t units = run->work->units;
    const uint32_t threads = dev_host_threads(run->dev);
    return (range){(uint32_t)(units * thread / threads),
                   (uint32_t)(units * (thread + 1) / threads)};
}

/* Half of what is left, and no less than a run may have, up to a place where it may end. */
static range first_run(const host_work *work, range rest) {
    const uint32_t half = (rest.end - rest.begin + 1) / 2;
    const uint32_t to = rest.begin + (half > work->run_min ? half : work->run_min);
    const uint32_t end = (to + work->align - 1) / work->align * work->align;
    return (range){rest.begin, end < rest.end ? end : rest.end};
}

static uint32_t count_runs(const host_work *work, range stretch) {
    uint32_t count = 0;
    for (; stretch.begin < stretch.end; count++)
        stretch.begin = first_run(work, stretch).end;
    return count;
}

static range run_at(const host_work *work, range stretch, uint32_t index) {
    for (; index > 0; index--)
        stretch.begin = first_run(work, stretch).end;
    return first_run(work, stretch);
}

/* The next run of this thread's stretch, else of the next one's that has any. There are as many
 * claims as runs. */
static range claim(const stretch_run *run, uint32_t thread) {
    const uint32_t threads = dev_host_threads(run->dev);
    for (uint32_t i = 0; i < threads; i++) {
        const uint32_t owner = (thread + i) % threads;
        const range stretch = stretch_of(run, owner);
        const uint32_t runs = count_runs(run->work, stretch);
        _Atomic uint32_t *next = &run->dev->claims[owner].next;
        uint32_t index = atomic_load_explicit(next, memory_order_relaxed);
        while (index < runs)
            if (atomic_compare_exchange_weak_explicit(next, &index, index + 1, memory_order_relaxed,
                                                      memory_order_relaxed))
                return run_at(run->work, stretch, index);
    }
    BT_ASSERT(false);
    return (range){0, 0};
}

static void run_one(void *context, uint32_t item, uint32_t thread) {
    (void)item;
    const stretch_run *run = context;
    const range claimed = claim(run, thread);
    run->work->run(run->work->context, claimed.begin, claimed.end, thread);
}

void host_run_stretches(dev_host *dev, const host_work *work) {
    stretch_run run = {.dev = dev, .work = work};
    uint32_t runs = 0;
    for (uint32_t i = 0; i < dev_host_threads(dev); i++) {
        runs += count_runs(work, stretch_of(&run, i));
        atomic_store_explicit(&dev->claims[i].next, 0, memory_order_relaxed);
    }
    pool_run(dev->workers, runs, run_one, &run);
}
