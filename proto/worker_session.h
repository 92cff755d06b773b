/* A worker's registration with its router: HELLO, WELCOME, the second connection, READY,
 * heartbeats. Pure; the control core of a worker embeds one. The owner of sockets dials and tells
 * of openings and closings; the session says what to send.
 *
 *            on_open(control)        on_welcome             READY
 *   AWAY ────────────────────▶ GREETING ──────▶ WELCOMED ─────────▶ SERVING
 *    ▲                            │  │              │                  │
 *    └──── on_closed, silence ────┴──┼──────────────┴──────────────────┘
 *                                    └── on_refuse ──▶ REFUSED (final)
 *
 * WELCOMED waits for the streams connection and for the worker itself (work of the last session at
 * rest, pools sized by the record). Every state but AWAY and REFUSED has a deadline. */
#ifndef BT_PROTO_WORKER_SESSION_H
#define BT_PROTO_WORKER_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/message.h"
#include "proto/record.h"

enum {
    WORKER_SESSION_GREETING_MS = 10000, /* WELCOME or REFUSE must come within this */
    WORKER_SESSION_DEAD_AFTER_MS_MIN = 100,
    WORKER_SESSION_MASK_TOKENS_MAX = 1 << 20, /* the largest cap a worker adopts */
};

typedef enum worker_session_state {
    WORKER_SESSION_AWAY,     /* no connection to the router */
    WORKER_SESSION_GREETING, /* HELLO is sent on control */
    WORKER_SESSION_WELCOMED, /* the record is adopted; not serving yet */
    WORKER_SESSION_SERVING,  /* READY is sent */
    WORKER_SESSION_REFUSED,  /* the worker ends */
} worker_session_state;

/* Plain data; read freely, changed only by the functions here. */
typedef struct worker_session {
    proto_hello hello; /* what this worker is; the record with pinned fields only */
    worker_session_state state;
    cluster_record record; /* WELCOMED, SERVING: hello.record and what was adopted */
    proto_welcome welcome; /* WELCOMED, SERVING */
    bool has_streams;      /* the second connection is open */
    uint64_t deadline_us;  /* of the state */
} worker_session;

/* hello->lane and the versions are filled in here. */
void worker_session_init(worker_session *session, const proto_hello *hello);
/* A connection to the router is open: fills the HELLO to send on it. */
void worker_session_on_open(worker_session *session, proto_lane lane, uint64_t now_us,
                            proto_message *hello_out);
/* PEER_PROTOCOL with a sentence when the welcome cannot be accepted: the owner hangs up. */
BT_MUST_CHECK bt_status worker_session_on_welcome(worker_session *session,
                                                  const proto_welcome *welcome, uint64_t now_us,
                                                  bt_error *error);
void worker_session_on_refuse(worker_session *session);
/* Something was received on control. */
void worker_session_on_heard(worker_session *session, uint64_t now_us);
/* READY was sent. */
void worker_session_on_ready(worker_session *session, uint64_t now_us);
/* Either connection is gone, or the owner hung up. */
void worker_session_on_closed(worker_session *session);
/* The state's deadline passed: the router is silent, hang up. */
bool worker_session_is_late(const worker_session *session, uint64_t now_us);
/* WELCOMED or SERVING: the router's messages about work are accepted. */
bool worker_session_is_welcome(const worker_session *session);

const char *worker_session_state_name(worker_session_state state);

#endif
