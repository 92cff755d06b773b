/* Encoder, reader and proof of the metadata row. The layout is in row.h; every offset below is from
 * there. Floats travel as bits. */
#include "proto/row.h"

#include <stdbool.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "base/fault.h"
#include "base/little_endian.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "arrays travel as they lie in memory");

enum {
    SECTION_HEADER_BYTES = 8,
    SECTION_ALIGNMENT = 8,
    AT_VERSION = 4,
    AT_HEADER_BYTES = 6,
    AT_TOTAL_BYTES = 8,
    AT_CRC = 12,
    AT_INCARNATION = 16,
    AT_COUNTER = 24,
    AT_SAMPLE = 32,
    AT_SLOT = 36,
    AT_GENERATION = 40,
    AT_FIRST_TOKEN = 44,
    AT_WRITER = 48,
    AT_STATUS = 56,
    AT_SUPPORT = 60,
    AT_CAP_NEEDED = 64,
    AT_CACHED = 68,
    AT_CHUNKS = 72,
    AT_PAGES = 76,
    AT_KV_BYTES = 80,
    AT_PROMPT = 88,
    AT_MASK_MODE = 92,
    AT_WEIGHTS = 96,
    AT_RESERVED = 104,
};

static const char magic[4] = {'B', 'R', 'O', 'W'};

static size_t section_bytes(uint64_t data_bytes) {
    const uint64_t padded = (data_bytes + SECTION_ALIGNMENT - 1) / SECTION_ALIGNMENT;
    return (size_t)(SECTION_HEADER_BYTES + padded * SECTION_ALIGNMENT);
}

/* Header and sections of a row of that shape. */
static size_t total_bytes(row_widths w, bool has_first_logprob) {
    size_t total = ROW_HEADER_BYTES;
    if (w.mask_mode != ROW_MASK_OFF) {
        total += section_bytes(UINT64_C(4) * w.support_count);
        total += section_bytes(sizeof(float));
    }
    if (w.mask_mode == ROW_MASK_SUPPORT) total += section_bytes(UINT64_C(4) * w.support_count);
    if (has_first_logprob) total += section_bytes(sizeof(float));
    if (w.top_count > 0) total += section_bytes(sizeof(row_top) * (uint64_t)w.top_count);
    if (w.id_logprob_count > 0) total += section_bytes(UINT64_C(4) * w.id_logprob_count);
    return total;
}

size_t row_slot_bytes(uint32_t cap) {
    const row_widths widest = {.mask_mode = ROW_MASK_SUPPORT,
                               .support_count = cap,
                               .top_count = PROTO_TOP_LOGPROBS_MAX,
                               .id_logprob_count = PROTO_LOGPROB_IDS_MAX};
    const size_t bytes = total_bytes(widest, true);
    return (bytes + ROW_SLOT_ALIGNMENT - 1) / ROW_SLOT_ALIGNMENT * ROW_SLOT_ALIGNMENT;
}

static uint8_t *put_section(uint8_t *at, row_section kind, const void *data, size_t bytes) {
    const size_t whole = section_bytes(bytes);
    bt_store_le16(at, (uint16_t)kind);
    bt_store_le16(at + 2, 0);
    bt_store_le32(at + 4, (uint32_t)bytes);
    if (bytes > 0) memmove(at + SECTION_HEADER_BYTES, data, bytes);
    memset(at + SECTION_HEADER_BYTES + bytes, 0, whole - SECTION_HEADER_BYTES - bytes);
    return at + whole;
}

static void put_header(uint8_t *header, const metadata_row *row, size_t total) {
    memset(header, 0, ROW_HEADER_BYTES);
    memcpy(header, magic, sizeof magic);
    bt_store_le16(header + AT_VERSION, ROW_FORMAT_VERSION);
    bt_store_le16(header + AT_HEADER_BYTES, ROW_HEADER_BYTES);
    bt_store_le32(header + AT_TOTAL_BYTES, (uint32_t)total);
    bt_store_le64(header + AT_INCARNATION, row->attempt.router_incarnation);
    bt_store_le64(header + AT_COUNTER, row->attempt.counter);
    bt_store_le32(header + AT_SAMPLE, row->sample_index);
    bt_store_le32(header + AT_SLOT, row->slot);
    bt_store_le32(header + AT_GENERATION, row->slot_generation);
    bt_store_le32(header + AT_FIRST_TOKEN, (uint32_t)row->first_token);
    bt_store_le64(header + AT_WRITER, row->writer_incarnation);
    bt_store_le32(header + AT_STATUS, row->status);
    bt_store_le32(header + AT_SUPPORT, row->support_count);
    bt_store_le32(header + AT_CAP_NEEDED, row->cap_needed);
    bt_store_le32(header + AT_CACHED, row->cached_tokens);
    bt_store_le32(header + AT_PAGES, row->page_count);
    bt_store_le64(header + AT_KV_BYTES, row->kv_bytes);
    bt_store_le32(header + AT_PROMPT, row->prompt_tokens);
    bt_store_le32(header + AT_MASK_MODE, row->mask_mode);
    bt_store_le64(header + AT_WEIGHTS, row->weights_version);
}

