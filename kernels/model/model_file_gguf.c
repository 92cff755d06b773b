/* GGUF as a model: which keys give the geometry, how tensors are called, which types are read. */
#include <string.h>

#include "kernels/model/model_file_gguf_internal.h"

typedef struct architecture {
    const char *name;
    model_family family;
    bool has_qkv_bias;
    bool has_qk_norm;
    bool has_permuted_qk;
} architecture;

static const architecture architectures[] = {
    {.name = "llama", .family = MODEL_FAMILY_LLAMA, .has_permuted_qk = true},
    {.name = "qwen2", .family = MODEL_FAMILY_QWEN2, .has_qkv_bias = true},
    {.name = "qwen3", .family = MODEL_FAMILY_QWEN3, .has_qk_norm = true},
};

static size_t count_tensors(const model_file *file) {
    return bt_gguf_tensor_count(file->gguf);
}

static const char *tensor_name_at(const model_file *file, size_t index) {
    return bt_gguf_tensor_at(file->gguf, index)->name;
}

/* Read as part of the geometry. */
static bool is_ignored(const char *name) {
    return strcmp(name, MODEL_GGUF_ROPE_TENSOR) == 0;
}

static bool find_encoding(uint32_t type, dequant_encoding *out) {
    switch (type) {
    case BT_GGUF_TENSOR_F32: *out = DEQUANT_ENCODING_F32; return true;
    case BT_GGUF_TENSOR_F16: *out = DEQUANT_ENCODING_F16; return true;
    case BT_GGUF_TENSOR_BF16: *out = DEQUANT_ENCODING_BF16; return true;
    case BT_GGUF_TENSOR_Q4_0: *out = DEQUANT_ENCODING_Q4_0; return true;
    case BT_GGUF_TENSOR_Q4_1: *out = DEQUANT_ENCODING_Q4_1; return true;
    case BT_GGUF_TENSOR_Q5_0: *out = DEQUANT_ENCODING_Q5_0; return true;
    case BT_GGUF_TENSOR_Q5_1: *out = DEQUANT_ENCODING_Q5_1; return true;
    case BT_GGUF_TENSOR_Q8_0: *out = DEQUANT_ENCODING_Q8_0; return true;
    case BT_GGUF_TENSOR_Q4_K: *out = DEQUANT_ENCODING_Q4_K; return true;
    case BT_GGUF_TENSOR_Q5_K: *out = DEQUANT_ENCODING_Q5_K; return true;
    case BT_GGUF_TENSOR_Q6_K: *out = DEQUANT_ENCODING_Q6_K; return true;
    }
    return false;
}

static bool find_tensor(const model_file *file, const char *name, model_weight *out) {
    const bt_gguf_tensor *tensor = bt_gguf_find_tensor(file->gguf, name);
    if (tensor == NULL) return false;
    uint32_t rank = BT_GGUF_DIMENSIONS_MAX; /* trailing dimensions of 1 do not count */
    while (rank > 1 && tensor->dimensions[rank - 1] == 1)
        rank--;
    *out = (model_weight){
        .name = tensor->name,
        .data = tensor->data,
        .rows = tensor->elements / tensor->dimensions[0],
        .columns = tensor->dimensions[0],
        .rank = rank,
        .type_name = bt_gguf_tensor_type_name(tensor->type),
    };
    out->is_encoding_known = find_encoding(tensor->type, &out->encoding);
    return true;
}

