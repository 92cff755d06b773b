/* model_load: a model file through the packer, hashed on the way. The fingerprint is SHA-256 over
 * the geometry, field by field in little endian, with the rotation frequencies in place of what
 * they were computed from, and then for every piece of model_pieces its format and the SHA-256 of
 * its rows as they are packed; so a GGUF file and an HF folder of the same weights, kept in the
 * same form, have the same one, and pieces are hashed by several threads. */
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/math.h"
#include "kernels/model/model_cache.h"
#include "kernels/model/model_file.h"
#include "kernels/model/model_identity.h"
#include "kernels/model/model_internal.h"
#include "kernels/model/model_rope.h"

enum { DIGEST_BYTES = MODEL_FINGERPRINT_BYTES };

typedef struct loader {
    const model_file *file;
    model *m;
    model_piece *pieces;
    uint8_t (*digests)[DIGEST_BYTES]; /* [pieces] */
    uint32_t piece_count;
    const char *path;
    const model_load_options *options;
    model_cache *cache; /* NULL: without */
    model_cache_entry entry;
    model_identity identity; /* before the file was opened */
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

typedef bt_status (*hash_part)(EVP_MD_CTX *hash, const loader *l, bt_error *error);

static bt_status hash_fingerprint(EVP_MD_CTX *hash, const loader *l, bt_error *error) {
    bt_status status = hash_geometry(hash, &l->m->card.geometry, error);
    for (uint32_t i = 0; i < l->piece_count && status == BT_OK; i++) {
        status = hash_number(hash, (uint64_t)l->pieces[i].format, error);
        if (status == BT_OK) status = hash_bytes(hash, l->digests[i], DIGEST_BYTES, error);
    }
    return status;
}

/* Everything that decides the bytes of the arena: the files, and what is made of them. */
static bt_status hash_key(EVP_MD_CTX *hash, const loader *l, bt_error *error) {
    bt_status status = hash_bytes(hash, l->identity.digest, sizeof l->identity.digest, error);
    if (status == BT_OK) status = hash_number(hash, PACK_VERSION, error);
    if (status == BT_OK) status = hash_number(hash, l->m->arena_bytes, error);
    if (status == BT_OK) status = hash_geometry(hash, &l->m->card.geometry, error);
    for (uint32_t i = 0; i < l->piece_count && status == BT_OK; i++)
        status = hash_number(hash, (uint64_t)l->pieces[i].format, error);
    return status;
}

/* SHA-256 of what `part` gives. */
static bt_status digest(const loader *l, hash_part part, uint8_t out[DIGEST_BYTES],
                        bt_error *error) {
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    if (hash == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    bt_status status = BT_OK;
    unsigned int bytes = 0;
    if (EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1)
        status = bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 is not available");
    if (status == BT_OK) status = part(hash, l, error);
    if (status == BT_OK && (EVP_DigestFinal_ex(hash, out, &bytes) != 1 || bytes != DIGEST_BYTES))
        status = bt_fail(error, BT_ERR_WORKER_INTERNAL, "SHA-256 failed");
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
static bt_status pack(loader *l, const model_source *source, bt_error *error) {
    uint8_t *arena = host_memory_map(l->m->arena_bytes);
    if (arena == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory for the weights");
    model_place(l->m, arena, l->m->arena_bytes, arena);
    bt_status status = model_pack(l->m, source, l->options->threads, error);
    if (status == BT_OK) status = digest(l, hash_fingerprint, l->m->card.fingerprint, error);
    return status;
}

/* ---- the cache of packed weights */

/* Whether the files are still those that the key is about. */
static bool is_same_source(const loader *l) {
    model_identity now;
    return model_identity_read(l->path, &now) &&
           memcmp(now.digest, l->identity.digest, sizeof now.digest) == 0;
}

/* Copies a body that is mapped in small pages, letting go of what is copied. */
static uint8_t *copy_body(const uint8_t *body, size_t bytes) {
    const size_t step = (size_t)4 << 20;
    uint8_t *copy = host_memory_map(bytes);
    for (size_t at = 0; copy != NULL && at < bytes; at += step) {
        const size_t part = bytes - at < step ? bytes - at : step;
        memcpy(copy + at, body + at, part);
        host_memory_release(body + at, part);
    }
    return copy;
}

/* Small pages make every step slower (kernels/README.md), so a copy is better where there is no
 * other way. */
static uint8_t *on_huge_pages(const loader *l, uint8_t *body) {
    const size_t bytes = l->m->arena_bytes;
    if (host_memory_is_on_huge_pages(body, bytes)) return body;
    uint8_t *copy = copy_body(body, bytes);
    if (copy == NULL) return body;
    host_memory_unmap(body, bytes);
    bt_log_info("weights",
                "%s cannot be mapped on huge pages, so the weights are copied and not "
                "shared; a folder in /dev/shm can, on Linux 6.1 and later",
                l->options->cache_folder);
    return copy;
}

static bool place_cached(loader *l) {
    const bt_clock clock = bt_clock_system();
    const uint64_t start_us = bt_clock_now_us(&clock);
    uint8_t *body;
    if (!model_cache_find(l->cache, &l->entry, l->options->threads, &body)) return false;
    if (!is_same_source(l)) {
        host_memory_unmap(body, l->m->arena_bytes);
        return false;
    }
    body = on_huge_pages(l, body);
    model_place(l->m, body, l->m->arena_bytes, body);
    memcpy(l->m->card.fingerprint, l->entry.fingerprint, sizeof l->m->card.fingerprint);
    bt_log_info("weights", "packed weights found in %s and verified in %" PRIu64 " ms",
                l->options->cache_folder, (bt_clock_now_us(&clock) - start_us) / 1000);
    return true;
}

/* Gives the packed arena to other workers, and takes the file in its place where that costs
 * nothing. */
static void share(loader *l) {
    const size_t bytes = l->m->arena_bytes;
    if (!l->identity.is_settled || !is_same_source(l)) return;
    memcpy(l->entry.fingerprint, l->m->card.fingerprint, sizeof l->entry.fingerprint);
    if (!model_cache_store(l->cache, &l->entry, l->m->arena, l->options->cache_bytes_max)) return;
    uint8_t *body;
    if (!model_cache_map_stored(l->cache, &l->entry, &body)) return;
    if (host_memory_is_on_huge_pages(body, bytes))
        model_place(l->m, body, bytes, body);
    else
        host_memory_unmap(body, bytes);
}

/* How long another worker may take to pack, before this one does so itself: a minute, and what 20
 * MB/s take. */
static uint64_t wait_ms(size_t bytes) {
    return 60000 + bytes / 20000;
}

static bt_status load_shared(loader *l, const model_source *source, bt_error *error) {
    const bt_status status = digest(l, hash_key, l->entry.key, error);
    if (status != BT_OK) return status;
    l->entry.body_bytes = l->m->arena_bytes;
    if (place_cached(l)) return BT_OK;
    const bool is_held = model_cache_hold(l->cache, &l->entry, wait_ms(l->m->arena_bytes));
    if (is_held && place_cached(l)) return BT_OK; /* another one was quicker */
    const bt_status packed = pack(l, source, error);
    if (packed == BT_OK && is_held) share(l);
    return packed;
}

static void open_cache(loader *l) {
    if (l->options->cache_folder == NULL) return;
    if (!model_identity_read(l->path, &l->identity)) return;
    if (!model_cache_open(l->options->cache_folder, &l->cache)) l->cache = NULL;
}

static bt_status load(loader *l, model **out, bt_error *error) {
    const model_source source = {.card = model_file_card(l->file),
                                 .stored_format = stored_format,
                                 .read = read_bf16,
                                 .read_stored = read_stored,
                                 .on_piece = on_piece,
                                 .context = l};
    bt_status status = model_plan(&source, l->options->weights, &l->m, error);
    if (status == BT_OK) status = create_digests(l, error);
    if (status == BT_OK)
        status = l->cache == NULL ? pack(l, &source, error) : load_shared(l, &source, error);
    if (status == BT_OK)
        *out = l->m;
    else
        model_destroy(l->m);
    bt_free(l->digests);
    bt_free(l->pieces);
    return status;
}

bool model_load_default_cache(char *out, size_t capacity) {
    const char *base = getenv("XDG_CACHE_HOME");
    const char *middle = "";
    if (base == NULL || base[0] != '/') {
        base = getenv("HOME");
        middle = "/.cache";
    }
    if (base == NULL || base[0] != '/') return false;
    const int length = snprintf(out, capacity, "%s%s/baton/weights", base, middle);
    return length > 0 && (size_t)length < capacity;
}

bt_status model_load(const char *path, const model_load_options *options, model **out,
                     bt_error *error) {
    static const model_load_options plain = {.weights = MODEL_WEIGHTS_BF16};
    model_load_options used = options == NULL ? plain : *options;
    if (used.threads == 0) used.threads = 1;
    loader l = {.path = path, .options = &used};
    model_file *file;
    open_cache(&l);
    bt_status status = model_file_open(path, &file, error);
    if (status == BT_OK) {
        l.file = file;
        status = load(&l, out, error);
        model_file_close(file);
    }
    model_cache_close(l.cache);
    return status;
}
