/* Connections: their life, their timers, what happens when the peer closes. */
#include "router/http_server.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/http_internal.h"

enum {
    LINGER_MS = 2000,
    LINGER_BYTES_MAX = 1 << 20,
    PEEK_MS = 1000,                 /* how often a stuffed connection is asked whether it lives */
    BODY_PROGRESS_BYTES = 32 * 1024 /* in one body_timeout_ms */
};

/* ---- life ------------------------------------------------------------------------------------ */

void http_body_drop(http_exchange *exchange) {
    budget_give(exchange->server->options.body_budget, exchange->body_capacity);
    bt_free(exchange->body);
    exchange->body = NULL;
    exchange->body_bytes = 0;
    exchange->body_capacity = 0;
}

void http_server_body_free(budget *body_budget, char *body, size_t body_bytes) {
    if (body == NULL) return;
    budget_give(body_budget, body_bytes);
    bt_free(body);
}

void http_free(http_exchange *exchange) {
    if (exchange->is_receiving) {
        /* http_receive frees it when it returns. */
        exchange->state = HTTP_STATE_DEAD;
        return;
    }
    http_server *server = exchange->server;
    if (exchange->previous != NULL) {
        exchange->previous->next = exchange->next;
    } else {
        server->connections = exchange->next;
    }
    if (exchange->next != NULL) exchange->next->previous = exchange->previous;
    server->connection_count--;
    http_body_drop(exchange);
    event_free(exchange->timer);
    bufferevent_free(exchange->bev);
    bt_free(exchange->head_buffer);
    bt_free(exchange);
}

void http_gone(http_exchange *exchange) {
    http_owner owner = exchange->owner;
    bool is_owned = exchange->state == HTTP_STATE_ANSWERING && owner.on_gone != NULL;
    http_free(exchange);
    if (is_owned) owner.on_gone(owner.context);
}

/* ---- states and their deadlines -------------------------------------------------------------- */

static uint32_t deadline_ms(const http_exchange *exchange) {
    const http_server_options *options = &exchange->server->options;
    switch (exchange->state) {
    case HTTP_STATE_IDLE: return options->idle_timeout_ms;
    case HTTP_STATE_HEAD: return options->head_timeout_ms;
    case HTTP_STATE_BODY: return options->body_timeout_ms;
    case HTTP_STATE_LINGERING: return LINGER_MS;
    case HTTP_STATE_ANSWERING:
    case HTTP_STATE_FLUSHING: /* the write timeout of the bufferevent */
    case HTTP_STATE_DEAD: return 0;
    }
    return 0;
}

static void start_timer(http_exchange *exchange, uint32_t ms) {
    struct timeval delay = {.tv_sec = ms / 1000, .tv_usec = (suseconds_t)(ms % 1000) * 1000};
    if (event_add(exchange->timer, &delay) != 0)
        bt_log_warn("http", "a connection has no timer: out of memory");
}

static void linger(http_exchange *exchange) {
    /* Closing with unread input would send a reset that overtakes the answer. */
    shutdown(bufferevent_getfd(exchange->bev), SHUT_WR);
    exchange->state = HTTP_STATE_LINGERING;
    start_timer(exchange, LINGER_MS);
    struct evbuffer *input = bufferevent_get_input(exchange->bev);
    evbuffer_drain(input, evbuffer_get_length(input));
}

/* Everything of the last answer is written. */
static void flushed(http_exchange *exchange) {
    if (exchange->peer_closed) {
        http_free(exchange);
    } else {
        linger(exchange);
    }
}

void http_set_state(http_exchange *exchange, http_state state) {
    exchange->state = state;
    uint32_t ms = deadline_ms(exchange);
    struct evbuffer *input = bufferevent_get_input(exchange->bev);
    if (state == HTTP_STATE_ANSWERING && evbuffer_get_length(input) >= HTTP_INPUT_HIGH)
        ms = PEEK_MS;
    if (ms > 0) {
        start_timer(exchange, ms);
    } else {
        event_del(exchange->timer);
    }
    if (state == HTTP_STATE_ANSWERING) exchange->body_progress = 0;
    if (state == HTTP_STATE_FLUSHING &&
        evbuffer_get_length(bufferevent_get_output(exchange->bev)) == 0)
        flushed(exchange);
}

