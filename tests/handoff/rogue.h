/* A peer that says what the test tells it to, right or wrong: a bare mover opposite a real end. */
#ifndef BT_TESTS_HANDOFF_ROGUE_H
#define BT_TESTS_HANDOFF_ROGUE_H

#include "ends.h"
#include "pd_buffers/handoff_wire.h"
#include "pd_buffers/xfer_loop.h"

enum {
    ROGUE_PAGE_TOKENS = 4,
    ROGUE_LAYERS = 4,
    ROGUE_PAGE_BYTES = 1024,
    ROGUE_CHUNK_PAGES = 4,
    ROGUE_CAP = 16,
    ROGUE_PAYLOAD_MAX = 16 * ROGUE_PAGE_BYTES,
};

typedef struct rogue {
    xfer_loop_network *network;
    end *honest; /* a decode or a prefill end */
    xfer *mover; /* the rogue's */
    xfer_peer honest_peer, self;
    uint64_t now_us;
    /* The last header that the honest end sent, and how many. */
    handoff_header heard;
    uint32_t heard_count, acks;
    bool accepts; /* receive payloads (into nothing that is looked at) */
    uint8_t sink[ROGUE_PAYLOAD_MAX];
    _Alignas(8) uint8_t payload[ROGUE_PAYLOAD_MAX];
} rogue;

/* Connected both ways, hellos exchanged. */
rogue *rogue_create(bool is_honest_prefill);
void rogue_destroy(rogue *r);
/* Runs everything that can happen. */
void rogue_run(rogue *r);
/* Sends a header as it is, with payload_bytes of r->payload, and runs. */
void rogue_send_raw(rogue *r, const void *header, size_t header_bytes, size_t payload_bytes);
void rogue_send(rogue *r, const handoff_header *header, size_t payload_bytes);
/* A rogue prefill of attempt s->number, which the honest end expects: a right chunk header of pages
 * [first, first + count), with its bytes in r->payload. */
handoff_header rogue_make_chunk(rogue *r, const sample *s, uint32_t index, uint32_t first,
                                uint32_t count);
/* A right row of sample 0 behind two chunks, but for what `change` (NULL: nothing) does to it
 * before it is encoded, as r->payload. */
typedef void (*rogue_row_change)(metadata_row *row);
handoff_header rogue_make_row(rogue *r, const sample *s, const uint32_t *checksums,
                              rogue_row_change change, size_t *bytes_out);

#endif
