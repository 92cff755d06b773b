/* The prefill worker's control core: prompts in, chunks of them through the compute, KV pages and
 * the metadata row to decode. Pure: (state, event, now) -> calls of the ops table, of the mover and
 * of the compute; no sockets, no threads, the clock behind a table.
 *
 * Nouns. An *attempt* is one try of one request; it has one owner record with everything it holds
 * (the prompt, KV pages, the sender's part of the handoff) and one release function. A *chunk* is
 * the part of a prompt that one step computes, so that a cancel takes effect between chunks. A step
 * packs chunks of several prompts under a budget of tokens (the rule is in prefill_step.c). Full
 * pages stay in the *prefix cache* (prefix_cache.h) for later prompts that begin alike; a prompt
 * that begins like one in work waits for those pages instead of computing them once more. Pages
 * stay pinned until decode's ack, or until no send reads them any more.
 *
 * One thread (the event thread, or the simulator) makes all calls. The mover's progress calls into
 * the core by itself; call prefill_core_turn after it. ops are never called back into the core. */
#ifndef BT_PREFILL_CORE_H
#define BT_PREFILL_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "kernels/compute.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/xfer.h"
#include "proto/message.h"
#include "proto/worker_session.h"

typedef struct prefill_core prefill_core;

enum {
    PREFILL_ATTEMPTS_MAX = 4096,
    PREFILL_PROMPTS_MAX = 256, /* of one step */
    PREFILL_PROMPTS_DEFAULT = 8,
    PREFILL_PASSES_MAX = 16,                   /* prompts that may pass one that finds no pages */
    PREFILL_SCORE_BYTES_MAX = 8 * 1024 * 1024, /* prompt log-probabilities of one step */
    PREFILL_STEP_US = 600 * 1000 * 1000,       /* a step that takes longer is taken for hung */
};

typedef struct prefill_core_ops {
    /* Sends on one connection; takes message->payload. What cannot be sent shows as
     * prefill_core_on_closed. */
    void (*send)(void *context, proto_lane lane, proto_message *message);
    /* Whether the streams connection takes more; while it does not, prompts whose log-probabilities
     * are asked for are not computed on. The owner calls prefill_core_turn when it does again. */
    bool (*can_stream)(void *context);
    /* Dial the streams connection; prefill_core_on_open follows. */
    void (*open_streams)(void *context);
    /* Close both connections and dial control again with a pause. prefill_core_on_closed does not
     * follow. */
    void (*hang_up)(void *context, const char *why);
    /* The router refused this worker with a sentence; the process ends. */
    void (*on_refused)(void *context, const char *text);
    /* The worker cannot go on; its attempts were ended honestly. The process ends. */
    void (*on_broken)(void *context, bt_status status, const char *text);
    void *context;
} prefill_core_ops;

typedef struct prefill_core_options {
    proto_hello hello; /* role, incarnation, host, pid, record, pins and model filled in */
    bt_clock clock;
    xfer *mover;    /* borrowed, like the two below; KV memory is registered already */
    kv_pool *pages; /* used by this core alone */
    compute *compute;
    uint32_t page_tokens;
    uint32_t vocab_size;
    uint32_t context_tokens;
    uint32_t chunk_tokens; /* query tokens of one step, of all its prompts together */
    uint32_t prompts_max;  /* of one step; 0 = PREFILL_PROMPTS_DEFAULT, 1: one after the other */
    bool has_prefix_cache;
    uint32_t attempts_max;   /* in hand, 1 .. PREFILL_ATTEMPTS_MAX */
    uint64_t step_us;        /* 0 = PREFILL_STEP_US */
    size_t chunk_bytes_max;  /* of the handoff; 0 = its default */
    uint64_t chunk_grace_us; /* of the handoff; 0 = its default */
    prefill_core_ops ops;
} prefill_core_options;

/* Sets itself as the user of mover and compute. Returns owned. */
BT_MUST_CHECK bt_status prefill_core_create(const prefill_core_options *options,
                                            prefill_core **out);
/* The mover and the compute are at rest: neither calls back any more. */
void prefill_core_destroy(prefill_core *core);

/* A connection to the router is open: control first, streams after open_streams. */
void prefill_core_on_open(prefill_core *core, proto_lane lane);
/* One of the connections ended; the owner closes the other and dials control again. Attempts end.
 */
void prefill_core_on_closed(prefill_core *core);
/* A message that passed the codec; its payload is borrowed. */
void prefill_core_on_message(prefill_core *core, proto_lane lane, const proto_message *message);
/* Acts on what has happened: peers, READY, the next step. */
void prefill_core_turn(prefill_core *core);
/* Deadlines, checks; turns as well. Call every <= 100 ms. */
void prefill_core_tick(prefill_core *core);

typedef struct prefill_view {
    worker_session_state session;
    uint32_t attempts; /* in hand, whatever their state */
    uint32_t queued, computing, sending, quarantined;
    uint32_t queued_tokens; /* prompt tokens not yet computed */
    uint32_t pages_total, pages_quarantined;
    uint32_t pages_free;   /* cached ones that nobody uses included */
    uint32_t pages_cached; /* of the prefix cache, used or not */
    uint32_t rows_total, rows_free;
    uint64_t steps_total, tokens_total, cached_tokens_total;
    uint64_t accepted_total, refused_total, released_total;
    bool is_step_running;
} prefill_view;

void prefill_core_look(const prefill_core *core, prefill_view *view_out);
/* Recounts: every page that is taken belongs to one attempt, or is shared by those that hold it and
 * the cache; every row slot belongs to a handoff in hand. */
bool prefill_core_check(const prefill_core *core);

#endif
