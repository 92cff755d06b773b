/* sampler_draw against sampler_draw_ref, to the bit: every instruction set, kinds of logits with
 * heavy ties and extremes, all combinations of parameters. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/math.h"
#include "tests/kernels/sampler_fixture.h"

enum { VOCAB_MAX = 40000, ISAS_MAX = 4 };

static const char *const isa_names[ISAS_MAX] = {"portable", "avx2", "avx512", "neon"};

typedef struct bench {
    sampler_workspace *workspaces[ISAS_MAX]; /* NULL where this CPU lacks the instruction set */
    float *logits;
    sampler_result got;
    sampler_result want;
    uint64_t draws;
    uint64_t hash; /* FNV-1a over all rows of the reference */
} bench;

static bench bench_create(void) {
    bench b = {.hash = 0xcbf29ce484222325U};
    for (int i = 0; i < ISAS_MAX; i++) {
        const bt_status status =
            sampler_workspace_create_isa(VOCAB_MAX, isa_names[i], &b.workspaces[i]);
        assert_true(status == BT_OK || status == BT_ERR_CALLER_UNSUPPORTED);
    }
    assert_non_null(b.workspaces[0]);
    b.logits = bt_calloc(VOCAB_MAX, sizeof(float));
    assert_non_null(b.logits);
    b.got = sampler_result_create(VOCAB_MAX);
    b.want = sampler_result_create(VOCAB_MAX);
    return b;
}

static void bench_destroy(bench *b) {
    for (int i = 0; i < ISAS_MAX; i++) {
        sampler_workspace_destroy(b->workspaces[i]);
    }
    bt_free(b->logits);
    sampler_result_destroy(&b->got);
    sampler_result_destroy(&b->want);
    assert_true(b->draws > 0);
}

static void hash_bytes(bench *b, const void *data, size_t count) {
    const unsigned char *bytes = data;
    for (size_t i = 0; i < count; i++) {
        b->hash = (b->hash ^ bytes[i]) * 0x100000001b3U;
    }
}

/* Leaves the reference's row in b->want. */
static void compare(bench *b, const sampler_params *params, uint32_t vocab, uint32_t position) {
    /* Only as much of the arrays as can be written is compared. */
    b->got.capacity = b->want.capacity = params->mask_max_tokens + 1;
    sampler_result_reset(&b->want);
    assert_int_equal(sampler_draw_ref(params, b->logits, vocab, position, &b->want.row), BT_OK);
    const sampler_row *row = &b->want.row;
    hash_bytes(b, &row->token, sizeof row->token);
    hash_bytes(b, &row->token_logprob, sizeof row->token_logprob);
    hash_bytes(b, &row->selected_logprob, sizeof row->selected_logprob);
    hash_bytes(b, row->support_ids, row->support_count * sizeof(int32_t));
    hash_bytes(b, row->support_logprobs, row->support_count * sizeof(float));
    hash_bytes(b, row->top, row->top_count * sizeof(sampler_top));
    if (row->status == SAMPLER_OK)
        hash_bytes(b, row->id_logprobs, params->logprob_id_count * sizeof(float));
    for (int i = 0; i < ISAS_MAX; i++) {
        if (b->workspaces[i] == NULL) continue;
        sampler_result_reset(&b->got);
        sampler_draw(b->workspaces[i], params, b->logits, vocab, position, &b->got.row);
        sampler_result_assert_equal(&b->got, &b->want);
        b->draws++;
    }
}

/* All top_k and top_p of a table, with the other parameters turning round. */
static void compare_filters(bench *b, uint32_t vocab, uint64_t turn) {
    const uint32_t top_ks[] = {0, 1, 2, 5, 50, 700, vocab / 2, vocab, vocab + 1, 1U << 30};
    const float top_ps[] = {1.0F, 0.9999F, 0.95F, 0.5F, 0.1F, 1e-6F, 1e-30F};
    const float temperatures[] = {1.0F, 0.8F, 1.7F, 0.05F, 30.0F, 1e-5F};
    for (size_t i = 0; i < BT_ARRAY_COUNT(top_ks); i++) {
        for (size_t j = 0; j < BT_ARRAY_COUNT(top_ps); j++) {
            turn++;
            const sampler_params params = {
                .temperature = temperatures[turn % BT_ARRAY_COUNT(temperatures)],
                .top_p = top_ps[j],
                .top_k = top_ks[i],
                .mask_mode = (uint32_t)(turn % 3),
                .mask_max_tokens = turn % 4 == 0 ? 3 : 64 + (uint32_t)(turn % 1000),
                .vocab_limit = turn % 5 == 0 ? vocab - vocab / 3 : 0,
                .wants_logprob = turn % 7 < 3,
                .seed = turn * 0x9e3779b97f4a7c15U,
            };
            compare(b, &params, vocab, (uint32_t)(turn % 977));
        }
    }
}

