/* What the mover does next, chosen by chance: any order, lost messages, flipped bits, messages that
 * stall for seconds, and nothing at all at a process that is frozen. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/sim/sim.h"

enum { TRIES = 16, IDLE_US = 20 * 1000 };

static uint32_t worker_at(const sim *s, const xfer *at) {
    for (uint32_t i = 0; i < s->worker_count; i++) {
        if (s->workers[i].is_up && s->workers[i].mover == at) return i;
    }
    fail_msg("an event of a mover that nobody has");
    return 0;
}

static bool is_stalled(sim *s, uint64_t message) {
    if (message == 0) return false;
    for (uint32_t i = 0; i < SIM_STALLS_MAX; i++) {
        if (s->stalls[i].message == message) return s->now_us < s->stalls[i].until_us;
    }
    return false;
}

static void stall(sim *s, uint64_t message) {
    const uint64_t for_us = 200 * 1000 + sim_random(s, 20 * SIM_SECOND);
    s->stalls[sim_random(s, SIM_STALLS_MAX)] =
        (sim_stall){.message = message, .until_us = s->now_us + for_us};
    s->tally.stalls++;
}

/* A stalled or frozen event is looked at again later; another may be ready. */
static bool find_ready(sim *s, uint32_t count, uint32_t *index_out) {
    for (int i = 0; i < TRIES; i++) {
        const uint32_t index = (uint32_t)sim_random(s, count);
        const xfer_loop_event event = xfer_loop_event_at(s->network, index);
        if (sim_worker_is_frozen(s, &s->workers[worker_at(s, event.at)])) continue;
        if (is_stalled(s, event.message)) continue;
        *index_out = index;
        return true;
    }
    return false;
}

static void watch(sim_watch *w, const xfer_loop_event *event) {
    if (w == NULL || w->is_on == 0 || event->kind != XFER_LOOP_DELIVER) return;
    w->messages++;
    w->message_bytes += event->header_bytes + event->payload_bytes;
    w->message_digest = sim_digest(w->message_digest, event->header, event->header_bytes);
    w->message_digest = sim_digest(w->message_digest, &event->payload_bytes, sizeof(size_t));
}

/* One fault, or the event itself. */
static void let_happen(sim *s, uint32_t index, const xfer_loop_event *event) {
    const sim_scenario *o = &s->scenario;
    const bool moves = event->kind == XFER_LOOP_DELIVER || event->kind == XFER_LOOP_COPY;
    const bool has_bytes = event->kind == XFER_LOOP_COPY || event->kind == XFER_LOOP_RECEIVED;
    if (s->is_chaos && moves && sim_chance(s, o->mover_stall_permille)) {
        stall(s, event->message);
        return;
    }
    if (s->is_chaos && moves && sim_chance(s, o->mover_drop_permille)) {
        s->tally.drops++;
        xfer_loop_drop(s->network, index);
        return;
    }
    if (s->is_chaos && has_bytes && sim_chance(s, o->mover_corrupt_permille)) {
        const size_t offset = sim_random(s, event->payload_bytes);
        const uint8_t bits = (uint8_t)(1 + sim_random(s, 255));
        if (xfer_loop_corrupt_payload(s->network, index, offset, bits)) s->tally.corruptions++;
    }
    xfer_loop_step(s->network, index);
}

static void progress(sim *s, uint64_t a, uint64_t b) {
    (void)a;
    (void)b;
    s->is_mover_scheduled = false;
    const uint32_t count = xfer_loop_event_count(s->network);
    if (count == 0) return;
    uint32_t index = 0;
    if (!find_ready(s, count, &index)) {
        s->is_mover_scheduled = true;
        sim_after(s, IDLE_US, progress, 0, 0);
        return;
    }
    const xfer_loop_event event = xfer_loop_event_at(s->network, index);
    const uint32_t worker = worker_at(s, event.at);
    watch(s->scenario.watch, &event);
    let_happen(s, index, &event);
    sim_worker_turn(s, worker);
    sim_mover_kick(s);
}

void sim_mover_kick(sim *s) {
    if (s->is_mover_scheduled || xfer_loop_event_count(s->network) == 0) return;
    s->is_mover_scheduled = true;
    sim_after(s, sim_delay(s, s->scenario.mover_us), progress, 0, 0);
}
