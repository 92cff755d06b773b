/* The states of one answer and the order in which its parts go out: the head, events or the whole
 * reply, the end. One pump() decides from the state alone what to do next, so that a row, the end
 * of a sample or of the request, room in the output and a client that left may come in any order.
 *
 * The output gets begin once and then exactly one end or cut. The backend gets at most what was
 * received as credit, at most one cancel of each sample and of the request, and none after the end.
 * Of a request with several samples one failure is that sample's alone; only when all have failed
 * does the answer as a whole. What happens to a sample is in api_sample.c, how an endpoint words
 * its reply in api_generate.c and api_chat.c, the formatting of rows in reply_writer.c. */
#include "router/api_call.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/api_format.h"

enum {
    PORTION = 64 * 1024,     /* of JSON made at once */
    WHOLE_BYTES = 64 * 1024, /* replies up to here are sent with a Content-Length */
};

static const char JSON_TYPE[] = "application/json";
static const char STREAM_TYPE[] = "text/event-stream";
static const char STREAM_FIELDS[] = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";

bt_status api_call_init(api_call *call, const api_call_options *options, api_request *request) {
    const uint32_t count = request->generation.samples;
    memset(call, 0, sizeof(*call));
    call->samples = bt_calloc(count, sizeof(*call->samples));
    if (call->samples == NULL) return BT_ERR_WORKER_MEMORY;
    call->options = *options;
    call->request = *request;
    memset(request, 0, sizeof(*request));
    call->stores_rows =
        call->request.wants_logprob || call->request.generation.mask_mode != ROW_MASK_OFF;
    call->created_s = (int64_t)options->time.wall_seconds(options->time.context);
    for (uint32_t i = 0; i < count; i++) {
        api_sample_init(call, i);
    }
    call->current = count - 1; /* the next one is the first */
    prompt_logprobs_init(&call->prompt, &call->request, options->limits);
    reply_writer_init(&call->writer, &call->request, options->settings->tokenizer, &call->prompt,
                      options->settings->mask_max_tokens);
    return BT_OK;
}

void api_call_fini(api_call *call) {
    reply_writer_fini(&call->writer);
    prompt_logprobs_fini(&call->prompt);
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_sample_fini(&call->samples[i]);
    }
    bt_free(call->samples);
    api_request_fini(&call->request);
}

uint32_t api_call_tokens(const api_call *call) {
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        tokens += call->samples[i].generation.count;
    }
    return tokens;
}

/* ---- endings --------------------------------------------------------------------------------- */

static void cancel(api_call *call) {
    if (call->has_ended || call->is_cancelled) return;
    call->is_cancelled = true;
    call->options.backend.cancel(call->options.backend.context);
}

/* Tells the backend which samples were ended here; of the last ones it hears as the request. But
 * not before the prompt's log-probabilities are there, which end with the request. */
static void settle_cancels(api_call *call) {
    const api_backend *backend = &call->options.backend;
    const bool is_over = api_samples_are_over(call);
    const bool needs_prompt = !prompt_logprobs_is_complete(&call->prompt);
    if (call->has_ended || call->is_cancelled) return;
    if (needs_prompt && !(is_over && api_samples_are_failed(call))) return;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_sample *s = &call->samples[i];
        if (!s->wants_cancel || s->has_ended) continue;
        s->wants_cancel = false;
        if (is_over) {
            cancel(call);
            return;
        }
        backend->cancel_sample(backend->context, i);
    }
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

static void answer_failure(api_call *call, const api_finish *finish) {
    api_failure failure = {.http_status = finish->http_status,
                           .shape = call->request.kind == API_GENERATE ? API_ERROR_GENERATE
                                                                       : API_ERROR_OPENAI};
    memcpy(failure.text, finish->text, sizeof(failure.text));
    call->state = API_CALL_ANSWERED;
    api_answer_failure(&call->options.output, &failure);
}

static void cut(api_call *call) {
    cancel(call);
    call->state = API_CALL_ANSWERED;
    call->options.output.cut(call->options.output.context);
}

/* What ends every sample that is not over: no memory, no room in the file. */
static void fail_all(api_call *call, bt_status status) {
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_sample *s = &call->samples[i];
        if (!api_sample_is_over(s)) api_sample_fail(call, s, status);
    }
}

/* All failed alike, or before any token: the client gets the status. When some had tokens and the
 * failures differ, each sample tells its own. */
