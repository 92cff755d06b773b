/* One HTTP request being answered: rows of its samples come from the backend, JSON goes to the
 * output, in the order and shape its endpoint has. It knows neither sockets nor threads nor the
 * dispatch: both sides are tables, so that tests drive it with made-up rows.
 *
 * An *item* is one request to the backend, a prompt with its n samples; a call has one, or as many
 * as its list has prompts. The samples of all items are counted through, those of item 0 first: by
 * this number the functions of router/api_format.h know a sample. The backend knows item, and
 * sample of the item.
 *
 *   WAITING    the status line is held until the first row of any sample is proven or all samples
 *              have ended, so that a refusal found by a worker is still the client's 400; and until
 *              the log-probabilities of that sample's prompt are there, where they were asked for
 *   STREAMING  events are written; a later failure is an event
 *   MEASURING  a whole reply is complete; its length is being found out, in slices
 *   WRITING    it is being written
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
#include "router/sample_set.h"
#include "router/tensor_header.h"

/* The first size of a text to format into, so that it can be given as it is. */
enum { API_TEXT_BLOCK_BYTES = 128 * 1024 };

/* Where the answer goes. begin once, add and give any number of times, then end or cut once;
 * afterwards the context is not used again. */
typedef struct api_output {
    /* content_bytes -1: not known. fields: further header lines or NULL. */
    void (*begin)(void *context, int status, const char *content_type, int64_t content_bytes,
                  const char *fields);
    void (*add)(void *context, const char *bytes, size_t count);
    void (*give)(void *context, bt_text *text); /* adds it and leaves it empty */
    void (*end)(void *context);
    void (*cut)(void *context); /* the answer cannot be finished honestly: drop the connection */
    size_t (*room)(void *context);
    void (*wake)(void *context); /* api_call_on_room is to be called soon, room or not */
    void *context;
} api_output;

/* Where the rows come from. */
typedef struct api_backend {
    void (*cancel)(void *context, uint32_t item);
    /* This sample was ended here, by a stop string or a failure; the others go on. */
    void (*cancel_sample)(void *context, uint32_t item, uint32_t sample);
    void (*grant)(void *context, uint32_t item, uint32_t sample, uint64_t bytes);
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
    int http_status;     /* ABORT; 0 = null, the request was aborted by its owner */
    uint32_t cap_needed; /* a support was too large: what would have sufficed; 0 = not known */
    bool is_kept;        /* ABORT: what there is so far is the reply nevertheless */
    char text[PROTO_TEXT_MAX];
} api_finish;

typedef enum api_call_state {
    API_CALL_WAITING,
    API_CALL_STREAMING,
    API_CALL_MEASURING,
    API_CALL_WRITING,
    API_CALL_ANSWERED,
} api_call_state;

/* What a stream of a chat or a completion sends next of a sample. */
typedef enum api_stage {
    API_STAGE_BEGIN,
    API_STAGE_DELTAS,
    API_STAGE_FINISH, /* which waits until all samples are here */
    API_STAGE_OVER,
} api_stage;

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
    uint32_t item;
    generation generation;
    reply_store store;
    uint64_t entries;    /* of masks, in the rows of all its tokens */
    weight_runs weights; /* of these rows, with masks */
    api_finish finish;
    bool has_ended;    /* nothing more comes from the backend */
    bool wants_cancel; /* it was ended here: the backend is to be told */
    bool is_said;      /* its last event was begun */
    api_stage stage;
    uint32_t retractions;
    uint64_t received_bytes, granted_bytes; /* of its row stream */
    reply_range due;                        /* up to the last token behind which an event is due, */
    uint64_t due_events;                    /* how many are by then */
    reply_range sent;  /* row_to, text_to, place: up to where finished events went */
    reply_range going; /* the same of the event that is being written */
} api_sample;

/* One request to the backend, private to router/api_*.c. */
typedef struct api_item {
    const api_request *request;
    uint32_t first_sample, sample_count;
    prompt_logprobs prompt;
    bool stores_rows;
    bool has_tokens;        /* of any sample */
    bool has_begun;         /* an event of it was begun */
    bool wants_cancel;      /* a sample does */
    bool is_cancelled;      /* the backend was told to end it */
    bool has_ended;         /* nothing more comes from the backend */
    uint32_t cached_tokens; /* known with the first rows */
} api_item;

/* How far the parts of a whole reply are written, private to router/api_*.c. */
typedef struct api_whole {
    uint64_t part;   /* the next one */
    bool is_fixed;   /* the time that the reply tells is: */
    uint64_t now_us; /* so that it is as long each time it is formatted */
    double wall_seconds;
    /* safetensors: */
    uint32_t measured; /* samples whose JSON was begun to be measured */
    uint64_t json_bytes, head_bytes;
    int64_t bytes;        /* of everything; -1: not known, as of other replies */
    tensor_header header; /* of the parts written */
    uint64_t head_written;
} api_whole;

/* In the caller's storage; members are private but to router/api_*.c. */
typedef struct api_call {
    api_call_options options;
    api_batch batch;
    const api_request *request; /* the first item's: what all items have in common */
    reply_spill spill;          /* of all stores */
    api_item *items;            /* [batch.count] */
    api_sample *samples;        /* [sample_count] */
    uint32_t sample_count;
    sample_set due;       /* an event may be due: a stream's */
    sample_set owed;      /* credit is: a stream's */
    uint32_t over_count;  /* the samples before this one are over, */
    uint32_t said_count;  /* and their last events begun: how far is known */
    uint32_t ended_count; /* items that have ended */
    reply_writer writer;
    uint32_t current; /* the sample in the writer */
    api_whole whole;
    api_call_state state;
    bool has_ended; /* nothing more comes from the backend */
    /* Of chats and completions. */
    bool is_closed;        /* a stream: the last event was begun */
    uint32_t finish_count; /* samples whose deltas are all begun, */
    uint32_t told_count;   /* and their ends */
    uint32_t closing;      /* of the samples before this one nothing is left to tell */
    uint64_t tokens_told;  /* in all events that were begun */
    int64_t created_s;
} api_call;

/* Moves *batch in. WORKER_MEMORY, and then *batch is left alone. */
BT_MUST_CHECK bt_status api_call_init(api_call *call, const api_call_options *options,
                                      api_batch *batch);
void api_call_fini(api_call *call);

/* Samples are counted within the item here. Whole records of a row stream, aligned to 4;
 * rows->count is not looked at. */
void api_call_on_rows(api_call *call, uint32_t item, const dispatch_rows *rows);
/* Entries for prompt positions, as dispatch tells them. */
void api_call_on_prompt_logprobs(api_call *call, uint32_t item,
                                 const dispatch_prompt_logprobs *logprobs);
/* The item is tried again, which a stream never is: what came of its samples that have not ended is
 * dropped, and comes again from the first row. */
void api_call_on_restart(api_call *call, uint32_t item);
/* Exactly one per sample, and then the end of the item. A sample that was told no end ends as the
 * item does. */
void api_call_on_sample_end(api_call *call, uint32_t item, uint32_t sample,
                            const dispatch_end *end);
void api_call_on_end(api_call *call, uint32_t item, const dispatch_end *end);
/* The output has room again. */
void api_call_on_room(api_call *call);
/* The client left: the output is gone. */
void api_call_on_gone(api_call *call);
/* Tokens of all samples so far. */
uint32_t api_call_tokens(const api_call *call);

/* An error answer of a request that never became a call. */
void api_answer_failure(const api_output *output, const api_failure *failure);

#endif
