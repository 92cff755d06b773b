/* The fields that bodies of /v1/chat/completions and /v1/completions have in common: OpenAI's and
 * SGLang's extensions, the sampling parameters among them. Null is the same as absent everywhere;
 * fields that change nothing here (user, metadata, ...) are ignored. What is said once per endpoint
 * (prompts, log-probabilities, the default length) is api_chat_read.c's and
 * api_completion_read.c's. */
#include <stdio.h>
#include <string.h>

#include "router/api_mask_read.h"
#include "router/api_processor.h"
#include "router/api_request_internal.h"
#include "router/api_words.h"

static const char *const NAMES[OPENAI_FIELD_COUNT] = {
    [OPENAI_MODEL] = "model",
    [OPENAI_STREAM] = "stream",
    [OPENAI_STREAM_OPTIONS] = "stream_options",
    [OPENAI_RID] = "rid",
    [OPENAI_RETURN_META_INFO] = "return_meta_info",
    [OPENAI_RETURN_TOKEN_IDS] = "return_token_ids",
    [OPENAI_RETURN_PROMPT_TOKEN_IDS] = "return_prompt_token_ids",
    [OPENAI_RETURN_SAMPLING_MASK] = "return_sampling_mask",
    [OPENAI_SAMPLING_LOGPROBS_MODE] = "sampling_logprobs_mode",
    [OPENAI_SAMPLING_MASK_FORMAT] = "sampling_mask_format",
    [OPENAI_SAMPLING_MASK_MODE] = "sampling_mask_mode",
    [OPENAI_ON_MASK_OVERFLOW] = "on_mask_overflow",
    [OPENAI_CUSTOM_LOGIT_PROCESSOR] = "custom_logit_processor",
    [OPENAI_RESPONSE_FORMAT] = "response_format",
    [OPENAI_CACHE_SALT] = "cache_salt",
    [OPENAI_EXTRA_KEY] = "extra_key",
    [OPENAI_STORE] = "store",
    [OPENAI_LORA_PATH] = "lora_path",
    [OPENAI_SESSION_PARAMS] = "session_params",
    [OPENAI_RETURN_HIDDEN_STATES] = "return_hidden_states",
    [OPENAI_RETURN_ROUTED_EXPERTS] = "return_routed_experts",
    [OPENAI_BOOTSTRAP_HOST] = "bootstrap_host",
    [OPENAI_BOOTSTRAP_PORT] = "bootstrap_port",
    [OPENAI_BOOTSTRAP_ROOM] = "bootstrap_room",
};

void api_openai_collect(api_reader *reader, const bt_json *root, openai_fields *out) {
    api_fields_collect(&out->own, root, NAMES, OPENAI_FIELD_COUNT, reader->failure, NULL, NULL);
    api_fields_collect(&out->parameters, root, SAMPLING_OPENAI_NAMES, SAMPLING_FIELD_COUNT,
                       reader->failure, NULL, NULL);
    /* Of these endpoints null is no length of its own. */
    out->parameters.is_null[SAMPLING_MAX_NEW_TOKENS] = false;
}

static void read_model_name(const api_reader *reader, api_fields *fields) {
    char *model = reader->request->model;
    model[0] = 0;
    api_get_string(fields, OPENAI_MODEL, model, API_NAME_MAX);
    if (model[0] == 0) memcpy(model, reader->settings->model_name, API_NAME_MAX);
}

static void read_stream_options(api_fields *fields, api_request *request) {
    static const char *const OPTION_NAMES[] = {"include_usage", "continuous_usage_stats"};
    const bt_json *value = &fields->values[OPENAI_STREAM_OPTIONS];
    api_fields options;
    if (!fields->is_given[OPENAI_STREAM_OPTIONS]) return;
    if (value->kind != BT_JSON_OBJECT) {
        (void)api_fail(fields->failure, 400, API_ERROR_OPENAI,
                       "stream_options must be an object, got %s.", bt_json_kind_name(value->kind));
        return;
    }
    api_fields_collect(&options, value, OPTION_NAMES, 2, fields->failure, NULL, NULL);
    api_get_bool(&options, 0, &request->includes_usage);
    api_get_bool(&options, 1, &request->continuous_usage);
}

/* {"type":"text"} is what comes out anyway. */
static void refuse_response_format(api_fields *fields) {
    static const char *const TYPE[] = {"type"};
    const bt_json *value = &fields->values[OPENAI_RESPONSE_FORMAT];
    api_fields format;
    if (!fields->is_given[OPENAI_RESPONSE_FORMAT]) return;
    if (value->kind == BT_JSON_OBJECT) {
        api_fields_collect(&format, value, TYPE, 1, fields->failure, NULL, NULL);
        if (format.is_given[0] && bt_json_string_equals(&format.values[0], "text")) return;
    }
    api_refuse_unless_neutral(fields, OPENAI_RESPONSE_FORMAT, " yet, but for {\"type\":\"text\"}");
}

static void read_flags(api_fields *fields, api_request *request) {
    api_get_bool(fields, OPENAI_STREAM, &request->streams);
    read_stream_options(fields, request);
    api_get_bool(fields, OPENAI_RETURN_META_INFO, &request->returns_meta);
    api_get_bool(fields, OPENAI_RETURN_TOKEN_IDS, &request->returns_token_ids);
    api_get_bool(fields, OPENAI_RETURN_PROMPT_TOKEN_IDS, &request->returns_prompt_ids);
    refuse_response_format(fields);
    for (size_t field = OPENAI_FIRST_REFUSED; field < OPENAI_FIELD_COUNT; field++) {
        api_refuse_unless_neutral(fields, field, " yet");
    }
    api_salt_read(fields, OPENAI_CACHE_SALT, OPENAI_EXTRA_KEY, request);
}

/* The client sees one id, and the items of a list are named after it: R_0, R_1, ... */
static void read_rid(const api_reader *reader, api_fields *fields) {
    const api_request *first = &reader->batch->items[0];
    api_request *request = reader->request;
    api_rid_read(fields, OPENAI_RID, request);
    if (!reader->batch->is_list) return;
    size_t used = strlen(request->rid);
    if (!request->has_own_rid && reader->index > 0) {
        used = first->list_rid_bytes;
        memcpy(request->rid, first->rid, used);
    }
    request->list_rid_bytes = used;
    snprintf(request->rid + used, sizeof(request->rid) - used, "_%u", reader->index);
}

static const api_mask_fields MASKS = {.flag = OPENAI_RETURN_SAMPLING_MASK,
                                      .logprobs = OPENAI_SAMPLING_LOGPROBS_MODE,
                                      .format = OPENAI_SAMPLING_MASK_FORMAT,
                                      .mode = OPENAI_SAMPLING_MASK_MODE,
                                      .on_overflow = OPENAI_ON_MASK_OVERFLOW};

void api_openai_read(api_reader *reader, openai_fields *fields, api_sampling *sampling) {
    api_request *request = reader->request;
    read_model_name(reader, &fields->own);
    read_flags(&fields->own, request);
    read_rid(reader, &fields->own);
    api_mask_read(&fields->own, &MASKS, request);
    api_processor_read(&fields->own, OPENAI_CUSTOM_LOGIT_PROCESSOR, sampling);
    api_sampling_read(&fields->parameters, reader->model, request, sampling);
    api_mask_admit(reader->settings, reader->model, request, reader->failure);
    /* Without meta_info or tensors there is nowhere to return masks, so nothing pays for them. */
    if (!request->returns_meta && !request->wants_safetensors) api_mask_drop(request);
}
