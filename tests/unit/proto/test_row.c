/* The metadata row: every shape comes back bit for bit, every changed byte is found, and nothing
 * that a peer could send is trusted. */
#include "proto/row.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/crc32c.h"
#include "base/little_endian.h"

enum { CAP = 50, CHUNKS = 3 };

typedef struct fixture {
    _Alignas(ROW_SLOT_ALIGNMENT) uint8_t slot[4096];
    int32_t ids[CAP];
    float logprobs[CAP];
    uint32_t checksums[CHUNKS];
    metadata_row row;
    size_t total;
} fixture;

static uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void prepare(fixture *f, uint32_t mask_mode, uint32_t support_count, bool has_logprob) {
    memset(f, 0xa5, sizeof *f);
    for (uint32_t i = 0; i < CAP; i++) {
        f->ids[i] = (int32_t)(i * 977 + 3);
        f->logprobs[i] = -0.25f * (float)(i + 1);
    }
    for (uint32_t i = 0; i < CHUNKS; i++)
        f->checksums[i] = 0x1000u + i;
    f->row = (metadata_row){
        .attempt = {0x1122334455667788u, 42},
        .slot = 7,
        .slot_generation = 9,
        .writer_incarnation = 0xfeedfacecafebeefu,
        .first_token = 31,
        .support_count = support_count,
        .cap_needed = support_count,
        .cached_tokens = 5,
        .chunk_count = CHUNKS,
        .page_count = 4,
        .kv_bytes = UINT64_C(1) << 33,
        .prompt_tokens = 100,
        .mask_mode = mask_mode,
        .weights_version = 0x0102030405060708u,
        .has_first_logprob = has_logprob,
        .first_logprob = has_logprob ? -1.5f : 0.0f,
        .selected_logprob = mask_mode == ROW_MASK_OFF ? 0.0f : -0.75f,
        .support_ids = mask_mode == ROW_MASK_OFF ? NULL : f->ids,
        .support_logprobs = mask_mode == ROW_MASK_SUPPORT ? f->logprobs : NULL,
    };
    assert_int_equal(row_encode(&f->row, f->checksums, f->slot, sizeof f->slot, &f->total), BT_OK);
}

static void assert_same(const metadata_row *a, const metadata_row *b) {
    assert_true(proto_attempt_equal(a->attempt, b->attempt));
    assert_int_equal(a->sample_index, b->sample_index);
    assert_int_equal(a->slot, b->slot);
    assert_int_equal(a->slot_generation, b->slot_generation);
    assert_true(a->writer_incarnation == b->writer_incarnation);
    assert_int_equal(a->first_token, b->first_token);
    assert_int_equal(a->status, b->status);
    assert_int_equal(a->support_count, b->support_count);
    assert_int_equal(a->cap_needed, b->cap_needed);
    assert_int_equal(a->cached_tokens, b->cached_tokens);
    assert_int_equal(a->chunk_count, b->chunk_count);
    assert_int_equal(a->page_count, b->page_count);
    assert_true(a->kv_bytes == b->kv_bytes);
    assert_int_equal(a->prompt_tokens, b->prompt_tokens);
    assert_true(a->weights_version == b->weights_version);
    assert_int_equal(a->mask_mode, b->mask_mode);
    assert_int_equal(a->has_first_logprob, b->has_first_logprob);
    assert_int_equal(float_bits(a->first_logprob), float_bits(b->first_logprob));
    assert_int_equal(float_bits(a->selected_logprob), float_bits(b->selected_logprob));
    assert_int_equal(a->support_ids == NULL, b->support_ids == NULL);
    assert_int_equal(a->support_logprobs == NULL, b->support_logprobs == NULL);
    if (a->support_count == 0) return;
    const size_t bytes = sizeof(uint32_t) * a->support_count;
    assert_memory_equal(a->support_ids, b->support_ids, bytes);
    if (a->support_logprobs != NULL)
        assert_memory_equal(a->support_logprobs, b->support_logprobs, bytes);
}

