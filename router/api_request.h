/* What a client asked for: the body of POST /generate, /v1/chat/completions or
 * /v1/completions, read, checked
 * against the model, and tokenized. Pure but for the entropy of seeds and ids; runs on the
 * tokenizer threads.
 *
 * An *api_request* is one prompt with its n samples, one request to the workers; what one HTTP
 * request asks for is an *api_batch* of them, its *items*: one, or as many as its list has prompts.
 * A batch owns its items and everything they point to. What cannot be served is an api_failure: the
 * HTTP status, the shape of its body and one sentence. */
#ifndef BT_ROUTER_API_REQUEST_H
#define BT_ROUTER_API_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/json_writer.h"
#include "base/status.h"
#include "proto/message.h"
#include "proto/row.h"
#include "router/api_errors.h"
#include "router/stop_strings.h"
#include "router/tokenizer.h"

enum {
    API_NAME_MAX = 256,        /* bytes of a model name */
    API_RID_MAX = 256,         /* bytes of a request id */
    API_MAX_NEW_DEFAULT = 128, /* /generate without max_new_tokens */
    API_TOP_LOGPROBS_MAX = 20, /* OpenAI's, of each token of chat and completions */
    API_TEXT_MAX = 1 << 30,    /* of any one growing text */
    API_EMISSION_ROWS = 50,    /* of a reply that is sent when complete */
    API_INDEX_MAX = 11,    /* bytes of what tells an item's id from the others', "_" and a number */
    API_BATCH_SAMPLES = 8, /* --batch-max times so many samples in one batch */
};

typedef enum api_kind {
    API_GENERATE,
    API_CHAT,
    API_COMPLETION,
} api_kind;

/* Of the program; immutable. */
typedef struct api_settings {
    const tokenizer *tokenizer;
    uint32_t mask_max_tokens; /* --sampling-mask-max-tokens */
    uint32_t context_max;     /* --context-length, 0 = the model's */
    uint32_t stream_interval; /* --stream-interval, >= 1 */
    uint32_t sampling_filter; /* --sampling-filter, sampler_filter's numbers */
    uint32_t batch_max;       /* --batch-max: prompts of one list */
    bool is_incremental;      /* --incremental-streaming-output */
    char model_name[API_NAME_MAX];
    char model_path[PROTO_TEXT_MAX];
    char control_address[PROTO_HOST_MAX + 16]; /* where workers join, for /server_info */
} api_settings;

/* Of the cluster at this moment. */
typedef struct api_model {
    bool is_known; /* false until the first workers told what they serve */
    uint32_t vocab_size;
    uint32_t context_tokens; /* already bounded by context_max */
    uint32_t room_tokens;    /* for prompt and reply at the largest decode, <= context_tokens */
    uint32_t eos_count;
    int32_t eos_ids[PROTO_STOP_IDS_MAX]; /* the worker's card and the tokenizer's, united */
} api_model;

typedef struct api_failure {
    int http_status;
    api_error_shape shape;
    char text[PROTO_TEXT_MAX];
} api_failure;

/* The prompt as a completion repeats it (api_echo.h). */
typedef struct api_echo {
    char *text; /* [bytes], UTF-8 */
    size_t bytes;
    uint32_t characters;
    uint32_t *starts; /* [prompt.count] characters before each token, with log-probabilities */
} api_echo;

typedef struct api_request {
    api_kind kind;
    token_list prompt;           /* ids [count]; behind them the other words of the attempt */
    proto_generation generation; /* stop_ids: EOS and stop_token_ids; none with ignore_eos */
    token_list biases;           /* ids, then the bits of their biases */
    token_list logprob_ids;      /* [generation.logprob_id_count], each once */
    token_list logprob_order;    /* of token_ids_logprob: places in logprob_ids */
    bool borrows_stops;          /* the stop strings are the first item's */
    stop_set *stops;
    char **stop_texts; /* [stop_count], what finish_reason.matched says */
    size_t *stop_bytes;
    uint32_t stop_count;
    char rid[API_RID_MAX + API_INDEX_MAX + 1];
    size_t list_rid_bytes; /* of a list, what of rid all items have, without "_0"; 0: nothing */
    bool has_own_rid;      /* given by the client: must be unique while it runs */
    bool streams;
    bool wants_logprob;
    bool wants_logprob_text;
    bool packs_mask;        /* sampling_mask_format "packed" */
    bool wants_safetensors; /* a whole reply as a file of tensors */
    bool keeps_partial;     /* on_mask_overflow "return_partial" */
    bool skips_special;
    bool keeps_stop; /* no_stop_trim */
    bool returns_prompt_ids;
    uint32_t stream_interval;
    /* Chat and completions. */
    char model[API_NAME_MAX]; /* echoed */
    bool returns_meta;
    bool returns_token_ids;
    bool includes_usage;
    bool continuous_usage;
    bool echoes; /* completions only */
    api_echo echo;
} api_request;

/* The items are alike in kind, streams and what is of chat and completions only. */
typedef struct api_batch {
    api_request *items; /* [count], at least one */
    uint32_t count;
    bool is_list; /* the client gave a list, so it gets one, also of one item */
} api_batch;

/* What came over HTTP. */
typedef struct api_body {
    api_kind kind;
    bool wants_safetensors; /* by its Accept fields */
    const char *text;
    size_t bytes;
} api_body;

/* Reads a body. false: *failure_out says why. On success *out is filled and owned by the caller,
 * who ends it with api_batch_fini. */
BT_MUST_CHECK bool api_batch_read(const api_body *body, const api_settings *settings,
                                  const api_model *model, api_batch *out, api_failure *failure_out);
void api_batch_fini(api_batch *batch);
/* Memory that what was read of the body takes as long as the batch lives: prompts and the other
 * words of the attempts, stop strings with their search, echoes. */
uint64_t api_batch_bytes(const api_batch *batch);
/* Rows of a sample that decode may send together (proto_reserve): no fewer frames than events. A
 * stop string ends a sample here, so where there are any decode draws as little as possible for
 * nothing. */
uint32_t api_request_emission_rows(const api_request *request);

#endif
