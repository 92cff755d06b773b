/* Owner records: the table of legal edges, the line of those that wait or compute, and the one
 * release. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

const char *prefill_state_name(prefill_state state) {
    switch (state) {
    case PREFILL_FREE: return "free";
    case PREFILL_ASSEMBLING: return "assembling";
    case PREFILL_QUEUED: return "queued";
    case PREFILL_COMPUTING: return "computing";
    case PREFILL_SENDING: return "sending";
    case PREFILL_LEAVING: return "leaving";
    case PREFILL_QUARANTINE: return "quarantine";
    case PREFILL_STATE_COUNT: break;
    }
    return "unknown";
}

prefill_attempt *prefill_find(prefill_core *core, proto_attempt id) {
    return bt_id_map_get(&core->by_id, proto_attempt_id(id));
}

prefill_attempt *prefill_take_free(prefill_core *core) {
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        prefill_attempt *a = &core->attempts[i];
        if (a->state != PREFILL_FREE) continue;
        const uint32_t uses = a->uses + 1;
        memset(a, 0, sizeof *a);
        a->index = i;
        a->uses = uses;
        a->pages = core->page_lists + (size_t)i * core->pages_per_attempt;
        return a;
    }
    return NULL;
}

uint64_t prefill_owner(const prefill_attempt *a) {
    return (uint64_t)a->uses << 32 | (a->index + 1);
}

/* ---- the line -------------------------------------------------------------------------------- */

static bool is_in_line(prefill_state state) {
    return state == PREFILL_QUEUED || state == PREFILL_COMPUTING;
}

static void join_line(prefill_core *core, prefill_attempt *a) {
    a->ahead = core->line_last;
    a->behind = NULL;
    if (core->line_last != NULL)
        core->line_last->behind = a;
    else
        core->line_first = a;
    core->line_last = a;
    a->served_at = core->steps_total;
    a->tried_at = UINT64_MAX;
}

static void leave_line(prefill_core *core, prefill_attempt *a) {
    if (a->ahead != NULL)
        a->ahead->behind = a->behind;
    else
        core->line_first = a->behind;
    if (a->behind != NULL)
        a->behind->ahead = a->ahead;
    else
        core->line_last = a->ahead;
}

/* ---- states ---------------------------------------------------------------------------------- */

void prefill_set_state(prefill_core *core, prefill_attempt *a, prefill_state next,
                       const char *reason) {
    static const uint32_t edges[PREFILL_STATE_COUNT] = {
        [PREFILL_FREE] = 1u << PREFILL_ASSEMBLING,
        [PREFILL_ASSEMBLING] = 1u << PREFILL_QUEUED | 1u << PREFILL_FREE,
        [PREFILL_QUEUED] = 1u << PREFILL_COMPUTING | 1u << PREFILL_FREE,
        [PREFILL_COMPUTING] = 1u << PREFILL_SENDING | 1u << PREFILL_LEAVING |
                              1u << PREFILL_QUARANTINE | 1u << PREFILL_FREE,
        [PREFILL_SENDING] = 1u << PREFILL_QUARANTINE | 1u << PREFILL_FREE,
        [PREFILL_LEAVING] = 1u << PREFILL_QUARANTINE | 1u << PREFILL_FREE,
        [PREFILL_QUARANTINE] = 1u << PREFILL_FREE,
    };
    BT_ASSERT((edges[a->state] >> next & 1u) != 0);
    bt_log_debug("prefill", "attempt " PREFILL_ID_FORMAT ": %s -> %s (%s)", PREFILL_ID_ARGS(a->id),
                 prefill_state_name(a->state), prefill_state_name(next), reason);
    if (a->state == PREFILL_FREE) bt_id_map_put(&core->by_id, proto_attempt_id(a->id), a);
    if (next == PREFILL_FREE) bt_id_map_remove(&core->by_id, proto_attempt_id(a->id));
    if (!is_in_line(a->state) && is_in_line(next)) join_line(core, a);
    if (is_in_line(a->state) && !is_in_line(next)) leave_line(core, a);
    a->state = next;
    core->changes++;
}

void prefill_free_words(prefill_attempt *a) {
    attempt_words_fini(&a->words);
    bt_free(a->hashes);
    bt_free(a->slots);
    a->hashes = NULL;
    a->slots = NULL;
}

void prefill_release(prefill_core *core, prefill_attempt *a, const char *reason) {
    if (a->state == PREFILL_FREE) return;
    BT_ASSERT(!a->is_in_step);
    BT_ASSERT(!a->has_handoff);
    prefill_release_pages(core, a);
    prefill_free_words(a);
    core->released_total++;
    prefill_set_state(core, a, PREFILL_FREE, reason);
}

void prefill_end(prefill_core *core, prefill_attempt *a, const char *reason) {
    switch (a->state) {
    case PREFILL_ASSEMBLING:
    case PREFILL_QUEUED: prefill_release(core, a, reason); return;
    case PREFILL_COMPUTING:
    case PREFILL_SENDING: break;
    case PREFILL_FREE:
    case PREFILL_LEAVING:
    case PREFILL_QUARANTINE:
    case PREFILL_STATE_COUNT: return;
    }
    if (!a->is_in_step && !a->has_handoff) {
        prefill_release(core, a, reason);
        return;
    }
    prefill_set_state(core, a, a->is_in_step ? PREFILL_LEAVING : PREFILL_QUARANTINE, reason);
    if (!a->has_handoff) return;
    prefill_quarantine_pages(core, a);
    /* on_quiet follows, maybe inside this call. Ignored for a handoff that has failed by itself. */
    handoff_sender_abort(core->sender, a->id);
}

void prefill_send_done(prefill_core *core, proto_attempt id, bt_status status,
                       uint32_t cached_tokens, uint32_t cap_needed, const char *text) {
    if (!membership_is_serving(&core->member)) return;
    proto_message message = {.kind = PROTO_PREFILL_DONE};
    message.prefill_done = (proto_prefill_done){
        .attempt = id, .status = status, .cached_tokens = cached_tokens, .cap_needed = cap_needed};
    proto_text_copy(message.prefill_done.text, sizeof message.prefill_done.text, text);
    core->options.ops.send(core->options.ops.context, PROTO_LANE_CONTROL, &message);
}

void prefill_fail(prefill_core *core, prefill_attempt *a, bt_status status, const char *format,
                  ...) {
    char text[PROTO_TEXT_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    bt_log(bt_log_level_of(status), "prefill", "attempt " PREFILL_ID_FORMAT ": %s: %s",
           PREFILL_ID_ARGS(a->id), bt_status_string(status), text);
    prefill_send_done(core, a->id, status, a->cached_tokens, 0, text);
    prefill_end(core, a, "failed");
}
