"""Every place in a grid is widened before anything is computed of it: an offset above 2^31 would wrap around in 32 bits.

Read from the sources, since no CPU test can hold a matrix of that size; the sizes themselves run on a GPU (tests/gpu/test_fp8_kernels.py).
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "jetrl_megatron"
PLACES = ("program_id", "num_programs")


def narrow_places(source: str) -> tuple[list[int], int]:
    """(lines that use a place in the grid otherwise than as `tl.program_id(...).to(tl.int64)`, places in all)."""
    tree = ast.parse(source)
    widened = {
        id(node.func.value.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and isinstance(node.func.value, ast.Call)
        and [ast.unparse(word) for word in node.args] == ["tl.int64"]
        and not node.keywords
    }
    named = [
        n for n in ast.walk(tree) if (isinstance(n, ast.Attribute) and n.attr in PLACES) or (isinstance(n, ast.Name) and n.id in PLACES)
    ]
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and any(a.name in PLACES for a in n.names)]
    narrow = [n.lineno for n in [*named, *imported] if id(n) not in widened]
    return narrow, len(named)


KERNELS = sorted(path for path in PACKAGE.rglob("*.py") if "triton.jit" in path.read_text())


def test_the_files_with_kernels_are_those_that_say_so():
    assert KERNELS and all(path.name.startswith("triton_") for path in KERNELS)
    assert sum(narrow_places(path.read_text())[1] for path in KERNELS) >= 10


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_places_in_a_grid_are_64_bit_before_they_are_multiplied(path):
    lines, _ = narrow_places(path.read_text())
    assert not lines, f"{path.name}, lines {lines}: write tl.program_id(...).to(tl.int64)"


@pytest.mark.parametrize(
    "line",
    [
        "r = tl.program_id(0) * 128",
        "r = (tl.program_id(0) * 128).to(tl.int64)",
        "r = tl.program_id(0).to(tl.int32) * 128",
        "r = tl.num_programs(0) * 32",
        "from triton.language import program_id",
        "place = tl.program_id",
    ],
)
def test_the_check_sees_what_is_narrow(line):
    assert narrow_places(line)[0] == [1]
    assert narrow_places("r = tl.program_id(0).to(tl.int64) * 128") == ([], 1)
