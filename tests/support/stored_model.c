/* The header comes from gguf_writer; the data is written behind it row by row, or left as a hole.
 */
#include "tests/support/stored_model.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/model/model_internal.h"
#include "tests/support/gguf_writer.h"

static const char *const names[MODEL_TENSOR_COUNT] = {
    [MODEL_TENSOR_TOKEN_EMBEDDING] = "token_embd.weight",
    [MODEL_TENSOR_OUTPUT] = "output.weight",
    [MODEL_TENSOR_OUTPUT_NORM] = "output_norm.weight",
    [MODEL_TENSOR_ATTENTION_NORM] = "attn_norm.weight",
    [MODEL_TENSOR_Q] = "attn_q.weight",
    [MODEL_TENSOR_K] = "attn_k.weight",
    [MODEL_TENSOR_V] = "attn_v.weight",
    [MODEL_TENSOR_O] = "attn_output.weight",
    [MODEL_TENSOR_FFN_NORM] = "ffn_norm.weight",
    [MODEL_TENSOR_GATE] = "ffn_gate.weight",
    [MODEL_TENSOR_UP] = "ffn_up.weight",
    [MODEL_TENSOR_DOWN] = "ffn_down.weight",
};

static void add_keys(const model_geometry *g, gguf_writer *w) {
    gguf_writer_string(w, "general.architecture", "llama");
    gguf_writer_string(w, "general.name", "stored");
    gguf_writer_u32(w, "llama.context_length", g->context_tokens);
    gguf_writer_u32(w, "llama.embedding_length", g->hidden_size);
    gguf_writer_u32(w, "llama.block_count", g->layers);
    gguf_writer_u32(w, "llama.feed_forward_length", g->intermediate_size);
    gguf_writer_u32(w, "llama.attention.head_count", g->heads);
    gguf_writer_u32(w, "llama.attention.head_count_kv", g->kv_heads);
    gguf_writer_u32(w, "llama.attention.key_length", g->head_dim);
    gguf_writer_u32(w, "llama.attention.value_length", g->head_dim);
    gguf_writer_u32(w, "llama.rope.dimension_count", g->head_dim);
    gguf_writer_f32(w, "llama.attention.layer_norm_rms_epsilon", g->norm_epsilon);
    gguf_writer_f32(w, "llama.rope.freq_base", (float)g->rope_theta);
}

static uint64_t next(uint64_t *state) {
    uint64_t x = (*state += 0x9e3779b97f4a7c15U);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

/* Sets the numbers among random bytes that must be small: one f16 (or two), or every bf16. */
static void tame(uint8_t *row, size_t bytes, uint32_t type, uint64_t *state) {
    size_t step = sizeof(uint16_t);
    if (type != BT_GGUF_TENSOR_BF16) BT_ASSERT(bt_gguf_tensor_type_bytes(type, 32, &step));
    for (size_t at = 0; at < bytes; at += step) {
        const uint64_t random = next(state);
        uint16_t half = (uint16_t)(0x1400U | (random & 0x83ffU));       /* f16: 2^-10 to 2^-9 */
        if (step == 2) half = (uint16_t)(0x3c00U | (random & 0x80ffU)); /* bf16: 2^-7 to 2^-5 */
        memcpy(row + at, &half, sizeof half);
        if (type == BT_GGUF_TENSOR_Q4_1) memcpy(row + at + 2, &half, sizeof half);
    }
}

typedef struct written_tensor {
    uint32_t type;
    uint64_t offset, rows;
    size_t row_bytes;
} written_tensor;

static bool write_tensor(int fd, off_t start, const written_tensor *t, uint64_t *state) {
    uint8_t *row = bt_malloc(t->row_bytes);
    bool is_written = row != NULL;
    for (uint64_t r = 0; r < t->rows && is_written; r++) {
        for (size_t i = 0; i < t->row_bytes; i++)
            row[i] = (uint8_t)(next(state) >> 40);
        if (t->type == BT_GGUF_TENSOR_F32) {
            const float one = 1.0F;
            for (size_t i = 0; i < t->row_bytes; i += sizeof one)
                memcpy(row + i, &one, sizeof one);
        } else {
            tame(row, t->row_bytes, t->type, state);
        }
        const off_t at = start + (off_t)(t->offset + r * t->row_bytes);
        is_written = pwrite(fd, row, t->row_bytes, at) == (ssize_t)t->row_bytes;
    }
    bt_free(row);
    return is_written;
}

/* Adds one info and returns what is to be written; *end moves behind the tensor. */
static written_tensor add_tensor(const stored_model *m, gguf_writer *w, model_tensor tensor,
                                 uint32_t layer, uint64_t *end) {
    const model_shape shape = model_tensor_shape(&m->geometry, tensor);
    const bool is_vector = shape.rows == 1;
    char name[128];
    (void)snprintf(name, sizeof name, "blk.%u.%s", layer, names[tensor]);
    written_tensor t = {
        .type = is_vector ? BT_GGUF_TENSOR_F32 : m->type, .offset = *end, .rows = shape.rows};
    BT_ASSERT(bt_gguf_tensor_type_bytes(t.type, shape.columns, &t.row_bytes));
    gguf_writer_info(w, &(gguf_writer_tensor_info){
                            .name = tensor < MODEL_TENSOR_ATTENTION_NORM ? names[tensor] : name,
                            .type = t.type,
                            .dimension_count = is_vector ? 1 : 2,
                            .dimensions = {shape.columns, shape.rows},
                            .offset = t.offset});
    *end += (t.rows * t.row_bytes + w->alignment - 1) / w->alignment * w->alignment;
    return t;
}

static bool write_file(const stored_model *m, int fd, const test_bytes *header, uint64_t end,
                       const written_tensor *tensors, size_t count) {
    uint64_t state = m->seed;
    bool is_written = write(fd, header->data, header->count) == (ssize_t)header->count &&
                      ftruncate(fd, (off_t)(header->count + end)) == 0;
    for (size_t i = 0; i < count && is_written && m->seed != 0; i++)
        is_written = write_tensor(fd, (off_t)header->count, &tensors[i], &state);
    return is_written;
}

bt_status stored_model_write(const stored_model *m, const char *path) {
    enum { TENSORS_MAX = 1024 };
    static written_tensor tensors[TENSORS_MAX];
    size_t count = 0;
    uint64_t end = 0;
    gguf_writer w;
    gguf_writer_init(&w);
    add_keys(&m->geometry, &w);
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        const uint32_t layers = t < MODEL_TENSOR_ATTENTION_NORM ? 1 : m->geometry.layers;
        if (model_tensor_shape(&m->geometry, (model_tensor)t).rows == 0) continue;
        for (uint32_t layer = 0; layer < layers; layer++) {
            BT_ASSERT(count < TENSORS_MAX);
            tensors[count++] = add_tensor(m, &w, (model_tensor)t, layer, &end);
        }
    }
    test_bytes header = gguf_writer_finish(&w);
    test_bytes_align(&header, w.alignment);
    gguf_writer_fini(&w);
    const int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    const bool is_written = fd >= 0 && write_file(m, fd, &header, end, tensors, count);
    if (fd >= 0) close(fd);
    test_bytes_fini(&header);
    return is_written ? BT_OK : BT_ERR_WORKER_IO;
}
