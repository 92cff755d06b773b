/* A reply as a list of pieces, each of which can stop after any portion and go on later: its state
 * is the piece, the position in it and the place in the store. Memory is bounded by a portion (one
 * row, or TEXT_PORTION bytes), whatever the reply's size. Pieces are written in the order in which
 * they were added; endpoints make the names and braces between them as literals. Numbers are
 * formatted by base/json_number, byte for byte what clients compare. */
#include "router/reply_writer.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "router/reply_writer_internal.h"

enum { TEXT_PORTION = 16 * 1024, LITERALS_MAX = 1 << 20 };

/* What a log-probability of minus infinity prints as: a number, so that clients can read it. */
static const float LOGPROB_LOWEST = -9999.0f;

void reply_writer_init(reply_writer *writer, const tokenizer *t, uint32_t mask_max_tokens) {
    memset(writer, 0, sizeof(*writer));
    writer->tokenizer = t;
    writer->mask_max_tokens = mask_max_tokens;
    bt_text_init(&writer->literals, LITERALS_MAX);
}

void reply_writer_fini(reply_writer *writer) {
    bt_text_fini(&writer->literals);
}

void reply_writer_start(reply_writer *writer, const generation *g, reply_store *store,
                        prompt_logprobs *prompt, const reply_range *range) {
    BT_ASSERT(reply_writer_is_done(writer));
    bt_text_clear(&writer->literals);
    writer->generation = g;
    writer->request = g->request;
    writer->store = store;
    writer->prompt = prompt;
    writer->range = *range;
    writer->piece_count = 0;
    writer->is_echoed = false;
    writer->piece = 0;
    writer->position = 0;
}

void reply_writer_echo(reply_writer *writer) {
    writer->is_echoed = true;
}

/* Ends the literal piece that is open. */
static void close_literal(reply_writer *writer) {
    if (writer->piece_count == 0) return;
    reply_piece *last = &writer->pieces[writer->piece_count - 1];
    if (last->kind == REPLY_LITERAL) last->to = writer->literals.used;
}

void reply_writer_add(reply_writer *writer, reply_piece_kind kind) {
    close_literal(writer);
    BT_ASSERT(writer->piece_count < REPLY_PIECES_MAX);
    size_t start = writer->literals.used;
    writer->pieces[writer->piece_count++] = (reply_piece){kind, start, start};
}

bt_text *reply_writer_literal(reply_writer *writer) {
    bool is_open =
        writer->piece_count > 0 && writer->pieces[writer->piece_count - 1].kind == REPLY_LITERAL;
    if (!is_open) reply_writer_add(writer, REPLY_LITERAL);
    return &writer->literals;
}

