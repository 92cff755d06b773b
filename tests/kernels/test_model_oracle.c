/* model_load and model_step against recorded answers of an independent implementation in float32 on
 * the same bf16-rounded weights (tests/vectors/make_model_fixtures.py): logits, and greedy tokens
 * of twenty prompts, with KV in f32 and in bf16. The tiny models are written here from their seed,
 * as an HF folder and as GGUF; the demo model is $BATON_DEMO_MODEL. The recordings are those of
 * $BATON_MODEL_VECTORS, where it is set. */
#include "kernels/model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file_map.h"
#include "base/mem.h"
#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"

enum {
    PAGE_TOKENS = 32,
    SEQUENCE_TOKENS_MAX = 256,
    SEQUENCE_PAGES_MAX = SEQUENCE_TOKENS_MAX / PAGE_TOKENS,
    CASES = 20,
    GREEDY_TOKENS = 64,
    LINE_BYTES_MAX = 4096,
};

/* What the deviation may be: of logits from those of the implementation with KV in the same dtype
 * (relative norm over all recorded positions, and at the worst one), of logits from those with KV
 * in f32, and the gap between the best two across which a greedy token may be another one. */
typedef struct tolerance {
    kv_dtype dtype;
    const char *name;
    double logits;
    double position;
    double from_f32;
    double gap;
} tolerance;

static const tolerance f32_kv = {KV_DTYPE_F32, "f32", 1e-4, 1e-4, 1e-4, 0};
/* K and V that are a rounding error apart may fall to different sides. */
static const tolerance bf16_kv = {KV_DTYPE_BF16, "bf16", 2e-3, 1e-2, 1e-2, 0.05};

static bool is_live(void) {
    const char *folder = getenv("BATON_MODEL_VECTORS");
    return folder != NULL && folder[0] != '\0';
}

/* Sequences on one model; sequence s has the pages from s * SEQUENCE_PAGES_MAX on, in another
 * order. */
typedef struct session {
    model *m;
    model_runner *runner;
    uint8_t *memory;
    float *logits;        /* [vocab_size], of the first sequence of the last step */
    uint32_t done[CASES]; /* tokens with KV */
} session;

static void open_session(session *s, const char *path, kv_dtype dtype, uint32_t sequences) {
    bt_error error = {0};
    *s = (session){0};
    if (model_load(path, NULL, &s->m, &error) != BT_OK) fail_msg("%s", error.text);
    const kv_page_layout layout = model_kv_layout(s->m, PAGE_TOKENS, dtype);
    const uint32_t pages = sequences * SEQUENCE_PAGES_MAX;
    s->memory = bt_calloc(pages, kv_page_bytes(&layout));
    s->logits =
        bt_calloc((size_t)sequences * model_get_card(s->m)->geometry.vocab_size, sizeof(float));
    assert_non_null(s->memory);
    assert_non_null(s->logits);
    const model_runner_options options = {
        .threads = 2,
        .tokens_max = SEQUENCE_TOKENS_MAX,
        .rows_max = sequences,
        .kv = layout,
        .kv_memory = s->memory,
        .kv_page_count = pages,
    };
    if (model_runner_create(s->m, &options, &s->runner, &error) != BT_OK) {
        fail_msg("%s", error.text);
    }
}

static void close_session(session *s) {
    model_runner_destroy(s->runner);
    model_destroy(s->m);
    bt_free(s->memory);
    bt_free(s->logits);
}

/* Feeds the next tokens of `count` sequences from `first` on, the same number of each (one after
 * the other in ids); gives the greedy token after them and leaves the logits in s->logits. */
