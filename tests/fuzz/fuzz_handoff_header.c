/* The receiver of the handoff under any sequence of messages, completions, cancels and deadlines:
 * the input is a program for a peer that may say anything. Checked at every step: a receive is
 * posted only into pages and the slot of an attempt in hand, no two overlap, and nothing of an
 * attempt is posted when it is over. At the end everything comes back. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "base/little_endian.h"
#include "base/mem.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/handoff_wire.h"

enum {
    PAGES = 6,
    LAYERS = 2,
    PAGE_BYTES = 64,
    PAGE_TOKENS = 4,
    CAP = 4,
    ATTEMPTS = 2,
    ATTEMPT_PAGES = 3,
    POSTED_MAX = 16,
    PAYLOAD_MAX = 1024,
    STEPS_MAX = 300,
};

typedef struct reader {
    const uint8_t *data;
    size_t left;
} reader;

static uint8_t take(reader *r) {
    if (r->left == 0) return 0;
    r->left--;
    return *r->data++;
}

typedef struct posted_receive {
    uint64_t token;
    uint32_t iov_count;
    xfer_iov iov[ATTEMPT_PAGES + 1];
    size_t bytes;
    uint8_t payload[PAYLOAD_MAX];
} posted_receive;

typedef struct world {
    xfer mover;
    kv_pool *pages;
    row_pool *rows;
    handoff_receiver *receiver;
    uint64_t now_us;
    posted_receive posted[POSTED_MAX];
    uint32_t posted_count;
    uint32_t pages_of[ATTEMPTS][ATTEMPT_PAGES];
    row_slot slot_of[ATTEMPTS];
    bool is_in_hand[ATTEMPTS];
    bool is_connected, is_closing, is_full;
    uint64_t counter; /* of attempts: number = 2 * counter + index */
    uint64_t number_of[ATTEMPTS];
} world;

static const xfer_peer peer = {.worker_id = 7, .incarnation = 70};

static bool is_overlapping(const xfer_iov *a, const xfer_iov *b) {
    const uint8_t *x = a->base;
    const uint8_t *y = b->base;
    return x < y + b->bytes && y < x + a->bytes;
}

static bool is_inside(const xfer_iov *part, const void *base, size_t bytes) {
    const uint8_t *start = base;
    const uint8_t *at = part->base;
    return at >= start && part->bytes <= bytes && (size_t)(at - start) <= bytes - part->bytes;
}

/* The attempt whose memory a part lies in, cut at page boundaries by the caller. */
static int owner_of(const world *w, const xfer_iov *part) {
    for (int i = 0; i < ATTEMPTS; i++) {
        if (!w->is_in_hand[i]) continue;
        const void *slot = row_pool_get(w->rows, w->slot_of[i]);
        if (slot != NULL && is_inside(part, slot, row_pool_slot_bytes(w->rows))) return i;
        for (int p = 0; p < ATTEMPT_PAGES; p++) {
            /* Neighbours may be joined: the first byte decides, the length is checked by parts. */
            const xfer_iov first = {part->base, 1};
            if (is_inside(&first, kv_pool_page(w->pages, w->pages_of[i][p]), PAGE_BYTES)) return i;
        }
    }
    return -1;
}

static void check_memory(const world *w, const posted_receive *p) {
    const int owner = owner_of(w, &p->iov[0]);
    BT_ASSERT(owner >= 0);
    for (uint32_t i = 0; i < p->iov_count; i++) {
        for (size_t at = 0; at < p->iov[i].bytes; at += 16) {
            const xfer_iov piece = {(uint8_t *)p->iov[i].base + at, 16};
            BT_ASSERT(owner_of(w, &piece) == owner);
        }
    }
}

static bool has_posted(const world *w, int attempt) {
    for (uint32_t i = 0; i < w->posted_count; i++)
        if (owner_of(w, &w->posted[i].iov[0]) == attempt) return true;
    return false;
}

static void give_back(world *w, proto_attempt id) {
    for (int i = 0; i < ATTEMPTS; i++) {
        if (!w->is_in_hand[i] || w->number_of[i] != id.counter) continue;
        BT_ASSERT(!has_posted(w, i));
        w->is_in_hand[i] = false;
        kv_pool_release(w->pages, w->number_of[i], w->pages_of[i], ATTEMPT_PAGES);
        row_pool_release(w->rows, w->slot_of[i]);
        return;
    }
    BT_ASSERT(false && "an attempt that is not in hand ended");
}