static void small_vocabularies(void **state) {
    (void)state;
    bench b = bench_create();
    const uint32_t vocabs[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000};
    for (uint32_t kind = 0; kind < SAMPLER_LOGITS_KINDS; kind++) {
        for (size_t v = 0; v < BT_ARRAY_COUNT(vocabs); v++) {
            const uint64_t seed = kind * 100 + v;
            sampler_fill_logits((sampler_logits_kind)kind, seed, b.logits, vocabs[v]);
            compare_filters(&b, vocabs[v], seed * 70);
        }
    }
    bench_destroy(&b);
}

static void large_vocabularies(void **state) {
    (void)state;
    bench b = bench_create();
    for (uint32_t kind = 0; kind < SAMPLER_LOGITS_KINDS; kind++) {
        const uint32_t vocab = kind % 2 == 0 ? VOCAB_MAX : VOCAB_MAX - 777;
        sampler_fill_logits((sampler_logits_kind)kind, kind + 1000, b.logits, vocab);
        const uint32_t top_ks[] = {0, 1, 3, 50, 1000, 2049, 20000};
        for (size_t i = 0; i < BT_ARRAY_COUNT(top_ks); i++) {
            const uint64_t turn = kind * 31 + i;
            sampler_params params = {
                .temperature = 0.8F,
                .top_p = turn % 2 == 0 ? 1.0F : 0.95F,
                .top_k = top_ks[i],
                .mask_mode = (uint32_t)(turn % 3),
                .mask_max_tokens = turn % 4 == 0 ? 4096 : VOCAB_MAX - 1,
                .wants_logprob = turn % 2,
                .seed = turn,
            };
            compare(&b, &params, vocab, (uint32_t)i);
            params.top_p = 0.5F;
            compare(&b, &params, vocab, (uint32_t)i);
        }
    }
    bench_destroy(&b);
}

static const uint64_t MANY_DRAWS_HASH = 0xfb0dc4e80ad0f52dU;

/* Random rows of the kind that matters most, many positions. */
static void many_draws(void **state) {
    (void)state;
    bench b = bench_create();
    for (uint32_t turn = 0; turn < 1500; turn++) {
        const uint32_t vocab = 2 + turn % 611;
        const sampler_logits_kind kind =
            turn % 2 == 0 ? SAMPLER_LOGITS_NORMAL : SAMPLER_LOGITS_BF16;
        sampler_fill_logits(kind, turn, b.logits, vocab);
        const sampler_params params = {
            .temperature = 0.5F + (float)(turn % 20) / 10.0F,
            .top_p = turn % 3 == 0 ? 1.0F : 1.0F - (float)(turn % 50) / 60.0F,
            .top_k = turn % 5 == 0 ? 0 : 1 + turn % 100,
            .mask_mode = (uint32_t)(turn % 3),
            .mask_max_tokens = 1000,
            .wants_logprob = 1,
            .seed = turn,
        };
        compare(&b, &params, vocab, turn);
    }
    /* Recorded once: a compiler or machine with other bits cannot share a cluster with this one. */
    if (b.hash != MANY_DRAWS_HASH) print_message("hash %016llx\n", (unsigned long long)b.hash);
    assert_true(b.hash == MANY_DRAWS_HASH);
    bench_destroy(&b);
}

/* Parameters with everything that can change logits; the arrays belong to it. */
typedef struct rich_params {
    sampler_params params;
    int32_t outputs[300], banned[8], biased[40], wanted[20];
    float biases[40];
} rich_params;

