/* HF folders as models: config.json gives the geometry, generation_config.json more EOS ids,
 * model.safetensors the weights. Whatever in config.json would change what is computed and is not
 * built is refused by name. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json_file.h"
#include "base/mem.h"
#include "kernels/model/model_file_internal.h"

enum { PATH_BYTES_MAX = 4096 };

/* A JSON object that settings are taken from, and where to put the sentence when one is wrong. */
typedef struct settings {
    const json_t *object;
    const char *path;
    bt_error *error;
} settings;

typedef struct architecture {
    const char *class_name;
    const char *model_type;
    model_family family;
    bool has_qkv_bias;
    bool has_qk_norm;
} architecture;

static const architecture architectures[] = {
    {.class_name = "LlamaForCausalLM", .model_type = "llama", .family = MODEL_FAMILY_LLAMA},
    {.class_name = "MistralForCausalLM", .model_type = "mistral", .family = MODEL_FAMILY_LLAMA},
    {.class_name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .family = MODEL_FAMILY_QWEN2,
     .has_qkv_bias = true},
    {.class_name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .family = MODEL_FAMILY_QWEN3,
     .has_qk_norm = true},
};

static size_t count_tensors(const model_file *file) {
    return bt_safetensors_count(file->safetensors);
}

static const char *tensor_name_at(const model_file *file, size_t index) {
    return bt_safetensors_at(file->safetensors, index)->name;
}

/* Old checkpoints store the table of rope frequencies, which follows from rope_theta; tied ones may
 * repeat the embedding as lm_head. */
static bool is_ignored(const char *name) {
    static const char suffix[] = ".rotary_emb.inv_freq";
    const size_t bytes = strlen(name);
    if (strcmp(name, "lm_head.weight") == 0) return true;
    return bytes >= sizeof suffix && strcmp(name + bytes - (sizeof suffix - 1), suffix) == 0;
}

static bool find_encoding(bt_safetensors_dtype dtype, dequant_encoding *out) {
    switch (dtype) {
    case BT_SAFETENSORS_F32: *out = DEQUANT_ENCODING_F32; return true;
    case BT_SAFETENSORS_F16: *out = DEQUANT_ENCODING_F16; return true;
    case BT_SAFETENSORS_BF16: *out = DEQUANT_ENCODING_BF16; return true;
    case BT_SAFETENSORS_F64:
    case BT_SAFETENSORS_I64:
    case BT_SAFETENSORS_I32:
    case BT_SAFETENSORS_I16:
    case BT_SAFETENSORS_I8:
    case BT_SAFETENSORS_U64:
    case BT_SAFETENSORS_U32:
    case BT_SAFETENSORS_U16:
    case BT_SAFETENSORS_U8:
    case BT_SAFETENSORS_BOOL:
    case BT_SAFETENSORS_F8_E4M3:
    case BT_SAFETENSORS_F8_E5M2:
    case BT_SAFETENSORS_DTYPE_COUNT: break;
    }
    return false;
}

static bool find_tensor(const model_file *file, const char *name, model_weight *out) {
    const bt_safetensors_tensor *tensor = bt_safetensors_find(file->safetensors, name);
    if (tensor == NULL) return false;
    const bool is_matrix = tensor->dimension_count >= 2;
    *out = (model_weight){
        .name = tensor->name,
        .data = tensor->data,
        .rank = tensor->dimension_count,
        .rows = is_matrix ? tensor->dimensions[0] : 1,
        .columns = is_matrix ? tensor->dimensions[1] : tensor->elements,
        .type_name = bt_safetensors_dtype_name(tensor->dtype),
    };
    out->is_encoding_known = find_encoding(tensor->dtype, &out->encoding);
    return true;
}

