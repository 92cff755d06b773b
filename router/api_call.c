/* The states of one answer and the order in which its parts go out: the head, events or the whole
 * reply, the end. One pump() decides from the state alone what to do next, so that a row, the end
 * of the request, room in the output and a client that left may come in any order.
 *
 * The output gets begin once and then exactly one end or cut. The backend gets at most what was
 * received as credit, and no cancel after its end. A failure is named once: the first one is kept.
 * How an endpoint words its reply is in api_generate.c and api_chat.c, the formatting of rows in
 * reply_writer.c. */
#include "router/api_call.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "proto/row_stream.h"
#include "router/api_format.h"
#include "router/http_status.h"

enum {
    PORTION = 64 * 1024,     /* of JSON made at once */
    WHOLE_BYTES = 64 * 1024, /* replies up to here are sent with a Content-Length */
};

static const char JSON_TYPE[] = "application/json";
static const char STREAM_TYPE[] = "text/event-stream";
static const char STREAM_FIELDS[] = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";

void api_call_init(api_call *call, const api_call_options *options, api_request *request) {
    memset(call, 0, sizeof(*call));
    call->options = *options;
    call->request = *request;
    memset(request, 0, sizeof(*request));
    call->stores_rows =
        call->request.wants_logprob || call->request.generation.mask_mode != ROW_MASK_OFF;
    call->created_s = (int64_t)options->time.wall_seconds(options->time.context);
    generation_init(&call->generation, &call->request, options->settings->tokenizer);
    reply_store_init(&call->store, options->limits);
    reply_writer_init(&call->writer, &call->generation, &call->store,
                      options->settings->mask_max_tokens);
}

void api_call_fini(api_call *call) {
    reply_writer_fini(&call->writer);
    reply_store_fini(&call->store);
    generation_fini(&call->generation);
    api_request_fini(&call->request);
}

/* ---- endings --------------------------------------------------------------------------------- */

static void cancel(api_call *call) {
    if (call->has_ended) return;
    call->options.backend.cancel(call->options.backend.context);
}

static const char *fields_of(int http_status) {
    if (http_status == 503) return "Retry-After: 1\r\n";
    return http_status == 500 ? "x-should-retry: false\r\n" : NULL;
}

void api_answer_failure(const api_output *output, const api_failure *failure) {
    bt_text body;
    bt_text_init(&body, 64 * 1024);
    api_error_write(&body, failure->shape, failure->http_status, failure->text);
    output->begin(output->context, failure->http_status, JSON_TYPE, (int64_t)body.used,
                  fields_of(failure->http_status));
    if (body.used > 0) output->add(output->context, body.bytes, body.used);
    output->end(output->context);
    bt_text_fini(&body);
}

static void answer_failure(api_call *call) {
    api_failure failure = {.http_status = call->finish.http_status,
                           .shape = call->request.kind == API_GENERATE ? API_ERROR_GENERATE
                                                                       : API_ERROR_OPENAI};
    memcpy(failure.text, call->finish.text, sizeof(failure.text));
    call->state = API_CALL_ANSWERED;
    api_answer_failure(&call->options.output, &failure);
}

static void cut(api_call *call) {
    cancel(call);
    call->state = API_CALL_ANSWERED;
    call->options.output.cut(call->options.output.context);
}

static void set_abort(api_call *call, int http_status, const char *text) {
    if (call->finish.kind != API_FINISH_NONE) return;
    call->finish.kind = API_FINISH_ABORT;
    call->finish.http_status = http_status;
    snprintf(call->finish.text, sizeof(call->finish.text), "%s", text);
}

