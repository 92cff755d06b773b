/* HF folders as models: config.json gives the geometry, generation_config.json more EOS ids,
 * model.safetensors or its shards the weights. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json_file.h"
#include "kernels/model/model_file_hf_internal.h"

enum { PATH_BYTES_MAX = 4096 };

static size_t count_tensors(const model_file *file) {
    return bt_safetensors_set_count(file->safetensors);
}

static const char *tensor_name_at(const model_file *file, size_t index) {
    return bt_safetensors_set_at(file->safetensors, index)->name;
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
    const bt_safetensors_tensor *tensor = bt_safetensors_set_find(file->safetensors, name);
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

typedef bt_status (*settings_reader)(model_file *file, const model_settings *s);

static bt_status read_json(model_file *file, const char *name, settings_reader reader,
                           bt_error *error) {
    char path[PATH_BYTES_MAX];
    json_t *object = NULL;
    bt_status status = join_path(file, name, path, error);
    if (status == BT_OK) status = bt_json_file_load(path, &object, error);
    if (status != BT_OK) return status;
    const model_settings s = {.object = object, .path = path, .error = error};
    status = reader(file, &s);
    json_decref(object);
    return status;
}

bt_status model_file_parse_hf_config(model_file *file, const char *text, size_t bytes,
                                     bt_error *error) {
    json_t *object = NULL;
    bt_status status = bt_json_load_object(text, bytes, file->path, &object, error);
    if (status != BT_OK) return status;
    const model_settings s = {.object = object, .path = file->path, .error = error};
    status = model_file_read_config(file, &s);
    json_decref(object);
    return status;
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
    status = read_json(file, "config.json", model_file_read_config, error);
    if (status == BT_OK && has_generation) {
        status = read_json(file, "generation_config.json", model_file_read_generation, error);
    }
    if (status == BT_OK) status = bt_safetensors_set_open(file->path, &file->safetensors, error);
    if (status != BT_OK) return status;
    file->format = &format_hf;
    model_file_name_by_path(file);
    return BT_OK;
}
