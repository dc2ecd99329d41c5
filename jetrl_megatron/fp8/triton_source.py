"""What a quantiser reads: a plain matrix, FP8 codes, or the operands of the operation that it is fused with.

Enters: pointers of one of four sources. Leaves: a tile of exactly the BF16 (or dequantised FP32) values which the unfused path would have
written to memory and read back.
Equations, [R, C] each: plain x; fp8 code * scale; norm bf16(bf16(x * rstd) * weight) with rstd = 1 / sqrt(mean(x^2) + eps), FP32 inside;
swiglu bf16(bf16(gate / (1 + exp(-gate))) * up) with x = [gate | up]. The inner roundings are those of the rollout engine's own kernels.

Legend: R rows, C columns of the quantised matrix.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PLAIN, FP8, NORM, SWIGLU = 0, 1, 2, 3
"""Kinds of source."""


@dataclass(frozen=True, eq=False)
class Source:
    """One operand set; unused pointers repeat x."""

    kind: int
    x: torch.Tensor
    """[R, C], rows contiguous; [R, 2C] for swiglu; uint8 for fp8."""
    cols: int
    """C."""
    row_aux: torch.Tensor | None = None
    """fp8: scales [R, ceil(C / 128)] float32; norm: rstd [R, 1] float32."""
    weight: torch.Tensor | None = None
    """norm: [C] bfloat16."""

    def arguments(self) -> tuple[object, ...]:
        """The leading arguments of every kernel: x, aux, weight, rows, cols, then the strides of x and aux."""
        aux = self.x if self.row_aux is None else self.row_aux
        weight = self.x if self.weight is None else self.weight
        return self.x, aux, weight, self.x.shape[0], self.cols, self.x.stride(0), aux.stride(0), aux.stride(1)


@triton.jit
def round_bf16(x, SOFT: tl.constexpr):
    """FP32 values rounded to nearest even BF16; in FP32 where `SOFT`."""
    if SOFT:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        rounded = tl.where(x == x, nearest, bits).to(tl.float32, bitcast=True)
    else:
        rounded = x.to(tl.bfloat16, fp_downcast_rounding="rtne")
    return rounded


@triton.jit
def load_source(
    x_ptr,
    aux_ptr,
    weight_ptr,
    r,
    c,
    rows,
    cols,
    x_stride,
    aux_stride_r,
    aux_stride_c,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Rows r and columns c (int64 vectors) of the source, BF16 or FP32; zero outside [rows, cols]. EVEN: no element is outside."""
    mask = None if EVEN else (r < rows)[:, None] & (c < cols)[None, :]
    row_mask = None if EVEN else r < rows
    other = None if EVEN else 0
    offset = r[:, None] * x_stride + c[None, :]
    raw = tl.load(x_ptr + offset, mask=mask, other=other)
    if KIND == 1:
        scale = tl.load(aux_ptr + r * aux_stride_r + (tl.min(c, 0) // 128) * aux_stride_c, mask=row_mask, other=other)
        x = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    elif KIND == 2:
        rstd = tl.load(aux_ptr + r * aux_stride_r, mask=row_mask, other=other)
        weight = tl.load(weight_ptr + c, mask=None if EVEN else c < cols, other=other).to(tl.float32)
        normed = round_bf16(raw.to(tl.float32) * rstd[:, None], SOFT)
        x = round_bf16(normed.to(tl.float32) * weight[None, :], SOFT)
    elif KIND == 3:
        gate = raw.to(tl.float32)
        up = tl.load(x_ptr + offset + cols, mask=mask, other=other).to(tl.float32)
        denominator = 1.0 + tl.exp(-gate)
        silu = round_bf16(tl.div_rn(gate, denominator), SOFT)
        x = round_bf16(silu.to(tl.float32) * up, SOFT)
    else:
        x = raw
    return x


@triton.jit
def rstd_kernel(x_ptr, rstd_ptr, x_stride, eps, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of one row, FP32."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, COLS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + c, mask=c < COLS, other=0.0).to(tl.float32)
        total += x * x
    mean = tl.div_rn(tl.sum(total, 0), COLS * 1.0)
    tl.store(rstd_ptr + row, tl.div_rn(1.0, tl.sqrt_rn(mean + eps)))
