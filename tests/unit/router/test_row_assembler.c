/* Rows come out the same however frames cut the stream, and a stream that is not what it should be
 * is refused without waiting for it. */
#include "router/row_assembler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/little_endian.h"
#include "proto/message.h"
#include "proto/row.h"
#include "proto/row_stream.h"

enum { CAP = 5, ROWS = 7, STREAM_MAX = 4096 };

static uint8_t stream[STREAM_MAX], out[STREAM_MAX];
static _Alignas(16) uint8_t payload[STREAM_MAX + 1];
static bt_block_pool *pool;
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

enum { HELD_MAX = 2 * STREAM_MAX };

typedef struct run {
    row_assembler assembler;
    size_t bytes;
    uint32_t rows;
    row_bytes held[HELD_MAX]; /* what was handed on, kept */
    uint32_t held_count;
} run;

static run *begin(void) {
    static run r;
    r.bytes = 0;
    r.rows = r.held_count = 0;
    row_assembler_init(&r.assembler, &expect, pool);
    return &r;
}

/* Whole records only. */
static uint32_t count_rows(const row_bytes *in) {
    uint32_t rows = 0;
    for (size_t at = 0; at < in->count; rows++) {
        token_row row;
        size_t used;
        assert_int_equal(row_record_decode(in->bytes + at, in->count - at, CAP, &row, &used),
                         BT_OK);
        assert_true(used > 0);
        at += used;
    }
    return rows;
}

/* The payload lies in a block, which goes after the call; what is handed on is held. */
static void push(run *r, size_t from, size_t to, size_t alignment) {
    row_batches batches;
    bt_block *block = bt_block_acquire(pool, alignment + to - from + 1);
    assert_non_null(block);
    memcpy(block->bytes + alignment, stream + from, to - from);
    const row_bytes in = {.bytes = block->bytes + alignment, .count = to - from, .block = block};
    assert_int_equal(row_assembler_push(&r->assembler, &in, &batches), BT_OK);
    assert_in_range(batches.count, 0, 2);
    for (uint32_t i = 0; i < batches.count; i++) {
        const row_bytes *got = &batches.runs[i];
        assert_true(got->count > 0);
        assert_int_equal((uintptr_t)got->bytes % 4, 0);
        assert_true(got->bytes >= got->block->bytes);
        assert_true(got->bytes + got->count <= got->block->bytes + got->block->capacity);
        assert_int_equal(count_rows(got), batches.rows[i]);
        /* In place, if it began here and is aligned so. */
        const bool can_stay = r->bytes >= from && (alignment + r->bytes - from) % 4 == 0;
        assert_true((got->block == block) == can_stay);
        r->bytes += got->count;
        r->rows += batches.rows[i];
        bt_block_hold(got->block);
        r->held[r->held_count++] = *got;
    }
    bt_block_release(block);
}

/* All came, and what was held is what it was. */
static void end(run *r, size_t total) {
    size_t bytes = 0;
    assert_int_equal(row_assembler_pending(&r->assembler), 0);
    row_assembler_fini(&r->assembler);
    for (uint32_t i = 0; i < r->held_count; i++) {
        memcpy(out + bytes, r->held[i].bytes, r->held[i].count);
        bytes += r->held[i].count;
        bt_block_release(r->held[i].block);
    }
    assert_int_equal(r->rows, ROWS);
    assert_int_equal(bytes, total);
    assert_memory_equal(out, stream, total);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
}

static void every_split_gives_the_same_rows(void **state) {
    (void)state;
    const size_t total = make_stream();
    for (size_t first = 0; first <= total; first++) {
        for (size_t second = first; second <= total; second++) {
            run *r = begin();
            push(r, 0, first, 0);
            push(r, first, second, first % 5);
            push(r, second, total, second % 3);
            end(r, total);
        }
    }
}

