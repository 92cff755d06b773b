/* HF folders made here and changed: what of config.json is refused, and what means the same. */
#include "kernels/model/model_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/file_map.h"
#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"

typedef struct fixture {
    test_folder folder;
} fixture;

static int set_up(void **state) {
    static fixture f;
    f.folder = test_folder_make();
    *state = &f;
    return 0;
}

static int tear_down(void **state) {
    const fixture *f = *state;
    test_folder_remove(&f->folder);
    return 0;
}

static void check_refusal(const char *path, bt_status status, const char *sentence) {
    model_file *file = NULL;
    bt_error error = {0};
    const bt_status got = model_file_open(path, &file, &error);
    if (got != status || strstr(error.text, sentence) == NULL) {
        fail_msg("wanted %d '%s', got %d '%s'", status, sentence, got, error.text);
    }
    assert_null(file);
}

/* Replaces the one place of `from` in the folder's JSON file, or appends after the brace. */
static void edit_json(const fixture *f, const char *name, const char *from, const char *to) {
    char path[400];
    bt_file_map map;
    test_bytes text = {0};
    (void)snprintf(path, sizeof path, "%s/%s", f->folder.path, name);
    assert_int_equal(bt_file_map_open(path, &map, NULL), BT_OK);
    const uint8_t *at = memmem(map.data, map.bytes, from, strlen(from));
    assert_non_null(at);
    const size_t before = (size_t)(at - map.data);
    test_bytes_add(&text, map.data, before);
    test_bytes_add_text(&text, to);
    test_bytes_add(&text, at + strlen(from), map.bytes - before - strlen(from));
    bt_file_map_close(&map);
    assert_int_equal(test_bytes_write(&text, f->folder.path, name), BT_OK);
    test_bytes_fini(&text);
}

typedef struct config_case {
    model_family family;
    const char *from;
    const char *to;
    bt_status status; /* BT_OK: it is read all the same */
    const char *sentence;
} config_case;

static void check_config_case(const fixture *f, const config_case *c) {
    const tiny_model m = {.family = c->family, .seed = 3};
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(f, "config.json", c->from, c->to);
    if (c->status != BT_OK) {
        check_refusal(f->folder.path, c->status, c->sentence);
        return;
    }
    model_file *file = NULL;
    bt_error error = {0};
    if (model_file_open(f->folder.path, &file, &error) != BT_OK) {
        fail_msg("%s: %s", c->to, error.text);
    }
    model_file_close(file);
}

#define LLAMA       MODEL_FAMILY_LLAMA
#define QWEN2       MODEL_FAMILY_QWEN2
#define QWEN3       MODEL_FAMILY_QWEN3
#define UNSUPPORTED BT_ERR_CALLER_UNSUPPORTED
#define FILE_ERROR  BT_ERR_CALLER_FILE

