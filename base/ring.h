/* A bounded ring between exactly one producer thread and one consumer thread. Items of one fixed
 * size are copied in and out; nothing else is shared, no lock is taken. A consumer that has nothing
 * to do *arms* the ring and sleeps on its descriptor; the producer writes to the descriptor only
 * when the consumer is asleep, so that a busy pair makes no system calls.
 *
 * In an event loop:  on readable: bt_ring_disarm; do { while (pop) act; } while (!bt_ring_arm)
 * In a plain thread: bt_ring_wait, then pop.
 *
 * The ring is created and destroyed by its owner while neither thread uses it. */
#ifndef BT_BASE_RING_H
#define BT_BASE_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bt_ring bt_ring;

enum { BT_RING_ITEMS_MAX = 1 << 20 };

/* Room for at least `items` items (1 .. BT_RING_ITEMS_MAX) of item_bytes (> 0). WORKER_MEMORY, or
 * WORKER_IO when there is no descriptor left. */
BT_MUST_CHECK bt_status bt_ring_create(uint32_t items, size_t item_bytes, bt_ring **out);
void bt_ring_destroy(bt_ring *ring);

/* Producer. false: full, nothing was copied. */
BT_MUST_CHECK bool bt_ring_push(bt_ring *ring, const void *item);
/* Consumer. false: empty. */
BT_MUST_CHECK bool bt_ring_pop(bt_ring *ring, void *item_out);
/* Either side; a moment's estimate, exact for what the own side does. */
uint32_t bt_ring_count(const bt_ring *ring);

/* Consumer: readable while the producer asks for attention. */
int bt_ring_get_fd(const bt_ring *ring);
/* Consumer, before sleeping: true = empty, and the next push makes the descriptor readable; false =
 * there are items, pop them. A new ring is armed. */
BT_MUST_CHECK bool bt_ring_arm(bt_ring *ring);
/* Consumer, after waking: clears the descriptor. */
void bt_ring_disarm(bt_ring *ring);
/* Consumer: blocks until there is an item or timeout_ms passed (-1: no limit). false = still empty,
 * or a signal came. */
bool bt_ring_wait(bt_ring *ring, int timeout_ms);

#endif
