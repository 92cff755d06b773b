/* One block of slots, a stack of free ones, a generation per slot. */
#include "pd_buffers/row_pool.h"

#include "base/assert.h"
#include "base/mem.h"
#include "proto/row.h"

typedef struct slot_record {
    uint32_t generation; /* of the current or the last holder; 0 = never held */
    bool is_held;
} slot_record;

struct row_pool {
    uint32_t slot_count;
    uint32_t cap;
    size_t slot_bytes;
    uint8_t *memory;
    slot_record *records;
    uint32_t *free_slots; /* [free_count], the top is the last */
    uint32_t free_count;
};

bt_status row_pool_create(uint32_t slot_count, uint32_t cap, row_pool **out) {
    size_t bytes = 0;
    if (slot_count == 0) return BT_ERR_CALLER_ARGUMENT;
    const size_t slot_bytes = row_slot_bytes(cap);
    if (!bt_mul_size(slot_count, slot_bytes, &bytes)) return BT_ERR_CALLER_ARGUMENT;
    row_pool *pool = bt_calloc(1, sizeof *pool);
    if (pool == NULL) return BT_ERR_WORKER_MEMORY;
    pool->slot_count = slot_count;
    pool->cap = cap;
    pool->slot_bytes = slot_bytes;
    pool->memory = bt_calloc_aligned(4096, bytes);
    pool->records = bt_calloc(slot_count, sizeof *pool->records);
    pool->free_slots = bt_calloc(slot_count, sizeof *pool->free_slots);
    if (pool->memory == NULL || pool->records == NULL || pool->free_slots == NULL) {
        row_pool_destroy(pool);
        return BT_ERR_WORKER_MEMORY;
    }
    for (uint32_t i = 0; i < slot_count; i++)
        pool->free_slots[i] = slot_count - 1 - i;
    pool->free_count = slot_count;
    *out = pool;
    return BT_OK;
}

void row_pool_destroy(row_pool *pool) {
    if (pool == NULL) return;
    bt_free(pool->free_slots);
    bt_free(pool->records);
    bt_free(pool->memory);
    bt_free(pool);
}

void *row_pool_memory(row_pool *pool) {
    return pool->memory;
}

size_t row_pool_memory_bytes(const row_pool *pool) {
    return pool->slot_count * pool->slot_bytes;
}

size_t row_pool_slot_bytes(const row_pool *pool) {
    return pool->slot_bytes;
}

uint32_t row_pool_cap(const row_pool *pool) {
    return pool->cap;
}

bt_status row_pool_acquire(row_pool *pool, row_slot *out) {
    if (pool->free_count == 0) return BT_ERR_REQUEST_FULL;
    const uint32_t index = pool->free_slots[--pool->free_count];
    slot_record *record = &pool->records[index];
    BT_ASSERT(!record->is_held);
    record->is_held = true;
    if (++record->generation == 0) record->generation = 1;
    *out = (row_slot){.index = index, .generation = record->generation};
    return BT_OK;
}

void row_pool_release(row_pool *pool, row_slot slot) {
    BT_ASSERT(row_pool_get(pool, slot) != NULL);
    pool->records[slot.index].is_held = false;
    pool->free_slots[pool->free_count++] = slot.index;
}

void *row_pool_get(row_pool *pool, row_slot slot) {
    if (slot.index >= pool->slot_count) return NULL;
    const slot_record *record = &pool->records[slot.index];
    if (!record->is_held || record->generation != slot.generation) return NULL;
    return pool->memory + slot.index * pool->slot_bytes;
}

uint32_t row_pool_free_count(const row_pool *pool) {
    return pool->free_count;
}

uint32_t row_pool_total_count(const row_pool *pool) {
    return pool->slot_count;
}
