/* The body of /v1/chat/completions: messages and what else only a chat has. The fields that it
 * shares with completions are api_openai_read.c's. */
#include <string.h>

#include "base/mem.h"
#include "router/api_request_internal.h"
#include "router/http_status.h"

enum { MESSAGES_MAX = 4096 };

typedef enum chat_field {
    CHAT_MESSAGES,
    CHAT_INPUT_IDS,
    CHAT_MAX_COMPLETION_TOKENS,
    CHAT_LOGPROBS,
    CHAT_TOP_LOGPROBS,
    CHAT_TOOLS,
    CHAT_TOOL_CHOICE,
    CHAT_CHAT_TEMPLATE_KWARGS,
    CHAT_MODALITIES,
    CHAT_CONTINUE_FINAL_MESSAGE,
    CHAT_FIRST_REFUSED,
    CHAT_FUNCTIONS = CHAT_FIRST_REFUSED,
    CHAT_FUNCTION_CALL,
    CHAT_AUDIO,
    CHAT_PREDICTION,
    CHAT_REASONING_EFFORT,
    CHAT_FIELD_COUNT,
} chat_field;

static const char *const NAMES[CHAT_FIELD_COUNT] = {
    [CHAT_MESSAGES] = "messages",
    [CHAT_INPUT_IDS] = "input_ids",
    [CHAT_MAX_COMPLETION_TOKENS] = "max_completion_tokens",
    [CHAT_LOGPROBS] = "logprobs",
    [CHAT_TOP_LOGPROBS] = "top_logprobs",
    [CHAT_TOOLS] = "tools",
    [CHAT_TOOL_CHOICE] = "tool_choice",
    [CHAT_CHAT_TEMPLATE_KWARGS] = "chat_template_kwargs",
    [CHAT_MODALITIES] = "modalities",
    [CHAT_FUNCTIONS] = "functions",
    [CHAT_FUNCTION_CALL] = "function_call",
    [CHAT_AUDIO] = "audio",
    [CHAT_PREDICTION] = "prediction",
    [CHAT_CONTINUE_FINAL_MESSAGE] = "continue_final_message",
    [CHAT_REASONING_EFFORT] = "reasoning_effort",
};

/* ---- messages -------------------------------------------------------------------------------- */

typedef enum message_field {
    MESSAGE_ROLE,
    MESSAGE_CONTENT,
    MESSAGE_TOOL_CALLS,
    MESSAGE_FIELD_COUNT,
} message_field;

static const char *const MESSAGE_NAMES[MESSAGE_FIELD_COUNT] = {"role", "content", "tool_calls"};
static const char *const ROLES[] = {"system", "developer", "user", "assistant", "tool"};

/* Messages under construction; the contents of all lie one behind the other. */
typedef struct message_list {
    chat_message *messages;
    size_t *content_starts; /* contents move while they grow */
    size_t count, capacity;
    bt_text contents;
} message_list;

static void message_list_fini(message_list *list) {
    bt_free(list->messages);
    bt_free(list->content_starts);
    bt_text_fini(&list->contents);
}

static void add_content(message_list *list, const bt_json *string) {
    char *room = bt_text_reserve(&list->contents, string->bytes);
    if (room != NULL) list->contents.used += bt_json_string_decode(string, room);
}

/* One {"type":"text","text":...} part. */
static bool add_part(api_reader *reader, message_list *list, const bt_json *part) {
    static const char *const PART_NAMES[] = {"type", "text"};
    api_fields fields;
    if (part->kind == BT_JSON_OBJECT) {
        api_fields_collect(&fields, part, PART_NAMES, 2, reader->failure, NULL, NULL);
        bool is_text = fields.is_given[0] && bt_json_string_equals(&fields.values[0], "text");
        if (is_text && fields.is_given[1] && fields.values[1].kind == BT_JSON_STRING) {
            add_content(list, &fields.values[1]);
            return true;
        }
    }
    return api_fail(reader->failure, 400, API_ERROR_OPENAI,
                    "messages: a content part that is not {\"type\":\"text\",\"text\":...}; other "
                    "parts are not supported.");
}

