/* The arrays of a step. What every step needs is made at creation. Mask rows, top and id
 * log-probabilities and scores of prompts have arrays that are empty until a request asks for them
 * and grow to the most that one step has needed; they change only while no step runs. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

bt_status prefill_batch_init(prefill_core *core) {
    prefill_batch *s = &core->step;
    const prefill_core_options *o = &core->options;
    const size_t n = o->prompts_max;
    s->draws_max = PROTO_SAMPLES_MAX - 1 + o->prompts_max;
    s->attempts = bt_calloc(n, sizeof *s->attempts);
    s->chosen = bt_calloc(n, sizeof *s->chosen);
    s->limits = bt_calloc(n, sizeof *s->limits);
    s->counts = bt_calloc(n, sizeof *s->counts);
    s->token_offsets = bt_calloc(n + 1, sizeof *s->token_offsets);
    s->token_ids = bt_calloc(o->chunk_tokens, sizeof *s->token_ids);
    s->first_positions = bt_calloc(n, sizeof *s->first_positions);
    s->page_offsets = bt_calloc(n + 1, sizeof *s->page_offsets);
    s->page_ids = bt_calloc(n * core->pages_per_attempt, sizeof *s->page_ids);
    s->samples = bt_calloc(n, sizeof *s->samples);
    s->draw_offsets = bt_calloc(n + 1, sizeof *s->draw_offsets);
    s->sampling = bt_calloc(s->draws_max, sizeof *s->sampling);
    s->rows = bt_calloc(s->draws_max, sizeof *s->rows);
    s->scores = bt_calloc(n, sizeof *s->scores);
    const bool is_complete =
        s->attempts != NULL && s->chosen != NULL && s->limits != NULL && s->counts != NULL &&
        s->token_offsets != NULL && s->token_ids != NULL && s->first_positions != NULL &&
        s->page_offsets != NULL && s->page_ids != NULL && s->samples != NULL &&
        s->draw_offsets != NULL && s->sampling != NULL && s->rows != NULL && s->scores != NULL;
    return is_complete ? BT_OK : BT_ERR_WORKER_MEMORY;
}

void prefill_batch_fini(prefill_core *core) {
    prefill_batch *s = &core->step;
    bt_free(s->attempts);
    bt_free(s->chosen);
    bt_free(s->limits);
    bt_free(s->counts);
    bt_free(s->token_offsets);
    bt_free(s->token_ids);
    bt_free(s->first_positions);
    bt_free(s->page_offsets);
    bt_free(s->page_ids);
    bt_free(s->samples);
    bt_free(s->draw_offsets);
    bt_free(s->sampling);
    bt_free(s->rows);
    bt_free(s->scores);
    for (size_t i = 0; i < PREFILL_ARRAY_COUNT; i++)
        bt_free(s->arrays[i].items);
}

void prefill_batch_clear(prefill_core *core) {
    prefill_batch *s = &core->step;
    s->batch = (model_batch){
        .token_offsets = s->token_offsets,
        .token_ids = s->token_ids,
        .first_positions = s->first_positions,
        .page_offsets = s->page_offsets,
        .page_ids = s->page_ids,
        .samples = s->samples,
        .sampling = s->sampling,
        .rows = s->rows,
    };
    for (size_t i = 0; i < PREFILL_ARRAY_COUNT; i++)
        s->arrays[i].used = 0;
}

/* ---- what a chunk needs ---------------------------------------------------------------------- */

uint32_t prefill_chunk_draws(const prefill_attempt *a, uint32_t tokens) {
    const bool is_last = a->computed_tokens + tokens == a->prompt_tokens;
    return is_last && a->generation.max_new_tokens > 0 ? a->generation.samples : 0;
}

/* The logits of a token score the one behind it; the prompt's last token has none behind it. */
static model_scores scores_of(const prefill_attempt *a, uint32_t tokens) {
    const proto_generation *g = &a->generation;
    if (!g->wants_prompt_logprobs) return (model_scores){0};
    const uint32_t start = a->computed_tokens;
    const uint32_t first = start < g->prompt_logprobs_from ? g->prompt_logprobs_from : start;
    uint32_t end = start + tokens;
    if (end > a->prompt_tokens - 1) end = a->prompt_tokens - 1;
    if (first >= end) return (model_scores){0};
    return (model_scores){.first = first - start,
                          .count = end - first,
                          .targets = attempt_words_prompt(&a->words) + first + 1,
                          .vocab_limit = g->vocab_limit,
                          .top_count = g->top_logprobs,
                          .id_count = g->logprob_id_count,
                          .ids = attempt_words_logprob_ids(&a->words)};
}

