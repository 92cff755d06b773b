/* Prompts come in families of four: the members share the first 70 tokens of their leader, and are
 * computed after it. What is asked for varies from sequence to sequence. */
#include "world.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "tests/kernels/random_data.h"

enum {
    FAMILY = 4,
    SHARED_TOKENS = 70,
    GENERATED = 5,
    PROMPT_MAX = 600,
    TOKENS_MAX = PROMPT_MAX + GENERATED,
    PAGES_EACH = 40, /* of the smallest pages */
    STEP_TOKENS = 1024,
    CAP = 64,
    TOP = 5,
    DRAWS = 2, /* of the last prompt token of some sequences */
    DRAWS_MAX = DRAWS + 1,
    RECOMPUTED_AFTER = 2,
};

static const int32_t asked_ids[] = {3, 200, 17};
static const int32_t bias_ids[] = {5, 90, 250};
static const float biases[] = {2.5F, -3.0F, 0.75F};
static const int32_t banned_ids[] = {7, 8, 9};

typedef struct drawn {
    int32_t ids[CAP];
    float logprobs[CAP];
    sampler_top top[TOP];
    float asked[BT_ARRAY_COUNT(asked_ids)];
} drawn;

typedef struct sequence {
    int32_t ids[TOKENS_MAX];
    uint32_t prompt_tokens;
    uint32_t done;  /* tokens with KV */
    uint32_t drawn; /* tokens generated */
    bool is_recomputed;
    uint32_t pages[PAGES_EACH];
    uint64_t digest, bounded;
} sequence;

typedef struct world {
    const model *m;
    variation v;
    kv_page_layout layout;
    uint32_t vocab_size;
    model_runner *runner;
    uint8_t *memory;
    sequence *sequences;
    float *logits; /* [WORLD_SEQUENCES, vocab] */
    float *scores; /* [STEP_TOKENS] */
} world;

/* One step's arrays. */
typedef struct step {
    uint32_t members[WORLD_SEQUENCES];
    uint32_t token_offsets[WORLD_SEQUENCES + 1], first_positions[WORLD_SEQUENCES];
    uint32_t page_offsets[WORLD_SEQUENCES + 1], page_ids[WORLD_SEQUENCES * PAGES_EACH];
    uint32_t draw_offsets[WORLD_SEQUENCES + 1];
    int32_t token_ids[STEP_TOKENS];
    uint8_t samples[WORLD_SEQUENCES];
    sampler_params sampling[DRAWS_MAX * WORLD_SEQUENCES];
    sampler_row rows[DRAWS_MAX * WORLD_SEQUENCES];
    drawn room[DRAWS_MAX * WORLD_SEQUENCES];
    model_scores scores[WORLD_SEQUENCES];
} step;

static void *make(size_t bytes) {
    void *block = bt_calloc(1, bytes);
    BT_ASSERT(block != NULL);
    return block;
}

static void mix(uint64_t *digest, const void *data, size_t count) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < count; i++)
        *digest = (*digest ^ bytes[i]) * 0x100000001b3U;
}

static uint32_t leader_of(uint32_t s) {
    return s / FAMILY * FAMILY;
}

static void make_prompts(world *w) {
    static const uint32_t lengths[] = {70, 71, 96, 103, 128, 129, 75, 150};
    uint64_t seed = 42;
    for (uint32_t s = 0; s < WORLD_SEQUENCES; s++) {
        sequence *q = &w->sequences[s];
        q->prompt_tokens = s == 12 ? PROMPT_MAX : lengths[s % BT_ARRAY_COUNT(lengths)];
        if (s % 16 == 15) q->prompt_tokens = 1 + s / 16; /* nothing to share */
        for (uint32_t i = 0; i < q->prompt_tokens; i++)
            q->ids[i] = (int32_t)random_below(&seed, w->vocab_size);
        if (q->prompt_tokens >= SHARED_TOKENS)
            memcpy(q->ids, w->sequences[leader_of(s)].ids, SHARED_TOKENS * sizeof *q->ids);
        q->digest = q->bounded = 0xcbf29ce484222325U;
    }
}

static void deal_pages(world *w) {
    static uint32_t order[WORLD_SEQUENCES * PAGES_EACH];
    uint64_t seed = w->v.page_seed;
    for (uint32_t i = 0; i < BT_ARRAY_COUNT(order); i++)
        order[i] = i;
    if (seed != 0) random_order(&seed, order, 0, BT_ARRAY_COUNT(order));
    for (uint32_t s = 0; s < WORLD_SEQUENCES; s++)
        memcpy(w->sequences[s].pages, order + s * PAGES_EACH, sizeof w->sequences[s].pages);
}

