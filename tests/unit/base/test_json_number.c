/* Numbers as JSON text: recorded texts of orjson, and the rule itself over every exponent; floats
 * also against digests of the texts that Python makes. With --all every float there is: that its
 * text is the double's, made in another way, and reads back. */
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

/* Lines `bits TAB text`, and perhaps more behind another tab. Returns their number. */
static size_t compare_recorded(FILE *file) {
    char line[128];
    size_t lines = 0;
    char *room = room_create();
    while (fgets(line, sizeof line, file) != NULL) {
        char *expected = NULL;
        const uint32_t bits = (uint32_t)strtoul(line, &expected, 16);
        assert_int_equal(*expected, '\t');
        expected++;
        expected[strcspn(expected, "\t\n")] = '\0';
        float value;
        memcpy(&value, &bits, sizeof value);
        char text[TEXT_MAX];
        finish(room, bt_json_float(room, value), text);
        assert_string_equal(text, expected);
        lines++;
    }
    bt_free(room);
    assert_int_equal(fclose(file), 0);
    return lines;
}

static void texts_equal_the_recorded_ones(void **state) {
    (void)state;
    FILE *file = fopen("tests/vectors/float32_json.tsv", "r");
    assert_non_null(file);
    assert_int_equal(compare_recorded(file), 1800);
}

/* The reference's own list, of which the recorded one is a part; NULL where it is not. */
static FILE *open_shared(void) {
    const char *folder = getenv("BATON_SHARED_TESTDATA");
    char path[4096];
    if (folder == NULL) return NULL;
    (void)snprintf(path, sizeof path, "%s/float32_json_vectors.tsv", folder);
    return fopen(path, "r");
}

static void texts_equal_the_shared_ones(void **state) {
    assert_true(compare_recorded(*state) >= 10000);
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

/* ---- floats ---------------------------------------------------------------------------------- */

enum { PORTION = 512 };

static float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* CRC-32 as zlib has it. */
static uint32_t add_crc(uint32_t crc, const char *bytes, size_t count) {
    static uint32_t table[256];
    if (table[1] == 0)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t x = i;
            for (int bit = 0; bit < 8; bit++)
                x = (x >> 1) ^ (0xedb88320U & (0U - (x & 1U)));
            table[i] = x;
        }
    crc = ~crc;
    for (size_t i = 0; i < count; i++)
        crc = (crc >> 8) ^ table[(crc ^ (unsigned char)bytes[i]) & 255U];
    return ~crc;
}

static uint32_t crc_of_block(char *room, uint32_t first, uint32_t stride, size_t count) {
    float values[PORTION];
    uint32_t crc = 0;
    for (size_t done = 0; done < count; done += PORTION) {
        const size_t part = count - done < PORTION ? count - done : PORTION;
        for (size_t i = 0; i < part; i++)
            values[i] = float_from_bits(first + (uint32_t)(done + i) * stride);
        size_t length = bt_json_floats(room, values, part);
        assert_in_range(length, 1, bt_json_floats_room(part));
        room[length++] = ',';
        crc = add_crc(crc, room, length);
    }
    return crc;
}

static void floats_equal_the_recorded_digests(void **state) {
    (void)state;
    assert_int_equal(add_crc(0, "123456789", 9), 0xcbf43926U);
    FILE *file = fopen("tests/vectors/json_float_digests.txt", "r");
    assert_non_null(file);
    char *room = bt_malloc(bt_json_floats_room(PORTION));
    assert_non_null(room);
    char line[128];
    size_t floats = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        char name[16];
        unsigned first, stride, expected;
        size_t count;
        assert_int_equal(
            sscanf(line, "%15s %x %u %zu %x", name, &first, &stride, &count, &expected), 5);
        if (crc_of_block(room, first, stride, count) != expected) fail_msg("block %s", line);
        floats += count;
    }
    bt_free(room);
    assert_int_equal(fclose(file), 0);
    assert_true(floats > 6000000);
}

