/* sampler_draw_ref: the definitions of kernels/sampler.h one after the other. Sorts the whole
 * vocabulary and takes every logarithm; shares only the arithmetic of single values with
 * sampler.c. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "kernels/sampler.h"
#include "kernels/sampler_internal.h"

typedef struct entry {
    float weight;
    uint32_t id;
} entry;

static int by_weight_then_id(const void *a, const void *b) {
    const entry *left = a;
    const entry *right = b;
    if (left->weight != right->weight) return left->weight > right->weight ? -1 : 1;
    return left->id < right->id ? -1 : 1;
}

static bool is_among(const int32_t *ids, uint32_t count, uint32_t id) {
    for (uint32_t i = 0; i < count; i++) {
        if ((uint32_t)ids[i] == id) return true;
    }
    return false;
}

static float bound(const sampler_params *params, float x) {
    const bool is_raised = params->temperature < 1.0F;
    const float limit = is_raised ? 0x1p127F * params->temperature : FLT_MAX;
    return fmaxf(-limit, fminf(x, limit));
}

static bool is_ban(const sampler_params *params, uint32_t id) {
    for (uint32_t i = 0; i < params->bias_count; i++) {
        const bool is_its_own = (uint32_t)params->bias_ids[i] == id;
        if (is_its_own && params->biases[i] == -math_inf_f32()) return true;
    }
    return is_among(params->banned_ids, params->banned_count, id);
}

/* Step 1 of the header for one id. */
static float process(const sampler_params *params, uint32_t id, float x) {
    if (is_ban(params, id)) return -math_inf_f32();
    if (!isfinite(x)) return x;
    uint32_t drawn = 0;
    for (uint32_t i = 0; params->output_ids != NULL && i < params->output_count; i++) {
        drawn += (uint32_t)params->output_ids[i] == id;
    }
    if (drawn > 0 && params->frequency_penalty != 0.0F) {
        x = fmaf(-params->frequency_penalty, (float)drawn, x);
    }
    if (drawn > 0 && params->presence_penalty != 0.0F) x = x - params->presence_penalty;
    const float repetition = params->repetition_penalty;
    const bool is_repeated = drawn > 0 && repetition != 0.0F && repetition != 1.0F;
    if (is_repeated) {
        x = x > 0.0F ? x / repetition : x * repetition;
    }
    const bool is_counted =
        drawn > 0 && (params->frequency_penalty != 0.0F || params->presence_penalty != 0.0F);
    if (is_counted || is_repeated) x = bound(params, x);
    for (uint32_t i = 0; i < params->bias_count; i++) {
        if ((uint32_t)params->bias_ids[i] == id) x = bound(params, x + params->biases[i]);
    }
    return x;
}

static size_t count_joint(const sampler_params *params, const entry *entries, size_t count,
                          uint64_t fixed_total) {
    size_t greater_count = 0;
    uint64_t greater_sum = 0;
    uint64_t sum_before = 0;
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || entries[i].weight < entries[i - 1].weight) {
            greater_count = i;
            greater_sum = sum_before;
        }
        const bool is_in_top_k = params->top_k == 0 || greater_count < params->top_k;
        const bool is_in_top_p = params->top_p >= 1.0F ||
                                 (double)greater_sum < (double)params->top_p * (double)fixed_total;
        if (!is_in_top_k || !is_in_top_p || entries[i].weight <= 0.0F) return i;
        sum_before += sampler_fixed(entries[i].weight);
    }
    return count;
}

static size_t count_sequential(const sampler_params *params, const entry *entries, size_t count) {
    sampler_params first = *params;
    first.top_p = 1.0F;
    const size_t in_top_k = count_joint(&first, entries, count, 0);
    uint64_t fixed_sum = 0;
    for (size_t i = 0; i < in_top_k; i++) {
        fixed_sum += sampler_fixed(entries[i].weight);
    }
    sampler_params second = *params;
    second.top_k = 0;
    size_t support = count_joint(&second, entries, in_top_k, fixed_sum);
    while (entries[support - 1].weight < params->min_p * entries[0].weight) {
        support--;
    }
    return support;
}