static void feed(session *s, uint32_t first, uint32_t count, const int32_t *ids, uint32_t tokens,
                 int32_t *greedy_out) {
    static const uint32_t order[SEQUENCE_PAGES_MAX] = {5, 2, 7, 0, 3, 6, 1, 4};
    uint32_t token_offsets[CASES + 1] = {0};
    uint32_t page_offsets[CASES + 1] = {0};
    uint32_t page_ids[CASES * SEQUENCE_PAGES_MAX];
    uint8_t samples[CASES];
    sampler_params greedy[CASES];
    sampler_row rows[CASES] = {0};
    assert_true(count <= CASES);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t pages = kv_pages_for(s->done[first + i] + tokens, PAGE_TOKENS);
        assert_true(pages <= SEQUENCE_PAGES_MAX);
        token_offsets[i + 1] = token_offsets[i] + tokens;
        page_offsets[i + 1] = page_offsets[i] + pages;
        for (uint32_t p = 0; p < pages; p++)
            page_ids[page_offsets[i] + p] = (first + i) * SEQUENCE_PAGES_MAX + order[p];
        samples[i] = 1;
        greedy[i] = (sampler_params){.temperature = 1.0f, .top_p = 1.0f, .top_k = 1};
    }
    const model_batch batch = {
        .sequences = count,
        .tokens = token_offsets[count],
        .token_offsets = token_offsets,
        .token_ids = ids,
        .first_positions = s->done + first,
        .page_offsets = page_offsets,
        .page_ids = page_ids,
        .samples = samples,
        .sampling = greedy,
        .rows = rows,
        .logits = s->logits,
    };
    assert_int_equal(model_step(s->runner, &batch), BT_OK);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(rows[i].status, SAMPLER_OK);
        greedy_out[i] = rows[i].token;
        s->done[first + i] += tokens;
    }
}

static const char *vectors_path(const char *name, char path[400]) {
    const char *folder = is_live() ? getenv("BATON_MODEL_VECTORS") : "tests/vectors";
    (void)snprintf(path, 400, "%s/%s", folder, name);
    return path;
}

/* A .logits file, mapped; its numbers are aligned. */
typedef struct logits_file {
    bt_file_map map;
    uint32_t tokens, position_count, vocab_size;
    const uint8_t *ids;       /* i32 [tokens] */
    const uint8_t *positions; /* u32 [position_count], ascending */
    const uint8_t *logits;    /* f32 [position_count, vocab_size] */
    const uint8_t *rounded;   /* f32 [position_count, vocab_size], of KV in bf16 */
} logits_file;

static uint32_t load_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static logits_file open_logits(const char *name) {
    logits_file f = {0};
    char file_name[100];
    char path[400];
    bt_error error;
    (void)snprintf(file_name, sizeof file_name, "tiny_%s.logits", name);
    if (bt_file_map_open(vectors_path(file_name, path), &f.map, &error) != BT_OK)
        fail_msg("%s", error.text);
    assert_true(f.map.bytes >= 12);
    f.tokens = load_u32(f.map.data);
    f.position_count = load_u32(f.map.data + 4);
    f.vocab_size = load_u32(f.map.data + 8);
    f.ids = f.map.data + 12;
    f.positions = f.ids + 4 * (size_t)f.tokens;
    f.logits = f.positions + 4 * (size_t)f.position_count;
    const size_t numbers = (size_t)f.position_count * f.vocab_size;
    f.rounded = f.logits + 4 * numbers;
    assert_int_equal(f.map.bytes, 12 + 4 * (f.tokens + f.position_count + 2 * numbers));
    assert_true(f.tokens <= SEQUENCE_TOKENS_MAX && f.position_count >= 8);
    return f;
}

/* Squares of got - wanted and of wanted, summed. */
typedef struct deviation {
    double error;
    double norm;
} deviation;

static double relative(deviation d) {
    return sqrt(d.error / d.norm);
}

static deviation compare(const float *got, const uint8_t *wanted, uint32_t count) {
    deviation d = {0};
    for (uint32_t i = 0; i < count; i++) {
        float reference;
        memcpy(&reference, wanted + 4 * (size_t)i, sizeof reference);
        const double difference = (double)got[i] - (double)reference;
        d.error += difference * difference;
        d.norm += (double)reference * (double)reference;
    }
    return d;
}

static void add(deviation *sum, deviation d) {
    sum->error += d.error;
    sum->norm += d.norm;
}