static void open_world(world *w, const model *m, kv_dtype dtype, const variation *v) {
    *w = (world){.m = m, .v = *v};
    w->v.threads = v->threads == 0 ? 1 : v->threads;
    w->v.batch = v->batch == 0 ? 8 : v->batch;
    w->v.chunk = v->chunk == 0 ? 64 : v->chunk;
    w->v.page_tokens = v->page_tokens == 0 ? 32 : v->page_tokens;
    w->vocab_size = model_get_card(m)->geometry.vocab_size;
    w->layout = model_kv_layout(m, w->v.page_tokens, dtype);
    const uint32_t page_count = WORLD_SEQUENCES * PAGES_EACH;
    w->memory = make(page_count * kv_page_bytes(&w->layout));
    memset(w->memory, 0xff, page_count * kv_page_bytes(&w->layout)); /* NaN: never read unwritten */
    w->sequences = make(WORLD_SEQUENCES * sizeof *w->sequences);
    w->logits = make((size_t)WORLD_SEQUENCES * w->vocab_size * sizeof *w->logits);
    w->scores = make(STEP_TOKENS * sizeof *w->scores);
    const model_runner_options options = {.threads = w->v.threads,
                                          .tokens_max = STEP_TOKENS,
                                          .rows_max = WORLD_SEQUENCES,
                                          .isa = v->isa,
                                          .kv = w->layout,
                                          .kv_memory = w->memory,
                                          .kv_page_count = page_count};
    bt_error error;
    const bt_status status = model_runner_create(m, &options, &w->runner, &error);
    BT_ASSERT(status == BT_OK);
    make_prompts(w);
    deal_pages(w);
}

static void close_world(world *w) {
    model_runner_destroy(w->runner);
    bt_free(w->memory);
    bt_free(w->sequences);
    bt_free(w->logits);
    bt_free(w->scores);
}

/* ---- what each sequence asks for --------------------------------------------------------------
 */

static sampler_params params_of(const world *w, uint32_t s, uint32_t draw) {
    const sequence *q = &w->sequences[s];
    sampler_params p = {.temperature = 0.8F,
                        .top_p = s % 2 == 0 ? 0.9F : 1.0F,
                        .top_k = 4 + s % 20,
                        .mask_mode = s % 3,
                        .mask_max_tokens = CAP,
                        .seed = 1000 + 64 * draw + s,
                        .filter = s % 5 == 0 ? SAMPLER_FILTER_RANK : SAMPLER_FILTER_JOINT,
                        .min_p = s % 7 == 0 ? 0.05F : 0.0F};
    if (s % 4 == 1) {
        p.frequency_penalty = 0.5F;
        p.presence_penalty = -0.25F;
        p.repetition_penalty = 1.3F;
        p.output_ids = q->ids + q->prompt_tokens;
        p.output_count = q->drawn;
    }
    if (s % 4 == 2) {
        p.bias_count = BT_ARRAY_COUNT(bias_ids);
        p.bias_ids = bias_ids;
        p.biases = biases;
        p.banned_count = BT_ARRAY_COUNT(banned_ids);
        p.banned_ids = banned_ids;
    }
    if (s % 2 == 1) {
        p.wants_logprob = 1;
        p.top_logprobs = TOP;
        p.logprob_id_count = BT_ARRAY_COUNT(asked_ids);
        p.logprob_ids = asked_ids;
    }
    return p;
}

static uint32_t draws_of(const world *w, uint32_t s) {
    return s % 8 == 3 && w->sequences[s].drawn == 0 ? DRAWS : 1;
}

/* Some draw once more, behind their other draws, for a row that is cut. */
static bool has_bounded(uint32_t s) {
    return s % 8 == 3 || s % 8 == 4;
}

static sampler_params bounded_params_of(uint32_t s) {
    return (sampler_params){.temperature = 1.5F,
                            .top_p = s % 3 == 0 ? 0.95F : 1.0F,
                            .top_k = s % 8 == 3 ? 0 : 40,
                            .mask_mode = SAMPLER_MASK_SUPPORT,
                            .mask_max_tokens = 1 + s % 7,
                            .mask_bounded = 1,
                            .seed = 7000 + s,
                            .filter = s % 5 == 0 ? SAMPLER_FILTER_RANK : SAMPLER_FILTER_JOINT};
}

