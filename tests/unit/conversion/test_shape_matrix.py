"""The published shapes on disk; only with `-m shapes`, since it moves about a terabyte and needs up to 22 GB of disk."""

import pytest

from tests.unit.conversion.shape_matrix import LEGAL, PIPELINES, run_model
from tests.unit.conversion.shapes import PUBLISHED


@pytest.mark.shapes
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", LEGAL)
def test_every_layout_of_a_published_shape_is_bit_exact_or_refused(tmp_path, name, fp8):
    cells = list(run_model(name, fp8, tmp_path))
    exact = [cell for cell in cells if cell.outcome == "bit-exact"]
    assert len(cells) == 4 * len(PIPELINES) + 1
    assert len(exact) == len(LEGAL[name][int(fp8)]) * len(PIPELINES) + (not fp8)
    assert not list(tmp_path.iterdir())


def test_the_matrix_is_made_of_published_shapes():
    assert LEGAL.keys() <= PUBLISHED.keys() and len(LEGAL) == 10
