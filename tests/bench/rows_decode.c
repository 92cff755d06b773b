/* Decode's side, a step at a time: rows into the queues of their sequences, queued rows to frames,
 * frames to a socket; beside them the machine's copy and the machine's socket. */
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include <event2/event.h>

#include "base/assert.h"
#include "base/loop.h"
#include "base/mem.h"
#include "pd_buffers/row_queue.h"
#include "proto/link.h"
#include "proto/message.h"
#include "tests/bench/rows_bench.h"

enum { QUEUE_BYTES = 64 * 1024, STREAM_HIGH_BYTES = 1 << 20 }; /* as in decode and worker_link */

enum { COPY, APPEND, HANDOFF, EMISSION, STAGES };

typedef struct decode_side {
    const bench_options *options;
    const bench_rows *rows;
    bt_block_pool *blocks;
    row_queue **queues; /* [batch] */
    uint64_t *offsets;  /* [batch], of the row streams */
    int32_t **rooms;    /* [batch], of the queues, for their next rows */
    token_row *drawn;   /* [batch], rows that lie there */
    bt_loop *loop;
    proto_link *link;
    bool is_high;
    pid_t reader;
} decode_side;

/* What a step is measured beside. */
typedef struct machine {
    size_t bytes;
    uint8_t *from, *to;
    int tcp, local;
    pid_t readers[2];
    bench_meter copy, tcp_write, local_write;
} machine;

/* ---- the machine ----------------------------------------------------------------------------- */

static void open_machine(machine *m, const bench_rows *rows) {
    m->bytes = rows->step_bytes;
    m->from = bench_alloc(m->bytes);
    m->to = bench_alloc(m->bytes);
    memset(m->from, 7, m->bytes);
    m->tcp = bench_drain(BENCH_TCP, NULL, &m->readers[0]);
    m->local = bench_drain(BENCH_UNIX, NULL, &m->readers[1]);
}

/* The same bytes as a step has, between its parts: with caches as they are then. */
static void measure_copy(machine *m, uint32_t step) {
    bench_begin(&m->copy);
    memcpy(m->to, m->from, m->bytes);
    bench_end(&m->copy);
    m->from[step % m->bytes] ^= m->to[m->bytes / 2];
}

static void measure_sockets(machine *m) {
    bench_begin(&m->tcp_write);
    bench_write(m->tcp, m->to, m->bytes);
    bench_end(&m->tcp_write);
    bench_begin(&m->local_write);
    bench_write(m->local, m->to, m->bytes);
    bench_end(&m->local_write);
}

