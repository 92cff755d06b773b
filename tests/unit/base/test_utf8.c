/* The byte ranges of UTF-8, against every code point and every sequence of one and two bytes. */
#include "base/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

typedef struct text_case {
    const char *text;
    size_t bytes;
    size_t valid; /* of bt_utf8_valid_prefix */
} text_case;
#define TEXT(literal, valid_)                                                                      \
    { .text = (literal), .bytes = sizeof(literal) - 1, .valid = (valid_) }

static bool is_surrogate(uint32_t code_point) {
    return code_point >= 0xD800 && code_point <= 0xDFFF;
}

static void every_code_point_survives(void **state) {
    (void)state;
    for (uint32_t code_point = 0; code_point <= 0x10FFFF; code_point++) {
        if (is_surrogate(code_point)) continue;
        char text[4] = {0};
        const uint32_t bytes = bt_utf8_encode(code_point, text);
        const uint32_t want =
            1u + (code_point > 0x7F) + (code_point > 0x7FF) + (code_point > 0xFFFF);
        uint32_t back = UINT32_MAX;
        assert_int_equal(bytes, want);
        assert_int_equal(bt_utf8_sequence_bytes((uint8_t)text[0]), bytes);
        assert_int_equal(bt_utf8_next(text, bytes), bytes);
        assert_int_equal(bt_utf8_decode(text, &back), bytes);
        assert_int_equal(back, code_point);
        assert_int_equal(bt_utf8_count(text, bytes), 1);
        assert_int_equal(bt_utf8_count(text + 1, bytes - 1), 0);
        for (uint32_t cut = 0; cut < bytes; cut++)
            assert_int_equal(bt_utf8_next(text, cut), 0);
    }
}

static void every_byte_alone(void **state) {
    (void)state;
    for (unsigned byte = 0; byte < 256; byte++) {
        const char text[1] = {(char)byte};
        assert_int_equal(bt_utf8_next(text, 1), byte < 0x80 ? 1 : 0);
        assert_int_equal(bt_utf8_is_valid(text, 1), byte < 0x80);
        assert_int_equal(bt_utf8_ascii_prefix(text, 1), byte < 0x80 ? 1 : 0);
    }
}

static void every_pair_of_bytes(void **state) {
    (void)state;
    for (unsigned first = 0; first < 256; first++) {
        for (unsigned second = 0; second < 256; second++) {
            const char text[2] = {(char)first, (char)second};
            const bool is_pair = first >= 0xC2 && first <= 0xDF && second >= 0x80 && second <= 0xBF;
            size_t valid = is_pair ? 2 : 0;
            if (first < 0x80) valid = second < 0x80 ? 2 : 1;
            assert_int_equal(bt_utf8_next(text, 2), is_pair ? 2 : first < 0x80 ? 1 : 0);
            assert_int_equal(bt_utf8_valid_prefix(text, 2), valid);
            assert_int_equal(bt_utf8_is_valid(text, 2), valid == 2);
        }
    }
}

/* The second byte decides about overlong forms, surrogates and the end of the code space; behind
 * it all continuation bytes are alike. The code point that the bits would spell says which. */
static void every_start_of_longer_sequences(void **state) {
    (void)state;
    for (unsigned first = 0xE0; first < 256; first++) {
        for (unsigned second = 0; second < 256; second++) {
            const char text[4] = {(char)first, (char)second, (char)0x80, (char)0xBF};
            const bool follows = (second & 0xC0) == 0x80;
            const uint32_t code_point = first < 0xF0 ? (first & 0x0F) << 12 | (second & 0x3F) << 6
                                                     : (first & 0x07) << 18 | (second & 0x3F) << 12;
            size_t want = 0;
            if (first < 0xF0 && follows && code_point >= 0x800 && !is_surrogate(code_point))
                want = 3;
            if (first >= 0xF0 && first < 0xF8 && follows && code_point >= 0x10000 &&
                code_point <= 0x10FFFF)
                want = 4;
            assert_int_equal(bt_utf8_next(text, 4), want);
            if (want > 0) assert_int_equal(bt_utf8_next(text, want - 1), 0);
        }
    }
}

