/* Byte-pair merging of one piece: again and again the neighbours with the lowest rank, the leftmost
 * first, become one token. Short pieces scan an array of ranks; long ones keep a linked list and a
 * heap, so that a word of a megabyte costs n log n and not n^2. Both give the same tokens. */
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/tokenizer_internal.h"

/* Up to here the scan is faster than the heap (measured with bench_tokenizer). */
enum { SHORT_PIECE_MAX = 64 };

#define NO_RANK   UINT32_MAX
#define NO_SYMBOL UINT32_MAX

void bpe_scratch_fini(bpe_scratch *scratch) {
    bt_free(scratch->symbols);
    bt_free(scratch->heap);
    *scratch = (bpe_scratch){0};
}

/* The ids of the piece's bytes. A byte that the vocabulary lacks is the unknown token (one for a
 * run of them when they are fused), or nothing. Returns their count, at most `bytes`. */
static size_t byte_symbols(const tokenizer *t, const char *piece, size_t bytes, int32_t *ids,
                           size_t stride) {
    size_t count = 0;
    bool was_unknown = false;
    for (size_t i = 0; i < bytes; i++) {
        int32_t id = t->byte_ids[(uint8_t)piece[i]];
        const bool is_unknown = id < 0;
        if (is_unknown) id = t->fuses_unknown && was_unknown ? -1 : t->unknown_id;
        was_unknown = is_unknown;
        if (id >= 0) ids[stride * count++] = id;
    }
    return count;
}

static void load_merge(const tokenizer *t, const int32_t *ids, uint32_t *ranks, int32_t *merged,
                       size_t index) {
    const merge_slot *merge = tokenizer_find_merge(t, ids[index], ids[index + 1]);
    ranks[index] = merge == NULL ? NO_RANK : merge->rank;
    merged[index] = merge == NULL ? -1 : merge->id;
}

static size_t lowest_rank(const uint32_t *ranks, size_t count) {
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (ranks[i] < ranks[best]) best = i;
    return best;
}

static bt_status encode_short(const tokenizer *t, const char *piece, size_t bytes,
                              token_list *list) {
    int32_t ids[SHORT_PIECE_MAX];
    int32_t merged[SHORT_PIECE_MAX];
    uint32_t ranks[SHORT_PIECE_MAX];
    size_t count = byte_symbols(t, piece, bytes, ids, 1);
    for (size_t i = 0; i + 1 < count; i++)
        load_merge(t, ids, ranks, merged, i);
    while (count > 1) {
        const size_t best = lowest_rank(ranks, count - 1);
        if (ranks[best] == NO_RANK) break;
        ids[best] = merged[best];
        count--;
        memmove(ids + best + 1, ids + best + 2, (count - best - 1) * sizeof *ids);
        memmove(ranks + best, ranks + best + 1, (count - best) * sizeof *ranks);
        memmove(merged + best, merged + best + 1, (count - best) * sizeof *merged);
        if (best > 0) load_merge(t, ids, ranks, merged, best - 1);
        if (best + 1 < count) load_merge(t, ids, ranks, merged, best);
    }
    bt_status status = BT_OK;
    for (size_t i = 0; i < count && status == BT_OK; i++)
        status = token_list_append(list, ids[i]);
    return status;
}

/* Room for a piece: each merge puts at most two new pairs on the heap and takes one off. */
static bt_status reserve(bpe_scratch *scratch, size_t bytes) {
    if (bytes <= scratch->symbol_capacity) return BT_OK;
    bpe_scratch_fini(scratch);
    scratch->symbols = bt_malloc(bytes * sizeof *scratch->symbols);
    scratch->heap = bt_malloc(2 * bytes * sizeof *scratch->heap);
    if (scratch->symbols == NULL || scratch->heap == NULL) {
        bpe_scratch_fini(scratch);
        return BT_ERR_WORKER_MEMORY;
    }
    scratch->symbol_capacity = bytes;
    scratch->heap_capacity = 2 * bytes;
    return BT_OK;
}

