/* Ends common to all requests: the body, prompts, what is checked after tokenizing. */
#include "router/api_request.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "router/api_echo.h"
#include "router/api_request_internal.h"
#include "router/api_words.h"
#include "router/http_status.h"
#include "router/random_id.h"

enum { WHOLE_COUNT_BYTES = 1 << 20 /* longer texts are not tokenized only to tell their length */ };

static void request_fini(api_request *request) {
    token_list_fini(&request->prompt);
    token_list_fini(&request->biases);
    token_list_fini(&request->logprob_ids);
    token_list_fini(&request->logprob_order);
    api_echo_fini(&request->echo);
    if (request->borrows_stops) return;
    stop_set_destroy(request->stops);
    for (uint32_t i = 0; i < request->stop_count; i++) {
        bt_free(request->stop_texts[i]);
    }
    bt_free(request->stop_texts);
    bt_free(request->stop_bytes);
}

void api_batch_fini(api_batch *batch) {
    for (uint32_t i = 0; i < batch->count; i++) {
        request_fini(&batch->items[i]);
    }
    bt_free(batch->items);
    memset(batch, 0, sizeof(*batch));
}

static uint64_t list_bytes(const token_list *list) {
    return (uint64_t)list->capacity * sizeof(*list->ids);
}

static uint64_t stop_bytes(const api_request *request) {
    if (request->borrows_stops || request->stops == NULL) return 0;
    uint64_t bytes = stop_set_bytes(request->stops);
    for (uint32_t i = 0; i < request->stop_count; i++) {
        bytes += sizeof(char *) + sizeof(size_t) + request->stop_bytes[i] + 1;
    }
    return bytes;
}

static uint64_t request_bytes(const api_request *request) {
    const api_echo *echo = &request->echo;
    uint64_t bytes = list_bytes(&request->prompt) + list_bytes(&request->biases) +
                     list_bytes(&request->logprob_ids) + list_bytes(&request->logprob_order);
    if (echo->starts != NULL) bytes += (uint64_t)request->prompt.count * sizeof(*echo->starts);
    return bytes + echo->bytes + stop_bytes(request);
}

uint64_t api_batch_bytes(const api_batch *batch) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        bytes += request_bytes(&batch->items[i]);
    }
    return bytes;
}

static bool fail_too_long(const api_reader *reader, uint64_t tokens, bool is_more) {
    return api_fail(reader->failure, 400, API_ERROR_GENERATE,
                    "The input (%s%llu tokens) is longer than the model's context length (%u "
                    "tokens).",
                    is_more ? "more than " : "", (unsigned long long)tokens,
                    reader->model->context_tokens);
}

bool api_prompt_fail(const api_reader *reader, bt_status status) {
    if (status == BT_ERR_CALLER_LIMIT)
        return fail_too_long(reader, reader->model->context_tokens, true);
    return api_fail(reader->failure, http_status_of(status), API_ERROR_GENERATE,
                    "the prompt cannot be tokenized: %s", bt_status_string(status));
}

bool api_prompt_is_short_enough(const api_reader *reader, size_t bytes) {
    /* Composing characters (NFC) leaves at least a third of a text. */
    uint64_t token_bytes = 3ull * tokenizer_token_bytes_max(reader->settings->tokenizer);
    uint64_t tokens = token_bytes > 0 ? bytes / token_bytes : bytes;
    if (tokens <= reader->model->context_tokens) return true;
    return fail_too_long(reader, tokens, true);
}

uint32_t api_prompt_tokens_max(const api_reader *reader, size_t bytes) {
    return bytes <= WHOLE_COUNT_BYTES ? 0 : reader->model->context_tokens;
}

bool api_prompt_from_text(api_reader *reader, const bt_json *value) {
    const tokenizer *t = reader->settings->tokenizer;
    /* An escape stands for at least a sixth of its bytes. */
    if (!api_prompt_is_short_enough(reader, value->bytes / 6)) return false;
    char *text = bt_malloc(value->bytes);
    if (text == NULL) return api_prompt_fail(reader, BT_ERR_WORKER_MEMORY);
    size_t bytes = bt_json_string_decode(value, text);
    if (!api_prompt_is_short_enough(reader, bytes)) {
        bt_free(text);
        return false;
    }
    const tokenizer_encode_options options = {.adds_special = true,
                                              .parses_special = true,
                                              .tokens_max = api_prompt_tokens_max(reader, bytes)};
    bt_status status = tokenizer_encode(t, text, bytes, options, &reader->request->prompt);
    bt_free(text);
    if (status != BT_OK) return api_prompt_fail(reader, status);
    if (reader->request->prompt.count == 0)
        return api_fail(reader->failure, 400, API_ERROR_GENERATE, "The prompt is empty.");
    return true;
}

bool api_prompt_from_ids(api_reader *reader, const char *name, const bt_json *value) {
    token_list *prompt = &reader->request->prompt;
    uint32_t vocab = reader->model->vocab_size;
    bt_json_iter iter;
    bt_json item;
    if (value->kind != BT_JSON_ARRAY)
        return api_fail(reader->failure, 400, API_ERROR_SCHEMA,
                        "%s must be a list of token ids, got %s.", name,
                        bt_json_kind_name(value->kind));
    uint64_t count = 0;
    bt_json_iter_init(&iter, value);
    while (bt_json_next_item(&iter, &item)) {
        int64_t id;
        if (!bt_json_get_int64(&item, false, &id) || id < 0 || id >= (int64_t)vocab)
            return api_fail(reader->failure, 400, API_ERROR_SCHEMA,
                            "%s[%llu] must be a token id in [0, %lld], got %.*s.", name,
                            (unsigned long long)count, (long long)vocab - 1,
                            (int)(item.bytes < 40 ? item.bytes : 40), item.text);
        count++;
        /* Behind the context the ids are only counted, for the sentence. */
        if (count > reader->model->context_tokens) continue;
        if (token_list_append(prompt, (int32_t)id) != BT_OK)
            return api_prompt_fail(reader, BT_ERR_WORKER_MEMORY);
    }
    if (count == 0)
        return api_fail(reader->failure, 400, API_ERROR_GENERATE, "%s cannot be empty.", name);
    if (count > reader->model->context_tokens) return fail_too_long(reader, count, false);
    return true;
}

