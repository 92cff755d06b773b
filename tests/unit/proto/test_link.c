/* Links over real sockets: messages both ways, payloads by reference, bounded output, closing in
 * every way, and the listener and dial that make the connections. */
#include "proto/link.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>
#include <event2/event.h>

#include "base/fault.h"
#include "base/mem.h"
#include "proto/dial.h"
#include "proto/frame.h"
#include "proto/listener.h"
#include "samples.h"

enum { RING_PAYLOAD = PROTO_FRAME_PAYLOAD_MAX };

typedef struct end {
    proto_link *link;
    uint32_t messages;
    proto_kind last_kind;
    uint64_t payload_bytes;
    uint32_t payload_errors;
    uint32_t closed;
    bt_status why;
    char text[256];
    uint32_t highs, lows;
    bt_block *kept; /* of the last payload, when keeps */
    bool keeps;
    bool destroy_on_message, finish_on_message, destroy_on_closed, answer;
} end;

static struct event_base *base;
static end left, right;

static void on_message(void *context, proto_link *link, const proto_message *message) {
    end *e = context;
    assert_ptr_equal(e->link, link);
    e->messages++;
    e->last_kind = message->kind;
    e->payload_bytes += message->payload_bytes;
    for (size_t i = 0; i < message->payload_bytes; i++) {
        if (((uint8_t *)message->payload)[i] != (uint8_t)(i * 31)) e->payload_errors++;
    }
    if (message->payload_bytes > 0) assert_non_null(message->block);
    if (e->keeps && message->block != NULL) {
        assert_ptr_equal(message->payload, message->block->bytes);
        bt_block_hold(message->block);
        message->block->next = e->kept;
        message->block->used = message->payload_bytes;
        e->kept = message->block;
    }
    if (e->answer) {
        proto_message pong;
        sample_message(PROTO_PONG, NULL, 0, &pong);
        proto_link_send(link, &pong);
    }
    if (e->finish_on_message) proto_link_finish(link);
    if (e->destroy_on_message) {
        proto_link_destroy(link);
        e->link = NULL;
    }
}

static void on_closed(void *context, proto_link *link, bt_status why, const char *text) {
    end *e = context;
    assert_ptr_equal(e->link, link);
    e->closed++;
    e->why = why;
    (void)snprintf(e->text, sizeof e->text, "%s", text);
    if (e->destroy_on_closed) {
        proto_link_destroy(link);
        e->link = NULL;
    }
}

static void on_output(void *context, proto_link *link, bool is_high) {
    end *e = context;
    (void)link;
    if (is_high) {
        e->highs++;
    } else {
        e->lows++;
    }
}

static void open_end(end *e, int fd, const proto_link_options *options) {
    const proto_link_events events = {
        .on_message = on_message, .on_closed = on_closed, .on_output = on_output, .context = e};
    memset(e, 0, sizeof *e);
    assert_int_equal(proto_link_create(base, fd, options, &events, &e->link), BT_OK);
}

static int set_up(void **state) {
    (void)state;
    (void)signal(SIGPIPE, SIG_IGN);
    base = event_base_new();
    memset(&left, 0, sizeof left);
    memset(&right, 0, sizeof right);
    return base == NULL;
}

static int tear_down(void **state) {
    (void)state;
    proto_link_destroy(left.link);
    proto_link_destroy(right.link);
    event_base_free(base);
    return 0;
}

static void make_pair(int fds[2]) {
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
}

/* Turns the loop until *what reaches `wanted`; a hang is CTest's to end. */
static void run_until(const uint32_t *what, uint32_t wanted) {
    while (*what < wanted)
        assert_true(event_base_loop(base, EVLOOP_ONCE) == 0);
}

static void send_kind(end *e, proto_kind kind, size_t payload_bytes) {
    proto_message message;
    uint8_t *payload = NULL;
    if (payload_bytes > 0) {
        payload = bt_malloc(payload_bytes);
        assert_non_null(payload);
        for (size_t i = 0; i < payload_bytes; i++)
            payload[i] = (uint8_t)(i * 31);
    }
    sample_message(kind, payload, payload_bytes, &message);
    proto_link_send(e->link, &message);
}

