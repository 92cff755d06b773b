/* What the files of the dispatch share. Each file owns one noun:
 *   dispatch.c            the object, the entry points and the views
 *   dispatch_hello.c      versions, the cluster record, WELCOME and REFUSE
 *   dispatch_registry.c   connections, workers, pairs, heartbeats
 *   dispatch_queue.c      the queue, the choice of a pair, full decodes
 *   dispatch_attempt.c    one attempt: reserve, run, done, failing over
 *   dispatch_prompt.c     words to the workers, log-probabilities of the prompt back
 *   dispatch_request.c    submit, the end, deadlines
 *   dispatch_sample.c     the ends of samples, and how the request ends with them
 *   dispatch_abort.c      aborts, and what becomes of them when something else happens first
 *   dispatch_stream.c     chunks, rows, credit
 */
#ifndef BT_ROUTER_DISPATCH_INTERNAL_H
#define BT_ROUTER_DISPATCH_INTERNAL_H

#include "base/compiler.h"
#include "base/id_map.h"
#include "router/dispatch.h"
#include "router/row_assembler.h"

enum {
    DISPATCH_WORKERS_MAX = 256,
    DISPATCH_LINKS_MAX = 2 * DISPATCH_WORKERS_MAX + 64,
    DISPATCH_REQUESTS_MAX = 1 << 20,
    HELLO_TIMEOUT_MS = 10000,      /* from accept to HELLO; from READY to the streams' HELLO */
    PAIR_OFFER_TIMEOUT_MS = 30000, /* from PEER to PAIR_READY */
    PAIR_RETRY_MS = 1000,          /* from a break to the next PEER */
    FULL_RETRY_MS = 1000,          /* a decode is asked again even without CAPACITY */
    PREFILL_FULL_RETRY_MS = 20,    /* a prefill had no staging slot */
    WORKER_NAME_MAX = PROTO_HOST_MAX + 64,
};

typedef struct connection connection;
typedef struct worker worker;
typedef struct request request;

/* One TCP connection of a worker. */
struct connection {
    dispatch_link id; /* 0: this entry is free */
    proto_lane lane;  /* 0 until the HELLO */
    worker *worker;   /* NULL until the HELLO */
    uint64_t opened_us;
};

/* A worker process, from its WELCOME to its removal. */
struct worker {
    uint32_t slot; /* index in dispatch.workers */
    uint32_t id;
    proto_hello hello;
    cluster_record record;      /* the hello's, with what it adopted */
    char name[WORKER_NAME_MAX]; /* "decode worker at hostA (pid 7)" */
    connection *control, *streams;
    bool has_ready;
    bool is_joined;  /* READY and both connections: PEERs were exchanged */
    bool is_leaving; /* being removed: nothing is sent to it */
    proto_ready ready;
    uint64_t ready_us;
    /* heartbeats: one PING at a time, so that a slow answer still counts */
    bool is_ping_out;
    uint64_t ping_sequence, ping_sent_us, next_ping_us, last_pong_us;
    /* load, as the router counts it at selection */
    request *attempts; /* list over request.legs[] */
    uint32_t attempt_count;
    uint32_t sample_count;          /* decode: of the attempts, each a row slot and a sequence */
    uint64_t queued_tokens;         /* prefill: prompts assigned and not done */
    uint64_t queued_tokens_short;   /* of them those of prompts that fit in one step */
    uint64_t queued_tokens_left;    /* the same, less what its last PONG said is computed */
    uint64_t queued_tokens_foreign; /* of other routers, from its last PONG */
    uint64_t pages_used;            /* decode: reserved by attempts of this router */
    uint64_t pages_foreign;         /* other routers', or in quarantine, from its last PONG; of a
                                     * prefill all that are used */
    uint32_t sequences_running, rows_free;
    uint64_t heartbeats; /* PONGs so far */
    /* decode: requests of that many pages and more are known not to fit, until then or CAPACITY */
    uint32_t full_need;
    uint64_t full_until_us;
};

typedef enum pair_state {
    PAIR_NONE,
    PAIR_OFFERED, /* PEER went to both */
    PAIR_READY,   /* decode said that a hello went both ways */
    PAIR_BROKEN,  /* one said that it broke; offered again after PAIR_RETRY_MS */
} pair_state;

typedef struct pair {
    pair_state state;
    uint64_t since_us;
} pair;