static uint32_t below(uint64_t *state, uint32_t limit) {
    const uint32_t value = (uint32_t)(sampler_uniform(state) * limit);
    return value < limit ? value : limit - 1;
}

static void pick_ids(uint64_t *state, uint32_t vocab, int32_t *ids, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = (int32_t)below(state, vocab);
    }
}

static void make_rich(rich_params *r, uint32_t vocab, uint64_t seed) {
    static const float min_ps[] = {0.0F, 0.0F, 1e-6F, 0.02F, 0.1F, 0.3F, 0.999F, 1.0F};
    static const float top_ps[] = {1.0F, 1.0F, 0.98F, 0.9F, 0.5F, 0.1F};
    static const uint32_t top_ks[] = {0, 0, 1, 2, 7, 40, 300, 5000};
    static const float penalties[] = {0.0F, 0.0F, 0.5F, -2.0F, 2.0F, 1e-20F};
    static const float repetitions[] = {0.0F, 1.0F, 1.3F, 0.5F, 2.0F, 1e-38F};
    uint64_t s = seed * 0x9e3779b97f4a7c15U + 77;
    sampler_params *p = &r->params;
    *p = (sampler_params){
        .temperature = seed % 4 == 0 ? 1.0F : (float)(0.3 + sampler_uniform(&s)),
        .top_p = top_ps[below(&s, BT_ARRAY_COUNT(top_ps))],
        .top_k = top_ks[below(&s, BT_ARRAY_COUNT(top_ks))],
        .min_p = min_ps[below(&s, BT_ARRAY_COUNT(min_ps))],
        .filter = below(&s, 2),
        .mask_mode = below(&s, 3),
        .mask_max_tokens = below(&s, 8) == 0 ? 3 : vocab,
        .vocab_limit = below(&s, 4) == 0 ? vocab - vocab / 3 : 0,
        .wants_logprob = below(&s, 2),
        .seed = seed,
    };
    if (below(&s, 3) > 0) {
        p->frequency_penalty = penalties[below(&s, BT_ARRAY_COUNT(penalties))];
        p->presence_penalty = penalties[below(&s, BT_ARRAY_COUNT(penalties))];
        p->repetition_penalty = repetitions[below(&s, BT_ARRAY_COUNT(repetitions))];
        p->output_count = below(&s, BT_ARRAY_COUNT(r->outputs) + 1);
        /* Few ids, so that counts rise; all of the vocabulary, so that some are past the limit. */
        pick_ids(&s, below(&s, 2) == 0 ? vocab : 1 + vocab / 20, r->outputs, p->output_count);
        p->output_ids = r->outputs;
    }
    p->banned_count = below(&s, BT_ARRAY_COUNT(r->banned) + 1);
    p->bias_count = below(&s, 3) == 0 ? below(&s, BT_ARRAY_COUNT(r->biased) + 1) : 0;
    pick_ids(&s, vocab, r->banned, p->banned_count);
    pick_ids(&s, vocab, r->biased, p->bias_count);
    for (uint32_t i = 0; i < p->bias_count; i++) {
        r->biases[i] = (float)(sampler_normal(&s) * 20.0);
    }
    p->banned_ids = r->banned;
    p->bias_ids = r->biased;
    p->biases = r->biases;
    if (p->wants_logprob == 0) return;
    p->top_logprobs = below(&s, 3) == 0 ? SAMPLER_TOP_MAX : below(&s, 9);
    p->logprob_id_count = below(&s, BT_ARRAY_COUNT(r->wanted) + 1);
    pick_ids(&s, vocab, r->wanted, p->logprob_id_count);
    p->logprob_ids = r->wanted;
}

static const uint64_t RICH_HASH = 0x7c54e04647485b96U;

