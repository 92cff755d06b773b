/* Owner records: the tables of legal edges, the one release, and the recount. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

static const char *attempt_state_name(decode_attempt_state state) {
    switch (state) {
    case DECODE_ATTEMPT_FREE: return "free";
    case DECODE_ATTEMPT_RESERVED: return "reserved";
    case DECODE_ATTEMPT_LIVE: return "live";
    case DECODE_ATTEMPT_QUARANTINE: return "quarantine";
    case DECODE_ATTEMPT_STATE_COUNT: break;
    }
    return "unknown";
}

static const char *state_name(decode_state state) {
    switch (state) {
    case DECODE_FREE: return "free";
    case DECODE_RESERVED: return "reserved";
    case DECODE_WAITING: return "waiting";
    case DECODE_RUNNING: return "running";
    case DECODE_PARKED: return "parked";
    case DECODE_RETRACTED: return "retracted";
    case DECODE_RECOMPUTING: return "recomputing";
    case DECODE_DRAINING: return "draining";
    case DECODE_LEAVING: return "leaving";
    case DECODE_STATE_COUNT: break;
    }
    return "unknown";
}

/* ---- finding and making ---------------------------------------------------------------------- */

decode_attempt *decode_find(decode_core *core, proto_attempt id) {
    return bt_id_map_get(&core->by_id, proto_attempt_id(id));
}

decode_sample *decode_find_sample(decode_core *core, proto_attempt id, uint32_t number) {
    decode_attempt *a = decode_find(core, id);
    if (a == NULL || number >= a->generation.samples) return NULL;
    return a->samples[number];
}

uint32_t decode_free_places(const decode_core *core) {
    return core->options.sequences_max - core->order_count;
}

static decode_attempt *take_record(decode_core *core) {
    decode_attempt *a = core->attempts;
    while (a->state != DECODE_ATTEMPT_FREE)
        a++; /* there are as many records as places */
    const uint32_t uses = a->uses + 1;
    *a = (decode_attempt){.index = (uint32_t)(a - core->attempts), .uses = uses};
    return a;
}

static decode_sample *take_place(decode_core *core, uint32_t from) {
    while (core->samples[from].state != DECODE_FREE)
        from++;
    decode_sample *s = &core->samples[from];
    *s = (decode_sample){.index = from,
                         .pages = core->page_lists + (size_t)from * core->pages_per_sample};
    return s;
}

decode_attempt *decode_admit(decode_core *core, const proto_reserve *reserve, xfer_peer prefill) {
    BT_ASSERT(reserve->generation.samples <= decode_free_places(core));
    decode_attempt *a = take_record(core);
    a->id = reserve->attempt;
    a->generation = reserve->generation;
    a->emission_rows = reserve->emission_rows;
    a->prefill = prefill;
    a->prompt_tokens = reserve->prompt_tokens;
    a->live = reserve->generation.samples;
    a->deadline_us = decode_now(core) + (uint64_t)reserve->deadline_ms * 1000u;
    decode_set_attempt_state(core, a, DECODE_ATTEMPT_RESERVED, "reserve");
    uint32_t from = 0;
    for (uint32_t i = 0; i < a->live; i++) {
        decode_sample *s = take_place(core, from);
        from = s->index + 1;
        s->attempt = a;
        s->number = i;
        s->credit_bytes = reserve->credit_bytes;
        a->samples[i] = s;
        core->order[core->order_count++] = s;
        decode_set_state(core, s, DECODE_RESERVED, 0, "reserve");
    }
    return a;
}

uint64_t decode_owner(const decode_attempt *a) {
    return (uint64_t)a->uses << 32 | (a->index + 1);
}

/* ---- states ---------------------------------------------------------------------------------- */

void decode_set_attempt_state(decode_core *core, decode_attempt *a, decode_attempt_state next,
                              const char *reason) {
    static const uint32_t edges[DECODE_ATTEMPT_STATE_COUNT] = {
        [DECODE_ATTEMPT_FREE] = 1u << DECODE_ATTEMPT_RESERVED,
        [DECODE_ATTEMPT_RESERVED] = 1u << DECODE_ATTEMPT_LIVE | 1u << DECODE_ATTEMPT_QUARANTINE,
        [DECODE_ATTEMPT_LIVE] = 1u << DECODE_ATTEMPT_FREE,
        [DECODE_ATTEMPT_QUARANTINE] = 1u << DECODE_ATTEMPT_FREE,
    };
    BT_ASSERT((edges[a->state] >> next & 1u) != 0);
    bt_log_debug("decode", "attempt " DECODE_ID_FORMAT ": %s -> %s (%s)", DECODE_ID_ARGS(a->id),
                 attempt_state_name(a->state), attempt_state_name(next), reason);
    if (a->state == DECODE_ATTEMPT_FREE) bt_id_map_put(&core->by_id, proto_attempt_id(a->id), a);
    if (next == DECODE_ATTEMPT_FREE) bt_id_map_remove(&core->by_id, proto_attempt_id(a->id));
    a->state = next;
}

