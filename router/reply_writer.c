/* A reply as a list of pieces, each of which can stop after any portion and go on later: its state
 * is the piece, the position in it and the place in the store. Memory is bounded by a portion (some
 * thousand numbers of a row, or REPLY_PORTION bytes), whatever the reply's size. Pieces are written
 * in the order in which they were added; endpoints make the names and braces between them as
 * literals. Numbers are formatted by base/json_number, byte for byte what clients compare. Rows are
 * written by reply_rows.c and reply_arrays.c. */
#include "router/reply_writer.h"

#include <string.h>

#include "base/assert.h"
#include "router/reply_writer_internal.h"

enum { LITERALS_MAX = 1 << 20 };

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
    writer->is_begun = false;
    writer->position = 0;
    writer->entry = 0;
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
    writer->pieces[writer->piece_count++] = (reply_piece){.kind = kind, .from = start, .to = start};
}

void reply_writer_add_array(reply_writer *writer, reply_piece_kind kind, reply_array array) {
    BT_ASSERT(kind == REPLY_ARRAY_BASE64 || kind == REPLY_ARRAY);
    reply_writer_add(writer, kind);
    writer->pieces[writer->piece_count - 1].array = array;
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

/* ---- pieces ---------------------------------------------------------------------------------- */

/* Each returns true when its piece is complete. */
static bool write_text(reply_writer *writer, bt_text *out) {
    const reply_range *range = &writer->range;
    const api_echo *echo = &writer->request->echo;
    const size_t echoed = writer->is_echoed ? echo->bytes : 0;
    const size_t total = echoed + range->text_to - range->text_from;
    const bool is_of_echo = writer->position < echoed;
    const size_t left = (is_of_echo ? echoed : total) - writer->position;
    const size_t portion = left < REPLY_PORTION ? left : REPLY_PORTION;
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
    size_t portion = left < REPLY_PORTION ? left : REPLY_PORTION;
    if (portion > 0)
        bt_text_add(out, writer->literals.bytes + piece->from + writer->position, portion);
    writer->position += portion;
    return writer->position == total;
}

static bool write_ids(reply_writer *writer, bt_text *out, const int32_t *ids, size_t count) {
    const size_t left = count - writer->position;
    const size_t to = writer->position + (left < REPLY_ENTRIES ? left : REPLY_ENTRIES);
    reply_ids_write(out, ids, writer->position, to, count);
    writer->position = to;
    return to == count;
}

static void add_version(bt_text *out, uint64_t version) {
    if (version <= INT64_MAX) {
        bt_json_add_int(out, (int64_t)version);
    } else {
        bt_text_add_format(out, "%llu", (unsigned long long)version);
    }
}

/* Runs of weights, cut to the rows of the range. */
static bool write_weights(reply_writer *writer, bt_text *out) {
    const weight_runs *weights = writer->range.weights;
    const uint32_t row_to = writer->range.row_to;
    uint32_t row = writer->range.row_from + (uint32_t)writer->position;
    if (!writer->is_begun) bt_text_add(out, "[", 1);
    writer->is_begun = true;
    for (uint32_t run = row < row_to ? weight_runs_find(weights, row) : 0, written = 0;
         row < row_to && written < REPLY_ENTRIES; run++, written++) {
        const weight_run *w = &weights->runs[run];
        const uint32_t end = w->row_to < row_to ? w->row_to : row_to;
        bt_text_add_string(out, row > writer->range.row_from ? ",[" : "[");
        add_version(out, w->version);
        bt_text_add(out, ",", 1);
        bt_json_add_int(out, end - row);
        bt_text_add(out, "]", 1);
        row = end;
    }
    writer->position = row - writer->range.row_from;
    if (row < row_to) return false;
    bt_text_add(out, "]", 1);
    return true;
}

static bt_status write_piece(reply_writer *writer, bt_text *out, size_t bytes_wanted,
                             bool *is_complete_out) {
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
    case REPLY_INPUT_ID_LOGPROBS:
        return reply_prompt_write(writer, out, bytes_wanted, is_complete_out);
    case REPLY_WEIGHTS: *is_complete_out = write_weights(writer, out); return BT_OK;
    case REPLY_ARRAY_BASE64:
    case REPLY_ARRAY: return reply_array_write(writer, out, bytes_wanted, is_complete_out);
    case REPLY_LOGPROBS:
    case REPLY_TOP_LOGPROBS:
    case REPLY_ID_LOGPROBS:
    case REPLY_CHAT_LOGPROBS:
    case REPLY_MASK:
    case REPLY_MASK_LOGPROBS:
    case REPLY_TRUNCATED:
    case REPLY_SUPPORT_SIZES: return reply_rows_write(writer, out, bytes_wanted, is_complete_out);
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
        bt_status status = write_piece(writer, out, bytes_wanted, &is_complete);
        if (status != BT_OK) return status;
        if (out->has_failed) return BT_ERR_WORKER_MEMORY;
        if (!is_complete) continue;
        writer->piece++;
        writer->is_begun = false;
        writer->position = 0;
        writer->entry = 0;
    }
    return BT_OK;
}
