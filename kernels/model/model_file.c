/* Opens a model, whatever its container: checks the geometry, finds every tensor that the geometry
 * asks for, checks shape and type, and refuses a file with tensors that would be left out, because
 * such a model computes something else. Reading then is one loop for all containers. */
#include "kernels/model/model_file.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/model/model_file_internal.h"
#include "kernels/model/model_internal.h"
#include "kernels/model/model_rope.h"

/* Named limits, far above any model of these families, so that the size of a tensor fits in 64
 * bits. */
enum {
    VOCAB_MAX = 1 << 24,
    CONTEXT_MAX = 1 << 24,
    WIDTH_MAX = 1 << 20, /* hidden and intermediate size */
    LAYERS_MAX = 1024,
    HEADS_MAX = 1024,
    HEAD_DIM_MAX = 1024,
    NAME_BYTES_MAX = 256,
};

static bool is_layered(model_tensor tensor) {
    return tensor >= MODEL_TENSOR_ATTENTION_NORM;
}

static size_t weight_count(const model_geometry *g) {
    return MODEL_TENSOR_ATTENTION_NORM +
           (size_t)g->layers * (MODEL_TENSOR_COUNT - MODEL_TENSOR_ATTENTION_NORM);
}

static size_t weight_index(model_tensor tensor, uint32_t layer) {
    if (!is_layered(tensor)) return (size_t)tensor;
    const size_t per_layer = MODEL_TENSOR_COUNT - MODEL_TENSOR_ATTENTION_NORM;
    return (size_t)layer * per_layer + (size_t)tensor;
}

static bool is_vector(model_tensor tensor) {
    switch (tensor) {
    case MODEL_TENSOR_OUTPUT_NORM:
    case MODEL_TENSOR_ATTENTION_NORM:
    case MODEL_TENSOR_FFN_NORM:
    case MODEL_TENSOR_Q_BIAS:
    case MODEL_TENSOR_K_BIAS:
    case MODEL_TENSOR_V_BIAS:
    case MODEL_TENSOR_O_BIAS:
    case MODEL_TENSOR_Q_NORM:
    case MODEL_TENSOR_K_NORM: return true;
    case MODEL_TENSOR_TOKEN_EMBEDDING:
    case MODEL_TENSOR_OUTPUT:
    case MODEL_TENSOR_Q:
    case MODEL_TENSOR_K:
    case MODEL_TENSOR_V:
    case MODEL_TENSOR_O:
    case MODEL_TENSOR_GATE:
    case MODEL_TENSOR_UP:
    case MODEL_TENSOR_DOWN:
    case MODEL_TENSOR_COUNT: break;
    }
    return false;
}

static bt_status check_range(const model_file *file, const char *what, uint32_t value,
                             uint32_t limit, bt_error *error) {
    if (value >= 1 && value <= limit) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_FILE, "%s: the %s is %u, 1 to %u are possible", file->path,
                   what, value, limit);
}

static bt_status check_geometry(const model_file *file, bt_error *error) {
    const model_geometry *g = &file->card.geometry;
    const struct {
        const char *what;
        uint32_t value;
        uint32_t limit;
    } ranges[] = {
        {"vocabulary size", g->vocab_size, VOCAB_MAX},
        {"context length", g->context_tokens, CONTEXT_MAX},
        {"hidden size", g->hidden_size, WIDTH_MAX},
        {"intermediate size", g->intermediate_size, WIDTH_MAX},
        {"number of layers", g->layers, LAYERS_MAX},
        {"number of heads", g->heads, HEADS_MAX},
        {"number of KV heads", g->kv_heads, HEADS_MAX},
        {"head size", g->head_dim, HEAD_DIM_MAX},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(ranges); i++) {
        const bt_status status =
            check_range(file, ranges[i].what, ranges[i].value, ranges[i].limit, error);
        if (status != BT_OK) return status;
    }
    if (g->heads % g->kv_heads != 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: %u heads cannot be shared by %u KV heads evenly", file->path, g->heads,
                       g->kv_heads);
    }
    if (g->head_dim % 2 != 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: the head size %u is odd", file->path,
                       g->head_dim);
    }
    if (!(g->norm_epsilon > 0.0f && g->norm_epsilon < 1.0f)) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: the norm epsilon is %g, a number between 0 and 1 is needed", file->path,
                       (double)g->norm_epsilon);
    }
    bt_error rope = {0};
    if (model_rope_check(g, &rope) != BT_OK)
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: %s", file->path, rope.text);
    return BT_OK;
}

/* What has more than one way to be said, so that the same model has the same geometry: a window
 * that reaches over the whole context is none, and yarn's context is at least the one it is for.
 * Nothing is checked yet; what is absurd is left for check_geometry. */
