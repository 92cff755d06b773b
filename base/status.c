/* Names and scopes of bt_status. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

const char *bt_status_string(bt_status status) {
    switch (status) {
    case BT_OK: return "ok";
    case BT_ERR_REQUEST_INVALID: return "request invalid";
    case BT_ERR_REQUEST_OVERFLOW: return "sampling support overflow";
    case BT_ERR_REQUEST_CAPTURE: return "sampling capture invalid";
    case BT_ERR_REQUEST_CANCELLED: return "request cancelled";
    case BT_ERR_REQUEST_DEADLINE: return "deadline passed";
    case BT_ERR_REQUEST_FULL: return "full";
    case BT_ERR_REQUEST_TOO_LARGE: return "request too large";
    case BT_ERR_REQUEST_UNKNOWN: return "unknown attempt";
    case BT_ERR_REQUEST_DUPLICATE: return "duplicate";
    case BT_ERR_REQUEST_CORRUPT: return "corrupt";
    case BT_ERR_REQUEST_STALE: return "stale";
    case BT_ERR_REQUEST_UNSUPPORTED: return "unsupported request";
    case BT_ERR_REQUEST_NO_WORKER: return "no worker";
    case BT_ERR_PEER_GONE: return "peer gone";
    case BT_ERR_PEER_PROTOCOL: return "peer broke the protocol";
    case BT_ERR_PEER_REFUSED: return "peer refused";
    case BT_ERR_PEER_TIMEOUT: return "peer timed out";
    case BT_ERR_WORKER_MEMORY: return "out of memory";
    case BT_ERR_WORKER_IO: return "input/output error";
    case BT_ERR_WORKER_INTERNAL: return "internal error";
    case BT_ERR_CALLER_ARGUMENT: return "bad argument";
    case BT_ERR_CALLER_CONFIG: return "bad configuration";
    case BT_ERR_CALLER_FILE: return "bad file";
    case BT_ERR_CALLER_UNSUPPORTED: return "unsupported";
    case BT_ERR_CALLER_LIMIT: return "limit exceeded";
    }
    return "unknown status";
}

bt_scope bt_status_scope(bt_status status) {
    const int group = -(int)status / 100;
    switch (group) {
    case 1: return BT_SCOPE_REQUEST;
    case 2: return BT_SCOPE_PEER;
    case 3: return BT_SCOPE_WORKER;
    case 4: return BT_SCOPE_CALLER;
    }
    return BT_SCOPE_NONE;
}

bt_status bt_fail(bt_error *error, bt_status status, const char *format, ...) {
    if (error == NULL) return status;
    error->status = status;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    return status;
}
