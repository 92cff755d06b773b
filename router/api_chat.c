/* Replies of /v1/chat/completions, whole and streamed. The order of a stream: of each sample the
 * role and its deltas, those of different samples mixed; when all samples are over the finish of
 * each, then usage when it was asked for, or in place of all that one error when all have failed;
 * the caller adds [DONE]. */
#include <string.h>

#include "router/api_format.h"

static void add_quoted(bt_text *out, const char *text) {
    bt_json_add_string(out, text, strlen(text));
}

/* {"id":...,"object":...,"created":...,"model":... */
static void add_head(const api_call *call, bt_text *out, const char *object) {
    bt_text_add_string(out, "{\"id\":");
    add_quoted(out, call->request->rid);
    bt_text_add_format(out, ",\"object\":\"%s\",\"created\":%lld,\"model\":", object,
                       (long long)call->created_s);
    add_quoted(out, call->request->model);
}

/* "finish_reason":...,"matched_stop":... */
static void add_finish(const api_call *call, uint32_t sample, bt_text *out) {
    const api_request *request = api_request_of(call, sample);
    const api_sample *s = &call->samples[sample];
    uint32_t index = s->generation.stop_index;
    bt_text_add_string(out, "\"finish_reason\":");
    switch (s->finish.kind) {
    case API_FINISH_NONE: bt_text_add_string(out, "null,\"matched_stop\":null"); break;
    case API_FINISH_STOP_ID:
        bt_text_add_format(out, "\"stop\",\"matched_stop\":%d", s->finish.matched_id);
        break;
    case API_FINISH_STOP_STRING:
        bt_text_add_string(out, "\"stop\",\"matched_stop\":");
        bt_json_add_string(out, request->stop_texts[index], request->stop_bytes[index]);
        break;
    case API_FINISH_LENGTH: bt_text_add_string(out, "\"length\",\"matched_stop\":null"); break;
    case API_FINISH_ABORT: bt_text_add_string(out, "\"abort\",\"matched_stop\":null"); break;
    }
}

/* Each prompt counts once, however many samples it has. */
static void add_usage(const api_call *call, bt_text *out, uint64_t completion_tokens) {
    uint64_t prompt_tokens = 0, cached_tokens = 0;
    for (uint32_t i = 0; i < call->batch.count; i++) {
        prompt_tokens += call->items[i].request->prompt.count;
        cached_tokens += call->items[i].cached_tokens;
    }
    bt_text_add_format(out,
                       "\"usage\":{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,"
                       "\"total_tokens\":%llu,\"prompt_tokens_details\":{\"cached_tokens\":%llu},"
                       "\"reasoning_tokens\":0}",
                       (unsigned long long)prompt_tokens, (unsigned long long)completion_tokens,
                       (unsigned long long)(prompt_tokens + completion_tokens),
                       (unsigned long long)cached_tokens);
}

static void add_logprobs(api_call *call) {
    reply_writer *writer = &call->writer;
    bt_text_add_string(reply_writer_literal(writer), "\"logprobs\":");
    if (!call->request->wants_logprob) {
        bt_text_add_string(reply_writer_literal(writer), "null,");
        return;
    }
    bt_text_add_string(reply_writer_literal(writer), "{\"content\":");
    reply_writer_add(writer, REPLY_CHAT_LOGPROBS);
    bt_text_add_string(reply_writer_literal(writer), "},");
}

void api_chat_add(api_call *call, uint32_t sample) {
    reply_writer *writer = &call->writer;
    const api_request *request = api_request_of(call, sample);
    bt_text *out = reply_writer_literal(writer);
    if (sample == 0) {
        add_head(call, out, "chat.completion");
        bt_text_add_string(out, ",\"choices\":[");
    } else {
        bt_text_add_string(out, ",");
    }
    bt_text_add_format(out,
                       "{\"index\":%u,\"message\":{\"role\":\"assistant\",\"content\":", sample);
    reply_writer_add(writer, REPLY_TEXT);
    bt_text_add_string(reply_writer_literal(writer),
                       ",\"reasoning_content\":null,\"tool_calls\":null},");
    add_logprobs(call);
    add_finish(call, sample, reply_writer_literal(writer));
    if (request->returns_token_ids) {
        bt_text_add_string(reply_writer_literal(writer), ",\"response_token_ids\":");
        reply_writer_add(writer, REPLY_IDS);
    }
    if (request->returns_prompt_ids) {
        bt_text_add_string(reply_writer_literal(writer), ",\"prompt_token_ids\":");
        reply_writer_add(writer, REPLY_PROMPT_IDS);
    }
    if (request->returns_meta) {
        bt_text_add_string(reply_writer_literal(writer), ",\"meta_info\":");
        api_meta_add(call, sample);
    }
    bt_text_add_string(reply_writer_literal(writer), "}");
    if (sample + 1 < api_samples_of(call)) return;
    bt_text_add_string(reply_writer_literal(writer), "],");
    add_usage(call, reply_writer_literal(writer), api_call_tokens(call));
    bt_text_add_string(reply_writer_literal(writer),
                       ",\"metadata\":{\"weight_version\":\"default\"}}");
}

/* ---- streams --------------------------------------------------------------------------------- */