static size_t count_rank(const sampler_params *params, const entry *entries, size_t count,
                         uint64_t fixed_total) {
    uint64_t sum_before = 0;
    for (size_t r = 0; r < count; r++) {
        const bool is_in_top_k = params->top_k == 0 || r < params->top_k;
        const bool is_in_top_p = params->top_p >= 1.0F ||
                                 (double)sum_before <= (double)params->top_p * (double)fixed_total;
        const bool is_in_min_p = entries[r].weight >= params->min_p * entries[0].weight;
        if (!is_in_top_k || !is_in_top_p || !is_in_min_p || entries[r].weight <= 0.0F) return r;
        sum_before += sampler_fixed(entries[r].weight);
    }
    return count;
}

/* How many of the sorted entries are in the support. */
static size_t count_support(const sampler_params *params, const entry *entries, size_t count,
                            uint64_t fixed_total) {
    if (params->filter == SAMPLER_FILTER_RANK)
        return count_rank(params, entries, count, fixed_total);
    if (params->min_p > 0.0F) return count_sequential(params, entries, count);
    return count_joint(params, entries, count, fixed_total);
}

/* The index of the drawn entry of the support. */
static size_t draw_entry(const sampler_params *params, uint32_t position, const entry *entries,
                         size_t support) {
    const bool is_filtered_rank =
        params->filter == SAMPLER_FILTER_RANK && (params->top_p < 1.0F || params->min_p > 0.0F);
    const bool is_by_id = params->top_k == 0 && !is_filtered_rank;
    size_t best = 0;
    double best_score = 0.0;
    for (size_t i = 0; i < support; i++) {
        const uint32_t column = is_by_id ? entries[i].id : (uint32_t)i;
        const double score = math_log_f64((double)entries[i].weight) +
                             sampler_noise(sampler_hash(params->seed, position, column));
        /* The first in order of columns wins; ids are columns that are not in order here. */
        const bool is_earlier = is_by_id && entries[i].id < entries[best].id;
        if (i == 0 || score > best_score || (score == best_score && is_earlier)) {
            best = i;
            best_score = score;
        }
    }
    return best;
}

static void capture(const sampler_params *params, const entry *entries, size_t support,
                    size_t drawn, sampler_row *row) {
    uint64_t fixed_sum = 0;
    for (size_t i = 0; i < support; i++) {
        fixed_sum += sampler_fixed(entries[i].weight);
    }
    const float mass = sampler_mass(fixed_sum);
    const size_t cap = params->mask_max_tokens;
    const size_t count = support < cap ? support : cap;
    row->cap_needed = (uint32_t)support;
    row->support_count = (uint32_t)count;
    row->selected_logprob = sampler_entry_logprob(entries[drawn].weight, mass);
    if (params->mask_mode == SAMPLER_MASK_SUPPORT) (void)sampler_row_logprobs(row, (uint32_t)count);
    for (size_t i = 0; i < count; i++) {
        const entry *kept = &entries[i == count - 1 && drawn > i ? drawn : i];
        row->support_ids[i] = (int32_t)kept->id;
        if (params->mask_mode != SAMPLER_MASK_SUPPORT) continue;
        row->support_logprobs[i] = sampler_entry_logprob(kept->weight, mass);
    }
}

/* The largest logit; NaN when there is one. */
static float find_largest(const float *logits, size_t count) {
    float largest = logits[0];
    for (size_t i = 0; i < count; i++) {
        if (logits[i] != logits[i]) return logits[i];
        if (logits[i] > largest) largest = logits[i];
    }
    return largest;
}

/* Greedy: the entry of the lowest id among the largest logits, moved to the front. */
static void move_greedy_first(const float *logits, float largest, entry *entries, size_t count) {
    uint32_t id = 0;
    while (logits[id] != largest) {
        id++;
    }
    for (size_t i = 0; i < count; i++) {
        if (entries[i].id != id) continue;
        const entry first = entries[0];
        entries[0] = entries[i];
        entries[i] = first;
        return;
    }
}

typedef struct scored {
    float x;
    uint32_t id;
} scored;

static int by_x_then_id(const void *a, const void *b) {
    const scored *left = a;
    const scored *right = b;
    if (left->x != right->x) return left->x > right->x ? -1 : 1;
    return left->id < right->id ? -1 : 1;
}