/*              choose                RESERVATION ok           first row bytes        finish
 *   QUEUED ---------------> RESERVING --------------> RUNNING ---------------> STREAMING ---->
 * ENDED ^        (max_new_tokens 0: RUN at once) -------^  |                          |
 *     +-- full, retry --------------'--------------------'  retry (may_restart) ----'
 * Every state ends by dispatch_request_end (answer, error, cancel, deadline). */
typedef enum request_state {
    REQUEST_QUEUED,    /* in the queue; deadline: the request's */
    REQUEST_RESERVING, /* RESERVE is with decode; reserve_timeout_ms */
    REQUEST_RUNNING,   /* RUN is with prefill; handoff_timeout_ms */
    REQUEST_STREAMING, /* decode proved the handoff; deadline: the request's */
    REQUEST_ENDED,
    REQUEST_STATES,
} request_state;

enum { LEG_PREFILL, LEG_DECODE, LEGS };

/* The membership of a request's attempt in the list of one worker. */
typedef struct leg {
    worker *worker; /* NULL: no such leg (any more) */
    request *prev, *next;
} leg;

/* One of a request's samples. */
typedef struct request_sample {
    row_assembler rows;
    uint64_t received_bytes, granted_bytes;
    uint64_t handed_bytes, consumed_bytes, unsent_credit;
    uint32_t rows_handed;
    uint32_t retractions; /* as decode last said */
    bool has_ended;
    bool is_over_there; /* decode ended it in this attempt: it must send no more of it */
    bool is_aborting;   /* decode was told to end it; whatever happens now, it ends as aborted */
    dispatch_end end;   /* once has_ended */
} request_sample;

struct request {
    uint64_t id;
    uint64_t order; /* of submission */
    request_state state;
    const int32_t *words; /* [proto_words], borrowed */
    uint32_t prompt_tokens;
    proto_generation generation;
    bool is_credited, may_restart;
    uint32_t emission_rows;
    uint64_t submitted_us, deadline_us;
    request *all_prev, *all_next;     /* every live request */
    request *queue_prev, *queue_next; /* QUEUED only, by order */
    /* between attempts */
    uint64_t not_before_us;
    uint32_t tries;
    bool was_full;            /* a decode said FULL since it was last admitted */
    uint32_t too_large_pages; /* decodes of up to that many pages said TOO_LARGE */
    uint32_t avoid_ids[LEGS]; /* the pair that failed last */
    bt_status last_status;    /* why the last attempt failed */
    char last_text[PROTO_TEXT_MAX];
    /* the attempt */
    uint64_t attempt; /* its counter; 0: none */
    leg legs[LEGS];
    uint32_t worker_ids[LEGS]; /* also after a leg is let go */
    uint32_t need_pages;
    uint32_t slot_count;
    proto_slot slots[PROTO_SAMPLES_MAX];
    uint64_t phase_deadline_us;
    uint64_t handoff_deadline_us;
    bool is_run_sent, is_prefill_done, is_load_counted;
    uint64_t run_sent_us;
    uint32_t next_position; /* of the prompt's log-probabilities: up to here they are there */
    /* the streams */
    request_sample *samples; /* [generation.samples] */
    uint32_t samples_left;   /* that have not ended */
    uint32_t rows_handed;    /* of all, and not taken back */
    uint32_t cached_tokens, cap_needed;
};

struct dispatch {
    dispatch_options options;
    dispatch_ops ops;
    uint64_t now_us;
    uint64_t random;
    bool is_calling; /* inside an op */
    bt_block_pool *blocks, *own_blocks;
    cluster_record record;
    worker *workers[DISPATCH_WORKERS_MAX]; /* by slot */
    uint32_t worker_count;
    /* Those that can be given work, by side, in no order. */
    worker *joined[LEGS][DISPATCH_WORKERS_MAX];
    uint32_t joined_count[LEGS];
    uint32_t next_worker_id;
    connection connections[DISPATCH_LINKS_MAX];
    bt_id_map links;
    pair (*pairs)[DISPATCH_WORKERS_MAX]; /* [prefill slot][decode slot] */
    uint32_t ready_pairs;
    bool was_ready;
    uint64_t ready_lost_us;
    bt_id_map requests; /* by the caller's id */
    bt_id_map attempts; /* by counter */
    request *all_first;
    request *queue_first, *queue_last;
    uint32_t request_count, queued_count;
    bool is_queue_dirty; /* something changed that may let a request go */
    uint64_t next_attempt, next_order;
    /* The oldest request that did not fit anywhere keeps one decode for itself. */
    request *claim_request;
    worker *claim_decode;
    uint64_t credit_step_bytes;
    uint64_t requests_total, retries_total, refused_total, late_total, protocol_errors_total;
};

