/* What one process draws, for the rig: the rows that prefill delivers, and those that decode must
 * have streamed. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "proto/row_stream.h"
#include "rig.h"

enum { CAP = RIG_SUPPORT_MAX };

/* ---- what one process draws ------------------------------------------------------------------ */

typedef struct expectation {
    uint32_t count;
    sampler_row rows[RIG_ROWS_MAX];
    int32_t ids[RIG_ROWS_MAX][RIG_SUPPORT_MAX];
    float logprobs[RIG_ROWS_MAX][RIG_SUPPORT_MAX];
    sampler_top top[RIG_ROWS_MAX][RIG_TOP_MAX];
    float id_logprobs[RIG_ROWS_MAX][RIG_TOP_MAX];
} expectation;

static sampler_params params_of(const rig_attempt *a, uint32_t sample) {
    const proto_generation *g = &a->generation;
    const int32_t *biases = a->words + a->prompt_tokens;
    return (sampler_params){
        .temperature = g->temperature,
        .top_p = g->top_p,
        .top_k = g->top_k,
        .mask_mode = g->mask_mode,
        .mask_max_tokens = CAP,
        .mask_bounded = g->mask_bounded,
        .vocab_limit = g->vocab_limit,
        .wants_logprob = g->wants_logprob,
        .seed = proto_sample_seed(g->seed, sample),
        .filter = g->filter,
        .min_p = g->min_p,
        .frequency_penalty = g->frequency_penalty,
        .presence_penalty = g->presence_penalty,
        .repetition_penalty = g->repetition_penalty,
        .banned_count = g->banned_id_count,
        .banned_ids = g->stop_ids,
        .bias_count = g->bias_count,
        .bias_ids = biases,
        .biases = (const float *)(const void *)(biases + g->bias_count),
        .top_logprobs = g->top_logprobs,
        .logprob_id_count = g->logprob_id_count,
        .logprob_ids = biases + 2 * g->bias_count,
    };
}

static const expectation *expect(const rig *r, const rig_attempt *a, uint32_t sample,
                                 uint32_t count) {
    static expectation e; /* large; tests run one after the other */
    const sampler_params params = params_of(a, sample);
    assert_true(count <= RIG_ROWS_MAX);
    assert_true(a->generation.top_logprobs <= RIG_TOP_MAX);
    for (uint32_t i = 0; i < count; i++)
        e.rows[i] = (sampler_row){.support_ids = e.ids[i],
                                  .support_logprobs = e.logprobs[i],
                                  .top = e.top[i],
                                  .id_logprobs = e.id_logprobs[i]};
    e.count = compute_sim_expect_banned(&r->sim, &params, a->generation.min_new_tokens, a->words,
                                        a->prompt_tokens, count, e.rows);
    return &e;
}

static bool is_stop(const proto_generation *g, int32_t token) {
    for (uint32_t i = 0; i < g->stop_id_count; i++)
        if (g->stop_ids[i] == token) return true;
    return false;
}

uint32_t rig_answer(const rig *r, const rig_attempt *a, uint32_t sample, proto_finish *finish_out) {
    const proto_generation *g = &a->generation;
    const expectation *e = expect(r, a, sample, g->max_new_tokens);
    *finish_out = PROTO_FINISH_LENGTH;
    assert_int_equal(e->count, g->max_new_tokens);
    for (uint32_t i = 0; i + 1 < e->count; i++) {
        if (!is_stop(g, e->rows[i].token)) continue;
        *finish_out = PROTO_FINISH_STOP;
        return i + 1;
    }
    return e->count;
}

int32_t rig_token(const rig *r, const rig_attempt *a, uint32_t sample, uint32_t row) {
    const expectation *e = expect(r, a, sample, row + 1);
    assert_int_equal(e->count, row + 1);
    return e->rows[row].token;
}

