/* Requests to generate: between the connection, the intake and the control thread. */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/front_internal.h"

/* ---- the output of a call: its HTTP exchange --------------------------------------------------
 */

static void begin(void *context, int status, const char *content_type, int64_t content_bytes,
                  const char *fields) {
    front_call *call = context;
    const http_head head = {status, content_type, content_bytes, fields};
    http_exchange_begin(call->exchange, &head);
}

static void add(void *context, const char *bytes, size_t count) {
    front_call *call = context;
    http_exchange_add(call->exchange, bytes, count);
}

static void give(void *context, bt_text *text) {
    front_call *call = context;
    http_exchange_give(call->exchange, text);
}

/* The exchange may take the next request inside the call, so it is forgotten before. */
static void end(void *context) {
    front_call *call = context;
    http_exchange *exchange = call->exchange;
    call->exchange = NULL;
    http_exchange_end(exchange);
}

static void cut(void *context) {
    front_call *call = context;
    http_exchange *exchange = call->exchange;
    call->exchange = NULL;
    http_exchange_cut(exchange);
}

static size_t room(void *context) {
    const front_call *call = context;
    return http_exchange_room(call->exchange);
}

static void wake(void *context) {
    const front_call *call = context;
    http_exchange_wake(call->exchange);
}

static api_output output_of(front_call *call) {
    return (api_output){.begin = begin,
                        .add = add,
                        .give = give,
                        .end = end,
                        .cut = cut,
                        .room = room,
                        .wake = wake,
                        .context = call};
}

static void cancel(void *context, uint32_t item) {
    front_call *call = context;
    control_cancel(call->thread->front->options.control, &call->flows[item].flow);
}

static void cancel_sample(void *context, uint32_t item, uint32_t sample) {
    front_call *call = context;
    control_cancel_sample(call->thread->front->options.control, &call->flows[item].flow, sample);
}

static void grant(void *context, uint32_t item, uint32_t sample, uint64_t bytes) {
    front_call *call = context;
    control_grant(call->thread->front->options.control, &call->flows[item].flow, sample, bytes);
}

/* ---- life ------------------------------------------------------------------------------------ */

/* All but what the control thread may still look at. */
static void free_parts(front_call *call) {
    front_thread *thread = call->thread;
    budget *bodies = thread->front->options.http.body_budget;
    if (call->previous != NULL) {
        call->previous->next = call->next;
    } else {
        thread->calls = call->next;
    }
    if (call->next != NULL) call->next->previous = call->previous;
    http_server_body_free(bodies, call->body, call->job.body.bytes);
    budget_give(bodies, call->held_bytes);
    if (call->has_call) {
        api_call_fini(&call->call);
    } else if (call->job.is_good) {
        api_batch_fini(&call->job.batch);
    }
}

static void free_flows(front_call *call) {
    bt_free(call->flows);
    bt_free(call->samples);
    bt_free(call);
}

/* On the control thread. */
static void on_free(control_flow *flow) {
    front_call *call = ((front_flow *)flow)->call;
    atomic_fetch_sub(&call->thread->flow_count, 1);
    call->flows_left--;
    if (call->flows_left == 0) free_flows(call);
}

/* Of the first sample. */
static const char *finish_name(const api_call *call) {
    switch (call->samples[0].finish.kind) {
    case API_FINISH_NONE: return "its client left";
    case API_FINISH_STOP_ID: return "a stop id";
    case API_FINISH_STOP_STRING: return "a stop string";
    case API_FINISH_LENGTH: return "length";
    case API_FINISH_ABORT: return call->samples[0].finish.text;
    }
    return "";
}

static void log_end(const front_call *call) {
    const api_request *request = call->call.request;
    uint64_t us = bt_clock_now_us(&call->thread->front->clock) - call->started_us;
    bt_log_debug("http",
                 "request %s of %u prompts: %u prompt tokens in the first, %u tokens in %.1f ms, "
                 "ended by %s",
                 request->rid, call->flow_count, request->prompt.count,
                 api_call_tokens(&call->call), (double)us / 1000, finish_name(&call->call));
}

/* Frees the call once nobody needs it, through the control thread that may still have commands of
 * its flows in its ring. */
static void release_if_over(front_call *call) {
    if (call->thread->is_stopping) return; /* front_calls_free does */
    if (call->exchange != NULL || !call->call.has_ended) return;
    control *c = call->thread->front->options.control;
    if (bt_log_is_enabled(BT_LOG_DEBUG)) log_end(call);
    free_parts(call);
    /* With the last release the call may be gone. */
    front_flow *flows = call->flows;
    const uint32_t count = call->flow_count;
    call->flows_left = count;
    for (uint32_t i = 0; i < count; i++) {
        control_release(c, &flows[i].flow);
    }
}

/* Of a call that the control thread does not know (any more). */
static void drop(front_call *call) {
    atomic_fetch_sub(&call->thread->flow_count, call->flow_count > 0 ? call->flow_count : 1);
    free_parts(call);
    free_flows(call);
}

static const char STOPPING[] = "the router is stopping";
static const char NO_MEMORY[] = "the router is out of memory";
static const char TOO_MANY[] = "too many requests are being served";