/* One step up to each recorded position: long chunks, short ones and single tokens. */
static void compare_logits(session *s, const logits_file *f, const tolerance *t, const char *name) {
    int32_t ids[SEQUENCE_TOKENS_MAX];
    int32_t greedy;
    double worst = 0;
    deviation all = {0};
    deviation from_f32 = {0};
    const uint8_t *same_kv = t->dtype == KV_DTYPE_F32 ? f->logits : f->rounded;
    memcpy(ids, f->ids, sizeof ids[0] * f->tokens);
    for (uint32_t p = 0; p < f->position_count; p++) {
        const uint32_t position = load_u32(f->positions + 4 * (size_t)p);
        assert_true(position >= s->done[0] && position < f->tokens);
        feed(s, 0, 1, ids + s->done[0], position + 1 - s->done[0], &greedy);
        const size_t offset = 4 * (size_t)p * f->vocab_size;
        const deviation d = compare(s->logits, same_kv + offset, f->vocab_size);
        if (!(relative(d) <= t->position))
            fail_msg("%s, position %u: relative error %g", name, position, relative(d));
        if (relative(d) > worst) worst = relative(d);
        add(&all, d);
        add(&from_f32, compare(s->logits, f->logits + offset, f->vocab_size));
    }
    print_message("%s, KV in %s: relative error of logits %.2g, of the worst position %.2g; %.2g "
                  "from KV in f32\n",
                  name, t->name, relative(all), worst, relative(from_f32));
    if (!(relative(all) <= t->logits)) fail_msg("%s: relative error %g", name, relative(all));
    /* Attention of the tiny models is sharp, and some seeds are a little above this limit, in the
     * implementation too: it is for the recorded seed. */
    if (!is_live() && !(relative(from_f32) <= t->from_f32))
        fail_msg("%s: %g from KV in f32", name, relative(from_f32));
}

/* One prompt of a file of greedy tokens. */
typedef struct greedy_case {
    int32_t prompt[SEQUENCE_TOKENS_MAX];
    uint32_t prompt_count;
    int32_t ids[GREEDY_TOKENS];
    double gaps[GREEDY_TOKENS]; /* between the best two logits */
    uint32_t count;
} greedy_case;

/* The cases of one model. */
typedef struct greedy_file {
    uint64_t seed;
    greedy_case cases[CASES];
    uint32_t count;
    uint32_t tokens; /* of each case */
} greedy_file;

static void parse_prompt(const char *text, greedy_case *c) {
    char *end = NULL;
    for (c->prompt_count = 0; c->prompt_count < SEQUENCE_TOKENS_MAX; c->prompt_count++) {
        const long id = strtol(text, &end, 10);
        if (end == text) return;
        c->prompt[c->prompt_count] = (int32_t)id;
        text = end;
    }
}

static void parse_greedy(const char *text, greedy_case *c) {
    char *end = NULL;
    for (c->count = 0; c->count < GREEDY_TOKENS; c->count++) {
        const long id = strtol(text, &end, 10);
        if (end == text || *end != ':') return;
        c->ids[c->count] = (int32_t)id;
        text = end + 1;
        c->gaps[c->count] = strtod(text, &end);
        text = end;
    }
}

/* The cases behind the line "model NAME", or all of them without a name. */
static const greedy_file *read_greedy(const char *file_name, const char *name) {
    static greedy_file f;
    char path[400];
    char line[LINE_BYTES_MAX];
    bool is_wanted = name == NULL;
    FILE *file = fopen(vectors_path(file_name, path), "re");
    assert_non_null(file);
    f.count = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "seed ", 5) == 0) f.seed = strtoull(line + 5, NULL, 10);
        if (strncmp(line, "model ", 6) == 0) is_wanted = strcmp(line + 6, name) == 0;
        if (!is_wanted) continue;
        if (strncmp(line, "prompt ", 7) == 0) {
            assert_true(f.count < CASES);
            parse_prompt(line + 7, &f.cases[f.count]);
        }
        if (strncmp(line, "greedy ", 7) != 0) continue;
        greedy_case *c = &f.cases[f.count++];
        parse_greedy(line + 7, c);
        f.tokens = f.cases[0].count;
        assert_true(c->prompt_count > 0 && c->count == f.tokens && f.tokens >= 40);
    }
    assert_int_equal(fclose(file), 0);
    assert_true(f.count >= 6);
    return &f;
}

/* What a comparison of greedy tokens found. */
typedef struct divergence {
    uint32_t tokens; /* that are other ones */
    uint32_t prompt; /* of the first of them, by token, then by prompt */
    uint32_t token;
    double gap;
} divergence;

