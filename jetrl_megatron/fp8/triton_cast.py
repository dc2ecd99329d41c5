"""Device functions that every Triton quantiser shares: the scale of a group and the codes of its elements.

Enters: largest magnitudes as FP32 bit patterns, elements in FP32. Leaves: scales, and codes as bytes or as words of four.
Equation and invariants: those of quantize.py, byte for byte. Two points where a GPU tempts to differ:
- amax is taken over bit patterns as integers, which orders finite < Inf < NaN, so that a float maximum cannot drop a NaN.
- Divisions are fma(x, high, x * low), where high + low is the inverse to 44 bits or more and low >= 0 (so a negative zero stays one). For
  BF16 x, where s is made of a BF16 amax, this equals the true division: proven for all mantissas in tests/unit/fp8/test_division.py.
  For FP32 x (`plain`) true divisions run, at a fraction of the speed.
On a CPU (TRITON_INTERPRET=1) the casts of the interpreter truncate, so `soft` selects casts in integer arithmetic and true divisions.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import FP8_MAX
from jetrl_megatron.fp8.quantize import AMAX_FLOOR

BELOW = tl.constexpr(2)
"""Units in the last place that `inverse` steps down from the hardware's reciprocal, which is right to one, to stay below 1 / s."""


class CastFormat(NamedTuple):
    """Compile-time description of a cast to FP8."""

    limit: float
    inverse_high: float
    """1 / limit rounded toward zero to FP32."""
    inverse_low: float
    """The rest of 1 / limit, FP32."""
    floor: float
    ue8m0: bool
    e4m3: bool
    soft: bool
    """Triton's interpreter: casts in integer arithmetic."""
    plain: bool
    """True divisions, and FP32 at once: x is not BF16, or the interpreter runs."""


def fp32_inverse(limit: float) -> tuple[float, float]:
    """1 / limit as two FP32 numbers: rounded toward zero, and the rounded rest."""
    high = torch.tensor(1.0 / limit, dtype=torch.float32)
    if Fraction(high.item()) * Fraction(limit) > 1:
        high = torch.nextafter(high, torch.tensor(0.0))
    low = Fraction(1) / Fraction(limit) - Fraction(high.item())
    return high.item(), torch.tensor(float(low), dtype=torch.float32).item()


def cast_format(x_dtype: torch.dtype, dtype: torch.dtype, scale_format: ScaleFormat) -> CastFormat:
    """The cast of values of `x_dtype` to FP8 `dtype`."""
    limit = FP8_MAX[dtype]
    soft = bool(triton.knobs.runtime.interpret)
    return CastFormat(
        limit,
        *fp32_inverse(limit),
        floor=AMAX_FLOOR,
        ue8m0=scale_format is ScaleFormat.ue8m0,
        e4m3=dtype is torch.float8_e4m3fn,
        soft=soft,
        plain=soft or x_dtype is not torch.bfloat16,
    )


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x detached, copied only where its rows are not contiguous."""
    x = x.detach()
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


@triton.jit
def widen(x, F: tl.constexpr):
    """x in FP32. BF16 values are unpacked anew at each call: kept in registers as packed pairs, they leave room for more programs."""
    if F.plain:
        wide = x.to(tl.float32)
    else:
        unpack: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        wide = tl.inline_asm_elementwise(unpack, "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2)
    return wide


@triton.jit
def magnitude_bits(x, F: tl.constexpr):
    """|x| as the integer of its FP32 bit pattern, x FP32 or BF16."""
    if F.plain:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32) << 16
    return bits


@triton.jit
def largest_bits(x0, x1, x2, x3, F: tl.constexpr):
    """`magnitude_bits` of the largest of four tensors, element by element."""
    if F.plain:
        low = tl.maximum(magnitude_bits(x0, F), magnitude_bits(x1, F))
        bits = tl.maximum(low, tl.maximum(magnitude_bits(x2, F), magnitude_bits(x3, F)))
    else:
        # Two BF16 values a register: bit patterns without sign, as unsigned 16-bit integers.
        packed = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; and.b32 a, $1, 0x7fff7fff; and.b32 b, $2, 0x7fff7fff; max.u16x2 a, a, b;"
            " and.b32 c, $3, 0x7fff7fff; and.b32 d, $4, 0x7fff7fff; max.u16x2 c, c, d; max.u16x2 $0, a, c; }",
            "=r,r,r,r,r",
            [x0, x1, x2, x3],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        bits = packed.to(tl.int32) << 16
    return bits


@triton.jit
def group_scale(amax_bits, F: tl.constexpr):
    """Scale of groups from the bit patterns of their largest magnitudes; NaN where a group holds NaN or Inf."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), F.floor)
    scale = tl.div_rn(amax, F.limit) if F.plain else tl.fma(amax, tl.zeros_like(amax) + F.inverse_high, amax * F.inverse_low)
    bits = scale.to(tl.int32, bitcast=True)
    if F.ue8m0:
        bits = (bits + 0x7FFFFF) & 0x7F800000
    bits = tl.where(amax_bits < 0x7F800000, bits, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale, F: tl.constexpr):
    """(high, low) of 1 / scale, high a few units below it; where divisions are true ones, (scale, scale)."""
    if F.plain:
        high, low = scale, scale
    else:
        near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)
        high = (near.to(tl.int32, bitcast=True) - BELOW).to(tl.float32, bitcast=True)
        low = tl.fma(-high, scale, tl.zeros_like(scale) + 1.0) * high
    return high, low