static void on_ready(void *context, proto_attempt id, const metadata_row *row) {
    BT_ASSERT(row->status == 0);
    BT_ASSERT(row->support_count <= CAP);
    give_back(context, id);
}
static void on_failed(void *context, proto_attempt id, bt_status status, const char *text) {
    (void)context;
    (void)id;
    BT_ASSERT(status != BT_OK);
    BT_ASSERT(text[0] != '\0');
}
static void on_quiet(void *context, proto_attempt id) {
    give_back(context, id);
}
static void on_hello(void *context, xfer_peer from) {
    (void)context;
    (void)from;
}
static void on_peer_failed(void *context, xfer_peer from, bt_status status) {
    world *w = context;
    (void)from;
    (void)status;
    w->is_closing = true;
}

/* ---- the mover ------------------------------------------------------------------------------- */

static bt_status fake_send(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                           const xfer_iov *iov, uint32_t iov_count, uint64_t token) {
    const world *w = (const world *)(const void *)x;
    (void)to;
    (void)header;
    (void)iov;
    (void)token;
    BT_ASSERT(header_bytes == HANDOFF_HEADER_BYTES);
    BT_ASSERT(iov_count == 0);
    return w->is_full ? BT_ERR_REQUEST_FULL : BT_OK;
}

static const xfer_ops fake_ops = {.name = "fake", .send = fake_send};

static void deliver(world *w, const uint8_t *header, size_t header_bytes, const uint8_t *payload,
                    size_t payload_bytes) {
    xfer_receive receive = {0};
    if (!w->is_connected || w->is_closing || w->posted_count == POSTED_MAX) return;
    const xfer_decision decision = w->mover.handler.on_message(
        w->mover.handler.context, peer, header, header_bytes, payload_bytes, &receive);
    if (decision == XFER_DROP) return;
    posted_receive *p = &w->posted[w->posted_count];
    size_t sum = 0;
    BT_ASSERT(receive.iov_count <= ATTEMPT_PAGES);
    *p = (posted_receive){.token = receive.token, .iov_count = receive.iov_count};
    for (uint32_t i = 0; i < receive.iov_count; i++) {
        p->iov[i] = receive.iov[i];
        sum += receive.iov[i].bytes;
        for (uint32_t q = 0; q < w->posted_count; q++)
            for (uint32_t j = 0; j < w->posted[q].iov_count; j++)
                BT_ASSERT(!is_overlapping(&receive.iov[i], &w->posted[q].iov[j]));
    }
    BT_ASSERT(sum == payload_bytes);
    p->bytes = payload_bytes;
    memcpy(p->payload, payload, payload_bytes);
    check_memory(w, p);
    w->posted_count++;
}

static void complete(world *w, uint32_t index, bt_status status) {
    if (w->posted_count == 0) return;
    index %= w->posted_count;
    const posted_receive p = w->posted[index];
    size_t at = 0;
    for (uint32_t i = 0; i < p.iov_count; i++) {
        memcpy(p.iov[i].base, p.payload + at, p.iov[i].bytes);
        at += p.iov[i].bytes;
    }
    memmove(&w->posted[index], &w->posted[index + 1], sizeof p * (w->posted_count - index - 1));
    w->posted_count--;
    w->mover.handler.on_received(w->mover.handler.context, p.token, status);
}

/* ---- the steps ------------------------------------------------------------------------------- */

static void expect(world *w, int index) {
    if (w->is_in_hand[index] || !w->is_connected || w->is_closing) return;
    const uint64_t number = 2 * ++w->counter + (uint64_t)index;
    if (kv_pool_acquire(w->pages, number, ATTEMPT_PAGES, w->pages_of[index]) != BT_OK) return;
    const bt_status status = row_pool_acquire(w->rows, &w->slot_of[index]);
    BT_ASSERT(status == BT_OK);
    const handoff_offer offer = {
        .attempt = {1, number},
        .peer = peer,
        .sample_count = 1,
        .slots = &w->slot_of[index],
        .prompt_tokens = ATTEMPT_PAGES * PAGE_TOKENS - 1,
        .page_count = ATTEMPT_PAGES,
        .pages = w->pages_of[index],
        .mask_mode = ROW_MASK_SELECTED,
        .mask_bounded = (uint32_t)index,
        .deadline_us = w->now_us + 100,
    };
    if (handoff_receiver_expect(w->receiver, &offer) == BT_OK) {
        w->number_of[index] = number;
        w->is_in_hand[index] = true;
        return;
    }
    kv_pool_release(w->pages, number, w->pages_of[index], ATTEMPT_PAGES);
    row_pool_release(w->rows, w->slot_of[index]);
}

