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
    if (b->draw_offsets != NULL && b->draw_offsets[0] != 0)
        return refuse("draw offsets do not start at 0", 0);
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
    return BT_OK;
}

static bt_status check_draws(const model_runner *runner, const model_batch *b, uint32_t s) {
    if (b->samples[s] > 1) return refuse("samples is neither 0 nor 1", s);
    const model_draws draws = model_draws_of(b, s);
    if (draws.end < draws.first || draws.end > MODEL_BATCH_MAX)
        return refuse("draw offsets fall or are too large", s);
    if ((draws.end > draws.first) != (b->samples[s] == 1))
        return refuse("draws without samples, or samples without a draw", s);
    if (draws.end > draws.first && (b->sampling == NULL || b->rows == NULL))
        return refuse("samples without parameters or rows", s);
    for (uint32_t d = draws.first; d < draws.end; d++) {
        if (!sampler_params_are_valid(&b->sampling[d], runner->m->card.geometry.vocab_size))
            return refuse("sampling parameters are not valid", s);
        if (!sampler_row_is_valid(&b->sampling[d], &b->rows[d]))
            return refuse("a row lacks an array", s);
    }
    return BT_OK;
}

static bool are_ids(const int32_t *ids, uint32_t count, uint32_t vocab_size) {
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab_size) return false;
    return true;
}

static bt_status check_scores(const model_runner *runner, const model_batch *b, uint32_t s) {
    if (b->scores == NULL || b->scores[s].count == 0) return BT_OK;
    const uint32_t vocab_size = runner->m->card.geometry.vocab_size;
    const model_scores *scores = &b->scores[s];
    const uint32_t tokens = b->token_offsets[s + 1] - b->token_offsets[s];
    if (scores->first >= tokens || scores->count > tokens - scores->first)
        return refuse("scores of tokens that are not there", s);
    if (scores->top_count > SAMPLER_TOP_MAX || scores->id_count > SAMPLER_IDS_MAX)
        return refuse("scores want too many ids", s);
    if (scores->targets == NULL || scores->logprobs == NULL ||
        (scores->top_count > 0 && scores->top == NULL) ||
        (scores->id_count > 0 && (scores->ids == NULL || scores->id_logprobs == NULL)))
        return refuse("scores lack an array", s);
    if (!are_ids(scores->targets, scores->count, vocab_size) ||
        !are_ids(scores->ids, scores->id_count, vocab_size))
        return refuse("scores of an id out of range", s);
    return BT_OK;
}

static uint32_t first_written_page(const model_runner *runner, const model_batch *b, uint32_t s) {
    return b->first_positions[s] / runner->kv.page_tokens;
}

/* Every page that holds a position of the sequence exists; those it writes are its own. */
static bt_status check_pages(model_runner *runner, const model_batch *b, uint32_t s) {
    const uint32_t page_tokens = runner->kv.page_tokens;
    const uint32_t tokens = b->token_offsets[s + 1] - b->token_offsets[s];
    const uint32_t *pages = b->page_ids + b->page_offsets[s];
    const uint32_t count = (b->first_positions[s] + tokens - 1) / page_tokens + 1;
    if (b->page_offsets[s + 1] - b->page_offsets[s] < count)
        return refuse("the page table is too short", s);
    for (uint32_t i = 0; i < count; i++)
        if (pages[i] >= runner->kv_page_count) return refuse("page id out of range", s);
    for (uint32_t i = first_written_page(runner, b, s); i < count; i++) {
        if (runner->page_stamp[pages[i]] == runner->step)
            return refuse("a page is written twice", s);
        runner->page_stamp[pages[i]] = runner->step;
    }
    return BT_OK;
}

/* With the pages of all sequences stamped: those that are only read may be shared, but what one
 * writes no other place of a page table holds. */
static bt_status check_read_pages(const model_runner *runner, const model_batch *b, uint32_t s) {
    const uint32_t *pages = b->page_ids + b->page_offsets[s];
    for (uint32_t i = 0; i < first_written_page(runner, b, s); i++)
        if (runner->page_stamp[pages[i]] == runner->step)
            return refuse("a page is read that this step writes", s);
    return BT_OK;
}

static void fill_rows(model_runner *runner, const model_batch *b, uint32_t s) {
    const uint32_t first = b->token_offsets[s];
    const uint32_t end = b->token_offsets[s + 1];
    const model_draws draws = model_draws_of(b, s);
    for (uint32_t t = first; t < end; t++) {
        runner->position[t] = b->first_positions[s] + (t - first);
        runner->sequence[t] = s;
        const uint32_t items =
            (model_is_scored(b, s, t) ? 1U : 0U) + (t + 1 == end ? draws.end - draws.first : 0U);
        if (items == 0) continue;
        const uint32_t kept = runner->kept_count++;
        runner->kept_token[kept] = t;
        runner->kept_item[kept + 1] = runner->kept_item[kept] + items;
    }
}

bt_status model_batch_prepare(model_runner *runner, const model_batch *batch) {
    bt_status status = check_arrays(runner, batch);
    runner->step++;
    for (uint32_t s = 0; status == BT_OK && s < batch->sequences; s++) {
        status = check_tokens(runner, batch, s);
        if (status == BT_OK) status = check_draws(runner, batch, s);
        if (status == BT_OK) status = check_scores(runner, batch, s);
        if (status == BT_OK) status = check_pages(runner, batch, s);
    }
    for (uint32_t s = 0; status == BT_OK && s < batch->sequences; s++)
        status = check_read_pages(runner, batch, s);
    if (status != BT_OK) return status;
    runner->kept_count = 0;
    runner->kept_item[0] = 0;
    for (uint32_t s = 0; s < batch->sequences; s++)
        fill_rows(runner, batch, s);
    return BT_OK;
}