static const model_file_format format_hf = {
    .layer_prefix = "model.layers.",
    .names =
        {
            [MODEL_TENSOR_TOKEN_EMBEDDING] = "model.embed_tokens.weight",
            [MODEL_TENSOR_OUTPUT] = "lm_head.weight",
            [MODEL_TENSOR_OUTPUT_NORM] = "model.norm.weight",
            [MODEL_TENSOR_ATTENTION_NORM] = "input_layernorm.weight",
            [MODEL_TENSOR_Q] = "self_attn.q_proj.weight",
            [MODEL_TENSOR_K] = "self_attn.k_proj.weight",
            [MODEL_TENSOR_V] = "self_attn.v_proj.weight",
            [MODEL_TENSOR_O] = "self_attn.o_proj.weight",
            [MODEL_TENSOR_Q_BIAS] = "self_attn.q_proj.bias",
            [MODEL_TENSOR_K_BIAS] = "self_attn.k_proj.bias",
            [MODEL_TENSOR_V_BIAS] = "self_attn.v_proj.bias",
            [MODEL_TENSOR_O_BIAS] = "self_attn.o_proj.bias",
            [MODEL_TENSOR_Q_NORM] = "self_attn.q_norm.weight",
            [MODEL_TENSOR_K_NORM] = "self_attn.k_norm.weight",
            [MODEL_TENSOR_FFN_NORM] = "post_attention_layernorm.weight",
            [MODEL_TENSOR_GATE] = "mlp.gate_proj.weight",
            [MODEL_TENSOR_UP] = "mlp.up_proj.weight",
            [MODEL_TENSOR_DOWN] = "mlp.down_proj.weight",
        },
    .is_ignored = is_ignored,
    .count = count_tensors,
    .name_at = tensor_name_at,
    .find = find_tensor,
};

/* NULL when the key is absent or null, which mean the same in these files. */
static const json_t *find(const settings *s, const char *key) {
    const json_t *value = json_object_get(s->object, key);
    return json_is_null(value) ? NULL : value;
}

static bt_status fail_type(const settings *s, const char *key, const char *wanted) {
    return bt_fail(s->error, BT_ERR_CALLER_FILE, "%s: %s is missing or not %s", s->path, key,
                   wanted);
}

/* Absent: `*out` keeps its value, unless the key is required. */
static bt_status get_u32(const settings *s, const char *key, bool is_required, uint32_t *out) {
    const json_t *value = find(s, key);
    if (value == NULL && !is_required) return BT_OK;
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) > UINT32_MAX) {
        return fail_type(s, key, "a whole number of 32 bits");
    }
    *out = (uint32_t)json_integer_value(value);
    return BT_OK;
}

static bt_status get_number(const settings *s, const char *key, bool is_required, double *out) {
    const json_t *value = find(s, key);
    if (value == NULL && !is_required) return BT_OK;
    if (!json_is_number(value)) return fail_type(s, key, "a number");
    *out = json_number_value(value);
    return BT_OK;
}

static bt_status get_bool(const settings *s, const char *key, bool *out) {
    const json_t *value = find(s, key);
    if (value == NULL) return BT_OK;
    if (!json_is_boolean(value)) return fail_type(s, key, "true or false");
    *out = json_is_true(value);
    return BT_OK;
}

static bt_status get_string(const settings *s, const char *key, const char **out) {
    const json_t *value = find(s, key);
    if (value == NULL) return BT_OK;
    if (!json_is_string(value)) return fail_type(s, key, "a string");
    *out = json_string_value(value);
    return BT_OK;
}

/* A flag that is accepted only when absent, null or false. */
static bt_status require_false(const settings *s, const char *key) {
    bool value = false;
    const bt_status status = get_bool(s, key, &value);
    if (status != BT_OK || !value) return status;
    return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED, "%s: %s true is not supported", s->path,
                   key);
}

/* A part that is accepted only when absent or null. */
static bt_status require_absent(const settings *s, const char *key) {
    if (find(s, key) == NULL) return BT_OK;
    return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED, "%s: %s is not supported", s->path, key);
}

