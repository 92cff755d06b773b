/* How the endpoints' JSON looks. These fill call->writer; api_call.c decides when. */
#ifndef BT_ROUTER_API_FORMAT_H
#define BT_ROUTER_API_FORMAT_H

#include "router/api_call.h"

static inline uint32_t api_samples_of(const api_call *call) {
    return call->sample_count;
}

/* The answer is a list: a list was given, or several samples asked for. */
static inline bool api_is_list(const api_call *call) {
    return call->batch.is_list || call->sample_count > 1;
}

/* The item of a sample, and what was asked of it. */
static inline api_item *api_item_of(const api_call *call, uint32_t sample) {
    return &call->items[call->samples[sample].item];
}
static inline const api_request *api_request_of(const api_call *call, uint32_t sample) {
    return api_item_of(call, sample)->request;
}

/* Begins another text over a range of a sample. */
static inline void api_start_writer(api_call *call, uint32_t sample, const reply_range *range) {
    api_sample *s = &call->samples[sample];
    reply_writer_start(&call->writer, &s->generation, &s->store, &api_item_of(call, sample)->prompt,
                       range);
}

/* What is before a number, and the number: an event has a dozen, and printf is slow. */
static inline void api_add_number(bt_text *out, const char *before, uint64_t value) {
    bt_text_add_string(out, before);
    bt_json_add_int(out, (int64_t)value);
}

/* Everything there is of a sample by now. */
static inline reply_range api_sample_range(const api_sample *s) {
    return (reply_range){.row_to = s->generation.count,
                         .text_to = s->generation.text.used,
                         .entries_to = s->entries,
                         .place = reply_store_begin(&s->store),
                         .place_to = reply_store_end(&s->store),
                         .weights = &s->weights};
}

/* The meta_info object of a sample over the writer's range. */
void api_meta_add(api_call *call, uint32_t sample);
/* The finish_reason object, or null. */
void api_finish_add(const api_call *call, uint32_t sample, bt_text *out);

/* /generate: the object of one sample over the writer's range. */
void api_generate_add(api_call *call, uint32_t sample);

/* Chat and completions: the choice of a sample in a whole reply; with the first one what comes
 * before the choices, with the last one what comes after. */
void api_openai_add(api_call *call, uint32_t sample);
/* The next event of a sample, over a range of what was not sent yet, if one is due. */
bool api_openai_add_event(api_call *call, uint32_t sample, const reply_range *next);
/* The events behind all samples' deltas, one after the other; false: not yet, or no more. */
bool api_openai_add_closing(api_call *call);

typedef enum api_part_kind {
    API_PART_WHOLE,
    API_PART_ROLE, /* chat only */
    API_PART_DELTA,
    API_PART_FINISH, /* an end without text */
} api_part_kind;

/* What is told of a choice at once. */
typedef struct api_part {
    api_part_kind kind;
    bool is_first; /* of this choice: with what is told once */
} api_part;

/* What the endpoints word differently: behind "index", up to "logprobs" and a comma. */
void api_chat_add_part(api_call *call, const api_part *part);
void api_completion_add_part(api_call *call, const api_part *part);

/* ---- whole replies (api_whole.c) ------------------------------------------------------------- */

void api_whole_begin(api_call *call);
/* A slice of finding out call->whole.bytes, where it must be known before the first byte. */
BT_MUST_CHECK bt_status api_whole_measure(api_call *call, bool *is_complete_out);
/* Puts the next part into the writer; false: that was the last one. */
bool api_whole_next(api_call *call);

/* ---- samples (api_sample.c) ------------------------------------------------------------------ */

void api_sample_init(api_call *call, uint32_t sample, uint32_t item);
void api_sample_fini(api_sample *s);
/* Takes row records until the sample has ended. */
BT_MUST_CHECK bt_status api_sample_take_rows(api_call *call, api_sample *s,
                                             const dispatch_rows *rows);
/* Why the backend ended it. */
void api_sample_take_end(api_call *call, api_sample *s, const dispatch_end *end);
/* A failure of our own; the first one is kept. */
void api_sample_fail(api_call *call, api_sample *s, bt_status status);
void api_sample_abort(api_sample *s, int http_status, const char *text);
static inline bool api_sample_is_over(const api_sample *s) {
    return s->finish.kind != API_FINISH_NONE;
}
/* What may be told of its end: in a stream nothing while there are deltas to come. */
static inline api_finish_kind api_told_finish(const api_sample *s) {
    return s->stage == API_STAGE_DELTAS ? API_FINISH_NONE : s->finish.kind;
}
/* It failed; an abort by its owner is no failure, nor is one whose beginning was asked for. */
static inline bool api_sample_is_failed(const api_sample *s) {
    const api_finish *finish = &s->finish;
    return finish->kind == API_FINISH_ABORT && finish->http_status != 0 && !finish->is_kept;
}
/* The prompt's log-probabilities are there, and a sample is over with them. */
bool api_item_keeps_prompt(const api_call *call, const api_item *item);
/* All samples are over, and all of them failed. */
bool api_samples_are_failed(const api_call *call);
bool api_samples_are_over(api_call *call);
/* Of failed samples, what the client is told in place of a reply: 500 before 503 before 400,
 * and of overflows the one that needs the largest cap. */
const api_finish *api_samples_worst(const api_call *call);

#endif
