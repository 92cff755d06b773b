/* What loading and running a model takes: at its peak at most the weights in run-time form times
 * 1.1, the KV pages and 96 MiB. Each case is a process of its own, which reads its peak from the
 * system. The generated models are larger than the slack, so that a second copy of the weights, or
 * the file's pages beside them, would be seen. */
#include "kernels/model.h"

#include <fcntl.h>
#include <inttypes.h>
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

#include "base/gguf.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/model/model_identity.h"
#include "kernels/model/model_internal.h"
#include "tests/support/stored_model.h"
#include "tests/support/test_bytes.h"

enum { PAGES = 64, PROMPT = 300, TOKENS_MAX = 512, THREADS = 2, CHILD_FAILED = 99 };
static const uint64_t slack_bytes = (uint64_t)96 << 20;

static stored_model model_of(uint32_t type, bool is_tied) {
    return (stored_model){.geometry = {.family = MODEL_FAMILY_LLAMA,
                                       .vocab_size = 12288,
                                       .context_tokens = 2048,
                                       .hidden_size = 2048,
                                       .intermediate_size = 5632,
                                       .layers = 1,
                                       .heads = 16,
                                       .kv_heads = 4,
                                       .head_dim = 128,
                                       .norm_epsilon = 1e-5F,
                                       .rope_theta = 10000.0,
                                       .has_tied_embeddings = is_tied},
                          .type = type};
}

static uint64_t peak_bytes(void) {
    FILE *file = fopen("/proc/self/status", "re");
    char line[256];
    uint64_t kilobytes = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        (void)sscanf(line, "VmHWM: %" SCNu64, &kilobytes);
    if (file != NULL) (void)fclose(file);
    return kilobytes << 10;
}

/* A prompt and one token after it. */
static bool run_steps(const model *m, const kv_page_layout *layout, void *pages) {
    const model_runner_options options = {.threads = THREADS,
                                          .tokens_max = TOKENS_MAX,
                                          .rows_max = 4,
                                          .kv = *layout,
                                          .kv_memory = pages,
                                          .kv_page_count = PAGES};
    model_runner *runner;
    if (model_runner_create(m, &options, &runner, NULL) != BT_OK) return false;
    int32_t ids[PROMPT];
    uint32_t page_ids[PAGES];
    for (int32_t i = 0; i < PROMPT; i++)
        ids[i] = i * 37 % (int32_t)m->card.geometry.vocab_size;
    for (uint32_t i = 0; i < PAGES; i++)
        page_ids[i] = i;
    bool is_run = true;
    for (uint32_t first = 0, count = PROMPT; first <= PROMPT && is_run; first += count, count = 1) {
        const uint32_t token_offsets[] = {0, count};
        const uint32_t page_offsets[] = {0, kv_pages_for(first + count, layout->page_tokens)};
        const uint8_t samples = 1;
        const sampler_params sampling = {.temperature = 1.0F, .top_p = 1.0F, .top_k = 1};
        sampler_row row = {0};
        const model_batch batch = {.sequences = 1,
                                   .tokens = count,
                                   .token_offsets = token_offsets,
                                   .token_ids = ids,
                                   .first_positions = &first,
                                   .page_offsets = page_offsets,
                                   .page_ids = page_ids,
                                   .samples = &samples,
                                   .sampling = &sampling,
                                   .rows = &row};
        is_run = model_step(runner, &batch) == BT_OK && row.status == SAMPLER_OK;
    }
    model_runner_destroy(runner);
    return is_run;
}

typedef struct result {
    uint64_t weights, pages, peak;
} result;