static bool read_content(api_reader *reader, message_list *list, const bt_json *content) {
    bt_json_iter iter;
    bt_json part;
    if (content->kind == BT_JSON_STRING) {
        add_content(list, content);
        return true;
    }
    if (content->kind != BT_JSON_ARRAY)
        return api_fail(reader->failure, 400, API_ERROR_OPENAI,
                        "messages: content must be a string or a list of parts, got %s.",
                        bt_json_kind_name(content->kind));
    bt_json_iter_init(&iter, content);
    while (bt_json_next_item(&iter, &part)) {
        if (!add_part(reader, list, &part)) return false;
    }
    return true;
}

static bool grow_messages(message_list *list) {
    if (list->count < list->capacity) return true;
    size_t grown = list->capacity > 0 ? list->capacity * 2 : 16;
    chat_message *messages = bt_realloc(list->messages, grown * sizeof(*messages));
    if (messages == NULL) return false;
    list->messages = messages;
    size_t *starts = bt_realloc(list->content_starts, grown * sizeof(*starts));
    if (starts == NULL) return false;
    list->content_starts = starts;
    list->capacity = grown;
    return true;
}

static bool read_message(api_reader *reader, message_list *list, const bt_json *value) {
    api_fields fields;
    const char *role = NULL;
    if (value->kind != BT_JSON_OBJECT)
        return api_fail(reader->failure, 400, API_ERROR_OPENAI, "messages must be objects, got %s.",
                        bt_json_kind_name(value->kind));
    api_fields_collect(&fields, value, MESSAGE_NAMES, MESSAGE_FIELD_COUNT, reader->failure, NULL,
                       NULL);
    for (size_t i = 0; i < BT_ARRAY_COUNT(ROLES) && fields.is_given[MESSAGE_ROLE]; i++) {
        if (bt_json_string_equals(&fields.values[MESSAGE_ROLE], ROLES[i])) role = ROLES[i];
    }
    if (role == NULL)
        return api_fail(reader->failure, 400, API_ERROR_OPENAI,
                        "messages: role must be system, developer, user, assistant or tool.");
    api_refuse_unless_neutral(&fields, MESSAGE_TOOL_CALLS, " in messages yet");
    if (reader->failure->http_status != 0) return false;
    if (list->count == MESSAGES_MAX)
        return api_fail(reader->failure, 400, API_ERROR_OPENAI, "more than %d messages.",
                        MESSAGES_MAX);
    if (!grow_messages(list)) return api_prompt_fail(reader, BT_ERR_WORKER_MEMORY);
    size_t start = list->contents.used;
    list->content_starts[list->count] = start;
    if (fields.is_given[MESSAGE_CONTENT] &&
        !read_content(reader, list, &fields.values[MESSAGE_CONTENT]))
        return false;
    list->messages[list->count++] =
        (chat_message){.role = role, .content_bytes = list->contents.used - start};
    return true;
}

static bool encode_messages(api_reader *reader, message_list *list) {
    bt_error error = {0};
    if (list->count == 0)
        return api_fail(reader->failure, 400, API_ERROR_OPENAI, "messages cannot be empty.");
    if (list->contents.has_failed) return api_prompt_fail(reader, BT_ERR_WORKER_MEMORY);
    if (!api_prompt_is_short_enough(reader, list->contents.used)) return false;
    const char *contents = list->contents.bytes != NULL ? list->contents.bytes : "";
    for (size_t i = 0; i < list->count; i++) {
        list->messages[i].content = contents + list->content_starts[i];
    }
    chat_options options = reader->chat;
    options.tokens_max = api_prompt_tokens_max(reader, list->contents.used);
    bt_status status =
        tokenizer_encode_chat(reader->settings->tokenizer, list->messages, list->count, options,
                              &reader->request->prompt, &error);
    if (status == BT_OK) return true;
    if (status == BT_ERR_CALLER_LIMIT || error.text[0] == 0) return api_prompt_fail(reader, status);
    return api_fail(reader->failure, http_status_of(status), API_ERROR_OPENAI, "%s", error.text);
}

