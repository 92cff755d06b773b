/* config.json and generation_config.json: geometry and EOS ids. */
#include <inttypes.h>
#include <string.h>

#include "kernels/model/model_file_hf_internal.h"

typedef struct architecture {
    const char *class_name;
    const char *model_type;
    model_family family;
    bool has_qkv_bias;       /* whatever attention_bias says */
    bool has_attention_bias; /* attention_bias means q, k, v and o */
    bool has_qk_norm;
    bool has_window; /* sliding_window is a number or null, and holds for every layer */
} architecture;

static const architecture architectures[] = {
    {.class_name = "LlamaForCausalLM",
     .model_type = "llama",
     .family = MODEL_FAMILY_LLAMA,
     .has_attention_bias = true},
    {.class_name = "MistralForCausalLM",
     .model_type = "mistral",
     .family = MODEL_FAMILY_LLAMA,
     .has_window = true},
    {.class_name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .family = MODEL_FAMILY_QWEN2,
     .has_qkv_bias = true},
    {.class_name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .family = MODEL_FAMILY_QWEN3,
     .has_attention_bias = true,
     .has_qk_norm = true},
};

static bt_status find_architecture(const model_settings *s, const architecture **out) {
    const json_t *list = model_settings_find(s, "architectures");
    const char *class_name = NULL;
    const char *model_type = NULL;
    bt_status status = model_settings_string(s, "model_type", &model_type);
    if (status != BT_OK) return status;
    if (list != NULL) {
        class_name = json_string_value(json_array_get(list, 0));
        if (class_name == NULL) return model_settings_fail(s, "architectures", "a list of strings");
    }
    if (class_name == NULL && model_type == NULL) {
        return bt_fail(s->error, BT_ERR_CALLER_FILE,
                       "%s: names neither architectures nor model_type: not a model's config",
                       s->path);
    }
    for (size_t i = 0; i < BT_ARRAY_COUNT(architectures); i++) {
        const architecture *known = &architectures[i];
        if (class_name != NULL && strcmp(class_name, known->class_name) != 0) continue;
        if (model_type != NULL && strcmp(model_type, known->model_type) != 0) continue;
        *out = known;
        return BT_OK;
    }
    return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: architecture %.64s (model_type %.64s) is not supported; the causal models "
                   "of llama, mistral, qwen2 and qwen3 are",
                   s->path, class_name != NULL ? class_name : "(none)",
                   model_type != NULL ? model_type : "(none)");
}

/* Which keys a query sees may differ from layer to layer; only one rule for all is built. */
static bt_status check_layer_types(const model_settings *s, bool slides) {
    const char *wanted = slides ? "sliding_attention" : "full_attention";
    const json_t *types = model_settings_find(s, "layer_types");
    if (types != NULL && !json_is_array(types))
        return model_settings_fail(s, "layer_types", "a list of strings");
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *name = json_string_value(json_array_get(types, i));
        if (name != NULL && strcmp(name, wanted) == 0) continue;
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: layer_types has '%.64s' at %zu, only '%s' is supported in this model",
                       s->path, name != NULL ? name : "(not a string)", i, wanted);
    }
    return BT_OK;
}

/* Mistral slides when sliding_window is a number. Elsewhere the number means nothing unless
 * use_sliding_window, and then only to some of the layers. */
static bt_status read_window(const model_settings *s, const architecture *known,
                             model_geometry *g) {
    const bool has_window = model_settings_find(s, "sliding_window") != NULL;
    uint32_t window = 0;
    bool is_used = known->has_window || known->family == MODEL_FAMILY_LLAMA;
    bt_status status = model_settings_bool(s, "use_sliding_window", &is_used);
    if (status == BT_OK) status = model_settings_u32(s, "sliding_window", false, &window);
    if (status != BT_OK) return status;
    is_used &= has_window;
    if (is_used && !known->has_window) {
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: sliding_window %u in use is not supported in a %s model", s->path,
                       window, known->model_type);
    }
    if (is_used && window == 0) {
        return bt_fail(s->error, BT_ERR_CALLER_FILE,
                       "%s: sliding_window is 0, so that no query would see a key", s->path);
    }
    g->sliding_window = is_used ? window : 0;
    return check_layer_types(s, is_used);
}

