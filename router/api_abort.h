/* POST /abort_request: the body, and which requests and samples it names. Pure.
 *
 * A request is named by its rid, and with those of the same list by the id that these are named
 * after; one of its samples, where there are several, by the id that its reply has. */
#ifndef BT_ROUTER_API_ABORT_H
#define BT_ROUTER_API_ABORT_H

#include "router/api_request.h"

enum { API_ABORT_RID_MAX = API_RID_MAX + 2 * API_INDEX_MAX /* R, _item, _sample */ };

typedef struct api_abort {
    char rid[API_ABORT_RID_MAX + 1]; /* "": none, unless is_all */
    bool is_prefix;                  /* whatever begins with rid */
    bool is_all;
} api_abort;

/* Reads a body. false: *failure_out says why. */
BT_MUST_CHECK bool api_abort_read(const char *text, size_t bytes, api_abort *out,
                                  api_failure *failure_out);
/* The whole request. list_rid_bytes as in api_request. */
bool api_abort_names(const api_abort *abort, const char *rid, size_t list_rid_bytes);
/* One of its several samples. */
bool api_abort_names_sample(const api_abort *abort, const char *rid, uint32_t sample);

#endif
