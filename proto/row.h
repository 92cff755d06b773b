/* The metadata row: the first token and everything else that only prefill knows, as a self-proving
 * record in a fixed-width slot (rules 2 and 3). Little-endian, format version 2:
 *
 *   offset bytes field                        offset bytes field
 *        0     4 magic "BROW"                     56     4 status (sampler_status)
 *        4     2 format version                   60     4 support size
 *        6     2 header bytes (128)               64     4 cap needed
 *        8     4 total bytes (header+sections)    68     4 cached tokens
 *       12     4 CRC32C                           72     4 KV chunks of the attempt
 *       16    16 attempt (incarnation, counter)   76     4 KV pages of the attempt
 *       32     4 sample index                     80     8 KV bytes of the attempt
 *       36     4 slot                             88     4 prompt tokens
 *       40     4 slot generation                  92     4 mask mode
 *       44     4 first token                      96     8 weights version
 *       48     8 writer incarnation              104    24 reserved, zero
 *
 * then sections {u16 kind, u16 zero, u32 bytes, data, zero padding to 8}, each kind at most once
 * and in ascending order. Mask mode off: no support; selected: kinds 1 and 3; support: kinds 1, 2
 * and 3; kind 4 with a log-probability, in any mode; kinds 5 and 6 where they were asked for. A row
 * whose status is not OK has no token (-1) and empty sections. Cap needed is the true size of the
 * support: with status OK the support size, or more where a bounded mask was cut to the cap; 0 with
 * masks off. Weights version is the epoch that the token was drawn under. The CRC32C covers the
 * header with its own field zero, then the chunk checksums (u32 each, in chunk-index order; not
 * sent, kept by both sides; zeros when checksums are off), then the sections. Only total_bytes
 * travel.
 *
 * Pure; the caller owns all memory. */
#ifndef BT_PROTO_ROW_H
#define BT_PROTO_ROW_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/message.h"

enum {
    ROW_FORMAT_VERSION = 2, /* of the metadata row and of the records of a row stream */
    ROW_HEADER_BYTES = 128,
    ROW_SLOT_ALIGNMENT = 64,
};

/* sampler_mask_mode's numbers, which travel in rows. */
typedef enum row_mask_mode {
    ROW_MASK_OFF = 0,
    ROW_MASK_SELECTED = 1,
    ROW_MASK_SUPPORT = 2,
} row_mask_mode;

typedef enum row_section {
    ROW_SECTION_SUPPORT_IDS = 1,      /* int32 [support size] */
    ROW_SECTION_SUPPORT_LOGPROBS = 2, /* float32 [support size], support mode */
    ROW_SECTION_SELECTED_LOGPROB = 3, /* float32 [1], selected mode and support mode */
    ROW_SECTION_FIRST_LOGPROB = 4,    /* float32 [1], with return_logprob */
    ROW_SECTION_TOP_LOGPROBS = 5,     /* {int32 id, float32 logprob} pairs, best first */
    ROW_SECTION_ID_LOGPROBS = 6,      /* float32 [ids asked for] */
} row_section;

/* What decides the size of a row and of its record in a stream. */
typedef struct row_widths {
    uint32_t mask_mode;
    uint32_t support_count;
    uint32_t top_count;
    uint32_t id_logprob_count;
} row_widths;

/* An entry of the top log-probabilities, as in kernels/sampler.h. */
typedef struct row_top {
    int32_t id;
    float logprob;
} row_top;

/* A row in host form. For row_encode the arrays are borrowed from the caller; row_decode points
 * them into the slot. */
typedef struct metadata_row {
    proto_attempt attempt;
    uint32_t sample_index;
    uint32_t slot;
    uint32_t slot_generation;
    uint64_t writer_incarnation;
    int32_t first_token;
    uint32_t status;
    uint32_t support_count;
    uint32_t cap_needed;
    uint32_t cached_tokens;
    uint32_t chunk_count;
    uint32_t page_count;
    uint64_t kv_bytes;
    uint32_t prompt_tokens;
    uint32_t mask_mode;
    uint64_t weights_version;
    uint32_t has_first_logprob;
    float first_logprob;
    float selected_logprob;        /* mask_mode not off */
    const int32_t *support_ids;    /* [support_count] */
    const float *support_logprobs; /* [support_count] in support mode, else NULL */
    uint32_t top_count;
    const row_top *top; /* [top_count] */
    uint32_t id_logprob_count;
    const float *id_logprobs; /* [id_logprob_count] */
} metadata_row;

/* Support entries of one row at most: as many as the cap allows, and no more than there are ids to
 * be in a support. vocab_size 0: not known, the cap alone counts. Everything that has room for a
 * row is sized by this; the router and both workers come to the same number, because the cap is the
 * cluster record's and the router refuses a worker whose vocabulary is another. */
static inline uint32_t row_entries_max(uint32_t cap, uint32_t vocab_size) {
    return vocab_size != 0 && vocab_size < cap ? vocab_size : cap;
}

/* Width of a slot for rows of up to cap support entries and as many log-probabilities as may be
 * asked for; a multiple of ROW_SLOT_ALIGNMENT. */
size_t row_slot_bytes(uint32_t cap);

/* Writes *row into slot [slot_bytes], 8-byte aligned; chunk_checksums [row->chunk_count]. Total
 * bytes in *total_out. CALLER_LIMIT when it does not fit, CALLER_ARGUMENT when support and mask
 * mode contradict each other. The sections may already lie in the slot (from row_decode). */
BT_MUST_CHECK bt_status row_encode(const metadata_row *row, const uint32_t *chunk_checksums,
                                   void *slot, size_t slot_bytes, size_t *total_out);
/* Sets the chunk count of an encoded row and its CRC anew: the sender knows both only when the last
 * chunk is cut, long after the row was written. */
void row_seal(void *slot, const uint32_t *chunk_checksums, uint32_t chunk_count);
/* Reads the header and sections of `bytes` received bytes without trusting them: bounds, magic,
 * version, section kinds and sizes against mask mode and support size. No proof yet, and not what
 * the request asks of a row (proto/row_check.h). A different version is PEER_PROTOCOL, anything
 * else that is wrong REQUEST_CORRUPT. `slot` is 8-byte aligned. */
BT_MUST_CHECK bt_status row_decode(const void *slot, size_t bytes, metadata_row *row_out);
/* What row_decode finds wrong with these bytes, for a log and an error; NULL: nothing. */
const char *row_fault(const void *slot, size_t bytes);
/* The proof: the CRC over header, the chunk checksums as decode knows them, and sections.
 * REQUEST_CORRUPT when it fails. */
BT_MUST_CHECK bt_status row_prove(const void *slot, size_t bytes, const uint32_t *chunk_checksums,
                                  uint32_t chunk_count);

#endif
