/* meta_info, in the order in which SGLang inserts its keys. */
#include <string.h>

#include "router/api_format.h"

static void add_quoted(bt_text *out, const char *text) {
    bt_json_add_string(out, text, strlen(text));
}

static void add_abort(const api_finish *finish, bt_text *out) {
    bt_text_add_string(out, "{\"type\":\"abort\",\"message\":");
    add_quoted(out, finish->text);
    bt_text_add_string(out, ",\"status_code\":");
    if (finish->http_status == 0) {
        bt_text_add_string(out, "null,\"err_type\":null}");
        return;
    }
    bt_json_add_int(out, finish->http_status);
    bt_text_add_string(out, ",\"err_type\":");
    add_quoted(out, api_error_type(finish->http_status));
    bt_text_add_string(out, "}");
}

void api_finish_add(const api_call *call, bt_text *out) {
    const api_request *request = &call->request;
    uint32_t index = call->generation.stop_index;
    switch (call->finish.kind) {
    case API_FINISH_NONE: bt_text_add_string(out, "null"); break;
    case API_FINISH_STOP_ID:
        bt_text_add_string(out, "{\"type\":\"stop\",\"matched\":");
        bt_json_add_int(out, call->finish.matched_id);
        bt_text_add_string(out, "}");
        break;
    case API_FINISH_STOP_STRING:
        bt_text_add_string(out, "{\"type\":\"stop\",\"matched\":");
        bt_json_add_string(out, request->stop_texts[index], request->stop_bytes[index]);
        bt_text_add_string(out, "}");
        break;
    case API_FINISH_LENGTH:
        bt_text_add_string(out, "{\"type\":\"length\",\"length\":");
        bt_json_add_int(out, call->generation.count);
        bt_text_add_string(out, "}");
        break;
    case API_FINISH_ABORT: add_abort(&call->finish, out); break;
    }
}

static void add_lists(api_call *call) {
    const api_request *request = &call->request;
    uint32_t rows = call->writer.range.row_to;
    if (request->wants_logprob) {
        bt_text_add_string(reply_writer_literal(&call->writer),
                           "\"input_token_logprobs\":[],\"output_token_logprobs\":");
        reply_writer_add(&call->writer, REPLY_LOGPROBS);
        bt_text_add_format(reply_writer_literal(&call->writer),
                           ",\"output_token_logprobs_length\":%u,", rows);
    }
    /* Without any row the three keys are absent, as when no mask was asked for. */
    if (request->generation.mask_mode != ROW_MASK_OFF && rows > 0) {
        bt_text_add_string(reply_writer_literal(&call->writer), "\"output_token_sampling_mask\":");
        reply_writer_add(&call->writer, REPLY_MASK);
        bt_text_add_string(reply_writer_literal(&call->writer),
                           ",\"output_token_sampling_logprobs\":");
        reply_writer_add(&call->writer, REPLY_MASK_LOGPROBS);
        bt_text_add_format(reply_writer_literal(&call->writer),
                           ",\"output_token_sampling_mask_length\":%u,", rows);
    }
}

void api_meta_add(api_call *call) {
    const api_time *time = &call->options.time;
    uint64_t now_us = bt_clock_now_us(&time->clock);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "{\"id\":");
    add_quoted(out, call->request.rid);
    bt_text_add_string(out, ",\"finish_reason\":");
    api_finish_add(call, out);
    bt_text_add_format(
        out, ",\"prompt_tokens\":%u,\"weight_version\":\"default\",\"num_retractions\":0,",
        call->request.prompt.count);
    add_lists(call);
    out = reply_writer_literal(&call->writer);
    bt_text_add_format(out,
                       "\"reasoning_tokens\":0,\"completion_tokens\":%u,\"cached_tokens\":%u,"
                       "\"cached_tokens_details\":null,\"dp_rank\":null,\"e2e_latency\":",
                       call->writer.range.row_to, call->cached_tokens);
    bt_json_add_double(out, (double)(now_us - call->options.started_us) / 1e6);
    bt_text_add_string(out, ",\"response_sent_to_client_ts\":");
    bt_json_add_double(out, time->wall_seconds(time->context));
    bt_text_add_string(out, "}");
}
