/* The encodings, one function per kind of block. Speed matters little: each weight is read once, at
 * load. Products and sums are in the order of the reference implementation; most are exact in f32,
 * because d has 11 bits, a scale up to 8 and a quantum up to 8. */
#include "kernels/model/dequant.h"

#include "base/assert.h"
#include "kernels/bf16.h"
#include "kernels/f16.h"
#include "kernels/math.h"

enum {
    BLOCK = 32,        /* weights of a simple block */
    SUPER_BLOCK = 256, /* of a "K" block: 8 or 16 sub-blocks with scales of their own */
    SCALE_BYTES = 12,  /* of Q4_K and Q5_K: eight scales and eight minima of 6 bits */
    BF16_EXPONENT = 0x7f80,
};

static uint16_t load_u16(const uint8_t *source) {
    return (uint16_t)(source[0] | source[1] << 8);
}

static float load_f16(const uint8_t *source) {
    return f16_to_f32(load_u16(source));
}

static int load_i8(const uint8_t *source) {
    return *source < 128 ? *source : *source - 256;
}

static void decode_f32(const uint8_t *source, float *out) {
    const uint32_t low = load_u16(source);
    const uint32_t high = load_u16(source + 2);
    out[0] = math_from_bits_f32(high << 16 | low);
}

static void decode_f16(const uint8_t *source, float *out) {
    out[0] = load_f16(source);
}

static void decode_bf16(const uint8_t *source, float *out) {
    out[0] = bf16_to_f32(load_u16(source));
}

/* d, nibbles: (q - 8) * d. The low nibbles are the first half of the block. */
static void decode_q4_0(const uint8_t *source, float *out) {
    const float d = load_f16(source);
    for (int j = 0; j < BLOCK / 2; j++) {
        const int pair = source[2 + j];
        out[j] = (float)((pair & 15) - 8) * d;
        out[j + BLOCK / 2] = (float)((pair >> 4) - 8) * d;
    }
}

/* d, m, nibbles: q * d + m. */
static void decode_q4_1(const uint8_t *source, float *out) {
    const float d = load_f16(source);
    const float m = load_f16(source + 2);
    for (int j = 0; j < BLOCK / 2; j++) {
        const int pair = source[4 + j];
        out[j] = (float)(pair & 15) * d + m;
        out[j + BLOCK / 2] = (float)(pair >> 4) * d + m;
    }
}

/* The quanta of Q5_0 and Q5_1: 32 fifth bits, then nibbles. */
static void load_q5(const uint8_t *source, int quanta[BLOCK]) {
    for (int j = 0; j < BLOCK; j++) {
        const int pair = source[4 + j % (BLOCK / 2)];
        const int nibble = j < BLOCK / 2 ? pair & 15 : pair >> 4;
        quanta[j] = nibble | (source[j / 8] >> j % 8 & 1) << 4;
    }
}

/* d, quanta: (q - 16) * d. */
static void decode_q5_0(const uint8_t *source, float *out) {
    const float d = load_f16(source);
    int quanta[BLOCK];
    load_q5(source + 2, quanta);
    for (int j = 0; j < BLOCK; j++)
        out[j] = (float)(quanta[j] - 16) * d;
}

/* d, m, quanta: q * d + m. */
static void decode_q5_1(const uint8_t *source, float *out) {
    const float d = load_f16(source);
    const float m = load_f16(source + 2);
    int quanta[BLOCK];
    load_q5(source + 4, quanta);
    for (int j = 0; j < BLOCK; j++)
        out[j] = (float)quanta[j] * d + m;
}

/* d, signed bytes: q * d. */
static void decode_q8_0(const uint8_t *source, float *out) {
    const float d = load_f16(source);
    for (int j = 0; j < BLOCK; j++)
        out[j] = (float)load_i8(source + 2 + j) * d;
}

/* Scale and minimum of sub-block i of Q4_K and Q5_K. The first four of each are the low six bits of
 * bytes 0-3 and 4-7; of the last four, bytes 8-11 hold the low nibbles, and the bits left over in
 * bytes 0-7 the two high bits. */
static void load_scales(const uint8_t *source, int i, int *scale, int *minimum) {
    if (i < 4) {
        *scale = source[i] & 63;
        *minimum = source[i + 4] & 63;
        return;
    }
    *scale = (source[i + 4] & 15) | (source[i - 4] >> 6) << 4;
    *minimum = source[i + 4] >> 4 | (source[i] >> 6) << 4;
}

/* d, dmin, scales (, fifth bits), nibbles: q * (d * scale) - dmin * minimum. Sub-blocks 2i and
 * 2i + 1 are the low and the high nibbles of the same 32 bytes; bit i of a byte of fifth bits
 * belongs to sub-block i. */
