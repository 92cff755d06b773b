/* Masks cost nothing unless they are asked for: without the flag everything about them is left at
 * its neutral value, so that nobody behind this has to look twice. Values are checked all the same,
 * since a client's mistake in one request is its mistake in the next. */
#include "router/api_mask_read.h"

#include <string.h>

#include "router/api_sampling.h"

static const char *const LOGPROBS_MODES[] = {"selected", "support"};
static const char *const FORMATS[] = {"json", "packed"};
static const char *const MODES[] = {"exact", "bounded"};
static const char *const OVERFLOWS[] = {"abort", "return_partial"};

/* Which of two words, the first being the default. */
static bool is_second(api_fields *fields, size_t field, const char *const words[2]) {
    return api_get_word(fields, field, words, 2) == 1;
}

void api_mask_read(api_fields *fields, const api_mask_fields *at, api_request *request) {
    proto_generation *generation = &request->generation;
    bool is_on = false;
    api_get_bool(fields, at->flag, &is_on);
    const bool is_support = is_second(fields, at->logprobs, LOGPROBS_MODES);
    const bool is_packed = is_second(fields, at->format, FORMATS);
    const bool is_bounded = is_second(fields, at->mode, MODES);
    const bool keeps_partial = is_second(fields, at->on_overflow, OVERFLOWS);
    if (!is_on) return;
    generation->mask_mode = is_support ? ROW_MASK_SUPPORT : ROW_MASK_SELECTED;
    generation->mask_bounded = is_bounded;
    request->packs_mask = is_packed;
    request->keeps_partial = keeps_partial;
}

void api_mask_drop(api_request *request) {
    request->generation.mask_mode = ROW_MASK_OFF;
    request->generation.mask_bounded = 0;
    request->packs_mask = false;
    request->keeps_partial = false;
}

void api_mask_admit(const api_settings *settings, const api_model *model,
                    const api_request *request, api_failure *failure) {
    const proto_generation *g = &request->generation;
    if (failure->http_status != 0) return;
    const uint32_t count = api_drawable_count(model, request);
    const bool is_filtered =
        (g->top_k != 0 && g->top_k < count) || g->top_p < 1.0f || g->min_p > 0.0f;
    if (g->mask_mode == ROW_MASK_OFF || g->mask_bounded != 0 || is_filtered) return;
    if (count <= settings->mask_max_tokens) return;
    (void)api_fail(failure, 400, API_ERROR_GENERATE,
                   "return_sampling_mask requires top_k=1 for greedy sampling or a top_k, top_p or "
                   "min_p that filters: without one all %u ids are in the support, more than "
                   "--sampling-mask-max-tokens=%u. sampling_mask_mode 'bounded' takes any.",
                   count, settings->mask_max_tokens);
}
