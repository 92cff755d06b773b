/* The host device, as the op drivers of kernels/host see it. */
#ifndef BT_KERNELS_HOST_DEV_HOST_INTERNAL_H
#define BT_KERNELS_HOST_DEV_HOST_INTERNAL_H

#include <stdatomic.h>

#include "kernels/host/isa.h"
#include "kernels/host/pool.h"
#include "kernels/ops.h"

enum {
    HOST_BLOCK_ROWS = 96,     /* rows of activations that one item of a matrix product takes */
    HOST_ATTENTION_ROWS = 96, /* query rows that one item of attention takes, if that is a token */
    HOST_ALIGN_BYTES = 64,
};

/* How many runs of a thread's stretch have been claimed. */
typedef struct host_claims {
    _Alignas(HOST_ALIGN_BYTES) _Atomic uint32_t next;
} host_claims;

struct dev_host {
    const host_isa *isa;
    pool *workers;
    float *scratch;      /* [threads][scratch_floats] */
    host_claims *claims; /* [threads] */
    size_t scratch_floats;
    uint32_t width_max;      /* head_dim_max rounded up to 64 */
    uint32_t attention_rows; /* most query rows of one item */
};

/* Work of some units, which stand in an order of place: of memory, or of rows. */
typedef struct host_work {
    uint32_t units;
    uint32_t align;   /* runs begin at multiples of this, but for the first of a stretch; >= 1 */
    uint32_t run_min; /* units that are worth a claim; >= 1 */
    /* The units [begin, end). */
    void (*run)(void *context, uint32_t begin, uint32_t end, uint32_t thread);
    void *context;
} host_work;
/* Every thread has a stretch of the units, the same one each time, and claims it in runs that
 * halve, then helps the others with theirs. So it reads long pieces of memory (panels of weights
 * claimed in turn are read at three quarters of the speed) and finds in its own caches what it
 * wrote in the op before; all end together, and one that is held up keeps at most half of its
 * stretch. */
void host_run_stretches(dev_host *dev, const host_work *work);

static inline float *dev_host_scratch(const dev_host *dev, uint32_t thread) {
    return dev->scratch + thread * dev->scratch_floats;
}
static inline uint32_t host_round_up(uint32_t value, uint32_t unit) {
    return (value + unit - 1) / unit * unit;
}

#endif
