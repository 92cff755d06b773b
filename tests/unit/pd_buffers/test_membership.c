/* Row slots of a worker that joins: how wide they are, when they are made anew, what happens when
 * they cannot be had. The mover only notes what memory it is given. */
#include "pd_buffers/membership.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"

enum { SLOTS = 3, VOCAB = 700 };

typedef struct bench {
    xfer mover;
    membership member;
    uint64_t now_us;
    void *registered; /* NULL: nothing is */
    size_t registered_bytes;
    uint32_t registrations, streams, ends, broken, hang_ups;
    bt_status register_status, end_status;
    proto_message sent; /* the last one */
} bench;

static bt_status fake_address(xfer *x, const uint8_t **bytes_out, size_t *count_out) {
    static const uint8_t address[1] = {7};
    (void)x;
    *bytes_out = address;
    *count_out = sizeof address;
    return BT_OK;
}

static bt_status fake_register(xfer *x, void *base, size_t bytes) {
    bench *b = (bench *)x;
    if (b->register_status != BT_OK) return b->register_status;
    b->registered = base;
    b->registered_bytes = bytes;
    b->registrations++;
    return BT_OK;
}

static void fake_unregister(xfer *x, void *base) {
    bench *b = (bench *)x;
    assert_non_null(base);
    if (b->registered == base) b->registered = NULL;
}

static const xfer_ops fake_ops = {.get_address = fake_address,
                                  .register_memory = fake_register,
                                  .unregister_memory = fake_unregister};

static uint64_t now_of(void *context) {
    return ((bench *)context)->now_us;
}

static void on_send(void *context, proto_lane lane, proto_message *message) {
    (void)lane;
    ((bench *)context)->sent = *message;
}

static void open_streams(void *context) {
    ((bench *)context)->streams++;
}

static void on_hang_up(void *context, const char *why) {
    assert_non_null(why);
    ((bench *)context)->hang_ups++;
}

static void on_refused(void *context, const char *text) {
    (void)context;
    fail_msg("refused: %s", text);
}

static void on_broken(void *context, bt_status status, const char *text) {
    assert_int_not_equal(status, BT_OK);
    assert_non_null(text);
    ((bench *)context)->broken++;
}

static void end_attempts(void *context) {
    (void)context;
}

static bool is_at_rest(void *context) {
    (void)context;
    return true;
}

static bt_status create_end(void *context) {
    bench *b = context;
    b->ends++;
    return b->end_status;
}

static bt_status say_hello(void *context, xfer_peer peer) {
    (void)context;
    (void)peer;
    return BT_OK;
}

static void fill_ready(void *context, proto_ready *ready) {
    (void)context;
    ready->pages_total = 1;
    ready->page_tokens = 32;
}

static void fill_pong(void *context, proto_ping *pong) {
    (void)context;
    (void)pong;
}

static void set_up(bench *b) {
    bt_log_set_level((bt_log_level)-1);
    *b = (bench){.mover = {.ops = &fake_ops}, .now_us = 1000};
    const membership_options options = {
        .hello = {.role = PROTO_ROLE_DECODE, .incarnation = 9, .vocab_size = VOCAB},
        .clock = {.now_us = now_of, .context = b},
        .mover = &b->mover,
        .row_slots = SLOTS,
        .program = {.send = on_send,
                    .open_streams = open_streams,
                    .hang_up = on_hang_up,
                    .on_refused = on_refused,
                    .on_broken = on_broken,
                    .context = b},
        .ops = {.end_attempts = end_attempts,
                .is_at_rest = is_at_rest,
                .create_end = create_end,
                .say_hello = say_hello,
                .fill_ready = fill_ready,
                .fill_pong = fill_pong,
                .context = b},
    };
    assert_int_equal(membership_init(&b->member, &options), BT_OK);
}

static void tear_down(bench *b) {
    membership_fini(&b->member);
}

/* A session up to the point where the slots are there and streams is dialled. */
static void join(bench *b, uint32_t cap) {
    const proto_message welcome = {.kind = PROTO_WELCOME,
                                   .welcome = {.router_incarnation = 5,
                                               .router_host = "router",
                                               .worker_id = 1,
                                               .record = {.sampling_mask_max_tokens = cap,
                                                          .kv_checksum = RECORD_CHECKSUM_FULL + 1},
                                               .heartbeat_ms = 100,
                                               .dead_after_ms = 500}};
    membership_on_open(&b->member, PROTO_LANE_CONTROL);
    assert_false(membership_on_message(&b->member, PROTO_LANE_CONTROL, &welcome, false));
    membership_turn(&b->member);
}

static void expect_slots(const bench *b, uint32_t entries) {
    assert_int_equal(membership_row_entries(&b->member), entries);
    assert_int_equal(row_pool_cap(b->member.rows), entries);
    assert_int_equal(row_pool_slot_bytes(b->member.rows), row_slot_bytes(entries));
    assert_int_equal(b->registered_bytes, SLOTS * row_slot_bytes(entries));
    assert_ptr_equal(b->registered, row_pool_memory(b->member.rows));
}

