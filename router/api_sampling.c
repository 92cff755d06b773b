/* Sampling parameters of all endpoints, under two lists of names. Every field is checked here,
 * also those that are not built (grammars): they may only have the value that changes nothing, and
 * are refused by name otherwise. A request that passed holds a generation that the workers take as
 * it is (float range, seed, stop ids without repeats); the length is open until the prompt is
 * counted (api_sampling_fit_context). Defaults never come from the model's own generation
 * settings. */
#include "router/api_sampling.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "router/api_lists.h"
#include "router/api_processor.h"
#include "router/api_words.h"
#include "router/random_id.h"

enum { TOP_K_ALL = 1 << 30 }; /* SGLang's "no top-k"; a literal one means the same */

static const double GREEDY_BELOW = 1e-6;

const char *const SAMPLING_NAMES[SAMPLING_FIELD_COUNT] = {
    [SAMPLING_MAX_NEW_TOKENS] = "max_new_tokens",
    [SAMPLING_MIN_NEW_TOKENS] = "min_new_tokens",
    [SAMPLING_TEMPERATURE] = "temperature",
    [SAMPLING_TOP_P] = "top_p",
    [SAMPLING_TOP_K] = "top_k",
    [SAMPLING_MIN_P] = "min_p",
    [SAMPLING_FREQUENCY_PENALTY] = "frequency_penalty",
    [SAMPLING_PRESENCE_PENALTY] = "presence_penalty",
    [SAMPLING_REPETITION_PENALTY] = "repetition_penalty",
    [SAMPLING_N] = "n",
    [SAMPLING_STOP] = "stop",
    [SAMPLING_STOP_TOKEN_IDS] = "stop_token_ids",
    [SAMPLING_STOP_REGEX] = "stop_regex",
    [SAMPLING_REGEX] = "regex",
    [SAMPLING_JSON_SCHEMA] = "json_schema",
    [SAMPLING_EBNF] = "ebnf",
    [SAMPLING_STRUCTURAL_TAG] = "structural_tag",
    [SAMPLING_IGNORE_EOS] = "ignore_eos",
    [SAMPLING_SKIP_SPECIAL_TOKENS] = "skip_special_tokens",
    [SAMPLING_SPACES_BETWEEN_SPECIAL_TOKENS] = "spaces_between_special_tokens",
    [SAMPLING_NO_STOP_TRIM] = "no_stop_trim",
    [SAMPLING_LOGIT_BIAS] = "logit_bias",
    [SAMPLING_SEED] = "sampling_seed",
    [SAMPLING_STREAM_INTERVAL] = "stream_interval",
    [SAMPLING_CUSTOM_PARAMS] = "custom_params",
    [SAMPLING_FILTER] = "sampling_filter",
};

const char *const SAMPLING_OPENAI_NAMES[SAMPLING_FIELD_COUNT] = {
    [SAMPLING_MAX_NEW_TOKENS] = "max_tokens",
    [SAMPLING_MIN_NEW_TOKENS] = "min_tokens",
    [SAMPLING_TEMPERATURE] = "temperature",
    [SAMPLING_TOP_P] = "top_p",
    [SAMPLING_TOP_K] = "top_k",
    [SAMPLING_MIN_P] = "min_p",
    [SAMPLING_FREQUENCY_PENALTY] = "frequency_penalty",
    [SAMPLING_PRESENCE_PENALTY] = "presence_penalty",
    [SAMPLING_REPETITION_PENALTY] = "repetition_penalty",
    [SAMPLING_N] = "n",
    [SAMPLING_STOP] = "stop",
    [SAMPLING_STOP_TOKEN_IDS] = "stop_token_ids",
    [SAMPLING_STOP_REGEX] = "stop_regex",
    [SAMPLING_REGEX] = "regex",
    [SAMPLING_JSON_SCHEMA] = "json_schema",
    [SAMPLING_EBNF] = "ebnf",
    [SAMPLING_STRUCTURAL_TAG] = "structural_tag",
    [SAMPLING_IGNORE_EOS] = "ignore_eos",
    [SAMPLING_SKIP_SPECIAL_TOKENS] = "skip_special_tokens",
    [SAMPLING_SPACES_BETWEEN_SPECIAL_TOKENS] = "spaces_between_special_tokens",
    [SAMPLING_NO_STOP_TRIM] = "no_stop_trim",
    [SAMPLING_LOGIT_BIAS] = "logit_bias",
    [SAMPLING_SEED] = "seed",
    [SAMPLING_STREAM_INTERVAL] = "stream_interval",
    [SAMPLING_CUSTOM_PARAMS] = "custom_params",
    [SAMPLING_FILTER] = "sampling_filter",
};

