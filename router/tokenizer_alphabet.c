/* The GPT-2 byte alphabet: printable Latin-1 bytes are themselves, the other 68 bytes are the code
 * points from U+0100 on, in byte order. */
#include "base/utf8.h"
#include "router/tokenizer_internal.h"

enum { SHIFTED_FIRST = 0x100, SHIFTED_COUNT = 68 };

static bool is_printable(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
           (byte >= 0xAE && byte <= 0xFF);
}

/* The byte of a code point, or -1. The shifted bytes are 0-32, 127-160 and 173. */
static int32_t byte_of(uint32_t code_point) {
    if (code_point < SHIFTED_FIRST) return is_printable(code_point) ? (int32_t)code_point : -1;
    const uint32_t index = code_point - SHIFTED_FIRST;
    if (index >= SHIFTED_COUNT) return -1;
    if (index <= 0x20) return (int32_t)index;
    if (index < SHIFTED_COUNT - 1) return (int32_t)(0x7F + index - 0x21);
    return 0xAD;
}

bool byte_alphabet_decode(token_text text, char *bytes_out, size_t *count_out) {
    size_t count = 0;
    for (size_t at = 0; at < text.bytes;) {
        uint32_t code_point = 0;
        at += bt_utf8_decode(text.text + at, &code_point);
        const int32_t byte = byte_of(code_point);
        if (byte < 0) return false;
        bytes_out[count++] = (char)byte;
    }
    *count_out = count;
    return true;
}