static bool read_messages(api_reader *reader, const bt_json *value) {
    message_list list = {0};
    bt_json_iter iter;
    bt_json item;
    if (value->kind != BT_JSON_ARRAY)
        return api_fail(reader->failure, 400, API_ERROR_OPENAI, "messages must be a list, got %s.",
                        bt_json_kind_name(value->kind));
    bt_text_init(&list.contents, API_TEXT_MAX);
    bt_json_iter_init(&iter, value);
    bool is_good = true;
    while (is_good && bt_json_next_item(&iter, &item)) {
        is_good = read_message(reader, &list, &item);
    }
    if (is_good) is_good = encode_messages(reader, &list);
    message_list_fini(&list);
    return is_good;
}

/* ---- the other fields ------------------------------------------------------------------------ */

static void read_logprobs(api_fields *fields, api_request *request) {
    int64_t top_logprobs = 0;
    api_get_bool(fields, CHAT_LOGPROBS, &request->wants_logprob);
    api_get_int(fields, CHAT_TOP_LOGPROBS, &top_logprobs);
    request->generation.wants_logprob = request->wants_logprob;
    if (top_logprobs < 0 || top_logprobs > API_TOP_LOGPROBS_MAX) {
        (void)api_fail(fields->failure, 400, API_ERROR_OPENAI,
                       "top_logprobs must be in [0, %d], got %lld.", API_TOP_LOGPROBS_MAX,
                       (long long)top_logprobs);
    } else if (top_logprobs > 0 && !request->wants_logprob) {
        (void)api_fail(fields->failure, 400, API_ERROR_OPENAI,
                       "top_logprobs is only allowed when logprobs is true.");
    } else {
        request->generation.top_logprobs = (uint32_t)top_logprobs;
    }
}

static void refuse_tools(api_fields *fields) {
    const bt_json *choice = &fields->values[CHAT_TOOL_CHOICE];
    bool is_off = fields->is_given[CHAT_TOOL_CHOICE] && bt_json_string_equals(choice, "none");
    bool is_auto = fields->is_given[CHAT_TOOL_CHOICE] && bt_json_string_equals(choice, "auto");
    if (is_off) return;
    api_refuse_unless_neutral(fields, CHAT_TOOLS, " yet");
    if (!is_auto) api_refuse_unless_neutral(fields, CHAT_TOOL_CHOICE, " yet");
}

static void refuse_template_key(void *context, const bt_json *key) {
    api_failure *failure = context;
    int bytes = key->bytes < 80 ? (int)key->bytes - 2 : 78;
    (void)api_fail(failure, 400, API_ERROR_OPENAI,
                   "chat_template_kwargs: '%.*s' is not supported, only enable_thinking.", bytes,
                   key->text + 1);
}

/* The one argument of the templates that we know. */
static void read_template_arguments(api_reader *reader, api_fields *fields) {
    static const char *const THINKING[] = {"enable_thinking"};
    const bt_json *value = &fields->values[CHAT_CHAT_TEMPLATE_KWARGS];
    api_fields arguments;
    bool is_on = false;
    api_get_bool(fields, CHAT_CONTINUE_FINAL_MESSAGE, &reader->chat.continues_final);
    if (!fields->is_given[CHAT_CHAT_TEMPLATE_KWARGS]) return;
    if (value->kind != BT_JSON_OBJECT) {
        (void)api_fail(fields->failure, 400, API_ERROR_OPENAI,
                       "chat_template_kwargs must be an object, got %s.",
                       bt_json_kind_name(value->kind));
        return;
    }
    api_fields_collect(&arguments, value, THINKING, 1, fields->failure, refuse_template_key,
                       fields->failure);
    api_get_bool(&arguments, 0, &is_on);
    if (arguments.is_given[0]) reader->chat.thinking = is_on ? CHAT_THINKING_ON : CHAT_THINKING_OFF;
}

