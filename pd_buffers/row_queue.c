/* A list of blocks, each with whole records one behind the other; the first is taken from, the last
 * is written to. A block that was handed out in part is still written to behind that part: its
 * takers look at theirs alone. One that is empty and that nobody has any more is filled from its
 * beginning again. */
#include "pd_buffers/row_queue.h"

#include <string.h>

#include "base/assert.h"
#include "base/fault.h"
#include "base/little_endian.h"
#include "base/mem.h"

struct row_queue {
    row_queue_options options;
    bt_block *first, *last; /* used: bytes of records in it */
    size_t first_at;        /* bytes of the first one that were taken */
    size_t record_left;     /* of the record there, when its beginning was taken */
    size_t bytes;           /* not taken */
    uint32_t pushed, taken;
    bool is_reserved; /* behind the last record a row is being written */
};

static row_widths widths_of(const row_queue *queue, uint32_t support_count) {
    return (row_widths){.mask_mode = queue->options.mask_mode,
                        .support_count = support_count,
                        .top_count = queue->options.top_logprobs,
                        .id_logprob_count = queue->options.logprob_ids};
}

bt_status row_queue_create(const row_queue_options *options, row_queue **out) {
    if (options->mask_mode > ROW_MASK_SUPPORT) return BT_ERR_CALLER_ARGUMENT;
    row_queue *queue = bt_calloc(1, sizeof *queue);
    if (queue == NULL) return BT_ERR_WORKER_MEMORY;
    queue->options = *options;
    if (options->mask_mode == ROW_MASK_OFF) queue->options.cap = 0;
    if (options->bytes_max < row_record_bytes(widths_of(queue, queue->options.cap))) {
        bt_free(queue);
        return BT_ERR_CALLER_ARGUMENT;
    }
    *out = queue;
    return BT_OK;
}

/* The hold is the caller's. */
static bt_block *forget_first(row_queue *queue) {
    bt_block *block = queue->first;
    queue->first = block->next;
    if (queue->first == NULL) queue->last = NULL;
    queue->first_at = 0;
    block->next = NULL;
    return block;
}

static void drop_first(row_queue *queue) {
    bt_block_release(forget_first(queue));
}

void row_queue_destroy(row_queue *queue) {
    if (queue == NULL) return;
    while (queue->first != NULL)
        drop_first(queue);
    bt_free(queue);
}

/* ---- in -------------------------------------------------------------------------------------- */

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* As much again as is queued, so that rows that pile up go out in large frames. */
static size_t block_bytes(const row_queue *queue, size_t bytes) {
    const size_t queued = queue->bytes < ROW_BLOCK_BYTES_MAX ? queue->bytes : ROW_BLOCK_BYTES_MAX;
    return larger(bytes, larger(queued, ROW_BLOCK_BYTES));
}

/* Where the next `bytes` bytes go, in one block: a new one has `wanted`. */
static uint8_t *make_room(row_queue *queue, size_t bytes, size_t wanted) {
    bt_block *last = queue->last;
    if (last != NULL && queue->bytes == 0 && !queue->is_reserved && !bt_block_is_shared(last)) {
        last->used = 0;
        queue->first_at = 0;
    }
    if (last != NULL && last->capacity - last->used >= bytes) return last->bytes + last->used;
    bt_block *block = bt_block_acquire(queue->options.blocks, wanted);
    if (block == NULL) return NULL;
    if (last != NULL && queue->bytes == 0) drop_first(queue); /* nothing is left in it */
    if (queue->last != NULL) {
        queue->last->next = block;
    } else {
        queue->first = block;
    }
    queue->last = block;
    return block->bytes;
}

static bt_status check(const row_queue *queue, const token_row *row) {
    const uint32_t count = row->support_count;
    if (row->mask_mode != queue->options.mask_mode) return BT_ERR_CALLER_ARGUMENT;
    if (count > queue->options.cap) return BT_ERR_CALLER_LIMIT;
    if (count > 0 && row->support_ids == NULL) return BT_ERR_CALLER_ARGUMENT;
    if (row->mask_mode == ROW_MASK_SUPPORT && count > 0 && row->support_logprobs == NULL)
        return BT_ERR_CALLER_ARGUMENT;
    if (row->top_count != queue->options.top_logprobs ||
        row->id_logprob_count != queue->options.logprob_ids)
        return BT_ERR_CALLER_ARGUMENT;
    return BT_OK;
}

