/* Filling and sealing the tables of a tokenizer. All of them are built at load and only read later.
 * The vocabulary is a table by id over one block of text, and two open-addressing hash tables:
 * bytes to id, and pair of ids to merge. Both are at most half full, so that a miss ends soon. */
#include "router/tokenizer_internal.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "base/utf8.h"

static bt_status no_memory(bt_error *error) {
    return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory for the tokenizer");
}

bt_status tokenizer_create(tokenizer **out) {
    tokenizer *t = bt_calloc(1, sizeof *t);
    if (t == NULL) return BT_ERR_WORKER_MEMORY;
    t->unknown_id = -1;
    for (int i = 0; i < 256; i++)
        t->byte_ids[i] = -1;
    *out = t;
    return BT_OK;
}

/* Capacity that doubles; 0 on overflow. */
static size_t grown(size_t capacity, size_t needed) {
    size_t size = capacity < 64 ? 64 : capacity;
    while (size < needed)
        if (!bt_mul_size(size, 2, &size)) return 0;
    return size;
}

static bt_status reserve_entry(tokenizer *t, uint64_t id, bt_error *error) {
    if (id >= TOKENIZER_VOCAB_MAX)
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "token id %llu is above the limit of %d",
                       (unsigned long long)id, TOKENIZER_VOCAB_MAX - 1);
    if (id >= t->entry_capacity) {
        const size_t capacity = grown(t->entry_capacity, (size_t)id + 1);
        token_entry *entries = bt_realloc(t->entries, capacity * sizeof *entries);
        if (entries == NULL) return no_memory(error);
        memset(entries + t->entry_capacity, 0, (capacity - t->entry_capacity) * sizeof *entries);
        t->entries = entries;
        t->entry_capacity = (uint32_t)capacity;
    }
    if (id >= t->vocab_count) t->vocab_count = (uint32_t)id + 1;
    return BT_OK;
}

/* Room for `bytes` more of text; the block never passes 4 GiB because offsets are 32 bits. */
static bt_status reserve_text(tokenizer *t, size_t bytes, bt_error *error) {
    const size_t needed = t->text_bytes + bytes;
    if (needed > UINT32_MAX)
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "the vocabulary's text is above 4 GiB");
    if (needed <= t->text_capacity) return BT_OK;
    const size_t capacity = grown(t->text_capacity, needed);
    char *text = bt_realloc(t->text, capacity);
    if (text == NULL) return no_memory(error);
    t->text = text;
    t->text_capacity = capacity;
    return BT_OK;
}

static bt_status check_text(uint64_t id, token_text text, bt_error *error) {
    if (text.bytes > TOKENIZER_TOKEN_BYTES_MAX)
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "token %llu is longer than %d bytes",
                       (unsigned long long)id, TOKENIZER_TOKEN_BYTES_MAX);
    if (!bt_utf8_is_valid(text.text, text.bytes))
        return bt_fail(error, BT_ERR_CALLER_FILE, "token %llu is not valid UTF-8",
                       (unsigned long long)id);
    return BT_OK;
}

static void set_text(tokenizer *t, token_entry *entry, size_t bytes, uint32_t flags) {
    *entry = (token_entry){(uint32_t)t->text_bytes, (uint32_t)bytes, flags};
    t->text_bytes += bytes;
    if (bytes > t->token_bytes_max) t->token_bytes_max = (uint32_t)bytes;
}

bt_status tokenizer_put_piece(tokenizer *t, uint64_t id, token_text text, bt_error *error) {
    bt_status status = check_text(id, text, error);
    if (status == BT_OK) status = reserve_entry(t, id, error);
    if (status == BT_OK) status = reserve_text(t, text.bytes, error);
    if (status != BT_OK) return status;
    token_entry *entry = &t->entries[id];
    if (entry->flags != 0)
        return bt_fail(error, BT_ERR_CALLER_FILE, "token id %llu is given twice",
                       (unsigned long long)id);
    if (text.bytes == 0) { /* no text can produce it */
        set_text(t, entry, 0, TOKEN_PRESENT);
        return BT_OK;
    }
    char *to = t->text + t->text_bytes;
    size_t bytes = 0;
    if (byte_alphabet_decode(text, to, &bytes)) {
        set_text(t, entry, bytes, TOKEN_PRESENT | TOKEN_PIECE);
    } else {
        memcpy(to, text.text, text.bytes);
        set_text(t, entry, text.bytes, TOKEN_PRESENT);
    }
    return BT_OK;
}

