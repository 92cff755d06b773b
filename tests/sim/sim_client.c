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

static sampler_params params_of(const sim *s, const proto_generation *g) {
    return (sampler_params){.temperature = g->temperature,
                            .top_p = g->top_p,
                            .top_k = g->top_k,
                            .mask_mode = g->mask_mode,
                            .mask_max_tokens = g->mask_mode == 0 ? 0 : s->scenario.cap,
                            .vocab_limit = g->vocab_limit,
                            .wants_logprob = g->wants_logprob,
                            .seed = g->seed};
}

/* Rows of what a single process draws, up to a stop id, the length, or an overflow. */
static void expect_rows(sim *s, sim_client *c) {
    const proto_generation *g = &c->request.generation;
    const uint32_t count = g->max_new_tokens;
    const size_t cap = g->mask_mode == 0 ? 1 : s->scenario.cap;
    const sampler_params params = params_of(s, g);
    if (count == 0) return;
    c->expected = bt_calloc(count, sizeof *c->expected);
    c->support_ids = bt_calloc(count * cap, sizeof *c->support_ids);
    c->support_logprobs = bt_calloc(count * cap, sizeof *c->support_logprobs);
    assert_true(c->expected != NULL && c->support_ids != NULL && c->support_logprobs != NULL);
    for (uint32_t i = 0; i < count; i++) {
        c->expected[i].support_ids = c->support_ids + i * cap;
        c->expected[i].support_logprobs = c->support_logprobs + i * cap;
    }
    const compute_sim_options options = {.page_tokens = s->scenario.page_tokens,
                                         .vocab_size = SIM_VOCAB,
                                         .support_max = s->scenario.support_max};
    c->expected_count = compute_sim_expect(&options, &params, c->request.words,
                                           c->request.prompt_tokens, count, c->expected);
}

static void set_generation(sim *s, sim_client *c) {
    proto_generation *g = &c->request.generation;
    g->max_new_tokens = (uint32_t)sim_random(s, s->scenario.new_tokens_max + 1);
    if (c->is_probe && g->max_new_tokens == 0) g->max_new_tokens = 1;
    g->temperature = 1.0f;
    g->repetition_penalty = 1.0f;
    g->samples = 1;
    g->top_p = 1.0f;
    g->top_k = sim_random(s, 3) == 0 ? 1 + (uint32_t)sim_random(s, 50) : 0;
    g->mask_mode = (uint32_t)sim_random(s, 3);
    g->wants_logprob = (uint32_t)sim_random(s, 2);
    g->seed = sim_random(s, UINT64_MAX);
    g->stop_id_count = (uint32_t)sim_random(s, 4);
    for (uint32_t i = 0; i < g->stop_id_count; i++)
        g->stop_ids[i] = (int32_t)sim_random(s, SIM_VOCAB);
}

/* Stop ids that are never drawn test little: sometimes one is taken from the answer. */
static void set_stop(sim *s, sim_client *c) {
    proto_generation *g = &c->request.generation;
    if (c->expected_count < 2 || sim_random(s, 3) != 0) return;
    const int32_t token = c->expected[sim_random(s, c->expected_count)].token;
    if (token < 0) return; /* the row that overflows */
    g->stop_ids[0] = token;
    if (g->stop_id_count == 0) g->stop_id_count = 1;
}

static void submit(sim *s, uint64_t index, uint64_t b);

