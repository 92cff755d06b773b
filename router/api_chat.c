/* Replies of /v1/chat/completions, whole and streamed. The order of a stream: role, deltas, the
 * finish, usage when it was asked for; the caller adds [DONE]. */
#include <string.h>

#include "router/api_format.h"

static void add_quoted(bt_text *out, const char *text) {
    bt_json_add_string(out, text, strlen(text));
}

/* {"id":...,"object":...,"created":...,"model":... */
static void add_head(const api_call *call, bt_text *out, const char *object) {
    bt_text_add_string(out, "{\"id\":");
    add_quoted(out, call->request.rid);
    bt_text_add_format(out, ",\"object\":\"%s\",\"created\":%lld,\"model\":", object,
                       (long long)call->created_s);
    add_quoted(out, call->request.model);
}

/* "finish_reason":...,"matched_stop":... */
static void add_finish(const api_call *call, bt_text *out) {
    uint32_t index = call->generation.stop_index;
    bt_text_add_string(out, "\"finish_reason\":");
    switch (call->finish.kind) {
    case API_FINISH_NONE: bt_text_add_string(out, "null,\"matched_stop\":null"); break;
    case API_FINISH_STOP_ID:
        bt_text_add_format(out, "\"stop\",\"matched_stop\":%d", call->finish.matched_id);
        break;
    case API_FINISH_STOP_STRING:
        bt_text_add_string(out, "\"stop\",\"matched_stop\":");
        bt_json_add_string(out, call->request.stop_texts[index], call->request.stop_bytes[index]);
        break;
    case API_FINISH_LENGTH: bt_text_add_string(out, "\"length\",\"matched_stop\":null"); break;
    case API_FINISH_ABORT: bt_text_add_string(out, "\"abort\",\"matched_stop\":null"); break;
    }
}

static void add_usage(const api_call *call, bt_text *out, uint32_t completion_tokens) {
    uint32_t prompt_tokens = call->request.prompt.count;
    bt_text_add_format(out,
                       "\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,"
                       "\"total_tokens\":%u,\"prompt_tokens_details\":{\"cached_tokens\":%u},"
                       "\"reasoning_tokens\":0}",
                       prompt_tokens, completion_tokens, prompt_tokens + completion_tokens,
                       call->cached_tokens);
}

static void add_logprobs(api_call *call) {
    reply_writer *writer = &call->writer;
    bt_text_add_string(reply_writer_literal(writer), "\"logprobs\":");
    if (!call->request.wants_logprob) {
        bt_text_add_string(reply_writer_literal(writer), "null,");
        return;
    }
    bt_text_add_string(reply_writer_literal(writer), "{\"content\":");
    reply_writer_add(writer, REPLY_CHAT_LOGPROBS);
    bt_text_add_string(reply_writer_literal(writer), "},");
}

void api_chat_add(api_call *call) {
    reply_writer *writer = &call->writer;
    const api_request *request = &call->request;
    add_head(call, reply_writer_literal(writer), "chat.completion");
    bt_text_add_string(reply_writer_literal(writer),
                       ",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                       "\"content\":");
    reply_writer_add(writer, REPLY_TEXT);
    bt_text_add_string(reply_writer_literal(writer),
                       ",\"reasoning_content\":null,\"tool_calls\":null},");
    add_logprobs(call);
    add_finish(call, reply_writer_literal(writer));
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
        api_meta_add(call);
    }
    bt_text_add_string(reply_writer_literal(writer), "}],");
    add_usage(call, reply_writer_literal(writer), writer->range.row_to);
    bt_text_add_string(reply_writer_literal(writer),
                       ",\"metadata\":{\"weight_version\":\"default\"}}");
}

/* ---- streams --------------------------------------------------------------------------------- */

static void begin_event(api_call *call) {
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "data: ");
    add_head(call, out, "chat.completion.chunk");
}

