/* The registration's states; see the header's diagram. */
#include "proto/worker_session.h"

#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "proto/row.h"

const char *worker_session_state_name(worker_session_state state) {
    switch (state) {
    case WORKER_SESSION_AWAY: return "away";
    case WORKER_SESSION_GREETING: return "greeting";
    case WORKER_SESSION_WELCOMED: return "welcomed";
    case WORKER_SESSION_SERVING: return "serving";
    case WORKER_SESSION_REFUSED: return "refused";
    }
    return "unknown";
}

static void set_state(worker_session *session, worker_session_state next, uint64_t deadline_us) {
    static const uint32_t edges[] = {
        [WORKER_SESSION_AWAY] = 1u << WORKER_SESSION_GREETING,
        [WORKER_SESSION_GREETING] = 1u << WORKER_SESSION_AWAY | 1u << WORKER_SESSION_WELCOMED |
                                    1u << WORKER_SESSION_REFUSED,
        [WORKER_SESSION_WELCOMED] = 1u << WORKER_SESSION_AWAY | 1u << WORKER_SESSION_SERVING,
        [WORKER_SESSION_SERVING] = 1u << WORKER_SESSION_AWAY,
        [WORKER_SESSION_REFUSED] = 0,
    };
    BT_ASSERT((edges[session->state] >> next & 1u) != 0);
    bt_log_debug("session", "%s -> %s", worker_session_state_name(session->state),
                 worker_session_state_name(next));
    session->state = next;
    session->deadline_us = deadline_us;
}

void worker_session_init(worker_session *session, const proto_hello *hello) {
    memset(session, 0, sizeof *session);
    session->hello = *hello;
    session->hello.version_major = PROTO_VERSION_MAJOR;
    session->hello.version_minor = PROTO_VERSION_MINOR;
    session->hello.record.row_format = ROW_FORMAT_VERSION;
    session->hello.record.protocol_minor = PROTO_VERSION_MINOR;
}

void worker_session_on_open(worker_session *session, proto_lane lane, uint64_t now_us,
                            proto_message *hello_out) {
    memset(hello_out, 0, sizeof *hello_out);
    hello_out->kind = PROTO_HELLO;
    hello_out->hello = session->hello;
    hello_out->hello.lane = lane;
    if (lane == PROTO_LANE_STREAMS) {
        BT_ASSERT(worker_session_is_welcome(session));
        session->has_streams = true;
        return;
    }
    set_state(session, WORKER_SESSION_GREETING, now_us + WORKER_SESSION_GREETING_MS * 1000u);
}

static uint64_t silence_deadline(const worker_session *session, uint64_t now_us) {
    return now_us + (uint64_t)session->welcome.dead_after_ms * 1000u;
}

bt_status worker_session_on_welcome(worker_session *session, const proto_welcome *welcome,
                                    uint64_t now_us, bt_error *error) {
    if (session->state != WORKER_SESSION_GREETING) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL, "a welcome came while %s",
                       worker_session_state_name(session->state));
    }
    cluster_record record = session->hello.record;
    record_adopt(&record, &welcome->record);
    record_field field;
    if (!record_compare(&record, "this worker", &welcome->record, welcome->router_host, &field,
                        error)) {
        if (error != NULL) error->status = BT_ERR_PEER_PROTOCOL;
        return BT_ERR_PEER_PROTOCOL;
    }
    const uint32_t cap = record.sampling_mask_max_tokens;
    if (cap == 0 || cap > WORKER_SESSION_MASK_TOKENS_MAX) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL,
                       "the welcome's sampling_mask_max_tokens is %u, not 1 to %d", cap,
                       (int)WORKER_SESSION_MASK_TOKENS_MAX);
    }
    if (record.kv_checksum == 0 || record.kv_checksum > RECORD_CHECKSUM_FULL + 1) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL, "the welcome's kv_checksum is %u",
                       record.kv_checksum);
    }
    if (welcome->dead_after_ms < WORKER_SESSION_DEAD_AFTER_MS_MIN || welcome->worker_id == 0) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL,
                       "the welcome has dead_after_ms %u and worker id %u", welcome->dead_after_ms,
                       welcome->worker_id);
    }
    session->record = record;
    session->welcome = *welcome;
    set_state(session, WORKER_SESSION_WELCOMED, silence_deadline(session, now_us));
    return BT_OK;
}

void worker_session_on_refuse(worker_session *session) {
    if (session->state == WORKER_SESSION_GREETING) set_state(session, WORKER_SESSION_REFUSED, 0);
}

void worker_session_on_heard(worker_session *session, uint64_t now_us) {
    if (!worker_session_is_welcome(session)) return;
    session->deadline_us = silence_deadline(session, now_us);
}

void worker_session_on_ready(worker_session *session, uint64_t now_us) {
    BT_ASSERT(session->has_streams);
    set_state(session, WORKER_SESSION_SERVING, silence_deadline(session, now_us));
}

void worker_session_on_closed(worker_session *session) {
    session->has_streams = false;
    if (session->state == WORKER_SESSION_AWAY || session->state == WORKER_SESSION_REFUSED) return;
    set_state(session, WORKER_SESSION_AWAY, 0);
}

bool worker_session_is_late(const worker_session *session, uint64_t now_us) {
    switch (session->state) {
    case WORKER_SESSION_AWAY:
    case WORKER_SESSION_REFUSED: return false;
    case WORKER_SESSION_GREETING:
    case WORKER_SESSION_WELCOMED:
    case WORKER_SESSION_SERVING: break;
    }
    return now_us >= session->deadline_us;
}

bool worker_session_is_welcome(const worker_session *session) {
    return session->state == WORKER_SESSION_WELCOMED || session->state == WORKER_SESSION_SERVING;
}