static const config_case config_variants[] = {
    {LLAMA, "LlamaForCausalLM", "GemmaForCausalLM", UNSUPPORTED,
     "architecture GemmaForCausalLM (model_type llama) is not supported"},
    {LLAMA, "\"model_type\": \"llama\"", "\"model_type\": \"gemma\"", UNSUPPORTED,
     "(model_type gemma) is not supported"},
    {QWEN2, "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", UNSUPPORTED,
     "architecture Qwen2ForSequenceClassification"},
    {LLAMA, "[\"LlamaForCausalLM\"]", "[3]", FILE_ERROR, "architectures is missing or not"},
    {LLAMA, "[\"LlamaForCausalLM\"], \"model_type\": \"llama\"", "null", FILE_ERROR,
     "names neither architectures nor model_type"},
    {LLAMA, "\"silu\"", "\"gelu\"", UNSUPPORTED, "hidden_act 'gelu' is not supported"},
    {LLAMA, "\"attention_bias\": false", "\"attention_bias\": true", FILE_ERROR,
     "tensor model.layers.0.self_attn.q_proj.bias is missing"},
    {LLAMA, "\"attention_bias\": false", "\"mlp_bias\": true", UNSUPPORTED,
     "mlp_bias true is not supported"},
    {LLAMA, "\"attention_bias\": false", "\"mlp_bias\": 1", FILE_ERROR,
     "mlp_bias is missing or not true or false"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 2}", UNSUPPORTED,
     "unknown rope_type 'dynamic' (in rope_scaling)"},
    {LLAMA, "\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"longrope\"}", UNSUPPORTED,
     "unknown rope_type 'longrope'"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"type\": \"mrope\", \"mrope_section\": [2, 3, 3]}", UNSUPPORTED,
     "unknown rope_type 'mrope'"},
    {LLAMA, "\"rope_scaling\": null", "\"rope_parameters\": {\"rope_type\": \"su\"}", UNSUPPORTED,
     "unknown rope_type 'su' (in rope_parameters)"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"default\", \"mrope_section\": [2, 3, 3]}", UNSUPPORTED,
     "unknown key 'mrope_section' in rope_scaling"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"yarn\", \"type\": \"linear\", \"factor\": 2}", FILE_ERROR,
     "rope_type 'yarn' and type 'linear'"},
    {LLAMA, "\"rope_scaling\": null", "\"rope_scaling\": {\"factor\": 2}", FILE_ERROR,
     "rope_scaling has a factor and no rope_type"},
    {LLAMA, "\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": 4}", FILE_ERROR,
     "rope_type is missing or not a string"},
    {LLAMA, "\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": \"linear\"}", FILE_ERROR,
     "factor is missing or not a number"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 0.5}", FILE_ERROR,
     "the rope scaling factor is 0.5"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 1e300}", FILE_ERROR,
     "the rope scaling factor is 1e+300"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2, \"partial_rotary_factor\": "
     "0.25}",
     UNSUPPORTED, "partial_rotary_factor 0.25"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8}", FILE_ERROR,
     "low_freq_factor is missing"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
     "\"high_freq_factor\": 1, \"original_max_position_embeddings\": 64}",
     FILE_ERROR, "low frequency factor 1 must be positive and below the high one, 1"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
     "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 0}",
     FILE_ERROR, "the original context of the rope scaling is 0"},
    {LLAMA, "\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": \"yarn\"}", FILE_ERROR,
     "factor is missing"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 64, "
     "\"factor\": 4, \"beta_fast\": -1}",
     FILE_ERROR, "beta_fast -1"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 64, "
     "\"factor\": 4, \"attention_factor\": 0}",
     FILE_ERROR, "attention factor is 0"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 64, "
     "\"factor\": 4, \"truncate\": 1}",
     FILE_ERROR, "truncate is missing or not true or false"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"yarn\", \"original_max_position_embeddings\": "
     "4000000000, \"factor\": 1000}",
     FILE_ERROR, "the context length is 16777217"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2}, \"rope_parameters\": "
     "{\"rope_type\": \"linear\", \"factor\": 4}",
     FILE_ERROR, "rope_scaling and rope_parameters say different things"},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}", UNSUPPORTED,
     "('full_attention' in rope_parameters)"},
    {LLAMA, "\"rope_scaling\": null", "\"rope_scaling\": 2", FILE_ERROR,
     "rope_scaling is missing or not an object"},
    {LLAMA, "\"rope_scaling\": null", "\"partial_rotary_factor\": 0.5", UNSUPPORTED,
     "partial_rotary_factor 0.5"},
    {LLAMA, "\"rope_scaling\": null", "\"quantization_config\": {}", UNSUPPORTED,
     "quantization_config is not supported"},
    {LLAMA, "10000.0", "\"x\"", FILE_ERROR, "rope_theta is missing or not a number"},
    {QWEN2, "\"sliding_window\": null, \"use_sliding_window\": false",
     "\"sliding_window\": 4096, \"use_sliding_window\": true", UNSUPPORTED,
     "sliding_window 4096 in use"},
    {QWEN3, "\"sliding_window\": null, \"use_sliding_window\": false",
     "\"sliding_window\": 64, \"use_sliding_window\": true, \"max_window_layers\": 1", UNSUPPORTED,
     "sliding_window 64 in use is not supported in a qwen3 model"},
    {QWEN2, "\"attention_bias\": false", "\"layer_types\": 3", FILE_ERROR,
     "layer_types is missing or not a list"},
    {LLAMA, "\"sliding_window\": null, \"use_sliding_window\": false", "\"sliding_window\": 4096",
     UNSUPPORTED, "sliding_window 4096 in use"},
    {QWEN3, "\"attention_bias\": false",
     "\"layer_types\": [\"full_attention\", \"sliding_attention\"]", UNSUPPORTED,
     "layer_types has 'sliding_attention' at 1"},
    {LLAMA, "\"vocab_size\": 320", "\"vocab_size\": 320.0", FILE_ERROR,
     "vocab_size is missing or not a whole number"},
    {LLAMA, "\"vocab_size\": 320", "\"vocab_size\": -1", FILE_ERROR,
     "vocab_size is missing or not a whole number"},
    {LLAMA, "\"vocab_size\": 320", "\"vocab_size\": 319", FILE_ERROR,
     "tensor model.embed_tokens.weight has shape [320, 64] (outputs, inputs), this model needs "
     "[319, 64]"},
    {LLAMA, "\"hidden_size\": 64,", "", FILE_ERROR, "hidden_size is missing"},
    {LLAMA, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", FILE_ERROR,
     "tensor model.layers.2.input_layernorm.weight is missing"},
    {LLAMA, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", UNSUPPORTED,
     "has no place in this model"},
    {LLAMA, "\"num_attention_heads\": 4", "\"num_attention_heads\": 0", FILE_ERROR,
     "the number of heads is 0"},
    {LLAMA, "\"head_dim\": 16", "\"head_dim\": 15", FILE_ERROR, "the head size 15 is odd"},
    {QWEN3, "\"head_dim\": 32", "\"head_dim\": null", FILE_ERROR,
     "tensor model.layers.0.self_attn.q_proj.weight has shape [128, 64]"},
    {LLAMA, "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 0", FILE_ERROR, "the norm epsilon is 0"},
    {LLAMA, "\"eos_token_id\": 2", "\"eos_token_id\": \"</s>\"", FILE_ERROR,
     "eos_token_id is missing or not an id"},
    {LLAMA, "\"eos_token_id\": 2", "\"eos_token_id\": [1, 2, 3, 4, 5, 6, 7, 8, 9]",
     BT_ERR_CALLER_LIMIT, "more than 8 end-of-sequence ids"},
    {LLAMA, "\"eos_token_id\": 2", "\"eos_token_id\": 320", FILE_ERROR,
     "the end-of-sequence id 320 of"},
    {QWEN2, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", FILE_ERROR,
     "tensor lm_head.weight is missing"},
    {QWEN2, "Qwen2ForCausalLM\"], \"model_type\": \"qwen2",
     "Qwen3ForCausalLM\"], \"model_type\": \"qwen3", FILE_ERROR,
     "tensor model.layers.0.self_attn.q_norm.weight is missing"},
    {QWEN2, "Qwen2ForCausalLM\"], \"model_type\": \"qwen2",
     "LlamaForCausalLM\"], \"model_type\": \"llama", UNSUPPORTED,
     "proj.bias has no place in this model"},
    /* Variants that mean the same. */
    {LLAMA, "\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": \"default\"}", BT_OK, ""},
    {LLAMA, "LlamaForCausalLM\"], \"model_type\": \"llama",
     "MistralForCausalLM\"], \"model_type\": \"mistral", BT_OK, ""},
    {LLAMA, "\"architectures\": [\"LlamaForCausalLM\"],", "", BT_OK, ""},
    {LLAMA, "\"head_dim\": 16", "\"head_dim\": null", BT_OK, ""},
    {LLAMA, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", BT_OK, ""},
    {QWEN2, "\"sliding_window\": null", "\"sliding_window\": 32768", BT_OK, ""},
    {QWEN3, "\"attention_bias\": false", "\"layer_types\": [\"full_attention\"]", BT_OK, ""},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2}, \"rope_parameters\": "
     "{\"rope_type\": \"linear\", \"factor\": 2}",
     BT_OK, ""},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"type\": \"yarn\", \"rope_type\": \"yarn\", \"factor\": 2.5, "
     "\"finetuned\": true, \"mscale\": null}",
     BT_OK, ""},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 64}", BT_OK,
     ""},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
     "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 64}",
     BT_OK, ""},
    {LLAMA, "\"rope_scaling\": null",
     "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
     "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 64}",
     BT_OK, ""},
};

