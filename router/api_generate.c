/* Replies of /generate: {"text":...,"output_ids":[...],"meta_info":{...}} for each sample. */
#include "router/api_format.h"

void api_generate_add(api_call *call, uint32_t sample) {
    const api_request *request = api_request_of(call, sample);
    reply_writer *writer = &call->writer;
    bt_text_add_string(reply_writer_literal(writer), "{\"text\":");
    reply_writer_add(writer, REPLY_TEXT);
    if (!writer->request->wants_safetensors) {
        bt_text_add_string(reply_writer_literal(writer), ",\"output_ids\":");
        reply_writer_add(writer, REPLY_IDS);
    }
    bt_text_add_string(reply_writer_literal(writer), ",\"meta_info\":");
    api_meta_add(call, sample);
    if (request->returns_prompt_ids) {
        bt_text_add_string(reply_writer_literal(writer), ",\"prompt_token_ids\":");
        reply_writer_add(writer, REPLY_PROMPT_IDS);
    }
    /* Events of several samples tell whose they are; a list says it by its order. */
    if (request->streams && api_is_list(call))
        bt_text_add_format(reply_writer_literal(writer), ",\"index\":%u", sample);
    bt_text_add_string(reply_writer_literal(writer), "}");
}
