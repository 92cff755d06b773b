/* CRC32C: known answers, and both paths agree with a bit-by-bit oracle at every length and
 * alignment around the sizes where the fast path changes gear. */
#include "base/crc32c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BUFFER_BYTES = 40000 };

static uint32_t oracle(uint32_t crc, const uint8_t *data, size_t bytes) {
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static void fill(uint8_t *data, size_t bytes) {
    uint32_t state = 12345;
    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (uint8_t)(state >> 24);
    }
}

/* The four vectors of RFC 3720 B.4 and the usual check value. */
static void known_answers(void **state) {
    (void)state;
    uint8_t block[32];
    assert_int_equal(bt_crc32c(0, "123456789", 9), 0xE3069283u);
    memset(block, 0, sizeof block);
    assert_int_equal(bt_crc32c(0, block, sizeof block), 0x8A9136AAu);
    memset(block, 0xff, sizeof block);
    assert_int_equal(bt_crc32c(0, block, sizeof block), 0x62A8AB43u);
    for (unsigned i = 0; i < 32; i++)
        block[i] = (uint8_t)i;
    assert_int_equal(bt_crc32c(0, block, sizeof block), 0x46DD794Eu);
    for (unsigned i = 0; i < 32; i++)
        block[i] = (uint8_t)(31 - i);
    assert_int_equal(bt_crc32c(0, block, sizeof block), 0x113FDB5Cu);
    assert_int_equal(bt_crc32c(0, NULL, 0), 0);
    assert_int_equal(bt_crc32c(77, NULL, 0), 77);
}

static void paths_agree_with_the_oracle(void **state) {
    (void)state;
    static uint8_t data[BUFFER_BYTES];
    fill(data, sizeof data);
    static const size_t lengths[] = {0,    1,    7,    8,    9,     63,    2047,  2048,
                                     2049, 6143, 6144, 6145, 12288, 12289, 20000, 39990};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
        for (size_t offset = 0; offset < 9; offset++) {
            const uint32_t wanted = oracle(0x1234, data + offset, lengths[l]);
            uint32_t crc = 0x1234;
            assert_true(bt_crc32c_by(BT_CRC32C_TABLE, &crc, data + offset, lengths[l]));
            assert_int_equal(crc, wanted);
            crc = 0x1234;
            if (bt_crc32c_by(BT_CRC32C_INSTRUCTION, &crc, data + offset, lengths[l]))
                assert_int_equal(crc, wanted);
            assert_int_equal(bt_crc32c(0x1234, data + offset, lengths[l]), wanted);
        }
    }
}

static void pieces_equal_the_whole(void **state) {
    (void)state;
    static uint8_t data[BUFFER_BYTES];
    fill(data, sizeof data);
    const uint32_t whole = bt_crc32c(0, data, sizeof data);
    for (size_t cut = 0; cut <= sizeof data; cut += 977) {
        const uint32_t head = bt_crc32c(0, data, cut);
        assert_int_equal(bt_crc32c(head, data + cut, sizeof data - cut), whole);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(paths_agree_with_the_oracle),
        cmocka_unit_test(pieces_equal_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
