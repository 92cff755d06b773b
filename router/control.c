/* Flows: commands of the HTTP threads into the dispatch, rows and ends back to them. */
#include "router/control.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/api_errors.h"
#include "router/control_internal.h"
#include "router/http_status.h"

enum {
    COMMANDS_PER_FLOW = 4, /* submit, cancel, one update at a time, release */
    BATCHES_PER_THREAD = 8192,
    HELD_BYTES_MIN = 1024,
    TRIM_US = 1000 * 1000,
};

typedef enum command_kind {
    COMMAND_SUBMIT,
    COMMAND_CANCEL,
    COMMAND_UPDATE, /* credit and cancels of samples */
    COMMAND_RELEASE,
    COMMAND_ABORT,
} command_kind;

typedef struct command {
    command_kind kind;
    control_flow *flow;   /* of all but aborts */
    control_order *abort; /* of an abort, owned */
} command;

/* ---- to the HTTP threads --------------------------------------------------------------------- */

static void flush_pending(control_lane *lane) {
    while (lane->first_pending != NULL) {
        control_batch *batch = lane->first_pending;
        control_batch *next = batch->next;
        if (!bt_ring_push(lane->batches, &batch)) return;
        lane->first_pending = next;
    }
    lane->last_pending = NULL;
}

/* What does not fit into the ring waits here, in order; its bytes are bounded by the budget. */
static void hand_on(control *c, control_batch *batch) {
    control_lane *lane = &c->lanes[batch->flow->thread];
    batch->next = NULL;
    flush_pending(lane);
    if (lane->first_pending == NULL && bt_ring_push(lane->batches, &batch)) return;
    if (lane->first_pending == NULL) {
        lane->first_pending = batch;
    } else {
        lane->last_pending->next = batch;
    }
    lane->last_pending = batch;
}

/* ---- request ids ----------------------------------------------------------------------------- */

static control_flow **rid_chain(control *c, const char *rid, size_t bytes) {
    uint64_t hash = 1469598103934665603u;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ (unsigned char)rid[i]) * 1099511628211u;
    }
    return &c->by_rid[(hash ^ hash >> 32) & c->rid_mask];
}

control_flow *control_find_rid(control *c, const char *rid, size_t bytes) {
    control_flow *flow = *rid_chain(c, rid, bytes);
    while (flow != NULL && (strncmp(flow->rid, rid, bytes) != 0 || flow->rid[bytes] != 0)) {
        flow = flow->next_by_rid;
    }
    return flow;
}

static void add_rid(control *c, control_flow *flow) {
    control_flow **chain = rid_chain(c, flow->rid, strlen(flow->rid));
    flow->next_by_rid = *chain;
    *chain = flow;
    if (flow->list_rid_bytes > 0) c->list_flows++;
}

static void remove_rid(control *c, control_flow *flow) {
    control_flow **at = rid_chain(c, flow->rid, strlen(flow->rid));
    if (flow->list_rid_bytes > 0) c->list_flows--;
    while (*at != flow) {
        BT_ASSERT(*at != NULL);
        at = &(*at)->next_by_rid;
    }
    *at = flow->next_by_rid;
}

/* ---- the dispatch's ops ---------------------------------------------------------------------- */

/* An op must not call back, so the flow is cancelled in the next step. */
static void doom(control *c, control_flow *flow, bt_status status, const char *text) {
    if (flow->is_doomed) return;
    flow->is_doomed = true;
    flow->end.status = status;
    snprintf(flow->end.text, sizeof(flow->end.text), "%s", text);
    flow->next_doomed = c->doomed;
    c->doomed = flow;
}

/* What ended by itself is not cancelled any more; it may be freed before the next step. */
static void remove_doomed(control *c, const control_flow *flow) {
    control_flow **at = &c->doomed;
    while (*at != flow) {
        BT_ASSERT(*at != NULL);
        at = &(*at)->next_doomed;
    }
    *at = flow->next_doomed;
}

