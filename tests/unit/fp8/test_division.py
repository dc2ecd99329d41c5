"""Why kernels may divide by multiplying: an exhaustive proof over BF16 mantissas.

The kernels compute a / b as fma(a, high, a * low), where high is a few units in the last place below 1 / b and low >= 0 the rounded
rest. Two divisions are done so: amax / 448 (57344 is 448 * 128, so E5M2 has the same mantissas), and x / s with x BF16 and s that
quotient of a BF16 amax, or of the amax floor. Powers of two only move exponents, so 128 mantissas of x times 129 of s are all the cases
there are, away from underflow, where the code is zero whatever the last bit; scales rounded up to powers of two divide exactly.
In float64 every product of two FP32 numbers is exact, and so is the sum of the two products here (under 53 bits): each .astype(float32)
below is the one rounding that the GPU's instruction does.
"""

import numpy as np
import pytest

from jetrl_megatron.fp8.quantize import AMAX_FLOOR

F32, F64 = np.float32, np.float64
AMAX = np.concatenate([np.arange(128, 256), [AMAX_FLOOR]]).astype(F32)
X = np.arange(128, 256).astype(F32)
HARDWARE_ERROR, STEP = 1, 2
"""Units in the last place: of the reciprocal instruction, and of `triton_cast.BELOW`."""


def fma_rounded(a: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """fma(a, high, a * low) in FP32."""
    return (a.astype(F64) * high.astype(F64) + (a * low).astype(F64)).astype(F32)


def toward_zero(inverse_of: np.ndarray) -> np.ndarray:
    """1 / b rounded toward zero to FP32."""
    high = (1 / inverse_of.astype(F64)).astype(F32)
    return np.where(high.astype(F64) * inverse_of > 1, np.nextafter(high, F32(0)), high)


@pytest.mark.parametrize("below", range(STEP + HARDWARE_ERROR + 1))
def test_two_multiplications_equal_true_division_for_every_bf16_mantissa(below):
    scale = (AMAX / F32(448))[:, None]
    high = (toward_zero(scale).view(np.int32) - below).view(F32)
    rest = (1 - high.astype(F64) * scale.astype(F64)).astype(F32)
    low = (rest.astype(F64) * high.astype(F64)).astype(F32)
    assert (low >= 0).all()
    assert (fma_rounded(X[None], high, low) == X[None] / scale).all()


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_the_scale_by_constants_equals_true_division(limit):
    triton_cast = pytest.importorskip("jetrl_megatron.fp8.triton_cast", exc_type=ImportError)
    high, low = (np.array(part, dtype=F64) for part in triton_cast.fp32_inverse(limit))
    assert high == F32(high) and low == F32(low) and 0 <= low < high
    assert (fma_rounded(AMAX, high.astype(F32), low.astype(F32)) == AMAX / F32(limit)).all()


def test_the_low_part_is_needed():
    scale = (AMAX / F32(448))[:, None]
    assert (X[None] * (1 / scale).astype(F32) != X[None] / scale).sum() > 1000
