#!/usr/bin/env python3
"""Prints base/json_number_table.c: 10^e as 128 bits with the top bit set, rounded up, for every power
that printing a double needs, and what base/json_number_float.c knows of each binade. Exact integer
arithmetic. Also proves the three logarithm formulas of base/json_number.c over their whole ranges, and
the bounds of json_number_float.c. Run by hand:
    python3 tests/vectors/json_number_table.py | clang-format --assume-filename=base/x.c > base/json_number_table.c"""
from fractions import Fraction

LOW, HIGH = -292, 324
BINADES = range(-17, 7)
LARGE = 100  # floats of the binades end here
TAIL = 16  # digits


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


def start_of(digits_before):
    """Text of bt_json_starts, and its number of characters in the last byte."""
    return f'"{digits_before}' + "\\0" * (7 - len(digits_before)) + f'\\{len(digits_before)}"'


def binade(e):
    """Fields of bt_json_binade, proving what json_number_float.c says of them."""
    k = floor_log(2, e - 52, 10)
    unit = Fraction(10) ** k
    step = Fraction(2) ** (e - 23) / unit  # of m
    whole, part = divmod(step * 2**64, 2**64)
    assert part.denominator == 1, "x is exact"
    reach = Fraction(2) ** (e - 53) / unit
    assert 1 <= 2 * reach < 10, "at most one multiple of ten reads back, at least one unit"
    # With 60 bits behind the point x is exact too, and as the ends of the interval have more, no
    # comparison with the rounded reach is an equality that rounding makes.
    assert (step * 2**60).denominator == 1 and (reach * 2**60).denominator == 1
    assert (reach * 2**8).denominator > 1 and (step * 2**19).denominator == 1
    first, last = Fraction(2) ** e / unit, Fraction(2) ** (e + 1) / unit
    assert first >= 10**15 and last + 10 < 10**17 * (100 if e > 4 else 1)
    scale = 10 ** (k + TAIL) if -k < TAIL else 1
    # What stands in front of the last sixteen digits: the whole part, or zeros and one digit.
    top = min(last, LARGE / unit) * scale
    assert top < 2**64 and top // 10**TAIL <= (LARGE if -k <= TAIL else 9)
    start = 0 if -k <= TAIL else LARGE + 10 * (-k - TAIL - 1)
    return whole, part, reach * 2**60, scale, start


def print_binades():
    print("\nconst bt_json_binade bt_json_binades[BT_JSON_BINADE_MAX - BT_JSON_BINADE_MIN + 1] = {")
    for e in BINADES:
        whole, part, reach, scale, start = binade(e)
        print(f"    {{0x{int(whole):09x}U, 0x{int(part):016x}U, 0x{int(reach):016x}U, {scale}, {start}}},")
    print("};\n")
    texts = [start_of(f"{i}.") for i in range(LARGE)]
    for zeros in range(5):
        texts += [start_of("0." + "0" * zeros + str(digit)) for digit in range(10)]
    print("const char bt_json_starts[BT_JSON_STARTS][8] = {")
    for i in range(0, len(texts), 5):
        print("    " + " ".join(f"{text}," for text in texts[i : i + 5]))
    print("};")


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
    print_binades()


if __name__ == "__main__":
    main()
