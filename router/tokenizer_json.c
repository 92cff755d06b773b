/* Reading tokenizer.json. Every part that decides ids is either understood or refused by name;
 * truncation and padding are left out, because serving does neither. */
#include <string.h>

#include "base/json_file.h"
#include "router/tokenizer_internal.h"

enum { STAGES_MAX = 4 };

/* What the functions below share. Errors get the path in front. */
typedef struct json_loader {
    const char *path;
    tokenizer *t;
    bt_error *error;
} json_loader;

static bt_status refuse(const json_loader *loader, bt_status status, const char *what,
                        const char *name) {
    return bt_fail(loader->error, status, "%s: %s \"%.100s\"", loader->path, what, name);
}

/* Puts the path in front of a sentence that a builder wrote. */
static bt_status locate(const json_loader *loader, bt_status status) {
    if (status == BT_OK || loader->error == NULL) return status;
    const bt_error inner = *loader->error;
    return bt_fail(loader->error, status, "%s: %.400s", loader->path, inner.text);
}

static token_text text_of(const json_t *value) {
    return (token_text){json_string_value(value), json_string_length(value)};
}

/* The "type" of an object; "" when there is none. */
static const char *type_of(const json_t *value) {
    const char *type = json_string_value(json_object_get(value, "type"));
    return type == NULL ? "" : type;
}

static bool is_absent(const json_t *value) {
    return value == NULL || json_is_null(value);
}

static bt_status load_vocabulary(const json_loader *loader, const json_t *model) {
    const char *key = NULL;
    json_t *value = NULL;
    json_t *vocab = json_object_get(model, "vocab");
    if (!json_is_object(vocab))
        return refuse(loader, BT_ERR_CALLER_FILE, "there is no object", "model.vocab");
    json_object_foreach(vocab, key, value) {
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return refuse(loader, BT_ERR_CALLER_FILE, "the id is not a number from 0 on: token",
                          key);
        const bt_status status = tokenizer_put_piece(loader->t, (uint64_t)json_integer_value(value),
                                                     (token_text){key, strlen(key)}, loader->error);
        if (status != BT_OK) return locate(loader, status);
    }
    return BT_OK;
}

/* Old files write a merge as "a b", new ones as ["a", "b"]. */
static bool split_merge(const json_t *merge, token_text *left, token_text *right) {
    if (json_is_array(merge)) {
        *left = text_of(json_array_get(merge, 0));
        *right = text_of(json_array_get(merge, 1));
        return json_array_size(merge) == 2 && left->text != NULL && right->text != NULL;
    }
    const token_text both = text_of(merge);
    const char *space = both.text == NULL ? NULL : memchr(both.text, ' ', both.bytes);
    if (space == NULL) return false;
    *left = (token_text){both.text, (size_t)(space - both.text)};
    *right = (token_text){space + 1, both.bytes - left->bytes - 1};
    return memchr(right->text, ' ', right->bytes) == NULL;
}

static bt_status load_merges(const json_loader *loader, const json_t *merges) {
    size_t index = 0;
    json_t *value = NULL;
    json_array_foreach(merges, index, value) {
        token_text left = {0};
        token_text right = {0};
        if (!split_merge(value, &left, &right))
            return bt_fail(loader->error, BT_ERR_CALLER_FILE,
                           "%s: model.merges[%zu] is not a pair of tokens", loader->path, index);
        const bt_status status = tokenizer_put_merge(loader->t, left, right, loader->error);
        if (status != BT_OK) return locate(loader, status);
    }
    return BT_OK;
}

/* Options of the model that would change ids and are not built. */
static bt_status check_model_options(const json_loader *loader, const json_t *model) {
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    if (json_is_true(json_object_get(model, "byte_fallback")))
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: model option",
                      "byte_fallback");
    const json_t *dropout = json_object_get(model, "dropout");
    if (!is_absent(dropout) && json_number_value(dropout) != 0)
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: model option", "dropout");
    for (size_t i = 0; i < BT_ARRAY_COUNT(affixes); i++) {
        const json_t *affix = json_object_get(model, affixes[i]);
        if (!is_absent(affix) && json_string_length(affix) > 0)
            return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: model option",
                          affixes[i]);
    }
    return BT_OK;
}

