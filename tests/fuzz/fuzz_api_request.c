/* Any bytes as the body of /generate, of a chat or of a completion, by the first byte: a request
 * that keeps every promise made to the workers, or a failure with a sentence. */
#include "tests/fuzz/fuzz.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "base/utf8.h"
#include "router/api_request.h"
#include "tests/support/tiny_bpe.h"

enum { INPUT_MAX = 1 << 14, VOCAB = 300, CONTEXT = 500, MASK_MAX = 64 };

static const tokenizer *get_tokenizer(void) {
    static tokenizer *t; /* the same for every input */
    bt_error error;
    const tiny_bpe bpe = {0};
    if (t == NULL) BT_ASSERT(tiny_bpe_load(&bpe, &t, &error) == BT_OK);
    return t;
}

/* The prompt's text, and a place in it for every token. */
static void check_echo(const api_request *request) {
    const api_echo *echo = &request->echo;
    const char *text = echo->text != NULL ? echo->text : "";
    BT_ASSERT(bt_utf8_is_valid(text, echo->bytes));
    BT_ASSERT(echo->characters == bt_utf8_count(text, echo->bytes));
    BT_ASSERT(request->echoes || echo->bytes == 0);
    BT_ASSERT((echo->starts != NULL) == (request->echoes && request->wants_logprob));
    for (uint32_t i = 0; echo->starts != NULL && i < request->prompt.count; i++) {
        BT_ASSERT(echo->starts[i] <= echo->characters);
        BT_ASSERT(i == 0 ? echo->starts[i] == 0 : echo->starts[i] >= echo->starts[i - 1]);
    }
}

static void check_masks(const api_request *request) {
    const proto_generation *g = &request->generation;
    const bool is_filtered = (g->top_k != 0 && g->top_k < VOCAB) || g->top_p < 1 || g->min_p > 0;
    if (g->mask_mode == ROW_MASK_OFF) {
        BT_ASSERT(!g->mask_bounded && !request->packs_mask && !request->keeps_partial);
    } else {
        BT_ASSERT(g->mask_bounded || is_filtered);
    }
}

/* Ascending ids, and something that can be drawn. */
static void check_biases(const api_request *request) {
    const uint32_t count = request->generation.bias_count;
    const int32_t *ids = request->prompt.ids + request->prompt.count;
    uint32_t gone = 0;
    for (uint32_t i = 0; i < count; i++) {
        float bias;
        memcpy(&bias, ids + count + i, sizeof(bias));
        BT_ASSERT(ids[i] >= 0 && ids[i] < VOCAB && (i == 0 || ids[i] > ids[i - 1]));
        BT_ASSERT(isfinite(bias) || bias == -INFINITY);
        gone += bias == -INFINITY;
    }
    BT_ASSERT(gone < VOCAB);
}

static void check_request(const api_request *request) {
    const proto_generation *g = &request->generation;
    BT_ASSERT(request->prompt.count > 0 && request->prompt.count < CONTEXT);
    BT_ASSERT(request->prompt.count + g->max_new_tokens <= CONTEXT);
    BT_ASSERT(isfinite(g->temperature) && g->temperature > 0);
    BT_ASSERT(g->top_p > 0 && g->top_p <= 1);
    BT_ASSERT(g->top_k < 1u << 30);
    BT_ASSERT(g->mask_mode <= ROW_MASK_SUPPORT);
    check_masks(request);
    check_biases(request);
    BT_ASSERT(proto_generation_check(g, NULL) == BT_OK);
    BT_ASSERT(request->prompt.capacity >= proto_words(g, request->prompt.count));
    BT_ASSERT(g->prompt_logprobs_from < request->prompt.count);
    BT_ASSERT(g->stop_id_count <= PROTO_STOP_IDS_MAX && request->stop_count <= STOP_STRINGS_MAX);
    BT_ASSERT(request->stream_interval >= 1);
    BT_ASSERT(request->rid[0] != 0 && memchr(request->rid, 0, sizeof(request->rid)) != NULL);
    check_echo(request);
    for (uint32_t i = 0; i < request->prompt.count; i++) {
        BT_ASSERT(request->prompt.ids[i] >= 0 && request->prompt.ids[i] < VOCAB);
    }
    for (uint32_t i = 0; i < g->stop_id_count; i++) {
        BT_ASSERT(g->stop_ids[i] >= 0 && g->stop_ids[i] < VOCAB);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const api_settings settings = {.tokenizer = get_tokenizer(),
                                   .mask_max_tokens = MASK_MAX,
                                   .stream_interval = 1,
                                   .batch_max = 8};
    const api_model model = {.is_known = true,
                             .vocab_size = VOCAB,
                             .context_tokens = CONTEXT,
                             .eos_count = 1,
                             .eos_ids = {2}};
    api_batch batch;
    api_failure failure;
    if (bytes == 0 || bytes > INPUT_MAX) return 0;
    const api_body body = {.kind = (api_kind)(data[0] % 3),
                           .wants_safetensors = data[0] >= 128,
                           .text = (const char *)data + 1,
                           .bytes = bytes - 1};
    if (api_batch_read(&body, &settings, &model, &batch, &failure)) {
        BT_ASSERT(batch.count > 0 && batch.count <= 8 && (batch.is_list || batch.count == 1));
        BT_ASSERT(!body.wants_safetensors || !batch.items[0].streams);
        for (uint32_t i = 0; i < batch.count; i++) {
            check_request(&batch.items[i]);
        }
        api_batch_fini(&batch);
        return 0;
    }
    BT_ASSERT(failure.http_status == 400);
    BT_ASSERT(failure.text[0] != 0 && memchr(failure.text, 0, sizeof(failure.text)) != NULL);
    return 0;
}