/* "NAME must be RULE, got X.", X as the client wrote it. */
static void fail_value(api_fields *fields, size_t field, const char *rule) {
    const bt_json *value = &fields->values[field];
    int bytes = value->bytes < 64 ? (int)value->bytes : 64;
    (void)api_fail(fields->failure, 400, API_ERROR_GENERATE, "%s must be %s, got %.*s.",
                   fields->names[field], rule, bytes, value->text);
}

static void refuse_grammars(api_fields *fields) {
    static const size_t GRAMMARS[] = {SAMPLING_REGEX, SAMPLING_JSON_SCHEMA, SAMPLING_EBNF};
    unsigned grammars = 0;
    for (size_t i = 0; i < BT_ARRAY_COUNT(GRAMMARS); i++) {
        grammars += fields->is_given[GRAMMARS[i]];
    }
    if (grammars > 1)
        (void)api_fail(fields->failure, 400, API_ERROR_GENERATE,
                       "Only one of regex, json_schema, or ebnf can be set.");
    for (size_t field = SAMPLING_STOP_REGEX; field <= SAMPLING_STRUCTURAL_TAG; field++) {
        api_refuse_unless_neutral(fields, field, " yet");
    }
}

static float clamp_float(double value) {
    if (value > (double)FLT_MAX) return FLT_MAX;
    return value < (double)FLT_MIN ? FLT_MIN : (float)value;
}

static void read_filter(api_fields *fields, api_request *request) {
    double temperature = 1.0;
    double top_p = 1.0;
    int64_t top_k = -1;
    api_get_number(fields, SAMPLING_TEMPERATURE, &temperature);
    api_get_number(fields, SAMPLING_TOP_P, &top_p);
    api_get_int(fields, SAMPLING_TOP_K, &top_k);
    if (!(temperature >= 0) || !isfinite(temperature)) {
        fail_value(fields, SAMPLING_TEMPERATURE, "a non-negative finite number");
    } else if (!(top_p > 0 && top_p <= 1)) {
        fail_value(fields, SAMPLING_TOP_P, "in (0, 1]");
    } else if (top_k != -1 && top_k < 1) {
        fail_value(fields, SAMPLING_TOP_K, "-1 (disable) or at least 1");
    }
    if (fields->failure->http_status != 0) return;
    if (top_k >= TOP_K_ALL) top_k = -1;
    if (temperature < GREEDY_BELOW) {
        temperature = 1.0;
        top_k = 1;
    }
    request->generation.temperature = clamp_float(temperature);
    request->generation.top_p = clamp_float(top_p);
    request->generation.top_k = top_k > 0 ? (uint32_t)top_k : 0;
}

/* A number in [low, high]; without the field *out keeps its value. */
static void read_number(api_fields *fields, size_t field, double low, double high, const char *rule,
                        float *out) {
    double value = *out;
    api_get_number(fields, field, &value);
    if (fields->failure->http_status != 0 || !fields->is_given[field]) return;
    if (value >= low && value <= high) {
        *out = (float)value;
    } else {
        fail_value(fields, field, rule);
    }
}

static void read_weights(api_fields *fields, proto_generation *generation) {
    static const char PENALTY[] = "in [-2, 2]";
    read_number(fields, SAMPLING_MIN_P, 0, 1, "in [0, 1]", &generation->min_p);
    read_number(fields, SAMPLING_FREQUENCY_PENALTY, -2, 2, PENALTY, &generation->frequency_penalty);
    read_number(fields, SAMPLING_PRESENCE_PENALTY, -2, 2, PENALTY, &generation->presence_penalty);
    read_number(fields, SAMPLING_REPETITION_PENALTY, DBL_TRUE_MIN, 2,
                "in (0, 2] (1.0 = no penalty)", &generation->repetition_penalty);
    generation->repetition_penalty = clamp_float(generation->repetition_penalty);
}

const char *const api_filter_names[] = {"joint", "rank", NULL};

void api_filter_read(api_fields *fields, size_t field, uint32_t *filter) {
    if (!fields->is_given[field]) return;
    *filter = api_get_word(fields, field, api_filter_names, BT_ARRAY_COUNT(api_filter_names) - 1);
}

