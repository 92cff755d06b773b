/* Text of any kind through small tokenizers of every rule: the tokens' bytes are the text (after
 * normalisation: a text with the same ids), the count respects the bound that admission relies on,
 * and what is not UTF-8 is refused. */
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/tiny_bpe.h"

enum { TOKENIZERS = 5 };

static const tiny_merge merges[] = {{"a", "b"},   {"ab", "c"},      {" ", "a"},   {" ", " "},
                                    {"1", "2"},   {"\xCC", "\x81"}, {"b", "c"},   {"'", "s"},
                                    {"\n", "\n"}, {"\xE3", "\x81"}, {"  ", "  "}, {"abc", "abc"}};
static const char added[] = "{\"id\": 300, \"content\": \"<s>\", \"special\": true}, "
                            "{\"id\": 301, \"content\": \"<t>\"}, "
                            "{\"id\": 302, \"content\": \"<s>a\", \"normalized\": true}, "
                            "{\"id\": 303, \"content\": \"ba\", \"single_word\": true}";

/* Made at the first call and never changed. */
static tokenizer *const *tokenizers(void) {
    static tokenizer *made[TOKENIZERS];
    static const char *const rules[TOKENIZERS] = {tiny_bpe_whole, tiny_bpe_smollm, tiny_bpe_llama3,
                                                  tiny_bpe_qwen2, NULL};
    for (size_t i = 0; i < TOKENIZERS && made[i] == NULL; i++) {
        const tiny_bpe bpe = {.merges = merges,
                              .merge_count = BT_ARRAY_COUNT(merges),
                              .pre_tokenizer = rules[i],
                              .added_tokens = added,
                              .normalizer =
                                  rules[i] == tiny_bpe_qwen2 ? "{\"type\": \"NFC\"}" : NULL};
        BT_ASSERT(tiny_bpe_load(&bpe, &made[i], NULL) == BT_OK);
    }
    return made;
}

/* The bytes of the tokens; the caller frees them. */
static test_bytes join(const tokenizer *t, const token_list *list) {
    test_bytes text = {0};
    for (uint32_t i = 0; i < list->count; i++) {
        const char *bytes = NULL;
        size_t count = 0;
        BT_ASSERT(tokenizer_token_bytes(t, list->ids[i], &bytes, &count));
        (void)test_bytes_add(&text, bytes, count);
    }
    return text;
}

static void check_list(const tokenizer *t, const char *text, size_t bytes, bool is_normalizing,
                       tokenizer_encode_options options, const token_list *list) {
    token_list again = {0};
    test_bytes joined = join(t, list);
    BT_ASSERT((uint64_t)list->count * tokenizer_token_bytes_max(t) >= bytes);
    if (!is_normalizing) {
        BT_ASSERT(joined.count == bytes);
        BT_ASSERT(bytes == 0 || memcmp(joined.data, text, bytes) == 0);
    }
    /* Normal text stays normal. Its added tokens may differ: one can appear by normalising. */
    options.parses_special = true;
    BT_ASSERT(bt_utf8_is_valid((const char *)joined.data, joined.count));
    BT_ASSERT(tokenizer_encode(t, (const char *)joined.data, joined.count, options, &again) ==
              BT_OK);
    test_bytes twice = join(t, &again);
    BT_ASSERT(twice.count == joined.count);
    BT_ASSERT(twice.count == 0 || memcmp(twice.data, joined.data, twice.count) == 0);
    test_bytes_fini(&twice);
    test_bytes_fini(&joined);
    token_list_fini(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes == 0) return 0;
    const size_t which = data[0] % TOKENIZERS;
    const tokenizer_encode_options options = {.parses_special = (data[0] & 0x80) != 0};
    const tokenizer *t = tokenizers()[which];
    const char *text = (const char *)data + 1;
    token_list list = {0};
    const bool is_valid = bt_utf8_is_valid(text, bytes - 1);
    const bt_status status = tokenizer_encode(t, text, bytes - 1, options, &list);
    BT_ASSERT(status == (is_valid ? BT_OK : BT_ERR_REQUEST_INVALID));
    if (is_valid) check_list(t, text, bytes - 1, which == 3, options, &list);
    token_list_fini(&list);
    return 0;
}
