/* Model files made here, read back weight by weight; and everything that has to be refused. */
#include "kernels/model/model_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/file_map.h"
#include "base/mem.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/tiny_model.h"

typedef struct fixture {
    test_folder folder;
    char path[400]; /* a file in the folder */
} fixture;

static int set_up(void **state) {
    static fixture f;
    f.folder = test_folder_make();
    (void)snprintf(f.path, sizeof f.path, "%s/model.gguf", f.folder.path);
    *state = &f;
    return 0;
}

static int tear_down(void **state) {
    const fixture *f = *state;
    test_folder_remove(&f->folder);
    return 0;
}

static const model_family families[] = {MODEL_FAMILY_LLAMA, MODEL_FAMILY_QWEN2, MODEL_FAMILY_QWEN3};

/* Every tensor of an open file against the generator, read in pieces of three rows. */
static void check_weights(const tiny_model *m, const model_file *file) {
    const model_geometry g = tiny_model_geometry(m);
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        const model_tensor tensor = (model_tensor)t;
        const tiny_shape shape = tiny_model_shape(m, tensor);
        const uint32_t rows = shape.rows > 0 ? shape.rows : 1;
        const uint32_t layers = tensor >= MODEL_TENSOR_ATTENTION_NORM ? g.layers : 1;
        if (shape.columns == 0) continue;
        for (uint32_t at = 0; at < layers * rows; at += 3) {
            uint16_t out[3 * 256];
            const uint32_t layer = at / rows;
            const uint32_t row = at % rows;
            const uint32_t count = rows - row < 3 ? rows - row : 3;
            bt_error error = {0};
            if (model_file_read(file, tensor, layer, row, count, out, &error) != BT_OK) {
                fail_msg("%s", error.text);
            }
            for (uint32_t i = 0; i < count * shape.columns; i++) {
                const uint64_t element = (uint64_t)row * shape.columns + i;
                assert_int_equal(out[i], tiny_model_weight(m, tensor, layer, element));
            }
        }
    }
}

static void check_card(const tiny_model *m, const model_card *card) {
    const model_geometry g = tiny_model_geometry(m);
    assert_int_equal(card->geometry.family, g.family);
    assert_int_equal(card->geometry.vocab_size, g.vocab_size);
    assert_int_equal(card->geometry.context_tokens, g.context_tokens);
    assert_int_equal(card->geometry.hidden_size, g.hidden_size);
    assert_int_equal(card->geometry.intermediate_size, g.intermediate_size);
    assert_int_equal(card->geometry.layers, g.layers);
    assert_int_equal(card->geometry.heads, g.heads);
    assert_int_equal(card->geometry.kv_heads, g.kv_heads);
    assert_int_equal(card->geometry.head_dim, g.head_dim);
    assert_true(card->geometry.norm_epsilon == g.norm_epsilon);
    assert_true(card->geometry.rope_theta == g.rope_theta);
    assert_int_equal(card->geometry.has_tied_embeddings, g.has_tied_embeddings);
    assert_int_equal(card->geometry.has_qkv_bias, g.has_qkv_bias);
    assert_int_equal(card->geometry.has_qk_norm, g.has_qk_norm);
    assert_int_equal(card->eos_count, 2);
    assert_int_equal(card->eos_ids[0], tiny_model_im_end_id(m));
    assert_int_equal(card->eos_ids[1], tiny_model_endoftext_id(m));
}

static void folders_are_read(void **state) {
    const fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(families); i++) {
        const tiny_model m = {.family = families[i], .seed = 7 + i};
        model_file *file = NULL;
        bt_error error = {0};
        assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
        if (model_file_open(f->folder.path, &file, &error) != BT_OK) fail_msg("%s", error.text);
        check_card(&m, model_file_card(file));
        assert_string_equal(model_file_card(file)->name, strrchr(f->folder.path, '/') + 1);
        check_weights(&m, file);
        model_file_close(file);
    }
}

