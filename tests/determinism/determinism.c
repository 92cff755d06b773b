/* Rule 4, proven: from a base run, one factor at a time; every digest must stay. The digests of the
 * base run are recorded, so that another compiler, machine or architecture is held to them too.
 *
 *   test_determinism RECORDED             every factor, on every instruction set of this CPU
 *   test_determinism --few RECORDED       the base run and one of all factors together, for slow
 *                                         CPUs: emulated ones, sanitizers
 *   test_determinism ... --half N RECORDED    the odd subjects and the self-test (1), the even (2)
 *   test_determinism --print              what to record
 *
 * Speaks TAP, and needs bt_kernels alone. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/compiler.h"
#include "kernels/model/model_generate.h"
#include "kernels/ops.h"
#include "kernels/self_test.h"
#include "tests/kernels/tiny_models.h"
#include "world.h"

typedef struct subject {
    const char *name;
    size_t geometry; /* in tiny_models */
    pack_format stored;
    model_weights weights;
    kv_dtype dtype;
} subject;

static const subject subjects[] = {
    {"llama bf16", 0, PACK_BF16, MODEL_WEIGHTS_BF16, KV_DTYPE_BF16},
    {"llama bf16, f32 KV", 0, PACK_BF16, MODEL_WEIGHTS_BF16, KV_DTYPE_F32},
    {"qwen2 bf16", 1, PACK_BF16, MODEL_WEIGHTS_BF16, KV_DTYPE_BF16},
    {"qwen2 int8", 1, PACK_BF16, MODEL_WEIGHTS_INT8, KV_DTYPE_BF16},
    {"qwen2 q8_0", 1, PACK_Q8_0, MODEL_WEIGHTS_AUTO, KV_DTYPE_BF16},
    {"qwen2 q4_0", 1, PACK_Q4_0, MODEL_WEIGHTS_NATIVE, KV_DTYPE_BF16},
    {"qwen2 q4_1", 1, PACK_Q4_1, MODEL_WEIGHTS_NATIVE, KV_DTYPE_BF16},
    {"qwen3 bf16", 2, PACK_BF16, MODEL_WEIGHTS_BF16, KV_DTYPE_BF16},
    {"mistral bf16", 3, PACK_BF16, MODEL_WEIGHTS_BF16, KV_DTYPE_BF16},
};

static unsigned cases, failures;

static void tell(bool is_ok, const char *subject_name, const char *what) {
    cases++;
    failures += !is_ok;
    printf("%sok %u - %s: %s\n", is_ok ? "" : "not ", cases, subject_name, what);
    (void)fflush(stdout);
}

static model *make_model(const subject *s) {
    model *m = NULL;
    bt_error error;
    if (model_generate_stored(&tiny_models[s->geometry], 11 + s->geometry, s->stored, s->weights,
                              &m, &error) == BT_OK)
        return m;
    fprintf(stderr, "%s: %s\n", s->name, error.text);
    exit(2);
}

/* The recorded digest of a subject: a line "HEX NAME". 0: there is none. */
static uint64_t recorded(const char *path, const char *name) {
    char line[256];
    uint64_t found = 0;
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        perror(path);
        exit(2);
    }
    while (fgets(line, sizeof line, file) != NULL) {
        char *rest = NULL;
        const uint64_t digest = strtoull(line, &rest, 16);
        line[strcspn(line, "\n")] = '\0';
        if (rest != line && *rest == ' ' && strcmp(rest + 1, name) == 0) found = digest;
    }
    (void)fclose(file);
    return found;
}

/* Names the first sequence that differs, on the way to a failure. */
static void compare(const subject *s, const model *m, const digests *base, const variation *v) {
    const digests got = world_run(m, s->dtype, v);
    for (uint32_t i = 0; i < WORLD_SEQUENCES; i++) {
        if (got.of[i] == base->of[i]) continue;
        printf("# sequence %u is another\n", i);
        break;
    }
    if (got.bounded != base->bounded) printf("# rows of bounded masks are others\n");
    tell(got.all == base->all && got.bounded == base->bounded, s->name, v->name);
}

/* Every size for the first subject, for the others those that cut differently. */
static void vary_batch(const subject *s, const model *m, const digests *base) {
    static const bool is_telling[WORLD_SEQUENCES + 1] = {
        [1] = true, [2] = true, [3] = true, [7] = true, [16] = true, [33] = true, [64] = true};
    char name[64];
    variation v = {.name = name};
    for (v.batch = 1; v.batch <= WORLD_SEQUENCES; v.batch++) {
        if (s != subjects && !is_telling[v.batch]) continue;
        (void)snprintf(name, sizeof name, "batch %u", v.batch);
        compare(s, m, base, &v);
    }
}

static void vary_numbers(const subject *s, const model *m, const digests *base) {
    static const uint32_t chunks[] = {1, 7, 32, 512};
    char name[64];
    variation v = {.name = name};
    for (size_t i = 0; i < BT_ARRAY_COUNT(chunks); i++) {
        v.chunk = chunks[i];
        (void)snprintf(name, sizeof name, "chunk %u", v.chunk);
        compare(s, m, base, &v);
    }
    v.chunk = 0;
    for (v.threads = 2; v.threads <= 4; v.threads++) {
        (void)snprintf(name, sizeof name, "threads %u", v.threads);
        compare(s, m, base, &v);
    }
}

static const variation together = {.name = "all factors together",
                                   .threads = 3,
                                   .batch = 33,
                                   .chunk = 7,
                                   .page_tokens = 16,
                                   .page_seed = 9,
                                   .is_reversed = true,
                                   .shares_prefixes = true};

