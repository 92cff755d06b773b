/* custom_logit_processor: SGLang's clients send code with it, a pickled Python class. One class is
 * common enough to be known by its name, DisallowedTokensLogitsProcessor, with the ids in
 * custom_params: they are never drawn. It is read here as a name; nothing of it is ever run. */
#ifndef BT_ROUTER_API_PROCESSOR_H
#define BT_ROUTER_API_PROCESSOR_H

#include <stdint.h>

#include "router/api_sampling.h"

/* The bytes are a pickle that refers to that class by its name, of one of SGLang's modules, and do
 * nothing else. */
bool api_processor_is_known(const uint8_t *pickle, size_t bytes);

/* Reads the field before the sampling parameters: sampling->disallows says that custom_params has
 * ids. Fails for every other value that is not neutral. */
void api_processor_read(api_fields *fields, size_t field, api_sampling *sampling);
/* The list custom_params.token_ids; false: a failure says why. */
bool api_processor_ids(api_fields *fields, size_t custom_params, bt_json *ids_out);

#endif
