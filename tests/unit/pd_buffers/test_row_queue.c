/* Decode's row queue: what goes in comes out as records, bit for bit and once; bounds hold. */
#include "pd_buffers/row_queue.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { CAP = 40, ROWS = 100, BYTES_MAX = 1 << 20 };

static int32_t ids[ROWS][CAP];
static float logprobs[ROWS][CAP];
static uint8_t stream[BYTES_MAX];
static bt_block_pool *pool;

static int fill(void **state) {
    (void)state;
    for (uint32_t row = 0; row < ROWS; row++) {
        for (uint32_t i = 0; i < CAP; i++) {
            const uint32_t bits = (row * 2654435761u) ^ (i * 40503u + 1);
            ids[row][i] = (int32_t)(bits & 0xfffff);
            memcpy(&logprobs[row][i], &bits, sizeof bits); /* NaNs included: bits are bits */
        }
    }
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    return bt_block_pool_create(&options, &pool) == BT_OK ? 0 : -1;
}

static int end(void **state) {
    (void)state;
    if (bt_block_pool_used_bytes(pool) != 0) return -1;
    bt_block_pool_destroy(pool);
    return 0;
}

static uint32_t count_of(uint32_t row) {
    return 1 + row * 7 % CAP;
}

static token_row make_row(uint32_t mode, uint32_t row) {
    return (token_row){
        .token = (int32_t)row * 3 - 5,
        .mask_mode = mode,
        .has_logprob = row % 2,
        .token_logprob = logprobs[row][0],
        .selected_logprob = logprobs[row][1],
        .support_count = mode == ROW_MASK_OFF ? 0 : count_of(row),
        .support_size = mode == ROW_MASK_OFF ? 0 : count_of(row) + row % 3 * 100000u,
        .weights_version = (uint64_t)row << 33 | mode,
        .support_ids = mode == ROW_MASK_OFF ? NULL : ids[row],
        .support_logprobs = mode == ROW_MASK_SUPPORT ? logprobs[row] : NULL,
        .top_count = mode, /* what is asked for beside the mask: the same of every row */
        .top = (const row_top *)(const void *)ids[row],
        .id_logprob_count = 2 * mode,
        .id_logprobs = logprobs[row] + 1,
    };
}

static row_queue *make_queue(uint32_t mode) {
    const row_queue_options options = {.blocks = pool,
                                       .mask_mode = mode,
                                       .cap = CAP,
                                       .top_logprobs = mode,
                                       .logprob_ids = 2 * mode,
                                       .bytes_max = BYTES_MAX};
    row_queue *queue = NULL;
    assert_int_equal(row_queue_create(&options, &queue), BT_OK);
    return queue;
}

/* Reads `count` records from number `first` on, and nothing behind them. */
static void assert_stream(uint32_t mode, size_t bytes, uint32_t first, uint32_t count) {
    size_t at = 0;
    for (uint32_t row = first; row < first + count; row++) {
        const token_row wanted = make_row(mode, row);
        token_row got;
        size_t used = 0;
        assert_int_equal(row_record_decode(stream + at, bytes - at, CAP, &got, &used), BT_OK);
        assert_int_not_equal(used, 0);
        at += used;
        assert_int_equal(got.token, wanted.token);
        assert_int_equal(got.has_logprob, wanted.has_logprob);
        assert_memory_equal(&got.token_logprob, &wanted.token_logprob, sizeof(float));
        assert_memory_equal(&got.selected_logprob, &wanted.selected_logprob, sizeof(float));
        assert_int_equal(got.support_count, wanted.support_count);
        assert_int_equal(got.support_size, wanted.support_size);
        assert_true(got.weights_version == wanted.weights_version);
        assert_int_equal(got.top_count, wanted.top_count);
        assert_memory_equal(got.top, wanted.top, sizeof *got.top * wanted.top_count);
        assert_int_equal(got.id_logprob_count, wanted.id_logprob_count);
        assert_memory_equal(got.id_logprobs, wanted.id_logprobs, 4 * wanted.id_logprob_count);
        if (wanted.support_count == 0) continue;
        assert_memory_equal(got.support_ids, wanted.support_ids, 4 * wanted.support_count);
        if (mode == ROW_MASK_SUPPORT)
            assert_memory_equal(got.support_logprobs, wanted.support_logprobs,
                                4 * wanted.support_count);
    }
    assert_int_equal(at, bytes);
}

