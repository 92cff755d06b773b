/* What two builds of a worker must agree on in a transfer: the header byte by byte, where pages are
 * cut, how many parts a message may have, and what each kind of checksum looks at. */
#include "pd_buffers/handoff_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/little_endian.h"
#include "base/mem.h"
#include "pd_buffers/handoff.h"

static kv_pool *make_pool(uint32_t page_count, size_t page_bytes, uint32_t layers) {
    const kv_pool_options options = {
        .page_count = page_count, .page_bytes = page_bytes, .layers = layers};
    kv_pool *pool = NULL;
    assert_int_equal(kv_pool_create(&options, &pool), BT_OK);
    return pool;
}

static void every_header_byte_is_where_it_should(void **state) {
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
    uint8_t wanted[HANDOFF_HEADER_BYTES] = {'B', 'H', 'N', 'D', 1, 0, 2, 0};
    handoff_header_encode(&header, bytes);
    memcpy(wanted + 8, bytes + 8, 4); /* the CRC: base/crc32c has its own known answers */
    bt_store_le64(wanted + 16, header.attempt.router_incarnation);
    bt_store_le64(wanted + 24, header.attempt.counter);
    bt_store_le32(wanted + 32, 7);
    bt_store_le32(wanted + 36, 9);
    bt_store_le64(wanted + 40, header.payload_bytes);
    bt_store_le32(wanted + 48, 11);
    bt_store_le32(wanted + 52, 1);
    bt_store_le32(wanted + 56, 2);
    bt_store_le32(wanted + 60, 3);
    bt_store_le32(wanted + 64, 4);
    bt_store_le32(wanted + 68, 0xdeadbeef);
    bt_store_le32(wanted + 72, (uint32_t)BT_ERR_REQUEST_CORRUPT);
    assert_memory_equal(bytes, wanted, sizeof bytes);
    const handoff_header hello = {.kind = HANDOFF_HELLO, .has_heard = true};
    handoff_header_encode(&hello, bytes);
    assert_int_equal(bt_load_le16(bytes + 6), 1);
    assert_int_equal(bt_load_le32(bytes + 12), 1);
}