static void gguf_files_are_read(void **state) {
    const fixture *f = *state;
    static const char *const names[] = {"tiny-llama", "tiny-qwen2", "tiny-qwen3"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(families); i++) {
        const tiny_model m = {.family = families[i], .seed = 7 + i};
        model_file *file = NULL;
        bt_error error = {0};
        assert_int_equal(tiny_model_write_gguf(&m, f->folder.path, "model.gguf"), BT_OK);
        if (model_file_open(f->path, &file, &error) != BT_OK) fail_msg("%s", error.text);
        check_card(&m, model_file_card(file));
        assert_string_equal(model_file_card(file)->name, names[i]);
        check_weights(&m, file);
        model_file_close(file);
    }
}

/* The rows of a head of 16, as the converter reshapes them: [2, 8] to [8, 2]. */
static void llama_rows_are_put_back(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_LLAMA, .seed = 3};
    bt_gguf *gguf = NULL;
    model_file *file = NULL;
    assert_int_equal(tiny_model_write_gguf(&m, f->folder.path, "model.gguf"), BT_OK);
    assert_int_equal(bt_gguf_open(f->path, &gguf, NULL), BT_OK);
    assert_int_equal(model_file_open(f->path, &file, NULL), BT_OK);
    const uint8_t *stored = bt_gguf_find_tensor(gguf, "blk.1.attn_k.weight")->data;
    const uint32_t hf_rows[16] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
    for (uint32_t head = 0; head < 2; head++) {
        for (uint32_t i = 0; i < 16; i++) {
            uint16_t row[64];
            assert_int_equal(
                model_file_read(file, MODEL_TENSOR_K, 1, 16 * head + hf_rows[i], 1, row, NULL),
                BT_OK);
            assert_memory_equal(row, stored + sizeof row * (16 * head + i), sizeof row);
        }
    }
    model_file_close(file);
    bt_gguf_close(gguf);
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

static void what_is_no_model_is_refused(void **state) {
    const fixture *f = *state;
    test_bytes text = {0};
    char path[400];
    check_refusal(f->path, BT_ERR_CALLER_FILE, "cannot be opened: No such file");
    check_refusal(f->folder.path, BT_ERR_CALLER_FILE, "is a folder without config.json");
    check_refusal("/dev/null", BT_ERR_CALLER_FILE, "is not a regular file");
    assert_int_equal(test_bytes_write(&text, f->folder.path, "model.gguf"), BT_OK);
    check_refusal(f->path, BT_ERR_CALLER_FILE, "is empty");
    test_bytes_add_text(&text, "Once upon a time there was a text file.\n");
    assert_int_equal(test_bytes_write(&text, f->folder.path, "model.gguf"), BT_OK);
    check_refusal(f->path, BT_ERR_CALLER_FILE, "is not a GGUF file");
    (void)snprintf(path, sizeof path, "%s/model.safetensors", f->folder.path);
    check_refusal(path, BT_ERR_CALLER_FILE, "is given as its folder");
    assert_int_equal(test_bytes_write(&text, f->folder.path, "config.json"), BT_OK);
    check_refusal(f->folder.path, BT_ERR_CALLER_FILE, "config.json: malformed JSON");
    test_bytes_fini(&text);
}