static row_widths widths_of(const metadata_row *row) {
    return (row_widths){.mask_mode = row->mask_mode,
                        .support_count = row->support_count,
                        .top_count = row->top_count,
                        .id_logprob_count = row->id_logprob_count};
}

static bool is_consistent(const metadata_row *row) {
    if (row->top_count > PROTO_TOP_LOGPROBS_MAX || (row->top_count > 0 && row->top == NULL))
        return false;
    if (row->id_logprob_count > PROTO_LOGPROB_IDS_MAX ||
        (row->id_logprob_count > 0 && row->id_logprobs == NULL))
        return false;
    switch ((row_mask_mode)row->mask_mode) {
    case ROW_MASK_OFF: return row->support_count == 0;
    case ROW_MASK_SELECTED: return row->support_count == 0 || row->support_ids != NULL;
    case ROW_MASK_SUPPORT:
        return row->support_count == 0 ||
               (row->support_ids != NULL && row->support_logprobs != NULL);
    }
    return false;
}

bt_status row_encode(const metadata_row *row, const uint32_t *chunk_checksums, void *slot,
                     size_t slot_bytes, size_t *total_out) {
    if (!is_consistent(row)) return BT_ERR_CALLER_ARGUMENT;
    const bool has_first = row->has_first_logprob != 0;
    const size_t total = total_bytes(widths_of(row), has_first);
    if (total > slot_bytes || total > UINT32_MAX) return BT_ERR_CALLER_LIMIT;
    const metadata_row copy = *row; /* its arrays may lie in the slot, its scalars do not */
    const size_t array_bytes = sizeof(float) * copy.support_count;
    uint8_t *at = (uint8_t *)slot + ROW_HEADER_BYTES;
    if (copy.mask_mode != ROW_MASK_OFF)
        at = put_section(at, ROW_SECTION_SUPPORT_IDS, copy.support_ids, array_bytes);
    if (copy.mask_mode == ROW_MASK_SUPPORT) {
        uint8_t *values = at + SECTION_HEADER_BYTES;
        at = put_section(at, ROW_SECTION_SUPPORT_LOGPROBS, copy.support_logprobs, array_bytes);
        if (bt_mutant(BT_MUTANT_FIRST_LOGPROB_ONLY) && array_bytes > sizeof(float))
            memset(values + sizeof(float), 0, array_bytes - sizeof(float));
    }
    if (copy.mask_mode != ROW_MASK_OFF)
        at = put_section(at, ROW_SECTION_SELECTED_LOGPROB, &copy.selected_logprob, sizeof(float));
    if (has_first)
        at = put_section(at, ROW_SECTION_FIRST_LOGPROB, &copy.first_logprob, sizeof(float));
    if (copy.top_count > 0)
        at = put_section(at, ROW_SECTION_TOP_LOGPROBS, copy.top, sizeof(row_top) * copy.top_count);
    if (copy.id_logprob_count > 0)
        at = put_section(at, ROW_SECTION_ID_LOGPROBS, copy.id_logprobs,
                         sizeof(float) * copy.id_logprob_count);
    BT_ASSERT(at == (uint8_t *)slot + total);
    put_header(slot, &copy, total);
    row_seal(slot, chunk_checksums, copy.chunk_count);
    *total_out = total;
    return BT_OK;
}

