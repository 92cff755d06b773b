/* The text of a config.json, of any kind: either a sentence, or a geometry that can be computed. */
#include "tests/fuzz/fuzz.h"

#include <math.h>

#include "base/assert.h"
#include "kernels/model/model_file.h"
#include "kernels/model/model_rope.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    model_card card = {0};
    bt_error error = {0};
    float frequencies[MODEL_ROPE_PAIRS_MAX];
    if (model_file_parse_config((const char *)data, bytes, "fuzz", &card, &error) != BT_OK) {
        BT_ASSERT(error.text[0] != '\0');
        return 0;
    }
    const model_geometry *g = &card.geometry;
    BT_ASSERT(g->vocab_size > 0 && g->context_tokens > 0 && g->hidden_size > 0);
    BT_ASSERT(g->layers > 0 && g->intermediate_size > 0 && g->kv_heads > 0);
    BT_ASSERT(g->heads % g->kv_heads == 0 && g->head_dim % 2 == 0);
    BT_ASSERT(g->head_dim / 2 <= MODEL_ROPE_PAIRS_MAX);
    BT_ASSERT(g->sliding_window < g->context_tokens);
    BT_ASSERT(card.eos_count <= MODEL_EOS_MAX);
    for (uint32_t i = 0; i < card.eos_count; i++)
        BT_ASSERT(card.eos_ids[i] >= 0 && (uint32_t)card.eos_ids[i] < g->vocab_size);
    model_rope_frequencies(g, frequencies);
    for (uint32_t i = 0; i < g->head_dim / 2; i++)
        BT_ASSERT(frequencies[i] >= 0 && frequencies[i] <= 1);
    BT_ASSERT(isfinite(model_rope_magnitude(g)));
    return 0;
}
