/* The stop matcher against a search over the whole text, however the text is cut. */
#include "router/stop_strings.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TEXT_MAX = 512, STRINGS_MAX = 6 };

typedef struct collected {
    char text[TEXT_MAX];
    size_t bytes;
} collected;

static void collect(void *context, const char *text, size_t bytes) {
    collected *to = context;
    assert_true(bytes > 0 && to->bytes + bytes <= TEXT_MAX);
    memcpy(to->text + to->bytes, text, bytes);
    to->bytes += bytes;
}

static bool ends_with(const char *text, size_t bytes, const stop_string *stop) {
    return stop->bytes > 0 && stop->bytes <= bytes &&
           memcmp(text + bytes - stop->bytes, stop->text, stop->bytes) == 0;
}

/* The first end of a match, and there the longest string: its index, or -1. */
static int find_naively(const char *text, size_t bytes, const stop_string *stops, size_t count,
                        size_t *end_out) {
    for (size_t end = 1; end <= bytes; end++) {
        int best = -1;
        for (size_t i = 0; i < count; i++)
            if (ends_with(text, end, &stops[i]) && (best < 0 || stops[i].bytes > stops[best].bytes))
                best = (int)i;
        *end_out = end;
        if (best >= 0) return best;
    }
    return -1;
}

/* Bytes of the longest suffix that is a proper beginning of a string. */
static size_t held_naively(const char *text, size_t bytes, const stop_string *stops, size_t count) {
    for (size_t held = bytes; held > 0; held--)
        for (size_t i = 0; i < count; i++)
            if (held < stops[i].bytes && memcmp(text + bytes - held, stops[i].text, held) == 0)
                return held;
    return 0;
}

/* One run with pieces of random lengths (at most `piece_max`), checked after every piece. */
static void check(const char *text, size_t bytes, const stop_string *stops, size_t count,
                  bool keeps_match, size_t piece_max) {
    stop_set *set = NULL;
    stop_matcher matcher;
    collected out = {0};
    size_t end = 0;
    const int wanted = find_naively(text, bytes, stops, count, &end);
    assert_int_equal(stop_set_create(stops, count, &set), BT_OK);
    stop_matcher_init(&matcher, set, keeps_match);
    for (size_t at = 0; at < bytes;) {
        size_t step = 1 + (size_t)rand() % piece_max;
        if (step > bytes - at) step = bytes - at;
        const bool matched = stop_matcher_push(&matcher, text + at, step, collect, &out);
        at += step;
        assert_int_equal(matched, wanted >= 0 && at >= end);
        if (matched) continue;
        const size_t held = held_naively(text, at, stops, count);
        assert_int_equal(stop_matcher_held_bytes(&matcher), held);
        assert_int_equal(out.bytes, at - held);
    }
    stop_matcher_finish(&matcher, collect, &out);
    const size_t cut = wanted >= 0 && !keeps_match ? stops[wanted].bytes : 0;
    assert_int_equal(out.bytes, wanted >= 0 ? end - cut : bytes);
    assert_memory_equal(out.text, text, out.bytes);
    if (wanted >= 0) {
        assert_int_equal(stops[matcher.match_index].bytes, stops[wanted].bytes);
        assert_memory_equal(stops[matcher.match_index].text, stops[wanted].text,
                            stops[wanted].bytes);
    }
    stop_set_destroy(set);
}

static void random_strings_and_cuts(void **state) {
    (void)state;
    const unsigned seed = 20261129;
    print_message("seed %u\n", seed);
    srand(seed);
    for (int round = 0; round < 30000; round++) {
        char text[60];
        char letters[STRINGS_MAX][8];
        stop_string stops[STRINGS_MAX];
        const size_t bytes = (size_t)rand() % sizeof text;
        const size_t count = (size_t)rand() % STRINGS_MAX;
        const int alphabet = 2 + rand() % 2;
        for (size_t i = 0; i < bytes; i++)
            text[i] = (char)('a' + rand() % alphabet);
        for (size_t i = 0; i < count; i++) {
            stops[i] = (stop_string){letters[i], (size_t)rand() % sizeof letters[i]};
            for (size_t k = 0; k < stops[i].bytes; k++)
                letters[i][k] = (char)('a' + rand() % alphabet);
        }
        check(text, bytes, stops, count, rand() % 2 == 0, 1 + (size_t)rand() % 9);
    }
}

