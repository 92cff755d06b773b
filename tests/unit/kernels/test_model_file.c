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

/* For tiny_model_parse. */
static const char *const names[] = {
    "llama",        "smollm2",      "mistral",    "qwen2",      "qwen3",      "llama-bias",
    "llama-linear", "llama-llama3", "llama-yarn", "qwen2-yarn", "qwen3-yarn", "mistral-yarn",
};

static tiny_model named(size_t index) {
    tiny_model m = {.seed = 7 + index};
    assert_true(tiny_model_parse(names[index], &m));
    return m;
}

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
    assert_int_equal(card->geometry.has_o_bias, g.has_o_bias);
    assert_int_equal(card->geometry.has_qk_norm, g.has_qk_norm);
    assert_int_equal(card->geometry.sliding_window, g.sliding_window);
    assert_int_equal(card->eos_count, 2);
    assert_int_equal(card->eos_ids[0], tiny_model_im_end_id(m));
    assert_int_equal(card->eos_ids[1], tiny_model_endoftext_id(m));
}

static bool is_near(double a, double b) {
    return a - b < 1e-6 * b && b - a < 1e-6 * b;
}

/* A GGUF file has divisors for Llama 3's scaling, no word about whole ramps, and numbers of f32. */
static void check_rope(const tiny_model *m, const model_card *card, bool is_folder) {
    const model_rope_scaling wanted = tiny_model_geometry(m).rope_scaling;
    const model_rope_scaling *got = &card->geometry.rope_scaling;
    if (wanted.kind == MODEL_ROPE_KIND_LLAMA3 && !is_folder) {
        assert_int_equal(got->kind, MODEL_ROPE_KIND_DIVISORS);
        assert_true(got->divisors[0] == 1.0F);
        assert_true(got->divisors[2] > 1.0F && got->divisors[2] < 4.0F);
        assert_true(got->divisors[7] == 4.0F);
        return;
    }
    assert_int_equal(got->kind, wanted.kind);
    assert_true(got->factor == wanted.factor);
    assert_int_equal(got->original_context_tokens, wanted.original_context_tokens);
    assert_true(got->low_frequency_factor == wanted.low_frequency_factor);
    assert_true(got->high_frequency_factor == wanted.high_frequency_factor);
    assert_true(got->beta_fast == wanted.beta_fast);
    assert_true(got->beta_slow == wanted.beta_slow);
    if (wanted.kind == MODEL_ROPE_KIND_YARN)
        assert_true(is_near(got->attention_factor, wanted.attention_factor));
    if (is_folder) assert_int_equal(got->has_whole_ramp, wanted.has_whole_ramp);
}

static void folders_are_read(void **state) {
    const fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(names); i++) {
        const tiny_model m = named(i);
        model_file *file = NULL;
        bt_error error = {0};
        assert_int_equal(tiny_model_write_hf(&m, f->folder.path), BT_OK);
        if (model_file_open(f->folder.path, &file, &error) != BT_OK) fail_msg("%s", error.text);
        check_card(&m, model_file_card(file));
        check_rope(&m, model_file_card(file), true);
        assert_string_equal(model_file_card(file)->name, strrchr(f->folder.path, '/') + 1);
        check_weights(&m, file);
        model_file_close(file);
    }
}

static void gguf_files_are_read(void **state) {
    const fixture *f = *state;
    static const char *const general_names[] = {
        [MODEL_FAMILY_LLAMA] = "tiny-llama",
        [MODEL_FAMILY_QWEN2] = "tiny-qwen2",
        [MODEL_FAMILY_QWEN3] = "tiny-qwen3",
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(names); i++) {
        const tiny_model m = named(i);
        model_file *file = NULL;
        bt_error error = {0};
        assert_int_equal(tiny_model_write_gguf(&m, f->folder.path, "model.gguf"), BT_OK);
        if (model_file_open(f->path, &file, &error) != BT_OK) fail_msg("%s", error.text);
        check_card(&m, model_file_card(file));
        check_rope(&m, model_file_card(file), false);
        assert_string_equal(model_file_card(file)->name, general_names[m.family]);
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
        CASE(truncated_files_are_refused),
        CASE(weights_that_are_not_numbers_are_named),
#ifdef BT_FAULT
        CASE(failed_allocations_are_reported),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
