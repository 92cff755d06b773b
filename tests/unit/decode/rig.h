/* A decode core alone, over the loopback mover, with computing that hashes the prefix and a clock
 * that only the test turns. The test plays both the router and the prefill worker, so that it
 * decides when rows, words, credit and cancels come, and what rows say. Everything that decode
 * streams is kept per sample. Every wrong turn fails the running test; the core's accounts are
 * recounted all the time. */
#ifndef BT_TESTS_DECODE_RIG_H
#define BT_TESTS_DECODE_RIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/decode_internal.h"
#include "kernels/compute_sim.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/xfer_loop.h"

enum {
    RIG_ATTEMPTS_MAX = 128,
    RIG_ROWS_MAX = 1024,
    RIG_SUPPORT_MAX = 16,
    RIG_TOP_MAX = 8,
    RIG_VOCAB = 5000,
    RIG_PREFILL_PAGES = 256,
    RIG_DEADLINE_MS = 5000,
    RIG_PREFILL_WEIGHTS = 7, /* the epoch of first rows, and that of decode's own */
    RIG_WEIGHTS = 8,
    RIG_TICK_US = 50 * 1000, /* microseconds */
};

static const xfer_peer rig_decode_peer = {.worker_id = 1, .incarnation = 0x1001};
static const xfer_peer rig_prefill_peer = {.worker_id = 2, .incarnation = 0x1002};

/* Zeros become defaults. */
typedef struct rig_options {
    uint32_t pages, sequences_max, chunk_tokens, page_tokens, context_tokens;
    uint64_t pages_us;
    size_t queue_bytes;
} rig_options;

typedef struct rig_stream {
    uint8_t *bytes;
    size_t byte_count;
    uint32_t finishes; /* frames that ended it */
    uint32_t retractions;
    proto_chunk last;
} rig_stream;

typedef struct rig_attempt {
    proto_attempt id;
    proto_generation generation;
    uint32_t prompt_tokens;
    int32_t *words;
    uint32_t word_count, words_sent;
    proto_reservation answer; /* the last one */
    bool is_delivered;
    uint32_t pages[RIG_PREFILL_PAGES]; /* of the prefill side, while it sends */
    uint32_t page_count;
    rig_stream streams[PROTO_SAMPLES_MAX];
} rig_attempt;

typedef struct rig {
    rig_options options;
    uint64_t now_us;
    xfer_loop_network *network;
    decode_core *core;
    xfer *mover, *prefill_mover;
    kv_pool *pages, *prefill_pages;
    row_pool *prefill_rows;
    compute *compute, *prefill_compute;
    compute_sim_options sim;
    handoff_sender *sender;
    bool is_compute_held; /* a step that runs does not end */
    bool is_network_held;
    bool wants_streams;
    uint32_t hang_ups, capacities;
    uint64_t sent;                     /* messages of the core */
    void (*change)(metadata_row *row); /* what prefill's rows say instead; NULL: nothing */
    rig_attempt *attempts[RIG_ATTEMPTS_MAX];
    uint32_t attempt_count;
} rig;

rig *rig_create(const rig_options *options);
/* Checks that no page and no slot is taken. */
void rig_destroy(rig *r);

/* Neutral parameters, a mask of support, and log-probabilities. */
proto_generation rig_generation(uint32_t max_new_tokens, uint32_t samples);
/* An attempt that the core has not heard of: a prompt, biases and ids of its own. */
rig_attempt *rig_add(rig *r, uint32_t prompt_tokens, const proto_generation *generation);
/* RESERVE; the status of the answer. Slots must be there exactly with OK. */
bt_status rig_reserve(rig *r, rig_attempt *a, uint64_t credit);
/* The next `words` words (all that are left when there are fewer) in one PROMPT. */
void rig_say_words(rig *r, rig_attempt *a, uint32_t words);
/* KV and rows leave prefill; statuses [samples] or NULL for rows as they are drawn. */
void rig_deliver(rig *r, rig_attempt *a, const uint32_t *statuses);
/* All of these: the reservation must be granted; the first step has not ended. */
rig_attempt *rig_start(rig *r, uint32_t prompt_tokens, const proto_generation *generation,
                       uint64_t credit);
void rig_cancel(rig *r, const rig_attempt *a, uint32_t sample);
/* With PROTO_ALL_SAMPLES of all. */
void rig_abort(rig *r, const rig_attempt *a, uint32_t sample);
void rig_credit(rig *r, const rig_attempt *a, uint32_t sample, uint64_t bytes);

/* Does what can be done at this instant. */
void rig_settle(rig *r);
/* The same, but ends only this many steps. */
void rig_run_steps(rig *r, uint32_t steps);
/* Turns the clock on in steps of at most 50 ms, with ticks and pings. */
void rig_advance(rig *r, uint64_t us);

/* Rows of the whole answer of one sample, and how it ends. */
uint32_t rig_answer(const rig *r, const rig_attempt *a, uint32_t sample, proto_finish *finish_out);
int32_t rig_token(const rig *r, const rig_attempt *a, uint32_t sample, uint32_t row);
/* Rows that have come, each one bit for bit what one process draws. */
uint32_t rig_rows(const rig *r, const rig_attempt *a, uint32_t sample);
/* Fails unless the sample got its whole answer and ended once. */
void rig_expect_answer(const rig *r, const rig_attempt *a, uint32_t sample);
void rig_expect_error(const rig *r, const rig_attempt *a, uint32_t sample, bt_status status,
                      const char *text);
/* It was aborted, with so many rows of its answer. */
void rig_expect_abort(const rig *r, const rig_attempt *a, uint32_t sample, uint32_t rows);
/* Nothing was said of its end. */
void rig_expect_silence(const rig_attempt *a, uint32_t sample);
decode_view rig_view(const rig *r);
void rig_expect_empty(const rig *r);
/* The sample's record in the core; NULL when it is gone. */
decode_sample *rig_sample(const rig *r, const rig_attempt *a, uint32_t sample);

#endif