/* GGUF files that are built with something more, or something else. */
static void add_rope_freqs(gguf_writer *w) {
    test_bytes data = {0};
    test_bytes_add(&data, NULL, 32);
    gguf_writer_tensor(w, "rope_freqs.weight", BT_GGUF_TENSOR_F32, 8, 0, &data);
    test_bytes_fini(&data);
}
static void add_scaling(gguf_writer *w) {
    gguf_writer_string(w, "llama.rope.scaling.type", "yarn");
}
static void add_no_scaling(gguf_writer *w) {
    gguf_writer_string(w, "llama.rope.scaling.type", "none");
}
static void add_linear_scale(gguf_writer *w) {
    gguf_writer_f32(w, "llama.rope.scale_linear", 2.0f);
}
static void add_window(gguf_writer *w) {
    gguf_writer_u32(w, "llama.attention.sliding_window", 4096);
}
static void add_experts(gguf_writer *w) {
    gguf_writer_u32(w, "llama.expert_count", 8);
}
static void add_vocabulary(gguf_writer *w) {
    gguf_writer_u32(w, "llama.vocab_size", 32000);
}
static void add_adapter(gguf_writer *w) {
    gguf_writer_string(w, "general.type", "adapter");
}
static void add_split(gguf_writer *w) {
    gguf_writer_u32(w, "split.count", 3);
}
static void add_bias(gguf_writer *w) {
    test_bytes data = {0};
    test_bytes_add(&data, NULL, 256);
    gguf_writer_tensor(w, "blk.0.attn_q.bias", BT_GGUF_TENSOR_F32, 64, 0, &data);
    test_bytes_fini(&data);
}
static void add_layer(gguf_writer *w) {
    test_bytes data = {0};
    test_bytes_add(&data, NULL, 256);
    gguf_writer_tensor(w, "blk.2.attn_norm.weight", BT_GGUF_TENSOR_F32, 64, 0, &data);
    test_bytes_fini(&data);
}
static void add_layer_alias(gguf_writer *w) {
    test_bytes data = {0};
    test_bytes_add(&data, NULL, 256);
    gguf_writer_tensor(w, "blk.01.attn_norm.weight", BT_GGUF_TENSOR_F32, 64, 0, &data);
    test_bytes_fini(&data);
}
static void add_eom_outside(gguf_writer *w) {
    gguf_writer_u32(w, "tokenizer.ggml.eom_token_id", 320);
}

static void gguf_variants_are_refused(void **state) {
    const fixture *f = *state;
    const struct {
        void (*add)(gguf_writer *);
        bt_status status;
        const char *sentence;
    } cases[] = {
        {add_rope_freqs, BT_ERR_CALLER_UNSUPPORTED, "rope_freqs.weight (scaled rope)"},
        {add_scaling, BT_ERR_CALLER_UNSUPPORTED, "rope scaling 'yarn'"},
        {add_linear_scale, BT_ERR_CALLER_UNSUPPORTED, "rope scaling 'none' (linear factor 2)"},
        {add_window, BT_ERR_CALLER_UNSUPPORTED, "llama.attention.sliding_window is 4096"},
        {add_experts, BT_ERR_CALLER_UNSUPPORTED, "llama.expert_count is 8"},
        {add_vocabulary, BT_ERR_CALLER_UNSUPPORTED, "llama.vocab_size is 32000"},
        {add_adapter, BT_ERR_CALLER_UNSUPPORTED, "is a GGUF 'adapter', not a model"},
        {add_split, BT_ERR_CALLER_UNSUPPORTED, "is one of 3 parts"},
        {add_bias, BT_ERR_CALLER_UNSUPPORTED, "tensor blk.0.attn_q.bias has no place"},
        {add_layer, BT_ERR_CALLER_UNSUPPORTED, "tensor blk.2.attn_norm.weight has no place"},
        {add_layer_alias, BT_ERR_CALLER_UNSUPPORTED, "tensor blk.01.attn_norm.weight has no place"},
        {add_eom_outside, BT_ERR_CALLER_FILE,
         "the end-of-sequence id 320 of tokenizer.ggml.eom_token_id is outside"},
        {add_no_scaling, BT_OK, ""},
    };
    const tiny_model m = {.family = MODEL_FAMILY_LLAMA, .seed = 3};
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        gguf_writer w;
        tiny_model_fill_gguf(&m, &w);
        cases[i].add(&w);
        test_bytes bytes = gguf_writer_finish(&w);
        assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
        test_bytes_fini(&bytes);
        gguf_writer_fini(&w);
        if (cases[i].status != BT_OK) {
            check_refusal(f->path, cases[i].status, cases[i].sentence);
            continue;
        }
        model_file *file = NULL;
        assert_int_equal(model_file_open(f->path, &file, NULL), BT_OK);
        model_file_close(file);
    }
}

