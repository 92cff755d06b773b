/* Neighbouring rows of one version are one entry. */
#include "router/weight_runs.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"

void weight_runs_fini(weight_runs *weights) {
    bt_free(weights->runs);
    *weights = (weight_runs){0};
}

static bt_status add_run(weight_runs *weights, weight_run run) {
    if (weights->count == weights->capacity) {
        const uint32_t grown = weights->capacity > 0 ? weights->capacity * 2 : 1;
        weight_run *runs = bt_realloc(weights->runs, grown * sizeof(*runs));
        if (runs == NULL) return BT_ERR_WORKER_MEMORY;
        weights->runs = runs;
        weights->capacity = grown;
    }
    weights->runs[weights->count++] = run;
    return BT_OK;
}

bt_status weight_runs_push(weight_runs *weights, uint64_t version) {
    weight_run *last = weights->count > 0 ? &weights->runs[weights->count - 1] : NULL;
    if (last == NULL || last->version != version)
        return add_run(weights, (weight_run){version, (last != NULL ? last->row_to : 0) + 1});
    last->row_to++;
    return BT_OK;
}

uint32_t weight_runs_find(const weight_runs *weights, uint32_t row) {
    uint32_t from = 0;
    uint32_t to = weights->count;
    BT_ASSERT(to > 0 && row < weights->runs[to - 1].row_to);
    while (from < to) {
        const uint32_t middle = from + (to - from) / 2;
        if (weights->runs[middle].row_to > row) {
            to = middle;
        } else {
            from = middle + 1;
        }
    }
    return from;
}
