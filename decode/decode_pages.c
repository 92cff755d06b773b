/* Pages of samples: shared at the start, taken one by one as sequences grow, taken away when there
 * are none, given again later.
 *
 * Admission order is what all of this goes by. A sample that needs a page takes a free one, else it
 * retracts another: first one that cannot go on anyway (parked, or without its words), then the
 * youngest that is younger than itself. Youngest first means that those in hand longest end first,
 * and a sample never loses its pages to one that came later, so that nobody is retracted for ever.
 * (Fewest tokens to recompute would be cheaper now and then, and let two samples take pages from
 * each other in turn.)
 *
 * Why there is no deadlock. Take the oldest sample that has room for rows and its words. If it has
 * pages it may take those of every other sample, and what is left are reservations and quarantined
 * pages, both of which end by their deadlines; alone it fits the pool, or it would not have been
 * admitted. So it goes on, a row or a chunk of recomputing each step, until it ends. If it has none
 * (it came back from being parked) it is the first to be given pages: nothing new is admitted
 * meanwhile, those that run end, and when nobody runs, parked samples give up theirs. */
#include "base/assert.h"
#include "base/log.h"
#include "decode/decode_internal.h"

#include <inttypes.h>
#include <string.h>

static uint32_t pages_for(const decode_core *core, uint32_t tokens) {
    return kv_pages_for(tokens, core->options.page_tokens);
}

/* Pages of the prompt that no sample ever writes to. */
static uint32_t full_pages(const decode_core *core, const decode_attempt *a) {
    return a->prompt_tokens / core->options.page_tokens;
}

/* All that one sample ever needs: the last token's KV is not written. */
static uint32_t pages_at_most(const decode_core *core, uint32_t prompt_tokens,
                              const proto_generation *g) {
    return pages_for(core, prompt_tokens + g->max_new_tokens - 1);
}

/* ---- room for what is in hand ---------------------------------------------------------------- */

/* One page for a sample that may still grow, and the tail of one that is to get a copy. */
static uint32_t growth_at_start(const decode_core *core, uint32_t prompt_tokens,
                                const proto_generation *g, uint32_t number) {
    if (g->max_new_tokens <= 1) return 0;
    const uint32_t prompt_pages = pages_for(core, prompt_tokens);
    const bool is_growing = pages_at_most(core, prompt_tokens, g) > prompt_pages;
    const bool has_copy = number > 0 && prompt_tokens % core->options.page_tokens != 0;
    return (is_growing ? 1u : 0u) + (has_copy ? 1u : 0u);
}

uint32_t decode_growth_of(const decode_core *core, uint32_t prompt_tokens,
                          const proto_generation *g) {
    uint32_t pages = 0;
    for (uint32_t i = 0; i < g->samples; i++)
        pages += growth_at_start(core, prompt_tokens, g, i);
    return pages;
}

uint32_t decode_growth_reserve(const decode_core *core) {
    uint32_t pages = 0;
    for (uint32_t i = 0; i < core->order_count; i++) {
        const decode_sample *s = core->order[i];
        const decode_attempt *a = s->attempt;
        if (a->state == DECODE_ATTEMPT_RESERVED && !s->is_cancelled) {
            pages += growth_at_start(core, a->prompt_tokens, &a->generation, s->number);
        } else if (a->state == DECODE_ATTEMPT_LIVE && s->page_count > 0) {
            pages += pages_at_most(core, a->prompt_tokens, &a->generation) > s->page_count;
        }
    }
    return pages;
}

/* ---- release --------------------------------------------------------------------------------- */

void decode_release_pages(decode_core *core, decode_sample *s) {
    BT_ASSERT(!s->is_in_step);
    if (s->page_count == 0) return;
    const uint32_t own = s->page_count - s->shared_count;
    kv_pool_release(core->options.pages, decode_owner(s->attempt), s->pages + s->shared_count, own);
    kv_pool_drop(core->options.pages, s->pages, s->shared_count);
    s->page_count = 0;
    s->shared_count = 0;
    s->computed_tokens = 0;
    core->has_released = true;
}

/* ---- retraction ------------------------------------------------------------------------------ */