/* The place in the file just after a name or key (they are stored as length and bytes). */
static size_t find_after(const test_bytes *file, const char *name) {
    test_bytes wanted = {0};
    test_bytes_add_u64(&wanted, strlen(name));
    test_bytes_add_text(&wanted, name);
    const uint8_t *at = memmem(file->data, file->count, wanted.data, wanted.count);
    assert_non_null(at);
    const size_t end = (size_t)(at - file->data) + wanted.count;
    test_bytes_fini(&wanted);
    return end;
}

static void set_u32(test_bytes *file, size_t at, uint32_t value) {
    memcpy(file->data + at, &value, sizeof value);
}

/* `key` holds a number of 32 bits, whose type comes first; `tensor` a matrix. Both may be NULL. */
typedef struct change {
    const char *key;
    uint32_t value;
    const char *tensor;
    uint64_t dimensions[2]; /* 0: as it is */
    int type;               /* negative: as it is */
    const char *new_name;   /* of the tensor, as long as the old one */
    bt_status status;
    const char *sentence;
} change;

static void apply_change(const change *c, test_bytes *file) {
    if (c->key != NULL) set_u32(file, find_after(file, c->key) + 4, c->value);
    if (c->tensor == NULL) return;
    const size_t at = find_after(file, c->tensor);
    if (c->dimensions[0] != 0) {
        test_bytes_set_u64(file, at + 4, c->dimensions[0]);
        test_bytes_set_u64(file, at + 12, c->dimensions[1]);
    }
    if (c->type >= 0) set_u32(file, at + 20, (uint32_t)c->type);
    if (c->new_name != NULL) {
        assert_int_equal(strlen(c->new_name), strlen(c->tensor));
        memcpy(file->data + at - strlen(c->tensor), c->new_name, strlen(c->tensor));
    }
}

static void changed_gguf_files_are_refused(void **state) {
    const fixture *f = *state;
    const change cases[] = {
        {"llama.context_length", 0, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "the context length is 0"},
        {"llama.embedding_length", 65, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "tensor token_embd.weight has shape [320, 64] (outputs, inputs), this model "
                     "needs [320, 65]"},
        {"llama.block_count", 3, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "tensor blk.2.attn_norm.weight is missing"},
        {"llama.block_count", 1, .type = -1, .status = BT_ERR_CALLER_UNSUPPORTED,
         .sentence = "has no place in this model"},
        {"llama.block_count", 4000000000, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "the number of layers is 4000000000"},
        {"llama.feed_forward_length", 2000000, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "the intermediate size is 2000000"},
        {"llama.attention.head_count", 5, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "5 heads cannot be shared by 2 KV heads"},
        {"llama.attention.head_count_kv", 0, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "the number of KV heads is 0"},
        {"llama.attention.key_length", 8, .type = -1, .status = BT_ERR_CALLER_UNSUPPORTED,
         .sentence = "llama.attention.value_length is 16"},
        {"llama.rope.dimension_count", 8, .type = -1, .status = BT_ERR_CALLER_UNSUPPORTED,
         .sentence = "llama.rope.dimension_count is 8"},
        {"llama.rope.freq_base", 0x7fc00000, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "'llama.rope.freq_base' is not finite"},
        {"llama.rope.freq_base", 0, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "the rope base is 0"},
        {"llama.attention.layer_norm_rms_epsilon", 0x80000000, .type = -1,
         .status = BT_ERR_CALLER_FILE, .sentence = "the norm epsilon is -0"},
        {"tokenizer.ggml.eos_token_id", 320, .type = -1, .status = BT_ERR_CALLER_FILE,
         .sentence = "the end-of-sequence id 320 of tokenizer.ggml.eos_token_id"},
        {.tensor = "blk.1.ffn_up.weight",
         .new_name = "blk.1.ffn_uq.weight",
         .type = -1,
         .status = BT_ERR_CALLER_FILE,
         .sentence = "tensor blk.1.ffn_up.weight is missing"},
        {.tensor = "output.weight",
         .new_name = "output_weight",
         .type = -1,
         .status = BT_ERR_CALLER_UNSUPPORTED,
         .sentence = "output_weight has no place"},
        {.tensor = "token_embd.weight",
         .new_name = "token_embd.weighu",
         .type = -1,
         .status = BT_ERR_CALLER_FILE,
         .sentence = "token_embd.weight is missing"},
        {.tensor = "blk.0.ffn_up.weight",
         .dimensions = {160, 64},
         .type = -1,
         .status = BT_ERR_CALLER_FILE,
         .sentence = "tensor blk.0.ffn_up.weight has shape [64, 160]"},
        {.tensor = "blk.0.ffn_up.weight",
         .dimensions = {10240, 1},
         .type = -1,
         .status = BT_ERR_CALLER_FILE,
         .sentence = "tensor blk.0.ffn_up.weight has 1 dimensions, this model needs 2"},
        {.tensor = "blk.0.attn_q.weight",
         .type = 24,
         .status = BT_ERR_CALLER_UNSUPPORTED,
         .sentence = "tensor blk.0.attn_q.weight has type I8, which is not supported yet"},
        {.tensor = "blk.0.attn_q.weight",
         .type = 2,
         .status = BT_ERR_CALLER_UNSUPPORTED,
         .sentence = "tensor blk.0.attn_q.weight has type Q4_0, which is not supported yet"},
    };
    const tiny_model m = {.family = MODEL_FAMILY_LLAMA, .seed = 3};
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        gguf_writer w;
        tiny_model_fill_gguf(&m, &w);
        test_bytes bytes = gguf_writer_finish(&w);
        apply_change(&cases[i], &bytes);
        assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
        test_bytes_fini(&bytes);
        gguf_writer_fini(&w);
        check_refusal(f->path, cases[i].status, cases[i].sentence);
    }
}

