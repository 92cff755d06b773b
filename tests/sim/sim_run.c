/* Scenarios from seeds, and the course of a run: chaos, calm, probes, rest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/sim/sim.h"

enum {
    START_US = SIM_SECOND,
    READY_US = 3 * SIM_SECOND, /* every pair is made by then */
    RECOVER_US = 20 * SIM_SECOND,
    REST_US = 15 * SIM_SECOND,
    PROBES = 8,
};

/* ---- scenarios ------------------------------------------------------------------------------- */

void sim_scenario_calm(uint64_t seed, sim_scenario *out) {
    *out = (sim_scenario){
        .seed = seed,
        .prefills = 2,
        .decodes = 2,
        .page_tokens = 16,
        .page_bytes = 16 * 64,
        .prefill_pages = 64,
        .decode_pages = 64,
        .sequences_max = 8,
        .attempts_max = 16,
        .chunk_tokens = 48,
        .context_tokens = 512,
        .prompts_max = 4,
        .has_prefix_cache = true,
        .cap = 64,
        .support_max = 40,
        .checksum = RECORD_CHECKSUM_FULL,
        .step_us = 2000,
        .token_us = 20,
        .link_us = 200,
        .mover_us = 50,
        .stream_bytes_max = 512 * 1024,
        .clients = 40,
        .prompt_tokens_max = 200,
        .new_tokens_max = 40,
        .samples_max = 4,
        .chaos_us = 5 * SIM_SECOND,
        .request_timeout_ms = 60000,
    };
}

typedef struct dice {
    uint64_t random;
} dice;

static uint64_t roll(dice *d, uint64_t low, uint64_t high) {
    d->random = d->random * 6364136223846793005u + 1442695040888963407u;
    return low + (d->random >> 33) % (high - low + 1);
}

static void roll_sizes(dice *d, sim_scenario *o) {
    static const uint32_t page_tokens[] = {16, 32, 64};
    o->prefills = (uint32_t)roll(d, 1, 3);
    o->decodes = (uint32_t)roll(d, 1, 3);
    o->page_tokens = page_tokens[roll(d, 0, 2)];
    o->page_bytes = o->page_tokens * (uint32_t)(16 * roll(d, 1, 8));
    o->chunk_tokens = (uint32_t)roll(d, 8, 128);
    o->sequences_max = (uint32_t)roll(d, 1, 10);
    o->attempts_max = (uint32_t)roll(d, 1, 12);
    o->prompt_tokens_max = (uint32_t)roll(d, 10, 300);
    o->new_tokens_max = (uint32_t)roll(d, 2, 60);
    o->context_tokens = o->prompt_tokens_max + o->new_tokens_max + (uint32_t)roll(d, 0, 100);
    /* Pools between room for one request and for many. */
    const uint32_t least = o->context_tokens / o->page_tokens + 1;
    o->prefill_pages = least + (uint32_t)roll(d, 0, 4 * least);
    /* In every other one decode has pages for little more than one, and samples are retracted. */
    o->decode_pages = least + (uint32_t)roll(d, 0, roll(d, 0, 1) == 0 ? least / 2 : 4 * least);
    o->chunk_bytes_max = roll(d, 0, 2) == 0 ? 0 : o->page_bytes * (size_t)roll(d, 1, 4);
    o->part_bytes = roll(d, 256, 4096);
    o->checksum = (record_checksum)roll(d, 0, 2);
    /* Every fourth cluster has wide rows, so that streams run out of credit. */
    o->cap = roll(d, 0, 3) == 0 ? 3000 : 64;
    o->support_max = (uint32_t)roll(d, 1, o->cap);
    if (roll(d, 0, 3) == 0) o->support_max = o->cap + o->cap / 50 + 1; /* a few overflow */
}

static void roll_times(dice *d, sim_scenario *o) {
    o->step_us = roll(d, 100, 50000);
    o->token_us = roll(d, 1, 200);
    o->link_us = roll(d, 20, 20000);
    o->mover_us = roll(d, 5, 3000);
    o->stream_bytes_max = roll(d, 1000, 1000000);
    o->clients = (uint32_t)roll(d, 20, 150);
    o->chaos_us = roll(d, 2, 12) * SIM_SECOND;
    o->request_timeout_ms = (uint32_t)roll(d, 20000, 40000);
}

