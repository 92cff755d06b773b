/* Text to token ids and back. Only the router sees text.
 *
 * A *tokenizer* is immutable after loading and may be used by any number of threads at once. A
 * *detokenizer* is a small streaming state of one sequence, in the caller's storage.
 * Byte-level BPE only (tokenizer.json or GGUF `gpt2`); anything else is refused by name at load. */
#ifndef BT_ROUTER_TOKENIZER_H
#define BT_ROUTER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { TOKENIZER_FINGERPRINT_BYTES = 32, TOKENIZER_EOS_MAX = 8 };

typedef struct tokenizer tokenizer;

/* Loads from an HF folder (tokenizer.json, tokenizer_config.json, generation_config.json and
 * config.json beside it), a tokenizer.json file, or a GGUF file. Blocking; returns owned. */
BT_MUST_CHECK bt_status tokenizer_load(const char *path, tokenizer **out, bt_error *error);
void tokenizer_destroy(tokenizer *t);

/* Ids are 0 .. vocab_count-1, added tokens included (holes have no text). */
uint32_t tokenizer_vocab_count(const tokenizer *t);
/* A text of n bytes has at least n / this many tokens. At least 1; UINT32_MAX when this tokenizer
 * gives no such bound (bytes that the vocabulary lacks are dropped, as in the reference). */
uint32_t tokenizer_token_bytes_max(const tokenizer *t);
/* SHA-256 over the vocabulary, merges, added tokens and split rule, the same for a tokenizer.json
 * and a GGUF file of the same tokenizer only if they say the same thing. */
const uint8_t *tokenizer_fingerprint(const tokenizer *t);
/* The raw bytes of one token ("" and false for an unknown id). Borrowed from the tokenizer. */
bool tokenizer_token_bytes(const tokenizer *t, int32_t id, const char **bytes_out,
                           size_t *count_out);
bool tokenizer_is_special(const tokenizer *t, int32_t id);
/* The id of a token given as text ("<|im_end|>"), or -1. */
int32_t tokenizer_find(const tokenizer *t, const char *text);
/* End-of-sequence ids of the tokenizer's own files; the worker's model card may add more. */
uint32_t tokenizer_eos(const tokenizer *t, int32_t ids_out[TOKENIZER_EOS_MAX]);

typedef struct tokenizer_encode_options {
    bool adds_special;   /* the post-processor's tokens (BOS) */
    bool parses_special; /* "<|im_start|>" in the text becomes its token */
    uint32_t tokens_max; /* refuse with CALLER_LIMIT beyond this; 0 = no limit */
} tokenizer_encode_options;

typedef struct token_list {
    int32_t *ids;
    uint32_t count;
    uint32_t capacity;
} token_list;

/* Appends the ids of `text` (valid UTF-8, may hold NUL; else REQUEST_INVALID) to *list, which the
 * caller frees with token_list_fini; after an error the list is as it was. Equal to Hugging Face
 * tokenizers. Time is n log n in the worst case. REQUEST_TOO_LARGE: one unsplittable word of more
 * than 64 MiB. */
BT_MUST_CHECK bt_status tokenizer_encode(const tokenizer *t, const char *text, size_t bytes,
                                         tokenizer_encode_options options, token_list *list);
BT_MUST_CHECK bt_status token_list_append(token_list *list, int32_t id);
void token_list_fini(token_list *list);

/* Streaming detokenisation: bytes of tokens go in, the longest prefix that is complete UTF-8 comes
 * out; bytes that can no longer become valid are replaced by U+FFFD (WHATWG maximal subpart). At
 * most 3 bytes are held back. */
typedef struct detokenizer {
    uint8_t held[4];
    uint8_t held_count;
} detokenizer;

void detokenizer_init(detokenizer *d);
/* A consumer of text; called zero or more times with complete UTF-8. */
typedef void (*text_sink)(void *context, const char *text, size_t bytes);
void detokenizer_push(detokenizer *d, const char *bytes, size_t count, text_sink sink,
                      void *context);
/* What is held back cannot go on with these bytes: pushing them replaces it first. */
bool detokenizer_breaks(const detokenizer *d, const char *bytes, size_t count);
/* Flushes: an incomplete tail becomes U+FFFD. */
void detokenizer_finish(detokenizer *d, text_sink sink, void *context);

/* Chat. One message of a conversation; content is the concatenation of its text parts. */
typedef struct chat_message {
    const char *role;
    const char *content;
    size_t content_bytes;
} chat_message;

typedef enum chat_thinking {
    CHAT_THINKING_DEFAULT, /* as the model's template does when nothing is said */
    CHAT_THINKING_OFF,     /* enable_thinking false: an empty thought is put before the answer */
    CHAT_THINKING_ON,
} chat_thinking;

typedef struct chat_options {
    uint32_t tokens_max; /* refuse with CALLER_LIMIT beyond this; 0 = no limit */
    chat_thinking thinking;
    bool continues_final; /* the last message (the assistant's) is left open, to be continued */
} chat_options;

/* Renders ChatML and encodes it, the generation prompt included; the ids are those of the rendered
 * text, except that a message never becomes a special token: its "<|im_end|>" is plain text. Roles
 * are system, user, assistant, tool, and developer, which is rendered as system. Errors, each with
 * a sentence: REQUEST_UNSUPPORTED when the model's template is not ChatML, REQUEST_INVALID for no
 * messages, an unknown role or invalid UTF-8, CALLER_LIMIT beyond tokens_max. */
BT_MUST_CHECK bt_status tokenizer_encode_chat(const tokenizer *t, const chat_message *messages,
                                              size_t message_count, chat_options options,
                                              token_list *list, bt_error *error);

#endif
