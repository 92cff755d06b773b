/* ChatML rendering. Real templates are Jinja programs; the ones that say ChatML are recognised by
 * the expressions in their source, and rendered here. Everything else is refused with a sentence.
 *
 * A *chat template* is immutable after detection and owned by its tokenizer. A *rendering* is the
 * text that the model's own template would give, with the places marked where the template (and
 * never a message) put a special token. Pure; any thread. */
#ifndef BT_ROUTER_CHAT_TEMPLATE_H
#define BT_ROUTER_CHAT_TEMPLATE_H

#include "router/tokenizer.h"

typedef enum chat_style {
    CHAT_STYLE_NONE,   /* not ChatML, or none given: `reason` says what */
    CHAT_STYLE_CHATML, /* every role is written as it is: SmolLM2, Qwen2 */
    CHAT_STYLE_QWEN,   /* tool answers are wrapped into a user turn: Qwen2.5, Qwen3-2507 */
    CHAT_STYLE_QWEN3,  /* as QWEN, with thinking: stripped from history, switched at the end */
} chat_style;

typedef struct chat_template {
    chat_style style;
    char *default_system; /* owned; NULL = none. Said when the first message is not the system's */
    char reason[128];     /* of NONE */
} chat_template;

/* `source` may be NULL: the model has no template. Fails only when memory is out. */
BT_MUST_CHECK bt_status chat_template_detect(const char *source, size_t bytes, chat_template *out);
void chat_template_fini(chat_template *chat);

/* The two tokens of ChatML. */
extern const char chat_token_start[]; /* "<|im_start|>" */
extern const char chat_token_end[];   /* "<|im_end|>" */

typedef struct chat_span {
    size_t start; /* in the text */
    size_t end;
    bool is_end; /* chat_token_end, else chat_token_start */
} chat_span;

typedef struct chat_rendering {
    char *text;
    size_t bytes;
    size_t capacity;
    chat_span *spans;
    size_t span_count;
    size_t span_capacity;
} chat_rendering;

/* Renders into *out (zeroed by the caller, who frees it with chat_rendering_fini also after an
 * error). REQUEST_UNSUPPORTED when the template is not ChatML, REQUEST_INVALID for no messages, an
 * unknown role, or continues_final without a final assistant message. */
BT_MUST_CHECK bt_status chat_template_render(const chat_template *chat,
                                             const chat_message *messages, size_t message_count,
                                             chat_options options, chat_rendering *out,
                                             bt_error *error);
void chat_rendering_fini(chat_rendering *rendering);

#endif
