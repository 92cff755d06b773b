/* Rows come out the same however frames cut the stream, and a stream that is not what it should be
 * is refused without waiting for it. */
#include "router/row_assembler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "proto/message.h"
#include "proto/row.h"
#include "proto/row_stream.h"

enum { CAP = 5, ROWS = 7, STREAM_MAX = 4096 };

static uint8_t stream[STREAM_MAX], out[STREAM_MAX];
/* One byte more in front, so that payloads of every alignment can be made. */
static _Alignas(16) uint8_t payload[STREAM_MAX + 16];
static const row_expectation expect = {
    .cap = CAP, .mask_mode = ROW_MASK_SUPPORT, .has_logprob = 1, .vocab_size = 100};

static size_t make_stream(void) {
    static const float logprobs[CAP] = {-0.5f, -1.0f, -2.0f, -3.0f, -4.0f};
    size_t used = 0;
    for (uint32_t i = 0; i < ROWS; i++) {
        const int32_t ids[CAP] = {(int32_t)i, 98, 97, 96, 95};
        const token_row row = {.token = (int32_t)i,
                               .mask_mode = ROW_MASK_SUPPORT,
                               .has_logprob = 1,
                               .token_logprob = -0.25f,
                               .selected_logprob = -0.5f,
                               .support_count = 1 + i % CAP,
                               .support_ids = ids,
                               .support_logprobs = logprobs};
        row_record_encode(&row, stream + used);
        used += row_record_bytes(
            (row_widths){.mask_mode = ROW_MASK_SUPPORT, .support_count = row.support_count});
    }
    return used;
}

typedef struct run {
    row_assembler assembler;
    size_t bytes;
    uint32_t rows;
} run;

static void push(run *r, size_t from, size_t to, size_t alignment) {
    row_batch batch;
    memcpy(payload + alignment, stream + from, to - from);
    assert_int_equal(row_assembler_push(&r->assembler, payload + alignment, to - from, &batch),
                     BT_OK);
    if (batch.count == 0) {
        assert_int_equal(batch.bytes, 0);
        return;
    }
    assert_int_equal((uintptr_t)batch.records % 4, 0);
    memcpy(out + r->bytes, batch.records, batch.bytes);
    r->bytes += batch.bytes;
    r->rows += batch.count;
    /* Whole records only. */
    size_t at = 0;
    while (at < batch.bytes) {
        token_row row;
        size_t used;
        assert_int_equal(row_record_decode(batch.records + at, batch.bytes - at, CAP, &row, &used),
                         BT_OK);
        assert_true(used > 0);
        at += used;
    }
}

static void every_split_gives_the_same_rows(void **state) {
    (void)state;
    const size_t total = make_stream();
    for (size_t first = 0; first <= total; first++) {
        for (size_t second = first; second <= total; second++) {
            run r = {.bytes = 0};
            row_assembler_init(&r.assembler, &expect);
            push(&r, 0, first, 0);
            push(&r, first, second, first % 5);
            push(&r, second, total, second % 3);
            assert_int_equal(r.rows, ROWS);
            assert_int_equal(r.bytes, total);
            assert_memory_equal(out, stream, total);
            assert_int_equal(row_assembler_pending(&r.assembler), 0);
            row_assembler_fini(&r.assembler);
        }
    }
}

static void single_bytes_give_the_same_rows(void **state) {
    (void)state;
    const size_t total = make_stream();
    run r = {.bytes = 0};
    row_assembler_init(&r.assembler, &expect);
    for (size_t i = 0; i < total; i++) {
        push(&r, i, i + 1, i % 4);
        assert_int_equal(row_assembler_pending(&r.assembler), i + 1 - r.bytes);
    }
    assert_int_equal(r.rows, ROWS);
    assert_memory_equal(out, stream, total);
    row_assembler_fini(&r.assembler);
}

static bt_status push_broken(size_t at, uint8_t value, size_t count) {
    row_assembler assembler;
    row_batch batch;
    (void)make_stream();
    stream[at] = value;
    memcpy(payload, stream, count);
    row_assembler_init(&assembler, &expect);
    const bt_status status = row_assembler_push(&assembler, payload, count, &batch);
    row_assembler_fini(&assembler);
    return status;
}

static void what_is_not_expected_is_refused(void **state) {
    (void)state;
    const size_t first =
        row_record_bytes((row_widths){.mask_mode = ROW_MASK_SUPPORT, .support_count = 1});
    assert_int_equal(push_broken(0, stream[0], first), BT_OK);
    assert_int_equal(push_broken(0, 0, first), BT_ERR_PEER_PROTOCOL);    /* too short */
    assert_int_equal(push_broken(3, 0xff, first), BT_ERR_PEER_PROTOCOL); /* 4 GiB */
    assert_int_equal(push_broken(3, 0x01, 4), BT_ERR_PEER_PROTOCOL);     /* already known */
    assert_int_equal(push_broken(4, ROW_MASK_OFF, first), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_broken(4, ROW_MASK_SELECTED, first), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_broken(5, 0, first), BT_ERR_PEER_PROTOCOL);        /* no logprob */
    assert_int_equal(push_broken(8, 100, first), BT_ERR_PEER_PROTOCOL);      /* no such token */
    assert_int_equal(push_broken(11, 0x80, first), BT_ERR_PEER_PROTOCOL);    /* a negative one */
    assert_int_equal(push_broken(20, CAP + 1, first), BT_ERR_PEER_PROTOCOL); /* above the cap */
}

