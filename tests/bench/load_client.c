/* Many requests at once over keep-alive connections, as fast as they are answered: what a benchmark
 * of the router needs on the other side. It finds the end of each reply (Content-Length or chunks),
 * counts bytes and chunks and throws them away; it parses nothing.
 *
 *   load_client --address HOST:PORT --bodies FILE [--connections N] [--restart N] [--path PATH]
 *               [--accept TYPE] [--warmup-ms N] [--window-ms N] [--replies N]
 *
 * FILE has a line for each body: its tokens, a tab, the JSON. Every connection sends the next line
 * as soon as its last reply is complete; behind the last line it goes on with line N of --restart
 * (from 0). With --window-ms it counts from the end of the warm-up for so long, with --replies
 * until so many are complete.
 *
 * Standard output has two JSON lines: {"event":"start"} when it begins to count, so that others can
 * begin too, and {"event":"end", ...}: replies, failed (not status 200, or cut off), bytes (of
 * heads and bodies), body_bytes (without heads and what chunks add), chunks, seconds, cpu_seconds,
 * reply_seconds (from the first to the last end of a reply, so that (replies - 1) / reply_seconds
 * is the rate), and milliseconds from a request to the first byte and the last of its reply, at 50
 * % and 99 %. The status is 1 when it could not go on. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/version.h"
#include "proto/address.h"

enum {
    HEAD_MAX = 16 * 1024,
    READ_BYTES = 256 * 1024,
    EVENTS_MAX = 256,
    SAMPLES_MAX = 1 << 20,
    ERROR_BYTES = 300,
};

typedef struct settings {
    const char *address, *bodies, *path, *accept;
    uint32_t connections, restart, warmup_ms, window_ms;
    uint64_t replies;
} settings;

/* Where in a reply a connection is. */
typedef enum reply_part {
    REPLY_HEAD,       /* up to the empty line */
    REPLY_BODY,       /* `left` bytes and it is over */
    REPLY_CHUNK_SIZE, /* a line of hexadecimal digits */
    REPLY_CHUNK,      /* `left` bytes, the line's end behind them included */
    REPLY_TRAILER,    /* lines up to an empty one */
} reply_part;

typedef struct connection {
    int fd;
    reply_part part;
    uint64_t left;
    bool is_ok, is_last_chunk;
    char head[HEAD_MAX]; /* the head, or the line that is being read */
    size_t head_bytes;
    uint64_t sent_us, first_us; /* of this request; first_us 0: no byte yet */
    char request[HEAD_MAX];     /* head of the request */
    size_t request_bytes, out;  /* out: of head and body together */
    const char *body;
    size_t body_bytes;
    uint64_t tokens;
} connection;

typedef struct counts {
    uint64_t replies, failed, bytes, body_bytes, chunks;
} counts;

typedef struct line {
    uint64_t tokens;
    char *body;
} line;

static settings set;
static proto_address address;
static connection *connections;
static char *text; /* of the bodies */
static line *lines;
static size_t line_count, next_line;
static int epoll_fd;
static counts total, at_start;
static uint64_t start_us, first_end_us, last_end_us, reply_tokens;
static double start_cpu;
static bool is_counting, is_over;
static uint32_t *first_byte_us, *whole_us; /* [SAMPLES_MAX] */
static size_t samples;

#define SETTING(field) .offset = offsetof(settings, field)
static const bt_option rows[] = {
    {"address", BT_OPTION_STRING, NULL, .flags = BT_OPTION_REQUIRED, .help = "the server",
     SETTING(address)},
    {"bodies", BT_OPTION_STRING, NULL, .flags = BT_OPTION_REQUIRED, .help = "a body a line",
     SETTING(bodies)},
    {"path", BT_OPTION_STRING, "/generate", .help = "what is asked", SETTING(path)},
    {"accept", BT_OPTION_STRING, "*/*", .help = "the Accept field", SETTING(accept)},
    {"connections", BT_OPTION_U32, "1", .min = 1, .max = 4096, .help = "requests at once",
     SETTING(connections)},
    {"restart", BT_OPTION_U32, "0", .help = "the line behind the last one", SETTING(restart)},
    {"warmup-ms", BT_OPTION_U32, "0", .help = "not counted", SETTING(warmup_ms)},
    {"window-ms", BT_OPTION_U32, "0", .help = "counted at least", SETTING(window_ms)},
    {"replies", BT_OPTION_U64, "0", .help = "counted at least", SETTING(replies)},
};
#undef SETTING

