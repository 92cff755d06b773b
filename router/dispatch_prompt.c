/* The words of an attempt on their way out, and the log-probabilities of its prompt on their way
 * in. Words travel in frames of at most PROTO_FRAME_PAYLOAD_MAX: PROMPT to decode, RUN to prefill.
 * Log-probabilities come on prefill's streams connection and PREFILL_DONE on its control
 * connection, so either may be heard first: prefill's part of an attempt is over when both are
 * there, and what does not come fails the attempt at its deadline. */
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/dispatch_internal.h"

enum { WORDS_PER_FRAME = PROTO_FRAME_PAYLOAD_MAX / sizeof(int32_t) };

/* ---- out ------------------------------------------------------------------------------------- */

/* The payload of the frame that begins at word `first`. */
static bool set_payload(proto_message *message, const request *r, uint32_t first) {
    const uint32_t left = proto_words(&r->generation, r->prompt_tokens) - first;
    const uint32_t count = left < WORDS_PER_FRAME ? left : WORDS_PER_FRAME;
    const size_t bytes = (size_t)count * sizeof(int32_t);
    message->payload = bt_malloc(bytes);
    if (message->payload == NULL) return false;
    memcpy(message->payload, r->words + first, bytes);
    message->payload_bytes = bytes;
    return true;
}

bool dispatch_prompt_send_to_decode(dispatch *d, const request *r) {
    const uint32_t words = proto_words(&r->generation, r->prompt_tokens);
    for (uint32_t first = 0; first < words; first += WORDS_PER_FRAME) {
        proto_message message = {.kind = PROTO_PROMPT};
        if (!set_payload(&message, r, first)) return false;
        message.prompt.attempt = dispatch_attempt_name(d, r);
        message.prompt.first_word = first;
        dispatch_send(d, r->legs[LEG_DECODE].worker->streams, &message);
    }
    return true;
}

bool dispatch_prompt_send_run(dispatch *d, const request *r, uint32_t deadline_ms) {
    const uint32_t words = proto_words(&r->generation, r->prompt_tokens);
    const worker *decode = r->legs[LEG_DECODE].worker;
    for (uint32_t first = 0; first < words; first += WORDS_PER_FRAME) {
        proto_message message = {.kind = PROTO_RUN};
        proto_run *out = &message.run;
        if (!set_payload(&message, r, first)) return false;
        out->attempt = dispatch_attempt_name(d, r);
        if (decode != NULL) {
            out->decode_worker_id = decode->id;
            out->decode_incarnation = decode->hello.incarnation;
            out->slot_count = r->slot_count;
            memcpy(out->slots, r->slots, sizeof *r->slots * r->slot_count);
        }
        out->prompt_tokens = r->prompt_tokens;
        out->first_word = first;
        out->deadline_ms = deadline_ms;
        out->generation = r->generation;
        dispatch_send(d, r->legs[LEG_PREFILL].worker->streams, &message);
    }
    return true;
}

/* ---- in -------------------------------------------------------------------------------------- */

void dispatch_prompt_begin(request *r) {
    r->next_position = r->generation.prompt_logprobs_from + 1;
}

bool dispatch_prompt_is_complete(const request *r) {
    return !r->generation.wants_prompt_logprobs || r->next_position >= r->prompt_tokens;
}

/* NULL, or what is wrong with the frame. */
static const char *check(const request *r, const proto_message *message) {
    const proto_prompt_logprobs *said = &message->prompt_logprobs;
    if (!r->generation.wants_prompt_logprobs) return "log-probabilities that were not asked for";
    if (said->first_position != r->next_position) return "a gap in the prompt's log-probabilities";
    if (said->count > r->prompt_tokens - r->next_position)
        return "log-probabilities beyond the prompt";
    if (message->payload_bytes != said->count * proto_prompt_logprob_bytes(&r->generation))
        return "log-probabilities of a wrong size";
    return NULL;
}

void dispatch_prompt_on_logprobs(dispatch *d, worker *from, const proto_message *message) {
    const proto_prompt_logprobs *said = &message->prompt_logprobs;
    request *r = dispatch_attempt_find(d, said->attempt);
    if (r == NULL) return;
    if (r->worker_ids[LEG_PREFILL] != from->id || !r->is_run_sent) {
        dispatch_registry_protocol_error(d, from->streams,
                                         "log-probabilities of an attempt that it does not have");
        return;
    }
    const char *wrong = check(r, message);
    if (wrong != NULL) {
        dispatch_attempt_violate(d, r, from, wrong);
        return;
    }
    const dispatch_prompt_logprobs told = {.first_position = said->first_position,
                                           .count = said->count,
                                           .entries = message->payload,
                                           .bytes = message->payload_bytes};
    r->next_position += said->count;
    d->is_calling = true;
    d->ops.on_prompt_logprobs(d->ops.context, r->id, &told);
    d->is_calling = false;
    if (dispatch_prompt_is_complete(r)) dispatch_attempt_on_prompt_complete(d, r);
}
