/* The framing gives the same frames however the bytes are cut, and refuses impossible sizes. */
#include "proto/frame.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

typedef struct expected_frame {
    uint32_t header_bytes, payload_bytes;
} expected_frame;

static bt_block_pool *pool;
static const expected_frame frames[] = {{1, 0}, {3, 5}, {2, 0}, {40, 17}, {1, 1}};
enum { FRAMES = sizeof frames / sizeof frames[0] };

static uint8_t wire[256];

static uint8_t byte_of(size_t frame, size_t index) {
    return (uint8_t)(frame * 61 + index * 7 + 1);
}

static size_t make_wire(void) {
    size_t used = 0;
    for (size_t i = 0; i < FRAMES; i++) {
        proto_frame_put_prefix(wire + used, frames[i].header_bytes, frames[i].payload_bytes);
        used += PROTO_FRAME_PREFIX_BYTES;
        for (size_t b = 0; b < frames[i].header_bytes + frames[i].payload_bytes; b++)
            wire[used++] = byte_of(i, b);
    }
    return used;
}

static void check_frame(size_t number, const frame_view *view) {
    assert_true(number < FRAMES);
    assert_int_equal(view->header_bytes, frames[number].header_bytes);
    assert_int_equal(view->payload_bytes, frames[number].payload_bytes);
    for (size_t b = 0; b < view->header_bytes; b++)
        assert_int_equal(view->header[b], byte_of(number, b));
    if (view->payload_bytes == 0) {
        assert_null(view->payload);
        return;
    }
    assert_int_equal((uintptr_t)view->payload % 16, 0);
    for (size_t b = 0; b < view->payload_bytes; b++)
        assert_int_equal(((uint8_t *)view->payload)[b], byte_of(number, view->header_bytes + b));
}

/* Feeds one portion; counts whole frames. */
static void feed(frame_reader *reader, const uint8_t *bytes, size_t count, size_t *frames_seen) {
    while (count > 0) {
        uint8_t *to;
        size_t wanted;
        bool is_whole;
        frame_view view;
        frame_reader_want(reader, &to, &wanted);
        assert_true(wanted > 0);
        const size_t part = count < wanted ? count : wanted;
        memcpy(to, bytes, part);
        assert_int_equal(frame_reader_got(reader, part, &is_whole, &view), BT_OK);
        if (is_whole) check_frame((*frames_seen)++, &view);
        bytes += part;
        count -= part;
    }
}

static void every_split_gives_the_same_frames(void **state) {
    (void)state;
    const size_t total = make_wire();
    for (size_t first = 0; first <= total; first++) {
        for (size_t second = first; second <= total; second++) {
            frame_reader *reader;
            size_t seen = 0;
            assert_int_equal(frame_reader_create(pool, &reader), BT_OK);
            feed(reader, wire, first, &seen);
            feed(reader, wire + first, second - first, &seen);
            feed(reader, wire + second, total - second, &seen);
            assert_int_equal(seen, FRAMES);
            assert_true(frame_reader_is_idle(reader));
            frame_reader_destroy(reader);
        }
    }
}

/* Frames one behind the other, the payloads of some kept while the reader goes on. */
static void a_payload_may_be_kept(void **state) {
    (void)state;
    enum { KEPT = 40 };
    static uint8_t frame[PROTO_FRAME_PREFIX_BYTES + 1 + 4 * 1000];
    bt_block *kept[KEPT] = {NULL};
    frame_reader *reader;
    assert_int_equal(frame_reader_create(pool, &reader), BT_OK);
    for (uint32_t i = 0; i < KEPT; i++) {
        const uint32_t bytes = 4 * (1 + i * 97 % 1000);
        size_t at = 0;
        bool is_whole = false;
        frame_view view;
        proto_frame_put_prefix(frame, 1, bytes);
        memset(frame + PROTO_FRAME_PREFIX_BYTES, (int)i, 1 + bytes);
        while (!is_whole) {
            uint8_t *to;
            size_t wanted;
            frame_reader_want(reader, &to, &wanted);
            memcpy(to, frame + at, wanted);
            at += wanted;
            assert_int_equal(frame_reader_got(reader, wanted, &is_whole, &view), BT_OK);
        }
        assert_ptr_equal(view.payload, view.block->bytes);
        assert_true(view.block->capacity <= bytes + bytes / 8 + BT_BLOCK_BYTES_MIN);
        view.block->used = bytes;
        if (i % 3 == 0) continue;
        kept[i] = view.block;
        bt_block_hold(view.block);
    }
    frame_reader_destroy(reader);
    for (uint32_t i = 0; i < KEPT; i++) {
        for (size_t k = 0; kept[i] != NULL && k < kept[i]->used; k++)
            assert_int_equal(kept[i]->bytes[k], i);
        bt_block_release(kept[i]);
    }
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
}

