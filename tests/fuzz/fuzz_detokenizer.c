/* Bytes of any kind, cut anywhere, through the detokeniser and the stop matcher: the text is valid
 * UTF-8, and neither it nor the match depends on the cuts. The first 8 bytes are the cuts, the next
 * gives the length of the stop string, which follows; the rest are the tokens' bytes. */
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "router/stop_strings.h"
#include "tests/fuzz/fuzz.h"

typedef struct stream {
    stop_matcher matcher;
    char *text; /* what came through the matcher */
    size_t bytes;
    size_t capacity;
} stream;

static void keep(void *context, const char *text, size_t bytes) {
    stream *s = context;
    BT_ASSERT(bytes > 0 && bytes <= s->capacity - s->bytes);
    memcpy(s->text + s->bytes, text, bytes);
    s->bytes += bytes;
}

static void match(void *context, const char *text, size_t bytes) {
    stream *s = context;
    BT_ASSERT(bytes > 0);
    BT_ASSERT(bt_utf8_is_valid(text, bytes));
    (void)stop_matcher_push(&s->matcher, text, bytes, keep, s);
}

static void run(stream *s, const stop_set *set, const char *bytes, size_t count, uint64_t cuts) {
    detokenizer d;
    detokenizer_init(&d);
    stop_matcher_init(&s->matcher, set, false);
    s->bytes = 0;
    size_t start = 0;
    for (size_t i = 1; i <= count; i++) {
        if (i < count && ((cuts >> (i % 64)) & 1) == 0) continue;
        detokenizer_push(&d, bytes + start, i - start, match, s);
        BT_ASSERT(d.held_count <= 3);
        start = i;
    }
    detokenizer_finish(&d, match, s);
    BT_ASSERT(d.held_count == 0);
    stop_matcher_finish(&s->matcher, keep, s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint64_t cuts = 0;
    if (bytes < 10) return 0;
    memcpy(&cuts, data, sizeof cuts);
    const size_t stop_bytes = data[8] % (bytes - 9);
    const stop_string stop = {(const char *)data + 9, stop_bytes};
    const char *text = (const char *)data + 9 + stop_bytes;
    const size_t count = bytes - 9 - stop_bytes;
    stop_set *set = NULL;
    BT_ASSERT(stop_set_create(&stop, 1, &set) == BT_OK);
    /* A byte gives at most one replacement character. */
    stream cut = {.text = bt_malloc(3 * count), .capacity = 3 * count};
    stream whole = {.text = bt_malloc(3 * count), .capacity = 3 * count};
    BT_ASSERT(cut.text != NULL && whole.text != NULL);
    run(&cut, set, text, count, cuts);
    run(&whole, set, text, count, 0);
    BT_ASSERT(cut.bytes == whole.bytes);
    BT_ASSERT(memcmp(cut.text, whole.text, cut.bytes) == 0);
    BT_ASSERT(cut.matcher.is_matched == whole.matcher.is_matched);
    BT_ASSERT(stop_bytes == 0 || memmem(cut.text, cut.bytes, stop.text, stop_bytes) == NULL);
    bt_free(cut.text);
    bt_free(whole.text);
    stop_set_destroy(set);
    return 0;
}
