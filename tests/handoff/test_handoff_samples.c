/* Several rows of one attempt: each in its own slot, with its own index, once; a sample that got no
 * token is told by its status, but never all of them. A prefill end that lies is played here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/crc32c.h"
#include "pd_buffers/handoff_wire.h"
#include "rogue.h"

enum { NUMBER = 77, PAGES = 4, SAMPLES = 3, PROMPT = PAGES * ROGUE_PAGE_TOKENS - 1 };
static const uint64_t deadline_us = 1000 * 1000;

static sample the_sample = {.number = NUMBER,
                            .prompt_tokens = PROMPT,
                            .mask_mode = ROW_MASK_SELECTED,
                            .support_count = 2,
                            .samples = SAMPLES};

typedef struct lie {
    uint32_t in_slot_of; /* header and row name the slot of this sample */
    uint32_t index;      /* the row says that it is of this sample */
    uint32_t status;
    int32_t first_token; /* -2: the right one */
    uint32_t chunk_count;
    uint32_t cap_needed; /* 0: the right one */
} lie;

static rogue *start(uint32_t *checksum_out) {
    rogue *r = rogue_create(false);
    assert_int_equal(end_expect(r->honest, &the_sample, r->self, r->now_us + deadline_us), BT_OK);
    for (uint32_t i = 0; i < PAGES; i++)
        sample_fill_page(&the_sample, i, r->payload + i * ROGUE_PAGE_BYTES, ROGUE_PAGE_BYTES);
    const size_t bytes = (size_t)PAGES * ROGUE_PAGE_BYTES;
    *checksum_out = bt_crc32c(0, r->payload, bytes);
    const end_attempt *a = end_find(r->honest, NUMBER);
    const handoff_header header = {
        .kind = HANDOFF_CHUNK,
        .attempt = a->id,
        .slot = a->slots[0],
        .payload_bytes = bytes,
        .span = {.page_count = PAGES, .layer_count = ROGUE_LAYERS},
        .payload_crc = *checksum_out,
    };
    rogue_send(r, &header, bytes);
    return r;
}

static void send_row(rogue *r, uint32_t checksum, const lie *l) {
    static sample_row storage;
    const end_attempt *a = end_find(r->honest, NUMBER);
    const row_slot slot = a->slots[l->in_slot_of];
    const sample s = sample_at(&the_sample, l->in_slot_of);
    sample_make_row(&s, &storage);
    metadata_row row = storage.row;
    row.attempt = a->id;
    row.sample_index = l->index;
    row.slot = slot.index;
    row.slot_generation = slot.generation;
    row.writer_incarnation = r->self.incarnation;
    row.chunk_count = l->chunk_count;
    row.page_count = PAGES;
    row.kv_bytes = PAGES * ROGUE_PAGE_BYTES;
    row.prompt_tokens = PROMPT;
    row.status = l->status;
    if (l->first_token != -2) row.first_token = l->first_token;
    if (l->status != 0) row.support_count = 0;
    if (l->cap_needed != 0) row.cap_needed = l->cap_needed;
    const uint32_t checksums[2] = {checksum, 0};
    size_t bytes = 0;
    assert_int_equal(row_encode(&row, checksums, r->payload, sizeof r->payload, &bytes), BT_OK);
    const handoff_header header = {
        .kind = HANDOFF_ROW, .attempt = a->id, .slot = slot, .payload_bytes = bytes};
    rogue_send(r, &header, bytes);
}

static lie truth(uint32_t index) {
    return (lie){.in_slot_of = index, .index = index, .first_token = -2, .chunk_count = 1};
}

static void ready_needs_every_row(void **state) {
    (void)state;
    static const uint32_t orders[][SAMPLES] = {{0, 1, 2}, {2, 0, 1}, {1, 2, 0}};
    for (size_t o = 0; o < sizeof orders / sizeof orders[0]; o++) {
        uint32_t checksum;
        rogue *r = start(&checksum);
        for (uint32_t i = 0; i < SAMPLES; i++) {
            assert_int_equal(end_find(r->honest, NUMBER)->ready, 0);
            assert_int_equal(r->acks, 0);
            const lie l = truth(orders[o][i]);
            send_row(r, checksum, &l);
        }
        assert_int_equal(end_find(r->honest, NUMBER)->ready, 1);
        assert_true(end_find(r->honest, NUMBER)->is_intact);
        assert_int_equal(r->acks, 1);
        rogue_destroy(r);
    }
}