static void settle_geometry(model_geometry *g) {
    const model_rope_scaling *s = &g->rope_scaling;
    if (s->kind == MODEL_ROPE_KIND_YARN) {
        const double context = s->original_context_tokens * s->factor;
        if (context > g->context_tokens)
            g->context_tokens = context < CONTEXT_MAX ? (uint32_t)context : CONTEXT_MAX + 1;
    }
    if (g->sliding_window >= g->context_tokens) g->sliding_window = 0;
}

static void format_name(const model_file_format *format, model_tensor tensor, uint32_t layer,
                        char out[NAME_BYTES_MAX]) {
    if (is_layered(tensor)) {
        (void)snprintf(out, NAME_BYTES_MAX, "%s%u.%s", format->layer_prefix, layer,
                       format->names[tensor]);
    } else {
        (void)snprintf(out, NAME_BYTES_MAX, "%s", format->names[tensor]);
    }
}

static bt_status check_weight(const model_file *file, model_tensor tensor,
                              const model_weight *weight, bt_error *error) {
    const model_shape wanted = model_tensor_shape(&file->card.geometry, tensor);
    const uint32_t rank = is_vector(tensor) ? 1 : 2;
    if (weight->rank != rank) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: tensor %s has %u dimensions, this model needs %u", file->path,
                       weight->name, weight->rank, rank);
    }
    if (weight->rows != wanted.rows || weight->columns != wanted.columns) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: tensor %s has shape [%" PRIu64 ", %" PRIu64
                       "] (outputs, inputs), this model needs [%u, %u]",
                       file->path, weight->name, weight->rows, weight->columns, wanted.rows,
                       wanted.columns);
    }
    if (!weight->is_encoding_known) {
        return bt_fail(error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: tensor %s has type %s, which is not supported yet", file->path,
                       weight->name, weight->type_name);
    }
    return BT_OK;
}

static bt_status find_weight(model_file *file, model_tensor tensor, uint32_t layer,
                             bt_error *error) {
    model_weight *weight = &file->weights[weight_index(tensor, layer)];
    char name[NAME_BYTES_MAX];
    format_name(file->format, tensor, layer, name);
    if (!file->format->find(file, name, weight)) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: tensor %s is missing", file->path, name);
    }
    const bool is_qk = tensor == MODEL_TENSOR_Q || tensor == MODEL_TENSOR_K ||
                       tensor == MODEL_TENSOR_Q_BIAS || tensor == MODEL_TENSOR_K_BIAS;
    if (is_qk && file->has_permuted_qk) weight->permuted_head_rows = file->card.geometry.head_dim;
    return check_weight(file, tensor, weight, error);
}

static bt_status find_weights(model_file *file, bt_error *error) {
    const model_geometry *g = &file->card.geometry;
    file->weights = bt_calloc(weight_count(g), sizeof file->weights[0]);
    if (file->weights == NULL) {
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", file->path);
    }
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        const model_tensor tensor = (model_tensor)t;
        if (model_tensor_shape(g, tensor).rows == 0) continue;
        const uint32_t layers = is_layered(tensor) ? g->layers : 1;
        for (uint32_t layer = 0; layer < layers; layer++) {
            const bt_status status = find_weight(file, tensor, layer, error);
            if (status != BT_OK) return status;
        }
    }
    return BT_OK;
}

/* true when a tensor of the container is one that find_weights has taken. */
static bool is_taken(const model_file *file, const char *name) {
    const model_geometry *g = &file->card.geometry;
    const size_t prefix_bytes = strlen(file->format->layer_prefix);
    uint32_t layer = 0;
    const char *rest = name;
    const bool is_of_layer = strncmp(name, file->format->layer_prefix, prefix_bytes) == 0;
    if (is_of_layer) {
        char *end = NULL;
        const unsigned long number = strtoul(name + prefix_bytes, &end, 10);
        if (*end != '.' || number >= g->layers) return false;
        layer = (uint32_t)number;
        rest = end + 1;
    }
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        const model_tensor tensor = (model_tensor)t;
        if (is_layered(tensor) != is_of_layer) continue;
        if (strcmp(rest, file->format->names[tensor]) != 0) continue;
        /* "blk.00.x" parses as layer 0, but it is not the tensor that was taken. */
        const char *taken = file->weights[weight_index(tensor, layer)].name;
        return taken != NULL && strcmp(taken, name) == 0;
    }
    return false;
}

static bt_status check_no_rest(const model_file *file, bt_error *error) {
    const size_t count = file->format->count(file);
    for (size_t i = 0; i < count; i++) {
        const char *name = file->format->name_at(file, i);
        if (is_taken(file, name) || file->format->is_ignored(name)) continue;
        return bt_fail(error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: tensor %s has no place in this model, which is not supported",
                       file->path, name);
    }
    return BT_OK;
}