static void heap_push(bpe_scratch *scratch, uint64_t key) {
    BT_ASSERT(scratch->heap_count < scratch->heap_capacity);
    uint64_t *heap = scratch->heap;
    size_t at = scratch->heap_count++;
    while (at > 0 && heap[(at - 1) / 2] > key) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = key;
}

static uint64_t heap_pop(bpe_scratch *scratch) {
    uint64_t *heap = scratch->heap;
    const uint64_t top = heap[0];
    const size_t count = --scratch->heap_count;
    const uint64_t key = heap[count];
    size_t at = 0;
    for (size_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = key;
    return top;
}

/* Puts the pair that starts at symbol `left` on the heap, if there is a merge for it. */
static void push_pair(const tokenizer *t, bpe_scratch *scratch, uint32_t left) {
    if (left == NO_SYMBOL) return;
    const uint32_t right = scratch->symbols[left].next;
    if (right == NO_SYMBOL) return;
    const merge_slot *merge =
        tokenizer_find_merge(t, scratch->symbols[left].id, scratch->symbols[right].id);
    if (merge != NULL) heap_push(scratch, ((uint64_t)merge->rank << 32) | left);
}

/* Does the merge that the heap named, unless its pair has changed since. */
static void apply(const tokenizer *t, bpe_scratch *scratch, uint64_t key) {
    bpe_symbol *symbols = scratch->symbols;
    const uint32_t at = (uint32_t)key;
    bpe_symbol *left = &symbols[at];
    if (left->id < 0 || left->next == NO_SYMBOL) return;
    bpe_symbol *right = &symbols[left->next];
    const merge_slot *merge = tokenizer_find_merge(t, left->id, right->id);
    if (merge == NULL || merge->rank != (uint32_t)(key >> 32)) return;
    left->id = merge->id;
    left->next = right->next;
    right->id = -1;
    if (left->next != NO_SYMBOL) symbols[left->next].previous = at;
    push_pair(t, scratch, left->previous);
    push_pair(t, scratch, at);
}

static bt_status encode_long(const tokenizer *t, bpe_scratch *scratch, const char *piece,
                             size_t bytes, token_list *list) {
    bt_status status = reserve(scratch, bytes);
    if (status != BT_OK) return status;
    bpe_symbol *symbols = scratch->symbols;
    const size_t stride = sizeof *symbols / sizeof symbols->id;
    const uint32_t count = (uint32_t)byte_symbols(t, piece, bytes, &symbols->id, stride);
    for (uint32_t i = 0; i < count; i++) {
        symbols[i].previous = i == 0 ? NO_SYMBOL : i - 1;
        symbols[i].next = i + 1 == count ? NO_SYMBOL : i + 1;
    }
    scratch->heap_count = 0;
    for (uint32_t i = 0; i < count; i++)
        push_pair(t, scratch, i);
    while (scratch->heap_count > 0)
        apply(t, scratch, heap_pop(scratch));
    for (uint32_t i = count == 0 ? NO_SYMBOL : 0; i != NO_SYMBOL && status == BT_OK;
         i = symbols[i].next)
        status = token_list_append(list, symbols[i].id);
    return status;
}

bt_status bpe_encode(const tokenizer *t, bpe_scratch *scratch, const char *piece, size_t bytes,
                     token_list *list) {
    BT_ASSERT(bytes > 0);
    if (bytes > TOKENIZER_PIECE_BYTES_MAX) return BT_ERR_REQUEST_TOO_LARGE;
    const int32_t id = tokenizer_find_piece(t, piece, bytes);
    if (id >= 0 && (t->ignores_merges || (t->entries[id].flags & TOKEN_WHOLE) != 0))
        return token_list_append(list, id);
    if (bytes <= SHORT_PIECE_MAX) return encode_short(t, piece, bytes, list);
    return encode_long(t, scratch, piece, bytes, list);
}
