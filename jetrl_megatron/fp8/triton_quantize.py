"""The quantisers on the GPU, byte-equal to quantize.py: row-wise, row-wise and transposed in one read, 128x128, byte transpose.

Enters: BF16 or FP32 matrices in device memory, rows contiguous. Leaves: `BlockScaled` in the layouts the GEMMs read.
Layouts: codes row-major; scales of 1x128 groups column-major with a leading stride rounded up to 4 (DeepGEMM's TMA layout), the rounding
filled with zeros; scales of 128x128 blocks row-major. Transposed codes have their last axis padded to a multiple of 128 with zero codes.
Invariants: every output byte is written; an empty matrix launches nothing; a tile's place is a 64-bit offset, and places inside a tile are
bounded to 32 bits (triton_cast.py, `contiguous_rows`); no host synchronisation.
Left out: quantisers fused with the operation before them (triton_fused.py), FP8 quantised anew (triton_requantize.py).

Legend: R rows and C columns of the input; one program owns a tile.
"""

import torch

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled, leading_rows, num_blocks
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK, WEIGHT_BLOCK, WeightBuffers, check_input
from jetrl_megatron.fp8.triton_cast import MAX_GRID_Y, cast_format, contiguous_rows
from jetrl_megatron.fp8.triton_kernels import row_kernel, tile_kernel, transpose_kernel
from jetrl_megatron.fp8.triton_source import PLAIN, SWIGLU_GRAD, Source

E4M3 = torch.float8_e4m3fn
ROW_TILE = 16
"""Rows of one program of the row-wise quantiser; with 32, SwiGLU in front of it takes 95 registers of a thread, and a tenth longer."""
ROW_WARPS = 4
TILE_WARPS = 8
"""Warps of one program that owns a 128x128 tile."""
TILE_REGISTERS = 80
"""Registers of its threads at most: three programs then fit on a multiprocessor of an H100 or H200. Not where values come one by one
(`CastFormat.plain`): there the limit costs spills."""
NONE, GROUPED, BLOCKED = 0, 1, 2
"""How a tile's output is scaled: not written (the transpose alone), in 1x128 groups, as one 128x128 block."""


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
    row_wise, transposed = quantize_operands(_plain(x, dtype), t_block, dtype=dtype, scale_format=scale_format)
    assert transposed is not None
    return row_wise, transposed


def quantize_weight(
    w: torch.Tensor, *, scale_format: ScaleFormat = ScaleFormat.fp32, with_transpose: bool = True, out: WeightBuffers | None = None
) -> WeightBuffers:
    """`quantize.quantize_weight`, in one read of w where its rows are a multiple of 128; nothing is allocated then with `out`."""
    source = _plain(w, E4M3)
    whole = w.shape[0] % GROUP == 0
    t_mode = BLOCKED if with_transpose and whole else NONE
    into, into_t = out or (None, None)
    assert out is None or (into_t is None) != with_transpose, "with_transpose is not that of the former call"
    codes, codes_t = quantize_tiles(source, BLOCKED, t_mode, dtype=E4M3, scale_format=scale_format, row_out=into, t_out=into_t)
    if with_transpose and not whole:
        codes_t = transpose(codes)
        if into_t is not None:
            codes_t = into_t.copy_(codes_t)
    return codes, codes_t


def transpose(w: BlockScaled) -> BlockScaled:
    """`BlockScaled.transpose` with the bytes moved by one kernel."""
    rows, cols = w.shape
    codes = torch.empty((cols, rows), dtype=torch.uint8, device=w.data.device)
    if w.data.numel():
        source = w.data.view(torch.uint8)
        grid = (num_blocks(rows, GROUP), num_blocks(cols, GROUP))
        transpose_kernel[grid](source, codes, rows, cols, source.stride(0), num_warps=TILE_WARPS)
    return BlockScaled(codes.view(w.data.dtype), w.scale.t().contiguous(), (w.block[1], w.block[0]))


def quantize_operands(
    source: Source, t_block: tuple[int, int] | None, *, dtype: torch.dtype, scale_format: ScaleFormat
) -> tuple[BlockScaled, BlockScaled | None]:
    """(the source in 1x128 groups, its transpose in `t_block`, padded, or None without one), in one read.

    Raises ValueError on another `t_block` than (1, 128) and (128, 128).
    """
    if t_block is None:
        return quantize_rows(source, dtype=dtype, scale_format=scale_format), None
    return quantize_tiles(source, GROUPED, scale_mode(t_block), dtype=dtype, scale_format=scale_format)


def scale_mode(block: tuple[int, int]) -> int:
    """How a tile is scaled for `block`; raises ValueError on another than (1, 128) and (128, 128)."""
    if block == ROW_BLOCK:
        return GROUPED
    if block == WEIGHT_BLOCK:
        return BLOCKED
    raise ValueError(f"t_block is {block}; the GPU quantiser writes a transpose in {ROW_BLOCK} and {WEIGHT_BLOCK}")