static bool wants_scores(uint32_t s) {
    return s % 8 == 6;
}

/* ---- one step ---------------------------------------------------------------------------------
 */

static uint32_t known_tokens(const sequence *q) {
    return q->prompt_tokens + q->drawn;
}

/* Full pages of the common prefix are the leader's, once it has computed them. */
static void share_prefix(world *w, uint32_t s) {
    sequence *q = &w->sequences[s];
    const sequence *leader = &w->sequences[leader_of(s)];
    if (!w->v.shares_prefixes || leader == q || q->done > 0 || q->prompt_tokens < SHARED_TOKENS)
        return;
    uint32_t pages = SHARED_TOKENS / w->v.page_tokens;
    while (pages > 0 && pages * w->v.page_tokens >= q->prompt_tokens)
        pages--;
    if (wants_scores(s)) return; /* scored tokens are computed */
    memcpy(q->pages, leader->pages, pages * sizeof *q->pages);
    q->done = pages * w->v.page_tokens;
}

static void add_scores(world *w, step *p, uint32_t row, uint32_t s, uint32_t tokens) {
    const sequence *q = &w->sequences[s];
    p->scores[row] = (model_scores){0};
    if (!wants_scores(s) || q->drawn > 0) return;
    const uint32_t left = q->prompt_tokens - 1 - q->done; /* the last token has no target */
    p->scores[row] = (model_scores){.count = tokens < left ? tokens : left,
                                    .targets = q->ids + q->done + 1,
                                    .logprobs = w->scores + p->token_offsets[row]};
}

static void add_draws(world *w, step *p, uint32_t row, uint32_t s) {
    const uint32_t draws = draws_of(w, s);
    const uint32_t count = p->samples[row] != 0 ? draws + has_bounded(s) : 0;
    p->draw_offsets[row + 1] = p->draw_offsets[row] + count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = p->draw_offsets[row] + i;
        drawn *room = &p->room[at];
        memset(room, 0, sizeof *room);
        p->sampling[at] = i < draws ? params_of(w, s, i) : bounded_params_of(s);
        p->rows[at] = (sampler_row){.support_ids = room->ids,
                                    .support_logprobs = room->logprobs,
                                    .top = room->top,
                                    .id_logprobs = room->asked};
    }
}

static void add_sequence(world *w, step *p, uint32_t row, uint32_t s, uint32_t tokens) {
    const sequence *q = &w->sequences[s];
    const uint32_t pages = kv_pages_for(q->done + tokens, w->v.page_tokens);
    BT_ASSERT(pages <= PAGES_EACH);
    p->members[row] = s;
    p->first_positions[row] = q->done;
    p->token_offsets[row + 1] = p->token_offsets[row] + tokens;
    memcpy(p->token_ids + p->token_offsets[row], q->ids + q->done, tokens * sizeof *q->ids);
    memcpy(p->page_ids + p->page_offsets[row], q->pages, pages * sizeof *q->pages);
    p->page_offsets[row + 1] = p->page_offsets[row] + pages;
    p->samples[row] = q->done + tokens == known_tokens(q);
    add_draws(w, p, row, s);
    add_scores(w, p, row, s, tokens);
}

static void take_row(sequence *q, const sampler_params *params, const sampler_row *row) {
    const uint32_t ids = params->logprob_id_count;
    uint64_t *digest = params->mask_bounded != 0 ? &q->bounded : &q->digest;
    BT_ASSERT(row->status == SAMPLER_OK);
    mix(digest, &row->token, sizeof row->token);
    mix(digest, &row->token_logprob, sizeof row->token_logprob);
    mix(digest, &row->selected_logprob, sizeof row->selected_logprob);
    mix(digest, &row->support_count, sizeof row->support_count);
    mix(digest, row->support_ids, row->support_count * sizeof *row->support_ids);
    if (params->mask_mode == SAMPLER_MASK_SUPPORT)
        mix(digest, row->support_logprobs, row->support_count * sizeof(float));
    mix(digest, row->top, row->top_count * sizeof *row->top);
    mix(digest, row->id_logprobs, ids * sizeof(float));
    if (params->mask_bounded != 0) mix(digest, &row->cap_needed, sizeof row->cap_needed);
}

