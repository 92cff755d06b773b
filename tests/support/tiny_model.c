/* Geometry, weights and files of the tiny models. Everything follows from family and seed. */
#include "tests/support/tiny_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/tiny_model_internal.h"

#define GOLDEN 0x9E3779B97F4A7C15u

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

model_geometry tiny_model_geometry(const tiny_model *m) {
    model_geometry g = {
        .family = m->family,
        .vocab_size = TINY_MODEL_TOKENS,
        .context_tokens = m->context_tokens != 0 ? m->context_tokens : TINY_MODEL_CONTEXT,
        .hidden_size = 64,
        .intermediate_size = 160,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 16,
        .norm_epsilon = 1e-5f,
        .rope_theta = 10000,
    };
    switch (m->family) {
    case MODEL_FAMILY_LLAMA: break;
    case MODEL_FAMILY_QWEN2:
        g.layers = 3;
        g.intermediate_size = 96;
        g.kv_heads = 1;
        g.rope_theta = 1000000;
        g.norm_epsilon = 1e-6f;
        g.has_tied_embeddings = true;
        g.has_qkv_bias = true;
        break;
    case MODEL_FAMILY_QWEN3:
        g.vocab_size = TINY_MODEL_TOKENS + 16;
        g.intermediate_size = 128;
        g.head_dim = 32;
        g.rope_theta = 1000000;
        g.norm_epsilon = 1e-6f;
        g.has_qk_norm = true;
        break;
    }
    return g;
}

static const char *const family_names[] = {
    [MODEL_FAMILY_LLAMA] = "llama",
    [MODEL_FAMILY_QWEN2] = "qwen2",
    [MODEL_FAMILY_QWEN3] = "qwen3",
};

bool tiny_model_parse_family(const char *name, model_family *out) {
    for (size_t i = 0; i < BT_ARRAY_COUNT(family_names); i++) {
        if (strcmp(name, family_names[i]) != 0) continue;
        *out = (model_family)i;
        return true;
    }
    return false;
}

tiny_shape tiny_model_shape(const tiny_model *m, model_tensor tensor) {
    const model_geometry g = tiny_model_geometry(m);
    const uint32_t q = g.heads * g.head_dim;
    const uint32_t kv = g.kv_heads * g.head_dim;
    const tiny_shape shapes[MODEL_TENSOR_COUNT] = {
        [MODEL_TENSOR_TOKEN_EMBEDDING] = {g.vocab_size, g.hidden_size},
        [MODEL_TENSOR_OUTPUT] = {g.vocab_size, g.hidden_size},
        [MODEL_TENSOR_OUTPUT_NORM] = {0, g.hidden_size},
        [MODEL_TENSOR_ATTENTION_NORM] = {0, g.hidden_size},
        [MODEL_TENSOR_Q] = {q, g.hidden_size},
        [MODEL_TENSOR_K] = {kv, g.hidden_size},
        [MODEL_TENSOR_V] = {kv, g.hidden_size},
        [MODEL_TENSOR_O] = {g.hidden_size, q},
        [MODEL_TENSOR_Q_BIAS] = {0, q},
        [MODEL_TENSOR_K_BIAS] = {0, kv},
        [MODEL_TENSOR_V_BIAS] = {0, kv},
        [MODEL_TENSOR_Q_NORM] = {0, g.head_dim},
        [MODEL_TENSOR_K_NORM] = {0, g.head_dim},
        [MODEL_TENSOR_FFN_NORM] = {0, g.hidden_size},
        [MODEL_TENSOR_GATE] = {g.intermediate_size, g.hidden_size},
        [MODEL_TENSOR_UP] = {g.intermediate_size, g.hidden_size},
        [MODEL_TENSOR_DOWN] = {g.hidden_size, g.intermediate_size},
    };
    const bool is_bias = tensor >= MODEL_TENSOR_Q_BIAS && tensor <= MODEL_TENSOR_V_BIAS;
    const bool is_qk_norm = tensor == MODEL_TENSOR_Q_NORM || tensor == MODEL_TENSOR_K_NORM;
    if ((tensor == MODEL_TENSOR_OUTPUT && g.has_tied_embeddings) || (is_bias && !g.has_qkv_bias) ||
        (is_qk_norm && !g.has_qk_norm)) {
        return (tiny_shape){0};
    }
    return shapes[tensor];
}

