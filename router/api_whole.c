/* A reply that is sent when it is complete, part by part; one part at a time is in the writer.
 *
 *   JSON          a part for each sample
 *   safetensors   the head: its length, a part for each sample, its end; then the arrays of each
 *                 sample; then the JSON, which lacks what is in the arrays
 *
 * The head says how long everything is, so the JSON of a safetensors reply is formatted twice,
 * once for its length alone, in slices between which other calls have their turns. What may differ
 * between the two is fixed before (the time), or does not change once a reply is being written.
 * Arrays are not looked at to know their lengths. Rows are kept until their last part is written.
 */
#include "base/little_endian.h"
#include "router/api_format.h"
#include "router/tensor_header.h"

enum {
    LENGTH_BYTES = 8,
    MEASURED_BYTES = 64 * 1024, /* of JSON made at once, */
    SLICE_BYTES = 512 * 1024,   /* and in one go: about a millisecond */
};

static bool is_tensors(const api_call *call) {
    return call->request->wants_safetensors;
}

void api_whole_begin(api_call *call) {
    const api_time *time = &call->options.time;
    call->whole = (api_whole){.bytes = -1};
    if (!is_tensors(call)) return;
    call->whole.is_fixed = true;
    call->whole.now_us = bt_clock_now_us(&time->clock);
    call->whole.wall_seconds = time->wall_seconds(time->context);
}

/* What was written is not needed any more. */
static void drop_written(api_call *call, uint32_t sample) {
    const uint32_t item = call->samples[sample].item;
    reply_store_fini(&call->samples[sample].store);
    const bool is_last = sample + 1 == call->sample_count || call->samples[sample + 1].item != item;
    if (is_last) reply_store_fini(&call->items[item].prompt.store);
}

/* The JSON of a sample, and what is around it. */
static void start_json(api_call *call, uint32_t sample) {
    const reply_range all = api_sample_range(&call->samples[sample]);
    call->current = sample;
    api_start_writer(call, sample, &all);
    if (call->request->kind != API_GENERATE) {
        api_openai_add(call, sample);
        return;
    }
    const bool is_list = api_is_list(call);
    const bool is_last = sample + 1 == call->sample_count;
    if (is_list) bt_text_add(reply_writer_literal(&call->writer), sample == 0 ? "[" : ",", 1);
    api_generate_add(call, sample);
    if (is_list && is_last) bt_text_add(reply_writer_literal(&call->writer), "]", 1);
}

/* ---- safetensors ----------------------------------------------------------------------------- */

/* The usual reply holds several samples, also when it is a list of one. */
static bool has_prefixes(const api_call *call) {
    return call->sample_count > 1 || (call->request->kind == API_GENERATE && api_is_list(call));
}

static void add_to_head(const api_call *call, tensor_header *header, bt_text *out,
                        uint32_t sample) {
    const api_sample *s = &call->samples[sample];
    const proto_generation *asked = &api_request_of(call, sample)->generation;
    const tensor_sample sizes = {.rows = s->generation.count,
                                 .entries = s->entries,
                                 .has_masks = asked->mask_mode != ROW_MASK_OFF,
                                 .is_support = asked->mask_mode == ROW_MASK_SUPPORT,
                                 .is_bounded = asked->mask_bounded != 0};
    tensor_header_add(header, out, has_prefixes(call) ? (int64_t)sample : -1, &sizes);
}

/* Nothing is read of a sample until later: no memory is kept for reading its files. */
static void rest(api_call *call, uint32_t sample) {
    reply_store_rest(&call->samples[sample].store);
    reply_store_rest(&api_item_of(call, sample)->prompt.store);
}

/* Adds up the JSON up to about a slice; *is_complete_out: all of it. */
static bt_status measure_json(api_call *call, bool *is_complete_out) {
    bt_text *scratch = call->options.scratch;
    api_whole *whole = &call->whole;
    const uint64_t stop = whole->json_bytes + SLICE_BYTES;
    *is_complete_out = false;
    while (whole->json_bytes < stop) {
        if (reply_writer_is_done(&call->writer)) {
            if (whole->measured > 0) rest(call, whole->measured - 1);
            *is_complete_out = whole->measured == call->sample_count;
            if (*is_complete_out) return BT_OK;
            start_json(call, whole->measured++);
        }
        bt_text_clear(scratch);
        const bt_status status = reply_writer_produce(&call->writer, scratch, MEASURED_BYTES);
        if (status != BT_OK) return status;
        whole->json_bytes += scratch->used;
    }
    return BT_OK;
}

