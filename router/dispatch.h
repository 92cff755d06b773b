/* The router's control core: registry of workers, the cluster record, the request queue, pairing,
 * reservations, retries, deadlines and stream credits. Pure: (state, event, now) -> calls of the
 * ops table; no sockets, no threads, no clock of its own. One thread (the control thread, or the
 * simulator) makes all calls. An op must not call back into the dispatch (asserted).
 *
 * The way of one request: QUEUED -> (a pair is chosen: prefill with less than two steps of
 * such prompts queued, short or long) RESERVING -> RUNNING (RUN is with prefill, rows may come from
 * decode) -> ended. A failure that is the cluster's and not the client's is retried as a new
 * attempt while nothing of the request was handed on, and after that where its owner can take back
 * what it got (may_restart): the same seed draws the same rows again. Else, and after attempts_max
 * tries, it is an honest error.
 *
 * A request has n samples of one prompt (proto/message.h), each with a row stream, credit and an
 * end of its own. A sample that fails by itself (its row overflows) or is cancelled does not end
 * the others; a retry leaves out those that have ended. The request ends when all its samples have
 * and, where they are asked for, the prompt's log-probabilities are all there:
 *   - OK as its lowest-numbered sample that ended OK, if there is one;
 *   - else as the worst of its samples: 500 before 503 before 400 before cancelled, and of equals
 *     the lowest-numbered. Samples that all failed are not waited for log-probabilities;
 *   - but when the cluster failed, its time passed or it was cancelled as a whole, with that error,
 *     which is also the end of every sample that had not ended.
 *
 * A sample that is aborted ends OK with PROTO_FINISH_ABORT and the rows it has by then, those that
 * decode still held included; decode is asked for them, and from then on whatever goes wrong (an
 * overflow, a worker that is gone, the request's time) is that same end with the rows handed on so
 * far. What had finished before decode heard of the abort keeps its end.
 *
 * rows_total and retractions are sums over the samples, cap_needed the largest of those that
 * overflowed, where the request ends so. Of a single sample
 * and without log-probabilities of the prompt the two ends are the same.
 *
 * A cluster that cannot serve: before the first pair was ever ready a request is refused at once
 * (REQUEST_NO_WORKER, 503). After that requests are queued while the cluster restarts, but not for
 * longer than no_worker_grace_ms without any ready pair; then they end with 503 and new ones are
 * refused at once again. */
#ifndef BT_ROUTER_DISPATCH_H
#define BT_ROUTER_DISPATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/status.h"
#include "proto/message.h"
#include "proto/record.h"

typedef struct dispatch dispatch;

/* A connection as the owner of sockets numbers it; 0 is never used. */
typedef uint64_t dispatch_link;

typedef struct dispatch_request {
    uint64_t id; /* the caller's name of the request, unique while it lives, never 0 */
    /* Words of the attempt (proto/message.h): the prompt's ids, then biases and ids asked for.
     * [proto_words(&generation, prompt_tokens)], borrowed until on_end: every try sends them. */
    const int32_t *words;
    uint32_t prompt_tokens;
    proto_generation generation;
    /* true: the row stream's credit is granted only by dispatch_grant (a streaming reply); false:
     * it is never withheld (a reply that is sent when complete). */
    bool is_credited;
    bool may_restart;       /* rows that were handed on can be taken back by on_restart */
    uint32_t emission_rows; /* of proto_reserve */
    uint32_t timeout_ms;    /* of the whole request; 0 = the option's default */
} dispatch_request;

/* How a sample, or a whole request, ended. */
typedef struct dispatch_end {
    bt_status status; /* OK (an abort as well), or why */
    int http_status;  /* 200, 400, 500, 503 (503 as well when cancelled) */
    proto_finish finish;
    int32_t matched_id; /* finish STOP */
    uint32_t rows_total;
    uint32_t cached_tokens;
    uint32_t cap_needed;       /* with REQUEST_OVERFLOW: the cap that would have sufficed */
    uint32_t retractions;      /* times decode recomputed it */
    uint32_t attempts;         /* tries made */
    char text[PROTO_TEXT_MAX]; /* the sentence of an error, or of an abort */
} dispatch_end;

