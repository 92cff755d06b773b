/* The UCX mover itself, two of them in one process: settings that are refused, addresses that are
 * not trusted, messages of every size, and what happens to strangers and to the unconnected. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "pd_buffers/xfer_ucx.h"

enum { MEMORY_BYTES = 4 << 20, LIMIT_US = 20 * 1000 * 1000 };

typedef struct side {
    xfer *mover;
    uint32_t messages, received, sent, failed, closed;
    bt_status last_sent, last_received;
    size_t header_bytes, payload_bytes;
    uint8_t header[XFER_HEADER_BYTES_MAX];
    xfer_peer from;
    bool accepts;
    xfer_iov iov[XFER_IOV_MAX];
    uint32_t iov_count;
} side;

static side a, b;
static uint8_t source[MEMORY_BYTES], target[MEMORY_BYTES];

static xfer_decision on_message(void *context, xfer_peer from, const void *header,
                                size_t header_bytes, size_t payload_bytes, xfer_receive *receive) {
    side *s = context;
    s->messages++;
    s->from = from;
    s->header_bytes = header_bytes;
    s->payload_bytes = payload_bytes;
    memcpy(s->header, header, header_bytes);
    if (!s->accepts || payload_bytes == 0) return XFER_DROP;
    *receive = (xfer_receive){.iov = s->iov, .iov_count = s->iov_count, .token = 77};
    return XFER_ACCEPT;
}

static void on_received(void *context, uint64_t token, bt_status status) {
    side *s = context;
    assert_true(token == 77);
    s->received++;
    s->last_received = status;
}

static void on_sent(void *context, uint64_t token, bt_status status) {
    side *s = context;
    assert_true(token == 55);
    s->sent++;
    s->last_sent = status;
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    (void)peer;
    assert_int_equal(bt_status_scope(status), BT_SCOPE_PEER);
    ((side *)context)->failed++;
}

static void on_peer_closed(void *context, xfer_peer peer) {
    (void)peer;
    ((side *)context)->closed++;
}

static void open_side(side *s, const xfer_ucx_options *options, uint32_t id) {
    bt_error error;
    *s = (side){.accepts = true};
    if (xfer_ucx_create(options, &s->mover, &error) != BT_OK) fail_msg("%s", error.text);
    s->mover->self = (xfer_peer){.worker_id = id, .incarnation = 1000 + id};
    s->mover->handler = (xfer_handler){.on_message = on_message,
                                       .on_received = on_received,
                                       .on_sent = on_sent,
                                       .on_peer_failed = on_peer_failed,
                                       .on_peer_closed = on_peer_closed,
                                       .context = s};
}

static bt_status connect_to(side *from, const side *to, xfer_peer as) {
    const uint8_t *address = NULL;
    size_t bytes = 0;
    assert_int_equal(to->mover->ops->get_address(to->mover, &address, &bytes), BT_OK);
    return from->mover->ops->connect(from->mover, as, address, bytes);
}

static bt_status send_to(side *from, xfer_peer to, size_t header_bytes, const xfer_iov *iov,
                         uint32_t iov_count) {
    uint8_t header[XFER_HEADER_BYTES_MAX];
    memset(header, 0x5a, sizeof header);
    return from->mover->ops->send(from->mover, to, header, header_bytes, iov, iov_count, 55);
}

/* Lets both progress until *counter is `wanted`. */
static void until(const uint32_t *counter, uint32_t wanted) {
    const bt_clock clock = bt_clock_system();
    const uint64_t limit = bt_clock_now_us(&clock) + LIMIT_US;
    while (*counter < wanted) {
        (void)a.mover->ops->progress(a.mover);
        (void)b.mover->ops->progress(b.mover);
        if (bt_clock_now_us(&clock) > limit) fail_msg("nothing came");
    }
}

static int close_sides(void **state) {
    (void)state;
    if (a.mover != NULL) a.mover->ops->destroy(a.mover);
    if (b.mover != NULL) b.mover->ops->destroy(b.mover);
    a = b = (side){0};
    return 0;
}

static void open_pair(const char *tls) {
    const xfer_ucx_options options = {.tls = tls, .sends_max = 4};
    open_side(&a, &options, 1);
    open_side(&b, &options, 2);
    assert_int_equal(connect_to(&a, &b, b.mover->self), BT_OK);
    assert_int_equal(connect_to(&b, &a, a.mover->self), BT_OK);
}

