/* Aborts by name on the control thread. Who is hit is decided by one order of all HTTP requests and
 * all aborts: a request that came before an abort, and no other, however the rings let them pass
 * each other and whoever has the name by now. So a request that was still being read when the abort
 * came is hit as soon as it is submitted, and one that takes the name again is left alone. */
#include <string.h>

#include "base/mem.h"
#include "router/control_internal.h"

static void abort_flow(control *c, const control_flow *flow, const control_order *order) {
    const uint64_t now_us = control_now(c);
    const uint32_t samples = flow->request.generation.samples;
    if (!flow->is_live || flow->abort_mark >= order->sequence) return;
    if (api_abort_names(&order->abort, flow->rid, flow->list_rid_bytes)) {
        dispatch_abort(c->dispatch, flow->request.id, PROTO_ALL_SAMPLES, now_us);
        return;
    }
    for (uint32_t i = 0; i < samples && samples > 1 && flow->is_live; i++) {
        if (api_abort_names_sample(&order->abort, flow->rid, i))
            dispatch_abort(c->dispatch, flow->request.id, i, now_us);
    }
}

/* A flow that ends leaves its chain and touches no other. */
static void abort_all(control *c, const control_order *order) {
    for (size_t i = 0; i <= c->rid_mask; i++) {
        const control_flow *flow = c->by_rid[i];
        while (flow != NULL) {
            const control_flow *next = flow->next_by_rid;
            abort_flow(c, flow, order);
            flow = next;
        }
    }
}

/* The request of that name, and the one that has a sample of that name. */
static void abort_named(control *c, const control_order *order) {
    const char *rid = order->abort.rid;
    const char *end = strrchr(rid, '_');
    const control_flow *flow = control_find_rid(c, rid, strlen(rid));
    if (flow != NULL) abort_flow(c, flow, order);
    if (end == NULL) return;
    flow = control_find_rid(c, rid, (size_t)(end - rid));
    if (flow != NULL) abort_flow(c, flow, order);
}

static void keep(control *c, control_order *order) {
    const uint32_t at = c->kept_next++ % CONTROL_ABORTS_KEPT;
    bt_free(c->kept[at]);
    c->kept[at] = order;
    c->kept_sequences[at] = order->sequence;
    if (order->sequence > c->newest_abort) c->newest_abort = order->sequence;
}

void control_abort_take(control *c, control_order *order) {
    const api_abort *abort = &order->abort;
    if (abort->is_all || abort->is_prefix || c->list_flows > 0) {
        abort_all(c, order);
    } else {
        abort_named(c, order);
    }
    keep(c, order);
}

void control_abort_late(control *c, const control_flow *flow) {
    if (flow->abort_mark >= c->newest_abort) return;
    for (uint32_t i = 0; i < CONTROL_ABORTS_KEPT; i++) {
        if (c->kept_sequences[i] > flow->abort_mark) abort_flow(c, flow, c->kept[i]);
    }
}

void control_abort_fini(control *c) {
    for (uint32_t i = 0; i < CONTROL_ABORTS_KEPT; i++) {
        bt_free(c->kept[i]);
    }
}
