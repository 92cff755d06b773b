/* GGUF models with something more, or something else, than what the tiny models have: what of it is
 * refused, and what is read. */
#include "kernels/model/model_file.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

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

static void check_refusal(const char *path, bt_status status, const char *sentence) {
    model_file *file = NULL;
    bt_error error = {0};
    const bt_status got = model_file_open(path, &file, &error);
    if (got != status || strstr(error.text, sentence) == NULL) {
        fail_msg("wanted %d '%s', got %d '%s'", status, sentence, got, error.text);
    }
    assert_null(file);
}

/* GGUF files that are built with something more, or something else. */
static void add_divisors(gguf_writer *w, const char *name, float first, uint64_t count) {
    test_bytes data = {0};
    test_bytes_add_f32(&data, first);
    for (uint64_t i = 1; i < count; i++)
        test_bytes_add_f32(&data, 2.0f);
    gguf_writer_tensor(w, name, BT_GGUF_TENSOR_F32, count, 0, &data);
    test_bytes_fini(&data);
}
static void add_good_divisors(gguf_writer *w) {
    add_divisors(w, "rope_freqs.weight", 1.0f, 8);
}
static void add_few_divisors(gguf_writer *w) {
    add_divisors(w, "rope_freqs.weight", 1.0f, 7);
}
static void add_zero_divisor(gguf_writer *w) {
    add_divisors(w, "rope_freqs.weight", 0.0f, 8);
}
static void add_nan_divisor(gguf_writer *w) {
    add_divisors(w, "rope_freqs.weight", NAN, 8);
}
static void add_other_divisors(gguf_writer *w) {
    add_divisors(w, "rope_factors_long.weight", 1.0f, 8);
}
static void add_divisors_and_yarn(gguf_writer *w) {
    add_good_divisors(w);
    gguf_writer_string(w, "llama.rope.scaling.type", "yarn");
}
static void add_longrope(gguf_writer *w) {
    gguf_writer_string(w, "llama.rope.scaling.type", "longrope");
}
static void add_yarn(gguf_writer *w) {
    gguf_writer_string(w, "llama.rope.scaling.type", "yarn");
    gguf_writer_f32(w, "llama.rope.scaling.factor", 4.0f);
}
static void add_bad_yarn(gguf_writer *w) {
    add_yarn(w);
    gguf_writer_f32(w, "llama.rope.scaling.attn_factor", -1.0f);
}
static void add_endless_yarn(gguf_writer *w) {
    gguf_writer_string(w, "llama.rope.scaling.type", "yarn");
    gguf_writer_f32(w, "llama.rope.scaling.factor", 1e30f);
}
static void add_yarn_multiplier(gguf_writer *w) {
    add_yarn(w);
    gguf_writer_f32(w, "llama.rope.scaling.yarn_log_multiplier", 0.1f);
}
static void add_no_scaling(gguf_writer *w) {
    gguf_writer_string(w, "llama.rope.scaling.type", "none");
}
static void add_linear_scale(gguf_writer *w) {
    gguf_writer_f32(w, "llama.rope.scale_linear", 2.0f);
}
static void add_small_factor(gguf_writer *w) {
    gguf_writer_f32(w, "llama.rope.scaling.factor", 0.25f);
}
static void add_sections(gguf_writer *w) {
    gguf_writer_array(w, "llama.rope.dimension_sections", BT_GGUF_TYPE_I32, 1);
    test_bytes_add_u32(&w->keys, 16);
}
static void add_temperature(gguf_writer *w) {
    gguf_writer_u32(w, "llama.attention.temperature_length", 8192);
}
static void add_window(gguf_writer *w) {
    gguf_writer_u32(w, "llama.attention.sliding_window", 24);
}
static void add_scale(gguf_writer *w) {
    gguf_writer_f32(w, "llama.attention.scale", 0.5f);
}
static void add_no_cause(gguf_writer *w) {
    gguf_writer_bool(w, "llama.attention.causal", 0);
}
static void add_cause(gguf_writer *w) {
    gguf_writer_bool(w, "llama.attention.causal", 1);
}
static void add_logit_scale(gguf_writer *w) {
    gguf_writer_f32(w, "llama.logit_scale", 2.0f);
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
        {add_few_divisors, BT_ERR_CALLER_FILE,
         "rope_freqs.weight has 7 values of type F32, this model needs 8"},
        {add_zero_divisor, BT_ERR_CALLER_FILE, "the divisor 0 of rope frequency 0"},
        {add_nan_divisor, BT_ERR_CALLER_FILE, "the divisor nan of rope frequency 0"},
        {add_other_divisors, BT_ERR_CALLER_UNSUPPORTED,
         "tensor rope_factors_long.weight has no place"},
        {add_divisors_and_yarn, BT_ERR_CALLER_UNSUPPORTED,
         "rope_freqs.weight together with rope.scaling.*"},
        {add_longrope, BT_ERR_CALLER_UNSUPPORTED, "unknown rope scaling 'longrope'"},
        {add_bad_yarn, BT_ERR_CALLER_FILE, "the rope scaling's attention factor is -1.1"},
        {add_endless_yarn, BT_ERR_CALLER_FILE, "the context length is 16777217"},
        {add_yarn_multiplier, BT_ERR_CALLER_UNSUPPORTED,
         "llama.rope.scaling.yarn_log_multiplier is 0.1"},
        {add_small_factor, BT_ERR_CALLER_FILE, "the rope scaling factor is 0.25"},
        {add_sections, BT_ERR_CALLER_UNSUPPORTED, "key llama.rope.dimension_sections is not known"},
        {add_temperature, BT_ERR_CALLER_UNSUPPORTED,
         "key llama.attention.temperature_length is not known"},
        {add_scale, BT_ERR_CALLER_UNSUPPORTED, "llama.attention.scale is 0.5"},
        {add_no_cause, BT_ERR_CALLER_UNSUPPORTED, "attention that is not causal"},
        {add_logit_scale, BT_ERR_CALLER_UNSUPPORTED, "llama.logit_scale is 2"},
        {add_experts, BT_ERR_CALLER_UNSUPPORTED, "llama.expert_count is 8"},
        {add_vocabulary, BT_ERR_CALLER_UNSUPPORTED, "llama.vocab_size is 32000"},
        {add_adapter, BT_ERR_CALLER_UNSUPPORTED, "is a GGUF 'adapter', not a model"},
        {add_split, BT_ERR_CALLER_UNSUPPORTED, "is one of 3 parts"},
        {add_bias, BT_ERR_CALLER_FILE, "tensor blk.1.attn_q.bias is missing"},
        {add_layer, BT_ERR_CALLER_UNSUPPORTED, "tensor blk.2.attn_norm.weight has no place"},
        {add_layer_alias, BT_ERR_CALLER_UNSUPPORTED, "tensor blk.01.attn_norm.weight has no place"},
        {add_eom_outside, BT_ERR_CALLER_FILE,
         "the end-of-sequence id 320 of tokenizer.ggml.eom_token_id is outside"},
        {add_no_scaling, BT_OK, ""},
        {add_linear_scale, BT_OK, ""},
        {add_good_divisors, BT_OK, ""},
        {add_yarn, BT_OK, ""},
        {add_window, BT_OK, ""},
        {add_cause, BT_OK, ""},
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

static const change changes[] = {
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
    {"llama.attention.layer_norm_rms_epsilon", 0x80000000, .type = -1, .status = BT_ERR_CALLER_FILE,
     .sentence = "the norm epsilon is -0"},
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
     .type = 20,
     .status = BT_ERR_CALLER_UNSUPPORTED,
     .sentence = "tensor blk.0.attn_q.weight has type IQ4_NL, which is not supported yet"},
    {.tensor = "blk.0.attn_q.weight",
     .dimensions = {48, 64},
     .type = BT_GGUF_TENSOR_Q4_0,
     .status = BT_ERR_CALLER_FILE,
     .sentence = "tensor blk.0.attn_q.weight has rows of 48 values, which is not a whole number "
                 "of Q4_0 blocks"},
};