static void assert_refused(const xfer_ucx_options *options, bt_status status, const char *why) {
    xfer *mover = NULL;
    bt_error error;
    const bt_status got = xfer_ucx_create(options, &mover, &error);
    if (got != status) fail_msg("%s: not about %s", error.text, why);
    assert_null(mover);
    if (strstr(error.text, why) == NULL) fail_msg("'%s' is not about '%s'", error.text, why);
}

static void settings_that_cannot_be_are_refused(void **state) {
    (void)state;
    static char long_list[400];
    memset(long_list, 'x', sizeof long_list - 1);
    assert_refused(&(xfer_ucx_options){.net_devices = "all"}, BT_ERR_CALLER_CONFIG,
                   "every network");
    assert_refused(&(xfer_ucx_options){.net_devices = "lo,all"}, BT_ERR_CALLER_CONFIG,
                   "every network");
    assert_refused(&(xfer_ucx_options){.net_devices = ""}, BT_ERR_CALLER_CONFIG, "every network");
    assert_refused(&(xfer_ucx_options){.net_devices = long_list}, BT_ERR_CALLER_CONFIG, "too long");
    assert_refused(&(xfer_ucx_options){.tls = long_list}, BT_ERR_CALLER_CONFIG, "too long");
    assert_refused(&(xfer_ucx_options){.tls = "nonsense"}, BT_ERR_WORKER_IO, "does not start");
    /* A device whose name holds the word is not refused for it. */
    assert_refused(&(xfer_ucx_options){.net_devices = "small0"}, BT_ERR_WORKER_IO,
                   "does not start");
    assert_refused(&(xfer_ucx_options){.net_devices = "nonsense"}, BT_ERR_WORKER_IO,
                   "does not start");
    static const char *const ranges[] = {
        "nonsense",    "5",       "5-",   "-5",   "5-1",   "0-5",
        "70000-70001", "1-65536", "1-2x", "1--2", "1-2-3", "4294967297-4294967298"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(ranges); i++)
        assert_refused(&(xfer_ucx_options){.port_range = ranges[i]}, BT_ERR_CALLER_CONFIG,
                       "port range");
    assert_int_equal(setenv("UCX_NET_DEVICES", "all", 1), 0);
    assert_refused(&(xfer_ucx_options){.net_devices = "lo"}, BT_ERR_CALLER_CONFIG, "every network");
    assert_int_equal(unsetenv("UCX_NET_DEVICES"), 0);
    /* A range that was refused is not left in the environment. */
    assert_null(getenv("UCX_TCP_PORT_RANGE"));
}

static void all_devices_when_asked_for_twice(void **state) {
    (void)state;
    const xfer_ucx_options options = {.net_devices = "all", .allow_all_devices = true};
    open_side(&a, &options, 1);
}

/* 0 bytes, one, sizes that UCX would send eagerly, large ones; in one part and in many. */
static void payloads_of_every_size_arrive(const char *tls) {
    static const size_t sizes[] = {0, 1, 7, 64, 1000, 9000, 70000, 1 << 20, MEMORY_BYTES};
    static xfer_iov parts[XFER_IOV_MAX];
    open_pair(tls);
    for (size_t i = 0; i < MEMORY_BYTES; i++)
        source[i] = (uint8_t)(i * 7 + (i >> 12));
    uint32_t round = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (uint32_t count = 1; count <= 301; count += 100) {
            const size_t bytes = sizes[s];
            const uint32_t used = bytes == 0 ? 0 : bytes < count ? 1 : count;
            memset(target, 0xee, sizeof target);
            size_t at = 0;
            for (uint32_t i = 0; i < used; i++) {
                const size_t part = i + 1 == used ? bytes - at : bytes / used;
                parts[i] = (xfer_iov){source + at, part};
                at += part;
            }
            b.iov[0] = (xfer_iov){target, bytes / 3};
            b.iov[1] = (xfer_iov){target + bytes / 3, bytes - bytes / 3};
            b.iov_count = 2;
            round++;
            assert_int_equal(send_to(&a, b.mover->self, XFER_HEADER_BYTES_MAX, parts, used), BT_OK);
            until(&b.messages, round);
            until(&a.sent, round);
            assert_int_equal(a.last_sent, BT_OK);
            assert_int_equal(b.header_bytes, XFER_HEADER_BYTES_MAX);
            assert_int_equal(b.payload_bytes, bytes);
            assert_int_equal(b.header[17], 0x5a);
            assert_int_equal(b.from.worker_id, 1);
            if (bytes == 0) {
                b.received++;
                continue;
            }
            until(&b.received, round);
            assert_int_equal(b.last_received, BT_OK);
            assert_memory_equal(target, source, bytes);
            if (bytes < MEMORY_BYTES) assert_int_equal(target[bytes], 0xee);
        }
    }
}

