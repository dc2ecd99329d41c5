"""The fingerprint `mix` on a GPU: one kernel reads a tensor's bytes once, where they lie, and adds up both lanes.

    word i = bytes 8 i .. 8 i + 7 of the elements in row-major order, little-endian, zeros behind the end
    m = ((i + 1) * PLACE ^ word) * FIRST;  m = (m ^ m >> 31) * SECOND;  lane += m ^ m >> 29        modulo 2^64, `>>` copies the sign

Enters: a tensor, contiguous or [rows, cols] with neighbouring columns, of any dtype, at any address. Leaves: two sums, added to two words
on the device; nobody waits. Invariant: the sums of fingerprint.py, bit for bit. Sums modulo 2^64 do not depend on their order, so that
neither tiles nor atomics can change them. Any other arrangement is copied first.
Left out: the number of bytes, which the host adds; what a sum looks like as text (fingerprint.py).
"""

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from jetrl_megatron.rollout.fingerprint import flat_bytes

BLOCK = 1024
"""Words of one tile: 8 KiB, of one row or of several short ones."""
PROGRAMS = 1056
"""Programs at most, eight for each multiprocessor of an H100 or H200: each takes neighbouring tiles."""


def add_mixed_sums(tensor: torch.Tensor, lanes: Sequence[tuple[int, int, int]], sums: torch.Tensor) -> None:
    """Add the sums of a tensor's words to sums [2] int64 on its device, queued on the current stream.

    lanes: (place, first, second) of each of two lanes, signed 64-bit.
    """
    raw, rows, row_bytes, stride = _rectangle(tensor)
    if not raw.numel():
        return
    unit = gcd(raw.data_ptr(), row_bytes, stride, 8)
    wraps = rows > 1 and row_bytes % 8 != 0
    num_rows, extent = (1, rows * row_bytes) if wraps else (rows, row_bytes)
    # Plain integers: `triton.cdiv` and `next_power_of_2` cost more on the host than all the rest of this function.
    row_words = -(-extent // 8)
    cols = min(BLOCK, max(16, 1 << (row_words - 1).bit_length()))
    per_row = -(-row_words // cols)
    tiles = -(-num_rows // (BLOCK // cols)) * per_row
    turns = -(-tiles // PROGRAMS)
    mix_kernel[(-(-tiles // turns),)](
        raw, sums, tiles, turns, per_row, num_rows, extent, row_words, row_bytes, stride,
        *lanes[0], *lanes[1], UNIT=unit, WRAPS=wraps, COLS=cols, SIZE=BLOCK, num_warps=8,
    )  # fmt: skip


def _rectangle(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return a tensor's bytes in place, or a copy's where they are no rectangle, with rows, bytes of a row, bytes from row to row."""
    whole = tensor.is_contiguous()
    if tensor.dim() and tensor.stride(-1) == 1 and (whole or tensor.dim() == 2):
        raw = tensor.detach().view(torch.uint8)
        return (raw, 1, raw.numel(), 0) if whole else (raw, raw.shape[0], raw.shape[1], raw.stride(0))
    raw = flat_bytes(tensor)
    return raw, 1, raw.numel(), 0


@triton.jit(do_not_specialize=["tiles", "turns", "per_row", "rows", "extent", "row_words", "row_bytes", "stride"])
def mix_kernel(
    data_ptr, sums_ptr, tiles, turns, per_row, rows, extent, row_words, row_bytes, stride,
    PLACE_A: tl.constexpr, FIRST_A: tl.constexpr, SECOND_A: tl.constexpr,
    PLACE_B: tl.constexpr, FIRST_B: tl.constexpr, SECOND_B: tl.constexpr,
    UNIT: tl.constexpr, WRAPS: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """`turns` tiles of SIZE / COLS rows and COLS words; `per_row` of them lie side by side.

    rows of `extent` bytes, `row_words` words. WRAPS: one row, made of rows of `row_bytes` that end within words. UNIT: bytes that are read
    at once, a divisor of every address.
    """
    height: tl.constexpr = SIZE // COLS
    first = tl.program_id(0).to(tl.int64) * turns
    group = first // per_row
    chunk = first - group * per_row
    i = tl.arange(0, SIZE)
    r, c = i // COLS, i % COLS
    # Of a tile that begins at word 0: inside the loop a tile's own place is one number.
    inner = r.to(tl.int64) * row_words + c
    place_a, place_b = inner * PLACE_A, inner * PLACE_B
    rows_at = r.to(tl.int64) * stride
    words_at = rows_at // 8 + c
    a = tl.zeros((SIZE,), dtype=tl.int64)
    b = tl.zeros((SIZE,), dtype=tl.int64)
    for _ in range(tl.minimum(turns, tiles - first)):
        row, col = group * height, chunk * COLS
        inside = (r < rows - row) & (c < row_words - col)
        if UNIT == 8:
            word = tl.load(data_ptr.to(tl.pointer_type(tl.int64)) + (row * stride // 8 + col) + words_at, mask=inside, other=0)
        else:
            word = read_word(data_ptr, row * stride + rows_at, (col + c) * 8, inside, extent, row_bytes, stride, UNIT, WRAPS)
        start = row * row_words + col + 1
        a += tl.where(inside, mixed((start * PLACE_A + place_a) ^ word, FIRST_A, SECOND_A), 0)
        b += tl.where(inside, mixed((start * PLACE_B + place_b) ^ word, FIRST_B, SECOND_B), 0)
        chunk += 1
        group += tl.where(chunk == per_row, 1, 0)
        chunk = tl.where(chunk == per_row, 0, chunk)
    tl.atomic_add(sums_ptr, tl.sum(a, 0), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, tl.sum(b, 0), sem="relaxed")


@triton.jit
def read_word(data_ptr, rows_at, col_at, inside, extent, row_bytes, stride, UNIT: tl.constexpr, WRAPS: tl.constexpr):
    """Words made of UNIT bytes at a time, `rows_at` + `col_at` bytes away; if WRAPS, at byte `col_at` of all rows. Zeros outside."""
    if UNIT == 4:
        units_ptr = data_ptr.to(tl.pointer_type(tl.uint32))
    elif UNIT == 2:
        units_ptr = data_ptr.to(tl.pointer_type(tl.uint16))
    else:
        units_ptr = data_ptr
    word = col_at * 0
    for k in tl.static_range(8 // UNIT):
        in_row = col_at + k * UNIT
        at = rows_at + in_row
        if WRAPS:
            at = in_row + in_row // row_bytes * (stride - row_bytes)
        part = tl.load(units_ptr + at // UNIT, mask=inside & (in_row < extent), other=0)
        word |= part.to(tl.int64) << (8 * UNIT * k)
    return word


@triton.jit
def mixed(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The two multiplications of one lane."""
    x = x * FIRST
    x = (x ^ (x >> 31)) * SECOND
    return x ^ (x >> 29)
