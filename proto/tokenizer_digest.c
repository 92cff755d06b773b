/* SHA-256 over the parts of a model path that define its tokenizer. Each part goes in with its
 * length before it, so that moving bytes between neighbours changes the digest. */
#include "proto/tokenizer_digest.h"

#include <stdio.h>
#include <sys/stat.h>

#include <openssl/evp.h>

#include "base/file_map.h"
#include "base/gguf.h"

static const char *const gguf_text_keys[] = {"tokenizer.ggml.model", "tokenizer.ggml.pre"};
static const char *const gguf_string_arrays[] = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"};

static void add_part(EVP_MD_CTX *hash, const void *data, size_t bytes) {
    uint8_t length[8];
    for (size_t i = 0; i < sizeof length; i++)
        length[i] = (uint8_t)((uint64_t)bytes >> (8 * i));
    (void)EVP_DigestUpdate(hash, length, sizeof length);
    (void)EVP_DigestUpdate(hash, data, bytes);
}

static bt_status add_string_array(EVP_MD_CTX *hash, const bt_gguf *file, const char *key,
                                  bt_error *error) {
    bt_gguf_array array;
    const bt_status status = bt_gguf_get_array(file, key, BT_GGUF_TYPE_STRING, &array, error);
    if (status != BT_OK) return status;
    add_part(hash, &(uint64_t){array.count}, sizeof(uint64_t));
    bt_gguf_string_cursor cursor = {0};
    bt_gguf_string string;
    while (bt_gguf_array_next_string(&array, &cursor, &string))
        add_part(hash, string.text, string.bytes);
    return BT_OK;
}

static bt_status add_gguf(EVP_MD_CTX *hash, const char *path, bt_error *error) {
    bt_gguf *file;
    bt_status status = bt_gguf_open(path, &file, error);
    if (status != BT_OK) return status;
    for (size_t i = 0; i < BT_ARRAY_COUNT(gguf_text_keys) && status == BT_OK; i++) {
        bt_gguf_string text = {"", 0};
        if (bt_gguf_has_key(file, gguf_text_keys[i]))
            status = bt_gguf_get_string(file, gguf_text_keys[i], &text, error);
        add_part(hash, text.text, text.bytes);
    }
    for (size_t i = 0; i < BT_ARRAY_COUNT(gguf_string_arrays) && status == BT_OK; i++)
        status = add_string_array(hash, file, gguf_string_arrays[i], error);
    bt_gguf_array types = {.count = 0, .data = (const uint8_t *)""};
    if (status == BT_OK && bt_gguf_has_key(file, "tokenizer.ggml.token_type"))
        status =
            bt_gguf_get_array(file, "tokenizer.ggml.token_type", BT_GGUF_TYPE_I32, &types, error);
    add_part(hash, types.data, types.count * sizeof(int32_t));
    bt_gguf_close(file);
    return status;
}

static bt_status add_file(EVP_MD_CTX *hash, const char *path, bt_error *error) {
    bt_file_map map;
    const bt_status status = bt_file_map_open(path, &map, error);
    if (status != BT_OK) return status;
    if (bt_gguf_is_magic(map.data, map.bytes)) {
        bt_file_map_close(&map);
        return add_gguf(hash, path, error);
    }
    add_part(hash, map.data, map.bytes);
    bt_file_map_close(&map);
    return BT_OK;
}

bt_status proto_tokenizer_digest(const char *path, char hex_out[TOKENIZER_DIGEST_TEXT_BYTES],
                                 bt_error *error) {
    char inside[4096];
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        const int wanted = snprintf(inside, sizeof inside, "%s/tokenizer.json", path);
        if (wanted < 0 || (size_t)wanted >= sizeof inside)
            return bt_fail(error, BT_ERR_CALLER_FILE, "%s: the path is too long", path);
        path = inside;
    }
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    if (hash == NULL || EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(hash);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "SHA-256 is not available");
    }
    const bt_status status = add_file(hash, path, error);
    uint8_t digest[32] = {0};
    (void)EVP_DigestFinal_ex(hash, digest, NULL);
    EVP_MD_CTX_free(hash);
    if (status != BT_OK) return status;
    for (size_t i = 0; i < sizeof digest; i++)
        (void)snprintf(hex_out + 2 * i, 3, "%02x", digest[i]);
    return BT_OK;
}
