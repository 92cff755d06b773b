/* Shared by reply_writer.c and reply_completion.c. */
#ifndef BT_ROUTER_REPLY_WRITER_INTERNAL_H
#define BT_ROUTER_REPLY_WRITER_INTERNAL_H

#include "proto/row_stream.h"
#include "router/reply_writer.h"

/* The row at writer->place, which moves past it; the arrays point into the store. */
BT_MUST_CHECK bt_status reply_next_row(reply_writer *writer, token_row *row_out);
/* A log-probability; minus infinity is a number too. */
void reply_add_logprob(bt_text *out, float value);
/* An entry of one of a completion's lists. */
BT_MUST_CHECK bt_status reply_completion_write(reply_writer *writer, bt_text *out,
                                               reply_piece_kind kind, bool *is_complete_out);

#endif
