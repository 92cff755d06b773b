/* The body of /v1/completions: the prompt, or a list of them, and what else only a completion has.
 * The fields that it shares with chat are api_openai_read.c's; of a list of prompts they are the
 * same for all. */
#include "router/api_echo.h"
#include "router/api_lists.h"
#include "router/api_request_internal.h"

enum { MAX_TOKENS_DEFAULT = 16 /* OpenAI's */ };

typedef enum completion_field {
    COMPLETION_PROMPT,
    COMPLETION_ECHO,
    COMPLETION_LOGPROBS,
    COMPLETION_BEST_OF,
    COMPLETION_SUFFIX,
    COMPLETION_FIELD_COUNT,
} completion_field;

static const char *const NAMES[COMPLETION_FIELD_COUNT] = {
    [COMPLETION_PROMPT] = "prompt",     [COMPLETION_ECHO] = "echo",
    [COMPLETION_LOGPROBS] = "logprobs", [COMPLETION_BEST_OF] = "best_of",
    [COMPLETION_SUFFIX] = "suffix",
};

/* A number, and not a switch as in a chat. With an echo the prompt has them too. */
static void read_logprobs(api_fields *fields, api_request *request) {
    proto_generation *generation = &request->generation;
    int64_t top = 0;
    api_get_int(fields, COMPLETION_LOGPROBS, &top);
    if (top < 0 || top > API_TOP_LOGPROBS_MAX) {
        (void)api_fail(fields->failure, 400, API_ERROR_OPENAI,
                       "logprobs must be in [0, %d], got %lld.", API_TOP_LOGPROBS_MAX,
                       (long long)top);
        return;
    }
    request->wants_logprob = fields->is_given[COMPLETION_LOGPROBS];
    generation->wants_logprob = request->wants_logprob;
    generation->top_logprobs = (uint32_t)top;
    generation->wants_prompt_logprobs = request->wants_logprob && request->echoes;
}

/* Nothing is chosen among samples, so best_of may only say what happens anyway. */
static void read_best_of(api_fields *fields, const api_request *request) {
    int64_t best_of = 1;
    api_get_int(fields, COMPLETION_BEST_OF, &best_of);
    if (best_of == 1 || best_of == (int64_t)request->generation.samples) return;
    (void)api_fail(fields->failure, 400, API_ERROR_OPENAI,
                   "best_of must be 1 or n=%u, got %lld: choosing among samples is not supported.",
                   request->generation.samples, (long long)best_of);
}

/* Of a list its first entry tells whether it has prompts or the ids of one. */
static bool is_list_of_prompts(const bt_json *value) {
    bt_json_iter iter;
    bt_json first;
    if (value->kind != BT_JSON_ARRAY) return false;
    bt_json_iter_init(&iter, value);
    return bt_json_next_item(&iter, &first) &&
           (first.kind == BT_JSON_STRING || first.kind == BT_JSON_ARRAY);
}

static bool read_prompt(api_reader *reader, const bt_json *value) {
    api_request *request = reader->request;
    const tokenizer *t = reader->settings->tokenizer;
    const bool is_text = value->kind == BT_JSON_STRING;
    reader->names_item = true; /* prompts are the items' own */
    if (!is_text && value->kind != BT_JSON_ARRAY)
        return api_fail(reader->failure, 400, API_ERROR_OPENAI,
                        "prompt must be a string, a list of token ids or a list of these, got %s.",
                        bt_json_kind_name(value->kind));
    const bool is_good = is_text ? api_prompt_from_text(reader, value)
                                 : api_prompt_from_ids(reader, NAMES[COMPLETION_PROMPT], value);
    if (!is_good || !request->echoes) return is_good;
    const bt_status status =
        is_text ? api_echo_from_text(request, t, value) : api_echo_from_ids(request, t);
    return status == BT_OK || api_prompt_fail(reader, status);
}

static void read_item(api_reader *reader, api_fields *fields, openai_fields *common,
                      const bt_json *prompt) {
    api_request *request = reader->request;
    api_sampling sampling = {.max_new_tokens = MAX_TOKENS_DEFAULT};
    if (reader->index > 0) sampling.same_stops = &reader->batch->items[0];
    api_get_bool(fields, COMPLETION_ECHO, &request->echoes);
    read_logprobs(fields, request);
    api_refuse_unless_neutral(fields, COMPLETION_SUFFIX, "");
    api_openai_read(reader, common, &sampling);
    read_best_of(fields, request);
    if (reader->failure->http_status != 0 || !read_prompt(reader, prompt)) return;
    api_sampling_fit_context(reader->model, &sampling, request, reader->failure);
}

void api_completion_read(api_reader *reader, const bt_json *root) {
    api_fields fields;
    openai_fields common;
    bt_json_iter iter;
    api_fields_collect(&fields, root, NAMES, COMPLETION_FIELD_COUNT, reader->failure, NULL, NULL);
    api_openai_collect(reader, root, &common);
    bt_json prompt = fields.values[COMPLETION_PROMPT];
    if (!fields.is_given[COMPLETION_PROMPT])
        (void)api_fail(reader->failure, 400, API_ERROR_OPENAI, "prompt is required.");
    reader->batch->is_list = fields.is_given[COMPLETION_PROMPT] && is_list_of_prompts(&prompt);
    if (!api_items_create(reader, reader->batch->is_list ? api_list_length(&prompt) : 1)) return;
    if (reader->batch->is_list) bt_json_iter_init(&iter, &fields.values[COMPLETION_PROMPT]);
    for (uint32_t i = 0; i < reader->batch->count; i++) {
        if (!api_item_begin(reader, i)) return;
        if (reader->batch->is_list) (void)bt_json_next_item(&iter, &prompt);
        read_item(reader, &fields, &common, &prompt);
        if (!api_item_end(reader)) return;
    }
}
