/* The HTTP threads: each has an event loop with its share of the connections, and answers the
 * requests that come in on them. Requests to generate go to a tokenizer thread (intake), from there
 * back and on to the control thread (control), whose rows come back to the thread of the
 * connection. */
#ifndef BT_ROUTER_FRONT_H
#define BT_ROUTER_FRONT_H

#include "proto/address.h"
#include "router/api_call.h"
#include "router/control.h"
#include "router/http_server.h"
#include "router/intake.h"

typedef struct front front;

typedef struct front_options {
    const api_settings *settings;
    control *control;
    intake *intake;
    uint32_t intake_threads;
    uint32_t threads;
    /* Requests to the workers at once, each item of a batch one: beyond them 503. */
    uint32_t flows_per_thread_max;
    proto_address address;
    http_server_options http; /* connections_max is of all threads together */
    reply_limits *limits;
} front_options;

/* Binds the public port. CALLER_CONFIG with a sentence when it is in use. */
BT_MUST_CHECK bt_status front_create(const front_options *options, front **out, bt_error *error);
BT_MUST_CHECK bt_status front_start(front *f);
/* Ends the threads. */
void front_stop(front *f);
/* Closes every connection and frees what is left of their requests: after front_stop, and after
 * intake and control were destroyed. */
void front_destroy(front *f);
uint16_t front_port(const front *f);

#endif
