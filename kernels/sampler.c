/* sampler_draw: weigh the vocabulary, find the weight at which the filter cuts, draw, capture.
 *
 * The joint rule keeps exactly the weights at or above one threshold, so no full sort is needed: a
 * cheap floor under the threshold leaves few candidates, a radix walk finds it among them, and only
 * survivors are sorted. The reference that must give the same bits is ref/sampler_ref.c. */
#include "kernels/sampler.h"

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/sampler_internal.h"

struct sampler_workspace {
    const sampler_loops *loops;
    uint32_t vocab_size;
    float *weights;       /* [chunks * SAMPLER_CHUNK] */
    float *ratios;        /* the same; of the draw */
    float *picked;        /* the same; weights of the survivors */
    uint32_t *ids;        /* the same; of the survivors */
    uint32_t *indices;    /* the same; of the draw */
    uint64_t *candidates; /* the same */
    uint64_t *spare;      /* the same; scratch of the sort */
    uint32_t *maxima;     /* [chunks * SAMPLER_GROUPS_PER_CHUNK_MAX] */
    sampler_histogram histogram;
};

/* One call of sampler_draw. */
typedef struct draw {
    sampler_workspace *workspace;
    const sampler_params *params;
    const float *logits;
    size_t count; /* of ids that exist */
    size_t chunks;
    uint32_t position;
    float scaled_max;
    uint64_t fixed_total; /* Q; 0 when nobody needs it */
    sampler_row *row;
} draw;

enum { WORKSPACE_ALIGNMENT = 64 };

bt_status sampler_workspace_create_isa(uint32_t vocab_size, const char *isa,
                                       sampler_workspace **out) {
    if (vocab_size == 0 || vocab_size > SAMPLER_VOCAB_MAX) return BT_ERR_CALLER_LIMIT;
    const sampler_loops *loops = sampler_loops_find(isa);
    if (loops == NULL) return BT_ERR_CALLER_UNSUPPORTED;
    sampler_workspace *workspace = bt_calloc(1, sizeof *workspace);
    if (workspace == NULL) return BT_ERR_WORKER_MEMORY;
    const size_t chunks = ((size_t)vocab_size + SAMPLER_CHUNK - 1) / SAMPLER_CHUNK;
    const size_t slots = chunks * SAMPLER_CHUNK;
    workspace->loops = loops;
    workspace->vocab_size = vocab_size;
    workspace->weights = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(float));
    workspace->ratios = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(float));
    workspace->picked = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(float));
    workspace->ids = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint32_t));
    workspace->indices = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint32_t));
    workspace->candidates = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint64_t));
    workspace->spare = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint64_t));
    workspace->maxima = bt_calloc_aligned(WORKSPACE_ALIGNMENT,
                                          chunks * SAMPLER_GROUPS_PER_CHUNK_MAX * sizeof(uint32_t));
    const bool is_complete = workspace->weights != NULL && workspace->ratios != NULL &&
                             workspace->picked != NULL && workspace->ids != NULL &&
                             workspace->indices != NULL && workspace->candidates != NULL &&
                             workspace->spare != NULL && workspace->maxima != NULL;
    if (!is_complete) {
        sampler_workspace_destroy(workspace);
        return BT_ERR_WORKER_MEMORY;
    }
    *out = workspace;
    return BT_OK;
}

bt_status sampler_workspace_create(uint32_t vocab_size, sampler_workspace **out) {
    return sampler_workspace_create_isa(vocab_size, NULL, out);
}

void sampler_workspace_destroy(sampler_workspace *workspace) {
    if (workspace == NULL) return;
    bt_free(workspace->weights);
    bt_free(workspace->ratios);
    bt_free(workspace->picked);
    bt_free(workspace->ids);
    bt_free(workspace->indices);
    bt_free(workspace->candidates);
    bt_free(workspace->spare);
    bt_free(workspace->maxima);
    bt_free(workspace);
}

/* Fills workspace->weights, zero to the end of the last chunk, and fixed_total where it is needed.
 */
static void weigh(draw *d) {
    const sampler_params *params = d->params;
    sampler_workspace *workspace = d->workspace;
    workspace->loops->weigh(d->logits, d->count, params->temperature, d->scaled_max,
                            workspace->weights);
    for (size_t i = d->count; i < d->chunks * SAMPLER_CHUNK; i++) {
        workspace->weights[i] = 0.0F;
    }
    if (params->wants_logprob != 0 || (params->top_p < 1.0F && params->top_k != 1)) {
        d->fixed_total = workspace->loops->sum(workspace->weights, d->count);
    }
}

static void set_token(draw *d, uint32_t token) {
    d->row->status = SAMPLER_OK;
    d->row->token = (int32_t)token;
    if (d->params->wants_logprob == 0) return;
    const float scaled = d->logits[token] / d->params->temperature;
    d->row->token_logprob = sampler_token_logprob(scaled, d->scaled_max, d->fixed_total);
}