static void every_shape_round_trips(void **state) {
    (void)state;
    static const uint32_t counts[] = {1, 2, 3, CAP - 1, CAP};
    for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            for (int logprob = 0; logprob < 2; logprob++) {
                fixture f;
                metadata_row got;
                prepare(&f, mode, mode == ROW_MASK_OFF ? 0 : counts[c], logprob != 0);
                assert_true(f.total <= row_slot_bytes(CAP));
                assert_int_equal(row_decode(f.slot, f.total, &got), BT_OK);
                assert_same(&f.row, &got);
                assert_int_equal(row_prove(f.slot, f.total, f.checksums, CHUNKS), BT_OK);
            }
        }
    }
}

/* What was asked for beside the mask: the two widths alone and together, each flipped bit found. */
static void asked_logprobs_travel_beside_the_mask(void **state) {
    (void)state;
    static const uint32_t widths[][2] = {{1, 0}, {0, 1}, {3, 2}, {2, 3}};
    static const row_top top[3] = {{4, -0.5f}, {1, -0.5f}, {-2, -3.0f}};
    static const float asked[3] = {-1.0f, -2.5f, -0.0f};
    for (size_t i = 0; i < 2 * sizeof widths / sizeof widths[0]; i++) {
        fixture f;
        metadata_row got;
        prepare(&f, (uint32_t)(i % 3), i % 3 == ROW_MASK_OFF ? 0 : 3, i % 2 != 0);
        f.row.top_count = widths[i / 2][0];
        f.row.id_logprob_count = widths[i / 2][1];
        f.row.top = top;
        f.row.id_logprobs = asked;
        assert_int_equal(row_encode(&f.row, f.checksums, f.slot, sizeof f.slot, &f.total), BT_OK);
        assert_int_equal(row_decode(f.slot, f.total, &got), BT_OK);
        assert_same(&f.row, &got);
        assert_int_equal(got.top_count, f.row.top_count);
        assert_int_equal(got.id_logprob_count, f.row.id_logprob_count);
        if (got.top_count > 0) assert_memory_equal(got.top, top, sizeof *top * got.top_count);
        if (got.id_logprob_count > 0)
            assert_memory_equal(got.id_logprobs, asked, sizeof *asked * got.id_logprob_count);
        for (size_t bit = 0; bit < 8 * f.total; bit++) {
            f.slot[bit / 8] ^= (uint8_t)(1u << bit % 8);
            bt_status status = row_decode(f.slot, f.total, &got);
            if (status == BT_OK) status = row_prove(f.slot, f.total, f.checksums, CHUNKS);
            assert_int_not_equal(status, BT_OK);
            f.slot[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
    }
}

static void more_than_may_be_asked_for_is_refused(void **state) {
    (void)state;
    static const row_top top[PROTO_TOP_LOGPROBS_MAX + 1];
    static const float asked[PROTO_LOGPROB_IDS_MAX + 1];
    fixture f;
    prepare(&f, ROW_MASK_OFF, 0, true);
    f.row.top = top;
    f.row.top_count = PROTO_TOP_LOGPROBS_MAX + 1;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, sizeof f.slot, &f.total),
                     BT_ERR_CALLER_ARGUMENT);
    f.row.top_count = 0;
    f.row.id_logprobs = asked;
    f.row.id_logprob_count = PROTO_LOGPROB_IDS_MAX + 1;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, sizeof f.slot, &f.total),
                     BT_ERR_CALLER_ARGUMENT);
    f.row.id_logprob_count = 0;
    f.row.top = NULL;
    f.row.top_count = 1;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, sizeof f.slot, &f.total),
                     BT_ERR_CALLER_ARGUMENT);
    f.row.top_count = 0;
    f.row.id_logprobs = NULL;
    f.row.id_logprob_count = 1;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, sizeof f.slot, &f.total),
                     BT_ERR_CALLER_ARGUMENT);
}

