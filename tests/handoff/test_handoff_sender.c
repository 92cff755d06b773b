/* The sender's side of what may go wrong: acks and refusals by a rogue decode, calls that its user
 * must not make, and the deadlines of both ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "duo.h"
#include "rogue.h"

enum { NUMBER = 21, PROMPT = 32, PAGES = 8, DEADLINE_US = 1000000 };

static const sample the_sample = {
    .number = NUMBER, .prompt_tokens = PROMPT, .mask_mode = ROW_MASK_SUPPORT, .support_count = 3};

/* ---- a rogue decode -------------------------------------------------------------------------- */

static const row_slot rogue_slot = {.index = 3, .generation = 5};

static void begin_sending(rogue *r) {
    assert_int_equal(
        end_send(r->honest, &the_sample, r->self, &rogue_slot, r->now_us + DEADLINE_US, 4), BT_OK);
}

static handoff_header make_ack(const rogue *r, bt_status status) {
    return (handoff_header){.kind = HANDOFF_ACK,
                            .attempt = end_find(r->honest, NUMBER)->id,
                            .slot = rogue_slot,
                            .status = status};
}

static void acks_end_the_sender(void **state) {
    (void)state;
    rogue *r = rogue_create(true);
    begin_sending(r);
    r->accepts = true;
    rogue_run(r);
    handoff_header ack = make_ack(r, BT_OK);
    ack.slot.generation++;
    rogue_send(r, &ack, 0);
    ack = make_ack(r, BT_OK);
    ack.attempt.counter++;
    rogue_send(r, &ack, 0);
    assert_int_equal(end_find(r->honest, NUMBER)->acked, 0);
    assert_int_equal(handoff_sender_get_counts(r->honest->sender).dropped_late, 2);
    ack = make_ack(r, BT_OK);
    rogue_send(r, &ack, 0);
    assert_int_equal(end_find(r->honest, NUMBER)->acked, 1);
    rogue_send(r, &ack, 0);
    assert_int_equal(handoff_sender_get_counts(r->honest->sender).dropped_late, 3);
    rogue_destroy(r);
}

static void refusals_fail_the_sender(void **state) {
    (void)state;
    static const struct {
        int32_t said;
        bt_status heard;
    } cases[] = {{BT_ERR_REQUEST_CORRUPT, BT_ERR_REQUEST_CORRUPT},
                 {BT_ERR_REQUEST_STALE, BT_ERR_REQUEST_STALE},
                 {77, BT_ERR_PEER_PROTOCOL}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rogue *r = rogue_create(true);
        begin_sending(r);
        const handoff_header ack = make_ack(r, (bt_status)cases[i].said);
        rogue_send(r, &ack, 0);
        assert_int_equal(end_find(r->honest, NUMBER)->failed, 1);
        assert_int_equal(end_find(r->honest, NUMBER)->status, cases[i].heard);
        assert_int_equal(end_find(r->honest, NUMBER)->quiet, 1);
        rogue_destroy(r);
    }
}

