/* What the Accept fields of a request say about a media type (RFC 9110, 12.5.1). Lenient: an
 * element that does not parse counts as absent, parameters other than q are skipped. Pure. */
#ifndef BT_ROUTER_HTTP_ACCEPT_H
#define BT_ROUTER_HTTP_ACCEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "router/http_parser.h"

typedef enum http_accept_match {
    HTTP_ACCEPT_NOT_NAMED,
    HTTP_ACCEPT_ANY,     /* by a star for type and subtype */
    HTTP_ACCEPT_SUBTYPE, /* by a star for the subtype */
    HTTP_ACCEPT_EXACT,
} http_accept_match;

/* The most specific element that matches, and of equal ones the largest quality. */
typedef struct http_accepted {
    http_accept_match match;
    uint32_t quality; /* thousandths, 0 .. 1000; 0: not wanted */
} http_accepted;

/* Takes one field's value into account; *accepted begins zeroed. `type` is lower case, as in
 * "application/json". */
void http_accept_read(const char *value, const char *type, http_accepted *accepted);
/* The client names the type `special` itself and likes it no less than `usual`. */
bool http_accept_prefers(const http_request *request, const char *special, const char *usual);

#endif
