/* SHA-256 over what decides how text becomes ids, in one canonical form: numbers are 8 bytes
 * little-endian, texts are preceded by their bytes. Changing the form changes every fingerprint, so
 * its first line is a version. */
#include <openssl/evp.h>
#include <string.h>

#include "base/mem.h"
#include "router/tokenizer_internal.h"

static const char form[] = "baton tokenizer 1";

static bool put_number(EVP_MD_CTX *digest, uint64_t value) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
    return EVP_DigestUpdate(digest, bytes, sizeof bytes) == 1;
}

static bool put_text(EVP_MD_CTX *digest, const char *text, size_t bytes) {
    return put_number(digest, bytes) && EVP_DigestUpdate(digest, text, bytes) == 1;
}

static bool put_vocabulary(EVP_MD_CTX *digest, const tokenizer *t) {
    const uint32_t kept =
        TOKEN_PRESENT | TOKEN_ADDED | TOKEN_SPECIAL | TOKEN_LSTRIP | TOKEN_RSTRIP | TOKEN_SINGLE;
    uint32_t count = t->vocab_count;
    while (count > 0 && (t->entries[count - 1].flags & TOKEN_PRESENT) == 0)
        count--; /* padding of the embedding, which some files list and some do not */
    bool ok = put_number(digest, count);
    for (uint32_t id = 0; id < count && ok; id++) {
        const token_entry *entry = &t->entries[id];
        ok = put_number(digest, entry->flags & kept) &&
             put_text(digest, t->text + entry->offset, entry->bytes);
    }
    return ok;
}

/* Merges in the order of their rank, whatever their slots are. */
static bool put_merges(EVP_MD_CTX *digest, const tokenizer *t, uint64_t (*by_rank)[2]) {
    memset(by_rank, 0xFF, t->merge_count * sizeof *by_rank);
    for (size_t i = 0; i <= t->merge_mask; i++) {
        const merge_slot *slot = &t->merges[i];
        if (slot->pair == UINT64_MAX) continue;
        by_rank[slot->rank][0] = slot->pair;
        by_rank[slot->rank][1] = (uint64_t)(uint32_t)slot->id;
    }
    bool ok = put_number(digest, t->merge_count);
    for (uint32_t rank = 0; rank < t->merge_count && ok; rank++)
        ok = put_number(digest, by_rank[rank][0]) && put_number(digest, by_rank[rank][1]);
    return ok;
}

static bool put_rules(EVP_MD_CTX *digest, const tokenizer *t) {
    const char *rule = split_rule_name(t->rule);
    bool ok = put_text(digest, rule, strlen(rule)) && put_number(digest, t->normalizes) &&
              put_number(digest, t->ignores_merges) && put_number(digest, t->fuses_unknown) &&
              put_number(digest, (uint64_t)(int64_t)t->unknown_id) &&
              put_number(digest, t->prefix_count) && put_number(digest, t->suffix_count);
    for (uint32_t i = 0; i < t->prefix_count && ok; i++)
        ok = put_number(digest, (uint64_t)(uint32_t)t->prefix_ids[i]);
    for (uint32_t i = 0; i < t->suffix_count && ok; i++)
        ok = put_number(digest, (uint64_t)(uint32_t)t->suffix_ids[i]);
    return ok;
}

bt_status tokenizer_compute_fingerprint(tokenizer *t) {
    bt_status status = BT_ERR_WORKER_MEMORY;
    unsigned int bytes = 0;
    uint64_t(*by_rank)[2] = bt_calloc((size_t)t->merge_count + 1, sizeof *by_rank);
    EVP_MD_CTX *digest = EVP_MD_CTX_new();
    if (by_rank == NULL || digest == NULL) goto free_all;
    status = BT_ERR_WORKER_INTERNAL;
    if (EVP_DigestInit_ex(digest, EVP_sha256(), NULL) == 1 &&
        put_text(digest, form, sizeof form - 1) && put_vocabulary(digest, t) &&
        put_merges(digest, t, by_rank) && put_rules(digest, t) &&
        EVP_DigestFinal_ex(digest, t->fingerprint, &bytes) == 1)
        status = BT_OK;
free_all:
    EVP_MD_CTX_free(digest);
    bt_free(by_rank);
    return status;
}
