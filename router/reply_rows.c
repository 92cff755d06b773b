/* Lists over rows and over the prompt, as JSON. A record is decoded once for each portion that is
 * written of it. Lists of plain numbers are long: each reserves what it takes at most and prints
 * straight into the text (base/json_number). */
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "base/json_number.h"
#include "router/reply_writer_internal.h"

/* What a log-probability of minus infinity prints as: a number, so that clients can read it. */
static const float LOGPROB_LOWEST = -9999.0f;

/* ---- lists of numbers ------------------------------------------------------------------------ */

/* Ends a part of a list whose numbers are at the end of out; `room` has a byte left for it. */
static void end_part(bt_text *out, char *at, bool is_last) {
    *at++ = is_last ? ']' : ',';
    out->used = (size_t)(at - out->bytes);
    out->bytes[out->used] = 0;
}

void reply_ids_write(bt_text *out, const int32_t *ids, size_t from, size_t to, size_t count) {
    char *at = bt_text_reserve(out, bt_json_ints_room(to - from) + 2);
    if (at == NULL) return;
    if (from == 0) *at++ = '[';
    at += bt_json_ints(at, ids + from, to - from);
    end_part(out, at, to == count);
}

void reply_floats_write(bt_text *out, const float *values, size_t from, size_t to, size_t count) {
    char *at = bt_text_reserve(out, bt_json_floats_room(to - from) + 2);
    if (at == NULL) return;
    if (from == 0) *at++ = '[';
    at += bt_json_floats(at, values + from, to - from);
    end_part(out, at, to == count);
}

/* ---- rows ------------------------------------------------------------------------------------ */

void reply_add_logprob(bt_text *out, float value) {
    bt_json_add_float(out, isinf(value) ? LOGPROB_LOWEST : value);
}

/* A token's bytes as JSON text; what is not UTF-8 becomes U+FFFD. */
static void escape_to(void *context, const char *text, size_t bytes) {
    bt_json_add_escaped(context, text, bytes);
}

static void add_token_text(bt_text *out, const char *bytes, size_t count) {
    detokenizer d;
    detokenizer_init(&d);
    bt_text_add(out, "\"", 1);
    detokenizer_push(&d, bytes, count, escape_to, out);
    detokenizer_finish(&d, escape_to, out);
    bt_text_add(out, "\"", 1);
}

/* [logprob, id, null or text] behind the logprob. */
static void add_token(const reply_writer *writer, bt_text *out, int32_t id) {
    const char *bytes = "";
    size_t count = 0;
    bt_text_add(out, ",", 1);
    bt_json_add_int(out, id);
    bt_text_add(out, ",", 1);
    if (writer->request->wants_logprob_text) {
        (void)tokenizer_token_bytes(writer->tokenizer, id, &bytes, &count);
        add_token_text(out, bytes, count);
    } else {
        bt_text_add_string(out, "null");
    }
    bt_text_add(out, "]", 1);
}

static void add_logprob_entry(const reply_writer *writer, bt_text *out, float logprob, int32_t id) {
    bt_text_add(out, "[", 1);
    reply_add_logprob(out, logprob);
    add_token(writer, out, id);
}

static void add_top_list(const reply_writer *writer, bt_text *out, const row_top *top,
                         uint32_t count) {
    bt_text_add(out, "[", 1);
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0) bt_text_add(out, ",", 1);
        add_logprob_entry(writer, out, top[i].logprob, top[i].id);
    }
    bt_text_add(out, "]", 1);
}

/* In the order in which the ids were asked for, as often as they were. */
static void add_id_list(const reply_writer *writer, bt_text *out, const float *logprobs) {
    const token_list *ids = &writer->request->logprob_ids;
    const token_list *order = &writer->request->logprob_order;
    bt_text_add(out, "[", 1);
    for (uint32_t i = 0; i < order->count; i++) {
        const int32_t place = order->ids[i];
        if (i > 0) bt_text_add(out, ",", 1);
        add_logprob_entry(writer, out, logprobs[place], ids->ids[place]);
    }
    bt_text_add(out, "]", 1);
}

/* {"token":...,"bytes":[...],"logprob":... without the closing brace. */
static void add_chat_token(const reply_writer *writer, bt_text *out, int32_t id, float logprob) {
    const char *bytes = "";
    size_t count = 0;
    (void)tokenizer_token_bytes(writer->tokenizer, id, &bytes, &count);
    bt_text_add_string(out, "{\"token\":");
    add_token_text(out, bytes, count);
    bt_text_add_string(out, ",\"bytes\":[");
    for (size_t i = 0; i < count; i++) {
        if (i > 0) bt_text_add(out, ",", 1);
        bt_json_add_int(out, (unsigned char)bytes[i]);
    }
    bt_text_add_string(out, "],\"logprob\":");
    reply_add_logprob(out, logprob);
}

static void add_chat_logprob_row(const reply_writer *writer, bt_text *out, const token_row *row) {
    add_chat_token(writer, out, row->token, row->token_logprob);
    bt_text_add_string(out, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < row->top_count; i++) {
        if (i > 0) bt_text_add(out, ",", 1);
        add_chat_token(writer, out, row->top[i].id, row->top[i].logprob);
        bt_text_add(out, "}", 1);
    }
    bt_text_add_string(out, "]}");
}

/* What comes next of the row's entries; true: it was the last. */
static bool add_mask_ids(reply_writer *writer, bt_text *out, const token_row *row) {
    const size_t left = row->support_count - writer->entry;
    const size_t to = writer->entry + (left < REPLY_ENTRIES ? left : REPLY_ENTRIES);
    reply_ids_write(out, row->support_ids, writer->entry, to, row->support_count);
    writer->entry = to;
    return to == row->support_count;
}