/* What a fault build is told to get wrong. */
static token_row mutated(const token_row *row) {
    token_row wrong = *row;
    if (bt_mutant(BT_MUTANT_DROP_ID) && row->support_count > 1) wrong.support_count--;
    if (bt_mutant(BT_MUTANT_SELECTED_FULL_WIDTH) && row->mask_mode == ROW_MASK_SELECTED &&
        row->support_count > 0)
        memcpy(&wrong.selected_logprob, row->support_ids + row->support_count - 1, sizeof(float));
    return wrong;
}

bt_status row_queue_reserve(row_queue *queue, int32_t **ids_out) {
    const size_t bytes = row_record_bytes(widths_of(queue, queue->options.cap));
    BT_ASSERT(queue->options.mask_mode != ROW_MASK_OFF);
    uint8_t *to = make_room(queue, bytes, larger(2 * bytes, block_bytes(queue, bytes)));
    if (to == NULL) return BT_ERR_WORKER_MEMORY;
    queue->is_reserved = true;
    *ids_out = (int32_t *)(void *)(to + ROW_RECORD_HEADER_BYTES);
    return BT_OK;
}

bt_status row_queue_push(row_queue *queue, const token_row *row) {
    const bt_status status = check(queue, row);
    if (status != BT_OK) return status;
    const token_row queued = mutated(row);
    const size_t bytes = row_record_bytes(widths_of(queue, queued.support_count));
    if (bytes > queue->options.bytes_max - queue->bytes) return BT_ERR_REQUEST_FULL;
    uint8_t *to = make_room(queue, bytes, block_bytes(queue, bytes));
    if (to == NULL) return BT_ERR_WORKER_MEMORY;
    row_record_encode(&queued, to);
    queue->is_reserved = false;
    queue->last->used += bytes;
    queue->bytes += bytes;
    queue->pushed++;
    return BT_OK;
}

bt_status row_queue_push_first(row_queue *queue, const metadata_row *row) {
    const token_row first = token_row_of(row);
    return row_queue_push(queue, &first);
}

/* ---- out ------------------------------------------------------------------------------------- */

size_t row_queue_bytes(const row_queue *queue) {
    return queue->bytes;
}

uint32_t row_queue_pushed(const row_queue *queue) {
    return queue->pushed;
}

uint32_t row_queue_taken(const row_queue *queue) {
    return queue->taken;
}

/* Bytes to take from the first block: up to the end of the last record that fits, or else a part of
 * the first one. Counts the records that are whole with it. */
static size_t measure(row_queue *queue, size_t bytes_max) {
    const bt_block *block = queue->first;
    size_t count = 0;
    size_t record = queue->record_left;
    while (queue->first_at + count < block->used) {
        if (record == 0) record = bt_load_le32(block->bytes + queue->first_at + count);
        BT_ASSERT(record > 0 && record <= block->used - queue->first_at - count);
        if (record > bytes_max - count) break;
        count += record;
        record = 0;
        queue->taken++;
    }
    queue->record_left = 0;
    if (count > 0) return count;
    queue->record_left = record - bytes_max;
    return bytes_max;
}

bool row_queue_take(row_queue *queue, size_t bytes_max, row_slice *out) {
    BT_ASSERT(bytes_max > 0);
    if (queue->bytes == 0) return false;
    bt_block *block = queue->first;
    const size_t count = measure(queue, bytes_max);
    *out = (row_slice){.block = block, .bytes = block->bytes + queue->first_at, .count = count};
    if (bt_mutant(BT_MUTANT_QUEUE_NOT_CLEARED)) {
        bt_block_hold(block);
        return true;
    }
    queue->first_at += count;
    queue->bytes -= count;
    const bool has_more = queue->first_at < block->used;
    /* Rows like these would not fit behind it: it is the taker's alone now. */
    const bool is_last = block == queue->last;
    const bool is_full = !is_last || (!queue->is_reserved && block->capacity - block->used < count);
    if (has_more || !is_full) {
        bt_block_hold(block);
    } else {
        (void)forget_first(queue);
    }
    return true;
}
