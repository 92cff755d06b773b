/* The one status type of Baton. 0 is success; errors are negative and grouped by the largest thing
 * that is hurt: the request, the peer (drop the link, retry elsewhere), the worker (drain and
 * restart), or the caller (bad argument or configuration). Numbers travel on the wire and are only
 * ever appended. Start-up code also fills a bt_error: a status and one sentence for a human. */
#ifndef BT_BASE_STATUS_H
#define BT_BASE_STATUS_H

#include <stdint.h>

#include "base/compiler.h"

typedef enum bt_status {
    BT_OK = 0,

    /* The request fails; everything else goes on. */
    BT_ERR_REQUEST_INVALID = -100,     /* the client's mistake: HTTP 400 */
    BT_ERR_REQUEST_OVERFLOW = -101,    /* the support is larger than the cap: HTTP 400 */
    BT_ERR_REQUEST_CAPTURE = -102,     /* the sampler's capture is inconsistent: HTTP 500 */
    BT_ERR_REQUEST_CANCELLED = -103,   /* the client left, or the router gave up */
    BT_ERR_REQUEST_DEADLINE = -104,    /* a wait passed its deadline */
    BT_ERR_REQUEST_FULL = -105,        /* no page, slot or credit now: wait or 503 */
    BT_ERR_REQUEST_TOO_LARGE = -106,   /* can never fit: HTTP 400 */
    BT_ERR_REQUEST_UNKNOWN = -107,     /* no such attempt here */
    BT_ERR_REQUEST_DUPLICATE = -108,   /* this attempt or chunk exists already */
    BT_ERR_REQUEST_CORRUPT = -109,     /* KV or row failed its proof */
    BT_ERR_REQUEST_STALE = -110,       /* an older slot generation or incarnation */
    BT_ERR_REQUEST_UNSUPPORTED = -111, /* known, but not built: refused by name */
    BT_ERR_REQUEST_NO_WORKER = -112,   /* nobody can serve it now: HTTP 503 */

    /* The link to one peer is lost or unusable. */
    BT_ERR_PEER_GONE = -200,
    BT_ERR_PEER_PROTOCOL = -201,
    BT_ERR_PEER_REFUSED = -202,
    BT_ERR_PEER_TIMEOUT = -203,

    /* This process cannot go on as it is. */
    BT_ERR_WORKER_MEMORY = -300,
    BT_ERR_WORKER_IO = -301,
    BT_ERR_WORKER_INTERNAL = -302,

    /* The caller gave something that cannot be used. */
    BT_ERR_CALLER_ARGUMENT = -400,
    BT_ERR_CALLER_CONFIG = -401,
    BT_ERR_CALLER_FILE = -402,        /* missing, truncated or not what it should be */
    BT_ERR_CALLER_UNSUPPORTED = -403, /* a model, type or option that is not built */
    BT_ERR_CALLER_LIMIT = -404,       /* a named limit is exceeded */
} bt_status;

typedef enum bt_scope {
    BT_SCOPE_NONE,
    BT_SCOPE_REQUEST,
    BT_SCOPE_PEER,
    BT_SCOPE_WORKER,
    BT_SCOPE_CALLER,
} bt_scope;

/* A short lower-case name, for logs; never NULL, also for numbers that are not ours. */
const char *bt_status_string(bt_status status);
bt_scope bt_status_scope(bt_status status);

/* A status with the sentence that explains it. Caller's storage; `text` is always terminated. */
typedef struct bt_error {
    bt_status status;
    char text[512];
} bt_error;

/* Fills *error (which may be NULL) and returns `status`, so that failing is one line. */
bt_status bt_fail(bt_error *error, bt_status status, const char *format, ...) BT_PRINTF(3, 4);

#endif