/* All that is queued, in parts of at most `part_max` bytes. */
static size_t take_all(row_queue *queue, size_t part_max) {
    size_t bytes = 0;
    row_slice part;
    while (row_queue_take(queue, part_max, &part)) {
        assert_in_range(part.count, 1, part_max);
        assert_true(part.bytes >= part.block->bytes);
        assert_true(part.bytes + part.count <= part.block->bytes + part.block->used);
        memcpy(stream + bytes, part.bytes, part.count);
        bytes += part.count;
        bt_block_release(part.block);
    }
    assert_int_equal(row_queue_bytes(queue), 0);
    assert_int_equal(row_queue_taken(queue), row_queue_pushed(queue));
    return bytes;
}

static void rows_come_out_as_they_went_in(void **state) {
    (void)state;
    for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
        row_queue *queue = make_queue(mode);
        uint32_t next = 0;
        /* Batches of growing size, so that each reuses and outgrows the memory of the last. */
        for (uint32_t batch = 1; next + batch <= ROWS; batch += 3) {
            for (uint32_t i = 0; i < batch; i++) {
                const token_row row = make_row(mode, next + i);
                assert_int_equal(row_queue_push(queue, &row), BT_OK);
            }
            assert_int_equal(row_queue_pushed(queue), next + batch);
            const size_t bytes = row_queue_bytes(queue);
            assert_int_equal(take_all(queue, BYTES_MAX), bytes);
            assert_stream(mode, bytes, next, batch);
            next += batch;
            assert_int_equal(take_all(queue, 1), 0);
        }
        row_queue_destroy(queue);
    }
}

/* However the stream is cut, by credit or frames, it is the same; what is cut counts as taken with
 * its last byte. */
static void parts_of_any_size_give_the_same_stream(void **state) {
    (void)state;
    static const size_t parts[] = {1, 3, 4, 39, 40, 41, 100, 333, 4096};
    for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
        for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++) {
            row_queue *queue = make_queue(mode);
            size_t total = 0;
            for (uint32_t i = 0; i < ROWS; i++) {
                const token_row row = make_row(mode, i);
                assert_int_equal(row_queue_push(queue, &row), BT_OK);
                total += row_record_bytes(token_row_widths(&row));
            }
            assert_int_equal(take_all(queue, parts[p]), total);
            assert_stream(mode, total, 0, ROWS);
            row_queue_destroy(queue);
        }
    }
}

/* A taker gets whole rows as long as one fits, so that frames begin and end with rows. */
static void whole_rows_are_taken_where_they_fit(void **state) {
    (void)state;
    row_queue *queue = make_queue(ROW_MASK_SUPPORT);
    size_t bytes[3];
    row_slice part;
    for (uint32_t i = 0; i < 3; i++) {
        const token_row row = make_row(ROW_MASK_SUPPORT, i);
        assert_int_equal(row_queue_push(queue, &row), BT_OK);
        bytes[i] = row_record_bytes(token_row_widths(&row));
    }
    assert_true(row_queue_take(queue, bytes[0] + bytes[1] + 5, &part));
    assert_int_equal(part.count, bytes[0] + bytes[1]);
    assert_int_equal((uintptr_t)part.bytes % 4, 0);
    assert_int_equal(row_queue_taken(queue), 2);
    bt_block_release(part.block);
    assert_true(row_queue_take(queue, bytes[2] - 1, &part)); /* less than a row: its beginning */
    assert_int_equal(part.count, bytes[2] - 1);
    assert_int_equal(row_queue_taken(queue), 2);
    bt_block_release(part.block);
    assert_true(row_queue_take(queue, bytes[2], &part));
    assert_int_equal(part.count, 1);
    assert_int_equal(row_queue_taken(queue), 3);
    bt_block_release(part.block);
    row_queue_destroy(queue);
}

/* What was handed out stays what it was while the queue goes on, and after it ended. */
static void parts_outlive_what_follows(void **state) {
    (void)state;
    row_queue *queue = make_queue(ROW_MASK_SUPPORT);
    row_slice parts[ROWS];
    for (uint32_t i = 0; i < ROWS; i++) {
        const token_row row = make_row(ROW_MASK_SUPPORT, i);
        assert_int_equal(row_queue_push(queue, &row), BT_OK);
        assert_true(row_queue_take(queue, BYTES_MAX, &parts[i]));
    }
    row_queue_destroy(queue);
    size_t bytes = 0;
    for (uint32_t i = 0; i < ROWS; i++) {
        memcpy(stream + bytes, parts[i].bytes, parts[i].count);
        bytes += parts[i].count;
        bt_block_release(parts[i].block);
    }
    assert_stream(ROW_MASK_SUPPORT, bytes, 0, ROWS);
}

