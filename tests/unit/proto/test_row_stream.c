/* The row stream: records come back bit for bit however the bytes are cut, and bad ones are
 * refused. */
#include "proto/row_stream.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/little_endian.h"
#include "proto/message.h"
#include "proto/row.h"

enum { CAP = 9 };

static const int32_t ids[CAP] = {5, 4, 3, 2, 1, 100, 200, 300, 400};
static const float logprobs[CAP] = {-0.5f, -1, -2, -3, -4, -5, -6, -7, -0.0f};

static const row_top top[CAP] = {{9, -0.25f}, {8, -0.25f}, {-1, -5.0f}};

static token_row make_row(uint32_t mode, uint32_t count) {
    return (token_row){
        .token = -7 + (int32_t)count,
        .mask_mode = mode,
        .has_logprob = count % 2,
        .token_logprob = count % 2 != 0 ? -1.25f : 0.0f,
        .selected_logprob = mode != ROW_MASK_OFF ? -0.125f * (float)count : 0.0f,
        .support_count = mode != ROW_MASK_OFF ? count : 0,
        .support_size = mode != ROW_MASK_OFF ? count + count % 2 * 0x01020304u : 0,
        .weights_version = 0x1112131415161718u * mode + count,
        .support_ids = ids,
        .support_logprobs = mode == ROW_MASK_SUPPORT ? logprobs : NULL,
        .top_count = count % 4,
        .top = top,
        .id_logprob_count = count % 3,
        .id_logprobs = logprobs + mode,
    };
}

static void assert_row(const token_row *got, const token_row *wanted) {
    assert_int_equal(got->token, wanted->token);
    assert_int_equal(got->mask_mode, wanted->mask_mode);
    assert_int_equal(got->has_logprob, wanted->has_logprob);
    assert_memory_equal(&got->token_logprob, &wanted->token_logprob, sizeof(float));
    assert_memory_equal(&got->selected_logprob, &wanted->selected_logprob, sizeof(float));
    assert_int_equal(got->support_count, wanted->support_count);
    assert_int_equal(got->support_size, wanted->support_size);
    assert_true(got->weights_version == wanted->weights_version);
    assert_int_equal(got->support_logprobs == NULL, wanted->support_logprobs == NULL);
    assert_int_equal(got->top_count, wanted->top_count);
    assert_memory_equal(got->top, wanted->top, sizeof *top * wanted->top_count);
    assert_int_equal(got->id_logprob_count, wanted->id_logprob_count);
    assert_memory_equal(got->id_logprobs, wanted->id_logprobs, 4 * wanted->id_logprob_count);
    if (wanted->support_count == 0) return;
    assert_memory_equal(got->support_ids, ids, sizeof(int32_t) * wanted->support_count);
    if (wanted->support_logprobs != NULL)
        assert_memory_equal(got->support_logprobs, logprobs, sizeof(float) * wanted->support_count);
}

/* All modes and counts back to back, then read with every prefix length of the stream visible. */
static void a_stream_is_read_however_it_is_cut(void **state) {
    (void)state;
    _Alignas(4) uint8_t stream[4096];
    size_t written = 0;
    for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
        for (uint32_t count = 1; count <= CAP; count++) {
            const token_row row = make_row(mode, count);
            row_record_encode(&row, stream + written);
            written += row_record_bytes(token_row_widths(&row));
            assert_true(written <= sizeof stream);
        }
    }
    for (size_t visible = 0; visible <= written; visible++) {
        size_t read = 0;
        size_t used = 1;
        uint32_t records = 0;
        while (used != 0) {
            token_row got;
            assert_int_equal(row_record_decode(stream + read, visible - read, CAP, &got, &used),
                             BT_OK);
            if (used == 0) break;
            const token_row wanted = make_row(records / CAP, records % CAP + 1);
            assert_row(&got, &wanted);
            read += used;
            records++;
        }
        if (visible == written) assert_int_equal(records, 3 * CAP);
        assert_true(visible - read < row_record_bytes((row_widths){.mask_mode = ROW_MASK_SUPPORT,
                                                                   .support_count = CAP,
                                                                   .top_count = 3,
                                                                   .id_logprob_count = 2}));
    }
}

