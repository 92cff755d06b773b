/* The handoff with faults (fault build): each allocation, each send and each completion fails once.
 * Nothing crashes, nothing is leaked, every attempt ends once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/fault.h"
#include "duo.h"

static const sample the_sample = {
    .number = 31, .prompt_tokens = 50, .mask_mode = ROW_MASK_SUPPORT, .support_count = 9};

/* Runs a handoff with the nth visit of a point failing; true when the point was not reached. */
static bool run_with_fault(bt_fault_point point, uint64_t nth) {
    const duo_options options = {.sends_in_flight = 2};
    duo *d = duo_create(&options);
    bt_fault_set(point, nth);
    duo_begin(d, &the_sample);
    duo_run(d);
    const bool is_past = bt_fault_visits(point) < nth;
    bt_fault_set(point, 0);
    duo_wait(d, 0);
    const end_attempt *sent = end_find(d->prefill, the_sample.number);
    const end_attempt *got = end_find(d->decode, the_sample.number);
    if (is_past) {
        assert_int_equal(sent->acked, 1);
        assert_int_equal(got->ready, 1);
    }
    duo_wait(d, 20u * 1000 * 1000); /* what waits for the other side passes its deadline */
    duo_wait(d, 0);
    duo_destroy(d);
    return is_past;
}

static void every_send_may_fail(void **state) {
    (void)state;
    uint64_t nth = 1;
    while (!run_with_fault(BT_FAULT_XFER_POST, nth))
        nth++;
    assert_true(nth > 5);
}

static void every_completion_may_fail(void **state) {
    (void)state;
    uint64_t nth = 1;
    while (!run_with_fault(BT_FAULT_XFER_DONE, nth))
        nth++;
    assert_true(nth > 10);
}

/* What a worker makes at start-up, with the nth allocation failing. */
static bt_status create_all(uint32_t pages) {
    const kv_pool_options kv = {.page_count = pages, .page_bytes = 1024, .layers = 4};
    const xfer_loop_options loop = {.is_stepped = true};
    xfer_loop_network *network = NULL;
    xfer *mover = NULL;
    kv_pool *pool = NULL;
    row_pool *rows = NULL;
    handoff_receiver *receiver = NULL;
    handoff_sender *sender = NULL;
    bt_status status = xfer_loop_network_create(&loop, &network);
    if (status == BT_OK) status = xfer_loop_create(network, 1, &mover);
    if (status == BT_OK) status = kv_pool_create(&kv, &pool);
    if (status == BT_OK) status = row_pool_create(4, 16, &rows);
    if (status == BT_OK) {
        const handoff_receiver_options options = {.mover = mover,
                                                  .pages = pool,
                                                  .rows = rows,
                                                  .page_tokens = 4,
                                                  .attempts_max = 4,
                                                  .clock = bt_clock_system()};
        status = handoff_receiver_create(&options, &receiver);
    }
    if (status == BT_OK) {
        const handoff_sender_options options = {.mover = mover,
                                                .pages = pool,
                                                .rows = rows,
                                                .page_tokens = 4,
                                                .attempts_max = 4,
                                                .clock = bt_clock_system()};
        status = handoff_sender_create(&options, &sender);
    }
    handoff_sender_destroy(sender);
    handoff_receiver_destroy(receiver);
    row_pool_destroy(rows);
    kv_pool_destroy(pool);
    if (mover != NULL) mover->ops->destroy(mover);
    xfer_loop_network_destroy(network);
    return status;
}

static void every_allocation_at_start_may_fail(void **state) {
    (void)state;
    bt_status status = BT_ERR_WORKER_MEMORY;
    uint64_t nth = 1;
    for (; status != BT_OK; nth++) {
        bt_fault_set(BT_FAULT_ALLOC, nth);
        status = create_all(8);
        if (status != BT_OK) assert_int_equal(status, BT_ERR_WORKER_MEMORY);
    }
    bt_fault_set(BT_FAULT_ALLOC, 0);
    assert_true(nth > 10);
}

