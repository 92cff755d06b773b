/* Header codec, cutting of pages into chunks, chunk checksums. */
#include "pd_buffers/handoff_wire.h"

#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "base/little_endian.h"
#include "pd_buffers/handoff.h"

_Static_assert((int)HANDOFF_HEADER_BYTES <= (int)XFER_HEADER_BYTES_MAX, "a header fits a message");

enum {
    AT_VERSION = 4,
    AT_KIND = 6,
    AT_CRC = 8,
    AT_FLAGS = 12,
    AT_INCARNATION = 16,
    AT_COUNTER = 24,
    AT_SLOT = 32,
    AT_GENERATION = 36,
    AT_PAYLOAD_BYTES = 40,
    AT_CHUNK_INDEX = 48,
    AT_FIRST_PAGE = 52,
    AT_PAGE_COUNT = 56,
    AT_FIRST_LAYER = 60,
    AT_LAYER_COUNT = 64,
    AT_PAYLOAD_CRC = 68,
    AT_STATUS = 72,
    AT_RESERVED = 76,
    FLAG_HAS_HEARD = 1,
};

static const char magic[4] = {'B', 'H', 'N', 'D'};

static uint32_t header_checksum(const uint8_t *header) {
    static const uint8_t zero[4];
    uint32_t crc = bt_crc32c(0, header, AT_CRC);
    crc = bt_crc32c(crc, zero, sizeof zero);
    return bt_crc32c(crc, header + AT_CRC + 4, HANDOFF_HEADER_BYTES - AT_CRC - 4);
}

void handoff_header_encode(const handoff_header *header, uint8_t *out) {
    memset(out, 0, HANDOFF_HEADER_BYTES);
    memcpy(out, magic, sizeof magic);
    bt_store_le16(out + AT_VERSION, HANDOFF_WIRE_VERSION);
    bt_store_le16(out + AT_KIND, (uint16_t)header->kind);
    bt_store_le32(out + AT_FLAGS, header->has_heard ? FLAG_HAS_HEARD : 0);
    bt_store_le64(out + AT_INCARNATION, header->attempt.router_incarnation);
    bt_store_le64(out + AT_COUNTER, header->attempt.counter);
    bt_store_le32(out + AT_SLOT, header->slot.index);
    bt_store_le32(out + AT_GENERATION, header->slot.generation);
    bt_store_le64(out + AT_PAYLOAD_BYTES, header->payload_bytes);
    bt_store_le32(out + AT_CHUNK_INDEX, header->chunk_index);
    bt_store_le32(out + AT_FIRST_PAGE, header->span.first_page);
    bt_store_le32(out + AT_PAGE_COUNT, header->span.page_count);
    bt_store_le32(out + AT_FIRST_LAYER, header->span.first_layer);
    bt_store_le32(out + AT_LAYER_COUNT, header->span.layer_count);
    bt_store_le32(out + AT_PAYLOAD_CRC, header->payload_crc);
    bt_store_le32(out + AT_STATUS, (uint32_t)header->status);
    bt_store_le32(out + AT_CRC, header_checksum(out));
}

static bool is_known_kind(uint16_t kind) {
    return kind >= HANDOFF_HELLO && kind <= HANDOFF_ACK;
}