/* To nearest, ties to even; the weights are finite. */
static uint16_t round_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t tiny_model_weight(const tiny_model *m, model_tensor tensor, uint32_t layer,
                           uint64_t element) {
    const tiny_shape shape = tiny_model_shape(m, tensor);
    const uint64_t stream = mix(m->seed + GOLDEN * ((uint64_t)tensor + 32 * (uint64_t)layer + 1));
    const uint64_t hash = mix(stream + GOLDEN * (element + 1));
    const float u = (float)((int64_t)(hash >> 40) - (1 << 23)) / (float)(1 << 23);
    if (tensor >= MODEL_TENSOR_Q_BIAS && tensor <= MODEL_TENSOR_V_BIAS) return round_bf16(u * 0.5f);
    if (shape.rows == 0) return round_bf16(1.0f + u * 0.25f);
    const bool is_qk = tensor == MODEL_TENSOR_Q || tensor == MODEL_TENSOR_K;
    return round_bf16(u * (float)((is_qk ? 3.0 : 1.5) / sqrt((double)shape.columns)));
}

int32_t tiny_model_endoftext_id(const tiny_model *m) {
    return m->family == MODEL_FAMILY_LLAMA ? 0 : TINY_MODEL_TOKENS - 3;
}

int32_t tiny_model_im_start_id(const tiny_model *m) {
    return tiny_model_endoftext_id(m) + 1;
}

int32_t tiny_model_im_end_id(const tiny_model *m) {
    return tiny_model_endoftext_id(m) + 2;
}

static uint32_t layers_of(const model_geometry *g, model_tensor tensor) {
    return tensor >= MODEL_TENSOR_ATTENTION_NORM ? g->layers : 1;
}

static bt_status write_config(const tiny_model *m, const char *folder) {
    static const char *const class_names[] = {
        [MODEL_FAMILY_LLAMA] = "LlamaForCausalLM",
        [MODEL_FAMILY_QWEN2] = "Qwen2ForCausalLM",
        [MODEL_FAMILY_QWEN3] = "Qwen3ForCausalLM",
    };
    const model_geometry g = tiny_model_geometry(m);
    test_bytes text = {0};
    test_bytes_print(&text, "{\"architectures\": [\"%s\"], \"model_type\": \"%s\",\n",
                     class_names[m->family], family_names[m->family]);
    test_bytes_print(&text, " \"vocab_size\": %u, \"max_position_embeddings\": %u,\n", g.vocab_size,
                     g.context_tokens);
    test_bytes_print(&text, " \"hidden_size\": %u, \"intermediate_size\": %u,\n", g.hidden_size,
                     g.intermediate_size);
    test_bytes_print(&text, " \"num_hidden_layers\": %u, \"num_attention_heads\": %u,\n", g.layers,
                     g.heads);
    test_bytes_print(&text, " \"num_key_value_heads\": %u, \"head_dim\": %u,\n", g.kv_heads,
                     g.head_dim);
    test_bytes_print(&text,
                     " \"rms_norm_eps\": %g, \"rope_theta\": %.1f, \"rope_scaling\": null,\n",
                     (double)g.norm_epsilon, g.rope_theta);
    test_bytes_print(&text, " \"hidden_act\": \"silu\", \"attention_bias\": false,\n");
    test_bytes_print(&text, " \"tie_word_embeddings\": %s, \"torch_dtype\": \"bfloat16\",\n",
                     g.has_tied_embeddings ? "true" : "false");
    test_bytes_print(&text, " \"sliding_window\": null, \"use_sliding_window\": false,\n");
    test_bytes_print(&text, " \"bos_token_id\": null, \"eos_token_id\": %d}\n",
                     tiny_model_im_end_id(m));
    const bt_status status = test_bytes_write(&text, folder, "config.json");
    test_bytes_fini(&text);
    return status;
}

