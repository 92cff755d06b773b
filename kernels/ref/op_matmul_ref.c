/* The matrix products, and the embedding, as loops over single weights. */
#include <math.h>
#include <string.h>

#include "kernels/bf16.h"
#include "kernels/f16.h"
#include "kernels/math.h"
#include "kernels/ops.h"

/* The stored number of a weight, and what it is multiplied with and added to. */
typedef struct stored_weight {
    float number, scale, offset;
} stored_weight;

static float half_at(const uint8_t *bytes) {
    return f16_to_f32((uint16_t)(bytes[0] | bytes[1] << 8));
}

static stored_weight blocked_weight(const pack_matrix *m, const uint8_t *panel, uint32_t column,
                                    uint32_t k) {
    const uint8_t *block = panel + k / 32 * pack_block_bytes(m->format);
    const uint32_t in_block = k % 32;
    stored_weight w = {.scale = half_at(block + 2 * column)};
    if (m->format == PACK_Q8_0) {
        w.number = (float)(int8_t)block[128 + 64 * in_block + column];
        return w;
    }
    w.offset = m->format == PACK_Q4_1 ? half_at(block + 128 + 2 * column) : -8.0F * w.scale;
    const uint8_t *word = block + (m->format == PACK_Q4_1 ? 256 : 128) +
                          4 * (64 * (in_block / 8) + column) + in_block % 8 / 2;
    w.number = (float)(in_block % 2 == 0 ? *word & 15 : *word >> 4);
    return w;
}

static float weight_at(const pack_matrix *m, uint32_t column, uint32_t k) {
    const uint8_t *panel = m->panels + column / 64 * pack_panel_bytes(m->format, m->depth);
    const uint32_t in_panel = column % 64;
    if (m->format == PACK_INT8) return (float)(int8_t)panel[256 + 64 * (size_t)k + in_panel];
    if (m->format == PACK_BF16) {
        const uint8_t *bits = panel + 2 * (64 * (size_t)k + pack_slot(in_panel));
        return bf16_to_f32((uint16_t)(bits[0] | bits[1] << 8));
    }
    const stored_weight w = blocked_weight(m, panel, in_panel, k);
    return m->format == PACK_Q8_0 ? w.number * w.scale : fmaf(w.number, w.scale, w.offset);
}

/* 1 for the formats without a scale for the whole column. */
static float column_scale(const pack_matrix *m, uint32_t column) {
    float scale = 1.0F;
    if (m->format == PACK_INT8)
        memcpy(&scale,
               m->panels + column / 64 * pack_panel_bytes(m->format, m->depth) + 4 * (column % 64),
               sizeof scale);
    return scale;
}

static float chain(const pack_matrix *m, uint32_t column, const float *x) {
    float acc = 0.0F;
    for (uint32_t k = 0; k < m->depth; k++)
        acc = fmaf(x[k], weight_at(m, column, k), acc);
    return acc * column_scale(m, column);
}

void op_embed_ref(const op_embed_params *p) {
    const uint32_t width = p->weights.depth;
    for (uint32_t r = 0; r < p->rows; r++) {
        const uint32_t id = (uint32_t)p->token_ids[r];
        for (uint32_t k = 0; k < width; k++)
            p->out[(size_t)r * width + k] =
                weight_at(&p->weights, id, k) * column_scale(&p->weights, id);
    }
}

void op_matmul_ref(const op_matmul_params *p) {
    for (uint32_t r = 0; r < p->rows; r++) {
        for (uint32_t c = 0; c < p->weights.columns; c++) {
            float *out = p->out + r * p->out_stride + c;
            float value = chain(&p->weights, c, p->x + r * p->x_stride);
            if (p->bias != NULL) value += p->bias[c];
            if (p->adds) value += *out;
            *out = value;
        }
    }
}

void op_gate_up_ref(const op_gate_up_params *p) {
    for (uint32_t r = 0; r < p->rows; r++) {
        const float *x = p->x + (size_t)r * p->weights.depth;
        for (uint32_t c = 0; c < p->width; c++) {
            const uint32_t column =
                2 * (c / PACK_PANEL_COLUMNS) * PACK_PANEL_COLUMNS + c % PACK_PANEL_COLUMNS;
            const float gate = chain(&p->weights, column, x);
            const float up = chain(&p->weights, column + PACK_PANEL_COLUMNS, x);
            p->out[(size_t)r * p->width + c] = gate / (1.0F + math_exp_f32(-gate)) * up;
        }
    }
}