static void send_header(world *w, reader *r, handoff_header *header, const uint8_t *payload,
                        size_t payload_bytes) {
    uint8_t bytes[HANDOFF_HEADER_BYTES];
    const uint8_t lie = take(r);
    handoff_header_encode(header, bytes);
    if (lie >= 0xf0) bytes[take(r) % HANDOFF_HEADER_BYTES] ^= (uint8_t)(1u << lie % 8);
    deliver(w, bytes, lie == 0xef ? take(r) % HANDOFF_HEADER_BYTES : sizeof bytes, payload,
            payload_bytes);
}

static handoff_header start_header(const world *w, handoff_kind kind, int index, uint8_t lie) {
    handoff_header header = {
        .kind = kind, .attempt = {1, w->number_of[index]}, .slot = w->slot_of[index]};
    if (lie == 1) header.attempt.counter ^= 1;
    if (lie == 2) header.slot.generation--;
    if (lie == 3) header.slot.index ^= 1;
    return header;
}

static void send_chunk(world *w, reader *r, int index) {
    static uint8_t payload[PAYLOAD_MAX];
    handoff_header header = start_header(w, HANDOFF_CHUNK, index, take(r));
    const uint8_t shape = take(r);
    header.chunk_index = shape & 3;
    header.span = (handoff_span){shape >> 2 & 3, 1 + (shape >> 4 & 1), 0, LAYERS};
    if (shape >= 0xc0) header.span.layer_count = take(r) % 4;
    header.payload_bytes = (uint64_t)header.span.page_count * PAGE_BYTES;
    if (shape >= 0xe0) header.payload_bytes = take(r) * UINT64_C(4);
    const size_t bytes = header.payload_bytes > PAYLOAD_MAX ? PAYLOAD_MAX : header.payload_bytes;
    memset(payload, shape, sizeof payload);
    header.payload_crc = bt_crc32c(0, payload, bytes);
    if (shape == 0xa5) payload[0] ^= 1;
    send_header(w, r, &header, payload, shape == 0xa6 ? 8 : bytes);
}

static void send_row(world *w, reader *r, int index) {
    static const int32_t ids[8] = {3, 2, 1, 0, 4, 5, 6, 7};
    _Alignas(8) static uint8_t slot[PAYLOAD_MAX];
    uint32_t checksums[4];
    size_t bytes = 0;
    handoff_header header = start_header(w, HANDOFF_ROW, index, take(r));
    const uint8_t shape = take(r);
    /* The checksums of chunks as send_chunk makes them, by the shapes that follow. */
    const uint32_t chunks = shape & 3;
    for (uint32_t i = 0; i < chunks; i++) {
        static uint8_t payload[2 * PAGE_BYTES];
        const uint8_t chunk_shape = take(r);
        memset(payload, chunk_shape, sizeof payload);
        checksums[i] = bt_crc32c(0, payload, (1u + (chunk_shape >> 4 & 1)) * PAGE_BYTES);
    }
    const metadata_row row = {
        .attempt = header.attempt,
        .slot = header.slot.index,
        .slot_generation = header.slot.generation,
        .writer_incarnation = peer.incarnation,
        .support_count = shape >> 2 & 7,
        .cap_needed = (shape >> 2 & 7) + (shape >= 0xc0 && shape < 0xe0 ? take(r) : 0u),
        .chunk_count = chunks,
        .page_count = ATTEMPT_PAGES,
        .kv_bytes = ATTEMPT_PAGES * PAGE_BYTES,
        .prompt_tokens = ATTEMPT_PAGES * PAGE_TOKENS - 1,
        .mask_mode = ROW_MASK_SELECTED,
        .support_ids = ids,
    };
    BT_ASSERT(row_encode(&row, checksums, slot, sizeof slot, &bytes) == BT_OK);
    if (shape >= 0xe0) slot[take(r) % bytes] ^= shape;
    header.payload_bytes = bytes;
    send_header(w, r, &header, slot, bytes);
}

