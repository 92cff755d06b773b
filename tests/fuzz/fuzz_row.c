/* Bytes of any kind as a metadata row and as a row stream: either refused, by a name, or something
 * that stays inside its bytes and encodes to the same bytes again. What a request makes of the row
 * follows the rules. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "proto/row.h"
#include "proto/row_stream.h"
#include "tests/fuzz/row_rules.h"

enum { CHUNKS_MAX = 64, CAP = 1000, CRC_AT = 12, CRC_BYTES = 4 };

static void check_inside(const uint8_t *data, size_t bytes, const void *at, size_t count) {
    const uint8_t *start = at;
    if (count == 0) return;
    BT_ASSERT(start >= data);
    BT_ASSERT(count <= bytes);
    BT_ASSERT((size_t)(start - data) <= bytes - count);
}

static void check_again(const metadata_row *row, const uint8_t *data, size_t bytes) {
    static const uint32_t checksums[CHUNKS_MAX];
    size_t total = 0;
    metadata_row again;
    if (row->chunk_count > CHUNKS_MAX) return;
    uint8_t *slot = bt_calloc_aligned(ROW_SLOT_ALIGNMENT, bytes);
    BT_ASSERT(slot != NULL);
    BT_ASSERT(row_encode(row, checksums, slot, bytes, &total) == BT_OK);
    BT_ASSERT(total == bytes);
    BT_ASSERT(memcmp(slot, data, CRC_AT) == 0);
    const size_t behind = CRC_AT + CRC_BYTES;
    BT_ASSERT(memcmp(slot + behind, data + behind, bytes - behind) == 0);
    BT_ASSERT(row_decode(slot, bytes, &again) == BT_OK);
    BT_ASSERT(row_prove(slot, bytes, checksums, row->chunk_count) == BT_OK);
    /* As they came, the bytes prove themselves exactly when their CRC is the one just computed. */
    const bool is_same = memcmp(slot + CRC_AT, data + CRC_AT, CRC_BYTES) == 0;
    BT_ASSERT((row_prove(data, bytes, checksums, row->chunk_count) == BT_OK) == is_same);
    bt_free(slot);
}

/* Against requests that it may answer. */
static void check_answer(const token_row *row) {
    for (uint32_t i = 0; i < 16; i++) {
        const row_expectation expect = {
            .cap = i % 2 != 0 ? CAP : row->support_count,
            .mask_mode = row->mask_mode,
            .mask_bounded = row->mask_mode != ROW_MASK_OFF ? i >> 1 & 1 : 0,
            .has_logprob = row->has_logprob,
            .vocab_size = i >> 2 & 1 ? 1000 : 0,
            .vocab_limit = i >> 3 & 1 ? 900 : 0,
            .top_count = row->top_count,
            .id_logprob_count = row->id_logprob_count,
        };
        BT_ASSERT((row_check(&expect, row) == NULL) == row_rules_hold(&expect, row));
    }
}

static void check_row(const uint8_t *data, size_t bytes) {
    metadata_row row;
    const bt_status status = row_decode(data, bytes, &row);
    BT_ASSERT((row_fault(data, bytes) == NULL) == (status == BT_OK));
    if (status != BT_OK) {
        BT_ASSERT(status == BT_ERR_REQUEST_CORRUPT || status == BT_ERR_PEER_PROTOCOL);
        return;
    }
    BT_ASSERT(row.mask_mode <= ROW_MASK_SUPPORT);
    check_inside(data, bytes, row.support_ids, sizeof(int32_t) * (size_t)row.support_count);
    if (row.mask_mode == ROW_MASK_SUPPORT)
        check_inside(data, bytes, row.support_logprobs, sizeof(float) * (size_t)row.support_count);
    check_inside(data, bytes, row.top, sizeof *row.top * (size_t)row.top_count);
    check_inside(data, bytes, row.id_logprobs, sizeof(float) * (size_t)row.id_logprob_count);
    check_again(&row, data, bytes);
    const token_row first = token_row_of(&row);
    check_answer(&first);
}

static void check_stream(const uint8_t *data, size_t bytes) {
    size_t at = 0;
    for (;;) {
        token_row row;
        size_t used = 0;
        const bt_status status = row_record_decode(data + at, bytes - at, CAP, &row, &used);
        BT_ASSERT(status == BT_OK || status == BT_ERR_PEER_PROTOCOL);
        const char *fault = row_record_fault(data + at, bytes - at, CAP);
        BT_ASSERT(status == BT_OK || fault != NULL);
        if (used == 0) return;
        BT_ASSERT(status == BT_OK && fault == NULL);
        BT_ASSERT(used <= bytes - at);
        BT_ASSERT(row.support_count <= CAP);
        BT_ASSERT(used == row_record_bytes(token_row_widths(&row)));
        check_inside(data + at, used, row.support_ids, sizeof(int32_t) * (size_t)row.support_count);
        check_inside(data + at, used, row.top, sizeof *row.top * (size_t)row.top_count);
        check_inside(data + at, used, row.id_logprobs,
                     sizeof(float) * (size_t)row.id_logprob_count);
        static uint8_t again[ROW_RECORD_HEADER_BYTES + 8 * CAP + 8 * PROTO_TOP_LOGPROBS_MAX +
                             4 * PROTO_LOGPROB_IDS_MAX];
        row_record_encode(&row, again);
        BT_ASSERT(memcmp(again, data + at, used) == 0);
        check_answer(&row);
        at += used;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint8_t *copy = bt_calloc_aligned(ROW_SLOT_ALIGNMENT, bytes);
    BT_ASSERT(copy != NULL);
    if (bytes > 0) memcpy(copy, data, bytes);
    check_row(copy, bytes);
    check_stream(copy, bytes);
    bt_free(copy);
    return 0;
}
