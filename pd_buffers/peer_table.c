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
    case PEER_BROKEN: return "broken";
    }
    return "unknown";
}

static void set_state(peer_entry *entry, peer_state next, const char *reason) {
    static const uint32_t edges[] = {
        [PEER_NONE] = 1u << PEER_BROKEN,
        [PEER_CONNECTED] = 1u << PEER_PAIRED | 1u << PEER_CLOSING,
        [PEER_PAIRED] = 1u << PEER_CLOSING,
        [PEER_CLOSING] = 1u << PEER_BROKEN | 1u << PEER_NONE,
        [PEER_BROKEN] = 1u << PEER_CONNECTED | 1u << PEER_NONE,
    };
    BT_ASSERT((edges[entry->state] >> next & 1u) != 0);
    bt_log_debug("peer", "worker %" PRIu32 " at %s: %s -> %s (%s)", entry->peer.worker_id,
                 entry->host, state_name(entry->state), state_name(next), reason);
    entry->state = next;
}

bt_status peer_table_init(peer_table *table, xfer *mover, bool is_prover,
                          const peer_table_ops *ops) {
    memset(table, 0, sizeof *table);
    table->mover = mover;
    table->is_prover = is_prover;
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

bt_status peer_table_add(peer_table *table, const proto_peer *peer, uint64_t now_us) {
    const xfer_peer id = {.worker_id = peer->worker_id, .incarnation = peer->incarnation};
    if (peer->address_bytes == 0 || peer->address_bytes > PROTO_ADDRESS_MAX) {
        return BT_ERR_PEER_PROTOCOL;
    }
    peer_entry *entry = find(table, id);
    if (entry != NULL) {
        entry->is_removed = false;
        return BT_OK;
    }
    for (uint32_t i = 0; i < PEER_TABLE_PEERS_MAX && entry == NULL; i++) {
        if (table->entries[i].state == PEER_NONE) entry = &table->entries[i];
    }
    if (entry == NULL) return BT_ERR_CALLER_LIMIT;
    *entry = (peer_entry){.peer = id, .next_us = now_us, .address_bytes = peer->address_bytes};
    memcpy(entry->host, peer->host, sizeof entry->host);
    memcpy(entry->address, peer->address, peer->address_bytes);
    set_state(entry, PEER_BROKEN, "named by the router");
    return BT_OK;
}

static void remove_entry(peer_entry *entry) {
    entry->is_removed = true;
    if (is_open(entry)) entry->wants_close = true;
    if (entry->state == PEER_BROKEN) set_state(entry, PEER_NONE, "gone");
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
    if (entry == NULL || !is_open(entry) || entry->wants_close) return;
    if (!table->is_prover) entry->wants_hello = true;
    if (entry->state != PEER_CONNECTED) return;
    set_state(entry, PEER_PAIRED, "hello");
    if (table->is_prover) table->ops.on_pair(table->ops.context, peer, BT_OK);
}

void peer_table_on_failed(peer_table *table, xfer_peer peer, bt_status status) {
    peer_entry *entry = find(table, peer);
    if (entry == NULL || !is_open(entry) || entry->wants_close) return;
    bt_log_warn("peer", "worker %" PRIu32 " at %s: the link is closed: %s", peer.worker_id,
                entry->host, bt_status_string(status));
    entry->wants_close = true;
    if (entry->state == PEER_PAIRED) table->ops.on_pair(table->ops.context, peer, status);
}

void peer_table_on_closed(peer_table *table, xfer_peer peer, uint64_t now_us) {
    peer_entry *entry = find(table, peer);
    if (entry == NULL || entry->state != PEER_CLOSING) return;
    if (entry->is_removed) {
        set_state(entry, PEER_NONE, "closed");
        return;
    }
    entry->next_us = now_us + PEER_TABLE_RETRY_US;
    set_state(entry, PEER_BROKEN, "closed");
}

static void turn_entry(peer_table *table, peer_entry *entry, uint64_t now_us) {
    xfer *mover = table->mover;
    if (entry->wants_close) {
        entry->wants_close = false;
        entry->wants_hello = false;
        set_state(entry, PEER_CLOSING, "disconnect");
        mover->ops->disconnect(mover, entry->peer);
        return;
    }
    if (entry->state == PEER_BROKEN && now_us >= entry->next_us) {
        const bt_status status =
            mover->ops->connect(mover, entry->peer, entry->address, entry->address_bytes);
        entry->next_us = now_us + PEER_TABLE_RETRY_US;
        if (status != BT_OK) {
            bt_log_warn("peer", "worker %" PRIu32 " at %s: cannot connect: %s",
                        entry->peer.worker_id, entry->host, bt_status_string(status));
            return;
        }
        set_state(entry, PEER_CONNECTED, "connect");
        entry->next_us = now_us;
    }
    const bool proves = table->is_prover && entry->state == PEER_CONNECTED;
    const bool is_due = proves && now_us >= entry->next_us;
    if (!is_open(entry) || !(is_due || entry->wants_hello)) return;
    if (table->ops.say_hello(table->ops.context, entry->peer) == BT_OK) entry->wants_hello = false;
    entry->next_us = now_us + PEER_TABLE_HELLO_US;
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
        if (state != PEER_NONE && state != PEER_BROKEN) return false;
    }
    return true;
}
