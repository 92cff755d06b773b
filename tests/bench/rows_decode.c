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

typedef struct decode_side {
    const bench_options *options;
    const bench_rows *rows;
    bt_block_pool *blocks;
    row_queue **queues; /* [batch] */
    uint64_t *offsets;  /* [batch], of the row streams */
    bt_loop *loop;
    proto_link *link;
    bool is_high;
    pid_t reader;
} decode_side;

/* ---- the machine ----------------------------------------------------------------------------- */

static void bench_machine(const bench_options *o, const bench_rows *rows) {
    uint8_t *from = bench_alloc(rows->step_bytes);
    uint8_t *to = bench_alloc(rows->step_bytes);
    static const struct {
        bench_socket kind;
        const char *stage;
    } sockets[] = {{BENCH_TCP, "raw_tcp"}, {BENCH_UNIX, "raw_unix"}};
    memset(from, 7, rows->step_bytes);
    bench_meter meter = {0};
    for (uint32_t i = 0; i < o->rounds * o->steps; i++) {
        bench_begin(&meter);
        memcpy(to, from, rows->step_bytes);
        bench_end(&meter);
        from[i % rows->step_bytes] ^= to[rows->step_bytes / 2];
    }
    bench_tell("memcpy", o, &meter, rows->step_bytes, o->steps);
    bench_meter_free(&meter);
    for (size_t s = 0; s < sizeof sockets / sizeof sockets[0]; s++) {
        pid_t reader;
        const int fd = bench_drain(sockets[s].kind, NULL, &reader);
        for (uint32_t i = 0; i < o->rounds * o->steps; i++) {
            bench_begin(&meter);
            bench_write(fd, to, rows->step_bytes);
            bench_end(&meter);
        }
        bench_tell(sockets[s].stage, o, &meter, rows->step_bytes, o->steps);
        bench_meter_free(&meter);
        (void)close(fd);
        bench_drain_end(reader);
    }
    bt_free(from);
    bt_free(to);
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
}

/* ---- stages ---------------------------------------------------------------------------------- */

static void append_step(decode_side *d) {
    for (uint32_t i = 0; i < d->options->batch; i++) {
        const token_row row = bench_row(d->rows, i);
        const bt_status status = row_queue_push(d->queues[i], &row);
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

void bench_decode(const bench_options *options, const bench_rows *rows) {
    decode_side d = {.options = options, .rows = rows};
    bench_meter append = {0};
    bench_meter handoff = {0};
    bench_meter emission = {0};
    bench_machine(options, rows);
    open_side(&d);
    append_step(&d); /* warms */
    emit_step(&d);
    for (uint32_t i = 0; i < options->rounds * options->steps; i++) {
        append_step(&d);
        bench_begin(&handoff);
        for (uint32_t at = 0; at < options->batch; at++)
            hand_off(&d, at, NULL);
        bench_end(&handoff);
    }
    for (uint32_t i = 0; i < options->rounds * options->steps; i++) {
        bench_begin(&append);
        append_step(&d);
        bench_end(&append);
        bench_begin(&emission);
        emit_step(&d);
        bench_end(&emission);
    }
    bench_tell("append", options, &append, rows->step_bytes, options->steps);
    bench_tell("handoff", options, &handoff, rows->step_bytes, options->steps);
    bench_tell("emission", options, &emission, rows->step_bytes, options->steps);
    bench_meter_free(&append);
    bench_meter_free(&handoff);
    bench_meter_free(&emission);
    close_side(&d);
}