static bt_status open_container(model_file *file, bt_error *error) {
    struct stat info;
    if (stat(file->path, &info) == 0 && S_ISDIR(info.st_mode)) {
        return model_file_open_hf(file, error);
    }
    const char *suffix = strrchr(file->path, '.');
    if (suffix != NULL && strcmp(suffix, ".safetensors") == 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: a model in safetensors is given as its folder, not as this file",
                       file->path);
    }
    const bt_status status = bt_gguf_open(file->path, &file->gguf, error);
    return status == BT_OK ? model_file_open_gguf(file, error) : status;
}

static bt_status create(const char *path, model_file **out, bt_error *error) {
    model_file *file = bt_calloc(1, sizeof *file);
    if (file != NULL) file->path = bt_strdup(path);
    if (file == NULL || file->path == NULL) {
        bt_free(file);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", path);
    }
    *out = file;
    return BT_OK;
}

/* What follows once the container is open, whose status is given. The file is *out or closed. */
static bt_status finish_opening(model_file *file, bt_status status, model_file **out,
                                bt_error *error) {
    if (status == BT_OK) settle_geometry(&file->card.geometry);
    if (status == BT_OK) status = check_geometry(file, error);
    if (status == BT_OK) status = find_weights(file, error);
    if (status == BT_OK) status = check_no_rest(file, error);
    if (status != BT_OK) {
        model_file_close(file);
        return status;
    }
    *out = file;
    return BT_OK;
}

bt_status model_file_open(const char *path, model_file **out, bt_error *error) {
    model_file *file = NULL;
    const bt_status status = create(path, &file, error);
    if (status != BT_OK) return status;
    return finish_opening(file, open_container(file, error), out, error);
}

bt_status model_file_open_memory(const uint8_t *data, size_t bytes, const char *name,
                                 model_file **out, bt_error *error) {
    model_file *file = NULL;
    bt_status status = create(name, &file, error);
    if (status != BT_OK) return status;
    status = bt_gguf_open_memory(data, bytes, name, &file->gguf, error);
    if (status == BT_OK) status = model_file_open_gguf(file, error);
    return finish_opening(file, status, out, error);
}

bt_status model_file_parse_config(const char *text, size_t bytes, const char *name, model_card *out,
                                  bt_error *error) {
    model_file *file = NULL;
    bt_status status = create(name, &file, error);
    if (status == BT_OK) status = model_file_parse_hf_config(file, text, bytes, error);
    if (status == BT_OK) settle_geometry(&file->card.geometry);
    if (status == BT_OK) status = check_geometry(file, error);
    if (status == BT_OK) *out = file->card;
    model_file_close(file);
    return status;
}

void model_file_close(model_file *file) {
    if (file == NULL) return;
    bt_gguf_close(file->gguf);
    bt_safetensors_set_close(file->safetensors);
    bt_free(file->weights);
    bt_free(file->path);
    bt_free(file);
}

const model_card *model_file_card(const model_file *file) {
    return &file->card;
}

/* Where HF's row is stored. Within a head of D rows, GGUF's llama order interleaves the two halves
 * that rope rotates: HF row a * D/2 + b is stored as row 2b + a. */
static uint32_t stored_row(const model_weight *weight, uint32_t row) {
    const uint32_t head_rows = weight->permuted_head_rows;
    if (head_rows == 0) return row;
    const uint32_t in_head = row % head_rows;
    const uint32_t half = head_rows / 2;
    return row - in_head + 2 * (in_head % half) + in_head / half;
}

/* Puts the elements of a vector that are in llama GGUF order back, head by head. */
static void restore_vector(const model_weight *weight, uint16_t *vector) {
    const uint32_t head_rows = weight->permuted_head_rows;
    uint16_t head[HEAD_DIM_MAX];
    for (uint64_t first = 0; first < weight->columns; first += head_rows) {
        memcpy(head, vector + first, head_rows * sizeof head[0]);
        for (uint32_t i = 0; i < head_rows; i++)
            vector[first + i] = head[stored_row(weight, i)];
    }
}

static const model_weight *weight_of(const model_file *file, model_tensor tensor, uint32_t layer) {
    BT_ASSERT(model_tensor_shape(&file->card.geometry, tensor).rows != 0);
    BT_ASSERT(layer < (is_layered(tensor) ? file->card.geometry.layers : 1));
    return &file->weights[weight_index(tensor, layer)];
}

static bt_status fail_row(const model_file *file, const model_weight *weight, uint32_t row,
                          bt_error *error) {
    return bt_fail(error, BT_ERR_CALLER_FILE,
                   "%s: tensor %s has a weight in row %u that is not a finite number", file->path,
                   weight->name, row);
}