/* Nor read: sections of the size that they say, in a row that says as much. */
static void more_than_may_be_asked_for_is_not_read(void **state) {
    (void)state;
    static const struct {
        uint32_t kind, bytes;
        const char *fault; /* NULL: it may be */
    } sections[] = {
        {5, sizeof(row_top) * PROTO_TOP_LOGPROBS_MAX, NULL},
        {5, sizeof(row_top) * (PROTO_TOP_LOGPROBS_MAX + 1), "top log-probabilities"},
        {5, 0, "top log-probabilities"},
        {5, sizeof(row_top) + 4, "top log-probabilities"},
        {6, 4 * PROTO_LOGPROB_IDS_MAX, NULL},
        {6, 4 * (PROTO_LOGPROB_IDS_MAX + 1), "asked log-probabilities"},
        {6, 0, "asked log-probabilities"},
        {6, 7, "asked log-probabilities"},
    };
    static _Alignas(ROW_SLOT_ALIGNMENT) uint8_t slot[8192];
    for (size_t i = 0; i < sizeof sections / sizeof sections[0]; i++) {
        fixture f;
        prepare(&f, ROW_MASK_OFF, 0, false);
        const size_t total = f.total + 8 + (sections[i].bytes + 7u) / 8 * 8;
        memset(slot, 0, sizeof slot);
        memcpy(slot, f.slot, f.total);
        bt_store_le32(slot + 8, (uint32_t)total);
        bt_store_le32(slot + f.total, sections[i].kind);
        bt_store_le32(slot + f.total + 4, sections[i].bytes);
        const char *fault = row_fault(slot, total);
        if (sections[i].fault == NULL) assert_null(fault);
        if (sections[i].fault != NULL) assert_string_equal(fault, sections[i].fault);
    }
}

/* Every section is looked for within the row alone. */
static void a_section_that_ends_behind_the_row_is_named(void **state) {
    (void)state;
    fixture f;
    prepare(&f, ROW_MASK_OFF, 0, true);
    for (size_t bytes = f.total - 8; bytes < f.total; bytes++) {
        bt_store_le32(f.slot + 8, (uint32_t)bytes);
        assert_string_equal(row_fault(f.slot, bytes), "first-token log-probability");
    }
}

/* Floats are bits: a NaN with a payload, negative zero and a denormal come back as they were. */
static void floats_travel_as_bits(void **state) {
    (void)state;
    fixture f;
    metadata_row got;
    static const uint32_t bits[] = {0x7fc12345u, 0x80000000u, 0x00000001u, 0xff800000u};
    prepare(&f, ROW_MASK_SUPPORT, 4, true);
    memcpy(f.logprobs, bits, sizeof bits);
    memcpy(&f.row.first_logprob, &bits[0], 4);
    memcpy(&f.row.selected_logprob, &bits[1], 4);
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, sizeof f.slot, &f.total), BT_OK);
    assert_int_equal(row_decode(f.slot, f.total, &got), BT_OK);
    assert_same(&f.row, &got);
}

/* The documented offsets: a reader of another version must find magic, version and sizes. */
static void layout_is_the_documented_one(void **state) {
    (void)state;
    fixture f;
    prepare(&f, ROW_MASK_SELECTED, 2, false);
    assert_memory_equal(f.slot, "BROW", 4);
    assert_int_equal(bt_load_le16(f.slot + 4), 2);
    assert_int_equal(bt_load_le16(f.slot + 6), 128);
    assert_int_equal(bt_load_le32(f.slot + 8), 128 + 16 + 16);
    assert_true(bt_load_le64(f.slot + 16) == 0x1122334455667788u);
    assert_int_equal(bt_load_le32(f.slot + 40), 9);
    assert_int_equal(bt_load_le32(f.slot + 44), 31);
    assert_int_equal(bt_load_le32(f.slot + 92), ROW_MASK_SELECTED);
    assert_true(bt_load_le64(f.slot + 96) == 0x0102030405060708u);
    assert_int_equal(bt_load_le16(f.slot + 128), ROW_SECTION_SUPPORT_IDS);
    assert_int_equal(bt_load_le32(f.slot + 132), 8);
    assert_int_equal(bt_load_le32(f.slot + 136), 3);
    assert_int_equal(bt_load_le16(f.slot + 144), ROW_SECTION_SELECTED_LOGPROB);
}