static void every_kind_arrives_in_order(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    open_end(&right, fds[1], NULL);
    right.answer = true;
    uint64_t payload = 0;
    for (int kind = 1; kind <= SAMPLE_KINDS; kind++) {
        const bool may_carry = kind == PROTO_RUN || kind == PROTO_CHUNK || kind == PROTO_PROMPT ||
                               kind == PROTO_PROMPT_LOGPROBS;
        send_kind(&left, (proto_kind)kind, may_carry ? 1000 : 0);
        payload += may_carry ? 1000 : 0;
        run_until(&right.messages, (uint32_t)kind);
        assert_int_equal(right.last_kind, kind);
    }
    run_until(&left.messages, SAMPLE_KINDS);
    assert_int_equal(right.payload_bytes, payload);
    assert_int_equal(right.payload_errors, 0);
    assert_int_equal(left.last_kind, PROTO_PONG);
    assert_int_equal(left.closed + right.closed, 0);
}

static void big_payloads_pass_the_socket_buffer(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    const proto_link_options options = {.output_high_bytes = 1024 * 1024};
    open_end(&left, fds[0], &options);
    open_end(&right, fds[1], NULL);
    for (int i = 0; i < 32; i++)
        send_kind(&left, PROTO_CHUNK, RING_PAYLOAD);
    assert_int_equal(left.highs, 1);
    assert_true(proto_link_output_bytes(left.link) > 32u * RING_PAYLOAD);
    run_until(&right.messages, 32);
    run_until(&left.lows, 1);
    assert_int_equal(left.highs, 1);
    assert_int_equal(right.payload_bytes, 32u * RING_PAYLOAD);
    assert_int_equal(right.payload_errors, 0);
}

/* Payloads of all sizes in the sender's blocks, mixed with small messages; the receiver keeps them,
 * and both go their own ways. */
static void payloads_in_blocks_are_kept(void **state) {
    (void)state;
    enum { MESSAGES = 200 };
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    bt_block_pool *sender = NULL, *receiver = NULL;
    uint64_t bytes_sent = 0, bytes_kept = 0;
    int fds[2];
    make_pair(fds);
    assert_int_equal(bt_block_pool_create(&options, &sender), BT_OK);
    assert_int_equal(bt_block_pool_create(&options, &receiver), BT_OK);
    open_end(&left, fds[0], NULL);
    open_end(&right, fds[1], &(proto_link_options){.blocks = receiver});
    right.keeps = true;
    for (uint32_t i = 0; i < MESSAGES; i++) {
        proto_message message;
        const size_t bytes = 1 + (size_t)i * i * 7919 % PROTO_FRAME_PAYLOAD_MAX;
        bt_block *block = bt_block_acquire(sender, bytes + 16);
        assert_non_null(block);
        for (size_t k = 0; k < bytes; k++)
            block->bytes[i % 16 + k] = (uint8_t)(k * 31);
        sample_message(PROTO_CHUNK, block->bytes + i % 16, bytes, &message);
        message.block = block;
        proto_link_send(left.link, &message);
        assert_null(message.block);
        if (i % 3 == 0) send_kind(&left, PROTO_PING, 0);
        bytes_sent += bytes;
    }
    run_until(&right.messages, MESSAGES + (MESSAGES + 2) / 3);
    assert_int_equal(right.payload_errors, 0);
    assert_int_equal(bt_block_pool_used_bytes(sender), 0);
    bt_block_pool_destroy(sender);
    proto_link_destroy(right.link);
    right.link = NULL;
    while (right.kept != NULL) {
        bt_block *block = right.kept;
        right.kept = block->next;
        for (size_t k = 0; k < block->used; k++)
            assert_int_equal(block->bytes[k], (uint8_t)(k * 31));
        bytes_kept += block->used;
        bt_block_release(block);
    }
    assert_int_equal(bytes_kept, bytes_sent);
    assert_int_equal(bt_block_pool_used_bytes(receiver), 0);
    bt_block_pool_destroy(receiver);
}