void sim_client_add(sim *s, uint64_t at_us, bool is_probe) {
    assert_true(s->client_count < SIM_CLIENTS_MAX);
    sim_client *c = &s->clients[s->client_count++];
    const sim_scenario *o = &s->scenario;
    const uint32_t tokens = 1 + (uint32_t)sim_random(s, o->prompt_tokens_max);
    int32_t *prompt = bt_calloc(tokens, sizeof *prompt);
    assert_non_null(prompt);
    for (uint32_t i = 0; i < tokens; i++)
        prompt[i] = (int32_t)sim_random(s, SIM_VOCAB);
    c->is_probe = is_probe;
    c->request.id = s->client_count;
    c->request.words = prompt;
    c->request.prompt_tokens = tokens;
    c->request.is_credited = sim_random(s, 2) == 0;
    c->is_slow = !is_probe && sim_chance(s, o->slow_reader_permille);
    if (!is_probe && sim_chance(s, o->short_timeout_permille)) {
        c->request.timeout_ms = 1 + (uint32_t)sim_random(s, 2000);
    }
    c->will_cancel = !is_probe && sim_chance(s, o->cancel_permille);
    set_generation(s, c);
    expect_rows(s, c);
    set_stop(s, c);
    sim_at(s, at_us, submit, s->client_count - 1, 0);
}