static const model_file_format format_gguf = {
    .layer_prefix = "blk.",
    .names =
        {
            [MODEL_TENSOR_TOKEN_EMBEDDING] = "token_embd.weight",
            [MODEL_TENSOR_OUTPUT] = "output.weight",
            [MODEL_TENSOR_OUTPUT_NORM] = "output_norm.weight",
            [MODEL_TENSOR_ATTENTION_NORM] = "attn_norm.weight",
            [MODEL_TENSOR_Q] = "attn_q.weight",
            [MODEL_TENSOR_K] = "attn_k.weight",
            [MODEL_TENSOR_V] = "attn_v.weight",
            [MODEL_TENSOR_O] = "attn_output.weight",
            [MODEL_TENSOR_Q_BIAS] = "attn_q.bias",
            [MODEL_TENSOR_K_BIAS] = "attn_k.bias",
            [MODEL_TENSOR_V_BIAS] = "attn_v.bias",
            [MODEL_TENSOR_O_BIAS] = "attn_output.bias",
            [MODEL_TENSOR_Q_NORM] = "attn_q_norm.weight",
            [MODEL_TENSOR_K_NORM] = "attn_k_norm.weight",
            [MODEL_TENSOR_FFN_NORM] = "ffn_norm.weight",
            [MODEL_TENSOR_GATE] = "ffn_gate.weight",
            [MODEL_TENSOR_UP] = "ffn_up.weight",
            [MODEL_TENSOR_DOWN] = "ffn_down.weight",
        },
    .is_ignored = is_ignored,
    .count = count_tensors,
    .name_at = tensor_name_at,
    .find = find_tensor,
};

static bt_status find_architecture(const gguf_keys *k, const architecture **out) {
    bt_gguf_string name;
    bt_status status = bt_gguf_get_string(k->gguf, "general.architecture", &name, k->error);
    if (status != BT_OK) return status;
    for (size_t i = 0; i < BT_ARRAY_COUNT(architectures); i++) {
        const size_t bytes = strlen(architectures[i].name);
        if (name.bytes != bytes || memcmp(name.text, architectures[i].name, bytes) != 0) continue;
        *out = &architectures[i];
        return BT_OK;
    }
    return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: architecture '%.*s' is not supported (llama, qwen2 and qwen3 are)", k->path,
                   name.bytes > 64 ? 64 : (int)name.bytes, name.text);
}

/* Files that are not one whole model. */
static bt_status check_kind(const gguf_keys *k) {
    bt_gguf_string kind = {.text = "model", .bytes = 5};
    uint32_t parts = 1;
    bt_status status = BT_OK;
    if (bt_gguf_has_key(k->gguf, "general.type")) {
        status = bt_gguf_get_string(k->gguf, "general.type", &kind, k->error);
    }
    if (status == BT_OK && bt_gguf_has_key(k->gguf, "split.count")) {
        status = bt_gguf_get_u32(k->gguf, "split.count", &parts, k->error);
    }
    if (status != BT_OK) return status;
    if (kind.bytes != 5 || memcmp(kind.text, "model", 5) != 0) {
        return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED, "%s: is a GGUF '%.*s', not a model",
                       k->path, kind.bytes > 64 ? 64 : (int)kind.bytes, kind.text);
    }
    if (parts > 1) {
        return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: is one of %u parts of a model; split files are not supported yet",
                       k->path, parts);
    }
    return BT_OK;
}

/* Biases that Llama and Qwen3 may have show in the first layer; if others lack them, that is found
 * as with every tensor. */
static void find_biases(const bt_gguf *gguf, model_geometry *g) {
    if (bt_gguf_find_tensor(gguf, "blk.0.attn_q.bias") != NULL) g->has_qkv_bias = true;
    if (bt_gguf_find_tensor(gguf, "blk.0.attn_output.bias") != NULL) g->has_o_bias = true;
}

/* llama.cpp's converter writes Mistral as `llama`, where the window holds for every layer. */
static bt_status read_window(const gguf_keys *k, model_geometry *g) {
    if (g->family != MODEL_FAMILY_LLAMA) return gguf_keys_require(k, "attention.sliding_window", 0);
    if (!gguf_keys_has(k, "attention.sliding_window")) return BT_OK;
    return gguf_keys_u32(k, "attention.sliding_window", &g->sliding_window);
}

