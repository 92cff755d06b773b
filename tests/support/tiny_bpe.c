#include "tests/support/tiny_bpe.h"

#include <stdbool.h>
#include <string.h>

#define SPLIT_BYTES(regex)                                                                         \
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": " \
    "\"" regex "\"}, \"behavior\": \"Isolated\", \"invert\": false}, {\"type\": \"ByteLevel\", "   \
    "\"add_prefix_space\": false, \"use_regex\": false}]}"
#define LLAMA_REGEX(numbers)                                                                       \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|" numbers                \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"

const char tiny_bpe_whole[] = "{\"type\": \"ByteLevel\", \"use_regex\": false}";
const char tiny_bpe_smollm[] =
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Digits\", \"individual_digits\": "
    "true}, {\"type\": \"ByteLevel\", \"add_prefix_space\": false}]}";
const char tiny_bpe_llama3[] = SPLIT_BYTES(LLAMA_REGEX("\\\\p{N}{1,3}"));
const char tiny_bpe_qwen2[] = SPLIT_BYTES(LLAMA_REGEX("\\\\p{N}"));

static bool is_kept(unsigned byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

void tiny_bpe_add_alphabet(test_bytes *out, const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const unsigned byte = (unsigned char)bytes[i];
        unsigned code = byte;
        if (!is_kept(byte)) {
            code = 256;
            for (unsigned other = 0; other < byte; other++)
                code += is_kept(other) ? 0 : 1;
        }
        const uint8_t pair[2] = {(uint8_t)(0xC0 | code >> 6), (uint8_t)(0x80 | (code & 0x3F))};
        const uint8_t ascii = (uint8_t)code;
        (void)test_bytes_add(out, code < 128 ? &ascii : pair, code < 128 ? 1 : 2);
    }
}

void tiny_bpe_add_string(test_bytes *out, const char *text, size_t count) {
    (void)test_bytes_add_text(out, "\"");
    for (size_t i = 0; i < count; i++) {
        const unsigned byte = (unsigned char)text[i];
        if (byte < 32) {
            test_bytes_print(out, "\\u%04x", byte);
            continue;
        }
        if (byte == '"' || byte == '\\') (void)test_bytes_add_text(out, "\\");
        (void)test_bytes_add(out, text + i, 1);
    }
    (void)test_bytes_add_text(out, "\"");
}

/* One entry of the vocabulary: the alphabet never needs escapes but for " and \. */
static void add_entry(test_bytes *out, const char *left, size_t left_count, const char *right,
                      size_t id) {
    test_bytes text = {0};
    tiny_bpe_add_alphabet(&text, left, left_count);
    tiny_bpe_add_alphabet(&text, right, strlen(right));
    if (out->data[out->count - 1] != '{') (void)test_bytes_add_text(out, ", ");
    tiny_bpe_add_string(out, (const char *)text.data, text.count);
    test_bytes_print(out, ": %zu", id);
    test_bytes_fini(&text);
}

static void add_merge(test_bytes *out, const tiny_merge *merge, const char *separator) {
    test_bytes text = {0};
    (void)test_bytes_add_text(out, separator);
    tiny_bpe_add_alphabet(&text, merge->left, strlen(merge->left));
    (void)test_bytes_add_text(&text, " ");
    tiny_bpe_add_alphabet(&text, merge->right, strlen(merge->right));
    tiny_bpe_add_string(out, (const char *)text.data, text.count);
    test_bytes_fini(&text);
}

static void add_model(test_bytes *out, const tiny_bpe *bpe) {
    const char *lacking = bpe->lacking == NULL ? "" : bpe->lacking;
    (void)test_bytes_add_text(out, "\"model\": {\"type\": \"BPE\", ");
    (void)test_bytes_add_text(out, bpe->model_options == NULL ? "" : bpe->model_options);
    (void)test_bytes_add_text(out, " \"vocab\": {");
    for (unsigned byte = 0; byte < 256; byte++) {
        const char raw[1] = {(char)byte};
        if (byte == 0 || strchr(lacking, (int)byte) == NULL) add_entry(out, raw, 1, "", byte);
    }
    for (size_t i = 0; i < bpe->merge_count; i++)
        add_entry(out, bpe->merges[i].left, strlen(bpe->merges[i].left), bpe->merges[i].right,
                  256 + i);
    (void)test_bytes_add_text(out, "}, \"merges\": [");
    for (size_t i = 0; i < bpe->merge_count; i++)
        add_merge(out, &bpe->merges[i], i == 0 ? "" : ", ");
    (void)test_bytes_add_text(out, "]}");
}

static void add_part(test_bytes *out, const char *name, const char *value, const char *usual) {
    test_bytes_print(out, "\"%s\": ", name);
    (void)test_bytes_add_text(out, value == NULL ? usual : value);
    (void)test_bytes_add_text(out, ",\n");
}

test_bytes tiny_bpe_json(const tiny_bpe *bpe) {
    test_bytes out = {0};
    (void)test_bytes_add_text(&out, "{\"version\": \"1.0\",\n\"added_tokens\": [");
    (void)test_bytes_add_text(&out, bpe->added_tokens == NULL ? "" : bpe->added_tokens);
    (void)test_bytes_add_text(&out, "],\n");
    add_part(&out, "normalizer", bpe->normalizer, "null");
    add_part(&out, "pre_tokenizer", bpe->pre_tokenizer,
             "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": true}");
    add_part(&out, "post_processor", bpe->post_processor, "null");
    add_part(&out, "decoder", bpe->decoder, "{\"type\": \"ByteLevel\"}");
    add_model(&out, bpe);
    (void)test_bytes_add_text(&out, "}\n");
    return out;
}

bt_status tiny_bpe_load_text(const test_bytes *text, tokenizer **out, bt_error *error) {
    const test_folder folder = test_folder_make();
    bt_status status = test_bytes_write(text, folder.path, "tokenizer.json");
    if (status == BT_OK) status = tokenizer_load(folder.path, out, error);
    test_folder_remove(&folder);
    return status;
}

bt_status tiny_bpe_load(const tiny_bpe *bpe, tokenizer **out, bt_error *error) {
    test_bytes text = tiny_bpe_json(bpe);
    const bt_status status = tiny_bpe_load_text(&text, out, error);
    test_bytes_fini(&text);
    return status;
}
