/* The thread pool of one compute owner. A *run* is a number of items; the caller and the workers
 * claim them one by one, so a worker that the system does not schedule costs nothing but its own
 * share. Workers spin for at most POOL_SPIN_US after the last run and then sleep; the caller, when
 * it has nothing left to claim, does the same.
 *
 * Threads: pool_run is called by one thread at a time, never from inside an item. */
#ifndef BT_KERNELS_HOST_POOL_H
#define BT_KERNELS_HOST_POOL_H

#include <stdint.h>

#include "base/status.h"

enum { POOL_SPIN_US = 50, POOL_THREADS_MAX = 1024 };

typedef struct pool pool;

/* One item of a run. `thread` is 0 for the caller and below pool_threads for workers: two items
 * that run at the same time have different ones. */
typedef void (*pool_item)(void *context, uint32_t item, uint32_t thread);

/* A pool of `threads` >= 1, the caller's included. Returns owned. */
BT_MUST_CHECK bt_status pool_create(uint32_t threads, pool **out);
/* Joins the workers; no run may be in progress. */
void pool_destroy(pool *p);
uint32_t pool_threads(const pool *p);
/* Runs items 0 .. items-1, each once, in any order and on any thread. Returns when all are done,
 * and everything they wrote is visible. */
void pool_run(pool *p, uint32_t items, pool_item run, void *context);

#endif