static void read_samples(api_fields *fields, proto_generation *generation) {
    char rule[32];
    int64_t samples = 1;
    api_get_int(fields, SAMPLING_N, &samples);
    snprintf(rule, sizeof(rule), "in [1, %d]", PROTO_SAMPLES_MAX);
    if (samples < 1 || samples > PROTO_SAMPLES_MAX) {
        fail_value(fields, SAMPLING_N, rule);
    } else {
        generation->samples = (uint32_t)samples;
    }
}

/* A number of tokens; `value` keeps its default without the field. */
static uint32_t read_count(api_fields *fields, size_t field, uint32_t value) {
    int64_t tokens = value;
    api_get_int(fields, field, &tokens);
    if (tokens < 0) {
        fail_value(fields, field, "at least 0");
    } else if (tokens > INT32_MAX) {
        fail_value(fields, field, "at most 2147483647");
    }
    return fields->failure->http_status == 0 ? (uint32_t)tokens : value;
}

static void read_length(api_fields *fields, api_sampling *sampling) {
    sampling->max_new_tokens =
        read_count(fields, SAMPLING_MAX_NEW_TOKENS, sampling->max_new_tokens);
    if (fields->is_given[SAMPLING_MAX_NEW_TOKENS]) sampling->is_open_ended = false;
    if (fields->is_null[SAMPLING_MAX_NEW_TOKENS]) sampling->is_open_ended = true;
    sampling->min_new_tokens = read_count(fields, SAMPLING_MIN_NEW_TOKENS, 0);
}

static void read_seed(api_fields *fields, api_request *request) {
    int64_t seed = 0;
    bt_json_integer wide;
    if (!fields->is_given[SAMPLING_SEED]) {
        request->generation.seed = random_u64();
        return;
    }
    /* The upper half of 64 bits is a seed too. */
    if (bt_json_get_integer(&fields->values[SAMPLING_SEED], true, &wide) && !wide.is_negative) {
        request->generation.seed = wide.magnitude;
        return;
    }
    api_get_int(fields, SAMPLING_SEED, &seed);
    request->generation.seed = (uint64_t)seed;
}

/* ---- stops ----------------------------------------------------------------------------------- */

/* The ids that end a sample, and that min_new_tokens bans, under construction. */
static void add_stop_id(api_fields *fields, proto_generation *generation, int64_t id) {
    for (uint32_t i = 0; i < generation->banned_id_count; i++) {
        if (generation->stop_ids[i] == id) return;
    }
    if (generation->banned_id_count == PROTO_STOP_IDS_MAX) {
        (void)api_fail(fields->failure, 400, API_ERROR_GENERATE,
                       "stop_token_ids and the model's own together are more than %d.",
                       PROTO_STOP_IDS_MAX);
        return;
    }
    generation->stop_ids[generation->banned_id_count++] = (int32_t)id;
}

static void add_stop_list(api_fields *fields, const api_model *model,
                          proto_generation *generation) {
    const bt_json *list = &fields->values[SAMPLING_STOP_TOKEN_IDS];
    bt_json_iter iter;
    bt_json item;
    if (list->kind != BT_JSON_ARRAY) {
        fail_value(fields, SAMPLING_STOP_TOKEN_IDS, "a list of token ids");
        return;
    }
    bt_json_iter_init(&iter, list);
    while (bt_json_next_item(&iter, &item)) {
        int64_t id;
        if (item.kind == BT_JSON_NULL) continue;
        if (!bt_json_get_int64(&item, false, &id)) {
            fail_value(fields, SAMPLING_STOP_TOKEN_IDS, "a list of token ids");
            return;
        }
        /* An id outside the vocabulary is never drawn. */
        bool can_match = id >= 0 && id < (int64_t)model->vocab_size;
        if (can_match) add_stop_id(fields, generation, id);
    }
}

/* With ignore_eos the ids end nothing; until min_new_tokens they are banned all the same. */
static void read_stop_ids(api_fields *fields, const api_model *model, proto_generation *generation,
                          const api_sampling *sampling) {
    bool ignores_eos = false;
    api_get_bool(fields, SAMPLING_IGNORE_EOS, &ignores_eos);
    for (uint32_t i = 0; i < model->eos_count; i++) {
        add_stop_id(fields, generation, model->eos_ids[i]);
    }
    if (fields->is_given[SAMPLING_STOP_TOKEN_IDS]) add_stop_list(fields, model, generation);
    generation->stop_id_count = ignores_eos ? 0 : generation->banned_id_count;
    if (sampling->min_new_tokens == 0) generation->banned_id_count = 0;
}

