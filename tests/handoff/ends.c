/* The two ends differ in who sends; what they do with events is the same. */
#include "ends.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const uint64_t router_incarnation = 0x5eed;
static const uint64_t marker = UINT64_C(0xDEADDEADDEADDEAD);

static void scribble(end *e, uint32_t page) {
    uint64_t *words = kv_pool_page(e->pages, page);
    for (size_t i = 0; i < e->options.page_bytes / 8; i++)
        words[i] = marker;
}

end_attempt *end_find(end *e, uint64_t number) {
    for (uint32_t i = 0; i < ENDS_ATTEMPTS_MAX; i++)
        if (e->attempts[i].id.counter == number) return &e->attempts[i];
    return NULL;
}

/* A record for a new attempt: one that was never used or whose attempt is over. */
static end_attempt *take_attempt(end *e, const sample *s) {
    assert_null(end_find(e, s->number));
    end_attempt *found = NULL;
    for (uint32_t i = 0; i < ENDS_ATTEMPTS_MAX && found == NULL; i++)
        if (e->attempts[i].id.counter == 0) found = &e->attempts[i];
    for (uint32_t i = 0; i < ENDS_ATTEMPTS_MAX && found == NULL; i++)
        if (!e->attempts[i].is_holding) found = &e->attempts[i];
    assert_non_null(found);
    *found = (end_attempt){.id = {router_incarnation, s->number}, .data = *s};
    return found;
}

static void release(end *e, end_attempt *a) {
    assert_true(a->is_holding);
    a->is_holding = false;
    for (uint32_t i = 0; i < a->page_count; i++)
        scribble(e, a->pages[i]);
    kv_pool_release(e->pages, a->id.counter, a->pages, a->page_count);
    for (uint32_t i = 0; e->receiver != NULL && i < sample_count(&a->data); i++)
        row_pool_release(e->rows, a->slots[i]);
}

static end_attempt *event_attempt(end *e, proto_attempt id) {
    assert_int_equal(id.router_incarnation, router_incarnation);
    end_attempt *a = end_find(e, id.counter);
    assert_non_null(a);
    assert_int_equal(a->ready + a->acked + a->quiet, 0); /* nothing follows the end */
    return a;
}

/* All that a queue holds, in one piece; of no more parts than there are rows. */
static size_t take_stream(row_queue *queue, uint8_t *out, size_t out_bytes) {
    size_t bytes = 0;
    row_slice part;
    for (uint32_t i = 0; i <= ENDS_STEPS && row_queue_take(queue, out_bytes - bytes, &part); i++) {
        memcpy(out + bytes, part.bytes, part.count);
        bytes += part.count;
        bt_block_release(part.block);
    }
    return bytes;
}

static bool is_intact_row(const end *e, const sample *s, const metadata_row *row) {
    const row_queue_options options = {.blocks = e->blocks,
                                       .mask_mode = s->mask_mode,
                                       .cap = e->options.cap,
                                       .top_logprobs = s->top_count,
                                       .logprob_ids = s->id_logprob_count,
                                       .bytes_max = 4u << 20};
    static uint8_t stream[4u << 20];
    static sample_row storage;
    if (s->overflown != 0)
        return row->status == 1 && row->first_token == -1 && row->weights_version != 0 &&
               row->cap_needed == SAMPLE_CAP_MAX + 1 + s->support_count;
    row_queue *queue = NULL;
    assert_int_equal(row_queue_create(&options, &queue), BT_OK);
    assert_int_equal(row_queue_push_first(queue, row), BT_OK);
    for (uint32_t step = 1; step <= ENDS_STEPS; step++) {
        token_row next;
        sample_make_step(s, step, &storage, &next);
        assert_int_equal(row_queue_push(queue, &next), BT_OK);
    }
    const size_t bytes = take_stream(queue, stream, sizeof stream);
    const bool is_same = sample_is_stream(s, stream, bytes, ENDS_STEPS);
    const bool is_empty =
        row_queue_bytes(queue) == 0 && row_queue_taken(queue) == row_queue_pushed(queue);
    row_queue_destroy(queue);
    return is_same && is_empty && row->cached_tokens == sample_cached_tokens(s) &&
           row->prompt_tokens == s->prompt_tokens;
}