static void end_event(api_call *call) {
    bt_text *out = reply_writer_literal(&call->writer);
    if (call->request.continuous_usage) {
        bt_text_add_string(out, ",");
        add_usage(call, out, call->writer.range.row_to);
    }
    bt_text_add_string(out, "}\n\n");
}

static void add_role(api_call *call) {
    begin_event(call);
    bt_text_add_string(reply_writer_literal(&call->writer),
                       ",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\","
                       "\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null,"
                       "\"matched_stop\":null}]");
    end_event(call);
}

static void add_delta(api_call *call) {
    begin_event(call);
    bt_text_add_string(reply_writer_literal(&call->writer),
                       ",\"choices\":[{\"index\":0,\"delta\":{\"content\":");
    reply_writer_add(&call->writer, REPLY_TEXT);
    bt_text_add_string(reply_writer_literal(&call->writer), "},");
    add_logprobs(call);
    bt_text_add_string(reply_writer_literal(&call->writer),
                       "\"finish_reason\":null,\"matched_stop\":null}]");
    end_event(call);
}

static void add_finish_event(api_call *call) {
    begin_event(call);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, ",\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,");
    add_finish(call, out);
    bt_text_add_string(out, "}]");
    end_event(call);
}

static void add_usage_event(api_call *call) {
    begin_event(call);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, ",\"choices\":[],");
    add_usage(call, out, call->generation.count);
    bt_text_add_string(out, "}\n\n");
}

static void add_error_event(api_call *call) {
    bt_text *out = reply_writer_literal(&call->writer);
    int status = call->finish.http_status != 0 ? call->finish.http_status : 500;
    bt_text_add_string(out, "data: {\"error\":{\"message\":");
    add_quoted(out, call->finish.text);
    bt_text_add_format(out, ",\"type\":\"%s\",\"param\":null,\"code\":%d}}\n\n",
                       api_error_type(status), status);
}

static bool is_failed(const api_call *call) {
    return call->finish.kind == API_FINISH_ABORT && call->finish.http_status != 0;
}

/* Nothing of the range is left to be said before the finish. */
static bool is_delta_due(const api_call *call, const reply_range *next) {
    bool has_rows = next->row_to > next->row_from;
    return next->text_to > next->text_from || (call->request.wants_logprob && has_rows);
}

static void start_empty(api_call *call, const reply_range *next) {
    const reply_range nothing = {.row_from = next->row_from,
                                 .row_to = next->row_from,
                                 .text_from = next->text_from,
                                 .text_to = next->text_from,
                                 .place = next->place};
    reply_writer_start(&call->writer, &nothing);
}

bool api_chat_add_event(api_call *call, const reply_range *next) {
    bool is_over = call->finish.kind != API_FINISH_NONE;
    switch (call->chat_stage) {
    case API_CHAT_ROLE:
        start_empty(call, next);
        add_role(call);
        call->chat_stage = API_CHAT_DELTAS;
        return true;
    case API_CHAT_DELTAS:
        if (is_delta_due(call, next)) {
            reply_writer_start(&call->writer, next);
            add_delta(call);
            return true;
        }
        if (!is_over) return false;
        start_empty(call, next);
        call->writer.range.row_to = next->row_to;
        call->writer.range.row_from = next->row_to;
        if (is_failed(call)) {
            add_error_event(call);
            call->chat_stage = API_CHAT_OVER;
        } else {
            add_finish_event(call);
            bool has_usage = call->request.includes_usage;
            call->chat_stage = has_usage ? API_CHAT_USAGE : API_CHAT_OVER;
        }
        call->is_last_event = call->chat_stage == API_CHAT_OVER;
        return true;
    case API_CHAT_USAGE:
        start_empty(call, next);
        add_usage_event(call);
        call->chat_stage = API_CHAT_OVER;
        call->is_last_event = true;
        return true;
    case API_CHAT_OVER: return false;
    }
    return false;
}
