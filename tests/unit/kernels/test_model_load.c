/* Loading: the forms of weights, what the fingerprint is over, and the cache of packed weights as
 * loads use it, by one process and by several. */
#include "kernels/model.h"

#include <dirent.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/gguf.h"
#include "base/mem.h"
#include "kernels/bf16.h"
#include "kernels/model/model_identity.h"
#include "kernels/model/model_internal.h"
#include "tests/support/stored_model.h"
#include "tests/support/tiny_model.h"

typedef struct fixture {
    test_folder folder, cache;
    char path[400];
} fixture;

static const stored_model stored = {.geometry = {.family = MODEL_FAMILY_LLAMA,
                                                 .vocab_size = 200,
                                                 .context_tokens = 128,
                                                 .hidden_size = 96,
                                                 .intermediate_size = 160,
                                                 .layers = 2,
                                                 .heads = 6,
                                                 .kv_heads = 2,
                                                 .head_dim = 32,
                                                 .norm_epsilon = 1e-5F,
                                                 .rope_theta = 10000.0},
                                    .type = BT_GGUF_TENSOR_Q8_0,
                                    .seed = 3};

static int set_up(void **state) {
    static fixture f;
    f.folder = test_folder_make();
    f.cache = test_folder_make();
    (void)snprintf(f.path, sizeof f.path, "%s/model.gguf", f.folder.path);
    *state = &f;
    return chmod(f.cache.path, 0700);
}

static int tear_down(void **state) {
    const fixture *f = *state;
    test_folder_remove(&f->folder);
    test_folder_remove(&f->cache);
    return 0;
}

static model *load(const char *path, model_load_options options) {
    bt_error error = {0};
    model *m = NULL;
    if (model_load(path, &options, &m, &error) != BT_OK) fail_msg("%s", error.text);
    return m;
}

static void write_stored(const fixture *f, uint32_t type, uint64_t seed) {
    stored_model m = stored;
    m.type = type;
    m.seed = seed;
    assert_int_equal(stored_model_write(&m, f->path), BT_OK);
}

static bool is_same_model(const model *a, const model *b) {
    return a->arena_bytes == b->arena_bytes && memcmp(a->arena, b->arena, a->arena_bytes) == 0 &&
           memcmp(a->card.fingerprint, b->card.fingerprint, sizeof a->card.fingerprint) == 0 &&
           strcmp(a->numerics, b->numerics) == 0;
}

/* ---- forms */

/* What is gathered, rounded to bf16, is what the file's reader says. */
static void check_rows(const model *m, const model_file *file, model_tensor tensor, uint32_t layer,
                       const pack_matrix *matrix, uint32_t first) {
    const model_shape shape = model_tensor_shape(&m->card.geometry, tensor);
    bt_error error;
    for (uint32_t row = 0; row < shape.rows; row++) {
        float gathered[256];
        uint16_t want[256];
        pack_gather(matrix, first + row, gathered);
        assert_int_equal(model_file_read(file, tensor, layer, row, 1, want, &error), BT_OK);
        for (uint32_t k = 0; k < shape.columns; k++)
            if (bf16_to_f32(bf16_from_f32(gathered[k])) != bf16_to_f32(want[k]))
                fail_msg("tensor %d, row %u, input %u: %g", (int)tensor, row, k,
                         (double)gathered[k]);
    }
}

static void stored_weights_are_kept(void **state) {
    const fixture *f = *state;
    static const struct {
        uint32_t type;
        model_weights weights;
        pack_format format;
    } cases[] = {
        {BT_GGUF_TENSOR_Q8_0, MODEL_WEIGHTS_AUTO, PACK_Q8_0},
        {BT_GGUF_TENSOR_Q8_0, MODEL_WEIGHTS_NATIVE, PACK_Q8_0},
        {BT_GGUF_TENSOR_Q8_0, MODEL_WEIGHTS_BF16, PACK_BF16},
        {BT_GGUF_TENSOR_Q4_1, MODEL_WEIGHTS_AUTO, PACK_BF16},
        {BT_GGUF_TENSOR_Q4_1, MODEL_WEIGHTS_NATIVE, PACK_Q4_1},
        {BT_GGUF_TENSOR_Q4_0, MODEL_WEIGHTS_NATIVE, PACK_Q4_0},
        {BT_GGUF_TENSOR_BF16, MODEL_WEIGHTS_NATIVE, PACK_BF16},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        write_stored(f, cases[i].type, 5 + i);
        model *m = load(f->path, (model_load_options){.weights = cases[i].weights, .threads = 3});
        model_file *file;
        bt_error error;
        assert_int_equal(model_file_open(f->path, &file, &error), BT_OK);
        const model_geometry *g = &m->card.geometry;
        const model_layer *layer = &m->layers[1];
        assert_int_equal(m->output.format, cases[i].format);
        assert_int_equal(layer->qkv.format, cases[i].format);
        assert_int_equal(layer->gate_up.format, cases[i].format);
        check_rows(m, file, MODEL_TENSOR_TOKEN_EMBEDDING, 0, &m->embedding, 0);
        check_rows(m, file, MODEL_TENSOR_OUTPUT, 0, &m->output, 0);
        check_rows(m, file, MODEL_TENSOR_Q, 1, &layer->qkv, 0);
        check_rows(m, file, MODEL_TENSOR_K, 1, &layer->qkv, g->heads * g->head_dim);
        check_rows(m, file, MODEL_TENSOR_O, 1, &layer->attention_out, 0);
        check_rows(m, file, MODEL_TENSOR_DOWN, 1, &layer->down, 0);
        model_file_close(file);
        model_destroy(m);
    }
}