/* What was not written goes with the link. */
static void destroying_gives_payloads_up(void **state) {
    (void)state;
    const bt_block_pool_options options = {.idle_bytes_max = 0};
    bt_block_pool *pool = NULL;
    int fds[2];
    make_pair(fds);
    assert_int_equal(bt_block_pool_create(&options, &pool), BT_OK);
    open_end(&left, fds[0], NULL);
    for (uint32_t i = 0; i < 20; i++) {
        proto_message message;
        bt_block *block = bt_block_acquire(pool, RING_PAYLOAD);
        assert_non_null(block);
        memset(block->bytes, 0, RING_PAYLOAD);
        sample_message(PROTO_CHUNK, block->bytes, RING_PAYLOAD, &message);
        message.block = block;
        proto_link_send(left.link, &message);
        if (i == 10) (void)event_base_loop(base, EVLOOP_NONBLOCK); /* some of it is written */
    }
    assert_true(bt_block_pool_used_bytes(pool) > 0);
    proto_link_destroy(left.link);
    left.link = NULL;
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    bt_block_pool_destroy(pool);
    (void)close(fds[1]);
}

static void a_peer_that_does_not_read_is_closed(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    const proto_link_options options = {.output_high_bytes = 64 * 1024,
                                        .output_max_bytes = 1024 * 1024};
    open_end(&left, fds[0], &options);
    for (int i = 0; i < 8; i++)
        send_kind(&left, PROTO_CHUNK, RING_PAYLOAD);
    assert_int_equal(left.closed, 0); /* never from inside send */
    run_until(&left.closed, 1);
    assert_int_equal(left.why, BT_ERR_PEER_TIMEOUT);
    send_kind(&left, PROTO_CHUNK, RING_PAYLOAD); /* takes the payload all the same */
    (void)close(fds[1]);
}

/* Queued output of one end: `count` frames that nobody reads. */
static size_t queue_frames(uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        send_kind(&left, PROTO_CHUNK, RING_PAYLOAD);
    return proto_link_output_bytes(left.link);
}

/* The bound is the last byte that is fine. */
static void output_up_to_the_bound_is_fine(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    const size_t four = queue_frames(4);
    proto_link_destroy(left.link);
    (void)close(fds[1]);
    for (size_t less = 0; less <= 1; less++) {
        const proto_link_options options = {.output_max_bytes = four - less};
        make_pair(fds);
        open_end(&left, fds[0], &options);
        assert_int_equal(queue_frames(4), four);
        (void)event_base_loop(base, EVLOOP_NONBLOCK);
        assert_int_equal(left.closed, less);
        proto_link_destroy(left.link);
        left.link = NULL;
        (void)close(fds[1]);
    }
}

/* High once it is above the mark, low not before half of it is gone. */
static void output_is_low_at_half_the_mark(void **state) {
    (void)state;
    static uint8_t sink[64 * 1024];
    int fds[2];
    make_pair(fds);
    const proto_link_options options = {.output_high_bytes = 8 * RING_PAYLOAD};
    open_end(&left, fds[0], &options);
    (void)queue_frames(7);
    assert_int_equal(left.highs, 0);
    (void)queue_frames(2);
    assert_int_equal(left.highs, 1);
    while (left.lows == 0) {
        (void)event_base_loop(base, EVLOOP_NONBLOCK);
        const bool is_low = proto_link_output_bytes(left.link) <= 4 * RING_PAYLOAD;
        assert_int_equal(left.lows, is_low);
        (void)read(fds[1], sink, sizeof sink);
    }
    assert_int_equal(left.highs, 1);
    (void)close(fds[1]);
}

static void the_end_of_a_peer_is_seen(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    open_end(&right, fds[1], NULL);
    left.destroy_on_closed = true;
    proto_link_destroy(right.link);
    right.link = NULL;
    run_until(&left.closed, 1);
    assert_int_equal(left.why, BT_ERR_PEER_GONE);
    assert_string_equal(left.text, "the peer closed the connection");
    assert_int_equal(right.closed, 0);
}