/* Few bytes are copied: the block would be held for little. Many are handed on in their block, if
 * that is not much larger. */
static bool is_worth_holding(const bt_block *block, size_t bytes) {
    return block != NULL && bytes >= HELD_BYTES_MIN &&
           block->capacity <= 2 * bytes + BT_BLOCK_BYTES_MIN;
}

/* `bytes` for the HTTP thread, which lie in `block` (or NULL), charged; NULL: the flow is doomed.
 */
static control_batch *make_batch(control *c, control_flow *flow, const uint8_t *payload,
                                 size_t bytes, bt_block *block) {
    if (flow->is_doomed) return NULL;
    if (!is_worth_holding(block, bytes)) block = NULL;
    const size_t charged = block != NULL ? block->capacity : bytes;
    if (!budget_take(&c->in_flight, charged)) {
        doom(c, flow, BT_ERR_REQUEST_FULL, "the router cannot take in more rows now");
        return NULL;
    }
    control_batch *batch = bt_malloc(sizeof(*batch) + (block != NULL ? 0 : bytes));
    if (batch == NULL) {
        budget_give(&c->in_flight, charged);
        doom(c, flow, BT_ERR_WORKER_MEMORY, "the router is out of memory");
        return NULL;
    }
    *batch = (control_batch){
        .flow = flow, .bytes = bytes, .payload = payload, .block = block, .charged_bytes = charged};
    if (block != NULL) {
        bt_block_hold(block);
    } else {
        batch->payload = memcpy(batch + 1, payload, bytes);
    }
    return batch;
}

static void on_rows(void *context, uint64_t request, const dispatch_rows *rows) {
    control *c = context;
    control_flow *flow = (control_flow *)(uintptr_t)request;
    control_batch *batch = make_batch(c, flow, rows->records, rows->bytes, rows->block);
    if (batch == NULL) return;
    batch->kind = CONTROL_ROWS;
    batch->sample = rows->sample;
    batch->cached_tokens = rows->cached_tokens;
    hand_on(c, batch);
}

static void on_prompt_logprobs(void *context, uint64_t request,
                               const dispatch_prompt_logprobs *logprobs) {
    control *c = context;
    control_flow *flow = (control_flow *)(uintptr_t)request;
    control_batch *batch = make_batch(c, flow, logprobs->entries, logprobs->bytes, NULL);
    if (batch == NULL) return;
    batch->kind = CONTROL_PROMPT_LOGPROBS;
    batch->first_position = logprobs->first_position;
    batch->count = logprobs->count;
    hand_on(c, batch);
}

/* Behind the rows that it makes void. */
static void on_restart(void *context, uint64_t request) {
    static const uint8_t NOTHING[1];
    control *c = context;
    control_batch *batch = make_batch(c, (control_flow *)(uintptr_t)request, NOTHING, 0, NULL);
    if (batch == NULL) return;
    batch->kind = CONTROL_RESTART;
    hand_on(c, batch);
}

static void end_sample(control *c, control_flow *flow, uint32_t index, const dispatch_end *end) {
    control_sample *s = &flow->samples[index];
    BT_ASSERT(!s->has_ended);
    s->has_ended = true;
    s->end = *end;
    s->end_batch =
        (control_batch){.flow = flow, .kind = CONTROL_SAMPLE_END, .sample = index, .end = &s->end};
    hand_on(c, &s->end_batch);
}

/* A sample that ends because the flow is doomed ends for the same reason. */
static void on_sample_end(void *context, uint64_t request, uint32_t sample,
                          const dispatch_end *end) {
    control *c = context;
    control_flow *flow = (control_flow *)(uintptr_t)request;
    dispatch_end told = *end;
    if (flow->is_doomed) {
        told.finish = PROTO_FINISH_ERROR;
        told.status = flow->end.status;
        told.http_status = http_status_of(told.status);
        memcpy(told.text, flow->end.text, sizeof(told.text));
    }
    end_sample(c, flow, sample, &told);
}

