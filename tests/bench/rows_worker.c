/* The cluster behind the router that is measured: one prefill and one decode worker that speak the
 * protocol and compute nothing. Frames are made once and written past the link, as cheaply as can
 * be, so that the router is what is waited for. */
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/loop.h"
#include "base/mem.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/link.h"
#include "tests/bench/rows_bench.h"

enum { PAGES = 1 << 20, CONTEXT = 1 << 24, LANES = 4 };

typedef struct bench_workers bench_workers;

typedef struct lane {
    bench_workers *workers;
    proto_link *link;
    proto_role role;
    proto_lane lane;
    int fd; /* the link's */
} lane;

struct bench_workers {
    const bench_options *options;
    const bench_rows *rows;
    uint16_t port;
    bt_loop *loop;
    int go_fd;
    lane lanes[LANES];       /* role by role, control first */
    proto_attempt *attempts; /* [attempt_count] */
    uint32_t attempt_count, prompt_count;
    uint32_t steps_wanted;
    uint64_t offset;  /* of all row streams */
    uint8_t *records; /* of one step */
};

static lane *lane_of(bench_workers *w, proto_role role, proto_lane number) {
    return &w->lanes[(role == PROTO_ROLE_DECODE ? 2 : 0) + (number == PROTO_LANE_STREAMS)];
}

