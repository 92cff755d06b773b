/* The states of one answer and the order in which its parts go out: the head, events or the whole
 * reply, the end. One pump() decides from the state alone what to do next, so that a row, the end
 * of a sample or of an item, room in the output and a client that left may come in any order.
 *
 * The output gets begin once and then exactly one end or cut. The backend gets at most what was
 * received as credit, at most one cancel of each sample and of each item, and none after the item's
 * end. Among several samples, of one item or of many, one failure is that sample's alone; only when
 * all have failed does the answer as a whole. What happens to a sample is in api_sample.c, how an
 * endpoint words its reply in api_generate.c and api_openai.c, the formatting of rows in
 * reply_writer.c.
 *
 * A row costs the same in a call of one sample and of thousands: nothing here that a row comes by
 * looks at all samples. */
#include "router/api_call.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/api_format.h"

enum {
    /* Of a text made at once; with what it may go beyond it stays within API_TEXT_BLOCK_BYTES. */
    PORTION = 96 * 1024,
    WHOLE_BYTES = 64 * 1024, /* replies up to here are sent with a Content-Length */
};

static const char JSON_TYPE[] = "application/json";
static const char TENSORS_TYPE[] = "application/x-safetensors";
static const char STREAM_TYPE[] = "text/event-stream";
static const char STREAM_FIELDS[] = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";

static uint32_t count_samples(const api_batch *batch) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        count += batch->items[i].generation.samples;
    }
    return count;
}

static void free_arrays(api_call *call) {
    bt_free(call->items);
    bt_free(call->samples);
    sample_set_fini(&call->due);
    sample_set_fini(&call->owed);
}

static void init_item(api_call *call, uint32_t index, uint32_t first_sample) {
    const api_request *request = &call->batch.items[index];
    api_item *item = &call->items[index];
    item->request = request;
    item->first_sample = first_sample;
    item->sample_count = request->generation.samples;
    item->stores_rows = request->wants_logprob || request->generation.mask_mode != ROW_MASK_OFF;
    prompt_logprobs_init(&item->prompt, request, &call->spill);
    for (uint32_t i = 0; i < item->sample_count; i++) {
        api_sample_init(call, first_sample + i, index);
    }
}

bt_status api_call_init(api_call *call, const api_call_options *options, api_batch *batch) {
    const uint32_t count = count_samples(batch);
    memset(call, 0, sizeof(*call));
    call->items = bt_calloc(batch->count, sizeof(*call->items));
    call->samples = bt_calloc(count, sizeof(*call->samples));
    const bool is_good = call->items != NULL && call->samples != NULL &&
                         sample_set_init(&call->due, count) == BT_OK &&
                         sample_set_init(&call->owed, count) == BT_OK;
    if (!is_good) {
        free_arrays(call);
        return BT_ERR_WORKER_MEMORY;
    }
    call->options = *options;
    reply_spill_init(&call->spill, options->limits);
    call->batch = *batch;
    memset(batch, 0, sizeof(*batch));
    call->request = &call->batch.items[0];
    call->sample_count = count;
    call->created_s = (int64_t)options->time.wall_seconds(options->time.context);
    uint32_t first_sample = 0;
    for (uint32_t i = 0; i < call->batch.count; i++) {
        init_item(call, i, first_sample);
        first_sample += call->items[i].sample_count;
    }
    call->current = count - 1; /* the next one is the first */
    reply_writer_init(&call->writer, options->settings->tokenizer,
                      options->settings->mask_max_tokens);
    return BT_OK;
}

void api_call_fini(api_call *call) {
    reply_writer_fini(&call->writer);
    for (uint32_t i = 0; i < call->batch.count; i++) {
        prompt_logprobs_fini(&call->items[i].prompt);
    }
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_sample_fini(&call->samples[i]);
    }
    reply_spill_fini(&call->spill);
    free_arrays(call);
    api_batch_fini(&call->batch);
}

uint32_t api_call_tokens(const api_call *call) {
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        tokens += call->samples[i].generation.count;
    }
    return tokens;
}

