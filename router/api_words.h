/* What of a request travels behind the prompt's ids, and the salt of its cached prefixes:
 * logit_bias, token_ids_logprob, cache_salt with extra_key. The words of an attempt are laid out in
 * proto/message.h. */
#ifndef BT_ROUTER_API_WORDS_H
#define BT_ROUTER_API_WORDS_H

#include "router/api_fields.h"

enum { API_SALT_MAX = API_STRING_MAX /* bytes of cache_salt, and of extra_key */ };

/* {"id": bias, ...}: fills request->biases, by ascending id, the last of a repeated id. Biases of
 * chat and completions are OpenAI's, -100 to 100; of /generate any that a float holds.
 * `disallowed`, NULL or a list of ids, are biased by minus infinity, whatever else is said of them.
 */
void api_bias_read(api_fields *fields, size_t field, const bt_json *disallowed,
                   const api_model *model, api_request *request);
/* A list of ids: fills request->logprob_ids, which has each once, and request->logprob_order. */
void api_logprob_ids_read(api_fields *fields, size_t field, const api_model *model,
                          api_request *request);
/* Both together say which requests may share cached prefixes. */
void api_salt_read(api_fields *fields, size_t salt, size_t extra_key, api_request *request);
/* Puts the words behind the ids of the prompt, whose count stays: prompt.ids are then all words of
 * the attempt. WORKER_MEMORY. */
BT_MUST_CHECK bt_status api_words_join(api_request *request);

#endif
