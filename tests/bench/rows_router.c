/* The router's side: frames of a decode worker through the control thread's code into the stores of
 * replies, then the stores as text, and that text to a client. Control and HTTP thread are one
 * thread here, so that its time is the sum of both. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <event2/event.h>

#include "base/assert.h"
#include "base/loop.h"
#include "base/mem.h"
#include "router/api_call.h"
#include "router/control.h"
#include "router/http_server.h"
#include "router/reply_writer.h"
#include "tests/bench/rows_bench.h"
#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"

enum { PROMPT_TOKENS = 4, PORTION = 96 * 1024, RID_BYTES = 16 };

typedef struct bench_flow {
    control_flow flow; /* first */
    control_sample sample;
    char rid[RID_BYTES];
    reply_store store;
    uint32_t rows;
} bench_flow;

typedef struct router_side {
    const bench_options *options;
    const bench_rows *rows;
    bt_loop *loop;
    control *control;
    tokenizer *tokenizer;
    api_settings settings;
    reply_limits limits;
    reply_spill spill; /* of all flows: there is none */
    budget bodies;
    bench_flow *flows; /* [batch] */
    uint64_t rows_taken;
    int go_fd;
    pid_t workers;
    http_server *server;
    http_exchange *exchange;
    bt_block_pool *texts;
    pid_t client;
    int32_t words[PROMPT_TOKENS];
} router_side;

/* ---- flows ----------------------------------------------------------------------------------- */

static void on_free(control_flow *flow) {
    (void)flow;
}

static void die_of_end(const dispatch_end *end) {
    bench_die(end->text[0] != 0 ? end->text : "a request ended", end->status);
}

/* What an HTTP thread does with rows that it will format later. */
static void store_rows(router_side *r, bench_flow *f, const control_batch *batch) {
    size_t at = 0;
    while (at < batch->bytes) {
        token_row row;
        size_t used = 0;
        bt_status status =
            row_record_decode(batch->payload + at, batch->bytes - at, r->rows->cap, &row, &used);
        if (status == BT_OK)
            status = reply_store_append(&f->store, batch->payload + at, used, batch->block);
        if (status != BT_OK) bench_die("storing a row", status);
        at += used;
        f->rows++;
        r->rows_taken++;
    }
}

static void take_batches(router_side *r) {
    bt_ring *ring = control_ring(r->control, 0);
    control_batch *batch;
    bt_ring_disarm(ring);
    do {
        while ((batch = control_next(r->control, 0)) != NULL) {
            if (batch->kind != CONTROL_ROWS) die_of_end(batch->end);
            store_rows(r, (bench_flow *)batch->flow, batch);
            control_batch_free(r->control, batch);
        }
    } while (!bt_ring_arm(ring));
}

static void turn(router_side *r) {
    (void)control_step(r->control);
    if (event_base_loop(bt_loop_get_base(r->loop), EVLOOP_ONCE) < 0)
        bench_die("event loop", BT_ERR_WORKER_IO);
    take_batches(r);
}

static void submit(router_side *r, uint32_t at) {
    bench_flow *f = &r->flows[at];
    (void)snprintf(f->rid, sizeof f->rid, "%u", at);
    f->flow = (control_flow){.rid = f->rid, .samples = &f->sample, .on_free = on_free};
    f->flow.request = (dispatch_request){.words = r->words, .prompt_tokens = PROMPT_TOKENS};
    proto_generation *g = &f->flow.request.generation;
    *g = proto_generation_default();
    g->max_new_tokens = 1 << 20;
    g->top_k = r->options->width;
    g->mask_mode = ROW_MASK_SUPPORT;
    reply_store_init(&f->store, &r->spill);
    control_submit(r->control, &f->flow);
}

/* The rows' ids are from a larger vocabulary; nobody looks up their text here. */
static void load_tokenizer(router_side *r) {
    const tiny_model m = {.family = MODEL_FAMILY_QWEN3, .seed = 1};
    bt_error error = {.text = "a tokenizer"};
    test_folder folder = test_folder_make();
    bt_status status = tiny_model_write_hf(&m, folder.path);
    if (status == BT_OK) status = tokenizer_load(folder.path, &r->tokenizer, &error);
    test_folder_remove(&folder);
    if (status != BT_OK) bench_die(error.text, status);
    r->settings.tokenizer = r->tokenizer;
}

