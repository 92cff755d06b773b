/* model_load: a model file through the packer, hashed on the way. The fingerprint is SHA-256 over
 * the geometry, field by field in little endian, with the rotation frequencies in place of what
 * they were computed from, and then every tensor as bf16 in the order of model_build; so a GGUF
 * file and an HF folder of the same weights have the same one. */
#include <openssl/evp.h>
#include <string.h>

#include "kernels/math.h"
#include "kernels/model/model_file.h"
#include "kernels/model/model_internal.h"
#include "kernels/model/model_rope.h"

typedef struct hashed_file {
    const model_file *file;
    EVP_MD_CTX *hash;
} hashed_file;

static bt_status hash_bytes(EVP_MD_CTX *hash, const void *bytes, size_t count, bt_error *error) {
    if (EVP_DigestUpdate(hash, bytes, count) == 1) return BT_OK;
    return bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 failed");
}

static bt_status hash_number(EVP_MD_CTX *hash, uint64_t value, bt_error *error) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
    return hash_bytes(hash, bytes, sizeof bytes, error);
}

static bt_status hash_geometry(EVP_MD_CTX *hash, const model_geometry *g, bt_error *error) {
    const uint64_t fields[] = {
        (uint64_t)g->family,
        g->vocab_size,
        g->context_tokens,
        g->hidden_size,
        g->intermediate_size,
        g->layers,
        g->heads,
        g->kv_heads,
        g->head_dim,
        math_bits_f32(g->norm_epsilon),
        math_bits_f32(model_rope_magnitude(g)),
        g->sliding_window,
        g->has_tied_embeddings,
        g->has_qkv_bias,
        g->has_o_bias,
        g->has_qk_norm,
    };
    float frequencies[MODEL_ROPE_PAIRS_MAX];
    bt_status status = BT_OK;
    for (size_t i = 0; i < BT_ARRAY_COUNT(fields) && status == BT_OK; i++)
        status = hash_number(hash, fields[i], error);
    model_rope_frequencies(g, frequencies);
    for (uint32_t i = 0; i < g->head_dim / 2 && status == BT_OK; i++)
        status = hash_number(hash, math_bits_f32(frequencies[i]), error);
    return status;
}

static bt_status read_hashed(void *context, model_tensor tensor, uint32_t layer, uint32_t first_row,
                             uint32_t rows, uint16_t *out, bt_error *error) {
    const hashed_file *h = context;
    const bt_status status = model_file_read(h->file, tensor, layer, first_row, rows, out, error);
    if (status != BT_OK) return status;
    const model_shape shape = model_tensor_shape(&model_file_card(h->file)->geometry, tensor);
    return hash_bytes(h->hash, out, (size_t)rows * shape.columns * sizeof *out, error);
}

static bt_status build_hashed(const hashed_file *h, void (*progress)(void *, double),
                              void *progress_context, model **out, bt_error *error) {
    hashed_file context = *h;
    const model_source source = {
        .card = model_file_card(h->file), .read = read_hashed, .context = &context};
    if (EVP_DigestInit_ex(h->hash, EVP_sha256(), NULL) != 1)
        return bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 is not available");
    bt_status status = hash_geometry(h->hash, &source.card->geometry, error);
    if (status != BT_OK) return status;
    model *m;
    status = model_build(&source, progress, progress_context, &m, error);
    if (status != BT_OK) return status;
    unsigned int bytes = 0;
    if (EVP_DigestFinal_ex(h->hash, m->card.fingerprint, &bytes) != 1 ||
        bytes != MODEL_FINGERPRINT_BYTES) {
        model_destroy(m);
        return bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 failed");
    }
    *out = m;
    return BT_OK;
}

bt_status model_load(const char *path, void (*progress)(void *, double), void *progress_context,
                     model **out, bt_error *error) {
    model_file *file;
    bt_status status = model_file_open(path, &file, error);
    if (status != BT_OK) return status;
    const hashed_file h = {.file = file, .hash = EVP_MD_CTX_new()};
    if (h.hash == NULL)
        status = bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    else
        status = build_hashed(&h, progress, progress_context, out, error);
    EVP_MD_CTX_free(h.hash);
    model_file_close(file);
    return status;
}
