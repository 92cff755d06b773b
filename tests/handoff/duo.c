/* Fixture of the loop tests. */
#include "duo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

enum { STEPS_MAX = 1000000, DEADLINE_US = 10 * 1000 * 1000 };

static uint64_t read_clock(void *context) {
    return ((const duo *)context)->now_us;
}

static end_options make_options(duo *d, uint32_t number, uint64_t incarnation) {
    xfer *mover = NULL;
    assert_int_equal(xfer_loop_create(d->network, number, &mover), BT_OK);
    mover->self = (xfer_peer){.worker_id = number, .incarnation = incarnation};
    return (end_options){
        .mover = mover,
        .incarnation = incarnation,
        .page_count = 64,
        .page_bytes = d->options.page_bytes == 0 ? DUO_PAGE_BYTES : d->options.page_bytes,
        .layers = DUO_LAYERS,
        .page_tokens = DUO_PAGE_TOKENS,
        .cap = DUO_CAP,
        .rows = 16,
        .checksum = d->options.is_checksum_given ? d->options.checksum : RECORD_CHECKSUM_FULL,
        .chunk_bytes_max =
            d->options.chunk_bytes_max == 0 ? 4 * DUO_PAGE_BYTES : d->options.chunk_bytes_max,
        .sends_in_flight = d->options.sends_in_flight,
        .clock = {.now_us = read_clock, .context = d},
    };
}

void duo_start_prefill(duo *d) {
    const uint64_t incarnation = d->next_incarnation++;
    const end_options options = make_options(d, DUO_PREFILL_NUMBER, incarnation);
    d->prefill = end_create_prefill(&options);
    d->prefill_peer = options.mover->self;
}

void duo_start_decode(duo *d) {
    const uint64_t incarnation = d->next_incarnation++;
    const end_options options = make_options(d, DUO_DECODE_NUMBER, incarnation);
    d->decode = end_create_decode(&options);
    d->decode_peer = options.mover->self;
}

void duo_kill_prefill(duo *d) {
    end_destroy(d->prefill);
    d->prefill = NULL;
}

void duo_kill_decode(duo *d) {
    end_destroy(d->decode);
    d->decode = NULL;
}

static void connect_one(end *e, end *to, xfer_peer peer) {
    const uint8_t *address = NULL;
    size_t bytes = 0;
    const end_peer *known = end_find_peer(e, peer);
    if (known != NULL && known->closed == 0) return;
    xfer *mover = to->options.mover;
    assert_int_equal(mover->ops->get_address(mover, &address, &bytes), BT_OK);
    assert_int_equal(end_connect(e, peer, address, bytes), BT_OK);
}

void duo_connect(duo *d) {
    connect_one(d->prefill, d->decode, d->decode_peer);
    connect_one(d->decode, d->prefill, d->prefill_peer);
    duo_run(d);
    assert_int_equal(end_find_peer(d->prefill, d->decode_peer)->hellos, 1);
    assert_int_equal(end_find_peer(d->decode, d->prefill_peer)->hellos, 1);
}

duo *duo_create(const duo_options *options) {
    duo *d = calloc(1, sizeof *d);
    assert_non_null(d);
    d->options = *options;
    d->next_incarnation = 1000;
    d->now_us = 1;
    d->random = 88172645463325252u;
    const xfer_loop_options network = {
        .part_bytes = options->part_bytes == 0 ? DUO_PAGE_BYTES : options->part_bytes,
        .sends_max = options->sends_max,
        .is_stepped = true,
    };
    assert_int_equal(xfer_loop_network_create(&network, &d->network), BT_OK);
    duo_start_prefill(d);
    duo_start_decode(d);
    duo_connect(d);
    return d;
}

void duo_destroy(duo *d) {
    if (d->prefill != NULL) end_assert_clean(d->prefill);
    if (d->decode != NULL) end_assert_clean(d->decode);
    end_destroy(d->prefill);
    end_destroy(d->decode);
    xfer_loop_network_destroy(d->network);
    free(d);
}

void duo_begin(duo *d, const sample *s) {
    const uint64_t deadline = d->now_us + DEADLINE_US;
    assert_int_equal(end_expect(d->decode, s, d->prefill_peer, deadline), BT_OK);
    const row_slot *slots = end_find(d->decode, s->number)->slots;
    assert_int_equal(end_send(d->prefill, s, d->decode_peer, slots, deadline, 3), BT_OK);
}

static void loops(duo *d) {
    if (d->prefill != NULL) end_loop(d->prefill);
    if (d->decode != NULL) end_loop(d->decode);
}

uint32_t duo_random(duo *d, uint32_t below) {
    d->random ^= d->random << 13;
    d->random ^= d->random >> 7;
    d->random ^= d->random << 17;
    return (uint32_t)((d->random >> 32) % below);
}

bool duo_step_random(duo *d) {
    loops(d);
    const uint32_t count = xfer_loop_event_count(d->network);
    if (count == 0) return false;
    xfer_loop_step(d->network, duo_random(d, count));
    loops(d);
    return true;
}

void duo_run(duo *d) {
    loops(d);
    for (uint32_t steps = 0; xfer_loop_event_count(d->network) > 0; steps++) {
        assert_true(steps < STEPS_MAX);
        xfer_loop_step(d->network, 0);
        loops(d);
    }
}

void duo_wait(duo *d, uint64_t us) {
    d->now_us += us;
    if (d->prefill != NULL) handoff_sender_tick(d->prefill->sender);
    if (d->decode != NULL) handoff_receiver_tick(d->decode->receiver);
    duo_run(d);
}

bool duo_find_event(const duo *d, xfer_loop_event_kind kind, uint32_t *index_out) {
    const uint32_t count = xfer_loop_event_count(d->network);
    for (uint32_t i = 0; i < count; i++) {
        if (xfer_loop_event_at(d->network, i).kind != kind) continue;
        *index_out = i;
        return true;
    }
    return false;
}
