/* The metadata row slots of one worker: fixed width, one registered block. Every acquire gives the
 * slot a new generation, so that a late writer of an older use is detected, never followed. Event
 * thread. */
#ifndef BT_PD_BUFFERS_ROW_POOL_H
#define BT_PD_BUFFERS_ROW_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct row_pool row_pool;

typedef struct row_slot {
    uint32_t index;
    uint32_t generation; /* never 0 */
} row_slot;

/* slot_count slots of row_slot_bytes(cap) each; cap is row_entries_max of the cluster's. */
BT_MUST_CHECK bt_status row_pool_create(uint32_t slot_count, uint32_t cap, row_pool **out);
void row_pool_destroy(row_pool *pool);
void *row_pool_memory(row_pool *pool);
size_t row_pool_memory_bytes(const row_pool *pool);
size_t row_pool_slot_bytes(const row_pool *pool);
uint32_t row_pool_cap(const row_pool *pool);

BT_MUST_CHECK bt_status row_pool_acquire(row_pool *pool, row_slot *out); /* REQUEST_FULL */
/* Asserted to be held: a slot is released exactly once. */
void row_pool_release(row_pool *pool, row_slot slot);
/* The slot's memory, or NULL when the slot is not held in this generation. Any values are safe. */
void *row_pool_get(row_pool *pool, row_slot slot);
uint32_t row_pool_free_count(const row_pool *pool);
uint32_t row_pool_total_count(const row_pool *pool);

#endif
