/* The body of /generate. Unknown top-level fields are ignored: load generators send fields meant
 * for other servers. Unknown sampling parameters are refused: ignoring one would change the
 * sampling.
 *
 * A list of prompts makes a batch. Then a field has one value for all its items, or a list with one
 * for each; before an item is read its own values are put in the place of the lists, so that what
 * reads it knows nothing of lists. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "router/api_lists.h"
#include "router/api_mask_read.h"
#include "router/api_processor.h"
#include "router/api_request_internal.h"
#include "router/api_words.h"

typedef enum generate_field {
    GENERATE_TEXT,
    GENERATE_INPUT_IDS,
    GENERATE_SAMPLING_PARAMS,
    GENERATE_STREAM,
    GENERATE_RETURN_LOGPROB,
    GENERATE_LOGPROB_START_LEN,
    GENERATE_TOP_LOGPROBS_NUM,
    GENERATE_TOKEN_IDS_LOGPROB,
    GENERATE_RETURN_TEXT_IN_LOGPROBS,
    GENERATE_RETURN_SAMPLING_MASK,
    GENERATE_SAMPLING_LOGPROBS_MODE,
    GENERATE_SAMPLING_MASK_FORMAT,
    GENERATE_SAMPLING_MASK_MODE,
    GENERATE_ON_MASK_OVERFLOW,
    GENERATE_CUSTOM_LOGIT_PROCESSOR,
    GENERATE_RID,
    GENERATE_RETURN_PROMPT_TOKEN_IDS,
    GENERATE_SAMPLING_FILTER,
    GENERATE_CACHE_SALT,
    GENERATE_EXTRA_KEY,
    GENERATE_FIRST_REFUSED,
    GENERATE_INPUT_EMBEDS = GENERATE_FIRST_REFUSED,
    GENERATE_IMAGE_DATA,
    GENERATE_AUDIO_DATA,
    GENERATE_VIDEO_DATA,
    GENERATE_RETURN_HIDDEN_STATES,
    GENERATE_RETURN_ROUTED_EXPERTS,
    GENERATE_RETURN_OUTPUTS_VIA_STORE,
    GENERATE_LORA_PATH,
    GENERATE_LORA_ID,
    GENERATE_SESSION_PARAMS,
    GENERATE_BOOTSTRAP_HOST,
    GENERATE_BOOTSTRAP_PORT,
    GENERATE_BOOTSTRAP_ROOM,
    GENERATE_DISAGG_PREFILL_DP_RANK,
    GENERATE_FIELD_COUNT,
} generate_field;

static const char *const NAMES[GENERATE_FIELD_COUNT] = {
    [GENERATE_TEXT] = "text",
    [GENERATE_INPUT_IDS] = "input_ids",
    [GENERATE_SAMPLING_PARAMS] = "sampling_params",
    [GENERATE_STREAM] = "stream",
    [GENERATE_RETURN_LOGPROB] = "return_logprob",
    [GENERATE_LOGPROB_START_LEN] = "logprob_start_len",
    [GENERATE_TOP_LOGPROBS_NUM] = "top_logprobs_num",
    [GENERATE_TOKEN_IDS_LOGPROB] = "token_ids_logprob",
    [GENERATE_RETURN_TEXT_IN_LOGPROBS] = "return_text_in_logprobs",
    [GENERATE_RETURN_SAMPLING_MASK] = "return_sampling_mask",
    [GENERATE_SAMPLING_LOGPROBS_MODE] = "sampling_logprobs_mode",
    [GENERATE_SAMPLING_MASK_FORMAT] = "sampling_mask_format",
    [GENERATE_SAMPLING_MASK_MODE] = "sampling_mask_mode",
    [GENERATE_ON_MASK_OVERFLOW] = "on_mask_overflow",
    [GENERATE_CUSTOM_LOGIT_PROCESSOR] = "custom_logit_processor",
    [GENERATE_RID] = "rid",
    [GENERATE_RETURN_PROMPT_TOKEN_IDS] = "return_prompt_token_ids",
    [GENERATE_SAMPLING_FILTER] = "sampling_filter",
    [GENERATE_CACHE_SALT] = "cache_salt",
    [GENERATE_EXTRA_KEY] = "extra_key",
    [GENERATE_INPUT_EMBEDS] = "input_embeds",
    [GENERATE_IMAGE_DATA] = "image_data",
    [GENERATE_AUDIO_DATA] = "audio_data",
    [GENERATE_VIDEO_DATA] = "video_data",
    [GENERATE_RETURN_HIDDEN_STATES] = "return_hidden_states",
    [GENERATE_RETURN_ROUTED_EXPERTS] = "return_routed_experts",
    [GENERATE_RETURN_OUTPUTS_VIA_STORE] = "return_outputs_via_store",
    [GENERATE_LORA_PATH] = "lora_path",
    [GENERATE_LORA_ID] = "lora_id",
    [GENERATE_SESSION_PARAMS] = "session_params",
    [GENERATE_BOOTSTRAP_HOST] = "bootstrap_host",
    [GENERATE_BOOTSTRAP_PORT] = "bootstrap_port",
    [GENERATE_BOOTSTRAP_ROOM] = "bootstrap_room",
    [GENERATE_DISAGG_PREFILL_DP_RANK] = "disagg_prefill_dp_rank",
};

static void refuse_sampling_key(void *context, const bt_json *key) {
    api_failure *failure = context;
    int bytes = key->bytes < 80 ? (int)key->bytes - 2 : 78;
    (void)api_fail(failure, 400, API_ERROR_GENERATE, "Unexpected sampling parameter '%.*s'.", bytes,
                   key->text + 1);
}

static void read_sampling(api_reader *reader, const api_fields *fields, api_sampling *sampling) {
    static const bt_json EMPTY = {BT_JSON_OBJECT, "{}", 2};
    const bt_json *object = &EMPTY;
    api_fields parameters;
    if (fields->is_given[GENERATE_SAMPLING_PARAMS])
        object = &fields->values[GENERATE_SAMPLING_PARAMS];
    if (object->kind != BT_JSON_OBJECT) {
        (void)api_fail(reader->failure, 400, API_ERROR_SCHEMA,
                       "sampling_params must be an object, got %s.",
                       bt_json_kind_name(object->kind));
        return;
    }
    api_fields_collect(&parameters, object, SAMPLING_NAMES, SAMPLING_FIELD_COUNT, reader->failure,
                       refuse_sampling_key, reader->failure);
    api_sampling_read(&parameters, reader->model, reader->request, sampling);
}

/* Log-probabilities of the prompt and of other tokens than the drawn one. Without return_logprob
 * these fields mean nothing, and are not looked at. */