bool reply_writer_is_done(const reply_writer *writer) {
    return writer->piece == writer->piece_count;
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

static void add_mask_row(bt_text *out, const token_row *row) {
    bt_text_add(out, "[", 1);
    for (uint32_t i = 0; i < row->support_count; i++) {
        if (i > 0) bt_text_add(out, ",", 1);
        bt_json_add_int(out, row->support_ids[i]);
    }
    bt_text_add(out, "]", 1);
}

static void add_mask_logprob_row(bt_text *out, const token_row *row) {
    if (row->support_logprobs == NULL) {
        bt_json_add_float(out, row->selected_logprob);
        return;
    }
    bt_text_add(out, "[", 1);
    for (uint32_t i = 0; i < row->support_count; i++) {
        if (i > 0) bt_text_add(out, ",", 1);
        bt_json_add_float(out, row->support_logprobs[i]);
    }
    bt_text_add(out, "]", 1);
}

bt_status reply_next_row(reply_writer *writer, token_row *row_out) {
    const uint8_t *record;
    size_t bytes, used;
    bt_status status = reply_store_next(writer->store, &writer->place, &record, &bytes);
    if (status != BT_OK) return status;
    status = row_record_decode(record, bytes, writer->mask_max_tokens, row_out, &used);
    return status != BT_OK || used != bytes ? BT_ERR_WORKER_INTERNAL : BT_OK;
}

static bt_status add_stored_row(reply_writer *writer, bt_text *out, reply_piece_kind kind) {
    token_row row;
    bt_status status = reply_next_row(writer, &row);
    if (status != BT_OK) return status;
    switch (kind) {
    case REPLY_LOGPROBS: add_logprob_entry(writer, out, row.token_logprob, row.token); break;
    case REPLY_TOP_LOGPROBS: add_top_list(writer, out, row.top, row.top_count); break;
    case REPLY_ID_LOGPROBS: add_id_list(writer, out, row.id_logprobs); break;
    case REPLY_CHAT_LOGPROBS: add_chat_logprob_row(writer, out, &row); break;
    case REPLY_MASK: add_mask_row(out, &row); break;
    case REPLY_MASK_LOGPROBS: add_mask_logprob_row(out, &row); break;
    case REPLY_LITERAL:
    case REPLY_TEXT:
    case REPLY_IDS:
    case REPLY_PROMPT_IDS:
    case REPLY_INPUT_LOGPROBS:
    case REPLY_INPUT_TOP_LOGPROBS:
    case REPLY_INPUT_ID_LOGPROBS:
    case REPLY_TEXT_OFFSETS:
    case REPLY_TOKEN_LOGPROBS:
    case REPLY_TOKENS:
    case REPLY_TOKEN_TOPS: BT_ASSERT(false);
    }
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

static bt_status write_prompt(reply_writer *writer, bt_text *out, reply_piece_kind kind,
                              bool *is_complete_out) {
    if (writer->position == 0) writer->place = reply_store_begin(&writer->prompt->store);
    bt_text_add(out, writer->position == 0 ? "[" : ",", 1);
    bt_status status = add_prompt_entry(writer, out, kind);
    if (status != BT_OK) return status;
    writer->position++;
    *is_complete_out = writer->position > writer->prompt->count;
    if (*is_complete_out) bt_text_add(out, "]", 1);
    return BT_OK;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

/* Each returns true when its piece is complete. */
static bool write_text(reply_writer *writer, bt_text *out) {
    const reply_range *range = &writer->range;
    const api_echo *echo = &writer->request->echo;
    const size_t echoed = writer->is_echoed ? echo->bytes : 0;
    const size_t total = echoed + range->text_to - range->text_from;
    const bool is_of_echo = writer->position < echoed;
    const size_t left = (is_of_echo ? echoed : total) - writer->position;
    const size_t portion = left < TEXT_PORTION ? left : TEXT_PORTION;
    const char *text = is_of_echo ? echo->text : writer->generation->text.bytes;
    const size_t at = is_of_echo ? writer->position : range->text_from + writer->position - echoed;
    if (writer->position == 0) bt_text_add(out, "\"", 1);
    if (portion > 0) bt_json_add_escaped(out, text + at, portion);
    writer->position += portion;
    if (writer->position < total) return false;
    bt_text_add(out, "\"", 1);
    return true;
}

static bool write_literal(reply_writer *writer, bt_text *out, const reply_piece *piece) {
    size_t total = piece->to - piece->from;
    size_t left = total - writer->position;
    size_t portion = left < TEXT_PORTION ? left : TEXT_PORTION;
    if (portion > 0)
        bt_text_add(out, writer->literals.bytes + piece->from + writer->position, portion);
    writer->position += portion;
    return writer->position == total;
}

static bool write_ids(reply_writer *writer, bt_text *out, const int32_t *ids, size_t count) {
    size_t end = writer->position + TEXT_PORTION / 8;
    if (end > count) end = count;
    if (writer->position == 0) bt_text_add(out, "[", 1);
    for (size_t i = writer->position; i < end; i++) {
        if (i > 0) bt_text_add(out, ",", 1);
        bt_json_add_int(out, ids[i]);
    }
    writer->position = end;
    if (end < count) return false;
    bt_text_add(out, "]", 1);
    return true;
}

static bt_status write_rows(reply_writer *writer, bt_text *out, reply_piece_kind kind,
                            bool *is_complete_out) {
    size_t count = writer->range.row_to - writer->range.row_from;
    if (writer->position == 0) {
        bt_text_add(out, "[", 1);
        writer->place = writer->range.place;
    }
    if (writer->position < count) {
        if (writer->position > 0) bt_text_add(out, ",", 1);
        bt_status status = add_stored_row(writer, out, kind);
        if (status != BT_OK) return status;
        writer->position++;
    }
    *is_complete_out = writer->position == count;
    if (*is_complete_out) bt_text_add(out, "]", 1);
    return BT_OK;
}

static bt_status write_piece(reply_writer *writer, bt_text *out, bool *is_complete_out) {
    const generation *g = writer->generation;
    const reply_piece *piece = &writer->pieces[writer->piece];
    const reply_range *range = &writer->range;
    switch (piece->kind) {
    case REPLY_LITERAL: *is_complete_out = write_literal(writer, out, piece); return BT_OK;
    case REPLY_TEXT: *is_complete_out = write_text(writer, out); return BT_OK;
    case REPLY_IDS:
        *is_complete_out = write_ids(writer, out, g->ids != NULL ? g->ids + range->row_from : NULL,
                                     range->row_to - range->row_from);
        return BT_OK;
    case REPLY_PROMPT_IDS:
        *is_complete_out =
            write_ids(writer, out, writer->request->prompt.ids, writer->request->prompt.count);
        return BT_OK;
    case REPLY_INPUT_LOGPROBS:
    case REPLY_INPUT_TOP_LOGPROBS:
    case REPLY_INPUT_ID_LOGPROBS: return write_prompt(writer, out, piece->kind, is_complete_out);
    case REPLY_LOGPROBS:
    case REPLY_TOP_LOGPROBS:
    case REPLY_ID_LOGPROBS:
    case REPLY_CHAT_LOGPROBS:
    case REPLY_MASK:
    case REPLY_MASK_LOGPROBS: return write_rows(writer, out, piece->kind, is_complete_out);
    case REPLY_TEXT_OFFSETS:
    case REPLY_TOKEN_LOGPROBS:
    case REPLY_TOKENS:
    case REPLY_TOKEN_TOPS: return reply_completion_write(writer, out, piece->kind, is_complete_out);
    }
    return BT_ERR_WORKER_INTERNAL;
}

bt_status reply_writer_produce(reply_writer *writer, bt_text *out, size_t bytes_wanted) {
    close_literal(writer);
    if (writer->literals.has_failed) return BT_ERR_WORKER_MEMORY;
    while (!reply_writer_is_done(writer) && out->used < bytes_wanted) {
        bool is_complete = false;
        bt_status status = write_piece(writer, out, &is_complete);
        if (status != BT_OK) return status;
        if (out->has_failed) return BT_ERR_WORKER_MEMORY;
        if (!is_complete) continue;
        writer->piece++;
        writer->position = 0;
    }
    return BT_OK;
}