/* CRC32C bit by bit, from its definition (reflected polynomial 0x82f63b78). */
static uint32_t crc_by_definition(uint32_t crc, const uint8_t *bytes, size_t count) {
    crc = ~crc;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1u)));
    }
    return ~crc;
}

/* Encoder and reader of one build always agree; a peer of another build only does when every field
 * lies where row.h says, and when the CRC covers what it says, in that order. */
static void every_byte_is_where_the_header_says(void **state) {
    (void)state;
    fixture f;
    prepare(&f, ROW_MASK_SUPPORT, 2, true);
    f.row.sample_index = 0x51;
    f.row.status = 0x52;
    f.row.cap_needed = 0x53;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, sizeof f.slot, &f.total), BT_OK);
    uint8_t wanted[ROW_HEADER_BYTES] = {'B', 'R', 'O', 'W', 2, 0, 128, 0};
    bt_store_le32(wanted + 8, (uint32_t)f.total);
    bt_store_le64(wanted + 16, 0x1122334455667788u);
    bt_store_le64(wanted + 24, 42);
    bt_store_le32(wanted + 32, 0x51);
    bt_store_le32(wanted + 36, 7);
    bt_store_le32(wanted + 40, 9);
    bt_store_le32(wanted + 44, 31);
    bt_store_le64(wanted + 48, 0xfeedfacecafebeefu);
    bt_store_le32(wanted + 56, 0x52);
    bt_store_le32(wanted + 60, 2);
    bt_store_le32(wanted + 64, 0x53);
    bt_store_le32(wanted + 68, 5);
    bt_store_le32(wanted + 72, CHUNKS);
    bt_store_le32(wanted + 76, 4);
    bt_store_le64(wanted + 80, UINT64_C(1) << 33);
    bt_store_le32(wanted + 88, 100);
    bt_store_le32(wanted + 92, ROW_MASK_SUPPORT);
    bt_store_le64(wanted + 96, 0x0102030405060708u);
    uint32_t crc = crc_by_definition(0, wanted, sizeof wanted);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        uint8_t checksum[4];
        bt_store_le32(checksum, f.checksums[i]);
        crc = crc_by_definition(crc, checksum, sizeof checksum);
    }
    crc = crc_by_definition(crc, f.slot + ROW_HEADER_BYTES, f.total - ROW_HEADER_BYTES);
    bt_store_le32(wanted + 12, crc);
    assert_memory_equal(f.slot, wanted, sizeof wanted);
    /* kinds 1 to 4, each with its bytes, padded to 8 */
    static const uint16_t sections[][3] = {{128, 1, 8}, {144, 2, 8}, {160, 3, 4}, {176, 4, 4}};
    for (size_t i = 0; i < sizeof sections / sizeof sections[0]; i++) {
        const uint8_t *section = f.slot + sections[i][0];
        assert_int_equal(bt_load_le16(section), sections[i][1]);
        assert_int_equal(bt_load_le16(section + 2), 0);
        assert_int_equal(bt_load_le32(section + 4), sections[i][2]);
    }
    assert_int_equal(f.total, 192);
}

/* Each bit of each byte that travels, flipped alone, is found by the reader or by the proof. */
static void every_flipped_bit_is_found(void **state) {
    (void)state;
    fixture f;
    metadata_row got;
    prepare(&f, ROW_MASK_SUPPORT, 3, true);
    for (size_t i = 0; i < f.total; i++) {
        for (int bit = 0; bit < 8; bit++) {
            f.slot[i] ^= (uint8_t)(1u << bit);
            bt_status status = row_decode(f.slot, f.total, &got);
            if (status == BT_OK) status = row_prove(f.slot, f.total, f.checksums, CHUNKS);
            assert_true(status == BT_ERR_REQUEST_CORRUPT || status == BT_ERR_PEER_PROTOCOL);
            f.slot[i] ^= (uint8_t)(1u << bit);
        }
    }
    assert_int_equal(row_prove(f.slot, f.total, f.checksums, CHUNKS), BT_OK);
}