static void say(bench_workers *w, proto_role role, proto_lane number, proto_message *message) {
    proto_link_send(lane_of(w, role, number)->link, message);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* All of two pieces; the descriptor does not block. */
static void write_all(int fd, struct iovec parts[2]) {
    struct iovec *at = parts;
    int count = 2;
    while (count > 0) {
        ssize_t written = writev(fd, at, count);
        if (written < 0 && errno == EAGAIN) {
            struct pollfd wait = {.fd = fd, .events = POLLOUT};
            (void)poll(&wait, 1, -1);
            continue;
        }
        if (written < 0) _exit(1);
        while (count > 0 && (size_t)written >= at->iov_len) {
            written -= (ssize_t)at->iov_len;
            at++;
            count--;
        }
        if (count == 0) break;
        at->iov_base = (uint8_t *)at->iov_base + written;
        at->iov_len -= (size_t)written;
    }
}

static void send_frame(bench_workers *w, uint32_t at, size_t from, size_t bytes) {
    uint8_t head[PROTO_FRAME_PREFIX_BYTES + PROTO_FRAME_HEADER_MAX];
    uint8_t *payload = w->records + at * w->rows->record_bytes + from;
    size_t header_bytes = 0;
    bt_error error;
    proto_message message = {.kind = PROTO_CHUNK, .payload = payload, .payload_bytes = bytes};
    message.chunk.attempt = w->attempts[at];
    message.chunk.offset = w->offset + from;
    if (proto_encode(&message, head + PROTO_FRAME_PREFIX_BYTES, PROTO_FRAME_HEADER_MAX,
                     &header_bytes, &error) != BT_OK)
        bench_die(error.text, error.status);
    proto_frame_put_prefix(head, (uint32_t)header_bytes, (uint32_t)bytes);
    struct iovec parts[2] = {{head, PROTO_FRAME_PREFIX_BYTES + header_bytes}, {payload, bytes}};
    write_all(lane_of(w, PROTO_ROLE_DECODE, PROTO_LANE_STREAMS)->fd, parts);
}

static void send_step(bench_workers *w) {
    const size_t record_bytes = w->rows->record_bytes;
    for (uint32_t at = 0; at < w->attempt_count; at++) {
        for (size_t from = 0; from < record_bytes; from += PROTO_FRAME_PAYLOAD_MAX) {
            const size_t left = record_bytes - from;
            send_frame(w, at, from,
                       left < PROTO_FRAME_PAYLOAD_MAX ? left : PROTO_FRAME_PAYLOAD_MAX);
        }
    }
    w->offset += record_bytes;
}

static void pump(bench_workers *w) {
    if (w->prompt_count < w->options->batch) return;
    while (w->steps_wanted > 0) {
        w->steps_wanted--;
        send_step(w);
    }
}

static void on_go(void *context) {
    bench_workers *w = context;
    uint8_t bytes[256];
    const ssize_t count = read(w->go_fd, bytes, sizeof bytes);
    if (count <= 0) _exit(0);
    w->steps_wanted += (uint32_t)count;
    pump(w);
}

/* ---- the protocol ---------------------------------------------------------------------------- */

static void send_hello(bench_workers *w, proto_role role, proto_lane number) {
    proto_message message = {.kind = PROTO_HELLO};
    proto_hello *h = &message.hello;
    h->version_major = PROTO_VERSION_MAJOR;
    h->version_minor = PROTO_VERSION_MINOR;
    h->lane = number;
    h->role = role;
    h->incarnation = 77 + (uint64_t)role;
    (void)snprintf(h->host, sizeof h->host, "bench");
    h->pid = 1;
    h->record.page_tokens = 32;
    (void)snprintf(h->record.kv_dtype, sizeof h->record.kv_dtype, "bf16");
    (void)snprintf(h->record.kv_layout, sizeof h->record.kv_layout,
                   "layers=1 kv_heads=1 head_dim=8");
    (void)snprintf(h->record.numerics, sizeof h->record.numerics, "bench/1");
    memset(h->record.model_fingerprint, 'm', 64);
    h->record.row_format = ROW_FORMAT_VERSION;
    (void)snprintf(h->model_name, sizeof h->model_name, "bench");
    h->vocab_size = BENCH_VOCAB;
    h->context_tokens = CONTEXT;
    h->tp_count = h->pp_count = h->dp_count = 1;
    say(w, role, number, &message);
}

static void connect_lane(bench_workers *w, proto_role role, proto_lane number);

static void on_welcome(bench_workers *w, proto_role role) {
    proto_message message = {.kind = PROTO_READY};
    proto_ready *ready = &message.ready;
    connect_lane(w, role, PROTO_LANE_STREAMS);
    ready->address_bytes = 1;
    ready->pages_total = PAGES;
    ready->page_tokens = 32;
    ready->rows_total = w->options->batch;
    ready->sequences_max = role == PROTO_ROLE_DECODE ? w->options->batch : 0;
    ready->step_tokens = role == PROTO_ROLE_PREFILL ? CONTEXT : 0;
    say(w, role, PROTO_LANE_CONTROL, &message);
}

static void on_peer(bench_workers *w, proto_role role, const proto_peer *peer) {
    proto_message message = {.kind = PROTO_PAIR_READY};
    if (role != PROTO_ROLE_DECODE) return;
    message.pair = (proto_pair){.worker_id = peer->worker_id, .incarnation = peer->incarnation};
    say(w, role, PROTO_LANE_CONTROL, &message);
}

static void on_reserve(bench_workers *w, const proto_reserve *reserve) {
    proto_message message = {.kind = PROTO_RESERVATION};
    if (w->attempt_count == w->options->batch) bench_die("attempts", BT_ERR_REQUEST_FULL);
    message.reservation.attempt = reserve->attempt;
    message.reservation.slot_count = 1;
    message.reservation.slots[0] = (proto_slot){.index = w->attempt_count, .generation = 1};
    w->attempts[w->attempt_count++] = reserve->attempt;
    say(w, PROTO_ROLE_DECODE, PROTO_LANE_CONTROL, &message);
}

static void on_run(bench_workers *w, const proto_run *run) {
    proto_message message = {.kind = PROTO_PREFILL_DONE};
    message.prefill_done.attempt = run->attempt;
    say(w, PROTO_ROLE_PREFILL, PROTO_LANE_CONTROL, &message);
}

static void on_ping(bench_workers *w, proto_role role, const proto_ping *ping) {
    proto_message message = {.kind = PROTO_PONG};
    message.ping = (proto_ping){
        .sequence = ping->sequence, .pages_free = PAGES, .rows_free = w->options->batch};
    say(w, role, PROTO_LANE_CONTROL, &message);
}

static void on_message(void *context, proto_link *link, const proto_message *message) {
    lane *l = context;
    bench_workers *w = l->workers;
    (void)link;
    switch (message->kind) {
    case PROTO_WELCOME: on_welcome(w, l->role); break;
    case PROTO_REFUSE: bench_die(message->refuse.text, BT_ERR_PEER_PROTOCOL); break;
    case PROTO_PEER: on_peer(w, l->role, &message->peer); break;
    case PROTO_PING: on_ping(w, l->role, &message->ping); break;
    case PROTO_RESERVE: on_reserve(w, &message->reserve); break;
    case PROTO_RUN: on_run(w, &message->run); break;
    case PROTO_PROMPT: /* one frame holds these prompts */
        w->prompt_count++;
        pump(w);
        break;
    case PROTO_HELLO:
    case PROTO_READY:
    case PROTO_PEER_GONE:
    case PROTO_PAIR_READY:
    case PROTO_PONG:
    case PROTO_RESERVATION:
    case PROTO_PREFILL_DONE:
    case PROTO_CANCEL:
    case PROTO_ABORT:
    case PROTO_CHUNK:
    case PROTO_CREDIT:
    case PROTO_CAPACITY:
    case PROTO_PROMPT_LOGPROBS: break;
    }
}

/* The router went away, and so do we. */
static void on_closed(void *context, proto_link *link, bt_status status, const char *text) {
    (void)context;
    (void)link;
    (void)status;
    (void)text;
    _exit(0);
}

static void connect_lane(bench_workers *w, proto_role role, proto_lane number) {
    lane *l = lane_of(w, role, number);
    const struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(w->port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const proto_link_events events = {
        .on_message = on_message, .on_closed = on_closed, .context = l};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof address) != 0)
        bench_die("connecting to the router", BT_ERR_PEER_GONE);
    *l = (lane){.workers = w, .role = role, .lane = number, .fd = fd};
    const bt_status status =
        proto_link_create(bt_loop_get_base(w->loop), fd, NULL, &events, &l->link);
    if (status != BT_OK) bench_die("a worker's connection", status);
    send_hello(w, role, number);
}

