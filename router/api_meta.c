/* meta_info, in the order in which SGLang inserts its keys. */
#include <stdio.h>
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

void api_finish_add(const api_call *call, uint32_t sample, bt_text *out) {
    const api_request *request = api_request_of(call, sample);
    const api_sample *s = &call->samples[sample];
    uint32_t index = s->generation.stop_index;
    switch (api_told_finish(s)) {
    case API_FINISH_NONE: bt_text_add_string(out, "null"); break;
    case API_FINISH_STOP_ID:
        bt_text_add_string(out, "{\"type\":\"stop\",\"matched\":");
        bt_json_add_int(out, s->finish.matched_id);
        bt_text_add_string(out, "}");
        break;
    case API_FINISH_STOP_STRING:
        bt_text_add_string(out, "{\"type\":\"stop\",\"matched\":");
        bt_json_add_string(out, request->stop_texts[index], request->stop_bytes[index]);
        bt_text_add_string(out, "}");
        break;
    case API_FINISH_LENGTH:
        bt_text_add_string(out, "{\"type\":\"length\",\"length\":");
        bt_json_add_int(out, s->generation.count);
        bt_text_add_string(out, "}");
        break;
    case API_FINISH_ABORT: add_abort(&s->finish, out); break;
    }
}

/* "name": and the list. */
static void add_list(api_call *call, const char *name, reply_piece_kind kind) {
    bt_text_add_string(reply_writer_literal(&call->writer), name);
    reply_writer_add(&call->writer, kind);
    bt_text_add_string(reply_writer_literal(&call->writer), ",");
}

/* The same of the prompt; `kind` of what was asked for and belongs into this event. In a stream of
 * deltas that is the first event of a sample. */
static void add_input_list(api_call *call, const char *name, reply_piece_kind kind) {
    const prompt_logprobs *prompt = call->writer.prompt;
    const bool has_any = prompt->is_wanted && prompt_logprobs_is_complete(prompt);
    if (has_any && call->writer.range.row_from == 0) {
        add_list(call, name, kind);
    } else {
        bt_text_add_string(reply_writer_literal(&call->writer), name);
        bt_text_add_string(reply_writer_literal(&call->writer), "[],");
    }
}

static void add_logprob_lists(api_call *call) {
    const proto_generation *asked = &call->writer.request->generation;
    add_input_list(call, "\"input_token_logprobs\":", REPLY_INPUT_LOGPROBS);
    add_list(call, "\"output_token_logprobs\":", REPLY_LOGPROBS);
    api_add_number(reply_writer_literal(&call->writer),
                   "\"output_token_logprobs_length\":", call->writer.range.row_to);
    bt_text_add_string(reply_writer_literal(&call->writer), ",");
    if (asked->top_logprobs > 0) {
        add_input_list(call, "\"input_top_logprobs\":", REPLY_INPUT_TOP_LOGPROBS);
        add_list(call, "\"output_top_logprobs\":", REPLY_TOP_LOGPROBS);
    }
    if (asked->logprob_id_count > 0) {
        add_input_list(call, "\"input_token_ids_logprobs\":", REPLY_INPUT_ID_LOGPROBS);
        add_list(call, "\"output_token_ids_logprobs\":", REPLY_ID_LOGPROBS);
    }
}

/* head, the number of elements, and the data up to the end of the array's object. */
static void add_array(api_call *call, const char *head, uint64_t elements, reply_array array) {
    bt_text *out = reply_writer_literal(&call->writer);
    api_add_number(out, head, elements);
    bt_text_add_string(out, "],\"data\":");
    reply_writer_add_array(&call->writer, REPLY_ARRAY_BASE64, array);
    bt_text_add_string(reply_writer_literal(&call->writer), "}");
}

