/* The visible side of one reply: token ids go in, ids and text come out. Special tokens are skipped
 * when asked, stop strings are found (also across tokens) and cut, the text that could still become
 * one is held back. The same code serves streams and whole replies, so both say the same.
 *
 * One owner. Borrows the request and the tokenizer. */
#ifndef BT_ROUTER_GENERATION_H
#define BT_ROUTER_GENERATION_H

#include "base/json_writer.h"
#include "router/api_request.h"

typedef struct generation {
    const api_request *request;
    const tokenizer *tokenizer;
    detokenizer detokenizer;
    stop_matcher matcher;
    bt_text text;
    int32_t *ids; /* [count] */
    uint32_t count, capacity;
    uint32_t *text_starts; /* [count] characters decoded before each token; of completions with
                            * log-probabilities, else NULL */
    uint32_t decoded_characters, text_characters; /* with text_starts */
    bool is_stopped;  /* a stop string matched; later tokens are dropped */
    bool is_finished; /* the tail of the text is out */
    bool is_complete; /* the last token ends the reply; the end is on its way */
    uint32_t stop_index;
} generation;

void generation_init(generation *g, const api_request *request, const tokenizer *t);
void generation_fini(generation *g);
/* The next token; must not be called once is_stopped or is_finished. WORKER_MEMORY. */
BT_MUST_CHECK bt_status generation_push(generation *g, int32_t token);
/* No more tokens: gives out what was held back. */
BT_MUST_CHECK bt_status generation_finish(generation *g);
/* Characters of the text before a token, with text_starts. */
uint32_t generation_text_start(const generation *g, uint32_t index);
/* The end of the text could still become a stop string. */
bool generation_is_holding(const generation *g);

#endif
