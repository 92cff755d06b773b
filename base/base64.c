/* Each path encodes whole groups of three bytes; the padded end is common to all. The vector paths
 * spread the bytes of each group over the four bytes of a word, cut six bits out for each
 * character and map them to characters: by one look-up in a table of 64 (AVX-512 VBMI, NEON), or
 * by adding an offset that depends on the range of the value (AVX2). */
#include "base/base64.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static const char ALPHABET[65] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Of `bytes`, a multiple of 3. */
typedef void (*encoder)(char *out, const uint8_t *in, size_t bytes);

static encoder best;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void encode_plain(char *out, const uint8_t *in, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 3, out += 4) {
        const uint32_t group = (uint32_t)in[at] << 16 | (uint32_t)in[at + 1] << 8 | in[at + 2];
        out[0] = ALPHABET[group >> 18];
        out[1] = ALPHABET[group >> 12 & 63];
        out[2] = ALPHABET[group >> 6 & 63];
        out[3] = ALPHABET[group & 63];
    }
}

#if defined(__x86_64__)

/* The offset from a value of six bits to its character, by the range the value is in: 0 .. 25 (13),
 * 26 .. 51 (0), 52 .. 61 (1 .. 10), 62 (11), 63 (12). */
__attribute__((target("avx2"))) static __m256i to_characters(__m256i values) {
    const __m256i offsets =
        _mm256_setr_epi8('a' - 26, '0' - 52, '0' - 52, '0' - 52, '0' - 52, '0' - 52, '0' - 52,
                         '0' - 52, '0' - 52, '0' - 52, '0' - 52, '+' - 62, '/' - 63, 'A', 0, 0,
                         'a' - 26, '0' - 52, '0' - 52, '0' - 52, '0' - 52, '0' - 52, '0' - 52,
                         '0' - 52, '0' - 52, '0' - 52, '0' - 52, '+' - 62, '/' - 63, 'A', 0, 0);
    const __m256i is_upper = _mm256_cmpgt_epi8(_mm256_set1_epi8(26), values);
    const __m256i range = _mm256_or_si256(_mm256_subs_epu8(values, _mm256_set1_epi8(51)),
                                          _mm256_and_si256(is_upper, _mm256_set1_epi8(13)));
    return _mm256_add_epi8(_mm256_shuffle_epi8(offsets, range), values);
}

__attribute__((target("avx2"))) static void encode_avx2(char *out, const uint8_t *in,
                                                        size_t bytes) {
    enum { STEP = 24, READ = 28 };
    const __m256i spread = _mm256_setr_epi8(1, 0, 2, 1, 4, 3, 5, 4, 7, 6, 8, 7, 10, 9, 11, 10, 1, 0,
                                            2, 1, 4, 3, 5, 4, 7, 6, 8, 7, 10, 9, 11, 10);
    size_t at = 0;
    for (; bytes - at >= READ; at += STEP, out += 32) {
        const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)(in + at));
        const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(in + at + 12));
        const __m256i words = _mm256_shuffle_epi8(
            _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), spread);
        /* Products move the first and third value, then the second and fourth, to their bytes. */
        const __m256i odd = _mm256_mulhi_epu16(
            _mm256_and_si256(words, _mm256_set1_epi32(0x0fc0fc00)), _mm256_set1_epi32(0x04000040));
        const __m256i even = _mm256_mullo_epi16(
            _mm256_and_si256(words, _mm256_set1_epi32(0x003f03f0)), _mm256_set1_epi32(0x01000010));
        _mm256_storeu_si256((__m256i *)(void *)out, to_characters(_mm256_or_si256(odd, even)));
    }
    encode_plain(out, in + at, bytes - at);
}

__attribute__((target("avx512f,avx512bw,avx512vbmi"))) static __m512i
vbmi_characters(__m512i bytes, __m512i spread, __m512i table) {
    /* Where in each half of eight bytes the six bits of its eight characters begin. */
    const __m512i starts = _mm512_set1_epi64(0x3036242a1016040a);
    const __m512i values =
        _mm512_multishift_epi64_epi8(starts, _mm512_permutexvar_epi8(spread, bytes));
    return _mm512_permutexvar_epi8(values, table);
}

__attribute__((target("avx512f,avx512bw,avx512vbmi"))) static void
encode_avx512(char *out, const uint8_t *in, size_t bytes) {
    enum { STEP = 48 };
    const __m512i table = _mm512_loadu_si512(ALPHABET);
    const __m512i spread =
        _mm512_setr_epi32(0x01020001, 0x04050304, 0x07080607, 0x0a0b090a, 0x0d0e0c0d, 0x10110f10,
                          0x13141213, 0x16171516, 0x191a1819, 0x1c1d1b1c, 0x1f201e1f, 0x22232122,
                          0x25262425, 0x28292728, 0x2b2c2a2b, 0x2e2f2d2e);
    size_t at = 0;
    for (; bytes - at >= 64; at += STEP, out += 64) {
        const __m512i block = _mm512_loadu_si512(in + at);
        _mm512_storeu_si512(out, vbmi_characters(block, spread, table));
    }
    for (; at < bytes; at += STEP, out += 64) {
        const size_t left = bytes - at < STEP ? bytes - at : STEP;
        const __mmask64 read = (UINT64_C(1) << left) - 1;
        const __mmask64 written = UINT64_MAX >> (64 - left / 3 * 4);
        const __m512i block = _mm512_maskz_loadu_epi8(read, in + at);
        _mm512_mask_storeu_epi8(out, written, vbmi_characters(block, spread, table));
    }
}

