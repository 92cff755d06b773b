/* A proto_link over a socket. Reading: straight into the memory of the frame reader, with a little
 * behind it for what follows. Writing: proto/output.h, in the next turn of the loop, so that
 * what one callback sends goes out in one call. Closing is recorded at once (is_closed) and
 * reported from the event loop: directly in a callback, through close_event when the cause was
 * found inside a call. */
#include "proto/link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <event2/event.h>
#include <event2/util.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/output.h"

enum {
    OUTPUT_HIGH_BYTES = 4 * 1024 * 1024,
    OUTPUT_MAX_BYTES = 64 * 1024 * 1024,
    INPUT_TURN_BYTES = 512 * 1024, /* then other links have their turn */
    OUTPUT_TURN_BYTES = 1024 * 1024,
    /* Read behind the payload that is being received, and copied from there: for frames of some KiB
     * that costs less than a system call each. Little behind a long payload, whose like follow. */
    BEHIND_BYTES = 64 * 1024,
    BEHIND_LONG_BYTES = 256,
    LONG_BYTES = 24 * 1024,
    OWN_IDLE_BYTES = 1024 * 1024, /* kept by a pool of the link's own */
    FINISH_SECONDS = 5,
};

struct proto_link {
    int fd;
    struct event *readable;
    struct event *writable;    /* pending while the socket takes no more; else activated to flush */
    struct event *close_event; /* reports a close; also the deadline of finishing */
    bt_block_pool *own_blocks; /* NULL: the owner gave some */
    frame_reader *reader;
    proto_output output;
    proto_link_events events;
    size_t output_high_bytes, output_max_bytes;
    bool is_flushing; /* writable will call back */
    bool is_output_high;
    bool is_finishing;   /* sending the rest, input is thrown away */
    bool is_closed;      /* no more messages either way */
    bool is_reported;    /* on_closed was called */
    bool is_destroyed;   /* freed when the callback returns */
    uint32_t busy_depth; /* callbacks of this link on the stack */
    bt_status why;
    char why_text[256];
};

static void free_link(proto_link *link) {
    struct event *events[] = {link->readable, link->writable, link->close_event};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i] != NULL) event_free(events[i]);
    proto_output_fini(&link->output);
    frame_reader_destroy(link->reader);
    bt_block_pool_destroy(link->own_blocks);
    (void)evutil_closesocket(link->fd);
    bt_free(link);
}

static void leave_callback(proto_link *link) {
    BT_ASSERT(link->busy_depth > 0);
    link->busy_depth--;
    if (link->busy_depth == 0 && link->is_destroyed) free_link(link);
}

/* The first cause stays. */
static void set_closed(proto_link *link, bt_status why, const char *text) {
    if (link->is_closed) return;
    link->is_closed = true;
    link->why = link->is_finishing ? BT_OK : why;
    proto_text_copy(link->why_text, sizeof link->why_text, text);
    (void)event_del(link->readable);
    (void)event_del(link->writable);
}

static void report_closed(proto_link *link) {
    if (!link->is_closed || link->is_reported || link->is_destroyed) return;
    link->is_reported = true;
    link->events.on_closed(link->events.context, link, link->why, link->why_text);
}

static void close_later(proto_link *link, bt_status why, const char *text) {
    set_closed(link, why, text);
    if (link->busy_depth == 0) event_active(link->close_event, 0, 0);
}

static void on_close_event(evutil_socket_t fd, short what, void *context) {
    (void)fd;
    (void)what;
    proto_link *link = context;
    link->busy_depth++;
    set_closed(link, BT_ERR_PEER_TIMEOUT, "the peer did not take the last messages in time");
    report_closed(link);
    leave_callback(link);
}

static void take_frame(proto_link *link, const frame_view *frame) {
    proto_message message;
    bt_error error;
    const bt_status status = proto_decode(frame->header, frame->header_bytes, frame->payload,
                                          frame->payload_bytes, &message, &error);
    if (status != BT_OK) {
        set_closed(link, status, error.text);
        return;
    }
    message.block = frame->block;
    link->events.on_message(link->events.context, link, &message);
}

static bool is_receiving(const proto_link *link) {
    return !link->is_closed && !link->is_finishing && !link->is_destroyed;
}

/* `count` bytes were written where the reader wanted them. */
static void take_bytes(proto_link *link, size_t count) {
    frame_view frame;
    bool is_whole;
    const bt_status status = frame_reader_got(link->reader, count, &is_whole, &frame);
    if (status == BT_ERR_WORKER_MEMORY) {
        set_closed(link, status, "no memory for an incoming frame");
    } else if (status != BT_OK) {
        set_closed(link, status, "frame of an impossible size");
    } else if (is_whole) {
        take_frame(link, &frame);
    }
}

