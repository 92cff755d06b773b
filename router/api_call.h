/* One request being answered: rows of its samples come from the backend, JSON goes to the output,
 * in the order and shape its endpoint has. It knows neither sockets nor threads nor the dispatch:
 * both sides are tables, so that tests drive it with made-up rows.
 *
 *   WAITING    the status line is held until the first row of any sample is proven or all samples
 *              have ended, so that a refusal found by a worker is still the client's 400; and until
 *              the prompt's log-probabilities are there, where they were asked for
 *   STREAMING  events are written; a later failure is an event
 *   WRITING    a whole reply is being written
 *   ANSWERED   the output was ended; what still comes from the backend is dropped
 *
 * Credit: bytes of the row streams are granted again when everything due was handed to the output
 * and the output has room. A slow client of a cumulative stream gets fewer, larger events.
 *
 * All calls on one thread at a time. */
#ifndef BT_ROUTER_API_CALL_H
#define BT_ROUTER_API_CALL_H

#include "base/clock.h"
#include "router/api_request.h"
#include "router/dispatch.h"
#include "router/generation.h"
#include "router/reply_store.h"
#include "router/reply_writer.h"

/* Where the answer goes. begin once, add any number of times, then end or cut once; afterwards the
 * context is not used again. */
typedef struct api_output {
    /* content_bytes -1: not known. fields: further header lines or NULL. */
    void (*begin)(void *context, int status, const char *content_type, int64_t content_bytes,
                  const char *fields);
    void (*add)(void *context, const char *bytes, size_t count);
    void (*end)(void *context);
    void (*cut)(void *context); /* the answer cannot be finished honestly: drop the connection */
    size_t (*room)(void *context);
    void *context;
} api_output;

/* Where the rows come from. */
typedef struct api_backend {
    void (*cancel)(void *context);
    /* This sample was ended here, by a stop string or a failure; the others go on. */
    void (*cancel_sample)(void *context, uint32_t sample);
    void (*grant)(void *context, uint32_t sample, uint64_t bytes);
    void *context;
} api_backend;

/* Monotonic time for latencies, seconds since 1970 for response_sent_to_client_ts. */
typedef struct api_time {
    bt_clock clock;
    double (*wall_seconds)(void *context);
    void *context;
} api_time;

typedef enum api_finish_kind {
    API_FINISH_NONE,
    API_FINISH_STOP_ID,
    API_FINISH_STOP_STRING,
    API_FINISH_LENGTH,
    API_FINISH_ABORT,
} api_finish_kind;

typedef struct api_finish {
    api_finish_kind kind;
    int32_t matched_id;
    int http_status; /* ABORT; 0 = null, the request was aborted by its owner */
    char text[PROTO_TEXT_MAX];
} api_finish;

typedef enum api_call_state {
    API_CALL_WAITING,
    API_CALL_STREAMING,
    API_CALL_WRITING,
    API_CALL_ANSWERED,
} api_call_state;

/* What a chat stream sends next of a sample. */
typedef enum api_chat_stage {
    API_CHAT_ROLE,
    API_CHAT_DELTAS,
    API_CHAT_FINISH, /* which waits until all samples are here */
    API_CHAT_OVER,
} api_chat_stage;

typedef struct api_call_options {
    const api_settings *settings;
    reply_limits *limits;
    api_time time;
    api_output output;
    api_backend backend;
    bt_text *scratch; /* of the thread, empty between calls */
    uint64_t started_us;
} api_call_options;

/* One sample, private to router/api_*.c. */
typedef struct api_sample {
    generation generation;
    reply_store store;
    api_finish finish;
    bool has_ended;    /* nothing more comes from the backend */
    bool wants_cancel; /* it was ended here: the backend is to be told */
    bool is_said;      /* its last event was begun */
    api_chat_stage chat_stage;
    uint32_t retractions;
    uint64_t received_bytes, granted_bytes; /* of its row stream */
    reply_range sent;  /* row_to, text_to, place: up to where finished events went */
    reply_range going; /* the same of the event that is being written */
} api_sample;

/* In the caller's storage; members are private but to router/api_*.c. */
typedef struct api_call {
    api_call_options options;
    api_request request;
    api_sample *samples; /* [request.generation.samples] */
    prompt_logprobs prompt;
    reply_writer writer;
    uint32_t current; /* the sample in the writer */
    api_call_state state;
    bool stores_rows;
    bool is_cancelled;      /* the backend was told to end the request */
    bool has_ended;         /* nothing more comes from the backend */
    bool is_closed;         /* a chat stream: the last event was begun */
    uint32_t cached_tokens; /* known with the first rows */
    int64_t created_s;      /* of chat objects */
} api_call;

/* Moves *request in. WORKER_MEMORY, and then *request is left alone. */
BT_MUST_CHECK bt_status api_call_init(api_call *call, const api_call_options *options,
                                      api_request *request);
void api_call_fini(api_call *call);

/* Whole records of the row stream of a sample (proto/row_stream.h), aligned to 4. */
void api_call_on_rows(api_call *call, uint32_t sample, const uint8_t *records, size_t bytes,
                      uint32_t cached_tokens);
/* Entries for prompt positions, as dispatch tells them. */
void api_call_on_prompt_logprobs(api_call *call, const dispatch_prompt_logprobs *logprobs);
/* Exactly one per sample, and then the end of the request. A sample that was told no end ends as
 * the request does. */
void api_call_on_sample_end(api_call *call, uint32_t sample, const dispatch_end *end);
void api_call_on_end(api_call *call, const dispatch_end *end);
/* The output has room again. */
void api_call_on_room(api_call *call);
/* The client left: the output is gone. */
void api_call_on_gone(api_call *call);
/* Tokens of all samples so far. */
uint32_t api_call_tokens(const api_call *call);

/* An error answer of a request that never became a call. */
void api_answer_failure(const api_output *output, const api_failure *failure);

#endif
