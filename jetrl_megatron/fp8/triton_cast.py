"""Device functions that every Triton quantiser shares: the scale of a group and the codes of its elements.

Enters: largest magnitudes as FP32 bit patterns, elements in FP32. Leaves: scales, and codes as bytes or as words of four.
Equation and invariants: those of quantize.py, byte for byte. Two points where a GPU tempts to differ:
- amax is taken over bit patterns as integers, which orders finite < Inf < NaN, so that a float maximum cannot drop a NaN.
- Divisions are fma(x, high, x * low), where high + low is the inverse to 44 bits or more and low >= 0 (so a negative zero stays one). For
  BF16 x, where s is made of a BF16 amax, this equals the true division: proven for all mantissas in tests/unit/fp8/test_division.py.
  For FP32 x (`plain`) true divisions run, at a fraction of the speed; where x is FP8 times a scale, a third form (`divided`).
On a CPU (TRITON_INTERPRET=1) the casts of the interpreter truncate, so `soft` selects casts in integer arithmetic and true divisions.
"""

import functools
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

MAX_STRIDE, MAX_ROWS = 1 << 24, 1 << 26
"""Elements from one row to the next, and rows, must be fewer: offsets inside a tile, 128 rows of the matrix or of its transpose, then fit
32 bits."""
MAX_GRID_Y = 65535
"""Programs along the second axis of a grid, CUDA's limit; along the first there may be 2^31 - 1."""
MAX_COLS = MAX_GRID_Y * 128
"""Columns must be fewer: groups of 128 lie along that axis."""


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
    """One value at a time and true divisions: x is not BF16 or not aligned, or the interpreter runs."""


def fp32_inverse(limit: float) -> tuple[float, float]:
    """1 / limit as two FP32 numbers: rounded toward zero, and the rounded rest."""
    high = torch.tensor(1.0 / limit, dtype=torch.float32)
    if Fraction(high.item()) * Fraction(limit) > 1:
        high = torch.nextafter(high, torch.tensor(0.0))
    low = Fraction(1) / Fraction(limit) - Fraction(high.item())
    return high.item(), torch.tensor(float(low), dtype=torch.float32).item()


@functools.cache
def cast_format(paired: bool, dtype: torch.dtype, scale_format: ScaleFormat) -> CastFormat:
    """The cast to FP8 `dtype`; paired: of BF16 values that are read two at a time."""
    limit = FP8_MAX[dtype]
    soft = bool(triton.knobs.runtime.interpret)
    return CastFormat(
        limit,
        *fp32_inverse(limit),
        floor=AMAX_FLOOR,
        ue8m0=scale_format is ScaleFormat.ue8m0,
        e4m3=dtype is torch.float8_e4m3fn,
        soft=soft,
        plain=soft or not paired,
    )


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x [R, C] detached, copied only where its rows are not contiguous or lie `MAX_STRIDE` elements apart or more.

    Raises ValueError where R is `MAX_ROWS` or more, or C `MAX_COLS` or more.
    """
    x = x.detach()
    if x.shape[0] >= MAX_ROWS or x.shape[1] >= MAX_COLS:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; a kernel takes {MAX_ROWS - 1} rows and {MAX_COLS - 1} columns: quantise parts of it"
        )
    return x if x.stride(0) < MAX_STRIDE and (x.stride(1) == 1 or x.shape[1] <= 1) else x.contiguous()


@triton.jit
def max_u16x2(a, b):
    """The larger of two unsigned 16-bit integers, in both halves of a 32-bit word."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pair_bits(a, b, F: tl.constexpr):
    """Magnitudes of a pair as ordered integers: FP32 bit patterns of a and b, or, packed, two 15-bit ones (twice)."""
    if F.plain:
        bits_a, bits_b = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits_a = a & 0x7FFF7FFF
        bits_b = bits_a
    return bits_a, bits_b


@triton.jit
def row_amax_bits(a, b, F: tl.constexpr):
    """FP32 bit pattern of the largest magnitude of each row of a pair."""
    bits_a, bits_b = pair_bits(a, b, F)
    if F.plain:
        bits = tl.max(tl.maximum(bits_a, bits_b), 1)
    else:
        packed = tl.reduce(bits_a, 1, max_u16x2)
        bits = tl.maximum(packed << 16, packed & 0x7FFF0000)
    return bits