/* Q6_K needs rows of 256 weights, so a model of that width is begun. */
static void q6_k_is_refused_by_name(void **state) {
    const fixture *f = *state;
    static const char *const keys[] = {"llama.context_length", "llama.block_count",
                                       "llama.feed_forward_length", "llama.attention.head_count"};
    gguf_writer w;
    test_bytes data = {0};
    gguf_writer_init(&w);
    gguf_writer_string(&w, "general.architecture", "llama");
    for (size_t i = 0; i < BT_ARRAY_COUNT(keys); i++)
        gguf_writer_u32(&w, keys[i], 2);
    gguf_writer_u32(&w, "llama.embedding_length", 256);
    gguf_writer_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    test_bytes_add(&data, NULL, 2 * 210);
    gguf_writer_tensor(&w, "token_embd.weight", BT_GGUF_TENSOR_Q6_K, 256, 2, &data);
    test_bytes bytes = gguf_writer_finish(&w);
    assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
    check_refusal(f->path, BT_ERR_CALLER_UNSUPPORTED,
                  "tensor token_embd.weight has type Q6_K, which is not supported yet");
    test_bytes_fini(&bytes);
    test_bytes_fini(&data);
    gguf_writer_fini(&w);
}

static void other_architectures_are_refused(void **state) {
    const fixture *f = *state;
    static const char *const names[] = {"gemma2", "llama4", "qwen", "LLAMA", ""};
    for (size_t i = 0; i < BT_ARRAY_COUNT(names); i++) {
        gguf_writer w;
        char sentence[100];
        gguf_writer_init(&w);
        gguf_writer_string(&w, "general.architecture", names[i]);
        test_bytes bytes = gguf_writer_finish(&w);
        assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
        (void)snprintf(sentence, sizeof sentence, "architecture '%s' is not supported", names[i]);
        check_refusal(f->path, BT_ERR_CALLER_UNSUPPORTED, sentence);
        test_bytes_fini(&bytes);
        gguf_writer_fini(&w);
    }
    gguf_writer w;
    gguf_writer_init(&w);
    test_bytes bytes = gguf_writer_finish(&w);
    assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
    check_refusal(f->path, BT_ERR_CALLER_FILE, "key 'general.architecture' is missing");
    test_bytes_fini(&bytes);
}

