/* How a choice of /v1/completions holds its text, which the prompt precedes when it is echoed, and
 * OpenAI's lists of log-probabilities, in which the prompt's tokens come first then. What is around
 * it is api_openai.c's. */
#include "router/api_format.h"

static void add_list(reply_writer *writer, const char *before, reply_piece_kind kind) {
    bt_text_add_string(reply_writer_literal(writer), before);
    reply_writer_add(writer, kind);
}

/* The prompt is repeated with the first part of a choice. Where its log-probabilities should be
 * there and are lost the choice failed, and what is left of it goes without. */
static bool is_echo_due(const reply_writer *writer, const api_part *part) {
    const bool has_lists =
        !writer->request->wants_logprob || prompt_logprobs_is_complete(writer->prompt);
    return part->is_first && writer->request->echoes && has_lists;
}

void api_completion_add_part(api_call *call, const api_part *part) {
    reply_writer *writer = &call->writer;
    if (part->kind == API_PART_FINISH) {
        bt_text_add_string(reply_writer_literal(writer), "\"text\":\"\",\"logprobs\":null,");
        return;
    }
    if (is_echo_due(writer, part)) reply_writer_echo(writer);
    add_list(writer, "\"text\":", REPLY_TEXT);
    bt_text_add_string(reply_writer_literal(writer), ",\"logprobs\":");
    if (!writer->request->wants_logprob) {
        bt_text_add_string(reply_writer_literal(writer), "null,");
        return;
    }
    add_list(writer, "{\"text_offset\":", REPLY_TEXT_OFFSETS);
    add_list(writer, ",\"token_logprobs\":", REPLY_TOKEN_LOGPROBS);
    add_list(writer, ",\"tokens\":", REPLY_TOKENS);
    add_list(writer, ",\"top_logprobs\":", REPLY_TOKEN_TOPS);
    bt_text_add_string(reply_writer_literal(writer), "},");
}
