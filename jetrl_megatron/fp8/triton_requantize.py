"""FP8 codes quantised anew along the other axis on the GPU, byte-equal to quantize.py: what `SavedActivation.fp8_requant` computes.

Enters: codes [R, C] E4M3 with FP32 scales of 1x128 groups, none negative. Leaves: the transpose [C, R128] in 1x128 groups or 128x128
blocks. Equation: quantize(x^T) with x = code * scale in FP32; x is never written to memory. Layouts and invariants: those of
triton_quantize.py.
x is no BF16 number, so the short division of triton_cast.py (`quotient`) is not enough; `divided` gives the codes of a true division.
Legend: R rows and C columns of x; R128 is R rounded up to a multiple of 128; one program owns a 128x128 tile. Part j of four has the rows
4 i + j; a word has the codes of four neighbours, columns 4 q to 4 q + 3 of a row where it is read, rows 4 i to 4 i + 3 of a column where it
is written.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled, num_blocks
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK
from jetrl_megatron.fp8.triton_cast import cast_format, contiguous_rows, divided, group_scale, pack_words, reciprocal
from jetrl_megatron.fp8.triton_quantize import BLOCKED, scale_mode, scaled_buffer

WARPS = 4
"""Of a program: a thread has 128 values in 128 registers. Twice the warps take a fifth longer, fewer columns a program as long."""


def requantize_transposed(
    x: BlockScaled, *, scale_format: ScaleFormat = ScaleFormat.fp32, t_block: tuple[int, int] = ROW_BLOCK
) -> BlockScaled:
    """`quantize.requantize_transposed` without a full-precision copy in memory; x in E4M3.

    Raises ValueError as `contiguous_rows` does, and on another `t_block` than (1, 128) and (128, 128).
    """
    assert x.block == ROW_BLOCK and x.data.dtype is torch.float8_e4m3fn, (x.block, x.data.dtype)
    rows, cols = x.shape
    mode = scale_mode(t_block)
    out = scaled_buffer(None, mode, cols, num_blocks(rows, GROUP) * GROUP, x.data.dtype, x.data.device)
    if rows and cols:
        codes = contiguous_rows(x.data.view(torch.uint8))
        in_words = cols % 4 == 0 and codes.stride(0) % 4 == 0 and codes.data_ptr() % 4 == 0
        requantize_kernel[(num_blocks(rows, GROUP), num_blocks(cols, GROUP))](
            codes.view(torch.int32) if in_words else codes,
            x.scale,
            rows,
            cols,
            codes.stride(0),
            *x.scale.stride(),
            out.data.view(torch.int32),
            out.scale,
            *out.scale.stride(),
            IN_WORDS=in_words,
            BLOCKS=mode == BLOCKED,
            EVEN=rows % GROUP == 0 and cols % GROUP == 0,
            F=cast_format(False, x.data.dtype, scale_format),
            num_warps=WARPS,
        )
    return out


@triton.jit(do_not_specialize=["rows", "stride"])
def requantize_kernel(
    codes_ptr, scale_ptr, rows, cols, stride, scale_stride_r, scale_stride_c, t_codes_ptr, t_scale_ptr, t_scale_stride_r, t_scale_stride_c,
    IN_WORDS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """One 128x128 tile. Its values are made of its codes twice, for scales and for new codes, since registers do not hold all of them."""
    block_r, block_c, row_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(0).to(tl.int64)
    first_r, first_c = block_r * 128, block_c * 128
    rows_left, cols_left = (rows - first_r).to(tl.int32), (cols - first_c).to(tl.int32)
    offset = first_r * stride + first_c
    codes_ptr += offset // 4 if IN_WORDS else offset
    scale_ptr += first_r * scale_stride_r + block_c * scale_stride_c
    i, q = tl.arange(0, 32), tl.arange(0, 32)
    w0, s0 = _load_part(codes_ptr, scale_ptr, 4 * i, q, rows_left, cols_left, stride, scale_stride_r, IN_WORDS, EVEN, F)
    w1, s1 = _load_part(codes_ptr, scale_ptr, 4 * i + 1, q, rows_left, cols_left, stride, scale_stride_r, IN_WORDS, EVEN, F)
    w2, s2 = _load_part(codes_ptr, scale_ptr, 4 * i + 2, q, rows_left, cols_left, stride, scale_stride_r, IN_WORDS, EVEN, F)
    w3, s3 = _load_part(codes_ptr, scale_ptr, 4 * i + 3, q, rows_left, cols_left, stride, scale_stride_r, IN_WORDS, EVEN, F)
    a0, b0, c0, d0 = _values(w0 & 0x7F7F7F7F, s0, F)
    a1, b1, c1, d1 = _values(w1 & 0x7F7F7F7F, s1, F)
    a2, b2, c2, d2 = _values(w2 & 0x7F7F7F7F, s2, F)
    a3, b3, c3, d3 = _values(w3 & 0x7F7F7F7F, s3, F)
    amax_a, amax_b = _largest(a0, a1, a2, a3), _largest(b0, b1, b2, b3)
    amax_c, amax_d = _largest(c0, c1, c2, c3), _largest(d0, d1, d2, d3)
    amax_a, amax_b, amax_c, amax_d = tl.reduce((amax_a, amax_b, amax_c, amax_d), 0, _larger_of_each)
    if BLOCKS:
        amax = tl.reduce(_larger(_larger(amax_a, amax_b), _larger(amax_c, amax_d)), 0, _larger)
        block_scale = _scale_of(amax, F)
        scale_a = tl.zeros_like(amax_a) + block_scale
        scale_b, scale_c, scale_d = scale_a, scale_a, scale_a
        tl.store(t_scale_ptr + block_c * t_scale_stride_r + block_r * t_scale_stride_c, block_scale)
    else:
        scale_a, scale_b, scale_c, scale_d = _scale_of(amax_a, F), _scale_of(amax_b, F), _scale_of(amax_c, F), _scale_of(amax_d, F)
    a0, b0, c0, d0 = _values(w0, s0, F)
    a1, b1, c1, d1 = _values(w1, s1, F)
    a2, b2, c2, d2 = _values(w2, s2, F)
    a3, b3, c3, d3 = _values(w3, s3, F)
    pitch = row_blocks * 32
    t_codes_ptr += first_c * pitch + block_r * 32
    column = 4 * q
    ptrs = t_codes_ptr + (column[None, :] * pitch.to(tl.int32) + i[:, None])
    tl.store(ptrs, _quantised(a0, a1, a2, a3, scale_a, F), mask=None if EVEN else (column < cols_left)[None, :])
    tl.store(ptrs + pitch, _quantised(b0, b1, b2, b3, scale_b, F), mask=None if EVEN else (column + 1 < cols_left)[None, :])
    tl.store(ptrs + 2 * pitch, _quantised(c0, c1, c2, c3, scale_c, F), mask=None if EVEN else (column + 2 < cols_left)[None, :])
    tl.store(ptrs + 3 * pitch, _quantised(d0, d1, d2, d3, scale_d, F), mask=None if EVEN else (column + 3 < cols_left)[None, :])
    if not BLOCKS:
        c = tl.arange(0, 128)
        t_scale_ptr += block_r * t_scale_stride_c + first_c * t_scale_stride_r
        scales = tl.reshape(tl.join(tl.join(scale_a, scale_c), tl.join(scale_b, scale_d)), (128,))
        tl.store(t_scale_ptr + c * t_scale_stride_r, scales, mask=None if EVEN else c < cols_left)


@triton.jit
def _load_part(codes_ptr, scale_ptr, r, q, rows_left, cols_left, stride, scale_stride_r, IN_WORDS: tl.constexpr, EVEN: tl.constexpr,
               F: tl.constexpr):  # fmt: skip
    """Words of the rows r and, for each word, the scale of its row; zeros outside. No thread asks another for a scale."""
    row, word = r[:, None], q[None, :]
    in_rows = (row < rows_left) & (word >= 0)
    scales = tl.load(scale_ptr + (row * scale_stride_r + 0 * word), mask=None if EVEN else in_rows, other=None if EVEN else 0.0)
    if IN_WORDS:
        inside = in_rows & (4 * word < cols_left)
        words = tl.load(codes_ptr + (_unknown(row * (stride // 4), F) + word), mask=None if EVEN else inside, other=None if EVEN else 0)
    else:
        words = tl.zeros([32, 32], tl.int32)
        for k in tl.static_range(4):
            column = 4 * word + k
            code = tl.load(codes_ptr + (row * stride + column), mask=in_rows & (column < cols_left), other=0)
            words |= code.to(tl.int32) << (8 * k)
    return words, scales


@triton.jit
def _unknown(offset, F: tl.constexpr):
    """An offset of which the compiler knows nothing: it then gives a warp one row of words, where it would give a thread four words."""
    if not F.soft:
        offset = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [offset], dtype=tl.int32, is_pure=True, pack=1)
    return offset


@triton.jit
def _values(words, scales, F: tl.constexpr):
    """FP32 values of a word's four codes times their row's scale."""
    if F.soft:
        a, b = _soft_value(words), _soft_value(words >> 8)
        c, d = _soft_value(words >> 16), _soft_value(words >> 24)
    else:
        unpack: tl.constexpr = (
            "{ .reg .b16 l, h, e, f; .reg .b32 p; mov.b32 {l, h}, $4; "
            "cvt.rn.f16x2.e4m3x2 p, l; mov.b32 {e, f}, p; cvt.f32.f16 $0, e; cvt.f32.f16 $1, f; "
            "cvt.rn.f16x2.e4m3x2 p, h; mov.b32 {e, f}, p; cvt.f32.f16 $2, e; cvt.f32.f16 $3, f; }"
        )
        kinds: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        a, b, c, d = tl.inline_asm_elementwise(unpack, "=f,=f,=f,=f,r", [words], dtype=kinds, is_pure=True, pack=1)
    return a * scales, b * scales, c * scales, d * scales


@triton.jit
def _soft_value(word):
    """The lowest code of a word, E4M3, as FP32; the interpreter's cast takes NaN for a number."""
    value = (word & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.where((word & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _larger(x, y):
    """The larger of two magnitudes; NaN where one is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger_of_each(xa, xb, xc, xd, ya, yb, yc, yd):
    return _larger(xa, ya), _larger(xb, yb), _larger(xc, yc), _larger(xd, yd)


@triton.jit
def _largest(x0, x1, x2, x3):
    """The largest of four magnitudes."""
    return _larger(_larger(x0, x1), _larger(x2, x3))


@triton.jit
def _scale_of(amax, F: tl.constexpr):
    """Scales from largest magnitudes; zero times infinity may be a NaN with a sign, which as an integer would be the smallest."""
    return group_scale(amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF, F)


@triton.jit
def _quantised(x0, x1, x2, x3, scale, F: tl.constexpr):
    """Words of four rows' codes, [rows / 4, columns / 4], by one scale a column."""
    inverse = reciprocal(scale, F)
    scale, inverse = tl.broadcast_to(scale[None, :], x0.shape), tl.broadcast_to(inverse[None, :], x0.shape)
    q0, q1 = divided(x0, scale, inverse, F), divided(x1, scale, inverse, F)
    q2, q3 = divided(x2, scale, inverse, F), divided(x3, scale, inverse, F)
    return pack_words(q0, q1, q2, q3, F)
