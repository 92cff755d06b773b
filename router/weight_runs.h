/* The weights that the tokens of one sample were drawn under, as runs of equal versions in the
 * order of the tokens. Versions change rarely, so this is a few entries however long the reply is.
 * One owner. */
#ifndef BT_ROUTER_WEIGHT_RUNS_H
#define BT_ROUTER_WEIGHT_RUNS_H

#include <stdint.h>

#include "base/status.h"

typedef struct weight_run {
    uint64_t version;
    uint32_t row_to; /* the row behind the run */
} weight_run;

typedef struct weight_runs { /* zeroed at the start */
    weight_run *runs;        /* [count] */
    uint32_t count, capacity;
} weight_runs;

void weight_runs_fini(weight_runs *weights);
/* The next row's version. WORKER_MEMORY. */
BT_MUST_CHECK bt_status weight_runs_push(weight_runs *weights, uint64_t version);
/* The run that holds the row, which must be one that was pushed. */
uint32_t weight_runs_find(const weight_runs *weights, uint32_t row);

#endif
