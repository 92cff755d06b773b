/* Reading the tokenizer of a GGUF file. The file names the split rule; what it does not say
 * (normalisation, whole pieces before merges) follows from the name. */
#include <string.h>

#include "base/gguf.h"
#include "router/tokenizer_internal.h"

/* Values of tokenizer.ggml.token_type. */
enum {
    TYPE_NORMAL = 1,
    TYPE_UNKNOWN = 2,
    TYPE_CONTROL = 3,
    TYPE_USER_DEFINED = 4,
    TYPE_UNUSED = 5,
};

typedef struct gguf_loader {
    const bt_gguf *file;
    tokenizer *t;
    bt_error *error;
} gguf_loader;

static bt_status locate(const gguf_loader *loader, bt_status status) {
    if (status == BT_OK || loader->error == NULL) return status;
    const bt_error inner = *loader->error;
    return bt_fail(loader->error, status, "%s: %.400s", bt_gguf_path(loader->file), inner.text);
}

static bool is_text(bt_gguf_string text, const char *name) {
    return text.bytes == strlen(name) && memcmp(text.text, name, text.bytes) == 0;
}

/* *out is {NULL, 0} when the key is absent. */
static bt_status get_text(const gguf_loader *loader, const char *key, bt_gguf_string *out) {
    *out = (bt_gguf_string){0};
    if (!bt_gguf_has_key(loader->file, key)) return BT_OK;
    return bt_gguf_get_string(loader->file, key, out, loader->error);
}

static bt_status get_flag(const gguf_loader *loader, const char *key, bool *out) {
    if (!bt_gguf_has_key(loader->file, key)) return BT_OK;
    return bt_gguf_get_bool(loader->file, key, out, loader->error);
}

static bt_status load_rule(const gguf_loader *loader, bool *adds_bos_out) {
    static const struct {
        const char *name;
        split_rule rule;
        bool normalizes;
        bool ignores_merges;
        bool adds_bos;
    } known[] = {
        {"gpt-2", SPLIT_RULE_GPT2, false, false, false},
        {"smollm", SPLIT_RULE_DIGITS_GPT2, false, false, false},
        {"starcoder", SPLIT_RULE_DIGITS_GPT2, false, false, false},
        {"qwen2", SPLIT_RULE_QWEN2, true, false, false},
        {"llama-bpe", SPLIT_RULE_LLAMA3, false, true, true},
        {"llama3", SPLIT_RULE_LLAMA3, false, true, true},
    };
    bt_gguf_string name;
    const bt_status status = get_text(loader, "tokenizer.ggml.pre", &name);
    if (status != BT_OK) return status;
    /* Files from before the key was invented are GPT-2's. */
    if (name.text == NULL) name = (bt_gguf_string){"gpt-2", strlen("gpt-2")};
    for (size_t i = 0; i < BT_ARRAY_COUNT(known); i++) {
        if (!is_text(name, known[i].name)) continue;
        loader->t->rule = known[i].rule;
        loader->t->normalizes = known[i].normalizes;
        loader->t->ignores_merges = known[i].ignores_merges;
        *adds_bos_out = known[i].adds_bos;
        return BT_OK;
    }
    return bt_fail(loader->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: unknown tokenizer.ggml.pre \"%.*s\"", bt_gguf_path(loader->file),
                   (int)(name.bytes < 100 ? name.bytes : 100), name.text);
}

static bt_status check_model(const gguf_loader *loader) {
    bt_gguf_string model;
    bool adds_space = false;
    bt_status status =
        bt_gguf_get_string(loader->file, "tokenizer.ggml.model", &model, loader->error);
    if (status == BT_OK) status = get_flag(loader, "tokenizer.ggml.add_space_prefix", &adds_space);
    if (status != BT_OK) return status;
    if (!is_text(model, "gpt2"))
        return bt_fail(loader->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: tokenizer.ggml.model \"%.*s\" is not supported, only gpt2",
                       bt_gguf_path(loader->file), (int)(model.bytes < 100 ? model.bytes : 100),
                       model.text);
    if (adds_space)
        return bt_fail(loader->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: tokenizer.ggml.add_space_prefix is not supported",
                       bt_gguf_path(loader->file));
    return BT_OK;
}

static bt_status put_token(const gguf_loader *loader, uint64_t id, bt_gguf_string text,
                           int32_t type, bool is_added_pass) {
    const token_text token = {text.text, text.bytes};
    const bool is_added = type == TYPE_CONTROL || type == TYPE_UNKNOWN || type == TYPE_USER_DEFINED;
    if (is_added_pass) {
        const uint32_t flags = type == TYPE_USER_DEFINED ? 0 : TOKEN_SPECIAL;
        if (!is_added) return BT_OK;
        return tokenizer_put_added(loader->t, id, token, flags, false, loader->error);
    }
    if (type == TYPE_NORMAL) return tokenizer_put_piece(loader->t, id, token, loader->error);
    if (is_added || type == TYPE_UNUSED) return tokenizer_put_hole(loader->t, id, loader->error);
    return bt_fail(loader->error, BT_ERR_CALLER_UNSUPPORTED,
                   "token %llu has the type %d, which byte-level BPE does not know",
                   (unsigned long long)id, type);
}