/* Every parameter at once, over every kind of logits. */
static void all_parameters(void **state) {
    (void)state;
    bench b = bench_create();
    static rich_params rich;
    uint32_t statuses[3] = {0};
    for (uint32_t turn = 0; turn < 9000; turn++) {
        const uint32_t vocab = turn % 100 == 0 ? 20000 + turn : 1 + turn % 700;
        const sampler_logits_kind kind = (sampler_logits_kind)(turn % SAMPLER_LOGITS_KINDS);
        sampler_fill_logits(kind, turn, b.logits, vocab);
        make_rich(&rich, vocab, turn);
        compare(&b, &rich.params, vocab, turn);
        statuses[b.want.row.status]++;
    }
    for (int i = 0; i < 3; i++) {
        assert_true(statuses[i] > 50);
    }
    if (b.hash != RICH_HASH) print_message("hash %016llx\n", (unsigned long long)b.hash);
    assert_true(b.hash == RICH_HASH);
    bench_destroy(&b);
}

/* The bounded row against the whole one, which the reference drew into `whole`. */
static void check_bounded(const sampler_row *bounded, const sampler_row *whole, uint32_t cap) {
    const uint32_t count = whole->support_count < cap ? whole->support_count : cap;
    assert_int_equal(bounded->status, whole->status);
    assert_int_equal(bounded->token, whole->token);
    assert_int_equal(math_bits_f32(bounded->token_logprob), math_bits_f32(whole->token_logprob));
    assert_int_equal(math_bits_f32(bounded->selected_logprob),
                     math_bits_f32(whole->selected_logprob));
    assert_int_equal(bounded->cap_needed, whole->cap_needed);
    assert_int_equal(bounded->support_count, count);
    uint32_t drawn = 0;
    while (drawn < whole->support_count && whole->support_ids[drawn] != whole->token) {
        drawn++;
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t from = i == count - 1 && drawn > i ? drawn : i;
        assert_int_equal(bounded->support_ids[i], whole->support_ids[from]);
        assert_int_equal(math_bits_f32(bounded->support_logprobs[i]),
                         math_bits_f32(whole->support_logprobs[from]));
    }
}

static const uint64_t BOUNDED_HASH = 0xc5848009078e3493U;

/* The same parameters with caps below, at and above what is needed. */
static void bounded_rows(void **state) {
    (void)state;
    bench b = bench_create();
    static rich_params rich;
    sampler_result whole = sampler_result_create(VOCAB_MAX);
    uint32_t cut = 0, replaced = 0;
    for (uint32_t turn = 0; turn < 3000; turn++) {
        const uint32_t vocab = turn % 100 == 0 ? 20000 + turn : 1 + turn % 700;
        const sampler_logits_kind kind = (sampler_logits_kind)(turn % SAMPLER_LOGITS_KINDS);
        sampler_fill_logits(kind, turn, b.logits, vocab);
        make_rich(&rich, vocab, turn);
        rich.params.mask_mode = SAMPLER_MASK_SUPPORT;
        rich.params.mask_max_tokens = vocab;
        assert_int_equal(sampler_draw_ref(&rich.params, b.logits, vocab, turn, &whole.row), BT_OK);
        const uint32_t support = whole.row.cap_needed;
        const uint32_t caps[] = {1, 2, support / 3, support - 1, support, support + 7};
        rich.params.mask_bounded = 1;
        for (size_t i = 0; i < BT_ARRAY_COUNT(caps); i++) {
            if (caps[i] == 0 || support == 0) continue;
            rich.params.mask_max_tokens = caps[i];
            compare(&b, &rich.params, vocab, turn);
            check_bounded(&b.want.row, &whole.row, caps[i]);
            const bool is_cut = caps[i] < support;
            cut += is_cut;
            replaced +=
                is_cut && whole.row.support_ids[caps[i] - 1] != b.want.row.support_ids[caps[i] - 1];
        }
    }
    assert_true(cut > 3000);
    assert_true(replaced > 1000);
    if (b.hash != BOUNDED_HASH) print_message("hash %016llx\n", (unsigned long long)b.hash);
    assert_true(b.hash == BOUNDED_HASH);
    sampler_result_destroy(&whole);
    bench_destroy(&b);
}