def quantize_rows(source: Source, *, dtype: torch.dtype, scale_format: ScaleFormat) -> BlockScaled:
    """The source in 1x128 groups."""
    rows, cols = source.x.shape[0], source.cols
    out = empty_grouped(rows, cols, dtype, source.x.device)
    if rows and cols:
        row_kernel[(num_blocks(rows, ROW_TILE), num_blocks(cols, GROUP))](
            *source.arguments(),
            out.data.view(torch.uint8),
            out.scale,
            out.scale.stride(1),
            KIND=source.kind,
            EVEN=rows % ROW_TILE == 0 and cols % GROUP == 0,
            TILE=ROW_TILE,
            num_warps=ROW_WARPS,
            F=cast_format(source.paired, dtype, scale_format),
        )
    return out


def quantize_tiles(
    source: Source,
    row_mode: int,
    t_mode: int,
    *,
    dtype: torch.dtype,
    scale_format: ScaleFormat,
    row_out: BlockScaled | None = None,
    t_out: BlockScaled | None = None,
) -> tuple[BlockScaled, BlockScaled | None]:
    """(the source scaled as `row_mode`, its transpose, padded, scaled as `t_mode`, or None where that is NONE).

    row_out, t_out: what a former call with the same modes and shape returned, to be overwritten.
    """
    rows, cols = source.x.shape[0], source.cols
    row_out = scaled_buffer(row_out, row_mode, rows, cols, dtype, source.x.device)
    padded_rows = num_blocks(rows, GROUP) * GROUP
    t_out = None if t_mode == NONE else scaled_buffer(t_out, t_mode, cols, padded_rows, dtype, source.x.device)
    if rows and cols:
        t_ = t_out or row_out
        row_blocks, col_blocks = num_blocks(rows, GROUP), num_blocks(cols, GROUP)
        # What reads one matrix is faster along its rows, what reads several down their columns.
        across = source.kind == PLAIN and row_blocks <= MAX_GRID_Y
        grid = (col_blocks, row_blocks) if across else (row_blocks, col_blocks)
        if source.kind == SWIGLU_GRAD:
            grid = (2 * row_blocks, col_blocks // 2)
        cast = cast_format(source.paired, dtype, scale_format)
        tile_kernel[grid](
            *source.arguments(),
            row_out.data.view(torch.uint8),
            row_out.scale,
            *row_out.scale.stride(),
            t_.data.view(torch.int32) if t_out is not None else t_.data.view(torch.uint8),
            t_.scale,
            *t_.scale.stride(),
            KIND=source.kind,
            ROW=row_mode,
            T=t_mode,
            ACROSS=across,
            EVEN=rows % GROUP == 0 and cols % GROUP == 0,
            num_warps=TILE_WARPS,
            maxnreg=None if cast.plain else TILE_REGISTERS,
            F=cast,
        )
    return row_out, t_out


def empty_grouped(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> BlockScaled:
    """Unwritten codes [rows, cols] with scales of 1x128 groups in the GEMM's layout; its rounding is zero-filled."""
    leading, groups = leading_rows(rows), num_blocks(cols, GROUP)
    # empty_strided takes half of empty's time on the host, and there are dozens of calls a layer.
    if leading == rows:
        scale = torch.empty_strided((rows, groups), (1, rows), dtype=torch.float32, device=device)
    else:
        scale = torch.zeros((groups, leading), dtype=torch.float32, device=device).t()[:rows]
    return BlockScaled(torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device), scale, ROW_BLOCK)


def scaled_buffer(old: BlockScaled | None, mode: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> BlockScaled:
    """`old`, counted as changed, or unwritten codes [rows, cols] and scales, as `mode` scales them: GROUPED or BLOCKED."""
    if old is not None:
        assert (old.shape, old.block, old.data.dtype) == ((rows, cols), (ROW_BLOCK, WEIGHT_BLOCK)[mode == BLOCKED], dtype), old.shape
        torch.autograd.graph.increment_version((old.data, old.scale))  # a kernel's writes are not seen
        return old
    if mode == GROUPED:
        return empty_grouped(rows, cols, dtype, device)
    grid = num_blocks(rows, GROUP), num_blocks(cols, GROUP)
    scale = torch.empty_strided(grid, (grid[1], 1), dtype=torch.float32, device=device)
    return BlockScaled(torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device), scale, WEIGHT_BLOCK)


def _plain(x: torch.Tensor, dtype: torch.dtype) -> Source:
    """A checked matrix as the source of a kernel."""
    check_input(x, dtype)
    return Source(PLAIN, contiguous_rows(x), x.shape[1])
