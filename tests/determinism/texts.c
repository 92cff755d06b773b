/* The texts of a row, on every architecture: base64 by each way that this processor has, and
 * numbers in lists and one by one, against the plain ways; then against recorded sums, which every
 * machine must have. test_base64 and test_json_number look closer, but need a library.
 *
 * Speaks TAP, and needs bt_base alone. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/base64.h"
#include "base/compiler.h"
#include "base/json_number.h"

enum { DATA_BYTES = 3000, NUMBERS = 64, LISTS = 4000 };

static const uint64_t RECORDED_BASE64 = 0x4c9458e09c96e8e5U, RECORDED_NUMBERS = 0xb6e13c0ad1e4a35bU;

static unsigned cases, failures;

static void tell(bool is_ok, const char *what) {
    cases++;
    failures += !is_ok;
    printf("%sok %u - %s\n", is_ok ? "" : "not ", cases, what);
}

static void add(uint64_t *digest, const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        *digest = (*digest ^ (unsigned char)bytes[i]) * 0x100000001b3U;
}

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    return *state >> 32;
}

static bool check_recorded(const char *what, uint64_t digest, uint64_t recorded) {
    if (digest != recorded) printf("# %s: now %016" PRIx64 "\n", what, digest);
    return digest == recorded;
}

/* ---- base64 ---------------------------------------------------------------------------------- */

static uint8_t data[DATA_BYTES];
static char plain[DATA_BYTES / 3 * 4 + 4], text[sizeof plain];

static bool is_as_plain(bt_base64_path path) {
    for (size_t bytes = 0; bytes <= DATA_BYTES; bytes += bytes < 300 ? 1 : 97) {
        const uint8_t *from = data + (DATA_BYTES - bytes) / 2;
        (void)bt_base64_by(BT_BASE64_PLAIN, plain, from, bytes);
        if (!bt_base64_by(path, text, from, bytes)) return false;
        if (memcmp(text, plain, bt_base64_length(bytes)) != 0) return false;
    }
    return true;
}

static void check_base64(void) {
    static const char *const names[] = {[BT_BASE64_PLAIN] = "plain", "AVX2", "AVX-512", "NEON"};
    uint64_t random = 1, digest = 0;
    for (size_t i = 0; i < DATA_BYTES; i++)
        data[i] = (uint8_t)next_random(&random);
    for (uint32_t path = BT_BASE64_PLAIN; path <= BT_BASE64_NEON; path++) {
        char what[64];
        const bool is_here = bt_base64_by((bt_base64_path)path, text, data, 3);
        (void)snprintf(what, sizeof what, "base64, %s%s", names[path],
                       is_here ? "" : " # SKIP not on this machine");
        tell(!is_here || is_as_plain((bt_base64_path)path), what);
    }
    add(&digest, text, bt_base64(text, data, DATA_BYTES));
    tell(check_recorded("base64", digest, RECORDED_BASE64), "base64, the recorded text");
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* Log-probabilities, then any bits; ids. */
static void fill(uint64_t *random, float *floats, int32_t *ints, uint32_t list) {
    for (uint32_t i = 0; i < NUMBERS; i++) {
        const uint32_t bits = (uint32_t)next_random(random);
        floats[i] = -(float)(bits >> 8) * (list % 2 == 0 ? 0x1p-19F : 0x1p-23F);
        if (list % 4 == 3) memcpy(&floats[i], &bits, sizeof bits);
        ints[i] = (int32_t)(list % 2 == 0 ? bits % 152000 : bits);
    }
}

static void check_numbers(void) {
    static char list[NUMBERS * (BT_JSON_DOUBLE_MAX + 1) + BT_JSON_NUMBER_ROOM], single[sizeof list];
    float floats[NUMBERS];
    int32_t ints[NUMBERS];
    uint64_t random = 2, digest = 0;
    bool is_same = true;
    for (uint32_t at = 0; at < LISTS; at++) {
        fill(&random, floats, ints, at);
        size_t length = 0, bytes = bt_json_floats(list, floats, NUMBERS);
        for (uint32_t i = 0; i < NUMBERS; i++) {
            length += bt_json_double(single + length, (double)floats[i]);
            single[length++] = ',';
        }
        is_same = is_same && bytes == length - 1 && memcmp(list, single, bytes) == 0;
        add(&digest, list, bytes);
        bytes = bt_json_ints(list, ints, NUMBERS);
        length = 0;
        for (uint32_t i = 0; i < NUMBERS; i++)
            length += (size_t)snprintf(single + length, 16, "%d,", ints[i]);
        is_same = is_same && bytes == length - 1 && memcmp(list, single, bytes) == 0;
        add(&digest, list, bytes);
    }
    tell(is_same, "numbers, lists and one by one");
    tell(check_recorded("numbers", digest, RECORDED_NUMBERS), "numbers, the recorded texts");
}

int main(void) {
    check_base64();
    check_numbers();
    printf("1..%u\n", cases);
    return failures > 0;
}
