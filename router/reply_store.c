/* Records in memory blocks, then in one unlinked file: once a record went to the file all later
 * ones do, so that reading blocks and then file is reading in order. A held block is charged whole,
 * whatever of it is the reply's; own blocks double with what is kept, and are charged before they
 * are allocated; the file is charged by the byte. Blocks go back when the caller is past them, the
 * file only with the reply. A record is never cut: not by a block, and not by the window through
 * which the file is read. */
#include "router/reply_store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"

enum {
    BLOCK_FIRST_BYTES = 1024,
    BLOCK_BYTES_MAX = 64 * 1024,
    WINDOW_BYTES = 64 * 1024,
};

_Static_assert(sizeof(reply_block) % 8 == 0, "records behind a block must be aligned");

void reply_store_init(reply_store *store, reply_limits *limits) {
    memset(store, 0, sizeof(*store));
    store->limits = limits;
    store->spill_fd = -1;
}

static void free_first(reply_store *store) {
    reply_block *block = store->first;
    store->first = block->next;
    if (store->first == NULL) store->last = NULL;
    if (block->held == NULL) store->own_bytes -= block->charged;
    budget_give(&store->limits->memory, block->charged);
    bt_block_release(block->held);
    bt_free(block);
}

void reply_store_fini(reply_store *store) {
    while (store->first != NULL) {
        free_first(store);
    }
    if (store->spill_fd >= 0) close(store->spill_fd);
    budget_give(&store->limits->spill, store->spill_bytes);
    bt_free(store->window);
    reply_store_init(store, store->limits);
}

static uint32_t record_bytes(const uint8_t *record) {
    uint32_t bytes;
    memcpy(&bytes, record, sizeof(bytes));
    return bytes;
}

/* ---- the file -------------------------------------------------------------------------------- */

static bt_status open_spill(reply_store *store) {
    const char *path = store->limits->spill_path;
    store->spill_fd = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (store->spill_fd >= 0) return BT_OK;
    /* A file system without unnamed files: a named one that loses its name at once. */
    char name[4096];
    size_t bytes = strlen(path);
    static const char TAIL[] = "/baton-reply.XXXXXX";
    if (bytes + sizeof(TAIL) > sizeof(name)) return BT_ERR_WORKER_IO;
    memcpy(name, path, bytes);
    memcpy(name + bytes, TAIL, sizeof(TAIL));
    store->spill_fd = mkostemp(name, O_CLOEXEC);
    if (store->spill_fd < 0) {
        bt_log_error("reply", "no temporary file in %s: %s", path, strerror(errno));
        return BT_ERR_WORKER_IO;
    }
    (void)unlink(name);
    return BT_OK;
}

static bt_status append_to_file(reply_store *store, const uint8_t *record, size_t bytes) {
    if (!budget_take(&store->limits->spill, bytes)) return BT_ERR_REQUEST_FULL;
    if (store->spill_fd < 0) {
        bt_status status = open_spill(store);
        if (status != BT_OK) {
            budget_give(&store->limits->spill, bytes);
            return status;
        }
    }
    size_t written = 0;
    while (written < bytes) {
        ssize_t now = pwrite(store->spill_fd, record + written, bytes - written,
                             (off_t)(store->spill_bytes + written));
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) {
            bt_log_error("reply", "writing a temporary file failed: %s", strerror(errno));
            budget_give(&store->limits->spill, bytes);
            return BT_ERR_WORKER_IO;
        }
        written += (size_t)now;
    }
    store->spill_bytes += bytes;
    return BT_OK;
}

/* Makes at least `bytes` bytes of the file at `offset` readable in the window. */
static bt_status fill_window(reply_store *store, uint64_t offset, size_t bytes) {
    BT_ASSERT(offset + bytes <= store->spill_bytes);
    if (store->window != NULL && offset >= store->window_offset &&
        offset + bytes <= store->window_offset + store->window_used)
        return BT_OK;
    size_t wanted = bytes > WINDOW_BYTES ? bytes : WINDOW_BYTES;
    if (wanted > store->window_capacity) {
        uint8_t *window = bt_realloc(store->window, wanted);
        if (window == NULL) return BT_ERR_WORKER_MEMORY;
        store->window = window;
        store->window_capacity = wanted;
    }
    if (wanted > store->spill_bytes - offset) wanted = (size_t)(store->spill_bytes - offset);
    store->window_offset = offset;
    store->window_used = 0;
    while (store->window_used < wanted) {
        ssize_t now = pread(store->spill_fd, store->window + store->window_used,
                            wanted - store->window_used, (off_t)(offset + store->window_used));
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) {
            bt_log_error("reply", "reading a temporary file failed: %s", strerror(errno));
            return BT_ERR_WORKER_IO;
        }
        store->window_used += (size_t)now;
    }
    return BT_OK;
}

/* ---- records --------------------------------------------------------------------------------- */

static uint8_t *own_memory(reply_block *block) {
    return (uint8_t *)(block + 1);
}

/* A new last block with `extra` bytes behind it, charged with `charged`; NULL: the budget is used
 * up, or *status_out. */
static reply_block *add_block(reply_store *store, size_t charged, size_t extra,
                              bt_status *status_out) {
    if (!budget_take(&store->limits->memory, charged)) return NULL;
    reply_block *block = bt_malloc(sizeof(*block) + extra);
    if (block == NULL) {
        budget_give(&store->limits->memory, charged);
        *status_out = BT_ERR_WORKER_MEMORY;
        return NULL;
    }
    *block = (reply_block){.charged = charged};
    if (store->last != NULL) {
        store->last->next = block;
    } else {
        store->first = block;
    }
    store->last = block;
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
    if (last == NULL || last->held != NULL || last->charged - last->used < bytes) {
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
    /* What follows a spilled record is spilled too: the order is blocks first, then the file. */
    if (store->spill_fd < 0) {
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
    if (store->spill_bytes > 0)
        return (reply_place){.is_in_file = true, .file_offset = store->spill_bytes};
    size_t offset = store->last != NULL ? store->last->used : 0;
    return (reply_place){.block = store->last, .offset = offset};
}

bt_status reply_store_next(reply_store *store, reply_place *place, const uint8_t **record_out,
                           size_t *bytes_out) {
    if (place->block == NULL && !place->is_in_file) place->block = store->first;
    while (place->block != NULL && place->offset == place->block->used) {
        place->block = place->block->next;
        place->offset = 0;
    }
    if (place->block != NULL) {
        const uint8_t *record = place->block->bytes + place->offset;
        *record_out = record;
        *bytes_out = record_bytes(record);
        place->offset += *bytes_out;
        BT_ASSERT(place->offset <= place->block->used);
        return BT_OK;
    }
    place->is_in_file = true;
    bt_status status = fill_window(store, place->file_offset, sizeof(uint32_t));
    if (status != BT_OK) return status;
    size_t bytes = record_bytes(store->window + (place->file_offset - store->window_offset));
    status = fill_window(store, place->file_offset, bytes);
    if (status != BT_OK) return status;
    *record_out = store->window + (place->file_offset - store->window_offset);
    *bytes_out = bytes;
    place->file_offset += bytes;
    return BT_OK;
}

void reply_store_rest(reply_store *store) {
    bt_free(store->window);
    store->window = NULL;
    store->window_capacity = 0;
    store->window_used = 0;
}

void reply_store_drop_before(reply_store *store, const reply_place *place) {
    if (place->block == NULL && !place->is_in_file) return;
    while (store->first != NULL && store->first != place->block) {
        free_first(store);
    }
}
