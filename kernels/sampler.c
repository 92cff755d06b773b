/* sampler_draw: weigh the vocabulary, find the weight at which the filter cuts, draw, capture.
 *
 * Every filter keeps the weights above one threshold, and at the threshold all (joint) or those of
 * the lowest ids (rank), so no full sort is needed: a cheap floor under the threshold leaves few
 * candidates, a radix walk finds it among them, and only survivors are sorted. The reference that
 * must give the same bits is ref/sampler_ref.c. */
#include "kernels/sampler.h"

#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/sampler_internal.h"

/* One call of sampler_draw. */
typedef struct draw {
    sampler_workspace *workspace;
    const sampler_params *params;
    const float *x; /* logits after step 1 of the header */
    size_t count;   /* of ids that exist */
    size_t chunks;
    uint32_t position;
    sampler_scale scale; /* fixed_total is 0 when nobody needs it */
    sampler_row *row;
} draw;

enum { WORKSPACE_ALIGNMENT = 64 };

bt_status sampler_workspace_create_isa(uint32_t vocab_size, const char *isa,
                                       sampler_workspace **out) {
    if (vocab_size == 0 || vocab_size > SAMPLER_VOCAB_MAX) return BT_ERR_CALLER_LIMIT;
    const sampler_loops *loops = sampler_loops_find(isa);
    if (loops == NULL) return BT_ERR_CALLER_UNSUPPORTED;
    BT_ASSERT(isa == NULL || strcmp(isa, loops->isa) == 0);
    sampler_workspace *workspace = bt_calloc(1, sizeof *workspace);
    if (workspace == NULL) return BT_ERR_WORKER_MEMORY;
    const size_t chunks = ((size_t)vocab_size + SAMPLER_CHUNK - 1) / SAMPLER_CHUNK;
    const size_t slots = chunks * SAMPLER_CHUNK;
    workspace->loops = loops;
    workspace->vocab_size = vocab_size;
    workspace->weights = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(float));
    workspace->ratios = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(float));
    workspace->picked = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(float));
    workspace->processed = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(float));
    workspace->ids = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint32_t));
    workspace->indices = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint32_t));
    workspace->counts = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint32_t));
    workspace->candidates = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint64_t));
    workspace->spare = bt_calloc_aligned(WORKSPACE_ALIGNMENT, slots * sizeof(uint64_t));
    workspace->maxima = bt_calloc_aligned(WORKSPACE_ALIGNMENT,
                                          chunks * SAMPLER_GROUPS_PER_CHUNK_MAX * sizeof(uint32_t));
    const bool is_complete = workspace->weights != NULL && workspace->ratios != NULL &&
                             workspace->picked != NULL && workspace->processed != NULL &&
                             workspace->ids != NULL && workspace->indices != NULL &&
                             workspace->counts != NULL && workspace->candidates != NULL &&
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
    bt_free(workspace->processed);
    bt_free(workspace->ids);
    bt_free(workspace->indices);
    bt_free(workspace->counts);
    bt_free(workspace->candidates);
    bt_free(workspace->spare);
    bt_free(workspace->maxima);
    bt_free(workspace);
}

void sampler_time_capture(sampler_workspace *workspace, bool is_on) {
    workspace->is_timed = is_on;
}

uint64_t sampler_take_capture_ns(sampler_workspace *workspace) {
    const uint64_t taken = workspace->capture_ns;
    workspace->capture_ns = 0;
    return taken;
}

static uint64_t now_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

/* Around code that only masks need. */
static uint64_t capture_begin(const sampler_workspace *workspace) {
    return workspace->is_timed ? now_ns() : 0;
}

static void capture_end(sampler_workspace *workspace, uint64_t begin) {
    if (workspace->is_timed) workspace->capture_ns += now_ns() - begin;
}

/* Fills workspace->weights, zero to the end of the last chunk, and fixed_total where it is needed.
 */