/* Tells the flow's end, exactly once. */
static void end_flow(control *c, control_flow *flow) {
    flow->end_batch = (control_batch){.flow = flow, .kind = CONTROL_END, .end = &flow->end};
    hand_on(c, &flow->end_batch);
}

static void on_end(void *context, uint64_t request, const dispatch_end *end) {
    control *c = context;
    control_flow *flow = (control_flow *)(uintptr_t)request;
    BT_ASSERT(flow->is_live);
    flow->is_live = false;
    remove_rid(c, flow);
    if (flow->is_doomed) {
        remove_doomed(c, flow);
        flow->end.http_status = http_status_of(flow->end.status);
    } else {
        flow->end = *end;
    }
    end_flow(c, flow);
}

static void on_ready_changed(void *context, bool is_ready) {
    control *c = context;
    c->is_stale = true;
    bt_log_info("control", is_ready ? "a pair of workers is ready" : "no pair of workers is ready");
}

/* ---- commands -------------------------------------------------------------------------------- */

static void refuse_flow(control *c, control_flow *flow, bt_status status, const char *text) {
    memset(&flow->end, 0, sizeof(flow->end));
    flow->end.status = status;
    flow->end.http_status = http_status_of(status);
    snprintf(flow->end.text, sizeof(flow->end.text), "%s", text);
    for (uint32_t i = 0; i < flow->request.generation.samples; i++) {
        end_sample(c, flow, i, &flow->end);
    }
    end_flow(c, flow);
}

static void submit(control *c, control_flow *flow) {
    bt_error error = {0};
    if (control_find_rid(c, flow->rid, strlen(flow->rid)) != NULL) {
        snprintf(error.text, sizeof(error.text), "Duplicate request ID detected: %s", flow->rid);
        refuse_flow(c, flow, BT_ERR_REQUEST_DUPLICATE, error.text);
        return;
    }
    flow->request.id = (uint64_t)(uintptr_t)flow;
    flow->is_live = true;
    add_rid(c, flow);
    bt_status status = dispatch_submit(c->dispatch, &flow->request, control_now(c), &error);
    if (status == BT_OK) {
        control_abort_late(c, flow);
        return;
    }
    flow->is_live = false;
    remove_rid(c, flow);
    refuse_flow(c, flow, status, error.text[0] != 0 ? error.text : bt_status_string(status));
}

/* The flag first: what is added from here on has an order of its own. */
static void update(control *c, control_flow *flow) {
    atomic_store(&flow->is_update_queued, false);
    for (uint32_t i = 0; i < flow->request.generation.samples; i++) {
        control_sample *s = &flow->samples[i];
        uint64_t bytes = atomic_exchange(&s->granted_bytes, 0);
        bool is_cancelled = atomic_exchange(&s->is_cancelled, false);
        if (flow->is_live && is_cancelled)
            dispatch_cancel_sample(c->dispatch, flow->request.id, i, control_now(c));
        if (flow->is_live && bytes > 0)
            dispatch_grant(c->dispatch, flow->request.id, i, bytes, control_now(c));
    }
}

static void carry_out(control *c, control_lane *lane, const command *order) {
    control_flow *flow = order->flow;
    switch (order->kind) {
    case COMMAND_SUBMIT: submit(c, flow); break;
    case COMMAND_CANCEL:
        if (flow->is_live) dispatch_cancel(c->dispatch, flow->request.id, control_now(c));
        break;
    case COMMAND_UPDATE: update(c, flow); break;
    case COMMAND_RELEASE:
        BT_ASSERT(!flow->is_live);
        flow->on_free(flow);
        break;
    case COMMAND_ABORT:
        atomic_fetch_sub(&lane->aborts, 1);
        control_abort_take(c, order->abort);
        break;
    }
}

static void on_commands(void *context) {
    control_lane *lane = context;
    command order;
    bt_ring_disarm(lane->commands);
    do {
        while (bt_ring_pop(lane->commands, &order)) {
            carry_out(lane->control, lane, &order);
        }
    } while (!bt_ring_arm(lane->commands));
}