static void single_bytes_give_the_same_rows(void **state) {
    (void)state;
    const size_t total = make_stream();
    run *r = begin();
    for (size_t i = 0; i < total; i++) {
        push(r, i, i + 1, i % 4);
        assert_int_equal(row_assembler_pending(&r->assembler), i + 1 - r->bytes);
    }
    end(r, total);
}

/* Of a payload that ends a row and goes on only that row is copied. */
static void only_what_is_cut_is_copied(void **state) {
    (void)state;
    const size_t total = make_stream();
    row_batches batches;
    row_assembler assembler;
    row_assembler_init(&assembler, &expect, pool);
    memcpy(payload, stream, total);
    const row_bytes first = {.bytes = payload, .count = 8};
    const row_bytes rest = {.bytes = payload + 8, .count = total - 8};
    assert_int_equal(row_assembler_push(&assembler, &first, &batches), BT_OK);
    assert_int_equal(batches.count, 0);
    assert_int_equal(row_assembler_push(&assembler, &rest, &batches), BT_OK);
    assert_int_equal(batches.count, 2);
    assert_int_equal(batches.rows[0], 1);
    assert_non_null(batches.runs[0].block);
    assert_int_equal(batches.rows[1], ROWS - 1);
    assert_ptr_equal(batches.runs[1].bytes, payload + batches.runs[0].count);
    assert_null(batches.runs[1].block); /* the caller's memory is not in a block */
    row_assembler_fini(&assembler);
}

/* The first three records (of one, two and three entries) with four bytes changed, in one frame and
 * byte by byte: NULL, or why they are refused. */
static void push_changed(size_t at, uint32_t value, const char *why) {
    const size_t count = 3 * ROW_RECORD_HEADER_BYTES + (1 + 2 + 3) * 2 * sizeof(uint32_t);
    for (size_t step = count; step > 0; step = step == count ? 1 : 0) {
        row_assembler assembler;
        row_batches batches;
        bt_status status = BT_OK;
        uint32_t rows = 0;
        (void)make_stream();
        bt_store_le32(stream + at, value);
        row_assembler_init(&assembler, &expect, pool);
        for (size_t i = 0; i < count && status == BT_OK; i += step) {
            const row_bytes part = {.bytes = payload, .count = step};
            memcpy(payload, stream + i, step);
            status = row_assembler_push(&assembler, &part, &batches);
            for (uint32_t k = 0; status == BT_OK && k < batches.count; k++)
                rows += batches.rows[k];
        }
        assert_int_equal(status, why == NULL ? BT_OK : BT_ERR_PEER_PROTOCOL);
        if (why == NULL) {
            assert_int_equal(rows, 3);
        } else if (strstr(assembler.fault, why) == NULL) {
            fail_msg("'%s' is not '%s'", assembler.fault, why);
        }
        row_assembler_fini(&assembler);
    }
}

