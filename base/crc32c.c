/* Two paths with the same result. The table path reads eight bytes a step through eight tables
 * ("slicing"). The instruction path keeps the instruction's latency (3 cycles) busy by walking
 * three neighbouring blocks at once and joining their checksums: a CRC is linear, so that of A
 * followed by B is shift(crc(A), |B|) ^ crc(B), and shifting by a fixed length is four table
 * look-ups. */
#include "base/crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_TARGET       __attribute__((target("sse4.2")))
#define CRC_WORD(crc, w) ((uint32_t)_mm_crc32_u64((crc), (w)))
#define CRC_BYTE(crc, b) _mm_crc32_u8((crc), (b))
#define HAS_CRC_PATH     1
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define CRC_TARGET       __attribute__((target("+crc")))
#define CRC_WORD(crc, w) __crc32cd((crc), (w))
#define CRC_BYTE(crc, b) __crc32cb((crc), (b))
#define HAS_CRC_PATH     1
#else
#define HAS_CRC_PATH 0
#endif

enum {
    SLICES = 8,
    BLOCK_BYTES = 2048, /* three of them in one round; longer gains nothing measurable */
};

static uint32_t slices[SLICES][256];
static uint32_t block_shift[4][256]; /* a checksum followed by BLOCK_BYTES zero bytes, by byte */
static bool has_instruction;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t shift_zero_bytes(uint32_t crc, size_t count) {
    for (size_t i = 0; i < count; i++)
        crc = (crc >> 8) ^ slices[0][crc & 0xff];
    return crc;
}

static void build_block_shift(void) {
    uint32_t bits[32];
    for (unsigned bit = 0; bit < 32; bit++)
        bits[bit] = shift_zero_bytes(UINT32_C(1) << bit, BLOCK_BYTES);
    for (unsigned at = 0; at < 4; at++) {
        for (unsigned value = 0; value < 256; value++) {
            uint32_t shifted = 0;
            for (unsigned bit = 0; bit < 8; bit++)
                if ((value >> bit & 1) != 0) shifted ^= bits[at * 8 + bit];
            block_shift[at][value] = shifted;
        }
    }
}

static bool detect_instruction(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__)
    return (getauxval(AT_HWCAP) & (UINT64_C(1) << 7)) != 0; /* HWCAP_CRC32 */
#else
    return false;
#endif
}

static void build(void) {
    for (unsigned value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (unsigned bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (UINT32_C(0x82F63B78) & (0u - (crc & 1u)));
        slices[0][value] = crc;
    }
    for (unsigned slice = 1; slice < SLICES; slice++)
        for (unsigned value = 0; value < 256; value++)
            slices[slice][value] = shift_zero_bytes(slices[slice - 1][value], 1);
    build_block_shift();
    has_instruction = detect_instruction();
}

static uint64_t load_word(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* The three below take and give the inverted (running) checksum. */
static uint32_t run_table(uint32_t crc, const uint8_t *at, size_t bytes) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; bytes >= 8; at += 8, bytes -= 8) {
        const uint64_t word = load_word(at) ^ crc;
        crc = 0;
        for (unsigned i = 0; i < 8; i++)
            crc ^= slices[7 - i][word >> (8 * i) & 0xff];
    }
#endif
    for (; bytes > 0; at++, bytes--)
        crc = (crc >> 8) ^ slices[0][(crc ^ *at) & 0xff];
    return crc;
}

#if HAS_CRC_PATH

static uint32_t shift_block(uint32_t crc) {
    return block_shift[0][crc & 0xff] ^ block_shift[1][crc >> 8 & 0xff] ^
           block_shift[2][crc >> 16 & 0xff] ^ block_shift[3][crc >> 24];
}

CRC_TARGET static uint32_t run_three_blocks(uint32_t crc, const uint8_t *at) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < BLOCK_BYTES; i += 8) {
        crc = CRC_WORD(crc, load_word(at + i));
        second = CRC_WORD(second, load_word(at + BLOCK_BYTES + i));
        third = CRC_WORD(third, load_word(at + 2 * (size_t)BLOCK_BYTES + i));
    }
    return shift_block(shift_block(crc) ^ second) ^ third;
}

CRC_TARGET static uint32_t run_instruction(uint32_t crc, const uint8_t *at, size_t bytes) {
    const size_t round = 3 * (size_t)BLOCK_BYTES;
    for (; bytes >= round; at += round, bytes -= round)
        crc = run_three_blocks(crc, at);
    for (; bytes >= 8; at += 8, bytes -= 8)
        crc = CRC_WORD(crc, load_word(at));
    for (; bytes > 0; at++, bytes--)
        crc = CRC_BYTE(crc, *at);
    return crc;
}

#else

static uint32_t run_instruction(uint32_t crc, const uint8_t *at, size_t bytes) {
    return run_table(crc, at, bytes);
}

#endif

uint32_t bt_crc32c(uint32_t crc, const void *data, size_t bytes) {
    (void)pthread_once(&once, build);
    return has_instruction ? ~run_instruction(~crc, data, bytes) : ~run_table(~crc, data, bytes);
}

bool bt_crc32c_by(bt_crc32c_path path, uint32_t *crc, const void *data, size_t bytes) {
    (void)pthread_once(&once, build);
    switch (path) {
    case BT_CRC32C_TABLE: *crc = ~run_table(~*crc, data, bytes); return true;
    case BT_CRC32C_INSTRUCTION:
        if (!has_instruction) return false;
        *crc = ~run_instruction(~*crc, data, bytes);
        return true;
    }
    return false;
}
