/* The head of a safetensors file that holds a reply: u64 length, then a JSON object that names each
 * tensor, its type, shape and place in the data. It is made in portions, one for each sample, so
 * that its length is known by adding up and nothing of it is kept.
 *
 *   data      the tensors of each sample in their order, 4 bytes an element; then reply_json, bytes
 *   padding   spaces behind the JSON, so that the data begins at a multiple of 8
 *
 * Pure. */
#ifndef BT_ROUTER_TENSOR_HEADER_H
#define BT_ROUTER_TENSOR_HEADER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json_writer.h"

/* What is in the tensors of a sample. */
typedef struct tensor_sample {
    uint64_t rows;
    uint64_t entries; /* of masks, in all rows */
    bool has_masks;   /* lengths, token ids, log-probabilities */
    bool is_support;  /* a log-probability for each entry, not for each row */
    bool is_bounded;  /* flags and sizes of what was cut */
} tensor_sample;

/* Where the next tensor begins in the data; zeroed at the start. */
typedef struct tensor_header {
    uint64_t data_bytes;
} tensor_header;

/* The beginning of the JSON. */
void tensor_header_begin(bt_text *out);
/* The tensors of one sample; index -1: their names have no prefix. */
void tensor_header_add(tensor_header *header, bt_text *out, int64_t index,
                       const tensor_sample *sample);
/* reply_json and the end, padding included; `before` is the length of all before it. */
void tensor_header_end(tensor_header *header, bt_text *out, uint64_t before, uint64_t json_bytes);

#endif
