/* Geometry, weights and files of the tiny models. Everything follows from family and seed. */
#include "tests/support/tiny_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/tiny_model_internal.h"

#define GOLDEN 0x9E3779B97F4A7C15u
#define LN_4   1.3862943611198906 /* written out: libraries differ in the last bit of a logarithm */

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Llama has yarn's defaults, Qwen2 a weighted attention factor, Qwen3 a given one and a ramp that
 * is not rounded. */
static model_rope_scaling yarn_scaling(const tiny_model *m) {
    model_rope_scaling s = {
        .beta_fast = 32,
        .beta_slow = 1,
        .attention_factor = 0.1 * LN_4 + 1,
        .has_whole_ramp = true,
    };
    switch (m->family) {
    case MODEL_FAMILY_LLAMA: break;
    case MODEL_FAMILY_QWEN2:
        s.beta_fast = 16;
        s.beta_slow = 0.5;
        s.attention_factor = (0.1 * 1.5 * LN_4 + 1) / (0.1 * 0.5 * LN_4 + 1);
        break;
    case MODEL_FAMILY_QWEN3:
        s.attention_factor = 1.25;
        s.has_whole_ramp = false;
        break;
    }
    return s;
}

static model_rope_scaling rope_scaling(const tiny_model *m, uint32_t context_tokens) {
    model_rope_scaling s = {0};
    if (m->rope == MODEL_ROPE_KIND_PLAIN) return s;
    if (m->rope == MODEL_ROPE_KIND_YARN) s = yarn_scaling(m);
    if (m->rope == MODEL_ROPE_KIND_LLAMA3) {
        s.low_frequency_factor = 1;
        s.high_frequency_factor = 4;
    }
    if (m->rope != MODEL_ROPE_KIND_LINEAR) s.original_context_tokens = context_tokens / 4;
    s.kind = m->rope;
    s.factor = 4;
    return s;
}

uint32_t tiny_model_tokens(const tiny_model *m) {
    return m->tokens != 0 ? m->tokens : TINY_MODEL_TOKENS;
}

model_geometry tiny_model_geometry(const tiny_model *m) {
    const bool is_scaled = m->rope != MODEL_ROPE_KIND_PLAIN;
    const uint32_t context = is_scaled ? TINY_MODEL_SCALED_CONTEXT : TINY_MODEL_CONTEXT;
    model_geometry g = {
        .family = m->family,
        .vocab_size = tiny_model_tokens(m),
        .context_tokens = m->context_tokens != 0 ? m->context_tokens : context,
        .sliding_window = m->sliding_window,
        .has_qkv_bias = m->has_attention_bias,
        .has_o_bias = m->has_attention_bias,
        .has_tied_embeddings = m->has_tied_output,
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
        g.vocab_size = tiny_model_tokens(m) + 16;
        g.intermediate_size = 128;
        g.head_dim = 32;
        g.rope_theta = 1000000;
        g.norm_epsilon = 1e-6f;
        g.has_qk_norm = true;
        break;
    }
    g.rope_scaling = rope_scaling(m, g.context_tokens);
    return g;
}

static const char *const family_names[] = {
    [MODEL_FAMILY_LLAMA] = "llama",
    [MODEL_FAMILY_QWEN2] = "qwen2",
    [MODEL_FAMILY_QWEN3] = "qwen3",
};

