/* What the parts of the prefill core share.
 *
 *   prefill_core.c      messages, turn, tick, looking
 *   prefill_attempt.c   owner records: states, release
 *   prefill_intake.c    RUN and CANCEL
 *   prefill_step.c      choosing what to compute, and its results
 *   prefill_handoff.c   pages and rows to the sender, and its events
 *
 * States of an attempt:
 *
 *        first RUN           last RUN          pages, begin           row handed over
 *   FREE ─────────▶ ASSEMBLING ──────▶ QUEUED ──────▶ COMPUTING ─────────────▶ SENDING
 *    ▲                  │                │             │  │  │ cancel,           │  │
 *    │◀── failed, cancelled, deadline ───┘             │  │  │ failed      failed│  │acked
 *    │                                        in step  │  │  ▼                   │  │
 *    │◀───────────── step done, quiet ◀─── LEAVING ◀───┘  │ QUARANTINE ◀─────────┘  │
 *    │◀───────────── quiet ◀────────────────── (if not quiet yet) ┘                 │
 *    └◀── nothing to hand over ◀──────────────────────────┘ ◀────────────────────────┘ */
#ifndef BT_PREFILL_INTERNAL_H
#define BT_PREFILL_INTERNAL_H

#include "base/id_map.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/membership.h"
#include "pd_buffers/row_pool.h"
#include "prefill/prefill_core.h"

typedef enum prefill_state {
    PREFILL_FREE,       /* the record is not in use */
    PREFILL_ASSEMBLING, /* parts of the prompt are missing */
    PREFILL_QUEUED,     /* waits for its turn and for pages */
    PREFILL_COMPUTING,  /* some chunks are computed; complete pages go out */
    PREFILL_SENDING,    /* computed; pages are pinned until decode's ack */
    PREFILL_LEAVING,    /* ended while a step computes on its pages */
    PREFILL_QUARANTINE, /* ended, but a send may still read its pages */
    PREFILL_STATE_COUNT,
} prefill_state;

typedef struct prefill_attempt {
    prefill_state state;
    uint32_t index;
    uint32_t uses;        /* of this record; part of the owner's number */
    uint64_t order;       /* first come, first served */
    uint64_t deadline_us; /* of the whole attempt */
    proto_attempt id;
    proto_generation generation;
    xfer_peer decode;
    row_slot slot; /* in decode's pool */

    int32_t *prompt; /* [prompt_tokens], until it is computed */
    uint32_t prompt_tokens;
    uint32_t received_tokens;
    uint32_t computed_tokens; /* later: starts behind the prefix cache's hit */
    uint32_t cached_tokens;

    uint32_t *pages; /* [page_count], a share of core->page_lists */
    uint32_t page_count;
    uint32_t pages_sent; /* handed to the sender */
    bool has_handoff;    /* begun, and neither acked nor quiet */
    bool is_in_step;
} prefill_attempt;

/* The step's batch: one sequence per prompt. */
typedef struct prefill_batch {
    bool is_running;
    uint64_t deadline_us;
    model_batch batch;
    uint32_t attempts[PREFILL_PROMPTS_PER_STEP];
    uint32_t token_offsets[PREFILL_PROMPTS_PER_STEP + 1];
    int32_t *token_ids; /* [chunk_tokens] */
    uint32_t first_positions[PREFILL_PROMPTS_PER_STEP];
    uint32_t page_offsets[PREFILL_PROMPTS_PER_STEP + 1];
    uint32_t *page_ids; /* as many page lists */
    uint8_t samples[PREFILL_PROMPTS_PER_STEP];
    sampler_params sampling[PREFILL_PROMPTS_PER_STEP];
    sampler_row rows[PREFILL_PROMPTS_PER_STEP];
    /* Mask rows, [PREFILL_PROMPTS_PER_STEP][cap]; made when the first request asks for a mask. */
    int32_t *support_ids;
    float *support_logprobs;
    uint32_t support_cap;
} prefill_batch;

struct prefill_core {
    prefill_core_options options;
    membership member;      /* session, row slots, peers */
    handoff_sender *sender; /* NULL before the first welcome */
    bool is_broken;

    uint32_t pages_per_attempt; /* of context_tokens */
    uint32_t *page_lists;
    prefill_attempt *attempts; /* [attempts_max] */
    bt_id_map by_id;           /* the attempts that are not FREE */
    uint64_t next_order;
    prefill_batch step;

    uint64_t next_check_us;
    uint64_t steps_total, tokens_total, accepted_total, refused_total, released_total;
};

static inline uint64_t prefill_now(const prefill_core *core) {
    return bt_clock_now_us(&core->options.clock);
}
#define PREFILL_ID_FORMAT    "%016" PRIx64 "-%" PRIu64
#define PREFILL_ID_ARGS(id_) (id_).router_incarnation, (id_).counter

/* prefill_attempt.c */
const char *prefill_state_name(prefill_state state);
prefill_attempt *prefill_find(prefill_core *core, proto_attempt id);
prefill_attempt *prefill_take_free(prefill_core *core);
uint64_t prefill_owner(const prefill_attempt *a);
void prefill_set_state(prefill_core *core, prefill_attempt *a, prefill_state next,
                       const char *reason);
/* The one place where what an attempt owns is given back; any state, any number of times. */
void prefill_release(prefill_core *core, prefill_attempt *a, const char *reason);
/* Ends an attempt without a word to the router: released now, or when its memory is at rest. */
void prefill_end(prefill_core *core, prefill_attempt *a, const char *reason);
/* Ends it with a PREFILL_DONE of this status. */
void prefill_fail(prefill_core *core, prefill_attempt *a, bt_status status, const char *format, ...)
    BT_PRINTF(4, 5);
void prefill_send_done(prefill_core *core, proto_attempt id, bt_status status,
                       uint32_t cached_tokens, uint32_t cap_needed, const char *text);

/* prefill_intake.c */
void prefill_on_run(prefill_core *core, const proto_run *run, const void *payload,
                    size_t payload_bytes);
void prefill_on_cancel(prefill_core *core, proto_attempt id);

/* prefill_step.c */
bt_status prefill_step_init(prefill_core *core);
void prefill_step_fini(prefill_core *core);
/* Makes the arrays of mask rows, once per cap. */
bt_status prefill_step_need_masks(prefill_core *core);
void prefill_step_turn(prefill_core *core);
void prefill_on_step_done(void *context, bt_status status);
/* A step past its deadline: the worker is broken. */
void prefill_step_tick(prefill_core *core, uint64_t now_us);

/* prefill_handoff.c */
handoff_sender_events prefill_sender_events(prefill_core *core);
/* Pages and, if it is to be handed over, the sender's record. REQUEST_FULL = wait. */
bt_status prefill_begin(prefill_core *core, prefill_attempt *a);
/* After a chunk that is not the last: what became complete goes out. */
void prefill_send_pages(prefill_core *core, prefill_attempt *a);
/* After the last chunk: the rest of the pages, the row, PREFILL_DONE. */
void prefill_send_row(prefill_core *core, prefill_attempt *a, const sampler_row *row);

#endif