static void config_variants_are_refused(void **state) {
    for (size_t i = 0; i < BT_ARRAY_COUNT(config_variants); i++)
        check_config_case(*state, &config_variants[i]);
}

/* Writes the named tiny model with one change of its config.json, opens it and gives its geometry.
 */
static model_geometry open_changed(const fixture *f, const char *name, const char *from,
                                   const char *to) {
    tiny_model m = {.seed = 3};
    model_file *file = NULL;
    bt_error error = {0};
    assert_true(tiny_model_parse(name, &m));
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(f, "config.json", from, to);
    if (model_file_open(f->folder.path, &file, &error) != BT_OK) fail_msg("%s", error.text);
    const model_geometry g = model_file_card(file)->geometry;
    model_file_close(file);
    return g;
}

static void rope_parameters_are_read(void **state) {
    const fixture *f = *state;
    const char *plain = "\"rope_theta\": 10000.0, \"rope_scaling\": null";
    model_geometry g =
        open_changed(f, "llama", plain,
                     "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 500000}");
    assert_true(g.rope_theta == 500000);
    g = open_changed(f, "llama", plain,
                     "\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 500000, "
                     "\"factor\": 4.0, \"original_max_position_embeddings\": 1024, \"beta_fast\": "
                     "24, \"beta_slow\": 2, \"truncate\": false}");
    assert_true(g.rope_theta == 500000);
    assert_int_equal(g.rope_scaling.kind, MODEL_ROPE_KIND_YARN);
    assert_true(g.rope_scaling.factor == 4 && g.rope_scaling.beta_fast == 24);
    assert_true(g.rope_scaling.beta_slow == 2 && !g.rope_scaling.has_whole_ramp);
    assert_int_equal(g.rope_scaling.original_context_tokens, 1024);
    /* 0.1 ln 4 + 1; the context that the factor is for, not the 2048 of the file. */
    assert_true(g.rope_scaling.attention_factor > 1.13862 &&
                g.rope_scaling.attention_factor < 1.13864);
    assert_int_equal(g.context_tokens, 4096);
    /* Without a factor it is the context over the original one. */
    g = open_changed(f, "llama", plain,
                     "\"rope_scaling\": {\"type\": \"yarn\", "
                     "\"original_max_position_embeddings\": 1024, \"attention_factor\": 1.5}");
    assert_true(g.rope_scaling.factor == 2 && g.rope_scaling.attention_factor == 1.5);
    assert_true(g.rope_theta == 10000);
    assert_int_equal(g.context_tokens, 2048);
    /* Without an original context it is the context. */
    g = open_changed(f, "llama", plain, "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2}");
    assert_int_equal(g.rope_scaling.original_context_tokens, 2048);
    assert_int_equal(g.context_tokens, 4096);
}

