"""The quantisers on the GPU, byte-equal to quantize.py: row-wise, row-wise and transposed in one read, 128x128, byte transpose, requantise.

Enters: BF16 or FP32 matrices in device memory, rows contiguous. Leaves: `BlockScaled` in the layouts the GEMMs read.
Layouts: codes row-major; scales of 1x128 groups column-major with a leading stride rounded up to 4 (DeepGEMM's TMA layout), the rounding
filled with zeros; scales of 128x128 blocks row-major. Transposed codes have their last axis padded to a multiple of 128 with zero codes.
Invariants: every output byte is written; an empty matrix launches nothing; offsets are 64-bit; no host synchronisation.
Left out: quantisers fused with the operation before them (triton_fused.py).

Legend: R rows and C columns of the input; one program owns a tile.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled, num_blocks
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK, WEIGHT_BLOCK, check_input
from jetrl_megatron.fp8.triton_cast import (
    cast_format,
    contiguous_rows,
    group_scale,
    inverse,
    largest_bits,
    magnitude_bits,
    to_bytes,
    to_words,
)
from jetrl_megatron.fp8.triton_source import FP8, PLAIN, Source, load_source

E4M3 = torch.float8_e4m3fn
ROW_TILE = 32
"""Rows of one program of the row-wise quantiser."""
ROW_WARPS = 4
TILE_WARPS = 8
"""Warps of one program that owns a 128x128 tile."""
NONE, GROUPED, BLOCKED = 0, 1, 2
"""How a tile's output is scaled: not written, in 1x128 groups, as one 128x128 block."""


def quantize(
    x: torch.Tensor, block: tuple[int, int], *, dtype: torch.dtype = E4M3, scale_format: ScaleFormat = ScaleFormat.fp32
) -> BlockScaled:
    """`quantize.quantize` for blocks (1, 128) and (128, 128); raises ValueError on another block."""
    source = _plain(x, dtype)
    if block == ROW_BLOCK:
        return quantize_rows(source, dtype=dtype, scale_format=scale_format)
    if block == WEIGHT_BLOCK:
        return quantize_tiles(source, BLOCKED, NONE, dtype=dtype, scale_format=scale_format)[0]
    raise ValueError(
        f"block is {block}; the GPU quantiser writes {ROW_BLOCK} and {WEIGHT_BLOCK}, and (128, 1) as quantize_dual's transposed copy"
    )


def quantize_dual(
    x: torch.Tensor, *, dtype: torch.dtype = E4M3, scale_format: ScaleFormat = ScaleFormat.fp32, t_block: tuple[int, int] = ROW_BLOCK
) -> tuple[BlockScaled, BlockScaled]:
    """`quantize.quantize_dual` in one read of x."""
    t_mode = GROUPED if t_block == ROW_BLOCK else BLOCKED
    return quantize_tiles(_plain(x, dtype), GROUPED, t_mode, dtype=dtype, scale_format=scale_format)


def quantize_weight(
    w: torch.Tensor, *, scale_format: ScaleFormat = ScaleFormat.fp32, with_transpose: bool = True
) -> tuple[BlockScaled, BlockScaled | None]:
    """`quantize.quantize_weight`, in one read of w where its rows are a multiple of 128."""
    source = _plain(w, E4M3)
    whole = w.shape[0] % GROUP == 0
    t_mode = BLOCKED if with_transpose and whole else NONE
    codes, codes_t = quantize_tiles(source, BLOCKED, t_mode, dtype=E4M3, scale_format=scale_format)
    return codes, transpose(codes) if with_transpose and not whole else codes_t


def requantize_transposed(
    x: BlockScaled, *, scale_format: ScaleFormat = ScaleFormat.fp32, t_block: tuple[int, int] = ROW_BLOCK
) -> BlockScaled:
    """`quantize.requantize_transposed` without a full-precision copy in memory; x in E4M3."""
    assert x.block == ROW_BLOCK and x.data.dtype is E4M3, (x.block, x.data.dtype)
    source = Source(FP8, x.data.view(torch.uint8), x.shape[1], x.scale)
    return quantize_tiles(source, NONE, GROUPED if t_block == ROW_BLOCK else BLOCKED, dtype=E4M3, scale_format=scale_format)[1]


def transpose(w: BlockScaled) -> BlockScaled:
    """`BlockScaled.transpose` with the bytes moved by one kernel."""
    rows, cols = w.shape
    codes = torch.empty((cols, rows), dtype=torch.uint8, device=w.data.device)
    if w.data.numel():
        source = w.data.view(torch.uint8)
        grid = (num_blocks(rows, GROUP), num_blocks(cols, GROUP))
        _transpose_kernel[grid](source, codes, rows, cols, source.stride(0), num_warps=TILE_WARPS)
    return BlockScaled(codes.view(w.data.dtype), w.scale.t().contiguous(), (w.block[1], w.block[0]))


