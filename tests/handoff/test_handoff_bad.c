/* What a peer may do wrong, message by message: each is an error with a name on the right attempt
 * or peer, or a counted drop, and nothing is leaked. A rogue plays the other side. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/crc32c.h"
#include "base/little_endian.h"
#include "rogue.h"

enum { NUMBER = 21, PROMPT = 32, PAGES = 8, DEADLINE_US = 1000000 };

static const sample the_sample = {
    .number = NUMBER, .prompt_tokens = PROMPT, .mask_mode = ROW_MASK_SUPPORT, .support_count = 3};

/* ---- a rogue prefill ------------------------------------------------------------------------- */

static end_attempt *expect(rogue *r) {
    assert_int_equal(end_expect(r->honest, &the_sample, r->self, r->now_us + DEADLINE_US), BT_OK);
    return end_find(r->honest, NUMBER);
}

static handoff_header make_chunk(rogue *r, uint32_t index, uint32_t first, uint32_t count) {
    return rogue_make_chunk(r, &the_sample, index, first, count);
}

static void send_good_chunk(rogue *r, uint32_t index, uint32_t first, uint32_t count,
                            uint32_t *checksum) {
    const handoff_header header = make_chunk(r, index, first, count);
    *checksum = header.payload_crc;
    rogue_send(r, &header, header.payload_bytes);
}

static handoff_header make_row(rogue *r, const uint32_t *checksums, rogue_row_change change,
                               size_t *bytes_out) {
    return rogue_make_row(r, &the_sample, checksums, change, bytes_out);
}

static void send_row(rogue *r, const uint32_t *checksums, rogue_row_change change) {
    size_t bytes = 0;
    const handoff_header header = make_row(r, checksums, change, &bytes);
    rogue_send(r, &header, bytes);
}

static void finish_well(rogue *r) {
    uint32_t checksums[2];
    send_good_chunk(r, 0, 0, 4, &checksums[0]);
    send_good_chunk(r, 1, 4, 4, &checksums[1]);
    send_row(r, checksums, NULL);
    assert_int_equal(end_find(r->honest, NUMBER)->ready, 1);
    assert_true(end_find(r->honest, NUMBER)->is_intact);
    assert_int_equal(r->heard.kind, HANDOFF_ACK);
    assert_int_equal(r->heard.status, BT_OK);
}

static void assert_failed(rogue *r, bt_status status, const char *why) {
    const end_attempt *a = end_find(r->honest, NUMBER);
    if (a->failed != 1 || strstr(a->text, why) == NULL)
        fail_msg("'%s' is not about '%s'", a->text, why);
    assert_int_equal(a->status, status);
    assert_int_equal(a->quiet, 1);
    assert_int_equal(r->heard.kind, HANDOFF_ACK);
    assert_int_equal(r->heard.status, status);
}

static void a_good_handoff_by_hand(void **state) {
    (void)state;
    rogue *r = rogue_create(false);
    (void)expect(r);
    finish_well(r);
    rogue_destroy(r);
}

typedef struct chunk_lie {
    uint32_t index, first, count, first_layer, layers;
    int64_t said_more, brought_more; /* bytes beyond the right size */
    bt_status status;
    const char *why;
} chunk_lie;

