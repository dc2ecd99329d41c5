"""The fingerprint `mix` on a GPU: one kernel reads the bytes of many tensors once, where they lie, and adds up both lanes of each.

    word i = bytes 8 i .. 8 i + 7 of a tensor's elements in row-major order, little-endian, zeros behind the end
    m = ((i + 1) * PLACE ^ word) * FIRST;  m = (m ^ m >> 31) * SECOND;  lane += m ^ m >> 29        modulo 2^64, `>>` copies the sign

Enters: where rectangles of bytes lie, any number of them, at any address. Leaves: two sums for each on the device; nobody waits. One launch
does all that are read in one way (8, 4, 2 or 1 bytes at once, rows that end within words or not), from a table that goes to the device
from pinned memory. Invariant: the sums of fingerprint.py, bit for bit. Sums modulo 2^64 do not depend on their order, so that neither tiles
nor atomics can change them.
Left out: who keeps the bytes until the kernel has read them, the number of bytes, which the host adds, and what a sum looks like as text
(fingerprint.py); how tiles fall to programs (tiles.py).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from jetrl_megatron.rollout.tiles import FIELDS, TILE_WORDS, Numbers, Place, cut


def mixed_sums(places: Sequence[Place], lanes: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """Return the sums of rectangles of bytes, [rectangles, 2] int64 on their device, queued on the current stream.

    lanes: (place, first, second) of each of two lanes, signed 64-bit.
    """
    sums = torch.zeros((len(places), 2), dtype=torch.int64, device=device)
    numbers, launches = cut(places)
    table = _sent(numbers, device)
    for launch in launches:
        mix_kernel[(launch.programs,)](
            table, sums, launch.entries_at, launch.starts_at, launch.tiles, launch.turns,
            *lanes[0], *lanes[1], UNIT=launch.unit, WRAPS=launch.wraps, COLS=launch.cols, SIZE=TILE_WORDS, FIELDS=FIELDS, num_warps=8,
        )  # fmt: skip
    return sums


def _sent(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """Return numbers on a device. torch keeps pinned memory until what was queued has read it."""
    table = torch.from_numpy(numbers)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit(do_not_specialize=["entries_at", "starts_at", "tiles", "turns"])
def mix_kernel(
    table_ptr, sums_ptr, entries_at, starts_at, tiles, turns,
    PLACE_A: tl.constexpr, FIRST_A: tl.constexpr, SECOND_A: tl.constexpr,
    PLACE_B: tl.constexpr, FIRST_B: tl.constexpr, SECOND_B: tl.constexpr,
    UNIT: tl.constexpr, WRAPS: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """`turns` of all `tiles`, of SIZE / COLS rows and COLS words each, rectangle by rectangle; see tiles.py for the table.

    UNIT: bytes that are read at once, a divisor of every address. WRAPS: a rectangle is one row, made of rows that end within words.
    """
    program = tl.program_id(0).to(tl.int64)
    tile = (program * turns).to(tl.int32)  # of all tiles, which are counted in 32 bits (tiles.py); bytes and words are in 64
    end = tl.minimum(tile + turns, tiles)
    entry_ptr = table_ptr + entries_at + tl.load(table_ptr + starts_at + program) * FIELDS
    height: tl.constexpr = SIZE // COLS
    i = tl.arange(0, SIZE)
    r, c = i // COLS, i % COLS
    while tile < end:
        tiles_to, first = tl.load(entry_ptr + 2).to(tl.int32), tl.load(entry_ptr + 3).to(tl.int32)
        per_row = tl.load(entry_ptr + 4).to(tl.int32)
        address, rows, extent = tl.load(entry_ptr), tl.load(entry_ptr + 5), tl.load(entry_ptr + 6)
        row_words, row_bytes, stride = tl.load(entry_ptr + 7), tl.load(entry_ptr + 8), tl.load(entry_ptr + 9)
        turns_here = tl.minimum(end, tiles_to) - tile
        group = (tile - first) // per_row
        chunk = tile - first - group * per_row
        # Of a tile that begins at word 0: inside the loop a tile's own place is one number.
        inner = r.to(tl.int64) * row_words + c
        place_a, place_b = inner * PLACE_A, inner * PLACE_B
        rows_at = r.to(tl.int64) * stride
        words_ptr = address.to(tl.pointer_type(tl.int64)) + (rows_at // 8 + c)
        a = tl.zeros((SIZE,), dtype=tl.int64)
        b = tl.zeros((SIZE,), dtype=tl.int64)
        for _ in range(turns_here):
            row, col = group.to(tl.int64) * height, chunk.to(tl.int64) * COLS
            inside = (r < rows - row) & (c < row_words - col)
            if UNIT == 8:
                word = tl.load(words_ptr + (row * stride // 8 + col), mask=inside, other=0)
            else:
                word = read_word(address, row * stride + rows_at, (col + c) * 8, inside, extent, row_bytes, stride, UNIT, WRAPS)
            start = row * row_words + col + 1
            a += tl.where(inside, mixed((start * PLACE_A + place_a) ^ word, FIRST_A, SECOND_A), 0)
            b += tl.where(inside, mixed((start * PLACE_B + place_b) ^ word, FIRST_B, SECOND_B), 0)
            chunk += 1
            group += tl.where(chunk == per_row, 1, 0)
            chunk = tl.where(chunk == per_row, 0, chunk)
        number = tl.load(entry_ptr + 1)
        tl.atomic_add(sums_ptr + number * 2, tl.sum(a, 0), sem="relaxed")
        tl.atomic_add(sums_ptr + number * 2 + 1, tl.sum(b, 0), sem="relaxed")
        tile += turns_here
        entry_ptr += FIELDS


@triton.jit
def read_word(address, rows_at, col_at, inside, extent, row_bytes, stride, UNIT: tl.constexpr, WRAPS: tl.constexpr):
    """Words made of UNIT bytes at a time, `rows_at` + `col_at` bytes away; if WRAPS, at byte `col_at` of all rows. Zeros outside."""
    if UNIT == 4:
        units_ptr = address.to(tl.pointer_type(tl.uint32))
    elif UNIT == 2:
        units_ptr = address.to(tl.pointer_type(tl.uint16))
    else:
        units_ptr = address.to(tl.pointer_type(tl.uint8))
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