static void copy_bytes(proto_link *link, const uint8_t *bytes, size_t count) {
    while (count > 0 && is_receiving(link)) {
        uint8_t *to;
        size_t wanted;
        frame_reader_want(link->reader, &to, &wanted);
        const size_t taken = wanted < count ? wanted : count;
        memcpy(to, bytes, taken);
        bytes += taken;
        count -= taken;
        take_bytes(link, taken);
    }
}

/* What the reader wants and some more; returns what read does, and what there was room for. */
static ssize_t read_some(proto_link *link, size_t *room_out) {
    uint8_t behind[BEHIND_BYTES];
    uint8_t *to;
    size_t wanted;
    frame_reader_want(link->reader, &to, &wanted);
    const bool is_long = frame_reader_is_in_payload(link->reader) && wanted >= LONG_BYTES;
    struct iovec parts[2] = {{to, wanted}, {behind, is_long ? BEHIND_LONG_BYTES : BEHIND_BYTES}};
    *room_out = wanted + parts[1].iov_len;
    const ssize_t got = readv(link->fd, parts, 2);
    if (got <= 0) return got;
    const size_t direct = (size_t)got < wanted ? (size_t)got : wanted;
    take_bytes(link, direct);
    copy_bytes(link, behind, (size_t)got - direct);
    return got;
}

static void on_end_of_input(proto_link *link, int number) {
    if (number != 0) {
        set_closed(link, BT_ERR_PEER_GONE, strerror(number));
    } else {
        set_closed(link, BT_ERR_PEER_GONE,
                   frame_reader_is_idle(link->reader) ? "the peer closed the connection"
                                                      : "the connection ended inside a frame");
    }
}

static void read_frames(proto_link *link) {
    for (size_t turn = 0; turn < INPUT_TURN_BYTES && is_receiving(link);) {
        size_t room = 0;
        const ssize_t got = read_some(link, &room);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got <= 0) {
            on_end_of_input(link, got < 0 ? errno : 0);
            return;
        }
        turn += (size_t)got;
        if ((size_t)got < room) return; /* that was all there is */
    }
}

/* Until the peer closes too. */
static void throw_input_away(proto_link *link) {
    uint8_t bytes[BEHIND_BYTES];
    const ssize_t got = read(link->fd, bytes, sizeof bytes);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) return;
    on_end_of_input(link, got < 0 ? errno : 0);
}

static void on_readable(evutil_socket_t fd, short what, void *context) {
    proto_link *link = context;
    (void)fd;
    (void)what;
    link->busy_depth++;
    if (link->is_finishing) {
        throw_input_away(link);
    } else {
        read_frames(link);
    }
    report_closed(link);
    leave_callback(link);
}

/* All is written: the peer gets an end of file and closes in its turn. Closing before it has read
 * would reset the connection and could lose the last message. */
static void shut_output(proto_link *link) {
    (void)shutdown(link->fd, SHUT_WR);
}

static void flush(proto_link *link) {
    link->is_flushing = false;
    if (link->is_closed) return;
    const int number = proto_output_write(&link->output, link->fd, OUTPUT_TURN_BYTES);
    if (number != 0 && number != EAGAIN) {
        set_closed(link, BT_ERR_PEER_GONE, strerror(number));
        return;
    }
    const size_t queued = link->output.bytes;
    if (queued > 0) {
        link->is_flushing = event_add(link->writable, NULL) == 0;
        if (!link->is_flushing) set_closed(link, BT_ERR_WORKER_MEMORY, "no memory to wait");
    } else if (link->is_finishing) {
        shut_output(link);
    }
    if (link->is_output_high && queued <= link->output_high_bytes / 2) {
        link->is_output_high = false;
        if (link->events.on_output != NULL && !link->is_closed) {
            link->events.on_output(link->events.context, link, false);
        }
    }
}

static void on_writable(evutil_socket_t fd, short what, void *context) {
    proto_link *link = context;
    (void)fd;
    (void)what;
    link->busy_depth++;
    flush(link);
    report_closed(link);
    leave_callback(link);
}

/* In the next turn of the loop. */
static void flush_soon(proto_link *link) {
    if (link->is_flushing) return;
    link->is_flushing = true;
    event_active(link->writable, EV_WRITE, 0);
}