static void an_end_inside_a_frame_is_named(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    assert_int_equal(write(fds[1], "\x05\0\0", 3), 3);
    (void)close(fds[1]);
    run_until(&left.closed, 1);
    assert_int_equal(left.why, BT_ERR_PEER_GONE);
    assert_string_equal(left.text, "the connection ended inside a frame");
}

static void bad_bytes_close_the_link(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t count;
    } cases[] = {
        {"\0\0\0\0\0\0\0\0", 8},            /* no header */
        {"\xff\xff\xff\xff\0\0\0\0", 8},    /* a header of 4 GiB */
        {"\x01\0\0\0\0\0\0\x7f", 8},        /* a payload of 2 GiB */
        {"\x02\0\0\0\0\0\0\0\xff\xff", 10}, /* not protobuf */
        {"\x02\0\0\0\0\0\0\0\x42\0", 10},   /* a ping without a sequence */
        {"GET / HTTP/1.1\r\n\r\n", 18},     /* a browser */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int fds[2];
        make_pair(fds);
        open_end(&left, fds[0], NULL);
        assert_int_equal(write(fds[1], cases[i].bytes, cases[i].count), cases[i].count);
        run_until(&left.closed, 1);
        assert_int_equal(left.why, BT_ERR_PEER_PROTOCOL);
        assert_int_equal(left.messages, 0);
        proto_link_destroy(left.link);
        left.link = NULL;
        (void)close(fds[1]);
    }
}

static void destroying_in_a_callback_is_safe(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    open_end(&right, fds[1], NULL);
    right.destroy_on_message = true;
    send_kind(&left, PROTO_PING, 0);
    send_kind(&left, PROTO_PING, 0);
    run_until(&left.closed, 1);
    assert_int_equal(right.messages, 1);
    assert_null(right.link);
}

static void finishing_delivers_what_is_queued(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    open_end(&right, fds[1], NULL);
    right.destroy_on_closed = true;
    send_kind(&right, PROTO_PING, 0); /* input that the finishing side never looks at */
    for (int i = 0; i < 16; i++)
        send_kind(&left, PROTO_CHUNK, RING_PAYLOAD);
    send_kind(&left, PROTO_REFUSE, 0);
    proto_link_finish(left.link);
    send_kind(&left, PROTO_PING, 0); /* too late: dropped */
    run_until(&left.closed, 1);
    assert_int_equal(left.why, BT_OK);
    assert_int_equal(left.messages, 0);
    run_until(&right.closed, 1);
    assert_int_equal(right.messages, 17);
    assert_int_equal(right.last_kind, PROTO_REFUSE);
    assert_int_equal(right.payload_errors, 0);
}

/* Also of what has been read already and not looked at. */
static void finishing_stops_input_at_once(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    open_end(&right, fds[1], NULL);
    right.finish_on_message = true;
    for (int i = 0; i < 3; i++)
        send_kind(&left, PROTO_PING, 0);
    run_until(&left.closed, 1);
    assert_int_equal(right.messages, 1);
}

static void a_message_that_cannot_be_sent_closes(void **state) {
    (void)state;
    int fds[2];
    make_pair(fds);
    open_end(&left, fds[0], NULL);
    proto_message message;
    sample_message(PROTO_CREDIT, NULL, 0, &message);
    message.credit.bytes = 0;
    proto_link_send(left.link, &message);
    run_until(&left.closed, 1);
    assert_int_equal(left.why, BT_ERR_WORKER_INTERNAL);
    (void)close(fds[1]);
}

/* ---- memory that runs out ---------------------------------------------------------------------
 */