bt_status tokenizer_put_hole(tokenizer *t, uint64_t id, bt_error *error) {
    return reserve_entry(t, id, error);
}

static uint64_t hash_bytes(const char *bytes, size_t count) {
    const uint64_t odd = UINT64_C(0x9E3779B97F4A7C15);
    uint64_t hash = (uint64_t)count * odd;
    while (count > 0) {
        const size_t step = count < 8 ? count : 8;
        uint64_t word = 0;
        memcpy(&word, bytes, step);
        hash = (hash ^ word) * odd;
        hash ^= hash >> 32;
        bytes += step;
        count -= step;
    }
    hash *= odd;
    return hash ^ (hash >> 29);
}

static uint64_t hash_pair(uint64_t pair) {
    pair ^= pair >> 32;
    pair *= UINT64_C(0xD6E8FEB86659FD93);
    pair ^= pair >> 32;
    pair *= UINT64_C(0xD6E8FEB86659FD93);
    return pair ^ (pair >> 32);
}

/* The slot of these bytes, or the empty slot where they belong. */
static token_slot *piece_slot(const tokenizer *t, uint64_t hash, const char *bytes, size_t count) {
    size_t at = (size_t)hash & t->piece_mask;
    for (;; at = (at + 1) & t->piece_mask) {
        token_slot *slot = &t->pieces[at];
        if (slot->id < 0) return slot;
        if (slot->hash != (uint32_t)(hash >> 32)) continue;
        const token_entry *entry = &t->entries[slot->id];
        if (entry->bytes == count && memcmp(t->text + entry->offset, bytes, count) == 0)
            return slot;
    }
}

int32_t tokenizer_find_piece(const tokenizer *t, const char *bytes, size_t count) {
    return piece_slot(t, hash_bytes(bytes, count), bytes, count)->id;
}

static merge_slot *pair_slot(const tokenizer *t, uint64_t pair) {
    size_t at = (size_t)hash_pair(pair) & t->merge_mask;
    while (t->merges[at].pair != pair && t->merges[at].pair != UINT64_MAX)
        at = (at + 1) & t->merge_mask;
    return &t->merges[at];
}

const merge_slot *tokenizer_find_merge(const tokenizer *t, int32_t left, int32_t right) {
    const uint64_t pair = ((uint64_t)(uint32_t)left << 32) | (uint32_t)right;
    const merge_slot *slot = pair_slot(t, pair);
    return slot->pair == pair ? slot : NULL;
}

/* A power of two that leaves at least half of the slots empty. */
static size_t slot_count(size_t items) {
    return grown(0, items * 2 + 1);
}

bt_status tokenizer_seal_pieces(tokenizer *t, size_t merges_max, bt_error *error) {
    if (t->vocab_count == 0) return bt_fail(error, BT_ERR_CALLER_FILE, "the vocabulary is empty");
    if (merges_max > TOKENIZER_VOCAB_MAX)
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "%zu merges are above the limit of %d",
                       merges_max, TOKENIZER_VOCAB_MAX);
    const size_t piece_slots = slot_count(t->vocab_count);
    const size_t merge_slots = slot_count(merges_max);
    t->pieces = bt_malloc(piece_slots * sizeof *t->pieces);
    t->merges = bt_malloc(merge_slots * sizeof *t->merges);
    if (t->pieces == NULL || t->merges == NULL) return no_memory(error);
    t->piece_mask = piece_slots - 1;
    t->merge_mask = merge_slots - 1;
    for (size_t i = 0; i < piece_slots; i++)
        t->pieces[i] = (token_slot){0, -1};
    for (size_t i = 0; i < merge_slots; i++)
        t->merges[i] = (merge_slot){UINT64_MAX, 0, -1};
    for (uint32_t id = 0; id < t->vocab_count; id++) {
        const token_entry *entry = &t->entries[id];
        if ((entry->flags & TOKEN_PIECE) == 0) continue;
        const char *bytes = t->text + entry->offset;
        const uint64_t hash = hash_bytes(bytes, entry->bytes);
        token_slot *slot = piece_slot(t, hash, bytes, entry->bytes);
        if (slot->id >= 0)
            return bt_fail(error, BT_ERR_CALLER_FILE, "tokens %d and %u have the same text",
                           slot->id, id);
        *slot = (token_slot){(uint32_t)(hash >> 32), (int32_t)id};
        if (entry->bytes == 1) t->byte_ids[(uint8_t)bytes[0]] = (int32_t)id;
    }
    return BT_OK;
}

