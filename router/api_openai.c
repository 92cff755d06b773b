/* What replies of /v1/chat/completions and /v1/completions have in common, whole and streamed: the
 * object around the choices, how a choice ends, usage, and the order of a stream: of each sample
 * its deltas, those of different samples mixed; when all samples are over what is left to be said
 * of their ends, then usage when it was asked for, or in place of all that one error when all have
 * failed; the caller adds [DONE]. A chat begins each sample with its role and tells all ends after
 * all deltas; a completion tells the end of a sample that did not fail with its last delta. How a
 * choice holds its text is api_chat.c's and api_completion.c's.
 *
 * Ids and rows that were asked for ride with the deltas, each once; where there is no text to tell
 * a delta goes out for them alone. */
#include <string.h>

#include "router/api_format.h"

static void add_quoted(bt_text *out, const char *text) {
    bt_json_add_string(out, text, strlen(text));
}

static const char *object_of(const api_call *call, bool is_event) {
    if (call->request->kind == API_COMPLETION) return "text_completion";
    return is_event ? "chat.completion.chunk" : "chat.completion";
}

/* {"id":...,"object":...,"created":...,"model":...,"choices":[ */
static void add_head(const api_call *call, bt_text *out, bool is_event) {
    const char *rid = call->request->rid;
    bt_text_add_string(out, "{\"id\":");
    bt_json_add_string(out, rid, call->batch.is_list ? call->request->list_rid_bytes : strlen(rid));
    bt_text_add_string(out, ",\"object\":\"");
    bt_text_add_string(out, object_of(call, is_event));
    api_add_number(out, "\",\"created\":", (uint64_t)call->created_s);
    bt_text_add_string(out, ",\"model\":");
    add_quoted(out, call->request->model);
    bt_text_add_string(out, ",\"choices\":[");
}

/* "finish_reason":...,"matched_stop":... */
static void add_finish(const api_call *call, uint32_t sample, bt_text *out) {
    const api_request *request = api_request_of(call, sample);
    const api_sample *s = &call->samples[sample];
    uint32_t index = s->generation.stop_index;
    bt_text_add_string(out, "\"finish_reason\":");
    switch (api_told_finish(s)) {
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
    api_add_number(out, "\"usage\":{\"prompt_tokens\":", prompt_tokens);
    api_add_number(out, ",\"completion_tokens\":", completion_tokens);
    api_add_number(out, ",\"total_tokens\":", prompt_tokens + completion_tokens);
    api_add_number(out, ",\"prompt_tokens_details\":{\"cached_tokens\":", cached_tokens);
    bt_text_add_string(out, "},\"reasoning_tokens\":0}");
}

/* Ids, rows and numbers that were asked for beside the text. */
static void add_extras(api_call *call, uint32_t sample, const api_part *part) {
    const api_request *request = call->request;
    reply_writer *writer = &call->writer;
    const bool has_rows = part->kind != API_PART_ROLE;
    if (request->returns_token_ids && has_rows && !request->wants_safetensors) {
        bt_text_add_string(reply_writer_literal(writer), ",\"response_token_ids\":");
        reply_writer_add(writer, REPLY_IDS);
    }
    if (request->returns_prompt_ids && part->is_first) {
        bt_text_add_string(reply_writer_literal(writer), ",\"prompt_token_ids\":");
        reply_writer_add(writer, REPLY_PROMPT_IDS);
    }
    if (request->returns_meta && has_rows) {
        bt_text_add_string(reply_writer_literal(writer), ",\"meta_info\":");
        api_meta_add(call, sample);
    }
}

static void add_choice(api_call *call, uint32_t sample, const api_part *part) {
    api_add_number(reply_writer_literal(&call->writer), "{\"index\":", sample);
    bt_text_add_string(reply_writer_literal(&call->writer), ",");
    if (call->request->kind == API_COMPLETION) {
        api_completion_add_part(call, part);
    } else {
        api_chat_add_part(call, part);
    }
    add_finish(call, sample, reply_writer_literal(&call->writer));
    add_extras(call, sample, part);
    bt_text_add_string(reply_writer_literal(&call->writer), "}");
}

void api_openai_add(api_call *call, uint32_t sample) {
    const api_part whole = {.kind = API_PART_WHOLE, .is_first = true};
    bt_text *out = reply_writer_literal(&call->writer);
    if (sample == 0) {
        add_head(call, out, false);
    } else {
        bt_text_add_string(out, ",");
    }
    add_choice(call, sample, &whole);
    if (sample + 1 < api_samples_of(call)) return;
    out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "],");
    add_usage(call, out, api_call_tokens(call));
    bt_text_add_string(out, ",\"metadata\":{\"weight_version\":\"default\"}}");
}