static void expect_same(const proto_generation *g, const token_row *got, const sampler_row *row) {
    assert_int_equal(row->status, SAMPLER_OK);
    assert_int_equal(got->token, row->token);
    assert_int_equal(got->mask_mode, g->mask_mode);
    assert_memory_equal(&got->token_logprob, &row->token_logprob, sizeof(float));
    assert_memory_equal(&got->selected_logprob, &row->selected_logprob, sizeof(float));
    assert_int_equal(got->support_count, row->support_count);
    assert_int_equal(got->support_size, row->cap_needed);
    assert_int_equal(got->top_count, row->top_count);
    assert_true(g->vocab_limit != 0 || got->top_count == g->top_logprobs);
    assert_int_equal(got->id_logprob_count, g->logprob_id_count);
    const uint32_t count = got->support_count;
    if (count > 0) assert_memory_equal(got->support_ids, row->support_ids, count * sizeof(int32_t));
    if (got->support_logprobs != NULL)
        assert_memory_equal(got->support_logprobs, row->support_logprobs, count * sizeof(float));
    for (uint32_t i = 0; i < got->top_count; i++) {
        assert_int_equal(got->top[i].id, row->top[i].id);
        assert_memory_equal(&got->top[i].logprob, &row->top[i].logprob, sizeof(float));
    }
    if (got->id_logprob_count > 0)
        assert_memory_equal(got->id_logprobs, row->id_logprobs,
                            got->id_logprob_count * sizeof(float));
}

uint32_t rig_rows(const rig *r, const rig_attempt *a, uint32_t sample) {
    const rig_stream *s = &a->streams[sample];
    const expectation *e = expect(r, a, sample, a->generation.max_new_tokens);
    uint32_t rows = 0;
    for (size_t at = 0; at < s->byte_count; rows++) {
        token_row row;
        size_t used = 0;
        assert_int_equal(row_record_decode(s->bytes + at, s->byte_count - at, CAP, &row, &used),
                         BT_OK);
        if (used == 0) break; /* the rest of this row has not been sent */
        assert_true(rows < e->count);
        expect_same(&a->generation, &row, &e->rows[rows]);
        assert_int_equal(row.weights_version, rows == 0 ? RIG_PREFILL_WEIGHTS : RIG_WEIGHTS);
        at += used;
    }
    return rows;
}

/* ---- the prefill worker's part --------------------------------------------------------------- */

static void compute_prompt(rig *r, rig_attempt *a) {
    const uint32_t page_tokens = r->options.page_tokens;
    const uint32_t token_offsets[2] = {0, a->prompt_tokens};
    const uint32_t page_offsets[2] = {0, a->page_count};
    const uint32_t first = 0;
    const uint8_t samples = 0;
    const model_batch batch = {.sequences = 1,
                               .tokens = a->prompt_tokens,
                               .token_offsets = token_offsets,
                               .token_ids = a->words,
                               .first_positions = &first,
                               .page_offsets = page_offsets,
                               .page_ids = a->pages,
                               .samples = &samples};
    const compute_ops *ops = r->prefill_compute->ops;
    ops->start(r->prefill_compute, &batch);
    assert_true(compute_sim_poll(r->prefill_compute, r->now_us));
    const uint32_t used = a->prompt_tokens % page_tokens;
    if (used > 0) ops->zero_tail(r->prefill_compute, a->pages[a->page_count - 1], used);
}

/* What prefill's rows say it found. */
static uint32_t cached_tokens_of(const rig_attempt *a) {
    return a->prompt_tokens > 16 ? 16 : 0;
}

static metadata_row first_row(const rig *r, const rig_attempt *a, uint32_t sample) {
    const proto_generation *g = &a->generation;
    const sampler_row *row = &expect(r, a, sample, 1)->rows[0];
    static row_top top[RIG_TOP_MAX];
    for (uint32_t i = 0; i < row->top_count; i++)
        top[i] = (row_top){.id = row->top[i].id, .logprob = row->top[i].logprob};
    return (metadata_row){
        .sample_index = sample,
        .first_token = row->token,
        .support_count = row->support_count,
        .cap_needed = row->cap_needed,
        .cached_tokens = cached_tokens_of(a),
        .mask_mode = g->mask_mode,
        .weights_version = RIG_PREFILL_WEIGHTS,
        .has_first_logprob = g->wants_logprob,
        .first_logprob = row->token_logprob,
        .selected_logprob = row->selected_logprob,
        .support_ids = g->mask_mode != SAMPLER_MASK_OFF ? row->support_ids : NULL,
        .support_logprobs = g->mask_mode == SAMPLER_MASK_SUPPORT ? row->support_logprobs : NULL,
        .top_count = row->top_count,
        .top = top,
        .id_logprob_count = g->logprob_id_count,
        .id_logprobs = row->id_logprobs,
    };
}

