/* Requests, what they must be answered, and how they may end instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "proto/row_stream.h"
#include "tests/sim/sim.h"

enum { SLACK_US = 200 * 1000 }; /* ticks */

/* ---- making ---------------------------------------------------------------------------------- */

static const int32_t *bias_ids_of(const sim_client *c) {
    return c->request.words + c->request.prompt_tokens;
}

static const int32_t *logprob_ids_of(const sim_client *c) {
    return bias_ids_of(c) + 2 * (size_t)c->request.generation.bias_count;
}

static sampler_params params_of(const sim *s, const sim_client *c, uint32_t sample,
                                const float *biases) {
    const proto_generation *g = &c->request.generation;
    return (sampler_params){.temperature = g->temperature,
                            .top_p = g->top_p,
                            .top_k = g->top_k,
                            .mask_mode = g->mask_mode,
                            .mask_max_tokens = g->mask_mode == 0 ? 0 : s->scenario.cap,
                            .mask_bounded = g->mask_bounded,
                            .vocab_limit = g->vocab_limit,
                            .wants_logprob = g->wants_logprob,
                            .seed = proto_sample_seed(g->seed, sample),
                            .filter = g->filter,
                            .min_p = g->min_p,
                            .frequency_penalty = g->frequency_penalty,
                            .presence_penalty = g->presence_penalty,
                            .repetition_penalty = g->repetition_penalty,
                            .banned_ids = g->stop_ids,
                            .banned_count = g->banned_id_count,
                            .bias_ids = bias_ids_of(c),
                            .biases = biases,
                            .bias_count = g->bias_count,
                            .top_logprobs = g->top_logprobs,
                            .logprob_ids = logprob_ids_of(c),
                            .logprob_id_count = g->logprob_id_count};
}

static void *get_zeroed(size_t count, size_t bytes) {
    void *block = bt_calloc(count + 1, bytes);
    assert_non_null(block);
    return block;
}

static compute_sim_options computing(const sim *s) {
    return (compute_sim_options){.page_tokens = s->scenario.page_tokens,
                                 .vocab_size = SIM_VOCAB,
                                 .support_max = s->scenario.support_max};
}

/* Rows of what a single process draws, up to a stop id, the length, or an overflow. */
static void expect_rows(sim *s, sim_client *c, uint32_t sample) {
    const proto_generation *g = &c->request.generation;
    const uint32_t count = g->max_new_tokens;
    const size_t cap = g->mask_mode == 0 ? 1 : row_entries_max(s->scenario.cap, SIM_VOCAB);
    float biases[SIM_BIASES_MAX];
    sim_sample *to = &c->samples[sample];
    if (count == 0) return;
    memcpy(biases, bias_ids_of(c) + g->bias_count, g->bias_count * sizeof *biases);
    const sampler_params params = params_of(s, c, sample, biases);
    to->expected = get_zeroed(count, sizeof *to->expected);
    to->support_ids = get_zeroed(count * cap, sizeof *to->support_ids);
    to->support_logprobs = get_zeroed(count * cap, sizeof *to->support_logprobs);
    to->top = get_zeroed((size_t)count * SIM_TOPS_MAX, sizeof *to->top);
    to->id_logprobs = get_zeroed((size_t)count * SIM_IDS_MAX, sizeof *to->id_logprobs);
    for (uint32_t i = 0; i < count; i++) {
        to->expected[i].support_ids = to->support_ids + i * cap;
        to->expected[i].support_logprobs = to->support_logprobs + i * cap;
        to->expected[i].top = to->top + (size_t)i * SIM_TOPS_MAX;
        to->expected[i].id_logprobs = to->id_logprobs + (size_t)i * SIM_IDS_MAX;
    }
    const compute_sim_options options = computing(s);
    to->expected_count =
        compute_sim_expect_banned(&options, &params, g->min_new_tokens, c->request.words,
                                  c->request.prompt_tokens, count, to->expected);
}

