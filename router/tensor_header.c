/* Names and order are a promise to clients. */
#include "router/tensor_header.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { ALIGNMENT = 8, LENGTH_BYTES = 8, WORD = 4 };

void tensor_header_begin(bt_text *out) {
    bt_text_add_string(out, "{\"__metadata__\":{\"format\":\"baton-1\"}");
}

typedef struct tensor {
    const char *name, *dtype;
    uint64_t elements, element_bytes;
} tensor;

static void add_tensor(tensor_header *header, bt_text *out, const char *prefix, const tensor *t) {
    const uint64_t from = header->data_bytes;
    header->data_bytes += t->elements * t->element_bytes;
    bt_text_add_format(out,
                       ",\"%s%s\":{\"dtype\":\"%s\",\"shape\":[%" PRIu64
                       "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                       prefix, t->name, t->dtype, t->elements, from, header->data_bytes);
}

void tensor_header_add(tensor_header *header, bt_text *out, int64_t index,
                       const tensor_sample *sample) {
    const uint64_t logprobs = sample->is_support ? sample->entries : sample->rows;
    const struct {
        bool is_there;
        tensor tensor;
    } all[] = {
        {true, {"output_ids", "I32", sample->rows, WORD}},
        {sample->has_masks, {"sampling_mask_lengths", "I32", sample->rows, WORD}},
        {sample->has_masks, {"sampling_mask_token_ids", "I32", sample->entries, WORD}},
        {sample->has_masks, {"sampling_logprobs", "F32", logprobs, WORD}},
        {sample->is_bounded, {"sampling_mask_truncated", "I32", sample->rows, WORD}},
        {sample->is_bounded, {"sampling_mask_support_sizes", "I32", sample->rows, WORD}},
    };
    char prefix[24] = "";
    if (index >= 0) snprintf(prefix, sizeof(prefix), "%" PRId64 ".", index);
    for (size_t i = 0; i < BT_ARRAY_COUNT(all); i++) {
        if (all[i].is_there) add_tensor(header, out, prefix, &all[i].tensor);
    }
}

void tensor_header_end(tensor_header *header, bt_text *out, uint64_t before, uint64_t json_bytes) {
    const size_t start = out->used;
    const tensor reply = {"reply_json", "U8", json_bytes, 1};
    add_tensor(header, out, "", &reply);
    bt_text_add(out, "}", 1);
    const uint64_t length = LENGTH_BYTES + before + (out->used - start);
    for (uint64_t i = length; i % ALIGNMENT != 0; i++) {
        bt_text_add(out, " ", 1);
    }
}
