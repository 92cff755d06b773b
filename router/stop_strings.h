/* Stop strings in a stream of text. A *stop set* holds the compiled strings of one request; it is
 * immutable. A *stop matcher* is the small state of one sequence, in the caller's storage; it
 * borrows the set.
 *
 * The match that ends first wins; of those that end together, the one that started first. So the
 * answer does not depend on how the text was cut into pieces. What could still become a match is
 * held back: exactly the longest suffix that begins some stop string. An empty string never
 * matches. */
#ifndef BT_ROUTER_STOP_STRINGS_H
#define BT_ROUTER_STOP_STRINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "router/tokenizer.h"

enum { STOP_STRINGS_MAX = 256, STOP_BYTES_MAX = 1 << 16 /* of all strings together */ };

typedef struct stop_string {
    const char *text;
    size_t bytes;
} stop_string;

typedef struct stop_set stop_set;

/* Copies the strings; returns owned. REQUEST_TOO_LARGE beyond a limit above. A set of no strings,
 * or of empty ones, is fine and never matches. */
BT_MUST_CHECK bt_status stop_set_create(const stop_string *strings, size_t count, stop_set **out);
void stop_set_destroy(stop_set *set);
/* Memory that it holds. */
size_t stop_set_bytes(const stop_set *set);

typedef struct stop_matcher {
    const stop_set *set;
    uint32_t node;        /* what is held back */
    uint32_t match_index; /* of the string that matched, in the order given */
    bool is_matched;
    bool keeps_match; /* no_stop_trim: the match itself is emitted */
} stop_matcher;

/* `set` may be NULL: nothing matches and nothing is held. */
void stop_matcher_init(stop_matcher *matcher, const stop_set *set, bool keeps_match);
/* Takes text (complete UTF-8, as the detokeniser gives it) and emits what is safe. After a match
 * everything is dropped. Returns is_matched. */
bool stop_matcher_push(stop_matcher *matcher, const char *text, size_t bytes, text_sink sink,
                       void *context);
/* The end of the text: emits what was held, unless there was a match. */
void stop_matcher_finish(stop_matcher *matcher, text_sink sink, void *context);
size_t stop_matcher_held_bytes(const stop_matcher *matcher);

#endif