/* In the child: what it took, into the pipe. */
static int measure(const char *path, const model_load_options *options, int out) {
    model *m;
    bt_error error = {0};
    if (model_load(path, options, &m, &error) != BT_OK) {
        fprintf(stderr, "%s\n", error.text);
        return CHILD_FAILED;
    }
    const kv_page_layout layout = model_kv_layout(m, 32, KV_DTYPE_BF16);
    const size_t bytes = PAGES * kv_page_bytes(&layout);
    void *pages = host_memory_map(bytes);
    if (pages == NULL || !run_steps(m, &layout, pages)) return CHILD_FAILED;
    const result r = {.weights = m->arena_bytes, .pages = bytes, .peak = peak_bytes()};
    host_memory_unmap(pages, bytes);
    model_destroy(m);
    return write(out, &r, sizeof r) == sizeof r ? 0 : CHILD_FAILED;
}

static void check_peak(const char *what, const char *path, const model_load_options *options) {
    int ends[2], status;
    result r = {0};
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) _exit(measure(path, options, ends[1]));
    close(ends[1]);
    assert_int_equal(read(ends[0], &r, sizeof r), sizeof r);
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    const uint64_t bound = r.weights + r.weights / 10 + r.pages + slack_bytes;
    print_message("%s: weights %.1f MiB, pages %.1f MiB, peak %.1f MiB of %.1f MiB\n", what,
                  (double)r.weights / 0x1p20, (double)r.pages / 0x1p20, (double)r.peak / 0x1p20,
                  (double)bound / 0x1p20);
    assert_true(r.peak > r.weights / 2);
    if (r.peak > bound) fail_msg("%s: the peak is above the bound", what);
}

static void settle(const char *path) {
    model_identity identity;
    do {
        assert_true(model_identity_read(path, &identity));
    } while (!identity.is_settled);
}

/* Packed for itself, packed for the cache, and found there. */
static void check_model(const char *name, const char *path, model_weights weights) {
    const test_folder cache = test_folder_make();
    char what[128];
    assert_int_equal(chmod(cache.path, 0700), 0);
    settle(path);
    model_load_options options = {.weights = weights, .threads = THREADS};
    (void)snprintf(what, sizeof what, "%s, packed", name);
    check_peak(what, path, &options);
    options.cache_folder = cache.path;
    options.cache_bytes_max = UINT64_C(1) << 40;
    (void)snprintf(what, sizeof what, "%s, packed and stored", name);
    check_peak(what, path, &options);
    (void)snprintf(what, sizeof what, "%s, mapped", name);
    check_peak(what, path, &options);
    test_folder_remove(&cache);
}

static void check_stored(const char *name, const stored_model *m, model_weights weights) {
    const test_folder folder = test_folder_make();
    char path[400];
    (void)snprintf(path, sizeof path, "%s/model.gguf", folder.path);
    assert_int_equal(stored_model_write(m, path), BT_OK);
    check_model(name, path, weights);
    test_folder_remove(&folder);
}

static void tied_bf16_stays_in_its_bound(void **state) {
    (void)state;
    const stored_model m = model_of(BT_GGUF_TENSOR_BF16, true);
    check_stored("tied bf16", &m, MODEL_WEIGHTS_AUTO);
}

static void untied_bf16_stays_in_its_bound(void **state) {
    (void)state;
    const stored_model m = model_of(BT_GGUF_TENSOR_BF16, false);
    check_stored("untied bf16", &m, MODEL_WEIGHTS_AUTO);
}

static void int8_stays_in_its_bound(void **state) {
    (void)state;
    const stored_model m = model_of(BT_GGUF_TENSOR_BF16, false);
    check_stored("int8 from untied bf16", &m, MODEL_WEIGHTS_INT8);
}

static void the_demo_model_stays_in_its_bound(void **state) {
    (void)state;
    check_model("demo model", getenv("BATON_DEMO_MODEL"), MODEL_WEIGHTS_AUTO);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tied_bf16_stays_in_its_bound),
        cmocka_unit_test(untied_bf16_stays_in_its_bound),
        cmocka_unit_test(int8_stays_in_its_bound),
    };
    const struct CMUnitTest demo[] = {cmocka_unit_test(the_demo_model_stays_in_its_bound)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (getenv("BATON_DEMO_MODEL") == NULL) return failed;
    return failed + cmocka_run_group_tests(demo, NULL, NULL);
}
