/* Dials a TCP address until it answers: the order in which processes start does not matter. Each
 * round tries every address of the host; after a failed round it waits, 50 ms at first, doubling to
 * 1 s. The first failure is logged, and every change of its cause. Event thread only; resolving a
 * name that is not numeric blocks for as long as the system's resolver does. */
#ifndef BT_PROTO_DIAL_H
#define BT_PROTO_DIAL_H

#include "base/status.h"
#include "proto/address.h"

struct event_base;
typedef struct proto_dial proto_dial;

typedef struct proto_dial_events {
    /* Takes fd: connected, non-blocking, close-on-exec. The dial is over; the callback may stop
     * (free) it. */
    void (*on_connected)(void *context, int fd);
    void *context;
} proto_dial_events;

/* Begins; the first try is made from the event loop. `what` names the other side in logs
 * ("router").
 */
BT_MUST_CHECK bt_status proto_dial_start(struct event_base *base, const proto_address *address,
                                         const char *what, const proto_dial_events *events,
                                         proto_dial **out);
/* Ends it and frees it, connected or not. NULL is fine. */
void proto_dial_stop(proto_dial *dial);

#endif
