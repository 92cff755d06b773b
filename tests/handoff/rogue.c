/* Fixture of the tests with handmade messages. */
#include "rogue.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/crc32c.h"

static uint64_t read_clock(void *context) {
    return ((const rogue *)context)->now_us;
}

static xfer_decision on_message(void *context, xfer_peer from, const void *header,
                                size_t header_bytes, size_t payload_bytes, xfer_receive *receive) {
    static xfer_iov iov;
    rogue *r = context;
    assert_true(from.incarnation == r->honest_peer.incarnation);
    assert_int_equal(handoff_header_decode(header, header_bytes, &r->heard), BT_OK);
    r->heard_count++;
    if (r->heard.kind == HANDOFF_ACK) r->acks++;
    if (!r->accepts || payload_bytes == 0) return XFER_DROP;
    iov = (xfer_iov){.base = r->sink, .bytes = payload_bytes};
    *receive = (xfer_receive){.iov = &iov, .iov_count = 1};
    return XFER_ACCEPT;
}

static void on_done(void *context, uint64_t token, bt_status status) {
    (void)context;
    (void)token;
    (void)status;
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    (void)context;
    (void)peer;
    (void)status;
}

static void on_peer_closed(void *context, xfer_peer peer) {
    (void)context;
    (void)peer;
}

rogue *rogue_create(bool is_honest_prefill) {
    rogue *r = calloc(1, sizeof *r);
    const xfer_loop_options network = {.is_stepped = true};
    xfer *honest = NULL;
    const uint8_t *address = NULL;
    size_t bytes = 0;
    assert_non_null(r);
    r->now_us = 1;
    assert_int_equal(xfer_loop_network_create(&network, &r->network), BT_OK);
    assert_int_equal(xfer_loop_create(r->network, 1, &honest), BT_OK);
    assert_int_equal(xfer_loop_create(r->network, 2, &r->mover), BT_OK);
    honest->self = r->honest_peer = (xfer_peer){.worker_id = 1, .incarnation = 100};
    r->mover->self = r->self = (xfer_peer){.worker_id = 2, .incarnation = 200};
    r->mover->handler = (xfer_handler){.on_message = on_message,
                                       .on_received = on_done,
                                       .on_sent = on_done,
                                       .on_peer_failed = on_peer_failed,
                                       .on_peer_closed = on_peer_closed,
                                       .context = r};
    const end_options options = {
        .mover = honest,
        .incarnation = honest->self.incarnation,
        .page_count = 64,
        .page_bytes = ROGUE_PAGE_BYTES,
        .layers = ROGUE_LAYERS,
        .page_tokens = ROGUE_PAGE_TOKENS,
        .cap = ROGUE_CAP,
        .rows = 8,
        .checksum = RECORD_CHECKSUM_FULL,
        .chunk_bytes_max = ROGUE_CHUNK_PAGES * ROGUE_PAGE_BYTES,
        .clock = {.now_us = read_clock, .context = r},
    };
    r->honest = is_honest_prefill ? end_create_prefill(&options) : end_create_decode(&options);
    assert_int_equal(honest->ops->get_address(honest, &address, &bytes), BT_OK);
    assert_int_equal(r->mover->ops->connect(r->mover, r->honest_peer, address, bytes), BT_OK);
    assert_int_equal(r->mover->ops->get_address(r->mover, &address, &bytes), BT_OK);
    assert_int_equal(end_connect(r->honest, r->self, address, bytes), BT_OK);
    const handoff_header hello = {.kind = HANDOFF_HELLO, .has_heard = true};
    rogue_send(r, &hello, 0);
    assert_int_equal(end_find_peer(r->honest, r->self)->hellos, 1);
    return r;
}

void rogue_destroy(rogue *r) {
    end_assert_clean(r->honest);
    end_destroy(r->honest);
    r->mover->ops->destroy(r->mover);
    xfer_loop_network_destroy(r->network);
    free(r);
}

void rogue_run(rogue *r) {
    end_loop(r->honest);
    while (xfer_loop_run(r->network, 1) > 0)
        end_loop(r->honest);
}

void rogue_send_raw(rogue *r, const void *header, size_t header_bytes, size_t payload_bytes) {
    const xfer_iov iov = {.base = r->payload, .bytes = payload_bytes};
    assert_int_equal(r->mover->ops->send(r->mover, r->honest_peer, header, header_bytes, &iov,
                                         payload_bytes == 0 ? 0 : 1, 0),
                     BT_OK);
    rogue_run(r);
}

void rogue_send(rogue *r, const handoff_header *header, size_t payload_bytes) {
    uint8_t bytes[HANDOFF_HEADER_BYTES];
    handoff_header_encode(header, bytes);
    rogue_send_raw(r, bytes, sizeof bytes, payload_bytes);
}

handoff_header rogue_make_chunk(rogue *r, const sample *s, uint32_t index, uint32_t first,
                                uint32_t count) {
    const end_attempt *a = end_find(r->honest, s->number);
    for (uint32_t i = 0; i < count; i++)
        sample_fill_page(s, first + i, r->payload + i * ROGUE_PAGE_BYTES, ROGUE_PAGE_BYTES);
    const size_t bytes = (size_t)count * ROGUE_PAGE_BYTES;
    return (handoff_header){
        .kind = HANDOFF_CHUNK,
        .attempt = a->id,
        .slot = a->slots[0],
        .payload_bytes = bytes,
        .chunk_index = index,
        .span = {.first_page = first, .page_count = count, .layer_count = ROGUE_LAYERS},
        .payload_crc = bt_crc32c(0, r->payload, bytes),
    };
}

handoff_header rogue_make_row(rogue *r, const sample *s, const uint32_t *checksums,
                              rogue_row_change change, size_t *bytes_out) {
    static sample_row storage;
    const end_attempt *a = end_find(r->honest, s->number);
    const uint32_t pages = (s->prompt_tokens + ROGUE_PAGE_TOKENS - 1) / ROGUE_PAGE_TOKENS;
    sample_make_row(s, &storage);
    metadata_row row = storage.row;
    row.attempt = a->id;
    row.slot = a->slots[0].index;
    row.slot_generation = a->slots[0].generation;
    row.writer_incarnation = r->self.incarnation;
    row.chunk_count = 2;
    row.page_count = pages;
    row.kv_bytes = (uint64_t)pages * ROGUE_PAGE_BYTES;
    row.prompt_tokens = s->prompt_tokens;
    if (change != NULL) change(&row);
    assert_int_equal(row_encode(&row, checksums, r->payload, sizeof r->payload, bytes_out), BT_OK);
    return (handoff_header){
        .kind = HANDOFF_ROW, .attempt = a->id, .slot = a->slots[0], .payload_bytes = *bytes_out};
}