static bt_status open_link(proto_link *link, struct event_base *base, bt_block_pool *blocks) {
    const bt_block_pool_options own = {.idle_bytes_max = OWN_IDLE_BYTES};
    bt_status status = BT_OK;
    if (blocks == NULL) status = bt_block_pool_create(&own, &link->own_blocks);
    if (blocks == NULL) blocks = link->own_blocks;
    if (status == BT_OK) status = frame_reader_create(blocks, &link->reader);
    if (status != BT_OK) return status;
    proto_output_init(&link->output, blocks);
    link->readable = event_new(base, link->fd, EV_READ | EV_PERSIST, on_readable, link);
    link->writable = event_new(base, link->fd, EV_WRITE, on_writable, link);
    link->close_event = event_new(base, -1, 0, on_close_event, link);
    if (link->readable == NULL || link->writable == NULL || link->close_event == NULL ||
        event_add(link->readable, NULL) != 0)
        return BT_ERR_WORKER_MEMORY;
    return BT_OK;
}

bt_status proto_link_create(struct event_base *base, int fd, const proto_link_options *options,
                            const proto_link_events *events, proto_link **out) {
    const int one = 1;
    (void)evutil_make_socket_nonblocking(fd);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* Fails on AF_UNIX. */
    proto_link *link = bt_calloc(1, sizeof *link);
    if (link == NULL) {
        (void)evutil_closesocket(fd);
        return BT_ERR_WORKER_MEMORY;
    }
    link->events = *events;
    link->output_high_bytes = OUTPUT_HIGH_BYTES;
    link->output_max_bytes = OUTPUT_MAX_BYTES;
    if (options != NULL && options->output_high_bytes != 0) {
        link->output_high_bytes = options->output_high_bytes;
    }
    if (options != NULL && options->output_max_bytes != 0) {
        link->output_max_bytes = options->output_max_bytes;
    }
    link->fd = fd;
    const bt_status status = open_link(link, base, options != NULL ? options->blocks : NULL);
    if (status != BT_OK) {
        free_link(link);
        return status;
    }
    *out = link;
    return BT_OK;
}

void proto_link_destroy(proto_link *link) {
    if (link == NULL || link->is_destroyed) return;
    link->is_destroyed = true;
    link->is_closed = true;
    if (link->busy_depth == 0) free_link(link);
}

void proto_link_send(proto_link *link, proto_message *message) {
    uint8_t head[PROTO_FRAME_PREFIX_BYTES + PROTO_FRAME_HEADER_MAX];
    size_t header_bytes = 0;
    bt_error error;
    if (link->is_closed || link->is_finishing) {
        proto_message_drop_payload(message);
        return;
    }
    const bt_status status = proto_encode(message, head + PROTO_FRAME_PREFIX_BYTES,
                                          PROTO_FRAME_HEADER_MAX, &header_bytes, &error);
    if (status != BT_OK) {
        bt_log_error("link", "a message of ours cannot be sent: %s", error.text);
        proto_message_drop_payload(message);
        close_later(link, BT_ERR_WORKER_INTERNAL, error.text);
        return;
    }
    proto_frame_put_prefix(head, (uint32_t)header_bytes, (uint32_t)message->payload_bytes);
    if (!proto_output_add(&link->output, head, PROTO_FRAME_PREFIX_BYTES + header_bytes)) {
        proto_message_drop_payload(message);
        close_later(link, BT_ERR_WORKER_MEMORY, "no memory for an outgoing frame");
        return;
    }
    if (!proto_output_add_payload(&link->output, message)) {
        close_later(link, BT_ERR_WORKER_MEMORY, "no memory for an outgoing frame");
        return;
    }
    const size_t queued = link->output.bytes;
    flush_soon(link);
    if (queued > link->output_max_bytes) {
        close_later(link, BT_ERR_PEER_TIMEOUT, "the peer does not read what it is sent");
    } else if (queued > link->output_high_bytes && !link->is_output_high) {
        link->is_output_high = true;
        if (link->events.on_output != NULL) {
            link->events.on_output(link->events.context, link, true);
        }
    }
}

void proto_link_finish(proto_link *link) {
    if (link->is_closed || link->is_finishing) return;
    link->is_finishing = true;
    const struct timeval limit = {.tv_sec = FINISH_SECONDS};
    (void)event_add(link->close_event, &limit);
    if (link->output.bytes == 0) shut_output(link);
}

size_t proto_link_output_bytes(const proto_link *link) {
    return link->output.bytes;
}
