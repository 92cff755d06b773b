/* Head and tail count items from the start and never wrap back (64 bits); an index is their low
 * part. The producer owns tail, the consumer head; each reads the other's with acquire, so that the
 * bytes of an item are visible before its number. is_asleep is the one word written by both. Its
 * accesses and those of tail around sleeping are sequentially consistent: either the consumer sees
 * the new tail, or the producer sees that the consumer sleeps. */
#include "base/ring.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"

enum { CACHE_LINE_BYTES = 64 };

struct bt_ring {
    /* Padding keeps the two sides' words in cache lines of their own. */
    _Alignas(CACHE_LINE_BYTES) _Atomic uint64_t head;
    _Alignas(CACHE_LINE_BYTES) _Atomic uint64_t tail;
    _Alignas(CACHE_LINE_BYTES) _Atomic bool is_asleep;
    uint64_t mask;
    size_t item_bytes;
    int fd;
    uint8_t *items;
};

bt_status bt_ring_create(uint32_t items, size_t item_bytes, bt_ring **out) {
    BT_ASSERT(items > 0 && items <= BT_RING_ITEMS_MAX);
    BT_ASSERT(item_bytes > 0);
    uint64_t capacity = 1;
    while (capacity < items)
        capacity *= 2;
    bt_ring *ring = bt_calloc_aligned(CACHE_LINE_BYTES, sizeof *ring);
    if (ring == NULL) return BT_ERR_WORKER_MEMORY;
    bt_status status = BT_ERR_WORKER_MEMORY;
    ring->mask = capacity - 1;
    ring->item_bytes = item_bytes;
    ring->items = bt_calloc((size_t)capacity, item_bytes);
    if (ring->items == NULL) goto free_ring;
    status = BT_ERR_WORKER_IO;
    ring->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ring->fd < 0) goto free_items;
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
    atomic_init(&ring->is_asleep, true);
    *out = ring;
    return BT_OK;

free_items:
    bt_free(ring->items);
free_ring:
    bt_free(ring);
    return status;
}

void bt_ring_destroy(bt_ring *ring) {
    if (ring == NULL) return;
    (void)close(ring->fd);
    bt_free(ring->items);
    bt_free(ring);
}

static void wake(bt_ring *ring) {
    const uint64_t one = 1;
    /* EAGAIN would mean that the counter is at its maximum: the descriptor is readable already. */
    const ssize_t written = write(ring->fd, &one, sizeof one);
    BT_ASSERT(written == (ssize_t)sizeof one || errno == EAGAIN);
}

bool bt_ring_push(bt_ring *ring, const void *item) {
    const uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    if (tail - head > ring->mask) return false;
    memcpy(ring->items + (size_t)(tail & ring->mask) * ring->item_bytes, item, ring->item_bytes);
    atomic_store(&ring->tail, tail + 1);
    if (atomic_load(&ring->is_asleep) && atomic_exchange(&ring->is_asleep, false)) wake(ring);
    return true;
}

bool bt_ring_pop(bt_ring *ring, void *item_out) {
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    const uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    if (head == tail) return false;
    memcpy(item_out, ring->items + (size_t)(head & ring->mask) * ring->item_bytes,
           ring->item_bytes);
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
    return true;
}

uint32_t bt_ring_count(const bt_ring *ring) {
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    const uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    /* head may have been read before pushes and pops that tail has seen. */
    return tail - head > ring->mask + 1 ? (uint32_t)ring->mask + 1 : (uint32_t)(tail - head);
}

int bt_ring_get_fd(const bt_ring *ring) {
    return ring->fd;
}

bool bt_ring_arm(bt_ring *ring) {
    atomic_store(&ring->is_asleep, true);
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    if (atomic_load(&ring->tail) == head) return true;
    /* Awake again. Should the producer have seen the sleeper, one extra wake-up is left in the
     * descriptor; it finds an empty ring and does no harm. */
    atomic_store(&ring->is_asleep, false);
    return false;
}

void bt_ring_disarm(bt_ring *ring) {
    atomic_store(&ring->is_asleep, false);
    uint64_t count = 0;
    const ssize_t bytes = read(ring->fd, &count, sizeof count);
    BT_ASSERT(bytes == (ssize_t)sizeof count || errno == EAGAIN || errno == EINTR);
}

static int left_ms(const bt_clock *clock, uint64_t deadline_us) {
    const uint64_t now_us = bt_clock_now_us(clock);
    return now_us >= deadline_us ? 0 : (int)((deadline_us - now_us + 999) / 1000);
}

bool bt_ring_wait(bt_ring *ring, int timeout_ms) {
    const bt_clock clock = bt_clock_system();
    const uint64_t deadline_us =
        bt_clock_now_us(&clock) + (timeout_ms > 0 ? (uint64_t)timeout_ms * 1000 : 0);
    struct pollfd wait = {.fd = ring->fd, .events = POLLIN};
    while (bt_ring_arm(ring)) {
        const int woken = poll(&wait, 1, timeout_ms < 0 ? -1 : left_ms(&clock, deadline_us));
        bt_ring_disarm(ring);
        if (woken <= 0) return bt_ring_count(ring) > 0;
        /* Perhaps the wake-up that an earlier item left behind (bt_ring_arm): look again. */
    }
    return true;
}