static bool is_refused(const api_call *call) {
    if (!api_samples_are_failed(call)) return false;
    const int http_status = call->samples[0].finish.http_status;
    bool is_alike = true;
    for (uint32_t i = 1; i < api_samples_of(call); i++) {
        is_alike = is_alike && call->samples[i].finish.http_status == http_status;
    }
    return is_alike || api_call_tokens(call) == 0;
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

/* Begins the next sample's part of a whole reply; false: that was the last one. */
static bool start_part(api_call *call) {
    const uint32_t next = call->current + 1;
    if (next == api_samples_of(call)) return false;
    api_sample *s = &call->samples[next];
    if (next > 0) reply_store_fini(&call->samples[next - 1].store); /* written */
    call->current = next;
    const reply_range all = {.row_to = s->generation.count,
                             .text_to = s->generation.text.used,
                             .place = reply_store_begin(&s->store)};
    reply_writer_start(&call->writer, &s->generation, &s->store, &all);
    if (call->request.kind == API_CHAT) {
        api_chat_add(call, next);
        return true;
    }
    const bool is_list = api_samples_of(call) > 1;
    const bool is_last = next + 1 == api_samples_of(call);
    if (is_list) bt_text_add(reply_writer_literal(&call->writer), next == 0 ? "[" : ",", 1);
    api_generate_add(call, next);
    if (is_list && is_last) bt_text_add(reply_writer_literal(&call->writer), "]", 1);
    return true;
}

static void pump_whole(api_call *call) {
    do {
        if (!write_some(call) || !reply_writer_is_done(&call->writer)) return;
    } while (start_part(call));
    end_answer(call);
}

/* The beginning of a whole reply; *is_all_out: there is nothing more of it. */
static bt_status start_portion(api_call *call, bt_text *scratch, bool *is_all_out) {
    bt_status status = BT_OK;
    *is_all_out = false;
    while (status == BT_OK && scratch->used < WHOLE_BYTES && !*is_all_out) {
        if (reply_writer_is_done(&call->writer)) *is_all_out = !start_part(call);
        if (!*is_all_out) status = reply_writer_produce(&call->writer, scratch, WHOLE_BYTES);
    }
    return status;
}

/* A reply that is sent when it is complete: with its length if it is small. */
static void start_whole(api_call *call) {
    const api_output *output = &call->options.output;
    bt_text *scratch = call->options.scratch;
    bool is_all;
    call->current = UINT32_MAX; /* before the first */
    bt_text_clear(scratch);
    bt_status status = start_portion(call, scratch, &is_all);
    if (status != BT_OK) {
        api_sample *s = &call->samples[0];
        s->finish = (api_finish){0};
        api_sample_fail(call, s, status);
        cancel(call);
        answer_failure(call, &s->finish);
        return;
    }
    call->state = API_CALL_WRITING;
    output->begin(output->context, 200, JSON_TYPE, is_all ? (int64_t)scratch->used : -1, NULL);
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

static bool is_event_due(const api_call *call, const api_sample *s) {
    if (api_sample_is_over(s)) return !s->is_said;
    /* The last token goes out together with the finish reason. But a chat begins with the role. */
    bool is_begun = call->request.kind == API_GENERATE || s->chat_stage != API_CHAT_ROLE;
    if (is_begun && (s->generation.is_complete || generation_is_holding(&s->generation)))
        return false;
    return is_interval_due(s->sent.row_to, s->generation.count, call->request.stream_interval);
}

/* Begins the next event of a sample, with everything there is by now. */
static bool start_event(api_call *call, uint32_t sample) {
    api_sample *s = &call->samples[sample];
    if (!is_event_due(call, s)) return false;
    reply_range next = {.row_to = s->generation.count,
                        .text_to = s->generation.text.used,
                        .place = reply_store_begin(&s->store)};
    if (is_delta_stream(call)) {
        next.row_from = s->sent.row_to;
        next.text_from = s->sent.text_to;
        next.place = s->sent.place;
    }
    if (call->request.kind == API_CHAT) return api_chat_add_event(call, sample, &next);
    s->going = next;
    s->going.place = reply_store_end(&s->store);
    reply_writer_start(&call->writer, &s->generation, &s->store, &next);
    bt_text_add_string(reply_writer_literal(&call->writer), "data: ");
    api_generate_add(call, sample);
    bt_text_add_string(reply_writer_literal(&call->writer), "\n\n");
    s->is_said = api_sample_is_over(s);
    return true;
}

/* Begins the next event that is due, the samples taking turns; not before there is room for it. */
static bool start_next_event(api_call *call) {
    const uint32_t count = api_samples_of(call);
    if (call->options.output.room(call->options.output.context) == 0) return false;
    for (uint32_t i = 1; i <= count; i++) {
        const uint32_t sample = (call->current + i) % count;
        if (!start_event(call, sample)) continue;
        call->current = sample;
        return true;
    }
    return call->request.kind == API_CHAT && api_chat_add_closing(call);
}

static bool is_all_said(const api_call *call) {
    if (call->request.kind == API_CHAT) return call->is_closed;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        if (!call->samples[i].is_said) return false;
    }
    return true;
}

/* The event in the writer is complete. */
static void finish_event(api_call *call) {
    static const char DONE[] = "data: [DONE]\n\n";
    api_sample *s = &call->samples[call->current];
    s->sent = s->going;
    if (is_delta_stream(call)) reply_store_drop_before(&s->store, &s->sent.place);
    if (api_samples_of(call) > 1) reply_store_rest(&s->store);
    if (!is_all_said(call)) return;
    call->options.output.add(call->options.output.context, DONE, sizeof(DONE) - 1);
    end_answer(call);
}

/* Everything that is due was handed over and there is room: more rows may come. */
static void grant(api_call *call) {
    const api_backend *backend = &call->options.backend;
    if (call->has_ended || call->options.output.room(call->options.output.context) == 0) return;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_sample *s = &call->samples[i];
        uint64_t bytes = s->received_bytes - s->granted_bytes;
        if (bytes == 0 || s->has_ended) continue;
        s->granted_bytes = s->received_bytes;
        backend->grant(backend->context, i, bytes);
    }
}