/* The next bytes of the row stream of one sample (row_stream.h), whole records only; borrowed. What
 * else came with the metadata row is told with every batch, so that the first rows have it too. */
typedef struct dispatch_rows {
    uint32_t sample;
    const uint8_t *records;
    size_t bytes;
    bt_block
        *block; /* that they lie in; who wants them for longer holds it. NULL: who does copies */
    uint32_t count;
    uint32_t cached_tokens;
} dispatch_rows;

/* Entries of PROMPT_LOGPROBS, ascending over the calls without gaps, from prompt_logprobs_from + 1
 * to prompt_tokens - 1; borrowed. After a retry they start again with the first one, and what came
 * before is void. All of them come before an end that is OK, but for an abort;
 * they and the rows in any order. */
typedef struct dispatch_prompt_logprobs {
    uint32_t first_position;
    uint32_t count;
    const uint8_t *entries; /* [count][proto_prompt_logprob_bytes] */
    size_t bytes;
} dispatch_prompt_logprobs;

typedef struct dispatch_ops {
    /* Sends on one connection; takes message->payload. A failed send shows as dispatch_on_closed.
     */
    void (*send)(void *context, dispatch_link link, proto_message *message);
    /* Close after what is queued was written. dispatch_on_closed does not follow. */
    void (*close)(void *context, dispatch_link link);
    void (*on_rows)(void *context, uint64_t request, const dispatch_rows *rows);
    void (*on_prompt_logprobs)(void *context, uint64_t request,
                               const dispatch_prompt_logprobs *logprobs);
    /* Of a request that may_restart: it is tried again, and the rows of its samples that have not
     * ended are void; they come again from the first one. Those of ended samples stand. */
    void (*on_restart)(void *context, uint64_t request);
    /* Exactly one per sample, also when it never had a row, before the request's end. */
    void (*on_sample_end)(void *context, uint64_t request, uint32_t sample,
                          const dispatch_end *end);
    /* Exactly one per submitted request, the last thing. */
    void (*on_end)(void *context, uint64_t request, const dispatch_end *end);
    /* The cluster can serve (or no longer): at least one compatible pair is ready. */
    void (*on_ready_changed)(void *context, bool is_ready);
    void *context;
} dispatch_ops;

typedef struct dispatch_options {
    uint64_t incarnation; /* random, never 0 */
    char host[256];
    cluster_record
        record; /* what the router itself knows: cap, checksum, tokenizer fingerprint, versions */
    /* Of all numbers below 0 means the default in brackets. */
    uint32_t heartbeat_ms;        /* [500] between PINGs */
    uint32_t dead_after_ms;       /* [3000] without a PONG */
    uint32_t requests_max;        /* [4096] queued and running; beyond: REQUEST_FULL, 503 */
    uint32_t request_timeout_ms;  /* [600000] from submit to the end */
    uint32_t reserve_timeout_ms;  /* [10000] from RESERVE to RESERVATION */
    uint32_t handoff_timeout_ms;  /* [120000] from RESERVE to the first proven row */
    uint32_t no_worker_grace_ms;  /* [30000] queueing without any ready pair */
    uint32_t attempts_max;        /* [3] tries of one request */
    uint64_t stream_window_bytes; /* [1 MiB] raised to one row at the cap plus one frame */
    uint32_t vocab_min;           /* ids the tokenizer has; a smaller model is refused. 0: any */
    uint64_t seed;                /* of tie-breaks */
    /* Where rows that frames cut are put together, borrowed; its owner's thread is the dispatch's.
     * NULL: a pool of its own. */
    bt_block_pool *blocks;
} dispatch_options;

/* options->record must know the cap and kv_checksum, which the router governs: CALLER_CONFIG. */
BT_MUST_CHECK bt_status dispatch_create(const dispatch_options *options, const dispatch_ops *ops,
                                        dispatch **out);
