/* Writes what one sample says (a reply, a part of one, an event of a stream) in portions: literal
 * text, lists and arrays over a range of rows, in the order they were added. Nothing is formatted
 * before there is room for it, so a reply of any size costs only its packed rows.
 *
 * The writer borrows what it was started with; generation and store may grow while it writes, what
 * it writes is the range it was started with. */
#ifndef BT_ROUTER_REPLY_WRITER_H
#define BT_ROUTER_REPLY_WRITER_H

#include "base/base64.h"
#include "router/generation.h"
#include "router/prompt_logprobs.h"
#include "router/reply_store.h"
#include "router/weight_runs.h"

enum { REPLY_PIECES_MAX = 64 };

typedef enum reply_piece_kind {
    REPLY_LITERAL,
    REPLY_TEXT,          /* a JSON string; behind the prompt's text when that is echoed */
    REPLY_IDS,           /* [id, ...] */
    REPLY_PROMPT_IDS,    /* [id, ...] of the whole prompt */
    REPLY_LOGPROBS,      /* [[logprob, id, null or text], ...] */
    REPLY_TOP_LOGPROBS,  /* [[[logprob, id, null or text], ...], ...] */
    REPLY_ID_LOGPROBS,   /* the same */
    REPLY_CHAT_LOGPROBS, /* [{"token":...}, ...] */
    REPLY_MASK,          /* [[id, ...], ...] */
    REPLY_MASK_LOGPROBS, /* [x, ...] or [[x, ...], ...] */
    REPLY_TRUNCATED,     /* [true, ...]: rows with fewer entries than their support has */
    REPLY_SUPPORT_SIZES, /* [n, ...]: what the supports truly have */
    REPLY_WEIGHTS,       /* [[version, rows], ...]: runs */
    REPLY_ARRAY_BASE64,  /* a JSON string: an array in base64 */
    REPLY_ARRAY,         /* its bytes */
    /* Of the prompt, whatever the range; the first entry has null for a log-probability, or is
     * null. */
    REPLY_INPUT_LOGPROBS,
    REPLY_INPUT_TOP_LOGPROBS,
    REPLY_INPUT_ID_LOGPROBS,
    /* Of a completion (reply_completion.c): of the prompt's positions too when it is echoed. */
    REPLY_TEXT_OFFSETS,   /* [characters before the token, ...] */
    REPLY_TOKEN_LOGPROBS, /* [x, ...] */
    REPLY_TOKENS,         /* ["text", ...] */
    REPLY_TOKEN_TOPS,     /* [{"text":x, ...}, ...] */
} reply_piece_kind;

/* Little-endian arrays over the rows of the range. */
typedef enum reply_array {
    REPLY_ARRAY_OUTPUT_IDS,     /* int32 [rows] */
    REPLY_ARRAY_LENGTHS,        /* int32 [rows]: entries of each row */
    REPLY_ARRAY_TOKEN_IDS,      /* int32 [entries] */
    REPLY_ARRAY_LOGPROBS,       /* float32 [entries] in support mode, else [rows] */
    REPLY_ARRAY_TRUNCATED,      /* uint8 [rows]: 0 or 1 */
    REPLY_ARRAY_TRUNCATED_WIDE, /* the same, int32 */
    REPLY_ARRAY_SUPPORT_SIZES,  /* int32 [rows] */
} reply_array;

typedef struct reply_piece {
    reply_piece_kind kind;
    reply_array array; /* ARRAY, ARRAY_BASE64 */
    size_t from, to;   /* LITERAL: bytes of literals */
} reply_piece;

/* A part of a reply: rows, and the text that became visible with them. */
typedef struct reply_range {
    uint32_t row_from, row_to;
    size_t text_from, text_to;
    uint64_t entries_from, entries_to; /* of masks, in all rows before row_from, before row_to */
    reply_place place, place_to;       /* of row_from, of row_to, when rows are stored */
    const weight_runs *weights;        /* of all rows, when rows are stored */
} reply_range;

typedef struct reply_writer {
    const tokenizer *tokenizer;
    uint32_t mask_max_tokens;
    const generation *generation; /* of the sample */
    const api_request *request;   /* the generation's */
    reply_store *store;
    prompt_logprobs *prompt;
    bt_text literals;
    reply_piece pieces[REPLY_PIECES_MAX];
    uint32_t piece_count;
    reply_range range;
    bool is_echoed;    /* the prompt comes before the range */
    uint32_t piece;    /* being written */
    bool is_begun;     /* something of it is written */
    size_t position;   /* in it */
    size_t entry;      /* in row `position`: what is written of it; of an array in bytes */
    reply_place place; /* of row `position`, or entry of the prompt */
    bt_base64_stream base64;
} reply_writer;

void reply_writer_init(reply_writer *writer, const tokenizer *t, uint32_t mask_max_tokens);
void reply_writer_fini(reply_writer *writer);
/* Begins another text over `range` of a sample; nothing may be left of the one before. */
void reply_writer_start(reply_writer *writer, const generation *g, reply_store *store,
                        prompt_logprobs *prompt, const reply_range *range);
/* This text has the prompt's before its own, and its tokens in the lists of a completion. */
void reply_writer_echo(reply_writer *writer);
/* Where the caller appends literal text; valid until the next call. */
bt_text *reply_writer_literal(reply_writer *writer);
void reply_writer_add(reply_writer *writer, reply_piece_kind kind);
/* REPLY_ARRAY_BASE64 or REPLY_ARRAY. */
void reply_writer_add_array(reply_writer *writer, reply_piece_kind kind, reply_array array);
bool reply_writer_is_done(const reply_writer *writer);
/* Appends to out until it holds about bytes_wanted or the reply is done. */
BT_MUST_CHECK bt_status reply_writer_produce(reply_writer *writer, bt_text *out,
                                             size_t bytes_wanted);

#endif
