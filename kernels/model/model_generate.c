/* Random weights as a model_source: every element is a hash of seed, tensor, layer, row, column. */
#include "kernels/model/model_generate.h"

#include <math.h>
#include <string.h>

#include "kernels/bf16.h"
#include "kernels/model/model_internal.h"

typedef struct generator {
    model_card card;
    uint64_t seed;
    pack_format stored; /* of matrices that can be stored so */
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

static pack_format stored_format(void *context, model_tensor tensor, uint32_t layer) {
    (void)layer;
    const generator *g = context;
    const model_shape shape = model_tensor_shape(&g->card.geometry, tensor);
    return pack_format_takes(g->stored, shape.columns) ? g->stored : PACK_BF16;
}

/* 2^exponent as f16, with the upper fraction bits of a hash; normal for -14 to 15. */
static uint16_t half(int exponent, uint64_t hash) {
    return (uint16_t)((uint32_t)(exponent + 15) << 10 | (uint32_t)(hash >> 54));
}

/* One block of 32 with random bytes. d is between 1 and 2 times the power of two at which weights
 * have about the deviation of generate_rows, m of Q4_1 between -8 and -16 times. */
static void generate_block(pack_format format, uint64_t key, int exponent, uint8_t *out) {
    const uint64_t hash = splitmix64(key);
    const uint16_t d = half(exponent, hash);
    const uint16_t m = (uint16_t)(0x8000U | half(exponent + 3, splitmix64(hash)));
    memcpy(out, &d, sizeof d);
    out += sizeof d;
    if (format == PACK_Q4_1) {
        memcpy(out, &m, sizeof m);
        out += sizeof m;
    }
    const size_t bytes = format == PACK_Q8_0 ? PACK_BLOCK : PACK_BLOCK / 2;
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        const uint64_t part = splitmix64(hash + i + 1);
        memcpy(out + i, &part, sizeof part);
    }
}

static bt_status generate_stored(void *context, model_tensor tensor, uint32_t layer,
                                 uint32_t first_row, uint32_t rows, uint8_t *out, bt_error *error) {
    (void)error;
    const generator *g = context;
    const model_shape shape = model_tensor_shape(&g->card.geometry, tensor);
    const size_t block_bytes = pack_row_bytes(g->stored, PACK_BLOCK);
    /* Deviations of the numbers: 74 of eight bits, 4.6 of four. */
    int exponent = g->stored == PACK_Q8_0 ? -7 : -3;
    for (uint32_t depth = shape.columns; depth >= 4 && exponent > -13; depth /= 4)
        exponent--;
    for (uint32_t r = first_row; r < first_row + rows; r++) {
        const uint64_t row_key =
            splitmix64(splitmix64(g->seed + 99 + (uint64_t)tensor) ^ ((uint64_t)layer << 32) ^ r);
        for (uint32_t b = 0; b < shape.columns / PACK_BLOCK; b++, out += block_bytes)
            generate_block(g->stored, row_key + b, exponent, out);
    }
    return BT_OK;
}

bt_status model_generate_stored(const model_geometry *geometry, uint64_t seed, pack_format stored,
                                model_weights weights, model **out, bt_error *error) {
    generator g = {
        .seed = seed, .stored = stored, .card = {.geometry = *geometry, .name = "generated"}};
    memcpy(g.card.fingerprint, &seed, sizeof seed);
    const model_source source = {.card = &g.card,
                                 .stored_format = stored_format,
                                 .read = generate_rows,
                                 .read_stored = generate_stored,
                                 .context = &g};
    return model_build(&source, weights, 1, out, error);
}

bt_status model_generate(const model_geometry *geometry, uint64_t seed, model **out,
                         bt_error *error) {
    return model_generate_stored(geometry, seed, PACK_BF16, MODEL_WEIGHTS_BF16, out, error);
}