/* ---- width ----------------------------------------------------------------------------------- */

static void slots_are_as_wide_as_the_cap(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    join(&b, 64);
    expect_slots(&b, 64);
    assert_int_equal(membership_cap(&b.member), 64);
    tear_down(&b);
}

/* No row has more entries than there are ids, so a cap above the vocabulary costs nothing. */
static void slots_are_no_wider_than_the_vocabulary(void **state) {
    (void)state;
    static const uint32_t caps[] = {VOCAB, VOCAB + 1, WORKER_SESSION_MASK_TOKENS_MAX};
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        bench b;
        set_up(&b);
        join(&b, caps[i]);
        expect_slots(&b, VOCAB);
        assert_int_equal(membership_cap(&b.member), caps[i]);
        tear_down(&b);
    }
}

static void both_ends_come_to_the_same_width(void **state) {
    (void)state;
    assert_int_equal(row_entries_max(4096, 0), 4096); /* a router that knows no worker yet */
    assert_int_equal(row_entries_max(4096, 4095), 4095);
    assert_int_equal(row_entries_max(4096, 4096), 4096);
    assert_int_equal(row_entries_max(4096, 4097), 4096);
    assert_int_equal(row_entries_max(1, 1), 1);
}

/* ---- another session ------------------------------------------------------------------------- */

static void slots_that_fit_are_kept(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    join(&b, VOCAB + 5);
    const void *rows = b.member.rows;
    membership_end(&b.member);
    join(&b, VOCAB + 9);
    assert_ptr_equal(b.member.rows, rows);
    assert_int_equal(b.registrations, 1);
    assert_int_equal(b.ends, 2); /* the handoff is the session's */
    assert_int_equal(b.streams, 2);
    tear_down(&b);
}

static void another_cap_makes_other_slots(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    join(&b, 64);
    membership_end(&b.member);
    join(&b, 65);
    expect_slots(&b, 65);
    membership_end(&b.member);
    join(&b, 3);
    expect_slots(&b, 3);
    assert_int_equal(b.registrations, 3);
    tear_down(&b);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void slots_that_cannot_be_registered_break_the_worker(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    b.register_status = BT_ERR_WORKER_MEMORY;
    join(&b, 64);
    assert_int_equal(b.broken, 1);
    assert_null(b.member.rows);
    assert_int_equal(b.ends, 0);
    membership_turn(&b.member); /* said once, and nothing is tried again */
    assert_int_equal(b.broken, 1);
    assert_int_equal(b.streams, 0);
    tear_down(&b);
}

static void slots_of_before_outlive_a_failure(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    join(&b, 64);
    membership_end(&b.member);
    b.register_status = BT_ERR_WORKER_MEMORY;
    join(&b, 65);
    assert_int_equal(b.broken, 1);
    assert_int_equal(row_pool_cap(b.member.rows), 64);
    assert_ptr_equal(b.registered, row_pool_memory(b.member.rows));
    tear_down(&b);
}

static void an_end_that_cannot_be_made_breaks_the_worker(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    b.end_status = BT_ERR_WORKER_MEMORY;
    join(&b, 64);
    assert_int_equal(b.broken, 1);
    assert_int_equal(b.streams, 0);
    tear_down(&b);
}

/* ---- READY ----------------------------------------------------------------------------------- */

static void ready_and_pongs_say_how_many_slots_there_are(void **state) {
    (void)state;
    bench b;
    row_slot slot;
    const proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = 12}};
    set_up(&b);
    join(&b, 64);
    membership_on_open(&b.member, PROTO_LANE_STREAMS);
    membership_turn(&b.member);
    assert_true(membership_is_serving(&b.member));
    assert_int_equal(b.sent.kind, PROTO_READY);
    assert_int_equal(b.sent.ready.rows_total, SLOTS);
    assert_int_equal(b.sent.ready.address_bytes, 1);
    assert_int_equal(b.sent.ready.address[0], 7);
    assert_int_equal(row_pool_acquire(b.member.rows, &slot), BT_OK);
    assert_false(membership_on_message(&b.member, PROTO_LANE_CONTROL, &ping, false));
    assert_int_equal(b.sent.kind, PROTO_PONG);
    assert_int_equal(b.sent.ping.sequence, 12);
    assert_int_equal(b.sent.ping.rows_free, SLOTS - 1);
    row_pool_release(b.member.rows, slot);
    tear_down(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_are_as_wide_as_the_cap),
        cmocka_unit_test(slots_are_no_wider_than_the_vocabulary),
        cmocka_unit_test(both_ends_come_to_the_same_width),
        cmocka_unit_test(slots_that_fit_are_kept),
        cmocka_unit_test(another_cap_makes_other_slots),
        cmocka_unit_test(slots_that_cannot_be_registered_break_the_worker),
        cmocka_unit_test(slots_of_before_outlive_a_failure),
        cmocka_unit_test(an_end_that_cannot_be_made_breaks_the_worker),
        cmocka_unit_test(ready_and_pongs_say_how_many_slots_there_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