void decode_set_state(decode_core *core, decode_sample *s, decode_state next, uint64_t deadline_us,
                      const char *reason) {
    static const uint32_t edges[DECODE_STATE_COUNT] = {
        [DECODE_FREE] = 1u << DECODE_RESERVED,
        [DECODE_RESERVED] =
            1u << DECODE_WAITING | 1u << DECODE_RUNNING | 1u << DECODE_DRAINING | 1u << DECODE_FREE,
        [DECODE_WAITING] = 1u << DECODE_RUNNING | 1u << DECODE_RETRACTED | 1u << DECODE_DRAINING |
                           1u << DECODE_FREE,
        [DECODE_RUNNING] = 1u << DECODE_PARKED | 1u << DECODE_RETRACTED | 1u << DECODE_DRAINING |
                           1u << DECODE_LEAVING | 1u << DECODE_FREE,
        [DECODE_PARKED] = 1u << DECODE_RUNNING | 1u << DECODE_RETRACTED | 1u << DECODE_DRAINING |
                          1u << DECODE_FREE,
        [DECODE_RETRACTED] = 1u << DECODE_RECOMPUTING | 1u << DECODE_DRAINING | 1u << DECODE_FREE,
        [DECODE_RECOMPUTING] = 1u << DECODE_RUNNING | 1u << DECODE_RETRACTED |
                               1u << DECODE_DRAINING | 1u << DECODE_LEAVING | 1u << DECODE_FREE,
        [DECODE_DRAINING] = 1u << DECODE_FREE,
        [DECODE_LEAVING] = 1u << DECODE_FREE,
    };
    (void)core;
    BT_ASSERT((edges[s->state] >> next & 1u) != 0);
    bt_log_debug("decode", "attempt " DECODE_ID_FORMAT ", sample %" PRIu32 ": %s -> %s (%s)",
                 DECODE_ID_ARGS(s->attempt->id), s->number, state_name(s->state), state_name(next),
                 reason);
    s->state = next;
    s->deadline_us = deadline_us;
}

/* ---- release --------------------------------------------------------------------------------- */

static void release_slot(decode_core *core, decode_sample *s) {
    if (!s->has_slot) return;
    row_pool_release(core->member.rows, s->slot);
    s->has_slot = false;
    core->has_released = true;
}

void decode_release_slots(decode_core *core, decode_attempt *a) {
    for (uint32_t i = 0; i < a->generation.samples; i++)
        if (a->samples[i] != NULL) release_slot(core, a->samples[i]);
}

static void leave_order(decode_core *core, const decode_sample *s) {
    uint32_t at = 0;
    while (core->order[at] != s)
        at++;
    core->order_count--;
    memmove(core->order + at, core->order + at + 1,
            (core->order_count - at) * sizeof core->order[0]);
}

void decode_release(decode_core *core, decode_sample *s, const char *reason) {
    if (s->state == DECODE_FREE) return;
    decode_attempt *a = s->attempt;
    decode_release_pages(core, s);
    release_slot(core, s);
    row_queue_destroy(s->queue);
    s->queue = NULL;
    bt_free(s->output_ids);
    s->output_ids = NULL;
    core->has_released = true;
    leave_order(core, s);
    decode_set_state(core, s, DECODE_FREE, 0, reason);
    a->samples[s->number] = NULL;
    if (--a->live > 0) return;
    attempt_words_fini(&a->words);
    core->released_total++;
    decode_set_attempt_state(core, a, DECODE_ATTEMPT_FREE, reason);
}

void decode_release_attempt(decode_core *core, decode_attempt *a, const char *reason) {
    for (uint32_t i = 0; a->state != DECODE_ATTEMPT_FREE; i++)
        if (a->samples[i] != NULL) decode_release(core, a->samples[i], reason);
}

/* ---- ends ------------------------------------------------------------------------------------ */

static bool is_wholly_cancelled(const decode_attempt *a) {
    for (uint32_t i = 0; i < a->generation.samples; i++)
        if (a->samples[i] != NULL && !a->samples[i]->is_cancelled) return false;
    return true;
}