static void chunk_checksums_are_part_of_the_proof(void **state) {
    (void)state;
    fixture f;
    prepare(&f, ROW_MASK_SELECTED, 2, false);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        f.checksums[i] ^= 1;
        assert_int_equal(row_prove(f.slot, f.total, f.checksums, CHUNKS), BT_ERR_REQUEST_CORRUPT);
        f.checksums[i] ^= 1;
    }
    const uint32_t swapped = f.checksums[0];
    f.checksums[0] = f.checksums[1];
    f.checksums[1] = swapped;
    assert_int_equal(row_prove(f.slot, f.total, f.checksums, CHUNKS), BT_ERR_REQUEST_CORRUPT);
    assert_int_equal(row_prove(f.slot, f.total, f.checksums, CHUNKS - 1), BT_ERR_REQUEST_CORRUPT);
}

/* A row that is right for other chunks than it says. */
static void the_number_of_chunks_is_part_of_the_proof(void **state) {
    (void)state;
    static const uint8_t zero[4];
    fixture f;
    prepare(&f, ROW_MASK_SELECTED, 2, true);
    bt_store_le32(f.slot + 72, CHUNKS - 1);
    uint32_t crc = bt_crc32c(0, f.slot, 12);
    crc = bt_crc32c(crc, zero, sizeof zero);
    crc = bt_crc32c(crc, f.slot + 16, ROW_HEADER_BYTES - 16);
    crc = bt_crc32c(crc, f.checksums, sizeof f.checksums);
    crc = bt_crc32c(crc, f.slot + ROW_HEADER_BYTES, f.total - ROW_HEADER_BYTES);
    bt_store_le32(f.slot + 12, crc);
    assert_int_equal(row_prove(f.slot, f.total, f.checksums, CHUNKS), BT_ERR_REQUEST_CORRUPT);
}

static void every_cut_length_is_refused(void **state) {
    (void)state;
    fixture f;
    metadata_row got;
    prepare(&f, ROW_MASK_SUPPORT, 2, true);
    for (size_t bytes = 0; bytes < f.total; bytes++)
        assert_int_equal(row_decode(f.slot, bytes, &got), BT_ERR_REQUEST_CORRUPT);
    assert_int_equal(row_decode(f.slot, f.total + 8, &got), BT_ERR_REQUEST_CORRUPT);
    /* The same with the header's own total agreeing, so that the sections themselves are cut. */
    for (size_t bytes = ROW_HEADER_BYTES; bytes < f.total; bytes++) {
        bt_store_le32(f.slot + 8, (uint32_t)bytes);
        const bt_status status = row_decode(f.slot, bytes, &got);
        if (bytes == f.total - 16) { /* a whole row of the same shape without the logprob */
            assert_int_equal(status, BT_OK);
            assert_int_equal(row_prove(f.slot, bytes, f.checksums, CHUNKS), BT_ERR_REQUEST_CORRUPT);
        } else {
            assert_int_equal(status, BT_ERR_REQUEST_CORRUPT);
        }
    }
}