bool tiny_model_parse(const char *name, tiny_model *out) {
    static const struct {
        const char *name;
        model_family family;
        bool has_tied_output;
        uint32_t sliding_window;
        uint32_t tokens;
    } families[] = {
        {"llama", MODEL_FAMILY_LLAMA, false, 0, 0},
        {"smollm2", MODEL_FAMILY_LLAMA, true, 0, 0},
        {"mistral", MODEL_FAMILY_LLAMA, false, TINY_MODEL_WINDOW, 0},
        {"qwen2", MODEL_FAMILY_QWEN2, false, 0, 0},
        {"qwen3", MODEL_FAMILY_QWEN3, false, 0, 0},
        {"wide", MODEL_FAMILY_QWEN3, false, 0, TINY_MODEL_WIDE_TOKENS},
    };
    static const struct {
        const char *suffix;
        model_rope_kind rope;
        bool has_attention_bias;
    } variants[] = {
        {"", MODEL_ROPE_KIND_PLAIN, false},         {"-linear", MODEL_ROPE_KIND_LINEAR, false},
        {"-llama3", MODEL_ROPE_KIND_LLAMA3, false}, {"-yarn", MODEL_ROPE_KIND_YARN, false},
        {"-bias", MODEL_ROPE_KIND_PLAIN, true},
    };
    for (size_t f = 0; f < BT_ARRAY_COUNT(families); f++) {
        const size_t bytes = strlen(families[f].name);
        if (strncmp(name, families[f].name, bytes) != 0) continue;
        for (size_t v = 0; v < BT_ARRAY_COUNT(variants); v++) {
            if (strcmp(name + bytes, variants[v].suffix) != 0) continue;
            if (variants[v].has_attention_bias && strcmp(families[f].name, "llama") != 0) continue;
            out->family = families[f].family;
            out->has_tied_output = families[f].has_tied_output;
            out->sliding_window = families[f].sliding_window;
            out->tokens = families[f].tokens;
            out->rope = variants[v].rope;
            out->has_attention_bias = variants[v].has_attention_bias;
            return true;
        }
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
        [MODEL_TENSOR_O_BIAS] = {0, g.hidden_size},
    };
    const bool is_bias = tensor >= MODEL_TENSOR_Q_BIAS && tensor <= MODEL_TENSOR_V_BIAS;
    const bool is_qk_norm = tensor == MODEL_TENSOR_Q_NORM || tensor == MODEL_TENSOR_K_NORM;
    if ((tensor == MODEL_TENSOR_OUTPUT && g.has_tied_embeddings) || (is_bias && !g.has_qkv_bias) ||
        (tensor == MODEL_TENSOR_O_BIAS && !g.has_o_bias) || (is_qk_norm && !g.has_qk_norm)) {
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
    const bool is_qkv_bias = tensor >= MODEL_TENSOR_Q_BIAS && tensor <= MODEL_TENSOR_V_BIAS;
    if (is_qkv_bias || tensor == MODEL_TENSOR_O_BIAS) return round_bf16(u * 0.5f);
    if (shape.rows == 0) return round_bf16(1.0f + u * 0.25f);
    const bool is_qk = tensor == MODEL_TENSOR_Q || tensor == MODEL_TENSOR_K;
    return round_bf16(u * (float)((is_qk ? 3.0 : 1.5) / sqrt((double)shape.columns)));
}

int32_t tiny_model_endoftext_id(const tiny_model *m) {
    return m->family == MODEL_FAMILY_LLAMA ? 0 : (int32_t)tiny_model_tokens(m) - 3;
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

/* In the spellings that files have: old and new. */
static void add_rope(const tiny_model *m, test_bytes *text) {
    const model_geometry g = tiny_model_geometry(m);
    const model_rope_scaling *s = &g.rope_scaling;
    test_bytes_print(text, " \"rope_theta\": %.1f, \"rope_scaling\": ", g.rope_theta);
    switch (m->rope) {
    case MODEL_ROPE_KIND_PLAIN:
    case MODEL_ROPE_KIND_DIVISORS: test_bytes_add_text(text, "null,\n"); return;
    case MODEL_ROPE_KIND_LINEAR:
        test_bytes_print(text, "{\"type\": \"linear\", \"factor\": %g},\n", s->factor);
        return;
    case MODEL_ROPE_KIND_LLAMA3:
        test_bytes_print(text,
                         "{\"rope_type\": \"llama3\", \"factor\": %g, \"low_freq_factor\": %g, "
                         "\"high_freq_factor\": %g",
                         s->factor, s->low_frequency_factor, s->high_frequency_factor);
        break;
    case MODEL_ROPE_KIND_YARN:
        test_bytes_print(text, "{\"%s\": \"yarn\", \"factor\": %g",
                         m->family == MODEL_FAMILY_LLAMA ? "type" : "rope_type", s->factor);
        if (m->family == MODEL_FAMILY_QWEN2)
            test_bytes_print(text,
                             ", \"beta_fast\": %g, \"beta_slow\": %g, \"mscale\": 1.5, "
                             "\"mscale_all_dim\": 0.5",
                             s->beta_fast, s->beta_slow);
        if (m->family == MODEL_FAMILY_QWEN3)
            test_bytes_print(text, ", \"attention_factor\": %g, \"truncate\": false",
                             s->attention_factor);
        break;
    }
    test_bytes_print(text, ", \"original_max_position_embeddings\": %u},\n",
                     s->original_context_tokens);
}

static bt_status write_config(const tiny_model *m, const char *folder) {
    static const char *const class_names[] = {
        [MODEL_FAMILY_LLAMA] = "LlamaForCausalLM",
        [MODEL_FAMILY_QWEN2] = "Qwen2ForCausalLM",
        [MODEL_FAMILY_QWEN3] = "Qwen3ForCausalLM",
    };
    const model_geometry g = tiny_model_geometry(m);
    test_bytes text = {0};
    const bool is_mistral = m->sliding_window > 0;
    test_bytes_print(&text, "{\"architectures\": [\"%s\"], \"model_type\": \"%s\",\n",
                     is_mistral ? "MistralForCausalLM" : class_names[m->family],
                     is_mistral ? "mistral" : family_names[m->family]);
    test_bytes_print(&text, " \"vocab_size\": %u, \"max_position_embeddings\": %u,\n", g.vocab_size,
                     g.context_tokens);
    test_bytes_print(&text, " \"hidden_size\": %u, \"intermediate_size\": %u,\n", g.hidden_size,
                     g.intermediate_size);
    test_bytes_print(&text, " \"num_hidden_layers\": %u, \"num_attention_heads\": %u,\n", g.layers,
                     g.heads);
    test_bytes_print(&text, " \"num_key_value_heads\": %u, \"head_dim\": %u,\n", g.kv_heads,
                     g.head_dim);
    test_bytes_print(&text, " \"rms_norm_eps\": %g,", (double)g.norm_epsilon);
    add_rope(m, &text);
    test_bytes_print(&text, " \"hidden_act\": \"silu\", \"attention_bias\": %s,\n",
                     m->has_attention_bias ? "true" : "false");
    test_bytes_print(&text, " \"tie_word_embeddings\": %s, \"torch_dtype\": \"bfloat16\",\n",
                     g.has_tied_embeddings ? "true" : "false");
    if (is_mistral)
        test_bytes_print(&text, " \"sliding_window\": %u,\n", m->sliding_window);
    else
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

/* Gives the tensor's name too. */
static const char *add_weights_hf(const tiny_model *m, model_tensor tensor, uint32_t layer,
                                  safetensors_writer *w, char name[128]) {
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
        [MODEL_TENSOR_O_BIAS] = "self_attn.o_proj.bias",
    };
    const tiny_shape shape = tiny_model_shape(m, tensor);
    if (shape.columns == 0) return NULL;
    test_bytes data = {0};
    const uint64_t elements = (uint64_t)shape.columns * (shape.rows > 0 ? shape.rows : 1);
    test_bytes_add(&data, NULL, elements * 2);
    for (uint64_t e = 0; e < elements; e++) {
        const uint16_t bits = tiny_model_weight(m, tensor, layer, e);
        memcpy(data.data + 2 * e, &bits, sizeof bits);
    }
    if (tensor >= MODEL_TENSOR_ATTENTION_NORM)
        (void)snprintf(name, 128, "model.layers.%u.%s", layer, names[tensor]);
    else
        (void)snprintf(name, 128, "%s", names[tensor]);
    safetensors_writer_tensor(w, name, "BF16", shape.rows, shape.columns, &data);
    test_bytes_fini(&data);
    return name;
}

static void shard_name(uint32_t shard, uint32_t shards, char out[64]) {
    if (shards <= 1)
        (void)snprintf(out, 64, "model.safetensors");
    else
        (void)snprintf(out, 64, "model-%05u-of-%05u.safetensors", shard + 1, shards);
}

/* One file of weights: every shards-th tensor from the shard's own. Adds their names to the index.
 */
static bt_status write_shard(const tiny_model *m, const char *folder, uint32_t shard,
                             test_bytes *map) {
    const model_geometry g = tiny_model_geometry(m);
    const uint32_t shards = m->shards > 1 ? m->shards : 1;
    safetensors_writer writer = {0};
    char file_name[64];
    char name[128];
    uint32_t number = 0;
    shard_name(shard, shards, file_name);
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        for (uint32_t layer = 0; layer < layers_of(&g, (model_tensor)t); layer++) {
            if (number++ % shards != shard) continue;
            if (add_weights_hf(m, (model_tensor)t, layer, &writer, name) == NULL) continue;
            test_bytes_print(map, "%s\"%s\": \"%s\"", map->count > 0 ? ",\n" : "", name, file_name);
        }
    }
    test_bytes file = safetensors_writer_finish(&writer);
    const bt_status status = test_bytes_write(&file, folder, file_name);
    test_bytes_fini(&file);
    safetensors_writer_fini(&writer);
    return status;
}

static bt_status write_index(const test_bytes *map, const char *folder) {
    test_bytes text = {0};
    test_bytes_add_text(&text, "{\"metadata\": {\"total_size\": 0}, \"weight_map\": {");
    test_bytes_add(&text, map->data, map->count);
    test_bytes_add_text(&text, "}}\n");
    const bt_status status = test_bytes_write(&text, folder, "model.safetensors.index.json");
    test_bytes_fini(&text);
    return status;
}

bt_status tiny_model_write_hf(const tiny_model *m, const char *folder) {
    test_bytes map = {0};
    bt_status status = write_config(m, folder);
    if (status == BT_OK) status = write_generation_config(m, folder);
    if (status == BT_OK) status = tiny_tokenizer_write_hf(m, folder);
    if (status != BT_OK) return status;
    uint32_t shard = 0;
    do {
        status = write_shard(m, folder, shard, &map);
    } while (status == BT_OK && ++shard < m->shards);
    if (status == BT_OK && m->shards > 1) status = write_index(&map, folder);
    test_bytes_fini(&map);
    return status;
}

/* Where llama.cpp's converter puts row `row` of HF's Q or K, or element `row` of their biases: the
 * halves of a head are interleaved. */
static uint64_t converted_row(const model_geometry *g, model_tensor tensor, uint64_t row) {
    const bool is_qk = tensor == MODEL_TENSOR_Q || tensor == MODEL_TENSOR_K ||
                       tensor == MODEL_TENSOR_Q_BIAS || tensor == MODEL_TENSOR_K_BIAS;
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
        [MODEL_TENSOR_O_BIAS] = "attn_output.bias",
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
        const uint64_t width = is_matrix ? shape.columns : 1;
        const uint64_t at = converted_row(&g, tensor, e / width) * width + e % width;
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
    if (m->sliding_window == 0) return;
    (void)snprintf(key, sizeof key, "%s.attention.sliding_window", family_names[m->family]);
    gguf_writer_u32(w, key, m->sliding_window);
}

/* Llama 3's scaling is a divisor per frequency in a tensor of its own. */
static void add_rope_divisors(const model_geometry *g, gguf_writer *w) {
    const model_rope_scaling *s = &g->rope_scaling;
    test_bytes data = {0};
    for (uint32_t i = 0; i < g->head_dim / 2; i++) {
        const double frequency = pow(g->rope_theta, -2.0 * i / g->head_dim);
        const double turns = s->original_context_tokens * frequency / (2 * 3.14159265358979323846);
        double kept = (turns - s->low_frequency_factor) /
                      (s->high_frequency_factor - s->low_frequency_factor);
        kept = fmin(fmax(kept, 0), 1);
        test_bytes_add_f32(&data, (float)(1 / ((1 - kept) / s->factor + kept)));
    }
    gguf_writer_tensor(w, "rope_freqs.weight", BT_GGUF_TENSOR_F32, g->head_dim / 2, 0, &data);
    test_bytes_fini(&data);
}

static void add_rope_f32(const tiny_model *m, gguf_writer *w, const char *name, double value) {
    char key[128];
    (void)snprintf(key, sizeof key, "%s.rope.scaling.%s", family_names[m->family], name);
    gguf_writer_f32(w, key, (float)value);
}

static void add_rope_gguf(const tiny_model *m, gguf_writer *w) {
    const model_geometry g = tiny_model_geometry(m);
    const model_rope_scaling *s = &g.rope_scaling;
    char key[128];
    if (s->kind == MODEL_ROPE_KIND_PLAIN) return;
    if (s->kind == MODEL_ROPE_KIND_LLAMA3) {
        add_rope_divisors(&g, w);
        return;
    }
    (void)snprintf(key, sizeof key, "%s.rope.scaling.type", family_names[m->family]);
    gguf_writer_string(w, key, s->kind == MODEL_ROPE_KIND_LINEAR ? "linear" : "yarn");
    add_rope_f32(m, w, "factor", s->factor);
    if (s->kind == MODEL_ROPE_KIND_LINEAR) return;
    (void)snprintf(key, sizeof key, "%s.rope.scaling.original_context_length",
                   family_names[m->family]);
    gguf_writer_u32(w, key, s->original_context_tokens);
    add_rope_f32(m, w, "yarn_beta_fast", s->beta_fast);
    add_rope_f32(m, w, "yarn_beta_slow", s->beta_slow);
    add_rope_f32(m, w, "attn_factor", s->attention_factor / (0.1 * LN_4 + 1));
}

void tiny_model_fill_gguf(const tiny_model *m, gguf_writer *w) {
    const model_geometry g = tiny_model_geometry(m);
    gguf_writer_init(w);
    add_geometry_gguf(m, w);
    add_rope_gguf(m, w);
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