static void fingerprints_tell_forms_and_weights(void **state) {
    const fixture *f = *state;
    uint8_t seen[5][MODEL_FINGERPRINT_BYTES];
    for (uint32_t i = 0; i < 5; i++) {
        write_stored(f, BT_GGUF_TENSOR_Q8_0, i < 4 ? 3 : 4);
        model *m = load(f->path, (model_load_options){.weights = (model_weights)(i % 4)});
        memcpy(seen[i], m->card.fingerprint, sizeof seen[i]);
        model_destroy(m);
        /* Threads change nothing. */
        m = load(f->path, (model_load_options){.weights = (model_weights)(i % 4), .threads = 4});
        assert_memory_equal(seen[i], m->card.fingerprint, sizeof seen[i]);
        model_destroy(m);
    }
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t j = 0; j < i; j++) {
            const bool is_same = memcmp(seen[i], seen[j], sizeof seen[i]) == 0;
            /* For Q8_0, native is what auto is. */
            assert_int_equal(is_same, i == MODEL_WEIGHTS_NATIVE && j == MODEL_WEIGHTS_AUTO);
        }
}

static void scales_must_be_numbers(void **state) {
    const fixture *f = *state;
    write_stored(f, BT_GGUF_TENSOR_Q8_0, 3);
    bt_error error;
    bt_gguf *file;
    assert_int_equal(bt_gguf_open(f->path, &file, &error), BT_OK);
    const uint64_t offset = bt_gguf_find_tensor(file, "blk.1.ffn_up.weight")->offset;
    bt_gguf_close(file);
    FILE *out = fopen(f->path, "r+b");
    assert_non_null(out);
    static const uint8_t infinite[] = {0x00, 0x7c};
    assert_int_equal(fseek(out, (long)offset + 34 * 4, SEEK_SET), 0);
    assert_int_equal(fwrite(infinite, 1, 2, out), 2);
    assert_int_equal(fclose(out), 0);
    model *m = NULL;
    const model_load_options options = {.threads = 2};
    assert_int_equal(model_load(f->path, &options, &m, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "blk.1.ffn_up.weight has a weight in row 1 that is not"));
    assert_null(m);
}

/* ---- the cache */

static model_load_options cached(const fixture *f) {
    return (model_load_options){
        .threads = 2, .cache_folder = f->cache.path, .cache_bytes_max = UINT64_C(1) << 40};
}

/* Waits until the file is old enough to be told from a later one by its times. */
static void settle(const fixture *f) {
    model_identity identity;
    do {
        sched_yield();
        assert_true(model_identity_read(f->path, &identity));
    } while (!identity.is_settled);
}

static uint32_t entries(const fixture *f) {
    DIR *listing = opendir(f->cache.path);
    assert_non_null(listing);
    uint32_t count = 0;
    for (const struct dirent *at; (at = readdir(listing)) != NULL;)
        count += strstr(at->d_name, ".weights") != NULL;
    closedir(listing);
    return count;
}

static void cached_weights_are_those_of_the_file(void **state) {
    const fixture *f = *state;
    static const model_weights forms[] = {MODEL_WEIGHTS_AUTO, MODEL_WEIGHTS_BF16,
                                          MODEL_WEIGHTS_INT8};
    write_stored(f, BT_GGUF_TENSOR_Q8_0, 3);
    settle(f);
    for (uint32_t i = 0; i < BT_ARRAY_COUNT(forms); i++) {
        model_load_options options = cached(f);
        options.weights = forms[i];
        model *alone = load(f->path, (model_load_options){.weights = forms[i]});
        model *first = load(f->path, options);
        assert_int_equal(entries(f), i + 1);
        model *second = load(f->path, options);
        assert_int_equal(entries(f), i + 1);
        assert_true(is_same_model(alone, first));
        assert_true(is_same_model(alone, second));
        model_destroy(alone);
        model_destroy(first);
        model_destroy(second);
    }
}

static void folders_are_cached_as_well(void **state) {
    const fixture *f = *state;
    const tiny_model tiny = {.family = MODEL_FAMILY_QWEN2, .seed = 2};
    assert_int_equal(tiny_model_write_hf(&tiny, f->folder.path), BT_OK);
    fixture folder = *f;
    (void)snprintf(folder.path, sizeof folder.path, "%s", f->folder.path);
    settle(&folder);
    model *first = load(folder.path, cached(f));
    model *second = load(folder.path, cached(f));
    assert_int_equal(entries(f), 1);
    assert_true(is_same_model(first, second));
    model_destroy(first);
    model_destroy(second);
}

