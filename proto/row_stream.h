/* The row stream of one attempt, decode -> router: one record per output token, back to back,
 * little endian. Frames cut it anywhere; a record is handed on only when it is complete.
 *
 *   u32 record bytes (header included)   u8 mask mode   u8 has logprob   u16 zero
 *   i32 token   f32 token logprob   f32 selected logprob   u32 support count
 *   i32 ids [support count]   f32 logprobs [support count] (support mode only)
 *
 * Pure; the caller owns all memory. */
#ifndef BT_PROTO_ROW_STREAM_H
#define BT_PROTO_ROW_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { ROW_RECORD_HEADER_BYTES = 24 };

typedef struct token_row {
    int32_t token;
    uint32_t mask_mode; /* sampler_mask_mode's numbers */
    uint32_t has_logprob;
    float token_logprob;
    float selected_logprob;
    uint32_t support_count;
    const int32_t
        *support_ids; /* unaligned reads are the reader's concern: see row_record_decode */
    const float *support_logprobs; /* NULL unless support mode */
} token_row;

/* Bytes of one record with its header. */
size_t row_record_bytes(uint32_t mask_mode, uint32_t support_count);
/* Writes one record at out [row_record_bytes(...)], any alignment. */
void row_record_encode(const token_row *row, uint8_t *out);
/* Reads the record at bytes [available]. *used_out = 0 and OK when it is not complete yet, and then
 * row_out is left alone. A record of more than cap support entries or of wrong sizes is
 * PEER_PROTOCOL. The arrays point into `bytes`, which must be 4-byte aligned (records are multiples
 * of 4, so an aligned buffer stays so). */
BT_MUST_CHECK bt_status row_record_decode(const uint8_t *bytes, size_t available, uint32_t cap,
                                          token_row *row_out, size_t *used_out);

#endif
