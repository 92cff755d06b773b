/* Log-probabilities over the whole vocabulary: of the largest logits, of chosen ids, and of a row
 * that nothing is drawn from. No sort: the largest are kept in a short sorted list, and the scan
 * stops only where a value belongs into it. */
#include "base/assert.h"
#include "kernels/sampler_internal.h"

/* Puts an entry behind those of [0, held) that are not smaller. There is room for one more. */
static void insert(sampler_top *top, uint32_t held, sampler_top entry) {
    while (held > 0 && top[held - 1].logprob < entry.logprob) {
        top[held] = top[held - 1];
        held--;
    }
    top[held] = entry;
}

uint32_t sampler_find_top(const sampler_loops *loops, const sampler_scale *scale, const float *x,
                          size_t count, uint32_t wanted, sampler_top *top) {
    const uint32_t kept = wanted < count ? wanted : (uint32_t)count;
    if (kept == 0) return 0;
    /* The field holds x until all are found. */
    for (uint32_t i = 0; i < kept; i++) {
        insert(top, i, (sampler_top){.id = (int32_t)i, .logprob = x[i]});
    }
    size_t at = loops->next_above(x, kept, count, top[kept - 1].logprob);
    while (at < count) {
        insert(top, kept - 1, (sampler_top){.id = (int32_t)at, .logprob = x[at]});
        at = loops->next_above(x, at + 1, count, top[kept - 1].logprob);
    }
    for (uint32_t i = 0; i < kept; i++) {
        top[i].logprob = sampler_logprob(scale, top[i].logprob);
    }
    return kept;
}

void sampler_find_ids(const sampler_scale *scale, const float *x, size_t count, const int32_t *ids,
                      uint32_t id_count, float *logprobs) {
    for (uint32_t i = 0; i < id_count; i++) {
        const size_t id = (size_t)ids[i];
        logprobs[i] = id < count ? sampler_logprob(scale, x[id]) : -math_inf_f32();
    }
}

bool sampler_score_row(sampler_workspace *workspace, const sampler_scoring *scoring,
                       const float *logits, uint32_t vocab_size, float *target_out,
                       sampler_top *top_out, float *ids_out) {
    BT_ASSERT(vocab_size > 0 && vocab_size <= workspace->vocab_size);
    const sampler_loops *loops = workspace->loops;
    const bool is_limited = scoring->vocab_limit != 0 && scoring->vocab_limit < vocab_size;
    const size_t count = is_limited ? scoring->vocab_limit : vocab_size;
    float largest;
    if (!loops->largest(logits, count, &largest)) return false;
    if (!(largest < math_inf_f32() && largest > -math_inf_f32())) return false;
    loops->weigh(logits, count, 1.0F, largest, workspace->weights);
    const sampler_scale scale = {.temperature = 1.0F,
                                 .scaled_max = largest,
                                 .fixed_total = loops->sum(workspace->weights, count)};
    sampler_find_ids(&scale, logits, count, &scoring->target, 1, target_out);
    const uint32_t found =
        sampler_find_top(loops, &scale, logits, count, scoring->top_count, top_out);
    for (uint32_t i = found; i < scoring->top_count; i++) {
        top_out[i] = (sampler_top){.id = -1, .logprob = -math_inf_f32()};
    }
    sampler_find_ids(&scale, logits, count, scoring->ids, scoring->id_count, ids_out);
    return true;
}