static void end_item(front_call *call, uint32_t item) {
    const control_flow *flow = &call->flows[item].flow;
    dispatch_end end = {
        .status = BT_ERR_REQUEST_NO_WORKER, .finish = PROTO_FINISH_ERROR, .http_status = 503};
    memcpy(end.text, STOPPING, sizeof(STOPPING));
    for (uint32_t i = 0; i < flow->request.generation.samples; i++) {
        if (!flow->samples[i].is_told) api_call_on_sample_end(&call->call, item, i, &end);
    }
    api_call_on_end(&call->call, item, &end);
}

/* Before its first token a request gets a 503, in the middle of a stream an event that says so. */
static void end_call(front_call *call) {
    if (!call->has_call) {
        api_output output = output_of(call);
        api_failure failure = {.http_status = 503, .shape = API_ERROR_OPENAI};
        memcpy(failure.text, STOPPING, sizeof(STOPPING));
        api_answer_failure(&output, &failure);
        return;
    }
    for (uint32_t i = 0; i < call->flow_count; i++) {
        if (!call->call.items[i].has_ended) end_item(call, i);
    }
}

void front_calls_end(front_thread *thread) {
    for (front_call *call = thread->calls; call != NULL; call = call->next) {
        if (call->exchange != NULL) end_call(call);
    }
}

void front_calls_free(front_thread *thread) {
    const http_owner nobody = {0};
    while (thread->calls != NULL) {
        front_call *call = thread->calls;
        if (call->exchange != NULL) http_exchange_own(call->exchange, &nobody);
        drop(call);
    }
}

/* ---- what happens to a call ------------------------------------------------------------------ */

static void on_room(void *context) {
    front_call *call = context;
    api_call_on_room(&call->call);
    release_if_over(call);
}

static void on_gone(void *context) {
    front_call *call = context;
    call->exchange = NULL;
    if (!call->has_call) return; /* the intake still has the job */
    api_call_on_gone(&call->call);
    release_if_over(call);
}

static void refuse(http_exchange *exchange, api_kind kind, int status, const char *text) {
    bt_text body;
    api_error_shape shape = kind == API_GENERATE ? API_ERROR_GENERATE : API_ERROR_OPENAI;
    bt_text_init(&body, 4096);
    api_error_write(&body, shape, status, text);
    const http_head head = {status, "application/json", (int64_t)body.used, "Retry-After: 1\r\n"};
    http_exchange_reply(exchange, &head, body.used > 0 ? body.bytes : "");
    bt_text_fini(&body);
}

void front_generate(front_thread *thread, http_exchange *exchange, char *body,
                    const api_body *given) {
    const front_options *options = &thread->front->options;
    front_call *call = NULL;
    const bool has_room = atomic_load(&thread->flow_count) < options->flows_per_thread_max;
    if (has_room && !thread->is_stopping) call = bt_calloc(1, sizeof(*call));
    if (call == NULL) {
        http_server_body_free(options->http.body_budget, body, given->bytes);
        refuse(exchange, given->kind, 503, thread->is_stopping ? STOPPING : TOO_MANY);
        return;
    }
    call->thread = thread;
    call->exchange = exchange;
    call->body = body;
    call->started_us = bt_clock_now_us(&thread->front->clock);
    call->abort_mark = control_abort_mark(options->control);
    call->job = (intake_job){.body = *given};
    call->job.body.text = body != NULL ? body : "";
    call->next = thread->calls;
    if (call->next != NULL) call->next->previous = call;
    thread->calls = call;
    atomic_fetch_add(&thread->flow_count, 1);
    if (!intake_give(options->intake, thread->index, &call->job)) {
        drop(call);
        refuse(exchange, given->kind, 503, "too many requests are being read");
        return;
    }
    const http_owner owner = {.on_room = on_room, .on_gone = on_gone, .context = call};
    http_exchange_own(exchange, &owner);
}

/* What the flow refers to stays where it is until the flow is released. */
static void fill_flow(front_call *call, uint32_t item, control_sample *samples) {
    const api_request *request = call->call.items[item].request;
    front_flow *at = &call->flows[item];
    at->call = call;
    at->item = item;
    at->flow.samples = samples;
    at->flow.thread = call->thread->index;
    at->flow.rid = request->rid;
    at->flow.list_rid_bytes = request->list_rid_bytes;
    at->flow.abort_mark = call->abort_mark;
    at->flow.on_free = on_free;
    at->flow.request = (dispatch_request){
        .words = request->prompt.ids,
        .prompt_tokens = request->prompt.count,
        .generation = request->generation,
        .is_credited = request->streams,
        .may_restart = !request->streams,
        .emission_rows = api_request_emission_rows(request),
    };
}

static void answer_busy(front_call *call, const char *text) {
    api_output output = output_of(call);
    api_failure failure = {.http_status = 503,
                           .shape = call->job.body.kind == API_GENERATE ? API_ERROR_GENERATE
                                                                        : API_ERROR_OPENAI};
    snprintf(failure.text, sizeof(failure.text), "%s", text);
    api_answer_failure(&output, &failure);
    drop(call);
}