static void draw_greedy(draw *d, float largest) {
    const size_t token = d->workspace->loops->first_equal(d->logits, d->count, largest);
    if (d->params->wants_logprob != 0) weigh(d);
    set_token(d, (uint32_t)token);
    if (d->params->mask_mode == SAMPLER_MASK_OFF) return;
    d->row->cap_needed = 1;
    d->row->support_count = 1;
    d->row->support_ids[0] = (int32_t)token;
    if (d->params->mask_mode == SAMPLER_MASK_SUPPORT) d->row->support_logprobs[0] = 0.0F;
}

/* The Gumbel-max draw, without taking logarithms of every weight. With u = hash / (2^32 - 1) and
 * E = -log u, the score log w + g is -log(E / w): the smallest E / w wins. E >= 1 - u, which the
 * loop turns into `ratios`; only a column whose ratio is no more than E / w of some known column
 * can win, and those are about one in all. The margin is far above every rounding involved. */
static size_t pick_column(const draw *d, const float *weights, const uint32_t *columns,
                          size_t count) {
    sampler_workspace *workspace = d->workspace;
    const sampler_loops *loops = workspace->loops;
    const uint32_t state = sampler_hash_begin(d->params->seed, d->position);
    const float smallest = loops->race(state, weights, columns, count, workspace->ratios);
    size_t found = loops->at_most(workspace->ratios, count, smallest, workspace->indices);
    BT_ASSERT(found > 0);
    size_t best = 0;
    double best_score = 0.0;
    /* First the smallest ratio alone, for the limit; then all that could beat it, in order. */
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < (round == 0 ? 1 : found); i++) {
            const uint32_t index = workspace->indices[i];
            const uint32_t column = columns == NULL ? index : columns[index];
            const uint32_t hash = sampler_hash_end(sampler_hash_mix(state, column));
            const double score = sampler_score(weights[index], hash);
            if (i > 0 && score <= best_score) continue;
            best = index;
            best_score = score;
        }
        if (round > 0) break;
        const float limit = (float)(math_exp_f64(-best_score) * (1.0 + 0x1p-10));
        found = loops->at_most(workspace->ratios, count, limit, workspace->indices);
        BT_ASSERT(found > 0);
    }
    return best;
}

/* A threshold not above the one of top_k: one that at least top_k weights reach. The maxima of k
 * disjoint sets are k weights, and few others lie above the smallest of them when there are more
 * sets than k. */
static uint32_t top_k_floor(const draw *d) {
    const uint32_t top_k = d->params->top_k;
    sampler_workspace *workspace = d->workspace;
    if (top_k == 0 || top_k >= d->count) return SAMPLER_WEIGHT_MIN_BITS;
    uint32_t groups = 1;
    while (groups < SAMPLER_GROUPS_PER_CHUNK_MAX && top_k > d->chunks * groups / 2) {
        groups *= 4;
    }
    workspace->loops->group_maxima(workspace->weights, d->chunks, groups, workspace->maxima);
    const uint32_t floor =
        sampler_reached_by(workspace->maxima, d->chunks * groups, top_k, &workspace->histogram);
    return floor > SAMPLER_WEIGHT_MIN_BITS ? floor : SAMPLER_WEIGHT_MIN_BITS;
}

/* A threshold not above the one of top_p: one above which the mass already reaches the limit. All
 * `count` weights below limit_gap / count together cannot fill the gap; higher ones are tried. */
static uint32_t top_p_floor(const draw *d, double mass_limit) {
    const sampler_workspace *workspace = d->workspace;
    const double gap = ((double)d->fixed_total - mass_limit) * 0x1p-40;
    uint32_t thresholds[SAMPLER_THRESHOLDS];
    uint64_t sums[SAMPLER_THRESHOLDS];
    double threshold = gap / (double)d->count;
    for (int i = 0; i < SAMPLER_THRESHOLDS; i++) {
        const float rounded = threshold < 1.0 ? (float)threshold : 1.0F;
        const uint32_t bits = math_bits_f32(rounded);
        thresholds[i] = bits > SAMPLER_WEIGHT_MIN_BITS ? bits : SAMPLER_WEIGHT_MIN_BITS;
        threshold *= 8.0;
    }
    workspace->loops->sum_from(workspace->weights, d->count, thresholds, sums);
    uint32_t floor = SAMPLER_WEIGHT_MIN_BITS;
    for (int i = 0; i < SAMPLER_THRESHOLDS; i++) {
        if ((double)sums[i] >= mass_limit) floor = thresholds[i];
    }
    return floor;
}

enum { TOP_P_FLOOR_TOP_K_MIN = 1024 };

