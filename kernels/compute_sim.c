/* A token in a page: u64 running hash, i32 token, u32 zero, then the hash repeated as far as the
 * token's share of the page goes. */
#include "kernels/compute_sim.h"

#include <assert.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/math.h"

typedef struct compute_sim {
    compute base;
    compute_sim_options options;
    const model_batch *batch; /* of the running step, or NULL */
    uint64_t due_us;          /* UINT64_MAX until the first poll behind start */
    bt_status next_status;
    uint64_t *page_stamps; /* [kv_page_count]: the last step that wrote the page */
    uint64_t step;
} compute_sim;

typedef struct stored_token {
    uint64_t hash;
    int32_t token;
    uint32_t zero;
} stored_token;

static_assert(sizeof(stored_token) == COMPUTE_SIM_TOKEN_BYTES_MIN, "layout of a stored token");

static uint64_t mix(uint64_t a, uint64_t b) {
    return sim_mix(a, b);
}

static uint64_t extend(uint64_t hash, int32_t token, uint32_t position) {
    return mix(mix(hash, (uint64_t)(uint32_t)token), position);
}

static uint8_t *token_memory(const compute_sim_options *o, const uint32_t *pages,
                             uint32_t position) {
    const uint32_t page = pages[position / o->page_tokens];
    BT_ASSERT(page < o->kv_page_count);
    return (uint8_t *)o->kv_memory + page * o->page_bytes +
           (position % o->page_tokens) * (o->page_bytes / o->page_tokens);
}

static void write_token(const compute_sim_options *o, uint8_t *memory, uint64_t hash,
                        int32_t token) {
    const stored_token stored = {.hash = hash, .token = token};
    const size_t bytes = o->page_bytes / o->page_tokens;
    size_t at = sizeof stored;
    memcpy(memory, &stored, sizeof stored);
    for (; at + sizeof hash <= bytes; at += sizeof hash)
        memcpy(memory + at, &hash, sizeof hash);
    memcpy(memory + at, &hash, bytes - at);
}

static bool read_token(const compute_sim_options *o, const uint8_t *memory, stored_token *out) {
    const size_t bytes = o->page_bytes / o->page_tokens;
    size_t at = sizeof *out;
    memcpy(out, memory, sizeof *out);
    for (; at + sizeof out->hash <= bytes; at += sizeof out->hash) {
        if (memcmp(memory + at, &out->hash, sizeof out->hash) != 0) return false;
    }
    return memcmp(memory + at, &out->hash, bytes - at) == 0 && out->zero == 0;
}

/* The running hash before `position`, read from the pages. false: the chain is broken. */
static bool read_prefix(const compute_sim_options *o, const uint32_t *pages, uint32_t position,
                        uint64_t *hash_out) {
    uint64_t hash = 0;
    stored_token stored;
    if (o->trusts_pages && position > 0) {
        const bool is_whole = read_token(o, token_memory(o, pages, position - 1), &stored);
        *hash_out = stored.hash;
        return is_whole && stored.hash != 0; /* memory that nobody wrote is zeros */
    }
    for (uint32_t p = 0; p < position; p++) {
        if (!read_token(o, token_memory(o, pages, p), &stored)) return false;
        hash = extend(hash, stored.token, p);
        if (stored.hash != hash) return false;
    }
    *hash_out = hash;
    return true;
}

/* ---- draws ----------------------------------------------------------------------------------- */

/* A finite, non-positive log-probability made of 20 bits, exact in float. */
static float logprob_of(uint64_t hash) {
    return -(float)(hash >> 44) / 65536.0f;
}

static uint32_t vocab_of(const compute_sim_options *o, uint32_t limit) {
    return limit != 0 && limit < o->vocab_size ? limit : o->vocab_size;
}

static uint64_t mix_float(uint64_t hash, float value) {
    return mix(hash, math_bits_f32(value));
}

/* By name, or by a bias of -inf. */
static bool is_banned(const sampler_params *params, uint32_t id) {
    for (uint32_t i = 0; i < params->banned_count; i++) {
        if ((uint32_t)params->banned_ids[i] == id) return true;
    }
    for (uint32_t i = 0; i < params->bias_count; i++) {
        if ((uint32_t)params->bias_ids[i] == id && params->biases[i] == -math_inf_f32())
            return true;
    }
    return false;
}