def quantize_rows(source: Source, *, dtype: torch.dtype, scale_format: ScaleFormat) -> BlockScaled:
    """The source in 1x128 groups."""
    rows, cols = source.x.shape[0], source.cols
    out = empty_grouped(rows, cols, dtype, source.x.device)
    if rows and cols:
        _row_kernel[(triton.cdiv(rows, ROW_TILE), num_blocks(cols, GROUP))](
            *source.arguments(),
            out.data.view(torch.uint8),
            out.scale,
            out.scale.stride(1),
            KIND=source.kind,
            EVEN=rows % ROW_TILE == 0 and cols % GROUP == 0,
            TILE=ROW_TILE,
            num_warps=ROW_WARPS,
            F=cast_format(source.x.dtype, dtype, scale_format),
        )
    return out


def quantize_tiles(
    source: Source, row_mode: int, t_mode: int, *, dtype: torch.dtype, scale_format: ScaleFormat
) -> tuple[BlockScaled | None, BlockScaled | None]:
    """(the source scaled as `row_mode`, its transpose, padded, scaled as `t_mode`), None where the mode is NONE."""
    rows, cols = source.x.shape[0], source.cols
    row_out = _empty(row_mode, rows, cols, dtype, source.x.device)
    t_out = _empty(t_mode, cols, num_blocks(rows, GROUP) * GROUP, dtype, source.x.device)
    if rows and cols:
        row_, t_ = row_out or t_out, t_out or row_out
        _tile_kernel[(num_blocks(rows, GROUP), num_blocks(cols, GROUP))](
            *source.arguments(),
            row_.data.view(torch.uint8),
            row_.scale,
            *row_.scale.stride(),
            t_.data.view(torch.int32) if t_out is not None else t_.data.view(torch.uint8),
            t_.scale,
            *t_.scale.stride(),
            KIND=source.kind,
            ROW=row_mode,
            T=t_mode,
            EVEN=rows % GROUP == 0 and cols % GROUP == 0,
            num_warps=TILE_WARPS,
            F=cast_format(source.x.dtype, dtype, scale_format),
        )
    return row_out, t_out


