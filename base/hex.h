/* Hexadecimal digits, of either case. */
#ifndef BT_BASE_HEX_H
#define BT_BASE_HEX_H

/* The value of a digit, 0 to 15, or -1 for any other character. */
static inline int bt_hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

#endif