/* Begins an event over a range of a sample: up to {"index":... of its choice. */
static void begin_event(api_call *call, uint32_t sample, const reply_range *range) {
    api_start_writer(call, sample, range);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "data: ");
    add_head(call, out, "chat.completion.chunk");
}

/* What was not sent yet, with nothing in it. */
static reply_range empty_range(const api_sample *s) {
    return (reply_range){.row_from = s->sent.row_to,
                         .row_to = s->sent.row_to,
                         .text_from = s->sent.text_to,
                         .text_to = s->sent.text_to,
                         .place = s->sent.place};
}

/* Tokens of all samples in the events up to the one that is being written. */
static uint64_t tokens_told(const api_call *call) {
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        tokens += call->samples[i].going.row_to;
    }
    return tokens;
}

static void end_event(api_call *call) {
    bt_text *out = reply_writer_literal(&call->writer);
    if (call->request->continuous_usage) {
        bt_text_add_string(out, ",");
        add_usage(call, out, tokens_told(call));
    }
    bt_text_add_string(out, "}\n\n");
}

static void add_role(api_call *call, uint32_t sample) {
    const reply_range nothing = empty_range(&call->samples[sample]);
    begin_event(call, sample, &nothing);
    bt_text_add_format(reply_writer_literal(&call->writer),
                       ",\"choices\":[{\"index\":%u,\"delta\":{\"role\":\"assistant\","
                       "\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null,"
                       "\"matched_stop\":null}]",
                       sample);
    end_event(call);
}

static void add_delta(api_call *call, uint32_t sample, const reply_range *next) {
    begin_event(call, sample, next);
    bt_text_add_format(reply_writer_literal(&call->writer),
                       ",\"choices\":[{\"index\":%u,\"delta\":{\"content\":", sample);
    reply_writer_add(&call->writer, REPLY_TEXT);
    bt_text_add_string(reply_writer_literal(&call->writer), "},");
    add_logprobs(call);
    bt_text_add_string(reply_writer_literal(&call->writer),
                       "\"finish_reason\":null,\"matched_stop\":null}]");
    end_event(call);
}

static void add_finish_event(api_call *call, uint32_t sample) {
    const reply_range nothing = empty_range(&call->samples[sample]);
    begin_event(call, sample, &nothing);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_format(out, ",\"choices\":[{\"index\":%u,\"delta\":{},\"logprobs\":null,", sample);
    add_finish(call, sample, out);
    bt_text_add_string(out, "}]");
    end_event(call);
}

static void add_usage_event(api_call *call) {
    const reply_range nothing = empty_range(&call->samples[call->current]);
    begin_event(call, call->current, &nothing);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, ",\"choices\":[],");
    add_usage(call, out, api_call_tokens(call));
    bt_text_add_string(out, "}\n\n");
}

static void add_error_event(api_call *call) {
    const api_finish *finish = api_samples_worst(call);
    const reply_range nothing = empty_range(&call->samples[call->current]);
    api_start_writer(call, call->current, &nothing);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "data: {\"error\":{\"message\":");
    add_quoted(out, finish->text);
    bt_text_add_format(out, ",\"type\":\"%s\",\"param\":null,\"code\":%d}}\n\n",
                       api_error_type(finish->http_status), finish->http_status);
}

/* There is something to say of the range. */
static bool is_delta_due(const api_call *call, const reply_range *next) {
    bool has_rows = next->row_to > next->row_from;
    return next->text_to > next->text_from || (call->request->wants_logprob && has_rows);
}

bool api_chat_add_event(api_call *call, uint32_t sample, const reply_range *next) {
    api_sample *s = &call->samples[sample];
    reply_range to = *next;
    to.place = reply_store_end(&s->store);
    switch (s->chat_stage) {
    case API_CHAT_ROLE:
        add_role(call, sample);
        s->chat_stage = API_CHAT_DELTAS;
        return true;
    case API_CHAT_DELTAS:
        if (is_delta_due(call, next)) {
            s->going = to;
            add_delta(call, sample, next);
            return true;
        }
        if (!api_sample_is_over(s)) return false;
        /* Rows without text that nobody asked about are told by their number alone. */
        s->going = to;
        s->is_said = true;
        s->chat_stage = API_CHAT_FINISH;
        return false;
    case API_CHAT_FINISH:
    case API_CHAT_OVER: return false;
    }
    return false;
}

/* The next finish; false: there is none. */
static bool add_next_finish(api_call *call) {
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        api_sample *s = &call->samples[i];
        if (s->chat_stage != API_CHAT_FINISH) continue;
        add_finish_event(call, i);
        s->chat_stage = API_CHAT_OVER;
        call->current = i;
        const bool is_last = i + 1 == api_samples_of(call);
        call->is_closed = is_last && !call->request->includes_usage;
        return true;
    }
    return false;
}

bool api_chat_add_closing(api_call *call) {
    if (!api_samples_are_over(call)) return false;
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        if (call->samples[i].chat_stage < API_CHAT_FINISH) return false;
    }
    if (call->is_closed) return false;
    if (!api_samples_are_failed(call) && add_next_finish(call)) return true;
    call->is_closed = true;
    if (api_samples_are_failed(call)) {
        add_error_event(call);
    } else {
        add_usage_event(call);
    }
    return true;
}