size_t prefill_chunk_score_bytes(const prefill_attempt *a, uint32_t tokens) {
    const model_scores scores = scores_of(a, tokens);
    return scores.count == 0 ? 0 : scores.count * proto_prompt_logprob_bytes(&a->generation);
}

uint32_t prefill_batch_limit(const prefill_core *core, const prefill_attempt *a, uint32_t draws,
                             size_t score_bytes) {
    const proto_generation *g = &a->generation;
    uint32_t tokens = a->prompt_tokens - a->computed_tokens;
    if (tokens > core->options.chunk_tokens) tokens = core->options.chunk_tokens;
    const uint32_t scored = scores_of(a, tokens).count;
    if (scored > 0) {
        size_t room = (PREFILL_SCORE_BYTES_MAX - score_bytes) / proto_prompt_logprob_bytes(g);
        if (room < scored) tokens = scores_of(a, tokens).first + (uint32_t)room;
    }
    if (tokens > 0 && draws + prefill_chunk_draws(a, tokens) > core->step.draws_max) tokens--;
    return tokens;
}

/* ---- filling --------------------------------------------------------------------------------- */

/* Bytes of each array that a chunk needs. */
static void measure(const prefill_core *core, const prefill_attempt *a, uint32_t tokens,
                    size_t bytes_out[PREFILL_ARRAY_COUNT]) {
    const proto_generation *g = &a->generation;
    const size_t draws = prefill_chunk_draws(a, tokens);
    const size_t scored = scores_of(a, tokens).count;
    const size_t support =
        g->mask_mode != SAMPLER_MASK_OFF ? draws * membership_row_entries(&core->member) : 0;
    bytes_out[PREFILL_SUPPORT_IDS] = support * sizeof(int32_t);
    bytes_out[PREFILL_SUPPORT_LOGPROBS] =
        g->mask_mode == SAMPLER_MASK_SUPPORT ? support * sizeof(float) : 0;
    bytes_out[PREFILL_TOPS] = draws * g->top_logprobs * sizeof(sampler_top);
    bytes_out[PREFILL_ID_LOGPROBS] = draws * g->logprob_id_count * sizeof(float);
    bytes_out[PREFILL_SCORES] = scored * sizeof(float);
    bytes_out[PREFILL_SCORE_TOPS] = scored * g->top_logprobs * sizeof(sampler_top);
    bytes_out[PREFILL_SCORE_IDS] = scored * g->logprob_id_count * sizeof(float);
}

static bool make_room(prefill_array *array, size_t bytes) {
    const size_t need = array->used + bytes;
    if (need <= array->capacity) return true;
    bt_free(array->items); /* nothing is in it before the step */
    array->capacity = 0;
    array->items = bt_malloc(need);
    if (array->items != NULL) array->capacity = need;
    return array->items != NULL;
}

bt_status prefill_batch_add(prefill_core *core, prefill_attempt *a, uint32_t tokens) {
    prefill_batch *s = &core->step;
    const uint32_t at = s->batch.sequences;
    const uint32_t end = a->computed_tokens + tokens;
    const uint32_t pages = kv_pages_for(end, core->options.page_tokens);
    size_t bytes[PREFILL_ARRAY_COUNT];
    BT_ASSERT(tokens > 0 && tokens <= core->options.chunk_tokens - s->batch.tokens);
    BT_ASSERT(at < core->options.prompts_max);
    BT_ASSERT(pages <= a->page_count);
    BT_ASSERT(a->computed_tokens / core->options.page_tokens >= a->shared_count);
    measure(core, a, tokens, bytes);
    for (size_t i = 0; i < PREFILL_ARRAY_COUNT; i++)
        if (!make_room(&s->arrays[i], bytes[i])) return BT_ERR_WORKER_MEMORY;
    for (size_t i = 0; i < PREFILL_ARRAY_COUNT; i++)
        s->arrays[i].used += bytes[i];
    s->attempts[at] = a;
    s->first_positions[at] = a->computed_tokens;
    memcpy(s->token_ids + s->batch.tokens, attempt_words_prompt(&a->words) + a->computed_tokens,
           tokens * sizeof *s->token_ids);
    memcpy(s->page_ids + s->page_offsets[at], a->pages, pages * sizeof *a->pages);
    s->page_offsets[at + 1] = s->page_offsets[at] + pages;
    s->token_offsets[at + 1] = s->token_offsets[at] + tokens;
    s->samples[at] = prefill_chunk_draws(a, tokens) > 0;
    s->scores[at] = scores_of(a, tokens);
    s->batch.sequences++;
    s->batch.tokens += tokens;
    return BT_OK;
}

