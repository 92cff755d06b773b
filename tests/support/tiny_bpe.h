/* Small tokenizer.json texts for tests: 256 byte tokens (ids 0 to 255), then the results of the
 * given merges, then whatever JSON the test puts into the other parts. One thread. */
#ifndef BT_TESTS_SUPPORT_TINY_BPE_H
#define BT_TESTS_SUPPORT_TINY_BPE_H

#include <stddef.h>

#include "router/tokenizer.h"
#include "tests/support/test_bytes.h"

typedef struct tiny_merge {
    const char *left; /* raw bytes, terminated */
    const char *right;
} tiny_merge;

/* Zeroed parts are the usual ones: GPT-2's split, nothing normalised, added or put around. */
typedef struct tiny_bpe {
    const tiny_merge *merges;
    size_t merge_count;
    const char *pre_tokenizer; /* JSON values */
    const char *normalizer;
    const char *post_processor;
    const char *decoder;
    const char *added_tokens;  /* the inside of the array */
    const char *model_options; /* members of the model, followed by a comma */
    const char *lacking;       /* bytes that the vocabulary does not have; their ids are holes */
} tiny_bpe;

extern const char tiny_bpe_whole[];  /* pre_tokenizer: no splitting */
extern const char tiny_bpe_smollm[]; /* digits, then GPT-2 */
extern const char tiny_bpe_llama3[];
extern const char tiny_bpe_qwen2[];

/* Appends text in the byte alphabet. */
void tiny_bpe_add_alphabet(test_bytes *out, const char *bytes, size_t count);
/* Appends a JSON string. */
void tiny_bpe_add_string(test_bytes *out, const char *text, size_t count);
/* The file's text; the caller frees it. */
test_bytes tiny_bpe_json(const tiny_bpe *bpe);
/* Loads text as folder/tokenizer.json of a temporary folder. */
BT_MUST_CHECK bt_status tiny_bpe_load_text(const test_bytes *text, tokenizer **out,
                                           bt_error *error);
BT_MUST_CHECK bt_status tiny_bpe_load(const tiny_bpe *bpe, tokenizer **out, bt_error *error);

#endif
