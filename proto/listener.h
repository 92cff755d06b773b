/* A listening TCP socket that hands out accepted descriptors. Event thread only. */
#ifndef BT_PROTO_LISTENER_H
#define BT_PROTO_LISTENER_H

#include <stdint.h>

#include "base/status.h"
#include "proto/address.h"

struct event_base;
typedef struct proto_listener proto_listener;

typedef struct proto_listener_events {
    /* Takes fd: non-blocking, close-on-exec. peer is "host:port", for logs. */
    void (*on_accept)(void *context, int fd, const char *peer);
    void *context;
} proto_listener_events;

/* Resolves the host (numeric, or by name, which blocks) and listens. CALLER_CONFIG with a sentence
 * when the address cannot be used or is in use. */
BT_MUST_CHECK bt_status proto_listener_open(struct event_base *base, const proto_address *address,
                                            const proto_listener_events *events,
                                            proto_listener **out, bt_error *error);
void proto_listener_close(proto_listener *listener);
/* The port it has, also when 0 was asked for. */
uint16_t proto_listener_port(const proto_listener *listener);

#endif