static bt_status write_generation_config(const tiny_model *m, const char *folder) {
    test_bytes text = {0};
    test_bytes_print(&text, "{\"eos_token_id\": [%d, %d], \"pad_token_id\": %d}\n",
                     tiny_model_im_end_id(m), tiny_model_endoftext_id(m),
                     tiny_model_endoftext_id(m));
    const bt_status status = test_bytes_write(&text, folder, "generation_config.json");
    test_bytes_fini(&text);
    return status;
}

static void add_weights_hf(const tiny_model *m, model_tensor tensor, uint32_t layer,
                           safetensors_writer *w) {
    static const char *const names[MODEL_TENSOR_COUNT] = {
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
        [MODEL_TENSOR_Q_NORM] = "self_attn.q_norm.weight",
        [MODEL_TENSOR_K_NORM] = "self_attn.k_norm.weight",
        [MODEL_TENSOR_FFN_NORM] = "post_attention_layernorm.weight",
        [MODEL_TENSOR_GATE] = "mlp.gate_proj.weight",
        [MODEL_TENSOR_UP] = "mlp.up_proj.weight",
        [MODEL_TENSOR_DOWN] = "mlp.down_proj.weight",
    };
    const tiny_shape shape = tiny_model_shape(m, tensor);
    if (shape.columns == 0) return;
    test_bytes data = {0};
    const uint64_t elements = (uint64_t)shape.columns * (shape.rows > 0 ? shape.rows : 1);
    test_bytes_add(&data, NULL, elements * 2);
    for (uint64_t e = 0; e < elements; e++) {
        const uint16_t bits = tiny_model_weight(m, tensor, layer, e);
        memcpy(data.data + 2 * e, &bits, sizeof bits);
    }
    char name[128];
    const bool is_of_layer = tensor >= MODEL_TENSOR_ATTENTION_NORM;
    (void)snprintf(name, sizeof name, "model.layers.%u.%s", layer, names[tensor]);
    safetensors_writer_tensor(w, is_of_layer ? name : names[tensor], "BF16", shape.rows,
                              shape.columns, &data);
    test_bytes_fini(&data);
}

bt_status tiny_model_write_hf(const tiny_model *m, const char *folder) {
    const model_geometry g = tiny_model_geometry(m);
    bt_status status = write_config(m, folder);
    if (status == BT_OK) status = write_generation_config(m, folder);
    if (status == BT_OK) status = tiny_tokenizer_write_hf(m, folder);
    if (status != BT_OK) return status;
    safetensors_writer writer = {0};
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        for (uint32_t layer = 0; layer < layers_of(&g, (model_tensor)t); layer++)
            add_weights_hf(m, (model_tensor)t, layer, &writer);
    }
    test_bytes file = safetensors_writer_finish(&writer);
    status = test_bytes_write(&file, folder, "model.safetensors");
    test_bytes_fini(&file);
    safetensors_writer_fini(&writer);
    return status;
}

/* Where llama.cpp's converter puts row `row` of HF's Q or K: the halves of a head are interleaved.
 */
static uint64_t converted_row(const model_geometry *g, model_tensor tensor, uint64_t row) {
    const bool is_qk = tensor == MODEL_TENSOR_Q || tensor == MODEL_TENSOR_K;
    if (g->family != MODEL_FAMILY_LLAMA || !is_qk) return row;
    const uint64_t head = row / g->head_dim;
    const uint64_t half = row % g->head_dim / (g->head_dim / 2);
    const uint64_t pair = row % (g->head_dim / 2);
    return head * g->head_dim + 2 * pair + half;
}