bt_status model_file_read(const model_file *file, model_tensor tensor, uint32_t layer,
                          uint32_t first_row, uint32_t rows, uint16_t *out, bt_error *error) {
    const model_weight *weight = weight_of(file, tensor, layer);
    BT_ASSERT(first_row <= weight->rows && rows <= weight->rows - first_row);
    const size_t columns = (size_t)weight->columns;
    const size_t row_bytes = dequant_row_bytes(weight->encoding, columns);
    const bool is_permuted_vector = weight->rank == 1 && weight->permuted_head_rows != 0;
    for (uint32_t row = first_row; row < first_row + rows; row++) {
        const uint32_t stored = weight->rank == 1 ? 0 : stored_row(weight, row);
        if (!dequant_row(weight->encoding, weight->data + stored * row_bytes, columns, out))
            return fail_row(file, weight, row, error);
        if (is_permuted_vector) restore_vector(weight, out);
        out += columns;
    }
    return BT_OK;
}

pack_format model_file_stored_format(const model_file *file, model_tensor tensor, uint32_t layer) {
    switch (weight_of(file, tensor, layer)->encoding) {
    case DEQUANT_ENCODING_Q4_0: return PACK_Q4_0;
    case DEQUANT_ENCODING_Q4_1: return PACK_Q4_1;
    case DEQUANT_ENCODING_Q8_0: return PACK_Q8_0;
    case DEQUANT_ENCODING_F32:
    case DEQUANT_ENCODING_F16:
    case DEQUANT_ENCODING_BF16:
    case DEQUANT_ENCODING_Q5_0:
    case DEQUANT_ENCODING_Q5_1:
    case DEQUANT_ENCODING_Q4_K:
    case DEQUANT_ENCODING_Q5_K:
    case DEQUANT_ENCODING_Q6_K: break;
    }
    return PACK_BF16;
}

bt_status model_file_read_stored(const model_file *file, model_tensor tensor, uint32_t layer,
                                 uint32_t first_row, uint32_t rows, uint8_t *out, bt_error *error) {
    const model_weight *weight = weight_of(file, tensor, layer);
    const pack_format format = model_file_stored_format(file, tensor, layer);
    const uint32_t columns = (uint32_t)weight->columns;
    const size_t row_bytes = pack_row_bytes(format, columns);
    BT_ASSERT(first_row <= weight->rows && rows <= weight->rows - first_row);
    BT_ASSERT(row_bytes == dequant_row_bytes(weight->encoding, columns));
    for (uint32_t row = first_row; row < first_row + rows; row++) {
        memcpy(out, weight->data + stored_row(weight, row) * row_bytes, row_bytes);
        if (!pack_rows_are_finite(format, columns, out, 1))
            return fail_row(file, weight, row, error);
        out += row_bytes;
    }
    return BT_OK;
}

void model_file_release(const model_file *file, model_tensor tensor, uint32_t layer,
                        uint32_t first_row, uint32_t rows) {
    const model_weight *weight = weight_of(file, tensor, layer);
    const size_t row_bytes = dequant_row_bytes(weight->encoding, (size_t)weight->columns);
    const uint8_t *data = weight->data + first_row * row_bytes;
    if (file->gguf != NULL)
        bt_gguf_release(file->gguf, data, rows * row_bytes);
    else
        bt_safetensors_set_release(file->safetensors, weight->name, data, rows * row_bytes);
}

void model_file_set_name(model_file *file, const char *name, size_t bytes) {
    char *out = file->card.name;
    if (bytes > sizeof file->card.name - 1) bytes = sizeof file->card.name - 1;
    for (size_t i = 0; i < bytes; i++) {
        const bool is_printable = name[i] >= 0x20 && name[i] <= 0x7e;
        out[i] = name[i];
        if (!is_printable) out[i] = '_';
    }
    out[bytes] = '\0';
}

void model_file_name_by_path(model_file *file) {
    char resolved[PATH_MAX];
    const char *path = realpath(file->path, resolved) != NULL ? resolved : file->path;
    const char *slash = strrchr(path, '/');
    const char *name = slash != NULL && slash[1] != '\0' ? slash + 1 : path;
    model_file_set_name(file, name, strlen(name));
}

bt_status model_file_add_eos(model_file *file, int64_t id, const char *where, bt_error *error) {
    model_card *card = &file->card;
    if (id < 0 || id >= (int64_t)card->geometry.vocab_size) {
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: the end-of-sequence id %" PRId64
                       " of %s is outside the vocabulary of %u ids",
                       file->path, id, where, card->geometry.vocab_size);
    }
    for (uint32_t i = 0; i < card->eos_count; i++) {
        if (card->eos_ids[i] == id) return BT_OK;
    }
    if (card->eos_count == MODEL_EOS_MAX) {
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "%s: has more than %d end-of-sequence ids",
                       file->path, MODEL_EOS_MAX);
    }
    card->eos_ids[card->eos_count++] = (int32_t)id;
    return BT_OK;
}
