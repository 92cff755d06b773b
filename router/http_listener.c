#include "router/http_listener.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

enum {
    BACKLOG = 4096,        /* load generators open thousands of connections at once */
    ACCEPTS_PER_TURN = 64, /* so that running requests get their turn */
    HOST_BYTES_MAX = 256,
};

struct http_listener {
    int fd;
    int reserve_fd; /* given up for a moment to refuse a connection when descriptors are out */
    char address[HOST_BYTES_MAX + 16];
    bt_loop_source *source;
    void (*on_accept)(void *context, int fd);
    void *context;
};

/* Splits "HOST:PORT" at its last colon; brackets around the host are dropped. */
static bt_status split_address(const char *address, char host[HOST_BYTES_MAX], const char **port,
                               bt_error *error) {
    const char *colon = strrchr(address, ':');
    size_t bytes = colon != NULL ? (size_t)(colon - address) : 0;
    if (bytes >= 2 && address[0] == '[' && address[bytes - 1] == ']') {
        address++;
        bytes -= 2;
    }
    if (colon == NULL || colon[1] == 0 || bytes == 0 || bytes >= HOST_BYTES_MAX)
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "'%s' is not HOST:PORT", address);
    memcpy(host, address, bytes);
    host[bytes] = 0;
    *port = colon + 1;
    return BT_OK;
}

static bt_status listen_on(const struct addrinfo *info, const char *address, int *fd_out,
                           bt_error *error) {
    int one = 1;
    int fd = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "no socket for %s: %s", address,
                       strerror(errno));
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, info->ai_addr, info->ai_addrlen) < 0 || listen(fd, BACKLOG) < 0) {
        bool is_taken = errno == EADDRINUSE;
        bt_status status =
            is_taken
                ? bt_fail(error, BT_ERR_CALLER_CONFIG,
                          "cannot listen on %s: the port is in use by another process", address)
                : bt_fail(error, BT_ERR_CALLER_CONFIG, "cannot listen on %s: %s", address,
                          strerror(errno));
        close(fd);
        return status;
    }
    *fd_out = fd;
    return BT_OK;
}

/* What the socket is bound to, as text. */
static void name_address(http_listener *listener) {
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof(bound);
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getsockname(listener->fd, (struct sockaddr *)&bound, &bytes) != 0) return;
    if (getnameinfo((struct sockaddr *)&bound, bytes, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return;
    snprintf(listener->address, sizeof(listener->address),
             bound.ss_family == AF_INET6 ? "[%.255s]:%.8s" : "%.255s:%.8s", host, port);
}

/* Out of descriptors: the oldest waiting connection is closed, so that its client learns it. */
static void refuse_one(http_listener *listener) {
    bt_log_warn("http", "out of file descriptors, a connection is refused");
    if (listener->reserve_fd < 0) return;
    close(listener->reserve_fd);
    int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0) close(fd);
    listener->reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void on_readable(void *context) {
    http_listener *listener = context;
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            int one = 1;
            (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
            listener->on_accept(listener->context, fd);
            continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            refuse_one(listener);
            return;
        }
        if (errno != EINTR && errno != ECONNABORTED) return;
    }
}

bt_status http_listener_open(const char *address, bt_loop *loop,
                             void (*on_accept)(void *context, int fd), void *context,
                             http_listener **out, bt_error *error) {
    char host[HOST_BYTES_MAX];
    const char *port = NULL;
    struct addrinfo *found = NULL;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    bt_status status = split_address(address, host, &port, error);
    if (status != BT_OK) return status;
    int code = getaddrinfo(host, port, &hints, &found);
    if (code != 0)
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "cannot listen on %s: %s", address,
                       gai_strerror(code));
    http_listener *listener = bt_calloc(1, sizeof(*listener));
    if (listener == NULL) {
        freeaddrinfo(found);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for a listener");
    }
    listener->fd = -1;
    listener->reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    listener->on_accept = on_accept;
    listener->context = context;
    status = listen_on(found, address, &listener->fd, error);
    freeaddrinfo(found);
    if (status == BT_OK) {
        name_address(listener);
        status = bt_loop_watch(loop, listener->fd, on_readable, listener, &listener->source);
        if (status != BT_OK) (void)bt_fail(error, status, "no event for the listener");
    }
    if (status != BT_OK) {
        http_listener_close(listener);
        return status;
    }
    *out = listener;
    return BT_OK;
}

void http_listener_close(http_listener *listener) {
    if (listener == NULL) return;
    bt_loop_source_free(listener->source);
    if (listener->fd >= 0) close(listener->fd);
    if (listener->reserve_fd >= 0) close(listener->reserve_fd);
    bt_free(listener);
}

const char *http_listener_address(const http_listener *listener) {
    return listener->address;
}