/* What of the prompt the reply has to say is known, or never will be. */
static bool is_item_ready(const api_item *item) {
    return item->has_ended || prompt_logprobs_is_complete(&item->prompt);
}

static bool are_items_ready(const api_call *call) {
    for (uint32_t i = 0; i < call->batch.count; i++) {
        if (!is_item_ready(&call->items[i])) return false;
    }
    return true;
}

/* Something happened to a sample of which an event may have to tell. */
static void touch_sample(api_call *call, uint32_t sample) {
    sample_set_add(&call->due, sample);
}

static void touch_item(api_call *call, const api_item *item) {
    for (uint32_t i = 0; i < item->sample_count; i++) {
        touch_sample(call, item->first_sample + i);
    }
}

/* ---- endings --------------------------------------------------------------------------------- */

static void cancel_item(api_call *call, uint32_t index) {
    api_item *item = &call->items[index];
    if (item->has_ended || item->is_cancelled) return;
    item->is_cancelled = true;
    call->options.backend.cancel(call->options.backend.context, index);
}

static void cancel(api_call *call) {
    for (uint32_t i = 0; i < call->batch.count; i++) {
        cancel_item(call, i);
    }
}

/* All samples of the item are over; and all of them failed. */
static bool is_item_over(const api_call *call, const api_item *item, bool *is_failed_out) {
    *is_failed_out = true;
    for (uint32_t i = 0; i < item->sample_count; i++) {
        const api_sample *s = &call->samples[item->first_sample + i];
        if (!api_sample_is_over(s)) return false;
        *is_failed_out = *is_failed_out && api_sample_is_failed(s);
    }
    return true;
}

/* Tells the backend which samples were ended here; of an item's last ones it hears as the item. But
 * not before the prompt's log-probabilities are there, which end with the item. */
