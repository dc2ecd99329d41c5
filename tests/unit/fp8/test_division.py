"""Why kernels may divide by multiplying: an exhaustive proof over BF16 mantissas, in exact rational arithmetic.

The kernels compute x / s as first = x * inv, then fma(fma(first, s, -x), -inv, first) with inv = 1 / s rounded. x is BF16 and s is
amax / 448 of a BF16 amax (57344 is 448 * 128, so E5M2 has the same mantissas) or the scale of the amax floor. Powers of two only move
exponents, so 128 mantissas of x times 129 of s are all the cases there are, away from underflow, where the
code is zero whatever the last bit.
"""

from fractions import Fraction

import numpy as np

from jetrl_megatron.fp8.quantize import AMAX_FLOOR


def round_fp32(value: Fraction) -> Fraction:
    """Round to nearest even at 24 significant bits, no exponent limits."""
    if value == 0:
        return value
    sign, value = (-1 if value < 0 else 1), abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return sign * round(value / unit) * unit


def test_multiply_and_correct_equals_true_division_for_every_bf16_mantissa():
    amaxes = [Fraction(m) for m in range(128, 256)] + [Fraction(float(np.float32(AMAX_FLOOR)))]
    for amax in amaxes:
        scale = round_fp32(amax / 448)
        inverse = round_fp32(1 / scale)
        for mantissa in range(128, 256):
            x = Fraction(mantissa)
            first = round_fp32(x * inverse)
            rest = round_fp32(first * scale - x)
            assert round_fp32(first - rest * inverse) == round_fp32(x / scale), (amax, mantissa)


def test_the_correction_is_needed():
    wrong = 0
    for m in range(128, 256):
        scale = round_fp32(Fraction(m, 448))
        inverse = round_fp32(1 / scale)
        wrong += sum(round_fp32(Fraction(x) * inverse) != round_fp32(Fraction(x) / scale) for x in range(128, 256))
    assert wrong > 1000