static void other_weights_in_the_file_are_noticed(void **state) {
    const fixture *f = *state;
    write_stored(f, BT_GGUF_TENSOR_Q8_0, 3);
    settle(f);
    model *old = load(f->path, cached(f));
    write_stored(f, BT_GGUF_TENSOR_Q8_0, 4); /* the same size and the same metadata */
    model *fresh = load(f->path, cached(f));
    model *alone = load(f->path, (model_load_options){0});
    assert_false(is_same_model(old, fresh));
    assert_true(is_same_model(alone, fresh));
    model_destroy(old);
    model_destroy(fresh);
    model_destroy(alone);
}

static void trouble_with_the_folder_is_no_error(void **state) {
    const fixture *f = *state;
    write_stored(f, BT_GGUF_TENSOR_Q8_0, 3);
    settle(f);
    model *alone = load(f->path, (model_load_options){0});
    model_load_options options = cached(f);
    static const char *const folders[] = {"", "/proc/none", "/dev/null"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(folders); i++) {
        options.cache_folder = folders[i];
        model *m = load(f->path, options);
        assert_true(is_same_model(alone, m));
        model_destroy(m);
    }
    options = cached(f);
    options.cache_bytes_max = 1000;
    model *m = load(f->path, options);
    assert_int_equal(entries(f), 0);
    assert_true(is_same_model(alone, m));
    model_destroy(m);
    model_destroy(alone);
}

static void several_processes_make_one_entry(void **state) {
    const fixture *f = *state;
    enum { PROCESSES = 5 };
    write_stored(f, BT_GGUF_TENSOR_Q8_0, 3);
    settle(f);
    model *alone = load(f->path, (model_load_options){0});
    pid_t children[PROCESSES];
    for (size_t i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] != 0) continue;
        const model_load_options options = cached(f);
        model *m;
        if (model_load(f->path, &options, &m, NULL) != BT_OK) _exit(1);
        _exit(is_same_model(alone, m) ? 0 : 2);
    }
    for (size_t i = 0; i < PROCESSES; i++) {
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_int_equal(entries(f), 1);
    model_destroy(alone);
}

static void failed_allocations_are_reported(void **state) {
#ifdef BT_FAULT
    const fixture *f = *state;
    write_stored(f, BT_GGUF_TENSOR_Q8_0, 3);
    settle(f);
    model *alone = load(f->path, (model_load_options){0});
    uint32_t failures = 0;
    for (uint64_t nth = 1;; nth++) {
        const model_load_options options = cached(f);
        model *m = NULL;
        bt_error error = {0};
        /* Every other time what is found, else what has to be packed. */
        if (nth % 2 == 0) {
            model_destroy(load(f->path, options));
        } else {
            test_folder_remove(&f->cache);
            assert_int_equal(mkdir(f->cache.path, 0700), 0);
        }
        bt_fault_set(BT_FAULT_ALLOC, nth);
        const bt_status status = model_load(f->path, &options, &m, &error);
        const bool is_past = bt_fault_visits(BT_FAULT_ALLOC) < nth;
        bt_fault_set(BT_FAULT_ALLOC, 0);
        failures += status != BT_OK;
        if (status == BT_OK) assert_true(is_same_model(alone, m));
        if (status != BT_OK) assert_true(error.text[0] != '\0');
        model_destroy(status == BT_OK ? m : NULL);
        if (is_past && nth % 2 == 1) break;
    }
    assert_true(failures > 5);
    model_destroy(alone);
#else
    (void)state;
#endif
}

static void the_default_folder_follows_the_environment(void **state) {
    (void)state;
    char path[256];
    assert_int_equal(setenv("XDG_CACHE_HOME", "/x/cache", 1), 0);
    assert_int_equal(setenv("HOME", "/home/x", 1), 0);
    assert_true(model_load_default_cache(path, sizeof path));
    assert_string_equal(path, "/x/cache/baton/weights");
    assert_int_equal(setenv("XDG_CACHE_HOME", "relative", 1), 0);
    assert_true(model_load_default_cache(path, sizeof path));
    assert_string_equal(path, "/home/x/.cache/baton/weights");
    assert_false(model_load_default_cache(path, 10));
    assert_int_equal(unsetenv("XDG_CACHE_HOME"), 0);
    assert_int_equal(unsetenv("HOME"), 0);
    assert_false(model_load_default_cache(path, sizeof path));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(stored_weights_are_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(fingerprints_tell_forms_and_weights, set_up, tear_down),
        cmocka_unit_test_setup_teardown(scales_must_be_numbers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(cached_weights_are_those_of_the_file, set_up, tear_down),
        cmocka_unit_test_setup_teardown(folders_are_cached_as_well, set_up, tear_down),
        cmocka_unit_test_setup_teardown(other_weights_in_the_file_are_noticed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(trouble_with_the_folder_is_no_error, set_up, tear_down),
        cmocka_unit_test_setup_teardown(several_processes_make_one_entry, set_up, tear_down),
        cmocka_unit_test_setup_teardown(failed_allocations_are_reported, set_up, tear_down),
        cmocka_unit_test(the_default_folder_follows_the_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
