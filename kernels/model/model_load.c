/* model_load: a model file through the packer, hashed on the way. The fingerprint is SHA-256 over
 * the geometry, field by field in little endian, with the rotation frequencies in place of what
 * they were computed from, and then for every piece of model_pieces its format and the SHA-256 of
 * its rows as they are packed; so a GGUF file and an HF folder of the same weights, kept in the
 * same form, have the same one, and pieces are hashed by several threads. */
#include <openssl/evp.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/math.h"
#include "kernels/model/model_file.h"
#include "kernels/model/model_internal.h"
#include "kernels/model/model_rope.h"

enum { DIGEST_BYTES = MODEL_FINGERPRINT_BYTES };

typedef struct loader {
    const model_file *file;
    model *m;
    model_piece *pieces;
    uint8_t (*digests)[DIGEST_BYTES]; /* [pieces] */
    uint32_t piece_count;
} loader;

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

static bt_status hash_all(EVP_MD_CTX *hash, const loader *l, bt_error *error) {
    if (EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1)
        return bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 is not available");
    bt_status status = hash_geometry(hash, &l->m->card.geometry, error);
    for (uint32_t i = 0; i < l->piece_count && status == BT_OK; i++) {
        status = hash_number(hash, (uint64_t)l->pieces[i].format, error);
        if (status == BT_OK) status = hash_bytes(hash, l->digests[i], DIGEST_BYTES, error);
    }
    if (status != BT_OK) return status;
    unsigned int bytes = 0;
    if (EVP_DigestFinal_ex(hash, l->m->card.fingerprint, &bytes) != 1 || bytes != DIGEST_BYTES)
        return bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 failed");
    return BT_OK;
}

static bt_status set_fingerprint(const loader *l, bt_error *error) {
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    if (hash == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    const bt_status status = hash_all(hash, l, error);
    EVP_MD_CTX_free(hash);
    return status;
}

static pack_format stored_format(void *context, model_tensor tensor, uint32_t layer) {
    const loader *l = context;
    return model_file_stored_format(l->file, tensor, layer);
}

static bt_status read_bf16(void *context, model_tensor tensor, uint32_t layer, uint32_t first_row,
                           uint32_t rows, uint16_t *out, bt_error *error) {
    const loader *l = context;
    return model_file_read(l->file, tensor, layer, first_row, rows, out, error);
}

static bt_status read_stored(void *context, model_tensor tensor, uint32_t layer, uint32_t first_row,
                             uint32_t rows, uint8_t *out, bt_error *error) {
    const loader *l = context;
    return model_file_read_stored(l->file, tensor, layer, first_row, rows, out, error);
}

/* The rows have been read, so their pages in the file are not needed any more. */
static bt_status on_piece(void *context, uint32_t piece, pack_format format, const uint8_t *rows,
                          size_t bytes, bt_error *error) {
    const loader *l = context;
    const model_piece *p = &l->pieces[piece];
    BT_ASSERT(p->format == format);
    model_file_release(l->file, p->tensor, p->layer, p->first_row, p->rows);
    unsigned int digest_bytes = 0;
    if (EVP_Digest(rows, bytes, l->digests[piece], &digest_bytes, EVP_sha256(), NULL) == 1 &&
        digest_bytes == DIGEST_BYTES)
        return BT_OK;
    return bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 failed");
}

static bt_status create_digests(loader *l, bt_error *error) {
    l->piece_count = model_pieces(l->m, NULL);
    l->pieces = bt_calloc(l->piece_count, sizeof *l->pieces);
    l->digests = bt_calloc(l->piece_count, sizeof *l->digests);
    if (l->pieces == NULL || l->digests == NULL)
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    (void)model_pieces(l->m, l->pieces);
    return BT_OK;
}

/* Packs into private memory. */
static bt_status pack(loader *l, const model_source *source, uint32_t threads, bt_error *error) {
    uint8_t *arena = host_memory_map(l->m->arena_bytes);
    if (arena == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory for the weights");
    model_place(l->m, arena, l->m->arena_bytes, arena);
    bt_status status = create_digests(l, error);
    if (status == BT_OK) status = model_pack(l->m, source, threads, error);
    if (status == BT_OK) status = set_fingerprint(l, error);
    return status;
}

static bt_status load(const model_file *file, const model_load_options *options, model **out,
                      bt_error *error) {
    loader l = {.file = file};
    const model_source source = {.card = model_file_card(file),
                                 .stored_format = stored_format,
                                 .read = read_bf16,
                                 .read_stored = read_stored,
                                 .on_piece = on_piece,
                                 .context = &l};
    bt_status status = model_plan(&source, options->weights, &l.m, error);
    if (status == BT_OK) status = pack(&l, &source, options->threads, error);
    if (status == BT_OK)
        *out = l.m;
    else
        model_destroy(l.m);
    bt_free(l.digests);
    bt_free(l.pieces);
    return status;
}

bt_status model_load(const char *path, const model_load_options *options, model **out,
                     bt_error *error) {
    static const model_load_options plain = {.weights = MODEL_WEIGHTS_BF16};
    model_file *file;
    bt_status status = model_file_open(path, &file, error);
    if (status != BT_OK) return status;
    status = load(file, options == NULL ? &plain : options, out, error);
    model_file_close(file);
    return status;
}
