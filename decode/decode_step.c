/* The step: every sample that can go on by one token, and some tokens of those that are recomputed.
 * Who fills the batch and what happens with a row is all that differs from prefill; the computing
 * is the same. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

bt_status decode_step_init(decode_core *core) {
    decode_batch *b = &core->step;
    const size_t n = core->options.sequences_max;
    b->members = bt_calloc(n, sizeof(decode_sample *));
    b->token_offsets = bt_calloc(n + 1, sizeof *b->token_offsets);
    b->token_ids = bt_calloc(n + core->options.chunk_tokens, sizeof *b->token_ids);
    b->first_positions = bt_calloc(n, sizeof *b->first_positions);
    b->page_offsets = bt_calloc(n + 1, sizeof *b->page_offsets);
    b->page_ids = bt_calloc(n * core->pages_per_sample, sizeof *b->page_ids);
    b->samples = bt_calloc(n, sizeof *b->samples);
    b->sampling = bt_calloc(n, sizeof *b->sampling);
    b->rows = bt_calloc(n, sizeof *b->rows);
    const bool is_made = b->members != NULL && b->token_offsets != NULL && b->token_ids != NULL &&
                         b->first_positions != NULL && b->page_offsets != NULL &&
                         b->page_ids != NULL && b->samples != NULL && b->sampling != NULL &&
                         b->rows != NULL;
    if (!is_made) return BT_ERR_WORKER_MEMORY; /* decode_step_fini frees what is there */
    b->batch = (model_batch){
        .token_offsets = b->token_offsets,
        .token_ids = b->token_ids,
        .first_positions = b->first_positions,
        .page_offsets = b->page_offsets,
        .page_ids = b->page_ids,
        .samples = b->samples,
        .sampling = b->sampling,
        .rows = b->rows,
    };
    return BT_OK;
}

void decode_step_fini(decode_core *core) {
    decode_batch *b = &core->step;
    decode_sampling_fini(core);
    bt_free(b->members);
    bt_free(b->token_offsets);
    bt_free(b->token_ids);
    bt_free(b->first_positions);
    bt_free(b->page_offsets);
    bt_free(b->page_ids);
    bt_free(b->samples);
    bt_free(b->sampling);
    bt_free(b->rows);
}

/* ---- filling --------------------------------------------------------------------------------- */

static void copy_tokens(const decode_sample *s, uint32_t count, int32_t *out) {
    const uint32_t prompt_tokens = s->attempt->prompt_tokens;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t position = s->computed_tokens + i;
        out[i] = position < prompt_tokens ? attempt_words_prompt(&s->attempt->words)[position]
                                          : s->output_ids[position - prompt_tokens];
    }
}

/* The next `count` tokens; behind the last of all a row is drawn. */
static void add_sample(decode_core *core, decode_sample *s, uint32_t count) {
    decode_batch *b = &core->step;
    const uint32_t at = b->batch.sequences;
    const uint32_t end = s->computed_tokens + count;
    const uint32_t pages = kv_pages_for(end, core->options.page_tokens);
    BT_ASSERT(end <= decode_tokens(s));
    BT_ASSERT(pages <= s->page_count);
    b->members[at] = s;
    copy_tokens(s, count, b->token_ids + b->batch.tokens);
    b->first_positions[at] = s->computed_tokens;
    memcpy(b->page_ids + b->page_offsets[at], s->pages, pages * sizeof *s->pages);
    b->page_offsets[at + 1] = b->page_offsets[at] + pages;
    b->samples[at] = end == decode_tokens(s);
    if (b->samples[at] != 0) {
        b->sampling[at] = decode_sampling(core, s);
        b->rows[at] = decode_row_for(core, s, at);
    }
    b->batch.sequences++;
    b->batch.tokens += count;
    b->token_offsets[at + 1] = b->batch.tokens;
    s->step_tokens = count;
    s->is_in_step = true;
}

/* As much of it as the budget has; what is left. */
static uint32_t add_chunk(decode_core *core, decode_sample *s, uint32_t budget) {
    const uint32_t missing = decode_tokens(s) - s->computed_tokens;
    const uint32_t count = missing < budget ? missing : budget;
    const bool draws = count == missing;
    if (count == 0 || (draws && !decode_prepare_row(core, s))) return budget;
    add_sample(core, s, count);
    return budget - count;
}

