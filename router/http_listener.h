/* One listening TCP socket on an event loop; hands each connection to a callback. */
#ifndef BT_ROUTER_HTTP_LISTENER_H
#define BT_ROUTER_HTTP_LISTENER_H

#include <stdint.h>

#include "base/loop.h"
#include "base/status.h"

typedef struct http_listener http_listener;

/* Listens on "HOST:PORT" ("[::1]:80" for IPv6; port 0 = any). on_accept takes the non-blocking
 * socket. CALLER_CONFIG with one sentence naming the address when it is malformed or in use. */
BT_MUST_CHECK bt_status http_listener_open(const char *address, bt_loop *loop,
                                           void (*on_accept)(void *context, int fd), void *context,
                                           http_listener **out, bt_error *error);
void http_listener_close(http_listener *listener);
/* "127.0.0.1:30000", with the real port. */
const char *http_listener_address(const http_listener *listener);

#endif