static void payloads_over_tcp(void **state) {
    (void)state;
    payloads_of_every_size_arrive("tcp");
}

static void payloads_over_shared_memory(void **state) {
    (void)state;
    payloads_of_every_size_arrive("shm");
}

static void dropped_payloads_still_end_the_send(void **state) {
    (void)state;
    const xfer_iov iov = {source, MEMORY_BYTES};
    open_pair("tcp");
    b.accepts = false;
    assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_OK);
    until(&a.sent, 1);
    assert_int_equal(a.last_sent, BT_OK);
    assert_int_equal(b.messages, 1);
    assert_int_equal(b.received, 0);
}

/* Rendezvous for the smallest payload too: nothing is delivered before its receive was posted, so a
 * send is not over while the receiver makes no progress. */
static void small_payloads_wait_for_their_receive(void **state) {
    (void)state;
    static const char *const transports[] = {"tcp", "shm"};
    for (size_t i = 0; i < sizeof transports / sizeof transports[0]; i++) {
        const xfer_iov iov = {source, 128};
        open_pair(transports[i]);
        b.iov[0] = (xfer_iov){target, 128};
        b.iov_count = 1;
        assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_OK);
        until(&b.received, 1); /* the connection stands */
        until(&a.sent, 1);
        assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_OK);
        for (int turn = 0; turn < 10000; turn++)
            (void)a.mover->ops->progress(a.mover);
        assert_int_equal(a.sent, 1);
        until(&b.received, 2);
        until(&a.sent, 2);
        (void)close_sides(NULL);
    }
}

static void sends_are_bounded(void **state) {
    (void)state;
    const xfer_iov iov = {source, MEMORY_BYTES};
    open_pair("tcp");
    b.iov[0] = (xfer_iov){target, MEMORY_BYTES};
    b.iov_count = 1;
    for (int i = 0; i < 4; i++)
        assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_OK);
    assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_ERR_REQUEST_FULL);
    until(&a.sent, 4);
    assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_OK);
    until(&a.sent, 5);
}

static void addresses_are_not_trusted(void **state) {
    (void)state;
    const uint8_t *address = NULL;
    size_t bytes = 0;
    uint8_t bad[4096];
    const xfer_peer peer = {.worker_id = 9, .incarnation = 9};
    open_pair("tcp");
    assert_int_equal(b.mover->ops->get_address(b.mover, &address, &bytes), BT_OK);
    assert_true(bytes <= sizeof bad);
    for (size_t i = 0; i < bytes; i++) {
        memcpy(bad, address, bytes);
        bad[i] ^= 0x10;
        assert_int_equal(a.mover->ops->connect(a.mover, peer, bad, bytes), BT_ERR_PEER_PROTOCOL);
        assert_int_equal(a.mover->ops->connect(a.mover, peer, address, i), BT_ERR_PEER_PROTOCOL);
    }
    assert_int_equal(a.mover->ops->connect(a.mover, b.mover->self, address, bytes),
                     BT_ERR_REQUEST_DUPLICATE);
}

/* Not connected on this side; or meant for another process at this address: dropped, the send ends.
 */
