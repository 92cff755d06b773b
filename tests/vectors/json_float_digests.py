#!/usr/bin/env python3
"""Prints tests/vectors/json_float_digests.txt: CRC-32 of the JSON texts of many floats, each with a
comma behind it, by Python's own shortest repr of the widened double in orjson's form (the rule at the
head of base/json_number.h). One line a block: name, first, stride, count, crc; the bits of float i of a
block are (first + i * stride) mod 2^32. Takes a minute. Run by hand:
    python3 tests/vectors/json_float_digests.py > tests/vectors/json_float_digests.txt"""
import math
import struct
import zlib


def text_of(bits):
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if not math.isfinite(value):
        return "null"
    text = repr(value)  # python's floats are doubles
    size = abs(value)
    if 1e-4 <= size < 1e16 or size == 0:
        return text
    sign = "-" if text[0] == "-" else ""
    mantissa, exponent = text[len(sign) :].split("e")
    if size >= 1e16:
        return f"{sign}{mantissa}e{int(exponent)}"
    if size < 1e-5:
        return f"{sign}{mantissa}e{int(exponent)}"
    return f"{sign}0.{'0' * (-int(exponent) - 1)}{mantissa.replace('.', '')}"


def block(name, first, stride, count):
    crc = 0
    for i in range(0, count, 4096):
        piece = range(i, min(i + 4096, count))
        crc = zlib.crc32("".join(text_of((first + n * stride) & 0xFFFFFFFF) + "," for n in piece).encode(), crc)
    print(f"{name} {first:08x} {stride} {count} {crc:08x}")


def main():
    # The whole range, thinned out.
    for first in range(0, 1 << 32, 1 << 27):
        block("all", first, 1021, (1 << 27) // 1021)
    # Both ends of every binade, and the sides of the places where the form of the text changes.
    for exponent in range(256):
        block("ends", ((exponent << 23) - 32) & 0xFFFFFFFF, 1, 64)
    for value in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 10.0, 99.0, 100.0, 128.0, 1e15, 1e16):
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        block("forms", (bits | 1 << 31) - 1024, 1, 2048)
    # Log-probabilities: -1e-5 to -100, every 97th.
    low, high = 0xB727C5AD, 0xC2C80000
    for first in range(low, high, 1 << 24):
        block("logprobs", first, 97, (min(1 << 24, high - first) + 96) // 97)


if __name__ == "__main__":
    main()