static void retract(decode_core *core, decode_sample *s, const char *reason) {
    const bool is_parked = s->state == DECODE_PARKED;
    const uint64_t deadline_us =
        is_parked ? s->deadline_us : decode_now(core) + core->options.pages_us;
    decode_release_pages(core, s);
    core->retractions_total++;
    bt_log_debug("decode",
                 "attempt " DECODE_ID_FORMAT ", sample %" PRIu32 ": retracted at %" PRIu32
                 " tokens",
                 DECODE_ID_ARGS(s->attempt->id), s->number, decode_tokens(s));
    decode_set_state(core, s, DECODE_RETRACTED, deadline_us, reason);
}

static bool is_retractable(const decode_sample *s) {
    return s->page_count > 0 && !s->is_in_step;
}

/* The youngest of those that cannot go on. */
static decode_sample *find_idle(const decode_core *core, const decode_sample *taker) {
    for (uint32_t i = core->order_count; i > 0; i--) {
        decode_sample *s = core->order[i - 1];
        const bool is_idle = s->state == DECODE_PARKED || s->state == DECODE_WAITING;
        if (s != taker && is_idle && is_retractable(s)) return s;
    }
    return NULL;
}

static decode_sample *find_younger(const decode_core *core, const decode_sample *taker) {
    for (uint32_t i = core->order_count; i > 0 && core->order[i - 1] != taker; i--) {
        decode_sample *s = core->order[i - 1];
        const bool has_state = s->state == DECODE_RUNNING || s->state == DECODE_RECOMPUTING;
        if (has_state && is_retractable(s)) return s;
    }
    return NULL;
}

/* ---- growth ---------------------------------------------------------------------------------- */

static bool take_pages_up_to(decode_core *core, decode_sample *s, uint32_t wanted) {
    kv_pool *pool = core->options.pages;
    while (s->page_count < wanted) {
        if (kv_pool_count(pool).free > 0) {
            const bt_status status =
                kv_pool_acquire(pool, decode_owner(s->attempt), 1, s->pages + s->page_count);
            BT_ASSERT(status == BT_OK);
            s->page_count++;
            continue;
        }
        decode_sample *victim = find_idle(core, s);
        if (victim == NULL) victim = find_younger(core, s);
        if (victim == NULL) return false;
        retract(core, victim, "an older sample needs a page");
    }
    return true;
}

bool decode_grow(decode_core *core, decode_sample *s) {
    const uint32_t wanted = pages_for(core, decode_tokens(s));
    BT_ASSERT(wanted <= core->pages_per_sample);
    if (take_pages_up_to(core, s, wanted)) {
        s->deadline_us = 0;
        return true;
    }
    if (s->deadline_us == 0) s->deadline_us = decode_now(core) + core->options.pages_us;
    return false;
}

/* ---- return ---------------------------------------------------------------------------------- */

bool decode_has_retracted(const decode_core *core) {
    for (uint32_t i = 0; i < core->order_count; i++) {
        const decode_sample *s = core->order[i];
        if (s->state == DECODE_RETRACTED && !s->lacks_room) return true;
    }
    return false;
}

/* Someone whose going on or whose end, by a deadline that no reader puts off, makes pages free. */
static bool has_active(const decode_core *core) {
    for (uint32_t i = 0; i < core->order_count; i++) {
        const decode_state state = core->order[i]->state;
        if (state == DECODE_RUNNING || state == DECODE_RECOMPUTING || state == DECODE_RESERVED ||
            state == DECODE_WAITING)
            return true;
    }
    return false;
}

/* A sibling that has the prompt's full pages, or is about to. */
static const decode_sample *find_sharer(const decode_core *core, const decode_sample *s) {
    const decode_attempt *a = s->attempt;
    if (full_pages(core, a) == 0) return NULL;
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        const decode_sample *sibling = a->samples[i];
        if (sibling != NULL && sibling->shared_count > 0) return sibling;
    }
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        const decode_sample *sibling = a->samples[i];
        if (sibling != NULL && sibling->state == DECODE_RECOMPUTING) return sibling;
    }
    return NULL;
}

/* true when so many pages are free beside those that others will need. */
static bool make_room(decode_core *core, const decode_sample *s, uint32_t pages) {
    for (;;) {
        const uint32_t free_pages = kv_pool_count(core->options.pages).free;
        if (free_pages >= pages + decode_growth_reserve(core)) return true;
        if (has_active(core)) return false;
        decode_sample *victim = find_idle(core, s);
        if (victim == NULL) return false; /* quarantined pages come back */
        retract(core, victim, "another sample can go on");
    }
}