/* Copies one stop string; stop_texts has room for it. */
static bool add_stop_text(api_fields *fields, api_request *request, const bt_json *value,
                          stop_string *out) {
    if (value->kind != BT_JSON_STRING) {
        fail_value(fields, SAMPLING_STOP, "a string or a list of strings");
        return false;
    }
    if (request->stop_count == STOP_STRINGS_MAX) {
        return api_fail(fields->failure, 400, API_ERROR_GENERATE, "%s has more than %d strings.",
                        fields->names[SAMPLING_STOP], STOP_STRINGS_MAX);
    }
    char *text = bt_malloc(value->bytes + 1);
    if (text == NULL) return api_fail(fields->failure, 503, API_ERROR_GENERATE, "out of memory");
    out->bytes = bt_json_string_decode(value, text);
    text[out->bytes] = 0;
    out->text = text;
    request->stop_texts[request->stop_count] = text;
    request->stop_bytes[request->stop_count++] = out->bytes;
    return true;
}

static void borrow_stops(const api_request *from, api_request *request) {
    request->borrows_stops = true;
    request->stops = from->stops;
    request->stop_texts = from->stop_texts;
    request->stop_bytes = from->stop_bytes;
    request->stop_count = from->stop_count;
}

static void read_stop_strings(api_fields *fields, api_request *request) {
    const bt_json *value = &fields->values[SAMPLING_STOP];
    stop_string strings[STOP_STRINGS_MAX];
    if (fields->failure->http_status != 0 || !fields->is_given[SAMPLING_STOP]) return;
    const uint64_t given = value->kind == BT_JSON_ARRAY ? api_list_length(value) : 1;
    const size_t count = given < STOP_STRINGS_MAX ? (size_t)given : STOP_STRINGS_MAX;
    request->stop_texts = bt_calloc(count + 1, sizeof(char *));
    request->stop_bytes = bt_calloc(count + 1, sizeof(size_t));
    if (request->stop_texts == NULL || request->stop_bytes == NULL) {
        (void)api_fail(fields->failure, 503, API_ERROR_GENERATE, "out of memory");
        return;
    }
    if (value->kind == BT_JSON_ARRAY) {
        bt_json_iter iter;
        bt_json item;
        bt_json_iter_init(&iter, value);
        while (bt_json_next_item(&iter, &item)) {
            if (!add_stop_text(fields, request, &item, &strings[request->stop_count])) return;
        }
    } else if (!add_stop_text(fields, request, value, &strings[0])) {
        return;
    }
    bt_status status = stop_set_create(strings, request->stop_count, &request->stops);
    if (status == BT_ERR_WORKER_MEMORY) {
        (void)api_fail(fields->failure, 503, API_ERROR_GENERATE, "out of memory");
    } else if (status != BT_OK) {
        (void)api_fail(fields->failure, 400, API_ERROR_GENERATE,
                       "%s is longer than %d bytes in all.", fields->names[SAMPLING_STOP],
                       STOP_BYTES_MAX);
    }
}

/* logit_bias, and what a processor disallows. */
static void read_biases(api_fields *fields, const api_model *model, api_request *request,
                        const api_sampling *sampling) {
    bt_json disallowed;
    if (!sampling->disallows) {
        api_refuse_unless_neutral(fields, SAMPLING_CUSTOM_PARAMS, "");
        api_bias_read(fields, SAMPLING_LOGIT_BIAS, NULL, model, request);
    } else if (api_processor_ids(fields, SAMPLING_CUSTOM_PARAMS, &disallowed)) {
        api_bias_read(fields, SAMPLING_LOGIT_BIAS, &disallowed, model, request);
    }
}

static bool is_disallowed_at(const api_request *request, uint32_t at) {
    float value;
    memcpy(&value, &request->biases.ids[request->generation.bias_count + at], sizeof(value));
    return value == -INFINITY;
}

static bool is_disallowed(const api_request *request, int32_t id) {
    for (uint32_t i = 0; i < request->generation.bias_count; i++) {
        if (request->biases.ids[i] == id) return is_disallowed_at(request, i);
    }
    return false;
}

static uint32_t vocabulary_of(const api_model *model, const api_request *request) {
    const uint32_t limit = request->generation.vocab_limit;
    return limit < model->vocab_size ? limit : model->vocab_size;
}

uint32_t api_drawable_count(const api_model *model, const api_request *request) {
    const uint32_t vocabulary = vocabulary_of(model, request);
    uint32_t count = vocabulary;
    for (uint32_t i = 0; i < request->generation.bias_count; i++) {
        count -= (uint32_t)request->biases.ids[i] < vocabulary && is_disallowed_at(request, i);
    }
    return count;
}