/* CRC over the header with its own field zero, the chunk checksums, the sections. */
static uint32_t row_checksum(const uint8_t *slot, size_t total, const uint32_t *chunk_checksums,
                             uint32_t chunk_count) {
    static const uint8_t zero[4];
    uint32_t crc = bt_crc32c(0, slot, AT_CRC);
    crc = bt_crc32c(crc, zero, sizeof zero);
    crc = bt_crc32c(crc, slot + AT_CRC + 4, ROW_HEADER_BYTES - AT_CRC - 4);
    if (chunk_count > 0) crc = bt_crc32c(crc, chunk_checksums, sizeof(uint32_t) * chunk_count);
    return bt_crc32c(crc, slot + ROW_HEADER_BYTES, total - ROW_HEADER_BYTES);
}

void row_seal(void *slot, const uint32_t *chunk_checksums, uint32_t chunk_count) {
    uint8_t *header = slot;
    const uint32_t total = bt_load_le32(header + AT_TOTAL_BYTES);
    BT_ASSERT(memcmp(header, magic, sizeof magic) == 0);
    bt_store_le32(header + AT_CHUNKS, chunk_count);
    bt_store_le32(header + AT_CRC, row_checksum(header, total, chunk_checksums, chunk_count));
}

static void get_header(const uint8_t *header, metadata_row *row) {
    *row = (metadata_row){
        .attempt = {.router_incarnation = bt_load_le64(header + AT_INCARNATION),
                    .counter = bt_load_le64(header + AT_COUNTER)},
        .sample_index = bt_load_le32(header + AT_SAMPLE),
        .slot = bt_load_le32(header + AT_SLOT),
        .slot_generation = bt_load_le32(header + AT_GENERATION),
        .writer_incarnation = bt_load_le64(header + AT_WRITER),
        .first_token = (int32_t)bt_load_le32(header + AT_FIRST_TOKEN),
        .status = bt_load_le32(header + AT_STATUS),
        .support_count = bt_load_le32(header + AT_SUPPORT),
        .cap_needed = bt_load_le32(header + AT_CAP_NEEDED),
        .cached_tokens = bt_load_le32(header + AT_CACHED),
        .chunk_count = bt_load_le32(header + AT_CHUNKS),
        .page_count = bt_load_le32(header + AT_PAGES),
        .kv_bytes = bt_load_le64(header + AT_KV_BYTES),
        .prompt_tokens = bt_load_le32(header + AT_PROMPT),
        .mask_mode = bt_load_le32(header + AT_MASK_MODE),
        .weights_version = bt_load_le64(header + AT_WEIGHTS),
    };
}

static bool is_zero(const uint8_t *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != 0) return false;
    return true;
}

/* The data of the section at *at, which must be of this kind and size; *at moves on. NULL: it is
 * not. */
static const void *take_section(const uint8_t **at, const uint8_t *end, row_section kind,
                                uint64_t data_bytes) {
    const uint8_t *section = *at;
    const uint64_t whole = section_bytes(data_bytes);
    if ((uint64_t)(end - section) < whole) return NULL;
    if (bt_load_le16(section) != (uint16_t)kind || bt_load_le16(section + 2) != 0) return NULL;
    if (bt_load_le32(section + 4) != data_bytes) return NULL;
    const uint8_t *padding = section + SECTION_HEADER_BYTES + data_bytes;
    if (!is_zero(padding, (size_t)(whole - SECTION_HEADER_BYTES - data_bytes))) return NULL;
    *at = section + whole;
    return section + SECTION_HEADER_BYTES;
}

static bool is_next(const uint8_t *at, const uint8_t *end, row_section kind) {
    return end - at >= SECTION_HEADER_BYTES && bt_load_le16(at) == (uint16_t)kind;
}

static const char fault_version[] = "another format version";
static const char fault_first[] = "first-token log-probability";
static const char fault_top[] = "top log-probabilities";
static const char fault_asked[] = "asked log-probabilities";

