/* Time, chance, and the heap of events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/sim/sim.h"

static bool is_before(const sim_event *a, const sim_event *b) {
    return a->at_us != b->at_us ? a->at_us < b->at_us : a->order < b->order;
}

static void swap(sim_event *a, sim_event *b) {
    const sim_event kept = *a;
    *a = *b;
    *b = kept;
}

void sim_at(sim *s, uint64_t at_us, sim_action run, uint64_t a, uint64_t b) {
    if (s->event_count == s->event_capacity) {
        s->event_capacity = s->event_capacity == 0 ? 1024 : s->event_capacity * 2;
        s->events = bt_realloc(s->events, s->event_capacity * sizeof *s->events);
        assert_non_null(s->events);
    }
    size_t at = s->event_count++;
    s->events[at] = (sim_event){.at_us = at_us < s->now_us ? s->now_us : at_us,
                                .order = s->next_order++,
                                .run = run,
                                .a = a,
                                .b = b};
    while (at > 0 && is_before(&s->events[at], &s->events[(at - 1) / 2])) {
        swap(&s->events[at], &s->events[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
}

void sim_after(sim *s, uint64_t delay_us, sim_action run, uint64_t a, uint64_t b) {
    sim_at(s, s->now_us + delay_us, run, a, b);
}

static sim_event pop(sim *s) {
    const sim_event first = s->events[0];
    s->events[0] = s->events[--s->event_count];
    size_t at = 0;
    for (;;) {
        size_t least = at;
        for (size_t child = 2 * at + 1; child <= 2 * at + 2 && child < s->event_count; child++) {
            if (is_before(&s->events[child], &s->events[least])) least = child;
        }
        if (least == at) return first;
        swap(&s->events[at], &s->events[least]);
        at = least;
    }
}

bool sim_step(sim *s, uint64_t until_us) {
    if (s->event_count == 0 || s->events[0].at_us > until_us) {
        s->now_us = until_us;
        return false;
    }
    const sim_event event = pop(s);
    s->now_us = event.at_us;
    s->tally.events++;
    event.run(s, event.a, event.b);
    return true;
}

uint64_t sim_random(sim *s, uint64_t bound) {
    s->random += 0x9E3779B97F4A7C15u;
    uint64_t z = s->random;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % bound;
}

bool sim_chance(sim *s, uint32_t permille) {
    return permille > 0 && sim_random(s, 1000) < permille;
}

uint64_t sim_delay(sim *s, uint64_t mean_us) {
    const uint64_t half = mean_us / 2 + 1;
    uint64_t delay = half + sim_random(s, half);
    /* A long tail: one in eight is several times as late. */
    if (sim_random(s, 8) == 0) delay += sim_random(s, 4 * half);
    return delay;
}