static bool is_intact(end *e, end_attempt *a, const metadata_row *rows) {
    for (uint32_t i = 0; i < a->page_count; i++)
        if (!sample_is_page(&a->data, i, kv_pool_page(e->pages, a->pages[i]),
                            e->options.page_bytes))
            return false;
    for (uint32_t i = 0; i < sample_count(&a->data); i++) {
        const sample s = sample_at(&a->data, i);
        if (!is_intact_row(e, &s, &rows[i]) || rows[i].sample_index != i) return false;
    }
    return true;
}

static void on_ready(void *context, proto_attempt id, const metadata_row *rows) {
    end *e = context;
    end_attempt *a = event_attempt(e, id);
    a->is_intact = is_intact(e, a, rows);
    assert_int_equal(a->failed, 0);
    a->ready++;
    release(e, a);
}

static void on_acked(void *context, proto_attempt id) {
    end *e = context;
    end_attempt *a = event_attempt(e, id);
    assert_int_equal(a->failed, 0);
    a->acked++;
    release(e, a);
}

static void on_failed(void *context, proto_attempt id, bt_status status, const char *text) {
    end *e = context;
    end_attempt *a = event_attempt(e, id);
    assert_int_equal(a->failed, 0);
    assert_int_not_equal(status, BT_OK);
    assert_true(strlen(text) > 0);
    a->failed++;
    a->status = status;
    (void)snprintf(a->text, sizeof a->text, "%s", text);
    kv_pool_quarantine(e->pages, a->id.counter, a->pages, a->page_count);
}

static void on_quiet(void *context, proto_attempt id) {
    end *e = context;
    end_attempt *a = event_attempt(e, id);
    a->quiet++;
    release(e, a);
}

end_peer *end_find_peer(end *e, xfer_peer peer) {
    for (uint32_t i = 0; i < ENDS_PEERS_MAX; i++)
        if (e->peers[i].id.worker_id == peer.worker_id &&
            e->peers[i].id.incarnation == peer.incarnation)
            return &e->peers[i];
    return NULL;
}

static void on_hello(void *context, xfer_peer peer) {
    end_peer *p = end_find_peer(context, peer);
    assert_non_null(p);
    p->hellos++;
}

static void on_stuck(void *context, xfer_peer peer) {
    end_peer *p = end_find_peer(context, peer);
    assert_non_null(p);
    p->stuck++;
    p->wants_disconnect = true;
}

static void on_peer_failed(void *context, xfer_peer peer, bt_status status) {
    end_peer *p = end_find_peer(context, peer);
    assert_non_null(p);
    assert_int_equal(bt_status_scope(status), BT_SCOPE_PEER);
    p->failed++;
    p->wants_disconnect = true;
}

static void on_peer_closed(void *context, xfer_peer peer) {
    end *e = context;
    end_peer *p = end_find_peer(e, peer);
    assert_non_null(p);
    p->closed++;
}

static handoff_peer_events peer_events(end *e) {
    return (handoff_peer_events){.on_hello = on_hello,
                                 .on_stuck = on_stuck,
                                 .on_peer_failed = on_peer_failed,
                                 .on_peer_closed = on_peer_closed,
                                 .context = e};
}

static end *create(const end_options *options) {
    end *e = calloc(1, sizeof *e);
    assert_non_null(e);
    e->options = *options;
    const kv_pool_options pages = {.page_count = options->page_count,
                                   .page_bytes = options->page_bytes,
                                   .layers = options->layers};
    assert_int_equal(kv_pool_create(&pages, &e->pages), BT_OK);
    assert_int_equal(row_pool_create(options->rows, options->cap, &e->rows), BT_OK);
    const bt_block_pool_options blocks = {.idle_bytes_max = 1 << 20};
    assert_int_equal(bt_block_pool_create(&blocks, &e->blocks), BT_OK);
    for (uint32_t i = 0; i < options->page_count; i++)
        scribble(e, i);
    xfer *mover = options->mover;
    assert_int_equal(mover->ops->register_memory(mover, kv_pool_memory(e->pages),
                                                 kv_pool_memory_bytes(e->pages)),
                     BT_OK);
    assert_int_equal(mover->ops->register_memory(mover, row_pool_memory(e->rows),
                                                 row_pool_memory_bytes(e->rows)),
                     BT_OK);
    return e;
}