/* Those of the prompt that a sibling has, and pages of its own behind them. */
static bool take_all_pages(decode_core *core, decode_sample *s) {
    kv_pool *pool = core->options.pages;
    const decode_sample *sharer = find_sharer(core, s);
    if (sharer != NULL && sharer->shared_count == 0) return false; /* it still computes them */
    const uint32_t wanted = pages_for(core, decode_tokens(s));
    const uint32_t shared = sharer != NULL ? sharer->shared_count : 0;
    if (shared > 0) {
        memcpy(s->pages, sharer->pages, shared * sizeof *s->pages);
        kv_pool_hold(pool, s->pages, shared); /* also when room is made of the sibling */
    }
    bool has_room = make_room(core, s, wanted - shared);
    if (has_room) {
        has_room = kv_pool_acquire(pool, decode_owner(s->attempt), wanted - shared,
                                   s->pages + shared) == BT_OK;
        BT_ASSERT(has_room);
        s->page_count = wanted;
        s->shared_count = shared;
        s->computed_tokens = shared * core->options.page_tokens;
    } else if (shared > 0) {
        kv_pool_drop(pool, s->pages, shared);
    }
    return has_room;
}

bool decode_readmit(decode_core *core, decode_sample *s) {
    BT_ASSERT(s->state == DECODE_RETRACTED);
    BT_ASSERT(!s->lacks_room);
    if (!take_all_pages(core, s)) return false;
    s->recomputes++;
    core->has_released = true; /* it no longer keeps new ones out */
    decode_set_state(core, s, DECODE_RECOMPUTING, 0, "pages are free");
    return true;
}

void decode_offer_pages(decode_core *core, decode_sample *s) {
    const decode_attempt *a = s->attempt;
    const uint32_t full = full_pages(core, a);
    if (a->live < 2 || full == 0 || s->shared_count > 0) return;
    if (s->computed_tokens < full * core->options.page_tokens) return;
    kv_pool_share(core->options.pages, decode_owner(a), s->pages, full);
    s->shared_count = full;
}

/* ---- the start ------------------------------------------------------------------------------- */

static bool is_heir(const decode_sample *s) {
    return s != NULL && (s->state == DECODE_WAITING || s->state == DECODE_RUNNING);
}

/* The full pages, which the first heir has shared, and a copy of the partial one. */
static void copy_pages(decode_core *core, const decode_sample *first, decode_sample *s,
                       uint32_t count) {
    kv_pool *pool = core->options.pages;
    const uint32_t full = full_pages(core, s->attempt);
    memcpy(s->pages, first->pages, full * sizeof *s->pages);
    kv_pool_hold(pool, s->pages, full);
    s->page_count = full;
    s->shared_count = full;
    if (count > full &&
        kv_pool_acquire(pool, decode_owner(s->attempt), 1, s->pages + full) != BT_OK) {
        retract(core, s, "no page for its copy of the prompt's tail");
        return;
    }
    s->computed_tokens = s->attempt->prompt_tokens;
    s->page_count = count;
    if (count == full) return;
    core->options.compute->ops->copy_page(core->options.compute, first->pages[full],
                                          s->pages[full]);
}

void decode_spread_pages(decode_core *core, decode_attempt *a, uint32_t *pages, uint32_t count) {
    kv_pool *pool = core->options.pages;
    const uint32_t full = full_pages(core, a);
    decode_sample *first = NULL;
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        decode_sample *s = a->samples[i];
        if (!is_heir(s)) continue;
        if (first != NULL) {
            if (first->shared_count == 0 && full > 0) {
                kv_pool_share(pool, decode_owner(a), first->pages, full);
                first->shared_count = full;
            }
            copy_pages(core, first, s, count);
            continue;
        }
        first = s;
        memcpy(s->pages, pages, count * sizeof *s->pages);
        s->page_count = count;
        s->computed_tokens = a->prompt_tokens;
    }
    if (first != NULL) return;
    kv_pool_release(pool, decode_owner(a), pages, count);
    core->has_released = true;
}
