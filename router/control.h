/* The control thread: it owns the dispatch, the connections of the workers and the clock of both.
 * HTTP threads meet it at bounded rings only.
 *
 * A *flow* is one request as both sides see it. Its HTTP thread submits it, may cancel it and grant
 * credit, gets its rows, the ends of its samples and exactly one end (control_next), and releases
 * it as the very last thing; then the control thread frees it. Commands of one HTTP thread are
 * carried out in order, so nothing refers to a flow that was released. */
#ifndef BT_ROUTER_CONTROL_H
#define BT_ROUTER_CONTROL_H

#include <stdatomic.h>

#include "base/loop.h"
#include "base/options.h"
#include "base/ring.h"
#include "proto/address.h"
#include "router/api_abort.h"
#include "router/api_info.h"
#include "router/dispatch.h"

typedef struct control control;
typedef struct control_flow control_flow;

typedef enum control_batch_kind {
    CONTROL_ROWS,            /* of one sample */
    CONTROL_PROMPT_LOGPROBS, /* entries of the prompt's log-probabilities */
    CONTROL_RESTART,         /* the rows so far of the samples that have not ended are void */
    CONTROL_SAMPLE_END,      /* exactly one per sample */
    CONTROL_END,             /* the last thing */
} control_batch_kind;

/* What the control thread hands to an HTTP thread, in the order in which it happened. */
typedef struct control_batch {
    struct control_batch *next; /* while the ring is full */
    control_flow *flow;
    control_batch_kind kind;
    uint32_t sample;         /* of rows and of a sample's end */
    uint32_t cached_tokens;  /* of the request, with rows */
    uint32_t first_position; /* of log-probabilities */
    uint32_t count;          /* of log-probabilities */
    size_t bytes;            /* of rows (whole records) and log-probabilities (whole entries) */
    const uint8_t *payload;  /* [bytes], aligned to 4 */
    bt_block *block;         /* that the payload lies in, a hold; NULL: it lies behind the batch */
    size_t charged_bytes;    /* of what is in flight */
    const dispatch_end *end; /* of a sample's end and of the end; the flow's */
} control_batch;

/* One sample as both threads see it. */
typedef struct control_sample {
    _Atomic uint64_t granted_bytes; /* not yet told to the dispatch */
    _Atomic bool is_cancelled;      /* likewise */
    bool has_ended;                 /* the control thread's */
    bool is_told;                   /* the HTTP thread's: its end was taken from control_next */
    dispatch_end end;               /* valid once its end was handed on */
    control_batch end_batch;
} control_sample;

struct control_flow {
    /* Filled by the HTTP thread before control_submit. */
    uint32_t thread; /* index of the HTTP thread */
    dispatch_request request;
    const char *rid;         /* refused while another flow has the same */
    size_t list_rid_bytes;   /* of rid, as in api_request */
    uint64_t abort_mark;     /* control_abort_mark when its HTTP request was there */
    control_sample *samples; /* [request.generation.samples], zeroed, owned by the HTTP thread */
    void (*on_free)(control_flow *flow);
    /* Between the two: one order for what all samples have to say. */
    _Atomic bool is_update_queued;
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
    uint64_t in_flight_bytes_max;  /* of rows and log-probabilities on their way to HTTP threads */
    size_t idle_bytes_max;         /* of blocks for rows that are kept for later */
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
/* The others go on. */
void control_cancel_sample(control *c, control_flow *flow, uint32_t sample);
void control_grant(control *c, control_flow *flow, uint32_t sample, uint64_t bytes);
void control_release(control *c, control_flow *flow);
/* Aborts what `abort` names of the requests of all threads whose HTTP requests were there before;
 * their ends follow as those of any flow. Such as are still being read are hit when they are
 * submitted, as long as no more than 256 aborts came meanwhile. false: too many are waiting to be
 * carried out. */
BT_MUST_CHECK bool control_abort(control *c, uint32_t thread, const api_abort *abort);
/* Readable when control_next has something; watch its descriptor. */
bt_ring *control_ring(control *c, uint32_t thread);
/* The next batch, or NULL. It goes back with control_batch_free (ends, which are parts of the flow,
 * may); the flow must not have been released. */
control_batch *control_next(control *c, uint32_t thread);
void control_batch_free(control *c, control_batch *batch);

/* ---- any thread ------------------------------------------------------------------------------ */

void control_get_model(control *c, api_model *out);
/* Also what control_get_model gives, workers included. */
void control_get_snapshot(control *c, api_snapshot *out);
bool control_is_ready(control *c);
/* A point in the order of aborts: those asked for so far hit nothing that came after it. */
uint64_t control_abort_mark(control *c);

#endif