static void send_raw(world *w, reader *r) {
    uint8_t header[XFER_HEADER_BYTES_MAX];
    static uint8_t payload[PAYLOAD_MAX];
    size_t bytes = 0;
    const size_t payload_bytes = take(r);
    while (bytes < HANDOFF_HEADER_BYTES && r->left > 0)
        header[bytes++] = take(r);
    if (bytes == HANDOFF_HEADER_BYTES) {
        memcpy(header, "BHND", 4);
        memset(header + 8, 0, 4);
        bt_store_le32(header + 8, bt_crc32c(0, header, bytes));
    }
    deliver(w, header, bytes, payload, payload_bytes);
}

static void finish_closing(world *w) {
    while (w->posted_count > 0)
        complete(w, 0, BT_ERR_PEER_GONE);
    w->is_connected = w->is_closing = false;
    w->mover.handler.on_peer_closed(w->mover.handler.context, peer);
}

static void step(world *w, reader *r) {
    const uint8_t what = take(r);
    const int index = what & 1;
    switch (what >> 1 & 15) {
    case 0: expect(w, index); break;
    case 1:
    case 2:
    case 3: send_chunk(w, r, index); break;
    case 4:
    case 5: send_row(w, r, index); break;
    case 6:
    case 7:
    case 8:
    case 9: complete(w, take(r), BT_OK); break;
    case 10: complete(w, take(r), BT_ERR_PEER_GONE); break;
    case 11: handoff_receiver_cancel(w->receiver, (proto_attempt){1, w->number_of[index]}); break;
    case 12:
        w->now_us += take(r);
        handoff_receiver_tick(w->receiver);
        break;
    case 13: send_raw(w, r); break;
    case 14:
        w->is_full = index == 0;
        w->mover.handler.on_sent(w->mover.handler.context, HANDOFF_TOKEN_NONE, BT_OK);
        break;
    case 15:
        if (index == 0 && w->is_connected && !w->is_closing)
            w->mover.handler.on_peer_failed(w->mover.handler.context, peer, BT_ERR_PEER_GONE);
        if (w->is_closing) finish_closing(w);
        if (!w->is_connected) w->is_connected = handoff_receiver_hello(w->receiver, peer) == BT_OK;
        break;
    }
}

static uint64_t read_clock(void *context) {
    return ((const world *)context)->now_us;
}

static void create(world *w) {
    const kv_pool_options pages = {.page_count = PAGES, .page_bytes = PAGE_BYTES, .layers = LAYERS};
    bt_status status = kv_pool_create(&pages, &w->pages);
    BT_ASSERT(status == BT_OK);
    status = row_pool_create(ATTEMPTS, CAP, &w->rows);
    BT_ASSERT(status == BT_OK);
    w->mover.ops = &fake_ops;
    const handoff_receiver_options options = {
        .mover = &w->mover,
        .pages = w->pages,
        .rows = w->rows,
        .checksum = RECORD_CHECKSUM_FULL,
        .page_tokens = PAGE_TOKENS,
        .attempts_max = ATTEMPTS,
        .chunk_bytes_max = 2 * PAGE_BYTES,
        .clock = {.now_us = read_clock, .context = w},
        .events = {.on_ready = on_ready,
                   .on_failed = on_failed,
                   .on_quiet = on_quiet,
                   .context = w},
        .peer_events = {.on_hello = on_hello,
                        .on_stuck = on_hello,
                        .on_peer_failed = on_peer_failed,
                        .context = w},
    };
    status = handoff_receiver_create(&options, &w->receiver);
    BT_ASSERT(status == BT_OK);
    status = handoff_receiver_hello(w->receiver, peer);
    BT_ASSERT(status == BT_OK);
    w->is_connected = true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    world *w = bt_calloc(1, sizeof *w);
    reader r = {data, bytes};
    BT_ASSERT(w != NULL);
    create(w);
    expect(w, 0);
    for (int i = 0; i < STEPS_MAX && r.left > 0; i++)
        step(w, &r);
    if (w->is_connected) finish_closing(w);
    w->is_full = false;
    handoff_receiver_tick(w->receiver);
    BT_ASSERT(handoff_receiver_active_count(w->receiver) == 0);
    BT_ASSERT(kv_pool_count(w->pages).free == PAGES);
    BT_ASSERT(kv_pool_check(w->pages));
    BT_ASSERT(row_pool_free_count(w->rows) == ATTEMPTS);
    handoff_receiver_destroy(w->receiver);
    row_pool_destroy(w->rows);
    kv_pool_destroy(w->pages);
    bt_free(w);
    return 0;
}
