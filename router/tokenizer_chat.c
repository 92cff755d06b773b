/* Encoding of a rendered conversation: the template's special tokens are put as ids, and the text
 * between two of them, template and messages alike, is encoded in one go without special tokens, so
 * that the ids are those of the whole text. */
#include "router/chat_template.h"
#include "router/tokenizer_internal.h"

static bt_status encode_rendering(const tokenizer *t, const chat_rendering *rendering,
                                  uint32_t tokens_max, const int32_t token_ids[2],
                                  token_list *list) {
    encode_job job;
    bt_status status =
        encode_job_init(&job, t, (tokenizer_encode_options){.tokens_max = tokens_max}, list);
    size_t at = 0;
    for (size_t i = 0; i < rendering->span_count && status == BT_OK; i++) {
        const chat_span *span = &rendering->spans[i];
        status = encode_job_text(&job, rendering->text + at, span->start - at);
        if (status == BT_OK) status = encode_job_id(&job, token_ids[span->is_end]);
        at = span->end;
    }
    if (status == BT_OK)
        status = encode_job_text(&job, rendering->text + at, rendering->bytes - at);
    return encode_job_fini(&job, status);
}

static bt_status explain(bt_status status, uint32_t tokens_max, bt_error *error) {
    switch ((int)status) {
    case BT_OK: return BT_OK;
    case BT_ERR_REQUEST_INVALID: return bt_fail(error, status, "a message is not valid UTF-8");
    case BT_ERR_CALLER_LIMIT:
        return bt_fail(error, status, "the conversation has more than %u tokens", tokens_max);
    }
    return bt_fail(error, status, "the conversation cannot be encoded: %s",
                   bt_status_string(status));
}

bt_status tokenizer_encode_chat(const tokenizer *t, const chat_message *messages,
                                size_t message_count, chat_options options, token_list *list,
                                bt_error *error) {
    const int32_t token_ids[2] = {tokenizer_find(t, chat_token_start),
                                  tokenizer_find(t, chat_token_end)};
    chat_rendering rendering = {0};
    bt_status status =
        chat_template_render(&t->chat, messages, message_count, options, &rendering, error);
    if (status == BT_OK && (token_ids[0] < 0 || token_ids[1] < 0))
        status = bt_fail(error, BT_ERR_REQUEST_UNSUPPORTED,
                         "chat is not supported with this model: its chat template is ChatML, "
                         "but its vocabulary lacks %s or %s",
                         chat_token_start, chat_token_end);
    else if (status == BT_OK)
        status = explain(encode_rendering(t, &rendering, options.tokens_max, token_ids, list),
                         options.tokens_max, error);
    chat_rendering_fini(&rendering);
    return status;
}
