/* The matrix products as loops. */
#include <math.h>

#include "kernels/bf16.h"
#include "kernels/math.h"
#include "kernels/ops.h"

static float weight_at(const pack_matrix *m, uint32_t column, uint32_t k) {
    return bf16_to_f32(
        m->panels[column / PACK_PANEL_COLUMNS * pack_panel_elements(m->depth) +
                  (size_t)k * PACK_PANEL_COLUMNS + pack_slot(column % PACK_PANEL_COLUMNS)]);
}

static float chain(const pack_matrix *m, uint32_t column, const float *x) {
    float acc = 0.0F;
    for (uint32_t k = 0; k < m->depth; k++)
        acc = fmaf(x[k], weight_at(m, column, k), acc);
    return acc;
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
