/* evconnlistener with resolved addresses and errors for humans. When descriptors run out, accepting
 * pauses for a moment: the pending connection would wake the loop again and again. */
#include "proto/listener.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include <event2/event.h>
#include <event2/listener.h>
#include <event2/util.h>

#include "base/log.h"
#include "base/mem.h"

enum { BACKLOG = 4096, /* load generators open thousands of connections at once */ PAUSE_MS = 100 };

struct proto_listener {
    struct evconnlistener *listener;
    struct event *resume_event;
    proto_listener_events events;
};

static void print_peer(const struct sockaddr *address, socklen_t bytes, char *out,
                       size_t capacity) {
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getnameinfo(address, bytes, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        (void)snprintf(out, capacity, "unknown");
        return;
    }
    (void)snprintf(out, capacity, strchr(host, ':') != NULL ? "[%s]:%s" : "%s:%s", host, port);
}

static void on_accept(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *address,
                      int bytes, void *context) {
    proto_listener *l = context;
    char peer[NI_MAXHOST + NI_MAXSERV + 4];
    (void)listener;
    print_peer(address, (socklen_t)bytes, peer, sizeof peer);
    l->events.on_accept(l->events.context, fd, peer);
}

static void on_error(struct evconnlistener *listener, void *context) {
    proto_listener *l = context;
    const struct timeval pause = {.tv_usec = PAUSE_MS * 1000};
    bt_log_warn("listen", "cannot accept: %s; pausing for %d ms", strerror(errno), PAUSE_MS);
    (void)evconnlistener_disable(listener);
    (void)event_add(l->resume_event, &pause);
}

static void on_resume(evutil_socket_t fd, short what, void *context) {
    proto_listener *l = context;
    (void)fd;
    (void)what;
    (void)evconnlistener_enable(l->listener);
}

static bt_status bind_first(proto_listener *l, struct event_base *base, struct addrinfo *found,
                            const proto_address *address, bt_error *error) {
    for (const struct addrinfo *at = found; at != NULL; at = at->ai_next) {
        l->listener = evconnlistener_new_bind(
            base, on_accept, l, LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC | LEV_OPT_REUSEABLE,
            BACKLOG, at->ai_addr, (int)at->ai_addrlen);
        if (l->listener != NULL) return BT_OK;
    }
    return bt_fail(error, BT_ERR_CALLER_CONFIG, "cannot listen on %s port %u: %s", address->host,
                   address->port, strerror(errno));
}

bt_status proto_listener_open(struct event_base *base, const proto_address *address,
                              const proto_listener_events *events, proto_listener **out,
                              bt_error *error) {
    const struct addrinfo hints = {.ai_family = AF_UNSPEC,
                                   .ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    char port[8];
    (void)snprintf(port, sizeof port, "%u", address->port);
    const int reason = getaddrinfo(address->host, port, &hints, &found);
    if (reason != 0) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "cannot listen on %s: %s", address->host,
                       gai_strerror(reason));
    }
    bt_status status;
    proto_listener *l = bt_calloc(1, sizeof *l);
    if (l == NULL) {
        status = bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for a listener");
        goto free_found;
    }
    l->events = *events;
    l->resume_event = event_new(base, -1, 0, on_resume, l);
    if (l->resume_event == NULL) {
        status = bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for a listener");
        goto close_listener;
    }
    status = bind_first(l, base, found, address, error);
    if (status != BT_OK) goto close_listener;
    evconnlistener_set_error_cb(l->listener, on_error);
    *out = l;
    freeaddrinfo(found);
    return BT_OK;
close_listener:
    proto_listener_close(l);
free_found:
    freeaddrinfo(found);
    return status;
}

void proto_listener_close(proto_listener *listener) {
    if (listener == NULL) return;
    if (listener->listener != NULL) evconnlistener_free(listener->listener);
    if (listener->resume_event != NULL) event_free(listener->resume_event);
    bt_free(listener);
}

uint16_t proto_listener_port(const proto_listener *listener) {
    struct sockaddr_storage address = {0};
    socklen_t bytes = sizeof address;
    const int fd = evconnlistener_get_fd(listener->listener);
    if (getsockname(fd, (struct sockaddr *)&address, &bytes) != 0) return 0;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    if (address.ss_family == AF_INET) {
        memcpy(&v4, &address, sizeof v4);
        return ntohs(v4.sin_port);
    }
    memcpy(&v6, &address, sizeof v6);
    return ntohs(v6.sin6_port);
}