static void add_packed(api_call *call) {
    const proto_generation *asked = &call->writer.request->generation;
    const reply_range *range = &call->writer.range;
    const uint64_t rows = range->row_to - range->row_from;
    const uint64_t entries = range->entries_to - range->entries_from;
    add_array(call,
              "\"output_token_sampling_packed\":{\"lengths\":{\"dtype\":\"int32\",\"shape\":[",
              rows, REPLY_ARRAY_LENGTHS);
    add_array(call, ",\"token_ids\":{\"dtype\":\"int32\",\"shape\":[", entries,
              REPLY_ARRAY_TOKEN_IDS);
    add_array(call, ",\"logprobs\":{\"dtype\":\"float32\",\"shape\":[",
              asked->mask_mode == ROW_MASK_SUPPORT ? entries : rows, REPLY_ARRAY_LOGPROBS);
    if (asked->mask_bounded != 0) {
        add_array(call, ",\"truncated\":{\"dtype\":\"uint8\",\"shape\":[", rows,
                  REPLY_ARRAY_TRUNCATED);
        add_array(call, ",\"support_sizes\":{\"dtype\":\"int32\",\"shape\":[", rows,
                  REPLY_ARRAY_SUPPORT_SIZES);
    }
    bt_text_add_string(reply_writer_literal(&call->writer), "},");
}

static void add_mask_lists(api_call *call) {
    add_list(call, "\"output_token_sampling_mask\":", REPLY_MASK);
    add_list(call, "\"output_token_sampling_logprobs\":", REPLY_MASK_LOGPROBS);
    if (call->writer.request->generation.mask_bounded == 0) return;
    add_list(call, "\"output_token_sampling_mask_truncated\":", REPLY_TRUNCATED);
    add_list(call, "\"output_token_sampling_support_sizes\":", REPLY_SUPPORT_SIZES);
}

/* Without any row the keys are absent, as when no mask was asked for. */
static void add_masks(api_call *call) {
    const api_request *request = call->writer.request;
    const uint32_t rows = call->writer.range.row_to;
    if (request->generation.mask_mode == ROW_MASK_OFF || rows == 0) return;
    if (!request->wants_safetensors) {
        if (request->packs_mask) {
            add_packed(call);
        } else {
            add_mask_lists(call);
        }
    }
    api_add_number(reply_writer_literal(&call->writer),
                   "\"output_token_sampling_mask_length\":", rows);
    add_list(call, ",\"output_token_weight_versions\":", REPLY_WEIGHTS);
}

/* Several samples have ids of their own. */
static void add_id(const api_call *call, uint32_t sample, bt_text *out) {
    const api_item *item = api_item_of(call, sample);
    char id[API_RID_MAX + API_INDEX_MAX + 16];
    if (item->sample_count == 1) {
        add_quoted(out, item->request->rid);
        return;
    }
    snprintf(id, sizeof(id), "%s_%u", item->request->rid, sample - item->first_sample);
    add_quoted(out, id);
}

void api_meta_add(api_call *call, uint32_t sample) {
    const api_time *time = &call->options.time;
    const api_whole *whole = &call->whole;
    const uint64_t now_us = whole->is_fixed ? whole->now_us : bt_clock_now_us(&time->clock);
    const double wall_seconds =
        whole->is_fixed ? whole->wall_seconds : time->wall_seconds(time->context);
    const api_finish_kind told = api_told_finish(&call->samples[sample]);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "{\"id\":");
    add_id(call, sample, out);
    bt_text_add_string(out, ",\"finish_reason\":");
    api_finish_add(call, sample, out);
    api_add_number(out, ",\"prompt_tokens\":", call->writer.request->prompt.count);
    api_add_number(out, ",\"weight_version\":\"default\",\"num_retractions\":",
                   call->samples[sample].retractions);
    bt_text_add_string(out, ",");
    if (call->writer.request->wants_logprob) add_logprob_lists(call);
    add_masks(call);
    out = reply_writer_literal(&call->writer);
    if (told == API_FINISH_ABORT && call->samples[sample].finish.cap_needed > 0)
        bt_text_add_format(out, "\"sampling_mask_required\":%u,",
                           call->samples[sample].finish.cap_needed);
    api_add_number(out, "\"reasoning_tokens\":0,\"completion_tokens\":", call->writer.range.row_to);
    api_add_number(out, ",\"cached_tokens\":", api_item_of(call, sample)->cached_tokens);
    bt_text_add_string(out, ",\"cached_tokens_details\":null,\"dp_rank\":null,\"e2e_latency\":");
    bt_json_add_double(out, (double)(now_us - call->options.started_us) / 1e6);
    bt_text_add_string(out, ",\"response_sent_to_client_ts\":");
    bt_json_add_double(out, wall_seconds);
    bt_text_add_string(out, "}");
}