static bt_status find_architecture(const settings *s, const architecture **out) {
    const json_t *list = find(s, "architectures");
    const char *class_name = NULL;
    const char *model_type = NULL;
    bt_status status = get_string(s, "model_type", &model_type);
    if (status != BT_OK) return status;
    if (list != NULL) {
        class_name = json_string_value(json_array_get(list, 0));
        if (class_name == NULL) return fail_type(s, "architectures", "a list of strings");
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

/* rope_scaling (older files) or rope_parameters (newer ones, with rope_theta inside). */
static bt_status read_rope_object(const settings *s, const char *key, double *theta) {
    const json_t *object = find(s, key);
    if (object == NULL) return BT_OK;
    if (!json_is_object(object)) return fail_type(s, key, "an object");
    const settings rope = {.object = object, .path = s->path, .error = s->error};
    const char *type = "default";
    bt_status status = get_string(&rope, "type", &type);
    if (status == BT_OK) status = get_string(&rope, "rope_type", &type);
    if (status == BT_OK) status = get_number(&rope, "rope_theta", false, theta);
    if (status != BT_OK) return status;
    if (strcmp(type, "default") != 0) {
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: unknown rope_type '%.64s' (in %s); only 'default' is supported",
                       s->path, type, key);
    }
    const char *name = NULL;
    json_t *value = NULL;
    /* Parameters per layer type, as in models with two kinds of attention. */
    json_object_foreach(json_object_get(s->object, key), name, value) {
        if (json_is_object(value)) {
            return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                           "%s: rope parameters per layer type ('%.64s' in %s) are not supported",
                           s->path, name, key);
        }
    }
    return BT_OK;
}

static bt_status read_rope(const settings *s, model_geometry *g) {
    double partial = 1;
    g->rope_theta = 10000;
    bt_status status = get_number(s, "rope_theta", false, &g->rope_theta);
    if (status == BT_OK) status = read_rope_object(s, "rope_scaling", &g->rope_theta);
    if (status == BT_OK) status = read_rope_object(s, "rope_parameters", &g->rope_theta);
    if (status == BT_OK) status = get_number(s, "partial_rotary_factor", false, &partial);
    if (status == BT_OK && partial != 1) {
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: partial_rotary_factor %g is not supported", s->path, partial);
    }
    return status;
}

/* Attention over a window of recent tokens. Mistral has it on by default when sliding_window is a
 * number, Qwen off unless use_sliding_window. */
static bt_status check_window(const settings *s, const architecture *known) {
    bool is_used = known->family == MODEL_FAMILY_LLAMA;
    uint32_t window = 0;
    bt_status status = get_bool(s, "use_sliding_window", &is_used);
    if (status == BT_OK) status = get_u32(s, "sliding_window", false, &window);
    if (status != BT_OK) return status;
    if (is_used && find(s, "sliding_window") != NULL) {
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: sliding_window %u in use is not supported", s->path, window);
    }
    const json_t *types = find(s, "layer_types");
    size_t index = 0;
    const json_t *type = NULL;
    json_array_foreach(types, index, type) {
        const char *name = json_string_value(type);
        if (name != NULL && strcmp(name, "full_attention") == 0) continue;
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: layer_types has '%.64s' at %zu, only 'full_attention' is supported",
                       s->path, name != NULL ? name : "(not a string)", index);
    }
    return BT_OK;
}

static bt_status check_variants(const settings *s, const architecture *known) {
    const char *activation = "silu";
    bt_status status = get_string(s, "hidden_act", &activation);
    if (status == BT_OK && strcmp(activation, "silu") != 0) {
        return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: hidden_act '%.64s' is not supported, only 'silu' is", s->path,
                       activation);
    }
    if (status == BT_OK) status = require_false(s, "mlp_bias");
    /* Qwen2 has its biases without saying so; here the flag would add one to o_proj as well. */
    if (status == BT_OK) status = require_false(s, "attention_bias");
    if (status == BT_OK) status = require_absent(s, "quantization_config");
    if (status == BT_OK) status = check_window(s, known);
    return status;
}

static bt_status read_sizes(const settings *s, model_geometry *g) {
    const struct {
        const char *key;
        uint32_t *out;
    } keys[] = {
        {"vocab_size", &g->vocab_size},    {"max_position_embeddings", &g->context_tokens},
        {"hidden_size", &g->hidden_size},  {"intermediate_size", &g->intermediate_size},
        {"num_hidden_layers", &g->layers}, {"num_attention_heads", &g->heads},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(keys); i++) {
        const bt_status status = get_u32(s, keys[i].key, true, keys[i].out);
        if (status != BT_OK) return status;
    }
    g->kv_heads = g->heads;
    bt_status status = get_u32(s, "num_key_value_heads", false, &g->kv_heads);
    if (status != BT_OK) return status;
    if (find(s, "head_dim") != NULL) return get_u32(s, "head_dim", true, &g->head_dim);
    if (g->heads == 0 || g->hidden_size % g->heads != 0) {
        return bt_fail(s->error, BT_ERR_CALLER_FILE,
                       "%s: hidden_size %u cannot be divided among %u heads", s->path,
                       g->hidden_size, g->heads);
    }
    g->head_dim = g->hidden_size / g->heads;
    return BT_OK;
}