end *end_create_prefill(const end_options *options) {
    end *e = create(options);
    const handoff_sender_options sender = {
        .mover = options->mover,
        .pages = e->pages,
        .rows = e->rows,
        .checksum = options->checksum,
        .page_tokens = options->page_tokens,
        .attempts_max = ENDS_ATTEMPTS_MAX,
        .incarnation = options->incarnation,
        .sends_in_flight = options->sends_in_flight,
        .chunk_bytes_max = options->chunk_bytes_max,
        .clock = options->clock,
        .events = {.on_acked = on_acked,
                   .on_failed = on_failed,
                   .on_quiet = on_quiet,
                   .context = e},
        .peer_events = peer_events(e),
    };
    assert_int_equal(handoff_sender_create(&sender, &e->sender), BT_OK);
    return e;
}

end *end_create_decode(const end_options *options) {
    end *e = create(options);
    const handoff_receiver_options receiver = {
        .mover = options->mover,
        .pages = e->pages,
        .rows = e->rows,
        .checksum = options->checksum,
        .page_tokens = options->page_tokens,
        .attempts_max = ENDS_ATTEMPTS_MAX,
        .chunk_bytes_max = options->chunk_bytes_max,
        .clock = options->clock,
        .events = {.on_ready = on_ready,
                   .on_failed = on_failed,
                   .on_quiet = on_quiet,
                   .context = e},
        .peer_events = peer_events(e),
    };
    assert_int_equal(handoff_receiver_create(&receiver, &e->receiver), BT_OK);
    return e;
}

void end_destroy(end *e) {
    if (e == NULL) return;
    e->options.mover->ops->destroy(e->options.mover);
    handoff_sender_destroy(e->sender);
    handoff_receiver_destroy(e->receiver);
    kv_pool_destroy(e->pages);
    row_pool_destroy(e->rows);
    bt_block_pool_destroy(e->blocks);
    free(e);
}

bt_status end_connect(end *e, xfer_peer peer, const uint8_t *address, size_t address_bytes) {
    xfer *mover = e->options.mover;
    end_peer *p = end_find_peer(e, peer);
    for (uint32_t i = 0; p == NULL && i < ENDS_PEERS_MAX; i++)
        if (e->peers[i].id.incarnation == 0 || e->peers[i].closed > 0) p = &e->peers[i];
    assert_non_null(p);
    *p = (end_peer){.id = peer};
    const bt_status status = mover->ops->connect(mover, peer, address, address_bytes);
    if (status != BT_OK) return status;
    return e->sender != NULL ? handoff_sender_hello(e->sender, peer)
                             : handoff_receiver_hello(e->receiver, peer);
}

void end_loop(end *e) {
    xfer *mover = e->options.mover;
    for (uint32_t i = 0; i < ENDS_PEERS_MAX; i++) {
        if (!e->peers[i].wants_disconnect) continue;
        e->peers[i].wants_disconnect = false;
        mover->ops->disconnect(mover, e->peers[i].id);
    }
}

static bt_status acquire(end *e, end_attempt *a) {
    a->page_count = (a->data.prompt_tokens + e->options.page_tokens - 1) / e->options.page_tokens;
    assert_true(a->page_count <= ENDS_PAGES_MAX);
    bt_status status = kv_pool_acquire(e->pages, a->id.counter, a->page_count, a->pages);
    if (status != BT_OK) return status;
    assert_true(sample_count(&a->data) <= ENDS_SAMPLES_MAX);
    for (uint32_t i = 0; e->receiver != NULL && i < sample_count(&a->data); i++) {
        status = row_pool_acquire(e->rows, &a->slots[i]);
        if (status == BT_OK) continue;
        kv_pool_release(e->pages, a->id.counter, a->pages, a->page_count);
        while (i > 0)
            row_pool_release(e->rows, a->slots[--i]);
        return status;
    }
    a->is_holding = true;
    return BT_OK;
}

