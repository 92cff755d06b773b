/* Known answers of the weight encodings: computed by hand, and those of another implementation for
 * random blocks (tests/vectors/make_dequant_vectors.py). */
#include "kernels/model/dequant.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/file_map.h"
#include "base/gguf.h"
#include "kernels/bf16.h"
#include "kernels/f16.h"

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void bf16_rounds_to_nearest_even(void **state) {
    (void)state;
    const struct {
        uint32_t f32;
        uint16_t bf16;
    } cases[] = {
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x3f800000, 0x3f80},
        {0x3f807fff, 0x3f80},                       /* below the half */
        {0x3f808000, 0x3f80},                       /* a tie, to even: down */
        {0x3f808001, 0x3f81},                       /* above the half */
        {0x3f818000, 0x3f82},                       /* a tie, to even: up */
        {0xbf818000, 0xbf82}, {0x3fffffff, 0x4000}, /* carries into the exponent */
        {0x7f7f7fff, 0x7f7f}, {0x7f7fffff, 0x7f80}, /* too large for bf16: infinity */
        {0x7f800000, 0x7f80}, {0xff800000, 0xff80}, {0x7f800001, 0x7fc0}, /* NaN stays NaN */
        {0x00008000, 0x0000}, {0x00008001, 0x0001},                       /* subnormal */
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++)
        assert_int_equal(bf16_from_f32(from_bits(cases[i].f32)), cases[i].bf16);
}

static void f16_widens_exactly(void **state) {
    (void)state;
    const struct {
        uint16_t f16;
        float value;
    } cases[] = {
        {0x0000, 0.0f},     {0x3c00, 1.0f},      {0xc000, -2.0f},       {0x7bff, 65504.0f},
        {0x0400, 0x1p-14f}, {0x0001, 0x1p-24f},  {0x83ff, -0x3ffp-24f}, {0x3555, 0x1.554p-2f},
        {0x7c00, INFINITY}, {0xfc00, -INFINITY},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++)
        assert_true(f16_to_f32(cases[i].f16) == cases[i].value);
    assert_true(signbit(f16_to_f32(0x8000)));
    assert_true(isnan(f16_to_f32(0x7e00)));
    assert_true(isnan(f16_to_f32(0x7c01)));
}

/* Sources start at an odd address: nothing may depend on alignment. */
static void check_row(dequant_encoding encoding, const void *source, size_t bytes,
                      const uint16_t *expected, size_t columns) {
    uint8_t shifted[256];
    uint16_t out[128];
    assert_true(bytes < sizeof shifted);
    assert_int_equal(dequant_row_bytes(encoding, columns), bytes);
    memcpy(shifted + 1, source, bytes);
    assert_true(dequant_row(encoding, shifted + 1, columns, out));
    assert_memory_equal(out, expected, columns * sizeof out[0]);
}

static void plain_rows(void **state) {
    (void)state;
    const uint8_t f32[] = {0, 0, 0x80, 0x3f, 0, 0x80, 0x81, 0x3f, 0, 0, 0, 0xc0};
    const uint8_t f16[] = {0x00, 0x3c, 0x01, 0x3c, 0x00, 0xc0};
    const uint8_t bf16[] = {0x80, 0x3f, 0x34, 0x12, 0x00, 0xc0};
    /* 1 + 2^-10 of f16 lies below half a step of bf16. */
    check_row(DEQUANT_ENCODING_F32, f32, sizeof f32, (uint16_t[]){0x3f80, 0x3f82, 0xc000}, 3);
    check_row(DEQUANT_ENCODING_F16, f16, sizeof f16, (uint16_t[]){0x3f80, 0x3f80, 0xc000}, 3);
    check_row(DEQUANT_ENCODING_BF16, bf16, sizeof bf16, (uint16_t[]){0x3f80, 0x1234, 0xc000}, 3);
}

static void q4_1_blocks(void **state) {
    (void)state;
    /* Two blocks; d = 0.5, m = -1 and d = 2, m = 0.25. Byte j holds weight j low, j + 16 high. */
    uint8_t source[40] = {0x00, 0x38, 0x00, 0xbc};
    float values[64];
    uint16_t expected[64];
    source[20] = 0x00, source[21] = 0x40, source[22] = 0x00, source[23] = 0x34;
    for (int j = 0; j < 16; j++) {
        const int low = j;
        const int high = 15 - j;
        source[4 + j] = (uint8_t)(low | high << 4);
        source[24 + j] = (uint8_t)(high | low << 4);
        values[j] = (float)low * 0.5f - 1.0f;
        values[j + 16] = (float)high * 0.5f - 1.0f;
        values[32 + j] = (float)high * 2.0f + 0.25f;
        values[32 + j + 16] = (float)low * 2.0f + 0.25f;
    }
    for (int i = 0; i < 64; i++) { /* all are short enough to be exact in bf16 */
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        assert_int_equal(bits & 0xffff, 0);
        expected[i] = (uint16_t)(bits >> 16);
    }
    check_row(DEQUANT_ENCODING_Q4_1, source, sizeof source, expected, 64);
}

