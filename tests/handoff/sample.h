/* Made-up KV pages and metadata rows whose every byte follows from a number, so that the receiving
 * side of a test can tell what it should have got. */
#ifndef BT_TESTS_HANDOFF_SAMPLE_H
#define BT_TESTS_HANDOFF_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/row.h"
#include "proto/row_stream.h"

enum { SAMPLE_CAP_MAX = 4096 };

/* What one attempt hands over. */
typedef struct sample {
    uint64_t number; /* != 0, seeds everything */
    uint32_t prompt_tokens;
    uint32_t mask_mode;
    uint32_t support_count;
    uint32_t true_size; /* of a support that is cut in bounded mode; 0: exact mode */
    uint32_t samples;   /* rows of the attempt, of one prompt; 0 as 1 */
    uint32_t top_count, id_logprob_count;
    uint32_t overflown; /* 1 + the index of a sample that got no token; 0: all did */
} sample;

static inline uint32_t sample_count(const sample *s) {
    return s->samples == 0 ? 1 : s->samples;
}
/* What the rows of sample `index` are made of; of 0 it is s itself. */
sample sample_at(const sample *s, uint32_t index);

/* The storage of a generated row. */
typedef struct sample_row {
    metadata_row row;
    int32_t ids[SAMPLE_CAP_MAX];
    float logprobs[SAMPLE_CAP_MAX];
    row_top top[PROTO_TOP_LOGPROBS_MAX];
    float id_logprobs[PROTO_LOGPROB_IDS_MAX];
} sample_row;

void sample_fill_page(const sample *s, uint32_t logical_page, void *page, size_t bytes);
bool sample_is_page(const sample *s, uint32_t logical_page, const void *page, size_t bytes);
uint32_t sample_cached_tokens(const sample *s);
void sample_make_row(const sample *s, sample_row *out);
/* A row that decode itself makes: the step-th after row 0. */
void sample_make_step(const sample *s, uint32_t step, sample_row *storage, token_row *out);
/* true when the first record of a row stream is, bit for bit, what sample_make_row made, and the
 * next `steps` are what sample_make_step made, and nothing follows. */
bool sample_is_stream(const sample *s, const uint8_t *bytes, size_t count, uint32_t steps);

#endif
