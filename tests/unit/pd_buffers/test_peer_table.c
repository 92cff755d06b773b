/* The peer table over a mover that only notes what is asked of it. */
#include "pd_buffers/peer_table.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"

typedef struct bench {
    xfer mover;
    peer_table table;
    uint32_t connects, disconnects, hellos;
    uint8_t last_address;
    bt_status connect_status, hello_status;
    uint32_t pairs; /* on_pair calls */
    bt_status pair_status;
} bench;

static bt_status fake_connect(xfer *x, xfer_peer peer, const uint8_t *address, size_t bytes) {
    bench *b = (bench *)x;
    (void)peer;
    assert_int_equal(bytes, 1);
    b->connects++;
    b->last_address = address[0];
    return b->connect_status;
}

static void fake_disconnect(xfer *x, xfer_peer peer) {
    (void)peer;
    ((bench *)x)->disconnects++;
}

static bt_status say_hello(void *context, xfer_peer peer) {
    bench *b = context;
    (void)peer;
    b->hellos++;
    return b->hello_status;
}

static void on_pair(void *context, xfer_peer peer, bt_status status) {
    bench *b = context;
    assert_int_equal(peer.incarnation, 100 + peer.worker_id);
    b->pairs++;
    b->pair_status = status;
}

static const xfer_ops fake_ops = {.connect = fake_connect, .disconnect = fake_disconnect};

static void set_up(bench *b) {
    bt_log_set_level(BT_LOG_ERROR);
    *b = (bench){.mover = {.ops = &fake_ops}};
    const peer_table_ops ops = {.say_hello = say_hello, .on_pair = on_pair, .context = b};
    assert_int_equal(peer_table_init(&b->table, &b->mover, &ops), BT_OK);
}

static xfer_peer peer_of(uint32_t worker_id) {
    return (xfer_peer){.worker_id = worker_id, .incarnation = 100 + worker_id};
}

static bt_status add(bench *b, uint32_t worker_id, uint8_t address, uint64_t now_us) {
    proto_peer peer = {.worker_id = worker_id,
                       .incarnation = 100 + worker_id,
                       .role = PROTO_ROLE_PREFILL,
                       .host = "h",
                       .address_bytes = 1};
    peer.address[0] = address;
    return peer_table_add(&b->table, &peer, now_us);
}

static peer_state state_of(const bench *b, uint32_t worker_id) {
    const peer_entry *entry = peer_table_find(&b->table, peer_of(worker_id));
    return entry != NULL ? entry->state : PEER_NONE;
}

static void named_connected_paired_removed(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    assert_int_equal(add(&b, 1, 11, 0), BT_OK);
    assert_int_equal(b.connects, 0); /* only in a turn */
    assert_false(peer_table_is_usable(&b.table, peer_of(1)));
    peer_table_turn(&b.table, 0);
    assert_int_equal(b.connects, 1);
    assert_int_equal(b.hellos, 1);
    assert_int_equal(state_of(&b, 1), PEER_CONNECTED);
    assert_true(peer_table_is_usable(&b.table, peer_of(1)));
    peer_table_turn(&b.table, 1000);
    assert_int_equal(b.hellos, 1); /* once per connection */
    peer_table_on_hello(&b.table, peer_of(1));
    peer_table_on_hello(&b.table, peer_of(1));
    assert_int_equal(b.pairs, 1);
    assert_int_equal(b.pair_status, BT_OK);
    peer_table_remove(&b.table, peer_of(1));
    assert_false(peer_table_is_usable(&b.table, peer_of(1)));
    assert_int_equal(b.disconnects, 0);
    peer_table_turn(&b.table, 2000);
    assert_int_equal(b.disconnects, 1);
    assert_false(peer_table_is_quiet(&b.table));
    peer_table_on_closed(&b.table, peer_of(1), 3000);
    assert_int_equal(state_of(&b, 1), PEER_NONE);
    assert_true(peer_table_is_quiet(&b.table));
    assert_int_equal(b.pairs, 1); /* nothing is said about what the router removed */
    peer_table_fini(&b.table);
}

static void a_broken_pair_is_told_closed_and_made_again(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    assert_int_equal(add(&b, 1, 11, 0), BT_OK);
    peer_table_turn(&b.table, 0);
    peer_table_on_hello(&b.table, peer_of(1));
    peer_table_on_failed(&b.table, peer_of(1), BT_ERR_PEER_GONE);
    peer_table_on_failed(&b.table, peer_of(1), BT_ERR_PEER_TIMEOUT);
    assert_int_equal(b.pairs, 2);
    assert_int_equal(b.pair_status, BT_ERR_PEER_GONE); /* the first cause, once */
    assert_int_equal(b.disconnects, 0);                /* a callback must not disconnect */
    assert_false(peer_table_is_usable(&b.table, peer_of(1)));
    peer_table_turn(&b.table, 0);
    assert_int_equal(b.disconnects, 1);
    assert_int_equal(add(&b, 1, 22, 0), BT_OK); /* named again while it closes */
    peer_table_turn(&b.table, 0);
    assert_int_equal(b.connects, 1);
    peer_table_on_closed(&b.table, peer_of(1), 1000);
    peer_table_turn(&b.table, 1000);
    assert_int_equal(b.connects, 1); /* after a pause */
    peer_table_turn(&b.table, 1000 + PEER_TABLE_PAUSE_US);
    assert_int_equal(b.connects, 2);
    assert_int_equal(b.last_address, 22);
    assert_int_equal(state_of(&b, 1), PEER_CONNECTED);
    peer_table_fini(&b.table);
}