/* As many flows as there are items. false: there is no room for them. */
static bool take_flows(front_call *call, uint32_t count) {
    front_thread *thread = call->thread;
    const uint32_t max = thread->front->options.flows_per_thread_max;
    /* Only this thread adds to the number. */
    if (count - 1 > max - atomic_load(&thread->flow_count)) return false;
    atomic_fetch_add(&thread->flow_count, count - 1);
    call->flow_count = count;
    return true;
}

static bool create_call(front_call *call) {
    front *f = call->thread->front;
    const uint32_t count = call->flow_count;
    const api_call_options options = {
        .settings = f->options.settings,
        .limits = f->options.limits,
        .time = {.clock = f->clock, .wall_seconds = front_wall_seconds},
        .output = output_of(call),
        .backend = {.cancel = cancel,
                    .cancel_sample = cancel_sample,
                    .grant = grant,
                    .context = call},
        .scratch = &call->thread->scratch,
        .started_us = call->started_us,
    };
    call->flows = bt_calloc(count, sizeof(*call->flows));
    call->has_call =
        call->flows != NULL && api_call_init(&call->call, &options, &call->job.batch) == BT_OK;
    if (!call->has_call) return false;
    call->job.is_good = false; /* the batch was moved */
    call->samples = bt_calloc(call->call.sample_count, sizeof(*call->samples));
    return call->samples != NULL;
}

static void start_call(front_call *call) {
    front *f = call->thread->front;
    const api_batch *batch = &call->job.batch;
    const uint64_t bytes = api_batch_bytes(batch);
    if (!take_flows(call, batch->count)) {
        answer_busy(call, TOO_MANY);
        return;
    }
    if (!budget_take(f->options.http.body_budget, bytes)) {
        answer_busy(call, "the requests being served need more than --body-memory");
        return;
    }
    call->held_bytes = bytes;
    if (!create_call(call)) {
        answer_busy(call, NO_MEMORY);
        return;
    }
    for (uint32_t i = 0; i < call->flow_count; i++) {
        fill_flow(call, i, call->samples + call->call.items[i].first_sample);
    }
    for (uint32_t i = 0; i < call->flow_count; i++) {
        control_submit(f->options.control, &call->flows[i].flow);
    }
}

static void take_job(front_call *call) {
    http_server_body_free(call->thread->front->options.http.body_budget, call->body,
                          call->job.body.bytes);
    call->body = NULL;
    call->job.body.bytes = 0;
    if (call->exchange == NULL) {
        drop(call);
    } else if (call->job.is_good) {
        start_call(call);
    } else {
        api_output output = output_of(call);
        bt_log_debug("http", "a request is refused with %d: %s", call->job.failure.http_status,
                     call->job.failure.text);
        api_answer_failure(&output, &call->job.failure);
        drop(call);
    }
}

void front_on_intake(void *context) {
    front_intake_watch *watch = context;
    front_thread *thread = watch->thread;
    intake *in = thread->front->options.intake;
    bt_ring *ring = intake_ring(in, thread->index, watch->index);
    bt_ring_disarm(ring);
    do {
        intake_job *job;
        while ((job = intake_next(in, thread->index, watch->index)) != NULL) {
            take_job((front_call *)((char *)job - offsetof(front_call, job)));
        }
    } while (!bt_ring_arm(ring));
}

static void take_batch(front_flow *flow, const control_batch *batch) {
    front_call *call = flow->call;
    /* The router is stopping, and the call was told so. */
    if (call->call.items[flow->item].has_ended) return;
    const dispatch_rows rows = {.block = batch->block,
                                .sample = batch->sample,
                                .records = batch->payload,
                                .bytes = batch->bytes,
                                .cached_tokens = batch->cached_tokens};
    const dispatch_prompt_logprobs logprobs = {.first_position = batch->first_position,
                                               .count = batch->count,
                                               .entries = batch->payload,
                                               .bytes = batch->bytes};
    switch (batch->kind) {
    case CONTROL_ROWS: api_call_on_rows(&call->call, flow->item, &rows); break;
    case CONTROL_PROMPT_LOGPROBS:
        api_call_on_prompt_logprobs(&call->call, flow->item, &logprobs);
        break;
    case CONTROL_RESTART: api_call_on_restart(&call->call, flow->item); break;
    case CONTROL_SAMPLE_END:
        flow->flow.samples[batch->sample].is_told = true;
        api_call_on_sample_end(&call->call, flow->item, batch->sample, batch->end);
        break;
    case CONTROL_END: api_call_on_end(&call->call, flow->item, batch->end); break;
    }
}

void front_on_control(void *context) {
    front_thread *thread = context;
    control *c = thread->front->options.control;
    bt_ring *ring = control_ring(c, thread->index);
    bt_ring_disarm(ring);
    do {
        control_batch *batch;
        while ((batch = control_next(c, thread->index)) != NULL) {
            front_flow *flow = (front_flow *)batch->flow;
            take_batch(flow, batch);
            control_batch_free(c, batch);
            release_if_over(flow->call);
        }
    } while (!bt_ring_arm(ring));
}