/* ---- events ---------------------------------------------------------------------------------- */

/* Begins an event over a range of a sample, up to its choices. */
static void begin_event(api_call *call, uint32_t sample, const reply_range *range) {
    api_start_writer(call, sample, range);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "data: ");
    add_head(call, out, true);
}

/* Behind what was told, with nothing in it. */
static reply_range empty_range(const api_sample *s) {
    return (reply_range){.row_from = s->going.row_to,
                         .row_to = s->going.row_to,
                         .text_from = s->going.text_to,
                         .text_to = s->going.text_to,
                         .place = s->going.place,
                         .weights = &s->weights};
}

static void add_event(api_call *call, uint32_t sample, const api_part *part,
                      const reply_range *range) {
    begin_event(call, sample, range);
    add_choice(call, sample, part);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "]");
    if (call->request->continuous_usage) {
        bt_text_add_string(out, ",");
        add_usage(call, out, call->tokens_told);
    }
    bt_text_add_string(out, "}\n\n");
}

static void add_usage_event(api_call *call) {
    const reply_range nothing = empty_range(&call->samples[call->current]);
    begin_event(call, call->current, &nothing);
    bt_text *out = reply_writer_literal(&call->writer);
    bt_text_add_string(out, "],");
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

/* ---- the order of a stream ------------------------------------------------------------------- */

/* The last thing is said of a sample; after the last one only usage may follow. */
static void close_sample(api_call *call, api_sample *s) {
    s->stage = API_STAGE_OVER;
    call->told_count++;
    if (call->told_count == api_samples_of(call)) call->is_closed = !call->request->includes_usage;
}

/* There is something to say of the range. */
static bool is_delta_due(const api_call *call, const reply_range *next) {
    const api_request *request = call->request;
    const bool wants_rows =
        request->wants_logprob || request->returns_token_ids || request->returns_meta;
    return next->text_to > next->text_from || (wants_rows && next->row_to > next->row_from);
}

static bool add_role(api_call *call, uint32_t sample) {
    const api_part role = {.kind = API_PART_ROLE, .is_first = true};
    const reply_range nothing = empty_range(&call->samples[sample]);
    call->samples[sample].stage = API_STAGE_DELTAS;
    add_event(call, sample, &role, &nothing);
    return true;
}

/* The range is told now. */
static void take_range(api_call *call, api_sample *s, const reply_range *range) {
    call->tokens_told += range->row_to - s->going.row_to;
    s->going = *range;
    s->going.place = range->place_to;
}

bool api_openai_add_event(api_call *call, uint32_t sample, const reply_range *next) {
    api_sample *s = &call->samples[sample];
    const api_part delta = {.kind = API_PART_DELTA, .is_first = s->stage == API_STAGE_BEGIN};
    const bool is_chat = call->request->kind == API_CHAT;
    /* A failure is told later: as one error when all fail. */
    const bool is_end = !is_chat && api_sample_is_over(s) && !api_sample_is_failed(s);
    if (s->stage >= API_STAGE_FINISH) return false;
    if (is_chat && s->stage == API_STAGE_BEGIN) return add_role(call, sample);
    const bool is_due = is_end || is_delta_due(call, next);
    if (!is_due && !api_sample_is_over(s)) return false;
    take_range(call, s, next);
    s->is_said = is_end || !is_due;
    if (!is_due) {
        /* Rows without text that nobody asked about are told by their number alone. */
        s->stage = API_STAGE_FINISH;
        call->finish_count++;
        return false;
    }
    s->stage = API_STAGE_DELTAS;
    if (is_end) {
        call->finish_count++;
        close_sample(call, s);
    }
    add_event(call, sample, &delta, next);
    return true;
}

/* The next end; false: there is none. */
static bool add_next_finish(api_call *call) {
    static const api_part FINISH = {.kind = API_PART_FINISH};
    for (; call->closing < api_samples_of(call); call->closing++) {
        api_sample *s = &call->samples[call->closing];
        if (s->stage != API_STAGE_FINISH) continue;
        const reply_range nothing = empty_range(s);
        close_sample(call, s);
        add_event(call, call->closing, &FINISH, &nothing);
        call->current = call->closing;
        return true;
    }
    return false;
}

bool api_openai_add_closing(api_call *call) {
    if (call->finish_count < api_samples_of(call) || call->is_closed) return false;
    /* Ends are told when not all samples failed. */
    const bool is_failed = api_samples_are_failed(call);
    if (!is_failed && add_next_finish(call)) return true;
    call->is_closed = true;
    if (is_failed) {
        add_error_event(call);
    } else {
        add_usage_event(call);
    }
    return true;
}