static void cancel(sim *s, uint64_t index, uint64_t b) {
    (void)b;
    const sim_client *c = &s->clients[index];
    if (c->state == CLIENT_WAITING) dispatch_cancel(s->router.d, c->request.id, s->now_us);
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
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void check_row(const sim_client *c, const token_row *got, const sampler_row *want) {
    const proto_generation *g = &c->request.generation;
    assert_int_equal(got->token, want->token);
    assert_int_equal(got->mask_mode, g->mask_mode);
    assert_int_equal(got->has_logprob, g->wants_logprob);
    assert_memory_equal(&got->token_logprob, &want->token_logprob, sizeof(float));
    assert_memory_equal(&got->selected_logprob, &want->selected_logprob, sizeof(float));
    assert_int_equal(got->support_count, want->support_count);
    if (want->support_count == 0) return;
    assert_memory_equal(got->support_ids, want->support_ids, want->support_count * sizeof(int32_t));
    if (g->mask_mode != 2) return;
    assert_memory_equal(got->support_logprobs, want->support_logprobs,
                        want->support_count * sizeof(float));
}

static void grant(sim *s, uint64_t request, uint64_t bytes) {
    const sim_client *c = &s->clients[request - 1];
    if (c->state == CLIENT_WAITING) dispatch_grant(s->router.d, request, 0, bytes, s->now_us);
}

void sim_client_on_rows(sim *s, uint64_t request, const uint8_t *records, size_t bytes,
                        uint32_t row_count) {
    sim_client *c = &s->clients[request - 1];
    size_t at = 0;
    assert_int_equal(c->state, CLIENT_WAITING);
    for (uint32_t i = 0; i < row_count; i++, c->rows++) {
        token_row row;
        size_t used = 0;
        assert_int_equal(row_record_decode(records + at, bytes - at, s->scenario.cap, &row, &used),
                         BT_OK);
        assert_true(used > 0);
        assert_true(c->rows < c->expected_count);
        assert_int_equal(c->expected[c->rows].status, SAMPLER_OK);
        check_row(c, &row, &c->expected[c->rows]);
        at += used;
    }
    assert_int_equal(at, bytes);
    s->tally.rows += row_count;
    if (!c->request.is_credited) return;
    /* A slow reader takes seconds for each batch; the slowest never reads on. */
    if (c->is_slow && sim_random(s, 4) == 0) return;
    sim_after(s, sim_delay(s, c->is_slow ? 2 * SIM_SECOND : 1000), grant, request, bytes);
}

/* ---- ends ------------------------------------------------------------------------------------ */

static bool is_stop(const proto_generation *g, int32_t token) {
    for (uint32_t i = 0; i < g->stop_id_count; i++) {
        if (g->stop_ids[i] == token) return true;
    }
    return false;
}

/* The rows of the whole answer, and how it ends. */
static uint32_t whole_answer(const sim_client *c, proto_finish *finish, bt_status *status) {
    const proto_generation *g = &c->request.generation;
    *finish = PROTO_FINISH_LENGTH;
    *status = BT_OK;
    for (uint32_t i = 0; i < c->expected_count; i++) {
        if (c->expected[i].status == SAMPLER_OVERFLOW) {
            *finish = PROTO_FINISH_ERROR;
            *status = BT_ERR_REQUEST_OVERFLOW;
            return i;
        }
        assert_int_equal(c->expected[i].status, SAMPLER_OK);
        if (i + 1 == g->max_new_tokens) return i + 1;
        if (!is_stop(g, c->expected[i].token)) continue;
        *finish = PROTO_FINISH_STOP;
        return i + 1;
    }
    return 0; /* max_new_tokens 0 */
}

static void check_whole(const sim_client *c, const dispatch_end *end) {
    proto_finish finish;
    bt_status status;
    const uint32_t rows = whole_answer(c, &finish, &status);
    assert_int_equal(end->status, status);
    assert_int_equal(end->finish, finish);
    assert_int_equal(c->rows, rows);
    assert_int_equal(end->http_status, status == BT_OK ? 200 : 400);
    if (finish != PROTO_FINISH_STOP) return;
    assert_int_equal(end->matched_id, c->expected[rows - 1].token);
}

static bool has_faults(const sim_scenario *o) {
    return o->mover_drop_permille + o->mover_corrupt_permille + o->mover_stall_permille > 0 ||
           o->crash_us + o->link_loss_us + o->freeze_us + o->step_failure_us + o->router_crash_us >
               0;
}

/* The ways to end that are nobody's lie. */
static void check_failure(sim *s, const sim_client *c, const dispatch_end *end) {
    assert_int_equal(end->finish, PROTO_FINISH_ERROR);
    assert_true(end->text[0] != '\0');
    /* A broken chain of KV bytes shows as a broken capture: never. */
    assert_int_not_equal(end->status, BT_ERR_REQUEST_CAPTURE);
    if (end->status == BT_ERR_REQUEST_CANCELLED) {
        assert_true(c->will_cancel);
        s->tally.cancelled++;
    } else if (end->status == BT_ERR_REQUEST_DEADLINE) {
        assert_true(c->request.timeout_ms != 0 || c->is_slow || has_faults(&s->scenario));
        s->tally.deadline++;
    } else {
        assert_true(has_faults(&s->scenario));
        assert_false(c->is_probe);
        const bool is_peer = bt_status_scope(end->status) == BT_SCOPE_PEER;
        s->tally.peer += is_peer ? 1 : 0;
        s->tally.no_worker += end->status == BT_ERR_REQUEST_NO_WORKER ? 1 : 0;
        s->tally.other += !is_peer && end->status != BT_ERR_REQUEST_NO_WORKER ? 1 : 0;
    }
}

void sim_client_on_sample_end(sim *s, uint64_t request, uint32_t sample, const dispatch_end *end) {
    sim_client *c = &s->clients[request - 1];
    assert_int_equal(c->state, CLIENT_WAITING);
    assert_int_equal(sample, 0);
    assert_false(c->has_sample_ended);
    c->has_sample_ended = true;
    c->sample_end = *end;
}

void sim_client_on_end(sim *s, uint64_t request, const dispatch_end *end) {
    sim_client *c = &s->clients[request - 1];
    assert_int_equal(c->state, CLIENT_WAITING); /* exactly once */
    c->state = CLIENT_ENDED;
    c->ended_us = s->now_us;
    c->end = *end;
    assert_true(c->has_sample_ended);
    assert_int_equal(c->sample_end.status, end->status); /* of one sample the two are the same */
    assert_int_equal(end->rows_total, c->rows);
    const uint64_t timeout_ms =
        c->request.timeout_ms != 0 ? c->request.timeout_ms : s->scenario.request_timeout_ms;
    assert_true(s->now_us <= c->submitted_us + timeout_ms * 1000 + SLACK_US);
    if (end->status == BT_OK || end->status == BT_ERR_REQUEST_OVERFLOW) {
        check_whole(c, end);
        s->tally.ok += end->status == BT_OK ? 1 : 0;
        s->tally.overflow += end->status == BT_OK ? 0 : 1;
    } else {
        check_failure(s, c, end);
    }
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
        bt_free(c->expected);
        bt_free(c->support_ids);
        bt_free(c->support_logprobs);
    }
}
