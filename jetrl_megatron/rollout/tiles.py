"""Rectangles of bytes, cut into tiles of words that fall to a kernel's programs in equal numbers: the host's half of triton_fingerprint.py.

Enters: where rectangles lie, as numbers, of any size and alignment. Leaves: one table of int64 for the device, and a `Launch` for each way
of reading that occurs in it. Tiles are numbered through, one rectangle behind the other; program p has `turns` of them from p * turns on,
so that 600 MB beside 512 bytes leave no program with more to do than another.
Left out: what is done with the words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64]
Place = tuple[int, int, int, int]
"""Address, rows, bytes of a row, bytes from row to row."""
TILE_WORDS = 1024
"""Words of one tile: 8 KiB, of one row or of several short ones."""
PROGRAMS = 1056
"""Programs of a launch at most, eight for each multiprocessor of an H100 or H200: each takes neighbouring tiles."""
FIELDS = 10
"""Numbers of one rectangle in the table: those of `_entries` in their order."""
_MOST_TILES = 1 << 30
"""Of one launch, 8 TiB: the kernel counts them in 32 bits."""
_WIDTHS = np.array([16, 32, 64, 128, 256, 512])
"""Columns of a tile in words where a row of several has no more, else TILE_WORDS."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All rectangles that are read in one way."""

    unit: int
    """Bytes that are read at once, 8, 4, 2 or 1: a divisor of every address and distance."""
    wraps: bool
    """Whether rows end within words: the kernel takes a rectangle's rows for one."""
    cols: int
    """Words of a tile's row."""
    entries_at: int
    """Where the first rectangle's numbers lie in the table."""
    starts_at: int
    """Where the table says with which of these rectangles each program begins."""
    tiles: int
    turns: int
    """Tiles of a program; the last may have fewer."""
    programs: int


def place_of(tensor: Tensor) -> Place | None:
    """Return where a tensor's bytes lie in row-major order; None where they are no rectangle."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), 1, tensor.nbytes, 0
    if tensor.dim() != 2 or tensor.stride(1) != 1:
        return None
    size, (rows, cols) = tensor.element_size(), tensor.shape
    return tensor.data_ptr(), rows, cols * size, tensor.stride(0) * size


def cut(places: Sequence[Place]) -> tuple[Numbers, list[Launch]]:
    """Return the table, [words] int64, and what is to be launched on it. Rectangles go by their number; an empty one has no tile."""
    address, rows, row_bytes, stride = np.array(places, dtype=np.int64).reshape(-1, 4).T
    odd = address | row_bytes | stride | 8
    wraps = (rows > 1) & (row_bytes % 8 != 0)
    entries, shift = _entries(address, rows, row_bytes, stride, wraps)
    kinds = np.where(entries[:, 2] > 0, (odd & -odd) << 8 | wraps << 4 | shift, 0)
    parts: list[Numbers] = [np.zeros(0, dtype=np.int64)]
    launches: list[Launch] = []
    end = 0
    for kind in sorted(set(kinds.tolist()) - {0}):
        chosen = entries[kinds == kind]
        tiles_to = chosen[:, 2] = np.cumsum(chosen[:, 2])
        chosen[1:, 3] = tiles_to[:-1]
        tiles = int(tiles_to[-1])
        assert tiles <= _MOST_TILES, tiles
        turns = -(-tiles // PROGRAMS)
        programs = -(-tiles // turns)
        parts += [chosen.reshape(-1), np.searchsorted(tiles_to, np.arange(programs) * turns, side="right")]
        launches.append(
            Launch(
                unit=kind >> 8,
                wraps=bool(kind >> 4 & 1),
                cols=1 << (kind & 15),
                entries_at=end,
                starts_at=end + chosen.size,
                tiles=tiles,
                turns=turns,
                programs=programs,
            )
        )
        end += chosen.size + programs
    return np.concatenate(parts), launches


def _entries(address: Numbers, rows: Numbers, row_bytes: Numbers, stride: Numbers, wraps: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    """Return [rectangles, FIELDS], with each one's own tiles and 0 in the two columns that count them through, and log2 of its `cols`."""
    num_rows = np.where(wraps, 1, rows)
    extent = np.where(wraps, rows * row_bytes, row_bytes)
    row_words = (extent + 7) >> 3
    # One row has one width, so that all that is contiguous is read in one way.
    shift = np.where(num_rows == 1, TILE_WORDS.bit_length() - 1, 4 + np.searchsorted(_WIDTHS, row_words))
    per_row = -(-row_words >> shift)
    tiles = -(-num_rows // (TILE_WORDS >> shift)) * per_row
    number, none = np.arange(len(rows)), np.zeros_like(rows)
    return np.stack([address, number, tiles, none, per_row, num_rows, extent, row_words, row_bytes, stride], axis=1), shift