static void compare_tokens(const greedy_file *f, uint32_t token, const int32_t *got, double limit,
                           divergence *found) {
    for (uint32_t i = 0; i < f->count; i++) {
        const greedy_case *c = &f->cases[i];
        if (got[i] == c->ids[token]) continue;
        if (found->tokens++ == 0) {
            found->prompt = i;
            found->token = token;
            found->gap = c->gaps[token];
        }
        if (c->gaps[token] > limit)
            fail_msg("prompt %u: token %u is %d, not %d, across a gap of %g", i, token, got[i],
                     c->ids[token], c->gaps[token]);
    }
}

/* Follows the recorded tokens, so that every position is compared, whatever came before. All
 * prompts generate in one batch. */
static void compare_greedy(session *s, const greedy_file *f, const tolerance *t, const char *name) {
    int32_t got[CASES];
    int32_t ids[CASES];
    divergence found = {0};
    memset(s->done, 0, sizeof s->done);
    for (uint32_t i = 0; i < f->count; i++)
        feed(s, i, 1, f->cases[i].prompt, f->cases[i].prompt_count, &got[i]);
    for (uint32_t token = 0; token < f->tokens; token++) {
        compare_tokens(f, token, got, t->gap, &found);
        for (uint32_t i = 0; i < f->count; i++)
            ids[i] = f->cases[i].ids[token];
        if (token + 1 < f->tokens) feed(s, 0, f->count, ids, 1, got);
    }
    if (found.tokens == 0) {
        print_message("%s, KV in %s: all %u greedy tokens equal\n", name, t->name,
                      f->count * f->tokens);
        return;
    }
    print_message("%s, KV in %s: %u of %u greedy tokens differ; the first is token %u of prompt "
                  "%u, across a gap of %.3g\n",
                  name, t->name, found.tokens, f->count * f->tokens, found.token, found.prompt,
                  found.gap);
}

/* ---- tiny models */

static const char *const names[] = {
    "llama",        "smollm2",      "mistral",    "qwen2",      "qwen3",      "llama-bias",
    "llama-linear", "llama-llama3", "llama-yarn", "qwen2-yarn", "qwen3-yarn", "mistral-yarn",
};

static void check_logits(const char *path, const logits_file *f, const tolerance *t,
                         const char *name, model_card *card) {
    session s;
    open_session(&s, path, t->dtype, 1);
    *card = *model_get_card(s.m);
    assert_int_equal(card->geometry.vocab_size, f->vocab_size);
    compare_logits(&s, f, t, name);
    close_session(&s);
}

/* A GGUF file cannot say all that a folder can: see tiny_model.h. Where it can, both are one model.
 */
static void check_gguf(const tiny_model *m, const char *name, const logits_file *f,
                       const model_card *of_folder, const test_folder *folder) {
    char path[300];
    model_card card;
    const bool is_cut_short = m->rope == MODEL_ROPE_KIND_YARN && m->family == MODEL_FAMILY_QWEN3;
    const bool is_same = m->rope == MODEL_ROPE_KIND_PLAIN || m->rope == MODEL_ROPE_KIND_LINEAR;
    if (is_cut_short) return;
    assert_int_equal(tiny_model_write_gguf(m, folder->path, "model.gguf"), BT_OK);
    (void)snprintf(path, sizeof path, "%s/model.gguf", folder->path);
    print_message("the same from GGUF: ");
    check_logits(path, f, &f32_kv, name, &card);
    if (is_same)
        assert_memory_equal(card.fingerprint, of_folder->fingerprint, sizeof card.fingerprint);
}

static void tiny_model_agrees(void **state) {
    const char *name = *state;
    static const tolerance *const tolerances[] = {&f32_kv, &bf16_kv};
    tiny_model m = {0};
    assert_true(tiny_model_parse(name, &m));
    const greedy_file *greedy = read_greedy("tiny_greedy.txt", name);
    m.seed = greedy->seed;
    logits_file f = open_logits(name);
    const test_folder folder = test_folder_make();
    assert_int_equal(tiny_model_write_hf(&m, folder.path), BT_OK);
    for (size_t i = 0; i < BT_ARRAY_COUNT(tolerances); i++) {
        const tolerance *t = tolerances[i];
        model_card card;
        session s;
        check_logits(folder.path, &f, t, name, &card);
        open_session(&s, folder.path, t->dtype, CASES);
        compare_greedy(&s, greedy, t, name);
        close_session(&s);
        if (i == 0) check_gguf(&m, name, &f, &card, &folder);
    }
    bt_file_map_close(&f.map);
    test_folder_remove(&folder);
}

