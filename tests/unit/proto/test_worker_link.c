/* A worker's two connections against a listener: order of opening, both end together, dialling
 * again, hanging up from inside events. */
#include "proto/worker_link.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <event2/event.h>

#include "base/log.h"
#include "base/mem.h"
#include "proto/link.h"
#include "proto/listener.h"

enum { ROUTER_LINKS = 8 };

typedef struct scene {
    struct event_base *base;
    proto_listener *listener;
    worker_link *worker;
    proto_link *links[ROUTER_LINKS]; /* as accepted; NULL once closed */
    uint32_t accepted, router_closed, router_messages;
    uint32_t opened_control, opened_streams, closed, messages, drained;
    bool hang_up_on_message;
} scene;

static void on_router_message(void *context, proto_link *link, const proto_message *message) {
    scene *s = context;
    (void)link;
    assert_int_equal(message->kind, PROTO_PING);
    s->router_messages++;
}

static void on_router_closed(void *context, proto_link *link, bt_status status, const char *text) {
    scene *s = context;
    (void)status;
    (void)text;
    for (int i = 0; i < ROUTER_LINKS; i++) {
        if (s->links[i] != link) continue;
        s->links[i] = NULL;
        proto_link_destroy(link);
    }
    s->router_closed++;
}

static void on_accept(void *context, int fd, const char *peer) {
    scene *s = context;
    (void)peer;
    const proto_link_events events = {
        .on_message = on_router_message, .on_closed = on_router_closed, .context = s};
    assert_true(s->accepted < ROUTER_LINKS);
    assert_int_equal(proto_link_create(s->base, fd, NULL, &events, &s->links[s->accepted]), BT_OK);
    s->accepted++;
}

static void say_ping(scene *s, proto_lane lane) {
    proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = 1}};
    worker_link_send(s->worker, lane, &ping);
}

static void on_open(void *context, proto_lane lane) {
    scene *s = context;
    if (lane == PROTO_LANE_CONTROL) s->opened_control++;
    if (lane == PROTO_LANE_STREAMS) s->opened_streams++;
    say_ping(s, lane);
}

static void on_message(void *context, proto_lane lane, const proto_message *message) {
    scene *s = context;
    (void)lane;
    assert_int_equal(message->kind, PROTO_PING);
    s->messages++;
    if (s->hang_up_on_message) worker_link_hang_up(s->worker);
}

static void on_closed(void *context) {
    ((scene *)context)->closed++;
}

static void on_drained(void *context) {
    ((scene *)context)->drained++;
}

static void set_up(scene *s) {
    *s = (scene){0};
    bt_log_set_level(BT_LOG_ERROR);
    (void)signal(SIGPIPE, SIG_IGN);
    s->base = event_base_new();
    assert_non_null(s->base);
    proto_address address = {.host = "127.0.0.1", .port = 0};
    bt_error error;
    const proto_listener_events listener = {.on_accept = on_accept, .context = s};
    assert_int_equal(proto_listener_open(s->base, &address, &listener, &s->listener, &error),
                     BT_OK);
    address.port = proto_listener_port(s->listener);
    const worker_link_events events = {.on_open = on_open,
                                       .on_message = on_message,
                                       .on_closed = on_closed,
                                       .on_drained = on_drained,
                                       .context = s};
    assert_int_equal(worker_link_create(s->base, &address, &events, &s->worker), BT_OK);
}

static void tear_down(scene *s) {
    worker_link_destroy(s->worker);
    for (int i = 0; i < ROUTER_LINKS; i++)
        proto_link_destroy(s->links[i]);
    proto_listener_close(s->listener);
    event_base_free(s->base);
}

/* The test's own timeout is the deadline. */
#define RUN_UNTIL(s, condition)                                                                    \
    while (!(condition))                                                                           \
    (void)event_base_loop((s)->base, EVLOOP_ONCE)

static void open_both(scene *s) {
    RUN_UNTIL(s, s->opened_control == 1 && s->router_messages == 1);
    assert_int_equal(s->accepted, 1);
    assert_false(worker_link_can_stream(s->worker));
    worker_link_open_streams(s->worker);
    worker_link_open_streams(s->worker); /* once is enough */
    RUN_UNTIL(s, s->opened_streams == 1 && s->router_messages == 2);
    assert_int_equal(s->accepted, 2);
    assert_true(worker_link_can_stream(s->worker));
}

static void control_first_then_streams(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    proto_message dropped = {.kind = PROTO_PING, .payload = bt_malloc(8), .payload_bytes = 8};
    worker_link_send(s.worker, PROTO_LANE_STREAMS, &dropped); /* not open: dropped, not leaked */
    assert_null(dropped.payload);
    open_both(&s);
    tear_down(&s);
}

static void when_one_ends_both_are_closed_and_dialled_again(void **state) {
    (void)state;
    for (uint32_t which = 0; which < 2; which++) {
        scene s;
        set_up(&s);
        open_both(&s);
        proto_link_destroy(s.links[which]);
        s.links[which] = NULL;
        RUN_UNTIL(&s, s.closed == 1 && s.router_closed == 1);
        assert_false(worker_link_can_stream(s.worker));
        RUN_UNTIL(&s, s.opened_control == 2);
        assert_int_equal(s.accepted, 3);
        assert_int_equal(s.opened_streams, 1); /* only when it is asked for */
        assert_int_equal(s.closed, 1);
        tear_down(&s);
    }
}

static void hanging_up_inside_a_message(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    open_both(&s);
    s.hang_up_on_message = true;
    proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = 1}};
    proto_link_send(s.links[0], &ping);
    RUN_UNTIL(&s, s.router_closed == 2 && s.opened_control == 2);
    assert_int_equal(s.messages, 1);
    assert_int_equal(s.closed, 0); /* the owner hung up itself */
    tear_down(&s);
}

static void a_router_that_starts_later_is_found(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    proto_address address = {.host = "127.0.0.1", .port = proto_listener_port(s.listener)};
    open_both(&s);
    proto_listener_close(s.listener);
    s.listener = NULL;
    proto_link_destroy(s.links[0]);
    s.links[0] = NULL;
    RUN_UNTIL(&s, s.closed == 1);
    const proto_listener_events listener = {.on_accept = on_accept, .context = &s};
    bt_error error;
    assert_int_equal(proto_listener_open(s.base, &address, &listener, &s.listener, &error), BT_OK);
    RUN_UNTIL(&s, s.opened_control == 2);
    tear_down(&s);
}

static void streams_that_pile_up_say_so(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    open_both(&s);
    /* More than the sockets hold, without a turn of the loop in between. */
    uint32_t frames = 0;
    while (worker_link_can_stream(s.worker) && frames < 1000) {
        proto_message ping = {.kind = PROTO_CHUNK,
                              .chunk = {.attempt = {1, 1}},
                              .payload = bt_calloc(1, PROTO_FRAME_PAYLOAD_MAX),
                              .payload_bytes = PROTO_FRAME_PAYLOAD_MAX};
        assert_non_null(ping.payload);
        worker_link_send(s.worker, PROTO_LANE_STREAMS, &ping);
        frames++;
    }
    assert_true(frames < 1000);
    assert_int_equal(s.drained, 0);
    tear_down(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(control_first_then_streams),
        cmocka_unit_test(when_one_ends_both_are_closed_and_dialled_again),
        cmocka_unit_test(hanging_up_inside_a_message),
        cmocka_unit_test(a_router_that_starts_later_is_found),
        cmocka_unit_test(streams_that_pile_up_say_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
