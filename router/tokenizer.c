/* The public face of the tokenizer: loading, questions, and the stages of encoding in their order:
 * added tokens, normalisation, added tokens again, pieces, merges. */
#include "router/tokenizer.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/assert.h"
#include "base/file_map.h"
#include "base/gguf.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "router/tokenizer_internal.h"

enum { PATH_BYTES_MAX = 4096 };

/* Whether the file can be a tokenizer.json: its first character opens an object. */
static bool starts_an_object(const bt_file_map *map) {
    const char *text = (const char *)map->data;
    size_t at = 0;
    while (at < map->bytes && memchr(" \t\r\n", text[at], 4) != NULL)
        at++;
    return at < map->bytes && text[at] == '{';
}

/* A file that starts with the magic is GGUF, whatever its name is; what can be neither that nor
 * JSON is no model, and a JSON parser's complaint about it would help nobody. */
static bt_status is_gguf(const char *path, bool *is_gguf_out, bt_error *error) {
    bt_file_map map = {0};
    const bt_status status = bt_file_map_open(path, &map, error);
    if (status != BT_OK) return status;
    *is_gguf_out = bt_gguf_is_magic(map.data, map.bytes);
    const bool is_known = *is_gguf_out || starts_an_object(&map);
    bt_file_map_close(&map);
    if (is_known) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_FILE,
                   "%s: neither a GGUF file, nor a model's folder, nor a tokenizer.json", path);
}

static bt_status join(char *out, const char *folder, size_t folder_bytes, const char *name,
                      bt_error *error) {
    const int written = snprintf(out, PATH_BYTES_MAX, "%.*s%s", (int)folder_bytes, folder, name);
    if (written < 0 || written >= PATH_BYTES_MAX)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "the tokenizer's path is too long");
    return BT_OK;
}

/* A tokenizer.json with its companions. `path` is the folder or the file itself. */
static bt_status load_huggingface(const char *path, bool is_folder, tokenizer *t, bt_error *error) {
    char file[PATH_BYTES_MAX];
    char folder[PATH_BYTES_MAX];
    const char *slash = strrchr(path, '/');
    const size_t parent_bytes = slash == NULL ? 0 : (size_t)(slash - path) + 1;
    bt_status status = is_folder ? join(file, path, strlen(path), "/tokenizer.json", error)
                                 : join(file, path, strlen(path), "", error);
    if (status == BT_OK)
        status = is_folder ? join(folder, path, strlen(path), "/", error)
                           : join(folder, path, parent_bytes, "", error);
    if (status == BT_OK) status = tokenizer_load_json(file, t, error);
    if (status == BT_OK) status = tokenizer_load_config(folder, t, error);
    return status;
}

static bt_status load_into(const char *path, tokenizer *t, bt_error *error) {
    struct stat about;
    if (stat(path, &about) != 0)
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: no such file or folder", path);
    if (S_ISDIR(about.st_mode)) return load_huggingface(path, true, t, error);
    bool gguf = false;
    const bt_status status = is_gguf(path, &gguf, error);
    if (status != BT_OK) return status;
    return gguf ? tokenizer_load_gguf(path, t, error) : load_huggingface(path, false, t, error);
}

bt_status tokenizer_load(const char *path, tokenizer **out, bt_error *error) {
    tokenizer *t = NULL;
    bt_status status = tokenizer_create(&t);
    if (status != BT_OK) return bt_fail(error, status, "out of memory for the tokenizer");
    status = load_into(path, t, error);
    if (status != BT_OK) {
        tokenizer_destroy(t);
        return status;
    }
    *out = t;
    return BT_OK;
}

void tokenizer_destroy(tokenizer *t) {
    if (t == NULL) return;
    split_pattern_destroy(t->split);
    added_trie_fini(&t->added);
    added_trie_fini(&t->added_normalized);
    chat_template_fini(&t->chat);
    bt_free(t->entries);
    bt_free(t->text);
    bt_free(t->pieces);
    bt_free(t->merges);
    bt_free(t);
}

uint32_t tokenizer_vocab_count(const tokenizer *t) {
    return t->vocab_count;
}

uint32_t tokenizer_token_bytes_max(const tokenizer *t) {
    if (t->drops_text) return UINT32_MAX;
    /* Form C has at least a third of the bytes of what it is made from (U+212A, Hangul). */
    return t->normalizes ? 3 * t->token_bytes_max : t->token_bytes_max;
}

const uint8_t *tokenizer_fingerprint(const tokenizer *t) {
    return t->fingerprint;
}

bool tokenizer_token_bytes(const tokenizer *t, int32_t id, const char **bytes_out,
                           size_t *count_out) {
    const bool is_present =
        id >= 0 && (uint32_t)id < t->vocab_count && (t->entries[id].flags & TOKEN_PRESENT) != 0;
    *bytes_out = is_present ? t->text + t->entries[id].offset : "";
    *count_out = is_present ? t->entries[id].bytes : 0;
    return is_present;
}

bool tokenizer_is_special(const tokenizer *t, int32_t id) {
    return id >= 0 && (uint32_t)id < t->vocab_count && (t->entries[id].flags & TOKEN_SPECIAL) != 0;
}

