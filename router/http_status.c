/* Every status of base/status.h, once. */
#include "router/http_status.h"

int http_status_of(bt_status status) {
    switch (status) {
    case BT_OK: return 200;
    case BT_ERR_REQUEST_INVALID:
    case BT_ERR_REQUEST_OVERFLOW:
    case BT_ERR_REQUEST_TOO_LARGE:
    case BT_ERR_REQUEST_DUPLICATE:
    case BT_ERR_REQUEST_UNSUPPORTED:
    case BT_ERR_CALLER_ARGUMENT:
    case BT_ERR_CALLER_LIMIT:
    case BT_ERR_CALLER_UNSUPPORTED: return 400;
    case BT_ERR_REQUEST_CANCELLED:
    case BT_ERR_REQUEST_DEADLINE:
    case BT_ERR_REQUEST_FULL:
    case BT_ERR_REQUEST_NO_WORKER:
    case BT_ERR_PEER_GONE:
    case BT_ERR_PEER_REFUSED:
    case BT_ERR_PEER_TIMEOUT:
    case BT_ERR_WORKER_MEMORY: return 503;
    case BT_ERR_REQUEST_CAPTURE:
    case BT_ERR_REQUEST_UNKNOWN:
    case BT_ERR_REQUEST_CORRUPT:
    case BT_ERR_REQUEST_STALE:
    case BT_ERR_PEER_PROTOCOL:
    case BT_ERR_WORKER_IO:
    case BT_ERR_WORKER_INTERNAL:
    case BT_ERR_CALLER_CONFIG:
    case BT_ERR_CALLER_FILE: return 500;
    }
    return 500;
}

bt_status http_status_blame(bt_status from_worker) {
    if (from_worker == BT_ERR_REQUEST_CANCELLED) return BT_ERR_PEER_GONE;
    if (from_worker == BT_ERR_REQUEST_DUPLICATE) return BT_ERR_REQUEST_CORRUPT;
    if (bt_status_scope(from_worker) == BT_SCOPE_CALLER) return BT_ERR_WORKER_INTERNAL;
    return from_worker;
}
