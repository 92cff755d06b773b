/* Numbers as JSON text: recorded texts of orjson, and the rule itself over every exponent. */
#include "base/json_number.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"

enum { TEXT_MAX = 64 };

static uint64_t next_random(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15U;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
}

static double double_from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A block of exactly the promised room, so that a sanitizer sees what goes past it. */
static char *room_create(void) {
    char *room = bt_malloc(BT_JSON_NUMBER_ROOM);
    assert_non_null(room);
    return room;
}

static void finish(const char *room, size_t length, char text[TEXT_MAX]) {
    assert_in_range(length, 1, BT_JSON_DOUBLE_MAX);
    memcpy(text, room, length);
    text[length] = '\0';
}

static void expect_double(double value, const char *expected) {
    char text[TEXT_MAX];
    char *room = room_create();
    finish(room, bt_json_double(room, value), text);
    assert_string_equal(text, expected);
    bt_free(room);
}

static void texts_equal_the_recorded_ones(void **state) {
    (void)state;
    FILE *file = fopen("tests/vectors/float32_json.tsv", "r");
    assert_non_null(file);
    char line[128];
    size_t lines = 0;
    char *room = room_create();
    while (fgets(line, sizeof line, file) != NULL) {
        char *expected = NULL;
        const uint32_t bits = (uint32_t)strtoul(line, &expected, 16);
        assert_int_equal(*expected, '\t');
        expected[strcspn(expected, "\n")] = '\0';
        float value;
        memcpy(&value, &bits, sizeof value);
        char text[TEXT_MAX];
        finish(room, bt_json_float(room, value), text);
        assert_string_equal(text, expected + 1);
        lines++;
    }
    bt_free(room);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(lines, 1800);
}

static void forms_change_at_the_right_places(void **state) {
    (void)state;
    expect_double(0.0, "0.0");
    expect_double(-0.0, "-0.0");
    expect_double(1.0, "1.0");
    expect_double(-0.5, "-0.5");
    expect_double(0.1, "0.1");
    expect_double(1e-5, "0.00001");
    expect_double(1.5e-5, "0.000015");
    expect_double(-0.00001234499995916849, "-0.00001234499995916849");
    expect_double(9.999e-6, "9.999e-6");
    expect_double(9.999999999999999e-6, "9.999999999999999e-6");
    expect_double(1e-6, "1e-6");
    expect_double(-1.1920928955078125e-7, "-1.1920928955078125e-7");
    expect_double(1e-10, "1e-10");
    expect_double(1e15, "1000000000000000.0");
    expect_double(9999999999999998.0, "9999999999999998.0");
    expect_double(1e16, "1e16");
    expect_double(1.2e17, "1.2e17");
    expect_double(9007199254740993.0, "9007199254740992.0");
    expect_double(123456.75, "123456.75");
    expect_double(10.0, "10.0");
    expect_double(10.5, "10.5");
    expect_double(1e100, "1e100");
    expect_double(1.7976931348623157e308, "1.7976931348623157e308");
    expect_double(-2.2250738585072014e-308, "-2.2250738585072014e-308");
    expect_double(2.225073858507201e-308, "2.225073858507201e-308");
    expect_double(5e-324, "5e-324");
    expect_double(1e23, "1e23");
    expect_double(9.5e-323, "9.4e-323");
    expect_double((double)INFINITY, "null");
    expect_double(-(double)INFINITY, "null");
    expect_double((double)NAN, "null");
    expect_double(-(double)NAN, "null");
}

/* The significant digits of a text, without zeros on either side. */
static size_t significant_digits(const char *text, char digits[TEXT_MAX]) {
    size_t count = 0;
    for (const char *c = text; *c != '\0' && *c != 'e'; c++) {
        if (*c < '0' || *c > '9' || (*c == '0' && count == 0)) continue;
        digits[count++] = *c;
    }
    while (count > 0 && digits[count - 1] == '0') {
        count--;
    }
    digits[count] = '\0';
    return count;
}

/* number = [-] int frac? exp?, with a fraction or an exponent, and nothing else. */
static void check_grammar(const char *text) {
    const char *c = text + (*text == '-' ? 1 : 0);
    const size_t whole = strspn(c, "0123456789");
    assert_true(whole == 1 || (whole > 1 && *c != '0'));
    c += whole;
    assert_true(*c == '.' || *c == 'e');
    if (*c == '.') {
        const size_t fraction = strspn(c + 1, "0123456789");
        assert_true(fraction > 0);
        assert_true(c[fraction] != '0' || fraction == 1);
        c += 1 + fraction;
    }
    if (*c == 'e') {
        c += c[1] == '-' ? 2 : 1;
        const size_t exponent = strspn(c, "0123456789");
        assert_true(exponent > 0 && *c != '0');
        c += exponent;
    }
    assert_int_equal(*c, '\0');
}