/* A list is its numbers with commas, in exactly the promised room, whatever they are. */
static void lists_are_their_numbers(void **state) {
    (void)state;
    uint64_t random = 14;
    char *expected = bt_malloc(bt_json_floats_room(PORTION));
    assert_non_null(expected);
    for (size_t count = 0; count < PORTION; count = count < 20 ? count + 1 : count * 2 + 1) {
        float floats[PORTION];
        int32_t ints[PORTION];
        size_t length = 0;
        for (size_t i = 0; i < count; i++) {
            floats[i] = float_from_bits((uint32_t)next_random(&random));
            if (i % 2 == 0) floats[i] = -(float)(next_random(&random) % 1000000) * 2e-5F;
            length += bt_json_double(expected + length, (double)floats[i]);
            expected[length++] = ',';
        }
        char *room = bt_malloc(bt_json_floats_room(count));
        assert_non_null(room);
        assert_int_equal(bt_json_floats(room, floats, count), length - (count > 0));
        assert_memory_equal(room, expected, length - (count > 0));
        bt_free(room);

        length = 0;
        for (size_t i = 0; i < count; i++) {
            ints[i] = (int32_t)(uint32_t)next_random(&random) >> (i % 32);
            length += (size_t)snprintf(expected + length, TEXT_MAX, "%d,", ints[i]);
        }
        room = bt_malloc(bt_json_ints_room(count));
        assert_non_null(room);
        assert_int_equal(bt_json_ints(room, ints, count), length - (count > 0));
        assert_memory_equal(room, expected, length - (count > 0));
        bt_free(room);
    }
    bt_free(expected);
}

/* Where another way of writing begins, of the lists too: alone among numbers of the usual kind, in
 * each place of four. */
static void lists_around_their_limits(void **state) {
    (void)state;
    static const float float_limits[] = {1e-5F, 0.5F,  1.0F,  2.0F,  4.0F,   8.0F,
                                         10.0F, 16.0F, 32.0F, 64.0F, 100.0F, 128.0F};
    static const int32_t int_limits[] = {0, 10, 100, 1000, 10000, 100000, 1000000, 100000000};
    enum { COUNT = 9 };
    char *room = bt_malloc(bt_json_floats_room(COUNT));
    assert_non_null(room);
    for (uint32_t i = 0; i < BT_ARRAY_COUNT(float_limits) * 7 * COUNT; i++) {
        float floats[COUNT] = {-0.75F, -1.1F, -3.3F, -7.7F, -9.1F, -20.2F, -40.4F, -70.7F, -99.9F};
        char expected[COUNT * TEXT_MAX];
        uint32_t bits;
        size_t length = 0;
        memcpy(&bits, &float_limits[i / COUNT / 7], sizeof bits);
        floats[i % COUNT] = -float_from_bits(bits - 3 + i / COUNT % 7);
        for (size_t k = 0; k < COUNT; k++) {
            length += bt_json_double(expected + length, (double)floats[k]);
            expected[length++] = ',';
        }
        assert_int_equal(bt_json_floats(room, floats, COUNT), length - 1);
        assert_memory_equal(room, expected, length - 1);
    }
    for (size_t i = 0; i < BT_ARRAY_COUNT(int_limits) * 5; i++) {
        const int32_t ints[] = {4321, int_limits[i / 5] - 2 + (int32_t)(i % 5), 151935};
        char expected[3 * TEXT_MAX];
        const int length =
            snprintf(expected, sizeof expected, "%d,%d,%d", ints[0], ints[1], ints[2]);
        assert_int_equal(bt_json_ints(room, ints, 3), length);
        assert_memory_equal(room, expected, (size_t)length);
    }
    bt_free(room);
}

/* Nothing but the longest texts. */
static void lists_of_the_longest(void **state) {
    (void)state;
    char *room = bt_malloc(bt_json_floats_room(3));
    assert_non_null(room);
    const float floats[] = {-1.1234567e-5F, -1.2345678e-5F, -1.4567e-5F};
    assert_int_equal(bt_json_floats(room, floats, 3), 3 * BT_JSON_DOUBLE_MAX + 2);
    bt_free(room);
    room = bt_malloc(bt_json_ints_room(2));
    assert_non_null(room);
    const int32_t ints[] = {INT32_MIN, INT32_MIN};
    assert_int_equal(bt_json_ints(room, ints, 2), 2 * BT_JSON_INT32_MAX + 1);
    assert_memory_equal(room, "-2147483648,-2147483648", 23);
    bt_free(room);
}