/* Cut inside the header, inside the keys, in the infos, and one byte before the end. */
static void truncated_files_are_refused(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_QWEN2, .seed = 3};
    gguf_writer w;
    tiny_model_fill_gguf(&m, &w);
    test_bytes bytes = gguf_writer_finish(&w);
    const size_t whole = bytes.count;
    const size_t cuts[] = {
        4, 20, 24 + w.keys.count / 2, 24 + w.keys.count + w.infos.count / 2, whole / 2, whole - 1};
    for (size_t i = BT_ARRAY_COUNT(cuts); i-- > 0;) {
        bytes.count = cuts[i];
        assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
        check_refusal(f->path, BT_ERR_CALLER_FILE, "truncated");
    }
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    char path[400];
    bt_file_map map;
    (void)snprintf(path, sizeof path, "%s/model.safetensors", f->folder.path);
    assert_int_equal(bt_file_map_open(path, &map, NULL), BT_OK);
    test_bytes_add(&bytes, map.data, map.bytes / 2);
    bt_file_map_close(&map);
    assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.safetensors"), BT_OK);
    check_refusal(f->folder.path, BT_ERR_CALLER_FILE, "truncated");
    test_bytes_fini(&bytes);
}

static void weights_that_are_not_numbers_are_named(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_QWEN3, .seed = 3};
    model_file *file = NULL;
    bt_gguf *gguf = NULL;
    gguf_writer w;
    bt_error error;
    uint16_t out[2 * 64];
    tiny_model_fill_gguf(&m, &w);
    test_bytes bytes = gguf_writer_finish(&w);
    assert_int_equal(bt_gguf_open_memory(bytes.data, bytes.count, "x", &gguf, NULL), BT_OK);
    const bt_gguf_tensor *tensor = bt_gguf_find_tensor(gguf, "blk.1.attn_v.weight");
    memcpy(bytes.data + tensor->offset + (17 * 64 + 5) * 2, "\xc0\x7f", 2);
    bt_gguf_close(gguf);
    assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
    assert_int_equal(model_file_open(f->path, &file, NULL), BT_OK);
    assert_int_equal(model_file_read(file, MODEL_TENSOR_V, 1, 15, 2, out, &error), BT_OK);
    assert_int_equal(model_file_read(file, MODEL_TENSOR_V, 0, 17, 1, out, &error), BT_OK);
    assert_int_equal(model_file_read(file, MODEL_TENSOR_V, 1, 16, 2, out, &error),
                     BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "tensor blk.1.attn_v.weight has a weight in row 17 that is "
                                       "not a finite number"));
    model_file_close(file);
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
}

#ifdef BT_FAULT
static void failed_allocations_are_reported(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_QWEN3, .seed = 3};
    assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
    assert_int_equal(tiny_model_write_gguf(&m, f->folder.path, "model.gguf"), BT_OK);
    const char *const paths[] = {f->folder.path, f->path};
    for (size_t i = 0; i < BT_ARRAY_COUNT(paths); i++) {
        bt_status status = BT_ERR_WORKER_MEMORY;
        uint64_t nth = 0;
        while (status != BT_OK) {
            model_file *file = NULL;
            bt_fault_set(BT_FAULT_ALLOC, ++nth);
            status = model_file_open(paths[i], &file, NULL);
            bt_fault_set(BT_FAULT_ALLOC, 0);
            assert_true(status == BT_OK || status == BT_ERR_WORKER_MEMORY);
            model_file_close(file);
        }
        assert_true(nth > 5);
    }
}
#endif

#define CASE(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(folders_are_read),
        CASE(gguf_files_are_read),
        CASE(llama_rows_are_put_back),
        CASE(what_is_no_model_is_refused),
        CASE(gguf_variants_are_refused),
        CASE(changed_gguf_files_are_refused),
        CASE(q6_k_is_refused_by_name),
        CASE(other_architectures_are_refused),
        CASE(truncated_files_are_refused),
        CASE(weights_that_are_not_numbers_are_named),
#ifdef BT_FAULT
        CASE(failed_allocations_are_reported),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