static void q8_0_blocks(void **state) {
    (void)state;
    uint8_t source[34] = {0x00, 0x30}; /* d = 0.125 */
    uint16_t expected[32];
    for (int j = 0; j < 32; j++) {
        const int q = j == 0 ? -128 : j == 1 ? 127 : 8 * (j - 16);
        const float value = (float)q * 0.125f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        assert_int_equal(bits & 0xffff, 0);
        source[2 + j] = (uint8_t)q;
        expected[j] = (uint16_t)(bits >> 16);
    }
    assert_int_equal(expected[0], 0xc180); /* -16 */
    check_row(DEQUANT_ENCODING_Q8_0, source, sizeof source, expected, 32);
}

static bool find_encoding(uint32_t type, dequant_encoding *out) {
    static const struct {
        uint32_t type;
        dequant_encoding encoding;
    } known[] = {
        {BT_GGUF_TENSOR_Q4_0, DEQUANT_ENCODING_Q4_0}, {BT_GGUF_TENSOR_Q4_1, DEQUANT_ENCODING_Q4_1},
        {BT_GGUF_TENSOR_Q5_0, DEQUANT_ENCODING_Q5_0}, {BT_GGUF_TENSOR_Q5_1, DEQUANT_ENCODING_Q5_1},
        {BT_GGUF_TENSOR_Q8_0, DEQUANT_ENCODING_Q8_0}, {BT_GGUF_TENSOR_Q4_K, DEQUANT_ENCODING_Q4_K},
        {BT_GGUF_TENSOR_Q5_K, DEQUANT_ENCODING_Q5_K}, {BT_GGUF_TENSOR_Q6_K, DEQUANT_ENCODING_Q6_K},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(known); i++) {
        if (known[i].type != type) continue;
        *out = known[i].encoding;
        return true;
    }
    return false;
}

static void random_blocks_equal_the_reference(void **state) {
    (void)state;
    enum { WEIGHTS = 512 };
    bt_file_map map;
    bt_error error;
    uint32_t header[3];
    size_t types = 0;
    if (bt_file_map_open("tests/vectors/dequant.blocks", &map, &error) != BT_OK)
        fail_msg("%s", error.text);
    for (size_t at = 0; at < map.bytes; types++) {
        float got[WEIGHTS];
        uint16_t rounded[WEIGHTS];
        dequant_encoding encoding = DEQUANT_ENCODING_F32;
        assert_true(map.bytes - at >= sizeof header);
        memcpy(header, map.data + at, sizeof header);
        at += sizeof header;
        assert_true(find_encoding(header[0], &encoding));
        assert_int_equal(header[1], dequant_row_bytes(encoding, WEIGHTS));
        assert_int_equal(header[2], WEIGHTS);
        assert_true(map.bytes - at >= header[1] + sizeof got);
        dequant_row_f32(encoding, map.data + at, WEIGHTS, got);
        assert_true(dequant_row(encoding, map.data + at, WEIGHTS, rounded));
        at += header[1];
        if (memcmp(got, map.data + at, sizeof got) != 0)
            fail_msg("%s differs", bt_gguf_tensor_type_name(header[0]));
        at += sizeof got;
        for (size_t i = 0; i < WEIGHTS; i++)
            assert_int_equal(rounded[i], bf16_from_f32(got[i]));
    }
    bt_file_map_close(&map);
    assert_int_equal(types, 8);
}

static void weights_that_are_not_numbers_are_seen(void **state) {
    (void)state;
    const uint8_t f32_nan[] = {0, 0, 0, 0, 1, 0, 0x80, 0x7f};
    const uint8_t f32_large[] = {0, 0, 0, 0, 0xff, 0xff, 0x7f, 0x7f};
    const uint8_t f16_infinite[] = {0, 0, 0, 0xfc};
    const uint8_t bf16_nan[] = {0, 0, 0xc0, 0xff};
    uint8_t blocks[34] = {0};
    uint16_t out[32];
    assert_false(dequant_row(DEQUANT_ENCODING_F32, f32_nan, 2, out));
    assert_false(dequant_row(DEQUANT_ENCODING_F32, f32_large, 2, out));
    assert_false(dequant_row(DEQUANT_ENCODING_F16, f16_infinite, 2, out));
    assert_false(dequant_row(DEQUANT_ENCODING_BF16, bf16_nan, 2, out));
    assert_true(dequant_row(DEQUANT_ENCODING_Q4_1, blocks, 32, out));
    assert_true(dequant_row(DEQUANT_ENCODING_Q8_0, blocks, 32, out));
    blocks[1] = 0x7e; /* d is NaN */
    assert_false(dequant_row(DEQUANT_ENCODING_Q4_1, blocks, 32, out));
    assert_false(dequant_row(DEQUANT_ENCODING_Q8_0, blocks, 32, out));
    blocks[1] = 0;
    blocks[3] = 0x7c; /* m is infinite */
    assert_false(dequant_row(DEQUANT_ENCODING_Q4_1, blocks, 32, out));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(f16_widens_exactly),
        cmocka_unit_test(plain_rows),
        cmocka_unit_test(q4_1_blocks),
        cmocka_unit_test(q8_0_blocks),
        cmocka_unit_test(random_blocks_equal_the_reference),
        cmocka_unit_test(weights_that_are_not_numbers_are_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