static void weigh(draw *d) {
    const sampler_params *params = d->params;
    sampler_workspace *workspace = d->workspace;
    workspace->loops->weigh(d->x, d->count, params->temperature, d->scale.scaled_max,
                            workspace->weights);
    for (size_t i = d->count; i < d->chunks * SAMPLER_CHUNK; i++) {
        workspace->weights[i] = 0.0F;
    }
    if (params->wants_logprob != 0 || (params->top_p < 1.0F && params->top_k != 1)) {
        d->scale.fixed_total = workspace->loops->sum(workspace->weights, d->count);
    }
}

static void set_token(draw *d, uint32_t token) {
    const sampler_params *params = d->params;
    sampler_row *row = d->row;
    row->status = SAMPLER_OK;
    row->token = (int32_t)token;
    if (params->wants_logprob == 0) return;
    row->token_logprob = sampler_logprob(&d->scale, d->x[token]);
    row->top_count = sampler_find_top(d->workspace->loops, &d->scale, d->x, d->count,
                                      params->top_logprobs, row->top);
    sampler_find_ids(&d->scale, d->x, d->count, params->logprob_ids, params->logprob_id_count,
                     row->id_logprobs);
}

static void draw_greedy(draw *d, float largest) {
    const size_t token = d->workspace->loops->first_equal(d->x, d->count, largest);
    if (d->params->wants_logprob != 0) weigh(d);
    set_token(d, (uint32_t)token);
    if (d->params->mask_mode == SAMPLER_MASK_OFF) return;
    d->row->cap_needed = 1;
    d->row->support_count = 1;
    d->row->support_ids[0] = (int32_t)token;
    if (d->params->mask_mode == SAMPLER_MASK_SUPPORT) sampler_row_logprobs(d->row, 1)[0] = 0.0F;
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

/* A threshold that at least `wanted` weights reach, so not above the one of a top_k so large; 0
 * wants all. The maxima of k disjoint sets are k weights, and few others lie above the smallest of
 * them when there are more sets than k. */
static uint32_t top_k_floor(const draw *d, uint32_t wanted) {
    sampler_workspace *workspace = d->workspace;
    if (wanted == 0 || wanted >= d->count) return SAMPLER_WEIGHT_MIN_BITS;
    uint32_t groups = 1;
    while (groups < SAMPLER_GROUPS_PER_CHUNK_MAX && wanted > d->chunks * groups / 2) {
        groups *= 4;
    }
    const uint32_t *values = workspace->maxima;
    size_t count = d->chunks * groups;
    if (wanted > count / 2) {
        /* Too many for the sets: the weights themselves, as bits. */
        values = (const uint32_t *)(const void *)workspace->weights;
        count = d->count;
    } else {
        workspace->loops->group_maxima(workspace->weights, d->chunks, groups, workspace->maxima);
    }
    const uint32_t floor = sampler_reached_by(values, count, wanted, &workspace->histogram);
    return floor > SAMPLER_WEIGHT_MIN_BITS ? floor : SAMPLER_WEIGHT_MIN_BITS;
}

/* A threshold not above the one of top_p: one above which the mass already reaches the limit. All
 * `count` weights below limit_gap / count together cannot fill the gap; higher ones are tried. */
static uint32_t top_p_floor(const draw *d, double mass_limit) {
    const sampler_workspace *workspace = d->workspace;
    const double gap = ((double)d->scale.fixed_total - mass_limit) * 0x1p-40;
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

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

static bool is_by_rank(const sampler_params *params) {
    return params->filter == SAMPLER_FILTER_RANK;
}

/* What sums of q must stay below. At most the limit, as `rank` has it, is below the next double. */
static double mass_limit_of(const sampler_params *params, uint64_t fixed_sum) {
    if (params->top_p >= 1.0F) return math_inf_f64();
    const double limit = (double)params->top_p * (double)fixed_sum;
    return is_by_rank(params) ? math_from_bits_f64(math_bits_f64(limit) + 1U) : limit;
}

/* The rank rule cuts the last tie group of the candidates that find_cut left whole: the lowest ids
 * stay while both limits hold. Its first entry stays, else the group were not there. Returns how
 * many of its entries do. */
static size_t cut_ties(const uint64_t *candidates, size_t count, uint64_t count_max,
                       double mass_limit, sampler_cut *cut) {
    size_t ties = 0;
    for (size_t i = 0; i < count; i++) {
        ties += (uint32_t)(candidates[i] >> 32) == cut->threshold ? 1U : 0U;
    }
    if (ties == 0) return 0;
    const uint64_t fixed = sampler_fixed(math_from_bits_f32(cut->threshold));
    const uint64_t count_before = cut->count - ties;
    const uint64_t sum_before = cut->fixed_sum - ties * fixed;
    size_t kept = 1;
    while (kept < ties && count_before + kept < count_max &&
           (double)(sum_before + kept * fixed) < mass_limit) {
        kept++;
    }
    return kept;
}

/* Moves the candidates above a threshold to the front, with the first `ties_max` of those at it,
 * and says what they are. */
static sampler_cut keep(uint64_t *candidates, size_t count, uint32_t threshold, size_t ties_max) {
    sampler_cut kept = {.threshold = threshold};
    for (size_t i = 0; i < count; i++) {
        const uint64_t candidate = candidates[i];
        const uint32_t bits = (uint32_t)(candidate >> 32);
        const bool is_tie = bits == threshold && ties_max > 0;
        const bool is_kept = bits > threshold || is_tie;
        ties_max -= is_tie ? 1U : 0U;
        candidates[kept.count] = candidate;
        kept.count += is_kept ? 1U : 0U;
        kept.fixed_sum += is_kept ? sampler_fixed(math_from_bits_f32(bits)) : 0U;
    }
    return kept;
}

enum { TOP_P_FLOOR_TOP_K_MIN = 1024 };

/* Leaves the survivors of the filter in workspace->candidates, by ascending id. */
static sampler_cut filter(draw *d) {
    const sampler_params *params = d->params;
    sampler_workspace *workspace = d->workspace;
    uint64_t *candidates = workspace->candidates;
    const uint64_t count_max = params->top_k == 0 ? UINT64_MAX : params->top_k;
    const bool has_min_p = params->min_p > 0.0F;
    const uint32_t min_p_bits =
        larger(has_min_p ? math_bits_f32(params->min_p) : 0U, SAMPLER_WEIGHT_MIN_BITS);
    /* The sequential rule's Q' counts what min_p removes; without a top_k it is Q. */
    const bool is_sequential =
        has_min_p && !is_by_rank(params) && params->top_p < 1.0F && count_max < d->count;
    double mass_limit =
        is_sequential ? math_inf_f64() : mass_limit_of(params, d->scale.fixed_total);
    uint32_t floor = top_k_floor(d, params->top_k);
    if (!is_sequential) floor = larger(floor, min_p_bits);
    const bool is_wide = params->top_k == 0 || params->top_k > TOP_P_FLOOR_TOP_K_MIN;
    if (mass_limit < math_inf_f64() && is_wide) floor = larger(floor, top_p_floor(d, mass_limit));
    const size_t count =
        workspace->loops->collect(workspace->weights, d->chunks, floor, candidates);
    sampler_cut cut =
        sampler_find_cut(candidates, count, count_max, mass_limit, &workspace->histogram);
    if (is_sequential) {
        mass_limit = mass_limit_of(params, cut.fixed_sum);
        cut = sampler_find_cut(candidates, count, count_max, mass_limit, &workspace->histogram);
        cut.threshold = larger(cut.threshold, min_p_bits);
    }
    const size_t ties_max =
        is_by_rank(params) ? cut_ties(candidates, count, count_max, mass_limit, &cut) : count;
    cut = keep(candidates, count, cut.threshold, ties_max);
    BT_ASSERT(cut.count > 0);
    return cut;
}

/* Splits the candidates into workspace->picked and workspace->ids. */
static void unpack(sampler_workspace *workspace, size_t count) {
    for (size_t i = 0; i < count; i++) {
        workspace->picked[i] = math_from_bits_f32((uint32_t)(workspace->candidates[i] >> 32));
        workspace->ids[i] = (uint32_t)workspace->candidates[i];
    }
}

static bool has_filter(const sampler_params *params) {
    return params->top_k != 0 || params->top_p < 1.0F || params->min_p > 0.0F;
}

static void sort_and_unpack(sampler_workspace *workspace, size_t count) {
    sampler_sort(workspace->candidates, count, workspace->spare, &workspace->histogram);
    unpack(workspace, count);
}

enum { RECOLLECT_SHARE = 4 };

/* Leaves the `wanted` heaviest of a support in workspace->candidates, which hold `listed` of its
 * entries: all or none. Of a large part of the vocabulary it costs less to collect them anew, from
 * above a floor, than to look at all. */
static void list_heaviest(const draw *d, const sampler_cut *support, uint32_t wanted,
                          size_t listed) {
    sampler_workspace *workspace = d->workspace;
    uint64_t *candidates = workspace->candidates;
    const double no_limit = math_inf_f64();
    if (listed == 0 || listed > d->count / RECOLLECT_SHARE) {
        const bool is_all = wanted == support->count;
        const uint32_t floor = is_all ? 0U : top_k_floor(d, wanted);
        listed = workspace->loops->collect(workspace->weights, d->chunks,
                                           larger(support->threshold, floor), candidates);
    }
    if (listed == wanted) return;
    sampler_cut cut = sampler_find_cut(candidates, listed, wanted, no_limit, &workspace->histogram);
    const size_t ties_max = cut_ties(candidates, listed, wanted, no_limit, &cut);
    cut = keep(candidates, listed, cut.threshold, ties_max);
    BT_ASSERT(cut.count == wanted);
}

/* A token that was drawn, as a candidate. */
static uint64_t candidate_of(float weight, uint32_t id) {
    return (uint64_t)math_bits_f32(weight) << 32 | id;
}

/* The drawn token takes the place of the last of `count` entries unless it is one of them. */
static void keep_drawn(sampler_workspace *workspace, uint32_t count, uint64_t drawn) {
    const uint32_t last = count - 1;
    const uint32_t id = (uint32_t)drawn;
    const float weight = math_from_bits_f32((uint32_t)(drawn >> 32));
    const bool is_tie = weight == workspace->picked[last];
    if (weight > workspace->picked[last] || (is_tie && id <= workspace->ids[last])) return;
    workspace->picked[last] = weight;
    workspace->ids[last] = id;
}

/* The row of a support whose entries are picked in their order (is_ordered), or `listed` among the
 * candidates by ascending id: all, or none yet. */
static void capture(draw *d, const sampler_cut *cut, bool is_ordered, size_t listed,
                    uint64_t drawn) {
    sampler_workspace *workspace = d->workspace;
    sampler_row *row = d->row;
    const uint32_t cap = d->params->mask_max_tokens;
    const uint32_t count = cut->count < cap ? cut->count : cap;
    if (!is_ordered) {
        if (listed != count) list_heaviest(d, cut, count, listed);
        sort_and_unpack(workspace, count);
    }
    if (count < cut->count) keep_drawn(workspace, count, drawn);
    const float mass = sampler_mass(cut->fixed_sum);
    row->selected_logprob =
        sampler_entry_logprob(math_from_bits_f32((uint32_t)(drawn >> 32)), mass);
    row->support_count = count;
    for (size_t i = 0; i < count; i++) {
        row->support_ids[i] = (int32_t)workspace->ids[i];
    }
    if (d->params->mask_mode != SAMPLER_MASK_SUPPORT) return;
    workspace->loops->log_shares(workspace->picked, count, mass, sampler_row_logprobs(row, count));
}

/* Says how large the support is; true: more than the row may have, and nothing is drawn. */
static bool overflows(draw *d, uint32_t support) {
    const sampler_params *params = d->params;
    d->row->cap_needed = support;
    if (params->mask_bounded != 0 || support <= params->mask_max_tokens) return false;
    d->row->status = SAMPLER_OVERFLOW;
    return true;
}

static void draw_filtered(draw *d) {
    const sampler_params *params = d->params;
    sampler_workspace *workspace = d->workspace;
    const bool has_mask = params->mask_mode != SAMPLER_MASK_OFF;
    const bool has_columns_by_rank = params->top_k != 0 || is_by_rank(params);
    const sampler_cut cut = filter(d);
    if (has_mask && overflows(d, cut.count)) return;
    if (has_columns_by_rank) {
        sort_and_unpack(workspace, cut.count);
    } else {
        unpack(workspace, cut.count);
    }
    const uint32_t *columns = has_columns_by_rank ? NULL : workspace->ids;
    const size_t index = pick_column(d, workspace->picked, columns, cut.count);
    const uint64_t drawn = candidate_of(workspace->picked[index], workspace->ids[index]);
    set_token(d, workspace->ids[index]);
    if (!has_mask) return;
    const uint64_t begin = capture_begin(workspace);
    capture(d, &cut, has_columns_by_rank, cut.count, drawn);
    capture_end(workspace, begin);
}

/* Without a filter the draw needs the weights alone, and whatever goes beyond is the mask's. */
static void draw_unfiltered(draw *d) {
    sampler_workspace *workspace = d->workspace;
    const sampler_loops *loops = workspace->loops;
    const bool has_mask = d->params->mask_mode != SAMPLER_MASK_OFF;
    sampler_cut whole = {.threshold = SAMPLER_WEIGHT_MIN_BITS};
    if (has_mask) {
        const uint64_t begin = capture_begin(workspace);
        whole.count = (uint32_t)loops->count_from(workspace->weights, d->count, whole.threshold);
        capture_end(workspace, begin);
        if (overflows(d, whole.count)) return;
    }
    const size_t token = pick_column(d, workspace->weights, NULL, d->count);
    set_token(d, (uint32_t)token);
    if (!has_mask) return;
    const uint64_t begin = capture_begin(workspace);
    const bool is_summed = d->scale.fixed_total != 0;
    whole.fixed_sum = is_summed ? d->scale.fixed_total : loops->sum(workspace->weights, d->count);
    capture(d, &whole, false, 0, candidate_of(workspace->weights[token], (uint32_t)token));
    capture_end(workspace, begin);
}

static void row_clear(sampler_row *row) {
    row->token = -1;
    row->status = SAMPLER_INVALID;
    row->token_logprob = 0.0F;
    row->selected_logprob = 0.0F;
    row->support_count = 0;
    row->cap_needed = 0;
    row->top_count = 0;
}

void sampler_draw(sampler_workspace *workspace, const sampler_params *params, const float *logits,
                  uint32_t vocab_size, uint32_t position, sampler_row *row) {
    BT_ASSERT(vocab_size > 0 && vocab_size <= workspace->vocab_size);
    BT_ASSERT(sampler_params_are_valid(params, vocab_size));
    BT_ASSERT(sampler_row_is_valid(params, row));
    const bool is_limited = params->vocab_limit != 0 && params->vocab_limit < vocab_size;
    const size_t count = is_limited ? params->vocab_limit : vocab_size;
    row_clear(row);
    const float *x = sampler_process(workspace, params, logits, count);
    float largest;
    if (!workspace->loops->largest(x, count, &largest)) return;
    draw d = {
        .workspace = workspace,
        .params = params,
        .x = x,
        .count = count,
        .chunks = (count + SAMPLER_CHUNK - 1) / SAMPLER_CHUNK,
        .position = position,
        .scale = {.temperature = params->temperature, .scaled_max = largest / params->temperature},
        .row = row,
    };
    /* Also -inf, when no token is possible, and a quotient out of range. */
    const float scaled_max = d.scale.scaled_max;
    if (!(scaled_max < math_inf_f32() && scaled_max > -math_inf_f32())) return;
    if (params->top_k == 1) {
        draw_greedy(&d, largest);
        return;
    }
    weigh(&d);
    if (has_filter(params)) {
        draw_filtered(&d);
    } else {
        draw_unfiltered(&d);
    }
}