static void cancel_doomed(control *c) {
    while (c->doomed != NULL) {
        const control_flow *flow = c->doomed;
        dispatch_cancel(c->dispatch, flow->request.id, control_now(c));
        BT_ASSERT(!flow->is_live); /* its end took it from the list */
    }
}

bool control_step(void *context) {
    control *c = context;
    cancel_doomed(c);
    if (c->is_stale) control_publish(c);
    return false;
}

static void on_tick(void *context) {
    control *c = context;
    const uint64_t now_us = control_now(c);
    dispatch_tick(c->dispatch, now_us);
    if (now_us >= c->next_trim_us) {
        c->next_trim_us = now_us + TRIM_US;
        bt_block_pool_trim(c->blocks);
    }
    for (uint32_t i = 0; i < c->options.threads; i++) {
        flush_pending(&c->lanes[i]);
    }
    control_publish(c);
}

/* ---- the HTTP threads' side ------------------------------------------------------------------ */

static void give_order(control *c, command_kind kind, control_flow *flow) {
    const command order = {.kind = kind, .flow = flow};
    /* The ring holds every command that all flows of the thread can have at once. */
    bool is_pushed = bt_ring_push(c->lanes[flow->thread].commands, &order);
    BT_ASSERT(is_pushed);
}

void control_submit(control *c, control_flow *flow) {
    give_order(c, COMMAND_SUBMIT, flow);
}

void control_cancel(control *c, control_flow *flow) {
    give_order(c, COMMAND_CANCEL, flow);
}

static void give_update(control *c, control_flow *flow) {
    if (!atomic_exchange(&flow->is_update_queued, true)) give_order(c, COMMAND_UPDATE, flow);
}

void control_cancel_sample(control *c, control_flow *flow, uint32_t sample) {
    BT_ASSERT(sample < flow->request.generation.samples);
    atomic_store(&flow->samples[sample].is_cancelled, true);
    give_update(c, flow);
}

void control_grant(control *c, control_flow *flow, uint32_t sample, uint64_t bytes) {
    BT_ASSERT(sample < flow->request.generation.samples);
    atomic_fetch_add(&flow->samples[sample].granted_bytes, bytes);
    give_update(c, flow);
}

void control_release(control *c, control_flow *flow) {
    give_order(c, COMMAND_RELEASE, flow);
}

bool control_abort(control *c, uint32_t thread, const api_abort *abort) {
    control_lane *lane = &c->lanes[thread];
    if (atomic_load(&lane->aborts) >= CONTROL_ABORTS_MAX) return false;
    control_order *made = bt_malloc(sizeof(*made));
    if (made == NULL) return false;
    made->abort = *abort;
    made->sequence = atomic_fetch_add(&c->abort_sequence, 1) + 1;
    atomic_fetch_add(&lane->aborts, 1);
    const command order = {.kind = COMMAND_ABORT, .abort = made};
    const bool is_pushed = bt_ring_push(lane->commands, &order);
    BT_ASSERT(is_pushed);
    return true;
}

uint64_t control_abort_mark(control *c) {
    return atomic_load(&c->abort_sequence);
}

bt_ring *control_ring(control *c, uint32_t thread) {
    return c->lanes[thread].batches;
}

control_batch *control_next(control *c, uint32_t thread) {
    control_batch *batch;
    return bt_ring_pop(c->lanes[thread].batches, &batch) ? batch : NULL;
}

static bool is_end(const control_batch *batch) {
    return batch->kind == CONTROL_SAMPLE_END || batch->kind == CONTROL_END;
}

void control_batch_free(control *c, control_batch *batch) {
    if (is_end(batch)) return;
    budget_give(&c->in_flight, batch->charged_bytes);
    bt_block_release(batch->block);
    bt_free(batch);
}

/* ---- life ------------------------------------------------------------------------------------ */