static void close_machine(machine *m, const bench_options *o) {
    bench_tell("memcpy", o, &m->copy, m->bytes, o->steps);
    bench_tell("raw_tcp", o, &m->tcp_write, m->bytes, o->steps);
    bench_tell("raw_unix", o, &m->local_write, m->bytes, o->steps);
    bench_meter_free(&m->copy);
    bench_meter_free(&m->tcp_write);
    bench_meter_free(&m->local_write);
    (void)close(m->tcp);
    (void)close(m->local);
    bench_drain_end(m->readers[0]);
    bench_drain_end(m->readers[1]);
    bt_free(m->from);
    bt_free(m->to);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void on_message(void *context, proto_link *link, const proto_message *message) {
    (void)context;
    (void)link;
    (void)message;
}

static void on_closed(void *context, proto_link *link, bt_status status, const char *text) {
    (void)context;
    (void)link;
    bench_die(text, status);
}

static void on_output(void *context, proto_link *link, bool is_high) {
    (void)link;
    ((decode_side *)context)->is_high = is_high;
}

static void open_side(decode_side *d) {
    const uint32_t cap = d->rows->cap;
    const size_t two =
        2 * row_record_bytes((row_widths){.mask_mode = ROW_MASK_SUPPORT, .support_count = cap});
    const bt_block_pool_options blocks = {.idle_bytes_max = SIZE_MAX};
    bt_status status = bt_block_pool_create(&blocks, &d->blocks);
    const row_queue_options options = {.blocks = d->blocks,
                                       .mask_mode = ROW_MASK_SUPPORT,
                                       .cap = cap,
                                       .bytes_max = two > QUEUE_BYTES ? two : QUEUE_BYTES};
    const proto_link_options link_options = {.output_high_bytes = STREAM_HIGH_BYTES};
    const proto_link_events events = {
        .on_message = on_message, .on_closed = on_closed, .on_output = on_output, .context = d};
    d->queues = bench_alloc(d->options->batch * sizeof(row_queue *));
    d->offsets = bench_alloc(d->options->batch * sizeof *d->offsets);
    d->rooms = bench_alloc(d->options->batch * sizeof *d->rooms);
    d->drawn = bench_alloc(d->options->batch * sizeof *d->drawn);
    for (uint32_t i = 0; i < d->options->batch && status == BT_OK; i++)
        status = row_queue_create(&options, &d->queues[i]);
    const int fd = bench_drain(BENCH_TCP, NULL, &d->reader);
    if (status == BT_OK) status = bt_loop_create(&d->loop);
    if (status == BT_OK)
        status = proto_link_create(bt_loop_get_base(d->loop), fd, &link_options, &events, &d->link);
    if (status != BT_OK) bench_die("decode's side", status);
}

static void close_side(decode_side *d) {
    proto_link_destroy(d->link); /* the loop closes the descriptor */
    (void)event_base_loop(bt_loop_get_base(d->loop), EVLOOP_NONBLOCK);
    bench_drain_end(d->reader);
    bt_loop_destroy(d->loop);
    for (uint32_t i = 0; i < d->options->batch; i++)
        row_queue_destroy(d->queues[i]);
    bt_block_pool_destroy(d->blocks);
    bt_free(d->queues);
    bt_free(d->offsets);
    bt_free(d->rooms);
    bt_free(d->drawn);
}

/* ---- stages ---------------------------------------------------------------------------------- */

static void append_step(decode_side *d) {
    for (uint32_t i = 0; i < d->options->batch; i++) {
        const token_row row = bench_row(d->rows, i);
        const bt_status status = row_queue_push(d->queues[i], &row);
        if (status != BT_OK) bench_die("row_queue_push", status);
    }
}

/* The same with rows that are drawn in place: room for each, and what the sampler leaves there,
 * which is not measured. */
static void reserve_step(decode_side *d) {
    for (uint32_t i = 0; i < d->options->batch; i++) {
        const bt_status status = row_queue_reserve(d->queues[i], &d->rooms[i]);
        if (status != BT_OK) bench_die("row_queue_reserve", status);
    }
}

static void draw_step(decode_side *d) {
    for (uint32_t i = 0; i < d->options->batch; i++) {
        const token_row row = bench_row(d->rows, i);
        int32_t *room = d->rooms[i];
        memcpy(room, row.support_ids, row.support_count * sizeof *room);
        memcpy(room + row.support_count, row.support_logprobs, row.support_count * sizeof(float));
        d->drawn[i] = row;
        d->drawn[i].support_ids = room;
        d->drawn[i].support_logprobs = (const float *)(const void *)(room + row.support_count);
    }
}

static void push_drawn(decode_side *d) {
    for (uint32_t i = 0; i < d->options->batch; i++) {
        const bt_status status = row_queue_push(d->queues[i], &d->drawn[i]);
        if (status != BT_OK) bench_die("row_queue_push", status);
    }
}

/* What is queued of one sequence becomes frames, as in decode_stream.c; without a link they are
 * given up at once. */
static void hand_off(decode_side *d, uint32_t at, proto_link *link) {
    row_slice rows;
    while (row_queue_take(d->queues[at], PROTO_FRAME_PAYLOAD_MAX, &rows)) {
        proto_message message = {.kind = PROTO_CHUNK,
                                 .payload = rows.bytes,
                                 .payload_bytes = rows.count,
                                 .block = rows.block};
        message.chunk.attempt = (proto_attempt){.router_incarnation = 1, .counter = at + 1};
        message.chunk.offset = d->offsets[at];
        d->offsets[at] += rows.count;
        if (link != NULL) {
            proto_link_send(link, &message);
        } else {
            proto_message_drop_payload(&message);
        }
    }
}

static void turn(decode_side *d) {
    if (event_base_loop(bt_loop_get_base(d->loop), EVLOOP_ONCE) < 0)
        bench_die("event loop", BT_ERR_WORKER_IO);
}

static void emit_step(decode_side *d) {
    for (uint32_t i = 0; i < d->options->batch; i++) {
        hand_off(d, i, d->link);
        while (d->is_high)
            turn(d);
    }
    while (proto_link_output_bytes(d->link) > 0)
        turn(d);
}

/* Rows that are copied into the queues, then rows that lie there: a step of each in turn. */
static void run_steps(decode_side *d, machine *m, bench_meter meters[STAGES]) {
    for (uint32_t i = 0; i < d->options->rounds * d->options->steps; i++) {
        measure_copy(m, i);
        bench_begin(&meters[COPY]);
        append_step(d);
        bench_end(&meters[COPY]);
        emit_step(d);
        bench_begin(&meters[APPEND]);
        reserve_step(d);
        bench_pause(&meters[APPEND]);
        draw_step(d);
        bench_begin(&meters[APPEND]);
        push_drawn(d);
        bench_end(&meters[APPEND]);
        bench_begin(&meters[EMISSION]);
        emit_step(d);
        bench_end(&meters[EMISSION]);
        measure_sockets(m);
        reserve_step(d);
        draw_step(d);
        push_drawn(d);
        bench_begin(&meters[HANDOFF]);
        for (uint32_t at = 0; at < d->options->batch; at++)
            hand_off(d, at, NULL);
        bench_end(&meters[HANDOFF]);
    }
}

void bench_decode(const bench_options *options, const bench_rows *rows) {
    static const char *const names[STAGES] = {"append_copied", "append", "handoff", "emission"};
    decode_side d = {.options = options, .rows = rows};
    bench_meter meters[STAGES] = {{0}};
    machine m = {0};
    open_machine(&m, rows);
    open_side(&d);
    append_step(&d); /* warms */
    emit_step(&d);
    run_steps(&d, &m, meters);
    for (size_t i = 0; i < STAGES; i++) {
        bench_tell(names[i], options, &meters[i], rows->step_bytes, options->steps);
        bench_meter_free(&meters[i]);
    }
    close_side(&d);
    close_machine(&m, options);
}
