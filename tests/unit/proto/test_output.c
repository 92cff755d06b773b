/* Bytes on their way to a socket: what is gathered, what goes by reference, what a socket that
 * takes little does, and memory that runs out. */
#include "proto/output.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/mem.h"

enum { GATHER = 16 * 1024, BY_REFERENCE = PROTO_OUTPUT_COPY_BYTES };

static bt_block_pool *pool;
static proto_output output;
static int fds[2];
static uint64_t sent, received; /* bytes: their values go by their place in the stream */
static uint8_t scratch[64 * 1024];

static uint8_t byte_at(uint64_t place) {
    return (uint8_t)(place * 131 + place / 251);
}

static int set_up(void **state) {
    (void)state;
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    sent = received = 0;
    if (bt_block_pool_create(&options, &pool) != BT_OK) return 1;
    proto_output_init(&output, pool);
    return socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds);
}

static int tear_down(void **state) {
    (void)state;
    proto_output_fini(&output);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    bt_block_pool_destroy(pool);
    (void)close(fds[0]);
    (void)close(fds[1]);
    return 0;
}

static void fill(uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        bytes[i] = byte_at(sent + i);
    sent += count;
}

static void add(size_t count) {
    assert_true(count <= sizeof scratch);
    fill(scratch, count);
    assert_true(proto_output_add(&output, scratch, count));
    memset(scratch, 0xee, count); /* copied */
}

/* A payload in a block of the pool, or of its own. */
static const uint8_t *add_payload(size_t count, bool is_in_block) {
    proto_message message = {.kind = PROTO_CHUNK, .payload_bytes = count};
    if (is_in_block) {
        message.block = bt_block_acquire(pool, count);
        assert_non_null(message.block);
        message.payload = message.block->bytes;
    } else {
        message.payload = bt_malloc(count);
        assert_non_null(message.payload);
    }
    const uint8_t *payload = message.payload;
    fill(message.payload, count);
    assert_true(proto_output_add_payload(&output, &message));
    assert_null(message.payload);
    assert_null(message.block);
    return payload;
}

/* All that is there is right; how much. */
static size_t drain(void) {
    size_t sum = 0;
    for (;;) {
        const ssize_t got = read(fds[1], scratch, sizeof scratch);
        if (got < 0) assert_int_equal(errno, EAGAIN);
        if (got <= 0) return sum;
        for (ssize_t i = 0; i < got; i++)
            assert_int_equal(scratch[i], byte_at(received + (uint64_t)i));
        received += (uint64_t)got;
        sum += (size_t)got;
    }
}

static void write_all(void) {
    int number = EAGAIN;
    while (number != 0) {
        number = proto_output_write(&output, fds[0], SIZE_MAX);
        assert_true(number == 0 || number == EAGAIN);
        (void)drain();
    }
    assert_int_equal(output.bytes, 0);
    assert_int_equal(output.count, 0);
    assert_int_equal(received, sent);
}

static void short_pieces_are_gathered(void **state) {
    (void)state;
    for (size_t i = 1; i <= 60; i++)
        add(i);
    assert_int_equal(output.count, 1);
    assert_int_equal(output.bytes, 60 * 61 / 2);
    write_all();
}

static void payloads_go_by_reference_from_some_length_on(void **state) {
    (void)state;
    for (int is_in_block = 0; is_in_block <= 1; is_in_block++) {
        const uint8_t *short_one = add_payload(BY_REFERENCE - 1, is_in_block != 0);
        assert_int_equal(output.count, 1);
        assert_ptr_not_equal(output.pieces[output.first].bytes, short_one);
        const uint8_t *long_one = add_payload(BY_REFERENCE, is_in_block != 0);
        assert_int_equal(output.count, 2);
        assert_ptr_equal(output.pieces[(output.first + 1) % output.capacity].bytes, long_one);
        add(10); /* behind it: not one piece with what is before it */
        assert_int_equal(output.count, 3);
        write_all();
    }
}

/* Once all of it is written the same memory takes the next. */
static void the_gathered_memory_is_used_again(void **state) {
    (void)state;
    add(10);
    const uint8_t *place = output.pieces[output.first].bytes;
    write_all();
    add(10);
    assert_ptr_equal(output.pieces[output.first].bytes, place);
    write_all();
    for (int round = 0; round < 100; round++) {
        add(GATHER);
        write_all();
        assert_true(bt_block_pool_used_bytes(pool) <= GATHER + GATHER / 8);
        assert_int_equal(bt_block_pool_idle_bytes(pool), 0);
    }
    for (int i = 0; i < 10; i++) /* what is not written stays, so others come beside it */
        add(GATHER);
    assert_true(bt_block_pool_used_bytes(pool) >= 10 * GATHER);
    write_all();
    assert_true(bt_block_pool_used_bytes(pool) <= GATHER + GATHER / 8);
    add(2 * GATHER); /* longer than such a block */
    write_all();
}

