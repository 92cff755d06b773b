/* What proto/row_check.h promises of a row, said one rule after the other: for the fuzz targets of
 * everything that rows pass through. */
#ifndef BT_TESTS_FUZZ_ROW_RULES_H
#define BT_TESTS_FUZZ_ROW_RULES_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "proto/row_check.h"

static inline bool row_rules_id(const row_expectation *expect, int32_t id) {
    if (id < 0) return false;
    if (expect->vocab_size != 0 && (uint32_t)id >= expect->vocab_size) return false;
    return expect->vocab_limit == 0 || (uint32_t)id < expect->vocab_limit;
}

static inline bool row_rules_support(const row_expectation *expect, const token_row *row) {
    bool has_token = false;
    if (row->support_count == 0 || row->support_count > expect->cap) return false;
    const bool is_cut = row->support_size > row->support_count;
    if (row->support_size < row->support_count) return false;
    if (is_cut && (expect->mask_bounded == 0 || row->support_count != expect->cap)) return false;
    if (row->support_size > 0x80000000u || !row_rules_id(expect, (int32_t)(row->support_size - 1)))
        return false;
    if (!isfinite(row->selected_logprob) || row->selected_logprob > 0) return false;
    for (uint32_t i = 0; i < row->support_count; i++) {
        if (!row_rules_id(expect, row->support_ids[i])) return false;
        const bool is_token = row->support_ids[i] == row->token;
        if (row->support_logprobs == NULL) {
            has_token = has_token || is_token;
            continue;
        }
        const float logprob = row->support_logprobs[i];
        if (!isfinite(logprob) || logprob > 0) return false;
        if (is_token && memcmp(&logprob, &row->selected_logprob, sizeof logprob) == 0)
            has_token = true;
    }
    return has_token;
}

static inline bool row_rules_hold(const row_expectation *expect, const token_row *row) {
    uint32_t least = expect->top_count;
    if (row->mask_mode != expect->mask_mode || row->has_logprob != expect->has_logprob)
        return false;
    if (!row_rules_id(expect, row->token)) return false;
    if (row->has_logprob && (!isfinite(row->token_logprob) || row->token_logprob > 0)) return false;
    if (expect->vocab_size != 0 && expect->vocab_size < least) least = expect->vocab_size;
    if (expect->vocab_limit != 0 && expect->vocab_limit < least) least = expect->vocab_limit;
    if (row->top_count < least || row->top_count > expect->top_count) return false;
    for (uint32_t i = 0; i < row->top_count; i++) {
        if (!row_rules_id(expect, row->top[i].id) || !(row->top[i].logprob <= 0)) return false;
    }
    if (row->id_logprob_count != expect->id_logprob_count) return false;
    for (uint32_t i = 0; i < row->id_logprob_count; i++) {
        if (!(row->id_logprobs[i] <= 0)) return false;
    }
    if (expect->mask_mode == ROW_MASK_OFF) return row->support_count == 0 && row->support_size == 0;
    return row_rules_support(expect, row);
}

#endif
