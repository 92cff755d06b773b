/* The loop over the support works on blocks of a fixed length, which compilers turn into vectors,
 * and collects what is wrong instead of leaving early. */
#include "proto/row_check.h"

#include <string.h>

enum { BLOCK = 16 };

/* Ids are below this. */
static uint32_t id_limit(const row_expectation *expect) {
    uint32_t limit = (uint32_t)INT32_MAX + 1u;
    if (expect->vocab_size != 0 && expect->vocab_size < limit) limit = expect->vocab_size;
    if (expect->vocab_limit != 0 && expect->vocab_limit < limit) limit = expect->vocab_limit;
    return limit;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* A log-probability that a drawn token can have: finite and not above 0. */
static bool is_logprob(float value) {
    const uint32_t bits = bits_of(value);
    return bits - 0x80000000u < 0x7f800000u || bits == 0;
}

/* That of any token: it may be impossible. */
static bool is_any_logprob(float value) {
    return value <= 0.0f;
}

/* NULL, or what is wrong with the fixed part. */
static const char *check_header(const row_expectation *expect, const token_row *row) {
    const bool has_mask = expect->mask_mode != ROW_MASK_OFF;
    if (row->mask_mode != expect->mask_mode) return "another mask mode";
    if ((row->has_logprob != 0) != (expect->has_logprob != 0))
        return "a log-probability that is missing or not asked for";
    if ((uint32_t)row->token >= id_limit(expect)) return "a token outside the vocabulary";
    if (row->has_logprob != 0 && !is_logprob(row->token_logprob))
        return "a token log-probability that is none";
    if (!has_mask)
        return row->support_count == 0 && row->support_size == 0 ? NULL
                                                                 : "a support without a mask";
    if (row->support_count == 0) return "a mask without a support";
    if (row->support_count > expect->cap) return "a support wider than the cap";
    if (row->support_size < row->support_count) return "a support size below its entries";
    if (row->support_size > id_limit(expect)) return "a support larger than the vocabulary";
    if (row->support_size > row->support_count) {
        if (expect->mask_bounded == 0) return "a truncated support in exact mode";
        if (row->support_count != expect->cap) return "a support truncated below the cap";
    }
    return is_logprob(row->selected_logprob) ? NULL : "a selected log-probability that is none";
}

static const char *check_beside(const row_expectation *expect, const token_row *row) {
    const uint32_t limit = id_limit(expect);
    const uint32_t least = expect->top_count < limit ? expect->top_count : limit;
    if (row->top_count < least || row->top_count > expect->top_count)
        return "another number of top log-probabilities";
    for (uint32_t i = 0; i < row->top_count; i++) {
        if ((uint32_t)row->top[i].id >= limit) return "a top token outside the vocabulary";
        if (!is_any_logprob(row->top[i].logprob)) return "a top log-probability that is none";
    }
    if (row->id_logprob_count != expect->id_logprob_count)
        return "another number of asked log-probabilities";
    for (uint32_t i = 0; i < row->id_logprob_count; i++) {
        if (!is_any_logprob(row->id_logprobs[i])) return "an asked log-probability that is none";
    }
    return NULL;
}

/* What a pass over the support found. */
typedef struct findings {
    uint32_t foreign; /* not 0: an id outside the vocabulary */
    uint32_t drawn;   /* entries of the drawn token */
    uint32_t bad;     /* not 0: a log-probability that is none */
    uint32_t equal;   /* entries of the drawn token that have the selected log-probability */
} findings;

static inline void look_at_id(findings *f, uint32_t id, uint32_t limit, uint32_t token) {
    f->foreign |= id >= limit;
    f->drawn += id == token;
}

static inline void look_at_logprob(findings *f, uint32_t id, uint32_t token, uint32_t bits,
                                   uint32_t selected) {
    f->bad |= (bits - 0x80000000u >= 0x7f800000u) & (bits != 0);
    f->equal += (id == token) & (bits == selected);
}

static findings look_at_support(const token_row *row, uint32_t limit) {
    const uint32_t token = (uint32_t)row->token;
    const uint32_t selected = bits_of(row->selected_logprob);
    const uint32_t count = row->support_count;
    const uint32_t *ids = (const uint32_t *)(const void *)row->support_ids;
    const uint32_t *bits = (const uint32_t *)(const void *)row->support_logprobs;
    findings f = {0};
    uint32_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        for (uint32_t k = 0; k < BLOCK; k++)
            look_at_id(&f, ids[i + k], limit, token);
        for (uint32_t k = 0; bits != NULL && k < BLOCK; k++)
            look_at_logprob(&f, ids[i + k], token, bits[i + k], selected);
    }
    for (; i < count; i++) {
        look_at_id(&f, ids[i], limit, token);
        if (bits != NULL) look_at_logprob(&f, ids[i], token, bits[i], selected);
    }
    return f;
}

static const char *check_support(const row_expectation *expect, const token_row *row) {
    if (row->support_count == 0) return NULL;
    const findings f = look_at_support(row, id_limit(expect));
    if (f.foreign != 0) return "a support id outside the vocabulary";
    if (f.drawn == 0) return "a drawn token that is not in its support";
    if (f.bad != 0) return "a support log-probability that is none";
    if (row->support_logprobs != NULL && f.equal == 0)
        return "a selected log-probability that is not its entry's";
    return NULL;
}

const char *row_check(const row_expectation *expect, const token_row *row) {
    const char *fault = check_header(expect, row);
    if (fault == NULL) fault = check_beside(expect, row);
    return fault == NULL ? check_support(expect, row) : fault;
}

size_t row_seen_bytes(uint32_t vocab_size) {
    return ((size_t)vocab_size + 7) / 8;
}

bool row_ids_repeat(const int32_t *ids, uint32_t count, uint8_t *seen) {
    bool is_repeated = false;
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *byte = &seen[(uint32_t)ids[i] / 8];
        const uint8_t bit = (uint8_t)(1u << (uint32_t)ids[i] % 8);
        is_repeated = is_repeated || (*byte & bit) != 0;
        *byte |= bit;
    }
    for (uint32_t i = 0; i < count; i++)
        seen[(uint32_t)ids[i] / 8] = 0;
    return is_repeated;
}
