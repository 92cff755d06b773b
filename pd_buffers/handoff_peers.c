/* A small unordered table; peers are few and looked up per message of megabytes. */
#include "pd_buffers/handoff_peers.h"

#include "base/mem.h"
#include "pd_buffers/handoff_wire.h"

void handoff_peers_fini(handoff_peers *peers) {
    bt_free(peers->items);
    *peers = (handoff_peers){0};
}

handoff_peer *handoff_peers_find(const handoff_peers *peers, xfer_peer id) {
    for (uint32_t i = 0; i < peers->count; i++)
        if (handoff_peer_equal(peers->items[i].id, id)) return &peers->items[i];
    return NULL;
}

static bt_status add(handoff_peers *peers, xfer_peer id) {
    if (handoff_peers_find(peers, id) != NULL) return BT_ERR_REQUEST_DUPLICATE;
    if (peers->count == peers->capacity) {
        const uint32_t capacity = peers->capacity == 0 ? 8 : peers->capacity * 2;
        handoff_peer *items = bt_realloc(peers->items, capacity * sizeof *items);
        if (items == NULL) return BT_ERR_WORKER_MEMORY;
        peers->items = items;
        peers->capacity = capacity;
    }
    peers->items[peers->count++] = (handoff_peer){.id = id, .wants_hello = true};
    return BT_OK;
}

void handoff_peers_remove(handoff_peers *peers, xfer_peer id) {
    handoff_peer *peer = handoff_peers_find(peers, id);
    if (peer != NULL) *peer = peers->items[--peers->count];
}

bool handoff_peers_on_hello(handoff_peers *peers, xfer_peer from, bool has_heard) {
    handoff_peer *peer = handoff_peers_find(peers, from);
    if (peer == NULL || peer->is_failed) return false;
    peer->has_heard = true;
    if (!peer->has_told) peer->wants_hello = true;
    if (!has_heard || peer->is_proven) return false;
    peer->is_proven = true;
    return true;
}

static bt_status send_hello(handoff_peer *peer, xfer *mover) {
    const handoff_header hello = {.kind = HANDOFF_HELLO, .has_heard = peer->has_heard};
    uint8_t bytes[HANDOFF_HEADER_BYTES];
    handoff_header_encode(&hello, bytes);
    const bt_status status =
        mover->ops->send(mover, peer->id, bytes, sizeof bytes, NULL, 0, HANDOFF_TOKEN_NONE);
    if (status == BT_ERR_REQUEST_FULL) return BT_OK;
    /* Any other failure of an open endpoint shows as on_peer_failed; nothing is to be repeated. */
    peer->wants_hello = false;
    peer->has_told = peer->has_told || peer->has_heard;
    return status;
}

bt_status handoff_peers_open(handoff_peers *peers, xfer *mover, xfer_peer id) {
    bt_status status = add(peers, id);
    if (status != BT_OK) return status;
    status = send_hello(handoff_peers_find(peers, id), mover);
    if (status != BT_OK) handoff_peers_remove(peers, id);
    return status;
}

void handoff_peers_send(handoff_peers *peers, xfer *mover) {
    for (uint32_t i = 0; i < peers->count; i++) {
        handoff_peer *peer = &peers->items[i];
        if (peer->wants_hello && !peer->is_failed) (void)send_hello(peer, mover);
    }
}