/* Finds one side of a merge; error sentences show at most 64 bytes of what the file says. */
static bt_status find_side(const tokenizer *t, token_text side, char *bytes, size_t *count_out,
                           int32_t *id_out, bt_error *error) {
    const int shown = (int)(side.bytes < 64 ? side.bytes : 64);
    if (side.bytes == 0 || side.bytes > TOKENIZER_TOKEN_BYTES_MAX)
        return bt_fail(error, BT_ERR_CALLER_FILE, "merge %u has an empty or too long side",
                       t->merge_count);
    *id_out = -1;
    if (bt_utf8_is_valid(side.text, side.bytes) && byte_alphabet_decode(side, bytes, count_out))
        *id_out = tokenizer_find_piece(t, bytes, *count_out);
    if (*id_out < 0)
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "merge %u names the token \"%.*s\", which is not in the vocabulary",
                       t->merge_count, shown, side.text);
    return BT_OK;
}

bt_status tokenizer_put_merge(tokenizer *t, token_text left, token_text right, bt_error *error) {
    char bytes[2 * TOKENIZER_TOKEN_BYTES_MAX];
    size_t left_bytes = 0;
    size_t right_bytes = 0;
    int32_t left_id = -1;
    int32_t right_id = -1;
    bt_status status = find_side(t, left, bytes, &left_bytes, &left_id, error);
    if (status == BT_OK)
        status = find_side(t, right, bytes + left_bytes, &right_bytes, &right_id, error);
    if (status != BT_OK) return status;
    const int32_t both = tokenizer_find_piece(t, bytes, left_bytes + right_bytes);
    if (both < 0)
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "merge %u makes a token that is not in the vocabulary (of %d and %d)",
                       t->merge_count, left_id, right_id);
    BT_ASSERT((size_t)t->merge_count * 2 <= t->merge_mask);
    const uint64_t pair = ((uint64_t)(uint32_t)left_id << 32) | (uint32_t)right_id;
    /* A pair that comes twice keeps its last rank, as in the files' reference reader. */
    *pair_slot(t, pair) = (merge_slot){pair, t->merge_count, both};
    t->merge_count++;
    return BT_OK;
}

/* Checks an added token against an entry of the vocabulary with the same id. */
static bt_status match_entry(const tokenizer *t, uint64_t id, token_text text, bt_error *error) {
    const token_entry *entry = &t->entries[id];
    if ((entry->flags & TOKEN_ADDED) != 0)
        return bt_fail(error, BT_ERR_CALLER_FILE, "added token id %llu is given twice",
                       (unsigned long long)id);
    char bytes[TOKENIZER_TOKEN_BYTES_MAX];
    size_t count = text.bytes;
    const bool is_piece = (entry->flags & TOKEN_PIECE) != 0;
    if (!is_piece || !byte_alphabet_decode(text, bytes, &count))
        memcpy(bytes, text.text, text.bytes);
    if (entry->bytes != count || memcmp(t->text + entry->offset, bytes, count) != 0)
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "added token %llu has another text than the vocabulary's",
                       (unsigned long long)id);
    return BT_OK;
}

/* Another id with the same text would make the token ambiguous. */
static bt_status check_other_piece(const tokenizer *t, uint64_t id, token_text text,
                                   bt_error *error) {
    char bytes[TOKENIZER_TOKEN_BYTES_MAX];
    size_t count = 0;
    if (!byte_alphabet_decode(text, bytes, &count)) return BT_OK;
    const int32_t other = tokenizer_find_piece(t, bytes, count);
    if (other < 0 || (uint64_t)other == id) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_FILE, "added token %llu is token %d of the vocabulary",
                   (unsigned long long)id, other);
}