typedef struct reference {
    const sampler_params *params;
    float *x;        /* [count] */
    entry *entries;  /* [count], sorted by weight */
    scored *by_size; /* [count], sorted by x */
    size_t count;
    float scaled_max;
    uint64_t fixed_total;
} reference;

static float logprob(const reference *r, float x) {
    return sampler_token_logprob(x / r->params->temperature, r->scaled_max, r->fixed_total);
}

static void fill_logprobs(const reference *r, sampler_row *row) {
    const sampler_params *params = r->params;
    row->token_logprob = logprob(r, r->x[row->token]);
    for (uint32_t i = 0; i < params->top_logprobs && i < r->count; i++) {
        row->top[i].id = (int32_t)r->by_size[i].id;
        row->top[i].logprob = logprob(r, r->by_size[i].x);
        row->top_count++;
    }
    for (uint32_t i = 0; i < params->logprob_id_count; i++) {
        const size_t id = (size_t)params->logprob_ids[i];
        row->id_logprobs[i] = id < r->count ? logprob(r, r->x[id]) : -math_inf_f32();
    }
}

static void draw_row(reference *r, float largest, uint32_t position, sampler_row *row) {
    const sampler_params *params = r->params;
    for (size_t i = 0; i < r->count; i++) {
        const float weight = sampler_weight(r->x[i], params->temperature, r->scaled_max);
        r->entries[i] = (entry){.weight = weight, .id = (uint32_t)i};
        r->by_size[i] = (scored){.x = r->x[i], .id = (uint32_t)i};
        r->fixed_total += sampler_fixed(weight);
    }
    qsort(r->entries, r->count, sizeof *r->entries, by_weight_then_id);
    qsort(r->by_size, r->count, sizeof *r->by_size, by_x_then_id);
    size_t support = 1;
    size_t drawn = 0;
    if (params->top_k == 1) {
        move_greedy_first(r->x, largest, r->entries, r->count);
    } else {
        support = count_support(params, r->entries, r->count, r->fixed_total);
        drawn = draw_entry(params, position, r->entries, support);
    }
    const bool has_mask = params->mask_mode != SAMPLER_MASK_OFF;
    if (has_mask && params->mask_bounded == 0 && support > params->mask_max_tokens) {
        row->status = SAMPLER_OVERFLOW;
        row->cap_needed = (uint32_t)support;
        return;
    }
    row->status = SAMPLER_OK;
    row->token = (int32_t)r->entries[drawn].id;
    if (params->wants_logprob != 0) fill_logprobs(r, row);
    if (has_mask) capture(params, r->entries, support, drawn, row);
}

bt_status sampler_draw_ref(const sampler_params *params, const float *logits, uint32_t vocab_size,
                           uint32_t position, sampler_row *row) {
    if (vocab_size == 0 || !sampler_params_are_valid(params, vocab_size) ||
        !sampler_row_is_valid(params, row))
        return BT_ERR_CALLER_ARGUMENT;
    const bool is_limited = params->vocab_limit != 0 && params->vocab_limit < vocab_size;
    reference r = {.params = params, .count = is_limited ? params->vocab_limit : vocab_size};
    *row = (sampler_row){.token = -1,
                         .status = SAMPLER_INVALID,
                         .support_ids = row->support_ids,
                         .support_logprobs = row->support_logprobs,
                         .is_joined = row->is_joined,
                         .top = row->top,
                         .id_logprobs = row->id_logprobs};
    r.x = bt_calloc(r.count, sizeof *r.x);
    r.entries = bt_calloc(r.count, sizeof *r.entries);
    r.by_size = bt_calloc(r.count, sizeof *r.by_size);
    const bool is_complete = r.x != NULL && r.entries != NULL && r.by_size != NULL;
    for (size_t i = 0; is_complete && i < r.count; i++) {
        r.x[i] = process(params, (uint32_t)i, logits[i]);
    }
    const float largest = is_complete ? find_largest(r.x, r.count) : 0.0F;
    r.scaled_max = largest / params->temperature;
    const bool is_valid = r.scaled_max < math_inf_f32() && r.scaled_max > -math_inf_f32();
    if (is_complete && is_valid) draw_row(&r, largest, position, row);
    bt_free(r.x);
    bt_free(r.entries);
    bt_free(r.by_size);
    return is_complete ? BT_OK : BT_ERR_WORKER_MEMORY;
}
