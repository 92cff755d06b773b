/* The step: every runnable attempt by one token, results to row queues. Who fills the batch and
 * what happens with a row is all that differs from prefill; the computing is the same. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

bt_status decode_step_init(decode_core *core) {
    decode_batch *s = &core->step;
    const size_t n = core->options.sequences_max;
    s->attempts = bt_calloc(n, sizeof *s->attempts);
    s->token_offsets = bt_calloc(n + 1, sizeof *s->token_offsets);
    s->token_ids = bt_calloc(n, sizeof *s->token_ids);
    s->first_positions = bt_calloc(n, sizeof *s->first_positions);
    s->page_offsets = bt_calloc(n + 1, sizeof *s->page_offsets);
    s->page_ids = bt_calloc(n * core->pages_per_attempt, sizeof *s->page_ids);
    s->samples = bt_calloc(n, sizeof *s->samples);
    s->sampling = bt_calloc(n, sizeof *s->sampling);
    s->rows = bt_calloc(n, sizeof *s->rows);
    const bool is_made = s->attempts != NULL && s->token_offsets != NULL && s->token_ids != NULL &&
                         s->first_positions != NULL && s->page_offsets != NULL &&
                         s->page_ids != NULL && s->samples != NULL && s->sampling != NULL &&
                         s->rows != NULL;
    if (!is_made) return BT_ERR_WORKER_MEMORY; /* decode_step_fini frees what is there */
    memset(s->samples, 1, n);
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

static void free_masks(decode_batch *s) {
    bt_free(s->support_ids);
    bt_free(s->support_logprobs);
    s->support_ids = NULL;
    s->support_logprobs = NULL;
    s->support_cap = 0;
}

void decode_step_fini(decode_core *core) {
    decode_batch *s = &core->step;
    free_masks(s);
    bt_free(s->attempts);
    bt_free(s->token_offsets);
    bt_free(s->token_ids);
    bt_free(s->first_positions);
    bt_free(s->page_offsets);
    bt_free(s->page_ids);
    bt_free(s->samples);
    bt_free(s->sampling);
    bt_free(s->rows);
}

bt_status decode_step_need_masks(decode_core *core) {
    decode_batch *s = &core->step;
    const uint32_t cap = membership_cap(&core->member);
    if (s->support_cap == cap) return BT_OK;
    /* The cap changes only between sessions, when nothing is in hand; but the first mask of a
     * session may be asked for while a step without masks runs, whose rows point nowhere. */
    free_masks(s);
    const size_t n = core->options.sequences_max;
    size_t entries = 0;
    if (!bt_mul_size(n, cap, &entries)) return BT_ERR_WORKER_MEMORY;
    s->support_ids = bt_calloc(entries, sizeof *s->support_ids);
    s->support_logprobs = bt_calloc(entries, sizeof *s->support_logprobs);
    if (s->support_ids == NULL || s->support_logprobs == NULL) {
        free_masks(s);
        return BT_ERR_WORKER_MEMORY;
    }
    s->support_cap = cap;
    return BT_OK;
}

sampler_params decode_sampling(const decode_core *core, const proto_generation *g) {
    return (sampler_params){
        .temperature = g->temperature,
        .top_p = g->top_p,
        .top_k = g->top_k,
        .mask_mode = g->mask_mode,
        .mask_max_tokens = g->mask_mode != SAMPLER_MASK_OFF ? membership_cap(&core->member) : 0,
        .vocab_limit = g->vocab_limit,
        .wants_logprob = g->wants_logprob,
        .seed = g->seed,
    };
}

/* ---- filling --------------------------------------------------------------------------------- */

static void add_sequence(decode_core *core, decode_attempt *a) {
    decode_batch *s = &core->step;
    const uint32_t at = s->batch.sequences;
    /* The last drawn token is consumed at the position behind everything before it. */
    const uint32_t position = a->prompt_tokens + a->rows_made - 1;
    const uint32_t pages = position / core->options.page_tokens + 1;
    BT_ASSERT(pages <= a->page_count);
    s->attempts[at] = a->index;
    s->token_ids[at] = a->last_token;
    s->first_positions[at] = position;
    memcpy(s->page_ids + s->page_offsets[at], a->pages, pages * sizeof *a->pages);
    s->page_offsets[at + 1] = s->page_offsets[at] + pages;
    s->token_offsets[at + 1] = at + 1;
    s->sampling[at] = decode_sampling(core, &a->generation);
    s->rows[at] = (sampler_row){0};
    if (a->generation.mask_mode != SAMPLER_MASK_OFF) {
        s->rows[at].support_ids = s->support_ids + (size_t)at * s->support_cap;
        s->rows[at].support_logprobs = s->support_logprobs + (size_t)at * s->support_cap;
    }
    s->batch.sequences++;
    s->batch.tokens++;
    a->is_in_step = true;
}

