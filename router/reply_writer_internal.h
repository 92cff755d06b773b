/* Shared by reply_writer.c (pieces), reply_rows.c and reply_completion.c (lists in JSON) and
 * reply_arrays.c. */
#ifndef BT_ROUTER_REPLY_WRITER_INTERNAL_H
#define BT_ROUTER_REPLY_WRITER_INTERNAL_H

#include "proto/row_stream.h"
#include "router/reply_writer.h"

enum {
    REPLY_PORTION = 16 * 1024, /* bytes of text written at once */
    REPLY_ENTRIES = 1024,      /* numbers of a row written at once */
};

static inline size_t reply_rows_of(const reply_writer *writer) {
    return writer->range.row_to - writer->range.row_from;
}

/* The row at writer->place; *next_out is the place behind it. The row's arrays point into the store
 * and are valid until its next call. */
BT_MUST_CHECK bt_status reply_writer_row(reply_writer *writer, token_row *row,
                                         reply_place *next_out);
/* The same; writer->place moves past it. */
BT_MUST_CHECK static inline bt_status reply_next_row(reply_writer *writer, token_row *row_out) {
    return reply_writer_row(writer, row_out, &writer->place);
}
/* Row `position` is written. */
static inline void reply_writer_next_row(reply_writer *writer, const reply_place *next) {
    writer->place = *next;
    writer->position++;
    writer->entry = 0;
}

/* Each appends to out until it holds about bytes_wanted or the piece is complete. */
BT_MUST_CHECK bt_status reply_rows_write(reply_writer *writer, bt_text *out, size_t bytes_wanted,
                                         bool *is_complete_out);
BT_MUST_CHECK bt_status reply_prompt_write(reply_writer *writer, bt_text *out, size_t bytes_wanted,
                                           bool *is_complete_out);
BT_MUST_CHECK bt_status reply_array_write(reply_writer *writer, bt_text *out, size_t bytes_wanted,
                                          bool *is_complete_out);

/* An entry of one of a completion's lists. */
BT_MUST_CHECK bt_status reply_completion_write(reply_writer *writer, bt_text *out,
                                               reply_piece_kind kind, bool *is_complete_out);

/* A log-probability; minus infinity is a number too. */
void reply_add_logprob(bt_text *out, float value);
/* [1,2,...]: numbers `from` .. `to` of a list of `count`. A list is written in parts, each of which
 * ends with a comma but the last. */
void reply_ids_write(bt_text *out, const int32_t *ids, size_t from, size_t to, size_t count);
void reply_floats_write(bt_text *out, const float *values, size_t from, size_t to, size_t count);

#endif
