/* HTTP/1.1 on one event loop: connections, timeouts, and one *exchange* (request and answer) at a
 * time on each connection. A request is handed on when it is complete; further (pipelined) bytes
 * are left unread beyond a small amount until its answer has ended.
 *
 * Who answers watches http_exchange_room and stops when it is 0: output is bounded by its producer,
 * who is told when there is room again. A client that closes its sending side while its request is
 * being answered has left.
 *
 * Everything here is called on the loop's thread. */
#ifndef BT_ROUTER_HTTP_SERVER_H
#define BT_ROUTER_HTTP_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json_writer.h"
#include "base/loop.h"
#include "base/status.h"
#include "router/budget.h"
#include "router/http_parser.h"

typedef struct http_server http_server;
typedef struct http_exchange http_exchange;

typedef struct http_server_options {
    uint32_t connections_max;  /* beyond: 503 and close */
    uint32_t head_bytes_max;   /* request line and fields of one request: 431 */
    uint64_t body_bytes_max;   /* 413 */
    budget *body_budget;       /* shared by all loops; bodies beyond it: 503 */
    uint32_t head_timeout_ms;  /* from the first byte of a request to the end of its head: 408 */
    uint32_t body_timeout_ms;  /* a body must bring 32 KiB in every such period: 408 */
    uint32_t idle_timeout_ms;  /* between requests */
    uint32_t write_timeout_ms; /* without any progress while there is output */
} http_server_options;

typedef struct http_handler {
    /* A complete request, to be answered now or later. Strings of the request live until the
     * exchange has ended; body is the handler's (http_server_body_free), NULL when there is none.
     */
    void (*on_request)(void *context, http_exchange *exchange, const http_request *request,
                       char *body, size_t body_bytes);
    void *context;
} http_handler;

BT_MUST_CHECK bt_status http_server_create(const http_server_options *options, bt_loop *loop,
                                           const http_handler *handler, http_server **out);
/* Closes every connection; owners of exchanges are told that the client has gone. */
void http_server_destroy(http_server *server);
/* Takes a connected, non-blocking socket. */
void http_server_adopt(http_server *server, int fd);
uint32_t http_server_connection_count(const http_server *server);
/* true when nothing waits to be written. */
bool http_server_is_flushed(const http_server *server);
/* Gives a body back to the budget. May be called on any thread. */
void http_server_body_free(budget *body_budget, char *body, size_t body_bytes);

/* ---- answering ------------------------------------------------------------------------------- */

/* Who answers an exchange later than in on_request. */
typedef struct http_owner {
    void (*on_room)(void *context); /* there is room again */
    void (*on_gone)(void *context); /* the client left; the exchange is no more */
    void *context;
} http_owner;

typedef struct http_head {
    int status;
    const char *content_type; /* NULL = no body */
    int64_t content_bytes;    /* -1: not known, sent in chunks */
    const char *fields;       /* further "Name: value\r\n" lines, or NULL */
} http_head;

void http_exchange_own(http_exchange *exchange, const http_owner *owner);
/* In this order, each on the loop's thread: begin once, add any number of times, end once. The
 * exchange is gone after end. For HEAD the body is left out. */
void http_exchange_begin(http_exchange *exchange, const http_head *head);
void http_exchange_add(http_exchange *exchange, const char *bytes, size_t count);
/* Adds a text and leaves it empty. Of a large one that has a block of a pool the block goes along
 * until it is written, and nothing is copied. */
void http_exchange_give(http_exchange *exchange, bt_text *text);
void http_exchange_end(http_exchange *exchange);
/* Cuts the connection: the answer has begun and cannot be finished honestly. The owner is not told.
 */
void http_exchange_cut(http_exchange *exchange);
/* begin, add and end at once. */
void http_exchange_reply(http_exchange *exchange, const http_head *head, const char *body);
/* The owner's on_room is called soon, also before begin: to go on with long work in slices. */
void http_exchange_wake(http_exchange *exchange);
/* How many bytes may be added now; 0 until the client read some of what is queued. */
size_t http_exchange_room(const http_exchange *exchange);

#endif
