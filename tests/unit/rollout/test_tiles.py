"""Every tile of every rectangle falls to one program, programs have equal numbers of them, and no read begins beside its multiple."""

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_megatron.rollout import tiles
from jetrl_megatron.rollout.tiles import FIELDS, PROGRAMS, TILE_WORDS, cut, place_of


def program(table, launch, number):
    """What the kernel does as program `number`: yields (rectangle, its tile) one by one."""
    tile = number * launch.turns
    end = min(tile + launch.turns, launch.tiles)
    entry = launch.entries_at + int(table[launch.starts_at + number]) * FIELDS
    while tile < end:
        _, rectangle, tiles_to, first = (int(x) for x in table[entry : entry + 4])
        here = min(end, tiles_to) - tile
        assert here > 0, "a program begins in a rectangle that has its first tile"
        yield from ((rectangle, tile + n - first) for n in range(here))
        tile, entry = tile + here, entry + FIELDS


def tiles_of(place, launch):
    _, rows, row_bytes, _ = place
    rows, row_bytes = (1, rows * row_bytes) if launch.wraps else (rows, row_bytes)
    return ceil(rows / (TILE_WORDS // launch.cols)) * ceil(row_bytes / (8 * launch.cols))


PLACES = st.tuples(st.integers(1, 4000), st.integers(0, 70), st.integers(0, 40_000), st.integers(0, 50_000))


@settings(max_examples=100, deadline=None)
@given(st.lists(PLACES, max_size=40), st.sampled_from([1, 3, 100]))
def test_every_tile_falls_to_one_program(places, programs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "PROGRAMS", programs)
        table, launches = cut(places)
    seen = {}
    for launch in launches:
        fallen = [list(program(table, launch, number)) for number in range(launch.programs)]
        assert launch.programs <= programs and all(len(mine) == launch.turns for mine in fallen[:-1]) and fallen[-1]
        for rectangle, tile in (pair for mine in fallen for pair in mine):
            seen.setdefault(rectangle, (launch, []))[1].append(tile)
    assert sorted(seen) == [number for number, (_, rows, row_bytes, _) in enumerate(places) if rows * row_bytes]
    for number, (launch, found) in seen.items():
        address, _, row_bytes, stride = places[number]
        assert found == list(range(tiles_of(places[number], launch)))
        assert address % launch.unit == row_bytes % launch.unit == stride % launch.unit == 0


def test_a_large_tensor_beside_small_ones_leaves_no_program_with_more():
    small = [(1 << 40 | n << 12, 1, 512, 0) for n in range(1000)]
    table, (launch,) = cut([*small, (1 << 41, 1, 6 * 10**11, 0), *small])
    assert launch.programs == PROGRAMS and launch.turns * launch.programs - launch.tiles < PROGRAMS + launch.turns
    assert launch.tiles == 2000 + -(-6 * 10**11 // 8192)
    last = list(program(table, launch, PROGRAMS - 1))
    assert len(last) <= launch.turns and last[-1] == (2000, 0)


def test_what_is_read_at_once_begins_at_a_multiple_of_its_size():
    """A CPU reads at any address; a GPU does not."""
    base = torch.zeros(64, 80, dtype=torch.uint8)
    parts = [base, base[:, 8:24], base[:, 4:20], base[:, 2:18], base[:, 1:17], base[:, :12], base.view(-1)[4:12], base.view(-1)[6:]]
    assert base.data_ptr() % 8 == 0
    launches = [cut([place_of(part)])[1][0] for part in parts]
    assert [launch.unit for launch in launches] == [8, 8, 4, 2, 1, 4, 4, 2]
    assert [launch.wraps for launch in launches] == [part.shape == (64, 12) for part in parts]


def test_a_place_is_bytes_in_row_major_order_or_none():
    base = torch.zeros(6, 10, dtype=torch.bfloat16)
    at = base.data_ptr()
    assert place_of(base) == (at, 1, 120, 0) and place_of(base[2:4]) == (at + 40, 1, 40, 0)
    assert place_of(base[1:, 3:7]) == (at + 26, 5, 8, 20) and place_of(base[1, 2]) == (at + 24, 1, 2, 0)
    assert place_of(base[:1].expand(4, 10)) == (at, 4, 20, 0)
    assert [place_of(part) for part in (base.t(), base[:, 1], base[:, ::2], base.view(2, 3, 10)[:, :2])] == [None] * 4
