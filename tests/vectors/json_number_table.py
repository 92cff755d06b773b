#!/usr/bin/env python3
"""Prints base/json_number_table.c: 10^e as 128 bits with the top bit set, rounded up, for every power
that printing a double needs. Exact integer arithmetic. Also proves the three logarithm formulas of
base/json_number.c over their whole ranges. Run by hand:
    tests/vectors/json_number_table.py > base/json_number_table.c"""

LOW, HIGH = -292, 324


def top_bits(e):
    """ceil(10^e / 2^r) with r such that the quotient has 128 bits; and r."""
    numerator, denominator = (10**e, 1) if e >= 0 else (1, 10**-e)
    r = numerator.bit_length() - denominator.bit_length() - 128
    for r in (r - 1, r, r + 1):
        scaled = numerator << -r if r < 0 else numerator
        below = denominator << r if r > 0 else denominator
        quotient = -(-scaled // below)
        if quotient.bit_length() == 128 and scaled // below >= 1 << 127:
            return quotient, r
    raise AssertionError(e)


def floor_log(base_from, e, base_to, numerator=1, denominator=1):
    """floor(log_to(from^e * numerator / denominator)), exactly."""
    top, bottom = (base_from**e, 1) if e >= 0 else (1, base_from**-e)
    top, bottom = top * numerator, bottom * denominator
    result = 0
    while top >= bottom * base_to:
        bottom *= base_to
        result += 1
    while top < bottom:
        top *= base_to
        result -= 1
    return result


def prove_formulas():
    for e in range(-1074, 972):
        assert (e * 1262611) >> 22 == floor_log(2, e, 10)
        assert (e * 1262611 - 524031) >> 22 == floor_log(2, e, 10, 3, 4)
    for e in range(LOW, HIGH + 1):
        assert (e * 1741647) >> 19 == floor_log(10, e, 2)
        assert top_bits(e)[1] == floor_log(10, e, 2) - 127


def main():
    prove_formulas()
    print("/* Printed by tests/vectors/json_number_table.py: powers of ten, 128 bits each. */")
    print('#include "base/json_number_internal.h"\n')
    print("const bt_json_power bt_json_powers[BT_JSON_POWER_MAX - BT_JSON_POWER_MIN + 1] = {")
    cells = [top_bits(e)[0] for e in range(LOW, HIGH + 1)]
    cells = [f"{{0x{c >> 64:016x}U, 0x{c & (1 << 64) - 1:016x}U}}," for c in cells]
    for i in range(0, len(cells), 2):
        print("    " + " ".join(cells[i : i + 2]))
    print("};")


if __name__ == "__main__":
    main()