static void what_is_not_expected_is_refused_by_name(void **state) {
    (void)state;
    enum {
        SECOND = ROW_RECORD_HEADER_BYTES + 8,
        THIRD = SECOND + ROW_RECORD_HEADER_BYTES + 16,
        IDS = THIRD + ROW_RECORD_HEADER_BYTES,
        LOGPROBS = IDS + 12,
    };
    static const struct {
        size_t at;
        uint32_t value;
        const char *why;
    } lies[] = {
        {THIRD, THIRD - SECOND + 8, NULL}, /* what it is */
        {THIRD, 0, "length"},
        {THIRD, ROW_RECORD_HEADER_BYTES - 1, "length"},
        {THIRD, UINT32_MAX, "length"},
        {THIRD, THIRD - SECOND, "another length"}, /* bytes behind it that are not its own */
        {THIRD, THIRD - SECOND + 12, "another length"},
        {THIRD + 4, 1u << 8 | ROW_MASK_OFF, "a support without a mask"},
        {THIRD + 4, 1u << 8 | ROW_MASK_SELECTED, "another length"},
        {THIRD + 4, 1u << 8 | 3, "unknown mask mode"},
        {THIRD + 4, 2u << 8 | ROW_MASK_SUPPORT, "unknown bits"},
        {THIRD + 4, 1u << 16 | 1u << 8 | ROW_MASK_SUPPORT, "unknown bits"},
        {THIRD + 4, ROW_MASK_SUPPORT, "missing or not asked for"},
        {THIRD + 8, 100, "a token outside"},
        {THIRD + 8, UINT32_MAX, "a token outside"},
        {THIRD + 8, 99, "not in its support"},
        {THIRD + 12, 0x7fc00000u, "a token log-probability"},
        {THIRD + 12, 0xff800000u, "a token log-probability"},
        {THIRD + 16, 0x7fc00000u, "a selected log-probability that is none"},
        {THIRD + 16, 0xbf800000u, "not its entry's"}, /* -1, of another entry */
        {THIRD + 20, CAP + 1, "wider than the cap"},
        {THIRD + 20, UINT32_MAX, "wider than the cap"},
        {THIRD + 20, 0, "a mask without a support"},
        {THIRD + 20, 2, "another length"},
        {THIRD + 24, 1, "another length"},
        {THIRD + 24, PROTO_TOP_LOGPROBS_MAX + 1, "too many top"},
        {THIRD + 24, (PROTO_LOGPROB_IDS_MAX + 1u) << 16, "too many asked"},
        {THIRD + 28, 2, "size below"},
        {THIRD + 28, 0, "size below"},
        {THIRD + 28, 4, "exact mode"},
        {THIRD + 28, 101, "larger than the vocabulary"},
        {THIRD + 32, UINT32_MAX, NULL}, /* epochs are free */
        {THIRD + 36, UINT32_MAX, NULL},
        {IDS + 8, 100, "a support id outside"},
        {IDS + 4, UINT32_MAX, "a support id outside"},
        {IDS, 50, "not in its support"},
        {LOGPROBS + 8, 0x7f800000u, "a support log-probability"},
        {LOGPROBS + 4, 0xffc00000u, "a support log-probability"},
        {LOGPROBS, 0x3f000000u, "a support log-probability"},
        {LOGPROBS, 0xbe800000u, "not its entry's"},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++)
        push_changed(lies[i].at, lies[i].value, lies[i].why);
}

/* Four bytes are enough for a length that cannot be. */
static void an_impossible_record_is_not_waited_for(void **state) {
    (void)state;
    static const uint32_t lengths[] = {0, ROW_RECORD_HEADER_BYTES - 1, 1u << 30};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        row_assembler assembler;
        row_batches batches;
        const row_bytes three = {.bytes = payload, .count = 3};
        const row_bytes one = {.bytes = payload + 3, .count = 1};
        bt_store_le32(payload, lengths[i]);
        row_assembler_init(&assembler, &expect, pool);
        assert_int_equal(row_assembler_push(&assembler, &three, &batches), BT_OK);
        assert_int_equal(row_assembler_push(&assembler, &one, &batches), BT_ERR_PEER_PROTOCOL);
        assert_string_equal(assembler.fault, "a record of an impossible length");
        row_assembler_fini(&assembler);
    }
}

