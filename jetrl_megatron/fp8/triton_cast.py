"""Device functions that every Triton quantiser shares: the scale of a group and the codes of its elements.

Enters: largest magnitudes as FP32 bit patterns, elements in FP32. Leaves: scales, and codes as uint8.
Equation and invariants: those of quantize.py, byte for byte. Two points where a GPU tempts to differ:
- amax is taken over bit patterns as integers, which orders finite < Inf < NaN, so that a float maximum cannot drop a NaN.
- x / s is done as q = x * (1/s), then q - (q * s - x) * (1/s) with fused multiply-adds; in these signs a negative zero stays one. For
  BF16 x, where s is made of a BF16 amax, it equals the true division: proven for all mantissas in tests/unit/fp8/test_division.py. For
  FP32 x (`EXACT_DIV`) the true division runs.
On a CPU (TRITON_INTERPRET=1) the casts of the interpreter truncate, so `SOFT` selects a cast in integer arithmetic; kernels get it
from `soft_cast()`.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import FP8_MAX
from jetrl_megatron.fp8.quantize import AMAX_FLOOR


def soft_cast() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return triton.knobs.runtime.interpret


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x detached, copied only where its rows are not contiguous."""
    x = x.detach()
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def cast_flags(x_dtype: torch.dtype, dtype: torch.dtype, scale_format: ScaleFormat) -> dict[str, object]:
    """The compile-time arguments of `group_scale` and `to_codes` for values of `x_dtype` and target FP8 `dtype`."""
    return {
        "LIMIT": FP8_MAX[dtype],
        "FLOOR": AMAX_FLOOR,
        "UE8M0": scale_format is ScaleFormat.ue8m0,
        "EXACT_DIV": x_dtype is not torch.bfloat16,
        "SOFT": soft_cast(),
    }


@triton.jit
def magnitude_bits(x):
    """|x| as the integer of its FP32 bit pattern."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def group_scale(amax_bits, LIMIT: tl.constexpr, FLOOR: tl.constexpr, UE8M0: tl.constexpr):
    """Scale of groups from the bit patterns of their largest magnitudes; NaN where a group holds NaN or Inf."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), FLOOR)
    bits = tl.div_rn(amax, LIMIT).to(tl.int32, bitcast=True)
    if UE8M0:
        bits = (bits + 0x7FFFFF) & 0x7F800000
    bits = tl.where(amax_bits < 0x7F800000, bits, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_codes(x, scale, LIMIT: tl.constexpr, EXACT_DIV: tl.constexpr, SOFT: tl.constexpr):
    """FP8 codes, as uint8, of x over the scale of its group (shapes broadcast); 0x7F where the scale is NaN."""
    if SOFT:
        quotient = tl.minimum(tl.maximum(tl.div_rn(x, scale + tl.zeros_like(x)), -LIMIT), LIMIT)
        return tl.where(scale == scale, _soft_codes(quotient, LIMIT), 0x7F).to(tl.uint8)
    if EXACT_DIV:
        quotient = tl.div_rn(x, scale + tl.zeros_like(x))
    else:
        inverse = tl.div_rn(1.0, scale)
        first = x * inverse
        rest = tl.fma(first, scale + tl.zeros_like(x), -x)
        quotient = tl.fma(rest, -inverse + tl.zeros_like(x), first)
    if LIMIT == 448.0:
        return quotient.to(tl.float8e4nv, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    codes = quotient.to(tl.float8e5, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    return tl.where(scale == scale, codes, 0x7F)


@triton.jit
def _soft_codes(x, LIMIT: tl.constexpr):
    """Round-to-nearest-even cast of clamped FP32 to FP8 bits in integer arithmetic."""
    MANTISSA: tl.constexpr = 3 if LIMIT == 448.0 else 2
    BIAS: tl.constexpr = 7 if LIMIT == 448.0 else 15
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding this power of two leaves the subnormal code in the low bits of the sum, rounded to nearest even by the addition itself.
    MAGIC: tl.constexpr = 16384.0 if LIMIT == 448.0 else 128.0
    MAGIC_BITS: tl.constexpr = 0x46800000 if LIMIT == 448.0 else 0x43000000
    MIN_NORMAL_BITS: tl.constexpr = (127 + 1 - BIAS) << 23
    bits = magnitude_bits(x)
    normal = ((bits + (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    subnormal = (bits.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(bits < MIN_NORMAL_BITS, subnormal, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
