/* Ids are checked as they arrive, uniqueness when the last word is there. */
#include "pd_buffers/attempt_words.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words travel as they lie in memory");

bt_status attempt_words_check_bans(const proto_generation *generation, uint32_t vocab_size,
                                   bt_error *error) {
    for (uint32_t i = 0; i < generation->banned_id_count; i++) {
        const int32_t id = generation->stop_ids[i];
        if (id >= 0 && (uint32_t)id < vocab_size) continue;
        return bt_fail(error, BT_ERR_REQUEST_INVALID,
                       "stop id %" PRId32 " is outside the vocabulary of %" PRIu32, id, vocab_size);
    }
    return BT_OK;
}

bt_status attempt_words_init(const proto_generation *generation, uint32_t prompt_tokens,
                             attempt_words *out) {
    const uint32_t count = proto_words(generation, prompt_tokens);
    *out = (attempt_words){0};
    int32_t *words = bt_calloc(count, sizeof *words);
    if (words == NULL) return BT_ERR_WORKER_MEMORY;
    *out = (attempt_words){.words = words,
                           .count = count,
                           .prompt_tokens = prompt_tokens,
                           .bias_count = generation->bias_count,
                           .logprob_id_count = generation->logprob_id_count};
    return BT_OK;
}

void attempt_words_fini(attempt_words *words) {
    bt_free(words->words);
    *words = (attempt_words){0};
}

bool attempt_words_are_complete(const attempt_words *words) {
    return words->count > 0 && words->received == words->count;
}

static const int32_t *part(const attempt_words *words, uint32_t at, uint32_t count) {
    return count == 0 ? NULL : words->words + at;
}

const int32_t *attempt_words_prompt(const attempt_words *words) {
    return words->words;
}

const int32_t *attempt_words_bias_ids(const attempt_words *words) {
    return part(words, words->prompt_tokens, words->bias_count);
}

const float *attempt_words_biases(const attempt_words *words) {
    return (const void *)part(words, words->prompt_tokens + words->bias_count, words->bias_count);
}

const int32_t *attempt_words_logprob_ids(const attempt_words *words) {
    return part(words, words->prompt_tokens + 2 * words->bias_count, words->logprob_id_count);
}

static float bias_of(int32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static bt_status check_word(const attempt_words *words, uint32_t at, uint32_t vocab_size,
                            bt_error *error) {
    const int32_t word = words->words[at];
    const uint32_t bias_first = words->prompt_tokens + words->bias_count;
    if (at >= bias_first && at < bias_first + words->bias_count) {
        const float bias = bias_of(word);
        if (isfinite(bias) || bias == -INFINITY) return BT_OK;
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "a logit bias is not finite");
    }
    if (word >= 0 && (uint32_t)word < vocab_size) return BT_OK;
    const char *what = at < words->prompt_tokens ? "prompt token"
                       : at < bias_first         ? "biased id"
                                                 : "id of log-probabilities";
    return bt_fail(error, BT_ERR_REQUEST_INVALID,
                   "%s %" PRId32 " is outside the vocabulary of %" PRIu32, what, word, vocab_size);
}

/* Bits of the ids seen; lists are short beside the vocabulary, and it is done once. */
static bt_status check_unique(const int32_t *ids, uint32_t count, uint32_t vocab_size,
                              const char *what, bt_error *error) {
    if (count < 2) return BT_OK;
    uint8_t *seen = bt_calloc(vocab_size / 8 + 1, 1);
    if (seen == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for a check");
    uint32_t at = 0;
    for (; at < count; at++) {
        uint8_t *byte = &seen[(uint32_t)ids[at] / 8];
        const uint8_t bit = (uint8_t)(1u << ((uint32_t)ids[at] % 8));
        if ((*byte & bit) != 0) break;
        *byte |= bit;
    }
    bt_free(seen);
    if (at == count) return BT_OK;
    return bt_fail(error, BT_ERR_REQUEST_INVALID, "%s %" PRId32 " comes twice", what, ids[at]);
}

bt_status attempt_words_add(attempt_words *words, uint32_t first, const void *payload,
                            size_t payload_bytes, uint32_t vocab_size, bt_error *error) {
    const size_t count = payload_bytes / sizeof(int32_t);
    if (first != words->received || words->received == words->count) {
        return bt_fail(error, BT_ERR_REQUEST_DUPLICATE,
                       "a part of the prompt from word %" PRIu32 " does not follow %" PRIu32
                       " of %" PRIu32,
                       first, words->received, words->count);
    }
    if (count == 0 || payload_bytes % sizeof(int32_t) != 0 || count > words->count - first) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "%zu bytes are no part of %" PRIu32 " words",
                       payload_bytes, words->count);
    }
    memcpy(words->words + first, payload, payload_bytes);
    for (uint32_t at = first; at < first + (uint32_t)count; at++) {
        const bt_status status = check_word(words, at, vocab_size, error);
        if (status != BT_OK) return status;
    }
    words->received += (uint32_t)count;
    if (words->received < words->count) return BT_OK;
    const bt_status status = check_unique(attempt_words_bias_ids(words), words->bias_count,
                                          vocab_size, "biased id", error);
    if (status != BT_OK) return status;
    return check_unique(attempt_words_logprob_ids(words), words->logprob_id_count, vocab_size,
                        "id of log-probabilities", error);
}