static bt_status load_unknown(const json_loader *loader, const json_t *model) {
    const json_t *unknown = json_object_get(model, "unk_token");
    loader->t->fuses_unknown = json_is_true(json_object_get(model, "fuse_unk"));
    if (is_absent(unknown)) return BT_OK;
    const token_text text = text_of(unknown);
    if (text.text == NULL)
        return refuse(loader, BT_ERR_CALLER_FILE, "not a string:", "model.unk_token");
    loader->t->unknown_id = tokenizer_find(loader->t, text.text);
    if (loader->t->unknown_id < 0)
        return refuse(loader, BT_ERR_CALLER_FILE,
                      "the unknown token is not in the vocabulary:", text.text);
    return BT_OK;
}

static bt_status load_model(const json_loader *loader, const json_t *model) {
    if (!json_is_object(model))
        return refuse(loader, BT_ERR_CALLER_FILE, "there is no object", "model");
    const char *type = type_of(model);
    const json_t *merges = json_object_get(model, "merges");
    if (strcmp(type, "BPE") != 0)
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "only BPE is supported, not the model",
                      type);
    if (!json_is_array(merges))
        return refuse(loader, BT_ERR_CALLER_FILE, "there is no array", "model.merges");
    loader->t->ignores_merges = json_is_true(json_object_get(model, "ignore_merges"));
    bt_status status = check_model_options(loader, model);
    if (status == BT_OK) status = load_vocabulary(loader, model);
    if (status == BT_OK)
        status = locate(loader,
                        tokenizer_seal_pieces(loader->t, json_array_size(merges), loader->error));
    return status == BT_OK ? load_merges(loader, merges) : status;
}

static uint32_t added_flags(const json_t *token) {
    static const struct {
        const char *name;
        uint32_t flag;
    } options[] = {{"special", TOKEN_SPECIAL},
                   {"lstrip", TOKEN_LSTRIP},
                   {"rstrip", TOKEN_RSTRIP},
                   {"single_word", TOKEN_SINGLE}};
    uint32_t flags = 0;
    for (size_t i = 0; i < BT_ARRAY_COUNT(options); i++)
        if (json_is_true(json_object_get(token, options[i].name))) flags |= options[i].flag;
    return flags;
}

static bt_status load_added(const json_loader *loader, const json_t *tokens) {
    size_t index = 0;
    json_t *token = NULL;
    if (is_absent(tokens)) return BT_OK;
    if (!json_is_array(tokens))
        return refuse(loader, BT_ERR_CALLER_FILE, "not an array:", "added_tokens");
    json_array_foreach(tokens, index, token) {
        const json_t *id = json_object_get(token, "id");
        const token_text text = text_of(json_object_get(token, "content"));
        if (!json_is_integer(id) || json_integer_value(id) < 0 || text.text == NULL)
            return bt_fail(loader->error, BT_ERR_CALLER_FILE,
                           "%s: added_tokens[%zu] has no id from 0 on, or no content", loader->path,
                           index);
        const bool is_normalized = json_is_true(json_object_get(token, "normalized"));
        const bt_status status =
            tokenizer_put_added(loader->t, (uint64_t)json_integer_value(id), text,
                                added_flags(token), is_normalized, loader->error);
        if (status != BT_OK) return locate(loader, status);
    }
    return BT_OK;
}

/* The parts of a "Sequence", or the one part itself. */
static size_t part_count(const json_t *whole, const json_t *parts) {
    return strcmp(type_of(whole), "Sequence") == 0 ? json_array_size(parts) : 1;
}

static const json_t *part_at(const json_t *whole, const json_t *parts, size_t index) {
    return strcmp(type_of(whole), "Sequence") == 0 ? json_array_get(parts, index) : whole;
}

static bt_status load_normalizer(const json_loader *loader, const json_t *normalizer) {
    if (is_absent(normalizer)) return BT_OK;
    const json_t *parts = json_object_get(normalizer, "normalizers");
    for (size_t i = 0; i < part_count(normalizer, parts); i++) {
        const char *type = type_of(part_at(normalizer, parts, i));
        if (strcmp(type, "NFC") != 0)
            return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: normalizer", type);
        loader->t->normalizes = true;
    }
    return BT_OK;
}

