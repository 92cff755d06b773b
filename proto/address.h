/* "HOST:PORT" with IPv6 in brackets ("[::1]:30001"), as the command lines write it. Pure. */
#ifndef BT_PROTO_ADDRESS_H
#define BT_PROTO_ADDRESS_H

#include <stdint.h>

#include "base/status.h"
#include "proto/message.h"

typedef struct proto_address {
    char host[PROTO_HOST_MAX];
    uint16_t port;
} proto_address;

/* CALLER_ARGUMENT with a sentence. Port 0 is allowed (a listener takes any free port). */
BT_MUST_CHECK bt_status proto_address_parse(const char *text, proto_address *out, bt_error *error);

#endif
