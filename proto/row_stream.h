/* The row stream of one sample, decode -> router: one record per output token, back to back,
 * little endian. Frames cut it anywhere; a record is handed on only when it is complete.
 *
 *   u32 record bytes (header included)   u8 mask mode   u8 has logprob   u16 zero
 *   i32 token   f32 token logprob   f32 selected logprob   u32 support count
 *   u16 top count   u16 id logprob count
 *   i32 ids [support count]   f32 logprobs [support count] (support mode only)
 *   {i32 id, f32 logprob} [top count]   f32 id logprobs [id logprob count]
 *
 * Pure; the caller owns all memory. */
#ifndef BT_PROTO_ROW_STREAM_H
#define BT_PROTO_ROW_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/row.h"

enum { ROW_RECORD_HEADER_BYTES = 28 };

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
    uint32_t top_count;
    const row_top *top;
    uint32_t id_logprob_count;
    const float *id_logprobs;
} token_row;

row_widths token_row_widths(const token_row *row);
/* Bytes of one record with its header; a multiple of 4. */
size_t row_record_bytes(row_widths widths);
/* The same of the widest record there may be at this cap. */
size_t row_record_bytes_max(uint32_t cap);
/* Writes one record at out [row_record_bytes(token_row_widths(row))], any alignment. */
void row_record_encode(const token_row *row, uint8_t *out);
/* Reads the record at bytes [available]. *used_out = 0 and OK when it is not complete yet, and then
 * row_out is left alone. A record of more than cap support entries, of more log-probabilities
 * than may be asked for, or of wrong sizes is PEER_PROTOCOL. The arrays point into `bytes`, which
 * must be 4-byte aligned (records are multiples of 4, so an aligned buffer stays so). */
BT_MUST_CHECK bt_status row_record_decode(const uint8_t *bytes, size_t available, uint32_t cap,
                                          token_row *row_out, size_t *used_out);

#endif
