/* What the next step computes, and its results.
 *
 * The line holds the prompts that are complete and not yet computed, in the order in which they
 * became complete. A step has `prompts_max` places (no more than its budget has tokens):
 *
 *   - all places but the last belong to the oldest prompts of the line, so that work is finished in
 *     the order in which it came;
 *   - the last place goes round among all others, to the one that was served the longest ago. So a
 *     prompt behind any number of long ones is served within as many steps as there are prompts
 *     before it, however long those are;
 *   - the budget is shared equally among the places taken; what one does not need goes to the
 *     others, the oldest first. So each prompt that is in a step gets budget / prompts_max tokens
 *     at least, a long one behind many short ones too.
 *
 * With prompts_max 1 this is strictly one prompt after the other.
 *
 * A prompt begins with its first chunk, and takes all its pages then. One that finds too few waits;
 * later ones may begin past the oldest of those that wait, but no more than PREFILL_PASSES_MAX of
 * them, after which every page that becomes free is kept for it. A prompt that waits for pages that
 * another computes (prefill_pages.c) is passed freely: what it waits for is being computed. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

/* ---- choosing -------------------------------------------------------------------------------- */

void prefill_share(const uint32_t *left, uint32_t count, uint32_t budget, uint32_t *shares_out) {
    const uint32_t equal = budget / count;
    for (uint32_t i = 0; i < count; i++) {
        shares_out[i] = left[i] < equal ? left[i] : equal;
        budget -= shares_out[i];
    }
    for (uint32_t i = 0; i < count && budget > 0; i++) {
        const uint32_t more = left[i] - shares_out[i] < budget ? left[i] - shares_out[i] : budget;
        shares_out[i] += more;
        budget -= more;
    }
}

/* What the prompts chosen so far need of a step. */
typedef struct step_plan {
    uint32_t count, places, draws;
    size_t score_bytes;
} step_plan;

/* Begins a queued prompt if it finds what it needs. */
static bool try_begin(prefill_core *core, prefill_attempt *a) {
    prefill_attempt *waiting = core->waiting;
    if (waiting != NULL && waiting->passed >= PREFILL_PASSES_MAX) return false;
    if (a->tried_at != core->changes) {
        const bt_status status = prefill_begin(core, a);
        if (status == BT_OK && waiting != NULL) waiting->passed++;
        if (status != BT_ERR_REQUEST_FULL) return a->state == PREFILL_COMPUTING;
        a->tried_at = core->changes;
    }
    if (!a->is_following && waiting == NULL) core->waiting = a;
    return false;
}

/* Whether the link to the reader of its log-probabilities, if it has any, takes more. */
static bool is_read(const prefill_core *core, const prefill_attempt *a) {
    const prefill_core_ops *ops = &core->options.ops;
    return !a->generation.wants_prompt_logprobs || ops->can_stream(ops->context);
}

/* Takes a place, unless what others need leaves nothing for it in this step. */
static bool choose(prefill_core *core, step_plan *plan, prefill_attempt *a) {
    const uint32_t limit = prefill_batch_limit(core, a, plan->draws, plan->score_bytes);
    if (limit == 0) return false;
    core->step.chosen[plan->count] = a;
    core->step.limits[plan->count] = limit;
    plan->count++;
    plan->draws += prefill_chunk_draws(a, limit);
    plan->score_bytes += prefill_chunk_score_bytes(a, limit);
    a->is_in_step = true;
    return true;
}

/* The places of the oldest. Beginning may end the attempt itself, and no other. */
static void choose_oldest(prefill_core *core, step_plan *plan, uint32_t places) {
    prefill_attempt *behind = NULL;
    for (prefill_attempt *a = core->line_first; a != NULL && plan->count < places; a = behind) {
        behind = a->behind;
        if (!is_read(core, a)) continue;
        if (a->state == PREFILL_COMPUTING || try_begin(core, a)) (void)choose(core, plan, a);
    }
}

/* The last place: of those in work the one that was served the longest ago, or a queued one that
 * has waited longer. */
static void choose_in_turn(prefill_core *core, step_plan *plan) {
    prefill_attempt *next = NULL;
    for (prefill_attempt *a = core->line_first; a != NULL; a = a->behind) {
        if (a->state != PREFILL_COMPUTING || a->is_in_step || !is_read(core, a)) continue;
        if (prefill_batch_limit(core, a, plan->draws, plan->score_bytes) == 0) continue;
        if (next == NULL || a->served_at < next->served_at) next = a;
    }
    prefill_attempt *behind = NULL;
    for (prefill_attempt *a = core->line_first; a != NULL; a = behind) {
        behind = a->behind;
        if (a->state != PREFILL_QUEUED || !is_read(core, a)) continue;
        if (next != NULL && next->served_at <= a->served_at) break; /* and all behind it */
        if (try_begin(core, a) && choose(core, plan, a)) return;
    }
    if (next != NULL) (void)choose(core, plan, next);
}

