"""The Triton kernels of the quantisers: rows, 128x128 tiles, byte transpose.

Enters: the arguments of a `Source`, output pointers and strides. Leaves: codes and scales in memory, every byte written.
Left out: shapes, allocation and launch (triton_quantize.py), arithmetic (triton_cast.py), reading (triton_source.py), FP8 quantised anew
(triton_requantize.py).

The number of rows is never a compile-time constant: with rows = 1 the assembler (ptxas of Triton 3.6) folded the empty rows of a tile and
lost the upper halves of words, so that codes behind a NaN came out as zeros. Tests hold one-row inputs for this.

Legend: r rows and p column pairs of a program, counted from its first ones; rows_left and cols_left: of the matrix from there on.
A tile is four [32, 128] parts, part j with the rows 4 i + j: a0, b0 to a3, b3 are their pairs (triton_source.py).
"""

import triton
import triton.language as tl

from jetrl_megatron.fp8.triton_cast import column_amax_bits, group_scale, inverse, row_amax_bits, to_byte_pairs, to_bytes, to_words
from jetrl_megatron.fp8.triton_source import load_pairs, load_tile, split_pair, tile_at


@triton.jit(do_not_specialize=["rows"])
def row_kernel(
    x_ptr, aux_ptr, weight_ptr, rows, cols, x_stride, aux_stride_r, codes_ptr, scale_ptr, scale_stride_c,
    KIND: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """TILE rows of one group of 128 columns."""
    first_r, group = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64)
    first_c = group * 128
    x_ptr, aux_ptr, weight_ptr = tile_at(x_ptr, aux_ptr, weight_ptr, first_r, first_c, x_stride, aux_stride_r, KIND)
    rows_left, cols_left = (rows - first_r).to(tl.int32), (cols - first_c).to(tl.int32)
    r, p = tl.arange(0, TILE), tl.arange(0, 64)
    a, b = load_pairs(x_ptr, aux_ptr, weight_ptr, r, p, rows_left, cols_left, cols, x_stride, aux_stride_r, KIND, EVEN, F)
    scale = group_scale(row_amax_bits(a, b, F), F)
    high, low = inverse(scale[:, None], F)
    _store_codes(a, b, high, low, codes_ptr + first_r * cols + first_c, r, p, rows_left, cols_left, cols, EVEN, F)
    tl.store(scale_ptr + group * scale_stride_c + first_r + r, scale, mask=None if EVEN else r < rows_left)


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    x_ptr, aux_ptr, weight_ptr, rows, cols, x_stride, aux_stride_r,
    row_codes_ptr, row_scale_ptr, row_scale_stride_r, row_scale_stride_c, t_codes_ptr, t_scale_ptr, t_scale_stride_r, t_scale_stride_c,
    KIND: tl.constexpr, ROW: tl.constexpr, T: tl.constexpr, ACROSS: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """One 128x128 tile: read once, written row-wise, transposed, or both. ACROSS: the tiles of neighbours lie in one row of tiles.

    All that is taken of the magnitudes comes before the first store, which would hold up the loads behind it, and that of the rows before
    that of the columns: the other way round magnitudes stay in registers, and two programs fit on a multiprocessor instead of three.
    """
    block_r, block_c, row_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(0).to(tl.int64)
    if ACROSS:
        block_r, block_c, row_blocks = block_c, block_r, tl.num_programs(1).to(tl.int64)
    read_c, half = block_c, cols
    if KIND == 3:
        # Neighbours own the d_gate and the d_up tile of the same operands: what the second reads, the first has just brought into cache.
        half = cols // 2
        block_c += (block_r % 2) * (half // 128)
        block_r, row_blocks = block_r // 2, row_blocks // 2
    first_r, first_c = block_r * 128, block_c * 128
    x_ptr, aux_ptr, weight_ptr = tile_at(x_ptr, aux_ptr, weight_ptr, first_r, read_c * 128, x_stride, aux_stride_r, KIND)
    rows_left, cols_left = (rows - first_r).to(tl.int32), (cols - first_c).to(tl.int32)
    a0, b0, a1, b1, a2, b2, a3, b3 = load_tile(
        x_ptr, aux_ptr, weight_ptr, rows_left, cols_left, half, x_stride, aux_stride_r, block_c == read_c, KIND, EVEN, F
    )
    row_codes_ptr += first_r * cols + first_c
    if ROW == 1:
        bits0, bits1 = row_amax_bits(a0, b0, F), row_amax_bits(a1, b1, F)
        bits2, bits3 = row_amax_bits(a2, b2, F), row_amax_bits(a3, b3, F)
    if ROW == 2 or T != 0:
        even, odd = column_amax_bits(a0, b0, a1, b1, a2, b2, a3, b3, F)
    if ROW == 1:
        s0, s1, s2, s3 = group_scale(bits0, F), group_scale(bits1, F), group_scale(bits2, F), group_scale(bits3, F)
        row_scale_ptr += block_c * row_scale_stride_c + first_r
        _store_row_groups(a0, b0, a1, b1, a2, b2, a3, b3, s0, s1, s2, s3, row_codes_ptr, row_scale_ptr, rows_left, cols_left, cols, EVEN, F)
    if ROW == 2 or T != 0:
        if ROW == 2 or T == 2:
            block_bits = tl.max(tl.maximum(even, odd), 0)
            block_scale = group_scale(block_bits, F)
            even = tl.zeros_like(even) + block_bits
            odd = even
        even_scale, odd_scale = group_scale(even, F), group_scale(odd, F)
        if ROW == 2:
            high, low = inverse(even_scale[None, :], F)
            _store_tile(a0, b0, a1, b1, a2, b2, a3, b3, high, low, row_codes_ptr, rows_left, cols_left, cols, EVEN, F)
            tl.store(row_scale_ptr + block_r * row_scale_stride_r + block_c * row_scale_stride_c, block_scale)
        if T != 0:
            pitch = row_blocks * 32
            t_codes_ptr += first_c * pitch + block_r * 32
            _store_transposed(a0, b0, a1, b1, a2, b2, a3, b3, even_scale, odd_scale, t_codes_ptr, pitch, cols_left, EVEN, F)
        if T == 1:
            c = tl.arange(0, 128)
            t_scale_ptr += block_r * t_scale_stride_c + first_c * t_scale_stride_r
            t_scale = tl.reshape(tl.join(even_scale, odd_scale), (128,))
            tl.store(t_scale_ptr + c * t_scale_stride_r, t_scale, mask=None if EVEN else c < cols_left)
        if T == 2:
            tl.store(t_scale_ptr + block_c * t_scale_stride_r + block_r * t_scale_stride_c, block_scale)


@triton.jit
def _store_row_groups(
    a0, b0, a1, b1, a2, b2, a3, b3, scale0, scale1, scale2, scale3, codes_ptr, scale_ptr, rows_left, cols_left, cols,
    EVEN: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Quantise a tile's rows, each by its own scale; all scales in one store: each one passes two barriers."""
    r, p = 4 * tl.arange(0, 32), tl.arange(0, 64)
    high, low = inverse(scale0[:, None], F)
    _store_codes(a0, b0, high, low, codes_ptr, r, p, rows_left, cols_left, cols, EVEN, F)
    high, low = inverse(scale1[:, None], F)
    _store_codes(a1, b1, high, low, codes_ptr, r + 1, p, rows_left, cols_left, cols, EVEN, F)
    high, low = inverse(scale2[:, None], F)
    _store_codes(a2, b2, high, low, codes_ptr, r + 2, p, rows_left, cols_left, cols, EVEN, F)
    high, low = inverse(scale3[:, None], F)
    _store_codes(a3, b3, high, low, codes_ptr, r + 3, p, rows_left, cols_left, cols, EVEN, F)
    row = tl.arange(0, 128)
    scale = tl.reshape(tl.join(tl.join(scale0, scale2), tl.join(scale1, scale3)), (128,))
    tl.store(scale_ptr + row, scale, mask=None if EVEN else row < rows_left)


@triton.jit
def _store_tile(a0, b0, a1, b1, a2, b2, a3, b3, high, low, codes_ptr, rows_left, cols_left, cols, EVEN: tl.constexpr, F: tl.constexpr):
    """Quantise a tile by one inverse scale a column, [1, columns], into a byte matrix with rows of `cols`."""
    r, p = 4 * tl.arange(0, 32), tl.arange(0, 64)
    _store_codes(a0, b0, high, low, codes_ptr, r, p, rows_left, cols_left, cols, EVEN, F)
    _store_codes(a1, b1, high, low, codes_ptr, r + 1, p, rows_left, cols_left, cols, EVEN, F)
    _store_codes(a2, b2, high, low, codes_ptr, r + 2, p, rows_left, cols_left, cols, EVEN, F)
    _store_codes(a3, b3, high, low, codes_ptr, r + 3, p, rows_left, cols_left, cols, EVEN, F)


@triton.jit
def _store_transposed(a0, b0, a1, b1, a2, b2, a3, b3, even_scale, odd_scale, codes_ptr, pitch, cols_left, EVEN: tl.constexpr,
                      F: tl.constexpr):  # fmt: skip
    """Quantise a tile by a scale for each column, even and odd ones apart, into the transpose, int32 words with rows of `pitch`.

    The codes of four neighbouring rows, which one thread holds, are one word: shared memory moves words instead of bytes.
    """
    even_high, even_low = inverse(even_scale[None, :], F)
    odd_high, odd_low = inverse(odd_scale[None, :], F)
    x0, y0 = split_pair(a0, b0, False, F)
    x1, y1 = split_pair(a1, b1, False, F)
    x2, y2 = split_pair(a2, b2, False, F)
    x3, y3 = split_pair(a3, b3, False, F)
    p = tl.arange(0, 64)
    ptrs = codes_ptr + (2 * p[:, None] * pitch.to(tl.int32) + tl.arange(0, 32)[None, :])
    even_mask, odd_mask = None if EVEN else (2 * p < cols_left)[:, None], None if EVEN else (2 * p + 1 < cols_left)[:, None]
    tl.store(ptrs, tl.trans(_words(x0, x1, x2, x3, even_high, even_low, F)), mask=even_mask)
    tl.store(ptrs + pitch, tl.trans(_words(y0, y1, y2, y3, odd_high, odd_low, F)), mask=odd_mask)


@triton.jit
def _words(x0, x1, x2, x3, high, low, F: tl.constexpr):
    """`to_words` with the inverse of one scale a column, [1, columns]."""
    return to_words(x0, x1, x2, x3, tl.broadcast_to(high, x0.shape), tl.broadcast_to(low, x0.shape), F)


@triton.jit
def _store_codes(a, b, high, low, codes_ptr, r, p, rows_left, cols_left, cols, EVEN: tl.constexpr, F: tl.constexpr):
    """Quantise a pair with given inverse scales, [rows, 1] or [1, columns], into a byte matrix with rows of `cols`."""
    x, y = split_pair(a, b, True, F)
    high, low = tl.broadcast_to(high, x.shape), tl.broadcast_to(low, x.shape)
    if F.plain:
        offset = r[:, None] * cols + 2 * p[None, :]
        in_rows = (r < rows_left)[:, None]
        tl.store(codes_ptr + offset, to_bytes(x, high, low, F), mask=in_rows & (2 * p < cols_left)[None, :])
        tl.store(codes_ptr + offset + 1, to_bytes(y, high, low, F), mask=in_rows & (2 * p + 1 < cols_left)[None, :])
    else:
        pairs_ptr = codes_ptr.to(tl.pointer_type(tl.int16)) + r[:, None] * (cols // 2) + p[None, :]
        mask = None if EVEN else (r < rows_left)[:, None] & (2 * p < cols_left)[None, :]
        tl.store(pairs_ptr, to_byte_pairs(x, y, high, low, F), mask=mask)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_stride):
    """One 128x128 tile of bytes."""
    r = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    c = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    tile = tl.load(x_ptr + r[:, None] * x_stride + c[None, :], mask=mask, other=0)
    tl.store(out_ptr + c[:, None] * rows + r[None, :], tl.trans(tile), mask=tl.trans(mask))
