/* One prompt per model in two chunks, so that attention walks more than one tile and reads back
 * what it wrote; the last row is sampled twice, with an exact and with a bounded mask, and
 * everything that the sampler computes goes into the hash. */
#include "kernels/self_test.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/model/model_generate.h"

enum {
    TOKENS = 100, /* of the prompt: two tiles of keys */
    CHUNK = 70,
    PAGE_TOKENS = 32,
    PAGES = (TOKENS + PAGE_TOKENS - 1) / PAGE_TOKENS,
    VOCAB = 96,
    CAP = VOCAB,
    TOP = 3,
    DRAWS = 2,
    BOUNDED_CAP = 5,
};

static const model_geometry geometry = {.family = MODEL_FAMILY_QWEN3,
                                        .vocab_size = VOCAB,
                                        .context_tokens = 256,
                                        .hidden_size = 64,
                                        .intermediate_size = 96,
                                        .layers = 2,
                                        .heads = 4,
                                        .kv_heads = 2,
                                        .head_dim = 16,
                                        .norm_epsilon = 1e-6F,
                                        .rope_theta = 1e6,
                                        .has_tied_embeddings = true,
                                        .has_qk_norm = true};

static const struct {
    pack_format stored;
    model_weights weights;
} formats[] = {{PACK_BF16, MODEL_WEIGHTS_BF16},
               {PACK_BF16, MODEL_WEIGHTS_INT8},
               {PACK_Q8_0, MODEL_WEIGHTS_NATIVE},
               {PACK_Q4_0, MODEL_WEIGHTS_NATIVE},
               {PACK_Q4_1, MODEL_WEIGHTS_NATIVE}};

static void mix(uint64_t *hash, const void *data, size_t count) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < count; i++)
        *hash = (*hash ^ bytes[i]) * 0x100000001b3U;
}

/* The arrays of one draw's row. */
typedef struct drawn {
    int32_t ids[CAP];
    float logprobs[CAP];
    sampler_top top[TOP];
} drawn;

static void mix_row(uint64_t *hash, const sampler_row *row) {
    mix(hash, &row->token, sizeof row->token);
    mix(hash, &row->token_logprob, sizeof row->token_logprob);
    mix(hash, row->support_ids, row->support_count * sizeof *row->support_ids);
    mix(hash, row->support_logprobs, row->support_count * sizeof *row->support_logprobs);
    mix(hash, row->top, row->top_count * sizeof *row->top);
}

static bt_status run_step(model_runner *runner, uint32_t first, uint32_t count, uint64_t *hash) {
    static const uint32_t page_ids[PAGES] = {2, 0, 3, 1};
    static const uint32_t draw_offsets[2] = {0, DRAWS};
    int32_t ids[TOKENS];
    float logits[VOCAB];
    drawn room[DRAWS];
    sampler_row rows[DRAWS];
    sampler_params sampling[DRAWS];
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (int32_t)((first + i) * 37 % VOCAB);
    const uint32_t token_offsets[2] = {0, count};
    const uint32_t page_offsets[2] = {0, PAGES};
    const uint8_t samples = 1;
    sampling[0] = (sampler_params){.temperature = 0.7F,
                                   .top_p = 0.9F,
                                   .top_k = 20,
                                   .mask_mode = SAMPLER_MASK_SUPPORT,
                                   .mask_max_tokens = CAP,
                                   .wants_logprob = 1,
                                   .seed = 5,
                                   .top_logprobs = TOP};
    sampling[1] = sampling[0];
    sampling[1].top_k = 0;
    sampling[1].mask_max_tokens = BOUNDED_CAP;
    sampling[1].mask_bounded = 1;
    for (uint32_t i = 0; i < DRAWS; i++)
        rows[i] = (sampler_row){
            .support_ids = room[i].ids, .support_logprobs = room[i].logprobs, .top = room[i].top};
    const model_batch batch = {.sequences = 1,
                               .tokens = count,
                               .token_offsets = token_offsets,
                               .token_ids = ids,
                               .first_positions = &first,
                               .page_offsets = page_offsets,
                               .page_ids = page_ids,
                               .samples = &samples,
                               .sampling = sampling,
                               .rows = rows,
                               .draw_offsets = draw_offsets,
                               .logits = logits};
    const bt_status status = model_step(runner, &batch);
    if (status != BT_OK) return status;
    mix(hash, logits, sizeof logits);
    for (uint32_t i = 0; i < DRAWS; i++)
        mix_row(hash, &rows[i]);
    return BT_OK;
}

static bt_status run_model(const model *m, const char *isa, uint64_t *hash, bt_error *error) {
    const kv_page_layout layout = model_kv_layout(m, PAGE_TOKENS, KV_DTYPE_BF16);
    void *pages = bt_calloc_aligned(64, PAGES * kv_page_bytes(&layout));
    if (pages == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    const model_runner_options options = {.threads = 1,
                                          .tokens_max = TOKENS,
                                          .rows_max = 1,
                                          .isa = isa,
                                          .kv = layout,
                                          .kv_memory = pages,
                                          .kv_page_count = PAGES};
    model_runner *runner = NULL;
    bt_status status = model_runner_create(m, &options, &runner, error);
    if (status == BT_OK) status = run_step(runner, 0, CHUNK, hash);
    if (status == BT_OK) status = run_step(runner, CHUNK, TOKENS - CHUNK, hash);
    model_runner_destroy(runner);
    bt_free(pages);
    return status;
}

bt_status self_test_run(const char *isa, uint32_t *hash_out, bt_error *error) {
    uint64_t hash = 0xcbf29ce484222325U;
    for (size_t i = 0; i < BT_ARRAY_COUNT(formats); i++) {
        model *m = NULL;
        bt_status status = model_generate_stored(&geometry, 1 + i, formats[i].stored,
                                                 formats[i].weights, &m, error);
        if (status == BT_OK) status = run_model(m, isa, &hash, error);
        model_destroy(m);
        if (status != BT_OK) return status;
    }
    *hash_out = (uint32_t)(hash ^ hash >> 32);
    return BT_OK;
}