static void take_results(world *w, const step *p, uint32_t row) {
    sequence *q = &w->sequences[p->members[row]];
    const model_scores *scores = &p->scores[row];
    q->done += p->token_offsets[row + 1] - p->token_offsets[row];
    mix(&q->digest, scores->logprobs, scores->count * sizeof(float));
    if (p->samples[row] == 0) return;
    mix(&q->digest, w->logits + (size_t)row * w->vocab_size, w->vocab_size * sizeof(float));
    const uint32_t first = p->draw_offsets[row];
    for (uint32_t at = first; at < p->draw_offsets[row + 1]; at++)
        take_row(q, &p->sampling[at], &p->rows[at]);
    q->ids[known_tokens(q)] = p->rows[first].token;
    q->drawn++;
    if (!w->v.recomputes || q->is_recomputed || q->drawn < RECOMPUTED_AFTER) return;
    q->is_recomputed = true;
    q->done = 0;
}

static void run_step(world *w, const uint32_t *members, const uint32_t *tokens, uint32_t count) {
    static step p;
    for (uint32_t row = 0; row < count; row++)
        add_sequence(w, &p, row, members[row], tokens[row]);
    const model_batch batch = {.sequences = count,
                               .tokens = p.token_offsets[count],
                               .token_offsets = p.token_offsets,
                               .token_ids = p.token_ids,
                               .first_positions = p.first_positions,
                               .page_offsets = p.page_offsets,
                               .page_ids = p.page_ids,
                               .samples = p.samples,
                               .sampling = p.sampling,
                               .rows = p.rows,
                               .logits = w->logits,
                               .scores = p.scores,
                               .draw_offsets = p.draw_offsets};
    const bt_status status = model_step(w->runner, &batch);
    BT_ASSERT(status == BT_OK);
    for (uint32_t row = 0; row < count; row++)
        take_results(w, &p, row);
}

/* ---- which sequences --------------------------------------------------------------------------
 */

static bool has_ended(const sequence *q) {
    return q->drawn == GENERATED;
}

/* A member waits until its leader has computed what they share, in this run or, after it lost its
 * pages, again. */
static bool may_run(const world *w, uint32_t s) {
    const sequence *leader = &w->sequences[leader_of(s)];
    if (leader_of(s) == s || !w->v.shares_prefixes) return true;
    return leader->done >= SHARED_TOKENS || has_ended(leader);
}

static uint32_t next_tokens(const world *w, const sequence *q) {
    const uint32_t left = known_tokens(q) - q->done;
    return left < w->v.chunk ? left : w->v.chunk;
}

/* The first `batch` sequences in order that have not ended take part, as far as the step holds
 * them. */
static bool run_some(world *w) {
    uint32_t members[WORLD_SEQUENCES];
    uint32_t tokens[WORLD_SEQUENCES];
    uint32_t count = 0, total = 0, in_work = 0;
    for (uint32_t i = 0; i < WORLD_SEQUENCES && in_work < w->v.batch; i++) {
        const uint32_t s = w->v.is_reversed ? WORLD_SEQUENCES - 1 - i : i;
        sequence *q = &w->sequences[s];
        if (has_ended(q) || !may_run(w, s)) continue;
        in_work++;
        share_prefix(w, s);
        const uint32_t next = next_tokens(w, q);
        if (total + next > STEP_TOKENS) continue;
        members[count] = s;
        tokens[count++] = next;
        total += next;
    }
    if (count > 0) run_step(w, members, tokens, count);
    return count > 0;
}

/* K and V of every token in logical order: pages and their size must not show. */
static void mix_kv(world *w, sequence *q) {
    const kv_page_layout *l = &w->layout;
    const size_t token_bytes = l->head_dim * kv_element_bytes(l->dtype);
    for (uint32_t t = 0; t < q->done; t++) {
        const uint8_t *page = w->memory + q->pages[t / l->page_tokens] * kv_page_bytes(l);
        for (uint32_t h = 0; h < 2 * l->layers * l->kv_heads; h++)
            mix(&q->digest, page + h * kv_head_bytes(l) + t % l->page_tokens * token_bytes,
                token_bytes);
    }
}

digests world_run(const model *m, kv_dtype dtype, const variation *v) {
    world w;
    digests d = {.all = 0xcbf29ce484222325U, .bounded = 0xcbf29ce484222325U};
    open_world(&w, m, dtype, v);
    while (run_some(&w)) {
    }
    for (uint32_t s = 0; s < WORLD_SEQUENCES; s++) {
        sequence *q = &w.sequences[s];
        BT_ASSERT(has_ended(q));
        mix_kv(&w, q);
        d.of[s] = q->digest;
        mix(&d.all, &q->digest, sizeof q->digest);
        mix(&d.bounded, &q->bounded, sizeof q->bounded);
    }
    close_world(&w);
    return d;
}