/* Entries for the prompt as the wire has them. */
static void expect_prompt(sim *s, sim_client *c) {
    const proto_generation *g = &c->request.generation;
    float logprobs[512], ids[512 * SIM_IDS_MAX];
    sampler_top top[512 * SIM_TOPS_MAX];
    if (!g->wants_prompt_logprobs) return;
    const uint32_t from = g->prompt_logprobs_from;
    const uint32_t count = c->request.prompt_tokens - 1 - from;
    assert_true(count <= 512);
    const model_scores scores = {.first = from,
                                 .count = count,
                                 .targets = c->request.words + from + 1,
                                 .vocab_limit = g->vocab_limit,
                                 .top_count = g->top_logprobs,
                                 .id_count = g->logprob_id_count,
                                 .ids = logprob_ids_of(c),
                                 .logprobs = logprobs,
                                 .top = top,
                                 .id_logprobs = ids};
    const compute_sim_options options = computing(s);
    const size_t entry = proto_prompt_logprob_bytes(g);
    uint8_t *at = get_zeroed(count, entry);
    c->prompt_logprobs = (float *)(void *)at;
    if (count > 0) compute_sim_expect_scores(&options, c->request.words, &scores);
    for (uint32_t i = 0; i < count; i++, at += entry) {
        const size_t tops = g->top_logprobs * sizeof *top;
        memcpy(at, &logprobs[i], sizeof(float));
        memcpy(at + sizeof(float), top + (size_t)i * g->top_logprobs, tops);
        memcpy(at + sizeof(float) + tops, ids + (size_t)i * g->logprob_id_count,
               g->logprob_id_count * sizeof(float));
    }
}

static void set_plain(sim *s, sim_client *c) {
    proto_generation *g = &c->request.generation;
    *g = proto_generation_default();
    g->max_new_tokens = (uint32_t)sim_random(s, s->scenario.new_tokens_max + 1);
    if (c->is_probe && g->max_new_tokens == 0) g->max_new_tokens = 1;
    g->top_k = sim_random(s, 3) == 0 ? 1 + (uint32_t)sim_random(s, 50) : 0;
    g->mask_mode = (uint32_t)sim_random(s, 3);
    if (s->scenario.has_no_masks) g->mask_mode = 0;
    g->wants_logprob = (uint32_t)sim_random(s, 2);
    g->seed = sim_random(s, UINT64_MAX);
    g->mask_bounded = g->mask_mode != 0 && g->seed % 3 == 0;
    g->stop_id_count = (uint32_t)sim_random(s, 4);
    for (uint32_t i = 0; i < g->stop_id_count; i++)
        g->stop_ids[i] = (int32_t)sim_random(s, SIM_VOCAB);
}

/* Everything else, each in some of the requests. */
static void set_extras(sim *s, sim_client *c) {
    proto_generation *g = &c->request.generation;
    if (sim_random(s, 2) == 0) g->samples = 1 + (uint32_t)sim_random(s, s->scenario.samples_max);
    if (sim_random(s, 4) == 0) g->frequency_penalty = 0.5f;
    if (sim_random(s, 4) == 0) g->repetition_penalty = 1.25f;
    if (sim_random(s, 4) == 0) g->bias_count = 1 + (uint32_t)sim_random(s, SIM_BIASES_MAX);
    if (sim_random(s, 4) == 0 && g->max_new_tokens > 0) {
        g->min_new_tokens = (uint32_t)sim_random(s, g->max_new_tokens + 1);
        g->banned_id_count = g->min_new_tokens > 0 ? g->stop_id_count : 0;
    }
    if (!g->wants_logprob) return;
    g->top_logprobs = (uint32_t)sim_random(s, SIM_TOPS_MAX + 1);
    g->logprob_id_count = (uint32_t)sim_random(s, SIM_IDS_MAX + 1);
    g->wants_prompt_logprobs = (uint32_t)sim_random(s, 2);
    g->prompt_logprobs_from = (uint32_t)sim_random(s, c->request.prompt_tokens);
}