static void records_that_lie_are_refused(void **state) {
    (void)state;
    _Alignas(4) uint8_t record[256];
    static const struct {
        size_t at;
        uint32_t value;
    } lies[] = {
        {0, ROW_RECORD_HEADER_BYTES - 1},
        {0, ROW_RECORD_HEADER_BYTES},
        {24, 1},
        {24, PROTO_TOP_LOGPROBS_MAX + 1},
        {24, 1u << 16},
        {24, (PROTO_LOGPROB_IDS_MAX + 1u) << 16},
        {0, 0},
        {0, 0xffffffffu},
        {4, 3},
        {4, 0x200},
        {4, 1u << 16},
        {4, ROW_MASK_OFF},
        {20, CAP + 1},
        {20, 0},
        {20, 0x40000000u},
        {20, 0xffffffffu},
        {4, ROW_MASK_SUPPORT},
        {28, 1},
        {28, 0},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        token_row row = make_row(ROW_MASK_SELECTED, 2);
        token_row got;
        size_t used = 99;
        row_record_encode(&row, record);
        bt_store_le32(record + lies[i].at, lies[i].value);
        assert_int_equal(row_record_decode(record, sizeof record, CAP, &got, &used),
                         BT_ERR_PEER_PROTOCOL);
        assert_int_equal(used, 0);
        assert_non_null(row_record_fault(record, sizeof record, CAP));
    }
}

static void without_a_mask_there_is_no_size(void **state) {
    (void)state;
    _Alignas(4) uint8_t record[256];
    const token_row row = make_row(ROW_MASK_OFF, 0);
    token_row got;
    size_t used = 0;
    row_record_encode(&row, record);
    assert_int_equal(row_record_decode(record, sizeof record, CAP, &got, &used), BT_OK);
    bt_store_le32(record + 28, 1);
    assert_int_equal(row_record_decode(record, sizeof record, CAP, &got, &used),
                     BT_ERR_PEER_PROTOCOL);
    assert_string_equal(row_record_fault(record, sizeof record, CAP), "a support without a mask");
}

static void the_cap_is_the_reader_s(void **state) {
    (void)state;
    _Alignas(4) uint8_t record[256];
    const token_row row = make_row(ROW_MASK_SUPPORT, 5);
    token_row got;
    size_t used = 0;
    row_record_encode(&row, record);
    assert_int_equal(row_record_decode(record, sizeof record, 5, &got, &used), BT_OK);
    assert_int_equal(used, row_record_bytes(token_row_widths(&row)));
    assert_int_equal(row_record_decode(record, sizeof record, 4, &got, &used),
                     BT_ERR_PEER_PROTOCOL);
}

/* The documented offsets of the header, and what no writer can write. */
static void layout_is_the_documented_one(void **state) {
    (void)state;
    uint8_t record[256], wanted[ROW_RECORD_HEADER_BYTES] = {0};
    token_row row = {.token = 0x51,
                     .mask_mode = ROW_MASK_SUPPORT,
                     .has_logprob = 1,
                     .token_logprob = -1.5f,
                     .selected_logprob = -0.5f,
                     .support_count = 2,
                     .support_size = 0x52,
                     .weights_version = 0x0102030405060708u,
                     .support_ids = ids,
                     .support_logprobs = logprobs,
                     .top_count = 1,
                     .top = top,
                     .id_logprob_count = 3,
                     .id_logprobs = logprobs};
    row_record_encode(&row, record);
    bt_store_le32(wanted, 40 + 8 + 8 + 8 + 12);
    wanted[4] = ROW_MASK_SUPPORT;
    wanted[5] = 1;
    bt_store_le32(wanted + 8, 0x51);
    bt_store_le_float(wanted + 12, -1.5f);
    bt_store_le_float(wanted + 16, -0.5f);
    bt_store_le32(wanted + 20, 2);
    bt_store_le16(wanted + 24, 1);
    bt_store_le16(wanted + 26, 3);
    bt_store_le32(wanted + 28, 0x52);
    bt_store_le64(wanted + 32, 0x0102030405060708u);
    assert_memory_equal(record, wanted, sizeof wanted);
    assert_memory_equal(record + 40, ids, 8);
    assert_memory_equal(record + 48, logprobs, 8);
    assert_memory_equal(record + 56, top, 8);
    assert_memory_equal(record + 64, logprobs, 12);
    row.support_size = 1; /* below the count, or without a mask */
    row_record_encode(&row, record);
    assert_int_equal(bt_load_le32(record + 28), 2);
    row.mask_mode = ROW_MASK_OFF;
    row.support_count = 0;
    row_record_encode(&row, record);
    assert_int_equal(bt_load_le32(record + 28), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_is_read_however_it_is_cut),
        cmocka_unit_test(records_that_lie_are_refused),
        cmocka_unit_test(layout_is_the_documented_one),
        cmocka_unit_test(without_a_mask_there_is_no_size),
        cmocka_unit_test(the_cap_is_the_reader_s),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
