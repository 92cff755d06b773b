/* Messages and endpoints are records of the network; events are derived from their states, never
 * stored, so that nothing can be pending for something that is gone. */
#include "pd_buffers/xfer_loop.h"

#include <string.h>

#include "base/assert.h"
#include "base/fault.h"
#include "base/little_endian.h"
#include "base/mem.h"

enum {
    PART_BYTES = 64 * 1024,
    SENDS_MAX = 256,
    PROGRESS_BUDGET = 64,
    ADDRESS_BYTES = 8,
};

static const uint32_t address_magic = 0x504f4f4c; /* "LOOP" */

typedef enum endpoint_state {
    ENDPOINT_OPEN,
    ENDPOINT_BROKEN,  /* PEER_FAILED is possible */
    ENDPOINT_FAILED,  /* PEER_FAILED was told */
    ENDPOINT_CLOSING, /* disconnect was called */
} endpoint_state;

typedef struct endpoint {
    xfer_peer peer;
    uint32_t remote_number;
    endpoint_state state;
    bool is_used; /* something was sent on it */
    struct endpoint *next;
} endpoint;

typedef enum payload_state {
    PAYLOAD_WAITING,  /* DELIVER is possible */
    PAYLOAD_COPYING,  /* accepted */
    PAYLOAD_RECEIVED, /* all bytes are there; RECEIVED is possible */
    PAYLOAD_OVER,     /* nothing is left to do at the receiver */
} payload_state;

typedef struct message {
    uint64_t number;
    xfer_peer from, to;
    struct loop_mover *sender;   /* NULL when dead */
    struct loop_mover *receiver; /* NULL until delivered, and when dead */
    payload_state payload;
    bool is_sent_told; /* the sender's half is over */
    bool is_lost;
    uint32_t to_number;
    uint64_t send_token, receive_token;
    uint8_t header[XFER_HEADER_BYTES_MAX];
    size_t header_bytes, payload_bytes, copied;
    xfer_iov *source, *target;
    uint32_t source_count, target_count;
    struct message *next;
} message;

typedef struct loop_mover {
    xfer base;
    xfer_loop_network *network;
    uint32_t number;
    uint32_t sends;
    uint32_t registered; /* blocks of memory */
    uint8_t address[ADDRESS_BYTES];
    endpoint *endpoints;
    struct loop_mover *next;
} loop_mover;

struct xfer_loop_network {
    xfer_loop_options options;
    uint64_t last_number;
    loop_mover *movers;
    message *messages; /* oldest first */
    message **messages_end;
};

static bool is_peer(xfer_peer a, xfer_peer b) {
    return a.worker_id == b.worker_id && a.incarnation == b.incarnation;
}

static loop_mover *find_mover(const xfer_loop_network *network, uint32_t number) {
    loop_mover *mover = network->movers;
    while (mover != NULL && mover->number != number)
        mover = mover->next;
    return mover;
}

static endpoint *find_endpoint(const loop_mover *mover, xfer_peer peer) {
    endpoint *e = mover->endpoints;
    while (e != NULL && !is_peer(e->peer, peer))
        e = e->next;
    return e;
}

static void break_endpoint(loop_mover *mover, xfer_peer peer) {
    endpoint *e = mover == NULL ? NULL : find_endpoint(mover, peer);
    if (e != NULL && e->state == ENDPOINT_OPEN) e->state = ENDPOINT_BROKEN;
}

/* The two ends of a message are not to be joined any more. */
static bool is_severed(const message *m) {
    const endpoint *out = m->sender == NULL ? NULL : find_endpoint(m->sender, m->to);
    const endpoint *in = m->receiver == NULL ? NULL : find_endpoint(m->receiver, m->from);
    return m->is_lost || out == NULL || out->state != ENDPOINT_OPEN || in == NULL ||
           in->state != ENDPOINT_OPEN;
}

static bool is_closing(const loop_mover *mover, xfer_peer peer) {
    const endpoint *e = find_endpoint(mover, peer);
    return e == NULL || e->state == ENDPOINT_CLOSING;
}

/* ---- messages -------------------------------------------------------------------------------- */

