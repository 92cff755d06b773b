/* What the parts of the decode core share.
 *
 *   decode_core.c       messages, turn, tick, looking
 *   decode_attempt.c    owner records of attempts and samples: states, release
 *   decode_admission.c  RESERVE, PROMPT, CANCEL, ABORT, CAPACITY
 *   decode_handoff.c    what the handoff's receiver reports
 *   decode_pages.c      pages of samples: shared at the start, grown, taken back, given again
 *   decode_step.c       the batch and its results
 *   decode_sampling.c   parameters of draws, and the arrays their rows are written to
 *   decode_stream.c     row queues to frames, finishes, credit
 *
 * States of an attempt, which owns the words and knows its samples:
 *
 *        RESERVE            KV and rows proven           its last sample is gone
 *   FREE ───────▶ RESERVED ───────────────────▶ LIVE ────────────────────────────▶ FREE
 *                    └── failed, cancelled ──▶ QUARANTINE ──── quiet ────────────▶ FREE
 *
 * States of a sample, which owns pages, a row slot, a row queue and a place in the batch:
 *
 *        RESERVE             ready         words are there
 *   FREE ───────▶ RESERVED ────────▶ WAITING ─────▶ RUNNING ◀────────▶ PARKED
 *                    │  └──────────────────────────▶ │ ▲  no room for rows │
 *                    │                      page for │ │ all is computed   │ page for another
 *                    │ no page for its tail  another │ │                   │
 *                    │                     or chunks ▼ │ chunks            ▼
 *                    └───────▶ RETRACTED ◀───▶ RECOMPUTING       RETRACTED (or from WAITING)
 *
 *   Whatever draws no more goes to DRAINING (the queued rows and the finish go out), and from there
 *   to FREE; so does what is aborted, when the step that computes on its pages is done. Cancelled:
 *   straight to FREE, by way of LEAVING while a step computes on its pages. */
#ifndef BT_DECODE_INTERNAL_H
#define BT_DECODE_INTERNAL_H

#include "base/id_map.h"
#include "decode/decode_core.h"
#include "pd_buffers/attempt_words.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/membership.h"
#include "pd_buffers/row_pool.h"
#include "pd_buffers/row_queue.h"
#include "proto/row_check.h"

typedef enum decode_attempt_state {
    DECODE_ATTEMPT_FREE,       /* the record is not in use */
    DECODE_ATTEMPT_RESERVED,   /* the handoff fills pages and slots, with its deadline */
    DECODE_ATTEMPT_LIVE,       /* its samples go their own ways; words have the deadline */
    DECODE_ATTEMPT_QUARANTINE, /* ended, but a transfer may still write its pages and slots */
    DECODE_ATTEMPT_STATE_COUNT,
} decode_attempt_state;

typedef enum decode_state {
    DECODE_FREE,        /* the place is free */
    DECODE_RESERVED,    /* kept for an attempt that is RESERVED or in QUARANTINE */
    DECODE_WAITING,     /* has row 0 and pages, but not the words; the attempt's deadline */
    DECODE_RUNNING,     /* takes part in steps; left out when it finds no page, with a deadline */
    DECODE_PARKED,      /* its rows have no way to go; left out of steps, with a deadline */
    DECODE_RETRACTED,   /* without pages; waits for them, or for room too, with a deadline */
    DECODE_RECOMPUTING, /* has pages again; its tokens are computed in chunks by the steps */
    DECODE_DRAINING, /* drew its last row, pages are free; rows wait for credit, with a deadline */
    DECODE_LEAVING,  /* ended while a step computes on its pages; the step's deadline */
    DECODE_STATE_COUNT,
} decode_state;

typedef struct decode_attempt decode_attempt;

typedef struct decode_sample {
    decode_state state;
    uint32_t index; /* of the place */
    uint64_t deadline_us;
    decode_attempt *attempt;
    uint32_t number; /* among the attempt's samples */

    /* What it owns. During the handoff sample 0 has the pages of the prompt. Pages below
     * shared_count are held with siblings and never written, the others are its own. */
    uint32_t *pages; /* [page_count], a share of core->page_lists */
    uint32_t page_count, shared_count;
    bool has_slot;
    row_slot slot;
    row_queue *queue;
    int32_t *support_room; /* in the queue, for the row that the running step draws */
    int32_t *output_ids;   /* [rows_made]; grows, up to max_new_tokens */
    uint32_t output_capacity;

    /* Generation. Tokens are the prompt's and then the drawn ones. */
    uint32_t rows_made;
    uint32_t computed_tokens; /* KV of so many tokens is in the pages */
    uint32_t step_tokens;     /* that the running step adds to them */
    bool is_in_step;
    bool is_cancelled; /* during the handoff: its row is for nobody */
    bool is_aborted;   /* the running step draws its last row */
    bool lacks_room;   /* in PARKED and RETRACTED: rows have no way to go */
    uint32_t recomputes;

    /* The row stream. */
    uint32_t due_rows; /* pushed, that wait for no others */
    uint64_t sent_bytes;
    uint64_t credit_bytes; /* UINT64_MAX: never withheld */
    proto_finish finish;
    int32_t matched_id;
    bt_status status;
    uint32_t cap_needed;
    char text[PROTO_TEXT_MAX];
} decode_sample;

