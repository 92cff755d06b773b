/* What the next step computes: a chunk of each prompt that is in work, oldest first, and new ones
 * from the queue while the budget of tokens and the number of prompts per step allow it. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

bt_status prefill_step_init(prefill_core *core) {
    prefill_batch *s = &core->step;
    s->token_ids = bt_calloc(core->options.chunk_tokens, sizeof *s->token_ids);
    s->page_ids =
        bt_calloc((size_t)PREFILL_PROMPTS_PER_STEP * core->pages_per_attempt, sizeof *s->page_ids);
    if (s->token_ids == NULL || s->page_ids == NULL) return BT_ERR_WORKER_MEMORY;
    s->batch = (model_batch){
        .token_offsets = s->token_offsets,
        .token_ids = s->token_ids,
        .first_positions = s->first_positions,
        .page_offsets = s->page_offsets,
        .page_ids = s->page_ids,
        .samples = s->samples,
        .sampling = s->sampling,
        .rows = s->rows,
    };
    return BT_OK;
}

static void free_masks(prefill_batch *s) {
    bt_free(s->support_ids);
    bt_free(s->support_logprobs);
    s->support_ids = NULL;
    s->support_logprobs = NULL;
    s->support_cap = 0;
}

void prefill_step_fini(prefill_core *core) {
    free_masks(&core->step);
    bt_free(core->step.token_ids);
    bt_free(core->step.page_ids);
}

bt_status prefill_step_need_masks(prefill_core *core) {
    prefill_batch *s = &core->step;
    const uint32_t cap = membership_cap(&core->member);
    if (s->support_cap == cap) return BT_OK;
    /* The cap changes only between sessions, when nothing is in hand; but the first mask of a
     * session may be asked for while a step without masks runs, whose rows point nowhere. */
    free_masks(s);
    const size_t entries = (size_t)PREFILL_PROMPTS_PER_STEP * cap;
    s->support_ids = bt_calloc(entries, sizeof *s->support_ids);
    s->support_logprobs = bt_calloc(entries, sizeof *s->support_logprobs);
    if (s->support_ids == NULL || s->support_logprobs == NULL) {
        free_masks(s);
        return BT_ERR_WORKER_MEMORY;
    }
    s->support_cap = cap;
    return BT_OK;
}

/* ---- choosing -------------------------------------------------------------------------------- */

/* The oldest attempt of a state that is not in the step yet; NULL when there is none. */
static prefill_attempt *oldest(prefill_core *core, prefill_state state) {
    prefill_attempt *found = NULL;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        prefill_attempt *a = &core->attempts[i];
        if (a->state != state || a->is_in_step) continue;
        if (found == NULL || a->order < found->order) found = a;
    }
    return found;
}

/* The next prompt to compute: one in work, else the head of the queue if it finds its pages. */
static prefill_attempt *next_prompt(prefill_core *core) {
    prefill_attempt *a = oldest(core, PREFILL_COMPUTING);
    while (a == NULL) {
        prefill_attempt *head = oldest(core, PREFILL_QUEUED);
        if (head == NULL) return NULL;
        const bt_status status = prefill_begin(core, head);
        if (status == BT_ERR_REQUEST_FULL) return NULL; /* waits, and all behind it */
        if (status == BT_OK) a = head;
    }
    return a;
}

static void add_chunk(prefill_core *core, prefill_attempt *a) {
    prefill_batch *s = &core->step;
    const prefill_core_options *o = &core->options;
    const uint32_t at = s->batch.sequences;
    const uint32_t budget = o->chunk_tokens - s->batch.tokens;
    const uint32_t left = a->prompt_tokens - a->computed_tokens;
    const uint32_t count = left < budget ? left : budget;
    const uint32_t end = a->computed_tokens + count;
    const uint32_t pages = kv_pages_for(end, o->page_tokens);
    BT_ASSERT(count > 0);
    BT_ASSERT(pages <= a->page_count);
    const bool samples = end == a->prompt_tokens && a->generation.max_new_tokens > 0;
    const proto_generation *g = &a->generation;
    s->attempts[at] = a->index;
    s->first_positions[at] = a->computed_tokens;
    memcpy(s->token_ids + s->batch.tokens, a->prompt + a->computed_tokens,
           count * sizeof *a->prompt);
    memcpy(s->page_ids + s->page_offsets[at], a->pages, pages * sizeof *a->pages);
    s->page_offsets[at + 1] = s->page_offsets[at] + pages;
    s->token_offsets[at + 1] = s->token_offsets[at] + count;
    s->samples[at] = samples;
    s->rows[at] = (sampler_row){0};
    s->sampling[at] = (sampler_params){
        .temperature = g->temperature,
        .top_p = g->top_p,
        .top_k = g->top_k,
        .mask_mode = g->mask_mode,
        .vocab_limit = g->vocab_limit,
        .wants_logprob = g->wants_logprob,
        .seed = g->seed,
    };
    if (samples && g->mask_mode != SAMPLER_MASK_OFF) {
        s->sampling[at].mask_max_tokens = s->support_cap;
        s->rows[at].support_ids = s->support_ids + (size_t)at * s->support_cap;
        s->rows[at].support_logprobs = s->support_logprobs + (size_t)at * s->support_cap;
    }
    s->batch.sequences++;
    s->batch.tokens += count;
    a->is_in_step = true;
}

void prefill_step_turn(prefill_core *core) {
    prefill_batch *s = &core->step;
    if (s->is_running || core->is_broken) return;
    s->batch.sequences = 0;
    s->batch.tokens = 0;
    while (s->batch.sequences < PREFILL_PROMPTS_PER_STEP &&
           s->batch.tokens < core->options.chunk_tokens) {
        prefill_attempt *a = next_prompt(core);
        if (a == NULL) break;
        add_chunk(core, a);
    }
    if (s->batch.sequences == 0) return;
    s->is_running = true;
    s->deadline_us = prefill_now(core) + core->options.step_us;
    core->options.compute->ops->start(core->options.compute, &s->batch);
}

/* ---- results --------------------------------------------------------------------------------- */

static void take_chunk(prefill_core *core, prefill_attempt *a, uint32_t at) {
    const prefill_batch *s = &core->step;
    const uint32_t count = s->token_offsets[at + 1] - s->token_offsets[at];
    a->computed_tokens += count;
    core->tokens_total += count;
    if (a->computed_tokens < a->prompt_tokens) {
        prefill_send_pages(core, a);
        return;
    }
    bt_free(a->prompt);
    a->prompt = NULL;
    if (s->samples[at]) {
        prefill_send_row(core, a, &s->rows[at]);
        return;
    }
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
    for (uint32_t i = 0; i < s->batch.sequences; i++) {
        prefill_attempt *a = &core->attempts[s->attempts[i]];
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