void decode_step_turn(decode_core *core) {
    decode_batch *s = &core->step;
    if (s->is_running || core->is_broken) return;
    s->batch.sequences = 0;
    s->batch.tokens = 0;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        decode_attempt *a = &core->attempts[i];
        if (a->state != DECODE_RUNNING) continue;
        BT_ASSERT(decode_has_room(core, a));
        add_sequence(core, a);
    }
    if (s->batch.sequences == 0) return;
    s->is_running = true;
    s->deadline_us = decode_now(core) + core->options.step_us;
    core->options.compute->ops->start(core->options.compute, &s->batch);
}

/* ---- results --------------------------------------------------------------------------------- */

static void park(decode_core *core, decode_attempt *a) {
    decode_set_state(core, a, DECODE_PARKED, decode_now(core) + core->options.park_us,
                     "no room for rows");
}

void decode_commit(decode_core *core, decode_attempt *a, int32_t token) {
    a->rows_made++;
    a->last_token = token;
    core->tokens_total++;
    if (a->rows_made >= a->generation.max_new_tokens) {
        decode_finish(core, a, PROTO_FINISH_LENGTH, 0);
        return;
    }
    for (uint32_t i = 0; i < a->generation.stop_id_count; i++) {
        if (a->generation.stop_ids[i] != token) continue;
        decode_finish(core, a, PROTO_FINISH_STOP, token);
        return;
    }
    if (!decode_has_room(core, a)) {
        park(core, a);
    } else if (a->state == DECODE_RESERVED) {
        decode_set_state(core, a, DECODE_RUNNING, 0, "row 0");
    }
}

static void take_row(decode_core *core, decode_attempt *a, const sampler_row *row) {
    if (row->status == SAMPLER_OVERFLOW) {
        a->cap_needed = row->cap_needed;
        decode_finish_error(core, a, BT_ERR_REQUEST_OVERFLOW,
                            "the sampling support of token %" PRIu32 " has %" PRIu32
                            " entries, more than sampling_mask_max_tokens %" PRIu32,
                            a->rows_made, row->cap_needed, membership_cap(&core->member));
        return;
    }
    if (row->status != SAMPLER_OK) {
        decode_finish_error(core, a, BT_ERR_REQUEST_CAPTURE,
                            "the sampling capture of token %" PRIu32 " is inconsistent",
                            a->rows_made);
        return;
    }
    const uint32_t mode = a->generation.mask_mode;
    const token_row queued = {
        .token = row->token,
        .mask_mode = mode,
        .has_logprob = a->generation.wants_logprob,
        .token_logprob = row->token_logprob,
        .selected_logprob = row->selected_logprob,
        .support_count = row->support_count,
        .support_ids = row->support_ids,
        .support_logprobs = mode == SAMPLER_MASK_SUPPORT ? row->support_logprobs : NULL,
    };
    const bt_status status = row_queue_push(a->queue, &queued);
    if (status != BT_OK) {
        decode_finish_error(core, a, status, "token %" PRIu32 " cannot be queued: %s", a->rows_made,
                            bt_status_string(status));
        return;
    }
    decode_commit(core, a, row->token);
}

/* The worker's own failure: every attempt hears of it, and the process ends. */
static void break_down(decode_core *core, bt_status status, const char *text) {
    if (core->is_broken) return;
    core->is_broken = true;
    bt_log_error("decode", "%s: %s", text, bt_status_string(status));
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        decode_attempt *a = &core->attempts[i];
        if (a->state == DECODE_FREE || a->state == DECODE_LEAVING ||
            a->state == DECODE_QUARANTINE) {
            continue;
        }
        decode_abandon(core, a, BT_ERR_WORKER_INTERNAL, text);
        decode_end(core, a, "broken");
    }
    core->options.ops.on_broken(core->options.ops.context, status, text);
}

void decode_on_step_done(void *context, bt_status status) {
    decode_core *core = context;
    decode_batch *s = &core->step;
    BT_ASSERT(s->is_running);
    s->is_running = false;
    core->steps_total++;
    for (uint32_t i = 0; i < s->batch.sequences; i++) {
        core->attempts[s->attempts[i]].is_in_step = false;
    }
    for (uint32_t i = 0; i < s->batch.sequences; i++) {
        decode_attempt *a = &core->attempts[s->attempts[i]];
        if (a->state == DECODE_LEAVING) {
            decode_release(core, a, "step done");
            continue;
        }
        BT_ASSERT(a->state == DECODE_RUNNING);
        if (status == BT_OK) take_row(core, a, &s->rows[i]);
    }
    if (status != BT_OK) break_down(core, status, "a compute step failed");
    decode_core_turn(core);
}

void decode_step_tick(decode_core *core, uint64_t now_us) {
    if (!core->step.is_running || now_us < core->step.deadline_us) return;
    break_down(core, BT_ERR_WORKER_INTERNAL, "a compute step does not end");
}