/* One stage of a pre-tokenizer, as far as it is known. */
typedef enum split_stage {
    STAGE_NONE,
    STAGE_DIGITS,     /* each digit alone */
    STAGE_BYTES,      /* the byte alphabet, without splitting */
    STAGE_BYTES_GPT2, /* the byte alphabet after the GPT-2 expression */
    STAGE_GPT2,
    STAGE_LLAMA3,
    STAGE_QWEN2,
} split_stage;

static bt_status read_split(const json_loader *loader, const json_t *part, split_stage *out) {
    const json_t *pattern = json_object_get(part, "pattern");
    const char *regex = json_string_value(json_object_get(pattern, "Regex"));
    const char *behavior = json_string_value(json_object_get(part, "behavior"));
    const bool inverts = json_is_true(json_object_get(part, "invert"));
    if (regex == NULL || behavior == NULL)
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: pre_tokenizer",
                      "Split without a Regex or a behavior");
    /* The expressions match all of a text, so keeping the matches alone is the same. */
    const bool isolates = strcmp(behavior, "Isolated") == 0 && !inverts;
    const bool keeps = strcmp(behavior, "Removed") == 0 && inverts;
    if (!isolates && !keeps)
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: Split behavior", behavior);
    split_rule rule = SPLIT_RULE_WHOLE;
    if (isolates && strcmp(regex, "\\p{N}") == 0)
        *out = STAGE_DIGITS;
    else if (!split_rule_of_regex(regex, &rule))
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "unknown split expression", regex);
    if (rule == SPLIT_RULE_GPT2) *out = STAGE_GPT2;
    if (rule == SPLIT_RULE_LLAMA3) *out = STAGE_LLAMA3;
    if (rule == SPLIT_RULE_QWEN2) *out = STAGE_QWEN2;
    return BT_OK;
}

static bt_status read_stage(const json_loader *loader, const json_t *part, split_stage *out) {
    const char *type = type_of(part);
    if (strcmp(type, "Split") == 0) return read_split(loader, part, out);
    if (strcmp(type, "Digits") == 0) {
        if (!json_is_true(json_object_get(part, "individual_digits")))
            return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: pre_tokenizer",
                          "Digits without individual_digits");
        *out = STAGE_DIGITS;
        return BT_OK;
    }
    if (strcmp(type, "ByteLevel") != 0)
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: pre_tokenizer", type);
    if (json_is_true(json_object_get(part, "add_prefix_space")))
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: pre_tokenizer option",
                      "add_prefix_space");
    *out = json_is_false(json_object_get(part, "use_regex")) ? STAGE_BYTES : STAGE_BYTES_GPT2;
    return BT_OK;
}

static bool rule_of_stages(const split_stage *stages, split_rule *rule_out) {
    static const struct {
        split_stage stages[STAGES_MAX];
        split_rule rule;
    } known[] = {
        {{STAGE_BYTES}, SPLIT_RULE_WHOLE},
        {{STAGE_BYTES_GPT2}, SPLIT_RULE_GPT2},
        {{STAGE_GPT2, STAGE_BYTES}, SPLIT_RULE_GPT2},
        {{STAGE_DIGITS, STAGE_BYTES_GPT2}, SPLIT_RULE_DIGITS_GPT2},
        {{STAGE_DIGITS, STAGE_GPT2, STAGE_BYTES}, SPLIT_RULE_DIGITS_GPT2},
        {{STAGE_LLAMA3, STAGE_BYTES}, SPLIT_RULE_LLAMA3},
        {{STAGE_QWEN2, STAGE_BYTES}, SPLIT_RULE_QWEN2},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(known); i++) {
        if (memcmp(known[i].stages, stages, sizeof known[i].stages) != 0) continue;
        *rule_out = known[i].rule;
        return true;
    }
    return false;
}