static void fill(prefill_core *core, const step_plan *plan) {
    prefill_batch *s = &core->step;
    prefill_share(s->limits, plan->count, core->options.chunk_tokens, s->counts);
    for (uint32_t i = 0; i < plan->count; i++) {
        prefill_attempt *a = s->chosen[i];
        const bt_status status = prefill_batch_add(core, a, s->counts[i]);
        if (status == BT_OK) {
            a->served_at = core->steps_total;
            continue;
        }
        a->is_in_step = false;
        prefill_fail(core, a, status, "no memory for what the request asks to know of its tokens");
    }
}

void prefill_step_turn(prefill_core *core) {
    prefill_batch *s = &core->step;
    const prefill_core_options *o = &core->options;
    if (s->is_running || core->is_broken || core->line_first == NULL) return;
    step_plan plan = {.places =
                          o->prompts_max < o->chunk_tokens ? o->prompts_max : o->chunk_tokens};
    core->waiting = NULL;
    choose_oldest(core, &plan, plan.places > 1 ? plan.places - 1 : 1);
    if (plan.count < plan.places) choose_in_turn(core, &plan);
    if (plan.count == 0) return;
    prefill_batch_clear(core);
    fill(core, &plan);
    if (s->batch.sequences == 0) return;
    prefill_batch_seal(core);
    s->is_running = true;
    s->deadline_us = prefill_now(core) + o->step_us;
    s->weights_version = membership_weights_version(&core->member);
    o->compute->ops->start(o->compute, &s->batch);
}

/* ---- results --------------------------------------------------------------------------------- */

static void take_chunk(prefill_core *core, prefill_attempt *a, uint32_t at) {
    const prefill_batch *s = &core->step;
    const uint32_t count = s->token_offsets[at + 1] - s->token_offsets[at];
    const uint32_t first_token = a->computed_tokens;
    a->computed_tokens += count;
    core->tokens_total += count;
    const bool has_scores = s->scores[at].count > 0;
    if (has_scores && !prefill_send_logprobs(core, a, &s->scores[at], first_token)) return;
    if (a->computed_tokens < a->prompt_tokens) {
        prefill_cache_pages(core, a);
        prefill_send_pages(core, a);
        return;
    }
    if (s->samples[at]) {
        prefill_send_rows(core, a, prefill_batch_rows(s, at));
        return;
    }
    prefill_cache_pages(core, a);
    prefill_send_done(core, a->id, BT_OK, a->cached_tokens, 0, "");
    prefill_release(core, a, "nothing to hand over");
}

/* The worker's own failure: every attempt hears of it, and the process ends. */
static void break_down(prefill_core *core, bt_status status, const char *text) {
    if (core->is_broken) return;
    core->is_broken = true;
    bt_log_error("prefill", "%s: %s", text, bt_status_string(status));
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        prefill_attempt *a = &core->attempts[i];
        if (a->state == PREFILL_ASSEMBLING || a->state == PREFILL_QUEUED ||
            a->state == PREFILL_COMPUTING) {
            prefill_fail(core, a, BT_ERR_WORKER_INTERNAL, "prefill: %s", text);
        }
    }
    core->options.ops.on_broken(core->options.ops.context, status, text);
}

void prefill_on_step_done(void *context, bt_status status) {
    prefill_core *core = context;
    prefill_batch *s = &core->step;
    BT_ASSERT(s->is_running);
    s->is_running = false;
    core->steps_total++;
    core->changes++;
    for (uint32_t i = 0; i < s->batch.sequences; i++) {
        prefill_attempt *a = s->attempts[i];
        a->is_in_step = false;
        if (a->state == PREFILL_COMPUTING) {
            if (status == BT_OK) take_chunk(core, a, i);
        } else if (a->has_handoff) {
            prefill_set_state(core, a, PREFILL_QUARANTINE, "step done");
        } else {
            prefill_release(core, a, "step done");
        }
    }
    if (status != BT_OK) break_down(core, status, "a compute step failed");
    prefill_core_turn(core);
}

void prefill_step_tick(prefill_core *core, uint64_t now_us) {
    if (!core->step.is_running || now_us < core->step.deadline_us) return;
    break_down(core, BT_ERR_WORKER_INTERNAL, "a compute step does not end");
}