struct decode_attempt {
    decode_attempt_state state;
    uint32_t index;
    uint32_t uses;        /* of this record; part of the owner's number */
    uint64_t deadline_us; /* of the handoff and of the words */
    proto_attempt id;
    proto_generation generation;
    uint32_t emission_rows;
    xfer_peer prefill;
    uint32_t prompt_tokens;
    uint32_t cached_tokens;
    attempt_words words;
    uint32_t live;                             /* samples that are not gone */
    decode_sample *samples[PROTO_SAMPLES_MAX]; /* [generation.samples]; NULL: gone */
};

/* The step's batch: fixed arrays of sequences_max entries (page_ids: as many page lists; token_ids:
 * chunk_tokens more). */
typedef struct decode_batch {
    bool is_running;
    uint64_t deadline_us;
    uint64_t weights_version; /* that the step draws under */
    model_batch batch;
    decode_sample **members; /* of each sequence */
    uint32_t *token_offsets;
    int32_t *token_ids;
    uint32_t *first_positions;
    uint32_t *page_offsets;
    uint32_t *page_ids;
    uint8_t *samples;
    sampler_params *sampling;
    sampler_row *rows;
    /* Made when the first request asks for it: scratch for the check of first rows
     * [row_seen_bytes], top log-probabilities [sequences_max][SAMPLER_TOP_MAX], those of ids
     * [sequences_max][SAMPLER_IDS_MAX]. */
    uint8_t *seen_ids;
    sampler_top *top;
    float *id_logprobs;
} decode_batch;

struct decode_core {
    decode_core_options options;
    membership member;          /* session, row slots, peers */
    handoff_receiver *receiver; /* NULL before the first welcome */
    bool is_broken;

    uint32_t pages_per_sample; /* of context_tokens */
    uint32_t *page_lists;
    uint32_t *page_scratch;   /* one list more */
    decode_attempt *attempts; /* [sequences_max] */
    decode_sample *samples;   /* [sequences_max]: the places */
    decode_sample **order;    /* [order_count]: those not FREE, in order of admission */
    uint32_t order_count;
    bt_id_map by_id;       /* the attempts that are not FREE */
    bt_block_pool *blocks; /* of all row queues */
    uint32_t stream_next;  /* round robin */
    bool owes_capacity;    /* a RESERVE was answered FULL */
    bool has_released;     /* since then: pages, places, or what kept new ones out */
    decode_batch step;

    uint64_t next_check_us;
    uint64_t steps_total, tokens_total, accepted_total, refused_total, released_total;
    uint64_t retractions_total, recomputed_total;
};

static inline uint64_t decode_now(const decode_core *core) {
    return bt_clock_now_us(&core->options.clock);
}
/* Tokens whose KV the next draw needs: all of them. */
static inline uint32_t decode_tokens(const decode_sample *s) {
    return s->attempt->prompt_tokens + s->rows_made;
}
#define DECODE_ID_FORMAT    "%016" PRIx64 "-%" PRIu64
#define DECODE_ID_ARGS(id_) (id_).router_incarnation, (id_).counter

/* decode_attempt.c */
decode_attempt *decode_find(decode_core *core, proto_attempt id);
/* NULL: unknown, or gone. */
decode_sample *decode_find_sample(decode_core *core, proto_attempt id, uint32_t number);
uint32_t decode_free_places(const decode_core *core);
/* A record with its samples, all RESERVED; the caller has seen that there are enough places. */
decode_attempt *decode_admit(decode_core *core, const proto_reserve *reserve, xfer_peer prefill);
uint64_t decode_owner(const decode_attempt *a);
void decode_set_attempt_state(decode_core *core, decode_attempt *a, decode_attempt_state next,
                              const char *reason);
void decode_set_state(decode_core *core, decode_sample *s, decode_state next, uint64_t deadline_us,
                      const char *reason);
/* The one place where what a sample owns is given back; any state, any number of times. With the
 * last sample the attempt's record is free. */
