/* Sampling parameters, as the native `sampling_params` object and as the top-level fields of chat
 * and completions name them. */
#ifndef BT_ROUTER_API_SAMPLING_H
#define BT_ROUTER_API_SAMPLING_H

#include "router/api_fields.h"

typedef enum sampling_field {
    SAMPLING_MAX_NEW_TOKENS,
    SAMPLING_MIN_NEW_TOKENS,
    SAMPLING_TEMPERATURE,
    SAMPLING_TOP_P,
    SAMPLING_TOP_K,
    SAMPLING_MIN_P,
    SAMPLING_FREQUENCY_PENALTY,
    SAMPLING_PRESENCE_PENALTY,
    SAMPLING_REPETITION_PENALTY,
    SAMPLING_N,
    SAMPLING_STOP,
    SAMPLING_STOP_TOKEN_IDS,
    SAMPLING_STOP_REGEX,
    SAMPLING_REGEX,
    SAMPLING_JSON_SCHEMA,
    SAMPLING_EBNF,
    SAMPLING_STRUCTURAL_TAG,
    SAMPLING_IGNORE_EOS,
    SAMPLING_SKIP_SPECIAL_TOKENS,
    SAMPLING_SPACES_BETWEEN_SPECIAL_TOKENS,
    SAMPLING_NO_STOP_TRIM,
    SAMPLING_LOGIT_BIAS,
    SAMPLING_SEED,
    SAMPLING_STREAM_INTERVAL,
    SAMPLING_CUSTOM_PARAMS,
    SAMPLING_FILTER,
    SAMPLING_FIELD_COUNT,
} sampling_field;

/* Their names in sampling_params, and at the top of requests in OpenAI's form. */
extern const char *const SAMPLING_NAMES[SAMPLING_FIELD_COUNT];
extern const char *const SAMPLING_OPENAI_NAMES[SAMPLING_FIELD_COUNT];

/* What the fields say before the prompt's length is known. */
typedef struct api_sampling {
    bool is_open_ended; /* until the context, or the largest decode worker, is full */
    uint32_t max_new_tokens;
    uint32_t min_new_tokens;
    const char *const *names; /* of the fields, for sentences */
    bool disallows;           /* custom_params has ids that are not to be drawn */
    /* An item of the batch with the same `stop`, whose stop strings are shared, or NULL. */
    const api_request *same_stops;
} api_sampling;

/* --sampling-filter, sampling_filter: sampler_filter's numbers, NULL-terminated. */
extern const char *const api_filter_names[];

/* Checks every field and fills request->generation, stops, biases and flags. The defaults of
 * *sampling (length) and of the filter are the caller's. fields->failure says what is wrong. */
void api_sampling_read(api_fields *fields, const api_model *model, api_request *request,
                       api_sampling *sampling);
/* A field that names a filter rule; *filter keeps its value without one. */
void api_filter_read(api_fields *fields, size_t field, uint32_t *filter);
/* How many ids can be drawn: those below the tokenizer's and the model's vocabulary, without those
 * that a processor disallows. */
uint32_t api_drawable_count(const api_model *model, const api_request *request);
/* Decides max_new_tokens from the prompt's length, or refuses what does not fit the context;
 * min_new_tokens with it. */
void api_sampling_fit_context(const api_model *model, const api_sampling *sampling,
                              api_request *request, api_failure *failure);

#endif