bt_status handoff_header_decode(const void *bytes, size_t count, handoff_header *out) {
    const uint8_t *in = bytes;
    if (count != HANDOFF_HEADER_BYTES) return BT_ERR_PEER_PROTOCOL;
    if (memcmp(in, magic, sizeof magic) != 0) return BT_ERR_PEER_PROTOCOL;
    if (bt_load_le16(in + AT_VERSION) != HANDOFF_WIRE_VERSION) return BT_ERR_PEER_PROTOCOL;
    if (bt_load_le32(in + AT_CRC) != header_checksum(in)) return BT_ERR_PEER_PROTOCOL;
    const uint16_t kind = bt_load_le16(in + AT_KIND);
    const uint32_t flags = bt_load_le32(in + AT_FLAGS);
    if (!is_known_kind(kind)) return BT_ERR_PEER_PROTOCOL;
    if ((flags & ~(uint32_t)FLAG_HAS_HEARD) != 0) return BT_ERR_PEER_PROTOCOL;
    for (size_t i = AT_RESERVED; i < HANDOFF_HEADER_BYTES; i++)
        if (in[i] != 0) return BT_ERR_PEER_PROTOCOL;
    *out = (handoff_header){
        .kind = (handoff_kind)kind,
        .has_heard = (flags & FLAG_HAS_HEARD) != 0,
        .attempt = {.router_incarnation = bt_load_le64(in + AT_INCARNATION),
                    .counter = bt_load_le64(in + AT_COUNTER)},
        .slot = {.index = bt_load_le32(in + AT_SLOT),
                 .generation = bt_load_le32(in + AT_GENERATION)},
        .payload_bytes = bt_load_le64(in + AT_PAYLOAD_BYTES),
        .chunk_index = bt_load_le32(in + AT_CHUNK_INDEX),
        .span = {.first_page = bt_load_le32(in + AT_FIRST_PAGE),
                 .page_count = bt_load_le32(in + AT_PAGE_COUNT),
                 .first_layer = bt_load_le32(in + AT_FIRST_LAYER),
                 .layer_count = bt_load_le32(in + AT_LAYER_COUNT)},
        .payload_crc = bt_load_le32(in + AT_PAYLOAD_CRC),
        .status = (bt_status)(int32_t)bt_load_le32(in + AT_STATUS),
    };
    return BT_OK;
}

