#!/usr/bin/env python3
"""Prints the constants of kernels/math.h: minimax polynomials (Remez exchange, 200 bits) and the
parts of ln 2 and pi/2. Needs mpmath. Run by hand; the result is copied into the header."""
import struct

from mpmath import atanh, cos, exp, floor, log, lu_solve, matrix, mp, mpf, nstr, pi, polyval, sign
from mpmath import sin, sqrt

mp.prec = 200
TINY = mpf(10) ** -20


def minimax(f, low, high, count, weight):
    """`count` coefficients of the polynomial with the least weighted error; and that error."""
    grid = [low + (high - low) * mpf(k) / 1200 for k in range(1201)]
    points = [(low + high) / 2 - (high - low) / 2 * cos(pi * k / count) for k in range(count + 1)]
    for _ in range(12):
        a, b = matrix(count + 1, count + 1), matrix(count + 1, 1)
        for i, x in enumerate(points):
            for j in range(count):
                a[i, j] = x**j
            a[i, count] = (-1) ** i / weight(x)
            b[i] = f(x)
        solution = lu_solve(a, b)
        coefficients = [solution[j] for j in range(count)]
        errors = [weight(x) * (f(x) - polyval(coefficients[::-1], x)) for x in grid]
        peaks = []
        for k, e in enumerate(errors):
            if not peaks or sign(e) != sign(errors[peaks[-1]]):
                peaks.append(k)
            elif abs(e) > abs(errors[peaks[-1]]):
                peaks[-1] = k
        if len(peaks) != count + 1:
            break
        points = [grid[k] for k in peaks]
    return coefficients, max(abs(e) for e in errors)


def show(name, fit, single=False):
    coefficients, error = fit
    print(f"{name}: error 2^{nstr(log(error, 2), 4)}")
    for i, c in enumerate(coefficients):
        value = struct.unpack("f", struct.pack("f", float(c)))[0] if single else float(c)
        print(f"  {i} {value.hex()}")


def exp_rest(r):
    """(e^r - 1 - r) / r^2"""
    return mpf(1) / 2 + r / 6 if abs(r) < TINY else (exp(r) - 1 - r) / r**2


def log_rest(z):
    """(2 atanh s - 2 s) / s^3 with z = s^2"""
    s = sqrt(z)
    return mpf(2) / 3 + 2 * z / 5 if z < TINY else (2 * atanh(s) - 2 * s) / s / z


def sin_rest(z):
    r = sqrt(z)
    return -mpf(1) / 6 + z / 120 if z < TINY else (sin(r) - r) / r**3


def cos_rest(z):
    if z < mpf(10) ** -12:
        return mpf(1) / 24 - z / 720 + z * z / 40320
    return (cos(sqrt(z)) - 1 + z / 2) / z**2


def main():
    half = log(2) / 2
    e = lambda r: r * r / exp(r) + TINY
    show("exp f32", minimax(exp_rest, -half * 1.01, half * 1.01, 5, e), single=True)
    show("exp f64", minimax(exp_rest, -half * 1.005, half * 1.005, 11, e))
    z_log = ((sqrt(2) - 1) / (sqrt(2) + 1)) ** 2 * mpf("1.001")
    near_one = lambda z: z + mpf(10) ** -6
    show("log f64", minimax(log_rest, mpf(0), z_log, 8, near_one))
    show("log f32", minimax(log_rest, mpf(0), z_log, 5, near_one))
    z_sin = (pi / 4) ** 2 * mpf("1.01")
    show("sin", minimax(sin_rest, mpf(0), z_sin, 6, lambda z: z + TINY))
    show("cos", minimax(cos_rest, mpf(0), z_sin, 6, lambda z: z * z + TINY))
    for bits in (15, 42):
        high = floor(log(2) * mpf(2) ** bits) / mpf(2) ** bits
        print(f"ln2, {bits} bits: {float(high).hex()} + {float(log(2) - high).hex()}")
    rest = pi / 2
    for bits in (32, 66, 99):
        high = floor(rest * mpf(2) ** bits) / mpf(2) ** bits
        print(f"pi/2 part: {float(high).hex()}")
        rest -= high
    print(f"pi/2 rest: {float(rest).hex()}  2/pi: {float(2 / pi).hex()}")
    print(f"1/ln2: {float(1 / log(2)).hex()}")


if __name__ == "__main__":
    main()