static void rows_that_lie_fail_the_attempt(void **state) {
    (void)state;
    static const struct {
        lie l;
        bt_status status;
        const char *what;
    } cases[] = {
        {{1, 1, 0, -2, 1, 0}, BT_ERR_REQUEST_DUPLICATE, "row of sample 1 came twice"},
        {{2, 0, 0, -2, 1, 0}, BT_ERR_REQUEST_CORRUPT, "sample index"},
        {{2, SAMPLES, 0, -2, 1, 0}, BT_ERR_REQUEST_CORRUPT, "sample index"},
        {{2, 2, 3, -1, 1, 0}, BT_ERR_REQUEST_CORRUPT, "status"},
        {{2, 2, 1, 5, 1, 0}, BT_ERR_REQUEST_CORRUPT, "first token"},
        {{2, 2, 0, -2, 2, 0}, BT_ERR_REQUEST_CORRUPT, "chunk count"},
        {{2, 2, 1, -1, 1, ROGUE_CAP}, BT_ERR_REQUEST_CORRUPT, "cap needed"}, /* it would fit */
        {{2, 2, 2, -1, 1, ROGUE_CAP + 1}, BT_ERR_REQUEST_CORRUPT, "cap needed"},
        {{2, 2, 0, -2, 1, 3}, BT_ERR_REQUEST_CORRUPT, "cap needed"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t checksum;
        rogue *r = start(&checksum);
        const lie first = truth(1);
        send_row(r, checksum, &first);
        send_row(r, checksum, &cases[i].l);
        const end_attempt *a = end_find(r->honest, NUMBER);
        assert_int_equal(a->failed, 1);
        assert_int_equal(a->quiet, 1);
        assert_int_equal(a->status, cases[i].status);
        if (strstr(a->text, cases[i].what) == NULL) fail_msg("%s", a->text);
        rogue_destroy(r);
    }
}

/* A support that is cut is no overflow, and without a mask there is none. */
static void only_exact_masks_overflow(void **state) {
    (void)state;
    const sample exact = the_sample;
    for (int i = 0; i < 2; i++) {
        uint32_t checksum;
        if (i == 0) the_sample.true_size = the_sample.support_count;
        if (i == 1) the_sample.mask_mode = ROW_MASK_OFF;
        rogue *r = start(&checksum);
        const lie first = truth(1);
        send_row(r, checksum, &first);
        const lie l = {2, 2, 1, -1, 1, ROGUE_CAP + 1};
        send_row(r, checksum, &l);
        const end_attempt *a = end_find(r->honest, NUMBER);
        assert_int_equal(a->failed, 1);
        if (strstr(a->text, "row's status is not") == NULL) fail_msg("%s", a->text);
        rogue_destroy(r);
        the_sample = exact;
    }
}

static void a_sample_without_a_token_is_told_by_its_status(void **state) {
    (void)state;
    for (uint32_t overflown = 0; overflown < SAMPLES; overflown++) {
        uint32_t checksum;
        the_sample.overflown = overflown + 1;
        rogue *r = start(&checksum);
        for (uint32_t i = 0; i < SAMPLES; i++) {
            lie l = truth(i);
            l.status = i == overflown;
            send_row(r, checksum, &l);
        }
        const end_attempt *a = end_find(r->honest, NUMBER);
        assert_int_equal(a->ready, 1);
        assert_true(a->is_intact);
        assert_int_equal(r->acks, 1);
        rogue_destroy(r);
    }
    the_sample.overflown = 0;
}

static void a_chunk_names_the_slot_of_sample_0(void **state) {
    (void)state;
    uint32_t checksum;
    rogue *r = start(&checksum);
    const end_attempt *a = end_find(r->honest, NUMBER);
    const handoff_header header = {
        .kind = HANDOFF_CHUNK,
        .attempt = a->id,
        .slot = a->slots[1],
        .payload_bytes = ROGUE_PAGE_BYTES,
        .chunk_index = 1,
        .span = {.page_count = 1, .layer_count = ROGUE_LAYERS},
    };
    rogue_send(r, &header, ROGUE_PAGE_BYTES);
    assert_int_equal(handoff_receiver_get_counts(r->honest->receiver).dropped_stale, 1);
    assert_int_equal(a->failed, 0);
    end_cancel(r->honest, NUMBER);
    rogue_destroy(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ready_needs_every_row),
        cmocka_unit_test(rows_that_lie_fail_the_attempt),
        cmocka_unit_test(only_exact_masks_overflow),
        cmocka_unit_test(a_sample_without_a_token_is_told_by_its_status),
        cmocka_unit_test(a_chunk_names_the_slot_of_sample_0),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