#ifdef BT_FAULT
static void every_allocation_of_a_link_may_fail(void **state) {
    (void)state;
    const proto_link_events events = {.on_message = on_message, .on_closed = on_closed};
    bt_status status = BT_ERR_WORKER_MEMORY;
    uint64_t nth = 0;
    while (status != BT_OK) {
        int fds[2];
        make_pair(fds);
        bt_fault_set(BT_FAULT_ALLOC, ++nth);
        status = proto_link_create(base, fds[0], NULL, &events, &left.link);
        bt_fault_set(BT_FAULT_ALLOC, 0);
        if (status != BT_OK) {
            char byte;
            assert_int_equal(status, BT_ERR_WORKER_MEMORY);
            assert_int_equal(read(fds[1], &byte, 1), 0); /* the descriptor was taken all the same */
        }
        (void)close(fds[1]);
    }
    assert_true(nth > 3);
}

enum { LOST_MESSAGES = 30 };

/* Messages of all sizes from one end to the other, with the nth allocation failing: all arrive, or
 * those before it and one end says why. true: it was not reached. */
static bool transfer_with_fault(uint64_t nth) {
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    proto_message messages[LOST_MESSAGES];
    bt_block_pool *pool = NULL;
    int fds[2];
    make_pair(fds);
    assert_int_equal(bt_block_pool_create(&options, &pool), BT_OK);
    open_end(&left, fds[0], NULL);
    open_end(&right, fds[1], NULL);
    for (uint32_t i = 0; i < LOST_MESSAGES; i++) {
        const size_t count = i % 4 == 0 ? 0 : 4 * (size_t)(i * i * i);
        bt_block *block = count > 0 && i % 2 == 0 ? bt_block_acquire(pool, count) : NULL;
        uint8_t *payload = count == 0 ? NULL : block != NULL ? block->bytes : bt_malloc(count);
        for (size_t b = 0; b < count; b++)
            payload[b] = (uint8_t)(b * 31);
        sample_message(count == 0 ? PROTO_PING : PROTO_CHUNK, payload, count, &messages[i]);
        messages[i].block = block;
    }
    bt_fault_set(BT_FAULT_ALLOC, nth);
    for (uint32_t i = 0; i < LOST_MESSAGES; i++)
        proto_link_send(left.link, &messages[i]);
    while (right.messages < LOST_MESSAGES && left.closed + right.closed == 0)
        assert_true(event_base_loop(base, EVLOOP_ONCE) == 0);
    const bool is_past = bt_fault_visits(BT_FAULT_ALLOC) < nth;
    bt_fault_set(BT_FAULT_ALLOC, 0);
    assert_int_equal(right.messages == LOST_MESSAGES, is_past);
    assert_int_equal(right.payload_errors, 0);
    if (!is_past) assert_int_equal(left.closed > 0 ? left.why : right.why, BT_ERR_WORKER_MEMORY);
    proto_link_destroy(left.link);
    proto_link_destroy(right.link);
    left.link = right.link = NULL;
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    bt_block_pool_destroy(pool);
    return is_past;
}

static void every_allocation_of_a_transfer_may_fail(void **state) {
    (void)state;
    uint64_t nth = 1;
    while (!transfer_with_fault(nth))
        nth++;
    assert_true(nth > 10);
}
#endif

/* ---- listener and dial ----------------------------------------------------------------------- */

static uint32_t accepted, connected;
static int accepted_fd, connected_fd;
static proto_dial *dial;

static void on_accept(void *context, int fd, const char *peer) {
    (void)context;
    accepted++;
    accepted_fd = fd;
    assert_memory_equal(peer, "127.0.0.1:", 10);
}

static void on_connected(void *context, int fd) {
    (void)context;
    connected++;
    connected_fd = fd;
    proto_dial_stop(dial);
    dial = NULL;
}

static const proto_listener_events listener_events = {.on_accept = on_accept};
static const proto_dial_events dial_events = {.on_connected = on_connected};

static proto_listener *listen_on(uint16_t port, bt_error *error) {
    proto_listener *listener = NULL;
    const proto_address address = {.host = "127.0.0.1", .port = port};
    const bt_status status =
        proto_listener_open(base, &address, &listener_events, &listener, error);
    if (status != BT_OK) assert_null(listener);
    return listener;
}

