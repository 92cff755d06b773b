/* Rendering of ChatML conversations: what the recognised templates do, written by hand. */
#include "router/chat_template.h"

#include <string.h>

#include "base/mem.h"

const char chat_token_start[] = "<|im_start|>";
const char chat_token_end[] = "<|im_end|>";

static const char think_open[] = "<think>";
static const char think_close[] = "</think>";
static const char tool_open[] = "<tool_response>";
static const char tool_close[] = "</tool_response>";

/* A borrowed run of bytes. */
typedef struct text_run {
    const char *text;
    size_t bytes;
} text_run;

static text_run run_of(const char *text) {
    return (text_run){text, strlen(text)};
}

void chat_template_fini(chat_template *chat) {
    bt_free(chat->default_system);
    *chat = (chat_template){0};
}

void chat_rendering_fini(chat_rendering *rendering) {
    bt_free(rendering->text);
    bt_free(rendering->spans);
    *rendering = (chat_rendering){0};
}

static bt_status put(chat_rendering *out, text_run run) {
    size_t needed = 0;
    if (!bt_add_size(out->bytes, run.bytes, &needed)) return BT_ERR_WORKER_MEMORY;
    if (needed > out->capacity) {
        const size_t capacity = needed < 512 ? 1024 : needed * 2;
        char *text = bt_realloc(out->text, capacity);
        if (text == NULL) return BT_ERR_WORKER_MEMORY;
        out->text = text;
        out->capacity = capacity;
    }
    if (run.bytes > 0) memcpy(out->text + out->bytes, run.text, run.bytes);
    out->bytes = needed;
    return BT_OK;
}

static bt_status put_text(chat_rendering *out, const char *text) {
    return put(out, run_of(text));
}

static bt_status put_token(chat_rendering *out, bool is_end) {
    if (out->span_count == out->span_capacity) {
        const size_t capacity = out->span_capacity == 0 ? 16 : 2 * out->span_capacity;
        chat_span *spans = bt_realloc(out->spans, capacity * sizeof *spans);
        if (spans == NULL) return BT_ERR_WORKER_MEMORY;
        out->spans = spans;
        out->span_capacity = capacity;
    }
    const size_t start = out->bytes;
    const bt_status status = put_text(out, is_end ? chat_token_end : chat_token_start);
    if (status == BT_OK) out->spans[out->span_count++] = (chat_span){start, out->bytes, is_end};
    return status;
}

static bt_status put_head(chat_rendering *out, const char *role) {
    bt_status status = put_token(out, false);
    if (status == BT_OK) status = put_text(out, role);
    if (status == BT_OK) status = put_text(out, "\n");
    return status;
}

static bt_status put_tail(chat_rendering *out) {
    const bt_status status = put_token(out, true);
    return status == BT_OK ? put_text(out, "\n") : status;
}

static bt_status put_message(chat_rendering *out, const char *role, text_run content) {
    bt_status status = put_head(out, role);
    if (status == BT_OK) status = put(out, content);
    if (status == BT_OK) status = put_tail(out);
    return status;
}

/* The role that is rendered, or NULL. */
static const char *known_role(const char *role) {
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    if (strcmp(role, "developer") == 0) return "system";
    for (size_t i = 0; i < BT_ARRAY_COUNT(roles); i++)
        if (strcmp(role, roles[i]) == 0) return roles[i];
    return NULL;
}

static bool is_role(const chat_message *message, const char *role) {
    return strcmp(known_role(message->role), role) == 0;
}

static text_run content_of(const chat_message *message) {
    return (text_run){message->content, message->content_bytes};
}

static text_run strip_left(text_run run) {
    while (run.bytes > 0 && run.text[0] == '\n') {
        run.text++;
        run.bytes--;
    }
    return run;
}

static text_run strip_right(text_run run) {
    while (run.bytes > 0 && run.text[run.bytes - 1] == '\n')
        run.bytes--;
    return run;
}

/* What is before the first `mark`; all of it when there is none. */
static text_run before_first(text_run run, const char *mark) {
    const char *at = memmem(run.text, run.bytes, mark, strlen(mark));
    if (at != NULL) run.bytes = (size_t)(at - run.text);
    return run;
}

/* What is after the last `mark`; all of it when there is none. */
static text_run after_last(text_run run, const char *mark) {
    const size_t mark_bytes = strlen(mark);
    const char *at = memmem(run.text, run.bytes, mark, mark_bytes);
    while (at != NULL) {
        run.bytes -= (size_t)(at - run.text) + mark_bytes;
        run.text = at + mark_bytes;
        at = memmem(run.text, run.bytes, mark, mark_bytes);
    }
    return run;
}

static bool is_wrapped_tool(text_run run) {
    const text_run open = run_of(tool_open);
    const text_run close = run_of(tool_close);
    return run.bytes >= open.bytes && memcmp(run.text, open.text, open.bytes) == 0 &&
           run.bytes >= close.bytes &&
           memcmp(run.text + run.bytes - close.bytes, close.text, close.bytes) == 0;
}