/* Something must be left to draw, also while min_new_tokens keeps ids away. */
static void check_drawable(api_fields *fields, const api_model *model, const api_request *request) {
    const proto_generation *g = &request->generation;
    const uint32_t vocabulary = vocabulary_of(model, request);
    uint32_t banned = 0;
    if (fields->failure->http_status != 0) return;
    for (uint32_t i = 0; i < g->banned_id_count; i++) {
        const int32_t id = g->stop_ids[i];
        banned += (uint32_t)id < vocabulary && !is_disallowed(request, id);
    }
    if (banned >= api_drawable_count(model, request))
        (void)api_fail(fields->failure, 400, API_ERROR_GENERATE,
                       "custom_params.token_ids leaves no token that can be drawn.");
}

void api_sampling_read(api_fields *fields, const api_model *model, api_request *request,
                       api_sampling *sampling) {
    bool ignored = false;
    int64_t interval = request->stream_interval;
    sampling->names = fields->names;
    read_length(fields, sampling);
    read_filter(fields, request);
    read_weights(fields, &request->generation);
    api_filter_read(fields, SAMPLING_FILTER, &request->generation.filter);
    read_samples(fields, &request->generation);
    refuse_grammars(fields);
    read_biases(fields, model, request, sampling);
    read_seed(fields, request);
    read_stop_ids(fields, model, &request->generation, sampling);
    if (sampling->disallows) check_drawable(fields, model, request);
    if (sampling->same_stops != NULL) {
        borrow_stops(sampling->same_stops, request);
    } else {
        read_stop_strings(fields, request);
    }
    api_get_bool(fields, SAMPLING_SKIP_SPECIAL_TOKENS, &request->skips_special);
    api_get_bool(fields, SAMPLING_SPACES_BETWEEN_SPECIAL_TOKENS, &ignored);
    api_get_bool(fields, SAMPLING_NO_STOP_TRIM, &request->keeps_stop);
    api_get_int(fields, SAMPLING_STREAM_INTERVAL, &interval);
    if (interval < 1) {
        fail_value(fields, SAMPLING_STREAM_INTERVAL, "at least 1");
    } else if (interval > INT32_MAX) {
        fail_value(fields, SAMPLING_STREAM_INTERVAL, "at most 2147483647");
    }
    if (fields->failure->http_status == 0) request->stream_interval = (uint32_t)interval;
}

/* false: it does not fit. */
static bool fit_length(const api_model *model, const api_sampling *sampling, api_request *request,
                       api_failure *failure) {
    uint32_t prompt = request->prompt.count;
    uint32_t context = model->context_tokens;
    if (prompt >= context)
        return api_fail(failure, 400, API_ERROR_GENERATE,
                        "The input (%u tokens) is longer than the model's context length (%u "
                        "tokens).",
                        prompt, context);
    if (sampling->is_open_ended) {
        /* A prompt that leaves no room at all is the dispatch's to refuse, by the workers' sizes.
         */
        const uint32_t limit = prompt < model->room_tokens ? model->room_tokens : context;
        request->generation.max_new_tokens = limit - prompt;
        return true;
    }
    uint64_t total = (uint64_t)prompt + sampling->max_new_tokens;
    if (total > context)
        return api_fail(failure, 400, API_ERROR_GENERATE,
                        "Requested token count exceeds the model's maximum context length of %u "
                        "tokens. You requested a total of %llu tokens: %u tokens from the input "
                        "messages and %u tokens for the completion. Please reduce the number of "
                        "tokens in the input messages or the completion to fit within the limit.",
                        context, (unsigned long long)total, prompt, sampling->max_new_tokens);
    request->generation.max_new_tokens = sampling->max_new_tokens;
    return true;
}

void api_sampling_fit_context(const api_model *model, const api_sampling *sampling,
                              api_request *request, api_failure *failure) {
    if (!fit_length(model, sampling, request, failure)) return;
    if (sampling->min_new_tokens > request->generation.max_new_tokens) {
        (void)api_fail(failure, 400, API_ERROR_GENERATE, "%s must be in [0, %s=%u], got %u.",
                       sampling->names[SAMPLING_MIN_NEW_TOKENS],
                       sampling->names[SAMPLING_MAX_NEW_TOKENS], request->generation.max_new_tokens,
                       sampling->min_new_tokens);
        return;
    }
    request->generation.min_new_tokens = sampling->min_new_tokens;
}
