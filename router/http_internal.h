/* Shared by http_server.c (connections and timers), http_receive.c (requests) and http_answer.c. */
#ifndef BT_ROUTER_HTTP_INTERNAL_H
#define BT_ROUTER_HTTP_INTERNAL_H

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>

#include "router/http_server.h"
#include "router/random_id.h"

enum {
    HTTP_OUTPUT_HIGH = 256 * 1024, /* room is 0 above it */
    HTTP_OUTPUT_LOW = 64 * 1024,   /* on_room below it */
    HTTP_INPUT_HIGH = 64 * 1024,   /* pipelined bytes kept while an answer is on its way */
    HTTP_REQUEST_ID_MAX = 128,
};

/*  IDLE -> HEAD -> BODY -> ANSWERING -> IDLE ...         keep-alive
 *                              |-> FLUSHING -> LINGERING -> freed
 */
typedef enum http_state {
    HTTP_STATE_IDLE,      /* between requests; deadline: idle */
    HTTP_STATE_HEAD,      /* some bytes of a head came; deadline: head */
    HTTP_STATE_BODY,      /* the head is complete; deadline: progress */
    HTTP_STATE_ANSWERING, /* the handler has the request; deadline: the handler's */
    HTTP_STATE_FLUSHING,  /* the last answer is being written; deadline: write */
    HTTP_STATE_LINGERING, /* all written, our side is shut; reads until the peer closes */
    HTTP_STATE_DEAD,      /* to be freed when the stack is unwound */
} http_state;

struct http_exchange { /* a connection; it has one exchange at a time */
    http_server *server;
    struct bufferevent *bev;
    struct event *timer;
    http_exchange *previous, *next;
    http_state state;
    bool is_receiving; /* http_receive is on the stack */
    bool peer_closed;  /* no more input will come */
    bool has_begun;    /* the status line is out */
    bool is_woken;     /* the owner asked for on_room */
    bool is_chunked;   /* of the answer */
    bool is_head_only;
    bool keeps_alive;
    http_owner owner;
    char *head_buffer; /* only while there is a request */
    http_parser parser;
    char *body;
    size_t body_bytes, body_capacity;
    uint64_t body_progress; /* bytes since the last look */
    uint64_t discarded_bytes;
    char request_id[HTTP_REQUEST_ID_MAX + 1];
};

struct http_server {
    http_server_options options;
    bt_loop *loop;
    http_handler handler;
    http_exchange *connections;
    uint32_t connection_count;
    char date[40]; /* of the Date field, for date_second */
    int64_t date_second;
};

void http_set_state(http_exchange *exchange, http_state state);
/* Takes requests from the input for as long as nothing is being answered. */
void http_receive(http_exchange *exchange);
/* An answer of the server itself; the connection closes after it. */
void http_refuse(http_exchange *exchange, int status, const char *text);
void http_body_drop(http_exchange *exchange);
/* The client is gone: tells the owner and frees the connection. */
void http_gone(http_exchange *exchange);
void http_free(http_exchange *exchange);

#endif
