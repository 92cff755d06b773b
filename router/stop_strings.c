/* Aho-Corasick over the bytes of the stop strings: the depth of the state is the length of the
 * longest suffix that begins a string, so it is at once the search and the hold-back. The held text
 * is never stored, because it is the beginning of a string of the set. */
#include "router/stop_strings.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"

enum { ROOT = 0 };

#define NO_STRING UINT32_MAX

typedef struct stop_node {
    uint32_t child;   /* 0 = none; the root is nobody's child */
    uint32_t sibling; /* 0 = none */
    uint32_t fail;    /* the node of the longest proper suffix */
    uint32_t depth;
    uint32_t string;  /* one whose beginning this is; its text is the held text */
    uint32_t matched; /* the longest string that ends here, or NO_STRING */
    uint8_t byte;
} stop_node;

struct stop_set {
    stop_node *nodes;
    uint32_t node_count;
    stop_string *strings; /* into text */
    char *text;
    size_t bytes; /* of all this */
};

static uint32_t find_child(const stop_set *set, uint32_t node, uint8_t byte) {
    uint32_t child = set->nodes[node].child;
    while (child != 0 && set->nodes[child].byte != byte)
        child = set->nodes[child].sibling;
    return child;
}

/* The state after one more byte. Amortised over the text: a step back undoes a step forward. */
static uint32_t step(const stop_set *set, uint32_t node, uint8_t byte) {
    uint32_t next = find_child(set, node, byte);
    while (next == 0 && node != ROOT) {
        node = set->nodes[node].fail;
        next = find_child(set, node, byte);
    }
    return next;
}

static void add_string(stop_set *set, uint32_t index) {
    const stop_string *string = &set->strings[index];
    uint32_t node = ROOT;
    for (size_t i = 0; i < string->bytes; i++) {
        const uint8_t byte = (uint8_t)string->text[i];
        uint32_t child = find_child(set, node, byte);
        if (child == 0) {
            child = set->node_count++;
            set->nodes[child] = (stop_node){.sibling = set->nodes[node].child,
                                            .depth = (uint32_t)i + 1,
                                            .string = index,
                                            .matched = NO_STRING,
                                            .byte = byte};
            set->nodes[node].child = child;
        }
        node = child;
    }
    if (node != ROOT) set->nodes[node].matched = index;
}

/* Breadth first, so that the suffix of a node is done before the node; `queue` has room for all. */
static void link_suffixes(stop_set *set, uint32_t *queue) {
    uint32_t head = 0;
    uint32_t tail = 0;
    queue[tail++] = ROOT;
    while (head < tail) {
        const uint32_t node = queue[head++];
        const uint32_t fail = set->nodes[node].fail;
        for (uint32_t child = set->nodes[node].child; child != 0;
             child = set->nodes[child].sibling) {
            stop_node *to = &set->nodes[child];
            to->fail = node == ROOT ? ROOT : step(set, fail, to->byte);
            if (to->matched == NO_STRING) to->matched = set->nodes[to->fail].matched;
            queue[tail++] = child;
        }
    }
    BT_ASSERT(tail == set->node_count);
}

static bt_status copy_strings(stop_set *set, const stop_string *strings, size_t count,
                              size_t bytes) {
    set->strings = bt_calloc(count + 1, sizeof *set->strings);
    set->text = bt_malloc(bytes + 1);
    set->nodes = bt_calloc(bytes + 1, sizeof *set->nodes);
    if (set->strings == NULL || set->text == NULL || set->nodes == NULL)
        return BT_ERR_WORKER_MEMORY;
    set->bytes =
        sizeof *set + (count + 1) * sizeof *set->strings + (bytes + 1) * (1 + sizeof *set->nodes);
    char *to = set->text;
    for (size_t i = 0; i < count; i++) {
        if (strings[i].bytes > 0) memcpy(to, strings[i].text, strings[i].bytes);
        set->strings[i] = (stop_string){to, strings[i].bytes};
        to += strings[i].bytes;
    }
    return BT_OK;
}

bt_status stop_set_create(const stop_string *strings, size_t count, stop_set **out) {
    size_t bytes = 0;
    if (count > STOP_STRINGS_MAX) return BT_ERR_REQUEST_TOO_LARGE;
    for (size_t i = 0; i < count; i++) {
        if (strings[i].bytes > STOP_BYTES_MAX) return BT_ERR_REQUEST_TOO_LARGE;
        bytes += strings[i].bytes;
    }
    if (bytes > STOP_BYTES_MAX) return BT_ERR_REQUEST_TOO_LARGE;
    uint32_t *queue = bt_malloc((bytes + 1) * sizeof *queue);
    stop_set *set = bt_calloc(1, sizeof *set);
    bt_status status = BT_ERR_WORKER_MEMORY;
    if (queue == NULL || set == NULL) goto free_all;
    status = copy_strings(set, strings, count, bytes);
    if (status != BT_OK) goto free_all;
    set->nodes[ROOT].matched = NO_STRING;
    set->node_count = 1;
    for (size_t i = 0; i < count; i++)
        add_string(set, (uint32_t)i);
    link_suffixes(set, queue);
    *out = set;
    set = NULL;
free_all:
    stop_set_destroy(set);
    bt_free(queue);
    return status;
}

void stop_set_destroy(stop_set *set) {
    if (set == NULL) return;
    bt_free(set->nodes);
    bt_free(set->strings);
    bt_free(set->text);
    bt_free(set);
}

size_t stop_set_bytes(const stop_set *set) {
    return set->bytes;
}

void stop_matcher_init(stop_matcher *matcher, const stop_set *set, bool keeps_match) {
    *matcher = (stop_matcher){.set = set, .keeps_match = keeps_match};
}

size_t stop_matcher_held_bytes(const stop_matcher *matcher) {
    if (matcher->set == NULL || matcher->is_matched) return 0;
    return matcher->set->nodes[matcher->node].depth;
}

/* Emits the first `bytes` of what was held under `node` followed by `text`. */
static void emit(const stop_set *set, uint32_t node, const char *text, size_t bytes, text_sink sink,
                 void *context) {
    const stop_node *held = &set->nodes[node];
    const size_t from_held = bytes < held->depth ? bytes : held->depth;
    if (from_held > 0) sink(context, set->strings[held->string].text, from_held);
    if (bytes > from_held) sink(context, text, bytes - from_held);
}

bool stop_matcher_push(stop_matcher *matcher, const char *text, size_t bytes, text_sink sink,
                       void *context) {
    const stop_set *set = matcher->set;
    if (matcher->is_matched) return true;
    if (set == NULL) {
        if (bytes > 0) sink(context, text, bytes);
        return false;
    }
    const uint32_t first = matcher->node;
    const size_t held = set->nodes[first].depth;
    uint32_t node = first;
    for (size_t i = 0; i < bytes; i++) {
        node = step(set, node, (uint8_t)text[i]);
        const uint32_t matched = set->nodes[node].matched;
        if (matched == NO_STRING) continue;
        const size_t kept = matcher->keeps_match ? 0 : set->strings[matched].bytes;
        emit(set, first, text, held + i + 1 - kept, sink, context);
        matcher->is_matched = true;
        matcher->match_index = matched;
        return true;
    }
    matcher->node = node;
    emit(set, first, text, held + bytes - set->nodes[node].depth, sink, context);
    return false;
}

void stop_matcher_finish(stop_matcher *matcher, text_sink sink, void *context) {
    const size_t held = stop_matcher_held_bytes(matcher);
    if (held > 0) emit(matcher->set, matcher->node, NULL, held, sink, context);
    matcher->node = ROOT;
}