void api_rid_read(api_fields *fields, size_t field, api_request *request) {
    request->rid[0] = 0;
    api_get_string(fields, field, request->rid, API_RID_MAX + 1);
    request->has_own_rid = request->rid[0] != 0;
    if (!request->has_own_rid) random_id(request->rid);
}

static bool fail_memory(const api_reader *reader) {
    return api_fail(reader->failure, 503, API_ERROR_GENERATE, "the router is out of memory");
}

bool api_items_create(api_reader *reader, uint64_t count) {
    const uint32_t max = reader->settings->batch_max;
    api_batch *batch = reader->batch;
    if (reader->failure->http_status != 0) return false;
    if (batch->is_list && count > max)
        return api_fail(reader->failure, 400, API_ERROR_GENERATE,
                        "a list of %llu prompts is longer than --batch-max=%u.",
                        (unsigned long long)count, max);
    batch->items = bt_calloc(count, sizeof(*batch->items));
    if (batch->items == NULL) return fail_memory(reader);
    batch->count = (uint32_t)count;
    return true;
}

bool api_item_begin(api_reader *reader, uint32_t index) {
    const api_settings *settings = reader->settings;
    api_request *request = &reader->batch->items[index];
    if (reader->failure->http_status != 0) return false;
    reader->index = index;
    reader->request = request;
    reader->names_item = reader->has_own_values;
    reader->logprob_start = -1;
    request->kind = reader->body->kind;
    request->wants_safetensors = reader->body->wants_safetensors;
    request->skips_special = true;
    request->stream_interval = settings->stream_interval;
    request->generation = proto_generation_default();
    request->generation.vocab_limit = tokenizer_vocab_count(settings->tokenizer);
    request->generation.filter = settings->sampling_filter;
    return true;
}

bool api_item_end(api_reader *reader) {
    api_failure *failure = reader->failure;
    char text[PROTO_TEXT_MAX];
    if (failure->http_status == 0 && api_words_join(reader->request) != BT_OK) fail_memory(reader);
    if (failure->http_status == 0) return true;
    if (!reader->batch->is_list || !reader->names_item) return false;
    memcpy(text, failure->text, sizeof(text));
    (void)snprintf(failure->text, sizeof(failure->text), "[%u]: %.*s", reader->index,
                   PROTO_TEXT_MAX - API_INDEX_MAX - 4, text);
    return false;
}

/* Each sample has some memory of its own, whatever it is asked for. */
static void check_samples(const api_reader *reader) {
    const uint64_t given = (uint64_t)reader->settings->batch_max * API_BATCH_SAMPLES;
    const uint64_t max = given > PROTO_SAMPLES_MAX ? given : PROTO_SAMPLES_MAX;
    uint64_t samples = 0;
    for (uint32_t i = 0; i < reader->batch->count; i++) {
        samples += reader->batch->items[i].generation.samples;
    }
    if (samples > max)
        (void)api_fail(reader->failure, 400, API_ERROR_GENERATE,
                       "n asks for %llu samples of the list's prompts together, at most %llu are "
                       "allowed (%d times --batch-max=%u).",
                       (unsigned long long)samples, (unsigned long long)max, API_BATCH_SAMPLES,
                       reader->settings->batch_max);
}

/* Its head tells how long everything is. */
static void check_tensors(const api_reader *reader) {
    const api_request *first = &reader->batch->items[0];
    if (first->streams && first->wants_safetensors)
        (void)api_fail(reader->failure, 400, API_ERROR_GENERATE,
                       "stream must be false for Accept: application/x-safetensors.");
}

bool api_batch_read(const api_body *body, const api_settings *settings, const api_model *model,
                    api_batch *out, api_failure *failure_out) {
    bt_json root;
    bt_error error;
    api_reader reader = {
        .settings = settings, .model = model, .body = body, .batch = out, .failure = failure_out};
    memset(out, 0, sizeof(*out));
    memset(failure_out, 0, sizeof(*failure_out));
    if (bt_json_parse(body->text, body->bytes, &root, &error) != BT_OK) {
        (void)api_fail(failure_out, 400, API_ERROR_SCHEMA, "%s", error.text);
    } else if (root.kind != BT_JSON_OBJECT) {
        (void)api_fail(failure_out, 400, API_ERROR_SCHEMA,
                       "the body must be a JSON object, got %s.", bt_json_kind_name(root.kind));
    } else if (!model->is_known) {
        (void)api_fail(failure_out, 503, API_ERROR_OPENAI,
                       "no prefill and decode worker has joined yet");
    } else if (body->kind == API_GENERATE) {
        api_generate_read(&reader, &root);
    } else if (body->kind == API_CHAT) {
        api_chat_read(&reader, &root);
    } else {
        api_completion_read(&reader, &root);
    }
    if (failure_out->http_status == 0) check_samples(&reader);
    if (failure_out->http_status == 0) check_tensors(&reader);
    if (failure_out->http_status == 0) return true;
    if (body->kind != API_GENERATE) failure_out->shape = API_ERROR_OPENAI;
    api_batch_fini(out);
    return false;
}

uint32_t api_request_emission_rows(const api_request *request) {
    if (request->stop_count > 0) return 1;
    return request->streams ? request->stream_interval : API_EMISSION_ROWS;
}