/* Rows that are cut come through where they were asked for, at the cap alone. */
static void bounded_rows_are_cut_at_the_cap(void **state) {
    (void)state;
    static const struct {
        uint32_t count, size, is_bounded;
        const char *why;
    } cases[] = {
        {CAP, CAP + 1, 1, NULL},
        {CAP, 100, 1, NULL},
        {CAP, CAP, 1, NULL},
        {2, 2, 1, NULL},
        {CAP, CAP + 1, 0, "exact mode"},
        {CAP - 1, CAP, 1, "truncated below the cap"},
        {CAP, 101, 1, "larger than the vocabulary"},
    };
    static const int32_t ids[CAP] = {3, 98, 97, 96, 95};
    static const float logprobs[CAP] = {-0.5f, -1.0f, -2.0f, -3.0f, -4.0f};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        row_expectation wanted = expect;
        row_assembler assembler;
        row_batches batches;
        wanted.mask_bounded = cases[i].is_bounded;
        const token_row row = {.token = 3,
                               .mask_mode = ROW_MASK_SUPPORT,
                               .has_logprob = 1,
                               .selected_logprob = -0.5f,
                               .support_count = cases[i].count,
                               .support_size = cases[i].size,
                               .support_ids = ids,
                               .support_logprobs = logprobs};
        row_record_encode(&row, payload);
        row_assembler_init(&assembler, &wanted, pool);
        const row_bytes in = {.bytes = payload, .count = row_record_bytes(token_row_widths(&row))};
        const bt_status status = row_assembler_push(&assembler, &in, &batches);
        assert_int_equal(status, cases[i].why == NULL ? BT_OK : BT_ERR_PEER_PROTOCOL);
        if (cases[i].why != NULL && strstr(assembler.fault, cases[i].why) == NULL)
            fail_msg("'%s' is not '%s'", assembler.fault, cases[i].why);
        row_assembler_fini(&assembler);
    }
}

/* One plain row with that many log-probabilities besides, the last top one of id `last`. */
static bt_status push_wide(const row_expectation *wanted, uint32_t tops, uint32_t ids,
                           int32_t last) {
    row_top top[8];
    const float logprobs[8] = {-1.0f};
    row_assembler assembler;
    row_batches batches;
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
    row_assembler_init(&assembler, wanted, pool);
    const row_bytes in = {.bytes = payload, .count = row_record_bytes(token_row_widths(&row))};
    const bt_status status = row_assembler_push(&assembler, &in, &batches);
    if (status == BT_OK) assert_int_equal(batches.runs[0].count, in.count);
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

/* What is pending is at most one record, in a block of its size, and is given back. */
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
    row_batches batches;
    row_assembler_init(&assembler, &wide, pool);
    row_record_encode(&row, record);
    const size_t first = PROTO_FRAME_PAYLOAD_MAX;
    const row_bytes parts[2] = {{.bytes = record, .count = first},
                                {.bytes = record + first, .count = sizeof record - first}};
    for (int round = 0; round < 3; round++) {
        assert_int_equal(row_assembler_push(&assembler, &parts[0], &batches), BT_OK);
        assert_int_equal(batches.count, 0);
        assert_true(bt_block_pool_used_bytes(pool) <= sizeof record + sizeof record / 8);
        assert_int_equal(row_assembler_push(&assembler, &parts[1], &batches), BT_OK);
        assert_int_equal(batches.count, 1);
        assert_memory_equal(batches.runs[0].bytes, record, sizeof record);
        assert_true(bt_block_pool_used_bytes(pool) <= sizeof record + sizeof record / 8);
    }
    assert_int_equal(row_assembler_push(&assembler, &(row_bytes){.count = 0}, &batches), BT_OK);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    row_assembler_fini(&assembler);
}

/* Its block grows when the length is known, and what was there moves along. */
static void a_wide_record_may_be_cut_in_its_length(void **state) {
    (void)state;
    enum { WIDE = 1000 };
    static uint8_t record[ROW_RECORD_HEADER_BYTES + 8 * WIDE];
    static int32_t ids[WIDE];
    static float logprobs[WIDE];
    const row_expectation wide = {.cap = WIDE, .mask_mode = ROW_MASK_SUPPORT};
    const token_row row = {.mask_mode = ROW_MASK_SUPPORT,
                           .support_count = WIDE,
                           .support_ids = ids,
                           .support_logprobs = logprobs};
    row_record_encode(&row, record);
    for (size_t cut = 1; cut <= 8; cut++) {
        row_assembler assembler;
        row_batches batches;
        row_assembler_init(&assembler, &wide, pool);
        for (size_t at = 0; at < cut; at++) {
            const row_bytes byte = {.bytes = record + at, .count = 1};
            assert_int_equal(row_assembler_push(&assembler, &byte, &batches), BT_OK);
            assert_int_equal(row_assembler_pending(&assembler), at + 1);
        }
        const row_bytes rest = {.bytes = record + cut, .count = sizeof record - cut};
        assert_int_equal(row_assembler_push(&assembler, &rest, &batches), BT_OK);
        assert_int_equal(batches.count, 1);
        assert_int_equal(batches.runs[0].count, sizeof record);
        assert_memory_equal(batches.runs[0].bytes, record, sizeof record);
        row_assembler_fini(&assembler);
        assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    }
}

