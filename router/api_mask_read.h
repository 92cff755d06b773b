/* The fields about sampling masks, the same on every endpoint, and which requests with masks are
 * refused before anything is computed. */
#ifndef BT_ROUTER_API_MASK_READ_H
#define BT_ROUTER_API_MASK_READ_H

#include "router/api_fields.h"

/* Where they are among the endpoint's fields. */
typedef struct api_mask_fields {
    size_t flag;        /* return_sampling_mask */
    size_t logprobs;    /* sampling_logprobs_mode */
    size_t format;      /* sampling_mask_format */
    size_t mode;        /* sampling_mask_mode */
    size_t on_overflow; /* on_mask_overflow */
} api_mask_fields;

/* Checks all five, also without masks, when the other four have no effect: packs_mask and
 * keeps_partial of the request, mask_mode and mask_bounded of its generation. */
void api_mask_read(api_fields *fields, const api_mask_fields *at, api_request *request);
/* As if none had been asked for. */
void api_mask_drop(api_request *request);
/* Once the sampling parameters are read: fails for exact masks of a request whose support can
 * never fit the cap, because nothing filters it. Any other may fit, and is run. */
void api_mask_admit(const api_settings *settings, const api_model *model,
                    const api_request *request, api_failure *failure);

#endif
