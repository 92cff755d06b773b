/* The API layer without sockets and workers: bodies go in, made-up rows follow, what would have
 * been sent to the client is captured. The tokenizer is the tiny Qwen3's: ids 0-255 are bytes,
 * 317-319 are <|endoftext|>, <|im_start|>, <|im_end|>. Time stands still unless a test moves it. */
#ifndef BT_TESTS_UNIT_ROUTER_API_FIXTURE_H
#define BT_TESTS_UNIT_ROUTER_API_FIXTURE_H

#include <stdbool.h>

#include "proto/row_stream.h"
#include "router/api_call.h"

enum {
    API_FIXTURE_EOS = 319,
    API_FIXTURE_VOCAB = 151936,
    API_FIXTURE_CONTEXT = 200,
    API_FIXTURE_SAMPLES_MAX = 1024,
};

typedef struct api_fixture {
    tokenizer *tokenizer;
    api_settings settings;
    api_model model;
    reply_limits limits;
    uint64_t now_us;
    bool wants_safetensors; /* what Accept says */
    /* The request in progress. */
    bool is_running;
    api_call call;
    bt_text scratch;
    /* What the client got. */
    bt_text body;
    int status;
    char content_type[64];
    char fields[256];
    int64_t content_bytes;
    unsigned begin_count, end_count, cut_count;
    size_t room; /* SIZE_MAX: as much as wanted */
    unsigned wake_count;
    /* What the backend was told. */
    unsigned cancel_count; /* of items */
    unsigned cancelled_samples[API_FIXTURE_SAMPLES_MAX];
    uint64_t granted_bytes; /* of all samples */
    uint64_t granted[API_FIXTURE_SAMPLES_MAX];
    uint32_t cached_tokens; /* what rows and ends say */
    uint32_t retractions;   /* what ends say */
} api_fixture;

/* For cmocka: *state becomes an api_fixture. */
int api_fixture_set_up(void **state);
int api_fixture_tear_down(void **state);

/* The body of a refusal of /generate: where its JSON, a type or a prompt's id does not read, and
 * where a value is refused. */
#define API_SCHEMA(text) "\"object\":\"error\",\"message\":\"" text "\",\"type\":\"Bad Request\""
#define API_PLAIN(text)  "{\"error\":{\"message\":\"" text "\"}}"

/* A body that is refused with 400. */
typedef struct api_refusal {
    const char *body;
    const char *text; /* part of the body of the answer */
} api_refusal;

/* Asks each in turn; of chat and completions the answer's shape is looked at too. */
void api_fixture_expect_refusals(api_fixture *f, api_kind kind, const api_refusal *refusals,
                                 size_t count);

/* Starts a request. true: it waits for rows; false: it was answered (with an error). */
bool api_fixture_ask(api_fixture *f, api_kind kind, const char *body);
/* What the workers were told of the (first) request in progress; and of an item of a batch. */
const proto_generation *api_fixture_asked(const api_fixture *f);
const api_request *api_fixture_item(const api_fixture *f, uint32_t item);
/* One row of a sample; those of all items of a batch are counted through. */
void api_fixture_feed(api_fixture *f, uint32_t sample, const token_row *row);
void api_fixture_sample_row(api_fixture *f, uint32_t sample, int32_t token, float logprob);
/* The bytes of text, one token each. */
void api_fixture_sample_text(api_fixture *f, uint32_t sample, const char *text);
/* The same of the first sample; and a row with a mask (logprobs NULL: selected mode). */
void api_fixture_row(api_fixture *f, int32_t token, float logprob);
void api_fixture_mask_row(api_fixture *f, int32_t token, float logprob, float selected,
                          const int32_t *ids, const float *logprobs, uint32_t count);
void api_fixture_text(api_fixture *f, const char *text);
/* Entries for prompt positions from `first` on, as they travel. */
void api_fixture_prompt(api_fixture *f, uint32_t first, const float *entries, uint32_t count);
/* The same of any item of a batch. */
void api_fixture_item_prompt(api_fixture *f, uint32_t item, uint32_t first, const float *entries,
                             uint32_t count);
/* The item is tried again. */
void api_fixture_restart(api_fixture *f, uint32_t item);
/* The end of a sample, rows_total as they were given. */
void api_fixture_sample_length(api_fixture *f, uint32_t sample);
void api_fixture_sample_stop(api_fixture *f, uint32_t sample, int32_t matched);
void api_fixture_sample_fail(api_fixture *f, uint32_t sample, bt_status status, int http_status,
                             const char *text);
/* It was aborted with the rows given. */
void api_fixture_sample_abort(api_fixture *f, uint32_t sample, const char *text);
/* The end of all samples that have none yet, and then of the item; of all items. */
void api_fixture_item_length(api_fixture *f, uint32_t item);
void api_fixture_length(api_fixture *f);
void api_fixture_stop(api_fixture *f, int32_t matched);
void api_fixture_end_aborted(api_fixture *f, const char *text);
void api_fixture_fail(api_fixture *f, bt_status status, int http_status, const char *text);
/* Ends it as its owner would, whatever it is. */
void api_fixture_abort(api_fixture *f);
#ifdef BT_FAULT
/* Asks again and again, each time without another piece of memory, until none is missed; `feed`
 * gives rows (and scores) to what was accepted. Each is answered or cut, and the last one is
 * answered with 200. */
void api_fixture_run_out_of_memory(api_fixture *f, api_kind kind, const char *body,
                                   void (*feed)(api_fixture *f));
#endif
/* Everything at once: the answer's body, or of a stream the last event before [DONE]. */
const char *api_fixture_body(const api_fixture *f);
const char *api_fixture_last_event(const api_fixture *f, unsigned back);

#endif