/* Sums do not depend on an order: neither do penalties, bans and biases. */
static uint64_t sum_ids(const int32_t *ids, uint32_t count) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += mix((uint32_t)ids[i], 21);
    return sum;
}

static bool has_penalty(const sampler_params *params) {
    const bool has_repetition =
        params->repetition_penalty != 0.0f && params->repetition_penalty != 1.0f;
    return has_repetition || params->frequency_penalty != 0.0f || params->presence_penalty != 0.0f;
}

/* What was drawn before, whatever the order. */
typedef struct history {
    uint64_t sum; /* sum_ids */
    uint32_t count;
} history;

static history history_of(const sampler_params *params) {
    if (!has_penalty(params)) return (history){0};
    return (history){.sum = sum_ids(params->output_ids, params->output_count),
                     .count = params->output_count};
}

/* The hash of the prefix as the parameters that shape a row change it. */
static uint64_t shape(const sampler_params *params, history drawn, uint64_t hash) {
    if (params->temperature != 1.0f) hash = mix_float(hash, params->temperature);
    if (params->top_p != 1.0f) hash = mix_float(mix(hash, 11), params->top_p);
    if (params->min_p != 0.0f) hash = mix_float(mix(hash, 12), params->min_p);
    if (params->filter != SAMPLER_FILTER_JOINT) hash = mix(mix(hash, 13), params->filter);
    if (drawn.count > 0 && has_penalty(params)) {
        hash = mix_float(mix(hash, 14), params->frequency_penalty);
        hash = mix_float(hash, params->presence_penalty);
        hash = mix_float(hash, params->repetition_penalty);
        hash = mix(mix(hash, drawn.sum), drawn.count);
    }
    if (params->banned_count > 0)
        hash = mix(mix(hash, 15), sum_ids(params->banned_ids, params->banned_count));
    uint64_t biases = 0;
    for (uint32_t i = 0; i < params->bias_count; i++)
        biases += mix_float(mix((uint32_t)params->bias_ids[i], 16), params->biases[i]);
    return params->bias_count > 0 ? mix(hash, biases) : hash;
}

/* The next id from `id` on, round the vocabulary, that can be drawn. There is one. */
static uint32_t next_id(const sampler_params *params, uint32_t vocab, uint32_t id) {
    id %= vocab;
    while (is_banned(params, id))
        id = (id + 1) % vocab;
    return id;
}

/* Each once, although they may stand twice among the banned ids and the biases. */
static uint32_t count_drawable(const sampler_params *params, uint32_t vocab) {
    uint32_t banned = 0;
    sampler_params before = *params;
    before.banned_count = 0;
    before.bias_count = 0;
    for (uint32_t i = 0; i < params->banned_count; i++) {
        const uint32_t id = (uint32_t)params->banned_ids[i];
        banned += id < vocab && !is_banned(&before, id);
        before.banned_count++;
    }
    for (uint32_t i = 0; i < params->bias_count; i++) {
        const uint32_t id = (uint32_t)params->bias_ids[i];
        const bool was_banned = is_banned(&before, id);
        before.bias_count++;
        banned += id < vocab && !was_banned && is_banned(&before, id);
    }
    return vocab - banned;
}

/* `wanted` of the ids that can be drawn, or all; best first, exact in float. */
static uint32_t fill_top(const sampler_params *params, uint32_t vocab, uint64_t hash,
                         uint32_t wanted, sampler_top *top) {
    const uint32_t drawable = count_drawable(params, vocab);
    const uint32_t count = wanted < drawable ? wanted : drawable;
    uint32_t id = (uint32_t)(mix(hash, 4) % vocab);
    for (uint32_t i = 0; i < count; i++) {
        id = next_id(params, vocab, id);
        const float fraction = (float)(mix(hash, id) >> 48) / 65536.0f;
        top[i] = (sampler_top){.id = (int32_t)id++, .logprob = -((float)i + fraction)};
    }
    return count;
}

static float id_logprob(const sampler_params *params, uint32_t vocab, uint64_t hash, int32_t id) {
    if ((uint32_t)id >= vocab || is_banned(params, (uint32_t)id)) return -math_inf_f32();
    return logprob_of(mix(mix(hash, 5), (uint32_t)id));
}

