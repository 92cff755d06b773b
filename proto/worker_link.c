/* Two lanes, each dialling or open; see the header. */
#include "proto/worker_link.h"

#include <string.h>
#include <unistd.h>

#include <event2/event.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/dial.h"
#include "proto/link.h"

enum {
    LANES = 2,
    PAUSE_MS = 300, /* from a loss to the next dial: the router has time to notice it too */
    STREAM_HIGH_BYTES = 1024 * 1024,
};

typedef struct lane_state {
    worker_link *owner;
    proto_lane lane;
    proto_dial *dial;
    proto_link *link;
} lane_state;

struct worker_link {
    struct event_base *base;
    proto_address router;
    worker_link_events events;
    lane_state lanes[LANES];
    bool is_stream_high;
    struct event *pause;
};

static lane_state *lane_of(worker_link *w, proto_lane lane) {
    return &w->lanes[lane == PROTO_LANE_CONTROL ? 0 : 1];
}

static void close_lane(lane_state *l) {
    proto_dial_stop(l->dial);
    l->dial = NULL;
    proto_link_destroy(l->link);
    l->link = NULL;
}

void worker_link_hang_up(worker_link *w) {
    const struct timeval pause = {.tv_usec = PAUSE_MS * 1000};
    for (int i = 0; i < LANES; i++)
        close_lane(&w->lanes[i]);
    w->is_stream_high = false;
    const int result = event_add(w->pause, &pause);
    BT_ASSERT(result == 0);
}

/* ---- one connection -------------------------------------------------------------------------- */

static void on_link_message(void *context, proto_link *link, const proto_message *message) {
    lane_state *l = context;
    (void)link;
    l->owner->events.on_message(l->owner->events.context, l->lane, message);
}

static void on_link_closed(void *context, proto_link *link, bt_status status, const char *text) {
    lane_state *l = context;
    worker_link *w = l->owner;
    (void)link;
    bt_log_warn("router-link", "the %s connection ended: %s: %s",
                l->lane == PROTO_LANE_CONTROL ? "control" : "streams", bt_status_string(status),
                text);
    worker_link_hang_up(w);
    w->events.on_closed(w->events.context);
}

static void on_link_output(void *context, proto_link *link, bool is_high) {
    lane_state *l = context;
    worker_link *w = l->owner;
    (void)link;
    if (l->lane != PROTO_LANE_STREAMS) return;
    w->is_stream_high = is_high;
    if (!is_high) w->events.on_drained(w->events.context);
}

static void on_connected(void *context, int fd) {
    lane_state *l = context;
    worker_link *w = l->owner;
    proto_dial_stop(l->dial);
    l->dial = NULL;
    const proto_link_options options = {.output_high_bytes = STREAM_HIGH_BYTES};
    const proto_link_events events = {.on_message = on_link_message,
                                      .on_closed = on_link_closed,
                                      .on_output = on_link_output,
                                      .context = l};
    const bt_status status = proto_link_create(w->base, fd, &options, &events, &l->link);
    if (status != BT_OK) {
        bt_log_error("router-link", "a connection cannot be set up: %s", bt_status_string(status));
        l->link = NULL;
        worker_link_hang_up(w);
        w->events.on_closed(w->events.context);
        return;
    }
    w->events.on_open(w->events.context, l->lane);
}

static void dial_lane(lane_state *l) {
    worker_link *w = l->owner;
    const proto_dial_events events = {.on_connected = on_connected, .context = l};
    BT_ASSERT(l->dial == NULL && l->link == NULL);
    const bt_status status = proto_dial_start(w->base, &w->router, "router", &events, &l->dial);
    if (status == BT_OK) return;
    bt_log_error("router-link", "cannot dial: %s", bt_status_string(status));
    l->dial = NULL;
    worker_link_hang_up(w); /* tries again after the pause */
}

/* ---- both ------------------------------------------------------------------------------------ */

static void on_pause(evutil_socket_t fd, short what, void *context) {
    (void)fd;
    (void)what;
    dial_lane(lane_of(context, PROTO_LANE_CONTROL));
}

bt_status worker_link_create(struct event_base *base, const proto_address *router,
                             const worker_link_events *events, worker_link **out) {
    worker_link *w = bt_calloc(1, sizeof *w);
    if (w == NULL) return BT_ERR_WORKER_MEMORY;
    w->base = base;
    w->router = *router;
    w->events = *events;
    w->lanes[0] = (lane_state){.owner = w, .lane = PROTO_LANE_CONTROL};
    w->lanes[1] = (lane_state){.owner = w, .lane = PROTO_LANE_STREAMS};
    w->pause = evtimer_new(base, on_pause, w);
    if (w->pause == NULL) {
        bt_free(w);
        return BT_ERR_WORKER_MEMORY;
    }
    dial_lane(&w->lanes[0]);
    *out = w;
    return BT_OK;
}

void worker_link_destroy(worker_link *w) {
    if (w == NULL) return;
    for (int i = 0; i < LANES; i++)
        close_lane(&w->lanes[i]);
    event_free(w->pause);
    bt_free(w);
}

void worker_link_open_streams(worker_link *w) {
    lane_state *l = lane_of(w, PROTO_LANE_STREAMS);
    if (l->dial == NULL && l->link == NULL) dial_lane(l);
}

void worker_link_send(worker_link *w, proto_lane lane, proto_message *message) {
    lane_state *l = lane_of(w, lane);
    if (l->link != NULL) {
        proto_link_send(l->link, message);
        return;
    }
    proto_message_drop_payload(message);
}

bool worker_link_can_stream(const worker_link *w) {
    return w->lanes[1].link != NULL && !w->is_stream_high;
}