static void changed_gguf_files_are_refused(void **state) {
    const fixture *f = *state;
    const tiny_model m = {.family = MODEL_FAMILY_LLAMA, .seed = 3};
    for (size_t i = 0; i < BT_ARRAY_COUNT(changes); i++) {
        gguf_writer w;
        tiny_model_fill_gguf(&m, &w);
        test_bytes bytes = gguf_writer_finish(&w);
        apply_change(&changes[i], &bytes);
        assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
        test_bytes_fini(&bytes);
        gguf_writer_fini(&w);
        check_refusal(f->path, changes[i].status, changes[i].sentence);
    }
}

/* Three-bit types need rows of 256 weights, so a model of that width is begun. */
static void q3_k_is_refused_by_name(void **state) {
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
    test_bytes_add(&data, NULL, 2 * 110);
    gguf_writer_tensor(&w, "token_embd.weight", 11, 256, 2, &data);
    test_bytes bytes = gguf_writer_finish(&w);
    assert_int_equal(test_bytes_write(&bytes, f->folder.path, "model.gguf"), BT_OK);
    check_refusal(f->path, BT_ERR_CALLER_UNSUPPORTED,
                  "tensor token_embd.weight has type Q3_K, which is not supported");
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

#define CASE(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(gguf_variants_are_refused),
        CASE(changed_gguf_files_are_refused),
        CASE(q3_k_is_refused_by_name),
        CASE(other_architectures_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