static void headers_that_lie_are_refused(void **state) {
    (void)state;
    fixture f;
    metadata_row got;
    static const struct {
        size_t at;
        uint32_t value;
        bt_status status;
    } lies[] = {
        {60, 3, BT_ERR_REQUEST_CORRUPT},           /* more support than the section holds */
        {60, 0xffffffffu, BT_ERR_REQUEST_CORRUPT}, /* so much that sizes would wrap */
        {60, 0, BT_ERR_REQUEST_CORRUPT},
        {92, ROW_MASK_OFF, BT_ERR_REQUEST_CORRUPT},
        {92, ROW_MASK_SUPPORT, BT_ERR_REQUEST_CORRUPT},
        {92, 3, BT_ERR_REQUEST_CORRUPT},
        {4, 128u << 16 | 1, BT_ERR_PEER_PROTOCOL},
        {4, 128u << 16 | 3, BT_ERR_PEER_PROTOCOL},
        {4, 64u << 16 | 2, BT_ERR_REQUEST_CORRUPT},
        {104, 1, BT_ERR_REQUEST_CORRUPT},
        {124, 1u << 31, BT_ERR_REQUEST_CORRUPT},
        {128, 99, BT_ERR_REQUEST_CORRUPT},
        {132, 0xfffffff8u, BT_ERR_REQUEST_CORRUPT},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        prepare(&f, ROW_MASK_SELECTED, 2, false);
        bt_store_le32(f.slot + lies[i].at, lies[i].value);
        assert_int_equal(row_decode(f.slot, f.total, &got), lies[i].status);
    }
}

static void encoder_refuses_what_cannot_be(void **state) {
    (void)state;
    fixture f;
    size_t total = 77;
    prepare(&f, ROW_MASK_SUPPORT, CAP, true);
    const size_t exact = f.total;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, exact, &total), BT_OK);
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, exact - 1, &total),
                     BT_ERR_CALLER_LIMIT);
    f.row.support_logprobs = NULL;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, exact, &total),
                     BT_ERR_CALLER_ARGUMENT);
    f.row.mask_mode = ROW_MASK_OFF;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, exact, &total),
                     BT_ERR_CALLER_ARGUMENT);
    f.row.mask_mode = 3;
    assert_int_equal(row_encode(&f.row, f.checksums, f.slot, exact, &total),
                     BT_ERR_CALLER_ARGUMENT);
}

static void sealing_sets_the_chunks(void **state) {
    (void)state;
    fixture f;
    metadata_row got;
    prepare(&f, ROW_MASK_SELECTED, 2, true);
    row_seal(f.slot, f.checksums, 2);
    assert_int_equal(row_prove(f.slot, f.total, f.checksums, 2), BT_OK);
    assert_int_equal(row_prove(f.slot, f.total, f.checksums, 3), BT_ERR_REQUEST_CORRUPT);
    assert_int_equal(row_decode(f.slot, f.total, &got), BT_OK);
    assert_int_equal(got.chunk_count, 2);
}

static void slots_hold_the_largest_row(void **state) {
    (void)state;
    static const uint32_t caps[] = {0, 1, 2, 15, 16, 17, 4096, 151936};
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        const size_t bytes = row_slot_bytes(caps[i]);
        assert_int_equal(bytes % ROW_SLOT_ALIGNMENT, 0);
        const size_t needed = ROW_HEADER_BYTES + 8 * (size_t)caps[i] + 48 + 8 +
                              8 * PROTO_TOP_LOGPROBS_MAX + 8 + 4 * PROTO_LOGPROB_IDS_MAX;
        assert_true(bytes >= needed);
        assert_true(bytes < needed + 16 + ROW_SLOT_ALIGNMENT);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape_round_trips),
        cmocka_unit_test(asked_logprobs_travel_beside_the_mask),
        cmocka_unit_test(more_than_may_be_asked_for_is_refused),
        cmocka_unit_test(more_than_may_be_asked_for_is_not_read),
        cmocka_unit_test(a_section_that_ends_behind_the_row_is_named),
        cmocka_unit_test(floats_travel_as_bits),
        cmocka_unit_test(layout_is_the_documented_one),
        cmocka_unit_test(every_byte_is_where_the_header_says),
        cmocka_unit_test(every_flipped_bit_is_found),
        cmocka_unit_test(chunk_checksums_are_part_of_the_proof),
        cmocka_unit_test(the_number_of_chunks_is_part_of_the_proof),
        cmocka_unit_test(every_cut_length_is_refused),
        cmocka_unit_test(headers_that_lie_are_refused),
        cmocka_unit_test(encoder_refuses_what_cannot_be),
        cmocka_unit_test(sealing_sets_the_chunks),
        cmocka_unit_test(slots_hold_the_largest_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