static void read_logprobs(api_reader *reader, api_fields *fields) {
    proto_generation *generation = &reader->request->generation;
    int64_t start = -1;
    int64_t top = 0;
    api_get_int(fields, GENERATE_LOGPROB_START_LEN, &start);
    api_get_int(fields, GENERATE_TOP_LOGPROBS_NUM, &top);
    if (start < -1)
        (void)api_fail(fields->failure, 400, API_ERROR_GENERATE,
                       "logprob_start_len must be -1 (output only) or a position of the prompt, "
                       "got %lld.",
                       (long long)start);
    if (top < 0 || top > PROTO_TOP_LOGPROBS_MAX)
        (void)api_fail(fields->failure, 400, API_ERROR_GENERATE,
                       "top_logprobs_num must be in [0, %d], got %lld.", PROTO_TOP_LOGPROBS_MAX,
                       (long long)top);
    api_logprob_ids_read(fields, GENERATE_TOKEN_IDS_LOGPROB, reader->model, reader->request);
    if (fields->failure->http_status != 0) return;
    generation->top_logprobs = (uint32_t)top;
    reader->logprob_start = start;
}

/* Once the prompt is known. */
static void read_logprob_start(const api_reader *reader) {
    proto_generation *generation = &reader->request->generation;
    const uint32_t tokens = reader->request->prompt.count;
    if (reader->logprob_start < 0) return;
    if (reader->logprob_start >= (int64_t)tokens) {
        (void)api_fail(reader->failure, 400, API_ERROR_GENERATE,
                       "logprob_start_len=%lld is beyond the prompt of %u tokens.",
                       (long long)reader->logprob_start, tokens);
        return;
    }
    generation->wants_prompt_logprobs = 1;
    generation->prompt_logprobs_from = (uint32_t)reader->logprob_start;
}

static const api_mask_fields MASKS = {.flag = GENERATE_RETURN_SAMPLING_MASK,
                                      .logprobs = GENERATE_SAMPLING_LOGPROBS_MODE,
                                      .format = GENERATE_SAMPLING_MASK_FORMAT,
                                      .mode = GENERATE_SAMPLING_MASK_MODE,
                                      .on_overflow = GENERATE_ON_MASK_OVERFLOW};

