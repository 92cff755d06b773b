/* Owner records: the table of legal edges, and the one release. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

const char *decode_state_name(decode_state state) {
    switch (state) {
    case DECODE_FREE: return "free";
    case DECODE_RESERVED: return "reserved";
    case DECODE_RUNNING: return "running";
    case DECODE_PARKED: return "parked";
    case DECODE_DRAINING: return "draining";
    case DECODE_LEAVING: return "leaving";
    case DECODE_QUARANTINE: return "quarantine";
    case DECODE_STATE_COUNT: break;
    }
    return "unknown";
}

decode_attempt *decode_find(decode_core *core, proto_attempt id) {
    return bt_id_map_get(&core->by_id, proto_attempt_id(id));
}

decode_attempt *decode_take_free(decode_core *core) {
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        decode_attempt *a = &core->attempts[i];
        if (a->state != DECODE_FREE) continue;
        const uint32_t uses = a->uses + 1;
        memset(a, 0, sizeof *a);
        a->index = i;
        a->uses = uses;
        a->pages = core->page_lists + (size_t)i * core->pages_per_attempt;
        return a;
    }
    return NULL;
}

uint64_t decode_owner(const decode_attempt *a) {
    return (uint64_t)a->uses << 32 | (a->index + 1);
}

void decode_set_state(decode_core *core, decode_attempt *a, decode_state next, uint64_t deadline_us,
                      const char *reason) {
    static const uint32_t edges[DECODE_STATE_COUNT] = {
        [DECODE_FREE] = 1u << DECODE_RESERVED,
        [DECODE_RESERVED] = 1u << DECODE_RUNNING | 1u << DECODE_PARKED | 1u << DECODE_DRAINING |
                            1u << DECODE_QUARANTINE,
        [DECODE_RUNNING] =
            1u << DECODE_PARKED | 1u << DECODE_DRAINING | 1u << DECODE_LEAVING | 1u << DECODE_FREE,
        [DECODE_PARKED] = 1u << DECODE_RUNNING | 1u << DECODE_FREE,
        [DECODE_DRAINING] = 1u << DECODE_FREE,
        [DECODE_LEAVING] = 1u << DECODE_FREE,
        [DECODE_QUARANTINE] = 1u << DECODE_FREE,
    };
    BT_ASSERT((edges[a->state] >> next & 1u) != 0);
    bt_log_debug("decode", "attempt " DECODE_ID_FORMAT ": %s -> %s (%s)", DECODE_ID_ARGS(a->id),
                 decode_state_name(a->state), decode_state_name(next), reason);
    if (a->state == DECODE_FREE) bt_id_map_put(&core->by_id, proto_attempt_id(a->id), a);
    if (next == DECODE_FREE) bt_id_map_remove(&core->by_id, proto_attempt_id(a->id));
    a->state = next;
    a->deadline_us = deadline_us;
}

void decode_release_pages(decode_core *core, decode_attempt *a) {
    BT_ASSERT(!a->is_in_step);
    if (a->page_count == 0) return;
    kv_pool_release(core->options.pages, decode_owner(a), a->pages, a->page_count);
    a->page_count = 0;
    core->has_released = true;
}

void decode_release_slot(decode_core *core, decode_attempt *a) {
    if (!a->has_slot) return;
    row_pool_release(core->member.rows, a->slot);
    a->has_slot = false;
    core->has_released = true;
}

void decode_release(decode_core *core, decode_attempt *a, const char *reason) {
    if (a->state == DECODE_FREE) return;
    decode_release_pages(core, a);
    decode_release_slot(core, a);
    decode_stream_drop(a);
    row_queue_destroy(a->queue);
    a->queue = NULL;
    core->released_total++;
    core->has_released = true;
    decode_set_state(core, a, DECODE_FREE, 0, reason);
}

void decode_end(decode_core *core, decode_attempt *a, const char *reason) {
    switch (a->state) {
    case DECODE_RESERVED:
        kv_pool_quarantine(core->options.pages, decode_owner(a), a->pages, a->page_count);
        decode_set_state(core, a, DECODE_QUARANTINE, 0, reason);
        /* on_quiet releases it, maybe inside this call. */
        handoff_receiver_cancel(core->receiver, a->id);
        break;
    case DECODE_RUNNING:
        if (a->is_in_step) {
            decode_set_state(core, a, DECODE_LEAVING, core->step.deadline_us, reason);
            break;
        }
        decode_release(core, a, reason);
        break;
    case DECODE_PARKED:
    case DECODE_DRAINING: decode_release(core, a, reason); break;
    case DECODE_FREE:
    case DECODE_LEAVING:
    case DECODE_QUARANTINE:
    case DECODE_STATE_COUNT: break;
    }
}