/* Two passes, because added tokens are checked against the sealed vocabulary. */
static bt_status load_tokens(const gguf_loader *loader, bool is_added_pass) {
    bt_gguf_array tokens;
    bt_gguf_array types;
    bt_status status = bt_gguf_get_array(loader->file, "tokenizer.ggml.tokens", BT_GGUF_TYPE_STRING,
                                         &tokens, loader->error);
    if (status == BT_OK)
        status = bt_gguf_get_array(loader->file, "tokenizer.ggml.token_type", BT_GGUF_TYPE_I32,
                                   &types, loader->error);
    if (status != BT_OK) return status;
    if (types.count != tokens.count)
        return bt_fail(loader->error, BT_ERR_CALLER_FILE, "%s: %zu tokens but %zu token types",
                       bt_gguf_path(loader->file), tokens.count, types.count);
    bt_gguf_string_cursor cursor = {0};
    bt_gguf_string text;
    while (status == BT_OK && bt_gguf_array_next_string(&tokens, &cursor, &text)) {
        const size_t id = cursor.index - 1;
        status = put_token(loader, id, text, bt_gguf_array_i32(&types, id), is_added_pass);
    }
    return locate(loader, status);
}

static bt_status load_merges(const gguf_loader *loader, const bt_gguf_array *merges) {
    bt_gguf_string_cursor cursor = {0};
    bt_gguf_string merge;
    while (bt_gguf_array_next_string(merges, &cursor, &merge)) {
        const char *space = memchr(merge.text, ' ', merge.bytes);
        if (space == NULL)
            return bt_fail(loader->error, BT_ERR_CALLER_FILE, "%s: merge %zu is not a pair",
                           bt_gguf_path(loader->file), cursor.index - 1);
        const size_t left_bytes = (size_t)(space - merge.text);
        const token_text left = {merge.text, left_bytes};
        const token_text right = {space + 1, merge.bytes - left_bytes - 1};
        const bt_status status = tokenizer_put_merge(loader->t, left, right, loader->error);
        if (status != BT_OK) return locate(loader, status);
    }
    return BT_OK;
}

static bt_status load_vocabulary(const gguf_loader *loader) {
    bt_gguf_array merges;
    bt_status status = bt_gguf_get_array(loader->file, "tokenizer.ggml.merges", BT_GGUF_TYPE_STRING,
                                         &merges, loader->error);
    if (status == BT_OK) status = load_tokens(loader, false);
    if (status == BT_OK)
        status = locate(loader, tokenizer_seal_pieces(loader->t, merges.count, loader->error));
    if (status == BT_OK) status = load_merges(loader, &merges);
    if (status == BT_OK) status = load_tokens(loader, true);
    return status;
}

/* An id out of the vocabulary is the file's mistake; absent is fine, *id_out stays -1. */
static bt_status get_id(const gguf_loader *loader, const char *key, int32_t *id_out) {
    uint32_t id = 0;
    *id_out = -1;
    if (!bt_gguf_has_key(loader->file, key)) return BT_OK;
    const bt_status status = bt_gguf_get_u32(loader->file, key, &id, loader->error);
    if (status != BT_OK) return status;
    const bool is_present =
        id < loader->t->vocab_count && (loader->t->entries[id].flags & TOKEN_PRESENT) != 0;
    if (!is_present)
        return bt_fail(loader->error, BT_ERR_CALLER_FILE, "%s: %s %u is not in the vocabulary",
                       bt_gguf_path(loader->file), key, id);
    *id_out = (int32_t)id;
    return BT_OK;
}

/* The token that is added on one side, when the file asks for it. */
static bt_status load_side(const gguf_loader *loader, const char *flag_key, bool is_default,
                           const char *id_key, int32_t *ids, uint32_t *count) {
    bool is_added = is_default;
    int32_t id = -1;
    bt_status status = get_flag(loader, flag_key, &is_added);
    if (status == BT_OK) status = get_id(loader, id_key, &id);
    if (status != BT_OK || !is_added) return status;
    if (id < 0)
        return bt_fail(loader->error, BT_ERR_CALLER_FILE, "%s: %s without %s",
                       bt_gguf_path(loader->file), flag_key, id_key);
    ids[(*count)++] = id;
    return BT_OK;
}

static bt_status load_special(const gguf_loader *loader, bool adds_bos) {
    static const char *const ends[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    tokenizer *t = loader->t;
    bt_status status = load_side(loader, "tokenizer.ggml.add_bos_token", adds_bos,
                                 "tokenizer.ggml.bos_token_id", t->prefix_ids, &t->prefix_count);
    if (status == BT_OK)
        status = load_side(loader, "tokenizer.ggml.add_eos_token", false,
                           "tokenizer.ggml.eos_token_id", t->suffix_ids, &t->suffix_count);
    for (size_t i = 0; i < BT_ARRAY_COUNT(ends) && status == BT_OK; i++) {
        int32_t id = -1;
        status = get_id(loader, ends[i], &id);
        if (status == BT_OK && id >= 0) status = tokenizer_put_eos(t, id, loader->error);
    }
    return status;
}

bt_status tokenizer_load_gguf(const char *path, tokenizer *t, bt_error *error) {
    bt_gguf *file = NULL;
    bt_status status = bt_gguf_open(path, &file, error);
    if (status != BT_OK) return status;
    const gguf_loader loader = {file, t, error};
    bool adds_bos = false;
    bt_gguf_string source = {0};
    status = check_model(&loader);
    if (status == BT_OK) status = load_rule(&loader, &adds_bos);
    if (status == BT_OK) status = load_vocabulary(&loader);
    if (status == BT_OK) status = load_special(&loader, adds_bos);
    if (status == BT_OK) status = get_text(&loader, "tokenizer.chat_template", &source);
    if (status == BT_OK) status = chat_template_detect(source.text, source.bytes, &t->chat);
    if (status == BT_OK) status = locate(&loader, tokenizer_seal(t, error));
    bt_gguf_close(file);
    return status;
}