/* In order of admission, so that who is added already is older than who may be retracted next. */
static uint32_t add_those_with_pages(decode_core *core, uint32_t budget) {
    for (uint32_t i = 0; i < core->order_count; i++) {
        decode_sample *s = core->order[i];
        if (s->state == DECODE_RECOMPUTING) {
            budget = add_chunk(core, s, budget);
        } else if (s->state == DECODE_RUNNING && decode_grow(core, s) &&
                   decode_prepare_row(core, s)) {
            BT_ASSERT(decode_has_room(core, s));
            add_sample(core, s, 1);
        }
    }
    return budget;
}

/* Likewise: nobody overtakes the first, who may need many pages. */
static void add_retracted(decode_core *core, uint32_t budget) {
    for (uint32_t i = 0; i < core->order_count && budget > 0; i++) {
        decode_sample *s = core->order[i];
        if (s->state != DECODE_RETRACTED || s->lacks_room || !decode_has_words(s->attempt))
            continue;
        if (!decode_readmit(core, s)) return;
        budget = add_chunk(core, s, budget);
    }
}

void decode_step_turn(decode_core *core) {
    decode_batch *b = &core->step;
    if (b->is_running || core->is_broken) return;
    b->batch.sequences = 0;
    b->batch.tokens = 0;
    add_retracted(core, add_those_with_pages(core, core->options.chunk_tokens));
    if (b->batch.sequences == 0) return;
    b->is_running = true;
    b->deadline_us = decode_now(core) + core->options.step_us;
    b->weights_version = membership_weights_version(&core->member);
    core->options.compute->ops->start(core->options.compute, &b->batch);
}

/* ---- results --------------------------------------------------------------------------------- */

static bool keep_output(decode_sample *s, int32_t token) {
    if (s->rows_made == s->output_capacity) {
        const uint32_t most = s->attempt->generation.max_new_tokens;
        uint32_t wanted = s->output_capacity < 16 ? 16 : s->output_capacity * 2;
        if (wanted > most) wanted = most;
        int32_t *grown = bt_realloc(s->output_ids, wanted * sizeof *grown);
        if (grown == NULL) return false;
        s->output_ids = grown;
        s->output_capacity = wanted;
    }
    s->output_ids[s->rows_made] = token;
    return true;
}

static bool is_stop(const proto_generation *g, int32_t token) {
    for (uint32_t i = 0; i < g->stop_id_count; i++)
        if (g->stop_ids[i] == token) return true;
    return false;
}

void decode_commit(decode_core *core, decode_sample *s, int32_t token) {
    const decode_attempt *a = s->attempt;
    const proto_generation *g = &a->generation;
    if (!keep_output(s, token)) {
        /* The row is queued already, so it counts. */
        s->rows_made++;
        decode_finish_error(core, s, BT_ERR_WORKER_MEMORY, "no memory for more tokens");
        return;
    }
    s->rows_made++;
    core->tokens_total++;
    if (s->is_aborted) {
        decode_finish(core, s, PROTO_FINISH_ABORT, 0);
    } else if (s->rows_made >= g->max_new_tokens) {
        decode_finish(core, s, PROTO_FINISH_LENGTH, 0);
    } else if (is_stop(g, token)) {
        decode_finish(core, s, PROTO_FINISH_STOP, token);
    } else if (s->state == DECODE_RESERVED) {
        /* Two rows at the cap have room, so the first never parks. */
        const bool is_ready = decode_has_words(a);
        decode_set_state(core, s, is_ready ? DECODE_RUNNING : DECODE_WAITING, 0, "row 0");
    } else if (!decode_has_room(core, s)) {
        s->lacks_room = true;
        decode_set_state(core, s, DECODE_PARKED, decode_now(core) + core->options.park_us,
                         "no room for rows");
    }
}

void decode_finish_unsampled(decode_core *core, decode_sample *s, uint32_t row_status,
                             uint32_t cap_needed) {
    s->cap_needed = cap_needed;
    if (row_status == SAMPLER_OVERFLOW) {
        decode_finish_error(core, s, BT_ERR_REQUEST_OVERFLOW,
                            "the sampling support of token %" PRIu32 " has %" PRIu32
                            " entries, more than sampling_mask_max_tokens %" PRIu32,
                            s->rows_made, cap_needed, membership_cap(&core->member));
        return;
    }
    decode_finish_error(core, s, BT_ERR_REQUEST_CAPTURE,
                        "the sampling capture of token %" PRIu32 " is inconsistent", s->rows_made);
}

