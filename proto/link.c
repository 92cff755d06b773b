/* A proto_link over a bufferevent. Reading: bytes go straight from the input buffer into the frame
 * reader. Closing is recorded at once (is_closed) and reported from the event loop: directly in a
 * bufferevent callback, through close_event when the cause was found inside a call. */
#include "proto/link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/util.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/codec.h"
#include "proto/frame.h"

enum {
    OUTPUT_HIGH_BYTES = 4 * 1024 * 1024,
    OUTPUT_MAX_BYTES = 64 * 1024 * 1024,
    INPUT_MAX_BYTES = 512 * 1024, /* one turn's worth of input, then other links have theirs */
    SINGLE_IO_BYTES = 256 * 1024,
    FINISH_SECONDS = 5,
};

struct proto_link {
    struct bufferevent *stream;
    struct event *close_event; /* reports a close; also the deadline of finishing */
    frame_reader *reader;
    proto_link_events events;
    size_t output_high_bytes, output_max_bytes;
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
    if (link->stream != NULL) bufferevent_free(link->stream);
    if (link->close_event != NULL) event_free(link->close_event);
    frame_reader_destroy(link->reader);
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
    (void)bufferevent_disable(link->stream, EV_READ | EV_WRITE);
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
    link->events.on_message(link->events.context, link, &message);
}

static bool is_receiving(const proto_link *link) {
    return !link->is_closed && !link->is_finishing && !link->is_destroyed;
}

static void read_frames(proto_link *link, struct evbuffer *input) {
    while (is_receiving(link) && evbuffer_get_length(input) > 0) {
        uint8_t *to;
        size_t wanted;
        frame_view frame;
        bool is_whole;
        frame_reader_want(link->reader, &to, &wanted);
        const int got = evbuffer_remove(input, to, wanted);
        if (got <= 0) return;
        const bt_status status = frame_reader_got(link->reader, (size_t)got, &is_whole, &frame);
        if (status != BT_OK) {
            set_closed(link, status, "frame of an impossible size");
            return;
        }
        if (is_whole) take_frame(link, &frame);
    }
}

static void on_read(struct bufferevent *stream, void *context) {
    proto_link *link = context;
    struct evbuffer *input = bufferevent_get_input(stream);
    link->busy_depth++;
    read_frames(link, input);
    if (link->is_finishing) (void)evbuffer_drain(input, evbuffer_get_length(input));
    report_closed(link);
    leave_callback(link);
}

/* All is written: the peer gets an end of file and closes in its turn. Closing before it has read
 * would reset the connection and could lose the last message. */
static void shut_output(proto_link *link) {
    (void)shutdown(bufferevent_getfd(link->stream), SHUT_WR);
}

static void on_write(struct bufferevent *stream, void *context) {
    proto_link *link = context;
    link->busy_depth++;
    const size_t queued = evbuffer_get_length(bufferevent_get_output(stream));
    if (link->is_finishing && queued == 0) shut_output(link);
    if (link->is_output_high && queued <= link->output_high_bytes / 2) {
        link->is_output_high = false;
        if (link->events.on_output != NULL && !link->is_closed) {
            link->events.on_output(link->events.context, link, false);
        }
    }
    report_closed(link);
    leave_callback(link);
}

static void on_stream_event(struct bufferevent *stream, short what, void *context) {
    proto_link *link = context;
    const int number = EVUTIL_SOCKET_ERROR();
    (void)stream;
    link->busy_depth++;
    if (what & BEV_EVENT_ERROR) {
        set_closed(link, BT_ERR_PEER_GONE, evutil_socket_error_to_string(number));
    } else if (what & BEV_EVENT_EOF) {
        set_closed(link, BT_ERR_PEER_GONE,
                   frame_reader_is_idle(link->reader) ? "the peer closed the connection"
                                                      : "the connection ended inside a frame");
    }
    report_closed(link);
    leave_callback(link);
}

static void set_stream(proto_link *link) {
    bufferevent_setcb(link->stream, on_read, on_write, on_stream_event, link);
    bufferevent_setwatermark(link->stream, EV_READ, 0, INPUT_MAX_BYTES);
    bufferevent_setwatermark(link->stream, EV_WRITE, link->output_high_bytes / 2, 0);
    (void)bufferevent_set_max_single_read(link->stream, SINGLE_IO_BYTES);
    (void)bufferevent_set_max_single_write(link->stream, SINGLE_IO_BYTES);
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
    link->stream = bufferevent_socket_new(base, fd, BEV_OPT_CLOSE_ON_FREE);
    if (link->stream == NULL) {
        (void)evutil_closesocket(fd);
        bt_free(link);
        return BT_ERR_WORKER_MEMORY;
    }
    link->close_event = event_new(base, -1, 0, on_close_event, link);
    if (link->close_event == NULL || frame_reader_create(&link->reader) != BT_OK) goto failed;
    set_stream(link);
    if (bufferevent_enable(link->stream, EV_READ | EV_WRITE) != 0) goto failed;
    *out = link;
    return BT_OK;
failed:
    free_link(link);
    return BT_ERR_WORKER_MEMORY;
}

void proto_link_destroy(proto_link *link) {
    if (link == NULL || link->is_destroyed) return;
    link->is_destroyed = true;
    link->is_closed = true;
    if (link->busy_depth == 0) free_link(link);
}

static void free_payload(const void *data, size_t bytes, void *payload) {
    (void)data;
    (void)bytes;
    bt_free(payload);
}

/* Prefix and header in one piece, the payload by reference behind it. Takes payload. */
static bool queue_frame(struct evbuffer *output, const uint8_t *head, size_t head_bytes,
                        void *payload, size_t payload_bytes) {
    if (evbuffer_add(output, head, head_bytes) != 0) {
        bt_free(payload);
        return false;
    }
    if (payload_bytes == 0) {
        bt_free(payload);
        return true;
    }
    if (evbuffer_add_reference(output, payload, payload_bytes, free_payload, payload) != 0) {
        bt_free(payload);
        return false;
    }
    return true;
}

void proto_link_send(proto_link *link, proto_message *message) {
    uint8_t head[PROTO_FRAME_PREFIX_BYTES + PROTO_FRAME_HEADER_MAX];
    size_t header_bytes = 0;
    bt_error error;
    void *payload = message->payload;
    message->payload = NULL;
    if (link->is_closed || link->is_finishing) {
        bt_free(payload);
        return;
    }
    const bt_status status = proto_encode(message, head + PROTO_FRAME_PREFIX_BYTES,
                                          PROTO_FRAME_HEADER_MAX, &header_bytes, &error);
    if (status != BT_OK) {
        bt_log_error("link", "a message of ours cannot be sent: %s", error.text);
        bt_free(payload);
        close_later(link, BT_ERR_WORKER_INTERNAL, error.text);
        return;
    }
    proto_frame_put_prefix(head, (uint32_t)header_bytes, (uint32_t)message->payload_bytes);
    struct evbuffer *output = bufferevent_get_output(link->stream);
    if (!queue_frame(output, head, PROTO_FRAME_PREFIX_BYTES + header_bytes, payload,
                     message->payload_bytes)) {
        close_later(link, BT_ERR_WORKER_MEMORY, "no memory for an outgoing frame");
        return;
    }
    const size_t queued = evbuffer_get_length(output);
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
    bufferevent_setwatermark(link->stream, EV_WRITE, 0, 0);
    if (evbuffer_get_length(bufferevent_get_output(link->stream)) == 0) shut_output(link);
}

size_t proto_link_output_bytes(const proto_link *link) {
    return evbuffer_get_length(bufferevent_get_output(link->stream));
}