static bt_status read_biases(const model_settings *s, const architecture *known,
                             model_geometry *g) {
    bool has_bias = false;
    g->has_qkv_bias = known->has_qkv_bias;
    if (known->has_qkv_bias) return BT_OK; /* Qwen2 has its biases without saying so */
    if (!known->has_attention_bias) return model_settings_require_false(s, "attention_bias");
    const bt_status status = model_settings_bool(s, "attention_bias", &has_bias);
    g->has_qkv_bias = has_bias;
    g->has_o_bias = has_bias;
    return status;
}

static bt_status check_variants(const model_settings *s) {
    const char *activation = "silu";
    bt_status status = model_settings_string(s, "hidden_act", &activation);
    if (status == BT_OK && strcmp(activation, "silu") != 0) {
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: hidden_act '%.64s' is not supported, only 'silu' is", s->path,
                       activation);
    }
    if (status == BT_OK) status = model_settings_require_false(s, "mlp_bias");
    if (status == BT_OK) status = model_settings_require_absent(s, "quantization_config");
    return status;
}

static bt_status read_sizes(const model_settings *s, model_geometry *g) {
    const struct {
        const char *key;
        uint32_t *out;
    } keys[] = {
        {"vocab_size", &g->vocab_size},    {"max_position_embeddings", &g->context_tokens},
        {"hidden_size", &g->hidden_size},  {"intermediate_size", &g->intermediate_size},
        {"num_hidden_layers", &g->layers}, {"num_attention_heads", &g->heads},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(keys); i++) {
        const bt_status status = model_settings_u32(s, keys[i].key, true, keys[i].out);
        if (status != BT_OK) return status;
    }
    g->kv_heads = g->heads;
    bt_status status = model_settings_u32(s, "num_key_value_heads", false, &g->kv_heads);
    if (status != BT_OK) return status;
    if (model_settings_find(s, "head_dim") != NULL)
        return model_settings_u32(s, "head_dim", true, &g->head_dim);
    if (g->heads == 0 || g->hidden_size % g->heads != 0) {
        return bt_fail(s->error, BT_ERR_CALLER_FILE,
                       "%s: hidden_size %u cannot be divided among %u heads", s->path,
                       g->hidden_size, g->heads);
    }
    g->head_dim = g->hidden_size / g->heads;
    return BT_OK;
}

/* eos_token_id: absent, one id, or a list of ids. */
bt_status model_file_read_generation(model_file *file, const model_settings *s) {
    const json_t *value = model_settings_find(s, "eos_token_id");
    const size_t count = json_is_array(value) ? json_array_size(value) : value != NULL ? 1 : 0;
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_integer(id))
            return model_settings_fail(s, "eos_token_id", "an id or a list of ids");
        const bt_status status =
            model_file_add_eos(file, json_integer_value(id), s->path, s->error);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

bt_status model_file_read_config(model_file *file, const model_settings *s) {
    const architecture *known = NULL;
    bt_status status = find_architecture(s, &known);
    if (status == BT_OK) status = check_variants(s);
    if (status != BT_OK) return status;
    model_geometry *g = &file->card.geometry;
    *g = (model_geometry){.family = known->family, .has_qk_norm = known->has_qk_norm};
    double epsilon = 1e-6;
    status = read_biases(s, known, g);
    if (status == BT_OK) status = read_sizes(s, g);
    if (status == BT_OK) status = read_window(s, known, g);
    if (status == BT_OK) status = model_settings_number(s, "rms_norm_eps", false, &epsilon);
    if (status == BT_OK) status = model_file_read_rope(s, g);
    if (status == BT_OK)
        status = model_settings_bool(s, "tie_word_embeddings", &g->has_tied_embeddings);
    g->norm_epsilon = (float)epsilon;
    if (status == BT_OK) status = model_file_read_generation(file, s);
    return status;
}
