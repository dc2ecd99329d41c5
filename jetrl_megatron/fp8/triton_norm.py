"""RMSNorm on a GPU, one pass in each direction, FP32 inside; the forward is the kernel of both engines.

    y = bf16(x * rstd * w),   rstd = 1 / sqrt(mean(x^2) + eps)
    dx = bf16(rstd * (dy * w - x * rstd * mean(dy * w * x * rstd))),   dw = sum over rows of dy * x * rstd

Enters: BF16 rows of width D, in any strided arrangement [..., D] with neighbouring columns. Leaves: y and rstd, or dx and dw, contiguous.
Invariant: a row's bits depend on that row, the weight, eps and D alone. The order of a row's sum is the tile's, and the tile is chosen by
D; so neither the number of rows, nor how many heads lie in a token, nor their strides can change it. That is why no argument but D is
compiled in. vLLM's own kernel takes another order for batches of 256 tokens or more; one element that rounds the other way is enough to
move FP8 codes in every layer behind it.
The forward is also the operator `torch.ops.jetrl.rms_norm`, registered when this file is imported, for graphs that torch compiles. It has
no gradient. The function itself is faster to call, and torch's `custom_op` is not used: its checks take longer than the launch.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.fp8.block_scaled import num_blocks, power_of_two
from jetrl_megatron.fp8.triton_source import round_bf16

OPERATOR = "jetrl::rms_norm"
ALIGNED = 8
"""Elements of BF16 in 16 bytes: row addresses are multiples of it, or the rows are copied."""
TILE_ELEMENTS = 1024
"""Elements of one program, or one row where that is longer."""
BACKWARD_TILE_ELEMENTS = 4096
"""The same for one turn of the backward's loop."""
PROGRAMS = 528
"""Programs of the backward at most, four for each multiprocessor of an H100 or H200: each leaves one row of partial sums of dw."""
DW_ROWS, DW_COLS = 128, 32
"""Partial sums that one program adds up at a time; a row of them is one cache line."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y [..., D] bfloat16, rstd [..., 1] float32) of x [..., D] bfloat16, weight [D] bfloat16, eps above 0.

    Raises ValueError on other shapes or dtypes.
    """
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or weight.shape != x.shape[-1:]:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}; need bfloat16 [..., D] and [D]")
    y = x.new_empty(x.shape)
    return y, _launch(x, weight, eps, y)