static uint32_t score_all(bench *b, const sampler_scoring *scoring, uint32_t vocab) {
    static sampler_top top[2][SAMPLER_TOP_MAX];
    static float ids[2][SAMPLER_IDS_MAX];
    float targets[2] = {0.0F, 0.0F};
    uint32_t scored = 0;
    for (int i = 0; i < ISAS_MAX; i++) {
        if (b->workspaces[i] == NULL) continue;
        memset(top[1], 0x5a, sizeof top[1]);
        memset(ids[1], 0x5a, sizeof ids[1]);
        scored += sampler_score_row(b->workspaces[i], scoring, b->logits, vocab, &targets[1],
                                    top[1], ids[1]);
        if (i == 0) {
            targets[0] = targets[1];
            memcpy(top[0], top[1], sizeof top[0]);
            memcpy(ids[0], ids[1], sizeof ids[0]);
        }
        assert_memory_equal(&targets[1], &targets[0], sizeof targets[0]);
        assert_memory_equal(top[1], top[0], sizeof top[0]);
        assert_memory_equal(ids[1], ids[0], sizeof ids[0]);
    }
    if (scored == 0) return 0;
    /* A greedy draw at temperature 1 says the same. */
    const sampler_params params = {.temperature = 1.0F,
                                   .top_p = 1.0F,
                                   .top_k = 1,
                                   .vocab_limit = scoring->vocab_limit,
                                   .wants_logprob = 1,
                                   .top_logprobs = scoring->top_count,
                                   .logprob_ids = scoring->ids,
                                   .logprob_id_count = scoring->id_count};
    assert_int_equal(sampler_draw_ref(&params, b->logits, vocab, 0, &b->want.row), BT_OK);
    const sampler_row *row = &b->want.row;
    assert_memory_equal(top[0], row->top, row->top_count * sizeof(sampler_top));
    for (uint32_t i = row->top_count; i < scoring->top_count; i++) {
        assert_int_equal(top[0][i].id, -1);
        assert_true(top[0][i].logprob == -math_inf_f32());
    }
    assert_memory_equal(ids[0], row->id_logprobs, scoring->id_count * sizeof(float));
    if (scoring->id_count > 0 && scoring->ids[0] == scoring->target)
        assert_int_equal(math_bits_f32(targets[0]), math_bits_f32(ids[0][0]));
    b->draws++;
    return 1;
}

static void scored_rows(void **state) {
    (void)state;
    bench b = bench_create();
    uint32_t scored = 0;
    for (uint32_t turn = 0; turn < 900; turn++) {
        const uint32_t vocab = turn % 50 == 0 ? 30000 : 1 + turn % 500;
        const sampler_logits_kind kind = (sampler_logits_kind)(turn % SAMPLER_LOGITS_KINDS);
        sampler_fill_logits(kind, turn, b.logits, vocab);
        if (turn % 97 == 96) b.logits[vocab / 2] = math_nan_f32();
        int32_t ids[30];
        uint64_t s = turn;
        pick_ids(&s, vocab, ids, BT_ARRAY_COUNT(ids));
        const sampler_scoring scoring = {.target = ids[0],
                                         .vocab_limit = turn % 5 == 0 ? vocab - vocab / 4 : 0,
                                         .top_count = turn % 3 == 0 ? SAMPLER_TOP_MAX : turn % 7,
                                         .id_count = turn % (BT_ARRAY_COUNT(ids) + 1),
                                         .ids = ids};
        scored += score_all(&b, &scoring, vocab);
    }
    assert_true(scored > 880 && scored < 900);
    bench_destroy(&b);
}

/* What no token can be drawn from is INVALID everywhere, wherever it stands. */
static void invalid_logits(void **state) {
    (void)state;
    bench b = bench_create();
    const float bad[] = {math_nan_f32(), -math_nan_f32(), math_inf_f32()};
    const uint32_t vocab = 301;
    const uint32_t places[] = {0, 1, 63, 64, 255, 256, 299, 300};
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad) * BT_ARRAY_COUNT(places); i++) {
        sampler_fill_logits(SAMPLER_LOGITS_NORMAL, i, b.logits, vocab);
        b.logits[places[i / BT_ARRAY_COUNT(bad)]] = bad[i % BT_ARRAY_COUNT(bad)];
        for (uint32_t top_k = 0; top_k < 3; top_k++) {
            sampler_params params = {.temperature = 1.0F,
                                     .top_p = 0.9F,
                                     .top_k = top_k,
                                     .mask_mode = SAMPLER_MASK_SUPPORT,
                                     .mask_max_tokens = 400};
            compare(&b, &params, vocab, 0);
            assert_int_equal(b.got.row.status, SAMPLER_INVALID);
            assert_int_equal(b.got.row.token, -1);
            assert_int_equal(b.got.row.support_count, 0);
            /* Beyond the limit nobody looks. */
            params.vocab_limit = places[i / BT_ARRAY_COUNT(bad)];
            if (params.vocab_limit == 0) continue;
            compare(&b, &params, vocab, 0);
            assert_int_equal(b.got.row.status, SAMPLER_OK);
        }
    }
    for (uint32_t i = 0; i < vocab; i++) {
        b.logits[i] = -math_inf_f32();
    }
    for (uint32_t top_k = 0; top_k < 3; top_k++) {
        const sampler_params params = {.temperature = 1.0F, .top_p = 1.0F, .top_k = top_k};
        compare(&b, &params, vocab, 0);
        assert_int_equal(b.got.row.status, SAMPLER_INVALID);
    }
    bench_destroy(&b);
}

