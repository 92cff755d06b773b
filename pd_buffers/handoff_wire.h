/* What both ends of a handoff share: the message header, how pages are cut into chunks, and the
 * checksum of a chunk. Pure.
 *
 * Header, little-endian, HANDOFF_HEADER_BYTES, version 1:
 *
 *   offset bytes field                        offset bytes field
 *        0     4 magic "BHND"                     52     4 first logical page
 *        4     2 version                          56     4 page count
 *        6     2 kind                             60     4 first layer
 *        8     4 CRC32C of the header, its        64     4 layer count
 *                own field zero                   68     4 CRC32C of the payload (chunk)
 *       12     4 flags (hello: bit 0)             72     4 status (ack)
 *       16    16 attempt                          76    20 reserved, zero
 *       32     4 slot
 *       36     4 slot generation
 *       40     8 payload bytes
 *       48     4 chunk index
 *
 * A *span* is a rectangle of pages and layers: whole pages, or some layers of one page. A *unit* is
 * the smallest piece: a page, or a layer of a page where pages are larger than a chunk. */
#ifndef BT_PD_BUFFERS_HANDOFF_WIRE_H
#define BT_PD_BUFFERS_HANDOFF_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/row_pool.h"
#include "pd_buffers/xfer.h"
#include "proto/message.h"
#include "proto/record.h"

enum {
    HANDOFF_HEADER_BYTES = 96,
    HANDOFF_WIRE_VERSION = 1,
    HANDOFF_SAMPLE_BYTES = 64,
};

/* The mover's token of a message whose end nobody waits for (hellos, acks). */
#define HANDOFF_TOKEN_NONE UINT64_MAX

typedef enum handoff_kind {
    HANDOFF_HELLO = 1,
    HANDOFF_CHUNK = 2,
    HANDOFF_ROW = 3,
    HANDOFF_ACK = 4,
} handoff_kind;

typedef struct handoff_span {
    uint32_t first_page, page_count;
    uint32_t first_layer, layer_count;
} handoff_span;

typedef struct handoff_header {
    handoff_kind kind;
    bool has_heard; /* hello: the sender has had a hello of the receiver */
    proto_attempt attempt;
    row_slot slot;
    uint64_t payload_bytes;
    uint32_t chunk_index;
    handoff_span span;
    uint32_t payload_crc;
    bt_status status; /* ack */
} handoff_header;

void handoff_header_encode(const handoff_header *header, uint8_t *out);
/* PEER_PROTOCOL unless it is exactly one well-formed header. Fields are not judged further. */
BT_MUST_CHECK bt_status handoff_header_decode(const void *bytes, size_t count, handoff_header *out);

/* How pages of one pool travel; the same on both sides. */
typedef struct handoff_geometry {
    kv_pool *pool;
    uint32_t page_tokens;
    uint32_t layers;
    size_t page_bytes, layer_bytes;
    uint32_t chunk_pages;    /* pages of a chunk at most; 1 where pages are cut */
    uint32_t chunk_layers;   /* layers of a chunk: all, fewer where pages are cut */
    uint32_t units_per_page; /* 1, or `layers` where pages are cut */
} handoff_geometry;

/* CALLER_ARGUMENT when one layer of a page does not fit a chunk or chunk_bytes_max is above the
 * maximum. 0 = the maximum. */
BT_MUST_CHECK bt_status handoff_geometry_init(kv_pool *pool, uint32_t page_tokens,
                                              size_t chunk_bytes_max, handoff_geometry *out);
uint32_t handoff_pages_for(const handoff_geometry *geometry, uint32_t prompt_tokens);
/* The next span at (page, layer) when pages up to pages_end are there; page < pages_end. */
handoff_span handoff_next_span(const handoff_geometry *geometry, uint32_t page, uint32_t layer,
                               uint32_t pages_end);
/* A span that a peer claims: inside page_count pages, cut as the geometry cuts, within a chunk. */
bool handoff_span_is_valid(const handoff_geometry *geometry, const handoff_span *span,
                           uint32_t page_count);
size_t handoff_span_bytes(const handoff_geometry *geometry, const handoff_span *span);
/* The units of a span: [*first_out, *first_out + count); returns count. */
uint32_t handoff_span_units(const handoff_geometry *geometry, const handoff_span *span,
                            uint32_t *first_out);
/* Memory of a span in logical order; neighbours in the pool are joined. pages [logical page] are
 * page ids. iov [XFER_IOV_MAX]; returns the parts used. */
uint32_t handoff_span_iov(const handoff_geometry *geometry, const handoff_span *span,
                          const uint32_t *pages, xfer_iov *iov);
/* The checksum of a span as it lies in the pool now. */
uint32_t handoff_span_checksum(const handoff_geometry *geometry, const handoff_span *span,
                               const uint32_t *pages, record_checksum mode, proto_attempt attempt);

#endif