/* The ring of pieces grows while its first is anywhere in it. */
static void many_pieces_keep_their_order(void **state) {
    (void)state;
    for (size_t begin = 0; begin < 20; begin++) {
        for (size_t i = 0; i < begin; i++) {
            add(3);
            (void)add_payload(BY_REFERENCE + i, i % 2 != 0);
        }
        const size_t some = begin * BY_REFERENCE / 2 + 1;
        assert_int_equal(proto_output_write(&output, fds[0], some), 0);
        (void)drain();
        for (size_t i = 0; i < 40; i++) {
            add(5);
            (void)add_payload(BY_REFERENCE + i, i % 2 == 0);
        }
        write_all();
    }
}

/* A limit is kept to the byte, also inside a piece. */
static void no_more_is_written_than_asked_for(void **state) {
    (void)state;
    for (size_t i = 0; i < 6; i++) {
        add(100);
        (void)add_payload(2000, false);
    }
    for (size_t most = 1; output.bytes > 0; most = most * 2 + 7) {
        const size_t before = output.bytes;
        const size_t expected = most < before ? most : before;
        assert_int_equal(proto_output_write(&output, fds[0], most), 0);
        assert_int_equal(output.bytes, before - expected);
        assert_int_equal(drain(), expected);
    }
    assert_int_equal(received, sent);
}

static void a_full_socket_is_said(void **state) {
    (void)state;
    for (int i = 0; i < 100; i++)
        (void)add_payload(50000, i % 2 != 0);
    assert_int_equal(proto_output_write(&output, fds[0], SIZE_MAX), EAGAIN);
    assert_true(output.bytes > 0 && output.bytes < sent);
    write_all();
}

static void a_broken_socket_is_said(void **state) {
    (void)state;
    add(10);
    (void)shutdown(fds[1], SHUT_RDWR);
    assert_int_equal(proto_output_write(&output, fds[0], SIZE_MAX), EPIPE);
    assert_int_equal(output.bytes, 10); /* whoever owns it gives it up */
}

#ifdef BT_FAULT
/* One of everything, with the nth allocation failing; true when that one was not reached. */
static bool add_with_fault(uint64_t nth, size_t payloads_first) {
    enum { PAYLOADS = 12 };
    proto_message messages[PAYLOADS];
    bool is_whole = true;
    for (size_t i = 0; i < PAYLOADS; i++) {
        const size_t count = i % 3 == 2 ? 20 : BY_REFERENCE + i;
        messages[i] = (proto_message){.kind = PROTO_CHUNK, .payload_bytes = count};
        if (i % 2 == 0) messages[i].block = bt_block_acquire(pool, count);
        messages[i].payload = i % 2 == 0 ? messages[i].block->bytes : bt_malloc(count);
        assert_non_null(messages[i].payload);
        memset(messages[i].payload, 0, count);
    }
    bt_fault_set(BT_FAULT_ALLOC, nth);
    for (size_t i = 0; i < PAYLOADS; i++) {
        if (i >= payloads_first) is_whole = is_whole && proto_output_add(&output, scratch, 9000);
        if (is_whole) {
            is_whole = proto_output_add_payload(&output, &messages[i]);
        } else {
            proto_message_drop_payload(&messages[i]);
        }
        assert_null(messages[i].payload); /* taken in any case */
        assert_null(messages[i].block);
    }
    const bool is_past = bt_fault_visits(BT_FAULT_ALLOC) < nth;
    bt_fault_set(BT_FAULT_ALLOC, 0);
    assert_int_equal(is_whole, is_past);
    proto_output_fini(&output);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    bt_block_pool_destroy(pool); /* nothing is warm the next time */
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    assert_int_equal(bt_block_pool_create(&options, &pool), BT_OK);
    proto_output_init(&output, pool);
    return is_past;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    for (size_t payloads_first = 0; payloads_first < 3; payloads_first++) {
        uint64_t nth = 1;
        while (!add_with_fault(nth, payloads_first))
            nth++;
        assert_true(nth > 7); /* pieces, once more, and blocks */
    }
}
#endif

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(short_pieces_are_gathered),         CASE(payloads_go_by_reference_from_some_length_on),
        CASE(the_gathered_memory_is_used_again), CASE(many_pieces_keep_their_order),
        CASE(no_more_is_written_than_asked_for), CASE(a_full_socket_is_said),
        CASE(a_broken_socket_is_said),
#ifdef BT_FAULT
        CASE(every_allocation_may_fail),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
