/* Growing arrays: entries, ids, log-probabilities, top log-probabilities, those of asked ids. In
 * selected mode an entry has one log-probability in the flat array, in support mode one per id (and
 * the selected one besides, in its entry). Widths are known from the entry, so that no offsets are
 * stored. */
#include "pd_buffers/row_queue.h"

#include <stdbool.h>
#include <string.h>

#include "base/assert.h"
#include "base/fault.h"
#include "base/mem.h"

typedef struct queue_entry {
    int32_t token;
    uint32_t has_logprob;
    float token_logprob;
    float selected_logprob; /* support mode; in selected mode it is in the flat array */
    uint32_t support_count;
    uint32_t support_size;
    uint64_t weights_version;
} queue_entry;

struct row_queue {
    row_queue_options options;
    queue_entry *entries;
    int32_t *ids;
    float *logprobs;
    row_top *top;
    float *id_logprobs;
    size_t entry_count, entry_capacity;
    size_t id_count, id_capacity;
    size_t logprob_count, logprob_capacity;
    size_t top_capacity, id_logprob_capacity; /* entry_count times the width are in use */
    size_t encoded_bytes;
};

bt_status row_queue_create(const row_queue_options *options, row_queue **out) {
    if (options->mask_mode > ROW_MASK_SUPPORT) return BT_ERR_CALLER_ARGUMENT;
    const uint32_t cap = options->mask_mode == ROW_MASK_OFF ? 0 : options->cap;
    const row_widths widest = {.mask_mode = options->mask_mode,
                               .support_count = cap,
                               .top_count = options->top_logprobs,
                               .id_logprob_count = options->logprob_ids};
    if (options->bytes_max < row_record_bytes(widest)) return BT_ERR_CALLER_ARGUMENT;
    row_queue *queue = bt_calloc(1, sizeof *queue);
    if (queue == NULL) return BT_ERR_WORKER_MEMORY;
    queue->options = *options;
    queue->options.cap = cap;
    *out = queue;
    return BT_OK;
}

void row_queue_destroy(row_queue *queue) {
    if (queue == NULL) return;
    bt_free(queue->entries);
    bt_free(queue->ids);
    bt_free(queue->logprobs);
    bt_free(queue->top);
    bt_free(queue->id_logprobs);
    bt_free(queue);
}

/* Makes room for `more` elements; grows by doubling. */
static bool reserve(void **array, size_t *capacity, size_t count, size_t more, size_t bytes_each) {
    if (more == 0 || more <= *capacity - count) return true;
    size_t wanted = *capacity < 16 ? 16 : *capacity * 2;
    while (wanted < count + more)
        wanted *= 2;
    void *grown = bt_realloc(*array, wanted * bytes_each);
    if (grown == NULL) return false;
    *array = grown;
    *capacity = wanted;
    return true;
}

/* Log-probabilities of one entry in the flat array. */
static size_t logprob_width(const row_queue *queue, uint32_t support_count) {
    switch ((row_mask_mode)queue->options.mask_mode) {
    case ROW_MASK_OFF: return 0;
    case ROW_MASK_SELECTED: return 1;
    case ROW_MASK_SUPPORT: return support_count;
    }
    return 0;
}

static row_widths widths_of(const row_queue *queue, uint32_t support_count) {
    return (row_widths){.mask_mode = queue->options.mask_mode,
                        .support_count = support_count,
                        .top_count = queue->options.top_logprobs,
                        .id_logprob_count = queue->options.logprob_ids};
}

static bool reserve_row(row_queue *queue, uint32_t support_count) {
    void *entries = queue->entries;
    void *ids = queue->ids;
    void *logprobs = queue->logprobs;
    void *top = queue->top;
    void *id_logprobs = queue->id_logprobs;
    const size_t top_width = queue->options.top_logprobs;
    const size_t id_width = queue->options.logprob_ids;
    const bool is_reserved =
        reserve(&entries, &queue->entry_capacity, queue->entry_count, 1, sizeof(queue_entry)) &&
        reserve(&ids, &queue->id_capacity, queue->id_count, support_count, sizeof(int32_t)) &&
        reserve(&logprobs, &queue->logprob_capacity, queue->logprob_count,
                logprob_width(queue, support_count), sizeof(float)) &&
        reserve(&top, &queue->top_capacity, queue->entry_count * top_width, top_width,
                sizeof(row_top)) &&
        reserve(&id_logprobs, &queue->id_logprob_capacity, queue->entry_count * id_width, id_width,
                sizeof(float));
    queue->entries = entries;
    queue->ids = ids;
    queue->logprobs = logprobs;
    queue->top = top;
    queue->id_logprobs = id_logprobs;
    return is_reserved;
}