static void vary_rest(const subject *s, const model *m, const digests *base) {
    static const variation variations[] = {
        {.name = "page order", .page_seed = 5},
        {.name = "pages of 16", .page_tokens = 16},
        {.name = "pages of 64", .page_tokens = 64},
        {.name = "order in the batch", .is_reversed = true},
        {.name = "shared prefix pages", .shares_prefixes = true},
        {.name = "shared prefix pages of 16", .shares_prefixes = true, .page_tokens = 16},
        {.name = "lost pages, computed anew", .recomputes = true},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(variations); i++)
        compare(s, m, base, &variations[i]);
}

/* Sets that are compiled in and that this CPU has not. */
static void tell_unrun_isas(void) {
#ifdef __x86_64__
    static const char *const compiled[] = {"avx2", "avx512"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(compiled); i++) {
        bool is_run = false;
        for (uint32_t n = 0; dev_host_isa_at(n) != NULL; n++)
            is_run = is_run || strcmp(dev_host_isa_at(n), compiled[i]) == 0;
        if (is_run) continue;
        cases++;
        printf("ok %u - %s is compiled, not run # SKIP not on this machine\n", cases, compiled[i]);
    }
#endif
}

static void vary_isa(const subject *s, const model *m, const digests *base) {
    char name[64];
    for (uint32_t i = 0; dev_host_isa_at(i) != NULL; i++) {
        variation v = {.name = name, .isa = dev_host_isa_at(i)};
        (void)snprintf(name, sizeof name, "%s", v.isa);
        compare(s, m, base, &v);
        v.threads = 2;
        v.batch = 5;
        v.chunk = 7;
        (void)snprintf(name, sizeof name, "%s, batches of 5, chunks of 7, 2 threads", v.isa);
        compare(s, m, base, &v);
    }
}

static const variation base_run = {.name = "the base run is the recorded one"};
static const char bounded_name[] = "%s, bounded masks"; /* of a subject's second record */

static void check_recorded(const char *path, const char *name, uint64_t digest) {
    if (recorded(path, name) != digest) printf("# now %016" PRIx64 "\n", digest);
    tell(recorded(path, name) == digest, name, base_run.name);
}

static void check(const subject *s, const char *path, bool is_few) {
    model *m = make_model(s);
    const digests base = world_run(m, s->dtype, &base_run);
    char name[64];
    (void)snprintf(name, sizeof name, bounded_name, s->name);
    check_recorded(path, s->name, base.all);
    check_recorded(path, name, base.bounded);
    if (!is_few || s == subjects) compare(s, m, &base, &together);
    if (!is_few) {
        compare(s, m, &base, &(variation){.name = "the same again"});
        vary_isa(s, m, &base);
        vary_batch(s, m, &base);
        vary_numbers(s, m, &base);
        vary_rest(s, m, &base);
    }
    model_destroy(m);
}

static void print(const subject *s) {
    model *m = make_model(s);
    const digests base = world_run(m, s->dtype, &base_run);
    char name[64];
    (void)snprintf(name, sizeof name, bounded_name, s->name);
    printf("%016" PRIx64 " %s\n", base.all, s->name);
    printf("%016" PRIx64 " %s\n", base.bounded, name);
    model_destroy(m);
}

static uint64_t self_test(void) {
    uint32_t hash = 0;
    bt_error error;
    if (self_test_run(NULL, &hash, &error) == BT_OK) return hash;
    fprintf(stderr, "self-test: %s\n", error.text);
    exit(2);
}

static int print_all(void) {
    printf("# %s; made by: test_determinism --print\n", model_numerics());
    for (size_t i = 0; i < BT_ARRAY_COUNT(subjects); i++)
        print(&subjects[i]);
    printf("%016" PRIx64 " self-test\n", self_test());
    return 0;
}

typedef struct arguments {
    const char *recorded;
    bool is_few;
    bool prints;
    bool has_half[2]; /* the first is that of subjects 0, 2, ... and of the self-test */
} arguments;

static bool parse(int argc, char **argv, arguments *out) {
    *out = (arguments){.has_half = {true, true}};
    int i = 1;
    if (i < argc && strcmp(argv[i], "--print") == 0) {
        out->prints = true;
        return argc == 2;
    }
    if (i < argc && strcmp(argv[i], "--few") == 0) {
        out->is_few = true;
        i++;
    }
    if (i + 1 < argc && strcmp(argv[i], "--half") == 0) {
        out->has_half[0] = strcmp(argv[i + 1], "1") == 0;
        out->has_half[1] = strcmp(argv[i + 1], "2") == 0;
        i += 2;
    }
    if (i + 1 != argc || !(out->has_half[0] || out->has_half[1])) return false;
    out->recorded = argv[i];
    return true;
}

int main(int argc, char **argv) {
    arguments a;
    if (!parse(argc, argv, &a)) {
        fprintf(stderr, "usage: test_determinism [--few] [--half 1|2] RECORDED | --print\n");
        return 2;
    }
    if (a.prints) return print_all();
    for (size_t i = 0; i < BT_ARRAY_COUNT(subjects); i++)
        if (a.has_half[i % 2]) check(&subjects[i], a.recorded, a.is_few);
    if (a.has_half[0]) {
        tell(recorded(a.recorded, "self-test") == self_test(), "self-test", "the recorded number");
        if (!a.is_few) tell_unrun_isas();
    }
    printf("1..%u\n", cases);
    return failures > 0;
}