/* One plain row with that many log-probabilities besides, the last top one of id `last`. */
static bt_status push_wide(const row_expectation *wanted, uint32_t tops, uint32_t ids,
                           int32_t last) {
    row_top top[8];
    const float logprobs[8] = {-1.0f};
    row_assembler assembler;
    row_batch batch;
    for (int32_t i = 0; i < 8; i++)
        top[i] = (row_top){.id = i, .logprob = -1.0f};
    if (tops > 0) top[tops - 1].id = last;
    const token_row row = {.token = 1,
                           .has_logprob = 1,
                           .top_count = tops,
                           .top = top,
                           .id_logprob_count = ids,
                           .id_logprobs = logprobs};
    row_record_encode(&row, payload);
    row_assembler_init(&assembler, wanted);
    const size_t bytes = row_record_bytes(token_row_widths(&row));
    const bt_status status = row_assembler_push(&assembler, payload, bytes, &batch);
    if (status == BT_OK) assert_int_equal(batch.bytes, bytes);
    row_assembler_fini(&assembler);
    return status;
}

static void log_probabilities_are_as_many_as_asked_for(void **state) {
    (void)state;
    row_expectation wanted = {
        .cap = CAP, .has_logprob = 1, .vocab_size = 100, .top_count = 5, .id_logprob_count = 2};
    assert_int_equal(push_wide(&wanted, 5, 2, 99), BT_OK);
    assert_int_equal(push_wide(&wanted, 4, 2, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_wide(&wanted, 6, 2, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_wide(&wanted, 0, 2, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_wide(&wanted, 5, 1, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_wide(&wanted, 5, 3, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_wide(&wanted, 5, 2, 100), BT_ERR_PEER_PROTOCOL); /* no such token */
    assert_int_equal(push_wide(&wanted, 5, 2, -1), BT_ERR_PEER_PROTOCOL);
    wanted.vocab_size = 4; /* there are no more */
    assert_int_equal(push_wide(&wanted, 4, 2, 3), BT_OK);
    assert_int_equal(push_wide(&wanted, 3, 2, 0), BT_ERR_PEER_PROTOCOL);
    wanted.vocab_size = 0; /* not known */
    assert_int_equal(push_wide(&wanted, 5, 2, 1 << 20), BT_OK);
    assert_int_equal(push_wide(&wanted, 4, 2, 0), BT_ERR_PEER_PROTOCOL);
    wanted.top_count = wanted.id_logprob_count = 0;
    assert_int_equal(push_wide(&wanted, 1, 0, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(push_wide(&wanted, 0, 1, 0), BT_ERR_PEER_PROTOCOL);
}

/* A whole frame behind the largest unfinished record still fits, and memory is given back. */
static void memory_is_bounded(void **state) {
    (void)state;
    enum { WIDE = 40000 };
    static uint8_t record[ROW_RECORD_HEADER_BYTES + 8 * WIDE];
    static int32_t ids[WIDE];
    static float logprobs[WIDE]; /* an id and a log-probability of 0 all along */
    const row_expectation wide = {.cap = WIDE, .mask_mode = ROW_MASK_SUPPORT};
    const token_row row = {.mask_mode = ROW_MASK_SUPPORT,
                           .support_count = WIDE,
                           .support_ids = ids,
                           .support_logprobs = logprobs};
    row_assembler assembler;
    row_batch batch;
    row_assembler_init(&assembler, &wide);
    row_record_encode(&row, record);
    for (int round = 0; round < 3; round++) {
        const size_t left = sizeof record - PROTO_FRAME_PAYLOAD_MAX;
        assert_int_equal(row_assembler_push(&assembler, record, PROTO_FRAME_PAYLOAD_MAX, &batch),
                         BT_OK);
        assert_int_equal(batch.count, 0);
        assert_int_equal(
            row_assembler_push(&assembler, record + PROTO_FRAME_PAYLOAD_MAX, left, &batch), BT_OK);
        assert_int_equal(batch.count, 1);
        assert_memory_equal(batch.records, record, sizeof record);
    }
    assert_true(assembler.capacity <= 2 * (sizeof record + PROTO_FRAME_PAYLOAD_MAX));
    assert_int_equal(row_assembler_push(&assembler, record, 0, &batch), BT_OK);
    assert_int_equal(assembler.capacity, 0);
    row_assembler_fini(&assembler);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_split_gives_the_same_rows),
        cmocka_unit_test(single_bytes_give_the_same_rows),
        cmocka_unit_test(what_is_not_expected_is_refused),
        cmocka_unit_test(log_probabilities_are_as_many_as_asked_for),
        cmocka_unit_test(memory_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
