/* Shared by control.c (flows), control_links.c (workers) and control_look.c (what is published). */
#ifndef BT_ROUTER_CONTROL_INTERNAL_H
#define BT_ROUTER_CONTROL_INTERNAL_H

#include <pthread.h>

#include "base/clock.h"
#include "base/id_map.h"
#include "proto/link.h"
#include "proto/listener.h"
#include "router/budget.h"
#include "router/control.h"

enum {
    CONTROL_LINKS_MAX = 2048, /* two of each worker, and those being refused */
    CONTROL_TICK_US = 20 * 1000,
    CONTROL_ABORTS_KEPT = 256, /* for requests that were being read when they came */
    CONTROL_ABORTS_MAX = 256,  /* of one HTTP thread that are not carried out yet */
};

/* One abort, from the HTTP thread that was asked to the control thread, which keeps it. */
typedef struct control_order {
    uint64_t sequence;
    api_abort abort;
} control_order;

/* The two rings of one HTTP thread, and what did not fit into the one towards it. */
typedef struct control_lane {
    bt_ring *commands;
    bt_ring *batches;
    _Atomic uint32_t aborts; /* that are in `commands` */
    control_batch *first_pending, *last_pending;
    bt_loop_source *source;
    control *control;
} control_lane;

typedef struct control_link {
    control *control;
    proto_link *link;
    dispatch_link id;
    bool is_closing; /* the dispatch knows no more of it */
} control_link;

struct control {
    control_options options;
    bt_loop *loop;
    bt_clock clock;
    dispatch *dispatch;
    control_lane *lanes; /* [options.threads] */
    bt_loop_source *tick;
    budget in_flight;
    bt_block_pool *blocks; /* of rows: received, held by replies, given back by HTTP threads */
    uint64_t next_trim_us;
    control_flow *doomed;
    control_flow **by_rid; /* [rid_mask + 1] chains */
    size_t rid_mask;
    uint32_t list_flows; /* of by_rid, those that share an id with others of their list */
    /* Aborts: how many were asked for, and the last ones that were carried out. */
    _Atomic uint64_t abort_sequence;
    uint64_t newest_abort;
    control_order *kept[CONTROL_ABORTS_KEPT]; /* or NULL */
    uint64_t kept_sequences[CONTROL_ABORTS_KEPT];
    uint32_t kept_next;
    /* Workers. */
    proto_listener *listener;
    bt_id_map links;
    dispatch_link next_link;
    /* What other threads may see. */
    pthread_mutex_t mutex;
    api_snapshot snapshot; /* under mutex */
    api_snapshot fresh;    /* the control thread's, while it is made */
    bool is_stale;         /* publish at the next step */
};

static inline uint64_t control_now(const control *c) {
    return bt_clock_now_us(&c->clock);
}

bt_status control_links_open(control *c, bt_error *error);
void control_links_close(control *c);
void control_link_send(void *context, dispatch_link link, proto_message *message);
void control_link_close(void *context, dispatch_link link);
void control_publish(control *c);

/* control_abort.c, on the control thread */
/* Takes it. */
void control_abort_take(control *c, control_order *order);
/* Of a flow that was just submitted: aborts that came while it was read. */
void control_abort_late(control *c, const control_flow *flow);
void control_abort_fini(control *c);
/* control.c */
control_flow *control_find_rid(control *c, const char *rid, size_t bytes);

#endif