static void refuse_modalities(api_fields *fields) {
    const bt_json *list = &fields->values[CHAT_MODALITIES];
    bt_json_iter iter;
    bt_json item;
    if (!fields->is_given[CHAT_MODALITIES] || list->kind != BT_JSON_ARRAY) return;
    bt_json_iter_init(&iter, list);
    while (bt_json_next_item(&iter, &item)) {
        if (!bt_json_string_equals(&item, "text"))
            (void)api_fail(fields->failure, 400, API_ERROR_OPENAI,
                           "modalities other than text are not supported.");
    }
}

static void refuse_others(api_fields *fields) {
    refuse_tools(fields);
    refuse_modalities(fields);
    for (size_t field = CHAT_FIRST_REFUSED; field < CHAT_FIELD_COUNT; field++) {
        if (field == CHAT_REASONING_EFFORT && bt_json_string_equals(&fields->values[field], "none"))
            continue;
        api_refuse_unless_neutral(fields, field, " yet");
    }
}

/* max_tokens is the old name of max_completion_tokens; sentences have the one that counts. */
static void read_length(api_fields *fields, api_fields *parameters, const char **names) {
    const size_t max = SAMPLING_MAX_NEW_TOKENS;
    int64_t tokens = 1;
    if (fields->is_given[CHAT_MAX_COMPLETION_TOKENS]) {
        parameters->values[max] = fields->values[CHAT_MAX_COMPLETION_TOKENS];
        parameters->is_given[max] = true;
        names[max] = NAMES[CHAT_MAX_COMPLETION_TOKENS];
    }
    api_get_int(parameters, max, &tokens);
    if (tokens < 1)
        (void)api_fail(fields->failure, 400, API_ERROR_OPENAI, "%s must be at least 1, got %lld.",
                       names[max], (long long)tokens);
}

static void read_prompt(api_reader *reader, const api_fields *fields) {
    if (fields->is_given[CHAT_INPUT_IDS]) {
        (void)api_prompt_from_ids(reader, NAMES[CHAT_INPUT_IDS], &fields->values[CHAT_INPUT_IDS]);
    } else if (fields->is_given[CHAT_MESSAGES]) {
        (void)read_messages(reader, &fields->values[CHAT_MESSAGES]);
    } else {
        (void)api_fail(reader->failure, 400, API_ERROR_OPENAI, "messages is required.");
    }
}

static void read_item(api_reader *reader, const bt_json *root) {
    api_fields fields;
    openai_fields common;
    const char *names[SAMPLING_FIELD_COUNT];
    api_sampling sampling = {.is_open_ended = true};
    api_fields_collect(&fields, root, NAMES, CHAT_FIELD_COUNT, reader->failure, NULL, NULL);
    api_openai_collect(reader, root, &common);
    read_logprobs(&fields, reader->request);
    refuse_others(&fields);
    read_template_arguments(reader, &fields);
    memcpy(names, common.parameters.names, sizeof(names));
    common.parameters.names = names;
    read_length(&fields, &common.parameters, names);
    api_openai_read(reader, &common, &sampling);
    if (reader->failure->http_status != 0) return;
    read_prompt(reader, &fields);
    if (reader->failure->http_status != 0) return;
    api_sampling_fit_context(reader->model, &sampling, reader->request, reader->failure);
}

void api_chat_read(api_reader *reader, const bt_json *root) {
    if (!api_items_create(reader, 1) || !api_item_begin(reader, 0)) return;
    read_item(reader, root);
    (void)api_item_end(reader);
}
