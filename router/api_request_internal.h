/* Shared by api_request.c and the readers of each endpoint (api_*_read.c). */
#ifndef BT_ROUTER_API_REQUEST_INTERNAL_H
#define BT_ROUTER_API_REQUEST_INTERNAL_H

#include "router/api_fields.h"
#include "router/api_sampling.h"

typedef struct api_reader {
    const api_settings *settings;
    const api_model *model;
    const api_body *body;
    api_batch *batch;
    bool has_own_values;  /* items have values of their own besides the prompt */
    bool names_item;      /* a failure is the item's: its sentence says which */
    uint32_t index;       /* of the item that is being read, */
    api_request *request; /* and the item */
    api_failure *failure;
    chat_options chat;
    int64_t logprob_start; /* as given; -1: of the output only */
} api_reader;

/* An endpoint says how many items there are (batch->is_list when they are a list), then reads each
 * between begin and end. All return false, or do nothing, once there is a failure. */
void api_generate_read(api_reader *reader, const bt_json *root);
void api_chat_read(api_reader *reader, const bt_json *root);
void api_completion_read(api_reader *reader, const bt_json *root);

/* ---- what chat and completions have in common (api_openai_read.c) -----------------------------
 */

typedef enum openai_field {
    OPENAI_MODEL,
    OPENAI_STREAM,
    OPENAI_STREAM_OPTIONS,
    OPENAI_RID,
    OPENAI_RETURN_META_INFO,
    OPENAI_RETURN_TOKEN_IDS,
    OPENAI_RETURN_PROMPT_TOKEN_IDS,
    OPENAI_RETURN_SAMPLING_MASK,
    OPENAI_SAMPLING_LOGPROBS_MODE,
    OPENAI_SAMPLING_MASK_FORMAT,
    OPENAI_SAMPLING_MASK_MODE,
    OPENAI_ON_MASK_OVERFLOW,
    OPENAI_CUSTOM_LOGIT_PROCESSOR,
    OPENAI_RESPONSE_FORMAT,
    OPENAI_CACHE_SALT,
    OPENAI_EXTRA_KEY,
    OPENAI_FIRST_REFUSED,
    OPENAI_STORE = OPENAI_FIRST_REFUSED,
    OPENAI_LORA_PATH,
    OPENAI_SESSION_PARAMS,
    OPENAI_RETURN_HIDDEN_STATES,
    OPENAI_RETURN_ROUTED_EXPERTS,
    OPENAI_BOOTSTRAP_HOST,
    OPENAI_BOOTSTRAP_PORT,
    OPENAI_BOOTSTRAP_ROOM,
    OPENAI_FIELD_COUNT,
} openai_field;

typedef struct openai_fields {
    api_fields own;
    api_fields parameters; /* sampling_field's */
} openai_fields;

void api_openai_collect(api_reader *reader, const bt_json *root, openai_fields *out);
/* Reads them all, masks and sampling parameters too; the default length in *sampling is the
 * caller's. */
void api_openai_read(api_reader *reader, openai_fields *fields, api_sampling *sampling);

/* ---- ends of api_request.c ------------------------------------------------------------------- */

bool api_items_create(api_reader *reader, uint64_t count);
/* reader->request becomes the item, with its defaults. */
bool api_item_begin(api_reader *reader, uint32_t index);
/* A failure's sentence begins with the item's number where items are a list and the cause is its
 * own. */
bool api_item_end(api_reader *reader);

/* Fill request->prompt. false: reader->failure says why. */
bool api_prompt_from_text(api_reader *reader, const bt_json *value);
bool api_prompt_from_ids(api_reader *reader, const char *name, const bt_json *value);
/* No token is shorter than a byte: a text that can never fit is refused before it is tokenized. */
bool api_prompt_is_short_enough(const api_reader *reader, size_t bytes);
/* tokens_max for the tokenizer. */
uint32_t api_prompt_tokens_max(const api_reader *reader, size_t bytes);
bool api_prompt_fail(const api_reader *reader, bt_status status);

void api_rid_read(api_fields *fields, size_t field, api_request *request);

#endif
