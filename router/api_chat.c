/* How a choice of /v1/chat/completions holds its text: a message, or in a stream the role and then
 * deltas of its content. What is around it is api_openai.c's. */
#include "router/api_format.h"

static void add_logprobs(api_call *call) {
    reply_writer *writer = &call->writer;
    bt_text_add_string(reply_writer_literal(writer), "\"logprobs\":");
    if (!writer->request->wants_logprob) {
        bt_text_add_string(reply_writer_literal(writer), "null,");
        return;
    }
    bt_text_add_string(reply_writer_literal(writer), "{\"content\":");
    reply_writer_add(writer, REPLY_CHAT_LOGPROBS);
    bt_text_add_string(reply_writer_literal(writer), "},");
}

static void add_content(api_call *call, const char *before, const char *after) {
    reply_writer *writer = &call->writer;
    bt_text_add_string(reply_writer_literal(writer), before);
    reply_writer_add(writer, REPLY_TEXT);
    bt_text_add_string(reply_writer_literal(writer), after);
    add_logprobs(call);
}

void api_chat_add_part(api_call *call, const api_part *part) {
    switch (part->kind) {
    case API_PART_WHOLE:
        add_content(call, "\"message\":{\"role\":\"assistant\",\"content\":",
                    ",\"reasoning_content\":null,\"tool_calls\":null},");
        break;
    case API_PART_ROLE:
        bt_text_add_string(reply_writer_literal(&call->writer),
                           "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                           "\"logprobs\":null,");
        break;
    case API_PART_DELTA: add_content(call, "\"delta\":{\"content\":", "},"); break;
    case API_PART_FINISH:
        bt_text_add_string(reply_writer_literal(&call->writer), "\"delta\":{},\"logprobs\":null,");
        break;
    }
}
