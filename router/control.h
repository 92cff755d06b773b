/* The control thread: it owns the dispatch, the connections of the workers and the clock of both.
 * HTTP threads meet it at bounded rings only.
 *
 * A *flow* is one request as both sides see it. Its HTTP thread submits it, may cancel it and grant
 * credit, gets its rows and exactly one end (control_next), and releases it as the very last thing;
 * then the control thread frees it. Commands of one HTTP thread are carried out in order, so
 * nothing refers to a flow that was released. */
#ifndef BT_ROUTER_CONTROL_H
#define BT_ROUTER_CONTROL_H

#include <stdatomic.h>

#include "base/loop.h"
#include "base/options.h"
#include "base/ring.h"
#include "proto/address.h"
#include "router/api_info.h"
#include "router/dispatch.h"

typedef struct control control;
typedef struct control_flow control_flow;

/* What the control thread hands to an HTTP thread: a batch of rows, or (bytes 0) the end. */
typedef struct control_batch {
    struct control_batch *next; /* while the ring is full */
    control_flow *flow;
    size_t bytes;
    uint32_t cached_tokens; /* of the request */
    uint8_t *records;       /* whole records of the row stream, aligned to 8; behind the batch */
} control_batch;

struct control_flow {
    /* Filled by the HTTP thread before control_submit. */
    uint32_t thread; /* index of the HTTP thread */
    dispatch_request request;
    const char *rid; /* refused while another flow has the same */
    void (*on_free)(control_flow *flow);
    /* Between the two. */
    _Atomic uint64_t granted_bytes;
    _Atomic bool is_grant_queued;
    dispatch_end end; /* valid once the end was handed on */
    /* The control thread's. */
    control_batch end_batch;
    bool is_live;   /* the dispatch has it */
    bool is_doomed; /* cancelled for our own reasons: end says why */
    control_flow *next_doomed;
    control_flow *next_by_rid;
};

typedef struct control_options {
    dispatch_options dispatch;
    proto_address address; /* where workers connect */
    const api_settings *settings;
    uint32_t threads;              /* HTTP threads */
    uint32_t flows_per_thread_max; /* whoever submits keeps this limit */
    uint64_t in_flight_bytes_max;  /* of rows on their way to HTTP threads */
} control_options;

/* Binds the workers' port; the loop is the caller's and runs on the control thread. Errors with a
 * sentence: CALLER_CONFIG when the port is in use. */
BT_MUST_CHECK bt_status control_create(const control_options *options, bt_loop *loop, control **out,
                                       bt_error *error);
/* After its loop and all HTTP threads have ended. Frees released flows and batches, no others. */
void control_destroy(control *c);
uint16_t control_port(const control *c);
/* The step of bt_loop_run: carries out commands. */
bool control_step(void *context);

/* ---- on the HTTP thread `flow->thread` ------------------------------------------------------- */

void control_submit(control *c, control_flow *flow);
void control_cancel(control *c, control_flow *flow);
void control_grant(control *c, control_flow *flow, uint64_t bytes);
void control_release(control *c, control_flow *flow);
/* Readable when control_next has something; watch its descriptor. */
bt_ring *control_ring(control *c, uint32_t thread);
/* The next batch, or NULL. A batch of rows goes back with control_batch_free; an end is flow->end
 * and is not freed. */
control_batch *control_next(control *c, uint32_t thread);
void control_batch_free(control *c, control_batch *batch);

/* ---- any thread ------------------------------------------------------------------------------ */

void control_get_model(control *c, api_model *out);
/* Also what control_get_model gives, workers included. */
void control_get_snapshot(control *c, api_snapshot *out);
bool control_is_ready(control *c);

#endif
