/* Bytes from a multiplicative generator; floats are arbitrary finite bit patterns. */
#include "sample.h"

#include <string.h>

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 29)) * UINT64_C(0xBF58476D1CE4E5B9);
    return x ^ (x >> 32);
}

static uint64_t page_word(const sample *s, uint32_t logical_page, size_t word) {
    return mix(s->number * 1000003u + ((uint64_t)logical_page << 40) + word);
}

void sample_fill_page(const sample *s, uint32_t logical_page, void *page, size_t bytes) {
    uint64_t *words = page;
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = page_word(s, logical_page, i);
}

bool sample_is_page(const sample *s, uint32_t logical_page, const void *page, size_t bytes) {
    const uint64_t *words = page;
    for (size_t i = 0; i < bytes / 8; i++)
        if (words[i] != page_word(s, logical_page, i)) return false;
    return true;
}

/* Any bits but those of infinities and NaNs; signs, denormals and odd mantissas included. */
static float make_float(uint64_t seed) {
    const uint32_t bits = (uint32_t)mix(seed) & 0xbf7fffffu;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void make_arrays(uint64_t seed, uint32_t count, sample_row *out) {
    for (uint32_t i = 0; i < count; i++) {
        out->ids[i] = (int32_t)(mix(seed + 2 * (uint64_t)i) & 0x3ffff);
        out->logprobs[i] = make_float(seed + 2 * (uint64_t)i + 1);
    }
}

sample sample_at(const sample *s, uint32_t index) {
    sample at = *s;
    at.overflown = s->overflown == index + 1;
    if (index > 0) at.number = mix(s->number + ((uint64_t)index << 32)) | 1;
    return at;
}

uint32_t sample_cached_tokens(const sample *s) {
    return (uint32_t)(s->number % 7 % s->prompt_tokens);
}

void sample_make_row(const sample *s, sample_row *out) {
    if (s->overflown != 0) {
        out->row = (metadata_row){.first_token = -1,
                                  .status = 1,
                                  .cap_needed = SAMPLE_CAP_MAX + 1 + s->support_count,
                                  .cached_tokens = sample_cached_tokens(s),
                                  .mask_mode = s->mask_mode,
                                  .weights_version = mix(s->number),
                                  .support_ids = out->ids,
                                  .support_logprobs = out->logprobs};
        return;
    }
    const uint64_t seed = mix(s->number) ^ 0x1234567;
    make_arrays(seed, s->support_count, out);
    for (uint32_t i = 0; i < s->top_count; i++)
        out->top[i] = (row_top){.id = (int32_t)i, .logprob = make_float(seed + 7 * (uint64_t)i)};
    for (uint32_t i = 0; i < s->id_logprob_count; i++)
        out->id_logprobs[i] = make_float(seed + 11 * (uint64_t)i);
    out->row = (metadata_row){
        .first_token = (int32_t)(mix(seed ^ 1) & 0x3ffff),
        .support_count = s->mask_mode == ROW_MASK_OFF ? 0 : s->support_count,
        .cap_needed = s->mask_mode == ROW_MASK_OFF ? 0
                      : s->true_size > 0           ? s->true_size
                                                   : s->support_count,
        .cached_tokens = sample_cached_tokens(s),
        .mask_mode = s->mask_mode,
        .weights_version = mix(s->number),
        .has_first_logprob = s->number % 2 != 0,
        .first_logprob = s->number % 2 != 0 ? make_float(seed ^ 2) : 0.0f,
        .selected_logprob = s->mask_mode == ROW_MASK_OFF ? 0.0f : make_float(seed ^ 3),
        .support_ids = s->mask_mode == ROW_MASK_OFF ? NULL : out->ids,
        .support_logprobs = s->mask_mode == ROW_MASK_SUPPORT ? out->logprobs : NULL,
        .top_count = s->top_count,
        .top = s->top_count > 0 ? out->top : NULL,
        .id_logprob_count = s->id_logprob_count,
        .id_logprobs = s->id_logprob_count > 0 ? out->id_logprobs : NULL,
    };
}

void sample_make_step(const sample *s, uint32_t step, sample_row *storage, token_row *out) {
    sample next = *s;
    next.number = mix(s->number + step) | 1;
    sample_make_row(&next, storage);
    *out = token_row_of(&storage->row);
}

static bool is_same_float(float a, float b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

static bool is_same(const token_row *a, const token_row *b) {
    if (a->token != b->token || a->mask_mode != b->mask_mode) return false;
    if (a->has_logprob != b->has_logprob || a->support_count != b->support_count) return false;
    if (a->support_size != b->support_size || a->weights_version != b->weights_version)
        return false;
    if (!is_same_float(a->token_logprob, b->token_logprob)) return false;
    if (!is_same_float(a->selected_logprob, b->selected_logprob)) return false;
    if ((a->support_logprobs == NULL) != (b->support_logprobs == NULL)) return false;
    if (a->top_count != b->top_count || a->id_logprob_count != b->id_logprob_count) return false;
    if (a->top_count > 0 && memcmp(a->top, b->top, sizeof *a->top * a->top_count) != 0)
        return false;
    if (a->id_logprob_count > 0 &&
        memcmp(a->id_logprobs, b->id_logprobs, sizeof(float) * a->id_logprob_count) != 0)
        return false;
    const size_t bytes = sizeof(int32_t) * a->support_count;
    if (bytes == 0) return true;
    if (memcmp(a->support_ids, b->support_ids, bytes) != 0) return false;
    return a->support_logprobs == NULL ||
           memcmp(a->support_logprobs, b->support_logprobs, bytes) == 0;
}

bool sample_is_stream(const sample *s, const uint8_t *bytes, size_t count, uint32_t steps) {
    static sample_row storage;
    size_t at = 0;
    for (uint32_t i = 0; i <= steps; i++) {
        token_row wanted;
        token_row got;
        size_t used = 0;
        if (i == 0) {
            sample_make_row(s, &storage);
            wanted = token_row_of(&storage.row);
        } else {
            sample_make_step(s, i, &storage, &wanted);
        }
        if (row_record_decode(bytes + at, count - at, SAMPLE_CAP_MAX, &got, &used) != BT_OK)
            return false;
        if (used == 0 || !is_same(&got, &wanted)) return false;
        at += used;
    }
    return at == count;
}