/* A queue whose rows are written at once needs one block, again and again. */
static void an_emptied_queue_uses_its_memory_again(void **state) {
    (void)state;
    row_queue *queue = make_queue(ROW_MASK_SUPPORT);
    const size_t before = bt_block_pool_used_bytes(pool);
    for (uint32_t i = 0; i < 50 * ROWS; i++) {
        const token_row row = make_row(ROW_MASK_SUPPORT, i % ROWS);
        assert_int_equal(row_queue_push(queue, &row), BT_OK);
        assert_true(bt_block_pool_used_bytes(pool) - before <= ROW_BLOCK_BYTES);
        (void)take_all(queue, BYTES_MAX);
    }
    row_queue_destroy(queue);
}

/* Draws row `number` into the reserved room as the sampler does, log-probabilities right behind the
 * ids or as far away as the cap, and pushes it. */
static void draw_in_place(row_queue *queue, uint32_t mode, uint32_t number, bool is_joined) {
    int32_t *room = NULL;
    token_row row = make_row(mode, number);
    const uint32_t count = row.support_count;
    assert_int_equal(row_queue_reserve(queue, &room), BT_OK);
    float *behind = (float *)(void *)(room + (is_joined ? count : CAP));
    memcpy(room, row.support_ids, count * sizeof *room);
    row.support_ids = room;
    if (mode == ROW_MASK_SUPPORT) {
        memcpy(behind, row.support_logprobs, count * sizeof *behind);
        row.support_logprobs = behind;
    }
    assert_int_equal(row_queue_push(queue, &row), BT_OK);
}

static void rows_are_drawn_in_place(void **state) {
    (void)state;
    for (uint32_t mode = ROW_MASK_SELECTED; mode <= ROW_MASK_SUPPORT; mode++) {
        row_queue *queue = make_queue(mode);
        size_t bytes = 0;
        uint32_t taken = 0;
        row_slice part, kept = {.count = 0};
        for (uint32_t i = 0; i < ROWS; i++) {
            int32_t *room = NULL;
            int32_t *again = NULL;
            assert_int_equal(row_queue_reserve(queue, &room), BT_OK);
            for (uint32_t k = 0; k < mode * CAP; k++) /* one array, or two */
                room[k] = -1;
            /* Rows before it go out meanwhile, and are written. */
            if (i % 3 == 1 && row_queue_take(queue, BYTES_MAX, &part)) {
                memcpy(stream + bytes, part.bytes, part.count);
                bytes += part.count;
                bt_block_release(kept.block);
                kept = part;
            }
            assert_int_equal(row_queue_reserve(queue, &again), BT_OK);
            assert_ptr_equal(room, again);
            draw_in_place(queue, mode, i, i % 2 == 0);
        }
        bt_block_release(kept.block);
        taken = row_queue_taken(queue);
        assert_true(taken > 0);
        while (row_queue_take(queue, 500, &part)) {
            memcpy(stream + bytes, part.bytes, part.count);
            bytes += part.count;
            bt_block_release(part.block);
        }
        assert_stream(mode, bytes, 0, ROWS);
        row_queue_destroy(queue);
        assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    }
}

/* What was taken before is given back while a row is drawn: the row stays where it is. */
static void a_row_that_is_drawn_does_not_move(void **state) {
    (void)state;
    row_queue *queue = make_queue(ROW_MASK_SELECTED);
    row_slice part;
    int32_t *room = NULL;
    draw_in_place(queue, ROW_MASK_SELECTED, 0, true);
    assert_true(row_queue_take(queue, BYTES_MAX, &part));
    assert_int_equal(row_queue_reserve(queue, &room), BT_OK);
    bt_block_release(part.block);
    token_row row = make_row(ROW_MASK_SELECTED, 1);
    memcpy(room, row.support_ids, row.support_count * sizeof *room);
    row.support_ids = room;
    assert_int_equal(row_queue_push(queue, &row), BT_OK);
    assert_true(row_queue_take(queue, BYTES_MAX, &part));
    assert_ptr_equal(part.bytes + ROW_RECORD_HEADER_BYTES, (uint8_t *)room);
    bt_block_release(part.block);
    assert_int_equal(row_queue_reserve(queue, &room), BT_OK); /* and is not drawn to */
    row_queue_destroy(queue);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
}

