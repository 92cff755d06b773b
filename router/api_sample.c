/* What happens to one sample: rows in, an end, each named once. A stop string is found here before
 * the backend knows; whatever it sends of the sample afterwards is dropped. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "proto/row_stream.h"
#include "router/api_format.h"
#include "router/http_status.h"

void api_sample_init(api_call *call, uint32_t sample, uint32_t item) {
    api_sample *s = &call->samples[sample];
    s->item = item;
    generation_init(&s->generation, call->items[item].request, call->options.settings->tokenizer);
    reply_store_init(&s->store, &call->spill);
}

void api_sample_fini(api_sample *s) {
    reply_store_fini(&s->store);
    weight_runs_fini(&s->weights);
    generation_fini(&s->generation);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void want_cancel(api_call *call, api_sample *s) {
    s->wants_cancel = true;
    call->items[s->item].wants_cancel = true;
}

void api_sample_abort(api_sample *s, int http_status, const char *text) {
    if (api_sample_is_over(s)) return;
    s->finish.kind = API_FINISH_ABORT;
    s->finish.http_status = http_status;
    snprintf(s->finish.text, sizeof(s->finish.text), "%s", text);
}

void api_sample_fail(api_call *call, api_sample *s, bt_status status) {
    /* No more text comes: what was held back is told with the tokens it is of. */
    if (generation_finish(&s->generation) != BT_OK) status = BT_ERR_WORKER_MEMORY;
    if (status == BT_ERR_REQUEST_FULL) {
        char text[PROTO_TEXT_MAX];
        snprintf(text, sizeof(text),
                 "the replies being held need more than --reply-spill-bytes=%llu",
                 (unsigned long long)call->options.limits->spill.bytes_max);
        api_sample_abort(s, 503, text);
    } else {
        api_sample_abort(s, http_status_of(status), bt_status_string(status));
    }
    want_cancel(call, s);
}

/* The three sentences that clients look for are kept word for word; what this one needs comes
 * behind. */
static void take_overflow(const api_call *call, api_sample *s, const dispatch_end *end) {
    char text[PROTO_TEXT_MAX];
    int used = snprintf(
        text, sizeof(text),
        "Sampling support exceeds --sampling-mask-max-tokens=%u, commonly because of cutoff ties. "
        "Lower top_k to leave more headroom or increase the server limit.",
        call->options.settings->mask_max_tokens);
    if (end->cap_needed > 0)
        snprintf(text + used, sizeof(text) - (size_t)used, " Required: %u.", end->cap_needed);
    api_sample_abort(s, 400, text);
    s->finish.cap_needed = end->cap_needed;
    s->finish.is_kept = call->items[s->item].request->keeps_partial && s->generation.count > 0;
}

static void take_failure(api_call *call, api_sample *s, const dispatch_end *end) {
    int http_status = end->http_status >= 400 ? end->http_status : 500;
    if (end->status == BT_ERR_REQUEST_OVERFLOW) {
        take_overflow(call, s, end);
        return;
    }
    if (end->status == BT_ERR_REQUEST_CAPTURE) {
        bool is_known = strstr(end->text, "captured sampling support") != NULL;
        api_sample_abort(s, 500,
                         is_known ? end->text
                                  : "The sampling backend selected a token outside its captured "
                                    "sampling support.");
        return;
    }
    if (end->status == BT_ERR_REQUEST_CANCELLED) {
        api_sample_abort(s, 0, "Aborted");
        return;
    }
    api_sample_abort(s, http_status, end->text[0] != 0 ? end->text : bt_status_string(end->status));
}

static void take_success(api_call *call, api_sample *s, const dispatch_end *end) {
    bt_status status = generation_finish(&s->generation);
    if (status != BT_OK) {
        api_sample_fail(call, s, status);
    } else if (s->generation.is_stopped) {
        s->finish.kind = API_FINISH_STOP_STRING;
    } else if (end->rows_total != s->generation.count) {
        api_sample_abort(s, 500, "rows of the reply were lost");
    } else if (end->finish == PROTO_FINISH_ABORT) {
        api_sample_abort(s, 0, end->text);
    } else if (end->finish == PROTO_FINISH_STOP) {
        s->finish.kind = API_FINISH_STOP_ID;
        s->finish.matched_id = end->matched_id;
    } else {
        s->finish.kind = API_FINISH_LENGTH;
    }
}

