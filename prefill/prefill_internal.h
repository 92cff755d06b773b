/* What the parts of the prefill core share.
 *
 *   prefill_core.c      messages, turn, tick, looking
 *   prefill_attempt.c   owner records: states, the line, release
 *   prefill_intake.c    RUN and CANCEL
 *   prefill_pages.c     pages of an attempt: found in the cache, acquired, put into it, given back
 *   prefill_step.c      choosing what to compute, and its results
 *   prefill_batch.c     the arrays of a step: chunks, draws, scores
 *   prefill_handoff.c   pages and rows to the sender, and its events
 *   prefill_logprobs.c  prompt log-probabilities to the router
 *
 * States of an attempt:
 *
 *        first RUN           last RUN          pages, begin           rows handed over
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
#include "pd_buffers/attempt_words.h"
#include "pd_buffers/handoff.h"
#include "pd_buffers/membership.h"
#include "pd_buffers/row_pool.h"
#include "prefill/prefill_core.h"
#include "prefill/prefix_cache.h"

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
    uint64_t deadline_us; /* of the whole attempt */
    proto_attempt id;
    proto_generation generation;
    xfer_peer decode;
    row_slot *slots; /* [samples], in decode's pool; until the handoff begins */

    attempt_words words; /* until it is computed */
    block_hash *hashes;  /* of its full pages; as long, and only with a cache */
    uint32_t prompt_tokens;
    uint32_t computed_tokens; /* starts behind the cache's hit */
    uint32_t cached_tokens;   /* the hit */

    /* [page_count], a share of core->page_lists. The first shared_count are SHARED and held, the
     * others OWNED or QUARANTINED. */
    uint32_t *pages;
    uint32_t page_count;
    uint32_t shared_count;
    uint32_t pages_sent; /* handed to the sender */
    bool may_cache;      /* its pages go on to be put into the cache */
    bool has_handoff;    /* begun, and neither acked nor quiet */
    bool is_in_step;

    /* The line: QUEUED and COMPUTING attempts, oldest first. */
    struct prefill_attempt *ahead, *behind;
    uint64_t served_at; /* the step it was last part of, or joined the line at */
    uint64_t tried_at;  /* the core's `changes` when it last could not begin */
    bool is_following;  /* then: it waits for pages that another computes */
    uint32_t passed;    /* later prompts that began while it found no pages */
} prefill_attempt;

/* What only some requests ask for. */
typedef enum prefill_array_kind {
    PREFILL_SUPPORT_IDS,
    PREFILL_SUPPORT_LOGPROBS,
    PREFILL_TOPS,
    PREFILL_ID_LOGPROBS,
    PREFILL_SCORES,
    PREFILL_SCORE_TOPS,
    PREFILL_SCORE_IDS,
    PREFILL_ARRAY_COUNT,
} prefill_array_kind;

/* An array that grows to what a step has needed. */
typedef struct prefill_array {
    void *items;
    size_t capacity; /* bytes */
    size_t used;     /* bytes, in this step */
} prefill_array;

/* The step's batch: one sequence per prompt. */
typedef struct prefill_batch {
    bool is_running;
    uint64_t deadline_us;
    uint64_t weights_version; /* that the step draws under */
    model_batch batch;
    prefill_attempt **attempts; /* [prompts_max] */
    /* While it is put together, [prompts_max]: for whom, and tokens at most and in the end. */
    prefill_attempt **chosen;
    uint32_t *limits, *counts;
    uint32_t *token_offsets;   /* [prompts_max + 1] */
    int32_t *token_ids;        /* [chunk_tokens] */
    uint32_t *first_positions; /* [prompts_max] */
    uint32_t *page_offsets;    /* [prompts_max + 1] */
    uint32_t *page_ids;        /* [prompts_max][pages_per_attempt] */
    uint8_t *samples;          /* [prompts_max] */
    uint32_t *draw_offsets;    /* [prompts_max + 1] */
    sampler_params *sampling;  /* [draws_max] */
    sampler_row *rows;         /* [draws_max] */
    uint32_t draws_max;
    model_scores *scores; /* [prompts_max] */
    prefill_array arrays[PREFILL_ARRAY_COUNT];
} prefill_batch;