static bt_status measure_head(api_call *call, tensor_header *header) {
    bt_text *scratch = call->options.scratch;
    api_whole *whole = &call->whole;
    bt_text_clear(scratch);
    tensor_header_begin(scratch);
    for (uint32_t i = 0; i < call->sample_count; i++) {
        whole->head_bytes += scratch->used;
        if (scratch->has_failed) return BT_ERR_WORKER_MEMORY;
        bt_text_clear(scratch);
        add_to_head(call, header, scratch, i);
    }
    whole->head_bytes += scratch->used;
    const size_t before = scratch->used;
    tensor_header_end(header, scratch, whole->head_bytes, whole->json_bytes);
    whole->head_bytes += scratch->used - before;
    return scratch->has_failed ? BT_ERR_WORKER_MEMORY : BT_OK;
}

bt_status api_whole_measure(api_call *call, bool *is_complete_out) {
    tensor_header header = {0};
    *is_complete_out = true;
    if (!is_tensors(call)) return BT_OK;
    bt_status status = measure_json(call, is_complete_out);
    if (status == BT_OK && *is_complete_out) status = measure_head(call, &header);
    if (status == BT_OK && *is_complete_out)
        call->whole.bytes = (int64_t)(LENGTH_BYTES + call->whole.head_bytes + header.data_bytes);
    return status;
}

/* Part 0 .. samples + 1. */
static void start_head(api_call *call, uint32_t part) {
    api_whole *whole = &call->whole;
    const reply_range nothing = {0};
    api_start_writer(call, 0, &nothing);
    bt_text *out = reply_writer_literal(&call->writer);
    if (part == 0) {
        uint8_t length[LENGTH_BYTES];
        bt_store_le64(length, whole->head_bytes);
        bt_text_add(out, (const char *)length, sizeof(length));
        tensor_header_begin(out);
        whole->head_written = out->used - sizeof(length);
    } else if (part <= call->sample_count) {
        add_to_head(call, &whole->header, out, part - 1);
        whole->head_written += out->used;
    } else {
        tensor_header_end(&whole->header, out, whole->head_written, whole->json_bytes);
    }
}

static void start_arrays(api_call *call, uint32_t sample) {
    static const reply_array MASKS[] = {REPLY_ARRAY_LENGTHS, REPLY_ARRAY_TOKEN_IDS,
                                        REPLY_ARRAY_LOGPROBS};
    static const reply_array BOUNDED[] = {REPLY_ARRAY_TRUNCATED_WIDE, REPLY_ARRAY_SUPPORT_SIZES};
    const proto_generation *asked = &api_request_of(call, sample)->generation;
    const reply_range all = api_sample_range(&call->samples[sample]);
    reply_writer *writer = &call->writer;
    if (sample > 0) rest(call, sample - 1);
    api_start_writer(call, sample, &all);
    reply_writer_add_array(writer, REPLY_ARRAY, REPLY_ARRAY_OUTPUT_IDS);
    for (size_t i = 0; asked->mask_mode != ROW_MASK_OFF && i < BT_ARRAY_COUNT(MASKS); i++) {
        reply_writer_add_array(writer, REPLY_ARRAY, MASKS[i]);
    }
    for (size_t i = 0; asked->mask_bounded != 0 && i < BT_ARRAY_COUNT(BOUNDED); i++) {
        reply_writer_add_array(writer, REPLY_ARRAY, BOUNDED[i]);
    }
}

/* ---- parts ----------------------------------------------------------------------------------- */

bool api_whole_next(api_call *call) {
    const uint64_t count = call->sample_count;
    uint64_t part = call->whole.part++;
    if (is_tensors(call)) {
        if (part < count + 2) {
            start_head(call, (uint32_t)part);
            return true;
        }
        part -= count + 2;
        if (part < count) {
            start_arrays(call, (uint32_t)part);
            return true;
        }
        part -= count;
    }
    if (part > 0 && part <= count) drop_written(call, (uint32_t)part - 1);
    if (part >= count) return false;
    start_json(call, (uint32_t)part);
    return true;
}