static void add_weights_gguf(const tiny_model *m, model_tensor tensor, uint32_t layer,
                             gguf_writer *w) {
    static const char *const names[MODEL_TENSOR_COUNT] = {
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
        [MODEL_TENSOR_Q_NORM] = "attn_q_norm.weight",
        [MODEL_TENSOR_K_NORM] = "attn_k_norm.weight",
        [MODEL_TENSOR_FFN_NORM] = "ffn_norm.weight",
        [MODEL_TENSOR_GATE] = "ffn_gate.weight",
        [MODEL_TENSOR_UP] = "ffn_up.weight",
        [MODEL_TENSOR_DOWN] = "ffn_down.weight",
    };
    const model_geometry g = tiny_model_geometry(m);
    const tiny_shape shape = tiny_model_shape(m, tensor);
    if (shape.columns == 0) return;
    const bool is_matrix = shape.rows > 0;
    const size_t element_bytes = is_matrix ? 2 : 4; /* matrices bf16, vectors f32 */
    const uint64_t rows = is_matrix ? shape.rows : 1;
    test_bytes data = {0};
    test_bytes_add(&data, NULL, rows * shape.columns * element_bytes);
    for (uint64_t e = 0; e < rows * shape.columns; e++) {
        const uint16_t bits = tiny_model_weight(m, tensor, layer, e);
        const uint64_t row = converted_row(&g, tensor, e / shape.columns);
        const uint64_t at = row * shape.columns + e % shape.columns;
        /* The high half of an f32 is its bf16. */
        memcpy(data.data + at * element_bytes + element_bytes - 2, &bits, sizeof bits);
    }
    char name[128];
    const bool is_of_layer = tensor >= MODEL_TENSOR_ATTENTION_NORM;
    (void)snprintf(name, sizeof name, "blk.%u.%s", layer, names[tensor]);
    gguf_writer_tensor(w, is_of_layer ? name : names[tensor],
                       is_matrix ? BT_GGUF_TENSOR_BF16 : BT_GGUF_TENSOR_F32, shape.columns,
                       shape.rows, &data);
    test_bytes_fini(&data);
}

static void add_geometry_gguf(const tiny_model *m, gguf_writer *w) {
    const model_geometry g = tiny_model_geometry(m);
    const struct {
        const char *key;
        uint32_t value;
    } numbers[] = {
        {"context_length", g.context_tokens},
        {"embedding_length", g.hidden_size},
        {"block_count", g.layers},
        {"feed_forward_length", g.intermediate_size},
        {"attention.head_count", g.heads},
        {"attention.head_count_kv", g.kv_heads},
        {"attention.key_length", g.head_dim},
        {"attention.value_length", g.head_dim},
        {"rope.dimension_count", g.head_dim},
    };
    char key[128];
    gguf_writer_string(w, "general.architecture", family_names[m->family]);
    (void)snprintf(key, sizeof key, "tiny-%s", family_names[m->family]);
    gguf_writer_string(w, "general.name", key);
    for (size_t i = 0; i < BT_ARRAY_COUNT(numbers); i++) {
        (void)snprintf(key, sizeof key, "%s.%s", family_names[m->family], numbers[i].key);
        gguf_writer_u32(w, key, numbers[i].value);
    }
    (void)snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", family_names[m->family]);
    gguf_writer_f32(w, key, g.norm_epsilon);
    (void)snprintf(key, sizeof key, "%s.rope.freq_base", family_names[m->family]);
    gguf_writer_f32(w, key, (float)g.rope_theta);
}

void tiny_model_fill_gguf(const tiny_model *m, gguf_writer *w) {
    const model_geometry g = tiny_model_geometry(m);
    gguf_writer_init(w);
    add_geometry_gguf(m, w);
    tiny_tokenizer_add_gguf(m, w);
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        for (uint32_t layer = 0; layer < layers_of(&g, (model_tensor)t); layer++)
            add_weights_gguf(m, (model_tensor)t, layer, w);
    }
}

bt_status tiny_model_write_gguf(const tiny_model *m, const char *folder, const char *name) {
    gguf_writer writer;
    tiny_model_fill_gguf(m, &writer);
    test_bytes file = gguf_writer_finish(&writer);
    const bt_status status = test_bytes_write(&file, folder, name);
    test_bytes_fini(&file);
    gguf_writer_fini(&writer);
    return status;
}
