/* The lists of log-probabilities of a completion: of an echoed prompt's positions first, then of
 * the rows. Their form is OpenAI's: a token that is not UTF-8 by itself is named by its bytes, so
 * that no two tokens of a list of the largest have one name; such a list has the token of its
 * position too, whether it is among the largest or not. */
#include <string.h>

#include "base/assert.h"
#include "base/utf8.h"
#include "router/reply_writer_internal.h"

typedef struct token_text {
    const char *bytes;
    size_t count;
} token_text;

static token_text text_of(const reply_writer *writer, int32_t id) {
    token_text text = {.bytes = ""};
    (void)tokenizer_token_bytes(writer->tokenizer, id, &text.bytes, &text.count);
    return text;
}

/* "bytes:\xe2\x82" as it stands in JSON. */
static void add_bytes(bt_text *out, token_text text) {
    bt_text_add_string(out, "\"bytes:");
    for (size_t i = 0; i < text.count; i++) {
        const unsigned char byte = (unsigned char)text.bytes[i];
        if (byte >= 0x20 && byte < 0x7f && byte != '\\' && byte != '"') {
            bt_text_add(out, &text.bytes[i], 1);
        } else {
            bt_text_add_format(out, "\\\\x%02x", byte);
        }
    }
    bt_text_add(out, "\"", 1);
}

static void add_name(bt_text *out, token_text text) {
    if (bt_utf8_is_valid(text.bytes, text.count)) {
        bt_json_add_string(out, text.bytes, text.count);
    } else {
        add_bytes(out, text);
    }
}

/* ---- one entry ------------------------------------------------------------------------------- */

/* A token of the prompt or of the reply, with what is known of its position. */
typedef struct entry {
    int32_t id;
    uint32_t offset;
    bool has_logprobs; /* nothing is asked before the first token of a prompt */
    float logprob;
    const row_top *top; /* [top_count] */
    uint32_t top_count;
} entry;

static bool is_named_before(const reply_writer *writer, const entry *e, uint32_t count,
                            token_text text) {
    for (uint32_t i = 0; i < count; i++) {
        const token_text before = text_of(writer, e->top[i].id);
        if (before.count == text.count && memcmp(before.bytes, text.bytes, text.count) == 0)
            return true;
    }
    return false;
}

static void add_tops(const reply_writer *writer, bt_text *out, const entry *e) {
    bool is_first = true;
    if (!e->has_logprobs) {
        bt_text_add_string(out, "null");
        return;
    }
    bt_text_add(out, "{", 1);
    for (uint32_t i = 0; i <= e->top_count; i++) {
        const bool is_own = i == e->top_count;
        const token_text text = text_of(writer, is_own ? e->id : e->top[i].id);
        if (is_named_before(writer, e, i, text)) continue;
        if (!is_first) bt_text_add(out, ",", 1);
        is_first = false;
        add_name(out, text);
        bt_text_add(out, ":", 1);
        reply_add_logprob(out, is_own ? e->logprob : e->top[i].logprob);
    }
    bt_text_add(out, "}", 1);
}

static void add_entry(const reply_writer *writer, bt_text *out, reply_piece_kind kind,
                      const entry *e) {
    if (kind == REPLY_TEXT_OFFSETS) {
        bt_json_add_int(out, e->offset);
    } else if (kind == REPLY_TOKENS) {
        add_name(out, text_of(writer, e->id));
    } else if (kind == REPLY_TOKEN_TOPS) {
        add_tops(writer, out, e);
    } else if (e->has_logprobs) {
        reply_add_logprob(out, e->logprob);
    } else {
        bt_text_add_string(out, "null");
    }
}

/* ---- the lists ------------------------------------------------------------------------------- */

static bool needs_store(reply_piece_kind kind) {
    return kind == REPLY_TOKEN_LOGPROBS || kind == REPLY_TOKEN_TOPS;
}

static bt_status find_prompt_entry(reply_writer *writer, reply_piece_kind kind, uint32_t position,
                                   entry *out) {
    prompt_logprobs *p = writer->prompt;
    prompt_entry stored;
    out->id = writer->request->prompt.ids[position];
    out->offset = writer->request->echo.starts[position];
    if (!needs_store(kind) || position == 0) return BT_OK;
    if (position == 1) writer->place = reply_store_begin(&p->store);
    bt_status status = prompt_logprobs_next(p, &writer->place, &stored);
    if (status != BT_OK) return status;
    out->has_logprobs = true;
    out->logprob = stored.logprob;
    out->top = stored.top;
    out->top_count = p->top_count;
    return BT_OK;
}

static bt_status find_row_entry(reply_writer *writer, reply_piece_kind kind, uint32_t index,
                                entry *out) {
    const generation *g = writer->generation;
    const uint32_t position = writer->range.row_from + index;
    token_row row;
    out->id = g->ids[position];
    out->offset = writer->request->echo.characters + generation_text_start(g, position);
    if (!needs_store(kind)) return BT_OK;
    if (index == 0) writer->place = writer->range.place;
    bt_status status = reply_next_row(writer, &row);
    if (status != BT_OK) return status;
    out->has_logprobs = true;
    out->logprob = row.token_logprob;
    out->top = row.top;
    out->top_count = row.top_count;
    return BT_OK;
}

bt_status reply_completion_write(reply_writer *writer, bt_text *out, reply_piece_kind kind,
                                 bool *is_complete_out) {
    const size_t of_prompt = writer->is_echoed ? writer->request->prompt.count : 0;
    const size_t count = of_prompt + writer->range.row_to - writer->range.row_from;
    const size_t at = writer->position;
    entry e = {0};
    bt_status status = BT_OK;
    bt_text_add(out, at == 0 ? "[" : ",", 1);
    if (at < of_prompt) {
        status = find_prompt_entry(writer, kind, (uint32_t)at, &e);
    } else if (at < count) {
        status = find_row_entry(writer, kind, (uint32_t)(at - of_prompt), &e);
    }
    if (status != BT_OK) return status;
    if (at < count) add_entry(writer, out, kind, &e);
    writer->position++;
    *is_complete_out = writer->position >= count;
    if (*is_complete_out) bt_text_add(out, "]", 1);
    return BT_OK;
}