static void open_side(router_side *r) {
    bt_error error;
    load_tokenizer(r);
    const uint32_t cap = r->rows->cap;
    budget_init(&r->limits.memory, 8ull << 30);
    budget_init(&r->limits.spill, 0);
    budget_init(&r->bodies, 1 << 20);
    const bt_block_pool_options texts = {.idle_bytes_max = 4 << 20};
    if (bt_block_pool_create(&texts, &r->texts) != BT_OK)
        bench_die("blocks for texts", BT_ERR_WORKER_MEMORY);
    r->limits.spill_path = "/tmp";
    reply_spill_init(&r->spill, &r->limits);
    r->settings.mask_max_tokens = cap;
    bt_status status = bt_loop_create(&r->loop);
    if (status != BT_OK) bench_die("the router's loop", status);
    control_options options = {.dispatch = {.incarnation = 5,
                                            .host = "router",
                                            .seed = 1,
                                            .heartbeat_ms = 5000,
                                            .dead_after_ms = 60000},
                               .address = {.host = "127.0.0.1"},
                               .settings = &r->settings,
                               .threads = 1,
                               .flows_per_thread_max = r->options->batch,
                               .in_flight_bytes_max = 1 << 30,
                               .idle_bytes_max = 4ul << 30};
    options.dispatch.record.sampling_mask_max_tokens = cap;
    options.dispatch.record.kv_checksum = RECORD_CHECKSUM_FULL + 1;
    options.dispatch.record.row_format = ROW_FORMAT_VERSION;
    if (control_create(&options, r->loop, &r->control, &error) != BT_OK)
        bench_die(error.text, error.status);
    r->workers = bench_workers_start(control_port(r->control), r->options, r->rows, &r->go_fd);
    while (!control_is_ready(r->control))
        turn(r);
    r->flows = bench_alloc(r->options->batch * sizeof *r->flows);
    for (uint32_t i = 0; i < r->options->batch; i++)
        submit(r, i);
}

static void empty_stores(router_side *r) {
    for (uint32_t i = 0; i < r->options->batch; i++) {
        reply_store_fini(&r->flows[i].store);
        r->flows[i].rows = 0;
    }
}

