/* Records in blocks, in their order: of memory, or parts of the reply's file while the memory
 * budget is used up; memory is tried again when a part is full. A held block is charged whole,
 * whatever of it is the store's; own blocks double with what is kept, and are charged before they
 * are allocated; the file is charged by the byte. Blocks and parts go back when the caller is past
 * them. A record is never cut: not by a block, and not by the window through which the file is
 * read. */
#include "router/reply_store.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"

enum {
    BLOCK_FIRST_BYTES = 1024,
    BLOCK_BYTES_MAX = 64 * 1024,
    WINDOW_BYTES = 64 * 1024,
};

_Static_assert(sizeof(reply_block) % 8 == 0, "records behind a block must be aligned");

void reply_store_init(reply_store *store, reply_spill *spill) {
    *store = (reply_store){.spill = spill};
}

static bool is_in_file(const reply_block *block) {
    return block->bytes == NULL;
}

static void free_first(reply_store *store) {
    reply_block *block = store->first;
    store->first = block->next;
    if (store->first == NULL) store->last = NULL;
    if (is_in_file(block)) reply_spill_give(store->spill, &block->part);
    if (block->held == NULL) store->own_bytes -= block->charged;
    budget_give(&store->spill->limits->memory, block->charged);
    bt_block_release(block->held);
    bt_free(block);
}

void reply_store_fini(reply_store *store) {
    while (store->first != NULL) {
        free_first(store);
    }
    bt_free(store->window);
    reply_store_init(store, store->spill);
}

static uint32_t record_bytes(const uint8_t *record) {
    uint32_t bytes;
    memcpy(&bytes, record, sizeof(bytes));
    return bytes;
}

/* ---- the file -------------------------------------------------------------------------------- */

static void append_block(reply_store *store, reply_block *block) {
    if (store->last != NULL) {
        store->last->next = block;
    } else {
        store->first = block;
    }
    store->last = block;
}

static bool is_room_in_file(const reply_store *store, size_t bytes) {
    const reply_block *last = store->last;
    return last != NULL && is_in_file(last) && last->part.room - last->used >= bytes;
}

static bt_status append_to_file(reply_store *store, const uint8_t *record, size_t bytes) {
    if (!is_room_in_file(store, bytes)) {
        reply_part part;
        bt_status status = reply_spill_take(store->spill, bytes, &part);
        if (status != BT_OK) return status;
        reply_block *block = bt_malloc(sizeof(*block));
        if (block == NULL) return BT_ERR_WORKER_MEMORY;
        *block = (reply_block){.part = part};
        append_block(store, block);
    }
    reply_block *last = store->last;
    const bt_status status = reply_spill_write(store->spill, &last->part, record, bytes);
    last->used = last->part.used;
    return status;
}

/* Makes at least `bytes` bytes of the block at `offset` readable in the window. */
static bt_status fill_window(reply_store *store, const reply_block *block, size_t offset,
                             size_t bytes) {
    BT_ASSERT(offset + bytes <= block->used);
    const uint64_t at = block->part.at + offset;
    if (store->window != NULL && at >= store->window_offset &&
        at + bytes <= store->window_offset + store->window_used)
        return BT_OK;
    size_t wanted = bytes > WINDOW_BYTES ? bytes : WINDOW_BYTES;
    if (wanted > store->window_capacity) {
        uint8_t *window = bt_realloc(store->window, wanted);
        if (window == NULL) return BT_ERR_WORKER_MEMORY;
        store->window = window;
        store->window_capacity = wanted;
    }
    if (wanted > block->used - offset) wanted = block->used - offset;
    store->window_offset = at;
    store->window_used = 0;
    const bt_status status = reply_spill_read(store->spill, at, store->window, wanted);
    if (status == BT_OK) store->window_used = wanted;
    return status;
}

/* ---- records --------------------------------------------------------------------------------- */

static uint8_t *own_memory(reply_block *block) {
    return (uint8_t *)(block + 1);
}

/* A new last block with `extra` bytes behind it, charged with `charged`; NULL: the budget is used
 * up, or *status_out. */