static void settle_cancels(api_call *call, uint32_t index) {
    const api_backend *backend = &call->options.backend;
    api_item *item = &call->items[index];
    bool is_failed;
    if (!item->wants_cancel || item->has_ended || item->is_cancelled) return;
    const bool is_over = is_item_over(call, item, &is_failed);
    const bool needs_prompt = !prompt_logprobs_is_complete(&item->prompt);
    if (needs_prompt && !(is_over && is_failed)) return;
    item->wants_cancel = false;
    for (uint32_t i = 0; i < item->sample_count; i++) {
        api_sample *s = &call->samples[item->first_sample + i];
        if (!s->wants_cancel || s->has_ended) continue;
        s->wants_cancel = false;
        if (is_over) {
            cancel_item(call, index);
            return;
        }
        backend->cancel_sample(backend->context, index, i);
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

/* Nothing is told of them any more: others have the room now, not when the workers have answered
 * the cancels. */
static void drop_rows(api_call *call) {
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        reply_store_fini(&call->samples[i].store);
    }
    for (uint32_t i = 0; i < call->batch.count; i++) {
        prompt_logprobs_fini(&call->items[i].prompt);
    }
    reply_spill_fini(&call->spill);
}

static void answer_failure(api_call *call, const api_finish *finish) {
    api_failure failure = {.http_status = finish->http_status,
                           .shape = call->request->kind == API_GENERATE ? API_ERROR_GENERATE
                                                                        : API_ERROR_OPENAI};
    memcpy(failure.text, finish->text, sizeof(failure.text));
    call->state = API_CALL_ANSWERED;
    drop_rows(call);
    api_answer_failure(&call->options.output, &failure);
}

static void cut(api_call *call) {
    cancel(call);
    call->state = API_CALL_ANSWERED;
    drop_rows(call);
    call->options.output.cut(call->options.output.context);
}

static void fail_item(api_call *call, uint32_t index, bt_status status) {
    const api_item *item = &call->items[index];
    for (uint32_t i = 0; i < item->sample_count; i++) {
        api_sample *s = &call->samples[item->first_sample + i];
        if (!api_sample_is_over(s)) api_sample_fail(call, s, status);
    }
    touch_item(call, item);
    settle_cancels(call, index);
}

/* What one sample or item does wrong ends that one; what this process lacks (memory, room in the
 * file) ends them all. */
static bool is_ours(bt_status status) {
    return status == BT_ERR_REQUEST_FULL || status == BT_ERR_WORKER_MEMORY ||
           status == BT_ERR_WORKER_IO;
}

static void fail_all(api_call *call, bt_status status) {
    for (uint32_t i = 0; i < call->batch.count; i++) {
        fail_item(call, i, status);
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
        output->give(output->context, scratch);
    }
    return true;
}

static void end_answer(api_call *call) {
    call->state = API_CALL_ANSWERED;
    call->options.output.end(call->options.output.context);
}

static void pump_whole(api_call *call) {
    do {
        if (!write_some(call) || !reply_writer_is_done(&call->writer)) return;
    } while (api_whole_next(call));
    end_answer(call);
}

/* The beginning of a whole reply; *is_all_out: there is nothing more of it. */
static bt_status start_portion(api_call *call, bt_text *scratch, bool *is_all_out) {
    bt_status status = BT_OK;
    *is_all_out = false;
    while (status == BT_OK && scratch->used < WHOLE_BYTES && !*is_all_out) {
        if (reply_writer_is_done(&call->writer)) *is_all_out = !api_whole_next(call);
        if (!*is_all_out) status = reply_writer_produce(&call->writer, scratch, WHOLE_BYTES);
    }
    return status;
}

static void refuse_whole(api_call *call, bt_status status) {
    api_sample *s = &call->samples[0];
    s->finish = (api_finish){0};
    api_sample_fail(call, s, status);
    cancel(call);
    answer_failure(call, &s->finish);
}

/* A reply that is sent when it is complete: with its length if that is known, or it is small. */
static void pump_measuring(api_call *call) {
    const api_output *output = &call->options.output;
    const bool is_tensors = call->request->wants_safetensors;
    bt_text *scratch = call->options.scratch;
    bool is_measured;
    bool is_all = false;
    bt_status status = api_whole_measure(call, &is_measured);
    if (status == BT_OK && !is_measured) {
        output->wake(output->context);
        return;
    }
    bt_text_clear(scratch);
    if (status == BT_OK) status = start_portion(call, scratch, &is_all);
    if (status != BT_OK) {
        refuse_whole(call, status);
        return;
    }
    const int64_t bytes = is_all ? (int64_t)scratch->used : call->whole.bytes;
    call->state = API_CALL_WRITING;
    output->begin(output->context, 200, is_tensors ? TENSORS_TYPE : JSON_TYPE, bytes, NULL);
    output->give(output->context, scratch);
    pump_whole(call);
}

static void start_whole(api_call *call) {
    api_whole_begin(call);
    call->state = API_CALL_MEASURING;
    pump_measuring(call);
}

/* ---- streams --------------------------------------------------------------------------------- */

static bool is_delta_stream(const api_call *call) {
    return call->request->kind != API_GENERATE || call->options.settings->is_incremental;
}

static bool is_event_due(const api_call *call, uint32_t sample) {
    const api_sample *s = &call->samples[sample];
    const api_request *request = api_request_of(call, sample);
    if (!is_item_ready(api_item_of(call, sample))) return false;
    if (api_sample_is_over(s)) return !s->is_said;
    /* A chat begins with the role. */
    if (request->kind == API_CHAT && s->stage == API_STAGE_BEGIN) return s->generation.count > 0;
    return s->due.row_to > s->sent.row_to;
}

/* Begins the next event of a sample, with everything up to where one is due. */
static bool start_event(api_call *call, uint32_t sample) {
    api_sample *s = &call->samples[sample];
    if (!is_event_due(call, sample)) return false;
    reply_range next = api_sample_is_over(s) ? api_sample_range(s) : s->due;
    if (is_delta_stream(call)) {
        next.row_from = s->sent.row_to;
        next.text_from = s->sent.text_to;
        next.entries_from = s->sent.entries_to;
        next.place = s->sent.place;
    }
    api_item_of(call, sample)->has_begun = true;
    if (call->request->kind != API_GENERATE) return api_openai_add_event(call, sample, &next);
    s->going = next;
    s->going.place = next.place_to;
    api_start_writer(call, sample, &next);
    bt_text_add_string(reply_writer_literal(&call->writer), "data: ");
    api_generate_add(call, sample);
    bt_text_add_string(reply_writer_literal(&call->writer), "\n\n");
    s->is_said = api_sample_is_over(s);
    return true;
}

/* Begins the next event that is due, the samples taking turns; not before there is room for it. */
static bool start_next_event(api_call *call) {
    uint32_t sample;
    if (call->options.output.room(call->options.output.context) == 0) return false;
    while ((sample = sample_set_next(&call->due, call->current)) != SAMPLE_SET_NONE) {
        if (start_event(call, sample)) {
            call->current = sample;
            return true;
        }
        sample_set_remove(&call->due, sample); /* until something happens to it */
    }
    return call->request->kind != API_GENERATE && api_openai_add_closing(call);
}

static bool is_all_said(api_call *call) {
    if (call->request->kind != API_GENERATE) return call->is_closed;
    while (call->said_count < call->sample_count && call->samples[call->said_count].is_said)
        call->said_count++;
    return call->said_count == call->sample_count;
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
    uint32_t sample = 0;
    for (; (sample = sample_set_from(&call->owed, sample)) != SAMPLE_SET_NONE; sample++) {
        api_sample *s = &call->samples[sample];
        const api_item *item = &call->items[s->item];
        if (!is_item_ready(item)) continue; /* its rows are still held */
        sample_set_remove(&call->owed, sample);
        const uint64_t bytes = s->received_bytes - s->granted_bytes;
        if (bytes == 0 || s->has_ended || item->has_ended) continue;
        s->granted_bytes = s->received_bytes;
        backend->grant(backend->context, s->item, sample - item->first_sample, bytes);
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

static void start_stream(api_call *call) {
    call->state = API_CALL_STREAMING;
    call->options.output.begin(call->options.output.context, 200, STREAM_TYPE, -1, STREAM_FIELDS);
    pump_stream(call);
}

/* ---- the states ------------------------------------------------------------------------------ */

/* A token of an item of which everything is there that comes before it. */
static bool has_tokens(const api_call *call) {
    for (uint32_t i = 0; i < call->batch.count; i++) {
        if (call->items[i].has_tokens && is_item_ready(&call->items[i])) return true;
    }
    return false;
}

static void pump_waiting(api_call *call) {
    const bool is_over = api_samples_are_over(call);
    if (is_over && is_refused(call)) {
        answer_failure(call, api_samples_worst(call));
    } else if (call->request->streams && has_tokens(call)) {
        start_stream(call);
    } else if (!is_over || !are_items_ready(call)) {
        return;
    } else if (call->request->streams) {
        start_stream(call);
    } else {
        start_whole(call);
    }
}

static void pump(api_call *call) {
    switch (call->state) {
    case API_CALL_WAITING: pump_waiting(call); break;
    case API_CALL_STREAMING: pump_stream(call); break;
    case API_CALL_MEASURING: pump_measuring(call); break;
    case API_CALL_WRITING: pump_whole(call); break;
    case API_CALL_ANSWERED: break;
    }
}

/* ---- what comes in --------------------------------------------------------------------------- */

/* Nothing that comes changes what the reply says: all samples are over. */
static bool is_settled(const api_call *call) {
    return call->state != API_CALL_WAITING && call->state != API_CALL_STREAMING;
}

void api_call_on_rows(api_call *call, uint32_t index, const dispatch_rows *rows) {
    BT_ASSERT(index < call->batch.count);
    api_item *item = &call->items[index];
    BT_ASSERT(rows->sample < item->sample_count);
    const uint32_t sample = item->first_sample + rows->sample;
    api_sample *s = &call->samples[sample];
    if (is_settled(call)) return;
    s->received_bytes += rows->bytes;
    item->cached_tokens = rows->cached_tokens;
    bt_status status = api_sample_take_rows(call, s, rows);
    if (status != BT_OK) api_sample_fail(call, s, status);
    item->has_tokens = item->has_tokens || s->generation.count > 0;
    touch_sample(call, sample);
    sample_set_add(&call->owed, sample);
    if (is_ours(status)) {
        fail_all(call, status);
    } else {
        settle_cancels(call, index);
    }
    pump(call);
}

/* A reply without the log-probabilities of the prompt that it should have is none, whatever its
 * samples say. */
static void drop_finishes(api_call *call, const api_item *item) {
    for (uint32_t i = 0; i < item->sample_count; i++) {
        api_finish *finish = &call->samples[item->first_sample + i].finish;
        finish->is_kept = false;
        if (finish->kind != API_FINISH_ABORT) *finish = (api_finish){0};
    }
}

/* What comes again after a retry is taken in place of what was there; but not once events of the
 * item went out or a sample is over, which had them complete. */
void api_call_on_prompt_logprobs(api_call *call, uint32_t index,
                                 const dispatch_prompt_logprobs *logprobs) {
    BT_ASSERT(index < call->batch.count);
    api_item *item = &call->items[index];
    const bool is_pending =
        call->state == API_CALL_WAITING || (call->state == API_CALL_STREAMING && !item->has_begun);
    if (!is_pending || api_item_keeps_prompt(call, item)) return;
    bt_status status = prompt_logprobs_take(&item->prompt, logprobs);
    if (status != BT_OK) {
        drop_finishes(call, item);
        fail_item(call, index, status);
        if (is_ours(status)) fail_all(call, status);
    } else if (is_item_ready(item)) {
        touch_item(call, item);
        settle_cancels(call, index);
    }
    pump(call);
}

void api_call_on_sample_end(api_call *call, uint32_t index, uint32_t sample_of_item,
                            const dispatch_end *end) {
    BT_ASSERT(index < call->batch.count);
    api_item *item = &call->items[index];
    BT_ASSERT(sample_of_item < item->sample_count);
    const uint32_t sample = item->first_sample + sample_of_item;
    api_sample *s = &call->samples[sample];
    BT_ASSERT(!s->has_ended);
    s->has_ended = true;
    if (is_settled(call)) return;
    item->cached_tokens = end->cached_tokens;
    api_sample_take_end(call, s, end);
    touch_sample(call, sample);
    settle_cancels(call, index);
    pump(call);
}

/* Of a sample that was told no end: a single one ends as the item does, and what the item failed of
 * is what the samples fail of; but among several an end was lost. */
static void end_as_item(api_call *call, const api_item *item, api_sample *s,
                        const dispatch_end *end) {
    if (end->status == BT_OK && item->sample_count > 1)
        api_sample_abort(s, 500, "the end of a sample was lost");
    api_sample_take_end(call, s, end);
}

static void abort_without_prompt(api_call *call, const api_item *item) {
    drop_finishes(call, item);
    for (uint32_t i = 0; i < item->sample_count; i++) {
        api_sample_abort(&call->samples[item->first_sample + i], 500,
                         "log-probabilities of the prompt were lost");
    }
}

void api_call_on_end(api_call *call, uint32_t index, const dispatch_end *end) {
    BT_ASSERT(index < call->batch.count);
    api_item *item = &call->items[index];
    BT_ASSERT(!item->has_ended);
    item->has_ended = true;
    call->ended_count++;
    call->has_ended = call->ended_count == call->batch.count;
    if (is_settled(call)) return;
    item->cached_tokens = end->cached_tokens;
    for (uint32_t i = 0; i < item->sample_count; i++) {
        api_sample *s = &call->samples[item->first_sample + i];
        if (!s->has_ended) end_as_item(call, item, s, end);
    }
    /* What was aborted before they were there stays as it ended. */
    if (!prompt_logprobs_is_complete(&item->prompt)) abort_without_prompt(call, item);
    touch_item(call, item);
    pump(call);
}

void api_call_on_room(api_call *call) {
    pump(call);
}

void api_call_on_gone(api_call *call) {
    cancel(call);
    call->state = API_CALL_ANSWERED;
    drop_rows(call);
}
