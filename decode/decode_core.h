/* The decode worker's control core: reservations under a deadline, the handoff's receiver, the
 * running batch, and the row streams to the router. Pure: (state, event, now) -> calls of the ops
 * table, of the mover and of the compute; no sockets, no threads, the clock behind a table.
 *
 * Nouns. An *attempt* is one try of one request; it has the prompt's words and one or more
 * *samples*. A sample is a sequence of its own, with one owner record of everything it holds (KV
 * pages, a row slot, a row queue, a place in the batch) and one release function. A *step* runs
 * every runnable sample by one token. A sample whose rows have no way to go is *parked*, with its
 * own deadline. One whose pages were taken for an older one is *retracted*, and *recomputed* in
 * chunks within the steps once pages are free: its rows stay what they are.
 *
 * One thread (the event thread, or the simulator) makes all calls. The mover's progress calls into
 * the core by itself; after progress, and whenever the streams connection drains, call
 * decode_core_turn. ops are never called back into the core. */
#ifndef BT_DECODE_CORE_H
#define BT_DECODE_CORE_H

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

typedef struct decode_core decode_core;

enum {
    DECODE_SEQUENCES_MAX = 4096,
    DECODE_PARK_US = 60 * 1000 * 1000,   /* a reader may take nothing for this long */
    DECODE_STEP_US = 600 * 1000 * 1000,  /* a step that takes longer is taken for hung */
    DECODE_PAGES_US = 600 * 1000 * 1000, /* a retracted sample gets pages again until then */
    DECODE_CHUNK_TOKENS = 256,
    DECODE_QUEUE_BYTES = 64 * 1024,
};

typedef struct decode_core_ops {
    /* Sends on one connection; takes message->payload. What cannot be sent shows as
     * decode_core_on_closed. */
    void (*send)(void *context, proto_lane lane, proto_message *message);
    /* The streams connection takes bulk now. When it does again, call decode_core_turn. */
    bool (*can_stream)(void *context);
    /* Dial the streams connection; decode_core_on_open follows. */
    void (*open_streams)(void *context);
    /* Close both connections and dial control again with a pause. decode_core_on_closed does not
     * follow. */
    void (*hang_up)(void *context, const char *why);
    /* The router refused this worker with a sentence; the process ends. */
    void (*on_refused)(void *context, const char *text);
    /* The worker cannot go on; its attempts were ended honestly. The process ends. */
    void (*on_broken)(void *context, bt_status status, const char *text);
    void *context;
} decode_core_ops;

typedef struct decode_core_options {
    proto_hello hello; /* role, incarnation, host, pid, record, pins and model filled in */
    bt_clock clock;
    xfer *mover;    /* borrowed, like the two below; KV memory is registered already */
    kv_pool *pages; /* used by this core alone */
    compute *compute;
    uint32_t page_tokens;
    uint32_t vocab_size;
    uint32_t context_tokens;
    uint32_t sequences_max;  /* samples in hand, 1 .. DECODE_SEQUENCES_MAX */
    uint32_t chunk_tokens;   /* recomputed in one step at most; 0 = DECODE_CHUNK_TOKENS */
    size_t queue_bytes;      /* of one sample's rows, if three of the widest are less; 0 =
                              * DECODE_QUEUE_BYTES */
    uint64_t park_us;        /* 0 = DECODE_PARK_US */
    uint64_t step_us;        /* 0 = DECODE_STEP_US */
    uint64_t pages_us;       /* 0 = DECODE_PAGES_US */
    size_t chunk_bytes_max;  /* of the handoff; 0 = its default */
    uint64_t chunk_grace_us; /* of the handoff; 0 = its default */
    decode_core_ops ops;
} decode_core_options;

/* Sets itself as the user of mover and compute. Returns owned. */
BT_MUST_CHECK bt_status decode_core_create(const decode_core_options *options, decode_core **out);
/* The mover and the compute are at rest: neither calls back any more. */
void decode_core_destroy(decode_core *core);

/* A connection to the router is open: control first, streams after open_streams. */
void decode_core_on_open(decode_core *core, proto_lane lane);
/* One of the connections ended; the owner closes the other and dials control again. Attempts end.
 */
void decode_core_on_closed(decode_core *core);
/* A message that passed the codec; its payload is borrowed. */
void decode_core_on_message(decode_core *core, proto_lane lane, const proto_message *message);
/* Acts on what has happened: peers, READY, the next step, row streams, CAPACITY. */
void decode_core_turn(decode_core *core);
/* Deadlines, checks; turns as well. Call every <= 100 ms. */
void decode_core_tick(decode_core *core);

typedef struct decode_view {
    worker_session_state session;
    uint32_t attempts; /* in hand, whatever their state */
    uint32_t reserved, quarantined;
    uint32_t samples; /* likewise */
    uint32_t waiting, running, parked, retracted, recomputing, draining;
    uint32_t pages_total, pages_free, pages_quarantined;
    uint32_t rows_total, rows_free;
    uint64_t steps_total, tokens_total;
    uint64_t accepted_total, refused_total, released_total; /* attempts */
    uint64_t retractions_total, recomputed_tokens_total;
    bool is_step_running;
} decode_view;

void decode_core_look(const decode_core *core, decode_view *view_out);
/* Recounts: every page and slot that is taken belongs to exactly one sample, or is held by samples
 * of one attempt. */
bool decode_core_check(const decode_core *core);

#endif
