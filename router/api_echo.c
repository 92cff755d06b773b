/* A token begins behind the characters that the tokens before it complete: one that begins in the
 * middle of a character begins where that does. Tokens that left no trace in the text (a BOS that
 * the tokenizer added, characters that its normalizer composed) begin where the text is by then,
 * and none begins behind its end. */
#include "router/api_echo.h"

#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

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

/* Walks along the text with the tokens. */
static void find_starts(api_request *request, const tokenizer *t) {
    const api_echo *echo = &request->echo;
    size_t at = 0;
    uint32_t characters = 0;
    for (uint32_t i = 0; i < request->prompt.count; i++) {
        const int32_t id = request->prompt.ids[i];
        const size_t left = echo->bytes - at;
        const char *bytes = "";
        size_t count = 0;
        echo->starts[i] = characters - (left > 0 && is_inside(echo->text[at]) ? 1 : 0);
        (void)tokenizer_token_bytes(t, id, &bytes, &count);
        const bool is_here = count <= left && memcmp(echo->text + at, bytes, count) == 0;
        if (!is_here && tokenizer_is_special(t, id)) continue;
        if (count > left) count = left;
        characters += (uint32_t)bt_utf8_count(echo->text + at, count);
        at += count;
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
        if (request->echo.starts != NULL) request->echo.starts[i] = d->characters;
        if (request->skips_special && tokenizer_is_special(t, id)) continue;
        (void)tokenizer_token_bytes(t, id, &bytes, &count);
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