static void clear_row(sampler_row *row) {
    *row = (sampler_row){.token = -1,
                         .status = SAMPLER_INVALID,
                         .support_ids = row->support_ids,
                         .support_logprobs = row->support_logprobs,
                         .is_joined = row->is_joined,
                         .top = row->top,
                         .id_logprobs = row->id_logprobs};
}

static void draw(const compute_sim_options *o, const sampler_params *params, history drawn,
                 uint64_t prefix, uint32_t position, sampler_row *row) {
    const uint32_t vocab = vocab_of(o, params->vocab_limit);
    const uint64_t hash = shape(params, drawn, prefix);
    const uint64_t seeded = mix(mix(hash, params->seed), position);
    clear_row(row);
    if (o->rows != NULL) {
        sim_rows_draw(o->rows, params, hash, seeded, row);
        return;
    }
    const uint32_t drawable = count_drawable(params, vocab);
    if (drawable == 0) return;
    uint32_t count = 1 + (uint32_t)(mix(hash, 1) % o->support_max);
    if (params->top_k != 0 && count > params->top_k) count = params->top_k;
    if (count > drawable) count = drawable;
    const bool has_mask = params->mask_mode != SAMPLER_MASK_OFF;
    const bool is_cut = has_mask && count > params->mask_max_tokens;
    if (has_mask) row->cap_needed = count;
    if (is_cut && params->mask_bounded == 0) {
        row->status = SAMPLER_OVERFLOW;
        return;
    }
    const uint32_t kept = is_cut ? params->mask_max_tokens : count;
    const uint32_t rank = (uint32_t)(seeded % count);
    uint32_t id = (uint32_t)(hash % vocab);
    if (params->mask_mode == SAMPLER_MASK_SUPPORT) (void)sampler_row_logprobs(row, kept);
    for (uint32_t i = 0; i < count; i++) {
        id = next_id(params, vocab, id);
        if (i == rank) row->token = (int32_t)id;
        if (has_mask && (i < kept || i == rank)) {
            const uint32_t at = i < kept ? i : kept - 1;
            row->support_ids[at] = (int32_t)id;
            if (params->mask_mode == SAMPLER_MASK_SUPPORT)
                row->support_logprobs[at] = logprob_of(mix(hash, 3 + i));
        }
        id++;
    }
    row->status = SAMPLER_OK;
    row->support_count = has_mask ? kept : 0;
    row->selected_logprob = has_mask ? logprob_of(mix(hash, 3 + rank)) : 0.0f;
    if (params->wants_logprob == 0) return;
    row->token_logprob = logprob_of(mix(seeded, 2));
    row->top_count = fill_top(params, vocab, hash, params->top_logprobs, row->top);
    for (uint32_t i = 0; i < params->logprob_id_count; i++)
        row->id_logprobs[i] = id_logprob(params, vocab, hash, params->logprob_ids[i]);
}

/* Entry `at` of scores, with the hash of the prefix up to its token. */
static void score(const compute_sim_options *o, const model_scores *scores, uint32_t at,
                  bool is_intact, uint64_t hash) {
    static const sampler_params neutral = {0};
    const uint32_t vocab = vocab_of(o, scores->vocab_limit);
    sampler_top *top = scores->top_count > 0 ? scores->top + (size_t)at * scores->top_count : NULL;
    float *ids = scores->id_count > 0 ? scores->id_logprobs + (size_t)at * scores->id_count : NULL;
    const uint64_t scored = mix(hash, 6);
    if (o->rows != NULL && is_intact) {
        const sampler_scoring scoring = {.target = scores->targets[at],
                                         .vocab_limit = scores->vocab_limit,
                                         .top_count = scores->top_count,
                                         .id_count = scores->id_count,
                                         .ids = scores->ids};
        sim_rows_score(o->rows, &scoring, hash, &scores->logprobs[at], top, ids);
        return;
    }
    scores->logprobs[at] =
        is_intact ? id_logprob(&neutral, vocab, scored, scores->targets[at]) : math_nan_f32();
    const uint32_t found =
        is_intact ? fill_top(&neutral, vocab, scored, scores->top_count, top) : 0;
    for (uint32_t i = found; i < scores->top_count; i++)
        top[i] = (sampler_top){.id = -1, .logprob = is_intact ? -math_inf_f32() : math_nan_f32()};
    for (uint32_t i = 0; i < scores->id_count; i++)
        ids[i] = is_intact ? id_logprob(&neutral, vocab, scored, scores->ids[i]) : math_nan_f32();
}

