/* The byte ranges of table 3-7 of the Unicode standard, and nothing else. */
#include "base/utf8.h"

#include <string.h>

uint32_t bt_utf8_sequence_bytes(uint8_t lead) {
    if (lead < 0x80) return 1;
    if (lead < 0xC2) return 0;
    if (lead < 0xE0) return 2;
    if (lead < 0xF0) return 3;
    return lead < 0xF5 ? 4 : 0;
}

bool bt_utf8_can_follow(uint8_t lead, uint32_t index, uint8_t byte) {
    uint8_t low = 0x80;
    uint8_t high = 0xBF;
    if (index == 1) {
        if (lead == 0xE0) low = 0xA0;
        if (lead == 0xED) high = 0x9F;
        if (lead == 0xF0) low = 0x90;
        if (lead == 0xF4) high = 0x8F;
    }
    return byte >= low && byte <= high;
}

size_t bt_utf8_ascii_prefix(const char *text, size_t bytes) {
    size_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
        uint64_t word;
        memcpy(&word, text + at, sizeof word);
        if ((word & UINT64_C(0x8080808080808080)) != 0) break;
    }
    while (at < bytes && ((uint8_t)text[at] & 0x80) == 0)
        at++;
    return at;
}

size_t bt_utf8_next(const char *text, size_t bytes) {
    if (bytes == 0) return 0;
    const uint8_t lead = (uint8_t)text[0];
    const uint32_t need = bt_utf8_sequence_bytes(lead);
    if (need > bytes) return 0;
    for (uint32_t i = 1; i < need; i++)
        if (!bt_utf8_can_follow(lead, i, (uint8_t)text[i])) return 0;
    return need;
}

size_t bt_utf8_valid_prefix(const char *text, size_t bytes) {
    size_t at = bt_utf8_ascii_prefix(text, bytes);
    while (at < bytes) {
        const size_t next = bt_utf8_next(text + at, bytes - at);
        if (next == 0) return at;
        at += next;
        if (next == 1) at += bt_utf8_ascii_prefix(text + at, bytes - at);
    }
    return at;
}

bool bt_utf8_is_valid(const char *text, size_t bytes) {
    return bt_utf8_valid_prefix(text, bytes) == bytes;
}

size_t bt_utf8_count(const char *text, size_t bytes) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++) {
        count += ((uint8_t)text[i] & 0xc0) != 0x80;
    }
    return count;
}

uint32_t bt_utf8_decode(const char *text, uint32_t *code_point_out) {
    const uint8_t *b = (const uint8_t *)text;
    const uint32_t bytes = bt_utf8_sequence_bytes(b[0]);
    switch (bytes) {
    case 2: *code_point_out = ((b[0] & 0x1FU) << 6) | (b[1] & 0x3FU); return 2;
    case 3:
        *code_point_out = ((b[0] & 0x0FU) << 12) | ((b[1] & 0x3FU) << 6) | (b[2] & 0x3FU);
        return 3;
    case 4:
        *code_point_out = ((b[0] & 0x07U) << 18) | ((b[1] & 0x3FU) << 12) | ((b[2] & 0x3FU) << 6) |
                          (b[3] & 0x3FU);
        return 4;
    }
    *code_point_out = b[0];
    return 1;
}

uint32_t bt_utf8_encode(uint32_t code_point, char text_out[4]) {
    if (code_point < 0x80) {
        text_out[0] = (char)code_point;
        return 1;
    }
    const uint32_t bytes = code_point < 0x800 ? 2 : code_point < 0x10000 ? 3 : 4;
    static const uint8_t lead_bits[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (uint32_t i = bytes - 1; i > 0; i--) {
        text_out[i] = (char)(0x80U | (code_point & 0x3FU));
        code_point >>= 6;
    }
    text_out[0] = (char)(lead_bits[bytes] | code_point);
    return bytes;
}
