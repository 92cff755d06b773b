/* The five encodings. Speed matters little: each weight is read once, at load. */
#include "kernels/model/dequant.h"

#include "base/assert.h"
#include "kernels/bf16.h"
#include "kernels/math.h"

enum {
    BLOCK_WEIGHTS = 32,
    Q4_1_BLOCK_BYTES = 4 + BLOCK_WEIGHTS / 2,
    Q8_0_BLOCK_BYTES = 2 + BLOCK_WEIGHTS,
    BF16_EXPONENT = 0x7f80,
};

static uint16_t load_u16(const uint8_t *source) {
    return (uint16_t)(source[0] | source[1] << 8);
}

float dequant_widen_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    const uint32_t exponent = bits >> 10 & 0x1fu;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact in f32 */
        const float magnitude = (float)fraction * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    if (exponent == 0x1f) return math_from_bits_f32(sign | 0x7f800000u | fraction << 13);
    return math_from_bits_f32(sign | (exponent + 112u) << 23 | fraction << 13);
}

size_t dequant_row_bytes(dequant_encoding encoding, size_t columns) {
    const size_t blocks = columns / BLOCK_WEIGHTS;
    switch (encoding) {
    case DEQUANT_ENCODING_F32: return columns * 4;
    case DEQUANT_ENCODING_F16:
    case DEQUANT_ENCODING_BF16: return columns * 2;
    case DEQUANT_ENCODING_Q4_1:
        BT_ASSERT(columns % BLOCK_WEIGHTS == 0);
        return blocks * Q4_1_BLOCK_BYTES;
    case DEQUANT_ENCODING_Q8_0:
        BT_ASSERT(columns % BLOCK_WEIGHTS == 0);
        return blocks * Q8_0_BLOCK_BYTES;
    }
    BT_ASSERT(false);
    return 0;
}

static void decode_f32(const uint8_t *source, size_t columns, uint16_t *out) {
    for (size_t i = 0; i < columns; i++) {
        const uint32_t low = load_u16(source + 4 * i);
        const uint32_t high = load_u16(source + 4 * i + 2);
        out[i] = bf16_from_f32(math_from_bits_f32(high << 16 | low));
    }
}

static void decode_f16(const uint8_t *source, size_t columns, uint16_t *out) {
    for (size_t i = 0; i < columns; i++)
        out[i] = bf16_from_f32(dequant_widen_f16(load_u16(source + 2 * i)));
}

static void decode_bf16(const uint8_t *source, size_t columns, uint16_t *out) {
    for (size_t i = 0; i < columns; i++)
        out[i] = load_u16(source + 2 * i);
}

static void decode_q4_1(const uint8_t *source, size_t columns, uint16_t *out) {
    for (; columns > 0; columns -= BLOCK_WEIGHTS) {
        const float d = dequant_widen_f16(load_u16(source));
        const float m = dequant_widen_f16(load_u16(source + 2));
        for (size_t j = 0; j < BLOCK_WEIGHTS / 2; j++) {
            const uint8_t pair = source[4 + j];
            out[j] = bf16_from_f32((float)(pair & 15) * d + m);
            out[j + BLOCK_WEIGHTS / 2] = bf16_from_f32((float)(pair >> 4) * d + m);
        }
        source += Q4_1_BLOCK_BYTES;
        out += BLOCK_WEIGHTS;
    }
}

static void decode_q8_0(const uint8_t *source, size_t columns, uint16_t *out) {
    for (; columns > 0; columns -= BLOCK_WEIGHTS) {
        const float d = dequant_widen_f16(load_u16(source));
        for (size_t j = 0; j < BLOCK_WEIGHTS; j++) {
            const int q = source[2 + j] < 128 ? source[2 + j] : source[2 + j] - 256;
            out[j] = bf16_from_f32((float)q * d);
        }
        source += Q8_0_BLOCK_BYTES;
        out += BLOCK_WEIGHTS;
    }
}

static bool is_finite_row(const uint16_t *row, size_t columns) {
    bool is_finite = true;
    for (size_t i = 0; i < columns; i++)
        is_finite &= (row[i] & BF16_EXPONENT) != BF16_EXPONENT;
    return is_finite;
}

bool dequant_row(dequant_encoding encoding, const uint8_t *source, size_t columns, uint16_t *out) {
    switch (encoding) {
    case DEQUANT_ENCODING_F32: decode_f32(source, columns, out); break;
    case DEQUANT_ENCODING_F16: decode_f16(source, columns, out); break;
    case DEQUANT_ENCODING_BF16: decode_bf16(source, columns, out); break;
    case DEQUANT_ENCODING_Q4_1: decode_q4_1(source, columns, out); break;
    case DEQUANT_ENCODING_Q8_0: decode_q8_0(source, columns, out); break;
    }
    return is_finite_row(out, columns);
}
