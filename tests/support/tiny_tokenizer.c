/* The tokenizer of the tiny models: 256 byte tokens, a few merges, ChatML's special tokens. The
 * split pattern is SmolLM's for Llama and Qwen's (with NFC) for Qwen. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "tests/support/tiny_model_internal.h"

enum { SPECIALS = 3, TEXT_BYTES_MAX = 64 };

static const char *const specials[SPECIALS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

/* In order of rank; each part is a byte or an earlier result. The last ones join bytes of UTF-8. */
static const char *const merges[][2] = {
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
static_assert(BT_ARRAY_COUNT(merges) == TINY_MODEL_MERGES, "the vocabulary size is a constant");

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
static test_bytes token_text(const tiny_model *m, int32_t id) {
    test_bytes text = {0};
    const int32_t first_special = tiny_model_endoftext_id(m);
    const bool is_special = id >= first_special && id < first_special + SPECIALS;
    const int32_t plain = first_special == 0 ? id - SPECIALS : id;
    if (is_special) {
        test_bytes_add_text(&text, specials[id - first_special]);
    } else if (plain < 256) {
        add_byte_letter(&text, (unsigned)plain);
    } else {
        add_alphabet(&text, merges[plain - 256][0]);
        add_alphabet(&text, merges[plain - 256][1]);
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

static void add_vocabulary(const tiny_model *m, test_bytes *out) {
    const int32_t first_special = tiny_model_endoftext_id(m);
    const char *separator = "";
    test_bytes_add_text(out, "\"vocab\": {");
    for (int32_t id = 0; id < TINY_MODEL_TOKENS; id++) {
        /* SmolLM has the special tokens in the vocabulary as well, Qwen only among the added. */
        if (first_special != 0 && id >= first_special) continue;
        test_bytes text = token_text(m, id);
        test_bytes_add_text(out, separator);
        add_json_string(out, (const char *)text.data, text.count);
        test_bytes_print(out, ": %d", id);
        test_bytes_fini(&text);
        separator = ", ";
    }
    test_bytes_add_text(out, "},\n");
}

static void add_merges(test_bytes *out) {
    test_bytes_add_text(out, "\"merges\": [");
    for (size_t i = 0; i < TINY_MODEL_MERGES; i++) {
        test_bytes text = {0};
        add_alphabet(&text, merges[i][0]);
        test_bytes_add_text(&text, " ");
        add_alphabet(&text, merges[i][1]);
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
    add_vocabulary(m, &text);
    add_merges(&text);
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

void tiny_tokenizer_add_gguf(const tiny_model *m, gguf_writer *w) {
    /* Padding ids have no text of their own; the format wants one. */
    const int32_t ids = (int32_t)tiny_model_geometry(m).vocab_size;
    const int32_t first_special = tiny_model_endoftext_id(m);
    gguf_writer_string(w, "tokenizer.ggml.model", "gpt2");
    gguf_writer_string(w, "tokenizer.ggml.pre",
                       m->family == MODEL_FAMILY_LLAMA ? "smollm" : "qwen2");
    gguf_writer_array(w, "tokenizer.ggml.tokens", BT_GGUF_TYPE_STRING, (uint64_t)ids);
    for (int32_t id = 0; id < ids; id++) {
        test_bytes text = {0};
        if (id < TINY_MODEL_TOKENS) {
            text = token_text(m, id);
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
        test_bytes_add_u32(&w->keys, id >= TINY_MODEL_TOKENS ? unused : is_special ? 3 : 1);
    }
    gguf_writer_array(w, "tokenizer.ggml.merges", BT_GGUF_TYPE_STRING, TINY_MODEL_MERGES);
    for (size_t i = 0; i < TINY_MODEL_MERGES; i++) {
        test_bytes text = {0};
        add_alphabet(&text, merges[i][0]);
        test_bytes_add_text(&text, " ");
        add_alphabet(&text, merges[i][1]);
        gguf_writer_text(w, (const char *)text.data, text.count);
        test_bytes_fini(&text);
    }
    gguf_writer_u32(w, "tokenizer.ggml.eos_token_id", (uint32_t)tiny_model_im_end_id(m));
    gguf_writer_u32(w, "tokenizer.ggml.eot_token_id", (uint32_t)tiny_model_endoftext_id(m));
    gguf_writer_u32(w, "tokenizer.ggml.padding_token_id", (uint32_t)tiny_model_endoftext_id(m));
    gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", 0);
    gguf_writer_string(w, "tokenizer.chat_template", chat_template);
}