static inline int side_of(const worker *w) {
    return w->hello.role == PROTO_ROLE_PREFILL ? LEG_PREFILL : LEG_DECODE;
}

/* ---- dispatch.c ------------------------------------------------------------------------------ */

void dispatch_send(dispatch *d, connection *to, proto_message *message);
void dispatch_close(dispatch *d, connection *which);
/* A number below `bound` (> 0). */
uint64_t dispatch_random(dispatch *d, uint64_t bound);
static inline uint64_t dispatch_after_ms(const dispatch *d, uint64_t ms) {
    return d->now_us + ms * 1000u;
}

/* ---- dispatch_hello.c ------------------------------------------------------------------------ */

void dispatch_hello_on_control(dispatch *d, connection *from, const proto_hello *hello);
void dispatch_hello_on_streams(dispatch *d, connection *from, const proto_hello *hello);
/* The first live worker: what it stated is what the cluster was founded on. NULL: none. */
worker *dispatch_hello_founder(const dispatch *d);

/* ---- dispatch_registry.c --------------------------------------------------------------------- */

connection *dispatch_registry_open(dispatch *d, dispatch_link link); /* NULL: no room, closed */
/* This connection said something it must not: it is closed, and its worker with it. */
void dispatch_registry_protocol_error(dispatch *d, connection *from, const char *text);
worker *dispatch_registry_add_worker(dispatch *d, connection *control, const proto_hello *hello);
void dispatch_registry_join(dispatch *d, worker *w); /* when READY and both connections are there */
void dispatch_registry_remove_worker(dispatch *d, worker *w, bt_status status, const char *why);
void dispatch_registry_on_ready(dispatch *d, worker *w, const proto_ready *ready);
void dispatch_registry_on_pair(dispatch *d, worker *from, const proto_pair *report);
void dispatch_registry_on_pong(dispatch *d, worker *w, const proto_ping *pong);
void dispatch_registry_on_link_closed(dispatch *d, connection *which);
void dispatch_registry_tick(dispatch *d);
worker *dispatch_registry_find(const dispatch *d, uint32_t worker_id);
bool dispatch_registry_is_pair_ready(const dispatch *d, const worker *prefill,
                                     const worker *decode);

/* ---- dispatch_queue.c ------------------------------------------------------------------------ */

void dispatch_queue_insert(dispatch *d, request *r); /* by order */
void dispatch_queue_remove(dispatch *d, request *r);
/* Gives attempts to the requests that can have one. */
void dispatch_queue_pump(dispatch *d);
void dispatch_queue_on_full(dispatch *d, worker *decode, const request *r);
void dispatch_queue_on_capacity(dispatch *d, worker *decode);
void dispatch_queue_forget_worker(dispatch *d, const worker *w);
void dispatch_queue_drop_claim(dispatch *d, const request *r);
uint32_t dispatch_queue_pages_for(const worker *w, uint64_t tokens);
bool dispatch_queue_is_short(const worker *prefill, const request *r);

/* ---- dispatch_attempt.c ---------------------------------------------------------------------- */

request *dispatch_attempt_find(dispatch *d,
                               proto_attempt attempt); /* NULL: over, counted as late */
proto_attempt dispatch_attempt_name(const dispatch *d, const request *r);
/* decode NULL: max_new_tokens 0, prefill alone. */
void dispatch_attempt_begin(dispatch *d, request *r, worker *prefill, worker *decode);
void dispatch_attempt_on_reservation(dispatch *d, worker *from,
                                     const proto_reservation *reservation);
void dispatch_attempt_on_prefill_done(dispatch *d, worker *from, const proto_prefill_done *done);
/* Cancels what is left of the attempt (not at `over_there`, which knows) and retries or ends. */
void dispatch_attempt_fail(dispatch *d, request *r, bt_status status, const char *text,
                           const worker *over_there);
