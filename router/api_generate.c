/* Replies of /generate: {"text":...,"output_ids":[...],"meta_info":{...}}. */
#include "router/api_format.h"

void api_generate_add(api_call *call) {
    reply_writer *writer = &call->writer;
    bt_text_add_string(reply_writer_literal(writer), "{\"text\":");
    reply_writer_add(writer, REPLY_TEXT);
    bt_text_add_string(reply_writer_literal(writer), ",\"output_ids\":");
    reply_writer_add(writer, REPLY_IDS);
    bt_text_add_string(reply_writer_literal(writer), ",\"meta_info\":");
    api_meta_add(call);
    if (call->request.returns_prompt_ids) {
        bt_text_add_string(reply_writer_literal(writer), ",\"prompt_token_ids\":");
        reply_writer_add(writer, REPLY_PROMPT_IDS);
    }
    bt_text_add_string(reply_writer_literal(writer), "}");
}