/* Begun, with what the user gives in pieces; an ack comes before the row went out. */
static void an_ack_before_the_row_fails_the_sender(void **state) {
    (void)state;
    rogue *r = rogue_create(true);
    handoff_sender *sender = r->honest->sender;
    end_attempt *a = &r->honest->attempts[0];
    *a = (end_attempt){.id = {0x5eed, NUMBER}, .data = the_sample, .page_count = PAGES};
    assert_int_equal(kv_pool_acquire(r->honest->pages, NUMBER, PAGES, a->pages), BT_OK);
    a->is_holding = true;
    const handoff_target target = {.attempt = a->id,
                                   .peer = r->self,
                                   .sample_count = 1,
                                   .slots = &rogue_slot,
                                   .prompt_tokens = PROMPT,
                                   .deadline_us = r->now_us + DEADLINE_US};
    assert_int_equal(handoff_sender_begin(sender, &target), BT_OK);
    assert_int_equal(handoff_sender_begin(sender, &target), BT_ERR_REQUEST_DUPLICATE);
    assert_int_equal(handoff_sender_pages(sender, a->id, 0, 3, a->pages, false), BT_OK);
    const handoff_header ack = make_ack(r, BT_OK);
    rogue_send(r, &ack, 0);
    assert_int_equal(a->failed, 1);
    assert_int_equal(a->status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(a->quiet, 1);
    rogue_destroy(r);
}

static void the_sender_checks_its_user(void **state) {
    (void)state;
    static sample_row storage;
    rogue *r = rogue_create(true);
    handoff_sender *sender = r->honest->sender;
    end_attempt *a = &r->honest->attempts[0];
    *a = (end_attempt){.id = {0x5eed, NUMBER}, .data = the_sample, .page_count = PAGES};
    assert_int_equal(kv_pool_acquire(r->honest->pages, NUMBER, PAGES, a->pages), BT_OK);
    a->is_holding = true;
    handoff_target target = {.attempt = a->id,
                             .peer = r->self,
                             .sample_count = 1,
                             .slots = &rogue_slot,
                             .prompt_tokens = PROMPT,
                             .deadline_us = r->now_us + DEADLINE_US};
    sample_make_row(&the_sample, &storage);
    assert_int_equal(handoff_sender_row(sender, a->id, &storage.row), BT_ERR_REQUEST_UNKNOWN);
    assert_int_equal(handoff_sender_pages(sender, a->id, 0, 1, a->pages, false),
                     BT_ERR_REQUEST_UNKNOWN);
    target.prompt_tokens = 0;
    assert_int_equal(handoff_sender_begin(sender, &target), BT_ERR_CALLER_ARGUMENT);
    target.prompt_tokens = 65 * ROGUE_PAGE_TOKENS;
    assert_int_equal(handoff_sender_begin(sender, &target), BT_ERR_CALLER_ARGUMENT);
    target.prompt_tokens = PROMPT;
    target.peer.incarnation++;
    assert_int_equal(handoff_sender_begin(sender, &target), BT_ERR_PEER_GONE);
    target.peer = r->self;
    assert_int_equal(handoff_sender_begin(sender, &target), BT_OK);
    const proto_attempt of_another_router = {.router_incarnation = 0x5eee, .counter = NUMBER};
    assert_int_equal(handoff_sender_pages(sender, of_another_router, 0, 1, a->pages, false),
                     BT_ERR_REQUEST_UNKNOWN);
    handoff_sender_abort(sender, of_another_router); /* ignored */
    static const struct {
        uint32_t first, count;
        bool is_last;
    } wrong[] = {{1, 1, false}, {0, 0, false}, {0, 1, true},  {0, PAGES, false},
                 {0, 9, true},  {0, 9, false}, {3, 99, false}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_int_equal(handoff_sender_pages(sender, a->id, wrong[i].first, wrong[i].count,
                                              a->pages, wrong[i].is_last),
                         BT_ERR_CALLER_ARGUMENT);
    storage.row.sample_index = 1; /* of an attempt of one */
    assert_int_equal(handoff_sender_row(sender, a->id, &storage.row), BT_ERR_CALLER_ARGUMENT);
    storage.row.sample_index = 0;
    storage.row.status = 1;
    assert_int_equal(handoff_sender_row(sender, a->id, &storage.row), BT_ERR_CALLER_ARGUMENT);
    storage.row.status = 0;
    storage.row.support_count = ROGUE_CAP + 1;
    assert_int_equal(handoff_sender_row(sender, a->id, &storage.row), BT_ERR_CALLER_LIMIT);
    storage.row.support_count = ROGUE_CAP;
    assert_int_equal(handoff_sender_row(sender, a->id, &storage.row), BT_OK);
    assert_int_equal(handoff_sender_row(sender, a->id, &storage.row), BT_ERR_CALLER_ARGUMENT);
    handoff_sender_abort(sender, a->id);
    assert_int_equal(a->quiet, 1);
    rogue_destroy(r);
}

static void prefill_receives_no_payload(void **state) {
    (void)state;
    for (int kind = HANDOFF_CHUNK; kind <= HANDOFF_ROW; kind++) {
        rogue *r = rogue_create(true);
        begin_sending(r);
        handoff_header header = make_ack(r, BT_OK);
        header.kind = (handoff_kind)kind;
        rogue_send(r, &header, 64);
        assert_int_equal(end_find(r->honest, NUMBER)->status, BT_ERR_PEER_PROTOCOL);
        assert_int_equal(end_find_peer(r->honest, r->self)->closed, 1);
        rogue_destroy(r);
    }
}

/* ---- deadlines ------------------------------------------------------------------------------- */

static void both_ends_have_their_own_deadline(void **state) {
    (void)state;
    const duo_options options = {0};
    duo *d = duo_create(&options);
    /* Decode expects, prefill never begins. */
    assert_int_equal(end_expect(d->decode, &the_sample, d->prefill_peer, d->now_us + 1000), BT_OK);
    duo_wait(d, 999);
    assert_int_equal(end_find(d->decode, NUMBER)->failed, 0);
    duo_wait(d, 1);
    assert_int_equal(end_find(d->decode, NUMBER)->status, BT_ERR_REQUEST_DEADLINE);
    assert_non_null(strstr(end_find(d->decode, NUMBER)->text, "prefill worker 1"));
    assert_int_equal(end_find(d->decode, NUMBER)->quiet, 1);
    duo_destroy(d);
    /* Prefill sends, and the ack does not come. */
    rogue *r = rogue_create(true);
    begin_sending(r);
    r->accepts = true;
    rogue_run(r);
    r->now_us += DEADLINE_US;
    handoff_sender_tick(r->honest->sender);
    assert_int_equal(end_find(r->honest, NUMBER)->status, BT_ERR_REQUEST_DEADLINE);
    assert_non_null(strstr(end_find(r->honest, NUMBER)->text, "ack"));
    assert_int_equal(end_find(r->honest, NUMBER)->quiet, 1);
    rogue_destroy(r);
}

/* A chunk in the middle when the deadline comes: failed at once, the pages stay, and after the
 * grace the peer is named stuck; closing its endpoint brings the pages back. */
static void a_stuck_chunk_costs_the_endpoint(void **state) {
    (void)state;
    const duo_options options = {.part_bytes = 512};
    uint32_t index = 0;
    duo *d = duo_create(&options);
    duo_begin(d, &the_sample);
    assert_true(duo_find_event(d, XFER_LOOP_DELIVER, &index));
    xfer_loop_step(d->network, index);
    assert_true(duo_find_event(d, XFER_LOOP_COPY, &index));
    xfer_loop_step(d->network, index);
    d->now_us += 10u * 1000 * 1000;
    handoff_receiver_tick(d->decode->receiver);
    handoff_sender_tick(d->prefill->sender);
    assert_int_equal(end_find(d->decode, NUMBER)->status, BT_ERR_REQUEST_DEADLINE);
    assert_int_equal(end_find(d->prefill, NUMBER)->status, BT_ERR_REQUEST_DEADLINE);
    assert_int_equal(end_find(d->decode, NUMBER)->quiet, 0);
    d->now_us += HANDOFF_CHUNK_GRACE_US - 1;
    handoff_receiver_tick(d->decode->receiver);
    handoff_sender_tick(d->prefill->sender);
    assert_int_equal(end_find_peer(d->decode, d->prefill_peer)->stuck, 0);
    assert_int_equal(end_find_peer(d->prefill, d->decode_peer)->stuck, 0);
    d->now_us += 1;
    handoff_receiver_tick(d->decode->receiver);
    handoff_receiver_tick(d->decode->receiver);
    assert_int_equal(end_find_peer(d->decode, d->prefill_peer)->stuck, 1);
    handoff_sender_tick(d->prefill->sender);
    handoff_sender_tick(d->prefill->sender);
    assert_int_equal(end_find_peer(d->prefill, d->decode_peer)->stuck, 1);
    assert_int_equal(end_find(d->decode, NUMBER)->quiet, 0);
    duo_run(d);
    assert_int_equal(end_find_peer(d->decode, d->prefill_peer)->closed, 1);
    assert_int_equal(end_find(d->decode, NUMBER)->quiet, 1);
    duo_destroy(d);
}

/* The mover of decode has no room for the ack and gets none: the record is kept as long as prefill
 * may wait for it, and no longer. */
static void an_ack_that_finds_no_room_is_given_up(void **state) {
    (void)state;
    const duo_options options = {.sends_max = 1, .part_bytes = 1 << 20};
    duo *d = duo_create(&options);
    uint32_t index = 0;
    duo_begin(d, &the_sample);
    while (handoff_receiver_get_counts(d->decode->receiver).ready == 0) {
        /* Its one send is taken by something that does not arrive. */
        const handoff_header other = {.kind = HANDOFF_ACK, .attempt = {1, 999}};
        uint8_t bytes[HANDOFF_HEADER_BYTES];
        xfer *mover = d->decode->options.mover;
        handoff_header_encode(&other, bytes);
        const bt_status status = mover->ops->send(mover, d->prefill_peer, bytes, sizeof bytes, NULL,
                                                  0, HANDOFF_TOKEN_NONE);
        assert_true(status == BT_OK || status == BT_ERR_REQUEST_FULL);
        bool has_stepped = false;
        for (index = 0; index < xfer_loop_event_count(d->network) && !has_stepped; index++) {
            const xfer_loop_event event = xfer_loop_event_at(d->network, index);
            const bool is_other =
                event.kind == XFER_LOOP_DELIVER && event.at == d->prefill->options.mover;
            if (is_other) continue;
            xfer_loop_step(d->network, index);
            has_stepped = true;
        }
        assert_true(has_stepped);
    }
    assert_int_equal(handoff_receiver_active_count(d->decode->receiver), 1);
    d->now_us += 10u * 1000 * 1000; /* the deadline */
    handoff_receiver_tick(d->decode->receiver);
    assert_int_equal(handoff_receiver_active_count(d->decode->receiver), 1);
    d->now_us += HANDOFF_CHUNK_GRACE_US;
    handoff_receiver_tick(d->decode->receiver);
    assert_int_equal(handoff_receiver_active_count(d->decode->receiver), 0);
    duo_wait(d, 1);
    assert_int_equal(end_find(d->decode, NUMBER)->ready, 1);
    assert_int_equal(end_find(d->prefill, NUMBER)->status, BT_ERR_REQUEST_DEADLINE);
    assert_int_equal(end_find(d->prefill, NUMBER)->quiet, 1);
    duo_destroy(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(acks_end_the_sender),
        cmocka_unit_test(refusals_fail_the_sender),
        cmocka_unit_test(an_ack_before_the_row_fails_the_sender),
        cmocka_unit_test(the_sender_checks_its_user),
        cmocka_unit_test(prefill_receives_no_payload),
        cmocka_unit_test(both_ends_have_their_own_deadline),
        cmocka_unit_test(a_stuck_chunk_costs_the_endpoint),
        cmocka_unit_test(an_ack_that_finds_no_room_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