static void single_bytes_and_ends_inside_a_frame(void **state) {
    (void)state;
    const size_t total = make_wire();
    frame_reader *reader;
    size_t seen = 0, idle = 0;
    assert_int_equal(frame_reader_create(pool, &reader), BT_OK);
    for (size_t i = 0; i < total; i++) {
        feed(reader, wire + i, 1, &seen);
        if (frame_reader_is_idle(reader)) idle++;
    }
    assert_int_equal(seen, FRAMES);
    assert_int_equal(idle, FRAMES); /* exactly at the ends of frames */
    frame_reader_destroy(reader);
}

static bt_status try_prefix(uint32_t header_bytes, uint32_t payload_bytes) {
    frame_reader *reader;
    uint8_t *to;
    size_t wanted;
    bool is_whole;
    frame_view view;
    assert_int_equal(frame_reader_create(pool, &reader), BT_OK);
    frame_reader_want(reader, &to, &wanted);
    assert_int_equal(wanted, PROTO_FRAME_PREFIX_BYTES);
    proto_frame_put_prefix(to, header_bytes, payload_bytes);
    const bt_status status = frame_reader_got(reader, wanted, &is_whole, &view);
    assert_false(is_whole);
    frame_reader_destroy(reader);
    return status;
}

static void impossible_sizes_are_refused(void **state) {
    (void)state;
    assert_int_equal(try_prefix(1, 0), BT_OK);
    assert_int_equal(try_prefix(PROTO_FRAME_HEADER_MAX, PROTO_FRAME_PAYLOAD_MAX), BT_OK);
    assert_int_equal(try_prefix(0, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(try_prefix(0, 10), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(try_prefix(PROTO_FRAME_HEADER_MAX + 1, 0), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(try_prefix(1, PROTO_FRAME_PAYLOAD_MAX + 1), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(try_prefix(UINT32_MAX, UINT32_MAX), BT_ERR_PEER_PROTOCOL);
}

static void the_prefix_is_little_endian(void **state) {
    (void)state;
    uint8_t prefix[PROTO_FRAME_PREFIX_BYTES];
    proto_frame_put_prefix(prefix, 0x01020304u, 0xa0b0c0d0u);
    assert_memory_equal(prefix, "\x04\x03\x02\x01\xd0\xc0\xb0\xa0", sizeof prefix);
}

static int make_pool(void **state) {
    (void)state;
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    return bt_block_pool_create(&options, &pool) == BT_OK ? 0 : -1;
}

static int destroy_pool(void **state) {
    (void)state;
    const bool is_all_back = bt_block_pool_used_bytes(pool) == 0;
    bt_block_pool_destroy(pool);
    return is_all_back ? 0 : -1;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_split_gives_the_same_frames),
        cmocka_unit_test(a_payload_may_be_kept),
        cmocka_unit_test(single_bytes_and_ends_inside_a_frame),
        cmocka_unit_test(impossible_sizes_are_refused),
        cmocka_unit_test(the_prefix_is_little_endian),
    };
    return cmocka_run_group_tests(tests, make_pool, destroy_pool);
}