static void free_message(message *m) {
    bt_free(m->source);
    bt_free(m->target);
    bt_free(m);
}

static bool is_over(const message *m) {
    const bool is_sender_done = m->sender == NULL || m->is_sent_told;
    const bool is_receiver_done =
        m->payload == PAYLOAD_OVER || (m->payload != PAYLOAD_WAITING && m->receiver == NULL);
    return is_sender_done && is_receiver_done;
}

static void sweep(xfer_loop_network *network) {
    message **at = &network->messages;
    while (*at != NULL) {
        message *m = *at;
        if (!is_over(m)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        free_message(m);
    }
    network->messages_end = at;
}

static xfer_iov *copy_iov(const xfer_iov *iov, uint32_t count) {
    xfer_iov *copy = bt_malloc(sizeof *copy * (count == 0 ? 1 : count));
    if (copy != NULL && count > 0) memcpy(copy, iov, sizeof *copy * count);
    return copy;
}

static size_t iov_bytes(const xfer_iov *iov, uint32_t count) {
    size_t sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += iov[i].bytes;
    return sum;
}

/* The bytes at `offset` of a gathered payload, at most up to the end of their part. */
static uint8_t *iov_at(const xfer_iov *iov, size_t offset, size_t *run_out) {
    while (offset >= iov->bytes)
        offset -= (iov++)->bytes;
    *run_out = iov->bytes - offset;
    return (uint8_t *)iov->base + offset;
}

static void copy_part(message *m, size_t part_bytes) {
    size_t left = m->payload_bytes - m->copied;
    if (left > part_bytes) left = part_bytes;
    while (left > 0) {
        size_t from_run = 0;
        size_t to_run = 0;
        const uint8_t *from = iov_at(m->source, m->copied, &from_run);
        uint8_t *to = iov_at(m->target, m->copied, &to_run);
        size_t run = from_run < to_run ? from_run : to_run;
        if (run > left) run = left;
        memcpy(to, from, run);
        m->copied += run;
        left -= run;
    }
    if (m->copied == m->payload_bytes) m->payload = PAYLOAD_RECEIVED;
}

/* ---- the events that are possible now -------------------------------------------------------- */

static bool can_deliver(const xfer_loop_network *network, const message *m) {
    return m->payload == PAYLOAD_WAITING && !m->is_lost &&
           find_mover(network, m->to_number) != NULL;
}

static bool can_copy(const message *m) {
    return m->payload == PAYLOAD_COPYING && m->sender != NULL && m->receiver != NULL &&
           !is_severed(m);
}

static bool can_receive(const message *m) {
    if (m->receiver == NULL) return false;
    if (m->payload == PAYLOAD_RECEIVED) return true;
    return m->payload == PAYLOAD_COPYING && is_closing(m->receiver, m->from);
}

static bool can_send(const message *m) {
    if (m->sender == NULL || m->is_sent_told) return false;
    const bool is_through = m->payload == PAYLOAD_RECEIVED || m->payload == PAYLOAD_OVER;
    return (is_through && !m->is_lost) || is_closing(m->sender, m->to);
}

static bool can_close(const loop_mover *mover, const endpoint *e) {
    if (e->state != ENDPOINT_CLOSING) return false;
    for (const message *m = mover->network->messages; m != NULL; m = m->next) {
        if (m->sender == mover && is_peer(m->to, e->peer) && !m->is_sent_told) return false;
        if (m->receiver == mover && is_peer(m->from, e->peer) && m->payload != PAYLOAD_OVER)
            return false;
    }
    return true;
}

typedef struct found_event {
    xfer_loop_event_kind kind;
    message *message;
    loop_mover *mover;
    endpoint *endpoint;
} found_event;

/* Calls `visit` for each possible event until it returns true. */
typedef bool (*event_visit)(void *context, const found_event *event);

static bool visit_message(const xfer_loop_network *network, message *m, event_visit visit,
                          void *context) {
    const bool possible[] = {can_deliver(network, m), can_copy(m), can_receive(m), can_send(m)};
    for (unsigned kind = XFER_LOOP_DELIVER; kind <= XFER_LOOP_SENT; kind++) {
        if (!possible[kind]) continue;
        loop_mover *at = kind == XFER_LOOP_SENT      ? m->sender
                         : kind == XFER_LOOP_DELIVER ? find_mover(network, m->to_number)
                                                     : m->receiver;
        const found_event event = {
            .kind = (xfer_loop_event_kind)kind, .message = m, .mover = at, .endpoint = NULL};
        if (visit(context, &event)) return true;
    }
    return false;
}

static bool visit_mover(loop_mover *mover, event_visit visit, void *context) {
    for (endpoint *e = mover->endpoints; e != NULL; e = e->next) {
        found_event event = {.message = NULL, .mover = mover, .endpoint = e};
        event.kind = XFER_LOOP_PEER_FAILED;
        if (e->state == ENDPOINT_BROKEN && e->is_used && visit(context, &event)) return true;
        event.kind = XFER_LOOP_PEER_CLOSED;
        if (can_close(mover, e) && visit(context, &event)) return true;
    }
    return false;
}

static void visit_events(const xfer_loop_network *network, event_visit visit, void *context) {
    for (message *m = network->messages; m != NULL; m = m->next)
        if (visit_message(network, m, visit, context)) return;
    for (loop_mover *mover = network->movers; mover != NULL; mover = mover->next)
        if (visit_mover(mover, visit, context)) return;
}

typedef struct pick {
    uint32_t index, seen;
    const loop_mover *only; /* NULL: of any mover */
    bool is_found;
    found_event event;
} pick;

static bool visit_pick(void *context, const found_event *event) {
    pick *p = context;
    if (p->only != NULL && event->mover != p->only) return false;
    if (p->seen++ != p->index) return false;
    p->event = *event;
    p->is_found = true;
    return true;
}

static found_event find_event(const xfer_loop_network *network, uint32_t index) {
    pick p = {.index = index};
    visit_events(network, visit_pick, &p);
    BT_ASSERT(p.is_found);
    return p.event;
}

uint32_t xfer_loop_event_count(const xfer_loop_network *network) {
    pick p = {.index = UINT32_MAX};
    visit_events(network, visit_pick, &p);
    return p.seen;
}

xfer_loop_event xfer_loop_event_at(const xfer_loop_network *network, uint32_t index) {
    const found_event event = find_event(network, index);
    const message *m = event.message;
    xfer_loop_event out = {.kind = event.kind, .at = &event.mover->base};
    if (m == NULL) {
        out.peer = event.endpoint->peer;
        return out;
    }
    out.peer = event.kind == XFER_LOOP_SENT ? m->to : m->from;
    out.header = m->header;
    out.header_bytes = m->header_bytes;
    out.payload_bytes = m->payload_bytes;
    out.message = m->number;
    return out;
}

/* ---- doing them ------------------------------------------------------------------------------ */

static void deliver(loop_mover *at, message *m) {
    const endpoint *e = find_endpoint(at, m->from);
    m->payload = PAYLOAD_OVER;
    if (!is_peer(at->base.self, m->to) || e == NULL) return;
    if (e->state == ENDPOINT_FAILED || e->state == ENDPOINT_CLOSING) return;
    const xfer_handler *handler = &at->base.handler;
    xfer_receive receive = {0};
    const xfer_decision decision = handler->on_message(handler->context, m->from, m->header,
                                                       m->header_bytes, m->payload_bytes, &receive);
    if (decision == XFER_DROP || m->payload_bytes == 0) return;
    BT_ASSERT(iov_bytes(receive.iov, receive.iov_count) == m->payload_bytes);
    m->target = copy_iov(receive.iov, receive.iov_count);
    BT_ASSERT(m->target != NULL);
    m->target_count = receive.iov_count;
    m->receive_token = receive.token;
    m->receiver = at;
    m->payload = PAYLOAD_COPYING;
}

static void finish_receive(loop_mover *at, message *m) {
    bt_status status = m->payload == PAYLOAD_RECEIVED ? BT_OK : BT_ERR_PEER_GONE;
    if (bt_fault_hit(BT_FAULT_XFER_DONE)) status = BT_ERR_PEER_GONE;
    if (m->payload != PAYLOAD_RECEIVED) m->is_lost = true;
    m->payload = PAYLOAD_OVER;
    at->base.handler.on_received(at->base.handler.context, m->receive_token, status);
}

static void finish_send(loop_mover *at, message *m) {
    const bool is_through = m->payload == PAYLOAD_RECEIVED || m->payload == PAYLOAD_OVER;
    bt_status status = is_through && !m->is_lost ? BT_OK : BT_ERR_PEER_GONE;
    if (bt_fault_hit(BT_FAULT_XFER_DONE)) status = BT_ERR_PEER_GONE;
    m->is_sent_told = true;
    at->sends--;
    /* An undelivered message of a closed endpoint does not arrive any more. */
    if (m->payload == PAYLOAD_WAITING) m->payload = PAYLOAD_OVER;
    at->base.handler.on_sent(at->base.handler.context, m->send_token, status);
}

static void fail_endpoint(loop_mover *at, endpoint *e) {
    e->state = ENDPOINT_FAILED;
    at->base.handler.on_peer_failed(at->base.handler.context, e->peer, BT_ERR_PEER_GONE);
}

static void close_endpoint(loop_mover *at, endpoint *e) {
    endpoint **link = &at->endpoints;
    while (*link != e)
        link = &(*link)->next;
    const xfer_peer peer = e->peer;
    *link = e->next;
    bt_free(e);
    at->base.handler.on_peer_closed(at->base.handler.context, peer);
}

static void do_event(xfer_loop_network *network, const found_event *event) {
    switch (event->kind) {
    case XFER_LOOP_DELIVER: deliver(event->mover, event->message); break;
    case XFER_LOOP_COPY: copy_part(event->message, network->options.part_bytes); break;
    case XFER_LOOP_RECEIVED: finish_receive(event->mover, event->message); break;
    case XFER_LOOP_SENT: finish_send(event->mover, event->message); break;
    case XFER_LOOP_PEER_FAILED: fail_endpoint(event->mover, event->endpoint); break;
    case XFER_LOOP_PEER_CLOSED: close_endpoint(event->mover, event->endpoint); break;
    }
    sweep(network);
}

void xfer_loop_step(xfer_loop_network *network, uint32_t index) {
    const found_event event = find_event(network, index);
    do_event(network, &event);
}

void xfer_loop_drop(xfer_loop_network *network, uint32_t index) {
    const found_event event = find_event(network, index);
    BT_ASSERT(event.kind == XFER_LOOP_DELIVER || event.kind == XFER_LOOP_COPY);
    message *m = event.message;
    m->is_lost = true;
    break_endpoint(m->sender, m->to);
    break_endpoint(event.mover, m->from);
    if (m->payload == PAYLOAD_WAITING) m->payload = PAYLOAD_OVER;
    sweep(network);
}

bool xfer_loop_corrupt_payload(xfer_loop_network *network, uint32_t index, size_t offset,
                               uint8_t bits) {
    const found_event event = find_event(network, index);
    message *m = event.message;
    BT_ASSERT(event.kind == XFER_LOOP_COPY || event.kind == XFER_LOOP_RECEIVED);
    if (offset >= m->copied) return false;
    size_t run = 0;
    *iov_at(m->target, offset, &run) ^= bits;
    return true;
}

uint32_t xfer_loop_run(xfer_loop_network *network, uint32_t limit) {
    uint32_t steps = 0;
    while (steps < limit && xfer_loop_event_count(network) > 0) {
        xfer_loop_step(network, 0);
        steps++;
    }
    return steps;
}

/* ---- the table ------------------------------------------------------------------------------- */

static loop_mover *mover_of(xfer *x) {
    return (loop_mover *)x;
}

static bt_status loop_get_address(xfer *x, const uint8_t **bytes_out, size_t *count_out) {
    *bytes_out = mover_of(x)->address;
    *count_out = ADDRESS_BYTES;
    return BT_OK;
}

static bt_status loop_connect(xfer *x, xfer_peer peer, const uint8_t *address,
                              size_t address_bytes) {
    loop_mover *mover = mover_of(x);
    if (address_bytes != ADDRESS_BYTES || bt_load_le32(address) != address_magic)
        return BT_ERR_PEER_PROTOCOL;
    if (find_endpoint(mover, peer) != NULL) return BT_ERR_REQUEST_DUPLICATE;
    endpoint *e = bt_calloc(1, sizeof *e);
    if (e == NULL) return BT_ERR_WORKER_MEMORY;
    e->peer = peer;
    e->remote_number = bt_load_le32(address + 4);
    /* As over a real network, an address that nobody has shows only when it is used. */
    const loop_mover *remote = find_mover(mover->network, e->remote_number);
    e->state = remote == NULL ? ENDPOINT_BROKEN : ENDPOINT_OPEN;
    e->next = mover->endpoints;
    mover->endpoints = e;
    return BT_OK;
}

/* What the peer had sent and was not delivered went over the connection that ends here. */
static void lose_undelivered(const xfer_loop_network *network, xfer_peer from, xfer_peer to) {
    for (message *m = network->messages; m != NULL; m = m->next) {
        if (m->payload != PAYLOAD_WAITING || !is_peer(m->from, from) || !is_peer(m->to, to))
            continue;
        m->is_lost = true;
        m->payload = PAYLOAD_OVER;
    }
}

static void loop_disconnect(xfer *x, xfer_peer peer) {
    loop_mover *mover = mover_of(x);
    endpoint *e = find_endpoint(mover, peer);
    if (e == NULL) { /* an endpoint that only waits to be told closed */
        e = bt_calloc(1, sizeof *e);
        BT_ASSERT(e != NULL);
        e->peer = peer;
        e->remote_number = UINT32_MAX;
        e->next = mover->endpoints;
        mover->endpoints = e;
    }
    e->state = ENDPOINT_CLOSING;
    loop_mover *remote = find_mover(mover->network, e->remote_number);
    if (remote != NULL && is_peer(remote->base.self, peer)) break_endpoint(remote, x->self);
    lose_undelivered(mover->network, peer, x->self);
    sweep(mover->network);
}

static bt_status loop_send(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                           const xfer_iov *iov, uint32_t iov_count, uint64_t token) {
    loop_mover *mover = mover_of(x);
    xfer_loop_network *network = mover->network;
    endpoint *e = find_endpoint(mover, to);
    BT_ASSERT(header_bytes <= XFER_HEADER_BYTES_MAX);
    BT_ASSERT(iov_count <= XFER_IOV_MAX);
    if (e == NULL || e->state == ENDPOINT_FAILED || e->state == ENDPOINT_CLOSING)
        return BT_ERR_PEER_GONE;
    if (bt_fault_hit(BT_FAULT_XFER_POST)) return BT_ERR_PEER_GONE;
    if (mover->sends == network->options.sends_max) return BT_ERR_REQUEST_FULL;
    message *m = bt_calloc(1, sizeof *m);
    xfer_iov *source = copy_iov(iov, iov_count);
    if (m == NULL || source == NULL) {
        bt_free(m);
        bt_free(source);
        return BT_ERR_WORKER_MEMORY;
    }
    e->is_used = true;
    *m = (message){
        .number = ++network->last_number,
        .from = x->self,
        .to = to,
        .sender = mover,
        .to_number = e->remote_number,
        .send_token = token,
        .header_bytes = header_bytes,
        .payload_bytes = iov_bytes(iov, iov_count),
        .source = source,
        .source_count = iov_count,
    };
    memcpy(m->header, header, header_bytes);
    if (e->state == ENDPOINT_BROKEN) m->is_lost = true;
    if (m->is_lost) m->payload = PAYLOAD_OVER;
    mover->sends++;
    *network->messages_end = m;
    network->messages_end = &m->next;
    return BT_OK;
}

static bool loop_progress(xfer *x) {
    loop_mover *mover = mover_of(x);
    if (mover->network->options.is_stepped) return false;
    for (int i = 0; i < PROGRESS_BUDGET; i++) {
        pick p = {.index = 0, .only = mover};
        visit_events(mover->network, visit_pick, &p);
        if (!p.is_found) return false;
        do_event(mover->network, &p.event);
    }
    return true;
}

static int loop_get_event_fd(xfer *x) {
    (void)x;
    return -1;
}

static bool loop_arm(xfer *x) {
    pick p = {.index = 0, .only = mover_of(x)};
    if (mover_of(x)->network->options.is_stepped) return true;
    visit_events(mover_of(x)->network, visit_pick, &p);
    return !p.is_found;
}

/* Nothing has to be registered here; the blocks are counted, so that tests see what is forgotten.
 */
static bt_status loop_register_memory(xfer *x, void *base, size_t bytes) {
    (void)base;
    (void)bytes;
    ((loop_mover *)x)->registered++;
    return BT_OK;
}

static void loop_unregister_memory(xfer *x, void *base) {
    loop_mover *mover = (loop_mover *)x;
    (void)base;
    BT_ASSERT(mover->registered > 0);
    mover->registered--;
}

uint32_t xfer_loop_registered_count(const xfer *x) {
    return ((const loop_mover *)x)->registered;
}

/* The process dies: what it was sending never comes, who had sent to it will notice. */
static void loop_destroy(xfer *x) {
    if (x == NULL) return;
    loop_mover *mover = mover_of(x);
    xfer_loop_network *network = mover->network;
    loop_mover **link = &network->movers;
    while (*link != mover)
        link = &(*link)->next;
    *link = mover->next;
    for (message *m = network->messages; m != NULL; m = m->next) {
        if (m->sender == mover) m->sender = NULL;
        if (m->receiver == mover) m->receiver = NULL;
        if (m->payload == PAYLOAD_WAITING && m->to_number == mover->number) {
            m->is_lost = true;
            m->payload = PAYLOAD_OVER;
        }
    }
    for (loop_mover *other = network->movers; other != NULL; other = other->next)
        for (endpoint *e = other->endpoints; e != NULL; e = e->next)
            if (e->remote_number == mover->number && e->state == ENDPOINT_OPEN)
                e->state = ENDPOINT_BROKEN;
    while (mover->endpoints != NULL) {
        endpoint *e = mover->endpoints;
        mover->endpoints = e->next;
        bt_free(e);
    }
    bt_free(mover);
    sweep(network);
}

static const xfer_ops loop_ops = {
    .name = "loop",
    .get_address = loop_get_address,
    .connect = loop_connect,
    .disconnect = loop_disconnect,
    .send = loop_send,
    .progress = loop_progress,
    .get_event_fd = loop_get_event_fd,
    .arm = loop_arm,
    .register_memory = loop_register_memory,
    .unregister_memory = loop_unregister_memory,
    .destroy = loop_destroy,
};

bt_status xfer_loop_create(xfer_loop_network *network, uint32_t number, xfer **out) {
    if (find_mover(network, number) != NULL) return BT_ERR_REQUEST_DUPLICATE;
    loop_mover *mover = bt_calloc(1, sizeof *mover);
    if (mover == NULL) return BT_ERR_WORKER_MEMORY;
    mover->base.ops = &loop_ops;
    mover->network = network;
    mover->number = number;
    bt_store_le32(mover->address, address_magic);
    bt_store_le32(mover->address + 4, number);
    mover->next = network->movers;
    network->movers = mover;
    *out = &mover->base;
    return BT_OK;
}

bt_status xfer_loop_network_create(const xfer_loop_options *options, xfer_loop_network **out) {
    xfer_loop_network *network = bt_calloc(1, sizeof *network);
    if (network == NULL) return BT_ERR_WORKER_MEMORY;
    network->options = *options;
    if (network->options.part_bytes == 0) network->options.part_bytes = PART_BYTES;
    if (network->options.sends_max == 0) network->options.sends_max = SENDS_MAX;
    network->messages_end = &network->messages;
    *out = network;
    return BT_OK;
}

void xfer_loop_network_destroy(xfer_loop_network *network) {
    if (network == NULL) return;
    BT_ASSERT(network->movers == NULL);
    sweep(network);
    BT_ASSERT(network->messages == NULL);
    bt_free(network);
}