static bt_status read_sizes(const gguf_keys *k, model_geometry *g) {
    const struct {
        const char *key;
        uint32_t *out;
    } keys[] = {
        {"context_length", &g->context_tokens},
        {"embedding_length", &g->hidden_size},
        {"block_count", &g->layers},
        {"feed_forward_length", &g->intermediate_size},
        {"attention.head_count", &g->heads},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(keys); i++) {
        const bt_status status = gguf_keys_u32(k, keys[i].key, keys[i].out);
        if (status != BT_OK) return status;
    }
    g->kv_heads = g->heads;
    if (gguf_keys_has(k, "attention.head_count_kv")) {
        const bt_status status = gguf_keys_u32(k, "attention.head_count_kv", &g->kv_heads);
        if (status != BT_OK) return status;
    }
    if (gguf_keys_has(k, "attention.key_length"))
        return gguf_keys_u32(k, "attention.key_length", &g->head_dim);
    if (g->heads == 0 || g->hidden_size % g->heads != 0) {
        return bt_fail(k->error, BT_ERR_CALLER_FILE,
                       "%s: the hidden size %u cannot be divided among %u heads", k->path,
                       g->hidden_size, g->heads);
    }
    g->head_dim = g->hidden_size / g->heads;
    return BT_OK;
}

static bt_status read_geometry(const gguf_keys *k, model_geometry *g) {
    double epsilon = 0;
    bt_status status = read_sizes(k, g);
    if (status == BT_OK) status = gguf_keys_f64(k, "attention.layer_norm_rms_epsilon", &epsilon);
    g->norm_epsilon = (float)epsilon;
    g->rope_theta = 10000;
    if (status == BT_OK && gguf_keys_has(k, "rope.freq_base")) {
        status = gguf_keys_f64(k, "rope.freq_base", &g->rope_theta);
    }
    if (status != BT_OK) return status;
    const bt_gguf_tensor *embedding = bt_gguf_find_tensor(k->gguf, "token_embd.weight");
    if (embedding == NULL || embedding->dimensions[1] > UINT32_MAX) {
        return bt_fail(k->error, BT_ERR_CALLER_FILE,
                       "%s: tensor token_embd.weight is missing or impossibly large", k->path);
    }
    g->vocab_size = (uint32_t)embedding->dimensions[1];
    g->has_tied_embeddings = bt_gguf_find_tensor(k->gguf, "output.weight") == NULL;
    find_biases(k->gguf, g);
    status = gguf_keys_check(k, g);
    if (status == BT_OK) status = read_window(k, g);
    return status == BT_OK ? model_file_read_gguf_rope(k, g) : status;
}

/* Llama 3 and others end turns with another id than texts; both stop the generation. */
static bt_status read_eos(model_file *file, const gguf_keys *k) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(keys); i++) {
        uint32_t id = 0;
        if (!bt_gguf_has_key(k->gguf, keys[i])) continue;
        bt_status status = bt_gguf_get_u32(k->gguf, keys[i], &id, k->error);
        if (status == BT_OK) status = model_file_add_eos(file, id, keys[i], k->error);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

bt_status model_file_open_gguf(model_file *file, bt_error *error) {
    gguf_keys k = {.gguf = file->gguf, .path = file->path, .error = error};
    const architecture *found = NULL;
    bt_status status = check_kind(&k);
    if (status == BT_OK) status = find_architecture(&k, &found);
    if (status != BT_OK) return status;
    k.architecture = found->name;
    file->format = &format_gguf;
    file->has_permuted_qk = found->has_permuted_qk;
    file->card.geometry = (model_geometry){
        .family = found->family,
        .has_qkv_bias = found->has_qkv_bias,
        .has_qk_norm = found->has_qk_norm,
    };
    status = read_geometry(&k, &file->card.geometry);
    if (status == BT_OK) status = read_eos(file, &k);
    if (status != BT_OK) return status;
    bt_gguf_string name;
    if (bt_gguf_has_key(file->gguf, "general.name")) {
        status = bt_gguf_get_string(file->gguf, "general.name", &name, error);
        if (status == BT_OK) model_file_set_name(file, name.text, name.bytes);
        return status;
    }
    model_file_name_by_path(file);
    return BT_OK;
}
