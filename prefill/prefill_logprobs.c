/* Prompt log-probabilities: prefill -> router, as bulk frames on the streams connection. A prompt
 * that has them to send is computed on only while the connection takes more, so that no more than
 * one step's worth waits here. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

/* Entry i of the chunk; 0 bytes when it was not scored. */
static size_t put_entry(const model_scores *scores, uint32_t i, uint8_t *to) {
    const uint8_t *start = to;
    if (isnan(scores->logprobs[i])) return 0;
    memcpy(to, &scores->logprobs[i], sizeof(float));
    to += sizeof(float);
    if (scores->top_count > 0) {
        const size_t bytes = sizeof(sampler_top) * scores->top_count;
        memcpy(to, scores->top + (size_t)i * scores->top_count, bytes);
        to += bytes;
    }
    if (scores->id_count > 0) {
        const size_t bytes = sizeof(float) * scores->id_count;
        memcpy(to, scores->id_logprobs + (size_t)i * scores->id_count, bytes);
        to += bytes;
    }
    return (size_t)(to - start);
}

bool prefill_send_logprobs(prefill_core *core, prefill_attempt *a, const model_scores *scores,
                           uint32_t first_token) {
    const size_t entry_bytes = proto_prompt_logprob_bytes(&a->generation);
    const uint32_t entries_max = (uint32_t)(PROTO_FRAME_PAYLOAD_MAX / entry_bytes);
    const uint32_t first_position = first_token + scores->first + 1;
    for (uint32_t at = 0; at < scores->count;) {
        const uint32_t left = scores->count - at;
        const uint32_t count = left < entries_max ? left : entries_max;
        uint8_t *payload = bt_malloc(count * entry_bytes);
        if (payload == NULL) {
            prefill_fail(core, a, BT_ERR_WORKER_MEMORY, "no memory for prompt log-probabilities");
            return false;
        }
        for (uint32_t i = 0; i < count; i++) {
            if (put_entry(scores, at + i, payload + i * entry_bytes) == entry_bytes) continue;
            bt_free(payload);
            prefill_uncache_pages(core, a, true);
            prefill_fail(core, a, BT_ERR_REQUEST_CAPTURE,
                         "the log-probability of prompt token %" PRIu32 " is no number",
                         first_position + at + i);
            return false;
        }
        proto_message message = {
            .kind = PROTO_PROMPT_LOGPROBS,
            .prompt_logprobs = {.attempt = a->id,
                                .first_position = first_position + at,
                                .count = count},
            .payload = payload,
            .payload_bytes = count * entry_bytes,
        };
        core->options.ops.send(core->options.ops.context, PROTO_LANE_STREAMS, &message);
        at += count;
    }
    return true;
}