static void known_cases(void **state) {
    (void)state;
    static const struct {
        const char *text;
        const char *stops[3];
        const char *trimmed;
        const char *kept;
    } cases[] = {
        {"one\n\nUser: hi", {"\n\nUser:"}, "one", "one\n\nUser:"},
        {"abab", {"abc"}, "abab", "abab"}, /* released at the end */
        {"xabcd", {"abcd", "c"}, "xab", "xabc"},
        {"xabc", {"c", "abc", "bc"}, "x", "xabc"}, /* of those that end together, the longest */
        {"text", {""}, "text", "text"},
        {"\xF0\x9F\x98\x80\xF0\x9F\x98\x81!",
         {"\xF0\x9F\x98\x81"},
         "\xF0\x9F\x98\x80",
         "\xF0\x9F\x98\x80\xF0\x9F\x98\x81"},
        {"END", {"END"}, "", "END"},
        {"", {"END"}, "", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        stop_string stops[3];
        size_t count = 0;
        for (; count < 3 && cases[i].stops[count] != NULL; count++)
            stops[count] = (stop_string){cases[i].stops[count], strlen(cases[i].stops[count])};
        const size_t bytes = strlen(cases[i].text);
        for (size_t piece = 1; piece <= 4; piece++) {
            check(cases[i].text, bytes, stops, count, false, piece);
            check(cases[i].text, bytes, stops, count, true, piece);
        }
        stop_set *set = NULL;
        assert_int_equal(stop_set_create(stops, count, &set), BT_OK);
        for (int keeps = 0; keeps < 2; keeps++) {
            stop_matcher matcher;
            collected out = {0};
            stop_matcher_init(&matcher, set, keeps == 1);
            (void)stop_matcher_push(&matcher, cases[i].text, bytes, collect, &out);
            stop_matcher_finish(&matcher, collect, &out);
            const char *wanted = keeps == 1 ? cases[i].kept : cases[i].trimmed;
            assert_int_equal(out.bytes, strlen(wanted));
            assert_memory_equal(out.text, wanted, out.bytes);
        }
        stop_set_destroy(set);
    }
}

static void every_byte_boundary_of_every_string(void **state) {
    (void)state;
    static const stop_string stops[] = {
        {"<|im_end|>", 10}, {"\xE2\x82\xAC\xF0\x9F\x98\x80", 7}, {"\n\n", 2}};
    for (size_t i = 0; i < 3; i++)
        for (size_t cut = 0; cut <= stops[i].bytes; cut++) {
            stop_set *set = NULL;
            stop_matcher matcher;
            collected out = {0};
            assert_int_equal(stop_set_create(stops, 3, &set), BT_OK);
            stop_matcher_init(&matcher, set, false);
            assert_false(stop_matcher_push(&matcher, "ok", 2, collect, &out));
            const bool early = stop_matcher_push(&matcher, stops[i].text, cut, collect, &out);
            assert_int_equal(early, cut == stops[i].bytes);
            assert_true(stop_matcher_push(&matcher, stops[i].text + cut, stops[i].bytes - cut,
                                          collect, &out));
            assert_true(stop_matcher_push(&matcher, "dropped", 7, collect, &out));
            stop_matcher_finish(&matcher, collect, &out);
            assert_int_equal(out.bytes, 2);
            assert_int_equal(matcher.match_index, i);
            stop_set_destroy(set);
        }
}

static void no_set_passes_everything(void **state) {
    (void)state;
    stop_matcher matcher;
    collected out = {0};
    stop_matcher_init(&matcher, NULL, false);
    assert_false(stop_matcher_push(&matcher, "abc", 3, collect, &out));
    assert_int_equal(out.bytes, 3);
    assert_int_equal(stop_matcher_held_bytes(&matcher), 0);
    stop_matcher_finish(&matcher, collect, &out);
    assert_int_equal(out.bytes, 3);
}

static void limits_are_refused(void **state) {
    (void)state;
    static char long_text[STOP_BYTES_MAX + 1];
    static stop_string many[STOP_STRINGS_MAX + 1];
    stop_set *set = NULL;
    memset(long_text, 'x', sizeof long_text);
    for (size_t i = 0; i < STOP_STRINGS_MAX + 1; i++)
        many[i] = (stop_string){"a", 1};
    assert_int_equal(stop_set_create(many, STOP_STRINGS_MAX + 1, &set), BT_ERR_REQUEST_TOO_LARGE);
    const stop_string one = {long_text, sizeof long_text};
    assert_int_equal(stop_set_create(&one, 1, &set), BT_ERR_REQUEST_TOO_LARGE);
    const stop_string halves[] = {{long_text, STOP_BYTES_MAX}, {"y", 1}};
    assert_int_equal(stop_set_create(halves, 2, &set), BT_ERR_REQUEST_TOO_LARGE);
    assert_null(set);
    assert_int_equal(stop_set_create(many, STOP_STRINGS_MAX, &set), BT_OK);
    stop_set_destroy(set);
    stop_set_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_cases),
        cmocka_unit_test(every_byte_boundary_of_every_string),
        cmocka_unit_test(random_strings_and_cuts),
        cmocka_unit_test(no_set_passes_everything),
        cmocka_unit_test(limits_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