/* About half of the kinds of faults in each run, some of them often. */
static void roll_faults(dice *d, sim_scenario *o) {
    if (roll(d, 0, 1) == 0) o->cancel_permille = (uint32_t)roll(d, 50, 400);
    if (roll(d, 0, 1) == 0) o->slow_reader_permille = (uint32_t)roll(d, 50, 400);
    if (roll(d, 0, 1) == 0) o->short_timeout_permille = (uint32_t)roll(d, 50, 300);
    if (roll(d, 0, 1) == 0) o->mover_drop_permille = (uint32_t)roll(d, 1, 30);
    if (roll(d, 0, 1) == 0) o->mover_stall_permille = (uint32_t)roll(d, 1, 30);
    if (roll(d, 0, 1) == 0) o->crash_us = roll(d, 3, 30) * SIM_SECOND / 10;
    if (roll(d, 0, 1) == 0) o->link_loss_us = roll(d, 3, 30) * SIM_SECOND / 10;
    if (roll(d, 0, 1) == 0) o->freeze_us = roll(d, 3, 30) * SIM_SECOND / 10;
    if (roll(d, 0, 2) == 0) o->step_failure_us = roll(d, 5, 50) * SIM_SECOND / 10;
    if (roll(d, 0, 5) == 0) o->router_crash_us = roll(d, 2, 8) * SIM_SECOND;
    const bool is_proven = o->checksum == RECORD_CHECKSUM_FULL;
    if (is_proven && roll(d, 0, 1) == 0) o->mover_corrupt_permille = (uint32_t)roll(d, 1, 20);
}

