/* A worker's two connections to its router: control is dialled at once and again after every loss;
 * streams when the session asks for it. When one of the two ends, both are closed, and control is
 * dialled again after a pause. Event thread only; the router may be started later, or again. */
#ifndef BT_PROTO_WORKER_LINK_H
#define BT_PROTO_WORKER_LINK_H

#include <stdbool.h>

#include "base/status.h"
#include "proto/address.h"
#include "proto/message.h"

struct event_base;
typedef struct worker_link worker_link;

typedef struct worker_link_events {
    void (*on_open)(void *context, proto_lane lane);
    /* message->payload is borrowed for the call. */
    void (*on_message)(void *context, proto_lane lane, const proto_message *message);
    /* Both connections are closed; not after worker_link_hang_up. */
    void (*on_closed)(void *context);
    /* Streams takes bulk again. */
    void (*on_drained)(void *context);
    void *context;
} worker_link_events;

BT_MUST_CHECK bt_status worker_link_create(struct event_base *base, const proto_address *router,
                                           const worker_link_events *events, worker_link **out);
void worker_link_destroy(worker_link *link);
/* Dials streams; control is open. */
void worker_link_open_streams(worker_link *link);
/* Takes message->payload; a message for a connection that is not open is dropped. */
void worker_link_send(worker_link *link, proto_lane lane, proto_message *message);
/* Streams is open and its output is not piling up. */
bool worker_link_can_stream(const worker_link *link);
/* Closes both now and dials control again after a pause. May be called from the events. */
void worker_link_hang_up(worker_link *link);

#endif
