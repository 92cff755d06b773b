/* One request being answered: rows come from the backend, JSON goes to the output, in the order and
 * shape its endpoint has. It knows neither sockets nor threads nor the dispatch: both sides are
 * tables, so that tests drive it with made-up rows.
 *
 *   WAITING    the status line is held until the first row is proven or the request has ended, so
 *              that a refusal found by a worker is still the client's 400
 *   STREAMING  events are written; a later failure is an event
 *   WRITING    a whole reply is being written
 *   ANSWERED   the output was ended; what still comes from the backend is dropped
 *
 * Credit: bytes of the row stream are granted again when everything due was handed to the output
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
    /* A stop string of this sample matched; the others go on. */
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

/* What a chat stream sends next. */
typedef enum api_chat_stage {
    API_CHAT_ROLE,
    API_CHAT_DELTAS,
    API_CHAT_USAGE,
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

/* In the caller's storage; members are private but to router/api_*.c. */
typedef struct api_call {
    api_call_options options;
    api_request request;
    generation generation;
    reply_store store;
    reply_writer writer;
    api_call_state state;
    api_chat_stage chat_stage;
    api_finish finish;
    bool stores_rows;
    bool is_last_event;                     /* the writer holds the last one */
    bool has_ended;                         /* nothing more comes from the backend */
    uint32_t cached_tokens;                 /* known with the first rows */
    int64_t created_s;                      /* of chat objects */
    uint64_t received_bytes, granted_bytes; /* of the row stream */
    reply_range sent;  /* row_to, text_to, place: up to where finished events went */
    reply_range going; /* the same of the event that is being written */
} api_call;

/* Moves *request in. */
void api_call_init(api_call *call, const api_call_options *options, api_request *request);
void api_call_fini(api_call *call);

/* Whole records of the row stream (proto/row_stream.h), aligned to 4. */
void api_call_on_rows(api_call *call, uint32_t sample, const uint8_t *records, size_t bytes,
                      uint32_t cached_tokens);
/* Entries for prompt positions, as dispatch tells them. */
void api_call_on_prompt_logprobs(api_call *call, const dispatch_prompt_logprobs *logprobs);
/* Exactly one per sample, and then the end of the request. */
void api_call_on_sample_end(api_call *call, uint32_t sample, const dispatch_end *end);
void api_call_on_end(api_call *call, const dispatch_end *end);
/* The output has room again. */
void api_call_on_room(api_call *call);
/* The client left: the output is gone. */
void api_call_on_gone(api_call *call);

/* An error answer of a request that never became a call. */
void api_answer_failure(const api_output *output, const api_failure *failure);

#endif
