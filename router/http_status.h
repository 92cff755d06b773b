/* The one map from a request's status to the HTTP status its client gets. Pure; any thread. */
#ifndef BT_ROUTER_HTTP_STATUS_H
#define BT_ROUTER_HTTP_STATUS_H

#include "base/status.h"

/* 200; 400 for what the client did; 503 for what may go better later; 500 for our own faults. */
int http_status_of(bt_status status);
/* What a worker said of an attempt, as the status of its request: a worker that gave up, or that
 * found its own arguments wrong, is the cluster's fault and never the client's. */
bt_status http_status_blame(bt_status from_worker);

#endif