/* Leaves the survivors of the filter in workspace->candidates, by ascending id. */
static sampler_cut filter(draw *d) {
    const sampler_params *params = d->params;
    sampler_workspace *workspace = d->workspace;
    const bool has_top_p = params->top_p < 1.0F;
    const bool is_wide = params->top_k == 0 || params->top_k > TOP_P_FLOOR_TOP_K_MIN;
    const double mass_limit =
        has_top_p ? (double)params->top_p * (double)d->fixed_total : math_inf_f64();
    uint32_t floor = top_k_floor(d);
    if (has_top_p && is_wide) {
        const uint32_t other = top_p_floor(d, mass_limit);
        floor = other > floor ? other : floor;
    }
    const size_t count =
        workspace->loops->collect(workspace->weights, d->chunks, floor, workspace->candidates);
    const uint64_t count_max = params->top_k == 0 ? UINT64_MAX : params->top_k;
    const sampler_cut cut = sampler_find_cut(workspace->candidates, count, count_max, mass_limit,
                                             &workspace->histogram);
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t candidate = workspace->candidates[i];
        workspace->candidates[kept] = candidate;
        kept += (uint32_t)(candidate >> 32) >= cut.threshold ? 1U : 0U;
    }
    BT_ASSERT(kept == cut.count && kept > 0);
    return cut;
}

/* Splits the candidates into workspace->picked and workspace->ids. */
static void unpack(sampler_workspace *workspace, size_t count) {
    for (size_t i = 0; i < count; i++) {
        workspace->picked[i] = math_from_bits_f32((uint32_t)(workspace->candidates[i] >> 32));
        workspace->ids[i] = (uint32_t)workspace->candidates[i];
    }
}

static void capture(draw *d, const sampler_cut *cut, float token_weight) {
    const sampler_workspace *workspace = d->workspace;
    sampler_row *row = d->row;
    const float mass = sampler_mass(cut->fixed_sum);
    row->selected_logprob = math_log_f32(token_weight / mass);
    row->support_count = cut->count;
    for (size_t i = 0; i < cut->count; i++) {
        row->support_ids[i] = (int32_t)workspace->ids[i];
    }
    if (d->params->mask_mode != SAMPLER_MASK_SUPPORT) return;
    workspace->loops->log_shares(workspace->picked, cut->count, mass, row->support_logprobs);
}

static void draw_filtered(draw *d) {
    const sampler_params *params = d->params;
    sampler_workspace *workspace = d->workspace;
    const bool has_mask = params->mask_mode != SAMPLER_MASK_OFF;
    const bool is_ranked = params->top_k != 0;
    const sampler_cut cut = filter(d);
    if (has_mask) {
        d->row->cap_needed = cut.count;
        d->row->status = cut.count > params->mask_max_tokens ? SAMPLER_OVERFLOW : SAMPLER_OK;
        if (d->row->status != SAMPLER_OK) return;
    }
    if (is_ranked) {
        sampler_sort(workspace->candidates, cut.count, workspace->spare, &workspace->histogram);
    }
    unpack(workspace, cut.count);
    const uint32_t *columns = is_ranked ? NULL : workspace->ids;
    const size_t index = pick_column(d, workspace->picked, columns, cut.count);
    const float token_weight = workspace->picked[index];
    set_token(d, workspace->ids[index]);
    if (!has_mask) return;
    if (!is_ranked) {
        sampler_sort(workspace->candidates, cut.count, workspace->spare, &workspace->histogram);
        unpack(workspace, cut.count);
    }
    capture(d, &cut, token_weight);
}

static void row_clear(sampler_row *row) {
    row->token = -1;
    row->status = SAMPLER_INVALID;
    row->token_logprob = 0.0F;
    row->selected_logprob = 0.0F;
    row->support_count = 0;
    row->cap_needed = 0;
}

void sampler_draw(sampler_workspace *workspace, const sampler_params *params, const float *logits,
                  uint32_t vocab_size, uint32_t position, sampler_row *row) {
    BT_ASSERT(sampler_params_are_valid(params));
    BT_ASSERT(vocab_size > 0 && vocab_size <= workspace->vocab_size);
    BT_ASSERT(params->mask_mode == SAMPLER_MASK_OFF || row->support_ids != NULL);
    BT_ASSERT(params->mask_mode != SAMPLER_MASK_SUPPORT || row->support_logprobs != NULL);
    const bool is_limited = params->vocab_limit != 0 && params->vocab_limit < vocab_size;
    const size_t count = is_limited ? params->vocab_limit : vocab_size;
    row_clear(row);
    float largest;
    if (!workspace->loops->largest(logits, count, &largest)) return;
    draw d = {
        .workspace = workspace,
        .params = params,
        .logits = logits,
        .count = count,
        .chunks = (count + SAMPLER_CHUNK - 1) / SAMPLER_CHUNK,
        .position = position,
        .scaled_max = largest / params->temperature,
        .row = row,
    };
    /* Also -inf, when no token is possible, and a quotient out of range. */
    if (!(d.scaled_max < math_inf_f32() && d.scaled_max > -math_inf_f32())) return;
    if (params->top_k == 1) {
        draw_greedy(&d, largest);
        return;
    }
    weigh(&d);
    const bool is_filtered = params->top_k != 0 || params->top_p < 1.0F;
    if (is_filtered || params->mask_mode != SAMPLER_MASK_OFF) {
        draw_filtered(&d);
        return;
    }
    set_token(&d, (uint32_t)pick_column(&d, workspace->weights, NULL, count));
}
