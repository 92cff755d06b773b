/* Parameters of draws from what the request says, and where rows are drawn to: supports into the
 * queues of their samples, what else is asked for into arrays. No opt-in, no cost: each array is
 * made when the first request asks for what it holds. */
#include "base/mem.h"
#include "decode/decode_internal.h"

void decode_sampling_fini(decode_core *core) {
    bt_free(core->step.seen_ids);
    bt_free(core->step.top);
    bt_free(core->step.id_logprobs);
}

bt_status decode_sampling_need(decode_core *core, const proto_generation *g) {
    decode_batch *b = &core->step;
    const size_t n = core->options.sequences_max;
    if (g->mask_mode != SAMPLER_MASK_OFF && b->seen_ids == NULL) {
        b->seen_ids = bt_calloc(row_seen_bytes(core->options.vocab_size), 1);
        if (b->seen_ids == NULL) return BT_ERR_WORKER_MEMORY;
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
        .mask_max_tokens =
            g->mask_mode != SAMPLER_MASK_OFF ? membership_row_entries(&core->member) : 0,
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

bool decode_prepare_row(decode_core *core, decode_sample *s) {
    if (s->attempt->generation.mask_mode == SAMPLER_MASK_OFF) return true;
    if (row_queue_reserve(s->queue, &s->support_room) == BT_OK) return true;
    decode_finish_error(core, s, BT_ERR_WORKER_MEMORY, "no memory for the next row");
    return false;
}

sampler_row decode_row_for(const decode_core *core, const decode_sample *s, uint32_t at) {
    const decode_batch *b = &core->step;
    const proto_generation *g = &s->attempt->generation;
    sampler_row row = {0};
    if (g->mask_mode != SAMPLER_MASK_OFF) {
        row.support_ids = s->support_room;
        row.is_joined = 1;
    }
    if (g->top_logprobs > 0) row.top = b->top + (size_t)at * SAMPLER_TOP_MAX;
    if (g->logprob_id_count > 0) row.id_logprobs = b->id_logprobs + (size_t)at * SAMPLER_IDS_MAX;
    return row;
}