static void bad_continuations(void **state) {
    (void)state;
    const char *const wholes[] = {"\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"};
    static const unsigned char bad[] = {0x00, 0x7F, 0xC0, 0xC3, 0xE2, 0xF0, 0xFF};
    for (size_t w = 0; w < 3; w++) {
        const size_t bytes = strlen(wholes[w]);
        for (size_t at = 1; at < bytes; at++) {
            for (size_t b = 0; b < sizeof bad; b++) {
                char text[4] = {0};
                memcpy(text, wholes[w], bytes);
                text[at] = (char)bad[b];
                assert_int_equal(bt_utf8_next(text, bytes), 0);
                assert_false(bt_utf8_can_follow((uint8_t)text[0], (uint32_t)at, bad[b]));
            }
        }
    }
}

static void prefixes(void **state) {
    (void)state;
    static const text_case cases[] = {
        TEXT("", 0),
        TEXT("plain", 5),
        TEXT("a\0b", 3),
        TEXT("12345678\xC3\xA9", 10),
        TEXT("1234567\xC3\xA9"
             "abcdefgh\xFF",
             17),
        TEXT("\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 9),
        TEXT("\xEF\xBB\xBFx", 4),        /* a byte order mark is a character */
        TEXT("\xEF\xBF\xBF", 3),         /* so is a noncharacter */
        TEXT("\xC0\x80", 0),             /* overlong U+0000 */
        TEXT("\xC1\xBF", 0),             /* overlong U+007F */
        TEXT("\xE0\x9F\xBF", 0),         /* overlong U+07FF */
        TEXT("\xE0\xA0\x80", 3),         /* U+0800 */
        TEXT("\xED\x9F\xBF", 3),         /* U+D7FF */
        TEXT("\xED\xA0\x80", 0),         /* the first surrogate */
        TEXT("\xED\xBF\xBF", 0),         /* the last one */
        TEXT("\xEE\x80\x80", 3),         /* U+E000 */
        TEXT("\xF0\x8F\xBF\xBF", 0),     /* overlong U+FFFF */
        TEXT("\xF0\x90\x80\x80", 4),     /* U+10000 */
        TEXT("\xF4\x8F\xBF\xBF", 4),     /* U+10FFFF */
        TEXT("\xF4\x90\x80\x80", 0),     /* U+110000 */
        TEXT("\xF8\x88\x80\x80\x80", 0), /* five bytes */
        TEXT("ok\x80", 2),
        TEXT("ok\xC3", 2),
        TEXT("ok\xE2\x82", 2),
        TEXT("ok\xF0\x9F\x98", 2),
        TEXT("ok\xF0\x9F\x98x", 2),
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const text_case *c = &cases[i];
        assert_int_equal(bt_utf8_valid_prefix(c->text, c->bytes), c->valid);
        assert_int_equal(bt_utf8_is_valid(c->text, c->bytes), c->valid == c->bytes);
    }
}

/* Eight bytes are looked at together: a byte that is not ASCII must be seen at each place. */
static void ascii_prefix_at_every_place(void **state) {
    (void)state;
    char text[24];
    for (size_t bytes = 0; bytes <= sizeof text; bytes++) {
        for (size_t place = 0; place <= bytes; place++) {
            memset(text, 'a', sizeof text);
            if (place < bytes) text[place] = (char)0xC3;
            assert_int_equal(bt_utf8_ascii_prefix(text, bytes), place);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_point_survives),
        cmocka_unit_test(every_byte_alone),
        cmocka_unit_test(every_pair_of_bytes),
        cmocka_unit_test(every_start_of_longer_sequences),
        cmocka_unit_test(bad_continuations),
        cmocka_unit_test(prefixes),
        cmocka_unit_test(ascii_prefix_at_every_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
