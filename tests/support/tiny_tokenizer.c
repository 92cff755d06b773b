/* The tokenizer of the tiny models: 256 byte tokens, a few merges, ChatML's special tokens. The
 * split pattern is SmolLM's for Llama and Qwen's (with NFC) for Qwen. A vocabulary of more ids has
 * further merges, in this order and without those whose result the few have: a space and a letter,
 * two letters, two letters and a third. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "tests/support/tiny_model_internal.h"

enum {
    SPECIALS = 3,
    LETTERS = 26,
    PAIRS = LETTERS * LETTERS,
    TRIPLES = PAIRS * LETTERS,
    TRIPLE_STRIDE = 7919, /* prime: the triples come mixed */
};

static const char *const specials[SPECIALS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

typedef struct merge {
    char left[5];
    char right[5];
} merge;

/* The merges of one vocabulary, in order of rank. */
typedef struct merge_list {
    merge *items;
    uint32_t count;
} merge_list;

/* In order of rank; each part is a byte or an earlier result. The last ones join bytes of UTF-8. */
static const merge first_merges[] = {
    {" ", "t"},           {"h", "e"},       {" t", "he"},         {"i", "n"},
    {" ", "a"},           {"e", "r"},       {"o", "n"},           {"r", "e"},
    {" ", "s"},           {"a", "t"},       {"e", "n"},           {"o", "r"},
    {" ", "w"},           {"i", "t"},       {"i", "s"},           {"e", "s"},
    {" ", "c"},           {"a", "n"},       {"in", "g"},          {" ", "o"},
    {"o", "u"},           {" ", "p"},       {"a", "l"},           {" ", "f"},
    {" ", "b"},           {" ", "m"},       {"e", "d"},           {" o", "f"},
    {" ", "in"},          {" ", "d"},       {"l", "e"},           {" a", "n"},
    {" an", "d"},         {"s", "t"},       {"i", "c"},           {" t", "o"},
    {"r", "o"},           {"i", "on"},      {"a", "r"},           {"l", "l"},
    {"e", "l"},           {"a", "s"},       {"v", "e"},           {" ", "h"},
    {" ", "l"},           {"e", "t"},       {"u", "s"},           {"o", "m"},
    {"u", "r"},           {"i", "d"},       {" ", "re"},          {"n", "o"},
    {"c", "h"},           {"\n", "\n"},     {" ", " "},           {"  ", "  "},
    {"\xc3", "\xa9"},     {"\xe4", "\xb8"}, {"\xe4\xb8", "\xad"}, {"\xf0", "\x9f"},
    {"\xf0\x9f", "\x98"},
};
static_assert(BT_ARRAY_COUNT(first_merges) == TINY_MODEL_MERGES,
              "the vocabulary size is a constant");

/* Further merge number `n`, which may be among the first ones. */
static merge further_merge(uint32_t n) {
    const uint32_t pair = n - LETTERS;
    const uint32_t triple = (pair - PAIRS) * TRIPLE_STRIDE % TRIPLES;
    merge m = {.left = " "};
    if (n < LETTERS) {
        m.right[0] = (char)('a' + n);
    } else if (pair < PAIRS) {
        m.left[0] = (char)('a' + pair / LETTERS);
        m.right[0] = (char)('a' + pair % LETTERS);
    } else {
        m.left[0] = (char)('a' + triple / PAIRS);
        m.left[1] = (char)('a' + triple / LETTERS % LETTERS);
        m.right[0] = (char)('a' + triple % LETTERS);
    }
    return m;
}

/* The merge's result, padded with zeros. */
static void join(const merge *m, char out[sizeof(merge)]) {
    const size_t left_bytes = strnlen(m->left, sizeof m->left);
    memset(out, 0, sizeof(merge));
    memcpy(out, m->left, left_bytes);
    memcpy(out + left_bytes, m->right, strnlen(m->right, sizeof m->right));
}

static bool is_first(const merge *m) {
    char text[sizeof(merge)];
    char other[sizeof(merge)];
    join(m, text);
    for (size_t i = 0; i < TINY_MODEL_MERGES; i++) {
        join(&first_merges[i], other);
        if (memcmp(text, other, sizeof text) == 0) return true;
    }
    return false;
}

/* Freed with bt_free(items). */
static merge_list make_merges(const tiny_model *m) {
    const uint32_t wanted = tiny_model_tokens(m) - 256 - SPECIALS;
    BT_ASSERT(wanted >= TINY_MODEL_MERGES);
    BT_ASSERT(wanted <= PAIRS + TRIPLES);
    merge_list list = {.items = bt_calloc(wanted, sizeof(merge))};
    BT_ASSERT(list.items != NULL);
    memcpy(list.items, first_merges, sizeof first_merges);
    list.count = TINY_MODEL_MERGES;
    for (uint32_t n = 0; list.count < wanted; n++) {
        const merge next = further_merge(n);
        if (!is_first(&next)) list.items[list.count++] = next;
    }
    return list;
}

static const char chat_template[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'"
    "}}{% endif %}";

static const char qwen_pattern[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{"
                                   "N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                   "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* Bytes in the alphabet of byte-level BPE: printable ones stand for themselves as code points, the
 * others for U+0100 and on, in order. Appends UTF-8. */
static void add_alphabet(test_bytes *out, const char *text) {
    for (const char *at = text; *at != '\0'; at++) {
        const unsigned byte = (unsigned char)*at;
        unsigned others = 0;
        unsigned code = byte;
        for (unsigned b = 0; b <= byte; b++) {
            const bool is_kept = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
            if (!is_kept) code = b == byte ? 256 + others : code;
            if (!is_kept) others++;
        }
        uint8_t utf8[2] = {(uint8_t)(0xc0 | code >> 6), (uint8_t)(0x80 | (code & 0x3f))};
        const uint8_t ascii = (uint8_t)code;
        if (code < 128) {
            test_bytes_add(out, &ascii, 1);
        } else {
            test_bytes_add(out, utf8, 2);
        }
    }
}

/* Byte 0 cannot be in a C string; its letter is U+0100. */
static void add_byte_letter(test_bytes *out, unsigned byte) {
    const char text[2] = {(char)byte, '\0'};
    if (byte == 0) {
        test_bytes_add_text(out, "\xc4\x80");
    } else {
        add_alphabet(out, text);
    }
}

/* The text of a vocabulary entry, as it is stored. */
static test_bytes token_text(const tiny_model *m, const merge_list *merges, int32_t id) {
    test_bytes text = {0};
    const int32_t first_special = tiny_model_endoftext_id(m);
    const bool is_special = id >= first_special && id < first_special + SPECIALS;
    const int32_t plain = first_special == 0 ? id - SPECIALS : id;
    if (is_special) {
        test_bytes_add_text(&text, specials[id - first_special]);
    } else if (plain < 256) {
        add_byte_letter(&text, (unsigned)plain);
    } else {
        add_alphabet(&text, merges->items[plain - 256].left);
        add_alphabet(&text, merges->items[plain - 256].right);
    }
    return text;
}

/* A JSON string; the text has no control characters. */
static void add_json_string(test_bytes *out, const char *text, size_t count) {
    test_bytes_add_text(out, "\"");
    for (size_t i = 0; i < count; i++) {
        if (text[i] == '"' || text[i] == '\\') test_bytes_add_text(out, "\\");
        test_bytes_add(out, text + i, 1);
    }
    test_bytes_add_text(out, "\"");
}

static void add_vocabulary(const tiny_model *m, const merge_list *merges, test_bytes *out) {
    const int32_t first_special = tiny_model_endoftext_id(m);
    const char *separator = "";
    test_bytes_add_text(out, "\"vocab\": {");
    for (int32_t id = 0; id < (int32_t)tiny_model_tokens(m); id++) {
        /* SmolLM has the special tokens in the vocabulary as well, Qwen only among the added. */
        if (first_special != 0 && id >= first_special) continue;
        test_bytes text = token_text(m, merges, id);
        test_bytes_add_text(out, separator);
        add_json_string(out, (const char *)text.data, text.count);
        test_bytes_print(out, ": %d", id);
        test_bytes_fini(&text);
        separator = ", ";
    }
    test_bytes_add_text(out, "},\n");
}

static void add_merges(const merge_list *merges, test_bytes *out) {
    test_bytes_add_text(out, "\"merges\": [");
    for (uint32_t i = 0; i < merges->count; i++) {
        test_bytes text = {0};
        add_alphabet(&text, merges->items[i].left);
        test_bytes_add_text(&text, " ");
        add_alphabet(&text, merges->items[i].right);
        if (i > 0) test_bytes_add_text(out, ", ");
        add_json_string(out, (const char *)text.data, text.count);
        test_bytes_fini(&text);
    }
    test_bytes_add_text(out, "]");
}

static void add_split(const tiny_model *m, test_bytes *out) {
    if (m->family == MODEL_FAMILY_LLAMA) {
        test_bytes_add_text(out,
                            "\"normalizer\": null,\n\"pre_tokenizer\": {\"type\": \"Sequence\", "
                            "\"pretokenizers\": [{\"type\": \"Digits\", \"individual_digits\": "
                            "true}, {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                            "\"trim_offsets\": true, \"use_regex\": true}]},\n");
        return;
    }
    test_bytes_add_text(out, "\"normalizer\": {\"type\": \"NFC\"},\n\"pre_tokenizer\": {\"type\": "
                             "\"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": "
                             "{\"Regex\": ");
    add_json_string(out, qwen_pattern, sizeof qwen_pattern - 1);
    test_bytes_add_text(out, "}, \"behavior\": \"Isolated\", \"invert\": false}, {\"type\": "
                             "\"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, "
                             "\"use_regex\": false}]},\n");
}

static bt_status write_tokenizer(const tiny_model *m, const char *folder) {
    test_bytes text = {0};
    test_bytes_add_text(&text, "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null,\n"
                               "\"added_tokens\": [");
    for (int32_t i = 0; i < SPECIALS; i++) {
        test_bytes_print(&text,
                         "%s{\"id\": %d, \"content\": \"%s\", \"single_word\": false, \"lstrip\": "
                         "false, \"rstrip\": false, \"normalized\": false, \"special\": true}",
                         i > 0 ? ",\n" : "", tiny_model_endoftext_id(m) + i, specials[i]);
    }
    test_bytes_add_text(&text, "],\n");
    add_split(m, &text);
    test_bytes_add_text(&text, "\"post_processor\": null,\n\"decoder\": {\"type\": \"ByteLevel\", "
                               "\"add_prefix_space\": true, \"trim_offsets\": true, \"use_regex\": "
                               "true},\n\"model\": {\"type\": \"BPE\", \"dropout\": null, "
                               "\"unk_token\": null, \"continuing_subword_prefix\": null, "
                               "\"end_of_word_suffix\": null, \"fuse_unk\": false, "
                               "\"byte_fallback\": false, \"ignore_merges\": false,\n");
    merge_list merges = make_merges(m);
    add_vocabulary(m, &merges, &text);
    add_merges(&merges, &text);
    bt_free(merges.items);
    test_bytes_add_text(&text, "}}\n");
    const bt_status status = test_bytes_write(&text, folder, "tokenizer.json");
    test_bytes_fini(&text);
    return status;
}

static bt_status write_tokenizer_config(const char *folder) {
    test_bytes text = {0};
    test_bytes_add_text(&text, "{\"add_bos_token\": false, \"bos_token\": null, \"eos_token\": "
                               "\"<|im_end|>\", \"pad_token\": \"<|endoftext|>\", "
                               "\"chat_template\": ");
    add_json_string(&text, chat_template, sizeof chat_template - 1);
    test_bytes_add_text(&text, "}\n");
    const bt_status status = test_bytes_write(&text, folder, "tokenizer_config.json");
    test_bytes_fini(&text);
    return status;
}

bt_status tiny_tokenizer_write_hf(const tiny_model *m, const char *folder) {
    const bt_status status = write_tokenizer(m, folder);
    return status != BT_OK ? status : write_tokenizer_config(folder);
}

static void add_tokens_gguf(const tiny_model *m, const merge_list *merges, gguf_writer *w) {
    /* Padding ids have no text of their own; the format wants one. */
    const int32_t ids = (int32_t)tiny_model_geometry(m).vocab_size;
    const int32_t with_text = (int32_t)tiny_model_tokens(m);
    const int32_t first_special = tiny_model_endoftext_id(m);
    gguf_writer_array(w, "tokenizer.ggml.tokens", BT_GGUF_TYPE_STRING, (uint64_t)ids);
    for (int32_t id = 0; id < ids; id++) {
        test_bytes text = {0};
        if (id < with_text) {
            text = token_text(m, merges, id);
        } else {
            test_bytes_print(&text, "[PAD%d]", id);
        }
        gguf_writer_text(w, (const char *)text.data, text.count);
        test_bytes_fini(&text);
    }
    gguf_writer_array(w, "tokenizer.ggml.token_type", BT_GGUF_TYPE_I32, (uint64_t)ids);
    for (int32_t id = 0; id < ids; id++) {
        const bool is_special = id >= first_special && id < first_special + SPECIALS;
        const uint32_t unused = 5;
        test_bytes_add_u32(&w->keys, id >= with_text ? unused : is_special ? 3 : 1);
    }
}

static void add_merges_gguf(const merge_list *merges, gguf_writer *w) {
    gguf_writer_array(w, "tokenizer.ggml.merges", BT_GGUF_TYPE_STRING, merges->count);
    for (uint32_t i = 0; i < merges->count; i++) {
        test_bytes text = {0};
        add_alphabet(&text, merges->items[i].left);
        test_bytes_add_text(&text, " ");
        add_alphabet(&text, merges->items[i].right);
        gguf_writer_text(w, (const char *)text.data, text.count);
        test_bytes_fini(&text);
    }
}

void tiny_tokenizer_add_gguf(const tiny_model *m, gguf_writer *w) {
    merge_list merges = make_merges(m);
    gguf_writer_string(w, "tokenizer.ggml.model", "gpt2");
    gguf_writer_string(w, "tokenizer.ggml.pre",
                       m->family == MODEL_FAMILY_LLAMA ? "smollm" : "qwen2");
    add_tokens_gguf(m, &merges, w);
    add_merges_gguf(&merges, w);
    bt_free(merges.items);
    gguf_writer_u32(w, "tokenizer.ggml.eos_token_id", (uint32_t)tiny_model_im_end_id(m));
    gguf_writer_u32(w, "tokenizer.ggml.eot_token_id", (uint32_t)tiny_model_endoftext_id(m));
    gguf_writer_u32(w, "tokenizer.ggml.padding_token_id", (uint32_t)tiny_model_endoftext_id(m));
    gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", 0);
    gguf_writer_string(w, "tokenizer.chat_template", chat_template);
}