/* The three sections that a row may have or not; NULL, or what is wrong. */
static const char *get_logprob_sections(const uint8_t *at, const uint8_t *end, metadata_row *row) {
    if (is_next(at, end, ROW_SECTION_FIRST_LOGPROB)) {
        const void *data = take_section(&at, end, ROW_SECTION_FIRST_LOGPROB, sizeof(float));
        if (data == NULL) return fault_first;
        row->has_first_logprob = 1;
        row->first_logprob = bt_load_le_float(data);
    }
    if (is_next(at, end, ROW_SECTION_TOP_LOGPROBS)) {
        row->top_count = bt_load_le32(at + 4) / (uint32_t)sizeof(row_top);
        if (row->top_count < 1 || row->top_count > PROTO_TOP_LOGPROBS_MAX) return fault_top;
        row->top = take_section(&at, end, ROW_SECTION_TOP_LOGPROBS,
                                sizeof(row_top) * (uint64_t)row->top_count);
        if (row->top == NULL) return fault_top;
    }
    if (is_next(at, end, ROW_SECTION_ID_LOGPROBS)) {
        row->id_logprob_count = bt_load_le32(at + 4) / (uint32_t)sizeof(float);
        if (row->id_logprob_count < 1 || row->id_logprob_count > PROTO_LOGPROB_IDS_MAX)
            return fault_asked;
        row->id_logprobs =
            take_section(&at, end, ROW_SECTION_ID_LOGPROBS, UINT64_C(4) * row->id_logprob_count);
        if (row->id_logprobs == NULL) return fault_asked;
    }
    if (at == end) return NULL;
    return end - at >= SECTION_HEADER_BYTES ? "a section that is not known or out of place"
                                            : "bytes behind the last section";
}

static const char *get_sections(const uint8_t *at, const uint8_t *end, metadata_row *row) {
    const uint64_t array_bytes = UINT64_C(4) * row->support_count;
    if (row->mask_mode != ROW_MASK_OFF) {
        row->support_ids = take_section(&at, end, ROW_SECTION_SUPPORT_IDS, array_bytes);
        if (row->support_ids == NULL) return "support ids";
    }
    if (row->mask_mode == ROW_MASK_SUPPORT) {
        row->support_logprobs = take_section(&at, end, ROW_SECTION_SUPPORT_LOGPROBS, array_bytes);
        if (row->support_logprobs == NULL) return "support log-probabilities";
    }
    if (row->mask_mode != ROW_MASK_OFF) {
        const void *data = take_section(&at, end, ROW_SECTION_SELECTED_LOGPROB, sizeof(float));
        if (data == NULL) return "selected log-probability";
        row->selected_logprob = bt_load_le_float(data);
    }
    return get_logprob_sections(at, end, row);
}

static const char *read_row(const void *slot, size_t bytes, metadata_row *row) {
    const uint8_t *header = slot;
    if (bytes < ROW_HEADER_BYTES) return "too short for a header";
    if (memcmp(header, magic, sizeof magic) != 0) return "no metadata row";
    if (bt_load_le16(header + AT_VERSION) != ROW_FORMAT_VERSION) return fault_version;
    if (bt_load_le16(header + AT_HEADER_BYTES) != ROW_HEADER_BYTES) return "header bytes";
    if (bt_load_le32(header + AT_TOTAL_BYTES) != bytes) return "total bytes";
    if (!is_zero(header + AT_RESERVED, ROW_HEADER_BYTES - AT_RESERVED)) return "reserved bytes";
    get_header(header, row);
    if (row->mask_mode > ROW_MASK_SUPPORT) return "mask mode";
    if (row->mask_mode == ROW_MASK_OFF && row->support_count != 0) return "support without a mask";
    return get_sections(header + ROW_HEADER_BYTES, header + bytes, row);
}

bt_status row_decode(const void *slot, size_t bytes, metadata_row *row_out) {
    metadata_row row;
    const char *fault = read_row(slot, bytes, &row);
    if (fault == fault_version) return BT_ERR_PEER_PROTOCOL;
    if (fault != NULL) return BT_ERR_REQUEST_CORRUPT;
    *row_out = row;
    return BT_OK;
}

const char *row_fault(const void *slot, size_t bytes) {
    metadata_row row;
    return read_row(slot, bytes, &row);
}

bt_status row_prove(const void *slot, size_t bytes, const uint32_t *chunk_checksums,
                    uint32_t chunk_count) {
    const uint8_t *header = slot;
    if (bytes < ROW_HEADER_BYTES || bt_load_le32(header + AT_TOTAL_BYTES) != bytes)
        return BT_ERR_REQUEST_CORRUPT;
    if (bt_load_le32(header + AT_CHUNKS) != chunk_count) return BT_ERR_REQUEST_CORRUPT;
    const uint32_t crc = row_checksum(header, bytes, chunk_checksums, chunk_count);
    return crc == bt_load_le32(header + AT_CRC) ? BT_OK : BT_ERR_REQUEST_CORRUPT;
}