@triton.jit
def quotient(x, high, low, F: tl.constexpr):
    """x / scale from the parts of `inverse`, which have the shape of x."""
    return tl.div_rn(x, high) if F.plain else tl.fma(x, high, x * low)


@triton.jit
def to_bytes(x, high, low, F: tl.constexpr):
    """FP8 codes as uint8 of x, FP32 or BF16, from the inverse of its scale (shapes broadcast); 0x7F where that is NaN."""
    q = quotient(widen(x, F), tl.broadcast_to(high, x.shape), tl.broadcast_to(low, x.shape), F)
    if F.soft:
        codes = _soft_codes(q, F).to(tl.uint8)
    elif F.e4m3:
        codes = q.to(tl.float8e4nv, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    else:
        codes = q.to(tl.float8e5, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def to_words(x0, x1, x2, x3, high, low, F: tl.constexpr):
    """FP8 codes of four tensors, FP32 or BF16, of one shape as int32, x0 in the lowest byte; they share the inverse of their scale."""
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    high, low = tl.broadcast_to(high, x0.shape), tl.broadcast_to(low, x0.shape)
    q0, q1, q2, q3 = quotient(x0, high, low, F), quotient(x1, high, low, F), quotient(x2, high, low, F), quotient(x3, high, low, F)
    if F.soft:
        words = _soft_codes(q0, F) | (_soft_codes(q1, F) << 8) | (_soft_codes(q2, F) << 16) | (_soft_codes(q3, F) << 24)
    elif F.e4m3:
        words = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f",
            [q0, q1, q2, q3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f",
            [q0, q1, q2, q3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def _soft_codes(x, F: tl.constexpr):
    """Saturating round-to-nearest-even cast of FP32 to FP8 bits, as int32, in integer arithmetic; 0x7F for NaN."""
    MANTISSA: tl.constexpr = 3 if F.e4m3 else 2
    BIAS: tl.constexpr = 7 if F.e4m3 else 15
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding this power of two leaves the subnormal code in the low bits of the sum, rounded to nearest even by the addition itself.
    MAGIC: tl.constexpr = 16384.0 if F.e4m3 else 128.0
    MAGIC_BITS: tl.constexpr = 0x46800000 if F.e4m3 else 0x43000000
    MIN_NORMAL_BITS: tl.constexpr = (127 + 1 - BIAS) << 23
    bits = magnitude_bits(tl.minimum(tl.maximum(x, -F.limit), F.limit), F)
    normal = ((bits + (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    subnormal = (bits.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(bits < MIN_NORMAL_BITS, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F)
