/* A token begins behind the characters that the tokens before it complete: one that begins in the
 * middle of a character begins where that does. Tokens that are not in the text (a BOS that the
 * tokenizer added, characters that its normalizer composed) begin where the text is by then; behind
 * them the place is found again. */
#include "router/api_echo.h"

#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

enum { AHEAD_MAX = 16 /* bytes that a normalizer may have put into one token */ };

static bool is_inside(char byte) {
    return ((unsigned char)byte & 0xc0) == 0x80;
}

void api_echo_fini(api_echo *echo) {
    bt_free(echo->text);
    bt_free(echo->starts);
}

static bt_status create_starts(api_request *request) {
    if (!request->wants_logprob) return BT_OK;
    request->echo.starts = bt_calloc(request->prompt.count, sizeof(*request->echo.starts));
    return request->echo.starts != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
}

/* A place in the text of an echo. */
typedef struct walk {
    size_t at;
    uint32_t characters; /* that begin before it */
} walk;

static void walk_on(walk *w, const api_echo *echo, size_t bytes) {
    w->characters += (uint32_t)bt_utf8_count(echo->text + w->at, bytes);
    w->at += bytes;
}

/* Bytes from here to those of a token; false: it is not in the text here, or soon. */
static bool find_token(const walk *w, const api_echo *echo, const char *bytes, size_t count,
                       size_t ahead_max, size_t *ahead_out) {
    const char *here = echo->text + w->at;
    const size_t left = echo->bytes - w->at;
    for (size_t ahead = 0; ahead <= ahead_max && ahead + count <= left; ahead++) {
        if (memcmp(here + ahead, bytes, count) != 0) continue;
        *ahead_out = ahead;
        return true;
    }
    return false;
}

/* Walks along the text with the tokens. */
static void find_starts(api_request *request, const tokenizer *t) {
    const api_echo *echo = &request->echo;
    walk w = {0};
    for (uint32_t i = 0; i < request->prompt.count; i++) {
        const int32_t id = request->prompt.ids[i];
        const size_t ahead_max = tokenizer_is_special(t, id) ? 0 : AHEAD_MAX;
        const char *bytes = "";
        size_t count = 0;
        size_t ahead = 0;
        (void)tokenizer_token_bytes(t, id, &bytes, &count);
        const bool is_found = find_token(&w, echo, bytes, count, ahead_max, &ahead);
        if (is_found) walk_on(&w, echo, ahead);
        const bool is_cut = w.at < echo->bytes && is_inside(echo->text[w.at]);
        echo->starts[i] = w.characters - (is_cut ? 1 : 0);
        if (is_found) walk_on(&w, echo, count);
    }
}

bt_status api_echo_from_text(api_request *request, const tokenizer *t, const bt_json *string) {
    api_echo *echo = &request->echo;
    echo->text = bt_malloc(string->bytes);
    if (echo->text == NULL) return BT_ERR_WORKER_MEMORY;
    echo->bytes = bt_json_string_decode(string, echo->text);
    echo->characters = (uint32_t)bt_utf8_count(echo->text, echo->bytes);
    bt_status status = create_starts(request);
    if (status == BT_OK && echo->starts != NULL) find_starts(request, t);
    return status;
}

typedef struct decoded {
    bt_text text;
    uint32_t characters;
} decoded;

static void on_text(void *context, const char *text, size_t bytes) {
    decoded *d = context;
    bt_text_add(&d->text, text, bytes);
    d->characters += (uint32_t)bt_utf8_count(text, bytes);
}

static bt_status decode(api_request *request, const tokenizer *t, decoded *d) {
    detokenizer open;
    detokenizer_init(&open);
    for (uint32_t i = 0; i < request->prompt.count; i++) {
        const int32_t id = request->prompt.ids[i];
        const char *bytes = "";
        size_t count = 0;
        (void)tokenizer_token_bytes(t, id, &bytes, &count);
        if (request->skips_special && tokenizer_is_special(t, id)) count = 0;
        if (request->echo.starts != NULL)
            request->echo.starts[i] = d->characters + detokenizer_breaks(&open, bytes, count);
        detokenizer_push(&open, bytes, count, on_text, d);
    }
    detokenizer_finish(&open, on_text, d);
    return d->text.has_failed ? BT_ERR_WORKER_MEMORY : BT_OK;
}

bt_status api_echo_from_ids(api_request *request, const tokenizer *t) {
    decoded d = {0};
    bt_text_init(&d.text, API_TEXT_MAX);
    bt_status status = create_starts(request);
    if (status == BT_OK) status = decode(request, t, &d);
    if (status != BT_OK) {
        bt_text_fini(&d.text);
        return status;
    }
    request->echo.text = d.text.bytes; /* taken */
    request->echo.bytes = d.text.used;
    request->echo.characters = d.characters;
    return BT_OK;
}