/* eos_token_id: absent, one id, or a list of ids. */
static bt_status read_eos(model_file *file, const settings *s) {
    const json_t *value = find(s, "eos_token_id");
    const size_t count = json_is_array(value) ? json_array_size(value) : value != NULL ? 1 : 0;
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_integer(id)) return fail_type(s, "eos_token_id", "an id or a list of ids");
        const bt_status status =
            model_file_add_eos(file, json_integer_value(id), s->path, s->error);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

static bt_status read_config(model_file *file, const settings *s) {
    const architecture *known = NULL;
    bt_status status = find_architecture(s, &known);
    if (status == BT_OK) status = check_variants(s, known);
    if (status != BT_OK) return status;
    model_geometry *g = &file->card.geometry;
    *g = (model_geometry){
        .family = known->family,
        .has_qkv_bias = known->has_qkv_bias,
        .has_qk_norm = known->has_qk_norm,
    };
    double epsilon = 1e-6;
    status = read_sizes(s, g);
    if (status == BT_OK) status = get_number(s, "rms_norm_eps", false, &epsilon);
    if (status == BT_OK) status = read_rope(s, g);
    if (status == BT_OK) status = get_bool(s, "tie_word_embeddings", &g->has_tied_embeddings);
    g->norm_epsilon = (float)epsilon;
    if (status == BT_OK) status = read_eos(file, s);
    return status;
}

static bt_status join_path(const model_file *file, const char *name, char out[PATH_BYTES_MAX],
                           bt_error *error) {
    const int bytes = snprintf(out, PATH_BYTES_MAX, "%s/%s", file->path, name);
    if (bytes > 0 && bytes < PATH_BYTES_MAX) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_FILE, "%s: the path is too long", file->path);
}

static bt_status exists_in_folder(const model_file *file, const char *name, bool *out,
                                  bt_error *error) {
    char path[PATH_BYTES_MAX];
    const bt_status status = join_path(file, name, path, error);
    if (status == BT_OK) *out = access(path, F_OK) == 0;
    return status;
}

typedef bt_status (*settings_reader)(model_file *file, const settings *s);

static bt_status read_json(model_file *file, const char *name, settings_reader reader,
                           bt_error *error) {
    char path[PATH_BYTES_MAX];
    json_t *object = NULL;
    bt_status status = join_path(file, name, path, error);
    if (status == BT_OK) status = bt_json_file_load(path, &object, error);
    if (status != BT_OK) return status;
    const settings s = {.object = object, .path = path, .error = error};
    status = reader(file, &s);
    json_decref(object);
    return status;
}

static bt_status open_weights(model_file *file, bt_error *error) {
    char path[PATH_BYTES_MAX];
    bool has_one = false;
    bool has_index = false;
    bt_status status = exists_in_folder(file, "model.safetensors", &has_one, error);
    if (status == BT_OK) {
        status = exists_in_folder(file, "model.safetensors.index.json", &has_index, error);
    }
    if (status == BT_OK) status = join_path(file, "model.safetensors", path, error);
    if (status != BT_OK) return status;
    if (!has_one && has_index) {
        return bt_fail(error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: is a sharded checkpoint (model.safetensors.index.json), which is not "
                       "supported yet",
                       file->path);
    }
    return bt_safetensors_open(path, &file->safetensors, error);
}

bt_status model_file_open_hf(model_file *file, bt_error *error) {
    bool has_config = false;
    bool has_generation = false;
    bt_status status = exists_in_folder(file, "config.json", &has_config, error);
    if (status == BT_OK) {
        status = exists_in_folder(file, "generation_config.json", &has_generation, error);
    }
    if (status != BT_OK) return status;
    if (!has_config) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: is a folder without config.json, so not a model", file->path);
    }
    status = read_json(file, "config.json", read_config, error);
    if (status == BT_OK && has_generation) {
        status = read_json(file, "generation_config.json", read_eos, error);
    }
    if (status == BT_OK) status = open_weights(file, error);
    if (status != BT_OK) return status;
    file->format = &format_hf;
    model_file_name_by_path(file);
    return BT_OK;
}