def empty_grouped(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> BlockScaled:
    """Unwritten codes [rows, cols] with scales of 1x128 groups in the GEMM's layout; its rounding is zero-filled."""
    leading = (rows + 3) // 4 * 4
    make = torch.empty if leading == rows else torch.zeros
    scale = make((num_blocks(cols, GROUP), leading), dtype=torch.float32, device=device).t()[:rows]
    return BlockScaled(torch.empty((rows, cols), dtype=dtype, device=device), scale, ROW_BLOCK)


def _empty(mode: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> BlockScaled | None:
    if mode == NONE:
        return None
    if mode == GROUPED:
        return empty_grouped(rows, cols, dtype, device)
    grid = num_blocks(rows, GROUP), num_blocks(cols, GROUP)
    scale = torch.empty(grid, dtype=torch.float32, device=device)
    return BlockScaled(torch.empty((rows, cols), dtype=dtype, device=device), scale, WEIGHT_BLOCK)


def _plain(x: torch.Tensor, dtype: torch.dtype) -> Source:
    """A checked matrix as the source of a kernel."""
    check_input(x, dtype)
    return Source(PLAIN, contiguous_rows(x), x.shape[1])


@triton.jit
def _row_kernel(
    x_ptr,
    aux_ptr,
    weight_ptr,
    rows,
    cols,
    x_stride,
    aux_stride_r,
    aux_stride_c,
    codes_ptr,
    scale_ptr,
    scale_stride_c,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    F: tl.constexpr,
):
    """TILE rows of one group of 128 columns."""
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    x = load_source(x_ptr, aux_ptr, weight_ptr, r, c, rows, cols, x_stride, aux_stride_r, aux_stride_c, KIND, EVEN, F.soft)
    scale_ptr += tl.program_id(1).to(tl.int64) * scale_stride_c
    _store_rows(x, codes_ptr, scale_ptr, r, c, rows, cols, EVEN, F)


@triton.jit
def _tile_kernel(
    x_ptr,
    aux_ptr,
    weight_ptr,
    rows,
    cols,
    x_stride,
    aux_stride_r,
    aux_stride_c,
    row_codes_ptr,
    row_scale_ptr,
    row_scale_stride_r,
    row_scale_stride_c,
    t_codes_ptr,
    t_scale_ptr,
    t_scale_stride_r,
    t_scale_stride_c,
    KIND: tl.constexpr,
    ROW: tl.constexpr,
    T: tl.constexpr,
    EVEN: tl.constexpr,
    F: tl.constexpr,
):
    """One 128x128 tile: read once, written row-wise, transposed, or both.

    The tile is four [32, 128] parts, part j with the rows 4 i + j: the codes of four neighbouring rows then meet in one thread as one
    32-bit word, and the transpose through shared memory moves words instead of bytes.
    """
    block_r, block_c = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    r = block_r * 128 + 4 * tl.arange(0, 32)
    c = block_c * 128 + tl.arange(0, 128)
    x0 = load_source(x_ptr, aux_ptr, weight_ptr, r, c, rows, cols, x_stride, aux_stride_r, aux_stride_c, KIND, EVEN, F.soft)
    x1 = load_source(x_ptr, aux_ptr, weight_ptr, r + 1, c, rows, cols, x_stride, aux_stride_r, aux_stride_c, KIND, EVEN, F.soft)
    x2 = load_source(x_ptr, aux_ptr, weight_ptr, r + 2, c, rows, cols, x_stride, aux_stride_r, aux_stride_c, KIND, EVEN, F.soft)
    x3 = load_source(x_ptr, aux_ptr, weight_ptr, r + 3, c, rows, cols, x_stride, aux_stride_r, aux_stride_c, KIND, EVEN, F.soft)
    words = tl.arange(0, 32)
    t_ptrs = t_codes_ptr + c[:, None] * (tl.num_programs(0).to(tl.int64) * 32) + (block_r * 32 + words)[None, :]
    col_mask = None if EVEN else c < cols
    t_mask = None if EVEN else (c < cols)[:, None]
    if ROW == 2 or T != 0:
        amax_c = tl.max(largest_bits(x0, x1, x2, x3, F), 0)
        if ROW == 2 or T == 2:
            scale = group_scale(tl.max(amax_c, 0), F)
            high, low = inverse(tl.full([128], 0.0, dtype=tl.float32) + scale, F)
        else:
            scale_c = group_scale(amax_c, F)
            high, low = inverse(scale_c, F)
        if ROW == 2:
            _store_bytes(to_bytes(x0, high[None, :], low[None, :], F), row_codes_ptr, r, c, rows, cols, EVEN)
            _store_bytes(to_bytes(x1, high[None, :], low[None, :], F), row_codes_ptr, r + 1, c, rows, cols, EVEN)
            _store_bytes(to_bytes(x2, high[None, :], low[None, :], F), row_codes_ptr, r + 2, c, rows, cols, EVEN)
            _store_bytes(to_bytes(x3, high[None, :], low[None, :], F), row_codes_ptr, r + 3, c, rows, cols, EVEN)
            tl.store(row_scale_ptr + block_r * row_scale_stride_r + block_c * row_scale_stride_c, scale)
        if T != 0:
            tl.store(t_ptrs, tl.trans(to_words(x0, x1, x2, x3, high[None, :], low[None, :], F)), mask=t_mask)
        if T == 1:
            tl.store(t_scale_ptr + block_r * t_scale_stride_c + c * t_scale_stride_r, scale_c, mask=col_mask)
        if T == 2:
            tl.store(t_scale_ptr + block_c * t_scale_stride_r + block_r * t_scale_stride_c, scale)
    if ROW == 1:
        row_scale_ptr += block_c * row_scale_stride_c
        _store_rows(x0, row_codes_ptr, row_scale_ptr, r, c, rows, cols, EVEN, F)
        _store_rows(x1, row_codes_ptr, row_scale_ptr, r + 1, c, rows, cols, EVEN, F)
        _store_rows(x2, row_codes_ptr, row_scale_ptr, r + 2, c, rows, cols, EVEN, F)
        _store_rows(x3, row_codes_ptr, row_scale_ptr, r + 3, c, rows, cols, EVEN, F)


@triton.jit
def _store_bytes(codes, codes_ptr, r, c, rows, cols, EVEN: tl.constexpr):
    """Rows r and columns c of a row-major byte matrix."""
    mask = None if EVEN else (r < rows)[:, None] & (c < cols)[None, :]
    tl.store(codes_ptr + r[:, None] * cols + c[None, :], codes, mask=mask)


@triton.jit
def _store_rows(
    x,
    codes_ptr,
    scale_ptr,
    r,
    c,
    rows,
    cols,
    EVEN: tl.constexpr,
    F: tl.constexpr,
):
    """Quantise rows of one group of 128 columns; scale_ptr points at the group's column of scales."""
    scale = group_scale(tl.max(magnitude_bits(x, F), 1), F)
    high, low = inverse(scale, F)
    _store_bytes(to_bytes(x, high[:, None], low[:, None], F), codes_ptr, r, c, rows, cols, EVEN)
    tl.store(scale_ptr + r, scale, mask=None if EVEN else r < rows)


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, rows, cols, x_stride):
    """One 128x128 tile of bytes."""
    r = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    c = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    tile = tl.load(x_ptr + r[:, None] * x_stride + c[None, :], mask=mask, other=0)
    tl.store(out_ptr + c[:, None] * rows + r[None, :], tl.trans(tile), mask=tl.trans(mask))
