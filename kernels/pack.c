/* Packing is a transposition, done in blocks that keep both sides in the first cache. */
#include "kernels/pack.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "kernels/bf16.h"
#include "kernels/f16.h"

enum {
    BLOCK_DEPTH = 32, /* of BF16 and INT8, which have no blocks of their own */
    HALF_BLOCK = PACK_BLOCK / 2,
    WORD_INPUTS = 8, /* of the four-bit formats */
};

const char *pack_format_name(pack_format format) {
    switch (format) {
    case PACK_BF16: return "bf16";
    case PACK_INT8: return "int8";
    case PACK_Q8_0: return "q8_0";
    case PACK_Q4_0: return "q4_0";
    case PACK_Q4_1: return "q4_1";
    case PACK_FORMAT_COUNT: break;
    }
    return "unknown";
}

bool pack_format_takes(pack_format format, uint32_t depth) {
    return pack_block_bytes(format) == 0 || depth % PACK_BLOCK == 0;
}

/* f16 values in front of the weights of a block: d, or d and m. */
static size_t scale_count(pack_format format) {
    return format == PACK_Q4_1 ? 2 : 1;
}

static size_t row_block_bytes(pack_format format) {
    return pack_block_bytes(format) / PACK_PANEL_COLUMNS;
}

size_t pack_row_bytes(pack_format format, uint32_t depth) {
    return pack_panel_bytes(format, depth) / PACK_PANEL_COLUMNS;
}

static float largest(const uint16_t *weights, uint32_t depth) {
    float top = 0.0F;
    for (uint32_t k = 0; k < depth; k++) {
        const float magnitude = math_from_bits_f32((uint32_t)(weights[k] & 0x7fffU) << 16);
        top = magnitude > top ? magnitude : top;
    }
    return top;
}

void pack_quantise_row(uint8_t *row_out, uint32_t depth, const uint16_t *weights) {
    const float shift = 0x1.8p23F; /* at this size the unit of f32 is 1: adding rounds */
    const float scale = largest(weights, depth) / 127.0F;
    memcpy(row_out, &scale, sizeof scale);
    uint8_t *q = row_out + sizeof scale;
    for (uint32_t k = 0; k < depth; k++) {
        float ratio = scale == 0.0F ? 0.0F : bf16_to_f32(weights[k]) / scale;
        ratio = ratio > 127.0F ? 127.0F : ratio;
        ratio = ratio < -127.0F ? -127.0F : ratio;
        const float rounded = (ratio + shift) - shift;
        q[k] = (uint8_t)(int8_t)rounded;
    }
}

static void pack_bf16(uint8_t *panel, uint32_t column, uint32_t depth, const uint8_t *rows,
                      uint32_t count) {
    for (uint32_t first = 0; first < depth; first += BLOCK_DEPTH) {
        const uint32_t end = depth - first < BLOCK_DEPTH ? depth : first + BLOCK_DEPTH;
        for (uint32_t i = 0; i < count; i++) {
            const uint8_t *from = rows + (size_t)i * depth * sizeof(uint16_t);
            uint8_t *to = panel + pack_slot(column + i) * sizeof(uint16_t);
            for (size_t k = first; k < end; k++)
                memcpy(to + k * PACK_PANEL_COLUMNS * sizeof(uint16_t), from + k * sizeof(uint16_t),
                       sizeof(uint16_t));
        }
    }
}

static void pack_int8(uint8_t *panel, uint32_t column, uint32_t depth, const uint8_t *rows,
                      uint32_t count) {
    const size_t row_bytes = pack_row_bytes(PACK_INT8, depth);
    for (uint32_t i = 0; i < count; i++)
        memcpy(panel + (column + i) * sizeof(float), rows + i * row_bytes, sizeof(float));
    uint8_t *weights = panel + PACK_PANEL_COLUMNS * sizeof(float);
    for (uint32_t first = 0; first < depth; first += BLOCK_DEPTH) {
        const uint32_t end = depth - first < BLOCK_DEPTH ? depth : first + BLOCK_DEPTH;
        for (uint32_t i = 0; i < count; i++) {
            const uint8_t *from = rows + i * row_bytes + sizeof(float);
            for (size_t k = first; k < end; k++)
                weights[k * PACK_PANEL_COLUMNS + column + i] = from[k];
        }
    }
}

/* The eight inputs from `first` of a block of a file, as one word. */
static uint32_t nibble_word(const uint8_t *pairs, uint32_t first) {
    const uint32_t shift = first < HALF_BLOCK ? 0 : 4;
    uint32_t word = 0;
    for (uint32_t i = 0; i < WORD_INPUTS; i++)
        word |= (uint32_t)((pairs[first % HALF_BLOCK + i] >> shift) & 15) << (4 * i);
    return word;
}

static void pack_block(pack_format format, uint8_t *block, uint32_t column, const uint8_t *from) {
    const size_t scales = scale_count(format);
    for (size_t i = 0; i < scales; i++)
        memcpy(block + (i * PACK_PANEL_COLUMNS + column) * 2, from + 2 * i, 2);
    uint8_t *to = block + scales * 2 * PACK_PANEL_COLUMNS;
    from += 2 * scales;
    if (format == PACK_Q8_0) {
        for (uint32_t k = 0; k < PACK_BLOCK; k++)
            to[k * PACK_PANEL_COLUMNS + column] = from[k];
        return;
    }
    for (uint32_t k = 0; k < PACK_BLOCK; k += WORD_INPUTS) {
        const uint32_t word = nibble_word(from, k);
        memcpy(to + ((size_t)k / WORD_INPUTS * PACK_PANEL_COLUMNS + column) * sizeof word, &word,
               sizeof word);
    }
}