#elif defined(__aarch64__)

static void encode_neon(char *out, const uint8_t *in, size_t bytes) {
    enum { STEP = 48 };
    const uint8x16x4_t table = vld1q_u8_x4((const uint8_t *)ALPHABET);
    const uint8x16_t six = vdupq_n_u8(63);
    size_t at = 0;
    for (; bytes - at >= STEP; at += STEP, out += 64) {
        const uint8x16x3_t group = vld3q_u8(in + at);
        const uint8x16x4_t text = {{
            vqtbl4q_u8(table, vshrq_n_u8(group.val[0], 2)),
            vqtbl4q_u8(table,
                       vandq_u8(vsliq_n_u8(vshrq_n_u8(group.val[1], 4), group.val[0], 4), six)),
            vqtbl4q_u8(table,
                       vandq_u8(vsliq_n_u8(vshrq_n_u8(group.val[2], 6), group.val[1], 2), six)),
            vqtbl4q_u8(table, vandq_u8(group.val[2], six)),
        }};
        vst4q_u8((uint8_t *)out, text);
    }
    encode_plain(out, in + at, bytes - at);
}

#endif

/* NULL: not on this machine. */
static encoder find_path(bt_base64_path path) {
    switch (path) {
    case BT_BASE64_PLAIN: return encode_plain;
#if defined(__x86_64__)
    case BT_BASE64_AVX2: return __builtin_cpu_supports("avx2") ? encode_avx2 : NULL;
    case BT_BASE64_AVX512:
        return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw")
                   ? encode_avx512
                   : NULL;
    case BT_BASE64_NEON: return NULL;
#elif defined(__aarch64__)
    case BT_BASE64_AVX2:
    case BT_BASE64_AVX512: return NULL;
    case BT_BASE64_NEON: return encode_neon;
#else
    case BT_BASE64_AVX2:
    case BT_BASE64_AVX512:
    case BT_BASE64_NEON: return NULL;
#endif
    }
    return NULL;
}

static void choose(void) {
    static const bt_base64_path ORDER[] = {BT_BASE64_AVX512, BT_BASE64_AVX2, BT_BASE64_NEON,
                                           BT_BASE64_PLAIN};
    for (size_t i = 0; best == NULL; i++) {
        best = find_path(ORDER[i]);
    }
}

/* One or two bytes: two or three characters, and padding. */
static size_t encode_rest(char *out, const uint8_t *in, size_t bytes) {
    uint8_t group[3] = {0};
    if (bytes == 0) return 0;
    memcpy(group, in, bytes);
    encode_plain(out, group, sizeof(group));
    memset(out + bytes + 1, '=', 3 - bytes);
    return 4;
}

static size_t encode_all(encoder encode, char *out, const uint8_t *in, size_t bytes) {
    const size_t whole = bytes - bytes % 3;
    const size_t length = whole / 3 * 4;
    encode(out, in, whole);
    return length + encode_rest(out + length, in + whole, bytes - whole);
}

size_t bt_base64(char *out, const void *data, size_t bytes) {
    (void)pthread_once(&once, choose);
    return encode_all(best, out, data, bytes);
}

bool bt_base64_by(bt_base64_path path, char *out, const void *data, size_t bytes) {
    const encoder encode = find_path(path);
    if (encode == NULL) return false;
    (void)encode_all(encode, out, data, bytes);
    return true;
}

size_t bt_base64_push(bt_base64_stream *stream, char *out, const void *data, size_t bytes) {
    const uint8_t *in = data;
    size_t length = 0;
    (void)pthread_once(&once, choose);
    if (stream->held_bytes > 0) {
        uint8_t group[3];
        const size_t missing = 3u - stream->held_bytes;
        memcpy(group, stream->held, stream->held_bytes);
        if (bytes < missing) {
            if (bytes > 0) stream->held[stream->held_bytes++] = *in;
            return 0;
        }
        memcpy(group + stream->held_bytes, in, missing);
        encode_plain(out, group, sizeof(group));
        length = 4;
        in += missing;
        bytes -= missing;
    }
    const size_t rest = bytes % 3;
    best(out + length, in, bytes - rest);
    length += (bytes - rest) / 3 * 4;
    if (rest > 0) memcpy(stream->held, in + (bytes - rest), rest);
    stream->held_bytes = (uint8_t)rest;
    return length;
}

size_t bt_base64_finish(bt_base64_stream *stream, char *out) {
    const size_t length = encode_rest(out, stream->held, stream->held_bytes);
    *stream = (bt_base64_stream){0};
    return length;
}