uint32_t compute_sim_expect_banned(const compute_sim_options *options, const sampler_params *params,
                                   uint32_t banned_rows, const int32_t *prompt,
                                   uint32_t prompt_tokens, uint32_t count, sampler_row *rows) {
    sampler_params now = *params;
    history drawn = history_of(params);
    uint64_t hash = 0;
    for (uint32_t p = 0; p < prompt_tokens; p++)
        hash = extend(hash, prompt[p], p);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t position = prompt_tokens + i - 1;
        now.banned_count = i < banned_rows ? params->banned_count : 0;
        draw(options, &now, drawn, hash, position, &rows[i]);
        if (rows[i].status != SAMPLER_OK) return i + 1;
        hash = extend(hash, rows[i].token, position + 1);
        drawn.sum += sum_ids(&rows[i].token, 1);
        drawn.count++;
    }
    return count;
}

uint32_t compute_sim_expect(const compute_sim_options *options, const sampler_params *params,
                            const int32_t *prompt, uint32_t prompt_tokens, uint32_t count,
                            sampler_row *rows) {
    return compute_sim_expect_banned(options, params, UINT32_MAX, prompt, prompt_tokens, count,
                                     rows);
}

void compute_sim_expect_scores(const compute_sim_options *options, const int32_t *prompt,
                               const model_scores *scores) {
    uint64_t hash = 0;
    for (uint32_t p = 0; p < scores->first + scores->count; p++) {
        hash = extend(hash, prompt[p], p);
        if (p >= scores->first) score(options, scores, p - scores->first, true, hash);
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void run_draws(const compute_sim *sim, const model_batch *batch, uint32_t s, bool is_intact,
                      uint64_t hash, uint32_t position) {
    const uint32_t first = batch->draw_offsets == NULL ? s : batch->draw_offsets[s];
    const uint32_t end = batch->draw_offsets == NULL ? s + 1 : batch->draw_offsets[s + 1];
    for (uint32_t d = first; d < end; d++) {
        const sampler_params *params = &batch->sampling[d];
        sampler_row *row = &batch->rows[d];
        clear_row(row);
        if (is_intact) draw(&sim->options, params, history_of(params), hash, position, row);
    }
}

static void run_sequence(const compute_sim *sim, const model_batch *batch, uint32_t s) {
    const compute_sim_options *o = &sim->options;
    const uint32_t *pages = batch->page_ids + batch->page_offsets[s];
    const model_scores *scores = batch->scores == NULL ? NULL : &batch->scores[s];
    const uint32_t first = batch->token_offsets[s];
    uint32_t position = batch->first_positions[s];
    uint64_t hash = 0;
    const bool is_intact = read_prefix(o, pages, position, &hash);
    for (uint32_t t = first; t < batch->token_offsets[s + 1]; t++, position++) {
        hash = extend(hash, batch->token_ids[t], position);
        write_token(o, token_memory(o, pages, position), hash, batch->token_ids[t]);
        if (scores == NULL || t - first < scores->first) continue;
        const uint32_t at = t - first - scores->first;
        if (at < scores->count) score(o, scores, at, is_intact, hash);
    }
    if (batch->samples[s]) run_draws(sim, batch, s, is_intact, hash, position - 1);
}

/* Stamps the pages that a sequence writes, or looks at those it only reads. false where one of them
 * is stamped already. */
static bool check_pages(compute_sim *sim, const model_batch *batch, uint32_t s, bool is_writing) {
    const uint32_t page_tokens = sim->options.page_tokens;
    const uint32_t *pages = batch->page_ids + batch->page_offsets[s];
    const uint32_t tokens = batch->token_offsets[s + 1] - batch->token_offsets[s];
    const uint32_t written = batch->first_positions[s] / page_tokens;
    const uint32_t count = (batch->first_positions[s] + tokens - 1) / page_tokens + 1;
    BT_ASSERT(count <= batch->page_offsets[s + 1] - batch->page_offsets[s]);
    for (uint32_t i = is_writing ? written : 0; i < (is_writing ? count : written); i++) {
        BT_ASSERT(pages[i] < sim->options.kv_page_count);
        if (sim->page_stamps[pages[i]] == sim->step) return false;
        if (is_writing) sim->page_stamps[pages[i]] = sim->step;
    }
    return true;
}

/* A page that is written stands in no other place of a page table, as in model_step. */
static bool has_clean_pages(compute_sim *sim, const model_batch *batch) {
    bool is_clean = true;
    sim->step++;
    for (uint32_t s = 0; is_clean && s < batch->sequences; s++)
        is_clean = check_pages(sim, batch, s, true);
    for (uint32_t s = 0; is_clean && s < batch->sequences; s++)
        is_clean = check_pages(sim, batch, s, false);
    return is_clean;
}

static void sim_start(compute *c, const model_batch *batch) {
    compute_sim *sim = (compute_sim *)c;
    BT_ASSERT(sim->batch == NULL);
    BT_ASSERT(batch != NULL && batch->sequences > 0);
    sim->batch = batch;
    sim->due_us = UINT64_MAX;
}

static void sim_copy_page(compute *c, uint32_t from, uint32_t to) {
    const compute_sim_options *o = &((compute_sim *)c)->options;
    BT_ASSERT(from < o->kv_page_count && to < o->kv_page_count && from != to);
    memcpy((uint8_t *)o->kv_memory + to * o->page_bytes,
           (const uint8_t *)o->kv_memory + from * o->page_bytes, o->page_bytes);
}

static void sim_zero_tail(compute *c, uint32_t page, uint32_t used) {
    const compute_sim_options *o = &((compute_sim *)c)->options;
    BT_ASSERT(page < o->kv_page_count);
    const size_t token_bytes = o->page_bytes / o->page_tokens;
    memset((uint8_t *)o->kv_memory + page * o->page_bytes + used * token_bytes, 0,
           (o->page_tokens - used) * token_bytes);
}

static void sim_destroy(compute *c) {
    bt_free(((compute_sim *)c)->page_stamps);
    bt_free(c);
}

static const compute_ops sim_ops = {
    .name = "sim",
    .start = sim_start,
    .zero_tail = sim_zero_tail,
    .copy_page = sim_copy_page,
    .destroy = sim_destroy,
};

bt_status compute_sim_create(const compute_sim_options *options, compute **out) {
    BT_ASSERT(options->rows != NULL || options->support_max >= 1);
    BT_ASSERT(options->page_bytes % options->page_tokens == 0);
    BT_ASSERT(options->page_bytes / options->page_tokens >= COMPUTE_SIM_TOKEN_BYTES_MIN);
    compute_sim *sim = bt_calloc(1, sizeof *sim);
    if (sim == NULL) return BT_ERR_WORKER_MEMORY;
    sim->page_stamps = bt_calloc(options->kv_page_count, sizeof *sim->page_stamps);
    if (sim->page_stamps == NULL) {
        bt_free(sim);
        return BT_ERR_WORKER_MEMORY;
    }
    sim->base.ops = &sim_ops;
    sim->options = *options;
    sim->due_us = UINT64_MAX;
    *out = &sim->base;
    return BT_OK;
}

uint64_t compute_sim_due_us(const compute *c) {
    return ((const compute_sim *)c)->due_us;
}

bt_status compute_sim_run(compute *c, const model_batch *batch) {
    compute_sim *sim = (compute_sim *)c;
    bt_status status = sim->next_status;
    sim->next_status = BT_OK;
    if (status == BT_OK && !has_clean_pages(sim, batch)) status = BT_ERR_CALLER_ARGUMENT;
    for (uint32_t s = 0; status == BT_OK && s < batch->sequences; s++)
        run_sequence(sim, batch, s);
    return status;
}

bool compute_sim_poll(compute *c, uint64_t now_us) {
    compute_sim *sim = (compute_sim *)c;
    const model_batch *batch = sim->batch;
    if (batch == NULL) return false;
    if (sim->due_us == UINT64_MAX) {
        sim->due_us = now_us + sim->options.step_us + sim->options.token_us * batch->tokens;
    }
    if (now_us < sim->due_us) return false;
    const bt_status status = compute_sim_run(c, batch);
    sim->batch = NULL;
    sim->due_us = UINT64_MAX;
    c->on_done(c->context, status);
    return true;
}

void compute_sim_fail_next(compute *c, bt_status status) {
    ((compute_sim *)c)->next_status = status;
}