static void windows_are_read(void **state) {
    const fixture *f = *state;
    const char *window = "\"sliding_window\": 24";
    assert_int_equal(open_changed(f, "mistral", window, "\"sliding_window\": 7").sliding_window, 7);
    assert_int_equal(open_changed(f, "mistral", window, "\"sliding_window\": null").sliding_window,
                     0);
    assert_int_equal(
        open_changed(f, "mistral", window, "\"sliding_window\": 24, \"use_sliding_window\": false")
            .sliding_window,
        0);
    assert_int_equal(
        open_changed(f, "mistral", window,
                     "\"sliding_window\": 24, \"layer_types\": [\"sliding_attention\"]")
            .sliding_window,
        24);
    /* A window over the whole context is none. */
    assert_int_equal(open_changed(f, "mistral", window, "\"sliding_window\": 2047").sliding_window,
                     2047);
    assert_int_equal(open_changed(f, "mistral", window, "\"sliding_window\": 2048").sliding_window,
                     0);
    tiny_model m = {.seed = 3};
    assert_true(tiny_model_parse("mistral", &m));
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(f, "config.json", window, "\"sliding_window\": 0");
    check_refusal(f->folder.path, BT_ERR_CALLER_FILE, "no query would see a key");
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(
        f, "config.json", window,
        "\"sliding_window\": 24, \"layer_types\": [\"sliding_attention\", \"full_attention\"]");
    check_refusal(f->folder.path, BT_ERR_CALLER_UNSUPPORTED,
                  "layer_types has 'full_attention' at 1");
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(f, "config.json", "\"attention_bias\": false", "\"attention_bias\": true");
    check_refusal(f->folder.path, BT_ERR_CALLER_UNSUPPORTED, "attention_bias true");
}