static void pump_stream(api_call *call) {
    while (call->state == API_CALL_STREAMING) {
        if (reply_writer_is_done(&call->writer) && !start_next_event(call)) break;
        if (!write_some(call) || !reply_writer_is_done(&call->writer)) return;
        finish_event(call);
    }
    if (call->state == API_CALL_STREAMING) grant(call);
}

/* ---- the states ------------------------------------------------------------------------------ */

static void pump_waiting(api_call *call) {
    const bool is_over = api_samples_are_over(call);
    if (is_over && is_refused(call)) {
        answer_failure(call, api_samples_worst(call));
    } else if (!prompt_logprobs_is_complete(&call->prompt) && !call->has_ended) {
        return;
    } else if (call->request.streams && (is_over || api_call_tokens(call) > 0)) {
        call->state = API_CALL_STREAMING;
        call->options.output.begin(call->options.output.context, 200, STREAM_TYPE, -1,
                                   STREAM_FIELDS);
        pump_stream(call);
    } else if (is_over) {
        start_whole(call);
    }
}

static void pump(api_call *call) {
    settle_cancels(call);
    switch (call->state) {
    case API_CALL_WAITING: pump_waiting(call); break;
    case API_CALL_STREAMING: pump_stream(call); break;
    case API_CALL_WRITING: pump_whole(call); break;
    case API_CALL_ANSWERED: break;
    }
}

/* ---- what comes in --------------------------------------------------------------------------- */

/* What one sample does wrong ends that one; what this process lacks ends them all. */
static bool is_ours(bt_status status) {
    return status == BT_ERR_REQUEST_FULL || status == BT_ERR_WORKER_MEMORY ||
           status == BT_ERR_WORKER_IO;
}

void api_call_on_rows(api_call *call, uint32_t sample, const uint8_t *records, size_t bytes,
                      uint32_t cached_tokens) {
    BT_ASSERT(sample < api_samples_of(call));
    api_sample *s = &call->samples[sample];
    if (call->state == API_CALL_ANSWERED) return;
    s->received_bytes += bytes;
    call->cached_tokens = cached_tokens;
    bt_status status = api_sample_take_rows(call, s, records, bytes);
    if (status != BT_OK) api_sample_fail(call, s, status);
    if (is_ours(status)) fail_all(call, status);
    pump(call);
}

/* A reply without the log-probabilities of the prompt that it should have is none, whatever its
 * samples say. */
static void drop_finishes(api_call *call) {
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_finish *finish = &call->samples[i].finish;
        if (finish->kind != API_FINISH_ABORT) *finish = (api_finish){0};
    }
}

/* Once events went out they are complete; what comes again after a retry was told before. */
void api_call_on_prompt_logprobs(api_call *call, const dispatch_prompt_logprobs *logprobs) {
    if (call->state != API_CALL_WAITING) return;
    bt_status status = prompt_logprobs_take(&call->prompt, logprobs);
    if (status != BT_OK) {
        drop_finishes(call);
        fail_all(call, status);
    }
    pump(call);
}

void api_call_on_sample_end(api_call *call, uint32_t sample, const dispatch_end *end) {
    BT_ASSERT(sample < api_samples_of(call));
    api_sample *s = &call->samples[sample];
    BT_ASSERT(!s->has_ended);
    s->has_ended = true;
    if (call->state == API_CALL_ANSWERED) return;
    call->cached_tokens = end->cached_tokens;
    api_sample_take_end(call, s, end);
    pump(call);
}

/* Of a sample that was told no end: a single one ends as the request does, and what the request
 * failed of is what the samples fail of; but among several an end was lost. */
static void end_as_request(api_call *call, api_sample *s, const dispatch_end *end) {
    if (end->status == BT_OK && api_samples_of(call) > 1)
        api_sample_abort(s, 500, "the end of a sample was lost");
    api_sample_take_end(call, s, end);
}

void api_call_on_end(api_call *call, const dispatch_end *end) {
    call->has_ended = true;
    if (call->state == API_CALL_ANSWERED) return;
    call->cached_tokens = end->cached_tokens;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_sample *s = &call->samples[i];
        if (!s->has_ended) end_as_request(call, s, end);
    }
    if (call->state == API_CALL_WAITING && !prompt_logprobs_is_complete(&call->prompt)) {
        drop_finishes(call);
        for (uint32_t i = 0; i < api_samples_of(call); i++) {
            api_sample_abort(&call->samples[i], 500, "log-probabilities of the prompt were lost");
        }
    }
    pump(call);
}

void api_call_on_room(api_call *call) {
    pump(call);
}

void api_call_on_gone(api_call *call) {
    if (call->state != API_CALL_ANSWERED) cancel(call);
    call->state = API_CALL_ANSWERED;
}
