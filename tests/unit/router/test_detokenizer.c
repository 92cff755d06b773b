/* Streaming detokenisation: what comes out does not depend on how the bytes were cut, and is what
 * the Unicode standard's maximal subparts give. */
#include "router/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/utf8.h"

enum { TEXT_MAX = 4096 };

typedef struct collected {
    char text[TEXT_MAX];
    size_t bytes;
    bool is_broken; /* a call of the sink was not complete UTF-8 */
} collected;

static void collect(void *context, const char *text, size_t bytes) {
    collected *to = context;
    assert_true(bytes > 0 && to->bytes + bytes <= TEXT_MAX);
    memcpy(to->text + to->bytes, text, bytes);
    to->bytes += bytes;
    if (!bt_utf8_is_valid(text, bytes)) to->is_broken = true;
}

/* Feeds the bytes in pieces whose ends are the set bits of `cuts`, repeating. */
static void run(const char *bytes, size_t count, uint64_t cuts, collected *out) {
    detokenizer d;
    detokenizer_init(&d);
    out->bytes = 0;
    out->is_broken = false;
    size_t start = 0;
    for (size_t i = 1; i <= count; i++) {
        if (i < count && ((cuts >> (i % 64)) & 1) == 0) continue;
        detokenizer_push(&d, bytes + start, i - start, collect, out);
        start = i;
    }
    detokenizer_finish(&d, collect, out);
    assert_false(out->is_broken);
}

static void assert_text(const char *bytes, const char *expected) {
    static collected whole;
    static collected cut;
    const size_t count = strlen(bytes);
    run(bytes, count, 0, &whole);
    assert_int_equal(whole.bytes, strlen(expected));
    assert_memory_equal(whole.text, expected, whole.bytes);
    for (size_t at = 1; at < count; at++) { /* one cut at every place, and all cuts */
        run(bytes, count, UINT64_C(1) << (at % 64), &cut);
        assert_int_equal(cut.bytes, whole.bytes);
        assert_memory_equal(cut.text, whole.text, whole.bytes);
    }
    run(bytes, count, UINT64_MAX, &cut);
    assert_int_equal(cut.bytes, whole.bytes);
    assert_memory_equal(cut.text, whole.text, whole.bytes);
}

#define R "\xEF\xBF\xBD"

static void valid_text_is_untouched_at_every_cut(void **state) {
    (void)state;
    static const char *const texts[] = {
        "",
        "plain",
        "na\xC3\xAFve",
        "\xE2\x82\xAC 5",
        "\xF0\x9F\x98\x80",
        "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7", /* a family */
        "\xF0\x9F\x87\xA9\xF0\x9F\x87\xAA",                                         /* a flag */
        "\xE4\xBD\xA0\xE5\xA5\xBD",
        "e\xCC\x81",
        "\xF4\x8F\xBF\xBF", /* U+10FFFF */
        "\xED\x9F\xBF\xEE\x80\x80",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        assert_text(texts[i], texts[i]);
}

static void each_maximal_subpart_is_replaced_once(void **state) {
    (void)state;
    assert_text("\x80", R);
    assert_text("a\xFFz", "a" R "z");
    assert_text("\xC0\xAF", R R);             /* overlong */
    assert_text("\xE0\x80\xAF", R R R);       /* overlong */
    assert_text("\xED\xA0\x80", R R R);       /* a surrogate */
    assert_text("\xF4\x90\x80\x80", R R R R); /* above U+10FFFF */
    assert_text("\xF0\x9F\x98", R);           /* cut short */
    assert_text("\xF0\x9F\x98"
                "A",
                R "A");
    assert_text("\xE2\x82\xE2\x82\xAC", R "\xE2\x82\xAC");
    assert_text("\xF0\x80\x80\x41", R R R "A"); /* table 3-8 of the standard */
    assert_text("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", R R R R "A");
}

static void at_most_three_bytes_are_held(void **state) {
    (void)state;
    const char *emoji = "\xF0\x9F\x98\x80";
    collected out = {0};
    detokenizer d;
    detokenizer_init(&d);
    for (size_t i = 0; i < 3; i++) {
        detokenizer_push(&d, emoji + i, 1, collect, &out);
        assert_int_equal(d.held_count, i + 1);
        assert_int_equal(out.bytes, 0);
    }
    detokenizer_push(&d, emoji + 3, 1, collect, &out);
    assert_int_equal(d.held_count, 0);
    assert_int_equal(out.bytes, 4);
}

/* A replacement goes out as soon as it is certain, not at the end. */
static void replacements_are_not_delayed(void **state) {
    (void)state;
    collected out = {0};
    detokenizer d;
    detokenizer_init(&d);
    detokenizer_push(&d,
                     "\xF0\x9F"
                     "A",
                     3, collect, &out);
    assert_int_equal(out.bytes, 4);
    assert_memory_equal(out.text, R "A", 4);
}

/* What another decoder says: one code point, or one maximal subpart, at a time. */
static size_t decode_naively(const uint8_t *bytes, size_t count, char *out) {
    size_t written = 0;
    for (size_t at = 0; at < count;) {
        const uint32_t need = bt_utf8_sequence_bytes(bytes[at]);
        size_t have = 1;
        while (have < need && at + have < count &&
               bt_utf8_can_follow(bytes[at], (uint32_t)have, bytes[at + have]))
            have++;
        const bool is_whole = need > 0 && have == need;
        memcpy(out + written, is_whole ? (const char *)bytes + at : R, is_whole ? have : 3);
        written += is_whole ? have : 3;
        at += have;
    }
    return written;
}

static void random_bytes_and_cuts(void **state) {
    (void)state;
    static const uint8_t hot[] = {0x00, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xE2,
                                  0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF, 0x90, 0x8F, 0x82};
    static char expected[TEXT_MAX];
    static collected out;
    const unsigned seed = 20261129;
    print_message("seed %u\n", seed);
    srand(seed);
    for (int round = 0; round < 20000; round++) {
        char bytes[64];
        const size_t count = (size_t)rand() % sizeof bytes;
        for (size_t i = 0; i < count; i++)
            bytes[i] = (char)(rand() % 4 == 0 ? rand() : hot[(size_t)rand() % sizeof hot]);
        const size_t wanted = decode_naively((const uint8_t *)bytes, count, expected);
        const uint64_t cuts =
            ((uint64_t)rand() << 40) ^ ((uint64_t)rand() << 20) ^ (uint64_t)rand();
        run(bytes, count, cuts, &out);
        assert_int_equal(out.bytes, wanted);
        assert_memory_equal(out.text, expected, wanted);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(valid_text_is_untouched_at_every_cut),
        cmocka_unit_test(each_maximal_subpart_is_replaced_once),
        cmocka_unit_test(at_most_three_bytes_are_held),
        cmocka_unit_test(replacements_are_not_delayed),
        cmocka_unit_test(random_bytes_and_cuts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