/* A conversation while it is rendered. */
typedef struct chat_walk {
    const chat_template *chat;
    const chat_message *messages;
    size_t count;
    size_t last_query; /* index of the last question; thoughts before it are stripped */
    chat_rendering *out;
} chat_walk;

static size_t find_last_query(const chat_walk *walk) {
    for (size_t i = walk->count; i > 0; i--) {
        const chat_message *message = &walk->messages[i - 1];
        if (is_role(message, "user") && !is_wrapped_tool(content_of(message))) return i - 1;
    }
    return walk->count == 0 ? 0 : walk->count - 1;
}

/* An assistant's turn of Qwen3: the thought is kept only after the last question. */
static bt_status put_thinking(const chat_walk *walk, size_t index) {
    text_run content = content_of(&walk->messages[index]);
    text_run thought = {"", 0};
    if (memmem(content.text, content.bytes, think_close, sizeof think_close - 1) != NULL) {
        thought = strip_right(before_first(content, think_close));
        thought = strip_left(after_last(thought, think_open));
        content = strip_left(after_last(content, think_close));
    }
    const bool is_last = index + 1 == walk->count;
    bt_status status = put_head(walk->out, "assistant");
    if (index > walk->last_query && (is_last || thought.bytes > 0)) {
        if (status == BT_OK) status = put_text(walk->out, "<think>\n");
        if (status == BT_OK) status = put(walk->out, strip_right(strip_left(thought)));
        if (status == BT_OK) status = put_text(walk->out, "\n</think>\n\n");
        content = strip_left(content);
    }
    if (status == BT_OK) status = put(walk->out, content);
    if (status == BT_OK) status = put_tail(walk->out);
    return status;
}

/* Neighbouring tool answers share one user turn. */
static bt_status put_tool(const chat_walk *walk, size_t index) {
    const chat_message *messages = walk->messages;
    const bool opens = index == 0 || !is_role(&messages[index - 1], "tool");
    const bool closes = index + 1 == walk->count || !is_role(&messages[index + 1], "tool");
    bt_status status = BT_OK;
    if (opens) status = put_token(walk->out, false);
    if (opens && status == BT_OK) status = put_text(walk->out, "user");
    if (status == BT_OK) status = put_text(walk->out, "\n<tool_response>\n");
    if (status == BT_OK) status = put(walk->out, content_of(&messages[index]));
    if (status == BT_OK) status = put_text(walk->out, "\n</tool_response>");
    if (closes && status == BT_OK) status = put_tail(walk->out);
    return status;
}

static bt_status put_turn(const chat_walk *walk, size_t index) {
    const chat_message *message = &walk->messages[index];
    const char *role = known_role(message->role);
    const bool is_qwen = walk->chat->style != CHAT_STYLE_CHATML;
    if (is_qwen && strcmp(role, "tool") == 0) return put_tool(walk, index);
    if (walk->chat->style == CHAT_STYLE_QWEN3 && strcmp(role, "assistant") == 0)
        return put_thinking(walk, index);
    return put_message(walk->out, role, content_of(message));
}

static bt_status check(const chat_template *chat, const chat_message *messages, size_t count,
                       chat_options options, bt_error *error) {
    if (chat->style == CHAT_STYLE_NONE)
        return bt_fail(error, BT_ERR_REQUEST_UNSUPPORTED,
                       "chat is not supported with this model: %s; send a rendered prompt to "
                       "/generate instead",
                       chat->reason);
    if (count == 0)
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "messages must hold at least one message");
    for (size_t i = 0; i < count; i++)
        if (known_role(messages[i].role) == NULL)
            return bt_fail(error, BT_ERR_REQUEST_INVALID,
                           "messages[%zu] has the unknown role \"%.40s\" (known are system, "
                           "developer, user, assistant and tool)",
                           i, messages[i].role);
    if (options.continues_final && !is_role(&messages[count - 1], "assistant"))
        return bt_fail(error, BT_ERR_REQUEST_INVALID,
                       "continue_final_message needs a last message of the assistant");
    return BT_OK;
}

bt_status chat_template_render(const chat_template *chat, const chat_message *messages,
                               size_t message_count, chat_options options, chat_rendering *out,
                               bt_error *error) {
    bt_status status = check(chat, messages, message_count, options, error);
    if (status != BT_OK) return status;
    chat_walk walk = {.chat = chat, .messages = messages, .count = message_count, .out = out};
    if (options.continues_final) walk.count--;
    walk.last_query = find_last_query(&walk);
    if (chat->default_system != NULL && !is_role(&messages[0], "system"))
        status = put_message(out, "system", run_of(chat->default_system));
    for (size_t i = 0; i < walk.count && status == BT_OK; i++)
        status = put_turn(&walk, i);
    if (status == BT_OK) status = put_head(out, "assistant");
    if (status == BT_OK && chat->style == CHAT_STYLE_QWEN3 && options.thinking == CHAT_THINKING_OFF)
        status = put_text(out, "<think>\n\n</think>\n\n");
    if (status == BT_OK && options.continues_final)
        status = put(out, content_of(&messages[message_count - 1]));
    return status == BT_OK ? BT_OK : bt_fail(error, status, "out of memory");
}