static void chunks_that_lie_fail_their_attempt(void **state) {
    (void)state;
    enum { L = ROGUE_LAYERS };
    static const chunk_lie lies[] = {
        {0, 4, 4, 0, L, 0, 0, BT_ERR_REQUEST_DUPLICATE, "came twice"},
        {0, 0, 4, 0, L, 0, 0, BT_ERR_REQUEST_DUPLICATE, "came twice"},
        {PAGES, 4, 4, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "index is out of range"},
        {UINT32_MAX, 4, 4, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "index is out of range"},
        {1, 3, 4, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "overlap"},
        {1, 0, 1, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "overlap"},
        {1, 8, 1, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 5, 4, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 4, 0, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, UINT32_MAX, 2, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 2, UINT32_MAX, 0, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 4, 1, 0, L - 1, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 4, 1, 1, L - 1, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 4, 1, 1, L, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 4, 1, 0, UINT32_MAX, 0, 0, BT_ERR_REQUEST_CORRUPT, "pages or layers"},
        {1, 4, 4, 0, L, 8, 8, BT_ERR_REQUEST_CORRUPT, "does not fit its pages"},
        {1, 4, 4, 0, L, -8, -8, BT_ERR_REQUEST_CORRUPT, "does not fit its pages"},
        {1, 4, 4, 0, L, 0, 8, BT_ERR_REQUEST_CORRUPT, "another size"},
        {1, 4, 4, 0, L, 0, -8, BT_ERR_REQUEST_CORRUPT, "another size"},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        const chunk_lie *lie = &lies[i];
        uint32_t checksum = 0;
        rogue *r = rogue_create(false);
        (void)expect(r);
        send_good_chunk(r, 0, 0, 4, &checksum);
        handoff_header header = make_chunk(r, lie->index, 4, 4);
        header.span = (handoff_span){lie->first, lie->count, lie->first_layer, lie->layers};
        const int64_t right = lie->count < 9 ? (int64_t)lie->count * ROGUE_PAGE_BYTES : 4096;
        header.payload_bytes = (uint64_t)(right + lie->said_more);
        rogue_send(r, &header, (size_t)(right + lie->brought_more));
        assert_failed(r, lie->status, lie->why);
        assert_int_equal(end_find_peer(r->honest, r->self)->failed, 0);
        rogue_destroy(r);
    }
}