@triton.jit
def column_amax_bits(a0, b0, a1, b1, a2, b2, a3, b3, F: tl.constexpr):
    """FP32 bit patterns of the largest magnitude of each column of four pairs, even and odd columns apart."""
    p0, q0 = pair_bits(a0, b0, F)
    p1, q1 = pair_bits(a1, b1, F)
    p2, q2 = pair_bits(a2, b2, F)
    p3, q3 = pair_bits(a3, b3, F)
    if F.plain:
        even = tl.max(tl.maximum(tl.maximum(p0, p1), tl.maximum(p2, p3)), 0)
        odd = tl.max(tl.maximum(tl.maximum(q0, q1), tl.maximum(q2, q3)), 0)
    else:
        packed = tl.reduce(max_u16x2(max_u16x2(p0, p1), max_u16x2(p2, p3)), 0, max_u16x2)
        even, odd = packed << 16, packed & 0x7FFF0000
    return even, odd


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
def near_inverse(x):
    """1 / x in FP32, right to one unit in the last place; subnormal numbers count as zero. Not for the interpreter."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse(scale, F: tl.constexpr):
    """(high, low) of 1 / scale, high a few units below it; where divisions are true ones, (scale, scale)."""
    if F.plain:
        high, low = scale, scale
    else:
        near = near_inverse(scale)
        high = (near.to(tl.int32, bitcast=True) - BELOW).to(tl.float32, bitcast=True)
        low = tl.fma(-high, scale, tl.zeros_like(scale) + 1.0) * high
    return high, low


@triton.jit
def quotient(x, high, low, F: tl.constexpr):
    """x / scale from the parts of `inverse`, which have the shape of x."""
    return tl.div_rn(x, high) if F.plain else tl.fma(x, high, x * low)


@triton.jit
def reciprocal(scale, F: tl.constexpr):
    """1 / scale for `divided`: to nearest but for a few mantissas, which miss it by one unit in the last place.

    scale: between 2^-126 and 2^126, or NaN.
    """
    if F.soft:
        inverse = scale
    else:
        near = near_inverse(scale)
        inverse = tl.fma(near, tl.fma(-near, scale, tl.full(scale.shape, 1.0, tl.float32)), near)
    return inverse


@triton.jit
def divided(x, scale, inverse, F: tl.constexpr):
    """x / scale with the E4M3 code of a true division, and the sign of zero; inverse: `reciprocal` of scale.

    One correction by what the product leaves: right wherever x / scale lies near a place where E4M3 codes change, for every FP32
    mantissa of the scale (tests/gpu/test_requantize.py asks all of them). The rest is product minus x, which keeps -0; in assembly,
    because Triton's minus takes from +0.
    """
    if F.soft:
        q = tl.div_rn(x, scale)
    else:
        corrected: tl.constexpr = (
            "{ .reg .f32 near, rest; mul.rn.f32 near, $1, $3; neg.f32 rest, $1; fma.rn.f32 rest, near, $2, rest; "
            "neg.f32 rest, rest; fma.rn.f32 $0, rest, $3, near; }"
        )
        q = tl.inline_asm_elementwise(corrected, "=f,f,f,f", [x, scale, inverse], dtype=tl.float32, is_pure=True, pack=1)
    return q


@triton.jit
def to_bytes(x, high, low, F: tl.constexpr):
    """FP8 codes as uint8 of x in FP32, from the inverse of its scale; 0x7F where that is NaN."""
    q = quotient(x, high, low, F)
    if F.soft:
        codes = _soft_codes(q, F).to(tl.uint8)
    elif F.e4m3:
        codes = q.to(tl.float8e4nv, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    else:
        codes = q.to(tl.float8e5, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def to_byte_pairs(x, y, high, low, F: tl.constexpr):
    """FP8 codes of x (low byte) and y (high byte) in FP32 as int16, from the inverse of the scale that they share."""
    q, s = tl.fma(x, high, x * low), tl.fma(y, high, y * low)
    kind: tl.constexpr = "e4m3x2" if F.e4m3 else "e5m2x2"
    cast: tl.constexpr = "cvt.rn.satfinite." + kind + ".f32 "
    both: tl.constexpr = "{ .reg .b16 l, h; " + cast + "l, $3, $1; " + cast + "h, $4, $2; mov.b32 $0, {l, h}; }"
    return tl.inline_asm_elementwise(both, "=r,f,f,f,f", [q, s], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def to_words(x0, x1, x2, x3, high, low, F: tl.constexpr):
    """FP8 codes of four FP32 tensors of one shape as int32, x0 in the lowest byte; they share the inverse of their scale."""
    q0, q1, q2, q3 = quotient(x0, high, low, F), quotient(x1, high, low, F), quotient(x2, high, low, F), quotient(x3, high, low, F)
    return pack_words(q0, q1, q2, q3, F)


@triton.jit
def pack_words(q0, q1, q2, q3, F: tl.constexpr):
    """FP8 codes of four FP32 tensors of one shape as int32, q0 in the lowest byte."""
    if F.soft:
        words = _soft_codes(q0, F) | (_soft_codes(q1, F) << 8) | (_soft_codes(q2, F) << 16) | (_soft_codes(q3, F) << 24)
    else:
        kind: tl.constexpr = "e4m3x2" if F.e4m3 else "e5m2x2"
        cast: tl.constexpr = "cvt.rn.satfinite." + kind + ".f32 "
        four: tl.constexpr = "{ .reg .b16 l, h; " + cast + "l, $2, $1; " + cast + "h, $4, $3; mov.b32 $0, {l, h}; }"
        words = tl.inline_asm_elementwise(four, "=r,f,f,f,f", [q0, q1, q2, q3], dtype=tl.int32, is_pure=True, pack=1)
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
    bits = tl.minimum(tl.maximum(x, -F.limit), F.limit).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    normal = ((bits + (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    subnormal = (bits.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(bits < MIN_NORMAL_BITS, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F)
