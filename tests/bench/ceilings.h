/* What this machine can do at most, to set figures against: measured in the same run, with the same
 * threads. */
#ifndef BT_TESTS_BENCH_CEILINGS_H
#define BT_TESTS_BENCH_CEILINGS_H

#include <stdint.h>

#include "kernels/ops.h"

typedef struct ceilings ceilings;

/* Takes `mib` MiB to read from, which should be far more than the caches; NULL when memory is out.
 * Returns owned. */
ceilings *ceilings_create(dev_host *dev, uint32_t mib);
void ceilings_destroy(ceilings *c);
/* Bytes per second that all threads read from memory; best of three passes. */
double ceilings_read(ceilings *c);
/* Multiplications and additions per second in f32 FMA on registers; best of three passes. */
double ceilings_fma(ceilings *c);

#endif