static void decode_k(const uint8_t *source, bool has_fifth_bits, float *out) {
    const float d = load_f16(source);
    const float d_minimum = load_f16(source + 2);
    const uint8_t *scales = source + 4;
    const uint8_t *fifth_bits = scales + SCALE_BYTES;
    const uint8_t *nibbles = fifth_bits + (has_fifth_bits ? SUPER_BLOCK / 8 : 0);
    for (int i = 0; i < SUPER_BLOCK / BLOCK; i++) {
        int scale, minimum;
        load_scales(scales, i, &scale, &minimum);
        const float step = d * (float)scale;
        const float least = d_minimum * (float)minimum;
        for (int j = 0; j < BLOCK; j++) {
            const int pair = nibbles[i / 2 * BLOCK + j];
            int quantum = i % 2 == 0 ? pair & 15 : pair >> 4;
            if (has_fifth_bits) quantum |= (fifth_bits[j] >> i & 1) << 4;
            out[i * BLOCK + j] = step * (float)quantum - least;
        }
    }
}

static void decode_q4_k(const uint8_t *source, float *out) {
    decode_k(source, false, out);
}

static void decode_q5_k(const uint8_t *source, float *out) {
    decode_k(source, true, out);
}

/* 128 bytes of nibbles, 64 of two high bits each, 16 signed scales, d: (q - 32) * (d * scale). Each
 * half of the block is four runs of 32: run r takes nibbles from bytes 32 (r % 2) on, low ones in
 * runs 0 and 1, and bits 2r and 2r + 1 of the 32 bytes of high bits. */
static void decode_q6_k(const uint8_t *source, float *out) {
    const uint8_t *high_bits = source + SUPER_BLOCK / 2;
    const uint8_t *scales = high_bits + SUPER_BLOCK / 4;
    const float d = load_f16(scales + SUPER_BLOCK / 16);
    for (int i = 0; i < SUPER_BLOCK; i++) {
        const int half = i / 128, run = i % 128 / BLOCK, at = i % BLOCK;
        const int pair = source[half * 64 + run % 2 * BLOCK + at];
        const int nibble = run < 2 ? pair & 15 : pair >> 4;
        const int high = high_bits[half * BLOCK + at] >> 2 * run & 3;
        out[i] = d * (float)load_i8(scales + i / 16) * (float)((nibble | high << 4) - 32);
    }
}

static const struct {
    uint16_t weights; /* of one block */
    uint16_t bytes;
    void (*decode)(const uint8_t *source, float *out);
} blocks[] = {
    [DEQUANT_ENCODING_F32] = {1, 4, decode_f32},
    [DEQUANT_ENCODING_F16] = {1, 2, decode_f16},
    [DEQUANT_ENCODING_BF16] = {1, 2, decode_bf16},
    [DEQUANT_ENCODING_Q4_0] = {BLOCK, 18, decode_q4_0},
    [DEQUANT_ENCODING_Q4_1] = {BLOCK, 20, decode_q4_1},
    [DEQUANT_ENCODING_Q5_0] = {BLOCK, 22, decode_q5_0},
    [DEQUANT_ENCODING_Q5_1] = {BLOCK, 24, decode_q5_1},
    [DEQUANT_ENCODING_Q8_0] = {BLOCK, 34, decode_q8_0},
    [DEQUANT_ENCODING_Q4_K] = {SUPER_BLOCK, 144, decode_q4_k},
    [DEQUANT_ENCODING_Q5_K] = {SUPER_BLOCK, 176, decode_q5_k},
    [DEQUANT_ENCODING_Q6_K] = {SUPER_BLOCK, 210, decode_q6_k},
};

size_t dequant_row_bytes(dequant_encoding encoding, size_t columns) {
    BT_ASSERT((size_t)encoding < BT_ARRAY_COUNT(blocks));
    BT_ASSERT(columns % blocks[encoding].weights == 0);
    return columns / blocks[encoding].weights * blocks[encoding].bytes;
}

void dequant_row_f32(dequant_encoding encoding, const uint8_t *source, size_t columns, float *out) {
    BT_ASSERT((size_t)encoding < BT_ARRAY_COUNT(blocks));
    for (size_t i = 0; i < columns; i += blocks[encoding].weights) {
        blocks[encoding].decode(source, out + i);
        source += blocks[encoding].bytes;
    }
}

bool dequant_row(dequant_encoding encoding, const uint8_t *source, size_t columns, uint16_t *out) {
    BT_ASSERT((size_t)encoding < BT_ARRAY_COUNT(blocks));
    const size_t weights = blocks[encoding].weights;
    float values[SUPER_BLOCK];
    bool is_finite = true;
    for (size_t i = 0; i < columns; i += weights) {
        blocks[encoding].decode(source, values);
        source += blocks[encoding].bytes;
        for (size_t j = 0; j < weights; j++) {
            out[i + j] = bf16_from_f32(values[j]);
            is_finite &= (out[i + j] & BF16_EXPONENT) != BF16_EXPONENT;
        }
    }
    return is_finite;
}