void decode_end(decode_core *core, decode_sample *s, const char *reason) {
    switch (s->state) {
    case DECODE_RESERVED:
        /* The handoff is the whole attempt's. */
        s->is_cancelled = true;
        if (is_wholly_cancelled(s->attempt)) decode_end_attempt(core, s->attempt, reason);
        break;
    case DECODE_RUNNING:
    case DECODE_RECOMPUTING:
        if (s->is_in_step) {
            decode_set_state(core, s, DECODE_LEAVING, core->step.deadline_us, reason);
            break;
        }
        decode_release(core, s, reason);
        break;
    case DECODE_WAITING:
    case DECODE_PARKED:
    case DECODE_RETRACTED:
    case DECODE_DRAINING: decode_release(core, s, reason); break;
    case DECODE_FREE:
    case DECODE_LEAVING:
    case DECODE_STATE_COUNT: break;
    }
}

void decode_end_attempt(decode_core *core, decode_attempt *a, const char *reason) {
    switch (a->state) {
    case DECODE_ATTEMPT_RESERVED:
        kv_pool_quarantine(core->options.pages, decode_owner(a), a->samples[0]->pages,
                           a->samples[0]->page_count);
        decode_set_attempt_state(core, a, DECODE_ATTEMPT_QUARANTINE, reason);
        /* on_quiet releases it, maybe inside this call. */
        handoff_receiver_cancel(core->receiver, a->id);
        break;
    case DECODE_ATTEMPT_LIVE:
        for (uint32_t i = 0; i < a->generation.samples; i++)
            if (a->samples[i] != NULL) decode_end(core, a->samples[i], reason);
        break;
    case DECODE_ATTEMPT_FREE:
    case DECODE_ATTEMPT_QUARANTINE:
    case DECODE_ATTEMPT_STATE_COUNT: break;
    }
}

/* ---- the recount ----------------------------------------------------------------------------- */

static bool check_pages(const decode_core *core, const decode_sample *s) {
    const kv_pool *pool = core->options.pages;
    if (s->shared_count > s->page_count) return false;
    for (uint32_t p = 0; p < s->page_count; p++) {
        const bool is_shared = kv_pool_state(pool, s->pages[p]) == KV_PAGE_SHARED;
        if (is_shared != (p < s->shared_count)) return false;
        if (!is_shared && kv_pool_owner(pool, s->pages[p]) != decode_owner(s->attempt))
            return false;
    }
    switch (s->state) {
    case DECODE_RETRACTED:
    case DECODE_DRAINING: return s->page_count == 0 && s->computed_tokens == 0;
    case DECODE_RUNNING:
    case DECODE_PARKED:
    case DECODE_WAITING: return s->computed_tokens + 1 == decode_tokens(s) && s->page_count > 0;
    case DECODE_RECOMPUTING: return s->computed_tokens < decode_tokens(s);
    case DECODE_RESERVED: return s->page_count > 0 || s->number > 0;
    case DECODE_LEAVING: return s->is_in_step;
    case DECODE_FREE:
    case DECODE_STATE_COUNT: break;
    }
    return false;
}

static bool check_attempts(const decode_core *core) {
    uint32_t attempts = 0;
    uint32_t samples = 0;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        const decode_attempt *a = &core->attempts[i];
        if (a->state == DECODE_ATTEMPT_FREE) continue;
        attempts++;
        if (bt_id_map_get(&core->by_id, proto_attempt_id(a->id)) != a) return false;
        uint32_t live = 0;
        for (uint32_t n = 0; n < a->generation.samples; n++) {
            if (a->samples[n] == NULL) continue;
            live++;
            if (a->samples[n]->attempt != a || a->samples[n]->number != n) return false;
        }
        if (live != a->live || live == 0) return false;
        samples += live;
    }
    return core->by_id.count == attempts && core->order_count == samples;
}

bool decode_check(const decode_core *core) {
    uint64_t own = 0;
    uint64_t held = 0;
    uint32_t slots = 0;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        const decode_sample *s = &core->samples[i];
        if (s->state == DECODE_FREE && (s->page_count != 0 || s->has_slot)) return false;
    }
    for (uint32_t i = 0; i < core->order_count; i++) {
        const decode_sample *s = core->order[i];
        if (s->state == DECODE_FREE || !check_pages(core, s)) return false;
        own += s->page_count - s->shared_count;
        held += s->shared_count;
        slots += s->has_slot;
    }
    const kv_pool_counts counts = kv_pool_count(core->options.pages);
    if (counts.owned + counts.quarantined != own || counts.holds != held) return false;
    const uint32_t taken =
        membership_rows_total(&core->member) - membership_rows_free(&core->member);
    return taken == slots && check_attempts(core) && kv_pool_check(core->options.pages);
}