/* Calls no op: whoever ends the process cancels what is left first. */
void dispatch_destroy(dispatch *d);

/* ---- requests -------------------------------------------------------------------------------- */

/* REQUEST_FULL (queue), REQUEST_DUPLICATE, REQUEST_NO_WORKER (no cluster yet), REQUEST_INVALID;
 * otherwise on_end will follow exactly once. */
BT_MUST_CHECK bt_status dispatch_submit(dispatch *d, const dispatch_request *request,
                                        uint64_t now_us, bt_error *error);
/* The client left or a stop string matched: cancels both legs. on_end still follows (CANCELLED),
 * possibly inside the call. Unknown ids are ignored. */
void dispatch_cancel(dispatch *d, uint64_t request, uint64_t now_us);
/* A stop string of one sample matched: its end follows (CANCELLED) inside the call, the others go
 * on. With the last one the request ends; if rows came, once the prompt's log-probabilities are
 * there. Unknown and ended samples are ignored. */
void dispatch_cancel_sample(dispatch *d, uint64_t request, uint32_t sample, uint64_t now_us);
/* The client wants no more than there is: a sample, or with PROTO_ALL_SAMPLES all that have not
 * ended. Their ends follow, and with the last one the request's, possibly inside the call. Unknown
 * and ended ones are ignored. */
void dispatch_abort(dispatch *d, uint64_t request, uint32_t sample, uint64_t now_us);
/* The reader consumed that many bytes of the sample's row stream. Ignored unless is_credited. */
void dispatch_grant(dispatch *d, uint64_t request, uint32_t sample, uint64_t bytes,
                    uint64_t now_us);

/* ---- connections ----------------------------------------------------------------------------- */

/* A worker connection was accepted; from now on its HELLO has a deadline. Optional: the first
 * message opens a link as well. */
void dispatch_on_opened(dispatch *d, dispatch_link link, uint64_t now_us);
/* A frame arrived on a worker connection; the first one must be a HELLO. message->payload is
 * borrowed. The message passed the codec's checks. */
void dispatch_on_message(dispatch *d, dispatch_link link, const proto_message *message,
                         uint64_t now_us);
/* The connection ended (peer, network or a protocol error of the framing layer). */
void dispatch_on_closed(dispatch *d, dispatch_link link, uint64_t now_us);
/* Deadlines, heartbeats, retries. Call every <= 100 ms. */
void dispatch_tick(dispatch *d, uint64_t now_us);

/* ---- looking --------------------------------------------------------------------------------- */

typedef struct dispatch_worker_view {
    uint32_t worker_id;
    proto_role role;
    uint64_t incarnation;
    char host[256];
    uint32_t pid;
    bool is_ready;
    uint32_t attempts, queued_tokens, sequences_running; /* as of the worker's last ping or pong */
    uint32_t pages_free, pages_total, rows_free, rows_total;
    uint64_t heartbeats; /* answered; what is not counted here is as of the last one */
} dispatch_worker_view;

typedef struct dispatch_view {
    bool is_ready;
    cluster_record record; /* with what the workers founded */
    char model_name[PROTO_MODEL_NAME_MAX];
    uint32_t vocab_size, context_tokens;
    /* Prompt and output of the longest sequence that the largest joined decode can make: its pages
     * and one, for the last token's KV is never written; 0: none joined. */
    uint64_t sequence_tokens_max;
    uint32_t eos_count;
    int32_t eos_ids[PROTO_EOS_IDS_MAX];
    uint32_t requests_queued, requests_running;
    uint64_t requests_total, retries_total;
    uint64_t refused_total;         /* workers refused by the record or the versions */
    uint64_t late_total;            /* messages of attempts and peers that are over: ignored */
    uint64_t protocol_errors_total; /* links closed, and attempts ended, for what they said */
    uint32_t worker_count;
} dispatch_view;

void dispatch_look(const dispatch *d, dispatch_view *view_out);
/* Copies up to max views; returns how many there are. */
uint32_t dispatch_look_workers(const dispatch *d, dispatch_worker_view *views, uint32_t max);

#endif