static void append_arrays(row_queue *queue, const token_row *row, uint32_t count) {
    const uint32_t mode = queue->options.mask_mode;
    if (count > 0) memcpy(queue->ids + queue->id_count, row->support_ids, sizeof(int32_t) * count);
    queue->id_count += count;
    if (mode == ROW_MASK_SELECTED) {
        queue->logprobs[queue->logprob_count++] = row->selected_logprob;
    } else if (mode == ROW_MASK_SUPPORT && count > 0) {
        memcpy(queue->logprobs + queue->logprob_count, row->support_logprobs,
               sizeof(float) * count);
        queue->logprob_count += count;
    }
    if (row->top_count > 0)
        memcpy(queue->top + queue->entry_count * row->top_count, row->top,
               sizeof(row_top) * row->top_count);
    if (row->id_logprob_count > 0)
        memcpy(queue->id_logprobs + queue->entry_count * row->id_logprob_count, row->id_logprobs,
               sizeof(float) * row->id_logprob_count);
}

bt_status row_queue_push(row_queue *queue, const token_row *row) {
    const uint32_t mode = queue->options.mask_mode;
    uint32_t count = row->support_count;
    if (row->mask_mode != mode) return BT_ERR_CALLER_ARGUMENT;
    if (count > queue->options.cap) return BT_ERR_CALLER_LIMIT;
    if (count > 0 && row->support_ids == NULL) return BT_ERR_CALLER_ARGUMENT;
    if (mode == ROW_MASK_SUPPORT && count > 0 && row->support_logprobs == NULL)
        return BT_ERR_CALLER_ARGUMENT;
    if (row->top_count != queue->options.top_logprobs ||
        row->id_logprob_count != queue->options.logprob_ids)
        return BT_ERR_CALLER_ARGUMENT;
    if (bt_mutant(BT_MUTANT_DROP_ID) && count > 1) count--;
    const size_t bytes = row_record_bytes(widths_of(queue, count));
    if (bytes > queue->options.bytes_max - queue->encoded_bytes) return BT_ERR_REQUEST_FULL;
    if (!reserve_row(queue, count)) return BT_ERR_WORKER_MEMORY;
    append_arrays(queue, row, count);
    queue->entries[queue->entry_count++] = (queue_entry){
        .token = row->token,
        .has_logprob = row->has_logprob,
        .token_logprob = row->token_logprob,
        .selected_logprob = row->selected_logprob,
        .support_count = count,
        .support_size = row->support_size,
        .weights_version = row->weights_version,
    };
    queue->encoded_bytes += bytes;
    return BT_OK;
}

bt_status row_queue_push_first(row_queue *queue, const metadata_row *row) {
    const token_row first = token_row_of(row);
    return row_queue_push(queue, &first);
}

uint32_t row_queue_count(const row_queue *queue) {
    return (uint32_t)queue->entry_count;
}

size_t row_queue_bytes(const row_queue *queue) {
    return queue->encoded_bytes;
}

size_t row_queue_take(row_queue *queue, uint8_t *out, size_t out_bytes) {
    const uint32_t mode = queue->options.mask_mode;
    size_t written = 0;
    size_t id = 0;
    size_t logprob = 0;
    BT_ASSERT(out_bytes >= queue->encoded_bytes);
    for (size_t i = 0; i < queue->entry_count; i++) {
        const queue_entry *entry = &queue->entries[i];
        size_t width = logprob_width(queue, entry->support_count);
        if (mode == ROW_MASK_SELECTED && bt_mutant(BT_MUTANT_SELECTED_FULL_WIDTH)) {
            width = entry->support_count;
            if (logprob >= queue->logprob_count) logprob = queue->logprob_count - 1;
        }
        const token_row row = {
            .token = entry->token,
            .mask_mode = mode,
            .has_logprob = entry->has_logprob,
            .token_logprob = entry->token_logprob,
            .selected_logprob =
                mode == ROW_MASK_SELECTED ? queue->logprobs[logprob] : entry->selected_logprob,
            .support_count = entry->support_count,
            .support_size = entry->support_size,
            .weights_version = entry->weights_version,
            .support_ids = entry->support_count > 0 ? queue->ids + id : NULL,
            .support_logprobs = entry->support_count > 0 && mode == ROW_MASK_SUPPORT
                                    ? queue->logprobs + logprob
                                    : NULL,
            .top_count = queue->options.top_logprobs,
            .top = queue->top + i * queue->options.top_logprobs,
            .id_logprob_count = queue->options.logprob_ids,
            .id_logprobs = queue->id_logprobs + i * queue->options.logprob_ids,
        };
        row_record_encode(&row, out + written);
        written += row_record_bytes(widths_of(queue, entry->support_count));
        id += entry->support_count;
        logprob += width;
    }
    BT_ASSERT(written == queue->encoded_bytes);
    if (!bt_mutant(BT_MUTANT_QUEUE_NOT_CLEARED)) row_queue_clear(queue);
    return written;
}

void row_queue_clear(row_queue *queue) {
    queue->entry_count = 0;
    queue->id_count = 0;
    queue->logprob_count = 0;
    queue->encoded_bytes = 0;
}
