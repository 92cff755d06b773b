/* What the parts of the decode core share.
 *
 *   decode_core.c       messages, turn, tick, looking
 *   decode_attempt.c    owner records: states, release
 *   decode_admission.c  RESERVE, CANCEL, and the handoff's events
 *   decode_step.c       the batch and its results
 *   decode_stream.c     row queues to frames, finishes, credit
 *
 * States of an attempt:
 *
 *        RESERVE                 KV and row proven, more to draw
 *   FREE ───────▶ RESERVED ──────────────────────────────▶ RUNNING ◀──▶ PARKED
 *    ▲               │  │ finished with row 0               │  │          │
 *    │ failed,       │  └───────────────┐       finished    │  │ cancel   │ finished? no:
 *    │ cancelled     ▼                  ▼ ◀─────────────────┘  │ in step  │ deadline, cancel
 *    │◀──quiet── QUARANTINE          DRAINING                  ▼          │
 *    │◀──────────────────────────────── last frame          LEAVING       │
 *    └◀──────────────────────────────────────── step done ─────┘ ◀────────┘ (straight to FREE) */
#ifndef BT_DECODE_INTERNAL_H
#define BT_DECODE_INTERNAL_H

#include "base/id_map.h"
#include "decode/decode_core.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/membership.h"
#include "pd_buffers/row_pool.h"
#include "pd_buffers/row_queue.h"

typedef enum decode_state {
    DECODE_FREE,     /* the record is not in use */
    DECODE_RESERVED, /* pages and slot are kept; the handoff fills them, with its deadline */
    DECODE_RUNNING,  /* takes part in every step */
    DECODE_PARKED,   /* its rows have no way to go; left out of steps, with a deadline */
    DECODE_DRAINING, /* drew its last row, pages are free; rows wait for credit, with a deadline */
    DECODE_LEAVING,  /* ended while a step computes on its pages; the step's deadline */
    DECODE_QUARANTINE, /* ended, but a transfer may still write its pages and slot */
    DECODE_STATE_COUNT,
} decode_state;

typedef struct decode_attempt {
    decode_state state;
    uint32_t index;
    uint32_t uses; /* of this record; part of the owner's number */
    uint64_t deadline_us;
    proto_attempt id;
    proto_generation generation;
    xfer_peer prefill;
    uint32_t prompt_tokens;

    /* What it owns. Later: pages grow with the sequence, and a sequence may be retracted. */
    uint32_t *pages; /* [page_count], a share of core->page_lists */
    uint32_t page_count;
    bool has_slot;
    row_slot slot;
    row_queue *queue;

    /* Generation. */
    uint32_t rows_made;
    int32_t last_token;
    bool is_in_step;

    /* The row stream: `staged` are queued rows as bytes, sent from staged_offset on. */
    uint8_t *staged;
    size_t staged_bytes, staged_offset;
    uint32_t staged_rows;
    uint32_t rows_sent; /* wholly, before staged */
    uint64_t sent_bytes;
    uint64_t credit_bytes; /* UINT64_MAX: never withheld */
    proto_finish finish;
    int32_t matched_id;
    bt_status status;
    uint32_t cached_tokens;
    uint32_t cap_needed;
    char text[PROTO_TEXT_MAX];
} decode_attempt;

/* The step's batch: fixed arrays of sequences_max entries (page_ids: as many page lists). */
typedef struct decode_batch {
    bool is_running;
    uint64_t deadline_us;
    model_batch batch;
    uint32_t *attempts; /* record of each sequence */
    uint32_t *token_offsets;
    int32_t *token_ids;
    uint32_t *first_positions;
    uint32_t *page_offsets;
    uint32_t *page_ids;
    uint8_t *samples;
    sampler_params *sampling;
    sampler_row *rows;
    /* Mask rows of a step, [sequences_max][cap]; made when the first request asks for a mask. */
    int32_t *support_ids;
    float *support_logprobs;
    uint32_t support_cap;
} decode_batch;

struct decode_core {
    decode_core_options options;
    membership member;          /* session, row slots, peers */
    handoff_receiver *receiver; /* NULL before the first welcome */
    bool is_broken;

    uint32_t pages_per_attempt; /* of context_tokens */
    uint32_t *page_lists;
    decode_attempt *attempts; /* [sequences_max] */
    bt_id_map by_id;          /* the attempts that are not FREE */
    uint32_t stream_next;     /* round robin */
    bool owes_capacity;       /* a RESERVE was answered FULL */
    bool has_released;        /* since then */
    decode_batch step;

    uint64_t next_check_us;
    uint64_t steps_total, tokens_total, accepted_total, refused_total, released_total;
};

static inline uint64_t decode_now(const decode_core *core) {
    return bt_clock_now_us(&core->options.clock);
}
#define DECODE_ID_FORMAT    "%016" PRIx64 "-%" PRIu64
#define DECODE_ID_ARGS(id_) (id_).router_incarnation, (id_).counter

/* decode_attempt.c */
const char *decode_state_name(decode_state state);
decode_attempt *decode_find(decode_core *core, proto_attempt id);
decode_attempt *decode_take_free(decode_core *core);
uint64_t decode_owner(const decode_attempt *a);
void decode_set_state(decode_core *core, decode_attempt *a, decode_state next, uint64_t deadline_us,
                      const char *reason);
/* The one place where what an attempt owns is given back; any state, any number of times. */
void decode_release(decode_core *core, decode_attempt *a, const char *reason);
void decode_release_pages(decode_core *core, decode_attempt *a);
void decode_release_slot(decode_core *core, decode_attempt *a);
/* Ends an attempt without a word to the router: releases it now or when its memory is at rest. */
void decode_end(decode_core *core, decode_attempt *a, const char *reason);

/* decode_admission.c */
void decode_on_reserve(decode_core *core, const proto_reserve *reserve);
void decode_on_cancel(decode_core *core, proto_attempt id);
handoff_receiver_events decode_receiver_events(decode_core *core);
void decode_capacity_turn(decode_core *core);

/* decode_step.c */
bt_status decode_step_init(decode_core *core);
void decode_step_fini(decode_core *core);
/* Makes the arrays of mask rows, once per cap. */
bt_status decode_step_need_masks(decode_core *core);
void decode_step_turn(decode_core *core);
void decode_on_step_done(void *context, bt_status status);
/* A step past its deadline: the worker is broken. */
void decode_step_tick(decode_core *core, uint64_t now_us);
/* One more row is queued: counts it, and finishes, parks or goes on. */
void decode_commit(decode_core *core, decode_attempt *a, int32_t token);
sampler_params decode_sampling(const decode_core *core, const proto_generation *generation);

/* decode_stream.c */
bool decode_has_room(const decode_core *core, const decode_attempt *a);
size_t decode_queue_bytes_max(const decode_core *core, uint32_t mask_mode);
/* Nothing more is drawn: pages are released, the queued rows and then the finish go out. */
void decode_finish(decode_core *core, decode_attempt *a, proto_finish finish, int32_t matched_id);
void decode_finish_error(decode_core *core, decode_attempt *a, bt_status status, const char *format,
                         ...) BT_PRINTF(4, 5);
/* Ends the stream at once with an error; rows that were not sent are dropped. The caller releases
 * or quarantines. */
void decode_abandon(decode_core *core, decode_attempt *a, bt_status status, const char *text);
void decode_on_credit(decode_core *core, const proto_credit *credit);
void decode_stream_turn(decode_core *core);
void decode_stream_drop(decode_attempt *a);

#endif
