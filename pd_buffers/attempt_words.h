/* The words of an attempt (proto/message.h) put together from the payloads of RUN or PROMPT frames:
 * the prompt's ids, biases and the ids whose log-probabilities are asked for. One block per
 * attempt, allocated once for its whole length. Event thread. */
#ifndef BT_PD_BUFFERS_ATTEMPT_WORDS_H
#define BT_PD_BUFFERS_ATTEMPT_WORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/message.h"

typedef struct attempt_words {
    int32_t *words; /* [count] */
    uint32_t count;
    uint32_t received;
    uint32_t prompt_tokens, bias_count, logprob_id_count;
} attempt_words;

/* The ids that travel in the generation itself: REQUEST_INVALID when a banned one is outside the
 * vocabulary, since a step refuses the whole batch for it. Ids that only stop may be anything. */
BT_MUST_CHECK bt_status attempt_words_check_bans(const proto_generation *generation,
                                                 uint32_t vocab_size, bt_error *error);
/* WORKER_MEMORY; *out is then empty. The counts of *generation are within their limits. */
BT_MUST_CHECK bt_status attempt_words_init(const proto_generation *generation,
                                           uint32_t prompt_tokens, attempt_words *out);
/* Legal on an empty one, and twice. */
void attempt_words_fini(attempt_words *words);
/* The next payload, which must begin at word `first` = received. REQUEST_DUPLICATE when it does not
 * follow, REQUEST_INVALID when it is no whole words, too long, or holds what it must not: an id
 * outside [0, vocab_size), a bias that is not finite, a bias id or an asked id twice. *error says
 * which. */
BT_MUST_CHECK bt_status attempt_words_add(attempt_words *words, uint32_t first, const void *payload,
                                          size_t payload_bytes, uint32_t vocab_size,
                                          bt_error *error);
bool attempt_words_are_complete(const attempt_words *words);

/* Parts, once complete; NULL where the count is 0. */
const int32_t *attempt_words_prompt(const attempt_words *words);
const int32_t *attempt_words_bias_ids(const attempt_words *words);
const float *attempt_words_biases(const attempt_words *words);
const int32_t *attempt_words_logprob_ids(const attempt_words *words);

#endif
