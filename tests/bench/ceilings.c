/* Compiled for the machine it is built on: these loops are no part of Baton. */
#include "tests/bench/ceilings.h"

#include "base/clock.h"
#include "base/mem.h"
#include "kernels/host/memory.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define SIMD_AVX512 1
enum { CHAINS = 16 };
#elif defined(__AVX2__) && defined(__FMA__)
#define SIMD_AVX2 1
enum { CHAINS = 6 };
#elif defined(__aarch64__)
#define SIMD_NEON 1
enum { CHAINS = 6 };
#else
enum { CHAINS = 4 };
#endif
#include "kernels/host/simd.h"

enum { PASSES = 3, PIECES = 256, FMA_ITEMS = 16, FMA_ROUNDS = 1 << 20 };

struct ceilings {
    dev_host *dev;
    float *memory;
    size_t bytes;
    volatile float sink; /* keeps the loops alive */
};

ceilings *ceilings_create(dev_host *dev, uint32_t mib) {
    ceilings *c = bt_calloc(1, sizeof *c);
    if (c == NULL) return NULL;
    c->dev = dev;
    c->bytes = (size_t)mib << 20;
    c->memory = host_memory_map(c->bytes);
    if (c->memory == NULL) {
        bt_free(c);
        return NULL;
    }
    for (size_t i = 0; i < c->bytes / sizeof(float); i += 16)
        c->memory[i] = 1.0F;
    return c;
}

void ceilings_destroy(ceilings *c) {
    if (c == NULL) return;
    host_memory_unmap(c->memory, c->bytes);
    bt_free(c);
}

static void read_item(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    ceilings *c = context;
    const size_t floats = c->bytes / PIECES / sizeof(float);
    const float *from = c->memory + item * floats;
    v16 sums[4] = {v16_set1(0.0F), v16_set1(0.0F), v16_set1(0.0F), v16_set1(0.0F)};
    for (size_t i = 0; i < floats; i += 64) {
        BT_UNROLL
        for (int j = 0; j < 4; j++)
            sums[j] = v16_add(sums[j], v16_load(from + i + 16 * j));
    }
    const float sum = v16_sum(v16_add(v16_add(sums[0], sums[1]), v16_add(sums[2], sums[3])));
    if (sum < 0.0F) c->sink = sum;
}

static void fma_item(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    ceilings *c = context;
    v16 chains[CHAINS];
    const v16 a = v16_set1(c->memory[item]);
    const v16 b = v16_set1(0.5F);
    BT_UNROLL
    for (int i = 0; i < CHAINS; i++)
        chains[i] = v16_set1((float)i);
    for (int round = 0; round < FMA_ROUNDS; round++) {
        BT_UNROLL
        for (int i = 0; i < CHAINS; i++)
            chains[i] = v16_fma(chains[i], b, a);
    }
    v16 sum = chains[0];
    for (int i = 1; i < CHAINS; i++)
        sum = v16_add(sum, chains[i]);
    const float total = v16_sum(sum);
    if (total < 0.0F) c->sink = total;
}

static double best_rate(ceilings *c, uint32_t items, void (*item)(void *, uint32_t, uint32_t),
                        double work) {
    const bt_clock clock = bt_clock_system();
    double best = 0.0;
    for (int pass = 0; pass < PASSES; pass++) {
        const uint64_t start_us = bt_clock_now_us(&clock);
        dev_host_run(c->dev, items, item, c);
        const double rate = work * 1e6 / (double)(bt_clock_now_us(&clock) - start_us + 1);
        if (rate > best) best = rate;
    }
    return best;
}

double ceilings_read(ceilings *c) {
    return best_rate(c, PIECES, read_item, (double)c->bytes);
}

double ceilings_fma(ceilings *c) {
    return best_rate(c, FMA_ITEMS, fma_item, 2.0 * 16 * CHAINS * FMA_ROUNDS * (double)FMA_ITEMS);
}