/* A failure of our own in the middle of a request. */
static void fail(api_call *call, bt_status status) {
    if (status == BT_ERR_REQUEST_FULL) {
        char text[PROTO_TEXT_MAX];
        snprintf(text, sizeof(text),
                 "the replies being held need more than --reply-spill-bytes=%llu",
                 (unsigned long long)call->options.limits->spill.bytes_max);
        set_abort(call, 503, text);
    } else {
        set_abort(call, http_status_of(status), bt_status_string(status));
    }
    cancel(call);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Hands over what there is room for. false: the answer was cut. */
static bool write_some(api_call *call) {
    const api_output *output = &call->options.output;
    bt_text *scratch = call->options.scratch;
    while (!reply_writer_is_done(&call->writer)) {
        size_t room = output->room(output->context);
        if (room == 0) break;
        bt_text_clear(scratch);
        bt_status status =
            reply_writer_produce(&call->writer, scratch, room < PORTION ? room : PORTION);
        if (status != BT_OK) {
            cut(call);
            return false;
        }
        output->add(output->context, scratch->bytes, scratch->used);
    }
    return true;
}

static void end_answer(api_call *call) {
    call->state = API_CALL_ANSWERED;
    call->options.output.end(call->options.output.context);
}

static void pump_whole(api_call *call) {
    if (write_some(call) && reply_writer_is_done(&call->writer)) end_answer(call);
}

/* A reply that is sent when it is complete: with its length if it is small. */
static void start_whole(api_call *call) {
    const api_output *output = &call->options.output;
    bt_text *scratch = call->options.scratch;
    const reply_range all = {.row_to = call->generation.count,
                             .text_to = call->generation.text.used,
                             .place = reply_store_begin(&call->store)};
    reply_writer_start(&call->writer, &all);
    if (call->request.kind == API_GENERATE) {
        api_generate_add(call);
    } else {
        api_chat_add(call);
    }
    bt_text_clear(scratch);
    bt_status status = reply_writer_produce(&call->writer, scratch, WHOLE_BYTES);
    if (status != BT_OK) {
        call->finish = (api_finish){0};
        fail(call, status);
        answer_failure(call);
        return;
    }
    bool is_small = reply_writer_is_done(&call->writer);
    call->state = API_CALL_WRITING;
    output->begin(output->context, 200, JSON_TYPE, is_small ? (int64_t)scratch->used : -1, NULL);
    output->add(output->context, scratch->bytes, scratch->used);
    pump_whole(call);
}

/* ---- streams --------------------------------------------------------------------------------- */

static bool is_delta_stream(const api_call *call) {
    return call->request.kind == API_CHAT || call->options.settings->is_incremental;
}

/* With an interval k an event is due after tokens 1, k + 1, 2k + 1, ... */
static bool is_interval_due(uint32_t sent, uint32_t now, uint32_t interval) {
    return ((uint64_t)now + interval - 1) / interval > ((uint64_t)sent + interval - 1) / interval;
}

static bool is_event_due(const api_call *call) {
    if (call->finish.kind != API_FINISH_NONE) return !call->is_last_event;
    if (call->request.kind == API_CHAT && call->chat_stage == API_CHAT_ROLE) return true;
    /* The last token goes out together with the finish reason. */
    if (call->generation.is_complete || generation_is_holding(&call->generation)) return false;
    return is_interval_due(call->sent.row_to, call->generation.count,
                           call->request.stream_interval);
}

/* Begins the next event, with everything there is by now; so not before there is room for it. */
static bool start_event(api_call *call) {
    if (!is_event_due(call)) return false;
    if (call->options.output.room(call->options.output.context) == 0) return false;
    reply_range next = {.row_to = call->generation.count,
                        .text_to = call->generation.text.used,
                        .place = reply_store_begin(&call->store)};
    if (is_delta_stream(call)) {
        next.row_from = call->sent.row_to;
        next.text_from = call->sent.text_to;
        next.place = call->sent.place;
    }
    call->going = next;
    call->going.place = reply_store_end(&call->store);
    if (call->request.kind == API_CHAT) {
        if (!api_chat_add_event(call, &next)) return false;
        /* An event that says nothing of the range leaves it to the next one. */
        if (call->writer.range.row_to != next.row_to) call->going = call->sent;
        return true;
    }
    reply_writer_start(&call->writer, &next);
    bt_text_add_string(reply_writer_literal(&call->writer), "data: ");
    api_generate_add(call);
    bt_text_add_string(reply_writer_literal(&call->writer), "\n\n");
    call->is_last_event = call->finish.kind != API_FINISH_NONE;
    return true;
}

/* The event in the writer is complete. */
static void finish_event(api_call *call) {
    static const char DONE[] = "data: [DONE]\n\n";
    call->sent = call->going;
    if (is_delta_stream(call)) reply_store_drop_before(&call->store, &call->sent.place);
    if (!call->is_last_event) return;
    call->options.output.add(call->options.output.context, DONE, sizeof(DONE) - 1);
    end_answer(call);
}

/* Everything that is due was handed over and there is room: more rows may come. */
static void grant(api_call *call) {
    uint64_t bytes = call->received_bytes - call->granted_bytes;
    if (bytes == 0 || call->has_ended) return;
    if (call->options.output.room(call->options.output.context) == 0) return;
    call->granted_bytes = call->received_bytes;
    call->options.backend.grant(call->options.backend.context, 0, bytes);
}

static void pump_stream(api_call *call) {
    while (call->state == API_CALL_STREAMING) {
        if (reply_writer_is_done(&call->writer) && !start_event(call)) break;
        if (!write_some(call) || !reply_writer_is_done(&call->writer)) return;
        finish_event(call);
    }
    if (call->state == API_CALL_STREAMING) grant(call);
}

static void pump(api_call *call) {
    bool is_over = call->finish.kind != API_FINISH_NONE;
    bool is_failed = call->finish.kind == API_FINISH_ABORT && call->finish.http_status != 0;
    switch (call->state) {
    case API_CALL_WAITING:
        if (is_failed) {
            answer_failure(call);
        } else if (call->request.streams && (is_over || call->generation.count > 0)) {
            call->state = API_CALL_STREAMING;
            call->options.output.begin(call->options.output.context, 200, STREAM_TYPE, -1,
                                       STREAM_FIELDS);
            pump_stream(call);
        } else if (is_over) {
            start_whole(call);
        }
        break;
    case API_CALL_STREAMING: pump_stream(call); break;
    case API_CALL_WRITING: pump_whole(call); break;
    case API_CALL_ANSWERED: break;
    }
}

/* ---- what comes in --------------------------------------------------------------------------- */

static bt_status take_row(api_call *call, const uint8_t *record, const token_row *row,
                          size_t bytes) {
    /* A log-probability that is no number means that the forward pass broke. */
    if (row->has_logprob && isnan(row->token_logprob)) return BT_ERR_WORKER_INTERNAL;
    /* The row first: what a failure sends covers the tokens that were taken, each with its row. */
    bt_status status = call->stores_rows ? reply_store_append(&call->store, record, bytes) : BT_OK;
    if (status != BT_OK) return status;
    return generation_push(&call->generation, row->token);
}

void api_call_on_rows(api_call *call, uint32_t sample, const uint8_t *records, size_t bytes,
                      uint32_t cached_tokens) {
    (void)sample;
    bt_status status = BT_OK;
    size_t at = 0;
    if (call->state == API_CALL_ANSWERED) return;
    call->received_bytes += bytes;
    call->cached_tokens = cached_tokens;
    while (at < bytes && status == BT_OK && call->finish.kind == API_FINISH_NONE) {
        token_row row;
        size_t used;
        status = row_record_decode(records + at, bytes - at,
                                   call->options.settings->mask_max_tokens, &row, &used);
        if (status == BT_OK && used == 0) status = BT_ERR_PEER_PROTOCOL;
        if (status == BT_OK) status = take_row(call, records + at, &row, used);
        at += used;
        if (status == BT_OK && call->generation.is_stopped)
            call->finish.kind = API_FINISH_STOP_STRING;
    }
    if (status != BT_OK) {
        fail(call, status);
    } else if (call->generation.is_stopped) {
        cancel(call);
    }
    pump(call);
}

/* The three sentences that clients look for are kept word for word. */
static void take_failure(api_call *call, const dispatch_end *end) {
    char text[PROTO_TEXT_MAX];
    int http_status = end->http_status >= 400 ? end->http_status : 500;
    if (end->status == BT_ERR_REQUEST_OVERFLOW) {
        snprintf(text, sizeof(text),
                 "Sampling support exceeds --sampling-mask-max-tokens=%u, commonly because of "
                 "cutoff ties. Lower top_k to leave more headroom or increase the server limit.",
                 call->options.settings->mask_max_tokens);
        set_abort(call, 400, text);
        return;
    }
    if (end->status == BT_ERR_REQUEST_CAPTURE) {
        bool is_known = strstr(end->text, "captured sampling support") != NULL;
        set_abort(call, 500,
                  is_known ? end->text
                           : "The sampling backend selected a token outside its captured sampling "
                             "support.");
        return;
    }
    if (end->status == BT_ERR_REQUEST_CANCELLED) {
        set_abort(call, 0, "Aborted");
        return;
    }
    set_abort(call, http_status, end->text[0] != 0 ? end->text : bt_status_string(end->status));
}

static void take_success(api_call *call, const dispatch_end *end) {
    bt_status status = generation_finish(&call->generation);
    if (status != BT_OK) {
        fail(call, status);
    } else if (call->generation.is_stopped) {
        call->finish.kind = API_FINISH_STOP_STRING;
    } else if (end->rows_total != call->generation.count) {
        set_abort(call, 500, "rows of the reply were lost");
    } else if (end->finish == PROTO_FINISH_STOP) {
        call->finish.kind = API_FINISH_STOP_ID;
        call->finish.matched_id = end->matched_id;
    } else {
        call->finish.kind = API_FINISH_LENGTH;
    }
}

void api_call_on_end(api_call *call, const dispatch_end *end) {
    call->has_ended = true;
    if (call->state == API_CALL_ANSWERED) return;
    call->cached_tokens = end->cached_tokens;
    if (call->finish.kind == API_FINISH_NONE) {
        if (end->status == BT_OK) {
            take_success(call, end);
        } else {
            take_failure(call, end);
        }
    }
    if (generation_finish(&call->generation) != BT_OK) fail(call, BT_ERR_WORKER_MEMORY);
    pump(call);
}

void api_call_on_room(api_call *call) {
    pump(call);
}

void api_call_on_gone(api_call *call) {
    if (call->state != API_CALL_ANSWERED) cancel(call);
    call->state = API_CALL_ANSWERED;
}

void api_call_on_prompt_logprobs(api_call *call, const dispatch_prompt_logprobs *logprobs) {
    (void)call;
    (void)logprobs;
}

void api_call_on_sample_end(api_call *call, uint32_t sample, const dispatch_end *end) {
    (void)call;
    (void)sample;
    (void)end;
}
