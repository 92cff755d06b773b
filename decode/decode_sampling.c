/* Parameters of draws from what the request says, and the arrays that rows are drawn into. No
 * opt-in, no cost: each array is made when the first request asks for what it holds. */
#include "base/mem.h"
#include "decode/decode_internal.h"

static void free_masks(decode_batch *b) {
    bt_free(b->support_ids);
    bt_free(b->support_logprobs);
    bt_free(b->seen_ids);
    b->support_ids = NULL;
    b->support_logprobs = NULL;
    b->seen_ids = NULL;
    b->support_cap = 0;
}

void decode_sampling_fini(decode_core *core) {
    free_masks(&core->step);
    bt_free(core->step.top);
    bt_free(core->step.id_logprobs);
}

static bt_status need_masks(decode_core *core) {
    decode_batch *b = &core->step;
    const uint32_t cap = membership_cap(&core->member);
    if (b->support_cap == cap) return BT_OK;
    /* The cap changes only between sessions, when nothing is in hand; but the first mask of a
     * session may be asked for while a step without masks runs, whose rows point nowhere. */
    free_masks(b);
    const size_t n = core->options.sequences_max;
    size_t entries = 0;
    if (!bt_mul_size(n, cap, &entries)) return BT_ERR_WORKER_MEMORY;
    b->support_ids = bt_calloc(entries, sizeof *b->support_ids);
    b->support_logprobs = bt_calloc(entries, sizeof *b->support_logprobs);
    b->seen_ids = bt_calloc(row_seen_bytes(core->options.vocab_size), 1);
    if (b->support_ids == NULL || b->support_logprobs == NULL || b->seen_ids == NULL) {
        free_masks(b);
        return BT_ERR_WORKER_MEMORY;
    }
    b->support_cap = cap;
    return BT_OK;
}

bt_status decode_sampling_need(decode_core *core, const proto_generation *g) {
    decode_batch *b = &core->step;
    const size_t n = core->options.sequences_max;
    if (g->mask_mode != SAMPLER_MASK_OFF) {
        const bt_status status = need_masks(core);
        if (status != BT_OK) return status;
    }
    if (g->top_logprobs > 0 && b->top == NULL) {
        b->top = bt_calloc(n * SAMPLER_TOP_MAX, sizeof *b->top);
        if (b->top == NULL) return BT_ERR_WORKER_MEMORY;
    }
    if (g->logprob_id_count > 0 && b->id_logprobs == NULL) {
        b->id_logprobs = bt_calloc(n * SAMPLER_IDS_MAX, sizeof *b->id_logprobs);
        if (b->id_logprobs == NULL) return BT_ERR_WORKER_MEMORY;
    }
    return BT_OK;
}

uint32_t decode_top_count(const decode_core *core, const proto_generation *g) {
    const uint32_t vocab_size = core->options.vocab_size;
    const bool is_limited = g->vocab_limit != 0 && g->vocab_limit < vocab_size;
    const uint32_t ids = is_limited ? g->vocab_limit : vocab_size;
    return g->top_logprobs < ids ? g->top_logprobs : ids;
}

sampler_params decode_sampling(const decode_core *core, const decode_sample *s) {
    const decode_attempt *a = s->attempt;
    const proto_generation *g = &a->generation;
    const bool is_banning = s->rows_made < g->min_new_tokens;
    const attempt_words *words = &a->words;
    return (sampler_params){
        .temperature = g->temperature,
        .top_p = g->top_p,
        .top_k = g->top_k,
        .mask_mode = g->mask_mode,
        .mask_max_tokens = g->mask_mode != SAMPLER_MASK_OFF ? membership_cap(&core->member) : 0,
        .mask_bounded = g->mask_bounded,
        .vocab_limit = g->vocab_limit,
        .wants_logprob = g->wants_logprob,
        .seed = proto_sample_seed(g->seed, s->number),
        .filter = g->filter,
        .min_p = g->min_p,
        .frequency_penalty = g->frequency_penalty,
        .presence_penalty = g->presence_penalty,
        .repetition_penalty = g->repetition_penalty,
        .output_ids = s->output_ids,
        .output_count = s->rows_made,
        .banned_count = is_banning ? g->banned_id_count : 0,
        .banned_ids = is_banning ? g->stop_ids : NULL,
        .bias_count = g->bias_count,
        .bias_ids = attempt_words_bias_ids(words),
        .biases = attempt_words_biases(words),
        .top_logprobs = decode_top_count(core, g),
        .logprob_id_count = g->logprob_id_count,
        .logprob_ids = attempt_words_logprob_ids(words),
    };
}

sampler_row decode_row_for(const decode_core *core, const proto_generation *g, uint32_t at) {
    const decode_batch *b = &core->step;
    sampler_row row = {0};
    if (g->mask_mode != SAMPLER_MASK_OFF) {
        row.support_ids = b->support_ids + (size_t)at * b->support_cap;
        row.support_logprobs = b->support_logprobs + (size_t)at * b->support_cap;
    }
    if (g->top_logprobs > 0) row.top = b->top + (size_t)at * SAMPLER_TOP_MAX;
    if (g->logprob_id_count > 0) row.id_logprobs = b->id_logprobs + (size_t)at * SAMPLER_IDS_MAX;
    return row;
}