/* With pages larger than a chunk the unit is a layer. */
static void layers_may_not_overlap_either(void **state) {
    (void)state;
    kv_pool *pool = NULL;
    handoff_geometry g;
    const kv_pool_options options = {.page_count = 4, .page_bytes = 1024, .layers = 4};
    assert_int_equal(kv_pool_create(&options, &pool), BT_OK);
    assert_int_equal(handoff_geometry_init(pool, 4, 255, &g), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(handoff_geometry_init(pool, 0, 512, &g), BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(handoff_geometry_init(pool, 4, HANDOFF_CHUNK_BYTES_MAX + 1, &g),
                     BT_ERR_CALLER_ARGUMENT);
    assert_int_equal(handoff_geometry_init(pool, 4, 768, &g), BT_OK);
    static const struct {
        handoff_span span;
        bool is_valid;
    } cases[] = {
        {{0, 1, 0, 3}, true},           {{0, 1, 3, 1}, true},  {{0, 1, 0, 4}, false},
        {{0, 1, 2, 3}, false},          {{0, 1, 4, 1}, false}, {{0, 1, 0, 0}, false},
        {{0, 2, 0, 1}, false},          {{1, 1, 0, 1}, true},  {{2, 1, 0, 1}, false},
        {{0, 1, UINT32_MAX, 2}, false}, {{0, 0, 0, 1}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(handoff_span_is_valid(&g, &cases[i].span, 2), cases[i].is_valid);
    uint32_t first = 0;
    const handoff_span span = {
        .first_page = 1, .page_count = 1, .first_layer = 3, .layer_count = 1};
    assert_int_equal(handoff_span_units(&g, &span, &first), 1);
    assert_int_equal(first, 7);
    kv_pool_destroy(pool);
}

static void wrong_bytes_are_found(void **state) {
    (void)state;
    for (uint32_t at = 0; at < 4 * ROGUE_PAGE_BYTES; at += 61) {
        uint32_t checksum = 0;
        rogue *r = rogue_create(false);
        (void)expect(r);
        send_good_chunk(r, 0, 0, 4, &checksum);
        handoff_header header = make_chunk(r, 1, 4, 4);
        r->payload[at] ^= 0x40;
        rogue_send(r, &header, header.payload_bytes);
        assert_failed(r, BT_ERR_REQUEST_CORRUPT, "has checksum");
        rogue_destroy(r);
    }
}

/* Dropped at their header, counted, refused to the sender; the attempt they do not belong to goes
 * on. */
static void strangers_are_dropped(void **state) {
    (void)state;
    rogue *r = rogue_create(false);
    const end_attempt *a = expect(r);
    handoff_header header = make_chunk(r, 0, 0, 4);
    header.slot.generation--;
    rogue_send(r, &header, header.payload_bytes);
    assert_int_equal(r->heard.status, BT_ERR_REQUEST_STALE);
    header.slot.generation += 2;
    rogue_send(r, &header, header.payload_bytes);
    header.slot = (row_slot){a->slots[0].index + 1, a->slots[0].generation};
    rogue_send(r, &header, header.payload_bytes);
    header.kind = HANDOFF_ROW;
    rogue_send(r, &header, 256);
    assert_int_equal(handoff_receiver_get_counts(r->honest->receiver).dropped_stale, 4);
    header = make_chunk(r, 0, 0, 4);
    header.attempt.counter++;
    rogue_send(r, &header, header.payload_bytes);
    assert_int_equal(r->heard.status, BT_ERR_REQUEST_UNKNOWN);
    header.attempt.counter--;
    header.attempt.router_incarnation++;
    rogue_send(r, &header, header.payload_bytes);
    assert_int_equal(handoff_receiver_get_counts(r->honest->receiver).dropped_unknown, 2);
    finish_well(r);
    rogue_destroy(r);
}

/* A slot is used again for another attempt while the older one's message is still on its way. */
static void an_older_use_of_the_slot_is_stale(void **state) {
    (void)state;
    rogue *r = rogue_create(false);
    const row_slot old_slot = expect(r)->slots[0];
    end_cancel(r->honest, NUMBER);
    rogue_run(r);
    assert_int_equal(r->heard.status, BT_ERR_REQUEST_CANCELLED);
    end_find(r->honest, NUMBER)->id.counter = NUMBER + 1000; /* out of the way */
    const end_attempt *a = expect(r);
    assert_int_equal(a->slots[0].index, old_slot.index);
    handoff_header header = make_chunk(r, 0, 0, 4);
    header.slot = old_slot;
    memset(r->payload, 0x77, sizeof r->payload);
    header.payload_crc = bt_crc32c(0, r->payload, header.payload_bytes);
    rogue_send(r, &header, header.payload_bytes);
    assert_int_equal(handoff_receiver_get_counts(r->honest->receiver).dropped_stale, 1);
    finish_well(r);
    rogue_destroy(r);
}

static void another_peer_may_not_write(void **state) {
    (void)state;
    rogue *r = rogue_create(false);
    xfer *third = NULL;
    const uint8_t *address = NULL;
    size_t bytes = 0;
    (void)expect(r);
    assert_int_equal(xfer_loop_create(r->network, 3, &third), BT_OK);
    third->self = (xfer_peer){.worker_id = 3, .incarnation = 300};
    third->handler = r->mover->handler;
    xfer *honest = r->honest->options.mover;
    assert_int_equal(honest->ops->get_address(honest, &address, &bytes), BT_OK);
    assert_int_equal(third->ops->connect(third, r->honest_peer, address, bytes), BT_OK);
    const handoff_header header = make_chunk(r, 0, 0, 4);
    uint8_t encoded[HANDOFF_HEADER_BYTES];
    handoff_header_encode(&header, encoded);
    const xfer_iov iov = {.base = r->payload, .bytes = header.payload_bytes};
    /* Not connected from the honest side: the mover drops it. */
    assert_int_equal(third->ops->send(third, r->honest_peer, encoded, sizeof encoded, &iov, 1, 0),
                     BT_OK);
    rogue_run(r);
    assert_int_equal(handoff_receiver_get_counts(r->honest->receiver).dropped_stale, 0);
    /* Connected, but not the peer of this attempt. */
    assert_int_equal(third->ops->get_address(third, &address, &bytes), BT_OK);
    assert_int_equal(end_connect(r->honest, third->self, address, bytes), BT_OK);
    assert_int_equal(third->ops->send(third, r->honest_peer, encoded, sizeof encoded, &iov, 1, 0),
                     BT_OK);
    rogue_run(r);
    assert_int_equal(handoff_receiver_get_counts(r->honest->receiver).dropped_stale, 1);
    finish_well(r);
    third->ops->destroy(third);
    rogue_destroy(r);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void change_attempt(metadata_row *row) {
    row->attempt.counter++;
}
static void change_sample(metadata_row *row) {
    row->sample_index = 1;
}
static void change_slot(metadata_row *row) {
    row->slot++;
}
static void change_generation(metadata_row *row) {
    row->slot_generation++;
}
static void change_writer(metadata_row *row) {
    row->writer_incarnation--;
}
static void change_status(metadata_row *row) {
    row->status = 1;
}
static void change_prompt(metadata_row *row) {
    row->prompt_tokens--;
}
static void change_cached(metadata_row *row) {
    row->cached_tokens = row->prompt_tokens; /* one is always computed */
}
static void change_pages(metadata_row *row) {
    row->page_count++;
}
static void change_kv_bytes(metadata_row *row) {
    row->kv_bytes++;
}
static void change_mode(metadata_row *row) {
    row->mask_mode = ROW_MASK_SELECTED;
    row->support_logprobs = NULL;
}
static void change_support(metadata_row *row) {
    row->support_count = 0;
}
static void widen_support(metadata_row *row) {
    row->support_count = ROGUE_CAP + 1;
}
static void change_chunks_to_none(metadata_row *row) {
    row->chunk_count = 0;
}
static void change_chunks_to_many(metadata_row *row) {
    row->chunk_count = PAGES + 1;
}
static void change_chunks_to_one(metadata_row *row) {
    row->chunk_count = 1;
}
static void change_chunks_to_three(metadata_row *row) {
    row->chunk_count = 3;
}

static void rows_that_lie_fail_their_attempt(void **state) {
    (void)state;
    static const struct {
        rogue_row_change change;
        const char *why;
    } lies[] = {
        {change_attempt, "attempt"},
        {change_sample, "sample index"},
        {change_slot, "slot"},
        {change_generation, "slot generation"},
        {change_writer, "writer incarnation"},
        {change_status, "status"},
        {change_prompt, "prompt tokens"},
        {change_cached, "cached tokens"},
        {change_pages, "page count"},
        {change_kv_bytes, "KV bytes"},
        {change_mode, "mask mode"},
        {change_support, "support size"},
        {widen_support, "support size"},
        {change_chunks_to_none, "chunk count"},
        {change_chunks_to_many, "chunk count"},
        {change_chunks_to_one, "chunk count"},
        {change_chunks_to_three, "announces 3 chunks"},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        uint32_t checksums[PAGES + 1] = {0};
        rogue *r = rogue_create(false);
        (void)expect(r);
        send_good_chunk(r, 0, 0, 4, &checksums[0]);
        send_good_chunk(r, 1, 4, 4, &checksums[1]);
        send_row(r, checksums, lies[i].change);
        assert_failed(r, BT_ERR_REQUEST_CORRUPT, lies[i].why);
        rogue_destroy(r);
    }
}

/* The same announcement, the row first: found when the chunk comes that should not be. */
static void a_row_of_too_few_chunks_is_found_later(void **state) {
    (void)state;
    uint32_t checksums[2] = {0};
    rogue *r = rogue_create(false);
    (void)expect(r);
    send_row(r, checksums, change_chunks_to_one);
    assert_int_equal(end_find(r->honest, NUMBER)->failed, 0);
    send_good_chunk(r, 1, 4, 4, &checksums[1]);
    assert_failed(r, BT_ERR_REQUEST_CORRUPT, "announces fewer chunks");
    rogue_destroy(r);
    r = rogue_create(false);
    (void)expect(r);
    send_row(r, checksums, change_chunks_to_one);
    send_good_chunk(r, 0, 4, 4, &checksums[0]);
    assert_failed(r, BT_ERR_REQUEST_CORRUPT, "cover 4 of 8");
    rogue_destroy(r);
}

static void a_row_before_its_chunks_waits(void **state) {
    (void)state;
    uint32_t checksums[2];
    rogue *r = rogue_create(false);
    (void)expect(r);
    /* The checksums must be known to write the row. */
    checksums[0] = make_chunk(r, 0, 0, 4).payload_crc;
    checksums[1] = make_chunk(r, 1, 4, 4).payload_crc;
    send_row(r, checksums, NULL);
    assert_int_equal(end_find(r->honest, NUMBER)->ready, 0);
    send_good_chunk(r, 1, 4, 4, &checksums[1]);
    assert_int_equal(end_find(r->honest, NUMBER)->ready, 0);
    assert_int_equal(r->acks, 0);
    send_good_chunk(r, 0, 0, 4, &checksums[0]);
    assert_int_equal(end_find(r->honest, NUMBER)->ready, 1);
    assert_true(end_find(r->honest, NUMBER)->is_intact);
    rogue_destroy(r);
}

static void a_second_row_is_refused(void **state) {
    (void)state;
    uint32_t checksums[2] = {0};
    rogue *r = rogue_create(false);
    (void)expect(r);
    send_row(r, checksums, NULL);
    send_row(r, checksums, NULL);
    assert_failed(r, BT_ERR_REQUEST_DUPLICATE, "row of sample 0 came twice");
    rogue_destroy(r);
}

static void rows_of_wrong_sizes_are_refused(void **state) {
    (void)state;
    static const struct {
        size_t said, brought;
    } sizes[] = {{0, 0}, {8, 8}, {127, 127}, {256, 128}, {128, 256}, {8192, 8192}, {16384, 16384}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint32_t checksums[2] = {0};
        size_t bytes = 0;
        rogue *r = rogue_create(false);
        (void)expect(r);
        handoff_header header = make_row(r, checksums, NULL, &bytes);
        header.payload_bytes = sizes[i].said;
        rogue_send(r, &header, sizes[i].brought);
        assert_failed(r, BT_ERR_REQUEST_CORRUPT, "metadata row of");
        rogue_destroy(r);
    }
}

/* Each bit of the row flipped on its way; KV is complete before. */
static void every_flipped_bit_of_a_row_is_found(void **state) {
    (void)state;
    size_t bytes = 1;
    for (size_t at = 0; at < bytes; at++) {
        uint32_t checksums[2];
        rogue *r = rogue_create(false);
        (void)expect(r);
        send_good_chunk(r, 0, 0, 4, &checksums[0]);
        send_good_chunk(r, 1, 4, 4, &checksums[1]);
        const handoff_header header = make_row(r, checksums, NULL, &bytes);
        r->payload[at] ^= (uint8_t)(1u << at % 8);
        rogue_send(r, &header, bytes);
        assert_failed(r, BT_ERR_REQUEST_CORRUPT, "");
        rogue_destroy(r);
    }
    assert_true(bytes > ROW_HEADER_BYTES);
}

/* ---- headers --------------------------------------------------------------------------------- */

/* Sends a header that does not read: the peer is failed with all its attempts, and closed. */
static void assert_protocol_error(const uint8_t *header, size_t bytes, size_t payload_bytes) {
    rogue *r = rogue_create(false);
    (void)expect(r);
    rogue_send_raw(r, header, bytes, payload_bytes);
    const end_attempt *a = end_find(r->honest, NUMBER);
    assert_int_equal(a->failed, 1);
    assert_int_equal(a->status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(end_find_peer(r->honest, r->self)->failed, 1);
    assert_int_equal(end_find_peer(r->honest, r->self)->closed, 1);
    assert_int_equal(handoff_receiver_get_counts(r->honest->receiver).protocol_errors, 1);
    assert_int_equal(r->acks, 0); /* nothing is said any more to such a peer */
    rogue_destroy(r);
}

static void seal(uint8_t *header) {
    memset(header + 8, 0, 4);
    bt_store_le32(header + 8, bt_crc32c(0, header, HANDOFF_HEADER_BYTES));
}

static void headers_that_do_not_read_fail_the_peer(void **state) {
    (void)state;
    uint8_t good[HANDOFF_HEADER_BYTES + 1] = {0};
    uint8_t bad[HANDOFF_HEADER_BYTES];
    const handoff_header chunk = {.kind = HANDOFF_CHUNK, .payload_bytes = 64};
    handoff_header_encode(&chunk, good);
    for (size_t at = 0; at < HANDOFF_HEADER_BYTES; at++) {
        memcpy(bad, good, sizeof bad);
        bad[at] ^= (uint8_t)(1u << at % 8);
        assert_protocol_error(bad, sizeof bad, 64);
    }
    assert_protocol_error(good, 0, 0);
    assert_protocol_error(good, HANDOFF_HEADER_BYTES - 1, 64);
    assert_protocol_error(good, HANDOFF_HEADER_BYTES + 1, 64);
    static const struct {
        size_t at;
        uint16_t value;
    } sealed_lies[] = {{4, 2}, {6, 0}, {6, 5}, {6, 0xffff}, {12, 2}, {76, 1}, {94, 1}};
    for (size_t i = 0; i < sizeof sealed_lies / sizeof sealed_lies[0]; i++) {
        memcpy(bad, good, sizeof bad);
        bt_store_le16(bad + sealed_lies[i].at, sealed_lies[i].value);
        seal(bad);
        assert_protocol_error(bad, sizeof bad, 64);
    }
    const handoff_header ack = {.kind = HANDOFF_ACK};
    handoff_header_encode(&ack, bad);
    assert_protocol_error(bad, sizeof bad, 0);
    const handoff_header hello = {.kind = HANDOFF_HELLO};
    handoff_header_encode(&hello, bad);
    assert_protocol_error(bad, sizeof bad, 8);
}

static void headers_round_trip(void **state) {
    (void)state;
    const handoff_header header = {
        .kind = HANDOFF_CHUNK,
        .attempt = {UINT64_C(0x1122334455667788), UINT64_C(0x99aabbccddeeff00)},
        .slot = {7, 9},
        .payload_bytes = UINT64_C(0x1234567890),
        .chunk_index = 11,
        .span = {1, 2, 3, 4},
        .payload_crc = 0xdeadbeef,
        .status = BT_ERR_REQUEST_CORRUPT,
    };
    uint8_t bytes[HANDOFF_HEADER_BYTES];
    handoff_header got;
    handoff_header_encode(&header, bytes);
    assert_int_equal(handoff_header_decode(bytes, sizeof bytes, &got), BT_OK);
    assert_int_equal(got.kind, header.kind);
    assert_true(proto_attempt_equal(got.attempt, header.attempt));
    assert_memory_equal(&got.slot, &header.slot, sizeof got.slot);
    assert_true(got.payload_bytes == header.payload_bytes);
    assert_int_equal(got.chunk_index, header.chunk_index);
    assert_memory_equal(&got.span, &header.span, sizeof got.span);
    assert_int_equal(got.payload_crc, header.payload_crc);
    assert_int_equal(got.status, header.status);
    assert_false(got.has_heard);
}

static void the_receiver_checks_its_user(void **state) {
    (void)state;
    rogue *r = rogue_create(false);
    handoff_receiver *receiver = r->honest->receiver;
    const end_attempt *a = expect(r);
    handoff_offer good = {.attempt = {0x5eed, NUMBER + 1},
                          .peer = r->self,
                          .sample_count = 1,
                          .slots = a->slots,
                          .prompt_tokens = PROMPT,
                          .page_count = PAGES,
                          .pages = a->pages,
                          .mask_mode = ROW_MASK_OFF,
                          .deadline_us = r->now_us + DEADLINE_US};
    handoff_offer bad = good;
    bad.attempt.counter--;
    assert_int_equal(handoff_receiver_expect(receiver, &bad), BT_ERR_REQUEST_DUPLICATE);
    bad = good;
    bad.peer.incarnation++;
    assert_int_equal(handoff_receiver_expect(receiver, &bad), BT_ERR_PEER_GONE);
    bad = good;
    row_slot stale = good.slots[0];
    stale.generation++;
    bad.slots = &stale;
    assert_int_equal(handoff_receiver_expect(receiver, &bad), BT_ERR_REQUEST_STALE);
    bad = good;
    bad.prompt_tokens = 0;
    assert_int_equal(handoff_receiver_expect(receiver, &bad), BT_ERR_CALLER_ARGUMENT);
    bad = good;
    bad.page_count--;
    assert_int_equal(handoff_receiver_expect(receiver, &bad), BT_ERR_CALLER_ARGUMENT);
    static const uint32_t free_pages[PAGES] = {60, 61, 62, 63, 60, 61, 62, 63};
    bad = good;
    bad.pages = free_pages;
    assert_int_equal(handoff_receiver_expect(receiver, &bad), BT_ERR_CALLER_ARGUMENT);
    static const uint32_t no_pages[PAGES] = {64};
    bad.pages = no_pages;
    assert_int_equal(handoff_receiver_expect(receiver, &bad), BT_ERR_CALLER_ARGUMENT);
    /* The same number of other routers is another attempt. */
    for (uint32_t i = 1; i < ENDS_ATTEMPTS_MAX; i++) {
        good.attempt = (proto_attempt){.router_incarnation = 0x5eed + i, .counter = NUMBER};
        assert_int_equal(handoff_receiver_expect(receiver, &good), BT_OK);
        assert_int_equal(handoff_receiver_expect(receiver, &good), BT_ERR_REQUEST_DUPLICATE);
    }
    good.attempt.router_incarnation++;
    assert_int_equal(handoff_receiver_expect(receiver, &good), BT_ERR_REQUEST_FULL);
    /* Their events would name attempts that the end does not know. */
    end_cancel(r->honest, NUMBER);
    end_destroy(r->honest);
    r->mover->ops->destroy(r->mover);
    xfer_loop_network_destroy(r->network);
    free(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_handoff_by_hand),
        cmocka_unit_test(chunks_that_lie_fail_their_attempt),
        cmocka_unit_test(layers_may_not_overlap_either),
        cmocka_unit_test(wrong_bytes_are_found),
        cmocka_unit_test(strangers_are_dropped),
        cmocka_unit_test(an_older_use_of_the_slot_is_stale),
        cmocka_unit_test(another_peer_may_not_write),
        cmocka_unit_test(rows_that_lie_fail_their_attempt),
        cmocka_unit_test(a_row_of_too_few_chunks_is_found_later),
        cmocka_unit_test(a_row_before_its_chunks_waits),
        cmocka_unit_test(a_second_row_is_refused),
        cmocka_unit_test(rows_of_wrong_sizes_are_refused),
        cmocka_unit_test(every_flipped_bit_of_a_row_is_found),
        cmocka_unit_test(headers_that_do_not_read_fail_the_peer),
        cmocka_unit_test(headers_round_trip),
        cmocka_unit_test(the_receiver_checks_its_user),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
