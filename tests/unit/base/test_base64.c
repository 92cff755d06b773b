/* Base64: RFC 4648's vectors, every path against a character-by-character oracle at every length
 * around the vectors' steps, and portions of any size against the whole. */
#include "base/base64.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LENGTHS = 400, LONG_BYTES = 100000 };

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void fill(uint8_t *data, size_t bytes, uint32_t seed) {
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)next_random(&seed);
}

/* Bit by bit, from the definition. */
static char *oracle(const uint8_t *data, size_t bytes) {
    static const char letters[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t length = bt_base64_length(bytes);
    char *text = malloc(length + 1);
    assert_non_null(text);
    memset(text, '=', length);
    text[length] = 0;
    for (size_t first = 0; first < bytes * 8; first += 6) {
        unsigned value = 0;
        for (size_t bit = first; bit < first + 6; bit++)
            value =
                value * 2 + (bit < bytes * 8 ? (unsigned)data[bit / 8] >> (7 - bit % 8) & 1u : 0u);
        text[first / 6] = letters[value];
    }
    return text;
}

/* Blocks of their own sizes, so that a sanitizer sees what is read or written beyond them. */
static void expect(bt_base64_path path, const uint8_t *data, size_t bytes) {
    char *expected = oracle(data, bytes);
    uint8_t *copy = malloc(bytes > 0 ? bytes : 1);
    char *text = malloc(bt_base64_length(bytes) + 1);
    assert_non_null(copy);
    assert_non_null(text);
    memcpy(copy, data, bytes);
    text[bt_base64_length(bytes)] = '!';
    assert_true(bt_base64_by(path, text, copy, bytes));
    assert_memory_equal(text, expected, strlen(expected));
    assert_int_equal(text[bt_base64_length(bytes)], '!');
    free(text);
    free(copy);
    free(expected);
}

static void rfc_vectors(void **state) {
    (void)state;
    static const char *const pairs[][2] = {{"", ""},
                                           {"f", "Zg=="},
                                           {"fo", "Zm8="},
                                           {"foo", "Zm9v"},
                                           {"foob", "Zm9vYg=="},
                                           {"fooba", "Zm9vYmE="},
                                           {"foobar", "Zm9vYmFy"}};
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        char text[16] = {0};
        assert_int_equal(bt_base64(text, pairs[i][0], strlen(pairs[i][0])), strlen(pairs[i][1]));
        assert_string_equal(text, pairs[i][1]);
    }
    assert_int_equal(bt_base64(NULL, NULL, 0), 0);
}

static void check_path(bt_base64_path path, const char *name) {
    static uint8_t data[LONG_BYTES];
    char probe[4];
    fill(data, sizeof(data), 7);
    if (!bt_base64_by(path, probe, "abc", 3)) {
        print_message("%s is not on this machine\n", name);
        skip();
    }
    for (size_t bytes = 0; bytes < LENGTHS; bytes++)
        expect(path, data + bytes % 5, bytes);
    expect(path, data, sizeof(data));
    /* Each character in each place. */
    for (unsigned value = 0; value < 64; value++) {
        uint8_t same[96];
        for (size_t i = 0; i < sizeof(same); i += 3) {
            same[i] = (uint8_t)(value << 2 | value >> 4);
            same[i + 1] = (uint8_t)(value << 4 | value >> 2);
            same[i + 2] = (uint8_t)(value << 6 | value);
        }
        expect(path, same, sizeof(same));
    }
}

static void the_plain_path(void **state) {
    (void)state;
    check_path(BT_BASE64_PLAIN, "the plain path");
}

#if !defined(__aarch64__)
static void the_avx2_path(void **state) {
    (void)state;
    check_path(BT_BASE64_AVX2, "AVX2");
}

static void the_avx512_path(void **state) {
    (void)state;
    check_path(BT_BASE64_AVX512, "AVX-512 VBMI");
}
#endif

#if defined(__aarch64__)
static void the_neon_path(void **state) {
    (void)state;
    check_path(BT_BASE64_NEON, "NEON");
}
#endif

/* Portions from 0 bytes on: what they give together is the text of the whole. */
static void portions(void **state) {
    (void)state;
    static uint8_t data[5000];
    uint32_t random = 3;
    fill(data, sizeof(data), 11);
    for (unsigned round = 0; round < 300; round++) {
        const size_t bytes = next_random(&random) % sizeof(data);
        const uint32_t largest = round % 3 == 0 ? 4 : round % 3 == 1 ? 40 : 2000;
        char *expected = oracle(data, bytes);
        char *text = malloc(bt_base64_length(bytes) + 1);
        bt_base64_stream stream = {0};
        size_t used = 0;
        assert_non_null(text);
        for (size_t at = 0; at < bytes;) {
            size_t now = next_random(&random) % (largest + 1);
            if (now > bytes - at) now = bytes - at;
            char *room = malloc(bt_base64_length(now) + 1);
            assert_non_null(room);
            const size_t length = bt_base64_push(&stream, room, data + at, now);
            assert_true(length <= bt_base64_length(now));
            memcpy(text + used, room, length);
            free(room);
            used += length;
            at += now;
        }
        used += bt_base64_finish(&stream, text + used);
        assert_int_equal(used, strlen(expected));
        assert_memory_equal(text, expected, used);
        assert_int_equal(bt_base64_finish(&stream, text), 0);
        free(text);
        free(expected);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rfc_vectors),
        cmocka_unit_test(the_plain_path),
#if defined(__aarch64__)
        cmocka_unit_test(the_neon_path),
#else
        cmocka_unit_test(the_avx2_path),
        cmocka_unit_test(the_avx512_path),
#endif
        cmocka_unit_test(portions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