static void workers_may_start_before_the_router(void **state) {
    (void)state;
    bt_error error;
    accepted = connected = 0;
    proto_listener *listener = listen_on(0, &error);
    assert_non_null(listener);
    const proto_address address = {.host = "127.0.0.1", .port = proto_listener_port(listener)};
    proto_listener_close(listener); /* the port is known now, and nobody listens on it */
    assert_int_equal(proto_dial_start(base, &address, "router", &dial_events, &dial), BT_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(event_base_loop(base, EVLOOP_ONCE), 0);
    assert_int_equal(connected, 0);
    listener = listen_on(address.port, &error);
    assert_non_null(listener);
    run_until(&connected, 1);
    run_until(&accepted, 1);
    open_end(&left, connected_fd, NULL);
    open_end(&right, accepted_fd, NULL);
    send_kind(&left, PROTO_HELLO, 0);
    run_until(&right.messages, 1);
    assert_int_equal(right.last_kind, PROTO_HELLO);
    proto_listener_close(listener);
}

static void a_port_in_use_is_named(void **state) {
    (void)state;
    bt_error error;
    proto_listener *listener = listen_on(0, &error);
    assert_non_null(listener);
    assert_null(listen_on(proto_listener_port(listener), &error));
    assert_int_equal(error.status, BT_ERR_CALLER_CONFIG);
    assert_non_null(strstr(error.text, "cannot listen on 127.0.0.1 port"));
    proto_listener_close(listener);
}

static void a_dial_can_be_stopped_at_any_time(void **state) {
    (void)state;
    const proto_address nowhere = {.host = "127.0.0.1", .port = 1};
    for (int turns = 0; turns < 4; turns++) {
        assert_int_equal(proto_dial_start(base, &nowhere, "router", &dial_events, &dial), BT_OK);
        for (int i = 0; i < turns; i++)
            (void)event_base_loop(base, EVLOOP_ONCE);
        proto_dial_stop(dial);
    }
    const proto_address no_such_host = {.host = "not a host name", .port = 1};
    assert_int_equal(proto_dial_start(base, &no_such_host, "router", &dial_events, &dial), BT_OK);
    (void)event_base_loop(base, EVLOOP_ONCE);
    proto_dial_stop(dial);
    assert_int_equal(connected, 1);
}

static void addresses_are_parsed(void **state) {
    (void)state;
    proto_address address;
    bt_error error;
    assert_int_equal(proto_address_parse("127.0.0.1:30001", &address, &error), BT_OK);
    assert_string_equal(address.host, "127.0.0.1");
    assert_int_equal(address.port, 30001);
    assert_int_equal(proto_address_parse("[::1]:0", &address, &error), BT_OK);
    assert_string_equal(address.host, "::1");
    static const char *const bad[] = {
        "",           "host",    ":1",        "host:", "host:x",      "host:1x",
        "host:65536", "host:-1", "::1:30001", "[]:1",  "host:123456", "host: 1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(proto_address_parse(bad[i], &address, &error), BT_ERR_CALLER_ARGUMENT);
        if (bad[i][0] != '\0') assert_non_null(strstr(error.text, bad[i]));
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_kind_arrives_in_order),         TEST(big_payloads_pass_the_socket_buffer),
        TEST(payloads_in_blocks_are_kept),         TEST(destroying_gives_payloads_up),
        TEST(a_peer_that_does_not_read_is_closed), TEST(output_up_to_the_bound_is_fine),
        TEST(output_is_low_at_half_the_mark),      TEST(the_end_of_a_peer_is_seen),
        TEST(an_end_inside_a_frame_is_named),      TEST(bad_bytes_close_the_link),
        TEST(destroying_in_a_callback_is_safe),    TEST(finishing_delivers_what_is_queued),
        TEST(finishing_stops_input_at_once),       TEST(a_message_that_cannot_be_sent_closes),
#ifdef BT_FAULT
        TEST(every_allocation_of_a_link_may_fail), TEST(every_allocation_of_a_transfer_may_fail),
#endif
        TEST(workers_may_start_before_the_router), TEST(a_port_in_use_is_named),
        TEST(a_dial_can_be_stopped_at_any_time),   cmocka_unit_test(addresses_are_parsed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
