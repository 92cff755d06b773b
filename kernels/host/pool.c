/* A run is published by storing its fields and then its `ticket`: run number in the high half, next
 * item in the low half. An item is claimed by a compare-and-swap of the ticket, which fails when
 * the run has changed; the fields read before a successful claim are therefore those of this run.
 * So a worker may arrive at any time, also long after its run has ended, and nobody waits for it.
 *
 * Sleeping is a futex on `run_word` (workers) and `done_word` (caller). The sleeper announces
 * itself before it looks at the word for the last time, the waker changes the word before it looks
 * for sleepers, all sequentially consistent: one of the two sees the other. */
#include "kernels/host/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mem.h"

enum { CACHE_LINE = 64, SPINS_PER_CLOCK = 64 };

typedef struct pool_worker {
    pool *owner;
    uint32_t thread;
    pthread_t handle;
} pool_worker;

struct pool {
    /* Written by every claim. */
    _Alignas(CACHE_LINE) _Atomic uint64_t ticket;
    /* Items finished in this run. */
    _Alignas(CACHE_LINE) _Atomic uint32_t done_word;
    _Atomic uint32_t caller_sleeps;
    /* Written once per run. */
    _Alignas(CACHE_LINE) _Atomic uint32_t run_word;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t items;
    _Atomic(pool_item) run;
    _Atomic(void *) context;
    atomic_bool stops;
    uint32_t threads;
    uint32_t started;
    pool_worker *workers; /* [threads - 1] */
};

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000U + (uint64_t)t.tv_nsec / 1000U;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Spins until *word differs from `value` (true), or for POOL_SPIN_US (false). */
static bool spin_while(_Atomic uint32_t *word, uint32_t value) {
    const uint64_t deadline_us = now_us() + POOL_SPIN_US;
    do {
        for (int i = 0; i < SPINS_PER_CLOCK; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return true;
            cpu_relax();
        }
    } while (now_us() < deadline_us);
    return false;
}

/* Claims and runs items of run `number` until there are none. */
static void work(pool *p, uint32_t number, uint32_t thread) {
    uint64_t ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    for (;;) {
        if ((uint32_t)(ticket >> 32) != number) return;
        const uint32_t items = atomic_load_explicit(&p->items, memory_order_relaxed);
        const pool_item run = atomic_load_explicit(&p->run, memory_order_relaxed);
        void *context = atomic_load_explicit(&p->context, memory_order_relaxed);
        const uint32_t item = (uint32_t)ticket;
        if (item >= items) return;
        if (!atomic_compare_exchange_weak_explicit(&p->ticket, &ticket, ticket + 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        run(context, item, thread);
        if (atomic_fetch_add(&p->done_word, 1) + 1 == items && atomic_load(&p->caller_sleeps) != 0)
            futex_wake(&p->done_word, 1);
        ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    }
}

static void *worker_main(void *argument) {
    const pool_worker *self = argument;
    pool *p = self->owner;
    uint32_t seen = 0;
    for (;;) {
        if (!spin_while(&p->run_word, seen)) {
            atomic_fetch_add(&p->sleepers, 1);
            if (atomic_load(&p->run_word) == seen) futex_wait(&p->run_word, seen);
            atomic_fetch_sub(&p->sleepers, 1);
        }
        const uint32_t number = atomic_load(&p->run_word);
        if (number == seen) continue; /* woken for nothing */
        seen = number;
        if (atomic_load(&p->stops)) return NULL;
        work(p, number, self->thread);
    }
}

static void wake_workers(pool *p) {
    atomic_fetch_add(&p->run_word, 1);
    if (atomic_load(&p->sleepers) != 0) futex_wake(&p->run_word, POOL_THREADS_MAX);
}

static void wait_until_done(pool *p, uint32_t items) {
    for (;;) {
        const uint32_t done = atomic_load(&p->done_word);
        if (done == items) return;
        if (spin_while(&p->done_word, done)) continue;
        atomic_store(&p->caller_sleeps, 1);
        if (atomic_load(&p->done_word) == done) futex_wait(&p->done_word, done);
        atomic_store(&p->caller_sleeps, 0);
    }
}

void pool_run(pool *p, uint32_t items, pool_item run, void *context) {
    if (items <= 1 || p->threads == 1) {
        for (uint32_t i = 0; i < items; i++)
            run(context, i, 0);
        return;
    }
    const uint32_t number = atomic_load(&p->run_word) + 1;
    /* Close the old run first: a late worker that reads the new fields under the old ticket fails
     * its claim. */
    atomic_store(&p->ticket, ((uint64_t)number << 32) | UINT32_MAX);
    atomic_store(&p->done_word, 0);
    atomic_store_explicit(&p->items, items, memory_order_relaxed);
    atomic_store_explicit(&p->run, run, memory_order_relaxed);
    atomic_store_explicit(&p->context, context, memory_order_relaxed);
    atomic_store(&p->ticket, (uint64_t)number << 32);
    wake_workers(p);
    work(p, number, 0);
    wait_until_done(p, items);
}

uint32_t pool_threads(const pool *p) {
    return p->threads;
}

bt_status pool_create(uint32_t threads, pool **out) {
    if (threads == 0 || threads > POOL_THREADS_MAX) return BT_ERR_CALLER_ARGUMENT;
    pool *p = bt_calloc_aligned(CACHE_LINE, sizeof *p);
    if (p == NULL) return BT_ERR_WORKER_MEMORY;
    p->threads = threads;
    p->workers = bt_calloc(threads, sizeof *p->workers);
    if (p->workers == NULL) {
        bt_free(p);
        return BT_ERR_WORKER_MEMORY;
    }
    for (uint32_t i = 0; i + 1 < threads; i++) {
        p->workers[i] = (pool_worker){.owner = p, .thread = i + 1};
        if (pthread_create(&p->workers[i].handle, NULL, worker_main, &p->workers[i]) != 0) {
            pool_destroy(p);
            return BT_ERR_WORKER_INTERNAL;
        }
        p->started++;
    }
    *out = p;
    return BT_OK;
}

void pool_destroy(pool *p) {
    if (p == NULL) return;
    atomic_store(&p->stops, true);
    wake_workers(p);
    for (uint32_t i = 0; i < p->started; i++)
        BT_ASSERT(pthread_join(p->workers[i].handle, NULL) == 0);
    bt_free(p->workers);
    bt_free(p);
}