/* Hashes at their ends, which come once in 2^31 draws of an id: an exponential of 0 over a weight
 * of 0 is no number, the largest noise beats everything, and the smallest is cut off. */
static void ends_of_the_hash(void **state) {
    (void)state;
    bench b = bench_create();
    static const struct {
        uint32_t position, column, hash;
    } ends[] = {{6150874, 224, 0xffffffffU},
                {25528917, 102, 0xffffffffU},
                {13861281, 257, 0xfffffffeU},
                {49829921, 53, 0xfffffffeU},
                {22805796, 57, 0},
                {33337496, 232, 0}};
    static const float logits[] = {0.0F, -30.0F, -87.0F, -88.0F, 0.0F};
    const uint32_t vocab = 300;
    for (size_t i = 0; i < BT_ARRAY_COUNT(ends) * BT_ARRAY_COUNT(logits); i++) {
        const uint32_t column = ends[i / BT_ARRAY_COUNT(logits)].column;
        const uint32_t position = ends[i / BT_ARRAY_COUNT(logits)].position;
        const uint32_t hash = ends[i / BT_ARRAY_COUNT(logits)].hash;
        const size_t kind = i % BT_ARRAY_COUNT(logits);
        assert_int_equal(sampler_hash(1234, position, column), hash);
        for (uint32_t id = 0; id < vocab; id++) {
            b.logits[id] = id % 3 == 0 ? 0.0F : -3.0F;
        }
        b.logits[column] = kind == 4 ? -math_inf_f32() : logits[kind];
        const sampler_params params = {.temperature = 1.0F,
                                       .top_p = 1.0F,
                                       .mask_mode = SAMPLER_MASK_SUPPORT,
                                       .mask_max_tokens = vocab,
                                       .wants_logprob = 1,
                                       .seed = 1234};
        compare(&b, &params, vocab, position);
        const bool is_possible = kind < 3; /* e^-88 is below 2^-126 */
        assert_int_equal(b.want.row.cap_needed, is_possible ? vocab : vocab - 1);
        if (hash != 0 && kind == 0) assert_int_equal(b.want.row.token, column);
        if (hash == 0 || !is_possible) assert_int_not_equal(b.want.row.token, column);
    }
    bench_destroy(&b);
}

static void unknown_instruction_sets_are_refused(void **state) {
    (void)state;
    sampler_workspace *workspace = NULL;
    assert_int_equal(sampler_workspace_create_isa(10, "mmx", &workspace),
                     BT_ERR_CALLER_UNSUPPORTED);
    assert_int_equal(sampler_workspace_create(0, &workspace), BT_ERR_CALLER_LIMIT);
    assert_int_equal(sampler_workspace_create(SAMPLER_VOCAB_MAX + 1, &workspace),
                     BT_ERR_CALLER_LIMIT);
    assert_null(workspace);
    sampler_workspace_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_vocabularies),
        cmocka_unit_test(large_vocabularies),
        cmocka_unit_test(many_draws),
        cmocka_unit_test(all_parameters),
        cmocka_unit_test(bounded_rows),
        cmocka_unit_test(scored_rows),
        cmocka_unit_test(invalid_logits),
        cmocka_unit_test(ends_of_the_hash),
        cmocka_unit_test(unknown_instruction_sets_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