static void folders_without_weights_are_refused(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_LLAMA, .seed = 3};
    char path[400];
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", f->folder.path);
    assert_int_equal(remove(path), 0);
    check_refusal(f->folder.path, BT_ERR_CALLER_FILE, "model.safetensors: cannot be opened");
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(f, "generation_config.json", "[", "[true, ");
    check_refusal(f->folder.path, BT_ERR_CALLER_FILE,
                  "generation_config.json: eos_token_id is missing or not an id");
}

/* Weights in three files give the same rows as weights in one. */
static void shards_are_read(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_QWEN2, .seed = 3, .shards = 3};
    model_file *file = NULL;
    bt_error error = {0};
    uint16_t row[64];
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    if (model_file_open(f->folder.path, &file, &error) != BT_OK) fail_msg("%s", error.text);
    for (uint32_t layer = 0; layer < 3; layer++) {
        assert_int_equal(model_file_read(file, MODEL_TENSOR_UP, layer, 9, 1, row, NULL), BT_OK);
        for (uint32_t i = 0; i < 64; i++)
            assert_int_equal(row[i], tiny_model_weight(&m, MODEL_TENSOR_UP, layer, 9 * 64 + i));
    }
    model_file_close(file);
    char path[400];
    (void)snprintf(path, sizeof path, "%s/model-00002-of-00003.safetensors", f->folder.path);
    assert_int_equal(remove(path), 0);
    check_refusal(f->folder.path, BT_ERR_CALLER_FILE,
                  "shard model-00002-of-00003.safetensors, named by the index, is missing");
}

/* A dtype that is known to the container but not to the model, and old checkpoints' rope tables. */
static void dtypes_of_folders(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_LLAMA, .seed = 3};
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(f, "model.safetensors", "lm_head.weight\":{\"dtype\":\"BF16\"",
              "lm_head.weight\":{\"dtype\":\"I16\" ");
    check_refusal(f->folder.path, BT_ERR_CALLER_UNSUPPORTED,
                  "tensor lm_head.weight has type I16, which is not supported yet");
    /* Same bytes, read as half precision: the type decides. */
    model_file *file = NULL;
    uint16_t out[64];
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    edit_json(f, "model.safetensors", "lm_head.weight\":{\"dtype\":\"BF16\"",
              "lm_head.weight\":{\"dtype\":\"F16\" ");
    assert_int_equal(model_file_open(f->folder.path, &file, NULL), BT_OK);
    assert_int_equal(model_file_read(file, MODEL_TENSOR_OUTPUT, 0, 0, 1, out, NULL), BT_OK);
    assert_int_not_equal(out[0], tiny_model_weight(&m, MODEL_TENSOR_OUTPUT, 0, 0));
    model_file_close(file);
}

#define CASE(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(config_variants_are_refused),
        CASE(rope_parameters_are_read),
        CASE(windows_are_read),
        CASE(folders_without_weights_are_refused),
        CASE(shards_are_read),
        CASE(dtypes_of_folders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