bt_status end_expect(end *e, const sample *s, xfer_peer prefill, uint64_t deadline_us) {
    end_attempt *a = take_attempt(e, s);
    bt_status status = acquire(e, a);
    if (status == BT_OK) {
        const handoff_offer offer = {
            .attempt = a->id,
            .peer = prefill,
            .sample_count = sample_count(s),
            .slots = a->slots,
            .prompt_tokens = s->prompt_tokens,
            .page_count = a->page_count,
            .pages = a->pages,
            .mask_mode = s->mask_mode,
            .mask_bounded = s->true_size > 0,
            .deadline_us = deadline_us,
        };
        status = handoff_receiver_expect(e->receiver, &offer);
        if (status != BT_OK) release(e, a);
    }
    if (status != BT_OK) *a = (end_attempt){0};
    return status;
}

bt_status end_send(end *e, const sample *s, xfer_peer decode, const row_slot *slots,
                   uint64_t deadline_us, uint32_t run_pages) {
    static sample_row storage;
    end_attempt *a = take_attempt(e, s);
    bt_status status = acquire(e, a);
    if (status == BT_OK) {
        const handoff_target target = {.attempt = a->id,
                                       .peer = decode,
                                       .sample_count = sample_count(s),
                                       .slots = slots,
                                       .prompt_tokens = s->prompt_tokens,
                                       .deadline_us = deadline_us};
        status = handoff_sender_begin(e->sender, &target);
        if (status != BT_OK) release(e, a);
    }
    if (status != BT_OK) {
        *a = (end_attempt){0};
        return status;
    }
    for (uint32_t i = 0; i < a->page_count; i++)
        sample_fill_page(s, i, kv_pool_page(e->pages, a->pages[i]), e->options.page_bytes);
    for (uint32_t first = 0; first < a->page_count && status == BT_OK; first += run_pages) {
        const uint32_t left = a->page_count - first;
        const uint32_t count = left < run_pages ? left : run_pages;
        status =
            handoff_sender_pages(e->sender, a->id, first, count, a->pages + first, count == left);
    }
    for (uint32_t i = sample_count(s); i > 0 && status == BT_OK; i--) {
        const sample one = sample_at(s, i - 1);
        sample_make_row(&one, &storage);
        storage.row.sample_index = i - 1;
        status = handoff_sender_row(e->sender, a->id, &storage.row);
    }
    /* A send that failed inside these calls is told later, by on_failed. */
    return status == BT_ERR_REQUEST_UNKNOWN ? BT_OK : status;
}

void end_cancel(end *e, uint64_t number) {
    end_attempt *a = end_find(e, number);
    if (a == NULL || !a->is_holding) return;
    if (e->sender != NULL)
        handoff_sender_abort(e->sender, a->id);
    else
        handoff_receiver_cancel(e->receiver, a->id);
}

void end_assert_clean(end *e) {
    const kv_pool_counts counts = kv_pool_count(e->pages);
    assert_int_equal(counts.free, counts.total);
    assert_true(kv_pool_check(e->pages));
    assert_int_equal(row_pool_free_count(e->rows), row_pool_total_count(e->rows));
    if (e->sender != NULL) assert_int_equal(handoff_sender_active_count(e->sender), 0);
    if (e->receiver != NULL) assert_int_equal(handoff_receiver_active_count(e->receiver), 0);
    for (uint32_t i = 0; i < ENDS_ATTEMPTS_MAX; i++) {
        const end_attempt *a = &e->attempts[i];
        if (a->id.counter == 0) continue;
        assert_false(a->is_holding);
        assert_int_equal(a->ready + a->acked + a->quiet, 1);
        if (a->ready != 0) assert_true(a->is_intact);
    }
    for (uint32_t page = 0; page < e->options.page_count; page++) {
        const uint64_t *words = kv_pool_page(e->pages, page);
        for (size_t i = 0; i < e->options.page_bytes / 8; i++)
            assert_true(words[i] == marker);
    }
}
