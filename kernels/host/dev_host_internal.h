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

/* How far the parts of a product that one thread begins with have been claimed. */
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

static inline float *dev_host_scratch(const dev_host *dev, uint32_t thread) {
    return dev->scratch + thread * dev->scratch_floats;
}
static inline uint32_t host_round_up(uint32_t value, uint32_t unit) {
    return (value + unit - 1) / unit * unit;
}

#endif