/* Half of the prompts begin like an earlier one, often all the way. */
static void begin_alike(sim *s, const sim_client *c, int32_t *words) {
    if (s->client_count < 2 || sim_random(s, 2) == 0) return;
    const sim_client *like = &s->clients[sim_random(s, s->client_count - 1)];
    uint32_t shared = c->request.prompt_tokens;
    if (shared > like->request.prompt_tokens) shared = like->request.prompt_tokens;
    if (sim_random(s, 2) == 0) shared = (uint32_t)sim_random(s, shared + 1);
    memcpy(words, like->request.words, shared * sizeof *words);
}

/* Ids are told apart by their place, so that none comes twice. */
static void set_words(sim *s, sim_client *c) {
    const proto_generation *g = &c->request.generation;
    const uint32_t tokens = c->request.prompt_tokens;
    int32_t *words = get_zeroed(proto_words(g, tokens), sizeof *words);
    int32_t *at = words;
    c->request.words = words;
    for (uint32_t i = 0; i < tokens; i++)
        *at++ = (int32_t)sim_random(s, SIM_VOCAB);
    begin_alike(s, c, words);
    for (uint32_t i = 0; i < g->bias_count; i++)
        *at++ = (int32_t)(sim_random(s, SIM_VOCAB / 4) * 4 + i);
    for (uint32_t i = 0; i < g->bias_count; i++) {
        const float bias = (float)sim_random(s, 100) / 10 - 5;
        memcpy(at++, &bias, sizeof bias);
    }
    for (uint32_t i = 0; i < g->logprob_id_count; i++)
        *at++ = (int32_t)(sim_random(s, SIM_VOCAB / 4) * 4 + i);
}

/* Stop ids that are never drawn test little: sometimes one is taken from the answer. */
static void set_stop(sim *s, sim_client *c) {
    proto_generation *g = &c->request.generation;
    const sim_sample *first = &c->samples[0];
    if (first->expected_count < 2 || g->banned_id_count > 0 || sim_random(s, 3) != 0) return;
    const int32_t token = first->expected[sim_random(s, first->expected_count)].token;
    if (token < 0) return; /* the row that overflows */
    g->stop_ids[0] = token;
    if (g->stop_id_count == 0) g->stop_id_count = 1;
}

static void submit(sim *s, uint64_t index, uint64_t b);

void sim_client_add(sim *s, uint64_t at_us, bool is_probe) {
    assert_true(s->client_count < SIM_CLIENTS_MAX);
    sim_client *c = &s->clients[s->client_count++];
    const sim_scenario *o = &s->scenario;
    c->is_probe = is_probe;
    c->request.id = s->client_count;
    c->request.prompt_tokens = 1 + (uint32_t)sim_random(s, o->prompt_tokens_max);
    c->request.is_credited = sim_random(s, 2) == 0;
    c->request.may_restart = c->request.id % 3 != 0;
    c->request.emission_rows = (uint32_t)(c->request.id % 60);
    c->is_slow = !is_probe && sim_chance(s, o->slow_reader_permille);
    if (!is_probe && sim_chance(s, o->short_timeout_permille)) {
        c->request.timeout_ms = 1 + (uint32_t)sim_random(s, 2000);
    }
    c->will_cancel = !is_probe && sim_chance(s, o->cancel_permille);
    c->will_cancel_sample = !is_probe && sim_chance(s, o->cancel_sample_permille);
    set_plain(s, c);
    set_extras(s, c);
    set_words(s, c);
    for (uint32_t i = 0; i < c->request.generation.samples; i++)
        expect_rows(s, c, i);
    expect_prompt(s, c);
    set_stop(s, c);
    sim_abort_plan(s, c);
    sim_at(s, at_us, submit, s->client_count - 1, 0);
}

