/* The fixed part first, then two loops over the support. */
#include "proto/row_check.h"

#include <string.h>

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

/* What a pass over the support found; each loop collects instead of leaving early, so that it is
 * turned into vectors. */
typedef struct findings {
    uint32_t foreign; /* ids outside the vocabulary */
    uint32_t drawn;   /* entries of the drawn token */
    uint32_t bad;     /* log-probabilities that are none */
    uint32_t equal;   /* entries of the drawn token that have the selected log-probability */
} findings;

static void look_at_ids(const int32_t *ids, uint32_t count, uint32_t limit, int32_t token,
                        findings *f) {
    uint32_t foreign = 0, drawn = 0;
    for (uint32_t i = 0; i < count; i++) {
        /* limit is at most 2^31: negative ids and those from the limit on have the top bit here. */
        foreign |= (uint32_t)ids[i] | (limit - 1u - (uint32_t)ids[i]);
        drawn += ids[i] == token ? 1u : 0u;
    }
    f->foreign = foreign >> 31;
    f->drawn = drawn;
}

static void look_at_logprobs(const token_row *row, findings *f) {
    const int32_t *ids = row->support_ids;
    const uint32_t *bits = (const uint32_t *)(const void *)row->support_logprobs;
    const uint32_t selected = bits_of(row->selected_logprob);
    const int32_t token = row->token;
    const uint32_t count = row->support_count;
    uint32_t bad = 0, equal = 0;
    for (uint32_t i = 0; i < count; i++) {
        /* As in is_logprob: of two numbers below 2^31 the difference has the top bit of a "<". */
        const uint32_t magnitude = bits[i] & 0x7fffffffu;
        const uint32_t is_finite = magnitude - 0x7f800000u;
        const uint32_t is_below_zero = bits[i] | (magnitude - 1u);
        bad |= ~(is_finite & is_below_zero);
        equal += ids[i] == token && bits[i] == selected ? 1u : 0u;
    }
    f->bad = bad >> 31;
    f->equal = equal;
}

static findings look_at_support(const token_row *row, uint32_t limit) {
    findings f = {0};
    look_at_ids(row->support_ids, row->support_count, limit, row->token, &f);
    if (row->support_logprobs != NULL) look_at_logprobs(row, &f);
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