static bt_status load_pre_tokenizer(const json_loader *loader, const json_t *pre_tokenizer) {
    split_stage stages[STAGES_MAX] = {STAGE_NONE};
    if (is_absent(pre_tokenizer))
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not byte-level: pre_tokenizer", "null");
    const json_t *parts = json_object_get(pre_tokenizer, "pretokenizers");
    const size_t count = part_count(pre_tokenizer, parts);
    for (size_t i = 0; i < count && i < STAGES_MAX; i++) {
        const bt_status status = read_stage(loader, part_at(pre_tokenizer, parts, i), &stages[i]);
        if (status != BT_OK) return status;
    }
    if (count > STAGES_MAX || !rule_of_stages(stages, &loader->t->rule))
        return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "unknown combination: pre_tokenizer",
                      type_of(pre_tokenizer));
    return BT_OK;
}

/* One item of a template: a special token (appended to its side) or the text itself. */
static bt_status load_template_item(const json_loader *loader, const json_t *item, bool *is_after) {
    tokenizer *t = loader->t;
    const json_t *special = json_object_get(item, "SpecialToken");
    if (special == NULL) {
        *is_after = true;
        return BT_OK;
    }
    const char *name = json_string_value(json_object_get(special, "id"));
    const int32_t id = name == NULL ? -1 : tokenizer_find(t, name);
    if (id < 0)
        return refuse(loader, BT_ERR_CALLER_FILE,
                      "post_processor names a token that is not in the vocabulary:",
                      name == NULL ? "" : name);
    uint32_t *count = *is_after ? &t->suffix_count : &t->prefix_count;
    if (*count == TOKENIZER_POST_MAX)
        return refuse(loader, BT_ERR_CALLER_LIMIT, "too many special tokens:", "post_processor");
    (*is_after ? t->suffix_ids : t->prefix_ids)[(*count)++] = id;
    return BT_OK;
}

static bt_status load_template(const json_loader *loader, const json_t *part) {
    const json_t *items = json_object_get(part, "single");
    if (!json_is_array(items))
        return refuse(loader, BT_ERR_CALLER_FILE, "there is no array", "post_processor.single");
    bool is_after = false;
    for (size_t i = 0; i < json_array_size(items); i++) {
        const bt_status status = load_template_item(loader, json_array_get(items, i), &is_after);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

static bt_status load_post_processor(const json_loader *loader, const json_t *post) {
    if (is_absent(post)) return BT_OK;
    const json_t *parts = json_object_get(post, "processors");
    for (size_t i = 0; i < part_count(post, parts); i++) {
        const json_t *part = part_at(post, parts, i);
        const char *type = type_of(part);
        bt_status status = BT_OK;
        if (strcmp(type, "TemplateProcessing") == 0)
            status = load_template(loader, part);
        else if (strcmp(type, "ByteLevel") != 0) /* which only moves offsets */
            status =
                refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: post_processor", type);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

static bt_status check_decoder(const json_loader *loader, const json_t *decoder) {
    if (is_absent(decoder) || strcmp(type_of(decoder), "ByteLevel") == 0) return BT_OK;
    return refuse(loader, BT_ERR_CALLER_UNSUPPORTED, "not supported: decoder", type_of(decoder));
}

bt_status tokenizer_load_json(const char *path, tokenizer *t, bt_error *error) {
    const json_loader loader = {path, t, error};
    json_t *root = NULL;
    bt_status status = bt_json_file_load(path, &root, error);
    if (status != BT_OK) return status;
    /* Before the vocabulary: a file of another kind is refused for what it is. */
    const json_t *model = json_object_get(root, "model");
    if (json_is_object(model) && strcmp(type_of(model), "BPE") == 0)
        status = load_pre_tokenizer(&loader, json_object_get(root, "pre_tokenizer"));
    if (status == BT_OK) status = load_normalizer(&loader, json_object_get(root, "normalizer"));
    if (status == BT_OK) status = check_decoder(&loader, json_object_get(root, "decoder"));
    if (status == BT_OK) status = load_model(&loader, model);
    if (status == BT_OK) status = load_added(&loader, json_object_get(root, "added_tokens"));
    if (status == BT_OK) status = load_unknown(&loader, model);
    if (status == BT_OK)
        status = load_post_processor(&loader, json_object_get(root, "post_processor"));
    if (status == BT_OK) status = locate(&loader, tokenizer_seal(t, error));
    json_decref(root);
    return status;
}
