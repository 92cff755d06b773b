/* The rules a batch must keep, checked before anything is written. */
#include <string.h>

#include "base/log.h"
#include "kernels/model/model_runner_internal.h"

static bt_status refuse(const char *why, uint32_t sequence) {
    bt_log_error("kernels", "batch refused: sequence %u: %s", sequence, why);
    return BT_ERR_CALLER_ARGUMENT;
}

static bt_status check_arrays(const model_runner *runner, const model_batch *b) {
    if (b->sequences == 0) return refuse("tokens without sequences", 0);
    if (b->sequences > runner->rows_max) return refuse("too many sequences", b->sequences);
    if (b->tokens > runner->tokens_max) return refuse("too many tokens", b->sequences);
    if (b->token_offsets == NULL || b->token_ids == NULL || b->first_positions == NULL ||
        b->page_offsets == NULL || b->page_ids == NULL || b->samples == NULL)
        return refuse("an array is missing", 0);
    if (b->token_offsets[0] != 0 || b->page_offsets[0] != 0)
        return refuse("offsets do not start at 0", 0);
    for (uint32_t s = 0; s < b->sequences; s++) {
        if (b->token_offsets[s + 1] <= b->token_offsets[s]) return refuse("no query tokens", s);
        if (b->page_offsets[s + 1] < b->page_offsets[s]) return refuse("page offsets fall", s);
    }
    if (b->token_offsets[b->sequences] != b->tokens)
        return refuse("the offsets do not add up to the tokens", b->sequences);
    return BT_OK;
}

static bt_status check_tokens(const model_runner *runner, const model_batch *b, uint32_t s) {
    const model_geometry *g = &runner->m->card.geometry;
    const uint32_t tokens = b->token_offsets[s + 1] - b->token_offsets[s];
    if (b->first_positions[s] >= g->context_tokens ||
        tokens > g->context_tokens - b->first_positions[s])
        return refuse("positions beyond the context", s);
    for (uint32_t t = b->token_offsets[s]; t < b->token_offsets[s + 1]; t++)
        if (b->token_ids[t] < 0 || (uint32_t)b->token_ids[t] >= g->vocab_size)
            return refuse("token id out of range", s);
    if (b->samples[s] > 1) return refuse("samples is neither 0 nor 1", s);
    if (b->samples[s] == 1 && (b->sampling == NULL || b->rows == NULL))
        return refuse("samples without parameters or rows", s);
    return BT_OK;
}

/* Every page that holds a position of the sequence exists; those it writes are its own. */
static bt_status check_pages(model_runner *runner, const model_batch *b, uint32_t s) {
    const uint32_t page_tokens = runner->kv.page_tokens;
    const uint32_t tokens = b->token_offsets[s + 1] - b->token_offsets[s];
    const uint32_t *pages = b->page_ids + b->page_offsets[s];
    const uint32_t first_written = b->first_positions[s] / page_tokens;
    const uint32_t count = (b->first_positions[s] + tokens - 1) / page_tokens + 1;
    if (b->page_offsets[s + 1] - b->page_offsets[s] < count)
        return refuse("the page table is too short", s);
    for (uint32_t i = 0; i < count; i++) {
        if (pages[i] >= runner->kv_page_count) return refuse("page id out of range", s);
        if (i < first_written) continue;
        if (runner->page_stamp[pages[i]] == runner->step)
            return refuse("a page is written twice", s);
        runner->page_stamp[pages[i]] = runner->step;
    }
    return BT_OK;
}

static void fill_rows(model_runner *runner, const model_batch *b, uint32_t s) {
    const uint32_t first = b->token_offsets[s];
    const uint32_t end = b->token_offsets[s + 1];
    for (uint32_t t = first; t < end; t++) {
        runner->position[t] = b->first_positions[s] + (t - first);
        runner->sequence[t] = s;
    }
    if (b->samples[s] == 0) return;
    runner->sample_token[runner->sample_count] = end - 1;
    runner->sample_row[runner->sample_count] = s;
    runner->sample_count++;
}

bt_status model_batch_prepare(model_runner *runner, const model_batch *batch) {
    bt_status status = check_arrays(runner, batch);
    if (status != BT_OK) return status;
    runner->step++;
    runner->sample_count = 0;
    for (uint32_t s = 0; s < batch->sequences; s++) {
        status = check_tokens(runner, batch, s);
        if (status == BT_OK) status = check_pages(runner, batch, s);
        if (status != BT_OK) return status;
        fill_rows(runner, batch, s);
    }
    return BT_OK;
}