/* Blocks grow with what is queued, up to a size. */
static void rows_that_pile_up_take_little_more(void **state) {
    (void)state;
    row_queue *queue = make_queue(ROW_MASK_SUPPORT);
    for (uint32_t i = 0;; i++) {
        const token_row row = make_row(ROW_MASK_SUPPORT, i % ROWS);
        if (row_queue_push(queue, &row) != BT_OK) break;
        assert_true(bt_block_pool_used_bytes(pool) <=
                    row_queue_bytes(queue) + ROW_BLOCK_BYTES_MAX / 8 * 9 + ROW_BLOCK_BYTES);
    }
    assert_true(row_queue_bytes(queue) > BYTES_MAX - 2000);
    row_queue_destroy(queue);
}

/* Small rows under a large cap: the blocks are not much more than twice the rows. */
static void reserved_room_is_used_again(void **state) {
    (void)state;
    enum { WIDE = 40000, PILED = 500 };
    const row_queue_options options = {.blocks = pool,
                                       .mask_mode = ROW_MASK_SUPPORT,
                                       .cap = WIDE,
                                       .top_logprobs = ROW_MASK_SUPPORT,
                                       .logprob_ids = 2 * ROW_MASK_SUPPORT,
                                       .bytes_max = BYTES_MAX};
    const size_t at_cap = ROW_RECORD_HEADER_BYTES + 2 * sizeof(int32_t) * WIDE;
    row_queue *queue = NULL;
    assert_int_equal(row_queue_create(&options, &queue), BT_OK);
    for (uint32_t i = 0; i < PILED; i++)
        draw_in_place(queue, ROW_MASK_SUPPORT, i % ROWS, true);
    assert_true(bt_block_pool_used_bytes(pool) <=
                2 * row_queue_bytes(queue) + 5 * at_cap / 2 + ROW_BLOCK_BYTES);
    row_queue_destroy(queue);
}

static void row_zero_comes_from_the_handoff(void **state) {
    (void)state;
    for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
        row_queue *queue = make_queue(mode);
        const token_row zero = make_row(mode, 0);
        const metadata_row first = {
            .first_token = zero.token,
            .mask_mode = mode,
            .has_first_logprob = zero.has_logprob,
            .first_logprob = zero.token_logprob,
            .selected_logprob = zero.selected_logprob,
            .support_count = zero.support_count,
            .cap_needed = zero.support_size,
            .weights_version = zero.weights_version,
            .support_ids = zero.support_ids,
            .support_logprobs = zero.support_logprobs,
            .top_count = zero.top_count,
            .top = zero.top,
            .id_logprob_count = zero.id_logprob_count,
            .id_logprobs = zero.id_logprobs,
        };
        assert_int_equal(row_queue_push_first(queue, &first), BT_OK);
        for (uint32_t i = 1; i < 4; i++) {
            const token_row row = make_row(mode, i);
            assert_int_equal(row_queue_push(queue, &row), BT_OK);
        }
        const size_t bytes = take_all(queue, BYTES_MAX);
        assert_stream(mode, bytes, 0, 4);
        row_queue_destroy(queue);
    }
}

static void pushed_rows_are_copies(void **state) {
    (void)state;
    row_queue *queue = make_queue(ROW_MASK_SUPPORT);
    int32_t own_ids[CAP];
    float own_logprobs[CAP];
    token_row row = make_row(ROW_MASK_SUPPORT, 3);
    memcpy(own_ids, row.support_ids, sizeof own_ids);
    memcpy(own_logprobs, row.support_logprobs, sizeof own_logprobs);
    row.support_ids = own_ids;
    row.support_logprobs = own_logprobs;
    assert_int_equal(row_queue_push(queue, &row), BT_OK);
    memset(own_ids, 0, sizeof own_ids);
    memset(own_logprobs, 0, sizeof own_logprobs);
    assert_stream(ROW_MASK_SUPPORT, take_all(queue, BYTES_MAX), 3, 1);
    row_queue_destroy(queue);
}

