/* Aborts: when clients send them, and what may become of what they hit. An abort that came first is
 * the end, with rows that are a beginning of the whole answer; nothing that goes wrong afterwards
 * takes rows away or makes an error of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "tests/sim/sim.h"

enum {
    EMISSION_ROWS = 50, /* of replies that are sent when complete */
    BITS_MIN = 11,      /* of microseconds: from two milliseconds to four seconds */
    BITS_MAX = 22,
    ANSWER_US = SIM_SECOND, /* what an answer may take besides steps and the network */
};

/* ---- sending --------------------------------------------------------------------------------- */

/* Every moment of a request's short life is as likely as the long ones. */
static uint64_t moment(sim *s) {
    return sim_random(s, 1ull << (BITS_MIN + sim_random(s, BITS_MAX - BITS_MIN + 1)));
}

static uint32_t choose_sample(sim *s, const sim_client *c) {
    const uint64_t kind = sim_random(s, 16);
    if (kind == 0) return c->request.generation.samples; /* there is none */
    if (kind < 8) return PROTO_ALL_SAMPLES;
    return (uint32_t)sim_random(s, c->request.generation.samples);
}

static void note(sim *s, const sim_client *c, sim_sample *of) {
    if (c->state != CLIENT_WAITING || of->has_ended) {
        s->tally.aborts_late++;
    } else if (of->is_aborting) {
        s->tally.aborts_again++;
    } else {
        of->is_aborting = true;
        of->aborted_us = s->now_us;
        of->rows_at_abort = of->rows;
        s->tally.aborts++;
    }
}

static void abort_now(sim *s, uint64_t index, uint64_t sample) {
    sim_client *c = &s->clients[index];
    const bool is_of_all = sample == PROTO_ALL_SAMPLES;
    if (s->router.d == NULL) return;
    for (uint32_t i = 0; i < c->request.generation.samples; i++) {
        if (is_of_all || i == sample) note(s, c, &c->samples[i]);
    }
    dispatch_abort(s->router.d, c->request.id, (uint32_t)sample, s->now_us);
}

void sim_abort_plan(sim *s, sim_client *c) {
    c->will_abort = !c->is_probe && sim_chance(s, s->scenario.abort_permille);
    if (!c->will_abort) return;
    if (sim_random(s, 2) == 0) c->request.emission_rows = EMISSION_ROWS;
    const uint64_t kind = sim_random(s, 3);
    if (kind == 0) return;
    c->abort_at_row =
        kind == 1 ? 1 : 1 + (uint32_t)sim_random(s, c->request.generation.max_new_tokens + 1);
}

void sim_abort_on_submit(sim *s, sim_client *c) {
    const uint64_t index = c->request.id - 1;
    if (!c->will_abort) return;
    if (sim_random(s, 16) == 0) abort_now(s, index, choose_sample(s, c));
    if (c->abort_at_row > 0) return;
    for (uint64_t left = 1 + sim_random(s, 3); left > 0; left--)
        sim_after(s, moment(s), abort_now, index, choose_sample(s, c));
}

/* While the next step runs, or is being sent, or after the end. */
void sim_abort_on_rows(sim *s, sim_client *c, uint32_t sample, uint32_t before) {
    const uint32_t at = c->abort_at_row;
    if (at <= before || at > c->samples[sample].rows) return;
    const uint64_t steps = 1 + sim_random(s, 8);
    const uint64_t within_us = steps * (s->scenario.step_us + s->scenario.link_us / 4);
    for (uint64_t left = 1 + sim_random(s, 2); left > 0; left--)
        sim_after(s, sim_random(s, within_us + 1), abort_now, c->request.id - 1,
                  sim_random(s, 2) == 0 ? sample : choose_sample(s, c));
}

/* ---- what becomes of them -------------------------------------------------------------------- */

/* One step, there and back, and the rows that wait in between. */
static void check_time(const sim *s, const sim_client *c, const sim_sample *of) {
    const sim_scenario *o = &s->scenario;
    const uint64_t step_us = o->step_us + o->token_us * (o->context_tokens + o->sequences_max);
    if (sim_has_faults(o) || c->is_slow) return;
    assert_true(s->now_us <= of->aborted_us + ANSWER_US + 2 * step_us + 20 * o->link_us);
}

bool sim_abort_is_end(const dispatch_end *end) {
    return end->status == BT_OK && end->finish == PROTO_FINISH_ABORT;
}

static void check_abort(sim *s, const sim_sample *of, const dispatch_end *end) {
    assert_int_equal(end->http_status, 200);
    assert_int_equal(end->matched_id, 0);
    assert_int_equal(end->cap_needed, 0);
    if (strcmp(end->text, "Aborted") == 0) {
        s->tally.aborted_running += of->rows == 0;
        s->tally.aborted_with_rows += of->rows > 0;
        s->tally.aborted_with_more += of->rows > of->rows_at_abort;
        return;
    }
    assert_int_equal(of->rows, 0);
    if (strcmp(end->text, "Abort before prefill") == 0) {
        s->tally.aborted_in_prefill++;
    } else {
        assert_string_equal(end->text, "Abort in waiting queue");
        s->tally.aborted_in_queue++;
    }
}

void sim_abort_check_end(sim *s, const sim_client *c, const sim_sample *of,
                         const dispatch_end *end) {
    if (!of->is_aborting) {
        assert_false(sim_abort_is_end(end));
        return;
    }
    /* The client may still go away; nothing else makes an error of it. */
    if (end->status == BT_ERR_REQUEST_CANCELLED) return;
    assert_int_equal(end->status, BT_OK);
    assert_true(of->rows >= of->rows_at_abort);
    check_time(s, c, of);
    if (sim_abort_is_end(end)) {
        check_abort(s, of, end);
    } else {
        s->tally.aborts_outrun++;
    }
}