int32_t tokenizer_find(const tokenizer *t, const char *text) {
    const size_t bytes = strlen(text);
    const added_trie *tries[] = {&t->added, &t->added_normalized};
    for (size_t i = 0; i < BT_ARRAY_COUNT(tries); i++) {
        const int32_t id = added_trie_find(tries[i], text, bytes);
        if (id >= 0) return id;
    }
    return bytes == 0 ? -1 : tokenizer_find_piece(t, text, bytes);
}

uint32_t tokenizer_eos(const tokenizer *t, int32_t ids_out[TOKENIZER_EOS_MAX]) {
    memcpy(ids_out, t->eos_ids, t->eos_count * sizeof *ids_out);
    return t->eos_count;
}

bt_status token_list_append(token_list *list, int32_t id) {
    if (BT_UNLIKELY(list->count == list->capacity)) {
        if (list->capacity > UINT32_MAX / 2) return BT_ERR_REQUEST_TOO_LARGE;
        const uint32_t capacity = list->capacity == 0 ? 64 : 2 * list->capacity;
        int32_t *ids = bt_realloc(list->ids, (size_t)capacity * sizeof *ids);
        if (ids == NULL) return BT_ERR_WORKER_MEMORY;
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->count++] = id;
    return BT_OK;
}

void token_list_fini(token_list *list) {
    bt_free(list->ids);
    *list = (token_list){0};
}

bt_status encode_job_init(encode_job *job, const tokenizer *t, tokenizer_encode_options options,
                          token_list *list) {
    *job = (encode_job){.t = t,
                        .list = list,
                        .start_count = list->count,
                        .tokens_max = options.tokens_max,
                        .parses_special = options.parses_special};
    return split_scratch_create(t->split, &job->split);
}

bt_status encode_job_fini(encode_job *job, bt_status status) {
    split_scratch_destroy(job->split);
    bpe_scratch_fini(&job->bpe);
    nfc_buffer_fini(&job->nfc);
    if (status != BT_OK) job->list->count = job->start_count;
    return status;
}

static bt_status check_limit(const encode_job *job) {
    if (job->tokens_max == 0 || job->list->count - job->start_count <= job->tokens_max)
        return BT_OK;
    return BT_ERR_CALLER_LIMIT;
}

bt_status encode_job_id(encode_job *job, int32_t id) {
    const bt_status status = token_list_append(job->list, id);
    return status == BT_OK ? check_limit(job) : status;
}

/* Text without added tokens, already normal. */
static bt_status encode_plain(encode_job *job, const char *text, size_t bytes) {
    bt_status status = BT_OK;
    for (size_t start = 0, end = 0; start < bytes && status == BT_OK; start = end) {
        status = split_next(job->t->split, job->split, text, bytes, start, &end);
        if (status == BT_OK)
            status = bpe_encode(job->t, &job->bpe, text + start, end - start, job->list);
        if (status == BT_OK) status = check_limit(job);
    }
    return status;
}

/* Text between the added tokens of the first walk. */
static bt_status encode_gap(encode_job *job, const char *text, size_t bytes) {
    bt_status status = BT_OK;
    if (job->t->normalizes) status = nfc_normalize(&job->nfc, text, bytes, &text, &bytes);
    added_cursor cursor = {0};
    for (size_t at = 0; at < bytes && status == BT_OK;) {
        const added_match match = added_next(job->t, &job->t->added_normalized, text, bytes,
                                             job->parses_special, &cursor);
        status = encode_plain(job, text + at, match.start - at);
        if (status == BT_OK && match.id >= 0) status = encode_job_id(job, match.id);
        at = match.end;
    }
    return status;
}

bt_status encode_job_text(encode_job *job, const char *text, size_t bytes) {
    if (!bt_utf8_is_valid(text, bytes)) return BT_ERR_REQUEST_INVALID;
    /* What cannot fit is refused before any work is spent on it. */
    if (job->tokens_max != 0 && bytes / tokenizer_token_bytes_max(job->t) > job->tokens_max)
        return BT_ERR_CALLER_LIMIT;
    bt_status status = BT_OK;
    added_cursor cursor = {0};
    for (size_t at = 0; at < bytes && status == BT_OK;) {
        const added_match match =
            added_next(job->t, &job->t->added, text, bytes, job->parses_special, &cursor);
        status = encode_gap(job, text + at, match.start - at);
        if (status == BT_OK && match.id >= 0) status = encode_job_id(job, match.id);
        at = match.end;
    }
    return status;
}

bt_status tokenizer_encode(const tokenizer *t, const char *text, size_t bytes,
                           tokenizer_encode_options options, token_list *list) {
    encode_job job;
    bt_status status = encode_job_init(&job, t, options, list);
    for (uint32_t i = 0; options.adds_special && i < t->prefix_count && status == BT_OK; i++)
        status = encode_job_id(&job, t->prefix_ids[i]);
    if (status == BT_OK) status = encode_job_text(&job, text, bytes);
    for (uint32_t i = 0; options.adds_special && i < t->suffix_count && status == BT_OK; i++)
        status = encode_job_id(&job, t->suffix_ids[i]);
    return encode_job_fini(&job, status);
}