/* expect, begin and pages grow a record: without memory they refuse, and work the next time. */
static void every_allocation_of_an_attempt_may_fail(void **state) {
    (void)state;
    uint32_t refused = 0;
    bool is_past = false;
    for (uint64_t nth = 1; !is_past; nth++) {
        const duo_options options = {0};
        duo *d = duo_create(&options);
        bt_fault_set(BT_FAULT_ALLOC, nth);
        const bt_status status = end_expect(d->decode, &the_sample, d->prefill_peer, 1u << 30);
        is_past = bt_fault_visits(BT_FAULT_ALLOC) < nth;
        bt_fault_set(BT_FAULT_ALLOC, 0);
        if (status != BT_OK) {
            assert_int_equal(status, BT_ERR_WORKER_MEMORY);
            refused++;
        } else {
            end_cancel(d->decode, the_sample.number);
        }
        bt_fault_set(BT_FAULT_ALLOC, nth);
        const bt_status begun =
            end_send(d->prefill, &the_sample, d->decode_peer, &(row_slot){0, 1}, 1u << 30, 4);
        bt_fault_set(BT_FAULT_ALLOC, 0);
        if (begun != BT_OK) {
            assert_int_equal(begun, BT_ERR_WORKER_MEMORY);
            refused++;
        } else {
            end_cancel(d->prefill, the_sample.number);
        }
        duo_run(d);
        const sample next = {.number = 32, .prompt_tokens = 50, .mask_mode = ROW_MASK_OFF};
        duo_begin(d, &next);
        duo_run(d);
        assert_int_equal(end_find(d->decode, 32)->ready, 1);
        duo_destroy(d);
    }
    assert_true(refused >= 4);
}

/* Rows of a sample through a pool and a queue, some taken on the way: the first status that is not
 * OK. What was pushed comes out, wherever it stopped. */
static bt_status fill_and_take(uint32_t *refused_out) {
    static sample_row storage;
    const bt_block_pool_options blocks = {.idle_bytes_max = 64 * 1024};
    bt_block_pool *pool = NULL;
    row_queue *queue = NULL;
    size_t pushed_bytes = 0, taken_bytes = 0;
    row_slice part, kept = {.count = 0};
    bt_status status = bt_block_pool_create(&blocks, &pool);
    row_queue_options options = {.mask_mode = ROW_MASK_SUPPORT, .cap = 16, .bytes_max = 1 << 16};
    options.blocks = pool;
    if (status == BT_OK) status = row_queue_create(&options, &queue);
    for (uint32_t step = 1; status == BT_OK && step <= 200; step++) {
        token_row row;
        int32_t *room = NULL;
        sample_make_step(&the_sample, step, &storage, &row);
        if (step % 2 == 0) status = row_queue_reserve(queue, &room);
        if (status == BT_OK) status = row_queue_push(queue, &row);
        if (status != BT_OK) break;
        pushed_bytes += row_record_bytes(token_row_widths(&row));
        /* Half of what is there now and then, kept for a while as a link does. */
        if (step % 7 != 0 || !row_queue_take(queue, row_queue_bytes(queue) / 2, &part)) continue;
        taken_bytes += part.count;
        bt_block_release(kept.block);
        kept = part;
    }
    *refused_out = status == BT_OK ? 0 : 1;
    bt_fault_set(BT_FAULT_ALLOC, 0);
    bt_block_release(kept.block);
    while (queue != NULL && row_queue_take(queue, SIZE_MAX, &part)) {
        taken_bytes += part.count;
        bt_block_release(part.block);
    }
    assert_int_equal(taken_bytes, pushed_bytes);
    if (queue != NULL) assert_int_equal(row_queue_taken(queue), row_queue_pushed(queue));
    row_queue_destroy(queue);
    if (pool != NULL) assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    bt_block_pool_destroy(pool);
    return status;
}

static void every_allocation_of_a_queue_may_fail(void **state) {
    (void)state;
    uint32_t all_refused = 0;
    bool is_past = false;
    for (uint64_t nth = 1; !is_past; nth++) {
        uint32_t refused;
        bt_fault_set(BT_FAULT_ALLOC, nth);
        const bt_status status = fill_and_take(&refused);
        is_past = refused == 0;
        all_refused += refused;
        assert_int_equal(status, is_past ? BT_OK : BT_ERR_WORKER_MEMORY);
    }
    assert_true(all_refused >= 4); /* the pool, the queue, and blocks */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_send_may_fail),
        cmocka_unit_test(every_completion_may_fail),
        cmocka_unit_test(every_allocation_at_start_may_fail),
        cmocka_unit_test(every_allocation_of_an_attempt_may_fail),
        cmocka_unit_test(every_allocation_of_a_queue_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