static void bounds_hold(void **state) {
    (void)state;
    row_queue *queue = NULL;
    const size_t one = row_record_bytes((row_widths){.mask_mode = ROW_MASK_SUPPORT,
                                                     .support_count = CAP,
                                                     .top_count = 2,
                                                     .id_logprob_count = 4});
    row_queue_options options = {
        .blocks = pool, .mask_mode = 3, .cap = CAP, .bytes_max = BYTES_MAX};
    assert_int_equal(row_queue_create(&options, &queue), BT_ERR_CALLER_ARGUMENT);
    options = (row_queue_options){.blocks = pool,
                                  .mask_mode = ROW_MASK_SUPPORT,
                                  .cap = CAP,
                                  .top_logprobs = 2,
                                  .logprob_ids = 4,
                                  .bytes_max = one - 1};
    assert_int_equal(row_queue_create(&options, &queue), BT_ERR_CALLER_ARGUMENT);
    options.bytes_max = 2 * one;
    assert_int_equal(row_queue_create(&options, &queue), BT_OK);
    token_row row = make_row(ROW_MASK_SUPPORT, 0);
    row.support_count = CAP + 1;
    assert_int_equal(row_queue_push(queue, &row), BT_ERR_CALLER_LIMIT);
    row.support_count = CAP;
    assert_int_equal(row_queue_push(queue, &row), BT_OK);
    assert_int_equal(row_queue_push(queue, &row), BT_OK);
    assert_int_equal(row_queue_push(queue, &row), BT_ERR_REQUEST_FULL);
    assert_int_equal(row_queue_pushed(queue), 2);
    assert_int_equal(take_all(queue, BYTES_MAX), 2 * one);
    assert_int_equal(row_queue_push(queue, &row), BT_OK);
    assert_int_equal(take_all(queue, BYTES_MAX), one);
    assert_int_equal(row_queue_taken(queue), 3);
    row.mask_mode = ROW_MASK_SELECTED;
    assert_int_equal(row_queue_push(queue, &row), BT_ERR_CALLER_ARGUMENT);
    row = make_row(ROW_MASK_SUPPORT, 1);
    row.top_count--; /* another width than the queue's */
    assert_int_equal(row_queue_push(queue, &row), BT_ERR_CALLER_ARGUMENT);
    row = make_row(ROW_MASK_SUPPORT, 1);
    row.id_logprob_count++;
    assert_int_equal(row_queue_push(queue, &row), BT_ERR_CALLER_ARGUMENT);
    row = make_row(ROW_MASK_SUPPORT, 1);
    row.support_ids = NULL;
    assert_int_equal(row_queue_push(queue, &row), BT_ERR_CALLER_ARGUMENT);
    row = make_row(ROW_MASK_SUPPORT, 1);
    row.support_logprobs = NULL;
    assert_int_equal(row_queue_push(queue, &row), BT_ERR_CALLER_ARGUMENT);
    row_queue_destroy(queue);
    row_queue_destroy(NULL);
}

/* No opt-in, no cost: without masks the cap plays no part. */
static void without_masks_the_cap_is_nothing(void **state) {
    (void)state;
    row_queue *queue = NULL;
    const row_queue_options options = {.blocks = pool,
                                       .mask_mode = ROW_MASK_OFF,
                                       .cap = UINT32_MAX,
                                       .bytes_max = ROW_RECORD_HEADER_BYTES};
    assert_int_equal(row_queue_create(&options, &queue), BT_OK);
    const token_row row = make_row(ROW_MASK_OFF, 1);
    assert_int_equal(row_queue_push(queue, &row), BT_OK);
    assert_int_equal(row_queue_bytes(queue), ROW_RECORD_HEADER_BYTES);
    row_queue_destroy(queue);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_come_out_as_they_went_in),
        cmocka_unit_test(parts_of_any_size_give_the_same_stream),
        cmocka_unit_test(whole_rows_are_taken_where_they_fit),
        cmocka_unit_test(parts_outlive_what_follows),
        cmocka_unit_test(an_emptied_queue_uses_its_memory_again),
        cmocka_unit_test(rows_are_drawn_in_place),
        cmocka_unit_test(a_row_that_is_drawn_does_not_move),
        cmocka_unit_test(rows_that_pile_up_take_little_more),
        cmocka_unit_test(reserved_room_is_used_again),
        cmocka_unit_test(row_zero_comes_from_the_handoff),
        cmocka_unit_test(pushed_rows_are_copies),
        cmocka_unit_test(bounds_hold),
        cmocka_unit_test(without_masks_the_cap_is_nothing),
    };
    return cmocka_run_group_tests(tests, fill, end);
}