#ifdef BT_FAULT
/* The stream in payloads of `size` bytes, aligned or not, while the nth allocation fails. What was
 * handed on before is whole, and nothing of what was pending is left. */
static bool run_out_of_memory(size_t total, size_t size, size_t alignment, uint64_t nth) {
    const bt_block_pool_options none = {.idle_bytes_max = 0};
    bt_block_pool *own;
    row_assembler assembler;
    bt_status status = BT_OK;
    uint32_t rows = 0;
    assert_int_equal(bt_block_pool_create(&none, &own), BT_OK);
    row_assembler_init(&assembler, &expect, own);
    bt_fault_set(BT_FAULT_ALLOC, nth);
    for (size_t at = 0; at < total && status == BT_OK; at += size) {
        row_batches batches;
        const size_t count = total - at < size ? total - at : size;
        memcpy(payload + alignment, stream + at, count);
        const row_bytes in = {.bytes = payload + alignment, .count = count};
        status = row_assembler_push(&assembler, &in, &batches);
        for (uint32_t i = 0; status == BT_OK && i < batches.count; i++)
            rows += count_rows(&batches.runs[i]);
    }
    const bool was_reached = bt_fault_visits(BT_FAULT_ALLOC) >= nth;
    bt_fault_set(BT_FAULT_ALLOC, 0);
    assert_int_equal(status, was_reached ? BT_ERR_WORKER_MEMORY : BT_OK);
    if (was_reached) {
        assert_in_range(rows, 0, ROWS - 1);
    } else {
        assert_int_equal(rows, ROWS);
        assert_int_equal(row_assembler_pending(&assembler), 0);
    }
    row_assembler_fini(&assembler);
    assert_int_equal(bt_block_pool_used_bytes(own), 0);
    bt_block_pool_destroy(own);
    return was_reached;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 7, 44, 100, STREAM_MAX};
    const size_t total = make_stream();
    uint64_t failures = 0;
    for (uint32_t i = 0; i < 10; i++) {
        uint64_t nth = 1;
        while (run_out_of_memory(total, sizes[i / 2], i % 2, nth))
            nth++;
        failures += nth - 1;
    }
    assert_true(failures > 30);
}
#endif

static int make_pool(void **state) {
    (void)state;
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    return bt_block_pool_create(&options, &pool) == BT_OK ? 0 : -1;
}

static int destroy_pool(void **state) {
    (void)state;
    bt_block_pool_destroy(pool);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_split_gives_the_same_rows),
        cmocka_unit_test(single_bytes_give_the_same_rows),
        cmocka_unit_test(only_what_is_cut_is_copied),
        cmocka_unit_test(what_is_not_expected_is_refused_by_name),
        cmocka_unit_test(an_impossible_record_is_not_waited_for),
        cmocka_unit_test(bounded_rows_are_cut_at_the_cap),
        cmocka_unit_test(log_probabilities_are_as_many_as_asked_for),
        cmocka_unit_test(memory_is_bounded),
        cmocka_unit_test(a_wide_record_may_be_cut_in_its_length),
#ifdef BT_FAULT
        cmocka_unit_test(every_allocation_may_fail),
#endif
    };
    return cmocka_run_group_tests(tests, make_pool, destroy_pool);
}