static void read_flags(api_reader *reader, api_fields *fields) {
    api_request *request = reader->request;
    api_get_bool(fields, GENERATE_STREAM, &request->streams);
    api_get_bool(fields, GENERATE_RETURN_LOGPROB, &request->wants_logprob);
    api_get_bool(fields, GENERATE_RETURN_TEXT_IN_LOGPROBS, &request->wants_logprob_text);
    api_get_bool(fields, GENERATE_RETURN_PROMPT_TOKEN_IDS, &request->returns_prompt_ids);
    api_mask_read(fields, &MASKS, request);
    request->generation.wants_logprob = request->wants_logprob;
    if (request->wants_logprob) read_logprobs(reader, fields);
    api_filter_read(fields, GENERATE_SAMPLING_FILTER, &request->generation.filter);
    api_salt_read(fields, GENERATE_CACHE_SALT, GENERATE_EXTRA_KEY, request);
    for (size_t field = GENERATE_FIRST_REFUSED; field < GENERATE_FIELD_COUNT; field++) {
        api_refuse_unless_neutral(fields, field, "");
    }
}

/* A string names all items of a list: R_0, R_1, ... */
static void read_rid(const api_reader *reader, api_fields *fields, bool is_of_all) {
    api_request *request = reader->request;
    api_rid_read(fields, GENERATE_RID, request);
    if (!is_of_all || !request->has_own_rid) return;
    const size_t used = strlen(request->rid);
    request->list_rid_bytes = used;
    snprintf(request->rid + used, sizeof(request->rid) - used, "_%u", reader->index);
}

/* Where the prompts are, when one of the two is given. */
static generate_field prompt_field(const api_fields *fields) {
    return fields->is_given[GENERATE_TEXT] ? GENERATE_TEXT : GENERATE_INPUT_IDS;
}

static void read_prompt(api_reader *reader, const api_fields *fields, generate_field field) {
    const bt_json *value = &fields->values[field];
    reader->names_item = true; /* prompts are the items' own */
    if (field == GENERATE_INPUT_IDS) {
        (void)api_prompt_from_ids(reader, NAMES[field], value);
    } else if (value->kind != BT_JSON_STRING) {
        (void)api_fail(reader->failure, 400, API_ERROR_SCHEMA, "text must be a string, got %s.",
                       bt_json_kind_name(value->kind));
    } else {
        (void)api_prompt_from_text(reader, value);
    }
}

static void read_item(api_reader *reader, api_fields *fields, const api_lists *lists) {
    api_sampling sampling = {.max_new_tokens = API_MAX_NEW_DEFAULT};
    if (reader->index > 0 && !lists->is_list[GENERATE_SAMPLING_PARAMS])
        sampling.same_stops = &reader->batch->items[0];
    read_flags(reader, fields);
    read_rid(reader, fields, reader->batch->is_list && !lists->is_list[GENERATE_RID]);
    api_processor_read(fields, GENERATE_CUSTOM_LOGIT_PROCESSOR, &sampling);
    read_sampling(reader, fields, &sampling);
    api_mask_admit(reader->settings, reader->model, reader->request, reader->failure);
    if (reader->failure->http_status != 0) return;
    read_prompt(reader, fields, prompt_field(lists->fields));
    if (reader->failure->http_status == 0) read_logprob_start(reader);
    if (reader->failure->http_status != 0) return;
    api_sampling_fit_context(reader->model, &sampling, reader->request, reader->failure);
}

/* ---- lists ----------------------------------------------------------------------------------- */

static bool is_prompt_list(generate_field field, const bt_json *value) {
    bt_json_iter iter;
    bt_json first;
    if (value->kind != BT_JSON_ARRAY || field == GENERATE_TEXT) return value->kind == BT_JSON_ARRAY;
    bt_json_iter_init(&iter, value);
    return bt_json_next_item(&iter, &first) && first.kind == BT_JSON_ARRAY;
}