static bool add_mask_logprobs(reply_writer *writer, bt_text *out, const token_row *row) {
    if (row->support_logprobs == NULL) {
        bt_json_add_float(out, row->selected_logprob);
        return true;
    }
    const size_t left = row->support_count - writer->entry;
    const size_t to = writer->entry + (left < REPLY_ENTRIES ? left : REPLY_ENTRIES);
    reply_floats_write(out, row->support_logprobs, writer->entry, to, row->support_count);
    writer->entry = to;
    return to == row->support_count;
}

/* The next part of a row; true: it is complete. */
static bool add_row(reply_writer *writer, bt_text *out, reply_piece_kind kind,
                    const token_row *row) {
    switch (kind) {
    case REPLY_LOGPROBS: add_logprob_entry(writer, out, row->token_logprob, row->token); break;
    case REPLY_TOP_LOGPROBS: add_top_list(writer, out, row->top, row->top_count); break;
    case REPLY_ID_LOGPROBS: add_id_list(writer, out, row->id_logprobs); break;
    case REPLY_CHAT_LOGPROBS: add_chat_logprob_row(writer, out, row); break;
    case REPLY_MASK: return add_mask_ids(writer, out, row);
    case REPLY_MASK_LOGPROBS: return add_mask_logprobs(writer, out, row);
    case REPLY_TRUNCATED: bt_json_add_bool(out, row->support_size > row->support_count); break;
    case REPLY_SUPPORT_SIZES: bt_json_add_int(out, row->support_size); break;
    case REPLY_LITERAL:
    case REPLY_TEXT:
    case REPLY_IDS:
    case REPLY_PROMPT_IDS:
    case REPLY_WEIGHTS:
    case REPLY_ARRAY_BASE64:
    case REPLY_ARRAY:
    case REPLY_INPUT_LOGPROBS:
    case REPLY_INPUT_TOP_LOGPROBS:
    case REPLY_INPUT_ID_LOGPROBS:
    case REPLY_TEXT_OFFSETS:
    case REPLY_TOKEN_LOGPROBS:
    case REPLY_TOKENS:
    case REPLY_TOKEN_TOPS: BT_ASSERT(false);
    }
    return true;
}

bt_status reply_writer_row(reply_writer *writer, token_row *row, reply_place *next_out) {
    const uint8_t *record;
    size_t bytes, used;
    *next_out = writer->place;
    bt_status status = reply_store_next(writer->store, next_out, &record, &bytes);
    if (status != BT_OK) return status;
    status = row_record_decode(record, bytes, writer->mask_max_tokens, row, &used);
    if (status != BT_OK) return BT_ERR_WORKER_INTERNAL; /* the file has changed */
    BT_ASSERT(used == bytes);
    return BT_OK;
}

bt_status reply_rows_write(reply_writer *writer, bt_text *out, size_t bytes_wanted,
                           bool *is_complete_out) {
    const reply_piece_kind kind = writer->pieces[writer->piece].kind;
    const size_t count = reply_rows_of(writer);
    if (!writer->is_begun) {
        writer->is_begun = true;
        bt_text_add(out, "[", 1);
        writer->place = writer->range.place;
    }
    while (writer->position < count && out->used < bytes_wanted && !out->has_failed) {
        token_row row;
        reply_place next;
        if (writer->position > 0 && writer->entry == 0) bt_text_add(out, ",", 1);
        const bt_status status = reply_writer_row(writer, &row, &next);
        if (status != BT_OK) return status;
        if (add_row(writer, out, kind, &row)) reply_writer_next_row(writer, &next);
    }
    *is_complete_out = writer->position == count;
    if (*is_complete_out) bt_text_add(out, "]", 1);
    return BT_OK;
}

/* ---- the prompt ------------------------------------------------------------------------------ */

/* Entry `position` of the prompt; the one at logprob_start_len has no log-probabilities. */
static bt_status add_prompt_entry(reply_writer *writer, bt_text *out, reply_piece_kind kind) {
    prompt_logprobs *p = writer->prompt;
    const int32_t id = writer->request->prompt.ids[p->from + writer->position];
    prompt_entry entry;
    if (writer->position == 0) {
        bt_text_add_string(out, kind == REPLY_INPUT_LOGPROBS ? "[null" : "null");
        if (kind == REPLY_INPUT_LOGPROBS) add_token(writer, out, id);
        return BT_OK;
    }
    bt_status status = prompt_logprobs_next(p, &writer->place, &entry);
    if (status != BT_OK) return status;
    if (kind == REPLY_INPUT_LOGPROBS) {
        add_logprob_entry(writer, out, entry.logprob, id);
    } else if (kind == REPLY_INPUT_TOP_LOGPROBS) {
        add_top_list(writer, out, entry.top, p->top_count);
    } else {
        add_id_list(writer, out, entry.id_logprobs);
    }
    return BT_OK;
}

bt_status reply_prompt_write(reply_writer *writer, bt_text *out, size_t bytes_wanted,
                             bool *is_complete_out) {
    const reply_piece_kind kind = writer->pieces[writer->piece].kind;
    const size_t count = (size_t)writer->prompt->count + 1;
    if (writer->position == 0) writer->place = reply_store_begin(&writer->prompt->store);
    while (writer->position < count && out->used < bytes_wanted && !out->has_failed) {
        bt_text_add(out, writer->position == 0 ? "[" : ",", 1);
        const bt_status status = add_prompt_entry(writer, out, kind);
        if (status != BT_OK) return status;
        writer->position++;
    }
    *is_complete_out = writer->position == count;
    if (*is_complete_out) bt_text_add(out, "]", 1);
    return BT_OK;
}
