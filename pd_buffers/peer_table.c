/* States of the peers; see the header's diagram. */
#include "pd_buffers/peer_table.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"

static const char *state_name(peer_state state) {
    switch (state) {
    case PEER_NONE: return "none";
    case PEER_CONNECTED: return "connected";
    case PEER_PAIRED: return "paired";
    case PEER_CLOSING: return "closing";
    case PEER_CLOSED: return "closed";
    }
    return "unknown";
}

static void set_state(peer_entry *entry, peer_state next, const char *reason) {
    static const uint32_t edges[] = {
        [PEER_NONE] = 1u << PEER_CLOSED,
        [PEER_CLOSED] = 1u << PEER_CONNECTED | 1u << PEER_NONE,
        [PEER_CONNECTED] = 1u << PEER_PAIRED | 1u << PEER_CLOSING,
        [PEER_PAIRED] = 1u << PEER_CLOSING,
        [PEER_CLOSING] = 1u << PEER_CLOSED,
    };
    BT_ASSERT((edges[entry->state] >> next & 1u) != 0);
    bt_log_debug("peer", "worker %" PRIu32 " at %s: %s -> %s (%s)", entry->peer.worker_id,
                 entry->host, state_name(entry->state), state_name(next), reason);
    entry->state = next;
}

bt_status peer_table_init(peer_table *table, xfer *mover, const peer_table_ops *ops) {
    memset(table, 0, sizeof *table);
    table->mover = mover;
    table->ops = *ops;
    table->entries = bt_calloc(PEER_TABLE_PEERS_MAX, sizeof *table->entries);
    return table->entries != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
}

void peer_table_fini(peer_table *table) {
    bt_free(table->entries);
    table->entries = NULL;
}

static bool is_same(xfer_peer a, xfer_peer b) {
    return a.worker_id == b.worker_id && a.incarnation == b.incarnation;
}

static peer_entry *find(const peer_table *table, xfer_peer peer) {
    for (uint32_t i = 0; i < PEER_TABLE_PEERS_MAX; i++) {
        peer_entry *entry = &table->entries[i];
        if (entry->state != PEER_NONE && is_same(entry->peer, peer)) return entry;
    }
    return NULL;
}

static bool is_open(const peer_entry *entry) {
    return entry->state == PEER_CONNECTED || entry->state == PEER_PAIRED;
}

static peer_entry *find_free(const peer_table *table) {
    for (uint32_t i = 0; i < PEER_TABLE_PEERS_MAX; i++) {
        if (table->entries[i].state == PEER_NONE) return &table->entries[i];
    }
    return NULL;
}

bt_status peer_table_add(peer_table *table, const proto_peer *peer, uint64_t now_us) {
    BT_ASSERT(peer->address_bytes > 0 && peer->address_bytes <= PROTO_ADDRESS_MAX);
    const xfer_peer id = {.worker_id = peer->worker_id, .incarnation = peer->incarnation};
    peer_entry *entry = find(table, id);
    if (entry == NULL) {
        entry = find_free(table);
        if (entry == NULL) return BT_ERR_CALLER_LIMIT;
        *entry = (peer_entry){.peer = id, .next_us = now_us};
        set_state(entry, PEER_CLOSED, "named by the router");
    }
    memcpy(entry->host, peer->host, sizeof entry->host);
    memcpy(entry->address, peer->address, peer->address_bytes);
    entry->address_bytes = peer->address_bytes;
    entry->is_removed = false;
    entry->wants_connect = true;
    if (is_open(entry)) entry->wants_close = true;
    return BT_OK;
}

static void remove_entry(peer_entry *entry) {
    entry->is_removed = true;
    entry->wants_connect = false;
    if (is_open(entry)) entry->wants_close = true;
    if (entry->state == PEER_CLOSED) set_state(entry, PEER_NONE, "removed");
}

void peer_table_remove(peer_table *table, xfer_peer peer) {
    peer_entry *entry = find(table, peer);
    if (entry != NULL) remove_entry(entry);
}

void peer_table_remove_all(peer_table *table) {
    for (uint32_t i = 0; i < PEER_TABLE_PEERS_MAX; i++) {
        if (table->entries[i].state != PEER_NONE) remove_entry(&table->entries[i]);
    }
}