void rig_deliver(rig *r, rig_attempt *a, const uint32_t *statuses) {
    const proto_generation *g = &a->generation;
    row_slot slots[PROTO_SAMPLES_MAX];
    for (uint32_t i = 0; i < g->samples; i++)
        slots[i] = (row_slot){.index = a->answer.slots[i].index,
                              .generation = a->answer.slots[i].generation};
    const handoff_target target = {.attempt = a->id,
                                   .peer = rig_decode_peer,
                                   .sample_count = g->samples,
                                   .slots = slots,
                                   .prompt_tokens = a->prompt_tokens,
                                   .deadline_us = r->now_us + RIG_DEADLINE_MS * 1000u};
    a->is_delivered = true;
    a->page_count = kv_pages_for(a->prompt_tokens, r->options.page_tokens);
    assert_int_equal(kv_pool_acquire(r->prefill_pages, a->id.counter, a->page_count, a->pages),
                     BT_OK);
    compute_prompt(r, a);
    assert_int_equal(handoff_sender_begin(r->sender, &target), BT_OK);
    assert_int_equal(handoff_sender_pages(r->sender, a->id, 0, a->page_count, a->pages, true),
                     BT_OK);
    for (uint32_t i = 0; i < g->samples; i++) {
        metadata_row row = first_row(r, a, i);
        if (statuses != NULL && statuses[i] != SAMPLER_OK) {
            row = (metadata_row){.sample_index = i,
                                 .first_token = -1,
                                 .status = statuses[i],
                                 .cap_needed = statuses[i] == SAMPLER_OVERFLOW ? 99 : 0,
                                 .cached_tokens = cached_tokens_of(a),
                                 .mask_mode = g->mask_mode};
        }
        if (r->change != NULL) r->change(&row);
        assert_int_equal(handoff_sender_row(r->sender, a->id, &row), BT_OK);
    }
}

/* ---- expectations ---------------------------------------------------------------------------- */

void rig_expect_answer(const rig *r, const rig_attempt *a, uint32_t sample) {
    const rig_stream *s = &a->streams[sample];
    proto_finish finish;
    const uint32_t rows = rig_answer(r, a, sample, &finish);
    if (s->finishes == 1 && s->last.status != BT_OK) print_error("%s\n", s->last.text);
    assert_int_equal(s->finishes, 1);
    assert_int_equal(s->last.finish, finish);
    assert_int_equal(s->last.status, BT_OK);
    assert_int_equal(s->last.rows_total, rows);
    assert_int_equal(s->last.cached_tokens, cached_tokens_of(a));
    assert_int_equal(rig_rows(r, a, sample), rows);
}

void rig_expect_error(const rig *r, const rig_attempt *a, uint32_t sample, bt_status status,
                      const char *text) {
    const rig_stream *s = &a->streams[sample];
    assert_int_equal(s->finishes, 1);
    assert_int_equal(s->last.finish, PROTO_FINISH_ERROR);
    assert_int_equal(s->last.status, status);
    if (strstr(s->last.text, text) == NULL) fail_msg("'%s'", s->last.text);
    assert_int_equal(s->last.rows_total, rig_rows(r, a, sample));
}

void rig_expect_abort(const rig *r, const rig_attempt *a, uint32_t sample, uint32_t rows) {
    const rig_stream *s = &a->streams[sample];
    assert_int_equal(s->finishes, 1);
    assert_int_equal(s->last.finish, PROTO_FINISH_ABORT);
    assert_int_equal(s->last.status, BT_OK);
    assert_int_equal(s->last.rows_total, rows);
    assert_int_equal(rig_rows(r, a, sample), rows);
}

void rig_expect_silence(const rig_attempt *a, uint32_t sample) {
    assert_int_equal(a->streams[sample].finishes, 0);
}