void api_sample_take_end(api_call *call, api_sample *s, const dispatch_end *end) {
    s->has_ended = true;
    s->retractions = end->retractions;
    if (!api_sample_is_over(s)) {
        if (end->status == BT_OK) {
            take_success(call, s, end);
        } else {
            take_failure(call, s, end);
        }
    }
    if (generation_finish(&s->generation) != BT_OK) api_sample_fail(call, s, BT_ERR_WORKER_MEMORY);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* A log-probability that is no number means that the forward pass broke. */
static bool has_numbers(const token_row *row) {
    bool is_good = row->has_logprob == 0 || !isnan(row->token_logprob);
    for (uint32_t i = 0; i < row->top_count; i++) {
        is_good = is_good && !isnan(row->top[i].logprob);
    }
    for (uint32_t i = 0; i < row->id_logprob_count; i++) {
        is_good = is_good && !isnan(row->id_logprobs[i]);
    }
    return is_good;
}

/* A record, and the block that it lies in (or NULL). */
typedef struct record_place {
    const uint8_t *bytes;
    size_t count;
    bt_block *block;
} record_place;

/* The row first: what a failure sends covers the tokens that were taken, each with its row. */
static bt_status store_row(const api_item *item, api_sample *s, const record_place *record,
                           const token_row *row) {
    if (!item->stores_rows) return BT_OK;
    const bt_status status =
        reply_store_append(&s->store, record->bytes, record->count, record->block);
    if (status != BT_OK || item->request->generation.mask_mode == ROW_MASK_OFF) return status;
    return weight_runs_push(&s->weights, row->weights_version);
}

/* With an interval k an event is due after tokens 1, k + 1, 2k + 1, ..., or later when the end of
 * the text could become a stop string there; the last token goes out together with the finish
 * reason. More rows may be here before an event is written: it ends where it is due all the same.
 */
static void note_due(const api_request *request, api_sample *s) {
    const generation *g = &s->generation;
    const uint64_t events = ((uint64_t)g->count - 1) / request->stream_interval + 1;
    if (!request->streams || events <= s->due_events) return;
    if (g->is_complete || g->is_stopped || generation_is_holding(g)) return;
    s->due = api_sample_range(s);
    s->due_events = events;
}

static bt_status take_row(api_call *call, api_sample *s, const record_place *record,
                          const token_row *row) {
    const api_item *item = &call->items[s->item];
    const uint32_t before = s->generation.count;
    if (!has_numbers(row)) return BT_ERR_WORKER_INTERNAL;
    if (row->id_logprob_count != item->request->generation.logprob_id_count)
        return BT_ERR_PEER_PROTOCOL;
    bt_status status = store_row(item, s, record, row);
    if (status == BT_OK) status = generation_push(&s->generation, row->token);
    if (s->generation.count > before) s->entries += row->support_count;
    if (status == BT_OK) note_due(item->request, s);
    return status;
}

bt_status api_sample_take_rows(api_call *call, api_sample *s, const dispatch_rows *rows) {
    bt_status status = BT_OK;
    size_t at = 0;
    while (at < rows->bytes && status == BT_OK && !api_sample_is_over(s)) {
        token_row row;
        size_t used;
        status = row_record_decode(rows->records + at, rows->bytes - at,
                                   call->options.settings->mask_max_tokens, &row, &used);
        if (status == BT_OK && used == 0) status = BT_ERR_PEER_PROTOCOL;
        const record_place record = {rows->records + at, used, rows->block};
        if (status == BT_OK) status = take_row(call, s, &record, &row);
        at += used;
        if (status != BT_OK || !s->generation.is_stopped) continue;
        s->finish.kind = API_FINISH_STOP_STRING;
        want_cancel(call, s);
    }
    return status;
}

/* ---- a new try ------------------------------------------------------------------------------- */

/* Every sample that has ended is over. So is one that was ended here: the backend is being told,
 * and what comes of it again is dropped. */
void api_call_on_restart(api_call *call, uint32_t index) {
    BT_ASSERT(index < call->batch.count);
    const api_item *item = &call->items[index];
    BT_ASSERT(!item->has_ended);
    BT_ASSERT(!call->request->streams); /* whose events were sent */
    for (uint32_t i = item->first_sample; i < item->first_sample + item->sample_count; i++) {
        if (api_sample_is_over(&call->samples[i])) continue;
        api_sample_fini(&call->samples[i]);
        call->samples[i] = (api_sample){0};
        api_sample_init(call, i, index);
    }
}

bool api_item_keeps_prompt(const api_call *call, const api_item *item) {
    if (!item->prompt.is_wanted || !prompt_logprobs_is_complete(&item->prompt)) return false;
    for (uint32_t i = 0; i < item->sample_count; i++) {
        if (api_sample_is_over(&call->samples[item->first_sample + i])) return true;
    }
    return false;
}

/* ---- all samples ----------------------------------------------------------------------------- */

/* Once over is over for good, so it is enough to know up to where all are. */
bool api_samples_are_over(api_call *call) {
    while (call->over_count < call->sample_count &&
           api_sample_is_over(&call->samples[call->over_count]))
        call->over_count++;
    return call->over_count == call->sample_count;
}

bool api_samples_are_failed(const api_call *call) {
    for (uint32_t i = 0; i < api_samples_of(call); i++) {
        if (!api_sample_is_failed(&call->samples[i])) return false;
    }
    return true;
}

/* Ours, then the cluster's, then the client's. */
static int severity_of(int http_status) {
    if (http_status == 500) return 3;
    return http_status > 500 ? 2 : 1;
}

/* Of overflows the one that needs the most: with that cap none of them would have been. */
static bool is_worse(const api_finish *finish, const api_finish *than) {
    const int severity = severity_of(finish->http_status);
    const int other = severity_of(than->http_status);
    return severity != other ? severity > other : finish->cap_needed > than->cap_needed;
}

const api_finish *api_samples_worst(const api_call *call) {
    const api_finish *worst = &call->samples[0].finish;
    for (uint32_t i = 1; i < api_samples_of(call); i++) {
        const api_finish *finish = &call->samples[i].finish;
        if (is_worse(finish, worst)) worst = finish;
    }
    return worst;
}