/* ---- the process ----------------------------------------------------------------------------- */

static void run(bench_workers *w) {
    bt_loop_source *source;
    w->attempts = bench_alloc(w->options->batch * sizeof *w->attempts);
    w->records = bench_alloc(w->rows->step_bytes);
    for (uint32_t i = 0; i < w->options->batch; i++) {
        const token_row row = bench_row(w->rows, i);
        row_record_encode(&row, w->records + i * w->rows->record_bytes);
    }
    bt_status status = bt_loop_create(&w->loop);
    if (status == BT_OK) status = bt_loop_watch(w->loop, w->go_fd, on_go, w, &source);
    if (status != BT_OK) bench_die("the workers' loop", status);
    connect_lane(w, PROTO_ROLE_PREFILL, PROTO_LANE_CONTROL);
    connect_lane(w, PROTO_ROLE_DECODE, PROTO_LANE_CONTROL);
    if (bt_loop_run(w->loop, NULL, NULL) != BT_OK) bench_die("the workers' loop", BT_ERR_WORKER_IO);
}

pid_t bench_workers_start(uint16_t port, const bench_options *options, const bench_rows *rows,
                          int *go_fd_out) {
    int go[2];
    if (pipe(go) != 0) bench_die("pipe", BT_ERR_WORKER_IO);
    const pid_t child = fork();
    if (child < 0) bench_die("fork", BT_ERR_WORKER_IO);
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)close(go[1]);
        bench_workers workers = {.options = options, .rows = rows, .port = port, .go_fd = go[0]};
        run(&workers);
        _exit(0);
    }
    (void)close(go[0]);
    *go_fd_out = go[1];
    return child;
}