void decode_release(decode_core *core, decode_sample *s, const char *reason);
void decode_release_attempt(decode_core *core, decode_attempt *a, const char *reason);
void decode_release_slots(decode_core *core, decode_attempt *a);
/* Ends without a word to the router: releases now, or when memory is at rest. */
void decode_end(decode_core *core, decode_sample *s, const char *reason);
void decode_end_attempt(decode_core *core, decode_attempt *a, const char *reason);
/* Recounts; the whole of decode_core_check. */
bool decode_check(const decode_core *core);

/* decode_admission.c */
void decode_on_reserve(decode_core *core, const proto_reserve *reserve);
void decode_on_prompt(decode_core *core, const proto_message *message);
void decode_on_cancel(decode_core *core, const proto_cancel *cancel);
void decode_on_abort(decode_core *core, const proto_cancel *abort);
void decode_capacity_turn(decode_core *core);
/* Whether draws and recomputing have what they need of the prompt. */
bool decode_has_words(const decode_attempt *a);

/* decode_handoff.c */
handoff_receiver_events decode_receiver_events(decode_core *core);

/* decode_pages.c; those that take pages from others are called while no step runs */
/* Pages for which room is left, so that what is in hand need not be retracted at once. */
uint32_t decode_growth_reserve(const decode_core *core);
/* The same of an attempt that is not here yet. */
uint32_t decode_growth_of(const decode_core *core, uint32_t prompt_tokens,
                          const proto_generation *generation);
/* READY: the prompt's pages, which nobody has now, go to the samples that draw on. */
void decode_spread_pages(decode_core *core, decode_attempt *a, uint32_t *pages, uint32_t count);
void decode_release_pages(decode_core *core, decode_sample *s);
/* Pages up to its last token, taken from others if need be. false: it has to wait. */
BT_MUST_CHECK bool decode_grow(decode_core *core, decode_sample *s);
/* A RETRACTED sample gets all its pages and is RECOMPUTING, or nothing changes for it. */
BT_MUST_CHECK bool decode_readmit(decode_core *core, decode_sample *s);
/* Some tokens more of a RECOMPUTING sample are computed: siblings may have the prompt's pages. */
void decode_offer_pages(decode_core *core, decode_sample *s);
bool decode_has_retracted(const decode_core *core);

/* decode_sampling.c */
/* Makes the arrays that rows of such a request are written to, once per cap. */
bt_status decode_sampling_need(decode_core *core, const proto_generation *generation);
void decode_sampling_fini(decode_core *core);
sampler_params decode_sampling(const decode_core *core, const decode_sample *s);
/* Room for the support that the next step draws; false: there is none, and the sample ended. */
BT_MUST_CHECK bool decode_prepare_row(decode_core *core, decode_sample *s);
/* The row of sequence `at` of the batch, to be drawn into. */
sampler_row decode_row_for(const decode_core *core, const decode_sample *s, uint32_t at);
/* Top log-probabilities of every row. */
uint32_t decode_top_count(const decode_core *core, const proto_generation *generation);

/* decode_step.c */
bt_status decode_step_init(decode_core *core);
void decode_step_fini(decode_core *core);
void decode_step_turn(decode_core *core);
void decode_on_step_done(void *context, bt_status status);
/* A step past its deadline: the worker is broken. */
void decode_step_tick(decode_core *core, uint64_t now_us);
/* One more row is queued: counts it, and finishes, parks or goes on. */
void decode_commit(decode_core *core, decode_sample *s, int32_t token);
/* Ends a sample for what its row says; token `at` of the output. */
void decode_finish_unsampled(decode_core *core, decode_sample *s, uint32_t row_status,
                             uint32_t cap_needed);

/* decode_stream.c */
bool decode_has_room(const decode_core *core, const decode_sample *s);
bt_status decode_make_queue(decode_core *core, decode_sample *s);
/* Nothing more is drawn: pages are released, the queued rows and then the finish go out. */
void decode_finish(decode_core *core, decode_sample *s, proto_finish finish, int32_t matched_id);
void decode_finish_error(decode_core *core, decode_sample *s, bt_status status, const char *format,
                         ...) BT_PRINTF(4, 5);
/* Ends the stream at once with an error; rows that were not sent are dropped. The caller releases
 * or quarantines. */
void decode_abandon(decode_core *core, decode_sample *s, bt_status status, const char *text);
void decode_abandon_attempt(decode_core *core, decode_attempt *a, bt_status status,
                            const char *text);
/* Aborted before it had a row: the stream ends at once. The caller quarantines. */
void decode_abort_empty(decode_core *core, decode_sample *s);
void decode_on_credit(decode_core *core, const proto_credit *credit);
void decode_stream_turn(decode_core *core);

#endif