static void close_side(router_side *r) {
    http_server_destroy(r->server); /* the loop closes the descriptors */
    (void)event_base_loop(bt_loop_get_base(r->loop), EVLOOP_NONBLOCK);
    bench_drain_end(r->client);
    empty_stores(r);
    control_destroy(r->control);
    (void)close(r->go_fd);
    bench_drain_end(r->workers);
    bt_loop_destroy(r->loop);
    bt_block_pool_destroy(r->texts);
    tokenizer_destroy(r->tokenizer);
    bt_free(r->flows);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Reading as many bytes as an emission has. */
static void bench_read(const bench_options *o, size_t bytes) {
    static uint8_t buffer[BENCH_WRITE_BYTES];
    bench_meter meter = {0};
    pid_t child;
    const int fd = bench_source(BENCH_TCP, &child);
    for (uint32_t i = 0; i < o->rounds; i++) {
        bench_begin(&meter);
        for (size_t at = 0; at < bytes;) {
            const size_t left = bytes - at;
            const ssize_t got = read(fd, buffer, left < sizeof buffer ? left : sizeof buffer);
            if (got <= 0) bench_die("reading", BT_ERR_WORKER_IO);
            at += (size_t)got;
        }
        bench_end(&meter);
    }
    bench_tell("raw_read", o, &meter, bytes, 1);
    bench_meter_free(&meter);
    (void)close(fd);
    bench_drain_end(child);
}

/* An emission, as fast as it comes. */
static void take_emission(router_side *r, bench_meter *meter) {
    static const uint8_t go[256];
    const uint64_t wanted = r->rows_taken + (uint64_t)r->options->batch * r->options->steps;
    if (write(r->go_fd, go, r->options->steps) != (ssize_t)r->options->steps)
        bench_die("the workers", BT_ERR_WORKER_IO);
    bench_begin(meter);
    while (r->rows_taken < wanted)
        turn(r);
    bench_end(meter);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void on_request(void *context, http_exchange *exchange, const http_request *request,
                       char *body, size_t body_bytes) {
    router_side *r = context;
    const http_head head = {200, "application/json", -1, NULL};
    (void)request;
    (void)body;
    (void)body_bytes;
    r->exchange = exchange;
    http_exchange_begin(exchange, &head);
}

static void open_client(router_side *r) {
    const http_server_options options = {.connections_max = 4,
                                         .head_bytes_max = 4096,
                                         .body_budget = &r->bodies,
                                         .head_timeout_ms = 60000,
                                         .body_timeout_ms = 60000,
                                         .idle_timeout_ms = 60000,
                                         .write_timeout_ms = 60000};
    const http_handler handler = {.on_request = on_request, .context = r};
    const bt_status status = http_server_create(&options, r->loop, &handler, &r->server);
    if (status != BT_OK) bench_die("the HTTP server", status);
    const int fd = bench_drain(BENCH_TCP, "GET / HTTP/1.1\r\nHost: bench\r\n\r\n", &r->client);
    (void)evutil_make_socket_nonblocking(fd);
    http_server_adopt(r->server, fd);
    while (r->exchange == NULL)
        turn(r);
}

/* The text of one sequence, as api_call.c hands it over; to the client, or nowhere. */
static size_t write_text(router_side *r, reply_writer *writer, bt_text *scratch, bool is_sent) {
    size_t bytes = 0;
    while (!reply_writer_is_done(writer)) {
        size_t room = is_sent ? http_exchange_room(r->exchange) : PORTION;
        if (room == 0) {
            turn(r);
            continue;
        }
        bt_text_clear(scratch);
        const bt_status status =
            reply_writer_produce(writer, scratch, room < PORTION ? room : PORTION);
        if (status != BT_OK) bench_die("making text", status);
        bytes += scratch->used;
        if (is_sent) http_exchange_give(r->exchange, scratch);
    }
    while (is_sent && !http_server_is_flushed(r->server))
        turn(r);
    return bytes;
}

/* What of a reply depends on its rows. */
static void add_pieces(reply_writer *writer, bool is_packed) {
    if (is_packed) {
        reply_writer_add_array(writer, REPLY_ARRAY_BASE64, REPLY_ARRAY_LENGTHS);
        reply_writer_add_array(writer, REPLY_ARRAY_BASE64, REPLY_ARRAY_TOKEN_IDS);
        reply_writer_add_array(writer, REPLY_ARRAY_BASE64, REPLY_ARRAY_LOGPROBS);
    } else {
        reply_writer_add(writer, REPLY_MASK);
        reply_writer_add(writer, REPLY_MASK_LOGPROBS);
    }
}

typedef struct text_form {
    bool is_packed, is_sent;
} text_form;

/* The stores of the first `texts` sequences, each on its own; returns the bytes of one. */
static size_t write_texts(router_side *r, text_form form, bench_meter *meter) {
    static const api_request request = {.generation = {.mask_mode = ROW_MASK_SUPPORT}};
    generation none = {.request = &request};
    reply_writer writer;
    bt_text scratch;
    size_t bytes = 0;
    bt_text_init_pooled(&scratch, 64 << 20, r->texts, API_TEXT_BLOCK_BYTES);
    reply_writer_init(&writer, NULL, r->rows->cap);
    for (uint32_t i = 0; i < r->options->texts; i++) {
        bench_flow *f = &r->flows[i % r->options->batch];
        const reply_range all = {.row_to = f->rows, .place = reply_store_begin(&f->store)};
        bench_begin(meter);
        reply_writer_start(&writer, &none, &f->store, NULL, &all);
        add_pieces(&writer, form.is_packed);
        bytes = write_text(r, &writer, &scratch, form.is_sent);
        bench_end(meter);
    }
    reply_writer_fini(&writer);
    bt_text_fini(&scratch);
    return bytes;
}

/* The machine's own figures for as many bytes as a text has. */
static void bench_machine(const bench_options *o, bool is_packed, size_t bytes) {
    bench_meter meter = {0};
    uint8_t *from = bench_alloc(bytes);
    uint8_t *to = bench_alloc(bytes);
    memset(from, 7, bytes);
    for (uint32_t i = 0; i < o->rounds * o->texts; i++) {
        bench_begin(&meter);
        memcpy(to, from, bytes);
        bench_end(&meter);
        from[i % bytes] ^= to[bytes / 2];
    }
    bench_tell(is_packed ? "memcpy_packed" : "memcpy_json", o, &meter, bytes, o->batch);
    bench_meter_free(&meter);
    pid_t reader;
    const int fd = bench_drain(BENCH_TCP, NULL, &reader);
    for (uint32_t i = 0; i < o->rounds * o->texts; i++) {
        bench_begin(&meter);
        bench_write(fd, to, bytes);
        bench_end(&meter);
    }
    bench_tell(is_packed ? "raw_tcp_packed" : "raw_tcp_json", o, &meter, bytes, o->batch);
    bench_meter_free(&meter);
    (void)close(fd);
    bench_drain_end(reader);
    bt_free(from);
    bt_free(to);
}

void bench_router(const bench_options *options, const bench_rows *rows) {
    router_side r = {.options = options, .rows = rows};
    bench_meter warm = {0};
    bench_meter frames = {0};
    bench_meter text[2] = {0}; /* [is_packed] */
    bench_meter sent[2] = {0};
    size_t bytes[2] = {0};
    bench_read(options, rows->step_bytes * options->steps);
    open_side(&r);
    open_client(&r);
    take_emission(&r, &warm);
    for (uint32_t i = 0; i < options->rounds; i++) {
        empty_stores(&r); /* the replies are over; the next ones use their memory again */
        take_emission(&r, &frames);
        for (int is_packed = 0; is_packed < 2; is_packed++) {
            bytes[is_packed] = write_texts(&r, (text_form){is_packed, false}, &text[is_packed]);
            (void)write_texts(&r, (text_form){is_packed, true}, &sent[is_packed]);
        }
    }
    bench_tell("router", options, &frames, rows->step_bytes * options->steps, 1);
    bench_tell("json", options, &text[0], bytes[0], options->batch);
    bench_tell("json_sent", options, &sent[0], bytes[0], options->batch);
    bench_tell("packed", options, &text[1], bytes[1], options->batch);
    bench_tell("packed_sent", options, &sent[1], bytes[1], options->batch);
    bench_meter_free(&warm);
    bench_meter_free(&frames);
    for (int is_packed = 0; is_packed < 2; is_packed++) {
        bench_meter_free(&text[is_packed]);
        bench_meter_free(&sent[is_packed]);
    }
    close_side(&r);
    bench_machine(options, false, bytes[0]);
    bench_machine(options, true, bytes[1]);
}