/* The comparison can fail: weights of another seed, another window and another scaling are far off.
 */
static void other_models_do_not_agree(void **state) {
    (void)state;
    static const struct {
        const char *name;
        const char *recorded;
        uint32_t seed_step;
        double least;
    } cases[] = {
        {"llama", "llama", 1, 0.1},
        {"llama", "mistral", 0, 1e-2},
        {"llama", "llama-linear", 0, 1e-2},
        {"llama-linear", "llama-llama3", 0, 1e-2},
        {"llama-llama3", "llama-yarn", 0, 1e-2},
        {"qwen3", "qwen3-yarn", 0, 1e-2},
    };
    const uint64_t seed = read_greedy("tiny_greedy.txt", "llama")->seed;
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        tiny_model m = {.seed = seed + cases[i].seed_step};
        int32_t ids[SEQUENCE_TOKENS_MAX];
        int32_t greedy;
        session s;
        assert_true(tiny_model_parse(cases[i].name, &m));
        m.context_tokens = SEQUENCE_TOKENS_MAX;
        logits_file f = open_logits(cases[i].recorded);
        const test_folder folder = test_folder_make();
        assert_int_equal(tiny_model_write_hf(&m, folder.path), BT_OK);
        open_session(&s, folder.path, KV_DTYPE_F32, 1);
        memcpy(ids, f.ids, sizeof ids[0] * f.tokens);
        feed(&s, 0, 1, ids, f.tokens, &greedy);
        const size_t last = (size_t)(f.position_count - 1) * f.vocab_size;
        const double error = relative(compare(s.logits, f.logits + 4 * last, f.vocab_size));
        if (!(error > cases[i].least))
            fail_msg("%s is as %s: %g", cases[i].name, cases[i].recorded, error);
        close_session(&s);
        bt_file_map_close(&f.map);
        test_folder_remove(&folder);
    }
}

/* Under a sanitizer the demo model takes minutes here and shows nothing that the tiny ones do not.
 */
#ifdef __SANITIZE_ADDRESS__
static const bool is_instrumented = true;
#else
static const bool is_instrumented = false;
#endif

/* ---- the demo model */

static void demo_model_agrees(void **state) {
    const tolerance *t = *state;
    const char *path = getenv("BATON_DEMO_MODEL");
    if (path == NULL || path[0] == '\0') skip();
    session s;
    open_session(&s, path, t->dtype, CASES);
    compare_greedy(&s, read_greedy("demo_greedy.txt", NULL), t, "demo");
    close_session(&s);
}

/* Prestates are not written to, but cmocka takes plain pointers. */
static void *plain(const void *constant) {
    void *out;
    memcpy(&out, &constant, sizeof out);
    return out;
}

int main(void) {
    static char test_names[BT_ARRAY_COUNT(names)][64];
    struct CMUnitTest tests[BT_ARRAY_COUNT(names) + 3] = {0};
    size_t count = 0;
    for (; count < BT_ARRAY_COUNT(names); count++) {
        (void)snprintf(test_names[count], sizeof test_names[count], "tiny_%s_agrees", names[count]);
        tests[count] = (struct CMUnitTest){.name = test_names[count],
                                           .test_func = tiny_model_agrees,
                                           .initial_state = plain(names[count])};
    }
    tests[count++] = (struct CMUnitTest)cmocka_unit_test(other_models_do_not_agree);
    if (!is_live() && !is_instrumented) {
        tests[count++] = (struct CMUnitTest){.name = "demo_model_agrees_with_f32_kv",
                                             .test_func = demo_model_agrees,
                                             .initial_state = plain(&f32_kv)};
        tests[count++] = (struct CMUnitTest){.name = "demo_model_agrees_with_bf16_kv",
                                             .test_func = demo_model_agrees,
                                             .initial_state = plain(&bf16_kv)};
    }
    return _cmocka_run_group_tests("model_oracle", tests, count, NULL, NULL);
}
