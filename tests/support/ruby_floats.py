"""How the generators of Ruby's json write a float: ``older`` up to version 2.10, ``newer`` from 2.15 on.

The newer one is fpconv.c of that project, Florian Loitsch's Grisu2: of about one float in a thousand it finds a digit more
than the shortest text has. Ported, for Debian's Ruby has the older one; compared with the C code on 50,000 floats.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

_FRACTION = 1 << 52


def older(number: float) -> str:
    """``Float#to_s`` of Ruby."""
    if number == 0:
        return repr(number)
    digits, exponent = _shortest(abs(number))
    sign = "-" if number < 0 else ""
    if -4 < exponent <= 15 or (exponent == 16 and len(digits) > 16):
        return repr(number)
    return f"{sign}{digits[0]}.{digits[1:] or '0'}e{exponent - 1:+03d}"


def _shortest(number: float) -> tuple[str, int]:
    """(digits, where the point stands behind them) of the shortest text."""
    mantissa, _, exponent = f"{number!r}".partition("e")
    whole, _, rest = mantissa.partition(".")
    digits = (whole + rest).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + rest) - len((whole + rest).lstrip("0")))
    return digits.rstrip("0") or "0", point


def newer(number: float) -> str:
    """``fpconv_dtoa``."""
    sign = "-" if math.copysign(1, number) < 0 else ""
    if number == 0:
        return f"{sign}0.0"
    digits, power = _grisu(abs(number))
    count, exponent = len(digits), abs(power + len(digits) - 1)
    if power >= 0 and exponent < 15:
        return f"{sign}{digits}{'0' * power}.0"
    if power < 0 and (power > -7 or exponent < 10):
        before = count + power
        if before <= 0:
            return f"{sign}0.{'0' * -before}{digits}"
        return f"{sign}{digits[:before]}.{digits[before:]}"
    digits = digits[: 18 - len(sign)]
    way = "-" if power + count - 1 < 0 else "+"
    return f"{sign}{digits[0]}{'.' if len(digits) > 1 else ''}{digits[1:]}e{way}{exponent}"


def _grisu(number: float) -> tuple[str, int]:
    bits = struct.unpack(">Q", struct.pack(">d", number))[0]
    fraction, exponent = bits & (_FRACTION - 1), (bits >> 52) & 0x7FF
    if exponent:
        fraction, exponent = fraction + _FRACTION, exponent - 1075
    else:
        exponent = -1074
    upper, upper_exponent = _normal((fraction << 1) + 1, exponent - 1)
    left = 2 if fraction == _FRACTION else 1
    lower = ((fraction << left) - 1) << (exponent - left - upper_exponent)
    middle, middle_exponent = _normal(fraction, exponent)
    ten, ten_exponent, power = _cached_power(upper_exponent)
    middle, upper, lower = _times(middle, ten), _times(upper, ten) - 1, _times(lower, ten) + 1
    return _digits(middle, middle_exponent + ten_exponent + 64, upper, upper_exponent + ten_exponent + 64, lower, -power)


def _normal(fraction: int, exponent: int) -> tuple[int, int]:
    shift = 64 - fraction.bit_length()
    return fraction << shift, exponent - shift


def _times(a: int, b: int) -> int:
    low = 0xFFFFFFFF
    ah_bl, al_bh, al_bl, ah_bh = (a >> 32) * (b & low), (a & low) * (b >> 32), (a & low) * (b & low), (a >> 32) * (b >> 32)
    tmp = (ah_bl & low) + (al_bh & low) + (al_bl >> 32) + (1 << 31)
    return ah_bh + (ah_bl >> 32) + (al_bh >> 32) + (tmp >> 32)


def _cached_power(exponent: int) -> tuple[int, int, int]:
    """(fraction, binary exponent, power of ten) with which the product comes into a range of 28 binary digits."""
    approximate = -(exponent + 87) * 0.30102999566398114
    index = (int(approximate) + 348) // 8
    while True:
        power = -348 + 8 * index
        fraction, binary = _ten_to(power)
        current = exponent + binary + 64
        if current < -60:
            index += 1
        elif current > -32:
            index -= 1
        else:
            return fraction, binary, power


def _ten_to(power: int) -> tuple[int, int]:
    exact = Fraction(10) ** power
    binary = exact.numerator.bit_length() - exact.denominator.bit_length() - 64
    while True:
        fraction = round(exact / Fraction(2) ** binary)
        if fraction < 1 << 63:
            binary -= 1
        elif fraction >= 1 << 64:
            binary += 1
        else:
            return fraction, binary


def _digits(middle: int, middle_exponent: int, upper: int, exponent: int, lower: int, power: int) -> tuple[str, int]:
    distance, delta = upper - middle, upper - lower
    one = 1 << -exponent
    whole, rest = upper >> -exponent, upper & (one - 1)
    found: list[int] = []
    tens, left = 1_000_000_000, 10
    while left > 0:
        digit = whole // tens
        if digit or found:
            found.append(digit)
        whole -= digit * tens
        left -= 1
        remainder = (whole << -exponent) + rest
        if remainder <= delta:
            return _rounded(found, delta, remainder, tens << -exponent, distance), power + left
        tens //= 10
    unit = 1
    while True:
        rest, delta, unit = rest * 10, delta * 10, unit * 10
        left -= 1
        digit = rest >> -exponent
        if digit or found:
            found.append(digit)
        rest &= one - 1
        if rest < delta:
            return _rounded(found, delta, rest, one, distance * unit), power + left


def _rounded(found: list[int], delta: int, rest: int, ten: int, distance: int) -> str:
    while rest < distance and delta - rest >= ten and (rest + ten < distance or distance - rest > rest + ten - distance):
        found[-1] -= 1
        rest += ten
    return "".join(map(str, found))