static uint32_t min_u32(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

bt_status handoff_geometry_init(kv_pool *pool, uint32_t page_tokens, size_t chunk_bytes_max,
                                handoff_geometry *out) {
    const kv_pool_options *options = kv_pool_get_options(pool);
    const size_t chunk_bytes = chunk_bytes_max == 0 ? HANDOFF_CHUNK_BYTES_MAX : chunk_bytes_max;
    const size_t layer_bytes = options->page_bytes / options->layers;
    if (page_tokens == 0) return BT_ERR_CALLER_ARGUMENT;
    if (chunk_bytes > HANDOFF_CHUNK_BYTES_MAX || layer_bytes > chunk_bytes)
        return BT_ERR_CALLER_ARGUMENT;
    const bool is_cut = options->page_bytes > chunk_bytes;
    const size_t pages = is_cut ? 1 : chunk_bytes / options->page_bytes;
    *out = (handoff_geometry){
        .pool = pool,
        .page_tokens = page_tokens,
        .layers = options->layers,
        .page_bytes = options->page_bytes,
        .layer_bytes = layer_bytes,
        .chunk_pages = pages > XFER_IOV_MAX ? XFER_IOV_MAX : (uint32_t)pages,
        .chunk_layers = is_cut ? (uint32_t)(chunk_bytes / layer_bytes) : options->layers,
        .units_per_page = is_cut ? options->layers : 1,
    };
    return BT_OK;
}

uint32_t handoff_pages_for(const handoff_geometry *geometry, uint32_t prompt_tokens) {
    return prompt_tokens / geometry->page_tokens + (prompt_tokens % geometry->page_tokens != 0);
}

handoff_span handoff_next_span(const handoff_geometry *geometry, uint32_t page, uint32_t layer,
                               uint32_t pages_end) {
    BT_ASSERT(page < pages_end);
    BT_ASSERT(layer < geometry->layers);
    return (handoff_span){
        .first_page = page,
        .page_count = min_u32(geometry->chunk_pages, pages_end - page),
        .first_layer = layer,
        .layer_count = min_u32(geometry->chunk_layers, geometry->layers - layer),
    };
}

bool handoff_span_is_valid(const handoff_geometry *geometry, const handoff_span *span,
                           uint32_t page_count) {
    if (span->page_count == 0 || span->page_count > geometry->chunk_pages) return false;
    if (span->first_page >= page_count || span->page_count > page_count - span->first_page)
        return false;
    if (geometry->units_per_page == 1)
        return span->first_layer == 0 && span->layer_count == geometry->layers;
    if (span->layer_count == 0 || span->layer_count > geometry->chunk_layers) return false;
    return span->first_layer < geometry->layers &&
           span->layer_count <= geometry->layers - span->first_layer;
}

size_t handoff_span_bytes(const handoff_geometry *geometry, const handoff_span *span) {
    return (size_t)span->page_count * span->layer_count * geometry->layer_bytes;
}

uint32_t handoff_span_units(const handoff_geometry *geometry, const handoff_span *span,
                            uint32_t *first_out) {
    if (geometry->units_per_page == 1) {
        *first_out = span->first_page;
        return span->page_count;
    }
    *first_out = span->first_page * geometry->layers + span->first_layer;
    return span->layer_count;
}

uint32_t handoff_span_iov(const handoff_geometry *geometry, const handoff_span *span,
                          const uint32_t *pages, xfer_iov *iov) {
    const size_t bytes = span->layer_count * geometry->layer_bytes;
    const size_t offset = span->first_layer * geometry->layer_bytes;
    uint32_t used = 0;
    for (uint32_t i = 0; i < span->page_count; i++) {
        uint8_t *base = kv_pool_page(geometry->pool, pages[span->first_page + i]);
        if (used > 0 && (uint8_t *)iov[used - 1].base + iov[used - 1].bytes == base + offset) {
            iov[used - 1].bytes += bytes;
            continue;
        }
        BT_ASSERT(used < XFER_IOV_MAX);
        iov[used++] = (xfer_iov){.base = base + offset, .bytes = bytes};
    }
    return used;
}

/* Which line of a layer is looked at in sampled mode: spread over attempts, pages and layers. */
static size_t sample_offset(const handoff_geometry *geometry, proto_attempt attempt, uint32_t page,
                            uint32_t layer) {
    uint64_t hash = attempt.counter + attempt.router_incarnation;
    hash = (hash ^ ((uint64_t)page << 32 | layer)) * UINT64_C(0x9E3779B97F4A7C15);
    hash ^= hash >> 29;
    hash *= UINT64_C(0xBF58476D1CE4E5B9);
    const size_t lines = geometry->layer_bytes / HANDOFF_SAMPLE_BYTES;
    return lines == 0 ? 0 : (size_t)((hash >> 32) % lines) * HANDOFF_SAMPLE_BYTES;
}

static uint32_t sample_page(const handoff_geometry *geometry, const handoff_span *span,
                            const uint8_t *base, uint32_t page, proto_attempt attempt,
                            uint32_t crc) {
    const size_t bytes =
        geometry->layer_bytes < HANDOFF_SAMPLE_BYTES ? geometry->layer_bytes : HANDOFF_SAMPLE_BYTES;
    for (uint32_t i = 0; i < span->layer_count; i++) {
        const uint32_t layer = span->first_layer + i;
        const size_t offset = sample_offset(geometry, attempt, page, layer);
        crc = bt_crc32c(crc, base + layer * geometry->layer_bytes + offset, bytes);
    }
    return crc;
}

uint32_t handoff_span_checksum(const handoff_geometry *geometry, const handoff_span *span,
                               const uint32_t *pages, record_checksum mode, proto_attempt attempt) {
    const size_t bytes = span->layer_count * geometry->layer_bytes;
    const size_t offset = span->first_layer * geometry->layer_bytes;
    uint32_t crc = 0;
    for (uint32_t i = 0; i < span->page_count; i++) {
        const uint32_t page = span->first_page + i;
        const uint8_t *base = kv_pool_page(geometry->pool, pages[page]);
        switch (mode) {
        case RECORD_CHECKSUM_OFF: return 0;
        case RECORD_CHECKSUM_SAMPLED:
            crc = sample_page(geometry, span, base, page, attempt, crc);
            break;
        case RECORD_CHECKSUM_FULL: crc = bt_crc32c(crc, base + offset, bytes); break;
        }
    }
    return crc;
}