/* The attempt is over: legs are cancelled and let go, loads given back. Safe without an attempt. */
void dispatch_attempt_drop(dispatch *d, request *r, const worker *over_there);
void dispatch_attempt_release_prefill(dispatch *d, request *r);
/* The same of decode, with a CANCEL unless it knows. */
void dispatch_attempt_release_decode(dispatch *d, request *r, const worker *over_there);
/* The first row bytes prove that the handoff is over. */
void dispatch_attempt_on_proven(dispatch *d, request *r);
/* CANCEL of one sample to decode, if there is one. */
void dispatch_attempt_cancel_sample(dispatch *d, const request *r, uint32_t index);
/* The last of the prompt's log-probabilities is there. */
void dispatch_attempt_on_prompt_complete(dispatch *d, request *r);
/* Ends the attempt over something that `from` sent wrongly; the worker stays. */
void dispatch_attempt_violate(dispatch *d, request *r, const worker *from, const char *what);
/* The cluster's fault and not the client's: another try may go better. */
bool dispatch_attempt_is_worth_a_retry(bt_status status);
/* It may be tried again whatever fails now. */
bool dispatch_attempt_has_another_try(const dispatch *d, const request *r);
void dispatch_attempt_on_worker_gone(dispatch *d, worker *w, bt_status status, const char *why);
void dispatch_attempt_on_pair_broken(dispatch *d, worker *prefill, worker *decode,
                                     bt_status status);

/* ---- dispatch_request.c ---------------------------------------------------------------------- */

bt_status dispatch_request_submit(dispatch *d, const dispatch_request *from, bt_error *error);
void dispatch_request_set_state(dispatch *d, request *r, request_state next);
/* The one end of a request: tells the owner and frees it. Samples that have not ended end with the
 * same. `end` needs status and text only; finish and matched_id where they apply. */
void dispatch_request_end(dispatch *d, request *r, const dispatch_end *end);
void dispatch_request_end_with(dispatch *d, request *r, bt_status status, const char *format, ...)
    BT_PRINTF(4, 5);
void dispatch_request_tick(dispatch *d);
/* true: too long without any ready pair to let anyone wait. */
bool dispatch_request_is_hopeless(const dispatch *d);

/* ---- dispatch_prompt.c ----------------------------------------------------------------------- */

/* All words in frames; false: no memory. Sends nothing to a worker that is gone. */
bool dispatch_prompt_send_run(dispatch *d, const request *r, uint32_t deadline_ms);
bool dispatch_prompt_send_to_decode(dispatch *d, const request *r);
/* A new attempt: its log-probabilities start again. */
void dispatch_prompt_begin(request *r);
/* false: log-probabilities are asked for, and not all there. */
bool dispatch_prompt_is_complete(const request *r);
void dispatch_prompt_on_logprobs(dispatch *d, worker *from, const proto_message *message);

/* ---- dispatch_sample.c ----------------------------------------------------------------------- */

/* What every end is told besides what it brings. */
void dispatch_sample_fill_end(const dispatch *d, const request *r, dispatch_end *end);
/* Ends one sample, tells the owner and nothing else. `end` as for dispatch_request_end. */
void dispatch_sample_tell_end(dispatch *d, request *r, uint32_t index, const dispatch_end *end);
/* The same, and then the request if it was the last. over_there knows that the attempt is over. */
void dispatch_sample_end(dispatch *d, request *r, uint32_t index, const dispatch_end *end,
                         const worker *over_there);
void dispatch_sample_cancel(dispatch *d, request *r, uint32_t index);
/* Ends the request when its samples have ended and nothing is waited for. */
void dispatch_sample_settle(dispatch *d, request *r, const worker *over_there);
void dispatch_sample_add_totals(const request *r, dispatch_end *end);
/* Of a request whose samples have all ended. */
const dispatch_end *dispatch_sample_choose_end(const request *r);

/* ---- dispatch_abort.c ------------------------------------------------------------------------ */

/* What an end becomes of a sample that is aborting: an error of any kind but a cancel is an abort
 * with the rows handed on. */
void dispatch_abort_apply(const request *r, uint32_t index, dispatch_end *end);
void dispatch_abort_samples(dispatch *d, request *r, uint32_t index);
/* The attempt is over, so no answer to an abort comes any more: these samples end. true: the
 * request ended with them. */
BT_MUST_CHECK bool dispatch_abort_settle(dispatch *d, request *r);

/* ---- dispatch_stream.c ----------------------------------------------------------------------- */

/* Bytes that decode may send of a sample before the first credit. */
uint64_t dispatch_stream_window(const dispatch *d, const request *r);
void dispatch_stream_begin(dispatch *d, request *r);
void dispatch_stream_on_chunk(dispatch *d, worker *from, const proto_message *message);
void dispatch_stream_grant(dispatch *d, request *r, uint32_t index, uint64_t bytes);
void dispatch_stream_end(request *r);
/* Before another try: the owner forgets the rows of the samples that have not ended. */
void dispatch_stream_take_back(dispatch *d, request *r);

#endif