void sim_scenario_wild(uint64_t seed, sim_scenario *out) {
    dice d = {.random = seed * 0x9E3779B97F4A7C15u + 12345};
    *out = (sim_scenario){.seed = seed};
    roll_sizes(&d, out);
    roll_times(&d, out);
    roll_faults(&d, out);
    out->prompts_max = (uint32_t)roll(&d, 1, 6);
    out->has_prefix_cache = roll(&d, 0, 3) != 0;
    out->samples_max = (uint32_t)roll(&d, 1, SIM_SAMPLES_MAX);
    if (out->samples_max > out->sequences_max) out->samples_max = out->sequences_max;
    if (roll(&d, 0, 1) == 0) out->cancel_sample_permille = (uint32_t)roll(&d, 50, 400);
    if (roll(&d, 0, 1) == 0) out->abort_permille = (uint32_t)roll(&d, 50, 700);
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void crash(sim *s) {
    sim_worker_crash(s, (uint32_t)sim_random(s, s->worker_count));
}

static void lose_link(sim *s) {
    const sim_worker *w = &s->workers[sim_random(s, s->worker_count)];
    const uint64_t number = w->links[1 + sim_random(s, 2)];
    if (number == 0) return;
    s->tally.losses++;
    sim_link_lose(s, number);
}

static void freeze(sim *s) {
    s->tally.freezes++;
    sim_worker_freeze(s, (uint32_t)sim_random(s, s->worker_count), sim_random(s, 4 * SIM_SECOND));
}

static void fail_step(sim *s) {
    s->tally.step_failures++;
    sim_worker_fail_step(s, (uint32_t)sim_random(s, s->worker_count), BT_ERR_WORKER_INTERNAL);
}

typedef struct fault_kind {
    size_t mean; /* offset in the scenario of the mean time between two */
    void (*strike)(sim *s);
} fault_kind;

static const fault_kind fault_kinds[] = {
    {offsetof(sim_scenario, crash_us), crash},
    {offsetof(sim_scenario, link_loss_us), lose_link},
    {offsetof(sim_scenario, freeze_us), freeze},
    {offsetof(sim_scenario, step_failure_us), fail_step},
    {offsetof(sim_scenario, router_crash_us), sim_router_crash},
};

static void strike(sim *s, uint64_t kind, uint64_t b) {
    uint64_t mean_us;
    (void)b;
    if (!s->is_chaos) return;
    memcpy(&mean_us, (const char *)&s->scenario + fault_kinds[kind].mean, sizeof mean_us);
    fault_kinds[kind].strike(s);
    sim_after(s, sim_random(s, 2 * mean_us), strike, kind, 0);
}

static void begin_faults(sim *s) {
    for (size_t kind = 0; kind < sizeof fault_kinds / sizeof fault_kinds[0]; kind++) {
        uint64_t mean_us;
        memcpy(&mean_us, (const char *)&s->scenario + fault_kinds[kind].mean, sizeof mean_us);
        if (mean_us > 0) sim_after(s, sim_random(s, 2 * mean_us), strike, kind, 0);
    }
}

/* ---- the run --------------------------------------------------------------------------------- */

static void run_until(sim *s, uint64_t until_us) {
    while (sim_step(s, until_us)) {
    }
}

/* Until nobody waits; every request has a deadline, so this ends. */
static void run_until_answered(sim *s) {
    const uint64_t limit_us = s->now_us + s->scenario.request_timeout_ms * 1000ull + SIM_SECOND;
    while (sim_clients_waiting(s) > 0 && sim_step(s, limit_us)) {
    }
    assert_int_equal(sim_clients_waiting(s), 0);
}

static sim *create(const sim_scenario *scenario) {
    sim *s = bt_calloc(1, sizeof *s);
    assert_non_null(s);
    s->scenario = *scenario;
    s->random = scenario->seed;
    s->now_us = START_US;
    const xfer_loop_options network = {.part_bytes = scenario->part_bytes, .is_stepped = true};
    assert_int_equal(xfer_loop_network_create(&network, &s->network), BT_OK);
    s->worker_count = scenario->prefills + scenario->decodes;
    return s;
}

static void destroy(sim *s) {
    for (uint32_t i = 0; i < s->worker_count; i++)
        sim_worker_stop(s, i);
    sim_router_stop(s);
    sim_links_free(s);
    sim_clients_free(s);
    xfer_loop_network_destroy(s->network);
    bt_free(s->events);
    bt_free(s);
}

/* Some come alone, some in crowds. */
static void add_clients(sim *s) {
    uint32_t left = s->scenario.clients;
    while (left > 0) {
        const uint64_t at_us = s->now_us + sim_random(s, s->scenario.chaos_us);
        uint32_t crowd = sim_random(s, 2) == 0 ? 1 : 1 + (uint32_t)sim_random(s, 15);
        if (crowd > left) crowd = left;
        left -= crowd;
        while (crowd-- > 0)
            sim_client_add(s, at_us, false);
    }
}

static void probe(sim *s) {
    const uint64_t ok = s->tally.ok + s->tally.overflow;
    for (int i = 0; i < PROBES; i++)
        sim_client_add(s, s->now_us, true);
    run_until_answered(s);
    assert_int_equal(s->tally.ok + s->tally.overflow, ok + PROBES);
}

static void check_idle(const sim *s) {
    for (uint32_t i = 0; i < s->worker_count; i++)
        sim_worker_check(s, i, true);
    sim_router_check_idle(s);
    assert_int_equal(xfer_loop_event_count(s->network), 0);
}

static void add_tally(sim_tally *into, const sim_tally *from) {
    uint64_t *to = (uint64_t *)(void *)into;
    const uint64_t *add = (const uint64_t *)(const void *)from;
    for (size_t i = 0; i < sizeof *into / sizeof *to; i++)
        to[i] += add[i];
}

static void begin_watch(sim_watch *watch) {
    if (watch == NULL) return;
    *watch = (sim_watch){.is_on = 1};
#ifdef BT_FAULT
    bt_fault_alloc_reset();
#endif
}

static void end_watch(sim_watch *watch) {
    if (watch == NULL) return;
    watch->is_on = 0;
#ifdef BT_FAULT
    watch->allocated = bt_fault_alloc_tally();
#endif
}

void sim_run(const sim_scenario *scenario, sim_tally *tally) {
    sim *s = create(scenario);
    /* The order in which processes start does not matter. */
    for (uint32_t i = 0; i < s->worker_count; i++)
        sim_worker_start(s, i);
    run_until(s, s->now_us + sim_random(s, SIM_SECOND));
    sim_router_start(s);
    run_until(s, s->now_us + READY_US);
    begin_watch(scenario->watch);
    s->is_chaos = true;
    begin_faults(s);
    add_clients(s);
    run_until(s, s->now_us + scenario->chaos_us);
    s->is_chaos = false;
    for (uint32_t i = 0; i < s->worker_count; i++)
        sim_worker_fail_step(s, i, BT_OK);
    run_until_answered(s);
    run_until(s, s->now_us + RECOVER_US);
    probe(s);
    run_until(s, s->now_us + REST_US);
    check_idle(s);
    end_watch(scenario->watch);
    const sim_tally seen = s->tally;
    destroy(s);
    add_tally(tally, &seen);
}