/* Texts of a float of either sign, by the way of floats and by that of doubles. */
static void check_float(char *room, uint32_t bits, bool reads_back) {
    char *other = room + BT_JSON_NUMBER_ROOM;
    const float value = float_from_bits(bits);
    const size_t length = bt_json_float(room, value);
    if (bt_json_double(other, (double)value) != length || memcmp(room, other, length) != 0)
        fail_msg("bits %08x: %.*s", bits, (int)length, room);
    if (reads_back && isfinite(value)) {
        room[length] = '\0';
        if (strtod(room, NULL) != (double)value) fail_msg("bits %08x: %s", bits, room);
    }
    assert_int_equal(bt_json_float(other, -value), length + (isfinite(value) ? 1 : 0));
    if (isfinite(value)) {
        assert_int_equal(other[0], '-');
        assert_memory_equal(other + 1, room, length);
    }
}

static void floats_of_every_binade_are_their_doubles(void **state) {
    (void)state;
    char *room = bt_malloc(2 * BT_JSON_NUMBER_ROOM);
    assert_non_null(room);
    uint64_t random = 15;
    for (uint32_t exponent = 0; exponent < 256; exponent++)
        for (uint32_t i = 0; i < 600; i++) {
            uint32_t fraction = i < 100 ? i : 0x7fffffU - (i - 100);
            if (i >= 200) fraction = (uint32_t)next_random(&random) & 0x7fffffU;
            check_float(room, exponent << 23 | fraction, i % 8 == 0);
        }
    bt_free(room);
}

/* The texts of these floats, with a comma behind each, by lists and one by one. */
static void check_block(char *list, char *single, uint32_t first) {
    float values[PORTION];
    size_t length = 0;
    for (uint32_t i = 0; i < PORTION; i++) {
        values[i] = -float_from_bits(first + i);
        length += bt_json_float(single + length, values[i]);
        single[length++] = ',';
    }
    assert_int_equal(bt_json_floats(list, values, PORTION), length - 1);
    assert_memory_equal(list, single, length - 1);
}

static void all_floats_are_their_doubles(void **state) {
    (void)state;
    char *room = bt_malloc(2 * BT_JSON_NUMBER_ROOM);
    char *list = bt_malloc(bt_json_floats_room(PORTION));
    char *single = bt_malloc(bt_json_floats_room(PORTION));
    assert_true(room != NULL && list != NULL && single != NULL);
    for (uint32_t bits = 0; bits < 0x80000000U; bits++) {
        check_float(room, bits, true);
        if (bits % PORTION == 0) check_block(list, single, bits);
        if ((bits & 0x07ffffffU) == 0) print_message("# %u of 16\n", bits >> 27);
    }
    bt_free(room);
    bt_free(list);
    bt_free(single);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--all") == 0) {
        const struct CMUnitTest all[] = {cmocka_unit_test(all_floats_are_their_doubles)};
        return cmocka_run_group_tests(all, NULL, NULL);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_equal_the_recorded_ones),
        cmocka_unit_test(floats_equal_the_recorded_digests),
        cmocka_unit_test(floats_of_every_binade_are_their_doubles),
        cmocka_unit_test(lists_are_their_numbers),
        cmocka_unit_test(lists_around_their_limits),
        cmocka_unit_test(lists_of_the_longest),
        cmocka_unit_test(forms_change_at_the_right_places),
        cmocka_unit_test(shortest_at_every_exponent),
        cmocka_unit_test(shortest_of_random_doubles),
        cmocka_unit_test(integers),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    FILE *shared = open_shared();
    if (shared == NULL) return failed;
    const struct CMUnitTest more[] = {
        cmocka_unit_test_prestate(texts_equal_the_shared_ones, shared),
    };
    return failed + cmocka_run_group_tests(more, NULL, NULL);
}