/* An array in this field is one value for each item. */
static bool is_item_list(const api_fields *fields, generate_field field, uint32_t count) {
    const bt_json *value = &fields->values[field];
    if (!fields->is_given[field] || value->kind != BT_JSON_ARRAY) return false;
    switch (field) {
    case GENERATE_STREAM:
    case GENERATE_RETURN_TEXT_IN_LOGPROBS:
    case GENERATE_RETURN_PROMPT_TOKEN_IDS: return false;
    case GENERATE_TOKEN_IDS_LOGPROB: return api_list_is_nested(value);
    case GENERATE_INPUT_EMBEDS:
    case GENERATE_IMAGE_DATA:
    case GENERATE_AUDIO_DATA:
    case GENERATE_VIDEO_DATA:
    case GENERATE_RETURN_HIDDEN_STATES:
    case GENERATE_RETURN_ROUTED_EXPERTS:
    case GENERATE_RETURN_OUTPUTS_VIA_STORE:
    case GENERATE_LORA_PATH:
    case GENERATE_LORA_ID:
    case GENERATE_SESSION_PARAMS:
    case GENERATE_BOOTSTRAP_HOST:
    case GENERATE_BOOTSTRAP_PORT:
    case GENERATE_BOOTSTRAP_ROOM:
    case GENERATE_DISAGG_PREFILL_DP_RANK:
        /* Neutral as a whole, or each entry is. */
        return api_list_length(value) == count;
    case GENERATE_TEXT:
    case GENERATE_INPUT_IDS:
    case GENERATE_SAMPLING_PARAMS:
    case GENERATE_RETURN_LOGPROB:
    case GENERATE_LOGPROB_START_LEN:
    case GENERATE_TOP_LOGPROBS_NUM:
    case GENERATE_RETURN_SAMPLING_MASK:
    case GENERATE_SAMPLING_LOGPROBS_MODE:
    case GENERATE_SAMPLING_MASK_FORMAT:
    case GENERATE_SAMPLING_MASK_MODE:
    case GENERATE_ON_MASK_OVERFLOW:
    case GENERATE_CUSTOM_LOGIT_PROCESSOR:
    case GENERATE_RID:
    case GENERATE_SAMPLING_FILTER:
    case GENERATE_CACHE_SALT:
    case GENERATE_EXTRA_KEY: return true;
    case GENERATE_FIELD_COUNT: break;
    }
    return false;
}

/* Which fields have one value for each item; of a single prompt none has. */
static void find_lists(api_reader *reader, const api_fields *fields, api_lists *lists) {
    const generate_field prompt = prompt_field(fields);
    if (!reader->batch->is_list) return;
    for (generate_field field = 0; field < GENERATE_FIELD_COUNT; field++) {
        if (!is_item_list(fields, field, lists->count)) continue;
        api_lists_add(lists, field);
        reader->has_own_values = reader->has_own_values || field != prompt;
    }
}

static int compare_rids(const void *left, const void *right) {
    const api_request *const *a = left, *const *b = right;
    return strcmp((*a)->rid, (*b)->rid);
}

/* A name may be given once only. */
static void check_rids(const api_reader *reader) {
    const api_batch *batch = reader->batch;
    const api_request **sorted = bt_calloc(batch->count, sizeof(*sorted));
    if (sorted == NULL) {
        (void)api_fail(reader->failure, 503, API_ERROR_GENERATE, "the router is out of memory");
        return;
    }
    for (uint32_t i = 0; i < batch->count; i++) {
        sorted[i] = &batch->items[i];
    }
    qsort(sorted, batch->count, sizeof(*sorted), compare_rids);
    for (uint32_t i = 1; i < batch->count; i++) {
        if (strcmp(sorted[i - 1]->rid, sorted[i]->rid) == 0)
            (void)api_fail(reader->failure, 400, API_ERROR_GENERATE,
                           "Duplicate request ID detected: %s", sorted[i]->rid);
    }
    bt_free(sorted);
}

/* The number of prompts; 0: a failure says why. */
static uint64_t count_prompts(api_reader *reader, const api_fields *fields) {
    const bool has_text = fields->is_given[GENERATE_TEXT];
    const bool has_ids = fields->is_given[GENERATE_INPUT_IDS];
    const bt_json *value = &fields->values[prompt_field(fields)];
    if (has_text == has_ids) {
        (void)api_fail(reader->failure, 400, API_ERROR_SCHEMA,
                       "Exactly one of text and input_ids must be given.");
        return 0;
    }
    reader->batch->is_list = is_prompt_list(prompt_field(fields), value);
    if (!reader->batch->is_list) return 1;
    const uint64_t count = api_list_length(value);
    if (count == 0)
        (void)api_fail(reader->failure, 400, API_ERROR_GENERATE, "text cannot be an empty list.");
    return count;
}

void api_generate_read(api_reader *reader, const bt_json *root) {
    api_fields fields, item;
    api_lists lists;
    api_fields_collect(&fields, root, NAMES, GENERATE_FIELD_COUNT, reader->failure, NULL, NULL);
    if (!api_items_create(reader, count_prompts(reader, &fields))) return;
    api_lists_init(&lists, &fields, reader->batch->count);
    find_lists(reader, &fields, &lists);
    for (uint32_t i = 0; i < reader->batch->count; i++) {
        if (!api_item_begin(reader, i)) return;
        api_lists_next(&lists, &item);
        read_item(reader, &item, &lists);
        if (!api_item_end(reader)) return;
    }
    if (lists.is_list[GENERATE_RID]) check_rids(reader);
}
