/* A token in a page: u64 running hash, i32 token, u32 zero, then the hash repeated as far as the
 * token's share of the page goes. */
#include "kernels/compute_sim.h"

#include <assert.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"

typedef struct compute_sim {
    compute base;
    compute_sim_options options;
    const model_batch *batch; /* of the running step, or NULL */
    uint64_t due_us;          /* UINT64_MAX until the first poll behind start */
    bt_status next_status;
} compute_sim;

typedef struct stored_token {
    uint64_t hash;
    int32_t token;
    uint32_t zero;
} stored_token;

static_assert(sizeof(stored_token) == COMPUTE_SIM_TOKEN_BYTES_MIN, "layout of a stored token");

/* splitmix64's finaliser: every bit of the input reaches every bit of the output. */
static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = a + 0x9E3779B97F4A7C15u * (b + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
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
    memcpy(memory, &stored, sizeof stored);
    for (size_t at = sizeof stored; at < bytes; at++)
        memory[at] = (uint8_t)(hash >> (at % 8 * 8));
}

static bool read_token(const compute_sim_options *o, const uint8_t *memory, stored_token *out) {
    const size_t bytes = o->page_bytes / o->page_tokens;
    memcpy(out, memory, sizeof *out);
    for (size_t at = sizeof *out; at < bytes; at++) {
        if (memory[at] != (uint8_t)(out->hash >> (at % 8 * 8))) return false;
    }
    return out->zero == 0;
}

/* The running hash before `position`, read from the pages. false: the chain is broken. */
static bool read_prefix(const compute_sim_options *o, const uint32_t *pages, uint32_t position,
                        uint64_t *hash_out) {
    uint64_t hash = 0;
    for (uint32_t p = 0; p < position; p++) {
        stored_token stored;
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

static void draw(const compute_sim_options *o, const sampler_params *params, uint64_t hash,
                 uint32_t position, sampler_row *row) {
    uint32_t vocab = o->vocab_size;
    if (params->vocab_limit != 0 && params->vocab_limit < vocab) vocab = params->vocab_limit;
    const uint64_t seeded = mix(mix(hash, params->seed), position);
    uint32_t count = 1 + (uint32_t)(mix(hash, 1) % o->support_max);
    if (params->top_k != 0 && count > params->top_k) count = params->top_k;
    if (count > vocab) count = vocab;
    const uint32_t first = (uint32_t)(hash % vocab);
    const uint32_t rank = (uint32_t)(seeded % count);
    row->status = SAMPLER_OK;
    row->token = (int32_t)((first + rank) % vocab);
    row->token_logprob = params->wants_logprob != 0 ? logprob_of(mix(seeded, 2)) : 0;
    row->selected_logprob = 0;
    row->support_count = 0;
    row->cap_needed = 0;
    if (params->mask_mode == SAMPLER_MASK_OFF) return;
    row->cap_needed = count;
    if (count > params->mask_max_tokens) {
        row->status = SAMPLER_OVERFLOW;
        return;
    }
    row->support_count = count;
    row->selected_logprob = logprob_of(mix(hash, 3 + rank));
    for (uint32_t i = 0; i < count; i++) {
        row->support_ids[i] = (int32_t)((first + i) % vocab);
        if (params->mask_mode == SAMPLER_MASK_SUPPORT) {
            row->support_logprobs[i] = logprob_of(mix(hash, 3 + i));
        }
    }
}

uint32_t compute_sim_expect(const compute_sim_options *options, const sampler_params *params,
                            const int32_t *prompt, uint32_t prompt_tokens, uint32_t count,
                            sampler_row *rows) {
    uint64_t hash = 0;
    for (uint32_t p = 0; p < prompt_tokens; p++)
        hash = extend(hash, prompt[p], p);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t position = prompt_tokens + i - 1;
        draw(options, params, hash, position, &rows[i]);
        if (rows[i].status != SAMPLER_OK) return i + 1;
        hash = extend(hash, rows[i].token, position + 1);
    }
    return count;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void run_sequence(const compute_sim *sim, const model_batch *batch, uint32_t s) {
    const compute_sim_options *o = &sim->options;
    const uint32_t *pages = batch->page_ids + batch->page_offsets[s];
    const uint32_t page_count = batch->page_offsets[s + 1] - batch->page_offsets[s];
    uint32_t position = batch->first_positions[s];
    uint64_t hash = 0;
    const bool is_intact = read_prefix(o, pages, position, &hash);
    for (uint32_t t = batch->token_offsets[s]; t < batch->token_offsets[s + 1]; t++, position++) {
        BT_ASSERT(position / o->page_tokens < page_count);
        hash = extend(hash, batch->token_ids[t], position);
        write_token(o, token_memory(o, pages, position), hash, batch->token_ids[t]);
    }
    if (!batch->samples[s]) return;
    if (is_intact) {
        draw(o, &batch->sampling[s], hash, position - 1, &batch->rows[s]);
    } else {
        batch->rows[s].status = SAMPLER_INVALID;
        batch->rows[s].support_count = 0;
    }
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
    BT_ASSERT(options->support_max >= 1);
    BT_ASSERT(options->page_bytes % options->page_tokens == 0);
    BT_ASSERT(options->page_bytes / options->page_tokens >= COMPUTE_SIM_TOKEN_BYTES_MIN);
    compute_sim *sim = bt_calloc(1, sizeof *sim);
    if (sim == NULL) return BT_ERR_WORKER_MEMORY;
    sim->base.ops = &sim_ops;
    sim->options = *options;
    sim->due_us = UINT64_MAX;
    *out = &sim->base;
    return BT_OK;
}

uint64_t compute_sim_due_us(const compute *c) {
    return ((const compute_sim *)c)->due_us;
}

bool compute_sim_poll(compute *c, uint64_t now_us) {
    compute_sim *sim = (compute_sim *)c;
    const model_batch *batch = sim->batch;
    if (batch == NULL) return false;
    if (sim->due_us == UINT64_MAX) {
        sim->due_us = now_us + sim->options.step_us + sim->options.token_us * batch->tokens;
    }
    if (now_us < sim->due_us) return false;
    const bt_status status = sim->next_status;
    for (uint32_t s = 0; status == BT_OK && s < batch->sequences; s++)
        run_sequence(sim, batch, s);
    sim->batch = NULL;
    sim->due_us = UINT64_MAX;
    sim->next_status = BT_OK;
    c->on_done(c->context, status);
    return true;
}

void compute_sim_fail_next(compute *c, bt_status status) {
    ((compute_sim *)c)->next_status = status;
}