void peer_table_on_hello(peer_table *table, xfer_peer peer) {
    peer_entry *entry = find(table, peer);
    if (entry == NULL || entry->state != PEER_CONNECTED || entry->wants_close) return;
    set_state(entry, PEER_PAIRED, "hello");
    table->ops.on_pair(table->ops.context, peer, BT_OK);
}

static void fail_entry(peer_table *table, peer_entry *entry, bt_status status) {
    bt_log_warn("peer", "worker %" PRIu32 " at %s: the link is closed: %s", entry->peer.worker_id,
                entry->host, bt_status_string(status));
    entry->wants_close = true;
    table->ops.on_pair(table->ops.context, entry->peer, status);
}

void peer_table_on_failed(peer_table *table, xfer_peer peer, bt_status status) {
    peer_entry *entry = find(table, peer);
    if (entry == NULL || !is_open(entry) || entry->wants_close) return;
    fail_entry(table, entry, status);
}

void peer_table_on_closed(peer_table *table, xfer_peer peer, uint64_t now_us) {
    peer_entry *entry = find(table, peer);
    if (entry == NULL || entry->state != PEER_CLOSING) return;
    set_state(entry, PEER_CLOSED, "closed");
    entry->next_us = now_us + PEER_TABLE_PAUSE_US;
    if (entry->is_removed) set_state(entry, PEER_NONE, "removed");
}

/* ---- acting ---------------------------------------------------------------------------------- */

static void connect_entry(peer_table *table, peer_entry *entry, uint64_t now_us) {
    xfer *mover = table->mover;
    entry->wants_connect = false;
    const bt_status status =
        mover->ops->connect(mover, entry->peer, entry->address, entry->address_bytes);
    if (status != BT_OK) {
        bt_log_warn("peer", "worker %" PRIu32 " at %s: cannot connect: %s", entry->peer.worker_id,
                    entry->host, bt_status_string(status));
        entry->next_us = now_us + PEER_TABLE_PAUSE_US;
        table->ops.on_pair(table->ops.context, entry->peer, status);
        return;
    }
    set_state(entry, PEER_CONNECTED, "connect");
    entry->next_us = now_us + PEER_TABLE_HELLO_US;
    entry->wants_hello = true;
}

static void say_hello(peer_table *table, peer_entry *entry) {
    const bt_status status = table->ops.say_hello(table->ops.context, entry->peer);
    if (status == BT_ERR_REQUEST_FULL) return;
    entry->wants_hello = false;
    if (status != BT_OK) fail_entry(table, entry, status);
}

static void turn_entry(peer_table *table, peer_entry *entry, uint64_t now_us) {
    if (entry->state == PEER_CLOSED && entry->wants_connect && now_us >= entry->next_us) {
        connect_entry(table, entry, now_us);
    }
    if (is_open(entry) && entry->wants_hello && !entry->wants_close) say_hello(table, entry);
    if (entry->state == PEER_CONNECTED && !entry->wants_close && now_us >= entry->next_us) {
        fail_entry(table, entry, BT_ERR_PEER_TIMEOUT);
    }
    if (!entry->wants_close) return;
    entry->wants_close = false;
    entry->wants_hello = false;
    set_state(entry, PEER_CLOSING, "disconnect");
    table->mover->ops->disconnect(table->mover, entry->peer);
}

void peer_table_turn(peer_table *table, uint64_t now_us) {
    for (uint32_t i = 0; i < PEER_TABLE_PEERS_MAX; i++) {
        if (table->entries[i].state != PEER_NONE) turn_entry(table, &table->entries[i], now_us);
    }
}

const peer_entry *peer_table_find(const peer_table *table, xfer_peer peer) {
    return find(table, peer);
}

bool peer_table_is_usable(const peer_table *table, xfer_peer peer) {
    const peer_entry *entry = find(table, peer);
    return entry != NULL && is_open(entry) && !entry->wants_close;
}

bool peer_table_is_quiet(const peer_table *table) {
    for (uint32_t i = 0; i < PEER_TABLE_PEERS_MAX; i++) {
        const peer_state state = table->entries[i].state;
        if (state != PEER_NONE && state != PEER_CLOSED) return false;
    }
    return true;
}
