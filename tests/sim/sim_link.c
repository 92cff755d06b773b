/* Connections: frames in order, each delayed, through the real codec. A close is a frame too, so
 * that it arrives behind what was sent before it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "proto/codec.h"
#include "tests/sim/sim.h"

enum { DIAL_RETRY_US = 300 * 1000 };

static sim_link *link_of(sim *s, uint64_t number) {
    assert_in_range(number, 1, s->link_count);
    return &s->links[number - 1];
}

static void free_frame(sim_frame *frame) {
    bt_free(frame->bytes);
    if (frame->block != NULL) {
        bt_block_release(frame->block);
    } else {
        bt_free(frame->payload);
    }
    bt_free(frame);
}

static void clear(sim_direction *d) {
    while (d->first != NULL) {
        sim_frame *frame = d->first;
        d->first = frame->next;
        free_frame(frame);
    }
    d->last = NULL;
    d->bytes = 0;
}

/* ---- delivery -------------------------------------------------------------------------------- */

static void pump(sim *s, uint64_t number, uint64_t end);

static void schedule(sim *s, uint64_t number, uint64_t end) {
    const sim_direction *d = &link_of(s, number)->to[end];
    if (d->first != NULL) sim_at(s, d->first->ready_us, pump, number, end);
}

static void enqueue(sim *s, uint64_t number, int end, sim_frame *frame) {
    sim_direction *d = &link_of(s, number)->to[end];
    const uint64_t soonest = s->now_us + sim_delay(s, s->scenario.link_us);
    frame->ready_us = soonest > d->last_us ? soonest : d->last_us;
    frame->next = NULL;
    d->last_us = frame->ready_us;
    d->bytes += frame->header_bytes + frame->payload_bytes;
    if (d->last == NULL) {
        d->first = frame;
    } else {
        d->last->next = frame;
    }
    d->last = frame;
    if (d->first == frame) schedule(s, number, (uint64_t)end);
}

static bool is_router_current(const sim *s, const sim_link *link) {
    return s->router.d != NULL && s->router.life == link->router_life;
}

static void deliver(sim *s, uint64_t number, int end, const sim_frame *frame) {
    sim_link *link = link_of(s, number);
    static proto_message message;
    bt_error error = {.text = ""};
    if (!link->is_open[end]) return;
    if (frame->is_close) {
        link->is_open[end] = false;
        if (end == SIM_AT_WORKER) {
            sim_worker_on_closed(s, link->worker, link->lane);
        } else if (is_router_current(s, link)) {
            dispatch_on_closed(s->router.d, number, s->now_us);
        }
        return;
    }
    if (proto_decode(frame->bytes, frame->header_bytes, frame->payload, frame->payload_bytes,
                     &message, &error) != BT_OK) {
        fail_msg("a message does not decode: %s", error.text);
    }
    message.block = frame->block;
    if (end == SIM_AT_WORKER) {
        sim_worker_on_message(s, link->worker, link->lane, &message);
    } else if (is_router_current(s, link)) {
        dispatch_on_message(s->router.d, number, &message, s->now_us);
    }
}

static void pump(sim *s, uint64_t number, uint64_t end) {
    sim_link *link = link_of(s, number);
    sim_direction *d = &link->to[end];
    sim_frame *frame = d->first;
    if (frame == NULL || frame->ready_us > s->now_us) return; /* the queue was cleared */
    const sim_worker *w = &s->workers[link->worker];
    if (end == SIM_AT_WORKER && link->is_open[end] && sim_worker_is_frozen(s, w)) {
        sim_at(s, w->frozen_until_us, pump, number, end);
        return;
    }
    d->first = frame->next;
    if (d->first == NULL) d->last = NULL;
    d->bytes -= frame->header_bytes + frame->payload_bytes;
    schedule(s, number, end);
    deliver(s, number, (int)end, frame);
    free_frame(frame);
    /* Room on a streams connection. */
    if (end == SIM_AT_ROUTER && link->lane == PROTO_LANE_STREAMS && link->is_open[SIM_AT_WORKER]) {
        sim_worker_turn(s, link->worker);
    }
}

/* ---- sending --------------------------------------------------------------------------------- */

uint64_t sim_digest(uint64_t digest, const void *bytes, size_t count) {
    const uint8_t *at = bytes;
    for (size_t i = 0; i < count; i++)
        digest = (digest ^ at[i]) * 1099511628211u;
    return digest;
}

static void watch(sim_watch *w, const sim_frame *frame) {
    if (w == NULL || w->is_on == 0) return;
    w->frames++;
    w->frame_bytes += frame->header_bytes + frame->payload_bytes;
    w->frame_digest = sim_digest(w->frame_digest, frame->bytes, frame->header_bytes);
    w->frame_digest = sim_digest(w->frame_digest, frame->payload, frame->payload_bytes);
}