/* While an answer is on its way and the input is stuffed with pipelined requests nothing is read,
 * so a peer that left must be found in another way. */
static bool is_peer_alive(const http_exchange *exchange) {
    struct pollfd entry = {.fd = bufferevent_getfd(exchange->bev), .events = POLLRDHUP};
    return poll(&entry, 1, 0) <= 0 || (entry.revents & (POLLRDHUP | POLLERR | POLLHUP)) == 0;
}

static void on_timer(evutil_socket_t fd, short what, void *context) {
    (void)fd;
    (void)what;
    http_exchange *exchange = context;
    switch (exchange->state) {
    case HTTP_STATE_IDLE:
    case HTTP_STATE_LINGERING: http_free(exchange); break;
    case HTTP_STATE_HEAD:
        http_refuse(exchange, 408, "the request head did not arrive in time");
        break;
    case HTTP_STATE_BODY:
        if (exchange->body_progress >= BODY_PROGRESS_BYTES) {
            exchange->body_progress = 0;
            start_timer(exchange, deadline_ms(exchange));
        } else {
            http_refuse(exchange, 408, "the request body did not arrive in time");
        }
        break;
    case HTTP_STATE_ANSWERING:
        if (!is_peer_alive(exchange)) {
            http_gone(exchange);
        } else {
            start_timer(exchange, PEEK_MS);
        }
        break;
    case HTTP_STATE_FLUSHING:
    case HTTP_STATE_DEAD: break;
    }
}

/* ---- events of the socket -------------------------------------------------------------------- */

static void on_read(struct bufferevent *bev, void *context) {
    http_exchange *exchange = context;
    struct evbuffer *input = bufferevent_get_input(bev);
    size_t bytes = evbuffer_get_length(input);
    switch (exchange->state) {
    case HTTP_STATE_IDLE:
    case HTTP_STATE_HEAD:
    case HTTP_STATE_BODY: http_receive(exchange); break;
    case HTTP_STATE_ANSWERING:
        if (bytes >= HTTP_INPUT_HIGH) start_timer(exchange, PEEK_MS);
        break;
    case HTTP_STATE_FLUSHING:
    case HTTP_STATE_LINGERING:
        exchange->discarded_bytes += bytes;
        evbuffer_drain(input, bytes);
        if (exchange->state == HTTP_STATE_LINGERING && exchange->discarded_bytes > LINGER_BYTES_MAX)
            http_free(exchange);
        break;
    case HTTP_STATE_DEAD: break;
    }
}

static void on_write(struct bufferevent *bev, void *context) {
    http_exchange *exchange = context;
    size_t left = evbuffer_get_length(bufferevent_get_output(bev));
    switch (exchange->state) {
    case HTTP_STATE_ANSWERING:
        if (!exchange->has_begun && !exchange->is_woken) break;
        exchange->is_woken = false;
        if (exchange->owner.on_room != NULL) exchange->owner.on_room(exchange->owner.context);
        break;
    case HTTP_STATE_IDLE:
    case HTTP_STATE_HEAD:
    case HTTP_STATE_BODY: http_receive(exchange); break;
    case HTTP_STATE_FLUSHING:
        if (left == 0) flushed(exchange);
        break;
    case HTTP_STATE_LINGERING:
    case HTTP_STATE_DEAD: break;
    }
}

/* The peer closed its sending side: fine between requests, else it has left. */
static void on_end_of_input(http_exchange *exchange) {
    size_t left = evbuffer_get_length(bufferevent_get_output(exchange->bev));
    exchange->peer_closed = true;
    switch (exchange->state) {
    case HTTP_STATE_IDLE:
    case HTTP_STATE_FLUSHING:
        if (left > 0) {
            http_set_state(exchange, HTTP_STATE_FLUSHING);
        } else {
            http_free(exchange);
        }
        break;
    case HTTP_STATE_HEAD:
    case HTTP_STATE_BODY:
    case HTTP_STATE_LINGERING:
    case HTTP_STATE_DEAD: http_free(exchange); break;
    case HTTP_STATE_ANSWERING: http_gone(exchange); break;
    }
}

