/* The row stream of one sample, decode -> router: one record per output token, back to back,
 * little endian. Frames cut it anywhere; a record is handed on only when it is complete.
 *
 *   u32 record bytes (header included)   u8 mask mode   u8 has logprob   u16 zero
 *   i32 token   f32 token logprob   f32 selected logprob   u32 support count
 *   u16 top count   u16 id logprob count   u32 support size   u64 weights version
 *   i32 ids [support count]   f32 logprobs [support count] (support mode only)
 *   {i32 id, f32 logprob} [top count]   f32 id logprobs [id logprob count]
 *
 * Support size is the true size of the support: the count, or more where a bounded mask was cut to
 * the cap; 0 with masks off. Weights version is the epoch that the token was drawn under. What else
 * a row must be for a request is in proto/row_check.h.
 *
 * Pure; the caller owns all memory. */
#ifndef BT_PROTO_ROW_STREAM_H
#define BT_PROTO_ROW_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/row.h"

enum { ROW_RECORD_HEADER_BYTES = 40 };

typedef struct token_row {
    int32_t token;
    uint32_t mask_mode; /* sampler_mask_mode's numbers */
    uint32_t has_logprob;
    float token_logprob;
    float selected_logprob;
    uint32_t support_count;
    uint32_t support_size; /* more than support_count: the row is truncated */
    uint64_t weights_version;
    const int32_t
        *support_ids; /* unaligned reads are the reader's concern: see row_record_decode */
    const float *support_logprobs; /* NULL unless support mode */
    uint32_t top_count;
    const row_top *top;
    uint32_t id_logprob_count;
    const float *id_logprobs;
} token_row;

/* The row that a metadata row becomes in its stream; the arrays are the same. */
token_row token_row_of(const metadata_row *first);
row_widths token_row_widths(const token_row *row);
/* Bytes of one record with its header; a multiple of 4. */
size_t row_record_bytes(row_widths widths);
/* The same of the widest record there may be at this cap. */
size_t row_record_bytes_max(uint32_t cap);
/* Writes one record at out [row_record_bytes(token_row_widths(row))], any alignment. A support size
 * below support_count is written as support_count. The support may lie in the record already: the
 * ids where they belong, log-probabilities anywhere behind them; nothing else may. */
void row_record_encode(const token_row *row, uint8_t *out);
/* Reads the record at bytes [available]. *used_out = 0 and OK when it is not complete yet, and then
 * row_out is left alone. A record of more than cap support entries, of none with a mask, of a
 * support size below them, of more log-probabilities than may be asked for, or of wrong sizes is
 * PEER_PROTOCOL. The arrays point into `bytes`, which must be 4-byte aligned (records are multiples
 * of 4, so an aligned buffer stays so). */
BT_MUST_CHECK bt_status row_record_decode(const uint8_t *bytes, size_t available, uint32_t cap,
                                          token_row *row_out, size_t *used_out);
/* What row_record_decode finds wrong with these bytes, for a log and an error; NULL: nothing. A
 * record that has begun and cannot become one is wrong before its header is complete. */
const char *row_record_fault(const uint8_t *bytes, size_t available, uint32_t cap);

#endif
