/* Log-probabilities of a prompt on their way into the reply: one packed record per position, held
 * in a reply store. Asked for from position `from` on, which has none itself; so there are entries
 * for from + 1 .. prompt_tokens - 1. They come in order and, when the request is tried again, once
 * more from the first one; then what came before is dropped.
 *
 * One owner at a time. */
#ifndef BT_ROUTER_PROMPT_LOGPROBS_H
#define BT_ROUTER_PROMPT_LOGPROBS_H

#include "router/api_request.h"
#include "router/dispatch.h"
#include "router/reply_store.h"

typedef struct prompt_logprobs {
    reply_store store;
    bool is_wanted;
    uint32_t from;
    uint32_t count, expected; /* entries held, and of all */
    uint32_t top_count, id_count;
} prompt_logprobs;

/* One entry; the arrays point into the store and are valid until its next call. */
typedef struct prompt_entry {
    float logprob;
    const row_top *top;       /* [top_count], best first */
    const float *id_logprobs; /* [id_count] */
} prompt_entry;

void prompt_logprobs_init(prompt_logprobs *p, const api_request *request, reply_spill *spill);
void prompt_logprobs_fini(prompt_logprobs *p);
/* PEER_PROTOCOL for entries that are not the next ones, WORKER_INTERNAL for a log-probability that
 * is no number; and what reply_store_append fails with. */
BT_MUST_CHECK bt_status prompt_logprobs_take(prompt_logprobs *p,
                                             const dispatch_prompt_logprobs *given);
/* All of them are there, or none were asked for. */
bool prompt_logprobs_is_complete(const prompt_logprobs *p);
/* The entry behind *place, which moves past it. There must be one. */
BT_MUST_CHECK bt_status prompt_logprobs_next(prompt_logprobs *p, reply_place *place,
                                             prompt_entry *out);

#endif
