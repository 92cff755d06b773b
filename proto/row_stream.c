/* One record per output token; layout in row_stream.h. */
#include "proto/row_stream.h"

#include <stdbool.h>
#include <string.h>

#include "base/little_endian.h"
#include "proto/message.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "arrays travel as they lie in memory");

token_row token_row_of(const metadata_row *first) {
    return (token_row){
        .token = first->first_token,
        .mask_mode = first->mask_mode,
        .has_logprob = first->has_first_logprob,
        .token_logprob = first->first_logprob,
        .selected_logprob = first->selected_logprob,
        .support_count = first->support_count,
        .support_size = first->cap_needed,
        .weights_version = first->weights_version,
        .support_ids = first->support_ids,
        .support_logprobs = first->support_logprobs,
        .top_count = first->top_count,
        .top = first->top,
        .id_logprob_count = first->id_logprob_count,
        .id_logprobs = first->id_logprobs,
    };
}

row_widths token_row_widths(const token_row *row) {
    return (row_widths){.mask_mode = row->mask_mode,
                        .support_count = row->support_count,
                        .top_count = row->top_count,
                        .id_logprob_count = row->id_logprob_count};
}

size_t row_record_bytes(row_widths w) {
    const size_t arrays = w.mask_mode == ROW_MASK_SUPPORT ? 2 : 1;
    return ROW_RECORD_HEADER_BYTES + arrays * sizeof(uint32_t) * w.support_count +
           sizeof(row_top) * w.top_count + sizeof(float) * w.id_logprob_count;
}

size_t row_record_bytes_max(uint32_t cap) {
    return row_record_bytes((row_widths){.mask_mode = ROW_MASK_SUPPORT,
                                         .support_count = cap,
                                         .top_count = PROTO_TOP_LOGPROBS_MAX,
                                         .id_logprob_count = PROTO_LOGPROB_IDS_MAX});
}

/* What lies there already stays. */
static uint8_t *put(uint8_t *at, const void *from, size_t bytes) {
    if (bytes > 0 && at != from) memmove(at, from, bytes);
    return at + bytes;
}

void row_record_encode(const token_row *row, uint8_t *out) {
    const size_t array_bytes = sizeof(uint32_t) * row->support_count;
    const bool is_cut = row->mask_mode != ROW_MASK_OFF && row->support_size > row->support_count;
    bt_store_le32(out, (uint32_t)row_record_bytes(token_row_widths(row)));
    out[4] = (uint8_t)row->mask_mode;
    out[5] = row->has_logprob != 0;
    bt_store_le16(out + 6, 0);
    bt_store_le32(out + 8, (uint32_t)row->token);
    bt_store_le_float(out + 12, row->token_logprob);
    bt_store_le_float(out + 16, row->selected_logprob);
    bt_store_le32(out + 20, row->support_count);
    bt_store_le16(out + 24, (uint16_t)row->top_count);
    bt_store_le16(out + 26, (uint16_t)row->id_logprob_count);
    bt_store_le32(out + 28, is_cut ? row->support_size : row->support_count);
    bt_store_le64(out + 32, row->weights_version);
    uint8_t *at = put(out + ROW_RECORD_HEADER_BYTES, row->support_ids, array_bytes);
    if (row->mask_mode == ROW_MASK_SUPPORT) at = put(at, row->support_logprobs, array_bytes);
    at = put(at, row->top, sizeof(row_top) * row->top_count);
    (void)put(at, row->id_logprobs, sizeof(float) * row->id_logprob_count);
}

static row_widths read_widths(const uint8_t *header) {
    return (row_widths){.mask_mode = header[4],
                        .support_count = bt_load_le32(header + 20),
                        .top_count = bt_load_le16(header + 24),
                        .id_logprob_count = bt_load_le16(header + 26)};
}

/* NULL, or what is wrong with a whole header. */
static const char *header_fault(const uint8_t *header, uint32_t cap) {
    const row_widths w = read_widths(header);
    const uint32_t support_size = bt_load_le32(header + 28);
    if (w.mask_mode > ROW_MASK_SUPPORT) return "an unknown mask mode";
    if (w.support_count > cap) return "a support wider than the cap";
    if (w.mask_mode == ROW_MASK_OFF && (w.support_count != 0 || support_size != 0))
        return "a support without a mask";
    if (w.mask_mode != ROW_MASK_OFF && w.support_count == 0) return "a mask without a support";
    if (support_size < w.support_count) return "a support size below its entries";
    if (w.top_count > PROTO_TOP_LOGPROBS_MAX) return "too many top log-probabilities";
    if (w.id_logprob_count > PROTO_LOGPROB_IDS_MAX) return "too many asked log-probabilities";
    if (header[5] > 1 || bt_load_le16(header + 6) != 0) return "unknown bits in a record's header";
    return row_record_bytes(w) == bt_load_le32(header) ? NULL : "a record of another length";
}

const char *row_record_fault(const uint8_t *bytes, size_t available, uint32_t cap) {
    uint32_t length;
    if (available >= ROW_RECORD_HEADER_BYTES) return header_fault(bytes, cap);
    if (available < sizeof length) return NULL;
    length = bt_load_le32(bytes);
    const bool is_possible =
        length >= ROW_RECORD_HEADER_BYTES && length <= row_record_bytes_max(cap);
    return is_possible ? NULL : "a record of an impossible length";
}

bt_status row_record_decode(const uint8_t *bytes, size_t available, uint32_t cap,
                            token_row *row_out, size_t *used_out) {
    *used_out = 0;
    if (available < ROW_RECORD_HEADER_BYTES) return BT_OK;
    if (header_fault(bytes, cap) != NULL) return BT_ERR_PEER_PROTOCOL;
    const uint32_t record_bytes = bt_load_le32(bytes);
    if (available < record_bytes) return BT_OK;
    const row_widths w = read_widths(bytes);
    const bool has_logprobs = w.mask_mode == ROW_MASK_SUPPORT;
    const uint8_t *ids = bytes + ROW_RECORD_HEADER_BYTES;
    const uint8_t *logprobs = ids + sizeof(uint32_t) * w.support_count;
    const uint8_t *top = logprobs + (has_logprobs ? sizeof(float) * w.support_count : 0);
    *row_out = (token_row){
        .token = (int32_t)bt_load_le32(bytes + 8),
        .mask_mode = w.mask_mode,
        .has_logprob = bytes[5],
        .token_logprob = bt_load_le_float(bytes + 12),
        .selected_logprob = bt_load_le_float(bytes + 16),
        .support_count = w.support_count,
        .support_size = bt_load_le32(bytes + 28),
        .weights_version = bt_load_le64(bytes + 32),
        .support_ids = (const void *)ids,
        .support_logprobs = has_logprobs ? (const void *)logprobs : NULL,
        .top_count = w.top_count,
        .top = (const void *)top,
        .id_logprob_count = w.id_logprob_count,
        .id_logprobs = (const void *)(top + sizeof(row_top) * w.top_count),
    };
    *used_out = record_bytes;
    return BT_OK;
}
