/* sampler_draw_ref: the definitions of kernels/sampler.h one after the other. Sorts the whole
 * vocabulary and takes every logarithm; shares only the arithmetic of single values with
 * sampler.c. */
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

/* How many of the sorted entries are in the support. */
static size_t count_support(const sampler_params *params, const entry *entries, size_t count,
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

/* The index of the drawn entry of the support. */
static size_t draw_entry(const sampler_params *params, uint32_t position, const entry *entries,
                         size_t support) {
    size_t best = 0;
    double best_score = 0.0;
    for (size_t i = 0; i < support; i++) {
        const uint32_t column = params->top_k != 0 ? (uint32_t)i : entries[i].id;
        const double score = math_log_f64((double)entries[i].weight) +
                             sampler_noise(sampler_hash(params->seed, position, column));
        /* The first in order of columns wins; ids are columns that are not in order here. */
        const bool is_earlier = params->top_k == 0 && entries[i].id < entries[best].id;
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
    row->cap_needed = (uint32_t)support;
    row->support_count = (uint32_t)support;
    row->selected_logprob = math_log_f32(entries[drawn].weight / mass);
    for (size_t i = 0; i < support; i++) {
        row->support_ids[i] = (int32_t)entries[i].id;
        if (params->mask_mode != SAMPLER_MASK_SUPPORT) continue;
        row->support_logprobs[i] = math_log_f32(entries[i].weight / mass);
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

bt_status sampler_draw_ref(const sampler_params *params, const float *logits, uint32_t vocab_size,
                           uint32_t position, sampler_row *row) {
    if (!sampler_params_are_valid(params) || vocab_size == 0) return BT_ERR_CALLER_ARGUMENT;
    const bool is_limited = params->vocab_limit != 0 && params->vocab_limit < vocab_size;
    const size_t count = is_limited ? params->vocab_limit : vocab_size;
    *row = (sampler_row){.token = -1,
                         .status = SAMPLER_INVALID,
                         .support_ids = row->support_ids,
                         .support_logprobs = row->support_logprobs};
    const float largest = find_largest(logits, count);
    const float scaled_max = largest / params->temperature;
    if (!(scaled_max < math_inf_f32() && scaled_max > -math_inf_f32())) return BT_OK;

    entry *entries = bt_calloc(count, sizeof *entries);
    if (entries == NULL) return BT_ERR_WORKER_MEMORY;
    uint64_t fixed_total = 0;
    for (size_t i = 0; i < count; i++) {
        const float weight = sampler_weight(logits[i], params->temperature, scaled_max);
        entries[i] = (entry){.weight = weight, .id = (uint32_t)i};
        fixed_total += sampler_fixed(weight);
    }
    qsort(entries, count, sizeof *entries, by_weight_then_id);
    size_t support = 1;
    size_t drawn = 0;
    if (params->top_k == 1) {
        move_greedy_first(logits, largest, entries, count);
    } else {
        support = count_support(params, entries, count, fixed_total);
        drawn = draw_entry(params, position, entries, support);
    }
    const bool has_mask = params->mask_mode != SAMPLER_MASK_OFF;
    if (has_mask && support > params->mask_max_tokens) {
        row->status = SAMPLER_OVERFLOW;
        row->cap_needed = (uint32_t)support;
        bt_free(entries);
        return BT_OK;
    }
    row->status = SAMPLER_OK;
    row->token = (int32_t)entries[drawn].id;
    if (params->wants_logprob != 0) {
        const float scaled = logits[entries[drawn].id] / params->temperature;
        row->token_logprob = sampler_token_logprob(scaled, scaled_max, fixed_total);
    }
    if (has_mask) capture(params, entries, support, drawn, row);
    bt_free(entries);
    return BT_OK;
}
