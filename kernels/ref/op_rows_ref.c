/* The row-wise ops as loops. */
#include <math.h>
#include <string.h>

#include "kernels/bf16.h"
#include "kernels/math.h"
#include "kernels/ops.h"

enum { LANES = 16 };

static void norm_row(float *out, const float *x, const float *weight, uint32_t width,
                     float epsilon) {
    float lanes[LANES] = {0};
    for (uint32_t i = 0; i < width; i++)
        lanes[i % LANES] = fmaf(x[i], x[i], lanes[i % LANES]);
    for (uint32_t step = LANES / 2; step > 0; step /= 2)
        for (uint32_t l = 0; l < step; l++)
            lanes[l] += lanes[l + step];
    const float scale = 1.0F / sqrtf(lanes[0] / (float)width + epsilon);
    for (uint32_t i = 0; i < width; i++)
        out[i] = (x[i] * scale) * weight[i];
}

void op_rms_norm_ref(const op_rms_norm_params *p) {
    for (uint32_t r = 0; r < p->rows; r++) {
        norm_row(p->out + (size_t)r * p->width, p->x + r * p->x_stride, p->weight, p->width,
                 p->epsilon);
    }
}

void op_rope_table_ref(const op_rope_table_params *p) {
    const uint32_t half = p->head_dim / 2;
    for (uint32_t r = 0; r < p->rows; r++) {
        for (uint32_t i = 0; i < half; i++) {
            const float angle = (float)p->positions[r] * p->frequencies[i];
            double sine, cosine;
            math_sincos_f64((double)angle, &sine, &cosine);
            p->out[(size_t)r * p->head_dim + i] = (float)cosine * p->magnitude;
            p->out[(size_t)r * p->head_dim + half + i] = (float)sine * p->magnitude;
        }
    }
}

static void turn_head(float *x, const float *norm, const float *table, uint32_t head_dim,
                      float epsilon) {
    const uint32_t half = head_dim / 2;
    if (norm != NULL) norm_row(x, x, norm, head_dim, epsilon);
    for (uint32_t i = 0; i < half; i++) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a * table[i] - b * table[half + i];
        x[i + half] = b * table[i] + a * table[half + i];
    }
}

static void store(const op_rope_store_params *p, uint32_t row, uint32_t which, uint32_t head,
                  const float *x) {
    const kv_page_layout *layout = &p->kv.layout;
    const uint32_t position = p->positions[row];
    const uint32_t page =
        p->kv.page_ids[p->kv.page_offsets[p->sequence_of[row]] + position / layout->page_tokens];
    uint8_t *to = p->kv.memory + page * kv_page_bytes(layout) +
                  kv_page_offset(layout, p->layer, which, head) +
                  (size_t)(position % layout->page_tokens) * layout->head_dim *
                      kv_element_bytes(layout->dtype);
    for (uint32_t i = 0; i < layout->head_dim; i++) {
        const uint16_t narrow = bf16_from_f32(x[i]);
        if (layout->dtype == KV_DTYPE_BF16)
            memcpy(to + i * sizeof narrow, &narrow, sizeof narrow);
        else
            memcpy(to + i * sizeof *x, &x[i], sizeof *x);
    }
}

void op_rope_store_ref(const op_rope_store_params *p) {
    const uint32_t head_dim = p->kv.layout.head_dim;
    const uint32_t kv_heads = p->kv.layout.kv_heads;
    for (uint32_t row = 0; row < p->tokens; row++) {
        const float *table = p->rope + (size_t)row * head_dim;
        float *x = p->qkv + (size_t)row * (p->heads + 2 * kv_heads) * head_dim;
        for (uint32_t h = 0; h < p->heads; h++, x += head_dim)
            turn_head(x, p->q_norm, table, head_dim, p->epsilon);
        for (uint32_t h = 0; h < kv_heads; h++, x += head_dim) {
            turn_head(x, p->k_norm, table, head_dim, p->epsilon);
            store(p, row, 0, h, x);
        }
        for (uint32_t h = 0; h < kv_heads; h++, x += head_dim)
            store(p, row, 1, h, x);
    }
}
