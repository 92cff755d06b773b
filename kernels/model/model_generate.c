/* Random weights as a model_source: every element is a hash of seed, tensor, layer, row, column. */
#include "kernels/model/model_generate.h"

#include <math.h>
#include <string.h>

#include "kernels/bf16.h"
#include "kernels/model/model_internal.h"

typedef struct generator {
    model_card card;
    uint64_t seed;
} generator;

static uint64_t splitmix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

/* Uniform in [-1, 1), from the upper 24 bits. */
static float uniform(uint64_t hash) {
    return (float)(int32_t)((hash >> 40) & 0xffffffU) * 0x1p-23F - 1.0F;
}

static bt_status generate_rows(void *context, model_tensor tensor, uint32_t layer,
                               uint32_t first_row, uint32_t rows, uint16_t *out, bt_error *error) {
    (void)error;
    const generator *g = context;
    const model_shape shape = model_tensor_shape(&g->card.geometry, tensor);
    const bool is_bias = tensor == MODEL_TENSOR_Q_BIAS || tensor == MODEL_TENSOR_K_BIAS ||
                         tensor == MODEL_TENSOR_V_BIAS || tensor == MODEL_TENSOR_O_BIAS;
    const bool is_norm = shape.rows == 1 && !is_bias;
    /* The standard deviation of uniform() is 1 / sqrt(3). */
    const float scale = shape.rows == 1 ? 0.25F : sqrtf(3.0F / (float)shape.columns);
    for (uint32_t r = 0; r < rows; r++) {
        const uint64_t row_key = splitmix64(splitmix64(g->seed + (uint64_t)tensor) ^
                                            ((uint64_t)layer << 32) ^ (first_row + r));
        for (uint32_t c = 0; c < shape.columns; c++) {
            const float value = uniform(splitmix64(row_key + c)) * scale;
            out[(size_t)r * shape.columns + c] = bf16_from_f32(is_norm ? 1.0F + value : value);
        }
    }
    return BT_OK;
}

bt_status model_generate(const model_geometry *geometry, uint64_t seed, model **out,
                         bt_error *error) {
    generator g = {.seed = seed, .card = {.geometry = *geometry, .name = "generated"}};
    memcpy(g.card.fingerprint, &seed, sizeof seed);
    const model_source source = {.card = &g.card, .read = generate_rows, .context = &g};
    return model_build(&source, NULL, NULL, out, error);
}
