/* What a row must be to answer a request, wherever it arrives: decode checks the metadata row of a
 * handoff with it, the router every record of a row stream. The bytes have been read (row_decode,
 * row_record_decode), so that sizes and arrays are right; this is about what they say.
 *
 * One pass over the support, no memory. Not checked here: that no id is in a support twice, which
 * takes a table as large as the vocabulary and four times as long as all this (row_ids_repeat;
 * decode does it, once per attempt). */
#ifndef BT_PROTO_ROW_CHECK_H
#define BT_PROTO_ROW_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/row_stream.h"

typedef struct row_expectation {
    uint32_t cap;       /* support entries */
    uint32_t mask_mode; /* as asked for, like all below */
    uint32_t mask_bounded;
    uint32_t has_logprob;
    uint32_t vocab_size;  /* ids are below it; 0 = not known */
    uint32_t vocab_limit; /* ids from here on are not drawn; 0 = all are */
    uint32_t top_count;   /* top log-probabilities: fewer only where the vocabulary is smaller */
    uint32_t id_logprob_count;
} row_expectation;

/* NULL, or the name of the first thing that is not what was asked for. */
const char *row_check(const row_expectation *expect, const token_row *row);

/* Whether an id is there twice. `seen` [row_seen_bytes(vocab_size)] is all zero, and is so again
 * behind the call; ids are below vocab_size. */
size_t row_seen_bytes(uint32_t vocab_size);
bool row_ids_repeat(const int32_t *ids, uint32_t count, uint8_t *seen);

#endif