static bt_status queue_row(const decode_core *core, decode_sample *s, const sampler_row *row) {
    const proto_generation *g = &s->attempt->generation;
    row_top top[SAMPLER_TOP_MAX];
    for (uint32_t i = 0; i < row->top_count; i++)
        top[i] = (row_top){.id = row->top[i].id, .logprob = row->top[i].logprob};
    const token_row queued = {
        .token = row->token,
        .mask_mode = g->mask_mode,
        .has_logprob = g->wants_logprob,
        .token_logprob = row->token_logprob,
        .selected_logprob = row->selected_logprob,
        .support_count = row->support_count,
        .support_size = row->cap_needed,
        .weights_version = core->step.weights_version,
        .support_ids = row->support_ids,
        .support_logprobs = g->mask_mode == SAMPLER_MASK_SUPPORT ? row->support_logprobs : NULL,
        .top_count = row->top_count,
        .top = top,
        .id_logprob_count = g->logprob_id_count,
        .id_logprobs = row->id_logprobs,
    };
    return row_queue_push(s->queue, &queued);
}

/* An abort wins over everything that this row has to say. */
static void take_row(decode_core *core, decode_sample *s, const sampler_row *row) {
    if (row->status != SAMPLER_OK && s->is_aborted) {
        decode_finish(core, s, PROTO_FINISH_ABORT, 0);
        return;
    }
    if (row->status != SAMPLER_OK) {
        decode_finish_unsampled(core, s, row->status, row->cap_needed);
        return;
    }
    const bt_status status = queue_row(core, s, row);
    if (status != BT_OK) {
        decode_finish_error(core, s, status, "token %" PRIu32 " cannot be queued: %s", s->rows_made,
                            bt_status_string(status));
        return;
    }
    decode_commit(core, s, row->token);
}

/* What the step did for one sequence. */
static void take_result(decode_core *core, uint32_t at) {
    decode_batch *b = &core->step;
    decode_sample *s = b->members[at];
    s->computed_tokens += s->step_tokens;
    if (s->state == DECODE_RECOMPUTING) {
        core->recomputed_total += s->step_tokens;
        decode_offer_pages(core, s);
        if (b->samples[at] == 0) {
            if (s->is_aborted) decode_finish(core, s, PROTO_FINISH_ABORT, 0);
            return;
        }
        decode_set_state(core, s, DECODE_RUNNING, 0, "all is computed again");
    }
    BT_ASSERT(s->state == DECODE_RUNNING);
    take_row(core, s, &b->rows[at]);
}

/* The worker's own failure: every sample hears of it, and the process ends. */
static void break_down(decode_core *core, bt_status status, const char *text) {
    if (core->is_broken) return;
    core->is_broken = true;
    bt_log_error("decode", "%s: %s", text, bt_status_string(status));
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        decode_attempt *a = &core->attempts[i];
        if (a->state == DECODE_ATTEMPT_FREE || a->state == DECODE_ATTEMPT_QUARANTINE) continue;
        decode_abandon_attempt(core, a, BT_ERR_WORKER_INTERNAL, text);
        decode_end_attempt(core, a, "broken");
    }
    core->options.ops.on_broken(core->options.ops.context, status, text);
}

void decode_on_step_done(void *context, bt_status status) {
    decode_core *core = context;
    decode_batch *b = &core->step;
    BT_ASSERT(b->is_running);
    b->is_running = false;
    core->steps_total++;
    for (uint32_t i = 0; i < b->batch.sequences; i++)
        b->members[i]->is_in_step = false;
    for (uint32_t i = 0; i < b->batch.sequences; i++) {
        decode_sample *s = b->members[i];
        if (s->state == DECODE_LEAVING) {
            decode_release(core, s, "step done");
        } else if (status == BT_OK) {
            take_result(core, i);
        }
    }
    if (status != BT_OK) break_down(core, status, "a compute step failed");
    decode_core_turn(core);
}

void decode_step_tick(decode_core *core, uint64_t now_us) {
    if (!core->step.is_running || now_us < core->step.deadline_us) return;
    break_down(core, BT_ERR_WORKER_INTERNAL, "a compute step does not end");
}
