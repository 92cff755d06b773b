/* One prefill and one decode worker that speak the real protocol over real sockets and compute
 * nothing: what they do is a function of the request's seed. They live on a thread of their own.
 *
 *   any other seed        max_new_tokens rows of each sample at once, within its credit: token
 *                         97 + (row + sample) % 26, a support of min(top_k, 8) ids from the token
 *                         on with log-probabilities -(i + 1), top ones -2 - i, asked ones -10 - i;
 *                         of a prompt's token at position p the log-probability -p
 *   SCRIPT_HANGS          nothing until it is cancelled
 *   SCRIPT_OVERFLOWS      prefill finds a support that is larger than the cap
 *   SCRIPT_BREAKS         two rows, then an error of the capture
 *   SCRIPT_OVERFLOWS_ONE  sample 1 has no token: its support is larger than the cap
 *   SCRIPT_STUMBLES + k   as any other seed in every second attempt of each k; in the first, third,
 *                         ... sample 0 has two rows (or all, if they are fewer), and then decode
 *                         fails; k < SCRIPT_STUMBLES_MAX
 *   SCRIPT_WIDE           as any other seed, but a support of top_k ids, up to SCRIPT_WIDEST
 *   SCRIPT_HOLDS          two rows, and when it is aborted SCRIPT_HELD more
 *
 * An abort ends a sample with the rows it has. */
#ifndef BT_TESTS_UNIT_ROUTER_SCRIPTED_WORKERS_H
#define BT_TESTS_UNIT_ROUTER_SCRIPTED_WORKERS_H

#include <stdint.h>

enum {
    SCRIPT_HANGS = 1000,
    SCRIPT_OVERFLOWS = 1001,
    SCRIPT_BREAKS = 1002,
    SCRIPT_OVERFLOWS_ONE = 1003,
    SCRIPT_WIDE = 1004,
    SCRIPT_STUMBLES = 1100,
    SCRIPT_STUMBLES_MAX = 100,
    SCRIPT_HOLDS = 1005,
    SCRIPT_HELD = 3,
    SCRIPT_WIDEST = 4096,
    SCRIPT_VOCAB = 400,
    SCRIPT_CONTEXT = 1 << 20,
};

typedef struct scripted_workers scripted_workers;

typedef struct scripted_counts {
    uint64_t attempts;          /* reserved so far */
    uint64_t cancelled;         /* of them */
    uint64_t open;              /* neither finished nor cancelled */
    uint64_t row_bytes;         /* sent */
    uint64_t cancelled_samples; /* one by one */
    uint64_t aborted_samples;
    uint64_t credits; /* CREDIT frames */
} scripted_counts;

/* Connects to the router at 127.0.0.1:port. Returns owned; ends the test when it cannot. vocab_size
 * 0 means SCRIPT_VOCAB. */
scripted_workers *scripted_workers_start(uint16_t port, uint32_t vocab_size);
void scripted_workers_stop(scripted_workers *workers);
/* Any thread. */
scripted_counts scripted_workers_counts(scripted_workers *workers);
/* The sentence of a REFUSE, "" without one. */
const char *scripted_workers_refusal(scripted_workers *workers);

#endif
