/* Token ids to visible text: detokenizer, then stop strings, then the text. The text only grows,
 * and only by what no later token can take back. The length is checked before stop ids and stop
 * strings: of the last token allowed all text is shown, whatever it completes. A skipped
 * special token, and a stop id unless it is to be kept, count among the ids and leave no text.
 * Finish reasons and the rows' probabilities are not kept here. */
#include "router/generation.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "base/utf8.h"

void generation_init(generation *g, const api_request *request, const tokenizer *t) {
    memset(g, 0, sizeof(*g));
    g->request = request;
    g->tokenizer = t;
    detokenizer_init(&g->detokenizer);
    stop_matcher_init(&g->matcher, request->stops, request->keeps_stop);
    bt_text_init(&g->text, API_TEXT_MAX);
}

void generation_fini(generation *g) {
    bt_text_fini(&g->text);
    bt_free(g->ids);
    bt_free(g->text_starts);
    g->ids = NULL;
    g->text_starts = NULL;
}

static bool has_text_starts(const generation *g) {
    return g->request->kind == API_COMPLETION && g->request->wants_logprob;
}

static void on_visible(void *context, const char *text, size_t bytes) {
    generation *g = context;
    bt_text_add(&g->text, text, bytes);
    if (has_text_starts(g)) g->text_characters += (uint32_t)bt_utf8_count(text, bytes);
}

/* The last token that was allowed: the length is the reason, whatever its text completes. */
static bool is_at_limit(const generation *g) {
    return g->count >= g->request->generation.max_new_tokens;
}

static void on_text(void *context, const char *text, size_t bytes) {
    generation *g = context;
    if (has_text_starts(g)) g->decoded_characters += (uint32_t)bt_utf8_count(text, bytes);
    if (is_at_limit(g)) {
        stop_matcher_finish(&g->matcher, on_visible, g);
        on_visible(g, text, bytes);
        return;
    }
    if (!stop_matcher_push(&g->matcher, text, bytes, on_visible, g) || g->is_stopped) return;
    g->is_stopped = true;
    g->stop_index = g->matcher.match_index;
}

static bt_status grow(generation *g) {
    uint32_t grown = g->capacity > 0 ? g->capacity * 2 : 32;
    if (has_text_starts(g)) {
        uint32_t *starts = bt_realloc(g->text_starts, (size_t)grown * sizeof(*starts));
        if (starts == NULL) return BT_ERR_WORKER_MEMORY;
        g->text_starts = starts;
    }
    int32_t *ids = bt_realloc(g->ids, (size_t)grown * sizeof(*ids));
    if (ids == NULL) return BT_ERR_WORKER_MEMORY;
    g->ids = ids;
    g->capacity = grown;
    return BT_OK;
}

static bt_status add_id(generation *g, int32_t token) {
    bt_status status = g->count == g->capacity ? grow(g) : BT_OK;
    if (status != BT_OK) return status;
    if (g->text_starts != NULL) g->text_starts[g->count] = g->decoded_characters;
    g->ids[g->count++] = token;
    return BT_OK;
}

/* The last token of a reply that ends by a stop id. */
static bool is_stop_token(const generation *g, int32_t token) {
    const proto_generation *p = &g->request->generation;
    if (is_at_limit(g)) return false;
    for (uint32_t i = 0; i < p->stop_id_count; i++) {
        if (p->stop_ids[i] == token) return true;
    }
    return false;
}

/* A special token that is not shown can still be named by a stop string. What was held back as the
 * beginning of another one is text then. */
static bt_status match_skipped(generation *g, const char *bytes, size_t count) {
    if (is_at_limit(g)) return BT_OK;
    for (uint32_t i = 0; i < g->request->stop_count; i++) {
        if (g->request->stop_bytes[i] != count || count == 0 ||
            memcmp(g->request->stop_texts[i], bytes, count) != 0)
            continue;
        g->is_stopped = true;
        g->stop_index = i;
        return generation_finish(g);
    }
    return BT_OK;
}

bt_status generation_push(generation *g, int32_t token) {
    const char *bytes = "";
    size_t count = 0;
    BT_ASSERT(!g->is_stopped && !g->is_finished);
    bt_status status = add_id(g, token);
    if (status != BT_OK) return status;
    (void)tokenizer_token_bytes(g->tokenizer, token, &bytes, &count);
    bool is_stop = is_stop_token(g, token);
    g->is_complete = is_stop || is_at_limit(g);
    if (is_stop && !g->request->keeps_stop) return BT_OK;
    if (g->request->skips_special && tokenizer_is_special(g->tokenizer, token))
        return match_skipped(g, bytes, count);
    if (g->text_starts != NULL)
        g->text_starts[g->count - 1] += detokenizer_breaks(&g->detokenizer, bytes, count);
    detokenizer_push(&g->detokenizer, bytes, count, on_text, g);
    return g->text.has_failed ? BT_ERR_WORKER_MEMORY : BT_OK;
}

bt_status generation_finish(generation *g) {
    if (g->is_finished) return BT_OK;
    g->is_finished = true;
    detokenizer_finish(&g->detokenizer, on_text, g);
    stop_matcher_finish(&g->matcher, on_visible, g);
    return g->text.has_failed ? BT_ERR_WORKER_MEMORY : BT_OK;
}

/* Of text that a stop string cut off later nothing is left to begin in. */
uint32_t generation_text_start(const generation *g, uint32_t index) {
    const uint32_t start = g->text_starts[index];
    return start < g->text_characters ? start : g->text_characters;
}

bool generation_is_holding(const generation *g) {
    return !g->is_finished && stop_matcher_held_bytes(&g->matcher) > 0;
}