/* Puts the token into its trie under the text that is looked for. */
static bt_status put_in_trie(tokenizer *t, int32_t id, token_text text, bool is_normalized) {
    if (!is_normalized || !t->normalizes)
        return added_trie_put(is_normalized ? &t->added_normalized : &t->added, text.text,
                              text.bytes, id);
    nfc_buffer buffer = {0};
    bt_status status = nfc_normalize(&buffer, text.text, text.bytes, &text.text, &text.bytes);
    if (status == BT_OK) status = added_trie_put(&t->added_normalized, text.text, text.bytes, id);
    nfc_buffer_fini(&buffer);
    return status;
}

bt_status tokenizer_put_added(tokenizer *t, uint64_t id, token_text text, uint32_t flags,
                              bool is_normalized, bt_error *error) {
    BT_ASSERT(t->pieces != NULL);
    if (text.bytes == 0)
        return bt_fail(error, BT_ERR_CALLER_FILE, "added token %llu is empty",
                       (unsigned long long)id);
    bt_status status = check_text(id, text, error);
    if (status == BT_OK) status = reserve_entry(t, id, error);
    if (status == BT_OK) status = reserve_text(t, text.bytes, error);
    if (status == BT_OK) status = check_other_piece(t, id, text, error);
    if (status != BT_OK) return status;
    token_entry *entry = &t->entries[id];
    if ((entry->flags & TOKEN_PRESENT) != 0) {
        status = match_entry(t, id, text, error);
        if (status != BT_OK) return status;
    } else {
        memcpy(t->text + t->text_bytes, text.text, text.bytes);
        set_text(t, entry, text.bytes, TOKEN_PRESENT);
    }
    entry->flags |= TOKEN_ADDED | flags;
    if ((flags & (TOKEN_LSTRIP | TOKEN_RSTRIP)) != 0) t->drops_text = true;
    status = put_in_trie(t, (int32_t)id, text, is_normalized);
    if (status == BT_ERR_REQUEST_DUPLICATE)
        return bt_fail(error, BT_ERR_CALLER_FILE, "added token %llu repeats another one's text",
                       (unsigned long long)id);
    return status == BT_OK ? BT_OK : no_memory(error);
}

bt_status tokenizer_put_eos(tokenizer *t, int64_t id, bt_error *error) {
    if (id < 0 || id >= TOKENIZER_VOCAB_MAX)
        return bt_fail(error, BT_ERR_CALLER_FILE, "end-of-sequence id %lld is out of range",
                       (long long)id);
    for (uint32_t i = 0; i < t->eos_count; i++)
        if (t->eos_ids[i] == id) return BT_OK;
    if (t->eos_count == TOKENIZER_EOS_MAX)
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "more than %d end-of-sequence ids",
                       TOKENIZER_EOS_MAX);
    t->eos_ids[t->eos_count++] = (int32_t)id;
    return BT_OK;
}

/* Marks the pieces whose own bytes merge to exactly them: encoding looks these up without merging.
 * In a trained vocabulary nearly all are such. */
static bt_status mark_whole(tokenizer *t, bt_error *error) {
    bpe_scratch scratch = {0};
    token_list list = {0};
    bt_status status = BT_OK;
    for (uint32_t id = 0; id < t->vocab_count && status == BT_OK; id++) {
        token_entry *entry = &t->entries[id];
        if ((entry->flags & TOKEN_PIECE) == 0) continue;
        list.count = 0;
        status = bpe_encode(t, &scratch, t->text + entry->offset, entry->bytes, &list);
        if (list.count == 1 && list.ids[0] == (int32_t)id) entry->flags |= TOKEN_WHOLE;
    }
    bpe_scratch_fini(&scratch);
    token_list_fini(&list);
    return status == BT_OK ? BT_OK : no_memory(error);
}

bt_status tokenizer_seal(tokenizer *t, bt_error *error) {
    if (t->unknown_id < 0)
        for (int i = 0; i < 256; i++)
            t->drops_text |= t->byte_ids[i] < 0;
    else if (t->fuses_unknown)
        t->drops_text = true;
    bt_status status = split_pattern_create(t->rule, &t->split, error);
    if (status == BT_OK) status = mark_whole(t, error);
    if (status != BT_OK) return status;
    status = tokenizer_compute_fingerprint(t);
    if (status == BT_ERR_WORKER_MEMORY) return no_memory(error);
    if (status != BT_OK) return bt_fail(error, status, "SHA-256 is not available");
    return BT_OK;
}