static void pack_blocks(pack_format format, uint8_t *panel, uint32_t column, uint32_t depth,
                        const uint8_t *rows, uint32_t count) {
    const size_t row_bytes = pack_row_bytes(format, depth);
    for (uint32_t b = 0; b < depth / PACK_BLOCK; b++)
        for (uint32_t i = 0; i < count; i++)
            pack_block(format, panel + b * pack_block_bytes(format), column + i,
                       rows + i * row_bytes + b * row_block_bytes(format));
}

bool pack_rows_are_finite(pack_format format, uint32_t depth, const uint8_t *rows, uint32_t count) {
    const size_t block_bytes = row_block_bytes(format);
    if (block_bytes == 0) return true;
    const size_t blocks = (size_t)count * (depth / PACK_BLOCK);
    bool is_finite = true;
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = 0; i < scale_count(format); i++)
            is_finite &= (rows[b * block_bytes + 2 * i + 1] & 0x7c) != 0x7c;
    return is_finite;
}

void pack_rows(pack_format format, uint8_t *panels, uint32_t column, uint32_t depth,
               const uint8_t *rows, uint32_t count) {
    BT_ASSERT(pack_format_takes(format, depth));
    for (uint32_t done = 0, part; done < count; done += part) {
        const uint32_t first = (column + done) % PACK_PANEL_COLUMNS;
        const uint32_t room = PACK_PANEL_COLUMNS - first;
        part = count - done < room ? count - done : room;
        uint8_t *panel =
            panels + (column + done) / PACK_PANEL_COLUMNS * pack_panel_bytes(format, depth);
        const uint8_t *from = rows + done * pack_row_bytes(format, depth);
        switch (format) {
        case PACK_BF16: pack_bf16(panel, first, depth, from, part); break;
        case PACK_INT8: pack_int8(panel, first, depth, from, part); break;
        case PACK_Q8_0:
        case PACK_Q4_0:
        case PACK_Q4_1: pack_blocks(format, panel, first, depth, from, part); break;
        case PACK_FORMAT_COUNT: break;
        }
    }
}

static float half_at(const uint8_t *block, size_t index) {
    uint16_t bits;
    memcpy(&bits, block + 2 * index, sizeof bits);
    return f16_to_f32(bits);
}

static void gather_block(pack_format format, const uint8_t *block, uint32_t column, float *out) {
    const float d = half_at(block, column);
    const uint8_t *weights = block + scale_count(format) * 2 * PACK_PANEL_COLUMNS;
    if (format == PACK_Q8_0) {
        for (uint32_t k = 0; k < PACK_BLOCK; k++)
            out[k] = (float)(int8_t)weights[k * PACK_PANEL_COLUMNS + column] * d;
        return;
    }
    const float m = format == PACK_Q4_1 ? half_at(block, PACK_PANEL_COLUMNS + column) : -8.0F * d;
    for (uint32_t k = 0; k < PACK_BLOCK; k++) {
        uint32_t word;
        memcpy(&word,
               weights + ((size_t)k / WORD_INPUTS * PACK_PANEL_COLUMNS + column) * sizeof word,
               sizeof word);
        out[k] = fmaf((float)((word >> (4 * (k % WORD_INPUTS))) & 15), d, m);
    }
}

static void gather_bf16(const uint8_t *panel, uint32_t column, uint32_t depth, float *out) {
    const uint8_t *from = panel + pack_slot(column) * sizeof(uint16_t);
    for (size_t k = 0; k < depth; k++) {
        uint16_t bits;
        memcpy(&bits, from + k * PACK_PANEL_COLUMNS * sizeof bits, sizeof bits);
        out[k] = bf16_to_f32(bits);
    }
}

static void gather_int8(const uint8_t *panel, uint32_t column, uint32_t depth, float *out) {
    float scale;
    memcpy(&scale, panel + column * sizeof scale, sizeof scale);
    const uint8_t *weights = panel + PACK_PANEL_COLUMNS * sizeof scale + column;
    for (size_t k = 0; k < depth; k++)
        out[k] = (float)(int8_t)weights[k * PACK_PANEL_COLUMNS] * scale;
}

void pack_gather(const pack_matrix *m, uint32_t column, float *out) {
    const uint8_t *panel = pack_panel_at(m, column / PACK_PANEL_COLUMNS);
    const uint32_t in_panel = column % PACK_PANEL_COLUMNS;
    switch (m->format) {
    case PACK_BF16: gather_bf16(panel, in_panel, m->depth, out); return;
    case PACK_INT8: gather_int8(panel, in_panel, m->depth, out); return;
    case PACK_Q8_0:
    case PACK_Q4_0:
    case PACK_Q4_1:
        for (uint32_t k = 0; k < m->depth; k += PACK_BLOCK)
            gather_block(m->format, panel + k / PACK_BLOCK * pack_block_bytes(m->format), in_panel,
                         out + k);
        return;
    case PACK_FORMAT_COUNT: return;
    }
}