static void strangers_are_dropped(void **state) {
    (void)state;
    const xfer_ucx_options options = {0};
    open_side(&a, &options, 1);
    open_side(&b, &options, 2);
    assert_int_equal(connect_to(&a, &b, b.mover->self), BT_OK);
    assert_int_equal(send_to(&a, b.mover->self, 10, NULL, 0), BT_OK);
    until(&a.sent, 1);
    assert_int_equal(connect_to(&b, &a, a.mover->self), BT_OK);
    const xfer_peer earlier = {.worker_id = 2, .incarnation = 1};
    assert_int_equal(connect_to(&a, &b, earlier), BT_OK);
    assert_int_equal(send_to(&a, earlier, 10, NULL, 0), BT_OK);
    until(&a.sent, 2);
    assert_int_equal(send_to(&a, b.mover->self, 20, NULL, 0), BT_OK);
    until(&b.messages, 1);
    assert_int_equal(b.header_bytes, 20);
}

static void closing_ends_everything(const char *tls) {
    const xfer_iov iov = {source, MEMORY_BYTES};
    const xfer_peer nobody = {.worker_id = 9, .incarnation = 9};
    open_pair(tls);
    b.iov[0] = (xfer_iov){target, MEMORY_BYTES};
    b.iov_count = 1;
    /* A hello each way, so that both notice; then a transfer that is begun and given up. */
    assert_int_equal(send_to(&b, a.mover->self, 10, NULL, 0), BT_OK);
    until(&a.messages, 1);
    assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_OK);
    until(&b.messages, 1);
    b.mover->ops->disconnect(b.mover, a.mover->self);
    until(&b.closed, 1);
    assert_int_equal(b.received, 1);
    if (strcmp(tls, "tcp") == 0) { /* memory has no connection that could break */
        until(&a.failed, 1);
        assert_int_equal(send_to(&a, b.mover->self, 10, NULL, 0), BT_ERR_PEER_GONE);
    }
    a.mover->ops->disconnect(a.mover, b.mover->self);
    until(&a.closed, 1);
    assert_int_equal(a.sent, 1);
    assert_int_equal(send_to(&a, b.mover->self, 10, NULL, 0), BT_ERR_PEER_GONE);
    assert_int_equal(send_to(&a, nobody, 10, NULL, 0), BT_ERR_PEER_GONE);
    a.mover->ops->disconnect(a.mover, nobody);
    until(&a.closed, 2);
    /* The same two connect anew. */
    assert_int_equal(connect_to(&a, &b, b.mover->self), BT_OK);
    assert_int_equal(connect_to(&b, &a, a.mover->self), BT_OK);
    assert_int_equal(send_to(&a, b.mover->self, 10, &iov, 1), BT_OK);
    until(&b.received, 2);
    assert_int_equal(b.last_received, BT_OK);
    assert_memory_equal(source, target, MEMORY_BYTES);
}

static void closing_over_tcp(void **state) {
    (void)state;
    closing_ends_everything("tcp");
}

static void closing_over_shared_memory(void **state) {
    (void)state;
    closing_ends_everything("shm");
}

static void memory_is_registered(void **state) {
    (void)state;
    open_pair("tcp");
    /* Again and again, as when row slots are sized anew; what is left goes with the mover. */
    assert_int_equal(a.mover->ops->register_memory(a.mover, target, sizeof target), BT_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(a.mover->ops->register_memory(a.mover, source, sizeof source), BT_OK);
        a.mover->ops->unregister_memory(a.mover, source);
    }
    assert_int_equal(a.mover->ops->register_memory(a.mover, source, sizeof source), BT_OK);
    assert_true(a.mover->ops->get_event_fd(a.mover) >= 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings_that_cannot_be_are_refused),
        cmocka_unit_test_teardown(all_devices_when_asked_for_twice, close_sides),
        cmocka_unit_test_teardown(payloads_over_tcp, close_sides),
        cmocka_unit_test_teardown(payloads_over_shared_memory, close_sides),
        cmocka_unit_test_teardown(dropped_payloads_still_end_the_send, close_sides),
        cmocka_unit_test_teardown(small_payloads_wait_for_their_receive, close_sides),
        cmocka_unit_test_teardown(sends_are_bounded, close_sides),
        cmocka_unit_test_teardown(addresses_are_not_trusted, close_sides),
        cmocka_unit_test_teardown(strangers_are_dropped, close_sides),
        cmocka_unit_test_teardown(closing_over_tcp, close_sides),
        cmocka_unit_test_teardown(closing_over_shared_memory, close_sides),
        cmocka_unit_test_teardown(memory_is_registered, close_sides),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