static void cancel(sim *s, uint64_t index, uint64_t b) {
    (void)b;
    const sim_client *c = &s->clients[index];
    if (c->state == CLIENT_WAITING) dispatch_cancel(s->router.d, c->request.id, s->now_us);
}

static void cancel_sample(sim *s, uint64_t index, uint64_t sample) {
    sim_client *c = &s->clients[index];
    sim_sample *of = &c->samples[sample];
    if (c->state != CLIENT_WAITING || of->has_ended) return;
    of->is_cancelled = true;
    s->tally.sample_cancels++;
    dispatch_cancel_sample(s->router.d, c->request.id, (uint32_t)sample, s->now_us);
    assert_true(of->has_ended);
}

static void submit(sim *s, uint64_t index, uint64_t b) {
    sim_client *c = &s->clients[index];
    bt_error error = {.text = ""};
    (void)b;
    s->tally.clients++;
    c->submitted_us = s->now_us;
    c->state = CLIENT_WAITING;
    if (s->router.d == NULL) {
        c->state = CLIENT_REFUSED;
        s->tally.refused++;
        return;
    }
    const bt_status status = dispatch_submit(s->router.d, &c->request, s->now_us, &error);
    if (status != BT_OK) {
        if (status != BT_ERR_REQUEST_NO_WORKER) fail_msg("%s", error.text);
        assert_int_equal(c->state, CLIENT_WAITING);
        c->state = CLIENT_REFUSED;
        s->tally.refused++;
        return;
    }
    if (c->will_cancel) sim_after(s, sim_random(s, 3 * SIM_SECOND), cancel, index, 0);
    if (c->will_cancel_sample) {
        const uint64_t sample = sim_random(s, c->request.generation.samples);
        sim_after(s, sim_random(s, SIM_SECOND), cancel_sample, index, sample);
    }
    sim_abort_on_submit(s, c);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void check_row(const sim_client *c, const token_row *got, const sampler_row *want) {
    const proto_generation *g = &c->request.generation;
    assert_int_equal(got->token, want->token);
    assert_int_equal(got->mask_mode, g->mask_mode);
    assert_int_equal(got->has_logprob, g->wants_logprob);
    assert_memory_equal(&got->token_logprob, &want->token_logprob, sizeof(float));
    assert_memory_equal(&got->selected_logprob, &want->selected_logprob, sizeof(float));
    assert_int_equal(got->top_count, want->top_count);
    assert_memory_equal(got->top, want->top, want->top_count * sizeof *want->top);
    assert_int_equal(got->id_logprob_count, g->logprob_id_count);
    assert_memory_equal(got->id_logprobs, want->id_logprobs, g->logprob_id_count * sizeof(float));
    assert_int_equal(got->support_count, want->support_count);
    assert_int_equal(got->support_size, want->cap_needed);
    if (want->support_count == 0) return;
    assert_memory_equal(got->support_ids, want->support_ids, want->support_count * sizeof(int32_t));
    if (g->mask_mode != 2) return;
    assert_memory_equal(got->support_logprobs, want->support_logprobs,
                        want->support_count * sizeof(float));
}

/* b: bytes, and above them the sample. */
static void grant(sim *s, uint64_t request, uint64_t b) {
    const sim_client *c = &s->clients[request - 1];
    if (c->state != CLIENT_WAITING) return;
    dispatch_grant(s->router.d, request, (uint32_t)(b >> 48), b & (UINT64_MAX >> 16), s->now_us);
}

void sim_client_on_rows(sim *s, uint64_t request, const dispatch_rows *rows) {
    sim_client *c = &s->clients[request - 1];
    sim_sample *of = &c->samples[rows->sample];
    const uint32_t before = of->rows;
    size_t at = 0;
    assert_int_equal(c->state, CLIENT_WAITING);
    assert_true(rows->sample < c->request.generation.samples);
    assert_false(of->has_ended);
    for (uint32_t i = 0; i < rows->count; i++, of->rows++) {
        token_row row;
        size_t used = 0;
        assert_int_equal(
            row_record_decode(rows->records + at, rows->bytes - at, s->scenario.cap, &row, &used),
            BT_OK);
        assert_true(used > 0);
        assert_true(of->rows < of->expected_count);
        assert_int_equal(of->expected[of->rows].status, SAMPLER_OK);
        check_row(c, &row, &of->expected[of->rows]);
        at += used;
    }
    assert_int_equal(at, rows->bytes);
    s->tally.rows += rows->count;
    sim_abort_on_rows(s, c, rows->sample, before);
    if (!c->request.is_credited) return;
    /* A slow reader takes seconds for each batch; the slowest never reads on. */
    if (c->is_slow && sim_random(s, 4) == 0) return;
    sim_after(s, sim_delay(s, c->is_slow ? 2 * SIM_SECOND : 1000), grant, request,
              (uint64_t)rows->sample << 48 | rows->bytes);
}

/* What is checked row by row begins again; ended samples stand. */
void sim_client_on_restart(sim *s, uint64_t request) {
    sim_client *c = &s->clients[request - 1];
    uint32_t taken_back = 0;
    assert_int_equal(c->state, CLIENT_WAITING);
    assert_true(c->request.may_restart);
    for (uint32_t i = 0; i < c->request.generation.samples; i++) {
        sim_sample *of = &c->samples[i];
        if (of->has_ended) continue;
        assert_false(of->is_aborting);
        taken_back += of->rows;
        of->rows = 0;
    }
    assert_true(taken_back > 0);
    s->tally.restarts++;
}

/* From the first one on; after a retry again. */
void sim_client_on_prompt_logprobs(sim *s, uint64_t request,
                                   const dispatch_prompt_logprobs *logprobs) {
    sim_client *c = &s->clients[request - 1];
    const proto_generation *g = &c->request.generation;
    const uint32_t first = g->prompt_logprobs_from + 1;
    const size_t entry = proto_prompt_logprob_bytes(g);
    assert_int_equal(c->state, CLIENT_WAITING);
    assert_int_equal(g->wants_prompt_logprobs, 1);
    if (logprobs->first_position == first) c->next_position = first;
    assert_int_equal(logprobs->first_position, c->next_position);
    c->next_position += logprobs->count;
    assert_true(c->next_position <= c->request.prompt_tokens);
    assert_int_equal(logprobs->bytes, logprobs->count * entry);
    const uint8_t *expected = (const uint8_t *)c->prompt_logprobs;
    assert_memory_equal(logprobs->entries, expected + (logprobs->first_position - first) * entry,
                        logprobs->bytes);
    s->tally.logprobs += logprobs->count;
}

/* ---- ends ------------------------------------------------------------------------------------ */

static bool is_stop(const proto_generation *g, int32_t token) {
    for (uint32_t i = 0; i < g->stop_id_count; i++) {
        if (g->stop_ids[i] == token) return true;
    }
    return false;
}

/* The rows of the whole answer of a sample, and how it ends. */
static uint32_t whole_answer(const proto_generation *g, const sim_sample *of, proto_finish *finish,
                             bt_status *status, uint32_t *cap_needed) {
    *finish = PROTO_FINISH_LENGTH;
    *status = BT_OK;
    *cap_needed = 0;
    for (uint32_t i = 0; i < of->expected_count; i++) {
        if (of->expected[i].status == SAMPLER_OVERFLOW) {
            *finish = PROTO_FINISH_ERROR;
            *status = BT_ERR_REQUEST_OVERFLOW;
            *cap_needed = of->expected[i].cap_needed;
            return i;
        }
        assert_int_equal(of->expected[i].status, SAMPLER_OK);
        if (i + 1 == g->max_new_tokens) return i + 1;
        if (!is_stop(g, of->expected[i].token)) continue;
        *finish = PROTO_FINISH_STOP;
        return i + 1;
    }
    return 0; /* max_new_tokens 0 */
}

static void check_whole(const proto_generation *g, const sim_sample *of, const dispatch_end *end) {
    proto_finish finish;
    bt_status status;
    uint32_t cap_needed;
    const uint32_t rows = whole_answer(g, of, &finish, &status, &cap_needed);
    assert_int_equal(end->status, status);
    assert_int_equal(end->finish, finish);
    assert_int_equal(of->rows, rows);
    assert_int_equal(end->cap_needed, cap_needed);
    assert_int_equal(end->http_status, status == BT_OK ? 200 : 400);
    if (finish != PROTO_FINISH_STOP) return;
    assert_int_equal(end->matched_id, of->expected[rows - 1].token);
}

bool sim_has_faults(const sim_scenario *o) {
    return o->mover_drop_permille + o->mover_corrupt_permille + o->mover_stall_permille > 0 ||
           o->crash_us + o->link_loss_us + o->freeze_us + o->step_failure_us + o->router_crash_us >
               0;
}

/* One after the other on what pages there are, so many take longer than each may. */
static bool is_crowded(const sim_scenario *o) {
    const uint64_t pages_of_one = o->context_tokens / o->page_tokens + 1;
    const uint64_t at_once = o->decodes * (o->decode_pages / pages_of_one);
    const uint64_t steps = o->new_tokens_max + o->prompt_tokens_max / o->chunk_tokens + 2;
    const uint64_t one_us = steps * o->step_us * o->samples_max;
    return o->clients * one_us > at_once * o->request_timeout_ms * 1000;
}

/* The ways to end that are nobody's lie. */
static void check_failure(const sim *s, const sim_client *c, const dispatch_end *end,
                          bool is_cancelled) {
    assert_int_equal(end->finish, PROTO_FINISH_ERROR);
    assert_true(end->text[0] != '\0');
    /* A broken chain of KV bytes shows as a broken capture: never. */
    assert_int_not_equal(end->status, BT_ERR_REQUEST_CAPTURE);
    if (end->status == BT_ERR_REQUEST_CANCELLED) {
        assert_true(c->will_cancel || is_cancelled);
    } else if (end->status == BT_ERR_REQUEST_DEADLINE) {
        assert_true(c->request.timeout_ms != 0 || c->is_slow || sim_has_faults(&s->scenario) ||
                    is_crowded(&s->scenario));
    } else {
        assert_true(sim_has_faults(&s->scenario));
        assert_false(c->is_probe);
    }
}

static bool is_own_end(bt_status status) {
    return status == BT_OK || status == BT_ERR_REQUEST_OVERFLOW;
}

void sim_client_on_sample_end(sim *s, uint64_t request, uint32_t sample, const dispatch_end *end) {
    sim_client *c = &s->clients[request - 1];
    sim_sample *of = &c->samples[sample];
    assert_int_equal(c->state, CLIENT_WAITING);
    assert_true(sample < c->request.generation.samples);
    assert_false(of->has_ended); /* exactly once */
    of->has_ended = true;
    of->end = *end;
    s->tally.samples++;
    assert_int_equal(end->rows_total, of->rows);
    sim_abort_check_end(s, c, of, end);
    if (sim_abort_is_end(end)) return;
    if (is_own_end(end->status)) {
        check_whole(&c->request.generation, of, end);
    } else {
        check_failure(s, c, end, of->is_cancelled);
    }
}

static void count_end(sim *s, bt_status status) {
    const bool is_peer = bt_status_scope(status) == BT_SCOPE_PEER;
    s->tally.peer += is_peer ? 1 : 0;
    if (status == BT_OK) {
        s->tally.ok++;
    } else if (status == BT_ERR_REQUEST_OVERFLOW) {
        s->tally.overflow++;
    } else if (status == BT_ERR_REQUEST_CANCELLED) {
        s->tally.cancelled++;
    } else if (status == BT_ERR_REQUEST_DEADLINE) {
        s->tally.deadline++;
    } else if (status == BT_ERR_REQUEST_NO_WORKER) {
        s->tally.no_worker++;
    } else if (!is_peer) {
        s->tally.other++;
    }
}

/* The end of the request against those of its samples. */
static void check_samples(sim *s, const sim_client *c, const dispatch_end *end) {
    const proto_generation *g = &c->request.generation;
    uint32_t rows = 0, well = 0, aborted = 0, mixed = 0, cancelled = 0;
    for (uint32_t i = 0; i < g->samples; i++) {
        const sim_sample *of = &c->samples[i];
        assert_true(of->has_ended);
        rows += of->rows;
        well += of->end.status == BT_OK;
        aborted += sim_abort_is_end(&of->end);
        mixed += of->end.status != c->samples[0].end.status;
        cancelled += of->is_cancelled;
    }
    assert_int_equal(end->rows_total, rows);
    s->tally.mixed += mixed > 0;
    s->tally.retractions += end->retractions;
    const bool is_prompt_there = !g->wants_prompt_logprobs ||
                                 g->prompt_logprobs_from + 1 >= c->request.prompt_tokens ||
                                 c->next_position == c->request.prompt_tokens;
    /* Of an earlier try they are void. */
    const bool is_prompt_sure =
        !g->wants_prompt_logprobs || (is_prompt_there && end->attempts <= 1);
    if (well == g->samples && is_prompt_sure) assert_int_equal(end->status, BT_OK);
    if (end->status == BT_OK) {
        assert_true(well > 0);
        assert_true(is_prompt_there || aborted == well);
    } else if (end->status == BT_ERR_REQUEST_OVERFLOW) {
        assert_int_equal(well, 0);
    } else {
        check_failure(s, c, end, cancelled > 0);
    }
}

/* Whole pages from the prefix cache, and never the last token. */
static void check_cached(sim *s, const sim_client *c, const dispatch_end *end) {
    const bool may_hit =
        s->scenario.has_prefix_cache && !c->request.generation.wants_prompt_logprobs;
    assert_int_equal(end->cached_tokens % s->scenario.page_tokens, 0);
    assert_true(end->cached_tokens < c->request.prompt_tokens);
    assert_true(may_hit || end->cached_tokens == 0);
    s->tally.cached += end->cached_tokens;
}

void sim_client_on_end(sim *s, uint64_t request, const dispatch_end *end) {
    sim_client *c = &s->clients[request - 1];
    assert_int_equal(c->state, CLIENT_WAITING); /* exactly once */
    c->state = CLIENT_ENDED;
    c->ended_us = s->now_us;
    c->end = *end;
    const uint64_t timeout_ms =
        c->request.timeout_ms != 0 ? c->request.timeout_ms : s->scenario.request_timeout_ms;
    assert_true(s->now_us <= c->submitted_us + timeout_ms * 1000 + SLACK_US);
    check_samples(s, c, end);
    check_cached(s, c, end);
    count_end(s, end->status);
}

void sim_clients_on_router_lost(sim *s) {
    for (uint32_t i = 0; i < s->client_count; i++) {
        if (s->clients[i].state != CLIENT_WAITING) continue;
        s->clients[i].state = CLIENT_LOST;
        s->tally.lost++;
    }
}

uint32_t sim_clients_waiting(const sim *s) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->client_count; i++)
        count += s->clients[i].state == CLIENT_WAITING || s->clients[i].state == CLIENT_NEW;
    return count;
}

void sim_clients_free(sim *s) {
    for (uint32_t i = 0; i < s->client_count; i++) {
        sim_client *c = &s->clients[i];
        bt_free((void *)(uintptr_t)c->request.words);
        bt_free(c->prompt_logprobs);
        for (uint32_t k = 0; k < SIM_SAMPLES_MAX; k++) {
            bt_free(c->samples[k].expected);
            bt_free(c->samples[k].support_ids);
            bt_free(c->samples[k].support_logprobs);
            bt_free(c->samples[k].top);
            bt_free(c->samples[k].id_logprobs);
        }
    }
}