/* The next `bytes` of an array; NULL for none. */
static void *carve(prefill_array *array, size_t bytes) {
    if (bytes == 0) return NULL;
    void *items = (uint8_t *)array->items + array->used;
    array->used += bytes;
    BT_ASSERT(array->used <= array->capacity);
    return items;
}

/* One draw; the first token has no output before it. */
static void set_draw(prefill_core *core, const prefill_attempt *a, uint32_t sample, uint32_t row) {
    prefill_batch *s = &core->step;
    const proto_generation *g = &a->generation;
    const bool has_mask = g->mask_mode != SAMPLER_MASK_OFF;
    const bool has_logprobs = g->mask_mode == SAMPLER_MASK_SUPPORT;
    const size_t cap = has_mask ? membership_row_entries(&core->member) : 0;
    s->sampling[row] = (sampler_params){
        .temperature = g->temperature,
        .top_p = g->top_p,
        .top_k = g->top_k,
        .mask_mode = g->mask_mode,
        .mask_max_tokens = (uint32_t)cap,
        .mask_bounded = g->mask_bounded,
        .vocab_limit = g->vocab_limit,
        .wants_logprob = g->wants_logprob,
        .seed = proto_sample_seed(g->seed, sample),
        .filter = g->filter,
        .min_p = g->min_p,
        .frequency_penalty = g->frequency_penalty,
        .presence_penalty = g->presence_penalty,
        .repetition_penalty = g->repetition_penalty,
        .banned_count = g->banned_id_count,
        .banned_ids = g->stop_ids,
        .bias_count = g->bias_count,
        .bias_ids = attempt_words_bias_ids(&a->words),
        .biases = attempt_words_biases(&a->words),
        .top_logprobs = g->top_logprobs,
        .logprob_id_count = g->logprob_id_count,
        .logprob_ids = attempt_words_logprob_ids(&a->words),
    };
    prefill_array *arrays = s->arrays;
    s->rows[row] = (sampler_row){
        .support_ids = carve(&arrays[PREFILL_SUPPORT_IDS], cap * sizeof(int32_t)),
        .support_logprobs =
            carve(&arrays[PREFILL_SUPPORT_LOGPROBS], has_logprobs ? cap * sizeof(float) : 0),
        .top = carve(&arrays[PREFILL_TOPS], g->top_logprobs * sizeof(sampler_top)),
        .id_logprobs = carve(&arrays[PREFILL_ID_LOGPROBS], g->logprob_id_count * sizeof(float)),
    };
}

/* What is not written shows: a score is a number, a place without an id has none. */
static void set_scores(prefill_batch *s, model_scores *scores) {
    const size_t tops = (size_t)scores->count * scores->top_count;
    const size_t ids = (size_t)scores->count * scores->id_count;
    scores->logprobs = carve(&s->arrays[PREFILL_SCORES], scores->count * sizeof(float));
    scores->top = carve(&s->arrays[PREFILL_SCORE_TOPS], tops * sizeof(sampler_top));
    scores->id_logprobs = carve(&s->arrays[PREFILL_SCORE_IDS], ids * sizeof(float));
    for (uint32_t i = 0; i < scores->count; i++)
        scores->logprobs[i] = NAN;
    for (size_t i = 0; i < tops; i++)
        scores->top[i] = (sampler_top){.id = -1, .logprob = -INFINITY};
}

void prefill_batch_seal(prefill_core *core) {
    prefill_batch *s = &core->step;
    bool has_many = false;
    bool has_scores = false;
    for (size_t i = 0; i < PREFILL_ARRAY_COUNT; i++)
        s->arrays[i].used = 0;
    for (uint32_t at = 0; at < s->batch.sequences; at++) {
        has_many = has_many || (s->samples[at] && s->attempts[at]->generation.samples > 1);
        has_scores = has_scores || s->scores[at].count > 0;
    }
    for (uint32_t at = 0, row = 0; at < s->batch.sequences; at++) {
        const prefill_attempt *a = s->attempts[at];
        if (!has_many) row = at;
        s->draw_offsets[at] = row;
        for (uint32_t i = 0; s->samples[at] && i < a->generation.samples; i++)
            set_draw(core, a, i, row++);
        s->draw_offsets[at + 1] = row;
        if (s->scores[at].count > 0) set_scores(s, &s->scores[at]);
    }
    s->batch.draw_offsets = has_many ? s->draw_offsets : NULL;
    s->batch.scores = has_scores ? s->scores : NULL;
}

const sampler_row *prefill_batch_rows(const prefill_batch *s, uint32_t at) {
    return s->rows + s->draw_offsets[at];
}
