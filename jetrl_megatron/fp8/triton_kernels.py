"""The Triton kernels of the quantisers: rows, 128x128 tiles, byte transpose.

Enters: the arguments of a `Source`, output pointers and strides. Leaves: codes and scales in memory, every byte written.
Left out: shapes, allocation and launch (triton_quantize.py), arithmetic (triton_cast.py), reading (triton_source.py).

The number of rows is never a compile-time constant: with rows = 1 the assembler (ptxas of Triton 3.6) folded the empty rows of a tile and
lost the upper halves of words, so that codes behind a NaN came out as zeros. Tests hold one-row inputs for this.

Legend: r rows and p column pairs of a program, counted from its first ones; `rows` and `cols` are then what is left from there.
"""

import triton
import triton.language as tl

from jetrl_megatron.fp8.triton_cast import column_amax_bits, group_scale, inverse, row_amax_bits, to_byte_pairs, to_bytes, to_words
from jetrl_megatron.fp8.triton_source import load_d_gate, load_d_up, load_pairs, split_pair, tile_at


@triton.jit(do_not_specialize=["rows"])
def row_kernel(
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
    first_r, group = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64)
    first_c = group * 128
    x_ptr, aux_ptr, weight_ptr = tile_at(x_ptr, aux_ptr, weight_ptr, first_r, first_c, x_stride, aux_stride_r, aux_stride_c, KIND)
    rows, left = (rows - first_r).to(tl.int32), (cols - first_c).to(tl.int32)
    r, p = tl.arange(0, TILE), tl.arange(0, 64)
    a, b = load_pairs(x_ptr, aux_ptr, weight_ptr, r, p, rows, left, cols, x_stride, aux_stride_r, KIND, EVEN, F)
    scale = group_scale(row_amax_bits(a, b, F), F)
    _store_rows(a, b, scale, codes_ptr + first_r * cols + first_c, r, p, rows, left, cols, EVEN, F)
    tl.store(scale_ptr + group * scale_stride_c + first_r + r, scale, mask=None if EVEN else r < rows)


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
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
    ACROSS: tl.constexpr,
    EVEN: tl.constexpr,
    F: tl.constexpr,
):
    """One 128x128 tile: read once, written row-wise, transposed, or both. ACROSS: the tiles of neighbours lie in one row of tiles.

    The tile is four [32, 128] parts, part j with the rows 4 i + j: the codes of four neighbouring rows then meet in one thread as one
    32-bit word, and the transpose through shared memory moves words instead of bytes.
    What is taken of the magnitudes comes first, and the scales of all rows are stored at once: so fewer registers are held (three
    programs fit on a multiprocessor instead of two) and fewer barriers passed.
    """
    block_r, block_c, row_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(0).to(tl.int64)
    half = cols
    if ACROSS:
        block_r, block_c, row_blocks = block_c, block_r, tl.num_programs(1).to(tl.int64)
    read_c = block_c
    if KIND == 4:
        # Neighbours own the d_gate and the d_up tile of the same operands: what the second reads, the first has just brought into cache.
        half = cols // 2
        block_c += (block_r % 2) * (half // 128)
        block_r, row_blocks = block_r // 2, row_blocks // 2
    first_r, first_c = block_r * 128, block_c * 128
    x_ptr, aux_ptr, weight_ptr = tile_at(x_ptr, aux_ptr, weight_ptr, first_r, read_c * 128, x_stride, aux_stride_r, aux_stride_c, KIND)
    rows, left = (rows - first_r).to(tl.int32), (cols - first_c).to(tl.int32)
    r, p = 4 * tl.arange(0, 32), tl.arange(0, 64)
    if KIND == 4:
        if block_c == read_c:
            a0, b0 = load_d_gate(x_ptr, aux_ptr, r, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a1, b1 = load_d_gate(x_ptr, aux_ptr, r + 1, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a2, b2 = load_d_gate(x_ptr, aux_ptr, r + 2, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a3, b3 = load_d_gate(x_ptr, aux_ptr, r + 3, p, rows, half, x_stride, aux_stride_r, EVEN, F)
        else:
            a0, b0 = load_d_up(x_ptr, aux_ptr, r, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a1, b1 = load_d_up(x_ptr, aux_ptr, r + 1, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a2, b2 = load_d_up(x_ptr, aux_ptr, r + 2, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a3, b3 = load_d_up(x_ptr, aux_ptr, r + 3, p, rows, half, x_stride, aux_stride_r, EVEN, F)
    else:
        a0, b0 = load_pairs(x_ptr, aux_ptr, weight_ptr, r, p, rows, left, half, x_stride, aux_stride_r, KIND, EVEN, F)
        a1, b1 = load_pairs(x_ptr, aux_ptr, weight_ptr, r + 1, p, rows, left, half, x_stride, aux_stride_r, KIND, EVEN, F)
        a2, b2 = load_pairs(x_ptr, aux_ptr, weight_ptr, r + 2, p, rows, left, half, x_stride, aux_stride_r, KIND, EVEN, F)
        a3, b3 = load_pairs(x_ptr, aux_ptr, weight_ptr, r + 3, p, rows, left, half, x_stride, aux_stride_r, KIND, EVEN, F)
    row_codes_ptr += first_r * cols + first_c
    if ROW == 1:
        bits0, bits1 = row_amax_bits(a0, b0, F), row_amax_bits(a1, b1, F)
        bits2, bits3 = row_amax_bits(a2, b2, F), row_amax_bits(a3, b3, F)
    if ROW == 2 or T != 0:
        even, odd = column_amax_bits(a0, b0, a1, b1, a2, b2, a3, b3, F)
    if ROW == 1:
        scale0, scale1, scale2, scale3 = group_scale(bits0, F), group_scale(bits1, F), group_scale(bits2, F), group_scale(bits3, F)
        _store_rows(a0, b0, scale0, row_codes_ptr, r, p, rows, left, cols, EVEN, F)
        _store_rows(a1, b1, scale1, row_codes_ptr, r + 1, p, rows, left, cols, EVEN, F)
        _store_rows(a2, b2, scale2, row_codes_ptr, r + 2, p, rows, left, cols, EVEN, F)
        _store_rows(a3, b3, scale3, row_codes_ptr, r + 3, p, rows, left, cols, EVEN, F)
        row = tl.arange(0, 128)
        row_scale = tl.reshape(tl.join(tl.join(scale0, scale2), tl.join(scale1, scale3)), (128,))
        row_scale_ptr += block_c * row_scale_stride_c + first_r
        tl.store(row_scale_ptr + row, row_scale, mask=None if EVEN else row < rows)
    if ROW == 2 or T != 0:
        if ROW == 2 or T == 2:
            block_bits = tl.max(tl.maximum(even, odd), 0)
            block_scale = group_scale(block_bits, F)
            even = tl.zeros_like(even) + block_bits
            odd = even
        even_scale, odd_scale = group_scale(even, F), group_scale(odd, F)
        even_high, even_low = inverse(even_scale[None, :], F)
        odd_high, odd_low = inverse(odd_scale[None, :], F)
        if ROW == 2:
            _store_codes(a0, b0, even_high, even_low, row_codes_ptr, r, p, rows, left, cols, EVEN, F)
            _store_codes(a1, b1, even_high, even_low, row_codes_ptr, r + 1, p, rows, left, cols, EVEN, F)
            _store_codes(a2, b2, even_high, even_low, row_codes_ptr, r + 2, p, rows, left, cols, EVEN, F)
            _store_codes(a3, b3, even_high, even_low, row_codes_ptr, r + 3, p, rows, left, cols, EVEN, F)
            tl.store(row_scale_ptr + block_r * row_scale_stride_r + block_c * row_scale_stride_c, block_scale)
        if T != 0:
            x0, y0 = split_pair(a0, b0, False, F)
            x1, y1 = split_pair(a1, b1, False, F)
            x2, y2 = split_pair(a2, b2, False, F)
            x3, y3 = split_pair(a3, b3, False, F)
            pitch = row_blocks * 32
            t_ptrs = t_codes_ptr + first_c * pitch + block_r * 32
            t_ptrs += 2 * p[:, None] * pitch.to(tl.int32) + tl.arange(0, 32)[None, :]
            even_mask, odd_mask = None if EVEN else (2 * p < left)[:, None], None if EVEN else (2 * p + 1 < left)[:, None]
            tl.store(t_ptrs, tl.trans(_words(x0, x1, x2, x3, even_high, even_low, F)), mask=even_mask)
            tl.store(t_ptrs + pitch, tl.trans(_words(y0, y1, y2, y3, odd_high, odd_low, F)), mask=odd_mask)
        if T == 1:
            c = tl.arange(0, 128)
            t_scale_ptr += block_r * t_scale_stride_c + first_c * t_scale_stride_r
            t_scale = tl.reshape(tl.join(even_scale, odd_scale), (128,))
            tl.store(t_scale_ptr + c * t_scale_stride_r, t_scale, mask=None if EVEN else c < left)
        if T == 2:
            tl.store(t_scale_ptr + block_c * t_scale_stride_r + block_r * t_scale_stride_c, block_scale)


@triton.jit
def _words(x0, x1, x2, x3, high, low, F: tl.constexpr):
    """`to_words` with the inverse of one scale a column, [1, columns]."""
    return to_words(x0, x1, x2, x3, tl.broadcast_to(high, x0.shape), tl.broadcast_to(low, x0.shape), F)


@triton.jit
def _store_rows(a, b, scale, codes_ptr, r, p, rows, left, cols, EVEN: tl.constexpr, F: tl.constexpr):
    """Quantise rows of one group of 128 columns by their scales."""
    high, low = inverse(scale[:, None], F)
    _store_codes(a, b, high, low, codes_ptr, r, p, rows, left, cols, EVEN, F)


@triton.jit
def _store_codes(a, b, high, low, codes_ptr, r, p, rows, left, cols, EVEN: tl.constexpr, F: tl.constexpr):
    """Quantise a pair with given inverse scales, [rows, 1] or [1, columns], into a byte matrix with rows of `cols`."""
    x, y = split_pair(a, b, True, F)
    high, low = tl.broadcast_to(high, x.shape), tl.broadcast_to(low, x.shape)
    if F.plain:
        offset = r[:, None] * cols + 2 * p[None, :]
        in_rows = (r < rows)[:, None]
        tl.store(codes_ptr + offset, to_bytes(x, high, low, F), mask=in_rows & (2 * p < left)[None, :])
        tl.store(codes_ptr + offset + 1, to_bytes(y, high, low, F), mask=in_rows & (2 * p + 1 < left)[None, :])
    else:
        pairs_ptr = codes_ptr.to(tl.pointer_type(tl.int16)) + r[:, None] * (cols // 2) + p[None, :]
        mask = None if EVEN else (r < rows)[:, None] & (2 * p < left)[None, :]
        tl.store(pairs_ptr, to_byte_pairs(x, y, high, low, F), mask=mask)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_stride):
    """One 128x128 tile of bytes."""
    r = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    c = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    tile = tl.load(x_ptr + r[:, None] * x_stride + c[None, :], mask=mask, other=0)
    tl.store(out_ptr + c[:, None] * rows + r[None, :], tl.trans(tile), mask=tl.trans(mask))
