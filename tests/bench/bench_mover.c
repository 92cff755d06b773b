/* Throughput of the UCX mover in one process: messages of 8 MiB in parts of a given size, scattered
 * on both sides, over the transports named on the command line (default tcp and shm). One thread
 * drives both ends, so that figures compare ways of sending rather than say what two processes
 * reach. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "pd_buffers/xfer_ucx.h"

enum { MESSAGE_BYTES = 8 << 20, POOL_BYTES = 64 << 20, MESSAGES = 40, IN_FLIGHT = 4 };

typedef struct side {
    xfer *mover;
    uint8_t *pool;
    xfer_iov iov[XFER_IOV_MAX];
    uint32_t next;
    uint32_t sent, received;
    size_t part_bytes;
} side;

static void die(const char *what, bt_status status) {
    (void)fprintf(stderr, "%s: %s\n", what, bt_status_string(status));
    exit(1);
}

/* Parts of one message, taken from every second place of the pool. */
static uint32_t choose_parts(side *s) {
    const uint32_t places = (uint32_t)(POOL_BYTES / s->part_bytes);
    const uint32_t count = (uint32_t)(MESSAGE_BYTES / s->part_bytes);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t place = (s->next + 2 * i) % places;
        s->iov[i] = (xfer_iov){s->pool + place * s->part_bytes, s->part_bytes};
    }
    s->next = (s->next + 2 * count + 1) % places;
    return count;
}

static xfer_decision on_message(void *context, xfer_peer from, const void *header,
                                size_t header_bytes, size_t payload_bytes, xfer_receive *receive) {
    side *s = context;
    (void)from;
    (void)header;
    (void)header_bytes;
    if (payload_bytes == 0) return XFER_DROP;
    *receive = (xfer_receive){.iov = s->iov, .iov_count = choose_parts(s)};
    return XFER_ACCEPT;
}

static void on_received(void *context, uint64_t token, bt_status status) {
    (void)token;
    if (status != BT_OK) die("receive", status);
    ((side *)context)->received++;
}

static void on_sent(void *context, uint64_t token, bt_status status) {
    (void)token;
    if (status != BT_OK) die("send", status);
    ((side *)context)->sent++;
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    (void)context;
    (void)peer;
    die("peer", status);
}

static void on_peer_closed(void *context, xfer_peer peer) {
    (void)context;
    (void)peer;
}

static void open_side(side *s, const char *tls, uint32_t id) {
    const xfer_ucx_options options = {.tls = tls};
    bt_error error;
    if (xfer_ucx_create(&options, &s->mover, &error) != BT_OK) die(error.text, error.status);
    s->mover->self = (xfer_peer){.worker_id = id, .incarnation = id};
    s->mover->handler = (xfer_handler){.on_message = on_message,
                                       .on_received = on_received,
                                       .on_sent = on_sent,
                                       .on_peer_failed = on_peer_failed,
                                       .on_peer_closed = on_peer_closed,
                                       .context = s};
    s->pool = bt_calloc_aligned(4096, POOL_BYTES);
    if (s->pool == NULL) die("pool", BT_ERR_WORKER_MEMORY);
    memset(s->pool, (int)id, POOL_BYTES);
    const bt_status status = s->mover->ops->register_memory(s->mover, s->pool, POOL_BYTES);
    if (status != BT_OK) die("register", status);
}

static void connect_sides(side *a, const side *b) {
    const uint8_t *address = NULL;
    size_t bytes = 0;
    bt_status status = b->mover->ops->get_address(b->mover, &address, &bytes);
    if (status == BT_OK) status = a->mover->ops->connect(a->mover, b->mover->self, address, bytes);
    if (status == BT_OK)
        status = a->mover->ops->send(a->mover, b->mover->self, "hello", 5, NULL, 0, 0);
    if (status != BT_OK) die("connect", status);
}

static double run(side *a, side *b, size_t part_bytes) {
    const bt_clock clock = bt_clock_system();
    const uint64_t start = bt_clock_now_us(&clock);
    const uint32_t sent_before = a->sent;
    uint32_t begun = 0;
    b->received = 0;
    a->part_bytes = b->part_bytes = part_bytes;
    while (b->received < MESSAGES || a->sent - sent_before < MESSAGES) {
        while (begun < MESSAGES && begun - (a->sent - sent_before) < IN_FLIGHT) {
            const uint32_t count = choose_parts(a);
            const bt_status status =
                a->mover->ops->send(a->mover, b->mover->self, "chunk", 5, a->iov, count, 0);
            if (status != BT_OK) die("send", status);
            begun++;
        }
        (void)a->mover->ops->progress(a->mover);
        (void)b->mover->ops->progress(b->mover);
    }
    const double seconds = (double)(bt_clock_now_us(&clock) - start) / 1e6;
    return (double)MESSAGES * MESSAGE_BYTES / seconds / 1e6;
}

static void bench(const char *tls) {
    static const size_t parts[] = {MESSAGE_BYTES, 1 << 20,  256 << 10, 64 << 10,
                                   32 << 10,      16 << 10, 4 << 10};
    static side a;
    static side b;
    open_side(&a, tls, 1);
    open_side(&b, tls, 2);
    connect_sides(&a, &b);
    connect_sides(&b, &a);
    while (a.sent == 0 || b.sent == 0) {
        (void)a.mover->ops->progress(a.mover);
        (void)b.mover->ops->progress(b.mover);
    }
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        (void)run(&a, &b, parts[i]);
        printf("%s, parts of %zu KiB: %.0f MB/s\n", tls, parts[i] >> 10, run(&a, &b, parts[i]));
    }
    a.mover->ops->destroy(a.mover);
    b.mover->ops->destroy(b.mover);
    bt_free(a.pool);
    bt_free(b.pool);
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
}

int main(int argc, char **argv) {
    if (argc == 1) {
        bench("tcp");
        bench("shm");
    }
    for (int i = 1; i < argc; i++)
        bench(argv[i]);
    return 0;
}