static reply_block *add_block(reply_store *store, size_t charged, size_t extra,
                              bt_status *status_out) {
    if (!budget_take(&store->spill->limits->memory, charged)) return NULL;
    reply_block *block = bt_malloc(sizeof(*block) + extra);
    if (block == NULL) {
        budget_give(&store->spill->limits->memory, charged);
        *status_out = BT_ERR_WORKER_MEMORY;
        return NULL;
    }
    *block = (reply_block){.charged = charged};
    append_block(store, block);
    return block;
}

/* By reference; right behind what is held already it is the same block. */
static bool hold(reply_store *store, const uint8_t *record, size_t bytes, bt_block *block,
                 bt_status *status_out) {
    reply_block *last = store->last;
    if (last == NULL || last->held != block || last->bytes + last->used != record) {
        last = add_block(store, block->capacity, 0, status_out);
        if (last == NULL) return false;
        last->held = block;
        last->bytes = record;
        bt_block_hold(block);
    }
    last->used += bytes;
    return true;
}

static bool copy(reply_store *store, const uint8_t *record, size_t bytes, bt_status *status_out) {
    reply_block *last = store->last;
    if (last == NULL || is_in_file(last) || last->held != NULL ||
        last->charged - last->used < bytes) {
        /* As much again as is kept: little for short replies and for streams that keep up. */
        size_t capacity = store->own_bytes;
        if (capacity < BLOCK_FIRST_BYTES) capacity = BLOCK_FIRST_BYTES;
        if (capacity > BLOCK_BYTES_MAX) capacity = BLOCK_BYTES_MAX;
        if (capacity < bytes) capacity = bytes;
        last = add_block(store, capacity, capacity, status_out);
        if (last == NULL) return false;
        last->bytes = own_memory(last);
        store->own_bytes += capacity;
    }
    memcpy(own_memory(last) + last->used, record, bytes);
    last->used += bytes;
    return true;
}

bt_status reply_store_append(reply_store *store, const uint8_t *record, size_t bytes,
                             bt_block *block) {
    bt_status status = BT_OK;
    BT_ASSERT(bytes % 4 == 0 && bytes == record_bytes(record));
    if (!is_room_in_file(store, bytes)) {
        const bool is_kept = block != NULL ? hold(store, record, bytes, block, &status)
                                           : copy(store, record, bytes, &status);
        if (is_kept || status != BT_OK) return status;
    }
    return append_to_file(store, record, bytes);
}

reply_place reply_store_begin(const reply_store *store) {
    return (reply_place){.block = store->first};
}

reply_place reply_store_end(const reply_store *store) {
    size_t offset = store->last != NULL ? store->last->used : 0;
    return (reply_place){.block = store->last, .offset = offset};
}

/* The record at the place, or what keeps it from being read. */
static bt_status look(reply_store *store, const reply_place *place, const uint8_t **record_out) {
    const reply_block *block = place->block;
    if (!is_in_file(block)) {
        *record_out = block->bytes + place->offset;
        return BT_OK;
    }
    const uint64_t at = block->part.at + place->offset;
    bt_status status = fill_window(store, block, place->offset, sizeof(uint32_t));
    if (status != BT_OK) return status;
    const size_t bytes = record_bytes(store->window + (at - store->window_offset));
    status = fill_window(store, block, place->offset, bytes);
    if (status == BT_OK) *record_out = store->window + (at - store->window_offset);
    return status;
}

bt_status reply_store_next(reply_store *store, reply_place *place, const uint8_t **record_out,
                           size_t *bytes_out) {
    if (place->block == NULL) place->block = store->first;
    while (place->block != NULL && place->offset == place->block->used) {
        place->block = place->block->next;
        place->offset = 0;
    }
    BT_ASSERT(place->block != NULL);
    const bt_status status = look(store, place, record_out);
    if (status != BT_OK) return status;
    *bytes_out = record_bytes(*record_out);
    place->offset += *bytes_out;
    BT_ASSERT(place->offset <= place->block->used);
    return BT_OK;
}

void reply_store_rest(reply_store *store) {
    bt_free(store->window);
    store->window = NULL;
    store->window_capacity = 0;
    store->window_used = 0;
}

void reply_store_drop_before(reply_store *store, const reply_place *place) {
    if (place->block == NULL) return;
    while (store->first != NULL && store->first != place->block) {
        free_first(store);
    }
}