void sim_link_send(sim *s, uint64_t number, int from, proto_message *message) {
    sim_link *link = link_of(s, number);
    uint8_t header[PROTO_FRAME_HEADER_MAX];
    bt_error error = {.text = ""};
    if (!link->is_open[from]) {
        proto_message_drop_payload(message);
        return;
    }
    sim_frame *frame = bt_calloc(1, sizeof *frame);
    assert_non_null(frame);
    if (proto_encode(message, header, sizeof header, &frame->header_bytes, &error) != BT_OK) {
        fail_msg("a message cannot be sent: %s", error.text);
    }
    frame->payload = message->payload;
    frame->payload_bytes = message->payload_bytes;
    frame->block = message->block;
    message->payload = NULL;
    message->block = NULL;
    frame->bytes = bt_malloc(frame->header_bytes);
    assert_non_null(frame->bytes);
    memcpy(frame->bytes, header, frame->header_bytes);
    watch(s->scenario.watch, frame);
    enqueue(s, number, from == SIM_AT_ROUTER ? SIM_AT_WORKER : SIM_AT_ROUTER, frame);
}

static void enqueue_close(sim *s, uint64_t number, int end) {
    sim_frame *frame = bt_calloc(1, sizeof *frame);
    assert_non_null(frame);
    frame->is_close = true;
    enqueue(s, number, end, frame);
}

void sim_link_close(sim *s, uint64_t number, int end) {
    sim_link *link = link_of(s, number);
    if (!link->is_open[end]) return;
    link->is_open[end] = false;
    enqueue_close(s, number, 1 - end);
}

void sim_link_abort(sim *s, uint64_t number, int end) {
    sim_link *link = link_of(s, number);
    if (!link->is_open[end]) return;
    if (sim_random(s, 2) == 0) clear(&link->to[1 - end]);
    sim_link_close(s, number, end);
}

static void hear_of_loss(sim *s, uint64_t number, uint64_t end) {
    sim_link *link = link_of(s, number);
    if (!link->is_open[end]) return;
    clear(&link->to[end]);
    enqueue_close(s, number, (int)end);
}

/* What is on its way is gone at once; what is sent from now on goes nowhere, as far as is known:
 * everything is held back behind the news of the loss. */
void sim_link_lose(sim *s, uint64_t number) {
    sim_link *link = link_of(s, number);
    for (int end = 0; end < SIM_ENDS; end++) {
        const uint64_t heard_us = s->now_us + sim_random(s, 2 * SIM_SECOND);
        clear(&link->to[end]);
        link->to[end].last_us = heard_us + SIM_SECOND;
        sim_at(s, heard_us, hear_of_loss, number, (uint64_t)end);
    }
}

/* ---- opening --------------------------------------------------------------------------------- */

static void open_link(sim *s, uint64_t which, uint64_t session) {
    const uint32_t index = (uint32_t)(which >> 8);
    const proto_lane lane = (proto_lane)(which & 0xff);
    sim_worker *w = &s->workers[index];
    if (!w->is_up || w->session != session || w->links[lane] != 0) return;
    if (sim_worker_is_frozen(s, w)) {
        sim_at(s, w->frozen_until_us, open_link, which, session);
        return;
    }
    if (s->router.d == NULL) { /* streams are not dialled again: control ends as well */
        if (lane == PROTO_LANE_CONTROL) sim_after(s, DIAL_RETRY_US, open_link, which, session);
        return;
    }
    assert_true(s->link_count < SIM_LINKS_MAX);
    sim_link *link = &s->links[s->link_count++];
    *link = (sim_link){.worker = index,
                       .life = w->life,
                       .router_life = s->router.life,
                       .lane = lane,
                       .is_open = {true, true}};
    w->links[lane] = s->link_count;
    dispatch_on_opened(s->router.d, s->link_count, s->now_us);
    sim_worker_on_open(s, index, lane);
}

void sim_link_dial(sim *s, uint32_t worker, proto_lane lane, uint64_t delay_us) {
    const uint64_t which = (uint64_t)worker << 8 | (uint64_t)lane;
    sim_after(s, delay_us + sim_delay(s, s->scenario.link_us), open_link, which,
              s->workers[worker].session);
}

void sim_links_free(sim *s) {
    for (uint64_t i = 0; i < s->link_count; i++) {
        clear(&s->links[i].to[SIM_AT_ROUTER]);
        clear(&s->links[i].to[SIM_AT_WORKER]);
    }
}