static void on_event(struct bufferevent *bev, short what, void *context) {
    (void)bev;
    http_exchange *exchange = context;
    if ((what & BEV_EVENT_EOF) != 0) {
        on_end_of_input(exchange);
    } else if ((what & (BEV_EVENT_ERROR | BEV_EVENT_TIMEOUT)) != 0) {
        bt_log_debug("http", "a connection is dropped: %s",
                     (what & BEV_EVENT_TIMEOUT) != 0 ? "its client reads nothing"
                                                     : strerror(errno));
        http_gone(exchange);
    }
}

/* ---- the server ------------------------------------------------------------------------------ */

static void refuse_socket(int fd) {
    static const char ANSWER[] =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        "Content-Length: 55\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        "{\"error\":{\"message\":\"too many connections\",\"code\":503}}";
    (void)send(fd, ANSWER, sizeof(ANSWER) - 1, MSG_NOSIGNAL);
    (void)shutdown(fd, SHUT_WR);
    close(fd);
}

static http_exchange *create_connection(http_server *server, int fd) {
    struct event_base *base = bt_loop_get_base(server->loop);
    http_exchange *exchange = bt_calloc(1, sizeof(*exchange));
    if (exchange == NULL) return NULL;
    exchange->server = server;
    exchange->bev = bufferevent_socket_new(base, fd, BEV_OPT_CLOSE_ON_FREE);
    exchange->timer = exchange->bev != NULL ? evtimer_new(base, on_timer, exchange) : NULL;
    if (exchange->timer == NULL) {
        if (exchange->bev != NULL) {
            bufferevent_setfd(exchange->bev, -1); /* the caller closes it */
            bufferevent_free(exchange->bev);
        }
        bt_free(exchange);
        return NULL;
    }
    return exchange;
}

void http_server_adopt(http_server *server, int fd) {
    http_exchange *exchange = NULL;
    if (server->connection_count < server->options.connections_max)
        exchange = create_connection(server, fd);
    if (exchange == NULL) {
        refuse_socket(fd);
        return;
    }
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    exchange->next = server->connections;
    if (exchange->next != NULL) exchange->next->previous = exchange;
    server->connections = exchange;
    server->connection_count++;
    uint32_t ms = server->options.write_timeout_ms;
    struct timeval write_timeout = {.tv_sec = ms / 1000,
                                    .tv_usec = (suseconds_t)(ms % 1000) * 1000};
    bufferevent_setcb(exchange->bev, on_read, on_write, on_event, exchange);
    bufferevent_set_timeouts(exchange->bev, NULL, &write_timeout);
    bufferevent_setwatermark(exchange->bev, EV_READ, 0, HTTP_INPUT_HIGH);
    bufferevent_setwatermark(exchange->bev, EV_WRITE, HTTP_OUTPUT_LOW, 0);
    /* All that is queued at once: libevent's own limit is 16 KiB. */
    (void)bufferevent_set_max_single_write(exchange->bev, HTTP_OUTPUT_HIGH);
    http_set_state(exchange, HTTP_STATE_IDLE);
    bufferevent_enable(exchange->bev, EV_READ | EV_WRITE);
}

bt_status http_server_create(const http_server_options *options, bt_loop *loop,
                             const http_handler *handler, http_server **out) {
    http_server *server = bt_calloc(1, sizeof(*server));
    if (server == NULL) return BT_ERR_WORKER_MEMORY;
    BT_ASSERT(options->body_budget != NULL && options->head_bytes_max > 0);
    server->options = *options;
    server->loop = loop;
    server->handler = *handler;
    *out = server;
    return BT_OK;
}

void http_server_destroy(http_server *server) {
    if (server == NULL) return;
    while (server->connections != NULL) {
        http_gone(server->connections);
    }
    bt_free(server);
}

uint32_t http_server_connection_count(const http_server *server) {
    return server->connection_count;
}

bool http_server_is_flushed(const http_server *server) {
    for (const http_exchange *at = server->connections; at != NULL; at = at->next) {
        if (evbuffer_get_length(bufferevent_get_output(at->bev)) > 0) return false;
    }
    return true;
}