/* Whole pages while they fit into 8 MiB, the last byte included; then layers of one page. */
static void pages_are_cut_where_the_maximum_says(void **state) {
    (void)state;
    static const struct {
        size_t page_bytes;
        uint32_t layers, chunk_pages, chunk_layers, units_per_page;
    } cases[] = {
        {1 << 20, 4, 8, 4, 1},
        {3 << 20, 3, 2, 3, 1},
        {HANDOFF_CHUNK_BYTES_MAX, 4, 1, 4, 1},
        {HANDOFF_CHUNK_BYTES_MAX + 64, 8, 1, 7, 8},
        {4 * (size_t)(3 << 20), 4, 1, 2, 4},
        {2 * (size_t)HANDOFF_CHUNK_BYTES_MAX, 2, 1, 1, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        handoff_geometry geometry;
        kv_pool *pool = make_pool(1, cases[i].page_bytes, cases[i].layers);
        assert_int_equal(handoff_geometry_init(pool, 32, 0, &geometry), BT_OK);
        assert_int_equal(geometry.chunk_pages, cases[i].chunk_pages);
        assert_int_equal(geometry.chunk_layers, cases[i].chunk_layers);
        assert_int_equal(geometry.units_per_page, cases[i].units_per_page);
        kv_pool_destroy(pool);
    }
    handoff_geometry unused;
    kv_pool *pool = make_pool(1, HANDOFF_CHUNK_BYTES_MAX + 64, 1); /* one layer is too much */
    assert_int_equal(handoff_geometry_init(pool, 32, 0, &unused), BT_ERR_CALLER_ARGUMENT);
    kv_pool_destroy(pool);
}

/* Pages so small that 8 MiB of them are more parts than a message may have: scattered in the pool
 * they still fit, and the list is never written past its end. */
static void small_pages_are_bounded_by_parts(void **state) {
    (void)state;
    enum { PAGE_BYTES = 64, PAGES = 2 * (XFER_IOV_MAX + 5) };
    handoff_geometry geometry;
    kv_pool *pool = make_pool(PAGES, PAGE_BYTES, 2);
    assert_int_equal(handoff_geometry_init(pool, 32, 0, &geometry), BT_OK);
    assert_int_equal(geometry.chunk_pages, XFER_IOV_MAX);
    uint32_t *pages = bt_calloc(PAGES / 2, sizeof *pages);
    xfer_iov *iov = bt_calloc(XFER_IOV_MAX, sizeof *iov);
    assert_non_null(pages);
    assert_non_null(iov);
    for (uint32_t i = 0; i < PAGES / 2; i++)
        pages[i] = 2 * i; /* no two are neighbours */
    uint32_t covered = 0;
    for (uint32_t page = 0; page < PAGES / 2;) {
        const handoff_span span = handoff_next_span(&geometry, page, 0, PAGES / 2);
        assert_true(handoff_span_is_valid(&geometry, &span, PAGES / 2));
        assert_int_equal(handoff_span_iov(&geometry, &span, pages, iov), span.page_count);
        covered += span.page_count;
        page += span.page_count;
    }
    assert_int_equal(covered, PAGES / 2);
    const handoff_span long_span = {.page_count = XFER_IOV_MAX + 1, .layer_count = 2};
    assert_false(handoff_span_is_valid(&geometry, &long_span, PAGES / 2));
    bt_free(iov);
    bt_free(pages);
    kv_pool_destroy(pool);
}

enum { SMALL_LAYERS = 4, SMALL_PAGES = 3, LINES = 5 };

/* The checksum of all pages after one byte of every line of one layer of one page has changed. */
static uint32_t checksum_with_change(handoff_geometry *g, record_checksum mode, uint32_t page,
                                     uint32_t layer, uint8_t change) {
    static const uint32_t pages[SMALL_PAGES] = {2, 0, 1};
    const handoff_span span = {.page_count = SMALL_PAGES, .layer_count = SMALL_LAYERS};
    uint8_t *base = (uint8_t *)kv_pool_page(g->pool, pages[page]) + layer * g->layer_bytes;
    for (uint32_t line = 0; line < LINES; line++)
        base[line * HANDOFF_SAMPLE_BYTES + 7] ^= change;
    const uint32_t crc = handoff_span_checksum(g, &span, pages, mode, (proto_attempt){3, 4});
    for (uint32_t line = 0; line < LINES; line++)
        base[line * HANDOFF_SAMPLE_BYTES + 7] ^= change;
    return crc;
}

static void checksums_look_at_every_layer_of_every_page(void **state) {
    (void)state;
    handoff_geometry geometry;
    kv_pool *pool =
        make_pool(SMALL_PAGES, (size_t)SMALL_LAYERS * LINES * HANDOFF_SAMPLE_BYTES, SMALL_LAYERS);
    assert_int_equal(handoff_geometry_init(pool, 32, 0, &geometry), BT_OK);
    uint8_t *memory = kv_pool_memory(pool);
    for (size_t i = 0; i < kv_pool_memory_bytes(pool); i++)
        memory[i] = (uint8_t)(i * 7 + i / 251);
    for (int mode = RECORD_CHECKSUM_OFF; mode <= RECORD_CHECKSUM_FULL; mode++) {
        const record_checksum m = (record_checksum)mode;
        const uint32_t before = checksum_with_change(&geometry, m, 0, 0, 0);
        if (m == RECORD_CHECKSUM_OFF) assert_int_equal(before, 0);
        for (uint32_t page = 0; page < SMALL_PAGES; page++) {
            for (uint32_t layer = 0; layer < SMALL_LAYERS; layer++) {
                const uint32_t after = checksum_with_change(&geometry, m, page, layer, 0x10);
                assert_int_equal(after != before, m != RECORD_CHECKSUM_OFF);
            }
        }
    }
    kv_pool_destroy(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_header_byte_is_where_it_should),
        cmocka_unit_test(pages_are_cut_where_the_maximum_says),
        cmocka_unit_test(small_pages_are_bounded_by_parts),
        cmocka_unit_test(checksums_look_at_every_layer_of_every_page),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
