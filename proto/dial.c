/* Non-blocking connects with a time limit each, one address after the other, and a back-off between
 * rounds. */
#include "proto/dial.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <event2/event.h>
#include <event2/util.h>

#include "base/log.h"
#include "base/mem.h"

enum { RETRY_MIN_MS = 50, RETRY_MAX_MS = 1000, CONNECT_LIMIT_SECONDS = 5 };

struct proto_dial {
    struct event_base *base;
    struct event *retry_event;
    struct event *connect_event; /* while a connect is under way */
    proto_dial_events events;
    proto_address address;
    char what[64];
    struct addrinfo *found; /* of this round */
    const struct addrinfo *next;
    int fd;
    uint32_t retry_ms;
    char said[128]; /* the failure logged last */
};

static void try_next(proto_dial *dial);

static void end_connect(proto_dial *dial) {
    if (dial->connect_event != NULL) event_free(dial->connect_event);
    dial->connect_event = NULL;
}

static void end_round(proto_dial *dial) {
    if (dial->found != NULL) freeaddrinfo(dial->found);
    dial->found = NULL;
    dial->next = NULL;
}

static void retry_later(proto_dial *dial, const char *cause) {
    const struct timeval pause = {.tv_sec = dial->retry_ms / 1000,
                                  .tv_usec = (suseconds_t)(dial->retry_ms % 1000) * 1000};
    end_round(dial);
    if (strcmp(dial->said, cause) != 0) {
        (void)snprintf(dial->said, sizeof dial->said, "%s", cause);
        bt_log_info("dial", "%s at %s port %u does not answer yet: %s; trying on", dial->what,
                    dial->address.host, dial->address.port, cause);
    }
    (void)event_add(dial->retry_event, &pause);
    dial->retry_ms = dial->retry_ms * 2 > RETRY_MAX_MS ? RETRY_MAX_MS : dial->retry_ms * 2;
}

static void on_connect(evutil_socket_t fd, short what, void *context) {
    proto_dial *dial = context;
    int number = 0;
    socklen_t bytes = sizeof number;
    end_connect(dial);
    if (what & EV_TIMEOUT) {
        number = ETIMEDOUT;
    } else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &bytes) != 0) {
        number = errno;
    }
    if (number == 0) {
        dial->fd = -1;
        end_round(dial);
        dial->events.on_connected(dial->events.context, fd);
        return;
    }
    (void)close(dial->fd);
    dial->fd = -1;
    if (dial->next == NULL) {
        retry_later(dial, strerror(number));
        return;
    }
    try_next(dial);
}

/* Starts to connect to one address; errno has the reason when it cannot. */
static bool start_connect(proto_dial *dial, const struct addrinfo *to) {
    const struct timeval limit = {.tv_sec = CONNECT_LIMIT_SECONDS};
    dial->fd = socket(to->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (dial->fd < 0) return false;
    const bool is_begun =
        connect(dial->fd, to->ai_addr, to->ai_addrlen) == 0 || errno == EINPROGRESS;
    if (is_begun) {
        dial->connect_event = event_new(dial->base, dial->fd, EV_WRITE, on_connect, dial);
        if (dial->connect_event != NULL && event_add(dial->connect_event, &limit) == 0) return true;
        errno = ENOMEM;
    }
    const int number = errno;
    end_connect(dial);
    (void)close(dial->fd);
    dial->fd = -1;
    errno = number;
    return false;
}

static void try_next(proto_dial *dial) {
    int number = EADDRNOTAVAIL;
    while (dial->next != NULL) {
        const struct addrinfo *to = dial->next;
        dial->next = to->ai_next;
        if (start_connect(dial, to)) return;
        number = errno;
    }
    retry_later(dial, strerror(number));
}

static void on_retry(evutil_socket_t fd, short what, void *context) {
    proto_dial *dial = context;
    const struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    char port[8];
    (void)fd;
    (void)what;
    (void)snprintf(port, sizeof port, "%u", dial->address.port);
    const int reason = getaddrinfo(dial->address.host, port, &hints, &dial->found);
    if (reason != 0) {
        dial->found = NULL;
        retry_later(dial, gai_strerror(reason));
        return;
    }
    dial->next = dial->found;
    try_next(dial);
}

bt_status proto_dial_start(struct event_base *base, const proto_address *address, const char *what,
                           const proto_dial_events *events, proto_dial **out) {
    proto_dial *dial = bt_calloc(1, sizeof *dial);
    if (dial == NULL) return BT_ERR_WORKER_MEMORY;
    dial->base = base;
    dial->events = *events;
    dial->address = *address;
    dial->fd = -1;
    dial->retry_ms = RETRY_MIN_MS;
    (void)snprintf(dial->what, sizeof dial->what, "%s", what);
    dial->retry_event = event_new(base, -1, 0, on_retry, dial);
    if (dial->retry_event == NULL) {
        bt_free(dial);
        return BT_ERR_WORKER_MEMORY;
    }
    event_active(dial->retry_event, 0, 0);
    *out = dial;
    return BT_OK;
}

void proto_dial_stop(proto_dial *dial) {
    if (dial == NULL) return;
    end_connect(dial);
    end_round(dial);
    if (dial->fd >= 0) (void)close(dial->fd);
    event_free(dial->retry_event);
    bt_free(dial);
}