struct prefill_core {
    prefill_core_options options;
    membership member;        /* session, row slots, peers */
    handoff_sender *sender;   /* NULL before the first welcome */
    prefix_cache *cache;      /* NULL: off */
    uint64_t weights_version; /* of what the cache holds */
    bool is_broken;

    uint32_t pages_per_attempt; /* of context_tokens */
    uint32_t *page_lists;
    prefill_attempt *attempts; /* [attempts_max] */
    bt_id_map by_id;           /* the attempts that are not FREE */
    prefill_attempt *line_first, *line_last;
    uint64_t changes;         /* whenever something changed that a prompt may have waited for */
    prefill_attempt *waiting; /* while a step is chosen: the oldest that found no pages */
    prefill_batch step;

    uint64_t next_check_us;
    uint64_t steps_total, tokens_total, cached_tokens_total;
    uint64_t accepted_total, refused_total, released_total;
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
/* What only computing needs: the words, their hashes, the slots. */
void prefill_free_words(prefill_attempt *a);
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

/* prefill_pages.c */
uint32_t prefill_pages_free(const prefill_core *core);
/* Finds, acquires, and begins the handoff. REQUEST_FULL = wait; another failure ended it. */
bt_status prefill_begin(prefill_core *core, prefill_attempt *a);
/* Pages that became complete go into the cache. Before they go to the sender. */
void prefill_cache_pages(prefill_core *core, prefill_attempt *a);
/* What this attempt put into the cache (all_of_it: all that it holds) is taken out as far as nobody
 * else uses it. */
void prefill_uncache_pages(prefill_core *core, prefill_attempt *a, bool all_of_it);
void prefill_quarantine_pages(prefill_core *core, prefill_attempt *a);
void prefill_release_pages(prefill_core *core, prefill_attempt *a);

/* prefill_step.c */
void prefill_step_turn(prefill_core *core);
void prefill_on_step_done(void *context, bt_status status);
/* A step past its deadline: the worker is broken. */
void prefill_step_tick(prefill_core *core, uint64_t now_us);
/* Tokens of a step for each of `count` >= 1 prompts, oldest first, that have left[i] to compute.
 * Equal shares; what one does not need goes to the others, the oldest first. budget >= count. */
void prefill_share(const uint32_t *left, uint32_t count, uint32_t budget, uint32_t *shares_out);

/* prefill_batch.c */
bt_status prefill_batch_init(prefill_core *core);
void prefill_batch_fini(prefill_core *core);
void prefill_batch_clear(prefill_core *core);
/* The tokens of this prompt that a step may compute, beside `draws` draws and `score_bytes` bytes
 * of scores that others need; 0: it waits. */
uint32_t prefill_batch_limit(const prefill_core *core, const prefill_attempt *a, uint32_t draws,
                             size_t score_bytes);
/* Draws and bytes of scores that a chunk of so many tokens needs. */
uint32_t prefill_chunk_draws(const prefill_attempt *a, uint32_t tokens);
size_t prefill_chunk_score_bytes(const prefill_attempt *a, uint32_t tokens);
/* WORKER_MEMORY when there is none for what this one asks for. */
bt_status prefill_batch_add(prefill_core *core, prefill_attempt *a, uint32_t tokens);
/* All chunks are there. */
void prefill_batch_seal(prefill_core *core);
/* The rows of sequence `at`, [samples]. */
const sampler_row *prefill_batch_rows(const prefill_batch *s, uint32_t at);

/* prefill_handoff.c */
handoff_sender_events prefill_sender_events(prefill_core *core);
/* After a chunk that is not the last: what became complete goes out. */
void prefill_send_pages(prefill_core *core, prefill_attempt *a);
/* After the last chunk: the rest of the pages, the rows, PREFILL_DONE. */
void prefill_send_rows(prefill_core *core, prefill_attempt *a, const sampler_row *rows);

/* prefill_logprobs.c */
/* What a chunk has scored goes to the router; false when the attempt failed over it. */
bool prefill_send_logprobs(prefill_core *core, prefill_attempt *a, const model_scores *scores,
                           uint32_t first_token);

#endif
