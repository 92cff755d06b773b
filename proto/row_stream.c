/* One record per output token; layout in row_stream.h. */
#include "proto/row_stream.h"

#include <string.h>

#include "base/little_endian.h"
#include "proto/row.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "arrays travel as they lie in memory");

size_t row_record_bytes(uint32_t mask_mode, uint32_t support_count) {
    const size_t arrays = mask_mode == ROW_MASK_SUPPORT ? 2 : 1;
    return ROW_RECORD_HEADER_BYTES + arrays * sizeof(uint32_t) * support_count;
}

void row_record_encode(const token_row *row, uint8_t *out) {
    const size_t array_bytes = sizeof(uint32_t) * row->support_count;
    bt_store_le32(out, (uint32_t)row_record_bytes(row->mask_mode, row->support_count));
    out[4] = (uint8_t)row->mask_mode;
    out[5] = row->has_logprob != 0;
    bt_store_le16(out + 6, 0);
    bt_store_le32(out + 8, (uint32_t)row->token);
    bt_store_le_float(out + 12, row->token_logprob);
    bt_store_le_float(out + 16, row->selected_logprob);
    bt_store_le32(out + 20, row->support_count);
    if (array_bytes == 0) return;
    memcpy(out + ROW_RECORD_HEADER_BYTES, row->support_ids, array_bytes);
    if (row->mask_mode == ROW_MASK_SUPPORT)
        memcpy(out + ROW_RECORD_HEADER_BYTES + array_bytes, row->support_logprobs, array_bytes);
}

bt_status row_record_decode(const uint8_t *bytes, size_t available, uint32_t cap,
                            token_row *row_out, size_t *used_out) {
    *used_out = 0;
    if (available < ROW_RECORD_HEADER_BYTES) return BT_OK;
    const uint32_t record_bytes = bt_load_le32(bytes);
    const uint32_t mask_mode = bytes[4];
    const uint32_t support_count = bt_load_le32(bytes + 20);
    if (mask_mode > ROW_MASK_SUPPORT || bytes[5] > 1 || bt_load_le16(bytes + 6) != 0)
        return BT_ERR_PEER_PROTOCOL;
    if (support_count > cap || (mask_mode == ROW_MASK_OFF && support_count != 0))
        return BT_ERR_PEER_PROTOCOL;
    if (row_record_bytes(mask_mode, support_count) != record_bytes) return BT_ERR_PEER_PROTOCOL;
    if (available < record_bytes) return BT_OK;
    const uint8_t *ids = bytes + ROW_RECORD_HEADER_BYTES;
    const uint8_t *logprobs = ids + sizeof(uint32_t) * support_count;
    *row_out = (token_row){
        .token = (int32_t)bt_load_le32(bytes + 8),
        .mask_mode = mask_mode,
        .has_logprob = bytes[5],
        .token_logprob = bt_load_le_float(bytes + 12),
        .selected_logprob = bt_load_le_float(bytes + 16),
        .support_count = support_count,
        .support_ids = (const void *)ids,
        .support_logprobs = mask_mode == ROW_MASK_SUPPORT ? (const void *)logprobs : NULL,
    };
    *used_out = record_bytes;
    return BT_OK;
}