/* Reads back, is no longer than the shortest that rounding the value to n digits finds, and is that
 * very one unless it is shorter. Counts the shorter ones: where a neighbour is nearer on one side,
 * n digits may do though the nearest n digits do not. */
static void check_double(char *room, double value, size_t *shorter) {
    char text[TEXT_MAX];
    finish(room, bt_json_double(room, value), text);
    check_grammar(text);
    assert_true(strtod(text, NULL) == value);
    assert_int_equal(strchr(text, 'e') == NULL, fabs(value) >= 1e-5 && fabs(value) < 1e16);
    char digits[TEXT_MAX];
    const size_t count = significant_digits(text, digits);
    assert_true(count <= 17);
    /* With one digit less, no rounding of the value reads back, */
    char trial[TEXT_MAX];
    char trial_digits[TEXT_MAX];
    if (count > 1) {
        (void)snprintf(trial, sizeof trial, "%.*e", (int)count - 2, value);
        assert_true(strtod(trial, NULL) != value);
    }
    /* and with as many, the nearest is ours. */
    (void)snprintf(trial, sizeof trial, "%.*e", (int)count - 1, value);
    if (strtod(trial, NULL) == value) {
        (void)significant_digits(trial, trial_digits);
        assert_string_equal(digits, trial_digits);
    } else {
        (*shorter)++;
    }
}

static void shortest_at_every_exponent(void **state) {
    (void)state;
    char *room = room_create();
    uint64_t random = 11;
    size_t shorter = 0;
    for (uint64_t exponent = 0; exponent < 0x7ff; exponent++) {
        const uint64_t all = 0x000fffffffffffffU;
        const uint64_t fractions[] = {
            0, 1, 2, 3, all, all - 1, all / 2, all / 2 + 1, 0x5555555555555U,
            next_random(&random) & all, next_random(&random) & all,
            /* few bits, as a widened float has */
            next_random(&random) & 0x000fffffe0000000U, next_random(&random) & 0x000ff00000000000U};
        for (size_t i = 0; i < BT_ARRAY_COUNT(fractions); i++) {
            const uint64_t bits = exponent << 52 | fractions[i];
            if (bits == 0) continue;
            size_t here = 0;
            check_double(room, double_from_bits(bits), &here);
            /* Only powers of two have a neighbour that is nearer. */
            assert_true(here == 0 || fractions[i] == 0);
            shorter += here;
        }
    }
    assert_true(shorter > 0);
    bt_free(room);
}

static void shortest_of_random_doubles(void **state) {
    (void)state;
    char *room = room_create();
    uint64_t random = 12;
    size_t shorter = 0;
    for (int i = 0; i < 60000; i++) {
        uint64_t bits = next_random(&random);
        if (i % 4 == 1) bits = (bits & ~(0x7ffULL << 52)) | (uint64_t)(1003 + i % 40) << 52;
        double value = double_from_bits(bits);
        if (i % 4 == 2) value = (double)(float)((double)(bits >> 40) * -0x1p-20);
        if (i % 4 == 3) value = (double)(bits % 100000000) / 10000.0; /* short decimals */
        if (!isfinite(value) || value == 0.0) continue;
        check_double(room, value, &shorter);
    }
    assert_int_equal(shorter, 0);
    bt_free(room);
}

static void expect_int(char *room, int64_t value) {
    char text[TEXT_MAX];
    char expected[TEXT_MAX];
    const size_t length = bt_json_int(room, value);
    assert_in_range(length, 1, BT_JSON_INT_MAX);
    memcpy(text, room, length);
    text[length] = '\0';
    (void)snprintf(expected, sizeof expected, "%lld", (long long)value);
    assert_string_equal(text, expected);
}

static void integers(void **state) {
    (void)state;
    char *room = room_create();
    expect_int(room, INT64_MIN);
    expect_int(room, INT64_MAX);
    for (int64_t power = 1; power < INT64_MAX / 10; power *= 10) {
        for (int64_t offset = -2; offset <= 2; offset++) {
            expect_int(room, power + offset);
            expect_int(room, -power + offset);
            expect_int(room, power * 5 + offset);
        }
    }
    uint64_t random = 13;
    for (int64_t i = 0; i < 60000; i++) {
        expect_int(room, i * 1667);
        expect_int(room, (int64_t)(next_random(&random) >> (i % 63)));
        expect_int(room, -(int64_t)(next_random(&random) >> (1 + i % 62)));
    }
    bt_free(room);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_equal_the_recorded_ones),
        cmocka_unit_test(forms_change_at_the_right_places),
        cmocka_unit_test(shortest_at_every_exponent),
        cmocka_unit_test(shortest_of_random_doubles),
        cmocka_unit_test(integers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