static bt_status create_lanes(control *c) {
    c->lanes = bt_calloc(c->options.threads, sizeof(*c->lanes));
    if (c->lanes == NULL) return BT_ERR_WORKER_MEMORY;
    for (uint32_t i = 0; i < c->options.threads; i++) {
        control_lane *lane = &c->lanes[i];
        lane->control = c;
        const uint32_t commands = COMMANDS_PER_FLOW * c->options.flows_per_thread_max;
        bt_status status =
            bt_ring_create(commands + CONTROL_ABORTS_MAX, sizeof(command), &lane->commands);
        if (status == BT_OK)
            status = bt_ring_create(BATCHES_PER_THREAD, sizeof(control_batch *), &lane->batches);
        if (status == BT_OK)
            status = bt_loop_watch(c->loop, bt_ring_get_fd(lane->commands), on_commands, lane,
                                   &lane->source);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

static bt_status create_rids(control *c) {
    size_t chains = 64;
    while (chains < (size_t)c->options.threads * c->options.flows_per_thread_max) {
        chains *= 2;
    }
    c->by_rid = bt_calloc(chains, sizeof(control_flow *));
    c->rid_mask = chains - 1;
    return c->by_rid != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
}

bt_status control_create(const control_options *options, bt_loop *loop, control **out,
                         bt_error *error) {
    control *c = bt_calloc(1, sizeof(*c));
    if (c == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for the control thread");
    c->options = *options;
    c->loop = loop;
    c->clock = bt_clock_system();
    budget_init(&c->in_flight, options->in_flight_bytes_max);
    pthread_mutex_init(&c->mutex, NULL);
    const dispatch_ops ops = {.send = control_link_send,
                              .close = control_link_close,
                              .on_rows = on_rows,
                              .on_prompt_logprobs = on_prompt_logprobs,
                              .on_restart = on_restart,
                              .on_sample_end = on_sample_end,
                              .on_end = on_end,
                              .on_ready_changed = on_ready_changed,
                              .context = c};
    const bt_block_pool_options blocks = {.idle_bytes_max = options->idle_bytes_max};
    bt_status status = bt_block_pool_create(&blocks, &c->blocks);
    c->options.dispatch.blocks = c->blocks;
    if (status == BT_OK) status = dispatch_create(&c->options.dispatch, &ops, &c->dispatch);
    if (status == BT_OK) status = create_lanes(c);
    if (status == BT_OK) status = create_rids(c);
    if (status == BT_OK) status = bt_loop_every(loop, CONTROL_TICK_US, on_tick, c, &c->tick);
    if (status != BT_OK) {
        (void)bt_fail(error, status, "the control thread cannot start: %s",
                      bt_status_string(status));
    } else {
        status = control_links_open(c, error);
    }
    if (status != BT_OK) {
        control_destroy(c);
        return status;
    }
    control_publish(c);
    *out = c;
    return BT_OK;
}

static void destroy_lane(control *c, control_lane *lane) {
    control_batch *batch;
    command order;
    bt_loop_source_free(lane->source);
    flush_pending(lane);
    while (lane->batches != NULL && bt_ring_pop(lane->batches, &batch)) {
        control_batch_free(c, batch);
        flush_pending(lane);
    }
    while (lane->commands != NULL && bt_ring_pop(lane->commands, &order)) {
        if (order.kind == COMMAND_RELEASE) order.flow->on_free(order.flow);
        if (order.kind == COMMAND_ABORT) bt_free(order.abort);
    }
    bt_ring_destroy(lane->batches);
    bt_ring_destroy(lane->commands);
}

void control_destroy(control *c) {
    if (c == NULL) return;
    control_links_close(c);
    dispatch_destroy(c->dispatch);
    for (uint32_t i = 0; c->lanes != NULL && i < c->options.threads; i++) {
        destroy_lane(c, &c->lanes[i]);
    }
    control_abort_fini(c);
    bt_loop_source_free(c->tick);
    bt_block_pool_destroy(c->blocks); /* replies may still hold some */
    bt_free(c->lanes);
    bt_free(c->by_rid);
    pthread_mutex_destroy(&c->mutex);
    bt_free(c);
}