static void without_being_named_again_it_stays_closed(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    assert_int_equal(add(&b, 1, 11, 0), BT_OK);
    peer_table_turn(&b.table, 0);
    peer_table_on_failed(&b.table, peer_of(1), BT_ERR_PEER_GONE);
    peer_table_turn(&b.table, 0);
    peer_table_on_closed(&b.table, peer_of(1), 0);
    peer_table_turn(&b.table, UINT64_MAX / 2);
    assert_int_equal(b.connects, 1);
    assert_int_equal(state_of(&b, 1), PEER_CLOSED);
    assert_true(peer_table_is_quiet(&b.table));
    peer_table_remove_all(&b.table);
    assert_int_equal(state_of(&b, 1), PEER_NONE);
    peer_table_fini(&b.table);
}

static void named_again_while_open_closes_first(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    assert_int_equal(add(&b, 1, 11, 0), BT_OK);
    peer_table_turn(&b.table, 0);
    peer_table_on_hello(&b.table, peer_of(1));
    assert_int_equal(add(&b, 1, 12, 0), BT_OK);
    peer_table_turn(&b.table, 0);
    assert_int_equal(b.disconnects, 1);
    assert_int_equal(b.connects, 1);
    peer_table_on_closed(&b.table, peer_of(1), 0);
    peer_table_turn(&b.table, PEER_TABLE_PAUSE_US);
    assert_int_equal(b.connects, 2);
    assert_int_equal(b.last_address, 12);
    peer_table_fini(&b.table);
}

static void what_cannot_be_connected_or_greeted_is_told(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    b.connect_status = BT_ERR_PEER_GONE;
    assert_int_equal(add(&b, 1, 11, 0), BT_OK);
    peer_table_turn(&b.table, 0);
    assert_int_equal(b.pairs, 1);
    assert_int_equal(b.pair_status, BT_ERR_PEER_GONE);
    assert_int_equal(state_of(&b, 1), PEER_CLOSED);
    b.connect_status = BT_OK;
    b.hello_status = BT_ERR_REQUEST_FULL;
    assert_int_equal(add(&b, 2, 11, 0), BT_OK);
    peer_table_turn(&b.table, 0);
    peer_table_turn(&b.table, 0);
    assert_int_equal(b.hellos, 2); /* again, until it goes */
    assert_int_equal(b.pairs, 1);
    b.hello_status = BT_ERR_PEER_PROTOCOL;
    peer_table_turn(&b.table, 0);
    assert_int_equal(b.pairs, 2);
    assert_int_equal(b.pair_status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(state_of(&b, 2), PEER_CLOSING);
    peer_table_fini(&b.table);
}

static void a_peer_that_never_answers_is_closed(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    assert_int_equal(add(&b, 1, 11, 0), BT_OK);
    peer_table_turn(&b.table, 0);
    peer_table_turn(&b.table, PEER_TABLE_HELLO_US - 1);
    assert_int_equal(b.pairs, 0);
    peer_table_turn(&b.table, PEER_TABLE_HELLO_US);
    assert_int_equal(b.pair_status, BT_ERR_PEER_TIMEOUT);
    assert_int_equal(b.disconnects, 1);
    peer_table_fini(&b.table);
}

static void strangers_and_too_many(void **state) {
    (void)state;
    bench b;
    set_up(&b);
    peer_table_on_hello(&b.table, peer_of(9));
    peer_table_on_failed(&b.table, peer_of(9), BT_ERR_PEER_GONE);
    peer_table_on_closed(&b.table, peer_of(9), 0);
    peer_table_remove(&b.table, peer_of(9));
    assert_int_equal(b.pairs, 0);
    for (uint32_t i = 0; i < PEER_TABLE_PEERS_MAX; i++) {
        assert_int_equal(add(&b, i + 1, 1, 0), BT_OK);
    }
    assert_int_equal(add(&b, 1000, 1, 0), BT_ERR_CALLER_LIMIT);
    assert_int_equal(add(&b, 5, 1, 0), BT_OK); /* known */
    peer_table_fini(&b.table);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(named_connected_paired_removed),
        cmocka_unit_test(a_broken_pair_is_told_closed_and_made_again),
        cmocka_unit_test(without_being_named_again_it_stays_closed),
        cmocka_unit_test(named_again_while_open_closes_first),
        cmocka_unit_test(what_cannot_be_connected_or_greeted_is_told),
        cmocka_unit_test(a_peer_that_never_answers_is_closed),
        cmocka_unit_test(strangers_and_too_many),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