torch.library.define(OPERATOR, "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
torch.library.impl(OPERATOR, ("cpu", "cuda"), rms_norm)


@torch.library.register_fake(OPERATOR)
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def rms_rstd(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rstd [..., 1] alone, the same bits as `rms_norm` gives."""
    return _launch(x, weight, eps, None)


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor | None) -> torch.Tensor:
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if x.numel():
        x_thd = _as_heads(x)
        toks, heads, dim = x_thd.shape
        padded = power_of_two(dim)
        tile = max(1, TILE_ELEMENTS // padded)
        norm_kernel[(num_blocks(toks * heads, tile),)](
            x_thd, weight.contiguous(), rstd if y is None else y, rstd, toks * heads, heads, x_thd.stride(0), x_thd.stride(1), eps,
            DIM=dim, PADDED=padded, TILE=tile, WRITE=y is not None, SOFT=bool(triton.knobs.runtime.interpret),
            num_warps=4 if padded <= 2048 else 8,
        )  # fmt: skip
    return rstd


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [T, heads, D] whose rows lie at multiples of 16 bytes; a copy only where the arrangement forbids a view."""
    dim = x.shape[-1]
    x_thd = x.reshape(-1, x.shape[-2], dim) if x.dim() > 2 else x.reshape(-1, 1, dim)
    strides = x_thd.stride(0) % ALIGNED == 0 and x_thd.stride(1) % ALIGNED == 0
    return x_thd if x_thd.stride(2) == 1 and strides and x_thd.data_ptr() % 16 == 0 else x_thd.clone(memory_format=torch.contiguous_format)


@triton.jit(do_not_specialize=["rows", "heads", "stride_t", "stride_h"])
def norm_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, heads, stride_t, stride_h, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WRITE: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """TILE rows of width DIM; row r is head r % heads of token r // heads."""
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, PADDED)
    mask = (r < rows)[:, None] & (d < DIM)[None, :]
    row = (r // heads) * stride_t + (r % heads) * stride_h
    row = tl.multiple_of(row, 8)
    x = tl.load(x_ptr + row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, 1), DIM * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    if WRITE:
        weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        y = round_bf16(x * rstd[:, None] * weight[None, :], SOFT)
        tl.store(y_ptr + r[:, None] * DIM + d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, *, want_dw: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (dx [..., D] bfloat16, dw [D] bfloat16 or None) of the gradient dy [..., D] bfloat16 and what `rms_norm` read and gave.

    A row of dx depends on its rows of dy and x alone. dw is summed in FP32 by a fixed number of programs, whose sums are added in a
    fixed order: the same rows give the same bits on the same kind of device.
    """
    assert weight.dtype is torch.bfloat16, weight.dtype
    dim = x.shape[-1]
    dx = x.new_empty(x.shape)
    if not x.numel():
        return dx, torch.zeros_like(weight) if want_dw else None
    x_thd, dy_thd = _as_heads(x), _as_heads(dy)
    toks, heads, _ = x_thd.shape
    padded = power_of_two(dim)
    tile = max(1, BACKWARD_TILE_ELEMENTS // padded)
    tiles = num_blocks(toks * heads, tile)
    programs = min(tiles, PROGRAMS)
    parts = rstd.new_empty((programs, dim)) if want_dw else rstd
    norm_backward_kernel[(programs,)](
        dy_thd, x_thd, weight.contiguous(), rstd, dx, parts, toks * heads, heads, dy_thd.stride(0), dy_thd.stride(1),
        x_thd.stride(0), x_thd.stride(1), num_blocks(tiles, programs),
        DIM=dim, PADDED=padded, TILE=tile, WRITE_DW=want_dw, SOFT=bool(triton.knobs.runtime.interpret),
        num_warps=4 if padded <= 2048 else 8,
    )  # fmt: skip
    return dx, _summed(parts) if want_dw else None


def _summed(parts: torch.Tensor) -> torch.Tensor:
    """Sum of the rows of parts [programs, D] float32, rounded once: [D] bfloat16. Torch's sum gives each column to four threads."""
    programs, dim = parts.shape
    dw = parts.new_empty(dim, dtype=torch.bfloat16)
    norm_dw_kernel[(num_blocks(dim, DW_COLS),)](
        parts, dw, programs, dim, ROWS=DW_ROWS, COLS=DW_COLS, SOFT=bool(triton.knobs.runtime.interpret)
    )
    return dw


@triton.jit(do_not_specialize=["rows", "heads", "dy_stride_t", "dy_stride_h", "stride_t", "stride_h", "tiles"])
def norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, heads, dy_stride_t, dy_stride_h, stride_t, stride_h, tiles,
    DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WRITE_DW: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """`tiles` neighbouring tiles of TILE rows; rows are numbered as in `norm_kernel`."""
    d = tl.arange(0, PADDED)
    weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    dw = tl.zeros((TILE, PADDED), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles
    for i in range(tiles):
        r = (first + i) * TILE + tl.arange(0, TILE)
        mask = (r < rows)[:, None] & (d < DIM)[None, :]
        x_row = tl.multiple_of((r // heads) * stride_t + (r % heads) * stride_h, 8)
        dy_row = tl.multiple_of((r // heads) * dy_stride_t + (r % heads) * dy_stride_h, 8)
        x = tl.load(x_ptr + x_row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)[:, None]
        normed = x * rstd
        dn = dy * weight[None, :]
        mean = tl.div_rn(tl.sum(dn * normed, 1), DIM * 1.0)[:, None]
        dx = round_bf16(rstd * (dn - normed * mean), SOFT)
        tl.store(dx_ptr + r[:, None] * DIM + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * normed
    if WRITE_DW:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * DIM + d, tl.sum(dw, 0), mask=d < DIM)


@triton.jit(do_not_specialize=["programs"])
def norm_dw_kernel(parts_ptr, dw_ptr, programs, dim, ROWS: tl.constexpr, COLS: tl.constexpr, SOFT: tl.constexpr):
    """COLS columns of dw: partial sums ROWS apart in their order, then the ROWS sums as a tree."""
    d = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, programs, ROWS):
        p = first + tl.arange(0, ROWS)
        total += tl.load(parts_ptr + p[:, None] * dim + d[None, :], mask=(p < programs)[:, None] & (d < dim)[None, :], other=0.0)
    tl.store(dw_ptr + d, round_bf16(tl.sum(total, 0), SOFT).to(dw_ptr.dtype.element_ty), mask=d < dim)
