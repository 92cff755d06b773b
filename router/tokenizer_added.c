/* Added tokens in a text: at each place the longest one, found by a trie. A special token is passed
 * over where the text is not trusted, but still taken as one match, as in the reference: no shorter
 * added token inside of it is found. */
#include <utf8proc.h>

#include "base/assert.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "router/tokenizer_internal.h"

static bt_status new_node(added_trie *trie, uint8_t byte, uint32_t sibling, uint32_t *index_out) {
    if (trie->count == trie->capacity) {
        const uint32_t capacity = trie->capacity == 0 ? 256 : trie->capacity * 2;
        added_node *nodes = bt_realloc(trie->nodes, (size_t)capacity * sizeof *nodes);
        if (nodes == NULL) return BT_ERR_WORKER_MEMORY;
        trie->nodes = nodes;
        trie->capacity = capacity;
        if (trie->count == 0) trie->nodes[trie->count++] = (added_node){.id = -1};
    }
    *index_out = trie->count;
    trie->nodes[trie->count++] = (added_node){.id = -1, .sibling = sibling, .byte = byte};
    return BT_OK;
}

static uint32_t find_child(const added_trie *trie, uint32_t node, uint8_t byte) {
    uint32_t child = trie->nodes[node].child;
    while (child != 0 && trie->nodes[child].byte != byte)
        child = trie->nodes[child].sibling;
    return child;
}

bt_status added_trie_put(added_trie *trie, const char *text, size_t bytes, int32_t id) {
    BT_ASSERT(bytes > 0);
    uint32_t node = trie->roots[(uint8_t)text[0]];
    if (node == 0) {
        const bt_status status = new_node(trie, (uint8_t)text[0], 0, &node);
        if (status != BT_OK) return status;
        trie->roots[(uint8_t)text[0]] = node;
    }
    for (size_t i = 1; i < bytes; i++) {
        uint32_t child = find_child(trie, node, (uint8_t)text[i]);
        if (child == 0) {
            const uint32_t first = trie->nodes[node].child;
            const bt_status status = new_node(trie, (uint8_t)text[i], first, &child);
            if (status != BT_OK) return status;
            trie->nodes[node].child = child;
        }
        node = child;
    }
    if (trie->nodes[node].id >= 0) return BT_ERR_REQUEST_DUPLICATE;
    trie->nodes[node].id = id;
    return BT_OK;
}

void added_trie_fini(added_trie *trie) {
    bt_free(trie->nodes);
    *trie = (added_trie){0};
}

/* The longest token that starts at `start`; 0 bytes when there is none. */
static size_t longest_at(const added_trie *trie, const char *text, size_t bytes, size_t start,
                         int32_t *id_out) {
    size_t found = 0;
    uint32_t node = trie->roots[(uint8_t)text[start]];
    for (size_t at = start + 1; node != 0; at++) {
        if (trie->nodes[node].id >= 0) {
            found = at - start;
            *id_out = trie->nodes[node].id;
        }
        if (at == bytes) break;
        node = find_child(trie, node, (uint8_t)text[at]);
    }
    return found;
}

int32_t added_trie_find(const added_trie *trie, const char *text, size_t bytes) {
    int32_t id = -1;
    if (bytes == 0 || longest_at(trie, text, bytes, 0, &id) != bytes) return -1;
    return id;
}

/* Unicode White_Space. */
static bool is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

/* A word character of UTS 18: alphabetic, mark, decimal number, connector or join control. The
 * ranges are the alphabetic symbols, which are of no letter category. */
static bool is_word(uint32_t c) {
    if (c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9)) return true;
    if ((c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
        (c >= 0x1F170 && c <= 0x1F189))
        return true;
    const int category = (int)utf8proc_category((utf8proc_int32_t)c);
    return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) ||
           category == UTF8PROC_CATEGORY_PC;
}

/* Start of the character that ends at `end` (> 0). */
static size_t before(const char *text, size_t end) {
    do {
        end--;
    } while (end > 0 && ((uint8_t)text[end] & 0xC0) == 0x80);
    return end;
}

static bool is_alone(const char *text, size_t bytes, size_t start, size_t end) {
    uint32_t c = 0;
    if (start > 0) {
        (void)bt_utf8_decode(text + before(text, start), &c);
        if (is_word(c)) return false;
    }
    if (end == bytes) return true;
    (void)bt_utf8_decode(text + end, &c);
    return !is_word(c);
}

static size_t eat_spaces_before(const char *text, size_t start, size_t floor) {
    while (start > floor) {
        uint32_t c = 0;
        const size_t previous = before(text, start);
        (void)bt_utf8_decode(text + previous, &c);
        if (!is_space(c)) break;
        start = previous;
    }
    return start;
}

static size_t eat_spaces_after(const char *text, size_t bytes, size_t end) {
    while (end < bytes) {
        uint32_t c = 0;
        const uint32_t step = bt_utf8_decode(text + end, &c);
        if (!is_space(c)) break;
        end += step;
    }
    return end;
}

added_match added_next(const tokenizer *t, const added_trie *trie, const char *text, size_t bytes,
                       bool parses_special, added_cursor *cursor) {
    while (trie->count > 0) {
        while (cursor->scan < bytes && trie->roots[(uint8_t)text[cursor->scan]] == 0)
            cursor->scan++;
        if (cursor->scan == bytes) break;
        const size_t start = cursor->scan;
        int32_t id = -1;
        const size_t length = longest_at(trie, text, bytes, start, &id);
        cursor->scan += length > 0 ? length : 1;
        if (length == 0) continue;
        const uint32_t flags = t->entries[id].flags;
        if ((flags & TOKEN_SPECIAL) != 0 && !parses_special) continue;
        size_t end = start + length;
        if ((flags & TOKEN_SINGLE) != 0 && !is_alone(text, bytes, start, end)) continue;
        /* A token whose start was eaten by the one before it is passed over. */
        if (start < cursor->floor) continue;
        added_match match = {start, end, id};
        if ((flags & TOKEN_LSTRIP) != 0)
            match.start = eat_spaces_before(text, start, cursor->floor);
        if ((flags & TOKEN_RSTRIP) != 0) match.end = eat_spaces_after(text, bytes, end);
        cursor->floor = match.end;
        return match;
    }
    return (added_match){bytes, bytes, -1};
}