static const bt_option_table table = {.program = "load_client",
                                      .version = bt_version,
                                      .summary = "Sends requests and counts the replies' bytes.",
                                      .options = rows,
                                      .count = BT_ARRAY_COUNT(rows)};

static uint64_t now_us(void) {
    const bt_clock clock = bt_clock_system();
    return bt_clock_now_us(&clock);
}

static double cpu_seconds(void) {
    struct rusage used;
    BT_ASSERT(getrusage(RUSAGE_SELF, &used) == 0);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static void die(const char *what, const char *why) {
    fprintf(stderr, "load_client: %s: %s\n", what, why);
    exit(1);
}

/* ---- bodies ---------------------------------------------------------------------------------- */

static void read_bodies(void) {
    FILE *file = fopen(set.bodies, "re");
    if (file == NULL) die(set.bodies, strerror(errno));
    if (fseek(file, 0, SEEK_END) != 0) die(set.bodies, strerror(errno));
    const long size = ftell(file);
    rewind(file);
    text = bt_malloc((size_t)size + 1);
    if (text == NULL || fread(text, 1, (size_t)size, file) != (size_t)size)
        die(set.bodies, "cannot be read");
    text[size] = '\0';
    (void)fclose(file);
    lines = bt_calloc((size_t)size + 1, sizeof *lines);
    if (lines == NULL) die(set.bodies, "out of memory");
    for (char *at = text; *at != '\0';) {
        char *end = strchr(at, '\n');
        line *l = &lines[line_count++];
        l->tokens = strtoull(at, &l->body, 10);
        if (*l->body++ != '\t') die(set.bodies, "a line does not begin with tokens and a tab");
        if (end == NULL) break;
        *end = '\0';
        at = end + 1;
    }
    if (line_count == 0 || set.restart >= line_count) die(set.bodies, "has too few lines");
}

/* ---- requests -------------------------------------------------------------------------------- */

static void watch(const connection *c, uint32_t events, int operation) {
    struct epoll_event event = {.events = events, .data.u32 = (uint32_t)(c - connections)};
    BT_ASSERT(epoll_ctl(epoll_fd, operation, c->fd, &event) == 0);
}

static void flush_request(connection *c) {
    const size_t whole = c->request_bytes + c->body_bytes;
    while (c->out < whole) {
        const bool is_head = c->out < c->request_bytes;
        const char *from = is_head ? c->request + c->out : c->body + (c->out - c->request_bytes);
        const size_t bytes = is_head ? c->request_bytes - c->out : whole - c->out;
        const ssize_t sent = send(c->fd, from, bytes, MSG_NOSIGNAL | (is_head ? MSG_MORE : 0));
        if (sent < 0 && errno == EAGAIN) {
            watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            return;
        }
        if (sent < 0) die("send", strerror(errno));
        c->out += (size_t)sent;
    }
}

static void start_request(connection *c) {
    c->body = lines[next_line].body;
    c->tokens = lines[next_line].tokens;
    c->body_bytes = strlen(c->body);
    next_line = next_line + 1 == line_count ? set.restart : next_line + 1;
    c->request_bytes =
        (size_t)snprintf(c->request, sizeof c->request,
                         "POST %s HTTP/1.1\r\nHost: %s\r\nAccept: %s\r\n"
                         "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                         set.path, set.address, set.accept, c->body_bytes);
    if (c->request_bytes >= sizeof c->request) die("--path", "too long");
    c->out = 0;
    c->part = REPLY_HEAD;
    c->head_bytes = 0;
    c->first_us = 0;
    c->sent_us = now_us();
    flush_request(c);
}

static void open_connection(connection *c) {
    const struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(address.port)};
    struct sockaddr_in with_host = to;
    if (inet_pton(AF_INET, address.host, &with_host.sin_addr) != 1)
        die(set.address, "not an IPv4 address");
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket", strerror(errno));
    if (connect(c->fd, (const struct sockaddr *)&with_host, sizeof with_host) != 0)
        die(set.address, strerror(errno));
    const int on = 1;
    (void)setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    BT_ASSERT(fcntl(c->fd, F_SETFL, O_NONBLOCK) == 0);
    watch(c, EPOLLIN, EPOLL_CTL_ADD);
    start_request(c);
}

/* ---- replies --------------------------------------------------------------------------------- */

static void say_failure(const connection *c, const char *body, size_t bytes) {
    if (total.failed > 1) return; /* the first one says enough */
    const char *end = memchr(c->head, '\r', c->head_bytes);
    fprintf(stderr, "load_client: %.*s: %.*s\n", end == NULL ? 0 : (int)(end - c->head), c->head,
            (int)(bytes < ERROR_BYTES ? bytes : ERROR_BYTES), body);
}

static bool is_enough(uint64_t now) {
    return is_counting && now - start_us >= set.window_ms * UINT64_C(1000) &&
           total.replies - at_start.replies >= set.replies && total.bytes > at_start.bytes;
}

static void end_reply(connection *c) {
    const uint64_t now = now_us();
    total.replies++;
    if (is_counting) {
        if (first_end_us == 0) {
            first_end_us = now;
        } else {
            reply_tokens += c->tokens;
        }
        last_end_us = now;
        if (samples < SAMPLES_MAX) {
            first_byte_us[samples] = (uint32_t)(c->first_us - c->sent_us);
            whole_us[samples++] = (uint32_t)(now - c->sent_us);
        }
    }
    c->part = REPLY_HEAD;
    c->head_bytes = 0;
    is_over = is_enough(now);
    if (!is_over) start_request(c);
}

/* Takes up to the end of a line (or of the head) into c->head; true when it is whole. */
static bool take_text(connection *c, const char **at, const char *end, const char *mark) {
    const size_t mark_bytes = strlen(mark);
    while (*at < end) {
        if (c->head_bytes == HEAD_MAX) die("reply", "a line or a head without end");
        c->head[c->head_bytes++] = *(*at)++;
        if (c->head_bytes >= mark_bytes &&
            memcmp(c->head + c->head_bytes - mark_bytes, mark, mark_bytes) == 0)
            return true;
    }
    return false;
}

/* The value of a field of the head, or NULL. */
static const char *find_field(const connection *c, const char *name) {
    const size_t bytes = strlen(name);
    for (size_t at = 0; at + bytes < c->head_bytes; at++) {
        if (c->head[at] != '\n' || strncasecmp(c->head + at + 1, name, bytes) != 0) continue;
        return c->head + at + 1 + bytes;
    }
    return NULL;
}

static void read_head(connection *c, const char *at, const char *end) {
    c->head[c->head_bytes - 1] = '\0';
    c->is_ok = strncmp(c->head, "HTTP/1.1 200 ", 13) == 0;
    if (!c->is_ok) {
        total.failed++;
        say_failure(c, at, (size_t)(end - at));
    }
    const char *length = find_field(c, "content-length:");
    if (length != NULL) {
        c->left = strtoull(length, NULL, 10);
        c->part = REPLY_BODY;
    } else if (find_field(c, "transfer-encoding:") != NULL) {
        c->part = REPLY_CHUNK_SIZE;
    } else {
        die("reply", "neither Content-Length nor chunks");
    }
    c->head_bytes = 0;
}

static void read_chunk_size(connection *c) {
    c->head[c->head_bytes - 1] = '\0';
    const uint64_t bytes = strtoull(c->head, NULL, 16);
    c->head_bytes = 0;
    c->left = bytes + 2;
    c->part = bytes == 0 ? REPLY_TRAILER : REPLY_CHUNK;
    total.chunks += bytes != 0;
}

/* Of what is left of a part, how much belongs to the body. */
static uint64_t body_left(const connection *c) {
    const uint64_t end_bytes = c->part == REPLY_CHUNK ? 2 : 0;
    return c->left > end_bytes ? c->left - end_bytes : 0;
}

/* Goes over what was read, from end to end of parts. */
static void take(connection *c, const char *at, const char *end) {
    while (at < end || (c->part == REPLY_BODY && c->left == 0)) {
        uint64_t skip = 0;
        switch (c->part) {
        case REPLY_HEAD:
            if (c->first_us == 0) c->first_us = now_us();
            if (take_text(c, &at, end, "\r\n\r\n")) read_head(c, at, end);
            break;
        case REPLY_CHUNK_SIZE:
            if (take_text(c, &at, end, "\r\n")) read_chunk_size(c);
            break;
        case REPLY_TRAILER:
            if (!take_text(c, &at, end, "\r\n")) break;
            if (c->head_bytes == 2) end_reply(c);
            c->head_bytes = 0;
            break;
        case REPLY_BODY:
        case REPLY_CHUNK:
            skip = (uint64_t)(end - at) < c->left ? (uint64_t)(end - at) : c->left;
            at += skip;
            total.body_bytes += body_left(c);
            c->left -= skip;
            total.body_bytes -= body_left(c);
            if (c->left > 0) break;
            if (c->part == REPLY_BODY) {
                end_reply(c);
            } else {
                c->part = REPLY_CHUNK_SIZE;
            }
            break;
        }
    }
}

static void on_ready(connection *c, uint32_t events) {
    static char buffer[READ_BYTES];
    if ((events & EPOLLOUT) != 0) {
        watch(c, EPOLLIN, EPOLL_CTL_MOD);
        flush_request(c);
    }
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
    const ssize_t bytes = recv(c->fd, buffer, sizeof buffer, 0);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (bytes <= 0) {
        total.failed++;
        fprintf(stderr, "load_client: the server closed a connection\n");
        (void)close(c->fd);
        open_connection(c);
        return;
    }
    total.bytes += (uint64_t)bytes;
    take(c, buffer, buffer + bytes);
}

/* ---- the window ------------------------------------------------------------------------------ */

static void start_counting(uint64_t now) {
    is_counting = true;
    start_us = now;
    start_cpu = cpu_seconds();
    at_start = total;
    printf("{\"event\":\"start\"}\n");
    (void)fflush(stdout);
}

static int compare(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double percentile(uint32_t *values, size_t percent) {
    if (samples == 0) return 0.0;
    qsort(values, samples, sizeof *values, compare);
    return values[(samples - 1) * percent / 100] * 1e-3;
}

static void stop_counting(uint64_t now) {
    printf("{\"event\":\"end\",\"replies\":%" PRIu64 ",\"failed\":%" PRIu64 ",\"bytes\":%" PRIu64
           ",\"body_bytes\":%" PRIu64 ",\"chunks\":%" PRIu64 ",\"reply_tokens\":%" PRIu64
           ",\"seconds\":%.6f,\"cpu_seconds\":%.6f,\"reply_seconds\":%.6f",
           total.replies - at_start.replies, total.failed, total.bytes - at_start.bytes,
           total.body_bytes - at_start.body_bytes, total.chunks - at_start.chunks, reply_tokens,
           (double)(now - start_us) * 1e-6, cpu_seconds() - start_cpu,
           (double)(last_end_us - first_end_us) * 1e-6);
    printf(",\"first_byte_ms\":[%.3f,%.3f],\"whole_ms\":[%.3f,%.3f]}\n",
           percentile(first_byte_us, 50), percentile(first_byte_us, 99), percentile(whole_us, 50),
           percentile(whole_us, 99));
    (void)fflush(stdout);
}

/* Until the warm-up or the window is over; -1 when only more replies end it. */
static int wait_ms(uint64_t now, uint64_t begun_us) {
    const uint64_t at = is_counting ? start_us + set.window_ms * UINT64_C(1000)
                                    : begun_us + set.warmup_ms * UINT64_C(1000);
    return now < at ? (int)((at - now) / 1000 + 1) : is_counting ? -1 : 0;
}

static void run(void) {
    struct epoll_event events[EVENTS_MAX];
    const uint64_t begun_us = now_us();
    if (set.warmup_ms == 0) start_counting(begun_us);
    for (uint32_t i = 0; i < set.connections; i++)
        open_connection(&connections[i]);
    while (!is_over) {
        const int count = epoll_wait(epoll_fd, events, EVENTS_MAX, wait_ms(now_us(), begun_us));
        if (count < 0 && errno != EINTR) die("epoll_wait", strerror(errno));
        for (int i = 0; i < count && !is_over; i++)
            on_ready(&connections[events[i].data.u32], events[i].events);
        const uint64_t now = now_us();
        if (!is_counting && wait_ms(now, begun_us) == 0) start_counting(now);
        if (is_enough(now)) is_over = true;
    }
    stop_counting(now_us());
}

int main(int argc, char **argv) {
    bt_options *options = NULL;
    bt_error error = {0};
    int status = 0;
    if (!bt_options_start(&table, argc, argv, &set, &options, &status)) return status;
    if (proto_address_parse(set.address, &address, &error) != BT_OK) die("--address", error.text);
    if (set.window_ms == 0 && set.replies == 0) die("--window-ms", "this or --replies is needed");
    read_bodies();
    connections = bt_calloc(set.connections, sizeof *connections);
    first_byte_us = bt_calloc(SAMPLES_MAX, sizeof *first_byte_us);
    whole_us = bt_calloc(SAMPLES_MAX, sizeof *whole_us);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (connections == NULL || first_byte_us == NULL || whole_us == NULL || epoll_fd < 0)
        die("start", "out of memory or descriptors");
    run();
    for (uint32_t i = 0; i < set.connections; i++)
        (void)close(connections[i].fd);
    (void)close(epoll_fd);
    bt_free(connections);
    bt_free(first_byte_us);
    bt_free(whole_us);
    bt_free(lines);
    bt_free(text);
    bt_options_destroy(options);
    return 0;
}
